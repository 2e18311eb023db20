package tests

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// givenBack leaves a job that is given back for long while a request to cancel it is not committed.
func givenBack(job onceq.Job) func(t *testing.T, db *queuetest.DB) (id int64) {
	return func(t *testing.T, db *queuetest.DB) int64 {
		id := repairEnqueue(t, db, job)
		l := repairClaim(t, db)
		tx := begin(t, db)
		wantState(t, onceq.StateRunning)(db.Queue.Cancel(t.Context(), tx, id))
		require.NoError(t, l.Fail(t.Context(), onceq.Snooze(30*24*time.Hour)))
		commit(t, tx)
		return id
	}
}

// A request to cancel a job that its holder could not hear of, or that was left for a holder that is none, is found by a worker.
func TestCancel_ARequestThatNobodyHeardIsFound(t *testing.T) {
	t.Parallel()
	ran := onceq.Kind[int]{Name: "mail"}.Handle(func(context.Context, *onceq.Lease, int) error {
		return errors.New("this job was to be cancelled")
	})
	for name, left := range map[string]func(t *testing.T, db *queuetest.DB) (id int64){
		"the holder gives the job back before the request is committed": givenBack(onceq.Job{}),
		"the same in a lane whose failed jobs leave their places":       givenBack(onceq.Job{Lane: "a", LaneRule: onceq.Overtake}),
		"a transaction that emits what the job waits for is rolled back": func(t *testing.T, db *queuetest.DB) int64 {
			id := repairEnqueue(t, db, onceq.Job{})
			l := repairClaim(t, db)
			_, err := l.Await(t.Context(), "paid", "1", onceq.Forever)
			require.NoError(t, l.Fail(t.Context(), err))
			tx := begin(t, db)
			_, err = db.Queue.Emit(t.Context(), tx, "paid", "1", 1)
			require.NoError(t, err)
			wantState(t, onceq.StateRunning)(db.Queue.Cancel(t.Context(), db.Pool, id))
			require.NoError(t, tx.Rollback(t.Context()))
			return id
		},
		"a transaction that replaces the job is committed": func(t *testing.T, db *queuetest.DB) int64 {
			job := onceq.Job{Kind: "mail", Payload: 1, Key: "a", Delay: time.Hour, Replace: onceq.ReplacePayload | onceq.ReplaceTime}
			id := repairEnqueue(t, db, job)
			tx := begin(t, db)
			job.Payload = 2
			r, err := db.Queue.Enqueue(t.Context(), tx, job)
			require.NoError(t, err)
			require.True(t, r.Replaced)
			wantState(t, onceq.StateRunning)(db.Queue.Cancel(t.Context(), db.Pool, id))
			commit(t, tx)
			// From now on nobody is told that the job will run with what he gives.
			r, err = db.Queue.Enqueue(t.Context(), db.Pool, job)
			require.NoError(t, err)
			require.True(t, r.Duplicate)
			require.False(t, r.Replaced)
			job.Payload = 3
			_, err = db.Queue.Enqueue(t.Context(), db.Pool, job)
			require.ErrorIs(t, err, onceq.ErrMismatch)
			return id
		},
		"a transaction that redrives a member is rolled back": func(t *testing.T, db *queuetest.DB) int64 {
			g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, []onceq.Job{{Kind: "mail", Payload: 1}}, onceq.Job{Kind: "mail", Payload: 1})
			require.NoError(t, err)
			require.NoError(t, repairClaim(t, db).Fail(t.Context(), onceq.Fatal(errors.New("broken"))))
			tx := begin(t, db)
			wantState(t, onceq.StateWaiting)(onceqops.New(db.Queue).Redrive(t.Context(), tx, g.Members[0].ID))
			cancelled, asked, err := onceqops.New(db.Queue).CancelGroup(t.Context(), db.Pool, g.Then.ID)
			require.NoError(t, err)
			require.Equal(t, 1, cancelled+asked)
			require.NoError(t, tx.Rollback(t.Context()))
			return g.Then.ID
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			id := left(t, db)
			why, err := onceqops.New(db.Queue).Explain(t.Context(), db.Pool, id)
			require.NoError(t, err)
			require.Equal(t, onceqops.CauseCancelling, why.Cause(), why)
			w := start(t, db, onceq.WorkerConfig{}, ran)
			until(t, db, `exists (select from onceq.job_history where id = $1 and state = 7)`, id)
			require.NoError(t, w.stop())
			require.Equal(t, 1, w.count(onceq.EventCancelled))
			info, err := db.Queue.Get(t.Context(), db.Pool, id)
			require.NoError(t, err)
			require.Equal(t, onceq.StateCancelled, info.State)
		})
	}
}

