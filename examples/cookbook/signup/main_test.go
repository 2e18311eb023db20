package main

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// Three days pass in the database, and the test does not wait.
func TestSignup_RemindsAfterThreeDays(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	r, err := q.Enqueue(ctx, db.Pool, signup.Job(user{1, "ada@example.com"}))
	require.NoError(t, err)
	p := &provider{}
	server := httptest.NewServer(p)
	defer server.Close()
	h := handler(mailer{server.Client(), server.URL}, threeDays)

	require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
	why, err := onceqops.New(q).Explain(ctx, db.Pool, r.ID)
	require.NoError(t, err)
	require.Equal(t, onceqops.CauseEvent, why.Cause())
	db.Advance(71 * time.Hour)
	require.Empty(t, db.Drain(h), "it waits")
	db.Advance(2 * time.Hour)
	require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
	require.Equal(t, []string{"ada@example.com /please-confirm", "ada@example.com /reminder"}, p.sent)
}

// Killed, frozen and cut off at every place, for a user who has confirmed before the job waits, and for one who never does.
func TestSignup_SendsEachMailOnceWhateverHappens(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"confirmed": "welcome", "not confirmed": "reminder"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proof := queuetest.Proof{
				Job: func() onceq.Job { return signup.Job(user{1, "ada@example.com"}) },
				Handler: func(p *queuetest.Process) onceq.Handler {
					return handler(mailer{p.Client, "https://mail.example"}, threeDays)
				},
				Check: func(o *queuetest.Outcome) {
					require.Len(o, o.Effects, 2)
					require.Equal(o, "POST mail.example/"+want, o.Effects[1].What)
				},
			}
			if name == "confirmed" {
				proof.Setup = func(ctx context.Context, pool *pgxpool.Pool) error {
					q, err := onceq.New(pool, nil)
					if err == nil {
						_, err = q.Emit(ctx, pool, "confirmed", user{ID: 1}.key(), nil)
					}
					return err
				}
			}
			queuetest.Prove(t, proof)
		})
	}
}
