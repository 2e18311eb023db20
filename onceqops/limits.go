package onceqops

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// LimitInfo says how a limit is doing.
type LimitInfo struct {
	Name     string        `json:"name"`               // as in Job.Limit; with a slash at its end, of a family
	Limit    onceq.Limit   `json:"limit"`              // what holds
	Set      bool          `json:"set"`                // somebody has set it; otherwise it is its family's, or one at a time
	Live     int           `json:"live"`               // jobs that are live; counting stops at StatsCap, or at a larger AtOnce
	Weight   int           `json:"weight"`             // how often they count together, as their Job.Weight says
	Pause    *onceq.Pause  `json:"pause,omitzero"`     // if it is paused
	LiveIDs  []int64       `json:"live_ids"`           // the first ten of these
	Waiting  int           `json:"waiting"`            // jobs that are due and wait for the limit; those that wait for their lane do not count
	Delayed  int           `json:"delayed"`            // jobs that are not due yet; counting both stops at StatsCap
	Next     int           `json:"next,omitzero"`      // how often the next of Waiting counts
	Oldest   time.Duration `json:"oldest,omitzero"`    // how long the oldest of Waiting has waited, by the database's clock
	NextSlot time.Time     `json:"next_slot,omitzero"` // of a limit with Max or a rate: when the next job can start
	Missed   int           `json:"missed,omitzero"`    // of these: how many of Live missed their slots unclaimed

	stuck bool // as many of Live have missed their slots as promoters let in ahead of time, so no more are let in
}

// full says that the next job has no room.
func (l LimitInfo) full() bool {
	return l.Limit.AtOnce > 0 && l.Live > 0 && l.Weight+max(1, l.Next) > l.Limit.AtOnce
}

// String says in words what the limit's jobs wait for.
func (l LimitInfo) String() string {
	name := fmt.Sprintf("limit %q", l.Name)
	if !l.Set {
		name += " (not set itself)"
	}
	switch {
	case l.Pause != nil:
		return l.Pause.String()
	case l.Limit == (onceq.Limit{}):
		return name + " lets no job start"
	case l.full() && max(l.Weight-l.Live, l.Next-1) > 0:
		return fmt.Sprintf("%s is full: what is live weighs %d, the next job %d, and %d may be live", name, l.Weight, l.Next, l.Limit.AtOnce)
	case l.full():
		return fmt.Sprintf("%s is full: %d of its jobs %s live, and %d may be", name, l.Live, table.Either(l.Live, "is", "are"), l.Limit.AtOnce)
	case l.Waiting == 0:
		return "no due job waits for " + name
	case l.stuck:
		return fmt.Sprintf("%s lets no more jobs in before some start of %d that have slots and that nobody has claimed", name, l.Missed)
	case paced(l.Limit):
		return fmt.Sprintf("%s gives its next slot at %s", name, table.Stamp(l.NextSlot))
	}
	return name + " has room: a worker lets its next job in within a poll"
}

