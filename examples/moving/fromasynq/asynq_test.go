package fromasynq

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/moving/internal/old"
	"github.com/onceq/onceq/queuetest"
)

var quiet = queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)})

// side is what belongs to asynq: a Redis, and the application's and an operator's clients for it.
type side struct {
	t         *testing.T
	redis     asynq.RedisClientOpt
	client    *asynq.Client
	inspector *asynq.Inspector
}

func asynqSide(t *testing.T) *side {
	t.Helper()
	s := &side{t: t, redis: asynq.RedisClientOpt{Network: "unix", Addr: old.Redis(t)}}
	s.client, s.inspector = asynq.NewClient(s.redis), asynq.NewInspector(s.redis)
	t.Cleanup(func() {
		require.NoError(t, s.client.Close())
		require.NoError(t, s.inspector.Close())
	})
	return s
}

func (s *side) serve(config asynq.Config, handler asynq.Handler) {
	s.t.Helper()
	config.LogLevel = asynq.FatalLevel
	server := asynq.NewServer(s.redis, config)
	require.NoError(s.t, server.Start(handler))
	s.t.Cleanup(server.Shutdown)
}

func (s *side) until(id string, state asynq.TaskState) *asynq.TaskInfo {
	s.t.Helper()
	var task *asynq.TaskInfo
	require.Eventually(s.t, func() bool {
		var err error
		task, err = s.inspector.GetTaskInfo("mail", id)
		return err == nil && task.State == state
	}, 5*time.Minute, 5*time.Millisecond, "%s is not %s", id, state)
	return task
}

// rerun makes a waiting task run now.
func (s *side) rerun(id string) {
	s.t.Helper()
	require.NoError(s.t, s.inspector.RunTask("mail", id))
	s.until(id, asynq.TaskStateCompleted)
}

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

func enqueueAll(t *testing.T, db *queuetest.DB, users ...int) {
	t.Helper()
	for _, user := range users {
		require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			return enqueueAfter(t.Context(), db.Queue, tx, WelcomeMail{user})
		}))
	}
}

// The code before the move, and the code after it, each work by themselves.
func TestBeforeAndAfter(t *testing.T) {
	t.Parallel()
	s := asynqSide(t)
	mails := &outbox{sent: map[int]int{}}
	require.NoError(t, enqueueBefore(t.Context(), s.client, WelcomeMail{42}))
	require.ErrorIs(t, enqueueBefore(t.Context(), s.client, WelcomeMail{42}), asynq.ErrTaskIDConflict)
	s.serve(asynq.Config{Queues: map[string]int{"mail": 1}}, muxBefore(mails.send))
	s.until("welcome:42", asynq.TaskStateCompleted)
	require.ErrorIs(t, enqueueBefore(t.Context(), s.client, WelcomeMail{42}), asynq.ErrTaskIDConflict)
	require.Equal(t, map[int]int{42: 1}, mails.all())

	db := queuetest.New(t, quiet)
	enqueueAll(t, db, 43, 43)
	require.Len(t, db.Drain(handlerAfter(mails.send)), 1)
	enqueueAll(t, db, 43)
	require.Empty(t, db.Drain(handlerAfter(mails.send)))
	require.Equal(t, map[int]int{42: 1, 43: 1}, mails.all())
}

