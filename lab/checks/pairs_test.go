package checks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// Every ordered pair of operations on one key is forced: the first operation has done its work but not committed when the
// second begins. An operation that takes the caller's transaction runs in it. Any other is stopped in its commit by a
// deferred trigger, which waits for a lock of the test. The second operation either waits for a lock, which
// pg_stat_activity shows, or answers at once. Then the first operation commits or rolls back. The same pair also runs one
// after the other. No test sleeps in order to be second.

// pair is a row of the table: what the second operation answers, and the key's state after it.
type pair struct {
	first, second string
	start         string // what the key is before: absent, waiting, leased, expired, past, dead, held; doubtful: leased, its effect uncertain
	waits         bool   // the second waits for the end of the first's transaction
	committed     string // the first commits
	above         string // the same above READ COMMITTED, if it differs
	undone        string // the first rolls back, or its connection is cut
	after         string // one after the other
}

var pairs = []pair{
	{"enqueue", "enqueue", "absent", true, "duplicate of one waiting → waiting", "to be run again → waiting", "accepted → waiting", "duplicate of one waiting → waiting"},
	{"enqueue", "claim", "absent", false, "nothing → waiting", "", "nothing → absent", "claimed → running"},
	{"enqueue", "extend", "leased", false, "extended or locked → running", "", "extended or locked → running", "extended or locked → running"},
	{"enqueue", "complete", "leased", false, "done → completed", "", "done → completed", "done → completed"},
	{"enqueue", "release", "leased", false, "released → waiting", "", "released → waiting", "released → waiting"},
	{"enqueue", "cancel", "leased", false, "asked for → running", "", "asked for → running", "asked for → running"},
	{"enqueue", "reap", "past", false, "kept → new job waiting", "", "kept → completed", "kept → new job waiting"},
	{"claim", "enqueue", "waiting", false, "duplicate of one waiting → running", "", "duplicate of one waiting → waiting", "duplicate of one running → running"},
	{"claim", "claim", "waiting", false, "nothing → running", "", "nothing → waiting", "nothing → running"},
	{"claim", "extend", "expired", false, "extended or locked → running", "", "extended or locked → retrying", "lost → running"},
	{"claim", "complete", "expired", true, "lost → running", "to be run again → running", "done → completed", "lost → running"},
	{"claim", "release", "expired", true, "lost → running", "", "released → waiting", "lost → running"},
	{"claim", "cancel", "expired", false, "asked for → running", "", "asked for → retrying", "asked for → running"},
	{"claim", "reap", "waiting", false, "kept → running", "", "kept → waiting", "kept → running"},
	{"extend", "enqueue", "leased", false, "duplicate of one running → running", "", "duplicate of one running → running", "duplicate of one running → running"},
	{"extend", "claim", "expired", false, "nothing → running", "", "nothing → retrying", "nothing → running"},
	{"extend", "extend", "leased", false, "extended or locked → running", "", "extended or locked → running", "extended or locked → running"},
	{"extend", "complete", "leased", true, "done → completed", "to be run again → running", "done → completed", "done → completed"},
	{"extend", "release", "leased", true, "released → waiting", "", "released → waiting", "released → waiting"},
	{"extend", "cancel", "expired", false, "asked for → running", "", "asked for → retrying", "asked for → running"},
	{"extend", "reap", "leased", false, "kept → running", "", "kept → running", "kept → running"},
	{"complete", "enqueue", "leased", true, "accepted → new job waiting", "to be run again → completed", "duplicate of one running → running", "accepted → new job waiting"},
	{"complete", "claim", "expired", false, "nothing → completed", "", "nothing → retrying", "nothing → completed"},
	{"complete", "extend", "leased", false, "extended or locked → completed", "", "extended or locked → running", "lost → completed"},
	{"complete", "complete", "leased", true, "lost → completed", "to be run again → completed", "done → completed", "lost → completed"},
	{"complete", "release", "leased", true, "lost → completed", "", "released → waiting", "lost → completed"},
	{"complete", "cancel", "expired", false, "asked for → completed", "", "asked for → retrying", "not found → completed"},
	{"complete", "reap", "leased", false, "kept → completed", "", "kept → running", "kept → completed"},
	{"release", "enqueue", "leased", false, "duplicate of one running → waiting", "", "duplicate of one running → running", "duplicate of one waiting → waiting"},
	{"release", "claim", "leased", false, "nothing → waiting", "", "nothing → running", "claimed → running"},
	{"release", "extend", "leased", false, "extended or locked → waiting", "", "extended or locked → running", "lost → waiting"},
	{"release", "complete", "leased", true, "lost → waiting", "to be run again → waiting", "done → completed", "lost → waiting"},
	{"release", "release", "leased", true, "lost → waiting", "", "released → waiting", "lost → waiting"},
	{"release", "cancel", "leased", false, "asked for → waiting", "", "asked for → running", "cancelled → cancelled"},
	{"release", "reap", "leased", false, "kept → waiting", "", "kept → running", "kept → waiting"},
	{"cancel", "enqueue", "waiting", true, "accepted → new job waiting", "to be run again → cancelled", "duplicate of one waiting → waiting", "accepted → new job waiting"},
	{"cancel", "claim", "waiting", false, "nothing → cancelled", "", "nothing → waiting", "nothing → cancelled"},
	{"cancel", "extend", "expired", false, "extended or locked → cancelled", "", "extended or locked → retrying", "lost → cancelled"},
	{"cancel", "complete", "expired", true, "lost → cancelled", "to be run again → cancelled", "done → completed", "lost → cancelled"},
	{"cancel", "release", "expired", true, "lost → cancelled", "", "released → waiting", "lost → cancelled"},
	{"cancel", "cancel", "waiting", false, "asked for → cancelled", "", "asked for → waiting", "cancelled → cancelled"},
	{"cancel", "reap", "waiting", false, "kept → cancelled", "", "kept → waiting", "kept → cancelled"},
	{"reap", "enqueue", "past", true, "accepted → new job waiting", "", "accepted → new job waiting", "accepted → new job waiting"},
	{"reap", "claim", "waiting", false, "claimed → running", "", "claimed → running", "claimed → running"},
	{"reap", "extend", "leased", false, "extended or locked → running", "", "extended or locked → running", "extended or locked → running"},
	{"reap", "complete", "leased", false, "done → completed", "", "done → completed", "done → completed"},
	{"reap", "release", "leased", false, "released → waiting", "", "released → waiting", "released → waiting"},
	{"reap", "cancel", "leased", false, "asked for → running", "", "asked for → running", "asked for → running"},
	{"reap", "reap", "past", false, "kept → absent", "", "kept → completed", "kept → absent"},
	{"enqueue", "enqueue", "past", true, "duplicate of one waiting → new job waiting", "to be run again → new job waiting", "accepted → new job waiting", "duplicate of one waiting → new job waiting"},
	{"complete", "cancel", "leased", false, "asked for → completed", "", "asked for → running", "not found → completed"},
	{"cancel", "extend", "leased", false, "extended or locked → running", "", "extended or locked → running", "to be cancelled → running"},
	{"cancel", "complete", "leased", false, "done → completed", "", "done → completed", "done → completed"},
	{"cancel", "release", "leased", false, "released → waiting", "", "released → waiting", "released → cancelled"},
	{"extend", "cancel", "leased", false, "asked for → running", "", "asked for → running", "asked for → running"},

	// These are further operations of people and handlers. The table has only those pairs of them that meet on one row.
	{"redrive", "enqueue", "dead", true, "duplicate of one waiting → waiting", "to be run again → waiting", "accepted → new job waiting", "duplicate of one waiting → waiting"},
	{"enqueue", "redrive", "dead", true, "taken by another job → new job waiting", "to be run again → new job waiting", "redriven, waiting → waiting", "taken by another job → new job waiting"},
	{"redrive", "redrive", "dead", true, "redriven, waiting → waiting", "to be run again → waiting", "redriven, waiting → waiting", "redriven, waiting → waiting"},
	{"redrive", "discard", "dead", true, "unfinished → waiting", "to be run again → waiting", "discarded → cancelled", "unfinished → waiting"},
	{"discard", "redrive", "dead", true, "not found → cancelled", "to be run again → cancelled", "redriven, waiting → waiting", "not found → cancelled"},
	{"discard", "enqueue", "dead", true, "accepted → new job waiting", "to be run again → cancelled", "accepted → new job waiting", "accepted → new job waiting"},
	{"discard", "discard", "dead", true, "not found → cancelled", "to be run again → cancelled", "discarded → cancelled", "not found → cancelled"},
	{"redrive", "reap", "dead", false, "kept → waiting", "", "kept → dead", "kept → waiting"},
	{"reap", "redrive", "dead", false, "redriven, waiting → waiting", "", "redriven, waiting → waiting", "redriven, waiting → waiting"},
	{"redrive", "claim", "dead", false, "nothing → waiting", "", "nothing → dead", "claimed → running"},
	{"redrive", "cancel", "dead", false, "dead → waiting", "", "dead → dead", "cancelled → cancelled"},
	{"resolve", "resolve", "held", true, "not found → waiting", "to be run again → waiting", "resolved → waiting", "not found → waiting"},
	{"resolve", "redrive", "held", true, "redriven, waiting → waiting", "to be run again → waiting", "redriven, waiting → waiting", "redriven, waiting → waiting"},
	{"redrive", "resolve", "held", true, "resolved → waiting", "to be run again → waiting", "resolved → waiting", "resolved → waiting"},
	{"resolve", "discard", "held", true, "unfinished → waiting", "to be run again → waiting", "discarded → cancelled", "unfinished → waiting"},
	{"discard", "resolve", "held", true, "not found → cancelled", "to be run again → cancelled", "resolved → waiting", "not found → cancelled"},
	{"resolve", "claim", "held", false, "nothing → waiting", "", "nothing → held", "claimed → running"},
	{"resolve", "enqueue", "held", true, "duplicate of one waiting → waiting", "to be run again → waiting", "duplicate of one held → held", "duplicate of one waiting → waiting"},
	{"effect", "effect", "leased", false, "used → running", "", "used → running", "used → running"},
	{"effect", "cancel", "leased", false, "asked for → running", "", "asked for → running", "asked for → running"},
	{"cancel", "effect", "leased", false, "called → running", "", "called → running", "called → running"},
	{"effect", "release", "leased", false, "released → waiting", "", "released → waiting", "released → waiting"},
	{"release", "effect", "leased", false, "called → waiting", "", "called → running", "lost → waiting"},
	{"effect", "complete", "leased", false, "done → completed", "", "done → completed", "done → completed"},
	{"complete", "effect", "leased", false, "called → completed", "", "called → running", "lost → completed"},
	{"claim", "effect", "expired", false, "called → running", "", "called → retrying", "lost → running"},
	{"effect", "claim", "expired", false, "claimed → running", "", "claimed → running", "claimed → running"},
	{"effect", "resolve", "doubtful", true, "not found → running", "to be run again → running", "resolved → running", "not found → running"},
	{"resolve", "effect", "doubtful", true, "replayed → running", "", "called → running", "replayed → running"},
	{"cancel", "effect", "expired", false, "called → cancelled", "", "called → retrying", "lost → cancelled"},
	{"reschedule", "effect", "leased", false, "called → waiting", "", "called → running", "lost → waiting"},
	{"reschedule", "cancel", "leased", false, "asked for → waiting", "", "asked for → running", "cancelled → cancelled"},
	{"cancel", "reschedule", "leased", false, "to run again → waiting", "", "to run again → waiting", "to run again → cancelled"},
	{"reschedule", "complete", "leased", true, "lost → waiting", "to be run again → waiting", "done → completed", "lost → waiting"},
	{"reschedule", "claim", "leased", false, "nothing → waiting", "", "nothing → running", "claimed → running"},
	{"reschedule", "enqueue", "leased", false, "duplicate of one running → waiting", "", "duplicate of one running → running", "duplicate of one waiting → waiting"},
}

