package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

// awaitScene is a job that this test works on by hand.
type awaitScene struct {
	db    *queuetest.DB
	id    int64
	lease *onceq.Lease
	key   string
}

func newAwaitScene(t *testing.T, db *queuetest.DB, key string) *awaitScene {
	t.Helper()
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "flow", Payload: 1})
	require.NoError(t, err)
	s := &awaitScene{db: db, id: r.ID, key: key}
	s.claim(t)
	return s
}

func (s *awaitScene) claim(t *testing.T) {
	t.Helper()
	leases, err := s.db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	require.Equal(t, s.id, leases[0].ID)
	s.lease = leases[0]
}

func (s *awaitScene) await(ctx context.Context) (string, bool, error) {
	return onceq.Await[string](ctx, s.lease, "paid", s.key, 72*time.Hour)
}

// due says in how long the job runs again.
func (s *awaitScene) due(t *testing.T) time.Duration {
	t.Helper()
	var left float64
	require.NoError(t, s.db.Pool.QueryRow(t.Context(), `select extract(epoch from run_at - statement_timestamp())::float8 from onceq.jobs where id = $1`, s.id).Scan(&left))
	return time.Duration(left * float64(time.Second))
}

// goesOn claims the job, which must be due within the pause after an Emit that was under way, and returns what it hears.
func (s *awaitScene) hears(t *testing.T) (string, bool) {
	t.Helper()
	for range 3 {
		require.Less(t, s.due(t), 3*time.Second, "the wake-up was lost")
		s.db.Advance(time.Second)
		s.claim(t)
		text, ok, err := s.await(t.Context())
		if err == nil {
			return text, ok
		}
		require.NoError(t, s.lease.Fail(t.Context(), err))
	}
	require.Fail(t, "the job heard nothing")
	return "", false
}

// blocked waits until a session waits for a lock, or done has an answer.
func blocked(t *testing.T, db *queuetest.DB, done chan error) bool {
	t.Helper()
	for {
		if conformance.Blocked(t, db) > 0 {
			return true
		}
		select {
		case err := <-done:
			done <- err
			return false
		case <-time.After(2 * time.Millisecond):
		}
	}
}

var awaitLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// An Emit whose transaction is open, and what the job does meanwhile, in three isolation levels: after the commit the job
// hears of the event, and after a rollback it goes on waiting.
func TestAwait_WhileTheEventIsBeingEmitted(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}), queuetest.Schema("onceq"))
	begin := func(t *testing.T, s *awaitScene) error { // the job asks, and hears that it has to wait
		_, ok, err := s.await(t.Context())
		require.Error(t, err)
		require.False(t, ok)
		require.False(t, onceq.IsFailure(err))
		return err
	}
	moves := map[string]struct {
		before, during func(t *testing.T, s *awaitScene)
	}{
		"begins to wait": {during: func(t *testing.T, s *awaitScene) {
			require.NoError(t, s.lease.Fail(t.Context(), begin(t, s)))
		}},
		"is given back": {
			before: func(t *testing.T, s *awaitScene) { begin(t, s) },
			during: func(t *testing.T, s *awaitScene) { require.NoError(t, s.lease.Fail(t.Context(), begin(t, s))) },
		},
		"waits": {before: func(t *testing.T, s *awaitScene) { require.NoError(t, s.lease.Fail(t.Context(), begin(t, s))) }},
		"crashes": {
			before: func(t *testing.T, s *awaitScene) { begin(t, s) },
			during: func(t *testing.T, s *awaitScene) { db.ExpireLease(s.id) },
		},
		"fails": {
			before: func(t *testing.T, s *awaitScene) { begin(t, s) },
			during: func(t *testing.T, s *awaitScene) {
				require.NoError(t, s.lease.Fail(t.Context(), onceq.RetryAfter(time.Millisecond, errors.New("no"))))
			},
		},
	}
	n := 0
	for name, move := range moves {
		for _, level := range awaitLevels {
			for _, commit := range []bool{true, false} {
				n++
				key := fmt.Sprint(n)
				t.Run(fmt.Sprint(name, ", ", level, ", commit ", commit), func(t *testing.T) {
					ctx := t.Context()
					s := newAwaitScene(t, db, key)
					if move.before != nil {
						move.before(t, s)
					}
					tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
					require.NoError(t, err)
					defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
					first, err := db.Queue.Emit(ctx, tx, "paid", key, "yes")
					require.NoError(t, err)
					require.True(t, first)
					require.NoError(t, db.Check())
					if move.during != nil {
						move.during(t, s)
					}
					require.NoError(t, db.Check())
					if commit {
						require.NoError(t, tx.Commit(ctx))
						require.NoError(t, db.Check())
						text, ok := s.hears(t)
						require.True(t, ok)
						require.Equal(t, "yes", text)
					} else {
						require.NoError(t, tx.Rollback(ctx))
						if s.due(t) < 3*time.Second {
							s.db.Advance(3 * time.Second)
							s.claim(t)
							_, ok, err := s.await(ctx)
							require.Error(t, err)
							require.False(t, ok)
							require.NoError(t, s.lease.Fail(ctx, err))
						}
						require.InDelta(t, 72*time.Hour, s.due(t), float64(time.Hour))
						_, err = db.Queue.Emit(ctx, db.Pool, "paid", key, "later")
						require.NoError(t, err)
						text, ok := s.hears(t)
						require.True(t, ok)
						require.Equal(t, "later", text)
					}
					require.NoError(t, s.lease.Complete(ctx, nil))
					require.NoError(t, db.Check())
				})
			}
		}
	}
}

