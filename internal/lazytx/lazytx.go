// Package lazytx is a transaction that is opened together with the first statement of whoever uses it, and committed together
// with the last statements of whoever owns it, each in one round trip.
//
// The owner makes it (New), lends its Handle, a pgx.Tx, to a handler, takes it back (Close), asks whether it can be committed
// (Unfit), ends it (Commit or Undo) and gives its connection back (Release). What opens it can raise, so that no statement
// of the handler runs. While the handler idles, the owner keeps the server from cutting it off (Ping).
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

// Config is what a transaction is to its owner, who makes it, ends it, and lends it to a handler.
type Config struct {
	Pool  *pgxpool.Pool
	Begin string // the statement that begins it

	// Open gives the statements behind Begin. They raise where the transaction must not be. idle is how long the
	// connection may idle, in milliseconds, "" for as long as the server says. One of them puts into id what Postgres calls
	// the transaction.
	Open func(idle string, id *string) []Statement

	// Refused gives what the handler is told where err says that one of these has raised, and nil for any other error.
	Refused func(err error) error

	// Status asks on another connection what became of a transaction: pg_xact_status, once the server is done with it.
	Status func(ctx context.Context, id string) (status string, err error)

	EndedByOwner error // what a handler gets that tries to end the transaction

	Idle      time.Duration // how long the connection may idle at most, while Ping is called more often than that
	IdleAlone time.Duration // and once the handler has the connection itself; 0 for as long as the server says
	Pipelines bool          // see Pipelines

	Owner any // the owner's, see Handle.Owner
}

// Statement is one of the owner's.
type Statement struct {
	SQL  string
	Args []any
	Row  []any // where its one row goes; nil for none
}

// queue adds it to a batch.
func (s Statement) queue(b *pgx.Batch) { b.Queue(s.SQL, s.Args...) }

// read reads its result.
func (s Statement) read(results pgx.BatchResults) (tag pgconn.CommandTag, err error) {
	if s.Row != nil {
		return tag, results.QueryRow().Scan(s.Row...)
	}
	return results.Exec()
}

// Tx is a transaction that a handler uses. It is opened together with the handler's first statement and committed
// together with the owner's last ones, each in one round trip, which pgx's own type has no room for.
type Tx struct {
	cfg  Config
	ctx  context.Context // the handler's, for what has no context of its own
	conn *pgxpool.Conn   // nil once it is closed and there is no other
	raw  *pgx.Conn       // the same

	// The handler's uses of the transaction and Ping hold mu while they read or write these. Before the first use and
	// after Close they are the owner's, who needs no lock.
	replaced   bool // the connection is the second one
	opened     bool
	id         string // of the opened transaction, to Postgres
	failed     error  // why it could not be opened
	refused    bool   // because what opens it raised
	notBegun   bool   // because of the database, and not of a context that ended
	conflict   error  // a statement of it that Postgres wants run again
	savepoints int
	unended    []unended

	root  Handle
	mu    sync.Mutex               // held by each use of the connection
	gate  sync.Mutex               // held for a moment before mu by those who do not wait for mu, and all the while by ping
	cut   atomic.Bool              // a use of it did not end by itself
	late  atomic.Bool              // closed because the handler did not return
	link  atomic.Pointer[pgx.Conn] // raw, for whoever does not have mu
	large map[*Handle]pgx.Tx       // what the handles' LargeObjects work through

	// Guarded by mu.
	pings    int  // empty statements whose answers were not read
	shared   bool // the handler has the connection and uses it without mu
	released bool // and may idle for IdleAlone

	pinged time.Time // see PingDue
}

// New gives a transaction that is not open yet, with the connection for it. Release gives that back.
func New(ctx context.Context, cfg Config) (*Tx, error) {
	tx := &Tx{cfg: cfg, ctx: ctx}
	tx.root.tx = tx
	err := tx.acquire(ctx)
	tx.pinged = time.Now()
	return tx, err
}

// Handle is the transaction as the handler has it.
func (tx *Tx) Handle() pgx.Tx { return &tx.root }

// IdleLimit is a time as idle_in_transaction_session_timeout has it.
func IdleLimit(timeout time.Duration) string {
	if timeout <= 0 {
		return ""
	}
	return strconv.FormatInt(min(max(1, timeout.Milliseconds()), math.MaxInt32), 10)
}

