#!/bin/sh
# Prints the path of redis-server, which the tests of examples/moving start. Where there is none, installs the
# distribution's package first, and says so; where that is not possible prints nothing, and the tests that want it are
# skipped. In CI that is an error.
#
# ONCEQ_TEST_REDIS, when set, is printed as it is.
set -eu

if [ -n "${ONCEQ_TEST_REDIS:-}" ]; then
	echo "$ONCEQ_TEST_REDIS"
	exit 0
fi

PATH=$PATH:/usr/sbin:/usr/local/sbin:/opt/homebrew/bin
as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}
install() {
	if command -v apt-get >/dev/null; then
		as_root apt-get update -qq
		as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends redis-server
	elif command -v dnf >/dev/null; then
		as_root dnf install -y -q redis
	elif command -v brew >/dev/null; then
		brew install --quiet redis
	else
		return 1
	fi
}

if ! command -v redis-server >/dev/null; then
	echo "redis.sh: no redis-server found, installing the distribution's package" >&2
	install >/dev/null </dev/null || true
fi
if ! command -v redis-server; then
	echo "redis.sh: still no redis-server: its tests are skipped" >&2
	[ -z "${CI:-}" ] || exit 1
fi
