package frompgboss

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/moving/internal/old"
	"github.com/onceq/onceq/queuetest"
)

var quiet = queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)})

func run(t *testing.T, db *queuetest.DB, args ...string) *old.Program {
	t.Helper()
	return old.Node(t, "run.mjs", args, []string{"DATABASE_URL=" + db.URL})
}

func enqueueAll(t *testing.T, db *queuetest.DB, users ...int) {
	t.Helper()
	for _, user := range users {
		require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			return enqueueAfter(t.Context(), db.Queue, tx, WelcomeMail{user})
		}))
	}
}

// sent drains the queue and counts the mails.
func sent(db *queuetest.DB) map[int]int {
	var mu sync.Mutex
	mails := map[int]int{}
	db.Drain(handlerAfter(func(_ context.Context, user int, _ string) error {
		mu.Lock()
		defer mu.Unlock()
		mails[user]++
		return nil
	}))
	return mails
}

// The code before the move, and the code after it, each work by themselves. A key is taken until its job is finished.
func TestBeforeAndAfter(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, quiet)
	require.Equal(t, "42 accepted\n42 refused\n", run(t, db, "send", "42", "42").Rest())
	worker := run(t, db, "work")
	require.Equal(t, "sending 42", worker.Next())
	require.Equal(t, "42 refused\n", run(t, db, "send", "42").Rest())
	require.Empty(t, worker.Rest())
	require.Equal(t, "42 accepted\n", run(t, db, "send", "42").Rest())

	enqueueAll(t, db, 43, 43)
	require.Equal(t, map[int]int{43: 1}, sent(db))
	enqueueAll(t, db, 43)
	require.Equal(t, map[int]int{43: 1}, sent(db))
}

// Waiting jobs of pg-boss are moved while a worker of pg-boss still has one, and while new jobs go to onceq. Some work is
// in both queues. Each mail is sent once.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t, quiet)
	run(t, db, "send", "1").Rest()
	worker := run(t, db, "work")
	require.Equal(t, "sending 1", worker.Next())
	run(t, db, "send", "2", "3", "4").Rest()
	_, err := db.Pool.Exec(ctx, `
update pgboss.job set state = case when data ->> 'userId' = '2' then 'retry' else state end,
       start_after = start_after + case when data ->> 'userId' = '4' then interval '1 hour' else interval '0' end
 where state = 'created'`)
	require.NoError(t, err)
	moved, err := Move(ctx, db.Pool, db.Queue)
	require.NoError(t, err)
	require.Equal(t, 3, moved)
	require.Empty(t, worker.Rest()) // the worker keeps its one job, 1, to the end
	states := func() (all []string) {
		require.NoError(t, db.Pool.QueryRow(ctx, `select array_agg(concat(data ->> 'userId', ' ', state)) from pgboss.job
			where name = 'welcome'`).Scan(&all))
		return all
	}
	require.Equal(t, []string{"1 completed"}, states())

	enqueueAll(t, db, 3, 4, 5) // new producers
	require.Equal(t, "3 accepted\n6 accepted\n", run(t, db, "send", "3", "6").Rest())
	moved, err = Move(ctx, db.Pool, db.Queue)
	require.NoError(t, err)
	require.Equal(t, 2, moved)
	require.Equal(t, map[int]int{2: 1, 3: 1, 5: 1, 6: 1}, sent(db))
	db.Advance(2 * time.Hour)
	require.Equal(t, map[int]int{4: 1}, sent(db))
	moved, err = Move(ctx, db.Pool, db.Queue)
	require.NoError(t, err)
	require.Zero(t, moved)
	require.Equal(t, []string{"1 completed"}, states())
}

// If the key of a row is taken by other work, Move changes nothing.
func TestMove_IsAllOrNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t, quiet)
	run(t, db, "send", "1", "2").Rest()
	_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "welcome", Key: "welcome:2", Payload: map[string]int{"userId": 2, "version": 2}})
	require.NoError(t, err)
	_, err = Move(ctx, db.Pool, db.Queue)
	var mismatch *onceq.MismatchError
	require.ErrorAs(t, err, &mismatch)
	require.Equal(t, "welcome:2", mismatch.Key)
	var waiting int
	require.NoError(t, db.Pool.QueryRow(ctx, `select count(*) from pgboss.job where name = 'welcome' and state = 'created'`).Scan(&waiting))
	require.Equal(t, 2, waiting)
}
