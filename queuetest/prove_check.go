package queuetest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

func (r *proofRun) fail(format string, args ...any) {
	r.failed = append(r.failed, fmt.Sprintf(format, args...))
}

// check checks everything that a run has left.
func (r *proofRun) check(ctx context.Context) {
	if r.v.calm == nil {
		r.shared()
	}
	if len(r.failed) == 0 {
		r.refused()
	}
	if len(r.failed) > 0 {
		return // it was aborted
	}
	var err error
	if r.states, err = r.ends(ctx); err != nil {
		r.err = err
		return
	}
	if err := r.db.Check(); err != nil {
		r.fail("%v", err)
	}
	if r.v.calm == nil {
		r.usedUp(ctx)
		if r.err == nil {
			r.results, r.err = r.outcomes(ctx)
		}
	}
	o := &Outcome{Pool: r.db.Pool, Queue: r.db.Queue, JobIDs: r.ids, Effects: r.provider.happened(), Fault: r.fault.words()}
	if r.fault != nil && r.v.Also != nil && !r.fault.later {
		o.run(func() { r.also = r.v.Also(o) })
	}
	switch {
	case r.also:
	case r.v.Check != nil && r.fault != nil && r.fault.later: // what Check says about ids may not hold
	case r.v.Check != nil:
		o.run(func() { r.v.Check(o) })
	case r.err == nil:
		r.contents, r.err = read(ctx, r.db.Pool, r.ids)
	}
	r.failed = append(r.failed, o.errors...)
}

// judge compares a run with those without faults.
func (r *proofRun) judge() {
	if r.err != nil || r.also {
		return
	}
	if r.missed && r.err == nil {
		second := r.v.calms[1].processes[0].tape
		if r.fault.step.ofWorker() {
			return
		}
		if slices.ContainsFunc(second, func(s *step) bool { return s.text == r.fault.step.text && s.nth == r.fault.step.nth }) {
			r.err = errors.New("the handler did not reach this step again: it must take the same steps in the same order each time")
		}
		return
	}
	if r.mistake != "" {
		return
	}
	mine := r.failed // from the queue's tables and from Check
	r.failed = nil
	r.effects()
	if len(r.strange) == 0 {
		for i := range r.ids {
			if want := r.v.calm.states[i]; r.states[i] != want {
				last := r.processes[len(r.processes)-1].lastError()
				r.fail("the job ended %s, without faults %s (%v)", r.states[i], want, last)
				switch why := r.unanswered(last); {
				case r.states[i] != onceq.StateDead:
				case why != "":
					r.mistake = why
				default:
					r.mistake = "giving up for good: one fault made the job dead, although another attempt would have finished it. Make an error Fatal only if another attempt cannot help, and allow more than one attempt. If the job should end like this, say so with Proof.Also"
				}
			}
		}
		if r.contents != nil {
			r.compare()
		}
	}
	r.failed = append(r.failed, mine...)
	if r.mistake == "" && len(r.failed) > 0 {
		r.mistake = r.explain()
	}
}

// compare compares the tables with those of the runs without faults.
func (r *proofRun) compare() {
	for _, name := range slices.Sorted(maps.Keys(r.contents)) {
		if r.v.tables[name] == nil {
			r.v.tables[name] = compare(name, r.v.Varies, []contents{{}})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.v.tables)) {
		s := r.v.tables[name]
		if words := s.differs(r.contents[name]); words != "" {
			r.fail("%s", words)
			if r.mistake == "" && r.skips() && s.less(r.contents[name]) {
				r.mistake = repetition
			}
		} else if words := r.untouched(s); words != "" {
			r.fail("%s", words)
			if r.mistake == "" && r.skips() {
				r.mistake = repetition
			}
		} else if words := s.rewritten(r.earlier[name], r.contents[name]); words != "" {
			r.fail("%s", words)
			r.mistake = "each run makes a new random value: the first one was committed, and somebody who has seen it has a value that is no longer valid. Make it in onceq.Once, which keeps what its function returns, or write it only if there is none yet, or write it through the transaction of Kind.HandleTx. If it may change, name it in Proof.Varies"
		}
	}
}

// outcomes returns the results of the jobs' effects.
func (r *proofRun) outcomes(ctx context.Context) (map[effect]json.RawMessage, error) {
	all := make(map[effect]json.RawMessage)
	for i, id := range r.ids {
		effects, err := onceqops.New(r.db.Queue).Effects(ctx, r.db.Pool, id)
		if err != nil {
			return nil, err
		}
		for _, e := range effects {
			all[effect{strconv.Itoa(i), e.Name}] = e.Result
		}
	}
	return all, nil
}

