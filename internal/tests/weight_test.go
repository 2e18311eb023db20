package tests

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// heavy makes a job of the limit "provider" that counts so often.
func heavy(weight int) onceq.Job {
	j := limitedAlone.Job(charge{1, weight})
	j.Weight = weight
	return j
}

// heavies enqueues jobs of these weights, and returns their ids.
func heavies(t testing.TB, db *queuetest.DB, weights ...int) []int64 {
	t.Helper()
	var jobs []onceq.Job
	for _, w := range weights {
		jobs = append(jobs, heavy(w))
	}
	return laneEnqueue(t, db.Queue, db.Pool, jobs...)
}

// claimed claims all that may be, and returns the weights of these jobs, with their leases.
func claimed(t testing.TB, db *queuetest.DB) (weights []int, leases []*onceq.Lease) {
	t.Helper()
	leases = laneClaim(t, db.Queue, 100)
	for _, l := range leases {
		weights = append(weights, l.Weight)
	}
	return weights, leases
}

func complete(t testing.TB, leases ...*onceq.Lease) {
	t.Helper()
	for _, l := range leases {
		require.NoError(t, l.Complete(t.Context(), nil))
	}
}

// A bad weight is refused before anything is written, whichever way the job comes.
func TestWeight_BadInput(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	zero := limitedAlone
	zero.Weight = func(c charge) int { return c.N }
	unlimited := onceq.Kind[charge]{Name: "free", Weight: zero.Weight}
	for _, c := range []struct {
		job    onceq.Job
		field  string
		reason string
	}{
		{onceq.Job{Kind: "k", Weight: 2}, "Weight", "is 2 without a Limit"},
		{onceq.Job{Kind: "k", Lane: "a", Weight: 2}, "Weight", "is 2 without a Limit"},
		{onceq.Job{Kind: "k", Weight: -1}, "Weight", "is -1 without a Limit"},
		{heavy(-1), "Weight", "is -1; 1 to 1,000,000,000 is possible"},
		{heavy(onceq.MaxWeight + 1), "Weight", "is 1000000001"},
		{zero.Job(charge{1, 0}), "Kind.Weight", `of "refund" has returned 0`},
		{zero.Job(charge{1, -5}), "Weight", "is -5"},
		{unlimited.Job(charge{1, 1}), "Weight", "is 1 without a Limit"},
	} {
		var bad *onceq.InvalidError
		_, err := db.Queue.Enqueue(ctx, db.Pool, c.job)
		require.ErrorAs(t, err, &bad, c.reason)
		require.Equal(t, c.field, bad.Field)
		require.Contains(t, bad.Reason, c.reason)
		_, err = db.Queue.EnqueueInBatch(&pgx.Batch{}, c.job)
		require.ErrorAs(t, err, &bad, c.reason)
		_, err = db.Queue.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "k"}, c.job})
		require.ErrorAs(t, err, &bad, c.reason)
		require.Equal(t, "jobs[1]."+c.field, bad.Field)
	}
	_, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, unlimited.Handle(func(context.Context, *onceq.Lease, charge) error { return nil }))
	require.ErrorContains(t, err, `Kind.Limit of "free" is nil although Weight is set`)
	none := zero
	none.Limit = func(charge) string { return "" }
	require.Zero(t, none.Job(charge{1, 7}).Weight) // there is nothing to count in

	ids := heavies(t, db, 1)
	l := laneClaimOne(t, db.Queue, ids[0])
	for _, n := range []int{-1, onceq.MaxWeight + 1} {
		var bad *onceq.InvalidError
		require.ErrorAs(t, l.SetWeight(n), &bad)
	}
	live, waiting := laneLive(t, db)
	require.Equal(t, []int{1, 0}, []int{live, waiting})
}

