package queuetest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// EnvProve makes Prove repeat a single run and log everything that its processes did. Its value is the name of the run,
// which a failure prints.
const EnvProve = "ONCEQ_PROVE"

// Proof says which handler to prove, with which job, and what must be true afterwards. Its functions are called from
// several goroutines at once.
type Proof struct {
	// Setup creates the tables and rows that the handler needs. It is called once; every run begins with a copy of that
	// database. Default: only the queue. See SQL.
	Setup func(ctx context.Context, pool *pgxpool.Pool) error

	// Job makes the job, usually with the Kind's own method. Set Jobs instead to make several jobs, for a batch or to
	// check that one does not disturb another. A handler that takes one job at a time gets them one after the other.
	Job  func() onceq.Job
	Jobs func() []onceq.Job

	// Handler makes the handler as a process of the application would at its start. Everything that the handler uses
	// must come from p: its pool, its queue, its HTTP client, or p.Effect in a test double of anything else. Set Handlers
	// instead if Jobs are of several kinds, such as the members of a group and the job that waits for them.
	Handler  func(p *Process) onceq.Handler
	Handlers func(p *Process) []onceq.Handler

	// Check checks the outcome after a job is finished, whatever went wrong on the way. It fails through o, which works
	// with testify's assert and require. Default: each table contains the same as after a run without faults, except
	// what differs between such runs (times, ids of a sequence, random values).
	//
	// Some checks are always made: the job ends in the same state as without faults, each effect outside happened as
	// often as without faults, and the queue's own tables are consistent. A run may have an effect that no run without
	// faults has, such as a compensation or a fallback. Then only Check judges it.
	Check func(o *Outcome)

	// Also reports whether an outcome is right although it differs from that without faults, such as a dead job whose
	// money was given back. If it returns true, nothing else is checked. Default: no other outcome is right.
	Also func(o *Outcome) bool

	// Varies names tables and columns that may differ from run to run, if there is no Check: "attempts_log" or
	// "orders.last_error". Members of JSON are named by their path: "orders.details.seen".
	Varies []string

	// Provider answers HTTP calls, once for each effect. All runs share it. Default: 200 with an id; a GET with a key of
	// onceq in its address gets the answer of the effect with that key, or 404 if there was none, so that it serves
	// onceq.Ask. A status of 400 or above means that there was no effect.
	Provider http.Handler

	// NewProvider makes the Provider of one run, for one that remembers what it was told, such as the charges that a GET
	// lists. It gets one call at a time. Set it instead of Provider.
	NewProvider func() http.Handler

	// NoDedup is for a provider that does not recognise a repeated idempotency key: each call is an effect of its own.
	NoDedup bool

	// Safe reports that a request changes nothing that matters: a search by POST, a log-in. GET, HEAD, OPTIONS and the
	// like are always safe, and so is fetching an OAuth token. PUT and DELETE may be repeated with the same content.
	Safe func(r *http.Request) bool

	// Key returns the key by which the provider recognises a repeated request, or "". Default: the header
	// Idempotency-Key or one of its other usual names, or a key of onceq anywhere in the request.
	Key func(r *http.Request) string

	// Resolve decides about an effect of a job that is held for a person. applied reports whether any call made in the
	// effect took place. Default: if applied, onceq.Applied with the result of the run without faults; otherwise
	// onceq.NeverApplied().
	Resolve func(job onceq.JobInfo, effect string, applied bool) onceq.Resolution

	only  func(*fault) bool // which faults to try, for this package's tests; nil for all, or with -short for a sample
	short bool              // as with -short
}

// SQL returns a function for Setup, or for Proof.Setup, that runs statements.
func SQL(statements string) func(context.Context, *pgxpool.Pool) error {
	return func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := pool.Exec(ctx, statements, pgx.QueryExecModeSimpleProtocol)
		return err
	}
}

// Outcome is what a Check looks at after the job is finished.
type Outcome struct {
	Pool    *pgxpool.Pool
	Queue   *onceq.Queue
	JobIDs  []int64
	Effects []Effect // effects outside the database, in order
	Fault   string   // what went wrong in this run, in words; "" for nothing

	mu     sync.Mutex
	errors []string
}

