package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// The test lets three nights pass in no time.
func TestCleanup_ComesBackEveryNight(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Pool.Exec(t.Context(), `create table sessions (ends timestamptz)`)
	require.NoError(t, err)
	require.NoError(t, start(t.Context(), db.Pool, db.Queue))
	for range 3 {
		require.NoError(t, start(t.Context(), db.Pool, db.Queue), "a deploy: every process starts anew")
		require.Equal(t, onceq.StateDelayed, db.RunOne(handlers()...).State)
		require.Empty(t, db.Drain(handlers()...), "once a night")
		db.Advance(25 * time.Hour)
	}
}

func TestUntilTwo(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	for now, want := range map[string]string{
		"2026-05-08T00:30:00+02:00": "2026-05-08 02:00",
		"2026-05-08T01:59:59+02:00": "2026-05-09 02:00", // it began a little early
		"2026-05-08T02:00:00+02:00": "2026-05-09 02:00",
		"2026-10-24T12:00:00+02:00": "2026-10-25 02:00", // in this night the clock is set back
		"2026-10-25T02:00:00+01:00": "2026-10-26 02:00",
	} {
		from, err := time.Parse(time.RFC3339, now)
		require.NoError(t, err)
		require.Equal(t, want, from.Add(untilTwo(from, berlin)).In(berlin).Format("2006-01-02 15:04"), now)
	}
}
