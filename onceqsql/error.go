package onceqsql

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// driverError is an error of another driver than pgx, together with the same error as a *pgconn.PgError. onceq and its
// predicates look for the latter.
type driverError struct {
	error
	pg *pgconn.PgError
}

func (e *driverError) Unwrap() []error { return []error{e.error, e.pg} }

// ended is the error of a call whose context ended, together with the context's error. pgx returns both. lib/pq returns
// only the server's error for a cancelled statement, or the error of the connection.
type ended struct {
	error
	ctx error
}

func (e *ended) Error() string   { return e.ctx.Error() + ": " + e.error.Error() }
func (e *ended) Unwrap() []error { return []error{e.error, e.ctx} }

const queryCanceled = "57014"

// recognisable puts a *pgconn.PgError into the chain of an error that comes from Postgres, and the context's error into
// the chain of an error that comes from the end of the context. It does not name lib/pq's type, so that only its users
// depend on lib/pq.
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
		return err // the server found this error before the context ended
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
	if fields, ok := other.(interface{ Get(byte) string }); ok { // by the field codes of the protocol
		pg.Severity, pg.Message, pg.Detail, pg.Hint, pg.Where = fields.Get('S'), fields.Get('M'), fields.Get('D'), fields.Get('H'), fields.Get('W')
		pg.SchemaName, pg.TableName, pg.ColumnName = fields.Get('s'), fields.Get('t'), fields.Get('c')
		pg.DataTypeName, pg.ConstraintName = fields.Get('d'), fields.Get('n')
	}
	return &driverError{err, pg}
}