// Errorf reports that something is wrong.
func (o *Outcome) Errorf(format string, args ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.errors = append(o.errors, strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// FailNow ends the check.
func (o *Outcome) FailNow() { runtime.Goexit() }

// Count returns the number that a query selects.
func (o *Outcome) Count(query string, args ...any) int {
	var n int
	if err := o.Pool.QueryRow(context.Background(), query, args...).Scan(&n); err != nil {
		o.Errorf("%s: %v", short(query), err)
		o.FailNow()
	}
	return n
}

// Prove runs a handler under every fault that can occur between two of its steps. Each run has a fresh database and
// goes on until its job is finished. Prove fails the test if an outcome is wrong.
//
// A run without faults finds the steps: each statement and each commit on any connection of the process, including
// onceq's own, and each call to the outside. A transaction of onceq's own that is sent as a whole is one step. Then
// there is one run for each of these faults:
//
//   - The process dies before a step, and after it. Its connections are cut, its contexts end, and what is left of it
//     reaches nothing any more. "After a step" means that the server has done it and the answer is lost.
//   - The connection is lost before and after each step of the handler, or a call gets no answer. The process lives on.
//   - A call is answered with 500 although it was done, or with 503 and not done.
//   - The worker is shut down after a step, as in a deploy: the handler's context ends, and the connections stay.
//   - The process freezes before a step of the handler and its lease expires. A second process finishes the job, and then
//     the first one wakes up and goes on.
//   - Two processes reach the same step at the same time.
//   - The job is delivered twice in a row: the lease of the first run is lost when it begins.
//
// The run without faults must succeed, or end with a job that is dead because of onceq.Fatal. Each process has one job
// at a time, or one batch.
//
// With -short Prove tries a sample: a few places for each kind of fault, at the handler's own steps. The log says so.
//
// A failure says in words where the fault was and how to repeat that run. It names the mistake if it is a known one.
func Prove(t testing.TB, proof Proof) {
	t.Helper()
	report, err := prove(t, proof, os.Getenv(EnvProve))
	if err != nil {
		t.Fatalf("queuetest: Prove: %v", err)
		return
	}
	for _, text := range report.failures() {
		t.Errorf("queuetest: Prove: %s", text)
	}
	t.Logf("queuetest: Prove: %s", report.summary())
}

type faultKind int

const (
	dying    faultKind = iota // the process dies
	cutting                   // a connection is lost, or a call gets no answer
	freezing                  // the process stands still until another one has done the job
	meeting                   // two processes go on from the step at the same time
	twice                     // two runs in a row
	failing                   // a call is answered with 500 although it was done
	refusing                  // a call is answered with 503 and not done
	stopping                  // the worker is shut down; the process lives on
)

var faultNames = [...]string{"die", "cut", "freeze", "meet", "twice", "fail", "refuse", "stop"}

// fault is what goes wrong in one run. A nil step means no fault.
type fault struct {
	kind  faultKind
	at    int // index of step on the tape
	step  *step
	after bool
	apart bool // the second delivery comes in another second of the clock
	later bool // not a fault: earlier runs of the job failed and lost their leases, and sequences give other ids than usual
	once  bool // with later: one run failed and one lost its lease, not as many as may
}

// name returns the fault's name for EnvProve.
func (f *fault) name() string {
	switch {
	case f == nil:
		return "none"
	case f.later:
		return laterRun
	case f.step == nil:
		return faultNames[f.kind]
	case f.kind != dying && f.kind != cutting:
		return fmt.Sprintf("%s-%d", faultNames[f.kind], f.at)
	case f.after:
		return fmt.Sprintf("%s-%d-after", faultNames[f.kind], f.at)
	}
	return fmt.Sprintf("%s-%d-before", faultNames[f.kind], f.at)
}

// laterRun is the name of the run whose job has failed, and lost workers, before it begins.
const laterRun = "later"

// words says what goes wrong.
func (f *fault) words() string {
	switch {
	case f == nil:
		return ""
	case f.later:
		return "its job had failed and lost workers before it began"
	}
	place := ""
	if f.step != nil {
		place = f.step.before()
		if f.after {
			place = f.step.after()
		}
	}
	switch {
	case f.kind == dying:
		return "died " + place
	case f.kind == failing:
		return "got 500 for " + f.step.words + f.step.times() + ", which had been done"
	case f.kind == refusing:
		return "got 503 for " + f.step.words + f.step.times() + ", which was not done"
	case f.kind == stopping && f.step.role == roleClaim:
		return "its worker was shut down when the handler began" + f.step.times()
	case f.kind == stopping:
		return "its worker was shut down after " + f.step.words + f.step.times()
	case f.kind == cutting && f.step.role == roleCall && f.after:
		return "lost the answer to " + f.step.words + f.step.times()
	case f.kind == cutting:
		return "lost its connection " + place
	case f.kind == freezing:
		return "froze " + place + " until its lease had run out and a second worker had taken the job; then went on"
	case f.kind == meeting:
		return "two workers at the same time, both " + place
	}
	return "ran twice in a row: the lease was lost when the first run began"
}

// survived reports whether the process lives on and runs the job again.
func (f *fault) survived() bool {
	return f != nil && (f.kind == cutting || f.kind == failing || f.kind == refusing)
}

// faults lists the faults to try, from the tape of a run without faults.
func faults(tape []*step, attempts bool) []*fault {
	all := []*fault{{kind: twice}}
	known := make(map[string]bool) // calls whose keys are already compared across two seconds of the clock
	for i, s := range tape {
		for kind := dying; kind <= cutting; kind++ {
			if kind == cutting && (!s.leased || !attempts) {
				continue
			}
			if s.first {
				all = append(all, &fault{kind: kind, at: i + 1, step: s})
			}
			f := &fault{kind: kind, at: i + 1, step: s, after: true}
			if f.apart = kind == cutting && s.role == roleCall && !known[s.text]; f.apart {
				known[s.text] = true
			}
			all = append(all, f)
		}
		if s.http && s.leased && attempts {
			all = append(all, &fault{kind: failing, at: i + 1, step: s, after: true}, &fault{kind: refusing, at: i + 1, step: s})
		}
		begins := s.role == roleClaim && i+1 < len(tape) && tape[i+1].leased
		if begins || s.leased && s.role != roleClaim && s.next == "" && (s.inTx || !s.ends()) {
			all = append(all, &fault{kind: stopping, at: i + 1, step: s, after: true})
		}
		if s.leased && s.first {
			all = append(all, &fault{kind: freezing, at: i + 1, step: s}, &fault{kind: meeting, at: i + 1, step: s})
		}
	}
	return all
}

// slots bounds how many runs of all proofs of the test process go on at once. They mostly wait, and each has about seven sessions on the
// server.
var slots = make(chan struct{}, min(8, 4*runtime.GOMAXPROCS(0)))

// prover is one call of Prove.
type prover struct {
	Proof
	t        testing.TB
	server   *server
	template string
	calm     *proofRun   // the run without faults
	calms    []*proofRun // calm, a second one at the end, and later
	later    *proofRun   // the run of that name, if it ended like the others; it must do no less than they
	before   contents    // after Setup
	tables   map[string]*standard
	width    int // how many jobs the handler takes at a time
}

// report is the result of a proof.
type report struct {
	test   string
	steps  []*step
	runs   []*proofRun // in the order of the faults; the first is the one without a fault
	keys   string      // what is wrong with the job's key; "" for nothing
	calm   *proofRun
	places int // how many faults there are, of which a sample was tried; 0 if all were
	took   time.Duration
	replay bool
}

func prove(t testing.TB, proof Proof, only string) (*report, error) {
	t.Helper()
	switch {
	case (proof.Handler == nil) == (proof.Handlers == nil):
		return nil, errors.New("Proof needs one of Handler and Handlers")
	case (proof.Job == nil) == (proof.Jobs == nil):
		return nil, errors.New("Proof needs one of Job and Jobs")
	case proof.Provider != nil && proof.NewProvider != nil:
		return nil, errors.New("Proof needs one of Provider and NewProvider")
	}
	if job := proof.Job; job != nil {
		proof.Jobs = func() []onceq.Job { return []onceq.Job{job()} }
	}
	if handler := proof.Handler; handler != nil {
		proof.Handlers = func(p *Process) []onceq.Handler { return []onceq.Handler{handler(p)} }
	}
	first := proof.Jobs()
	if len(first) == 0 {
		return nil, errors.New("Proof.Jobs returned no job")
	}
	began := time.Now()
	v := &prover{Proof: proof, t: t}
	var err error
	if v.server, err = processServer(); err != nil {
		return nil, err
	}
	drop, err := v.prepare(t.Context())
	if err != nil {
		return nil, err
	}
	defer drop()
	if v.width = max(1, len(first)); v.width > 1 {
		v.width = max(1, v.run(nil).most) // a run that finds out
	}
	calm := v.run(nil)
	if err := calm.wrong(); err != nil {
		return nil, err
	}
	for _, name := range v.Varies {
		if !strings.HasPrefix(name, "queue of ") && !slices.ContainsFunc(slices.Collect(maps.Values(calm.contents)), func(t *table) bool {
			return t.named([]string{name}, "") || strings.HasPrefix(name, t.short+".") || strings.HasPrefix(name, strings.TrimPrefix(t.name, "table ")+".")
		}) {
			return nil, fmt.Errorf("Proof.Varies: the table of %q does not exist", name)
		}
	}
	v.calm = calm
	rep := &report{test: t.Name(), runs: []*proofRun{calm}, calm: calm, replay: only != ""}
	rep.steps = v.calm.processes[0].tape
	todo := faults(rep.steps, !slices.ContainsFunc(first, func(j onceq.Job) bool { return j.MaxAttempts == 1 }))
	switch {
	case proof.only != nil:
		todo = slices.DeleteFunc(todo, func(f *fault) bool { return !proof.only(f) })
	case (proof.short || testing.Short()) && only == "":
		rep.places = len(todo)
		todo = sample(todo)
	}
	if only != "" {
		todo = slices.DeleteFunc(todo, func(f *fault) bool { return f.name() != only })
		if len(todo) == 0 && only != "none" && only != laterRun {
			return nil, fmt.Errorf("%s=%s is not a run of this proof", EnvProve, only)
		}
	}
	runs := make([]*proofRun, len(todo))
	next := make(chan int)
	var workers sync.WaitGroup
	for range cap(slots) {
		workers.Go(func() {
			for i := range next {
				runs[i] = v.run(todo[i])
			}
		})
	}
	for i := range todo {
		next <- i
	}
	close(next)
	workers.Wait()
	rep.runs = append(rep.runs, runs...)
	// Values that differ between runs without faults do not count. The last such run comes at the end and in another
	// second, so that elapsed times differ as well.
	anotherSecond(began)
	if err := v.again(); err != nil {
		return nil, err
	}
	if v.later != nil {
		rep.runs = append(rep.runs, v.later)
	}
	for _, r := range slices.Backward(rep.runs[1:]) { // the later run first: it explains others
		r.judge()
	}
	if slices.ContainsFunc(first, func(j onceq.Job) bool { return j.Key != "" }) {
		rep.keys = mistakeOfJobs(first, proof.Jobs())
	}
	if rep.replay {
		for _, r := range rep.runs {
			t.Logf("%s", r.story())
		}
	}
	rep.took = time.Since(began)
	return rep, nil
}

// wrong returns what is wrong with a run without faults.
func (r *proofRun) wrong() error {
	if r.err != nil {
		return fmt.Errorf("without any fault: %w", r.err)
	}
	if len(r.failed) == 0 {
		return nil
	}
	text := strings.Join(r.failed, "\n")
	if r.mistake != "" {
		text += "\nmistake: " + r.mistake
	}
	return fmt.Errorf("without any fault: %s", text)
}

// again makes the other runs without faults. One repeats the first. The other has other ids, and jobs at their last attempt that
// have lost as many workers as the default of Kind.MaxLost allows: a handler that leaves work out after some attempts does so then,
// whatever the number. If jobs end in another way then, the run is made again with jobs that have failed once and lost a worker once.
func (v *prover) again() error {
	second := v.run(nil)
	if err := second.wrong(); err != nil {
		return fmt.Errorf("a second time, %w", err)
	}
	v.calms = []*proofRun{v.calm, second}
	for _, once := range []bool{false, true} {
		r := v.run(&fault{later: true, once: once})
		if r.err == nil && len(r.failed) == 0 && slices.Equal(r.states, v.calm.states) {
			v.calms, v.later = append(v.calms, r), r
			break
		}
	}
	v.tables = make(map[string]*standard)
	all := make([]contents, len(v.calms))
	for i, r := range v.calms {
		all[i] = r.contents
	}
	for _, c := range all {
		for name := range c {
			v.tables[name] = compare(name, v.Varies, all)
		}
	}
	return nil
}

// anotherSecond waits until the clock is in another second than at the given time, so that values derived from the time
// differ.
func anotherSecond(than time.Time) {
	time.Sleep(time.Until(than.Truncate(time.Second).Add(time.Second)))
}

// prepare makes the database that every run gets a copy of.
func (v *prover) prepare(ctx context.Context) (drop func(), err error) {
	name, err := v.server.createDatabase(ctx, "onceq", false, nil)
	if err != nil {
		return nil, err
	}
	defer func() {
		if v.template == "" { // also if Setup ended its goroutine
			v.drop(name)
		}
	}()
	err = func() error {
		pool, err := pgxpool.New(ctx, v.server.DatabaseURL(name))
		if err != nil {
			return err
		}
		defer pool.Close()
		if v.Setup != nil {
			if err := v.Setup(ctx, pool); err != nil {
				return err
			}
		}
		if v.Check == nil {
			if v.before, err = read(ctx, pool, nil); err != nil {
				return err
			}
		}
		_, err = pool.Exec(ctx, `select setval('onceq.ids', greatest(last_value, $1)) from onceq.ids`, firstID)
		return err
	}()
	if err == nil {
		// A copy waits until its source has no sessions. From here on it has none.
		err = v.server.exec(ctx, "alter database "+name+" with allow_connections false")
	}
	if err != nil {
		return nil, fmt.Errorf("setting up: %w", err)
	}
	v.template = name
	return func() { v.drop(name) }, nil
}

// firstID is below the ids of all jobs: large enough that no other number in an address looks like a job's id.
const firstID = 7_700_000

func (v *prover) drop(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := v.server.dropDatabase(ctx, name); err != nil {
		v.t.Errorf("queuetest: %v", err)
	}
}

// proofRun is one run: its database, its processes, one after the other or at once, and the outside world.
type proofRun struct {
	v         *prover
	fault     *fault
	db        *DB
	ids       []int64
	provider  *provider
	processes []*Process
	mu        sync.Mutex
	passed    time.Duration // how far the database's clock was advanced
	most      int           // the most jobs that the handler got at once

	err      error             // why the run could not be made
	missed   bool              // the step of the fault was not reached again
	failed   []string          // what is wrong
	mistake  string            // the mistake that explains it; "" if unknown
	also     bool              // Proof.Also accepted the outcome
	strange  []string          // effects that no run without faults has
	asked    map[effect]string // what was wrong with an answer of an Ask
	contents contents          // at the end, if there is no Check
	earlier  contents          // after one run of the job and before the next
	states   []onceq.State
	results  map[effect]json.RawMessage // of the jobs' effects, by the job's number
}

// keep records the contents of the tables between two runs of the job.
func (r *proofRun) keep(ctx context.Context) {
	if r.v.Check == nil {
		r.earlier, _ = read(ctx, r.db.Pool, r.ids) // tables that a transaction keeps locked are left out
	}
}

func (r *proofRun) passedTime() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.passed
}

const (
	deliveriesLimit = 100             // of one process, for each job; after that it counts as endless
	patience        = 2 * time.Minute // for a process to reach its fault, or its end
)

func (v *prover) run(f *fault) *proofRun {
	slots <- struct{}{}
	defer func() { <-slots }()
	r := &proofRun{v: v, fault: f, asked: make(map[effect]string)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := errEnded
		defer func() { r.err = cmp.Or(err, r.err) }()
		r.provider = v.provider()
		err = r.all(context.Background())
	}()
	<-done
	return r
}

// quickPlaces is how many faults of each kind a sample has.
const quickPlaces = 3

// sample chooses from all faults: of each kind the first, the last, and what lies evenly between them. The handler's own
// steps show most mistakes, so they are taken where a kind has some.
func sample(all []*fault) (some []*fault) {
	kind := func(f *fault) string { return fmt.Sprint(faultNames[f.kind], f.after) }
	groups, own := make(map[string][]*fault), make(map[string][]*fault)
	for _, f := range all {
		groups[kind(f)] = append(groups[kind(f)], f)
		if f.step == nil || f.step.own() {
			own[kind(f)] = append(own[kind(f)], f)
		}
	}
	maps.Copy(groups, own)
	for _, f := range all {
		group := groups[kind(f)]
		at, n := slices.Index(group, f), min(quickPlaces, len(group))
		for i := range n {
			if at == i*(len(group)-1)/max(1, n-1) {
				some = append(some, f)
			}
		}
	}
	return some
}

// all makes a run from its database to its checks.
func (r *proofRun) all(ctx context.Context) error {
	name, err := r.v.server.copyDatabase(ctx, r.v.template)
	if err != nil {
		return err
	}
	defer r.v.drop(name)
	if err := r.open(ctx, r.v.server.DatabaseURL(name)); err != nil {
		return err
	}
	defer r.close()
	if err := r.execute(ctx); err != nil {
		return err
	}
	r.check(ctx)
	return nil
}

// skip makes every sequence skip values.
const skip = `
do $$
declare
  s record;
begin
  for s in select oid::regclass as id from pg_class where relkind = 'S' loop -- information_schema.sequences has none of identity columns
    begin
      for i in 1 .. 7 loop
        perform nextval(s.id);
      end loop;
    exception when sequence_generator_limit_exceeded then null;
    end;
  end loop;
end
$$`

func (r *proofRun) open(ctx context.Context, url string) error {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return err
	}
	config.MaxConns = 4
	config.ConnConfig.RuntimeParams["application_name"] = "prove"
	config.ConnConfig.RuntimeParams["lock_timeout"] = "10s" // Prove's own mistakes must not hang
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	q, err := onceq.New(pool, nil)
	if err != nil {
		pool.Close()
		return err
	}
	r.db = &DB{Pool: pool, Queue: q, URL: url, Schema: "onceq", t: r.v.t}
	ready := false
	defer func() {
		if !ready {
			pool.Close()
		}
	}()
	later := r.fault != nil && r.fault.later
	if later {
		if _, err := pool.Exec(ctx, skip); err != nil {
			return fmt.Errorf("skipping ids: %w", err)
		}
	}
	results, err := q.EnqueueMany(ctx, pool, r.v.Jobs())
	if err != nil {
		return fmt.Errorf("enqueueing: %w", err)
	}
	for _, res := range results {
		r.ids = append(r.ids, res.ID)
	}
	if err := r.park(ctx); err != nil {
		return err
	}
	ready = true
	if later {
		attempts, lost := `max_attempts - 1`, onceq.DefaultMaxLost-1
		if r.fault.once {
			attempts, lost = `(max_attempts > 1)::int`, 1
		}
		r.db.exec(`update onceq.jobs set attempts = `+attempts+`, lost = $2 where id = any ($1)`, r.ids, lost)
	}
	return nil
}

