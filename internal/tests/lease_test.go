package tests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// sqlOne returns the one value of a statement.
func sqlOne[T any](t testing.TB, db *queuetest.DB, statement string, args ...any) T {
	t.Helper()
	var v T
	require.NoError(t, db.Pool.QueryRow(context.Background(), statement, args...).Scan(&v))
	return v
}

func sqlRun(t testing.TB, db *queuetest.DB, statement string, args ...any) {
	t.Helper()
	_, err := db.Pool.Exec(context.Background(), statement, args...)
	require.NoError(t, err)
}

// add enqueues a job. Its kind is "k" if none is given.
func add(t testing.TB, db *queuetest.DB, j onceq.Job) int64 {
	t.Helper()
	if j.Kind == "" {
		j.Kind = "k"
	}
	if j.Payload == nil {
		j.Payload = 1
	}
	r, err := db.Queue.Enqueue(context.Background(), db.Pool, j)
	require.NoError(t, err)
	return r.ID
}

func addMany(t testing.TB, db *queuetest.DB, n int, j onceq.Job) []int64 {
	t.Helper()
	if j.Kind == "" {
		j.Kind = "k"
	}
	jobs := make([]onceq.Job, n)
	for i := range jobs {
		jobs[i] = j
		if jobs[i].Payload == nil {
			jobs[i].Payload = i
		}
		if j.Key != "" {
			jobs[i].Key = fmt.Sprintf("%s%d", j.Key, i)
		}
	}
	results, err := db.Queue.EnqueueMany(context.Background(), db.Pool, jobs)
	require.NoError(t, err)
	ids := make([]int64, n)
	for i, r := range results {
		ids[i] = r.ID
	}
	return ids
}

func take(t testing.TB, db *queuetest.DB, n int) []*onceq.Lease {
	t.Helper()
	leases, err := db.Queue.Claim(context.Background(), onceq.ClaimOptions{Limit: n})
	require.NoError(t, err)
	return leases
}

func takeOne(t testing.TB, db *queuetest.DB) *onceq.Lease {
	t.Helper()
	leases := take(t, db, 1)
	require.Len(t, leases, 1)
	return leases[0]
}

func idsOf(leases []*onceq.Lease) []int64 {
	ids := make([]int64, len(leases))
	for i, l := range leases {
		ids[i] = l.ID
	}
	return ids
}

func TestClaim_OrderIsPriorityThenDueTimeThenID(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	old := time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC) // the earliest time that Enqueue accepts; Go's zero time is one second earlier
	low := add(t, db, onceq.Job{Priority: onceq.PriorityLow, RunAt: old})
	later := add(t, db, onceq.Job{})
	same := add(t, db, onceq.Job{})
	early := add(t, db, onceq.Job{})
	earliest := add(t, db, onceq.Job{})
	sqlRun(t, db, `update onceq.jobs set run_at = run_at - interval '1 hour' where id = $1`, early)
	sqlRun(t, db, `update onceq.jobs set run_at = $2 where id = $1`, earliest, old)
	high := add(t, db, onceq.Job{Priority: onceq.PriorityHigh})
	add(t, db, onceq.Job{Delay: time.Hour})
	sqlRun(t, db, `update onceq.jobs set run_at = (select run_at from onceq.jobs where id = $1) where id = $2`, later, same)
	require.Equal(t, []int64{high, earliest, early, later}, idsOf(take(t, db, 4)))
	require.Equal(t, []int64{same, low}, idsOf(take(t, db, 10)))
	require.Empty(t, take(t, db, 10))
}

func TestClaim_TwoAtOnceNeverShareAJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 500, onceq.Job{})
	var mu sync.Mutex
	var got []int64
	var claimers sync.WaitGroup
	for range 4 {
		claimers.Go(func() {
			for {
				leases, err := db.Queue.Claim(context.Background(), onceq.ClaimOptions{Limit: 7, Lease: time.Hour})
				mu.Lock()
				got = append(got, idsOf(leases)...)
				done := err != nil || len(got) >= len(ids)
				mu.Unlock()
				if done || t.Context().Err() != nil {
					return
				}
			}
		})
	}
	claimers.Wait()
	require.ElementsMatch(t, ids, got)
}

