package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// In a test, the minute between two checks takes no time.
func TestPoll_StartsOnceAndLooksUntilItIsDone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, transcribe.Job("talk.mp3"))
	require.NoError(t, err)
	p := &provider{slow: 3, finished: func() {}}
	h := handler(p, time.Minute, 24*time.Hour)

	for range 2 {
		require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
		require.Empty(t, db.Drain(h), "nobody looks before a minute has passed")
		db.Advance(time.Minute)
	}
	require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
	require.Equal(t, 1, p.starts)
}

func TestPoll_GivesUp(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, transcribe.Job("talk.mp3"))
	require.NoError(t, err)
	h := handler(&provider{slow: 100}, time.Minute, 24*time.Hour)
	require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
	db.Advance(25 * time.Hour)
	require.Equal(t, onceq.StateDead, db.RunOne(h).State)
}
