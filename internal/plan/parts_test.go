package plan

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/table"
)

// A brief claim that found nothing is followed by a claim soon, and in the end each pause is as long as they get. Where many others
// wait, a look comes when a claim looks back.
func TestPlan_LooksBackAfterABriefClaimThatFoundNothing(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(*State, *Queue){
		"announced": func(_ *State, q *Queue) { q.news.announced = noon },
		"not":       func(_ *State, q *Queue) { q.news.announced = time.Time{} },
		"lively":    func(s *State, _ *Queue) { s.announcement.stir.lively = true },
		"backed":    func(s *State, q *Queue) { q.news.announced, s.announcement.backed = time.Time{}, true },
	} {
		s := quiet("a")
		q := s.Queues[0]
		for range 10 {
			set(s, q)
			s.announcement.wanted, q.next.again, q.lookAt, s.looks.soon = false, time.Time{}, time.Time{}, nil
			q.latest.found = at(-time.Hour)
			asked := cursor.Asked{From: cursor.FromStart(), Limit: 1}
			c := &Claim{Parts: []Part{{Queue: q, Asked: asked, look: cursor.Brief}}}
			s.Claimed(c, []Got{{Jobs: jobs{}, Now: noon}}, nil, at(-100*ms), noon)
			if name == "backed" {
				require.True(t, q.next.again.IsZero(), "that would take what others were woken for")
				require.Equal(t, noon, q.lookAt, "it has never looked back")
				continue
			}
			require.False(t, q.next.again.Before(noon), name)
			require.False(t, q.next.again.After(at(rhythm.Moment)), name)
			require.Equal(t, name == "not", s.announcement.wanted, "that a claim looks back soon keeps nobody from being told of this one")
			s.Announced(&Announce{waiting: s.Queues, heard: []int{q.news.heard}, era: s.announcement.era}, Written{}, noon)
			require.False(t, q.next.again.IsZero(), "the claim that looks back still comes")
		}
	}
}

// What Claims does not decide by itself: how a claim that failed puts off the next one.
func TestPlan_AfterClaimsThatFailed(t *testing.T) {
	t.Parallel()
	s := quiet("a", "b")
	a, b := s.Queues[0], s.Queues[1]
	s.isDue(a)
	s.isDue(b)
	s.Claims(noon, free)
	c := s.Actions()[0].(*Claim)
	require.Equal(t, "claim a:10 b:10", word(c))
	s.Answered(ClaimSome)
	require.Zero(t, s.ClaimFailed(c, true, noon), "something was paused or resumed")
	require.True(t, a.next.due && b.next.due && !a.busy && !b.busy)
	require.Zero(t, s.Claims(noon, free)-rhythm.LongestNap)
	c = s.Actions()[0].(*Claim)
	for n, wait := range []time.Duration{100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5 * time.Second, 5 * time.Second} {
		require.Equal(t, wait, s.ClaimFailed(c, false, noon), n)
		require.Equal(t, wait/2, s.Claims(noon, free), "the rest is random")
	}
	q, got := suspect(1, 1), []Got{{Jobs: jobs{1}}, {Jobs: jobs{1}}}
	a.quarantine.Saw(q)
	require.False(t, s.quarantineDue(a, free), "a claim of other jobs shows first that claims work")
	s.Answered(ClaimSome)
	s.Claimed(c, got, nil, noon, noon)
	a.quarantine.OthersTurn = false
	require.True(t, s.quarantineDue(a, free))
}

