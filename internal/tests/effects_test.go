package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

// Such a job once left no history: nobody could find it, and its effect stayed uncertain for ever.
func TestCancel_InTheMiddleOfAnEffectIsFoundAndResolved(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{Key: "a"})
	charging := make(chan struct{}, 1)
	var replayed []string
	kind := onceq.Kind[int]{Name: "k"}
	handle := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		r, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (string, error) {
			charging <- struct{}{}
			<-ctx.Done()
			return "", ctx.Err()
		}, onceq.OnUncertain(onceq.Hold()))
		replayed = append(replayed, r)
		return err
	})
	w := start(t, db, onceq.WorkerConfig{Lease: steady}, handle)
	receive(t, charging)
	_, err := q.Cancel(ctx, db.Pool, id)
	require.NoError(t, err)
	until(t, db, noJobs)
	require.NoError(t, w.stop())

	info, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, info.State)
	require.Equal(t, 24*time.Hour, info.KeepUntil.Sub(info.FinishedAt))
	effects := func() []onceqops.EffectInfo {
		effects, err := onceqops.New(q).Effects(ctx, db.Pool, id)
		require.NoError(t, err)
		return effects
	}
	require.Len(t, effects(), 1)
	require.Equal(t, "uncertain", effects()[0].State)

	// While the outcome is unknown, the job can be found.
	reaper := newReaper(t, db, onceq.ReaperConfig{})
	for range 3 {
		db.Advance(30 * 24 * time.Hour)
		reaped, err := reaper.RunOnce(ctx)
		require.NoError(t, err)
		require.Zero(t, reaped.History+reaped.Effects)
		list, err := onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateCancelled}})
		require.NoError(t, err)
		require.Len(t, list, 1)
		require.Len(t, effects(), 1)
	}
	require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, id, "charge", onceq.Applied("ch_1")))
	require.Equal(t, "completed", effects()[0].State)
	info, err = q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, info.State, "a cancelled job does not run again because it was resolved")
	wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
	require.Equal(t, onceq.StateCompleted, db.RunOne(handle).State)
	require.Equal(t, "ch_1", replayed[len(replayed)-1])
}

func TestReaper_PrunesAResolvedEffectAfterItsCancelledJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{})
	_, err := onceq.Once(ctx, fenceLease(t, db), "charge", func(context.Context, string) (int, error) { return 0, errors.New("reset") })
	require.ErrorIs(t, err, onceq.ErrUncertain)
	db.ExpireLease(id)
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	reaper := newReaper(t, db, onceq.ReaperConfig{Batch: 1})
	db.Advance(25 * time.Hour)
	reap(t, reaper, onceq.Reaped{})
	require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, id, "charge", onceq.Applied(nil)))
	db.Advance(25 * time.Hour)
	reap(t, reaper, onceq.Reaped{History: 1})
	reap(t, reaper, onceq.Reaped{})
	db.Advance(26 * time.Hour)
	reap(t, reaper, onceq.Reaped{Effects: 1})
}

// setBack sets the sequence back, as a restore that forgets the sequence does.
func setBack(t *testing.T, db *queuetest.DB) {
	t.Helper()
	_, err := owner(t, db).Exec(t.Context(), `select setval('ids', 1, false)`)
	require.NoError(t, err)
}

