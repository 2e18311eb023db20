package onceq

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/onceq/onceq/internal/enqueue"
)

// A job that waits for others is a follower, those are its members, and together they are a group, whose id is the
// follower's. There is no counter: job_members has a row for each member, and the statement that ends a member writes its
// state there, together with a row in lane_calls (lane.go). The follower stands in job_waits, alone in a line of its own,
// whose name is a unit separator and its id in 19 digits, so that the order of the names is that of the ids. A promoter that
// finds the call lets it go on if no member is unfinished.
//
// No wake-up is lost, because each end leaves a call. A job that somebody waits for has a bit in its lane_rule, which a claim
// brings along: so the statements that end other jobs do not know of groups. A job that is enqueued with After may wait for
// one that a worker has already claimed without the bit. Its row in job_members is then "not told", and promoters look for
// its end (stmt.SweepMembers). All others can be told: whoever wrote the row had the job's row locked, so that it was claimed, or
// otherwise ended, after that.
//
// Two things may not cross: a look that finds all members done, and a Redrive that makes one of them unfinished. Both lock
// the follower's row, and a promoter looks in a later statement than the one that locks. lab/model/groups_test.go explores
// all of this.

// JobRef names a job: by its ID, or by its Scope and Key, both. The scope of a job is its kind's name unless it says otherwise;
// Kind.Ref fills in both from a payload.
type JobRef struct {
	ID         int64
	Scope, Key string
}

func (r JobRef) String() string {
	if r.ID != 0 {
		return fmt.Sprintf("job %d", r.ID)
	}
	return fmt.Sprintf("key %q in scope %q", r.Key, r.Scope)
}

// Ref names the job with the key that the kind derives from a payload, for Job.After. A kind without a Key has none.
func (k Kind[P]) Ref(payload P) JobRef {
	j := k.Job(payload)
	return JobRef{Scope: cmp.Or(j.Scope, j.Kind), Key: j.Key}
}

// DeadRule says what becomes of a job that waits for others (Job.After) when one of them is dead. In any case it waits until
// none of the others is unfinished or held. One that was cancelled or discarded counts as finished.
type DeadRule int16

// The rules for dead members.
const (
	// DeadWait waits until somebody redrives, resolves or discards the dead job.
	DeadWait DeadRule = iota

	// DeadRun runs the job anyway. Lease.Members says which are dead.
	DeadRun

	// DeadCancel cancels the job, as Cancel does, if another one is dead or was cancelled when all are finished.
	DeadCancel
)

func (r DeadRule) String() string {
	switch r {
	case DeadWait:
		return "wait"
	case DeadRun:
		return "run"
	case DeadCancel:
		return "cancel"
	}
	return fmt.Sprintf("DeadRule(%d)", int16(r))
}

// MarshalText returns the rule's name. It is used for JSON too.
func (r DeadRule) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// checkAfter refuses what After cannot be.
func (j *Job) checkAfter() error {
	follows := j.follows || len(j.After) > 0
	switch {
	case j.IfDead < DeadWait || j.IfDead > DeadCancel:
		return invalid("IfDead", "is %d; use DeadWait, DeadRun or DeadCancel", j.IfDead)
	case !follows && j.IfDead != 0:
		return invalid("IfDead", "is set for a job that waits for no others; set After, or not IfDead")
	case follows && j.Replace != 0:
		return invalid("Replace", "is set for a job that waits for others, which cannot replace one; leave out Replace, or After")
	}
	for i, ref := range j.After {
		if err := ref.check(fmt.Sprintf("After[%d]", i)); err != nil {
			return err
		}
	}
	return nil
}

func (r JobRef) check(field string) error {
	switch {
	case r.ID != 0 && (r.Key != "" || r.Scope != ""):
		return invalid(field, "has an ID and a Scope or a Key; use the ID, or Scope and Key")
	case r.ID < 0:
		return invalid(field, "has the ID %d; ids of jobs are positive", r.ID)
	case r.ID > 0:
		return nil
	case r.Key == "" && r.Scope != "":
		return invalid(field, "has the Scope %q and no Key; Ref is for kinds that have a Key, so set the ID of the job instead", r.Scope)
	case r.Key == "":
		return invalid(field, "is empty; set the ID of a job, or its Scope and Key")
	}
	return cmp.Or(checkName(field+".Scope", r.Scope, MaxScopeBytes), checkName(field+".Key", r.Key, MaxKeyBytes))
}

// resolveAfter finds the jobs that those in a call wait for, before anything is written. It returns nil if no job waits.
func resolveAfter(ctx context.Context, q *Queue, db DB, jobs []Job, rows []enqueue.Row) ([]enqueue.Found, error) {
	if !slices.ContainsFunc(jobs, func(j Job) bool { return len(j.After) > 0 }) {
		return nil, nil
	}
	after := make([][]enqueue.Ref, len(jobs))
	for i := range jobs {
		for _, ref := range jobs[i].After {
			after[i] = append(after[i], enqueue.Ref(ref))
		}
	}
	found, none, err := q.intake.Find(ctx, db, rows, after)
	if none == nil {
		return found, err
	}
	ref := jobs[none.Job].After[none.Ref]
	field := fmt.Sprintf("After[%d]", none.Ref)
	if len(jobs) > 1 {
		field = fmt.Sprintf("jobs[%d].%s", none.Job, field)
	}
	switch {
	case ref.ID != 0:
		return nil, invalid(field, "names job %d, and ids were drawn only up to %d", ref.ID, none.Last)
	case none.At == none.Job:
		return nil, invalid(field, "names %s, which is that of the job itself; a job cannot wait for itself", ref)
	case none.At >= 0:
		return nil, invalid(field, "names %s, which is that of a later one in this call (the one with index %d); put that one before", ref, none.At)
	}
	return nil, invalid(field, "names %s, which no job has; enqueue that job before, in the same transaction or earlier", ref)
}
