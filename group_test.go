package onceq_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// groupScene is a group of which this test has leases on two members, one is dead, one was cancelled, one waits unclaimed, and
// one was claimed before anybody waited for it. An older job is leased, and another one unclaimed, for which nobody waits.
type groupScene struct {
	db                                 *queuetest.DB
	rule                               onceq.DeadRule
	then                               int64
	first, second, untold, strange     *onceq.Lease
	dead, cancelled, unclaimed, nobody int64
	follows                            []int64 // jobs that wait
}

var groupPart, groupWhole = onceq.Kind[int]{Name: "part"}, onceq.Kind[int]{Name: "whole"}

func newGroupScene(t *testing.T, db *queuetest.DB, rule onceq.DeadRule) *groupScene {
	t.Helper()
	ctx := context.Background()
	s := &groupScene{db: db, rule: rule}
	q, pool := db.Queue, db.Pool
	enqueue := func() int64 {
		r, err := q.Enqueue(ctx, pool, groupPart.Job(0))
		require.NoError(t, err)
		return r.ID
	}
	claim := func() *onceq.Lease {
		leases, err := q.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		return leases[0]
	}
	untold := enqueue()
	s.untold = claim()
	enqueue()
	s.strange = claim()
	job := groupWhole.Job(0)
	job.IfDead, job.After = rule, []onceq.JobRef{{ID: untold}}
	g, err := q.EnqueueGroup(ctx, pool, slices.Repeat([]onceq.Job{groupPart.Job(1)}, 5), job)
	require.NoError(t, err)
	s.dead = g.Members[0].ID
	require.NoError(t, claim().Fail(ctx, onceq.Fatal(errors.New("no"))))
	s.first, s.second = claim(), claim()
	s.unclaimed, s.cancelled = g.Members[3].ID, g.Members[4].ID
	_, err = q.Cancel(ctx, pool, s.cancelled)
	require.NoError(t, err)
	s.nobody = enqueue()
	s.then, s.follows = g.Then.ID, []int64{g.Then.ID}
	if !testing.Short() {
		require.NoError(t, db.Check())
	}
	return s
}

// groupMember says which member a move ends, brings back or waits for.
var groupMember = map[string]string{
	"complete": "first", "die": "first",
	"redrive the dead one": "dead", "discard": "dead", "wait for the dead one": "dead",
	"redrive the cancelled one": "cancelled",
}

// completeOthers completes all members but those of the moves, so that these decide what becomes of the job that waits.
func (s *groupScene) completeOthers(t *testing.T, moves ...string) {
	t.Helper()
	ctx := context.Background()
	q, pool := s.db.Queue, s.db.Pool
	of := make(map[string]bool)
	for _, move := range moves {
		of[groupMember[move]] = true
	}
	for member, id := range map[string]int64{"dead": s.dead, "cancelled": s.cancelled} {
		if !of[member] {
			_, err := onceqops.New(q).Redrive(ctx, pool, id)
			require.NoError(t, err)
		}
	}
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
	require.NoError(t, err)
	for _, l := range append(leases, s.second, s.untold) {
		require.NoError(t, l.Complete(ctx, nil))
	}
	require.NoError(t, look(ctx, q)) // nobody tells the end of the one that was claimed before
	if !of["first"] {
		require.NoError(t, s.first.Complete(ctx, nil))
	}
	require.NoError(t, s.db.Check())
}

// stops says of a member that is finished that the job which waits does not run because of it.
func (s *groupScene) stops(m onceq.Member) bool {
	switch s.rule {
	case onceq.DeadWait:
		return m.State == onceq.StateDead
	case onceq.DeadCancel:
		return m.State == onceq.StateDead || m.State == onceq.StateCancelled
	}
	return false
}

// listed gives what an iterator yields, up to its error.
func listed[T any](all iter.Seq2[T, error]) (list []T, err error) {
	for one, err := range all {
		if err != nil {
			return list, err
		}
		list = append(list, one)
	}
	return list, nil
}

