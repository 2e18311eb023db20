package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func TestState(t *testing.T) {
	t.Parallel()
	for state, want := range map[onceq.State]struct {
		name     string
		finished bool
	}{
		0: {"unknown", false}, onceq.StateWaiting: {"waiting", false}, onceq.StateDelayed: {"delayed", false}, onceq.StateRunning: {"running", false},
		onceq.StateRetrying: {"retrying", false}, onceq.StateCompleted: {"completed", true}, onceq.StateDead: {"dead", true}, onceq.StateCancelled: {"cancelled", true},
		onceq.StateHeld: {"held", true},
	} {
		require.Equal(t, want.name, state.String())
		require.Equal(t, want.finished, state.Finished(), want.name)
	}
	require.Equal(t, "State(-1)", onceq.State(-1).String())
	require.Equal(t, "State(9)", onceq.State(9).String())
}

func TestKind_JobHasWhatTheKindSays(t *testing.T) {
	t.Parallel()
	type mail struct {
		User      int
		Workspace string
		Subject   string
	}
	kind := onceq.Kind[mail]{
		Name: "welcome", Queue: "mail", Window: time.Minute, Priority: onceq.PriorityLow, MaxAttempts: 4, Fields: []string{"User"},
		Key:   func(m mail) string { return fmt.Sprintf("welcome:%d", m.User) },
		Scope: func(m mail) string { return m.Workspace },
	}
	db := enqNew(t)
	first := enqOne(t, db, db.Pool, kind.Job(mail{1, "w", "Hello"}))
	second := enqOne(t, db, db.Pool, kind.Job(mail{1, "w", "Good morning"}))
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, second)
	require.Equal(t, `["welcome", "mail", "w", "welcome:1", 1, 4, {"User": 1, "Subject": "Hello", "Workspace": "w"}, 60000]`,
		enqGet[string](t, db.Pool, `select jsonb_build_array(j.kind, j.queue, j.scope, j.key, j.priority, j.max_attempts, j.payload, f.lifetime)::text
			from onceq.jobs j join onceq.job_fences f using (scope, key)`))

	// A job may override its kind. A kind without Key does not use its Scope.
	job := kind.Job(mail{2, "w", ""})
	job.Delay = time.Hour
	require.Equal(t, onceq.StateDelayed, enqOne(t, db, db.Pool, job).State)
	unkeyed := onceq.Kind[mail]{Name: "plain", Scope: func(m mail) string { return m.Workspace }}
	require.False(t, enqOne(t, db, db.Pool, unkeyed.Job(mail{})).Duplicate)
}

func TestKind_PayloadsOfEverySort(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	type named []byte // encoding/json encodes it as base64
	for _, c := range []struct {
		job    onceq.Job
		json   string
		asByte []byte
	}{
		{onceq.Kind[int]{Name: "k"}.Job(7), `7`, nil},
		{onceq.Kind[string]{Name: "k"}.Job("<é>"), `"<é>"`, nil},
		{onceq.Kind[*int]{Name: "k"}.Job(nil), `null`, nil},
		{onceq.Kind[any]{Name: "k"}.Job(nil), `null`, nil},
		{onceq.Kind[struct{}]{Name: "k"}.Job(struct{}{}), `{}`, nil},
		{onceq.Kind[json.RawMessage]{Name: "k"}.Job(nil), `null`, nil},
		{onceq.Kind[json.RawMessage]{Name: "k"}.Job(json.RawMessage(`[1.50]`)), `[1.50]`, nil},
		{onceq.Kind[named]{Name: "k"}.Job(named("a")), `"YQ=="`, nil},
		{onceq.Kind[time.Time]{Name: "k"}.Job(time.Unix(0, 0).UTC()), `"1970-01-01T00:00:00Z"`, nil},
		{onceq.Kind[[]byte]{Name: "k"}.Job([]byte{0, 255}), ``, []byte{0, 255}},
		{onceq.Kind[[]byte]{Name: "k"}.Job(nil), ``, []byte{}},
	} {
		enqOne(t, db, db.Pool, c.job)
		l := enqClaim(t, db)
		require.Equal(t, c.json, string(l.Payload))
		require.Equal(t, c.asByte, l.Bytes)
	}
}

// A handler of bytes does not get none in place of JSON.
func TestKind_BytesForAJobOfJSON(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	raw := onceq.Kind[[]byte]{Name: "webhook"}
	add(t, db, onceq.Job{Kind: "webhook", Payload: json.RawMessage(`{"id": 1}`)})
	h := raw.Handle(func(context.Context, *onceq.Lease, []byte) error { panic("the handler was called") })
	checked, err := onceqops.New(db.Queue).CheckPayloads(t.Context(), h)
	require.NoError(t, err)
	require.Len(t, checked, 1)
	require.Equal(t, 1, checked[0].Failed, "%+v", checked)
	ran := db.RunOne(h)
	require.Equal(t, onceq.StateRetrying, ran.State)
	require.ErrorContains(t, ran.Err, `of kind "webhook" carries JSON, its handler wants bytes`)
	enqOne(t, db, db.Pool, raw.Job(nil))
	require.Equal(t, onceq.StateCompleted, db.RunOne(raw.Handle(func(context.Context, *onceq.Lease, []byte) error { return nil })).State)
}

