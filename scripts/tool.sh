#!/bin/sh
# Prints the path of a program that tests start: tool.sh PROGRAM DEBIAN-PACKAGE OTHER-PACKAGE [ARGUMENT…]. With arguments,
# it must run with them. If there is none, it installs the distribution's package first, and says so. If that is not
# possible, it prints nothing, and the tests that need the program are skipped. In CI that is an error.
set -eu

PATH=$PATH:/usr/sbin:/usr/local/sbin:/opt/homebrew/bin
as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}
install() {
	if command -v apt-get >/dev/null; then
		as_root apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 update -qq
		as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "$1"
	elif command -v dnf >/dev/null; then
		as_root dnf install -y -q "$2"
	elif command -v brew >/dev/null; then
		brew install --quiet "$2"
	else
		return 1
	fi
}

program=$1 debian=$2 other=$3
shift 3
found() {
	command -v "$program" >/dev/null && { [ $# = 0 ] || "$program" "$@" >/dev/null 2>&1; }
}
if ! found "$@"; then
	echo "tool.sh: no $program found, installing the distribution's $debian" >&2
	install "$debian" "$other" >/dev/null </dev/null || true
fi
if found "$@"; then
	command -v "$program"
else
	echo "tool.sh: still no $program of $debian: its tests are skipped" >&2
	[ -z "${CI:-}" ] || exit 1
fi
