package tests

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
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

// limited are two kinds that share a limit; the first has a lane for each customer as well.
var (
	limitedInLane = onceq.Kind[charge]{Name: "charge", Lane: charges.Lane, Limit: func(charge) string { return "provider" }}
	limitedAlone  = onceq.Kind[charge]{Name: "refund", Limit: func(charge) string { return "provider" }}
)

func setLimit(t testing.TB, db *queuetest.DB, name string, limit onceq.Limit) {
	t.Helper()
	require.NoError(t, db.Queue.SetLimit(context.Background(), db.Pool, name, limit))
}

// A limit holds over lanes and kinds, and a lane with a limit still runs one at a time and in order, whichever way the jobs are
// completed.
func TestLimit_SharedByLanesAndKinds(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	type seen struct {
		sync.Mutex
		now, most int
		lane      map[int]int
		order     map[int][]int64
	}
	run := func(t *testing.T, s *seen, l *onceq.Lease, c charge) {
		s.Lock()
		s.now++
		s.most = max(s.most, s.now)
		if l.Kind == "charge" {
			if s.lane[c.Customer]++; s.lane[c.Customer] > 1 {
				t.Errorf("two jobs of lane %d run", c.Customer)
			}
			s.order[c.Customer] = append(s.order[c.Customer], l.ID)
		}
		s.Unlock()
		time.Sleep(time.Millisecond) // something to overlap with
		s.Lock()
		s.now--
		if l.Kind == "charge" {
			s.lane[c.Customer]--
		}
		s.Unlock()
	}
	handlers := map[string]func(*testing.T, *queuetest.DB, *seen, onceq.Kind[charge]) onceq.Handler{
		"lease": func(t *testing.T, _ *queuetest.DB, s *seen, k onceq.Kind[charge]) onceq.Handler {
			return k.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { run(t, s, l, c); return nil })
		},
		"kept": func(t *testing.T, _ *queuetest.DB, s *seen, k onceq.Kind[charge]) onceq.Handler {
			k.Keep = time.Hour
			return k.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { run(t, s, l, c); return nil })
		},
		"transaction": func(t *testing.T, _ *queuetest.DB, s *seen, k onceq.Kind[charge]) onceq.Handler {
			return k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c charge) error {
				run(t, s, l, c)
				_, err := tx.Exec(ctx, `select $1::int`, 1)
				return err
			})
		},
		"serializable": func(t *testing.T, _ *queuetest.DB, s *seen, k onceq.Kind[charge]) onceq.Handler {
			k.Serializable = true
			return k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c charge) error {
				run(t, s, l, c)
				_, err := tx.Exec(ctx, `select $1::int`, 1)
				return err
			})
		},
		"batch": func(t *testing.T, _ *queuetest.DB, s *seen, k onceq.Kind[charge]) onceq.Handler {
			return k.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, items []onceq.Item[charge]) error {
				for _, i := range items {
					run(t, s, i.Lease, i.Payload)
				}
				return nil
			})
		},
		"own transaction": func(t *testing.T, db *queuetest.DB, s *seen, k onceq.Kind[charge]) onceq.Handler {
			return k.Handle(func(ctx context.Context, l *onceq.Lease, c charge) error {
				run(t, s, l, c)
				return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return l.Complete(ctx, tx) })
			})
		},
	}
	for what, handler := range handlers {
		for _, many := range []bool{false, true} {
			t.Run(fmt.Sprint(what, ", many ", many), func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 4)
				db := queuetest.New(t)
				setLimit(t, db, "provider", onceq.Limit{AtOnce: 3})
				var jobs []onceq.Job
				for n := range 40 {
					jobs = append(jobs, limitedInLane.Job(charge{n % 6, n}))
				}
				for n := range 10 {
					jobs = append(jobs, limitedAlone.Job(charge{n, n}))
				}
				for i := range jobs {
					if i%2 == 0 {
						jobs[i].Key = fmt.Sprint(i)
					}
				}
				if many {
					_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
					require.NoError(t, err)
				} else {
					laneEnqueue(t, db.Queue, db.Pool, jobs...)
				}
				require.NoError(t, db.Check())
				s := &seen{lane: map[int]int{}, order: map[int][]int64{}}
				ran := db.Drain(handler(t, db, s, limitedInLane), handler(t, db, s, limitedAlone))
				require.Len(t, ran, 50)
				require.LessOrEqual(t, s.most, 3)
				for _, ids := range s.order {
					require.True(t, slices.IsSorted(ids), "%v", ids)
				}
				live, waiting := laneLive(t, db)
				require.Equal(t, []int{0, 0}, []int{live, waiting})
				require.NoError(t, db.Check())
			})
		}
	}
}