func TestClaim_PassesOverWhatOthersHaveLocked(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 3, onceq.Job{})
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(t.Context(), `select from onceq.jobs where id = $1 for update`, ids[0])
	require.NoError(t, err)
	require.Equal(t, ids[1:], idsOf(take(t, db, 10)))
}

func TestClaim_KindsAndQueues(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{Kind: "a"})
	b := add(t, db, onceq.Job{Kind: "b"})
	c := add(t, db, onceq.Job{Kind: "b", Queue: "other"})
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Kinds: []string{"b"}, Limit: 10})
	require.NoError(t, err)
	require.Equal(t, []int64{b}, idsOf(leases))
	leases, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "other", Kinds: []string{}, Limit: 10}) // none named: all
	require.NoError(t, err)
	require.Equal(t, []int64{c}, idsOf(leases))
	for _, opts := range []onceq.ClaimOptions{{Limit: -1}, {Limit: 10_001}, {Lease: 1}, {MaxLost: -1}, {MaxLost: 1 << 15}, {Queue: " "}} {
		_, err = db.Queue.Claim(t.Context(), opts)
		var invalid *onceq.InvalidError
		require.ErrorAs(t, err, &invalid, "%+v", opts)
	}
}

// A job of a claim is to be cancelled, and cannot be. The caller gets the others all the same.
func TestClaim_WhatCannotBeEndedKeepsNoOtherJob(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 3, onceq.Job{})
	sqlRun(t, db, `insert into onceq.job_cancels values ($1, now() + interval '1 second')`, ids[1])
	_, err := owner(t, db).Exec(t.Context(), `create function refuse() returns trigger language plpgsql as $$ begin raise 'refused'; end $$;
		create trigger refuse before delete on jobs for each row when (old.id = `+fmt.Sprint(ids[1])+`) execute function refuse()`)
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 3})
	require.NoError(t, err)
	require.Len(t, leases, 2)
	for i, l := range leases {
		require.Equal(t, ids[2*i], l.ID)
		require.NoError(t, l.Complete(t.Context(), db.Pool))
	}
	sqlRun(t, db, `update onceq.jobs set leased_until = now()`)
	_, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 3})
	require.ErrorContains(t, err, "refused", "there is nothing else to return")
}

func TestToken_GrowsOverClaimsExpiriesAndLaterJobsOfAKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var last int64
	grows := func(l *onceq.Lease) {
		t.Helper()
		require.Greater(t, l.Token, last)
		last = l.Token
	}
	job := onceq.Job{Key: "k", Window: onceq.UntilFinished, Payload: 1, Kind: "k"}
	for range 3 {
		id := add(t, db, job)
		grows(takeOne(t, db))
		db.ExpireLease(id)
		l := takeOne(t, db)
		require.Equal(t, 1, l.Lost)
		grows(l)
		require.NoError(t, l.Release(t.Context()))
		l = takeOne(t, db)
		grows(l)
		require.NoError(t, l.Fail(t.Context(), onceq.RetryAfter(0, errors.New("later"))))
		l = takeOne(t, db)
		grows(l)
		require.NoError(t, l.Complete(t.Context(), nil))
		require.Equal(t, last, sqlOne[int64](t, db, `select token from onceq.job_fences`))
	}
}

func TestLease_ExpiredIsClaimedAgainWithoutARescuer(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{})
	l := takeOne(t, db)
	require.Empty(t, take(t, db, 1))
	require.NoError(t, l.Extend(t.Context(), time.Hour))
	db.Advance(59 * time.Minute)
	require.Empty(t, take(t, db, 1))
	db.Advance(2 * time.Minute)
	again := takeOne(t, db)
	require.Equal(t, id, again.ID)
	require.Equal(t, 1, again.Attempt, "a lost lease spends no attempt")
	require.Equal(t, 1, again.Lost)
}

