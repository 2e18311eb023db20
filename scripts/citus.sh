#!/bin/sh
# A cluster of Citus on this machine: a coordinator and two nodes, with schema-based sharding on. For Linux.
#
#   scripts/citus.sh start DIR [SOURCE]   starts one with its data in DIR, which must not exist, and prints the coordinator's URL
#   scripts/citus.sh stop DIR             stops it, and removes DIR
#   scripts/citus.sh bin [SOURCE]         prints a directory with server binaries that have Citus
#
# The binaries are those of ONCEQ_TEST_CITUS, if it is set; else this machine's (scripts/postgres.sh), if they have Citus.
# Otherwise Citus is built from SOURCE, or from ONCEQ_CITUS_SOURCE: a folder with its source, of a version that supports
# this machine's Postgres (13.2 does for Postgres 15 to 17). That takes about five minutes, make, a C compiler, and the headers
# of the server: on Debian postgresql-server-dev-15, libkrb5-dev and libzstd-dev. It goes, with a copy of the server, into the user's cache
# directory. Nothing is installed.
#
# The cluster listens on 127.0.0.1 alone, asks for no password, and loses data if the machine crashes. Its ports are
# ONCEQ_CITUS_PORT, 25610 by default, and the two that follow.
set -eu
cd "$(dirname "$0")/.."

say() { echo "citus.sh: $*" >&2; }

# has_citus says whether a directory of binaries has the extension.
has_citus() { [ -f "$("$1/pg_config" --pkglibdir 2>/dev/null)/citus.so" ]; }

# The server runs as another user than root, who must be able to read the binaries.
if [ "$(id -u)" = 0 ]; then cache=/var/cache/onceq; else cache=${XDG_CACHE_HOME:-$HOME/.cache}/onceq; fi
as_server() {
	if [ "$(id -u)" = 0 ]; then setpriv --reuid=nobody --regid=nogroup --clear-groups -- "$@"; else "$@"; fi
}

find_bin() {
	if [ -n "${ONCEQ_TEST_CITUS:-}" ]; then
		echo "$ONCEQ_TEST_CITUS"
		return
	fi
	own=$(scripts/postgres.sh)
	if has_citus "$own"; then
		echo "$own"
		return
	fi
	config=$own/pg_config
	copy=$cache/citus-$("$own/postgres" --version | sed 's/.*(PostgreSQL) \([0-9.]*\).*/\1/')
	if [ ! -e "$copy/complete" ]; then
		source=${1:-${ONCEQ_CITUS_SOURCE:-}}
		[ -f "$source/configure" ] || { say "Citus is not on this machine: name a folder with its source, see the top of $0"; exit 1; }
		source=$(cd "$source" && pwd)
		[ -f "$("$config" --includedir-server)/postgres.h" ] ||
			{ say "the server's headers are missing; on Debian: apt-get install postgresql-server-dev-15 libkrb5-dev libzstd-dev"; exit 1; }
		say "building Citus from $source into $copy"
		mkdir -p "$cache"
		chmod a+x "$cache"
		new=$(mktemp -d "$cache/new.XXXXXX")
		mkdir "$new/source" "$new/build"
		(cd "$source" && tar cf - --exclude=.git .) | tar xf - -C "$new/source"
		# Postgres 15.20 declares a function that Citus 13.2 defines for itself.
		sed -i -e 's/^have_createdb_privilege(void)/citus_&/' -e 's/^\(#define have_createdb_privilege()\) /\1 citus_/' \
			"$new/source/src/include/pg_version_compat.h"
		# What Citus does without: reports to its makers, and compressed columnar tables.
		(cd "$new/build" &&
			PG_CONFIG=$config ../source/configure --without-libcurl --without-lz4 --without-zstd &&
			nice make -j"${ONCEQ_CITUS_JOBS:-1}" with_llvm=no extension) >"$new/log" 2>&1 ||
			{ say "the build failed:"; tail -20 "$new/log" >&2; exit 1; }
		# A copy of the server finds its own files from where its binaries are.
		for dir in "$("$config" --bindir)" "$("$config" --sharedir)" "$("$config" --pkglibdir)"; do
			mkdir -p "$new/copy$dir"
			cp -a "$dir/." "$new/copy$dir/"
		done
		(cd "$new/build" && make with_llvm=no install-extension DESTDIR="$new/copy") >>"$new/log" 2>&1 ||
			{ say "the installation failed:"; tail -20 "$new/log" >&2; exit 1; }
		chmod -R a+rX "$new/copy"
		touch "$new/copy/complete"
		# Whoever is first wins; the other one's copy is as good.
		mv -T "$new/copy" "$copy" 2>/dev/null || [ -e "$copy/complete" ]
		rm -rf "$new"
	fi
	echo "$copy$("$config" --bindir)"
}

