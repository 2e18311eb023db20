package plan

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
)

// The tables of this package say what comes next: a state, what happens, and what is decided at noon.

const ms = time.Millisecond

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func at(d time.Duration) time.Time { return noon.Add(d) }

// measured is a worker whose queues all have this room.
type measured struct {
	room  Room
	taken bool // jobs in quarantine run in this process
}

func (m measured) Room(*Queue) Room                            { return m.room }
func (m measured) Want(q *Queue, one bool, now time.Time) Want { return q.Want(m.room, one, now) }
func (m measured) MayStart(bool) bool                          { return !m.taken }
func outstanding(n int64) measured                             { return measured{room: Room{Usable: 10, Outstanding: n}} }
func suspect(id int64, lost int) []quarantine.Job              { return []quarantine.Job{{ID: id, Lost: lost}} }
func looked(how cursor.Look, full bool) (c cursor.Cursor) {
	c = cursor.New()
	c.Brief, c.Full = how == cursor.Brief && !full, full
	return c
}

var free = outstanding(0)

// jobs are claimed ones, of which only the size of the payloads is known.
type jobs []int64

func (j jobs) Len() int                    { return len(j) }
func (j jobs) At(int) (at cursor.Position) { return cursor.Position{RunAt: noon} }
func (j jobs) Bytes() (n int64) {
	for _, size := range j {
		n += size
	}
	return n
}

// quiet returns a state in which nothing is to be done: each queue is empty and announced, and the next look is in a minute.
func quiet(names ...string) *State {
	var queues []*Queue
	for _, name := range names {
		queues = append(queues, &Queue{Name: name, Count: 10, Width: 1})
	}
	s := New(Config{Kinds: []string{"k"}, Lease: time.Minute, Rand: func(time.Duration) time.Duration { return 0 }}, queues)
	s.Confirmed, s.Waits = true, true
	s.rescans.known, s.rescans.asked, s.looks.at = noon, noon, at(time.Minute)
	s.announcement.written, s.announcement.waits, s.announcement.stir.since = noon, true, noon
	s.announcement.took = [4]time.Duration{ms, ms, ms, ms}
	for _, q := range queues {
		q.news.announced, q.latest.found = at(-time.Hour), at(-time.Hour)
	}
	return s
}

// words says what is to be done.
func words(actions []Action) (all []string) {
	for _, a := range actions {
		all = append(all, word(a))
	}
	return all
}

func word(a Action) string {
	switch a := a.(type) {
	case *Claim:
		text := map[Purpose]string{ClaimSome: "claim", ClaimBacklog: "claim alone", ClaimInTurn: "claim in turn", ClaimOne: "claim a suspect"}[a.Purpose]
		for _, p := range a.Parts {
			text += fmt.Sprintf(" %s:%d", p.Queue.Name, p.Limit)
		}
		if a.New != nil {
			text += ", look for new"
		}
		return text
	case *Look:
		text := "look"
		if a.all != nil {
			text = "look at all"
		}
		if a.Behind {
			text += " and behind"
		}
		if a.Calls {
			text += " and for calls"
		}
		return text + ": " + strings.Join(Names(a.Queues), " ")
	case *LookForNew:
		return "look for new"
	case *Announce:
		text := "announce: " + strings.Join(Names(a.waiting), " ")
		if len(a.Busy) > 0 {
			text += ", busy " + strings.Join(a.Busy, " ")
		}
		if a.MayLeave {
			text += ", may become dormant"
		}
		return text
	case *PassOn:
		return "pass on: " + a.Queue.Name
	case *ReadPauses:
		return "read pauses"
	case *Told:
		return map[bool]string{true: "all told", false: "not all told"}[a.All]
	case *Empty:
		return map[bool]string{true: "no longer empty: ", false: "empty: "}[a.Since.IsZero()] + a.Queue.Name
	}
	return wordOfRescan(a)
}

