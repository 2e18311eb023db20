package tests

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
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

// looks counts how often workers have looked at what is paused.
type looks struct{ n atomic.Int64 }

func (l *looks) hook() *statementHook {
	return &statementHook{after: func(sql string) {
		if strings.Contains(sql, ".pauses") {
			l.n.Add(1)
		}
	}}
}

// wait waits until workers have looked n times more.
func (l *looks) wait(t *testing.T, n int64) {
	t.Helper()
	from := l.n.Load()
	eventually(t, "looks at what is paused", func() bool { return l.n.Load() >= from+n })
}

type seenJobs struct {
	mu  sync.Mutex
	ids []int64
}

func (s *seenJobs) add(_ context.Context, l *onceq.Lease) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids = append(s.ids, l.ID)
	return nil
}

func (s *seenJobs) all() []int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]int64{}, s.ids...)
}

func kindHandler(kind, queue string, fn func(context.Context, *onceq.Lease) error) onceq.Handler {
	k := onceq.Kind[any]{Name: kind, Queue: queue}
	return k.Handle(func(ctx context.Context, l *onceq.Lease, _ any) error { return fn(ctx, l) })
}

// A worker of another process obeys a pause, and goes on after it.
func TestPause_AQueueIsLeftAloneAndGoesOnInItsOrder(t *testing.T) {
	t.Parallel()
	var l looks
	db, _ := hooked(t, l.hook())
	ctx, q := t.Context(), db.Queue
	var ran seenJobs
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "a", "the provider is down"))
	w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"a": {Concurrency: 1}}}, kindHandler("a", "a", ran.add), kindHandler("b", "b", ran.add))
	var want []int64
	for range 5 {
		want = append(want, add(t, db, onceq.Job{Kind: "a", Queue: "a", Payload: 1}))
	}
	other := add(t, db, onceq.Job{Kind: "b", Queue: "b", Payload: 1})
	until(t, db, `not exists (select from onceq.jobs where id = $1)`, other)
	l.wait(t, 4)
	require.Equal(t, []int64{other}, ran.all())
	require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs where claims > 0`))

	was, err := q.ResumeQueue(ctx, db.Pool, "a")
	require.NoError(t, err)
	require.True(t, was)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Equal(t, append([]int64{other}, want...), ran.all())
	require.Zero(t, w.count(onceq.EventBackground), w.logged())
}

func TestPause_AKindInEveryQueue(t *testing.T) {
	t.Parallel()
	var l looks
	db, _ := hooked(t, l.hook())
	ctx, q := t.Context(), db.Queue
	var ran seenJobs
	w := start(t, db, onceq.WorkerConfig{Also: []string{"b"}, Queues: map[string]onceq.QueueConfig{"a": {Concurrency: 1}, "b": {Concurrency: 1}}},
		kindHandler("one", "a", ran.add), kindHandler("two", "a", ran.add))
	l.wait(t, 1)
	require.NoError(t, q.PauseKind(ctx, db.Pool, "one", ""))
	l.wait(t, 2) // the second was sent after the commit
	var paused, others []int64
	for range 3 {
		for _, queue := range []string{"a", "b"} {
			paused = append(paused, add(t, db, onceq.Job{Kind: "one", Queue: queue, Payload: 1}))
			others = append(others, add(t, db, onceq.Job{Kind: "two", Queue: queue, Payload: 1}))
		}
	}
	until(t, db, `not exists (select from onceq.jobs where kind = 'two')`)
	// The rescan, which looks for jobs before the cursor, leaves them alone too.
	before := sqlOne[string](t, db, `select string_agg(run_at::text, ' ' order by id) from onceq.jobs`)
	l.wait(t, 6)
	require.ElementsMatch(t, others, ran.all())
	require.Equal(t, before, sqlOne[string](t, db, `select string_agg(run_at::text, ' ' order by id) from onceq.jobs`))
	require.NotContains(t, w.logged(), "for which this worker has no handler")

	was, err := q.ResumeKind(ctx, db.Pool, "one")
	require.NoError(t, err)
	require.True(t, was)
	until(t, db, noJobs)
	require.ElementsMatch(t, append(paused, others...), ran.all())
	var inA []int64
	for _, id := range ran.all() {
		if id == paused[0] || id == paused[2] || id == paused[4] {
			inA = append(inA, id)
		}
	}
	require.Equal(t, []int64{paused[0], paused[2], paused[4]}, inA, "in the order in which they were due")
}

// A job that was claimed before the pause was committed runs, and one that runs goes on. The next one does not start.
func TestPause_WhileAClaimIsUnderWay(t *testing.T) {
	t.Parallel()
	claiming, goOn := make(chan struct{}), make(chan struct{})
	var armed atomic.Bool
	var l looks
	count := l.hook().after
	db, pool := hooked(t, &statementHook{after: count, before: func(sql string) {
		// A claim that asks what is paused, as one does after half a second, would hear of it.
		if strings.Contains(sql, claimsJobs) && !strings.Contains(sql, ".pauses") && armed.CompareAndSwap(true, false) {
			close(claiming)
			<-goOn
		}
	}})
	running, finish := make(chan int64), make(chan struct{})
	w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 5}}}, handle(func(_ context.Context, l *onceq.Lease) error {
		running <- l.ID
		<-finish
		return nil
	}))
	l.wait(t, 1)
	first := add(t, db, onceq.Job{Payload: 1})
	require.Equal(t, first, receive(t, running))
	armed.Store(true)
	second := add(t, db, onceq.Job{Payload: 1})
	for under := false; !under; {
		select {
		case <-claiming:
			under = true
		case id := <-running: // its claim asked
			require.Equal(t, second, id)
			second = add(t, db, onceq.Job{Payload: 1})
		case <-time.After(patience):
			t.Fatal("no claim")
		}
	}
	other, err := onceq.New(pool, &onceq.Config{Schema: db.Schema}) // another process
	require.NoError(t, err)
	require.NoError(t, other.PauseQueue(t.Context(), pool, "default", ""))
	close(goOn)
	require.Equal(t, second, receive(t, running), "its claim was under way")
	l.wait(t, 2)
	third := add(t, db, onceq.Job{Payload: 1})
	close(finish)
	until(t, db, `not exists (select from onceq.jobs where id <= $1)`, second)
	l.wait(t, 4)
	require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from onceq.jobs where id = $1 and claims = 0`, third))
	_, err = other.ResumeQueue(t.Context(), pool, "default")
	require.NoError(t, err)
	require.Equal(t, third, receive(t, running))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

