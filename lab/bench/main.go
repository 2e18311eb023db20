// Command bench measures onceq side by side with what a user would pick instead: on one server, in one run, ours and
// theirs in turn, each on a fresh database.
//
//	go run .                            everything, and a table
//	go run . -quick                     small, with River alone
//	go run . -tests A,C -rounds 5       some of it
//	go run . -pg 18 -json               another server; one JSON object for each measurement
//	go run . -tests C -peers onceq -cpuprofile cpu.out
//	go run . -tests soak -soak 10m      steady load; an hour for each trial unless it says otherwise
//
// README.md in this directory says what each test does and how its figures are taken.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	"github.com/onceq/onceq/lab/peers"
)

func main() {
	if url := os.Getenv(childEnv); url != "" {
		fail(workerChild(url))
		return
	}
	if url := os.Getenv(memberEnv); url != "" {
		fail(memberChild(url))
		return
	}
	var (
		quick      = flag.Bool("quick", false, "small sizes, one round, River alone: two minutes")
		rounds     = flag.Int("rounds", 0, "rounds of each test; default 3, with -quick 1")
		tests      = flag.String("tests", "", "which tests, of "+strings.Join(testNames(), ",")+"; default all but storage, silence, soak, soak-keyed and adapters")
		variant    = flag.String("variant", "", "only trials whose variant has this in its name, as in 'idle lane'; not with -o")
		peers      = flag.String("peers", "", "which peers, by name (onceq, onceq from SQL, baseline, River, by hand, asynq, graphile-worker, pg-boss, BullMQ)")
		asJSON     = flag.Bool("json", false, "print one JSON object for each measurement in place of a table")
		pg         = flag.String("pg", "", "the server: 16, 17 or 18, or a directory with binaries; default as for the tests")
		out        = flag.String("o", "", "directory for RESULTS.md, its figures and plots; default none are written")
		backlog    = flag.String("backlog", "", "backlogs of the growth test, default 100000,1000000,10000000")
		fences     = flag.Int("fences", 0, "completed fences of the growth test; default 10,000,000")
		soak       = flag.Duration("soak", 0, "how long each trial of the soak tests runs; default an hour, with -quick a minute")
		adapters   = flag.String("adapters", "", "for the test adapters: further programs that speak its protocol, as NAME=PROGRAM, with commas")
		phase      = flag.Duration("phase", 0, "how long each phase of the test adapters runs; default a minute, with -quick 6 s")
		cpuprofile = flag.String("cpuprofile", "", "file for a CPU profile of this process while it measures onceq")
		memprofile = flag.String("memprofile", "", "file for a profile of allocations")
	)
	statements := flag.Bool("statements", false, "say after each trial which statements took the server's time (pg_stat_statements)")
	flag.Parse()
	if *variant != "" && *out != "" {
		fail(errors.New("-variant leaves trials out, and RESULTS.md would lose them: use it without -o"))
	}
	b := &bench{rounds: *rounds, sizes: fullSizes, variant: *variant, profile: *cpuprofile}
	if *quick {
		b.sizes = quickSizes
	}
	if *peers == "" && *quick {
		*peers = "onceq,baseline,River"
	}
	if b.rounds == 0 {
		b.rounds = b.sizes.rounds
	}
	if *fences > 0 {
		b.sizes.fences = *fences
	}
	for _, each := range list(*adapters) {
		name, program, ok := strings.Cut(each, "=")
		if !ok {
			fail(fmt.Errorf("-adapters %q is not NAME=PROGRAM", each))
		}
		b.adapters = append(b.adapters, adapterProgram{name, program})
	}
	if *phase > 0 {
		b.sizes.phase = *phase
	}
	if *soak > 0 {
		b.sizes.soak = *soak
	}
	if *backlog != "" {
		b.sizes.backlogs = nil
		for field := range strings.SplitSeq(*backlog, ",") {
			n, err := strconv.Atoi(field)
			fail(err)
			b.sizes.backlogs = append(b.sizes.backlogs, n)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	fail(b.run(ctx, *pg, *statements, list(*tests), list(*peers)))
	if *memprofile != "" {
		f, err := os.Create(*memprofile)
		fail(err)
		fail(errors.Join(pprof.Lookup("allocs").WriteTo(f, 0), f.Close()))
	}
	if *asJSON {
		for _, r := range b.results {
			fail(json.NewEncoder(os.Stdout).Encode(r))
		}
	} else {
		printReport(os.Stdout, b.report())
	}
	if *out != "" {
		fail(publish(*out, b.report()))
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// list splits a flag; nil means all.
func list(flag string) []string {
	if flag == "" {
		return nil
	}
	fields := strings.Split(flag, ",")
	for i := range fields {
		fields[i] = strings.TrimSpace(fields[i])
	}
	return fields
}

// bench is one run of the program.
type bench struct {
	server   *server
	adapters []adapterProgram
	rounds   int
	sizes    sizes
	peers    []peer
	results  []*result
	variant  string // part of the names of trials that run; empty: all
	profile  string
}

// sizes are how much is measured.
type sizes struct {
	rounds                      int
	bulk, transactions          int
	drained, rows, samples, wal int
	passed, last                int // F: jobs that go through before, and jobs that count
	limit                       time.Duration
	loaded, idle, reaping       time.Duration
	backlogs                    []int
	growth, fences, scheduled   int
	big                         int   // fairness
	fleet, idlers, wakers       []int // processes that drain, are idle, and wait for one job
	busy, beside                int   // processes that drain, and that are idle beside them
	queues                      []int
	lanes                       int           // most of them
	lane, waiting               int           // jobs of one lane, and jobs that wait beside others
	idleJobs                    int           // jobs into an idle lane
	schedules                   int           // of which a thousand are due at one second
	groups, members, followers  int           // groups that are drained, members of each, and groups whose followers are timed
	asked                       []int         // members of groups whose progress is asked for
	limited                     time.Duration // how long a rate is watched
	rest                        time.Duration // until idle processes have closed what they do not need
	soak                        time.Duration
	phase, sampleEvery          time.Duration // of an adapter
}

var fullSizes = sizes{
	rounds: 3, bulk: 100_000, transactions: 20_000, drained: 100_000, rows: 20_000, samples: 100, wal: 50_000,
	passed: 250_000, last: 50_000, limit: 20 * time.Second, loaded: 10 * time.Second, idle: 20 * time.Second, reaping: 5 * time.Minute,
	backlogs: []int{100_000, 1_000_000, 10_000_000}, growth: 200_000, fences: 10_000_000, scheduled: 1_000_000, big: 1_000_000,
	fleet: []int{1, 4, 8, 16, 32}, idlers: []int{1, 10, 40}, wakers: []int{1, 10, 40, 200}, busy: 5, beside: 200,
	queues: []int{1, 100, 1000, 5000}, lanes: 100_000, lane: 100_000, waiting: 1_000_000, idleJobs: 500, schedules: 10_000, groups: 10, members: 10_000, followers: 30,
	asked:   []int{10_000, 100_000, 1_000_000},
	limited: 20 * time.Second,
	rest:    65 * time.Second, soak: time.Hour, phase: time.Minute, sampleEvery: 2 * time.Second,
}

var quickSizes = sizes{
	rounds: 1, bulk: 20_000, transactions: 4000, drained: 20_000, rows: 4000, samples: 20, wal: 10_000,
	passed: 50_000, last: 10_000, limit: 2 * time.Second, loaded: 2 * time.Second, idle: 2 * time.Second, reaping: 30 * time.Second,
	backlogs: []int{20_000, 100_000}, growth: 10_000, fences: 100_000, scheduled: 100_000, big: 100_000,
	fleet: []int{1, 4}, idlers: []int{1, 4}, wakers: []int{1, 4}, busy: 2, beside: 6,
	queues: []int{1, 100}, lanes: 4000, lane: 5000, waiting: 50_000, idleJobs: 20, schedules: 2000, groups: 4, members: 1000, followers: 4,
	asked:   []int{1000, 10_000},
	limited: 4 * time.Second,
	rest:    2 * time.Second, soak: time.Minute, phase: 6 * time.Second, sampleEvery: time.Second,
}

// test gives its trials, which are run in this order and the next time in the opposite one.
type test struct {
	name, title string
	trials      func(b *bench) []trial
	counts      bool // some of its trials are counted
	once        bool // one round is enough, but for trials that are repeated
}

var tests = []test{
	{name: "A", title: "bulk enqueue without keys, batches of 1,000", trials: func(b *bench) []trial { return bulkTrials(b, "A", false) }},
	{name: "A2", title: "bulk enqueue with keys, batches of 1,000", trials: func(b *bench) []trial { return bulkTrials(b, "A2", true) }},
	{name: "B", title: "begin, a row of the application's, enqueue, commit; 8 connections", trials: transactionTrials},
	{name: "C", title: "drain of jobs that do nothing, one worker process", trials: drainTrials},
	{name: "D", title: "one row of the application's for each job, in the completion's transaction", trials: rowTrials},
	{name: "E", title: "from the enqueueing call to the handler, idle worker", trials: latencyTrials},
	{name: "E2", title: "from the commit to the handler, 12 producers with transactions of 1–20 ms, 1,000 jobs/s", trials: loadedTrials},
	{name: "F", title: "drain while another session holds a snapshot", trials: snapshotTrials},
	{name: "WAL", title: "write-ahead log for each job", trials: walTrials},
	{name: "growth", title: "rates beside a backlog and other rows", trials: growthTrials},
	{name: "storage", title: "enqueue and drain at once, at other storage parameters", trials: storageTrials},
	{name: "reaper", title: "one Reaper beside keys that are free soon, and beside keys that stay", trials: reaperTrials, once: true},
	{name: "worker", title: "what a worker process costs", trials: workerTrials},
	{name: "fairness", title: "start latency beside a large queue, and of high beside low priority", trials: fairnessTrials},
	{name: "fleet", title: "many worker processes", trials: fleetTrials, counts: true},
	{name: "queues", title: "one worker process with many queues", trials: queuesTrials, counts: true},
	{name: "silence", title: "an idle worker, by how long it may be silent", trials: silenceTrials, counts: true, once: true},
	{name: "wake", title: "one job for idle worker processes", trials: wakeTrials, counts: true},
	{name: "lanes", title: "jobs that wait for each other", trials: lanesTrials, counts: true, once: true},
	{name: "rate", title: "one limit with a rate for 8 worker processes", trials: rateTrials, counts: true, once: true},
	{name: "fair", title: "ten jobs of one tenant behind those of another, until they are done", trials: fairTrials, once: true},
	{name: "groups", title: "jobs of groups beside those of none, the job that waits for a group, and how a group is doing", trials: groupTrials, counts: true},
	{name: "ticks", title: "a thousand schedules that are due at one second, one worker process", trials: ticksTrials},
	{name: "soak", title: "steady load over two worker processes, a snapshot held in the middle third", trials: soakTrials, once: true},
	{name: soakKeyed, title: "the same with keyed jobs and a Reaper", trials: soakKeyedTrials, once: true},
	{name: "adapters", title: "someone else's measure: two processes, 800 jobs/s, through load, an open transaction, kills and pressure", trials: adapterTrials, once: true},
}

func testNames() []string {
	var names []string
	for _, t := range tests {
		names = append(names, t.name)
	}
	return names
}

// trial is one measurement of one peer.
type trial struct {
	test, variant string
	peer          peer
	conns         int
	repeated      bool                                     // in each round, also where the test has one
	stale         bool                                     // statistics are as prepare left them
	counted       bool                                     // statements are counted (observe)
	prepare       func(ctx context.Context, r *room) error // not measured, before the checkpoint
	measure       func(ctx context.Context, r *room) ([]figure, error)
}

// room is what a trial runs in: a session over a fresh database.
type room struct {
	session
	peer   peer
	server *server
	url    string
}

// figure is what a trial found.
type figure struct {
	variant string // in place of the trial's
	unit    string
	value   float64 // a rate, or the median of latencies, …
	p99     float64
	all     int // jobs that WAL and CPU time were spent on
	ticks   []tick
	minutes []minute

	walPerJob      float64
	client, server float64 // CPU seconds
}

func rateFigure(unit string, s stretch) []figure {
	return []figure{{unit: unit, value: s.rate(), all: s.all, ticks: s.ticks}}
}

func (b *bench) run(ctx context.Context, pg string, statements bool, wantTests, wantPeers []string) (err error) {
	if pg, err = binaries(pg); err != nil {
		return err
	}
	counts := false
	for _, t := range tests {
		counts = counts || t.counts && wanted(t, wantTests)
	}
	if b.server, err = startServer(ctx, pg, statements, counts); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.server.stop()) }()
	dir, err := os.MkdirTemp("", "onceq-bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	redis, redisErr := peers.StartRedis(dir)
	if redisErr == nil {
		defer redis.Stop()
	}
	b.peers = gatherPeers(ctx, wantPeers, redis, redisErr)
	for _, t := range tests {
		if !wanted(t, wantTests) {
			continue
		}
		trials := t.trials(b)
		found := make([][]figure, len(trials))
		for round := range b.rounds {
			for i := range trials {
				if round%2 == 1 { // the other way round, so that nobody always comes first
					i = len(trials) - 1 - i
				}
				p := trials[i].peer
				if p.missing != "" || p.only != nil && !contains(p.only, t.name) || round > 0 && (found[i] == nil || t.once && !trials[i].repeated) || !strings.Contains(trials[i].variant, b.variant) {
					continue
				}
				began := time.Now()
				figures, err := b.try(ctx, trials[i], redis)
				switch {
				case ctx.Err() != nil:
					return ctx.Err()
				case errors.Is(err, errNotOffered):
					continue
				case err != nil:
					trials[i].peer.missing = firstLine(err.Error())
					fmt.Fprintf(os.Stderr, "bench: %s %s, %s: %v\n", t.name, trials[i].variant, trials[i].peer, err)
					continue
				}
				found[i] = append(found[i], figures...)
				for _, f := range figures {
					fmt.Fprintf(os.Stderr, "%-9s round %d  %-26s %-34s %12.4g %s  (%.1fs)\n",
						t.name, round+1, trials[i].peer, f.variant, f.value, f.unit, time.Since(began).Seconds())
				}
			}
		}
		for i, trial := range trials {
			b.results = append(b.results, summarize(trial, found[i])...)
		}
	}
	compare(b.results)
	return nil
}

// wanted reports whether a test runs. Four have to be named: storage compares ours with ours, and is for those who change
// the tables; the soaks take hours; adapters needs the others' programs.
func wanted(t test, names []string) bool {
	if names == nil {
		return t.name != "storage" && t.name != "silence" && t.name != "soak" && t.name != soakKeyed && t.name != "adapters"
	}
	return contains(names, t.name)
}

// try runs a trial on a fresh database.
func (b *bench) try(ctx context.Context, t trial, redis *peers.Redis) ([]figure, error) {
	url, drop, err := b.server.database(ctx, t.counted)
	if err != nil {
		return nil, err
	}
	defer drop()
	s, err := t.peer.open(ctx, env{url: url, redis: redis, conns: t.conns})
	if err != nil {
		return nil, err
	}
	defer s.close()
	r := &room{session: s, peer: t.peer, server: b.server, url: url}
	if t.prepare != nil {
		if err := t.prepare(ctx, r); err != nil {
			return nil, err
		}
	}
	if err := b.server.settle(ctx, url, !t.stale); err != nil {
		return nil, err
	}
	var redisPID, clients []int
	if redis != nil {
		redisPID = append(redisPID, redis.Process.Pid)
	}
	if pid := s.process(); pid != 0 {
		clients = append(clients, pid)
	}
	m, err := b.server.newMeter(ctx, redisPID, clients)
	if err != nil {
		return nil, err
	}
	if b.server.statements {
		if err := b.server.resetStatements(ctx); err != nil {
			return nil, err
		}
	}
	endProfile, err := b.startProfile(t)
	if err != nil {
		return nil, err
	}
	figures, err := t.measure(ctx, r)
	endProfile()
	if err != nil {
		return nil, err
	}
	wal, client, server, err := m.stop(ctx)
	if err == nil && b.server.statements {
		err = b.server.printStatements(ctx, t.test+" "+t.variant+", "+t.peer.String())
	}
	for i := range figures {
		if figures[i].variant == "" {
			figures[i].variant = t.variant
		}
		if figures[i].all > 0 {
			figures[i].client, figures[i].server = client, server
			figures[i].walPerJob = float64(wal) / float64(figures[i].all)
		}
	}
	return figures, err
}

// startProfile profiles our own side: one file, with the last trial's profile.
func (b *bench) startProfile(t trial) (end func(), err error) {
	if b.profile == "" || t.peer.name != "onceq" {
		return func() {}, nil
	}
	f, err := os.Create(b.profile)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, err
	}
	return func() {
		pprof.StopCPUProfile()
		_ = f.Close()
	}, nil
}

// gatherPeers lists the peers that are wanted, with a reason for those that cannot run.
func gatherPeers(ctx context.Context, want []string, redis *peers.Redis, redisErr error) []peer {
	all := append([]peer{onceqPeer(), sqlPeer()}, basePeers()...)
	all = append(append(all, riverPeers()...), handPeer())
	all = append(all, asynqPeers()...)
	wantsNode := want == nil
	for _, s := range nodeSettings {
		wantsNode = wantsNode || contains(want, s.name)
	}
	if wantsNode {
		in, err := installNode(ctx)
		all = append(all, nodePeers(in, err)...)
	}
	var those []peer
	for _, p := range all {
		if want != nil && !contains(want, p.name) {
			continue
		}
		if p.name == "asynq" || p.name == "BullMQ" {
			if redisErr != nil {
				p.missing = redisErr.Error()
			} else {
				p.note += "; Redis " + redis.Version + " without persistence"
			}
		}
		if p.missing != "" {
			fmt.Fprintf(os.Stderr, "bench: %s is missing: %s\n", p, p.missing)
		}
		those = append(those, p)
	}
	return those
}

// contains compares names as people type them.
func contains(names []string, name string) bool {
	for _, n := range names {
		if strings.EqualFold(n, name) {
			return true
		}
	}
	return false
}

// versionScript is where the tests get other versions of Postgres from. The benchmark runs in its own folder.
var versionScript = filepath.Join("..", "..", "scripts", "postgres-version.sh")

// binaries turns a major version into a directory, with the script that the tests use.
func binaries(pg string) (string, error) {
	if _, err := strconv.Atoi(pg); err != nil {
		return pg, nil
	}
	if found, _ := filepath.Glob("/usr/lib/postgresql/" + pg + "/bin"); len(found) == 1 {
		return found[0], nil
	}
	cmd := exec.Command(versionScript, pg)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
}
