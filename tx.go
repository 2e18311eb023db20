package onceq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// This file is what the transaction of HandleTx and HandleBatch does to jobs. Package lazytx opens it with the handler's
// first statement, limits what the handler may do with it, and ends it.

// errOwnTx is the error for a handler that tries to end the worker's transaction.
var errOwnTx = errors.New("onceq: the worker ends this transaction: return nil to commit it with the job's completion, an error to roll it back")

// newHandlerTx returns a transaction that is not open yet, and acquires the connection for it.
func (x *executor) newHandlerTx(ctx context.Context, holds []*hold.Hold, h *Handler) (*lazytx.Tx, error) {
	q, first := x.q, holds[0]
	begin := pg.BeginOwn
	if h.serializable {
		begin = "begin isolation level serializable read write"
	}
	return lazytx.New(ctx, lazytx.Config{
		Pool:  q.store.Pool,
		Begin: begin,
		Open: func(idle string, id *string) []lazytx.Statement {
			answer := func(row [][]byte) { *id = string(row[len(row)-1]) }
			var all []lazytx.Statement
			if q.store.Citus.Load() == pg.CitusYes {
				all = append(all, lazytx.Statement{SQL: stmt.OpenApart, Args: []any{idle}, Raw: answer})
				idle, answer = "", nil
			}
			if len(holds) == 1 {
				return append(all, lazytx.Statement{SQL: q.store.SQL(stmt.LockJob), Args: []any{idle, first.ID, first.Claims, first.Holder}, Raw: answer})
			}
			ids, claims, holders := hold.Guards(holds)
			return append(all, lazytx.Statement{SQL: pg.KeepPlans}, lazytx.Statement{SQL: q.store.SQL(stmt.LockJobs), Args: []any{idle, ids, claims, holders}, Raw: answer}, lazytx.Statement{SQL: pg.RestorePlans})
		},
		Refused: func(err error) error {
			switch {
			case !leaseLost(err):
				return nil
			case len(holds) > 1:
				return fmt.Errorf("%w: of a job in the batch", ErrLeaseLost)
			}
			return leaseOf(first).lostError("begin")
		},
		Committed: func(ctx context.Context, id string, ended bool) (committed bool, err error) {
			switch {
			case ended:
				err = q.store.Guarded(ctx, x.db, stmt.CommittedTx, []any{id}, &committed)
			case q.store.Citus.Load() != pg.CitusYes:
				var same bool
				err = q.store.Guarded(ctx, x.db, stmt.CommittedLock, []any{id, first.ID}, &same, nil, &committed)
				committed = committed && same
			}
			return committed, err
		},
		Wait:         max(x.lease, 2*time.Second), // then another worker may have one
		EndedByOwner: errOwnTx,
		Idle:         max(x.lease, 2*time.Second), // well above the ticks of the ping loop
		IdleShared:   timeoutOf(holds, h),
		Pipelines:    x.pipelines,
		Owner:        holds,
	})
}

// ownersOf returns the jobs whose keys a handler cannot enqueue in its own transaction, if db is such a transaction.
func ownersOf(db DB) []*hold.Hold {
	if h, ok := db.(*lazytx.Handle); ok {
		holds, _ := h.Owner().([]*hold.Hold)
		return holds
	}
	return nil
}

// commitTx ends a handler's transaction with the statement that ends its jobs. next gets the answer of
// stmt.FinishNext. sure is false if the answer was lost, so that the transaction may have been committed.
func (q *Queue) commitTx(ctx context.Context, tx *lazytx.Tx, first *hold.Hold, last *finish.Last,
	next *successor) (sure bool, err error) {
	own := tx.Open()
	var other bool // the handler committed the transaction that was opened
	same := func(row [][]byte) { other = row[len(row)-1] != nil }
	sure, err = tx.Commit(ctx, ending(q, tx, first, last, next, same)...)
	switch {
	case err == nil && (other || tx.Opened() && !own):
		q.log.Error("onceq: the worker's transaction was committed inside the handler (a commit in a statement, or a transaction begun on tx.Conn()); "+
			"the job is completed, but not together with what it wrote: use savepoints (tx.Begin), or Handle",
			slog.String("kind", first.Kind), slog.Int64("job", first.ID))
	case own && leaseLost(err): // this transaction has the jobs' rows locked, so it must be another one
		err = lazytx.ErrRolledBack
	}
	if err != nil && own && sure {
		err = undone(tx, err)
	}
	return sure, err
}

// ending are the statements that end a handler's transaction, before its commit. same gets the row that says
// whether it is still the transaction that was opened.
func ending(q *Queue, tx *lazytx.Tx, first *hold.Hold, last *finish.Last, next *successor,
	same func([][]byte)) (all []lazytx.Statement) {
	own, citus := tx.Open(), q.store.Citus.Load() == pg.CitusYes
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
			name = q.store.OnNode(name)
		}
		return name
	}
	name = onNode(name)
	end := lazytx.Statement{SQL: name, Args: last.Args, Row: last.Row}
	switch alone := stmt.InTx[name]; {
	case own && alone != "" && !citus:
		end = lazytx.Statement{SQL: alone, Args: append(last.Args, tx.ID()), Raw: same}
	case own:
		all = append(all, lazytx.Statement{SQL: q.store.SQL(stmt.CheckTx), Args: []any{tx.ID(), first.ID}, Raw: same})
	}
	if next != nil {
		end.Row = []any{next.completed(new(*int64))}
	}
	end.SQL = q.store.SQL(end.SQL)
	all = append(all, end)
	if last.Members != nil {
		all = append(all, lazytx.Statement{SQL: q.store.SQL(onNode(stmt.TellMembers)), Args: last.Members})
	}
	return all
}

// undone rolls back and returns the error as what it means: a *committedError if the handler had committed, a
// *conflictError if Postgres wants the transaction run again.
func undone(tx *lazytx.Tx, err error) error {
	switch committed, conflict := tx.Undo(err); {
	case committed:
		return &committedError{err}
	case conflict && decidesNothing(err):
		return &conflictError{err}
	}
	return err
}
