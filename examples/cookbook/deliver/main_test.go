package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// setUp makes an endpoint of acme for each receiver, and the events evt_1 to evt_3.
func setUp(t *testing.T, receivers ...*receiver) *queuetest.DB {
	t.Helper()
	db := queuetest.New(t, queuetest.Setup("deliver", queuetest.SQL(tables)))
	for i, r := range receivers {
		server := httptest.NewServer(r)
		t.Cleanup(server.Close)
		_, err := db.Pool.Exec(t.Context(), `insert into endpoints values ($1, 'acme', $2, array[$3])`, i+1, server.URL, secret)
		require.NoError(t, err)
	}
	for n := range 3 {
		require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			return publish(t.Context(), tx, db.Queue, "acme", fmt.Sprint("evt_", n+1), n+1)
		}))
	}
	return db
}

func job(t *testing.T, db *queuetest.DB, endpoint, event string) onceq.JobInfo {
	t.Helper()
	j, err := db.Queue.GetByKey(t.Context(), db.Pool, endpoint, event)
	require.NoError(t, err)
	return j
}

// Killed, frozen and cut off at every place, an event reaches a receiver that recognises its id once.
func TestDeliver_OnceWhateverHappens(t *testing.T) {
	t.Parallel()
	queuetest.Prove(t, queuetest.Proof{
		Setup:   queuetest.SQL(tables + `; insert into endpoints values (1, 'acme', 'https://acme.example/hooks', array['` + secret + `'])`),
		Job:     func() onceq.Job { return deliver.Job(delivery{1, "evt_1", []byte(`{"type":"invoice.paid"}`)}) },
		Handler: func(p *queuetest.Process) onceq.Handler { return handler(p.Pool, p.Client) },
		Key:     func(r *http.Request) string { return r.Header.Get("webhook-id") },
		Check: func(o *queuetest.Outcome) {
			require.Len(o, o.Effects, 1)
			require.Equal(o, "evt_1", o.Effects[0].Key)
		},
	})
}

// An endpoint that is busy is left alone for as long as it says, and then gets its events in order. Others go on.
func TestDeliver_BusyEndpointIsLeftAlone(t *testing.T) {
	t.Parallel()
	busy, well := &receiver{first: []int{503}, pause: "3600"}, &receiver{}
	db := setUp(t, busy, well)
	h := handler(db.Pool, client)

	db.Drain(h)
	require.Equal(t, 1, busy.requests)
	require.Equal(t, []string{"evt_1", "evt_2", "evt_3"}, well.events)
	limit, err := onceqops.New(db.Queue).Limit(t.Context(), db.Pool, "endpoint/1")
	require.NoError(t, err)
	require.NotNil(t, limit.Pause)
	db.Advance(59 * time.Minute)
	require.Empty(t, db.Drain(h))
	db.Advance(2 * time.Minute)
	db.Drain(h)
	require.Equal(t, []string{"evt_1", "evt_2", "evt_3"}, busy.events)
	require.Zero(t, job(t, db, "endpoint/1", "evt_1").Attempts, "a busy endpoint spends no attempt")
}

// An endpoint that is away for two days gets everything then, in order. After more than three days its events are dead.
func TestDeliver_TriesForDays(t *testing.T) {
	t.Parallel()
	for name, days := range map[string]int{"two": 2, "four": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			away := &receiver{}
			for range 1000 {
				away.first = append(away.first, 502)
			}
			db := setUp(t, away)
			h := handler(db.Pool, client)
			for range days * 24 {
				db.Drain(h)
				db.Advance(time.Hour)
			}
			require.Less(t, away.requests, 20*days, "the pauses grow")
			away.first = nil
			db.Advance(24 * time.Hour)
			db.Drain(h)
			if days == 2 {
				require.Equal(t, []string{"evt_1", "evt_2", "evt_3"}, away.events)
				return
			}
			require.Equal(t, onceq.StateDead, job(t, db, "endpoint/1", "evt_1").State)
		})
	}
}

// An event that an endpoint does not want is overtaken, is tried for three days, and is then dead until its customer sends it again.
func TestDeliver_RefusedEventIsOvertakenAndReplayed(t *testing.T) {
	t.Parallel()
	strict := &receiver{}
	for range len(pauses) + 1 {
		strict.first = append(strict.first, 422)
	}
	db := setUp(t, strict)
	h := handler(db.Pool, client)
	db.RunOne(h)
	refusals := strict.first
	strict.first = nil
	db.Drain(h)
	require.Equal(t, []string{"evt_2", "evt_3"}, strict.events)

	strict.first = refusals
	var days time.Duration
	for range pauses {
		pause := time.Until(job(t, db, "endpoint/1", "evt_1").RunAt) + time.Second
		db.Advance(pause)
		days += pause
		require.Len(t, db.Drain(h), 1)
	}
	require.Greater(t, days, 75*time.Hour)
	dead := job(t, db, "endpoint/1", "evt_1")
	require.Equal(t, onceq.StateDead, dead.State)

	web := httptest.NewServer(page(db.Queue, db.Pool))
	t.Cleanup(web.Close)
	require.NoError(t, press(web.URL+"/endpoints/1", dead.ID))
	db.Drain(h)
	require.Equal(t, []string{"evt_2", "evt_3", "evt_1"}, strict.events)
}

// A delivery that was made can be made again under the same id, once for each time that the button was meant. Nobody can do that
// for another's endpoint, and an endpoint that is gone gets nothing.
func TestDeliver_Page(t *testing.T) {
	t.Parallel()
	well, gone := &receiver{}, &receiver{first: []int{410}}
	db := setUp(t, well, gone)
	h := handler(db.Pool, client)
	db.Drain(h)
	require.Equal(t, 1, gone.requests)
	require.Equal(t, onceq.StateDead, job(t, db, "endpoint/2", "evt_3").State)
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		return publish(context.Background(), tx, db.Queue, "acme", "evt_4", 4)
	}))
	require.Len(t, db.Drain(h), 1, "nothing is enqueued for an endpoint that is gone")

	web := httptest.NewServer(page(db.Queue, db.Pool))
	t.Cleanup(web.Close)
	made := job(t, db, "endpoint/1", "evt_1").ID
	require.NoError(t, press(web.URL+"/endpoints/2", made))
	require.Empty(t, db.Drain(h), "it is not a delivery to this endpoint")
	require.NoError(t, press(web.URL+"/endpoints/1", made))
	require.NoError(t, press(web.URL+"/endpoints/1", made))
	require.Len(t, db.Drain(h), 1)
	require.Equal(t, 5, well.requests)
	require.Equal(t, []string{"evt_1", "evt_2", "evt_3", "evt_4"}, well.events)

	res, err := http.Get(web.URL + "/endpoints/2")
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), "410: the endpoint wants no more")
	require.NotContains(t, string(text), "evt_4")
}
