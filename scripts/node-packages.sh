#!/bin/sh
# Prints a directory with the Node packages of examples/moving/package.json in node_modules, and with bin/node, a Node
# that is new enough for them. npm fetches them once into the user's cache directory. If there is no npm, or no
# registry can be reached, it prints nothing, and the tests that need the packages are skipped. In CI that is an error.
#
# ONCEQ_TEST_NODE, when set, is printed as it is.
set -eu

if [ -n "${ONCEQ_TEST_NODE:-}" ]; then
	echo "$ONCEQ_TEST_NODE"
	exit 0
fi

wanted=$(dirname "$0")/../examples/moving/package.json
cache=${XDG_CACHE_HOME:-$HOME/.cache}/onceq
dir=$cache/moving-$(cksum <"$wanted" | cut -d' ' -f1)
if [ ! -d "$dir" ]; then
	mkdir -p "$cache"
	new=$(mktemp -d "$cache/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	cp "$wanted" "$new/package.json"
	# Some of the packages need a newer Node than many distributions have.
	if ! command -v npm >/dev/null || ! (
		cd "$new" &&
			echo "node-packages.sh: fetching the packages of examples/moving" >&2 &&
			npm install --no-audit --no-fund --ignore-scripts --loglevel=error >&2 &&
			mkdir bin &&
			node=$(echo node_modules/node-linux-*/bin/node) &&
			if [ -x "$node" ]; then ln -s "../$node" bin/node; else ln -s "$(command -v node)" bin/node; fi
	); then
		echo "node-packages.sh: no npm, or no registry: the tests in Node are skipped" >&2
		[ -z "${CI:-}" ] || exit 1
		exit 0
	fi
	# The first process wins; the other one's copy is just as good.
	[ -d "$dir" ] || mv "$new" "$dir"
fi
echo "$dir"