// Every operation under a token that is no longer current is refused.
func TestStale_EveryOperationIsRefused(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "k"} {
		for _, to := range []string{"another holder", "nobody", "a finished job"} {
			t.Run(key+" "+to, func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t)
				id := add(t, db, onceq.Job{Key: key})
				l := takeOne(t, db)
				db.ExpireLease(id)
				other := takeOne(t, db)
				switch to {
				case "nobody":
					require.NoError(t, other.Release(t.Context()))
				case "a finished job":
					require.NoError(t, other.Complete(t.Context(), nil))
				}
				before := sqlOne[string](t, db, `select coalesce(jsonb_agg(j)::text, '') from onceq.jobs j`)
				ctx := t.Context()
				for op, refused := range map[string]error{
					"complete": l.Complete(ctx, nil),
					"extend":   l.Extend(ctx, time.Hour),
					"fail":     l.Fail(ctx, errors.New("x")),
					"snooze":   l.Snooze(ctx, 1),
					"release":  l.Release(ctx),
				} {
					var lost *onceq.LeaseError
					require.ErrorAs(t, refused, &lost, op)
					require.ErrorIs(t, refused, onceq.ErrLeaseLost)
					require.Equal(t, onceq.LeaseError{Op: op, JobID: id, Token: l.Token}, *lost)
				}
				tx, err := db.Pool.Begin(ctx)
				require.NoError(t, err)
				require.ErrorIs(t, l.Complete(ctx, tx), onceq.ErrLeaseLost)
				require.Error(t, tx.Commit(ctx))
				require.Equal(t, before, sqlOne[string](t, db, `select coalesce(jsonb_agg(j)::text, '') from onceq.jobs j`))
			})
		}
	}
}

