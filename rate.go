package onceq

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// rates computes how many jobs of the limits in room may be admitted, and their slots, by the generic cell rate algorithm.
// All is in microseconds from now: gap is the time between two slots, null for a limit without a rate, debt how far free_at is
// ahead of now, and idle how far behind. kept is the part of the burst that is for late starts; all of it is there for the first
// ones if nothing has started for a while (rested). What is not claimed yet (ready) counts against what may be admitted ahead of
// time; if that is all of it (full), there is nothing to do until half of it may have started.
//
// To find what is not claimed is to read all live jobs of the limit, and each of them that ends has somebody look. So they are read
// only if a job waits, and no slots are given as long as those that were given last for half of the time that they may be ahead: the
// next slot is the same one later. The newest ones are read first, of which fewer are claimed, and no more than fill it.
//
// Where the rate was changed, the slots that were given count at the new one, so that nobody gets a second burst. Those that
// were given ahead of time count for no more than that time: otherwise a much lower rate would let nothing start for hours.
var rates = `
rate as materialized (
  select z.*, z.ready::float8 >= z.ahead as "full",
         least(z.room, case when z.gap is null then z.room
                            when not z.short then 0
                            when z.rested then least(greatest(z.burst, pg_catalog.floor(` + sqlSlotAhead + ` / z.gap + z.burst - z.kept)), greatest(0, z.ahead - z.ready::float8))
                            else least(greatest(0, pg_catalog.floor((` + sqlSlotAhead + ` - z.debt) / z.gap + z.burst - z.kept)), greatest(0, z.ahead - z.ready::float8)) end)::bigint as n
    from (select y.*, ready.n as ready
            from (select v.lane, v.room, v.gap, v.burst, v.kept, greatest(v.debt, 0) as debt, v.debt <= -(` + sqlSlotLate + `) as rested,
                         case when v.debt > '-infinity' then greatest(-v.debt, 0) else 0 end as idle,
                         v.debt + (1::float8 - (v.burst - v.kept)) * v.gap <= ` + sqlSlotAhead + ` / 2::float8 as short,
                         greatest(v.burst, pg_catalog.ceil(` + sqlSlotAhead + ` / v.gap)) as ahead
                    from (select x.*, ` + debtOf("x") + ` as debt
                            from (select r.lane, r.n as room, s.gap, s.burst, ` + keptOf("s") + ` as kept, c.gap as was,
                                         ` + owed + ` as owed
                                    from (select lane, n from room where lane like '/%' and n > 0 and ` + anyDue("room.lane") + ` offset 0) r
                                    left join lateral ` + limitRow("r.lane", `per::float8 / rate::float8 as gap, burst::float8 as burst`) + ` s on true
                                    left join lateral (select * from onceq.limit_rates where lane = r.lane offset 0) c on true) x) v) y
           cross join lateral (
                 select count(*) as n
                   from (select from onceq.lane_places p
                          cross join lateral (select leased_until from onceq.jobs where id = p.id offset 0) j
                          where p.lane = y.lane and j.leased_until is null and y.short
                          order by p.id desc
                          limit y.ahead) u) ready) z
)`

// keptOf is the part of a burst that is for late starts: what the rate allows in the time by which a start may be late, which need
// not be a whole job. Of one a minute it is a 600th, and rounded up it would cost a burst of two the half.
func keptOf(row string) string {
	return `least(` + row + `.burst::float8 - 1::float8, ` + sqlSlotLate + ` / ` + row + `.gap)`
}

// debtOf is the debt of a row with owed, the microseconds until free_at, and was, the gap of that time; both null if no job has
// had a slot.
func debtOf(row string) string {
	r := strings.NewReplacer("x.", row+".")
	return r.Replace(`case when x.gap is null or x.was is null then '-infinity'
                            when x.gap = x.was then x.owed
                            else least(x.owed * x.gap / x.was, greatest(x.owed, (x.burst - x.kept) * x.gap + ` + sqlSlotAhead + `)) end`)
}

// owed is how far free_at of a row c of limit_rates is ahead, in microseconds.
const owed = `extract(epoch from c.free_at - statement_timestamp())::float8 * 1e6::float8`

// slotOf is the i-th slot, from 0, of a row of rate.
const slotOf = `statement_timestamp() + case when t.rested and t.i::float8 < t.burst then 0
       else greatest(0, pg_catalog.ceil(t.debt + ((t.i + 1)::float8 - (t.burst - t.kept)) * t.gap)) end * interval '1 microsecond'`