// close ends what is left of the run. A process whose handler does not return when its context ends keeps its pool.
func (r *proofRun) close() {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for _, p := range r.processes {
			p.end()
			p.release()
			p.Pool.Close()
			p.die() // for a goroutine that the handler has left behind
		}
		r.db.Pool.Close()
	}()
	select {
	case <-closed:
	case <-time.After(patience):
		r.v.t.Errorf("queuetest: Prove: connections of a process were never given back (%s)", r.fault.words())
	}
}

// start lets a process work until the jobs are finished, or until the delivery with its fault is over.
func (r *proofRun) start(f *fault) (*Process, error) {
	p, err := r.process(f)
	if err != nil {
		return nil, err
	}
	if f != nil && f.kind == twice {
		p.stolen = make(map[int64]bool)
	}
	go func() {
		defer close(p.done)
		err := errEnded
		defer func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if err != nil && !p.dead {
				p.last = err
			}
		}()
		err = r.work(p)
	}()
	return p, nil
}

var errEnded = errors.New("a function of the Proof ended its goroutine, as FailNow does; let it panic instead")

// work runs the handler, with as many jobs at a time as it takes at once. A worker with more to do would claim and run
// the next jobs while it writes the last completions, in an order that changes from run to run, so steps could not be
// identified.
func (r *proofRun) work(p *Process) error {
	handlers := slices.Clone(r.v.Handlers(p))
	for i, h := range handlers {
		handlers[i] = h.Wrap(func(ctx context.Context, leases []*onceq.Lease, next func(context.Context) error) error {
			r.mu.Lock()
			r.most = max(r.most, len(leases))
			r.mu.Unlock()
			p.begins(ctx)
			return next(ctx)
		})
	}
	jobs := r.v.Jobs()
	queues := make(map[string]onceq.QueueConfig)
	for _, j := range jobs {
		queues[cmp.Or(j.Queue, onceq.DefaultQueue)] = onceq.QueueConfig{Concurrency: 1}
	}
	w, err := onceq.NewWorker(p.Queue, onceq.WorkerConfig{Queues: queues, Also: slices.Collect(maps.Keys(queues)), ShutdownTimeout: -1}, handlers...)
	if err != nil {
		return err
	}
	limit := deliveriesLimit * len(jobs)
	for range limit {
		live, err := r.wait(p.ctx)
		if err != nil || live == 0 {
			return err
		}
		if err := w.Drain(p.ctx, min(live, r.v.width)); err != nil && p.ctx.Err() == nil {
			return err
		}
		select {
		case <-p.struck:
			if p.isDead() || !r.fault.survived() {
				return nil
			}
			if r.earlier == nil {
				r.keep(p.ctx)
			}
			if r.fault.apart {
				anotherSecond(time.Now())
			}
		default:
		}
		if p.robbed() == len(r.ids) || r.hopeless() {
			return nil
		}
	}
	if job, _, _ := p.lease(); job == 0 {
		return fmt.Errorf("the handler got no job: is it for the kind %q, in the queue %q?", jobs[0].Kind, cmp.Or(jobs[0].Queue, onceq.DefaultQueue))
	}
	last := p.lastError()
	if last == nil {
		last = errors.New("no error")
	}
	return fmt.Errorf("not finished after %d deliveries; the last one ended with: %w. Only the queue's time passes between them: a lock of the handler's own that expires at some time does not expire", limit, last)
}

