package tests

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqsql"
	"github.com/onceq/onceq/queuetest"
)

const wantedAgain = "wants a handler's own transaction run again" // in the log

// A beat that comes while a handler's own transaction is open changes the job's row after that transaction took its
// snapshot. Postgres then refused the completion, in each run, until the job was dead.
func TestComplete_InATransactionLongerThanABeat(t *testing.T) {
	t.Parallel()
	type handler func(ctx context.Context, db *queuetest.DB, level pgx.TxIsoLevel, beat func() error, l *onceq.Lease) error
	effect := `insert into effects values ($1)`
	inTx := func(body func(ctx context.Context, tx pgx.Tx, beat func() error, l *onceq.Lease) error) handler {
		return func(ctx context.Context, db *queuetest.DB, level pgx.TxIsoLevel, beat func() error, l *onceq.Lease) error {
			return pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return body(ctx, tx, beat, l) })
		}
	}
	complete := inTx(func(ctx context.Context, tx pgx.Tx, beat func() error, l *onceq.Lease) error {
		if _, err := tx.Exec(ctx, effect, l.ID); err != nil {
			return err
		}
		if err := beat(); err != nil {
			return err
		}
		return l.Complete(ctx, tx)
	})
	for name, c := range map[string]struct {
		handler handler
		refused bool
	}{
		"complete": {complete, true},
		"complete, in a loop of its own": {func(ctx context.Context, db *queuetest.DB, level pgx.TxIsoLevel, beat func() error, l *onceq.Lease) error {
			for {
				if err := complete(ctx, db, level, beat, l); !onceq.IsRetryable(err) {
					return err
				}
			}
		}, true},
		"complete in a batch": {inTx(func(ctx context.Context, tx pgx.Tx, beat func() error, l *onceq.Lease) error {
			b := &pgx.Batch{}
			b.Queue(effect, l.ID)
			if _, err := tx.Exec(ctx, `select 1`); err != nil { // takes the snapshot
				return err
			}
			if err := beat(); err != nil {
				return err
			}
			if err := l.CompleteInBatch(b); err != nil {
				return err
			}
			return tx.SendBatch(ctx, b).Close()
		}), true},
		"complete with database/sql": {func(ctx context.Context, db *queuetest.DB, level pgx.TxIsoLevel, beat func() error, l *onceq.Lease) error {
			pool := stdlib.OpenDBFromPool(db.Pool)
			defer pool.Close()
			isolation := sql.LevelRepeatableRead
			if level == pgx.Serializable {
				isolation = sql.LevelSerializable
			}
			tx, err := pool.BeginTx(ctx, &sql.TxOptions{Isolation: isolation})
			if err != nil {
				return err
			}
			defer func() { _ = tx.Rollback() }()
			if _, err := tx.ExecContext(ctx, effect, l.ID); err != nil {
				return err
			}
			if err := beat(); err != nil {
				return err
			}
			if err := l.Complete(ctx, onceqsql.Tx(tx)); err != nil {
				return err
			}
			return tx.Commit()
		}, true},
		"lock, and complete": {inTx(func(ctx context.Context, tx pgx.Tx, beat func() error, l *onceq.Lease) error {
			if err := l.Lock(ctx, tx); err != nil {
				return err
			}
			if err := beat(); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, effect, l.ID); err != nil {
				return err
			}
			return l.Complete(ctx, tx)
		}), false},
	} {
		for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
			t.Run(name+", "+string(level), func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 3)
				db := queuetest.New(t)
				sqlRun(t, db, `create table effects (job bigint)`)
				id := add(t, db, onceq.Job{Key: "k", MaxAttempts: 1})
				// The beats of another job of the same worker show when a beat was sent.
				other := add(t, db, onceq.Job{Kind: "other"})
				done := make(chan struct{})
				waiting := onceq.Kind[int]{Name: "other", Timeout: onceq.NoTimeout}
				working := onceq.Kind[int]{Name: "k", Timeout: onceq.NoTimeout}
				w := start(t, db, onceq.WorkerConfig{Lease: steady},
					waiting.Handle(func(ctx context.Context, _ *onceq.Lease, _ int) error {
						<-done
						return nil
					}),
					working.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
						return c.handler(ctx, db, level, func() error { return beats(ctx, db, other, 2) }, l)
					}))
				until(t, db, `not exists (select from onceq.jobs where kind = 'k')`)
				close(done)
				until(t, db, noJobs)
				require.NoError(t, w.stop())
				require.Equal(t, []int64{id}, ids(t, db, `select job from effects`))
				require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.job_history`))
				require.Zero(t, w.count(onceq.EventFailed)+w.count(onceq.EventDead))
				if c.refused {
					require.Contains(t, w.logged(), wantedAgain)
				} else {
					require.NotContains(t, w.logged(), wantedAgain)
				}
			})
		}
	}
}

// beats waits until a job's lease was extended n times.
func beats(ctx context.Context, db *queuetest.DB, job int64, n int) error {
	var before *time.Time
	for {
		var now *time.Time
		if err := db.Pool.QueryRow(ctx, `select leased_until from onceq.jobs where id = $1`, job).Scan(&now); err != nil {
			return err
		}
		if now != nil && before != nil && now.After(*before) {
			n--
		}
		if n == 0 {
			return nil
		}
		before = now
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func ids(t *testing.T, db *queuetest.DB, query string) []int64 {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), query)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	return found
}

// If Postgres refuses the handler's own transaction before the job is completed, the job runs again without spending an
// attempt: as often as with HandleTx, and no more.
func TestHandle_ConflictsOfItsCompletion(t *testing.T) {
	t.Parallel()
	refused := &pgconn.PgError{Code: "40001"}
	begin := func(ctx context.Context, db *queuetest.DB, fn func(tx pgx.Tx) error) error {
		return pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, fn)
	}
	// What a beat after the snapshot does.
	conflict := func(ctx context.Context, db *queuetest.DB, l *onceq.Lease) error {
		return begin(ctx, db, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `select from onceq.meta`)
			if err == nil {
				_, err = db.Pool.Exec(ctx, `update onceq.jobs set leased_until = leased_until where id = $1`, l.ID)
			}
			return errors.Join(err, l.Complete(ctx, tx))
		})
	}
	for name, c := range map[string]struct {
		handler func(ctx context.Context, db *queuetest.DB, l *onceq.Lease, run int) error
		state   onceq.State
		runs    int
	}{
		"refused each time": {func(ctx context.Context, db *queuetest.DB, l *onceq.Lease, _ int) error {
			return conflict(ctx, db, l)
		}, onceq.StateDead, 30},
		"refused at the commit": {func(ctx context.Context, db *queuetest.DB, l *onceq.Lease, run int) error {
			return begin(ctx, db, func(tx pgx.Tx) error {
				err := l.Complete(ctx, tx)
				if run == 1 {
					err = errors.Join(err, refused)
				}
				return err
			})
		}, onceq.StateCompleted, 2},
		"refused, and decided": {func(ctx context.Context, db *queuetest.DB, l *onceq.Lease, _ int) error {
			return onceq.Fatal(conflict(ctx, db, l))
		}, onceq.StateDead, 1},
		"refused, and another error": {func(ctx context.Context, db *queuetest.DB, l *onceq.Lease, _ int) error {
			_ = conflict(ctx, db, l)
			return errors.New("another")
		}, onceq.StateDead, 1},
		"elsewhere": {func(context.Context, *queuetest.DB, *onceq.Lease, int) error { return refused }, onceq.StateDead, 1},
		"elsewhere, after the completion": {func(ctx context.Context, db *queuetest.DB, l *onceq.Lease, _ int) error {
			return errors.Join(begin(ctx, db, func(tx pgx.Tx) error { return l.Complete(ctx, tx) }), refused)
		}, onceq.StateCompleted, 1},
		"a result of the run that was rolled back": {func(ctx context.Context, db *queuetest.DB, l *onceq.Lease, run int) error {
			if run > 1 {
				return nil
			}
			return errors.Join(l.SetResult("first"), conflict(ctx, db, l))
		}, onceq.StateCompleted, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			add(t, db, onceq.Job{Key: "k", MaxAttempts: 1})
			runs := 0
			w := start(t, db, onceq.WorkerConfig{Lease: 10 * time.Minute}, handle(func(ctx context.Context, l *onceq.Lease) error {
				runs++
				return c.handler(ctx, db, l, runs)
			}))
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Equal(t, c.runs, runs)
			state := onceq.StateCompleted
			if sqlOne[bool](t, db, `select exists (select from onceq.job_history where state = $1)`, onceq.StateDead) {
				state = onceq.StateDead
			}
			require.Equal(t, c.state, state)
			require.False(t, sqlOne[bool](t, db, `select exists (select from onceq.job_fences where result is not null)`))
		})
	}
}

func TestLock(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	sqlRun(t, db, `create table effects (n int)`)
	id := add(t, db, onceq.Job{})
	stale := takeOne(t, db)
	db.ExpireLease(id)
	l := takeOne(t, db)

	var invalid *onceq.InvalidError
	require.ErrorAs(t, l.Lock(ctx, nil), &invalid)
	require.ErrorAs(t, l.Lock(ctx, db.Pool), &invalid, "the lock would end with the statement")

	err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into effects values (1)`)
		require.ErrorIs(t, stale.Lock(ctx, tx), onceq.ErrLeaseLost)
		return err
	})
	require.ErrorIs(t, err, pgx.ErrTxCommitRollback)
	require.Zero(t, sqlOne[int](t, db, `select count(*) from effects`))

	require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		require.NoError(t, l.Lock(ctx, tx))
		require.NoError(t, l.Extend(ctx, time.Hour), "locked, and alive")
		leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		require.Empty(t, leases)
		return l.Complete(ctx, tx)
	}))
	require.Equal(t, 0, sqlOne[int](t, db, `select count(*) from onceq.jobs`))

	add(t, db, onceq.Job{})
	var inside error
	db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
		inside = l.Lock(ctx, tx)
		return nil
	}))
	require.ErrorContains(t, inside, "onceq: ")
}

