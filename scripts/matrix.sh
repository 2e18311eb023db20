#!/bin/sh
# Runs the whole suite in each way in which the library may be used: every query mode of pgx, a role with only the
# published grants, a schema whose name needs quoting, tables that are newer than the code, and PgBouncer in transaction mode. queuetest reads the environment
# variables. Tests know nothing of them, and set up what they need as the tables' owner.
#
#   scripts/matrix.sh              all of them
#   scripts/matrix.sh role exec    some
#   scripts/matrix.sh -skipped     what is left out: each must fail in its mode
#   scripts/matrix.sh pairs        every pair of public calls, and of what may happen to a lane or a limit, of which the tests try a part: half an hour
#   scripts/matrix.sh citus        on a cluster of Citus (scripts/citus.sh), which is not one of all: it has to be built first
#
# A mode leaves out, by name, the tests that depend on something of Postgres, pgx or queuetest that the mode takes away
# and that say nothing about the library in that mode. queuetest itself skips a test that asks for a query mode that does
# not work with PgBouncer.
set -eu
cd "$(dirname "$0")/.."

# The processes of queuetest.Prove connect in their own way in every mode, so these are the same in each.
always='TestProve_.*|ExampleProve'

# This runs the later migration itself.
later='TestUpgrade_TheCodeOfBeforeWorksBesideThis'

# This starts a process on the server of another one, where its role would be left behind.
role='TestAKilledProcessLeavesNoDatabase'

# These test or use the default schema.
schema='TestNew|ExampleHookFunc|ExampleConfig_beforeEnqueue'

# These listen, which is not possible through PgBouncer (the worker says so and polls). Or they wait until a worker announces
# that it is idle, which only one that listens does.
pgbouncer='TestWake_NotificationsOnlyWhileSomebodyWaits|TestWake_ABusyQueueAsksForNoNotification'
pgbouncer="$pgbouncer|TestWorker_NoJobIsMissedByNotificationsAlone"
pgbouncer="$pgbouncer|TestConnections_WorkersOfOnePoolShareThem|TestCounts_AreNotWrittenThroughTheSession"
pgbouncer="$pgbouncer|TestDefaults_TheLibrarysOwnStatementsHaveNoLimitsAndTheApplicationsKeepThem"
pgbouncer="$pgbouncer|TestFirst_ALostAnswer|TestLane_ABusyWorkerAsksForCalls|TestLane_ACommitAfterTheAnnouncement"
pgbouncer="$pgbouncer|TestLane_ALookSeesACallForWhichNobodyWasWoken|TestLane_WorkersAreWoken"
pgbouncer="$pgbouncer|TestLimit_NoBurstOfMovedJobs|TestOutcomes_AConnectionThatGoesSilent"
pgbouncer="$pgbouncer|TestQueues_ABusyWorkerOfManyLooksAtWhatIsNew|TestQueues_AFullOneDoesNotHideAnother"
pgbouncer="$pgbouncer|TestQueues_AWakeThatIsCommittedAfterTheNextAnnouncement"
pgbouncer="$pgbouncer|TestQueues_AWorkerThatWouldBeWokenAllTheTimeLooksInstead"
pgbouncer="$pgbouncer|TestQueues_AnIdleWorkerLooksAtAllInOneStatement|TestQueues_AreNamedBeforeTheWorkerWaits"
pgbouncer="$pgbouncer|TestQueues_TheSessionIsLostInTheMiddleOfAClaim|TestSQL_WakesAWorker"
pgbouncer="$pgbouncer|TestSession_ABlockedStatementHoldsUpNobodyElse|TestSession_ASilentClaimDoesNotLastForALease"
pgbouncer="$pgbouncer|TestSession_OpensAgainBesideAConnectionThatIsDead"
pgbouncer="$pgbouncer|TestSilent_AStatementThatTakesLongIsLeftAlone|TestSilent_AWorkerGoesOnOverNewConnections"
pgbouncer="$pgbouncer|TestFirst_IsLeasedByThePromoter|TestFirst_LeavesOthersToClaims|TestWake_ACommitThatStalls"
pgbouncer="$pgbouncer|TestWake_ADeadWorkerIsWokenOnce|TestWake_ADeadWorkerThatWasToLookForMore"
pgbouncer="$pgbouncer|TestWake_AFullWorkerPassesOn|TestWake_AProducerThatLearnsLateThatNobodyWaited"
pgbouncer="$pgbouncer|TestWake_ASlowAnnouncement|TestWake_AWorkerThatEndsPassesOn|TestWake_FewClaimADelayedJob"
pgbouncer="$pgbouncer|TestWake_MostOfVeryManyAreDormant|TestWake_OneOfManyClaimsOnce|TestWake_WhoBecomesDormant"
pgbouncer="$pgbouncer|TestWorker_DefaultsOfTheDatabase|TestWorker_EndsWhenThePoolIsClosed"
pgbouncer="$pgbouncer|TestWake_ABurstSpreadsOverIdleWorkers|TestWake_JobsOfTransactionsShareAWake"
pgbouncer="$pgbouncer|TestWake_OthersOfOtherKindsAreWokenToo|TestWake_QuickJobsInQuickSuccessionShareAWake"
pgbouncer="$pgbouncer|TestWake_SlowJobsInQuickSuccessionWakeOneEach"