// A new user once got the receipt of an earlier user, and was not charged.
func TestOnce_AnEffectOfAnotherJobThatHadTheIDIsAStrangers(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(context.Context, string) (string, error){
		"completed": func(context.Context, string) (string, error) { return "receipt of 1", nil },
		"uncertain": func(context.Context, string) (string, error) { return "", errors.New("reset") },
		"released":  func(context.Context, string) (string, error) { return "", onceq.NotApplied(errors.New("refused")) },
		"claimed":   nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.NoCheck())
			ctx, q := t.Context(), db.Queue
			first := add(t, db, onceq.Job{Key: "user 1"})
			l := fenceLease(t, db)
			key := l.IdempotencyKey("charge")
			if leave != nil {
				_, _ = onceq.Once(ctx, l, "charge", leave)
				require.NoError(t, l.Complete(ctx, nil))
			} else {
				_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) {
					require.NoError(t, l.Complete(ctx, nil))
					setBack(t, db)
					require.Equal(t, first, add(t, db, onceq.Job{Key: "user 2"}))
					r, err := onceq.Once(ctx, fenceLease(t, db), "charge", func(context.Context, string) (string, error) { return "receipt of 2", nil })
					require.NoError(t, err)
					require.Equal(t, "receipt of 2", r)
					return "receipt of 1", nil
				})
				require.ErrorIs(t, err, onceq.ErrLeaseLost)
				return
			}
			require.NoError(t, q.Check(ctx))
			setBack(t, db)
			require.ErrorIs(t, q.Check(ctx), onceq.ErrIDTaken, "nothing but fences has the ids")
			require.Equal(t, first, add(t, db, onceq.Job{Key: "user 2"}))
			effects, err := onceqops.New(q).Effects(ctx, db.Pool, first)
			require.NoError(t, err)
			require.Empty(t, effects)
			require.ErrorIs(t, onceqops.New(q).Resolve(ctx, db.Pool, first, "charge", onceq.Applied("x")), onceq.ErrNotFound)
			l = fenceLease(t, db)
			r, err := onceq.Once(ctx, l, "charge", func(_ context.Context, got string) (string, error) {
				require.NotEqual(t, key, got)
				return "receipt of 2", nil
			}, onceq.OnUncertain(onceq.Hold()))
			require.NoError(t, err)
			require.Equal(t, "receipt of 2", r)
			// The job's own effect stays its own through redelivery, death and redrive.
			never := func(context.Context, string) (string, error) { panic("twice") }
			l = fenceRedeliver(t, db)
			r, err = onceq.Once(ctx, l, "charge", never)
			require.NoError(t, err)
			require.Equal(t, "receipt of 2", r)
			require.NoError(t, l.Fail(ctx, onceq.Fatal(errors.New("dead"))))
			wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, first))
			r, err = onceq.Once(ctx, fenceLease(t, db), "charge", never)
			require.NoError(t, err)
			require.Equal(t, "receipt of 2", r)
			effects, err = onceqops.New(q).Effects(ctx, db.Pool, first)
			require.NoError(t, err)
			require.Len(t, effects, 1)
			require.Equal(t, l.IdempotencyKey("charge"), effects[0].IdempotencyKey)
		})
	}
}

// A dead job in the history and a live one have the same id. Each keeps its own effects.
func TestMove_ToAQueueWithAnEffectOfAnotherJobThatHadTheID(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	ctx, q := t.Context(), db.Queue
	charge := func(in string) *onceq.Lease {
		add(t, db, onceq.Job{Queue: in})
		l := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: in}))[0]
		_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) { return "receipt of " + in, nil })
		require.NoError(t, err)
		return l
	}
	require.NoError(t, charge("new").Complete(ctx, nil))
	setBack(t, db)
	l := charge("old")
	require.NoError(t, l.Release(ctx))
	_, err := onceqops.New(q).Move(ctx, db.Pool, l.ID, "new")
	require.ErrorIs(t, err, onceq.ErrIDTaken)
	effects := must[[]onceqops.EffectInfo](t)(onceqops.New(q).Effects(ctx, db.Pool, l.ID))
	require.Len(t, effects, 1)
	require.Equal(t, `"receipt of old"`, string(effects[0].Result))
}

func TestDiscard_LeavesTheEffectsOfAnotherJobThatHasTheID(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{})
	l := fenceLease(t, db)
	done := func(context.Context, string) (int, error) { return 1, nil }
	_, err := onceq.Once(ctx, l, "mail", done)
	require.NoError(t, err)
	require.NoError(t, l.Fail(ctx, onceq.Fatal(errors.New("dead"))))
	setBack(t, db)
	require.Equal(t, id, add(t, db, onceq.Job{}))
	l = fenceLease(t, db)
	_, err = onceq.Once(ctx, l, "charge", done)
	require.NoError(t, err)
	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, id))
	effects, err := onceqops.New(q).Effects(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Len(t, effects, 1)
	require.Equal(t, "charge", effects[0].Name)
	_, err = onceq.Once(ctx, fenceRedeliver(t, db), "charge", func(context.Context, string) (int, error) { panic("twice") })
	require.NoError(t, err)
}

