package tests

import (
	"context"
	"errors"
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

// groupFaultKinds are parts, which fail, panic and die now and then and a number of which adds another, and wholes, which write
// down when they ran and what their parts were then.
func groupFaultKinds() (part, whole onceq.Kind[int], handlePart, handleWhole func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error) {
	soon := func(int, error) time.Duration { return time.Millisecond }
	part = onceq.Kind[int]{Name: "part", MaxLost: 1000, MaxAttempts: 1000, Backoff: soon}
	whole = onceq.Kind[int]{Name: "whole", MaxLost: 1000, MaxAttempts: 1000, Backoff: soon}
	handlePart = func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
		if rand.N(10) == 0 {
			return onceq.Fatal(errors.New("dead"))
		}
		if n > 0 {
			if _, err := l.AddMembers(ctx, tx, part.Job(n-1)); err != nil {
				return err
			}
		}
		if err := l.SetResult(l.ID); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `insert into done values ($1)`, l.ID)
		return err
	}
	handleWhole = func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
		_, err := tx.Exec(ctx, `
			insert into wholes
			select $1, count(*) filter (where m.state = 5), count(*) filter (where m.state = 0), count(*) filter (where m.state in (6, 8)),
			       count(*) filter (where m.state = 5 and (m.result is distinct from to_jsonb(m.job_id) or not exists (select from done where job = m.job_id)))
			  from onceq.job_members m where m.group_id = $1`, l.ID)
		return err
	}
	return part, whole, handlePart, handleWhole
}

const groupFaultTables = `
create table done (job bigint primary key);
create table wholes (job bigint primary key, completed int, open int, dead int, wrong int)`

// Two workers, leases that end early, handlers that fail, panic, die and roll their completions back, members that are added,
// redriven and cancelled, and a snapshot that somebody holds. Each job that waits runs once, after all others, by its rule.
func TestGroup_UnderFaults(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	_, err := db.Pool.Exec(ctx, groupFaultTables)
	require.NoError(t, err)
	part, whole, handlePart, handleWhole := groupFaultKinds()
	inTx := func(k *onceq.Kind[int], handle func(context.Context, pgx.Tx, *onceq.Lease, int) error) onceq.Handler {
		return k.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
			if err := handle(ctx, tx, l, n); err != nil {
				return err
			}
			return laneFault() // rolls back all of it
		})
	}
	own := func(k *onceq.Kind[int], handle func(context.Context, pgx.Tx, *onceq.Lease, int) error) onceq.Handler {
		return k.Handle(func(ctx context.Context, l *onceq.Lease, n int) error {
			return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
				if err := handle(ctx, tx, l, n); err != nil {
					return err
				}
				if err := l.Complete(ctx, tx); err != nil {
					return err
				}
				return laneFault() // rolls back the completion, and what was told
			})
		})
	}
	config := onceq.WorkerConfig{Lease: steady, PollInterval: 50 * time.Millisecond, Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 4}}}
	workers := []*working{
		start(t, db, config, inTx(&part, handlePart), inTx(&whole, handleWhole)),
		start(t, db, config, own(&part, handlePart), own(&whole, handleWhole)),
	}
	redrive := func() error {
		_, _, err := onceqops.New(db.Queue).RedriveMany(ctx, db.Pool, onceqops.Filter{Kind: "part", States: []onceq.State{onceq.StateDead}, Limit: 1 + rand.N(3)})
		return err
	}
	calm := laneFaults(t, db, redrive)
	rules := make(map[int64]onceq.DeadRule)
	cancelled := make(map[int64]bool) // a member was, or its group
	for n := range conformance.Sized(14, 40) {
		jobs := make([]onceq.Job, 1+n%7)
		for i := range jobs {
			jobs[i] = part.Job(rand.N(3))
		}
		then := whole.Job(n)
		then.IfDead = onceq.DeadRule(n % 3)
		g, err := db.Queue.EnqueueGroup(ctx, db.Pool, jobs, then)
		require.NoError(t, err)
		rules[g.Then.ID] = then.IfDead
		switch rand.N(10) {
		case 0:
			_, err = db.Queue.Cancel(ctx, db.Pool, g.Members[0].ID)
			cancelled[g.Then.ID] = true
		case 1:
			_, _, err = onceqops.New(db.Queue).CancelGroup(ctx, db.Pool, g.Then.ID)
			cancelled[g.Then.ID] = true
		}
		if !errors.Is(err, onceq.ErrNotFound) {
			require.NoError(t, err)
		}
	}
	until(t, db, `not exists (select from onceq.jobs) and not exists (select from onceq.job_waits)`)
	calm()
	for _, w := range workers {
		require.NoError(t, w.stop())
	}
	require.NoError(t, db.Check())
	rows, err := db.Pool.Query(ctx, `select job, completed, open, dead, wrong from wholes`)
	require.NoError(t, err)
	type ran struct{ Job, Completed, Open, Dead, Wrong int64 }
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[ran])
	require.NoError(t, err)
	for _, r := range all {
		require.Zero(t, r.Wrong, "%+v", r)
		if rules[r.Job] != onceq.DeadRun { // otherwise somebody may redrive a dead one meanwhile
			require.Zero(t, r.Open+r.Dead, "%+v of rule %s", r, rules[r.Job])
		}
		delete(rules, r.Job)
	}
	for id, rule := range rules {
		require.True(t, cancelled[id] || rule == onceq.DeadCancel, "job %d of rule %s has not run", id, rule)
	}
}

// Groups go on after an immediate stop of the server: every job that waits runs once, after all of its members.
func TestGroup_SurvivesAnImmediateStopOfTheServer(t *testing.T) {
	t.Parallel()
	server, pool, q := durableServer(t)
	_, err := pool.Exec(t.Context(), groupFaultTables)
	require.NoError(t, err)
	part, whole, handlePart, handleWhole := groupFaultKinds()
	const groups, each = 40, 10
	jobs := make([]onceq.Job, each)
	for i := range jobs {
		jobs[i] = part.Job(i % 2)
	}
	for n := range groups {
		_, err := q.EnqueueGroup(t.Context(), pool, jobs, whole.Job(n))
		require.NoError(t, err)
	}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: 5 * time.Second}, part.HandleTx(handlePart), whole.HandleTx(handleWhole))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	count := func(sql string) (n int) {
		if err := pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			return -1
		}
		return n
	}
	eventually(t, "progress", func() bool { return count(`select count(*) from done`) > groups*each/4 })
	require.NoError(t, server.Restart(true))
	eventually(t, "all groups", func() bool {
		_, _, _ = onceqops.New(q).RedriveMany(ctx, pool, onceqops.Filter{Kind: "part", States: []onceq.State{onceq.StateDead}})
		return count(`select count(*) from wholes`) == groups
	})
	cancel()
	require.NoError(t, <-ended)
	require.Equal(t, 0, count(`select count(*) from wholes where completed <> 15 or open + dead + wrong > 0`))
	require.Equal(t, groups*each*3/2, count(`select count(*) from done`))
}