// A flood in one lane does not keep those of the other lanes from the limit: the lanes take turns.
func TestLimit_LanesTakeTurns(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := context.Background()
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 1})
	var flood []onceq.Job
	for n := range 200 {
		flood = append(flood, limitedInLane.Job(charge{1, n}))
	}
	_, err := db.Queue.EnqueueMany(ctx, db.Pool, flood)
	require.NoError(t, err)
	laneEnqueue(t, db.Queue, db.Pool, limitedInLane.Job(charge{2, 1}), limitedInLane.Job(charge{2, 2}), limitedInLane.Job(charge{3, 1}))
	var order []int
	db.Drain(limitedInLane.Handle(func(_ context.Context, _ *onceq.Lease, c charge) error { order = append(order, c.Customer); return nil }))
	require.Len(t, order, 203)
	require.Less(t, slices.Index(order, 3), 6, "%v", order[:20])
	require.Less(t, len(order[:20])-len(slices.DeleteFunc(slices.Clone(order[:20]), func(c int) bool { return c == 2 })), 3)
	require.Contains(t, order[:10], 2)
}

// A job that waits for its next attempt leaves its place in the limit to others, and keeps the one in its lane.
func TestLimit_RetriesLeaveTheLimitAndKeepTheLane(t *testing.T) {
	t.Parallel()
	for _, overtake := range []bool{false, true} {
		t.Run(fmt.Sprint("overtake ", overtake), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			k := limitedInLane
			k.Backoff = func(int, error) time.Duration { return time.Minute }
			if overtake {
				k.LaneRule = onceq.Overtake
			}
			setLimit(t, db, "provider", onceq.Limit{AtOnce: 1})
			ids := laneEnqueue(t, db.Queue, db.Pool, k.Job(charge{1, 1}), k.Job(charge{1, 2}), k.Job(charge{2, 1}))
			var order []int64
			h := k.Handle(func(_ context.Context, l *onceq.Lease, c charge) error {
				if order = append(order, l.ID); l.ID == ids[0] && l.Attempt == 1 {
					return errors.New("no")
				}
				return nil
			})
			db.Drain(h)
			require.NoError(t, db.Check())
			info, err := db.Queue.Get(context.Background(), db.Pool, ids[0])
			require.NoError(t, err)
			require.Equal(t, []any{true, "charge/1", "provider"}, []any{info.Blocked, info.Lane, info.Limit})
			if overtake {
				require.Len(t, order, 3)
			} else {
				require.Equal(t, []int64{ids[0], ids[2]}, order)
			}
			db.Advance(2 * time.Minute)
			db.Drain(h)
			require.Len(t, order, 4)
			live, waiting := laneLive(t, db)
			require.Equal(t, []int{0, 0}, []int{live, waiting})
			require.NoError(t, db.Check())
		})
	}
}

