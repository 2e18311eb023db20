package tests

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// starts records when handlers start, and looks whether more of them did in some window than a burst and a rate allow. Where the machine
// keeps a handler waiting, it is seen later than it was let start, and seems nearer to the next ones.
type starts struct {
	sync.Mutex
	at    []time.Time
	late  []time.Duration // how long after its slot each of them was seen
	kept  time.Duration   // the longest time that the machine kept somebody waiting
	ended bool
}

func (s *starts) add(l *onceq.Lease) int {
	s.Lock()
	defer s.Unlock()
	now := time.Now()
	s.at, s.late = append(s.at, now), append(s.late, now.Sub(l.RunAt))
	if len(s.at) == 1 {
		go s.measure()
	}
	return len(s.at)
}

// measure measures kept, until within is called.
func (s *starts) measure() {
	for {
		asleep := time.Now()
		time.Sleep(time.Millisecond)
		s.Lock()
		s.kept = max(s.kept, time.Since(asleep)-time.Millisecond)
		ended := s.ended
		s.Unlock()
		if ended {
			return
		}
	}
}

// within takes a start for as early as it may have been: one that was seen later than a job may start was kept waiting, if the machine
// ever did that to somebody for as long. It sorts at.
func (s *starts) within(t testing.TB, burst int, gap time.Duration) {
	t.Helper()
	s.Lock()
	defer s.Unlock()
	s.ended = true
	for i, late := range s.late {
		if over := late - table.SlotLate; over > 0 && over <= s.kept {
			s.at[i] = s.at[i].Add(-over)
		}
	}
	slices.SortFunc(s.at, time.Time.Compare)
	var most time.Duration // the largest of i*gap - at[i] so far
	for i, at := range s.at {
		since := at.Sub(s.at[0])
		most = max(most, since-time.Duration(i)*gap)
		// Since some start k, i-k+1 jobs started in since(i)-since(k).
		if need := time.Duration(i+1-burst)*gap - since + most; need > 0 {
			t.Fatalf("start %d of %d comes %s too soon: more than %d and one in %s", i, len(s.at), need, burst, gap)
		}
	}
}

// A rate holds for the starts of handlers over several workers, and is reached.
func TestLimit_Rate(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := context.Background()
	setLimit(t, db, "provider", onceq.Limit{Rate: 200})
	const jobs = 400
	var all []onceq.Job
	for n := range jobs {
		all = append(all, limitedInLane.Job(charge{n, n}))
	}
	s := &starts{}
	done := make(chan int, jobs)
	for range 3 {
		start(t, db, onceq.WorkerConfig{}, limitedInLane.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
			done <- s.add(l)
			return nil
		}))
	}
	_, err := db.Queue.EnqueueMany(ctx, db.Pool, all)
	require.NoError(t, err)
	for range jobs {
		receive(t, done)
	}
	s.within(t, 21, 5*time.Millisecond)
	took := s.at[jobs-1].Sub(s.at[0])
	t.Logf("%d in %s", jobs, took)
	require.NoError(t, db.Check())
}

// stamping is a kind of which every process notes when it starts a job.
var stamping = onceq.Kind[charge]{Name: "stamp", MaxLost: 100, Limit: func(charge) string { return "provider" }}