func TestJob_WindowsAreMillisecondsAndNeverShorterThanAsked(t *testing.T) {
	t.Parallel()
	db := enqNew(t)
	for window, want := range map[time.Duration]int64{
		0: 86_400_000, onceq.UntilFinished: 0, onceq.Forever: -1, 1: 1, time.Millisecond: 1, 1500 * time.Microsecond: 2, time.Second: 1000,
	} {
		r := enqOne(t, db, db.Pool, onceq.Job{Kind: "k", Key: fmt.Sprint(int64(window)), Window: window})
		require.Equal(t, want, enqGet[int64](t, db.Pool, `select lifetime from onceq.job_fences where job_id = $1`, r.ID), "%s", window)
	}
}

// During a deploy, an older worker must not do half of what a newer producer asks for.
func TestKind_RefuseUnknownFields(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	type v1 struct{ Order int }
	type v2 struct{ Order, Discount int }
	older, newer := onceq.Kind[v1]{Name: "charge", MaxAttempts: 3, RefuseUnknownFields: true}, onceq.Kind[v2]{Name: "charge", MaxAttempts: 3}
	lenient := older
	lenient.RefuseUnknownFields = false
	never := func() error { panic("the handler was called") }
	for name, h := range map[string]onceq.Handler{
		"lease": older.Handle(func(context.Context, *onceq.Lease, v1) error { return never() }),
		"tx":    older.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, v1) error { return never() }),
		"batch": older.HandleBatch(5, func(context.Context, pgx.Tx, []onceq.Item[v1]) error { return never() }),
	} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, newer.Job(v2{7, 100}))
		require.NoError(t, err)
		ran := db.RunOne(h)
		require.Equal(t, onceq.StateRetrying, ran.State, name)
		require.ErrorContains(t, ran.Err, `"Discount"`, name)
		require.NotContains(t, ran.Err.Error(), "100", name)
		db.Advance(time.Hour)
		var got v2
		ran = db.RunOne(newer.Handle(func(_ context.Context, _ *onceq.Lease, p v2) error { got = p; return nil }))
		require.Equal(t, onceq.StateCompleted, ran.State, name)
		require.Equal(t, v2{7, 100}, got)
	}
	for _, h := range []onceq.Handler{
		older.Handle(func(_ context.Context, _ *onceq.Lease, p v1) error { require.Equal(t, v1{7}, p); return nil }),
		lenient.Handle(func(_ context.Context, _ *onceq.Lease, p v1) error { require.Equal(t, v1{7}, p); return nil }),
	} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, older.Job(v1{7}))
		require.NoError(t, err)
		require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
	}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, newer.Job(v2{7, 100}))
	require.NoError(t, err)
	require.Equal(t, onceq.StateCompleted, db.RunOne(lenient.Handle(func(context.Context, *onceq.Lease, v1) error { return nil })).State)
}

