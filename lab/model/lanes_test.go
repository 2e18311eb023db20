package model

import (
	"fmt"
	"strings"
	"testing"
)

// This file is the model of one lane: jobs that wait for their turn, the completions that hand it on, and the promoters
// that admit what no completion could see. It explores every order of the steps of two workers, two promoters, an operator
// who cancels and redrives, and changes of the limit.
//
// A transaction is two steps where it matters: its statement, which sees what is committed and locks rows, and its commit
// or rollback. A call is a row that says "look at this lane". Whatever may leave room in a lane, or a job that nobody has
// seen yet, writes one in the same commit; a promoter deletes the calls that its snapshot has.
//
// An enqueue, a redrive and a change of the limit read nothing of the lane, and nobody sees them before they commit. So one step
// is enough for each of them, with two exceptions. An enqueue draws its id before it commits, so jobs with larger ids may come
// into the lane first. And its call is due from its statement on, which may be long before anybody can see it. Where a variant has
// opens, enqueues and redrives are two steps each.
//
// The order that is promised is that of the jobs that are committed when a statement looks for the next one. Nobody passes one of
// these. What is committed later is not waited for.

const (
	laneJobs   = 3
	laneClaims = 2 // how often a job is claimed, if its variant does not say
)

// laneVariant is a mistake that the checks must find, or a way in which a lane is declared.
type laneVariant struct {
	n        int8 // the limit at the beginning
	changes  int8 // how often the limit changes
	claims   int8 // how often a job is claimed
	overtake bool // a failed job leaves its place
	stops    bool // a dead job stops its lane
	noCancel bool // nobody cancels
	serial   bool // completions run above READ COMMITTED, and leave the lane to the promoters
	opens    bool // enqueues and redrives stay open, and commit in any order or are rolled back
	late     bool // some enqueues stay open for so long that only a look for all calls finds theirs

	countsWhenLocking  bool // a promoter counts in the snapshot of the statement that waits for the lock
	handsOverUnguarded bool // a stale completion admits a successor
	calmCompletion     bool // a completion without a successor writes no call
	calmEnqueue        bool // Enqueue writes no call
	eatsLateCalls      bool // a promoter deletes calls that came after its snapshot
	dropsLockedHead    bool // a promoter that meets a locked head does not keep the call
	passesLockedHead   bool // who meets a locked head takes the next one
	handsOverAbove     bool // completions hand over although the limit was lowered
	redrivesIntoJobs   bool // a redriven job is live at once
	endsShrinkingBlind bool // hand-over is allowed again without the promoters' lock
	handsOverStopped   bool // completions hand over although a dead job stops the lane
	enqueueCallsFirst  bool // the call of an enqueue is committed before the job
	redriveCallsFirst  bool // the same for a redrive
	forgetsLate        bool // promoters look only for calls that became due lately
	waitsForGaps       bool // who sees that an id is missing waits for its enqueue
	looksOnward        bool // a completion looks for the next job only behind its own
}

// laneFault is a property that is broken. It is a number because states with pointers cost the garbage collector too much.
type laneFault int8

const (
	noFault laneFault = iota
	tooMany
	filledAgain
	overtaken
	letIn
	staysStill
	stuck
)

func (f laneFault) String() string {
	return [...]string{
		noFault:     "",
		tooMany:     "more jobs of a lane are live than its limit allows",
		filledAgain: "a lane above its lowered limit was filled again",
		overtaken:   "a job was overtaken",
		letIn:       "a lane that a dead job stops let another one in",
		staysStill:  "a lane with waiting jobs and room stays still",
		stuck:       "from here the jobs cannot be finished any more",
	}[f]
}

type lanePlace int8

const (
	nowhere lanePlace = iota
	begun             // has an id; its enqueue is open
	waits
	sleeps // waits for its time first: a failed job that left its place
	live
	isDead
	gone // completed, cancelled, discarded or never committed
)

