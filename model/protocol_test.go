// Package model is the protocol of leases and fences, small enough to be read, and explored in full: every order of
// every step of two workers, a producer, a reaper, crashes and clocks.
//
// It is plain Go, and neither TLA+ nor Promela, because a reader of this library reads Go, because it runs wherever
// its tests run, and because the protocol needs nothing that those languages have and a map of states has not: no
// fairness, no real time, and one liveness property, which is that the end can still be reached. A few hundred thousand
// states take seconds.
//
// A step is what one transaction of the library does at once. What Postgres makes atomic is not taken apart: that a
// completion's guard, the effects beside it and the commit are one. That the statements really are so is what the
// tests on a real server are for.
package model

import (
	"fmt"
	"strings"
	"testing"
)

// Bounds. Two jobs of one key let a stale worker of the first meet the second; with three claims the third meets
// two stale ones.
const (
	maxJobs   = 2
	maxClaims = 3 // a job that is claimed more often is dead
	workers   = 2
)

// The variants are the mistakes that the checks must find.
type variant struct {
	completesWithoutToken bool // a completion asks whether the job is there, not for the token
	reapsWithoutRecheck   bool // the reaper deletes what it saw, whatever that has become
	sendsBeforeRecording  bool // the outside effect is recorded after it was sent, and not before
	forgetsExpired        bool // an expired lease deletes its job, in place of leaving it to be taken over
	countsInTheFence      bool // tokens are counted in the key's row, in place of a sequence that outlives it
}

type lease int8

const (
	nobody lease = iota
	holds
	ranOut
)

type fenceState int8

const (
	absent fenceState = iota
	queued            // its job is live
	inWindow
	pastWindow
)

type effectState int8

const (
	noIntent effectState = iota
	intent               // recorded, under effectBy
	intentRanOut
	outcome
	held
)

type phase int8

const (
	idle    phase = iota
	working       // under a lease, as far as it knows
	sending       // the intent is recorded, the provider not called
	sent          // called, the outcome not recorded
	settled       // the outcome is recorded or replayed
	wrote         // the effects in the database are written and not committed
)

type worker struct {
	phase phase
	job   int8 // which job, and the count of its claims
	claim int8
}

// token orders the holders of a key, who compare it as one number: id<<20 | claims.
type token struct{ id, claims int8 }

func (t token) above(other token) bool {
	return t.id > other.id || t.id == other.id && t.claims > other.claims
}

// state is everything: what is in the database, and what each process knows. It is a map's key.
type state struct {
	// job_fences
	fence fenceState
	owner int8 // the job that has the key

	ids int8 // the sequence that tokens begin with

	// jobs
	live   bool
	job    int8 // the newest
	claims int8
	lease  lease

	// the fence of the job's outside effect
	effect   effectState
	effectBy int8 // the claim that recorded the intent

	workers [workers]worker
	picked  bool // the reaper has seen a fence to delete

	// What happened, for the properties.
	finished int8     // jobs
	commits  int8     // of effects, in this lifetime of the key
	calls    int8     // of the provider, for this job
	tokens   [2]token // the last two that were given out for the key
	broken   string
}

// mine says whether a worker's token still counts.
func (s *state) mine(w worker) bool {
	return s.live && s.job == w.job && s.claims == w.claim
}

func (s *state) finish() {
	s.live, s.lease = false, nobody
	s.finished++
	if s.fence == queued && s.owner == s.job {
		s.fence = inWindow
	}
}

type successor struct {
	name string
	state
}

