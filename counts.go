package onceq

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Workers count what becomes of their jobs, so that people can see rates without a monitoring system. A
// worker counts in memory, where it handles outcomes anyway, and adds what it has counted to three rows for
// each queue and kind, which all workers share: that of the minute that is over, of its ten minutes and of
// its hour. So a job costs no statement, and the table grows with kinds and not with workers. A worker that
// is killed loses what it has counted since the last full minute. If the connection breaks in the moment of
// that statement, a minute may be counted twice. Nothing depends on these rows.

// durationBounds are the upper bounds of the ranges of Count.Durations: of the preferred numbers E12, each of
// which is about 1.2 times the one before, those from a millisecond to 65 minutes. The last range has none.
var durationBounds = func() (all [80]time.Duration) {
	unit := 100 * time.Microsecond
	for i := range all {
		if i%12 == 0 && i > 0 {
			unit *= 10
		}
		all[i] = unit * [...]time.Duration{10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68, 82}[i%12]
	}
	return all
}()

// DurationBounds returns the upper bounds of the ranges of Count.Durations and Count.Waits.
func DurationBounds() []time.Duration { return durationBounds[:] }

// Count is what workers have counted in some time.
type Count struct {
	Started   int `json:"started"`   // jobs that were given to a handler
	Completed int `json:"completed"` // jobs
	Failed    int `json:"failed"`    // attempts that failed and after which the job runs again
	Dead      int `json:"dead"`      // jobs

	// Durations says how long handlers ran, of the completed, failed and dead ones: how many of them up to each
	// of DurationBounds, and last how many longer than that. It ends with the last one that is not 0. Took is
	// their sum.
	Durations []int         `json:"durations"`
	Took      time.Duration `json:"took"` // as JSON, in nanoseconds

	// Waits says in the same way how long jobs had been due when a handler got them, whatever held them. Of a
	// job that its worker got together with the completion of another one of its lane or limit that is not
	// known.
	Waits []int `json:"waits"`

	// What follows a Reaper has seen of a queue, twice a minute. Of the kinds of a queue it is not known.
	//
	// Due says how many jobs were due that nobody had, of the first 100,000 of each priority, and Oldest for
	// how long the oldest of them had been due: the greatest that was seen.
	Due    int           `json:"due"`
	Oldest time.Duration `json:"oldest"` // as JSON, in nanoseconds
}

// Percentile returns a duration in which p percent of the handlers returned, as Percentile(95): the upper
// bound of their range. Above a millisecond that is at most a quarter too long. It is 0 if none was counted,
// and the last bound, 65 minutes, for what took longer.
func (c Count) Percentile(p float64) time.Duration { return percentile(c.Durations, p) }

// WaitPercentile returns a duration for which p percent of the jobs had been due at most when a handler got
// them, as Percentile does.
func (c Count) WaitPercentile(p float64) time.Duration { return percentile(c.Waits, p) }

func percentile(ranges []int, p float64) time.Duration {
	all, sum := 0, 0
	for _, n := range ranges {
		all += n
	}
	for i, n := range ranges {
		if sum += n; n > 0 && float64(sum)*100 >= float64(all)*p {
			return durationBounds[min(i, len(durationBounds)-1)]
		}
	}
	return 0
}

// Add adds what was counted elsewhere. Of Due and Oldest, which are no counts, the greater ones stay.
func (c *Count) Add(o Count) {
	c.Started += o.Started
	c.Completed += o.Completed
	c.Failed += o.Failed
	c.Dead += o.Dead
	c.Took += o.Took
	c.Due, c.Oldest = max(c.Due, o.Due), max(c.Oldest, o.Oldest)
	for of, more := range map[*[]int][]int{&c.Durations: o.Durations, &c.Waits: o.Waits} {
		for i, n := range more {
			addTo(of, i, n)
		}
	}
}