// Limits change while jobs run, up and down, alone and for a family, and are removed.
func TestLimit_Changes(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, name := range []string{"bank/7", "bank/"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			q := db.Queue
			k := onceq.Kind[charge]{Name: "charge", Lane: charges.Lane, Limit: func(charge) string { return "bank/7" }}
			live := func(n int) {
				t.Helper()
				laneClaim(t, q, 50) // lets jobs in
				eventually(t, fmt.Sprint("live: ", n), func() bool {
					laneClaim(t, q, 50)
					return repairCount(t, db, `select count(*) from onceq.jobs`) == n
				})
				require.NoError(t, db.Check())
			}
			end := func(n int) {
				t.Helper()
				all, err := onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateRunning}, Limit: n})
				require.NoError(t, err)
				require.Len(t, all, n)
				for _, j := range all {
					_, err := db.Pool.Exec(ctx, `update onceq.jobs set leased_until = statement_timestamp() where id = $1`, j.ID)
					require.NoError(t, err)
					_, err = q.Cancel(ctx, db.Pool, j.ID)
					require.NoError(t, err)
				}
			}
			for n := range 30 {
				laneEnqueue(t, q, db.Pool, k.Job(charge{n, 0}))
			}
			live(1)
			setLimit(t, db, name, onceq.Limit{AtOnce: 5})
			live(5)
			setLimit(t, db, name, onceq.Limit{AtOnce: 2})
			live(5)
			end(3)
			live(2)
			end(1)
			live(2)
			setLimit(t, db, name, onceq.Limit{})
			end(2)
			live(0)
			setLimit(t, db, name, onceq.Limit{AtOnce: 4})
			live(4)
			require.NoError(t, q.RemoveLimit(ctx, db.Pool, name))
			live(4)
			end(3)
			live(1)
			eventually(t, "the row is gone", func() bool {
				laneClaim(t, q, 50)
				return repairCount(t, db, `select count(*) from onceq.lane_limits`) == 0
			})
			setLimit(t, db, name, onceq.Limit{Rate: 1000})
			live(21)
		})
	}
}

// RemoveLaneLimit undoes SetLaneLimit: the family's limit holds, or one at a time.
func TestLane_RemoveLimit(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	q := db.Queue
	limit := func(want int) {
		t.Helper()
		n, err := q.LaneLimit(ctx, db.Pool, "charge", "1")
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "charge", "", 2))
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "charge", "1", 4))
	limit(4)
	var jobs []onceq.Job
	for n := range 10 {
		jobs = append(jobs, charges.Job(charge{1, n}))
	}
	laneEnqueue(t, q, db.Pool, jobs...)
	held := laneClaim(t, q, 20)
	require.Len(t, held, 4)
	require.NoError(t, q.RemoveLaneLimit(ctx, db.Pool, "charge", "1"))
	limit(2)
	for _, l := range held[:2] { // above what holds now: nobody follows
		require.NoError(t, l.Complete(ctx, nil))
		require.Empty(t, laneClaim(t, q, 20))
		require.NoError(t, db.Check())
	}
	require.NoError(t, held[2].Complete(ctx, nil))
	next := laneClaim(t, q, 20)
	require.Len(t, next, 1)
	require.NoError(t, q.RemoveLaneLimit(ctx, db.Pool, "charge", ""))
	limit(1)
	require.NoError(t, held[3].Complete(ctx, nil))
	require.Empty(t, laneClaim(t, q, 20))
	require.NoError(t, next[0].Complete(ctx, nil))
	require.Len(t, laneClaim(t, q, 20), 1)
	eventually(t, "the row is gone", func() bool {
		laneClaim(t, q, 20)
		return repairCount(t, db, `select count(*) from onceq.lane_limits`) == 0
	})
	require.NoError(t, db.Check())
}