// laneJob is one job.
type laneJob struct {
	place  lanePlace
	holder int8 // worker + 1; 0: nobody
	claims int8
	ended  int8 // how often it was dead; a redrive is possible once
	locked bool // a transaction has its row
}

// laneTx is an open transaction of a worker, or of the operator, who cancels or redrives.
type laneTx struct {
	open  bool
	hands bool      // a completion has still to look for the next job
	job   int8      // whose row it takes away or brings back, + 1; 0: none, the guard did not hold
	to    lanePlace // where that goes
	next  int8      // the successor, + 1; 0: none
	call  bool
	epoch int8 // of the limit that its statement saw
	seen  int8 // the jobs that its statement saw in the successor's way
}

// laneWorker holds a lease, as far as it knows.
type laneWorker struct {
	job   int8 // + 1; 0: none
	claim int8
	tx    laneTx
}

// lanePromoter is one promoter.
type lanePromoter struct {
	phase int8 // 0 idle, 1 has the lock, 2 has looked
	room  int8 // what a promoter that counts too early has counted
	next  int8 // + 1
	all   bool // it looks for all calls, also for the late ones
	calls bool // it has deleted the calls
	again bool // it writes a new one
	seen  int8
	epoch int8 // of the limit that it saw
}

// laneState is everything. It is a map key.
type laneState struct {
	jobs      [laneJobs]laneJob
	workers   [2]laneWorker
	promoters [2]lanePromoter
	operator  laneTx
	n         int8
	shrinking bool // the limit was lowered: completions do not hand over
	resetting bool // somebody who ends that without the lock has counted
	epoch     int8 // counts the changes of the limit
	called    bool
	late      bool // there is a call that became visible long after it was due
	high      int8 // more jobs than this must not be live
	broken    laneFault
}

func (s *laneState) live() (n int8) {
	for _, j := range s.jobs {
		if j.place == live {
			n++
		}
	}
	return n
}

func (s *laneState) stopped(v laneVariant) bool {
	for _, j := range s.jobs {
		if v.stops && j.place == isDead {
			return true
		}
	}
	return false
}

// head returns the waiting job whose turn it is, + 1, and whether its row is free. It leaves out so many jobs at the beginning.
func (s *laneState) head(v laneVariant, without int8) (next int8, free bool) {
	free = true
	for i, j := range s.jobs {
		switch {
		case v.waitsForGaps && j.place == begun:
			return 0, true
		case j.place != waits, int8(i) < without:
		case v.passesLockedHead && j.locked:
			free = false
		default:
			return int8(i + 1), !j.locked
		}
	}
	return 0, free
}

// inTheWay returns the jobs that a statement sees and because of which next must not become live: those that wait before it, and dead
// ones that stop the lane.
func (s *laneState) inTheWay(v laneVariant, next int8) (seen int8) {
	for i, j := range s.jobs {
		if j.place == waits && int8(i+1) < next || v.stops && j.place == isDead && next > 0 {
			seen |= 1 << i
		}
	}
	return seen
}

// admit makes a job live. Nothing that was in its way when that was decided may still be there.
func (s *laneState) admit(next, seen int8) {
	if next == 0 {
		return
	}
	j := &s.jobs[next-1]
	j.place, j.locked, j.holder = live, false, 0
	for i := range s.jobs {
		switch {
		case seen&(1<<i) == 0:
		case s.jobs[i].place == waits:
			s.broken = overtaken
		case s.jobs[i].place == isDead:
			s.broken = letIn
		}
	}
}

func (s *laneState) commit(v laneVariant, t *laneTx) {
	if t.job > 0 {
		j := &s.jobs[t.job-1]
		j.place, j.holder, j.locked = t.to, 0, false
		switch t.to {
		case isDead:
			j.ended++
		case waits:
			j.claims = v.claims - 1
		}
	}
	if t.next > 0 && t.epoch == s.epoch && s.live() >= s.n && t.job > 0 {
		s.broken = filledAgain
	}
	s.admit(t.next, t.seen)
	s.called = s.called || t.call
	*t = laneTx{}
}