// readLimit reads what holds for line x.lane, and how it is doing.
var readLimit = `
       s.n, s.rate, s.per, s.burst, coalesce(s.lane = x.lane, false), z.paused_at, z.until, z.note,
       e.live, e.weight,
       array(select j.id from ` + table.LiveIn("x.lane") + ` order by p.id limit 10),
       w.waiting, w.delayed, coalesce(extract(epoch from statement_timestamp() - w.oldest) * 1e6, 0)::bigint,
       statement_timestamp() + greatest(0, coalesce(extract(epoch from c.free_at - statement_timestamp())::float8 * 1e6::float8 * s.gap / c.gap, 0)
         + least(0, coalesce(f.weight, 1)::float8 - s.most + least(s.most - 1::float8, ` + table.SlotLateSQL + ` / s.gap)) * s.gap)
         * interval '1 microsecond',
       m.missed, m.weight, coalesce(f.weight, 0)
  from x
  left join lateral ` + table.LimitRow("x.lane", `s.lane, s.n, s.rate, s.per, s.burst,
       s.per::float8 / s.rate::float8 as gap, coalesce(s.burst, 1)::float8 as most`) + ` s on true
  left join lateral (select * from onceq.limit_rates where lane = x.lane offset 0) c on true
  left join lateral (
       select paused_at, until, note from onceq.pauses
        where what = 'limit' and name = pg_catalog.substr(x.lane, 2) and ` + table.InForce + ` offset 0) z on true
 cross join lateral (
       select count(*) as live, coalesce(pg_catalog.sum(onceq.weight(j.path)), 0)::bigint as weight
         from (select j.path from ` + table.LiveIn("x.lane") + ` limit greatest($3::int, s.n)) j) e
 cross join lateral (
       select count(*) as missed, coalesce(pg_catalog.sum(onceq.weight(u.lane)), 0)::bigint as weight
         from (select j.lane from onceq.lane_places p
                cross join lateral (select leased_until, run_at, lane from onceq.jobs where id = p.id offset 0) j
                where p.lane = x.lane and j.leased_until is null and j.run_at <= statement_timestamp() - ` + table.SlotLateSQL + ` * interval '1 microsecond' and s.gap is not null
                limit $3::int) u) m
  left join lateral (
       select onceq.weight(w.path) as weight
         from (select id from ` + table.DueIn("x.lane", "1") + `) d
        cross join lateral (select path from onceq.job_waits where id = d.id offset 0) w) f on true
 cross join lateral ` + table.WaitingIn("x.lane", "$3::int") + ` w`

func (l *LimitInfo) scan(rows pgx.Rows, more ...any) error {
	var n, rate, burst *int
	var per *int64
	var oldest int64
	var missed int // what they weigh
	var next, since, until *time.Time
	var note *string
	dest := []any{&l.Name, &n, &rate, &per, &burst, &l.Set, &since, &until, &note, &l.Live, &l.Weight, &l.LiveIDs, &l.Waiting, &l.Delayed, &oldest, &next, &l.Missed, &missed, &l.Next}
	if err := rows.Scan(append(dest, more...)...); err != nil {
		return err
	}
	l.Name, l.Oldest = l.Name[1:], time.Duration(oldest)*time.Microsecond
	if since != nil {
		l.Pause = &onceq.Pause{Limit: l.Name, Since: *since, Until: table.OrZero(until), Note: *note}
	}
	if l.Limit.AtOnce = 1; n != nil {
		l.Limit = limitOfRow(*n, rate, per, burst)
	}
	if paced(l.Limit) {
		l.NextSlot = table.OrZero(next)
		n, per, burst := root.Pace(l.Limit)
		ahead := int(math.Ceil(float64(n) * float64(time.Second/2) / float64(per)))
		l.stuck = l.Missed > 0 && missed >= max(burst, ahead)
	}
	return nil
}

// limitOfRow is the limit that setLine has written.
func limitOfRow(n int, rate *int, per *int64, burst *int) (l onceq.Limit) {
	if n < table.NoCap {
		l.AtOnce = n
	}
	if rate == nil {
		return l
	}
	if l.Per = time.Duration(*per) * time.Microsecond; burst == nil {
		l.Max, l.Per = *rate, l.Per-table.SlotLate
	} else {
		l.Rate, l.Burst = *rate, *burst
	}
	return l
}

// LimitFilter chooses limits.
type LimitFilter struct {
	After string // only limits whose LimitInfo.Name is behind this one: the next page
	Limit int    // how many; default 50, at most 1,000
}

// nextLimit is the first limit behind a name that is set or for which jobs wait.
func nextLimit(after string) string {
	return `least((select lane from onceq.job_waits where lane > ` + after + ` and lane < '0' order by lane limit 1),
              (select lane from onceq.lane_limits where lane > ` + after + ` and lane < '0' and n is not null order by lane limit 1))`
}

