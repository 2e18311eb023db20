package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
)

// These are the schedules. Every worker process has them in its code.
const (
	everyTick  = "every"  // each second; all missed ticks are made up for
	latestTick = "latest" // every two seconds; those that are more than two seconds late are missed
	mixedTick  = "mixed"  // half of the processes have another version of it
	goneTick   = "gone"   // as every, but a process whose code lacks it removes it now and then
)

// steps are the times between the ticks of the schedules of which there is one version.
var steps = map[string]time.Duration{everyTick: time.Second, latestTick: 2 * time.Second, goneTick: time.Second}

func tickName(schedule string, at time.Time) string {
	return fmt.Sprintf("%s/%s/%d", formTick, schedule, at.Unix())
}

// scheduler returns the schedules as a process of one of the two versions has them.
func scheduler(q *onceq.Queue, pool *pgxpool.Pool, older bool) (*onceqcron.Scheduler, error) {
	return onceqcron.New(q, pool, onceqcron.Config{}, schedules(older)...)
}

// schedules are those of a version. The last one is goneTick.
func schedules(older bool) []onceqcron.Schedule {
	job := func(t onceqcron.Tick) (onceq.Job, error) {
		return onceq.Job{Kind: formTick, Payload: work{Name: tickName(t.Schedule, t.At), Form: formTick}, MaxAttempts: 1000}, nil
	}
	mixed := "*/3 * * * * *"
	if older {
		mixed = "*/5 * * * * *"
	}
	return []onceqcron.Schedule{
		{Name: everyTick, Spec: "* * * * * *", JobFor: job, Missed: onceqcron.All(10_000)},
		{Name: latestTick, Spec: "*/2 * * * * *", JobFor: job, Missed: onceqcron.Latest(2 * time.Second)},
		{Name: mixedTick, Spec: mixed, JobFor: job, Missed: onceqcron.Latest(time.Minute)},
		{Name: goneTick, Spec: "* * * * * *", JobFor: job, Missed: onceqcron.All(10_000)},
	}
}

// tickTrail is the audit trail of what people do to schedules. It has the time at which the row was written, under the row's lock: no tick
// of before comes later, and none of after earlier.
const tickTrail = `
create table torture.tick_trail (seq bigserial, at timestamptz default clock_timestamp(), what text, schedule text, since timestamptz, until timestamptz);
create function torture.trail_schedule() returns trigger language plpgsql as $$
begin
  if tg_op = 'DELETE' then
    insert into torture.tick_trail (what, schedule) values ('removed', old.name);
  elsif old.paused_at is null then
    insert into torture.tick_trail (what, schedule, since) values ('paused', new.name, new.paused_at);
  else
    insert into torture.tick_trail (what, schedule, since) values ('resumed', new.name, old.paused_at);
  end if;
  return null;
end $$;
create trigger trail_paused after update on onceq.schedules for each row
  when ((old.paused_at is null) <> (new.paused_at is null)) execute function torture.trail_schedule();
create trigger trail_removed after delete on onceq.schedules for each row execute function torture.trail_schedule();`

// tended is a row of the audit trail of schedules.
type tended struct {
	What         string // paused, resumed, removed or backfilled
	Schedule     string
	At           time.Time
	Since, Until time.Time // the pause's beginning; of a back-fill the first tick and the last one
}

const readTended = `
select what, schedule, at, coalesce(since, at), coalesce(until, at) from torture.tick_trail order by seq`

// tend does to a schedule what a person may do at any time: pause, resume and back-fill it, or remove it with a process that has not got it,
// and bring it back.
func tend(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool) error {
	cron, err := scheduler(q, pool, rand.IntN(2) == 0)
	if err != nil {
		return err
	}
	name := []string{everyTick, latestTick, mixedTick, goneTick}[rand.IntN(4)]
	switch rand.IntN(8) {
	case 0:
		return cron.Pause(ctx, nil, name)
	case 1, 2:
		return cron.Resume(ctx, nil, name)
	case 3, 4:
		if steps[name] > 0 { // a version's ticks are not those of the other one
			return backfill(ctx, cron, pool, name)
		}
	case 5:
		all := schedules(rand.IntN(2) == 0)
		without, err := onceqcron.New(q, pool, onceqcron.Config{}, all[:len(all)-1]...)
		if err == nil {
			_, err = without.Prune(ctx)
		}
		return err
	case 6:
		return cron.Register(ctx)
	}
	return nil
}

// backfill makes up for a part of the ledger, and notes in the same transaction what it was. What was left to the schedule is not noted.
func backfill(ctx context.Context, cron *onceqcron.Scheduler, pool *pgxpool.Pool, name string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var from, to, left time.Time
		if err := tx.QueryRow(ctx, `
select t.since, t.since + random() * (statement_timestamp() - t.since), case when s.paused_at is null then s.next_at else '9999-01-01' end
  from onceq.schedules s
 cross join lateral (select at + random() * (statement_timestamp() - at) as since from onceq.schedule_ticks
                      where schedule = s.name and at < statement_timestamp() order by at limit 1) t
 where s.name = $1 for update of s`, name).Scan(&from, &to, &left); err != nil {
			return err
		}
		if _, err := cron.Backfill(ctx, tx, name, from, to); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `
insert into torture.tick_trail (what, schedule, since, until) values ('backfilled', $1, $2, least($3, $4::timestamptz - interval '1 microsecond'))`, name, from, to, left)
		return err
	})
}