// ⚠ If a stale completion in a pipeline merely matches no row, the commit behind it goes through.
func TestTrap_StaleCompletionInAPipelineRaisesBeforeTheCommit(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "k"} {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			sqlRun(t, db, `create table effects (n int)`)
			pipeline := func(l *onceq.Lease) error {
				b := &pgx.Batch{}
				b.Queue("begin")
				b.Queue("insert into effects values (1)")
				require.NoError(t, l.CompleteInBatch(b))
				b.Queue("commit")
				return db.Pool.SendBatch(t.Context(), b).Close()
			}
			id := add(t, db, onceq.Job{Key: key})
			l := takeOne(t, db)
			db.ExpireLease(id)
			other := takeOne(t, db)
			err := pipeline(l)
			require.Error(t, err)
			require.True(t, onceq.LeaseLost(err), "%v", err)
			require.Zero(t, sqlOne[int](t, db, `select count(*) from effects`))
			require.NoError(t, pipeline(other))
			require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from effects`))
			require.Zero(t, sqlOne[int](t, db, `select count(*) from onceq.jobs`))
		})
	}
}

func TestLease_AttemptsAndLostLeasesAreCountedApart(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{MaxAttempts: 2})
	for lost := range 3 {
		l := takeOne(t, db)
		require.Equal(t, [2]int{1, lost}, [2]int{l.Attempt, l.Lost})
		db.ExpireLease(id)
	}
	l := takeOne(t, db)
	require.NoError(t, l.Snooze(t.Context(), 1))
	l = takeOne(t, db)
	require.Equal(t, [2]int{1, 0}, [2]int{l.Attempt, l.Lost})
	require.NoError(t, l.Fail(t.Context(), errors.New("one")))
	db.Advance(time.Minute)
	l = takeOne(t, db)
	require.Equal(t, [2]int{2, 0}, [2]int{l.Attempt, l.Lost})
	require.NoError(t, l.Fail(t.Context(), errors.New("two")))
	info, err := db.Queue.Get(t.Context(), db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, info.State)

	id = add(t, db, onceq.Job{})
	for range onceq.DefaultMaxLost {
		takeOne(t, db)
		db.ExpireLease(id)
	}
	require.Empty(t, take(t, db, 1))
	info, err = db.Queue.Get(t.Context(), db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, info.State)
}

// Lost leases count from 0 again when the handler asks for another run, and from 1 when it fails: the job stays one that may
// have ended its process. One that is given back keeps its count. That goes for each way in which a job is given back.
func TestLease_LostLeasesAreSetBackByRunsThatEnd(t *testing.T) {
	t.Parallel()
	overtaking := onceq.Kind[charge]{Name: "charge", Lane: charges.Lane, LaneRule: onceq.Overtake}
	kinds := map[string]*onceq.Kind[charge]{
		"plain": {Name: "charge"}, "in a lane": &charges, "overtaking": &overtaking, "limited": &limitedAlone, "in a lane and limited": &limitedInLane,
	}
	ends := map[string]struct {
		err  func(context.Context, *onceq.Lease) error
		want int
	}{
		"snoozed":           {func(context.Context, *onceq.Lease) error { return onceq.Snooze(1) }, 0},
		"snoozed for long":  {func(context.Context, *onceq.Lease) error { return onceq.Snooze(time.Hour) }, 0},
		"rescheduled":       {func(context.Context, *onceq.Lease) error { return onceq.Reschedule(time.Hour) }, 0},
		"asleep":            {func(ctx context.Context, l *onceq.Lease) error { return onceq.Sleep(ctx, l, "night", time.Hour) }, 0},
		"in flight":         {func(context.Context, *onceq.Lease) error { return &onceq.InFlightError{RetryAfter: time.Hour} }, 0},
		"failed":            {func(context.Context, *onceq.Lease) error { return errors.New("no") }, 1},
		"failed with a day": {func(context.Context, *onceq.Lease) error { return onceq.RetryAfter(24*time.Hour, errors.New("no")) }, 1},
		"panicked":          {func(context.Context, *onceq.Lease) error { panic("no") }, 1},
		"given back":        {nil, 3},
	}
	for form, kind := range kinds {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			for how, end := range ends {
				r, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(charge{}))
				require.NoError(t, err)
				for range 3 {
					laneClaimOne(t, db.Queue, r.ID)
					db.ExpireLease(r.ID)
				}
				if end.err == nil {
					require.NoError(t, laneClaimOne(t, db.Queue, r.ID).Release(t.Context()), how)
				} else {
					ran := db.RunOne(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ charge) error {
						if l.Lost != 3 {
							t.Errorf("%s: %d lost leases", how, l.Lost)
						}
						return end.err(ctx, l)
					}))
					require.Equal(t, r.ID, ran.JobID, how)
				}
				info, err := db.Queue.Get(t.Context(), db.Pool, r.ID)
				require.NoError(t, err)
				require.Equal(t, end.want, info.Lost, how)
				_, err = db.Queue.Cancel(t.Context(), db.Pool, r.ID)
				require.NoError(t, err)
			}
			require.NoError(t, db.Check())
		})
	}
}

// A job whose runs end well in between lives through any number of crashes. One that is only given back in between does not.
func TestLease_CrashesBetweenRunsThatEndWell(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	flows, poison := add(t, db, onceq.Job{}), add(t, db, onceq.Job{Queue: "poison"})
	for range 2 * onceq.DefaultMaxLost {
		takeOne(t, db)
		db.ExpireLease(flows)
		require.NoError(t, takeOne(t, db).Snooze(t.Context(), 1))
	}
	claim := func() []*onceq.Lease {
		leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "poison"})
		require.NoError(t, err)
		return leases
	}
	for range onceq.DefaultMaxLost {
		leases := claim()
		require.Len(t, leases, 1)
		require.NoError(t, leases[0].Release(t.Context()))
		require.Len(t, claim(), 1)
		db.ExpireLease(poison)
	}
	require.Empty(t, claim())
	info, err := db.Queue.Get(t.Context(), db.Pool, poison)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, info.State)
}

// The counters stop before the columns, or the token's bits, overflow.
func TestLease_CountersDoNotOverflow(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	id := add(t, db, onceq.Job{})
	other := add(t, db, onceq.Job{})
	sqlRun(t, db, `update onceq.jobs set claims = 1048575, lost = 32767, holder = 1, leased_until = statement_timestamp() where id = $1`, id)
	require.Equal(t, []int64{other}, idsOf(take(t, db, 5)))
	info, err := db.Queue.Get(t.Context(), db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, info.State)
}

func TestLease_JobsThatLostLeasesAreClaimedOneByOne(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ids := addMany(t, db, 4, onceq.Job{})
	require.Len(t, take(t, db, 2), 2)
	db.ExpireLease(ids[0])
	db.ExpireLease(ids[1])
	require.Equal(t, ids[:1], idsOf(take(t, db, 10)))
	require.Equal(t, ids[1:2], idsOf(take(t, db, 10)))
	require.Equal(t, ids[2:], idsOf(take(t, db, 10)))
}

// A Snooze whose time is 0 or less counts as a second: its job does not run again and again. A Reschedule runs at once.
func TestSnooze_NothingIsASecond(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	later := func(end func(l *onceq.Lease) error) (least, most time.Duration) {
		id := add(t, db, onceq.Job{})
		l := takeOne(t, db)
		require.Equal(t, id, l.ID)
		began := sqlOne[time.Time](t, db, `select clock_timestamp()`)
		require.NoError(t, end(l))
		ended := sqlOne[time.Time](t, db, `select clock_timestamp()`)
		var at time.Time
		require.NoError(t, db.Pool.QueryRow(t.Context(), `delete from onceq.jobs where id = $1 returning run_at`, id).Scan(&at))
		return at.Sub(ended), at.Sub(began)
	}
	for _, d := range []time.Duration{0, -1, -time.Hour} {
		for name, end := range map[string]func(*onceq.Lease) error{
			"returned": func(l *onceq.Lease) error { return l.Fail(t.Context(), onceq.Snooze(d)) },
			"called":   func(l *onceq.Lease) error { return l.Snooze(t.Context(), d) },
		} {
			least, most := later(end)
			require.LessOrEqual(t, least, time.Second, "%s, %s", name, d)
			require.GreaterOrEqual(t, most, time.Second, "%s, %s", name, d)
		}
		least, _ := later(func(l *onceq.Lease) error { return l.Fail(t.Context(), onceq.Reschedule(d)) })
		require.LessOrEqual(t, least, time.Duration(0), "rescheduled, %s", d)
	}
}

func TestFail_WhatAnErrorDoes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for _, c := range []struct {
		err      error
		state    onceq.State
		attempts int
		min, max time.Duration
	}{
		{errors.New("plain"), onceq.StateRetrying, 1, 900 * time.Millisecond, 1100 * time.Millisecond},
		{fmt.Errorf("wrapped: %w", onceq.RetryAfter(time.Hour, errors.New("busy"))), onceq.StateRetrying, 1, time.Hour, time.Hour},
		{onceq.Snooze(time.Minute), onceq.StateDelayed, 0, time.Minute, time.Minute},
		{onceq.Snooze(1), onceq.StateWaiting, 0, 0, 0},
		{onceq.Snooze(1 << 62), onceq.StateDelayed, 0, 876_000 * time.Hour, 876_000 * time.Hour},
		{fmt.Errorf("wrapped: %w", onceq.Fatal(errors.New("no use"))), onceq.StateDead, 1, 0, 0},
		{&onceq.InFlightError{RetryAfter: time.Minute}, onceq.StateDelayed, 0, time.Minute, time.Minute},
		{&onceq.HeldError{Detail: "ask somebody"}, onceq.StateHeld, 0, 0, 0},
		{errors.New("\x00\xff" + strings.Repeat("ä", 9000)), onceq.StateRetrying, 1, 900 * time.Millisecond, 1100 * time.Millisecond},
	} {
		id := add(t, db, onceq.Job{Key: fmt.Sprint(rand.Int64())})
		l := takeOne(t, db)
		require.Equal(t, id, l.ID)
		began := sqlOne[time.Time](t, db, `select clock_timestamp()`)
		require.NoError(t, l.Fail(t.Context(), c.err), "%v", c.err)
		ended := sqlOne[time.Time](t, db, `select clock_timestamp()`)
		info, err := db.Queue.Get(t.Context(), db.Pool, id)
		require.NoError(t, err)
		require.Equal(t, c.state, info.State, "%v", c.err)
		if !c.state.Finished() {
			var attempts int
			var at time.Time
			require.NoError(t, db.Pool.QueryRow(t.Context(), `select attempts, run_at from onceq.jobs where id = $1`, id).Scan(&attempts, &at))
			require.Equal(t, c.attempts, attempts, "%v", c.err)
			require.False(t, at.After(ended.Add(c.max)), "%v: %v after %v", c.err, at, ended)
			if c.min > 0 {
				require.False(t, at.Before(began.Add(c.min)), "%v: %v after %v", c.err, at, began)
			}
			sqlRun(t, db, `update onceq.jobs set run_at = run_at + interval '10 years' where id = $1`, id)
		}
	}
	require.Nil(t, onceq.Fatal(nil))
	require.NoError(t, onceq.RetryAfter(time.Second, nil))
}

func TestDefaultBackoff_GrowsJittersAndEnds(t *testing.T) {
	t.Parallel()
	for attempt := 1; attempt <= 100; attempt++ {
		base := min(24*time.Hour, time.Duration(attempt*attempt*attempt*attempt)*time.Second)
		if attempt > 18 {
			base = 24 * time.Hour
		}
		seen := make(map[time.Duration]bool)
		for range 50 {
			d := onceq.DefaultBackoff(attempt)
			require.GreaterOrEqual(t, d, base-base/10)
			require.LessOrEqual(t, d, base+base/10)
			seen[d] = true
		}
		require.Greater(t, len(seen), 40)
	}
	require.Positive(t, onceq.DefaultBackoff(1<<40))
}

func TestResult_OverItsLimitIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{})
	l := takeOne(t, db)
	var invalid *onceq.InvalidError
	require.ErrorAs(t, l.SetResult(strings.Repeat("x", onceq.MaxResultBytes)), &invalid)
	require.ErrorAs(t, l.SetResult("\x00"), &invalid)
	require.ErrorAs(t, l.SetResult(func() {}), &invalid)
	require.NoError(t, l.SetResult(strings.Repeat("x", onceq.MaxResultBytes-2)))
	require.NoError(t, l.Complete(t.Context(), nil))
}

// The library's own transactions are at READ COMMITTED and may write, whatever the database's defaults are.
func TestIsolation_TheDatabasesDefaultChangesNothing(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level
			}))
			const jobs = 400
			addMany(t, db, jobs, onceq.Job{})
			sqlRun(t, db, `create table effects (job bigint)`)
			var mu sync.Mutex
			done := make(map[int64]bool)
			var claimers sync.WaitGroup
			for range 4 {
				claimers.Go(func() {
					for {
						leases, err := db.Queue.Claim(context.Background(), onceq.ClaimOptions{Limit: 5})
						for _, l := range leases {
							err = errors.Join(err, l.Extend(context.Background(), time.Minute), l.Complete(context.Background(), nil))
						}
						mu.Lock()
						for _, id := range idsOf(leases) {
							done[id] = true
						}
						end := len(done) == jobs
						mu.Unlock()
						if err != nil {
							t.Error(err)
						}
						if end || err != nil {
							return
						}
					}
				})
			}
			claimers.Wait()
			addMany(t, db, 100, onceq.Job{})
			kind := onceq.Kind[int]{Name: "k"}
			ran := db.Drain(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
				var level string
				if err := tx.QueryRow(ctx, `show transaction_isolation`).Scan(&level); err != nil || level != "read committed" {
					return fmt.Errorf("%s, %v", level, err)
				}
				_, err := tx.Exec(ctx, `insert into effects values ($1)`, l.ID)
				return err
			}))
			require.Len(t, ran, 100)
			for _, r := range ran {
				require.Equal(t, onceq.StateCompleted, r.State, "%v", r.Err)
			}
		})
	}
}

func TestQueryModes_ClaimFinishAndWork(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }))
			ctx := t.Context()
			jobs := addMany(t, db, 8, onceq.Job{Key: "k'\\", Metadata: map[string]string{"a": `"\'`}, RunAt: time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)})
			leases := take(t, db, 8)
			require.Equal(t, jobs, idsOf(leases))
			l := leases[0]
			require.Equal(t, map[string]string{"a": `"\'`}, l.Metadata)
			require.NoError(t, l.Extend(ctx, time.Minute))
			require.NoError(t, l.SetResult(`a'\"`))
			require.NoError(t, l.Complete(ctx, nil))
			require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return leases[1].Complete(ctx, tx) }))
			b := &pgx.Batch{}
			require.NoError(t, leases[2].CompleteInBatch(b))
			require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
			require.NoError(t, leases[3].Fail(ctx, onceq.RetryAfter(time.Hour, errors.New(`it's \ "so"`)))) // not due below, however slow the machine is
			require.NoError(t, leases[4].Fail(ctx, onceq.Fatal(errors.New(`it's \ "so"`))))
			require.NoError(t, leases[5].Snooze(ctx, time.Hour))
			require.NoError(t, leases[6].Release(ctx))
			require.NoError(t, leases[7].Release(ctx))
			require.ErrorIs(t, l.Complete(ctx, nil), onceq.ErrLeaseLost)

			add(t, db, onceq.Job{Kind: "lease"})
			add(t, db, onceq.Job{Kind: "tx", Payload: []byte{0, 1, 255}})
			lease, tx, batch := onceq.Kind[int]{Name: "lease"}, onceq.Kind[[]byte]{Name: "tx", Keep: time.Hour}, onceq.Kind[int]{Name: "k"}
			ran := db.Drain(
				lease.Handle(func(_ context.Context, l *onceq.Lease, p int) error { return l.SetResult(p) }),
				tx.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p []byte) error {
					require.Equal(t, []byte{0, 1, 255}, p)
					return l.SetResult(1)
				}),
				batch.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error { return nil }),
			)
			require.Len(t, ran, 4)
			for _, r := range ran {
				require.Equal(t, onceq.StateCompleted, r.State, "%v", r.Err)
			}
		})
	}
}

