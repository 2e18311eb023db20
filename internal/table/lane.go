package table

import (
	"cmp"
	"math"
	"strconv"
	"strings"
	"time"
)

// MemberBit is the bit of lane_rule that says that somebody waits for the job: its end must be told.
const MemberBit = 1 << 2

// LineOf gives the line in which a job with that path begins to wait, and the path as job_waits has it.
func LineOf(path string) (line string, full *string) {
	lane, rest, _ := strings.Cut(path, LineSep)
	if rest == "" {
		return lane, nil
	}
	limit, _, _ := strings.Cut(rest, LineSep)
	return cmp.Or(lane, limit), &path
}

// FollowLine is the line in which a follower waits.
func FollowLine(id string) string { return Sep + ` || pg_catalog.lpad(` + id + `::text, 19, '0')` }

// LaneSlot is the row of lane_locks that a lane belongs to. It must never change while there are jobs: two promoters would
// then count one lane at once. A server in FIPS mode has no md5, and this reads the lane's bytes without a function that is not immutable,
// which Citus would refuse: backslashes alone mean something to decode.
func LaneSlot(lane string) string {
	return `(pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.decode(pg_catalog.replace(` + lane + `, E'\\', E'\\\\'), 'escape')), 0) & 15)::smallint`
}

// isLive says whether place p has its job.
const isLive = `(exists (select from onceq.jobs where id = p.id and ` + PlaceOfJob + ` offset 0)
                  or exists (select from onceq.job_waits where id = p.id and ` + PlaceOfWait + ` offset 0))`

// LiveCount is how many jobs have places of a lane or a limit that may have n. Nobody counts those that may have any number: 0.
func LiveCount(lane, n string) string {
	return `(select count(*) as n from onceq.lane_places p where p.lane = ` + lane + ` and ` + n + ` < ` + NoCapSQL + ` and ` + isLive + ` offset 0)`
}

// AnyDue says that a job waits for a lane or a limit whose time has come.
func AnyDue(lane string) string {
	return `exists (select from ` + DueIn(lane, "1") + ` offset 0)`
}

// IsFollowLine says of a line whether it is that of a follower.
func IsFollowLine(lane string) string {
	return `pg_catalog.starts_with(` + lane + `, ` + Sep + `)`
}

// IsOpen says whether a member of a group is unfinished.
func IsOpen(group string) string {
	return `exists (select from (select from onceq.job_members where group_id = ` + group + ` and state = 0 order by job_id desc limit 1) m)`
}

const IsStuck = `m.state = ` + JobHeld + ` or m.state = ` + JobDead + ` and w.if_dead = 0`

// DueIn gives the ids of the first n jobs that wait for a lane or a limit and whose time has come, with the
// end of the select around it. It looks through each priority by itself: the index has the time behind that,
// and delayed jobs would be read otherwise.
func DueIn(lane, n string) string {
	return `(values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
          cross join lateral (
                select id from onceq.job_waits
                 where lane = ` + lane + ` and priority = p.priority and run_at <= statement_timestamp()
                 order by run_at, id
                 limit ` + n + `) w
          limit ` + n
}

// LiveIn gives the live jobs j of a lane or a limit, and those that have the lane's place and wait for their
// limit. A place without its job counts for nothing.
func LiveIn(lane string) string {
	return `onceq.lane_places p
         cross join lateral (
               select id, queue, kind, run_at, leased_until, holder, lane as path from onceq.jobs where id = p.id and ` + PlaceOfJob + `
               union all
               select id, queue, kind, run_at, null, null, path from onceq.job_waits where id = p.id and ` + PlaceOfWait + `
               offset 0) j
         where p.lane = ` + lane
}

