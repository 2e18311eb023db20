package onceqops

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/table"
)

// What Health says of queues, and of those who work them.

// queues looks for jobs that have been due for long and that nobody has, and says why nobody may have them.
func (x *examination) queues(ctx context.Context) error {
	var err error
	if len(x.stats) == 0 {
		if x.stats, err = x.q.Stats(ctx); err != nil {
			return err
		}
	}
	if x.workers, err = x.q.Workers(ctx, x.q.store.Pool); err != nil {
		return err
	}
	pauses, err := x.q.Pauses(ctx, x.q.store.Pool)
	if err != nil {
		return err
	}
	x.workers = slices.DeleteFunc(x.workers, func(w WorkerInfo) bool { return w.Stale })
	kindPaused := slices.ContainsFunc(pauses, func(p onceq.Pause) bool { return p.Kind != "" })
	var look []string // whose jobs are looked at
	waits := func(s QueueStats) bool { return s.Oldest > x.limits.waiting && s.Paused.IsZero() }
	for _, s := range x.stats {
		if waits(s) || s.Retrying > 0 {
			look = append(look, s.Queue)
		}
	}
	if len(look) == 0 {
		return nil
	}
	heads, err := x.jobs(ctx, look, pauses)
	if err != nil {
		return err
	}
	for _, s := range x.stats {
		if waits(s) && !heads[s.Queue].told() {
			if s.Leased == 0 && len(x.serving(s.Queue)) > 0 {
				n, err := x.inTransactions(ctx, s.Queue)
				if err != nil {
					return err
				}
				s.Leased, s.Retrying = n, max(0, s.Retrying-n)
			}
			if x.drained == nil {
				if err := x.drains(ctx); err != nil {
					return err
				}
			}
			x.waiting(s, kindPaused)
		}
	}
	return nil
}

// drains reads how many jobs of each queue have ended in the last minutes.
func (x *examination) drains(ctx context.Context) error {
	counts, err := x.q.Counts(ctx, x.q.store.Pool, CountFilter{Minutes: drainedIn})
	x.drained = make(map[string]int)
	for _, c := range counts {
		all := c.Last(drainedIn)
		x.drained[c.Queue] = all.Completed + all.Dead
	}
	return err
}

// drain says at which rate a queue drains, and how long that takes.
func (x *examination) drain(s QueueStats) string {
	ended, plus := x.drained[s.Queue], ""
	if ended == 0 {
		return fmt.Sprintf("; none has ended in the last %d minutes", drainedIn)
	}
	if s.More {
		plus = "at least "
	}
	wait := time.Duration(s.Waiting+s.Retrying+s.Leased) * drainedIn * time.Minute / time.Duration(ended)
	return fmt.Sprintf("; %.3g a minute have ended in the last %d minutes, so without new jobs it is empty in %s%s",
		float64(ended)/drainedIn, drainedIn, plus, max(time.Second, wait.Round(time.Second)))
}

// readInTransactions counts, among the first $2 due jobs of each priority, those whose leases have run out while their handlers'
// transactions go on.
const readInTransactions = `
select count(*)
  from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select leased_until, xmax from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $2::int) j
 where ` + lockedRow + `(array(` + lockers + `))`

// inTransactions counts the jobs of a queue that run, although nobody has extended their leases.
func (x *examination) inTransactions(ctx context.Context, queue string) (n int, err error) {
	if citus, err := x.q.store.OnCitus(ctx, x.q.store.Pool); err != nil || citus {
		return 0, err
	}
	return n, x.each(ctx, readInTransactions, []any{queue, headSize}, func(rows pgx.Rows) error { return rows.Scan(&n) })
}

// head is what jobs finds of a queue.
type head struct {
	looked  int  // at how many due jobs
	strange bool // some are of kinds for which no worker has a handler, which is said of each of these kinds
	late    bool // one of another kind has been due for long, and nobody has it
}

// told reports that the queue's jobs wait for nothing but what was said. Others may stand behind those that were looked at.
func (h head) told() bool { return h.strange && !h.late && h.looked < headSize }