func (s *laneState) rollBack(t *laneTx) {
	if t.job > 0 {
		s.jobs[t.job-1].locked = false
	}
	if t.next > 0 {
		s.jobs[t.next-1].locked = false
	}
	*t = laneTx{}
}

// locked reports whether a promoter has the lane's lock row.
func (s *laneState) lockTaken() bool {
	return s.promoters[0].phase > 0 || s.promoters[1].phase > 0
}

// next returns every state that one step leads to.
func (v laneVariant) next(s laneState) []move[laneState] {
	all := make([]move[laneState], 0, 16)
	step := func(name string, do func(*laneState)) {
		n := s
		do(&n)
		if n.high = max(n.high, n.n); n.broken == noFault && n.live() > n.high {
			n.broken = tooMany
		}
		n.high = max(n.n, min(n.high, n.live())) // a lowered limit holds as soon as enough jobs have finished
		all = append(all, move[laneState]{name, n})
	}
	for i, j := range s.jobs {
		switch {
		case j.place == nowhere && i > 0 && s.jobs[i-1].place == nowhere: // ids are drawn in their order
		case j.place == nowhere && v.opens:
			step(fmt.Sprintf("the enqueue of job %d begins", i), func(n *laneState) {
				n.jobs[i].place = begun
				n.called = n.called || v.enqueueCallsFirst
			})
		case j.place == begun:
			step(fmt.Sprintf("the enqueue of job %d commits", i), func(n *laneState) {
				n.jobs[i].place = waits
				n.called = n.called || !v.enqueueCallsFirst
			})
			if v.late {
				step(fmt.Sprintf("the enqueue of job %d commits late", i), func(n *laneState) { n.jobs[i].place, n.late = waits, true })
			}
			step(fmt.Sprintf("the enqueue of job %d is rolled back", i), func(n *laneState) { n.jobs[i].place = gone })
		case j.place == nowhere:
			step(fmt.Sprintf("job %d is enqueued", i), func(n *laneState) {
				n.jobs[i].place = waits
				n.called = n.called || !v.calmEnqueue
			})
		case j.place == sleeps:
			step(fmt.Sprintf("job %d is due again", i), func(n *laneState) { n.jobs[i].place, n.called = waits, true })
		case j.place == live && j.holder > 0 && !j.locked:
			step(fmt.Sprintf("job %d loses its lease", i), func(n *laneState) { n.jobs[i].holder = 0 })
		case j.place == isDead && j.ended == 1 && v.opens:
			if !s.operator.open {
				step(fmt.Sprintf("job %d is being redriven", i), func(n *laneState) {
					n.operator = laneTx{open: true, job: int8(i + 1), to: waits, call: !v.redriveCallsFirst}
					n.jobs[i].locked = true
					n.called = n.called || v.redriveCallsFirst
				})
			}
		case j.place == isDead && j.ended == 1:
			step(fmt.Sprintf("job %d is redriven", i), func(n *laneState) {
				n.jobs[i].place, n.jobs[i].claims, n.called = waits, v.claims-1, true
				if v.redrivesIntoJobs {
					n.jobs[i].place = live
				}
			})
		case j.place == isDead:
			step(fmt.Sprintf("job %d is discarded", i), func(n *laneState) { n.jobs[i].place, n.called = gone, true })
		}
		// Somebody cancels a job that nobody holds, in a transaction that may stay open.
		if !v.noCancel && !s.operator.open && !j.locked && (j.place == waits || j.place == sleeps || j.place == live && j.holder == 0) {
			step(fmt.Sprintf("job %d is being cancelled", i), func(n *laneState) {
				n.operator = laneTx{open: true, job: int8(i + 1), to: gone, call: j.place == live}
				n.jobs[i].locked = true
			})
		}
	}
	if s.operator.open {
		step("the operator commits", func(n *laneState) { n.commit(v, &n.operator) })
		step("the operator is rolled back", func(n *laneState) { n.rollBack(&n.operator) })
	}
	if s.epoch < v.changes {
		step(fmt.Sprintf("the limit becomes %d", 3-s.n), func(n *laneState) {
			n.shrinking = 3-n.n < n.n
			n.n = 3 - n.n
			n.epoch++
			n.called = true
		})
	}
	// When no more jobs are live than the lowered limit allows, completions hand over again.
	switch {
	case v.endsShrinkingBlind && s.shrinking && !s.resetting && s.live() <= s.n:
		step("somebody counts the live jobs", func(n *laneState) { n.resetting = true })
	case v.endsShrinkingBlind && s.resetting:
		step("completions hand over again", func(n *laneState) { n.resetting, n.shrinking = false, false })
	case !v.endsShrinkingBlind && s.shrinking && !s.lockTaken() && s.live() <= s.n:
		step("completions hand over again", func(n *laneState) { n.shrinking = false })
	}
	for i := range s.workers {
		v.worker(&s, i, step)
	}
	for i := range s.promoters {
		v.promoter(&s, i, step)
	}
	return all
}

