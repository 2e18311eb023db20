package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// reached is a goal and what became of it in this run.
type reached struct {
	Test  string `json:"test"`
	Goal  string `json:"goal"`
	Value string `json:"reached"`
	OK    bool   `json:"ok"`
}

// goals say what is to be reached, in medians of one run. value gives NaN where something was not measured.
var goals = []struct {
	test, text string
	least      bool // at least want; otherwise at most
	want       float64
	unit       string
	value      func(f finder) float64
}{
	{"A", "≥ 2.3 × River's fastest", true, 2.3, "×", func(f finder) float64 { return f.ours("A", "") / f.best("A", "", "River") }},
	{"A", "≥ 0.7 × a plain insert … select unnest", true, 0.7, "×", func(f finder) float64 { return f.ours("A", "") / f.one("A", "", "baseline", "no queue") }},
	{"A", "≥ 0.55 × it", true, 0.55, "×", func(f finder) float64 { return f.ours("A", "") / f.one("A", "", "baseline", "no queue") }},
	{"A2", "≥ 1.6 × the best Postgres peer", true, 1.6, "×", func(f finder) float64 {
		return f.ours("A2", "") / f.best("A2", "", "River", "graphile-worker", "pg-boss")
	}},
	{"A2", "ahead of asynq with its unique option", true, 1, "×", func(f finder) float64 { return f.ours("A2", "") / f.best("A2", "", "asynq") }},
	{"A2", "≥ 1.75 × the best Postgres peer", true, 1.75, "×", func(f finder) float64 {
		return f.ours("A2", "") / f.best("A2", "", "River", "graphile-worker", "pg-boss")
	}},
	{"A2", "≥ 0.65 × unnest insert into a uniquely indexed table", true, 0.65, "×", func(f finder) float64 { return f.ours("A2", "") / f.one("A2", "", "baseline", "no queue") }},
	{"B", "unkeyed ≥ 0.78 of the transactions without an enqueue", true, 0.78, "×", func(f finder) float64 { return f.ours("B", unkeyed) / f.one("B", unkeyed, "baseline", "no queue") }},
	{"B", "keyed ≥ 0.70 of them", true, 0.70, "×", func(f finder) float64 { return f.ours("B", keyed) / f.one("B", unkeyed, "baseline", "no queue") }},
	{"B", "in the caller's batch ≥ 0.93 of them", true, 0.93, "×", func(f finder) float64 { return f.ours("B", oneBatch) / f.one("B", unkeyed, "baseline", "no queue") }},
	{"C", "≥ 2 × graphile-worker batched", true, 2, "×", func(f finder) float64 { return f.ours("C", "") / f.one("C", "", "graphile-worker", "tuned") }},
	{"C", "≥ 3.5 × River tuned", true, 3.5, "×", func(f finder) float64 { return f.ours("C", "") / f.one("C", "", "River", "tuned") }},
	{"C", "at default settings ≥ 30 × River's default", true, 30, "×", func(f finder) float64 { return f.ours("C", "") / f.one("C", "", "River", "default") }},
	{"D", "single ≥ 4 × River", true, 4, "×", func(f finder) float64 { return f.ours("D", "single") / f.best("D", "single", "River") }},
	{"D", "single ≥ 1.7 × the loop by hand", true, 1.7, "×", func(f finder) float64 { return f.ours("D", "single") / f.best("D", "single", "by hand") }},
	{"D", "batch ≥ 3 × pg-boss at 100 jobs per transaction", true, 3, "×", func(f finder) float64 {
		return f.ours("D", "100 in one transaction") / f.one("D", "100 in one transaction", "pg-boss", "tuned")
	}},
	{"E", "p50 ≤ 0.75 ms", false, 0.75, "ms", func(f finder) float64 { return f.ours("E", "") }},
	{"E", "p99 ≤ 3 ms", false, 3, "ms", func(f finder) float64 { return f.p99("E", "") }},
	{"E", "from SQL: p99 ≤ 1.3 × that from Go", false, 1.3, "×", func(f finder) float64 {
		return f.p99Of("onceq from SQL", "E", "") / f.p99("E", "")
	}},
	{"E2", "12 producers: p99 ≤ 10 ms", false, 10, "ms", func(f finder) float64 { return f.p99("E2", "") }},
	{"E2", "no notification while workers are busy", false, 0, "", func(f finder) float64 { return f.ours("E2", "notifications") }},
	{"F", "≥ 0.95 × our own rate without the snapshot", true, 0.95, "×", func(f finder) float64 { return f.ours("F", "snapshot held") / f.ours("F", "no snapshot") }},
	{"F", "≥ 10 × River", true, 10, "×", func(f finder) float64 { return f.ours("F", "snapshot held") / f.best("F", "snapshot held", "River") }},
	{"F", "≥ 8 × graphile-worker", true, 8, "×", func(f finder) float64 {
		return f.ours("F", "snapshot held") / f.best("F", "snapshot held", "graphile-worker")
	}},
	{"WAL", "unkeyed ≤ 0.80 kB", false, 800, "B", func(f finder) float64 { return f.ours("WAL", unkeyed+", both") }},
	{"WAL", "keyed ≤ 1.5 kB", false, 1500, "B", func(f finder) float64 { return f.ours("WAL", keyed+", both") }},
	{"growth", "enqueue beside anything ≥ 0.9 of that at the smallest backlog", true, 0.9, "×", func(f finder) float64 { return f.worst("enqueue: ") }},
	{"growth", "drain beside anything ≥ 0.9 of that at the smallest backlog", true, 0.9, "×", func(f finder) float64 { return f.worst("drain: ") }},
	{"reaper", "20,000 keyed jobs/s: ≥ 98% of the rate is reached", true, 98, "%", func(f finder) float64 { return 100 * f.ours("reaper", reapReached) / reapRate }},
	{"reaper", "keys, table and index at the end ≤ 1.1 × of those in the middle", false, 1.1, "×", reapGrowth},
	{"reaper", "a pass removes ≥ 20,000 keys/s", true, 20_000, "keys/s", func(f finder) float64 { return f.ours("reaper", reapRemoves) }},
	{"worker", "≤ 64 MiB resident at 1,000 handlers and 1 kB payloads", false, 64, "MiB", func(f finder) float64 { return f.ours("worker", "resident, peak") }},
	{"worker", "0 goroutines leaked", false, 0, "", func(f finder) float64 { return f.ours("worker", "goroutines leaked") }},
	{"worker", "CPU when idle ≤ 0.5% of a core", false, 0.5, "%", func(f finder) float64 { return f.ours("worker", "CPU when idle") }},
	{"fairness", "a small queue beside a large one: p99 ≤ 50 ms", false, 50, "ms", func(f finder) float64 { return f.p99("fairness", "a queue of") }},
	{"fairness", "high priority beside low: p99 ≤ 50 ms", false, 50, "ms", func(f finder) float64 { return f.p99("fairness", "high priority") }},
	{"fairness", "low priority moves beside high", true, 0.1, "jobs for 100", func(f finder) float64 { return f.ours("fairness", "low priority jobs for 100 of high") }},
	{"fleet", "32 processes drain at ≥ 0.7 × the rate of one", true, 0.7, "×", func(f finder) float64 { return f.ours("fleet", drainBy(32)) / f.ours("fleet", drainBy(1)) }},
	{"fleet", "none of 32 starves: the least does ≥ 0.2 of an even share", true, 0.2, evenShare, func(f finder) float64 { return f.ours("fleet", drainBy(32)+leastName) }},
	{"fleet", "5 busy processes beside 200 idle ones lose ≤ 10%", true, 0.9, "×", func(f finder) float64 {
		return f.ours("fleet", besideName(fullSizes)) / f.ours("fleet", drainBy(fullSizes.busy))
	}},
	{"fleet", "1,000 jobs/s over 32 processes: p99 ≤ 10 ms", false, 10, "ms", func(f finder) float64 { return f.p99("fleet", steadyName(32)) }},
	{"fleet", "the same, each in a transaction of the application's", false, 10, "ms", func(f finder) float64 { return f.p99("fleet", steadyInTxName(32)) }},
	{"fleet", "an idle process sends ≤ 1 statement a second", false, 1, "a second", func(f finder) float64 { return mostIdle(f, statementsName) }},
	{"fleet", "an idle process holds 1 connection", false, 1, "", func(f finder) float64 { return mostIdle(f, connectionsName) }},
	{"queues", "an idle process with 5,000 queues sends ≤ 1 statement a second", false, 1, "a second", func(f finder) float64 { return f.ours("queues", queuesName(5000)+statementsName) }},
	{"queues", "5,000 idle queues cost process and server ≤ 2% of a core", false, 2, "%", func(f finder) float64 { return f.ours("queues", queuesName(5000)+cpuName) }},
	{"queues", "a lease that ran out in a worker's one queue is found ≤ 2 s later (p99)", false, 2000, "ms", func(f finder) float64 { return f.p99("queues", expiredName(1)) }},
	{"queues", "the same in one of 5,000 queues: ≤ 10 s", false, 10000, "ms", func(f finder) float64 { return f.p99("queues", expiredName(5000)) }},
	{"queues", "a trickle in 1,000 queues: p99 ≤ 1.5 × of that in one", false, 1.5, "×", func(f finder) float64 {
		return f.p99("queues", trickleName(1000)) / f.p99("queues", trickleName(1))
	}},
	{"wake", "1 idle process: ≤ 12 statements from Enqueue until the job is gone", false, 12, "", func(f finder) float64 { return f.ours("wake", idleName(1)+goneName) }},
	{"wake", "40 and 200 idle processes: at most two more", false, 2, "", func(f finder) float64 {
		return max(f.ours("wake", idleName(40)+goneName), f.ours("wake", idleName(200)+goneName)) - f.ours("wake", idleName(1)+goneName)
	}},
	{"wake", "40 and 200 idle processes: p99 ≤ 1.3 × of that with one", false, 1.3, "×", func(f finder) float64 {
		return max(f.p99("wake", idleName(40)), f.p99("wake", idleName(200))) / f.p99("wake", idleName(1))
	}},
	{"lanes", "100,000 lanes of 10 drain at ≥ 0.4 × the rate of jobs without lanes", true, 0.4, "×", func(f finder) float64 {
		return f.ours("lanes", lanesName(fullSizes.lanes)) / f.ours("lanes", plainJobs)
	}},
	{"lanes", "one lane in order, handlers on a lease: ≥ 2,000 jobs/s", true, 2000, "jobs/s", func(f finder) float64 { return f.ours("lanes", oneLane) }},
	{"lanes", "one lane in order, in transactions: ≥ 1,000 jobs/s", true, 1000, "jobs/s", func(f finder) float64 { return f.ours("lanes", oneLaneTx) }},
	{"lanes", "a job into an idle lane: p99 ≤ 1.5 × of one without a lane", false, 1.5, "×", func(f finder) float64 {
		return f.p99("lanes", intoIdleLane) / f.p99("lanes", intoNoLane)
	}},
	{"lanes", "plain jobs beside a million that wait: ≥ 0.97 × the rate beside none", true, 0.97, "×", func(f finder) float64 {
		return f.ours("lanes", besideWaiting) / f.ours("lanes", besideNone)
	}},
	{"lanes", "the same: pages for each job ≤ 1.03 ×", false, 1.03, "×", func(f finder) float64 {
		return f.ours("lanes", besideWaiting+pagesName) / f.ours("lanes", besideNone+pagesName)
	}},
	{"rate", "≥ 98% of the rate is reached", true, 98, "%", func(f finder) float64 { return f.ours("rate", rateReached) }},
	{"rate", "no window has more starts than the burst and the rate allow", false, rateBurst, "jobs", func(f finder) float64 { return f.ours("rate", burstSeen) }},
	{"rate", "the same with burst 3 at 10 a second, where burst 2 is enough", false, setBurst, "jobs", func(f finder) float64 { return f.ours("rate", smallBurst(lowRate, burstSeen)) }},
	{"rate", "the same with burst 3 at 1,000 a second, where burst 101 is needed: and what the rate allows in 100 ms", false, setBurst + ratePerSecond/10, "jobs", func(f finder) float64 {
		return f.ours("rate", smallBurst(ratePerSecond, burstSeen))
	}},
	{"rate", "with burst 3, at both: ≥ 98% of the rate is reached", true, 98, "%", func(f finder) float64 {
		return min(f.ours("rate", smallBurst(lowRate, rateReached)), f.ours("rate", smallBurst(ratePerSecond, rateReached)))
	}},
	{"rate", "handlers slower than the rate ask for a slot at most once a job", false, 1, "messages", func(f finder) float64 { return f.ours("rate", slowAsks) }},
	{"fair", "10 jobs behind a million of another tenant, one at a time: p99 ≤ 50 ms", false, 50, "ms", func(f finder) float64 { return f.p99("fair", fairName(1)) }},
	{"fair", "the same, 100 at a time: p99 ≤ 50 ms", false, 50, "ms", func(f finder) float64 { return f.p99("fair", fairName(tenantShare)) }},
	{"groups", "members ≥ 0.8 × as many jobs of no group, handlers on a lease", true, 0.8, "×", groupRatio(0, false)},
	{"groups", "the same, 100 in one transaction", true, 0.8, "×", groupRatio(1, false)},
	{"groups", "the same, one by one in transactions: ≥ 0.7 ×", true, 0.7, "×", groupRatio(2, false)},
	{"groups", "with a snapshot held, handlers on a lease: ≥ 0.8 ×", true, 0.8, "×", groupRatio(0, true)},
	{"groups", "the same, 100 in one transaction", true, 0.8, "×", groupRatio(1, true)},
	{"groups", "the same, one by one in transactions: ≥ 0.7 ×", true, 0.7, "×", groupRatio(2, true)},
	{"groups", "10,000 → 1: the job starts ≤ 100 ms (p99) after the last member", false, 100, "ms", func(f finder) float64 { return f.p99("groups", followerName(false)) }},
	{"groups", "the same with a snapshot held", false, 100, "ms", func(f finder) float64 { return f.p99("groups", followerName(true)) }},
	{"groups", "to ask how a group of 10,000 is doing ≤ 10 ms", false, 10, "ms", func(f finder) float64 { return f.ours("groups", askName(fullSizes.asked[0])) }},
	{"ticks", "a thousand schedules at one second, a pool of 10: the last is fired ≤ 1 s after it", false, 1000, "ms", func(f finder) float64 {
		return f.ours("ticks", ticksName(fullSizes.schedules, ticksPools[1])+lastTick)
	}},
	{"ticks", "the same with a pool of 4", false, 1000, "ms", func(f finder) float64 { return f.ours("ticks", ticksName(fullSizes.schedules, ticksPools[0])+lastTick) }},
	{"soak", "p50 with the snapshot ≤ 1.5 × of without", false, 1.5, "×", func(f finder) float64 {
		return f.ours("soak", thirdName(unkeyed, 1)) / f.ours("soak", thirdName(unkeyed, 0))
	}},
	{"soak", "p99 with the snapshot ≤ 1.5 × of without", false, 1.5, "×", func(f finder) float64 {
		return f.p99("soak", thirdName(unkeyed, 1)) / f.p99("soak", thirdName(unkeyed, 0))
	}},
}

