package onceqhttp

import (
	"context"
	"errors"
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
// buffered, committed with an answer that would be stored and rolled back with any other, and never run again.
func (m *Middleware) HandlerTx(pool *pgxpool.Pool, h TxHandler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, plain := m.admit(w, r)
		if a == nil && !plain {
			return
		}
		ctx, cancel := m.deadline(context.WithoutCancel(r.Context()))
		defer cancel()
		try := 1
		if plain { // its body can be read only once
			try = transactions
		}
		for {
			if answer := m.transaction(ctx, w, r, pool, h, a, try); answer != nil {
				answer()
				return
			}
			try++
		}
	})
}

// transaction tries once. It gives what writes the answer, when the transaction has ended and its connection is back: a slow
// client keeps neither. nil is to try again. a is nil for a request without a key.
func (m *Middleware) transaction(ctx context.Context, w http.ResponseWriter, r *http.Request, pool *pgxpool.Pool, h TxHandler, a *admitted, try int) (answer func()) {
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		m.log(r, "no transaction", err)
		return func() { m.unavailable(w) }
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		_ = tx.Rollback(ctx) // after a commit it does nothing; one that fails closes the connection
	}()
	in := r.WithContext(ctx)
	var c *onceq.Claim
	if a != nil {
		if c, err = m.claimTx(ctx, tx, a.fence); err != nil || c.Replayed {
			var stored *Response
			if err == nil {
				stored, err = decode(c)
			}
			return func() { m.answer(w, r, stored, err) }
		}
		a.Claim = c
		in = a.in(ctx)
	}
	rec := newRecorder(w.Header(), m.cfg.MaxResponse)
	if err := h(rec, in, handlerTx{tx}); err != nil {
		return m.failed(w, r, err, try)
	}
	first, stored := rec.response(m.cfg.StoredHeader)
	switch {
	case rec.tooLarge:
		return func() { m.responseTooLarge(w, nothingDone) }
	case m.cfg.Outcome(first.Status) != Store:
		return func() { first.replace(w, r) }
	}
	if c != nil {
		if err := c.Complete(ctx, tx, stored); err != nil {
			var invalid *onceq.InvalidError
			if errors.As(err, &invalid) {
				return func() { m.responseTooLarge(w, nothingDone) }
			}
			return m.failed(w, r, err, try)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		// An error of the statement is a rollback. What ends the session (FATAL) may come when the commit has been made.
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" || errors.Is(err, pgx.ErrTxCommitRollback) {
			return m.failed(w, r, err, try)
		}
		m.log(r, "whether the transaction has committed is unknown", err)
		return func() { m.uncertain(w) }
	}
	return func() { first.replace(w, r) }
}

const nothingDone = "Nothing was done."

func (m *Middleware) failed(w http.ResponseWriter, r *http.Request, err error, try int) (answer func()) {
	if onceq.IsRetryable(err) && try < transactions {
		return nil
	}
	m.log(r, "rolled back", err)
	return func() { m.rolledBack(w) }
}

// claimTx takes the key inside the transaction, which undoes that when it is rolled back. Whoever has it in a transaction
// that is still open is waited for only a moment, and then in flight.
func (m *Middleware) claimTx(ctx context.Context, tx pgx.Tx, f *onceq.Fence) (*onceq.Claim, error) {
	const begin = `
select current_setting('lock_timeout'), set_config('lock_timeout', $1::text, true),
       set_config('idle_in_transaction_session_timeout', coalesce(nullif($2::text, ''), current_setting('idle_in_transaction_session_timeout')), true)`
	idle := ""
	if m.cfg.Timeout > 0 {
		idle = strconv.FormatInt(max(1, m.cfg.Timeout.Milliseconds()), 10)
	}
	var before string
	if err := tx.QueryRow(ctx, begin, strconv.FormatInt(lockWait.Milliseconds(), 10), idle).Scan(&before, nil, nil); err != nil {
		return nil, err
	}
	c, err := f.Claim(ctx, tx)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "55P03" { // lock_not_available
		return nil, &onceq.InFlightError{}
	}
	if err != nil || c.Replayed {
		return c, err
	}
	_, err = tx.Exec(ctx, `select set_config('lock_timeout', $1::text, true)`, before)
	return c, err
}

// handlerTx is the transaction as the handler has it: without its end.
type handlerTx struct{ pgx.Tx }

var errOwnTx = errors.New("onceqhttp: the middleware ends this transaction: return nil to commit it with the answer, an error to roll it back")

func (handlerTx) Commit(context.Context) error   { return errOwnTx }
func (handlerTx) Rollback(context.Context) error { return errOwnTx }