func (x *examination) serving(queue string) (all []WorkerInfo) {
	for _, w := range x.workers {
		if _, ok := w.Queues[queue]; ok {
			all = append(all, w)
		}
	}
	return all
}

// waiting says why the jobs of a queue may be waiting.
func (x *examination) waiting(s QueueStats, kindPaused bool) {
	plus, f := "", Finding{What: "waiting", Queue: s.Queue}
	if s.More {
		plus = "+"
	}
	f.Detail = fmt.Sprintf("the oldest job of queue %q has been due for %s; %d%s %s", s.Queue, s.Oldest.Round(time.Second), s.Waiting, plus,
		table.Either(s.Waiting, "waits for its first attempt", "wait for their first attempt"))
	if s.Retrying > 0 {
		f.Detail += fmt.Sprintf(" and %d%s for another", s.Retrying, plus)
	}
	f.Since = x.ago(s.Oldest)
	switch serving := len(x.serving(s.Queue)); {
	case serving == 0:
		f.Severe = true
		f.Detail += ", and no worker serves this queue"
		f.Meant = similar(s.Queue, x.workers, func(w WorkerInfo) []string { return slices.Sorted(maps.Keys(w.Queues)) })
		switch {
		case s.Queue == "onceqcron":
			f.Advice = "these are ticks of schedules: start a worker that has the handlers of the schedules (onceqcron)"
		case f.Meant != "":
			f.Advice = fmt.Sprintf("is its name a misspelt %q, which workers do serve? Correct it where the jobs are enqueued, and move what waits", f.Meant)
		default:
			f.Advice = "start one, or is the queue's name spelt wrong where the jobs are enqueued? The list of workers says what they serve"
		}
	case s.Leased > 0:
		f.Detail += fmt.Sprintf(", and %d%s %s with workers", s.Leased, plus, table.Either(s.Leased, "is", "are")) + x.drain(s)
		f.Advice = "if this grows, the workers do not keep up: start more, or raise Concurrency; or their handlers hang"
	default:
		none := "none is running"
		if s.More {
			none = "none of those that were looked at is running"
		}
		f.Detail += fmt.Sprintf(", and %s although %s", none, table.Numbered(serving, "worker serves the queue", "workers serve the queue"))
		if f.Advice = "have these a handler for the kinds, and a connection, if that is transactional? The explanation of a job says it"; kindPaused {
			f.Detail += "; a kind is paused"
		} else {
			f.Severe = true
		}
	}
	if serving := x.serving(s.Queue); len(serving) > 0 {
		if n, kinds := stuckIn(serving, s.Queue); n > 0 {
			f.Detail += fmt.Sprintf("; %s held by handlers of %q that do not return although their context has ended", table.Numbered(n, "slot is", "slots are"), kinds)
			f.Advice = endStuck
		} else if starving(serving) {
			f.Detail += "; " + waitsStarved
			f.Advice = endStarved
		} else if s.Leased > 0 && bound(serving, s.Queue) {
			f.Detail += "; the workers' pool allows no more at once"
			f.Advice = "if this grows, raise the pool's MaxConns, or start more processes: more Concurrency does not help"
		}
	}
	x.found = append(x.found, f)
}

// stuck looks for workers whose slots are held by handlers that do not return, and for those that wait for connections, by what they wrote
// into their rows. Of this process's own handlers, handlers says more.
func (x *examination) stuck(context.Context) error {
	host, _ := os.Hostname()
	own := false
	root.Late(x.q.q, func(string, int64, time.Time) { own = true })
	told := make(map[string]bool) // processes: workers of one have one pool
	for _, w := range x.workers {
		mine := w.Host == host && w.Process == os.Getpid()
		for _, s := range w.Stuck {
			if mine && own {
				continue
			}
			one := WorkerInfo{Stuck: []StuckHandlers{s}}
			slots, _ := stuckIn(x.workers, s.Queue)
			all := 0
			for _, o := range x.serving(s.Queue) {
				all += o.Queues[s.Queue]
			}
			x.found = append(x.found, Finding{
				What: "handler", Queue: s.Queue, Kind: s.Kind, JobID: s.Job, Since: s.Since, Severe: slots >= all,
				Detail: fmt.Sprintf("in %s, %s", w.Where(), one.Trouble()), Advice: endStuck,
			})
		}
		if w.starved() && !told[w.Where()] {
			told[w.Where()] = true
			x.add("pool", fmt.Sprintf("%s waits for connections of its pool of %d: %s in the last minute, added up", w.Where(), w.Pool.Conns, w.Pool.Wait.Round(time.Second)),
				endStarved)
		}
	}
	return nil
}

