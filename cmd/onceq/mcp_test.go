package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// assistant starts the command as an assistant does, and is its client.
func assistant(t *testing.T, url string, flags ...string) *mcp.ClientSession {
	t.Helper()
	c := exec.Command(binary, append([]string{"mcp"}, flags...)...) // #nosec G204 -- the command of this test; its context would end before the session
	c.Env = command(t, url).Env
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).
		Connect(t.Context(), &mcp.CommandTransport{Command: c}, nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, session.Close())
		require.Zero(t, c.ProcessState.ExitCode(), "the end of stdin ends it")
	})
	return session
}

func called(t *testing.T, s *mcp.ClientSession, tool string, args map[string]any) (text string, failed bool) {
	t.Helper()
	r, err := s.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: args})
	require.NoError(t, err)
	require.Len(t, r.Content, 1)
	return r.Content[0].(*mcp.TextContent).Text, r.IsError
}

// toolsOf returns the tools of a session by name, and whether each only reads.
func toolsOf(t *testing.T, s *mcp.ClientSession) map[string]bool {
	t.Helper()
	reads := map[string]bool{}
	for tool, err := range s.Tools(t.Context(), nil) {
		require.NoError(t, err)
		require.NotEmpty(t, tool.Description)
		reads[tool.Name] = tool.Annotations.ReadOnlyHint
	}
	return reads
}

func TestMCP_Reads(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	q := db.Queue
	r, err := q.Enqueue(t.Context(), db.Pool, onceq.Job{
		Kind: "mail", Payload: json.RawMessage(`{"to":"secret-address"}`), Metadata: map[string]string{"customer": "secret-name"},
	})
	require.NoError(t, err)
	kept := onceq.Kind[int]{Name: "kept", Queue: "kept", Key: func(int) string { return "one" }, Keep: time.Hour}
	done, err := q.Enqueue(t.Context(), db.Pool, kept.Job(1))
	require.NoError(t, err)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"kept": {}}}, kept.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		paid, err := onceq.Once(ctx, l, "pay", func(context.Context, string) (string, error) { return "secret-receipt", nil })
		return errors.Join(err, l.SetResult(paid))
	}))
	require.NoError(t, err)
	require.NoError(t, w.Drain(t.Context(), 0))
	s := assistant(t, db.URL)
	tools := toolsOf(t, s)
	for name, reads := range tools {
		require.True(t, reads, "%s changes something", name)
	}
	for _, name := range []string{"doctor", "queues", "workers", "jobs_list", "jobs_show", "jobs_explain", "effects_list", "lanes_list", "limits_list", "groups_list", "schedules_list", "actions"} {
		require.Contains(t, tools, name)
	}
	for name := range tools {
		text, failed := called(t, s, name, nil)
		if !failed {
			require.True(t, json.Valid([]byte(text)), "%s answers with %s", name, text)
			require.NotContains(t, text, "secret", name)
		}
	}
	for _, tool := range []string{"jobs_show", "jobs_explain"} {
		text, failed := called(t, s, tool, map[string]any{"arguments": []any{r.ID}})
		require.False(t, failed, text)
		require.Contains(t, text, `"mail"`)
		require.NotContains(t, text, "secret")
	}
	for tool, arg := range map[string]any{"jobs_show": done.ID, "keys": "one"} {
		text, failed := called(t, s, tool, map[string]any{"arguments": []any{arg}})
		require.False(t, failed, text)
		require.Contains(t, text, "hidden")
		require.NotContains(t, text, "secret")
	}
	text, failed := called(t, s, "jobs_list", map[string]any{"state": []any{"waiting"}, "limit": 10})
	require.False(t, failed, text)
	require.Contains(t, text, `"hidden; onceq mcp --payloads shows it"`)
	require.NotContains(t, text, "secret")

	text, _ = called(t, assistant(t, db.URL, "--payloads"), "jobs_show", map[string]any{"arguments": []any{r.ID}})
	require.Contains(t, text, "secret-address")
	require.Contains(t, text, "secret-name")
}