func TestPause_DrainLeavesWhatIsPaused(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var ran seenJobs
	handlers := []onceq.Handler{kindHandler("one", "a", ran.add), kindHandler("two", "a", ran.add), kindHandler("three", "b", ran.add)}
	one := add(t, db, onceq.Job{Kind: "one", Queue: "a", Payload: 1})
	lost := add(t, db, onceq.Job{Kind: "one", Queue: "a", Payload: 1})
	sqlRun(t, db, `update onceq.jobs set lost = 1, claims = 1 where id = $1`, lost)
	two := add(t, db, onceq.Job{Kind: "two", Queue: "a", Payload: 1})
	three := add(t, db, onceq.Job{Kind: "three", Queue: "b", Payload: 1})
	require.NoError(t, q.PauseKind(ctx, db.Pool, "one", ""))
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "b", ""))
	db.Drain(handlers...)
	require.Equal(t, []int64{two}, ran.all())
	_, err := q.ResumeQueue(ctx, db.Pool, "b")
	require.NoError(t, err)
	db.Drain(handlers...)
	require.Equal(t, []int64{two, three}, ran.all())
	_, err = q.ResumeKind(ctx, db.Pool, "one")
	require.NoError(t, err)
	db.Drain(handlers...)
	require.ElementsMatch(t, []int64{two, three, one, lost}, ran.all())
}