// register writes the schedules into the table, however often the faults make it try.
func register(ctx context.Context, cron *onceqcron.Scheduler) {
	for cron.Register(ctx) != nil && pause(ctx, 100*time.Millisecond) {
	}
}

// endTicks brings all schedules back, and pauses them once each has made up for what it missed before a time. It reports whether it has.
func endTicks(ctx context.Context, pool *pgxpool.Pool, before time.Time) (bool, error) {
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return false, err
	}
	cron, err := scheduler(q, pool, false)
	if err != nil {
		return false, err
	}
	if err := cron.Register(ctx); err != nil {
		return false, err
	}
	all, err := cron.List(ctx, pool)
	for _, s := range all {
		if s.Next.Before(before) {
			if !s.Paused.IsZero() {
				err = cron.Resume(ctx, nil, s.Name)
			}
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
	DoneAt    time.Time
}

const readTicks = `select schedule, at, until, ticks, outcome, coalesce(note, ''), done_at from onceq.schedule_ticks order by schedule, at`

// resumeWithin is how long before its end Resume writes into the ledger.
const resumeWithin = 10 * time.Second

// checkTicks compares the ledger of ticks with the jobs that were accepted, with the timetables, and with what people did: every tick is
// there once.
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
	removed := map[string]time.Time{} // when a schedule was last removed, together with its ledger
	pauses := map[string][]tended{}   // Since and Until are their ends
	v.Tended = len(h.Tended)
	for _, t := range h.Tended {
		switch t.What {
		case "removed":
			removed[t.Schedule], pauses[t.Schedule] = t.At, nil
		case "paused":
			pauses[t.Schedule] = append(pauses[t.Schedule], tended{Since: t.Since, Until: forever})
		case "resumed":
			v.Tended-- // the pause counts
			if p := pauses[t.Schedule]; len(p) > 0 {
				p[len(p)-1].Until = t.At
			}
		}
	}
	last := map[string]tickRow{}
	for _, t := range h.Ticks {
		name := tickName(t.Schedule, t.At)
		in := slices.IndexFunc(pauses[t.Schedule], func(p tended) bool { return t.DoneAt.After(p.Since) && !t.DoneAt.After(p.Until) })
		inPause, overdue, atEnd := in >= 0, false, false
		if inPause { // what was overdue when it began is made up for when it ends
			p := pauses[t.Schedule][in]
			overdue, atEnd = !t.Until.After(p.Since), p.Until.Sub(t.DoneAt) < resumeWithin
		}
		for _, b := range h.Tended {
			if b.What == "backfilled" && b.Schedule == t.Schedule && b.At.After(removed[b.Schedule]) && t.Outcome != "fired" &&
				t.hasTick(b.Since, b.Until) {
				v.violation(vTick, "%s and the next %d are %s, although %s to %s was back-filled", name, t.Ticks, t.Outcome, b.Since, b.Until)
			}
		}
		switch {
		case t.Outcome == "missed" && (t.Schedule == latestTick || t.Schedule == mixedTick || overdue): // a back-fill in the pause writes these so
			v.Missed += t.Ticks
		case t.Outcome == "paused" && inPause:
			v.Paused += t.Ticks
		case t.Outcome != "fired":
			v.violation(vTick, "%s is %s: %s", name, t.Outcome, t.Note)
		case jobs[name] == nil:
			v.violation(vTick, "%s is fired in the ledger, and no job was accepted", name)
		case t.Note == "" && inPause && !(overdue && atEnd):
			v.violation(vTick, "%s was fired in a pause", name)
		default:
			v.Ticks++
			if t.Note == "back-filled" {
				v.Backfilled++
			}
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
		schedule, at, _ := strings.Cut(strings.TrimPrefix(name, formTick+"/"), "/")
		if n, err := strconv.ParseInt(at, 10, 64); err == nil && !time.Unix(n, 0).After(removed[schedule]) {
			v.Ticks++ // its ledger is gone
			continue
		}
		v.violation(vTick, "%s was fired, and the ledger does not say so", name)
	}
	for _, schedule := range h.Still {
		v.violation(vTick, "schedule %s stands still", schedule)
	}
}

var forever = time.Unix(1<<40, 0)

// hasTick reports whether a line of the ledger stands for a tick of a time.
func (t tickRow) hasTick(from, to time.Time) bool {
	step := steps[t.Schedule]
	for at := t.At; !at.After(t.Until); at = at.Add(step) {
		if !at.Before(from) && !at.After(to) {
			return true
		}
	}
	return false
}
