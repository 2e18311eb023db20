package onceqcron_test

import (
	"bytes"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/queuetest"
)

type boom struct{}

// badTimes panics once it was asked often enough.
type badTimes struct{ good int }

func (b *badTimes) Next(after time.Time) time.Time {
	if b.good--; b.good < 0 {
		panic(boom{})
	}
	return after.Add(time.Hour)
}

type badPayload struct{}

func (badPayload) MarshalJSON() ([]byte, error) { panic(boom{}) }

// A panic in JobFor, and in the payload that it gives, is in the ledger, and the schedule goes on. One in a Timetable is an error of
// whoever asks for its ticks.
func TestPanics(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer // one worker at a time
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
	bad := &badTimes{good: 1000}
	s := scheduler(t, db, onceqcron.Config{},
		onceqcron.Schedule{Name: "function", Spec: "@hourly", JobFor: func(onceqcron.Tick) (onceq.Job, error) { panic(boom{}) }},
		onceqcron.Schedule{Name: "payload", Spec: "@hourly", JobFor: func(onceqcron.Tick) (onceq.Job, error) {
			return onceq.Job{Kind: "report", Payload: badPayload{}}, nil
		}},
		onceqcron.Schedule{Name: "times", Timetable: bad, Job: report.Job("x")},
	)
	require.NoError(t, s.Register(t.Context()))
	for _, name := range []string{"function", "payload"} {
		_, err := s.Fire(t.Context(), nil, name)
		require.ErrorContains(t, err, "panic")
	}
	db.Advance(2 * time.Hour)
	db.Drain(s.Handlers()...)
	for _, name := range []string{"function", "payload"} {
		ticks, err := s.Ticks(t.Context(), nil, name, now(t, db), 0)
		require.NoError(t, err)
		require.NotEmpty(t, ticks)
		require.Equal(t, "refused", ticks[0].Outcome)
	}
	require.Contains(t, log.String(), "JobFor panicked")
	bad.good = 0
	_, err := s.WouldBackfill(t.Context(), nil, "times", now(t, db).Add(-time.Minute), now(t, db).Add(-time.Second))
	var p *onceq.PanicError
	require.ErrorAs(t, err, &p)
	again := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "times", Timetable: bad, Job: report.Job("x")})
	require.ErrorAs(t, again.Register(t.Context()), &p)
}

// A Timetable whose next time cannot be stored, and does not encode as JSON, has no further one.
func TestTimetable_EndsWithTheYear9999(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "far", Timetable: at{time.Date(12345, 1, 1, 0, 0, 0, 0, time.UTC)}, Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	all, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.True(t, all[0].Next.IsZero())
	var bad *onceq.InvalidError
	_, err = s.Ticks(t.Context(), nil, "far", time.Date(12345, 1, 1, 0, 0, 0, 0, time.UTC), 0)
	require.ErrorAs(t, err, &bad)
}
