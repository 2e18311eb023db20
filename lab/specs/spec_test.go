// Package specs compares what onceqcron reads with what other parsers of cron specifications read.
package specs

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/adhocore/gronx"
	"github.com/hashicorp/cronexpr"
	robfig "github.com/robfig/cron/v3"
	"pgregory.net/rapid"

	"github.com/onceq/onceq/onceqcron"
)

// other is a parser of somebody else's.
type other struct {
	name string
	// read returns what follows a time, or an error if the parser refuses the specification.
	read func(fields []string, zone *time.Location) (next func(time.Time) time.Time, err error)
	// means says why the parser means something else by a specification, or "".
	means func(fields []string) string
}

var robfigs = robfig.NewParser(robfig.SecondOptional | robfig.Minute | robfig.Hour | robfig.Dom | robfig.Month | robfig.Dow | robfig.Descriptor)

var others = []other{
	{
		name: "robfig",
		read: func(fields []string, zone *time.Location) (func(time.Time) time.Time, error) {
			s, err := robfigs.Parse("CRON_TZ=" + zone.String() + " " + strings.Join(fields, " "))
			if err != nil {
				return nil, err
			}
			return s.Next, nil
		},
		means: func([]string) string { return "" },
	},
	{
		name: "gronx",
		read: func(fields []string, zone *time.Location) (func(time.Time) time.Time, error) {
			spec := seven(fields)
			if !gronx.IsValid(spec) {
				return nil, errors.New("refused")
			}
			return func(after time.Time) time.Time {
				at, err := gronx.NextTickAfter(spec, after.In(zone), false)
				if err != nil {
					return time.Time{}
				}
				return at
			}, nil
		},
		means: func(fields []string) string {
			if dom, dow := days(fields); strings.HasPrefix(dom, "*/") && dow != "*" || strings.HasPrefix(dow, "*/") && dom != "*" {
				return "both days must match if one begins with *, as in Vixie's cron"
			}
			return ""
		},
	},
	{
		name: "cronexpr",
		read: func(fields []string, zone *time.Location) (func(time.Time) time.Time, error) {
			e, err := cronexpr.Parse(seven(fields))
			if err != nil {
				return nil, err
			}
			return func(after time.Time) time.Time { return e.Next(after.In(zone)) }, nil
		},
		means: func(fields []string) string {
			dom, dow := days(fields)
			switch {
			case dom == "*/1" && dow != "*" || dow == "*/1" && dom != "*":
				return "*/1 is a restriction there"
			case toSunday.MatchString(dow):
				return "a range that ends with SUN ends with SAT there"
			}
			return ""
		},
	},
}

var toSunday = regexp.MustCompile(`(?i)-(0|SUN)($|[,/])`)

// days are the two fields of days.
func days(fields []string) (ofMonth, ofWeek string) {
	if len(fields) < 5 {
		return "*", "*"
	}
	return fields[len(fields)-3], fields[len(fields)-1]
}

// seven adds the seconds and the years, without which some parsers guess what a field is.
func seven(fields []string) string {
	switch {
	case fields[0][0] == '@':
		return strings.Join(fields, " ")
	case len(fields) == 5:
		fields = append([]string{"0"}, fields...)
	}
	return strings.Join(fields, " ") + " *"
}

// part is a field, with its least and largest number.
type part struct {
	low, high int
	names     string
}

var parts = []part{
	{0, 59, ""}, {0, 59, ""}, {0, 23, ""}, {1, 31, ""},
	{1, 12, "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC"}, {0, 6, "SUN MON TUE WED THU FRI SAT"},
}

// field draws a field of a specification that all parsers read.
func field(t *rapid.T, p part) string {
	value := func(n int) string {
		if p.names == "" || rapid.Bool().Draw(t, "number") {
			return strconv.Itoa(n)
		}
		name := strings.Fields(p.names)[n-p.low]
		if rapid.Bool().Draw(t, "lower") {
			return strings.ToLower(name)
		}
		return name
	}
	// A step is less than what it steps over: onceqcron refuses 5-7/9, as a slip.
	step := func(low, high int) string {
		if high == low {
			return ""
		}
		return "/" + strconv.Itoa(rapid.IntRange(1, high-low).Draw(t, "step"))
	}
	element := func() string {
		low := rapid.IntRange(p.low, p.high).Draw(t, "from")
		high := rapid.IntRange(low, p.high).Draw(t, "to")
		switch rapid.IntRange(0, 3).Draw(t, "element") {
		case 0:
			return value(low) + "-" + value(high)
		case 1:
			return value(low) + "-" + value(high) + step(low, high)
		case 2:
			return strconv.Itoa(low) + step(low, p.high)
		}
		return value(low)
	}
	switch rapid.IntRange(0, 4).Draw(t, "sort") {
	case 0, 1:
		return "*"
	case 2:
		return "*" + step(p.low, p.high)
	case 3:
		return element()
	}
	var all []string
	for range rapid.IntRange(2, 4).Draw(t, "elements") {
		all = append(all, element())
	}
	return strings.Join(all, ",")
}

