package onceq

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A limit holds for jobs of any lanes and kinds, without an order: how many are live at once, how many start in a time, or
// both. It works as a lane does (lane.go), with its own line in job_waits, whose name begins with a slash. A job with a lane
// and a limit stands first in the line of its lane. When its turn comes there, it keeps that place and moves on to the line
// of its limit, at the end. So each lane has no more jobs in that line than may be live in it, and the lanes take turns.
//
// The table jobs has both names in its column lane, with a separator: its lane, or nothing, and the line of its limit. The
// column path of job_waits has the same.
//
// A rate gives each job the time at which it starts: its slot, which is its run_at. The promoters compute slots under the
// lane's lock from one row of limit_rates (the generic cell rate algorithm), for many jobs at a time and up to half a
// second ahead, so that nothing is asked at a claim. A job that starts later than slotLate after its slot gets another one first
// (Queue.reslot): otherwise all those that an outage held up would start at once. What starts late in that time is paid by the
// burst: slots are so far apart that no window of starts has more than the burst and what the rate allows.

const (
	lineSep  = "\x1f"
	slotMark = "@" // the third part of jobs.lane: run_at is a slot
	slotLate = 100 * time.Millisecond
	noCap    = math.MaxInt32 // lane_limits.n of a limit with a rate alone

	sqlSep       = `E'\x1f'`
	sqlSlotLate  = `100000.0` // microseconds
	sqlSlotAhead = `500000.0`
)

// laneIn and limitIn give the lane, or the line of the limit, in a path; "" for none.
func laneIn(path string) string  { return `split_part(` + path + `, ` + sqlSep + `, 1)` }
func limitIn(path string) string { return `split_part(` + path + `, ` + sqlSep + `, 2)` }

// firstLine is the line in which a job with that path begins to wait.
func firstLine(path string) string {
	return `coalesce(nullif(` + laneIn(path) + `, ''), ` + limitIn(path) + `)`
}

// linesIn is for a lateral join: the lines of a path.
func linesIn(path string) string {
	return `(select l.lane from (values (` + laneIn(path) + `), (` + limitIn(path) + `)) l (lane) where l.lane <> '') l`
}

// unslotted is a path as job_waits has it: null for a lane alone.
func unslotted(path string) string {
	return `nullif(replace(` + path + `, ` + sqlSep + ` || '` + slotMark + `', ''), ` + laneIn(path) + `)`
}

// splitPath is the same for one that was read.
func splitPath(path string) (lane, limit string, slot bool) {
	lane, rest, _ := strings.Cut(path, lineSep)
	limit, mark, _ := strings.Cut(rest, lineSep)
	return lane, strings.TrimPrefix(limit, "/"), mark == slotMark
}

// lineOf gives the line in which a job with that path begins to wait, and the path as job_waits has it.
func lineOf(path string) (line string, full *string) {
	lane, limit, _ := strings.Cut(path, lineSep)
	if limit == "" {
		return lane, nil
	}
	return cmp.Or(lane, limit), &path
}

// Limit says how many jobs of a limit may be live at once, and how many may start in a time. Jobs have to keep to both. The
// zero Limit lets no job start.
type Limit struct {
	// AtOnce is how many jobs may be live at once: to be claimed or running. A job that waits for its next attempt does not
	// count. 0 means any number if there is a Rate; without one, no job starts. At most 1,000,000.
	AtOnce int `json:"at_once,omitzero"`

	// Rate is how many jobs start in Per. 0 means any number. At most 1,000,000, and no more than a million a second. Per is a
	// second by default, and a millisecond to 366 days.
	Rate int           `json:"rate,omitzero"`
	Per  time.Duration `json:"per,omitzero"` // as JSON, in nanoseconds

	// Burst is how many may start at once after a pause. In every window of time, at most Burst and what the rate allows in
	// the window start. A job may start up to 100 ms after its slot. The burst has room for that if it is at least one more than
	// what the rate allows in 100 ms, which is the default: 2 for ten a second. With a smaller one the slots are just as exact,
	// and two starts can be closer together than their slots, by up to 100 ms. At most 1,000,000.
	Burst int `json:"burst,omitzero"`
}

