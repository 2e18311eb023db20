package onceqcron

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	cron "github.com/netresearch/go-cron"
)

// Timetable says when a schedule is due.
type Timetable interface {
	// Next returns the first time after the given one, which may be in any zone, and the zero time if there is none. A time that is not
	// after the given one is an *onceq.InvalidError of Register. Later it is an error of the tick, as is a panic of Next, and that tick is
	// tried again.
	Next(after time.Time) time.Time
}

// Parse reads a cron specification for a time zone of the IANA database ("Europe/Berlin"); an empty zone is UTC. "Local" and
// "localtime" are refused: which zone that is depends on the machine.
//
// The five fields are minute, hour, day of month, month and day of week; six fields begin with seconds. A field is * or a
// list of numbers, names (JAN, MON), ranges (1-5) and steps (*/10, 8-18/2). Sunday is 0 or 7. A range of hours, days or months may
// go over the end: 22-2 is 22, 23, 0, 1 and 2, and FRI-MON is four days. 5/10 is 5-59/10, and so on; a step is
// less than what it steps over. If both days are given, either may match; ? for a day is *.
// The day of month may be L (the last day), L-2 (two days before it), 15W (the working day nearest to the 15th) and LW. The day of
// week may be FRI#2 (the second Friday) and FRI#L (the last one). Instead of fields, a specification may be @yearly, @monthly, @weekly,
// @daily, @hourly, or @every with a duration ("@every 90m"), which counts from the tick before.
//
// Where clocks change: if the hour field begins with *, ticks follow real time, so an hour that comes twice has its ticks
// twice. Otherwise each tick happens once a day: those of an hour that is left out happen together, right after the gap,
// and those of an hour that comes twice happen the first time.
func Parse(spec, zone string) (Timetable, error) {
	t, err := parse(spec, zone)
	if err != nil {
		return nil, fmt.Errorf("onceqcron: %w", err)
	}
	return t, nil
}

func parse(spec, zone string) (Timetable, error) {
	switch strings.ToLower(zone) {
	case "local", "localtime": // the library's word for the machine's own zone, and the systems' file of it
		return nil, fmt.Errorf("zone %q is another one on every machine that fires; name the zone that is meant, such as Europe/Berlin", zone)
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return nil, fmt.Errorf("zone %q is not known here (%w); use a name such as Europe/Berlin, and import time/tzdata where the system has no zones", zone, err)
	}
	fields := strings.Fields(spec)
	if len(fields) > 0 && fields[0][0] == '@' {
		fields[0] = strings.ToLower(fields[0])
	}
	switch {
	case len(fields) == 0:
		return nil, errors.New("the specification is empty")
	case strings.Contains(spec, "="):
		return nil, fmt.Errorf("specification %q: put the time zone into Zone", spec)
	case fields[0] == "@every":
		return parseEvery(spec, fields)
	}
	ticks, err := readFields(fields)
	if err != nil {
		return nil, fmt.Errorf("specification %q: %w", spec, explain(fields, err))
	}
	c := &calendar{ticks: ticks, loc: loc, realTime: fields[0] == "@hourly"}
	if fields[0][0] != '@' {
		c.realTime = strings.HasPrefix(fields[len(fields)-4], "*")
	}
	if c.Next(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)).IsZero() {
		return nil, fmt.Errorf("specification %q names no day that exists", spec)
	}
	return c, nil
}

func parseEvery(spec string, fields []string) (Timetable, error) {
	if len(fields) != 2 {
		return nil, fmt.Errorf("specification %q: @every needs one duration, as in \"@every 90m\"", spec)
	}
	d, err := time.ParseDuration(fields[1])
	switch {
	case err != nil:
		return nil, fmt.Errorf("specification %q: %q is not a duration such as 90m or 24h", spec, fields[1])
	case d < time.Second || d%time.Second != 0:
		return nil, fmt.Errorf("specification %q: %s is not a whole number of seconds", spec, fields[1])
	}
	return every(d), nil
}

type every time.Duration

// before is the last tick before from, of those to which next belongs.
func (e every) before(next, from time.Time) time.Time {
	d := time.Duration(e)
	at := next.Add(-next.Sub(from) / d * d)
	for !at.Before(from) {
		at = at.Add(-max(d, at.Sub(from)/d*d)) // Sub counts up to 292 years
	}
	return at
}

// following is the first tick after now, of those to which next belongs.
func (e every) following(next, now time.Time) time.Time {
	at := e.before(next, now)
	for !at.After(now) {
		at = at.Add(time.Duration(e))
	}
	return at
}

func (e every) Next(after time.Time) time.Time { return after.Add(time.Duration(e)) }

