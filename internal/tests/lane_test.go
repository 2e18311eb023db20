package tests

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

type charge struct {
	Customer, N int
}

// charges is a kind with a lane for each customer.
var charges = onceq.Kind[charge]{Name: "charge", Lane: func(c charge) string { return fmt.Sprint(c.Customer) }}

// laneLive counts the live jobs of each lane, and those that wait.
func laneLive(t testing.TB, db *queuetest.DB) (live, waiting int) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(context.Background(), `select (select count(*) from onceq.jobs), (select count(*) from onceq.job_waits)`).Scan(&live, &waiting))
	return live, waiting
}

func laneEnqueue(t testing.TB, q *onceq.Queue, db onceq.DB, jobs ...onceq.Job) (ids []int64) {
	t.Helper()
	for _, j := range jobs {
		r, err := q.Enqueue(context.Background(), db, j)
		require.NoError(t, err)
		require.False(t, r.Duplicate)
		ids = append(ids, r.ID)
	}
	return ids
}

func laneClaim(t testing.TB, q *onceq.Queue, limit int) []*onceq.Lease {
	t.Helper()
	leases, err := q.Claim(context.Background(), onceq.ClaimOptions{Limit: limit})
	require.NoError(t, err)
	return leases
}

// laneClaimOne claims one job and requires that it is the given one.
func laneClaimOne(t testing.TB, q *onceq.Queue, id int64) *onceq.Lease {
	t.Helper()
	leases := laneClaim(t, q, 10)
	require.Len(t, leases, 1)
	require.Equal(t, id, leases[0].ID)
	return leases[0]
}

// One job of a lane at a time, in order, whichever way the jobs come and are completed.
func TestLane_OneAtATimeInOrder(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	enqueue := map[string]func(*testing.T, *queuetest.DB, []onceq.Job) []int64{
		"one by one": func(t *testing.T, db *queuetest.DB, jobs []onceq.Job) []int64 {
			return laneEnqueue(t, db.Queue, db.Pool, jobs...)
		},
		"many": func(t *testing.T, db *queuetest.DB, jobs []onceq.Job) (ids []int64) {
			all, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
			require.NoError(t, err)
			for _, r := range all {
				require.Equal(t, onceq.StateWaiting, r.State)
				ids = append(ids, r.ID)
			}
			return ids
		},
		"in a batch": func(t *testing.T, db *queuetest.DB, jobs []onceq.Job) (ids []int64) {
			batch := &pgx.Batch{}
			var pending []*onceq.Pending
			for _, j := range jobs {
				p, err := db.Queue.EnqueueInBatch(batch, j)
				require.NoError(t, err)
				pending = append(pending, p)
			}
			require.NoError(t, db.Pool.SendBatch(ctx, batch).Close())
			for _, p := range pending {
				r, err := p.Result(ctx, db.Pool)
				require.NoError(t, err)
				ids = append(ids, r.ID)
			}
			return ids
		},
	}
	type running struct {
		sync.Mutex
		order map[int][]int64
		now   map[int]int
	}
	handlers := map[string]func(*testing.T, *queuetest.DB, *running) onceq.Handler{}
	run := func(t *testing.T, r *running, c charge, id int64) {
		r.Lock()
		r.order[c.Customer] = append(r.order[c.Customer], id)
		r.now[c.Customer]++
		n := r.now[c.Customer]
		r.Unlock()
		if n > 1 {
			t.Errorf("%d jobs of lane %d run", n, c.Customer)
		}
		r.Lock()
		r.now[c.Customer]--
		r.Unlock()
	}
	handlers["lease"] = func(t *testing.T, db *queuetest.DB, r *running) onceq.Handler {
		return charges.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { run(t, r, c, l.ID); return nil })
	}
	handlers["transaction"] = func(t *testing.T, db *queuetest.DB, r *running) onceq.Handler {
		return charges.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c charge) error {
			run(t, r, c, l.ID)
			_, err := tx.Exec(ctx, `select $1::int`, 1)
			return err
		})
	}
	handlers["batch"] = func(t *testing.T, db *queuetest.DB, r *running) onceq.Handler {
		return charges.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, items []onceq.Item[charge]) error {
			for _, i := range items {
				run(t, r, i.Payload, i.ID)
			}
			return nil
		})
	}
	handlers["own transaction"] = func(t *testing.T, db *queuetest.DB, r *running) onceq.Handler {
		return charges.Handle(func(ctx context.Context, l *onceq.Lease, c charge) error {
			run(t, r, c, l.ID)
			return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return l.Complete(ctx, tx) })
		})
	}
	handlers["kept"] = func(t *testing.T, db *queuetest.DB, r *running) onceq.Handler {
		k := charges
		k.Keep = time.Hour
		return k.Handle(func(_ context.Context, l *onceq.Lease, c charge) error { run(t, r, c, l.ID); return nil })
	}
	handlers["serializable"] = func(t *testing.T, db *queuetest.DB, r *running) onceq.Handler {
		k := charges
		k.Serializable = true
		return k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, c charge) error {
			run(t, r, c, l.ID)
			_, err := tx.Exec(ctx, `select $1::int`, 1)
			return err
		})
	}
	for how, enqueue := range enqueue {
		for what, handler := range handlers {
			for _, keyed := range []bool{false, true} {
				t.Run(fmt.Sprint(how, ", ", what, ", keyed ", keyed), func(t *testing.T) {
					t.Parallel()
					conformance.Few(t, 4)
					db := queuetest.New(t)
					var jobs []onceq.Job
					want := make(map[int]int)
					for n := range 30 {
						c := charge{n % 3, n}
						j := charges.Job(c)
						if keyed {
							j.Key = fmt.Sprint(n)
						}
						jobs = append(jobs, j)
						want[c.Customer]++
					}
					ids := enqueue(t, db, jobs)
					live, waiting := laneLive(t, db)
					require.Equal(t, []int{0, 30}, []int{live, waiting})
					r := &running{order: map[int][]int64{}, now: map[int]int{}}
					ran := db.Drain(handler(t, db, r))
					require.Len(t, ran, 30)
					for c, n := range want {
						require.Len(t, r.order[c], n)
						require.True(t, slices.IsSorted(r.order[c]), "%v", r.order[c])
					}
					require.True(t, slices.IsSorted(ids))
					live, waiting = laneLive(t, db)
					require.Equal(t, []int{0, 0}, []int{live, waiting})
				})
			}
		}
	}
}

