package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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

func TestTextsOfOthersAreCleaned(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	laned := onceq.Kind[string]{Name: "laned", Lane: func(s string) string { return s }}
	for _, lane := range []string{"a" + evil, "b" + evil} {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, laned.Job(lane))
		require.NoError(t, err)
	}
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "mail", Queue: "q" + evil, Key: "k" + evil, Scope: "s" + evil, Payload: "p" + evil,
		Metadata: map[string]string{"m" + evil: evil}, Limit: "l" + evil})
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set errors = jsonb_build_array(jsonb_build_object('at', now(), 'attempt', 1, 'error', $2::text)) where id = $1`, r.ID, evil)
	require.NoError(t, err)
	s, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{Owner: evil})
	require.NoError(t, err)
	require.NoError(t, s.Put(t.Context(), nil, onceqcron.Schedule{Name: evil, Spec: "@daily", Job: onceq.Job{Kind: "mail", Payload: evil}}))

	id := "3"
	hint := ""
	for _, args := range [][]string{
		{"jobs", "list"}, {"jobs", "show", id}, {"jobs", "explain", id}, {"jobs", "list", "--queue", evil}, {"jobs", "show", "--key", "k" + evil, "--scope", "s" + evil},
		{"queues"}, {"keys", "k" + evil}, {"keys", evil}, {"lanes", "list", "--limit", "1"}, {"limits", "list"}, {"groups", "show", id}, {"schedules", "list"},
		{"schedules", "show", evil}, {"schedules", "fire", evil}, {"schedules", "ticks", evil}, {"schedules", "pause", "no" + evil}, {"limits", "set", "l" + evil, "1"},
		{"pause", "--queue", "q" + evil, "--who", evil, "--why", evil}, {"pauses"}, {"doctor", "--all"}, {"resume", "--queue", "q" + evil}, {"jobs", "move", id, "--to", "z" + evil},
		{"jobs", "cancel", id, "--dry-run"}, {"jobs", "cancel", "--queue", "z" + evil, "--yes"}, {"jobs", "cancel", "--scope", evil, "--yes"}, {"jobs", "redrive", id, "--yes"},
		{"actions"}, {evil}, {"jobs", "list", "--" + evil}, {"jobs", "list", "--state", evil}, {"check", "--schema", "s" + evil},
	} {
		for _, more := range [][]string{nil, {"--json"}} {
			a := do(t, db.URL, append(args, more...)...)
			harmless(t, strings.Join(args, " "), a.out)
			harmless(t, strings.Join(args, " "), a.err)
			if more != nil && a.code == 0 && a.out != "" {
				require.True(t, json.Valid([]byte(a.out)), a.out)
			}
			if args[0] == "lanes" && more == nil {
				hint = a.err
			}
		}
	}
	require.Contains(t, hint, `--after $'laned/a`, "it can be typed as it is")
	require.Contains(t, hint, `x\x0aforged`)
	require.Equal(t, "$'a\\x0a\\xe2\\x80\\xae\\'\\\\'", quoteArg("a\n\u202e'\\"))
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
