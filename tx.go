package onceq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
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
	side   *pgxpool.Pool // asked what became of it when its own connection is lost
	h      *Handler
	leases []*Lease
	ctx    context.Context // the handler's, for what has no context of its own
	conn   *pgxpool.Conn   // nil once it is closed and there is no other
	raw    *pgx.Conn       // the same

	lease      time.Duration // the worker's
	pipelines  bool          // see pipelines
	replaced   bool          // the connection is the second one
	opened     bool
	id         string // of the opened transaction, to Postgres
	failed     error  // why it could not be opened
	lost       bool   // because a lease is gone
	notBegun   bool   // because of the database, and not of a context that ended
	conflict   error  // a statement of it that Postgres wants run again
	savepoints int
	unended    []unended

	root  txHandle
	mu    sync.Mutex               // held by each use of the connection
	gate  sync.Mutex               // held for a moment before mu by those who do not wait for mu, and all the while by ping
	cut   atomic.Bool              // a use of it did not end by itself
	late  atomic.Bool              // closed because the handler did not return
	link  atomic.Pointer[pgx.Conn] // raw, for whoever does not have mu
	large map[*txHandle]pgx.Tx     // what the handles' LargeObjects work through

	// Guarded by mu.
	pings    int  // empty statements whose answers were not read
	shared   bool // the handler has the connection and uses it without mu
	released bool // and idles as long as its Timeout says

	pinged time.Time // the ping loop's
}

// limitIdling lets the server cut off a client that freezes inside the transaction, after $1 milliseconds of idling,
// so that it cannot keep the jobs' rows: those of a worker's lease, because ping keeps a live one from idling. Without $1 the
// server's own setting stays.
const limitIdling = `case when $1::text <> '' then set_config('idle_in_transaction_session_timeout', $1::text, true) end`

// idleLimit is that number for a kind's timeout.
func idleLimit(timeout time.Duration) string {
	if timeout <= 0 {
		return ""
	}
	return strconv.FormatInt(min(max(1, timeout.Milliseconds()), math.MaxInt32), 10)
}

