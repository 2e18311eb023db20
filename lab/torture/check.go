package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// history is everything that a run recorded. Producers and the provider write journals, triggers write the audit trail, and
// handlers write the ledger. At the end, the queue's own tables are read too.
type history struct {
	Ops    []op
	Noted  map[string]bool // operations whose transaction has committed
	Trail  []step
	Ledger []entry
	Calls  []call
	Ends   []end

	Lanes  []laneStep
	Emits  []emitRow
	Heard  []heardRow
	Before map[int64]bool // jobs that were accepted after their event was there
	Groups []groupStep
	Joined []joinedRow
	Ticks  []tickRow
	Tended []tended
	Still  []string // schedules that never caught up

	Fences   []fenceStep // of requests
	Requests []request

	Events []event
	Doubts []doubt
	Panics []string // processes that ended by a panic
	Tables string   // what is wrong with the queue's own tables, or ""
}

// doubt is an effect that waits for somebody's decision although its job is nowhere.
type doubt struct {
	Effect string
	State  int
}

// step is a row of the audit trail.
type step struct {
	What  string // of a job: accepted, claimed or gone; of a key's fence: pruned; or setBack
	Job   int64  // its identity
	Key   string
	Work  string
	Token int64
	Op    string
}

// setBack is the step at which the sequence of ids was set back.
const setBack = "sequence set back"

// entry is a row of the ledger: one effect.
type entry struct {
	Work, Form string
	Job, Token int64
	Nonce      string
}

// end is what became of a job.
type end struct {
	Job        int64
	Key        string
	Work, Form string
	State      string // completed, dead, cancelled, held or unfinished
	Result     string
	Lost       int
	Gone       bool // nothing is left of it but the audit trail
}

// These are the sorts of violations.
const (
	vLost       = "lost"               // accepted but without an end, or acknowledged but never accepted
	vUnfinished = "unfinished"         // accepted and not finished when the run was over
	vPhantom    = "rolled back"        // accepted although the caller's transaction was rolled back, or accepted in part
	vKey        = "key accepted twice" // two jobs for one key
	vEffect     = "effects"            // a completed job without exactly one effect, or another job with any
	vToken      = "tokens"             // a key's tokens do not grow, or an effect was made under a token that was not the last
	vAnswer     = "answers"            // a duplicate was told another job, or another result, than the committed one
	vCall       = "outside calls"      // a call was repeated where the policy does not allow it, or no call took effect
	vCallKey    = "downstream key"     // calls for one job under several keys, or one key for several jobs
	vDead       = "dead for nothing"   // a job is dead that can be done, or a job that ends its process is not dead
	vReadOnly   = "read only"          // a statement of the library's own was refused because transactions are read-only by default
	vLane       = "lanes"              // more jobs of a lane are live than its limit, or one became live before its turn
	vLimit      = "limits"             // more jobs of a limit are live than it allows, or more start in a time
	vFlow       = "flows"              // a flow heard something else than the first event, or two things, or its effects are not in order
	vGroup      = "groups"             // a job went on before those that it waits for, or not after them, or was told something wrong of them
	vTick       = "ticks"              // a tick was fired twice, never, or in a pause, or the ledger of ticks does not say what happened
	vPanic      = "panics"             // a process ended by one
	vTables     = "tables"             // the queue's own tables are not as they must be
)

var sorts = []string{vLost, vUnfinished, vPhantom, vKey, vEffect, vToken, vAnswer, vCall, vCallKey, vDead, vLane, vLimit, vFlow, vGroup, vTick, vReadOnly, vPanic, vTables}

// verdict is what the checker found.
type verdict struct {
	Accepted                                 int            // jobs
	Ends                                     map[string]int // by state
	Committed, RolledBack, Unknown           int            // operations
	UnknownCommitted                         int
	Duplicates, Replayed                     int // all duplicates, and those that got a result
	Entries, Calls, Repeated, Claims, Losses int
	Admitted, MostLive, Limits               int           // jobs that became live in a lane, most of a lane at once, changes of limits
	Starts                                   int           // of jobs with a rate
	Emitted, Came, TimedOut                  int           // events that were first, and flows by what they heard
	Joins, Joined                            int           // jobs that went on after others, and what they were told of
	JoinWait                                 time.Duration // the longest that one still waited when the others were done
	Ticks, Missed, Paused, Backfilled        int
	Tended                                   int            // pauses, ranges that were back-filled, and schedules that were pruned
	Requests                                 map[string]int // by the outcome of their answer
	Uses                                     map[string]int // uses of their keys, by how they ended
	Violations                               map[string][]string
}

