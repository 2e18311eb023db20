package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

// queryModes gives pgx's, and in make test those that differ most.
func queryModes() []pgx.QueryExecMode {
	if testing.Short() {
		return []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol}
	}
	return []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	}
}

// inMode gives a database whose pool uses one query mode, with a table for effects.
func inMode(t *testing.T, mode pgx.QueryExecMode, change ...func(*pgxpool.Config)) *queuetest.DB {
	speak := func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }
	return withEffects(t, append(change, speak)...)
}

func withEffects(t *testing.T, change ...func(*pgxpool.Config)) *queuetest.DB {
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		for _, f := range change {
			f(c)
		}
	}))
	sqlRun(t, db, `create table effects (n int check (n >= 0))`)
	return db
}

// firstUses are ways to use a handler's transaction first. Each of them writes one row.
var firstUses = map[string]func(ctx context.Context, tx pgx.Tx) error{
	"Exec": func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `insert into effects values ($1)`, 1)
		if err == nil && tag.String() != "INSERT 0 1" {
			err = fmt.Errorf("tag %q", tag)
		}
		return err
	},
	"Exec of several statements": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into effects values (1); delete from effects; insert into effects values (1)`)
		return err
	},
	"Exec in another mode": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into effects values ($1)`, pgx.QueryExecModeSimpleProtocol, 1)
		return err
	},
	"Exec with named arguments": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into effects values (@n)`, pgx.NamedArgs{"n": 1})
		return err
	},
	"Query": func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `insert into effects select n from generate_series($1::int, 1) n returning n`, 1)
		if err != nil {
			return err
		}
		ns, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err == nil && (len(ns) != 1 || ns[0] != 1) {
			err = fmt.Errorf("rows %v", ns)
		}
		return err
	},
	"Query, not read to its end": func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `with i as (insert into effects values ($1)) select generate_series(1, 1000)`, 1)
		if err != nil {
			return err
		}
		if !rows.Next() {
			return errors.Join(errors.New("no row"), rows.Err())
		}
		rows.Close()
		_, err = tx.Exec(ctx, `select $1::int`, 1)
		return errors.Join(rows.Err(), err)
	},
	"Query, scanned into the wrong type": func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `insert into effects values ($1) returning 'x'`, 1)
		if err != nil {
			return err
		}
		var n int
		if !rows.Next() {
			return errors.Join(errors.New("no row"), rows.Err())
		}
		if err := rows.Scan(&n); err == nil {
			return errors.New("x is no number")
		}
		_, err = tx.Exec(ctx, `select $1::int`, 1)
		return err
	},
	"QueryRow": func(ctx context.Context, tx pgx.Tx) error {
		var n int
		err := tx.QueryRow(ctx, `insert into effects values ($1) returning n`, 1).Scan(&n)
		if err == nil && n != 1 {
			err = fmt.Errorf("row %d", n)
		}
		return err
	},
	"QueryRow without a row": func(ctx context.Context, tx pgx.Tx) error {
		var n int
		err := tx.QueryRow(ctx, `with i as (insert into effects values ($1)) select 1 where false`, 1).Scan(&n)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return errors.Join(errors.New("wants ErrNoRows"), err)
	},
	"SendBatch": func(ctx context.Context, tx pgx.Tx) error {
		var n int
		b := &pgx.Batch{}
		b.Queue(`insert into effects values ($1)`, 1)
		b.Queue(`select count(*) from effects`).QueryRow(func(row pgx.Row) error { return row.Scan(&n) })
		if err := tx.SendBatch(ctx, b).Close(); err != nil || n != 1 {
			return fmt.Errorf("%d rows, %w", n, err)
		}
		return nil
	},
	"SendBatch, read one by one": func(ctx context.Context, tx pgx.Tx) error {
		b := &pgx.Batch{}
		b.Queue(`insert into effects values ($1)`, 1)
		b.Queue(`select $1::int`, 7)
		r := tx.SendBatch(ctx, b)
		defer r.Close()
		if _, err := r.Exec(); err != nil {
			return err
		}
		var n int
		if err := r.QueryRow().Scan(&n); err != nil || n != 7 {
			return fmt.Errorf("%d, %w", n, err)
		}
		return r.Close()
	},
	"CopyFrom": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"n"}, pgx.CopyFromRows([][]any{{int32(1)}}))
		return err
	},
	"Begin": func(ctx context.Context, tx pgx.Tx) error {
		if err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `insert into effects values ($1)`, 1)
			return err
		}); err != nil {
			return err
		}
		undone := errors.New("undone")
		if err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `insert into effects values ($1)`, 2)
			return errors.Join(undone, err)
		}); !errors.Is(err, undone) {
			return err
		}
		return nil
	},
	"Prepare": func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Prepare(ctx, "p", `insert into effects values ($1)`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "p", 1)
		return err
	},
	"Conn": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Conn().Exec(ctx, `insert into effects values ($1)`, 1)
		return err
	},
	"LargeObjects": func(ctx context.Context, tx pgx.Tx) error {
		objects := tx.LargeObjects()
		id, err := objects.Create(ctx, 0)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `insert into effects select 1 from pg_largeobject_metadata where oid = $1`, id)
		return err
	},
}

// Whatever a handler does first, its writes and the completion are one transaction, in which the job is its own.
func TestHandleTx_OpensWithWhateverComesFirst(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		for _, keep := range []time.Duration{0, time.Hour} {
			t.Run(fmt.Sprint(mode, keep), func(t *testing.T) {
				t.Parallel()
				db := inMode(t, mode)
				for name, use := range firstUses {
					if name == "LargeObjects" && mode == pgx.QueryExecModeExec {
						continue // pgx has no type for their ids in this mode
					}
					kind := onceq.Kind[int]{Name: "k", Keep: keep}
					id := add(t, db, onceq.Job{Key: name})
					var inside bool
					ran := db.RunOne(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
						if err := use(ctx, tx); err != nil {
							return err
						}
						if n := sqlOne[int](t, db, `select count(*)::int from effects`); n != 0 {
							return fmt.Errorf("%d rows are there before the commit", n)
						}
						var timeout string
						if err := tx.QueryRow(ctx, `select current_setting('idle_in_transaction_session_timeout')`).Scan(&timeout); err != nil || timeout != "30s" && timeout != "1min" {
							return fmt.Errorf("idling may take %q, %w", timeout, err)
						}
						// Nobody else can take the job, and everybody else can see it.
						inside = sqlOne[bool](t, db, `select not exists (select from onceq.jobs where id = $1 for update skip locked)
							and exists (select from onceq.jobs where id = $1)`, id)
						return l.SetResult(name)
					}))
					require.NoError(t, ran.Err, name)
					require.Equal(t, onceq.StateCompleted, ran.State, name)
					require.True(t, inside, name)
					require.Equal(t, 1, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), name)
					require.Equal(t, `"`+name+`"`, sqlOne[string](t, db, `select result::text from onceq.job_fences where key = $1 and state = 3`, name))
					require.Equal(t, keep > 0, sqlOne[bool](t, db, `select exists (select from onceq.job_history where id = $1)`, id))
				}
			})
		}
	}
}

// The lease is lost before the handler first uses its transaction. None of its statements runs, whatever the handler does
// with the error.
func TestHandleTx_LostBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			sqlRun(t, db, `create sequence tried`) // a sequence keeps what a rollback undoes
			sqlRun(t, db, `create function note() returns trigger language plpgsql as 'begin perform nextval(''tried''); return new; end'`)
			sqlRun(t, db, `create trigger note before insert on effects for each statement execute function note()`)
			deleted, kept := onceq.Kind[string]{Name: "deleted"}, onceq.Kind[string]{Name: "kept", Keep: time.Hour} // the row of one is deleted, that of the other locked
			errs := make(chan error, 2)
			handle := func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, name string) error {
				if l.Lost > 0 {
					return nil
				}
				sqlRun(t, db, `update onceq.jobs set lost = lost + 1, claims = claims + 1, leased_until = null, holder = null, run_at = statement_timestamp() where id = $1`, l.ID)
				for range 2 {
					errs <- firstUses[name](ctx, tx)
				}
				return nil
			}
			w := start(t, db, onceq.WorkerConfig{}, deleted.HandleTx(handle), kept.HandleTx(handle))
			names := slices.DeleteFunc(slices.Sorted(maps.Keys(firstUses)), func(name string) bool {
				return name == "LargeObjects" // pgx's own have no error to return, and panic
			})
			for i, name := range names {
				job := deleted.Job(name)
				if strings.Contains(name, "Exec") {
					job = kept.Job(name)
				}
				add(t, db, job)
				for range 2 {
					err := receive(t, errs)
					require.Error(t, err, name)
					if name != "Conn" {
						require.ErrorIs(t, err, onceq.ErrLeaseLost, name)
					}
				}
				eventually(t, name, func() bool { return w.count(onceq.EventCompleted) == i+1 && w.count(onceq.EventLeaseLost) == i+1 })
				require.Zero(t, w.count(onceq.EventFailed)+w.count(onceq.EventStale), name)
				require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`), name)
				require.False(t, sqlOne[bool](t, db, `select is_called from tried`), name)
			}
			require.NoError(t, w.stop())
		})
	}
}

