package model

import (
	"fmt"
	"testing"
)

// This file is the model of a group: jobs, of which one may add another one together with its completion, a job that follows
// when all are done, and two promoters. There is no counter: each member has a row, which says whether it is unfinished.
// A completion always writes a call; a promoter deletes the calls that its snapshot has, and admits the follower if its
// snapshot has no unfinished member. The second member was claimed before the group was made: its worker does not know that its
// end must be told, and a sweep finds it. Once somebody may cancel the follower while it waits. It is in the history until a redrive,
// and then waits as before.
//
// Where a dead member ends the follower, a promoter that finds this leaves a call and commits. Then, in another transaction, it locks
// the follower, looks again and cancels it. It may crash before that. A follower that has ended in this way runs when it is redriven,
// unless a member is unfinished. A member that was discarded is as one that was cancelled.
const groupJobs = 3 // the last one is added by the first one's completion

// groupVariant is a mistake that the checks must find, or what a dead member means.
type groupVariant struct {
	waits   bool // for a dead member, until somebody redrives or discards it
	cancels bool // a dead or discarded member ends the follower, too; without waits and cancels, the follower runs

	callsIfLast    bool // a completion writes a call only if it sees no other row
	eatsLateCalls  bool // a promoter deletes calls that came after its snapshot
	addsLater      bool // the added member is inserted after the completion's commit
	noLock         bool // promoters do not take turns, and insert the follower without looking whether it still waits
	subtracts      bool // a number of unfinished members is kept, and subtracted by who crashed or lost its lease too
	forgetsDead    bool // a redriven member has no row again
	redrivesFreely bool // a redrive does not take the promoters' lock
	untold         bool // nobody looks for the end of the member that nobody tells
	goesStraightOn bool // a redriven follower waits only if its redrive sees an unfinished member
	forgetsRule    bool // a redriven follower does not wait for dead members any more
	callsNobody    bool // a redriven follower waits again, and no promoter is told
	runsBesideDead bool // who lets the follower go on does not look for dead members
	cancelsBlindly bool // who cancels the follower does not look again
	looksTooEarly  bool // who cancels the follower looks again in the snapshot of the statement that locks it
	cancelsOnce    bool // a promoter that finds that the follower is to be cancelled leaves no call
	forgetsEnd     bool // nobody notes that it was a dead member that ended the follower
}

type groupPlace int8

const (
	unborn groupPlace = iota
	unfinished
	deadMember
	discardedMember // it was dead
	finished
)

type groupMember struct {
	place  groupPlace
	tx     int8 // 0 none; 1 a transaction has completed it and is not committed; 2 the same, and it dies
	call   bool // that transaction writes a call
	deaths int8
	silent bool // its end is not told; in the end, that it was not told yet
}

type groupPromoter struct {
	// 0 idle; 1 has the lock; 2 has looked. If it is to cancel the follower, after that commit: 3 has no lock any more; 4 has it again;
	// 5 has looked again; 6 has looked again without the lock.
	phase  int8
	calls  bool
	admit  bool
	cancel bool
}

type groupState struct {
	members   [groupJobs]groupMember
	promoters [2]groupPromoter
	called    bool
	adding    bool // the member that is added later
	left      int8 // the number, for subtracts
	follower  int8 // how often it became live
	away      bool // the follower was cancelled, and is in the history
	ended     bool // by a promoter, because of a dead member
	returned  bool // it was redriven
	broken    string
}

// rows says whether a snapshot has the row of a member other than i.
func (s *groupState) rows(v groupVariant, i int) bool {
	for k, m := range s.members {
		if k == i {
			continue
		}
		if m.place > unfinished && m.silent {
			return true // the row still says unfinished
		}
		if m.place == unfinished && !(v.forgetsDead && m.deaths > 0) || m.place == deadMember && v.waits && !(v.forgetsRule && s.returned) {
			return true
		}
	}
	return false
}

// dead says whether a snapshot has the row of a dead or discarded member.
func (s *groupState) dead() bool {
	for _, m := range s.members {
		if (m.place == deadMember || m.place == discardedMember) && !m.silent {
			return true
		}
	}
	return false
}

// mustEnd says whether a snapshot has a follower that is to be cancelled.
func (s *groupState) mustEnd(v groupVariant) bool {
	return s.follower == 0 && !s.away && !s.rows(v, -1) && v.cancels && s.dead() && !(v.forgetsRule && s.returned)
}