// pairsRun is one run of a pair.
type pairsRun struct {
	owner *pgxpool.Pool // for what the application's role may not do
	t     *testing.T
	db    *queuetest.DB
	level pgx.TxIsoLevel
	lease *onceq.Lease
	old   int64 // the id of the job that had the key at the start
	blind bool  // completions ignore the token
}

const (
	pairsKey    = "k"
	pairsEffect = "e"
)

func pairsJob() onceq.Job {
	return onceq.Job{Kind: "k", Key: pairsKey, Window: onceq.UntilFinished}
}

// takesTx reports which operations run in the caller's transaction.
func takesTx(op string) bool {
	return slices.Contains([]string{"enqueue", "complete", "cancel", "redrive", "discard", "resolve"}, op)
}

// do performs an operation and returns its result.
func (r *pairsRun) do(ctx context.Context, op string, db onceq.DB) (string, error) {
	is := func(what string, err error) (string, error) {
		switch {
		case errors.Is(err, onceq.ErrLeaseLost):
			return "lost", nil
		case errors.Is(err, onceq.ErrCancelled):
			return "to be cancelled", nil
		case errors.Is(err, onceq.ErrNotFound):
			return "not found", nil
		case errors.Is(err, onceq.ErrDuplicate):
			return "taken by another job", nil
		case errors.Is(err, onceqops.ErrUnfinished):
			return "unfinished", nil
		case errors.Is(err, onceq.ErrInFlight):
			return "in flight", nil
		}
		return what, err
	}
	switch op {
	case "enqueue":
		res, err := r.db.Queue.Enqueue(ctx, db, pairsJob())
		if res.Duplicate {
			return is("duplicate of one "+res.State.String(), err)
		}
		return is("accepted", err)
	case "claim":
		leases, err := r.db.Queue.Claim(ctx, onceq.ClaimOptions{Lease: time.Hour})
		if len(leases) == 0 {
			return is("nothing", err)
		}
		return is("claimed", err)
	case "extend":
		return is("extended or locked", r.lease.Extend(ctx, time.Hour))
	case "complete":
		if r.blind {
			return is("done", completeBlindly(ctx, r.db, db, r.lease.ID, 0))
		}
		return is("done", r.lease.Complete(ctx, db))
	case "release":
		return is("released", r.lease.Release(ctx))
	case "cancel":
		state, err := r.db.Queue.Cancel(ctx, db, r.old)
		if state == onceq.StateRunning {
			return is("asked for", err)
		}
		return is(state.String(), err)
	case "redrive":
		state, err := onceqops.New(r.db.Queue).Redrive(ctx, db, r.old)
		return is("redriven, "+state.String(), err)
	case "discard":
		return is("discarded", onceqops.New(r.db.Queue).Discard(ctx, db, r.old))
	case "resolve":
		return is("resolved", onceqops.New(r.db.Queue).Resolve(ctx, db, r.old, pairsEffect, onceq.Applied(1)))
	case "reschedule":
		return is("to run again", r.lease.Fail(ctx, onceq.Reschedule(0)))
	case "effect":
		called := "replayed"
		_, err := onceq.Once(ctx, r.lease, pairsEffect, func(context.Context, string) (int, error) {
			called = "called"
			return 1, nil
		})
		if errors.Is(err, onceq.ErrNameUsed) {
			return "used", nil
		}
		return is(called, err)
	case "reap":
		reaper, err := onceq.NewReaper(r.db.Queue, onceq.ReaperConfig{})
		if err != nil {
			return "", err
		}
		n, err := reaper.RunOnce(ctx)
		if n.Fences > 0 {
			return is("pruned", err)
		}
		return is("kept", err)
	}
	return "", fmt.Errorf("no operation %q", op)
}

