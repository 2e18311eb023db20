package onceqcron

import (
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/stretchr/testify/require"
)

// What follows a time, by Parse's rules for changes of the clock.
func TestParse_ClockChanges(t *testing.T) {
	for _, c := range []struct {
		name, zone, spec, after string
		want                    []string
	}{
		{"a time that is left out", "America/New_York", "30 2 * * *", "2026-03-07T12:00:00-05:00", []string{"2026-03-08T03:00:00-04:00", "2026-03-09T02:30:00-04:00"}},
		{"the first that is left out", "America/New_York", "0 2 * * *", "2026-03-07T12:00:00-05:00", []string{"2026-03-08T03:00:00-04:00", "2026-03-09T02:00:00-04:00"}},
		{"two that are left out", "America/New_York", "10,40 2 * * *", "2026-03-07T12:00:00-05:00", []string{"2026-03-08T03:00:00-04:00", "2026-03-09T02:10:00-04:00"}},
		{"one that is left out, and one right after the gap", "America/New_York", "0 2,3 * * *", "2026-03-07T12:00:00-05:00", []string{"2026-03-08T03:00:00-04:00", "2026-03-09T02:00:00-04:00"}},
		{"one before the gap, and one in it", "America/New_York", "30 1,2 * * *", "2026-03-07T12:00:00-05:00", []string{"2026-03-08T01:30:00-05:00", "2026-03-08T03:00:00-04:00", "2026-03-09T01:30:00-04:00"}},
		{"every half hour over a gap", "America/New_York", "*/30 * * * *", "2026-03-08T01:10:00-05:00", []string{"2026-03-08T01:30:00-05:00", "2026-03-08T03:00:00-04:00", "2026-03-08T03:30:00-04:00"}},
		{"every hour over a gap", "America/New_York", "15 * * * *", "2026-03-08T01:10:00-05:00", []string{"2026-03-08T01:15:00-05:00", "2026-03-08T03:15:00-04:00"}},
		{"every two hours over a gap", "America/New_York", "0 */2 * * *", "2026-03-08T00:00:00-05:00", []string{"2026-03-08T04:00:00-04:00"}},
		{"a time that comes twice", "America/New_York", "30 1 * * *", "2026-10-31T12:00:00-04:00", []string{"2026-11-01T01:30:00-04:00", "2026-11-02T01:30:00-05:00"}},
		{"every half hour of an hour that comes twice", "America/New_York", "*/30 * * * *", "2026-11-01T00:50:00-04:00", []string{"2026-11-01T01:00:00-04:00", "2026-11-01T01:30:00-04:00", "2026-11-01T01:00:00-05:00", "2026-11-01T01:30:00-05:00", "2026-11-01T02:00:00-05:00"}},
		{"every half hour of all hours by their numbers", "America/New_York", "*/30 0-23 * * *", "2026-11-01T00:50:00-04:00", []string{"2026-11-01T01:00:00-04:00", "2026-11-01T01:30:00-04:00", "2026-11-01T02:00:00-05:00"}},
		{"every hour, one of which comes twice", "America/New_York", "15 * * * *", "2026-11-01T00:50:00-04:00", []string{"2026-11-01T01:15:00-04:00", "2026-11-01T01:15:00-05:00", "2026-11-01T02:15:00-05:00"}},
		{"@hourly as well", "America/New_York", "@hourly", "2026-11-01T00:50:00-04:00", []string{"2026-11-01T01:00:00-04:00", "2026-11-01T01:00:00-05:00"}},
		{"asked in the second of two hours", "America/New_York", "30 1 * * *", "2026-11-01T01:10:00-05:00", []string{"2026-11-02T01:30:00-05:00"}},
		{"asked between two that come twice", "America/New_York", "10,50 1 * * *", "2026-11-01T01:10:00-04:00", []string{"2026-11-01T01:50:00-04:00", "2026-11-02T01:10:00-05:00"}},
		{"after the hour that comes twice", "America/New_York", "0 1,2 * * *", "2026-11-01T00:00:00-04:00", []string{"2026-11-01T01:00:00-04:00", "2026-11-01T02:00:00-05:00", "2026-11-02T01:00:00-05:00"}},
		{"a gap in the south", "Australia/Sydney", "30 2 * * *", "2026-10-03T12:00:00+10:00", []string{"2026-10-04T03:00:00+11:00", "2026-10-05T02:30:00+11:00"}},
		{"twice in the south", "Australia/Sydney", "30 2 * * *", "2026-04-04T12:00:00+11:00", []string{"2026-04-05T02:30:00+11:00", "2026-04-06T02:30:00+10:00"}},
		{"a gap of half an hour", "Australia/Lord_Howe", "15 2 * * *", "2026-10-03T12:00:00+10:30", []string{"2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"}},
		{"half an hour twice", "Australia/Lord_Howe", "45 1 * * *", "2026-04-04T12:00:00+11:00", []string{"2026-04-05T01:45:00+11:00", "2026-04-06T01:45:00+10:30"}},
		{"a midnight that is left out", "America/Santiago", "0 0 * * *", "2026-09-05T12:00:00-04:00", []string{"2026-09-06T01:00:00-03:00", "2026-09-07T00:00:00-03:00"}},
		{"on one day of the year", "America/Santiago", "30 0 6 9 *", "2026-09-05T12:00:00-04:00", []string{"2026-09-06T01:00:00-03:00", "2027-09-06T00:30:00-03:00"}},
		{"a day that is left out", "Pacific/Apia", "0 12 30 12 *", "2011-12-28T00:00:00-10:00", []string{"2011-12-31T00:00:00+14:00", "2012-12-30T12:00:00+14:00"}},
		{"a zone of half hours", "Asia/Kolkata", "0 9 * * *", "2026-01-01T00:00:00+05:30", []string{"2026-01-01T09:00:00+05:30", "2026-01-02T09:00:00+05:30"}},
		{"the last day of a leap year, by a rule", "America/New_York", "0 12 * * *", "2040-12-30T10:00:00-05:00", []string{"2040-12-30T12:00:00-05:00", "2040-12-31T12:00:00-05:00", "2041-01-01T12:00:00-05:00"}},
		{"the same in the south", "Australia/Sydney", "30 9,23 * * *", "2040-12-31T12:00:00+11:00", []string{"2040-12-31T23:30:00+11:00", "2041-01-01T09:30:00+11:00", "2041-01-01T23:30:00+11:00"}},
		{"a leap day", "UTC", "0 0 29 2 *", "2026-01-01T00:00:00Z", []string{"2028-02-29T00:00:00Z", "2032-02-29T00:00:00Z"}},
		{"a leap day after 2100", "UTC", "0 0 29 2 *", "2096-03-01T00:00:00Z", []string{"2104-02-29T00:00:00Z"}},
		{"day of month or of week", "UTC", "0 0 13 * 5", "2026-02-01T00:00:00Z", []string{"2026-02-06T00:00:00Z", "2026-02-13T00:00:00Z", "2026-02-20T00:00:00Z"}},
		{"Sunday is 7", "UTC", "0 0 * * 7", "2026-02-01T00:00:00Z", []string{"2026-02-08T00:00:00Z"}},
		{"seconds", "UTC", "*/20 0 0 * * *", "2026-02-01T00:00:00Z", []string{"2026-02-01T00:00:20Z", "2026-02-01T00:00:40Z", "2026-02-02T00:00:00Z"}},
		{"the last day of a month", "UTC", "0 0 L * *", "2028-02-01T00:00:00Z", []string{"2028-02-29T00:00:00Z", "2028-03-31T00:00:00Z"}},
		{"the second Friday", "UTC", "0 0 * * FRI#2", "2026-02-01T00:00:00Z", []string{"2026-02-13T00:00:00Z", "2026-03-13T00:00:00Z"}},
		{"@hourly in capitals", "America/New_York", "@HOURLY", "2026-11-01T00:50:00-04:00", []string{"2026-11-01T01:00:00-04:00", "2026-11-01T01:00:00-05:00"}},
		{"every 90 minutes in capitals", "America/New_York", "@EVERY 90m", "2026-03-08T01:00:00-05:00", []string{"2026-03-08T03:30:00-04:00"}},
		{"every 90 minutes", "America/New_York", "@every 90m", "2026-03-08T01:00:00-05:00", []string{"2026-03-08T03:30:00-04:00"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			table, err := Parse(c.spec, c.zone)
			require.NoError(t, err)
			loc, err := time.LoadLocation(c.zone)
			require.NoError(t, err)
			at, err := time.Parse(time.RFC3339, c.after)
			require.NoError(t, err)
			for _, want := range c.want {
				at = table.Next(at)
				require.Equal(t, want, at.In(loc).Format(time.RFC3339))
			}
		})
	}
}