func (v laneVariant) worker(s *laneState, i int, step func(string, func(*laneState))) {
	w := s.workers[i]
	does := func(what string, do func(n *laneState, w *laneWorker)) {
		step("worker "+string(rune('0'+i))+" "+what, func(n *laneState) { do(n, &n.workers[i]) })
	}
	switch {
	case w.tx.hands:
		does("hands over", func(n *laneState, w *laneWorker) { v.handOver(n, &w.tx) })
		does("is rolled back", func(n *laneState, w *laneWorker) { n.rollBack(&w.tx) })
		return
	case w.tx.open:
		does("commits", func(n *laneState, w *laneWorker) { n.commit(v, &w.tx); *w = laneWorker{} })
		does("is rolled back", func(n *laneState, w *laneWorker) { n.rollBack(&w.tx) })
		return
	}
	if w.job == 0 {
		for k, j := range s.jobs {
			if j.place == live && j.holder == 0 && !j.locked && j.claims < v.claims {
				does(fmt.Sprintf("claims job %d", k), func(n *laneState, w *laneWorker) {
					n.jobs[k].claims++
					n.jobs[k].holder = int8(i + 1)
					*w = laneWorker{job: int8(k + 1), claim: n.jobs[k].claims}
				})
			} else if j.place == live && j.holder == 0 && !j.locked {
				does(fmt.Sprintf("finds that job %d is dead", k), func(n *laneState, w *laneWorker) { v.finish(n, &w.tx, int8(k+1), isDead) })
			}
		}
		return
	}
	j := s.jobs[w.job-1]
	held := j.place == live && j.holder == int8(i+1) && j.claims == w.claim && !j.locked
	switch {
	case held:
		does("completes", func(n *laneState, w *laneWorker) { v.finish(n, &w.tx, w.job, gone) })
		if v.overtake && j.claims < v.claims {
			does("fails, and leaves its place", func(n *laneState, w *laneWorker) { v.finish(n, &w.tx, w.job, sleeps) })
		} else {
			does("fails", func(n *laneState, w *laneWorker) { n.jobs[w.job-1].holder = 0; *w = laneWorker{} })
		}
		does("crashes", func(n *laneState, w *laneWorker) { *w = laneWorker{} })
	case v.handsOverUnguarded:
		does("completes, stale", func(n *laneState, w *laneWorker) { v.finish(n, &w.tx, 0, gone) })
	default: // also when the row is locked: it waits, and then its guard does not hold or it goes on
		if !j.locked {
			does("completes, stale", func(n *laneState, w *laneWorker) { *w = laneWorker{} })
		}
	}
}

// finish is the step of a transaction that takes a job out of the live ones. The step that hands over follows, and sees what was committed
// between the two.
func (v laneVariant) finish(n *laneState, t *laneTx, job int8, to lanePlace) {
	*t = laneTx{open: true, job: job, to: to}
	if job > 0 {
		n.jobs[job-1].locked = true
	}
	t.hands = !v.stops || to != isDead // then the lane stays still until somebody decides
}