// A suspect is claimed alone, in turns with other jobs.
func TestPlan_ClaimsSuspects(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	q := s.Queues[0]
	s.Left = 5
	q.Lost([]quarantine.Job{{ID: 1, Lost: 1}, {ID: 2, Lost: 1}, {ID: 3, Lost: 2}})
	s.activate(q)
	claim := func(want string) *Claim {
		s.Claims(noon, free)
		all := s.Actions()
		c := all[len(all)-1].(*Claim)
		require.Equal(t, want, word(c))
		s.Answered(c.Purpose)
		return c
	}
	c := claim("claim a suspect a:1")
	require.Equal(t, 4, s.Left)
	few, beside := s.Suspects(q, map[int64]bool{1: true})
	require.Equal(t, []int64{2}, few)
	require.False(t, beside, "not in this worker")
	s.ClaimFailed(c, true, noon) // another job has the turn
	require.Equal(t, 5, s.Left)
	c = claim("claim a:5")
	s.Claimed(c, []Got{{Jobs: jobs{1}}}, nil, noon, noon)
	require.Equal(t, 4, s.Left)
	c = claim("claim a suspect a:1")
	s.ClaimedOne(c, 1, true, noon)
	require.Equal(t, 3, s.Left)
	require.Equal(t, []int64{3}, q.quarantine.IDs)
	c = claim("claim a:3")
	s.Claimed(c, []Got{{Jobs: jobs{}}}, nil, noon, noon)
	c = claim("claim a suspect a:1")
	s.ClaimedOne(c, 1, false, noon)
	require.Equal(t, 3, s.Left)
	require.Empty(t, q.quarantine.IDs, "others have it")
	claim("claim a:3")
}

// A job whose slot has come stands before the others that have lost as many leases, when no claim is under way.
func TestPlan_SlotsThatHaveCome(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	q := s.Queues[0]
	q.Lost([]quarantine.Job{{ID: 1, Lost: 1}, {ID: 2, Lost: 2}})
	q.busy = true
	require.False(t, s.SlotCame("a", suspect(8, 1)[0]), "an answer is awaited")
	q.busy = false
	require.True(t, s.SlotCame("a", suspect(8, 1)[0]))
	require.True(t, s.SlotCame("a", suspect(9, 2)[0]))
	require.Equal(t, []int64{8, 1, 9, 2}, q.quarantine.IDs)
	require.True(t, q.active)
	q.paused = true
	require.False(t, q.Lost(suspect(1, 1)))
	require.Equal(t, []int64{8, 1, 9, 2}, q.quarantine.IDs)
}

// One write of the announcement that waited for the disk does not keep the next one for longer.
func TestPlan_RestsBetweenAnnouncements(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	rest := func(took time.Duration) time.Duration {
		s.announcement.written = at(-took)
		s.Announced(&Announce{}, Written{}, noon)
		return s.announcement.rest
	}
	for range 4 {
		rest(2 * ms)
	}
	require.Equal(t, 40*ms, rest(200*ms))
	for range 2 {
		rest(200 * ms)
	}
	require.Equal(t, rhythm.Briefly, rest(200*ms))
}

// What follows an announcement.
func TestPlan_AfterAnAnnouncement(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		what  string
		given func(s *State, a *Announce)
		as    Written
		then  []string
		a     string // what comes next for the first queue
		wait  time.Duration
	}{
		{"others wait, too", func(*State, *Announce) {}, Written{Others: 1}, []string{"all told"}, "idle", 20*time.Second - ms},
		{"nobody else waits: a job may have come just before", func(*State, *Announce) {}, Written{}, []string{"all told"}, "look in 0s", 20*time.Second - ms},
		{"a notification came in between", func(s *State, _ *Announce) { s.Queues[0].news.heard++ }, Written{Others: 1}, []string{"not all told"}, "idle",
			20*time.Second - ms},
		{"everything was forgotten in between", func(s *State, _ *Announce) { s.announcement.era++ }, Written{Others: 1}, nil, "idle", 20*time.Second - ms},
		{"it is still busy", func(s *State, a *Announce) { a.waiting, a.heard = a.waiting[1:], a.heard[1:] }, Written{Others: 1}, []string{"not all told"},
			"idle", 20*time.Second - ms},
		{"it is paused", func(s *State, a *Announce) {
			a.waiting, a.heard, s.Queues[0].paused = a.waiting[1:], a.heard[1:], true
		}, Written{Others: 1}, []string{"all told"}, "idle", 20*time.Second - ms},
		{"it failed", func(*State, *Announce) {}, Written{Failed: true}, nil, "look in 0s", 20 * time.Second},
		{"so many wait that this run is dormant", func(*State, *Announce) {}, Written{Others: DormantFrom, Dormant: true}, []string{"all told"}, "idle",
			pollListening - ms},
		{"it is dormant no longer: there are jobs", func(s *State, _ *Announce) { s.announcement.dormant = true }, Written{Others: 1}, []string{"all told"},
			"look in 0s", 20*time.Second - ms},
		{"it looked for a while before", func(s *State, _ *Announce) { s.Queues[0].news.looking.until = at(-ms) }, Written{Others: 1}, []string{"all told"},
			"look in 99ms", 20*time.Second - ms},
	} {
		s := quiet("a", "b")
		s.announcement.written, s.Waits = at(-ms), false
		for _, q := range s.Queues {
			q.news.announced, q.cursor = time.Time{}, looked(cursor.Recent, false)
		}
		a := &Announce{waiting: s.Queues, heard: []int{0, 0}}
		row.given(s, a)
		s.Announced(a, row.as, noon)
		s.announcement.wanted = false
		require.Equal(t, row.then, words(s.Actions()), row.what)
		require.Equal(t, row.a, next(s, s.Queues[0]), row.what)
		require.Equal(t, row.wait, s.announcement.wait(noon), row.what)
	}
}

