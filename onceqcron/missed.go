package onceqcron

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Missed says what becomes of ticks that were missed.
type Missed struct {
	within time.Duration
	all    int
}

// Latest fires only the latest of the ticks that are due, if it is not later than within. The ledger counts the others as
// missed.
func Latest(within time.Duration) Missed {
	if within == 0 {
		within = -1 // is refused, and not taken for the default
	}
	return Missed{within: within}
}

// Skip fires no tick that is more than a minute late.
func Skip() Missed { return Latest(time.Minute) }

// none fires no tick. It is the rule of a pause.
var none = Missed{within: -1}

// All fires every missed tick, the oldest first. Of more than limit, only the latest limit ones. At most 10,000.
func All(limit int) Missed {
	if limit == 0 {
		limit = -1 // is refused, and not taken for the default
	}
	return Missed{all: limit}
}

// String is what the table stores.
func (m Missed) String() string {
	if m.all > 0 {
		return "all " + strconv.Itoa(m.all)
	}
	return "latest " + m.within.String()
}

func (m Missed) check() error {
	switch {
	case m.all < 0 || m.all > maxTicks:
		return invalid("Missed", "All takes a limit from 1 to %d; Skip fires no tick that is late", maxTicks)
	case m.all == 0 && m.within <= 0:
		return invalid("Missed", "Latest takes a time above zero; Skip fires no tick that is late")
	}
	return nil
}

func parseMissed(s string) (m Missed, err error) {
	word, value, _ := strings.Cut(s, " ")
	switch word {
	case "all":
		m.all, err = strconv.Atoi(value)
	case "latest":
		m.within, err = time.ParseDuration(value)
	default:
		err = fmt.Errorf("%q", s)
	}
	if err == nil {
		err = m.check()
	}
	return m, err
}

// plan is what to do about the ticks of a timetable from the given one on, which is due. If the timetable has changed since that
// one was due, the others come after the change.
type plan struct {
	fire        []time.Time
	missed      int // how many, at most maxTicks
	first, last time.Time
	next        time.Time // the first that is not due; zero if there is none
}

// plan is for the ticks until a time, which is now or past. How late they are counts to now. It looks at some ten thousand ticks at most:
// nobody counts the seconds of a year, and the schedule is locked meanwhile.
func (m Missed) plan(ctx context.Context, t Timetable, at time.Time, changed *time.Time, until, now time.Time) (p plan, err error) {
	miss := func(at time.Time) {
		if p.missed = min(p.missed+1, maxTicks); p.first.IsZero() {
			p.first = at
		}
		p.last = at
	}
	limit := max(m.all, 1)
	for seen := 0; !at.IsZero() && !at.After(until); at = t.Next(at) {
		if err := ctx.Err(); err != nil {
			return p, err
		}
		due := []time.Time{at}
		if seen++; seen > maxTicks+limit {
			due = latest(t, at, until, limit+1)
		}
		for _, at = range due {
			if len(p.fire) == limit {
				miss(p.fire[0])
				p.fire = p.fire[1:]
			}
			p.fire = append(p.fire, at)
		}
		if changed != nil && changed.After(at) {
			at = *changed
		}
	}
	p.next = at
	if m.all == 0 && len(p.fire) == 1 && now.Sub(p.fire[0]) > m.within {
		miss(p.fire[0])
		p.fire = nil
	}
	return p, nil
}

// latest returns the last n ticks from at, which is one, until a time; or all of them, if these are fewer. It halves the time until exactly n
// are left of it, because a Timetable only says what comes next.
func latest(t Timetable, at, until time.Time, n int) (ticks []time.Time) {
	from := func(start time.Time) (ticks []time.Time) { // the first ones after start, one more than wanted
		if e, ok := t.(every); ok {
			start = e.before(at, start.Add(1)) // it counts from the tick before
		}
		for next := t.Next(start); !next.IsZero() && !next.After(until) && len(ticks) <= n; next = t.Next(next) {
			ticks = append(ticks, next)
		}
		return ticks
	}
	if ticks = from(at); len(ticks) < n {
		return slices.Insert(ticks, 0, at)
	}
	few, many := until, at // after few there are too few ticks, after many too many or enough
	for range 64 {         // a nanosecond of 292 years
		middle := many.Add(few.Sub(many) / 2)
		switch ticks = from(middle); {
		case len(ticks) == n:
			return ticks
		case len(ticks) < n:
			few = middle
		default:
			many = middle
		}
	}
	return from(many)[:n]
}
