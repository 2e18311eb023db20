package onceq

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"
)

// A lane is a line of jobs of which at most n are in the table jobs: one at a time, in order, unless SetLaneLimit says
// otherwise. The others wait in job_waits, where claims never look. No counter says how many are live; the rows do.
//
// Two ways lead out of job_waits. The statement that takes a finished job out of jobs puts at most one of its lane in its
// place (handOver): one out, one in, so the bound needs no lock. A promoter (promoter.go) does what no completion can see:
// it locks one of a fixed number of rows in one statement, and counts in the next one.
//
// No wake-up is lost, because whatever may let a lane go on writes a row into lane_calls, in the same commit: a job that was
// enqueued or redriven, one that finished without a successor, another limit. A promoter deletes the calls that its snapshot
// has, in the same commit as what it admits. lab/model/lanes_test.go explores all of this.

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

const sqlStops = `lane_rule >= 2` // StopLane

// MaxLaneBytes is the limit of a lane's name.
const MaxLaneBytes = 256

// laneName gives a lane as the tables store it: family/name.
func laneName(family, name string) (string, error) {
	if strings.Contains(family, "/") {
		return "", invalid("LaneFamily", "is %q; it must not contain a slash, which separates it from the lane's name (it is the kind's name by default)", family)
	}
	return family + "/" + name, cmp.Or(checkName("LaneFamily", family, MaxNameBytes), checkName("Lane", name, MaxLaneBytes))
}

// lane gives the job's lane as the tables store it, or "".
func (j *Job) lane() (string, error) {
	if j.Lane == "" {
		if j.LaneFamily != "" || j.LaneRule != 0 {
			return "", invalid("Lane", "is empty although LaneFamily or LaneRule is set; set Lane, or none of them")
		}
		return "", nil
	}
	if j.Replace != 0 {
		return "", invalid("Replace", "is set for a job with a Lane, which cannot replace another yet; set one of them")
	}
	if j.LaneRule < 0 || j.LaneRule > Overtake|StopLane {
		return "", invalid("LaneRule", "is %d; use Overtake, StopLane, both, or neither", j.LaneRule)
	}
	return laneName(cmp.Or(j.LaneFamily, j.Kind), j.Lane)
}

// laneSlot is the row of lane_locks that a lane belongs to. It must never change while there are jobs: two promoters would
// then count one lane at once.
func laneSlot(lane string) string {
	return `('x' || left(md5(` + lane + `), 1))::bit(4)::int::smallint`
}

// laneHead is for a lateral join to r: the first jobs of lane r.lane whose time has come, at most r.n.
const laneHead = `
   cross join lateral (
         select w.id
           from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
          cross join lateral (
                select id from onceq.job_waits
                 where lane = r.lane and priority = p.priority and run_at <= statement_timestamp()
                 order by run_at, id
                 limit r.n) w
          limit r.n) w`

// admitWaits takes the jobs in head out of job_waits, if nobody has them locked, and makes them live. Nobody takes the next
// one in place of one that is locked: whoever has it may roll back, and it would have been overtaken.
const admitWaits = `
ours as materialized (
  select w.id from head h cross join lateral (
         select id from onceq.job_waits where id = h.id for update skip locked) w
),
moved as (
  delete from onceq.job_waits w using ours o where w.id = any (array[o.id])
  returning w.*
),
job as (
  insert into onceq.jobs (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                          payload, payload_bytes, metadata, errors, identity, lane, lane_rule)
  select id, statement_timestamp(), created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
         payload, payload_bytes, metadata, errors, identity, lane, lane_rule
    from moved
)`

// handOver follows the jobs in gone, which have left jobs, by the next ones of their lanes. Where it does not, it leaves a
// call: there is none, it is locked, the limit was lowered, or the transaction's snapshot is older than the statement.
var handOver = `
freed as materialized (
  select lane, count(*) as n from gone where lane is not null group by lane
),
head as materialized (
  select w.id
    from freed r` + laneHead + `
   where current_setting('transaction_isolation') = 'read committed'
     and not exists (select from gone g where g.lane = r.lane and g.` + sqlStops + ` and g.state in (` + sqlJobDead + `, ` + sqlJobHeld + `))
     and not exists (select from onceq.job_history h where h.lane = r.lane and h.` + sqlStops + ` and h.state in (` + sqlJobDead + `, ` + sqlJobHeld + `) offset 0)
     and not exists (select from onceq.lane_limits l where l.lane = any (array[r.lane, split_part(r.lane, '/', 1) || '/']) and l.lowered offset 0)
),` + admitWaits + `,
call as (
  insert into onceq.lane_calls (slot, due, lane)
  select ` + laneSlot("lane") + `, statement_timestamp(), lane from freed f
   where f.n > (select count(*) from moved m where m.lane = f.lane)
)`

// wakeMoved is a column that wakes workers for the jobs in moved, as Enqueue does.
func wakeMoved(place, own string) string {
	return `(select coalesce(sum(onceq.wake(m.queue, m.jobs, ` + place + `::bigint, ` + own + `)), 0)::bigint
          from (select queue, count(*) as jobs from moved group by queue) m
         where exists (select from onceq.waiters w where w.idle_until > statement_timestamp()))`
}

