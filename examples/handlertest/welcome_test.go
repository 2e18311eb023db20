package handlertest_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/handlertest"
	"github.com/onceq/onceq/queuetest"
)

// mailbox counts what was sent, by message id. As often as the test wants, it loses its answer after it sent.
type mailbox struct {
	mu       sync.Mutex
	sent     map[string]int
	timeOuts int
}

func (m *mailbox) Send(_ context.Context, _, messageID string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sent[messageID]++
	if m.timeOuts > 0 {
		m.timeOuts--
		return errors.New("time-out")
	}
	return nil
}

// tables are made once, and each test begins with a copy of them.
var tables = queuetest.Setup("tables", queuetest.SQL(`create table email_log (user_id int, template text)`))

func setUp(t *testing.T) (*queuetest.DB, *mailbox) {
	db := queuetest.New(t, tables)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, handlertest.Welcome.Job(handlertest.WelcomeMail{UserID: 42, Email: "ada@example.com"}))
	require.NoError(t, err)
	return db, &mailbox{sent: make(map[string]int)}
}

func logged(t *testing.T, db *queuetest.DB) (n int) {
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from email_log where user_id = 42`).Scan(&n))
	return n
}

// The handler runs to its end, and its transaction does not commit: the worst moment to lose a worker. The job is delivered
// again, and nothing is sent again.
func TestWelcome_RunTwice_SendsOnce(t *testing.T) {
	t.Parallel()
	db, mail := setUp(t)

	_, err := db.Pool.Exec(t.Context(), `alter table email_log add constraint broken check (user_id is null)`)
	require.NoError(t, err)
	require.Equal(t, onceq.StateRetrying, db.RunOne(handlertest.Handler(mail)).State)
	require.Equal(t, 0, logged(t, db))

	_, err = db.Pool.Exec(t.Context(), `alter table email_log drop constraint broken`)
	require.NoError(t, err)
	db.Advance(2 * time.Second) // the backoff passes
	require.Equal(t, onceq.StateCompleted, db.RunOne(handlertest.Handler(mail)).State)
	require.Equal(t, 1, logged(t, db))
	require.Len(t, mail.sent, 1)
	for _, times := range mail.sent {
		require.Equal(t, 1, times)
	}
}

// Nobody knows whether the first mail was sent. The second attempt uses the same message id, by which a provider that
// deduplicates recognises it.
func TestWelcome_TimeOut_SameMessageID(t *testing.T) {
	t.Parallel()
	db, mail := setUp(t)
	mail.timeOuts = 1
	require.ErrorIs(t, db.RunOne(handlertest.Handler(mail)).Err, onceq.ErrUncertain)
	db.Advance(2 * time.Second) // the backoff passes
	require.Equal(t, onceq.StateCompleted, db.RunOne(handlertest.Handler(mail)).State)
	require.Equal(t, 1, logged(t, db))
	require.Len(t, mail.sent, 1, "message ids")
}

// Two workers run the job at once. Each takes the other for dead.
func TestWelcome_Race_SendsOnce(t *testing.T) {
	t.Parallel()
	db, mail := setUp(t)
	db.Race(handlertest.Handler(mail))
	db.Advance(time.Minute) // if one met the other's call in flight, the job runs once more
	db.Drain(handlertest.Handler(mail))
	require.Equal(t, 1, logged(t, db))
	require.Len(t, mail.sent, 1)
}

// What a sign-up enqueues is in its transaction, and nobody sends a mail to whom the transaction rolls back.
func TestSignUp_EnqueuesTheMail(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, tables)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, handlertest.SignUp(t.Context(), db.Queue, tx, 42, "ada@example.com"))
	job, mail := queuetest.RequireEnqueued(db, tx, handlertest.Welcome, func(m handlertest.WelcomeMail) bool { return m.UserID == 42 })
	require.Equal(t, "ada@example.com", mail.Email)
	require.Equal(t, onceq.StateWaiting, job.State)
	require.NoError(t, tx.Rollback(t.Context()))
	queuetest.RequireNotEnqueued(db, nil, handlertest.Welcome, nil)
}
