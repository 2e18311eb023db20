package tests

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// explained returns the reasons for a job, which must be these.
func explained(t *testing.T, db *queuetest.DB, id int64, want ...onceqops.Cause) []onceqops.Reason {
	t.Helper()
	e, err := onceqops.New(db.Queue).Explain(t.Context(), db.Pool, id)
	require.NoError(t, err)
	var got []onceqops.Cause
	for _, r := range e.Reasons {
		got = append(got, r.Cause)
		require.NotEmpty(t, r.Text)
		require.Contains(t, e.String(), r.String())
	}
	require.Equal(t, want, got, "%s", e)
	require.Equal(t, want[0], e.Cause())
	require.Equal(t, id, e.Job.ID)
	require.False(t, e.At.IsZero())
	return e.Reasons
}

// workerRow adds the row of a live worker.
func workerRow(t *testing.T, db *queuetest.DB, id int64, queues, kinds, seenAgo string) {
	t.Helper()
	sqlRun(t, db, `insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values ($1::bigint << 32, 30000000, now() - interval '1 day', now() - $4::text::interval, 7, 1, 'web1', 'v1', $2::text::jsonb, string_to_array($3::text, ','))`, id, queues, kinds, seenAgo)
}

// Where a lane or a limit has room, what keeps workers from letting the job in comes first.
func TestExplain_RoomComesLast(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	for _, job := range []onceq.Job{{Lane: "a", Payload: 1}, {Limit: "l", Payload: 1}} {
		cause := onceqops.CauseLane
		if job.Limit != "" {
			cause = onceqops.CauseLimit
		}
		id := add(t, db, job)
		r := explained(t, db, id, onceqops.CauseNoWorker, cause)
		require.Contains(t, r[1].Text, "has room, and it is the next: a worker lets them in within a poll")
		require.NoError(t, q.PauseKind(ctx, db.Pool, "k", ""))
		explained(t, db, id, onceqops.CauseKindPaused, onceqops.CauseNoWorker, cause)
		_, err := q.ResumeKind(ctx, db.Pool, "k")
		require.NoError(t, err)
		job.Delay = time.Hour
		explained(t, db, add(t, db, job), onceqops.CauseScheduled, onceqops.CauseNoWorker, cause)
	}
}

// Counting stops, and the answer says so.
func TestExplain_MoreThanItCounts(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	require.NoError(t, q.SetLimit(ctx, db.Pool, "l", onceq.Limit{Rate: 1, Per: time.Minute, Burst: 1}))
	jobs := make([]onceq.Job, onceqops.StatsCap+10)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Limit: "l", Payload: i}
	}
	all, err := q.EnqueueMany(ctx, db.Pool, jobs)
	require.NoError(t, err)
	require.Contains(t, explained(t, db, all[len(all)-1].ID, onceqops.CauseLimit, onceqops.CauseNoWorker)[0].Text, "1000 or more others come before it, and its slot is not before ")
	require.Contains(t, explained(t, db, all[10].ID, onceqops.CauseLimit, onceqops.CauseNoWorker)[0].Text, "10 others come before it, and its slot is at about ")
}

// A worker that was killed counts for three minutes, so after some polls the answer does not say that one takes the job soon.
func TestExplain_WorkersThatMayBeGone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{Payload: 1})
	workerRow(t, db, 1, `{"default": 1}`, "k", "85 s")
	require.Contains(t, explained(t, db, id, onceqops.CauseReady)[0].Text, "a worker takes it within its poll interval")
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 minute'`)
	require.Regexp(t, `^it has been due for 1m\ds although nothing is in its way, and 1 worker could take it, of which the last was seen 1m2\ds ago: `, explained(t, db, id, onceqops.CauseReady)[0].Text)
	workerRow(t, db, 2, `{"default": 1}`, "k", "70 s")
	require.Regexp(t, `, and 2 workers could take it, of which the last was seen 1m1\ds ago: `, explained(t, db, id, onceqops.CauseReady)[0].Text)
}

// The same workers may have all connections for transactional handlers in another queue.
func TestExplain_JobsOfOtherQueuesMayHaveTheConnections(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	workerRow(t, db, 1, `{"default": 1, "slow": 8}`, "k", "0 s")
	slow := add(t, db, onceq.Job{Payload: 1, Queue: "slow"})
	sqlRun(t, db, `update onceq.jobs set leased_until = now() + interval '1 minute', holder = 1::bigint << 32 | 7, claims = 1 where id = $1`, slow)
	id := add(t, db, onceq.Job{Payload: 1})
	require.Zero(t, explained(t, db, id, onceqops.CauseReady)[0].Running)
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 minute' where id = $1`, id)
	r := explained(t, db, id, onceqops.CauseReady)[0]
	require.Equal(t, 1, r.Running)
	require.Contains(t, r.Text, "its queue has room, and 1 worker for it runs 1 job of other queues")
	require.Contains(t, r.Advice, "MaxConns")
}

