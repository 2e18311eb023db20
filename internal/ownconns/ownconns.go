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

// Alone gives an *onceq.Queue a turn of its own for jobs that have lost leases, as if its workers were a process of their own.
// So one test does not wait for another, and a test may stand for several processes. Package onceq sets it.
var Alone func(queue any)