func (v *verdict) violation(sort, format string, args ...any) {
	v.Violations[sort] = append(v.Violations[sort], fmt.Sprintf(format, args...))
}

func (v *verdict) count() (n int) {
	for _, all := range v.Violations {
		n += len(all)
	}
	return n
}

// check judges a history.
func check(h *history) *verdict {
	v := &verdict{Ends: map[string]int{}, Requests: map[string]int{}, Uses: map[string]int{}, Violations: map[string][]string{}}
	accepted := map[int64]step{}
	byOp := map[string]map[string]int64{} // operation, work: job
	byKey := map[string][]int64{}         // jobs of a key in the order of acceptance
	lastClaim := map[int64]int64{}
	claims := map[int64]map[int64]bool{}
	keyToken := map[string]int64{}
	liveOfKey := map[string]int64{}
	back := false               // the sequence was set back
	pruned := map[string]bool{} // keys without a fence
	for _, s := range h.Trail {
		switch s.What {
		case "accepted":
			if _, again := accepted[s.Job]; again { // somebody redrove it, or the worker did
				if s.Key != "" && liveOfKey[s.Key] == 0 {
					liveOfKey[s.Key] = s.Job
				}
				continue
			}
			accepted[s.Job] = s
			if byOp[s.Op] == nil {
				byOp[s.Op] = map[string]int64{}
			}
			byOp[s.Op][s.Work] = s.Job
			if s.Key != "" {
				delete(pruned, s.Key)
				if other := liveOfKey[s.Key]; other != 0 {
					v.violation(vKey, "%s: job %d was accepted while job %d was not finished", s.Key, s.Job, other)
				}
				liveOfKey[s.Key] = s.Job
				byKey[s.Key] = append(byKey[s.Key], s.Job)
			}
		case "claimed":
			v.Claims++
			if s.Token == 0 { // this system has no tokens
				continue
			}
			name := cmp.Or(s.Key, fmt.Sprint("job ", s.Job))
			if s.Token <= keyToken[name] {
				v.violation(vToken, "%s: token %d after %d", name, s.Token, keyToken[name])
			}
			keyToken[name] = s.Token
			lastClaim[s.Job] = s.Token
			if claims[s.Job] == nil {
				claims[s.Job] = map[int64]bool{}
			}
			claims[s.Job][s.Token] = true
		case "gone":
			if liveOfKey[s.Key] == s.Job {
				delete(liveOfKey, s.Key)
			}
		case "pruned":
			pruned[s.Key] = true
			if back { // the sequence may not have reached its token again
				delete(keyToken, s.Key)
			}
		case setBack: // nothing remembers the tokens of a key whose fence was pruned
			back = true
			maps.DeleteFunc(keyToken, func(key string, _ int64) bool { return pruned[key] })
		}
	}
	v.Accepted = len(accepted)

	// Every job has exactly one end.
	ends := map[int64]end{}
	for _, e := range h.Ends {
		if other, twice := ends[e.Job]; twice {
			v.violation(vLost, "job %d (%s) is both %s and %s", e.Job, e.Work, other.State, e.State)
		}
		ends[e.Job] = e
		v.Ends[e.State]++
		v.Losses += e.Lost
		if e.State == "unfinished" {
			v.violation(vUnfinished, "job %d (%s)", e.Job, e.Work)
		}
		if _, known := accepted[e.Job]; !known {
			v.violation(vPhantom, "job %d (%s) is %s, and was never accepted", e.Job, e.Work, e.State)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(accepted)) {
		if _, there := ends[id]; !there {
			v.violation(vLost, "job %d (%s) was accepted and is nowhere", idOf(id), accepted[id].Work)
		}
	}

	v.checkEnds(h, ends, lastClaim)

	// One key, one job. One that was cancelled before any worker had it does not count.
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		started := func(job int64) bool { return len(claims[job]) > 0 || ends[job].State != "cancelled" }
		last := len(byKey[key]) - 1
		jobs := append(slices.DeleteFunc(slices.Clone(byKey[key][:last]), func(job int64) bool { return !started(job) }), byKey[key][last])
		if len(jobs) > 1 && ends[jobs[0]].Form != formRecur {
			v.violation(vKey, "%s: jobs %v", key, jobs)
		}
	}

	// Effects in the database.
	effects := map[int64][]entry{}
	for _, e := range h.Ledger {
		if e.Job <= 0 { // of a request
			continue
		}
		v.Entries++
		if e.Form == formLate && strings.HasPrefix(e.Nonce, behind) { // nobody can undo it
			continue
		}
		if strings.HasPrefix(e.Nonce, stray) {
			v.violation(vEffect, "job %d (%s) wrote through a transaction that was over", idOf(e.Job), e.Work)
			continue
		}
		effects[e.Job] = append(effects[e.Job], e)
	}
	for _, id := range slices.Sorted(maps.Keys(ends)) {
		e, rows := ends[id], effects[id]
		delete(effects, id)
		switch {
		case e.Form == formLate && e.State == "dead" && !e.hopeless(): // somebody must look at what it did
		case e.State == "completed" && transactional(e.Form) && len(rows) != 1,
			e.State != "completed" && len(rows) > 0:
			v.violation(vEffect, "job %d (%s) is %s with %d effects", idOf(id), e.Work, e.State, len(rows))
		}
		for _, row := range rows {
			switch {
			case row.Token == 0:
			case !claims[id][row.Token]:
				v.violation(vToken, "job %d (%s): an effect under token %d, which no claim has given", idOf(id), e.Work, row.Token)
			case row.Token != lastClaim[id]:
				v.violation(vToken, "job %d (%s): an effect under token %d, and the last claim gave %d", idOf(id), e.Work, row.Token, lastClaim[id])
			}
			if e.Result != "" && e.Result != row.Nonce {
				v.violation(vAnswer, "job %d (%s): its result is %s, and its effect %s", idOf(id), e.Work, e.Result, row.Nonce)
			}
		}
	}
	for id, rows := range effects {
		v.violation(vEffect, "job %d (%s) is nowhere with %d effects", idOf(id), rows[0].Work, len(rows))
	}

	v.checkOps(h, byOp, byKey, ends)
	v.checkCalls(h, ends)
	v.checkRequests(h)
	v.checkLanes(h)
	v.checkRates(h)
	v.checkFlows(h, ends)
	v.checkGroups(h, ends)
	v.checkTicks(h)
	return v
}

