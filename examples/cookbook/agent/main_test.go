package main

import (
	"bufio"
	"context"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

var bicycle = task{ID: "7", Ask: "a red bicycle, please", Tokens: maxTokens}

// Killed, frozen and cut off at every place, each model call is paid once, and each tool does its work once.
func TestAgent_PaysOnceWhateverHappens(t *testing.T) {
	t.Parallel()
	for name, want := range map[string][]string{
		"approved": {"POST model.example/completions", "POST model.example/order", "POST model.example/completions", "POST model.example/mail", "POST model.example/completions"},
		"refused":  {"POST model.example/completions", "POST model.example/completions"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			queuetest.Prove(t, queuetest.Proof{
				Setup: func(ctx context.Context, pool *pgxpool.Pool) error {
					q, err := onceq.New(pool, nil)
					if err == nil {
						_, err = q.Emit(ctx, pool, "approval", "7/1", name == "approved")
					}
					return err
				},
				Job:         func() onceq.Job { return agent.Job(bicycle) },
				Handler:     func(p *queuetest.Process) onceq.Handler { return handler(outside{p.Client, "https://model.example"}) },
				NewProvider: func() http.Handler { return &world{} },
				Check: func(o *queuetest.Outcome) {
					var did []string
					for _, e := range o.Effects {
						did = append(did, e.What)
					}
					require.Equal(o, want, did)
				},
			})
		})
	}
}

// The page says what the agent wants, and the first press of a button counts. Until then nothing is ordered.
func TestAgent_AButtonDecides(t *testing.T) {
	t.Parallel()
	for yes, want := range map[string]string{"true": "It is ordered, and a mail says so.", "false": "Then I order nothing."} {
		t.Run(yes, func(t *testing.T) {
			t.Parallel()
			db, w := queuetest.New(t), &world{}
			provider, web := httptest.NewServer(w), httptest.NewServer(site(db.Queue, db.Pool))
			t.Cleanup(provider.Close)
			t.Cleanup(web.Close)
			r, err := db.Queue.Enqueue(t.Context(), db.Pool, agent.Job(bicycle))
			require.NoError(t, err)
			h := handler(outside{provider.Client(), provider.URL})

			require.Equal(t, onceq.StateDelayed, db.RunOne(h).State)
			why, err := onceqops.New(db.Queue).Explain(t.Context(), db.Pool, r.ID)
			require.NoError(t, err)
			require.Equal(t, onceqops.CauseEvent, why.Cause())
			require.Empty(t, w.orders)
			require.Empty(t, db.Drain(h), "it holds nothing until somebody decides")
			stream, err := http.Get(web.URL + "/7/events")
			require.NoError(t, err)
			defer func() { _ = stream.Body.Close() }()
			lines := bufio.NewScanner(stream.Body)
			require.True(t, lines.Scan())
			require.Contains(t, lines.Text(), `"wants":{"tool":"order","text":"a red bicycle"`)

			press := func(yes string) {
				res, err := http.PostForm(web.URL+"/7/1", url.Values{"yes": {yes}})
				require.NoError(t, err)
				require.NoError(t, res.Body.Close())
				require.Equal(t, http.StatusOK, res.StatusCode)
			}
			press(yes)
			press(map[string]string{"true": "false", "false": "true"}[yes])
			require.Equal(t, onceq.StateCompleted, db.RunOne(h).State)
			var last string
			for lines.Scan() {
				if lines.Text() != "" {
					last = lines.Text()
				}
			}
			require.Contains(t, last, want)
			require.Len(t, w.orders, map[string]int{"true": 1, "false": 0}[yes])
		})
	}
}

// Another site's form cannot press the button.
func TestAgent_OnlyItsOwnPagePresses(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	r := httptest.NewRequest(http.MethodPost, "/7/1", strings.NewReader("yes=true"))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Sec-Fetch-Site", "cross-site")
	w := httptest.NewRecorder()
	site(db.Queue, db.Pool).ServeHTTP(w, r)
	require.Equal(t, http.StatusForbidden, w.Code)
	_, emitted, err := db.Queue.Event(t.Context(), db.Pool, "approval", "7/1")
	require.NoError(t, err)
	require.False(t, emitted)
}

// A task that spends more than it may is dead, before its tool is called. A provider that takes no more calls stops no task.
func TestAgent_KeepsToItsBudget(t *testing.T) {
	t.Parallel()
	db, w := queuetest.New(t), &world{full: 1}
	provider := httptest.NewServer(w)
	t.Cleanup(provider.Close)
	poor := bicycle
	poor.Tokens = 500
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, agent.Job(poor))
	require.NoError(t, err)
	h := handler(outside{provider.Client(), provider.URL})

	db.RunOne(h)
	job, err := db.Queue.Get(t.Context(), db.Pool, r.ID)
	require.NoError(t, err)
	require.Zero(t, job.Attempts, "a provider that is busy spends no attempt")
	require.Equal(t, 500, job.Weight)
	limit, err := onceqops.New(db.Queue).Limit(t.Context(), db.Pool, "model")
	require.NoError(t, err)
	require.NotNil(t, limit.Pause, "all tasks wait")
	db.Advance(31e9)
	ran := db.Drain(h)
	require.Len(t, ran, 1)
	require.Equal(t, onceq.StateDead, ran[0].State)
	require.ErrorContains(t, ran[0].Err, "900 tokens")
	require.Zero(t, w.calls)
}