// ⚠ Somebody may move a job after a claim began, as a rescan does. The claim then takes the job from its new place. If it
// returned fewer jobs than it locked, the worker would take that for the end of what is due.
func TestTrap_ClaimMeetsAJobThatMoves(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	first := add(t, db, onceq.Job{})
	moving := add(t, db, onceq.Job{})
	last := add(t, db, onceq.Job{})

	// A policy acts as a filter. This one waits at the first job, when the claim has its snapshot.
	owner, schema := owner(t, db), pgx.Identifier{db.Schema}.Sanitize()
	role := fmt.Sprintf("claimer_%d", time.Now().UnixNano())
	do := func(statement string, args ...any) {
		_, err := owner.Exec(context.Background(), statement, args...)
		require.NoError(t, err)
	}
	do(`create role ` + role)
	t.Cleanup(func() {
		do(`alter table jobs disable row level security; drop owned by ` + role + `; drop role ` + role)
	})
	do(fmt.Sprintf(`
create function wait_at(id bigint) returns boolean language plpgsql as
$$ begin if id = %d then perform pg_advisory_xact_lock_shared(1); end if; return true; end $$;
grant usage on schema %s to %[3]s;
grant all on all tables in schema %[2]s to %[3]s;
alter table jobs enable row level security;
create policy looking on jobs using (wait_at(id))`, first, schema, role))
	config := owner.Config()
	config.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, `set role `+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
	require.NoError(t, err)

	lock, err := owner.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = lock.Rollback(context.Background()) }()
	_, err = lock.Exec(t.Context(), `select pg_advisory_xact_lock(1)`)
	require.NoError(t, err)
	wait := background(func() ([]*onceq.Lease, error) { return q.Claim(t.Context(), onceq.ClaimOptions{Limit: 10}) })
	require.Eventually(t, func() bool {
		var blocked bool
		const look = `select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`
		require.NoError(t, owner.QueryRow(t.Context(), look).Scan(&blocked))
		return blocked
	}, patience, 2*time.Millisecond, "the claim does not wait")
	do(`update jobs set run_at = run_at + interval '1 microsecond' where id = $1`, moving)
	require.NoError(t, lock.Rollback(t.Context()))

	leases, err := wait()
	require.NoError(t, err)
	var claimed []int64
	for _, l := range leases {
		claimed = append(claimed, l.ID)
	}
	require.ElementsMatch(t, []int64{first, moving, last}, claimed)
	leases, err = q.Claim(t.Context(), onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	require.Empty(t, leases)
}

