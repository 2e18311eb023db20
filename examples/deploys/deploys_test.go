package deploys

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/queuetest"
)

// This version runs a job of the previous version, and the job's key is still its key.
func TestDeploys(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Pool.Exec(t.Context(), `create table charges (n int, amount text)`)
	require.NoError(t, err)
	type before struct {
		Order int `json:"order"`
		Cents int `json:"cents"`
	}
	first := onceq.Kind[before]{Name: "charge", Key: func(c before) string { return fmt.Sprint("charge:", c.Order) }}
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, first.Job(before{7, 4200}))
	require.NoError(t, err)

	again, err := db.Queue.Enqueue(t.Context(), db.Pool, Charges.Job(Charge{7, 4200, "EUR"}))
	require.NoError(t, err)
	require.True(t, again.Duplicate, "a member that came later does not count")
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, ChargesV2.Job(ChargeV2{7, "42.00 EUR"}))
	require.ErrorIs(t, err, onceq.ErrMismatch)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, ChargesV2.Job(ChargeV2{8, "1.00 EUR"}))
	require.NoError(t, err)

	require.NoError(t, CheckBacklog(t.Context(), db.Queue))

	// Schedules tick there, and another program has jobs there.
	schedules, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{}, onceqcron.Schedule{Name: "nightly", Spec: "@daily", Job: Charges.Job(Charge{9, 1, "EUR"})})
	require.NoError(t, err)
	require.NoError(t, schedules.Register(t.Context()))
	require.NoError(t, schedules.Put(t.Context(), nil, onceqcron.Schedule{Name: "weekly", Spec: "@weekly", Job: onceq.Job{Kind: "charge", Payload: Charge{Order: 10}}}))
	require.NoError(t, CheckBacklog(t.Context(), db.Queue))
	invoice, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "invoice", Payload: 7})
	require.NoError(t, err)
	require.ErrorContains(t, CheckBacklog(t.Context(), db.Queue), `cannot run the jobs of kind "invoice"`, "who dropped it too early must hear of it")
	require.NoError(t, CheckBacklog(t.Context(), db.Queue, "invoice"))
	_, err = db.Queue.Cancel(t.Context(), db.Pool, invoice.ID)
	require.NoError(t, err)

	odd, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "charge", Payload: map[string]string{"cents": "many"}})
	require.NoError(t, err)
	require.ErrorContains(t, CheckBacklog(t.Context(), db.Queue), `cannot run the jobs of kind "charge"`)
	_, err = db.Queue.Cancel(t.Context(), db.Pool, odd.ID)
	require.NoError(t, err)

	for _, ran := range db.Drain(Handlers()...) {
		require.Equal(t, onceq.StateCompleted, ran.State)
	}
	var charged string
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select string_agg(n || ' ' || amount, ', ' order by n) from charges`).Scan(&charged))
	require.Equal(t, "7 42.00 EUR, 8 1.00 EUR", charged)
}