// handOver is that step.
func (v laneVariant) handOver(n *laneState, t *laneTx) {
	t.hands, t.epoch = false, n.epoch
	without := int8(0)
	if v.looksOnward {
		without = t.job
	}
	if !v.serial && (!n.shrinking || v.handsOverAbove) && (!n.stopped(v) || v.handsOverStopped) {
		if next, free := n.head(v, without); free {
			t.next, t.seen = next, n.inTheWay(v, next)
		}
	}
	if t.next > 0 {
		n.jobs[t.next-1].locked = true
	} else {
		t.call = !v.calmCompletion
	}
}

func (v laneVariant) promoter(s *laneState, i int, step func(string, func(*laneState))) {
	p := s.promoters[i]
	does := func(what string, do func(n *laneState, p *lanePromoter)) {
		step("promoter "+string(rune('0'+i))+" "+what, func(n *laneState) { do(n, &n.promoters[i]) })
	}
	look := func(n *laneState, p *lanePromoter, room int8) {
		p.phase, p.calls, p.epoch = 2, n.called, n.epoch
		n.called, n.late = false, n.late && !p.all
		if room <= 0 || n.stopped(v) {
			return
		}
		next, free := n.head(v, 0)
		if !free {
			p.again = !v.dropsLockedHead
			return
		}
		if p.next, p.seen = next, n.inTheWay(v, next); next > 0 {
			n.jobs[next-1].locked = true
			p.again = true // there may be more room
		}
	}
	switch p.phase {
	case 0:
		if v.countsWhenLocking && s.called {
			// The statement began before the other promoter's commit, waits for the lock, and then goes on with what it has seen.
			if p.room == 0 && s.n > s.live() {
				does("counts", func(n *laneState, p *lanePromoter) { p.room = n.n - n.live() })
			}
			if p.room > 0 && !s.lockTaken() {
				does("gets the lock and admits", func(n *laneState, p *lanePromoter) { look(n, p, p.room); p.room = 0 })
			}
			return
		}
		if s.called && !s.lockTaken() {
			does("gets the lock", func(n *laneState, p *lanePromoter) { p.phase = 1 })
		}
		if s.late && !s.lockTaken() && !v.forgetsLate { // now and then it looks for all calls
			does("gets the lock, and looks for all calls", func(n *laneState, p *lanePromoter) { p.phase, p.all = 1, true })
		}
	case 1:
		does("looks", func(n *laneState, p *lanePromoter) { look(n, p, n.n-n.live()) })
	case 2:
		does("commits", func(n *laneState, p *lanePromoter) {
			if v.eatsLateCalls {
				n.called = false
			}
			n.admit(p.next, p.seen)
			if p.epoch != n.epoch { // the limit was lowered after it looked, which comes to the same as a moment later
				n.high = max(n.high, n.live())
			}
			n.called = n.called || p.again
			*p = lanePromoter{}
		})
		does("is rolled back", func(n *laneState, p *lanePromoter) {
			if p.next > 0 {
				n.jobs[p.next-1].locked = false
			}
			n.called, n.late = n.called || p.calls, n.late || p.all
			*p = lanePromoter{}
		})
	}
}

// wrong returns the property that a state breaks. A promoter that has looked has taken the calls, and its commit decides. No other
// open transaction is an excuse: it may stay open for long, so a call must be there for the time after it.
func (s laneState) wrong(v laneVariant) laneFault {
	next, _ := s.head(laneVariant{}, 0)
	switch {
	case s.broken != noFault:
		return s.broken
	case !s.lockTaken() && !s.called && !s.late && next > 0 && s.live() < s.n && !s.stopped(v):
		return staysStill
	}
	return noFault
}