// locked says whether a promoter has the lock, and so the follower's row.
func (s *groupState) locked() bool {
	for _, p := range s.promoters {
		if p.phase != 0 && p.phase != 3 && p.phase != 6 {
			return true
		}
	}
	return false
}

func (v groupVariant) next(s groupState) (all []move[groupState]) {
	step := func(name string, do func(*groupState)) {
		n := s
		do(&n)
		if n.follower > s.follower {
			if n.follower > 1 {
				n.broken = "the follower ran twice"
			}
			for _, m := range n.members {
				if m.place == unfinished || n.adding || m.place == deadMember && v.waits {
					n.broken = "the follower ran before a member was done"
				}
			}
			if v.cancels && n.dead() && !s.ended { // who redrives one that ended wants it to run
				n.broken = "the follower ran beside a dead member"
			}
		}
		all = append(all, move[groupState]{name, n})
	}
	for i, m := range s.members {
		does := func(what string, do func(n *groupState, m *groupMember)) {
			step(fmt.Sprintf("member %d %s", i, what), func(n *groupState) { do(n, &n.members[i]) })
		}
		switch {
		case m.place == unfinished && m.tx == 0:
			does("is completed", func(n *groupState, m *groupMember) { m.tx = 1; m.call = !v.callsIfLast || !n.rows(v, i) })
			does("dies", func(n *groupState, m *groupMember) { m.tx = 2; m.call = !v.callsIfLast || !n.rows(v, i) })
			if v.subtracts {
				does("is completed by a stale worker", func(n *groupState, m *groupMember) { n.left--; n.called = true })
			}
		case m.tx > 0:
			does("is rolled back", func(n *groupState, m *groupMember) { m.tx = 0 })
			does("is committed", func(n *groupState, m *groupMember) {
				n.called = n.called || m.call && !m.silent
				if m.place = finished; m.tx == 2 {
					m.place = deadMember
					m.deaths++
				}
				if i == 0 && m.tx == 1 {
					if n.adding = v.addsLater; !n.adding {
						n.members[groupJobs-1].place = unfinished
						n.left++
					}
				}
				n.left--
				m.tx = 0
			})
		case m.place == deadMember && m.deaths == 1 && s.follower == 0 && (v.redrivesFreely || !s.locked()):
			// A redrive takes the promoters' lock: what the member adds then must not come between a look and its commit.
			does("is redriven", func(n *groupState, m *groupMember) { m.place = unfinished; n.left++ })
		case m.place == deadMember && v.waits:
			does("is discarded", func(n *groupState, m *groupMember) { m.place, n.called = finished, true })
		}
		if v.cancels && m.place == deadMember && !m.silent { // of one that is gone before it was told, nobody knows that it was dead
			does("is discarded", func(n *groupState, m *groupMember) { m.place, n.called = discardedMember, true })
		}
	}
	for i, m := range s.members {
		if m.silent && m.tx == 0 && m.place != unborn && !v.untold {
			step(fmt.Sprintf("the sweep looks at member %d", i), func(n *groupState) {
				if n.members[i].silent = false; m.place != unfinished {
					n.called = true
				}
			})
		}
	}
	if s.follower == 0 && !s.locked() { // a promoter has the follower's row locked
		if !s.away && !s.returned {
			step("the follower is cancelled", func(n *groupState) { n.away = true })
		}
		if s.away {
			step("the follower is redriven", func(n *groupState) {
				n.away, n.ended, n.returned = false, false, true
				open := false
				for _, m := range n.members {
					open = open || m.place == unfinished
				}
				if (v.goesStraightOn || s.ended) && !open {
					n.follower++
				}
				n.called = n.called || !v.callsNobody
			})
		}
	}
	if s.adding {
		step("the member is added", func(n *groupState) { n.adding = false; n.members[groupJobs-1].place = unfinished; n.left++ })
	}
	for i, p := range s.promoters {
		does := func(what string, do func(n *groupState, p *groupPromoter)) {
			step(fmt.Sprintf("promoter %d %s", i, what), func(n *groupState) { do(n, &n.promoters[i]) })
		}
		switch {
		case p.phase == 0 && s.called && (!s.locked() || v.noLock):
			does("gets the lock", func(n *groupState, p *groupPromoter) { p.phase = 1 })
		case p.phase == 1:
			does("looks", func(n *groupState, p *groupPromoter) {
				p.phase, p.calls = 2, n.called
				n.called = n.called && v.noLock
				p.cancel = n.mustEnd(v) && !v.runsBesideDead
				p.admit = n.follower == 0 && !n.away && !n.rows(v, -1) && !p.cancel
				if v.subtracts {
					p.admit = n.follower == 0 && !n.away && n.left <= 0
				}
			})
		case p.phase == 2:
			does("commits", func(n *groupState, p *groupPromoter) {
				if v.eatsLateCalls || v.noLock {
					n.called = false
				}
				if p.admit && (n.follower == 0 || v.noLock) {
					n.follower++
				}
				if p.cancel {
					n.called = n.called || !v.cancelsOnce
					*p = groupPromoter{phase: 3}
					return
				}
				*p = groupPromoter{}
			})
			does("is rolled back", func(n *groupState, p *groupPromoter) {
				n.called = n.called || p.calls
				*p = groupPromoter{}
			})
		case p.phase >= 3:
			does("crashes, or finds the follower locked or gone", func(n *groupState, p *groupPromoter) { *p = groupPromoter{} })
			free := !s.locked() && s.follower == 0 && !s.away
			switch {
			case p.phase == 3 && v.looksTooEarly:
				does("looks again", func(n *groupState, p *groupPromoter) { p.phase, p.cancel = 6, n.mustEnd(v) })
			case p.phase == 3 && free:
				does("locks the follower", func(n *groupState, p *groupPromoter) { p.phase = 4 })
			case p.phase == 4:
				does("looks again", func(n *groupState, p *groupPromoter) { p.phase, p.cancel = 5, n.mustEnd(v) || v.cancelsBlindly })
			case p.phase == 6 && free:
				does("locks the follower", func(n *groupState, p *groupPromoter) { p.phase = 5 })
			case p.phase == 5 && p.cancel:
				does("cancels the follower", func(n *groupState, p *groupPromoter) {
					if !n.mustEnd(groupVariant{cancels: true}) {
						n.broken = "the follower was cancelled, and not because of a dead member"
					}
					n.away, n.ended = true, !v.forgetsEnd
					*p = groupPromoter{}
				})
			}
		}
	}
	return all
}