// One lease of a batch is lost. None of the handler's statements runs, and the other jobs run again one by one.
func TestHandleBatch_LostBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			ids := addMany(t, db, 3, onceq.Job{})
			var batches, lost atomic.Int32
			ran := db.Drain(work.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error {
				if batches.Add(1) == 1 {
					sqlRun(t, db, `update onceq.jobs set claims = claims + 1, leased_until = null, holder = null, run_at = statement_timestamp() where id = $1`, ids[1])
				}
				_, err := tx.Exec(ctx, `insert into effects values ($1)`, len(jobs))
				if errors.Is(err, onceq.ErrLeaseLost) {
					lost.Add(1)
				}
				return nil
			}))
			completed := 0
			for _, r := range ran {
				if r.State == onceq.StateCompleted {
					completed++
				}
			}
			require.Equal(t, 3, completed)
			require.EqualValues(t, 2, lost.Load(), "the batch, and the one job alone")
			require.Equal(t, 3, sqlOne[int](t, db, `select sum(n)::int from effects`))
		})
	}
}

func TestHandleTx_HandlerThatNeverUsesItsTransaction(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			none := handleTx(func(_ context.Context, _ pgx.Tx, l *onceq.Lease) error { return l.SetResult(7) })
			add(t, db, onceq.Job{Key: "k"})
			require.Equal(t, onceq.StateCompleted, db.RunOne(none).State)
			require.Equal(t, "7", sqlOne[string](t, db, `select result::text from onceq.job_fences`))

			again := add(t, db, onceq.Job{})
			require.Equal(t, onceq.StateDelayed, db.RunOne(handleTx(func(context.Context, pgx.Tx, *onceq.Lease) error { return onceq.Reschedule(time.Hour) })).State)
			sqlRun(t, db, `delete from onceq.jobs where id = $1`, again)

			id := add(t, db, onceq.Job{})
			w := start(t, db, onceq.WorkerConfig{}, handleTx(func(_ context.Context, _ pgx.Tx, l *onceq.Lease) error {
				if l.Lost == 0 {
					sqlRun(t, db, `update onceq.jobs set lost = lost + 1, claims = claims + 1, leased_until = null, holder = null, run_at = statement_timestamp() where id = $1`, id)
				}
				return nil
			}))
			until(t, db, noJobs)
			require.NoError(t, w.stop())
			require.Equal(t, 1, w.count(onceq.EventStale))
			require.Equal(t, 1, w.count(onceq.EventCompleted))
		})
	}
}

