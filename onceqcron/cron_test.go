package onceqcron_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

var report = onceq.Kind[string]{Name: "report", Keep: onceq.Forever}

// at is a timetable of fixed times.
type at []time.Time

func (a at) Next(after time.Time) time.Time {
	for _, t := range a {
		if t.After(after) {
			return t
		}
	}
	return time.Time{}
}

// soon is a timetable of one time, a moment after it is first asked for one.
type soon struct{ at }

func (s *soon) Next(after time.Time) time.Time {
	if s.at == nil {
		s.at = at{after.Add(200*time.Millisecond + 789*time.Nanosecond)}
	}
	return s.at.Next(after)
}

func now(t *testing.T, db *queuetest.DB) (now time.Time) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select statement_timestamp()`).Scan(&now))
	return now
}

func scheduler(t *testing.T, db *queuetest.DB, cfg onceqcron.Config, schedules ...onceqcron.Schedule) *onceqcron.Scheduler {
	t.Helper()
	s, err := onceqcron.New(db.Queue, db.Pool, cfg, schedules...)
	require.NoError(t, err)
	return s
}

// overdue makes a schedule's next tick, and the job that ticks, due at a time. A pause has begun before that.
func overdue(t *testing.T, db *queuetest.DB, name string, at time.Time) {
	t.Helper()
	_, err := db.Pool.Exec(t.Context(), `
update onceq.schedules set next_at = $2, paused_at = case when paused_at is not null then least(paused_at, $2::timestamptz - interval '1 second') end
 where name = $1`, name, at)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = $2 where key = $1`, name, at)
	require.NoError(t, err)
}

// fired are the scheduled times of the report jobs, in order.
func fired(t *testing.T, db *queuetest.DB) (times []time.Time) {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `select (metadata->>'onceqcron.at')::timestamptz from onceq.jobs where kind = 'report' order by 1`)
	require.NoError(t, err)
	times, err = pgx.CollectRows(rows, pgx.RowTo[time.Time])
	require.NoError(t, err)
	return times
}

func outcomes(t *testing.T, s *onceqcron.Scheduler, name string) (lines []string) {
	t.Helper()
	ticks, err := s.Ticks(t.Context(), nil, name, time.Now().AddDate(100, 0, 0), 1000)
	require.NoError(t, err)
	for _, d := range ticks {
		lines = append(lines, fmt.Sprint(d.Outcome, " ", d.Ticks))
	}
	return lines
}

// inKolkata is a zone whose clocks never change, so that each night has one tick and each day 24 hours.
const inKolkata = "Asia/Kolkata"

func nightly() onceqcron.Schedule {
	return onceqcron.Schedule{Name: "nightly", Spec: "0 2 * * *", Zone: inKolkata, Job: report.Job("all")}
}

// halfAnHourAway is the spec of a tick an hour, the last and the next of which are far enough away for a slow test.
func halfAnHourAway(t *testing.T, db *queuetest.DB) string {
	return fmt.Sprintf("%d * * * *", (now(t, db).Minute()+30)%60)
}

// live counts the jobs that tick.
func live(t *testing.T, db *queuetest.DB) (n int) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from onceq.jobs where kind like 'onceqcron%'`).Scan(&n))
	return n
}

func TestTick_EnqueuesTheJobAndMovesOn(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, nightly())
	require.NoError(t, s.Register(t.Context()))
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, list, 1)
	first := list[0].Next
	require.True(t, first.After(now(t, db)))
	zone, err := time.LoadLocation(inKolkata)
	require.NoError(t, err)
	require.Equal(t, "02:00:00", first.In(zone).Format(time.TimeOnly))

	due := now(t, db).Add(-time.Second).Truncate(time.Microsecond)
	overdue(t, db, "nightly", due)
	ran := db.RunOne(s.Handlers()...)
	require.Equal(t, onceq.StateDelayed, ran.State)
	require.Equal(t, []time.Time{due.UTC()}, utc(fired(t, db)))
	require.Equal(t, []string{"fired 1"}, outcomes(t, s, "nightly"))
	require.Equal(t, 1, live(t, db))

	var scheduled time.Time
	var runAt, next time.Time
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select run_at from onceq.jobs where key = 'nightly'`).Scan(&runAt))
	list, err = s.List(t.Context(), nil)
	require.NoError(t, err)
	next = list[0].Next
	require.True(t, next.Equal(first), "the next night")
	require.False(t, runAt.Before(next), "not a moment early")
	require.Less(t, runAt.Sub(next), time.Minute)

	done := db.RunOne(report.Handle(func(_ context.Context, l *onceq.Lease, _ string) error {
		var ok bool
		scheduled, ok = onceqcron.ScheduledAt(l)
		require.True(t, ok)
		return nil
	}))
	require.Equal(t, onceq.StateCompleted, done.State)
	require.True(t, scheduled.Equal(due))
}

func utc(times []time.Time) []time.Time {
	for i := range times {
		times[i] = times[i].UTC()
	}
	return times
}

func TestMissed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		missed onceqcron.Missed
		fires  []int // of five ticks, the hours since
		ledger []string
	}{
		{"the latest", onceqcron.Latest(2 * time.Hour), []int{1}, []string{"fired 1", "missed 4"}},
		{"the latest, too late", onceqcron.Latest(30 * time.Minute), nil, []string{"missed 5"}},
		{"none", onceqcron.Skip(), nil, []string{"missed 5"}},
		{"all", onceqcron.All(100), []int{5, 4, 3, 2, 1}, []string{"fired 1", "fired 1", "fired 1", "fired 1", "fired 1"}},
		{"all up to three", onceqcron.All(3), []int{3, 2, 1}, []string{"fired 1", "fired 1", "fired 1", "missed 2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			start := now(t, db).Truncate(time.Second)
			var ticks at
			for h := 5; h > 0; h-- {
				ticks = append(ticks, start.Add(-time.Duration(h)*time.Hour))
			}
			ticks = append(ticks, start.Add(time.Hour))
			one := onceqcron.Schedule{Name: "n", Timetable: ticks, Job: report.Job("x"), Missed: c.missed}
			s := scheduler(t, db, onceqcron.Config{}, one)
			require.NoError(t, s.Register(t.Context()))
			overdue(t, db, "n", ticks[0])
			db.RunOne(s.Handlers()...)
			want := []time.Time{}
			for _, h := range c.fires {
				want = append(want, start.Add(-time.Duration(h)*time.Hour).UTC())
			}
			require.Equal(t, want, utc(fired(t, db)))
			require.Equal(t, c.ledger, outcomes(t, s, "n"))
			list, err := s.List(t.Context(), nil)
			require.NoError(t, err)
			require.True(t, list[0].Next.Equal(ticks[5]))
			found, err := s.Health(t.Context(), nil)
			require.NoError(t, err)
			if strings.HasSuffix(c.name, "three") {
				require.Len(t, found, 1)
				require.Contains(t, found[0].Detail, `2 ticks of schedule "n" did not happen`)
				return
			}
			if c.fires != nil {
				require.Empty(t, found, "the latest one has run")
				return
			}
			require.Len(t, found, 1)
			require.Equal(t, "missed", found[0].What)
			require.Contains(t, found[0].Detail, `5 ticks of schedule "n" did not happen`)
			require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
				_, err := s.Backfill(t.Context(), tx, "n", found[0].From, found[0].To)
				return err
			}))
			found, err = s.Health(t.Context(), nil)
			require.NoError(t, err)
			require.Empty(t, found, "they have been back-filled")
		})
	}
}

// A schedule that nobody can count any more is no reason to stop.
func TestMissed_ASecondsScheduleAfterAYear(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "s", Spec: "* * * * * *", Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "s", now(t, db).AddDate(-1, 0, 0).Truncate(time.Second))
	db.RunOne(s.Handlers()...)
	require.Len(t, fired(t, db), 1)
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.Less(t, list[0].Next.Sub(now(t, db)).Abs(), time.Minute)
}

