package tests

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// What people wake up for, and which queue, kind and job it is about.
func TestHealth_NamesTheCause(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	q := db.Queue
	for _, j := range []onceq.Job{{Queue: "imagse", Kind: "resize"}, {Queue: "images", Kind: "resize"}, {Queue: "images", Kind: "reszie"}, {Queue: "mail", Kind: "send"}} {
		j.Payload = 1
		add(t, db, j)
	}
	sqlRun(t, db, `update onceq.jobs set run_at = now() - interval '5 minutes', lost = case when queue = 'images' and kind = 'resize' then 3 else 0 end,
  claims = case when queue = 'images' and kind = 'resize' then 3 else 0 end`)
	sqlRun(t, db, `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
select n::bigint << 32, 60000000, now() - n * interval '1 hour', now() - stale * interval '1 hour', n, 1, 'web', version, '{"images": 3, "mail": 3}', '{resize,send}'
  from (values (1, 'v2', 0), (2, 'v1', 0), (3, 'v0', 1)) w (n, version, stale)`)
	found := func() map[string]onceqops.Finding {
		t.Helper()
		list, err := onceqops.New(q).Health(t.Context())
		require.NoError(t, err)
		all := make(map[string]onceqops.Finding)
		for _, f := range list {
			all[f.What+" "+f.Queue] = f
		}
		return all
	}
	all := found()
	f := all["waiting imagse"]
	require.Contains(t, f.Detail, "no worker serves this queue")
	require.True(t, f.Severe)
	require.Equal(t, "images", f.Meant)
	f = all["waiting mail"]
	require.Contains(t, f.Detail, "none is running although 2 workers serve the queue")
	require.Empty(t, f.Meant)
	f = all["kind images"]
	require.Equal(t, "reszie", f.Kind)
	require.Equal(t, "resize", f.Meant)
	require.NotContains(t, all, "kind mail")
	require.NotContains(t, all, "kind imagse")
	f = all["crashes images"]
	require.EqualValues(t, 2, f.JobID)
	require.Contains(t, f.Detail, "has lost 3 leases")
	f = all["versions "]
	require.Contains(t, f.Detail, "workers with version v2 of the library have run for 1h0m0s, and others still have another: process 2 on web (v1)")
	require.Len(t, all, 6, "%v", all)

	require.NoError(t, q.PauseKind(t.Context(), db.Pool, "reszie", "why"))
	sqlRun(t, db, `update onceq.workers set started_at = now() where version = 'v2'`) // a deploy is going on
	all = found()
	require.NotContains(t, all, "kind images")
	require.NotContains(t, all, "versions ")
	require.False(t, all["waiting mail"].Severe)
}

// A queue without a worker that is no slip of the pen, one whose workers are busy, and a job that crashes and is to be retried.
func TestHealth_OtherCauses(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for _, queue := range []string{"onceqcron", "ab", "busy", "busy", "later"} {
		add(t, db, onceq.Job{Queue: queue})
	}
	sqlRun(t, db, `update onceq.jobs set run_at = now() - interval '5 minutes' where queue <> 'later'`)
	sqlRun(t, db, `update onceq.jobs set leased_until = now() + interval '1 hour', claims = 1, holder = 1 where id = (select max(id) from onceq.jobs where queue = 'busy')`)
	sqlRun(t, db, `update onceq.jobs set lost = 2, claims = 2 where queue = 'later'`)
	sqlRun(t, db, `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (1::bigint << 32, 60000000, now(), now(), 1, 1, 'web', 'v1', '{"busy": 1, "later": 1, "ac": 1}', '{k}')`)
	list, err := onceqops.New(db.Queue).Health(t.Context())
	require.NoError(t, err)
	all := make(map[string]onceqops.Finding)
	for _, f := range list {
		all[f.What+" "+f.Queue] = f
	}
	require.Contains(t, all["waiting onceqcron"].Advice, "ticks of schedules")
	require.Empty(t, all["waiting ab"].Meant, "too short to be a slip")
	require.Contains(t, all["waiting busy"].Detail, "1 waits for its first attempt, and 1 is with workers")
	require.Contains(t, all["waiting busy"].Detail, "; none has ended in the last 5 minutes")
	require.False(t, all["waiting busy"].Severe)
	require.WithinDuration(t, sqlOne[time.Time](t, db, `select min(run_at) from onceq.jobs where queue = 'busy'`), all["waiting busy"].Since, 2*time.Minute)
	require.Contains(t, all["crashes later"].Detail, "has lost 2 leases")

	counted(t, db, "k", 2*time.Minute, 5, 0, 0)
	sqlRun(t, db, `update onceq.job_counts set queue = 'busy'`)
	waits := findings(t, db, "waiting")
	i := slices.IndexFunc(waits, func(f onceqops.Finding) bool { return f.Queue == "busy" })
	require.Contains(t, waits[i].Detail, "; 1 a minute have ended in the last 5 minutes, so without new jobs it is empty in 2m0s")
}

