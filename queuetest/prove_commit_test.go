package queuetest_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// proveOwnTransaction proves a handler that completes its job in a transaction of its own.
func proveOwnTransaction(
	before, inside func(ctx context.Context, p *queuetest.Process, l *onceq.Lease) error,
	after func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, err error) error,
) queuetest.Proof {
	return queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
				if err := before(ctx, p, l); err != nil {
					return err
				}
				tx, err := p.Pool.Begin(ctx)
				if err != nil {
					return err
				}
				defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
				if _, err := tx.Exec(ctx, `insert into charges values ($1, '')`, o.ID); err != nil {
					return err
				}
				if err := l.Complete(ctx, tx); err != nil {
					return err
				}
				if err := inside(ctx, p, l); err != nil {
					return err
				}
				return after(ctx, p, l, tx.Commit(ctx))
			})
		},
		Check: func(o *queuetest.Outcome) {
			require.Len(o, o.Effects, 1)
			require.Equal(o, 1, o.Count(`select count(*) from charges`))
		},
	}
}

// A completion holds only once its transaction commits. Until then the process has its lease, and every fault comes
// there too.
func TestProve_UntilTheCommit(t *testing.T) {
	t.Parallel()
	type process = queuetest.Process
	nothing := func(context.Context, *process, *onceq.Lease) error { return nil }
	charge := func(ctx context.Context, p *process, l *onceq.Lease) error {
		_, err := send(ctx, p.Client, "POST", "https://api.example/charges", "", "Idempotency-Key", l.IdempotencyKey("charge"))
		return err
	}
	as := func(_ context.Context, _ *process, _ *onceq.Lease, err error) error { return err }

	t.Run("right", func(t *testing.T) {
		t.Parallel()
		proven, err := queuetest.ProveAll(t, queuetest.AtSteps(proveOwnTransaction(nothing, charge, as), "completion", "charges", "commit"), "")
		require.NoError(t, err)
		require.Empty(t, proven.Failures)
		require.Equal(t, []string{"onceq's claim", "`begin`", "`insert into charges values …`", "onceq's completion", "POST api.example/charges", "`commit`"}, proven.Steps[:6])
		for _, name := range []string{
			"stop-4", "cut-5-before", "cut-5-after", "fail-5", "refuse-5", "freeze-5", "meet-5", "stop-5",
			"cut-6-before", "cut-6-after", "freeze-6", "meet-6",
		} {
			require.Contains(t, proven.Faults, name)
		}
	})
	t.Run("a lost commit taken for a rollback", func(t *testing.T) {
		t.Parallel()
		refund := func(ctx context.Context, p *process, l *onceq.Lease, err error) error {
			if err != nil {
				_, _ = send(ctx, p.Client, "POST", "https://api.example/refunds", "", "Idempotency-Key", l.IdempotencyKey("refund"))
			}
			return err
		}
		all := strings.Join(said(t, queuetest.AtSteps(proveOwnTransaction(charge, nothing, refund), "commit")), "\n")
		require.Contains(t, all, "lost its connection before `commit`")
		require.Contains(t, all, "lost its connection after `commit`, before its answer")
	})
	t.Run("a call after the completion, and no look at its error", func(t *testing.T) {
		t.Parallel()
		try := func(ctx context.Context, p *process, l *onceq.Lease) error {
			_ = charge(ctx, p, l)
			return nil
		}
		all := strings.Join(said(t, queuetest.AtOwnSteps(proveOwnTransaction(nothing, try, as))), "\n")
		require.Contains(t, all, "lost its connection before POST api.example/charges; then POST api.example/charges happened never")
	})
	t.Run("a transaction that is rolled back", func(t *testing.T) {
		t.Parallel()
		undo := errors.New("a change of mind")
		proof := proveOwnTransaction(nothing, nothing, as)
		proof.Check = nil
		proof.Handler = func(p *process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
				if l.Attempt > 1 {
					return nil
				}
				err := pgx.BeginFunc(ctx, p.Pool, func(tx pgx.Tx) error { return errors.Join(l.Complete(ctx, tx), undo) })
				return errors.Join(err, charge(ctx, p, l))
			})
		}
		proven, err := queuetest.ProveAll(t, proof, "none")
		require.NoError(t, err)
		require.Equal(t, []string{"onceq's completion", "`rollback`", "POST api.example/charges"}, proven.Steps[2:5])
		require.Contains(t, proven.Faults, "cut-5-before", "the lease is there again")
	})
}