func TestRegister_ManyProcessesAtOnceAndAgain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	written := func() (by string) {
		var all sync.WaitGroup
		for range 8 {
			s := scheduler(t, db, onceqcron.Config{}, nightly())
			all.Go(func() {
				if err := s.Register(context.Background()); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		require.Equal(t, 1, live(t, db))
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select xmin || ' at ' || updated_at from onceq.schedules`).Scan(&by))
		return by
	}
	require.Equal(t, written(), written(), "the schedule is written once")
}

func TestRegister_ADeployChangesTheTimetable(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	old := nightly()
	old.Spec = "0 0 1 1 *"
	s := scheduler(t, db, onceqcron.Config{}, old)
	require.NoError(t, s.Register(t.Context()))

	newer := nightly()
	newer.Spec = "0 0 2 1 *"
	n := scheduler(t, db, onceqcron.Config{}, newer)
	require.NoError(t, n.Register(t.Context()))
	require.Equal(t, 1, live(t, db))
	require.Equal(t, onceq.StateDelayed, db.RunOne(n.Handlers()...).State, "the job has looked, and waits for the new time")
	require.Empty(t, fired(t, db))
	var runAt time.Time
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select run_at from onceq.jobs`).Scan(&runAt))
	zone, err := time.LoadLocation(inKolkata)
	require.NoError(t, err)
	require.Equal(t, "01-02 00:00", runAt.In(zone).Format("01-02 15:04"))

	// A tick that is overdue when the deploy comes happens, by the new code.
	overdue(t, db, "nightly", now(t, db).Add(-time.Minute))
	require.NoError(t, s.Register(t.Context()))
	db.RunOne(s.Handlers()...)
	require.Len(t, fired(t, db), 1)
}

// hourly is a schedule with four ticks in the last four hours, the first and the last of them half an hour from their ends.
func hourly(t *testing.T, db *queuetest.DB) (one onceqcron.Schedule, ticks []time.Time) {
	one = onceqcron.Schedule{Name: "n", Spec: halfAnHourAway(t, db), Job: report.Job("old")}
	table, err := onceqcron.Parse(one.Spec, "")
	require.NoError(t, err)
	at := now(t, db).Add(-4 * time.Hour)
	for range 4 {
		at = table.Next(at)
		ticks = append(ticks, at.UTC())
	}
	return one, ticks
}

// A deploy after an outage changes the timetable and the rule for missed ticks. The outage is one of the old timetable, and of its rule.
func TestRegister_ANewTimetableLosesNoTickOfTheOldOne(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		missed onceqcron.Missed
		fires  int // how many of the latest ticks
		ledger []string
	}{
		{"the latest", onceqcron.Latest(2 * time.Hour), 1, []string{"fired 1", "missed 3"}},
		{"the latest, too late", onceqcron.Latest(10 * time.Minute), 0, []string{"missed 4"}},
		{"all", onceqcron.All(100), 4, []string{"fired 1", "fired 1", "fired 1", "fired 1"}},
		{"all up to two", onceqcron.All(2), 2, []string{"fired 1", "fired 1", "missed 2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			old, ticks := hourly(t, db)
			old.Missed = c.missed
			before := scheduler(t, db, onceqcron.Config{}, old)
			require.NoError(t, before.Register(t.Context()))
			overdue(t, db, "n", ticks[0])
			newer := old
			newer.Spec, newer.Missed = "@every 1000h", onceqcron.Missed{}
			after := scheduler(t, db, onceqcron.Config{}, newer)
			for _, s := range []*onceqcron.Scheduler{after, before} { // the old one comes back, and nothing happens twice
				require.NoError(t, s.Register(t.Context()))
				require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
				require.Equal(t, ticks[4-c.fires:], utc(fired(t, db)))
				require.Equal(t, c.ledger, outcomes(t, s, "n"))
				list, err := s.List(t.Context(), nil)
				require.NoError(t, err)
				require.True(t, list[0].Next.After(now(t, db)))
				require.Equal(t, 1, live(t, db))
			}
		})
	}
}

// Processes with many timetables start while a worker ticks. Each overdue tick of the timetable that was there happens once.
func TestRegister_ManyTimetablesAtOnceOverOverdueTicks(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	old, ticks := hourly(t, db)
	old.Missed = onceqcron.All(100)
	s := scheduler(t, db, onceqcron.Config{}, old)
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "n", ticks[0])
	var all sync.WaitGroup
	for i := range 6 {
		newer := old
		newer.Spec = fmt.Sprintf("@every %dh", 1000+i)
		n := scheduler(t, db, onceqcron.Config{}, newer)
		all.Go(func() {
			if err := n.Register(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Go(func() { db.RunOne(s.Handlers()...) })
	all.Wait()
	require.Equal(t, ticks, utc(fired(t, db)))
	require.Equal(t, []string{"fired 1", "fired 1", "fired 1", "fired 1"}, outcomes(t, s, "n"))
	require.Equal(t, 1, live(t, db))
}

// The overdue ticks of a schedule of the table are made up for in the transaction that changes its timetable, with the new job.
func TestPut_ANewTimetableInACallersTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{})
	one, ticks := hourly(t, db)
	one.Missed = onceqcron.All(3)
	require.NoError(t, s.Put(t.Context(), nil, one))
	overdue(t, db, "n", ticks[0])
	one.Spec, one.Job = "@every 1000h", report.Job("new")
	changed := errors.New("the caller has changed his mind")
	require.ErrorIs(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		require.NoError(t, s.Put(t.Context(), tx, one))
		return changed
	}), changed)
	require.Empty(t, fired(t, db))
	require.Empty(t, outcomes(t, s, "n"))
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return s.Put(t.Context(), tx, one) }))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	require.Equal(t, ticks[1:], utc(fired(t, db)))
	require.Equal(t, []string{"fired 1", "fired 1", "fired 1", "missed 1"}, outcomes(t, s, "n"))
	var olds int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from onceq.jobs where kind = 'report' and payload #>> '{}' <> 'new'`).Scan(&olds))
	require.Zero(t, olds)
}

// Ticks that are overdue when a paused schedule changes are ticks of the pause.
func TestRegister_ANewTimetableOfAPausedSchedule(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	old, ticks := hourly(t, db)
	s := scheduler(t, db, onceqcron.Config{}, old)
	require.NoError(t, s.Register(t.Context()))
	require.NoError(t, s.Pause(t.Context(), nil, "n"))
	overdue(t, db, "n", ticks[0])
	newer := old
	newer.Spec = "@every 1000h"
	n := scheduler(t, db, onceqcron.Config{}, newer)
	require.NoError(t, n.Register(t.Context()))
	require.NoError(t, n.Resume(t.Context(), nil, "n"))
	require.Equal(t, onceq.StateDelayed, db.RunOne(n.Handlers()...).State)
	require.Empty(t, fired(t, db))
	require.Equal(t, []string{fmt.Sprint("paused ", len(ticks))}, outcomes(t, n, "n"))
}

// Nobody knows the overdue ticks of a Timetable that is no longer in the code. The first of them happens, and none that the new timetable
// would have had before the change.
func TestRegister_ATimetableThatChangesOverAnOverdueTick(t *testing.T) {
	t.Parallel()
	for _, again := range []bool{false, true} {
		db := queuetest.New(t)
		due := now(t, db).Add(-5 * time.Hour).Truncate(time.Second)
		old := onceqcron.Schedule{Name: "nightly", Timetable: at{due, due.Add(time.Hour), due.AddDate(1, 0, 0)}, Job: report.Job("all"), Missed: onceqcron.All(100)}
		require.NoError(t, scheduler(t, db, onceqcron.Config{}, old).Register(t.Context()))
		overdue(t, db, "nightly", due)
		newer := old
		newer.Timetable, newer.Spec = nil, "* * * * * *"
		s := scheduler(t, db, onceqcron.Config{}, newer)
		registered := now(t, db)
		require.NoError(t, s.Register(t.Context()))
		if again { // another process starts, with another job or another Missed
			newer.Missed = onceqcron.All(99)
			s = scheduler(t, db, onceqcron.Config{}, newer)
			require.NoError(t, s.Register(t.Context()))
		}
		require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
		times := utc(fired(t, db))
		require.NotEmpty(t, times)
		require.Equal(t, due.UTC(), times[0])
		for _, at := range times[1:] {
			require.True(t, at.After(registered), "%s was before the change", at)
		}
		require.NotContains(t, strings.Join(outcomes(t, s, "nightly"), ", "), "missed")

		// The next outage is one of the new timetable.
		earlier := now(t, db).Add(-10 * time.Second).Truncate(time.Second)
		_, err := db.Pool.Exec(t.Context(), `delete from onceq.schedule_ticks`)
		require.NoError(t, err)
		overdue(t, db, "nightly", earlier)
		require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
		require.Greater(t, len(outcomes(t, s, "nightly")), 9)
	}
}

// A process of the version before moves a schedule by the times of the version that has registered last.
func TestRegister_AnOldProcessKeepsToTheNewTimes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	old := nightly()
	old.Spec = "0 0 1 1 *"
	s := scheduler(t, db, onceqcron.Config{}, old)
	require.NoError(t, s.Register(t.Context()))
	newer := nightly()
	newer.Spec = "@every 1h"
	require.NoError(t, scheduler(t, db, onceqcron.Config{}, newer).Register(t.Context()))
	at := now(t, db).Add(-time.Minute)
	overdue(t, db, "nightly", at)
	db.RunOne(s.Handlers()...)
	require.Len(t, fired(t, db), 1)
	var next time.Time
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select next_at from onceq.schedules`).Scan(&next))
	require.WithinDuration(t, at.Add(time.Hour), next, time.Minute)
}

// The next tick is not late by what the handler of this one has taken.
func TestTick_AHandlerThatTakesLong(t *testing.T) {
	t.Parallel()
	const takes = 4 * time.Second
	db := queuetest.New(t)
	var returned time.Time
	slow := onceqcron.Schedule{Name: "n", Spec: "@every 1h", JobFor: func(onceqcron.Tick) (onceq.Job, error) {
		time.Sleep(takes)
		returned = time.Now()
		return report.Job("x"), nil
	}}
	s := scheduler(t, db, onceqcron.Config{}, slow)
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "n", now(t, db).Add(-time.Second))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	since := time.Since(returned)
	var late time.Duration
	require.NoError(t, db.Pool.QueryRow(t.Context(), `
		select j.run_at - s.next_at from onceq.jobs j join onceq.schedules s on s.name = j.key`).Scan(&late))
	require.GreaterOrEqual(t, late, time.Duration(0))
	require.LessOrEqual(t, late, since, "what came after it")
}

// A tick that is further away than a time.Duration can say is waited for all the same.
func TestTick_TheNextIsFourHundredYearsAway(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	far := time.Date(2426, 1, 1, 0, 0, 0, 0, time.UTC)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "n", Timetable: at{far}, Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "n", now(t, db).Add(-time.Second))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.True(t, list[0].Next.Equal(far))
	var waits bool
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select run_at > statement_timestamp() + interval '1 year' from onceq.jobs where key = 'n'`).Scan(&waits))
	require.True(t, waits)
}