// counting reports whether a Timetable counts from the time that it is asked about, as after.Add(d) does. Its next tick would be put off
// whenever it is asked.
func counting(t Timetable, now time.Time) bool {
	at := t.Next(now)
	return !at.IsZero() && !t.Next(now.Add(at.Sub(now)/2)).Equal(at)
}

// stored rounds the times of a Timetable of the code up to microseconds, as the table has them: rounded down, the next tick after
// one would be the same one again.
type stored struct{ Timetable }

func (s stored) Next(after time.Time) time.Time {
	at, err := s.following(after)
	if err != nil {
		panic(err) // a tick would never end
	}
	return at
}

// latestTick is the end of the times of ticks, as of onceq.Job.RunAt: a Timetable that has none before that has none.
var latestTick = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)

// following is Next, and an error if that is not after the given time.
func (s stored) following(after time.Time) (time.Time, error) {
	at := s.Timetable.Next(after)
	if down := at.Truncate(time.Microsecond); down.Before(at) {
		at = down.Add(time.Microsecond)
	}
	if !at.Before(latestTick) {
		return time.Time{}, nil
	}
	if !at.IsZero() && !at.After(after) {
		return at, invalid("Timetable", "%T has %s as the next time after %s; Next must return a later time than it gets, or the zero time",
			s.Timetable, at.UTC().Format(time.RFC3339Nano), after.UTC().Format(time.RFC3339Nano))
	}
	return at, nil
}

// goesOn refuses a Timetable that does not go on from now, or from the tick after that.
func goesOn(t Timetable, now time.Time) error {
	s, ok := t.(stored)
	if !ok {
		return nil
	}
	at, err := s.following(now)
	if err == nil && !at.IsZero() {
		_, err = s.following(at)
	}
	return err
}

// The library reads specifications and counts days and hours. It does so in UTC alone: its own rules for changes of the
// clock lose ticks (a midnight that is left out, gaps of half an hour), repeat them, and do not end for a day that a zone
// has skipped (Apia, 2011). calendar has the rules that Parse promises; TestParse_ClockChanges has the cases.
var parser = cron.MustNewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow |
	cron.Descriptor | cron.Extended | cron.DowOrDom).WithMaxSearchYears(40) // a leap day is 8 years away at most, on a given weekday 40

// parts are the fields of a specification. A range may go over the end of those that wrap: 22-2, FRI-MON. In a minute or a second
// that is nearly always a slip, and a schedule that is due nearly always.
var parts = []struct {
	name     string
	most     int
	wraps    bool
	day      bool
	possible string
}{
	{name: "second", most: 59, possible: "0 to 59"},
	{name: "minute", most: 59, possible: "0 to 59"},
	{name: "hour", most: 23, wraps: true, possible: "0 to 23"},
	{name: "day of month", most: 31, wraps: true, day: true, possible: "1 to 31, L, L-2, 15W and LW"},
	{name: "month", most: 12, wraps: true, possible: "1 to 12 and JAN to DEC"},
	{name: "day of week", most: 7, wraps: true, day: true, possible: "0 to 7, SUN to SAT, FRI#2 and FRI#L"},
}

// readFields is parser.Parse for what it reads wrongly: it takes the H of THU for a sign of its own, an empty element of a list for
// nothing at all, *-5 for *, and a number that is too large for the beginning of a range that goes over the end. A ? is a * to it. It
// counts Sunday twice where days of the week go in steps to their end or over it.
func readFields(fields []string) (cron.Schedule, error) {
	first := len(parts) - len(fields)
	fields = slices.Clone(fields)
	for i, f := range fields {
		elements := strings.Split(f, ",")
		for j, one := range elements {
			if one == "" {
				return nil, errors.New("an element of the list is empty")
			}
			if first != 0 && first != 1 {
				break // it is a word, or the parser says that there are too many or too few
			}
			part := parts[first+i]
			if first+i == len(parts)-1 {
				var err error
				if elements[j], err = weekdays(one); err != nil {
					return nil, err
				}
			}
			one, _, _ = strings.Cut(one, "/")
			low, high, isRange := strings.Cut(one, "-")
			switch from, err := strconv.Atoi(low); {
			case strings.HasPrefix(one, "?") && !part.day:
				return nil, errors.New("? is for the two fields of days; use *")
			case isRange && (low == "*" || low == "?"):
				return nil, fmt.Errorf("a range begins with %s", low)
			case err != nil:
			case from > part.most:
				return nil, fmt.Errorf("%d is too large; possible are %s", from, part.possible)
			case isRange && !part.wraps:
				if to, err := strconv.Atoi(high); err == nil && from > to {
					return nil, fmt.Errorf("the range %s goes backwards; write %d-%d, or %d-%d,0-%d if it is to go over the end", one, to, from, from, part.most, to)
				}
			}
		}
		fields[i] = strings.Join(elements, ",")
	}
	return parser.Parse(strings.ToLower(strings.Join(fields, " ")))
}

