package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// The test lets three nights pass in no time, with a deploy in each of them.
func TestRollup_EveryNight(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Pool.Exec(t.Context(), `create table rollups (night timestamptz)`)
	require.NoError(t, err)
	for night := range 3 {
		cron, err := schedules(db.Pool, db.Queue)
		require.NoError(t, err)
		require.NoError(t, cron.Register(t.Context()))
		db.Advance(24 * time.Hour)
		db.Drain(handlers(cron)...)
		var rollups int
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from rollups`).Scan(&rollups))
		require.Equal(t, night+1, rollups)
	}
}
