package queuetest_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

type provedOrder struct{ ID int }

var provedCharge = onceq.Kind[provedOrder]{Name: "charge", Key: func(o provedOrder) string { return fmt.Sprintf("charge:%d", o.ID) }}

func provedJob() onceq.Job { return provedCharge.Job(provedOrder{ID: 7}) }

// provedTable holds what the handlers of these tests write.
const provedTable = `create table charges (order_id int, charge text)`

// post charges by HTTP under a key, "" for none.
func post(ctx context.Context, client *http.Client, key string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://pay.example/charges", strings.NewReader(`{"cents": 4200}`))
	if err != nil {
		return err
	}
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	if res.StatusCode >= 300 {
		return fmt.Errorf("status %d", res.StatusCode)
	}
	return res.Body.Close()
}

// spy takes what a proof says in place of the test.
type spy struct {
	testing.TB
	mu     sync.Mutex
	errors []string
	logs   []string
}

func (s *spy) Errorf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errors = append(s.errors, fmt.Sprintf(format, args...))
}

func (s *spy) Fatalf(format string, args ...any) { s.Errorf("fatal: "+format, args...) }

func (s *spy) Logf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.logs = append(s.logs, fmt.Sprintf(format, args...))
}

// said runs a proof that may fail and gives what it says.
func said(t *testing.T, proof queuetest.Proof) []string {
	t.Helper()
	s := &spy{TB: t}
	queuetest.Prove(s, proof)
	for _, text := range append(s.errors, s.logs...) {
		t.Log(text)
	}
	return s.errors
}

func TestProve_TransactionPasses(t *testing.T) {
	t.Parallel()
	require.Empty(t, said(t, queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(*queuetest.Process) onceq.Handler {
			return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
				_, err := tx.Exec(ctx, `insert into charges (order_id) values ($1)`, o.ID)
				return err
			})
		},
	}))
}

func TestProve_OncePasses(t *testing.T) {
	t.Parallel()
	require.Empty(t, said(t, queuetest.Proof{
		Job: provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
					return true, post(ctx, p.Client, key)
				})
				return err
			})
		},
		Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 1) },
	}))
}

// Seed 001's first pattern as it stands: look, send, record.
func TestProve_RecordingAfterSending(t *testing.T) {
	t.Parallel()
	texts := said(t, queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
				var sent bool
				if err := p.Pool.QueryRow(ctx, `select exists (select from charges where order_id = $1)`, o.ID).Scan(&sent); err != nil || sent {
					return err
				}
				if err := post(ctx, p.Client, ""); err != nil {
					return err
				}
				_, err := p.Pool.Exec(ctx, `insert into charges (order_id) values ($1)`, o.ID)
				return err
			})
		},
	})
	all := strings.Join(texts, "\n")
	require.Contains(t, all, "mistake: recording after sending")
	require.Contains(t, all, "mistake: check-then-act without a fence")
}