func (l Limit) String() string {
	if l == (Limit{}) {
		return "none at all"
	}
	var all []string
	if l.AtOnce > 0 || l.Rate == 0 {
		all = append(all, fmt.Sprintf("%d at once", l.AtOnce))
	}
	if l.Rate > 0 {
		all = append(all, fmt.Sprintf("%d in %s", l.Rate, cmp.Or(l.Per, time.Second)))
	}
	if l.Burst > 0 {
		all = append(all, fmt.Sprintf("in bursts of %d", l.Burst))
	}
	return strings.Join(all, ", ")
}

func (l *Limit) check() error {
	switch {
	case l.AtOnce < 0 || l.AtOnce > 1_000_000:
		return invalid("Limit.AtOnce", "is %d; 0 to 1,000,000 is possible", l.AtOnce)
	case l.Rate < 0 || l.Rate > 1_000_000:
		return invalid("Limit.Rate", "is %d; 0 to 1,000,000 is possible", l.Rate)
	case l.Rate == 0 && (l.Per != 0 || l.Burst != 0):
		return invalid("Limit.Rate", "is 0 although Per or Burst is set; set Rate, or none of them")
	case l.Rate == 0:
		return nil
	}
	l.Per = cmp.Or(l.Per, time.Second)
	if l.Per < time.Millisecond || l.Per > 366*24*time.Hour {
		return invalid("Limit.Per", "is %s; a millisecond to a year is possible", l.Per)
	}
	if float64(l.Rate)/l.Per.Seconds() > 1_000_000 {
		return invalid("Limit.Rate", "is %d in %s; at most a million a second is possible", l.Rate, l.Per)
	}
	if l.Burst == 0 {
		l.Burst = 1 + int(math.Ceil(float64(l.Rate)*float64(slotLate)/float64(l.Per)))
	}
	if l.Burst < 0 || l.Burst > 1_000_000 {
		return invalid("Limit.Burst", "is %d; 1 to 1,000,000 is possible, and 0 for the default", l.Burst)
	}
	return nil
}

// limitLine gives a limit's line as the tables store it. A name that ends in a slash is for all limits that begin with it and
// have none of their own.
func limitLine(field, name string, families bool) (string, error) {
	base := name
	if families {
		base = strings.TrimSuffix(name, "/")
	}
	switch {
	case strings.Contains(name, lineSep):
		return "", invalid(field, "contains a unit separator (U+001F), which is not possible")
	case strings.HasPrefix(base, "/") || strings.HasSuffix(base, "/"):
		return "", invalid(field, "is %q; it must not begin or end with a slash", name)
	case families && base != name && strings.Contains(base, "/"):
		return "", invalid(field, "is %q; a family of limits is what comes before the first slash", name)
	}
	return "/" + name, checkName(field, base, MaxLaneBytes)
}

// SetLimit sets a limit that jobs name with Job.Limit, inside db, in all processes at once. It takes effect when db commits.
// If more jobs are live than a lowered limit allows, they run on, and none starts until enough have finished. A name that ends
// in a slash, as in "provider/", is for each limit whose name begins with it and that has not been set itself; a name may have
// more slashes, and its family is what comes before the first one. A name has at most MaxLaneBytes. A bad name or Limit is an
// *InvalidError.
//
// The jobs of a limit that nobody has set run one at a time. The zero Limit lets none start.
func (q *Queue) SetLimit(ctx context.Context, db DB, name string, limit Limit) error {
	line, err := limitLine("name", name, true)
	if err := cmp.Or(err, limit.check()); err != nil {
		return err
	}
	if err := q.setLine(ctx, db, line, &limit); err != nil {
		return fmt.Errorf("onceq: limit: %w", err)
	}
	return nil
}

// RemoveLimit undoes SetLimit: what holds then is the limit of the name's family, if that was set, and otherwise one at a
// time. It is no error if nobody has set it.
func (q *Queue) RemoveLimit(ctx context.Context, db DB, name string) error {
	line, err := limitLine("name", name, true)
	if err != nil {
		return err
	}
	if err := q.setLine(ctx, db, line, nil); err != nil {
		return fmt.Errorf("onceq: limit: %w", err)
	}
	return nil
}

