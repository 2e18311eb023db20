package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// laneOf gives the lane of a work: works of a form that producers choose at about the same time share one. New works have
// new lanes, so a lane that was forgotten stays still until the end and no later job wakes it.
func laneOf(w work) string { return fmt.Sprint("of ", numberOf(w)/4) }

// numberOf gives a work's number, at which its producer was when it chose the work.
func numberOf(w work) int {
	_, number, _ := strings.Cut(w.Name, "/") // producer-1-4711-98/3, or 98
	number, _, _ = strings.Cut(number, "/")
	n, _ := strconv.Atoi(number[strings.LastIndex(number, "-")+1:])
	return n
}

// laneTrail is the audit trail of lanes. Every row has the transaction that wrote it and the time at which its statement
// began; a job that becomes live also has the snapshot of the statement that let it in. A condition of a trigger is
// evaluated in that snapshot, while the trigger's own statements take later ones.
const laneTrail = `
create function torture.trail_lane() returns trigger language plpgsql as $$
declare
  r record := case when tg_op = 'DELETE' then old else new end;
  line text;
begin
  if tg_argv[0] in ('waits', 'left') and starts_with(r.lane, E'\x1f') then -- it waits for other jobs
    return null;
  end if;
  foreach line in array string_to_array(r.lane, E'\x1f') loop -- its lane and its limit
    continue when line in ('', '@');
    insert into torture.lane_trail (seen, what, lane, rule, job, due)
    values (case when tg_argv[0] = 'live' then current_setting('torture.seen') else '' end,
            tg_argv[0], line, coalesce(r.lane_rule, 0), torture.identity(r.id, r.created_at), r.run_at);
  end loop;
  return null;
end $$;
create trigger lane_waits after insert on onceq.job_waits for each row execute function torture.trail_lane('waits');
create trigger lane_left after delete on onceq.job_waits for each row execute function torture.trail_lane('left');
create trigger lane_live after insert on onceq.jobs for each row
  when (new.lane is not null and set_config('torture.seen', pg_current_snapshot()::text, true) <> '') execute function torture.trail_lane('live');
create trigger lane_gone after delete on onceq.jobs for each row when (old.lane is not null) execute function torture.trail_lane('gone');
create trigger lane_stops after insert on onceq.job_history for each row
  when (new.lane_rule & 2 = 2 and new.state in (6, 8)) execute function torture.trail_lane('stops');
create trigger lane_decided after delete on onceq.job_history for each row
  when (old.lane_rule & 2 = 2 and old.state in (6, 8)) execute function torture.trail_lane('decided');`

// laneStep is a row of the audit trail of lanes.
type laneStep struct {
	What  string // of a job: waits, left, live, gone, stops, decided; of a limit: limiting, and limited once it was committed
	Lane  string // family/name, or family/ for a limit; the line of a limit of jobs begins with a slash
	Rule  onceq.LaneRule
	Job   int64 // its identity
	Due   time.Time
	N     int // the limit, or removed
	At    time.Time
	Began time.Time
	Xact  uint64
	Seen  string // the snapshot
}

const readLaneTrail = `
select what, lane, rule, job, case when isfinite(due) then due else 'epoch' end, n, at, began, xact, seen from torture.lane_trail order by seq`

// attend does what people do to lanes and schedules. Until faulty ends it changes limits; then it lets the lanes and the schedules
// come to their end. Until ctx ends it redrives what is dead or cancelled. It returns how many jobs came back.
func attend(ctx, faulty context.Context, pool *pgxpool.Pool) (redriven int, err error) {
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return 0, err
	}
	var ended time.Time // of the faults
	settled := false
	round := func() {
		ctx, cancel := context.WithTimeout(ctx, time.Minute) // its connection may be to a server that has gone without a word
		defer cancel()
		redriven += redrive(ctx, q, pool, faulty.Err() != nil)
		switch {
		case faulty.Err() == nil:
			lane := ""
			if rand.IntN(2) == 0 { // one of those that have waiting jobs
				_ = pool.QueryRow(ctx, `select split_part(lane, '/', 2) from onceq.job_waits where kind = $1 order by random() limit 1`, formPair).Scan(&lane)
			}
			_ = setLimit(ctx, q, pool, lane, rand.IntN(4)) // the trail says whether it was done
			_ = changeLimit(ctx, q, pool)
			_ = tend(ctx, q, pool)
		case !settled:
			if ended.IsZero() {
				ended = time.Now()
			}
			quiet, err := endTicks(ctx, pool, ended)
			if err != nil || !quiet {
				return
			}
			lanes, err := pgx.CollectRows(query(ctx, pool, `select split_part(lane, '/', 2) from onceq.lane_limits where starts_with(lane, '`+formPair+`/')`), pgx.RowTo[string])
			err = errors.Join(err, endLimits(ctx, q, pool))
			for _, lane := range append(lanes, "") {
				err = errors.Join(err, setLimit(ctx, q, pool, lane, 2))
			}
			settled = err == nil
		}
	}
	for pause(ctx, 300*time.Millisecond+rand.N(600*time.Millisecond)) {
		round()
	}
	return redriven, nil
}

