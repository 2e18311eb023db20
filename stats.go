package onceq

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// StatsCap is where Stats stops counting.
const StatsCap = 10_000

// QueueStats says how a queue is doing. Each count stops at StatsCap. A job that was claimed ahead counts as Running only
// when its lease is first extended after its start, a third of WorkerConfig.Lease after the claim. If its handler runs in a
// transaction, it is not counted as Running at all.
type QueueStats struct {
	Queue    string
	Waiting  int // jobs that are due for the first time and that nobody has
	Retrying int // jobs that failed or lost a lease before; due now or later
	Delayed  int // jobs that are not due yet, for the first time
	Leased   int // jobs that somebody has now; if more than StatsCap jobs are due, only those among the first of these
	Running  int // leased jobs except those that a worker has claimed ahead and that wait there for a free handler
	Dead     int
	Held     int

	// Oldest is how long the oldest job that nobody has has been due, by the database's clock.
	Oldest time.Duration

	// Capped says that counting stopped early, so that a count may be too small.
	Capped bool
}

// liveQueues and pastQueues find the names of queues by stepping through an index from one name to the next. No name is
// empty; saying so lets the planner use jobs_claim, a partial index.
const liveQueues = `
live (queue) as (
  (select queue from onceq.jobs where queue >= '' order by queue limit 1)
  union all
  select (select j.queue from onceq.jobs j where j.queue > l.queue order by j.queue limit 1)
    from live l where l.queue is not null
),`

const pastQueues = `
past (queue) as (
  (select queue from onceq.job_history order by queue limit 1)
  union all
  select (select h.queue from onceq.job_history h where h.queue > p.queue order by h.queue limit 1)
    from past p where p.queue is not null
),`

// readStats counts per queue: the queues in $1, or all if it is null. Every count is over a range of an index with a limit
// of one more than the cap. Waiting jobs come after the running ones of their priority, so looking for them passes over the
// running jobs and no more.
const readStats = `
with recursive` + liveQueues + pastQueues + `
names as materialized (
  select unnest($1::text[]) collate "C" as queue
  union
  select queue from (select queue from live union all select queue from past union all select queue from onceq.queues) n
   where $1::text[] is null and queue is not null
)
select n.queue, i.waiting, i.retrying + l.retrying, l.delayed, r.leased, r.running, d.dead, h.held,
       coalesce(extract(epoch from statement_timestamp() - i.oldest) * 1000000, 0)::bigint,
       greatest(i.seen, r.seen, l.seen, d.dead, h.held) > $2::int
  from names n
 cross join lateral (
       select count(*) filter (where fresh) as waiting, count(*) filter (where not fresh) as retrying,
              min(run_at) as oldest, max(n) as seen
         from (select (attempts = 0 and lost = 0 and leased_until is null) as fresh, j.run_at, j.n
                 from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                cross join lateral (
                      select attempts, lost, leased_until, run_at, row_number() over (order by run_at, id) as n
                        from onceq.jobs
                       where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
                         and (leased_until is null or leased_until <= statement_timestamp())
                       order by run_at, id
                       limit $2::int + 1) j) x) i
 cross join lateral (
       select count(*) filter (where leased_until > statement_timestamp()) as leased,
              count(*) filter (where leased_until > statement_timestamp() and ahead is null) as running, max(n) as seen
         from (select j.leased_until, j.ahead, j.n
                 from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                cross join lateral (
                      select leased_until, ahead, row_number() over (order by run_at, id) as n
                        from onceq.jobs
                       where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
                       order by run_at, id
                       limit $2::int + 1) j) x) r
 cross join lateral (
       select count(*) filter (where fresh) as delayed, count(*) filter (where not fresh) as retrying, max(n) as seen
         from (select j.fresh, j.n
                 from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                cross join lateral (
                      select (attempts = 0 and lost = 0 and leased_until is null) as fresh,
                             row_number() over (order by run_at, id) as n
                        from onceq.jobs
                       where queue = n.queue and priority = p.priority and run_at > statement_timestamp()
                       order by run_at, id
                       limit $2::int + 1) j) x) l
 cross join lateral (
       select count(*) as dead
         from (select from onceq.job_history where queue = n.queue and state = ` + sqlJobDead + ` order by id limit $2::int + 1) x) d
 cross join lateral (
       select count(*) as held
         from (select from onceq.job_history where queue = n.queue and state = ` + sqlJobHeld + ` order by id limit $2::int + 1) x) h
 order by n.queue`

// Stats returns the figures of the named queues, or of every queue that has jobs, a history or workers, sorted by name.
// However many rows there are, it takes at most some ten to twenty milliseconds a queue, because it stops counting at
// StatsCap. It runs on the pool, with its own planner settings, because with stale statistics the planner would read whole
// ranges and sort them.
func (q *Queue) Stats(ctx context.Context, queues ...string) ([]QueueStats, error) {
	for _, name := range queues {
		if err := checkText("queues", name); err != nil {
			return nil, err
		}
	}
	var all []QueueStats
	err := q.send(ctx, q.pool, reading, readStats, []any{queues, StatsCap}, each(func(rows pgx.Rows) error {
		var s QueueStats
		var oldest int64
		if err := rows.Scan(&s.Queue, &s.Waiting, &s.Retrying, &s.Delayed, &s.Leased, &s.Running, &s.Dead, &s.Held, &oldest, &s.Capped); err != nil {
			return err
		}
		s.Oldest = time.Duration(oldest) * time.Microsecond
		for _, n := range []*int{&s.Waiting, &s.Retrying, &s.Delayed, &s.Leased, &s.Running, &s.Dead, &s.Held} {
			*n = min(*n, StatsCap)
		}
		all = append(all, s)
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("onceq: stats: %w", err)
	}
	return all, nil
}