start() {
	dir=$1
	bin=$(find_bin "${2:-}")
	port=${ONCEQ_CITUS_PORT:-25610}
	mkdir -p "$dir"
	dir=$(cd "$dir" && pwd)
	[ "$(id -u)" != 0 ] || chown nobody:nogroup "$dir"
	mkdir -p "$dir/socket"
	[ "$(id -u)" != 0 ] || chown nobody:nogroup "$dir/socket"
	echo "$bin" >"$dir/bin"
	for n in 0 1 2; do
		as_server "$bin/initdb" -D "$dir/$n" -U postgres -A trust -E UTF8 --locale=C --no-sync >/dev/null
		cat >>"$dir/$n/postgresql.conf" <<-CONF
			port = $((port + n))
			listen_addresses = '127.0.0.1'
			unix_socket_directories = '$dir/socket'
			shared_preload_libraries = 'citus'
			citus.enable_schema_based_sharding = on
			citus.node_conninfo = 'sslmode=disable'
			citus.enable_stat_counters = on
			max_connections = 300
			max_prepared_transactions = 200
			max_worker_processes = 100
			wal_level = logical
			shared_buffers = 128MB
			max_wal_size = 4GB
			fsync = ${ONCEQ_CITUS_FSYNC:-off}
			synchronous_commit = ${ONCEQ_CITUS_FSYNC:-off}
			full_page_writes = ${ONCEQ_CITUS_FSYNC:-off}
		CONF
		as_server "$bin/pg_ctl" -D "$dir/$n" -l "$dir/$n/log" -w start >/dev/null || { tail -5 "$dir/$n/log" >&2; exit 1; }
	done
	for n in 0 1 2; do
		as_server "$bin/psql" -XqAt -v ON_ERROR_STOP=1 -h 127.0.0.1 -p $((port + n)) -U postgres -d postgres -c 'create extension citus' >/dev/null
	done
	as_server "$bin/psql" -XqAt -v ON_ERROR_STOP=1 -h 127.0.0.1 -p "$port" -U postgres -d postgres >/dev/null <<-SQL
		select citus_set_coordinator_host('127.0.0.1', $port);
		select citus_add_node('127.0.0.1', $((port + 1)));
		select citus_add_node('127.0.0.1', $((port + 2)));
	SQL
	echo "postgres://postgres@127.0.0.1:$port/postgres?sslmode=disable"
}

stop() {
	bin=$(cat "$1/bin")
	for n in 0 1 2; do as_server "$bin/pg_ctl" -D "$1/$n" -m immediate -w stop >/dev/null 2>&1 || true; done
	rm -rf "$1"
}

case ${1:-} in
bin) find_bin "${2:-}" ;;
start) [ "$#" -ge 2 ] || { say "usage: citus.sh start DIR [SOURCE]"; exit 2; }; start "$2" "${3:-}" ;;
stop) [ "$#" = 2 ] || { say "usage: citus.sh stop DIR"; exit 2; }; stop "$2" ;;
*) sed -n '2,/^set -eu/p' "$0" | sed '/^set -eu/d; s/^# \{0,1\}//' >&2; exit 2 ;;
esac