// A weight stays with its job, whichever way that comes and goes, and people see it.
func TestWeight_IsKept(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	q := db.Queue
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 100})
	weight := func(id int64) int { return must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).Weight }
	first := add(t, db, onceq.Job{Kind: "first"})
	kind := limitedInLane
	kind.Weight = func(c charge) int { return c.N }
	after := kind.Job(charge{1, 7})
	after.After = []onceq.JobRef{{ID: first}}
	many, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{kind.Job(charge{2, 7}), kind.Job(charge{3, 7}), after})
	require.NoError(t, err)
	batch := &pgx.Batch{}
	pending, err := q.EnqueueInBatch(batch, kind.Job(charge{4, 7}))
	require.NoError(t, err)
	require.NoError(t, db.Pool.SendBatch(ctx, batch).Close())
	r, err := pending.Result(ctx, db.Pool)
	require.NoError(t, err)
	for _, r := range append(many, r) {
		require.Equal(t, 7, weight(r.ID))
	}
	require.Equal(t, 1, weight(heavies(t, db, 1)[0]))
	require.Zero(t, weight(first))

	seen := map[int64]bool{}
	for n := 0; len(seen) < 4; n++ { // each fails, comes back, and is dead
		require.Less(t, n, 100)
		for _, l := range laneClaim(t, q, 100) {
			if l.Kind == "first" || l.Kind == "refund" {
				complete(t, l)
				continue
			}
			require.Equal(t, 7, l.Weight)
			switch {
			case l.Attempt == 1:
				require.NoError(t, l.Fail(ctx, onceq.RetryAfter(time.Hour, errors.New("no"))))
				require.Equal(t, 7, weight(l.ID))
				must[bool](t)(onceqops.New(q).Move(ctx, db.Pool, l.ID, "other"))
				must[bool](t)(onceqops.New(q).Move(ctx, db.Pool, l.ID, "default"))
				must[onceq.State](t)(onceqops.New(q).Retry(ctx, db.Pool, l.ID))
			default:
				require.NoError(t, l.Fail(ctx, onceq.Fatal(errors.New("no"))))
				require.Equal(t, 7, weight(l.ID))
				must[onceq.State](t)(onceqops.New(q).Redrive(ctx, db.Pool, l.ID))
				require.Equal(t, 7, weight(l.ID))
				seen[l.ID] = true
			}
		}
	}
}

// So much of a limit is live at once as it allows, and lighter jobs do not pass one that waits. One that
// weighs more than the limit runs alone.
func TestWeight_AtOnce(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 10})
	ids := heavies(t, db, 6, 5, 1, 1, 4, 25, 1)
	weights, leases := claimed(t, db)
	require.Equal(t, []int{6}, weights)
	e, err := onceqops.New(db.Queue).Explain(ctx, db.Pool, ids[2])
	require.NoError(t, err)
	require.Contains(t, e.String(), "it weighs 1, what is live 6, and what is before it 5")
	l, err := onceqops.New(db.Queue).Limit(ctx, db.Pool, "provider")
	require.NoError(t, err)
	require.Equal(t, []int{1, 6, 5}, []int{l.Live, l.Weight, l.Next})
	require.Equal(t, `limit "provider" is full: what is live weighs 6, the next job 5, and 10 may be live`, l.String())
	complete(t, leases...)

	weights, leases = claimed(t, db)
	require.Equal(t, []int{5, 1, 1}, weights)
	complete(t, leases[1:]...) // then 5 are live
	weights, more := claimed(t, db)
	require.Equal(t, []int{4}, weights)
	complete(t, leases[0])
	weights, _ = claimed(t, db)
	require.Empty(t, weights) // 25 waits until nothing is live, and 1 waits for it
	complete(t, more...)
	weights, leases = claimed(t, db)
	require.Equal(t, []int{25}, weights)
	weights, _ = claimed(t, db)
	require.Empty(t, weights)
	complete(t, leases...)
	weights, leases = claimed(t, db)
	require.Equal(t, []int{1}, weights)
	complete(t, leases...)
	require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "provider", onceq.Limit{}))
	heavies(t, db, 5)
	weights, _ = claimed(t, db)
	require.Empty(t, weights)
}