// What is said of processes that wait for connections of their pools, and what to do about them.
const (
	waitsStarved = "their processes wait for connections of their pools"
	endStarved   = "raise the pool's MaxConns; inside HandleTx use its tx; and does the application give back what it " +
		"acquires? More Concurrency does not help"
)

// endStuck is what to do about handlers that do not return.
const endStuck = "end that process: its slots are free in the next one, and its jobs go to others; make the handlers return when their context ends"

// readHead gives, of the first $3 jobs of each priority that are due in each queue of $1, the kinds, those that have lost more than one lease, and whether
// nobody has one that has been due for longer than $2.
const readHead = `
select n.queue, j.kind, pg_catalog.min(j.id) filter (where j.lost > 1), pg_catalog.max(j.lost), count(*), pg_catalog.min(coalesce(j.due_at, j.run_at)),
       pg_catalog.bool_or(j.run_at < statement_timestamp() - $2::bigint::float8 * interval '1 microsecond' and (j.leased_until is null or j.leased_until <= statement_timestamp()))
  from pg_catalog.unnest($1::text[]) n (queue)
 cross join (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select id, kind, lost, run_at, due_at, leased_until from onceq.jobs
        where queue = n.queue and priority = p.priority and run_at <= statement_timestamp()
        order by run_at, id
        limit $3::int) j
 group by n.queue, j.kind
 order by n.queue, j.kind
 limit 1000`

// jobs looks at the first due jobs of queues: for kinds of which no worker has a handler, and for jobs that may end their
// process each time that they run.
func (x *examination) jobs(ctx context.Context, queues []string,
	pauses []onceq.Pause) (map[string]head, error) {
	heads := make(map[string]head)
	return heads, x.each(ctx, readHead, []any{queues, x.limits.waiting.Microseconds(), headSize}, func(rows pgx.Rows) error {
		var queue, kind string
		var id *int64
		var lost, n int
		var late bool
		var since time.Time
		if err := rows.Scan(&queue, &kind, &id, &lost, &n, &since, &late); err != nil {
			return err
		}
		h := heads[queue]
		defer func() { heads[queue] = h }()
		h.looked += n
		if id != nil {
			x.found = append(x.found, Finding{
				What: "crashes", Queue: queue, Kind: kind, JobID: *id,
				Detail: fmt.Sprintf("job %d of kind %q in queue %q has lost %d leases: it may end its process each time that it runs", *id, kind, queue, lost),
				Advice: "look at what its workers logged last, and at their memory; by itself it is dead after a few more; cancelling it ends it now",
			})
		}
		serving := x.serving(queue)
		if len(serving) == 0 || // waiting says that
			slices.ContainsFunc(serving, func(w WorkerInfo) bool { return slices.Contains(w.Kinds, kind) }) ||
			slices.ContainsFunc(pauses, func(p onceq.Pause) bool { return p.Kind == kind || p.Queue == queue }) {
			h.late = h.late || late
			return nil
		}
		h.strange = true
		f := Finding{
			What: "kind", Queue: queue, Kind: kind, Severe: true, Since: since, Meant: similar(kind, serving, func(w WorkerInfo) []string { return w.Kinds }),
			Detail: fmt.Sprintf("jobs of kind %q are due in queue %q, and none of the workers that serve it has a handler for them", kind, queue),
			Advice: "start a worker with a handler for it, or is the kind's name spelt wrong where the jobs are enqueued?",
		}
		if f.Meant != "" {
			f.Advice = fmt.Sprintf("is the kind a misspelt %q, for which workers do have a handler? Give a worker a handler for this name as well until they are done, and correct it where they are enqueued", f.Meant)
		}
		x.found = append(x.found, f)
		return nil
	})
}

