package onceq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// errOwnTx is what a handler gets that tries to end the worker's transaction.
var errOwnTx = errors.New("onceq: the worker ends this transaction: return nil to commit it with the job's completion, an error to roll it back")

// handlerTx is a handler's transaction. It is opened together with the handler's first statement and committed
// together with the completion, each in one round trip, which pgx's own type has no room for. What opens it raises
// where a lease is gone, so that no statement behind it runs.
type handlerTx struct {
	q      *Queue
	h      *Handler
	leases []*Lease
	ctx    context.Context // the handler's, for what has no context of its own
	conn   *pgxpool.Conn   // nil once it is closed and there is no other
	raw    *pgx.Conn       // the same

	pipelines  bool // see pipelines
	replaced   bool // the connection is the second one
	opened     bool
	taken      bool  // opening it deletes the job: nothing is left to do for a completion but its fence
	failed     error // why it could not be opened
	lost       bool  // because a lease is gone
	notBegun   bool  // because of the database, and not of a context that ended
	savepoints int
}

var _ pgx.Tx = (*handlerTx)(nil)

// limitIdling lets the server cut off a client that freezes inside the transaction, after $1 milliseconds of idling,
// so that it cannot keep the jobs' rows. Without $1 the server's own setting stays.
const limitIdling = `case when $1::text <> '' then set_config('idle_in_transaction_session_timeout', $1::text, true) end`

