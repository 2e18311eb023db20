package handlertest_test

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/handlertest"
)

// workerURL is where the process of a worker finds the test's database.
const workerURL = "HANDLERTEST_WORKER_URL"

// outbox is a provider: a table, in which what was sent stays when the process that sent it is killed.
type outbox struct {
	pool  *pgxpool.Pool
	hangs bool // its answer never comes
}

func (o outbox) Send(ctx context.Context, to, messageID string) error {
	_, err := o.pool.Exec(ctx, `insert into sent (message) values ($1)`, messageID)
	if o.hangs && err == nil {
		select {}
	}
	return err
}

// TestWorkerProcess is the process of a worker, which the test below starts. Otherwise it is skipped.
func TestWorkerProcess(t *testing.T) {
	url := os.Getenv(workerURL)
	if url == "" {
		t.Skip("it is the process of a worker")
	}
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, handlertest.Handler(outbox{pool, true}))
	require.NoError(t, err)
	require.NoError(t, w.Run(t.Context()))
}

// The worker's process is killed when the mail is sent and nothing of it is recorded. The next worker sends it again under the
// same message id, by which a provider that deduplicates recognises it.
func TestWelcome_TheProcessIsKilled_SameMessageID(t *testing.T) {
	t.Parallel()
	db, _ := setUp(t)
	_, err := db.Pool.Exec(t.Context(), `create table sent (message text)`)
	require.NoError(t, err)

	worker := exec.Command(os.Args[0], "-test.run=^TestWorkerProcess$")
	worker.Env = append(os.Environ(), workerURL+"="+db.URL)
	worker.Stdout, worker.Stderr = os.Stdout, os.Stderr
	require.NoError(t, worker.Start())
	kill := func() { _, _ = worker.Process.Kill(), worker.Wait() }
	t.Cleanup(kill)
	count := func(query string) (n int) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), query).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return count(`select count(*) from sent`) == 1 }, 5*time.Minute, 10*time.Millisecond)
	kill()
	require.Equal(t, 0, logged(t, db))

	db.Advance(time.Hour) // the leases of the job and of its effect end
	db.Drain(handlertest.Handler(outbox{db.Pool, false}))
	require.Equal(t, 1, logged(t, db))
	require.Equal(t, 2, count(`select count(*) from sent`))
	require.Equal(t, 1, count(`select count(distinct message) from sent`))
}
