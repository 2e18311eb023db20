package tests

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/queuetest"
)

// backlogged starts a worker, waits until it listens, takes the turn of the default queue as a stranger, and then enqueues
// more there than a few claims take. ran gets the queue of each job.
func backlogged(t *testing.T) (db *queuetest.DB, stranger pgx.Tx, ran chan string) {
	db = queuetest.New(t)
	ran = make(chan string, 10_000)
	kind := onceq.Kind[int]{Name: "k"}
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Also: []string{"other"}}, kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
		ran <- l.Queue
		return nil
	}))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	conformance.Becomes(t, db.Pool, `select exists (select from `+pgx.Identifier{db.Schema, "waiters"}.Sanitize()+`)`)

	stranger, err = db.Pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = stranger.Rollback(context.Background()) })
	_, err = stranger.Exec(t.Context(), `select pg_advisory_xact_lock($1)`, pg.NewTurn(db.Schema, onceq.DefaultQueue, nil).Key)
	require.NoError(t, err)
	jobs := make([]onceq.Job, 1000)
	for i := range jobs {
		jobs[i] = kind.Job(i)
	}
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	return db, stranger, ran
}

// A worker whose claim of a backlog waits for its turn works its other queues meanwhile.
func TestTurn_OfOneQueueDoesNotStopTheOthers(t *testing.T) {
	t.Parallel()
	db, stranger, ran := backlogged(t)
	const waits = `select exists (select from pg_locks where locktype = 'advisory' and not granted
		and database = (select oid from pg_database where datname = current_database()))`
	conformance.Becomes(t, db.Pool, waits)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Queue: "other", Payload: 1})
	require.NoError(t, err)
	for <-ran != "other" {
	}
	require.NoError(t, stranger.Commit(t.Context()))
	conformance.Becomes(t, db.Pool, `select not exists (select from `+pgx.Identifier{db.Schema, "jobs"}.Sanitize()+`)`)
}

// Whoever has the turn may be a process that stands still: the others go on without one.
func TestTurn_ThatNeverEndsStopsNobody(t *testing.T) {
	t.Parallel()
	db, _, _ := backlogged(t)
	conformance.Becomes(t, db.Pool, `select not exists (select from `+pgx.Identifier{db.Schema, "jobs"}.Sanitize()+`)`)
}

// crowded starts a worker that always waits for its turn in the default queue, which has a backlog: a stranger has the turn for 0.7
// seconds, again and again. turns counts these. The worker's claims come in between.
func crowded(t *testing.T, handle func(*onceq.Lease)) (db *queuetest.DB, turns *atomic.Int32) {
	db, turns = queuetest.New(t), new(atomic.Int32)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "nobody's", Payload: 1}) // so that each rescan goes through the pages
	require.NoError(t, err)
	enqueueMany(t, db, onceq.DefaultQueue, 40_000)
	kind := onceq.Kind[int]{Name: "k"}
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Also: []string{"other"}}, kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
		handle(l)
		return nil
	}))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- w.Run(ctx) }()
	go func() {
		var err error
		for ; err == nil && ctx.Err() == nil; turns.Add(1) {
			_, err = db.Pool.Exec(context.Background(), `select pg_sleep(0.7) from (select pg_advisory_xact_lock($1) offset 0) l`, pg.NewTurn(db.Schema, onceq.DefaultQueue, nil).Key)
		}
		ended <- err
	}()
	t.Cleanup(func() { cancel(); require.NoError(t, errors.Join(<-ended, <-ended)) })
	return db, turns
}

func enqueueMany(t *testing.T, db *queuetest.DB, queue string, n int) {
	jobs := make([]onceq.Job, 2000)
	for range n / len(jobs) {
		for i := range jobs {
			jobs[i] = onceq.Job{Kind: "k", Queue: queue, Payload: i}
		}
		_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
		require.NoError(t, err)
	}
}

// Claims that wait for their turns come between the pages of a rescan. That makes rescans no rarer: expired leases are found by
// them.
func TestTurn_ThatComesLateMakesRescansNoRarer(t *testing.T) {
	conformance.Quick(t, "counts turns beside rescans once a second, which come late on a busy machine")
	t.Parallel()
	db, turns := crowded(t, func(*onceq.Lease) {})
	seen := make(map[time.Time]bool)
	require.Eventually(t, func() bool {
		var at time.Time
		if db.Pool.QueryRow(t.Context(), `select rescanned_at from `+pgx.Identifier{db.Schema, "queues"}.Sanitize()+` where queue = 'default'`).Scan(&at) == nil {
			seen[at] = true
		}
		return len(seen) == 4 || turns.Load() == 50
	}, 5*time.Minute, 10*time.Millisecond)
	require.Less(t, turns.Load(), int32(50), "before four rescans")
}