// addTo adds to an element of a slice, which grows to have it.
func addTo(ranges *[]int, i, n int) {
	if grow := i + 1 - len(*ranges); grow > 0 {
		*ranges = append(*ranges, make([]int, grow)...)
	}
	(*ranges)[i] += n
}

// rangeOf is the range that a duration belongs to.
func rangeOf(d time.Duration) int {
	i, _ := slices.BinarySearch(durationBounds[:], d)
	return i
}

// Counts are the counts of a queue, or of a kind in a queue, step by step.
type Counts struct {
	Queue   string        `json:"queue"`
	Kind    string        `json:"kind,omitzero"` // if CountFilter asks for kinds
	From    time.Time     `json:"from"`          // when the first step began, by the database's clock
	Step    time.Duration `json:"step"`          // CountFilter.Step, as JSON in nanoseconds
	Minutes []Count       `json:"minutes"`       // one for each step, the oldest first
}

// Last adds up the last n steps, or all if there are fewer.
func (c Counts) Last(n int) (sum Count) {
	for _, m := range c.Minutes[max(0, len(c.Minutes)-n):] {
		sum.Add(m)
	}
	return sum
}

// CountFilter chooses counts.
type CountFilter struct {
	Queue   string // only this queue
	Kind    string // only this kind
	ByKind  bool   // each kind of a queue by itself
	Minutes int    // how many minutes, a multiple of Step; default 60, at most 1,440, or 44,640 if Step is 60
	Step    int    // how many minutes are added up: 1, the default, 10 or 60
}

const readCounts = `
with t as materialized (
  select pg_catalog.date_bin($6::int::float8 * interval '1 minute',
           statement_timestamp() - $4::bigint::float8 * interval '1 microsecond', timestamptz '2000-01-01 00:00:00Z') as now
)
select t.now - $5::int::float8 * interval '1 minute', c.queue, case when $3::bool then c.kind else '' end,
       (($5::int + pg_catalog.floor(extract(epoch from c.minute - t.now) / 60::numeric)::int) / $6::int)::int,
       c.started, c.completed, c.failed, c.dead, c.took, c.due, c.oldest, c.durations, c.waits
  from t
 cross join lateral (
       select * from onceq.job_counts
        where span = $6::int and minute >= t.now - $5::int::float8 * interval '1 minute' and minute < t.now
          and ($1::text = '' or queue = $1::text) and ($2::text = '' or kind = $2::text)
          and not ($3::bool and kind = '')
       offset 0) c
 order by c.queue, 3`