// prepare brings the key into the state that a pair starts from.
func (r *pairsRun) prepare(start string) {
	t, ctx := r.t, r.t.Context()
	t.Helper()
	r.exec(`truncate onceq.jobs, onceq.job_fences, onceq.job_history, onceq.job_cancels`)
	r.lease, r.old = nil, 0
	if start == "absent" {
		return
	}
	res, err := r.db.Queue.Enqueue(ctx, r.db.Pool, pairsJob())
	require.NoError(t, err)
	r.old = res.ID
	if start == "waiting" {
		return
	}
	leases, err := r.db.Queue.Claim(ctx, onceq.ClaimOptions{Lease: time.Hour})
	require.NoError(t, err)
	r.lease = leases[0]
	doubt := func() error {
		_, err := onceq.Once(ctx, r.lease, pairsEffect, func(context.Context, string) (int, error) {
			return 0, errors.New("reset by peer")
		}, onceq.OnUncertain(onceq.Hold()))
		require.ErrorIs(t, err, onceq.ErrUncertain)
		return err
	}
	switch start {
	case "leased":
	case "dead":
		require.NoError(t, r.lease.Fail(ctx, onceq.Fatal(errors.New("this cannot be done"))))
	case "doubtful":
		_ = doubt()
	case "held":
		_ = doubt()
		require.NoError(t, r.lease.Fail(ctx, &onceq.HeldError{Key: pairsKey}))
	case "expired":
		r.db.ExpireLease(r.old)
	case "past":
		require.NoError(t, r.lease.Complete(ctx, nil))
		r.db.Advance(2 * time.Hour)
	default:
		t.Fatalf("no start %q", start)
	}
}

