package onceqcron

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// Register writes the schedules of the code into the table, all in one transaction. Call it at the start of every process, after
// the migrations. A schedule that is already there and unchanged is left alone; one that was changed follows its new timetable
// from now on. Ticks of the old one that are overdue then are made up for at once, by its rule for missed ticks: Register itself
// calls JobFor and enqueues their jobs, and fails if the database refuses that. It cannot know those of a Timetable of the code's
// that was there before: the first of these is treated as a tick when the schedule's job runs next, and the others are lost
// without a line in the ledger. A schedule that nobody mentions stays: see Prune. One of this owner whose ticking job was
// cancelled ticks again, also one of the table. If one belongs to another owner, the error is an *OwnerError, and nothing is
// written.
func (s *Scheduler) Register(ctx context.Context) error {
	err := s.within(ctx, nil, func(tx pgx.Tx) error {
		same, still, err := s.unchanged(ctx, tx)
		if err != nil {
			return err
		}
		for _, name := range slices.Sorted(slices.Values(s.order)) { // two processes lock them in one order
			if same[name] {
				continue
			}
			if err := s.put(ctx, tx, s.code[name], nil); err != nil {
				return err
			}
		}
		return s.revive(ctx, tx, still)
	})
	if err == nil {
		s.registered.Store(true)
	}
	return err
}

// revive makes the jobs that tick for schedules of the table, which have none.
func (s *Scheduler) revive(ctx context.Context, tx pgx.Tx, names []string) error {
	for _, name := range names {
		r, err := s.lock(ctx, tx, name)
		switch {
		case errors.Is(err, ErrNotFound):
			continue
		case err != nil:
			return err
		case r.next == nil || r.paused != nil:
			continue
		}
		if err := s.ensure(ctx, tx, name, r, *r.next, false); err != nil {
			return err
		}
	}
	return nil
}

// unchanged finds the schedules of the code that are in the table as the code has them, with a job that ticks. A Timetable of
// the code's may have changed and not say so, and has no zone. It also finds those of the table that stand still, because somebody
// has cancelled the job that ticks.
func (s *Scheduler) unchanged(ctx context.Context, tx pgx.Tx) (same map[string]bool, still []string, err error) {
	const read = `
select s.name, true
  from unnest($1::text[], $2::text[], $3::text[], $4::text[]) as c (name, spec, zone, missed)
 cross join lateral (
       select name, paused_at from onceq.schedules
        where name = c.name and owner = $5 and queue = $6 and job is null and next_at is not null and zone <> ''
          and (spec, zone, missed) = (c.spec, c.zone, c.missed)
       offset 0) s
 where s.paused_at is not null
    or exists (select from onceq.job_fences f
                where f.key = any (array[s.name]) and f.scope = any (array['` + tableKind + `:' || s.name]) and f.class + 0 = 0 and f.state = 0
               offset 0)
union all
select s.name, false
  from onceq.schedules s
 where s.owner = $5 and s.job is not null and s.next_at is not null and s.paused_at is null
   and not exists (select from onceq.job_fences f
                    where f.key = any (array[s.name]) and f.scope = '` + tableKind + `' and f.class + 0 = 0 and f.state = 0
                   offset 0)
 order by 1`
	var specs, zones, missed []string
	for _, name := range s.order {
		one := s.code[name]
		specs, zones, missed = append(specs, one.Spec), append(zones, one.Zone), append(missed, one.Missed.String())
	}
	rows, err := tx.Query(ctx, s.sql(read), append([]string{}, s.order...), specs, zones, missed, s.cfg.Owner, s.cfg.Queue)
	same = make(map[string]bool, len(s.order))
	var name string
	var code bool
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&name, &code}, func() error {
			if code {
				same[name] = true
			} else {
				still = append(still, name)
			}
			return nil
		})
	}
	if err != nil {
		return nil, nil, fmt.Errorf("onceqcron: reading schedules: %w", s.told(err))
	}
	return same, still, nil
}