var readLimits = `
with recursive x (lane, k) as (
  select ` + nextLimit(`('/' || $1::text) collate "C"`) + `, 1
  union all
  select ` + nextLimit("x.lane") + `, x.k + 1 from x where x.lane is not null and x.k < $2::int
)
select x.lane,` + readLimit + `
 where x.lane is not null
 order by x.k`

// Limits lists the limits that somebody has set, and those for which jobs wait, by name. Its cost depends on the limits that it
// returns, and not on how many jobs wait. A nil db is the pool.
func (q *Ops) Limits(ctx context.Context, db onceq.DB, f LimitFilter) ([]LimitInfo, error) {
	if db == nil {
		db = q.store.Pool
	}
	if err := cmp.Or(pageSize("Limit", &f.Limit, 50), checkText("After", f.After)); err != nil {
		return nil, err
	}
	args := []any{f.After, f.Limit, StatsCap}
	return readAll(ctx, q, db, pg.Reading, "limits", readLimits, args, func(l *LimitInfo, rows pgx.Rows) error { return l.scan(rows) })
}

// Limit returns what holds for the jobs with this Job.Limit, and how the limit is doing. A name that ends in a slash is a
// family's.
func (q *Ops) Limit(ctx context.Context, db onceq.DB, name string) (l LimitInfo, err error) {
	line, err := limitLine("name", name, true)
	if err != nil {
		return l, err
	}
	if l, _, _, _, err = limitFor(ctx, q, db, line, onceq.JobInfo{}); err != nil {
		return LimitInfo{}, fmt.Errorf("onceq: limit: %w", err)
	}
	return l, nil
}

// readLimitOf reads one limit, how many jobs wait for it before one with these id, priority and time, and which have the places. Which of these ends first is asked where they are counted.
var readLimitOf = `
with x (lane) as (select $1::text collate "C"),
l as (select x.lane,` + readLimit + `)
select l.*,
       ` + waitBefore("count(*)") + `,
       ` + waitBefore("coalesce(pg_catalog.sum(onceq.weight(w.path)), 0)::bigint") + `,
       ` + holdersColumns + `
  from l cross join lateral ` + holdersOf("$1::text", "l.n is distinct from "+table.NoCapSQL)

// limitFor reads what is said of a limit to a job that waits for it: with how many are before it, and what
// they weigh.
func limitFor(ctx context.Context, q *Ops, db onceq.DB, line string, j onceq.JobInfo) (l LimitInfo, before, weigh int, p holders, err error) {
	args := []any{line, j.ID, StatsCap, int16(j.Priority), j.RunAt}
	err = q.store.Send(ctx, db, pg.Reading, readLimitOf, args, pg.Each(func(rows pgx.Rows) error { return l.scan(rows, append([]any{&before, &weigh}, p.dest()...)...) }))
	return l, before, weigh, p, err
}

// weights says what a job weighs that waits, and those before it, unless all count once.
func (l LimitInfo) weights(j *onceq.JobInfo, before, weigh int) string {
	if l.Weight == l.Live && weigh == before && j.Weight <= 1 {
		return ""
	}
	return fmt.Sprintf("; it weighs %d, what is live %d, and what is before it %d", j.Weight, l.Weight, weigh)
}