func wordOfRescan(a Action) string {
	switch a := a.(type) {
	case *MakeKnown:
		return "make known"
	case *AskTurn:
		return "ask for the turn: " + strings.Join(Names(a.Queues), " ")
	case *Glance:
		return "glance: " + strings.Join(Names(a.Queues), " ")
	case *RescanPage:
		return fmt.Sprintf("page: %s, priority %d", a.Queue.Name, a.To.Priority)
	case *LeaveTo:
		return "leave to " + strings.Join(a.Kinds, " ") + ": " + a.Queue.Name
	case *Quiet:
		return "nothing to rescan: " + strings.Join(Names(a.Queues), " ")
	}
	return fmt.Sprintf("%T", a)
}

// next says what a queue waits for.
func next(s *State, q *Queue) string {
	var all []string
	if q.busy {
		all = append(all, "an answer")
	}
	if q.next.due {
		all = append(all, "due")
	}
	if !q.next.again.IsZero() {
		all = append(all, "again in "+q.next.again.Sub(noon).String())
	}
	if !q.lookAt.IsZero() {
		all = append(all, "look in "+max(0, q.lookAt.Sub(noon)).String())
	}
	if s.announcement.wanted {
		all = append(all, "announcement")
	}
	if len(all) == 0 {
		return "idle"
	}
	return strings.Join(all, ", ")
}

