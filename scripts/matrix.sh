#!/bin/sh
# Runs the whole suite in each way in which the library may be used: every query mode of pgx, a role with the published
# grants alone, a schema whose name needs quoting, and PgBouncer in transaction mode. queuetest reads the environment
# variables; no test knows of them.
#
#   scripts/matrix.sh              all of them
#   scripts/matrix.sh role exec    some
#
# Left out in a mode is what makes no sense in it, by name and with the reason. These tests say something about Postgres
# or about pgx that the mode takes away from the test, and nothing about the library in the mode.
set -eu
cd "$(dirname "$0")/.."

# They change the tables or the sequence by DDL, setval, lock table or a trigger, or make roles: the role may not, and
# behind the other schema's views there is nothing to change.
owner='TestCheck_SaysThatTheSequenceIsBehindTheIDsInUse|TestTrap_IdempotencyKeysDifferWhereIDsRepeat'
owner="$owner|TestTrap_OneRefusedOutcomeDoesNotKeepTheOthers|TestTrapInvisibleFenceIsANamedErrorNotALoop"
owner="$owner|TestFence_TokensGrowOverReleasePruningTakeOverAndALostSequence|TestTrap_EnqueueWithTheSequenceSetBack"
owner="$owner|TestEnqueueMany_OpensItsTransactionAtReadCommitted|TestTrap_EnqueueGivesUpWhenRowSecurityHidesTheKey"
owner="$owner|TestTrap_EnqueueManyWithAHeaderForEachJobStaysLinear|TestEnqueueMany_AllOrNothingOverSeveralStatements"
owner="$owner|TestTrap_EnqueueInBatchThatFailedHasNoAnswer|TestTrapReaperDeletesAFenceJustMadePermanent"
owner="$owner|TestTrap_EnqueueManyTakesKeysInSortedOrder|TestSecurity_ErrorsAndLogsCarryNoPayload|TestPairs|TestWalk"

# They truncate, vacuum or analyze, make roles, or begin with a database of their own.
role="$owner|TestRole_|TestHealth_NamesWhatSlowsAQueueDown|Fuzz"

# They ask for plans, statistics or ids by the name of a table, a function or the sequence; or make a second Queue, which
# looks in onceq.
schema="$owner|TestTrapListReads|TestTrapStatsReads|TestTrap_HotStatementsKeepTheirPlans|TestTrap_PlansScanNoTable"
schema="$schema|TestTrap_LookingBehindIsPaged|Test_Seed002_AddUnique|TestOnce_SuccessThatCannotBeRecorded"
schema="$schema|TestEnqueue_ManyProducersOfOneKeyGiveOneJob|Fuzz|TestWorker_SurvivesAnImmediateStop|Process"

# They set what PgBouncer does not pass on at the start of a session, listen, end a backend by the number that PgBouncer
# made up, restart the server, or are about prepared statements, which PgBouncer before 1.21 does not keep.
pgbouncer='LeaksNoGoroutine|TestTrap_AClockSetBack|NotificationsAlone|TestWake_|TestHandleTx_WritesAndCompletionCommitTogether'
pgbouncer="$pgbouncer|TestEnqueueMany_OpensItsTransaction|TestTrap_EnqueueManyWithAHeader|InEveryQueryMode|TestQueryModes_"
pgbouncer="$pgbouncer|TestTrap_PlansScanNoTable|TestIsolation_|TestEnqueue_AnySchemaName|Fuzz|TestSecurity_NoText|Process|ImmediateStop"

run() {
	echo "== $1"
	skip=$2
	shift 2
	env "$@" go test -count=1 -timeout "${TIMEOUT:-20m}" -skip "$skip" . ./examples/...
	(cd checks && env "$@" go test -count=1 -timeout "${TIMEOUT:-20m}" -skip "$skip" .)
}

[ "$#" -gt 0 ] || set -- cache_describe describe_exec exec simple_protocol role schema pgbouncer
if [ -z "${ONCEQ_TEST_IMAGE:-}" ]; then
	ONCEQ_TEST_PGBIN=$(scripts/postgres.sh)
	export ONCEQ_TEST_PGBIN
fi
for mode; do
	case $mode in
	cache_describe | describe_exec | exec | simple_protocol) run "$mode" '^$' ONCEQ_TEST_QUERY_MODE="$mode" ;;
	role) run "$mode" "$role" ONCEQ_TEST_ROLE=1 ;;
	schema) run "$mode" "$schema" ONCEQ_TEST_SCHEMA="Odd \"schema's.x" ;;
	pgbouncer)
		path=$(scripts/pgbouncer.sh)
		[ -n "$path" ] || { echo "no pgbouncer" >&2; exit 1; }
		run "$mode" "$pgbouncer" ONCEQ_TEST_VIA_PGBOUNCER="$path"
		;;
	*) echo "no mode $mode" >&2; exit 2 ;;
	esac
done
