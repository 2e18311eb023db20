package main

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqweb"
	"github.com/onceq/onceq/queuetest"
)

const number = "4000 0000 0000 4242"

// requireSealed requires that no table of the queue contains the number.
func requireSealed(t *testing.T, db *queuetest.DB) {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `select tablename from pg_tables where schemaname = 'onceq'`)
	require.NoError(t, err)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Contains(t, tables, "jobs")
	for _, table := range tables {
		var n int
		require.NoError(t, db.Pool.QueryRow(t.Context(), fmt.Sprintf(`select count(*) from onceq.%s t where t::text like '%%4242%%'`, pgx.Identifier{table}.Sanitize())).Scan(&n))
		require.Zero(t, n, table)
	}
}

func TestSealed_NothingIsReadable(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	q := db.Queue
	r, err := q.Enqueue(t.Context(), db.Pool, charge.Job(sealed[card]{card{7, number}}))
	require.NoError(t, err)
	requireSealed(t, db)

	shown := func(mask func(kind, field, text string) string) string {
		page, err := onceqweb.New(q, db.Pool, onceqweb.Config{
			Viewer: func(*http.Request) (onceqweb.Viewer, error) { return onceqweb.Viewer{Name: "ada", Payloads: true}, nil },
			Mask:   mask,
		})
		require.NoError(t, err)
		t.Cleanup(page.Close)
		w := httptest.NewRecorder()
		page.ServeHTTP(w, httptest.NewRequest(http.MethodGet, fmt.Sprintf("/job?id=%d", r.ID), nil))
		return w.Body.String()
	}
	require.Contains(t, shown(nil), "2026-10")
	require.NotContains(t, shown(nil), "4242")
	require.Contains(t, shown(decrypt), "4242", "a page for those who may")

	calls := 0
	h := handler(func(c card) (string, error) {
		require.Equal(t, number, c.Number)
		if calls++; calls == 1 {
			return "", onceq.NotApplied(errors.New("the provider is away"))
		}
		return "receipt for " + c.Number, nil
	})
	require.Equal(t, onceq.StateRetrying, db.RunOne(h).State)
	requireSealed(t, db)
	db.Advance(1e10)
	require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
	requireSealed(t, db)
}

// CheckPayloads says before a deploy which jobs need a key that is to go.
func TestSealed_KeysThatAreStillNeeded(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "charge", Key: "order-7", Payload: envelope{Key: "2026-01"}})
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, charge.Job(sealed[card]{card{8, number}}))
	require.NoError(t, err)
	checks, err := onceqops.New(db.Queue).CheckPayloads(t.Context(), handler(nil))
	require.NoError(t, err)
	require.Len(t, checks, 1)
	require.Equal(t, 2, checks[0].Jobs)
	require.Equal(t, 1, checks[0].Failed)
	require.Contains(t, checks[0].Errors[0], "job 1 ")
	require.Contains(t, checks[0].Errors[0], "main.noKey")
}
