package onceq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// What jobs that wait for others, and their ends, send in parts on Citus does the same on every server.
func TestCitus_GroupsInPartsDoTheSame(t *testing.T) {
	t.Parallel()
	inPartsDoTheSame(t, groupPaths)
}

func groupPaths(t *testing.T, db *queuetest.DB, say func(format string, args ...any)) {
	ctx, q := t.Context(), db.Queue
	whole := onceq.Kind[string]{Name: "whole", Keep: time.Hour}
	plain := onceq.Kind[int]{Name: "plain"}
	keyed := onceq.Kind[int]{Name: "keyed", Key: func(n int) string { return fmt.Sprint(n) }}
	kept := onceq.Kind[int]{Name: "kept", Keep: time.Hour}
	inTx := onceq.Kind[int]{Name: "tx", Keep: time.Hour}
	batch := onceq.Kind[int]{Name: "batch"}
	keptBatch := onceq.Kind[int]{Name: "keptbatch", Keep: time.Hour}
	kinds := []*onceq.Kind[int]{&plain, &keyed, &kept, &inTx, &batch, &keptBatch}

	group := func(id int64) {
		g, err := q.Group(ctx, db.Pool, id)
		g.ID, g.Oldest = 0, 0
		say("group %+v, %v", g, err)
		members, err := q.Members(ctx, db.Pool, id, 0, 0)
		require.NoError(t, err)
		for _, m := range members {
			say("member %s %s %s %s", m.State, m.Kind, m.Error, m.Result)
		}
	}
	var mu sync.Mutex
	var heard []string
	var handlers []onceq.Handler
	ends := func(l *onceq.Lease, n int) error {
		if n < 0 {
			return onceq.Fatal(errors.New("no"))
		}
		return l.SetResult(n)
	}
	for _, k := range kinds {
		switch k.Name {
		case "tx":
			handlers = append(handlers, k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
				if n > 100 { // it adds members, which fail
					if _, err := l.AddMembers(ctx, tx, plain.Job(n/100), plain.Job(-1)); err != nil {
						return err
					}
				}
				if n == 50 { // no result
					_, err := tx.Exec(ctx, `select 1`)
					return err
				}
				return ends(l, n)
			}))
		case "batch", "keptbatch":
			handlers = append(handlers, k.HandleBatch(5, func(ctx context.Context, tx pgx.Tx, items []onceq.Item[int]) error {
				for _, i := range items {
					if err := ends(i.Lease, i.Payload); err != nil {
						return err
					}
				}
				return nil
			}))
		default:
			handlers = append(handlers, k.Handle(func(_ context.Context, l *onceq.Lease, n int) error { return ends(l, n) }))
		}
	}
	wholeRuns := func(ctx context.Context, l *onceq.Lease, name string) error {
		members, err := l.Members(ctx, 0, 0)
		if err != nil {
			return err
		}
		sum := 0
		states := map[onceq.State]int{}
		for _, m := range members {
			var n int
			if m.Result != nil {
				if err := json.Unmarshal(m.Result, &n); err != nil {
					return err
				}
			}
			sum += n
			states[m.State]++
		}
		mu.Lock()
		defer mu.Unlock()
		heard = append(heard, fmt.Sprintf("%s runs after %v, sum %d", name, states, sum))
		return nil
	}
	handlers = append(handlers, whole.Handle(wholeRuns))
	drain := func() {
		heard = nil
		db.Drain(handlers...)
		slices.Sort(heard)
		say("%s", heard)
		require.NoError(t, db.Check())
	}
	enqueue := func(j onceq.Job) int64 {
		r, err := q.Enqueue(ctx, db.Pool, j)
		require.NoError(t, err)
		return r.ID
	}
	enqueueGroup := func(rule onceq.DeadRule, name string, members ...onceq.Job) int64 {
		then := whole.Job(name)
		then.IfDead = rule
		g, err := q.EnqueueGroup(ctx, db.Pool, members, then)
		require.NoError(t, err)
		for _, r := range append(g.Members, g.Then) {
			say("enqueued %t %s", r.Duplicate, r.State)
		}
		require.NoError(t, db.Check())
		return g.Then.ID
	}

	// Every way to complete.
	var all []onceq.Job
	for i, k := range kinds {
		for n := range 3 {
			all = append(all, k.Job(10*i+n))
		}
	}
	id := enqueueGroup(onceq.DeadWait, "all", append(all, inTx.Job(50))...)
	group(id)
	drain()
	group(id)

	// By hand: in a transaction, in a batch, cancelled and discarded.
	id = enqueueGroup(onceq.DeadRun, "by hand", plain.Job(1), kept.Job(2), keyed.Job(70), plain.Job(4))
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 3})
	require.NoError(t, err)
	require.NoError(t, leases[0].SetResult(1))
	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return leases[0].Complete(ctx, tx) }))
	b := &pgx.Batch{}
	require.NoError(t, leases[1].SetResult(2))
	require.NoError(t, leases[1].CompleteInBatch(b))
	require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
	require.NoError(t, leases[2].Complete(ctx, nil))
	require.ErrorIs(t, leases[2].Complete(ctx, nil), onceq.ErrLeaseLost)
	members, err := q.Members(ctx, db.Pool, id, 0, 0)
	require.NoError(t, err)
	state, err := q.Cancel(ctx, db.Pool, members[3].ID)
	say("cancelled: %s, %v", state, err)
	group(id)
	drain()

	// A dead member: the job waits until it is redriven, or discarded; runs; is cancelled, and comes back with the member.
	for _, rule := range []onceq.DeadRule{onceq.DeadWait, onceq.DeadRun, onceq.DeadCancel} {
		id := enqueueGroup(rule, fmt.Sprint("rule ", rule), plain.Job(1), plain.Job(-1), kept.Job(-1))
		drain()
		db.Advance(2 * time.Second)
		drain()
		group(id)
		members, err := q.Members(ctx, db.Pool, id, 0, 0)
		require.NoError(t, err)
		say("discard: %v", q.Discard(ctx, db.Pool, members[1].ID))
		state, err := q.Redrive(ctx, db.Pool, members[2].ID)
		say("redrive: %s, %v", state, err)
		state, err = q.Redrive(ctx, db.Pool, id)
		say("redrive: %s, %v", state, err)
		group(id)
		leases, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"kept"}})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		require.NoError(t, leases[0].Complete(ctx, nil))
		drain()
		db.Advance(2 * time.Second)
		drain()
		group(id)
	}

	// Members that add others, and jobs that wait for jobs that wait.
	id = enqueueGroup(onceq.DeadRun, "adds", inTx.Job(300))
	next := whole.Job("next")
	next.After = []onceq.JobRef{{ID: id}}
	last := enqueue(next)
	drain()
	group(id)
	group(last)

	// Jobs that exist: one that is leased, one that waits, one that is dead, one that is gone, and a key in the same call.
	leased := enqueue(plain.Job(1))
	leases, err = q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	dead := enqueue(kept.Job(-1))
	enqueue(keyed.Job(80))
	drain()
	free := enqueue(plain.Job(2))
	after := whole.Job("after")
	after.IfDead = onceq.DeadRun
	after.After = []onceq.JobRef{{ID: leased}, {ID: dead}, {ID: free}, keyed.Ref(80), keyed.Ref(81), {ID: last}}
	results, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{keyed.Job(81), after})
	require.NoError(t, err)
	id = results[1].ID
	require.NoError(t, db.Check())
	group(id)
	drain()
	group(id)
	require.NoError(t, leases[0].Complete(ctx, nil))
	drain()
	group(id)
	_, err = q.Enqueue(ctx, db.Pool, func() onceq.Job { j := whole.Job("never"); j.After = []onceq.JobRef{{ID: 1 << 40}}; return j }())
	say("an id that was not drawn: %t", err != nil)

	// A group is cancelled, while one member runs, and comes back.
	id = enqueueGroup(onceq.DeadWait, "cancelled", plain.Job(1), plain.Job(2), plain.Job(3))
	leases, err = q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	cancelled, asked, err := q.CancelGroup(ctx, db.Pool, id)
	say("group cancelled: %d, %d, %v", cancelled, asked, err)
	group(id)
	require.NoError(t, leases[0].Release(ctx))
	group(id)
	redriven, taken, err := q.RedriveMany(ctx, db.Pool, onceq.Filter{IDs: append(groupIDs(t, q, db, id), id), States: []onceq.State{onceq.StateCancelled}})
	say("redriven: %d, %d, %v", redriven, taken, err)
	group(id)
	groups, err := q.Groups(ctx, db.Pool, 0, 0)
	say("%d groups wait, %v", len(groups), err)
	why, err := q.Explain(ctx, db.Pool, id)
	require.NoError(t, err)
	say("explained: %v", why.Cause())
	drain()
	group(id)
}

// groupIDs gives the ids of the members of a group.
func groupIDs(t *testing.T, q *onceq.Queue, db *queuetest.DB, id int64) (ids []int64) {
	t.Helper()
	members, err := q.Members(t.Context(), db.Pool, id, 0, 0)
	require.NoError(t, err)
	for _, m := range members {
		ids = append(ids, m.ID)
	}
	return ids
}