// The order is that of the priority, the due time and the id.
func TestLane_Order(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	at := func(priority onceq.Priority, delay time.Duration) onceq.Job {
		j := charges.Job(charge{1, 1})
		j.Priority, j.Delay = priority, delay
		return j
	}
	ids := laneEnqueue(t, db.Queue, db.Pool, at(0, time.Hour), at(1, 0), at(0, 0), at(0, 0), at(-1, 0), at(-1, 2*time.Hour))
	var order []int64
	h := charges.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error { order = append(order, l.ID); return nil })
	db.Drain(h)
	require.Equal(t, []int64{ids[4], ids[2], ids[3], ids[1]}, order)
	db.Advance(3 * time.Hour)
	db.Drain(h)
	require.Equal(t, []int64{ids[5], ids[0]}, order[4:])
}

// The jobs of one EnqueueMany start in its order, however many statements it takes: because there are more jobs than one takes,
// and their keys have another order, or because a key is that of a finished job.
func TestLane_OrderOfOneCall(t *testing.T) {
	t.Parallel()
	in := func(n int) onceq.Job {
		j := charges.Job(charge{7, n})
		j.Key, j.Window = fmt.Sprint("payment:", n), onceq.UntilFinished
		return j
	}
	for name, of := range map[string]struct {
		jobs int
		used []int
	}{"many jobs": {2500, nil}, "used keys": {5, []int{0, 3}}, "both": {2500, []int{0, 3, 2300}}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			for _, n := range of.used {
				require.NoError(t, laneClaimOne(t, db.Queue, add(t, db, in(n))).Complete(t.Context(), nil))
			}
			jobs, want := make([]onceq.Job, of.jobs), make([]int, of.jobs)
			for n := range jobs {
				jobs[n], want[n] = in(n), n
			}
			began := sqlOne[time.Time](t, db, `select statement_timestamp()`)
			results, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
			require.NoError(t, err)
			require.True(t, slices.IsSortedFunc(results, func(a, b onceq.Result) int { return cmp.Compare(a.ID, b.ID) }))
			require.Equal(t, want, sqlOne[[]int](t, db, `select array_agg((payload ->> 'N')::int order by priority, run_at, id) from onceq.job_waits`))
			require.True(t, sqlOne[bool](t, db, `select bool_and(run_at = created_at and run_at >= $1 and run_at < statement_timestamp()) from onceq.job_waits`, began))
		})
	}
}

// A failed job keeps its place; with Overtake it lets others by.
func TestLane_RetriesKeepTheirPlace(t *testing.T) {
	t.Parallel()
	for _, overtake := range []bool{false, true} {
		for what, end := range map[string]error{"failed": errors.New("no"), "snoozed": onceq.Snooze(time.Minute), "retry after": onceq.RetryAfter(time.Minute, errors.New("no")), "rescheduled": onceq.Reschedule(time.Minute)} {
			for _, tx := range []bool{false, true} {
				t.Run(fmt.Sprint("overtake ", overtake, ", ", what, ", in a transaction ", tx), func(t *testing.T) {
					t.Parallel()
					conformance.Few(t, 3)
					db := queuetest.New(t)
					k := charges
					if k.Backoff = func(int, error) time.Duration { return time.Minute }; overtake {
						k.LaneRule = onceq.Overtake
					}
					ids := laneEnqueue(t, db.Queue, db.Pool, k.Job(charge{1, 1}), k.Job(charge{1, 2}), k.Job(charge{1, 3}))
					failed := false
					var order []int64
					run := func(l *onceq.Lease) error {
						order = append(order, l.ID)
						if l.ID == ids[0] && !failed {
							failed = true
							return end
						}
						return nil
					}
					h := k.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error { return run(l) })
					if tx {
						h = k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ charge) error {
							_, _ = tx.Exec(ctx, `select $1::int`, 1)
							return run(l)
						})
					}
					db.Drain(h)
					if overtake {
						require.Equal(t, []int64{ids[0], ids[1], ids[2]}, order)
						info, err := db.Queue.Get(context.Background(), db.Pool, ids[0])
						require.NoError(t, err)
						require.True(t, info.Blocked)
						require.NotZero(t, info.Token)
					} else {
						require.Equal(t, []int64{ids[0]}, order)
					}
					require.NoError(t, db.Check())
					db.Advance(time.Hour)
					db.Drain(h)
					if overtake {
						require.Equal(t, []int64{ids[0], ids[1], ids[2], ids[0]}, order)
					} else {
						require.Equal(t, []int64{ids[0], ids[0], ids[1], ids[2]}, order)
					}
				})
			}
		}
	}
}

