#!/bin/sh
# Prints the directory of this machine's newest Postgres server binaries (initdb and postgres), from which the
# tests start servers. If there are none, it installs the distribution's package first, and says so.
#
# ONCEQ_TEST_PGBIN, when set, is printed as it is.
set -eu

if [ -n "${ONCEQ_TEST_PGBIN:-}" ]; then
	echo "$ONCEQ_TEST_PGBIN"
	exit 0
fi

# find_bin prints the newest directory that has both programs. The places are those of internal/pgserver/find.go.
find_bin() {
	on_path=$(command -v postgres 2>/dev/null || true)
	[ -z "$on_path" ] || on_path=$(dirname "$(readlink -f "$on_path" 2>/dev/null || echo "$on_path")")
	for dir in "$on_path" "$(pg_config --bindir 2>/dev/null || true)" \
		/usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/libexec/postgresql* \
		/opt/homebrew/opt/postgresql*/bin /opt/homebrew/bin /usr/local/opt/postgresql*/bin /usr/local/pgsql/bin \
		/home/linuxbrew/.linuxbrew/opt/postgresql*/bin /Applications/Postgres.app/Contents/Versions/*/bin; do
		if [ -n "$dir" ] && [ -x "$dir/initdb" ] && [ -x "$dir/postgres" ]; then
			version=$("$dir/postgres" --version 2>/dev/null | sed -n 's/.*(PostgreSQL) \([0-9.]*\).*/\1/p')
			[ -z "$version" ] || echo "$version $dir"
		fi
	done | sort -t. -k1,1nr -k2,2nr | head -n 1 | cut -d' ' -f2-
}

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

bin=$(find_bin)
if [ -z "$bin" ]; then
	echo "postgres.sh: no Postgres server binaries found, installing the distribution's package" >&2
	{
		if command -v apt-get >/dev/null; then
			as_root apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 update -qq
			# Only the binaries are needed, and no cluster that starts with the machine.
			as_root env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends postgresql-common >/dev/null
			as_root sh -c 'mkdir -p /etc/postgresql-common/createcluster.d && echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/onceq.conf'
			as_root env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends postgresql >/dev/null
		elif command -v dnf >/dev/null; then
			as_root dnf install -y -q postgresql-server
		elif command -v brew >/dev/null; then
			brew install --quiet postgresql@18
		else
			echo "postgres.sh: none of apt-get, dnf and brew is here: install a Postgres server, or set ONCEQ_TEST_PGBIN or ONCEQ_TEST_DATABASE_URL"
			exit 1
		fi
	} >&2 </dev/null
	bin=$(find_bin)
fi
if [ -z "$bin" ]; then
	echo "postgres.sh: still no initdb and postgres; set ONCEQ_TEST_PGBIN to their directory" >&2
	exit 1
fi
echo "$bin"