// A later job with the same id once took the effect over, and the older one did it again after a redrive.
func TestOnce_AnEffectOfAnotherJobThatMayRunAgainIsNotTaken(t *testing.T) {
	t.Parallel()
	reset := func(context.Context, string) (string, error) { return "", errors.New("reset") }
	for name, end := range map[string]struct {
		call  func(context.Context, string) (string, error)
		leave func(*testing.T, *queuetest.DB, *onceq.Lease, error)
	}{
		"dead": {func(context.Context, string) (string, error) { return "receipt of 1", nil }, func(t *testing.T, _ *queuetest.DB, l *onceq.Lease, _ error) {
			require.NoError(t, l.Fail(t.Context(), onceq.Fatal(errors.New("dead"))))
		}},
		"held": {reset, func(t *testing.T, db *queuetest.DB, _ *onceq.Lease, err error) {
			require.ErrorIs(t, err, onceq.ErrUncertain)
			l := fenceRedeliver(t, db)
			_, err = onceq.Once(t.Context(), l, "charge", reset, onceq.OnUncertain(onceq.Hold()))
			require.ErrorIs(t, err, onceq.ErrHeld)
			require.NoError(t, l.Fail(t.Context(), err))
		}},
		"cancelled": {reset, func(t *testing.T, db *queuetest.DB, l *onceq.Lease, _ error) {
			require.NoError(t, l.Release(t.Context()))
			wantState(t, onceq.StateCancelled)(db.Queue.Cancel(t.Context(), db.Pool, l.ID))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.NoCheck())
			ctx, q := t.Context(), db.Queue
			id := add(t, db, onceq.Job{})
			l := fenceLease(t, db)
			older, err := onceq.Once(ctx, l, "charge", end.call, onceq.OnUncertain(onceq.Hold()))
			end.leave(t, db, l, err)
			effects, err := onceqops.New(q).Effects(ctx, db.Pool, id)
			require.NoError(t, err)
			require.Len(t, effects, 1)

			setBack(t, db)
			require.Equal(t, id, add(t, db, onceq.Job{}))
			l = fenceLease(t, db)
			_, err = onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) { panic("the older job would charge again") })
			require.ErrorIs(t, err, onceq.ErrIDTaken)
			require.ErrorContains(t, err, "discard")
			_, err = onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) { return 1, nil })
			require.NoError(t, err, "the older job has no such effect")
			_, err = onceqops.New(q).Redrive(ctx, db.Pool, id)
			if name == "held" {
				require.ErrorIs(t, err, onceq.ErrHeld)
			} else {
				require.ErrorIs(t, err, onceq.ErrIDTaken)
			}
			require.NoError(t, l.Complete(ctx, nil))

			// The older job has its effect as it was.
			effects, err = onceqops.New(q).Effects(ctx, db.Pool, id)
			require.NoError(t, err)
			require.Len(t, effects, 1)
			if name != "dead" {
				require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, id, "charge", onceq.Applied("receipt of 1")))
				older = "receipt of 1"
			}
			if name != "held" { // that one runs again already
				wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
			}
			r, err := onceq.Once(ctx, fenceLease(t, db), "charge", func(context.Context, string) (string, error) { panic("twice") })
			require.NoError(t, err)
			require.Equal(t, older, r)
		})
	}
}

// Two good runs once sent only one report.
func TestReschedule_EffectsArePerRunThatWasAskedFor(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"Handle", "HandleTx"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			id := add(t, db, onceq.Job{Key: "report", MaxAttempts: 2})
			var reports []string
			run := 0
			fn := func(ctx context.Context, l *onceq.Lease) error {
				run++
				if _, err := onceq.Once(ctx, l, "report", func(_ context.Context, key string) (int, error) {
					require.NotContains(t, reports, key)
					reports = append(reports, key)
					return run, nil
				}); err != nil {
					return err
				}
				switch run {
				case 1, 3:
					return errors.New("later") // the next run is a retry
				case 2:
					return onceq.Reschedule(0)
				case 4:
					return onceq.Fatal(errors.New("dead"))
				}
				return nil
			}
			kind := onceq.Kind[int]{Name: "k", Backoff: func(int, error) time.Duration { return 0 }}
			handle := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error { return fn(ctx, l) })
			if form == "HandleTx" {
				handle = kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
					_, err := tx.Exec(ctx, `select $1::int`, 1)
					require.NoError(t, err)
					return fn(ctx, l)
				})
			}
			db.Drain(handle)
			require.Equal(t, 4, run)
			require.Len(t, reports, 2)
			effects, err := onceqops.New(q).Effects(ctx, db.Pool, id)
			require.NoError(t, err)
			require.Len(t, effects, 1)
			require.Equal(t, reports[1], effects[0].IdempotencyKey)
			wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
			require.Equal(t, onceq.StateCompleted, db.RunOne(handle).State)
			require.Len(t, reports, 2, "a redrive runs the same run again")
		})
	}
}