// hopeless reports that every further attempt will end like the last one.
func (r *proofRun) hopeless() bool {
	return r.provider.refuses() || slices.ContainsFunc(r.processes, func(p *Process) bool { return errors.Is(p.lastError(), onceq.ErrNameUsed) })
}

// withMembers has the jobs of a run and those that they wait for.
const withMembers = `
with recursive ours (id) as (
  select unnest($1::bigint[])
  union
  select m.job_id from ours join onceq.job_members m on m.group_id = ours.id
)`

// parked is how much later a job is due that nobody waits for. Nobody runs it, wherever it comes from and whatever else
// runs at that time.
const parked = `interval '8760000 hours'`

// park puts all jobs but the proof's own off, those that are there and those that will come.
func (r *proofRun) park(ctx context.Context) error {
	ids := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(r.ids)), ","), "[]")
	_, err := r.db.Pool.Exec(ctx, `
		create function onceq.prove_park() returns trigger language plpgsql as $$
		begin
		  new.run_at := new.run_at + `+parked+`;
		  return new;
		end $$;
		create trigger prove_park before insert on onceq.jobs for each row when (new.id <> all ('{`+ids+`}')) execute function onceq.prove_park();
		update onceq.jobs set run_at = run_at + `+parked+` where id <> all ('{`+ids+`}')`, pgx.QueryExecModeSimpleProtocol)
	return err
}