// A first statement that fails returns its own error, as it would anywhere else, and the transaction is in the state that
// it would be in.
func TestHandleTx_FirstStatementFails(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			for name, c := range map[string]struct {
				code string // Postgres's code; "" if pgx refuses the statement
				use  func(ctx context.Context, tx pgx.Tx) error
			}{
				"syntax": {"42601", func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `insert onto effects values ($1)`, 1)
					return err
				}},
				"syntax, QueryRow": {"42601", func(ctx context.Context, tx pgx.Tx) error {
					var n int
					return tx.QueryRow(ctx, `select $1::int onto`+` from`, 1).Scan(&n)
				}},
				"constraint": {"23514", func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `insert into effects values ($1)`, -1)
					return err
				}},
				"constraint, Query": {"23514", func(ctx context.Context, tx pgx.Tx) error {
					rows, err := tx.Query(ctx, `insert into effects values ($1) returning n`, -1)
					if err != nil {
						return err
					}
					for rows.Next() {
					}
					return rows.Err()
				}},
				"second row, QueryRow": {"22012", func(ctx context.Context, tx pgx.Tx) error {
					rows, err := tx.Query(ctx, `select 1 / (2 - n) from generate_series($1::int, 5) n`, 1)
					if err != nil {
						return err
					}
					_, err = pgx.CollectRows(rows, pgx.RowTo[int])
					return err
				}},
				"in a batch": {"23514", func(ctx context.Context, tx pgx.Tx) error {
					b := &pgx.Batch{}
					b.Queue(`insert into effects values ($1)`, 1)
					b.Queue(`insert into effects values ($1)`, -1)
					return tx.SendBatch(ctx, b).Close()
				}},
				"unknown table in a batch": {"42P01", func(ctx context.Context, tx pgx.Tx) error {
					b := &pgx.Batch{}
					b.Queue(`insert into effects values ($1)`, 1)
					b.Queue(`insert into nowhere values ($1)`, 1)
					return tx.SendBatch(ctx, b).Close()
				}},
				"an argument that does not encode": {"", func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `insert into effects values ($1)`, func() {})
					return err
				}},
			} {
				add(t, db, onceq.Job{})
				var first, second error
				ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
					first = c.use(ctx, tx)
					_, second = tx.Exec(ctx, `insert into effects values ($1)`, 5)
					return nil
				}))
				require.Error(t, first, name)
				require.NotContains(t, first.Error(), "opening", name)
				if c.code == "" {
					require.NoError(t, second, name)
					require.Equal(t, onceq.StateCompleted, ran.State, name)
					require.Equal(t, 5, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), name)
					continue
				}
				for want, err := range map[string]error{c.code: first, "25P02": second} {
					var pgErr *pgconn.PgError
					require.ErrorAs(t, err, &pgErr, name)
					require.Equal(t, want, pgErr.Code, name)
				}
				require.Equal(t, onceq.StateRetrying, ran.State, name)
				require.ErrorContains(t, ran.Err, "the handler returned no error", name)
				require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`), name)
				sqlRun(t, db, `delete from onceq.jobs`)
			}
		})
	}
}

// A context that ends before the first statement damages neither the transaction nor the connection.
func TestHandleTx_ContextEndsBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			ended, cancel := context.WithCancel(context.Background())
			cancel()
			for name, use := range firstUses {
				if name == "Conn" || name == "LargeObjects" && mode == pgx.QueryExecModeExec {
					continue
				}
				add(t, db, onceq.Job{})
				ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
					if err := use(ended, tx); !errors.Is(err, context.Canceled) {
						return fmt.Errorf("wants a cancelled context: %w", err)
					}
					return use(ctx, tx)
				}))
				require.NoError(t, ran.Err, name)
				require.Equal(t, onceq.StateCompleted, ran.State, name)
				require.Equal(t, 1, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), name)
			}
		})
	}
}

// A connection that is lost at this moment is lost before the handler did anything, so another one takes its place. If
// there is none, the job runs again without spending an attempt, whatever the handler does with the error. Nothing is
// written outside a transaction.
func TestHandleTx_ConnectionLostBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			name := "handlers_" + strings.ReplaceAll(mode.String(), " ", "_")
			var refuse atomic.Bool
			db := inMode(t, mode, func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["application_name"] = name
				c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
					if refuse.Load() {
						return errors.New("no connection today")
					}
					return nil
				}
			})
			for use, fn := range firstUses {
				if use == "LargeObjects" {
					continue
				}
				for _, refused := range []bool{false, true} {
					id := add(t, db, onceq.Job{MaxAttempts: 1})
					runs := 0
					ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
						runs++
						other, err := pgx.Connect(ctx, db.URL)
						if err != nil {
							return err
						}
						defer other.Close(ctx)
						refuse.Store(refused)
						defer refuse.Store(false)
						if _, err := other.Exec(ctx, `select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = $1 and datname = current_database()`, name); err != nil {
							return err
						}
						if err := fn(ctx, tx); (err != nil) != refused {
							t.Errorf("%s: %v", use, err)
						}
						return nil
					}))
					require.Equal(t, 1, runs, use)
					if !refused {
						require.Equal(t, onceq.StateCompleted, ran.State, "%s: %v", use, ran.Err)
						require.Equal(t, 1, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), use)
						continue
					}
					require.Equal(t, onceq.StateDelayed, ran.State, "%s: %v", use, ran.Err)
					require.Zero(t, sqlOne[int](t, db, `select attempts from onceq.jobs where id = $1`, id), use)
					require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`), use)
					sqlRun(t, db, `delete from onceq.jobs`)
				}
			}
		})
	}
}

