package pg

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// FreeConn acquires a connection as a statement does that must not wait for what blocks one of a worker's own
// connections.
func FreeConn(ctx context.Context, spare, outcomes *pgxpool.Pool, patience time.Duration) (*pgxpool.Conn, error) {
	return (&Conns{spare: spare, Outcomes: outcomes}).free(ctx, patience)
}

// Spare returns the spare connection, as a pool.
func (o *Conns) Spare() *pgxpool.Pool { return o.spare }