// The database's clock decides. A process whose own clock is wrong decides nothing by it.
func TestLease_NowIsTheDatabasesTime(t *testing.T) {
	t.Parallel()
	db, shift := trapClock(t)
	shift(72 * time.Hour)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, work.Job(1))
	require.NoError(t, err)
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	now, err := leases[0].Now(t.Context())
	require.NoError(t, err)
	require.WithinDuration(t, time.Now().Add(72*time.Hour), now, time.Hour)
	require.False(t, now.Before(leases[0].CreatedAt))
	require.NoError(t, leases[0].Release(t.Context()))
}

// Nobody else holds the job, so the error of a second completion must not say that somebody does.
func TestComplete_ASecondOneSaysThatThereWasAFirst(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "k"} {
		db, seen := eventDB(t)
		add(t, db, onceq.Job{Key: key})
		l := takeOne(t, db)
		require.NoError(t, l.Complete(t.Context(), nil))
		err := l.Complete(t.Context(), nil)
		var again *onceq.LeaseError
		require.ErrorAs(t, err, &again)
		require.True(t, again.Completed)
		require.ErrorContains(t, err, "was already completed under token")
		seen.want(t, onceq.EventEnqueued, onceq.EventClaimed, onceq.EventCompleted)
	}
}

// After a rollback it is as if there had been no completion, whichever of the two comes first.
func TestComplete_AfterARollback(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{Key: "k"})
	l := takeOne(t, db)
	undone := errors.New("undone")
	require.ErrorIs(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		require.NoError(t, l.Complete(t.Context(), tx))
		return undone
	}), undone)
	require.NoError(t, l.Complete(t.Context(), nil))
}

