package onceq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// groupScene is a group of which this test has leases on two members, one is dead, one was cancelled, one waits unclaimed, and
// one was claimed before anybody waited for it. An older job is leased, and another one unclaimed, for which nobody waits.
type groupScene struct {
	db                                 *queuetest.DB
	then                               int64
	first, second, untold, strange     *onceq.Lease
	dead, cancelled, unclaimed, nobody int64
	follows                            []int64 // jobs that wait
}

var groupPart, groupWhole = onceq.Kind[int]{Name: "part"}, onceq.Kind[int]{Name: "whole"}

func newGroupScene(t *testing.T, db *queuetest.DB, rule onceq.DeadRule) *groupScene {
	t.Helper()
	ctx := context.Background()
	s := &groupScene{db: db}
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
	require.NoError(t, db.Check())
	return s
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
	"promote": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, onceq.LockCalls, time.Time{}); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, onceq.PromoteCalls, time.Time{}, 200, int64(0), int64(0), int64(0), int64(0), nil, nil)
		return err
	},
	"sweep": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, onceq.SweepMembers)
		return err
	},
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
		_, err := s.db.Queue.Redrive(ctx, tx, s.then)
		return err
	},
	"redrive the dead one": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		_, err := s.db.Queue.Redrive(ctx, tx, s.dead)
		return err
	},
	"redrive the cancelled one": func(ctx context.Context, s *groupScene, tx pgx.Tx) error {
		_, err := s.db.Queue.Redrive(ctx, tx, s.cancelled)
		return err
	},
	"discard": func(ctx context.Context, s *groupScene, tx pgx.Tx) error { return s.db.Queue.Discard(ctx, tx, s.dead) },
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
	"complete second": "second", "add and complete": "second",
	"redrive the dead one": "dead", "discard": "dead",
}

// Every pair of what may happen to a group, the second while the first is not committed, in three isolation levels. Nobody
// waits but for the same row, and in the end all jobs have run: those that wait after those that they wait for.
func TestGroup_EveryPairInEveryOrder(t *testing.T) {
	t.Parallel()
	names := slices.Sorted(maps.Keys(groupMoves))
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, first := range names {
			t.Run(fmt.Sprint(level, ", ", first), func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}), queuetest.Schema("onceq"))
				for _, second := range names {
					for _, commit := range []bool{true, false} {
						if level != pgx.ReadCommitted && (first == "promote" || first == "sweep" || !commit) {
							continue // promoters are always at that level
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

func groupPair(t *testing.T, s *groupScene, level pgx.TxIsoLevel, a, b string, commit bool) {
	ctx := context.Background()
	check := func() { t.Helper(); require.NoError(t, s.db.Check()) }
	tx, err := s.db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	require.NoError(t, groupMoves[a](ctx, s, tx))
	check()
	done := make(chan error, 1)
	go func() {
		other := level
		if b == "promote" || b == "sweep" {
			other = pgx.ReadCommitted
		}
		done <- pgx.BeginTxFunc(ctx, s.db.Pool, pgx.TxOptions{IsoLevel: other}, func(tx pgx.Tx) error { return groupMoves[b](ctx, s, tx) })
	}()
	const blocked = `select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`
	var waits bool
	for !waits && err == nil {
		select {
		case err = <-done:
			done <- err
			err = errDone
		case <-time.After(5 * time.Millisecond):
			require.NoError(t, s.db.Pool.QueryRow(ctx, blocked).Scan(&waits))
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
	case sameRow && (errors.As(err, &lost) || onceq.IsRetryable(err) || errors.Is(err, onceq.ErrNotFound) || errors.Is(err, onceq.ErrUnfinished)):
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
		check()
	}
	ran := map[int64]bool{}
	for {
		leases, err := s.db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 10})
		require.NoError(t, err)
		for _, l := range leases {
			members, err := l.Members(ctx, 0, 0)
			require.NoError(t, err)
			for _, m := range members {
				require.True(t, m.State.Finished(), "job %d runs, and waits for %+v", l.ID, m)
			}
			require.False(t, ran[l.ID], "job %d runs twice", l.ID)
			ran[l.ID] = true
			require.NoError(t, l.Complete(ctx, nil))
		}
		check()
		if len(leases) == 0 {
			break
		}
	}
	var left int
	require.NoError(t, s.db.Pool.QueryRow(ctx, `select (select count(*) from onceq.jobs) + (select count(*) from onceq.job_waits)`).Scan(&left))
	require.Zero(t, left, "jobs wait for ever")
}
