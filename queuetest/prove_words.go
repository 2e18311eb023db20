package queuetest

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// role says what a step is for.
type role int

const (
	roleUser    role = iota // the handler's own statement
	roleOnceq               // a statement of onceq
	roleClaim               // … that gives the lease
	rolePromote             // … that lets jobs go on which waited
	roleIntent              // … that records the intent of an effect
	roleOutcome             // … that records its outcome
	roleOpen                // … that opens a handler's transaction
	roleFinish              // … that ends the lease
	roleCommit              // of a handler or of onceq
	roleCall                // a call to the outside
	roleSkip                // not a step: it changes nothing, and belongs to no job
)

// step is something that a process does to the outside: a statement or a call.
type step struct {
	text   string // identifies the step, together with nth
	words  string
	role   role
	effect effect // for an intent, an outcome or a call: its effect of onceq.Once
	nth    int    // 1 for the first step with this text in its process
	first  bool   // the first of several that are sent at once: only before it is there a separate point for a fault
	next   string // in words, the step that is sent with it and follows it
	with   string // in words, the handler's first statement, which is sent with this one; this one opens the transaction

	denied bool // an Ask has said that the effect did not happen

	worker bool // in the transaction of HandleTx or HandleBatch, which the worker commits

	leased bool // the process has a lease, as far as it knows
	inTx   bool // its transaction was open afterwards
	what   string
	http   bool // a call by HTTP
}

// onceqs describes onceq's statements in words. Each is recognised by a part that only it contains.
var onceqs = []struct {
	part, words string
	role        role
}{
	{"server_encoding", "onceq's check of its schema", roleSkip},
	{"select coalesce(pg_catalog.pg_sequence_last_value", "onceq's check of its schema", roleSkip},
	{"onceq.promote(", "onceq's promotion of jobs that wait", rolePromote},
	{"onceq.sweep_members(", "onceq's look for the ends of members", roleSkip},
	{"from onceq.lane_locks) l", "onceq's look at rows that are always there", roleSkip},
	{"select slot from onceq.lane_locks order by slot", "onceq's look at all lanes", roleSkip},
	{"onceq.call_families(", "onceq's look at all lanes", roleSkip},
	{"onceq.settle_limits(", "onceq's look at all lanes", roleSkip},
	{"onceq.insert_members(", "onceq's adding of members", roleOnceq},
	{"array(select group_id from onceq.job_members", "onceq's look at the job's groups", roleOnceq},
	{"with recursive up (id, root)", "onceq's look for jobs that would wait for each other", roleOnceq},
	{"where group_id = $1::bigint and job_id > $2::bigint", "onceq's reading of the members", roleOnceq},
	{"claims = least(j.claims + 1", "onceq's claim", roleClaim},
	{"select pg_catalog.array_agg(j.id) filter", "onceq's rescan", roleSkip},
	{"installation::text", "onceq's reading of its installation's id", roleSkip},
	{"coalesce(pg_catalog.pg_xact_status($1::text", "onceq's check whether the commit happened", roleOnceq},
	{"case when $1::text <> '' then pg_catalog.set_config('idle_in_transaction_session_timeout'", "onceq's lock on the job", roleOpen},
	{"delete from onceq.jobs", "onceq's completion", roleFinish},
	{"onceq.finish(", "onceq's completion", roleFinish},
	{"onceq.finish_next(", "onceq's completion", roleFinish},
	{"spent, reset, delay", "onceq's return of the job", roleFinish},
	{"onceq.give_back(", "onceq's return of the job", roleFinish},
	{"enable_seqscan", "onceq's settings", roleOnceq},
	{"set local idle_in_transaction_session_timeout", "onceq's settings", roleOnceq},
	{"onceq.plans", "onceq's settings", roleOnceq},
	{"as u(id, claims, holder, n)", "onceq's beat", roleSkip},
	{"greatest(leased_until", "onceq's longer lease", roleSkip},
	{"(class, scope, key, state, job_id, token, holder, leased_until", "onceq's intent of ", roleIntent},
	{"onceq.claim_fence(", "onceq's intent of ", roleIntent},
	{"when not $8::bool then f.detail", "onceq's renewal of ", roleOnceq},
	{"set state = 3,\n         result = case", "onceq's outcome of ", roleOutcome},
	{"set state = case when f.detail is null then 5 else 2 end", "onceq's release of ", roleOutcome},
	{"set state = 2, detail = $7", "onceq's doubt about ", roleOutcome},
	{"set state = 6, detail", "onceq's hold of ", roleOnceq},
	{"f.fingerprint, coalesce(f.result", "onceq's look at ", roleOnceq},
	{"insert into onceq.jobs", "onceq's enqueueing", roleOnceq},
	{"onceq.enqueue_", "onceq's enqueueing", roleOnceq},
	{"= 'committed' then 1 else onceq.lease_lost(", "onceq's check of the transaction", roleOnceq},
	{"onceq.begin_await(", "onceq's beginning of a wait", roleOnceq},
	{"update onceq.job_awaits a set state", "onceq's note of a time-out", roleOnceq},
	{"onceq.job_awaits", "onceq's look at a wait", roleOnceq},
	{"onceq.emit(", "onceq's event", roleOnceq},
	{"onceq.job_cancels", "onceq's check for a cancellation", roleOnceq},
	{"delete from onceq.waiters", "onceq's withdrawal of its announcement", roleSkip},
	{"onceq.pauses", "onceq's look at what is paused", roleSkip},
	{"onceq.add_counts(", "onceq's counts", roleSkip},
	{"onceq.be_present(", "onceq's row of the worker", roleSkip},
	{"onceq.workers", "onceq's row of the worker", roleSkip},
	{"onceq.", "a statement of onceq", roleOnceq},
}

