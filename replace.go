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

// parts says what the job at place i may change in the one that r describes and whose fence has the fingerprint
// mark: the bits of Replace, and 4 to wait for it or to take its key (UntilStarted). Each job is tried once:
// after that the answer is as for any other.
func (s *settling) parts(i int, r Result, mark []byte) (parts int16) {
	j, e := &s.jobs[i], &s.all[i]
	if s.tried[i].ID == r.ID || r.State.Finished() || !fingerprint.SameKind(mark, e.fingerprint) {
		return 0
	}
	if j.Window == UntilStarted {
		parts = 4
	}
	may := j.Replace&ReplacePayload > 0 || fingerprint.SamePayload(mark, e.fingerprint)
	if may && (r.State == StateWaiting || r.State == StateDelayed) {
		parts |= int16(j.Replace)
	}
	return parts
}

// replace changes the jobs that those at the given places may change, of whose fences the fingerprints were
// read. It answers for those that did, and for those whose job waits for the caller's commit. The other jobs
// have left their keys, or were started in between.
func (s *settling) replace(ctx context.Context, db DB, places []int, read map[int][]byte) (answered []int, err error) {
	n := len(places)
	if s.tried == nil {
		s.tried = make(map[int]Result)
	}
	ids, byID := make([]int64, n), make(map[int64]int, n)
	scopes, keys, payloads, metadata, paths := make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	bytes, marks, were := make([][]byte, n), make([][]byte, n), make([][]byte, n)
	parts, ats, delays := make([]int16, n), make([]int64, n), make([]int64, n)
	for k, i := range places {
		e := &s.all[i]
		parts[k] = s.parts(i, s.results[i], read[i])
		s.tried[i] = s.results[i]
		ids[k], byID[s.results[i].ID] = s.results[i].ID, i
		scopes[k], keys[k], metadata[k], paths[k] = e.header.scope, e.key, e.header.metadata, e.lane
		payloads[k], bytes[k], marks[k], were[k] = e.json, e.bytes, e.fingerprint, read[i]
		ats[k], delays[k] = e.header.due(), e.header.delay.Microseconds()
	}
	args := []any{ids, scopes, keys, payloads, bytes, metadata, marks, parts, ats, delays, paths, were}
	var changed, kept []int64
	var delayed []bool
	err = s.q.store.SendBare(ctx, db, stmt.ReplaceJobs, args, pg.Row(&changed, &delayed, &kept))
	if err != nil {
		return nil, fmt.Errorf("onceq: replacing a job: %w", err)
	}
	for k, id := range changed {
		r := accepted(id, delayed[k])
		r.Duplicate, r.Replaced = true, true
		s.answer(byID[id], r, s.all[byID[id]].fingerprint)
		answered = append(answered, byID[id])
	}
	for _, id := range kept {
		if i := byID[id]; !s.results[i].Replaced {
			s.answer(i, s.tried[i], read[i])
			answered = append(answered, i)
		}
	}
	return answered, nil
}