func (e end) hopeless() bool { return work{Name: e.Work, Form: e.Form}.hopeless() }

// checkEnds compares how jobs ended with what their handlers returned, and finds the jobs that nobody can find any more.
func (v *verdict) checkEnds(h *history, ends map[int64]end, lastClaim map[int64]int64) {
	told := map[[2]int64]event{} // what the latest call under a token returned
	for _, e := range h.Events {
		switch e.Type {
		case toldDone, toldFailed:
			told[[2]int64{e.Job, e.Token}] = e
		case saidRefused:
			v.violation(vReadOnly, "%s", e.Text)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(ends)) {
		e := ends[id]
		last := told[[2]int64{id, lastClaim[id]}]
		switch {
		case e.Gone && endsByWorker(e.Form) && last.Type == toldFailed:
			v.violation(vLost, "job %d (%s) is nowhere, and its handler failed: %s", idOf(id), e.Work, last.Text)
		case e.Form == formPoison && e.State != "dead" && e.State != "unfinished":
			v.violation(vDead, "job %d (%s), which ends its process, is %s", idOf(id), e.Work, e.State)
		case e.State == "dead" && e.Form != formPoison && e.Form != formLate && !e.hopeless():
			v.violation(vDead, "job %d (%s) is dead, with %d leases lost", idOf(id), e.Work, e.Lost)
		}
	}
	for _, d := range h.Doubts {
		v.violation(vLost, "effect %s has state %d and waits for a decision, and its job is nowhere", d.Effect, d.State)
	}
	for _, slot := range h.Panics {
		v.violation(vPanic, "%s", slot)
	}
	if h.Tables != "" {
		v.violation(vTables, "%s", h.Tables)
	}
}

// checkOps compares what producers were told with what happened.
func (v *verdict) checkOps(h *history, byOp map[string]map[string]int64, byKey map[string][]int64, ends map[int64]end) {
	final := map[string]op{}
	for _, o := range h.Ops {
		if before, known := final[o.Op]; known {
			o.Works = before.Works
		}
		final[o.Op] = o
	}
	for _, name := range slices.Sorted(maps.Keys(final)) {
		o := final[name]
		happened := byOp[name]
		switch o.Outcome {
		case committed:
			v.Committed++
			if o.inTransaction() && !h.Noted[name] {
				v.violation(vLost, "operation %s was acknowledged, and the caller's own row is nowhere", name)
			}
		case rolledBack:
			v.RolledBack++
			if len(happened) > 0 || h.Noted[name] {
				v.violation(vPhantom, "operation %s (%s) was rolled back, and accepted %v", name, o.Err, happened)
			}
			continue
		default: // the database knows
			v.Unknown++
			if !h.Noted[name] && len(happened) == 0 {
				continue
			}
			if o.inTransaction() && !h.Noted[name] {
				v.violation(vPhantom, "operation %s accepted %v without the caller's own row", name, happened)
				continue
			}
			v.UnknownCommitted++
		}
		// The operation was committed, so all of its works are accepted: by it or before it.
		for _, w := range o.Works {
			if _, here := happened[w.Name]; !here && (!w.Keyed || len(byKey[w.Name]) == 0) {
				v.violation(vLost, "operation %s was committed, and %s was never accepted", name, w.Name)
			}
		}
		for _, a := range o.Answers {
			if !a.Duplicate {
				if idOf(happened[a.Work]) != a.ID {
					v.violation(vLost, "operation %s (%s): job %d (%s) was acknowledged and never accepted; the operation accepted %v, its key has %v", name, o.How, a.ID, a.Work, happened, byKey[a.Work])
				}
				continue
			}
			v.Duplicates++
			var job int64
			for _, j := range byKey[a.Work] {
				if idOf(j) == a.ID {
					job = j
				}
			}
			if job == 0 {
				v.violation(vAnswer, "operation %s: %s was called a duplicate of job %d, of jobs %v", name, a.Work, a.ID, byKey[a.Work])
			}
			if !a.Completed {
				continue
			}
			v.Replayed++
			e := ends[job]
			if told := string(a.Output); e.State != "completed" || told != fmt.Sprintf("%q", e.Result) {
				v.violation(vAnswer, "operation %s: %s was said to be completed with %s, and job %d is %s with %s", name, a.Work, told, a.ID, e.State, e.Result)
			}
		}
	}
}

// checkCalls compares what the provider saw with what the policies allow.
func (v *verdict) checkCalls(h *history, ends map[int64]end) {
	byJob := map[int64][]call{}
	jobOfKey := map[string]int64{}
	for _, c := range h.Calls {
		if c.Job <= 0 { // of a request
			continue
		}
		v.Calls++
		byJob[c.Job] = append(byJob[c.Job], c)
		if other, known := jobOfKey[c.Key]; known && other != c.Job {
			v.violation(vCallKey, "jobs %d and %d (%s) came under one key", other, c.Job, c.Work)
		}
		jobOfKey[c.Key] = c.Job
	}
	for _, id := range slices.Sorted(maps.Keys(byJob)) {
		calls := byJob[id]
		keys, done := map[string]string{}, map[string]bool{} // by work: a flow has several calls
		for i, c := range calls {
			if c.Key != cmp.Or(keys[c.Work], c.Key) {
				v.violation(vCallKey, "job %d (%s) came under two keys", idOf(id), c.Work)
			}
			keys[c.Work] = c.Key
			if c.What == "refused" {
				continue
			}
			if !done[c.Work] {
				done[c.Work] = true
				continue
			}
			v.Repeated++
			if c.Form != formAgain {
				v.violation(vCall, "job %d (%s) was applied again, call %d of %d", idOf(id), c.Work, i+1, len(calls))
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(ends)) {
		e := ends[id]
		if !outside(e.Form) || e.State != "completed" {
			continue
		}
		var receipts []string
		for _, c := range byJob[id] {
			if c.What != "refused" {
				receipts = append(receipts, c.Receipt)
			}
		}
		switch {
		case len(receipts) == 0:
			v.violation(vCall, "job %d (%s) is completed, and the provider has never done it", idOf(id), e.Work)
		case e.Result != "" && !slices.Contains(receipts, e.Result):
			v.violation(vAnswer, "job %d (%s): its result is %s, and the provider's receipts %v", idOf(id), e.Work, e.Result, receipts)
		}
	}
}
