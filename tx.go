package onceq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
)

// This file is what the transaction of HandleTx and HandleBatch does to jobs. Package lazytx opens it with the handler's
// first statement, limits what the handler may do with it, and ends it.

// errOwnTx is the error for a handler that tries to end the worker's transaction.
var errOwnTx = errors.New("onceq: the worker ends this transaction: return nil to commit it with the job's completion, an error to roll it back")

// limitIdling makes the server end the connection of a client that freezes inside the transaction, after $1 milliseconds of
// idling, so that the client cannot keep the jobs' rows. A server that waits because the client does not read what it sends does not
// count as idling: then only tcp_user_timeout helps. In a worker's transaction $1 is the lease, and a live worker's
// pings keep its connection from idling that long; in Lease.Lock it is the kind's Timeout. Without $1 the server's own
// setting stays.
const limitIdling = `case when $1::text <> '' then pg_catalog.set_config('idle_in_transaction_session_timeout', $1::text, true) end`

// lockJobs locks the rows of a handler's jobs by their guards, in id order, until the end of its transaction: from then on
// nobody can claim them, expired or not. It raises an error if a guard does not hold. The last column is the transaction's
// id.
const lockJobs = `
with u as materialized (
  select * from unnest($2::bigint[], $3::int[], $4::bigint[]) as u(id, claims, holder)
),
locked as materialized (
  select j.id from u cross join lateral (
         select id from onceq.jobs
          where id = u.id and claims = u.claims and holder = u.holder
            for no key update) j
)
select ` + limitIdling + `,
       case when (select count(*) from locked) < pg_catalog.cardinality($2::bigint[]) then onceq.lease_lost(($2::bigint[])[1]) end,
       pg_current_xact_id()::text`

// lockJob is the same for one job, which needs no planner settings.
const lockJob = `
select ` + limitIdling + `,
       case when not exists (
         select from onceq.jobs where id = $2::bigint and claims = $3::int and holder = $4::bigint
            for no key update) then onceq.lease_lost($2::bigint) end,
       pg_current_xact_id()::text`

// committedTx reports whether a transaction that ended was committed.
const committedTx = `select coalesce(pg_catalog.pg_xact_status($1::text::xid8) = 'committed', false)`

// committedLock reports the same of one that may be unknown to this server, because the server stopped at once or is a
// promoted standby. Then the number is free, or belongs to another transaction by now. What shows that it is the same one is
// its lock on the job's row. Once that row was changed nothing shows it, and the answer is no. The columns are computed in
// their order: the lock is read, then its end is waited for. On Citus the lock has another number, so nobody asks there.
const committedLock = `
select coalesce((select pg_catalog.xideq(xmax, pg_catalog.xid($1::text::xid8)) from onceq.jobs where id = $2::bigint), false),
       (select 1 from onceq.jobs where id = $2::bigint for no key update),
       coalesce(pg_catalog.pg_xact_status($1::text::xid8) = 'committed', false)`

// newHandlerTx returns a transaction that is not open yet, and acquires the connection for it.
func (x *executor) newHandlerTx(ctx context.Context, leases []*Lease, h *Handler) (*lazytx.Tx, error) {
	q, first := x.q, leases[0]
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
				all = append(all, lazytx.Statement{SQL: openApart, Args: []any{idle}, Raw: answer})
				idle, answer = "", nil
			}
			if len(leases) == 1 {
				return append(all, lazytx.Statement{SQL: q.store.SQL(lockJob), Args: []any{idle, first.ID, first.claims, first.holder}, Raw: answer})
			}
			ids, claims, holders := guards(leases)
			return append(all, lazytx.Statement{SQL: pg.KeepPlans}, lazytx.Statement{SQL: q.store.SQL(lockJobs), Args: []any{idle, ids, claims, holders}, Raw: answer}, lazytx.Statement{SQL: pg.RestorePlans})
		},
		Refused: func(err error) error {
			switch {
			case !leaseLost(err):
				return nil
			case len(leases) > 1:
				return fmt.Errorf("%w: of a job in the batch", ErrLeaseLost)
			}
			return first.lostError("begin")
		},
		Committed: func(ctx context.Context, id string, ended bool) (committed bool, err error) {
			switch {
			case ended:
				err = q.store.Guarded(ctx, x.db, committedTx, []any{id}, &committed)
			case q.store.Citus.Load() != pg.CitusYes:
				var same bool
				err = q.store.Guarded(ctx, x.db, committedLock, []any{id, first.ID}, &same, nil, &committed)
				committed = committed && same
			}
			return committed, err
		},
		Wait:         max(x.lease, 2*time.Second), // then another worker may have one
		EndedByOwner: errOwnTx,
		Idle:         max(x.lease, 2*time.Second), // well above the ticks of the ping loop
		IdleShared:   timeoutOf(leases, h),
		Pipelines:    x.pipelines,
		Owner:        leases,
	})
}