// A job that reschedules itself for ever, under a new effect name each time, does not leave fences for ever.
func TestReaper_PrunesTheEffectsOfEarlierRounds(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	add(t, db, onceq.Job{})
	l := fenceLease(t, db)
	done := func(context.Context, string) (int, error) { return 1, nil }
	_, err := onceq.Once(ctx, l, "monday", done)
	require.NoError(t, err)
	_, err = onceq.Once(ctx, l, "lost", func(context.Context, string) (int, error) { return 0, errors.New("reset") })
	require.ErrorIs(t, err, onceq.ErrUncertain)
	require.NoError(t, l.Fail(ctx, onceq.Reschedule(0)))
	l = fenceLease(t, db)
	_, err = onceq.Once(ctx, l, "tuesday", done)
	require.NoError(t, err)
	reaper := newReaper(t, db, onceq.ReaperConfig{})
	reap(t, reaper, onceq.Reaped{})
	db.Advance(26 * time.Hour)
	reap(t, reaper, onceq.Reaped{Effects: 2})
	db.Advance(26 * time.Hour)
	reap(t, reaper, onceq.Reaped{})
	require.Equal(t, 1, fenceGet[int](t, db.Pool, `select count(*)::int from onceq.job_fences where class = 3 and key like '%/tuesday'`))
}