// unpark makes jobs due again: those that the proof's own jobs wait for, and those that may have their place in a lane.
const unpark = withMembers + `
update onceq.jobs set run_at = run_at - ` + parked + `
 where run_at > statement_timestamp() + ` + parked + ` / 2
   and (id in (select id from ours)
        or lane is not null and exists (select from onceq.job_waits w where w.id in (select id from ours))
           and not exists (select from onceq.jobs j where j.id in (select id from ours)))`

// wait advances the database's clock until a job is due and its lease, if any, has expired. It returns how many jobs
// are not finished, with those that they wait for. It resolves held effects.
func (r *proofRun) wait(ctx context.Context) (live int, err error) {
	for range deliveriesLimit {
		var held []int64
		var due int64
		if _, err := r.db.Pool.Exec(ctx, unpark, r.ids); err != nil {
			return 0, err
		}
		err := r.db.Pool.QueryRow(ctx, withMembers+`
			select (select count(*) from (select id from onceq.jobs union all select id from onceq.job_waits) j where id in (select id from ours)),
			       array(select id from onceq.job_history where id in (select id from ours) and state = 8),
			       coalesce(extract(epoch from coalesce(
			          (select min(case when leased_until > statement_timestamp() then leased_until else run_at end) from onceq.jobs where id in (select id from ours)),
			          (select greatest(min(w.run_at), max(p.until)) -- failed, and left its lane; or its limit is paused
			             from onceq.job_waits w left join onceq.pauses p on p.what = 'limit' and w.lane = '/' || p.name
			            where w.id in (select id from ours) and not starts_with(w.lane, E'\x1f')))
			        - statement_timestamp()) * 1e6, 0)::bigint`, r.ids).Scan(&live, &held, &due)
		if err != nil {
			return 0, err
		}
		if len(held) > 0 {
			resolved, err := r.resolve(ctx, held[0])
			if err != nil {
				return 0, err
			}
			if resolved {
				continue
			}
		}
		if due > 0 {
			r.advance(time.Duration(due)*time.Microsecond + time.Millisecond)
		}
		return live, nil
	}
	return 0, errors.New("the job is held again and again")
}