// setLimit changes the limit of a lane, or of all lanes of formPair that have none of their own.
func setLimit(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool, lane string, n int) error {
	return noted(ctx, pool, formPair+"/"+lane, n, func() error { return q.SetLaneLimit(ctx, pool, formPair, lane, n) })
}

// noted notes that a limit is about to change, changes it, and notes that the change is committed. The answer may be lost.
func noted(ctx context.Context, pool *pgxpool.Pool, name string, n int, change func() error) error {
	const note = `insert into torture.lane_trail (what, lane, n) values ($1, $2, $3)`
	if _, err := pool.Exec(ctx, note, "limiting", name, n); err != nil {
		return err
	}
	if err := change(); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, note, "limited", name, n)
	return err
}

// removed stands for the limit of a line that has none of its own any more.
const removed = -1

// redrive brings back every dead job that stops its lane, dead members of groups, and some cancelled jobs that have waited.
func redrive(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool, all bool) int {
	some := 1 + rand.IntN(4) // the others meet all rules about dead members
	if all {
		some = 0
	}
	n, _, _ := onceqops.New(q).RedriveMany(ctx, pool, onceqops.Filter{Kind: formHalt, States: []onceq.State{onceq.StateDead}})
	parts, _, _ := onceqops.New(q).RedriveMany(ctx, pool, onceqops.Filter{Kind: formPart, States: []onceq.State{onceq.StateDead}, Limit: some})
	waiting := slices.Concat(laneForms, limitForms, []string{formFlow})
	more, _, _ := onceqops.New(q).RedriveMany(ctx, pool, onceqops.Filter{
		Kind: waiting[rand.IntN(len(waiting))], States: []onceq.State{onceq.StateCancelled}, Limit: rand.IntN(4),
	})
	return n + parts + more
}

// admitOutOfTurn is a mistake that the checker must find: it lets in the last job of each lane that has room in the snapshot of one
// statement, and nobody else is kept from doing so.
const admitOutOfTurn = `
with head as (
  select distinct on (w.lane) w.id from onceq.job_waits w
   where (select count(*) from onceq.jobs j where j.lane = w.lane) < 1
   order by w.lane, w.run_at desc, w.id desc
),
moved as (delete from onceq.job_waits w using head h where w.id = h.id returning w.*)
insert into onceq.jobs (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                        payload, payload_bytes, metadata, errors, identity, lane, lane_rule)
select id, statement_timestamp(), created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
       payload, payload_bytes, metadata, errors, identity, lane, lane_rule
  from moved`

// snapshot is what pg_current_snapshot returned.
type snapshot struct {
	min, max uint64
	running  []uint64
}

func readSnapshot(s string) (n snapshot) {
	parts := strings.SplitN(s, ":", 3)
	if len(parts) < 3 {
		return n
	}
	n.min, _ = strconv.ParseUint(parts[0], 10, 64)
	n.max, _ = strconv.ParseUint(parts[1], 10, 64)
	_ = json.Unmarshal([]byte("["+parts[2]+"]"), &n.running)
	return n
}

func (s snapshot) sees(xact uint64) bool {
	return xact < s.min || xact < s.max && !slices.Contains(s.running, xact)
}

// laneState is what the checker knows of a lane.
type laneState struct {
	live    map[int64]bool
	waiting map[int64]laneStep
	left    []leftStep
	stops   map[int64]laneStep
	decided []leftStep
}

// leftStep is a row that was there until a transaction deleted it. Older snapshots still see it.
type leftStep struct {
	laneStep
	by uint64
}

// limitStep is a limit: possible from one time on, and certain from another one on, or never.
type limitStep struct {
	n       int
	from    time.Time
	certain time.Time
}

