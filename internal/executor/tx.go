package executor

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/task"
)

// This file is what the transaction of HandleTx and HandleBatch does to jobs. Package lazytx opens it with
// the handler's first statement, limits what the handler may do with it, and ends it.

// committedError says that the handler committed its transaction before the worker could, and what went wrong
// after that.
type committedError struct{ error }

func (e *committedError) Error() string {
	return "onceq: the worker's transaction was committed inside the handler (a commit in a statement, or a transaction" +
		" begun on tx.Conn()), so what was written until then stays; the job does not run again by itself, because that" +
		" would be repeated; use savepoints (tx.Begin), or Handle; what went wrong after the commit: " + e.error.Error()
}

func (e *committedError) Unwrap() error { return e.error }

// conflictError is a serialization failure or a deadlock of the handler's own transaction.
type conflictError struct{ error }

func (e *conflictError) Unwrap() error { return e.error }

const opBegin = "begin"

// refusedError says that the guard of a handler's transaction did not hold. It never comes from a handler.
type refusedError struct {
	op    string
	stale bool // a completion was refused
}

func (e *refusedError) Error() string { return "onceq: " + e.op + " refused: the lease is lost" }

// notBegunError says why a handler was not called, or did not get past its first statement. No attempt is
// spent on it.
type notBegunError struct{ error }

func (e *notBegunError) Unwrap() error { return e.error }

// errOwnTx is the error for a handler that tries to end the worker's transaction.
var errOwnTx = errors.New("onceq: the worker ends this transaction: return nil to commit it with the job's completion, an error to roll it back")

// newHandlerTx returns a transaction that is not open yet, and acquires the connection for it.
func (x *Executor) newHandlerTx(ctx context.Context, holds []*hold.Hold, h *task.Handler) (*lazytx.Tx, error) {
	first := holds[0]
	begin := pg.BeginOwn
	if h.Serializable {
		begin = "begin isolation level serializable read write"
	}
	return lazytx.New(ctx, lazytx.Config{
		Pool:  x.Store.Pool,
		Begin: begin,
		Open: func(idle string, id *string) []lazytx.Statement {
			answer := func(row [][]byte) { *id = string(row[len(row)-1]) }
			var all []lazytx.Statement
			if x.Store.Citus.Load() == pg.CitusYes {
				all = append(all, lazytx.Statement{SQL: stmt.OpenApart, Args: []any{idle}, Raw: answer})
				idle, answer = "", nil
			}
			if len(holds) == 1 {
				return append(all, lazytx.Statement{SQL: x.Store.SQL(stmt.LockJob), Args: []any{idle, first.ID, first.Claims, first.Holder}, Raw: answer})
			}
			ids, claims, holders := hold.Guards(holds)
			return append(all, lazytx.Statement{SQL: pg.KeepPlans}, lazytx.Statement{SQL: x.Store.SQL(stmt.LockJobs), Args: []any{idle, ids, claims, holders}, Raw: answer}, lazytx.Statement{SQL: pg.RestorePlans})
		},
		Refused: func(err error) error {
			if !sqlstate.LeaseLost(err) {
				return nil
			}
			of := first
			if len(holds) > 1 {
				of = nil
			}
			return x.Face.Lost(of, opBegin)
		},
		Committed: func(ctx context.Context, id string, ended bool) (committed bool, err error) {
			switch {
			case ended:
				err = x.Store.Guarded(ctx, x.Own.Outcomes, stmt.CommittedTx, []any{id}, &committed)
			case x.Store.Citus.Load() != pg.CitusYes:
				var same bool
				err = x.Store.Guarded(ctx, x.Own.Outcomes, stmt.CommittedLock, []any{id, first.ID}, &same, nil, &committed)
				committed = committed && same
			}
			return committed, err
		},
		Wait:         max(x.Lease, 2*time.Second), // then another worker may have one
		EndedByOwner: errOwnTx,
		Idle:         max(x.Lease, 2*time.Second), // well above the ticks of the ping loop
		IdleShared:   timeoutOf(holds, h),
		Pipelines:    x.Pipelines,
		Owner:        holds,
	})
}

// commitTx ends a handler's transaction with the statement that ends its jobs. next gets the answer of
// stmt.FinishNext. sure is false if the answer was lost, so that the transaction may have been committed.
func (x *Executor) commitTx(ctx context.Context, tx *lazytx.Tx, first *hold.Hold, last *finish.Last,
	next *Next) (sure bool, err error) {
	own := tx.Open()
	var other bool // the handler committed the transaction that was opened
	same := func(row [][]byte) { other = row[len(row)-1] != nil }
	sure, err = tx.Commit(ctx, x.lastStatements(tx, first, last, next, same)...)
	switch {
	case err == nil && (other || tx.Opened() && !own):
		x.Log.Error("onceq: the worker's transaction was committed inside the handler (a commit in a statement, or a transaction begun on tx.Conn()); "+
			"the job is completed, but not together with what it wrote: use savepoints (tx.Begin), or Handle",
			slog.String("kind", first.Kind), slog.Int64("job", first.ID))
	case own && sqlstate.LeaseLost(err): // this transaction has the jobs' rows locked, so it must be another one
		err = lazytx.ErrRolledBack
	}
	if err != nil && own && sure {
		err = x.undone(tx, err)
	}
	return sure, err
}

// lastStatements are those that end a handler's transaction, before its commit. same gets the row that says
// whether it is still the transaction that was opened.
func (x *Executor) lastStatements(tx *lazytx.Tx, first *hold.Hold, last *finish.Last, next *Next,
	same func([][]byte)) (all []lazytx.Statement) {
	own, citus := tx.Open(), x.Store.Citus.Load() == pg.CitusYes
	name := last.Statement
	if name == stmt.CompleteJobs || name == stmt.RetryJobs { // functions bring their own settings
		plans := pg.HotPlans
		if citus {
			plans = pg.GuardPlans
		}
		all = append(all, lazytx.Statement{SQL: plans})
	}
	onNode := func(name string) string {
		if citus {
			name = x.Store.OnNode(name)
		}
		return name
	}
	name = onNode(name)
	end := lazytx.Statement{SQL: name, Args: last.Args, Row: last.Row}
	switch alone := stmt.InTx[name]; {
	case own && alone != "" && !citus:
		end = lazytx.Statement{SQL: alone, Args: append(last.Args, tx.ID()), Raw: same}
	case own:
		all = append(all, lazytx.Statement{SQL: x.Store.SQL(stmt.CheckTx), Args: []any{tx.ID(), first.ID}, Raw: same})
	}
	if next != nil {
		end.Row = []any{next.completed(new(*int64))}
	}
	end.SQL = x.Store.SQL(end.SQL)
	all = append(all, end)
	if last.Members != nil {
		all = append(all, lazytx.Statement{SQL: x.Store.SQL(onNode(stmt.TellMembers)), Args: last.Members})
	}
	return all
}

// undone rolls back and returns the error as what it means: a *committedError if the handler had committed, a
// *conflictError if Postgres wants the transaction run again.
func (x *Executor) undone(tx *lazytx.Tx, err error) error {
	switch committed, conflict := tx.Undo(err); {
	case committed:
		return &committedError{err}
	case conflict && !x.decides(err):
		return &conflictError{err}
	}
	return err
}