// A client that freezes in its transaction keeps the job for no longer than with HandleTx.
func TestLock_LimitsIdling(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{})
	kind := onceq.Kind[int]{Name: "k", Timeout: 90 * time.Second}
	var idle string
	ran := db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			if err := l.Lock(ctx, tx); err != nil {
				return err
			}
			return tx.QueryRow(ctx, `show idle_in_transaction_session_timeout`).Scan(&idle)
		})
	}))
	require.Equal(t, onceq.StateCompleted, ran.State, "%v", ran.Err)
	require.Equal(t, "90s", idle)
}

// A handler that asks for a longer lease keeps it. A beat once made it as short as the worker's again.
func TestExtend_IsNotShortenedByABeat(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id, other := add(t, db, onceq.Job{}), add(t, db, onceq.Job{Kind: "other"})
	done := make(chan struct{})
	waiting := onceq.Kind[int]{Name: "other"}
	errs := make(chan error, 5)
	w := start(t, db, onceq.WorkerConfig{Lease: steady},
		waiting.Handle(func(context.Context, *onceq.Lease, int) error { <-done; return nil }),
		handle(func(ctx context.Context, l *onceq.Lease) error {
			err := l.Extend(ctx, time.Hour)
			errs <- errors.Join(err, beats(ctx, db, other, 2))
			<-done
			return nil
		}))
	require.NoError(t, receive(t, errs))
	require.True(t, sqlOne[bool](t, db, `select leased_until > now() + interval '50 minutes' from onceq.jobs where id = $1`, id))
	close(done)
	until(t, db, noJobs)
	require.NoError(t, w.stop())
}