// draw draws a specification that all parsers read.
func draw(t *rapid.T) (fields []string) {
	if rapid.IntRange(0, 30).Draw(t, "a word") == 0 {
		return []string{rapid.SampledFrom([]string{"@yearly", "@monthly", "@weekly", "@daily", "@hourly"}).Draw(t, "word")}
	}
	for _, p := range parts[rapid.IntRange(0, 1).Draw(t, "first"):] {
		fields = append(fields, field(t, p))
	}
	return fields
}

var zones = []string{"UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Europe/Berlin"}

// differ compares twenty ticks after a time. In a zone it ends a day before its clocks change, because about that each parser has rules
// of its own.
func differ(ours onceqcron.Timetable, next func(time.Time) time.Time, at time.Time) error {
	_, end := at.ZoneBounds()
	if !end.IsZero() && end.After(at) { // it is not on the last day of a leap year, which Go does not count
		end = end.Add(-25 * time.Hour)
	}
	for range 20 {
		got := ours.Next(at)
		if got.Year() > 2099 { // cronexpr ends there
			return nil
		}
		if !end.IsZero() && !got.Before(end) { // do not ask: some others never answer where their clocks change
			return nil
		}
		want := next(at)
		if !want.Equal(got) {
			return fmt.Errorf("after %s comes %s here, and %s there", at, got, want.In(got.Location()))
		}
		if got.IsZero() {
			return nil
		}
		at = got.In(at.Location())
	}
	return nil
}

// moment draws a zone and a time in it.
func moment(t *rapid.T) (zone *time.Location, at time.Time) {
	zone, err := time.LoadLocation(rapid.SampledFrom(zones).Draw(t, "zone"))
	if err != nil {
		t.Fatal(err)
	}
	return zone, time.Unix(rapid.Int64Range(946684800, 2840140800).Draw(t, "after"), 0).In(zone) // 2000 to 2059
}

// What all read means the same to all: thousands of specifications, each with twenty ticks. A failure says which -rapid.seed has it.
func TestSpec_TicksAreThoseOfOtherParsers(t *testing.T) {
	for _, o := range others {
		t.Run(o.name, func(t *testing.T) {
			compared := 0
			rapid.Check(t, func(t *rapid.T) {
				for range 20 {
					fields := draw(t)
					zone, at := moment(t)
					if o.means(fields) != "" {
						continue
					}
					spec := strings.Join(fields, " ")
					ours, err := onceqcron.Parse(spec, zone.String())
					next, err2 := o.read(fields, zone)
					switch {
					case err2 != nil:
						t.Fatalf("%q is refused there: %v; here: %v", spec, err2, err)
					case err != nil && strings.HasSuffix(err.Error(), "names no day that exists"):
						if got := next(at); !got.IsZero() {
							t.Fatalf("%q: %v; there it comes at %s", spec, err, got)
						}
						continue
					case err != nil:
						t.Fatalf("%q is refused here: %v", spec, err)
					}
					if err := differ(ours, next, at); err != nil {
						t.Fatalf("%q: %v", spec, err)
					}
					compared++
				}
			})
			t.Logf("%d specifications mean the same to %s", compared, o.name)
		})
	}
}

