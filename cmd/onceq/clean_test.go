package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// Whatever prints goes through output.go, which cleans it.
func TestEverythingPrintedIsClean(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	prints := regexp.MustCompile(`fmt\.F?[Pp]rint|NewEncoder|io\.WriteString|(^|[^.\w])print(ln)?\(|\.(out|errOut|w)\.Write|os\.Std(out|err)`)
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") || name == "output.go" {
			continue
		}
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for i, line := range strings.Split(string(text), "\n") {
			if name == "main.go" && strings.Contains(line, "run(ctx, os.Args") || strings.HasPrefix(line, "    ") {
				continue // it hands the streams over, or is part of a text
			}
			require.False(t, prints.MatchString(line), "%s:%d prints past output.go: %s", name, i+1, strings.TrimSpace(line))
		}
	}
}

// evil has what a terminal obeys, and a line that looks like one of the command.
const evil = "x\nforged: it is done\r\x1b[31m\u009b2J\x7f\u202e\u2066\u2028"

// harmless requires that a text moves no cursor, changes no color or direction, and has no line that the data made.
func harmless(t *testing.T, what, text string) {
	t.Helper()
	for _, r := range text {
		require.False(t, r != '\n' && dangerous(r), "%s prints %q in %q", what, r, text)
	}
	require.NotContains(t, text, "\nforged", what)
}

// printsNothingOfOthers are the commands that print no text but the command's own and their caller's.
var printsNothingOfOthers = []string{
	"onceq check-payloads", "onceq ui", "onceq reap", "onceq migrate up", "onceq migrate down", "onceq migrate status", "onceq migrate sql", "onceq migrate grants",
	"onceq import pg-boss", "onceq import graphile", "onceq import asynq", // as import river
}

// hostile makes a database whose every name and text is evil, and returns the ids of a job that waits, a dead one, one that waits for others, and
// one that runs.
func hostile(t *testing.T, db *queuetest.DB) (waiting, dead, group, running string) {
	t.Helper()
	laned := onceq.Kind[string]{Name: "laned", Lane: func(s string) string { return s }}
	for _, lane := range []string{"a" + evil, "b" + evil, "a" + evil, "b" + evil} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, laned.Job(lane))
		require.NoError(t, err)
	}
	waits, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "mail", Queue: "q" + evil, Key: "k" + evil, Scope: "s" + evil, Payload: "p" + evil,
		Metadata: map[string]string{"m" + evil: evil}, Limit: "l" + evil})
	require.NoError(t, err)
	run := func(sql string, args ...any) {
		t.Helper()
		_, err := db.Pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	run(`update onceq.jobs set errors = jsonb_build_array(jsonb_build_object('at', now(), 'attempt', 1, 'error', $2::text)) where id = $1`, waits.ID, evil)
	s, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{Owner: evil})
	require.NoError(t, err)
	require.NoError(t, s.Put(t.Context(), nil, onceqcron.Schedule{Name: evil, Spec: "@daily", Job: onceq.Job{Kind: "mail", Payload: evil}}))

	bad := onceq.Kind[string]{Name: "bad" + evil, Queue: "bad" + evil}
	unsure := onceq.Kind[string]{Name: "unsure" + evil, Queue: "bad" + evil, Key: func(s string) string { return s }}
	g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, []onceq.Job{bad.Job(evil)}, onceq.Job{Kind: "then" + evil, Queue: "then" + evil, Key: "then" + evil, Payload: evil})
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, unsure.Job("u"+evil))
	require.NoError(t, err)
	db.Drain(bad.Handle(func(context.Context, *onceq.Lease, string) error { return onceq.Fatal(errors.New(evil)) }), unsure.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		_, err := onceq.Once(ctx, l, "charge"+evil, func(context.Context, string) (string, error) { return "", errors.New(evil) }, onceq.OnUncertain(onceq.Hold()))
		return err
	}))

	runs, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "runs" + evil, Queue: "runs" + evil, Payload: 1})
	require.NoError(t, err)
	_, err = db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: "runs" + evil, Lease: time.Hour})
	require.NoError(t, err)
	run(`
update onceq.jobs set progress = jsonb_build_object('claims', claims, 'since', created_at, 'done', 1, 'total', 3, 'note', $2::text, 'at', created_at) where id = $1`, runs.ID, evil)

	run(`
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds, stuck, pool)
select n, 60000000, now(), now() + (n - 2) * interval '1 day', n, 1, $1, $1, jsonb_build_object($1::text, 1), array[$1],
       jsonb_build_array(jsonb_build_object('queue', $1::text, 'kind', $1::text, 'slots', 1, 'job', 1, 'since', now())), jsonb_build_object('bound', array[$1], 'wait', 240000000000)
  from generate_series(1, 3) n`, evil) // one is gone
	run(`
insert into onceq.job_counts (minute, took, started, completed, failed, dead, queue, kind, durations)
values (date_trunc('minute', now()) - interval '3 minutes', 0, 20, 0, 20, 0, $1, $1, '{20}')`, "bad"+evil)
	run(`
create table river_job (id bigint primary key, state text, kind text, queue text, args jsonb, unique_key bytea, scheduled_at timestamptz, priority int, max_attempts int, attempt int)`)
	run(`insert into river_job values (1, 'available', $1, $1, to_jsonb($1::text), null, now(), 1, 3, 0), (2, 'available', $1, '', '1', null, now(), 1, 3, 0)`, "river"+evil)
	return fmt.Sprint(waits.ID), fmt.Sprint(g.Members[0].ID), fmt.Sprint(g.Then.ID), fmt.Sprint(runs.ID)
}

