// Package ownconns lets queuetest keep the connections that workers have beside the application's pool. Each RunOne and each
// Drain is a run of its own, and opening sessions is most of what a short one costs.
package ownconns

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Keep makes the own connections of the workers over a pool stay from one run to the next, until release. Those that died
// meanwhile are closed. Package onceq sets it.
var Keep func(ctx context.Context, pool *pgxpool.Pool) (release func(), err error)