func (r *pairsRun) exec(statement string, args ...any) {
	r.t.Helper()
	if r.owner == nil {
		r.owner = conformance.Owner(r.t, r.db)
	}
	_, err := r.owner.Exec(r.t.Context(), schema(r.db, statement), args...)
	require.NoError(r.t, err)
}

// state returns the key's state.
func (r *pairsRun) state() string {
	info, err := r.db.Queue.GetByKey(r.t.Context(), r.db.Pool, "k", pairsKey)
	if errors.Is(err, onceq.ErrNotFound) {
		return "absent"
	}
	require.NoError(r.t, err)
	s := info.State.String()
	if r.old != 0 && info.ID != r.old {
		s = "new job " + s
	}
	return s
}

type pairsAnswer struct {
	what string
	err  error
}

// again is the answer of a transaction that Postgres wants to be retried.
const again = "to be run again"

// begin starts an operation that commits by itself, or in a caller's transaction that stays open.
func (r *pairsRun) begin(ctx context.Context, op string, open pgx.Tx) <-chan pairsAnswer {
	c := make(chan pairsAnswer, 1)
	go func() {
		if open != nil {
			what, err := r.do(ctx, op, open)
			c <- pairsAnswer{what, err}
			return
		}
		if !takesTx(op) {
			what, err := r.do(ctx, op, nil)
			c <- pairsAnswer{what, err}
			return
		}
		var what string
		err := pgx.BeginTxFunc(ctx, r.db.Pool, pgx.TxOptions{IsoLevel: r.level}, func(tx pgx.Tx) (err error) {
			if what, err = r.do(ctx, op, tx); what == "lost" {
				err = errUndone // the completion has raised an error, so a commit would fail
			}
			return err
		})
		if errors.Is(err, errUndone) {
			err = nil
		}
		if onceq.IsRetryable(err) {
			what, err = again, nil
		}
		c <- pairsAnswer{what, err}
	}()
	return c
}

