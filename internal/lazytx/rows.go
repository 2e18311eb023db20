package lazytx

import (
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// txRows are rows of a handler's transaction. Rows that came with the opening also end its batch.
type txRows struct {
	rows    pgx.Rows
	tx      *Tx
	results pgx.BatchResults // nil for rows that came by themselves
	closing error
}

// enter returns false if the worker has ended the transaction: the connection is then somebody else's.
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

func (r *txRows) CommandTag() pgconn.CommandTag { return r.rows.CommandTag() }

func (r *txRows) FieldDescriptions() []pgconn.FieldDescription { return r.rows.FieldDescriptions() }

func (r *txRows) RawValues() [][]byte { return r.rows.RawValues() }

func (r *txRows) Conn() *pgx.Conn { return r.tx.root.Conn() }

func (r *txRows) TypeMap() *pgtype.Map { return r.rows.TypeMap() }

// failedRows are the rows of a query that was not sent.
func failedRows(err error) pgx.Rows {
	rows, _ := pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
	return rows
}

// oneRow is the first of some rows, like pgx's own Row.
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

// txResults are the results of a batch in a handler's transaction.
type txResults struct {
	results pgx.BatchResults
	tx      *Tx
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
