// Package lazytx is a transaction that a handler uses and that somebody else owns. It is opened together with the handler's
// first statement, and committed together with the owner's last statements, each in one round trip.
//
// The owner makes it (New), lends its Handle, a pgx.Tx, to a handler, takes it back (Close), asks whether it can be
// committed (Unfit), ends it (Commit or Undo), and gives its connection back (Release). The statements that open it may
// raise an error; then no statement of the handler runs. While the handler idles, the owner keeps the server from closing
// the connection (Ping).
package lazytx

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/puddle/v2"

	"github.com/onceq/onceq/internal/sqlstate"
)

// Config is what the owner says about its transaction.
type Config struct {
	Pool  *pgxpool.Pool
	Begin string // the statement that begins it

	// Open returns the statements that follow Begin. They raise an error if the transaction must not be opened. idle is how
	// long the connection may idle, in milliseconds; "" leaves that to the server. One of the statements writes Postgres's
	// name for the transaction to id.
	Open func(idle string, id *string) []Statement

	// Refused returns the handler's error if err was raised by one of these statements, and nil for any other error.
	Refused func(err error) error

	// Committed asks on another connection whether a transaction was committed, once the server is done with it. ended says
	// that the handler is known to have ended it. Otherwise the server may have lost it (a stop, a promoted standby), and
	// may have given its number to another one.
	Committed func(ctx context.Context, id string, ended bool) (bool, error)

	Wait time.Duration // how long New waits for a connection at most

	EndedByOwner error // the error of a handler that tries to end the transaction

	Idle       time.Duration // how long the connection may idle at most; Ping is called more often than that
	IdleShared time.Duration // the same once the handler has the connection itself; 0 leaves it to the server
	Pipelines  bool          // see Pipelines

	Owner any // see Handle.Owner
}

// Statement is a statement of the owner's.
type Statement struct {
	SQL  string
	Args []any
	Row  []any // where its one row is scanned; nil for none

	// Raw gets its one row in place of Row, as the server sent it and until it returns. That costs less than scanning.
	Raw func(row [][]byte)
}

// queue adds the statement to a batch.
func (s Statement) queue(b *pgx.Batch) { b.Queue(s.SQL, s.Args...) }

// read reads the statement's result.
func (s Statement) read(results pgx.BatchResults) (tag pgconn.CommandTag, err error) {
	if s.Raw != nil {
		rows, err := results.Query()
		if err != nil {
			return tag, err
		}
		found := rows.Next()
		if found {
			s.Raw(rows.RawValues())
		}
		if rows.Close(); rows.Err() == nil && !found {
			return tag, pgx.ErrNoRows
		}
		return rows.CommandTag(), rows.Err()
	}
	if s.Row != nil {
		return tag, results.QueryRow().Scan(s.Row...)
	}
	return results.Exec()
}

// Tx is a transaction that a handler uses. pgx's own type cannot open a transaction together with a first statement, or
// commit it together with last ones.
type Tx struct {
	cfg  Config
	ctx  context.Context // the handler's, for methods that get no context
	conn *pgxpool.Conn   // nil once it is closed and there is no other
	raw  *pgx.Conn       // the same

	// The handler's uses of the transaction, and Ping, hold mu while they read or write these. Before the first use and
	// after Close only the owner uses them, without a lock.
	replaced   bool // the connection is the second one
	opened     bool
	id         string // of the opened transaction, as Postgres names it
	failed     error  // why it could not be opened
	refused    bool   // a statement that opens it raised an error
	notBegun   bool   // the database is the reason, not a context that ended
	conflict   error  // the error of a statement in it, if Postgres wants the transaction run again
	savepoints int
	unended    []unended

	root  Handle
	mu    useLock                  // held by each use of the connection
	gate  sync.Mutex               // held for a moment before mu by those who do not wait for mu, and by ping all the time
	cut   atomic.Bool              // a use of it did not end by itself
	late  atomic.Bool              // closed because the handler did not return
	link  atomic.Pointer[pgx.Conn] // raw, for code that does not hold mu
	large map[*Handle]pgx.Tx       // transactions of pgx's own, for the handles' LargeObjects

	// Guarded by mu.
	pings    int  // empty statements whose answers were not read
	shared   bool // the handler has the connection and uses it without mu
	released bool // and its limit is IdleShared by now

	pinged time.Time // see PingDue
}