// setLine writes the limit of a line, or of a family of them, or removes it. A removed one stays as a row without n as long
// as more jobs may be live than the limit allows that holds then.
func (q *Queue) setLine(ctx context.Context, db DB, line string, limit *Limit) error {
	const calls = `,
calls as (
  insert into onceq.lane_calls (slot, due, lane) values ($2::smallint, statement_timestamp(), $1::text), (-1, statement_timestamp(), '?')
)
select 1`
	const set = `
with limits as (
  insert into onceq.lane_limits (lane, n, rate, per, burst, lowered) values ($1::text, $3::int, $4::bigint, $5::bigint, $6::int, true)
  on conflict (lane) do update set n = excluded.n, rate = excluded.rate, per = excluded.per, burst = excluded.burst, lowered = true
)` + calls
	const remove = `
with limits as (
  update onceq.lane_limits set n = null, rate = null, per = null, burst = null, lowered = true where lane = $1::text
)` + calls
	if db == nil {
		return errNoDB
	}
	slot := -1
	if !strings.HasSuffix(line, "/") {
		if err := q.queryRow(ctx, db, `select `+laneSlot("$1::text"), []any{line}, &slot); err != nil {
			return err
		}
	}
	if limit == nil {
		return q.guarded(ctx, db, remove, []any{line, slot}, nil)
	}
	n := limit.AtOnce
	var rate, per, burst any
	if limit.Rate > 0 {
		if n == 0 {
			n = noCap
		}
		rate, per, burst = limit.Rate, limit.Per.Microseconds(), limit.Burst
	}
	return q.guarded(ctx, db, set, []any{line, slot, n, rate, per, burst}, nil)
}

// familyOf is the name under which the limit of all lines of a family is stored: what comes before the first slash that is not
// the first character, and that slash.
func familyOf(line string) string {
	return `left(` + line + `, strpos(substr(` + line + `, 2), '/') + 1)`
}

// limitRow is for a lateral join: the row of lane_limits that holds for a line.
func limitRow(line, columns string) string {
	return `(select ` + columns + `
                 from onceq.lane_limits s
                where s.lane = any (array[` + line + `, ` + familyOf(line) + `]) and s.n is not null
                order by s.lane desc
                limit 1)`
}

// rates computes how many jobs of the limits in room may be admitted, and their slots, by the generic cell rate algorithm.
// All is in microseconds from now: gap is the time between two slots, and debt how far free_at is ahead of now. kept is the
// part of the burst that is for late starts; all of it is there for the first ones if nothing has started for a while
// (rested). What is not claimed yet (ready) counts against what may be admitted ahead of time.
var rates = `
rate as materialized (
  select x.lane, x.gap, x.burst, x.kept, greatest(x.debt, 0) as debt, x.debt <= -` + sqlSlotLate + ` as rested,
         least(case when x.debt <= -` + sqlSlotLate + ` then greatest(x.burst, floor(` + sqlSlotAhead + ` / x.gap + x.burst - x.kept))
                    else greatest(0, floor((` + sqlSlotAhead + ` - greatest(x.debt, 0)) / x.gap + x.burst - x.kept)) end,
               greatest(0, greatest(x.burst, ceil(` + sqlSlotAhead + ` / x.gap)) - x.ready))::bigint as n
    from (select r.lane, s.gap, s.burst, ready.n as ready, least(s.burst - 1, ceil(` + sqlSlotLate + ` / s.gap)) as kept,
                 coalesce(extract(epoch from c.free_at - statement_timestamp())::float8 * 1000000 * s.gap / c.gap, '-infinity') as debt
            from (select lane from room where lane like '/%' and n > 0 offset 0) r
           cross join lateral ` + limitRow("r.lane", `per::float8 / rate as gap, burst`) + ` s
           cross join lateral (
                 select count(*) as n
                   from onceq.lane_places p
                  cross join lateral (select leased_until from onceq.jobs where id = p.id offset 0) j
                  where p.lane = r.lane and j.leased_until is null) ready
            left join lateral (select * from onceq.limit_rates where lane = r.lane offset 0) c on true
           where s.gap is not null) x
)`

