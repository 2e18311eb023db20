package finish

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Write writes outcomes, at most one for each lease, and returns the leases whose guard did not hold, and
// those of the jobs that somebody wants cancelled. Each of the kinds of statement commits on its own. After
// an error, left are the outcomes that may not have been written. wrote is called for each of the others: ok
// says that its guard held.
func Write(ctx context.Context, store *pg.Store, db pg.DB, by pg.Way, outcomes []Outcome,
	wrote func(o Outcome, ok bool)) (stale []*hold.Hold, cancelled []int64, left []Outcome, err error) {
	for i := range outcomes {
		outcomes[i].noted = outcomes[i].note(store.Version)
	}
	slices.SortFunc(outcomes, func(a, b Outcome) int { return cmp.Compare(a.Hold.ID, b.Hold.ID) })
	plain, ended, again, back := byStatement(outcomes, store.Citus.Load() == pg.CitusYes)
	locks := 0
	var done, asked []int64 // of one part
	for _, part := range []struct {
		outcomes  []Outcome
		statement string
		args      func([]Outcome, bool) []any
		answer    []any
	}{
		{plain, stmt.CompleteJobs, completeArgs, []any{nil, &done}},
		{ended, stmt.FinishJobs, finishArgs, []any{&done}},
		{again, stmt.RetryJobs, retryArgs, []any{nil, &done, &asked}},
		{back, stmt.GiveBackJobs, giveBackArgs, []any{&done, &asked}},
	} {
		if len(part.outcomes) == 0 {
			continue
		}
		// A lock is the trouble of one part alone. But a whole table may be locked, and then each part would
		// wait.
		if err != nil && (!pg.LockedOut(err) || locks > 1) {
			left = append(left, part.outcomes...)
			continue
		}
		done, asked = nil, nil
		failed := store.Send(ctx, db, by, part.statement, part.args(part.outcomes, false), pg.Row(part.answer...))
		if failed != nil {
			err = fmt.Errorf("onceq: finish: %w", failed)
			left = append(left, part.outcomes...)
			locks++
			continue
		}
		slices.Sort(done)
		cancelled = append(cancelled, asked...)
		for _, o := range part.outcomes {
			_, ok := slices.BinarySearch(done, o.Hold.Token)
			if !ok {
				stale = append(stale, o.Hold)
			}
			wrote(o, ok)
		}
	}
	return stale, cancelled, left, err
}

// byStatement parts outcomes by the statement that writes them.
func byStatement(outcomes []Outcome, citus bool) (plain, ended, again, back []Outcome) {
	for _, o := range outcomes {
		switch {
		case o.State == table.StateCompleted && o.Hold.Plain(o.Keep):
			plain = append(plain, o)
		case o.State.Finished():
			ended = append(ended, o)
		case o.Wait == nil && !o.Hold.Lined() && !citus: // Citus refuses an update with the time
			again = append(again, o)
		default:
			back = append(back, o)
		}
	}
	return plain, ended, again, back
}

// Completion gives the statement that completes a job, which raises an error if its guard does not hold.
func Completion(h *hold.Hold) (string, []any) {
	if !h.Plain(h.Keep) {
		return stmt.FinishJobs, finishArgs([]Outcome{{Hold: h, State: table.StateCompleted, Result: h.Result, Keep: h.Keep}}, true)
	}
	return shortly(h)
}

// shortly gives the statement for a job that is not kept and has no lane and no limit. It tells nobody.
func shortly(h *hold.Hold) (string, []any) {
	if !h.Keyed {
		return stmt.CompleteOneUnkeyed, []any{h.ID, h.Claims, h.Holder}
	}
	return stmt.CompleteOne, []any{h.ID, h.Claims, h.Holder, h.Token, h.Result}
}

// Last is what a handler's transaction does last, before its commit. It raises an error if a guard does not
// hold.
type Last struct {
	Statement string
	Args, Row []any   // Row: where the statement's answer goes, if anything but the guard is asked
	Members   []any   // the arguments of stmt.TellMembers; nil if nobody waits for the jobs
	Cancelled []int64 // what the statement returns of jobs that are given back: those that somebody wants cancelled
}