// A Reschedule commits the job as it was, apart from what Reschedule changes.
func TestHandleTx_RescheduleKeepsTheRow(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode, func(c *pgxpool.Config) {
				if mode < pgx.QueryExecModeExec { // these read times as text, in a style that pgx must know
					c.ConnConfig.RuntimeParams["datestyle"] = "German, MDY"
				}
			})
			for name, job := range map[string]onceq.Job{
				"json":  {Key: `k'\"ä`, Scope: "s,()", Payload: json.RawMessage(`{"a": "x'\\\"", "n": 1.50}`), Metadata: map[string]string{"a": `"\'`}},
				"null":  {Payload: json.RawMessage(`null`)},
				"bytes": {Payload: []byte{0, 1, 255, '\\'}, Priority: onceq.PriorityHigh},
			} {
				id := add(t, db, job)
				const row = `select (to_jsonb(j) - '{run_at,leased_until,holder,claims,identity}'::text[] || jsonb_build_object('null', payload is null))::text from onceq.jobs j`
				sqlRun(t, db, `update onceq.jobs set errors = '[{"error": "earlier"}]', created_at = created_at - interval '1000 days 1.000001 seconds'`)
				before := sqlOne[string](t, db, row)
				kind := onceq.Kind[json.RawMessage]{Name: "k"}
				handler := kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ json.RawMessage) error {
					l.Payload, l.Metadata = nil, nil
					if _, err := tx.Exec(ctx, `insert into effects values ($1)`, 1); err != nil {
						return err
					}
					return onceq.Reschedule(time.Hour)
				})
				if name == "bytes" {
					bytes := onceq.Kind[[]byte]{Name: "k"}
					handler = bytes.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p []byte) error {
						clear(p)
						if _, err := tx.Exec(ctx, `insert into effects values ($1)`, 1); err != nil {
							return err
						}
						return onceq.Reschedule(time.Hour)
					})
				}
				ran := db.RunOne(handler)
				require.Equal(t, onceq.StateDelayed, ran.State, "%s: %v", name, ran.Err)
				require.Equal(t, before, sqlOne[string](t, db, row), name)
				require.True(t, sqlOne[bool](t, db, `select claims = 1 and holder is null and leased_until is null and run_at > now() + interval '59 minutes' from onceq.jobs`), name)
				require.Equal(t, 1, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), name)
				sqlRun(t, db, `delete from onceq.jobs where id = $1`, id)
				sqlRun(t, db, `delete from onceq.job_fences`)
			}
		})
	}
}

