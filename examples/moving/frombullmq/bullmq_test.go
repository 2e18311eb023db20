package frombullmq

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/moving/internal/old"
	"github.com/onceq/onceq/queuetest"
)

// side is what belongs to BullMQ: its programs in Node, and a Redis.
type side struct {
	t     *testing.T
	redis string
}

func (s side) run(args ...string) *old.Program {
	s.t.Helper()
	return old.Node(s.t, "run.mjs", args, []string{"REDIS_SOCKET=" + s.redis})
}

// unfinished returns the states that have jobs, without completed ones.
func (s side) unfinished() map[string]int {
	s.t.Helper()
	var counts map[string]int
	require.NoError(s.t, json.Unmarshal([]byte(s.run("counts").Rest()), &counts))
	for state, n := range counts {
		if n == 0 || state == "completed" {
			delete(counts, state)
		}
	}
	return counts
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

var quiet = queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)})

// The code before the move, and the code after it, each work by themselves.
func TestBeforeAndAfter(t *testing.T) {
	t.Parallel()
	s := side{t, old.Redis(t)}
	s.run("add", "42", "42").Rest()
	worker := s.run("work")
	require.Equal(t, "sent 42", worker.Next())
	require.Equal(t, "completed welcome-42", worker.Next())
	s.run("add", "42", "43").Rest()
	require.Equal(t, "sent 43", worker.Next())
	require.Equal(t, "completed welcome-43", worker.Next())
	require.Empty(t, worker.Rest())
	require.Empty(t, s.unfinished())

	db := queuetest.New(t, quiet)
	enqueueAll(t, db, 42, 42)
	require.Equal(t, map[int]int{42: 1}, sent(db))
	enqueueAll(t, db, 42)
	require.Empty(t, sent(db))
}

// BullMQ's worker hands over the jobs of its queue while new jobs go to onceq. Some work is in both queues, or is handed
// over twice because an answer was lost. Each mail is sent once, and the old queue is empty at the end.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s, db := side{t, old.Redis(t)}, queuetest.New(t, quiet)
	var lose sync.Once
	accept := Accept(db.Queue, db.Pool)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := httptest.NewRecorder()
		accept(answer, r)
		lose.Do(func() { answer.Code = http.StatusBadGateway })
		w.WriteHeader(answer.Code)
		_, _ = w.Write(answer.Body.Bytes())
	}))
	defer server.Close()

	s.run("add", "1").Rest()
	bridge := s.run("bridge", server.URL)
	require.Equal(t, "failed welcome-1: Error", bridge.Next())
	s.run("add", "2", "3").Rest()
	enqueueAll(t, db, 2, 4)
	completed := map[string]bool{}
	for range 3 {
		completed[bridge.Next()] = true
	}
	require.Equal(t, map[string]bool{"completed welcome-1": true, "completed welcome-2": true, "completed welcome-3": true}, completed)

	// If a key is taken by other work, the job is not tried again.
	_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "welcome", Queue: "mail", Key: "welcome:5", Payload: map[string]int{"userId": 5, "version": 2}})
	require.NoError(t, err)
	s.run("add", "5").Rest()
	require.Equal(t, "failed welcome-5: UnrecoverableError", bridge.Next())
	require.Empty(t, bridge.Rest())
	require.Equal(t, map[string]int{"failed": 1}, s.unfinished())

	require.Equal(t, map[int]int{1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, sent(db))
	enqueueAll(t, db, 1, 2, 3, 4)
	require.Empty(t, sent(db))
}

func TestAccept_RefusesWhatIsNoWelcomeMail(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, quiet)
	answer := httptest.NewRecorder()
	Accept(db.Queue, db.Pool)(answer, httptest.NewRequest(http.MethodPost, "/", strings.NewReader("{")))
	require.Equal(t, http.StatusBadRequest, answer.Code)
	require.Empty(t, sent(db))
}