// InTx chooses it for outcomes that are all alike: the jobs are completed, or run again.
func InTx(outcomes []Outcome, citus bool) *Last {
	lined := slices.ContainsFunc(outcomes, func(o Outcome) bool { return o.Hold.Lined() })
	last := new(Last)
	switch {
	case outcomes[0].Reset && (lined || citus):
		last.Statement, last.Args, last.Row = stmt.GiveBackJobs, giveBackArgs(outcomes, true), []any{nil, &last.Cancelled}
		return last
	case outcomes[0].Reset:
		last.Statement, last.Args, last.Row = stmt.RetryJobs, retryArgs(outcomes, true), []any{nil, nil, &last.Cancelled}
		return last
	case lined || slices.ContainsFunc(outcomes, func(o Outcome) bool { return o.Keep != 0 }):
		last.Statement, last.Args = stmt.FinishJobs, finishArgs(outcomes, true)
		return last
	case len(outcomes) == 1:
		last.Statement, last.Args = shortly(outcomes[0].Hold)
	default:
		last.Statement, last.Args = stmt.CompleteJobs, completeArgs(outcomes, true)
	}
	if AnyMember(outcomes) {
		last.Members = toldArgs(outcomes)
	}
	return last
}

// AnyMember reports whether other jobs wait for one of these.
func AnyMember(outcomes []Outcome) bool {
	return slices.ContainsFunc(outcomes, func(o Outcome) bool { return o.Hold.Member })
}

// guards gives the columns that every statement compares.
func guards(outcomes []Outcome) (ids []int64, claims []int32, holders []int64) {
	holds := make([]*hold.Hold, len(outcomes))
	for i, o := range outcomes {
		holds[i] = o.Hold
	}
	return hold.Guards(holds)
}

func completeArgs(outcomes []Outcome, raise bool) []any {
	ids, claims, holders := guards(outcomes)
	results := make([]string, len(outcomes))
	for i, o := range outcomes {
		results[i] = o.Result
	}
	return []any{ids, claims, holders, results, raise}
}

func finishArgs(outcomes []Outcome, raise bool) []any {
	n := len(outcomes)
	ids, claims, holders := guards(outcomes)
	states, results, errs := make([]int16, n), make([]string, n), make([]string, n)
	spent, keeps := make([]int32, n), make([]int64, n)
	for i, o := range outcomes {
		states[i], results[i], errs[i], keeps[i] = int16(o.State), o.Result, o.noted, o.Keep
		if o.Spend {
			spent[i] = 1
		}
	}
	return []any{ids, claims, holders, states, results, errs, spent, keeps, raise, heavierArg(outcomes)}
}

func retryArgs(outcomes []Outcome, raise bool) []any {
	n := len(outcomes)
	ids, claims, holders := guards(outcomes)
	errs, spent, resets := make([]string, n), make([]int32, n), make([]bool, n)
	delays, most := make([]int64, n), make([]int32, n)
	for i, o := range outcomes {
		errs[i], resets[i], delays[i], most[i] = o.noted, o.Reset, o.Delay.Microseconds(), o.lostFrom()
		if o.Spend {
			spent[i] = 1
		}
	}
	return []any{ids, claims, holders, errs, spent, resets, delays, most, raise}
}

// toldArgs are those of stmt.TellMembers for the completed jobs that others wait for.
func toldArgs(outcomes []Outcome) []any {
	var ids []int64
	var states []int16
	var results []string
	for _, o := range outcomes {
		if o.Hold.Member {
			ids, states, results = append(ids, o.Hold.ID), append(states, int16(table.StateCompleted)), append(results, o.Result)
		}
	}
	return []any{ids, states, results}
}

// giveBackArgs also says what the jobs wait for, and sets how long one is given back for if Emit has the row
// of its wait.
func giveBackArgs(outcomes []Outcome, raise bool) []any {
	scopes, keys := make([]*string, len(outcomes)), make([]*string, len(outcomes))
	for i, o := range outcomes {
		if o.Wait != nil {
			scopes[i], keys[i], outcomes[i].Delay = &o.Wait.Scope, &o.Wait.Key, Pause
		}
	}
	return append(retryArgs(outcomes, raise), scopes, keys, heavierArg(outcomes))
}

// heavierArg is what the ends of jobs say of SetWeight: how much more each of them weighed, by id; nil for
// nothing.
func heavierArg(outcomes []Outcome) any {
	var all map[int64]int64
	for _, o := range outcomes {
		if n := o.Hold.Heavier.Load(); n != 0 && o.Hold.Slotted() {
			if all == nil {
				all = make(map[int64]int64)
			}
			all[o.Hold.ID] = n
		}
	}
	if all == nil {
		return nil
	}
	text, _ := json.Marshal(all) // a map of numbers always encodes
	return string(text)
}