// Put writes a schedule into the table, which alone knows it: any worker with Handlers fires it. tx is the
// caller's transaction, or nil for one of its own. If a schedule with this name exists, it is changed as Register changes it.
func (s *Scheduler) Put(ctx context.Context, tx pgx.Tx, one Schedule) error {
	if err := one.check(true); err != nil {
		return err
	}
	if s.code[one.Name] != nil {
		return invalid("Name", "%q is the name of a schedule in the code", one.Name)
	}
	if err := s.possible(&one); err != nil {
		return err
	}
	job, err := storeJob(one.Job)
	if err != nil {
		return err
	}
	return s.within(ctx, tx, func(tx pgx.Tx) error { return s.put(ctx, tx, &one, &job) })
}

// Get returns a schedule of the table, as Put takes it: to change a part of it and leave the rest. One of the code is
// ErrElsewhere. db may be nil.
func (s *Scheduler) Get(ctx context.Context, db onceq.DB, name string) (Schedule, error) {
	if db == nil {
		db = s.pool
	}
	r, err := s.read(ctx, db, name, "")
	if err != nil {
		return Schedule{}, err
	}
	if r.job == nil {
		return Schedule{}, fmt.Errorf("%w: %q is in the code of %q", ErrElsewhere, name, r.owner)
	}
	one, err := s.schedule(name, r)
	if err != nil {
		return Schedule{}, err
	}
	one.Timetable = nil // of Spec and Zone
	return *one, nil
}

// put writes a schedule; job is nil for one of the code.
func (s *Scheduler) put(ctx context.Context, tx pgx.Tx, one *Schedule, job *string) error {
	r, made, err := s.lockOrMake(ctx, tx, one, job)
	if errors.Is(err, ErrNotFound) { // somebody has removed it since it was seen to be there
		r, made, err = s.lockOrMake(ctx, tx, one, job)
	}
	switch {
	case err != nil:
		return err
	case r.owner != s.cfg.Owner:
		return &OwnerError{one.Name, r.owner}
	case (r.job == nil) != (job == nil):
		return invalid("Name", "%q is a schedule of the %s; remove that one first", one.Name, map[bool]string{true: "code", false: "table"}[r.job == nil])
	}
	if err := goesOn(one.Timetable, r.now); err != nil {
		return err
	}
	overdue := r.next != nil && !r.next.After(r.now)
	changes := r.spec != one.Spec || r.zone != one.Zone
	if overdue && changes {
		known, err := s.catchUp(ctx, tx, one, r)
		if err != nil {
			return err
		}
		overdue = !known
	}
	same := !made && !changes
	next := r.unfired(one.Timetable, one.Timetable.Next(r.now))
	if overdue || same && (one.Zone != "" || r.next != nil && counting(one.Timetable, r.now)) { // another Timetable of the code's may have changed and not say so
		next = time.Time{}
		if r.next != nil {
			next = *r.next
		}
	}
	var changed *time.Time
	switch {
	case overdue && changes:
		changed = &r.now
	case overdue:
		changed = r.changed
	}
	if r.queue != s.cfg.Queue {
		if err := s.stop(ctx, tx, one.Name, job == nil); err != nil { // one that runs moves by itself
			return err
		}
		r.queue = s.cfg.Queue
	}
	const change = `
update onceq.schedules
   set spec = $2, zone = $3, missed = $4, job = $5::text::jsonb, next_at = $6, queue = $7, changed_at = $8, updated_at = statement_timestamp()
 where name = $1 and (spec, zone, missed, coalesce(job, 'null'), coalesce(next_at, 'infinity'), queue, coalesce(changed_at, 'infinity'))
         is distinct from ($2, $3, $4, coalesce($5::text::jsonb, 'null'), coalesce($6, 'infinity'::timestamptz), $7, coalesce($8, 'infinity'::timestamptz))`
	var at *time.Time
	if !next.IsZero() {
		at = &next
	}
	if _, err := tx.Exec(ctx, s.sql(change), one.Name, one.Spec, one.Zone, one.Missed.String(), job, at, r.queue, changed); err != nil {
		return fmt.Errorf("onceqcron: writing schedule %q: %w", one.Name, err)
	}
	if at == nil || r.paused != nil {
		return nil
	}
	moved := r.next == nil || !r.next.Equal(next)
	return s.ensure(ctx, tx, one.Name, r, next, moved)
}

