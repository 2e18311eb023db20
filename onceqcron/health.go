package onceqcron

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// Health says which schedules need somebody: those that are late ("late"), with the reason if that is a row that cannot be read, that
// have been paused for over an hour ("paused"), and those of which ticks of the last day did not happen ("missed"): no worker fired
// them, unless a rule is Latest and the latest of them ran for all; or their jobs were refused. And those of which ticks of the last
// day enqueued nothing, because the key of their job was still taken by one that had finished ("duplicate"). Of each ledger it reads the
// latest 2,000 lines at most. db may be nil.
func (s *Scheduler) Health(ctx context.Context, db onceq.DB) ([]Finding, error) {
	const read = `
select s.name, s.spec, s.zone, statement_timestamp() - coalesce(s.paused_at, statement_timestamp()),
       case when s.paused_at is null and s.next_at < statement_timestamp() then statement_timestamp() - s.next_at else '0' end,
       coalesce(s.paused_at, s.next_at, statement_timestamp()),
       coalesce(m.ticks, 0), coalesce(m.first, statement_timestamp()), coalesce(m.last, statement_timestamp()),
       coalesce(m.refused, 0), coalesce(m.first_refused, statement_timestamp()), coalesce(m.last_refused, statement_timestamp()), coalesce(m.note, ''),
       s.job is null,
       coalesce(m.taken, 0), coalesce(m.first_taken, statement_timestamp()), coalesce(m.last_taken, statement_timestamp())
  from onceq.schedules s
  left join lateral (
       select pg_catalog.sum(t.ticks) filter (where t.outcome = 'missed') as ticks,
              pg_catalog.min(t.at) filter (where t.outcome = 'missed') as first, pg_catalog.max(t.until) filter (where t.outcome = 'missed') as last,
              pg_catalog.sum(t.ticks) filter (where t.outcome = 'refused') as refused,
              pg_catalog.min(t.at) filter (where t.outcome = 'refused') as first_refused, pg_catalog.max(t.at) filter (where t.outcome = 'refused') as last_refused,
              (pg_catalog.array_agg(t.note order by t.at desc) filter (where t.outcome = 'refused'))[1] as note,
              count(*) filter (where t.outcome = 'duplicate') as taken,
              pg_catalog.min(t.at) filter (where t.outcome = 'duplicate') as first_taken, pg_catalog.max(t.at) filter (where t.outcome = 'duplicate') as last_taken
         from (select at, until, ticks, outcome, done_at, note from onceq.schedule_ticks
                where schedule = s.name order by at desc limit 2000) t
        where (t.outcome in ('missed', 'refused') or t.outcome = 'duplicate' and pg_catalog.starts_with(t.note, $2)) and t.done_at > statement_timestamp() - interval '1 day'
          and (t.outcome <> 'missed' or s.missed = $1 or s.missed like 'all %' or not exists (select from onceq.schedule_ticks f -- the latest tick that was due, which ran for all
                           where f.schedule = s.name and f.at > t.until and f.at <= t.done_at and (f.outcome = 'fired' or f.outcome = 'duplicate' and pg_catalog.starts_with(f.note, $2) is not true)))) m on true
 order by s.name`
	if db == nil {
		db = s.pool
	}
	rows, err := db.Query(ctx, s.sql(read), Skip().String(), takenBy)
	if err != nil {
		return nil, fmt.Errorf("onceqcron: looking at schedules: %w", s.told(err))
	}
	var found []Finding
	var standing []late
	var code bool
	var name, spec, zone, note string
	var paused, due time.Duration
	var ticks, refused, taken int
	var since, first, last, firstRefused, lastRefused, firstTaken, lastTaken time.Time
	_, err = pgx.ForEachRow(rows, []any{&name, &spec, &zone, &paused, &due, &since, &ticks, &first, &last, &refused, &firstRefused, &lastRefused, &note, &code, &taken, &firstTaken, &lastTaken}, func() error {
		from, to := first, last
		add := func(what, detail, advice string) {
			f := Finding{Name: name, From: from, To: to, Finding: onceqops.Finding{What: what, Detail: detail, Advice: advice, Since: from}}
			if what == "paused" || what == "late" {
				f.Since = since
			}
			found = append(found, f)
		}
		round := func(d time.Duration) string { return strings.TrimSuffix(d.Round(time.Minute).String(), "0s") }
		if paused > time.Hour {
			add("paused", fmt.Sprintf("schedule %q has been paused for %s", name, round(paused)), "resume it, if it was forgotten")
		}
		if _, err := parse(spec, zone); due > time.Minute && zone != "" && err != nil { // a Timetable has no zone
			add("late", fmt.Sprintf("schedule %q has been due for %s and no worker fires it; nor can it be read here: %v", name, round(due), err),
				"mend it where it is written: with Put, or in the code, which Register writes")
		} else if due > time.Minute {
			standing = append(standing, late{len(found), name, code})
			add("late", fmt.Sprintf("schedule %q has been due for %s and no worker fires it", name, round(due)),
				"start a worker of the application that has the handlers of its schedules; Register, at its start, also lets one tick again whose ticking job was cancelled")
		}
		missed := func(ticks int, what, why, advice string) {
			switch {
			case ticks == 1:
				add("missed", fmt.Sprintf("1 tick of schedule %q %s, at %s%s", name, what, from.UTC().Format("2006-01-02 15:04:05 UTC"), why), advice+"back-fill it, if it still matters")
			case ticks > 1:
				add("missed", fmt.Sprintf("%d ticks of schedule %q %s, between %s and %s%s", ticks, name, what, from.UTC().Format("2006-01-02 15:04:05"),
					to.UTC().Format("2006-01-02 15:04:05 UTC"), why), advice+"back-fill them, if they still matter")
			}
		}
		missed(ticks, "did not happen", "", "")
		from, to = firstRefused, lastRefused
		note, _, _ = strings.Cut(note, "\n\n") // the ledger has where a panic was
		if missed(refused, "did not happen because the job was refused", "; the latest says: "+note, "mend what makes its job; then "); refused > 0 {
			found[len(found)-1].Error = note
		}
		if from, to = firstTaken, lastTaken; taken > 0 {
			add("duplicate", fmt.Sprintf("%d of the last day's ticks of schedule %q enqueued nothing, because the key of its job was still taken by one that had finished", taken, name),
				"leave out the Key of its job, because a tick happens once without one; or let the Window of the job be UntilFinished, if a tick is to be left out only while another one's job runs")
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("onceqcron: looking at schedules: %w", s.told(err))
	}
	for _, l := range standing[:min(len(standing), 20)] {
		if err := s.explainLate(ctx, db, &found[l.place], l); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// late is a schedule that is late, and the place of its finding.
type late struct {
	place int
	name  string
	code  bool
}

// explainLate says why the job that ticks does not run, if that is anything else than that there is no worker for it.
func (s *Scheduler) explainLate(ctx context.Context, db onceq.DB, f *Finding, l late) error {
	ticking, err := s.q.GetByKey(ctx, db, tickingKind(l.name, l.code), l.name)
	switch {
	case errors.Is(err, onceq.ErrNotFound) || err == nil && ticking.State.Finished():
		f.Detail = strings.Replace(f.Detail, "no worker fires it", "the job that ticks for it was cancelled or is gone", 1)
		f.Advice = "Register, at the start of a process of its owner, makes that job again"
		return nil
	case err != nil:
		return fmt.Errorf("onceqcron: looking at schedule %q: %w", l.name, err)
	}
	e, err := onceqops.New(s.q).Explain(ctx, db, ticking.ID)
	if err != nil {
		return fmt.Errorf("onceqcron: looking at schedule %q: %w", l.name, err)
	}
	if n := len(e.Job.Errors); n > 0 && e.Job.Attempts > 0 {
		f.Error = e.Job.Errors[n-1].Error
		f.Detail = strings.Replace(f.Detail, "no worker fires it", fmt.Sprintf("its tick fails, %d times until now, the latest with: %s", e.Job.Attempts, f.Error), 1)
		f.Advice = "mend that; the tick is tried again each minute"
		return nil
	}
	switch c := e.Cause(); {
	case c == onceqops.CauseNoWorker || c == onceqops.CauseNoHandler || c == onceqops.CauseUnknown:
	case c != onceqops.CauseReady || e.Reasons[0].Running > 0:
		f.Error = e.Reasons[0].Text // which may have an error in it
		f.Detail = strings.Replace(f.Detail, "no worker fires it", fmt.Sprintf("job %d, which ticks for it, has not done so: %s", ticking.ID, f.Error), 1)
		f.Advice = e.Reasons[0].Advice
	}
	return nil
}

// Finding is what Health says of a schedule.
type Finding struct {
	onceqops.Finding
	Name     string    // of the schedule
	From, To time.Time // of "missed": the first of its ticks and the last
}
