package onceqsql

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// driverError is an error of a driver other than pgx, together with what it says in pgx's terms, by which onceq and
// its predicates know what happened.
type driverError struct {
	error
	pg *pgconn.PgError
}

func (e *driverError) Unwrap() []error { return []error{e.error, e.pg} }

// ended is an error of a call whose context ended, together with the context's own. pgx gives both; lib/pq gives what
// the server says of a statement that is cancelled, or what became of the connection.
type ended struct {
	error
	ctx error
}

func (e *ended) Error() string   { return e.ctx.Error() + ": " + e.error.Error() }
func (e *ended) Unwrap() []error { return []error{e.error, e.ctx} }

const queryCanceled = "57014"

// recognisable puts a *pgconn.PgError into the chain of an error that comes from Postgres, and the context's error into
// that of one that comes from its end. lib/pq's type is not named here, so that nobody gets lib/pq who does not use it.
func recognisable(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	err = ofPostgres(err)
	over := ctx.Err()
	if over == nil || errors.Is(err, over) {
		return err
	}
	if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) && pg.Code != queryCanceled {
		return err // what the server found before
	}
	return &ended{err, over}
}

func ofPostgres(err error) error {
	var pg *pgconn.PgError
	var other interface {
		error
		SQLState() string
	}
	if errors.As(err, &pg) || !errors.As(err, &other) {
		return err
	}
	pg = &pgconn.PgError{Code: other.SQLState(), Message: other.Error()}
	if fields, ok := other.(interface{ Get(byte) string }); ok { // by the letters of the protocol
		pg.Severity, pg.Message, pg.Detail, pg.Hint, pg.Where = fields.Get('S'), fields.Get('M'), fields.Get('D'), fields.Get('H'), fields.Get('W')
		pg.SchemaName, pg.TableName, pg.ColumnName = fields.Get('s'), fields.Get('t'), fields.Get('c')
		pg.DataTypeName, pg.ConstraintName = fields.Get('d'), fields.Get('n')
	}
	return &driverError{err, pg}
}
