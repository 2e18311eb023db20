#!/bin/sh
# Prints the path of a Python with psycopg2, with which the tests of examples/sql run; see tool.sh. ONCEQ_TEST_PYTHON, when
# set, is printed as it is.
set -eu
if [ -n "${ONCEQ_TEST_PYTHON:-}" ]; then echo "$ONCEQ_TEST_PYTHON"; exit 0; fi
for python in python3 /usr/bin/python3; do
	if command -v "$python" >/dev/null && "$python" -c 'import psycopg2' 2>/dev/null; then command -v "$python"; exit 0; fi
done
exec "$(dirname "$0")/tool.sh" /usr/bin/python3 python3-psycopg2 python3-psycopg2 -c 'import psycopg2'
