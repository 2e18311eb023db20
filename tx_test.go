package onceq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

var queryModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// inMode is a database whose pool speaks one of them, with a table for effects.
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

// firstUses are ways to begin with a handler's transaction, each of which writes one row.
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

// Whatever a handler begins with, its writes and the completion are one transaction, in which it has the job.
func TestHandleTx_OpensWithWhateverComesFirst(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		for _, keep := range []time.Duration{0, time.Hour} {
			t.Run(fmt.Sprint(mode, keep), func(t *testing.T) {
				t.Parallel()
				db := inMode(t, mode)
				for name, use := range firstUses {
					if name == "LargeObjects" && mode == pgx.QueryExecModeExec {
						continue // pgx has no type for their ids there
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
						if err := tx.QueryRow(ctx, `select current_setting('idle_in_transaction_session_timeout')`).Scan(&timeout); err != nil || timeout != "1min" {
							return fmt.Errorf("idling may take %q, %w", timeout, err)
						}
						// Nobody else can have the job, and for everybody else it is there.
						inside = sqlOne[bool](t, db, `select not exists (select from onceq.jobs where id = $1 for update skip locked)
							and exists (select from onceq.jobs where id = $1)`, id)
						return l.SetResult(name)
					}))
					require.NoError(t, ran.Err, name)
					require.Equal(t, onceq.Completed, ran.State, name)
					require.True(t, inside, name)
					require.Equal(t, 1, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), name)
					require.Equal(t, `"`+name+`"`, sqlOne[string](t, db, `select result::text from onceq.job_fences where key = $1 and state = 3`, name))
					require.Equal(t, keep > 0, sqlOne[bool](t, db, `select exists (select from onceq.job_history where id = $1)`, id))
				}
			})
		}
	}
}

// A lease that is lost before the handler comes to use its transaction: nothing of it is run, whatever the handler
// makes of the error.
func TestHandleTx_LostBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			sqlRun(t, db, `create sequence tried`) // what is rolled back shows here
			sqlRun(t, db, `create function note() returns trigger language plpgsql as 'begin perform nextval(''tried''); return new; end'`)
			sqlRun(t, db, `create trigger note before insert on effects for each statement execute function note()`)
			for name, use := range firstUses {
				if name == "LargeObjects" {
					continue // pgx's have no error to give, and panic
				}
				kind := onceq.Kind[int]{Name: "k"}
				if strings.Contains(name, "Exec") {
					kind.Keep = time.Hour // its row is locked, and not taken
				}
				id := add(t, db, onceq.Job{})
				var errs []error
				w := start(t, db, onceq.WorkerConfig{}, kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
					if l.Lost > 0 {
						return nil
					}
					sqlRun(t, db, `update onceq.jobs set lost = lost + 1, claims = claims + 1, leased_until = null, holder = null, run_at = statement_timestamp() where id = $1`, id)
					errs = append(errs, use(ctx, tx), use(ctx, tx))
					return nil
				}))
				until(t, db, noJobs)
				require.NoError(t, w.stop())
				require.Len(t, errs, 2)
				for _, err := range errs {
					require.Error(t, err, name)
					if name != "Conn" {
						require.ErrorIs(t, err, onceq.ErrLeaseLost, name)
					}
				}
				require.Equal(t, 1, w.count(onceq.EventLeaseLost), name)
				require.Zero(t, w.count(onceq.EventFailed)+w.count(onceq.EventStale), name)
				require.Equal(t, 1, w.count(onceq.EventCompleted), name)
				require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`), name)
				require.False(t, sqlOne[bool](t, db, `select is_called from tried`), name)
			}
		})
	}
}

// A batch of which one lease is lost: none of its statements runs, and the others run again, alone.
func TestHandleBatch_LostBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
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
				if r.State == onceq.Completed {
					completed++
				}
			}
			require.Equal(t, 3, completed)
			require.EqualValues(t, 2, lost.Load(), "the batch, and the one job alone")
			require.Equal(t, 3, sqlOne[int](t, db, `select sum(n)::int from effects`))
		})
	}
}

func TestHandleTx_ThatNeverUsesIt(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			none := handleTx(func(_ context.Context, _ pgx.Tx, l *onceq.Lease) error { return l.SetResult(7) })
			add(t, db, onceq.Job{Key: "k"})
			require.Equal(t, onceq.Completed, db.RunOne(none).State)
			require.Equal(t, "7", sqlOne[string](t, db, `select result::text from onceq.job_fences`))

			again := add(t, db, onceq.Job{})
			require.Equal(t, onceq.Delayed, db.RunOne(handleTx(func(context.Context, pgx.Tx, *onceq.Lease) error { return onceq.Reschedule(time.Hour) })).State)
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

// A first statement that fails gives its own error, as it would anywhere else, and the transaction is what it would be.
func TestHandleTx_FirstStatementFails(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode)
			for name, c := range map[string]struct {
				code string // of Postgres; "" where pgx refuses it
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
					require.Equal(t, onceq.Completed, ran.State, name)
					require.Equal(t, 5, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), name)
					continue
				}
				for want, err := range map[string]error{c.code: first, "25P02": second} {
					var pgErr *pgconn.PgError
					require.ErrorAs(t, err, &pgErr, name)
					require.Equal(t, want, pgErr.Code, name)
				}
				require.Equal(t, onceq.Retrying, ran.State, name)
				require.ErrorContains(t, ran.Err, "the handler returned no error", name)
				require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`), name)
				sqlRun(t, db, `delete from onceq.jobs`)
			}
		})
	}
}