// groupMoves are what may happen to a group, each in a transaction.
var groupMoves = map[string]func(ctx context.Context, s *groupScene, tx pgx.Tx) error{
	"complete":         func(ctx context.Context, s *groupScene, tx pgx.Tx) error { return s.first.Complete(ctx, tx) },
	"complete second":  func(ctx context.Context, s *groupScene, tx pgx.Tx) error { return s.second.Complete(ctx, tx) },
	"complete untold":  func(ctx context.Context, s *groupScene, tx pgx.Tx) error { return s.untold.Complete(ctx, tx) },
	"complete strange": func(ctx context.Context, s *groupScene, tx pgx.Tx) error { return s.strange.Complete(ctx, tx) },
	"add and complete": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		if _, err := s.second.AddMembers(ctx, tx, groupPart.Job(2)); err != nil {
			return err
		}
		return s.second.Complete(ctx, tx)
	},
	"die": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		return s.db.Queue.FailAll(ctx, tx, []*onceq.Lease{s.first}, onceq.Fatal(errors.New("no")))
	},
	"look":                     func(ctx context.Context, s *groupScene, _ pgx.Tx) error { return look(ctx, s.db.Queue) },
	"promote":                  func(ctx context.Context, s *groupScene, tx pgx.Tx) error { return s.db.Queue.PromoteIn(ctx, tx) },
	"sweep":                    func(ctx context.Context, s *groupScene, tx pgx.Tx) error { return s.db.Queue.SweepIn(ctx, tx) },
	"wait for a leased one":    waitFor(func(s *groupScene) int64 { return s.first.ID }),
	"wait for a strange one":   waitFor(func(s *groupScene) int64 { return s.strange.ID }),
	"wait for an unclaimed":    waitFor(func(s *groupScene) int64 { return s.unclaimed }),
	"wait for one of nobody":   waitFor(func(s *groupScene) int64 { return s.nobody }),
	"wait for the dead one":    waitFor(func(s *groupScene) int64 { return s.dead }),
	"wait for the one waiting": waitFor(func(s *groupScene) int64 { return s.then }),
	"cancel the unclaimed": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		_, err := s.db.Queue.Cancel(ctx, tx, s.unclaimed)
		return err
	},
	"cancel that of nobody": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		_, err := s.db.Queue.Cancel(ctx, tx, s.nobody)
		return err
	},
	"cancel the one waiting": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		_, err := s.db.Queue.Cancel(ctx, tx, s.then)
		return err
	},
	"cancel and redrive the one waiting": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		if _, err := s.db.Queue.Cancel(ctx, tx, s.then); err != nil {
			return err
		}
		_, err := onceqops.New(s.db.Queue).Redrive(ctx, tx, s.then)
		return err
	},
	"redrive the dead one": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		_, err := onceqops.New(s.db.Queue).Redrive(ctx, tx, s.dead)
		return err
	},
	"redrive the cancelled one": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		_, err := onceqops.New(s.db.Queue).Redrive(ctx, tx, s.cancelled)
		return err
	},
	"discard": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		return onceqops.New(s.db.Queue).Discard(ctx, tx, s.dead)
	},
}

func waitFor(id func(*groupScene) int64) func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
	return func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		job := groupWhole.Job(1)
		job.After, job.IfDead = []onceq.JobRef{{ID: id(s)}}, onceq.DeadRun
		_, err := s.db.Queue.Enqueue(ctx, tx, job)
		return err
	}
}

// groupRow says which moves change the same row, and so wait for each other.
var groupRow = map[string]string{
	"complete": "first", "die": "first",
	"complete second": "second", "add and complete": "second",
	"redrive the dead one": "dead", "discard": "dead",
}

// leftOut says of a pair that it is not tried: with -short five in six of those that both commit at READ COMMITTED, and more of
// the others, other ones in each run.
func leftOut(level pgx.TxIsoLevel, commit bool) bool {
	if level == pgx.ReadCommitted && commit {
		return rand.IntN(conformance.Sized(6, 1)) > 0
	}
	return rand.IntN(conformance.Sized(24, 1)) > 0
}

// Every pair of what may happen to a group, the second while the first is not committed, in three isolation levels. Nobody
// waits but for the same row, and in the end all jobs have run: those that wait after those that they wait for.
func TestGroup_EveryPairInEveryOrder(t *testing.T) {
	t.Parallel()
	names := slices.Sorted(maps.Keys(groupMoves))
	firsts := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == "look" }) // nothing of it stays open
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, first := range firsts {
			t.Run(fmt.Sprint(level, ", ", first), func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}), queuetest.Schema("onceq"))
				for _, second := range names {
					for _, commit := range []bool{true, false} {
						if level != pgx.ReadCommitted && (ownLevel[first] || !commit) || leftOut(level, commit) {
							continue
						}
						t.Run(fmt.Sprint("then ", second, ", commit ", commit), func(t *testing.T) {
							groupPair(t, newGroupScene(t, db, onceq.DeadRun), level, first, second, commit)
						})
					}
				}
			})
		}
	}
}

// The same for the rules under which a dead member decides what becomes of the job that waits: the pairs in which a member dies or a
// finished one comes back or is discarded, and all others have completed. Under DeadWait the job waits as long as one is dead, and
// under DeadCancel it is cancelled because of one that is dead or was cancelled, and for no other reason.
func TestGroup_EveryDeathInEveryOrder(t *testing.T) {
	t.Parallel()
	deaths := map[string]bool{"die": true, "discard": true, "redrive the cancelled one": true, "redrive the dead one": true}
	names := slices.Sorted(maps.Keys(deaths))
	names = append(names, "complete", "promote", "wait for the dead one", "wait for the one waiting", "cancel the one waiting", "cancel and redrive the one waiting", "look")
	for name, rule := range map[string]onceq.DeadRule{"DeadWait": onceq.DeadWait, "DeadCancel": onceq.DeadCancel} {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			t.Run(fmt.Sprint(name, ", ", level), func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}), queuetest.Schema("onceq"))
				for _, a := range names {
					for _, b := range names {
						if !deaths[a] && !deaths[b] || a == "look" {
							continue
						}
						if rule == onceq.DeadWait && (a == "redrive the cancelled one" || b == "redrive the cancelled one") {
							continue // a cancelled member is then no other than a completed one
						}
						for _, commit := range []bool{true, false} {
							if level != pgx.ReadCommitted && (ownLevel[a] || !commit) || leftOut(level, commit) {
								continue
							}
							t.Run(fmt.Sprint(a, ", then ", b, ", commit ", commit), func(t *testing.T) {
								s := newGroupScene(t, db, rule)
								s.completeOthers(t, a, b)
								groupPair(t, s, level, a, b, commit)
							})
						}
					}
				}
			})
		}
	}
}

