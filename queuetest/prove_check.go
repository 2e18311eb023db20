package queuetest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// check says what is not as it must be after a run, and why.
func (r *proofRun) check(ctx context.Context) {
	fail := func(format string, args ...any) { r.failed = append(r.failed, fmt.Sprintf(format, args...)) }
	var err error
	if r.states, err = r.ends(ctx); err != nil {
		r.err = err
		return
	}
	if err := r.db.Check(); err != nil {
		fail("%v", err)
	}
	calm := r.v.calm
	for i := range r.ids {
		if calm != nil && r.states[i] != calm.states[i] {
			last := r.processes[len(r.processes)-1].lastError()
			fail("the job ended %s, without faults %s (%v)", r.states[i], calm.states[i], last)
			if r.states[i] == onceq.Dead {
				r.mistake = "giving up for good: one fault made the job dead, which another attempt would have finished. Make an error Fatal only where another attempt cannot help, and allow more attempts than one"
			}
		}
	}
	if calm == nil {
		r.usedUp(ctx, fail)
	}
	r.effects(fail)
	r.mine(ctx, fail)
	if calm != nil && r.mistake == "" && len(r.failed) > 0 {
		r.mistake = r.explain()
	}
}

// ends gives the states in which the jobs ended.
func (r *proofRun) ends(ctx context.Context) ([]onceq.State, error) {
	rows, err := r.db.Pool.Query(ctx, `
		select coalesce((select state from onceq.job_history h where h.id = u.id), $2)
		  from unnest($1::bigint[]) with ordinality as u(id, n) order by n`, r.ids, onceq.Completed)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[onceq.State])
}

// usedUp fails where a job that may be tried several times failed each time, although nothing went wrong: that its handler
// always does the same would prove nothing. One that is dead by Fatal is as it is meant to be.
func (r *proofRun) usedUp(ctx context.Context, fail func(string, ...any)) {
	for i, id := range r.ids {
		if r.states[i] != onceq.Dead {
			continue
		}
		job, err := r.db.Queue.Get(ctx, r.db.Pool, id)
		switch {
		case err != nil:
			r.err = err
		case job.MaxAttempts > 1 && job.Attempts == job.MaxAttempts:
			fail("the job failed in all of its %d attempts: %v", job.MaxAttempts, r.processes[0].lastError())
		}
	}
}

// effects compares what happened outside with what happened without faults.
func (r *proofRun) effects(fail func(string, ...any)) {
	v := r.provider
	count := func(effects []Effect) map[string]int {
		n := make(map[string]int)
		for _, e := range effects {
			n[e.What]++
		}
		return n
	}
	now := count(v.effects)
	if r.v.calm == nil && len(v.shared) > 0 {
		c := v.shared[0]
		fail("%s was made for two jobs under one idempotency key, %q", c.What, c.Key)
		r.mistake = "a key that does not name its work: a provider takes the second job's call for a repetition of the first one's, and does nothing; make the key from the job, as the one that onceq.Once gives to its function. Where both are to do it once between them, prove them with jobs that have nothing in common"
		return
	}
	for _, what := range v.other {
		fail("%s was called again with its key and another body", what)
		r.mistake = "another body under the same idempotency key: a provider refuses that, or gives the answer to the first; make the body from the job alone"
	}
	if r.v.calm == nil {
		return
	}
	before := count(r.v.calm.provider.effects)
	for _, what := range slices.Sorted(maps.Keys(union(now, before))) {
		switch n, want := now[what], before[what]; {
		case n > want:
			fail("%s made %s again: it happened %s, without faults %s", r.again(what), what, times(n), times(want))
			if m := r.tooOften(what, want); r.mistake == "" || strings.Contains(m, "key") {
				r.mistake = m
			}
		case n < want:
			fail("%s happened %s, without faults %s", what, times(n), times(want))
			if r.mistake == "" {
				r.mistake = "recording before sending: the job was noted as done, and the effect was not made; the next run believed the note. Put the call into onceq.Once, which knows an intent from an outcome"
			}
		}
	}
}

