package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVersionScript_IsThere(t *testing.T) {
	require.FileExists(t, versionScript)
}

// What did not run this time stays, and says so: other tests as they were, and other peers of the same test without a ratio.
func TestReport_KeepsWhatDidNotRun(t *testing.T) {
	at := func(date, test, peer string, value float64) *result {
		r := &result{Date: date, Test: test, Peer: peer, Settings: "default", Variant: "v"}
		if value > 0 {
			r.Unit, r.Median, r.Rounds = "jobs/s", value, []float64{value}
		}
		return r
	}
	before := report{Results: []*result{
		at("old", "C", "onceq", 50), at("old", "C", "River", 10), at("old", "C", "pg-boss", 5), at("old", "C", "asynq", 0), at("old", "D", "onceq", 7), at("old", "D", "River", 2),
	}}
	compare(before.Results)
	now := report{Results: []*result{at("new", "C", "onceq", 60), at("new", "C", "River", 0), at("new", "C", "asynq", 0)}}
	compare(now.Results)
	now.keep(before)
	var got []string
	for _, r := range now.Results {
		got = append(got, strings.Join([]string{r.Date, r.Test, r.Peer, number(r.Median), number(r.Ratio)}, " "))
	}
	require.Equal(t, []string{"new C onceq 60.0 1.00", "new C asynq 0 0", "old C River 10.0 0", "old C pg-boss 5.00 0", "old D onceq 7.00 1.00", "old D River 2.00 3.50"}, got)
	var out strings.Builder
	printReport(&out, now)
	require.Contains(t, out.String(), "Of an earlier run, and so without a ratio: River, default (old); pg-boss, default (old).")
	require.Equal(t, 1, strings.Count(out.String(), "Of an earlier run"))
}