// refused fails the run if a key came back with another body, or an effect's name was used twice.
func (r *proofRun) refused() {
	for _, p := range r.processes {
		if err := p.lastError(); errors.Is(err, onceq.ErrNameUsed) && len(r.failed) == 0 {
			r.fail("%v", err)
			r.mistake = "one name for several effects: onceq.Once takes the second one in a run for a repetition of the first, and refuses it. Put what tells them apart into the name, such as the address that a mail is for"
		}
	}
	for _, what := range r.provider.changed() {
		r.fail("%s was called again with its key and another body", what)
		r.mistake = "another body under the same idempotency key: a provider refuses that, or gives its first answer; make the body from nothing but the job"
	}
}

// shared fails the run if two jobs sent the same key.
func (r *proofRun) shared() {
	if all := r.provider.mixed(); len(all) > 0 {
		c := all[0]
		r.fail("%s was made for two jobs under one idempotency key, %q", c.What, c.Key)
		r.mistake = "a key that does not name its work: a provider takes the second job's call for a repetition of the first one's, and does nothing; make the key from the job, like the key that onceq.Once gives to its function. If both jobs should do it once between them, prove them with jobs that have nothing in common"
	}
}

// ends returns the states in which the jobs ended.
func (r *proofRun) ends(ctx context.Context) ([]onceq.State, error) {
	rows, err := r.db.Pool.Query(ctx, `
		select coalesce((select state from onceq.job_history h where h.id = u.id), $2)
		  from unnest($1::bigint[]) with ordinality as u(id, n) order by n`, r.ids, onceq.StateCompleted)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[onceq.State])
}

// usedUp fails the run if a job used several attempts and failed each time without any fault: a handler that always
// fails proves nothing. A job that is dead by Fatal is fine.
func (r *proofRun) usedUp(ctx context.Context) {
	for i, id := range r.ids {
		if r.states[i] != onceq.StateDead {
			continue
		}
		job, err := r.db.Queue.Get(ctx, r.db.Pool, id)
		switch {
		case err != nil:
			r.err = err
		case job.MaxAttempts > 1 && job.Attempts == job.MaxAttempts:
			r.fail("the job failed in all of its %d attempts: %v", job.MaxAttempts, r.processes[0].lastError())
		}
	}
}

// effects compares the effects outside with those of the run without faults.
func (r *proofRun) effects() {
	now, calm := r.count(), r.v.calm.count()
	least, most := maps.Clone(calm), maps.Clone(calm)
	steady := maps.Clone(calm)
	wandering := false // the addresses of some effects differ between runs without faults
	for i, c := range r.v.calms[1:] {
		n := c.count()
		wandering = wandering || lacks(n, calm) && lacks(calm, n)
		for what := range union(n, most) {
			steady[what], most[what] = min(steady[what], n[what]), max(most[what], n[what])
			if i == 0 { // the later run may do more, but not less
				least[what] = min(least[what], n[what])
			}
		}
	}
	if wandering {
		r.places(now, steady)
		maps.DeleteFunc(most, func(what string, _ int) bool { return steady[what] == 0 })
	} else {
		r.strangers(now, most)
	}
	if len(r.strange) > 0 {
		return // only Check knows what such an effect means for the rest
	}
	for _, what := range slices.Sorted(maps.Keys(most)) {
		switch n := now[what]; {
		case n > most[what]:
			r.fail("%s made %s again: it happened %s, without faults %s", r.again(what), what, times(n), times(most[what]))
			if m := r.tooOften(what, most[what]); r.mistake == "" || strings.Contains(m, "key") {
				r.mistake = m
			}
		case n < least[what]:
			r.fail("%s happened %s, without faults %s", what, times(n), times(least[what]))
			r.mistake = cmp.Or(r.mistake, r.tooSeldom())
		}
	}
}

const repetition = "another run taken for a repetition: if Lease.Attempt or Lease.Lost says that the job began before, the handler leaves work out. The earlier run may have died before it did anything. Do the work in every run, in onceq.Once or through the transaction of Kind.HandleTx, which know what was done"

// skips reports whether the handler does less in a later run of its job.
func (r *proofRun) skips() bool {
	return r == r.v.later || r.v.later != nil && r.v.later.mistake == repetition && !r.stoppedShort()
}