func TestExplain_WaitsForItsTime(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	workerRow(t, db, 1, `{"default": 1}`, "k", "0 s")
	id := add(t, db, onceq.Job{Payload: 1, Delay: time.Hour})
	r := explained(t, db, id, onceqops.CauseScheduled)[0]
	require.InDelta(t, time.Until(r.Until).Minutes(), 60, 10)
	require.Equal(t, fmt.Sprintf("Ops.Retry makes it due now, as onceq jobs retry %d does", id), r.Advice)

	claim := func(id int64) *onceq.Lease {
		leases, err := q.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		require.Equal(t, id, leases[0].ID)
		return leases[0]
	}
	id = add(t, db, onceq.Job{Payload: 1})
	require.NoError(t, claim(id).Snooze(ctx, time.Hour))
	explained(t, db, id, onceqops.CauseDeferred)

	id = add(t, db, onceq.Job{Payload: 1})
	require.NoError(t, claim(id).Fail(ctx, onceq.RetryAfter(time.Hour, errors.New("no route"))))
	r = explained(t, db, id, onceqops.CauseRetry)[0]
	require.Contains(t, r.Text, "attempt 1 of 25 failed")
	require.Contains(t, r.Text, "no route")

	id = add(t, db, onceq.Job{Payload: 1})
	require.NoError(t, claim(id).Fail(ctx, onceq.RetryAfter(0, errors.New("no route"))))
	require.NoError(t, claim(id).Snooze(ctx, time.Hour))
	r = explained(t, db, id, onceqops.CauseRetry)[0]
	require.Contains(t, r.Text, "it has failed or asked to run again (Snooze, ")
	require.Contains(t, r.Text, "1 of 25 attempts has failed, the latest at ")
	require.Contains(t, r.Text, "no route")
}

// A lane or a limit may have places for more jobs than an answer names.
func TestExplain_AFullLaneWithManyPlaces(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	workerRow(t, db, 1, `{"default": 1}`, "book,call", "0 s")
	lane := onceq.Kind[int]{Name: "book", Lane: func(int) string { return "7" }}
	limit := onceq.Kind[int]{Name: "call", Limit: func(int) string { return "bank" }}
	const most = onceqops.StatsCap + 1
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "book", "", most))
	require.NoError(t, q.SetLimit(ctx, db.Pool, "bank", onceq.Limit{AtOnce: most}))
	var jobs []onceq.Job
	for i := range most + 1 {
		jobs = append(jobs, lane.Job(i), limit.Job(i))
	}
	last := must[[]onceq.Result](t)(q.EnqueueMany(ctx, db.Pool, jobs))[2*most:]
	claimed := 0
	eventually(t, "all that may be live are", func() bool {
		claimed += len(must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Limit: 2000})))
		return claimed == 2*most
	})
	r := explained(t, db, last[0].ID, onceqops.CauseLane)[0]
	require.Contains(t, r.Text, fmt.Sprintf("of which %d may be live at once", most))
	require.Contains(t, r.Text, fmt.Sprintf("and %d more, which are live", most-10))
	require.Contains(t, must[[]onceqops.LaneInfo](t)(onceqops.New(q).Lanes(ctx, db.Pool, onceqops.LaneFilter{}))[0].String(), "is full")
	r = explained(t, db, last[1].ID, onceqops.CauseLimit)[0]
	require.Contains(t, r.Text, fmt.Sprintf("and %d more, which are live", most-10))
	require.Contains(t, must[onceqops.LimitInfo](t)(onceqops.New(q).Limit(ctx, db.Pool, "bank")).String(), "is full")
}

func TestExplain_Paused(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	workerRow(t, db, 1, `{"default": 1}`, "k", "0 s")
	id := add(t, db, onceq.Job{Payload: 1})
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "default", "ann: provider down"))
	r := explained(t, db, id, onceqops.CauseQueuePaused)[0]
	require.Equal(t, "ann: provider down", r.Pause.Note)
	require.Contains(t, r.String(), "resuming the queue ends that")
	require.NoError(t, q.PauseKind(ctx, db.Pool, "k", ""))
	require.NoError(t, q.PauseKind(ctx, db.Pool, "default", "")) // a kind that is called as the queue
	explained(t, db, id, onceqops.CauseQueuePaused, onceqops.CauseKindPaused)
	_, err := q.ResumeQueue(ctx, db.Pool, "default")
	require.NoError(t, err)
	require.Contains(t, explained(t, db, id, onceqops.CauseKindPaused)[0].Advice, "resuming the kind ends that")
	id = add(t, db, onceq.Job{Payload: 1, Delay: time.Hour})
	explained(t, db, id, onceqops.CauseScheduled, onceqops.CauseKindPaused)
}

func TestExplain_NobodyTakesIt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{Payload: 1})
	require.Nil(t, explained(t, db, id, onceqops.CauseNoWorker)[0].Worker)
	workerRow(t, db, 1, `{"default": 1}`, "k", "1 hour")
	workerRow(t, db, 2, `{"other": 1}`, "k", "0 s")
	r := explained(t, db, id, onceqops.CauseNoWorker)[0]
	require.Equal(t, int64(1<<32), r.Worker.ID)
	require.Contains(t, r.Text, "process 7 on web1")
	workerRow(t, db, 3, `{"default": 1}`, "mail", "0 s")
	explained(t, db, id, onceqops.CauseNoHandler)
	workerRow(t, db, 4, `{"default": 1}`, "k", "0 s")
	explained(t, db, id, onceqops.CauseReady)
}

