package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// cancelWays are the ways to enqueue a job whose key may be taken. Each returns what it was told of that job.
var cancelWays = map[string]func(t *testing.T, db *queuetest.DB, in pgx.Tx, job onceq.Job) (onceq.Result, error){
	"Enqueue": func(t *testing.T, db *queuetest.DB, in pgx.Tx, job onceq.Job) (onceq.Result, error) {
		return db.Queue.Enqueue(t.Context(), in, job)
	},
	"Strict": func(t *testing.T, db *queuetest.DB, in pgx.Tx, job onceq.Job) (onceq.Result, error) {
		job.Strict = true
		return db.Queue.Enqueue(t.Context(), in, job)
	},
	"Replace": func(t *testing.T, db *queuetest.DB, in pgx.Tx, job onceq.Job) (onceq.Result, error) {
		job.Replace = onceq.ReplacePayload | onceq.ReplaceTime
		return db.Queue.Enqueue(t.Context(), in, job)
	},
	"EnqueueMany": func(t *testing.T, db *queuetest.DB, in pgx.Tx, job onceq.Job) (onceq.Result, error) {
		other := job
		other.Key = "other"
		all, err := db.Queue.EnqueueMany(t.Context(), in, []onceq.Job{other, job})
		if err != nil {
			return onceq.Result{}, err
		}
		return all[1], nil
	},
	"EnqueueInBatch": func(t *testing.T, db *queuetest.DB, in pgx.Tx, job onceq.Job) (onceq.Result, error) {
		b := &pgx.Batch{}
		p, err := db.Queue.EnqueueInBatch(b, job)
		require.NoError(t, err)
		require.NoError(t, in.SendBatch(t.Context(), b).Close())
		return p.Result(t.Context(), in)
	},
}

// cancelKinds are jobs that nobody has started yet.
var cancelKinds = map[string]onceq.Job{
	"waiting":                 {},
	"delayed":                 {Delay: time.Hour},
	"delayed, until finished": {Delay: time.Hour, Window: onceq.UntilFinished},
	"delayed, for ever":       {Delay: time.Hour, Window: onceq.Forever},
	"in a lane":               {Lane: "l"},
	"in a limit":              {Limit: "l", Delay: time.Hour},
}

// Who cancels a job that nobody has started, and enqueues its key again, means a new job: in one transaction, in every way.
func TestCancel_AJobThatNeverStartedFreesItsKey(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx, q := t.Context(), db.Queue
	for kind, job := range cancelKinds {
		for way, enqueue := range cancelWays {
			t.Run(kind+", "+way, func(t *testing.T) {
				job.Kind, job.Payload, job.Key = "mail", 1, kind+way
				first := enqOne(t, db, db.Pool, job)
				tx := enqBegin(t, db, pgx.ReadCommitted)
				wantState(t, onceq.StateCancelled)(q.Cancel(ctx, tx, first.ID))
				job.Payload = 2
				second, err := enqueue(t, db, tx, job)
				require.NoError(t, err)
				require.False(t, second.Duplicate, "%+v", second)
				require.Greater(t, second.ID, first.ID)
				require.NoError(t, tx.Commit(ctx))

				again, err := q.Enqueue(ctx, db.Pool, job)
				require.NoError(t, err)
				require.True(t, again.Duplicate)
				require.Equal(t, second.ID, again.ID)

				// The new job has the key now.
				_, err = onceqops.New(q).Redrive(ctx, db.Pool, first.ID)
				var taken *onceq.DuplicateError
				require.ErrorAs(t, err, &taken)
				require.Equal(t, second.ID, taken.Existing.ID)
				n, kept, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{IDs: []int64{first.ID}, States: []onceq.State{onceq.StateCancelled}})
				require.NoError(t, err)
				require.Equal(t, [2]int{0, 1}, [2]int{n, kept})
				_, _, err = onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{All: true})
				require.NoError(t, err)
			})
		}
	}
}

// The key that is free says so, wherever people look.
func TestCancel_AFreeKeyIsShownAsFree(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx, q := t.Context(), db.Queue
	for _, keep := range []bool{false, true} {
		key := fmt.Sprint(keep)
		id := enqOne(t, db, db.Pool, onceq.Job{Kind: "mail", Key: key, Window: time.Hour, Delay: time.Hour}).ID
		_, _, err := onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{IDs: []int64{id}, KeepKeys: keep})
		require.NoError(t, err)
		keys, err := onceqops.New(q).Keys(ctx, db.Pool, "mail", key)
		require.NoError(t, err)
		require.Len(t, keys, 1)
		want := keys[0].FinishedAt
		if keep {
			want = want.Add(time.Hour)
		}
		require.Equal(t, "cancelled", keys[0].State)
		require.Equal(t, !keep, keys[0].Free)
		require.Equal(t, want, keys[0].FreeAt)
		require.Equal(t, !keep, enqGet[bool](t, db.Pool, `select free_at = finished_at from `+pgx.Identifier{db.Schema, "v_keys"}.Sanitize()+` where key = $1`, key))
	}
}

