package tests

import (
	"context"
	"fmt"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

func replacing(payload any, delay time.Duration, what onceq.Replace) onceq.Job {
	return onceq.Job{Kind: "k", Key: "a", Payload: payload, Delay: delay, Replace: what, Metadata: map[string]string{"of": "it"}}
}

const both = onceq.ReplacePayload | onceq.ReplaceTime

func TestReplace_ChangesWhatNobodyHasStarted(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	enqueue := func(j onceq.Job) onceq.Result {
		t.Helper()
		r, err := q.Enqueue(ctx, db.Pool, j)
		require.NoError(t, err)
		return r
	}
	get := func(id int64) onceq.JobInfo { return must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)) }
	first := enqueue(replacing(1, time.Hour, both))
	require.False(t, first.Duplicate || first.Replaced)
	was := get(first.ID)

	r := enqueue(replacing(2, 2*time.Hour, both))
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, Replaced: true, State: onceq.StateDelayed}, r)
	now := get(first.ID)
	require.Equal(t, "2", string(now.Payload))
	require.InDelta(t, 60, now.RunAt.Sub(was.RunAt).Minutes(), 10)

	// The fingerprint follows.
	require.False(t, enqueue(onceq.Job{Kind: "k", Key: "a", Payload: 2}).Replaced)
	_, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	require.ErrorIs(t, err, onceq.ErrMismatch)

	// Only the time, or only the payload.
	_, err = q.Enqueue(ctx, db.Pool, replacing(3, 0, onceq.ReplaceTime))
	require.ErrorIs(t, err, onceq.ErrMismatch)
	require.Equal(t, now, get(first.ID))
	require.True(t, enqueue(replacing([]byte{1, 2}, 0, onceq.ReplacePayload)).Replaced)
	require.Equal(t, []byte{1, 2}, get(first.ID).Bytes)
	require.Equal(t, now.RunAt, get(first.ID).RunAt)
	require.True(t, enqueue(replacing(3, 0, onceq.ReplacePayload)).Replaced)
	r = enqueue(replacing(3, 0, onceq.ReplaceTime))
	require.Equal(t, onceq.StateWaiting, r.State)

	// Another kind's job is never changed.
	other := replacing(9, 0, both)
	other.Kind, other.Scope = "other", "k"
	_, err = q.Enqueue(ctx, db.Pool, other)
	require.ErrorIs(t, err, onceq.ErrMismatch)

	// A rollback undoes it.
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	r, err = q.Enqueue(ctx, tx, replacing(4, time.Hour, both))
	require.NoError(t, err)
	require.True(t, r.Replaced)
	require.NoError(t, tx.Rollback(ctx))
	require.Equal(t, "3", string(get(first.ID).Payload))

	// Many at once.
	many := []onceq.Job{{Kind: "k", Key: "new", Payload: 1, Replace: both}, replacing(6, 0, both), {Kind: "k", Payload: 1}}
	all, err := q.EnqueueMany(ctx, db.Pool, many)
	require.NoError(t, err)
	require.Equal(t, []bool{false, true, false}, []bool{all[0].Replaced, all[1].Replaced, all[2].Replaced})
	require.Equal(t, first.ID, all[1].ID)

	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	var payload string
	for _, l := range leases {
		if l.ID == first.ID {
			payload = string(l.Payload)
		}
	}
	require.Equal(t, "6", payload)
}

// If EnqueueMany rolls back because one job is refused, no result says that another was replaced.
func TestReplace_RolledBackWithTheOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	enqueue := func(db onceq.DB) ([]onceq.Result, error) {
		refused := onceq.Job{Kind: "k", Key: "b", Payload: 2}
		return q.EnqueueMany(ctx, db, []onceq.Job{replacing(2, 0, both), refused, {Kind: "k", Key: "c"}})
	}
	a := add(t, db, replacing(1, time.Hour, 0))
	b := add(t, db, onceq.Job{Kind: "k", Key: "b", Payload: 1})
	was := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, a))

	got, err := enqueue(db.Pool)
	require.ErrorIs(t, err, onceq.ErrMismatch)
	require.Equal(t, []onceq.Result{{ID: a, Duplicate: true, State: onceq.StateDelayed}, {ID: b, Duplicate: true, State: onceq.StateWaiting}, {}}, got)
	require.Equal(t, was, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, a)))

	// In the caller's transaction it is the caller who decides.
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	got, err = enqueue(tx)
	require.ErrorIs(t, err, onceq.ErrMismatch)
	require.Equal(t, onceq.Result{ID: a, Duplicate: true, Replaced: true, State: onceq.StateWaiting}, got[0])
	require.NotZero(t, got[2].ID)
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, "2", string(must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, a)).Payload))
}

func TestReplace_AJobThatWasStartedStays(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	check := func(want onceq.State) {
		t.Helper()
		r, err := q.Enqueue(ctx, db.Pool, replacing(1, time.Hour, both))
		require.NoError(t, err)
		require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: want}, r)
		var mismatch *onceq.MismatchError
		_, err = q.Enqueue(ctx, db.Pool, replacing(2, time.Hour, both))
		require.ErrorAs(t, err, &mismatch)
		require.Equal(t, want, mismatch.Existing.State)
	}
	check(onceq.StateRunning)
	require.NoError(t, leases[0].Release(ctx))
	check(onceq.StateWaiting)
	leases, err = q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	require.NoError(t, leases[0].Complete(ctx, nil))
	check(onceq.StateCompleted)
}