func TestExplain_FullAndBehind(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	workerRow(t, db, 1, `{"default": 2}`, "k,paused", "0 s")
	workerRow(t, db, 2, `{"default": 9, "other": 3}`, "mail", "0 s") // has no handler for it
	running := []int64{add(t, db, onceq.Job{Payload: 1}), add(t, db, onceq.Job{Payload: 1}), add(t, db, onceq.Job{Payload: 1})}
	later := add(t, db, onceq.Job{Payload: 1, Priority: onceq.PriorityLow})
	before := add(t, db, onceq.Job{Payload: 1})
	id := add(t, db, onceq.Job{Payload: 1})
	high := add(t, db, onceq.Job{Payload: 1, Priority: onceq.PriorityHigh})
	add(t, db, onceq.Job{Kind: "mail", Payload: 1, Priority: onceq.PriorityHigh}) // for other workers
	add(t, db, onceq.Job{Kind: "paused", Payload: 1, Priority: onceq.PriorityHigh})
	require.NoError(t, db.Queue.PauseKind(t.Context(), db.Pool, "paused", ""))
	lease := func(id, worker int64) {
		sqlRun(t, db, `update onceq.jobs set leased_until = now() + interval '1 hour', claims = 1, holder = ($2::bigint << 32) + id where id = $1`, id, worker)
	}
	lease(running[0], 1)
	lease(running[2], 2)
	require.Equal(t, 3, explained(t, db, id, onceqops.CauseBehind)[0].Before, "running[1], before and high")
	explained(t, db, high, onceqops.CauseReady)
	lease(running[1], 1)
	r := explained(t, db, id, onceqops.CauseFull, onceqops.CauseBehind)
	require.Equal(t, [2]int{2, 2}, [2]int{r[0].Running, r[0].Slots})
	require.Equal(t, 2, r[1].Before, "before and high")
	require.Equal(t, 3, explained(t, db, later, onceqops.CauseFull, onceqops.CauseBehind)[1].Before)
	_ = before
}

func TestExplain_LockedAndLost(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	workerRow(t, db, 1, `{"default": 5}`, "k", "0 s")
	id := add(t, db, onceq.Job{Payload: 1})
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	var pid int
	require.NoError(t, tx.QueryRow(ctx, `select pg_backend_pid() from onceq.jobs where id = $1 for update`, id).Scan(&pid))
	aSecondOld(t, db, pid)
	r := explained(t, db, id, onceqops.CauseLocked)[0]
	require.Equal(t, pid, r.Session)
	require.False(t, r.Since.IsZero())
	require.Contains(t, r.Text, ", idle in transaction) has its row locked")
	require.Contains(t, r.Advice, "end it (pg_terminate_backend)")
	require.NoError(t, tx.Rollback(ctx))
	explained(t, db, id, onceqops.CauseReady)

	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	db.ExpireLease(id)
	require.Equal(t, 1, explained(t, db, id, onceqops.CauseQuarantine)[0].Lost)
	sqlRun(t, db, `update onceq.jobs set lost = 3, claims = 3, leased_until = null, holder = null where id = $1`, id)
	require.Equal(t, 3, explained(t, db, id, onceqops.CauseQuarantine)[0].Lost)
}

// aSecondOld waits until Explain reports the locks of a session's transaction.
func aSecondOld(t *testing.T, db *queuetest.DB, pid int) {
	t.Helper()
	until(t, db, fmt.Sprintf(`exists (select from pg_stat_activity where pid = %d and xact_start <= statement_timestamp() - interval '1 second')`, pid))
}

// Claims and completions have rows locked all the time: that is no reason, neither of a job nor of the one behind it.
func TestExplain_AFreshLockIsNoReason(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	workerRow(t, db, 1, `{"default": 5}`, "k", "0 s")
	id, first, second := add(t, db, onceq.Job{}), add(t, db, onceq.Job{Lane: "a"}), add(t, db, onceq.Job{Lane: "a"})
	eventually(t, "a lock that is not a second old", func() bool {
		tx := must[pgx.Tx](t)(db.Pool.Begin(ctx))
		defer func() { _ = tx.Rollback(ctx) }()
		for _, table := range []string{"jobs", "job_waits"} {
			_, err := tx.Exec(ctx, `select from onceq.`+table+` for update`)
			require.NoError(t, err)
		}
		for id, cause := range map[int64]onceqops.Cause{id: onceqops.CauseReady, first: onceqops.CauseLane, second: onceqops.CauseLane} {
			if must[onceqops.Explanation](t)(onceqops.New(db.Queue).Explain(ctx, db.Pool, id)).Cause() != cause {
				return false
			}
		}
		return true
	})
}