// A queue begins anew when something of it was resumed, because that is before its cursor, and not when something was paused.
func TestPlan_OnlyWhatIsResumedBeginsAnew(t *testing.T) {
	t.Parallel()
	s := quiet("a", "b")
	s.Kinds = []string{"k", "l"}
	s.Open = s.Kinds
	for _, row := range []struct {
		what    string
		kinds   []string
		queues  map[string]bool
		changed []string
		anew    []bool
	}{
		{"a kind is paused", []string{"l"}, nil, []string{"a", "b"}, []bool{false, false}},
		{"and a queue", []string{"l"}, map[string]bool{"a": true}, []string{"a"}, []bool{false, false}},
		{"it goes on", []string{"l"}, nil, []string{"a"}, []bool{true, false}},
		{"another kind is paused in its place", []string{"k"}, nil, []string{"a", "b"}, []bool{true, true}},
		{"nothing is paused", []string{"k", "l"}, nil, []string{"a", "b"}, []bool{true, true}},
		{"all kinds are", nil, nil, []string{"a", "b"}, []bool{false, false}},
	} {
		for _, q := range s.Queues {
			q.cursor.ReachedEnd(noon)
		}
		require.Equal(t, row.changed, Names(s.Paused(row.kinds, row.queues, noon)), row.what)
		for i, q := range s.Queues {
			require.Equal(t, row.anew[i], q.cursor.Places[0].RunAt.Equal(cursor.Beginning), row.what)
			require.Equal(t, len(row.kinds) == 0 || row.queues[q.Name], q.paused, row.what)
		}
		require.Equal(t, len(row.kinds) < 2 || len(row.queues) > 0, s.holdsBack, row.what)
	}
}

// What a notification means.
func TestPlan_AfterANotification(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		what  string
		event func(s *State)
		then  []string
		a     string
	}{
		{"there are jobs", func(s *State) { s.HasJobs("a", true, noon) }, []string{"not all told"}, "due"},
		{"this process has let them into lanes", func(s *State) { s.HasJobs("a", false, noon) }, nil, "due"},
		{"of another worker's queue", func(s *State) { s.HasJobs("c", true, noon) }, nil, "idle"},
		{"it asks to look for a while", func(s *State) { s.LooksOn("a", looksBriefly, true, noon) }, []string{"not all told"}, "due"},
		{"notifications begin to arrive", func(s *State) { s.Hears(noon) }, []string{"not all told"}, "announcement"},
		{"many come: all is forgotten, and looks come often", func(s *State) {
			for range livelyFrom {
				s.HasJobs("b", true, at(-ms))
			}
			s.found(0, at(rhythm.Briefly))
		}, []string{"not all told"}, "announcement"},
	} {
		s := quiet("a", "b")
		row.event(s)
		require.Equal(t, row.then, words(s.Actions()), row.what)
		require.Equal(t, row.a, next(s, s.Queues[0]), row.what)
	}
}

