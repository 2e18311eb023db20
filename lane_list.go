package onceq

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

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
		return fmt.Sprintf("lane %q stands still, because of the dead or held jobs %d", l.Lane, l.StoppedBy)
	case l.Limit == 0:
		return fmt.Sprintf("lane %q stands still, because its limit is 0", l.Lane)
	case l.Live >= l.Limit:
		return fmt.Sprintf("lane %q is full: %d of its jobs %s live, and %d may be", l.Lane, l.Live, either(l.Live, "is", "are"), l.Limit)
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
       (select count(*) from (select from ` + liveIn("l.lane") + ` limit greatest($4::int, ` + limitOf("l.lane") + `)) j),
       array(select j.id from ` + liveIn("l.lane") + ` order by p.id limit 10),
       w.waiting, w.delayed,
       coalesce(extract(epoch from statement_timestamp() - w.oldest) * 1e6, 0)::bigint,
       array(select s.id from ` + stopsOf("l.lane") + ` order by s.id limit 10)
  from names l
 cross join lateral ` + waitingIn("l.lane", "$4::int") + ` w
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
func (q *Queue) Lanes(ctx context.Context, db DB, f LaneFilter) ([]LaneInfo, error) {
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
	return readAll(ctx, q, db, reading, "lanes", readLanes, args, func(l *LaneInfo, rows pgx.Rows) error {
		var oldest int64
		err := rows.Scan(&l.Lane, &l.Limit, &l.Live, &l.LiveIDs, &l.Waiting, &l.Delayed, &oldest, &l.StoppedBy)
		l.Oldest = time.Duration(oldest) * time.Microsecond
		return err
	})
}