// A session in which a statement of this library hangs is none to end at once.
func TestExplain_LockedByAStatementOfOnceq(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	workerRow(t, db, 1, `{"default": 5}`, "k", "0 s")
	first, second := add(t, db, onceq.Job{Key: "a"}), add(t, db, onceq.Job{Key: "b"})
	tx := must[pgx.Tx](t)(db.Pool.Begin(ctx))
	defer func() { _ = tx.Rollback(ctx) }()
	var pid int
	require.NoError(t, tx.QueryRow(ctx, `select pg_backend_pid() from onceq.jobs where id = $1 for update`, second).Scan(&pid))
	replaced := make(chan error, 1)
	go func() {
		a := onceq.Job{Kind: "k", Key: "a", Payload: 2, Replace: onceq.ReplacePayload}
		b := a
		b.Key = "b"
		_, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{a, b})
		replaced <- err
	}()
	blocked := fmt.Sprintf(`from pg_stat_activity where pg_blocking_pids(pid) = array[%d]`, pid)
	until(t, db, `exists (select `+blocked+`)`)
	own := sqlOne[int](t, db, `select pid `+blocked)
	aSecondOld(t, db, own)
	r := explained(t, db, first, onceqops.CauseLocked)[0]
	require.Equal(t, own, r.Session)
	require.Contains(t, r.Text, "which runs a statement on the tables of onceq, has its row locked")
	require.NotContains(t, r.Advice, "pg_terminate_backend")
	require.NoError(t, tx.Rollback(ctx))
	require.NoError(t, receive(t, replaced))
}

// What is said of a lane or a limit is of one moment, also while jobs go through it one after the other.
func TestExplain_BusyLineDoesNotContradictItself(t *testing.T) {
	t.Parallel()
	named := regexp.MustCompile(`: that of job ([0-9]+), in `)
	for _, job := range []onceq.Job{{Kind: "k", Lane: "a", Payload: 1}, {Kind: "k", Limit: "provider", Payload: 1}} {
		t.Run(job.Lane+job.Limit, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			last := job
			last.Priority = onceq.PriorityLow
			for range 3 {
				add(t, db, job)
			}
			id := add(t, db, last) // it always waits, because each job is followed by another one
			start(t, db, onceq.WorkerConfig{}, handle(func(ctx context.Context, l *onceq.Lease) error {
				_, err := q.Enqueue(ctx, db.Pool, job)
				return err
			}))
			var asking sync.WaitGroup
			for range 4 {
				asking.Go(func() {
					for n, asked := 0, 0; n < conformance.Sized(20, 100) && ctx.Err() == nil && !t.Failed(); asked++ {
						if asked == 10_000 {
							t.Errorf("%d of %d answers say who has the place", n, asked)
						}
						e, err := onceqops.New(q).Explain(ctx, db.Pool, id)
						if err != nil {
							t.Error(err)
							return
						}
						r := e.Reasons[0]
						if of := named.FindStringSubmatch(r.Text); of != nil {
							if n++; !slices.Contains(r.Ahead, must[int64](t)(strconv.ParseInt(of[1], 10, 64))) {
								t.Errorf("%v, %s", r.Ahead, r.Text)
							}
						}
					}
				})
			}
			asking.Wait()
		})
	}
}

// The same, with a completion before each of its statements.
func TestExplain_HolderEndsMeanwhile(t *testing.T) {
	t.Parallel()
	for _, line := range []func(name string) onceq.Job{
		func(name string) onceq.Job { return onceq.Job{Lane: name} },
		func(name string) onceq.Job { return onceq.Job{Limit: name} },
	} {
		db := queuetest.New(t)
		workerRow(t, db, 1, `{"default": 1}`, "k", "0 s")
		ended := true
		for n := 1; ended; n++ {
			require.Less(t, n, 50)
			ended = false
			job := line(fmt.Sprint(n))
			first, second, third := add(t, db, job), add(t, db, job), add(t, db, job)
			l := laneClaimOne(t, db.Queue, first)
			var until time.Time
			between := &enqBetween{DB: db.Pool, n: n, do: func() {
				require.NoError(t, l.Complete(t.Context(), nil))
				l, ended = laneClaimOne(t, db.Queue, second), true
				until = sqlOne[time.Time](t, db, `update onceq.jobs set leased_until = leased_until + interval '1 hour' where id = $1 returning leased_until`, second)
			}}
			why, err := onceqops.New(db.Queue).Explain(t.Context(), between, third)
			require.NoError(t, err)
			require.Len(t, why.Reasons, 1, "%s", why)
			r := why.Reasons[0]
			isSecond := r.Until.Equal(until)
			require.Equal(t, map[bool][]int64{false: {first}, true: {second}}[isSecond], r.Ahead, "before statement %d: %s", n, why)
			require.Equal(t, map[bool]int{false: 1, true: 0}[isSecond], r.Before, "before statement %d: %s", n, why)
			require.NoError(t, l.Complete(t.Context(), nil))
			require.NoError(t, laneClaimOne(t, db.Queue, map[bool]int64{true: third, false: second}[ended]).Complete(t.Context(), nil))
		}
	}
}