// limit explains a job that waits for its limit.
func (x *explaining) limit(ctx context.Context) error {
	j := &x.e.Job
	l, before, weigh, p, err := limitFor(ctx, x.q, x.db, "/"+j.Limit, *j)
	if err != nil {
		return fmt.Errorf("onceq: explain: %w", err)
	}
	r := Reason{Cause: CauseLimit, Slots: l.Limit.AtOnce, Ahead: l.LiveIDs, Before: before}
	r.Pause = l.Pause
	if j.RunAt.After(x.e.At) {
		x.notDue()
	}
	unset := ""
	if !l.Set {
		unset = ", which nobody has set itself"
	}
	switch {
	case l.Pause != nil:
		r.Text, r.Since, r.Until = "its "+l.Pause.String(), l.Pause.Since, l.Pause.Until
		r.Advice = "resuming the limit ends that"
	case l.Limit == (onceq.Limit{}):
		r.Text, r.Advice = fmt.Sprintf("its limit %q lets no job start", j.Limit), raiseLimit
	case l.full():
		r.Text = fmt.Sprintf("it waits for its share of limit %q%s, of which %d may be live at once: behind %s%s",
			j.Limit, unset, l.Limit.AtOnce, firstOf(l.LiveIDs, l.Live), andOthers(r.Before))
		r.Text += l.weights(j, before, weigh)
		r.Advice = "if one of them hangs, its explanation says where it runs; a higher limit lets more of them be live"
		if !l.Set {
			r.Advice = "set the limit, or one for its family, if more of them may be live; " + r.Advice
		}
		x.heldAhead(&r, &p)
	case x.lock != nil:
		return nil
	case l.stuck:
		r.Text = fmt.Sprintf("it waits for a slot of limit %q (%s), which lets no more jobs in before some start of %d that have slots and that nobody has claimed; the first of its jobs are %d",
			j.Limit, l.Limit, l.Missed, l.LiveIDs)
		r.Advice = "the explanation of one of them says why it does not start"
		x.pausedAhead(&r, &p)
	case paced(l.Limit):
		n, per, _ := root.Pace(l.Limit)
		gap := time.Duration(float64(per) / float64(n))
		r.Until = l.NextSlot.Add(time.Duration(min(float64(weigh)*float64(gap), float64(table.MaxDelay))))
		when := "at about"
		if r.Before >= StatsCap {
			when = "not before"
		}
		r.Text = fmt.Sprintf("it waits for a slot of limit %q (%s): %s before it, and its slot is %s %s",
			j.Limit, l.Limit, atLeast(r.Before, "other comes", "others come"), when, table.Stamp(r.Until))
		r.Text += l.weights(j, before, weigh)
	default:
		r.Text = fmt.Sprintf("its limit %q has room, and %s: a worker lets them in within a poll", j.Limit, comeFirst(r.Before))
		x.room = len(x.e.Reasons) + 1
		r.Advice = "if it stays so, no worker is running: start one; or a trigger or a constraint of your own refuses one of them, and a worker's log says why"
	}
	x.e.add(r)
	return nil
}

// limitThen adds that a job that waits for its lane will then wait for its limit, if no more jobs may be live than those of
// other lanes, or none. ahead are the jobs that the lane waits for, which have left the limit by then.
func (x *explaining) limitThen(ctx context.Context, ahead []int64) error {
	j := &x.e.Job
	l, _, _, p, err := limitFor(ctx, x.q, x.db, "/"+j.Limit, *j)
	if err != nil {
		return fmt.Errorf("onceq: explain: %w", err)
	}
	r := Reason{Cause: CauseLimit, Slots: l.Limit.AtOnce, Text: "its " + l.String(), Advice: raiseLimit}
	if l.Pause == nil && l.Limit != (onceq.Limit{}) {
		others := l.Live
		for _, id := range ahead {
			if slices.Contains(l.LiveIDs, id) || l.Live > len(l.LiveIDs) { // not all are listed: it may be one of the others
				others--
			}
		}
		if l.Limit.AtOnce == 0 || others == 0 || l.Weight-(l.Live-others)+j.Weight <= l.Limit.AtOnce {
			return nil
		}
		r.Ahead = l.LiveIDs
		r.Text += fmt.Sprintf("; the first of them are %d", l.LiveIDs)
		r.Advice = "if one of them hangs, its explanation says where it runs; a higher limit lets more of them be live"
		x.pausedAhead(&r, &p)
	}
	x.e.add(r)
	return nil
}
