#!/bin/sh
# Runs the whole suite in each way in which the library may be used: every query mode of pgx, a role with the published
# grants alone, a schema whose name needs quoting, and PgBouncer in transaction mode. queuetest reads the environment
# variables; no test knows of them, and what a test sets up it does as the tables' owner.
#
#   scripts/matrix.sh              all of them
#   scripts/matrix.sh role exec    some
#   scripts/matrix.sh -skipped     what is left out: each must fail in its mode
#
# Left out in a mode is, by name, what says something about Postgres, pgx or queuetest that the mode takes away, and
# nothing about the library in the mode. queuetest itself skips a test that wants a query mode that PgBouncer has no room
# for.
set -eu
cd "$(dirname "$0")/.."

# The processes of queuetest.Prove connect in their own way in every mode: they say the same in each.
always='TestProve_.*|ExampleProve'

# They say what the schema is by default, or use it.
schema='TestNew|ExampleHookFunc|ExampleConfig_beforeEnqueue'

# They listen, which nobody can through PgBouncer (the worker says so and polls); or end the backend of an idle
# connection, of which the client then hears nothing.
pgbouncer='TestWake_NotificationsOnlyWhileSomebodyWaits|TestWake_ABusyQueueAsksForNoNotification'
pgbouncer="$pgbouncer|TestWorker_NoJobIsMissedByNotificationsAlone|TestHandleTx_ConnectionLostBeforeTheFirstStatement"

packages='. ./internal/tests ./onceqhttp ./onceqsql ./queuetest ./migrations'

run() {
	echo "== $1"
	skip=$2
	shift 2
	if [ -n "$skipped" ]; then
		for name in $(echo "$skip" | tr '|' ' '); do
			# shellcheck disable=SC2086
			if env "$@" go test -count=1 -timeout "${TIMEOUT:-20m}" -run "^$name\$" $packages; then
				echo "$name does not fail in this mode, or is no test: it is not to be left out" >&2
				exit 1
			fi
		done
		return
	fi
	# shellcheck disable=SC2086
	env "$@" go test -count=1 -timeout "${TIMEOUT:-20m}" -skip "^($always|$skip)\$" $packages
	(cd lab && env "$@" GOTOOLCHAIN=auto go test -count=1 -timeout "${TIMEOUT:-20m}" ./checks)
	(cd examples && env "$@" GOTOOLCHAIN=auto go test -count=1 -timeout "${TIMEOUT:-20m}" ./handlertest)
}

skipped=
if [ "${1:-}" = -skipped ]; then
	skipped=yes
	shift
fi
[ "$#" -gt 0 ] || set -- simple_protocol exec cache_describe describe_exec role schema pgbouncer
if [ -z "${ONCEQ_TEST_IMAGE:-}" ]; then
	ONCEQ_TEST_PGBIN=$(scripts/postgres.sh)
	export ONCEQ_TEST_PGBIN
fi
for mode; do
	case $mode in
	cache_describe | describe_exec | exec | simple_protocol) run "$mode" '' ONCEQ_TEST_QUERY_MODE="$mode" ;;
	role) run "$mode" '' ONCEQ_TEST_ROLE=1 ;;
	schema) run "$mode" "$schema" ONCEQ_TEST_SCHEMA="Odd \"schema's.x" ;;
	pgbouncer)
		path=$(scripts/pgbouncer.sh)
		[ -n "$path" ] || { echo "no pgbouncer" >&2; exit 1; }
		run "$mode" "$pgbouncer" ONCEQ_TEST_VIA_PGBOUNCER="$path"
		;;
	*) echo "no mode $mode" >&2; exit 2 ;;
	esac
done
