package main

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	idA, idB, idC      = 1, 2, 3
	jobA, jobB, jobC   = idA<<36 | 7, idB<<36 | 7, idC<<36 | 8
	tokenA1, tokenA2   = idA<<20 | 1, idA<<20 | 2
	tokenB1, tokenC1   = idB<<20 | 1, idC<<20 | 1
	receiptB, receiptC = "r1", "r2"
)

// sound returns a history without a violation. A is a keyed job that was claimed twice and enqueued twice. B has a call
// outside of the form "ask", and no key. C has one of the form "again", which was sent twice.
func sound() *history {
	again := 400 + shortWindow.Microseconds() // keyS is used again
	return &history{
		Ops: []op{
			{Op: "1", How: "transaction", Works: []work{{Name: "tx/1", Form: formTx, Keyed: true}, {Name: "ask/1/1", Form: formAsk}}},
			{Op: "1", How: "transaction", Outcome: committed, Answers: []answer{{Work: "tx/1", ID: idA}, {Work: "ask/1/1", ID: idB}}},
			{Op: "2", How: "direct", Works: []work{{Name: "tx/1", Form: formTx, Keyed: true}}},
			{Op: "2", How: "direct", Outcome: committed, Answers: []answer{
				{Work: "tx/1", ID: idA, Duplicate: true, Completed: true, Output: json.RawMessage(`"n1"`)},
			}},
			{Op: "3", How: "transaction", Works: []work{{Name: "again/1", Form: formAgain, Keyed: true}}}, // its producer was killed
			{Op: "4", How: "transaction", Works: []work{{Name: "tx/9", Form: formTx, Keyed: true}}},
			{Op: "4", How: "transaction", Outcome: rolledBack},
			{Op: "5", How: "pipeline", Works: []work{{Name: "tx/8", Form: formTx, Keyed: true}}},
			{Op: "5", How: "pipeline", Outcome: unknown},
		},
		Noted: map[string]bool{"1": true, "3": true},
		Trail: []step{
			{What: "accepted", Job: jobA, Key: "tx/1", Work: "tx/1", Op: "1"},
			{What: "accepted", Job: jobB, Work: "ask/1/1", Op: "1"},
			{What: "claimed", Job: jobA, Key: "tx/1", Work: "tx/1", Token: tokenA1},
			{What: "claimed", Job: jobB, Work: "ask/1/1", Token: tokenB1},
			{What: "claimed", Job: jobA, Key: "tx/1", Work: "tx/1", Token: tokenA2},
			{What: "gone", Job: jobA, Key: "tx/1", Work: "tx/1"},
			{What: "gone", Job: jobB, Work: "ask/1/1"},
			{What: "accepted", Job: jobC, Key: "again/1", Work: "again/1", Op: "3"},
			{What: "claimed", Job: jobC, Key: "again/1", Work: "again/1", Token: tokenC1},
			{What: "gone", Job: jobC, Key: "again/1", Work: "again/1"},
		},
		Ledger: []entry{
			{Work: "tx/1", Form: formTx, Job: jobA, Token: tokenA2, Nonce: "n1"},
			{Work: "again/1", Form: formAgain, Job: jobC, Token: tokenC1, Nonce: receiptC},
			{Work: keyF, Form: formFence, Job: -100, Token: 2, Nonce: "f"},
		},
		Calls: []call{
			{order: order{Work: "ask/1/1", Form: formAsk, Job: jobB}, Key: "kB", What: "refused"},
			{order: order{Work: "ask/1/1", Form: formAsk, Job: jobB}, Key: "kB", What: "applied", Receipt: receiptB},
			{order: order{Work: "again/1", Form: formAgain, Job: jobC}, Key: "kC", What: "applied", Receipt: receiptC},
			{order: order{Work: "again/1", Form: formAgain, Job: jobC}, Key: "kC", What: "repeated", Receipt: receiptC},
			{order: order{Work: keyS, Form: formAgain, Job: -100, Token: 3}, Key: "kS0", What: "refused"},
			{order: order{Work: keyS, Form: formAgain, Job: -300, Token: 4}, Key: "kS1", What: "applied", Receipt: "s1"},
			{order: order{Work: keyS, Form: formAgain, Job: -again, Token: 5}, Key: "kS2", What: "applied", Receipt: "s2"},
			{order: order{Work: keyS, Form: formAgain, Job: -again, Token: 6}, Key: "kS2", What: "repeated", Receipt: "s2"},
			{order: order{Work: keyH, Form: formHold, Job: -100, Token: 7}, Key: "kH", What: "applied", Receipt: "h"},
		},
		Ends: []end{
			{Job: jobA, Key: "tx/1", Work: "tx/1", Form: formTx, State: "completed", Result: "n1"},
			{Job: jobB, Work: "ask/1/1", Form: formAsk, State: "completed", Result: receiptB},
			{Job: jobC, Key: "again/1", Work: "again/1", Form: formAgain, State: "completed", Result: receiptC},
		},
		Fences: []fenceStep{
			{What: "claimed", Key: keyF, Token: 1, Since: 100}, // its lease ran out
			{What: "claimed", Key: keyF, Token: 2, Since: 100},
			{What: "completed", Key: keyF, Token: 2, Since: 100, Finished: 500, Result: "f"},
			{What: "claimed", Key: keyS, Token: 3, Since: 100},
			{What: "released", Key: keyS, Token: 3, Since: 100, Finished: 200},
			{What: "claimed", Key: keyS, Token: 4, Since: 300},
			{What: "completed", Key: keyS, Token: 4, Since: 300, Finished: 400, Result: "s1"},
			{What: "gone", Key: keyS, Token: 4, Since: 300, Finished: 400, Result: "s1"},
			{What: "claimed", Key: keyS, Token: 5, Since: again},
			{What: "uncertain", Key: keyS, Token: 5, Since: again},
			{What: "claimed", Key: keyS, Token: 6, Since: again},
			{What: "completed", Key: keyS, Token: 6, Since: again, Finished: 1 << 30, Result: "s2"},
			{What: "claimed", Key: keyH, Token: 7, Since: 100},
			{What: "held", Key: keyH, Token: 7, Since: 100},
		},
		Requests: []request{
			{Key: keyF, Form: formFence, Outcome: overtaken},
			{Key: keyF, Form: formFence, Outcome: answered, Result: "f"},
			{Key: keyF, Form: formFence, Outcome: replayed, Result: "f"},
			{Key: keyS, Form: formDoAgain, Outcome: answered, Result: "s1"},
			{Key: keyS, Form: formDoAgain, Outcome: replayed, Result: "s2"},
		},
	}
}