// A heavy job at the head of the line is not passed while somebody has it locked, by none of the ways in
// which a job ends.
func TestWeight_IsNotPassedWhileLocked(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, next := range []bool{false, true} {
		t.Run(fmt.Sprint("next ", next), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			setLimit(t, db, "provider", onceq.Limit{AtOnce: 3})
			heavies(t, db, 1, 1, 1)
			_, live := claimed(t, db)
			require.Len(t, live, 3)
			ids := heavies(t, db, 2, 1)
			complete(t, live[2])
			_, more := claimed(t, db) // a promoter finds that the first one has no room
			require.Empty(t, more)
			tx, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(ctx) }()
			_, err = tx.Exec(ctx, `select from onceq.job_waits where id = $1 for update`, ids[0])
			require.NoError(t, err)
			if next {
				require.Equal(t, live[0].ID, sqlOne[int64](t, db, `
					select f.done from onceq.jobs j cross join lateral onceq.finish_next(j.id, j.claims, j.holder, '', true, 1000000, 1, 'default', '{refund}') f where j.id = $1`, live[0].ID))
			} else {
				complete(t, live[0])
			}
			require.Equal(t, ids, sqlOne[[]int64](t, db, `select array_agg(id order by id) from onceq.job_waits`))
			require.NoError(t, tx.Rollback(ctx))
			weights, _ := claimed(t, db)
			require.Equal(t, []int{2}, weights)
			complete(t, live[1])
			weights, live = claimed(t, db)
			require.Equal(t, []int{1}, weights)
			heavies(t, db, 1, 1)
			complete(t, live...)
			require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from onceq.jobs where leased_until is null`), "completions let others in again")
		})
	}
}

// What a heavy job that waits has kept from its limit goes on when that job is cancelled, moved to a later
// time or made lighter.
func TestWeight_OneThatLeavesTheLineLetsOthersGoOn(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for name, leave := range map[string]func(*testing.T, *queuetest.DB, int64){
		"cancelled": func(t *testing.T, db *queuetest.DB, id int64) {
			_, err := db.Queue.Cancel(ctx, db.Pool, id)
			require.NoError(t, err)
		},
		"later": func(t *testing.T, db *queuetest.DB, _ int64) {
			j := heavy(9)
			j.Key, j.Replace, j.Delay = "heavy", onceq.ReplaceTime, time.Hour
			require.True(t, must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, j)).Replaced)
		},
		"lighter": func(t *testing.T, db *queuetest.DB, id int64) {
			j := heavy(2)
			j.Key, j.Replace = "heavy", onceq.ReplacePayload
			require.True(t, must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, j)).Replaced)
			require.Equal(t, 2, must[onceq.JobInfo](t)(db.Queue.Get(ctx, db.Pool, id)).Weight)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			setLimit(t, db, "provider", onceq.Limit{AtOnce: 10})
			heavies(t, db, 5)
			_, live := claimed(t, db)
			j := heavy(9)
			j.Key = "heavy"
			id := laneEnqueue(t, db.Queue, db.Pool, j)[0]
			last := heavies(t, db, 3)[0]
			weights, _ := claimed(t, db)
			require.Empty(t, weights)
			leave(t, db, id)
			_, next := claimed(t, db)
			require.NotEmpty(t, next)
			require.Equal(t, last, next[len(next)-1].ID)
			complete(t, append(live, next...)...)
		})
	}
}

// A live job keeps the weight with which it came in, also if its payload is replaced.
func TestWeight_ALiveOneKeepsIt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 10})
	j := heavy(5)
	j.Key = "heavy"
	id := laneEnqueue(t, db.Queue, db.Pool, j)[0]
	_, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "none"}) // lets it in
	require.NoError(t, err)
	until(t, db, `exists (select from onceq.jobs)`)
	other := heavy(8)
	other.Key, other.Replace = "heavy", onceq.ReplacePayload
	require.True(t, must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), db.Pool, other)).Replaced)
	l := laneClaimOne(t, db.Queue, id)
	require.Equal(t, 5, l.Weight)
	require.Contains(t, string(l.Payload), "8")
}

// If a limit is lowered, nothing comes in before the live jobs weigh little enough.
func TestWeight_LimitIsLowered(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 6})
	heavies(t, db, 3, 1, 1, 1, 1, 1)
	weights, leases := claimed(t, db)
	require.Equal(t, []int{3, 1, 1, 1}, weights)
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 4})
	_, more := claimed(t, db)
	require.Empty(t, more)
	complete(t, leases[3]) // 5 are live
	weights, _ = claimed(t, db)
	require.Empty(t, weights)
	db.Advance(2 * time.Second)
	_, _ = claimed(t, db)                                                                  // looks whether the limit is reached
	require.True(t, sqlOne[bool](t, db, `select bool_or(lowered) from onceq.lane_limits`)) // three jobs are live, and weigh 5
	complete(t, leases[2])
	weights, _ = claimed(t, db)
	require.Empty(t, weights)
	complete(t, leases[0])
	weights, _ = claimed(t, db)
	require.Equal(t, []int{1, 1}, weights)
}

// slotsOf are the times at which the live jobs start, in milliseconds after the first.
func slotsOf(t testing.TB, db *queuetest.DB) []int {
	t.Helper()
	return sqlOne[[]int](t, db, `
		select array_agg(round(extract(epoch from run_at - first) * 1000)::int order by id) from (select id, run_at, min(run_at) over () as first from onceq.jobs) j`)
}

// A job takes as many slots of a rate as it weighs. One that is heavier than the burst starts when all before
// it is paid, and the next one waits for it.
func TestWeight_Slots(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit   onceq.Limit
		weights []int
		slots   []int
	}{
		"max":              {onceq.Limit{Max: 11}, []int{1, 1, 1, 1, 1}, []int{0, 100, 200, 300, 400}}, // 100 ms apart
		"max, weighed":     {onceq.Limit{Max: 11}, []int{2, 1, 3, 1}, []int{0, 200, 300}},
		"burst":            {onceq.Limit{Rate: 10, Burst: 6}, []int{2, 2, 1, 1, 3, 1}, []int{0, 0, 0, 0, 400, 500}},
		"more than burst":  {onceq.Limit{Rate: 10, Burst: 1}, []int{3, 1, 1}, []int{0, 300, 400}},
		"with others":      {onceq.Limit{Rate: 10, Burst: 3}, []int{1, 1, 5, 1}, []int{0, 0, 200}},
		"much too heavy":   {onceq.Limit{Rate: 10, Burst: 3}, []int{1000, 1}, []int{0}},
		"the largest ever": {onceq.Limit{Max: 1, Per: 366 * 24 * time.Hour}, []int{onceq.MaxWeight, 1}, []int{0}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			setLimit(t, db, "provider", c.limit)
			var jobs []onceq.Job
			for _, w := range c.weights {
				jobs = append(jobs, heavy(w))
			}
			_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
			require.NoError(t, err)
			_, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "none"})
			require.NoError(t, err)
			require.Equal(t, c.slots, slotsOf(t, db))
		})
	}
}

// owed is when the limit "provider" has its whole burst again, in seconds of the database's clock.
func owed(t testing.TB, db *queuetest.DB) float64 {
	t.Helper()
	return sqlOne[float64](t, db, `select extract(epoch from free_at)::float8 from onceq.limit_rates`)
}

// With the end of an attempt the rate is charged what the job weighed more, or gets back what it weighed
// less, in the same commit: whichever way the attempt ends.
func TestWeight_IsCorrected(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	type run struct {
		*testing.T
		db     *queuetest.DB
		before float64
	}
	set := func(r *run, l *onceq.Lease, weight int) error {
		r.before = owed(r, r.db) // the start may have been so late that it was charged twice
		return l.SetWeight(weight)
	}
	kept := limitedAlone
	kept.Keep = time.Hour
	handled := func(k onceq.Kind[charge], weight int, err error) func(*run) {
		return func(r *run) {
			r.db.RunOne(k.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error { return errors.Join(err, set(r, l, weight)) }))
		}
	}
	inTx := func(weight int, end func(pgx.Tx) error) func(*run) {
		return func(r *run) {
			r.db.RunOne(limitedAlone.HandleTx(func(_ context.Context, tx pgx.Tx, l *onceq.Lease, _ charge) error {
				return errors.Join(set(r, l, weight), end(tx))
			}))
		}
	}
	byHand := func(weight int, end func(*run, *onceq.Lease) error) func(*run) {
		return func(r *run) {
			_, leases := claimed(r, r.db)
			require.Len(r, leases, 1)
			require.NoError(r, set(r, leases[0], weight))
			require.NoError(r, end(r, leases[0]))
		}
	}
	no := errors.New("no")
	for name, c := range map[string]struct {
		end  func(*run)
		more int
	}{
		"more":          {handled(limitedAlone, 8, nil), 3},
		"less":          {handled(limitedAlone, 2, nil), -3},
		"the same":      {handled(limitedAlone, 5, nil), 0},
		"an error":      {handled(limitedAlone, 8, onceq.RetryAfter(time.Hour, no)), 3},
		"dead":          {handled(limitedAlone, 8, onceq.Fatal(no)), 3},
		"snoozed":       {handled(limitedAlone, 8, onceq.Snooze(time.Hour)), 3},
		"kept":          {handled(kept, 8, nil), 3},
		"a transaction": {inTx(8, func(pgx.Tx) error { return nil }), 3},
		"rolled back":   {inTx(8, func(pgx.Tx) error { return onceq.RetryAfter(time.Hour, no) }), 3},
		"by hand":       {byHand(8, func(_ *run, l *onceq.Lease) error { return l.Complete(ctx, nil) }), 3},
		"the last call": {byHand(8, func(_ *run, l *onceq.Lease) error { return errors.Join(l.SetWeight(1), l.Complete(ctx, nil)) }), -4},
		"in a batch": {byHand(8, func(r *run, l *onceq.Lease) error {
			var b pgx.Batch
			return errors.Join(l.CompleteInBatch(&b), r.db.Pool.SendBatch(ctx, &b).Close())
		}), 3},
		"in a transaction that is undone": {byHand(8, func(r *run, l *onceq.Lease) error {
			tx, err := r.db.Pool.Begin(ctx)
			return errors.Join(err, l.Complete(ctx, tx), tx.Rollback(ctx))
		}), 0},
		"released": {byHand(0, func(_ *run, l *onceq.Lease) error { return l.Release(ctx) }), 0}, // it starts again
		"lost": {byHand(8, func(r *run, l *onceq.Lease) error {
			sqlRun(r, r.db, `update onceq.jobs set claims = claims + 1`)
			require.ErrorIs(r, l.Complete(ctx, nil), onceq.ErrLeaseLost)
			return nil
		}), 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.NoCheck())
			setLimit(t, db, "provider", onceq.Limit{Rate: 1, Per: time.Hour, Burst: 100})
			heavies(t, db, 5)
			r := &run{T: t, db: db}
			c.end(r)
			_, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "none"}) // answers the calls
			require.NoError(t, err)
			require.InDelta(t, 3600*float64(c.more), owed(t, db)-r.before, 1)
		})
	}
}

// Corrections of jobs that end in one statement all count, and what is given back is never more than what is
// owed.
func TestWeight_CorrectionsTogether(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	setLimit(t, db, "provider", onceq.Limit{Rate: 1, Per: time.Hour, Burst: 100})
	heavies(t, db, 5, 5, 5, 7)
	_, leases := claimed(t, db)
	require.Len(t, leases, 4)
	before := owed(t, db)
	sqlRun(t, db, `
		select onceq.finish(array_agg(id order by id), array_agg(claims order by id), array_agg(holder order by id), '{5,5,5,5}', '{"","","",""}', '{"","","",""}', '{0,0,0,0}', '{0,0,0,0}',
		                    true, '{"1": 2, "2": 2, "3": 2, "4": -1}') from onceq.jobs`)
	_, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "none"})
	require.NoError(t, err)
	require.InDelta(t, 5*3600, owed(t, db)-before, 1)

	heavies(t, db, 6)
	_, leases = claimed(t, db)
	sqlRun(t, db, `update onceq.limit_rates set free_at = statement_timestamp() + interval '2 hours'`)
	require.NoError(t, leases[0].SetWeight(0))
	complete(t, leases...)
	_, err = db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "none"})
	require.NoError(t, err)
	require.True(t, sqlOne[bool](t, db, `select free_at between statement_timestamp() - interval '1 hour' and statement_timestamp() from onceq.limit_rates`))

	setLimit(t, db, "provider", onceq.Limit{AtOnce: 3}) // which has nothing to correct
	heavies(t, db, 2)
	_, leases = claimed(t, db)
	require.NoError(t, leases[0].SetWeight(50))
	complete(t, leases...)
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.lane_calls where lane like E'/%\x1f%'`))
}

