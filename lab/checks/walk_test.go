package checks

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// A random walk over everything that can be done with jobs, on a real Postgres, beside a model in memory. The model
// says exactly what each step must answer and what the tables must contain afterwards. pgregory.net/rapid chooses the
// steps and shortens a failing walk.
//
// The model counts time in hours, and every wait lasts whole hours, so the seconds that the test itself takes do not
// matter. Advance lets hours pass in the database.

const (
	walkMaxLost = 2
	walkGrace   = 1
	walkForever = -1
)

// walkJob is a job as the model knows it.
type walkJob struct {
	left          bool // its key is another job's, which was enqueued while it ran
	id            int64
	kind, key     string
	priority      onceq.Priority
	payload       int
	state         onceq.State // StateWaiting for all live jobs, otherwise how it ended
	due           int         // in hours
	turn          int         // orders the jobs that are due in the same hour
	leased        bool        // it was leased, and the lease was not ended
	until         int         // in hours
	claims, lost  int
	attempts, max int
	cancel        bool // cancellation was requested
	keep          int  // hour until which history is kept; walkForever
}

// walkFence is a taken key.
type walkFence struct {
	job      int64
	kind     string
	state    onceq.State // StateWaiting: its job is live
	payload  int         // 0: any counts as equal
	lifetime int         // hours, or walkForever
	finished int
	again    bool // its job was cancelled before a claim had it, and the key is free at once
	result   json.RawMessage
}

type walkLease struct {
	lease *onceq.Lease
	id    int64
	claim int // the count of claims under which the lease was given
}

type walk struct {
	db     *queuetest.DB
	q      *onceq.Queue // over a pool of its own if its sessions must differ from the application's
	queue  string
	now    int
	turns  int
	jobs   map[int64]*walkJob // live ones, and those in the history
	keys   map[string]*walkFence
	tokens map[string]int64 // the largest token under which each key was ever claimed
	leases []walkLease
	reaper *onceq.Reaper
	blind  bool // completions ignore the token

	prepares bool // the server supports two-phase commit
}

func (w *walk) turn() int { w.turns++; return w.turns }

func (f *walkFence) free(now int) bool {
	return f.again || f.over(now)
}

// over says that the window of a key is over, so that a Reaper may remove it.
func (f *walkFence) over(now int) bool {
	return f.state.Finished() && f.lifetime != walkForever && f.finished+f.lifetime <= now
}

func (j *walkJob) live() bool { return !j.state.Finished() }

// seen is the state that users see.
func (j *walkJob) seen(now int) onceq.State {
	switch {
	case !j.live():
		return j.state
	case j.leased && j.until > now:
		return onceq.StateRunning
	case j.attempts > 0 || j.lost > 0 || j.leased:
		return onceq.StateRetrying
	case j.due > now:
		return onceq.StateDelayed
	}
	return onceq.StateWaiting
}

// expect returns what enqueueing answers, and whether the job is accepted.
func (w *walk) expect(j onceq.Job) (want onceq.Result, refusal error, accepted bool) {
	f := w.keys[j.Key]
	if j.Key == "" || f == nil || f.free(w.now) || w.leaves(f, j) {
		want.State = onceq.StateWaiting
		if j.Delay > 0 {
			want.State = onceq.StateDelayed
		}
		return want, nil, true
	}
	want = onceq.Result{ID: f.job, Duplicate: true, State: f.state, Output: f.result}
	if f.state == onceq.StateWaiting {
		want.State = w.jobs[f.job].seen(w.now)
	}
	switch {
	case f.kind != j.Kind || f.payload != 0 && !j.IgnorePayload && f.payload != j.Payload.(int):
		refusal = onceq.ErrMismatch
	case j.Strict:
		refusal = onceq.ErrDuplicate
	}
	return want, refusal, false
}

// leaves says that a key belongs to a job that somebody has, or had when its lease ran out, and that j may take it then.
func (w *walk) leaves(f *walkFence, j onceq.Job) bool {
	return j.Window == onceq.UntilStarted && f.state == onceq.StateWaiting && f.kind == j.Kind && w.jobs[f.job].leased
}