// The rules, said again by the minute: a tick is where the clocks match and have not been before, or where they jump over a
// match.
func TestParse_AgreesWithAWalkByMinutes(t *testing.T) {
	for _, zone := range []string{"America/New_York", "Australia/Lord_Howe", "America/Santiago", "Europe/London", "Africa/Casablanca"} {
		loc, err := time.LoadLocation(zone)
		require.NoError(t, err)
		for _, spec := range []string{"30 2 * * *", "0 0 * * *", "59 23 * * *", "15 1-3 * * *", "*/45 0-4 * * 0", "5 2 1-10 3,4,10,11 *"} {
			table, err := Parse(spec, zone)
			require.NoError(t, err)
			plain, err := Parse(spec, "UTC")
			require.NoError(t, err)
			matches := make(map[time.Time]bool)
			for at := plain.Next(time.Date(2025, 12, 30, 0, 0, 0, 0, time.UTC)); at.Year() < 2027; at = plain.Next(at) {
				matches[at.In(time.UTC)] = true
			}

			from := time.Date(2026, 1, 1, 0, 0, 0, 0, loc)
			var want, got []string
			shown := clock(from, offset(from)).Add(-time.Minute) // the latest that the clocks have shown
			for at := from; at.Year() == 2026; at = at.Add(time.Minute) {
				now := clock(at, offset(at))
				due := false
				for shown.Before(now) {
					shown = shown.Add(time.Minute)
					due = due || matches[shown]
				}
				if due {
					want = append(want, at.Format(time.RFC3339))
				}
			}
			for at := table.Next(from.Add(-time.Second)); at.Year() == 2026; at = table.Next(at) {
				got = append(got, at.Format(time.RFC3339))
			}
			require.Equal(t, want, got, "%s in %s", spec, zone)
		}
	}
}

