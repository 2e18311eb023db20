#!/bin/sh
# Prints the path of pgbouncer; see tool.sh. ONCEQ_TEST_PGBOUNCER, when set, is printed as it is.
set -eu
if [ -n "${ONCEQ_TEST_PGBOUNCER:-}" ]; then echo "$ONCEQ_TEST_PGBOUNCER"; else exec "$(dirname "$0")/tool.sh" pgbouncer pgbouncer pgbouncer; fi