// These are keys of requests: keyF was claimed twice, keyS was used three times, keyH waits for a person.
const (
	keyF = formFence + "/1"
	keyS = formDoAgain + "/short/1"
	keyH = formDoHold + "/1"
)

func TestCheck_ASoundHistoryHasNoViolation(t *testing.T) {
	v := check(sound())
	require.Empty(t, v.Violations)
	require.Equal(t, 3, v.Accepted)
	require.Equal(t, []int{2, 1, 2, 1}, []int{v.Committed, v.RolledBack, v.Unknown, v.UnknownCommitted})
	require.Equal(t, []int{1, 1}, []int{v.Duplicates, v.Replayed})
	require.Equal(t, []int{3, 9, 2, 11}, []int{v.Entries, v.Calls, v.Repeated, v.Claims})
	require.Equal(t, map[string]int{"completed": 3, "released": 1, "held": 1}, v.Uses)
	require.Equal(t, map[string]int{answered: 2, replayed: 2, overtaken: 1}, v.Requests)
}

// Each spoiled history differs from the sound one in one thing.
func TestCheck_FindsEachViolation(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(h *history)
		want  []string
	}{
		"an accepted job is nowhere": {func(h *history) { h.Ends = h.Ends[:2] }, []string{vLost}},
		"a job is in two places": {func(h *history) {
			h.Ends = append(h.Ends, end{Job: jobB, Work: "ask/1/1", Form: formAsk, State: "dead"})
		}, []string{vLost}},
		"an acknowledged operation left nothing": {func(h *history) { delete(h.Noted, "1") }, []string{vLost}},
		"an acknowledged job was never accepted": {func(h *history) {
			h.Ops[1].Answers[1].ID = 77
		}, []string{vLost}},
		"a committed work was never accepted": {func(h *history) {
			h.Ops[0].Works = append(h.Ops[0].Works, work{Name: "tx/7", Form: formTx, Keyed: true})
		}, []string{vLost}},
		"a work of an unknown outcome that was committed was never accepted": {func(h *history) {
			h.Ops[4].Works = append(h.Ops[4].Works, work{Name: "tx/7/u", Form: formTx})
		}, []string{vLost}},
		"a job is not finished": {func(h *history) {
			h.Ends[1].State, h.Ends[1].Result = "unfinished", ""
		}, []string{vUnfinished}},
		"a rolled back operation left its row":         {func(h *history) { h.Noted["4"] = true }, []string{vPhantom}},
		"a rolled back operation was accepted":         {func(h *history) { h.Trail[1].Op = "4"; h.Ops[0].Works = h.Ops[0].Works[:1] }, []string{vPhantom}},
		"half of an unknown transaction was committed": {func(h *history) { delete(h.Noted, "3") }, []string{vPhantom}},
		"a job that nobody accepted": {func(h *history) {
			h.Ends = append(h.Ends, end{Job: 9, Work: "x", Form: formAsk, State: "dead"})
		}, []string{vPhantom}},
		"two jobs for one key, at once": {func(h *history) {
			h.Trail = slices.Insert(h.Trail, 3, step{What: "accepted", Job: 4, Key: "tx/1", Work: "tx/1", Op: "5"})
			h.Ends = append(h.Ends, end{Job: 4, Key: "tx/1", Work: "tx/1", Form: formTx, State: "dead"})
		}, []string{vKey}},
		"two jobs for one key that is taken for ever, one after the other": {func(h *history) {
			h.Trail = append(h.Trail, step{What: "accepted", Job: 4, Key: "tx/1", Work: "tx/1", Op: "6"})
			h.Ends = append(h.Ends, end{Job: 4, Key: "tx/1", Work: "tx/1", Form: formTx, State: "dead"})
		}, []string{vKey}},
		"a second job for the key of one that was cancelled after it started": {func(h *history) {
			h.Trail = append([]step{{What: "accepted", Job: 4, Key: "tx/1", Work: "tx/1", Op: "6"},
				{What: "claimed", Job: 4, Key: "tx/1", Work: "tx/1", Token: 1}, {What: "gone", Job: 4, Key: "tx/1", Work: "tx/1"}}, h.Trail...)
			h.Ends = append(h.Ends, end{Job: 4, Key: "tx/1", Work: "tx/1", Form: formTx, State: "cancelled"})
		}, []string{vKey}},
		"a second effect":                 {func(h *history) { h.Ledger = append(h.Ledger, h.Ledger[0]) }, []string{vEffect}},
		"no effect":                       {func(h *history) { h.Ledger = h.Ledger[1:] }, []string{vEffect}},
		"an effect of a job that is dead": {func(h *history) { h.Ends[2].State = "dead" }, []string{vEffect}},
		"an effect of no job":             {func(h *history) { h.Ledger = append(h.Ledger, entry{Job: 9, Work: "x"}) }, []string{vEffect}},
		"a token that does not grow":      {func(h *history) { h.Trail[4].Token = tokenA1; h.Ledger[0].Token = tokenA1 }, []string{vToken}},
		"an effect under an old token":    {func(h *history) { h.Ledger[0].Token = tokenA1 }, []string{vToken}},
		"an effect under a token from nowhere": {func(h *history) {
			h.Ledger[0].Token = tokenA2 + 1
		}, []string{vToken}},
		"another result than the effect's": {func(h *history) {
			h.Ledger[0].Nonce = "n2"
		}, []string{vAnswer}},
		"a duplicate heard another result":       {func(h *history) { h.Ops[3].Answers[0].Output = json.RawMessage(`"n2"`) }, []string{vAnswer}},
		"a duplicate heard of another job":       {func(h *history) { h.Ops[3].Answers[0].ID = idC }, []string{vAnswer}},
		"a result that the provider never gave":  {func(h *history) { h.Ends[1].Result = "r9" }, []string{vAnswer}},
		"a call that was applied twice":          {func(h *history) { h.Calls[0].What = "applied" }, []string{vCall}},
		"a job without its call":                 {func(h *history) { h.Calls[1].What = "refused" }, []string{vCall}},
		"two downstream keys of a job":           {func(h *history) { h.Calls[3].Key = "kC2" }, []string{vCallKey}},
		"one downstream key of two jobs":         {func(h *history) { h.Calls[0].Key, h.Calls[1].Key = "kC", "kC" }, []string{vCallKey}},
		"a second call though the job has a key": {func(h *history) { h.Calls[2].Form, h.Calls[3].Form = formHold, formHold }, []string{vCall}},

		"a job is gone whose handler failed": {func(h *history) {
			h.Ends[0].Gone = true
			h.Events = []event{{Type: toldDone, Job: jobA, Token: tokenA1}, {Type: toldFailed, Job: jobA, Token: tokenA2}}
		}, []string{vLost}},
		"an effect in doubt whose job is nowhere":  {func(h *history) { h.Doubts = []doubt{{"9/call", 2}} }, []string{vLost}},
		"a job is dead that can be done":           {func(h *history) { h.Ends[1].State, h.Ends[1].Result = "dead", "" }, []string{vDead}},
		"a job that ends its process is completed": {func(h *history) { h.Ends[1].Form, h.Ends[1].Result = formPoison, "" }, []string{vDead}},
		"a statement of the library's was refused": {func(h *history) { h.Events = []event{{Type: saidRefused}} }, []string{vReadOnly}},
		"a process panicked":                       {func(h *history) { h.Panics = []string{"worker-1"} }, []string{vPanic}},
		"a transaction that was over wrote":        {func(h *history) { h.Ledger[0].Nonce = stray + "n1" }, []string{vEffect}},
		"the tables are not as they must be":       {func(h *history) { h.Tables = "a row too many" }, []string{vTables}},
		"a job replays what another one of its id did": {func(h *history) {
			old, id := jobB, int64(jobB+1) // accepted later, after the sequence was set back
			h.Trail = append(h.Trail, step{What: setBack}, step{What: "accepted", Job: id, Work: "ask/7/1", Op: "7"},
				step{What: "claimed", Job: id, Work: "ask/7/1", Token: tokenB1}, step{What: "gone", Job: id, Work: "ask/7/1"})
			h.Ends = append(h.Ends, end{Job: id, Work: "ask/7/1", Form: formAsk, State: "completed", Gone: true})
			h.Calls[0].Job, h.Calls[1].Job = int64(old), int64(old)
		}, []string{vCall}},

		"a fence's token that does not grow":     {func(h *history) { h.Fences[1].Token, h.Fences[2].Token, h.Ledger[2].Token = 1, 1, 1 }, []string{vToken}},
		"a completion under an old token":        {func(h *history) { h.Fences[2].Token = 1 }, []string{vToken}},
		"a fence's effect under an old token":    {func(h *history) { h.Ledger[2].Token = 1 }, []string{vToken}},
		"a fence's effect under a strange token": {func(h *history) { h.Ledger[2].Token = 9 }, []string{vToken}},
		"an effect of no use of a key":           {func(h *history) { h.Ledger[2].Job = -101 }, []string{vToken, vEffect}},
		"a fence's second effect":                {func(h *history) { h.Ledger = append(h.Ledger, h.Ledger[2]) }, []string{vEffect}},
		"a completed fence without its effect":   {func(h *history) { h.Ledger = h.Ledger[:2] }, []string{vEffect}},
		"an effect of a fence that was released": {func(h *history) {
			h.Ledger = append(h.Ledger, entry{Work: keyS, Form: formFence, Job: -100, Token: 3, Nonce: "x"})
		}, []string{vEffect}},
		"another result than the fence's effect": {func(h *history) { h.Ledger[2].Nonce = "x" }, []string{vAnswer}},
		"a key that is taken for ever is used again": {func(h *history) {
			h.Fences = append(h.Fences, fenceStep{What: "claimed", Key: keyF, Token: 8, Since: 600},
				fenceStep{What: "released", Key: keyF, Token: 8, Since: 600})
		}, []string{vKey}},
		"a key is used again inside its window": {func(h *history) {
			for i := 8; i < 12; i++ {
				h.Fences[i].Since--
			}
		}, []string{vKey}},
		"a key is claimed again after its completion": {func(h *history) {
			h.Fences = slices.Insert(h.Fences, 3, fenceStep{What: "claimed", Key: keyF, Token: 8, Since: 100})
		}, []string{vKey}},
		"a fence is completed twice":                  {func(h *history) { h.Fences = slices.Insert(h.Fences, 3, h.Fences[2]) }, []string{vKey}},
		"a new use while the last one is in doubt":    {func(h *history) { h.Fences[1].Since, h.Fences[2].Since = 200, 200 }, []string{vKey}},
		"a fence that is claimed is pruned":           {func(h *history) { h.Fences[6].What = "uncertain" }, []string{vLost}},
		"a fence that is taken for ever is pruned":    {func(h *history) { s := h.Fences[2]; s.What = "gone"; h.Fences = append(h.Fences, s) }, []string{vLost}},
		"a fence is completed that nobody has":        {func(h *history) { h.Fences[3].Key = keyF + "0"; h.Fences = slices.Delete(h.Fences, 4, 12) }, []string{vToken}},
		"a fence is left open":                        {func(h *history) { h.Fences = h.Fences[:13] }, []string{vUnfinished}},
		"a request was answered and never completed":  {func(h *history) { h.Requests[1].Key = formFence + "/9" }, []string{vLost}},
		"a request was answered with another result":  {func(h *history) { h.Requests[1].Result = "x" }, []string{vLost}},
		"a request was replayed another result":       {func(h *history) { h.Requests[2].Result = "x" }, []string{vAnswer}},
		"a request was replayed another key's result": {func(h *history) { h.Requests[2].Result = "s1" }, []string{vAnswer}},
		"a request's call was applied twice":          {func(h *history) { h.Calls = append(h.Calls, h.Calls[8]) }, []string{vCall}},
		"a released request's call was applied":       {func(h *history) { h.Calls[4].What, h.Calls[4].Receipt = "applied", "x" }, []string{vCall}},
		"a completed request without its call":        {func(h *history) { h.Calls = slices.Delete(h.Calls, 5, 6) }, []string{vCall}},
		"a result that is not the provider's":         {func(h *history) { h.Calls[5].Receipt = "x" }, []string{vAnswer}},
		"two downstream keys of a use":                {func(h *history) { h.Calls[7].Key = "kS3" }, []string{vCallKey}},
		"one downstream key of two uses":              {func(h *history) { h.Calls[5].Key = "kS0" }, []string{vCallKey}},
		"a call under a token from nowhere":           {func(h *history) { h.Calls[8].Token = 99 }, []string{vToken}},
	} {
		t.Run(name, func(t *testing.T) {
			h := sound()
			c.spoil(h)
			v := check(h)
			require.Subset(t, slices.Collect(maps.Keys(v.Violations)), c.want, "%v", v.Violations)
		})
	}
}