// A context that has ended before the first statement spoils neither the transaction nor the connection.
func TestHandleTx_ContextEndsBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
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
				require.Equal(t, onceq.Completed, ran.State, name)
				require.Equal(t, 1, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), name)
			}
		})
	}
}

// A connection that is lost just then was lost before the handler did anything: another one does. Where there is none
// the job runs again and spends no attempt, whatever the handler made of the error. Nothing is written outside of a
// transaction.
func TestHandleTx_ConnectionLostBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
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
						require.Equal(t, onceq.Completed, ran.State, "%s: %v", use, ran.Err)
						require.Equal(t, 1, sqlOne[int](t, db, `with gone as (delete from effects returning n) select sum(n)::int from gone`), use)
						continue
					}
					require.Equal(t, onceq.Delayed, ran.State, "%s: %v", use, ran.Err)
					require.Zero(t, sqlOne[int](t, db, `select attempts from onceq.jobs where id = $1`, id), use)
					require.Zero(t, sqlOne[int](t, db, `select count(*)::int from effects`), use)
					sqlRun(t, db, `delete from onceq.jobs`)
				}
			}
		})
	}
}

// What a Reschedule commits is the job as it was, but for what it changes.
func TestHandleTx_RescheduleKeepsTheRow(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := inMode(t, mode, func(c *pgxpool.Config) {
				if mode < pgx.QueryExecModeExec { // those read times as text, in the style that pgx knows
					c.ConnConfig.RuntimeParams["datestyle"] = "German, MDY"
				}
			})
			for name, job := range map[string]onceq.Job{
				"json":  {Key: `k'\"ä`, Scope: "s,()", Payload: json.RawMessage(`{"a": "x'\\\"", "n": 1.50}`), Metadata: map[string]string{"a": `"\'`}},
				"null":  {Payload: json.RawMessage(`null`)},
				"bytes": {Payload: []byte{0, 1, 255, '\\'}, Priority: onceq.High},
			} {
				id := add(t, db, job)
				const row = `select (to_jsonb(j) - '{run_at,leased_until,holder,claims}'::text[] || jsonb_build_object('null', payload is null))::text from onceq.jobs j`
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
				require.Equal(t, onceq.Delayed, ran.State, "%s: %v", name, ran.Err)
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

// A tracer that knows no batches hears of the first statement as well.
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
	require.Equal(t, onceq.Completed, ran.State)
	require.Contains(t, traced, `insert into effects values ($1)`)
}

// A handler that ends the worker's transaction by a statement of its own is wrong, and loses nothing by it: what it
// committed is done, with its key; what it undid runs again.
func TestHandleTx_EndsTheTransactionByAStatement(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "k"} {
		for name, c := range map[string]struct {
			statements []string
			effects    int
			done       bool
		}{
			"commit":                                 {[]string{`commit`}, 1, true},
			"commit, and another transaction":        {[]string{`commit`, `begin`, `insert into effects values (2)`}, 2, true},
			"rollback":                               {[]string{`rollback`}, 0, false},
			"rollback, and another transaction":      {[]string{`rollback`, `begin`, `insert into effects values (2)`}, 0, false},
			"rollback and chain, and then an effect": {[]string{`rollback and chain`, `insert into effects values (2)`}, 0, false},
		} {
			t.Run(fmt.Sprintf("%s, key %q", name, key), func(t *testing.T) {
				t.Parallel()
				db := withEffects(t)
				kind := onceq.Kind[int]{Name: "ends"}
				job := kind.Job(1)
				job.Key = key
				r, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
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
				var effects, live int
				require.NoError(t, db.Pool.QueryRow(t.Context(), `select (select count(*) from effects), (select count(*) from onceq.jobs)`).Scan(&effects, &live))
				require.Equal(t, c.effects, effects)
				require.Equal(t, c.done, live == 0)
				if !c.done {
					if name != "rollback" { // which was seen, and spent an attempt
						db.ExpireLease(r.ID)
					}
					db.Advance(24 * time.Hour)
					require.Equal(t, onceq.Completed, db.RunOne(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, n int) error {
						_, err := tx.Exec(ctx, `insert into effects values ($1)`, n)
						return err
					})).State)
				}
				if key != "" {
					again, err := db.Queue.Enqueue(t.Context(), db.Pool, job)
					require.NoError(t, err)
					require.Equal(t, onceq.Result{ID: r.ID, Duplicate: true, State: onceq.Completed}, again)
				}
			})
		}
	}
}

// A handler that reschedules its job after its time has run out has its way, as one that completes it has.
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
		for ctx.Err() == nil { // busy, and not idle in its transaction, which the server would end
			if _, err := tx.Exec(context.WithoutCancel(ctx), `select pg_sleep(0.05)`); err != nil {
				return err
			}
		}
		return onceq.Reschedule(time.Hour)
	}))
	require.Equal(t, onceq.Delayed, ran.State)
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
	require.Equal(t, onceq.Dead, ran.State)
	require.ErrorContains(t, ran.Err, "did not close the rows")
}