// Each command prints texts of others so that a terminal obeys none of them.
func TestTextsOfOthersAreCleaned(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	id, dead, group, running := hostile(t, db)
	hint := ""
	tried := map[string]bool{"onceq top": true, "onceq mcp": true} // below
	for _, args := range [][]string{
		{"jobs", "list"}, {"jobs", "show", id}, {"jobs", "explain", id}, {"jobs", "list", "--queue", evil}, {"jobs", "show", "--key", "k" + evil, "--scope", "s" + evil},
		{"jobs", "errors"}, {"jobs", "errors", "--kind", evil}, {"jobs", "watch", dead}, {"jobs", "show", dead}, {"jobs", "explain", group},
		{"jobs", "show", running}, {"jobs", "explain", running}, {"jobs", "move", running, "--to", evil},
		{"queues"}, {"keys", "k" + evil}, {"keys", evil}, {"lanes", "list", "--limit", "1"}, {"limits", "list"}, {"groups", "show", id}, {"schedules", "list"},
		{"workers"}, {"stats"}, {"stats", "--by-kind"}, {"effects", "list"}, {"effects", "list", "--kind", evil}, {"groups", "list"}, {"groups", "show", group},
		{"schedules", "show", evil}, {"schedules", "fire", evil}, {"schedules", "ticks", evil}, {"schedules", "pause", "no" + evil}, {"limits", "set", "l" + evil, "1"},
		{"schedules", "pause", evil}, {"schedules", "resume", evil}, {"schedules", "backfill", evil, "--from", "3d", "--dry-run"}, {"schedules", "backfill", evil, "--from", "3d", "--yes"},
		{"pause", "--queue", "q" + evil, "--who", evil, "--why", evil}, {"pauses"}, {"doctor", "--all"}, {"resume", "--queue", "q" + evil}, {"jobs", "move", id, "--to", "z" + evil},
		{"jobs", "cancel", id, "--dry-run"}, {"jobs", "cancel", "--queue", "z" + evil, "--yes"}, {"jobs", "cancel", "--scope", evil, "--yes"}, {"jobs", "redrive", id, "--yes"},
		{"jobs", "retry", id}, {"jobs", "discard", dead, "--dry-run"}, {"jobs", "redrive", "--kind", "bad" + evil, "--dry-run"}, {"jobs", "discard", dead, "--yes"},
		{"effects", "resolve", "--effect", "charge" + evil, "--never", "--dry-run"}, {"effects", "resolve", "--effect", "charge" + evil, "--never", "--yes"},
		{"groups", "cancel", group, "--dry-run"}, {"groups", "cancel", group, "--yes"}, {"lanes", "limit", "laned/a" + evil, "0"}, {"limits", "remove", "l" + evil},
		{"import", "river", "--dry-run"}, {"import", "river", "--kind", "river" + evil, "--key", "{" + evil + "}", "--yes"}, {"import", "river", "--yes"}, {"import", "river", "--from-schema", evil},
		{"actions"}, {evil}, {"jobs", "list", "--" + evil}, {"jobs", "list", "--state", evil}, {"check", "--schema", "s" + evil},
	} {
		if c, _, err := new(app).command().Find(args); err == nil {
			tried[c.CommandPath()] = true
		}
		for _, more := range [][]string{nil, {"--json"}} {
			a := do(t, db.URL, append(args, more...)...)
			harmless(t, strings.Join(args, " "), a.out)
			harmless(t, strings.Join(args, " "), a.err)
			if more != nil && a.code == 0 && a.out != "" {
				require.True(t, json.Valid([]byte(a.out)), a.out)
			}
			if args[0] == "lanes" && more == nil {
				hint = cmp.Or(hint, a.err)
			}
		}
	}
	require.Contains(t, hint, `--after $'laned/a`, "it can be typed as it is")
	require.Contains(t, hint, `x\x0aforged`)
	require.Equal(t, "$'a\\x0a\\xe2\\x80\\xae\\'\\\\'", quoteArg("a\n\u202e'\\"))

	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, below := range c.Commands() {
			walk(below)
		}
		if !c.HasSubCommands() {
			require.NotEqual(t, slices.Contains(printsNothingOfOthers, c.CommandPath()), tried[c.CommandPath()], c.CommandPath())
		}
	}
	walk(new(app).command())
}

