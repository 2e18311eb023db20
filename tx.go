package onceq

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// errOwnTx is what a handler gets that tries to end the worker's transaction.
var errOwnTx = errors.New("onceq: the worker ends this transaction: return nil to commit it with the job's completion, an error to roll it back")

// handlerTx is a handler's transaction. It is opened together with the lock on the job's row and committed
// together with the completion, each in one round trip, which pgx's own type has no room for.
type handlerTx struct {
	conn       *pgxpool.Conn
	savepoints int
}

var _ pgx.Tx = (*handlerTx)(nil)

// lockJobs locks the rows of a handler's jobs by their guards, in id order, for the rest of its transaction:
// from then on nobody can claim them, expired or not. It also lets the server cut off a client that freezes
// inside the transaction, after $1 milliseconds of idling, so that it cannot keep the rows.
const lockJobs = `
with u as materialized (
  select * from unnest($2::bigint[], $3::int[], $4::bigint[]) as u(id, claims, holder)
)
select set_config('idle_in_transaction_session_timeout', coalesce(nullif($1::text, ''), current_setting('idle_in_transaction_session_timeout')), true),
       array(
       select j.id from u cross join lateral (
              select id from onceq.jobs
               where id = u.id and claims = u.claims and holder = u.holder
                 for no key update) j)`

// lockJob is the same for one job, which needs no guard of its plan.
const lockJob = `
select set_config('idle_in_transaction_session_timeout', coalesce(nullif($1::text, ''), current_setting('idle_in_transaction_session_timeout')), true),
       array(
       select id from onceq.jobs
        where id = $2::bigint and claims = $3::int and holder = $4::bigint
          for no key update)`

// beginHandler opens a transaction that has the leases' rows locked, and says which it got.
func (q *Queue) beginHandler(ctx context.Context, leases []*Lease, h *Handler) (*handlerTx, []int64, error) {
	conn, err := q.pool.Acquire(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("onceq: a connection for the handler's transaction: %w", err)
	}
	b := &pgx.Batch{}
	if h.serializable {
		b.Queue("begin isolation level serializable read write")
	} else {
		b.Queue("begin isolation level read committed read write")
	}
	var locked []int64
	scan := func(row pgx.Row) error { return row.Scan(nil, &locked) }
	idle := "" // the server's own setting stays
	if h.timeout > 0 {
		idle = strconv.FormatInt(min(max(1, h.timeout.Milliseconds()), math.MaxInt32), 10)
	}
	if len(leases) == 1 {
		l := leases[0]
		b.Queue(q.sql(lockJob), idle, l.ID, l.claims, l.holder).QueryRow(scan)
	} else {
		ids, claims, holders := guards(leases)
		b.Queue(keepPlans)
		b.Queue(q.sql(lockJobs), idle, ids, claims, holders).QueryRow(scan)
		b.Queue(restorePlans)
	}
	if err := conn.SendBatch(ctx, b).Close(); err != nil {
		end(conn)
		return nil, nil, fmt.Errorf("onceq: opening the handler's transaction: %w", err)
	}
	return &handlerTx{conn: conn}, locked, nil
}

// commit sends a last statement, which raises where a lease is gone, and the commit behind it. many says that the
// statement is for many jobs and so needs a guard of its plan.
// sure is false where the answer got lost and it may have been committed.
func (tx *handlerTx) commit(ctx context.Context, statement string, args []any, many bool) (sure bool, err error) {
	defer end(tx.conn)
	switch pg := tx.conn.Conn().PgConn(); {
	case pg.IsClosed():
		return true, errors.New("onceq: the connection of the handler's transaction was lost, or closed because a statement was cancelled: it is rolled back")
	case pg.TxStatus() == 'E':
		return true, errors.New("onceq: a statement in the handler's transaction failed and the handler returned no error: it is rolled back")
	case pg.TxStatus() == 'I':
		return true, errors.New("onceq: the handler ended the worker's transaction by a statement of its own")
	}
	b := &pgx.Batch{}
	if many {
		b.Queue(hotPlans)
	}
	b.Queue(statement, args...)
	b.Queue("commit")
	r := tx.conn.SendBatch(ctx, b)
	var tag pgconn.CommandTag
	for range b.Len() {
		if tag, err = r.Exec(); err != nil {
			break
		}
	}
	if closing := r.Close(); err == nil {
		err = closing
	}
	if err == nil && tag.String() != "COMMIT" {
		err = fmt.Errorf("onceq: commit answered %s: %w", tag, pgx.ErrTxCommitRollback)
	}
	return err == nil || !tx.conn.Conn().IsClosed(), err
}

func (tx *handlerTx) rollback() { end(tx.conn) }

// end gives a connection back, with nothing of a transaction left on it. pgxpool closes one that is still
// inside of a transaction, so this saves a connection and never more.
func end(conn *pgxpool.Conn) {
	if !conn.Conn().IsClosed() && conn.Conn().PgConn().TxStatus() != 'I' {
		ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
		_, _ = conn.Exec(ctx, "rollback")
		cancel()
	}
	conn.Release()
}

// Begin opens a savepoint.
func (tx *handlerTx) Begin(ctx context.Context) (pgx.Tx, error) {
	tx.savepoints++
	s := &savepoint{handlerTx: tx, name: fmt.Sprintf("onceq_%d", tx.savepoints)}
	if _, err := tx.conn.Exec(ctx, "savepoint "+s.name); err != nil {
		return nil, err
	}
	return s, nil
}

func (tx *handlerTx) Commit(context.Context) error   { return errOwnTx }
func (tx *handlerTx) Rollback(context.Context) error { return errOwnTx }

func (tx *handlerTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	return tx.conn.CopyFrom(ctx, table, columns, src)
}

func (tx *handlerTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return tx.conn.SendBatch(ctx, b)
}

// LargeObjects works through a savepoint: pgx makes its LargeObjects only from a transaction of its own type.
func (tx *handlerTx) LargeObjects() pgx.LargeObjects {
	inner, err := tx.conn.BeginTx(context.Background(), pgx.TxOptions{BeginQuery: "savepoint onceq_lo", CommitQuery: "release savepoint onceq_lo"})
	if err != nil {
		return pgx.LargeObjects{}
	}
	return inner.LargeObjects()
}

func (tx *handlerTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	return tx.conn.Conn().Prepare(ctx, name, sql)
}

func (tx *handlerTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return tx.conn.Exec(ctx, sql, args...)
}

func (tx *handlerTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return tx.conn.Query(ctx, sql, args...)
}

func (tx *handlerTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return tx.conn.QueryRow(ctx, sql, args...)
}

func (tx *handlerTx) Conn() *pgx.Conn { return tx.conn.Conn() }

// savepoint is a nested transaction of a handler.
type savepoint struct {
	*handlerTx
	name   string
	closed bool
}

func (s *savepoint) Commit(ctx context.Context) error { return s.close(ctx, "release savepoint ") }

func (s *savepoint) Rollback(ctx context.Context) error {
	return s.close(ctx, "rollback to savepoint ")
}

func (s *savepoint) close(ctx context.Context, command string) error {
	if s.closed {
		return pgx.ErrTxClosed
	}
	s.closed = true
	_, err := s.conn.Exec(ctx, command+s.name)
	return err
}