// An outage has held many jobs. Each has at least one effect of unknown outcome; some have two.
func TestResolveMany(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	kind := onceq.Kind[int]{Name: "charge", Key: func(i int) string { return string(rune('a' + i)) }}
	var ids []int64
	for i := range 6 {
		r, err := q.Enqueue(ctx, db.Pool, kind.Job(i))
		require.NoError(t, err)
		ids = append(ids, r.ID)
	}
	up := false
	var mu sync.Mutex // guards calls
	calls := map[string]int{}
	handle := kind.Handle(func(ctx context.Context, l *onceq.Lease, i int) error {
		effect := func(name string) error {
			_, err := onceq.Once(ctx, l, name, func(context.Context, string) (int, error) {
				mu.Lock()
				calls[name]++
				mu.Unlock()
				if !up {
					return 0, errors.New("reset")
				}
				return i, nil
			}, onceq.OnUncertain(onceq.Hold()))
			return err
		}
		err := effect("charge")
		if i >= 4 {
			err = errors.Join(err, effect("mail"))
		}
		if errors.Is(err, onceq.ErrUncertain) && !errors.Is(err, onceq.ErrHeld) {
			return onceq.Snooze(1)
		}
		return err
	})
	db.Drain(handle)
	held := func() int {
		list, err := onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateHeld}})
		require.NoError(t, err)
		return len(list)
	}
	require.Equal(t, 6, held())

	// Redriving a job that would be held again at once is an error that says so. RedriveMany counts such jobs.
	_, err := onceqops.New(q).Redrive(ctx, db.Pool, ids[0])
	require.ErrorIs(t, err, onceq.ErrHeld)
	require.ErrorContains(t, err, "Ops.Resolve")
	redriven, taken, err := onceqops.New(q).RedriveMany(ctx, db.Pool, onceqops.Filter{All: true, States: []onceq.State{onceq.StateHeld}})
	require.ErrorIs(t, err, onceq.ErrHeld)
	require.ErrorContains(t, err, "6 jobs")
	require.Zero(t, redriven+taken)
	require.Equal(t, 6, held())

	// Bad input is refused before anything is written.
	var invalid *onceq.InvalidError
	_, _, err = onceqops.New(q).ResolveMany(ctx, db.Pool, onceqops.Filter{}, "charge", onceq.Resolution{})
	require.ErrorAs(t, err, &invalid)
	_, _, err = onceqops.New(q).ResolveMany(ctx, db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateCompleted}}, "charge", onceq.NeverApplied())
	require.ErrorAs(t, err, &invalid)
	_, _, err = onceqops.New(q).ResolveMany(ctx, db.Pool, onceqops.Filter{}, "\x00", onceq.NeverApplied())
	require.ErrorAs(t, err, &invalid)
	none, redriven, err := onceqops.New(q).ResolveMany(ctx, db.Pool, onceqops.Filter{Kind: "other"}, "", onceq.NeverApplied())
	require.NoError(t, err)
	require.Zero(t, none+redriven)

	// A call in the caller's transaction takes effect only if that commits.
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	resolved, redriven, err := onceqops.New(q).ResolveMany(ctx, tx, onceqops.Filter{All: true}, "", onceq.NeverApplied())
	require.NoError(t, err)
	require.Equal(t, []int{8, 6}, []int{resolved, redriven})
	require.NoError(t, tx.Rollback(ctx))
	require.Equal(t, 6, held())

	up = true
	clear(calls)
	resolved, redriven, err = onceqops.New(q).ResolveMany(ctx, db.Pool, onceqops.Filter{Kind: "charge", Limit: 5}, "charge", onceq.NeverApplied())
	require.NoError(t, err)
	require.Equal(t, []int{5, 3}, []int{resolved, redriven}, "two have another effect that is held")
	db.Drain(handle)
	require.Equal(t, map[string]int{"charge": 3}, calls)
	require.Equal(t, 3, held())
	require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, ids[5], "mail", onceq.Applied(7))) // the last effect of this job: it runs again
	require.Equal(t, 2, held())
	resolved, redriven, err = onceqops.New(q).ResolveMany(ctx, db.Pool, onceqops.Filter{All: true}, "", onceq.Applied(7))
	require.NoError(t, err)
	require.Equal(t, []int{2, 2}, []int{resolved, redriven})
	for _, ran := range db.Drain(handle) {
		require.Equal(t, onceq.StateCompleted, ran.State)
	}
	require.Equal(t, map[string]int{"charge": 5}, calls, "and what was said to be applied is replayed")
	require.ErrorIs(t, onceqops.New(q).Resolve(ctx, db.Pool, ids[0], "charge", onceq.NeverApplied()), onceq.ErrNotFound)
	require.Zero(t, held())
}

func TestResolve_KeepsAJobHeldUntilNothingOfItIs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{})
	l := fenceLease(t, db)
	var err error
	for range 2 {
		for _, name := range []string{"a", "b"} {
			_, err = onceq.Once(ctx, l, name, func(context.Context, string) (int, error) { return 0, errors.New("reset") }, onceq.OnUncertain(onceq.Hold()))
		}
	}
	require.ErrorIs(t, err, onceq.ErrHeld)
	require.NoError(t, l.Fail(ctx, err))
	require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, id, "a", onceq.Applied(1)))
	info, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateHeld, info.State)
	require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, id, "b", onceq.NeverApplied()))
	info, err = q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateWaiting, info.State)
	err = onceqops.New(q).Resolve(ctx, db.Pool, id, "c", onceq.NeverApplied())
	require.ErrorIs(t, err, onceq.ErrNotFound)
	require.ErrorContains(t, err, `effect "c" of job`)
}

// Ask without a function once meant RunAgain, without a word.
func TestAsk_WithoutAFunctionIsAnError(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{})
	l := fenceLease(t, db)
	var invalid *onceq.InvalidError
	never := func(context.Context, string) (int, error) { panic("called") }
	_, err := onceq.Once(t.Context(), l, "charge", never, onceq.OnUncertain(onceq.Ask(nil)))
	require.ErrorAs(t, err, &invalid)
	_, err = db.Queue.Fence(onceq.FenceSpec{Key: "k", Policy: onceq.Ask(nil)})
	require.ErrorAs(t, err, &invalid)
	require.Zero(t, fenceGet[int](t, db.Pool, `select count(*)::int from onceq.job_fences where class > 0`))
}