func (w *walk) accept(j onceq.Job, id int64) {
	hours := func(d time.Duration) int { return int(d / time.Hour) }
	w.jobs[id] = &walkJob{
		id: id, kind: j.Kind, key: j.Key, priority: j.Priority, payload: j.Payload.(int), state: onceq.StateWaiting,
		due: w.now + hours(j.Delay), turn: w.turn(), max: j.MaxAttempts,
	}
	if j.Key == "" {
		return
	}
	lifetime := hours(j.Window)
	switch j.Window {
	case onceq.UntilFinished, onceq.UntilStarted:
		lifetime = 0
	case onceq.Forever:
		lifetime = walkForever
	}
	f := &walkFence{job: id, kind: j.Kind, state: onceq.StateWaiting, payload: j.Payload.(int), lifetime: lifetime}
	if j.IgnorePayload {
		f.payload = 0
	}
	if before := w.keys[j.Key]; before != nil && w.jobs[before.job] != nil && w.jobs[before.job].live() {
		w.jobs[before.job].left = true
	}
	w.keys[j.Key] = f
}

func (w *walk) drawJob(t *rapid.T, keys []string) onceq.Job {
	j := onceq.Job{
		Kind: rapid.SampledFrom([]string{"k", "k", "k", "other"}).Draw(t, "kind"), Queue: w.queue, Key: rapid.SampledFrom(keys).Draw(t, "key"), Payload: rapid.IntRange(1, 2).Draw(t, "payload"),
		Priority:    onceq.Priority(rapid.IntRange(-1, 1).Draw(t, "priority")),
		Delay:       time.Duration(rapid.SampledFrom([]int{0, 0, 2}).Draw(t, "delay")) * time.Hour,
		Window:      rapid.SampledFrom([]time.Duration{onceq.UntilFinished, onceq.UntilStarted, time.Hour, 3 * time.Hour, onceq.Forever}).Draw(t, "window"),
		MaxAttempts: rapid.IntRange(1, 2).Draw(t, "attempts"),
		Strict:      rapid.Bool().Draw(t, "strict"),

		IgnorePayload: rapid.IntRange(0, 3).Draw(t, "ignore") == 0,
	}
	if j.Key != "" {
		j.Scope = w.queue // both kinds share it
	} else {
		j.Window = 0 // it would be refused
	}
	return j
}

var errUndone = errors.New("rolled back")

// inTx runs fn on the pool, in a transaction that commits, or in a transaction that rolls back. It reports whether the
// changes stay.
func (w *walk) inTx(t *rapid.T, fn func(onceq.DB)) (stays bool) {
	places := []string{"pool", "committed", "rolled back"}
	if w.prepares {
		places = append(places, "prepared", "prepared and rolled back")
	}
	where := rapid.SampledFrom(places).Draw(t, "where")
	if where == "pool" {
		fn(w.db.Pool)
		return true
	}
	level := rapid.SampledFrom([]pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}).Draw(t, "level")
	err := pgx.BeginTxFunc(t.Context(), w.db.Pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		fn(tx)
		switch where {
		case "committed":
			return nil
		case "rolled back":
			return errUndone
		}
		_, err := tx.Exec(t.Context(), `prepare transaction '`+w.db.Pool.Config().ConnConfig.Database+w.queue+`'`)
		require.NoError(t, err, "the first phase of a commit in two")
		return errUndone // this session then keeps nothing of the transaction
	})
	second := map[string]string{"prepared": "commit", "prepared and rolled back": "rollback"}[where]
	if second != "" {
		_, failed := w.db.Pool.Exec(t.Context(), second+` prepared '`+w.db.Pool.Config().ConnConfig.Database+w.queue+`'`)
		require.NoError(t, failed)
		return second == "commit"
	}
	if err != nil {
		require.ErrorIs(t, err, errUndone)
	}
	return err == nil
}

