// Command torture runs many producer and worker processes on a real server. It does to them, and to the server, what
// happens to machines. Then it counts: every accepted job has one end, its effects happened once, and everybody was told
// the truth. It does the same to River, and prints both. docs/work/torture.md has the results.
//
//	go run . [-duration 3m] [-seed n] [-systems onceq,river]
//
// Where to look: work.go says what the jobs are. producer.go, onceq.go, river.go and request.go are the processes, and
// provider.go is the outside world. arena.go and network.go have servers and proxies, faults.go what happens to them, and crowd.go the
// workers that come and go. check.go and check_requests.go are the checker.
package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// config is the configuration of a run.
type config struct {
	System     string
	Seed       uint64
	Duration   time.Duration
	Drain      time.Duration
	Workers    int
	Producers  int
	Requesters int
	Frail      int
	Crowd      int
	Clocks     bool
	Freeze     time.Duration // the longest freeze
	Broken     string
	Forms      []string // forms of jobs and requests
	Only       []string // only these faults; none means all
	Verbose    bool
	Keep       string // directory for the records; "" to throw them away
}

// These are the mistakes that the checker must find.
const (
	brokenToken  = "token"  // jobs are completed by their id, without a token
	brokenKey    = "key"    // the downstream key contains the token
	brokenTick   = "tick"   // a schedule goes back by a tick now and then, and the ledger too
	brokenLane   = "lane"   // jobs are let into their lanes out of turn, and beside the lane's lock
	brokenLimit  = "limit"  // jobs are let in whatever their limit says
	brokenEvent  = "event"  // an event that was emitted is emitted again, and the later one counts
	brokenAwait  = "await"  // jobs forget what they have heard
	brokenTell   = "tell"   // the end of a job does not call those that wait for it
	brokenFollow = "follow" // a job that waits goes on at the first call
)