// A job that was redriven after its cancel is not cancelled again.
func TestCancel_ARequestFromBeforeARedriveIsFoundNoMore(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := repairEnqueue(t, db, onceq.Job{RunAt: time.Now().Add(time.Hour)})
	repairExec(t, db, `insert into onceq.job_cancels values ($1, now() + interval '1 second')`, id)
	wantState(t, onceq.StateCancelled)(db.Queue.Cancel(t.Context(), db.Pool, id))
	wantState(t, onceq.StateDelayed)(onceqops.New(db.Queue).Redrive(t.Context(), db.Pool, id))
	other := repairEnqueue(t, db, onceq.Job{RunAt: time.Now().Add(time.Hour)})
	repairExec(t, db, `insert into onceq.job_cancels values ($1, now() + interval '1 second')`, other)
	w := start(t, db, onceq.WorkerConfig{}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	until(t, db, `exists (select from onceq.job_history where id = $1)`, other)
	require.NoError(t, w.stop())
	wantState(t, onceq.StateDelayed)(stateOf(db.Queue.Get(t.Context(), db.Pool, id)))
}

// A request from before a redrive, which is older than the job, does not keep the job from being replaced. A later one does.
func TestCancel_ARequestFromBeforeARedriveLetsReplace(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for _, lane := range []string{"", "f/n"} {
		job := onceq.Job{Kind: "mail", Key: "of " + lane, Lane: lane, Delay: time.Hour, Payload: 1, Replace: onceq.ReplacePayload}
		id := repairEnqueue(t, db, job)
		repairExec(t, db, `insert into onceq.job_cancels values ($1, now() - interval '1 hour')`, id)
		job.Payload = 2
		require.True(t, must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), db.Pool, job)).Replaced)
		repairExec(t, db, `update onceq.job_cancels set requested_at = now() where job_id = $1`, id)
		job.Payload = 3
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
		require.ErrorIs(t, err, onceq.ErrMismatch)
	}
}

// The request is found with the commit of a handler's transaction, however short the run was.
func TestCancel_OfAJobThatReschedulesInItsTransaction(t *testing.T) {
	t.Parallel()
	for name, job := range map[string]onceq.Job{
		"plain":      {},
		"in a lane":  {Lane: "a"},
		"in a limit": {Limit: "b"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			id := repairEnqueue(t, db, job)
			db.Drain(onceq.Kind[int]{Name: "mail"}.HandleTx(func(ctx context.Context, _ pgx.Tx, _ *onceq.Lease, _ int) error {
				wantState(t, onceq.StateRunning)(db.Queue.Cancel(ctx, db.Pool, id))
				return onceq.Reschedule(24 * time.Hour)
			}))
			wantState(t, onceq.StateCancelled)(stateOf(db.Queue.Get(t.Context(), db.Pool, id)))
		})
	}
}

// An effect is held, and reported, before its handler ends. Who settles it then has settled it for the job, too.
func TestResolve_BeforeTheJobItselfIsHeld(t *testing.T) {
	t.Parallel()
	for name, inTx := range map[string]bool{"at once": false, "in a transaction that is still open then": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			id := repairEnqueue(t, db, onceq.Job{Kind: "charge"})
			tx := begin(t, db)
			results := make(chan string, 1)
			var runs atomic.Int64
			handler := onceq.Kind[int]{Name: "charge"}.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
				runs.Add(1)
				result, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) {
					return "", errors.New("no answer")
				}, onceq.OnUncertain(onceq.Hold()))
				if errors.Is(err, onceq.ErrHeld) {
					by := onceq.DB(db.Pool)
					if inTx {
						by = tx
					}
					assert.NoError(t, onceqops.New(db.Queue).Resolve(ctx, by, id, "charge", onceq.Applied("ch_1")))
				}
				if err == nil {
					results <- result
				}
				return err
			})
			w := start(t, db, onceq.WorkerConfig{}, handler)
			until(t, db, `exists (select from onceq.jobs where attempts > 0) or exists (select from onceq.job_history)`)
			_, err := onceqops.New(db.Queue).Retry(t.Context(), db.Pool, id) // the first run leaves it uncertain
			require.NoError(t, err)
			if inTx {
				until(t, db, `exists (select from onceq.job_history where id = $1 and state = 8)`, id)
				commit(t, tx)
			}
			require.Equal(t, "ch_1", receive(t, results))
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Equal(t, int64(3), runs.Load())
		})
	}
}

// One whose effect waits for a person is looked at, and stays held.
func TestResolve_AHeldJobStaysHeld(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := repairEnqueue(t, db, onceq.Job{Kind: "charge"})
	runs := 0
	for range 4 {
		db.Drain(onceq.Kind[int]{Name: "charge"}.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			runs++
			_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) {
				return "", errors.New("no answer")
			}, onceq.OnUncertain(onceq.Hold()))
			return err
		}))
		db.Advance(time.Hour)
	}
	wantState(t, onceq.StateHeld)(stateOf(db.Queue.Get(t.Context(), db.Pool, id)))
	require.Equal(t, 2, runs)
}

// A delayed job is retried, and a worker completes it before Retry has read the job's state.
func TestRetry_OfAJobThatEndsAtOnce(t *testing.T) {
	t.Parallel()
	var retried atomic.Pointer[func()]
	db := queuetest.New(t, queuetest.PoolConfig(func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Tracer = &statementHook{after: func(sql string) {
			if f := retried.Load(); f != nil && strings.Contains(sql, "hurry(") && retried.CompareAndSwap(f, nil) {
				(*f)()
			}
		}}
	}))
	id := add(t, db, onceq.Job{Delay: time.Hour})
	ended := 0
	complete := func() {
		leases, err := db.Queue.Claim(context.Background(), onceq.ClaimOptions{})
		if assert.NoError(t, err) && assert.Len(t, leases, 1) {
			ended++
			assert.NoError(t, leases[0].Complete(context.Background(), nil))
		}
	}
	retried.Store(&complete)
	wantState(t, onceq.StateWaiting)(onceqops.New(db.Queue).Retry(t.Context(), db.Pool, id))
	require.Equal(t, 1, ended)
	_, err := onceqops.New(db.Queue).Retry(t.Context(), db.Pool, id)
	require.ErrorIs(t, err, onceq.ErrNotFound)
}