// FuzzSpec looks for a specification that means something else to robfig/cron than here, or that only one of the two reads although no
// rule says why: go test -fuzz Spec ./specs
func FuzzSpec(f *testing.F) {
	for _, spec := range []string{
		"*/5 1-3 * * *", "10 0 22-2 * * FRI", "0 9 1,15 * MON-FRI", "@daily", "@every 90m", "5/10 * * jan-mar/2 *", "0 0 L * ?", "0 0 * * 7",
		"0 0 15W * FRI#2", "0 0 * * FRI/2", "0 0 31 2 *", "0 0 * * FRI-MON/2", "0 0 * * 7-2/2", "5-1 * * * *", "0 0 1,,2 * *", "*-5 * * * *", "? * * * *", "@EVERY 500ms",
		"57/10 * * * *", "+5 007 * * sun", "TZ=UTC * * * * *",
	} {
		f.Add(spec, int64(1_700_000_000))
	}
	f.Fuzz(func(t *testing.T, spec string, after int64) {
		fields := strings.Fields(spec)
		if len(fields) == 0 || len(spec) > 200 {
			return
		}
		at := time.Unix(946684800+(after%2524608000+2524608000)%2524608000, 0).UTC() // 2000 to 2079
		ours, err := onceqcron.Parse(spec, "UTC")
		next, err2 := others[0].read(fields, time.UTC)
		switch {
		case err == nil && err2 == nil:
			if err := differ(ours, next, at); err != nil {
				t.Fatalf("%q: %v", spec, err)
			}
		case err == nil && !onlyHere(fields):
			t.Fatalf("%q is read here, and refused there: %v", spec, err2)
		case err2 == nil && strings.HasSuffix(err.Error(), "names no day that exists"):
			if got := next(at); !got.IsZero() {
				t.Fatalf("%q: %v; there it comes at %s", spec, err, got)
			}
		case err2 == nil && !onlyThere(fields):
			t.Fatalf("%q is read there, and refused here: %v", spec, err)
		}
	})
}

var (
	dayWords = regexp.MustCompile(`(?i)^(.*,)?(L|LW|L-\d+|\d+W)(,.*)?$`)
	seventh  = regexp.MustCompile(`(^|[-,])\+?0*7($|[-,/])`)
)

// onlyHere reports whether a specification has what robfig/cron does not know: words for days, Sunday as 7, ranges over the end, and
// words such as @DAILY in capitals.
func onlyHere(fields []string) bool {
	if fields[0][0] == '@' {
		return fields[0] != strings.ToLower(fields[0])
	}
	dom, dow := days(fields)
	if dayWords.MatchString(dom) || strings.Contains(dow, "#") || seventh.MatchString(dow) {
		return true
	}
	return any(fields, func(place int, low, high string, _ int) bool {
		from, ok := number(place, low)
		to, ok2 := number(place, high)
		return place > 1 && ok && ok2 && from > to
	})
}

// onlyThere reports whether a specification has what onceqcron refuses as a slip: a zone, a duration below a second, an empty element, a
// range that begins with * or ?, a ? that is not for a day, and a step over the whole range.
func onlyThere(fields []string) bool {
	if strings.ToLower(fields[0]) == "@every" && len(fields) == 2 {
		d, err := time.ParseDuration(fields[1])
		return err == nil && (d < time.Second || d%time.Second != 0)
	}
	if strings.Contains(strings.Join(fields, ""), "=") {
		return true
	}
	return any(fields, func(place int, low, high string, step int) bool {
		from, ok := number(place, low)
		to, ok2 := number(place, high)
		star := low == "*" || low == "?"
		switch {
		case low == "" || star && high != "" || low == "?" && place != 3 && place != 5:
			return true
		case star:
			from, to = parts[place].low, parts[place].high
			if place == 5 {
				to = 7
			}
		case ok && high == "" && step > 0:
			to = parts[place].high
		case !ok || !ok2:
			return false
		}
		return step > to-from
	})
}

// any reports whether an element of a field is such a one: a number or name, or a range, with a step or 0.
func any(fields []string, is func(place int, low, high string, step int) bool) bool {
	first := len(parts) - len(fields)
	if first != 0 && first != 1 {
		return false
	}
	for i, f := range fields {
		for _, e := range strings.Split(f, ",") {
			e, step, _ := strings.Cut(e, "/")
			low, high, isRange := strings.Cut(e, "-")
			if isRange && high == "" {
				high = "-" // nothing is not a range without an end
			}
			n, _ := strconv.Atoi(step)
			if is(first+i, low, high, n) {
				return true
			}
		}
	}
	return false
}

func number(place int, s string) (int, bool) {
	for i, name := range strings.Fields(parts[place].names) {
		if strings.EqualFold(name, s) {
			return parts[place].low + i, true
		}
	}
	n, err := strconv.Atoi(s)
	return n, err == nil
}