// weekdays is days of the week in steps as the library reads them rightly: from a day on they go to Saturday, as those of * do, and those
// of a range over the end are a list.
func weekdays(one string) (string, error) {
	days, step, stepped := strings.Cut(one, "/")
	low, high, isRange := strings.Cut(days, "-")
	from, ok := weekday(low)
	if !stepped || !ok {
		return one, nil
	}
	if !isRange {
		return fmt.Sprintf("%d-6/%s", from%7, step), nil
	}
	to, ok := weekday(high)
	by, err := strconv.Atoi(step)
	if !ok || err != nil || from <= to || by < 1 {
		return one, nil
	}
	if by > to+7-from {
		return "", fmt.Errorf("step (%d) must be less than range size (%d): %q", by, to+8-from, one)
	}
	var list []string
	for day := from; day <= to+7; day += by {
		list = append(list, strconv.Itoa(day%7))
	}
	return strings.Join(list, ","), nil
}

func weekday(s string) (day int, ok bool) {
	const names = "sunmontuewedthufrisat"
	if i := strings.Index(names, strings.ToLower(s)); len(s) == 3 && i >= 0 && i%3 == 0 {
		return i / 3, true
	}
	day, err := strconv.Atoi(s)
	return day, err == nil && day >= 0 && day <= 7
}

// explain finds the field that an error is about.
func explain(fields []string, err error) error {
	if fields[0][0] == '@' {
		return fmt.Errorf("%q is not one of @yearly, @monthly, @weekly, @daily, @hourly and @every", fields[0])
	}
	first := len(parts) - len(fields)
	if first != 0 && first != 1 {
		return fmt.Errorf("it has %d fields; it needs five (minute, hour, day of month, month, day of week) or six (with seconds first)", len(fields))
	}
	for i, f := range fields {
		alone := make([]string, len(fields))
		for j := range alone {
			alone[j] = "*"
		}
		alone[i] = f
		_, err := readFields(alone)
		if err == nil {
			continue
		}
		part := parts[first+i]
		if errors.As(err, new(*strconv.NumError)) {
			return fmt.Errorf("field %d, the %s, is %q; possible are %s, in lists, ranges and steps", i+1, part.name, f, part.possible)
		}
		return fmt.Errorf("field %d, the %s, is %q: %w", i+1, part.name, f, err)
	}
	return err
}

// calendar is a specification in a zone. A zone is a row of segments, in each of which its clocks differ from UTC by one
// offset. Within a segment the ticks are those of a calendar without clock changes, moved by the offset.
type calendar struct {
	ticks    cron.Schedule // in UTC, for clocks that never change
	loc      *time.Location
	realTime bool // what the clocks repeat counts again, and what they leave out does not count
}

// Next walks the segments from the one that after is in.
func (c *calendar) Next(after time.Time) time.Time {
	at := after.In(c.loc)
	from := clock(at, offset(at)) // the tick is later on the segment's clocks
	for {
		start, end := at.ZoneBounds()
		if !end.IsZero() && !end.After(at) { // Go counts 365 days of a leap year by a zone's rule: on the last day the end is over
			end = at.Add(24 * time.Hour)
		}
		here := offset(at)
		if !start.IsZero() && !c.realTime {
			before := clock(start, offset(start.Add(-1))) // what the clocks showed last, before they changed
			if first := clock(start, here); first.After(before) && start.After(after) {
				// Ticks that the clocks leave out happen at the change.
				if n := c.ticks.Next(before.Add(-1)); !n.IsZero() && n.Before(first) {
					return start
				}
			} else if before.Add(-1).After(from) {
				from = before.Add(-1) // what the clocks repeat has been done
			}
		}
		n := c.ticks.Next(from)
		switch {
		case n.IsZero():
			return n
		case end.IsZero() || n.Before(clock(end, here)):
			return n.Add(-here).In(c.loc)
		}
		at = end.In(c.loc)
		from = clock(at, offset(at)).Add(-1)
	}
}

// clock is what clocks with the offset show at t, as if that were UTC.
func clock(t time.Time, offset time.Duration) time.Time { return t.UTC().Add(offset) }

func offset(t time.Time) time.Duration {
	_, seconds := t.Zone()
	return time.Duration(seconds) * time.Second
}