// idleLimit is how long the connection may idle in the transaction, in milliseconds; "" for as long as the server says.
func (tx *Tx) idleLimit() string {
	limit := tx.cfg.Idle
	if tx.shared {
		limit = tx.cfg.IdleAlone
	}
	return IdleLimit(limit)
}

// share says that the handler uses the connection without mu from now on. Then no ping is possible, and the limit is
// IdleAlone.
func (tx *Tx) share() {
	tx.shared = true
	if tx.released || !tx.opened || tx.raw.IsClosed() || tx.raw.PgConn().IsBusy() || tx.raw.PgConn().TxStatus() != 'T' {
		return // the opening does it, or the next use
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

// PingDue reports whether it is time for a Ping, every so often. Its caller sees to it that it is called once at a time.
func (tx *Tx) PingDue(now time.Time, every time.Duration) bool {
	if now.Sub(tx.pinged) < every {
		return false
	}
	tx.pinged = now
	return true
}

// Ping keeps the server from taking a live handler that idles in its transaction for a frozen one. It sends an empty
// statement, which changes nothing, and does not wait for the answer: that is read before the next statement is sent. So
// it is possible too while rows are open which the server has sent and nobody has read.
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
		_ = pg.Conn().Close() // some of it may be on its way
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

// GiveUp closes the connection under a handler that does not return, so that the job's row is free, and ends what the server
// does for it.
func (tx *Tx) GiveUp() {
	tx.gate.Lock()
	defer tx.gate.Unlock()
	if tx.root.closed.Load() || tx.late.Load() {
		return
	}
	tx.late.Store(true)
	pg := tx.link.Load().PgConn()
	_ = pg.Conn().Close()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = pg.CancelRequest(ctx)
	}()
}

// try is mu.TryLock, which does not fail because of a ping.
func (tx *Tx) try() bool {
	tx.gate.Lock()
	defer tx.gate.Unlock()
	return tx.mu.TryLock()
}

// patience is how long what must be done is waited for, in a context that has ended.
const patience = 5 * time.Second

func (tx *Tx) acquire(ctx context.Context) (err error) {
	if tx.conn, err = tx.cfg.Pool.Acquire(ctx); err != nil {
		return fmt.Errorf("onceq: a connection for the handler's transaction: %w", err)
	}
	tx.raw = tx.conn.Conn()
	tx.link.Store(tx.raw)
	return nil
}

// PoolClosed reports whether err says that the pool is closed. pgxpool passes on its own pool's error for that.
func PoolClosed(err error) bool { return errors.Is(err, puddle.ErrClosedPool) }

func (tx *Tx) replace(ctx context.Context) error {
	tx.replaced = true
	tx.conn.Release()
	return tx.acquire(ctx)
}

// first opens the transaction with these statements behind, and gives the results of those. It gives neither results
// nor an error where there are none, or where they could not be prepared: then they are to be sent as they are.
func (tx *Tx) first(ctx context.Context, queries ...*pgx.QueuedQuery) (pgx.BatchResults, error) {
	if tx.failed != nil {
		return nil, tx.failed
	}
	if err := ctx.Err(); err != nil {
		return nil, err // nothing was sent, and another context may do
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
		// It was idle for long and is dead, or pgx has closed it because an argument does not encode. Nothing was
		// committed, so another connection may do it all.
		if err := tx.replace(ctx); err != nil {
			tx.notBegun, tx.failed = ctx.Err() == nil, err
			return nil, err
		}
		return tx.first(ctx)
	case len(queries) > 0 && !pg.IsClosed() && pg.TxStatus() == 'I':
		return tx.first(ctx) // nothing was run; what is wrong with them, if it is they, shows when they are sent alone
	case tx.cfg.Refused(err) != nil:
		tx.refused = true
		tx.failed = tx.cfg.Refused(err)
	default:
		tx.notBegun = ctx.Err() == nil
		tx.failed = fmt.Errorf("onceq: opening the handler's transaction: %w", err)
	}
	return nil, tx.failed
}

// query gives a statement as one of a batch, or none where a batch would treat it in another way: without arguments it
// may be several statements, and a batch knows no options.
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

// Pipelines says whether a handler's first statement may travel with what opens its transaction. In the simple protocol
// one string of SQL may be several statements, whose results a batch cannot tell apart. A tracer of queries alone would
// not hear of it.
func Pipelines(c *pgx.ConnConfig) bool {
	if c.DefaultQueryExecMode == pgx.QueryExecModeSimpleProtocol {
		return false
	}
	_, batches := c.Tracer.(pgx.BatchTracer)
	return c.Tracer == nil || batches
}

// Why a handler's transaction cannot be committed although the handler wants it.
var (
	errTxLost     = errors.New("onceq: the connection of the handler's transaction was lost, or closed because a statement was cancelled: it is rolled back")
	errTxFailed   = errors.New("onceq: a statement in the handler's transaction failed and the handler returned no error: it is rolled back")
	errTxBusy     = errors.New("onceq: the handler did not close the rows or the batch's results of its transaction: it is rolled back; close them before returning")
	errTxInUse    = errors.New("onceq: the handler returned while another goroutine was using its transaction: it is rolled back; wait for such goroutines before returning")
	errSavepoint  = errors.New("onceq: a savepoint of the handler's transaction could not be committed or rolled back, so all of it is rolled back")
	errTxLate     = errors.New("onceq: the handler did not return within a lease of the end of its context, so the connection of its transaction was closed: it is rolled back")
	ErrRolledBack = errors.New("onceq: the handler rolled the worker's transaction back by a statement of its own: return an error to roll it back")
)

// Close takes the transaction from the handler: later uses get pgx.ErrTxClosed. A statement that another goroutine is at
// is cut off, together with its connection.
func (tx *Tx) Close() {
	tx.root.closed.Store(true)
	for began := time.Now(); !tx.try(); time.Sleep(time.Millisecond) {
		tx.cut.Store(true)
		if time.Since(began) > patience {
			return // it is not the connection that it waits for
		}
		_ = tx.link.Load().PgConn().Conn().Close()
	}
	defer tx.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if tx.settle(ctx) != nil || tx.late.Load() {
		_ = tx.raw.Close(ctx)
	}
}

// Unfit says why the transaction cannot be committed. One that the handler committed by itself is fit: what the handler
// did is done, and the completion follows.
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

// Undo rolls back, and says of err, for which that is done, whether the handler had committed by itself, and whether Postgres
// wants the transaction run again.
func (tx *Tx) Undo(err error) (committed, conflict bool) {
	aborted := tx.opened && tx.raw.PgConn().TxStatus() == 'E' // by a statement on tx.Conn() too, which nobody notes
	committed = tx.opened && tx.committed()
	return committed, (tx.conflict != nil || aborted) && sqlstate.Retryable(err)
}

// committed rolls back what is open and reports whether the transaction that the worker opened was committed, which only
// the handler can have done.
func (tx *Tx) committed() bool {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
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
	// Its connection is gone, but the server may still be at its last statement.
	status, err := tx.cfg.Status(ctx, tx.id)
	return err == nil && status == "committed"
}

// Opened reports whether it was opened, and Open whether the connection is inside of a transaction still: the handler may
// have ended the one that was opened, and begun another one.
func (tx *Tx) Opened() bool { return tx.opened }

func (tx *Tx) Open() bool { return tx.opened && tx.raw.PgConn().TxStatus() != 'I' }

// ID is what Postgres calls the transaction that was opened.
func (tx *Tx) ID() string { return tx.id }

// Refused is what the handler was told where what opens the transaction raised, and NotBegun why it could not be begun,
// where that was the database and no context that ended. Otherwise they are nil.
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

// Commit sends the owner's last statements and the commit behind them, in a new transaction where none is open. sure is
// false where the answer got lost and it may have been committed.
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

// Release gives the connection back, with nothing of a transaction left on it. pgxpool closes one that is still
// inside of a transaction, so this saves a connection and never more.
func (tx *Tx) Release() {
	if tx.conn == nil {
		return
	}
	tx.Close() // once more, for a handler that ended its goroutine
	ctx, cancel := context.WithTimeout(context.Background(), patience)
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

// note keeps a conflict in mind, which the handler may return in an error of its own.
func (tx *Tx) note(err error) {
	if err != nil && sqlstate.Retryable(err) {
		tx.conflict = err
	}
}

// open opens the transaction for what cannot travel with it.
func (tx *Tx) open(ctx context.Context) error {
	if tx.opened {
		return nil
	}
	_, err := tx.first(ctx)
	return err
}

// rawConn gives the connection inside of the transaction. Where that cannot be opened nothing works on it: nothing may be
// written through it that commits by itself.
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

// closedConn gives a connection that is closed: nil would end the process of whoever uses it.
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
