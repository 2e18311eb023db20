package onceqhttp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
)

var (
	errOwnTx     = errors.New("onceqhttp: the middleware ends this transaction: return nil to commit it with the answer, an error to roll it back")
	errSavepoint = errors.New("onceqhttp: a savepoint of the handler's transaction could not be committed or rolled back, so all of it is rolled back: close its rows before that, and commit it in a context that has not ended")
)

// handlerTx is the transaction that the handler gets, which it cannot end, or a savepoint in it. What was written in a savepoint
// that could not be ended is still in the transaction, and so the transaction must not be committed (unfit).
type handlerTx struct {
	pgx.Tx
	outer *handlerTx // of a savepoint
	open  *unended
}

// unended are the savepoints whose Commit or Rollback has failed.
type unended struct {
	mu  sync.Mutex
	all map[*handlerTx]error
}

func newHandlerTx(tx pgx.Tx) *handlerTx {
	return &handlerTx{Tx: tx, open: &unended{all: make(map[*handlerTx]error)}}
}

func (h *handlerTx) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := h.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &handlerTx{Tx: tx, outer: h, open: h.open}, nil
}

func (h *handlerTx) Commit(ctx context.Context) error {
	if h.outer == nil {
		return errOwnTx
	}
	return h.ended(h.Tx.Commit(ctx), false)
}

// Rollback works even in a context that has ended. That is mostly when it is called.
func (h *handlerTx) Rollback(ctx context.Context) error {
	if h.outer == nil {
		return errOwnTx
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	return h.ended(h.Tx.Rollback(ctx), true)
}

func (h *handlerTx) ended(err error, undoes bool) error {
	h.open.mu.Lock()
	defer h.open.mu.Unlock()
	switch {
	case err != nil && !errors.Is(err, pgx.ErrTxClosed) && h.Conn().PgConn().TxStatus() != 'E':
		h.open.all[h] = err
	case err == nil && undoes:
		for s := range h.open.all {
			if s.inside(h) {
				delete(h.open.all, s)
			}
		}
	}
	return err
}

func (h *handlerTx) inside(outer *handlerTx) bool {
	for ; h != nil; h = h.outer {
		if h == outer {
			return true
		}
	}
	return false
}

// unfit returns why the transaction must not be committed, or nil.
func (h *handlerTx) unfit() error {
	h.open.mu.Lock()
	defer h.open.mu.Unlock()
	for _, err := range h.open.all {
		return fmt.Errorf("%w: %w", errSavepoint, err)
	}
	return nil
}