// Counts returns what workers have counted, sorted by queue and kind: for the last full minutes, each of
// which can be read a quarter of a minute after it is over, or for the last full ten minutes or hours. Queues
// and kinds of which nothing was counted are not in it. A Reaper removes minutes and ten minutes after about
// a day, and hours after a month. They are for plots: a worker that is killed loses what it has counted since
// the last full minute. Jobs that the application claims by itself (Queue.Claim) are not counted, nor are
// duplicates: only producers know of these, and they do nothing in the background (Hook and onceqotel count
// them).
func (q *Queue) Counts(ctx context.Context, db DB, filter CountFilter) ([]Counts, error) {
	filter.Minutes, filter.Step = cmp.Or(filter.Minutes, 60), cmp.Or(filter.Step, 1)
	most := map[int]int{1: 24 * 60, 10: 24 * 60, 60: 31 * 24 * 60}[filter.Step]
	if most == 0 {
		return nil, invalid("CountFilter.Step", "is %d; 1, 10 and 60 are possible", filter.Step)
	}
	if filter.Minutes < 0 || filter.Minutes > most || filter.Minutes%filter.Step != 0 {
		return nil, invalid("CountFilter.Minutes", "is %d; multiples of %d up to %d are possible",
			filter.Minutes, filter.Step, most)
	}
	for name, text := range map[string]string{"CountFilter.Queue": filter.Queue, "CountFilter.Kind": filter.Kind} {
		if err := checkText(name, text); err != nil {
			return nil, err
		}
	}
	delay := (countsDelay + countsDelay/2).Microseconds()
	var all []Counts
	args := []any{filter.Queue, filter.Kind, filter.ByKind, delay, filter.Minutes, filter.Step}
	err := q.send(ctx, db, reading, readCounts, args, each(func(rows pgx.Rows) error {
		var from time.Time
		var queue, kind string
		var at int
		var took, oldest int64
		var c Count
		if err := rows.Scan(&from, &queue, &kind, &at, &c.Started, &c.Completed, &c.Failed, &c.Dead, &took,
			&c.Due, &oldest, &c.Durations, &c.Waits); err != nil {
			return err
		}
		if n := len(all); n == 0 || all[n-1].Queue != queue || all[n-1].Kind != kind {
			all = append(all, Counts{Queue: queue, Kind: kind, From: from, Step: time.Duration(filter.Step) * time.Minute,
				Minutes: make([]Count, filter.Minutes/filter.Step)})
		}
		c.Took, c.Oldest = time.Duration(took)*time.Microsecond, time.Duration(oldest)*time.Microsecond
		all[len(all)-1].Minutes[at].Add(c)
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("onceq: counts: %w", err)
	}
	return all, nil
}

// tally is what one run has counted and not written yet.
type tally struct {
	q  *Queue
	db DB // the worker's own for outcomes: this waits for locks

	mu  sync.Mutex // guards all
	all map[tallied]*Count
}

type tallied struct{ queue, kind string }

// of returns the counter of a queue and kind. The caller holds mu.
func (t *tally) of(key tallied) *Count {
	c := t.all[key]
	if c == nil {
		if t.all == nil {
			t.all = make(map[tallied]*Count)
		}
		c = new(Count)
		t.all[key] = c
	}
	return c
}

// started counts jobs that a handler gets now.
func (t *tally) started(tasks []*task) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, one := range tasks {
		c := t.of(tallied{one.lease.Queue, one.lease.Kind})
		if c.Started++; one.lease.waited >= 0 {
			addTo(&c.Waits, rangeOf(one.lease.waited+now.Sub(one.lease.began)), 1)
		}
	}
}

// ended counts outcomes that are written, which those in left are not. Those of stale leases are not either,
// unless an earlier try has written them, or the handler or the commit of its transaction has completed the
// job.
func (t *tally) ended(outcomes []outcome, stale []*Lease, left []outcome) {
	var unwritten map[*Lease]bool
	if len(left) > 0 {
		unwritten = make(map[*Lease]bool, len(left))
		for _, o := range left {
			unwritten[o.lease] = true
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range outcomes {
		if unwritten[o.lease] {
			continue
		}
		state := o.state
		if len(stale) > 0 && slices.Contains(stale, o.lease) {
			if !o.unsure {
				continue
			}
			if o.lease.completedItself() || o.tried {
				state = StateCompleted
			}
		}
		c := t.of(tallied{o.lease.Queue, o.lease.Kind})
		switch {
		case state == StateCompleted:
			c.Completed++
		case state == StateDead:
			c.Dead++
		case state == StateWaiting && o.spend:
			c.Failed++
		default:
			continue
		}
		if o.run > 0 {
			addTo(&c.Durations, rangeOf(o.run), 1)
			c.Took += o.run
		}
	}
}

// writeAll writes what was counted. Nothing ends it early: it would not be known whether the counts were
// written.
func (t *tally) writeAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), endWithin)
	defer cancel()
	return t.write(ctx)
}

// writeCounts calls add_counts, whose comment says what it does.
const writeCounts = `
select 1 from onceq.add_counts($1::text[], $2::text[], $3::int[], $4::int[], $5::int[], $6::int[], $7::bigint[],
       $8::int[], $9::bigint[], $10::text[], $11::text[]) c`