// A kind without a handler is one finding, and not one more that says to start workers, unless other jobs wait too.
func TestHealth_AKindWithoutAHandlerIsOneFinding(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	add(t, db, onceq.Job{Kind: "reszie"})
	running := add(t, db, onceq.Job{Kind: "resize"})
	sqlRun(t, db, `update onceq.jobs set run_at = now() - interval '5 minutes'`)
	sqlRun(t, db, `update onceq.jobs set leased_until = now() + interval '1 hour', claims = 1, holder = 1 where id = $1`, running)
	add(t, db, onceq.Job{Kind: "resize"}) // has just come
	sqlRun(t, db, `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (1::bigint << 32, 60000000, now(), now(), 1, 1, 'web', 'v1', '{"default": 1}', '{resize}')`)
	found := func() (all []string) {
		t.Helper()
		list, err := onceqops.New(db.Queue).Health(t.Context())
		require.NoError(t, err)
		for _, f := range list {
			all = append(all, f.What+" "+f.Kind)
		}
		return all
	}
	require.Equal(t, []string{"kind reszie"}, found())

	// A job that a worker could take has waited too.
	other := add(t, db, onceq.Job{Kind: "resize"})
	sqlRun(t, db, `update onceq.jobs set run_at = now() - interval '2 minutes' where id = $1`, other)
	require.Equal(t, []string{"kind reszie", "waiting "}, found())

	// Such a job may stand behind those that were looked at.
	sqlRun(t, db, `update onceq.jobs set run_at = now() where id = $1`, other)
	require.Equal(t, []string{"kind reszie"}, found())
	many := make([]onceq.Job, 199)
	for i := range many {
		many[i] = onceq.Job{Kind: "reszie", Payload: i}
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, many)
	require.NoError(t, err)
	require.Equal(t, []string{"kind reszie", "waiting "}, found())
}

// Lanes go on only where a worker runs that lets jobs in.
func TestHealth_LanesThatNobodyLooksAt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	k := onceq.Kind[int]{Name: "book", Lane: func(int) string { return "7" }}
	repairEnqueue(t, db, k.Job(1))
	lanes := func() (all []onceqops.Finding) {
		list, err := onceqops.New(db.Queue).Health(t.Context())
		require.NoError(t, err)
		for _, f := range list {
			if f.What == "lane" {
				all = append(all, f)
			}
		}
		return all
	}
	require.Empty(t, lanes())
	sqlRun(t, db, `update onceq.lane_calls set due = due - interval '5 minutes' where slot >= 0`)
	require.Len(t, lanes(), 1)
	require.Contains(t, lanes()[0].Detail, `lane "book/7"`)
	start(t, db, onceq.WorkerConfig{}, k.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	eventually(t, "the lane to go on", func() bool { return len(lanes()) == 0 })
}