// What asks about jobs knows those that wait for a limit, and why.
func TestLimit_IsExplained(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	q := db.Queue
	ids := laneEnqueue(t, q, db.Pool, limitedAlone.Job(charge{1, 1}), limitedAlone.Job(charge{2, 1}), limitedInLane.Job(charge{3, 1}), limitedInLane.Job(charge{3, 2}))
	first := laneClaimOne(t, q, ids[0])
	require.Equal(t, []string{"", "provider"}, []string{first.Lane, first.Limit})
	explain := func(id int64, cause onceqops.Cause, texts ...string) onceqops.Reason {
		t.Helper()
		why, err := onceqops.New(q).Explain(ctx, db.Pool, id)
		require.NoError(t, err)
		require.Equal(t, cause, why.Cause(), why.String())
		for _, text := range texts {
			require.Contains(t, why.String(), text)
		}
		return why.Reasons[0]
	}
	r := explain(ids[1], onceqops.CauseLimit, `its share of limit "provider", which nobody has set itself, of which 1 may be live at once`, "the first lease among them lasts until")
	require.Contains(t, r.Advice, "set the limit, or one for its family, if more of them may be live")
	require.Equal(t, []any{ids[:1], 1, 0}, []any{r.Ahead, r.Slots, r.Before})
	explain(ids[2], onceqops.CauseLimit)
	require.Equal(t, []int64{ids[2]}, explain(ids[3], onceqops.CauseLane).Ahead, "it has the lane's place, and waits for the limit")
	lanes, err := onceqops.New(q).Lanes(ctx, db.Pool, onceqops.LaneFilter{})
	require.NoError(t, err)
	require.Len(t, lanes, 1)
	require.Equal(t, []any{"charge/3", 1, 1}, []any{lanes[0].Lane, lanes[0].Live, lanes[0].Waiting})
	stats, err := onceqops.New(q).Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, 3, stats[0].Blocked)

	limits, err := onceqops.New(q).Limits(ctx, db.Pool, onceqops.LimitFilter{})
	require.NoError(t, err)
	require.Len(t, limits, 1)
	limits[0].Oldest = 0
	require.Equal(t, onceqops.LimitInfo{Name: "provider", Limit: onceq.Limit{AtOnce: 1}, Live: 1, Weight: 1, LiveIDs: ids[:1], Waiting: 2, Next: 1}, limits[0])
	require.Contains(t, limits[0].String(), `limit "provider" (not set itself) is full: 1 of its jobs is live, and 1 may be`)

	setLimit(t, db, "provider", onceq.Limit{})
	explain(ids[1], onceqops.CauseLimit, `its limit "provider" lets no job start`, "raise its limit")
	health := func() (all []string) {
		findings, err := onceqops.New(q).Health(ctx)
		require.NoError(t, err)
		for _, f := range findings {
			if f.What == "limit" {
				all = append(all, f.Detail)
			}
		}
		return all
	}
	_, err = db.Pool.Exec(ctx, `update onceq.job_waits set run_at = run_at - interval '10 minutes'`)
	require.NoError(t, err)
	require.Equal(t, []string{`limit "provider" lets no job start, and jobs wait for it`}, health())

	setLimit(t, db, "provider", onceq.Limit{Rate: 1, Per: time.Minute, Burst: 1})
	require.Empty(t, health())
	require.NoError(t, first.Complete(ctx, nil))
	for len(laneClaim(t, q, 10)) == 0 { // this machine took so long that the slot was missed
		_, err = db.Pool.Exec(ctx, `
with again as (update onceq.limit_rates set free_at = statement_timestamp() + interval '1 minute')
update onceq.jobs set run_at = statement_timestamp()`)
		require.NoError(t, err)
	}
	at, err := first.Now(ctx)
	require.NoError(t, err)
	waiting := ids[2]
	if info, err := q.Get(ctx, db.Pool, waiting); err != nil || !info.Blocked {
		waiting = ids[1]
	}
	r = explain(waiting, onceqops.CauseLimit, `a slot of limit "provider" (1 in 1m0s, in bursts of 1)`)
	require.WithinRange(t, r.Until, at, at.Add(2*time.Minute))
	limit, err := onceqops.New(q).Limit(ctx, db.Pool, "provider")
	require.NoError(t, err)
	require.Equal(t, onceq.Limit{Rate: 1, Per: time.Minute, Burst: 1}, limit.Limit)
	require.WithinRange(t, limit.NextSlot, at, at.Add(time.Minute))
	require.True(t, limit.Set)

	// They can be cancelled and redriven, and keep both.
	state, err := q.Cancel(ctx, db.Pool, waiting)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, state)
	require.NoError(t, db.Check())
	info, err := q.Get(ctx, db.Pool, waiting)
	require.NoError(t, err)
	require.Equal(t, "provider", info.Limit)
	_, err = onceqops.New(q).Redrive(ctx, db.Pool, waiting)
	require.NoError(t, err)
	info, err = q.Get(ctx, db.Pool, waiting)
	require.NoError(t, err)
	require.Equal(t, []any{"provider", true}, []any{info.Limit, info.Blocked})
	require.NoError(t, db.Check())
	_, _, err = onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{All: true})
	require.NoError(t, err)
	require.NoError(t, db.Check())
}