// A delayed job does not take the place of its lane before its time, whatever its priority.
func TestLane_ADelayedJobLetsOthersGoFirst(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	repairEnqueue(t, db, onceq.Job{Lane: "f/n", Delay: time.Hour, Priority: onceq.PriorityHigh})
	due := repairEnqueue(t, db, onceq.Job{Lane: "f/n"})
	require.Equal(t, due, repairClaim(t, db).ID)
}

// A dead or held job lets its lane go on, or stops it until somebody decides.
func TestLane_DeadAndHeldJobs(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	decide := map[string]func(*queuetest.DB, int64) error{
		"redrive": func(db *queuetest.DB, id int64) error {
			_, err := onceqops.New(db.Queue).Redrive(ctx, db.Pool, id)
			return err
		},
		"redrive many": func(db *queuetest.DB, id int64) error {
			n, _, err := onceqops.New(db.Queue).RedriveMany(ctx, db.Pool, onceqops.Filter{Kind: "charge"})
			if n != 1 {
				return fmt.Errorf("%d", n)
			}
			return err
		},
		"discard": func(db *queuetest.DB, id int64) error { return onceqops.New(db.Queue).Discard(ctx, db.Pool, id) },
	}
	for _, stop := range []bool{false, true} {
		for _, n := range []int{1, 2} {
			for what, decide := range decide {
				t.Run(fmt.Sprint("stop ", stop, ", limit ", n, ", ", what), func(t *testing.T) {
					t.Parallel()
					conformance.Few(t, 3)
					db := queuetest.New(t)
					require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "charge", "", n))
					k := charges
					if stop {
						k.LaneRule = onceq.StopLane
					}
					ids := laneEnqueue(t, db.Queue, db.Pool, k.Job(charge{1, 1}), k.Job(charge{1, 2}), k.Job(charge{1, 3}), k.Job(charge{2, 1}))
					died := false
					var mu sync.Mutex
					var order []int64
					h := k.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
						mu.Lock()
						defer mu.Unlock()
						order = append(order, l.ID)
						if l.ID == ids[0] && !died {
							died = true
							return onceq.Fatal(errors.New("no"))
						}
						return nil
					})
					db.Drain(h)
					if !stop {
						require.Len(t, order, 4)
					} else if n == 1 {
						require.ElementsMatch(t, []int64{ids[0], ids[3]}, order)
					}
					require.NoError(t, db.Check())
					if stop && n == 1 {
						why, err := onceqops.New(db.Queue).Explain(ctx, db.Pool, ids[1])
						require.NoError(t, err)
						require.Equal(t, []int64{ids[0]}, why.Reasons[0].Ahead)
						require.Contains(t, why.String(), "stands still")
					}
					order = nil
					require.NoError(t, decide(db, ids[0]))
					require.NoError(t, db.Check())
					db.Drain(h)
					if what != "discard" && n == 1 {
						require.Equal(t, ids[0], order[0], "back to its place")
					}
					live, waiting := laneLive(t, db)
					require.Equal(t, []int{0, 0}, []int{live, waiting})
				})
			}
		}
	}
}