func TestParse_BadSpecificationsPointAtTheField(t *testing.T) {
	for spec, want := range map[string]string{
		"":                   `the specification is empty`,
		"* * * *":            `it has 4 fields; it needs five (minute, hour, day of month, month, day of week) or six (with seconds first)`,
		"* 25 * * *":         `field 2, the hour, is "25"`,
		"0 0 0 32 * *":       `field 4, the day of month, is "32"`,
		"0 0 * FOO *":        `field 4, the month, is "FOO"`,
		"*/0 * * * *":        `field 1, the minute, is "*/0"`,
		"0 0 31 2 *":         `names no day that exists`,
		"@fortnightly":       `"@fortnightly" is not one of @yearly`,
		"@every":             `@every needs one duration`,
		"@every soon":        `"soon" is not a duration`,
		"@every 500ms":       `500ms is not a whole number of seconds`,
		"TZ=UTC * * * * *":   `put the time zone into Zone`,
		"0 0 * * FRI#6":      `field 5, the day of week, is "FRI#6"`,
		"0 2 * * XYZ":        `field 5, the day of week, is "XYZ"; possible are 0 to 7, SUN to SAT, FRI#2 and FRI#L, in lists, ranges and steps`,
		"0 0 MON * *":        `field 3, the day of month, is "MON"; possible are 1 to 31, L, L-2, 15W and LW, in lists, ranges and steps`,
		"0 0 * * FRI#X":      `field 5, the day of week, is "FRI#X"; possible are`,
		"*/x * * * *":        `field 1, the minute, is "*/x"; possible are 0 to 59, in lists`,
		"0 24 * * *":         `field 2, the hour, is "24": 24 is too large; possible are 0 to 23`,
		"0 1,99-5 * * *":     `field 2, the hour, is "1,99-5": 99 is too large; possible are 0 to 23`,
		"5-1 * * * *":        `field 1, the minute, is "5-1": the range 5-1 goes backwards; write 1-5, or 5-59,0-1 if it is to go over the end`,
		"9,50-10/20 * * * *": `field 1, the minute, is "9,50-10/20": the range 50-10 goes backwards; write 10-50, or 50-59,0-10 if`,
		"30-0 0 0 * * *":     `field 1, the second, is "30-0": the range 30-0 goes backwards`,
		"0 0 * * FRI-MON/4":  `field 5, the day of week, is "FRI-MON/4": step (4) must be less than range size`,
		"0 0 * * FRI/2":      `field 5, the day of week, is "FRI/2": step (2) must be less than range size (2)`,
		"0 0 * * MON-X/2":    `field 5, the day of week, is "MON-X/2"; possible are`,
		"? * * * *":          `field 1, the minute, is "?": ? is for the two fields of days; use *`,
		"0 ? * * *":          `field 2, the hour, is "?": ? is for`,
		"0 0 ?-5 * *":        `field 3, the day of month, is "?-5": a range begins with ?`,
	} {
		_, err := Parse(spec, "UTC")
		require.ErrorContains(t, err, want, spec)
	}
	_, err := Parse("* * * * *", "Europe/Atlantis")
	require.ErrorContains(t, err, `zone "Europe/Atlantis" is not known here`)
	_, err = Parse("* * * * *", "Local")
	require.EqualError(t, err, `onceqcron: zone "Local" is another one on every machine that fires; name the zone that is meant, such as Europe/Berlin`)
}

