package onceqops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// Members gives the jobs that a job waits for, or did wait for, by id. It reads them in pages of up to 1,000, and holds no
// connection between two pages. An error ends it. They are known as long as the group is, which is until a Reaper
// finds that the job that waited for them is gone. A Filter may have After, and then larger ids follow, Limit (default
// no limit), and WithoutPayloads. Group counts them.
func (q *Ops) Members(ctx context.Context, db onceq.DB, group int64,
	filter ...Filter) iter.Seq2[onceq.Member, error] {
	f := orNone(filter)
	return root.Members(ctx, q.q, db, group, f.After, f.Limit, f.WithoutPayloads)
}

// Groups lists the groups that still wait for members by id, at most limit of them, 50 if that is 0. For the next page set after to
// the ID of the last group of this one.
func (q *Ops) Groups(ctx context.Context, db onceq.DB, after int64, limit int) ([]onceq.GroupInfo, error) {
	if err := pageSize("limit", &limit, 50); err != nil {
		return nil, err
	}
	var all []onceq.GroupInfo
	err := q.groups(ctx, db, after, limit, 0, false, func(g onceq.GroupInfo, _, _ []int64) { all = append(all, g) })
	if err != nil {
		return nil, fmt.Errorf("onceq: groups: %w", err)
	}
	return all, nil
}

// What people ask of groups: why a job still waits, which groups a job belongs to, and an end for all of it.

// wordsOf says what a rule means for a job that waits.
func wordsOf(r onceq.DeadRule) string {
	switch r {
	case onceq.DeadRun:
		return "dead ones do not keep it from running (DeadRun)"
	case onceq.DeadCancel:
		return "it is cancelled when all are finished, if one is dead or was cancelled (DeadCancel)"
	}
	return "it waits until somebody redrives, resolves or discards the dead ones (DeadWait)"
}

// after explains a job that waits for others.
func (x *explaining) after(ctx context.Context) error {
	j := &x.e.Job
	var g onceq.GroupInfo
	r := Reason{Cause: CauseAfter}
	err := x.q.groups(ctx, x.db, 0, 0, j.ID, true, func(one onceq.GroupInfo, open, dead []int64) { g, r.Ahead, r.Dead = one, open, dead })
	if err != nil && !errors.Is(err, pgx.ErrNoRows) { // then nobody is left that it could wait for
		return fmt.Errorf("onceq: explain: %w", err)
	}
	r.Before = g.Open
	all := table.Either(g.Total, "the job that it waits for is", fmt.Sprintf("all %d jobs that it waits for are", g.Total))
	blocked := g.Held > 0 || g.Dead > 0 && g.IfDead == onceq.DeadWait
	switch {
	case g.Open > 0:
		r.Text = fmt.Sprintf("it waits for %d of %s: the first of them %s %d", g.Open, table.Numbered(g.Total, "job", "jobs"), table.Either(g.Open, "is", "are"), r.Ahead)
	case blocked:
		r.Text = all + " finished"
	case x.lock != nil:
		return nil
	case g.IfDead == onceq.DeadCancel && g.Dead+g.Cancelled > 0:
		ended := g.Dead + g.Cancelled
		r.Text = fmt.Sprintf("%s finished, and %d %s or %s cancelled: a worker cancels it within a poll (DeadCancel)", all, ended, table.Either(ended, "is dead", "are dead"), table.Either(ended, "was", "were"))
		r.Advice = "a redrive of those lets it wait for them again"
	default:
		r.Text = all + " done: a worker lets it go on within a poll"
		r.Advice = "if it stays so, no worker is running: start one"
	}
	if len(r.Dead) > 0 {
		r.Text += fmt.Sprintf("; %d dead and %d held, the first of them %d", g.Dead, g.Held, r.Dead)
		if g.Dead > 0 {
			r.Text += ", and " + wordsOf(g.IfDead)
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
func (q *Ops) GroupsOf(ctx context.Context, db onceq.DB, id int64) (groups []int64, err error) {
	if err = q.store.Send(ctx, db, pg.Reading, readFollowers, []any{[]int64{id}}, pg.Row(nil, nil, &groups)); err != nil {
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
func (q *Ops) CancelGroup(ctx context.Context, db onceq.DB, id int64) (cancelled, asked int, err error) {
	if g, err := q.q.Group(ctx, db, id); err != nil || g.Total == 0 {
		return 0, 0, cmp.Or(err, fmt.Errorf("%w: job %d waits for no others and is no group; Cancel cancels it", onceq.ErrNotFound, id))
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
select w.id, (pg_catalog.array_agg(m.job_id order by m.job_id) filter (where ` + table.IsStuck + `))[:5], count(*) filter (where ` + table.IsStuck + `)
  from (select f.id, f.if_dead
          from (select id, if_dead from onceq.job_waits where lane > ` + table.Sep + ` and lane < ' ' order by lane limit 10000) f
         where not ` + table.IsOpen("f.id") + `
         order by f.id limit 100) w
 cross join lateral (
       select job_id, state from onceq.job_members where group_id = w.id order by job_id limit 10000) m
 group by w.id
having pg_catalog.bool_or(` + table.IsStuck + `)
 order by w.id
 limit 20`

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
	if id, ok := strings.CutPrefix(line, table.LineSep); ok {
		return "job " + strings.TrimLeft(id, "0") + ", which waits for others,"
	}
	if limit, ok := strings.CutPrefix(line, "/"); ok {
		limit, _, _ = strings.Cut(limit, table.LineSep)
		return fmt.Sprintf("limit %q", limit)
	}
	return fmt.Sprintf("lane %q", line)
}