func TestMCP_RefusesWhatItDoesNotServe(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 1)
	s := assistant(t, db.URL)
	_, err := s.CallTool(t.Context(), &mcp.CallToolParams{Name: "jobs_discard", Arguments: map[string]any{"kind": "mail"}})
	require.ErrorContains(t, err, "jobs_discard")
	for _, c := range []struct {
		tool, says string
		args       map[string]any
	}{
		{"jobs_show", "not the id of a job", map[string]any{"arguments": []any{"--database=postgres://elsewhere"}}},
		{"jobs_show", `takes no "database"`, map[string]any{"database": "postgres://elsewhere"}},
		{"jobs_show", "not found: job 4711", map[string]any{"arguments": []any{4711}}},
		{"jobs_list", "is not possible here", map[string]any{"state": "nonsense"}},
		{"jobs_list", "a text, a number, true or false is possible", map[string]any{"queue": map[string]any{"a": 1}}},
	} {
		text, failed := called(t, s, c.tool, c.args)
		require.True(t, failed, "%s %v", c.tool, c.args)
		require.Contains(t, text, c.says)
	}
	jobs, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateDead}})
	require.NoError(t, err)
	require.Len(t, jobs, 1, "nothing was discarded")
}

// A role that may only read is the wall that docs/run/operations.md speaks of: its tools answer, and --act changes nothing.
func TestMCP_OfARoleThatMayOnlyRead(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 1)
	const role = "onceq_mcp_reader"
	for _, sql := range []string{
		`create role ` + role + ` login password 'reader'`, `grant usage on schema onceq to ` + role, `grant select on all tables in schema onceq to ` + role, `grant select on all sequences in schema onceq to ` + role,
	} {
		_, err := db.Pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		_, err := db.Pool.Exec(context.Background(), `drop owned by `+role+`; drop role `+role)
		require.NoError(t, err)
	})
	to, err := url.Parse(db.URL)
	require.NoError(t, err)
	to.User = url.UserPassword(role, "reader")
	s := assistant(t, to.String(), "--act")
	for _, tool := range []string{"doctor", "queues", "jobs_list", "lanes_list", "limits_list", "schedules_list"} {
		text, failed := called(t, s, tool, nil)
		require.False(t, failed, "%s: %s", tool, text)
	}
	text, failed := called(t, s, "jobs_redrive", map[string]any{"kind": "mail"})
	require.True(t, failed, text)
	require.Contains(t, text, "permission denied")
}

func TestMCP_Acts(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 2)
	s := assistant(t, db.URL, "--act")
	tools := toolsOf(t, s)
	require.Contains(t, tools, "jobs_redrive")
	require.False(t, tools["jobs_redrive"])
	require.True(t, tools["jobs_list"])
	for name := range tools {
		require.False(t, strings.HasPrefix(name, "migrate") || name == "ui" || name == "top" || name == "mcp", name)
	}
	text, failed := called(t, s, "jobs_redrive", map[string]any{"kind": "mail", "dry-run": true})
	require.False(t, failed, text)
	text, failed = called(t, s, "jobs_redrive", map[string]any{"kind": "mail", "why": "the provider is back"})
	require.False(t, failed, text)
	jobs, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{Kind: "mail"})
	require.NoError(t, err)
	require.Len(t, jobs, 2)
	for _, j := range jobs {
		require.Equal(t, onceq.StateWaiting, j.State)
	}
	actions, err := onceqops.New(db.Queue).Actions(t.Context(), db.Pool, onceqops.ActionFilter{})
	require.NoError(t, err)
	require.NotEmpty(t, actions)
	for _, one := range actions {
		require.Equal(t, "ada@test (mcp)", one.Who)
		require.Equal(t, "the provider is back", one.Why)
		require.WithinDuration(t, time.Now(), one.At, time.Hour)
	}
}
