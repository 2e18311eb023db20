package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
)

// These are the schedules. Every worker process has them in its code.
const (
	everyTick  = "every"  // each second; all missed ticks are made up for
	latestTick = "latest" // every two seconds; those that are more than two seconds late are missed
	mixedTick  = "mixed"  // half of the processes have another version of it
)

// steps are the times between the ticks of the schedules of which there is one version.
var steps = map[string]time.Duration{everyTick: time.Second, latestTick: 2 * time.Second}

func tickName(schedule string, at time.Time) string {
	return fmt.Sprintf("%s/%s/%d", formTick, schedule, at.Unix())
}

// scheduler returns the schedules as a process of one of the two versions has them.
func scheduler(q *onceq.Queue, pool *pgxpool.Pool, older bool) (*onceqcron.Scheduler, error) {
	job := func(t onceqcron.Tick) (onceq.Job, error) {
		return onceq.Job{Kind: formTick, Payload: work{Name: tickName(t.Schedule, t.At), Form: formTick}, MaxAttempts: 1000}, nil
	}
	mixed := "*/3 * * * * *"
	if older {
		mixed = "*/5 * * * * *"
	}
	return onceqcron.New(q, pool, onceqcron.Config{},
		onceqcron.Schedule{Name: everyTick, Spec: "* * * * * *", JobFor: job, Missed: onceqcron.All(10_000)},
		onceqcron.Schedule{Name: latestTick, Spec: "*/2 * * * * *", JobFor: job, Missed: onceqcron.Latest(2 * time.Second)},
		onceqcron.Schedule{Name: mixedTick, Spec: mixed, JobFor: job, Missed: onceqcron.Latest(time.Minute)})
}

// register writes the schedules into the table, however often the faults make it try.
func register(ctx context.Context, cron *onceqcron.Scheduler) {
	for cron.Register(ctx) != nil && pause(ctx, 100*time.Millisecond) {
	}
}

// endTicks pauses all schedules once each has made up for what it missed before a time. It reports whether it has.
func endTicks(ctx context.Context, pool *pgxpool.Pool, before time.Time) (bool, error) {
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return false, err
	}
	cron, err := scheduler(q, pool, false)
	if err != nil {
		return false, err
	}
	all, err := cron.List(ctx, pool)
	for _, s := range all {
		if s.Next.Before(before) {
			return false, err
		}
		if err == nil {
			err = cron.Pause(ctx, nil, s.Name)
		}
	}
	return err == nil, err
}

// fireTwice is a mistake that the checker must find: a schedule goes back to a tick that it has had, and the ledger forgets that, because
// otherwise the tick would not happen again.
const fireTwice = `
with back as (
  update onceq.schedules set next_at = next_at - interval '1 second' where name = '` + everyTick + `' returning next_at
)
delete from onceq.schedule_ticks t using back where t.schedule = '` + everyTick + `' and t.at >= back.next_at`

// tickRow is a line of the ledger of ticks.
type tickRow struct {
	Schedule  string
	At, Until time.Time
	Ticks     int
	Outcome   string
	Note      string
}

const readTicks = `select schedule, at, until, ticks, outcome, coalesce(note, '') from onceq.schedule_ticks order by schedule, at`

// checkTicks compares the ledger of ticks with the jobs that were accepted, and with the timetables: every tick is there once.
func (v *verdict) checkTicks(h *history) {
	jobs := map[string]map[int64]bool{} // by the work's name, which contains the schedule and the time
	for _, s := range h.Trail {
		if s.What == "accepted" && strings.HasPrefix(s.Work, formTick+"/") {
			if jobs[s.Work] == nil {
				jobs[s.Work] = map[int64]bool{}
			}
			jobs[s.Work][s.Job] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(jobs)) {
		if len(jobs[name]) > 1 {
			v.violation(vTick, "%s was fired %d times: jobs %v", name, len(jobs[name]), ids(jobs[name]))
		}
	}
	last := map[string]tickRow{}
	for _, t := range h.Ticks {
		name := tickName(t.Schedule, t.At)
		switch {
		case t.Outcome == "missed" && t.Schedule != everyTick:
			v.Missed += t.Ticks
		case t.Outcome != "fired":
			v.violation(vTick, "%s is %s: %s", name, t.Outcome, t.Note)
		case jobs[name] == nil:
			v.violation(vTick, "%s is fired in the ledger, and no job was accepted", name)
		default:
			v.Ticks++
			delete(jobs, name)
		}
		before, later := last[t.Schedule]
		step := steps[t.Schedule]
		switch {
		case later && !t.At.After(before.Until):
			v.violation(vTick, "%s is in the ledger twice", name)
		case later && step > 0 && t.At.Sub(before.Until) != step:
			v.violation(vTick, "the ledger has nothing between %s and %s", tickName(t.Schedule, before.Until), name)
		case step > 0 && t.Until.Sub(t.At) != time.Duration(t.Ticks-1)*step:
			v.violation(vTick, "%s and the next ones count as %d ticks", name, t.Ticks)
		}
		last[t.Schedule] = t
	}
	for _, name := range slices.Sorted(maps.Keys(jobs)) {
		v.violation(vTick, "%s was fired, and the ledger does not say so", name)
	}
	for _, schedule := range h.Still {
		v.violation(vTick, "schedule %s stands still", schedule)
	}
}