// A backlog that waits for its turns does not hold up one in which nobody else claims: many claims of that one come in one turn of
// the stranger's. With one purpose for both there was one for each.
func TestTurn_OfOneBacklogDoesNotStopAnother(t *testing.T) {
	t.Parallel()
	const others = 4000
	var ran atomic.Int32
	done := make(chan bool)
	db, turns := crowded(t, func(l *onceq.Lease) {
		if l.Queue != "other" {
			return
		}
		time.Sleep(rand.N(200 * time.Millisecond)) // so that each claim is of a few jobs, and cheap
		if ran.Add(1) == others {
			close(done)
		}
	})
	_, err := conformance.Owner(t, db).Exec(t.Context(), `
create sequence public.claims;
grant all on public.claims to public;
create function public.count_claims() returns trigger language plpgsql as $$
begin
  if exists (select from n where queue = 'other') then perform nextval('public.claims'); end if;
  return null;
end $$;
create trigger count_claims after update on `+pgx.Identifier{db.Schema, "jobs"}.Sanitize()+`
  referencing new table as n for each statement execute function public.count_claims()`)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return turns.Load() >= 2 }, 5*time.Minute, time.Millisecond)
	enqueueMany(t, db, "other", others)
	before := turns.Load()
	<-done
	during := turns.Load() - before
	var claims int32
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select last_value from public.claims`).Scan(&claims))
	t.Logf("%d claims in %d turns", claims, during)
	require.Greater(t, claims, during+1) // if each waited for a turn, there would be no more of them; a slow machine claims more at once
}

// A claim in turn goes on where the one before it ended, whichever worker's that was, and looks back when it is to look back.
func TestTurn_GoesOnWhereTheOtherEnded(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq")) // the schema in the statement
	const jobs = 20
	all := make([]onceq.Job, jobs+2)
	for i := range all {
		all[i] = onceq.Job{Kind: "k", Payload: 1}
		if i >= jobs {
			all[i].Priority = onceq.PriorityLow
		}
	}
	results, err := db.Queue.EnqueueMany(t.Context(), db.Pool, all)
	require.NoError(t, err)
	n := func(id int64) int64 { return id - results[0].ID + 1 } // from 1 on, as they come
	var runAt time.Time
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select min(run_at) from onceq.jobs having min(run_at) = max(run_at)`).Scan(&runAt))

	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	front := func() (id int64) {
		t.Helper()
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select id from onceq.turns where kinds = 7`).Scan(&id))
		return id
	}
	written, lately := time.Duration(0), true
	priorities := []int16{-1, 0, 1}
	// claim claims two jobs after that one, or looks back for 0.
	claim := func(on onceq.DB, after int64, kinds int64) (got []int64) {
		id := int64(0)
		if after > 0 {
			id = results[after-1].ID
		}
		if lately { // what others wrote counts for five seconds
			_, err := db.Pool.Exec(t.Context(), `update onceq.turns set at = statement_timestamp()`)
			require.NoError(t, err)
		}
		rows, err := on.Query(t.Context(), stmt.ClaimInTurn, int64(60_000_000), int64(1), onceq.DefaultQueue,
			priorities, []time.Time{runAt, runAt, runAt.Add(-time.Hour)}, []int64{0, id, 0}, []string{"k"}, 2, 100, kinds, written.Microseconds())
		require.NoError(t, err)
		for rows.Next() {
			values, err := rows.Values()
			require.NoError(t, err)
			got = append(got, n(values[0].(int64)))
		}
		require.NoError(t, rows.Err())
		slices.Sort(got)
		return got
	}
	free := func(numbers ...int64) {
		t.Helper()
		for _, n := range numbers {
			_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set leased_until = null, holder = null where id = $1`, results[n-1].ID)
			require.NoError(t, err)
		}
	}
	require.Equal(t, []int64{4, 5}, claim(db.Pool, 3, 7), "nobody was here before")
	require.Equal(t, []int64{6, 7}, claim(db.Pool, 1, 7), "another worker, which is behind")
	require.Equal(t, []int64{10, 11}, claim(db.Pool, 9, 7), "another one, which has come further")
	require.Equal(t, []int64{2, 3}, claim(db.Pool, 1, 8), "one with other kinds")
	free(5, 6, 7)
	require.Equal(t, []int64{12, 13}, claim(db.Pool, 1, 7), "what came late is left to those who look back")
	written = time.Hour
	require.Equal(t, []int64{1, 5}, claim(db.Pool, 0, 7), "this one does, and says so at once")
	require.Equal(t, results[4].ID, front())
	require.Equal(t, []int64{6, 7}, claim(db.Pool, 13, 7), "all go back there")
	priorities = []int16{1, -1, 0} // it fills the claim
	require.Equal(t, []int64{21, 22}, claim(db.Pool, 13, 7), "one begins with the lowest priority")
	priorities = []int16{-1, 0, 1}
	require.Equal(t, []int64{8, 9}, claim(db.Pool, 13, 7), "and changes nothing for the others")
	require.Equal(t, []int64{14, 15}, claim(db.Pool, 13, 7), "until they are back")
	require.Equal(t, []int64{18, 19}, claim(db.Pool, 17, 7), "then each goes on where it is")
	require.Equal(t, results[14].ID, front(), "which was written a moment ago")
	written = 0
	require.Equal(t, []int64{16, 17}, claim(db.Pool, 1, 7))
	require.Equal(t, results[16].ID, front())
	free(14, 15, 16, 17)
	lately = false
	_, err = db.Pool.Exec(t.Context(), `update onceq.turns set at = at - interval '6 seconds'`)
	require.NoError(t, err)
	require.Equal(t, []int64{14, 15}, claim(db.Pool, 1, 7), "that was long ago")

	_, err = tx.Exec(t.Context(), `select from onceq.turns for update`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set leased_until = null, holder = null`)
	require.NoError(t, err)
	require.Equal(t, []int64{4, 5}, claim(db.Pool, 3, 7), "somebody has the row locked: it is passed over")
	require.NoError(t, tx.Rollback(t.Context()))
	for _, field := range []string{"run_at", "at"} {
		_, err = db.Pool.Exec(t.Context(), `update onceq.turns set `+field+` = now() + interval '1 hour'`)
		require.NoError(t, err)
		_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set leased_until = null, holder = null`)
		require.NoError(t, err)
		require.Equal(t, []int64{2, 3}, claim(db.Pool, 1, 7), "the database's clock was set back")
		require.Equal(t, results[2].ID, front(), "so the next ones begin here")
	}
}