// withLane adds the lane to the history that a statement writes. The statements for jobs without a lane do not name it.
func withLane(history string) string {
	return strings.NewReplacer("identity, result, errors)", "identity, result, errors, lane, lane_rule)",
		appendError+"\n", appendError+", lane, lane_rule\n",
		"excluded.result, excluded.errors)", "excluded.result, excluded.errors, excluded.lane, excluded.lane_rule)").Replace(history)
}

// SetLaneLimit sets how many jobs of a lane may be live at once: waiting to be claimed, running, or waiting for their next
// attempt. family is Kind.LaneFamily, by default the kind's name. With an empty name the limit is for all lanes of the
// family that have none of their own. Without a limit it is 1; 0 lets no more jobs start. It takes effect when db commits.
// If more jobs than a lowered limit are live, they run on, and none starts until enough have finished.
//
// A limit for a whole kind is that of a lane that all of its jobs have.
func (q *Queue) SetLaneLimit(ctx context.Context, db DB, family, name string, n int) error {
	const set = `
with limits as (
  insert into onceq.lane_limits (lane, n, lowered) values ($1::text, $2::int, true)
  on conflict (lane) do update set n = excluded.n, lowered = true
),
calls as (
  insert into onceq.lane_calls (slot, due, lane) values ($3::smallint, statement_timestamp(), $1::text), (-1, statement_timestamp(), '?')
)
select 1`
	switch {
	case n < 0 || n > 1_000_000:
		return invalid("n", "is %d; 0 to 1,000,000 is possible", n)
	case db == nil:
		return errNoDB
	}
	lane, err := laneName(family, cmp.Or(name, "x"))
	if err != nil {
		return err
	}
	slot := -1
	if name == "" {
		lane = family + "/"
	} else if err := q.queryRow(ctx, db, `select `+laneSlot("$1::text"), []any{lane}, &slot); err != nil {
		return fmt.Errorf("onceq: lane limit: %w", err)
	}
	if err := q.guarded(ctx, db, set, []any{lane, n, slot}, nil); err != nil {
		return fmt.Errorf("onceq: lane limit: %w", err)
	}
	return nil
}

// LaneLimit returns how many jobs of a lane may be live at once. With an empty name it is the limit of the lanes of the
// family that have none of their own.
func (q *Queue) LaneLimit(ctx context.Context, db DB, family, name string) (n int, err error) {
	if _, err := laneName(family, cmp.Or(name, "x")); err != nil {
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

// limitOf is the limit of a lane.
func limitOf(lane string) string {
	return `coalesce((select n from onceq.lane_limits where lane = ` + lane + `),
                 (select n from onceq.lane_limits where lane = split_part(` + lane + `, '/', 1) || '/'), 1)`
}

// lane explains a job that waits for its lane.
func (x *explaining) lane(ctx context.Context) error {
	const read = `
select array(select id from onceq.jobs where lane = $1::text order by id limit 10),
       (select leased_until from onceq.jobs where lane = $1::text and leased_until > statement_timestamp() order by id limit 1),
       array(select id from onceq.job_history where lane = $1::text and ` + sqlStops + ` and state in (` + sqlJobDead + `, ` + sqlJobHeld + `) order by id limit 10),
       (select count(*) from (select from onceq.job_waits
         where lane = $1::text and run_at <= statement_timestamp() and (priority, run_at, id) < ($2::smallint, $3::timestamptz, $4::bigint) limit $5::int) w)`
	j := &x.e.Job
	r := Reason{Cause: CauseLane}
	var stops []int64
	var until *time.Time
	err := x.q.send(ctx, x.db, reading, read, []any{j.Lane, int16(j.Priority), j.RunAt, j.ID, StatsCap}, row(&r.Ahead, &until, &stops, &r.Before))
	if err == nil {
		r.Slots, err = x.q.laneLimit(ctx, x.db, j.Lane)
	}
	if err != nil {
		return fmt.Errorf("onceq: explain: %w", err)
	}
	if j.RunAt.After(x.e.At) {
		x.notDue()
	}
	switch {
	case len(stops) > 0:
		r.Ahead = stops
		r.Text = fmt.Sprintf("its lane %q stands still, because of the dead or held jobs %d", j.Lane, stops)
		r.Advice = "Redrive, Resolve or Discard them; the lane then goes on"
	case r.Slots == 0:
		r.Text, r.Advice = fmt.Sprintf("its lane %q stands still, because its limit is 0", j.Lane), "SetLaneLimit raises it"
	case len(r.Ahead) >= r.Slots:
		r.Text = fmt.Sprintf("it waits for its lane %q, of which %d may be live at once: behind %d, which are live, and %d others", j.Lane, r.Slots, r.Ahead, r.Before)
		if r.Until = orZero(until); until != nil {
			r.Text += "; the first lease among them lasts until " + stamp(*until)
		}
		r.Advice = "if one of them hangs, Explain says where it runs; SetLaneLimit lets more of them be live"
	default:
		r.Text = fmt.Sprintf("its lane %q has room, and %d jobs come before it: a worker lets them in within a poll", j.Lane, r.Before)
		r.Advice = "if it stays so, no worker is running: start one"
	}
	x.e.add(r)
	return nil
}