// similar gives a name that workers have and that is nearly the given one, or "".
func similar(name string, workers []WorkerInfo, names func(WorkerInfo) []string) string {
	for _, w := range workers {
		for _, other := range names(w) {
			if other != name && min(len(name), len(other)) > 2 && slip(name, other) {
				return other
			}
		}
	}
	return ""
}

// slip reports whether two names differ by one letter that is missing, too many or another, or by two that changed places.
func slip(a, b string) bool {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for a != "" && b != "" && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return len(a) <= 1 && len(b) <= 1 || len(a) == 2 && len(b) == 2 && a[0] == b[1] && a[1] == b[0]
}

// versions looks for workers that a deploy has left behind. The time is when the latest of them wrote its row.
func (x *examination) versions(context.Context) error {
	if len(x.workers) == 0 {
		return nil
	}
	newest := slices.MaxFunc(x.workers, func(a, b WorkerInfo) int { return a.Started.Compare(b.Started) }).Version
	now := slices.MaxFunc(x.workers, func(a, b WorkerInfo) int { return a.Seen.Compare(b.Seen) }).Seen
	since := now // when the first worker of this version began
	var old []string
	for _, w := range x.workers {
		if w.Version != newest {
			old = append(old, fmt.Sprintf("%s (%s)", w.Where(), w.Version))
		} else if w.Started.Before(since) {
			since = w.Started
		}
	}
	if age := now.Sub(since).Round(time.Second); len(old) > 0 && age > deployTime {
		x.add("versions", fmt.Sprintf("workers with version %s of the library have run for %s, and others still have another: %s", newest, age, strings.Join(old[:min(len(old), 5)], ", ")),
			"finish the deploy: end these processes, or find out why they were not replaced; the list of workers has all")
	}
	return nil
}

// calls looks for lanes that something happened to and that nobody has looked at since.
func (x *examination) calls(ctx context.Context) error {
	const unanswered = `
select c.lane, extract(epoch from statement_timestamp() - c.due)::bigint
  from pg_catalog.generate_series(0, 15) s (slot)
 cross join lateral (
       select lane, due from onceq.lane_calls
        where slot = s.slot::smallint and due < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
        order by due limit 1) c
 order by c.due
 limit 1`
	return x.each(ctx, unanswered, []any{x.limits.waiting.Microseconds()}, func(rows pgx.Rows) error {
		var lane string
		var seconds int64
		if err := rows.Scan(&lane, &seconds); err != nil {
			return err
		}
		x.found = append(x.found, Finding{
			What: "lane", Severe: true, Since: x.ago(time.Duration(seconds) * time.Second),
			Detail: fmt.Sprintf("%s and perhaps others have waited for %s for a worker that lets their next jobs in, and none does", lineWords(lane), time.Duration(seconds)*time.Second),
			Advice: "start a worker: each one that runs (Run, not Drain) does it for all lanes of the schema",
		})
		return nil
	})
}