// EnsureLimit sets a limit that nobody has set, and one of two that call it at once sets it.
func TestLimit_Ensure(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	ensure := func(tx onceq.DB, name string, n int) bool {
		set, err := db.Queue.EnsureLimit(ctx, tx, name, onceq.Limit{AtOnce: n})
		require.NoError(t, err)
		return set
	}
	atOnce := func(name string) int {
		l, err := onceqops.New(db.Queue).Limit(ctx, db.Pool, name)
		require.NoError(t, err)
		return l.Limit.AtOnce
	}
	for _, commits := range []bool{true, false} {
		name := fmt.Sprint("commits-", commits)
		first, second := begin(t, db), begin(t, db)
		require.True(t, ensure(first, name, 3))
		done := make(chan bool)
		go func() { done <- ensure(second, name, 4) }()
		enqBlocked(t, db, 1)
		if commits {
			commit(t, first)
		} else {
			require.NoError(t, first.Rollback(ctx))
		}
		require.Equal(t, !commits, <-done)
		commit(t, second)
		require.Equal(t, map[bool]int{true: 3, false: 4}[commits], atOnce(name))
	}
	require.False(t, ensure(db.Pool, "commits-true", 5))
	require.NoError(t, db.Queue.RemoveLimit(ctx, db.Pool, "commits-true"))
	require.True(t, ensure(db.Pool, "commits-true", 6), "a limit that was removed is not set")
	setLimit(t, db, "family/", onceq.Limit{AtOnce: 7})
	require.False(t, ensure(db.Pool, "family/", 8))
	require.True(t, ensure(db.Pool, "family/a", 9))
	require.Equal(t, 7, atOnce("family/b"))
	var bad *onceq.InvalidError
	_, err := db.Queue.EnsureLimit(ctx, db.Pool, "a", onceq.Limit{AtOnce: -1})
	require.ErrorAs(t, err, &bad)
}

// Bad input is an error before anything is written.
func TestLimit_BadInput(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	var bad *onceq.InvalidError
	for _, name := range []string{" ", "\x00", "\xff", "/a", "a/", "/", "a\x1fb", string(make([]byte, 300))} {
		_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "a", Payload: 1, Limit: name})
		require.ErrorAs(t, err, &bad, name)
		require.Equal(t, "Limit", bad.Field)
	}
	_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "a", Payload: 1, Limit: "x", LaneRule: onceq.Overtake})
	require.ErrorAs(t, err, &bad)
	_, err = db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "a", Payload: 1, Lane: "a\x1fb"})
	require.ErrorAs(t, err, &bad)
	for _, l := range []onceq.Limit{
		{AtOnce: -1},
		{AtOnce: 2_000_000},
		{Rate: -1},
		{Per: time.Second},
		{Burst: 2},
		{Max: -1},
		{Max: 2_000_000},
		{Max: 1_000_000, Per: time.Millisecond},
		{Max: 10, Rate: 8},
		{Max: 10, Burst: 2},
		{Rate: 1, Per: time.Microsecond},
		{Rate: 1, Per: -time.Second},
		{Rate: 1, Burst: -1},
		{Rate: 1_000_000, Per: time.Millisecond},
		{Rate: 1, Per: 366 * 24 * time.Hour, Burst: 1_000_000},
		{Rate: 1, Per: 365 * 24 * time.Hour, Burst: 1001},
	} {
		require.ErrorAs(t, db.Queue.SetLimit(ctx, db.Pool, "a", l), &bad, l)
	}
	require.EqualError(t, bad, "onceq: Limit.Burst is 1001, and at 1 in 8760h0m0s that is more than 1,000 years; set a smaller Burst, or more in less time")
	setLimit(t, db, "a", onceq.Limit{Rate: 1, Per: 365 * 24 * time.Hour, Burst: 1000})
	require.NoError(t, db.Queue.RemoveLimit(ctx, db.Pool, "a"))
	for _, name := range []string{"", "/", "a/b/", "/a"} {
		require.ErrorAs(t, db.Queue.SetLimit(ctx, db.Pool, name, onceq.Limit{AtOnce: 1}), &bad, name)
		require.ErrorAs(t, db.Queue.RemoveLimit(ctx, db.Pool, name), &bad, name)
	}
	require.ErrorAs(t, db.Queue.SetLimit(ctx, nil, "a", onceq.Limit{AtOnce: 1}), &bad)
	live, waiting := laneLive(t, db)
	require.Equal(t, []int{0, 0}, []int{live, waiting})
}

