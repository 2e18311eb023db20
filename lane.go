package onceq

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/onceq/onceq/internal/table"
)

// A lane is a line of jobs of which at most n are in the table jobs: one at a time, in order, unless SetLaneLimit says
// otherwise. The others wait in job_waits, where claims never look. No counter says how many are live; the rows do.
//
// Two ways lead out of job_waits. The functions of the schema that take jobs out of jobs (finish, give_back) put at most one of its lane
// in the place of each (hand_over): one out, one in, so the bound needs no lock. A promoter (internal/promoter) does what no completion can see:
// it locks one of a fixed number of rows in one statement, and counts in the next one.
//
// No wake-up is lost, because whatever may let a lane go on writes a row into lane_calls, in the same commit: a job that was
// enqueued or redriven, one that finished without a successor, another limit. A promoter deletes the calls that its snapshot
// has, in the same commit as what it admits. lab/model/lanes_test.go explores all of this but a replacement (Job.Replace), which lane_test.go forces.

// LaneRule says how a job behaves in its lane. Rules are combined with |. Without one, a job that failed keeps its place
// until it runs again, so that the lane stays in order, and the lane goes on after a job that is dead or held.
type LaneRule int16

// The rules of a lane.
const (
	// Overtake lets the other jobs of the lane by while this one waits for its next attempt, or was snoozed or rescheduled.
	Overtake LaneRule = 1 << iota

	// StopLane keeps the lane still when this job is dead or held, until somebody redrives, resolves or discards it.
	StopLane
)

// MaxLaneBytes is how long the name of a lane or of a limit may be, and MaxWeight the largest Job.Weight.
const (
	MaxLaneBytes = 256
	MaxWeight    = 1_000_000_000
)

// laneName gives a lane as the tables store it: family/name. The fields are what the caller calls these two.
func laneName(familyField, family, nameField, name string) (string, error) {
	if strings.Contains(family, "/") {
		return "", invalid(familyField, "is %q; it must not contain a slash, which separates it from the lane's name (it is the kind's name by default)", family)
	}
	if strings.Contains(family+name, table.LineSep) {
		return "", invalid(nameField, "contains a unit separator (U+001F), which is not possible")
	}
	return family + "/" + name, cmp.Or(checkName(familyField, family, MaxNameBytes), checkName(nameField, name, MaxLaneBytes))
}

// lane gives the job's lane and limit as the tables store them (limit.go), or "".
func (j *Job) lane() (string, error) {
	if j.Lane == "" && (j.LaneFamily != "" || j.LaneRule != 0) {
		return "", invalid("Lane", "is empty although LaneFamily or LaneRule is set; set Lane, or none of them")
	}
	if j.Lane == "" && j.Limit == "" {
		return "", j.checkWeight()
	}
	if j.LaneRule < 0 || j.LaneRule > Overtake|StopLane {
		return "", invalid("LaneRule", "is %d; use Overtake, StopLane, both, or neither", j.LaneRule)
	}
	var lane, limit string
	err := j.checkWeight()
	if j.Lane != "" && err == nil {
		lane, err = laneName("LaneFamily", cmp.Or(j.LaneFamily, j.Kind), "Lane", j.Lane)
	}
	if j.Limit != "" && err == nil {
		limit, err = limitLine("Limit", j.Limit, false)
		lane += table.LineSep + limit
		if j.Weight > 1 {
			lane += table.LineSep + strconv.Itoa(j.Weight)
		}
	}
	return lane, err
}

func (j *Job) checkWeight() error {
	switch {
	case j.Limit == "" && j.Weight != 0:
		return invalid("Weight", "is %d without a Limit, in which it would count; set Limit, or no Weight", j.Weight)
	case j.Weight < 0 || j.Weight > MaxWeight:
		return invalid("Weight", "is %d; 1 to 1,000,000,000 is possible, and 0 for 1", j.Weight)
	}
	return nil
}

// SetLaneLimit sets how many jobs of a lane may be live at once: waiting to be claimed, running, or waiting for their next
// attempt. family is Kind.LaneFamily, by default the kind's name. With an empty name the limit is for all lanes of the
// family that have none of their own. Without a limit it is 1; 0 lets no more jobs in. It takes effect when db commits.
// If more jobs than a lowered limit are live, they go on, also those that nobody has claimed yet, and no more become live until
// enough have finished. But a completion whose transaction was open at that time may let one more in when it commits.
//
// If n is larger than 1, a transaction that completes a job of the lane (Lease.Complete), or that has its first waiting job
// locked, and stays open holds up more than its own place: complete last in a transaction of your own.
//
// RemoveLaneLimit undoes it. A limit that lanes or kinds share is Job.Limit.
func (q *Queue) SetLaneLimit(ctx context.Context, db DB, family, name string, n int) error {
	if n < 0 || n > 1_000_000 {
		return invalid("n", "is %d; 0 to 1,000,000 is possible", n)
	}
	return setLane(ctx, q, db, family, name, &Limit{AtOnce: n})
}

// RemoveLaneLimit undoes SetLaneLimit: what holds then is the limit of the lane's family, if that was set, and otherwise 1. With
// an empty name it removes the limit of the family.
func (q *Queue) RemoveLaneLimit(ctx context.Context, db DB, family, name string) error {
	return setLane(ctx, q, db, family, name, nil)
}

func setLane(ctx context.Context, q *Queue, db DB, family, name string, limit *Limit) error {
	if _, err := laneName("family", family, "name", cmp.Or(name, "x")); err != nil {
		return err
	}
	if _, err := q.setLine(ctx, db, family+"/"+name, limit, false); err != nil {
		return fmt.Errorf("onceq: lane limit: %w", err)
	}
	return nil
}

// LaneLimit returns how many jobs of a lane may be live at once. With an empty name it is the limit of the lanes of the
// family that have none of their own.
func (q *Queue) LaneLimit(ctx context.Context, db DB, family, name string) (n int, err error) {
	if _, err := laneName("family", family, "name", cmp.Or(name, "x")); err != nil {
		return 0, err
	}
	if n, err = q.laneLimit(ctx, db, family+"/"+name); err != nil {
		return 0, fmt.Errorf("onceq: lane limit: %w", err)
	}
	return n, nil
}

func (q *Queue) laneLimit(ctx context.Context, db DB, lane string) (n int, err error) {
	err = q.store.QueryRow(ctx, db, `select `+table.LimitOf("$1::text"), []any{lane}, &n)
	return n, err
}