func (r *proofRun) advance(d time.Duration) {
	r.db.Advance(d)
	r.mu.Lock()
	r.passed += d
	r.mu.Unlock()
}

// resolve plays the person who looks at the provider's books.
func (r *proofRun) resolve(ctx context.Context, id int64) (bool, error) {
	job, err := r.db.Queue.Get(ctx, r.db.Pool, id)
	if err != nil {
		return false, err
	}
	effects, err := onceqops.New(r.db.Queue).Effects(ctx, r.db.Pool, id)
	if err != nil {
		return false, err
	}
	for _, e := range effects {
		if e.State != "held" {
			continue
		}
		applied := r.provider.applied(effect{strconv.FormatInt(id, 10), e.Name})
		resolution := onceq.NeverApplied()
		switch {
		case r.v.Resolve != nil:
			resolution = r.v.Resolve(job, e.Name, applied)
		case applied:
			resolution = onceq.Applied(nil)
			if r.v.calm != nil {
				resolution = onceq.Applied(r.v.calm.results[effect{strconv.Itoa(slices.Index(r.ids, id)), e.Name}])
			}
		}
		if err := onceqops.New(r.db.Queue).Resolve(ctx, r.db.Pool, id, e.Name, resolution); err != nil {
			return false, err
		}
		return true, nil
	}
	return false, nil
}