// Where many others wait, a run that was woken announces itself after the job, and no later because of further ones. Otherwise it does
// so at once.
func TestPlan_AnnouncesItselfAfterTheJobWhereManyWait(t *testing.T) {
	t.Parallel()
	for _, many := range []bool{false, true} {
		s := quiet("a")
		a, q := &s.announcement, s.Queues[0]
		a.many, a.written, q.news.announced = many, at(-time.Second), time.Time{}
		s.settle(q, noon)
		require.True(t, a.wanted)
		if !many {
			require.LessOrEqual(t, a.wait(noon), time.Duration(0))
			continue
		}
		require.Equal(t, rhythm.Moment, a.wait(noon))
		s.settle(q, at(rhythm.Moment/2))
		require.Equal(t, rhythm.Moment, a.wait(noon))
		a.wanted, a.notYet, q.news.looking.until = false, time.Time{}, noon // jobs came often
		s.settle(q, noon)
		require.LessOrEqual(t, a.wait(noon), time.Duration(0))
	}
}

// For how long a run that is woken may get the jobs of a queue alone.
func TestPlan_LooksAloneWhereHandlersAreQuick(t *testing.T) {
	t.Parallel()
	quick, slow := Room{Returned: 10, Worked: int64(10 * quickHandler)}, Room{Returned: 10, Worked: int64(11 * quickHandler)}
	for _, row := range []struct {
		what  string
		given func(s *State)
		room  Room
		then  time.Duration
	}{
		{"handlers are quick", func(*State) {}, quick, looksBriefly},
		{"it found one each before", func(s *State) { s.announcement.looks = looksLong }, quick, looksLong},
		{"handlers are slow", func(*State) {}, slow, 0},
		{"none has returned: as before", func(s *State) { s.announcement.handlers.quick = true }, Room{}, looksBriefly},
		{"nobody else waits", func(s *State) { s.announcement.backed = false }, quick, 0},
		{"there is little room", func(s *State) { s.Queues[1].Count = quickRoom - 1 }, quick, 0},
		{"there may be lanes", func(s *State) { s.Lanes = true }, quick, 0},
		{"there may be lanes, and many wait", func(s *State) { s.Lanes, s.announcement.many = true, true }, quick, looksBriefly},
	} {
		s := quiet("a", "b")
		s.announcement.backed = true
		row.given(s)
		require.Equal(t, row.then, s.looksFor(measured{room: row.room}), row.what)
	}
	l := looking{until: noon, from: at(-50 * ms), jobs: 5}
	require.Equal(t, looksLong, l.next(noon))
	require.Equal(t, looksBriefly, l.next(at(1)))
	require.Zero(t, (&looking{}).next(noon))
}

// What is claimed beyond the slots is what handlers do in the time that a job may wait for a slot and, where a claim waits for its
// turn, in that time too.
func TestPlan_WhatIsClaimedAheadLastsUntilTheNextTurn(t *testing.T) {
	t.Parallel()
	room := Room{Returned: 1000, Worked: 1000 * int64(ms)} // so they could do 100,000 a second
	p := pace{rate: 4000, counted: 1000, countedAt: noon}
	ahead := func(turn time.Duration) int64 { return p.prefetch(room, 100, noon, turn) }
	require.EqualValues(t, 100, ahead(0))
	require.EqualValues(t, 500, ahead(100*ms))
	require.EqualValues(t, table.ChunkRows, ahead(time.Second))
	p.claimed(jobs{1 << 20, 3 << 20})
	require.EqualValues(t, 8, ahead(time.Second), "16 MiB of them")
	for range 30 {
		p.claimed(jobs{1})
	}
	require.EqualValues(t, table.ChunkRows, ahead(time.Second), "small ones again")
	p.careful = true
	require.Zero(t, ahead(time.Second), "a job of which no lease may be lost is claimed when it can start")
	require.Zero(t, p.could(Room{Returned: 99, Worked: 1}, 100), "too few have returned")

	for _, row := range []struct {
		took   time.Duration
		others time.Time
		want   int
	}{{100 * ms, time.Time{}, 200}, {0, at(1), 200}, {100 * ms, at(1), 600}, {time.Second, at(1), 1200}} {
		q := &Queue{Count: 100, Width: 1, turns: turns{waited: row.took, others: row.others}}
		q.pace = pace{rate: 4000, counted: 1000, countedAt: noon}
		require.Equal(t, row.want, q.Want(Room{Usable: 100, Returned: 1000, Worked: room.Worked}, false, noon).N)
	}
}

