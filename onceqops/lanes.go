package onceqops

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

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
select ` + table.LimitOf("$1::text") + `,
       (select count(*) from (select from ` + table.LiveIn("$1::text") + ` limit ` + table.LimitOf("$1::text") + `) l),
       array(select s.id from ` + table.StopsOf("$1::text") + ` order by s.id limit 10),
       array(select w.id from ` + table.DueIn("$1::text", "least($3::int, "+table.LimitOf("$1::text")+")") + `),
       ` + waitBefore("count(*)") + `,
       ` + holdersColumns + `
  from ` + holdersOf("$1::text", "true")

// firstOf names the first of n jobs that are live.
func firstOf(ids []int64, n int) string {
	if more := n - len(ids); more > 0 {
		return fmt.Sprintf("%d and %d more, which are live", ids, more)
	}
	return fmt.Sprintf("%d, which %s live", ids, table.Either(len(ids), "is", "are"))
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
	if err := x.q.store.Send(ctx, x.db, pg.Reading, readLane, args, pg.Row(append([]any{&r.Slots, &live, &stops, &next, &r.Before}, p.dest()...)...)); err != nil {
		return fmt.Errorf("onceq: explain: %w", err)
	}
	r.Ahead = p.ids
	if j.RunAt.After(x.e.At) {
		x.notDue()
	}
	switch {
	case len(stops) > 0:
		r.Ahead = stops
		r.Text = "its " + LaneInfo{Lane: j.Lane, StoppedBy: stops}.String()
		r.Advice = "redrive, resolve or discard what stops it; the lane then goes on"
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

// LaneInfo says how a lane that jobs wait for is doing.
type LaneInfo struct {
	Lane      string        `json:"lane"`                // family/name, as in JobInfo.Lane
	Limit     int           `json:"limit"`               // how many of its jobs may be live at once
	Live      int           `json:"live"`                // jobs that are live; counting stops at StatsCap, or at a larger Limit
	LiveIDs   []int64       `json:"live_ids"`            // the first ten of these: who holds the lane
	Waiting   int           `json:"waiting"`             // jobs that are due and wait for the lane
	Delayed   int           `json:"delayed"`             // jobs that are not due yet; counting both stops at StatsCap
	Oldest    time.Duration `json:"oldest,omitzero"`     // how long the oldest of Waiting has been due, by the database's clock
	StoppedBy []int64       `json:"stopped_by,omitzero"` // the first ten dead or held jobs with StopLane: the lane stands still because of them
}

// String says in words what the lane's jobs wait for.
func (l LaneInfo) String() string {
	switch {
	case len(l.StoppedBy) > 0:
		return fmt.Sprintf("lane %q stands still, because of the dead or held %s %d", l.Lane, table.Either(len(l.StoppedBy), "job", "jobs"), l.StoppedBy)
	case l.Limit == 0:
		return fmt.Sprintf("lane %q stands still, because its limit is 0", l.Lane)
	case l.Live >= l.Limit:
		return fmt.Sprintf("lane %q is full: %d of its jobs %s live, and %d may be", l.Lane, l.Live, table.Either(l.Live, "is", "are"), l.Limit)
	case l.Waiting == 0:
		return fmt.Sprintf("lane %q has only jobs that are not due", l.Lane)
	}
	return fmt.Sprintf("lane %q has room: a worker lets its next job in within a poll", l.Lane)
}

// LaneFilter chooses lanes.
type LaneFilter struct {
	Family string // only lanes of this family: Kind.LaneFamily, by default the kind's name; empty for all
	After  string // only lanes whose LaneInfo.Lane is behind this one: the next page
	Limit  int    // how many; default 50, at most 1,000
}

// readLanes gives at most $3 lanes behind $1 whose names begin with $2; it stops counting at $4.
var readLanes = `
with recursive names (lane, n) as (
  (select ` + nextLane(`greatest($1::text collate "C", $2::text collate "C", ' ')`) + `, 1)
  union all
  select ` + nextLane("l.lane") + `, l.n + 1
    from names l where pg_catalog.starts_with(l.lane, $2::text) and l.n < $3::int
)
select l.lane, (select coalesce((select n from onceq.lane_limits where lane = l.lane),
                                (select n from onceq.lane_limits where lane = pg_catalog.split_part(l.lane, '/', 1) || '/'), 1)),
       (select count(*) from (select from ` + table.LiveIn("l.lane") + ` limit greatest($4::int, ` + table.LimitOf("l.lane") + `)) j),
       array(select j.id from ` + table.LiveIn("l.lane") + ` order by p.id limit 10),
       w.waiting, w.delayed,
       coalesce(extract(epoch from statement_timestamp() - w.oldest) * 1e6, 0)::bigint,
       array(select s.id from ` + table.StopsOf("l.lane") + ` order by s.id limit 10)
  from names l
 cross join lateral ` + table.WaitingIn("l.lane", "$4::int") + ` w
 where pg_catalog.starts_with(l.lane, $2::text)
 order by l.n`

// nextLane is the first lane behind a name for which jobs wait. The lines of limits begin with a slash,
// and those of jobs that wait for others sort before the space; both are passed over.
func nextLane(after string) string {
	return `coalesce((select lane from onceq.job_waits where lane > ` + after + ` and lane < '/' order by lane limit 1),
                  (select lane from onceq.job_waits where lane > greatest(` + after + `, '0') order by lane limit 1))`
}

// Lanes lists the lanes for which jobs wait, by name. A lane with room, for which nobody waits, is not among them. Its cost
// depends on the lanes that it returns, and not on how many there are.
func (q *Ops) Lanes(ctx context.Context, db onceq.DB, f LaneFilter) ([]LaneInfo, error) {
	if err := cmp.Or(pageSize("Limit", &f.Limit, 50), checkText("After", f.After)); err != nil {
		return nil, err
	}
	prefix := ""
	if f.Family != "" {
		if _, err := laneName("LaneFilter.Family", f.Family, "name", "x"); err != nil {
			return nil, err
		}
		prefix = f.Family + "/"
	}
	args := []any{f.After, prefix, f.Limit, StatsCap}
	return readAll(ctx, q, db, pg.Reading, "lanes", readLanes, args, func(l *LaneInfo, rows pgx.Rows) error {
		var oldest int64
		err := rows.Scan(&l.Lane, &l.Limit, &l.Live, &l.LiveIDs, &l.Waiting, &l.Delayed, &oldest, &l.StoppedBy)
		l.Oldest = time.Duration(oldest) * time.Microsecond
		return err
	})
}