// An error that Postgres cannot store as it is stands in the ledger, and the next tick comes.
func TestTick_AnErrorThatCannotBeStored(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	code := onceqcron.Schedule{Name: "nightly", Spec: "@every 1h", JobFor: func(onceqcron.Tick) (onceq.Job, error) {
		return onceq.Job{}, errors.New("bad\x00byte \xff")
	}}
	s := scheduler(t, db, onceqcron.Config{}, code)
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "nightly", now(t, db).Add(-time.Minute))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	ticks, err := s.Ticks(t.Context(), nil, "nightly", now(t, db), 10)
	require.NoError(t, err)
	require.Len(t, ticks, 1)
	require.Equal(t, []string{"refused", "bad\uFFFDbyte \uFFFD"}, []string{ticks[0].Outcome, ticks[0].Note})
}

// A job can be claimed a million times. Before that another one ticks.
func TestTick_AfterAMillion(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	tables := scheduler(t, db, onceqcron.Config{})
	code := nightly()
	code.Spec = "@every 1h"
	s := scheduler(t, db, onceqcron.Config{}, code)
	require.NoError(t, s.Register(t.Context()))
	require.NoError(t, tables.Put(t.Context(), nil, onceqcron.Schedule{Name: "of the table", Spec: "@every 1h", Job: report.Job("x")}))
	_, err := db.Pool.Exec(t.Context(), `update onceq.jobs set claims = 1048570`) // five more, and it is dead
	require.NoError(t, err)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, append(s.Handlers(), report.Handle(func(context.Context, *onceq.Lease, string) error { return nil }))...)
	require.NoError(t, err)
	for _, name := range []string{"nightly", "of the table"} {
		for range 3 {
			overdue(t, db, name, now(t, db).Add(-time.Minute))
			require.NoError(t, w.Drain(t.Context(), 0))
		}
	}
	var ticks, waiting, most int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `
		select (select count(*) from onceq.schedule_ticks where outcome = 'fired'), count(*), max(claims) from onceq.jobs`).Scan(&ticks, &waiting, &most))
	require.Equal(t, []int{6, 2}, []int{ticks, waiting})
	require.Less(t, most, 10)
}

// A tick that waits while its schedule is removed and put again in one transaction belongs to the new one.
func TestPut_AfterRemoveWhileATickWaits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{})
	one := onceqcron.Schedule{Name: "tenant 7", Spec: "@every 1h", Job: report.Job("x")}
	require.NoError(t, s.Put(t.Context(), nil, one))
	overdue(t, db, one.Name, now(t, db).Add(-time.Minute))
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from onceq.schedules for update`)
	require.NoError(t, err)
	ran := make(chan onceq.State, 1)
	go func() { ran <- db.RunOne(s.Handlers()...).State }()
	require.Eventually(t, func() bool {
		var waits bool
		err := db.Pool.QueryRow(context.Background(), `select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`).Scan(&waits)
		return err == nil && waits
	}, 5*time.Minute, 10*time.Millisecond)
	require.NoError(t, s.Remove(t.Context(), tx, one.Name))
	require.NoError(t, s.Put(t.Context(), tx, one))
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, onceq.StateDelayed, <-ran)
	require.Equal(t, 1, live(t, db))
}

// A schedule that is removed while Put waits for its row is made anew.
func TestPut_WhileItIsRemoved(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{})
	one := onceqcron.Schedule{Name: "tenant 7", Spec: "@every 1h", Job: report.Job("x")}
	require.NoError(t, s.Put(t.Context(), nil, one))
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from onceq.schedules for update`)
	require.NoError(t, err)
	put := make(chan error, 1)
	go func() { put <- s.Put(context.Background(), nil, one) }()
	require.Eventually(t, func() bool {
		var waits bool
		err := db.Pool.QueryRow(context.Background(), `select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`).Scan(&waits)
		return err == nil && waits
	}, 5*time.Minute, 10*time.Millisecond)
	require.NoError(t, s.Remove(t.Context(), tx, one.Name))
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-put)
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, 1, live(t, db))
}

// Backfill leaves an overdue tick to the schedule, and counts the ticks of @every as the schedule does.
func TestBackfill_OnlyWhatTheScheduleDoesNotFire(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{})
	one := onceqcron.Schedule{Name: "hourly", Spec: "@every 1h", Job: report.Job("x")}
	require.NoError(t, s.Put(t.Context(), nil, one))
	start := now(t, db).Add(-5*time.Hour - 17*time.Minute)
	overdue(t, db, one.Name, start.Add(4*time.Hour))
	n, err := s.Backfill(t.Context(), nil, one.Name, start.Add(-time.Minute), now(t, db))
	require.NoError(t, err)
	require.Equal(t, 4, n)
	for i, at := range fired(t, db) {
		require.WithinDuration(t, start.Add(time.Duration(i)*time.Hour), at, time.Millisecond)
	}
	n, err = s.Backfill(t.Context(), nil, one.Name, start.Add(-time.Minute), now(t, db))
	require.NoError(t, err)
	require.Zero(t, n)
	db.RunOne(s.Handlers()...)
	require.Len(t, fired(t, db), 5)
}

// The ledger has one line for ticks that were missed in a row. Those that are back-filled get lines of their own, and the line goes on
// standing for the others.
func TestBackfill_SomeOfTheTicksMissedInARow(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	start := now(t, db).Truncate(time.Second)
	var ticks at
	for h := -6; h < 0; h++ {
		ticks = append(ticks, start.Add(time.Duration(h)*time.Hour))
	}
	one := onceqcron.Schedule{Name: "n", Timetable: append(ticks, start.Add(time.Hour)), Job: report.Job("x"), Missed: onceqcron.Skip()}
	s := scheduler(t, db, onceqcron.Config{}, one)
	require.NoError(t, s.Register(t.Context()))
	miss := func() {
		t.Helper()
		_, err := db.Pool.Exec(t.Context(), `delete from onceq.schedule_ticks`)
		require.NoError(t, err)
		overdue(t, db, "n", ticks[0])
		require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
		require.Equal(t, []string{"missed 6"}, outcomes(t, s, "n"))
	}
	backfill := func(s *onceqcron.Scheduler, from, to int) {
		t.Helper()
		n, err := s.Backfill(t.Context(), nil, "n", ticks[from], ticks[to])
		require.NoError(t, err)
		require.Equal(t, to-from+1, n)
	}
	// The ledger has "-" where a tick is missed and "x" where it is fired; a bar is between lines.
	ledger := func(want string) {
		t.Helper()
		lines, err := s.Ticks(t.Context(), nil, "n", start, 100)
		require.NoError(t, err)
		var got []string
		missed := 0
		for _, d := range lines {
			first, last := 0, 0
			for i, at := range ticks {
				if at.Equal(d.At) {
					first = i
				}
				if at.Equal(d.Until) {
					last = i
				}
			}
			require.Equal(t, d.Ticks, last-first+1)
			got = append([]string{strings.Repeat(map[string]string{"missed": "-", "fired": "x"}[d.Outcome], d.Ticks)}, got...)
			if d.Outcome == "missed" {
				missed += d.Ticks
			}
		}
		require.Equal(t, want, strings.Join(got, "|"))
		found, err := s.Health(t.Context(), nil)
		require.NoError(t, err)
		if missed == 0 {
			require.Empty(t, found)
			return
		}
		require.Len(t, found, 1)
		require.Contains(t, found[0].Detail, fmt.Sprintf("%d tick", missed))
	}

	miss()
	backfill(s, 0, 0)
	ledger("x|-----")
	backfill(s, 1, 1)
	ledger("x|x|----")
	backfill(s, 4, 4)
	ledger("x|x|--|x|-")
	backfill(s, 5, 5)
	ledger("x|x|--|x|x")
	backfill(s, 2, 3)
	ledger("x|x|x|x|x|x")
	miss()
	backfill(s, 1, 2)
	ledger("-|x|x|---")
	miss()
	backfill(s, 0, 5)
	ledger("x|x|x|x|x|x")

	// Which ticks they were is unknown after the timetable has changed.
	miss()
	one.Timetable = at{ticks[0], ticks[1], start.Add(-20 * time.Minute), start.Add(time.Hour)}
	changed := scheduler(t, db, onceqcron.Config{}, one)
	backfill(changed, 0, 0)
	ledger("x|-----")
	backfill(changed, 1, 1)
	require.Equal(t, []string{"missed 4", "fired 1", "fired 1"}, outcomes(t, changed, "n"))
}

func TestRegister_OthersSchedulesStay(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	a := scheduler(t, db, onceqcron.Config{Owner: "a"}, nightly())
	require.NoError(t, a.Register(t.Context()))
	b := scheduler(t, db, onceqcron.Config{Owner: "b"}, nightly())
	var owner *onceqcron.OwnerError
	require.ErrorAs(t, b.Register(t.Context()), &owner)
	require.Equal(t, onceqcron.OwnerError{Schedule: "nightly", Owner: "a"}, *owner)
	require.ErrorAs(t, b.Remove(t.Context(), nil, "nightly"), &owner)

	removed, err := scheduler(t, db, onceqcron.Config{Owner: "b"}).Prune(t.Context())
	require.NoError(t, err)
	require.Empty(t, removed)
	later := scheduler(t, db, onceqcron.Config{Owner: "a"})
	require.NoError(t, later.Put(t.Context(), nil, onceqcron.Schedule{Name: "of the table", Spec: "@daily", Job: report.Job("x")}))
	removed, err = later.Prune(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"nightly"}, removed)
	list, err := later.List(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, list, 1, "that of the table stays")
	require.Equal(t, 1, live(t, db), "the job of the removed one is cancelled")
}

