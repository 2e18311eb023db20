package onceqhttp

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// TxHandler answers a request inside a transaction, which the middleware ends. An answer that is stored commits it, whatever
// its status: a handler that wants to undo its writes and yet have its 4xx replayed uses tx.Begin, which gives a savepoint. One
// that is not stored (Config.Outcome), and an error, roll everything back. An error is answered with 500.
type TxHandler func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error

const (
	lockWait     = 100 * time.Millisecond // for the transaction of a request that is in flight
	endTimeout   = 5 * time.Second        // for a rollback
	transactions = 3                      // that are tried where Postgres asks for another one
)

// HandlerTx runs h once for each key, in a READ COMMITTED transaction of pool, which must lead to the queue's database. The
// key, the answer and whatever the handler does in the transaction commit together. Where Postgres asks for it (40001, 40P01)
// the handler is run again, in a new transaction.
//
// The handler's connection is cut off when it idles in the transaction for longer than Config.Timeout, so that a process that
// froze does not keep its key. Requests without a key, safe ones and where it is Optional others, run in a transaction too:
// read whole before it begins, up to Config.MaxRequest, buffered, committed with an answer that would be stored and rolled back with
// any other, and never run again.
//
// A handler that ends the transaction by a statement of its own is wrong, and nobody knows what it did: the key is held, see
// CodeHeld, and a request without one is answered with CodeUnknown.
func (m *Middleware) HandlerTx(pool *pgxpool.Pool, h TxHandler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, plain := m.admit(w, r)
		if a == nil && !plain {
			return
		}
		in, try := r, 1
		if plain {
			r.Body = http.MaxBytesReader(w, r.Body, int64(m.cfg.MaxRequest))
			body, ok := m.body(w, r, "Its body")
			if !ok {
				return
			}
			in, try = withBody(r.WithContext(r.Context()), body), transactions // nothing tells whether its first run was undone
		}
		ctx, cancel := m.deadline(context.WithoutCancel(r.Context()))
		defer cancel()
		for {
			if answer := m.transaction(ctx, w, in, pool, h, a, try); answer != nil {
				answer()
				return
			}
			try++
		}
	})
}

// begin opens the transaction. The server cuts off a client that idles in it for too long.
func (m *Middleware) begin() pgx.TxOptions {
	begin := "begin isolation level read committed read write"
	if m.cfg.Timeout > 0 {
		idle := min(max(1, m.cfg.Timeout.Milliseconds()), math.MaxInt32)
		begin += "; set local idle_in_transaction_session_timeout = " + strconv.FormatInt(idle, 10)
	}
	return pgx.TxOptions{BeginQuery: begin}
}

// transaction tries once. It gives what writes the answer, when the transaction has ended and its connection is back: a slow
// client keeps neither. nil is to try again. a is nil for a request without a key.
func (m *Middleware) transaction(ctx context.Context, w http.ResponseWriter, r *http.Request, pool *pgxpool.Pool, h TxHandler, a *admitted, try int) (answer func()) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		m.log(r, "no connection", err)
		return func() { m.unavailable(w, a != nil) }
	}
	defer conn.Release()
	tx, err := conn.BeginTx(ctx, m.begin())
	if err != nil {
		m.log(r, "no transaction", err)
		return func() { m.unavailable(w, a != nil) }
	}
	var xid string     // of the transaction that has the claim, once there is one
	ended := false     // by the handler
	committed := false // here, or perhaps
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		_ = tx.Rollback(ctx) // after a commit it does nothing; one that fails closes the connection
		if xid != "" && !committed && !ended {
			query := conn.QueryRow
			if conn.Conn().IsClosed() {
				conn.Release()
				query = pool.QueryRow
			}
			var status string
			err := query(ctx, `select coalesce(pg_xact_status($1::text::xid8), '')`, xid).Scan(&status)
			ended = err == nil && status == "committed" // and begun another one
		}
		if !ended {
			return
		}
		conn.Release()
		answer = m.ended(ctx, w, r, a) // also where the handler has panicked
	}()
	in := r.WithContext(ctx)
	if a != nil {
		c, id, err := m.claimTx(ctx, tx, a.fence)
		if err != nil || c.Replayed {
			var stored *Response
			switch {
			case errors.Is(err, onceq.ErrHeld), errors.Is(err, onceq.ErrUncertain): // and this request has held it, or notes that it asked
				if failed := tx.Commit(ctx); failed != nil {
					m.log(r, "the key could not be held", failed)
				}
			case err == nil:
				stored, err = decode(c)
			}
			return func() { m.answer(w, r, stored, err) }
		}
		a.Claim, xid = c, id
		in = a.in(ctx)
	}
	rec := newRecorder(w.Header(), m.cfg.MaxResponse)
	defer removeFiles(in, r)
	err = func() error {
		defer func() { ended = conn.Conn().PgConn().TxStatus() == 'I' }()
		return h(rec, in, handlerTx{tx})
	}()
	if ended {
		return nil // see above
	}
	if err != nil {
		return m.failed(w, r, a, err, try)
	}
	first, stored := rec.response(m.cfg.StoredHeader)
	switch {
	case rec.tooLarge:
		return func() { m.responseTooLarge(w, nothingDone) }
	case m.cfg.Outcome(first.Status) != Store:
		return func() { first.replace(w, r) }
	}
	if a != nil {
		if err := a.Claim.Complete(ctx, tx, stored); err != nil {
			var invalid *onceq.InvalidError
			if errors.As(err, &invalid) {
				return func() { m.responseTooLarge(w, nothingDone) }
			}
			return m.failed(w, r, a, err, try)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		// An error of the statement is a rollback. What ends the session (FATAL) may come when the commit has been made.
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" || errors.Is(err, pgx.ErrTxCommitRollback) ||
			pgconn.SafeToRetry(err) { // it was not sent
			return m.failed(w, r, a, err, try)
		}
		committed = true
		m.log(r, "whether the transaction has committed is unknown", err)
		if a == nil {
			return func() { m.unknown(w) }
		}
		return func() { m.uncertain(w) }
	}
	committed = true
	return func() { first.replace(w, r) }
}