// Two workers, leases that end early, handlers that fail, panic and roll their completions back, limits that change, jobs that
// are cancelled, and a snapshot that somebody holds: in every snapshot of the tables the limits hold, and in the end all is done.
func TestLimit_UnderFaults(t *testing.T) {
	t.Parallel()
	for _, each := range []int{1, 2, 3}[:conformance.Sized(2, 3)] {
		t.Run(fmt.Sprint("lanes of ", each), func(t *testing.T) {
			t.Parallel()
			limitUnderFaults(t, each)
		})
	}
}

// limitUnderFaults is that for lanes of which each may have so many live jobs.
func limitUnderFaults(t *testing.T, each int) {
	ctx := context.Background()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "charge", "", each))
	k := onceq.Kind[charge]{
		Name: "charge", Lane: charges.Lane, Limit: func(c charge) string { return fmt.Sprint("provider/", c.Customer%2) }, MaxLost: 1000, MaxAttempts: 1000,
		Backoff: func(int, error) time.Duration { return time.Millisecond },
	}
	chargesUnderFaults(t, db, k, 3, conformance.Sized(6, 30), func(*onceq.Lease) error { return laneFault() })
}

// chargesUnderFaults runs so many jobs of each of six customers, under limits of up to so many at once that change. Each attempt ends as
// end says.
func chargesUnderFaults(t *testing.T, db *queuetest.DB, k onceq.Kind[charge], most, each int, end func(*onceq.Lease) error) {
	ctx := context.Background()
	setLimit(t, db, "provider/", onceq.Limit{AtOnce: 2 * most / 3})
	inTx := k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ charge) error {
		if _, err := tx.Exec(ctx, `select $1::int`, 1); err != nil {
			return err
		}
		return end(l)
	})
	own := k.Handle(func(ctx context.Context, l *onceq.Lease, _ charge) error {
		return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			if err := l.Complete(ctx, tx); err != nil {
				return err
			}
			return end(l) // rolls back the completion and its successors
		})
	})
	workers := []*working{
		start(t, db, onceq.WorkerConfig{Lease: steady, PollInterval: 50 * time.Millisecond}, inTx),
		start(t, db, onceq.WorkerConfig{Lease: steady, PollInterval: 50 * time.Millisecond}, own),
	}
	calm := laneFaults(t, db, func() error {
		switch rand.N(4) {
		case 0:
			return db.Queue.RemoveLimit(ctx, db.Pool, "provider/1")
		case 1:
			return db.Queue.SetLimit(ctx, db.Pool, "provider/1", onceq.Limit{AtOnce: most, Rate: 1000, Burst: 500})
		}
		return db.Queue.SetLimit(ctx, db.Pool, "provider/1", onceq.Limit{AtOnce: 1 + rand.N(most)})
	})
	for n := range each {
		for c := range 6 {
			r, err := db.Queue.Enqueue(ctx, db.Pool, k.Job(charge{c, n}))
			require.NoError(t, err)
			if rand.N(20) == 0 {
				if _, err := db.Queue.Cancel(ctx, db.Pool, r.ID); !errors.Is(err, onceq.ErrNotFound) {
					require.NoError(t, err)
				}
			}
		}
	}
	until(t, db, `not exists (select from onceq.jobs) and not exists (select from onceq.job_waits)`)
	calm()
	for _, w := range workers {
		require.NoError(t, w.stop())
	}
	require.NoError(t, db.Check())
}

