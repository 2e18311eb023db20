package tests

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// waiting starts Wait and returns when it has looked once, so that what the test does next comes in between two looks.
func waiting(t *testing.T, db *queuetest.DB, ref onceq.JobRef) <-chan onceq.JobInfo {
	t.Helper()
	done, looked := make(chan onceq.JobInfo, 1), make(chan time.Time, 100)
	q := must[*onceq.Queue](t)(onceq.New(db.Pool, &onceq.Config{Schema: db.Schema}))
	go func() {
		job, err := q.Wait(context.WithValue(t.Context(), waitLooks{}, looked), ref)
		if err != nil {
			t.Errorf("Wait: %v", err)
		}
		done <- job
	}()
	<-looked
	return done
}

// waitLooks is where a context has the channel that gets the time after each statement.
type waitLooks struct{}

type looksTracer struct{ statementHook }

func (*looksTracer) looked(ctx context.Context) {
	if looked, ok := ctx.Value(waitLooks{}).(chan time.Time); ok {
		looked <- time.Now()
	}
}

func (l *looksTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	l.looked(ctx)
}
func (l *looksTracer) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchEndData) {
	l.looked(ctx)
}

func tellLooks(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = &looksTracer{} }

// Wait returns a job however it ends and whatever is left of it.
func TestWait(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(tellLooks))
	ctx := t.Context()
	work := func(key string) onceq.Job { return onceq.Job{Kind: "work", Key: key, MaxAttempts: 1} }
	claim := func() *onceq.Lease {
		leases := must[[]*onceq.Lease](t)(db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 1}))
		require.Len(t, leases, 1)
		return leases[0]
	}

	t.Run("by key, without a history", func(t *testing.T) {
		must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, work("a")))
		done := waiting(t, db, onceq.JobRef{Scope: "work", Key: "a"})
		l := claim()
		require.NoError(t, l.SetResult(map[string]int{"n": 7}))
		require.NoError(t, l.Complete(ctx, nil))
		job := <-done
		require.Equal(t, onceq.StateCompleted, job.State)
		require.JSONEq(t, `{"n": 7}`, string(job.Result))

		again := must[onceq.JobInfo](t)(db.Queue.Wait(ctx, onceq.JobRef{Scope: "work", Key: "a"}))
		require.JSONEq(t, `{"n": 7}`, string(again.Result), "it ended before")
	})
	t.Run("by id, with a key that is free at once", func(t *testing.T) {
		j := work("b")
		j.Window = onceq.UntilFinished
		id := must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, j)).ID
		done := waiting(t, db, onceq.JobRef{ID: id})
		require.NoError(t, claim().Complete(ctx, nil))
		next := must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, j)).ID
		job := <-done
		require.Equal(t, id, job.ID, "and not the job that has the key now")
		require.Equal(t, onceq.StateCompleted, job.State)
		must[onceq.State](t)(db.Queue.Cancel(ctx, db.Pool, next))
	})
	t.Run("without a key and a history", func(t *testing.T) {
		id := must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, work(""))).ID
		done := waiting(t, db, onceq.JobRef{ID: id})
		require.NoError(t, claim().Complete(ctx, nil))
		job := <-done
		require.Equal(t, id, job.ID)
		require.Equal(t, onceq.StateCompleted, job.State)
		require.Nil(t, job.Result)
		_, err := db.Queue.Wait(ctx, onceq.JobRef{ID: id})
		require.ErrorIs(t, err, onceq.ErrNotFound, "nothing is left to say that it was")
	})
	t.Run("dead", func(t *testing.T) {
		id := must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, work(""))).ID
		done := waiting(t, db, onceq.JobRef{ID: id})
		require.NoError(t, claim().Fail(ctx, errors.New("no such card")))
		job := <-done
		require.Equal(t, onceq.StateDead, job.State)
		require.Len(t, job.Errors, 1)
		require.Equal(t, "no such card", job.Errors[0].Error)
	})
	t.Run("cancelled", func(t *testing.T) {
		id := must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, work(""))).ID
		done := waiting(t, db, onceq.JobRef{ID: id})
		must[onceq.State](t)(db.Queue.Cancel(ctx, db.Pool, id))
		require.Equal(t, onceq.StateCancelled, (<-done).State)
	})
	t.Run("the context ends", func(t *testing.T) {
		id := must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, work(""))).ID
		limited, cancel := context.WithCancel(ctx)
		looked := make(chan time.Time, 100)
		go func() {
			<-looked
			<-looked
			cancel()
		}()
		job, err := db.Queue.Wait(context.WithValue(limited, waitLooks{}, looked), onceq.JobRef{ID: id})
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, id, job.ID)
		require.Equal(t, onceq.StateWaiting, job.State)
	})
	_, err := db.Queue.Wait(ctx, onceq.JobRef{})
	require.ErrorAs(t, err, new(*onceq.InvalidError))
	_, err = db.Queue.Wait(ctx, onceq.JobRef{ID: 1 << 40})
	require.ErrorIs(t, err, onceq.ErrNotFound)
	_, err = db.Queue.Wait(ctx, onceq.JobRef{Scope: "work", Key: "never"})
	require.ErrorIs(t, err, onceq.ErrNotFound)
}

// Wait looks at once when its job ends through its Queue, in whatever way. That shows when a look comes
// sooner than the pause before it; on a busy machine that may take some jobs.
func TestWait_LooksWhenTheJobEndsHere(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(tellLooks))
	ctx := t.Context()
	goOn := make(chan struct{})
	each := onceq.Kind[any]{Name: "each", Queue: "each"}
	inTx := onceq.Kind[any]{Name: "in tx", Queue: "in tx"}
	q := start(t, db, onceq.WorkerConfig{},
		each.Handle(func(context.Context, *onceq.Lease, any) error { <-goOn; return nil }),
		inTx.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, any) error { <-goOn; return nil })).q
	claim := func() *onceq.Lease {
		leases := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Limit: 1}))
		require.Len(t, leases, 1)
		return leases[0]
	}
	finish := func(int64) { goOn <- struct{}{} }
	for name, way := range map[string]struct {
		kind string
		end  func(id int64)
	}{
		"a worker":                {"each", finish},
		"a handler's transaction": {"in tx", finish},
		"Complete":                {"k", func(int64) { require.NoError(t, claim().Complete(ctx, nil)) }},
		"Fail, for the last time": {"k", func(int64) {
			require.NoError(t, claim().Fail(ctx, onceq.Fatal(errors.New("no"))))
		}},
		"Cancel": {"k", func(id int64) { must[onceq.State](t)(q.Cancel(ctx, db.Pool, id)) }},
		"Complete, and the commit": {"k", func(int64) {
			require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return claim().Complete(ctx, tx) }))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			const third = 100 * time.Millisecond // the pause after the third look
			sooner := func() bool {
				job := onceq.Job{Kind: way.kind, Queue: way.kind, Payload: 1}
				if way.kind == "k" {
					job.Queue = "" // of no worker
				}
				id := add(t, db, job)
				looked, done := make(chan time.Time, 100), make(chan error, 1)
				go func() {
					_, err := q.Wait(context.WithValue(ctx, waitLooks{}, looked), onceq.JobRef{ID: id})
					done <- err
				}()
				receive(t, looked)
				receive(t, looked)
				latest := receive(t, looked)
				way.end(id)
				next := receive(t, looked)
				require.NoError(t, receive(t, done))
				return next.Sub(latest) < third
			}
			for range 50 {
				if sooner() {
					return
				}
			}
			t.Error("each look came no sooner than its pause")
		})
	}
}
