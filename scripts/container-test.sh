#!/bin/sh
# Runs the tests of queuetest/container on a Postgres in a container, on a Debian or Ubuntu machine that may have neither Docker
# nor a way to pull images. It installs and starts a Docker daemon if none answers. It makes an image from this machine's
# own postgresql package that behaves like the official one, and lets the tests find no other server.
#
#	scripts/container-test.sh [go test arguments]
set -eu
cd "$(dirname "$0")/.."
say() { echo "container-test: $*" >&2; }

work=$(mktemp -d)
daemon=
cleanup() {
	if [ -n "$daemon" ]; then
		kill "$daemon" 2>/dev/null || true
		wait "$daemon" 2>/dev/null || true
	fi
	rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 1' HUP INT TERM

bin=$(scripts/postgres.sh)

# A daemon of our own touches neither the machine's firewall nor its images.
if ! docker version >/dev/null 2>&1; then
	if ! command -v dockerd >/dev/null; then
		say "installing docker.io"
		apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 update -qq
		DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends docker.io >/dev/null
	fi
fi
if ! docker version >/dev/null 2>&1; then
	say "starting dockerd"
	export DOCKER_HOST="unix://$work/docker.sock"
	dockerd --host "$DOCKER_HOST" --data-root "$work/root" --exec-root "$work/exec" --pidfile "$work/pid" \
		--storage-driver vfs --iptables=false --ip6tables=false >"$work/log" 2>&1 &
	daemon=$!
	tries=0
	until docker version >/dev/null 2>&1; do
		tries=$((tries + 1))
		if [ "$tries" -gt 300 ] || ! kill -0 "$daemon" 2>/dev/null; then
			say "dockerd did not start:"
			tail -20 "$work/log" >&2
			exit 1
		fi
		sleep 0.1
	done
fi

# The image has the files of the server's package and of its dependencies, and an entry point.
version=$("$bin/postgres" --version | sed 's/.*(PostgreSQL) \([0-9]*\).*/\1/')
packages="postgresql-$version dash coreutils util-linux libc-bin"
say "making an image of the packages $packages"
# shellcheck disable=SC2086 # a list of words
apt-cache depends --installed --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
	--no-enhances $packages | grep '^[a-z0-9]' | sort -u | xargs dpkg-query --listfiles 2>/dev/null |
	grep -v -E '^/usr/share/(doc|man|locale|perl|icons)/|^/usr/lib/.*/perl/' |
	while read -r file; do [ ! -f "$file" ] || echo "$(realpath "$(dirname "$file")")/$(basename "$file")"; done | sort -u >"$work/files"

mkdir -p "$work/image/usr/bin" "$work/image/usr/sbin" "$work/image/usr/lib" "$work/image/usr/lib64" \
	"$work/image/etc" "$work/image/tmp" "$work/image/var/lib/postgresql"
for name in bin sbin lib lib64; do ln -s "usr/$name" "$work/image/$name"; done
tar -c --files-from "$work/files" 2>/dev/null | tar -x -C "$work/image"
cp -P /etc/ld.so.cache /etc/passwd /etc/group "$work/image/etc/"
chmod 1777 "$work/image/tmp"
# Links of the alternatives system are made when a package is configured; the server needs none of them.
cat >"$work/image/usr/bin/docker-entrypoint.sh" <<ENTRY
#!/bin/sh
# What the official image's entry point does, as far as tests need it.
set -eu
export PGDATA=\${PGDATA:-/var/lib/postgresql/data}
PATH=$bin:\$PATH
if [ "\$(id -u)" = 0 ]; then
	mkdir -p "\$PGDATA"
	chown postgres "\$PGDATA"
	exec setpriv --reuid=postgres --regid=postgres --clear-groups -- "\$0" "\$@"
fi
if [ ! -e "\$PGDATA/PG_VERSION" ]; then
	echo "\$POSTGRES_PASSWORD" >/tmp/password
	initdb -U "\$POSTGRES_USER" -A scram-sha-256 --pwfile=/tmp/password \${POSTGRES_INITDB_ARGS:-} >/dev/null
	rm /tmp/password
	echo "host all all all scram-sha-256" >>"\$PGDATA/pg_hba.conf"
	echo "listen_addresses = '*'" >>"\$PGDATA/postgresql.conf"
	echo "unix_socket_directories = '/tmp'" >>"\$PGDATA/postgresql.conf"
	if [ "\${POSTGRES_DB:-postgres}" != postgres ]; then
		echo "create database \"\$POSTGRES_DB\"" | postgres --single postgres >/dev/null
	fi
fi
exec "\$@"
ENTRY
chmod 755 "$work/image/usr/bin/docker-entrypoint.sh"
image="onceq-test-postgres:$version"
tar -c -C "$work/image" . | docker import \
	-c 'ENTRYPOINT ["docker-entrypoint.sh"]' -c 'CMD ["postgres"]' -c 'EXPOSE 5432' - "$image" >/dev/null

say "running the tests in $image"
# The daemon is on this machine, even if the machine itself looks like a container.
export ONCEQ_TEST_IMAGE="$image" TESTCONTAINERS_RYUK_DISABLED=true TESTCONTAINERS_HOST_OVERRIDE=127.0.0.1
status=0
(cd queuetest/container && env -u ONCEQ_TEST_DATABASE_URL -u ONCEQ_TEST_PGBIN go test -count=1 -timeout 10m "$@" .) || status=$?

# Nobody but the containers themselves removes them here: the last test process has just ended.
tries=0
while left=$(docker ps --all --quiet --filter "ancestor=$image") && [ -n "$left" ]; do
	tries=$((tries + 1))
	if [ "$tries" -gt 100 ]; then
		say "containers were left behind: $left"
		exit 1
	fi
	sleep 0.1
done
docker rmi "$image" >/dev/null
exit "$status"