// What asks about jobs knows those that wait for their lane.
func TestLane_WaitingJobsAreKnownEverywhere(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	q := db.Queue
	k := charges
	k.Key = func(c charge) string { return fmt.Sprint(c.Customer, "/", c.N) }
	ids := laneEnqueue(t, q, db.Pool, k.Job(charge{1, 1}), k.Job(charge{1, 2}))
	first := laneClaimOne(t, q, ids[0])
	require.Equal(t, "charge/1", first.Lane)

	for _, c := range []charge{{1, 1}, {1, 2}} {
		r, err := q.Enqueue(ctx, db.Pool, k.Job(c))
		require.NoError(t, err)
		want := onceq.Result{ID: ids[c.N-1], Duplicate: true, State: onceq.StateRunning}
		if c.N == 2 {
			want.State = onceq.StateWaiting
		}
		require.Equal(t, want, r)
		all, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{k.Job(c)})
		require.NoError(t, err)
		require.Equal(t, []onceq.Result{want}, all)
	}
	other := k.Job(charge{1, 2})
	other.Payload = charge{1, 3}
	_, err := q.Enqueue(ctx, db.Pool, other)
	var mismatch *onceq.MismatchError
	require.ErrorAs(t, err, &mismatch)
	require.ErrorContains(t, err, "N")

	info, err := q.Get(ctx, db.Pool, ids[1])
	require.NoError(t, err)
	require.True(t, info.Blocked)
	require.Equal(t, "charge/1", info.Lane)
	require.Equal(t, onceq.StateWaiting, info.State)
	require.JSONEq(t, `{"Customer": 1, "N": 2}`, string(info.Payload))
	byKey, err := q.GetByKey(ctx, db.Pool, "charge", "1/2")
	require.NoError(t, err)
	require.Equal(t, info, byKey)
	info, err = q.Get(ctx, db.Pool, ids[0])
	require.NoError(t, err)
	require.False(t, info.Blocked)
	require.Equal(t, "charge/1", info.Lane)

	delayed := k.Job(charge{1, 9})
	delayed.Delay = time.Hour
	later, err := q.Enqueue(ctx, db.Pool, delayed)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDelayed, later.State)

	list := func(f onceqops.Filter) (found []int64) {
		all, err := onceqops.New(q).List(ctx, db.Pool, f)
		require.NoError(t, err)
		n, err := onceqops.New(q).Count(ctx, db.Pool, f)
		require.NoError(t, err)
		require.Equal(t, len(all), n)
		for _, i := range all {
			found = append(found, i.ID)
		}
		return found
	}
	require.Equal(t, []int64{later.ID, ids[1], ids[0]}, list(onceqops.Filter{}))
	require.Equal(t, []int64{later.ID, ids[1], ids[0]}, list(onceqops.Filter{Queue: "default", Kind: "charge", Scope: "charge"}))
	require.Equal(t, []int64{ids[1]}, list(onceqops.Filter{States: []onceq.State{onceq.StateWaiting}}))
	require.Equal(t, []int64{later.ID}, list(onceqops.Filter{States: []onceq.State{onceq.StateDelayed}}))
	require.Empty(t, list(onceqops.Filter{Queue: "other"}))

	why, err := onceqops.New(q).Explain(ctx, db.Pool, ids[1])
	require.NoError(t, err)
	require.Equal(t, onceqops.CauseLane, why.Cause())
	require.Equal(t, []int64{ids[0]}, why.Reasons[0].Ahead)
	require.Equal(t, 1, why.Reasons[0].Slots)
	require.Contains(t, why.String(), `its lane "charge/1"`)
	why, err = onceqops.New(q).Explain(ctx, db.Pool, later.ID)
	require.NoError(t, err)
	require.Equal(t, []onceqops.Cause{onceqops.CauseScheduled, onceqops.CauseLane}, []onceqops.Cause{why.Reasons[0].Cause, why.Reasons[1].Cause})
	require.Equal(t, 1, why.Reasons[1].Before)
	require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "charge", "other", 0))
	blocked := onceq.Job{Kind: "charge", Payload: charge{}, Lane: "other"}
	none := laneEnqueue(t, q, db.Pool, blocked)[0]
	why, err = onceqops.New(q).Explain(ctx, db.Pool, none)
	require.NoError(t, err)
	require.Contains(t, why.String(), "its limit is 0")
	_, err = q.Cancel(ctx, db.Pool, none)
	require.NoError(t, err)

	stats, err := onceqops.New(q).Stats(ctx)
	require.NoError(t, err)
	require.Len(t, stats, 1)
	require.Equal(t, 2, stats[0].Blocked)
	require.Equal(t, 1, stats[0].Running)
	require.Zero(t, stats[0].Waiting)

	// Retry makes a delayed one due.
	state, err := onceqops.New(q).Retry(ctx, db.Pool, later.ID)
	require.NoError(t, err)
	require.Equal(t, onceq.StateWaiting, state)

	// The Reaper leaves their keys alone.
	r, err := onceq.NewReaper(q, onceq.ReaperConfig{Grace: time.Millisecond})
	require.NoError(t, err)
	for range 3 {
		reaped, err := r.RunOnce(ctx)
		require.NoError(t, err)
		require.Zero(t, reaped)
		db.Advance(time.Hour)
	}
	require.NoError(t, db.Check())

	// They can be cancelled and redriven.
	state, err = q.Cancel(ctx, db.Pool, ids[1])
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, state)
	info, err = q.Get(ctx, db.Pool, ids[1])
	require.NoError(t, err)
	require.Equal(t, "charge/1", info.Lane)
	require.NoError(t, db.Check())
	state, err = onceqops.New(q).Redrive(ctx, db.Pool, ids[1])
	require.NoError(t, err)
	require.Equal(t, onceq.StateWaiting, state)
	cancelled, asked, err := onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{Kind: "charge"})
	require.NoError(t, err)
	require.Equal(t, []int{3, 0}, []int{cancelled, asked}, "the lease of the first has run out in the meantime")
	require.Empty(t, laneClaim(t, q, 10))
}