// lockOrMake locks a schedule. A row of its own is there before it is locked, so that two processes that start at once meet here.
func (s *Scheduler) lockOrMake(ctx context.Context, tx pgx.Tx, one *Schedule, job *string) (r *row, made bool, err error) {
	const make = `
insert into onceq.schedules (name, owner, spec, zone, missed, job, queue) values ($1, $2, $3, $4, $5, $6::text::jsonb, $7)
on conflict do nothing`
	tag, err := tx.Exec(ctx, s.sql(make), one.Name, s.cfg.Owner, one.Spec, one.Zone, one.Missed.String(), job, s.cfg.Queue)
	if err != nil {
		return nil, false, fmt.Errorf("onceqcron: writing schedule %q: %w", one.Name, s.told(err))
	}
	made = tag.RowsAffected() > 0
	if made {
		if err := s.lockName(ctx, tx, one.Name); err != nil {
			return nil, false, err
		}
	}
	r, err = s.lock(ctx, tx, one.Name)
	return r, made, err
}

// catchUp does for a locked row whose timetable is about to change what a tick would do now: the row forgets its overdue ticks, and no
// tick can find them later. It reports false if nobody knows these ticks here: a Timetable of the code's made them, or the row cannot be
// read.
func (s *Scheduler) catchUp(ctx context.Context, tx pgx.Tx, one *Schedule, r *row) (known bool, err error) {
	missed, err := parseMissed(r.missed)
	if err != nil || r.zone == "" {
		return false, nil
	}
	old, err := parse(r.spec, r.zone)
	if err != nil {
		return false, nil
	}
	var marks []mark
	if r.paused != nil {
		marks, _, err = r.idle(ctx, old)
	} else {
		var p plan
		if p, err = missed.plan(ctx, old, *r.next, r.changed, r.now, r.now); err == nil {
			marks, err = s.happen(ctx, tx, one, p, r)
		}
	}
	if err != nil {
		return false, err
	}
	return true, s.note(ctx, tx, one.Name, marks)
}

// ensure makes the job that ticks for a schedule, or lets the one that is there look at its schedule now.
func (s *Scheduler) ensure(ctx context.Context, tx pgx.Tx, name string, r *row, next time.Time, moved bool) error {
	job := s.kind(tickingKind(name, r.job == nil)).Job(name)
	job.RunAt, job.Queue = next, r.queue
	made, err := s.q.Enqueue(ctx, tx, job)
	if err != nil {
		return fmt.Errorf("onceqcron: schedule %q: %w", name, err)
	}
	if made.Duplicate && moved {
		if _, err := onceqops.New(s.q).Retry(ctx, tx, made.ID); err != nil && !errors.Is(err, onceq.ErrNotFound) {
			return fmt.Errorf("onceqcron: schedule %q: %w", name, err)
		}
	}
	return nil
}

// Remove takes a schedule out of the table, with its ledger. Jobs that it has enqueued stay. tx is as for Put. A schedule of
// another owner is an *OwnerError, an unknown one ErrNotFound. One of the code comes back with the next Register.
func (s *Scheduler) Remove(ctx context.Context, tx pgx.Tx, name string) error {
	return s.within(ctx, tx, func(tx pgx.Tx) error {
		r, err := s.lock(ctx, tx, name)
		if err != nil {
			return err
		}
		if r.owner != s.cfg.Owner {
			return &OwnerError{name, r.owner}
		}
		return s.remove(ctx, tx, name, r.job == nil)
	})
}