func TestPause_ClaimReturnsNothingOfIt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	claim := func(kinds ...string) (ids []int64) {
		leases, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: kinds, Limit: 10})
		require.NoError(t, err)
		for _, l := range leases {
			ids = append(ids, l.ID)
			require.NoError(t, l.Release(ctx))
		}
		return ids
	}
	one := add(t, db, onceq.Job{Kind: "one", Payload: 1})
	two := add(t, db, onceq.Job{Kind: "two", Payload: 1})
	require.Equal(t, []int64{one, two}, claim())
	require.NoError(t, q.PauseKind(ctx, db.Pool, "one", ""))
	require.Equal(t, []int64{two}, claim())
	require.Empty(t, claim("one"))
	require.Equal(t, []int64{two}, claim("one", "two"))
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "default", ""))
	require.Empty(t, claim())
	require.Empty(t, claim("two"))
	for range 2 {
		was, err := q.ResumeQueue(ctx, db.Pool, "default")
		require.NoError(t, err)
		_, err = q.ResumeKind(ctx, db.Pool, "one")
		require.NoError(t, err)
		require.Equal(t, []int64{one, two}, claim())
		if !was {
			break
		}
	}

	// What another process pauses counts within two seconds.
	other, err := onceq.New(db.Pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)
	require.NoError(t, other.PauseQueue(ctx, db.Pool, "default", ""))
	eventually(t, "the pause takes hold", func() bool { return len(claim()) == 0 })
}

// A worker whose queue is paused sends what an idle one does: its looks, once a second at most.
func TestPause_CostsNoFurtherMessages(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	const each, afresh = 8, 1500 * time.Millisecond // without a look for so long, it reads by itself what is paused: this machine stood still
	var mu sync.Mutex
	var looked time.Time
	looks, others := 0, 0
	cfg := db.Pool.Config()
	cfg.ConnConfig.Tracer = &statementHook{before: func(sql string) {
		mu.Lock()
		defer mu.Unlock()
		switch now := time.Now(); {
		case strings.Contains(sql, "as next"):
			looks, looked = looks+1, now
		case strings.Contains(sql, ".pauses") && now.Sub(looked) >= afresh:
		case strings.Contains(sql, ".pauses"), strings.Contains(sql, "rescan_turn("), strings.Contains(sql, "high_id"):
			others++
		}
	}}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer pool.Close()
	require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, onceq.DefaultQueue, ""))
	add(t, db, onceq.Job{})
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 minute'`) // a rescan would find it
	// Looks come once a second, also where they take long.
	w := start(t, &queuetest.DB{Pool: pool, Schema: db.Schema}, onceq.WorkerConfig{PollInterval: time.Second}, handle(func(context.Context, *onceq.Lease) error { return nil }))
	until(t, db, `exists (select from onceq.workers) and exists (select from onceq.queues)`)
	mu.Lock()
	looks, others = 0, 0 // those of the beginning
	mu.Unlock()
	eventually(t, "looks", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return looks >= each
	})
	require.NoError(t, w.stop())
	require.Less(t, others, each/2)
}

func TestPause_IsShown(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "mail", "ann: provider down"))
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "mail", "ann: provider down since 9"))
	require.NoError(t, q.PauseKind(ctx, db.Pool, "report", ""))
	err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		require.NoError(t, q.PauseQueue(ctx, tx, "never", ""))
		return errors.New("rolled back")
	})
	require.Error(t, err)
	all, err := onceqops.New(q).Pauses(ctx, db.Pool)
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, "mail", all[0].Queue)
	require.Equal(t, "ann: provider down since 9", all[0].Note)
	require.Equal(t, "report", all[1].Kind)
	require.Empty(t, all[1].Queue)

	stats, err := onceqops.New(q).Stats(ctx)
	require.NoError(t, err)
	require.Len(t, stats, 1, "also without jobs")
	require.Equal(t, all[0].Since, stats[0].Paused)

	health := func() (found []onceqops.Finding) {
		all, err := onceqops.New(q).Health(ctx)
		require.NoError(t, err)
		for _, f := range all {
			if f.What == "paused" || f.What == "waiting" {
				found = append(found, f)
			}
		}
		return found
	}
	require.Empty(t, health())
	add(t, db, onceq.Job{Queue: "mail", Payload: 1})
	db.Advance(2 * time.Hour)
	found := health()
	require.Len(t, found, 2, "%v", found)
	require.Equal(t, "paused", found[0].What)
	require.Contains(t, found[0].Detail, `queue "mail" has been paused since `)
	require.Contains(t, found[0].Detail, "provider down since 9")
	require.Contains(t, found[1].Detail, `kind "report" has been paused since `)
	require.Contains(t, found[1].Advice, "resume it when the reason is over")

	var bad *onceq.InvalidError
	require.ErrorAs(t, q.PauseQueue(ctx, db.Pool, "", ""), &bad)
	require.ErrorAs(t, q.PauseKind(ctx, db.Pool, "k", strings.Repeat("x", 1001)), &bad)
	require.ErrorAs(t, q.PauseQueue(ctx, nil, "q", ""), &bad)
	_, err = q.ResumeQueue(ctx, db.Pool, " ")
	require.ErrorAs(t, err, &bad)
}