// Limits change while jobs run, up and down, for a lane and for its family.
func TestLane_LimitsChange(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	const address = "https://shop.example/" // a name like this one is no family's
	for _, c := range []struct{ lane, name string }{{"1", "1"}, {"1", ""}, {address, address}} {
		t.Run("lane "+c.lane+", name "+c.name, func(t *testing.T) {
			t.Parallel()
			charges := charges
			charges.Lane = func(charge) string { return c.lane }
			db := queuetest.New(t)
			q := db.Queue
			set := func(n int) {
				t.Helper()
				require.NoError(t, q.SetLaneLimit(ctx, db.Pool, "charge", c.name, n))
				got, err := q.LaneLimit(ctx, db.Pool, "charge", c.lane)
				require.NoError(t, err)
				require.Equal(t, n, got)
			}
			var jobs []onceq.Job
			for n := range 12 {
				jobs = append(jobs, charges.Job(charge{1, n}))
			}
			ids := laneEnqueue(t, q, db.Pool, jobs...)
			held := laneClaim(t, q, 20)
			require.Len(t, held, 1)
			set(3)
			held = append(held, laneClaim(t, q, 20)...)
			require.Len(t, held, 3)
			set(2) // three run on, and the first that ends leaves no room
			require.Empty(t, laneClaim(t, q, 20))
			require.NoError(t, held[0].Complete(ctx, nil))
			require.Empty(t, laneClaim(t, q, 20))
			require.NoError(t, db.Check())
			require.NoError(t, held[1].Complete(ctx, nil))
			next := laneClaim(t, q, 20)
			require.Len(t, next, 1)
			require.Equal(t, ids[3], next[0].ID)
			set(0)
			require.NoError(t, held[2].Complete(ctx, nil))
			require.NoError(t, next[0].Complete(ctx, nil))
			require.Empty(t, laneClaim(t, q, 20))
			set(5)
			require.Len(t, laneClaim(t, q, 20), 5)
			live, waiting := laneLive(t, db)
			require.Equal(t, []int{5, 3}, []int{live, waiting})
			// With a limit that is reached from above, completions hand over again.
			set(4)
			until(t, db, `exists (select from onceq.lane_limits where lowered)`)
			leases, err := onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateRunning}})
			require.NoError(t, err)
			_, err = db.Pool.Exec(ctx, `delete from onceq.jobs where id = $1`, leases[0].ID) // by hand, which leaves no call
			require.NoError(t, err)
			eventually(t, "completions hand over again", func() bool {
				_ = laneClaim(t, q, 20)
				return repairCount(t, db, `select count(*) from onceq.lane_limits where lowered`) == 0
			})
			_, err = db.Pool.Exec(ctx, `delete from onceq.lane_places where id = $1`, leases[0].ID) // which counted for nothing
			require.NoError(t, err)
		})
	}
}

// A running worker starts a job of an idle lane at once, and the next one when the one before is done, whoever admits it.
func TestLane_WorkersAreWoken(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	ran := make(chan int64, 100)
	k := onceq.Kind[charge]{Name: "charge", Lane: charges.Lane, Queue: "q"}
	start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, k.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
		ran <- l.ID
		return nil
	}))
	waits := func() { // and whoever enqueues knows it: a call that comes before that and is committed later waits for a look
		until(t, db, `exists (select from onceq.waiters w where idle_until > statement_timestamp() and busy is null
			and not exists (select from onceq.wakes x where x.worker = w.worker and x.round = w.round))`)
		time.Sleep(20 * time.Millisecond)
	}
	for n := range 5 {
		waits()
		ids := laneEnqueue(t, db.Queue, db.Pool, k.Job(charge{1, n}), k.Job(charge{1, n}), k.Job(charge{n, n}))
		got := []int64{receive(t, ran), receive(t, ran), receive(t, ran)}
		require.ElementsMatch(t, ids, got)
		until(t, db, `not exists (select from onceq.jobs)`)
	}
	// In a transaction of the application as well.
	waits()
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		laneEnqueue(t, db.Queue, tx, k.Job(charge{1, 1}))
		return nil
	}))
	receive(t, ran)
}

// A call for which nobody was woken is answered: a look of the worker sees it, whether it is new, was committed long after it was
// due, or becomes due later.
func TestLane_ALookSeesACallForWhichNobodyWasWoken(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	start(t, db, onceq.WorkerConfig{PollInterval: 20 * time.Millisecond}, charges.Handle(func(context.Context, *onceq.Lease, charge) error { return nil }))
	until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
	for _, due := range []string{"0 s", "-1 hour", "1 s"} {
		sqlRun(t, db, `insert into onceq.lane_calls (slot, due, lane) values (3, statement_timestamp() + $1::text::interval, 'charge/1')`, due)
		until(t, db, `not exists (select from onceq.lane_calls where lane = 'charge/1')`)
	}
}

// A job that was enqueued while nobody waited, and is committed after the worker has announced that it waits, has woken nobody.
// The looks that follow the announcement see its call, as they see a job without a lane.
func TestLane_ACommitAfterTheAnnouncement(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := make(chan int64, 100)
	for try := 0; ; try++ {
		require.Less(t, try, 10, "times that this machine stood still")
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		id := laneEnqueue(t, db.Queue, tx, charges.Job(charge{try, 1}))[0]
		began := time.Now()
		w := start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, charges.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
			ran <- l.ID
			return nil
		}))
		until(t, db, `exists (select from onceq.waiters where idle_until > statement_timestamp())`)
		time.Sleep(300 * time.Millisecond) // until the promoter has looked for what was committed just before the announcement
		require.NoError(t, tx.Commit(t.Context()))
		if time.Since(began) < 2*time.Second { // the looks go on for three
			for receive(t, ran) != id {
			}
			require.NoError(t, w.stop())
			return
		}
		require.NoError(t, w.stop())
		sqlRun(t, db, `delete from onceq.waiters`)
	}
}