// mostIdle is what one of 1, 10 or 40 idle processes has or sends, in the run in which it is most.
func mostIdle(f finder, what string) float64 {
	most := 0.0
	for _, n := range fullSizes.idlers {
		most = max(most, f.ours("fleet", idleName(n)+what)/float64(n))
	}
	return most
}

// reapGrowth is how many times larger what grew most was at the end of the time than in its middle.
func reapGrowth(f finder) float64 {
	worst := 0.0
	for _, what := range []string{"keys", "table", "index"} {
		worst = max(worst, f.ours("reaper", reapedName(fullSizes.reaping, reapParts, what))/f.ours("reaper", reapedName(fullSizes.reaping, reapParts/2, what)))
	}
	return worst
}

// groupRatio is the rate of the members of groups by that of as many jobs of none.
func groupRatio(how int, held bool) func(f finder) float64 {
	return func(f finder) float64 {
		name := groupEffects[how].name
		return f.ours("groups", groupName(name, fullSizes.groups, held)) / f.ours("groups", groupName(name, 0, held))
	}
}

const unknown = "not measured"

// judge holds the results against the goals. Goals of tests that did not run are left out.
func judge(results []*result) []reached {
	results = slices.DeleteFunc(slices.Clone(results), func(r *result) bool { return r.Earlier })
	ran := make(map[string]bool)
	for _, r := range results {
		ran[r.Test] = true
	}
	var all []reached
	for _, g := range goals {
		if !ran[g.test] {
			continue
		}
		v := g.value(results)
		r := reached{Test: g.test, Goal: g.text, Value: unknown}
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			r.Value = strings.TrimSpace(fmt.Sprintf("%s %s", number(v), g.unit))
			r.OK = v >= g.want == g.least || v == g.want
		}
		all = append(all, r)
	}
	return all
}

