// Package conformance tests what onceq promises inside a caller's database handle. The tests are the same for each
// handle; the package that provides a handle runs them.
package conformance

import (
	"context"
	"hash/fnv"
	"io"
	"log/slog"
	"os"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Handles are one way to a test's database.
type Handles struct {
	// DB is outside any transaction. It need not serve two calls at once.
	DB onceq.DB

	// Begin opens a transaction on another connection than DB's. The caller ends it.
	Begin func(ctx context.Context, level pgx.TxIsoLevel) (Tx, error)
}

// Tx is a caller's transaction.
type Tx struct {
	DB               onceq.DB
	Commit, Rollback func(context.Context) error
}

// env is one test's database and the handles on it.
type env struct {
	t *testing.T
	*queuetest.DB
	Handles
	q *onceq.Queue
}

// setup gives a test its database, with SQL that the owner runs before the handles are opened.
type setup func(t *testing.T, before ...string) *env

// Run runs every test on handles that open returns for a new database. open must register clean-ups for what it opens.
func Run(t *testing.T, open func(t *testing.T, db *queuetest.DB) Handles, opts ...queuetest.Option) {
	set := func(t *testing.T, before ...string) *env {
		t.Helper()
		db := queuetest.New(t, append(opts, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))...)
		if len(before) > 0 {
			owner := Owner(t, db)
			for _, sql := range before {
				exec(t, owner, sql)
			}
			exec(t, owner, `grant all on all tables in schema public to `+pgx.Identifier{db.Pool.Config().ConnConfig.User}.Sanitize())
		}
		db.Pool.Reset() // so that its connections get the database's settings
		return &env{t: t, DB: db, Handles: open(t, db), q: db.Queue}
	}
	for _, test := range []func(*testing.T, setup){
		enqueueEveryForm, enqueueDuplicateInEveryState, enqueueRefusedLeavesTheTransactionUsable, enqueueBelongsToTheTransaction,
		enqueueWaitsForTheFirstProducer, enqueueWaitsForACompletionThatFreesTheKey, enqueueAboveReadCommitted, enqueueDeadlockIsRecognised,
		enqueueManyOfAnyNumber, enqueueManyOfDifferentJobs, enqueueManyRefusedInATransaction, enqueueManyIsAllOrNothing,
		enqueueManyOpensItsTransactionAtReadCommitted, enqueueNamesWhatIsWrongWithTheTables, bytesComeBack,
		fenceEveryAnswer, fenceInATransactionMakesOthersWait, fenceRefusedLeavesTheTransactionUsable, fenceAboveReadCommitted,
		fenceStaleAndFinishedClaimsAreRefused, fenceWindowCountsFromTheCompletion,
		completeBelongsToTheTransaction, completeOutsideOfATransaction, completeStaleEndsTheTransaction,
		workerCompletesInTheHandlersTransaction, workerRunsAgainWhatTheHandlerRolledBack, workerThatLostTheLeaseCommitsNothing,
		workerKeepsTheJobFromItsCompletionOn, workerRunsAgainWhatConflictsWithABeat, workerLocksFirst,
		everyOperationInATransaction, conflictAtTheCommitIsRecognised, contextThatEndsIsRecognised, valuesComeBack, rowsClosedUnreadReportTheirError,
	} {
		name := runtime.FuncForPC(reflect.ValueOf(test).Pointer()).Name()
		t.Run(name[strings.LastIndex(name, ".")+1:], func(t *testing.T) {
			t.Parallel()
			Few(t, 2) // other ones of each handle
			test(t, set)
		})
	}
}

// Few leaves a case of a table out of make test, which runs with -short, unless it is one in n of them. Which
// ones stay depends on their names alone.
func Few(t testing.TB, n uint32) {
	t.Helper()
	h := fnv.New32a()
	_, _ = io.WriteString(h, t.Name())
	if testing.Short() && h.Sum32()%n > 0 {
		t.Skip("make check runs it: one of many cases")
	}
}

// Quick leaves out a test that needs a quick machine with nothing else to do, unless ONCEQ_TEST_QUICK is set, as in the nightly
// run. why says what it needs.
func Quick(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("ONCEQ_TEST_QUICK") == "" {
		t.Skip("the nightly run has it, and ONCEQ_TEST_QUICK=1: " + why)
	}
}

// Becomes waits until a statement returns true.
func Becomes(t *testing.T, pool *pgxpool.Pool, statement string) {
	t.Helper()
	require.Eventually(t, func() bool {
		var is bool
		require.NoError(t, pool.QueryRow(t.Context(), statement).Scan(&is))
		return is
	}, 5*time.Minute, time.Millisecond, statement)
}

// Blocked counts the sessions that wait for a lock, on Citus those of the nodes.
func Blocked(t *testing.T, db *queuetest.DB) (n int) {
	t.Helper()
	activity := get[string](t, db.Pool, `select coalesce(to_regclass('citus_stat_activity'), 'pg_stat_activity')::text`)
	const read = ` where datname = current_database() and wait_event_type = 'Lock'`
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from `+activity+read).Scan(&n))
	return n
}

// Sized is how much of something a test has: short of it in make test.
func Sized(short, full int) int {
	if testing.Short() {
		return short
	}
	return full
}

// get reads one value.
func get[T any](t *testing.T, db onceq.DB, sql string, args ...any) T {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	require.NoError(t, err, sql)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err, sql)
	return v
}

func exec(t *testing.T, db onceq.DB, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

func (e *env) jobs() int {
	e.t.Helper()
	return get[int](e.t, e.Pool, `select count(*)::int from onceq.jobs`)
}

func (e *env) begin(level pgx.TxIsoLevel) Tx {
	e.t.Helper()
	tx, err := e.Begin(e.t.Context(), level)
	require.NoError(e.t, err)
	e.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func (e *env) enqueue(in onceq.DB, job onceq.Job) onceq.Result {
	e.t.Helper()
	r, err := e.q.Enqueue(e.t.Context(), in, job)
	require.NoError(e.t, err)
	return r
}

type answer struct {
	onceq.Result
	err error
}

func (e *env) enqueueAsync(in onceq.DB, job onceq.Job) <-chan answer {
	c := make(chan answer, 1)
	ctx := e.t.Context()
	go func() {
		r, err := e.q.Enqueue(ctx, in, job)
		c <- answer{r, err}
	}()
	return c
}

// patience is how long tests wait for what must happen, however slow the machine is.
const patience = 5 * time.Minute

// blocked waits until a session of this database waits for a lock.
func (e *env) blocked() {
	e.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		if get[bool](e.t, e.Pool, `select exists (select from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock')`) {
			return
		}
		require.True(e.t, time.Now().Before(end), "nobody waits for a lock")
	}
}

// claim claims the one due job.
func (e *env) claim() *onceq.Lease {
	e.t.Helper()
	leases, err := e.q.Claim(e.t.Context(), onceq.ClaimOptions{})
	require.NoError(e.t, err)
	require.Len(e.t, leases, 1)
	return leases[0]
}

// finish completes the one due job with a result.
func (e *env) finish(result any) int64 {
	e.t.Helper()
	l := e.claim()
	if result != nil {
		require.NoError(e.t, l.SetResult(result))
	}
	require.NoError(e.t, l.Complete(e.t.Context(), e.Handles.DB))
	return l.ID
}

// batches is a handle that takes batches, as only pgx's do.
type batches interface {
	SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
}