// A completion that waited for a lock may find that its lane's next job has moved on with another completion, into the line of its
// limit. That job is the other's successor, and the lane still has room for one.
func TestLimit_ASuccessorThatMovedOnMeanwhile(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	q := db.Queue
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "charge", "", 2))
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 2})
	laneEnqueue(t, q, db.Pool, limitedInLane.Job(charge{1, 1}), limitedInLane.Job(charge{1, 2}))
	live := laneClaim(t, q, 10)
	require.Len(t, live, 2)
	waits := laneEnqueue(t, q, db.Pool, limitedAlone.Job(charge{2, 1}), limitedInLane.Job(charge{1, 3}), limitedInLane.Job(charge{1, 4}))
	require.Empty(t, laneClaim(t, q, 10)) // answers the calls of these

	locks, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = locks.Rollback(ctx) }()
	_, err = locks.Exec(ctx, `select from onceq.jobs where id = $1 for update`, live[0].ID)
	require.NoError(t, err)
	completed := make(chan error, 1)
	go func() { completed <- live[0].Complete(ctx, nil) }()
	until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`)
	require.NoError(t, live[1].Complete(ctx, nil))
	line := func(id int64) string {
		return sqlOne[string](t, db, `select coalesce((select lane from onceq.job_waits where id = $1), 'live')`, id)
	}
	require.Equal(t, "live", line(waits[0]))
	require.Equal(t, "/provider", line(waits[1]))
	require.NoError(t, locks.Rollback(ctx))
	require.NoError(t, receive(t, completed))

	require.Len(t, append(laneClaim(t, q, 10), laneClaim(t, q, 10)...), 2)
	require.Equal(t, "live", line(waits[1]))
	require.Equal(t, "/provider", line(waits[2])) // the lane has room for two
}

// A job that is given back does not take its own place again: with a limit of one, the next one goes on.
func TestLimit_AReleasedJobLetsTheNextOneGoOn(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 1})
	ids := laneEnqueue(t, db.Queue, db.Pool, limitedAlone.Job(charge{1, 1}), limitedAlone.Job(charge{1, 2}))
	for i := range 4 {
		require.NoError(t, laneClaimOne(t, db.Queue, ids[i%2]).Release(t.Context()))
	}
}

// What is known of a limit with a rate goes when the limit has rested.
func TestLimit_RatesAreReaped(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	setLimit(t, db, "provider", onceq.Limit{Rate: 100})
	laneEnqueue(t, db.Queue, db.Pool, limitedAlone.Job(charge{1, 1}))
	require.NoError(t, laneClaimOne(t, db.Queue, 1).Complete(ctx, nil))
	reaper, err := onceq.NewReaper(db.Queue, onceq.ReaperConfig{})
	require.NoError(t, err)
	left := func() int {
		_, err := reaper.RunOnce(ctx)
		require.NoError(t, err)
		return sqlOne[int](t, db, `select count(*) from onceq.limit_rates`)
	}
	require.Equal(t, 1, left())
	sqlRun(t, db, `update onceq.limit_rates set free_at = free_at - interval '1 minute'`)
	require.Zero(t, left())
}

// Two lanes that may each fill a limit share it evenly, also if one of them was there first, and if Claim always finds jobs.
func TestLimit_LanesThatCouldFillItShareIt(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t, queuetest.NoCheck())
	const n = 20
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "charge", "", n))
	setLimit(t, db, "provider", onceq.Limit{AtOnce: n})
	live := func(customer int) int {
		return repairCount(t, db, `select count(*) from onceq.jobs where lane like $1`, fmt.Sprintf("charge/%d%%", customer))
	}
	started := map[string]int{}
	turn := func() {
		leases := laneClaim(t, db.Queue, 1)
		require.Len(t, leases, 1)
		require.NoError(t, leases[0].Complete(ctx, nil))
		started[leases[0].Lane]++
	}
	for customer := range 2 {
		jobs := make([]onceq.Job, 10_000)
		for i := range jobs {
			jobs[i] = limitedInLane.Job(charge{customer, i})
		}
		_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
		require.NoError(t, err)
		if customer == 0 { // it is alone, and has all places
			eventually(t, "the limit is full", func() bool { turn(); return live(0) == n })
		}
	}
	eventually(t, "the other lane begins", func() bool { turn(); return live(1) > 0 })
	clear(started)
	for range 20 * n {
		turn()
	}
	require.InDelta(t, started["charge/0"], started["charge/1"], 2*n) // in turns of up to as many as wait for the limit
}

// Of two lanes that share a limit the one with four times as many places gets four times as many turns.
func TestLimit_ALaneWithMorePlacesGetsMoreTurns(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t, queuetest.NoCheck())
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "charge", "0", 40))
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "charge", "1", 10))
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 5})
	for customer := range 2 {
		jobs := make([]onceq.Job, 2000)
		for i := range jobs {
			jobs[i] = limitedInLane.Job(charge{customer, i})
		}
		_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
		require.NoError(t, err)
	}
	started := map[string]int{}
	turn := func() {
		leases := laneClaim(t, db.Queue, 1)
		require.Len(t, leases, 1)
		require.NoError(t, leases[0].Complete(ctx, nil))
		started[leases[0].Lane]++
	}
	const line = `(select count(*) from onceq.lane_places where lane = 'charge/0') = 40 and (select count(*) from onceq.lane_places where lane = 'charge/1') = 10`
	eventually(t, "both lanes have all their places", func() bool { turn(); return sqlOne[bool](t, db, "select "+line) })
	for range 50 { // what stood in the limit's line before is gone
		turn()
	}
	clear(started)
	for range 500 {
		turn()
	}
	require.InDelta(t, 100, started["charge/1"], 20, "of 500")
}

// A worker says once of a limit that nobody has set that its jobs run one at a time.
func TestLimit_ThatNobodyHasSet(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	require.NoError(t, q.SetLimit(ctx, db.Pool, "set/", onceq.Limit{AtOnce: 3}))
	k := onceq.Kind[int]{Name: "k"}
	for i := range 3 {
		for _, limit := range []string{"bnak", "set/a"} {
			job := k.Job(i)
			job.Limit = limit
			add(t, db, job)
		}
	}
	must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "nothing"})) // lets jobs in, so that a claim takes both limits
	w := start(t, db, onceq.WorkerConfig{}, k.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	until(t, db, noJobs+` and not exists (select from onceq.job_waits)`)
	eventually(t, "the line", func() bool { return strings.Contains(w.logged(), `nobody has set a limit`) })
	require.Contains(t, w.logged(), "limit=bnak")
	require.NoError(t, w.stop())
	require.Equal(t, 1, strings.Count(w.logged(), `nobody has set a limit`), w.logged())
}

// What is refused as too fast is named as it was given.
func TestLimit_TooFastIsNamed(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for field, limit := range map[string]onceq.Limit{
		"Limit.Max":  {Max: 1_000_000, Per: time.Millisecond},
		"Limit.Rate": {Rate: 1_000_000, Per: time.Millisecond},
	} {
		var invalid *onceq.InvalidError
		require.ErrorAs(t, db.Queue.SetLimit(t.Context(), db.Pool, "fast", limit), &invalid)
		require.Equal(t, field, invalid.Field)
		require.Contains(t, invalid.Reason, "at most a million a second")
	}
}
