#!/bin/sh
# Prints the path of pgbouncer. Where there is none, installs the distribution's package first, and says so; where that
# is not possible prints nothing, and the tests that want it are skipped. In CI that is an error.
#
# ONCEQ_TEST_PGBOUNCER, when set, is printed as it is.
set -eu

if [ -n "${ONCEQ_TEST_PGBOUNCER:-}" ]; then
	echo "$ONCEQ_TEST_PGBOUNCER"
	exit 0
fi

PATH=$PATH:/usr/sbin:/usr/local/sbin:/opt/homebrew/bin
as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}
install() {
	if command -v apt-get >/dev/null; then
		as_root apt-get update -qq
		as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends pgbouncer
	elif command -v dnf >/dev/null; then
		as_root dnf install -y -q pgbouncer
	elif command -v brew >/dev/null; then
		brew install --quiet pgbouncer
	else
		return 1
	fi
}

if ! command -v pgbouncer >/dev/null; then
	echo "pgbouncer.sh: no pgbouncer found, installing the distribution's package" >&2
	install >/dev/null </dev/null || true
fi
if ! command -v pgbouncer; then
	echo "pgbouncer.sh: still no pgbouncer: its tests are skipped" >&2
	[ -z "${CI:-}" ] || exit 1
fi
