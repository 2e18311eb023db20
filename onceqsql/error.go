package onceqsql

import (
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

// recognisable puts a *pgconn.PgError into the chain of an error that comes from Postgres. lib/pq's type is not named
// here, so that nobody gets lib/pq who does not use it.
func recognisable(err error) error {
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