func (w *walk) Enqueue(t *rapid.T) {
	j := w.drawJob(t, []string{"", "a", "b", "c"})
	want, refusal, accepted := w.expect(j)
	inBatch := rapid.Bool().Draw(t, "batch")
	var got onceq.Result
	stays := w.inTx(t, func(db onceq.DB) {
		var err error
		if sender, ok := db.(interface {
			SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
		}); ok && inBatch {
			b := &pgx.Batch{}
			p, bad := w.q.EnqueueInBatch(b, j)
			require.NoError(t, bad)
			require.NoError(t, sender.SendBatch(t.Context(), b).Close())
			got, err = p.Result(t.Context(), db)
		} else {
			got, err = w.q.Enqueue(t.Context(), db, j)
		}
		require.ErrorIs(t, err, refusal)
	})
	if accepted {
		want.ID = got.ID
		require.NotContains(t, w.jobs, got.ID)
	}
	require.Equal(t, want, got)
	if accepted && stays {
		w.accept(j, got.ID)
	}
}

func (w *walk) EnqueueMany(t *rapid.T) {
	var jobs []onceq.Job
	want := []onceq.Result{}
	var accepted, over []bool
	var refusals []error
	for _, key := range []string{"a", "b", "c", ""} {
		if rapid.Bool().Draw(t, "with "+key) {
			j := w.drawJob(t, []string{key})
			r, refusal, ok := w.expect(j)
			jobs, want, accepted = append(jobs, j), append(want, r), append(accepted, ok)
			over = append(over, w.keys[key] != nil)
			if refusal != nil {
				refusals = append(refusals, refusal)
			}
		}
	}
	var got []onceq.Result
	stays := w.inTx(t, func(db onceq.DB) {
		var err error
		got, err = w.q.EnqueueMany(t.Context(), db, jobs)
		for _, refusal := range refusals {
			require.ErrorIs(t, err, refusal)
		}
		if len(refusals) == 0 {
			require.NoError(t, err)
		}
		if db == onceq.DB(w.db.Pool) && len(refusals) > 0 { // all or nothing
			for i := range want {
				if accepted[i] {
					want[i], accepted[i] = onceq.Result{}, false
				}
			}
		}
	})
	// A second statement takes over expired keys, so their jobs become due a moment later.
	for _, second := range []bool{false, true} {
		for i := range want {
			if accepted[i] && (over[i] == second) {
				want[i].ID = got[i].ID
				if stays {
					w.accept(jobs[i], got[i].ID)
				}
			}
		}
	}
	require.Equal(t, want, got)
}

// Announce says that an idle worker wants to be told of new jobs.
func (w *walk) Announce(t *rapid.T) {
	_, err := w.db.Pool.Exec(t.Context(), schema(w.db, `insert into onceq.waiters (worker, serves, round, room, idle_until)
		values (1, 1, 1, 100, statement_timestamp() + interval '1 hour')
		on conflict (worker) do update set round = waiters.round + 1, idle_until = excluded.idle_until`))
	require.NoError(t, err)
	_, err = w.db.Pool.Exec(t.Context(), schema(w.db, `insert into onceq.waiter_queues values ($1, 1) on conflict do nothing`), w.queue)
	require.NoError(t, err)
}

// claimable returns the jobs that a claim may take, in its order.
func (w *walk) claimable() []*walkJob {
	var due []*walkJob
	for _, j := range w.jobs {
		if j.live() && j.due <= w.now && (!j.leased || j.until <= w.now) {
			due = append(due, j)
		}
	}
	slices.SortFunc(due, func(a, b *walkJob) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.due, b.due), cmp.Compare(a.turn, b.turn))
	})
	return due
}