const nothingDone = "Nothing was done."

func (m *Middleware) failed(w http.ResponseWriter, r *http.Request, a *admitted, err error, try int) (answer func()) {
	if onceq.IsRetryable(err) && try < transactions {
		return nil
	}
	m.log(r, "rolled back", err)
	return func() { m.rolledBack(w, a != nil) }
}

// claimTx takes the key inside the transaction, which undoes that when it is rolled back, and gives the transaction's id.
// Whoever has the key in a transaction that is still open is waited for only a moment, and then in flight.
func (m *Middleware) claimTx(ctx context.Context, tx pgx.Tx, f *onceq.Fence) (c *onceq.FenceLease, xid string, err error) {
	const limit = `select current_setting('lock_timeout'), set_config('lock_timeout', $1::text, true)`
	var before string
	if err := tx.QueryRow(ctx, limit, strconv.FormatInt(lockWait.Milliseconds(), 10)).Scan(&before, nil); err != nil {
		return nil, "", err
	}
	c, err = f.Claim(ctx, tx)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "55P03" { // lock_not_available
		return nil, "", &onceq.InFlightError{}
	}
	if err != nil || c.Replayed {
		return c, "", err
	}
	const restore = `select set_config('lock_timeout', $1::text, true), pg_current_xact_id()::text`
	err = tx.QueryRow(ctx, restore, before).Scan(nil, &xid)
	return c, xid, err
}

var errEnded = errors.New("onceqhttp: the handler ended the middleware's transaction by a statement of its own: return nil to commit it with the answer, an error to roll it back")

// ended gives the answer to a request whose handler has ended the transaction: what it did is unknown. A key is held,
// whatever the policy: what HandlerTx does is not deduplicated by anybody, so it must not be run again.
func (m *Middleware) ended(ctx context.Context, w http.ResponseWriter, r *http.Request, a *admitted) (answer func()) {
	m.log(r, "what was done is unknown", errEnded)
	if a == nil {
		return func() { m.unknown(w) }
	}
	err := m.hold(ctx, a)
	if errors.Is(err, onceq.ErrHeld) || errors.Is(err, onceq.ErrInFlight) { // or somebody else has taken it since
		return func() { m.answer(w, r, nil, err) }
	}
	m.log(r, "the key could not be held", err)
	return func() { m.unknown(w) }
}

// hold makes a request's key wait for a person: the claim where the handler has committed it, a new one where it has not.
func (m *Middleware) hold(ctx context.Context, a *admitted) error {
	spec := a.spec
	spec.Policy = onceq.Hold()
	f, err := m.q.Fence(spec)
	if err != nil {
		return err
	}
	c := a.Claim
	for range 2 {
		if err := c.Uncertain(ctx, nil, errEnded); err != nil && !errors.Is(err, onceq.ErrLeaseLost) {
			return err
		}
		if c, err = f.Claim(ctx, nil); err != nil {
			return err // that it is held
		}
	}
	return errors.New("onceqhttp: somebody else has taken the key and done with it")
}

// handlerTx is the transaction as the handler has it: without its end.
type handlerTx struct{ pgx.Tx }

var errOwnTx = errors.New("onceqhttp: the middleware ends this transaction: return nil to commit it with the answer, an error to roll it back")

func (handlerTx) Commit(context.Context) error   { return errOwnTx }
func (handlerTx) Rollback(context.Context) error { return errOwnTx }