func (v *provider) applied(once effect) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.ContainsFunc(v.calls, func(c call) bool { return c.once == once && c.counted })
}

var errPatience = fmt.Errorf("nothing happened for %s", patience)

// arrives waits for one of two events; the second may be nil.
func arrives(one, other <-chan struct{}) error {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-one:
		return nil
	case <-other:
		return nil
	case <-timer.C:
		return errPatience
	}
}

// execute causes the fault and sees the jobs to their end.
func (r *proofRun) execute(ctx context.Context) (err error) {
	defer func() {
		// Before anything is counted, every process is thawed and has ended.
		for _, p := range r.processes {
			p.melt()
		}
		for _, p := range r.processes {
			if waited := arrives(p.done, nil); err == nil && waited != nil {
				err = fmt.Errorf("a worker did not end: %w", waited)
			}
		}
		for _, p := range r.processes {
			if p.mu.Lock(); err == nil && p.fault != nil && p.fault.step != nil && p == r.processes[0] {
				r.missed = true
			}
			p.mu.Unlock()
		}
	}()
	a, err := r.start(r.fault)
	if err != nil {
		return err
	}
	if err := arrives(a.struck, a.done); err != nil {
		return err
	}
	switch f := r.fault; {
	case f == nil || f.later || f.survived() || f.kind == twice || f.kind == stopping:
		if err := arrives(a.done, nil); err != nil {
			return err
		}
	case f.kind == dying:
		if err := r.bury(ctx, a, ""); err != nil {
			return err
		}
	default:
		if err := r.overtake(ctx, a); err != nil {
			return err
		}
	}
	if f := r.fault; f != nil && !f.later && !f.survived() {
		if r.earlier == nil && (f.kind == dying || f.kind == twice || f.kind == stopping) {
			r.keep(ctx)
		}
		b, err := r.start(nil)
		if err != nil {
			return err
		}
		if err := arrives(b.done, nil); err != nil {
			return err
		}
	}
	live, err := r.wait(ctx)
	if err == nil && live > 0 && !r.hopeless() {
		err = fmt.Errorf("the job was not finished: %w", r.processes[len(r.processes)-1].lastError())
	}
	return err
}