// A job that another worker takes between two statements is not said to run there under the lease of the first one.
func TestExplain_AnotherLeaseMeanwhile(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	workerRow(t, db, 1, `{"default": 1}`, "k", "0 s")
	workerRow(t, db, 2, `{"default": 1}`, "k", "0 s")
	const lease = `update onceq.jobs set leased_until = statement_timestamp() + $3::text::interval, claims = claims + 1, holder = $2::bigint << 32 where id = $1 returning leased_until`
	taken := true
	for n := 1; taken; n++ {
		require.Less(t, n, 50)
		taken = false
		id := add(t, db, onceq.Job{})
		leases := map[int64]time.Time{1: sqlOne[time.Time](t, db, lease, id, 1, "1 hour")}
		between := &enqBetween{DB: db.Pool, n: n, do: func() {
			leases[2], taken = sqlOne[time.Time](t, db, lease, id, 2, "2 hours"), true
		}}
		why, err := onceqops.New(db.Queue).Explain(t.Context(), between, id)
		require.NoError(t, err)
		require.Equal(t, onceqops.CauseRunning, why.Cause())
		r := why.Reasons[0]
		require.True(t, r.Until.Equal(leases[r.Worker.ID>>32]), "before statement %d: %s", n, why)
	}
}

func TestExplain_Runs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	running, finish := make(chan int64), make(chan struct{})
	tx := onceq.Kind[int]{Name: "tx"}
	w := start(t, db, onceq.WorkerConfig{Lease: time.Hour},
		handle(func(_ context.Context, l *onceq.Lease) error {
			running <- l.ID
			<-finish
			return nil
		}),
		tx.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
			if _, err := tx.Exec(ctx, `select $1::int`, 1); err != nil { // the transaction begins with its first statement
				return err
			}
			running <- l.ID
			<-finish
			return nil
		}))
	eventually(t, "the worker's row", func() bool { return len(workers(t, db)) == 1 })
	one := workers(t, db)[0]
	before := sqlOne[time.Time](t, db, `select now()`)
	id := add(t, db, onceq.Job{Payload: 1})
	require.Equal(t, id, receive(t, running))
	r := explained(t, db, id, onceqops.CauseRunning)[0]
	require.NotNil(t, r.Worker)
	require.Equal(t, one.ID, r.Worker.ID)
	require.Equal(t, time.Hour, r.Until.Sub(r.Beat))
	require.False(t, r.Beat.Before(before))
	require.Zero(t, r.Session)

	inTx := add(t, db, onceq.Job{Kind: "tx", Payload: 1})
	require.Equal(t, inTx, receive(t, running))
	r = explained(t, db, inTx, onceqops.CauseRunning)[0]
	require.Equal(t, one.ID, r.Worker.ID)
	require.NotZero(t, r.Session)

	_, err := db.Queue.Cancel(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Contains(t, explained(t, db, id, onceqops.CauseRunning)[0].Advice, "cancel")
	close(finish)
	until(t, db, noJobs)
	require.NoError(t, w.stop())

	byHand := add(t, db, onceq.Job{Payload: 1})
	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	require.Nil(t, explained(t, db, byHand, onceqops.CauseRunning)[0].Worker)
}

// A job that ends or freezes its process each time says that it does, and what to look at.
func TestExplain_DeadByLostLeases(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{Payload: 1})
	claim := onceq.ClaimOptions{MaxLost: 2}
	for range 2 {
		leases, err := q.Claim(ctx, claim)
		require.NoError(t, err)
		require.Len(t, leases, 1)
		db.ExpireLease(id) // its process is gone
	}
	leases, err := q.Claim(ctx, claim)
	require.NoError(t, err)
	require.Empty(t, leases)
	r := explained(t, db, id, onceqops.CauseDead)[0]
	require.Equal(t, 2, r.Lost)
	j, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, "2 leases of this job ran out: each time the worker that had it died, froze or lost the database; look at what these processes logged last, and at their memory", j.Errors[0].Error)
	require.Contains(t, r.Text, ", after 0 failed attempts of 25 and 2 lost leases, with the error: "+j.Errors[0].Error)
}

func TestExplain_Finished(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	keep := onceq.Kind[int]{Name: "keep", Keep: time.Hour}
	hold := onceq.Kind[int]{Name: "hold"}
	completed, held := add(t, db, onceq.Job{Kind: "keep", Payload: 1}), add(t, db, onceq.Job{Kind: "hold", Payload: 1})
	dead, cancelled := add(t, db, onceq.Job{Kind: "dead", Payload: 1}), add(t, db, onceq.Job{Payload: 1, Delay: time.Hour})
	_, err := db.Queue.Cancel(ctx, db.Pool, cancelled)
	require.NoError(t, err)
	db.Drain(keep.Handle(func(context.Context, *onceq.Lease, int) error { return nil }),
		kindHandler("dead", "", func(context.Context, *onceq.Lease) error { return onceq.Fatal(errors.New("no such user")) }),
		hold.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 0, errors.New("reset") }, onceq.OnUncertain(onceq.Hold()))
			return err
		}))
	db.Advance(time.Minute)
	require.False(t, explained(t, db, completed, onceqops.CauseCompleted)[0].Since.IsZero())
	require.Contains(t, explained(t, db, cancelled, onceqops.CauseCancelled)[0].Advice, "a redrive runs it again")
	require.Contains(t, explained(t, db, dead, onceqops.CauseDead)[0].Text, "no such user")
	explained(t, db, 4711, onceqops.CauseUnknown)
	for range 3 { // the policy holds the effect in a later run
		if job, err := db.Queue.Get(ctx, db.Pool, held); err == nil && job.State == onceq.StateHeld {
			break
		}
		db.Advance(24 * time.Hour)
		db.Drain(hold.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 0, errors.New("reset") }, onceq.OnUncertain(onceq.Hold()))
			return err
		}))
	}
	r := explained(t, db, held, onceqops.CauseHeld)[0]
	require.Len(t, r.Effects, 1)
	require.Equal(t, "charge", r.Effects[0].Name)
	require.Contains(t, r.Text, "reset")
	require.Contains(t, r.Advice, "say whether it happened")
}