func union(a, b map[string]int) map[string]int {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

func times(n int) string {
	switch n {
	case 0:
		return "never"
	case 1:
		return "once"
	case 2:
		return "twice"
	}
	return fmt.Sprintf("%d times", n)
}

// again says who made a call that was made before.
func (r *proofRun) again(what string) string {
	first := ""
	for _, c := range r.provider.calls {
		switch {
		case c.What != what || !c.counted:
		case first == "":
			first = c.process
		case first != c.process:
			return "the second worker"
		}
	}
	return "the next run"
}

// tooOften explains an effect that happened more often than without faults.
func (r *proofRun) tooOften(what string, want int) string {
	var made []call
	keys := make(map[string]bool)
	for _, c := range r.provider.calls {
		if c.What == what && c.counted {
			made = append(made, c)
			keys[c.Key] = true
		}
	}
	last := made[len(made)-1]
	if len(keys) > want && !keys[""] {
		return mistakeOfKeys(made[0], last)
	}
	if i := slices.IndexFunc(made, func(c call) bool { return c.late && c.once.name != "" }); i >= 0 {
		return fmt.Sprintf("a call without its context: effect %q was made by a worker that woke up after its time, because the call does not carry the context that onceq.Once gives to its function, which had ended; pass it on", made[i].once.name)
	}
	if last.once.name != "" {
		if last.Key == "" {
			return fmt.Sprintf("a call without an idempotency key: whether effect %q happened was not known after this, so it was run again, and nothing told the provider; send the key that onceq.Once gives to its function, or declare onceq.OnUncertain(Ask or Hold)", last.once.name)
		}
		return fmt.Sprintf("a provider that does not recognise keys: whether effect %q happened was not known after this, so it was run again; declare onceq.OnUncertain(Ask or Hold)", last.once.name)
	}
	call := slices.IndexFunc(r.v.calm.processes[0].tape, func(s *step) bool { return s.what == what })
	if call < 0 {
		return ""
	}
	if r.concurrent() && r.looksFirst(call) {
		return checkThenAct
	}
	if slices.ContainsFunc(r.v.calm.processes[0].tape[call:], func(s *step) bool { return s.writes() }) {
		return "recording after sending: the call is made first and noted afterwards, so that nothing says that it was made when the process ends in between. Put the call into onceq.Once, which notes the intent before and the outcome after it"
	}
	return "an effect outside without a fence: nothing says that it was made when the job runs again. Put the call into onceq.Once"
}

const checkThenAct = "check-then-act without a fence: two runs pass the check before one of them acts. Write through the transaction of Kind.HandleTx, and put calls to the outside into onceq.Once"

// concurrent says whether two runs of the job were under way at once.
func (r *proofRun) concurrent() bool {
	return r.fault != nil && (r.fault.kind == freezing || r.fault.kind == meeting)
}

// looksFirst says whether the handler reads something before a step.
func (r *proofRun) looksFirst(at int) bool {
	return slices.ContainsFunc(r.v.calm.processes[0].tape[:at], func(s *step) bool { return s.reads() })
}

// explain says why a check failed although the outside is as it must be.
func (r *proofRun) explain() string {
	tape := r.v.calm.processes[0].tape
	write := slices.IndexFunc(tape, func(s *step) bool { return s.writes() })
	if write < 0 {
		return ""
	}
	if r.concurrent() && r.looksFirst(write) {
		return checkThenAct
	}
	finish := max(0, slices.IndexFunc(tape, func(s *step) bool { return s.ends() }))
	if slices.ContainsFunc(tape[:finish], func(s *step) bool { return s.writes() && !s.worker }) {
		return "writes that commit apart from the completion: what the handler writes is committed before the job is, so the next run finds it and writes again. Write through the transaction of Kind.HandleTx, or complete the job in your own with Lease.Complete"
	}
	return ""
}

// mine runs the user's check, or compares the tables.
func (r *proofRun) mine(ctx context.Context, fail func(string, ...any)) {
	if r.v.Check == nil {
		var err error
		if r.rows, err = r.tables(ctx); err != nil {
			r.err = err
			return
		}
		if r.v.calm == nil {
			return
		}
		for _, table := range slices.Sorted(maps.Keys(union(r.rows, r.v.calm.rows))) {
			if n, want := r.rows[table], r.v.calm.rows[table]; n != want {
				fail("%s has %d rows, without faults %d", table, n, want)
			}
		}
		return
	}
	o := &Outcome{Pool: r.db.Pool, Queue: r.db.Queue, JobIDs: r.ids, Effects: slices.Clone(r.provider.effects), Fault: r.fault.words()}
	done := make(chan struct{})
	returned := false
	go func() {
		defer close(done)
		defer func() {
			switch p := recover(); {
			case p != nil:
				o.Errorf("Check panicked: %v\n%s", p, debug.Stack())
			case !returned && len(o.errors) == 0:
				o.Errorf("Check ended its goroutine; let it fail through its Outcome")
			}
		}()
		r.v.Check(o)
		returned = true
	}()
	<-done
	for _, e := range o.errors {
		fail("%s", e)
	}
}

// tables counts the rows of every table of the application, and the jobs that were enqueued besides.
func (r *proofRun) tables(ctx context.Context) (map[string]int, error) {
	rows, err := r.db.Pool.Query(ctx, `
		select format('%I.%I', schemaname, tablename) from pg_tables
		 where schemaname not in ('pg_catalog', 'information_schema', 'onceq')`)
	if err != nil {
		return nil, err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	counts := make(map[string]int)
	for _, name := range names {
		var n int
		if err := r.db.Pool.QueryRow(ctx, "select count(*) from "+name).Scan(&n); err != nil {
			return nil, err
		}
		counts["table "+name] = n
	}
	rows, err = r.db.Pool.Query(ctx, `select kind from onceq.jobs where id <> all ($1)`, r.ids)
	if err != nil {
		return nil, err
	}
	kinds, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, kind := range kinds {
		counts[fmt.Sprintf("queue of %q", kind)]++
	}
	return counts, err
}

// mistakeOfJobs compares jobs that were made for the same work at two times.
func mistakeOfJobs(a, b []onceq.Job) string {
	for i := range a {
		if i >= len(b) || a[i].Key == b[i].Key {
			continue
		}
		what := "the job's key differs each time the job is made"
		if one, two := differing(a[i].Key, b[i].Key); isTime(one) && isTime(two) {
			what = "the job's key contains a timestamp"
		}
		return fmt.Sprintf("%s: %q, then %q. No duplicate is ever recognised; make the key from what the work is about", what, a[i].Key, b[i].Key)
	}
	return ""
}

// text says what went wrong in a run.
func (r *proofRun) text() string {
	var b strings.Builder
	if r.err != nil {
		fmt.Fprintf(&b, "%s; %v", cmp.Or(r.fault.words(), "without any fault"), r.err)
	} else {
		fmt.Fprintf(&b, "%s; then %s", r.fault.words(), strings.Join(r.failed, "; and "))
	}
	return b.String()
}

// moreRuns is how many further runs with the same mistake are named.
const moreRuns = 5

// failures gives one text for each mistake: its first run, and how many more there are.
func (rep *report) failures() []string {
	var texts []string
	if rep.keys != "" {
		texts = append(texts, "mistake: "+rep.keys)
	}
	groups := make(map[string][]*proofRun)
	var order []string
	for _, r := range rep.runs {
		if r.err == nil && len(r.failed) == 0 {
			continue
		}
		group := r.group()
		if groups[group] == nil {
			order = append(order, group)
		}
		groups[group] = append(groups[group], r)
	}
	for _, group := range order {
		runs := groups[group]
		slices.SortStableFunc(runs, func(a, b *proofRun) int { return a.fault.remoteness() - b.fault.remoteness() })
		text := runs[0].text()
		if runs[0].mistake != "" {
			text += "\nmistake: " + runs[0].mistake
		}
		if !rep.replay {
			text += fmt.Sprintf("\nto repeat it alone: %s=%s go test -run '%s'", EnvProve, runs[0].fault.name(), pattern(rep.test))
		}
		for i, more := range runs[1:] {
			if i == moreRuns {
				text += fmt.Sprintf("\n… and in %d more runs", len(runs)-1-i)
				break
			}
			text += fmt.Sprintf("\nthe same with %s: %s", more.fault.name(), more.fault.words())
		}
		texts = append(texts, strings.ReplaceAll(text, "\n", "\n\t"))
	}
	return texts
}

// remoteness orders runs that show the same: the handler's own statements and calls say more than onceq's between them,
// and different places more than different faults at one.
func (f *fault) remoteness() int {
	switch {
	case f == nil:
		return 0
	case f.step == nil || !f.step.own():
		return 3
	case f.kind == dying:
		return 1
	}
	return 2
}

// group is equal for runs that show the same.
func (r *proofRun) group() string {
	if r.mistake != "" {
		name, _, _ := strings.Cut(r.mistake, ":")
		return name
	}
	if r.err != nil {
		return r.err.Error()
	}
	return fmt.Sprint(r.failed)
}

// pattern is what -run takes for a test's name.
func pattern(test string) string {
	parts := strings.Split(test, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

func (rep *report) summary() string {
	failed := 0
	kinds := make(map[faultKind]int)
	for _, r := range rep.runs {
		if r.err != nil || len(r.failed) > 0 {
			failed++
		}
		if r.fault != nil {
			kinds[r.fault.kind]++
		}
	}
	outcome := "all passed"
	if failed > 0 {
		outcome = fmt.Sprintf("%d FAILED", failed)
	}
	return fmt.Sprintf("%d steps; died at %d places, lost a connection or an answer at %d, froze at %d, met at %d, ran twice; %s, in %s",
		len(rep.steps), kinds[dying], kinds[cutting], kinds[freezing], kinds[meeting], outcome, rep.took.Round(10*time.Millisecond))
}

// story says what the processes of a run did.
func (r *proofRun) story() string {
	var b strings.Builder
	fmt.Fprintf(&b, "queuetest: Prove: run %s: %s\n", r.fault.name(), cmp.Or(r.fault.words(), "without any fault"))
	for i, p := range r.processes {
		p.mu.Lock()
		fmt.Fprintf(&b, "\tworker %d:\n", i+1)
		for n, s := range p.tape {
			fmt.Fprintf(&b, "\t\t%3d %s%s\n", n+1, s.words, s.times())
		}
		if p.dead {
			b.WriteString("\t\t    died\n")
		}
		if p.last != nil {
			fmt.Fprintf(&b, "\t\t    its handler's last error: %v\n", p.last)
		}
		p.mu.Unlock()
	}
	return b.String()
}
