package onceqcron_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/queuetest"
)

func TestResume_OfATimetableThatCounts(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "delays", Timetable: delays(24 * time.Hour), Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	due := now(t, db).Add(time.Hour)
	overdue(t, db, "delays", due) // the tick before was 23 hours ago
	require.NoError(t, s.Pause(t.Context(), nil, "delays"))
	require.NoError(t, s.Resume(t.Context(), nil, "delays"))
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	t.Log("due was ", due, " is ", list[0].Next)
	require.WithinDuration(t, due, list[0].Next, time.Second)
}

func TestBackfill_OfATimetableThatCounts(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "delays", Timetable: delays(time.Hour), Job: report.Job("x"), Missed: onceqcron.All(10)})
	require.NoError(t, s.Register(t.Context()))
	start := now(t, db).Truncate(time.Second).Add(-3*time.Hour - 17*time.Minute)
	overdue(t, db, "delays", start)
	db.RunOne(s.Handlers()...)
	require.Len(t, fired(t, db), 4)
	n, err := s.Backfill(t.Context(), nil, "delays", start.Add(-time.Minute), now(t, db))
	require.NoError(t, err)
	for _, f := range fired(t, db) {
		t.Log(f.UTC())
	}
	require.Zero(t, n)

	// Those of a pause are known.
	require.NoError(t, s.Pause(t.Context(), nil, "delays"))
	_, err = db.Pool.Exec(t.Context(), `update onceq.schedules set next_at = $1, paused_at = $1::timestamptz - interval '1 minute'`, start.Add(150*time.Minute))
	require.NoError(t, err)
	n, err = s.Backfill(t.Context(), nil, "delays", start, now(t, db))
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.WithinDuration(t, start.Add(150*time.Minute), fired(t, db)[3], 0)
	require.NoError(t, s.Resume(t.Context(), nil, "delays"))
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.WithinDuration(t, start.Add(210*time.Minute), list[0].Next, 0)
}

func TestPut_JobsThatNoTickCouldEnqueue(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{})
	for want, job := range map[string]onceq.Job{
		"Job.Priority of \"x\": is 9":        {Kind: "report", Payload: "x", Priority: 9},
		"Job.Delay of \"x\": is negative":    {Kind: "report", Payload: "x", Delay: -time.Hour},
		"Job.MaxAttempts of \"x\": is -1":    {Kind: "report", Payload: "x", MaxAttempts: -1},
		"Job.Scope of \"x\": is set without": {Kind: "report", Payload: "x", Scope: "s"},
		"Job.Limit of \"x\":":                {Kind: "report", Payload: "x", Limit: "a\x00"},
		"Job.Kind of \"x\":":                 {Kind: "re\x00port", Payload: "x"},
		"Job.Payload of \"x\":":              {Kind: "report", Payload: "a\x00b"},
		"Job.Queue of \"x\": has 300 bytes":  {Kind: "report", Payload: "x", Queue: strings.Repeat("q", 300)},
		"Job.Metadata of \"x\":":             {Kind: "report", Payload: "x", Metadata: map[string]string{"a": strings.Repeat("x", onceq.MaxMetadataBytes-20)}},
	} {
		one := onceqcron.Schedule{Name: "x", Spec: "@daily", Job: job}
		var invalid *onceq.InvalidError
		err := s.Put(t.Context(), nil, one)
		require.ErrorAs(t, err, &invalid, want)
		require.ErrorContains(t, err, want)
		_, err = onceqcron.New(db.Queue, db.Pool, onceqcron.Config{}, one)
		require.ErrorAs(t, err, &invalid, want)
		require.ErrorContains(t, err, want)
	}
	one := onceqcron.Schedule{Name: "x", Spec: "@daily", Job: report.Job("x")}
	one.Job.Key, one.Job.Replace = "k", onceq.ReplaceTime
	scheduler(t, db, onceqcron.Config{}, one)
	one.Job.Key, one.Job.Replace, one.Job.After, one.Job.IfDead = "", 0, []onceq.JobRef{{ID: 1}}, onceq.DeadRun
	scheduler(t, db, onceqcron.Config{}, one)
	for _, missed := range []onceqcron.Missed{onceqcron.Latest(0), onceqcron.All(0)} {
		_, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{}, onceqcron.Schedule{Name: "x", Spec: "@daily", Job: report.Job("x"), Missed: missed})
		require.ErrorContains(t, err, "Missed ")
	}
}

// fullHours has an hour that has just begun as the one after it.
type fullHours struct{}

func (fullHours) Next(t time.Time) time.Time {
	if hour := t.Truncate(time.Hour); hour.Before(t) {
		return hour.Add(time.Hour)
	}
	return t
}

func TestRegister_ATimetableThatDoesNotGoOn(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	err := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "i", Timetable: fullHours{}, Job: report.Job("x")}).Register(t.Context())
	require.ErrorContains(t, err, "Next must return a later time than it gets")
	var invalid *onceq.InvalidError
	require.ErrorAs(t, err, &invalid)
}