// checkLanes replays the audit trail of lanes.
//
// A row takes its number before its transaction commits. So a job that is gone counts as gone a little too early, and one that
// becomes live counts a little too early too; but in a lane, nobody else can let a job in between that and the commit,
// except in place of one that leaves. Rows of one transaction count as one step.
func (v *verdict) checkLanes(h *history) {
	lanes := map[string]*laneState{}
	limits := map[string][]limitStep{}
	goneBy := map[uint64][]laneStep{}
	stopsBy := map[uint64][]laneStep{}
	for _, s := range h.Lanes {
		switch s.What {
		case "gone":
			goneBy[s.Xact] = append(goneBy[s.Xact], s)
		case "stops":
			stopsBy[s.Xact] = append(stopsBy[s.Xact], s)
		}
	}
	for _, s := range h.Lanes {
		l := lanes[s.Lane]
		if l == nil {
			l = &laneState{live: map[int64]bool{}, waiting: map[int64]laneStep{}, stops: map[int64]laneStep{}}
			lanes[s.Lane] = l
		}
		family, sort := familyOf(s.Lane), vLane
		ofJobs := strings.HasPrefix(s.Lane, "/") // a limit, which has no order
		if ofJobs {
			sort = vLimit
		}
		switch s.What {
		case "limiting":
			limits[s.Lane] = append(limits[s.Lane], limitStep{n: s.N, from: s.At})
		case "limited":
			v.Limits++
			limits[s.Lane][len(limits[s.Lane])-1].certain = s.At
		case "waits":
			for _, g := range goneBy[s.Xact] {
				if g.Job == s.Job && s.Rule&onceq.Overtake == 0 && !ofJobs {
					v.violation(vLane, "lane %q: job %d lost its place although it does not let others by", s.Lane, idOf(s.Job))
				}
			}
			l.waiting[s.Job] = s
		case "left":
			if w, there := l.waiting[s.Job]; there {
				l.left = append(l.left, leftStep{w, s.Xact})
			}
			delete(l.waiting, s.Job)
		case "stops":
			l.stops[s.Job] = s
		case "decided":
			if w, there := l.stops[s.Job]; there {
				l.decided = append(l.decided, leftStep{w, s.Xact})
			}
			delete(l.stops, s.Job)
		case "gone":
			delete(l.live, s.Job)
		case "live":
			v.Admitted++
			for _, g := range goneBy[s.Xact] {
				if g.Lane == s.Lane {
					delete(l.live, g.Job)
				}
			}
			l.live[s.Job] = true
			most := slices.Max(append(possible(limits[s.Lane], limits[family], s), 0))
			if len(l.live) > most {
				v.violation(sort, "lane %q: %d jobs are live at once, %v, and the limit is %d", s.Lane, len(l.live), ids(l.live), most)
			}
			v.MostLive = max(v.MostLive, len(l.live))
			if !ofJobs && family != formPair+"/" && family != formTurn+"/" { // the limit is always 1, and there is no other
				v.checkTurn(s, l, stopsBy[s.Xact])
			}
		}
	}
}

// possible returns what a lane's limit may have been for the statement that let a job in: own is the lane's own, of its family
// the one that holds where there is none.
func possible(own, family []limitStep, s laneStep) (all []int) {
	collect := func(steps []limitStep) (certain bool) {
		none := false // there may be none of its own
		for i := len(steps) - 1; i >= 0; i-- {
			if steps[i].from.After(s.At) {
				continue
			}
			if steps[i].n == removed {
				none = true
			} else {
				all = append(all, steps[i].n)
			}
			if c := steps[i].certain; !c.IsZero() && c.Before(s.Began) {
				return !none
			}
		}
		return false
	}
	if !collect(own) && !collect(family) {
		all = append(all, 1)
	}
	return all
}

// checkTurn looks at whether it was the job's turn: whether the statement that let it in saw another one that was before it,
// or one that stops the lane.
func (v *verdict) checkTurn(s laneStep, l *laneState, stoppedHere []laneStep) {
	seen := readSnapshot(s.Seen)
	before := func(w laneStep, by uint64) {
		if w.Job != s.Job && seen.sees(w.Xact) && (by == 0 || by != s.Xact && !seen.sees(by)) && !w.Due.After(s.Began) &&
			cmp.Or(w.Due.Compare(s.waited(l).Due), cmp.Compare(idOf(w.Job), idOf(s.Job))) < 0 {
			v.violation(vLane, "lane %q: job %d became live before job %d, which was before it", s.Lane, idOf(s.Job), idOf(w.Job))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.waiting)) {
		before(l.waiting[id], 0)
	}
	for _, w := range l.left {
		before(w.laneStep, w.by)
	}
	stops := func(w laneStep, by uint64) {
		if seen.sees(w.Xact) && (by == 0 || by != s.Xact && !seen.sees(by)) {
			v.violation(vLane, "lane %q: job %d became live although job %d stops the lane", s.Lane, idOf(s.Job), idOf(w.Job))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.stops)) {
		stops(l.stops[id], 0)
	}
	for _, w := range l.decided {
		stops(w.laneStep, w.by)
	}
	for _, w := range stoppedHere {
		if w.Lane == s.Lane {
			v.violation(vLane, "lane %q: job %d, which stops the lane, let in job %d", s.Lane, idOf(w.Job), idOf(s.Job))
		}
	}
}

// waited returns the latest row with which the job of this step waited.
func (s laneStep) waited(l *laneState) laneStep {
	if w, there := l.waiting[s.Job]; there {
		return w
	}
	for _, w := range slices.Backward(l.left) {
		if w.Job == s.Job {
			return w.laneStep
		}
	}
	return s
}

func ids(jobs map[int64]bool) (all []int64) {
	for _, job := range slices.Sorted(maps.Keys(jobs)) {
		all = append(all, idOf(job))
	}
	return all
}
