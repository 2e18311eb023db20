package fromriver

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

var quiet = slog.New(slog.DiscardHandler)

// outbox counts the mails that were sent.
type outbox struct {
	mu   sync.Mutex
	sent map[int]int
}

func (o *outbox) send(_ context.Context, user int, _ string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sent[user]++
	return nil
}

func (o *outbox) all() map[int]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.sent)
}

// withRiver gives a database that has River's tables too.
func withRiver(t *testing.T) *queuetest.DB {
	t.Helper()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: quiet}))
	migrator, err := rivermigrate.New(riverpgxv5.New(db.Pool), &rivermigrate.Config{Logger: quiet})
	require.NoError(t, err)
	_, err = migrator.Migrate(t.Context(), rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
	return db
}

// insert is what an old producer does. It needs no workers.
func insert(t *testing.T, db *queuetest.DB, users ...int) {
	t.Helper()
	client, err := river.NewClient(riverpgxv5.New(db.Pool), &river.Config{Logger: quiet})
	require.NoError(t, err)
	for _, user := range users {
		require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			return insertBefore(t.Context(), client, tx, WelcomeArgs{user})
		}))
	}
}

func enqueueAll(t *testing.T, db *queuetest.DB, users ...int) {
	t.Helper()
	for _, user := range users {
		require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			return enqueueAfter(t.Context(), db.Queue, tx, WelcomeMail{user})
		}))
	}
}

// work runs River with a worker until so many jobs are completed. It returns how many runs failed.
func work(t *testing.T, db *queuetest.DB, worker river.Worker[WelcomeArgs], completed int) (failed int) {
	t.Helper()
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	client, err := river.NewClient(riverpgxv5.New(db.Pool), &river.Config{
		Logger: quiet, Workers: workers, Queues: map[string]river.QueueConfig{"mail": {MaxWorkers: 10}},
	})
	require.NoError(t, err)
	events, unsubscribe := client.Subscribe(river.EventKindJobCompleted, river.EventKindJobFailed)
	defer unsubscribe()
	require.NoError(t, client.Start(t.Context()))
	for completed > 0 {
		switch event := <-events; event.Kind {
		case river.EventKindJobCompleted:
			completed--
		default:
			failed++
			_, err := client.JobRetry(t.Context(), event.Job.ID) // at once, instead of after River's backoff
			require.NoError(t, err)
		}
	}
	require.NoError(t, client.Stop(t.Context()))
	return failed
}

// The code before the move, and the code after it, each work by themselves.
func TestBeforeAndAfter(t *testing.T) {
	t.Parallel()
	db := withRiver(t)
	var mails outbox
	mails.sent = map[int]int{}
	insert(t, db, 42, 42)
	require.Zero(t, work(t, db, &WelcomeWorker{Mail: mails.send}, 1))
	insert(t, db, 42, 43) // the first stays for a day, and its arguments stay taken
	require.Zero(t, work(t, db, &WelcomeWorker{Mail: mails.send}, 1))
	require.Equal(t, map[int]int{42: 1, 43: 1}, mails.all())

	enqueueAll(t, db, 44, 44)
	require.Len(t, db.Drain(handlerAfter(mails.send)), 1)
	enqueueAll(t, db, 44)
	require.Empty(t, db.Drain(handlerAfter(mails.send)))
	require.Equal(t, map[int]int{42: 1, 43: 1, 44: 1}, mails.all())
}

// undone is a bridge that loses its connection once, at the end of its transaction.
type undone struct {
	*Bridge
	once sync.Once
}

func (u *undone) Work(ctx context.Context, job *river.Job[WelcomeArgs]) (err error) {
	fails := false
	u.once.Do(func() { fails = true })
	if !fails {
		return u.Bridge.Work(ctx, job)
	}
	return pgx.BeginFunc(ctx, u.Pool, func(tx pgx.Tx) error {
		if err := (&Bridge{Pool: tx, Queue: u.Queue}).Work(ctx, job); err != nil {
			return err
		}
		return context.DeadlineExceeded
	})
}

// River's workers hand over the jobs of their queue while new jobs go to onceq. Some work is in both queues, and one
// hand-over fails at its end. Each mail is sent once, and the old queue is empty at the end.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	db := withRiver(t)
	insert(t, db, 1, 2, 3)
	enqueueAll(t, db, 2, 4)
	require.Equal(t, 1, work(t, db, &undone{Bridge: &Bridge{Pool: db.Pool, Queue: db.Queue}}, 3))

	mails := &outbox{sent: map[int]int{}}
	for _, ran := range db.Drain(handlerAfter(mails.send)) {
		require.Equal(t, onceq.StateCompleted, ran.State)
	}
	require.Equal(t, map[int]int{1: 1, 2: 1, 3: 1, 4: 1}, mails.all())
	var left int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from river_job where state <> $1`, rivertype.JobStateCompleted).Scan(&left))
	require.Zero(t, left)
}