func (s *Scheduler) remove(ctx context.Context, tx pgx.Tx, name string, code bool) error {
	const gone = `
with ledger as (delete from onceq.schedule_ticks where schedule = $1)
delete from onceq.schedules where name = $1`
	if _, err := tx.Exec(ctx, s.sql(gone), name); err != nil {
		return fmt.Errorf("onceqcron: removing schedule %q: %w", name, err)
	}
	return s.stop(ctx, tx, name, code) // it would wait for its time, and nobody may have a handler for it any more
}

// stop cancels the job that ticks for a schedule. One that runs finds what the schedule is now, and goes on or ends.
func (s *Scheduler) stop(ctx context.Context, tx pgx.Tx, name string, code bool) error {
	ticking, err := s.q.GetByKey(ctx, tx, tickingKind(name, code), name)
	if errors.Is(err, onceq.ErrNotFound) {
		return nil
	}
	if err == nil {
		states := []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRetrying}
		_, _, err = onceqops.New(s.q).CancelMany(ctx, tx, onceqops.Filter{IDs: []int64{ticking.ID}, States: states})
	}
	if err != nil {
		return fmt.Errorf("onceqcron: stopping schedule %q: %w", name, err)
	}
	return nil
}

// Prune removes the schedules of this owner that were in its code and are not in this process's, and returns their names.
// Call it when no process of an older version, which would still need them, runs any more.
func (s *Scheduler) Prune(ctx context.Context) (removed []string, err error) {
	err = s.within(ctx, nil, func(tx pgx.Tx) error {
		const old = `select name from onceq.schedules where owner = $1 and job is null and name <> all ($2) order by name for update`
		rows, err := tx.Query(ctx, s.sql(old), s.cfg.Owner, append([]string{}, s.order...))
		if err == nil {
			removed, err = pgx.CollectRows(rows, pgx.RowTo[string])
		}
		if err != nil {
			return fmt.Errorf("onceqcron: reading schedules: %w", s.told(err))
		}
		for _, name := range removed {
			if err := s.remove(ctx, tx, name, true); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return removed, nil
}

// Pause stops a schedule until Resume, in all processes. Jobs that it has enqueued run. tx is as for Put.
func (s *Scheduler) Pause(ctx context.Context, tx pgx.Tx, name string) error {
	return s.within(ctx, tx, func(tx pgx.Tx) error {
		if _, err := s.lock(ctx, tx, name); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, s.sql(`update onceq.schedules set paused_at = coalesce(paused_at, statement_timestamp()) where name = $1`), name)
		return err
	})
}

// Resume lets a paused schedule go on with its next tick. Ticks of the pause do not happen: the ledger has them as paused, and Backfill makes
// up for them. Those that were overdue when it began are treated as missed ones, by Schedule.Missed and the present time. Only a process
// whose code has the schedule can: elsewhere the error of one of the code is ErrElsewhere, although any process can pause it. tx is as for
// Put.
func (s *Scheduler) Resume(ctx context.Context, tx pgx.Tx, name string) error {
	return s.within(ctx, tx, func(tx pgx.Tx) error {
		r, err := s.lock(ctx, tx, name)
		if err != nil {
			return err
		}
		if r.paused == nil {
			return nil
		}
		one, err := s.schedule(name, r)
		if err != nil {
			return err
		}
		if r.next != nil && !r.next.After(*r.paused) { // these were overdue when the pause began
			p, err := one.Missed.plan(ctx, one.Timetable, *r.next, r.changed, *r.paused, r.now)
			if err != nil {
				return err
			}
			marks, err := s.happen(ctx, tx, one, p, r)
			if err != nil {
				return err
			}
			if err := s.note(ctx, tx, name, marks); err != nil {
				return err
			}
			if r.next, r.changed = nil, nil; !p.next.IsZero() {
				r.next = &p.next
			}
		}
		if err := s.pass(ctx, tx, one, r); err != nil {
			return err
		}
		next := one.Timetable.Next(r.now)
		if e, ok := one.Timetable.(every); ok && r.next != nil { // Backfill finds its ticks again
			next = e.following(*r.next, r.now)
		} else if r.next != nil && r.next.After(r.now) && counting(one.Timetable, r.now) { // or each pause would put the next tick off
			next = *r.next
		}
		next = r.unfired(one.Timetable, next)
		var at *time.Time
		if !next.IsZero() {
			at = &next
		}
		if _, err := tx.Exec(ctx, s.sql(`update onceq.schedules set paused_at = null, next_at = $2, changed_at = null where name = $1`), name, at); err != nil {
			return err
		}
		if at == nil {
			return nil
		}
		return s.ensure(ctx, tx, name, r, next, true)
	})
}

// idle gives the lines of the ledger for the ticks of a paused row until now, and the first tick that is still to come. Those that were
// overdue when the pause began are missed: nobody wanted that.
func (r *row) idle(ctx context.Context, t Timetable) (marks []mark, next time.Time, err error) {
	next = *r.next
	for _, part := range []struct {
		outcome string
		until   time.Time
	}{{"missed", *r.paused}, {"paused", r.now}} {
		if next.IsZero() || next.After(part.until) {
			continue
		}
		p, err := none.plan(ctx, t, next, r.changed, part.until, r.now)
		if err != nil {
			return nil, next, err
		}
		if next = p.next; p.missed > 0 {
			marks = append(marks, mark{at: p.first, until: p.last, ticks: p.missed, outcome: part.outcome})
		}
	}
	return marks, next, nil
}

// pass writes the ticks of a paused schedule until now into the ledger, and moves the locked row to the next one.
func (s *Scheduler) pass(ctx context.Context, tx pgx.Tx, one *Schedule, r *row) error {
	if r.next == nil || r.next.After(r.now) {
		return nil
	}
	marks, next, err := r.idle(ctx, one.Timetable)
	if err != nil {
		return err
	}
	r.next, r.changed = nil, nil
	if !next.IsZero() {
		r.next = &next
	}
	if _, err := tx.Exec(ctx, s.sql(`update onceq.schedules set next_at = $2, changed_at = null where name = $1`), one.Name, r.next); err != nil {
		return fmt.Errorf("onceqcron: moving schedule %q: %w", one.Name, err)
	}
	return s.note(ctx, tx, one.Name, marks)
}

// Fire enqueues a schedule's job now, besides its ticks, and returns its id. Pausing does not prevent it. If the job's key is taken,
// nothing is written, and the error matches onceq.ErrDuplicate. Only a process whose code has the schedule can: elsewhere the error of one of
// the code is ErrElsewhere. tx is as for Put.
func (s *Scheduler) Fire(ctx context.Context, tx pgx.Tx, name string) (id int64, err error) {
	err = s.within(ctx, tx, func(tx pgx.Tx) error {
		r, err := s.lock(ctx, tx, name)
		if err != nil {
			return err
		}
		one, err := s.schedule(name, r)
		if err != nil {
			return err
		}
		m, err := s.fire(ctx, tx, one, Tick{Schedule: name, At: r.now, Now: r.now})
		switch {
		case err != nil:
			return err
		case m.job == nil:
			return fmt.Errorf("onceqcron: schedule %q: its job is refused: %s", name, m.note)
		case m.taken:
			return fmt.Errorf("onceqcron: schedule %q: nothing is enqueued, because job %d has the key of its job: %w", name, *m.job, onceq.ErrDuplicate)
		}
		id, m.note = *m.job, "asked for"
		return s.note(ctx, tx, name, []mark{m})
	})
	return id, err
}

// Backfill enqueues the jobs of all ticks from one time to another, both included, that the ledger does not show as fired,
// and returns how many. A tick whose job's key is taken enqueues nothing: it is a duplicate in the ledger. A tick that is overdue
// is left to the schedule, unless it is paused. More than 10,000 ticks are an error, and so are a time that is still to come, one that ends
// before it begins, and one whose ticks the ledger has forgotten (Config.Keep). Times before the schedule existed are allowed: their ticks
// have not happened; but of a Timetable that counts from the time that it gets only the ledger knows the ticks: those that were missed, paused
// or refused. Only a process whose code has the schedule can: elsewhere the error of one of the code is ErrElsewhere. tx is as for Put.
func (s *Scheduler) Backfill(ctx context.Context, tx pgx.Tx, name string, from, to time.Time) (n int, err error) {
	err = s.within(ctx, tx, func(tx pgx.Tx) error {
		n = 0 // it may run again, after a deadlock
		r, err := s.lock(ctx, tx, name)
		if err != nil {
			return err
		}
		one, err := s.schedule(name, r)
		if err != nil {
			return err
		}
		if r.paused != nil { // their lines must be there, or Resume would write them over what happens now
			if err := s.pass(ctx, tx, one, r); err != nil {
				return err
			}
		}
		due, err := s.unfired(ctx, tx, one, r, from, to)
		if err != nil {
			return err
		}
		var marks []mark
		for _, at := range due {
			m, err := s.fire(ctx, tx, one, Tick{Schedule: name, At: at, Now: r.now})
			if err != nil {
				return err
			}
			if m.job != nil {
				m.note = "back-filled"
			}
			if m.job != nil && !m.taken {
				n++
			}
			marks = append(marks, m)
		}
		if err := s.split(ctx, tx, one, due); err != nil {
			return err
		}
		return s.note(ctx, tx, name, marks)
	})
	if err != nil {
		return 0, err
	}
	return n, nil
}

// split takes ticks out of the lines of the ledger that stand for several missed or paused ticks in a row, so that each can have a line of its
// own.
func (s *Scheduler) split(ctx context.Context, tx pgx.Tx, one *Schedule, ticks []time.Time) error {
	if len(ticks) == 0 {
		return nil
	}
	const read = `
select at, until, ticks, outcome, done_at from onceq.schedule_ticks
 where schedule = $1 and at <= $3 and until >= $2 and ticks > 1 and outcome in ('missed', 'paused')`
	const remove = `delete from onceq.schedule_ticks where schedule = $1 and at = $2`
	const write = `
insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome, done_at) values ($1, $2, $3, $4, $5, $6)
on conflict do nothing`
	type line struct {
		At, Until time.Time
		Ticks     int
		Outcome   string
		DoneAt    time.Time
	}
	rows, err := tx.Query(ctx, s.sql(read), one.Name, ticks[0], ticks[len(ticks)-1])
	if err != nil {
		return fmt.Errorf("onceqcron: reading the ledger of %q: %w", one.Name, err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowToStructByPos[line])
	if err != nil {
		return fmt.Errorf("onceqcron: reading the ledger of %q: %w", one.Name, err)
	}
	if len(lines) == 0 {
		return nil
	}
	out := make(map[int64]bool, len(ticks))
	for _, at := range ticks {
		out[at.UnixMicro()] = true
	}
	batch := &pgx.Batch{}
	for _, l := range lines {
		var rest []line
		n, last, open := 0, l.At, false
		for at := l.At; n <= l.Ticks && !at.IsZero() && !at.After(l.Until); at = one.Timetable.Next(at) {
			n, last = n+1, at
			switch {
			case out[at.UnixMicro()]:
				open = false
				continue
			case !open:
				rest, open = append(rest, line{At: at, Outcome: l.Outcome, DoneAt: l.DoneAt}), true
			}
			r := &rest[len(rest)-1]
			r.Until, r.Ticks = at, r.Ticks+1
		}
		if n != l.Ticks || !last.Equal(l.Until) { // the timetable was another one then, or nobody has counted them all
			rest = []line{l}
			for r := &rest[0]; out[r.At.UnixMicro()]; r.Ticks-- {
				if r.Ticks == 1 {
					rest = nil
					break
				}
				if r.At = one.Timetable.Next(r.At); r.At.IsZero() || r.At.After(r.Until) {
					r.At = r.Until
				}
			}
		}
		batch.Queue(s.sql(remove), one.Name, l.At)
		for _, r := range rest {
			batch.Queue(s.sql(write), one.Name, r.At, r.Until, r.Ticks, r.Outcome, r.DoneAt)
		}
	}
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("onceqcron: writing the ledger of %q: %w", one.Name, err)
	}
	return nil
}

// WouldBackfill says how many ticks Backfill would enqueue jobs for, and fails as it does. But a schedule in the code of other processes is
// ErrElsewhere only if it has a Timetable. It changes nothing and locks nothing. db may be nil.
func (s *Scheduler) WouldBackfill(ctx context.Context, db onceq.DB, name string, from, to time.Time) (n int, err error) {
	if db == nil {
		db = s.pool
	}
	r, err := s.read(ctx, db, name, "")
	if err != nil {
		return 0, err
	}
	one, err := s.schedule(name, r)
	if errors.Is(err, ErrElsewhere) && r.zone != "" { // a Timetable has no zone; otherwise the row says when the ticks are
		one = &Schedule{Name: name}
		one.Timetable, err = parse(r.spec, r.zone)
	}
	if err != nil {
		return 0, err
	}
	var due []time.Time
	err = protect(func() error {
		due, err = s.unfired(ctx, db, one, r, from, to)
		return err
	})
	return len(due), err
}

// checkTimes refuses years that Postgres or RFC 3339 cannot write, and the times with which Before and After overflow.
func checkTimes(field string, times ...time.Time) error {
	for _, t := range times {
		if y := t.UTC().Year(); y < 1 || y > 9999 {
			return invalid(field, "has a time in the year %d of UTC; 1 to 9999 is possible", y)
		}
	}
	return nil
}

// unfired returns the ticks of a time, both ends included, that the ledger does not show as fired and that are not still to be
// fired by the schedule itself.
func (s *Scheduler) unfired(ctx context.Context, db onceq.DB, one *Schedule, r *row, from, to time.Time) (due []time.Time, err error) {
	if err := checkTimes("Backfill", from, to); err != nil {
		return nil, err
	}
	if to.Before(from) {
		return nil, invalid("Backfill", "of schedule %q is from %s to %s, which is before that; give the earlier time first",
			one.Name, from.UTC().Format(time.RFC3339Nano), to.UTC().Format(time.RFC3339Nano))
	}
	now, start := r.now, from.Add(-time.Microsecond)
	if r.next != nil {
		if e, ok := one.Timetable.(every); ok {
			start = e.before(*r.next, from)
		}
		if r.paused == nil && !to.Before(*r.next) && !to.After(now) {
			to = r.next.Add(-time.Microsecond)
		}
	}
	if to.After(now) {
		return nil, invalid("Backfill", "of schedule %q ends at %s, which is still to come: it is %s, and the schedule itself fires the ticks after that; back-fill until then",
			one.Name, to.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	if r.known != nil && from.Before(*r.known) && !to.Before(from) {
		return nil, invalid("Backfill", "of schedule %q begins at %s; which ticks have happened is known from %s on, and what was before that is removed from the ledger (Config.Keep): back-fill from then on, and enqueue older jobs yourself",
			one.Name, from.UTC().Format(time.RFC3339), r.known.UTC().Format(time.RFC3339Nano))
	}
	parts := []span{{one.Timetable.Next(start), to}}
	if _, ok := one.Timetable.(every); !ok && counting(one.Timetable, now) { // only the ledger knows when its ticks were
		if parts, err = s.undone(ctx, db, one, from, to); err != nil {
			return nil, err
		}
	}
	for _, part := range parts {
		for at := part.from; !at.IsZero() && !at.After(part.to) && !at.After(to); at = one.Timetable.Next(at) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if at.Before(from) {
				continue
			}
			if due = append(due, at); len(due) > maxTicks {
				return nil, invalid("Backfill", "of schedule %q has more than %d ticks; back-fill a shorter time first", one.Name, maxTicks)
			}
		}
	}
	rows, err := db.Query(ctx, s.sql(`select at from onceq.schedule_ticks where schedule = $1 and at = any ($2) and outcome in ('fired', 'duplicate')`), one.Name, due)
	if err != nil {
		return nil, err
	}
	fired := make(map[int64]bool)
	var at time.Time
	if _, err := pgx.ForEachRow(rows, []any{&at}, func() error { fired[at.UnixMicro()] = true; return nil }); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(due, func(at time.Time) bool { return fired[at.UnixMicro()] }), nil
}

// span is a time in which the first tick is at from.
type span struct{ from, to time.Time }

// undone gives the lines of the ledger for ticks of a time that did not happen.
func (s *Scheduler) undone(ctx context.Context, db onceq.DB, one *Schedule, from, to time.Time) ([]span, error) {
	const read = `
select at, until from onceq.schedule_ticks
 where schedule = $1 and at <= $3 and until >= $2 and outcome not in ('fired', 'duplicate') order by at`
	rows, err := db.Query(ctx, s.sql(read), one.Name, from, to)
	var all []span
	if err == nil {
		all, err = pgx.CollectRows(rows, func(c pgx.CollectableRow) (p span, err error) { return p, c.Scan(&p.from, &p.to) })
	}
	if err != nil {
		return nil, fmt.Errorf("onceqcron: reading the ledger of %q: %w", one.Name, s.told(err))
	}
	return all, nil
}

// Info is a schedule as the table has it.
type Info struct {
	Name   string
	Owner  string
	Spec   string    // of a Timetable its type
	Zone   string    // "" for a Timetable
	Missed string    // "latest 24h0m0s", "all 100"
	Code   bool      // in the code of its owner's processes, and not in the table alone
	Next   time.Time // scheduled time of the next tick; zero: none. In the past while no worker fires it
	Paused time.Time // since when; zero: not paused
}

// List returns all schedules, of all owners, by name. db may be nil.
func (s *Scheduler) List(ctx context.Context, db onceq.DB) ([]Info, error) {
	const read = `
select name, owner, spec, zone, missed, job is null, coalesce(next_at, '0001-01-01Z'), coalesce(paused_at, '0001-01-01Z')
  from onceq.schedules order by name`
	if db == nil {
		db = s.pool
	}
	var all []Info
	rows, err := db.Query(ctx, s.sql(read))
	if err == nil {
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Info])
	}
	if err != nil {
		return nil, fmt.Errorf("onceqcron: listing schedules: %w", s.told(err))
	}
	return all, nil
}

// Done is a line of the ledger: a tick, or some missed or paused ones in a row.
type Done struct {
	At      time.Time // scheduled time; of several ticks the first one's
	Until   time.Time // of several ticks the last one's; otherwise At
	Ticks   int       // how many; of missed or paused ones in a row no more than 10,000 are counted
	Outcome string    // fired; duplicate: its key was taken; missed; paused: Resume writes it; refused: see Note, as of a duplicate of a finished job
	DoneAt  time.Time // when that was decided; for a fired tick, DoneAt − At is how late it was
	JobID   int64     // the job that it enqueued or met; 0: none
	Note    string
}

// Ticks returns what became of a schedule's ticks before a time, the latest first, at most limit of them; 0 means 50. db may be nil.
func (s *Scheduler) Ticks(ctx context.Context, db onceq.DB, name string, before time.Time, limit int) ([]Done, error) {
	const read = `
select at, until, ticks, outcome, done_at, coalesce(job_id, 0), coalesce(note, '')
  from onceq.schedule_ticks where schedule = $1 and at < $2 order by at desc limit $3`
	if limit < 0 {
		return nil, invalid("limit", "is %d; it must not be negative, and 0 means 50", limit)
	}
	if err := checkTimes("before", before); err != nil {
		return nil, err
	}
	if !storableText(name) {
		return nil, invalid("name", "%q is not valid UTF-8, or contains a NUL", name)
	}
	limit = cmp.Or(limit, 50)
	if db == nil {
		db = s.pool
	}
	var all []Done
	rows, err := db.Query(ctx, s.sql(read), name, before, limit)
	if err == nil {
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Done])
	}
	if err != nil {
		return nil, fmt.Errorf("onceqcron: reading the ledger of %q: %w", name, s.told(err))
	}
	return all, nil
}