// So do those that go on until somebody ends them.
func TestTextsOfOthersAreCleaned_WhileItRuns(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	_, _, _, running := hostile(t, db)
	for _, args := range [][]string{{"top", "--json"}, {"jobs", "watch", running}, {"jobs", "watch", running, "--json"}} {
		c := command(t, db.URL, args...)
		out, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		line, err := bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		require.Contains(t, line, "forged", args)
		harmless(t, strings.Join(args, " "), line)
		require.NoError(t, c.Process.Kill())
		_ = c.Wait()
	}

	for _, flag := range []string{"--act", "--payloads"} {
		s, some := assistant(t, db.URL, flag), 0
		for name := range toolsOf(t, s) {
			text, _ := called(t, s, name, nil) // some want to be told of which job, and say so
			if strings.Contains(text, "forged") {
				some++
			}
			harmless(t, "mcp "+flag+": "+name, text)
		}
		require.Greater(t, some, 6, flag)
	}
}

// A connection string that cannot be read has a password all the same.
func TestConnectionStringsAreNotPrinted(t *testing.T) {
	t.Parallel()
	for _, to := range []string{
		"host=127.0.0.1 password = geheim port=x", "host = 127.0.0.1 password='geheim", `host=127.0.0.1 password='it\'s geheim' port=x`, "password=my geheim sslmode=disable",
		"postgres://ada:geheim/x@127.0.0.1/shop", "postgres://ada:12/geheim@127.0.0.1:y/shop", "postgres://ada:12?geheim@127.0.0.1/shop", "postgres://ada:12#geheim@127.0.0.1/shop", "postgres://ada:geheim%zz@127.0.0.1/shop", "postgres://ada:x@127.0.0.1/shop?sslpassword=geheim&sslmode=x",
		"postgres://ada:a@geheim@127.0.0.1:1/shop", "postgresql://ada:a@b@geheim@127.0.0.1:1/shop", "postgres://ada@geheim:x@127.0.0.1:1/shop", "postgres://ada:a@b/geheim@127.0.0.1:1/shop",
		"postgres://ada:12/3?x=geheim@127.0.0.1:1/shop", "postgres://ada:a@b/c?connect_timeout=geheim@127.0.0.1:1/shop", "postgres://ada:/geheim@127.0.0.1:1/shop", "postgres://ada:a@1.2.3.4:1,geheim@127.0.0.1:1/shop",
		"pos://ada:geheim@127.0.0.1/shop", "host=127.0.0.1 port=1 sslmode=x sslpassword = geheim",
		" postgres://ada:geheim@127.0.0.1/shop?sslmode=disable", "\"postgres://ada:geheim@127.0.0.1/shop?sslmode=disable\"", "Postgres://ada:geheim@127.0.0.1/shop?x=y",
	} {
		for _, more := range [][]string{nil, {"--json"}} {
			a := do(t, to, append([]string{"queues"}, more...)...)
			require.Equal(t, codeUsage, a.code, "%s: %s", to, a.err)
			require.Contains(t, a.err, "the connection string cannot be read: ")
			require.NotContains(t, a.out+a.err, "heim", to)
			require.NotContains(t, a.out+a.err, "127.0.0.1", to)
			if strings.Count(to, "@") > 1 {
				require.Contains(t, a.err, "write %40 for @", to)
			}
		}
	}
}

