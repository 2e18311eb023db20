// Package model is a small, readable model of the protocol of leases and fences. Its tests explore it in full: every
// order of every step of two workers, a producer, a reaper, crashes and clocks.
//
// It is plain Go instead of TLA+ or Promela. A reader of this library reads Go, and the model runs wherever the
// library's tests run. The protocol needs nothing that those languages have and a map of states lacks: no fairness, no
// real time, and one liveness property, which is that the end can still be reached. A few hundred thousand states take
// seconds.
//
// A step is what one transaction of the library does at once. The model does not take apart what Postgres makes atomic:
// a completion's guard, the effects with it and the commit are one step. Tests on a real server check that the
// statements behave in that way.
package model

import (
	"fmt"
	"strings"
	"testing"
)

// Bounds. Two jobs of one key let a stale worker of the first meet the second. With three claims, the third holder meets
// two stale ones.
const (
	maxJobs   = 2
	maxClaims = 3 // a job that is claimed more often is dead
	workers   = 2
)

// A variant is a mistake that the checks must find.
type variant struct {
	completesWithoutToken bool // a completion checks that the job exists, not the token
	reapsWithoutRecheck   bool // the reaper deletes what it saw, even if that has changed
	sendsBeforeRecording  bool // the outside effect is recorded only after it was sent
	forgetsExpired        bool // an expired lease deletes its job instead of leaving it to the next claim
	countsInTheFence      bool // tokens are counted in the key's row instead of a sequence that outlives it
	knowsEffectsByID      bool // an effect belongs to a job by the id, which may have been another job's before
	keepsEffectsForEver   bool // a requested new run replays what an earlier one did
	cancelsWithoutTrace   bool // cancelling a running job leaves no history
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
	settled       // the outcome was recorded or replayed
	wrote         // the effects in the database are written but not committed
)

type worker struct {
	phase phase
	job   int8 // which job, and the count of its claims
	claim int8
}

// token orders the holders of a key; they compare it as one number: id<<20 | claims.
type token struct{ id, claims int8 }

func (t token) above(other token) bool {
	return t.id > other.id || t.id == other.id && t.claims > other.claims
}

// state is everything: what is in the database, and what each process knows. It is a map key.
type state struct {
	// job_fences
	fence fenceState
	owner int8 // the job that has the key

	ids int8 // the sequence from which ids come

	// jobs
	live   bool
	job    int8 // the newest
	claims int8
	lease  lease

	// the fence of the job's outside effect
	effect    effectState
	effectBy  int8 // the claim that recorded the intent
	effectOf  int8 // its job
	effectID  int8 // that job's id
	effectRun int8 // the number of its run

	id      int8 // the newest job's, from the sequence
	run     int8 // counts the requested runs
	cancel  bool // cancellation was requested
	traced  bool // finished, and visible in the history
	setBack bool // the sequence was set back, once

	workers [workers]worker
	picked  bool // the reaper has seen a fence that it will delete

	// These record what happened, for the properties.
	finished int8     // finished jobs
	commits  int8     // commits of effects, in this lifetime of the key
	calls    int8     // calls to the provider, for this job
	tokens   [2]token // the last two that were given for the key
	broken   string
}

// mine reports whether a worker's token is still valid.
func (s *state) mine(w worker) bool {
	return s.live && s.job == w.job && s.claims == w.claim
}

func (s *state) finish() {
	s.live, s.lease, s.cancel, s.traced = false, nobody, false, true
	s.finished++
	if s.fence == queued && s.owner == s.job {
		s.fence = inWindow
	}
}

// doubtful reports that nobody knows whether the job's effect happened.
func (s *state) doubtful() bool {
	return s.effectOf == s.job && (s.effect == intent || s.effect == intentRanOut || s.effect == held)
}

// own returns the effect, if it belongs to this job and this run.
func (v variant) own(s state) effectState {
	switch {
	case s.effectOf != s.job && !v.knowsEffectsByID, s.effectRun != s.run && !v.keepsEffectsForEver:
		return noIntent
	}
	return s.effect
}

