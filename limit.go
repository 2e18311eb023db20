package onceq

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// A limit holds for jobs of any lanes and kinds, without an order: how many are live at once, how many start in a time, or
// both. It works as a lane does (lane.go), with its own line in job_waits, whose name begins with a slash. A job with a lane
// and a limit stands first in the line of its lane. When its turn comes there, it keeps that place and moves on to the line
// of its limit, at the end. So each lane has no more jobs in that line than may be live in it, and the lanes take turns.
//
// The table jobs has both names in its column lane, with a separator: its lane, or nothing, and the line of
// its limit. The column path of job_waits has the same. The weight of a job (Job.Weight) stands behind them,
// unless it is 1: the job counts that often in its limit. What one weighed in truth (Lease.SetWeight) is
// written with its end as a call of the limit, from where a promoter moves the rate: so nobody's transaction
// has the rate's row locked.
//
// A rate gives each job the time at which it starts: its slot, which is its run_at. The promoters compute slots under the
// lane's lock from one row of limit_rates (the generic cell rate algorithm), for many jobs at a time and up to half a
// second ahead, so that nothing is asked at a claim. A job that starts later than slotLate after its slot gets another one first
// (internal/slot): otherwise all those that an outage held up would start at once. What starts late in that time is paid by the
// burst: slots are so far apart that no window of starts has more than the burst and what the rate allows.

// Limit says how many jobs of a limit may be live at once, and how many may start in a time. Jobs have to keep to both. The
// zero Limit lets no more jobs in; those that were let in before still start.
//
// A job counts as often as it weighs, here and below: once, or as Job.Weight says.
//
// A contract, such as "never more than ten in any second", is Max: 10. Rate and Burst are for who wants several to
// start at once: in any Per at most both together start, so Rate: 8, Burst: 2 keeps that contract, too.
type Limit struct {
	// AtOnce is how many jobs may be live at once: to be claimed or running. A job that waits for its next attempt does not
	// count. 0 means any number if there is a Max or a Rate; without one, no more jobs are let in. At most
	// 1,000,000.
	AtOnce int `json:"at_once,omitzero"`

	// Max is how many jobs start at most in any window of time that is as long as Per, wherever it begins. 0
	// means any number. They are spaced evenly: ten in an hour start six minutes apart. A job may start up to
	// 100 ms after its slot, so slots are (Per + 100 ms) / Max apart. At most 1,000,000,000, and no more than a
	// million a second. Not together with Rate or Burst.
	Max int `json:"max,omitzero"`

	// Rate is how many jobs start in Per. 0 means any number. At most 1,000,000,000, and no more than a million a second. Per is a
	// second by default, and a millisecond to 366 days.
	Rate int           `json:"rate,omitzero"`
	Per  time.Duration `json:"per,omitzero"` // as JSON, in nanoseconds

	// Burst is how many may start at once after a pause. In every window of time, at most Burst and what the rate allows in
	// the window start. A job may start up to 100 ms after its slot. The burst has room for that if it is at least one more than
	// what the rate allows in 100 ms, which rounded up is the default: 2 for ten a second. With a smaller one the slots are just as
	// exact, and two starts can be closer together than their slots, by up to 100 ms. At most 1,000,000,000, and no more than the
	// rate allows in 1,000 years.
	//
	// The default is at least 2, so one a minute starts two together after a pause, and the next a minute later. For one at a time,
	// never two together, set 1.
	Burst int `json:"burst,omitzero"`
}

func (l Limit) String() string {
	var all []string
	if l.AtOnce > 0 || !l.paced() {
		all = append(all, fmt.Sprintf("%d at once", l.AtOnce))
	}
	if l.Max > 0 {
		all = append(all, fmt.Sprintf("at most %d in any %s", l.Max, cmp.Or(l.Per, time.Second)))
	}
	if l.Rate > 0 {
		all = append(all, fmt.Sprintf("%d in %s", l.Rate, cmp.Or(l.Per, time.Second)))
	}
	if l.Burst > 0 {
		all = append(all, fmt.Sprintf("in bursts of %d", l.Burst))
	}
	return strings.Join(all, ", ")
}

// paced says that jobs start in slots.
func (l Limit) paced() bool { return l.Max > 0 || l.Rate > 0 }

// pace says how slots are given: n of them in a time, and so many at once. With Max a window that is longer by as
// much as a start may be late has no more than Max slots, so one of Per has no more starts.
func (l Limit) pace() (n int, per time.Duration, burst int) {
	if l.Max > 0 {
		return l.Max, l.Per + table.SlotLate, 1
	}
	return l.Rate, l.Per, l.Burst
}