func TestPut_InACallersTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{})
	one := onceqcron.Schedule{Name: "tenant 7", Spec: "@every 1h", Job: onceq.Job{Kind: "report", Payload: "seven", Queue: "reports", Metadata: map[string]string{"tenant": "7"}}}
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, s.Put(t.Context(), tx, one))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Zero(t, live(t, db))
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, list)

	require.NoError(t, s.Put(t.Context(), nil, one))
	overdue(t, db, "tenant 7", now(t, db).Add(-time.Second))
	other := scheduler(t, db, onceqcron.Config{}) // any process fires it
	db.RunOne(other.Handlers()...)
	var queue, payload, tenant string
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select queue, payload #>> '{}', metadata->>'tenant' from onceq.jobs where kind = 'report'`).Scan(&queue, &payload, &tenant))
	require.Equal(t, []string{"reports", "seven", "7"}, []string{queue, payload, tenant})

	require.NoError(t, s.Remove(t.Context(), nil, "tenant 7"))
	require.ErrorIs(t, s.Remove(t.Context(), nil, "tenant 7"), onceqcron.ErrNotFound)
	require.NoError(t, s.Put(t.Context(), nil, one), "and again")
	overdue(t, db, "tenant 7", now(t, db).Add(-time.Second))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
}

func TestPauseResumeFireBackfill(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	hourly := onceqcron.Schedule{Name: "h", Spec: "0 * * * *", Job: report.Job("x")}
	s := scheduler(t, db, onceqcron.Config{}, hourly)
	require.NoError(t, s.Register(t.Context()))
	require.NoError(t, s.Pause(t.Context(), nil, "h"))
	require.NoError(t, s.Register(t.Context()), "a restart does not end the pause")
	overdue(t, db, "h", now(t, db).Add(-3*time.Hour))
	require.Equal(t, onceq.StateCompleted, db.RunOne(s.Handlers()...).State)
	require.Empty(t, fired(t, db))
	require.Zero(t, live(t, db))

	id, err := s.Fire(t.Context(), nil, "h")
	require.NoError(t, err)
	require.NotZero(t, id)
	require.Len(t, fired(t, db), 1)

	require.NoError(t, s.Resume(t.Context(), nil, "h"))
	require.NoError(t, s.Resume(t.Context(), nil, "h"))
	require.Equal(t, 1, live(t, db))
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.True(t, list[0].Next.After(now(t, db)), "what the pause had is over")

	end := now(t, db).Truncate(time.Hour)
	n, err := s.WouldBackfill(t.Context(), nil, "h", end.Add(-4*time.Hour), end)
	require.NoError(t, err)
	require.Equal(t, 5, n)
	n, err = s.Backfill(t.Context(), nil, "h", end.Add(-4*time.Hour), end)
	require.NoError(t, err)
	require.Equal(t, 5, n)
	n, err = s.WouldBackfill(t.Context(), db.Pool, "h", end.Add(-6*time.Hour), end)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	n, err = s.Backfill(t.Context(), nil, "h", end.Add(-6*time.Hour), end)
	require.NoError(t, err)
	require.Equal(t, 2, n, "each once")
	_, err = s.Backfill(t.Context(), nil, "h", end, end.AddDate(1, 0, 0))
	require.ErrorContains(t, err, `onceqcron: Backfill of schedule "h" ends at `+end.AddDate(1, 0, 0).UTC().Format(time.RFC3339)+", which is still to come: ")
	_, err = s.Backfill(t.Context(), nil, "h", end.AddDate(-2, 0, 0), end)
	require.EqualError(t, err, `onceqcron: Backfill of schedule "h" has more than 10000 ticks; back-fill a shorter time first`)
	_, err = s.WouldBackfill(t.Context(), nil, "h", end, end.AddDate(1, 0, 0))
	require.ErrorContains(t, err, "still to come")
	_, err = s.WouldBackfill(t.Context(), nil, "unknown", end, end)
	require.ErrorIs(t, err, onceqcron.ErrNotFound)
	_, err = s.Fire(t.Context(), nil, "unknown")
	require.ErrorIs(t, err, onceqcron.ErrNotFound)
}

// The ledger has a line for the ticks of a pause. What is back-filled meanwhile, or later, has lines of its own.
func TestPause_TheLedgerHasItsTicks(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "e", Spec: "@every 1h", Job: report.Job("x"), Missed: onceqcron.All(10)})
	require.NoError(t, s.Register(t.Context()))
	start := now(t, db).Truncate(time.Second).Add(-5*time.Hour - 17*time.Minute)
	require.NoError(t, s.Pause(t.Context(), nil, "e"))
	require.NoError(t, s.Resume(t.Context(), nil, "e"))
	require.Empty(t, outcomes(t, s, "e"), "a pause without a tick")

	require.NoError(t, s.Pause(t.Context(), nil, "e"))
	overdue(t, db, "e", start)
	n, err := s.Backfill(t.Context(), nil, "e", start, start.Add(time.Hour))
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, []string{"paused 4", "fired 1", "fired 1"}, outcomes(t, s, "e"))
	overdue(t, db, "e", start.Add(6*time.Hour)) // where it is
	require.NoError(t, s.Resume(t.Context(), nil, "e"))
	require.Equal(t, []string{"paused 4", "fired 1", "fired 1"}, outcomes(t, s, "e"))
	lines, err := s.Ticks(t.Context(), nil, "e", now(t, db), 1)
	require.NoError(t, err)
	require.Equal(t, []time.Time{start.Add(2 * time.Hour).UTC(), start.Add(5 * time.Hour).UTC()}, utc([]time.Time{lines[0].At, lines[0].Until}))
	found, err := s.Health(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, found, "somebody wanted it so")

	n, err = s.Backfill(t.Context(), nil, "e", start.Add(3*time.Hour), start.Add(3*time.Hour))
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, []string{"paused 2", "fired 1", "paused 1", "fired 1", "fired 1"}, outcomes(t, s, "e"))
	n, err = s.Backfill(t.Context(), nil, "e", start, now(t, db))
	require.NoError(t, err)
	require.Equal(t, 3, n)
	require.Len(t, fired(t, db), 6)
	require.NotContains(t, strings.Join(outcomes(t, s, "e"), " "), "paused")
}

// The ticks of a long pause are counted as those of a long outage are.
func TestPause_ASecondsScheduleForAYear(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "s", Spec: "* * * * * *", Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	require.NoError(t, s.Pause(t.Context(), nil, "s"))
	start := now(t, db).Truncate(time.Second).AddDate(-1, 0, 0)
	overdue(t, db, "s", start)
	require.NoError(t, s.Resume(t.Context(), nil, "s"))
	lines, err := s.Ticks(t.Context(), nil, "s", now(t, db), 10)
	require.NoError(t, err)
	require.Len(t, lines, 1)
	require.Equal(t, "paused", lines[0].Outcome)
	require.GreaterOrEqual(t, lines[0].Ticks, 10_000)
	require.Less(t, lines[0].Ticks, 20_000)
	require.True(t, lines[0].At.Equal(start))
	require.WithinDuration(t, now(t, db), lines[0].Until, time.Minute)
	require.Empty(t, fired(t, db))
}

// After a pause @every goes on in its step, so that Backfill finds the ticks that have happened.
func TestBackfill_OfEveryAfterAPause(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "e", Spec: "@every 1h", Job: report.Job("x"), Missed: onceqcron.All(10)})
	require.NoError(t, s.Register(t.Context()))
	start := now(t, db).Truncate(time.Second).Add(-3*time.Hour - 17*time.Minute)
	overdue(t, db, "e", start)
	db.RunOne(s.Handlers()...)
	require.Len(t, fired(t, db), 4)
	require.NoError(t, s.Pause(t.Context(), nil, "e"))
	require.NoError(t, s.Resume(t.Context(), nil, "e"))
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.WithinDuration(t, start.Add(4*time.Hour), list[0].Next, 0)
	n, err := s.Backfill(t.Context(), nil, "e", start.Add(-time.Minute), now(t, db))
	require.NoError(t, err)
	require.Zero(t, n)
	n, err = s.Backfill(t.Context(), nil, "e", start.Add(-90*time.Minute), now(t, db))
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// A worker of another owner fires a schedule of the table, and keeps its ledger for a year. It does not fire one of the code, also if its own
// code has one of that name.
func TestTick_OfAnotherOwner(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	a := scheduler(t, db, onceqcron.Config{Owner: "a", Keep: 365 * 24 * time.Hour}, nightly())
	b := scheduler(t, db, onceqcron.Config{Owner: "b"}, nightly())
	require.NoError(t, a.Register(t.Context()))
	overdue(t, db, "nightly", now(t, db).Add(-time.Second))
	require.Equal(t, onceq.StateRetrying, db.RunOne(b.Handlers()...).State)
	require.Empty(t, fired(t, db))
	_, err := db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = now() + interval '1 hour' where key = 'nightly'`) // and not in two seconds
	require.NoError(t, err)

	require.NoError(t, a.Put(t.Context(), nil, onceqcron.Schedule{Name: "x", Spec: "@daily", Job: report.Job("x")}))
	_, err = db.Pool.Exec(t.Context(), `
insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome, done_at)
select 'x', n, n, 1, 'fired', n from (values (now() - interval '100 days'), (now() - interval '400 days')) v (n)`)
	require.NoError(t, err)
	overdue(t, db, "x", now(t, db).Add(-time.Second))
	require.Equal(t, onceq.StateDelayed, db.RunOne(b.Handlers()...).State)
	require.Len(t, outcomes(t, a, "x"), 2, "that of now, and the one that is younger than a year")
	require.Len(t, fired(t, db), 1)
}

// After the database's clock was set back a paused schedule goes on, and what has happened does not happen again.
func TestClockSetBack(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	start := now(t, db)
	one := onceqcron.Schedule{Name: "h", Timetable: at{start.Add(time.Hour), start.Add(2 * time.Hour)}, Job: report.Job("x")}
	s := scheduler(t, db, onceqcron.Config{}, one)
	require.NoError(t, s.Register(t.Context()))
	next := func(hours int) {
		t.Helper()
		list, err := s.List(t.Context(), nil)
		require.NoError(t, err)
		require.WithinDuration(t, start.Add(time.Duration(hours)*time.Hour), list[0].Next, time.Millisecond)
		require.Equal(t, 1, live(t, db))
	}
	next(1)
	// What happened when the clock was years ahead hides none of the ticks before it.
	_, err := db.Pool.Exec(t.Context(), `insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome) values ('h', $1, $1, 1, 'fired')`, start.AddDate(5, 0, 0))
	require.NoError(t, err)
	require.NoError(t, s.Register(t.Context()))
	next(1)
	_, err = db.Pool.Exec(t.Context(), `insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome) values ('h', $1, $1, 1, 'fired')`, start.Add(time.Hour))
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.schedules set next_at = $1`, start.Add(2*time.Hour))
	require.NoError(t, err)
	require.NoError(t, s.Register(t.Context()))
	next(2)

	require.NoError(t, s.Pause(t.Context(), nil, "h"))
	overdue(t, db, "h", now(t, db).Add(-time.Second))
	require.Equal(t, onceq.StateCompleted, db.RunOne(s.Handlers()...).State)
	_, err = db.Pool.Exec(t.Context(), `update onceq.job_fences set finished_at = finished_at + interval '1 hour' where key = 'h'`)
	require.NoError(t, err)
	require.NoError(t, s.Resume(t.Context(), nil, "h"))
	next(2)
}