// What the library reads wrongly.
func TestParse_NamesListsAndRanges(t *testing.T) {
	t.Parallel()
	for spec, want := range map[string]string{
		"0 9 * * THU":     "2026-01-01 09:00",
		"0 9 * * thu":     "2026-01-01 09:00",
		"0 9 * * MON-THU": "2026-01-01 09:00",
		"0 9 * * THU#2":   "2026-01-08 09:00",
		"0 9 * MAR FRI#L": "2026-03-27 09:00",
		"0 0 LW * *":      "2026-01-30 00:00",
		"@DAILY":          "2026-01-02 00:00",
		"0 0 ? * MON":     "2026-01-05 00:00",
		"0 0 5 * ?":       "2026-01-05 00:00",
	} {
		timetable, err := Parse(spec, "UTC")
		require.NoError(t, err, spec)
		require.Equal(t, want, timetable.Next(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)).Format("2006-01-02 15:04"), spec)
	}
	for spec, want := range map[string]string{
		", * * * * *":  `field 1, the second, is ",": an element of the list is empty`,
		"0 1,,2 * * *": `field 2, the hour, is "1,,2": an element of the list is empty`,
		"*-5 * * * *":  `field 1, the minute, is "*-5": a range begins with *`,
	} {
		_, err := Parse(spec, "UTC")
		require.ErrorContains(t, err, want, spec)
	}
}

// A range of hours, days or months may go over the end.
func TestParse_RangesOverTheEnd(t *testing.T) {
	t.Parallel()
	for spec, want := range map[string][]string{
		"0 22-2 * * *":    {"01-01 01", "01-01 02", "01-01 22", "01-01 23", "01-02 00", "01-02 01"},
		"0 22-2/2 * * *":  {"01-01 02", "01-01 22", "01-02 00", "01-02 02"},
		"0 0 * * FRI-MON": {"01-02 00", "01-03 00", "01-04 00", "01-05 00", "01-09 00"},
		"0 0 * * 5-1":     {"01-02 00", "01-03 00", "01-04 00", "01-05 00", "01-09 00"},
		"0 0 * * 5-1/2":   {"01-02 00", "01-04 00", "01-09 00", "01-11 00"},
		"0 0 * * FRI-2/2": {"01-02 00", "01-04 00", "01-06 00", "01-09 00"},
		"0 0 * * 7-3/2":   {"01-04 00", "01-06 00", "01-11 00", "01-13 00"},
		"0 0 * * MON/2":   {"01-02 00", "01-05 00", "01-07 00", "01-09 00", "01-12 00"}, // and not on the 4th, a Sunday
		"0 0 * * 7/3":     {"01-03 00", "01-04 00", "01-07 00", "01-10 00"},
		"0 0 30-2 * *":    {"01-02 00", "01-30 00", "01-31 00", "02-01 00", "02-02 00", "03-01 00"},
		"0 0 1 NOV-FEB *": {"02-01 00", "11-01 00", "12-01 00", "01-01 00"},
	} {
		timetable, err := Parse(spec, "UTC")
		require.NoError(t, err, spec)
		at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		for _, w := range want {
			at = timetable.Next(at)
			require.Equal(t, w, at.Format("01-02 15"), spec)
		}
	}
}
