package onceqops

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// StatsCap is where Stats stops counting.
const StatsCap = 1_000

// QueueStats says how a queue is doing. Each count stops at StatsCap. A job that was claimed ahead counts as Running only
// when its lease is first extended after its start, a third of WorkerConfig.Lease after the claim. If its handler runs in a
// transaction, it is not counted as Running at all.
type QueueStats struct {
	Queue    string
	Waiting  int // jobs that are due for the first time and that nobody has
	Retrying int // jobs that failed or lost a lease before; due now or later
	Delayed  int // jobs that are not due yet, for the first time
	Leased   int // jobs that somebody has now
	Running  int // leased jobs except those that a worker has claimed ahead and that wait there for a free handler
	Dead     int
	Held     int
	Blocked  int // jobs that wait for their lane, their limit or other jobs; the other counts of unfinished jobs do not contain them

	// For how long the oldest job that waits for its lane, for its limit and for other jobs has been due, by the database's
	// clock; 0 for none. Of the blocked jobs the 1,001 with the lowest ids are looked at.
	OldestInLane, OldestInLimit, OldestAfter time.Duration

	Paused time.Time // since when the queue itself has been paused (PauseQueue). A kind that is paused does not show here: Pauses lists it

	// Oldest is how long the oldest job that nobody has has been due, by the database's clock. It may be too short if
	// 10,000 jobs of one priority are leased.
	Oldest time.Duration

	// More says that there are jobs that were not looked at, so that each of Waiting, Retrying, Delayed, Leased and Running
	// says "at least". Of the due jobs of each priority, the first 500 and the last 500 are looked at, because leased jobs are
	// mostly the first. Of the jobs that are due later, the first 1,000 are looked at.
	More bool

	// Capped says that some count of the queue may be too small: More, or one of them stopped at StatsCap.
	Capped bool
}

const waitingQueues = `
waits (queue) as (
  (select queue from onceq.job_waits where queue >= '' order by queue limit 1)
  union all
  select (select w.queue from onceq.job_waits w where w.queue > l.queue order by w.queue limit 1)
    from waits l where l.queue is not null
),`