// finder looks up medians.
type finder []*result

func (f finder) one(test, variant, peer, settings string) float64 {
	for _, r := range f {
		if r.Test == test && r.Variant == variant && r.Peer == peer && r.Settings == settings && r.Unit != "" {
			return r.Median
		}
	}
	return math.NaN()
}

func (f finder) ours(test, variant string) float64 { return f.one(test, variant, "onceq", "default") }

// best is the highest median of some peers, at any settings.
func (f finder) best(test, variant string, peers ...string) float64 {
	best := math.NaN()
	for _, r := range f {
		if r.Test == test && r.Variant == variant && contains(peers, r.Peer) && r.Unit != "" && !(r.Median <= best) {
			best = r.Median
		}
	}
	return best
}

// p99 is ours for the variant that begins so.
func (f finder) p99(test, variant string) float64 { return f.p99Of("onceq", test, variant) }

func (f finder) p99Of(peer, test, variant string) float64 {
	for _, r := range f {
		if r.Test == test && strings.HasPrefix(r.Variant, variant) && r.Peer == peer && r.P99 > 0 {
			return r.P99
		}
	}
	return math.NaN()
}

// worst is the lowest rate of the growth test's enqueues or drains, by that of the same kind at the smallest backlog.
func (f finder) worst(what string) float64 {
	worst, plain := math.NaN(), math.NaN()
	keyedRate := f.ours("growth", what+keyedBase)
	for _, r := range f {
		variant, ok := strings.CutPrefix(r.Variant, what)
		if r.Test != "growth" || !ok || variant == keyedBase {
			continue
		}
		if math.IsNaN(plain) {
			plain = r.Median // backlogs come first, the smallest before the others
			continue
		}
		base := plain
		if strings.HasSuffix(variant, "completed fences") {
			base = keyedRate
		}
		if ratio := r.Median / base; !(ratio >= worst) {
			worst = ratio
		}
	}
	return worst
}
