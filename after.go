package onceq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/enqueue"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
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

// resolved is what the After of one job in a call means: the ids, or the places of earlier jobs in the same call.
type resolved struct {
	links []enqueue.Link // without group
	here  []int
}

// resolveAfter finds the jobs that those in a call wait for, before anything is written. It returns nil if no job waits.
func resolveAfter(ctx context.Context, q *Queue, db DB, jobs []Job, rows []enqueue.Row) ([]resolved, error) {
	if !slices.ContainsFunc(jobs, func(j Job) bool { return len(j.After) > 0 }) {
		return nil, nil
	}
	own := make(map[JobRef]int) // the jobs of this call by their keys
	type place struct{ job, ref int }
	var asked []place
	var scopes, keys []string
	found := make([]resolved, len(jobs))
	for i := range jobs {
		for k, ref := range jobs[i].After {
			if ref.ID != 0 {
				found[i].links = append(found[i].links, enqueue.Link{Job: ref.ID})
				continue
			}
			if at, ok := own[ref]; ok {
				found[i].here = append(found[i].here, at)
				continue
			}
			asked, scopes, keys = append(asked, place{i, k}), append(scopes, ref.Scope), append(keys, ref.Key)
		}
		if r := &rows[i]; r.Key != "" {
			own[JobRef{Scope: r.Header.Scope, Key: r.Key}] = i
		}
	}
	field := func(p place) string { return afterField(len(jobs), p.job, p.ref) }
	var last int64
	err := q.store.Send(ctx, db, pg.AsIs, stmt.ReadRefs, []any{scopes, keys}, pg.Each(func(read pgx.Rows) error {
		var n int64
		var id *int64
		var state *table.FenceState
		l := enqueue.Link{}
		if err := read.Scan(&n, &id, &state, &l.Result, &last); err != nil || n == 0 {
			return err
		}
		p := asked[n-1]
		if id == nil {
			r := &rows[p.job]
			return noSuchJob(field(p), jobs[p.job].After[p.ref], JobRef{Scope: r.Header.Scope, Key: r.Key}, own)
		}
		if l.Job = *id; state.Job(nil).Finished() {
			l.State = state.Job(nil)
		}
		found[p.job].links = append(found[p.job].links, l)
		return nil
	}))
	if err != nil {
		var bad *InvalidError
		if errors.As(err, &bad) {
			return nil, err
		}
		return nil, fmt.Errorf("onceq: reading the jobs that another one is to wait for: %w", q.store.Told(err))
	}
	for i := range jobs {
		for k, ref := range jobs[i].After {
			if ref.ID > last {
				return nil, invalid(field(place{i, k}), "names job %d, and ids were drawn only up to %d", ref.ID, last)
			}
		}
	}
	return found, nil
}

// noSuchJob refuses a key in After that no job has yet. self is that of the job that waits; own are the jobs of the call by their keys.
func noSuchJob(field string, ref, self JobRef, own map[JobRef]int) error {
	switch at, here := own[ref]; {
	case ref == self:
		return invalid(field, "names %s, which is that of the job itself; a job cannot wait for itself", ref)
	case here:
		return invalid(field, "names %s, which is that of a later one in this call (the one with index %d); put that one before", ref, at)
	}
	return invalid(field, "names %s, which no job has; enqueue that job before, in the same transaction or earlier", ref)
}

func afterField(jobs, job, ref int) string {
	if jobs == 1 {
		return fmt.Sprintf("After[%d]", ref)
	}
	return fmt.Sprintf("jobs[%d].After[%d]", job, ref)
}

// linksOf gives what the jobs in a call wait for that were accepted.
func linksOf(found []resolved, answers []enqueue.Answer) (links []enqueue.Link) {
	for i, f := range found {
		if answers[i].Duplicate || answers[i].ID == 0 {
			continue
		}
		for _, l := range f.links {
			l.Group = answers[i].ID
			links = append(links, l)
		}
		for _, at := range f.here {
			links = append(links, enqueue.LinkTo(answers[i].ID, answers[at], false))
		}
	}
	return links
}