// A job that waits for its limit, its lane or other jobs says what would keep it waiting after that, too.
func TestExplain_BlockedNamesWhatComesAfter(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	setLimit(t, db, "closed", onceq.Limit{})
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "k", "shut", 0))
	limited := add(t, db, onceq.Job{Limit: "closed"})
	delayed := add(t, db, onceq.Job{Limit: "closed", Delay: time.Hour})
	laned := add(t, db, onceq.Job{Lane: "open"})
	shut := add(t, db, onceq.Job{Lane: "shut"})
	after := add(t, db, onceq.Job{After: []onceq.JobRef{{ID: laned}}})
	both := add(t, db, onceq.Job{Lane: "shut", Limit: "closed"})
	each := func(then ...onceqops.Cause) {
		t.Helper()
		explained(t, db, limited, append([]onceqops.Cause{onceqops.CauseLimit}, then...)...)
		explained(t, db, delayed, append([]onceqops.Cause{onceqops.CauseScheduled, onceqops.CauseLimit}, then...)...)
		explained(t, db, laned, append(slices.Clone(then), onceqops.CauseLane)...)
		explained(t, db, shut, append([]onceqops.Cause{onceqops.CauseLane}, then...)...)
		explained(t, db, after, append([]onceqops.Cause{onceqops.CauseAfter}, then...)...)
		explained(t, db, both, append([]onceqops.Cause{onceqops.CauseLane, onceqops.CauseLimit}, then...)...)
	}
	each(onceqops.CauseNoWorker)
	workerRow(t, db, 1, `{"default": 1}`, "mail", "0 s")
	each(onceqops.CauseNoHandler)
	require.NoError(t, q.PauseKind(ctx, db.Pool, "k", "bob"))
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "default", "ann"))
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "other", ""))
	each(onceqops.CauseQueuePaused, onceqops.CauseKindPaused, onceqops.CauseNoHandler)
	workerRow(t, db, 2, `{"default": 1}`, "k", "0 s")
	each(onceqops.CauseQueuePaused, onceqops.CauseKindPaused)
	_, err := q.ResumeQueue(ctx, db.Pool, "default")
	require.NoError(t, err)
	_, err = q.ResumeKind(ctx, db.Pool, "k")
	require.NoError(t, err)
	each()
}

// A job in a lane with room says that its limit is full, and one that waits for paused jobs says that these are paused.
func TestExplain_FullLimitAndPausedHolders(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	workerRow(t, db, 1, `{"default": 1}`, "k,held", "0 s")
	holder := add(t, db, onceq.Job{Kind: "held", Limit: "provider"})
	l := laneClaimOne(t, q, holder)
	first := add(t, db, onceq.Job{Lane: "a", Limit: "provider"})
	r := explained(t, db, first, onceqops.CauseLane, onceqops.CauseLimit)
	require.Contains(t, r[0].Text, `a worker lets them go on within a poll, and it then needs its share of limit "provider"`)
	require.Equal(t, []any{[]int64{holder}, 1}, []any{r[1].Ahead, r[1].Slots})
	require.Contains(t, r[1].Text, fmt.Sprintf(`its limit "provider" (not set itself) is full: 1 of its jobs is live, and 1 may be; the first of them are [%d]`, holder))

	require.NoError(t, q.PauseKind(ctx, db.Pool, "held", "ann"))
	require.NotContains(t, explained(t, db, first, onceqops.CauseLane, onceqops.CauseLimit)[1].Text, "paused", "it runs, and ends all the same")
	require.NoError(t, l.Complete(ctx, nil))
	require.NoError(t, laneClaimOne(t, q, first).Complete(ctx, nil))
	holder = add(t, db, onceq.Job{Kind: "held", Limit: "provider"})
	require.Empty(t, laneClaim(t, q, 10)) // it is let in, and nobody takes it
	first = add(t, db, onceq.Job{Lane: "a", Limit: "provider"})
	r = explained(t, db, first, onceqops.CauseLane, onceqops.CauseLimit)
	held := fmt.Sprintf(`; of these, [%d] do not start, because kind "held" has been paused since `, holder)
	require.Contains(t, r[1].Text, held)

	require.Empty(t, laneClaim(t, q, 10)) // it goes on to the line of its limit
	second := add(t, db, onceq.Job{Lane: "a"})
	one := explained(t, db, first, onceqops.CauseLimit)[0]
	require.Contains(t, one.Text, held)
	require.Equal(t, "resuming the kind lets them start; cancelling them gives their places to others", one.Advice)
	require.Equal(t, "ann", one.Pause.Note)
	one = explained(t, db, second, onceqops.CauseLane)[0]
	require.Equal(t, []int64{first}, one.Ahead)
	require.Nil(t, one.Pause)

	// What its own lane has of the limit is free when its turn comes.
	_, err := q.ResumeKind(ctx, db.Pool, "held")
	require.NoError(t, err)
	require.NoError(t, laneClaimOne(t, q, holder).Complete(ctx, nil))
	laneClaimOne(t, q, first)
	third := add(t, db, onceq.Job{Lane: "a", Limit: "provider"})
	explained(t, db, third, onceqops.CauseLane)
}

