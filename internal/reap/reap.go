// Package reap removes what nobody needs any more, in passes: see onceq.Reaper. It imports pg and table.
package reap

import (
	"context"
	"fmt"
	"time"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// Reaper makes passes over the tables of a schema.
type Reaper struct {
	Store     *pg.Store
	Batch     int           // rows that a statement removes at most
	Grace     time.Duration // so long the fence of a finished key stays after the key has become free
	Cancelled time.Duration // so much longer a cancelled job stays that has an effect of unknown outcome
}

// Reaped counts what one pass did: see onceq.Reaped.
type Reaped struct {
	Fences, Effects, History, Cancels, Waiters, Workers, Counts, Awaits, Members, Unknown, Missing int
}

func (r *Reaped) add(o Reaped) {
	r.Fences += o.Fences
	r.Effects += o.Effects
	r.Cancels += o.Cancels
	r.Waiters += o.Waiters
	r.Workers += o.Workers
	r.Counts += o.Counts
	r.Unknown += o.Unknown
	r.Missing += o.Missing
}

// What a Reaper keeps, and reads at once.
const (
	hoursKept  = 31 * 24 * time.Hour // then it removes the counts of an hour
	fencePages = 200                 // pages of some 50 fences that a statement reads
)

// Fences is what the Reaper remembers of job_fences at the beginning of a pass: its pages, and how many rows
// were ever inserted.
type Fences struct{ pages, inserted int64 }

// ReadFences reads them.
const ReadFences = `
select pg_catalog.pg_relation_size('onceq.job_fences'::regclass) / pg_catalog.current_setting('block_size')::bigint,
       pg_catalog.pg_stat_get_tuples_inserted('onceq.job_fences'::regclass)`

func (r *Reaper) fenceTable(ctx context.Context) (t Fences, err error) {
	err = r.run(ctx, ReadFences, nil, &t.pages, &t.inserted)
	return t, err
}

// Grown reports whether so many keys have come since the last pass that another one is worth its time: five
// for each page, a tenth of what a page holds. Without this, keys that are free soon would pile up while the
// Reaper rests from looking at others. After an error the next pass says what is wrong.
func (r *Reaper) Grown(ctx context.Context, last Fences) bool {
	now, err := r.fenceTable(ctx)
	return err != nil || now.inserted < last.inserted || now.inserted-last.inserted >= 5*last.pages
}

// Pass makes one full pass, in statements of at most Batch rows, each of which commits on its own. The counts
// are right even if it returns an error. It also returns what job_fences was when it began, and how long it
// took to look at rows that stay.
func (r *Reaper) Pass(ctx context.Context) (sum Reaped, keys Fences, looked time.Duration, err error) {
	if keys, err = r.fenceTable(ctx); err == nil {
		looked, err = r.fences(ctx, keys.pages, &sum)
	}
	for n, stay := r.Batch, 0; err == nil && n+stay == r.Batch; sum.History += n {
		n, stay = 0, 0
		err = r.run(ctx, RemoveHistory, []any{r.Batch, r.Cancelled.Milliseconds()}, &n, &stay)
	}
	for most := r.Batch; err == nil && most == r.Batch; {
		var n Reaped
		args := []any{r.Batch, r.Grace.Milliseconds(), max(r.Grace, 3*table.PresentEvery).Milliseconds(),
			table.CountsKept.Milliseconds(), hoursKept.Milliseconds()}
		err = r.run(ctx, removeRest, args, &n.Waiters, &n.Workers, &n.Counts, &n.Cancels)
		sum.add(n)
		most = max(n.Waiters, n.Workers, n.Counts, n.Cancels)
	}
	for _, walk := range []func(context.Context, *Reaped) (time.Duration, error){r.awaits, r.members, r.mend} {
		if err == nil {
			var more time.Duration
			more, err = walk(ctx, &sum)
			looked += more
		}
	}
	return sum, keys, looked, err
}

// run runs a statement in a transaction of its own and scans its one row. A connection that the network has
// lost does not keep the Reaper for as long as the operating system believes in it.
func (r *Reaper) run(ctx context.Context, statement string, args []any, dest ...any) error {
	ctx, cancel := context.WithTimeout(ctx, pg.SessionLimit)
	defer cancel()
	return r.Store.Send(ctx, r.Store.Pool, pg.Rare, statement, args, pg.Row(dest...))
}

// Every statement below locks what it changes in a subquery, skips what others have locked, and repeats its
// condition outside: a fence that was made permanent, or taken over, between the statement's snapshot and its
// lock must stay. The outer scan by ctid also sees only rows that have not changed since the snapshot.

// fences walks job_fences in physical order, by ranges of ctid. No index finds what has to be removed,
// because every keyed job would pay for it. On PostgreSQL 18, 100,000 keys taken and completed, best of
// three:
//
//	index of job_fences on   taking, s   WAL, MB   completing, s   WAL, MB
//	nothing                 0.65      30.9              3.01      26.4
//	created_at              0.71      37.5              3.17      32.3
//	finished_at             0.74      37.3              3.45      36.8
//
// A pass over a million fences that stay takes 0.6 s. fences returns how long looking took: the time of the
// statements for orphans that found none, and as much again for the statements before them, which have looked
// at the same rows.
func (r *Reaper) fences(ctx context.Context, pages int64, sum *Reaped) (looked time.Duration, err error) {
	for from := int64(0); from < pages; from += fencePages {
		low, high := fmt.Sprintf("(%d,0)", from), fmt.Sprintf("(%d,0)", from+fencePages)
		for {
			var n Reaped
			now, past, err := r.now(ctx)
			if err == nil {
				args := []any{low, high, r.Batch, past, table.UnknownFor.Milliseconds(), table.NotedEvery.Milliseconds(), now}
				err = r.run(ctx, removeFences, args, &n.Fences, &n.Effects, &n.Unknown)
			}
			if err != nil {
				return looked, err
			}
			sum.add(n)
			if n.Fences+n.Effects+n.Unknown < r.Batch {
				break
			}
		}
		for {
			var n Reaped
			var marked int
			now, past, err := r.now(ctx)
			began := time.Now()
			if err == nil {
				err = r.run(ctx, NoteOrphans, []any{low, high, r.Batch, past, now}, &marked, &n.Missing)
			}
			if err != nil {
				return looked, err
			}
			sum.add(n)
			if marked+n.Missing == 0 {
				looked += 2 * time.Since(began)
			}
			if marked+n.Missing < r.Batch {
				break
			}
		}
	}
	return looked, nil
}

// now is the database's time, and the grace time before it. It is an argument of what changes fences: Citus
// allows no function of it there.
func (r *Reaper) now(ctx context.Context) (now, past time.Time, err error) {
	err = r.run(ctx, table.AskTime, nil, &now)
	return now, now.Add(-r.Grace), err
}

// removeFences removes, within a range of pages, fences that have been free for the grace time, and clients'
// keys whose outcome is unknown and that nobody asks for. It returns three counts: of other fences, of
// effects, and of such keys. An effect's fence has a finished_at only when its job can never run again.
const removeFences = `
with d as materialized (
  select f.ctid from onceq.job_fences f
   where f.ctid >= $1::text::tid and f.ctid < $2::text::tid and ` + fencePast + `
   limit $3::int
     for update skip locked
),
gone as (
  delete from onceq.job_fences f
   where f.ctid = any (array (select ctid from d))
  returning f.class, f.state
)
select count(*) filter (where class <> ` + table.OfEffect + ` and ` + table.FenceOver + `), count(*) filter (where class = ` + table.OfEffect + `),
       count(*) filter (where class <> ` + table.OfEffect + ` and not ` + table.FenceOver + `) from gone f`

const fencePast = `((` + table.FenceOver + ` or f.class = ` + table.OfEffect + `) and f.lifetime >= 0
     and pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= $4::timestamptz
      or f.class = ` + table.OfRequest + ` and ` + table.FenceUnknown + ` and f.lifetime >= 0
     and pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.leased_until) + (greatest(f.lifetime, $5::bigint) + $6::bigint)::float8 * interval '1 millisecond') <= $7::timestamptz)`

// NoteOrphans handles the fences, within a range of pages, whose job is neither live nor in a part of the
// history from which it can be redriven. For an effect, also one of an earlier round, the window begins now.
// For a queued key, the time is noted, and after the grace time the key is cancelled, and stays taken for its
// window: the job may have run. It returns the counts of rows noted and of keys cancelled.
var NoteOrphans = `
with d as materialized (
  select f.ctid from onceq.job_fences f
   where f.ctid >= $1::text::tid and f.ctid < $2::text::tid and ` + fenceOrphan + `
     and not exists (select from onceq.jobs j where j.id = f.job_id and (f.class = ` + table.OfJob + ` or ` + table.OfRound("j") + `))
     and not exists (select from onceq.job_waits w where w.id = f.job_id and (f.class = ` + table.OfJob + ` or ` + table.OfRound("w") + `))
     and not exists (select from onceq.job_history h where h.id = f.job_id and h.state in (` + table.JobDead + `, ` + table.JobCancelled + `, ` + table.JobHeld + `) and (f.class = ` + table.OfJob + ` or ` + table.OfRound("h") + `))
   limit $3::int
     for update of f skip locked
),
noted as (
  update onceq.job_fences f
     set state = case when f.finished_at is null then f.state else ` + table.Cancelled + ` end, finished_at = $5::timestamptz,
         token = case when f.finished_at is null then f.token else f.token | 1::bigint end
   where f.ctid = any (array (select ctid from d)) and ` + fenceOrphan + `
  returning f.state
)
select count(*) filter (where state <> ` + table.Cancelled + `), count(*) filter (where state = ` + table.Cancelled + `) from noted`

const fenceOrphan = `f.job_id is not null and (
           f.class = ` + table.OfEffect + ` and f.finished_at is null
           and (f.state in (` + table.Uncertain + `, ` + table.Completed + `, ` + table.Held + `) or f.state = ` + table.Claimed + ` and f.leased_until <= $5::timestamptz)
        or f.class = ` + table.OfJob + ` and f.state = ` + table.Queued + `
           and coalesce(f.finished_at <= $4::timestamptz, true))`

// RemoveHistory removes history that has been kept long enough. Dead and held jobs have no keep_until. A
// cancelled job stays for another 24 hours as long as the outcome of one of its effects is unknown:
// otherwise nobody would find that effect.
var RemoveHistory = `
with d as materialized (
  select h.ctid as place, h.state = ` + table.JobCancelled + ` and exists (
           select from onceq.job_fences f
            where ` + table.EffectsOf("h") + ` and ` + table.OfRound("h") + ` and ` + table.FenceUnknown + `) as open
    from onceq.job_history h
   where keep_until <= statement_timestamp()
   order by keep_until
   limit $1::int
     for update of h skip locked
),
stays as (
  update onceq.job_history
     set keep_until = statement_timestamp() + $2::bigint::float8 * interval '1 millisecond'
   where ctid = any (array (select place from d where open)) and keep_until <= statement_timestamp()
  returning id
),
gone as (
  delete from onceq.job_history
   where ctid = any (array (select place from d where not open)) and keep_until <= statement_timestamp()
  returning id
)
select (select count(*) from gone), (select count(*) from stays)`

// awaits removes what jobs waited for that are neither live nor in a part of the history from which they can
// be redriven, and what others waited for in earlier rounds. It walks the rows by the jobs' ids, and returns
// how long it took to look at rows that stay.
func (r *Reaper) awaits(ctx context.Context, sum *Reaped) (looked time.Duration, err error) {
	for after, rows := int64(0), r.Batch; rows == r.Batch; {
		began := time.Now()
		var n int
		var last *int64
		if err := r.run(ctx, RemoveAwaits, []any{after, r.Batch}, &n, &rows, &last); err != nil {
			return looked, err
		}
		if sum.Awaits += n; n == 0 {
			looked += time.Since(began)
		}
		after = table.OrZero(last)
	}
	return looked, nil
}

// RemoveAwaits looks at as many rows as the batch says, and removes all of a job that is gone, and those of a
// job's earlier rounds. A row whose job is not visible yet does not exist: it is written while the job runs.
// The transaction of an Emit has the rows locked that it wrote. A later round may take over a row meanwhile.
var RemoveAwaits = `
with page as materialized (
  select a.job_id from onceq.job_awaits a where a.job_id > $1::bigint order by a.job_id limit $2::int
),
round as materialized (
  select p.job_id, coalesce(least((select ` + table.IdentityOf("j") + ` from onceq.jobs j where j.id = p.job_id),
                                  (select ` + table.IdentityOf("w") + ` from onceq.job_waits w where w.id = p.job_id),
                                  (select ` + table.IdentityOf("h") + ` from onceq.job_history h where h.id = p.job_id and h.state <> ` + table.JobCompleted + `)),
                            9223372036854775807) as earliest
    from (select distinct job_id from page) p
),
d as materialized (
  select a.place
    from round r cross join lateral (
         select ctid as place from onceq.job_awaits where job_id = r.job_id and identity < r.earliest for update skip locked) a
),
gone as (
  delete from onceq.job_awaits where ctid = any (array (select place from d))
  returning 1
)
select (select count(*) from gone), (select count(*) from page), (select pg_catalog.max(job_id) from page)`

// members walks the groups in job_members, a page at a time, and removes those whose waiting job is gone. It
// returns how long it took to look at groups that stay.
func (r *Reaper) members(ctx context.Context, sum *Reaped) (looked time.Duration, err error) {
	for after := int64(0); ; {
		var n, groups int
		var last *int64
		began := time.Now()
		if err := r.run(ctx, removeMembers, []any{after, r.Batch}, &n, &groups, &last); err != nil {
			return looked, err
		}
		switch sum.Members += n; {
		case n == r.Batch:
			continue // there may be more of the same groups
		case n == 0:
			looked += time.Since(began)
		}
		if groups < r.Batch {
			return looked, nil
		}
		after = table.OrZero(last)
	}
}

// removeMembers looks at as many groups as the batch says, and steps through the primary key from one to the
// next. A group whose waiting job is not visible yet does not exist: they are committed together.
const removeMembers = `
with recursive page (id, n) as (
  (select group_id, 1 from onceq.job_members where group_id > $1::bigint order by group_id limit 1)
  union all
  select (select m.group_id from onceq.job_members m where m.group_id > p.id order by m.group_id limit 1), p.n + 1
    from page p where p.id is not null and p.n < $2::int
),
lost as materialized (
  select p.id from page p
   where p.id is not null
     and not exists (select from onceq.jobs j where j.id = p.id)
     and not exists (select from onceq.job_waits w where w.id = p.id)
     and not exists (select from onceq.job_history h where h.id = p.id)
),
d as materialized (
  select m.group_id, m.job_id
    from lost l cross join lateral (
         select group_id, job_id from onceq.job_members where group_id = l.id limit $2::int for update skip locked) m
   limit $2::int
),
gone as (
  delete from onceq.job_members m using d
   where m.group_id = any (array[d.group_id]) and m.job_id = d.job_id
  returning 1
)
select (select count(*) from gone), (select pg_catalog.count(id) from page), (select pg_catalog.max(id) from page)`

// CallLines calls lanes, limits and groups.
const CallLines = `select 1 from onceq.call($1::text[], $2::timestamptz) f`

// mend lets go on what waits for rows that somebody deleted by hand: members that are gone count as
// cancelled, what is gone stops no lane, and what has nothing in its way gets a call. It returns how long it
// took.
func (r *Reaper) mend(ctx context.Context, _ *Reaped) (looked time.Duration, err error) {
	began := time.Now()
	var last [2]int64
	for read := r.Batch; err == nil && read == r.Batch; {
		err = r.run(ctx, ForgetMembers, []any{last[0], last[1], r.Batch}, &read, &last[0], &last[1])
	}
	if err == nil {
		err = r.Store.Send(ctx, r.Store.Pool, pg.Rare, forgetStops, nil, pg.NoRows)
	}
	for read, after := r.Batch, ""; err == nil && read == r.Batch; {
		var lines []string
		var now time.Time
		err = r.run(ctx, FindIdle, []any{after, r.Batch}, &lines, &read, &after, &now)
		if err == nil && len(lines) > 0 {
			err = r.Store.Send(ctx, r.Store.Pool, pg.Rare, CallLines, []any{lines, now}, pg.NoRows)
		}
	}
	return time.Since(began), err
}

// ForgetMembers looks at $3 members after the member $2 of the group $1, and sets those to cancelled whose
// jobs are in no table. It returns how many members it has read, and the last of them. A job moves from one
// table to another in one commit, so that it is in one of them in every snapshot. Nobody else changes
// members whose jobs are gone.
var ForgetMembers = `
with page as materialized (
  select group_id, job_id, state, told from onceq.job_members
   where (group_id, job_id) > ($1::bigint, $2::bigint)
   order by group_id, job_id
   limit $3::int
),
gone as (
  update onceq.job_members m set state = ` + table.JobCancelled + `
    from (select p.group_id, p.job_id from page p
           where p.told and p.state in (0, ` + table.JobDead + `, ` + table.JobHeld + `)
             and not exists (select from onceq.jobs j where j.id = p.job_id offset 0)
             and not exists (select from onceq.job_waits o where o.id = p.job_id offset 0)
             and not exists (select from onceq.job_history h where h.id = p.job_id offset 0)
             and exists (select from onceq.job_waits w where w.id = p.group_id and ` + table.IsFollowLine("w.lane") + ` offset 0)
          offset 0) g
   where m.group_id = any (array[g.group_id]) and m.job_id = g.job_id
     and m.told and m.state + 0 in (0, ` + table.JobDead + `, ` + table.JobHeld + `)
)
select count(*), coalesce(pg_catalog.max(group_id), 0),
       coalesce((pg_catalog.array_agg(job_id order by group_id desc, job_id desc))[1], 0) from page`

// forgetStops removes what says that jobs stop their lanes that are not in the history. Nobody else changes
// these rows.
const forgetStops = `
delete from onceq.lane_stops s
 where not exists (select from onceq.job_history h where h.id = s.id offset 0)`

// FindIdle looks at the first $2 lines after $1 in which jobs wait. It returns those in which one has
// nothing in its way, how many it has looked at, and the last of them. Whatever may let a line go on leaves
// a call, or lets it go on itself, in the same commit. So these are few: some of the last seconds, limits
// that wait for a slot, and where rows were deleted by hand. Another call does no harm. Where promoters are
// behind with a slot, its lines are left out.
var FindIdle = `
with recursive behind as materialized (
  select s.slot from pg_catalog.generate_series(0, 15) as s(slot)
   where exists (select from onceq.lane_calls
                  where slot = s.slot::smallint and due <= statement_timestamp() - interval '10 seconds' offset 0)
),
line (lane, n) as (
  (select lane, 1 from onceq.job_waits where lane > $1::text order by lane limit 1)
  union all
  select (select w.lane from onceq.job_waits w where w.lane > l.lane order by w.lane limit 1), l.n + 1
    from line l where l.lane is not null and l.n < $2::int
)
select array(
       select l.lane from line l
        where l.lane is not null and ` + table.LaneSlot("l.lane") + ` <> all (array(select slot from behind)::smallint[])
          and case when ` + table.IsFollowLine("l.lane") + ` then exists (
                select from onceq.job_waits w
                 where w.lane = l.lane and not ` + table.IsOpen("w.id") + ` and not exists (
                       select from onceq.job_members m where m.group_id = w.id and (` + table.IsStuck + `) offset 0) offset 0)
              else not exists (select from ` + table.StopsOf("l.lane") + ` offset 0) and ` + table.AnyDue("l.lane") + `
               and ` + table.LimitOf("l.lane") + ` > (select n from ` + table.LiveCount("l.lane", table.LimitOf("l.lane")) + ` c) end),
       pg_catalog.count(lane), coalesce(pg_catalog.max(lane), ''), statement_timestamp()
  from line`

// removeRest removes the announcements of workers that have been away for the grace time, sets of queues that
// no worker serves any more, what says that a worker was woken that is not there, where claims of backlogs
// ended that long ago, and what is known of limits with a rate that have rested: the next job of one is as
// good as its first. It also removes the rows of workers that have not written them for $3, what workers
// counted before $4, or by the hour before $5, and requests to cancel jobs that are gone.
// #nosec G101 -- a statement, not a credential
const removeRest = `
with d as materialized (
  select ctid from onceq.waiters
   where idle_until <= statement_timestamp() - $2::bigint::float8 * interval '1 millisecond'
   limit $1::int
     for update skip locked
),
gone as (
  delete from onceq.waiters
   where ctid = any (array (select ctid from d))
     and idle_until <= statement_timestamp() - $2::bigint::float8 * interval '1 millisecond'
  returning worker
),
sets as (
  delete from onceq.waiter_queues
   where ctid = any (array (
         select s.ctid from onceq.waiter_queues s
          where not exists (select from onceq.waiters w where w.serves = s.serves) for update of s skip locked))
),
wakes as (
  delete from onceq.wakes
   where ctid = any (array (
         select x.ctid from onceq.wakes x
          where not exists (select from onceq.waiters w where w.worker = x.worker and w.round <= x.round) for update of x skip locked))
),
turns as (
  delete from onceq.turns
   where ctid = any (array (
         select ctid from onceq.turns where at <= statement_timestamp() - $2::bigint::float8 * interval '1 millisecond' for update skip locked))
),
pauses as (
  delete from onceq.pauses where until <= statement_timestamp()
),
rates as (
  delete from onceq.limit_rates
   where ctid = any (array (
         select ctid from onceq.limit_rates where free_at <= statement_timestamp() - interval '1 minute' for update skip locked))
),
workers as (
  delete from onceq.workers
   where ctid = any (array (
         select ctid from onceq.workers where seen_at <= statement_timestamp() - $3::bigint::float8 * interval '1 millisecond' limit $1::int for update skip locked))
  returning 1
),
counts as (
  delete from onceq.job_counts
   where ctid = any (array (
         select c.place
           from (values (1, $4::bigint), (10, $4::bigint), (60, $5::bigint)) s (span, kept)
          cross join lateral (
                select ctid as place from onceq.job_counts
                 where span = s.span
                   and minute <= statement_timestamp() - s.kept::float8 * interval '1 millisecond'
                 order by minute limit $1::int for update skip locked) c
          limit $1::int))
  returning 1
),
cancels as (
  delete from onceq.job_cancels
   where ctid = any (array (
         select x.ctid from onceq.job_cancels x
          where not exists (select from onceq.jobs j where j.id = x.job_id and j.created_at <= x.requested_at)
            and not exists (select from onceq.job_waits w where w.id = x.job_id and w.created_at <= x.requested_at)
          limit $1::int for update of x skip locked))
  returning 1
)
select (select count(*) from gone), (select count(*) from workers), (select count(*) from counts), (select count(*) from cancels)`