// settled waits until an operation has answered, or its session waits for a lock. others are sessions that already
// wait.
func (r *pairsRun) settled(c <-chan pairsAnswer, others ...int32) (answer *pairsAnswer, pid int32) {
	r.t.Helper()
	for {
		err := r.db.Pool.QueryRow(r.t.Context(), `select pid from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock' and not pid = any ($1::int[])`, append([]int32{}, others...)).Scan(&pid)
		if err == nil {
			return nil, pid
		}
		require.ErrorIs(r.t, err, pgx.ErrNoRows)
		select {
		case a := <-c:
			return &a, 0
		default:
		}
	}
}

// forced runs a pair with the first operation held before its end. It returns the second's answer with the final state.
func (r *pairsRun) forced(p pair, commit bool) (outcome string, waited bool) {
	t, ctx := r.t, r.t.Context()
	t.Helper()
	r.prepare(p.start)
	end := func() {} // ends the first operation
	var first pairsAnswer
	var pid int32
	if takesTx(p.first) {
		tx, err := r.db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: r.level})
		require.NoError(t, err)
		first = <-r.begin(ctx, p.first, tx)
		end = func() {
			if commit {
				if first.err = tx.Commit(ctx); onceq.IsRetryable(first.err) {
					first = pairsAnswer{what: again}
				}
			} else {
				require.NoError(t, tx.Rollback(ctx))
			}
		}
	} else {
		gate, err := r.db.Pool.Begin(ctx)
		require.NoError(t, err)
		_, err = gate.Exec(ctx, `select pg_advisory_xact_lock(1)`)
		require.NoError(t, err)
		open := func() { require.NoError(t, gate.Rollback(ctx)) }
		c := r.begin(ctx, p.first, nil)
		var answer *pairsAnswer
		if answer, pid = r.settled(c); answer != nil {
			first = *answer // it changed nothing, so there is nothing to hold
			open()
		} else {
			end = func() {
				if commit {
					open()
					first = <-c
					return
				}
				_, err := r.db.Pool.Exec(ctx, `select pg_terminate_backend($1, 20000)`, pid) // its locks are gone then
				require.NoError(t, err)
				require.Error(t, (<-c).err)
				open()
			}
		}
	}
	c := r.begin(ctx, p.second, nil)
	second, _ := r.settled(c, pid)
	waited = second == nil
	end()
	if waited {
		answer := <-c
		second = &answer
	}
	require.NoError(t, first.err, "the first")
	require.NoError(t, second.err, "the second")
	if first.what == again {
		return first.what, waited
	}
	return second.what + " → " + r.state(), waited
}