// readHangs reads the lanes and limits for which jobs have waited for longer than $1, and that are full since longer than $2: with
// the job that has held each for longest. It looks at the first 500 lines for which jobs wait, and skips from one to the next; at
// the jobs that wait it looks only where a job has run for that long. Those that wait for other jobs sort before the space.
var readHangs = `
with recursive line (lane, k) as (
  (select lane, 1 from onceq.job_waits where lane > ' ' order by lane limit 1)
  union all
  select (select lane from onceq.job_waits where lane > l.lane order by lane limit 1), l.k + 1
    from line l where l.lane is not null and l.k < 500
), hang as materialized (
  select l.lane, h.id, h.since, h.worker
    from line l
   cross join lateral (
         select pg_catalog.sum(case when l.lane like '/%' then onceq.weight(path) else 1 end) as live, (pg_catalog.array_agg(id order by since) filter (where goes_on))[1] as id, pg_catalog.min(since) filter (where goes_on) as since,
                (pg_catalog.array_agg(worker order by since) filter (where goes_on))[1] as worker
           from (select j.id, j.lane as path, j.holder >> 32 as worker, j.leased_until > statement_timestamp() as goes_on,
                        case when (j.progress ->> 'claims'::text)::bigint = j.claims then (j.progress ->> 'since'::text)::timestamptz -- beats write it
                             else j.leased_until - coalesce((select lease from onceq.workers w where w.id >> 32 = j.holder >> 32 limit 1), 0)::float8 * interval '1 microsecond' end as since
                   from onceq.lane_places p
                  cross join lateral (select * from onceq.jobs where id = p.id and ` + table.PlaceOfJob + ` offset 0) j
                  where p.lane = l.lane and j.leased_until is not null
                  limit 1000) j) h
   where l.lane is not null and h.since < statement_timestamp() - $2::bigint::float8 * interval '1 microsecond'
     and h.live >= least(1000, ` + table.LimitOf("l.lane") + `)
   limit 20)
select h.lane, h.id, h.since, h.worker, w.waiting
  from hang h
 cross join lateral ` + table.WaitingIn("h.lane", "1000") + ` w
 where w.oldest < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
 order by h.since, h.lane`

// hangs looks for lanes and limits that are full because their jobs run for long, while others wait.
func (x *examination) hangs(ctx context.Context) error {
	return x.each(ctx, readHangs, []any{x.limits.waiting.Microseconds(), x.limits.hang.Microseconds()}, func(rows pgx.Rows) error {
		var lane string
		var id, worker int64
		var since time.Time
		var n int
		if err := rows.Scan(&lane, &id, &since, &worker, &n); err != nil {
			return err
		}
		where := "a process that leaves no row in workers"
		for _, w := range x.workers {
			if w.ID>>32 == worker {
				where = w.Where()
			}
		}
		name := lineWords(lane)
		more := ""
		if n == 1000 {
			more = "+"
		}
		x.found = append(x.found, Finding{
			What: "hang", JobID: id, Since: since,
			Detail: fmt.Sprintf("%s is full: job %d has held it since %s, in %s, whose lease goes on, and %d%s %s", name, id, table.Stamp(since), where, n, more, table.Either(n, "job waits for it", "jobs wait for it")),
			Advice: "a handler may hang: look at what that process does, and what it logged last; cancel the job, or end the process, and the others go on; give the kind a time limit (Timeout) that ends such a handler",
		})
		return nil
	})
}

// slowLimit is from where on Health names a limit: so long at least until nobody waits for it any more.
const slowLimit = time.Hour

// readSlow reads the limits for which jobs have waited for longer than $1: how many wait and how many were counted
// at most, what it allows, null if nobody has set it, and how long the handlers of the first one's kind took on
// average in the last hour, in seconds. It looks at the first 500 limits for which jobs wait, and skips from one
// to the next. It counts some 100,000 jobs of all together, and 1,000 of each.
var readSlow = `
with recursive line (lane, k) as (
  (select lane, 1 from onceq.job_waits where lane > '/' and lane < '0' order by lane limit 1)
  union all
  select (select lane from onceq.job_waits where lane > l.lane and lane < '0' order by lane limit 1), l.k + 1
    from line l where l.lane is not null and l.k < 500
),
took as materialized (
  select kind, pg_catalog.sum(took)::float8
         / nullif(pg_catalog.sum(completed + failed + dead), 0)::float8 / 1e6::float8 as took
    from onceq.job_counts where span = 1 and minute >= statement_timestamp() - interval '1 hour' group by kind
)
select l.lane, w.waiting, m.most, w.oldest, s.n, s.rate, s.per, s.burst, coalesce(c.took, 0)
  from (select greatest(1000, 100000 / greatest(1, count(*))) as most from line) m
 cross join line l
 cross join lateral ` + table.WaitingIn("l.lane", "m.most") + ` w
  left join lateral ` + table.LimitRow("l.lane", `s.lane, s.n, s.rate, s.per, s.burst`) + ` s on true
  left join lateral (
       select j.kind
         from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
        cross join lateral (
              select kind from onceq.job_waits
               where lane = l.lane and priority = p.priority and run_at <= statement_timestamp()
               order by run_at, id limit 1) j
        order by p.priority limit 1) j on true
  left join took c on c.kind = any (array[j.kind])
 where l.lane is not null and s.n is distinct from 0 and w.oldest < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond'
 order by l.lane`

