package tests

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
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
	const replace = ", or Replace to change a job that nobody has started, in the same lane and limit"
	says(onceq.Job{Key: "a"}, replace)
	says(onceq.Job{Key: "a", Lane: "a"}, replace)
	says(onceq.Job{Key: "a", Replace: onceq.ReplaceTime}, "; Replace changed nothing, because ReplacePayload is not set")
	says(onceq.Job{Key: "lane"}, replace)
	says(onceq.Job{Key: "lane", Replace: both}, fmt.Sprintf("; Replace changed nothing, because job %d was started before, has another lane or limit, waits for others, or is being cancelled", laned))
	l := laneClaimOne(t, q, id)
	says(onceq.Job{Key: "a"}, "")
	says(onceq.Job{Key: "a", Replace: both}, fmt.Sprintf("; Replace changed nothing, because job %d is running", id))
	require.NoError(t, l.Complete(ctx, nil))
	says(onceq.Job{Key: "a"}, "")
	says(onceq.Job{Key: "a", Replace: both}, fmt.Sprintf("; Replace changed nothing, because job %d is completed", id))
}

// lines are the jobs that wait for others in each way.
var lines = []onceq.Job{{Lane: "a"}, {Limit: "provider"}, {Lane: "a", Limit: "provider"}}

// inLine is replacing in a lane, a limit or both.
func inLine(line onceq.Job, payload any, delay time.Duration, what onceq.Replace) onceq.Job {
	job := replacing(payload, delay, what)
	job.Lane, job.Limit, job.Window = line.Lane, line.Limit, onceq.UntilFinished
	return job
}

// claimSoon claims until there is a job.
func claimSoon(t *testing.T, q *onceq.Queue) *onceq.Lease {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		leases, err := q.Claim(t.Context(), onceq.ClaimOptions{})
		require.NoError(t, err)
		if len(leases) > 0 {
			return leases[0]
		}
	}
	require.Fail(t, "there is no job")
	return nil
}

// A job that waits for its lane or its limit is replaced there. One that is put off lets the others by, and is let in at its time.
func TestReplace_InALaneOrALimit(t *testing.T) {
	t.Parallel()
	for _, line := range lines {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		replaced := func(id int64, payload any, delay time.Duration, want onceq.State) {
			t.Helper()
			r, err := q.Enqueue(ctx, db.Pool, inLine(line, payload, delay, both))
			require.NoError(t, err)
			require.Equal(t, onceq.Result{ID: id, Duplicate: true, Replaced: true, State: want}, r)
		}
		plain := func() int64 {
			job := inLine(line, 0, 0, 0)
			job.Key, job.Window = "", 0
			return add(t, db, job)
		}
		first := plain()
		id := add(t, db, inLine(line, 1, 0, 0))
		last := plain()
		l := laneClaimOne(t, q, first)
		replaced(id, 2, time.Hour, onceq.StateDelayed)
		require.NoError(t, l.Complete(ctx, nil))
		l = laneClaimOne(t, q, last)
		replaced(id, 3, 0, onceq.StateWaiting)
		require.NoError(t, l.Complete(ctx, nil))
		l = laneClaimOne(t, q, id)
		require.Equal(t, "3", string(l.Payload))
		require.NoError(t, l.Complete(ctx, nil))

		// Nothing but its own time lets it in.
		job := inLine(line, 1, time.Hour, both)
		id = add(t, db, job)
		job.Payload, job.Delay = 2, 300*time.Millisecond
		r, err := q.Enqueue(ctx, db.Pool, job)
		require.NoError(t, err)
		require.Equal(t, onceq.Result{ID: id, Duplicate: true, Replaced: true, State: onceq.StateDelayed}, r)
		l = claimSoon(t, q)
		require.Equal(t, id, l.ID)
		require.Equal(t, "2", string(l.Payload))
		require.NoError(t, l.Complete(ctx, nil))
		require.NoError(t, db.Check())
	}
}

