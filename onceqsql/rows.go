package onceqsql

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// rows presents the rows of database/sql as pgx.Rows.
type rows struct {
	ctx     context.Context // of the query; its end explains an error
	rows    *sql.Rows       // nil once closed
	types   *pgtype.Map
	columns []pgconn.FieldDescription
	values  []any // of the current row, as the driver returned them
	n       int
	err     error
}

var _ pgx.Rows = (*rows)(nil)

func open(ctx context.Context, found *sql.Rows, types *pgtype.Map) (*rows, error) {
	r := &rows{ctx: ctx, rows: found, types: types}
	columns, err := found.ColumnTypes()
	if err != nil {
		r.fail(err)
		return r, r.err
	}
	r.columns, r.values = make([]pgconn.FieldDescription, len(columns)), make([]any, len(columns))
	for i, c := range columns {
		r.columns[i].Name = c.Name()
		if t, ok := types.TypeForName(strings.ToLower(c.DatabaseTypeName())); ok {
			r.columns[i].DataTypeOID = t.OID
		}
	}
	return r, nil
}

// fail closes the rows, and with them the statement, and keeps the error.
func (r *rows) fail(err error) {
	r.err = recognisable(r.ctx, err)
	if r.rows != nil {
		_ = r.rows.Close()
		r.rows = nil
	}
}

// Close also finds the error of rows that were not read: drivers read them to the end.
func (r *rows) Close() {
	if r.rows == nil {
		return
	}
	err := r.rows.Err()
	if closing := r.rows.Close(); err == nil {
		err = closing
	}
	r.rows, r.err = nil, recognisable(r.ctx, err)
}

func (r *rows) Err() error { return r.err }

func (r *rows) Next() bool {
	if r.rows == nil || !r.rows.Next() {
		r.Close()
		return false
	}
	r.n++
	into := make([]any, len(r.values))
	for i := range r.values {
		r.values[i] = nil
		into[i] = &r.values[i]
	}
	if err := r.rows.Scan(into...); err != nil {
		r.fail(err)
		return false
	}
	return true
}

func (r *rows) Scan(dest ...any) error {
	if row, ok := one(dest); ok {
		return row.ScanRow(r)
	}
	if len(dest) != len(r.values) {
		r.fail(fmt.Errorf("onceqsql: %d columns for %d destinations", len(r.values), len(dest)))
		return r.err
	}
	for i, d := range dest {
		if d == nil {
			continue
		}
		raw, format := decode(r.values[i], r.columns[i].DataTypeOID)
		if err := r.types.Scan(r.columns[i].DataTypeOID, format, raw, d); err != nil {
			r.fail(fmt.Errorf("onceqsql: column %s: %w", r.columns[i].Name, err))
			return r.err
		}
	}
	return nil
}

func one(dest []any) (pgx.RowScanner, bool) {
	if len(dest) != 1 {
		return nil, false
	}
	row, ok := dest[0].(pgx.RowScanner)
	return row, ok
}

func (r *rows) Values() ([]any, error) {
	values, into := make([]any, len(r.values)), make([]any, len(r.values))
	for i := range into {
		into[i] = &values[i]
	}
	return values, r.Scan(into...)
}

func (r *rows) RawValues() [][]byte {
	raw := make([][]byte, len(r.values))
	for i, v := range r.values {
		raw[i], _ = decode(v, r.columns[i].DataTypeOID)
	}
	return raw
}

func (r *rows) FieldDescriptions() []pgconn.FieldDescription { return r.columns }

func (r *rows) CommandTag() pgconn.CommandTag {
	return pgconn.NewCommandTag(fmt.Sprintf("SELECT %d", r.n))
}

func (r *rows) TypeMap() *pgtype.Map { return r.types }

func (r *rows) Conn() *pgx.Conn { return nil }