// With Max no window of time that is as long as Per has more starts, wherever it begins, over several processes that are
// killed now and then. Lost leases come back in slots, too.
func TestLimit_MaxInAnyWindow(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	limit := onceq.Limit{Max: 50, Per: time.Second}
	setLimit(t, db, "provider", limit)
	require.Equal(t, "at most 50 in any 1s", limit.String())
	sqlRun(t, db, `create table stamps (at bigint, weight int)`)
	var workers [3]*process
	for i := range workers {
		workers[i] = startProcess(t, db, time.Second)
	}
	const jobs = 200
	var all []onceq.Job
	for n := range jobs {
		all = append(all, stamping.Job(charge{n, n}))
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, all)
	require.NoError(t, err)
	for kill := 1; kill <= 3; kill++ {
		until(t, db, `(select count(*) from stamps) >= $1::int`, kill*jobs/5)
		workers[kill%3].kill()
		workers[kill%3] = startProcess(t, db, time.Second)
	}
	until(t, db, `not exists (select from onceq.jobs) and not exists (select from onceq.job_waits)`)
	at := sqlOne[[]int64](t, db, `select array_agg(at order by at) from stamps`)
	require.GreaterOrEqual(t, len(at), jobs)
	for i := range at[limit.Max:] {
		apart := time.Duration(at[i+limit.Max]-at[i]) * time.Microsecond
		require.GreaterOrEqual(t, apart, limit.Per, "starts %d to %d of %d", i, i+limit.Max, len(at))
	}
	t.Logf("%d starts in %s", len(at), time.Duration(at[len(at)-1]-at[0])*time.Microsecond)
}

// A rate of a family is one for each of its limits.
func TestLimit_RateOfAFamily(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	setLimit(t, db, "of/", onceq.Limit{Rate: 100, Burst: 20})
	kind := limitedAlone
	kind.Limit = func(c charge) string { return fmt.Sprint("of/", c.Customer) }
	const limits, jobs = 3, 60
	var all []onceq.Job
	for n := range limits * jobs {
		all = append(all, kind.Job(charge{n % limits, n}))
	}
	var starts [limits]starts
	done := make(chan int, len(all))
	for range 2 {
		start(t, db, onceq.WorkerConfig{}, kind.Handle(func(_ context.Context, l *onceq.Lease, c charge) error {
			done <- starts[c.Customer].add(l)
			return nil
		}))
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, all)
	require.NoError(t, err)
	for range all {
		receive(t, done)
	}
	for i := range starts {
		require.Len(t, starts[i].at, jobs)
		starts[i].within(t, 20, 10*time.Millisecond)
	}
	require.Equal(t, limits, sqlOne[int](t, db, `select count(*) from onceq.limit_rates where lane like '/of/%'`), "each has slots of its own")
	require.NoError(t, db.Check())
}

// letIn lets the jobs of a limit of 100 a second with bursts of 20 in, and returns how many there are.
func letIn(t *testing.T, db *queuetest.DB) (jobs int) {
	t.Helper()
	setLimit(t, db, "provider", onceq.Limit{Rate: 100, Burst: 20})
	for ; jobs < 60; jobs++ {
		laneEnqueue(t, db.Queue, db.Pool, limitedAlone.Job(charge{jobs, jobs}))
	}
	for _, l := range laneClaim(t, db.Queue, 1) { // which lets the others in
		require.NoError(t, l.Complete(context.Background(), nil))
		jobs--
	}
	require.Greater(t, repairCount(t, db, `select count(*) from onceq.jobs`), 20)
	return jobs
}

// After an outage the jobs that had their slots before it do not start at once: those that missed them get others.
func TestLimit_NoBurstAfterAnOutage(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := context.Background()
	jobs := letIn(t, db)
	_, err := db.Pool.Exec(ctx, `with j as (update onceq.jobs set run_at = run_at - interval '10 minutes') update onceq.limit_rates set free_at = free_at - interval '10 minutes'`)
	require.NoError(t, err)
	s := &starts{}
	done := make(chan int, jobs)
	for range 2 {
		start(t, db, onceq.WorkerConfig{}, limitedAlone.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
			done <- s.add(l)
			return nil
		}))
	}
	for range jobs {
		receive(t, done)
	}
	s.within(t, 20, 10*time.Millisecond)
	require.NoError(t, db.Check())
}