// While a handler rests between two conflicts its lease is extended, and nobody takes it for one that does not return.
func TestConflict_TheRestLosesNoLease(t *testing.T) {
	t.Parallel()
	for _, inTx := range []bool{false, true} {
		t.Run(fmt.Sprint("the worker's transaction ", inTx), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			id := add(t, db, onceq.Job{MaxAttempts: 1})
			var runs atomic.Int32
			work := func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
				time.Sleep(time.Second)
				if runs.Add(1) > 12 {
					return nil
				}
				_, err := tx.Exec(ctx, `do $$ begin raise 'conflict' using errcode = '40001'; end $$`)
				return err
			}
			h := handleTx(work)
			if !inTx {
				h = handle(func(ctx context.Context, l *onceq.Lease) error {
					return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
						return errors.Join(l.Complete(ctx, tx), work(ctx, tx, l))
					})
				})
			}
			w := start(t, db, onceq.WorkerConfig{Lease: steady}, h)
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Zero(t, w.count(onceq.EventLeaseLost)+w.count(onceq.EventFailed)+w.count(onceq.EventStale))
			require.Equal(t, 1, w.count(onceq.EventClaimed))
			require.Equal(t, int32(13), runs.Load())
			require.NotContains(t, w.logged(), "does not return")
			_, err := db.Queue.Get(t.Context(), db.Pool, id)
			require.ErrorIs(t, err, onceq.ErrNotFound)
		})
	}
}

// The end of Run begins no further run of a handler that conflicts: its job is given back.
func TestConflict_EndsWithTheWorker(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{MaxAttempts: 1})
	ran := make(chan struct{}, 100)
	w := start(t, db, onceq.WorkerConfig{ShutdownTimeout: time.Hour}, handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
		ran <- struct{}{}
		time.Sleep(100 * time.Millisecond)
		_, err := tx.Exec(ctx, `do $$ begin raise 'conflict' using errcode = '40001'; end $$`)
		return err
	}))
	receive(t, ran)
	require.NoError(t, w.stop())
	j := must[onceq.JobInfo](t)(db.Queue.Get(t.Context(), db.Pool, id))
	require.Equal(t, onceq.StateWaiting, j.State)
	require.Zero(t, j.Attempts)
	require.Zero(t, w.count(onceq.EventFailed)+w.count(onceq.EventDead))
}

// A whole batch runs ten times, and then each of its jobs by itself thirty times.
func TestConflict_OfABatch(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	addMany(t, db, 2, onceq.Job{MaxAttempts: 1})
	var runs [3]atomic.Int32
	kind := onceq.Kind[int]{Name: "k"}
	w := start(t, db, onceq.WorkerConfig{}, kind.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, items []onceq.Item[int]) error {
		runs[len(items)].Add(1)
		_, err := tx.Exec(ctx, `do $$ begin raise 'conflict' using errcode = '40001'; end $$`)
		return err
	}))
	until(t, db, noJobs)
	require.NoError(t, w.stop())
	require.Equal(t, int32(10), runs[2].Load())
	require.Equal(t, int32(60), runs[1].Load())
	require.Equal(t, 2, w.count(onceq.EventDead))
}