type queryTracer struct {
	statements []string
	args       [][]any
}

func (q *queryTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	q.statements, q.args = append(q.statements, d.SQL), append(q.args, d.Args)
	return ctx
}

func (q *queryTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A tracer without support for batches is told of the first statement too.
func TestHandleTx_TracersHearOfTheFirstStatement(t *testing.T) {
	t.Parallel()
	tracer := &queryTracer{}
	db := withEffects(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer; c.MaxConns = 1 })
	add(t, db, onceq.Job{})
	var traced []string
	ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
		_, err := tx.Exec(ctx, `insert into effects values ($1)`, 1)
		traced = append(traced, tracer.statements...)
		return err
	}))
	require.Equal(t, onceq.StateCompleted, ran.State)
	require.Contains(t, traced, `insert into effects values ($1)`)
}

// A handler must not end the worker's transaction by a statement of its own. If it does, nothing is lost: what it committed
// is done, with its key, and what it rolled back runs again.
func TestHandleTx_EndsTheTransactionByAStatement(t *testing.T) {
	t.Parallel()
	for _, job := range []onceq.Kind[int]{{}, {Key: func(int) string { return "k" }}, {Keep: time.Hour}} {
		for name, c := range map[string]struct {
			statements []string
			effects    int
			done       bool
		}{
			"commit":                                 {[]string{`commit`}, 1, true},
			"commit, and another transaction":        {[]string{`commit`, `begin`, `insert into effects values (2)`}, 2, true},
			"commit and chain, in a script":          {[]string{`insert into effects values (2); commit and chain; insert into effects values (3)`}, 3, true},
			"rollback":                               {[]string{`rollback`}, 0, false},
			"rollback, and another transaction":      {[]string{`rollback`, `begin`, `insert into effects values (2)`}, 0, false},
			"rollback and chain, and then an effect": {[]string{`rollback and chain`, `insert into effects values (2)`}, 0, false},
		} {
			t.Run(fmt.Sprintf("%s, key %t, %s", name, job.Key != nil, job.Keep), func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 3)
				var log bytes.Buffer
				db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
				sqlRun(t, db, `create table effects (n int)`)
				kind := job
				kind.Name = "ends"
				r, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
				require.NoError(t, err)
				db.RunOne(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, n int) error {
					if _, err := tx.Exec(ctx, `insert into effects values ($1)`, n); err != nil {
						return err
					}
					for _, s := range c.statements {
						if _, err := tx.Exec(ctx, s); err != nil {
							return err
						}
					}
					return nil
				}))
				require.Equal(t, c.effects, sqlOne[int](t, db, `select count(*) from effects`))
				require.Equal(t, c.done, sqlOne[bool](t, db, `select count(*) = 0 from onceq.jobs`))
				require.Equal(t, c.done, strings.Contains(log.String(), "committed inside the handler"), log.String())
				if !c.done {
					require.Equal(t, 1, sqlOne[int](t, db, `select attempts from onceq.jobs where leased_until is null`))
					db.Advance(24 * time.Hour)
					require.Equal(t, onceq.StateCompleted, db.RunOne(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, n int) error {
						_, err := tx.Exec(ctx, `insert into effects values ($1)`, n)
						return err
					})).State)
				}
				if kind.Key != nil {
					again, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
					require.NoError(t, err)
					require.Equal(t, onceq.Result{ID: r.ID, Duplicate: true, State: onceq.StateCompleted}, again)
				}
				if kind.Keep > 0 {
					require.Equal(t, int(onceq.StateCompleted), sqlOne[int](t, db, `select state from onceq.job_history`))
				}
			})
		}
	}
}

