package main

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
)

const (
	inLine = formLine + "/of 1" // a lane whose limit is always 1
	inPair = formPair + "/of 1" // one whose limit changes
)

func second(n int) time.Time { return time.Unix(int64(n), 0) }

// soundLanes is a trail without a violation. In inLine, A and B wait; A becomes live, C comes, A hands over to B, B is redriven
// after it was cancelled, a promoter lets in C, which stops the lane, somebody decides, and B is let in. In inPair the limit
// becomes 2, and A and B are live together.
func soundLanes() []laneStep {
	return []laneStep{
		{What: "waits", Lane: inLine, Job: jobA, Due: second(1), Xact: 10},
		{What: "waits", Lane: inLine, Job: jobB, Due: second(1), Xact: 10},
		{What: "left", Lane: inLine, Job: jobA, Xact: 11},
		{What: "live", Lane: inLine, Job: jobA, Xact: 11, Began: second(2), At: second(2), Seen: "11:11:"},
		{What: "waits", Lane: inLine, Job: jobC, Due: second(2), Xact: 12},
		{What: "live", Lane: inLine, Job: jobB, Xact: 13, Began: second(3), At: second(3), Seen: "12:14:12"},
		{What: "left", Lane: inLine, Job: jobB, Xact: 13},
		{What: "gone", Lane: inLine, Job: jobA, Xact: 13},
		{What: "gone", Lane: inLine, Job: jobB, Xact: 14},
		{What: "waits", Lane: inLine, Job: jobB, Due: second(1), Xact: 15}, // committed after the snapshot that follows
		{What: "left", Lane: inLine, Job: jobC, Xact: 16},
		{What: "live", Lane: inLine, Job: jobC, Xact: 16, Began: second(4), At: second(4), Seen: "15:15:"},
		{What: "gone", Lane: inLine, Job: jobC, Xact: 17, Rule: onceq.StopLane},
		{What: "stops", Lane: inLine, Job: jobC, Xact: 17},
		{What: "decided", Lane: inLine, Job: jobC, Xact: 18},
		{What: "left", Lane: inLine, Job: jobB, Xact: 19},
		{What: "live", Lane: inLine, Job: jobB, Xact: 19, Began: second(5), At: second(5), Seen: "19:19:"},

		{What: "limiting", Lane: formPair + "/", N: 2, Xact: 20, At: second(1)},
		{What: "waits", Lane: inPair, Job: jobA, Due: second(1), Xact: 21},
		{What: "waits", Lane: inPair, Job: jobB, Due: second(1), Xact: 21},
		{What: "live", Lane: inPair, Job: jobB, Xact: 22, Began: second(3), At: second(3), Seen: "22:22:"},
		{What: "live", Lane: inPair, Job: jobA, Xact: 23, Began: second(3), At: second(3), Seen: "23:23:"},
		{What: "limited", Lane: formPair + "/", N: 2, Xact: 24, At: second(4)},
	}
}

func TestCheckLanes_ASoundTrailHasNoViolation(t *testing.T) {
	h := sound()
	h.Lanes = soundLanes()
	v := check(h)
	require.Empty(t, v.Violations)
	require.Equal(t, []int{6, 2, 1}, []int{v.Admitted, v.MostLive, v.Limits})
}

func TestCheckLanes_FindsEachViolation(t *testing.T) {
	for name, spoil := range map[string]func(s []laneStep) []laneStep{
		"a second job becomes live":          func(s []laneStep) []laneStep { return slices.Delete(s, 7, 8) },
		"one too many before another limit":  func(s []laneStep) []laneStep { s[17].At = second(4); return s },
		"one too many after a lowered limit": func(s []laneStep) []laneStep { s[17].N = 1; return s },
		"a limit of the lane's own comes first": func(s []laneStep) []laneStep {
			return append([]laneStep{{What: "limiting", Lane: inPair, N: 1}, {What: "limited", Lane: inPair, At: second(2)}}, s...)
		},
		"a later one is let in": func(s []laneStep) []laneStep {
			s[3].Job, s[2].Job, s[5].Job, s[6].Job, s[7].Job, s[8].Job = jobB, jobB, jobA, jobA, jobB, jobA
			return s
		},
		"an earlier one that came in time is passed": func(s []laneStep) []laneStep { s[11].Seen = "16:16:"; return s },
		"a dead job lets in the next one":            func(s []laneStep) []laneStep { s[16].Xact = 17; return s },
		"the lane goes on although a job stops it":   func(s []laneStep) []laneStep { s[16].Seen = "18:18:"; return s },
		"a job that waits again loses its place":     func(s []laneStep) []laneStep { s[9].Xact = 14; return s },
	} {
		h := sound()
		h.Lanes = spoil(soundLanes())
		v := check(h)
		require.NotEmpty(t, v.Violations[vLane], name)
		require.Len(t, v.Violations, 1, name)
	}
}