// A row of lane_places belongs to a job if these hold for the job's row. "is distinct from" does not imply
// that the lane is not null, and so does not offer the planner job_waits_lane for a look-up by id.
const (
	PlaceOfJob  = `(lane = p.lane or p.lane = any (pg_catalog.string_to_array(lane, ` + Sep + `)))`
	PlaceOfWait = `lane is distinct from p.lane and pg_catalog.starts_with(path, p.lane || ` + Sep + `)`
)

// WaitingIn counts the jobs that wait for a lane or a limit: those that are due, and since when the first of
// them is, and those that are not due yet, both up to most. Each priority is looked at by itself, as in
// DueIn: else those that are due may stand behind delayed ones of a higher priority.
func WaitingIn(lane, most string) string {
	return `(select least(count(*) filter (where due), ` + most + `) as waiting, least(count(*) filter (where not due), ` + most + `) as delayed, pg_catalog.min(due_at) filter (where due) as oldest
          from (values (-1::smallint), (0::smallint), (1::smallint)) p (priority)
         cross join lateral (
               select coalesce(due_at, run_at) as due_at, run_at <= statement_timestamp() as due
                 from onceq.job_waits where lane = ` + lane + ` and priority = p.priority order by run_at, id limit ` + most + `) w)`
}

// StopsOf gives what stops a lane.
func StopsOf(lane string) string { return `onceq.lane_stops s where s.lane = ` + lane }

// LimitOf is how many jobs of a lane or a limit may be live at once.
func LimitOf(lane string) string {
	return `coalesce((select n from onceq.lane_limits where lane = ` + lane + `),
                 (select n from onceq.lane_limits where lane = ` + FamilyOf(lane) + `), 1)`
}

// What the rows of lanes and limits contain: see lane.go and limit.go of package onceq.
const (
	LineSep  = "\x1f"
	SlotMark = "@" // the last part of jobs.lane: run_at is a slot
	SlotLate = 100 * time.Millisecond
	NoCap    = math.MaxInt32 // lane_limits.n of a limit with a rate alone

	Sep         = `E'\x1f'`
	NoCapSQL    = `2147483647`     // NoCap
	SlotLateSQL = `100000::float8` // microseconds

	// SlotMissed is for a job that has a slot and that is brought to where claims find it: late enough that
	// it gets another slot if it has missed its own, and not so early that claims do not look back that far
	// (overlap).
	SlotMissed = `statement_timestamp() - interval '1 second'`

	HasSlot = `pg_catalog.right(lane, 2) = ` + Sep + ` || '` + SlotMark + `'` // of a row of jobs; null without a lane
)

// LaneIn gives the lane in a path; "" for none.
func LaneIn(path string) string { return `pg_catalog.split_part(` + path + `, ` + Sep + `, 1)` }

// SplitPath takes apart a path that was read. Without a limit the weight is 0.
func SplitPath(path string) (lane, limit string, weight int, slot bool) {
	path, slot = strings.CutSuffix(path, LineSep+SlotMark)
	parts := append(strings.Split(path, LineSep), "", "")
	if limit = strings.TrimPrefix(parts[1], "/"); limit != "" {
		weight, _ = strconv.Atoi(cmp.Or(parts[2], "1"))
	}
	return parts[0], limit, weight, slot
}

// FamilyOf is the name under which the limit of all lines of a family is stored: what comes before the first
// slash that is not the first character, and that slash.
func FamilyOf(line string) string {
	return `pg_catalog.left(` + line + `, pg_catalog.strpos(pg_catalog.substr(` + line + `, 2), '/') + 1)`
}

// IsFamilyLine is a condition for such a name. A lane whose own name ends in a slash, as an address does, has
// two of them.
func IsFamilyLine(line string) string { return line + ` = ` + FamilyOf(line) }

// LimitRow is for a lateral join: the row of lane_limits that holds for a line.
func LimitRow(line, columns string) string {
	return `(select ` + columns + `
                 from onceq.lane_limits s
                where s.lane = any (array[` + line + `, ` + FamilyOf(line) + `]) and s.n is not null
                order by s.lane desc
                limit 1)`
}