// slotOf is the i-th slot, from 0, of a row of rate.
const slotOf = `statement_timestamp() + case when t.rested and t.i < t.burst then 0
       else greatest(0, ceil(t.debt + (t.i + 1 - (t.burst - t.kept)) * t.gap)) end * interval '1 microsecond'`

// reslotJobs gives new slots to leased jobs of one limit, of which each missed its own. It must follow lockLine in the same
// transaction. One that would have to wait takes the slot of another job, which nobody has claimed and whose time has just
// come, and that one gets the new slot: the handlers are slower than the rate, so it would miss its own. A job in quarantine
// keeps its slot, which a claimer knows (claimer.suspended). It returns the ids of
// the jobs that may start at once, of those that have another's slot and may start too, and the microseconds since the
// transaction began. The others wait for their slots, as if they had not been claimed: their ids, and for how many microseconds.
var reslotJobs = `
with u as materialized (
  select * from unnest($2::bigint[], $3::int[], $4::bigint[]) with ordinality as u(id, claims, holder, n)
),
mine as materialized (
  select j.id, u.n - 1 as i
    from u cross join lateral (select id from onceq.jobs where id = u.id and claims = u.claims and holder = u.holder for no key update) j
),
rate as materialized (
  select s.gap, s.burst, least(s.burst - 1, ceil(` + sqlSlotLate + ` / s.gap)) as kept,
         greatest(0, coalesce(extract(epoch from c.free_at - statement_timestamp())::float8 * 1000000 * s.gap / c.gap, 0)) as debt
    from ` + limitRow("$1::text", `per::float8 / rate as gap, burst`) + ` s
    left join lateral (select * from onceq.limit_rates where lane = $1::text offset 0) c on true
   where s.gap is not null
),
paid as (
  insert into onceq.limit_rates (lane, free_at, gap)
  select $1::text, statement_timestamp() + ceil(debt + gap * (select count(*) from mine)) * interval '1 microsecond', gap
    from rate
  on conflict (lane) do update set free_at = excluded.free_at, gap = excluded.gap
),
slot as materialized (
  select m.id, coalesce((select greatest(0, ceil(debt + (m.i + 1 - (burst - kept)) * gap)) from rate), 0) as ahead from mine m
),
present as materialized (
  select j.id, row_number() over (order by j.id) as n
    from (select j.id
            from onceq.lane_places p
           cross join lateral (
                 select id from onceq.jobs
                  where id = p.id and leased_until is null and lost = 0 and run_at <= statement_timestamp()
                    and run_at > statement_timestamp() - ` + sqlSlotLate + ` / 2 * interval '1 microsecond' and right(lane, 2) = ` + sqlSep + ` || '` + slotMark + `'
                    for update skip locked) j
           where p.lane = $1::text
           limit (select count(*) from slot where ahead > 0)) j
),
change as materialized (
  select s.id, s.ahead, p.id as other
    from (select id, ahead, row_number() over (order by ahead, id) as n from slot where ahead > 0) s
    left join present p on p.n = s.n
),
later as (
  update onceq.jobs j set run_at = statement_timestamp() + c.ahead * interval '1 microsecond', leased_until = null, holder = null
    from (select coalesce(other, id) as id, ahead from change) c where j.id = any (array[c.id])
  returning 1
)
select array(select id from slot where ahead = 0), array(select id from change where other is not null),
       (extract(epoch from statement_timestamp() - transaction_timestamp()) * 1000000)::bigint,
       array(select id from change where other is null order by id), array(select ahead::bigint from change where other is null order by id)`

// lockLine locks the row that a line belongs to, as promoters do.
var lockLine = `select slot from onceq.lane_locks where slot = ` + laneSlot("$1::text") + ` for update`

// slotted reports whether the job must start at its slot.
func (l *Lease) slotted() bool { return !l.slot.IsZero() }

// tooLate reports whether the job's slot is too long ago for it to start.
func (l *Lease) tooLate() bool { return l.slotted() && time.Since(l.slot) > slotLate }