// inTurn runs the second after the first.
func (r *pairsRun) inTurn(p pair) string {
	t, ctx := r.t, r.t.Context()
	t.Helper()
	r.prepare(p.start)
	var a pairsAnswer
	for _, op := range []string{p.first, p.second} {
		a = <-r.begin(ctx, op, nil)
		require.NoError(t, a.err, op)
	}
	return a.what + " → " + r.state()
}

// gate is a trigger that stops every commit of a change while the test holds advisory lock 1.
const gate = `
create function onceq.gate() returns trigger language plpgsql as $$
begin
  if pg_try_advisory_xact_lock(2) then
    perform pg_advisory_xact_lock(1);
  end if;
  return null;
end $$;
create constraint trigger gate after insert or update or delete on onceq.jobs
  deferrable initially deferred for each row execute function onceq.gate();
create constraint trigger gate after insert or update or delete on onceq.job_fences
  deferrable initially deferred for each row execute function onceq.gate();
create constraint trigger gate after insert or update or delete on onceq.job_cancels
  deferrable initially deferred for each row execute function onceq.gate()`

func TestPairs_EveryInterleavingHasItsOutcome(t *testing.T) {
	t.Parallel()
	ops := []string{"enqueue", "claim", "extend", "complete", "release", "cancel", "reap"}
	named := make(map[[2]string]bool)
	for _, p := range pairs {
		named[[2]string{p.first, p.second}] = true
	}
	for _, a := range ops {
		for _, b := range ops {
			require.True(t, named[[2]string{a, b}], "no row for %s, %s", a, b)
		}
	}
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
			r := &pairsRun{t: t, db: db, level: level}
			r.exec(gate)
			for _, p := range pairs {
				if level != pgx.ReadCommitted && !takesTx(p.first) && !takesTx(p.second) {
					continue // only the library's own level
				}
				t.Run(p.first+", "+p.second+", "+p.start, func(t *testing.T) {
					r := &pairsRun{t: t, db: db, owner: r.owner, level: level}
					want := p.committed
					if level != pgx.ReadCommitted && p.above != "" {
						want = p.above
					}
					committed, waited := r.forced(p, true)
					if level == pgx.Serializable && strings.HasPrefix(committed, again) {
						want = committed // Postgres remembers reads by page, so it may refuse any of these without need
					}
					require.NoError(t, db.Check())
					undone, _ := r.forced(p, false)
					require.NoError(t, db.Check())
					after := r.inTurn(p)
					require.NoError(t, db.Check())
					t.Logf("{%q, %q, %q, %t, %q, %q, %q, %q},", p.first, p.second, p.start, waited, committed, p.above, undone, after)
					require.Equal(t, p.waits, waited, "waits")
					require.Equal(t, want, committed, "the first commits")
					require.Equal(t, p.undone, undone, "the first rolls back")
					require.Equal(t, p.after, after, "one after the other")
				})
			}
		})
	}
}