// A job that waits for its lane or its limit says who has the job before it, and until when; or when that one is due again.
func TestExplain_WhoHasThePlace(t *testing.T) {
	t.Parallel()
	for _, job := range []onceq.Job{{Lane: "a"}, {Limit: "provider"}} {
		t.Run(job.Lane+job.Limit, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			workerRow(t, db, 1, `{"default": 1}`, "k", "0 s")
			cause := map[bool]onceqops.Cause{true: onceqops.CauseLane, false: onceqops.CauseLimit}[job.Lane != ""]
			first, second := add(t, db, job), add(t, db, job)
			laneClaimOne(t, db.Queue, first)
			r := explained(t, db, second, cause)[0]
			require.Nil(t, r.Worker, "a loop around Claim leaves no row")
			require.WithinDuration(t, time.Now().Add(30*time.Second), r.Until, 25*time.Second)

			sqlRun(t, db, `update onceq.jobs set holder = (1::bigint << 32) + 5 where id = $1`, first)
			r = explained(t, db, second, cause)[0]
			require.NotNil(t, r.Worker)
			require.Equal(t, 7, r.Worker.Process)
			require.Contains(t, r.Text, fmt.Sprintf("; the first lease among them lasts until %s: that of job %d, in process 7 on web1", r.Until.UTC().Format("2006-01-02 15:04:05 UTC"), first))

			sqlRun(t, db, `update onceq.jobs set leased_until = null, holder = null, run_at = statement_timestamp() + interval '1 hour' where id = $1`, first)
			r = explained(t, db, second, cause)[0]
			require.Nil(t, r.Worker)
			require.WithinDuration(t, time.Now().Add(time.Hour), r.Until, time.Minute)
			require.Contains(t, r.Text, fmt.Sprintf("; nobody has one of them, and the first to go on is job %d at ", first))
			require.NotContains(t, r.Text, "0 others")
			require.Contains(t, r.Advice, fmt.Sprintf("the explanation of job %d says why it waits until then", first))
			sqlRun(t, db, `update onceq.jobs set run_at = statement_timestamp() where id = $1`, first)
			require.Zero(t, explained(t, db, second, cause)[0].Until, "a worker can have it now")

			// It looks at all of them, and not only at those that it lists.
			many := db
			if job.Lane != "" {
				require.NoError(t, many.Queue.SetLaneLimit(t.Context(), many.Pool, "k", "a", 12))
			} else {
				setLimit(t, many, "provider", onceq.Limit{AtOnce: 12})
			}
			for range 12 {
				add(t, many, job)
			}
			held := 0
			eventually(t, "all places are taken", func() bool { held += len(laneClaim(t, many.Queue, 20)); return held == 12 })
			last := sqlOne[int64](t, many, `select max(id) from onceq.jobs`)
			sqlRun(t, many, `update onceq.jobs set leased_until = null, holder = null, run_at = statement_timestamp() + interval '1 hour' where id <> $1`, last)
			r = explained(t, many, sqlOne[int64](t, many, `select max(id) from onceq.job_waits`), cause)[0]
			require.NotContains(t, r.Ahead, last)
			require.Contains(t, r.Text, "the first lease among them lasts until")
		})
	}
}

// A transaction has a job that waits locked, or the first one of its lane, which nobody passes.
func TestExplain_LockedWhileItWaits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	workerRow(t, db, 1, `{"default": 1}`, "charge,whole,k", "0 s")
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 2})
	g, err := q.EnqueueGroup(ctx, db.Pool, nil, whole.Job("no members"))
	require.NoError(t, err)
	follower := whole.Job("x")
	follower.After = []onceq.JobRef{{ID: g.Then.ID}}
	after := add(t, db, follower)
	require.NoError(t, laneClaimOne(t, q, g.Then.ID).Complete(ctx, nil))
	first, second := add(t, db, charges.Job(charge{1, 1})), add(t, db, charges.Job(charge{1, 2}))
	limited := add(t, db, onceq.Job{Kind: "k", Limit: "provider", Payload: 1})
	behind := add(t, db, charges.Job(charge{2, 1}))
	live := add(t, db, charges.Job(charge{2, 0}))
	sqlRun(t, db, `update onceq.job_waits set run_at = run_at - interval '1 minute' where id = $1`, live)

	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	pid := 0
	require.NoError(t, tx.QueryRow(ctx, `select pg_backend_pid() from (select id from onceq.job_waits where id = any ($1) for update) w`, []int64{after, first, limited}).Scan(&pid))
	aSecondOld(t, db, pid)
	for _, id := range []int64{after, first, limited} {
		r := explained(t, db, id, onceqops.CauseLocked)[0]
		require.Equal(t, pid, r.Session)
		require.Empty(t, r.Ahead)
		require.Contains(t, r.Text, "has its row locked, in a transaction that began at ")
	}
	r := explained(t, db, second, onceqops.CauseLocked)[0]
	require.Equal(t, []any{pid, []int64{first}}, []any{r.Session, r.Ahead})
	require.Contains(t, r.Text, fmt.Sprintf("has the row of job %d locked, which comes before it, in a transaction that began at ", first))
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "charge", "1", 2))
	explained(t, db, second, onceqops.CauseLane) // it is next itself
	explained(t, db, first, onceqops.CauseLocked)
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "charge", "1", 0))
	explained(t, db, first, onceqops.CauseLane, onceqops.CauseLocked)
	explained(t, db, second, onceqops.CauseLane)
	explained(t, db, behind, onceqops.CauseLane)
	require.NoError(t, tx.Rollback(ctx))
	explained(t, db, after, onceqops.CauseAfter)
	explained(t, db, limited, onceqops.CauseLimit)
}