// readStats counts per queue: the queues in $1, or all if it is null; $2 is StatsCap. Every count is over a range of an index
// with a limit. The rows of live jobs have to be read, because no index says who has a job, so it looks at both ends of the
// due jobs of each priority: the half of the cap from the first, and one more than that from the last. The ends meet if there
// are not more due jobs than the cap. Of the jobs that are due later, the next
// ones of the three priorities are merged by their time, so that mostly no more than the cap are read.
const readStats = `
with recursive` + table.LiveQueues + waitingQueues + pastQueues + `
names as materialized (
  select pg_catalog.unnest($1::text[]) collate "C" as queue
  union
  select queue from (select queue from live union all select queue from waits union all select queue from past union all select queue from onceq.queues
                      union all select name from onceq.pauses where what = 'queue' and ` + table.InForce + `) n
   where $1::text[] is null and queue is not null
)
select n.queue, i.waiting, i.retrying + l.retrying, l.delayed, i.leased, i.running, d.dead, h.held, w.blocked,
       coalesce(extract(epoch from statement_timestamp() - least(o.oldest, i.oldest)) * 1e6, 0)::bigint,
       coalesce(greatest(i.seen, l.seen) > $2::int, false),
       (select p.paused_at from onceq.pauses p where p.what = 'queue' and p.name = n.queue and ` + table.InForce + `),
       w.in_lane, w.in_limit, w.after_others
  from names n
 cross join lateral (
       select pg_catalog.sum(x.waiting)::bigint as waiting, pg_catalog.sum(x.retrying)::bigint as retrying, pg_catalog.sum(x.leased)::bigint as leased, pg_catalog.sum(x.running)::bigint as running,
              pg_catalog.min(x.oldest) as oldest, pg_catalog.max(x.seen) as seen
         from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
        cross join lateral (
              select count(*) filter (where j.free and j.fresh) as waiting, count(*) filter (where j.free and not j.fresh) as retrying,
                     count(*) filter (where not j.free) as leased, count(*) filter (where not j.free and j.ahead is null) as running,
                     pg_catalog.min(j.due_at) filter (where j.free) as oldest, count(*) as seen
                from ((select id, coalesce(due_at, run_at) as due_at, ahead, leased_until is null or leased_until <= statement_timestamp() as free,
                              attempts = 0 and lost = 0 and leased_until is null as fresh
                         from onceq.jobs
                        where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
                        order by run_at, id
                        limit $2::int / 2)
                      union
                      (select id, coalesce(due_at, run_at) as due_at, ahead, leased_until is null or leased_until <= statement_timestamp() as free,
                              attempts = 0 and lost = 0 and leased_until is null as fresh
                         from onceq.jobs
                        where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
                        order by run_at desc, id desc
                        limit $2::int / 2 + 1)) j) x) i
 cross join lateral (
       select pg_catalog.min(f.due_at) as oldest -- the first job of each priority that nobody has; leased ones stand before it
         from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
        cross join lateral (
              select j.due_at
                from (select coalesce(due_at, run_at) as due_at, leased_until
                        from onceq.jobs
                       where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
                       order by run_at, id
                       limit 10000) j
               where j.leased_until is null or j.leased_until <= statement_timestamp()
               limit 1) f) o
 cross join lateral (
       select count(*) filter (where fresh) as delayed, count(*) filter (where not fresh) as retrying, count(*) as seen
         from ((select id, run_at, attempts = 0 and lost = 0 and leased_until is null as fresh
                  from onceq.jobs
                 where queue = n.queue and priority = -1 and run_at > statement_timestamp()
                 order by run_at, id
                 limit $2::int + 1)
               union all
               (select id, run_at, attempts = 0 and lost = 0 and leased_until is null as fresh
                  from onceq.jobs
                 where queue = n.queue and priority = 0 and run_at > statement_timestamp()
                 order by run_at, id
                 limit $2::int + 1)
               union all
               (select id, run_at, attempts = 0 and lost = 0 and leased_until is null as fresh
                  from onceq.jobs
                 where queue = n.queue and priority = 1 and run_at > statement_timestamp()
                 order by run_at, id
                 limit $2::int + 1)
               order by run_at, id
               limit $2::int + 1) x) l
 cross join lateral (
       select count(*) as dead
         from (select from onceq.job_history where queue = n.queue and state = ` + table.JobDead + ` order by id limit $2::int + 1) x) d
 cross join lateral (
       select count(*) as held
         from (select from onceq.job_history where queue = n.queue and state = ` + table.JobHeld + ` order by id limit $2::int + 1) x) h
 cross join lateral (
       select count(*) as blocked, coalesce(pg_catalog.max(due) filter (where of = ''), 0) as in_lane, coalesce(pg_catalog.max(due) filter (where of = '/'), 0) as in_limit,
              coalesce(pg_catalog.max(due) filter (where of = pg_catalog.chr(31)), 0) as after_others
         from (select case when pg_catalog.starts_with(lane, ` + table.Sep + `) then pg_catalog.chr(31) when lane like '/%' then '/' else '' end as of,
                      (extract(epoch from statement_timestamp() - coalesce(due_at, run_at)) * 1e6)::bigint as due
                 from onceq.job_waits where queue = n.queue order by id limit $2::int + 1) x) w
 order by n.queue`

// Stats returns the figures of the named queues, or of every queue that has jobs, a history or workers, sorted by name.
// However many jobs there are, it reads of a queue some 1,000 rows of each priority that has due jobs, and some 1,000 of the
// delayed ones, besides leased ones at the front, because it stops counting at StatsCap: some milliseconds a queue. It runs on
// the pool, with its own planner settings, because with stale statistics the planner would read whole ranges and sort them.
func (q *Ops) Stats(ctx context.Context, queues ...string) ([]QueueStats, error) {
	for _, name := range queues {
		if err := checkText("queues", name); err != nil {
			return nil, err
		}
	}
	return readAll(ctx, q, q.store.Pool, pg.Reading, "stats", readStats, []any{queues, StatsCap}, (*QueueStats).scan)
}

func (s *QueueStats) scan(rows pgx.Rows) error {
	var oldest, inLane, inLimit, after int64
	var paused *time.Time
	err := rows.Scan(&s.Queue, &s.Waiting, &s.Retrying, &s.Delayed, &s.Leased, &s.Running, &s.Dead, &s.Held, &s.Blocked, &oldest,
		&s.More, &paused, &inLane, &inLimit, &after)
	age := func(micros int64) time.Duration { return max(0, time.Duration(micros)*time.Microsecond) } // less than 0: not due yet
	s.OldestInLane, s.OldestInLimit, s.OldestAfter = age(inLane), age(inLimit), age(after)
	s.Oldest, s.Paused, s.Capped = time.Duration(oldest)*time.Microsecond, table.OrZero(paused), s.More
	for _, n := range []*int{&s.Waiting, &s.Retrying, &s.Delayed, &s.Leased, &s.Running, &s.Dead, &s.Held, &s.Blocked} {
		if *n > StatsCap {
			*n, s.Capped = StatsCap, true
		}
	}
	return err
}
