package onceq

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
)

// A lane is a line of jobs of which at most n are in the table jobs: one at a time, in order, unless SetLaneLimit says
// otherwise. The others wait in job_waits, where claims never look. No counter says how many are live; the rows do.
//
// Two ways lead out of job_waits. The functions of the schema that take jobs out of jobs (finish, give_back) put at most one of its lane
// in the place of each (hand_over): one out, one in, so the bound needs no lock. A promoter (promoter.go) does what no completion can see:
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
	if strings.Contains(family+name, lineSep) {
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
		lane += lineSep + limit
		if j.Weight > 1 {
			lane += lineSep + strconv.Itoa(j.Weight)
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

// laneSlot is the row of lane_locks that a lane belongs to. It must never change while there are jobs: two promoters would
// then count one lane at once. A server in FIPS mode has no md5, and this reads the lane's bytes without a function that is not immutable,
// which Citus would refuse: backslashes alone mean something to decode.
func laneSlot(lane string) string {
	return `(pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.decode(pg_catalog.replace(` + lane + `, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint`
}

// dueIn gives the ids of the first n jobs that wait for a lane or a limit and whose time has come, with the end of the select around
// it. It looks through each priority by itself: the index has the time behind that, and delayed jobs would be read otherwise.
func dueIn(lane, n string) string {
	return `(values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
          cross join lateral (
                select id from onceq.job_waits
                 where lane = ` + lane + ` and priority = p.priority and run_at <= statement_timestamp()
                 order by run_at, id
                 limit ` + n + `) w
          limit ` + n
}

// liveIn gives the live jobs j of a lane or a limit, and those that have the lane's place and wait for their limit. A place
// without its job counts for nothing.
func liveIn(lane string) string {
	return `onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and ` + placeOfJob + `
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and ` + placeOfWait + `
               offset 0) j
         where p.lane = ` + lane
}

// A row of lane_places belongs to a job if these hold for the job's row. "is distinct from" does not imply that the lane is not
// null, and so does not offer the planner job_waits_lane for a look-up by id.
const (
	placeOfJob  = `(lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, ` + sqlSep + `)))`
	placeOfWait = `lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || ` + sqlSep + `)`
)

// isLive says whether place p has its job.
const isLive = `(exists (select from onceq.jobs where id = p.id and ` + placeOfJob + ` offset 0)
                  or exists (select from onceq.job_waits where id = p.id and ` + placeOfWait + ` offset 0))`

// liveCount is how many jobs have places of a lane or a limit that may have n. Nobody counts those that may have any number: 0.
func liveCount(lane, n string) string {
	return `(select count(*) as n from onceq.lane_places p where p.lane = ` + lane + ` and ` + n + ` < ` + sqlNoCap + ` and ` + isLive + ` offset 0)`
}

// waitingIn counts the jobs that wait for a lane or a limit: those that are due, and since when the first of them is, and those that
// are not due yet, both up to most. Each priority is looked at by itself, as in dueIn: else those that are due may stand behind
// delayed ones of a higher priority.
func waitingIn(lane, most string) string {
	return `(select least(count(*) filter (where due), ` + most + `) as waiting, least(count(*) filter (where not due), ` + most + `) as delayed, pg_catalog.min(due_at) filter (where due) as oldest
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select coalesce(due_at, run_at) as due_at, run_at <= statement_timestamp() as due
                 from onceq.job_waits where lane = ` + lane + ` and priority = p.priority order by run_at, id limit ` + most + `) w)`
}

// anyDue says that a job waits for a lane or a limit whose time has come.
func anyDue(lane string) string {
	return `exists (select from ` + dueIn(lane, "1") + ` offset 0)`
}

// stopsOf gives what stops a lane.
func stopsOf(lane string) string { return `onceq.lane_stops s where s.lane = ` + lane }

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
	return q.setLane(ctx, db, family, name, &Limit{AtOnce: n})
}

// RemoveLaneLimit undoes SetLaneLimit: what holds then is the limit of the lane's family, if that was set, and otherwise 1. With
// an empty name it removes the limit of the family.
func (q *Queue) RemoveLaneLimit(ctx context.Context, db DB, family, name string) error {
	return q.setLane(ctx, db, family, name, nil)
}

func (q *Queue) setLane(ctx context.Context, db DB, family, name string, limit *Limit) error {
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
	err = q.queryRow(ctx, db, `select `+limitOf("$1::text"), []any{lane}, &n)
	return n, err
}

// limitOf is how many jobs of a lane or a limit may be live at once.
func limitOf(lane string) string {
	return `coalesce((select n from onceq.lane_limits where lane = ` + lane + `),
                 (select n from onceq.lane_limits where lane = ` + familyOf(lane) + `), 1)`
}

// waitBefore counts the due jobs of lane or limit $1 before one with priority $4, time $5 and id $2, up to
// $3, or says something else of them.
func waitBefore(what string) string {
	return `(select ` + what + `
          from (select path from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
                 cross join lateral (
                       select path from onceq.job_waits
                        where lane = $1::text and priority = p.priority
                          and run_at <= case when p.priority = $4::smallint then least($5::timestamptz, statement_timestamp()) else statement_timestamp() end
                          and (p.priority < $4::smallint or run_at < $5::timestamptz or id < $2::bigint)
                        order by run_at, id
                        limit $3::int) w
                 where p.priority <= $4::smallint
                 limit $3::int) w)`
}

// readLane gives how many jobs of lane $1 may be live, how many are, the
// jobs that stop it, the first ones whose time has come, how many wait before a job with these priority, time and id, and which have the places.
var readLane = `
select ` + limitOf("$1::text") + `,
       (select count(*) from (select from ` + liveIn("$1::text") + ` limit ` + limitOf("$1::text") + `) l),
       array(select s.id from ` + stopsOf("$1::text") + ` order by s.id limit 10),
       array(select w.id from ` + dueIn("$1::text", "least($3::int, "+limitOf("$1::text")+")") + `),
       ` + waitBefore("count(*)") + `,
       ` + holdersColumns + `
  from ` + holdersOf("$1::text", "true")

// firstOf names the first of n jobs that are live.
func firstOf(ids []int64, n int) string {
	if more := n - len(ids); more > 0 {
		return fmt.Sprintf("%d and %d more, which are live", ids, more)
	}
	return fmt.Sprintf("%d, which %s live", ids, either(len(ids), "is", "are"))
}

// comeFirst says of a job that may go on how many come before it.
func comeFirst(n int) string {
	if n == 0 {
		return "it is the next"
	}
	return atLeast(n, "job comes", "jobs come") + " before it"
}

// lane explains a job that waits for its lane.
func (x *explaining) lane(ctx context.Context) error {
	j := &x.e.Job
	r := Reason{Cause: CauseLane}
	var live int
	var stops, next []int64
	var p holders
	args := []any{j.Lane, j.ID, StatsCap, int16(j.Priority), j.RunAt}
	if err := x.q.send(ctx, x.db, reading, readLane, args, row(append([]any{&r.Slots, &live, &stops, &next, &r.Before}, p.dest()...)...)); err != nil {
		return fmt.Errorf("onceq: explain: %w", err)
	}
	r.Ahead = p.ids
	if j.RunAt.After(x.e.At) {
		x.notDue()
	}
	switch {
	case len(stops) > 0:
		r.Ahead = stops
		r.Text = fmt.Sprintf("its lane %q stands still, because of the dead or held jobs %d", j.Lane, stops)
		r.Advice = "redrive them, resolve their effects, or discard them; the lane then goes on"
	case r.Slots == 0:
		r.Text, r.Advice = fmt.Sprintf("its lane %q stands still, because its limit is 0", j.Lane), raiseLimit
	case live >= r.Slots:
		r.Text = fmt.Sprintf("it waits for its lane %q, of which %d may be live at once: behind %s%s", j.Lane, r.Slots, firstOf(r.Ahead, live), andOthers(r.Before))
		r.Advice = "if one of them hangs, its explanation says where it runs; a higher limit lets more of them be live, and gives up their order"
		x.heldAhead(&r, &p)
	case x.lock != nil:
		return nil
	default:
		if room := r.Slots - live; r.Before >= room {
			// Nobody passes the next ones of a lane, also where somebody has one of them locked.
			switch first, locked, err := x.locked(ctx, lockOld, next[:min(len(next), room)]...); {
			case err != nil:
				return err
			case locked:
				x.e.add(first)
				return nil
			}
		}
		r.Text = fmt.Sprintf("its lane %q has room, and %s: a worker lets them in within a poll", j.Lane, comeFirst(r.Before))
		if j.Limit != "" {
			r.Text = fmt.Sprintf("its lane %q has room, and %s: a worker lets them go on within a poll, and it then needs its share of limit %q", j.Lane, comeFirst(r.Before), j.Limit)
		}
		x.room = len(x.e.Reasons) + 1
		r.Advice = "if it stays so, no worker is running: start one; or a trigger or a constraint of your own refuses one of them, and a worker's log says why"
	}
	x.e.add(r)
	if j.Limit == "" {
		return nil
	}
	return x.limitThen(ctx, r.Ahead)
}