// What one call asks for what is paused may get no answer for long. The others end with their contexts, or ask themselves.
func TestPause_AClaimDoesNotWaitForAnothersRead(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{})
	_, err := q.Claim(ctx, onceq.ClaimOptions{Queue: "other"}) // reads the installation's id, once
	require.NoError(t, err)
	require.NoError(t, q.PauseQueue(ctx, db.Pool, "other", "")) // what was known counts no longer
	locked, err := owner(t, db).Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = locked.Rollback(context.Background()) }()
	_, err = locked.Exec(ctx, `lock table pauses`)
	require.NoError(t, err)
	claimed := make(chan []*onceq.Lease, 2)
	claim := func() {
		leases, err := q.Claim(ctx, onceq.ClaimOptions{})
		assert.NoError(t, err)
		claimed <- leases
	}
	read := func(n int) {
		t.Helper()
		until(t, db, `(select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%pauses%') = $1`, n)
	}
	go claim()
	read(1)
	late, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := q.Claim(late, onceq.ClaimOptions{})
		ended <- err
	}()
	require.ErrorIs(t, receive(t, ended), context.DeadlineExceeded)
	go claim()
	read(2)
	require.NoError(t, locked.Rollback(ctx))
	require.Equal(t, []int64{id}, idsOf(append(receive(t, claimed), receive(t, claimed)...)))
}