// melt thaws a frozen process.
func (p *Process) melt() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.thaw:
	default:
		close(p.thaw)
	}
}

// bury waits until the server has noticed that a process is gone.
func (r *proofRun) bury(ctx context.Context, p *Process, where string) error {
	_, err := r.db.Pool.Exec(ctx, `select pg_terminate_backend(pid, 10000) from pg_stat_activity
		where datname = current_database() and application_name = $1`+where, p.name)
	return err
}

// overtake lets a second process run the job while the first is frozen.
func (r *proofRun) overtake(ctx context.Context, a *Process) error {
	var free, live int
	err := r.db.Pool.QueryRow(ctx, withMembers+`
		select (select count(*) from (select from onceq.jobs where id in (select id from ours) for update skip locked) f),
		       (select count(*) from onceq.jobs where id in (select id from ours))`, r.ids).Scan(&free, &live)
	if err != nil {
		return err
	}
	if free < live {
		// Its transaction has locked the job's row: no other worker gets the job.
		if r.fault.kind == meeting {
			a.melt()
			return arrives(a.done, nil)
		}
		// The server ends the idle transaction some time after the worker's lease
		// (idle_in_transaction_session_timeout).
		if err := r.bury(ctx, a, ` and state like 'idle in transaction%'`); err != nil {
			return err
		}
	}
	if _, err := r.wait(ctx); err != nil { // its lease expires
		return err
	}
	r.advance(time.Millisecond) // it was frozen for a time, even if the lease had expired already
	var f *fault
	if r.fault.kind == meeting {
		f = r.fault
	}
	b, err := r.start(f)
	if err != nil {
		return err
	}
	if err := r.stuck(ctx, a, b); err != nil {
		return err
	}
	if r.fault.kind == freezing {
		r.keep(ctx)
	}
	a.melt()
	b.melt()
	if err := arrives(a.done, nil); err != nil {
		return err
	}
	return arrives(b.done, nil)
}

// stuck waits until b has reached its end or its fault, or waits for a lock that a has.
func (r *proofRun) stuck(ctx context.Context, a, b *Process) error {
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for began := time.Now(); time.Since(began) < patience; {
		select {
		case <-b.done:
			return nil
		case <-b.struck:
			return nil
		case <-look.C:
		}
		var blocked bool
		err := r.db.Pool.QueryRow(ctx, `
			select exists (
			  select from pg_stat_activity b, unnest(pg_blocking_pids(b.pid)) as blocking
			    join pg_stat_activity a on a.pid = blocking
			   where b.datname = current_database() and a.datname = current_database()
			     and b.application_name = $1 and a.application_name = $2)`, b.name, a.name).Scan(&blocked)
		if err != nil || blocked {
			return err
		}
	}
	return errPatience
}
