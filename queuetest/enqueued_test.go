package queuetest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

type invoice struct {
	Order int    `json:"order"`
	To    string `json:"to"`
}

var invoices = onceq.Kind[invoice]{Name: "invoice", Queue: "billing", Key: func(i invoice) string { return fmt.Sprint("order:", i.Order) }}

// failing takes what a failed test says.
type failing struct {
	testing.TB
	said string
}

func (f *failing) Fatalf(format string, args ...any) {
	f.said = fmt.Sprintf(format, args...)
	panic(f)
}

func (f *failing) Helper() {}

// fails returns what a failed requirement says.
func fails(t *testing.T, f *failing, fn func()) string {
	t.Helper()
	require.PanicsWithValue(t, f, fn)
	return f.said
}

func TestRequireEnqueued(t *testing.T) {
	t.Parallel()
	f := &failing{TB: t}
	db := queuetest.New(f)
	of := func(order int) func(invoice) bool { return func(i invoice) bool { return i.Order == order } }

	require.Contains(t, fails(t, f, func() { queuetest.RequireEnqueued(db, nil, invoices, nil) }), `0 jobs of kind "invoice" match, want 1; there are no jobs at all. Is the transaction`)
	queuetest.RequireNotEnqueued(db, nil, invoices, nil)

	// In a transaction it is seen with the transaction alone, and after a rollback not at all.
	stop := errors.New("stop")
	require.ErrorIs(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		_, err := db.Queue.Enqueue(t.Context(), tx, invoices.Job(invoice{7, "ada"}))
		require.NoError(t, err)
		job, got := queuetest.RequireEnqueued(db, tx, invoices, of(7))
		require.Equal(t, invoice{7, "ada"}, got)
		require.Equal(t, "order:7", job.Key)
		require.Equal(t, onceq.StateWaiting, job.State)
		queuetest.RequireNotEnqueued(db, nil, invoices, nil)
		return stop
	}), stop)
	queuetest.RequireNotEnqueued(db, nil, invoices, nil)

	for order := range 3 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, invoices.Job(invoice{order, "ada"}))
		require.NoError(t, err)
	}
	raw := onceq.Kind[[]byte]{Name: "raw"}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, raw.Job([]byte("\x00\x01")))
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "invoice", Payload: strings.Repeat("x", 300)})
	require.NoError(t, err)

	_, bytes := queuetest.RequireEnqueued(db, nil, raw, nil)
	require.Equal(t, []byte("\x00\x01"), bytes)
	queuetest.RequireEnqueued(db, nil, invoices, of(2))
	said := fails(t, f, func() { queuetest.RequireEnqueued(db, nil, invoices, of(9)) })
	for _, line := range []string{
		`0 jobs of kind "invoice" match, want 1; there are:`,
		`of kind "invoice" in queue "billing", waiting: {"to": "ada", "order": 2}, key "order:2"`,
		`of kind "raw" in queue "default", waiting: 2 bytes`,
		`xx …`, `(it does not decode into queuetest_test.invoice: `,
	} {
		require.Contains(t, said, line)
	}
	said = fails(t, f, func() { queuetest.RequireEnqueued(db, nil, invoices, func(i invoice) bool { return i.Order < 2 }) })
	require.Contains(t, said, `2 jobs of kind "invoice" match, want 1`)
	require.Equal(t, 2, strings.Count(said, " (matches)"))
	said = fails(t, f, func() { queuetest.RequireNotEnqueued(db, nil, invoices, of(1)) })
	require.Contains(t, said, `1 jobs of kind "invoice" match, want none`)

	// Many jobs are a short list.
	var many []onceq.Job
	for range 1005 {
		many = append(many, onceq.Job{Kind: "many", Payload: 1})
	}
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, many)
	require.NoError(t, err)
	queuetest.RequireEnqueued(db, nil, invoices, of(0)) // the oldest
	require.Contains(t, fails(t, f, func() { queuetest.RequireEnqueued(db, nil, invoices, of(9)) }), "and 990 older ones")
}

// Setup is called once for all tests of its name, and each begins with a copy.
func TestSetup(t *testing.T) {
	t.Parallel()
	calls := 0
	shop := queuetest.Setup("TestSetup", func(ctx context.Context, pool *pgxpool.Pool) error {
		calls++
		if calls == 1 {
			return errors.New("the first one fails")
		}
		return queuetest.SQL(`create table orders (id int); insert into orders values (7)`)(ctx, pool)
	})
	f := &failing{TB: t}
	require.Contains(t, fails(t, f, func() { queuetest.New(f, shop) }), `set-up "TestSetup": the first one fails`)
	for range 3 {
		db := queuetest.New(t, shop)
		var n int
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from orders`).Scan(&n))
		require.Equal(t, 1, n)
		_, err := db.Pool.Exec(t.Context(), `insert into orders values (8)`)
		require.NoError(t, err)
		_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k"})
		require.NoError(t, err)
	}
	require.Equal(t, 2, calls)
	without := queuetest.New(t)
	var none bool
	require.NoError(t, without.Pool.QueryRow(t.Context(), `select to_regclass('orders') is null`).Scan(&none))
	require.True(t, none)
}