// What Plan decides.
func TestPlan_Decides(t *testing.T) {
	t.Parallel()
	due := func(s *State, q *Queue) { s.isDue(q) }
	backlog := func(s *State, q *Queue) {
		q.next.backlog, q.cursor.Full = true, true
		s.isDue(q)
	}
	for _, row := range []struct {
		what  string
		given func(s *State, q *Queue)
		w     measured
		then  []string
		wait  time.Duration
	}{
		{"nothing happens", func(*State, *Queue) {}, free, nil, AnnounceAgain},
		{"a worker begins", func(s *State, q *Queue) { *s = *New(s.Config, s.Queues) }, free,
			[]string{"make known", "look at all and behind and for calls: a b"}, rhythm.LongestNap},
		{"there is a job", due, free, []string{"claim a:10"}, AnnounceAgain},
		{"there are jobs in two queues", func(s *State, q *Queue) { due(s, q); due(s, s.Queues[1]) }, free, []string{"claim a:10 b:10"}, AnnounceAgain},
		{"there is a job, and handlers run", due, outstanding(9), []string{"claim a:1"}, AnnounceAgain},
		{"there is a job and no room", due, outstanding(10), nil, time.Second},
		{"no room, and handlers hold connections", func(s *State, q *Queue) { q.Pooled = true; due(s, q) }, outstanding(10), nil, 20 * ms},
		{"a claim is under way", func(s *State, q *Queue) { due(s, q); s.underWay[ClaimSome] = true }, free, nil, AnnounceAgain},
		{"the queue's own claim is under way", func(s *State, q *Queue) { due(s, q); q.busy = true }, free, nil, AnnounceAgain},
		{"the rescan waits for the queue's answer", func(s *State, q *Queue) { due(s, q); q.held = true }, free, nil, AnnounceAgain},
		{"claims fail", func(s *State, q *Queue) { due(s, q); s.notBefore = at(time.Second) }, free, nil, time.Second},
		{"it is asked again at a time", func(s *State, q *Queue) { q.next.again = at(ms); s.activate(q) }, free, nil, ms},
		{"that time has come", func(s *State, q *Queue) { q.next.again = noon; s.activate(q) }, free, []string{"claim a:10"}, AnnounceAgain},
		{"a paused queue is due", func(s *State, q *Queue) { due(s, q); q.paused = true }, free, nil, AnnounceAgain},
		{"a backlog", backlog, free, []string{"claim alone a:10"}, AnnounceAgain},
		{"a backlog beside a job", func(s *State, q *Queue) { backlog(s, q); due(s, s.Queues[1]) }, free,
			[]string{"claim alone a:10", "claim b:10"}, AnnounceAgain},
		{"a backlog beside another", func(s *State, q *Queue) { backlog(s, q); backlog(s, s.Queues[1]) }, free, []string{"claim alone a:10"}, AnnounceAgain},
		{"a backlog of which others claim", func(s *State, q *Queue) { backlog(s, q); q.turns.others = at(ms) }, free, []string{"claim in turn a:10"}, AnnounceAgain},
		{"others claimed long ago", func(s *State, q *Queue) { backlog(s, q); q.turns.others = noon }, free, []string{"claim alone a:10"}, AnnounceAgain},
		{"a backlog, less than a quarter is free", func(s *State, q *Queue) { backlog(s, q); q.latest.claimed = at(-ms) }, outstanding(9), nil, 4 * ms},
		{"a backlog, and that for 5 ms", func(s *State, q *Queue) { backlog(s, q); q.latest.claimed = at(-5 * ms) }, outstanding(9),
			[]string{"claim alone a:1"}, AnnounceAgain},
		{"a suspect", func(s *State, q *Queue) { q.quarantine.Saw(suspect(1, 1)); due(s, q) }, free, []string{"claim a suspect a:1"}, AnnounceAgain},
		{"a suspect, and other jobs are next", func(s *State, q *Queue) {
			q.quarantine.Saw(suspect(1, 1))
			q.quarantine.OthersTurn = true
			due(s, q)
		}, free, []string{"claim a:10"}, AnnounceAgain},
		{"a suspect while one runs in this process", func(s *State, q *Queue) { q.quarantine.Saw(suspect(1, 1)); due(s, q) },
			measured{free.room, true}, []string{"claim a:10"}, AnnounceAgain},
		{"suspects run in half of the slots", func(s *State, q *Queue) { q.quarantine.Saw(suspect(1, 1)); due(s, q) },
			measured{Room{Usable: 10, Quarantined: 5}, false}, []string{"claim a:10"}, AnnounceAgain},
		{"a suspect and one free slot", func(s *State, q *Queue) { q.quarantine.Saw(suspect(1, 1)); due(s, q) }, outstanding(10), nil, time.Second},
		{"nothing may be claimed any more", func(s *State, q *Queue) { q.quarantine.Saw(suspect(1, 1)); due(s, q); s.Left = 0 }, free,
			[]string{"claim a:0"}, AnnounceAgain},
		{"a delayed job is due in a second", func(s *State, q *Queue) { q.delayed = at(time.Second); s.setNextDue() }, free, nil, time.Second},
		{"it is due", func(s *State, q *Queue) { q.delayed = noon; s.setNextDue() }, free, []string{"claim a:10"}, AnnounceAgain},
		{"it is time for a look at all", func(s *State, q *Queue) { s.looks.at = noon }, free,
			[]string{"look at all and for calls: a b"}, AnnounceAgain},
		{"and for a rescan", func(s *State, q *Queue) { s.looks.at, s.rescans.asked = noon, at(-time.Second) }, free,
			[]string{"look at all and behind and for calls: a b"}, AnnounceAgain},
		{"after claims a rescan does not wait for that", func(s *State, q *Queue) { s.looks.claimed, s.rescans.asked = true, at(-time.Second) }, free,
			[]string{"look at all and behind and for calls: a b"}, AnnounceAgain},
		{"a queue is to be looked at", func(s *State, q *Queue) { s.lookSoon(q, noon) }, free, []string{"look: a"}, AnnounceAgain},
		{"soon", func(s *State, q *Queue) { s.lookSoon(q, at(ms)) }, free, nil, ms},
		{"it is due meanwhile", func(s *State, q *Queue) { s.lookSoon(q, noon); due(s, q) }, outstanding(10), nil, time.Second},
		{"the latest look failed", func(s *State, q *Queue) { s.lookSoon(q, noon); s.looks.notAgain = at(time.Second) }, free, nil, time.Second},
		{"looks take long in a lively run", func(s *State, q *Queue) {
			s.announcement.stir.lively, s.announcement.stir.count, s.looks.took = true, 100, [2]time.Duration{time.Second, time.Second}
		}, free, []string{"look for new"}, AnnounceAgain},
		{"that goes along with a claim", func(s *State, q *Queue) {
			s.announcement.stir.lively, s.announcement.stir.count, s.looks.took = true, 100, [2]time.Duration{time.Second, time.Second}
			s.looks.fresh.took = ms
			due(s, q)
		}, free, []string{"claim a:10, look for new"}, time.Second},
		{"an announcement is old", func(s *State, q *Queue) { s.announcement.written = at(-AnnounceAgain) }, free,
			[]string{"announce: a b, may become dormant"}, time.Minute},
		{"one is wanted", func(s *State, q *Queue) { s.announcement.wanted, s.announcement.rest = true, 20*ms }, free, nil, 20 * ms},
		{"no notifications arrive", func(s *State, q *Queue) { s.announcement.wanted, s.Confirmed = true, false }, free, nil, time.Minute},
		{"one has a backlog", func(s *State, q *Queue) { s.announcement.wanted = true; backlog(s, q) }, outstanding(10),
			[]string{"not all told", "announce: b, busy a"}, time.Second},
		{"nothing waits, and the row says so", func(s *State, q *Queue) {
			s.announcement.wanted, s.announcement.waits = true, false
			backlog(s, q)
			backlog(s, s.Queues[1])
		}, outstanding(10), []string{"not all told", "not all told"}, time.Second},
		{"a notification told of jobs for which there is no room", func(s *State, q *Queue) { s.HasJobs("a", true, at(-20*ms)); q.next.noRoom = true },
			outstanding(10), []string{"not all told", "pass on: a"}, time.Second},
		{"something is paused, and read long ago", func(s *State, q *Queue) { s.holdsBack = true }, free, []string{"read pauses"}, time.Minute},
		{"the database is away", func(s *State, q *Queue) { s.holdsBack, s.looks.notAgain = true, at(time.Second) }, free, nil, time.Second},
		{"jobs wait for a slot", func(s *State, q *Queue) { s.ahead, s.gaveBack = true, at(-aheadLongest/2) }, free, nil, aheadLongest / 2},
	} {
		s := quiet("a", "b")
		s.looks.whole = rhythm.Pass{Ended: noon}
		row.given(s, s.Queues[0])
		s.actions = slices.DeleteFunc(s.actions, func(a Action) bool { _, empty := a.(*Empty); return empty })
		wait := s.Plan(noon, row.w)
		require.Equal(t, row.then, words(s.Actions()), row.what)
		require.Equal(t, row.wait, wait, row.what)
	}
}