// Nor if they are moved into another queue then, whose workers have passed their times.
func TestLimit_NoBurstOfMovedJobs(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := context.Background()
	jobs := letIn(t, db)
	s := &starts{}
	done := make(chan int, jobs)
	elsewhere := limitedAlone
	elsewhere.Queue = "elsewhere"
	for range 2 {
		start(t, db, onceq.WorkerConfig{}, elsewhere.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
			done <- s.add(l)
			return nil
		}))
	}
	until(t, db, `(select count(*) from onceq.waiters) = 2`)
	_, err := db.Pool.Exec(ctx, `with j as (update onceq.jobs set run_at = run_at - interval '10 minutes') update onceq.limit_rates set free_at = free_at - interval '10 minutes'`)
	require.NoError(t, err)
	moved := 0
	eventually(t, "all are moved", func() bool { // one that a worker lets in at that moment is locked, and stays for the next call
		n, err := onceqops.New(db.Queue).MoveMany(ctx, db.Pool, onceqops.Filter{Kind: limitedAlone.Name, Queue: onceq.DefaultQueue}, elsewhere.Queue)
		require.NoError(t, err)
		moved += n
		return moved == jobs
	})
	for range jobs {
		receive(t, done)
	}
	s.within(t, 20, 10*time.Millisecond)
	require.NoError(t, db.Check())
}

// Nor if somebody had them locked for longer than claims look back, so that a rescan finds them.
func TestLimit_NoBurstAfterARescan(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := context.Background()
	jobs := letIn(t, db)
	sqlRun(t, db, `update onceq.limit_rates set free_at = free_at - interval '10 minutes'`)
	locks := begin(t, db)
	_, err := locks.Exec(ctx, `update onceq.jobs set run_at = run_at - interval '10 minutes'`)
	require.NoError(t, err)
	s := &starts{}
	done := make(chan int, jobs)
	for range 2 {
		start(t, db, onceq.WorkerConfig{}, limitedAlone.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
			done <- s.add(l)
			return nil
		}))
	}
	until(t, db, `exists (select from onceq.queues where rescanned_at > 'epoch')`)
	commit(t, locks)
	began := time.Now()
	for range jobs {
		receive(t, done)
	}
	t.Logf("the first one after %s, the last one after %s", s.at[0].Sub(began), s.at[len(s.at)-1].Sub(began))
	s.within(t, 20, 10*time.Millisecond)
	require.NoError(t, db.Check())
}

// Jobs that a dead process held have missed their slots, and start one at a time. Each gets one new slot and starts in it: a
// rescan comes once a second, so a job for which it has to come again misses that slot too, and with each one that it misses
// there is one start less.
func TestLimit_LostLeasesComeBackAtTheRate(t *testing.T) { // not beside others: a slow machine misses slots, too
	const jobs = 12
	claims := int64(0)
	for range 3 {
		if claims = comeBackAtTheRate(t, jobs); claims <= 5*jobs {
			return
		}
	}
	t.Errorf("%d jobs were claimed %d times before they ran", jobs, claims)
}

// comeBackAtTheRate has a worker run jobs of lost leases, three a second. It returns how often they were claimed in all.
func comeBackAtTheRate(t *testing.T, jobs int) (sum int64) {
	db := queuetest.New(t)
	setLimit(t, db, "provider", onceq.Limit{AtOnce: jobs})
	for n := range jobs {
		laneEnqueue(t, db.Queue, db.Pool, limitedAlone.Job(charge{n, n}))
	}
	require.Len(t, laneClaim(t, db.Queue, jobs), jobs)
	setLimit(t, db, "provider", onceq.Limit{Rate: 10, Per: 3 * time.Second})
	_, err := db.Pool.Exec(t.Context(), `update onceq.jobs set leased_until = statement_timestamp(), lane = lane || E'\x1f@'`)
	require.NoError(t, err)
	s := &starts{}
	claims := make(chan int64, jobs)
	w := start(t, db, onceq.WorkerConfig{}, limitedAlone.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
		s.add(l)
		claims <- l.Token & (1<<20 - 1)
		return nil
	}))
	for range jobs {
		sum += receive(t, claims)
	}
	require.NoError(t, w.stop())
	s.within(t, 2, 300*time.Millisecond)
	t.Logf("%d claims, %s", sum, s.at[jobs-1].Sub(s.at[0]))
	require.NoError(t, db.Check())
	return sum
}