// The worker completes the job of a transactional handler. If the handler could complete it as well, the worker's own
// completion would find no job, and the handler would fail although it did well.
func TestCompleteInBatch_IsRefusedWhereTheWorkerCompletes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	sqlRun(t, db, `create table effects (n int)`)
	kind := onceq.Kind[int]{Name: "k", MaxAttempts: 1}
	id := add(t, db, onceq.Job{MaxAttempts: 1})
	var refused error
	db.Drain(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
		b := &pgx.Batch{}
		b.Queue(`insert into effects values (1)`)
		refused = l.CompleteInBatch(b)
		return tx.SendBatch(ctx, b).Close()
	}))
	require.ErrorContains(t, refused, "return nil to complete it")
	require.Equal(t, 1, sqlOne[int](t, db, `select count(*) from effects`))
	_, err := db.Queue.Get(t.Context(), db.Pool, id)
	require.ErrorIs(t, err, onceq.ErrNotFound, "it is completed")
}

// What a handler returns after it has completed its job changes nothing, and is logged.
func TestHandle_AnErrorAfterTheCompletionIsLogged(t *testing.T) {
	t.Parallel()
	db, seen := eventDB(t)
	kind := onceq.Kind[int]{Name: "k"}
	id := add(t, db, onceq.Job{})
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		require.NoError(t, l.Complete(ctx, nil))
		return errors.New("the receipt was not mailed")
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	_, err = db.Queue.Get(t.Context(), db.Pool, id)
	require.ErrorIs(t, err, onceq.ErrNotFound, "it is completed")
	seen.mu.Lock()
	defer seen.mu.Unlock()
	require.Contains(t, seen.log.String(), "a handler returned an error after it had completed its job")
	require.Contains(t, seen.log.String(), "the receipt was not mailed")
}

// A claim whose connection breaks after its begin returns an error in every query mode. It once ended the process.
func TestClaim_OnAConnectionThatBreaksBehindBegin(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			var armed, cut atomic.Bool
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode, c.MaxConns = mode, 1
				dial := c.ConnConfig.DialFunc
				c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
					conn, err := dial(ctx, network, address)
					return &cutBehindBegin{Conn: conn, armed: &armed, cut: &cut}, err
				}
			}))
			_, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
			require.NoError(t, err)
			armed.Store(true)
			_, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
			require.Error(t, err)
			require.True(t, cut.Load(), "the answer to begin came, and nothing behind it")
			_, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
			require.NoError(t, err)
		})
	}
}

// cutBehindBegin is a connection that closes, once it is armed, after the answer to a BEGIN.
type cutBehindBegin struct {
	net.Conn
	armed, cut *atomic.Bool
	over       bool
}

func (c *cutBehindBegin) Read(b []byte) (int, error) {
	if c.over {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(b)
	const answer = "BEGIN\x00"
	if i := bytes.Index(b[:n], []byte(answer)); i >= 0 && c.armed.CompareAndSwap(true, false) {
		c.over = true
		c.cut.Store(true)
		return i + len(answer), nil
	}
	return n, err
}