// These are ways to commit the worker's transaction without the worker.
var behindCommits = map[string]func(ctx context.Context, tx pgx.Tx) error{
	"a transaction on its connection": func(ctx context.Context, tx pgx.Tx) error {
		return pgx.BeginFunc(ctx, tx.Conn(), func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `insert into effects values ($1)`, 2)
			return err
		})
	},
	"a script": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into effects values (2); commit`)
		return err
	},
	"a script that goes on": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into effects values (2); commit; begin; insert into effects values (3)`)
		return err
	},
	"a script that fails": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into effects values (2); commit; begin; select 1/0`)
		return err
	},
	"a batch": func(ctx context.Context, tx pgx.Tx) error {
		b := &pgx.Batch{}
		b.Queue(`insert into effects values (2)`)
		b.Queue(`commit`)
		return tx.SendBatch(ctx, b).Close()
	},
	"and a lost connection": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into effects values (2); commit`)
		return errors.Join(err, tx.Conn().Close(ctx))
	},
}

// A handler commits the worker's transaction and then fails. Its job does not vanish and does not run again: a person can
// find what happened, and its key says that it is dead.
func TestHandleTx_CommittedBehindTheWorkersBack(t *testing.T) {
	t.Parallel()
	for name, commit := range behindCommits {
		for _, keep := range []time.Duration{0, time.Hour} {
			t.Run(fmt.Sprint(name, keep), func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 3)
				db := withEffects(t)
				for i, after := range []error{errors.New("bad day"), onceq.Fatal(errors.New("bad day")), onceq.RetryAfter(0, errors.New("bad day")),
					&pgconn.PgError{Code: "40001", Message: "bad day"}, fmt.Errorf("bad day: %w", onceq.Snooze(1))} {
					kind := onceq.Kind[int]{Name: "k", Keep: keep, Key: func(int) string { return fmt.Sprint("key", i) }}
					r, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
					require.NoError(t, err)
					ran := db.Drain(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
						if _, err := tx.Exec(ctx, `insert into effects values ($1)`, n); err != nil {
							return err
						}
						_ = commit(ctx, tx)
						// If the process died here, the job would still be there, and would run again.
						if !sqlOne[bool](t, db, `select exists (select from onceq.jobs where id = $1)`, l.ID) {
							t.Error("the job is gone before its outcome is known")
						}
						return after
					}))
					require.Len(t, ran, 1)
					require.Equal(t, onceq.StateDead, ran[0].State)
					require.ErrorContains(t, ran[0].Err, "committed inside the handler")
					require.ErrorContains(t, ran[0].Err, "bad day")
					require.Equal(t, 2, sqlOne[int](t, db, `with gone as (delete from effects returning n) select count(*)::int from gone`))
					require.True(t, sqlOne[bool](t, db, `select state = 6 and errors::text like '%committed inside the handler%bad day%' from onceq.job_history where id = $1`, r.ID))
					again, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
					require.NoError(t, err)
					require.Equal(t, onceq.Result{ID: r.ID, Duplicate: true, State: onceq.StateDead}, again)
				}
			})
		}
	}
}

// After such a commit, no job of a batch runs again.
func TestHandleBatch_CommittedBehindTheWorkersBack(t *testing.T) {
	t.Parallel()
	db := withEffects(t)
	for name, c := range map[string]struct {
		err   error
		state onceq.State
	}{"and failed": {errors.New("bad day"), onceq.StateDead}, "and is done": {nil, onceq.StateCompleted}} {
		addMany(t, db, 3, onceq.Job{})
		ran := db.Drain(work.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error {
			if _, err := tx.Exec(ctx, `insert into effects values ($1)`, len(jobs)); err != nil {
				return err
			}
			return errors.Join(behindCommits["a script that goes on"](ctx, tx), c.err)
		}))
		require.Len(t, ran, 3, name)
		for _, r := range ran {
			require.Equal(t, c.state, r.State, name)
		}
	}
	require.Equal(t, 2+3, sqlOne[int](t, db, `select count(*) from effects`))
}