// Times are rounded as they are stored before they are checked, so that each that is accepted encodes as JSON, in every zone; and a
// lease that would never end is a mistake in units.
func TestTimes_AreCheckedAsTheyAreStored(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var bad *onceq.InvalidError
	for _, at := range []time.Time{
		time.Date(9999, 12, 31, 23, 59, 59, 999_999_900, time.UTC),
		time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC), // which SQL rounds into the year 10000
		time.Date(9999, 12, 31, 23, 59, 59, 999_000_001, time.UTC),
		time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(0, 12, 31, 23, 0, 0, 0, time.UTC),
		time.Unix(math.MaxInt64, 0), // which Before and After take for a time long ago
		time.Unix(math.MinInt64, 0),
	} {
		_, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", RunAt: at})
		require.ErrorAs(t, err, &bad, at)
		require.Equal(t, "RunAt", bad.Field)
		for _, f := range []onceqops.Filter{{CreatedFrom: at}, {CreatedBefore: at}} {
			_, err = onceqops.New(q).List(ctx, db.Pool, f)
			require.ErrorAs(t, err, &bad, at)
		}
	}
	for _, at := range []time.Time{
		time.Date(9999, 12, 31, 23, 59, 59, 999_000_000, time.UTC),
		time.Date(1, 1, 1, 0, 0, 0, 1, time.UTC),
	} {
		r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", RunAt: at})
		require.NoError(t, err)
		info, err := q.Get(ctx, db.Pool, r.ID)
		require.NoError(t, err)
		_, err = json.Marshal(info)
		require.NoError(t, err)
		if at.Year() > 1 { // a time in the past means at once
			require.WithinDuration(t, at, info.RunAt, time.Millisecond)
		}
	}

	long := time.Duration(math.MaxInt64)
	handle := func(context.Context, *onceq.Lease, int) error { return nil }
	kind := onceq.Kind[int]{Name: "other", Queue: "other"}
	_, err := q.Enqueue(ctx, db.Pool, kind.Job(1))
	require.NoError(t, err)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Queue: "other"})
	require.NoError(t, err)
	c, err := q.Fence(onceq.FenceSpec{Key: "one"})
	require.NoError(t, err)
	held, err := c.Claim(ctx, nil)
	require.NoError(t, err)
	for name, call := range map[string]func() error{
		"WorkerConfig.Lease": func() error {
			_, err := onceq.NewWorker(q, onceq.WorkerConfig{Lease: long}, kind.Handle(handle))
			return err
		},
		"ClaimOptions.Lease": func() error { _, err := q.Claim(ctx, onceq.ClaimOptions{Lease: long}); return err },
		"Lease":              func() error { _, err := q.Fence(onceq.FenceSpec{Key: "k", Lease: long}); return err },
		"EffectTimeout": func() error {
			_, err := onceq.Once(ctx, leases[0], "e", func(context.Context, string) (int, error) { return 0, nil }, onceq.EffectTimeout(long))
			return err
		},
		"Extend": func() error { return errors.Join(leases[0].Extend(ctx, long), held.Extend(ctx, long)) },
	} {
		require.ErrorAs(t, call(), &bad, name)
		require.Equal(t, name, bad.Field)
		require.Contains(t, call().Error(), long.String(), name)
	}
}

// Every other time may be the longest that there is: it is stored, waited for and added to another one without running over.
func TestTimes_TheLongestOnes(t *testing.T) {
	t.Parallel()
	const long = time.Duration(math.MaxInt64)
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	var bad *onceq.InvalidError
	_, err := onceq.NewReaper(q, onceq.ReaperConfig{Every: long})
	require.ErrorAs(t, err, &bad)
	require.Equal(t, "ReaperConfig.Every", bad.Field)

	ran := make(chan string, 10)
	kind := func(name string) onceq.Kind[int] {
		return onceq.Kind[int]{Name: name, Timeout: long, Window: long, Keep: long}
	}
	w := start(t, db, onceq.WorkerConfig{ShutdownTimeout: long},
		kind("plain").Handle(func(ctx context.Context, _ *onceq.Lease, _ int) error { ran <- "plain"; return ctx.Err() }),
		kind("tx").HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, _ int) error {
			_, err := tx.Exec(ctx, `select 1`)
			ran <- "tx"
			return err
		}),
		kind("sleeps").Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			ran <- "sleeps"
			return onceq.Sleep(ctx, l, "long", long)
		}),
		kind("awaits").Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			ran <- "awaits"
			ok, err := l.Await(ctx, "scope", "key", long)
			require.False(t, ok)
			return err
		}))
	names := []string{"plain", "tx", "sleeps", "awaits"}
	for _, name := range names {
		job := kind(name).Job(1)
		job.Key, job.Timeout = name, long
		_, err := q.Enqueue(ctx, db.Pool, job)
		require.NoError(t, err)
	}
	require.ElementsMatch(t, names, []string{receive(t, ran), receive(t, ran), receive(t, ran), receive(t, ran)})
	until(t, db, `(select count(*) = 2 and bool_and(leased_until is null) from onceq.jobs)`)
	require.NoError(t, w.stop())
	require.Zero(t, w.count(onceq.EventFailed))

	r, err := onceq.NewReaper(q, onceq.ReaperConfig{Every: 24 * time.Hour, Grace: long})
	require.NoError(t, err)
	done, err := r.RunOnce(ctx)
	require.NoError(t, err)
	require.Zero(t, done.Fences)
	require.ErrorAs(t, q.SetLimit(ctx, db.Pool, "slow", onceq.Limit{Rate: 1, Per: long}), &bad)
}