// write adds what was counted since the last time. What it cannot write stays.
func (t *tally) write(ctx context.Context) error {
	t.mu.Lock()
	now := t.all
	t.all = nil
	t.mu.Unlock()
	keys := make([]tallied, 0, len(now))
	for key := range now {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b tallied) int {
		return cmp.Or(strings.Compare(a.queue, b.queue), strings.Compare(a.kind, b.kind))
	})
	var err error
	for chunk := range slices.Chunk(keys, chunkRows) {
		if err == nil {
			err = t.q.guarded(ctx, t.db, writeCounts, countArgs(chunk, now), nil)
		}
		if err != nil {
			t.mu.Lock()
			for _, key := range chunk {
				t.of(key).Add(*now[key])
			}
			t.mu.Unlock()
		}
	}
	return err
}

func countArgs(keys []tallied, of map[tallied]*Count) []any {
	n := len(keys)
	queues, kinds, durations, waits := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	var numbers [5][]int32
	for i := range numbers {
		numbers[i] = make([]int32, n)
	}
	took, oldest := make([]int64, n), make([]int64, n)
	for i, key := range keys {
		c := of[key]
		queues[i], kinds[i], took[i], oldest[i] = key.queue, key.kind, c.Took.Microseconds(), c.Oldest.Microseconds()
		for k, n := range [...]int{c.Started, c.Completed, c.Failed, c.Dead, c.Due} {
			numbers[k][i] = int32(n) // #nosec G115 -- of a minute
		}
		durations[i], waits[i] = listed(c.Durations), listed(c.Waits)
	}
	return []any{queues, kinds, numbers[0], numbers[1], numbers[2], numbers[3], took, numbers[4], oldest, durations, waits}
}

// listed writes numbers with commas in between.
func listed(ranges []int) string {
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(ranges)), ","), "[]")
}

// readDue counts, for each queue, the due jobs that nobody has among the first $1 of each priority, and says
// for how many microseconds the oldest has been due.
const readDue = `
with recursive` + liveQueues + `
given as (select $1::int)
select l.queue, pg_catalog.sum(x.due)::bigint,
       pg_catalog.floor(extract(epoch from statement_timestamp() - pg_catalog.min(x.oldest)) * 1e6)::bigint
  from live l
 cross join (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
 cross join lateral (
       select count(*) as due, pg_catalog.min(j.due_at) as oldest
         from (select coalesce(due_at, run_at) as due_at, leased_until
                 from onceq.jobs
                where queue = l.queue and priority = p.priority and run_at <= statement_timestamp()
                order by run_at, id
                limit $1::int) j
        where j.leased_until is null or j.leased_until <= statement_timestamp()) x
 where l.queue is not null
 group by l.queue
having pg_catalog.sum(x.due) > 0::numeric`

// countDue writes how many jobs of each queue are due, twice a minute until ctx ends, and less often where
// that takes more than a hundredth of the time. Such rows have no kind.
func (r *Reaper) countDue(ctx context.Context) {
	for owner, wait := new(Reaper), rand.N(presentEvery/2); sleep(ctx, wait, nil); {
		began := time.Now()
		now := make(map[tallied]*Count)
		err := r.q.send(ctx, r.q.pool, reading, readDue, []any{dueRows}, each(func(rows pgx.Rows) error {
			var queue string
			var c Count
			var oldest int64
			err := rows.Scan(&queue, &c.Due, &oldest)
			c.Oldest = time.Duration(oldest) * time.Microsecond
			now[tallied{queue: queue}] = &c
			return err
		}))
		wait = max(presentEvery/2, aHundredth*time.Since(began))
		if err == nil {
			err = (&tally{q: r.q, db: r.q.pool, all: now}).write(ctx)
		}
		switch {
		case err == nil:
			r.q.works(owner, workCount, "")
		case ctx.Err() == nil:
			r.q.fails(owner, workCount, "", err)
		}
	}
}