// A tick that the database's clock came to before it was set back does not happen again when it is due once more, nor does its line
// change.
func TestClockSetBack_WhatHasHappened(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	start := now(t, db)
	times := at{start.Add(-3 * time.Hour), start.Add(-2 * time.Hour), start.Add(-time.Hour), start.Add(time.Hour)}
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "h", Timetable: times, Job: report.Job("x"), Missed: onceqcron.All(7)})
	require.NoError(t, s.Register(t.Context()))
	_, err := db.Pool.Exec(t.Context(), `insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome, job_id) values ('h', $1, $1, 1, 'fired', 1), ('h', $2, $2, 1, 'fired', 2)`, times[0], times[2])
	require.NoError(t, err)
	overdue(t, db, "h", times[0])
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	require.Len(t, fired(t, db), 1)
	require.WithinDuration(t, times[1], fired(t, db)[0], 0)
	var lines int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from onceq.schedule_ticks where outcome = 'fired' and (at, job_id) in (($1, 1), ($2, 2))`, times[0], times[2]).Scan(&lines))
	require.Equal(t, 2, lines)
}

// The times of a Timetable may be finer than the table's. Each is one tick.
func TestTick_OfATimetableInNanoseconds(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "n", Timetable: new(soon), Job: report.Job("x"), Missed: onceqcron.All(7)})
	require.NoError(t, s.Register(t.Context()))
	for len(fired(t, db)) == 0 {
		db.Drain(s.Handlers()...)
	}
	require.Len(t, fired(t, db), 1)
	require.Equal(t, []string{"fired 1"}, outcomes(t, s, "n"))
}

// What the job of one tick does not allow is in the ledger, and the next tick comes.
func TestTick_ARefusedJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	calls := 0
	one := onceqcron.Schedule{Name: "n", Spec: "@hourly", Missed: onceqcron.All(10), JobFor: func(tick onceqcron.Tick) (onceq.Job, error) {
		calls++
		switch calls {
		case 1:
			return onceq.Job{}, errors.New("no data yet")
		case 2:
			return onceq.Job{Kind: "report", Key: " "}, nil
		}
		j := report.Job(tick.At.Format(time.TimeOnly))
		j.Key, j.Window = "daily", onceq.Forever
		j.IgnorePayload = true
		return j, nil
	}}
	s := scheduler(t, db, onceqcron.Config{}, one)
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "n", now(t, db).Truncate(time.Hour).Add(-3*time.Hour))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	require.Equal(t, []string{"duplicate 1", "fired 1", "refused 1", "refused 1"}, outcomes(t, s, "n"))
	ticks, err := s.Ticks(t.Context(), nil, "n", time.Now().AddDate(1, 0, 0), 100)
	require.NoError(t, err)
	require.Equal(t, "no data yet", ticks[3].Note)
	require.Contains(t, ticks[2].Note, "Key")
	require.Equal(t, ticks[0].JobID, ticks[1].JobID)

	// Health says so until they are back-filled, although later ticks happened.
	found, err := s.Health(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, "missed", found[0].What)
	require.Contains(t, found[0].Detail, `2 ticks of schedule "n" did not happen because the job was refused, between `)
	require.Contains(t, found[0].Detail, "; the latest says: "+ticks[2].Note)
	require.Equal(t, ticks[2].Note, found[0].Error)
	require.True(t, found[0].Since.Equal(ticks[3].At))
	require.Equal(t, "mend what makes its job; then back-fill them, if they still matter", found[0].Advice)
	require.Equal(t, []time.Time{ticks[3].At.UTC(), ticks[2].At.UTC()}, utc([]time.Time{found[0].From, found[0].To}))
	n, err := s.Backfill(t.Context(), nil, "n", found[0].To, found[0].To)
	require.NoError(t, err)
	require.Zero(t, n, "a duplicate is no job")
	found, err = s.Health(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Contains(t, found[0].Detail, `1 tick of schedule "n" did not happen because the job was refused, at `)
	require.Contains(t, found[0].Detail, "; the latest says: no data yet")
	n, err = s.Backfill(t.Context(), nil, "n", found[0].From, found[0].To)
	require.NoError(t, err)
	require.Zero(t, n, "a duplicate is no job")
	_, err = s.Fire(t.Context(), nil, "n")
	require.ErrorIs(t, err, onceq.ErrDuplicate)
	require.ErrorContains(t, err, fmt.Sprint("nothing is enqueued, because job ", ticks[0].JobID, " has the key of its job"))
	require.Len(t, outcomes(t, s, "n"), 4)
	asked, err := s.Ask(t.Context(), nil, "n", onceqcron.AskFire())
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, db.RunOne(s.Handlers()...).State)
	why, err := db.Queue.Get(t.Context(), db.Pool, asked)
	require.NoError(t, err)
	require.Contains(t, why.Errors[0].Error, "has the key of its job")
	found, err = s.Health(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, found)
}

// A tick whose job's key is still taken by a finished job enqueues nothing. Health says so, and says nothing of one that meets a job
// that still runs, which a key may be for.
func TestHealth_AKeyThatIsStillTaken(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	one := onceqcron.Schedule{Name: "n", Spec: "@hourly", Missed: onceqcron.All(100), JobFor: func(onceqcron.Tick) (onceq.Job, error) {
		return onceq.Job{Kind: "k", Key: "always"}, nil
	}}
	s := scheduler(t, db, onceqcron.Config{}, one)
	require.NoError(t, s.Register(t.Context()))
	ticks := func() []onceqcron.Done {
		t.Helper()
		overdue(t, db, "n", now(t, db).Truncate(time.Hour).Add(-time.Hour))
		require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
		all, err := s.Ticks(t.Context(), nil, "n", time.Now().AddDate(1, 0, 0), 100)
		require.NoError(t, err)
		return all
	}
	all := ticks()
	require.Equal(t, []string{"duplicate 1", "fired 1"}, outcomes(t, s, "n"))
	require.Empty(t, all[0].Note)
	found, err := s.Health(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, found)

	_, err = db.Pool.Exec(t.Context(), `delete from `+db.Schema+`.schedule_ticks`)
	require.NoError(t, err)
	kind := onceq.Kind[any]{Name: "k"}
	db.Drain(kind.Handle(func(context.Context, *onceq.Lease, any) error { return nil }))
	all = ticks()
	require.Equal(t, []string{"duplicate 1", "duplicate 1"}, outcomes(t, s, "n"))
	require.Equal(t, fmt.Sprintf("its key is still taken by job %d, which is completed", all[0].JobID), all[0].Note)
	found, err = s.Health(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, "duplicate", found[0].What)
	require.Equal(t, `2 of the last day's ticks of schedule "n" enqueued nothing, because the key of its job was still taken by one that had finished`, found[0].Detail)
	require.Contains(t, found[0].Advice, "leave out the Key of its job")
	require.Equal(t, utc([]time.Time{all[1].At, all[0].At}), utc([]time.Time{found[0].From, found[0].To}))

	// One that enqueued nothing has not run for those that were missed before.
	latest := onceqcron.Schedule{Name: "latest", Spec: "@hourly", Job: onceq.Job{Kind: "k", Key: "always"}}
	s = scheduler(t, db, onceqcron.Config{}, latest)
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "latest", now(t, db).Truncate(time.Hour).Add(-4*time.Hour))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	require.Equal(t, []string{"duplicate 1", "missed 4"}, outcomes(t, s, "latest"))
	found, err = s.Health(t.Context(), nil)
	require.NoError(t, err)
	var what []string
	for _, f := range found {
		if f.Name == "latest" {
			what = append(what, f.What)
		}
	}
	require.Equal(t, []string{"missed", "duplicate"}, what)
}