// next gives every state that one step leads to.
func (v variant) next(s state) (all []successor) {
	step := func(name string, do func(*state)) {
		n := s
		do(&n)
		all = append(all, successor{name, n})
	}

	// The producer. A key that is taken makes a duplicate, which changes nothing; so does a caller that rolls back.
	if s.job < maxJobs && (s.fence == absent || s.fence == pastWindow) {
		step("enqueue", func(n *state) {
			if n.live {
				n.broken = "a key was accepted again while its job is live"
			}
			n.fence, n.live, n.claims, n.lease = queued, true, 0, nobody
			n.job++
			n.ids++
			n.owner, n.commits, n.calls, n.effect = n.job, 0, 0, noIntent
		})
	}

	// Time.
	if s.lease == holds {
		step("the lease runs out", func(n *state) {
			n.lease = ranOut
			if v.forgetsExpired {
				n.live = false
			}
		})
	}
	if s.effect == intent {
		step("the intent's lease runs out", func(n *state) { n.effect = intentRanOut })
	}
	if s.fence == inWindow {
		step("the window is over", func(n *state) { n.fence = pastWindow })
	}

	// The reaper: it looks, and deletes what it saw if that is still so.
	if !s.picked && s.fence == pastWindow {
		step("the reaper looks", func(n *state) { n.picked = true })
	}
	if s.picked {
		step("the reaper deletes", func(n *state) {
			n.picked = false
			if n.fence != pastWindow && !v.reapsWithoutRecheck {
				return
			}
			if n.fence == queued || n.fence == inWindow {
				n.broken = "the reaper freed a key that is live or inside its window"
			}
			n.fence = absent
			if v.countsInTheFence {
				n.ids = 0
			}
		})
	}

	for i, w := range s.workers {
		does := func(what string, do func(n *state, w *worker)) {
			step(fmt.Sprintf("worker %d %s", i, what), func(n *state) { do(n, &n.workers[i]) })
		}
		if w.phase != idle {
			does("crashes", func(n *state, w *worker) { *w = worker{} })
		}
		// A worker that was taken for dead is no other step: it goes on where it stood, whenever it wakes up.
		switch w.phase {
		case idle:
			if s.live && s.lease != holds {
				does("claims", func(n *state, w *worker) {
					if n.claims == maxClaims {
						n.finish() // dead
						return
					}
					n.claims++
					n.lease = holds
					n.tokens = [2]token{n.tokens[1], {n.ids, n.claims}}
					*w = worker{working, n.job, n.claims}
				})
			}
		case working:
			if s.mine(w) {
				does("extends", func(n *state, w *worker) { n.lease = holds })
				does("releases", func(n *state, w *worker) { n.lease, *w = nobody, worker{} })
			}
			switch {
			case v.sendsBeforeRecording && s.job == w.job && s.effect != outcome:
				does("sends", func(n *state, w *worker) { w.phase = sent; n.calls++ })
			case !s.mine(w): // refused: the intent asks for the job's lease
			case s.effect == noIntent:
				does("records the intent", func(n *state, w *worker) { w.phase, n.effect, n.effectBy = sending, intent, w.claim })
			case s.effect == outcome:
				does("replays the outcome", func(n *state, w *worker) { w.phase = settled })
			case s.effect == intentRanOut, s.effect == held: // nobody knows whether it happened, and the policy is to hold
				// Somebody looks at it, in the end: to the protocol it is finished.
				does("holds the job", func(n *state, w *worker) { n.effect = held; n.finish(); *w = worker{} })
			}
		case sending:
			does("sends", func(n *state, w *worker) {
				w.phase = sent
				if n.job == w.job {
					n.calls++
				}
			})
		case sent:
			does("records the outcome", func(n *state, w *worker) {
				// Accepted late as well, as long as nobody has run the effect again.
				if n.job == w.job && (n.effectBy == w.claim || v.sendsBeforeRecording) {
					n.effect = outcome
				}
				w.phase = settled
			})
		case settled:
			does("writes", func(n *state, w *worker) { w.phase = wrote })
		case wrote:
			does("completes and commits", func(n *state, w *worker) {
				guard := n.mine(*w)
				if v.completesWithoutToken {
					guard = n.live && n.job == w.job
				}
				if guard {
					if !n.mine(*w) {
						n.broken = "effects were committed under a token that no longer holds"
					}
					n.commits++
					n.finish()
				}
				*w = worker{} // refused: all of it is rolled back
			})
		}
	}
	return all
}

// wrong says which property a state breaks.
func (s state) wrong() string {
	live := int8(0)
	if s.live {
		live = 1
	}
	switch {
	case s.broken != "":
		return s.broken
	case s.commits > 1:
		return "effects were committed twice in one lifetime of the key"
	case s.calls > 1:
		return "the provider was called twice, although the policy is to hold"
	case s.job != s.finished+live:
		return "an accepted job is lost"
	case s.tokens[1] != token{} && !s.tokens[1].above(s.tokens[0]):
		return "a token for a key is not above the one before it"
	case s.live && (s.fence != queued || s.owner != s.job):
		return "a live job has lost its key"
	}
	return ""
}

// explore goes over every state that can be reached, in the order of the steps to it. It gives how many there are, and
// the shortest way to one that is wrong.
func (v variant) explore() (states int, wrong string) {
	type arrival struct {
		from state
		by   string
	}
	seen := map[state]arrival{{}: {}}
	before := make(map[state][]state) // the other way round, for the last property
	queue := []state{{}}
	trace := func(s state, what string) string {
		var steps []string
		for s != (state{}) {
			steps = append(steps, seen[s].by)
			s = seen[s].from
		}
		var b strings.Builder
		b.WriteString(what)
		for i := len(steps) - 1; i >= 0; i-- {
			b.WriteString("\n\t" + steps[i])
		}
		return b.String()
	}
	var ends []state
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		if what := s.wrong(); what != "" {
			return len(seen), trace(s, what)
		}
		if s.finished == maxJobs {
			ends = append(ends, s)
		}
		for _, n := range v.next(s) {
			before[n.state] = append(before[n.state], s)
			if _, ok := seen[n.state]; !ok {
				seen[n.state] = arrival{s, n.name}
				queue = append(queue, n.state)
			}
		}
	}
	// Nothing is stuck: from every state all jobs can still be accepted and finished.
	can := make(map[state]bool)
	for len(ends) > 0 {
		s := ends[len(ends)-1]
		ends = ends[:len(ends)-1]
		if !can[s] {
			can[s] = true
			ends = append(ends, before[s]...)
		}
	}
	for s := range seen {
		if !can[s] {
			return len(seen), trace(s, "from here the jobs cannot be finished any more")
		}
	}
	return len(seen), ""
}

func TestProtocol(t *testing.T) {
	t.Parallel()
	states, wrong := variant{}.explore()
	t.Logf("%d states", states)
	if wrong != "" {
		t.Fatal(wrong)
	}
	if states < 10_000 {
		t.Fatalf("only %d states: steps that should be possible are not", states)
	}
}

// What must be found is found: a test of the test above.
func TestProtocol_FindsMistakes(t *testing.T) {
	t.Parallel()
	for want, v := range map[string]variant{
		"effects were committed under a token that no longer holds":     {completesWithoutToken: true},
		"the reaper freed a key that is live or inside its window":      {reapsWithoutRecheck: true},
		"the provider was called twice, although the policy is to hold": {sendsBeforeRecording: true},
		"an accepted job is lost":                                       {forgetsExpired: true},
		"a token for a key is not above the one before it":              {countsInTheFence: true},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			_, wrong := v.explore()
			t.Log(wrong)
			if !strings.HasPrefix(wrong, want) {
				t.Fatalf("found: %q", wrong)
			}
		})
	}
}