// A Queue that does not know yet what the server has asks before its first job that waits, so that the caller's transaction goes on.
func TestCitus_TheFirstJobAsks(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	other := add(t, db, onceq.Job{})
	n := 0
	for _, job := range []onceq.Job{{Kind: "k", Payload: 1, Lane: "one"}, {Kind: "k", Payload: 1, After: []onceq.JobRef{{ID: other}}}} {
		for _, enqueue := range []func(*onceq.Queue, pgx.Tx) error{
			func(q *onceq.Queue, tx pgx.Tx) error {
				_, err := q.Enqueue(t.Context(), tx, job)
				return err
			},
			func(q *onceq.Queue, tx pgx.Tx) error {
				_, err := q.EnqueueMany(t.Context(), tx, []onceq.Job{job})
				return err
			},
		} {
			q, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema})
			require.NoError(t, err)
			tx := enqBegin(t, db, pgx.ReadCommitted)
			_, err = tx.Exec(t.Context(), `select set_config('citus.version', 'as if', true) where current_setting('citus.version', true) is null`)
			require.NoError(t, err)
			require.NoError(t, enqueue(q, tx))
			require.NoError(t, tx.Commit(t.Context()))
			n++
		}
	}
	require.Equal(t, n, sqlOne[int](t, db, `select count(*)::int from onceq.job_waits`))
}

// Bad input is an error before anything is written.
func TestLane_BadInput(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	var bad *onceq.InvalidError
	for field, j := range map[string]onceq.Job{
		"LaneFamily": {Kind: "a/b", Payload: 1, Lane: "x"},
		"Lane":       {Kind: "a", Payload: 1, LaneRule: onceq.Overtake},
		"LaneRule":   {Kind: "a", Payload: 1, Lane: "x", LaneRule: 4},
	} {
		_, err := db.Queue.Enqueue(ctx, db.Pool, j)
		require.ErrorAs(t, err, &bad)
		require.Equal(t, field, bad.Field)
	}
	for _, name := range []string{" ", "\x00", "\xff", string(make([]byte, 300))} {
		_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "a", Payload: 1, Lane: name})
		require.ErrorAs(t, err, &bad)
	}
	require.ErrorAs(t, db.Queue.SetLaneLimit(ctx, db.Pool, "a", "", -1), &bad)
	require.ErrorAs(t, db.Queue.SetLaneLimit(ctx, db.Pool, "", "", 1), &bad)
	require.Equal(t, "family", bad.Field)
	require.ErrorAs(t, db.Queue.SetLaneLimit(ctx, db.Pool, "a/b", "", 1), &bad)
	require.Equal(t, "family", bad.Field)
	require.ErrorAs(t, db.Queue.SetLaneLimit(ctx, db.Pool, "a", "\x00", 1), &bad)
	require.Equal(t, "name", bad.Field)
	require.ErrorAs(t, db.Queue.SetLaneLimit(ctx, nil, "a", "", 1), &bad)
	live, waiting := laneLive(t, db)
	require.Equal(t, []int{0, 0}, []int{live, waiting})
}

// Somebody deletes the dead job that stops a lane by hand, and not with Discard. The lane goes on after a pass of a Reaper.
func TestLane_WhatStoppedItWasDeletedByHand(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	k := onceq.Kind[charge]{Name: "charge", Lane: charges.Lane, LaneRule: onceq.StopLane, MaxAttempts: 1}
	ids := laneEnqueue(t, db.Queue, db.Pool, k.Job(charge{1, 1}), k.Job(charge{1, 2}))
	require.NoError(t, laneClaim(t, db.Queue, 1)[0].Fail(ctx, errors.New("no")))
	require.Empty(t, laneClaim(t, db.Queue, 1))
	_, err := db.Pool.Exec(ctx, `delete from onceq.job_history where id = $1`, ids[0])
	require.NoError(t, err)
	reap(t, newReaper(t, db, onceq.ReaperConfig{}), onceq.Reaped{})
	laneClaimOne(t, db.Queue, ids[1])
}

// laneFault fails, panics or snoozes now and then.
func laneFault() error {
	switch rand.N(8) {
	case 0:
		return errors.New("no")
	case 1:
		panic("no")
	case 2:
		return onceq.Snooze(time.Millisecond)
	}
	return nil
}

// laneFaults holds a snapshot, ends leases early, changes something and checks the tables, again and again until the function
// that it returns is called.
func laneFaults(t *testing.T, db *queuetest.DB, change func() error) (calm func()) {
	t.Helper()
	ctx := context.Background()
	snapshot, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	t.Cleanup(func() { _ = snapshot.Rollback(ctx) })
	_, err = snapshot.Exec(ctx, `select 1`)
	require.NoError(t, err)
	stop := make(chan struct{})
	var others sync.WaitGroup
	repeat := func(what func() error) {
		others.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := what(); err != nil {
					t.Error(err)
					return
				}
				_, _ = db.Pool.Exec(ctx, `select pg_sleep(0.02)`)
			}
		})
	}
	repeat(db.Check)
	repeat(func() error { // somebody's lease ends early
		_, err := db.Pool.Exec(ctx, `update onceq.jobs set leased_until = statement_timestamp() where id in (select id from onceq.jobs where leased_until > statement_timestamp() order by random() limit 1 for update skip locked)`)
		return err
	})
	repeat(change)
	return func() {
		close(stop)
		others.Wait()
	}
}

