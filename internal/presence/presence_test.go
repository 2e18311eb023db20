package presence_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/citus"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/presence"
	"github.com/onceq/onceq/internal/task"
	"github.com/onceq/onceq/queuetest"
)

// The row of a worker has for how long the pool was waited for since the row before, by what pgx measures.
func TestPresence_MeasuresTheWaitForThePool(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 1 }))
	p := presence.New(presence.Config{Store: pg.New(db.Pool, "onceq", nil, citus.Parts{}), Set: new(task.Set)})
	for db.Pool.Stat().EmptyAcquireWaitTime() == 0 {
		c, err := db.Pool.Acquire(t.Context())
		require.NoError(t, err)
		waited := make(chan error)
		go func() {
			c, err := db.Pool.Acquire(t.Context())
			if err == nil {
				c.Release()
			}
			waited <- err
		}()
		time.Sleep(time.Millisecond)
		c.Release()
		require.NoError(t, <-waited)
	}
	require.Zero(t, p.Waited(0), "a row that is written at once repeats what the one before it says")
	require.Equal(t, db.Pool.Stat().EmptyAcquireWaitTime(), p.Waited(time.Minute))
	require.Zero(t, p.Waited(time.Minute), "since then nobody has waited")
}
