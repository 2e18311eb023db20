package queuetest_test

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// proveJoin proves two pages, and a book that waits for them. The second page adds a third one.
func proveJoin(add func(ctx context.Context, tx pgx.Tx, p *queuetest.Process, l *onceq.Lease, job onceq.Job) error) queuetest.Proof {
	page := onceq.Kind[int]{Name: "page", Key: strconv.Itoa}
	book := onceq.Kind[string]{Name: "book"}
	return queuetest.Proof{
		Setup: queuetest.SQL(`create table scans (n int); create table books (pages int[])`),
		Jobs: func() []onceq.Job {
			bound := book.Job("Emma")
			bound.After = []onceq.JobRef{page.Ref(1), page.Ref(2)}
			return []onceq.Job{page.Job(1), page.Job(2), bound}
		},
		Handlers: func(p *queuetest.Process) []onceq.Handler {
			return []onceq.Handler{
				page.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, n int) error {
					if n == 2 {
						if err := add(ctx, tx, p, l, page.Job(3)); err != nil {
							return err
						}
					}
					if err := l.SetResult(n); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, `insert into scans values ($1)`, n)
					return err
				}),
				book.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ string) error {
					var pages []int
					for m, err := range l.Members(ctx) {
						if err != nil {
							return err
						}
						var n int
						if err := json.Unmarshal(m.Result, &n); err != nil {
							return err
						}
						pages = append(pages, n)
					}
					_, err := tx.Exec(ctx, `insert into books values ($1)`, pages)
					return err
				}),
			}
		},
		Check: func(o *queuetest.Outcome) {
			require.Equal(o, 3, o.Count(`select count(*) from scans`))
			require.Equal(o, 1, o.Count(`select count(*) from books`))
			require.Equal(o, 1, o.Count(`select count(*) from books where pages = '{1,2,3}'`))
		},
	}
}

// Members of a group and the job that waits for them: each fault comes before, between and after.
func TestProve_AJoin(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: TestProve_AJoinThatGrowsTwice has its steps")
	}
	t.Parallel()
	queuetest.Prove(t, proveJoin(func(ctx context.Context, tx pgx.Tx, _ *queuetest.Process, l *onceq.Lease, job onceq.Job) error {
		_, err := l.AddMembers(ctx, tx, job)
		return err
	}))
}

// A member that adds others outside the transaction that completes it adds them again in the next run.
func TestProve_AJoinThatGrowsTwice(t *testing.T) {
	t.Parallel()
	all := strings.Join(said(t, queuetest.AtOwnSteps(proveJoin(func(ctx context.Context, _ pgx.Tx, p *queuetest.Process, l *onceq.Lease, job onceq.Job) error {
		_, err := l.AddMembers(ctx, p.Pool, onceq.Job{Kind: job.Kind, Payload: job.Payload})
		return err
	}))), "\n")
	require.Contains(t, all, "expected: 3")
	require.Contains(t, all, "actual  : 4")
}