// A panic makes one tick's job impossible, and the next tick comes. The ledger says where it happened, and the log has the stack.
func TestTick_AJobThatPanics(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	log := new(bytes.Buffer)
	q, err := onceq.New(db.Pool, &onceq.Config{Logger: slog.New(slog.NewTextHandler(log, nil))})
	require.NoError(t, err)
	calls := 0
	s, err := onceqcron.New(q, db.Pool, onceqcron.Config{}, onceqcron.Schedule{Name: "n", Spec: "@every 1h", Missed: onceqcron.All(10), JobFor: func(onceqcron.Tick) (onceq.Job, error) {
		if calls++; calls == 1 {
			panic("no data yet")
		}
		return report.Job("x"), nil
	}})
	require.NoError(t, err)
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "n", now(t, db).Add(-90*time.Minute))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	require.Equal(t, []string{"fired 1", "refused 1"}, outcomes(t, s, "n"))
	ticks, err := s.Ticks(t.Context(), nil, "n", now(t, db), 10)
	require.NoError(t, err)
	require.Regexp(t, `^panic: no data yet\n\ngithub.com/onceq/onceq/onceqcron_test.TestTick_AJobThatPanics.func1 at .*cron_test.go:\d+$`, ticks[1].Note)
	require.Contains(t, log.String(), "onceqcron.(*Scheduler).tick", "the whole stack")
	found, err := s.Health(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.True(t, strings.HasSuffix(found[0].Detail, "; the latest says: panic: no data yet"), found[0].Detail)
}

// However long a panic's value is, the note is short and says where it happened. A nil pointer is one of the handler's, and not of the
// runtime's.
func TestTick_ALongPanic(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	calls := 0
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "n", Spec: "@every 1h", Missed: onceqcron.All(10), JobFor: func(onceqcron.Tick) (job onceq.Job, err error) {
		if calls++; calls == 1 {
			panic(strings.Repeat("x", 10_000))
		}
		var none *onceq.Job
		return *none, nil
	}})
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "n", now(t, db).Add(-90*time.Minute))
	require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	ticks, err := s.Ticks(t.Context(), nil, "n", now(t, db), 10)
	require.NoError(t, err)
	require.Len(t, ticks, 2)
	for i, start := range []string{"panic: runtime error: invalid memory address", "panic: xxxx"} {
		require.True(t, strings.HasPrefix(ticks[i].Note, start), ticks[i].Note)
		require.Regexp(t, `TestTick_ALongPanic.func1 at .*cron_test.go:\d+$`, ticks[i].Note)
		require.Less(t, len(ticks[i].Note), 1000)
	}
}

// The times of a tick are in one zone, wherever they come from: a key that is made of them is the same each time.
func TestTick_TimesAreInTheZoneOfTheSchedule(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	start := now(t, db).Truncate(time.Second)
	elsewhere := time.FixedZone("elsewhere", 3600)
	var fixed at
	for h := -6; h <= 1; h++ {
		fixed = append(fixed, start.Add(time.Duration(h)*time.Hour).In(elsewhere))
	}
	var times []time.Time
	job := func(tick onceqcron.Tick) (onceq.Job, error) {
		times = append(times, tick.At, tick.Now)
		return report.Job("x"), nil
	}
	s := scheduler(t, db, onceqcron.Config{},
		onceqcron.Schedule{Name: "berlin", Spec: "0 * * * *", Zone: "Europe/Berlin", Missed: onceqcron.All(10), JobFor: job},
		onceqcron.Schedule{Name: "every", Spec: "@every 1h", Zone: "Europe/Berlin", Missed: onceqcron.All(10), JobFor: job},
		onceqcron.Schedule{Name: "utc", Spec: "0 * * * *", Missed: onceqcron.All(10), JobFor: job},
		onceqcron.Schedule{Name: "timetable", Timetable: fixed, Missed: onceqcron.All(10), JobFor: job})
	require.NoError(t, s.Register(t.Context()))
	for name, zone := range map[string]string{"berlin": "Europe/Berlin", "every": "Europe/Berlin", "utc": "UTC", "timetable": "UTC"} {
		in := func(what string) {
			t.Helper()
			require.NotEmpty(t, times, "%s of %s", what, name)
			for _, at := range times {
				require.Equal(t, zone, at.Location().String(), "%s of %s", what, name)
			}
			times = nil
		}
		first := start.Add(-3 * time.Hour)
		if name != "timetable" {
			first = first.Truncate(time.Hour)
		}
		overdue(t, db, name, first)
		require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
		in("ticks")
		_, err := s.Fire(t.Context(), nil, name)
		require.NoError(t, err)
		in("Fire")
		n, err := s.Backfill(t.Context(), nil, name, first.Add(-2*time.Hour).In(elsewhere), first.In(elsewhere))
		require.NoError(t, err)
		require.Equal(t, 2, n)
		in("Backfill")
	}
}