// asked is how many jobs at most asked for new slots in one message.
type asked struct{ most atomic.Int64 }

func (*asked) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (*asked) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (*asked) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (a *asked) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	if strings.Contains(data.SQL, ".take_slots(") && len(data.Args) == 4 {
		if ids, ok := data.Args[1].([]int64); ok {
			a.most.Store(max(a.most.Load(), int64(len(ids))))
		}
	}
}
func (*asked) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// Jobs that missed their slots ask for new ones together: if each asked in its turn, the others would miss theirs meanwhile.
func TestLimit_MissedSlotsAreRenewedTogether(t *testing.T) {
	t.Parallel()
	a := new(asked)
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = a }))
	ctx := context.Background()
	setLimit(t, db, "provider", onceq.Limit{Rate: 100, Burst: 20})
	const jobs = 30
	for n := range jobs {
		laneEnqueue(t, db.Queue, db.Pool, limitedAlone.Job(charge{n, n}))
	}
	for _, l := range laneClaim(t, db.Queue, 1) { // which lets the others in
		require.NoError(t, l.Complete(ctx, nil))
	}
	missed := repairCount(t, db, `select count(*) from onceq.jobs`)
	require.Greater(t, missed, 10)
	_, err := db.Pool.Exec(ctx, `update onceq.jobs set run_at = run_at - interval '10 minutes'`)
	require.NoError(t, err)
	done := make(chan int64, jobs)
	start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: jobs}}},
		limitedAlone.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
			done <- l.ID
			return nil
		}))
	for range jobs - 1 {
		receive(t, done)
	}
	require.GreaterOrEqual(t, int(a.most.Load()), missed)
}