// lockJobs locks the rows of a handler's jobs by their guards, in id order, for the rest of its transaction: from
// then on nobody can claim them, expired or not. It raises where a guard does not hold.
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
       case when (select count(*) from locked) < cardinality($2::bigint[]) then onceq.lease_lost(($2::bigint[])[1]) end`

// lockJob is the same for one job, which needs no guard of its plan.
const lockJob = `
with locked as materialized (
  select id from onceq.jobs
   where id = $2::bigint and claims = $3::int and holder = $4::bigint
     for no key update
)
select ` + limitIdling + `, case when not exists (select from locked) then onceq.lease_lost($2::bigint) end`

// takeJob is the same for one job that leaves no history: what its completion would delete it deletes at once, which
// locks the row as well. Everybody else sees the job as it was until the transaction commits.
const takeJob = `
with taken as (
  delete from onceq.jobs where id = $2::bigint and claims = $3::int and holder = $4::bigint
  returning id
)
select ` + limitIdling + `, case when not exists (select from taken) then onceq.lease_lost($2::bigint) end`

// newHandlerTx gives a transaction that is not open yet, with the connection for it.
func (w *Worker) newHandlerTx(ctx context.Context, leases []*Lease, h *Handler) (*handlerTx, error) {
	tx := &handlerTx{q: w.q, h: h, leases: leases, ctx: ctx, pipelines: w.pipelines, taken: len(leases) == 1 && leases[0].keep == 0}
	return tx, tx.acquire(ctx)
}

func (tx *handlerTx) acquire(ctx context.Context) (err error) {
	if tx.conn, err = tx.q.pool.Acquire(ctx); err != nil {
		return fmt.Errorf("onceq: a connection for the handler's transaction: %w", err)
	}
	tx.raw = tx.conn.Conn()
	return nil
}

func (tx *handlerTx) replace(ctx context.Context) error {
	tx.replaced = true
	tx.conn.Release()
	return tx.acquire(ctx)
}

func (tx *handlerTx) begin() string {
	if tx.h.serializable {
		return "begin isolation level serializable read write"
	}
	return "begin isolation level read committed read write"
}

// first opens the transaction with these statements behind, and gives the results of those. It gives neither results
// nor an error where there are none, or where they could not be prepared: then they are to be sent as they are.
func (tx *handlerTx) first(ctx context.Context, queries ...*pgx.QueuedQuery) (pgx.BatchResults, error) {
	if tx.failed != nil {
		return nil, tx.failed
	}
	if err := ctx.Err(); err != nil {
		return nil, err // nothing was sent, and another context may do
	}
	idle := ""
	if tx.h.timeout > 0 {
		idle = strconv.FormatInt(min(max(1, tx.h.timeout.Milliseconds()), math.MaxInt32), 10)
	}
	b := &pgx.Batch{QueuedQueries: make([]*pgx.QueuedQuery, 0, 4+len(queries))}
	b.Queue(tx.begin())
	switch l := tx.leases[0]; {
	case tx.taken:
		b.Queue(tx.q.sql(takeJob), idle, l.ID, l.claims, l.holder)
	case len(tx.leases) == 1:
		b.Queue(tx.q.sql(lockJob), idle, l.ID, l.claims, l.holder)
	default:
		ids, claims, holders := guards(tx.leases)
		b.Queue(keepPlans)
		b.Queue(tx.q.sql(lockJobs), idle, ids, claims, holders)
		b.Queue(restorePlans)
	}
	opening := b.Len()
	b.QueuedQueries = append(b.QueuedQueries, queries...)
	results := tx.conn.SendBatch(ctx, b)
	var err error
	for range opening {
		if _, err = results.Exec(); err != nil {
			break
		}
	}
	if err == nil && len(queries) > 0 {
		tx.opened = true
		return results, nil
	}
	if closing := results.Close(); err == nil {
		err = closing
	}
	switch pg := tx.raw.PgConn(); {
	case err == nil:
		tx.opened = true
		return nil, nil
	case pg.IsClosed() && ctx.Err() == nil && !tx.replaced:
		// It was idle for long and is dead, or pgx has closed it because an argument does not encode. Nothing was
		// committed, so another connection may do it all.
		if err := tx.replace(ctx); err != nil {
			tx.notBegun, tx.failed = ctx.Err() == nil, err
			return nil, err
		}
		return tx.first(ctx)
	case len(queries) > 0 && !pg.IsClosed() && pg.TxStatus() == 'I':
		return tx.first(ctx) // nothing was run; what is wrong with them, if it is they, shows when they are sent alone
	case leaseLost(err):
		tx.lost = true
		tx.failed = tx.leases[0].lostError("begin")
		if len(tx.leases) > 1 {
			tx.failed = fmt.Errorf("%w: of a job in the batch", ErrLeaseLost)
		}
	default:
		tx.notBegun = ctx.Err() == nil
		tx.failed = fmt.Errorf("onceq: opening the handler's transaction: %w", err)
	}
	return nil, tx.failed
}

// query gives a statement as one of a batch, or none where a batch would treat it in another way: without arguments it
// may be several statements, and a batch knows no options.
func (tx *handlerTx) query(sql string, args []any) []*pgx.QueuedQuery {
	if !tx.pipelines || len(args) == 0 {
		return nil
	}
	switch args[0].(type) {
	case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID, pgx.QueryRewriter:
		return nil
	}
	return []*pgx.QueuedQuery{{SQL: sql, Arguments: args}}
}

// pipelines says whether a handler's first statement may travel with what opens its transaction. In the simple protocol
// one string of SQL may be several statements, whose results a batch cannot tell apart. A tracer of queries alone would
// not hear of it.
func pipelines(c *pgx.ConnConfig) bool {
	if c.DefaultQueryExecMode == pgx.QueryExecModeSimpleProtocol {
		return false
	}
	_, batches := c.Tracer.(pgx.BatchTracer)
	return c.Tracer == nil || batches
}

// statement is one of this package with its arguments.
type statement struct {
	sql  string
	args []any
}

// commit sends the last statements, of which the first raises where a lease is gone unless the jobs are taken already,
// and the commit behind them. many says that the statement is for many jobs and so needs a guard of its plan.
// sure is false where the answer got lost and it may have been committed.
func (tx *handlerTx) commit(ctx context.Context, many bool, statements ...statement) (sure bool, err error) {
	defer end(tx.conn)
	switch pg := tx.raw.PgConn(); {
	case pg.IsClosed():
		return true, errors.New("onceq: the connection of the handler's transaction was lost, or closed because a statement was cancelled: it is rolled back")
	case pg.TxStatus() == 'E' || tx.failed != nil:
		return true, errors.New("onceq: a statement in the handler's transaction failed and the handler returned no error: it is rolled back")
	case pg.IsBusy():
		return true, errors.New("onceq: the handler did not close the rows or the batch's results of its transaction: it is rolled back; close them before returning")
	case pg.TxStatus() == 'I' && tx.opened:
		l := tx.leases[0]
		err := errors.New("onceq: the handler ended the worker's transaction by a statement of its own: return nil to commit it with the job's completion, an error to roll it back")
		tx.q.log.Error(err.Error(), slog.String("kind", l.Kind), slog.Int64("job", l.ID))
		if tx.taken && l.Key != "" {
			if _, failed := tx.conn.Exec(ctx, tx.q.sql(completeGone), takenArgs(l)...); failed != nil {
				err = fmt.Errorf("%w; completing its key: %w", err, failed)
			}
		}
		return true, err
	}
	b := &pgx.Batch{}
	if !tx.opened {
		b.Queue(tx.begin())
	}
	if many {
		b.Queue(hotPlans)
	}
	for _, s := range statements {
		b.Queue(tx.q.sql(s.sql), s.args...)
	}
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
	return err == nil || !tx.raw.IsClosed(), err
}

func (tx *handlerTx) rollback() { end(tx.conn) }

// end gives a connection back, with nothing of a transaction left on it. pgxpool closes one that is still
// inside of a transaction, so this saves a connection and never more.
func end(conn *pgxpool.Conn) {
	if conn == nil {
		return
	}
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
	if _, err := tx.Exec(ctx, "savepoint "+s.name); err != nil {
		return nil, err
	}
	return s, nil
}

func (tx *handlerTx) Commit(context.Context) error   { return errOwnTx }
func (tx *handlerTx) Rollback(context.Context) error { return errOwnTx }

// open opens the transaction for what cannot travel with it.
func (tx *handlerTx) open(ctx context.Context) error {
	if tx.opened {
		return nil
	}
	_, err := tx.first(ctx)
	return err
}

func (tx *handlerTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if err := tx.open(ctx); err != nil {
		return 0, err
	}
	return tx.conn.CopyFrom(ctx, table, columns, src)
}

// LargeObjects works through a savepoint: pgx makes its LargeObjects only from a transaction of its own type.
func (tx *handlerTx) LargeObjects() pgx.LargeObjects {
	inner, err := tx.Conn().BeginTx(context.Background(), pgx.TxOptions{BeginQuery: "savepoint onceq_lo", CommitQuery: "release savepoint onceq_lo"})
	if err != nil {
		return pgx.LargeObjects{}
	}
	return inner.LargeObjects()
}

func (tx *handlerTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := tx.open(ctx); err != nil {
		return nil, err
	}
	return tx.raw.Prepare(ctx, name, sql)
}

// Conn gives the connection inside of the transaction. Where that cannot be opened nothing works on it: nothing may be
// written through it that commits by itself.
func (tx *handlerTx) Conn() *pgx.Conn {
	if err := tx.open(tx.ctx); err != nil && !tx.raw.IsClosed() && tx.raw.PgConn().TxStatus() == 'I' {
		tx.failed = err
		ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
		_ = tx.raw.Close(ctx)
		cancel()
	}
	return tx.raw
}

func (tx *handlerTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if !tx.opened {
		r, err := tx.first(ctx, tx.query(sql, args)...)
		if err != nil {
			return pgconn.CommandTag{}, err
		}
		if r != nil {
			tag, err := r.Exec()
			if closing := r.Close(); err == nil {
				err = closing
			}
			return tag, err
		}
	}
	return tx.conn.Exec(ctx, sql, args...)
}

func (tx *handlerTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if !tx.opened {
		r, err := tx.first(ctx, tx.query(sql, args)...)
		if err != nil {
			return noRows{err}, err
		}
		if r != nil {
			rows, err := r.Query()
			f := &firstRows{Rows: rows, results: r}
			if err != nil {
				f.Close()
			}
			return f, err
		}
	}
	return tx.conn.Query(ctx, sql, args...)
}

func (tx *handlerTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if tx.opened {
		return tx.conn.QueryRow(ctx, sql, args...)
	}
	rows, _ := tx.Query(ctx, sql, args...)
	return oneRow{rows}
}

func (tx *handlerTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if !tx.opened {
		queries := b.QueuedQueries
		if !tx.pipelines {
			queries = nil
		}
		r, err := tx.first(ctx, queries...)
		if err != nil {
			return noResults{err}
		}
		if r != nil {
			return r
		}
		// Where they were sent before in vain, they remember statements that were not prepared.
		for i, sent := range b.QueuedQueries {
			b.QueuedQueries[i] = &pgx.QueuedQuery{SQL: sent.SQL, Arguments: sent.Arguments, Fn: sent.Fn}
		}
	}
	return tx.conn.SendBatch(ctx, b)
}

// firstRows are rows that came with the opening of the transaction: when they end, so does its batch.
type firstRows struct {
	pgx.Rows
	results pgx.BatchResults
	closing error
}

func (f *firstRows) Close() {
	f.Rows.Close()
	f.closing = f.results.Close()
}

func (f *firstRows) Err() error {
	if err := f.Rows.Err(); err != nil {
		return err
	}
	return f.closing
}

func (f *firstRows) Next() bool {
	if f.Rows.Next() {
		return true
	}
	f.Close()
	return false
}

func (f *firstRows) Scan(dest ...any) error {
	err := f.Rows.Scan(dest...)
	if err != nil {
		f.Close()
	}
	return err
}

func (f *firstRows) Values() ([]any, error) {
	values, err := f.Rows.Values()
	if err != nil {
		f.Close()
	}
	return values, err
}

// oneRow is the first of some rows, as pgx's own Row has it.
type oneRow struct{ rows pgx.Rows }

func (r oneRow) Scan(dest ...any) error {
	defer r.rows.Close()
	for _, d := range dest {
		if _, ok := d.(*pgtype.DriverBytes); ok {
			return errors.New("cannot scan into *pgtype.DriverBytes from QueryRow")
		}
	}
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// noRows are those of a query that was not sent.
type noRows struct{ err error }

func (n noRows) Close()                                       {}
func (n noRows) Err() error                                   { return n.err }
func (n noRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (n noRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (n noRows) Next() bool                                   { return false }
func (n noRows) Scan(...any) error                            { return n.err }
func (n noRows) Values() ([]any, error)                       { return nil, n.err }
func (n noRows) RawValues() [][]byte                          { return nil }
func (n noRows) Conn() *pgx.Conn                              { return nil }
func (n noRows) TypeMap() *pgtype.Map                         { return nil }

// noResults are those of a batch that was not sent.
type noResults struct{ err error }

func (n noResults) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, n.err }
func (n noResults) Query() (pgx.Rows, error)         { return noRows(n), n.err }
func (n noResults) QueryRow() pgx.Row                { return oneRow{noRows(n)} }
func (n noResults) Close() error                     { return n.err }
func (n noResults) Tx() pgx.Tx                       { return nil }

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
	_, err := s.handlerTx.Exec(ctx, command+s.name)
	return err
}