// Changes at the very moment of a tick: the tick holds the schedule's row, or waits for it.
func TestPut_BesideATick(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	inside, goOn := make(chan struct{}), make(chan struct{})
	slow := onceqcron.Schedule{Name: "n", Spec: "@hourly", JobFor: func(onceqcron.Tick) (onceq.Job, error) {
		close(inside)
		<-goOn
		return report.Job("x"), nil
	}}
	s := scheduler(t, db, onceqcron.Config{}, slow)
	require.NoError(t, s.Register(t.Context()))
	overdue(t, db, "n", now(t, db).Add(-time.Second))
	var ticking, changing sync.WaitGroup
	ticking.Go(func() { db.RunOne(s.Handlers()...) })
	<-inside
	yearly := onceqcron.Schedule{Name: "n", Spec: "@yearly", Job: report.Job("x")}
	y := scheduler(t, db, onceqcron.Config{}, yearly)
	changing.Go(func() {
		if err := y.Register(context.Background()); err != nil {
			t.Error(err)
		}
	})
	require.Eventually(t, func() bool {
		var waits int
		_ = db.Pool.QueryRow(context.Background(), `select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%schedules%'`).Scan(&waits)
		return waits == 1
	}, 5*time.Minute, 5*time.Millisecond)
	close(goOn)
	ticking.Wait()
	changing.Wait()
	require.Len(t, fired(t, db), 1)
	require.Equal(t, onceq.StateDelayed, db.RunOne(y.Handlers()...).State, "the job looks again")
	list, err := y.List(t.Context(), nil)
	require.NoError(t, err)
	var runAt time.Time
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select run_at from onceq.jobs where key = 'n'`).Scan(&runAt))
	require.Less(t, runAt.Sub(list[0].Next).Abs(), time.Minute)
	require.Equal(t, time.January, runAt.UTC().Month())
}

func TestNew_BadSchedules(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	good := nightly()
	for want, change := range map[string]func(*onceqcron.Schedule){
		"Name is empty":      func(s *onceqcron.Schedule) { s.Name = " " },
		"Name has 201 bytes": func(s *onceqcron.Schedule) { s.Name = strings.Repeat("x", 201) },
		"Name has 119 bytes; at most 118 for a schedule in code": func(s *onceqcron.Schedule) { s.Name = strings.Repeat("x", 119) },
		`field 2, the hour`:   func(s *onceqcron.Schedule) { s.Spec = "0 24 * * *" },
		`zone "Mars/Olympus"`: func(s *onceqcron.Schedule) { s.Zone = "Mars/Olympus" },
		"Timetable of":        func(s *onceqcron.Schedule) { s.Timetable = at{} },
		"JobFor of": func(s *onceqcron.Schedule) {
			s.JobFor = func(onceqcron.Tick) (onceq.Job, error) { return onceq.Job{}, nil }
		},
		"has no Kind":         func(s *onceqcron.Schedule) { s.Job = onceq.Job{} },
		"Job.RunAt of":        func(s *onceqcron.Schedule) { s.Job.RunAt = time.Now() },
		"Missed Latest takes": func(s *onceqcron.Schedule) { s.Missed = onceqcron.Latest(-1) },
		"Missed All takes":    func(s *onceqcron.Schedule) { s.Missed = onceqcron.All(20_000) },
	} {
		bad := good
		change(&bad)
		_, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{}, bad)
		var invalid *onceq.InvalidError
		require.ErrorAs(t, err, &invalid, want)
		require.ErrorContains(t, err, want)
	}
	_, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{}, good, good)
	require.ErrorContains(t, err, `"nightly" is used by two schedules`)

	long := nightly()
	long.Name = strings.Repeat("x", 118)
	require.NoError(t, scheduler(t, db, onceqcron.Config{}, long).Register(t.Context()))
	of := scheduler(t, db, onceqcron.Config{})
	require.NoError(t, of.Put(t.Context(), nil, onceqcron.Schedule{Name: strings.Repeat("y", 200), Spec: "@daily", Job: report.Job("x")}))

	s := scheduler(t, db, onceqcron.Config{}, good)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	require.ErrorContains(t, s.Put(t.Context(), tx, good), "is the name of a schedule in the code")
	require.ErrorContains(t, s.Put(t.Context(), tx, onceqcron.Schedule{Name: "b", Spec: "@daily", Job: onceq.Job{Kind: "k", Payload: []byte("x")}}), "is bytes")
	require.ErrorContains(t, s.Put(t.Context(), tx, onceqcron.Schedule{Name: "b", Timetable: at{}, Job: report.Job("x")}), "cannot hold a Timetable")
	require.ErrorIs(t, s.Pause(t.Context(), tx, "b"), onceqcron.ErrNotFound)
	require.NoError(t, tx.Commit(t.Context()), "the transaction is still usable")
}

func TestTick_TheLedgerForgets(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{Keep: 36 * time.Hour}, onceqcron.Schedule{Name: "h", Spec: halfAnHourAway(t, db), Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	for range 3 {
		db.Advance(24 * time.Hour)
		require.Equal(t, onceq.StateDelayed, db.RunOne(s.Handlers()...).State)
	}
	require.Equal(t, []string{"fired 1", "missed 23", "fired 1", "missed 23"}, outcomes(t, s, "h")[:4])
	ticks, err := s.Ticks(t.Context(), nil, "h", time.Now().AddDate(1, 0, 0), 1000)
	require.NoError(t, err)
	for _, d := range ticks {
		require.Less(t, now(t, db).Sub(d.DoneAt), 36*time.Hour)
	}
	require.Len(t, fired(t, db), 3)
}

// proven is a timetable of a tick an hour that ended two days ago, one tick in some days, and no more. Prove moves the times in the table
// back, by some minutes after a fault and to the next tick between two, so that they are none of the timetable's.
type proven struct{ now time.Time }

func (p proven) Next(after time.Time) time.Time {
	switch {
	case after.Before(p.now.Add(-52 * time.Hour)):
		return after.Add(time.Hour)
	case after.Before(p.now.Add(-26 * time.Hour)):
		return p.now.Add(100 * time.Hour)
	}
	return time.Time{}
}

// Whatever happens to a process at any statement of a tick, the tick happens once: also one that counts those that were missed and
// waits for the next one, and the last one of a timetable.
func TestTick_Proven(t *testing.T) {
	t.Parallel()
	start := time.Now().Truncate(time.Second)
	past := start.Add(-55*time.Hour - 30*time.Minute)
	once := onceqcron.Schedule{Name: "once", Timetable: proven{start}, Job: report.Job("x"), Missed: onceqcron.Latest(100 * time.Hour)}
	queuetest.Prove(t, queuetest.Proof{
		Setup: func(ctx context.Context, pool *pgxpool.Pool) error {
			q, err := onceq.New(pool, nil)
			if err != nil {
				return err
			}
			s, err := onceqcron.New(q, pool, onceqcron.Config{}, once)
			if err != nil {
				return err
			}
			if err := s.Register(ctx); err != nil {
				return err
			}
			_, err = pool.Exec(ctx, `update onceq.schedules set next_at = $1`, past)
			return err
		},
		Job: func() onceq.Job {
			return onceq.Job{Kind: "onceqcron:once", Payload: "once", Queue: "onceqcron", Key: "once", Window: onceq.UntilFinished}
		},
		Handler: func(p *queuetest.Process) onceq.Handler {
			s, err := onceqcron.New(p.Queue, p.Pool, onceqcron.Config{}, once)
			if err != nil {
				panic(err)
			}
			return s.Handlers()[1]
		},
		Check: func(o *queuetest.Outcome) {
			require.Equal(o, 2, o.Count(`select count(*) from onceq.schedule_ticks where outcome = 'fired'`))
			require.Equal(o, 1, o.Count(`select count(*) from onceq.schedule_ticks where outcome = 'missed' and ticks = 4`))
			require.Equal(o, 3, o.Count(`select count(*) from onceq.schedule_ticks`))
			require.Equal(o, 2, o.Count(`select count(*) from onceq.jobs where kind = 'report'`))
		},
	})
}

// What Get returns, Put writes as it was: a schedule is changed in part. One of the code is not there to be changed.
func TestGet(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, nightly())
	require.NoError(t, s.Register(t.Context()))
	_, err := s.Get(t.Context(), nil, "nightly")
	require.ErrorIs(t, err, onceqcron.ErrElsewhere)
	_, err = s.Get(t.Context(), nil, "none")
	require.ErrorIs(t, err, onceqcron.ErrNotFound)
	_, err = s.Get(t.Context(), nil, "\x00")
	require.ErrorIs(t, err, onceqcron.ErrNotFound)

	one := onceqcron.Schedule{Name: "n", Spec: "@every 90m", Missed: onceqcron.All(7), Job: onceq.Job{
		Kind: "report", Queue: "reports", Key: "k", Scope: "tenant", Delay: time.Minute, Priority: onceq.PriorityLow, MaxAttempts: 3, Limit: "provider", Weight: 2,
		Metadata: map[string]string{"trace": "abc"}, Payload: map[string]any{"amount": 1.5},
	}}
	require.NoError(t, s.Put(t.Context(), nil, one))
	read := func() (job string, updated time.Time) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select job::text, updated_at from onceq.schedules where name = 'n'`).Scan(&job, &updated))
		return job, updated
	}
	job, written := read()
	got, err := s.Get(t.Context(), nil, "n")
	require.NoError(t, err)
	require.Equal(t, []any{one.Spec, "UTC", one.Missed, one.Job.Metadata}, []any{got.Spec, got.Zone, got.Missed, got.Job.Metadata})
	require.NoError(t, s.Put(t.Context(), nil, got))
	same, again := read()
	require.Equal(t, written, again, "nothing has changed")
	require.Equal(t, job, same)
	got.Spec, got.Zone = "0 2 * * *", "Europe/Berlin"
	require.NoError(t, s.Put(t.Context(), nil, got))
	same, again = read()
	require.True(t, again.After(written))
	require.Equal(t, job, same)
}

// Without tables every call says so, as those of the root package do.
func TestNoTables(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	q, err := onceq.New(db.Pool, &onceq.Config{Schema: "nowhere"})
	require.NoError(t, err)
	s, err := onceqcron.New(q, db.Pool, onceqcron.Config{}, nightly())
	require.NoError(t, err)
	ctx, now := t.Context(), now(t, db)
	other := nightly()
	other.Name = "other"
	for name, call := range map[string]func() error{
		"Register":      func() error { return s.Register(ctx) },
		"Put":           func() error { return s.Put(ctx, nil, other) },
		"Get":           func() error { _, err := s.Get(ctx, nil, "nightly"); return err },
		"Remove":        func() error { return s.Remove(ctx, nil, "nightly") },
		"Prune":         func() error { _, err := s.Prune(ctx); return err },
		"Pause":         func() error { return s.Pause(ctx, nil, "nightly") },
		"Resume":        func() error { return s.Resume(ctx, nil, "nightly") },
		"Fire":          func() error { _, err := s.Fire(ctx, nil, "nightly"); return err },
		"Ask":           func() error { _, err := s.Ask(ctx, nil, "nightly", onceqcron.AskFire()); return err },
		"Backfill":      func() error { _, err := s.Backfill(ctx, nil, "nightly", now, now); return err },
		"WouldBackfill": func() error { _, err := s.WouldBackfill(ctx, nil, "nightly", now, now); return err },
		"List":          func() error { _, err := s.List(ctx, nil); return err },
		"Ticks":         func() error { _, err := s.Ticks(ctx, nil, "nightly", now, 1); return err },
		"Health":        func() error { _, err := s.Health(ctx, nil); return err },
	} {
		err := call()
		var schema *onceq.SchemaError
		if !errors.As(err, &schema) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		require.Equal(t, onceq.SchemaError{Schema: "nowhere", Want: onceq.SchemaVersion}, *schema, name)
		require.ErrorContains(t, err, "migrations.Up", name)
		require.Equal(t, 1, strings.Count(err.Error(), "onceqcron: "), "%s: %v", name, err)
	}
}

// The machine's own zone is refused. A row that has it is not fired, and Health says why.
func TestLocalZone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	one := nightly()
	var bad *onceq.InvalidError
	for _, zone := range []string{"localtime", "LOCAL", "Local"} {
		one.Zone = zone
		_, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{}, one)
		require.ErrorAs(t, err, &bad)
		require.ErrorContains(t, err, `zone "`+zone+`" is another one on every machine`)
	}
	s := scheduler(t, db, onceqcron.Config{})
	for _, spec := range []string{one.Spec, "@every 1h"} {
		one.Spec = spec
		require.ErrorAs(t, s.Put(t.Context(), nil, one), &bad)
	}
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, list)

	require.NoError(t, s.Put(t.Context(), nil, nightly()))
	_, err = db.Pool.Exec(t.Context(), `update onceq.schedules set zone = 'Local'`)
	require.NoError(t, err)
	overdue(t, db, "nightly", now(t, db).Add(-5*time.Minute))
	db.RunOne(s.Handlers()...)
	require.Empty(t, fired(t, db))
	found, err := s.Health(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, "late", found[0].What)
	require.Contains(t, found[0].Detail, `zone "Local" is another one on every machine`)
	require.Contains(t, found[0].Advice, "Put")
}

// No limit of Ticks means 50, and a negative one is a mistake of the caller.
func TestTicks_Limit(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, nightly())
	require.NoError(t, s.Register(t.Context()))
	_, err := db.Pool.Exec(t.Context(), `
insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome)
select 'nightly', d, d, 1, 'missed' from generate_series(timestamptz '2026-01-01Z', '2026-02-21Z', '1 day') d`)
	require.NoError(t, err)
	_, err = s.Ticks(t.Context(), nil, "nightly", now(t, db), -1)
	var bad *onceq.InvalidError
	require.ErrorAs(t, err, &bad)
	require.EqualError(t, err, "onceqcron: limit is -1; it must not be negative, and 0 means 50")
	for limit, want := range map[int]int{0: 50, 1: 1, 51: 51, 100: 52} {
		ticks, err := s.Ticks(t.Context(), nil, "nightly", time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC), limit)
		require.NoError(t, err)
		require.Len(t, ticks, want)
	}
}

