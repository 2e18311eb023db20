package onceq

import (
	"fmt"
	"time"
)

// Jobs with lanes and limits, and those that wait for others, as they are enqueued on Citus. All else of them is functions there as everywhere.

// callsApart leaves calls of lanes and limits.
var callsApart = `
insert into onceq.lane_calls (slot, due, lane)
select ` + laneSlot("u.lane") + `, u.due, u.lane from onceq.meta, unnest($1::text[], $2::timestamptz[]) as u(lane, due)`

// laneCalls are calls that are to be left, each once.
type laneCalls struct {
	lanes []string
	due   []time.Time
}

func (c *laneCalls) add(lane string, due time.Time) {
	for i := range c.lanes {
		if c.lanes[i] == lane && c.due[i].Equal(due) {
			return
		}
	}
	c.lanes, c.due = append(c.lanes, lane), append(c.due, due)
}

func (c *laneCalls) send(p *parts) error {
	if len(c.lanes) == 0 {
		return nil
	}
	return p.send(callsApart, []any{c.lanes, c.due}, noRows)
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// followLineOf is followLine for an id that is known.
func followLineOf(id int64) string { return fmt.Sprintf("%s%019d", lineSep, id) }

// newWaits is what enqueueManyInParts is told of the jobs that wait. Without lanes none does.
type newWaits struct {
	lanes, paths []string // by job
	rules        []int16  // by header
	ifDead       []*int16
	since        *time.Time // when the call began, if that was said
}

func waitingFor(args []any) (w newWaits) {
	if len(args) > 17 {
		w.lanes, w.rules, w.paths, w.ifDead, w.since = args[17].([]string), args[18].([]int16), args[19].([]string), args[20].([]*int16), args[21].(*time.Time)
	}
	return w
}

// follows reports whether jobs with that header wait for others.
func (w *newWaits) follows(header int) bool { return w.ifDead != nil && w.ifDead[header] != nil }

// line gives the line in which a job begins to wait, and its path there; "" for a job that does not wait.
func (w *newWaits) line(i, header int, id int64) (line string, path *string) {
	if w.lanes == nil || w.lanes[i] == "" {
		return "", nil
	}
	if w.paths != nil {
		path = &w.paths[i]
	}
	switch {
	case w.follows(header):
		return followLineOf(id), path
	case path != nil && *path == "":
		path = nil
	}
	return w.lanes[i], path
}
