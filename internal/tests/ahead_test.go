package tests

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// aheadOf starts a worker that has claimed slow jobs ahead, whose handlers do not return until the test ends. The first ones
// returned at once, so it expected the same of these. After them come so many more of another kind. It returns how many run, and how
// many more are leased.
func aheadOf(t *testing.T, db *queuetest.DB, more int, block <-chan struct{}) (running *atomic.Int64, ahead func() int) {
	const slots, quick, slow = 10, 30_000, 600
	running = new(atomic.Int64)
	jobs := make([]onceq.Job, quick+slow+more)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Payload: 0}
		if i >= quick {
			jobs[i].Payload = 1
		}
		if i >= quick+slow {
			jobs[i].Kind = "more"
		}
	}
	for i := 0; i < len(jobs); i += 5000 {
		_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs[i:min(len(jobs), i+5000)])
		require.NoError(t, err)
	}
	others := onceq.Kind[int]{Name: "more"}
	w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: slots}}}, work.Handle(func(_ context.Context, _ *onceq.Lease, n int) error {
		if n == 1 {
			running.Add(1)
			<-block
		}
		return nil
	}), others.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	t.Cleanup(func() { _ = w.stop() })
	ahead = func() int {
		return sqlOne[int](t, db, `select count(*)::int - $1::int from onceq.jobs where leased_until is not null`, slots)
	}
	eventually(t, "all slots", func() bool { return running.Load() == slots })
	return running, ahead
}

// What was claimed ahead is not kept for long from workers that have room, when handlers take much longer than the ones before.
func TestAhead_IsGivenBackToOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	block := make(chan struct{})
	defer close(block)
	mine, ahead := aheadOf(t, db, 0, block)
	var others atomic.Int64
	w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1000}}}, handle(func(context.Context, *onceq.Lease) error {
		others.Add(1)
		return nil
	}))
	eventually(t, "the other jobs", func() bool { return others.Load() == 590 })
	require.Equal(t, int64(10), mine.Load())
	eventually(t, "their outcomes", func() bool { return ahead() == 0 })
	require.NoError(t, w.stop())
}

// Small jobs with quick handlers are claimed ahead by the hundred. When large ones come right behind them, a claim keeps 16 MiB of
// payloads and gives the other jobs back, which run later, as if they had not been claimed.
func TestAhead_OfManyBytesIsGivenBack(t *testing.T) {
	t.Parallel()
	const small, large, more = 3000, 30, 10_000 // so much is due that nothing is given back because it waits
	payload := make([]byte, 1<<20)              // no JSON, which takes long under the race detector
	db := queuetest.New(t)
	var ran atomic.Int64
	for range 20 { // on a busy machine, too few may be claimed ahead
		for n, payload := range [][]byte{{}, payload, {}} {
			jobs := slices.Repeat([]onceq.Job{{Kind: "k", Payload: payload}}, []int{small, large, more}[n])
			_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
			require.NoError(t, err)
		}
		ran.Store(0)
		w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 4}}},
			onceq.Kind[[]byte]{Name: "k"}.Handle(func(_ context.Context, l *onceq.Lease, got []byte) error {
				if (len(got) == 0 || bytes.Equal(got, payload)) && l.Attempt == 1 {
					ran.Add(1)
				}
				return nil
			}))
		until(t, db, noJobs)
		require.NoError(t, w.stop())
		require.EqualValues(t, small+large+more, ran.Load())
		if w.count(onceq.EventReleased) > 0 {
			return
		}
	}
	t.Fatal("no claim gave anything back")
}

// When a kind is paused, what was claimed ahead of it does not start.
func TestAhead_IsGivenBackWhenItIsPaused(t *testing.T) {
	t.Parallel()
	var looks atomic.Int64
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if strings.Contains(sql, asksNext) {
				looks.Add(1)
			}
		}}
	}))
	block := make(chan struct{})
	mine, ahead := aheadOf(t, db, 20_000, block) // so much else is due that they are not given back just because they wait
	eventually(t, "jobs claimed ahead", func() bool { return ahead() > 0 })
	require.NoError(t, db.Queue.PauseKind(t.Context(), db.Pool, "k", ""))
	looks.Store(0)
	eventually(t, "the second look", func() bool { return looks.Load() > 1 }) // the worker has obeyed what the first one read
	close(block)
	until(t, db, `not exists (select from onceq.jobs where leased_until is not null or kind = 'more')`)
	require.Equal(t, int64(10), mine.Load())
}

// A job whose row is locked has its lease extended soon after the lock ends, so that nobody else takes it meanwhile: it is tried
// at every tick, twelve of them in a lease, and not at every third.
func TestBeat_OfALockedRowIsTriedOften(t *testing.T) {
	t.Parallel()
	const lease = 12 * time.Second
	var mu sync.Mutex
	var latest time.Time
	soon := 0 // beats that came soon after another one; if every third tick tried, there would be none
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if strings.Contains(sql, "extended as (") {
				mu.Lock()
				defer mu.Unlock()
				if time.Since(latest) < lease/6 {
					soon++
				}
				latest = time.Now()
			}
		}}
	}))
	block, started := make(chan struct{}), make(chan struct{}, 9)
	w := start(t, db, onceq.WorkerConfig{Lease: lease}, handle(func(context.Context, *onceq.Lease) error {
		started <- struct{}{}
		<-block
		return nil
	}))
	add(t, db, onceq.Job{})
	<-started
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `select from onceq.jobs for update`)
		require.NoError(t, err)
		eventually(t, "four beats, each soon after another one", func() bool { mu.Lock(); defer mu.Unlock(); return soon >= 4 })
		return nil
	}))
	until(t, db, `exists (select from onceq.jobs where leased_until > now() + interval '1 second')`)
	close(block)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}