// The error of a job that could not replace another says why, and advises no Replace where it would change nothing.
func TestReplace_SaysWhyItChangedNothing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	laned := add(t, db, onceq.Job{Kind: "k", Key: "lane", Lane: "a", Payload: 1})
	says := func(job onceq.Job, end string) {
		t.Helper()
		job.Kind, job.Payload = "k", 2
		_, err := q.Enqueue(ctx, db.Pool, job)
		require.ErrorIs(t, err, onceq.ErrMismatch)
		require.Regexp(t, regexp.QuoteMeta("or set IgnorePayload if none must"+end)+"$", err)
	}
	const replace = ", or Replace to change a job that nobody has started and that has no lane, no limit and no After"
	says(onceq.Job{Key: "a"}, replace)
	says(onceq.Job{Key: "a", Lane: "a"}, replace)
	says(onceq.Job{Key: "a", Replace: onceq.ReplaceTime}, "; Replace changed nothing, because ReplacePayload is not set")
	says(onceq.Job{Key: "lane"}, replace)
	says(onceq.Job{Key: "lane", Replace: both}, fmt.Sprintf("; Replace changed nothing, because job %d was started before, has a lane or a limit, waits for others, or is being cancelled", laned))
	l := laneClaimOne(t, q, id)
	says(onceq.Job{Key: "a"}, "")
	says(onceq.Job{Key: "a", Replace: both}, fmt.Sprintf("; Replace changed nothing, because job %d is running", id))
	require.NoError(t, l.Complete(ctx, nil))
	says(onceq.Job{Key: "a"}, "")
	says(onceq.Job{Key: "a", Replace: both}, fmt.Sprintf("; Replace changed nothing, because job %d is completed", id))
}

// A job with a lane or a limit is not replaced, whether it still waits for that or is live.
func TestReplace_AJobWithALaneOrALimitStays(t *testing.T) {
	t.Parallel()
	for _, lines := range []onceq.Job{{Lane: "a"}, {Limit: "provider"}, {Lane: "a", Limit: "provider"}} {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		first := lines
		first.Kind, first.Payload = "k", 0
		before := add(t, db, first)
		job := lines
		job.Kind, job.Key, job.Payload = "k", "a", 1
		id := add(t, db, job)
		check := func() {
			t.Helper()
			want, err := q.Get(ctx, db.Pool, id)
			require.NoError(t, err)
			r, err := q.Enqueue(ctx, db.Pool, replacing(1, time.Hour, both))
			require.NoError(t, err)
			require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateWaiting}, r)
			var mismatch *onceq.MismatchError
			_, err = q.Enqueue(ctx, db.Pool, replacing(2, time.Hour, both))
			require.ErrorAs(t, err, &mismatch)
			require.Equal(t, onceq.StateWaiting, mismatch.Existing.State)
			got, err := q.Get(ctx, db.Pool, id)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
		check()
		require.NoError(t, laneClaimOne(t, q, before).Complete(ctx, nil))
		require.Equal(t, 1, repairCount(t, db, `select count(*) from onceq.jobs where id = $1`, id))
		check()
		require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
		require.NoError(t, db.Check())
	}
}

// A call that meets a claim that is under way waits for it, and then says that the job runs. The claim has the old payload.
func TestReplace_WhileTheJobIsClaimed(t *testing.T) {
	t.Parallel()
	for _, commits := range []bool{true, false} {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		id := add(t, db, onceq.Job{Kind: "k", Key: "a", Payload: 1})
		claim, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		_, err = claim.Exec(ctx, `update onceq.jobs set claims = 1, holder = 1, leased_until = now() + interval '1 hour' where id = $1`, id)
		require.NoError(t, err)
		answer := background(func() (onceq.Result, error) { return q.Enqueue(ctx, db.Pool, replacing(1, time.Hour, both)) })
		until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%unnest%for update%')`)
		want := onceq.Result{ID: id, Duplicate: true, State: onceq.StateRunning}
		if commits {
			require.NoError(t, claim.Commit(ctx))
		} else {
			require.NoError(t, claim.Rollback(ctx))
			want = onceq.Result{ID: id, Duplicate: true, Replaced: true, State: onceq.StateDelayed}
		}
		r, err := answer()
		require.NoError(t, err)
		require.Equal(t, want, r)
	}
}

// A claim steps over a job that is just being replaced, and takes it with the new payload afterwards.
func TestReplace_AClaimMeetsAReplacement(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := add(t, db, onceq.Job{Kind: "k", Key: "a", Payload: 1})
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	r, err := q.Enqueue(ctx, tx, replacing(2, 0, both))
	require.NoError(t, err)
	require.True(t, r.Replaced)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Empty(t, leases)
	require.NoError(t, tx.Commit(ctx))
	leases, err = q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	require.Equal(t, id, leases[0].ID)
	require.Equal(t, "2", string(leases[0].Payload))
}

func TestReplace_BadInput(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for _, j := range []onceq.Job{
		{Kind: "k", Replace: both}, {Kind: "k", Key: "a", Replace: 8}, {Kind: "k", Key: "a", Replace: both, Strict: true},
	} {
		var bad *onceq.InvalidError
		_, err := db.Queue.Enqueue(context.Background(), db.Pool, j)
		require.ErrorAs(t, err, &bad)
	}

	// A batch cannot read what it meets, so nothing would be replaced in it.
	for _, j := range []onceq.Job{replacing(1, 0, onceq.ReplacePayload), replacing(1, 0, onceq.ReplaceTime)} {
		var bad *onceq.InvalidError
		var b pgx.Batch
		_, err := db.Queue.EnqueueInBatch(&b, j)
		require.ErrorAs(t, err, &bad)
		require.Equal(t, "Replace", bad.Field)
		require.Zero(t, b.Len())
	}
}