// A goroutine that goes on after the handler has returned gets pgx's own error from each use of the transaction.
func TestHandleTx_LateUsesAreClosed(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode, func(c *pgxpool.Config) { c.MaxConns = 2 })
			for name, use := range firstUses {
				if name == "Conn" || name == "LargeObjects" && mode == pgx.QueryExecModeExec {
					continue
				}
				for end, err := range map[string]error{"completed": nil, "failed": onceq.Fatal(errors.New("bad day"))} {
					var late, inner pgx.Tx
					var rows pgx.Rows
					var objects pgx.LargeObjects
					ran := 0
					add(t, db, onceq.Job{})
					db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
						ran++
						late, objects = tx, tx.LargeObjects()
						rows, _ = tx.Query(ctx, `select $1::int`, 1)
						rows.Close()
						var failed error
						inner, failed = tx.Begin(ctx)
						return errors.Join(failed, err)
					}))
					require.Equal(t, 1, ran)
					require.ErrorIs(t, use(t.Context(), late), pgx.ErrTxClosed, "%s, %s", name, end)
					require.ErrorIs(t, use(t.Context(), inner), pgx.ErrTxClosed, "%s, %s", name, end)
					require.ErrorIs(t, late.Commit(t.Context()), pgx.ErrTxClosed)
					require.ErrorIs(t, late.Rollback(t.Context()), pgx.ErrTxClosed)
					_, failed := objects.Create(t.Context(), 0)
					require.ErrorIs(t, failed, pgx.ErrTxClosed)
					require.False(t, rows.Next())
					_, failed = late.Conn().Exec(t.Context(), `select 1`)
					require.ErrorContains(t, failed, "conn closed")
				}
			}
			require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`))
		})
	}
}

// Rows and results that the handler left open are closed too.
func TestHandleTx_LateRows(t *testing.T) {
	t.Parallel()
	db := withEffects(t)
	var rows pgx.Rows
	var results pgx.BatchResults
	for name, open := range map[string]func(ctx context.Context, tx pgx.Tx){
		"rows": func(ctx context.Context, tx pgx.Tx) {
			rows, _ = tx.Query(ctx, `select generate_series($1::int, 100000)`, 1)
			rows.Next()
		},
		"results": func(ctx context.Context, tx pgx.Tx) {
			b := &pgx.Batch{}
			b.Queue(`select generate_series($1::int, 100000)`, 1)
			results = tx.SendBatch(ctx, b)
			rows, _ = results.Query()
			rows.Next()
		},
	} {
		add(t, db, onceq.Job{MaxAttempts: 1})
		ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			open(ctx, tx)
			return nil
		}))
		require.ErrorContains(t, ran.Err, "did not close", name)
		require.False(t, rows.Next(), name)
		require.ErrorIs(t, rows.Err(), pgx.ErrTxClosed, name)
		rows.Close()
	}
	require.ErrorIs(t, results.Close(), pgx.ErrTxClosed)
}

// A goroutine is inside a statement when the handler returns. Nothing of the statement is committed, and nobody waits for
// it.
func TestHandleTx_ReturnsInTheMiddleOfAStatement(t *testing.T) {
	t.Parallel()
	db := withEffects(t)
	for name, use := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"statement": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `with s as (select pg_sleep(3600)) insert into effects select 1 from s`)
			return err
		},
		"copy": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"n"}, pgx.CopyFromFunc(func() ([]any, error) { return []any{int32(1)}, nil }))
			return err
		},
	} {
		add(t, db, onceq.Job{MaxAttempts: 1})
		ended := make(chan error, 1)
		ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			var pid int
			if err := tx.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid); err != nil {
				return err
			}
			go func() { ended <- use(context.WithoutCancel(ctx), tx) }()
			until(t, db, `exists (select from pg_stat_activity where pid = $1 and (query like '%pg_sleep%' or query like 'copy%') and state = 'active')`, pid)
			return nil
		}))
		require.Equal(t, onceq.StateDead, ran.State, name)
		require.ErrorContains(t, ran.Err, "another goroutine", name)
		require.Error(t, receive(t, ended), name)
	}
	require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`))
}