// Those of many limits start as soon as their own limit has answered: if they waited for the answers of all, the first ones would miss
// their new slots meanwhile, again and again.
func TestLimit_MissedSlotsOfManyLimits(t *testing.T) {
	t.Parallel()
	const limits = 40
	var messages atomic.Int64
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = &statementHook{before: func(sql string) {
			if strings.Contains(sql, "limit_rates") && strings.Contains(sql, "present as materialized") {
				messages.Add(1)
				time.Sleep(10 * time.Millisecond) // the database is far
			}
		}}
	}))
	kind := limitedAlone
	kind.Limit = func(c charge) string { return fmt.Sprint("of ", c.Customer) }
	for n := range limits {
		setLimit(t, db, kind.Limit(charge{n, 0}), onceq.Limit{Rate: 1, Per: time.Second})
		laneEnqueue(t, db.Queue, db.Pool, kind.Job(charge{n, n}))
	}
	for _, l := range laneClaim(t, db.Queue, 1) { // which lets the others in
		require.NoError(t, l.Release(t.Context()))
	}
	until(t, db, `(select count(*) from onceq.jobs where leased_until is null) >= $1`, limits-1)
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '10 minutes'`)
	sqlRun(t, db, `update onceq.limit_rates set free_at = free_at - interval '10 minutes'`)
	messages.Store(0)
	done := make(chan int64, limits)
	var nth, started atomic.Int64 // the job that starts, and how many messages there were when the fifth one started: some may need none
	w := start(t, db, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: limits}}},
		kind.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
			if nth.Add(1) == 5 {
				started.Store(messages.Load())
			}
			done <- l.ID
			return nil
		}))
	for range limits {
		receive(t, done)
	}
	require.NoError(t, w.stop())
	require.Less(t, started.Load(), int64(limits-5), "it waited for the slots of all limits")
	require.NoError(t, db.Check())
}

// The jobs of a batch that failed run again, each by itself. The rate counts these starts, too.
func TestLimit_RateOfABatchThatFails(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := context.Background()
	setLimit(t, db, "provider", onceq.Limit{Rate: 20, Burst: 5})
	const jobs = 10
	s := &starts{}
	done := make(chan int64, jobs)
	var batches atomic.Int64 // that had more than one job
	start(t, db, onceq.WorkerConfig{}, limitedAlone.HandleBatch(5, func(_ context.Context, _ pgx.Tx, items []onceq.Item[charge]) error {
		for _, item := range items {
			s.add(item.Lease)
		}
		if len(items) > 1 {
			batches.Add(1)
			return errors.New("one of them is at fault")
		}
		done <- items[0].Lease.ID
		return nil
	}))
	// Where the machine is so slow that all miss their slots, each starts by itself. Then others follow, which have theirs at once again.
	for rounds := 0; batches.Load() == 0; rounds++ {
		require.Less(t, rounds, 20, "no batch had more than one job")
		var all []onceq.Job
		for n := range jobs {
			all = append(all, limitedAlone.Job(charge{n, n}))
		}
		_, err := db.Queue.EnqueueMany(ctx, db.Pool, all)
		require.NoError(t, err)
		for range jobs {
			receive(t, done)
		}
		until(t, db, noJobs)
		until(t, db, `not exists (select from onceq.limit_rates where free_at > clock_timestamp() - interval '200 milliseconds')`)
	}
	s.within(t, 5, 50*time.Millisecond)
	require.NoError(t, db.Check())
}

// Where each round trip takes longer than a job may be late, jobs start all the same, and not faster than the rate.
func TestLimit_RateOfADatabaseThatIsFar(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	const each = 75 * time.Millisecond
	setLimit(t, db, "provider", onceq.Limit{Rate: 10})
	var made atomic.Int64
	far := through(t, db, "far "+db.Pool.Config().ConnConfig.Database, &made, func(_ int64, piece []byte, pass func([]byte)) {
		time.Sleep(each)
		pass(piece)
	})
	const jobs = 12
	for n := range jobs {
		laneEnqueue(t, db.Queue, db.Pool, limitedAlone.Job(charge{n, n}))
	}
	s := &starts{}
	done := make(chan int64, jobs)
	start(t, far, onceq.WorkerConfig{}, limitedAlone.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
		s.add(l)
		done <- l.ID
		return nil
	}))
	for range jobs {
		receive(t, done)
	}
	s.within(t, 2+3, 100*time.Millisecond) // three more for a round trip and what it varies by
	until(t, db, noJobs)
	require.NoError(t, db.Check())
}

// Jobs that nobody claims, because their kind is paused, are not looked at again and again. When it is resumed they start at
// the rate.
func TestLimit_APausedRateIsLeftAlone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := context.Background()
	setLimit(t, db, "provider", onceq.Limit{Rate: 100})
	require.NoError(t, db.Queue.PauseKind(ctx, db.Pool, limitedAlone.Name, ""))
	const jobs = 120
	var all []onceq.Job
	for n := range jobs {
		all = append(all, limitedAlone.Job(charge{n, n}))
	}
	s := &starts{}
	done := make(chan int, jobs)
	start(t, db, onceq.WorkerConfig{}, limitedAlone.Handle(func(_ context.Context, l *onceq.Lease, _ charge) error {
		done <- s.add(l)
		return nil
	}))
	_, err := db.Queue.EnqueueMany(ctx, db.Pool, all)
	require.NoError(t, err)
	until(t, db, `exists (select from onceq.lane_calls where lane = '/provider' and due > statement_timestamp() + interval '1 second')`)
	require.Less(t, repairCount(t, db, `select count(*) from onceq.jobs`), jobs)
	_, err = db.Queue.ResumeKind(ctx, db.Pool, limitedAlone.Name)
	require.NoError(t, err)
	for range jobs {
		receive(t, done)
	}
	s.within(t, 11, 10*time.Millisecond)
	require.NoError(t, db.Check())
}

// After a rate was lowered, the jobs that had their slots start, and the next ones soon after them: they do not wait until as
// many slots have passed at the new rate.
func TestLimit_RateIsLowered(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := context.Background()
	setLimit(t, db, "provider", onceq.Limit{Rate: 1000})
	var all []onceq.Job
	for n := range 1000 {
		all = append(all, limitedAlone.Job(charge{n, n}))
	}
	_, err := db.Queue.EnqueueMany(ctx, db.Pool, all)
	require.NoError(t, err)
	count := func() int { return repairCount(t, db, `select count(*) from onceq.jobs`) }
	eventually(t, "half a second's jobs have slots", func() bool { laneClaim(t, db.Queue, 1); return count() >= 500 })
	setLimit(t, db, "provider", onceq.Limit{Rate: 10})
	const far = `exists (select from onceq.lane_calls where lane = '/provider' and due > statement_timestamp() + interval '10 seconds'
	       + (select count(*) from onceq.jobs where run_at > statement_timestamp()) * interval '100 milliseconds')`
	eventually(t, "a slot at the new rate", func() bool {
		for _, l := range laneClaim(t, db.Queue, 1000) {
			require.NoError(t, l.Complete(ctx, nil))
		}
		require.False(t, sqlOne[bool](t, db, "select "+far))
		return sqlOne[bool](t, db, `select gap > 50000 from onceq.limit_rates`)
	})
	// Jobs that a slow machine made late have new slots, one each tenth of a second.
	require.True(t, sqlOne[bool](t, db, `select free_at < statement_timestamp() + interval '5 seconds'
	       + (select count(*) from onceq.jobs where run_at > statement_timestamp()) * interval '100 milliseconds' from onceq.limit_rates`))
	require.Greater(t, repairCount(t, db, `select count(*) from onceq.job_waits`), 400)
}

// A rate that allows less than a job in the time by which starts may be late costs nothing of the burst: two of two start, together or
// one after the other, and the next one has to wait for one interval and that time.
func TestLimit_BurstOfASlowRate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit onceq.Limit
		burst int
		many  bool
	}{
		"the default, one by one":  {onceq.Limit{Rate: 1, Per: time.Hour}, 2, false},
		"the default, together":    {onceq.Limit{Rate: 1, Per: time.Hour}, 2, true},
		"five, one by one":         {onceq.Limit{Rate: 1, Per: time.Hour, Burst: 5}, 5, false},
		"never two, one by one":    {onceq.Limit{Rate: 1, Per: time.Hour, Burst: 1}, 1, false},
		"with Max, one by one":     {onceq.Limit{Max: 1, Per: time.Hour}, 1, false},
		"with Max, together":       {onceq.Limit{Max: 1, Per: time.Hour}, 1, true},
		"never two, if they could": {onceq.Limit{Rate: 1, Per: time.Hour, Burst: 1}, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			setLimit(t, db, "provider", c.limit)
			require.NoError(t, db.Queue.PauseKind(t.Context(), db.Pool, limitedAlone.Name, "")) // what a slow machine claims late gets another slot
			var jobs []onceq.Job
			for n := range c.burst + 2 {
				jobs = append(jobs, limitedAlone.Job(charge{n, n}))
			}
			if c.many {
				_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
				require.NoError(t, err)
				require.Empty(t, laneClaim(t, db.Queue, 1))
			} else {
				for _, job := range jobs {
					laneEnqueue(t, db.Queue, db.Pool, job)
					require.Empty(t, laneClaim(t, db.Queue, 1))
				}
			}
			until(t, db, `(select count(*) from onceq.jobs) >= $1`, c.burst)
			live, waiting := laneLive(t, db)
			require.Equal(t, []int{c.burst, 2}, []int{live, waiting})
			first := sqlOne[time.Time](t, db, `select min(run_at) from onceq.jobs`)
			next, err := onceqops.New(db.Queue).Limit(t.Context(), db.Pool, "provider")
			require.NoError(t, err)
			late := 100 * time.Millisecond
			if c.burst == 1 && c.limit.Max == 0 {
				late = 0
			}
			require.Equal(t, c.limit.Max, next.Limit.Max)
			require.Equal(t, time.Hour, next.Limit.Per)
			require.WithinDuration(t, first.Add(time.Hour+late), next.NextSlot, time.Millisecond)
		})
	}
}