func groupPair(t *testing.T, s *groupScene, level pgx.TxIsoLevel, a, b string, commit bool) {
	ctx := context.Background()
	q, pool := s.db.Queue, s.db.Pool
	check := func() { t.Helper(); require.NoError(t, s.db.Check()) }
	often := check // each takes as long as several moves
	if testing.Short() {
		often = t.Helper
	}
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	require.NoError(t, groupMoves[a](ctx, s, tx))
	check()
	done := make(chan error, 1)
	go func() {
		other := level
		if ownLevel[b] {
			other = pgx.ReadCommitted
		}
		done <- pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: other}, func(tx pgx.Tx) error { return groupMoves[b](ctx, s, tx) })
	}()
	var waits bool
	for !waits && err == nil {
		select {
		case err = <-done:
			done <- err
			err = errDone
		case <-time.After(5 * time.Millisecond):
			waits = conformance.Blocked(t, s.db) > 0
		}
	}
	redrives := map[string]bool{"redrive the dead one": true, "redrive the cancelled one": true}
	sameRow := a == b || groupRow[a] != "" && groupRow[a] == groupRow[b]
	touches := sameRow || redrives[a] && redrives[b] || // both lock the row of the one that waits
		redrives[b] && (a == "promote" || a == "cancel the one waiting" || a == "cancel and redrive the one waiting" || a == "wait for the one waiting") ||
		a == "wait for the dead one" && (groupRow[b] == "dead")
	require.False(t, waits && !touches, "%s waits for %s", b, a)
	check()
	if commit {
		if err := tx.Commit(ctx); level != pgx.Serializable || !onceq.IsRetryable(err) {
			require.NoError(t, err)
		}
	} else {
		require.NoError(t, tx.Rollback(ctx))
	}
	err = <-done
	var lost *onceq.LeaseError
	switch {
	case err == nil:
	case sameRow && (errors.As(err, &lost) || onceq.IsRetryable(err) || errors.Is(err, onceq.ErrNotFound) || errors.Is(err, onceqops.ErrUnfinished)):
	case level != pgx.ReadCommitted && touches && onceq.IsRetryable(err):
	case level == pgx.Serializable && onceq.IsRetryable(err):
	default:
		require.NoError(t, err)
	}
	check()
	for _, l := range []*onceq.Lease{s.first, s.second, s.untold, s.strange} {
		if err := l.Complete(ctx, nil); err != nil {
			require.ErrorIs(t, err, onceq.ErrLeaseLost)
		}
		often()
	}
	if s.rule != onceq.DeadRun {
		s.db.Advance(2 * time.Second) // a promoter may have put the job off, by a second at most
	}
	ran := map[int64]bool{}
	finish := func() {
		t.Helper()
		for {
			leases, err := q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
			require.NoError(t, err)
			for _, l := range leases {
				members, err := listed(l.Members(ctx))
				require.NoError(t, err)
				for _, m := range members {
					require.True(t, m.State.Finished(), "job %d runs, and waits for %+v", l.ID, m)
					require.False(t, l.ID == s.then && s.stops(m), "job %d runs, in spite of %+v", l.ID, m)
				}
				require.False(t, ran[l.ID], "job %d runs twice", l.ID)
				ran[l.ID] = true
				require.NoError(t, l.Complete(ctx, nil))
			}
			often()
			if len(leases) == 0 {
				break
			}
		}
	}
	finish()
	if s.rule == onceq.DeadWait {
		for _, id := range []int64{s.dead, s.first.ID} { // if they are dead
			if _, err := onceqops.New(q).Redrive(ctx, pool, id); err != nil {
				require.ErrorIs(t, err, onceq.ErrNotFound)
			}
		}
	}
	if s.rule != onceq.DeadRun {
		finish() // who waits for a job that a promoter has cancelled may hear of that from its next look
	}
	check()
	var left int
	require.NoError(t, pool.QueryRow(ctx, `select (select count(*) from onceq.jobs) + (select count(*) from onceq.job_waits)`).Scan(&left))
	require.Zero(t, left, "jobs wait for ever")
	cancels := map[string]bool{"cancel the one waiting": true, "cancel and redrive the one waiting": true}
	if ran[s.then] || cancels[a] || cancels[b] {
		return
	}
	members, err := listed(onceqops.New(q).Members(ctx, pool, s.then))
	require.NoError(t, err)
	require.True(t, s.rule == onceq.DeadCancel && slices.ContainsFunc(members, s.stops), "the job that waits did not run, after %+v", members)
	then, err := q.Get(ctx, pool, s.then)
	require.NoError(t, err)
	require.Equal(t, onceq.StateCancelled, then.State)
}
