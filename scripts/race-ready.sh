#!/bin/sh
# Says what is missing for the race detector, which needs cgo and therefore a C compiler.
set -eu
cc=$(go env CC)
if [ "$(go env CGO_ENABLED)" = 1 ] && command -v "${cc%% *}" >/dev/null; then
	exit 0
fi
echo "the race detector needs cgo and a C compiler: unset CGO_ENABLED, and" >&2
echo "  Debian, Ubuntu:  apt-get install gcc libc6-dev" >&2
echo "  Fedora, RHEL:    dnf install gcc" >&2
echo "  macOS:           xcode-select --install" >&2
exit 1
