package onceqhttp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// TxHandler answers a request inside a transaction that the middleware ends. An answer that is stored commits the
// transaction, whatever its status. To undo writes and still have a 4xx replayed, use tx.Begin, which makes a
// savepoint; if one can be neither committed nor rolled back, all is rolled back. A statement that may fail needs one too: a transaction
// with a failed statement in it cannot commit. An answer that is not stored (Config.Outcome) and an error roll everything back. The answer to an error is
// 500.
type TxHandler func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error

const (
	lockWait     = 100 * time.Millisecond // how long to wait for a request that is in flight
	endTimeout   = 5 * time.Second        // of a rollback
	transactions = 3                      // how many to try if Postgres asks for a retry
)

// HandlerTx runs h once for each key, in a READ COMMITTED transaction of pool. pool must lead to the queue's database.
// The key, the answer and everything that the handler does in the transaction commit together. If Postgres asks for a
// retry (40001, 40P01) and the handler returns that error, or the commit gets it, the handler runs again in a new transaction.
//
// The server closes the handler's connection if it idles in the transaction for longer than Config.Timeout, so a frozen
// process does not keep its key. Requests with a safe method, and requests without a key if they are Optional, run in a
// transaction too. Their body is read before the transaction begins, up to Config.MaxRequest, and their answer is
// buffered. The transaction commits if the answer would be stored, and is rolled back otherwise. They never run again.
//
// A handler must not end the transaction with a statement of its own: nobody would know what it did. Its key is held
// (see CodeHeld), and a request without a key is answered with CodeUnknown.
func (m *Middleware) HandlerTx(pool *pgxpool.Pool, h TxHandler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		own, try := copied(r), 1
		defer removeFiles(own, r)
		a, plain := m.admit(w, own)
		if a == nil && !plain {
			return
		}
		if plain {
			own.Body = http.MaxBytesReader(w, own.Body, int64(m.cfg.MaxRequest))
			body, ok := m.body(w, own, "Its body")
			if !ok {
				return
			}
			own, try = withBody(own, body), transactions // no retry: without a key nothing shows whether the first run was undone
		}
		ctx, cancel := m.deadline(context.WithoutCancel(r.Context()))
		defer cancel()
		for {
			if answer := m.transaction(ctx, w, own, pool, h, a, try); answer != nil {
				answer()
				return
			}
			try++
		}
	})
}

// begin returns the options of the transaction. The server closes the connection of a client that idles in it for too
// long: for the Timeout, or for what the role or the pool says if that is less.
func (m *Middleware) begin() pgx.TxOptions {
	begin := "begin isolation level read committed read write"
	if m.cfg.Timeout > 0 {
		idle := min(max(1, m.cfg.Timeout.Milliseconds()), math.MaxInt32)
		begin += fmt.Sprintf(limitIdling, idle)
	}
	return pgx.TxOptions{BeginQuery: begin}
}

const limitIdling = `; select pg_catalog.set_config(s.name, '%d', true)
  from (values ('idle_in_transaction_session_timeout'::text)) s (name)
 where pg_catalog.current_setting(s.name) = '0'::text or pg_catalog.current_setting(s.name)::interval > '%[1]d ms'::interval`