// An @ that is a part of something else than a URL's password is none of its ends.
func TestConnectionStrings_WithAnAt(t *testing.T) {
	t.Parallel()
	for _, to := range []string{
		"postgres://ada:a%40geheim@127.0.0.1:1/shop", "postgres://ada%40lab:geheim@127.0.0.1:1/shop?application_name=a@b", "postgresql://127.0.0.1:1/shop?user=ada@lab&password=geheim@x",
		"host=127.0.0.1 port=1 user=ada@lab password=a@geheim", "host=127.0.0.1 port=1 user=ada password='a://b@geheim'",
	} {
		a := do(t, to, "queues")
		require.Equal(t, codeUnreachable, a.code, "%s: %s", to, a.err)
		require.NotContains(t, a.out+a.err, "heim", to)
	}
}

// With a space or a quote before it, as a file of variables may have it, a URL is a key to pgx, which the server would repeat.
func TestConnectionStrings_ThatAreAKey(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	config := db.Pool.Config().ConnConfig
	for _, url := range []string{" postgres://ada:geheim@x/shop?sslmode=disable", "\"postgres://ada:geheim@x/shop?sslmode=disable\"", "Postgres://ada:geheim@x/shop?sslmode=disable"} {
		to := fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=%s %s", config.Host, config.Port, config.User, config.Password, config.Database, url)
		a := do(t, to, "queues")
		require.Equal(t, codeUsage, a.code, a.err)
		require.NotContains(t, a.out+a.err, "heim")
	}
}

// What ends a long change stands in the trail, which more people read than know where the database is.
func TestTheTrail_NamesNoHost(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	_, refused := pgx.Connect(t.Context(), "postgres://hidden_user@localhost:1/hidden_database?sslmode=disable")
	require.ErrorContains(t, refused, "hidden_user")
	a := &app{database: db.URL, timeout: time.Minute, who: "ada", schema: db.Queue.Schema(), ask: true, errOut: io.Discard}
	require.NoError(t, a.connect(t.Context(), true))
	defer a.close()
	for err, says := range map[error]string{refused: "3 cancelled; the connection was lost", errors.New("it is locked"): "3 cancelled; it is locked", nil: "3 cancelled"} {
		a.ended(t.Context(), onceqops.Action{What: "cancel"}, "3 cancelled", false, err)
		trail, err := onceqops.New(db.Queue).Actions(t.Context(), db.Pool, onceqops.ActionFilter{Limit: 1})
		require.NoError(t, err)
		require.Equal(t, says, trail[0].Outcome)
	}
}