func (w *walk) Claim(t *rapid.T) {
	limit := rapid.IntRange(1, 3).Draw(t, "limit")
	var want []*walkJob
	for len(want) == 0 {
		due := w.claimable()
		if len(due) == 0 {
			break
		}
		due = due[:min(limit, len(due))]
		if i := slices.IndexFunc(due, func(j *walkJob) bool { return j.lost > 0 || j.leased }); i >= 0 {
			due = due[:max(1, i)] // a job that has lost leases is claimed by itself
		}
		for _, j := range due {
			j.claims++
			if j.leased {
				j.lost++
			}
			j.leased, j.until = true, w.now+2
			switch {
			case j.cancel: // requested, but its last holder was never told
				w.end(j, onceq.StateCancelled, nil)
			case j.lost >= walkMaxLost:
				w.end(j, onceq.StateDead, nil)
			default:
				want = append(want, j)
			}
		}
	}
	got, err := w.q.Claim(t.Context(), onceq.ClaimOptions{Queue: w.queue, Limit: limit, Lease: 2 * time.Hour, MaxLost: walkMaxLost})
	require.NoError(t, err)
	require.Len(t, got, len(want))
	for i, l := range got {
		j := want[i]
		require.Equal(t, [...]int64{j.id, j.id<<20 | int64(j.claims), int64(j.attempts + 1), int64(j.lost), int64(j.priority)},
			[...]int64{l.ID, l.Token, int64(l.Attempt), int64(l.Lost), int64(l.Priority)})
		require.Equal(t, fmt.Sprint(j.payload), string(l.Payload))
		if j.key != "" && !j.left { // the next job of its key is other work
			require.Greater(t, l.Token, w.tokens[j.key])
			w.tokens[j.key] = l.Token
		}
		w.leases = append(w.leases, walkLease{l, j.id, j.claims})
	}
}

// draw picks any lease that was ever given, and its job if the lease is still valid.
func (w *walk) draw(t *rapid.T) (walkLease, *walkJob) {
	if len(w.leases) == 0 {
		t.Skip("nothing was claimed so far: another step is drawn")
	}
	n := len(w.leases)
	l := w.leases[max(rapid.IntRange(0, n-1).Draw(t, "lease"), rapid.IntRange(0, n-1).Draw(t, "lease"))]
	j := w.jobs[l.id]
	if j == nil || !j.live() || !j.leased || j.claims != l.claim {
		return l, nil
	}
	return l, j
}

func holds(t *rapid.T, j *walkJob, err error) bool {
	if j == nil {
		require.ErrorIs(t, err, onceq.ErrLeaseLost)
		return false
	}
	require.NoError(t, err)
	return true
}

func (w *walk) Extend(t *rapid.T) {
	l, j := w.draw(t)
	err := l.lease.Extend(t.Context(), 3*time.Hour)
	if j != nil && j.cancel {
		require.ErrorIs(t, err, onceq.ErrCancelled)
		err = nil
	}
	if holds(t, j, err) {
		j.until = w.now + 3
	}
}

// end removes a job from the live ones.
func (w *walk) end(j *walkJob, state onceq.State, result json.RawMessage) {
	j.state, j.leased, j.keep = state, false, walkForever
	switch state {
	case onceq.StateCompleted:
		delete(w.jobs, j.id) // no history is kept
	case onceq.StateCancelled:
		j.keep, j.cancel = w.now+24, false
	}
	if f := w.keys[j.key]; f != nil && f.job == j.id {
		f.state, f.finished, f.result = state, w.now, result
	}
}

// stop cancels a job that nobody holds. Its key is free if no claim had the job, unless keys are to stay taken.
func (w *walk) stop(j *walkJob, keep bool) {
	w.end(j, onceq.StateCancelled, nil)
	if f := w.keys[j.key]; f != nil && f.job == j.id {
		f.again = j.claims == 0 && !keep
	}
}

// again makes a job due at an hour. If its cancellation was requested, it is cancelled then.
func (w *walk) again(j *walkJob, due int) {
	j.leased, j.due, j.turn = false, due, w.turn()
	if j.cancel {
		w.end(j, onceq.StateCancelled, nil)
	}
}