// A time that Postgres cannot store, or that RFC 3339 has no text for, is a mistake of the caller.
func TestTimes_OfYearsThatAreNotPossible(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	s := scheduler(t, db, onceqcron.Config{}, nightly())
	require.NoError(t, s.Register(ctx))
	end := now(t, db)
	for _, at := range []time.Time{
		time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC), time.Date(-4800, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Unix(math.MaxInt64, 0), time.Unix(math.MinInt64, 0),
	} {
		for _, times := range [][2]time.Time{{at, end}, {end, at}, {at, at}} {
			_, would := s.WouldBackfill(ctx, nil, "nightly", times[0], times[1])
			_, did := s.Backfill(ctx, nil, "nightly", times[0], times[1])
			_, asked := s.Ask(ctx, nil, "nightly", onceqcron.AskBackfill(times[0], times[1]))
			for _, err := range []error{would, did, asked} {
				var bad *onceq.InvalidError
				require.ErrorAs(t, err, &bad, times)
				require.ErrorContains(t, err, "1 to 9999 is possible", times)
			}
		}
		_, err := s.Ticks(ctx, nil, "nightly", at, 0)
		require.ErrorContains(t, err, "1 to 9999 is possible", at)
	}
}

// delays is a Timetable that counts from the time that it is asked about, as those of other libraries do.
type delays time.Duration

func (d delays) Next(after time.Time) time.Time {
	return after.Add(time.Duration(d)).Truncate(time.Second)
}

// Processes that start again and again put off no tick.
func TestRegister_PutsOffNoTick(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	parsed, err := onceqcron.Parse("@every 24h", "")
	require.NoError(t, err)
	schedules := func(d time.Duration) []onceqcron.Schedule {
		return []onceqcron.Schedule{
			{Name: "delays", Timetable: delays(d), Job: report.Job("x")},
			{Name: "parsed", Timetable: parsed, Job: report.Job("x")},
			{Name: "spec", Spec: "@every 24h", Job: report.Job("x")},
		}
	}
	next := func() (all []time.Time) {
		list, err := scheduler(t, db, onceqcron.Config{}).List(t.Context(), nil)
		require.NoError(t, err)
		for _, one := range list {
			all = append(all, one.Next.UTC())
		}
		return all
	}
	require.NoError(t, scheduler(t, db, onceqcron.Config{}, schedules(24*time.Hour)...).Register(t.Context()))
	first := next()
	db.Advance(12 * time.Hour) // moves what is in the tables
	for i := range first {
		first[i] = first[i].Add(-12 * time.Hour)
	}
	require.NoError(t, scheduler(t, db, onceqcron.Config{}, schedules(24*time.Hour)...).Register(t.Context()))
	require.Equal(t, first, next())

	// A Timetable that names times may change, and its type does not say so.
	soon := now(t, db).Add(time.Hour).Truncate(time.Second)
	register := func(one onceqcron.Schedule) {
		one.Name, one.Job = "times", report.Job("x")
		require.NoError(t, scheduler(t, db, onceqcron.Config{}, one).Register(t.Context()))
	}
	register(onceqcron.Schedule{Timetable: at{soon.Add(time.Hour)}})
	require.Equal(t, soon.Add(time.Hour).UTC(), next()[3])
	register(onceqcron.Schedule{Timetable: at{soon, soon.Add(time.Hour)}})
	require.Equal(t, soon.UTC(), next()[3])
}

// What the ledger has forgotten may have happened, and is not done again.
func TestBackfill_OfTicksThatTheLedgerHasForgotten(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{Keep: 36 * time.Hour}, onceqcron.Schedule{Name: "h", Spec: halfAnHourAway(t, db), Missed: onceqcron.Skip(), Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	from := now(t, db).Add(-10 * 24 * time.Hour)
	n, err := s.WouldBackfill(t.Context(), nil, "h", from, now(t, db))
	require.NoError(t, err, "before its time nothing happened")
	require.InDelta(t, 240, n, 1)

	overdue(t, db, "h", now(t, db))
	db.RunOne(s.Handlers()...)
	db.Advance(40 * time.Hour)
	db.RunOne(s.Handlers()...) // removes the line of that tick
	require.Len(t, outcomes(t, s, "h"), 1, "the missed ones")
	var bad *onceq.InvalidError
	for _, from := range []time.Time{from, now(t, db).Add(-41 * time.Hour)} {
		_, err = s.Backfill(t.Context(), nil, "h", from, now(t, db))
		require.ErrorAs(t, err, &bad)
		require.ErrorContains(t, err, "is removed from the ledger (Config.Keep): back-fill from then on")
	}
	n, err = s.Backfill(t.Context(), nil, "h", now(t, db).Add(-35*time.Hour), now(t, db))
	require.NoError(t, err)
	require.InDelta(t, 35, n, 1)
}

// The beginning of time is no loop over all seconds since.
func TestBackfill_FromLongAgo(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "s", Spec: "@every 1s", Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	var bad *onceq.InvalidError
	_, err := s.Backfill(t.Context(), nil, "s", time.Time{}, now(t, db))
	require.ErrorAs(t, err, &bad)
	require.ErrorContains(t, err, "more than 10000 ticks")
	list, err := s.List(t.Context(), nil)
	require.NoError(t, err)
	next := list[0].Next
	db.Advance(time.Second)
	n, err := s.WouldBackfill(t.Context(), nil, "s", next.Add(-11*time.Second), next.Add(-time.Second))
	require.NoError(t, err)
	require.InDelta(t, 10, n, 1)
}

// A schedule of the table whose ticking job was cancelled with everything else ticks again when a process of its owner starts.
func TestRegister_ACancelledJobOfTheTable(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "code", Spec: "@daily", Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	for _, name := range []string{"going", "paused", "removed", "table"} {
		require.NoError(t, s.Put(t.Context(), nil, onceqcron.Schedule{Name: name, Spec: "@daily", Job: report.Job("x")}))
	}
	require.NoError(t, scheduler(t, db, onceqcron.Config{Owner: "other"}).Put(t.Context(), nil, onceqcron.Schedule{Name: "others", Spec: "@daily", Job: report.Job("x")}))
	require.NoError(t, s.Pause(t.Context(), nil, "paused"))
	require.NoError(t, s.Remove(t.Context(), nil, "removed"))
	_, _, err := onceqops.New(db.Queue).CancelMany(t.Context(), db.Pool, onceqops.Filter{All: true})
	require.NoError(t, err)
	require.Zero(t, live(t, db))
	for range 2 {
		require.NoError(t, s.Register(t.Context()))
		rows, err := db.Pool.Query(t.Context(), `select key from onceq.jobs where kind like 'onceqcron%' order by key`)
		require.NoError(t, err)
		keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Equal(t, []string{"code", "going", "table"}, keys)
	}
}

// Who forgets Register hears of it: from the log when the handlers are asked for, and from each call that names the schedule.
func TestRegister_Forgotten(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	log := new(bytes.Buffer)
	q, err := onceq.New(db.Pool, &onceq.Config{Logger: slog.New(slog.NewTextHandler(log, nil))})
	require.NoError(t, err)
	s, err := onceqcron.New(q, db.Pool, onceqcron.Config{}, nightly())
	require.NoError(t, err)
	s.Handlers()
	require.Contains(t, log.String(), "call Register first")
	require.Contains(t, log.String(), "nightly")
	_, err = s.Fire(t.Context(), nil, "nightly")
	require.ErrorIs(t, err, onceqcron.ErrNotFound)
	require.EqualError(t, err, `onceqcron: no such schedule: "nightly" is in this code but not registered; call Register`)

	require.NoError(t, s.Register(t.Context()))
	log.Reset()
	s.Handlers()
	none, err := onceqcron.New(q, db.Pool, onceqcron.Config{})
	require.NoError(t, err)
	none.Handlers()
	require.Empty(t, log.String())
	_, err = s.Fire(t.Context(), nil, "nightly")
	require.NoError(t, err)
}

// A time that ends before it begins is an error, and not the answer that nothing is left to do.
func TestBackfill_FromAfterTo(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := scheduler(t, db, onceqcron.Config{}, onceqcron.Schedule{Name: "h", Spec: "0 * * * *", Job: report.Job("x")})
	require.NoError(t, s.Register(t.Context()))
	to := now(t, db).Truncate(time.Hour).Add(-5 * time.Hour)
	for _, paused := range []bool{false, true} {
		if paused {
			require.NoError(t, s.Pause(t.Context(), nil, "h"))
			overdue(t, db, "h", to)
		}
		for _, fill := range []func(context.Context, pgx.Tx) (int, error){
			func(ctx context.Context, tx pgx.Tx) (int, error) {
				return s.Backfill(ctx, tx, "h", to.Add(time.Hour), to)
			},
			func(ctx context.Context, tx pgx.Tx) (int, error) {
				return s.WouldBackfill(ctx, tx, "h", to.Add(time.Hour), to)
			},
		} {
			tx, err := db.Pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = fill(t.Context(), tx)
			var bad *onceq.InvalidError
			require.ErrorAs(t, err, &bad)
			require.ErrorContains(t, err, `Backfill of schedule "h" is from `+to.Add(time.Hour).UTC().Format(time.RFC3339)+" to "+to.UTC().Format(time.RFC3339)+", which is before that")
			require.NoError(t, tx.Commit(t.Context()))
			require.Empty(t, fired(t, db))
			require.Empty(t, outcomes(t, s, "h"))
		}
	}
	n, err := s.Backfill(t.Context(), nil, "h", to, to)
	require.NoError(t, err)
	require.Equal(t, 1, n, "one time alone is none of these")
}