// Once and Do without a function once began the effect and then panicked, so that its outcome was uncertain.
func TestOnce_WithoutAFunctionIsAnError(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{})
	l := fenceLease(t, db)
	var invalid *onceq.InvalidError
	_, err := onceq.Once[int](t.Context(), l, "charge", nil)
	require.ErrorAs(t, err, &invalid)
	require.ErrorContains(t, err, "fn is nil")
	_, err = onceq.Do[int](t.Context(), db.Queue, onceq.FenceSpec{Key: "k"}, nil)
	require.ErrorAs(t, err, &invalid)
	require.Zero(t, fenceGet[int](t, db.Pool, `select count(*)::int from onceq.job_fences where class > 0`))
	done, err := onceq.Once(t.Context(), l, "charge", func(context.Context, string) (int, error) { return 7, nil })
	require.NoError(t, err)
	require.Equal(t, 7, done)
}

// A staging system, made from a copy of production, once sent production's idempotency keys.
func TestNewInstallation(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	pool := owner(t, db)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	id := add(t, db, onceq.Job{Key: "a"})
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	l := leases[0]
	done := func(context.Context, string) (int, error) { return 1, nil }
	_, err = onceq.Once(ctx, l, "mail", done)
	require.NoError(t, err)
	_, err = onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 0, errors.New("reset") })
	require.ErrorIs(t, err, onceq.ErrUncertain)
	before := l.IdempotencyKey("charge")
	_, err = q.NewInstallation(ctx)
	require.ErrorContains(t, err, "1 leases have not run out")
	require.Equal(t, before, l.IdempotencyKey("charge"))

	require.NoError(t, l.Release(ctx))
	held, err := q.NewInstallation(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, held)
	leases, err = q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	l = leases[0]
	require.NotEqual(t, before, l.IdempotencyKey("charge"))
	_, err = onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) { panic("twice") })
	require.NoError(t, err, "what is done is done")
	_, err = onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { panic("under another key") })
	require.ErrorIs(t, err, onceq.ErrHeld)
	require.ErrorContains(t, err, "reset; its idempotency key is another")
	require.NoError(t, l.Fail(ctx, err))
	require.NoError(t, onceqops.New(q).Resolve(ctx, db.Pool, id, "charge", onceq.NeverApplied()))
}

// A job whose id was already in the history could not leave the table. It ran again each time its lease ran out.
func TestHistory_AJobThatHadTheIDIsNoReasonToRunAgain(t *testing.T) {
	t.Parallel()
	fail := errors.New("no")
	for name, k := range map[string]onceq.Kind[bool]{
		"kept":     {Name: "k", Keep: time.Hour},
		"not kept": {Name: "k"},
	} {
		for how, handler := range map[string]func(run func(ok bool) error) onceq.Handler{
			"Handle": func(run func(bool) error) onceq.Handler {
				return k.Handle(func(_ context.Context, _ *onceq.Lease, ok bool) error { return run(ok) })
			},
			"HandleTx": func(run func(bool) error) onceq.Handler {
				return k.HandleTx(func(_ context.Context, _ pgx.Tx, _ *onceq.Lease, ok bool) error { return run(ok) })
			},
			"HandleBatch": func(run func(bool) error) onceq.Handler {
				return k.HandleBatch(5, func(_ context.Context, _ pgx.Tx, items []onceq.Item[bool]) error { return run(items[0].Payload) })
			},
		} {
			for _, c := range []struct {
				older, newer     bool // whether it completes
				cancelled, stays bool // whether Cancel cancels the newer one; whether the older one is in the history afterwards
			}{{true, true, false, false}, {true, false, false, false}, {false, true, false, true}, {true, false, true, false}} {
				t.Run(fmt.Sprintf("%s, %s, %v", name, how, c), func(t *testing.T) {
					t.Parallel()
					conformance.Few(t, 4)
					db := queuetest.New(t)
					ctx, q := t.Context(), db.Queue
					calls := 0
					h := handler(func(ok bool) error {
						if calls++; !ok {
							return onceq.Fatal(fail)
						}
						return nil
					})
					enqueue := func(key string, ok bool) int64 {
						job := k.Job(ok)
						job.Key = key
						r, err := q.Enqueue(ctx, db.Pool, job)
						require.NoError(t, err)
						return r.ID
					}
					first := enqueue("older", c.older)
					db.RunOne(h)
					setBack(t, db)
					require.Equal(t, first, enqueue("newer", c.newer))
					if c.cancelled {
						wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, first))
					} else {
						ran := db.RunOne(h)
						require.Equal(t, c.newer, ran.State == onceq.StateCompleted, ran.Err)
						require.Equal(t, 2, calls)
					}
					require.Zero(t, sqlOne[int](t, db, `select count(*)::int from onceq.jobs`))
					if c.stays || name == "kept" || !c.newer {
						key := map[bool]string{true: "older", false: "newer"}[c.stays]
						require.Equal(t, key, sqlOne[string](t, db, `select key from onceq.job_history`))
					}
				})
			}
		}
	}
}