// Two workers, leases that end early, handlers that fail, panic and roll their completions back, limits that
// change, jobs that are cancelled, and a snapshot that somebody holds: in every snapshot of the tables no
// more is live than the limits allow, or one job that is heavier, and in the end all is done.
func TestWeight_UnderFaults(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	k := onceq.Kind[charge]{
		Name: "charge", MaxLost: 1000, MaxAttempts: 1000,
		Lane: func(c charge) string {
			if c.Customer%3 == 0 {
				return ""
			}
			return fmt.Sprint(c.Customer)
		},
		Limit:   func(c charge) string { return fmt.Sprint("provider/", c.Customer%2) },
		Weight:  func(c charge) int { return 1 + max(0, c.N%7-2) },
		Backoff: func(int, error) time.Duration { return time.Millisecond },
	}
	chargesUnderFaults(t, db, k, 6, conformance.Sized(10, 40), func(l *onceq.Lease) error {
		return errors.Join(l.SetWeight(rand.N(8)), laneFault())
	})
}

// With Max, all jobs but one that start in any window of time that is as long as Per weigh less than Max together,
// over several processes that are killed now and then. Also after an outage, when jobs have missed their
// slots. The one has the last slot, and need not start last: a job whose slot is just before may start after it.
func TestWeight_MaxInAnyWindow(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	limit := onceq.Limit{Max: 400, Per: time.Second}
	setLimit(t, db, "provider", limit)
	sqlRun(t, db, `create table stamps (at bigint, weight int)`)
	const jobs = 150
	var all []onceq.Job
	for n := range jobs {
		j := stamping.Job(charge{n, n})
		if j.Weight = 1 + n%9; n%50 == 49 {
			j.Weight = 600
		}
		all = append(all, j)
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, all)
	require.NoError(t, err)
	_, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "none"}) // lets jobs in, which miss their slots
	require.NoError(t, err)
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '10 minutes'`)
	sqlRun(t, db, `update onceq.limit_rates set free_at = free_at - interval '10 minutes'`)
	var workers [3]*process
	for i := range workers {
		workers[i] = startProcess(t, db, time.Second)
	}
	for kill := 1; kill <= 2; kill++ {
		until(t, db, `(select count(*) from stamps) >= $1::int`, kill*jobs/4)
		workers[kill%3].kill()
		workers[kill%3] = startProcess(t, db, time.Second)
	}
	until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
	rows, err := db.Pool.Query(t.Context(), `select at, weight from stamps order by at`)
	require.NoError(t, err)
	type stamp struct{ At, Weight int64 }
	stamps, err := pgx.CollectRows(rows, pgx.RowToStructByPos[stamp])
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(stamps), jobs)
	for last := range stamps {
		var all, heaviest int64
		first := last
		for ; first >= 0 && time.Duration(stamps[last].At-stamps[first].At)*time.Microsecond < limit.Per; first-- {
			all, heaviest = all+stamps[first].Weight, max(heaviest, stamps[first].Weight)
		}
		require.Less(t, all-heaviest, int64(limit.Max), "until start %d of %d; microseconds and weights: %v", last, len(stamps), stamps[first+1:last+1])
	}
	t.Logf("%d starts in %s", len(stamps), time.Duration(stamps[len(stamps)-1].At-stamps[0].At)*time.Microsecond)
}

// Jobs that missed their slots take those of others that weigh the same alone, and the rest waits for new
// ones.
func TestWeight_MissedSlots(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	setLimit(t, db, "provider", onceq.Limit{Rate: 100, Burst: 10})
	heavies(t, db, 4, 4, 4, 4, 2, 2)
	_, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "none"})
	require.NoError(t, err)
	until(t, db, `(select count(*) from onceq.jobs) = 6`)
	sqlRun(t, db, `update onceq.jobs set run_at = statement_timestamp() - interval '10 seconds'`)
	sqlRun(t, db, `update onceq.limit_rates set free_at = statement_timestamp() - interval '1 ms'`)
	sqlRun(t, db, `update onceq.jobs set leased_until = statement_timestamp() + interval '1 minute', holder = id, claims = 1 where id <= 3`)
	type answer struct{ Starts, Taken, Back []int64 }
	var got answer
	eventually(t, "a slot that is taken within 40 ms of its time", func() (inTime bool) {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
		var due time.Time
		require.NoError(t, tx.QueryRow(t.Context(), `
with d as (update onceq.jobs set run_at = clock_timestamp() where id > 3 returning run_at) select min(run_at) from d`).Scan(&due))
		require.NoError(t, tx.QueryRow(t.Context(), `
select f.starts, f.taken, f.back, clock_timestamp() < $1::timestamptz + interval '40 ms'
  from onceq.take_slots('/provider', '{1,2,3}', '{1,1,1}', '{1,2,3}') f`, due).Scan(&got.Starts, &got.Taken, &got.Back, &inTime))
		return inTime
	})
	// Of the burst of 10 nothing is left for late starts but 1: one starts, one takes the slot of job 4, the only other one of 4, and one waits.
	require.Equal(t, answer{[]int64{1}, []int64{2}, []int64{3}}, got)
}