// useLock is a mutex that says since when it is locked.
type useLock struct {
	sync.Mutex
	since atomic.Int64 // in nanoseconds; 0 while it is not locked
}

func (l *useLock) Lock() {
	l.Mutex.Lock()
	l.since.Store(time.Now().UnixNano())
}

func (l *useLock) TryLock() bool {
	locked := l.Mutex.TryLock()
	if locked {
		l.since.Store(time.Now().UnixNano())
	}
	return locked
}

func (l *useLock) Unlock() {
	l.since.Store(0)
	l.Mutex.Unlock()
}

// InUse says since when the connection has been in use, in nanoseconds, or 0 if it is not, and the number of the
// server's process for it.
func (tx *Tx) InUse() (since int64, pid uint32) {
	return tx.mu.since.Load(), tx.link.Load().PgConn().PID()
}

// Cut closes the connection under whatever uses it, because the network has lost it.
func (tx *Tx) Cut() { _ = tx.link.Load().PgConn().Conn().Close() }

// New returns a transaction that is not open yet, and acquires the connection for it. Release gives the connection back.
func New(ctx context.Context, cfg Config) (*Tx, error) {
	tx := &Tx{cfg: cfg, ctx: ctx}
	tx.root.tx = tx
	within, cancel := context.WithTimeout(ctx, cfg.Wait)
	defer cancel()
	err := tx.acquire(within)
	if err != nil && ctx.Err() == nil && within.Err() != nil {
		err = fmt.Errorf("%w: none of the pool's was free for %s", err, cfg.Wait)
	}
	tx.pinged = time.Now()
	return tx, err
}

// Handle returns the transaction for the handler.
func (tx *Tx) Handle() pgx.Tx { return &tx.root }

// IdleLimit returns a time in the form of idle_in_transaction_session_timeout.
func IdleLimit(timeout time.Duration) string {
	if timeout <= 0 {
		return ""
	}
	return strconv.FormatInt(min(max(1, timeout.Milliseconds()), math.MaxInt32), 10)
}

// idleLimit returns how long the connection may idle in the transaction, in milliseconds; "" leaves that to the server.
func (tx *Tx) idleLimit() string {
	limit := tx.cfg.Idle
	if tx.shared {
		limit = tx.cfg.IdleShared
	}
	return IdleLimit(limit)
}

// share notes that the handler uses the connection without mu from now on. No ping is possible then, so the limit becomes
// IdleShared.
func (tx *Tx) share() {
	tx.shared = true
	if tx.released || !tx.opened || tx.raw.IsClosed() || tx.raw.PgConn().IsBusy() || tx.raw.PgConn().TxStatus() != 'T' {
		return // the statement that opens the transaction sets the limit, or the next use does
	}
	to := "default"
	if limit := tx.idleLimit(); limit != "" {
		to = limit
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := tx.conn.Exec(ctx, "set local idle_in_transaction_session_timeout to "+to)
	tx.released = err == nil
}

// PingDue reports whether the last Ping is at least every ago. Calls must not overlap.
func (tx *Tx) PingDue(now time.Time, every time.Duration) bool {
	if now.Sub(tx.pinged) < every {
		return false
	}
	tx.pinged = now
	return true
}

// Ping keeps the server from taking a live handler that idles in its transaction for a frozen one. It sends an empty
// statement, which changes nothing, and does not wait for the answer. The answer is read before the next statement is sent.
// So Ping also works while the handler has rows open that the server has sent and nobody has read.
func (tx *Tx) Ping() {
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
		_ = pg.Conn().Close() // part of the statement may have been sent
		return
	}
	_ = pg.Conn().SetWriteDeadline(time.Time{})
	tx.pings++
}