// Asynq's server works through its tasks while new jobs go to onceq. Some work is in both queues, is delivered again after
// it was done, or is under way in the other queue. Each mail is sent once, and the old queue is empty at the end.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s, db := asynqSide(t), queuetest.New(t, quiet)
	mails := &outbox{sent: map[int]int{}}

	sending, goOn := make(chan struct{}), make(chan struct{})
	mail := func(ctx context.Context, user int, key string) error {
		if user == 1 {
			close(sending)
			<-goOn
		}
		return mails.send(ctx, user, key)
	}
	for _, user := range []int{1, 2, 5} {
		require.NoError(t, enqueueBefore(ctx, s.client, WelcomeMail{user}))
	}
	_, err := s.client.EnqueueContext(ctx, asynq.NewTask("welcome", []byte(`{"user_id": 3}`)),
		asynq.Queue("mail"), asynq.TaskID("welcome:3"), asynq.Retention(time.Hour), asynq.ProcessIn(time.Hour))
	require.NoError(t, err)
	enqueueAll(t, db, 1, 3, 4)

	// The new worker is in the middle of the first mail when the old one comes to it.
	working, stop := context.WithCancel(ctx)
	worker, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, handlerDuring(db.Queue, mail))
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(working) }()
	defer func() {
		stop()
		require.NoError(t, <-ended)
	}()
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	<-sending

	// The old worker. Its process dies once, after it sent the mail and before it told Redis.
	refused := make(chan error, 10)
	config := configDuring
	config.ErrorHandler = asynq.ErrorHandlerFunc(func(_ context.Context, _ *asynq.Task, err error) { refused <- err })
	var dies sync.Once
	mux := muxDuring(db.Queue, mail)
	s.serve(config, asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		err := mux.ProcessTask(ctx, task)
		if err == nil && string(task.Payload()) == `{"user_id":5}` {
			dies.Do(func() { err = errors.New("died after the mail") })
		}
		return err
	}))
	s.until("welcome:2", asynq.TaskStateCompleted)
	require.Zero(t, s.until("welcome:1", asynq.TaskStateRetry).Retried, "a retry was spent")
	require.Equal(t, 1, s.until("welcome:5", asynq.TaskStateRetry).Retried)
	inFlight := 0
	for range 2 {
		if errors.Is(<-refused, onceq.ErrInFlight) {
			inFlight++
		}
	}
	require.Equal(t, 1, inFlight)

	release()
	unfinished := func() (n int) {
		require.NoError(t, db.Pool.QueryRow(ctx, `select count(*) from onceq.jobs`).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return unfinished() == 0 }, 5*time.Minute, 5*time.Millisecond)
	for _, id := range []string{"welcome:1", "welcome:3", "welcome:5"} {
		s.rerun(id)
	}
	enqueueAll(t, db, 2, 5) // the new queue gets what the old one has done
	require.Eventually(t, func() bool { return unfinished() == 0 }, 5*time.Minute, 5*time.Millisecond)

	require.Equal(t, map[int]int{1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, mails.all())
	info, err := s.inspector.GetQueueInfo("mail")
	require.NoError(t, err)
	require.Equal(t, []int{0, 0, 0, 0, 0, 4},
		[]int{info.Pending, info.Active, info.Scheduled, info.Retry, info.Archived, info.Completed})
}

// Asynq's tasks are handed over once, even if asynq delivers a task again, and even if a new producer uses the key too.
func TestBridge(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s, db := asynqSide(t), queuetest.New(t, quiet)
	for _, user := range []int{1, 2} {
		require.NoError(t, enqueueBefore(ctx, s.client, WelcomeMail{user}))
	}
	enqueueAll(t, db, 2)
	var dies sync.Once
	bridge := Bridge(db.Queue, db.Pool)
	s.serve(asynq.Config{Queues: map[string]int{"mail": 1}}, asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		err := bridge(ctx, task)
		if err == nil && string(task.Payload()) == `{"user_id":1}` {
			dies.Do(func() { err = errors.New("died after the enqueue") })
		}
		return err
	}))
	s.until("welcome:1", asynq.TaskStateRetry)
	s.rerun("welcome:1")
	s.until("welcome:2", asynq.TaskStateCompleted)
	require.ErrorIs(t, bridge(ctx, asynq.NewTask("welcome", []byte(`{`))), asynq.SkipRetry)

	mails := &outbox{sent: map[int]int{}}
	require.Len(t, db.Drain(handlerAfter(mails.send)), 2)
	require.Equal(t, map[int]int{1: 1, 2: 1}, mails.all())
}