func TestHealth_SaysWhyAScheduleIsLate(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, nightly())
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "nightly", now(t, db).Add(-time.Hour))
	says := func(want string) {
		t.Helper()
		found, err := s.Health(t.Context(), nil)
		require.NoError(t, err)
		require.Len(t, found, 1)
		t.Log(found[0])
		require.Contains(t, found[0].Detail, want)
	}
	says("no worker fires it")
	require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, "onceqcron", "deploy"))
	says(`queue "onceqcron" has been paused since`)
	_, err := db.Queue.ResumeQueue(t.Context(), db.Pool, "onceqcron")
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `alter table onceq.schedule_ticks add check (outcome <> 'fired')`)
	require.NoError(t, err)
	db.RunOne(s.Handlers()...)
	says("violates check constraint")
	info, err := db.Queue.GetByKey(t.Context(), db.Pool, "onceqcron:nightly", "nightly")
	require.NoError(t, err)
	_, err = db.Queue.Cancel(t.Context(), db.Pool, info.ID)
	require.NoError(t, err)
	says("the job that ticks for it was cancelled")
}

func TestResume_AfterAnOutage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		missed onceqcron.Missed
		want   []string // latest first
	}{
		{onceqcron.Latest(24 * time.Hour), []string{"paused 3", "fired 1", "missed 2"}},
		{onceqcron.Latest(210 * time.Minute), []string{"paused 3", "missed 3"}},
		{onceqcron.Skip(), []string{"paused 3", "missed 3"}},
		{onceqcron.All(2), []string{"paused 3", "fired 1", "fired 1", "missed 1"}},
	} {
		db := queuetest.New(t)
		s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "h", Spec: "@every 1h", Job: report.Job("x"), Missed: c.missed})
		require.NoError(t, s.Register(t.Context()))
		start := now(t, db).Truncate(time.Second).Add(-5*time.Hour - 30*time.Minute)
		overdue(t, db, "h", start) // nobody fired this one, nor the next two, when the pause began
		require.NoError(t, s.Pause(t.Context(), nil, "h"))
		_, err := db.Pool.Exec(t.Context(), `update onceq.schedules set paused_at = $1`, start.Add(150*time.Minute))
		require.NoError(t, err)
		require.NoError(t, s.Resume(t.Context(), nil, "h"))
		require.Equal(t, c.want, outcomes(t, s, "h"))
		list, err := s.List(t.Context(), nil)
		require.NoError(t, err)
		require.WithinDuration(t, start.Add(6*time.Hour), list[0].Next, 0)
	}
}

func TestNames_ThatCannotBeStored(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{})
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	for _, name := range []string{"a\x00b", "a\xff"} {
		var invalid *onceq.InvalidError
		_, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{}, onceqcron.Schedule{Name: name, Spec: "@daily", Job: report.Job("x")})
		require.ErrorAs(t, err, &invalid)
		_, err = onceqcron.New(db.Queue, db.Pool, onceqcron.Config{Owner: name})
		require.ErrorAs(t, err, &invalid)
		_, err = s.Ticks(t.Context(), tx, name, time.Now(), 1)
		require.ErrorAs(t, err, &invalid)
		_, err = s.WouldBackfill(t.Context(), tx, name, time.Now(), time.Now())
		require.ErrorIs(t, err, onceqcron.ErrNotFound)
		require.ErrorIs(t, s.Pause(t.Context(), tx, name), onceqcron.ErrNotFound)
	}
	require.NoError(t, tx.Commit(t.Context()), "the transaction is still usable")
}

// seconds is a Timetable of the code with a tick each second, and counts how often it is asked.
type seconds struct{ asked *atomic.Int64 }

func (s seconds) Next(after time.Time) time.Time {
	s.asked.Add(1)
	return after.Truncate(time.Second).Add(time.Second)
}

// Nothing walks over a year of seconds while it has the schedule's lock.
func TestASecondsScheduleAfterAYear_IsComputed(t *testing.T) {
	t.Parallel()
	const most = 2_000_000 // a year has 31 million seconds
	for name, do := range map[string]func(t *testing.T, db *queuetest.DB, s *onceqcron.Scheduler){
		"Resume": func(t *testing.T, _ *queuetest.DB, s *onceqcron.Scheduler) {
			require.NoError(t, s.Resume(t.Context(), nil, "s"))
		},
		"Resume, overdue before": func(t *testing.T, db *queuetest.DB, s *onceqcron.Scheduler) {
			_, err := db.Pool.Exec(t.Context(), `update onceq.schedules set paused_at = now()`)
			require.NoError(t, err)
			require.NoError(t, s.Resume(t.Context(), nil, "s"))
		},
		"a tick": func(t *testing.T, db *queuetest.DB, s *onceqcron.Scheduler) {
			_, err := db.Pool.Exec(t.Context(), `update onceq.schedules set paused_at = null`)
			require.NoError(t, err)
			db.RunOne(s.Handlers()...)
		},
		"Backfill": func(t *testing.T, db *queuetest.DB, s *onceqcron.Scheduler) {
			n, err := s.Backfill(t.Context(), nil, "s", now(t, db).Add(-10*time.Second), now(t, db))
			require.NoError(t, err)
			require.NotZero(t, n)
		},
	} {
		for _, missed := range []onceqcron.Missed{onceqcron.All(10), onceqcron.Latest(24 * 400 * time.Hour)} {
			t.Run(name+", "+missed.String(), func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t)
				var asked atomic.Int64
				s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "s", Timetable: seconds{&asked}, Job: report.Job("x"), Missed: missed})
				require.NoError(t, s.Register(t.Context()))
				require.NoError(t, s.Pause(t.Context(), nil, "s"))
				overdue(t, db, "s", now(t, db).AddDate(-1, 0, 0).Truncate(time.Second))
				do(t, db, s)
				require.Less(t, asked.Load(), int64(most))
			})
		}
	}
}