func TestHistory_TwoJobsOfOneIDThatWaitForAPerson(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	k := onceq.Kind[int]{Name: "k"}
	fails := k.Handle(func(context.Context, *onceq.Lease, int) error { return onceq.Fatal(errors.New("no")) })
	id := add(t, db, onceq.Job{Kind: "k", Key: "older", Payload: 1})
	require.Equal(t, onceq.StateDead, db.RunOne(fails).State)
	setBack(t, db)
	require.Equal(t, id, add(t, db, onceq.Job{Kind: "k", Key: "newer", Payload: 2}))
	_, err := q.Cancel(ctx, db.Pool, id)
	require.ErrorIs(t, err, onceq.ErrIDTaken)
	require.ErrorContains(t, err, "discard that one")
	require.Equal(t, onceq.StateRetrying, db.RunOne(fails).State)
	info, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, "newer", info.Key)
	require.Contains(t, info.Errors[0].Error, "discard that one")

	require.NoError(t, onceqops.New(q).Discard(ctx, db.Pool, id))
	wantState(t, onceq.StateRetrying)(onceqops.New(q).Retry(ctx, db.Pool, id))
	require.Equal(t, onceq.StateDead, db.RunOne(fails).State)
	info, err = q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, info.State)
	require.Equal(t, "newer", info.Key)
}

// A provider that answers without a body leaves a nil json.RawMessage, or an empty one. It counts as null wherever JSON is taken.
func TestResult_AnEmptyRawMessageIsNull(t *testing.T) {
	t.Parallel()
	for name, empty := range map[string]json.RawMessage{"nil": nil, "empty": {}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			k := onceq.Kind[int]{Name: "k", Key: func(int) string { return "a" }, Backoff: func(int, error) time.Duration { return 0 }}
			id := add(t, db, k.Job(1))
			calls, runs, replayed := 0, 0, ""
			db.Drain(k.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
				v, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (json.RawMessage, error) { calls++; return empty, nil })
				if err != nil {
					return err
				}
				if runs++; runs == 1 {
					return errors.New("the next run replays the effect")
				}
				replayed = string(v)
				return l.SetResult(empty)
			}))
			require.Equal(t, 1, calls)
			require.Equal(t, "null", replayed)
			r, err := q.Enqueue(ctx, db.Pool, k.Job(1))
			require.NoError(t, err)
			require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateCompleted, Output: json.RawMessage("null")}, r)

			_, err = q.Emit(ctx, db.Pool, "s", "e", empty)
			require.NoError(t, err)
			payload, emitted, err := q.Event(ctx, db.Pool, "s", "e")
			require.NoError(t, err)
			require.True(t, emitted)
			require.Equal(t, "null", string(payload))

			for key, settle := range map[string]func(f *onceq.Fence, c *onceq.FenceLease) error{
				"completed": func(_ *onceq.Fence, c *onceq.FenceLease) error { return c.Complete(ctx, nil, empty) },
				"resolved": func(f *onceq.Fence, c *onceq.FenceLease) error {
					require.NoError(t, c.Uncertain(ctx, nil, errors.New("time-out")))
					return f.Resolve(ctx, nil, onceq.Applied(empty))
				},
			} {
				f := fenceOf(t, db, onceq.FenceSpec{Key: key})
				require.NoError(t, settle(f, fenceClaim(t, f, nil)))
				c, err := f.Claim(ctx, nil)
				require.NoError(t, err)
				require.True(t, c.Replayed)
				require.Equal(t, "null", string(c.Result))
			}
		})
	}
}