// This tests the checks themselves: they must find a completion that ignores the token. Then exactly those rows have
// another outcome in which the lease is lost before the completion.
func TestPairs_FindACompletionWithoutTheToken(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck(), queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	r := &pairsRun{t: t, db: db, level: pgx.ReadCommitted, blind: true}
	r.exec(gate)
	for _, p := range pairs {
		if p.second != "complete" {
			continue
		}
		committed, _ := r.forced(p, true)
		require.Equal(t, strings.HasPrefix(p.committed, "lost"), committed != p.committed, "%s, %s: %s", p.first, p.start, committed)
		after := r.inTurn(p)
		require.Equal(t, strings.HasPrefix(p.after, "lost"), after != p.after, "%s, %s: %s", p.first, p.start, after)
	}
}

// A cancellation may come just while the job is given back, or while somebody cancels it and then rolls back. It answers
// that the job is running, but nobody runs it who could be told. The next claim cancels the job and never hands it to a
// handler.
func TestPairs_ACancellationThatNobodyHeardIsCarriedOutByTheNextClaim(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	r := &pairsRun{t: t, db: db, level: pgx.ReadCommitted}
	r.exec(gate)
	for _, c := range []struct {
		pair
		commit bool
		state  string
	}{
		{pair{first: "release", second: "cancel", start: "leased"}, true, "waiting"},
		{pair{first: "cancel", second: "cancel", start: "waiting"}, false, "waiting"},
		{pair{first: "claim", second: "cancel", start: "expired"}, false, "retrying"},
	} {
		outcome, _ := r.forced(c.pair, c.commit)
		require.Equal(t, "asked for → "+c.state, outcome)
		what, err := r.do(t.Context(), "claim", nil)
		require.NoError(t, err)
		require.Equal(t, "nothing → cancelled", what+" → "+r.state(), "%s, %s", c.first, c.second)
		require.NoError(t, db.Check())

		outcome, _ = r.forced(c.pair, c.commit)
		require.Equal(t, "asked for → "+c.state, outcome)
		k := onceq.Kind[any]{Name: "k"}
		ran := db.Drain(k.Handle(func(context.Context, *onceq.Lease, any) error { return errors.New("it ran") }))
		require.Len(t, ran, 1)
		require.Equal(t, onceq.StateCancelled, ran[0].State)
		require.NoError(t, ran[0].Err)
		require.Equal(t, "cancelled", r.state())
	}
}