// transaction tries once. It returns a function that writes the answer after the transaction has ended and its
// connection is back in the pool, so a slow client keeps neither. nil means try again. a is nil for a request without a
// key.
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
	var xid string     // of the transaction with the claim
	ended := false     // the handler has ended the transaction
	committed := false // the middleware has committed it, or may have
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		_ = tx.Rollback(ctx) // no effect after a commit; if it fails, the connection is closed
		if xid != "" && !committed && !ended {
			query := conn.QueryRow
			if conn.Conn().IsClosed() {
				conn.Release()
				query = pool.QueryRow
			}
			var status string
			err := query(ctx, `select coalesce(pg_catalog.pg_xact_status($1::text::xid8), '')`, xid).Scan(&status)
			ended = err == nil && status == "committed" // the handler has committed it and begun another one
		}
		if !ended {
			return
		}
		conn.Release()
		answer = m.ended(ctx, w, r, a) // also after a panic of the handler
	}()
	in := r.WithContext(ctx)
	if a != nil {
		c, id, err := m.claimTx(ctx, tx, a.fence)
		if err != nil || c.Replayed {
			var stored *Response
			switch {
			case errors.Is(err, onceq.ErrHeld), errors.Is(err, onceq.ErrUncertain): // keeps the hold that this request has set, or the note that it asked
				if failed := tx.Commit(ctx); failed != nil {
					m.log(r, "the key could not be held", failed)
				}
			case err == nil:
				stored, err = decode(c)
			}
			return func() { m.answer(w, r, stored, err) }
		}
		a.Lease, xid = c, id
		in = a.in(ctx)
	}
	rec, own := newRecorder(w.Header(), m.cfg.MaxResponse), newHandlerTx(tx)
	defer removeFiles(in, r)
	err = func() error {
		defer func() { ended = conn.Conn().PgConn().TxStatus() == 'I' }()
		return h(rec, in, own)
	}()
	if ended {
		return nil // the deferred function sets the answer
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
	if err := own.unfit(); err != nil {
		return m.failed(w, r, a, err, transactions)
	}
	if a != nil {
		if err := a.Lease.Complete(ctx, tx, stored); err != nil {
			var invalid *onceq.InvalidError
			if errors.As(err, &invalid) {
				return func() { m.responseTooLarge(w, nothingDone) }
			}
			return m.failed(w, r, a, err, try)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		// An ERROR means a rollback. What ends the session (FATAL) may come after the commit is made.
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" || errors.Is(err, pgx.ErrTxCommitRollback) ||
			pgconn.SafeToRetry(err) { // the commit was not sent
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

// claimTx takes the key inside the transaction and returns the transaction's id; a rollback undoes the claim. It waits
// only a moment for another open transaction that has the key, and then reports the key as in flight.
func (m *Middleware) claimTx(ctx context.Context, tx pgx.Tx, f *onceq.Fence) (c *onceq.FenceLease, xid string, err error) {
	const limit = `select pg_catalog.current_setting('lock_timeout'), pg_catalog.set_config('lock_timeout', $1::text, true), pg_catalog.current_setting('citus.version', true) is not null`
	wait := strconv.FormatInt(lockWait.Milliseconds(), 10)
	var before string
	var citus bool
	if err = tx.QueryRow(ctx, limit, wait).Scan(&before, nil, &citus); err == nil && citus {
		err = limitNodes(ctx, tx, wait)
	}
	if err != nil {
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
	const restore = `select pg_catalog.set_config('lock_timeout', $1::text, true), pg_current_xact_id()::text`
	if err = tx.QueryRow(ctx, restore, before).Scan(nil, &xid); err == nil && citus {
		err = limitNodes(ctx, tx, before)
	}
	return c, xid, err
}

// limitNodes sets the lock_timeout of a transaction on the nodes of Citus too, which sends them "set local" alone, if it is told to.
func limitNodes(ctx context.Context, tx pgx.Tx, to string) error {
	for _, set := range []string{"citus.propagate_set_commands to local", "lock_timeout to '" + to + "'", "citus.propagate_set_commands to default"} {
		if _, err := tx.Exec(ctx, "set local "+set); err != nil {
			return err
		}
	}
	return nil
}

var errEnded = errors.New("onceqhttp: the handler ended the middleware's transaction with a statement of its own: return nil to commit it with the answer, an error to roll it back")

// ended answers a request whose handler has ended the transaction. What the handler did is unknown. The key is held,
// whatever the policy: nothing deduplicates what a HandlerTx handler does, so it must not run again.
func (m *Middleware) ended(ctx context.Context, w http.ResponseWriter, r *http.Request, a *admitted) (answer func()) {
	m.log(r, "what was done is unknown", errEnded)
	if a == nil {
		return func() { m.unknown(w) }
	}
	err := m.hold(ctx, a)
	if errors.Is(err, onceq.ErrHeld) || errors.Is(err, onceq.ErrInFlight) { // or another request has taken it since
		return func() { m.answer(w, r, nil, err) }
	}
	m.log(r, "the key could not be held", err)
	return func() { m.unknown(w) }
}

// hold makes a request's key wait for a person. It uses the claim if the handler has committed it, and makes a new one
// if not.
func (m *Middleware) hold(ctx context.Context, a *admitted) error {
	spec := a.spec
	spec.Policy = onceq.Hold()
	f, err := m.q.Fence(spec)
	if err != nil {
		return err
	}
	c := a.Lease
	for range 2 {
		if err := c.Uncertain(ctx, nil, errEnded); err != nil && !errors.Is(err, onceq.ErrLeaseLost) {
			return err
		}
		if c, err = f.Claim(ctx, nil); err != nil {
			return err // ErrHeld, if all went well
		}
	}
	return errors.New("onceqhttp: another request has taken the key and finished")
}