// What comes next for a queue after a claim.
func TestPlan_AfterAClaim(t *testing.T) {
	t.Parallel()
	nothing, one, all := jobs{}, jobs{1}, jobs{1, 1, 1}
	for _, row := range []struct {
		what  string
		given func(s *State, q *Queue)
		got   jobs // of three
		how   cursor.Look
		then  string
	}{
		{"as many as it was allowed", func(*State, *Queue) {}, all, cursor.Recent, "due, announcement"},
		{"the end of an announced queue", func(s *State, q *Queue) {}, nothing, cursor.Recent, "look in 0s"},
		{"after a job: delayed ones may come", func(s *State, q *Queue) {}, one, cursor.Recent, "look in 20ms"},
		{"an announced queue in which jobs come often", func(s *State, q *Queue) { q.latest.found = at(-49 * ms) }, one, cursor.Recent, "again in 1ms, announcement"},
		{"a queue that is not announced, after a job", func(s *State, q *Queue) { q.news.announced = time.Time{} }, one, cursor.Recent, "again in 1ms"},
		{"each time twice as late", func(s *State, q *Queue) { q.news.announced, q.next.pause, q.latest.found = time.Time{}, 4*ms, at(-ms) },
			nothing, cursor.Recent, "again in 4ms"},
		{"and just when it may be announced", func(s *State, q *Queue) {
			q.news.announced, q.next.pause, q.latest.found = time.Time{}, 16*ms, at(-15*ms)
		},
			nothing, cursor.Recent, "again in 5ms"},
		{"a queue that is not announced, quiet for a while", func(s *State, q *Queue) { q.news.announced = time.Time{} }, nothing, cursor.Recent, "announcement"},
		{"its row was just written", func(s *State, q *Queue) { q.news.announced, s.announcement.rest = time.Time{}, ms }, nothing, cursor.Recent,
			"again in 10ms, announcement"},
		{"no notifications arrive", func(s *State, q *Queue) { q.news.announced, s.Confirmed = time.Time{}, false }, nothing, cursor.Recent, "look in 0s"},
		{"none of transactions arrive", func(s *State, q *Queue) { s.NotOfTx = true }, nothing, cursor.Recent, "look in 0s"},
		{"its row could not be written", func(s *State, q *Queue) { q.news.announced, s.announcement.notBefore = time.Time{}, at(1) }, nothing, cursor.Recent,
			"look in 0s"},
		{"others wait: the next job wakes one of these", func(s *State, q *Queue) { q.news.announced, s.announcement.backed = time.Time{}, true }, one,
			cursor.Recent, "announcement"},
		{"in a lively run looks find all", func(s *State, q *Queue) { s.announcement.stir.lively = true }, one, cursor.Recent, "idle"},
		{"a notification came in between", func(s *State, q *Queue) { q.next.due = true }, nothing, cursor.Recent, "due"},
		{"a notification asked to look for a while", func(s *State, q *Queue) { q.news.looking.until = at(ms) }, one, cursor.Recent, "again in 3ms"},
		{"a brief claim that found nothing", func(s *State, q *Queue) {}, nothing, cursor.Brief, "again in 1ms"},
		{"a brief claim that found something", func(s *State, q *Queue) {}, one, cursor.Brief, "again in 1ms"},
		{"a brief claim in a lively run", func(s *State, q *Queue) { s.announcement.stir.lively = true }, nothing, cursor.Brief, "again in 1ms"},
		{"one that found something, in a lively run", func(s *State, q *Queue) { s.announcement.stir.lively = true }, one, cursor.Brief, "idle"},
		{"a brief claim where others wait", func(s *State, q *Queue) { s.announcement.backed = true }, nothing, cursor.Brief, "look in 0s"},
		{"and the queue is not announced", func(s *State, q *Queue) { q.news.announced, s.announcement.backed = time.Time{}, true }, nothing, cursor.Brief,
			"look in 3ms, announcement"},
		{"a queue that is not announced, brief and quiet for a while", func(s *State, q *Queue) { q.news.announced = time.Time{} }, nothing, cursor.Brief,
			"again in 1ms, announcement"},
		{"something was resumed meanwhile", func(s *State, q *Queue) { q.next.anew = true }, nothing, cursor.Recent, "due"},
	} {
		s := quiet("a")
		q := s.Queues[0]
		asked := cursor.Asked{From: cursor.FromStart(), Limit: 3, Now: noon}
		q.cursor.Claimed(asked, jobs{}, cursor.Recent, at(-2*ms), at(-ms), 0) // the latest claim that looked back
		row.given(s, q)
		q.busy = true
		c := &Claim{Parts: []Part{{Queue: q, Asked: cursor.Asked{From: cursor.FromStart(), Limit: 3}, look: row.how}}}
		s.Claimed(c, []Got{{Jobs: row.got, Now: noon}}, nil, at(-ms), noon)
		require.Equal(t, row.then, next(s, q), row.what)
	}
}