// reslot gets new slots for leases that start too late, and returns those that may start at once, and those that were given
// back until their slots. Each limit is one message, so that the line is not locked while this process is slow.
func (q *Queue) reslot(ctx context.Context, db *pgxpool.Pool, leases []*Lease) (now, later []*Lease, err error) {
	byLimit := make(map[string][]*Lease)
	for _, l := range leases {
		byLimit[l.Limit] = append(byLimit[l.Limit], l)
	}
	for limit, leases := range byLimit {
		slices.SortFunc(leases, func(a, b *Lease) int { return cmp.Compare(a.ID, b.ID) })
		ids, claims, holders := guards(leases)
		var start, taken, back, ahead []int64
		var waited int64 // microseconds from when the message arrived to the slots
		began := time.Now()
		batch := &pgx.Batch{}
		batch.Queue(beginOwn)
		batch.Queue(guardPlans + `, ` + noLimits)
		batch.Queue(q.sql(lockLine), "/"+limit)
		batch.Queue(q.sql(reslotJobs), "/"+limit, ids, claims, holders).Query(row(&start, &taken, &waited, &back, &ahead))
		batch.Queue("commit")
		if err := db.SendBatch(ctx, batch).Close(); err != nil {
			return now, later, fmt.Errorf("onceq: a new slot: %w", q.told(err))
		}
		for _, l := range leases {
			switch at := began.Add(time.Duration(waited) * time.Microsecond); {
			case slices.Contains(start, l.ID):
				l.slot = at
			case slices.Contains(taken, l.ID):
				l.slot = at.Add(-slotLate / 2) // at the earliest
			default:
				if i, ok := slices.BinarySearch(back, l.ID); ok {
					l.slot = time.Now().Add(time.Duration(ahead[i]) * time.Microsecond) // at the latest
				}
				later = append(later, l)
				continue
			}
			now = append(now, l)
		}
	}
	return now, later, nil
}

// onlyOnTime returns those of the leases that Claim may return: it gives back those that missed their slots, and start later.
func (q *Queue) onlyOnTime(ctx context.Context, leases []*Lease) ([]*Lease, error) {
	var late []*Lease
	for _, l := range leases {
		if l.tooLate() {
			late = append(late, l)
		}
	}
	if len(late) == 0 {
		return leases, nil
	}
	_, later, err := q.reslot(ctx, q.pool, late)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(leases, func(l *Lease) bool { return slices.Contains(later, l) }), nil
}

// renew gets new slots for the tasks that missed theirs while they waited for a handler, for all of them in one round trip: if
// each asked when its turn came, the others would miss theirs meanwhile. Those that may start now wait in front of all
// others. The rest is given back.
func (x *executor) renew(s *slots) {
	for units := s.takeLate(); len(units) > 0; units = s.takeLate() {
		x.begin(s, s.put(x.renewed(s, units), true))
		if x.stopping.Load() {
			for _, u := range s.takeAll() {
				x.giveBack(u.tasks())
			}
		}
	}
}

// renewed returns those of the units that may start now.
func (x *executor) renewed(s *slots, units []unit) (ready []unit) {
	var late []*Lease
	for _, u := range units {
		for _, t := range u.tasks() {
			if t.lease.tooLate() {
				late = append(late, t.lease)
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.base), x.lease)
	defer cancel()
	_, later, err := x.q.reslot(ctx, x.db, late)
	if err != nil {
		x.q.log.Warn("onceq: jobs that missed their slots got no new ones, and are given back", slog.Int("jobs", len(late)), slog.Any("error", err))
	}
	waits := make(map[*Lease]bool, len(later))
	for _, l := range later {
		waits[l] = true
	}
	for _, u := range units {
		var stay, leave []*task
		for _, t := range u.tasks() {
			switch {
			case waits[t.lease]:
				x.tasks.mu.Lock()
				x.tasks.forget(t.lease)
				x.tasks.mu.Unlock()
				if t.quarantined() && !t.lease.tooLate() {
					x.suspended(t.lease)
				}
			case err != nil && t.lease.tooLate():
				x.end(t, outcome{lease: t.lease, state: StateWaiting})
			default:
				stay = append(stay, t)
				continue
			}
			leave = append(leave, t)
		}
		if len(leave) > 0 {
			x.left(s, leave)
		}
		switch {
		case len(stay) == 0:
		case u.one != nil:
			ready = append(ready, u)
		default:
			ready = append(ready, unit{many: stay})
		}
	}
	if len(later) > 0 {
		x.woken(s.queue)
	}
	return ready
}