// tooSeldom explains an effect that happened less often than without faults.
func (r *proofRun) tooSeldom() string {
	if r.stoppedShort() {
		return stoppedShort
	}
	for _, why := range r.asked {
		return why
	}
	switch {
	case r.skips():
		return repetition
	case r.fault != nil && r.fault.kind == refusing && !slices.ContainsFunc(r.processes, func(p *Process) bool { return p.lastError() != nil }):
		return "an answer that nobody looks at: the server refused the call, and the handler went on as if it had been done. Return an error unless the status says that it was done; http.Client returns no error for a status"
	}
	return "recording before sending: the work was recorded as done, the effect was not made, and the next run believed the record. Put the call into onceq.Once, which tells an intent from an outcome"
}

// answer notes what an Ask has said about an effect, if that is wrong.
func (r *proofRun) answer(about effect, applied bool) {
	made := r.provider.applied(about)
	seen := r.v.calm != nil && slices.ContainsFunc(r.v.calm.provider.reached(), func(c call) bool { return c.once.name == about.name && c.counted })
	if made == applied || !seen {
		return
	}
	said, was := "had happened", "had not"
	if made {
		said, was = "had not happened", "had"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked[about] = fmt.Sprintf("an Ask with a wrong answer: it said that effect %q %s, and it %s. Ask the provider for what the effect makes, by something that is the same in every run, such as the key that the Ask gets", about.name, said, was)
}

// unanswered explains a job that was asked about until its attempts were used up.
func (r *proofRun) unanswered(last error) string {
	var u *onceq.UncertainError
	if !errors.As(last, &u) || !strings.Contains(u.Error(), "; asking failed: ") {
		return ""
	}
	return fmt.Sprintf("an Ask without an answer: it returned an error each time, so nobody knew whether effect %q had happened until all attempts were used up. If the provider does not know the effect, which is often a status of 404, return false and no error", u.Effect)
}

// count counts the effects outside by what they are.
func (r *proofRun) count() map[string]int {
	n := make(map[string]int)
	for _, e := range r.provider.happened() {
		n[r.place(e.What)]++
	}
	return n
}

var number = regexp.MustCompile(`\d+`)

// place is what an effect has in common with that of another run: its What without the ids of the jobs and without keys of
// onceq, which differ from run to run.
func (r *proofRun) place(what string) string {
	return number.ReplaceAllStringFunc(ours.ReplaceAllString(what, "{key}"), func(n string) string {
		i := slices.IndexFunc(r.ids, func(id int64) bool { return n == strconv.FormatInt(id, 10) })
		switch {
		case i < 0:
			return n
		case len(r.ids) == 1:
			return "{id}"
		}
		return fmt.Sprintf("{id %d}", i+1)
	})
}

// strangers finds the effects that no run without faults has.
func (r *proofRun) strangers(now, most map[string]int) {
	for _, what := range slices.Sorted(maps.Keys(now)) {
		if most[what] > 0 {
			continue
		}
		r.strange = append(r.strange, what)
		if n := now[what]; n > 1 {
			r.fail("%s made %s again: it happened %s, and without faults never", r.again(what), what, times(n))
			r.mistake = r.tooOften(what, 1)
		}
	}
}

// lacks reports whether a has nothing of something that is in b.
func lacks(a, b map[string]int) bool {
	for what, n := range b {
		if n > 0 && a[what] == 0 {
			return true
		}
	}
	return false
}

// places compares the number of those effects whose addresses differ between runs without faults: those that are not steady.
func (r *proofRun) places(now, steady map[string]int) {
	sum := func(counts map[string]int) (n int, what string) {
		for _, w := range slices.Sorted(maps.Keys(counts)) {
			if steady[w] == 0 {
				n, what = n+counts[w], w
			}
		}
		return n, what
	}
	n, what := sum(now)
	want, whatCalm := sum(r.v.calm.count())
	second, _ := sum(r.v.calms[1].count())
	if least := min(want, second); n < least {
		r.fail("%s and others like it happened %s, without faults %s", whatCalm, times(n), times(least))
		r.mistake = r.tooSeldom()
	}
	if n > want {
		r.fail("%s and others like it happened %s, without faults %s", what, times(n), times(want))
		r.mistake = "the address of a call differs between the runs of one job: no provider recognises a repetition. Derive it from the job"
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

// again returns which run repeated a call.
func (r *proofRun) again(what string) string {
	first := ""
	for _, c := range r.provider.reached() {
		switch {
		case r.place(c.What) != what || !c.counted:
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
	for _, c := range r.provider.reached() {
		if r.place(c.What) == what && c.counted {
			made = append(made, c)
			keys[c.Key] = true
		}
	}
	last := made[len(made)-1]
	if len(keys) > want && len(keys) > 1 && !keys[""] {
		other := slices.IndexFunc(made, func(c call) bool { return c.Key != made[0].Key })
		return mistakeOfKeys(made[0], made[other])
	}
	if i := slices.IndexFunc(made, func(c call) bool { return c.late && c.once.name != "" }); i >= 0 {
		return fmt.Sprintf("a call without its context: effect %q was made by a worker that woke up after its time. The context that onceq.Once gives to its function had ended, but the call does not use it; pass it on", made[i].once.name)
	}
	if why := r.asked[last.once]; why != "" {
		return why
	}
	if last.once.name != "" && r.released(last.once) {
		return fmt.Sprintf("an answer taken for a refusal: effect %q happened, but its error said onceq.NotApplied, so it was done again. A server that fails, or whose answer is lost, may have done the work; use NotApplied only for what was certainly refused", last.once.name)
	}
	if last.once.name != "" {
		if last.Key == "" {
			return fmt.Sprintf("a call without an idempotency key: nobody knew whether effect %q had happened, so it was run again, and nothing told the provider that it was a repetition; send the key that onceq.Once gives to its function, or declare onceq.OnUncertain(Ask or Hold)", last.once.name)
		}
		return fmt.Sprintf("a provider that does not recognise keys: nobody knew whether effect %q had happened, so it was run again; declare onceq.OnUncertain(Ask or Hold)", last.once.name)
	}
	call := slices.IndexFunc(r.v.calm.processes[0].tape, func(s *step) bool { return s.role == roleCall && r.v.calm.place(s.what) == what })
	if call < 0 {
		return ""
	}
	if r.concurrent() && r.looksFirst(call) {
		return checkThenAct
	}
	if slices.ContainsFunc(r.v.calm.processes[0].tape[call:], func(s *step) bool { return s.writes() }) {
		return "recording after sending: the call is made first and recorded afterwards, so nothing says that it was made if the process ends in between. Put the call into onceq.Once, which records the intent before it and the outcome after it"
	}
	return "an effect outside without a fence: when the job runs again, nothing says that the effect was made. Put the call into onceq.Once. If the call changes nothing, say so with Proof.Safe; if the provider recognises a repetition, say by what with Proof.Key"
}

// released reports whether an effect took place and was then recorded as not applied.
func (r *proofRun) released(once effect) bool {
	return slices.ContainsFunc(r.processes, func(p *Process) bool {
		return slices.ContainsFunc(p.tape, func(s *step) bool { return s.effect == once && strings.HasPrefix(s.words, "onceq's release of ") })
	})
}

const checkThenAct = "check-then-act without a fence: two runs pass the check before one of them acts. Write through the transaction of Kind.HandleTx, and put calls to the outside into onceq.Once"

// concurrent reports whether two runs of the job were active at once.
func (r *proofRun) concurrent() bool {
	return r.fault != nil && (r.fault.kind == freezing || r.fault.kind == meeting)
}

// looksFirst reports whether the handler reads something before a step.
func (r *proofRun) looksFirst(at int) bool {
	return slices.ContainsFunc(r.v.calm.processes[0].tape[:at], func(s *step) bool { return s.reads() })
}

const stoppedShort = "a shutdown taken for the end of the work: the handler's context ended, and the handler returned nil, so the job is completed with work left. Return the context's error; the job then runs again, and no attempt is spent"

// stoppedShort reports whether the worker was shut down and its handler completed the job nevertheless.
func (r *proofRun) stoppedShort() bool {
	return r.fault != nil && r.fault.kind == stopping && !slices.ContainsFunc(r.processes[1:], func(p *Process) bool {
		return slices.ContainsFunc(p.tape, func(s *step) bool { return s.leased })
	})
}

// explain returns why a check failed although the effects outside are right.
func (r *proofRun) explain() string {
	if r.stoppedShort() {
		return stoppedShort
	}
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
		return "writes that commit apart from the completion: what the handler writes is committed before the completion, so the next run finds it and writes again. Write through the transaction of Kind.HandleTx, or complete the job in your own transaction with Lease.Complete"
	}
	return ""
}

// run calls a function of the proof in a goroutine, which the function may end.
func (o *Outcome) run(fn func()) {
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
		fn()
		returned = true
	}()
	<-done
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

// text describes what went wrong in a run.
func (r *proofRun) text() string {
	var b strings.Builder
	if r.err != nil {
		fmt.Fprintf(&b, "%s; %v", cmp.Or(r.fault.words(), "without any fault"), r.err)
	} else {
		fmt.Fprintf(&b, "%s; then %s", r.fault.words(), strings.Join(r.failed, "; and "))
	}
	return b.String()
}

// moreRuns is how many further runs with the same mistake are listed.
const moreRuns = 5

// failures returns one text for each mistake: its first run, and how many more there are.
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
			text += fmt.Sprintf("\nto repeat only this run: %s=%s go test -run '%s'", EnvProve, runs[0].fault.name(), pattern(rep.test))
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

// remoteness orders runs that show the same mistake. The handler's own statements and calls explain more than onceq's
// between them, and different steps explain more than different faults at one step.
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

// group is equal for runs that show the same mistake.
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

// pattern returns the -run pattern for a test's name.
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
		if r.fault != nil && !r.fault.later {
			kinds[r.fault.kind]++
		}
	}
	calls := 0
	seen := make(map[string]bool) // effects that had a call
	var blind []string
	for _, s := range rep.steps {
		if s.role == roleCall {
			calls++
			seen[s.effect.name] = true
		}
	}
	for _, s := range rep.steps {
		if name := s.effect.name; s.role == roleIntent && name != "" && !seen[name] && !slices.Contains(blind, name) {
			blind = append(blind, name)
		}
	}
	others := make(map[string]int)
	missed := 0
	for _, r := range rep.runs {
		for _, what := range r.strange {
			others[what]++
		}
		if r.missed && r.err == nil {
			missed++
		}
	}
	outcome := "all passed"
	if failed > 0 {
		outcome = fmt.Sprintf("%d FAILED", failed)
	}
	seenCalls := fmt.Sprintf("%d calls seen", calls)
	if calls == 1 {
		seenCalls = "1 call seen"
	}
	sampled := 0
	for _, n := range kinds {
		sampled += n
	}
	text := fmt.Sprintf("%d steps, %s; died at %d places, lost a connection or an answer at %d, got 500 at %d and 503 at %d, froze at %d, met at %d, stopped at %d, ran twice; %s, in %s",
		len(rep.steps), seenCalls, kinds[dying], kinds[cutting], kinds[failing], kinds[refusing], kinds[freezing], kinds[meeting], kinds[stopping], outcome, rep.took.Round(10*time.Millisecond))
	if rep.places > 0 {
		text += fmt.Sprintf("\n-short: a sample of %d of %d runs with a fault; without -short all are made", sampled, rep.places)
	}
	if len(blind) > 0 {
		text += fmt.Sprintf("\n0 calls seen in effect %q: Prove cannot see a call that does not go through p.Client or p.Effect, and has not proven it", blind)
	}
	for _, what := range slices.Sorted(maps.Keys(others)) {
		text += fmt.Sprintf("\n%s was made in %d runs, and in none without faults: in those runs only Check has judged how often other things happened", what, others[what])
	}
	if missed > 0 {
		text += fmt.Sprintf("\n%d steps were not reached again, as in some run without faults: no fault happened there", missed)
	}
	return text
}

// story returns what the processes of a run did.
func (r *proofRun) story() string {
	var b strings.Builder
	fmt.Fprintf(&b, "queuetest: Prove: run %s: %s\n", r.fault.name(), cmp.Or(r.fault.words(), "without any fault"))
	for i, p := range r.processes {
		p.mu.Lock()
		fmt.Fprintf(&b, "\tworker %d:\n", i+1)
		for n, s := range p.tape {
			fmt.Fprintf(&b, "\t\t%3d %s%s\n", n+1, s.words, s.times())
		}
		if i == 0 && r.fault != nil && r.fault.kind == dying && !r.missed { // after its end each process counts as dead
			b.WriteString("\t\t    died\n")
		}
		if p.last != nil {
			fmt.Fprintf(&b, "\t\t    its handler's last error: %v\n", p.last)
		}
		p.mu.Unlock()
	}
	return b.String()
}
