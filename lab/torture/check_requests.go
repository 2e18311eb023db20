package main

import (
	"fmt"
	"maps"
	"slices"

	"github.com/onceq/onceq"
)

// fenceStep is a row of the fences' audit trail.
type fenceStep struct {
	What     string // claimed, completed, uncertain, released, held or gone
	Key      string
	Token    int64
	Since    int64 // time of the first intent, in microseconds
	Finished int64 // time of the completion or release, in microseconds
	Result   string
}

// use is one use of a key, from its first intent until it is completed or released. A key that is taken for ever has at
// most one completed use.
type use struct {
	key, form  string
	since      int64
	state      string // the last state in the audit trail
	token      int64  // of the last claim, and so of the completion
	tokens     map[int64]bool
	finished   int64
	result     string
	downstream string
	applied    int
	receipts   []string
	gone       bool // its fence was pruned
}

// checkRequests compares requests, their effects and their calls with what was claimed and completed.
func (v *verdict) checkRequests(h *history) {
	byKey := map[string][]*use{}
	last := map[string]int64{} // the last token of each key
	var all []*use
	back := false // the sequence was set back
	for _, s := range h.Fences {
		if s.What == setBack { // nothing remembers the tokens of a key that was pruned
			back = true
			maps.DeleteFunc(last, func(key string, _ int64) bool {
				uses := byKey[key]
				return uses[len(uses)-1].gone
			})
			continue
		}
		uses := byKey[s.Key]
		var u *use
		if len(uses) > 0 {
			u = uses[len(uses)-1]
		}
		if s.What == "claimed" {
			v.Claims++
			if s.Token <= last[s.Key] {
				v.violation(vToken, "%s: token %d after %d", s.Key, s.Token, last[s.Key])
			}
			last[s.Key] = s.Token
			if u == nil || u.since != s.Since {
				if u != nil {
					v.checkAgain(u, s)
				}
				u = &use{key: s.Key, form: formOf(s.Key), since: s.Since, tokens: map[int64]bool{}}
				byKey[s.Key], all = append(uses, u), append(all, u)
			} else if u.state == "completed" || u.state == "released" {
				v.violation(vKey, "%s: was %s, and claimed again in the same use", s.Key, u.state)
			}
			u.state, u.token = s.What, s.Token
			u.tokens[s.Token] = true
			continue
		}
		if u == nil {
			v.violation(vLost, "%s is %s, and was never claimed", s.Key, s.What)
			continue
		}
		if s.Token != u.token {
			v.violation(vToken, "%s is %s under token %d, and the last claim gave %d", s.Key, s.What, s.Token, u.token)
		}
		if s.What == "gone" {
			u.gone = true
			if back { // the sequence may not have reached its token again
				delete(last, s.Key)
			}
			if u.state != "completed" && u.state != "released" {
				v.violation(vLost, "%s is gone while it was %s", s.Key, u.state)
			}
			if u.state == "completed" && windowOf(s.Key) == onceq.Forever {
				v.violation(vLost, "%s is gone, and was taken for ever", s.Key)
			}
			continue
		}
		if s.What == "completed" && u.state == "completed" {
			v.violation(vKey, "%s was completed twice in one use", s.Key)
		}
		u.state, u.finished, u.result = s.What, s.Finished, s.Result
	}
	for _, u := range all {
		state := u.state
		if state == "claimed" || state == "uncertain" {
			state = "unfinished"
			v.violation(vUnfinished, "%s is %s", u.key, u.state)
		}
		v.Uses[state]++
	}
	v.checkRequestEffects(h, all)
	v.checkRequestCalls(h, byKey, all)
	v.checkAnswers(h, byKey)
}

// checkAgain judges whether a key may be used again after u.
func (v *verdict) checkAgain(u *use, s fenceStep) {
	window := windowOf(u.key)
	switch {
	case u.state == "released":
	case u.state != "completed":
		v.violation(vKey, "%s: a new use under token %d, and the last was %s", u.key, s.Token, u.state)
	case window == onceq.Forever:
		v.violation(vKey, "%s: used again under token %d, and it is taken for ever", u.key, s.Token)
	case s.Since < u.finished+window.Microseconds():
		v.violation(vKey, "%s: used again %d µs after its completion", u.key, s.Since-u.finished)
	}
}