// A job that its lane and its limit have let in gets the payload and keeps its time. So does one that has its lane's place and
// waits for its limit.
func TestReplace_WhatIsLetInKeepsItsTime(t *testing.T) {
	t.Parallel()
	check := func(db *queuetest.DB, id int64, line onceq.Job) {
		t.Helper()
		ctx, q := t.Context(), db.Queue
		was := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
		r, err := q.Enqueue(ctx, db.Pool, inLine(line, 1, time.Hour, onceq.ReplaceTime))
		require.NoError(t, err)
		require.False(t, r.Replaced)
		require.Equal(t, was, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)))
		r, err = q.Enqueue(ctx, db.Pool, inLine(line, 2, time.Hour, both))
		require.NoError(t, err)
		require.Equal(t, onceq.Result{ID: id, Duplicate: true, Replaced: true, State: was.State}, r)
		now := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
		require.Equal(t, was.RunAt, now.RunAt)
		require.Equal(t, "2", string(now.Payload))
	}
	for _, line := range lines {
		db := queuetest.New(t)
		id := add(t, db, inLine(line, 1, 0, 0))
		leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Kinds: []string{"none"}}) // lets it in
		require.NoError(t, err)
		require.Empty(t, leases)
		require.Equal(t, 1, repairCount(t, db, `select count(*) from onceq.jobs where id = $1`, id))
		check(db, id, line)
		require.NoError(t, laneClaimOne(t, db.Queue, id).Complete(t.Context(), nil))
		require.NoError(t, db.Check())
	}

	db := queuetest.New(t)
	both := onceq.Job{Lane: "a", Limit: "provider"}
	first := add(t, db, onceq.Job{Kind: "k", Limit: "provider"})
	l := laneClaimOne(t, db.Queue, first)
	id := add(t, db, inLine(both, 1, 0, 0))
	for repairCount(t, db, `select count(*) from onceq.job_waits where id = $1 and lane = '/provider'`, id) == 0 {
		_, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
		require.NoError(t, err)
	}
	check(db, id, both)
	require.NoError(t, l.Complete(t.Context(), nil))
	require.NoError(t, laneClaimOne(t, db.Queue, id).Complete(t.Context(), nil))

	// A slot of a rate stays too.
	id = add(t, db, inLine(onceq.Job{Limit: "provider"}, 1, 0, 0))
	_, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Kinds: []string{"none"}})
	require.NoError(t, err)
	require.EqualValues(t, 1, repairExec(t, db, `update onceq.jobs set lane = lane || E'\x1f@', run_at = statement_timestamp() + interval '1 hour' where id = $1`, id))
	check(db, id, onceq.Job{Limit: "provider"})
	require.NoError(t, db.Check())
}

// Only a job with the same lane and limit is replaced: where the other one waits does not change.
func TestReplace_NotInAnotherLaneOrLimit(t *testing.T) {
	t.Parallel()
	others := append(lines, onceq.Job{}, onceq.Job{Lane: "b"}, onceq.Job{Lane: "b", Limit: "provider"}, onceq.Job{Limit: "b"})
	for _, line := range lines {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		first := inLine(line, 0, 0, 0)
		first.Key, first.Window = "", 0
		before := add(t, db, first)
		id := add(t, db, inLine(line, 1, 0, 0))
		check := func() {
			t.Helper()
			want := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
			for _, other := range others {
				if other.Lane == line.Lane && other.Limit == line.Limit {
					continue
				}
				r, err := q.Enqueue(ctx, db.Pool, inLine(other, 1, time.Hour, both))
				require.NoError(t, err)
				require.Equal(t, onceq.Result{ID: id, Duplicate: true, State: onceq.StateWaiting}, r)
				_, err = q.Enqueue(ctx, db.Pool, inLine(other, 2, time.Hour, both))
				require.ErrorIs(t, err, onceq.ErrMismatch)
				require.ErrorContains(t, err, "has another lane or limit")
			}
			require.Equal(t, want, must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)))
		}
		check()
		require.NoError(t, laneClaimOne(t, q, before).Complete(ctx, nil))
		_, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"none"}}) // lets it in, where the completion did not
		require.NoError(t, err)
		require.Equal(t, 1, repairCount(t, db, `select count(*) from onceq.jobs where id = $1`, id))
		check()
		require.NoError(t, laneClaimOne(t, q, id).Complete(ctx, nil))
		require.NoError(t, db.Check())
	}
}