# This ends the backend of an idle connection, and behind PgBouncer the client is not told.
pgbouncer="$pgbouncer|TestHandleTx_ConnectionLostBeforeTheFirstStatement"

# This finds a worker's statement by a text that is cut off there: several statements come as one, and Postgres shows the
# first kilobyte.
pgbouncer="$pgbouncer|TestSuccessor_ShutdownBehindABatch"

# scripts/citus-tests.txt has what runs on Citus. It names tests that run, and not those that cannot, which are many, for these reasons.
# Nobody is notified there. Tests look at the locks, sessions, statistics and plans
# of the server that they are connected to, which is the coordinator. A test's own SQL has a trigger, a function for the time, a sequence
# beside a table, or in an update a function that is not immutable. Roles and settings are those of one server, and nodes are not
# stopped and started. A test's own handle is in no transaction and has no BeginTx, which Enqueue refuses there. Unit tests say nothing about a server.

packages='. ./onceqops ./internal/tests ./onceqhttp ./onceqsql ./queuetest ./migrations'

run() {
	echo "== $1"
	skip=$2
	shift 2
	if [ -n "$skipped" ]; then
		for name in $(echo "$skip" | tr '|' ' '); do
			# shellcheck disable=SC2086
			if env "$@" go test -count=1 -timeout "${TIMEOUT:-20m}" -run "^$name\$" $packages; then
				echo "$name does not fail in this mode, or is not a test: do not leave it out" >&2
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
[ "$#" -gt 0 ] || set -- simple_protocol exec cache_describe describe_exec role schema later pgbouncer pairs
if [ -z "${ONCEQ_TEST_IMAGE:-}" ]; then
	ONCEQ_TEST_PGBIN=$(scripts/postgres.sh)
	export ONCEQ_TEST_PGBIN
fi
for mode; do
	case $mode in
	cache_describe | describe_exec | exec | simple_protocol) run "$mode" '' ONCEQ_TEST_QUERY_MODE="$mode" ;;
	role) run "$mode" "$role" ONCEQ_TEST_ROLE=1 ;;
	later) run "$mode" "$later" ONCEQ_TEST_LATER="$PWD/migrations/testdata/002_later.sql" ;;
	schema) run "$mode" "$schema" ONCEQ_TEST_SCHEMA="Odd \"schema's.x" ;;
	pgbouncer)
		path=$(scripts/pgbouncer.sh)
		[ -n "$path" ] || { echo "no pgbouncer" >&2; exit 1; }
		run "$mode" "$pgbouncer" ONCEQ_TEST_VIA_PGBOUNCER="$path"
		;;
	pairs)
		[ -z "$skipped" ] || { echo "nothing is left out by name with pairs" >&2; continue; }
		echo "== $mode"
		ONCEQ_TEST_PAIRS=all go test -count=1 -timeout "${TIMEOUT:-20m}" -run EveryPair .
		(cd lab && ONCEQ_TEST_PAIRS=all GOTOOLCHAIN=auto go test -count=1 -timeout "${TIMEOUT:-40m}" ./pairs)
		;;
	citus)
		[ -z "$skipped" ] || { echo "nothing is left out by name on citus" >&2; continue; }
		# shellcheck disable=SC2086
		tests=$(go test -list . $packages)
		while read -r name; do
			echo "$tests" | grep -qxE "$name" || { echo "scripts/citus-tests.txt names $name, and there is no such test" >&2; exit 1; }
		done <scripts/citus-tests.txt
		dir=$(mktemp -d)
		trap 'scripts/citus.sh stop "$dir/cluster"; rm -rf "$dir"' EXIT
		chmod a+x "$dir"
		url=$(scripts/citus.sh start "$dir/cluster")
		tests=$(echo "$tests" | grep -E '^(Test|Example)')
		echo "== citus, without $(echo "$tests" | grep -vcxEf scripts/citus-tests.txt) of $(echo "$tests" | wc -l) tests"
		# shellcheck disable=SC2086
		env ONCEQ_TEST_DATABASE_URL="$url" go test -count=1 -timeout "${TIMEOUT:-20m}" -parallel 6 -run "^($(paste -sd'|' scripts/citus-tests.txt))\$" $packages
		(cd examples && env ONCEQ_TEST_DATABASE_URL="$url" GOTOOLCHAIN=auto go test -count=1 -timeout "${TIMEOUT:-20m}" -run TestPrograms .)
		(cd lab/citus && GOTOOLCHAIN=auto go run . -for 5s "$url")
		;;
	*) echo "no mode $mode" >&2; exit 2 ;;
	esac
done