// What says nothing without something else is refused, and what no job of a kind could be enqueued with, where the kind is first seen.
func TestMistakes_OfAKindAreSaidEarly(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	var bad *onceq.InvalidError
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Window: time.Hour})
	require.ErrorAs(t, err, &bad)
	require.Equal(t, "Window", bad.Field)
	none := func(int) string { return "" }
	for field, kind := range map[string]onceq.Kind[int]{
		"Kind.LaneFamily":  {Name: "a/b", Lane: none},
		"Kind.LaneRule":    {Name: "k", Lane: none, LaneRule: 8},
		"Kind.Lane":        {Name: "k", LaneRule: onceq.StopLane},
		"Kind.Window":      {Name: "k", Window: -3},
		"Kind.Priority":    {Name: "k", Priority: 5},
		"Kind.MaxAttempts": {Name: "k", MaxAttempts: -1},
		"Kind.Name":        {Name: ""},
		"Kind.Queue":       {Name: "k", Queue: " "},
	} {
		_, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
		require.ErrorAs(t, err, &bad, field)
		require.Equal(t, field, bad.Field)
	}
	kind := onceq.Kind[int]{Name: "a/b", Lane: none}
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1)) // although this job has no lane
	require.ErrorAs(t, err, &bad)
	require.Equal(t, "Kind.LaneFamily", bad.Field)
}

// A job's own time-out goes wherever the job goes, and people see it there.
func TestJob_KeepsItsTimeout(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	is := func(id int64, state onceq.State, want time.Duration) {
		t.Helper()
		job := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
		require.Equal(t, fmt.Sprint(state, want), fmt.Sprint(job.State, job.Timeout))
		inView := sqlOne[*string](t, db, `select timeout from onceq.v_jobs where id = $1`, id)
		switch want {
		case 0:
			require.Nil(t, inView)
		case onceq.NoTimeout:
			require.Equal(t, "none", *inView)
		default:
			require.Equal(t, fmt.Sprintf("%dms", want.Milliseconds()), *inView)
		}
	}
	const own = 90 * time.Second
	claim := func() *onceq.Lease {
		t.Helper()
		leases := must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Queue: "other"}))
		require.Len(t, leases, 1)
		return leases[0]
	}
	id := add(t, db, onceq.Job{Key: "a", Timeout: own, Delay: time.Hour})
	is(id, onceq.StateDelayed, own)
	require.True(t, must[bool](t)(onceqops.New(q).Move(ctx, db.Pool, id, "other")))
	is(id, onceq.StateDelayed, own)
	wantState(t, onceq.StateWaiting)(onceqops.New(q).Retry(ctx, db.Pool, id))
	is(id, onceq.StateWaiting, own)
	lease := claim()
	why := must[onceqops.Explanation](t)(onceqops.New(q).Explain(ctx, db.Pool, id))
	require.Equal(t, own, why.Job.Timeout)
	require.Contains(t, why.String(), "; its own time-out ends its handler after 1m30s")
	require.NoError(t, lease.Fail(ctx, errors.New("once more")))
	is(id, onceq.StateRetrying, own)
	wantState(t, onceq.StateRetrying)(onceqops.New(q).Retry(ctx, db.Pool, id))
	require.NoError(t, claim().Fail(ctx, onceq.Fatal(errors.New("no"))))
	is(id, onceq.StateDead, own)
	wantState(t, onceq.StateWaiting)(onceqops.New(q).Redrive(ctx, db.Pool, id))
	is(id, onceq.StateWaiting, own)
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, id))
	is(id, onceq.StateCancelled, own)

	lane := []onceq.Job{{Kind: "k", Lane: "x", Timeout: time.Minute}, {Kind: "k", Lane: "x", Timeout: onceq.NoTimeout}, {Kind: "k"}, {Kind: "k", Timeout: 1500 * time.Microsecond}}
	all := must[[]onceq.Result](t)(q.EnqueueMany(ctx, db.Pool, lane))
	for i, want := range []time.Duration{time.Minute, onceq.NoTimeout, 0, 2 * time.Millisecond} {
		is(all[i].ID, onceq.StateWaiting, want)
	}
	require.True(t, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, all[1].ID)).Blocked)

	first := add(t, db, onceq.Job{Key: "b", Timeout: time.Minute, Delay: time.Hour})
	again := must[onceq.Result](t)(q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "b", Payload: 2, Timeout: 2 * time.Minute, Replace: onceq.ReplacePayload}))
	require.True(t, again.Replaced)
	is(first, onceq.StateDelayed, 2*time.Minute)

	is(sqlOne[int64](t, db, `select id from onceq.enqueue('k', options => '{"timeout": "90.0004 seconds"}')`), onceq.StateWaiting, own+time.Millisecond)
	shop := queuetest.New(t, queuetest.Schema("shop"))
	id = add(t, shop, onceq.Job{Timeout: own})
	require.Len(t, must[[]*onceq.Lease](t)(shop.Queue.Claim(ctx, onceq.ClaimOptions{})), 1)
	require.Equal(t, own, must[onceqops.Explanation](t)(onceqops.New(shop.Queue).Explain(ctx, shop.Pool, id)).Job.Timeout, "in any schema")
	list := must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{IDs: []int64{first}, WithoutPayloads: true}))
	require.Zero(t, list[0].Timeout, "it is in the metadata, which are not read")
}