func main() {
	if raw := os.Getenv(childEnv); raw != "" {
		childMain(raw)
		return
	}
	if inner := enterNamespace(); inner {
		return
	}
	var c config
	flag.Uint64Var(&c.Seed, "seed", rand.Uint64()%1_000_000, "of the faults")
	flag.DurationVar(&c.Duration, "duration", 3*time.Minute, "of the faults, for each system")
	flag.DurationVar(&c.Drain, "drain", 3*time.Minute, "how long the rest of the work may take after the faults")
	flag.IntVar(&c.Workers, "workers", 6, "worker processes")
	flag.IntVar(&c.Producers, "producers", 4, "producer processes")
	flag.IntVar(&c.Requesters, "requesters", 3, "processes that answer requests; onceq only")
	flag.IntVar(&c.Frail, "frail", 2, "worker processes that jobs end; onceq only")
	flag.IntVar(&c.Crowd, "crowd", 12, "further worker processes, which come and go together")
	flag.BoolVar(&c.Clocks, "clocks", true, "some processes have clocks that are a day wrong")
	flag.DurationVar(&c.Freeze, "freeze", 4*lease, "the longest time for which a process is frozen")
	flag.StringVar(&c.Broken, "broken", "", "break the library's use on purpose: token, key, lane, limit, event, await, tell, follow or tick; the checker must notice")
	flag.BoolVar(&c.Verbose, "v", false, "say each fault")
	flag.StringVar(&c.Keep, "keep", "", "keep what was recorded in this directory")
	systems := flag.String("systems", "onceq,river", "what to torture")
	chosenForms := flag.String("forms", strings.Join(slices.Concat(forms, oddForms, laneForms, limitForms, []string{formFlow, formJoin, formTick}, requestForms), ","), "of jobs and requests")
	only := flag.String("faults", "", "comma-separated beginnings of the faults' names; all by default")
	flag.Parse()
	c.Forms = strings.Split(*chosenForms, ",")
	if *only != "" {
		c.Only = strings.Split(*only, ",")
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fmt.Printf("seed %d, %s of faults for each, %d workers, %d producers, %d requesters\n", c.Seed, c.Duration, c.Workers, c.Producers, c.Requesters)
	var reports []*report
	bad, idle := false, false
	for _, c.System = range strings.Split(*systems, ",") {
		r, err := run(ctx, c)
		if err != nil {
			fmt.Fprintln(os.Stderr, "torture:", err)
			os.Exit(2)
		}
		reports = append(reports, r)
		if why := r.idle(); why != "" {
			fmt.Fprintf(os.Stderr, "torture: nothing is shown for %s: %s\n", c.System, why)
			idle = true
		}
		bad = bad || c.System == "onceq" && r.verdict.count() > 0
	}
	printReports(os.Stdout, c, reports)
	if idle || bad != (c.Broken != "") {
		os.Exit(1)
	}
}

func childMain(raw string) {
	if raw == `{"Role":"clock"}` {
		fmt.Println(time.Now().Unix())
		return
	}
	if err := runChild(raw); err != nil {
		os.Exit(1) // most have lost the database at their start and are started again
	}
}

const namespaceEnv = "ONCEQ_TORTURE_NAMESPACE"

// enterNamespace runs this program again in a mount namespace of its own. Its file systems of limited size disappear
// together with the namespace. Where this is not allowed, the program goes on without them.
func enterNamespace() bool {
	if os.Getenv(namespaceEnv) != "" || runtime.GOOS != "linux" || os.Geteuid() != 0 {
		return false
	}
	runtime.LockOSThread() // Pdeathsig follows the thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), namespaceEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = inNamespace()
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if err := cmd.Start(); err != nil {
		signal.Stop(signals)
		return false
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	if err := cmd.Wait(); err != nil {
		os.Exit(max(1, cmd.ProcessState.ExitCode()))
	}
	return true
}

// report is the result of a run.
type report struct {
	system, version, server string
	took                    time.Duration
	verdict                 *verdict
	faults, failed          map[string]int
	events                  map[string]int
	errors                  map[string]int // errors that producers met, by SQLSTATE
	resolved, fallen        int
	started                 int // processes, those of the crowd too
	crowd                   crowd
	redriven                int // jobs with a lane
	notes                   []string
}

// idle says why a run shows nothing even if it has no violations. It returns "" if the run does show something.
func (r *report) idle() string {
	answered, struck := 0, 0
	for _, n := range r.verdict.Requests {
		answered += n
	}
	for _, n := range r.faults {
		struck += n
	}
	switch {
	case r.verdict.Ends["completed"] == 0 && answered == 0:
		return "no job was completed and no request answered"
	case struck == 0:
		return "no fault could be done"
	}
	return ""
}

func run(ctx context.Context, c config) (r *report, err error) {
	began := time.Now()
	say := func(format string, args ...any) {
		if c.Verbose {
			fmt.Printf("%6.1fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
		}
	}
	sys, err := systemOf(c.System)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "onceq-torture-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Chmod(dir, 0o755); err != nil { // the server and PgBouncer may run as other users
		return nil, err
	}
	r = &report{system: c.System, version: versionOf(c.System), faults: map[string]int{}, failed: map[string]int{},
		events: map[string]int{}, errors: map[string]int{}}

	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	skewed := ""
	if c.Clocks {
		if skewed, err = buildSkewed(ctx, dir); err != nil {
			r.notes = append(r.notes, "no wrong clocks: "+err.Error())
		}
	}

	say("the program with wrong clocks is built")
	a, err := startArena(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer a.stop()
	r.server = fmt.Sprintf("%d.%d", a.primary.Version()/10000, a.primary.Version()%10000)
	if err := a.furnish(ctx, sys); err != nil {
		return nil, err
	}
	if err := breakGroups(ctx, a.server().URL(), c.Broken); err != nil {
		return nil, err
	}
	if err := a.follow(ctx); err != nil {
		return nil, err
	}

	// Start the processes. Each has a network of its own for faults to hit.
	provider, err := startSlot(place{child: child{Role: "provider", Slot: "provider", Dir: dir, Seed: c.Seed}, exe: exe})
	if err != nil {
		return nil, err
	}
	defer provider.stop(time.Second)
	address, err := awaitFile(ctx, filepath.Join(dir, "provider"))
	if err != nil {
		return nil, err
	}
	ch := &chaos{arena: a, freeze: c.Freeze, proxies: map[string]*network{}, say: say, counts: r.faults, failed: r.failed}
	ch.tables = []string{"onceq.jobs", "onceq.job_fences", "torture.ledger"}
	if c.System == "river" {
		ch.tables = []string{"river_job", "torture.ledger"}
	}
	if c.System == "onceq" {
		ch.setBack = setIDsBack
	}
	bouncerProxy, _, err := a.proxy("pgbouncer")
	if err != nil {
		return nil, err
	}
	if err := a.startBouncer(bouncerProxy.front.Addr().String()); err != nil {
		r.notes = append(r.notes, "no PgBouncer: "+err.Error())
	}
	stopAll := func(patience time.Duration) {
		var stopping sync.WaitGroup
		for _, s := range ch.slots {
			stopping.Go(func() { s.stop(patience) })
		}
		stopping.Wait()
	}
	defer func() { stopAll(0) }()
	placeOf := func(role string, i int) (place, error) {
		s := child{
			Role: role, Slot: fmt.Sprint(role, "-", i+1), System: c.System, Provider: address, Dir: dir, Seed: c.Seed,
			Began: began.Unix(), Forms: c.Forms, Verbose: c.Verbose, Broken: c.Broken, Timeouts: i == 2,
		}
		proxy, url, err := a.proxy(s.Slot)
		if err != nil {
			return place{}, err
		}
		s.URL, ch.proxies[s.Slot] = url, proxy
		if i == 1 && a.bouncer != nil { // faults of its network are faults of PgBouncer's
			s.URL, s.Pooled, ch.proxies[s.Slot] = a.bouncer.url, true, bouncerProxy
		}
		p := place{child: s, exe: exe}
		if skew := skewOf(i); skewed != "" && skew != 0 {
			p.exe, p.env = skewed, []string{fmt.Sprintf("%s=%.0f", skewEnv, skew.Seconds())}
		}
		return p, nil
	}
	start := func(role string, n int) error {
		for i := range n {
			p, err := placeOf(role, i)
			if err != nil {
				return err
			}
			s, err := startSlot(p)
			if err != nil {
				return err
			}
			ch.slots = append(ch.slots, s)
		}
		return nil
	}
	of := formsOf(&child{System: c.System, Forms: c.Forms})
	if len(of) > 0 || c.System == "onceq" && slices.Contains(c.Forms, formTick) {
		if err := start("worker", c.Workers); err != nil {
			return nil, err
		}
		for i := range c.Crowd {
			p, err := placeOf(roleCrowd, i)
			if err != nil {
				return nil, err
			}
			ch.crowd.places = append(ch.crowd.places, p)
		}
	}
	if len(of) > 0 {
		if err := start("producer", c.Producers); err != nil {
			return nil, err
		}
	}
	if slices.ContainsFunc(of, func(form string) bool { return slices.Contains(frailOnes, form) }) {
		if err := start(roleFrail, c.Frail); err != nil {
			return nil, err
		}
	}
	requests := c.System == "onceq" && len(chosen(requestForms, c.Forms)) > 0
	if requests {
		if err := start("requester", c.Requesters); err != nil {
			return nil, err
		}
	}

	say("processes and servers are there")
	// Cause the faults.
	faulty, end := context.WithTimeout(ctx, c.Duration)
	defer end()
	// Somebody attends to lanes and schedules, through a proxy that leads to the server after a failover too.
	attended, redriven := make(chan error, 1), 0
	attending, leave := context.WithCancel(ctx)
	defer leave()
	if c.System == "onceq" {
		_, url, err := a.proxy("attendant")
		if err != nil {
			return nil, err
		}
		people, err := (&child{URL: url, Slot: "attendant"}).pool(ctx)
		if err != nil {
			return nil, err
		}
		defer people.Close()
		go func() {
			var err error
			redriven, err = attend(attending, faulty, people)
			attended <- err
		}()
	} else {
		attended <- nil
	}

	var lanes sync.WaitGroup
	if kinds := chosen(processFaults, c.Only); len(kinds) > 0 {
		lanes.Go(func() { ch.processes(faulty, newLane(c.Seed, 1, kinds, 1200*time.Millisecond)) })
	}
	if kinds := chosen(serverFaults, c.Only); len(kinds) > 0 {
		lanes.Go(func() { ch.server(faulty, newLane(c.Seed, 2, kinds, 3*time.Second)) })
	}
	if kinds := chosen(crowdFaults, c.Only); len(kinds) > 0 && len(ch.crowd.places) > 0 {
		lanes.Go(func() { ch.churn(faulty, newLane(c.Seed, 3, kinds, 3*time.Second)) })
	}
	<-faulty.Done()
	end()
	lanes.Wait()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	say("the faults are over: %v; the rest of the work", r.faults)

	// Let the rest of the jobs finish.
	for _, s := range ch.slots {
		if s.Role != "worker" && s.Role != roleFrail {
			s.stop(10 * time.Second)
		}
	}
	pool, err := pgxpool.New(ctx, a.server().URL())
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	if err := awaitDone(ctx, c, sys, pool); err != nil {
		return nil, err
	}
	calls, err := readJournals[call](dir, "calls")
	if err != nil {
		return nil, err
	}
	if r.resolved, err = sys.settle(ctx, pool, calls); err != nil {
		return nil, err
	}
	if r.resolved > 0 { // the jobs run again
		if err := awaitDone(ctx, c, sys, pool); err != nil {
			return nil, err
		}
	}
	if requests {
		n, err := settleRequests(ctx, &child{Provider: address, Dir: dir}, pool, c.Drain)
		if err != nil {
			return nil, err
		}
		r.resolved += n
	}
	leave()
	if err := <-attended; err != nil {
		return nil, fmt.Errorf("attending to lanes and schedules: %w", err)
	}
	r.redriven = redriven
	say("the work is done")
	stopAll(10 * time.Second)
	h, err := collect(ctx, dir, sys, pool)
	if err != nil {
		return nil, err
	}
	r.crowd, h.Panics = ch.crowd, ch.crowd.panics
	r.started = r.crowd.started
	for _, s := range ch.slots {
		r.started += s.starts
		r.fallen += s.fallen
		for range s.panics {
			h.Panics = append(h.Panics, s.Slot)
		}
	}
	r.verdict = check(h)
	for _, e := range h.Events {
		r.events[e.Type]++
	}
	for _, o := range h.Ops {
		if _, state, ok := strings.Cut(o.Err, "(SQLSTATE "); ok {
			r.errors[state[:5]]++
		} else if o.Err != "" && o.Err != errNotOffered.Error() {
			r.errors["no answer"]++
		}
	}
	r.notes = append(r.notes, a.notes...)
	r.took = time.Since(began)
	if c.Keep != "" {
		return r, keep(h, dir, filepath.Join(c.Keep, fmt.Sprint(c.System, "-", c.Seed)))
	}
	return r, nil
}

// chosen returns the names that begin with one of only.
func chosen(all, only []string) []string {
	if len(only) == 0 {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(name string) bool {
		return !slices.ContainsFunc(only, func(o string) bool { return strings.HasPrefix(name, o) })
	})
}

func awaitFile(ctx context.Context, name string) (string, error) {
	for pause(ctx, 10*time.Millisecond) {
		if raw, err := os.ReadFile(name); err == nil {
			return string(raw), nil
		}
	}
	return "", ctx.Err()
}

// awaitDone waits until no job is left, but only for so long. What is left then is counted.
func awaitDone(ctx context.Context, c config, sys system, pool *pgxpool.Pool) error {
	until := time.Now().Add(c.Drain)
	for time.Now().Before(until) {
		n, err := sys.live(ctx, pool)
		if err == nil && n == 0 {
			return nil
		}
		if !pause(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
	}
	return nil
}

// collect gathers everything that was recorded.
func collect(ctx context.Context, dir string, sys system, pool *pgxpool.Pool) (h *history, err error) {
	h = &history{Noted: map[string]bool{}}
	if h.Ops, err = readJournals[op](dir, "ops-"); err != nil {
		return nil, err
	}
	if h.Calls, err = readJournals[call](dir, "calls"); err != nil {
		return nil, err
	}
	if h.Ends, err = sys.ends(ctx, pool); err != nil {
		return nil, err
	}
	if h.Events, err = readJournals[event](dir, "events-"); err != nil {
		return nil, err
	}
	if h.Doubts, h.Tables, err = sys.leftovers(ctx, pool); err != nil {
		return nil, err
	}
	noted, err := pgx.CollectRows(query(ctx, pool, `select op from torture.ops`), pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	for _, o := range noted {
		h.Noted[o] = true
	}
	if h.Trail, err = pgx.CollectRows(query(ctx, pool, `select what, job, key, work, token, op from torture.trail order by seq`),
		pgx.RowToStructByPos[step]); err != nil {
		return nil, err
	}
	h.Ledger, err = pgx.CollectRows(query(ctx, pool, `select work, form, job, token, nonce from torture.ledger order by seq`),
		pgx.RowToStructByPos[entry])
	if err != nil {
		return nil, err
	}
	if h.Lanes, err = pgx.CollectRows(query(ctx, pool, readLaneTrail), pgx.RowToStructByPos[laneStep]); err != nil {
		return nil, err
	}
	if _, ours := sys.(onceqSystem); ours {
		if err := h.collectFlows(ctx, pool); err != nil {
			return nil, err
		}
		if err := h.collectGroups(ctx, pool); err != nil {
			return nil, err
		}
		if h.Ticks, err = pgx.CollectRows(query(ctx, pool, readTicks), pgx.RowToStructByPos[tickRow]); err != nil {
			return nil, err
		}
		if h.Tended, err = pgx.CollectRows(query(ctx, pool, readTended), pgx.RowToStructByPos[tended]); err != nil {
			return nil, err
		}
		if h.Still, err = pgx.CollectRows(query(ctx, pool, `select name from onceq.schedules where paused_at is null`), pgx.RowTo[string]); err != nil {
			return nil, err
		}
	}
	if h.Requests, err = readJournals[request](dir, "requests-"); err != nil {
		return nil, err
	}
	h.Fences, err = pgx.CollectRows(query(ctx, pool, `select what, key, token, since, finished, result from torture.fence_trail order by seq`),
		pgx.RowToStructByPos[fenceStep])
	return h, err
}

// query leaves its error to the rows, as pgx does.
func query(ctx context.Context, pool *pgxpool.Pool, sql string) pgx.Rows {
	rows, _ := pool.Query(ctx, sql)
	return rows
}

// keep writes the records to where a person can look at them.
func keep(h *history, from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for name, all := range map[string]any{"trail": h.Trail, "ledger": h.Ledger, "ends": h.Ends, "calls": h.Calls, "ops": h.Ops, "emits": h.Emits, "heard": h.Heard,
		"fences": h.Fences, "groups": h.Groups, "joined": h.Joined, "requests": h.Requests, "ticks": h.Ticks, "tended": h.Tended} {
		if err := writeLines(filepath.Join(to, name+".jsonl"), all); err != nil {
			return err
		}
	}
	events, err := filepath.Glob(filepath.Join(from, "events-*.jsonl"))
	for _, name := range events {
		raw, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, filepath.Base(name)), raw, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return err
}

// sorted returns the keys of a map in order.
func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
