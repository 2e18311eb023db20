package onceq

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What the jobs of a call share is checked once, and what is made for them shares memory. Each job must come out as if it
// were alone.
func TestEncodeMany_EachJobComesOutAsIfItWereAlone(t *testing.T) {
	t.Parallel()
	base := Job{Kind: "k", Payload: map[string]int{"n": 1}}
	keyed := base
	keyed.Key = "a"
	changes := []func(*Job){
		func(*Job) {},
		func(j *Job) { j.Kind = "other" },
		func(j *Job) { j.Queue = "q" },
		func(j *Job) { j.Window = Forever },
		func(j *Job) { j.RunAt = time.Unix(1, 0) },
		func(j *Job) { j.Delay = time.Second },
		func(j *Job) { j.Priority = PriorityLow },
		func(j *Job) { j.MaxAttempts = 3 },
		func(j *Job) { j.Metadata = map[string]string{"a": "b"} },
		func(j *Job) { j.Metadata = map[string]string{"a": "c"} },
		func(j *Job) { j.Payload = []byte("bytes") },
		func(j *Job) { j.Payload = json.RawMessage(" { \"b\" : 1.0, \"a\": [1e2, 2] }\n") },
		func(j *Job) { j.Payload = json.RawMessage(nil) },
		func(j *Job) { j.Payload = strings.Repeat("long", 20_000) },
		func(j *Job) { j.Payload = "<&>\n" },
		func(j *Job) { j.Fields = []string{"n"} },
		func(j *Job) { j.IgnorePayload = true },
		func(j *Job) { j.keyed = true; j.Key = "b" },
	}
	var jobs []Job
	for _, from := range []Job{base, keyed} {
		for _, change := range changes {
			for _, scope := range []string{"", "s"} {
				j := from
				if change(&j); j.Key != "" {
					j.Scope = scope
					j.Key = fmt.Sprint(j.Key, 1000-len(jobs)) // not in order
				}
				jobs = append(jobs, j, j)
				if j.Key != "" {
					jobs[len(jobs)-1].Key += "again"
				}
			}
		}
	}
	all, sorted, withKeys, err := encodeMany(jobs)
	require.NoError(t, err)
	require.True(t, withKeys)
	for i := range jobs {
		alone, err := jobs[i].encode()
		require.NoError(t, err)
		require.Equal(t, alone, all[i], "%d: %+v", i, jobs[i])
	}
	require.Len(t, sorted, len(jobs))
	for k := range sorted[1:] {
		a, b := all[sorted[k]], all[sorted[k+1]]
		require.LessOrEqual(t, a.header.scope, b.header.scope)
		if a.header.scope == b.header.scope && b.key != "" {
			require.Less(t, a.key, b.key)
		}
	}

	jobs = append(jobs, keyed, keyed)
	_, _, _, err = encodeMany(jobs)
	var bad *InvalidError
	require.ErrorAs(t, err, &bad)
	require.Equal(t, fmt.Sprintf("jobs[%d].Key", len(jobs)-1), bad.Field)
	require.ErrorContains(t, err, fmt.Sprintf("jobs[%d]", len(jobs)-2))
}