// A pause that has an end ends by itself, by the database's clock, and is not shown any more.
func TestPause_Until(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	q := db.Queue
	setLimit(t, db, "provider", onceq.Limit{AtOnce: 5})
	for _, p := range []onceq.Pause{
		{Queue: onceq.DefaultQueue, For: time.Hour, Note: "ann"},
		{Kind: limitedAlone.Name, Until: time.Now().Add(time.Hour)},
		{Limit: "provider", For: time.Hour},
	} {
		require.NoError(t, q.Pause(ctx, db.Pool, p))
		all, err := onceqops.New(q).Pauses(ctx, db.Pool)
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.WithinDuration(t, time.Now().Add(time.Hour), all[0].Until, time.Minute)
		require.Contains(t, all[0].String(), " until ")
		require.Equal(t, []string{p.Queue, p.Kind, p.Limit, p.Note}, []string{all[0].Queue, all[0].Kind, all[0].Limit, all[0].Note})

		id := laneEnqueue(t, q, db.Pool, limitedAlone.Job(charge{1, 1}))[0]
		require.Empty(t, laneClaim(t, q, 1), "%+v", p)
		e, err := onceqops.New(q).Explain(ctx, db.Pool, id)
		require.NoError(t, err)
		require.Contains(t, e.String(), all[0].String())
		if p.Limit != "" {
			l, err := onceqops.New(q).Limit(ctx, db.Pool, "provider")
			require.NoError(t, err)
			require.Equal(t, &all[0], l.Pause)
			require.Equal(t, all[0].String(), l.String())
		}
		db.Advance(5 * time.Minute)
		found, err := onceqops.New(q).Health(ctx)
		require.NoError(t, err)
		require.True(t, slices.ContainsFunc(found, func(f onceqops.Finding) bool {
			return f.What == "paused" && strings.Contains(f.Advice, "ends by itself")
		}), found)
		db.Advance(time.Hour)
		all, err = onceqops.New(q).Pauses(ctx, db.Pool)
		require.NoError(t, err)
		require.Empty(t, all)
		stats, err := onceqops.New(q).Stats(ctx)
		require.NoError(t, err)
		require.Zero(t, stats[0].Paused)
		var leases []*onceq.Lease
		eventually(t, "it goes on", func() bool { // what was read lately is not asked for each claim
			leases = laneClaim(t, q, 1)
			return len(leases) == 1
		})
		require.NoError(t, leases[0].Complete(ctx, nil))
		was, err := q.Resume(ctx, db.Pool, p)
		require.NoError(t, err)
		require.False(t, was, "it has ended")
	}

	// It is resumed before its end, and the limit goes on.
	require.NoError(t, q.Pause(ctx, db.Pool, onceq.Pause{Limit: "provider", For: time.Hour}))
	laneEnqueue(t, q, db.Pool, limitedAlone.Job(charge{2, 2}))
	require.Empty(t, laneClaim(t, q, 1))
	was, err := q.Resume(ctx, db.Pool, onceq.Pause{Limit: "provider"})
	require.NoError(t, err)
	require.True(t, was)
	require.Len(t, laneClaim(t, q, 1), 1)

	var bad *onceq.InvalidError
	for _, p := range []onceq.Pause{
		{}, {Queue: "a", Kind: "b"}, {Limit: "a/"}, {Limit: "/a"}, {Queue: "a", For: -1},
		{Queue: "a", For: time.Hour, Until: time.Now()}, {Queue: "a", Until: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		require.ErrorAs(t, q.Pause(ctx, db.Pool, p), &bad, "%+v", p)
	}
	require.NoError(t, db.Check())
}

// LimitFull pauses the job's limit, so that no other job of it starts before its end, and spends no attempt.
func TestLimitFull(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]onceq.Limit{"at once": {AtOnce: 1}, "a rate": {Max: 1, Per: 10 * time.Millisecond}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := context.Background()
			db := queuetest.New(t)
			setLimit(t, db, "provider", limit)
			for n := range 4 {
				laneEnqueue(t, db.Queue, db.Pool, limitedAlone.Job(charge{n, n}))
			}
			var full atomic.Bool
			done := make(chan *onceq.Lease, 10)
			started := make(chan time.Time, 10)
			start(t, db, onceq.WorkerConfig{}, limitedAlone.Handle(
				func(ctx context.Context, l *onceq.Lease, _ charge) error {
					if full.CompareAndSwap(false, true) {
						return fmt.Errorf("calling: %w", onceq.LimitFull(5*time.Second, errors.New("429")))
					}
					started <- sqlOne[time.Time](t, db, `select clock_timestamp()`)
					done <- l
					return nil
				}))
			until(t, db, `exists (select from onceq.pauses)`)
			end := sqlOne[time.Time](t, db, `select until from onceq.pauses where what = 'limit' and name = 'provider'`)
			until(t, db, `exists (select from onceq.job_waits where errors::text like '%calling: 429%')`)
			before := 0
			for range 4 {
				l := receive(t, done)
				require.Equal(t, 1, l.Attempt)
				if receive(t, started).Before(end) {
					before++
				}
			}
			if limit.AtOnce > 0 {
				require.Zero(t, before)
			}
			until(t, db, `not exists (select from onceq.jobs) and not exists (select from onceq.job_waits)`)
			require.NoError(t, db.Check())

			// A pause that is longer, or has no end, stays.
			require.NoError(t, db.Queue.Pause(ctx, db.Pool, onceq.Pause{Limit: "provider", Note: "ann"}))
			sqlRun(t, asOwner(t, db), `select pause('limit', 'provider', null, 1000000, 'bob', true)`)
			all, err := onceqops.New(db.Queue).Pauses(ctx, db.Pool)
			require.NoError(t, err)
			require.Equal(t, []any{"ann", true}, []any{all[0].Note, all[0].Until.IsZero()})
		})
	}
}

// Without a limit LimitFull gives the job back for so long.
func TestLimitFull_WithoutALimit(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := queuetest.New(t)
	add(t, db, onceq.Job{Kind: "a", Payload: 1, MaxAttempts: 1})
	l := laneClaim(t, db.Queue, 1)[0]
	require.NoError(t, l.Fail(ctx, onceq.LimitFull(time.Hour, errors.New("429"))))
	info, err := db.Queue.Get(ctx, db.Pool, l.ID)
	require.NoError(t, err)
	require.Equal(t, 0, info.Attempts)
	require.Equal(t, "429", info.Errors[0].Error)
	require.WithinDuration(t, time.Now().Add(time.Hour), info.RunAt, time.Minute)
	require.NoError(t, onceq.LimitFull(time.Hour, nil))
	require.True(t, onceq.IsFailure(onceq.LimitFull(time.Hour, errors.New("429"))))
}
