#!/bin/sh
# Prints the path of a chromium, which onceqweb/browsertest drives; see tool.sh. ONCEQ_TEST_CHROMIUM, when set, is printed as
# it is.
set -eu
if [ -n "${ONCEQ_TEST_CHROMIUM:-}" ]; then echo "$ONCEQ_TEST_CHROMIUM"; exit; fi
for name in chromium chromium-browser google-chrome; do
	if command -v "$name"; then exit; fi
done
exec "$(dirname "$0")/tool.sh" chromium chromium chromium