// checkRequestEffects checks that each completed use has one row in the ledger, and any other use has none.
func (v *verdict) checkRequestEffects(h *history, all []*use) {
	rows := map[string]map[int64][]entry{}
	for _, e := range h.Ledger {
		if e.Job > 0 {
			continue
		}
		v.Entries++
		if rows[e.Work] == nil {
			rows[e.Work] = map[int64][]entry{}
		}
		rows[e.Work][-e.Job] = append(rows[e.Work][-e.Job], e)
	}
	for _, u := range all {
		effects := rows[u.key][u.since]
		delete(rows[u.key], u.since)
		want := 0
		if u.state == "completed" && orderForms[u.form] == "" {
			want = 1
		}
		if len(effects) != want {
			v.violation(vEffect, "%s is %s with %d effects", u.key, u.state, len(effects))
		}
		for _, e := range effects {
			if !u.tokens[e.Token] {
				v.violation(vToken, "%s: an effect under token %d, which no claim has given", u.key, e.Token)
			} else if e.Token != u.token {
				v.violation(vToken, "%s: an effect under token %d, and the last claim gave %d", u.key, e.Token, u.token)
			}
			if want == 1 && e.Nonce != u.result {
				v.violation(vAnswer, "%s: its result is %s, and its effect %s", u.key, u.result, e.Nonce)
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(rows)) {
		for _, strange := range rows[key] {
			v.violation(vToken, "%s: an effect under token %d, which no claim has given", key, strange[0].Token)
		}
	}
}

// checkRequestCalls compares what the provider saw with what the policies allow.
func (v *verdict) checkRequestCalls(h *history, byKey map[string][]*use, all []*use) {
	useOf := map[string]*use{} // by downstream key
	for _, c := range h.Calls {
		if c.Job > 0 {
			continue
		}
		v.Calls++
		i := slices.IndexFunc(byKey[c.Work], func(u *use) bool { return u.since == -c.Job && u.tokens[c.Token] })
		if i < 0 {
			v.violation(vToken, "%s: a call under token %d, which no claim has given", c.Work, c.Token)
			continue
		}
		u := byKey[c.Work][i]
		if u.downstream != "" && u.downstream != c.Key {
			v.violation(vCallKey, "%s came under two keys", c.Work)
		}
		if other := useOf[c.Key]; other != nil && other != u {
			v.violation(vCallKey, "%s came under a key of %s, which is another use", c.Work, other.key)
		}
		u.downstream, useOf[c.Key] = c.Key, u
		if c.What == "refused" {
			continue
		}
		u.receipts = append(u.receipts, c.Receipt)
		if u.applied++; u.applied > 1 {
			v.Repeated++
			if u.form != formDoAgain {
				v.violation(vCall, "%s was applied %d times", u.key, u.applied)
			}
		}
	}
	for _, u := range all {
		switch {
		case orderForms[u.form] == "":
		case u.state == "released" && u.applied > 0:
			v.violation(vCall, "%s was released, and the provider has done it", u.key)
		case u.state == "completed" && u.applied == 0:
			v.violation(vCall, "%s is completed, and the provider has never done it", u.key)
		case u.state == "completed" && !slices.Contains(u.receipts, u.result):
			v.violation(vAnswer, "%s: its result is %s, and the provider's receipts %v", u.key, u.result, u.receipts)
		}
	}
}

// checkAnswers checks that everybody who got a result got one that was committed for that key.
func (v *verdict) checkAnswers(h *history, byKey map[string][]*use) {
	for _, r := range h.Requests {
		v.Requests[r.Outcome]++
		if r.Outcome != answered && r.Outcome != replayed {
			continue
		}
		uses := byKey[r.Key]
		if slices.ContainsFunc(uses, func(u *use) bool { return u.state == "completed" && u.result == r.Result }) {
			continue
		}
		var results []string
		for _, u := range uses {
			results = append(results, fmt.Sprint(u.state, " ", u.result))
		}
		if len(results) == 0 || r.Outcome == answered {
			v.violation(vLost, "%s was answered with %s, and its uses are %v", r.Key, r.Result, results)
		} else {
			v.violation(vAnswer, "%s was answered with %s, and its uses are %v", r.Key, r.Result, results)
		}
	}
}