// A completion that meets a replacement which is not committed leaves the lane to a promoter, which finds the job put off, or in
// its old place after a rollback. When both come at once, a job that was put off does not become live all the same.
func TestReplace_MeetsTheEndOfTheJobBefore(t *testing.T) {
	t.Parallel()
	for _, line := range lines {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		first := func() *onceq.Lease {
			job := inLine(line, 0, 0, 0)
			job.Key, job.Window = "", 0
			return laneClaimOne(t, q, add(t, db, job))
		}
		for _, commits := range []bool{true, false} {
			l := first()
			id := add(t, db, inLine(line, 1, 0, 0))
			tx, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			r, err := q.Enqueue(ctx, tx, inLine(line, 2, time.Hour, both))
			require.NoError(t, err)
			require.Equal(t, onceq.Result{ID: id, Duplicate: true, Replaced: true, State: onceq.StateDelayed}, r)
			require.NoError(t, l.Complete(ctx, nil))
			leases, err := q.Claim(ctx, onceq.ClaimOptions{})
			require.NoError(t, err)
			require.Empty(t, leases)
			if commits {
				require.NoError(t, tx.Commit(ctx))
				leases, err = q.Claim(ctx, onceq.ClaimOptions{})
				require.NoError(t, err)
				require.Empty(t, leases)
				r, err = q.Enqueue(ctx, db.Pool, inLine(line, 3, 0, both))
				require.NoError(t, err)
				require.True(t, r.Replaced)
			} else {
				require.NoError(t, tx.Rollback(ctx))
			}
			l = claimSoon(t, q)
			require.Equal(t, id, l.ID)
			require.Equal(t, map[bool]string{true: "3", false: "1"}[commits], string(l.Payload))
			require.NoError(t, l.Complete(ctx, nil))
		}
		for range conformance.Sized(10, 40) {
			l := first()
			id := add(t, db, inLine(line, 1, 0, 0))
			ended := background(func() (struct{}, error) { return struct{}{}, l.Complete(ctx, nil) })
			r, err := q.Enqueue(ctx, db.Pool, inLine(line, 1, time.Hour, onceq.ReplaceTime))
			require.NoError(t, err)
			_, err = ended()
			require.NoError(t, err)
			if r.Replaced {
				require.Equal(t, onceq.StateDelayed, r.State)
				require.Equal(t, 1, repairCount(t, db, `select count(*) from onceq.job_waits where id = $1`, id))
				r, err = q.Enqueue(ctx, db.Pool, inLine(line, 1, 0, onceq.ReplaceTime))
				require.NoError(t, err)
				require.True(t, r.Replaced)
			}
			l = claimSoon(t, q)
			require.Equal(t, id, l.ID)
			require.NoError(t, l.Complete(ctx, nil))
		}
		require.NoError(t, db.Check())
	}
}