// A job that waits for others says that it is cancelled next because of them.
func TestExplain_DeadCancel(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	workerRow(t, db, 1, `{"default": 1}`, "part,whole", "0 s")
	then := whole.Job("x")
	then.IfDead = onceq.DeadCancel
	for _, end := range []func(id int64) error{
		func(id int64) error { _, err := q.Cancel(ctx, db.Pool, id); return err },
		func(id int64) error { return laneClaimOne(t, q, id).Fail(ctx, onceq.Fatal(errors.New("no"))) },
	} {
		g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{part.Job(1)}, then)
		require.NoError(t, err)
		require.NoError(t, end(g.Members[0].ID))
		text := explained(t, db, g.Then.ID, onceqops.CauseAfter)[0].String()
		require.Contains(t, text, "the job that it waits for is finished, and 1 is dead or was cancelled: a worker cancels it within a poll (DeadCancel)")
		require.NotContains(t, text, "go on")
	}
}

// A rate lets no more jobs in while those that it has let in are paused, and says so.
func TestExplain_RateWhoseJobsArePaused(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	workerRow(t, db, 1, `{"default": 1}`, "k,held", "0 s")
	setLimit(t, db, "provider", onceq.Limit{Rate: 10})
	require.NoError(t, q.PauseKind(ctx, db.Pool, "held", "ann"))
	for range 20 {
		add(t, db, onceq.Job{Kind: "held", Limit: "provider"})
	}
	eventually(t, "five are let in", func() bool {
		require.Empty(t, laneClaim(t, q, 10))
		live, _ := laneLive(t, db)
		return live == 5
	})
	id := add(t, db, onceq.Job{Limit: "provider"})
	sqlRun(t, db, `update onceq.jobs set run_at = statement_timestamp() + interval '1 hour'`)
	require.Contains(t, explained(t, db, id, onceqops.CauseLimit)[0].Text, "and its slot is at about", "their slots are not past")
	sqlRun(t, db, `update onceq.jobs set run_at = statement_timestamp() - interval '1 second'`)
	r := explained(t, db, id, onceqops.CauseLimit)[0]
	require.Contains(t, r.Text, `it waits for a slot of limit "provider" (10 in 1s, in bursts of 2), which lets no more jobs in before some start of 5 that have slots and that nobody has claimed`)
	require.Contains(t, r.Text, `do not start, because kind "held" has been paused since `)
	require.Equal(t, "ann", r.Pause.Note)
	require.Len(t, r.Ahead, 5)
	require.True(t, r.Until.IsZero())
	l, err := onceqops.New(q).Limit(ctx, db.Pool, "provider")
	require.NoError(t, err)
	require.Equal(t, `limit "provider" lets no more jobs in before some start of 5 that have slots and that nobody has claimed`, l.String())

	sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() + interval '1 hour', claims = 1, holder = 1 where id = $1`, r.Ahead[0])
	require.Contains(t, explained(t, db, id, onceqops.CauseLimit)[0].Text, "and its slot is at about")
	sqlRun(t, db, `update onceq.jobs set leased_until = null, holder = null, claims = 0`)
}

// A job that is let in between two statements of Explain is never said to wait for itself, whichever statements these are.
func TestExplain_JobMovesOnMeanwhile(t *testing.T) {
	t.Parallel()
	for name, j := range map[string]onceq.Job{
		"lane":  {Lane: "a"},
		"limit": {Limit: "p"},
		"both":  {Lane: "a", Limit: "p"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			moved := true
			for n := 1; moved; n++ {
				require.Less(t, n, 50)
				moved = false
				id := add(t, db, j)
				var l *onceq.Lease
				between := &enqBetween{DB: db.Pool, n: n, do: func() { l, moved = laneClaimOne(t, db.Queue, id), true }}
				why, err := onceqops.New(db.Queue).Explain(t.Context(), between, id)
				require.NoError(t, err)
				for _, r := range why.Reasons {
					require.NotContains(t, r.Ahead, id, "before statement %d: %s", n, why)
				}
				if !moved {
					l = laneClaimOne(t, db.Queue, id)
				} else {
					require.Equal(t, onceqops.CauseRunning, why.Cause(), "before statement %d: %s", n, why)
				}
				require.NoError(t, l.Complete(t.Context(), nil))
			}
		})
	}
}
