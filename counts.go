package onceq

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Workers count what becomes of their jobs, so that people can see rates without a monitoring system. A worker counts in
// memory, where it handles outcomes anyway, and adds what it has counted to the rows of the minute that is over: a row for each
// queue and kind, which all workers share. So a job costs no statement, and the table grows with kinds and not with workers.
// A worker that is killed loses what it has counted since the last full minute. If the connection breaks in the moment of that
// statement, a minute may be counted twice. Nothing depends on these rows.

// durationBounds are the upper bounds of the ranges of Count.Durations. The last range has none.
var durationBounds = [...]time.Duration{
	time.Millisecond, 3 * time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond,
	time.Second, 3 * time.Second, 10 * time.Second, 30 * time.Second, 2 * time.Minute, 10 * time.Minute, time.Hour,
}

// DurationBounds returns the upper bounds of the ranges of Count.Durations.
func DurationBounds() []time.Duration { return durationBounds[:] }

// Count is what workers have counted in some time.
type Count struct {
	Started   int `json:"started"`   // jobs that were given to a handler
	Completed int `json:"completed"` // jobs
	Failed    int `json:"failed"`    // attempts that failed and after which the job runs again
	Dead      int `json:"dead"`      // jobs

	// Durations says how long handlers ran, of the completed, failed and dead ones: how many of them up to each of
	// DurationBounds, and last how many longer than that. Took is their sum.
	Durations [len(durationBounds) + 1]int `json:"durations"`
	Took      time.Duration                `json:"took"` // as JSON, in nanoseconds
}

// Percentile returns a duration in which p percent of the handlers returned, as Percentile(95): the upper bound of their range.
// Above a millisecond that is at most six times too long, and for most ranges about three times. It is 0 if none was counted,
// and the last bound, an hour, for what took longer.
func (c Count) Percentile(p float64) time.Duration {
	all := 0
	for _, n := range c.Durations {
		all += n
	}
	sum := 0
	for i, n := range c.Durations {
		if sum += n; n > 0 && float64(sum)*100 >= float64(all)*p {
			return durationBounds[min(i, len(durationBounds)-1)]
		}
	}
	return 0
}

// Add adds what was counted elsewhere.
func (c *Count) Add(o Count) {
	c.Started += o.Started
	c.Completed += o.Completed
	c.Failed += o.Failed
	c.Dead += o.Dead
	c.Took += o.Took
	for i, n := range o.Durations {
		c.Durations[i] += n
	}
}

// Counts are the counts of a queue, or of a kind in a queue, by the minute.
type Counts struct {
	Queue   string    `json:"queue"`
	Kind    string    `json:"kind,omitzero"` // if CountFilter asks for kinds
	From    time.Time `json:"from"`          // when the first minute began, by the database's clock
	Minutes []Count   `json:"minutes"`       // one for each minute, the oldest first
}

// Last adds up the last n minutes, or all if there are fewer.
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
	Minutes int    // how many minutes; default 60, at most 1,440, a day
}

var readCounts = `
with t as materialized (
  select pg_catalog.date_trunc('minute', statement_timestamp() - $4::bigint::float8 * interval '1 microsecond') as now
)
select t.now - $5::int::float8 * interval '1 minute', m.*
  from t
 cross join lateral (
       select c.queue, case when $3::bool then c.kind else '' end as of_kind, $5::int + pg_catalog.floor(extract(epoch from c.minute - t.now) / 60::numeric)::int as at,
              pg_catalog.sum(c.started)::bigint, pg_catalog.sum(c.completed)::bigint, pg_catalog.sum(c.failed)::bigint, pg_catalog.sum(c.dead)::bigint, pg_catalog.sum(c.took)::bigint,
              array[` + sumOfDurations() + `]
         from onceq.job_counts c
        where c.minute >= t.now - $5::int::float8 * interval '1 minute' and c.minute < t.now
          and ($1::text = '' or c.queue = $1::text) and ($2::text = '' or c.kind = $2::text)
        group by c.queue, of_kind, at) m
 order by m.queue, m.of_kind, m.at`

