package tests

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

var owner = conformance.Owner

// asOwner is db with the owner's pool. It finds the queue's tables and its sequence without their schema.
func asOwner(t testing.TB, db *queuetest.DB) *queuetest.DB {
	t.Helper()
	as := *db
	as.Pool = owner(t, db)
	return &as
}

// The promises about a caller's handle hold in every handle of pgx.
func TestConformance(t *testing.T) {
	t.Parallel()
	for name, outside := range map[string]func(*pgxpool.Pool, *pgxpool.Conn) onceq.DB{
		"pool":                 func(p *pgxpool.Pool, _ *pgxpool.Conn) onceq.DB { return p },
		"connection of a pool": func(_ *pgxpool.Pool, c *pgxpool.Conn) onceq.DB { return c },
		"connection":           func(_ *pgxpool.Pool, c *pgxpool.Conn) onceq.DB { return c.Conn() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name != "pool" {
				long(t, "the same as on a pool")
			}
			conformance.Run(t, func(t *testing.T, db *queuetest.DB) conformance.Handles { return pgxHandles(t, db, outside) })
		})
	}
}

func pgxHandles(t *testing.T, db *queuetest.DB, outside func(*pgxpool.Pool, *pgxpool.Conn) onceq.DB) conformance.Handles {
	conn, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return conformance.Handles{
		DB: outside(db.Pool, conn),
		Begin: func(ctx context.Context, level pgx.TxIsoLevel) (conformance.Tx, error) {
			tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			if err != nil {
				return conformance.Tx{}, err
			}
			return conformance.Tx{DB: tx, Commit: tx.Commit, Rollback: tx.Rollback}, nil
		},
	}
}