// A job is replaced while the end of the one before it waits for a lock: after that one's snapshot, and before it takes the next one out of
// its line. The one that starts then has what was written last, at the time that was written last, and no line stands still.
func TestReplace_WhileTheEndOfTheJobBeforeWaits(t *testing.T) {
	t.Parallel()
	ends := map[string]func(*onceq.Lease) error{
		"complete": func(l *onceq.Lease) error { return l.Complete(t.Context(), nil) },
		"die":      func(l *onceq.Lease) error { return l.Fail(t.Context(), onceq.Fatal(errors.New("no"))) },
	}
	for _, line := range lines {
		for name, end := range ends {
			db := queuetest.New(t)
			ctx, q := t.Context(), db.Queue
			for _, what := range []onceq.Replace{onceq.ReplacePayload, both} {
				delay := time.Duration(0)
				if what == both {
					delay = time.Hour
				}
				job := inLine(line, 0, 0, 0)
				job.Key, job.Window = "", 0
				l := laneClaimOne(t, q, add(t, db, job))
				id := add(t, db, inLine(line, 1, 0, 0))
				eventually(t, "all calls are answered", func() bool { // a new payload leaves none
					require.Empty(t, laneClaim(t, q, 1))
					return repairCount(t, db, `select count(*) from onceq.lane_calls where lane <> ''`) == 0
				})
				tx, err := db.Pool.Begin(ctx)
				require.NoError(t, err)
				_, err = tx.Exec(ctx, `select from onceq.jobs where id = $1 for update`, l.ID)
				require.NoError(t, err)
				ended := background(func() (struct{}, error) { return struct{}{}, end(l) })
				until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`)
				r, err := q.Enqueue(ctx, db.Pool, inLine(line, 2, delay, what))
				require.NoError(t, err)
				require.True(t, r.Replaced)
				require.NoError(t, tx.Rollback(ctx))
				_, err = ended()
				require.NoError(t, err, name)
				if delay > 0 {
					leases, err := q.Claim(ctx, onceq.ClaimOptions{})
					require.NoError(t, err)
					require.Empty(t, leases, "its time has not come")
					r, err = q.Enqueue(ctx, db.Pool, inLine(line, 2, 0, both))
					require.NoError(t, err)
					require.True(t, r.Replaced)
				}
				l = claimSoon(t, q)
				require.Equal(t, id, l.ID)
				require.Equal(t, "2", string(l.Payload))
				require.NoError(t, l.Complete(ctx, nil))
				require.NoError(t, db.Check())
			}
		}
	}
}

// between is a transaction that calls fn once, before a statement with a text.
type between struct {
	pgx.Tx
	text string
	fn   func()
}

func (b *between) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if fn := b.fn; fn != nil && strings.Contains(sql, b.text) {
		b.fn = nil
		fn()
	}
	return b.Tx.Query(ctx, sql, args...)
}

// ReplaceTime alone is for a job with the same payload. If that was changed after the look at it, nothing is.
func TestReplace_TheTimeOfAnotherPayloadStays(t *testing.T) {
	t.Parallel()
	for _, line := range append(lines, onceq.Job{}) {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		id := add(t, db, inLine(line, 1, time.Hour, 0))
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		changes := &between{tx, ".replace_jobs(", func() {
			r, err := q.Enqueue(ctx, db.Pool, inLine(line, 2, 0, both))
			require.NoError(t, err)
			require.True(t, r.Replaced)
		}}
		_, err = q.Enqueue(ctx, changes, inLine(line, 1, time.Hour, onceq.ReplaceTime))
		require.ErrorIs(t, err, onceq.ErrMismatch)
		require.NoError(t, tx.Commit(ctx))
		j := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
		require.Equal(t, "2", string(j.Payload))
		require.Equal(t, onceq.StateWaiting, j.State)
		require.NoError(t, claimSoon(t, q).Complete(ctx, nil))
	}
}

// A job that is due and stays so keeps its place, however often it is replaced.
func TestReplace_AJobThatIsDueKeepsItsPlace(t *testing.T) {
	t.Parallel()
	for _, line := range append(lines, onceq.Job{}) {
		db := queuetest.New(t)
		ctx, q := t.Context(), db.Queue
		plain := func() int64 {
			job := inLine(line, 0, 0, 0)
			job.Key, job.Window = "", 0
			return add(t, db, job)
		}
		l := laneClaimOne(t, q, plain())
		id := add(t, db, inLine(line, 1, 0, 0))
		plain()
		r, err := q.Enqueue(ctx, db.Pool, inLine(line, 2, 0, both))
		require.NoError(t, err)
		require.Equal(t, onceq.Result{ID: id, Duplicate: true, Replaced: true, State: onceq.StateWaiting}, r)
		require.NoError(t, l.Complete(ctx, nil))
		l = claimSoon(t, q)
		require.Equal(t, id, l.ID)
		require.Equal(t, "2", string(l.Payload))
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
		until(t, db, `exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%.replace_jobs(%')`)
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