// Jobs wait for limits that nobody has set, perhaps because their names are spelt wrong where they are set.
func TestHealth_LimitsThatNobodyHasSet(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	for _, limit := range []string{"bank", "bank", "bank", "mail/7", "mail/8", "sms", "tax"} {
		add(t, db, onceq.Job{Kind: "k", Payload: 1, Limit: limit})
	}
	add(t, db, onceq.Job{Kind: "k", Payload: 1, Limit: "bank", Delay: time.Hour})
	add(t, db, onceq.Job{Kind: "k", Payload: 1, Lane: "a"})
	require.NoError(t, q.SetLimit(ctx, db.Pool, "sms", onceq.Limit{AtOnce: 1}))
	require.NoError(t, q.SetLimit(ctx, db.Pool, "mail/", onceq.Limit{AtOnce: 1}))
	unset := func() (all []onceqops.Finding) {
		list, err := onceqops.New(q).Health(ctx)
		require.NoError(t, err)
		for _, f := range list {
			if f.What == "limit" {
				all = append(all, f)
			}
		}
		return all
	}
	require.Empty(t, unset(), "they have only begun to wait")
	sqlRun(t, db, `update onceq.job_waits set run_at = run_at - interval '5 minutes'`)
	all := unset()
	require.Len(t, all, 1)
	require.False(t, all[0].Severe)
	require.Equal(t, `jobs wait for limits that nobody has set, and so one job of each runs at a time: "bank" (3 jobs), "tax" (1 job)`, all[0].Detail)
	require.NoError(t, q.SetLimit(ctx, db.Pool, "bank", onceq.Limit{Rate: 10}))
	require.Equal(t, `jobs wait for limits that nobody has set, and so one job of each runs at a time: "tax" (1 job)`, unset()[0].Detail)
	require.NoError(t, q.SetLimit(ctx, db.Pool, "tax", onceq.Limit{}))
	require.Contains(t, unset()[0].Detail, `limit "tax" lets no job start`)
	require.True(t, unset()[0].Severe)
}

// A handler that hangs keeps the others of its lane, or of its limit, from running.
// Where the lease has run out, no handler hangs.
func TestHealth_ALeaseThatHasRunOutIsNoHangingHandler(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	lane := onceq.Kind[int]{Name: "book", Lane: func(int) string { return "7" }}
	add(t, db, lane.Job(1))
	add(t, db, lane.Job(2))
	require.Len(t, must[[]*onceq.Lease](t)(db.Queue.Claim(t.Context(), onceq.ClaimOptions{})), 1)
	sqlRun(t, db, `update onceq.jobs set progress = jsonb_build_object('claims', claims, 'since', now() - interval '10 minutes'), leased_until = now() + interval '1 hour'`)
	sqlRun(t, db, `update onceq.job_waits set run_at = now() - interval '5 minutes'`)
	hangs := func() (n int) {
		for _, f := range must[[]onceqops.Finding](t)(onceqops.New(db.Queue).Health(t.Context())) {
			if f.What == "hang" {
				n++
			}
		}
		return n
	}
	require.Equal(t, 1, hangs())
	sqlRun(t, db, `update onceq.jobs set leased_until = now() - interval '1 minute'`)
	require.Zero(t, hangs())
}

func TestHealth_AHandlerThatHoldsALane(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	lane := onceq.Kind[int]{Name: "book", Timeout: onceq.NoTimeout, Lane: func(int) string { return "7" }}
	limit := onceq.Kind[int]{Name: "call", Timeout: onceq.NoTimeout, Limit: func(int) string { return "bank" }}
	var ids []int64
	for range 3 {
		for _, k := range []onceq.Kind[int]{lane, limit} {
			ids = append(ids, add(t, db, k.Job(1)))
		}
	}
	hangs := func() (all []onceqops.Finding) {
		list, err := onceqops.New(db.Queue).Health(t.Context())
		require.NoError(t, err)
		for _, f := range list {
			if f.What == "hang" {
				all = append(all, f)
			}
		}
		return all
	}
	ran := make(chan struct{}, 6)
	hang := func(ctx context.Context, _ *onceq.Lease, _ int) error {
		ran <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	start(t, db, onceq.WorkerConfig{Lease: time.Hour}, lane.Handle(hang), limit.Handle(hang)) // no beat writes progress meanwhile
	<-ran
	<-ran
	require.Empty(t, hangs(), "they have only begun")
	sqlRun(t, db, `update onceq.jobs set progress = jsonb_build_object('claims', claims, 'since', now() - interval '10 minutes')`)
	require.Empty(t, hangs(), "the others have only begun to wait")
	sqlRun(t, db, `update onceq.job_waits set run_at = now() - interval '5 minutes'`)
	all := hangs()
	require.Len(t, all, 2)
	for i, f := range all {
		require.Contains(t, f.Detail, []string{`limit "bank" is full`, `lane "book/7" is full`}[i], "%v", all)
		require.Contains(t, f.Detail, "in process ")
		require.Contains(t, f.Detail, "and 2 jobs wait for it")
		require.Equal(t, ids[1-i], f.JobID)
	}
	require.NoError(t, db.Queue.SetLaneLimit(t.Context(), db.Pool, "book", "7", 3)) // with 2, the hanging one would still keep another out
	eventually(t, "the lane's other jobs", func() bool { return len(hangs()) == 1 })
}
