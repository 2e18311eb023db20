package main

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain makes this test binary a worker, a producer or the provider if it is started as one.
func TestMain(m *testing.M) {
	if raw := os.Getenv(childEnv); raw != "" {
		childMain(raw)
		return
	}
	os.Exit(m.Run())
}

// broken tortures a library that is used wrongly until the checker notices, if necessary with several seeds.
func broken(t *testing.T, mistake, form string, want ...string) {
	t.Helper()
	c := config{
		System: "onceq", Duration: 15 * time.Second, Drain: 30 * time.Second, Workers: 4, Producers: 3, Requesters: 3,
		Freeze: 4 * lease, Forms: []string{form}, Broken: mistake, Only: []string{faultFreeze, faultKill, faultHalf},
	}
	if mistake == brokenToken && form == formOwn { // others must have taken the jobs over before the process goes on
		c.Duration, c.Freeze, c.Only = 30*time.Second, 10*lease, []string{faultFreeze}
	}
	findsIn(t, c, want...)
}

// findsIn tortures until the checker has found violations of all the sorts that it should.
func findsIn(t *testing.T, c config, want ...string) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	t.Parallel()
	var found map[string][]string
	for seed := range uint64(10) {
		c.Seed = seed
		r, err := run(t.Context(), c)
		require.NoError(t, err)
		found = r.verdict.Violations
		t.Logf("seed %d: %d jobs, faults %v", seed, r.verdict.Accepted, r.faults)
		all := true
		for _, sort := range want {
			all = all && len(found[sort]) > 0
		}
		if all {
			t.Logf("seed %d: %d violations in %d jobs", seed, r.verdict.count(), r.verdict.Accepted)
			return
		}
	}
	t.Fatalf("nobody noticed: %v", found)
}

// If a worker completes jobs by their id alone, it makes effects twice when it is frozen and wakes up.
func TestTorture_FindsACompletionWithoutTheToken(t *testing.T) {
	broken(t, brokenToken, formOwn, vEffect, vToken)
}

// The same happens if a fence outside jobs is completed by its key alone.
func TestTorture_FindsARequestCompletedWithoutTheToken(t *testing.T) {
	broken(t, brokenToken, formFence, vEffect, vToken)
}

// If a downstream key contains the token, the next run has another key.
func TestTorture_FindsADownstreamKeyThatChanges(t *testing.T) {
	broken(t, brokenKey, formAgain, vCallKey)
}

// If jobs are let into their lanes out of turn, and beside the lane's lock, some are too early and some one too many.
func TestTorture_FindsAJobOutOfTurn(t *testing.T) {
	broken(t, brokenLane, formLine, vLane)
}

// If jobs are let in whatever their limit says, too many are live, and too many start in a time.
func TestTorture_FindsAJobBeyondItsLimit(t *testing.T) {
	broken(t, brokenLimit, formCap, vLimit)
}

func TestTorture_FindsStartsBeyondTheirRate(t *testing.T) {
	broken(t, brokenLimit, formRate, vLimit)
}

// If a later event replaces the first one, flows hear it.
func TestTorture_FindsAnEventThatReplacesTheFirst(t *testing.T) {
	broken(t, brokenEvent, formFlow, vFlow)
}

// If a flow forgets that its time-out came first, it later hears of the event.
func TestTorture_FindsAFlowThatForgetsItsAnswer(t *testing.T) {
	broken(t, brokenAwait, formFlow, vFlow)
}

// If the end of a job calls nobody, those that wait for it do so for ever.
func TestTorture_FindsAnEndThatIsNotTold(t *testing.T) {
	broken(t, brokenTell, formJoin, vGroup, vUnfinished)
}

// If a job that waits goes on at the first call, others are not done.
func TestTorture_FindsAJobThatDoesNotWait(t *testing.T) {
	broken(t, brokenFollow, formJoin, vGroup)
}

// If a schedule goes back by a tick, that tick is fired twice.
func TestTorture_FindsATickThatIsFiredTwice(t *testing.T) {
	broken(t, brokenTick, formTick, vTick)
}

func TestTorture_FindsARequestsDownstreamKeyThatChanges(t *testing.T) {
	broken(t, brokenKey, formDoAgain, vCallKey)
}

// The jobs of workers that come and go are checked as all others. Nobody else ends, so the calls that go out again are of jobs
// that one of them had.
func TestTorture_FindsADownstreamKeyThatChangesWhereWorkersComeAndGo(t *testing.T) {
	findsIn(t, config{
		System: "onceq", Duration: 20 * time.Second, Drain: time.Minute, Workers: 1, Producers: 3, Crowd: 12,
		Forms: []string{formAgain, formTick}, Broken: brokenKey, Only: []string{faultChurn},
	}, vCallKey)
}

// Some of a wave stop by SIGTERM, and the others are killed. No job is lost.
func TestTorture_WorkersComeAndGo(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	t.Parallel()
	// Jobs that were lost start one at a time in each process, so how long it takes until all are done depends on how many there were.
	r, err := run(t.Context(), config{
		System: "onceq", Seed: 1, Duration: 15 * time.Second, Drain: 5 * time.Minute, Workers: 2, Producers: 3, Crowd: 12,
		Forms: []string{formTx, formOwn, formTick}, Only: []string{faultChurn},
	})
	require.NoError(t, err)
	require.Empty(t, r.verdict.Violations)
	require.NotZero(t, r.verdict.Ends["completed"])
	require.NotZero(t, r.crowd.stopped)
	require.NotZero(t, r.crowd.killed)
	require.Equal(t, r.crowd.started, r.crowd.stopped+r.crowd.killed+r.crowd.fallen)
	require.GreaterOrEqual(t, r.crowd.started, 12*r.faults[faultChurn])
}

// A run in which nothing happened has no violations either.
func TestReport_SaysWhenNothingIsShown(t *testing.T) {
	r := &report{verdict: check(&history{}), faults: map[string]int{}}
	require.Zero(t, r.verdict.count())
	require.Equal(t, "no job was completed and no request answered", r.idle())
	r.verdict.Ends["completed"] = 1
	require.Equal(t, "no fault could be done", r.idle())
	r.faults["kill"] = 1
	require.Empty(t, r.idle())
}
