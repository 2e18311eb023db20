package onceqcron

import (
	"fmt"
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

// plan is for the ticks until a time, which is now or past. How late they are counts to now.
func (m Missed) plan(t Timetable, at time.Time, changed *time.Time, until, now time.Time) (p plan) {
	miss := func(at time.Time) {
		if p.missed++; p.missed == 1 {
			p.first = at
		}
		p.last = at
	}
	limit := max(m.all, 1)
	for ; !at.IsZero() && !at.After(until); at = t.Next(at) {
		if len(p.fire) == limit {
			miss(p.fire[0])
			p.fire = p.fire[1:]
		}
		p.fire = append(p.fire, at)
		if p.missed == maxTicks { // nobody counts the seconds of a year
			if near := until.Add(-max(m.within, time.Minute)); near.After(at) && m.all == 0 {
				if e, ok := t.(every); ok {
					near = e.before(at, near)
				}
				at = near
			}
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
	return p
}