// What a claim learns of others that claim in the same queue.
func TestPlan_LearnsOfTurns(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		what   string
		turn   []Turn
		waited time.Duration
		then   turns
	}{
		{"without a turn", []Turn{{}}, 0, turns{}},
		{"at once", []Turn{{With: true, Waited: turnAtOnce}}, turnAtOnce, turns{waited: turnAtOnce}},
		{"after a wait", []Turn{{With: true, Waited: ms}}, ms, turns{waited: ms, others: at(cursor.Overlap)}},
		{"somebody else had it", []Turn{{With: true, Missed: true}}, 0, turns{others: at(cursor.Overlap)}},
		{"once in vain", []Turn{{InVain: true}}, 0, turns{vain: 1}},
		{"twice in vain", []Turn{{InVain: true}, {InVain: true}}, 0, turns{vain: 2, from: at(2 * cursor.Overlap)}},
		{"in vain, and then at once", []Turn{{InVain: true}, {With: true}}, 0, turns{}},
		{"in vain, and then somebody else had it", []Turn{{InVain: true}, {With: true, Missed: true}}, 0, turns{vain: 1, others: at(cursor.Overlap)}},
	} {
		var all turns
		var waited time.Duration
		for _, turn := range row.turn {
			waited = all.learn(turn, noon)
		}
		require.Equal(t, row.waited, waited, row.what)
		require.Equal(t, row.then, all, row.what)
	}
}

// What was claimed ahead and waits too long for a slot is given back, later in a queue with a backlog.
func TestPlan_GivesBackWhatWaitsTooLong(t *testing.T) {
	t.Parallel()
	s := quiet("a")
	q := s.Queues[0]
	require.False(t, s.GivesBack(noon), "nothing waits")
	s.ahead, s.gaveBack = true, noon
	require.False(t, s.GivesBack(at(aheadLongest-1)))
	require.True(t, s.GivesBack(at(aheadLongest)))
	require.Equal(t, aheadLongest, q.MayWait())
	s.GaveBack(q, false, false, noon)
	require.Equal(t, "idle", next(s, q))
	require.False(t, s.ahead)
	s.GaveBack(q, true, true, noon)
	require.Equal(t, "again in 20ms", next(s, q), "until then they are written")
	require.True(t, s.ahead)
	q.cursor.Full = true
	require.Equal(t, aheadBacklog, q.MayWait())
	q.next.last = true
	require.Equal(t, aheadLongest, q.MayWait(), "no other job was due")
}

// Thousands of queues need several statements for a look, and there is no more than one a second.
func TestPlan_LooksInSeveralStatementsAreRare(t *testing.T) {
	t.Parallel()
	all := []string{"default"}
	for i := range 5000 {
		all = append(all, fmt.Sprint("q", i))
	}
	s := quiet(all...)
	s.looks.each = [2]time.Duration{5 * time.Microsecond, 5 * time.Microsecond} // 25 ms
	s.looks.took = [2]time.Duration{ms, ms}
	s.Waits = false
	require.Equal(t, 3*pollListening, s.lookInterval())
	s.Waits, s.announcement.leaves = true, true
	require.Equal(t, pollLeaving, s.lookInterval())
	s.looks.each = [2]time.Duration{10 * time.Microsecond, 10 * time.Microsecond}
	require.Equal(t, 6*pollListening, s.lookInterval())
}