// What handlers and faults may do is not a violation.
func TestCheck_AllowsWhatIsRight(t *testing.T) {
	for name, spare := range map[string]func(h *history){
		"a handler failed, and did it when it was called again": func(h *history) {
			h.Ends[0].Gone = true
			h.Events = []event{{Type: toldFailed, Job: jobA, Token: tokenA2}, {Type: toldDone, Job: jobA, Token: tokenA2}}
		},
		"a key that was pruned before the sequence was set back has a smaller token": func(h *history) {
			h.Fences = slices.Insert(h.Fences, 8, fenceStep{What: setBack})
			for i := range h.Fences {
				if f := &h.Fences[i]; i > 8 && f.Token == 5 {
					f.Token = 2
				} else if i > 8 && f.Token == 6 {
					f.Token = 3
				}
			}
			h.Calls[6].Token, h.Calls[7].Token = 2, 3
		},
		"a key that was pruned after the sequence was set back has a smaller token": func(h *history) {
			h.Fences = slices.Insert(h.Fences, 0, fenceStep{What: setBack})
			for i := range h.Fences {
				if f := &h.Fences[i]; i > 8 && f.Token == 5 {
					f.Token = 2
				} else if i > 8 && f.Token == 6 {
					f.Token = 3
				}
			}
			h.Calls[6].Token, h.Calls[7].Token = 2, 3
		},
		"a second job for the key of one that was cancelled before it started": func(h *history) {
			h.Trail = append([]step{{What: "accepted", Job: 4, Key: "tx/1", Work: "tx/1", Op: "6"}, {What: "gone", Job: 4, Key: "tx/1", Work: "tx/1"}}, h.Trail...)
			h.Ends = append(h.Ends, end{Job: 4, Key: "tx/1", Work: "tx/1", Form: formTx, State: "cancelled"})
		},
		"an id was given out again": func(h *history) {
			again := int64(jobB + 1)
			h.Trail = append(h.Trail, step{What: setBack}, step{What: "accepted", Job: again, Work: "ask/7/1", Op: "7"},
				step{What: "claimed", Job: again, Work: "ask/7/1", Token: tokenB1}, step{What: "gone", Job: again, Work: "ask/7/1"})
			h.Ends = append(h.Ends, end{Job: again, Work: "ask/7/1", Form: formAsk, State: "completed", Gone: true})
			h.Calls = append(h.Calls, call{order: order{Work: "ask/7/1", Form: formAsk, Job: again}, Key: "kB2", What: "applied", Receipt: "r7"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := sound()
			spare(h)
			require.Empty(t, check(h).Violations)
		})
	}
}

func TestLane_TheSeedAloneDecides(t *testing.T) {
	draw := func(seed uint64) (all []fault) {
		for l := newLane(seed, 2, serverFaults, 1000); len(all) < 3*len(serverFaults); {
			all = append(all, l.next())
		}
		return all
	}
	require.Equal(t, draw(1), draw(1))
	require.NotEqual(t, draw(1), draw(2))
	of := map[string]int{}
	for _, f := range draw(1) {
		of[f.Kind]++
	}
	for _, kind := range serverFaults {
		require.Equal(t, 3, of[kind], kind)
	}
}

// A key's tokens grow even if the sequence was set back, unless its fence was pruned before or after that.
func TestCheck_TokensOverASequenceThatWasSetBack(t *testing.T) {
	const first, second = idC, idA // the later job has the smaller id
	accepted := func(id int64) step { return step{What: "accepted", Job: id << 36, Key: "again/1", Work: "again/1"} }
	claimed := func(id int64) step {
		return step{What: "claimed", Job: id << 36, Key: "again/1", Work: "again/1", Token: id<<20 | 1}
	}
	gone := step{What: "gone", Job: first << 36, Key: "again/1", Work: "again/1"}
	pruned, back := step{What: "pruned", Key: "again/1"}, step{What: setBack}
	for _, c := range []struct {
		between []step
		want    int
	}{
		{[]step{back}, 1},
		{[]step{pruned, back}, 0},
		{[]step{back, pruned}, 0},
		{[]step{pruned}, 1},
	} {
		trail := append([]step{accepted(first), claimed(first), gone}, c.between...)
		v := check(&history{Trail: append(trail, accepted(second), claimed(second))})
		require.Len(t, v.Violations[vToken], c.want, "%v", c.between)
	}
}