// name returns the steps of statements that are sent at once, one for each. worker says whether they are in a worker's
// transaction; still says the same for the statements that follow.
func name(asked []statement, worker bool) (steps []step, still bool) {
	steps = make([]step, len(asked))
	main, mainRole := -1, roleUser // what all of them are for
	began, ends := false, false
	for i, s := range asked {
		st := &steps[i]
		st.text, st.first = s.sql, i == 0
		sql := strings.ToLower(strings.TrimSpace(s.sql))
		switch {
		case isPing(s.sql):
			st.role = roleSkip
		case strings.HasPrefix(sql, "commit") || strings.HasSuffix(sql, "commit;"):
			st.role, ends = roleCommit, true
		case i == 0 && strings.HasPrefix(sql, "begin"):
			began, worker = true, false
		case sql == "rollback":
			ends = true
		}
		st.words = "`" + short(s.sql) + "`"
		for _, o := range onceqs {
			if !strings.Contains(s.sql, o.part) {
				continue
			}
			st.role, st.words = o.role, o.words
			if strings.HasSuffix(o.words, " ") {
				st.effect = effectOf(s, o.role)
				st.denied = strings.Contains(s.sql, "when not $8::bool then f.detail") && len(s.params) > 7 && strings.Trim(string(s.params[7]), "\x01true") == ""
				if st.effect.name != "" {
					st.words += fmt.Sprintf("effect %q", st.effect.name)
				} else {
					st.words += "a key"
				}
			}
			break
		}
		switch st.role {
		case roleOnceq, rolePromote, roleIntent, roleOutcome:
			if main < 0 && !st.setting() {
				main = i
			}
		case roleClaim, roleOpen, roleFinish:
			if mainRole != roleOpen {
				main, mainRole = i, st.role
			}
		}
	}
	if began && main < 0 && slices.ContainsFunc(steps, func(s step) bool { return s.role == roleSkip }) {
		for i := range steps {
			steps[i].role = roleSkip // the statements around it change nothing either
		}
	}
	worker = worker || mainRole == roleOpen
	if of := ""; main >= 0 && len(steps) > 1 || worker {
		if of = "the handler's transaction"; !worker {
			of = steps[main].words
		}
		for i := range steps {
			st := &steps[i]
			switch {
			case i == 0 && began:
				st.role, st.words = roleOnceq, "the begin of "+of
			case st.role == roleCommit:
				st.words = "the commit of " + of
			case st.setting() && main >= 0:
				st.words += " for " + strings.TrimPrefix(steps[main].words, "onceq's ")
			default:
				continue
			}
			st.text += " -- " + of // tells them apart from others with the same text
		}
	}
	if began && !worker && main >= 0 {
		merge(steps, main)
	}
	for i := range steps {
		steps[i].worker = worker
		if i+1 < len(steps) {
			steps[i].next = steps[i+1].words
		}
	}
	if mainRole == roleOpen {
		if at := slices.IndexFunc(steps[main+1:], func(s step) bool { return !s.setting() }); at >= 0 {
			steps[0].with = steps[main+1+at].words
		}
	}
	return steps, worker && !ends
}

