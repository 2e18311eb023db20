package onceq

import (
	"context"
	"fmt"

	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// Replace says what a job changes in the job that has its key already, if nobody has started that one: see Job.Replace.
type Replace uint8

// What can be replaced. Both together: ReplacePayload | ReplaceTime.
const (
	ReplacePayload Replace = 1 << iota // the payload and the metadata, and with them what later jobs with the key are compared with
	ReplaceTime                        // when it is due: RunAt or Delay count from this call, and without them it is due now
)

func (j *Job) checkReplace() error {
	switch {
	case j.Replace > ReplacePayload|ReplaceTime:
		return invalid("Replace", "is %d; use ReplacePayload and ReplaceTime", j.Replace)
	case j.Key == "" && !j.keyed:
		return invalid("Replace", "is set without a Key, by which the other job is found")
	case j.Strict:
		return invalid("Replace", "and Strict are both set; use one")
	}
	return nil
}

// notReplaced says why Replace did not change the job that r describes, if it is set.
func (j *Job) notReplaced(r Result) string {
	switch {
	case j.Replace == 0:
		return ""
	case r.State != StateWaiting && r.State != StateDelayed:
		return fmt.Sprintf("job %d is %s", r.ID, r.State)
	case j.Replace&ReplacePayload == 0:
		return "ReplacePayload is not set"
	}
	return fmt.Sprintf("job %d was started before, has another lane or limit, waits for others, or is being cancelled", r.ID)
}

// replaceable reports whether the job at place i may replace the one that r describes and whose fence has the
// fingerprint mark, or take its key because that one runs. Each is tried once: after that the answer is as for
// any other job.
func (s *settling) replaceable(i int, r Result, mark []byte) bool {
	replace, e := s.jobs[i].Replace, &s.all[i]
	_, tried := s.tried[i]
	if r.State == StateRunning {
		return s.jobs[i].Window == UntilStarted && !tried && fingerprint.SameKind(mark, e.fingerprint)
	}
	return replace != 0 && !tried && (r.State == StateWaiting || r.State == StateDelayed) && fingerprint.SameKind(mark, e.fingerprint) &&
		(replace&ReplacePayload > 0 || fingerprint.SamePayload(mark, e.fingerprint))
}

// replace changes the jobs that those at the given places may replace, of whose fences the fingerprints were read, and returns the
// places of those that did. The keys of jobs that run become free, where those that want them say so.
func (s *settling) replace(ctx context.Context, db DB, places []int, read map[int][]byte) (done []int, err error) {
	n := len(places)
	if n == 0 {
		return nil, nil
	}
	if s.tried == nil {
		s.tried = make(map[int]Result)
	}
	ids, byID := make([]int64, n), make(map[int64]int, n)
	scopes, keys, payloads, metadata, paths := make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	bytes, marks, were := make([][]byte, n), make([][]byte, n), make([][]byte, n)
	parts, ats, delays := make([]int16, n), make([]int64, n), make([]int64, n)
	for k, i := range places {
		e := &s.all[i]
		s.tried[i] = s.results[i]
		ids[k], byID[s.results[i].ID] = s.results[i].ID, i
		scopes[k], keys[k], metadata[k], paths[k] = e.header.scope, e.key, e.header.metadata, e.lane
		payloads[k], bytes[k], marks[k], were[k] = e.json, e.bytes, e.fingerprint, read[i]
		parts[k], delays[k] = int16(s.jobs[i].Replace), e.header.delay.Microseconds()
		if s.results[i].State == StateRunning {
			parts[k] = 4 // what runs leaves its key, and is not changed
		}
		if !e.header.at.IsZero() {
			ats[k] = e.header.at.UnixMicro()
		}
	}
	args := []any{ids, scopes, keys, payloads, bytes, metadata, marks, parts, ats, delays, paths, were}
	var delayed []bool
	err = s.q.store.SendBare(ctx, db, stmt.ReplaceJobs, args, pg.Row(&ids, &delayed))
	if err != nil {
		return nil, fmt.Errorf("onceq: replacing a job: %w", err)
	}
	for k, id := range ids {
		i := byID[id]
		s.results[i] = accepted(id, delayed[k])
		s.results[i].Duplicate, s.results[i].Replaced = true, true
		done = append(done, i)
	}
	return done, nil
}