// The other side is held between its statements: an Emit comes while a job begins to wait, and while it is given back. Who begins to
// wait gives up after a second, and where this machine stood still for so long, the two have not met.
func TestAwait_EmitMeetsWhoBeginsToWaitAndWhoGivesBack(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}), queuetest.Schema("onceq"))
	for n, level := range awaitLevels {
		for m, name := range []string{"begins to wait", "is given back"} {
			t.Run(fmt.Sprint(name, ", ", level), func(t *testing.T) {
				for try := 0; !meets(t, db, level, m == 0, fmt.Sprint("meet", n, m, try)); try++ {
					require.Less(t, try, 10, "they do not meet")
				}
			})
		}
	}
}

func meets(t *testing.T, db *queuetest.DB, level pgx.TxIsoLevel, begins bool, key string) (met bool) {
	t.Helper()
	ctx := t.Context()
	s := newAwaitScene(t, db, key)
	gate, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = gate.Rollback(context.WithoutCancel(ctx)) }()
	old, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level}) // its snapshot is from before
	require.NoError(t, err)
	defer func() { _ = old.Rollback(context.WithoutCancel(ctx)) }()
	job := make(chan error, 1)
	if begins { // it has written the event's fence, and waits with its own row
		_, err = gate.Exec(ctx, `insert into onceq.job_awaits (job_id, identity, created_at, until, state, scope, key) values ($1, 0, now(), now(), 0, 'paid', $2)`, s.id, s.key)
		require.NoError(t, err)
	} else { // it has its own row locked, and waits for the job's
		_, _, err := s.await(ctx)
		require.Error(t, err)
		_, err = gate.Exec(ctx, `select from onceq.jobs where id = $1 for update`, s.id)
		require.NoError(t, err)
	}
	_, err = old.Exec(ctx, `select from onceq.job_fences`)
	require.NoError(t, err)
	go func() {
		_, _, err := s.await(ctx)
		if err != nil && !onceq.IsFailure(err) {
			err = s.lease.Fail(ctx, err)
		}
		job <- err
	}()
	blocked(t, db, job)
	emit := make(chan error, 1)
	go func() {
		_, err := db.Queue.Emit(ctx, old, "paid", s.key, "yes")
		if err == nil {
			err = old.Commit(ctx)
		} else {
			_ = old.Rollback(ctx)
		}
		emit <- err
	}()
	for !met && len(emit)+len(job) == 0 {
		met = conformance.Blocked(t, db) > 1
	}
	require.NoError(t, gate.Rollback(ctx))
	require.NoError(t, <-job)
	var waits bool // otherwise it gave up
	require.NoError(t, db.Pool.QueryRow(ctx, `select exists (select from onceq.job_awaits where job_id = $1)`, s.id).Scan(&waits))
	if err := <-emit; level == pgx.ReadCommitted || err == nil {
		require.NoError(t, err)
	} else { // Postgres wants it run again, because it cannot have seen the job
		require.True(t, onceq.IsRetryable(err), err)
		_, err = db.Queue.Emit(ctx, db.Pool, "paid", s.key, "yes")
		require.NoError(t, err)
	}
	require.NoError(t, db.Check())
	text, ok := s.hears(t)
	require.True(t, ok)
	require.Equal(t, "yes", text)
	require.NoError(t, s.lease.Complete(ctx, nil))
	return met && waits
}

// Two Emits of one event at once: the second waits for the first, and is second only if the first commits.
func TestEmit_TheFirstCounts(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx, q := t.Context(), db.Queue
	for _, commit := range []bool{true, false} {
		key := fmt.Sprint(commit)
		_, emitted, err := q.Event(ctx, db.Pool, "paid", key)
		require.NoError(t, err)
		require.False(t, emitted)
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		first, err := q.Emit(ctx, tx, "paid", key, "a")
		require.NoError(t, err)
		require.True(t, first)
		var second bool
		done := make(chan error, 1)
		go func() {
			var err error
			second, err = q.Emit(ctx, db.Pool, "paid", key, "b")
			done <- err
		}()
		require.True(t, blocked(t, db, done))
		want := `"a"`
		if commit {
			require.NoError(t, tx.Commit(ctx))
		} else {
			require.NoError(t, tx.Rollback(ctx))
			want = `"b"`
		}
		require.NoError(t, <-done)
		require.Equal(t, !commit, second)
		payload, emitted, err := q.Event(ctx, db.Pool, "paid", key)
		require.NoError(t, err)
		require.True(t, emitted)
		require.JSONEq(t, want, string(payload))
	}
	// After the window it is another event, and the Reaper removes the old one.
	db.Advance(onceq.EventWindow)
	_, emitted, err := q.Event(ctx, db.Pool, "paid", "true")
	require.NoError(t, err)
	require.False(t, emitted)
	first, err := q.Emit(ctx, db.Pool, "paid", "true", nil)
	require.NoError(t, err)
	require.True(t, first)
	payload, _, err := q.Event(ctx, db.Pool, "paid", "true")
	require.NoError(t, err)
	require.JSONEq(t, `null`, string(payload))
	db.Advance(2 * time.Hour)
	r, err := onceq.NewReaper(q, onceq.ReaperConfig{})
	require.NoError(t, err)
	sum, err := r.RunOnce(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, sum.Fences)
	_, emitted, err = q.Event(ctx, db.Pool, "paid", "true")
	require.NoError(t, err)
	require.True(t, emitted)
	var bad *onceq.InvalidError
	_, err = q.Emit(ctx, db.Pool, "", "k", nil)
	require.ErrorAs(t, err, &bad)
	_, err = q.Emit(ctx, db.Pool, "s", "k", make(chan int))
	require.ErrorAs(t, err, &bad)
	_, err = q.Emit(ctx, nil, "s", "k", json.RawMessage(`1`))
	require.ErrorAs(t, err, &bad)
	require.NoError(t, db.Check())
}