// leasesOf returns the jobs whose keys a handler cannot enqueue in its own transaction, if db is such a transaction.
func leasesOf(db DB) []*Lease {
	if h, ok := db.(*lazytx.Handle); ok {
		leases, _ := h.Owner().([]*Lease)
		return leases
	}
	return nil
}

// sameTx adds a column to a statement that completes jobs after what a handler did in a transaction. If the handler has
// ended that transaction by a statement of its own and is in another one, the column raises an error if the first was
// rolled back, and is 1 if it was committed.
func sameTx(id, job string) string {
	return `,
       case when ` + id + `::text <> pg_current_xact_id()::text
            then case when pg_catalog.pg_xact_status(` + id + `::text::xid8) = 'committed' then 1 else onceq.lease_lost(` + job + `) end end`
}

// inTx are the completions of one job with sameTx.
var inTx = map[string]string{
	completeOne:        completeOne + sameTx("$6", "$1::bigint"),
	completeOneUnkeyed: completeOneUnkeyed + sameTx("$4", "$1::bigint"),
}

// checkTx is the same as a statement of its own, which is sent before the statements for many jobs.
var checkTx = `select null` + sameTx("$1", "$2::bigint")

// commitTx ends a handler's transaction with a statement that completes its jobs and raises an error if a lease is lost.
// row is where its answer goes, or next, for finishNext. members tells those that wait for the jobs; nil for nobody. sure is false if the answer was lost, so that the transaction may have been
// committed.
func (q *Queue) commitTx(ctx context.Context, tx *lazytx.Tx, first *Lease, statement string, args, row []any, next *successor, members *lazytx.Statement) (sure bool, err error) {
	own := tx.Open()
	var other bool // the handler committed the transaction that was opened
	same := func(row [][]byte) { other = row[len(row)-1] != nil }
	sure, err = tx.Commit(ctx, ending(q, tx, first, statement, args, row, next, members, same)...)
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
func ending(q *Queue, tx *lazytx.Tx, first *Lease, statement string, args, row []any, next *successor, members *lazytx.Statement, same func([][]byte)) (all []lazytx.Statement) {
	own, citus := tx.Open(), q.store.Citus.Load() == pg.CitusYes
	if statement == completeJobs || statement == retryJobs { // functions bring their own settings
		plans := pg.HotPlans
		if citus {
			plans = pg.GuardPlans
		}
		all = append(all, lazytx.Statement{SQL: plans})
	}
	if citus {
		statement = onNode(statement)
	}
	last := lazytx.Statement{SQL: statement, Args: args, Row: row}
	switch alone := inTx[statement]; {
	case own && alone != "" && !citus:
		last = lazytx.Statement{SQL: alone, Args: append(args, tx.ID()), Raw: same}
	case own:
		all = append(all, lazytx.Statement{SQL: q.store.SQL(checkTx), Args: []any{tx.ID(), first.ID}, Raw: same})
	}
	if next != nil {
		last.Row = []any{next.completed(new(*int64))}
	}
	last.SQL = q.store.SQL(last.SQL)
	all = append(all, last)
	if members != nil {
		if citus {
			members.SQL = onNode(members.SQL)
		}
		members.SQL = q.store.SQL(members.SQL)
		all = append(all, *members)
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