// A worker had a token for these jobs, so something of them may have happened.
func TestCancel_AJobThatStartedKeepsItsKey(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx, q := t.Context(), db.Queue
	for name, end := range map[string]func(l *onceq.Lease) error{
		"snoozed":  func(l *onceq.Lease) error { return l.Snooze(ctx, time.Hour) },
		"failed":   func(l *onceq.Lease) error { return l.Fail(ctx, errors.New("some error")) },
		"released": func(l *onceq.Lease) error { return l.Release(ctx) },
		"dead, and redriven": func(l *onceq.Lease) error {
			if err := l.Fail(ctx, onceq.Fatal(errors.New("some error"))); err != nil {
				return err
			}
			_, err := onceqops.New(q).Redrive(ctx, db.Pool, l.ID)
			return err
		},
	} {
		job := onceq.Job{Kind: "mail", Key: name}
		id := enqOne(t, db, db.Pool, job).ID
		require.NoError(t, end(enqClaim(t, db)))
		wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
		require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateCancelled}, enqOne(t, db, db.Pool, job), name)
	}

	job := onceq.Job{Kind: "mail", Key: "running"}
	id := enqOne(t, db, db.Pool, job).ID
	l := enqClaim(t, db)
	wantState(t, onceq.StateRunning)(q.Cancel(ctx, db.Pool, id))
	require.NoError(t, l.Release(ctx))
	require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateCancelled}, enqOne(t, db, db.Pool, job))
}

// Cancel said that a job runs of which only the row was locked. When a worker cancels it later, its key stays.
func TestCancel_AJobThatWasAskedForKeepsItsKey(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx, q := t.Context(), db.Queue
	job := onceq.Job{Kind: "mail", Key: "a", Delay: time.Hour}
	id := enqOne(t, db, db.Pool, job).ID
	tx := enqBegin(t, db, pgx.ReadCommitted)
	enqExec(t, tx, `select from onceq.jobs where id = $1 for update`, id)
	wantState(t, onceq.StateRunning)(q.Cancel(ctx, db.Pool, id))
	require.NoError(t, tx.Commit(ctx))
	start(t, db, onceq.WorkerConfig{}, onceq.Kind[int]{Name: "mail"}.Handle(func(context.Context, *onceq.Lease, int) error {
		return errors.New("this job was to be cancelled")
	}))
	require.Eventually(t, func() bool {
		i, err := q.Get(ctx, db.Pool, id)
		return err == nil && i.State == onceq.StateCancelled
	}, patience, 10*time.Millisecond)
	require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateCancelled}, enqOne(t, db, db.Pool, job))
}

// With KeepKeys a sender who repeats what it sent does not bring the work back.
func TestCancelMany_KeepKeys(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	ctx, q := t.Context(), db.Queue
	for kind, job := range cancelKinds {
		t.Run(kind, func(t *testing.T) {
			job.Kind, job.Key = "mail", kind
			id := enqOne(t, db, db.Pool, job).ID
			cancel := func(keep bool) {
				t.Helper()
				n, asked, err := onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{IDs: []int64{id}, KeepKeys: keep})
				require.NoError(t, err)
				require.Equal(t, [2]int{1, 0}, [2]int{n, asked})
			}
			cancel(true)
			r := enqOne(t, db, db.Pool, job)
			require.Equal(t, job.Window != onceq.UntilFinished, r.Duplicate)
			if !r.Duplicate {
				return
			}
			require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateCancelled}, r)

			// Redriven and cancelled again, this time without the word, it frees the key.
			_, err := onceqops.New(q).Redrive(ctx, db.Pool, id)
			require.NoError(t, err)
			cancel(false)
			require.False(t, enqOne(t, db, db.Pool, job).Duplicate)
		})
	}

	filter := onceqops.Filter{All: true, KeepKeys: true}
	c, err := onceqops.New(q).WouldCancel(ctx, db.Pool, filter)
	require.NoError(t, err)
	require.NotZero(t, c.Count)
	for name, call := range map[string]func() error{
		"List":        func() error { _, err := onceqops.New(q).List(ctx, db.Pool, filter); return err },
		"RetryMany":   func() error { _, err := onceqops.New(q).RetryMany(ctx, db.Pool, filter); return err },
		"RedriveMany": func() error { _, _, err := onceqops.New(q).RedriveMany(ctx, db.Pool, filter); return err },
		"DiscardMany": func() error { _, err := onceqops.New(q).DiscardMany(ctx, db.Pool, filter); return err },
	} {
		var bad *onceq.InvalidError
		require.ErrorAs(t, call(), &bad, name)
		require.Equal(t, "Filter.KeepKeys", bad.Field)
	}
}

// A redriven job gets its key back, with the window and the payload that it had, also from a Reaper that has passed meanwhile.
func TestCancel_ARedriveGetsTheKeyBack(t *testing.T) {
	t.Parallel()
	for _, keep := range []bool{false, true} {
		t.Run(fmt.Sprint(keep), func(t *testing.T) {
			t.Parallel()
			db := enqNew(t)
			ctx, q := t.Context(), db.Queue
			job := onceq.Job{Kind: "mail", Key: "a", Payload: 1, Window: 100 * time.Hour, Delay: 30 * time.Hour}
			id := enqOne(t, db, db.Pool, job).ID
			_, _, err := onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{IDs: []int64{id}, KeepKeys: keep})
			require.NoError(t, err)
			db.Advance(20 * time.Hour)
			reap(t, newReaper(t, db, onceq.ReaperConfig{}), onceq.Reaped{})
			wantState(t, onceq.StateDelayed)(onceqops.New(q).Redrive(ctx, db.Pool, id))
			require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateDelayed}, enqOne(t, db, db.Pool, job))
			other := job
			other.Payload = 2
			_, err = q.Enqueue(ctx, db.Pool, other)
			require.ErrorIs(t, err, onceq.ErrMismatch)
			db.Advance(20 * time.Hour)
			require.Equal(t, id, enqFinish(t, db, nil))
			db.Advance(90 * time.Hour)
			require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateCompleted}, enqOne(t, db, db.Pool, job))
			db.Advance(20 * time.Hour)
			require.False(t, enqOne(t, db, db.Pool, job).Duplicate)
		})
	}
}