func (s groupState) wrong(v groupVariant) string {
	open := s.adding
	for _, p := range s.promoters {
		open = open || p.phase > 0
	}
	for _, m := range s.members {
		open = open || m.tx > 0
	}
	switch {
	case s.broken != "":
		return s.broken
	case !open && !s.called && s.follower == 0 && !s.away && !s.rows(groupVariant{waits: v.waits}, -1):
		return "all members are done, and the follower waits for ever"
	}
	return ""
}

func (v groupVariant) explore() (states int, wrong string) {
	first := groupState{left: groupJobs - 1}
	for i := range groupJobs - 1 {
		first.members[i].place = unfinished
	}
	first.members[1].silent = true
	return explore(first, v.next, func(s groupState) string { return s.wrong(v) },
		func(s groupState) bool { return s.follower > 0 }, "the follower waits for ever")
}

// The follower runs once, when all members are done, in every order of steps.
func TestGroups(t *testing.T) {
	t.Parallel()
	for _, v := range []groupVariant{{}, {waits: true}, {cancels: true}} {
		states, wrong := v.explore()
		t.Log(states, "states")
		if wrong != "" || states < 300 {
			t.Errorf("%d states; %s", states, wrong)
		}
	}
}

// The checks find each mistake.
func TestGroups_FindsMistakes(t *testing.T) {
	t.Parallel()
	for name, v := range map[string]groupVariant{
		"only the last one calls":      {callsIfLast: true},
		"eats late calls":              {eatsLateCalls: true},
		"adds a member later":          {addsLater: true},
		"promoters without a lock":     {noLock: true},
		"a number that is subtracted":  {subtracts: true},
		"a redrive without the lock":   {redrivesFreely: true},
		"a redriven member has no row": {waits: true, forgetsDead: true},
		"an end that is not told":      {untold: true},

		"a redriven follower goes straight on": {waits: true, goesStraightOn: true},
		"a redriven follower forgets its rule": {waits: true, forgetsRule: true},
		"a redriven follower calls nobody":     {callsNobody: true},

		"a follower runs beside a dead member":   {cancels: true, runsBesideDead: true},
		"a follower is cancelled without a look": {cancels: true, cancelsBlindly: true},
		"a look in the statement that locks":     {cancels: true, looksTooEarly: true},
		"a follower is found only once":          {cancels: true, cancelsOnce: true},
		"nobody knows why a follower ended":      {cancels: true, forgetsEnd: true},
		"a redriven follower is not cancelled":   {cancels: true, forgetsRule: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, wrong := v.explore()
			if wrong == "" {
				t.Error("not found")
			}
			t.Log(wrong)
		})
	}
}