// slow looks for limits that nobody has set, so that one job of each runs at a time, and for those that allow so little that what waits
// for them takes hours.
func (x *examination) slow(ctx context.Context) error {
	var unset []string
	err := x.each(ctx, readSlow, []any{x.limits.waiting.Microseconds()}, func(rows pgx.Rows) error {
		var lane string
		var waiting, most int
		var n, rate, burst *int
		var per *int64
		var took float64
		f := Finding{What: "slow_limit", Advice: "raise the limit, if what it protects bears more"}
		if err := rows.Scan(&lane, &waiting, &most, &f.Since, &n, &rate, &per, &burst, &took); err != nil {
			return err
		}
		more := ""
		if waiting == most {
			more = "+"
		}
		if n == nil {
			unset = append(unset, fmt.Sprintf("%q (%d%s %s)", lane[1:], waiting, more, table.Either(waiting, "job", "jobs")))
			return nil
		}
		limit, seconds := limitOfRow(*n, rate, per, burst), 0.0
		if *n < table.NoCap {
			seconds = float64(waiting) * took / float64(*n)
		}
		if rate != nil {
			seconds = max(seconds, float64(waiting)*float64(*per)/1e6/float64(*rate))
		}
		if seconds < slowLimit.Seconds() {
			return nil
		}
		f.Detail = fmt.Sprintf("%d%s jobs wait for limit %q, which is %s: at today's rate, about %.3g an hour, that takes %s or more",
			waiting, more, lane[1:], limit, float64(waiting)/seconds*3600, time.Duration(seconds)*time.Second)
		x.found = append(x.found, f)
		return nil
	})
	if err != nil || len(unset) == 0 {
		return err
	}
	more := ""
	if n := len(unset) - 5; n > 0 {
		more = fmt.Sprintf(", and %d more", n)
	}
	x.add("limit", "jobs wait for limits that nobody has set, and so one job of each runs at a time: "+strings.Join(unset[:min(len(unset), 5)], ", ")+more,
		"set them with SetLimit, if only to AtOnce 1; or is a name spelt wrong, in Kind.Limit or where the limit was set?")
	return nil
}

// reaper looks for what a Reaper would have removed long ago: what workers counted, which every installation has.
func (x *examination) reaper(ctx context.Context) error {
	const left = `
select minute from onceq.job_counts
 where span = 1
   and minute < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond' - interval '1 hour'
 order by minute
 limit 1`
	return x.each(ctx, left, []any{table.CountsKept.Microseconds()}, func(rows pgx.Rows) error {
		var minute time.Time
		if err := rows.Scan(&minute); err != nil {
			return err
		}
		f := Finding{What: "reaper", Since: minute.Add(table.CountsKept), Advice: "run a Reaper in one of the application's processes (NewReaper): without one the tables grow"}
		f.Detail = "no Reaper has run since " + table.Stamp(f.Since) + " or before: what workers counted until then is still there"
		x.found = append(x.found, f)
		return nil
	})
}

const linesBack = "somebody has emptied the tables, or copied them without data; Queue.Check puts the rows back, as " +
	"each worker does when it starts, and within seconds while it has lanes to look at; its log says if it cannot"

// rows looks for the rows that migrations insert and that nothing deletes.
func (x *examination) rows(ctx context.Context) error {
	return x.each(ctx, table.LacksRows, nil, func(rows pgx.Rows) error {
		var meta, lacks bool
		if err := rows.Scan(&lacks, &meta); err != nil {
			return err
		}
		if !meta {
			detail, advice := root.MetaLacks(x.q.q)
			x.found = append(x.found, Finding{What: "missing_rows", Severe: true, Detail: detail, Advice: advice})
		}
		if lacks {
			x.found = append(x.found, Finding{What: "missing_rows", Severe: true, Detail: table.LinesLack, Advice: linesBack})
		}
		return nil
	})
}