// sumOfDurations adds up each range of durations.
func sumOfDurations() string {
	all := make([]string, len(durationBounds)+1)
	for i := range all {
		all[i] = fmt.Sprintf("pg_catalog.sum(c.durations[%d])::bigint", i+1)
	}
	return strings.Join(all, ", ")
}

// Counts returns what workers have counted, sorted by queue and kind: for the last full minutes, each of which can be read a
// quarter of a minute after it is over. Queues and kinds of which nothing was counted are not in it. A Reaper removes counts
// after about a day. They are for plots: a worker that is killed loses what it has counted since the last full minute. Jobs
// that the application claims by itself (Queue.Claim) are not counted, nor are duplicates: only producers know of these, and
// they do nothing in the background (Hook and onceqotel count them).
func (q *Queue) Counts(ctx context.Context, db DB, filter CountFilter) ([]Counts, error) {
	const day = 24 * 60
	filter.Minutes = cmp.Or(filter.Minutes, 60)
	if filter.Minutes < 0 || filter.Minutes > day {
		return nil, invalid("CountFilter.Minutes", "is %d; 1 to %d is possible", filter.Minutes, day)
	}
	for name, text := range map[string]string{"CountFilter.Queue": filter.Queue, "CountFilter.Kind": filter.Kind} {
		if err := checkText(name, text); err != nil {
			return nil, err
		}
	}
	delay := (countsDelay + countsDelay/2).Microseconds()
	var all []Counts
	err := q.send(ctx, db, reading, readCounts, []any{filter.Queue, filter.Kind, filter.ByKind, delay, filter.Minutes}, each(func(rows pgx.Rows) error {
		var from time.Time
		var queue, kind string
		var at int
		var took int64
		var c Count
		var durations []int
		if err := rows.Scan(&from, &queue, &kind, &at, &c.Started, &c.Completed, &c.Failed, &c.Dead, &took, &durations); err != nil {
			return err
		}
		if n := len(all); n == 0 || all[n-1].Queue != queue || all[n-1].Kind != kind {
			all = append(all, Counts{Queue: queue, Kind: kind, From: from, Minutes: make([]Count, filter.Minutes)})
		}
		c.Took = time.Duration(took) * time.Microsecond
		copy(c.Durations[:], durations)
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
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, one := range tasks {
		t.of(tallied{one.lease.Queue, one.lease.Kind}).Started++
	}
}

// ended counts outcomes that are written, which those in left are not. Those of stale leases are not either, unless an earlier
// try has written them, or the handler or the commit of its transaction has completed the job.
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
			i, _ := slices.BinarySearch(durationBounds[:], o.run)
			c.Durations[i]++
			c.Took += o.run
		}
	}
}

// writeAll writes what was counted. Nothing ends it early: it would not be known whether the counts were written.
func (t *tally) writeAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), endWithin)
	defer cancel()
	return t.write(ctx)
}

// writeCounts calls add_counts, whose comment says what it does.
const writeCounts = `select 1 from onceq.add_counts($1::text[], $2::text[], $3::int[], $4::int[], $5::int[], $6::int[], $7::bigint[], $8::text[]) c`

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
	queues, kinds, durations, took := make([]string, n), make([]string, n), make([]string, n), make([]int64, n)
	started, completed, failed, dead := make([]int32, n), make([]int32, n), make([]int32, n), make([]int32, n)
	for i, key := range keys {
		c := of[key]
		queues[i], kinds[i], took[i] = key.queue, key.kind, c.Took.Microseconds()
		started[i], completed[i], failed[i], dead[i] = int32(c.Started), int32(c.Completed), int32(c.Failed), int32(c.Dead) // #nosec G115 -- of a minute
		durations[i] = strings.Trim(strings.Join(strings.Fields(fmt.Sprint(c.Durations)), ","), "[]")
	}
	return []any{queues, kinds, started, completed, failed, dead, took, durations}
}