func (w *walk) Fail(t *rapid.T) {
	l, j := w.draw(t)
	how := rapid.SampledFrom([]string{"plain", "fatal", "retry after"}).Draw(t, "how")
	err := errors.New("failed")
	switch how {
	case "fatal":
		err = onceq.Fatal(err)
	case "retry after":
		err = onceq.RetryAfter(time.Hour, err)
	}
	if !holds(t, j, l.lease.Fail(t.Context(), err)) {
		return
	}
	switch {
	case how == "fatal" || j.attempts+1 >= j.max:
		j.attempts++
		w.end(j, onceq.StateDead, nil)
	case how == "retry after":
		j.attempts, j.lost = j.attempts+1, min(j.lost, 1)
		w.again(j, w.now+1)
	default:
		j.attempts, j.lost = j.attempts+1, min(j.lost, 1)
		// The default backoff's second becomes an hour, which the model can count.
		_, err := w.db.Pool.Exec(t.Context(), schema(w.db, `update onceq.jobs set run_at = statement_timestamp() + interval '1 hour' where id = $1`), j.id)
		require.NoError(t, err)
		w.again(j, w.now+1)
	}
}

func (w *walk) Snooze(t *rapid.T) {
	l, j := w.draw(t)
	if holds(t, j, l.lease.Snooze(t.Context(), time.Hour)) {
		j.lost = 0
		w.again(j, w.now+1)
	}
}

func (w *walk) Release(t *rapid.T) {
	l, j := w.draw(t)
	if holds(t, j, l.lease.Release(t.Context())) {
		w.again(j, w.now)
	}
}

func (w *walk) Complete(t *rapid.T) {
	l, j := w.draw(t)
	result := rapid.IntRange(0, 9).Draw(t, "result")
	require.NoError(t, l.lease.SetResult(result))
	complete := func(db onceq.DB) error {
		if w.blind {
			return completeBlindly(t.Context(), w.db, db, l.id, result)
		}
		return l.lease.Complete(t.Context(), db)
	}
	if j == nil {
		require.ErrorIs(t, complete(w.db.Pool), onceq.ErrLeaseLost)
		return
	}
	if w.inTx(t, func(db onceq.DB) { require.NoError(t, complete(db)) }) {
		w.end(j, onceq.StateCompleted, json.RawMessage(fmt.Sprint(result)))
	}
}

