package queuetest

import (
	"fmt"
	"regexp"
	"strings"
)

// role is what a step is for.
type role int

const (
	roleUser    role = iota // the handler's own statement
	roleOnceq               // a statement of onceq
	roleClaim               // … that gives the lease
	roleIntent              // … that records the intent of an effect
	roleOutcome             // … that records its outcome
	roleFinish              // … that ends the lease
	roleCommit              // of either
	roleCall                // a call to the outside
	roleSkip                // no step: it changes nothing, and belongs to no job
)

// step is something that a process does that reaches beyond it: a statement or a call.
type step struct {
	text   string // tells it from others, together with nth
	words  string
	role   role
	effect string // intent, outcome and call: of Once
	nth    int    // 1 for the first of its text in its process
	first  bool   // of what is sent at once: the place before it is one of its own
	next   string // in words, what is sent with it and comes behind it

	leased   bool // the process has a lease, as far as it knows
	inTx     bool // its transaction was open afterwards
	what     string
	unfenced bool // a call outside of Once
}

// onceqs says in words what the statements of onceq are, by a part that only they have.
var onceqs = []struct {
	part, words string
	role        role
}{
	{"first_alone as materialized", "onceq's claim", roleClaim},
	{"installation::text", "onceq's look at its installation", roleSkip},
	{"server_encoding", "onceq's check of its schema", roleSkip},
	{"set_config('idle_in_transaction_session_timeout'", "onceq's lock on the job", roleOnceq},
	{"delete from onceq.jobs", "onceq's completion", roleFinish},
	{"spent, reset, delay", "onceq's return of the job", roleFinish},
	{"enable_seqscan", "onceq's settings", roleOnceq},
	{"onceq.plans", "onceq's settings", roleOnceq},
	{"as u(id, claims, holder, n)", "onceq's beat", roleSkip},
	{"(class, scope, key, state, job_id, token, holder, leased_until", "onceq's intent of ", roleIntent},
	{"n as materialized (select nextval('onceq.ids') << 20 as token)", "onceq's intent of ", roleIntent},
	{"f.detail when not $8::bool", "onceq's renewal of ", roleOnceq},
	{"set state = 3,\n         result = case", "onceq's outcome of ", roleOutcome},
	{"set state = case when f.detail is null then 5 else 2 end", "onceq's release of ", roleOutcome},
	{"set state = 2, detail = $7", "onceq's doubt about ", roleOutcome},
	{"set state = 6, detail", "onceq's hold of ", roleOnceq},
	{"f.fingerprint, coalesce(f.result", "onceq's look at ", roleOnceq},
	{"insert into onceq.jobs", "onceq's enqueueing", roleOnceq},
	{"onceq.job_cancels", "onceq's look for a cancellation", roleOnceq},
	{"delete from onceq.waiters", "onceq's farewell", roleSkip},
	{"onceq.", "a statement of onceq", roleOnceq},
}

// name gives the steps of statements that are sent at once, one for each.
func name(asked []statement) []step {
	steps := make([]step, len(asked))
	main := -1
	ends := false
	for i, s := range asked {
		st := &steps[i]
		st.text, st.first = s.sql, i == 0
		sql := strings.ToLower(strings.TrimSpace(s.sql))
		switch {
		case isPing(s.sql):
			st.role = roleSkip
		case strings.HasPrefix(sql, "commit") || strings.HasSuffix(sql, "commit;"):
			st.role, ends = roleCommit, true
		}
		st.words = "`" + short(s.sql) + "`"
		for _, o := range onceqs {
			if !strings.Contains(s.sql, o.part) {
				continue
			}
			st.role, st.words = o.role, o.words
			if strings.HasSuffix(o.words, " ") {
				st.effect = effectOf(s, o.role)
				if st.effect != "" {
					st.words += fmt.Sprintf("effect %q", st.effect)
				} else {
					st.words += "a key"
				}
			}
			break
		}
		if (st.role == roleOnceq && !strings.HasSuffix(st.words, "settings")) || st.role == roleClaim || st.role == roleFinish {
			if main < 0 || st.role != roleOnceq {
				main = i
			}
		}
	}
	if main >= 0 && len(steps) > 1 {
		of := steps[main].words
		began := strings.HasPrefix(strings.ToLower(asked[0].sql), "begin")
		if began && !ends || ends && !began {
			of = "the handler's transaction"
		}
		for i := range steps {
			sql := strings.ToLower(asked[i].sql)
			switch {
			case strings.HasPrefix(sql, "begin"):
				steps[i].role, steps[i].words = roleOnceq, "the begin of "+of
			case steps[i].role == roleCommit:
				steps[i].words = "the commit of " + of
			case strings.HasSuffix(steps[i].words, "settings"):
				steps[i].words += " for " + strings.TrimPrefix(steps[main].words, "onceq's ")
			}
			steps[i].text += " -- " + of
		}
	}
	for i := range steps[:max(0, len(steps)-1)] {
		steps[i].next = steps[i+1].words
	}
	return steps
}

// effectOf gives the name of a job's effect from the parameters of a statement about its fence.
func effectOf(s statement, r role) string {
	at := 1 // of the class; scope and key follow
	switch {
	case strings.Contains(s.sql, "f.class = $1::smallint"):
		at = 0
	case r == roleIntent:
		at = 3
	}
	if at+2 >= len(s.params) {
		return "" // the simple protocol has them in its text
	}
	if class := string(s.params[at]); class != "3" && class != "\x00\x03" {
		return ""
	}
	_, effect, _ := strings.Cut(string(s.params[at+2]), "/")
	return effect
}

var spaces = regexp.MustCompile(`\s+`)

// short gives the beginning of a statement, which says what it is.
func short(sql string) string {
	const limit = 48
	sql = strings.TrimSpace(spaces.ReplaceAllString(sql, " "))
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

// before and after say in words where a process is.
func (s step) before() string {
	return "before " + s.words + s.times()
}

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