func (l *Limit) check() error {
	switch {
	case l.Max != 0 && (l.Rate != 0 || l.Burst != 0):
		return invalid("Limit.Max", "is %d, and Rate or Burst is set; set Max, or Rate and Burst", l.Max)
	case l.Max < 0 || l.Max > MaxWeight:
		return invalid("Limit.Max", "is %d; 0 to 1,000,000,000 is possible", l.Max)
	case l.AtOnce < 0 || l.AtOnce > 1_000_000:
		return invalid("Limit.AtOnce", "is %d; 0 to 1,000,000 is possible", l.AtOnce)
	case l.Rate < 0 || l.Rate > MaxWeight:
		return invalid("Limit.Rate", "is %d; 0 to 1,000,000,000 is possible", l.Rate)
	case !l.paced() && (l.Per != 0 || l.Burst != 0):
		return invalid("Limit.Rate", "is 0 although Per or Burst is set; set Max, or Rate, or none of them")
	case !l.paced():
		return nil
	}
	l.Per = cmp.Or(l.Per, time.Second)
	if l.Per < time.Millisecond || l.Per > 366*24*time.Hour {
		return invalid("Limit.Per", "is %s; a millisecond to a year is possible", l.Per)
	}
	field, n := "Limit.Rate", l.Rate
	if l.Max > 0 {
		field, n = "Limit.Max", l.Max
	}
	if float64(n)/l.Per.Seconds() > 1_000_000 {
		return invalid(field, "is %d in %s; at most a million a second is possible", n, l.Per)
	}
	if l.Max > 0 {
		return nil
	}
	return l.checkBurst()
}

func (l *Limit) checkBurst() error {
	if l.Burst == 0 {
		l.Burst = 1 + int(math.Ceil(float64(l.Rate)*float64(table.SlotLate)/float64(l.Per)))
	}
	if l.Burst < 0 || l.Burst > MaxWeight {
		return invalid("Limit.Burst", "is %d; 1 to 1,000,000,000 is possible, and 0 for the default", l.Burst)
	}
	if float64(l.Burst)/float64(l.Rate)*l.Per.Hours() > 1000*365*24 { // Postgres's times end after 294,276 years
		return invalid("Limit.Burst", "is %d, and at %d in %s that is more than 1,000 years; set a smaller Burst, or more in less time", l.Burst, l.Rate, l.Per)
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
	case strings.Contains(name, table.LineSep):
		return "", invalid(field, "contains a unit separator (U+001F), which is not possible")
	case strings.HasPrefix(base, "/") || strings.HasSuffix(base, "/"):
		return "", invalid(field, "is %q; it must not begin or end with a slash", name)
	case families && base != name && strings.Contains(base, "/"):
		return "", invalid(field, "is %q; a family of limits is what comes before the first slash", name)
	}
	return "/" + name, checkName(field, base, MaxLaneBytes)
}

// SetLimit sets a limit that jobs name with Job.Limit, inside db, in all processes at once. It takes effect when db commits.
// If more jobs are live than a lowered limit allows, they go on, also those that nobody has claimed yet, and no more are let in
// until enough have finished. But a completion whose transaction was open at that time may let one more in when it commits. A
// name that ends in a slash, as in "provider/", is for each limit whose name begins with it and that has not been set itself; a
// name may have more slashes, and its family is what comes before the first one. A name has at most MaxLaneBytes. A bad name or
// Limit is an *InvalidError.
//
// The jobs of a limit that nobody has set run one at a time; each worker logs that once. The zero Limit lets no
// more in. Without a Max or a Rate any more, jobs that were let in start without it, and those that miss their
// slots at once.
//
// A job that was let in keeps its place until it has run, also if its kind or queue is paused or no worker has it, and others of
// the limit wait for that: see PauseQueue.
func (q *Queue) SetLimit(ctx context.Context, db DB, name string, limit Limit) error {
	_, err := q.setLimit(ctx, db, name, limit, false)
	return err
}

// EnsureLimit is SetLimit if the limit is not set, and reports whether it has set it. So a program may call
// it whenever it starts: what an operator has set stays. If two call it at once, the second one waits until
// the transaction of the first one ends. A limit for which only its family is set is not set itself.
func (q *Queue) EnsureLimit(ctx context.Context, db DB, name string, limit Limit) (set bool, err error) {
	return q.setLimit(ctx, db, name, limit, true)
}

func (q *Queue) setLimit(ctx context.Context, db DB, name string, limit Limit, unset bool) (bool, error) {
	line, err := limitLine("name", name, true)
	if err := cmp.Or(err, limit.check()); err != nil {
		return false, err
	}
	set, err := q.setLine(ctx, db, line, &limit, unset)
	if err != nil {
		return false, fmt.Errorf("onceq: limit: %w", err)
	}
	return set, nil
}

// RemoveLimit undoes SetLimit: what holds then is the limit of the name's family, if that was set, and otherwise one at a
// time. It is no error if nobody has set it.
func (q *Queue) RemoveLimit(ctx context.Context, db DB, name string) error {
	line, err := limitLine("name", name, true)
	if err != nil {
		return err
	}
	if _, err := q.setLine(ctx, db, line, nil, false); err != nil {
		return fmt.Errorf("onceq: limit: %w", err)
	}
	return nil
}

// setLine writes the limit of a line, or of a family of them, or removes it. That of one with Max has no
// burst. If it is to be unset, it may stay as it is, and set is false.
func (q *Queue) setLine(ctx context.Context, db DB, line string, l *Limit, unset bool) (set bool, err error) {
	if db == nil {
		return false, noDB{}
	}
	var n, rate, per, burst any
	if l != nil {
		n = l.AtOnce
		if starts, time, _ := l.pace(); starts > 0 {
			n, rate, per = cmp.Or(l.AtOnce, table.NoCap), starts, time.Microseconds()
		}
		if l.Rate > 0 {
			burst = l.Burst
		}
	}
	err = q.store.Send(ctx, db, pg.ForCaller, stmt.SetLimit, []any{line, n, rate, per, burst, unset}, pg.Row(&set))
	return set, err
}
