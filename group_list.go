package onceq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// What people ask of groups: why a job still waits, which groups a job belongs to, and an end for all of it.

func (r DeadRule) String() string {
	switch r {
	case DeadWait:
		return "wait"
	case DeadRun:
		return "run"
	case DeadCancel:
		return "cancel"
	}
	return fmt.Sprintf("DeadRule(%d)", int16(r))
}

// MarshalText returns the rule's name. It is used for JSON too.
func (r DeadRule) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// words says what the rule means for a job that waits.
func (r DeadRule) words() string {
	switch r {
	case DeadRun:
		return "dead ones do not keep it from running (DeadRun)"
	case DeadCancel:
		return "it is cancelled when all are finished, if one is dead or was cancelled (DeadCancel)"
	}
	return "it waits until somebody redrives, resolves or discards the dead ones (DeadWait)"
}

// after explains a job that waits for others.
func (x *explaining) after(ctx context.Context) error {
	j := &x.e.Job
	var g GroupInfo
	r := Reason{Cause: CauseAfter}
	err := x.q.groups(ctx, x.db, 0, 0, j.ID, true, func(one GroupInfo, open, dead []int64) { g, r.Ahead, r.Dead = one, open, dead })
	if err != nil && !errors.Is(err, pgx.ErrNoRows) { // then nobody is left that it could wait for
		return fmt.Errorf("onceq: explain: %w", err)
	}
	r.Before = g.Open
	all := either(g.Total, "the job that it waits for is", fmt.Sprintf("all %d jobs that it waits for are", g.Total))
	blocked := g.Held > 0 || g.Dead > 0 && g.IfDead == DeadWait
	switch {
	case g.Open > 0:
		r.Text = fmt.Sprintf("it waits for %d of %s: the first of them %s %d", g.Open, numbered(g.Total, "job", "jobs"), either(g.Open, "is", "are"), r.Ahead)
	case blocked:
		r.Text = all + " finished"
	case x.lock != nil:
		return nil
	case g.IfDead == DeadCancel && g.Dead+g.Cancelled > 0:
		ended := g.Dead + g.Cancelled
		r.Text = fmt.Sprintf("%s finished, and %d %s or %s cancelled: a worker cancels it within a poll (DeadCancel)", all, ended, either(ended, "is dead", "are dead"), either(ended, "was", "were"))
		r.Advice = "a redrive of those lets it wait for them again"
	default:
		r.Text = all + " done: a worker lets it go on within a poll"
		r.Advice = "if it stays so, no worker is running: start one"
	}
	if len(r.Dead) > 0 {
		r.Text += fmt.Sprintf("; %d dead and %d held, the first of them %d", g.Dead, g.Held, r.Dead)
		if g.Dead > 0 {
			r.Text += ", and " + g.IfDead.words()
		}
	}
	switch {
	case blocked:
		r.Advice = fmt.Sprintf("redrive them, resolve their effects, or discard them; onceq groups show %d lists them", j.ID)
	case g.Open > 0:
		r.Advice = fmt.Sprintf("the explanation of each says why it is not finished; onceq groups show %d lists them", j.ID)
	}
	x.e.add(r)
	if j.RunAt.After(x.e.At) {
		x.notDue()
	}
	return nil
}

// GroupsOf returns the ids of the groups that a job is a member of, which are the ids of the jobs that wait for it, or did: at
// most 100, the oldest first.
func (q *Queue) GroupsOf(ctx context.Context, db DB, id int64) (groups []int64, err error) {
	if err = q.send(ctx, db, reading, readFollowers, []any{[]int64{id}}, row(nil, nil, &groups)); err != nil {
		return nil, fmt.Errorf("onceq: groups of job %d: %w", id, err)
	}
	return groups[:min(len(groups), 100)], nil
}

// CancelGroup cancels a job that waits for others, and then those of the others that are unfinished, 500 a statement, each as
// Cancel does. It returns how many jobs were cancelled because nobody held them, and how many running ones were asked to
// end, which they do unless they finish first. A member that others wait for as well is cancelled all the same. An id
// that is that of no group is ErrNotFound, also that of a job without members, for which Group counts none: Cancel is for it.
//
// The job that waits comes first, so that it does not run because the others are gone. RedriveMany brings all of it back, if its
// filter chooses both: the job then waits again. With a pool as db each statement
// commits on its own, and if there is an error, calling it again goes on. Members that a running one adds meanwhile are not
// cancelled.
func (q *Queue) CancelGroup(ctx context.Context, db DB, id int64) (cancelled, asked int, err error) {
	if g, err := q.Group(ctx, db, id); err != nil || g.Total == 0 {
		return 0, 0, cmp.Or(err, fmt.Errorf("%w: job %d waits for no others and is no group; Cancel cancels it", ErrNotFound, id))
	}
	if cancelled, asked, err = q.CancelMany(ctx, db, Filter{IDs: []int64{id}}); err != nil {
		return cancelled, asked, err
	}
	n, more, err := q.CancelMany(ctx, db, Filter{Group: id})
	return cancelled + n, asked + more, err
}

// readStuck reads jobs that wait for others although these are all finished, because some are dead or held, with the first of
// those. It looks at the first ten thousand jobs that wait, whether a member of each is
// unfinished, and of a hundred of which none is at ten thousand members.
var readStuck = `
select w.id, (pg_catalog.array_agg(m.job_id order by m.job_id) filter (where ` + isStuck + `))[:5], count(*) filter (where ` + isStuck + `)
  from (select f.id, f.if_dead
          from (select id, if_dead from onceq.job_waits where lane > ` + sqlSep + ` and lane < ' ' order by lane limit 10000) f
         where not ` + isOpen("f.id") + `
         order by f.id limit 100) w
 cross join lateral (
       select job_id, state from onceq.job_members where group_id = w.id order by job_id limit 10000) m
 group by w.id
having pg_catalog.bool_or(` + isStuck + `)
 order by w.id
 limit 20`

const isStuck = `m.state = ` + sqlJobHeld + ` or m.state = ` + sqlJobDead + ` and w.if_dead = 0`

// groups looks for jobs that wait for dead or held ones, and for nothing else.
func (x *examination) groups(ctx context.Context) error {
	return x.each(ctx, readStuck, nil, func(rows pgx.Rows) error {
		var id int64
		var dead []int64
		var n int
		if err := rows.Scan(&id, &dead, &n); err != nil {
			return err
		}
		x.found = append(x.found, Finding{
			What: "group", Severe: true, JobID: id,
			Detail: fmt.Sprintf("job %d waits for dead or held jobs, and for no others: %d of them, the first %d", id, n, dead),
			Advice: "redrive them, resolve their effects, or discard them; the job then goes on. Or cancel the group",
		})
		return nil
	})
}

// lineWords says what a line in lane_calls is.
func lineWords(line string) string {
	if id, ok := strings.CutPrefix(line, lineSep); ok {
		return "job " + strings.TrimLeft(id, "0") + ", which waits for others,"
	}
	if limit, ok := strings.CutPrefix(line, "/"); ok {
		limit, _, _ = strings.Cut(limit, lineSep)
		return fmt.Sprintf("limit %q", limit)
	}
	return fmt.Sprintf("lane %q", line)
}
