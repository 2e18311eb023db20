package onceq_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// What a newcomer gets wrong says what to do.
func TestMistakes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())

	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Key: "k"})
	var schema *onceq.SchemaError
	require.ErrorAs(t, err, &schema)
	require.ErrorContains(t, err, "migrations.Up")
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "k"}})
	require.ErrorAs(t, err, &schema)
	require.ErrorAs(t, db.Queue.Check(t.Context()), &schema)

	var bad *onceq.InvalidError
	_, err = db.Queue.Enqueue(t.Context(), nil, onceq.Job{Kind: "k"})
	require.ErrorAs(t, err, &bad)
	require.ErrorContains(t, err, "pass the transaction")
	_, err = db.Queue.EnqueueMany(t.Context(), nil, []onceq.Job{{Kind: "k"}})
	require.ErrorAs(t, err, &bad)

	kind := onceq.Kind[int]{Name: "k"}
	for _, h := range []onceq.Handler{kind.Handle(nil), kind.HandleTx(nil), kind.HandleBatch(1, nil)} {
		_, err = onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, h)
		require.ErrorAs(t, err, &bad)
		require.ErrorContains(t, err, `of "k" has no function`)
	}
}
