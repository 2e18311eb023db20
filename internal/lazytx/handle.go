package lazytx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// closedTx stands in for closed handles: everything returns pgx.ErrTxClosed.
var closedTx = func() pgx.Tx {
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(b, pgx.ErrTxClosed).Tx()
}()

var errTxConcurrent = errors.New("onceq: another goroutine is using the handler's transaction: conn busy")

// Handle is the transaction that a handler gets, or a savepoint in it.
type Handle struct {
	tx     *Tx
	outer  *Handle
	name   string // of the savepoint; "" for the worker's transaction
	closed atomic.Bool
}

var _ pgx.Tx = (*Handle)(nil)

// enter begins a use of the connection, which ends when tx.mu is unlocked. As with a connection of pgx, a use that meets
// another one gets an error.
func (h *Handle) enter(ctx context.Context) error {
	if !h.tx.try() {
		return errTxConcurrent
	}
	if h.isClosed() {
		h.tx.mu.Unlock()
		return pgx.ErrTxClosed
	}
	if h.tx.pings > 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		if h.tx.settle(ctx) != nil {
			_ = h.tx.raw.Close(ctx) // the use itself will report that
		}
	}
	if h.tx.shared {
		h.tx.share()
	}
	return nil
}

func (h *Handle) isClosed() bool {
	for ; h != nil; h = h.outer {
		if h.closed.Load() {
			return true
		}
	}
	return false
}

// Owner returns Config.Owner.
func (h *Handle) Owner() any { return h.tx.cfg.Owner }

// Begin opens a savepoint.
func (h *Handle) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := h.enter(ctx); err != nil {
		return nil, err
	}
	defer h.tx.mu.Unlock()
	h.tx.savepoints++
	s := &Handle{tx: h.tx, outer: h, name: fmt.Sprintf("onceq_%d", h.tx.savepoints)}
	if _, err := h.tx.exec(ctx, "savepoint "+s.name); err != nil {
		return nil, err
	}
	return s, nil
}

func (h *Handle) Commit(ctx context.Context) error { return h.end(ctx, "release savepoint ", false) }

// Rollback works even in a context that has ended. That is mostly when it is called.
func (h *Handle) Rollback(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	return h.end(ctx, "rollback to savepoint ", true)
}

func (h *Handle) end(ctx context.Context, command string, undoes bool) error {
	if err := h.enter(ctx); err != nil {
		return err
	}
	defer h.tx.mu.Unlock()
	if h.outer == nil {
		return h.tx.cfg.EndedByOwner
	}
	h.closed.Store(true)
	if large := h.tx.large[h]; large != nil {
		_ = large.Commit(ctx)
		delete(h.tx.large, h)
	}
	_, err := h.tx.exec(ctx, command+h.name)
	switch {
	case err != nil && h.tx.raw.PgConn().TxStatus() != 'E': // the transaction still contains what was written in the savepoint
		h.tx.unended = append(h.tx.unended, unended{h, err})
	case undoes:
		h.tx.unended = slices.DeleteFunc(h.tx.unended, func(u unended) bool { return u.inside(h) })
	}
	if h.tx.shared && err == nil {
		h.tx.released = false // if the limit was set inside the savepoint, the end of the savepoint has undone it
		h.tx.share()
	}
	return err
}

// unended is a savepoint whose Commit or Rollback failed.
type unended struct {
	*Handle
	err error
}

func (u unended) inside(outer *Handle) bool {
	for h := u.Handle; h != nil; h = h.outer {
		if h == outer {
			return true
		}
	}
	return false
}

func (h *Handle) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
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

// LargeObjects works through a transaction of pgx's own type, because only that type can make them. That transaction sends
// nothing when it begins and ends.
func (h *Handle) LargeObjects() pgx.LargeObjects {
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
			h.tx.large = make(map[*Handle]pgx.Tx)
		}
		h.tx.large[h] = inner
	}
	return h.tx.large[h].LargeObjects()
}

func (h *Handle) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := h.enter(ctx); err != nil {
		return nil, err
	}
	defer h.tx.mu.Unlock()
	if err := h.tx.open(ctx); err != nil {
		return nil, err
	}
	return h.tx.raw.Prepare(ctx, name, sql)
}

// Conn returns the connection inside the transaction. Goroutines that outlive the handler must not use it. After the
// handler has returned, Conn returns a closed connection.
func (h *Handle) Conn() *pgx.Conn {
	h.tx.mu.Lock()
	defer h.tx.mu.Unlock()
	if h.tx.root.closed.Load() {
		return h.tx.closedConn()
	}
	if err := h.tx.settle(h.tx.ctx); err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = h.tx.raw.Close(ctx)
	}
	return h.tx.rawConn()
}

func (h *Handle) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := h.enter(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer h.tx.mu.Unlock()
	return h.tx.exec(ctx, sql, args...)
}

func (h *Handle) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
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

func (h *Handle) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, _ := h.Query(ctx, sql, args...)
	return oneRow{rows}
}

var errBatchBegins = errors.New("onceq: the worker's transaction has begun: Batch.BeginTx cannot be used in it")

func (h *Handle) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
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
		if !tx.cfg.Pipelines {
			queries = nil
		}
		r, err := tx.first(ctx, queries...)
		if err != nil {
			return pgx.FailedBatchResults(b, err)
		}
		if r != nil {
			return &txResults{results: r, tx: tx}
		}
		// If they were sent before without success, they remember statements that were not prepared.
		for i, sent := range b.QueuedQueries {
			b.QueuedQueries[i] = &pgx.QueuedQuery{SQL: sent.SQL, Arguments: sent.Arguments, Fn: sent.Fn}
		}
	}
	return &txResults{results: tx.conn.SendBatch(ctx, b), tx: tx}
}