// merge makes one step of a transaction of onceq's own that is sent as a whole: the server does all of it or nothing.
// It takes the position of the commit.
func merge(steps []step, main int) {
	last := len(steps) - 1
	if steps[last].role != roleCommit {
		return
	}
	for i := 1; i < last; i++ {
		if i != main && !steps[i].setting() && steps[i].role != roleSkip {
			return
		}
	}
	steps[last] = steps[main]
	steps[last].first = true
	for i := range last {
		steps[i].role = roleSkip
	}
}

func (s step) setting() bool { return strings.HasPrefix(s.words, "onceq's settings") }

// effect is an effect of onceq.Once. Two jobs may each have a "charge".
type effect struct {
	job  string // its id
	name string // "" for no effect
}

// effectOf reads a job's effect from the parameters of a statement about its fence.
func effectOf(s statement, r role) (e effect) {
	at := 1 // position of the class; scope and key follow
	switch {
	case strings.Contains(s.sql, "f.class = $1::smallint"):
		at = 0
	case r == roleIntent:
		at = 3
	}
	if at+2 >= len(s.params) {
		return e // the simple protocol has them in the text
	}
	if class := string(s.params[at]); class != "3" && class != "\x00\x03" {
		return e
	}
	e.job, e.name, _ = strings.Cut(string(s.params[at+2]), "/")
	return e
}

// short returns the beginning of a statement, which says what it does.
func short(sql string) string {
	const limit = 48
	sql = strings.Join(strings.Fields(sql), " ")
	cut := sql
	if i := strings.IndexByte(cut, '('); i > 12 {
		cut = strings.TrimSpace(cut[:i])
	}
	if len(cut) > limit {
		cut = cut[:limit]
		if i := strings.LastIndexByte(cut, ' '); i > 0 {
			cut = cut[:i]
		}
		cut = strings.ToValidUTF8(cut, "")
	}
	if cut != sql {
		cut += " …"
	}
	return cut
}

var (
	writing = regexp.MustCompile(`(?i)\b(insert\s+into|update|delete\s+from|merge\s+into|copy)\b`)
	reading = regexp.MustCompile(`(?i)^\s*(select|with|table|values)\b`)
)

func (s step) writes() bool { return s.role == roleUser && writing.MatchString(s.text) }
func (s step) reads() bool {
	return s.role == roleUser && reading.MatchString(s.text) && !writing.MatchString(s.text)
}

// before and after describe where a process is.
func (s step) before() string {
	words := "before " + s.words + s.times()
	if s.with != "" {
		words += " (sent with " + s.with + ")"
	}
	return words
}

// own reports that the step is the handler's, and not one of onceq's around it.
func (s step) own() bool { return s.role == roleUser || s.role == roleCall }

// ofWorker reports that the step may be missed, whatever the handler does: how often a worker claims until it gets the job depends on how
// quick the machine is.
func (s step) ofWorker() bool { return s.role == roleClaim || s.role == rolePromote }

// ends reports that the process has no lease after the step, unless its transaction is still open: see Process.settled.
func (s step) ends() bool { return s.role == roleFinish || s.role == roleCommit && s.worker }

func (s step) after() string {
	words := "after " + s.words + s.times()
	switch {
	case s.role == roleCall:
		return words + " was made, before its answer"
	case s.next != "":
		return words + ", before " + s.next
	case s.role == roleOutcome:
		return words + " was recorded"
	case s.role == roleCommit:
		return words + ", before its answer"
	case s.inTx:
		return words + ", before commit"
	}
	return words + " was committed, before its answer"
}

func (s step) times() string {
	if s.nth > 1 {
		return fmt.Sprintf(" (number %d)", s.nth)
	}
	return ""
}