// next returns every state that one step leads to.
func (v variant) next(s state) (all []move[state]) {
	step := func(name string, do func(*state)) {
		n := s
		do(&n)
		all = append(all, move[state]{name, n})
	}

	// The producer. A taken key makes a duplicate, which changes nothing; neither does a caller that rolls back.
	if s.job < maxJobs && (s.fence == absent || s.fence == pastWindow) {
		step("enqueue", func(n *state) {
			if n.live {
				n.broken = "a key was accepted again while its job is live"
			}
			if n.fence == pastWindow { // ids of a key grow, whatever the sequence returns
				n.ids = max(n.ids, n.id)
			}
			n.fence, n.live, n.claims, n.lease, n.traced, n.run = queued, true, 0, nobody, false, 0
			n.job++
			n.ids++
			n.id = n.ids
			n.owner, n.commits, n.calls = n.job, 0, 0
			if n.effectID != n.id {
				n.effect, n.effectBy, n.effectOf, n.effectID, n.effectRun = noIntent, 0, 0, 0, 0
			}
		})
	}

	// Time passes.
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

	// The job is cancelled. If it is not leased, it goes to the history at once.
	if s.live && !s.cancel {
		step("somebody cancels", func(n *state) {
			if n.cancel = true; n.lease == nobody {
				n.finish()
			}
		})
	}
	// A person decides about an effect with unknown outcome. The job must be visible, and its effect not possibly still
	// running.
	if !s.live && s.traced && s.effectOf == s.job && (s.effect == intentRanOut || s.effect == held) && !s.underWay() {
		back := func(n *state) { // the job runs again
			if n.fence == inWindow && n.owner == n.job {
				n.fence, n.live, n.traced = queued, true, false
				n.finished--
			}
		}
		if s.calls > 0 {
			step("somebody says that it happened", func(n *state) { n.effect = outcome; back(n) })
		} else {
			step("somebody says that it did not happen", func(n *state) { n.effect = noIntent; back(n) })
		}
	}
	// A restore or a failover forgets tokens and ids.
	if !s.live && !s.setBack && s.fence == absent && s.job > 0 {
		step("the sequence is set back", func(n *state) { n.ids, n.setBack, n.tokens = 0, true, [2]token{} })
	}

	// The reaper looks, and then deletes what it saw if that is unchanged.
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
		if w.phase != idle && s.mine(w) && s.cancel {
			does("hears that the job is cancelled", func(n *state, w *worker) {
				if n.effect == intent && n.effectOf == w.job && n.effectBy == w.claim {
					n.effect = intentRanOut // it reports that if it can
				}
				n.finish()
				n.traced = !v.cancelsWithoutTrace
				*w = worker{}
			})
		}
		// A worker that was taken for dead needs no step of its own: it goes on from where it was, whenever it wakes
		// up.
		switch w.phase {
		case idle:
			if s.live && s.lease != holds {
				does("claims", func(n *state, w *worker) {
					if n.claims == maxClaims || n.cancel {
						n.finish() // dead or cancelled
						return
					}
					n.claims++
					n.lease = holds
					n.tokens = [2]token{n.tokens[1], {n.id, n.claims}}
					*w = worker{working, n.job, n.claims}
				})
			}
		case working:
			if s.mine(w) {
				does("extends", func(n *state, w *worker) { n.lease = holds })
				does("releases", func(n *state, w *worker) { n.lease, *w = nobody, worker{} })
			}
			switch {
			case v.sendsBeforeRecording && s.job == w.job && v.own(s) != outcome:
				does("sends", func(n *state, w *worker) { w.phase = sent; n.calls++ })
			case !s.mine(w): // refused: recording the intent needs the job's lease
			case v.own(s) == noIntent:
				does("records the intent", func(n *state, w *worker) {
					w.phase, n.effect, n.effectBy = sending, intent, w.claim
					n.effectOf, n.effectID, n.effectRun = w.job, n.id, n.run
				})
			case v.own(s) == outcome:
				does("replays the outcome", func(n *state, w *worker) {
					w.phase = settled
					if n.effectOf != w.job {
						n.broken = "a job replayed what another job of its id did"
					} else if n.effectRun != n.run {
						n.broken = "a run that was asked for replayed what an earlier one did"
					}
				})
			case v.own(s) == intentRanOut, v.own(s) == held: // nobody knows whether it happened, and the policy is to hold
				// A person decides in the end: for the protocol the job is finished.
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
				// A late outcome is accepted too, as long as nobody has run the effect again.
				if n.job == w.job && (n.effectOf == w.job && n.effectBy == w.claim || v.sendsBeforeRecording) {
					n.effect, n.effectOf, n.effectID, n.effectRun = outcome, w.job, n.id, n.run
				}
				w.phase = settled
			})
		case settled:
			does("writes", func(n *state, w *worker) { w.phase = wrote })
		case wrote:
			if s.mine(w) && s.run == 0 {
				does("commits, and asks to run again", func(n *state, w *worker) {
					n.run, n.lease, n.calls = n.run+1, nobody, 0
					*w = worker{}
					if n.cancel {
						n.finish()
					}
				})
			}
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
				*w = worker{} // refused: everything is rolled back
			})
		}
	}
	return all
}

// underWay reports that some process may still call the provider for the job.
func (s *state) underWay() bool {
	for _, w := range s.workers {
		if w.job == s.job && (w.phase == sending || w.phase == sent) {
			return true
		}
	}
	return false
}

// wrong returns the property that a state breaks.
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
	case s.job > 0 && !s.live && !s.traced && s.doubtful():
		return "an effect of unknown outcome is a job's that nobody can find"
	case s.live && (s.fence != queued || s.owner != s.job):
		return "a live job has lost its key"
	}
	return ""
}

// explore visits every reachable state, in the order of the number of steps to it. It returns how many there are, and
// the shortest path to a wrong one.
func (v variant) explore() (states int, wrong string) {
	return explore(state{}, v.next, state.wrong, func(s state) bool { return s.finished == maxJobs }, "from here the jobs cannot be finished any more")
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

// This tests the checks themselves: they must find each mistake.
func TestProtocol_FindsMistakes(t *testing.T) {
	t.Parallel()
	for want, v := range map[string]variant{
		"effects were committed under a token that no longer holds":     {completesWithoutToken: true},
		"the reaper freed a key that is live or inside its window":      {reapsWithoutRecheck: true},
		"the provider was called twice, although the policy is to hold": {sendsBeforeRecording: true},
		"an accepted job is lost":                                       {forgetsExpired: true},
		"a token for a key is not above the one before it":              {countsInTheFence: true},
		"a job replayed what another job of its id did":                 {knowsEffectsByID: true},
		"a run that was asked for replayed what an earlier one did":     {keepsEffectsForEver: true},
		"an effect of unknown outcome is a job's that nobody can find":  {cancelsWithoutTrace: true},
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