// Two workers, leases that end early, handlers that fail, panic and roll their completions back, limits that change, jobs
// that are cancelled, and a snapshot that somebody holds. In every snapshot of the tables the limits hold, and no lane with
// room is forgotten. Where the limit is 1, effects are committed in the order of the jobs. In the end all jobs are done.
func TestLane_UnderFaults(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	_, err := db.Pool.Exec(ctx, `create table done (n bigserial, lane text, job bigint)`)
	require.NoError(t, err)

	lanes, each := 6, conformance.Sized(10, 40)
	k := onceq.Kind[charge]{
		Name: "charge", Lane: charges.Lane, MaxLost: 1000, MaxAttempts: 1000,
		Backoff: func(int, error) time.Duration { return time.Millisecond },
	}
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "charge", "5", 3))
	write := func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
		_, err := tx.Exec(ctx, `insert into done (lane, job) values ($1, $2)`, l.Lane, l.ID)
		return err
	}
	inTx := k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ charge) error {
		if err := write(ctx, tx, l); err != nil {
			return err
		}
		return laneFault() // rolls back what was written
	})
	own := k.Handle(func(ctx context.Context, l *onceq.Lease, _ charge) error {
		return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			if err := write(ctx, tx, l); err != nil {
				return err
			}
			if err := l.Complete(ctx, tx); err != nil {
				return err
			}
			return laneFault() // rolls back the completion and its successor
		})
	})
	workers := []*working{
		start(t, db, onceq.WorkerConfig{Lease: steady, PollInterval: 50 * time.Millisecond, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 4}}}, inTx),
		start(t, db, onceq.WorkerConfig{Lease: steady, PollInterval: 50 * time.Millisecond, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 4}}}, own),
	}
	calm := laneFaults(t, db, func() error { return db.Queue.SetLaneLimit(ctx, db.Pool, "charge", "5", 1+rand.N(3)) })
	cancelled := make(map[int64]bool)
	for n := range each {
		for c := range lanes {
			r, err := db.Queue.Enqueue(ctx, db.Pool, k.Job(charge{c, n}))
			require.NoError(t, err)
			if rand.N(20) == 0 {
				cancelled[r.ID] = true
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
	rows, err := db.Pool.Query(ctx, `select lane, job from done order by n`)
	require.NoError(t, err)
	last, seen := make(map[string]int64), 0
	var lane string
	var job int64
	_, err = pgx.ForEachRow(rows, []any{&lane, &job}, func() error {
		seen++
		if lane != "charge/5" && job <= last[lane] {
			t.Errorf("job %d of lane %s was done after job %d", job, lane, last[lane])
		}
		last[lane] = job
		return nil
	})
	require.NoError(t, err)
	require.GreaterOrEqual(t, seen, lanes*each-len(cancelled))
	require.LessOrEqual(t, seen, lanes*each)
}

// Lanes that were called long before a worker comes are let in one chunk after the other. Only the first chunk was: the others
// waited for the next look for all calls, two seconds for each of them, and Drain ended before.
func TestLane_ManyThatWereCalledLongAgo(t *testing.T) {
	long(t, "4,000 lanes, more than a chunk")
	t.Parallel()
	db := queuetest.New(t)
	const lanes = 4000 // a chunk is 3,200
	calledLongAgo(t, db, lanes)
	drainsAll(t, db, lanes)
}

// What another promoter has locked at that moment is left to it, but it may look for calls of late only: Drain comes back to it.
func TestLane_DrainComesBackToWhatAnotherPromoterHeld(t *testing.T) {
	t.Parallel()
	looked := make(chan struct{}, 1000)
	db, _ := hooked(t, &statementHook{after: func(sql string) {
		if strings.Contains(sql, ".promote(") {
			looked <- struct{}{}
		}
	}})
	const lanes = 50
	calledLongAgo(t, db, lanes)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select from onceq.lane_locks for update`)
	require.NoError(t, err)
	ends := make(chan error, 1)
	go func() {
		for range 3 {
			select {
			case <-looked:
			case <-t.Context().Done(): // Drain has ended too early
			}
		}
		ends <- tx.Rollback(context.Background())
	}()
	drainsAll(t, db, lanes)
	require.NoError(t, <-ends)
}

// Another promoter may answer a call after Drain has found nothing to claim and before it looks for calls. It did not claim again,
// and left the job that was due then.
func TestLane_DrainClaimsWhatAnotherPromoterLetIn(t *testing.T) {
	t.Parallel()
	var other *onceq.Queue
	let := make(chan error, 1)
	var once sync.Once
	db, pool := hooked(t, &statementHook{before: func(sql string) {
		if strings.Contains(sql, ".promote(") {
			once.Do(func() { // Claim promotes, also if none of the kinds that it asks for has lanes
				leases, err := other.Claim(context.Background(), onceq.ClaimOptions{Limit: 1, Kinds: []string{"none"}})
				if len(leases) > 0 {
					err = errors.New("it claimed a job itself")
				}
				let <- err
			})
		}
	}})
	var err error
	other, err = onceq.New(pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	laneEnqueue(t, db.Queue, db.Pool, charges.Job(charge{1, 1}))
	require.Equal(t, 1, repairCount(t, db, `select count(*) from onceq.job_waits`))
	ran := false
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, charges.Handle(func(context.Context, *onceq.Lease, charge) error {
		ran = true
		return nil
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	require.NoError(t, receive(t, let))
	require.True(t, ran)
}

// While a worker has no free slot and none of its handlers returns, its promoter asks less and less often whether there are calls. It
// goes on asking.
func TestLane_AFullWorkerAsksForCallsNowAndThen(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	db, _ := hooked(t, &statementHook{before: func(sql string) {
		if strings.HasPrefix(sql, "select exists (select from pg_catalog.generate_series(-1, 15)") {
			asked.Add(1)
		}
	}})
	running, end := make(chan bool, 3), make(chan bool)
	release := sync.OnceFunc(func() { close(end) })
	defer release()
	start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1}}}, charges.Handle(func(context.Context, *onceq.Lease, charge) error {
		running <- true
		<-end
		return nil
	}))
	for customer := range 2 {
		add(t, db, charges.Job(charge{customer, 1}))
	}
	receive(t, running)
	until(t, db, `not exists (select from onceq.job_waits)`)
	eventually(t, "a question", func() bool { return asked.Load() > 0 })
	before := asked.Load()
	time.Sleep(4 * time.Second)
	require.Less(t, asked.Load()-before, int64(32))
	add(t, db, charges.Job(charge{2, 1}))
	until(t, db, `not exists (select from onceq.job_waits)`)
	release()
	until(t, db, noJobs)
}

// The promoter of a worker that is busy asks whether there are calls, and promotes if there are some.
func TestLane_ABusyWorkerAsksForCalls(t *testing.T) {
	t.Parallel()
	t.Run("made busy by a notification", func(t *testing.T) { busyAsks(t, 0) })
	t.Run("made busy by jobs that became due", func(t *testing.T) { busyAsks(t, 2*time.Second) })
}

func busyAsks(t *testing.T, delay time.Duration) {
	t.Parallel()
	var asks, promotes atomic.Int64
	db, _ := hooked(t, &statementHook{before: func(sql string) {
		switch {
		case strings.Contains(sql, ".promote("):
			promotes.Add(1)
		case strings.HasPrefix(sql, "select exists (select from pg_catalog.generate_series(-1, 15)"):
			asks.Add(1)
		}
	}})
	running, hold := make(chan struct{}), make(chan struct{})
	begin, release := sync.OnceFunc(func() { close(running) }), sync.OnceFunc(func() { close(hold) })
	defer release()
	cfg := onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 1}}}
	w := start(t, db, cfg, work.Handle(func(context.Context, *onceq.Lease, int) error {
		begin()
		<-hold
		return nil
	}), charges.Handle(func(context.Context, *onceq.Lease, charge) error { return nil }))
	if delay > 0 {
		until(t, db, `exists (select from onceq.waiters where idle_until > now())`)
	}
	addMany(t, db, 200, onceq.Job{Delay: delay}) // more than it claims at a time
	receive(t, running)
	eventually(t, "a worker that asks", func() bool { return asks.Load() > 5 })
	asked, promoted, began := asks.Load(), promotes.Load(), time.Now()
	eventually(t, "a worker that asks on", func() bool { return asks.Load() > asked+20 })
	most := 2*int64(time.Since(began)/(2*time.Second)) + 9 // up to two statements for a look
	require.LessOrEqual(t, promotes.Load()-promoted, most, "it looks for calls of long ago every two seconds")
	laneEnqueue(t, db.Queue, db.Pool, charges.Job(charge{1, 1}))
	until(t, db, `exists (select from onceq.jobs where lane is not null)`)
	release()
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// calledLongAgo enqueues one job in each of so many lanes, as if that had been ten minutes ago and nobody had looked since.
func calledLongAgo(t *testing.T, db *queuetest.DB, lanes int) {
	t.Helper()
	jobs := make([]onceq.Job, lanes)
	for n := range jobs {
		jobs[n] = charges.Job(charge{n, n})
	}
	for chunk := range slices.Chunk(jobs, 1000) {
		laneEnqueue(t, db.Queue, db.Pool, chunk...)
	}
	_, err := db.Pool.Exec(t.Context(), `update onceq.lane_calls set due = now() - interval '10 minutes' where lane <> ''`)
	require.NoError(t, err)
}

// drainsAll requires that one Drain runs so many charges.
func drainsAll(t *testing.T, db *queuetest.DB, jobs int) {
	t.Helper()
	var ran atomic.Int64
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, charges.Handle(func(context.Context, *onceq.Lease, charge) error {
		ran.Add(1)
		return nil
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), math.MaxInt))
	require.EqualValues(t, jobs, ran.Load())
}

// A place that was left behind counts for nothing, also for the job whose it is: that one goes on all the same.
func TestLane_APlaceThatIsThereAlready(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := context.Background(), db.Queue
	first, second := repairEnqueue(t, db, onceq.Job{Lane: "a"}), repairEnqueue(t, db, onceq.Job{Lane: "a"})
	l := laneClaimOne(t, q, first)
	repairExec(t, db, `insert into onceq.lane_places (lane, id) select lane, id from onceq.job_waits where id = $1`, second)
	require.NoError(t, l.Complete(ctx, nil))
	require.NoError(t, laneClaimOne(t, q, second).Complete(ctx, nil))
	require.NoError(t, db.Check())
}