// explore visits every reachable state. It returns how many there are, and the shortest path to a wrong one.
func (v laneVariant) explore() (states int, wrong string) {
	if v.claims == 0 {
		v.claims = laneClaims
	}
	return explore(laneState{n: v.n, high: v.n}, v.next, func(s laneState) string { return s.wrong(v).String() }, func(s laneState) bool {
		return s.jobs[0].place == gone && s.jobs[1].place == gone && s.jobs[2].place == gone
	}, stuck.String())
}

func TestLanes(t *testing.T) {
	t.Parallel()
	for name, v := range map[string]laneVariant{
		"one at a time":           {n: 1},
		"above read committed":    {n: 1, serial: true, noCancel: true},
		"two at a time":           {n: 2, claims: 1, stops: true, opens: true},
		"the limit is lowered":    {n: 2, changes: 1, noCancel: true},
		"the limit changes twice": {n: 2, claims: 1, changes: 2, noCancel: true}, // with two claims there are 5 million states; they are all right
		"the limit is raised":     {n: 1, changes: 1, noCancel: true},
		"failed jobs leave":       {n: 1, overtake: true, noCancel: true},
		"dead jobs stop the lane": {n: 1, stops: true, noCancel: true},
		"enqueues stay open":      {n: 1, opens: true, noCancel: true},
		"enqueues commit late":    {n: 1, claims: 1, opens: true, late: true, noCancel: true},
	} {
		t.Run(name, func(t *testing.T) { // one after the other, for the memory
			states, wrong := v.explore()
			t.Logf("%d states", states)
			if wrong != "" {
				t.Fatal(wrong)
			}
			if states < 10_000 {
				t.Fatalf("only %d states: steps that should be possible are not", states)
			}
		})
	}
}

// This tests the checks themselves: they must find each mistake.
func TestLanes_FindsMistakes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		v    laneVariant
		want laneFault
	}{
		"counts in the snapshot that waits for the lock":     {laneVariant{n: 1, countsWhenLocking: true}, tooMany},
		"a stale completion admits a successor":              {laneVariant{n: 1, handsOverUnguarded: true}, tooMany},
		"a redriven job is live at once":                     {laneVariant{n: 1, redrivesIntoJobs: true}, tooMany},
		"a completion without a successor writes no call":    {laneVariant{n: 1, calmCompletion: true}, staysStill},
		"Enqueue writes no call":                             {laneVariant{n: 1, calmEnqueue: true}, staysStill},
		"a promoter deletes calls that it has not seen":      {laneVariant{n: 1, eatsLateCalls: true}, staysStill},
		"a promoter drops the call of a locked head":         {laneVariant{n: 1, dropsLockedHead: true}, staysStill},
		"who meets a locked head takes the next one":         {laneVariant{n: 1, passesLockedHead: true}, overtaken},
		"completions hand over above a lowered limit":        {laneVariant{n: 2, changes: 1, noCancel: true, handsOverAbove: true}, filledAgain},
		"hand-over is allowed again by who has not the lock": {laneVariant{n: 2, changes: 3, noCancel: true, endsShrinkingBlind: true}, filledAgain},
		"completions hand over in a lane that is stopped":    {laneVariant{n: 2, claims: 1, stops: true, noCancel: true, handsOverStopped: true}, letIn},
		"the call of an enqueue is committed before it":      {laneVariant{n: 1, opens: true, enqueueCallsFirst: true}, staysStill},
		"the call of a redrive is committed before it":       {laneVariant{n: 1, claims: 1, opens: true, noCancel: true, redriveCallsFirst: true}, staysStill},
		"an id that is missing is waited for":                {laneVariant{n: 1, opens: true, waitsForGaps: true}, staysStill},
		"a completion looks only behind its own job":         {laneVariant{n: 1, opens: true, noCancel: true, looksOnward: true}, overtaken},
		"promoters look only for calls of late":              {laneVariant{n: 1, claims: 1, serial: true, opens: true, late: true, noCancel: true, forgetsLate: true}, stuck},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, wrong := c.v.explore()
			t.Log(wrong)
			if !strings.HasPrefix(wrong, c.want.String()) {
				t.Fatalf("found: %q", wrong)
			}
		})
	}
}