// lockJobs locks the rows of a handler's jobs by their guards, in id order, for the rest of its transaction: from
// then on nobody can claim them, expired or not. It raises where a guard does not hold. The last column says which
// transaction it is.
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
       case when (select count(*) from locked) < cardinality($2::bigint[]) then onceq.lease_lost(($2::bigint[])[1]) end,
       pg_current_xact_id()::text`

// lockJob is the same for one job, which needs no guard of its plan.
const lockJob = `
select ` + limitIdling + `,
       case when not exists (
         select from onceq.jobs where id = $2::bigint and claims = $3::int and holder = $4::bigint
            for no key update) then onceq.lease_lost($2::bigint) end,
       pg_current_xact_id()::text`

// newHandlerTx gives a transaction that is not open yet, with the connection for it.
func (x *executor) newHandlerTx(ctx context.Context, leases []*Lease, h *Handler) (*handlerTx, error) {
	tx := &handlerTx{q: x.q, side: x.db, h: h, leases: leases, ctx: ctx, lease: x.lease, pipelines: x.pipelines}
	tx.root.tx = tx
	return tx, tx.acquire(ctx)
}

// idleLimit is how long the connection may idle in the transaction, in milliseconds; "" for as long as the server says.
func (tx *handlerTx) idleLimit() string {
	limit := max(tx.lease, 2*time.Second) // well above the ticks of the ping loop
	if tx.shared {
		limit = tx.h.timeout
	}
	return idleLimit(limit)
}

// share says that the handler uses the connection without mu from now on. Then no ping is possible, and the limit is the
// kind's Timeout.
func (tx *handlerTx) share() {
	tx.shared = true
	if tx.released || !tx.opened || tx.raw.IsClosed() || tx.raw.PgConn().IsBusy() || tx.raw.PgConn().TxStatus() != 'T' {
		return // the opening does it, or the next use
	}
	to := "default"
	if limit := tx.idleLimit(); limit != "" {
		to = limit
	}
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	_, err := tx.conn.Exec(ctx, "set local idle_in_transaction_session_timeout to "+to)
	tx.released = err == nil
}

// ping keeps the server from taking a live handler that idles in its transaction for a frozen one. It sends an empty
// statement, which changes nothing, and does not wait for the answer: that is read before the next statement is sent. So
// it is possible too while rows are open which the server has sent and nobody has read.
func (tx *handlerTx) ping() {
	tx.gate.Lock()
	defer tx.gate.Unlock()
	if !tx.mu.TryLock() {
		return // in use, so it does not idle
	}
	defer tx.mu.Unlock()
	if tx.root.closed.Load() || !tx.opened || tx.shared || tx.raw.IsClosed() {
		return
	}
	pg := tx.raw.PgConn()
	_ = pg.Conn().SetWriteDeadline(time.Now().Add(time.Second))
	pg.Frontend().SendQuery(&pgproto3.Query{})
	if err := pg.Frontend().Flush(); err != nil {
		_ = pg.Conn().Close() // some of it may be on its way
		return
	}
	_ = pg.Conn().SetWriteDeadline(time.Time{})
	tx.pings++
}

// settle reads the answers to pings. The caller holds mu.
func (tx *handlerTx) settle(ctx context.Context) error {
	for pg := tx.raw.PgConn(); tx.pings > 0 && !pg.IsBusy() && !pg.IsClosed(); {
		msg, err := pg.ReceiveMessage(ctx)
		if err != nil && !pg.IsClosed() {
			return err
		}
		if _, ok := msg.(*pgproto3.ReadyForQuery); ok {
			tx.pings--
		}
	}
	return nil
}

// giveUp closes the connection under a handler that does not return, so that the job's row is free, and ends what the server
// does for it.
func (tx *handlerTx) giveUp() {
	tx.gate.Lock()
	defer tx.gate.Unlock()
	if tx.root.closed.Load() || tx.late.Load() {
		return
	}
	tx.late.Store(true)
	pg := tx.link.Load().PgConn()
	_ = pg.Conn().Close()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
		defer cancel()
		_ = pg.CancelRequest(ctx)
	}()
}

// try is mu.TryLock, which does not fail because of a ping.
func (tx *handlerTx) try() bool {
	tx.gate.Lock()
	defer tx.gate.Unlock()
	return tx.mu.TryLock()
}

func (tx *handlerTx) acquire(ctx context.Context) (err error) {
	if tx.conn, err = tx.q.pool.Acquire(ctx); err != nil {
		return fmt.Errorf("onceq: a connection for the handler's transaction: %w", err)
	}
	tx.raw = tx.conn.Conn()
	tx.link.Store(tx.raw)
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
	idle := tx.idleLimit()
	tx.released = tx.shared
	b := &pgx.Batch{QueuedQueries: make([]*pgx.QueuedQuery, 0, 4+len(queries))}
	b.Queue(tx.begin())
	locking := 1
	if l := tx.leases[0]; len(tx.leases) == 1 {
		b.Queue(tx.q.sql(lockJob), idle, l.ID, l.claims, l.holder)
	} else {
		ids, claims, holders := guards(tx.leases)
		b.Queue(keepPlans)
		locking = b.Len()
		b.Queue(tx.q.sql(lockJobs), idle, ids, claims, holders)
		b.Queue(restorePlans)
	}
	opening := b.Len()
	b.QueuedQueries = append(b.QueuedQueries, queries...)
	results := tx.conn.SendBatch(ctx, b)
	var err error
	for n := 0; n < opening && err == nil; n++ {
		if n == locking {
			err = results.QueryRow().Scan(nil, nil, &tx.id)
		} else {
			_, err = results.Exec()
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

// sameTx is a column more for a statement that completes jobs behind what a handler did in a transaction: it raises where
// the handler rolled that back by a statement of its own and is in another one, and gives 1 where it committed it.
func sameTx(id, job string) string {
	return `,
       case when ` + id + `::text <> pg_current_xact_id()::text
            then case when pg_xact_status(` + id + `::text::xid8) = 'committed' then 1 else onceq.lease_lost(` + job + `) end end`
}

// inTx are the completions of one job with sameTx.
var inTx = map[string]string{
	completeOne:        completeOne + sameTx("$6", "$1::bigint"),
	completeOneKept:    completeOneKept + sameTx("$7", "$1::bigint"),
	completeOneUnkeyed: completeOneUnkeyed + sameTx("$4", "$1::bigint"),
}

// checkTx is the same as a statement of its own, in front of those for many jobs.
var checkTx = `select null` + sameTx("$1", "$2::bigint")

// Why a handler's transaction cannot be committed although the handler wants it.
var (
	errTxLost       = errors.New("onceq: the connection of the handler's transaction was lost, or closed because a statement was cancelled: it is rolled back")
	errTxFailed     = errors.New("onceq: a statement in the handler's transaction failed and the handler returned no error: it is rolled back")
	errTxBusy       = errors.New("onceq: the handler did not close the rows or the batch's results of its transaction: it is rolled back; close them before returning")
	errTxInUse      = errors.New("onceq: the handler returned while another goroutine was using its transaction: it is rolled back; wait for such goroutines before returning")
	errSavepoint    = errors.New("onceq: a savepoint of the handler's transaction could not be committed or rolled back, so all of it is rolled back")
	errTxLate       = errors.New("onceq: the handler did not return within a lease of the end of its context, so the connection of its transaction was closed: it is rolled back")
	errTxRolledBack = errors.New("onceq: the handler rolled the worker's transaction back by a statement of its own: return an error to roll it back")
)

// close takes the transaction from the handler: later uses get pgx.ErrTxClosed. A statement that another goroutine is at
// is cut off, together with its connection.
func (tx *handlerTx) close() {
	tx.root.closed.Store(true)
	for began := time.Now(); !tx.try(); time.Sleep(time.Millisecond) {
		tx.cut.Store(true)
		if time.Since(began) > rollbackTimeout {
			return // it is not the connection that it waits for
		}
		_ = tx.link.Load().PgConn().Conn().Close()
	}
	defer tx.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	if tx.settle(ctx) != nil || tx.late.Load() {
		_ = tx.raw.Close(ctx)
	}
}

// unfit says why the transaction cannot be committed. One that the handler committed by itself is fit: what the handler
// did is done, and the completion follows.
func (tx *handlerTx) unfit() error {
	switch pg := tx.raw.PgConn(); {
	case tx.late.Load():
		return errTxLate
	case tx.cut.Load():
		return errTxInUse
	case pg.IsClosed():
		return errTxLost
	case pg.IsBusy():
		return errTxBusy
	case (pg.TxStatus() == 'E' || tx.failed != nil) && tx.conflict != nil:
		return fmt.Errorf("%w (%w)", errTxFailed, tx.conflict)
	case pg.TxStatus() == 'E' || tx.failed != nil:
		return errTxFailed
	case len(tx.unended) > 0:
		return fmt.Errorf("%w: %w", errSavepoint, tx.unended[0].err)
	case pg.TxStatus() == 'I' && tx.opened && !tx.committed():
		return errTxRolledBack
	}
	return nil
}

// undo rolls back and gives the error with what it means: a *committedError where the handler had committed by itself, a
// *conflictError where Postgres wants the transaction run again.
func (tx *handlerTx) undo(err error) error {
	aborted := tx.opened && tx.raw.PgConn().TxStatus() == 'E' // by a statement on tx.Conn() too, which nobody notes
	switch {
	case tx.opened && tx.committed():
		return &committedError{err}
	case (tx.conflict != nil || aborted) && IsRetryable(err) && decidesNothing(err):
		return &conflictError{err}
	}
	return err
}

// committed rolls back what is open and reports whether the transaction that the worker opened was committed, which only
// the handler can have done.
func (tx *handlerTx) committed() bool {
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	if pg := tx.raw.PgConn(); !tx.cut.Load() && !pg.IsClosed() && !pg.IsBusy() {
		ask := "select pg_xact_status('" + tx.id + "')"
		if pg.TxStatus() != 'I' {
			ask = "rollback; " + ask
		}
		results, err := pg.Exec(ctx, ask).ReadAll()
		if err == nil && len(results) > 0 {
			rows := results[len(results)-1].Rows
			return len(rows) == 1 && string(rows[0][0]) == "committed"
		}
	}
	// Its connection is gone, but the server may still be at its last statement: then this waits for the job's row.
	const read = `select (select 1 from onceq.jobs where id = $1::bigint for no key update), coalesce(pg_xact_status($2::text::xid8), '')`
	var status string
	err := tx.q.guarded(ctx, tx.side, read, []any{tx.leases[0].ID, tx.id}, nil, &status)
	return err == nil && status == "committed"
}

// commit sends the last statement, which raises where a lease is gone, and the commit behind it. many says that it is
// for many jobs and so needs a guard of its plan. sure is false where the answer got lost and it
// may have been committed.
func (tx *handlerTx) commit(ctx context.Context, many bool, last statement) (sure bool, err error) {
	own := tx.opened && tx.raw.PgConn().TxStatus() != 'I'
	b := &pgx.Batch{}
	if !own {
		b.Queue(tx.begin())
	}
	if many {
		b.Queue(hotPlans)
	}
	check := -1
	if own {
		check = b.Len()
		if many {
			b.Queue(tx.q.sql(checkTx), tx.id, tx.leases[0].ID)
		} else {
			last = statement{inTx[last.sql], append(last.args, tx.id)}
		}
	}
	b.Queue(tx.q.sql(last.sql), last.args...)
	b.Queue("commit")
	r := tx.conn.SendBatch(ctx, b)
	var tag pgconn.CommandTag
	var other *int32
	for n := 0; n < b.Len() && err == nil; n++ {
		if n == check {
			err = r.QueryRow().Scan(nil, &other)
		} else {
			tag, err = r.Exec()
		}
	}
	if closing := r.Close(); err == nil {
		err = closing
	}
	switch {
	case err == nil && tag.String() != "COMMIT":
		err = fmt.Errorf("onceq: commit answered %s: %w", tag, pgx.ErrTxCommitRollback)
	case err == nil && (other != nil || tx.opened && !own):
		l := tx.leases[0]
		tx.q.log.Error("onceq: the worker's transaction was committed inside the handler (a commit in a statement, or a transaction begun on tx.Conn()); "+
			"the job is completed, but not together with what it wrote: use savepoints (tx.Begin), or Handle", slog.String("kind", l.Kind), slog.Int64("job", l.ID))
	case own && leaseLost(err): // the jobs' rows are locked, so it is another transaction
		err = errTxRolledBack
	}
	sure = err == nil || !tx.raw.IsClosed()
	if err != nil && own && sure {
		if IsRetryable(err) {
			tx.conflict = err
		}
		err = tx.undo(err)
	}
	return sure, err
}

// release gives the connection back, with nothing of a transaction left on it. pgxpool closes one that is still
// inside of a transaction, so this saves a connection and never more.
func (tx *handlerTx) release() {
	if tx.conn == nil {
		return
	}
	tx.close() // once more, for a handler that ended its goroutine
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	if !tx.cut.Load() && !tx.raw.IsClosed() && tx.raw.PgConn().TxStatus() != 'I' {
		_, _ = tx.conn.Exec(ctx, "rollback")
	}
	for _, large := range tx.large {
		_ = large.Commit(ctx)
	}
	tx.conn.Release()
	tx.conn = nil
}

// closedTx answers for handles that are closed, with pgx.ErrTxClosed.
var closedTx = func() pgx.Tx {
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(b, pgx.ErrTxClosed).Tx()
}()

var errTxConcurrent = errors.New("onceq: another goroutine is using the handler's transaction: conn busy")

// txHandle is the transaction as a handler has it, or a savepoint in it.
type txHandle struct {
	tx     *handlerTx
	outer  *txHandle
	name   string // of the savepoint; "" for the worker's transaction
	closed atomic.Bool
}

var _ pgx.Tx = (*txHandle)(nil)

// enter begins a use of the connection, which ends with the unlocking of tx.mu. As with a connection of pgx, one that
// meets another gets an error.
func (h *txHandle) enter(ctx context.Context) error {
	if !h.tx.try() {
		return errTxConcurrent
	}
	if h.isClosed() {
		h.tx.mu.Unlock()
		return pgx.ErrTxClosed
	}
	if h.tx.pings > 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		if h.tx.settle(ctx) != nil {
			_ = h.tx.raw.Close(ctx) // the use says that it is
		}
	}
	if h.tx.shared {
		h.tx.share()
	}
	return nil
}

func (h *txHandle) isClosed() bool {
	for ; h != nil; h = h.outer {
		if h.closed.Load() {
			return true
		}
	}
	return false
}

// note keeps a conflict in mind, which the handler may return in an error of its own.
func (tx *handlerTx) note(err error) {
	if err != nil && IsRetryable(err) {
		tx.conflict = err
	}
}

// Begin opens a savepoint.
func (h *txHandle) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := h.enter(ctx); err != nil {
		return nil, err
	}
	defer h.tx.mu.Unlock()
	h.tx.savepoints++
	s := &txHandle{tx: h.tx, outer: h, name: fmt.Sprintf("onceq_%d", h.tx.savepoints)}
	if _, err := h.tx.exec(ctx, "savepoint "+s.name); err != nil {
		return nil, err
	}
	return s, nil
}

func (h *txHandle) Commit(ctx context.Context) error { return h.end(ctx, "release savepoint ", false) }

// Rollback works in a context that has ended too, which is why it is called, mostly.
func (h *txHandle) Rollback(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	return h.end(ctx, "rollback to savepoint ", true)
}

func (h *txHandle) end(ctx context.Context, command string, undoes bool) error {
	if err := h.enter(ctx); err != nil {
		return err
	}
	defer h.tx.mu.Unlock()
	if h.outer == nil {
		return errOwnTx
	}
	h.closed.Store(true)
	if large := h.tx.large[h]; large != nil {
		_ = large.Commit(ctx)
		delete(h.tx.large, h)
	}
	_, err := h.tx.exec(ctx, command+h.name)
	switch {
	case err != nil && h.tx.raw.PgConn().TxStatus() != 'E': // what was written in it is in the transaction still
		h.tx.unended = append(h.tx.unended, unended{h, err})
	case undoes:
		h.tx.unended = slices.DeleteFunc(h.tx.unended, func(u unended) bool { return u.inside(h) })
	}
	if h.tx.shared && err == nil {
		h.tx.released = false // if it was done since the savepoint, that has undone it
		h.tx.share()
	}
	return err
}

// unended is a savepoint whose Commit or Rollback failed.
type unended struct {
	*txHandle
	err error
}

func (u unended) inside(outer *txHandle) bool {
	for h := u.txHandle; h != nil; h = h.outer {
		if h == outer {
			return true
		}
	}
	return false
}

// open opens the transaction for what cannot travel with it.
func (tx *handlerTx) open(ctx context.Context) error {
	if tx.opened {
		return nil
	}
	_, err := tx.first(ctx)
	return err
}

func (h *txHandle) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if err := h.enter(ctx); err != nil {
		return 0, err
	}
	defer h.tx.mu.Unlock()
	if err := h.tx.open(ctx); err != nil {
		return 0, err
	}
	n, err := h.tx.conn.CopyFrom(ctx, table, columns, src)
	h.tx.note(err)
	return n, err
}

// LargeObjects works through a transaction of pgx's own type, which alone makes them: one that sends nothing to begin and
// to end.
func (h *txHandle) LargeObjects() pgx.LargeObjects {
	if h.enter(h.tx.ctx) != nil {
		return closedTx.LargeObjects()
	}
	defer h.tx.mu.Unlock()
	if h.tx.large[h] == nil {
		inner, err := h.tx.rawConn().BeginTx(context.Background(), pgx.TxOptions{BeginQuery: ";", CommitQuery: ";"})
		if err != nil {
			return closedTx.LargeObjects()
		}
		if h.tx.large == nil {
			h.tx.large = make(map[*txHandle]pgx.Tx)
		}
		h.tx.large[h] = inner
	}
	return h.tx.large[h].LargeObjects()
}

func (h *txHandle) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := h.enter(ctx); err != nil {
		return nil, err
	}
	defer h.tx.mu.Unlock()
	if err := h.tx.open(ctx); err != nil {
		return nil, err
	}
	return h.tx.raw.Prepare(ctx, name, sql)
}

// Conn gives the connection inside of the transaction: not to be used by goroutines that outlive the handler. Afterwards
// it gives one that is closed.
func (h *txHandle) Conn() *pgx.Conn {
	h.tx.mu.Lock()
	defer h.tx.mu.Unlock()
	if h.tx.root.closed.Load() {
		return h.tx.q.closedConn()
	}
	if err := h.tx.settle(h.tx.ctx); err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
		defer cancel()
		_ = h.tx.raw.Close(ctx)
	}
	return h.tx.rawConn()
}

// rawConn gives the connection inside of the transaction. Where that cannot be opened nothing works on it: nothing may be
// written through it that commits by itself.
func (tx *handlerTx) rawConn() *pgx.Conn {
	tx.share()
	if err := tx.open(tx.ctx); err != nil && !tx.raw.IsClosed() && tx.raw.PgConn().TxStatus() == 'I' {
		tx.failed = err
		ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
		_ = tx.raw.Close(ctx)
		cancel()
	}
	return tx.raw
}

// closedConn gives a connection that is closed: nil would end the process of whoever uses it.
func (q *Queue) closedConn() *pgx.Conn {
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, q.pool.Config().ConnConfig)
	if err != nil {
		return nil
	}
	_ = conn.Close(ctx)
	return conn
}

func (h *txHandle) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := h.enter(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer h.tx.mu.Unlock()
	return h.tx.exec(ctx, sql, args...)
}

func (tx *handlerTx) exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	defer func() { tx.note(err) }()
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

func (h *txHandle) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := h.enter(ctx); err != nil {
		return failedRows(err), err
	}
	defer h.tx.mu.Unlock()
	tx := h.tx
	if !tx.opened {
		r, err := tx.first(ctx, tx.query(sql, args)...)
		if err != nil {
			return failedRows(err), err
		}
		if r != nil {
			rows, err := r.Query()
			t := &txRows{rows: rows, tx: tx, results: r}
			if err != nil {
				t.close()
			}
			return t, err
		}
	}
	rows, err := tx.conn.Query(ctx, sql, args...)
	tx.note(err)
	return &txRows{rows: rows, tx: tx}, err
}

func (h *txHandle) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, _ := h.Query(ctx, sql, args...)
	return oneRow{rows}
}

var errBatchBegins = errors.New("onceq: the worker's transaction has begun: Batch.BeginTx cannot be used in it")

func (h *txHandle) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := h.enter(ctx); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	defer h.tx.mu.Unlock()
	if failed := pgx.FailedBatchResults(b, errBatchBegins); failed.Tx() != nil {
		return failed
	}
	tx := h.tx
	if !tx.opened {
		queries := b.QueuedQueries
		if !tx.pipelines {
			queries = nil
		}
		r, err := tx.first(ctx, queries...)
		if err != nil {
			return pgx.FailedBatchResults(b, err)
		}
		if r != nil {
			return &txResults{results: r, tx: tx}
		}
		// Where they were sent before in vain, they remember statements that were not prepared.
		for i, sent := range b.QueuedQueries {
			b.QueuedQueries[i] = &pgx.QueuedQuery{SQL: sent.SQL, Arguments: sent.Arguments, Fn: sent.Fn}
		}
	}
	return &txResults{results: tx.conn.SendBatch(ctx, b), tx: tx}
}

// txRows are rows of a handler's transaction. Those that came with its opening end the batch with it.
type txRows struct {
	rows    pgx.Rows
	tx      *handlerTx
	results pgx.BatchResults // nil for rows of their own
	closing error
}

// enter is false where the worker has ended the transaction: the connection is somebody else's.
func (r *txRows) enter() bool {
	r.tx.mu.Lock()
	if !r.tx.root.closed.Load() {
		return true
	}
	r.tx.mu.Unlock()
	r.closing = pgx.ErrTxClosed
	return false
}

func (r *txRows) close() {
	r.rows.Close()
	if r.results != nil {
		r.closing = r.results.Close()
	}
	r.tx.note(r.Err())
}

func (r *txRows) Close() {
	if r.enter() {
		defer r.tx.mu.Unlock()
		r.close()
	}
}

func (r *txRows) Err() error {
	if err := r.rows.Err(); err != nil {
		return err
	}
	return r.closing
}

func (r *txRows) Next() bool {
	if !r.enter() {
		return false
	}
	defer r.tx.mu.Unlock()
	if r.rows.Next() {
		return true
	}
	r.close()
	return false
}

func (r *txRows) Scan(dest ...any) error {
	if !r.enter() {
		return pgx.ErrTxClosed
	}
	defer r.tx.mu.Unlock()
	err := r.rows.Scan(dest...)
	if err != nil {
		r.close()
	}
	return err
}

func (r *txRows) Values() ([]any, error) {
	if !r.enter() {
		return nil, pgx.ErrTxClosed
	}
	defer r.tx.mu.Unlock()
	values, err := r.rows.Values()
	if err != nil {
		r.close()
	}
	return values, err
}

func (r *txRows) CommandTag() pgconn.CommandTag                { return r.rows.CommandTag() }
func (r *txRows) FieldDescriptions() []pgconn.FieldDescription { return r.rows.FieldDescriptions() }
func (r *txRows) RawValues() [][]byte                          { return r.rows.RawValues() }
func (r *txRows) Conn() *pgx.Conn                              { return r.tx.root.Conn() }
func (r *txRows) TypeMap() *pgtype.Map                         { return r.rows.TypeMap() }

// failedRows are those of a query that was not sent.
func failedRows(err error) pgx.Rows {
	rows, _ := pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
	return rows
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

// txResults are those of a batch in a handler's transaction.
type txResults struct {
	results pgx.BatchResults
	tx      *handlerTx
}

func (r *txResults) enter() error {
	if !r.tx.try() {
		return errTxConcurrent
	}
	if r.tx.root.closed.Load() {
		r.tx.mu.Unlock()
		return pgx.ErrTxClosed
	}
	return nil
}

func (r *txResults) Exec() (pgconn.CommandTag, error) {
	if err := r.enter(); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer r.tx.mu.Unlock()
	tag, err := r.results.Exec()
	r.tx.note(err)
	return tag, err
}

func (r *txResults) Query() (pgx.Rows, error) {
	if err := r.enter(); err != nil {
		return failedRows(err), err
	}
	defer r.tx.mu.Unlock()
	rows, err := r.results.Query()
	r.tx.note(err)
	return &txRows{rows: rows, tx: r.tx}, err
}

func (r *txResults) QueryRow() pgx.Row {
	rows, _ := r.Query()
	return oneRow{rows}
}

func (r *txResults) Close() error {
	if err := r.enter(); err != nil {
		return err
	}
	defer r.tx.mu.Unlock()
	err := r.results.Close()
	r.tx.note(err)
	return err
}

func (r *txResults) Tx() pgx.Tx { return nil }
