package tests

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// CheckPayloads names the kinds whose jobs the new code cannot run, wherever these wait, and calls no handler.
func TestCheckPayloads(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	repairDead(t, db, onceq.Job{Kind: "order", Payload: map[string]any{"id": "not a number"}})
	repairEnqueue(t, db, onceq.Job{Kind: "order", Payload: map[string]any{"id": 1}, Delay: time.Hour})
	for range 250 { // more than a page
		repairEnqueue(t, db, onceq.Job{Kind: "note", Payload: "hello"})
	}
	repairEnqueue(t, db, onceq.Job{Kind: "strict", Payload: map[string]any{"id": 1, "new": 2}})
	repairEnqueue(t, db, onceq.Job{Kind: "others", Payload: 1})
	for _, kind := range []string{"onceqcron", "onceqcron:nightly"} { // as schedules have them, which tick in every such database
		repairEnqueue(t, db, onceq.Job{Kind: kind, Queue: "onceqcron", Payload: "nightly", Delay: time.Hour})
	}
	gone := repairEnqueue(t, db, onceq.Job{Kind: "order", Payload: "cancelled jobs do not run again by themselves"})
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, gone))

	type order struct {
		ID int `json:"id"`
	}
	orders := onceq.Kind[order]{Name: "order"}
	notes := onceq.Kind[string]{Name: "note"}
	strict := onceq.Kind[order]{Name: "strict", RefuseUnknownFields: true}
	never := func(context.Context, *onceq.Lease, order) error { t.Error("a handler ran"); return nil }
	found, err := onceqops.New(q).CheckPayloads(ctx, orders.Handle(never), strict.Handle(never),
		notes.Handle(func(context.Context, *onceq.Lease, string) error { t.Error("a handler ran"); return nil }))
	require.NoError(t, err)
	require.Len(t, found, 4)
	require.Equal(t, "note: 250 payloads decode", found[0].String())
	require.True(t, found[0].OK())
	require.Equal(t, 2, found[1].Jobs)
	require.Equal(t, 1, found[1].Failed)
	require.Contains(t, found[1].String(), "order: 1 of 2 payloads do not decode; the newest: onceq: payload of job")
	require.Equal(t, "others: 1 jobs, and no handler", found[2].String())
	require.False(t, found[2].OK())
	require.Contains(t, found[3].Errors[0], `it has the field "new"`)

	_, err = onceqops.New(q).CheckPayloads(ctx, onceq.Kind[int]{}.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	var bad *onceq.InvalidError
	require.ErrorAs(t, err, &bad)
}