// reslotJobs gives new slots to leased jobs of one limit, of which each missed its own. It must follow lockLine in the same
// transaction. One that would have to wait takes the slot of another job, which nobody has claimed and whose time has just
// come, and that one gets the new slot: the handlers are slower than the rate, so it would miss its own. A job in quarantine
// keeps its slot, which a claimer knows (claimer.suspended). It returns the ids of the jobs that may start at once, of those that have
// another's slot and may start too, and the microseconds since the transaction began. The others wait for their slots, as if they had not been claimed: their ids, and for how many microseconds.
var reslotJobs = `
with u as materialized (
  select * from unnest($2::bigint[], $3::int[], $4::bigint[]) with ordinality as u(id, claims, holder, n)
),
mine as materialized (
  select j.id, u.n - 1 as i
    from u cross join lateral (select id from onceq.jobs where id = u.id and claims = u.claims and holder = u.holder for no key update) j
),
rate as materialized (
  select x.gap, x.burst, x.kept, greatest(0, ` + debtOf("x") + `) as debt
    from (select s.gap, s.burst, ` + keptOf("s") + ` as kept, c.gap as was, ` + owed + ` as owed
            from ` + limitRow("$1::text", `per::float8 / rate::float8 as gap, burst::float8 as burst`) + ` s
            left join lateral (select * from onceq.limit_rates where lane = $1::text offset 0) c on true
           where s.gap is not null) x
),
paid as (
  insert into onceq.limit_rates (lane, free_at, gap)
  select $1::text, statement_timestamp() + pg_catalog.ceil(debt + gap * (select count(*)::float8 from mine)) * interval '1 microsecond', gap
    from rate
  on conflict (lane) do update set free_at = excluded.free_at, gap = excluded.gap
),
slot as materialized (
  select m.id, coalesce((select greatest(0, pg_catalog.ceil(debt + ((m.i + 1)::float8 - (burst - kept)) * gap)) from rate), 0) as ahead from mine m
),
present as materialized (
  select j.id, row_number() over (order by j.id) as n
    from (select j.id
            from onceq.lane_places p
           cross join lateral (
                 select id from onceq.jobs
                  where id = p.id and leased_until is null and lost = 0 and run_at <= statement_timestamp()
                    and run_at > statement_timestamp() - ` + sqlSlotLate + ` / 2::float8 * interval '1 microsecond' and ` + hasSlot + `
                    for update skip locked) j
           where p.lane = $1::text
           limit (select count(*) from slot where ahead > 0::float8)) j
),
change as materialized (
  select s.id, s.ahead, p.id as other
    from (select id, ahead, row_number() over (order by ahead, id) as n from slot where ahead > 0::float8) s
    left join present p on p.n = s.n
),
later as (
  update onceq.jobs j set run_at = statement_timestamp() + c.ahead * interval '1 microsecond', leased_until = null, holder = null
    from (select coalesce(other, id) as id, ahead from change) c where j.id = any (array[c.id])
  returning 1
)
select array(select id from slot where ahead = 0::float8), array(select id from change where other is not null),
       (extract(epoch from statement_timestamp() - transaction_timestamp()) * 1e6)::bigint,
       array(select id from change where other is null order by id), array(select ahead::bigint from change where other is null order by id)`

// lockLine locks the row that a line belongs to, as promoters do.
var lockLine = `select slot from onceq.lane_locks where slot = ` + laneSlot("$1::text") + ` for update`

// slotted reports whether the job must start at its slot.
func (l *Lease) slotted() bool { return !l.slot.IsZero() }

// tooLate reports whether the job's slot is too long ago for it to start.
func (l *Lease) tooLate() bool { return l.slotted() && time.Since(l.slot) > slotLate+l.q.far.least() }

// distance is how long the messages take that bring slots. What it knows of a slot's time is when its message was sent, so
// where each takes as long as a job may be late, all would be, and none would ever start. One that is slow by itself, as in a
// process that was frozen, counts for nothing.
type distance struct {
	mu   sync.Mutex
	sent time.Time        // the latest message
	took [8]time.Duration // by the latest ones
	n    int              // how many there were
	low  atomic.Int64     // the shortest of them, if that is much of slotLate; else 0
}

// saw records that an answer has come to the message that was sent at this time. It may be called for each lease in it.
func (d *distance) saw(sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if sent.Equal(d.sent) {
		return
	}
	d.sent, d.took[d.n%len(d.took)] = sent, time.Since(sent)
	if d.n++; d.n < len(d.took) {
		return
	}
	low := slices.Min(d.took[:])
	if low < slotLate/2 {
		low = 0
	}
	d.low.Store(int64(low))
}

