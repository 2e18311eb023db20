package onceqops

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// DurationBounds returns the upper bounds of the ranges of Count.Durations and Count.Waits.
func DurationBounds() []time.Duration { return count.Bounds[:] }

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
			return count.Bounds[min(i, len(count.Bounds)-1)]
		}
	}
	return 0
}

// Add adds what was counted elsewhere. Of Due and Oldest, which are no counts, the greater ones stay.
func (c *Count) Add(o Count) { (*count.Count)(c).Add(count.Count(o)) }

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
func (q *Ops) Counts(ctx context.Context, db onceq.DB, filter CountFilter) ([]Counts, error) {
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
	delay := (table.CountsDelay + table.CountsDelay/2).Microseconds()
	var all []Counts
	args := []any{filter.Queue, filter.Kind, filter.ByKind, delay, filter.Minutes, filter.Step}
	err := q.store.Send(ctx, db, pg.Reading, readCounts, args, pg.Each(func(rows pgx.Rows) error {
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