// settle reads the answers to pings. The caller holds mu.
func (tx *Tx) settle(ctx context.Context) error {
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

// GiveUp closes the connection of a handler that does not return, and asks the server to stop what it does for it. Then the
// job's row is free.
func (tx *Tx) GiveUp() {
	tx.gate.Lock()
	defer tx.gate.Unlock()
	if tx.root.closed.Load() || tx.late.Load() {
		return
	}
	tx.late.Store(true)
	go stop(tx.link.Load().PgConn())
}

// stop asks the server to stop what it does over a connection, and then closes it. In this order: a pooler knows
// nothing any more of a connection that is closed, and lets its statement run on.
func stop(pg *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // the network may have lost the server
	defer cancel()
	_ = pg.CancelRequest(ctx)
	_ = pg.Conn().Close()
}

// try is mu.TryLock, but a ping does not make it fail.
func (tx *Tx) try() bool {
	tx.gate.Lock()
	defer tx.gate.Unlock()
	return tx.mu.TryLock()
}

// patience is how long to wait for things that must be done although their context has ended.
const patience = 5 * time.Second

// acquire gets a connection. The pool asks one that has been idle whether it is alive, and waits for the answer.
// Where the network has lost it there is none: then another one is asked for, and the idle ones are dropped.
func (tx *Tx) acquire(ctx context.Context) (err error) {
	for pool := tx.cfg.Pool; ; {
		soon, cancel := context.WithTimeout(ctx, patience)
		tx.conn, err = pool.Acquire(soon)
		late := soon.Err() != nil
		cancel()
		if err == nil || !late || ctx.Err() != nil {
			break
		}
		if pool.Stat().IdleConns() > 0 {
			pool.Reset()
		}
	}
	if err != nil {
		return fmt.Errorf("onceq: a connection for the handler's transaction: %w", err)
	}
	tx.raw = tx.conn.Conn()
	tx.link.Store(tx.raw)
	return nil
}

// PoolClosed reports whether err says that the pool is closed. pgxpool returns the error of the pool inside it.
func PoolClosed(err error) bool { return errors.Is(err, puddle.ErrClosedPool) }

func (tx *Tx) replace(ctx context.Context) error {
	tx.replaced = true
	tx.conn.Release()
	return tx.acquire(ctx)
}

// first opens the transaction together with queries, and returns the results of queries. It returns neither results nor an
// error if there are no queries, or if they could not be prepared: then the caller has to send them by themselves.
func (tx *Tx) first(ctx context.Context, queries ...*pgx.QueuedQuery) (pgx.BatchResults, error) {
	if tx.failed != nil {
		return nil, tx.failed
	}
	if err := ctx.Err(); err != nil {
		return nil, err // nothing was sent; a call with another context may work
	}
	idle := tx.idleLimit()
	tx.released = tx.shared
	b := &pgx.Batch{QueuedQueries: make([]*pgx.QueuedQuery, 0, 4+len(queries))}
	b.Queue(tx.cfg.Begin)
	own := tx.cfg.Open(idle, &tx.id)
	for _, statement := range own {
		statement.queue(b)
	}
	b.QueuedQueries = append(b.QueuedQueries, queries...)
	results := tx.conn.SendBatch(ctx, b)
	_, err := results.Exec()
	for n := 0; n < len(own) && err == nil; n++ {
		_, err = own[n].read(results)
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
		// The connection idled for long and is dead, or pgx has closed it because an argument does not encode. Nothing was
		// committed, so another connection can do all of it.
		if err := tx.replace(ctx); err != nil {
			tx.notBegun, tx.failed = ctx.Err() == nil, err
			return nil, err
		}
		return tx.first(ctx)
	case len(queries) > 0 && !pg.IsClosed() && pg.TxStatus() == 'I':
		return tx.first(ctx) // nothing ran; if the queries are at fault, that shows when they are sent by themselves
	case tx.cfg.Refused(err) != nil:
		tx.refused = true
		tx.failed = tx.cfg.Refused(err)
	default:
		tx.notBegun = ctx.Err() == nil
		tx.failed = fmt.Errorf("onceq: opening the handler's transaction: %w", err)
	}
	return nil, tx.failed
}

// query returns a statement for a batch. It returns none if a batch would treat the statement in another way: without
// arguments it may be several statements, and a batch has no options.
func (tx *Tx) query(sql string, args []any) []*pgx.QueuedQuery {
	if !tx.cfg.Pipelines || len(args) == 0 {
		return nil
	}
	switch args[0].(type) {
	case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID, pgx.QueryRewriter:
		return nil
	}
	return []*pgx.QueuedQuery{{SQL: sql, Arguments: args}}
}

// Pipelines reports whether a handler's first statement may be sent together with the statements that open its transaction.
// In the simple protocol one string of SQL may be several statements, and a batch cannot tell their results apart. A tracer
// without support for batches would not be told of the statement.
func Pipelines(c *pgx.ConnConfig) bool {
	if c.DefaultQueryExecMode == pgx.QueryExecModeSimpleProtocol {
		return false
	}
	_, batches := c.Tracer.(pgx.BatchTracer)
	return c.Tracer == nil || batches
}

// These say why a handler's transaction cannot be committed although the handler wants it.
var (
	errTxLost     = errors.New("onceq: the connection of the handler's transaction was lost, or closed because a statement was cancelled: it is rolled back")
	errTxFailed   = errors.New("onceq: a statement in the handler's transaction failed and the handler returned no error: the transaction is rolled back; return the error, or run a statement that may fail in a savepoint (tx.Begin)")
	errTxBusy     = errors.New("onceq: the handler did not close the rows or the batch's results of its transaction: it is rolled back; close them before returning")
	errTxInUse    = errors.New("onceq: the handler returned while another goroutine was using its transaction: it is rolled back; wait for such goroutines before returning")
	errSavepoint  = errors.New("onceq: a savepoint of the handler's transaction could not be committed or rolled back, so all of it is rolled back")
	errTxLate     = errors.New("onceq: the handler did not return within a lease of the end of its context, so the connection of its transaction was closed: it is rolled back")
	ErrRolledBack = errors.New("onceq: the handler rolled the worker's transaction back by a statement of its own: return an error to roll it back")
)

// Close takes the transaction from the handler: later uses get pgx.ErrTxClosed. If another goroutine is inside a statement,
// Close cuts that off, together with its connection.
func (tx *Tx) Close() {
	tx.root.closed.Store(true)
	for began := time.Now(); !tx.try(); time.Sleep(time.Millisecond) {
		if !tx.cut.Swap(true) {
			stop(tx.link.Load().PgConn())
		}
		if time.Since(began) > patience {
			return // the use does not wait for the connection
		}
		_ = tx.link.Load().PgConn().Conn().Close()
	}
	defer tx.mu.Unlock()
	if tx.pings == 0 && !tx.late.Load() {
		return // without a timer, which costs each job a microsecond
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if tx.settle(ctx) != nil || tx.late.Load() {
		_ = tx.raw.Close(ctx)
	}
}

// Unfit returns why the transaction cannot be committed, or nil. A transaction that the handler committed by itself is fit:
// what the handler did is done, and the completion follows.
func (tx *Tx) Unfit() error {
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
		return ErrRolledBack
	}
	return nil
}

// Undo rolls back because of err. It reports whether the handler had committed by itself, and whether Postgres wants the
// transaction run again.
func (tx *Tx) Undo(err error) (committed, conflict bool) {
	aborted := tx.opened && tx.raw.PgConn().TxStatus() == 'E' // also by a statement on tx.Conn(), of which this type knows nothing
	committed = tx.opened && tx.committed()
	return committed, (tx.conflict != nil || aborted) && sqlstate.Retryable(err)
}

// committed rolls back what is open, and reports whether the transaction that the worker opened was committed. Only the
// handler can have done that.
func (tx *Tx) committed() bool {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if pg := tx.raw.PgConn(); !tx.cut.Load() && !pg.IsClosed() && !pg.IsBusy() {
		ask := "select pg_catalog.pg_xact_status('" + tx.id + "')"
		if pg.TxStatus() != 'I' {
			ask = "rollback; " + ask
		}
		results, err := pg.Exec(ctx, ask).ReadAll()
		if err == nil && len(results) > 0 {
			rows := results[len(results)-1].Rows
			return len(rows) == 1 && string(rows[0][0]) == "committed"
		}
	}
	// The connection is gone, but the server may still be working on its last statement.
	committed, err := tx.cfg.Committed(ctx, tx.id, tx.raw.PgConn().TxStatus() == 'I')
	return err == nil && committed
}

// Opened reports whether the transaction was opened. Open reports whether the connection is still inside a transaction: the
// handler may have ended the one that was opened, and begun another one.
func (tx *Tx) Opened() bool { return tx.opened }

func (tx *Tx) Open() bool { return tx.opened && tx.raw.PgConn().TxStatus() != 'I' }

// ID is Postgres's name for the transaction that was opened.
func (tx *Tx) ID() string { return tx.id }

// Refused returns the handler's error if a statement that opens the transaction raised one. NotBegun returns why the
// transaction could not be begun, if that is due to the database and not to a context that ended. Otherwise they return
// nil.
func (tx *Tx) Refused() error {
	if tx.refused {
		return tx.failed
	}
	return nil
}

func (tx *Tx) NotBegun() error {
	if tx.notBegun {
		return tx.failed
	}
	return nil
}

// Commit sends the owner's last statements and then a commit, in a new transaction if none is open. sure is false if the
// answer was lost, so that the transaction may have been committed.
func (tx *Tx) Commit(ctx context.Context, last ...Statement) (sure bool, err error) {
	all := slices.Concat(last, []Statement{{SQL: "commit"}})
	own := tx.Open()
	if !own {
		all = slices.Insert(all, 0, Statement{SQL: tx.cfg.Begin})
	}
	b := &pgx.Batch{}
	for _, statement := range all {
		statement.queue(b)
	}
	tx.mu.Lock() // for InUse
	defer tx.mu.Unlock()
	results := tx.conn.SendBatch(ctx, b)
	var tag pgconn.CommandTag
	for n := 0; n < len(all) && err == nil; n++ {
		tag, err = all[n].read(results)
	}
	if closing := results.Close(); err == nil {
		err = closing
	}
	if err == nil && tag.String() != "COMMIT" {
		err = fmt.Errorf("onceq: commit answered %s: %w", tag, pgx.ErrTxCommitRollback)
	}
	sure = err == nil || !tx.raw.IsClosed()
	if own && sure {
		tx.note(err)
	}
	return sure, err
}

// Release gives the connection back, with no transaction left on it. pgxpool would close a connection that is inside a
// transaction, so this only saves a connection.
func (tx *Tx) Release() {
	if tx.conn == nil {
		return
	}
	tx.Close() // again, for a handler that ended its goroutine
	undone := tx.cut.Load() || tx.raw.IsClosed() || tx.raw.PgConn().TxStatus() == 'I'
	if !undone || len(tx.large) > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if !undone {
			_, _ = tx.conn.Exec(ctx, "rollback")
		}
		for _, large := range tx.large {
			_ = large.Commit(ctx)
		}
	}
	tx.conn.Release()
	tx.conn = nil
}

// note remembers a conflict, which the handler may return in an error of its own.
func (tx *Tx) note(err error) {
	if err != nil && sqlstate.Retryable(err) {
		tx.conflict = err
	}
}

// open opens the transaction for a use that cannot be sent together with the opening.
func (tx *Tx) open(ctx context.Context) error {
	if tx.opened {
		return nil
	}
	_, err := tx.first(ctx)
	return err
}

// rawConn returns the connection inside the transaction. If the transaction cannot be opened, the connection is closed:
// nothing may be written through it that commits by itself.
func (tx *Tx) rawConn() *pgx.Conn {
	tx.share()
	if err := tx.open(tx.ctx); err != nil && !tx.raw.IsClosed() && tx.raw.PgConn().TxStatus() == 'I' {
		tx.failed = err
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		_ = tx.raw.Close(ctx)
		cancel()
	}
	return tx.raw
}

// closedConn returns a connection that is closed. With nil, the process of a caller would end.
func (tx *Tx) closedConn() *pgx.Conn {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, tx.cfg.Pool.Config().ConnConfig)
	if err != nil {
		return nil
	}
	_ = conn.Close(ctx)
	return conn
}

func (tx *Tx) exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
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