// least is how much later jobs may start because of it.
func (d *distance) least() time.Duration { return time.Duration(d.low.Load()) }

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
		args, answer := []any{"/" + limit, ids, claims, holders}, []any{&start, &taken, &waited, &back, &ahead}
		citus := q.citus.Load() == citusYes
		if !citus {
			batch := &pgx.Batch{}
			batch.Queue(beginOwn)
			batch.Queue(guardPlans + `, ` + noLimits)
			batch.Queue(q.sql(lockLine), args[0])
			batch.Queue(q.sql(reslotJobs), args...).Query(row(answer...))
			batch.Queue("commit")
			err = db.SendBatch(ctx, batch).Close()
			citus = q.foundCitus(ctx, db, err)
		}
		if citus {
			began, err = q.reslotInParts(ctx, db, args, answer...)
			waited = 0
		}
		if err != nil {
			return now, later, fmt.Errorf("onceq: a new slot: %w", q.told(err))
		}
		q.far.saw(began)
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
	start, _, err := q.reslot(ctx, q.pool, late)
	leases = slices.DeleteFunc(leases, func(l *Lease) bool { return slices.Contains(late, l) && !slices.Contains(start, l) })
	if err != nil && len(leases) > 0 { // these are the caller's; the leases of the others run out
		q.log.WarnContext(ctx, "onceq: jobs that missed their slots got no new ones, and their leases run out", slog.Int("jobs", len(late)-len(start)), slog.Any("error", err))
		return leases, nil
	}
	return leases, err
}

// renew gets new slots for the tasks that missed theirs while they waited for a handler, for all of a limit in one round trip: if
// each asked when its turn came, the others would miss theirs meanwhile. So would those of the first limits if they waited for the
// answers of the others. Those that may start now wait in front of all others. The rest is given back.
func (x *executor) renew(s *slots) {
	for units := s.takeLate(); len(units) > 0; units = s.takeLate() {
		for _, part := range byLimit(units) {
			x.begin(s, s.put(x.renewed(s, part), true))
			if x.stopping.Load() {
				for _, u := range s.takeAll() {
					x.giveBack(u.tasks())
				}
			}
		}
	}
}

// byLimit parts units by the limit of their first jobs. A batch may have jobs of several limits, and waits for all of them.
func byLimit(units []unit) (parts [][]unit) {
	place := make(map[string]int)
	for _, u := range units {
		limit := u.tasks()[0].lease.Limit
		if slices.ContainsFunc(u.tasks(), func(t *task) bool { return t.lease.Limit != limit }) {
			parts = append(parts, []unit{u})
			continue
		}
		i, ok := place[limit]
		if !ok {
			i = len(parts)
			place[limit], parts = i, append(parts, nil)
		}
		parts[i] = append(parts[i], u)
	}
	return parts
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
	answer := x.newSlots(late)
	for _, u := range units {
		var stay, leave []*task
		for _, t := range u.tasks() {
			if answer.starts(t) {
				stay = append(stay, t)
			} else {
				leave = append(leave, t)
			}
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
	if len(answer.later) > 0 {
		x.woken(s.queue)
	}
	return ready
}

// slotAnswer says which jobs start that asked for new slots, and which have been given back until theirs.
type slotAnswer struct {
	x     *executor
	later map[*Lease]bool
	none  map[*Lease]bool // got none, because of an error
}

func (x *executor) newSlots(leases []*Lease) slotAnswer {
	a := slotAnswer{x, make(map[*Lease]bool), make(map[*Lease]bool)}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.base), x.lease)
	defer cancel()
	start, later, err := x.q.reslot(ctx, x.db, leases)
	for _, l := range later {
		a.later[l] = true
	}
	if err == nil {
		return a
	}
	for _, l := range leases {
		a.none[l] = !a.later[l] && !slices.Contains(start, l)
	}
	x.q.log.Warn("onceq: jobs that missed their slots got no new ones, and are given back", slog.Int("jobs", len(leases)-len(start)-len(later)), slog.Any("error", err))
	return a
}

// starts reports whether a task may start, and otherwise ends it.
func (a slotAnswer) starts(t *task) bool {
	switch x := a.x; {
	case a.later[t.lease]:
		x.tasks.mu.Lock()
		x.tasks.forget(t.lease)
		x.tasks.mu.Unlock()
		if t.quarantined() && !t.lease.tooLate() {
			x.suspended(t.lease)
		}
		return false
	case a.none[t.lease]:
		x.end(t, outcome{lease: t.lease, state: StateWaiting})
		return false
	}
	return true
}

// mayRunAlone reports whether a task of a batch may run by itself now. The rate of its limit counts that as another start if
// the batch was called: then it needs a new slot. A task that may not is ended.
func (x *executor) mayRunAlone(t *task, called bool) bool {
	if !t.lease.slotted() || !called && !t.lease.tooLate() {
		return true
	}
	answer := x.newSlots([]*Lease{t.lease})
	if len(answer.later) > 0 {
		defer x.woken(t.lease.Queue)
	}
	return answer.starts(t)
}