// A savepoint that has ended refuses every use, as pgx's own savepoints do. Otherwise the statement would be part of the
// outer transaction.
func TestHandleTx_EndedSavepoints(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			for name, use := range firstUses {
				if name == "Conn" || name == "LargeObjects" && mode == pgx.QueryExecModeExec {
					continue
				}
				for end, rollback := range map[string]bool{"rolled back": true, "released": false} {
					add(t, db, onceq.Job{})
					ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
						outer, err := tx.Begin(ctx)
						if err != nil {
							return err
						}
						inner, err := outer.Begin(ctx)
						if err != nil {
							return err
						}
						objects := outer.LargeObjects()
						if rollback {
							err = outer.Rollback(ctx)
						} else {
							err = outer.Commit(ctx)
						}
						if err != nil {
							return err
						}
						for _, late := range []pgx.Tx{outer, inner} {
							if err := use(ctx, late); !errors.Is(err, pgx.ErrTxClosed) {
								return fmt.Errorf("wants a closed transaction: %w", err)
							}
						}
						if _, err := objects.Create(ctx, 0); !errors.Is(err, pgx.ErrTxClosed) {
							return fmt.Errorf("wants a closed transaction: %w", err)
						}
						return nil
					}))
					require.NoError(t, ran.Err, "%s, %s", name, end)
				}
			}
			require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`))
		})
	}
}

// pgx.BeginFunc rolls back a savepoint with the context that it was given. When there is something to roll back, that
// context has mostly ended. What was written in the savepoint was once committed.
func TestHandleTx_SavepointIsRolledBackInAnEndedContext(t *testing.T) {
	t.Parallel()
	db := withEffects(t)
	add(t, db, onceq.Job{})
	ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
		sub, cancel := context.WithCancel(ctx)
		slow := errors.New("the provider is slow")
		err := pgx.BeginFunc(sub, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(sub, `insert into effects values (1)`)
			cancel()
			return errors.Join(err, slow)
		})
		if !errors.Is(err, slow) {
			return err
		}
		_, err = tx.Exec(ctx, `insert into effects values (2)`)
		return err
	}))
	require.NoError(t, ran.Err)
	require.Equal(t, onceq.StateCompleted, ran.State)
	require.Equal(t, 2, sqlOne[int](t, db, `select sum(n)::int from effects`))
}

// If a savepoint is neither rolled back nor released, its writes would be committed with the rest.
func TestHandleTx_SavepointThatCouldNotBeEnded(t *testing.T) {
	t.Parallel()
	db := withEffects(t)
	write := func(ctx context.Context, tx pgx.Tx, end func(sp pgx.Tx, sub context.Context) error) error {
		sub, cancel := context.WithCancel(ctx)
		defer cancel()
		sp, err := tx.Begin(sub)
		if err != nil {
			return err
		}
		if _, err := sp.Exec(sub, `insert into effects values (1)`); err != nil {
			return err
		}
		rows, err := sp.Query(sub, `select generate_series(1, 3)`)
		if err != nil {
			return err
		}
		defer rows.Close() // runs after the end of the savepoint
		if err := end(sp, sub); err == nil {
			return errors.New("wants an error: the connection is busy")
		}
		return nil
	}
	for name, end := range map[string]func(sp pgx.Tx, sub context.Context) error{
		"rolled back": func(sp pgx.Tx, sub context.Context) error { return sp.Rollback(sub) },
		"released":    func(sp pgx.Tx, sub context.Context) error { return sp.Commit(sub) },
	} {
		add(t, db, onceq.Job{MaxAttempts: 1})
		ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error { return write(ctx, tx, end) }))
		require.ErrorContains(t, ran.Err, "savepoint", name)
		require.Equal(t, onceq.StateDead, ran.State)

		// The outer savepoint undoes it.
		add(t, db, onceq.Job{MaxAttempts: 1})
		ran = db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
			outer, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if err := write(ctx, outer, end); err != nil {
				return err
			}
			return outer.Rollback(ctx)
		}))
		require.NoError(t, ran.Err, name)
		require.Equal(t, onceq.StateCompleted, ran.State)
	}
	require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`))
}

// A batch that begins a transaction of its own would end the worker's transaction.
func TestHandleTx_BatchThatBegins(t *testing.T) {
	t.Parallel()
	db := withEffects(t)
	add(t, db, onceq.Job{MaxAttempts: 1})
	ran := db.RunOne(handleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease) error {
		b := &pgx.Batch{}
		b.BeginTx(pgx.TxOptions{})
		b.Queue(`insert into effects values (1)`)
		return tx.SendBatch(ctx, b).Close()
	}))
	require.ErrorContains(t, ran.Err, "BeginTx")
}

// A handler may reschedule its job after its timeout, just as it may complete it then.
func TestHandleTx_ReschedulesAfterItsTime(t *testing.T) {
	t.Parallel()
	db := withEffects(t)
	kind := onceq.Kind[int]{Name: "late", Timeout: 5 * time.Second}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	ran := db.RunOne(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, n int) error {
		if _, err := tx.Exec(context.WithoutCancel(ctx), `insert into effects values ($1)`, n); err != nil {
			return err
		}
		for ctx.Err() == nil { // busy: the server would end a transaction that idles
			if _, err := tx.Exec(context.WithoutCancel(ctx), `select pg_sleep(0.05)`); err != nil {
				return err
			}
		}
		return onceq.Reschedule(time.Hour)
	}))
	require.Equal(t, onceq.StateDelayed, ran.State)
	var effects int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from effects`).Scan(&effects))
	require.Equal(t, 1, effects)
}

func TestHandleTx_LeavesRowsOpen(t *testing.T) {
	t.Parallel()
	db := withEffects(t)
	kind := onceq.Kind[int]{Name: "open", MaxAttempts: 1}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	require.NoError(t, err)
	ran := db.RunOne(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, n int) error {
		_, err := tx.Query(ctx, `insert into effects select n from generate_series(1, $1::int) n returning n`, 1000)
		return err
	}))
	require.Equal(t, onceq.StateDead, ran.State)
	require.ErrorContains(t, ran.Err, "did not close the rows")
}