// some returns the id of a job that exists, or of a job that never will.
func (w *walk) some(t *rapid.T) (int64, *walkJob) {
	ids := []int64{1 << 40}
	for id := range w.jobs {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	id := rapid.SampledFrom(ids).Draw(t, "job")
	return id, w.jobs[id]
}

func (w *walk) Cancel(t *rapid.T) {
	id, j := w.some(t)
	var got onceq.State
	stays := w.inTx(t, func(db onceq.DB) {
		var err error
		got, err = w.q.Cancel(t.Context(), db, id)
		if j == nil {
			require.ErrorIs(t, err, onceq.ErrNotFound)
		} else {
			require.NoError(t, err)
		}
	})
	switch {
	case j == nil:
	case !j.live():
		require.Equal(t, j.state, got)
	case j.seen(w.now) == onceq.StateRunning:
		require.Equal(t, onceq.StateRunning, got)
		j.cancel = j.cancel || stays
	default:
		require.Equal(t, onceq.StateCancelled, got)
		if stays {
			w.stop(j, false)
		}
	}
}

func (w *walk) CancelMany(t *rapid.T) {
	f := onceqops.Filter{Queue: w.queue, Kind: "other", States: rapid.SampledFrom([][]onceq.State{nil, {onceq.StateDelayed}, {onceq.StateRunning, onceq.StateRetrying}}).Draw(t, "states")}
	f.KeepKeys = rapid.Bool().Draw(t, "keep keys")
	var cancelled, asked []*walkJob
	for _, j := range w.jobs {
		switch seen := j.seen(w.now); {
		case !j.live() || j.kind != f.Kind || f.States != nil && !slices.Contains(f.States, seen):
		case seen == onceq.StateRunning:
			asked = append(asked, j)
		default:
			cancelled = append(cancelled, j)
		}
	}
	stays := w.inTx(t, func(db onceq.DB) {
		c, a, err := onceqops.New(w.db.Queue).CancelMany(t.Context(), db, f)
		require.NoError(t, err)
		require.Equal(t, [2]int{len(cancelled), len(asked)}, [2]int{c, a})
	})
	if !stays {
		return
	}
	for _, j := range asked {
		j.cancel = true
	}
	for _, j := range cancelled {
		w.stop(j, f.KeepKeys)
	}
}

func (w *walk) Redrive(t *rapid.T) {
	id, j := w.some(t)
	var f *walkFence
	mine := true // the job may take the key
	if j != nil && j.key != "" {
		f = w.keys[j.key]
		mine = f == nil || f.job == id || f.job < id && f.free(w.now)
	}
	var got onceq.State
	stays := w.inTx(t, func(db onceq.DB) {
		var err error
		got, err = onceqops.New(w.q).Redrive(t.Context(), db, id)
		switch {
		case j == nil:
			require.ErrorIs(t, err, onceq.ErrNotFound)
		case !j.live() && !mine:
			var dup *onceq.DuplicateError
			require.ErrorAs(t, err, &dup)
			require.Equal(t, f.job, dup.Existing.ID)
		default:
			require.NoError(t, err)
		}
	})
	if j == nil || !j.live() && !mine {
		return
	}
	if j.live() {
		require.Equal(t, j.seen(w.now), got)
		return
	}
	// A job that was cancelled before its time, and that nobody had claimed, keeps its time.
	want, due, turn := onceq.StateWaiting, w.now, w.turn()
	if j.state == onceq.StateCancelled && j.claims == 0 && j.due > w.now {
		want, due, turn = onceq.StateDelayed, j.due, j.turn
	}
	require.Equal(t, want, got)
	if !stays {
		return
	}
	j.state, j.attempts, j.lost, j.cancel, j.due, j.turn = onceq.StateWaiting, 0, 0, false, due, turn
	switch {
	case j.key == "":
	case f == nil:
		w.keys[j.key] = &walkFence{job: id, kind: j.kind, state: onceq.StateWaiting, lifetime: 24}
		w.tokens[j.key] = j.id<<20 | int64(j.claims) // nobody knows any more about a later job that had the key
	default:
		f.job, f.state, f.result, f.again = id, onceq.StateWaiting, nil, false
	}
}

func (w *walk) Reap(t *rapid.T) {
	_, err := w.reaper.RunOnce(t.Context())
	require.NoError(t, err)
	for key, f := range w.keys {
		if f.over(w.now - walkGrace) {
			delete(w.keys, key)
		}
	}
	for id, j := range w.jobs {
		if !j.live() && j.keep != walkForever && j.keep <= w.now {
			delete(w.jobs, id)
		}
	}
}

func (w *walk) Time(t *rapid.T) {
	hours := rapid.SampledFrom([]int{1, 1, 2, 25}).Draw(t, "hours")
	w.db.Advance(time.Duration(hours) * time.Hour)
	w.now += hours
}

// Check compares the tables with the model after each step.
func (w *walk) Check(t *rapid.T) {
	require.NoError(t, w.db.Check())
	list, err := onceqops.New(w.q).List(t.Context(), w.db.Pool, onceqops.Filter{Queue: w.queue, Limit: 1000})
	require.NoError(t, err)
	type fact struct {
		id                      int64
		kind, key               string
		state                   onceq.State
		claims, lost, attempts  int
		payload, scope          string
		priority                onceq.Priority
		keptForEver, isFinished bool
	}
	var got, want []fact
	for _, i := range list {
		got = append(got, fact{i.ID, i.Kind, i.Key, i.State, i.Claims, i.Lost, i.Attempts, string(i.Payload), i.Scope, i.Priority,
			i.State.Finished() && i.KeepUntil.IsZero(), !i.FinishedAt.IsZero()})
	}
	for _, j := range w.jobs {
		scope := ""
		if j.key != "" {
			scope = w.queue
		}
		want = append(want, fact{j.id, j.kind, j.key, j.seen(w.now), j.claims, j.lost, j.attempts, fmt.Sprint(j.payload), scope, j.priority,
			!j.live() && j.keep == walkForever, !j.live()})
	}
	slices.SortFunc(want, func(a, b fact) int { return cmp.Compare(b.id, a.id) })
	require.Equal(t, want, got)
	for _, key := range []string{"a", "b", "c"} {
		info, err := w.q.GetByKey(t.Context(), w.db.Pool, w.queue, key)
		f := w.keys[key]
		if f == nil {
			require.ErrorIs(t, err, onceq.ErrNotFound, key)
			continue
		}
		require.NoError(t, err, key)
		require.Equal(t, f.job, info.ID, key)
		require.Equal(t, f.result, info.Result, key)
	}
}

func TestWalk_JobsDoWhatTheModelSays(t *testing.T) {
	t.Parallel()
	walks(t, t, false, nil)
}

// readOnly makes sessions like those of a database or a role that is read-only by default.
func readOnly(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on" }

// The library's own transactions say that they write. In this walk, so do the application's.
func TestWalk_ADefaultToReadChangesNothing(t *testing.T) {
	t.Parallel()
	walks(t, t, false, readOnly)
}

// otherwise returns a queue in a test's database over a changed pool.
func otherwise(t testing.TB, db *queuetest.DB, change func(*pgxpool.Config)) *onceq.Queue {
	t.Helper()
	if change == nil {
		return db.Queue
	}
	config := db.Pool.Config()
	change(config)
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	return q
}

// prepares reports whether a server supports two-phase commit: an existing server may not.
func prepares(t testing.TB, db *queuetest.DB) (ok bool) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select current_setting('max_prepared_transactions')::int > 0`).Scan(&ok))
	return ok
}

// walks runs rapid and reports failures to t.
func walks(test *testing.T, t rapid.TB, blind bool, change func(*pgxpool.Config), opts ...queuetest.Option) {
	test.Helper()
	db := queuetest.New(test, append(opts, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))...)
	q, twoPhases := otherwise(test, db, change), prepares(test, db)
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Grace: walkGrace * time.Hour})
	require.NoError(t, err)
	runs, owner := 0, conformance.Owner(test, db)
	rapid.Check(t, func(t *rapid.T) {
		runs++
		_, err := owner.Exec(t.Context(), schema(db, `truncate onceq.jobs, onceq.job_fences, onceq.job_history, onceq.job_cancels, onceq.waiters, onceq.waiter_queues, onceq.wakes`))
		require.NoError(t, err)
		w := &walk{
			db: db, q: q, prepares: twoPhases, queue: fmt.Sprintf("run %d", runs), jobs: make(map[int64]*walkJob), keys: make(map[string]*walkFence),
			tokens: make(map[string]int64), reaper: reaper, blind: blind,
		}
		t.Repeat(rapid.StateMachineActions(w))
	})
}

// listener records failures instead of a test.
type listener struct {
	*testing.T
	failed bool
	log    strings.Builder
}

func (l *listener) Logf(format string, args ...any) { _, _ = fmt.Fprintf(&l.log, format+"\n", args...) }
func (l *listener) Log(args ...any)                 { _, _ = fmt.Fprintln(&l.log, args...) }
func (l *listener) Errorf(string, ...any)           { l.failed = true }
func (l *listener) Failed() bool                    { return l.failed }
func (l *listener) FailNow()                        { runtime.Goexit() }

// This tests the checks themselves: they must find a completion that ignores the token. No other walk runs at the same
// time, because rapid's flags are global.
func TestWalk_FindsACompletionWithoutTheToken(t *testing.T) {
	for name, value := range map[string]string{"rapid.nofailfile": "true", "rapid.shrinktime": "0s"} {
		f := flag.Lookup(name).Value
		before := f.String()
		require.NoError(t, f.Set(value))
		defer func() { require.NoError(t, f.Set(before)) }()
	}
	l := &listener{T: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		walks(t, l, true, nil, queuetest.NoCheck())
	}()
	<-done
	require.True(t, l.failed)
	require.Contains(t, l.log.String(), onceq.ErrLeaseLost.Error(), "the walk failed for another reason")
}
