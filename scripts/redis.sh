#!/bin/sh
# Prints the path of redis-server, which the tests of examples/moving start; see tool.sh. ONCEQ_TEST_REDIS, when set, is
# printed as it is.
set -eu
if [ -n "${ONCEQ_TEST_REDIS:-}" ]; then echo "$ONCEQ_TEST_REDIS"; else exec "$(dirname "$0")/tool.sh" redis-server redis-server redis; fi
