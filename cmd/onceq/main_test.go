package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "onceq-command-")
	if err == nil {
		binary = filepath.Join(dir, "onceq")
		var out []byte
		if out, err = exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// command is the built binary in an environment without anything of the developer's.
func command(t *testing.T, url string, args ...string) *exec.Cmd {
	t.Helper()
	c := exec.CommandContext(t.Context(), binary, args...)
	c.Env = []string{"HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH"), "ONCEQ_WHO=ada@test"}
	if url != "" {
		c.Env = append(c.Env, "DATABASE_URL="+url)
	}
	return c
}

type answer struct {
	code     int
	out, err string
}

func do(t *testing.T, url string, args ...string) answer {
	t.Helper()
	return finish(t, command(t, url, args...))
}

func finish(t *testing.T, c *exec.Cmd) answer {
	t.Helper()
	var out, errOut bytes.Buffer
	c.Stdout, c.Stderr = &out, &errOut
	err := c.Run()
	var exited *exec.ExitError
	if err != nil && !errors.As(err, &exited) {
		require.NoError(t, err)
	}
	return answer{c.ProcessState.ExitCode(), out.String(), errOut.String()}
}

// fine runs a command that must succeed, and returns what it prints.
func fine(t *testing.T, url string, args ...string) string {
	t.Helper()
	a := do(t, url, args...)
	require.Equal(t, 0, a.code, "%v: %s%s", args, a.out, a.err)
	return a.out
}

// asJSON runs a command that must succeed with --json.
func asJSON(t *testing.T, url string, args ...string) (v map[string]any) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(fine(t, url, append(args, "--json")...)), &v))
	return v
}

func schema() queuetest.Option { return queuetest.Schema("onceq") }

type mail struct {
	User int `json:"user"`
}

var mails = onceq.Kind[mail]{Name: "mail", Queue: "mail", Key: func(m mail) string { return fmt.Sprint("welcome:", m.User) }}

var charges = onceq.Kind[int]{Name: "charge", Queue: "billing", Key: func(order int) string { return fmt.Sprint("order:", order) }}

// kill makes n dead jobs of the kind mail.
func kill(t *testing.T, db *queuetest.DB, n int) {
	t.Helper()
	jobs := make([]onceq.Job, n)
	for i := range jobs {
		jobs[i] = mails.Job(mail{i + 1})
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `
with gone as (delete from onceq.jobs where kind = 'mail' returning *),
fence as (update onceq.job_fences f set state = 4, finished_at = now() from gone g where f.job_id = g.id)
insert into onceq.job_history (id, run_at, created_at, finished_at, claims, lost, attempts, max_attempts, priority, state, queue, kind, scope, key, payload, errors)
select id, run_at, created_at, now(), 1, 0, 1, max_attempts, priority, 6, queue, kind, scope, key, payload,
       jsonb_build_array(jsonb_build_object('at', now(), 'attempt', 1, 'error', E'550 no such address \x1b[31m\nfor ' || key)) from gone`)
	require.NoError(t, err)
}

// hold makes n held jobs of the kind charge.
func hold(t *testing.T, db *queuetest.DB, n int) (ids []int64) {
	t.Helper()
	for i := range n {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, charges.Job(1000+i))
		require.NoError(t, err)
		ids = append(ids, r.ID)
	}
	handler := charges.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) { return "", errors.New("time-out") }, onceq.OnUncertain(onceq.Hold()))
		return err
	})
	db.Drain(handler)
	_, err := onceqops.New(db.Queue).RetryMany(t.Context(), db.Pool, onceqops.Filter{Kind: "charge"})
	require.NoError(t, err)
	db.Drain(handler)
	return ids
}

func TestAnEmptyDatabase(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	a := do(t, db.URL, "queues")
	require.Equal(t, codeSchema, a.code)
	require.Contains(t, a.err, `schema "onceq" has no onceq tables`)
	require.Contains(t, a.err, "onceq migrate up. ")
	require.Equal(t, codeSchema, do(t, db.URL, "check").code)
	require.Equal(t, codeSchema, do(t, db.URL, "migrate", "status").code)
	a = do(t, db.URL, "doctor")
	require.Equal(t, codeFindings, a.code)
	require.Contains(t, a.out, "onceq migrate up")

	odd := []string{"--schema", `we'ird "one"`}
	require.Contains(t, do(t, db.URL, append(odd, "queues")...).err, `onceq --schema 'we'\''ird "one"' migrate up. `)
	require.Equal(t, "Schema \"we'ird \\\"one\\\"\" is at version 1 now; it was at 0.\n", fine(t, db.URL, append(odd, "migrate", "up")...))
	require.Contains(t, fine(t, db.URL, append(odd, "migrate", "up")...), "already")
	require.Contains(t, fine(t, db.URL, append(odd, "migrate", "status")...), "1        001_onceq.sql  applied")
	require.Contains(t, fine(t, db.URL, append(odd, "check")...), "which is right")
	require.Equal(t, "No queue has jobs, a history or workers.\n", fine(t, db.URL, append(odd, "queues")...))

	a = do(t, db.URL, append(odd, "migrate", "down")...)
	require.Equal(t, codeUsage, a.code)
	a = do(t, db.URL, append(odd, "migrate", "down", "--to", "0")...)
	require.Equal(t, codeRefused, a.code)
	require.Contains(t, a.err, "0 unfinished jobs")
	fine(t, db.URL, append(odd, "check")...)
	require.Contains(t, fine(t, db.URL, append(odd, "migrate", "down", "--to", "0", "--yes")...), "is at version 0 now")
	require.Equal(t, codeSchema, do(t, db.URL, append(odd, "check")...).code)

	// Tables that another tool made from the SQL are as good.
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	_, err = conn.Exec(t.Context(), fine(t, "", "migrate", "sql"))
	require.NoError(t, err)
	require.Contains(t, fine(t, db.URL, "migrate", "status"), "applied")
	require.Contains(t, fine(t, db.URL, "migrate", "up"), "already")
	_, err = conn.Exec(t.Context(), fine(t, "", "migrate", "sql", "--down"))
	require.NoError(t, err)
	require.Equal(t, codeSchema, do(t, db.URL, "check").code)
	require.Equal(t, migrations.Grants("onceq", "shop"), fine(t, "", "migrate", "grants", "shop"))
	require.Equal(t, migrations.ProducerGrants("onceq", "shop"), fine(t, "", "migrate", "grants", "shop", "--producer"))
}

// Each tool gets its form, whose statements run, and what it undoes leaves no schema behind, unless somebody else uses it.
func TestMigrationsInTheFormOfTools(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	run := func(sql string) {
		_, err := db.Pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	there := func() (there bool) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select to_regnamespace('onceq') is not null`).Scan(&there))
		return there
	}
	for format, names := range map[string][2]string{
		"golang-migrate": {"-- 000001_onceq.up.sql\n", "-- 000001_onceq.down.sql\n"},
		"flyway":         {"-- V1__onceq.sql\n", "-- U1__onceq.sql\n"},
	} {
		up, down := fine(t, "", "migrate", "sql", "--format", format), fine(t, "", "migrate", "sql", "--format", format, "--down")
		require.True(t, strings.HasPrefix(up, names[0]) && strings.HasPrefix(down, names[1]), format)
		require.NotContains(t, up+down, "${", "flyway would replace it")
		run(up)
		require.True(t, there())
		run(down)
		require.False(t, there(), format)
	}
	require.True(t, strings.HasPrefix(fine(t, "", "migrate", "sql", "1", "--format", "atlas"), "-- 1_onceq.sql\ncreate schema if not"))
	require.Equal(t, codeUsage, do(t, "", "migrate", "sql", "--format", "atlas", "--down").code)
	require.Equal(t, codeUsage, do(t, "", "migrate", "sql", "--format", "liquibase").code)
	require.Equal(t, codeUsage, do(t, "", "migrate", "sql", "--format", "goose", "--json").code)

	// goose sends what is between a begin and an end as one statement.
	parts := regexp.MustCompile(`(?s)-- \+goose StatementBegin\n(.*?)-- \+goose StatementEnd\n`).
		FindAllStringSubmatch(fine(t, "", "migrate", "sql", "--format", "goose"), -1)
	require.Len(t, parts, 2)
	run(parts[0][1])
	run(`create table onceq.mine ()`)
	run(parts[1][1])
	require.True(t, there(), "a table of somebody else is in it")
}

// What the command advises looks at the schema that the call looked at.
func TestAdviceNamesTheSchema(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("shop"))
	made, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "mail", Queue: "mail", Payload: 1, Delay: time.Hour})
	require.NoError(t, err)
	id := fmt.Sprint(made.ID)
	shop := func(args ...string) answer { return do(t, db.URL, append([]string{"--schema", "shop"}, args...)...) }
	require.Equal(t, 0, shop("pause", "--queue", "mail").code)
	require.Contains(t, shop("doctor").out, "         onceq --schema shop resume --queue mail, when")
	require.Contains(t, shop("doctor", "--json").out, `"onceq --schema shop resume --queue mail, when`)
	require.Contains(t, shop("jobs", "show", id).out, "; onceq --schema shop jobs retry "+id+" runs it now")
	require.Contains(t, shop("jobs", "show", id).out, "; what it waits for: onceq --schema shop jobs explain "+id+";")
	require.Contains(t, shop("jobs", "explain", id).out, "as onceq --schema shop jobs retry "+id+" does")
	require.Contains(t, shop("jobs", "explain", id, "--json").out, "as onceq --schema shop jobs retry "+id+" does")
	require.Contains(t, shop("groups", "cancel", id, "--yes").err, "onceq --schema shop jobs cancel "+id+" cancels it")

	// A shell may name another schema than the usual one for all calls.
	c := command(t, db.URL, "jobs", "show", id)
	c.Env = append(c.Env, "ONCEQ_SCHEMA=shop")
	require.Contains(t, finish(t, c).out, "onceq --schema shop jobs retry")
	require.NoError(t, migrations.Up(t.Context(), connect(t, db.URL), "onceq"))
	for env, want := range map[string]string{"ONCEQ_SCHEMA=shop": "start one; onceq --schema onceq workers lists", "ONCEQ_SCHEMA=": "start one; onceq workers lists"} {
		c := command(t, db.URL, "--schema", "onceq", "doctor")
		c.Env = append(c.Env, env)
		require.Contains(t, finish(t, c).out, want)
	}
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func TestAnotherVersion(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	for version, say := range map[int]string{-1: "this command needs", 99: "install the version of the command that the workers use"} {
		_, err := conn.Exec(t.Context(), `update onceq.meta set version = $1::int, oldest_code = greatest(1, $1::int)`, version)
		require.NoError(t, err)
		for _, args := range [][]string{{"queues"}, {"check"}, {"jobs", "list"}, {"schedules", "list"}, {"top", "--json"}} {
			a := do(t, db.URL, args...)
			require.Equal(t, codeSchema, a.code, "%v: %s", args, a.err)
			require.Contains(t, a.err, fmt.Sprintf("version %d", version))
			require.Contains(t, a.err, say)
		}
	}
	_, err = conn.Exec(t.Context(), `update onceq.meta set version = 99, oldest_code = 99`)
	require.NoError(t, err)
	a := do(t, db.URL, "migrate", "up", "--json")
	require.Equal(t, codeSchema, a.code)
	require.Contains(t, a.err, `"code":"schema"`)
	require.Equal(t, codeSchema, do(t, db.URL, "migrate", "status").code)

	// Newer tables that bear this version are as good as its own.
	_, err = conn.Exec(t.Context(), `update onceq.meta set oldest_code = 1`)
	require.NoError(t, err)
	require.Contains(t, fine(t, db.URL, "check"), "version 99")
	require.Contains(t, fine(t, db.URL, "migrate", "up"), "version 99")
	require.Contains(t, fine(t, db.URL, "migrate", "status"), "001_onceq.sql")
	require.Contains(t, do(t, db.URL, "doctor", "--all").out, "is at version 99, and works with this command")
}

func TestNoServer(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().(*net.TCPAddr)
	require.NoError(t, l.Close())
	url := fmt.Sprintf("postgres://ada:secret@127.0.0.1:%d/shop", address.Port)
	for _, args := range [][]string{{"queues"}, {"doctor"}, {"check"}, {"migrate", "up"}, {"jobs", "cancel", "1", "--yes"}, {"top", "--json"}} {
		a := do(t, url, args...)
		require.Equal(t, codeUnreachable, a.code, "%v: %s", args, a.err)
		a.err = strings.ReplaceAll(a.err, `\"`, `"`)
		require.Contains(t, a.err, `cannot connect to database "shop" as user "ada"`)
		require.Contains(t, a.err, "refused")
		require.Contains(t, a.err, "from DATABASE_URL")
		require.NotContains(t, a.err, "secret")
	}
	c := command(t, "", "queues")
	c.Env = append(c.Env, "PGHOST=127.0.0.1", fmt.Sprint("PGPORT=", address.Port), "PGUSER=grace", "PGDATABASE=lab")
	a := finish(t, c)
	require.Equal(t, codeUnreachable, a.code)
	require.Contains(t, a.err, `database "lab" as user "grace"`)
	require.Contains(t, a.err, "the PG* variables")

	db := queuetest.New(t, schema())
	a = do(t, strings.Replace(db.URL, "/"+dbName(t, db), "/nothing_here", 1), "queues")
	require.Equal(t, codeUnreachable, a.code)
	require.Contains(t, a.err, `database "nothing_here" does not exist`)
}

func dbName(t *testing.T, db *queuetest.DB) string {
	t.Helper()
	c, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	return c.Database
}

// Mistakes are told before anything is sent.
func TestMistakes(t *testing.T) {
	t.Parallel()
	for args, say := range map[string]string{
		"bogus":                                         `unknown command "bogus"`,
		"jobs bogus":                                    `unknown command "bogus"`,
		"queues --nope":                                 "unknown flag: --nope; see: onceq queues --help",
		"jobs show":                                     "which job?",
		"jobs show x":                                   "not the id of a job",
		"jobs show --key k":                             "--key needs --scope",
		"jobs cancel":                                   "which jobs?",
		"jobs redrive 1 --kind mail":                    "not both",
		"jobs list --limit 0":                           "--limit is 0",
		"effects resolve 1 charge":                      "did it happen?",
		"effects resolve 1 --applied":                   "which effect of job 1?",
		"effects resolve --applied":                     "which effects?",
		"effects resolve 1 charge --applied":            "--result null if it returns nothing",
		"effects resolve 1 a --never --result 1":        "--result goes with --applied only",
		"effects resolve 1 a --applied --result ch_123": "--result is not JSON",
		"schedules fire":                                "accepts 1 arg(s), received 0",
		"schedules backfill nightly":                    "backfill from when?",
		"queues --timeout 0s":                           "--timeout is 0s",
		"migrate sql 99":                                `no migration "99"`,
		"top":                                           "needs a terminal",
		"lanes limit book":                              `"book" is not a lane`,
		"lanes limit /a 1":                              `"/a" is not a lane`,
		"lanes limit book/a x":                          `the limit is "x"`,
		"lanes list --limit 0":                          "--limit is 0",
		"ui --port 70000":                               "invalid argument",
		"--database pos://x queues":                     "the connection string cannot be read",
	} {
		a := do(t, "", strings.Fields(args)...)
		require.Equal(t, codeUsage, a.code, "%s: %s", args, a.err)
		require.Contains(t, a.err, say, args)
		require.Empty(t, a.out, args)
	}
	db := queuetest.New(t, schema())
	for args, say := range map[string]string{
		"jobs list --state lost":                 "--state lost is not possible here; possible: waiting, delayed, running",
		"jobs redrive --state waiting":           "--state waiting is not possible here; possible: dead, held, cancelled",
		"jobs list --created-from x":             `--created-from is "x"`,
		"schedules backfill n --from 1h --to 2h": "--to is before --from",
	} {
		a := do(t, db.URL, strings.Fields(args)...)
		require.Equal(t, codeUsage, a.code, "%s: %s", args, a.err)
		require.Contains(t, a.err, say, args)
	}
}

// What somebody on call looks at, word for word.
func TestLook(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 3)
	held := hold(t, db, 1)
	resize, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "resize", Queue: "imagse", Payload: "cat.png"})
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = now() - interval '26 minutes 30 seconds' where kind = 'resize'`)
	require.NoError(t, err)

	// What workers have counted in each of the last twenty minutes.
	_, err = db.Pool.Exec(t.Context(), `delete from onceq.job_counts`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `insert into onceq.job_counts (minute, took, started, completed, failed, dead, queue, kind, durations)
select date_trunc('minute', now()) - n * interval '1 minute', 0, 1201, 1200, 1, 0, 'mail', 'mail', '{1100,100,0,1}' from generate_series(-1, 20) n`)
	require.NoError(t, err)

	out := regexp.MustCompile(`26m[3-5]\ds`).ReplaceAllString(fine(t, db.URL, "queues"), "26m30s")
	require.Equal(t, `QUEUE    WAITING  OLDEST  RUNNING  AHEAD  RETRYING  DELAYED  BLOCKED  DEAD  HELD  DONE/MIN  FAILED/MIN    P95
billing        0       -        0      0         0        0        0     0     1         0           0      -
imagse         1  26m30s        0      0         0        0        0     0     0         0           0      -
mail           0       -        0      0         0        0        0     3     0     1,200         1.0  1.2ms
`, out)
	queues := asJSON(t, db.URL, "queues", "mail")["queues"].([]any)
	require.Len(t, queues, 1)
	require.EqualValues(t, 3, queues[0].(map[string]any)["dead"])
	minutes := queues[0].(map[string]any)["minutes"].([]any)
	require.Len(t, minutes, 30)
	require.Equal(t, map[string]any{"started": 1201.0, "completed": 1200.0, "failed": 1.0, "dead": 0.0, "p95_seconds": 0.0012}, minutes[29])

	a := do(t, db.URL, "doctor")
	require.Equal(t, codeFindings, a.code)
	require.Contains(t, a.out, `waiting: the oldest job of queue "imagse" has been due for 26m`)
	require.Contains(t, a.out, "and no worker serves this queue")
	require.Contains(t, a.out, "onceq effects list --queue billing")
	require.Contains(t, a.out, `queue "mail" has dead jobs: 3`)
	a = do(t, db.URL, "doctor", "--json")
	require.Equal(t, codeFindings, a.code)
	var said struct {
		OK       bool
		Findings []finding
	}
	require.NoError(t, json.Unmarshal([]byte(a.out), &said))
	require.False(t, said.OK)
	var what []string
	for _, f := range said.Findings {
		if f.Level != "ok" && f.What != "setting" { // the tests' server does without durability
			what = append(what, f.Level+" "+f.What)
		}
	}
	require.ElementsMatch(t, []string{"bad waiting", "warning dead", "warning held", "warning workers"}, what)

	// What stands in an error cannot move the terminal's cursor.
	out = fine(t, db.URL, "jobs", "list", "--state", "dead", "--limit", "2")
	require.Contains(t, out, `550 no such address \u001b[31m for welcome:3`)
	require.NotContains(t, out, "\x1b")
	require.NotContains(t, fine(t, db.URL, "jobs", "show", "3"), "\x1b")
	page := asJSON(t, db.URL, "jobs", "list", "--state", "dead", "--limit", "2")
	require.EqualValues(t, 2, page["next"])
	require.Len(t, asJSON(t, db.URL, "jobs", "list", "--state", "dead", "--after", "2")["jobs"], 1)
	require.Equal(t, "No job is dead, kind \"sms\".\n", fine(t, db.URL, "jobs", "list", "--state", "dead", "--kind", "sms"))
	require.Equal(t, "No job is enqueued before "+stamp(time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC))+".\n", fine(t, db.URL, "jobs", "list", "--created-before", "2001-01-01"))
	require.Len(t, asJSON(t, db.URL, "jobs", "list", "--created-from", "1h")["jobs"], 5)

	id := fmt.Sprint(held[0])
	out = fine(t, db.URL, "jobs", "show", id)
	require.Contains(t, out, "held, until somebody says whether charge happened: onceq effects resolve "+id+" charge --applied, or --never")
	require.Contains(t, out, "effect      charge held, begun ")
	require.Contains(t, out, "the provider knows it as oq_")
	job := asJSON(t, db.URL, "jobs", "show", "--key", "order:1000", "--scope", "charge")
	require.EqualValues(t, held[0], job["id"])
	require.Equal(t, "held", job["effects"].([]any)[0].(map[string]any)["state"])
	require.Contains(t, fine(t, db.URL, "keys", "order:1000"), "job    charge  held ")
	effects := asJSON(t, db.URL, "effects", "list")["effects"].([]any)
	require.Equal(t, "charge", effects[0].(map[string]any)["name"])
	require.Contains(t, fine(t, db.URL, "check-payloads"), "mail       3")

	require.Contains(t, fine(t, db.URL, "jobs", "explain", id), "held")
	require.Equal(t, "dead", asJSON(t, db.URL, "jobs", "explain", "1")["reasons"].([]any)[0].(map[string]any)["cause"])
	require.Contains(t, fine(t, db.URL, "jobs", "explain", fmt.Sprint(resize.ID)), "imagse")
	require.Equal(t, codeNotFound, do(t, db.URL, "jobs", "explain", "99").code)
	for _, ids := range [][]string{{"99"}, {"98", "99"}} {
		lost := do(t, db.URL, append([]string{"jobs", "redrive"}, ids...)...)
		require.Equal(t, codeNotFound, lost.code)
		require.Contains(t, lost.err, "is unknown, or ended and was not kept (Kind.Keep); nothing was changed")
	}

	require.Equal(t, codeNotFound, do(t, db.URL, "jobs", "show", "99").code)
	require.Equal(t, codeNotFound, do(t, db.URL, "keys", "none").code)
	require.Equal(t, codeNotFound, do(t, db.URL, "effects", "resolve", id, "mail", "--never", "--yes").code)
	require.Equal(t, codeNotFound, do(t, db.URL, "schedules", "fire", "none").code)
	a = do(t, db.URL, "jobs", "show", "99", "--json")
	require.JSONEq(t, `{"code": "not_found", "error": "not found: job 99: it never was, or it completed and its kind keeps no history (Kind.Keep), or somebody discarded it"}`, a.err)
}

// What changes anything says first what it is about, does nothing without a yes, and leaves a line in the audit trail.
func TestMend(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 12)
	held := hold(t, db, 2)
	count := func(state string) (n int) {
		t.Helper()
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from onceq.v_jobs where state = $1`, state).Scan(&n))
		return n
	}
	first, second := fmt.Sprint(held[0]), fmt.Sprint(held[1])
	for _, args := range [][]string{
		{"jobs", "redrive", "--kind", "mail"}, {"jobs", "discard", "1"}, {"jobs", "discard", "--state", "dead"}, {"jobs", "cancel", "--queue", "mail", "--state", "waiting"},
		{"effects", "resolve", first, "charge", "--never"}, {"effects", "resolve", "--effect", "charge", "--never"},
	} {
		a := do(t, db.URL, args...)
		if a.code == 0 {
			require.Contains(t, a.out, "Nothing was changed", args)
			continue
		}
		require.Equal(t, codeRefused, a.code, "%v: %s", args, a.err)
		require.Contains(t, a.err, "add --yes", args)
		require.Equal(t, slices.Contains(args, "discard") && slices.Contains(args, "--state"), strings.Contains(a.err, "dead, of every queue and kind."), args)
		require.Equal(t, 0, do(t, db.URL, append(args, "--dry-run")...).code)
	}
	require.Equal(t, 12, count("dead"))
	require.Equal(t, 2, count("held"))
	require.Equal(t, "The audit trail is empty.\n", fine(t, db.URL, "actions"))
	require.EqualValues(t, 12, asJSON(t, db.URL, "jobs", "redrive", "--kind", "mail", "--dry-run")["matched"])

	// A variable of a script that is not set chooses nothing.
	for _, flag := range []string{"queue", "scope", "group", "created-from", "created-before", "state"} {
		value := map[string]string{"group": "0"}[flag]
		for _, args := range [][]string{{"jobs", "discard", "--kind", "mail"}, {"jobs", "move", "--kind", "mail", "--to", "x"}, {"jobs", "list"}, {"effects", "resolve", "--effect", "charge", "--never"}} {
			if args = append(args, "--"+flag, value); args[1] != "list" {
				args = append(args, "--yes")
			}
			a := do(t, db.URL, args...)
			require.Equal(t, codeUsage, a.code, "%v: %s", args, a.err)
			require.Contains(t, a.err, "--"+flag+" is empty", args)
		}
	}
	require.Equal(t, 12, count("dead"))
	require.Equal(t, 2, count("held"))

	a := do(t, db.URL, "jobs", "redrive", "--kind", "mail", "--limit", "10", "--yes", "--why", "the address book is back")
	require.Equal(t, answer{0, "10 jobs run again.\n", `Redrive 10 jobs: dead, kind "mail".
  12 dead mail in queue mail key "welcome:12"
  11 dead mail in queue mail key "welcome:11"
  10 dead mail in queue mail key "welcome:10"
  9 dead mail in queue mail key "welcome:9"
  8 dead mail in queue mail key "welcome:8"
  and 5 others
`}, a)
	require.Equal(t, "job 2: waiting\n", fine(t, db.URL, "jobs", "redrive", "2"))
	require.Equal(t, "job 1: discarded\n", fine(t, db.URL, "jobs", "discard", "1", "-y"))
	require.Equal(t, 0, count("dead"))
	require.Equal(t, "job 2: cancelled\njob 3: cancelled\n", fine(t, db.URL, "jobs", "cancel", "2", "3", "--yes"))
	require.Equal(t, map[string]any{"matched": 9.0, "cancelled": 9.0, "asked": 0.0, "stopped": false}, asJSON(t, db.URL, "jobs", "cancel", "--kind", "mail", "--yes"))
	a = do(t, db.URL, "jobs", "discard", "2", "4711", "-y")
	require.Equal(t, codeNotFound, a.code)
	require.Equal(t, "job 2: discarded\n", a.out)
	require.Contains(t, a.err, "1 job of 2 failed")
	require.Equal(t, codeRefused, do(t, db.URL, "jobs", "retry", "3").code)
	require.Equal(t, codeRefused, do(t, db.URL, "jobs", "redrive", first).code)

	require.Equal(t, "job "+first+": waiting\n", fine(t, db.URL, "effects", "resolve", first, "charge", "--applied", "--result", `"ch_1"`, "--yes", "--why", "seen in the log"))
	require.NotContains(t, fine(t, db.URL, "actions"), "ch_1", "the trail is for people who may not see results, too")
	require.Equal(t, codeRefused, do(t, db.URL, "effects", "resolve", first, "charge", "--never", "--yes").code)
	require.Equal(t, "1 effect settled as never applied. 1 job run again.\n", fine(t, db.URL, "effects", "resolve", "--effect", "charge", "--kind", "charge", "--never", "--yes"))
	ran := 0
	db.Drain(charges.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		id, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) { ran++; return "ch_2", nil })
		if fmt.Sprint(l.ID) == first {
			require.Equal(t, "ch_1", id)
		} else {
			require.Equal(t, second+" ch_2", fmt.Sprint(l.ID, " ", id))
		}
		return err
	}))
	require.Equal(t, 1, ran)

	trail := fine(t, db.URL, "actions")
	require.Contains(t, trail, "the address book is back")
	require.Contains(t, trail, "seen in the log")
	require.Equal(t, strings.Count(trail, "\n")-1, strings.Count(trail, "ada@test"))
	require.Contains(t, fine(t, db.URL, "actions", "--job", first), "charge")
	require.Regexp(t, `(?s)^ID .*cancel.*`, fine(t, db.URL, "actions", "--what", "cancel", "--since", "1h"))
	require.NotContains(t, fine(t, db.URL, "actions", "--what", "cancel"), "redrive")
	for _, none := range [][]string{{"--by", "nobody"}, {"--what", "nothing"}, {"--since", "2999-01-01"}} {
		require.Equal(t, "The audit trail has no such line.\n", fine(t, db.URL, append([]string{"actions"}, none...)...))
	}
	require.Contains(t, fine(t, db.URL, "jobs", "show", "3"), "cancel by ada@test")
	require.Contains(t, fine(t, db.URL, "reap"), "Removed 0 keys")
}

// A schedule of which ticks did not happen: doctor names it, and prints the command that makes up for them.
// doctorSays is the finding of that name.
func doctorSays(t *testing.T, url, what string) map[string]any {
	t.Helper()
	var said struct{ Findings []map[string]any }
	a := do(t, url, "doctor", "--json")
	require.NoError(t, json.Unmarshal([]byte(a.out), &said), a.out)
	for _, f := range said.Findings {
		if f["what"] == what {
			return f
		}
	}
	require.Fail(t, "doctor does not say "+what, a.out)
	return nil
}

func sinceOf(t *testing.T, finding map[string]any) time.Time {
	t.Helper()
	text, _ := finding["since"].(string)
	since, err := time.Parse(time.RFC3339Nano, text)
	require.NoError(t, err)
	return since.UTC()
}

func TestDoctorNamesMissedTicks(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	cron, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{})
	require.NoError(t, err)
	report := onceq.Kind[string]{Name: "report"}
	require.NoError(t, cron.Put(t.Context(), nil, onceqcron.Schedule{Name: "the report", Spec: "@every 1h", Job: report.Job("x"), Missed: onceqcron.Skip()}))
	require.NotContains(t, do(t, db.URL, "doctor").out, "missed:")
	first := time.Now().UTC().Truncate(time.Hour).Add(-4*time.Hour + 30*time.Minute + 123456*time.Microsecond)
	_, err = db.Pool.Exec(t.Context(), `update onceq.schedules set next_at = $1`, first)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = $1`, first)
	require.NoError(t, err)
	db.RunOne(cron.Handlers()...)
	a := do(t, db.URL, "doctor")
	require.Equal(t, codeFindings, a.code)
	require.Regexp(t, `warning  missed: [45] ticks of schedule "the report" did not happen, between `+first.Format("2006-01-02 15:04:05")+" and ", a.out)
	command := regexp.MustCompile(`if they still matter: onceq (schedules backfill 'the report' --from (\S+) --to \S+); onceq schedules ticks 'the report'`).FindStringSubmatch(a.out)
	require.NotEmpty(t, command, a.out)
	require.Equal(t, first.Format(time.RFC3339Nano), command[2])
	missed := doctorSays(t, db.URL, "missed")
	require.Equal(t, "the report", missed["schedule"])
	require.Equal(t, first, sinceOf(t, missed))
	job, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	claimed, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 1, Kinds: []string{"k"}})
	require.NoError(t, err)
	require.NoError(t, claimed[0].Fail(t.Context(), onceq.Fatal(errors.New("x"))))
	dead, err := db.Queue.Get(t.Context(), db.Pool, job.ID)
	require.NoError(t, err)
	require.Equal(t, dead.FinishedAt.UTC(), sinceOf(t, doctorSays(t, db.URL, "dead")))
	require.Contains(t, fine(t, db.URL, append(split(command[1]), "--yes")...), "nqueued")
	require.NotContains(t, do(t, db.URL, "doctor").out, "missed:")
}

func TestSchedules(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	report := onceq.Kind[string]{Name: "report"}
	shop, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{Owner: "shop"}, onceqcron.Schedule{Name: "nightly", Spec: "0 2 * * *", Job: report.Job("all")})
	require.NoError(t, err)
	require.NoError(t, shop.Register(t.Context()))
	require.NoError(t, shop.Put(t.Context(), nil, onceqcron.Schedule{Name: "in the table", Spec: "@daily", Job: report.Job("some")}))
	jobs := func(state string) (n int) {
		t.Helper()
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from onceq.v_jobs where kind = 'report'`).Scan(&n))
		return n
	}
	require.Contains(t, fine(t, db.URL, "schedules", "list"), "nightly       shop   0 2 * * *  UTC ")
	require.Contains(t, fine(t, db.URL, "schedules", "fire", "in the table"), "Enqueued job ")
	require.Equal(t, 1, jobs("waiting"))

	// One in the code is fired by a worker that has the code.
	require.Contains(t, fine(t, db.URL, "schedules", "fire", "nightly"), "Asked a worker of it")
	require.Equal(t, 1, jobs("waiting"))
	db.Drain(shop.Handlers()...)
	require.Equal(t, 2, jobs("waiting"))
	require.Contains(t, fine(t, db.URL, "schedules", "ticks", "nightly"), "asked for")

	fine(t, db.URL, "schedules", "pause", "nightly", "--why", "wrong numbers")
	require.Contains(t, fine(t, db.URL, "schedules", "list"), "paused")
	fine(t, db.URL, "schedules", "resume", "nightly")
	db.Drain(shop.Handlers()...)
	require.NotContains(t, fine(t, db.URL, "schedules", "list"), "paused")

	// Whole days: how many ticks "73h ago until now" has depends on the hour.
	day := time.Now().UTC().Truncate(24 * time.Hour)
	to := day.Add(-time.Hour).Format(time.RFC3339)
	three, two := day.Add(-73*time.Hour).Format(time.RFC3339), day.Add(-49*time.Hour).Format(time.RFC3339)
	a := do(t, db.URL, "schedules", "backfill", "in the table", "--from", three, "--to", to)
	require.Equal(t, codeRefused, a.code)
	require.Contains(t, a.err, "Enqueue 3 jobs of the ticks")
	require.Equal(t, 2, jobs("waiting"))
	require.Equal(t, "Enqueued 3 jobs.\n", fine(t, db.URL, "schedules", "backfill", "in the table", "--from", three, "--to", to, "--yes"))
	require.Equal(t, 5, jobs("waiting"))

	// The command knows how many there are also of one in the code, and refuses too many before it asks a worker.
	require.Contains(t, do(t, db.URL, "schedules", "backfill", "nightly", "--from", two, "--to", to).err, "Enqueue 2 jobs of the ticks")
	require.Contains(t, do(t, db.URL, "schedules", "backfill", "nightly", "--from", "1980-01-01", "--to", to, "--yes").err, "more than 10000 ticks")
	require.Equal(t, 5, jobs("waiting"))
	require.Contains(t, fine(t, db.URL, "schedules", "backfill", "nightly", "--from", two, "--to", to, "--yes"), "Asked a worker of it")
	db.Drain(shop.Handlers()...)
	require.Equal(t, 7, jobs("waiting"))
	require.Len(t, asJSON(t, db.URL, "schedules", "list")["schedules"], 2)
	require.Contains(t, fine(t, db.URL, "actions"), "wrong numbers")
}

// Who runs, and what they leave alone.
func TestWorkersAndPauses(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	require.Equal(t, "No worker runs.\n", fine(t, db.URL, "workers"))
	require.Equal(t, "Nothing is paused.\n", fine(t, db.URL, "pauses"))
	fine(t, db.URL, "pause", "--queue", "mail", "--why", "the provider is down")
	require.Contains(t, fine(t, db.URL, "pause", "--kind", "charge"), `Kind "charge" is paused.`)
	require.Equal(t, "Kind \"chrage\" is paused. No worker has it, and there is no job of it: is that its name?\n", fine(t, db.URL, "pause", "--kind", "chrage"))
	fine(t, db.URL, "resume", "--kind", "chrage")
	require.Equal(t, codeUsage, do(t, db.URL, "pause").code)
	require.Equal(t, codeUsage, do(t, db.URL, "pause", "--limit", "a", "--kind", "b").code)
	require.Equal(t, codeUsage, do(t, db.URL, "pause", "--limit", "a", "--until", "soon").code)
	require.Equal(t, "Limit \"provider\" is paused.\n", fine(t, db.URL, "pause", "--limit", "provider", "--for", "1h"))
	require.Regexp(t, `limit +provider .* \d{4}-\d\d-\d\d`, fine(t, db.URL, "pauses"))
	require.Contains(t, do(t, db.URL, "doctor").out, `onceq resume --limit provider`)
	require.Equal(t, "Limit \"provider\" goes on.\n", fine(t, db.URL, "resume", "--limit", "provider"))
	require.Contains(t, fine(t, db.URL, "pauses"), "ada@test: the provider is down")
	require.Contains(t, fine(t, db.URL, "queues"), "paused\n")
	require.Contains(t, do(t, db.URL, "doctor").out, `onceq resume --queue mail`)

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	ran := make(chan int, 1)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, mails.Handle(func(_ context.Context, _ *onceq.Lease, m mail) error {
		ran <- m.User
		return nil
	}))
	require.NoError(t, err)
	go func() { ended <- w.Run(ctx) }()
	require.Eventually(t, func() bool { return strings.Contains(fine(t, db.URL, "workers"), "mail (") }, 5*time.Minute, 100*time.Millisecond)
	require.Len(t, asJSON(t, db.URL, "workers")["workers"], 1)
	require.Regexp(t, ` ok +\S`, fine(t, db.URL, "workers"))
	_, err = db.Pool.Exec(t.Context(), `update onceq.workers set seen_at = seen_at - interval '2 minutes'`)
	require.NoError(t, err)
	require.Regexp(t, ` late +\S`, fine(t, db.URL, "workers"))
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, mails.Job(mail{7}))
	require.NoError(t, err)
	require.Equal(t, "Queue \"mail\" goes on.\n", fine(t, db.URL, "resume", "--queue", "mail"))
	require.Equal(t, 7, <-ran)
	lines := fine(t, db.URL, "actions")
	require.Equal(t, "Queue \"mail\" was not paused. Nothing was changed.\n", fine(t, db.URL, "resume", "--queue", "mail"))
	require.Equal(t, "Kind \"mial\" was not paused. Nothing was changed.\n", fine(t, db.URL, "resume", "--kind", "mial"))
	require.Equal(t, lines, fine(t, db.URL, "actions"))
	fine(t, db.URL, "resume", "--kind", "charge")
	stop()
	require.NoError(t, <-ended)
	require.Contains(t, fine(t, db.URL, "actions"), "the provider is down")

	// A worker that has ended is not there. One that was killed leaves its row.
	require.Contains(t, do(t, db.URL, "doctor").out, "workers: no worker is there\n")
	_, err = db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (1::bigint << 32, 60000000, now() - interval '1 hour', now() - interval '1 hour', 1, $1, 'web', 'v1', '{"mail": 3}', '{mail}')`, onceq.SchemaVersion)
	require.NoError(t, err)
	require.Contains(t, do(t, db.URL, "doctor").out, "workers: no worker is there but those that were not seen for three minutes\n")
}

// Ctrl-c in the middle of a long change: the statement under way ends, the count is right, and the same command goes on from there.
func TestCtrlC(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	const n = 1700
	kill(t, db, n)
	// Newest first: 1700 to 1201, then 1200 to 701. The second statement waits for job 1000.
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from onceq.job_history where id = 1000 for update`)
	require.NoError(t, err)
	said := interrupted(t, db, tx, "jobs", "redrive", "--kind", "mail", "--yes", "--json")
	require.Equal(t, map[string]any{"matched": float64(n), "redriven": 1000.0, "taken": 0.0, "stopped": true}, said)
	var live int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from onceq.jobs`).Scan(&live))
	require.Equal(t, 1000, live)
	require.Contains(t, fine(t, db.URL, "actions"), "1,000 jobs run again.; interrupted")
	require.Equal(t, "700 jobs run again.\n", fine(t, db.URL, "jobs", "redrive", "--kind", "mail", "--yes"))
}

// The same for a group, whose waiting job ends first.
func TestCtrlC_AGroup(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	const n = 1700
	jobs := make([]onceq.Job, n)
	for i := range jobs {
		jobs[i] = mails.Job(mail{i})
		jobs[i].Key = fmt.Sprint(i)
	}
	g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, jobs, mails.Job(mail{-1}))
	require.NoError(t, err)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from onceq.job_fences where job_id = $1 for update`, g.Members[849].ID) // in the second statement
	require.NoError(t, err)
	id := fmt.Sprint(g.Then.ID)
	said := interrupted(t, db, tx, "groups", "cancel", id, "--yes", "--json")
	require.Equal(t, map[string]any{"cancelled": 1001.0, "asked": 0.0, "stopped": true}, said)
	require.Contains(t, fine(t, db.URL, "actions"), "; interrupted")
	require.Equal(t, "700 jobs cancelled. 0 running jobs told to stop.\n", fine(t, db.URL, "groups", "cancel", id, "--yes"))
	require.Equal(t, codeNotFound, do(t, db.URL, "groups", "cancel", fmt.Sprint(g.Members[0].ID), "--yes").code)
}

// What the audit trail cannot take keeps the change from happening.
func TestMend_NothingWithoutItsLine(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 3)
	held := fmt.Sprint(hold(t, db, 1)[0])
	g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, []onceq.Job{mails.Job(mail{-2})}, mails.Job(mail{-1}))
	require.NoError(t, err)
	before := fine(t, db.URL, "jobs", "list", "--json")
	for _, why := range []string{strings.Repeat("x", 5000), "caf\xe9"} {
		for _, args := range [][]string{
			{"jobs", "discard", "--kind", "mail"}, {"jobs", "discard", "1"}, {"jobs", "redrive", "2", "3"}, {"groups", "cancel", fmt.Sprint(g.Then.ID)},
			{"effects", "resolve", "--effect", "charge", "--never"}, {"effects", "resolve", held, "charge", "--never"},
		} {
			a := do(t, db.URL, append(args, "--yes", "--why", why)...)
			require.Equal(t, codeUsage, a.code, "%v: %s", args, a.err)
		}
	}
	require.Equal(t, "The audit trail is empty.\n", fine(t, db.URL, "actions"))
	require.Equal(t, before, fine(t, db.URL, "jobs", "list", "--json"))
	fine(t, db.URL, "jobs", "discard", "--kind", "mail", "--yes")
	trail := fine(t, db.URL, "actions")
	require.Contains(t, trail, "begins") // it would be there if the process had been killed
	require.Contains(t, trail, "3 jobs discarded")
}

// Ctrl-c while there is no connection yet is no failure to connect.
func TestInterruptedWhileConnecting(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	c := command(t, "postgres://u@"+silent.Addr().String()+"/db?sslmode=disable", "queues")
	require.NoError(t, c.Start())
	conn, err := silent.Accept()
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, c.Process.Signal(os.Interrupt))
	_ = c.Wait()
	require.Equal(t, codeInterrupted, c.ProcessState.ExitCode())
}

// interrupted runs the command until it waits for a lock that tx has, presses ctrl-c, ends tx, and returns what the command says.
func interrupted(t *testing.T, db *queuetest.DB, tx pgx.Tx, args ...string) (said map[string]any) {
	t.Helper()
	c := command(t, db.URL, args...)
	var out bytes.Buffer
	c.Stdout = &out
	pipe, err := c.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	waitForLock(t, db)
	require.NoError(t, c.Process.Signal(os.Interrupt))
	// It says so, and waits for the statement.
	var errOut strings.Builder
	stderr := bufio.NewReader(pipe)
	for !strings.Contains(errOut.String(), "Stopping after the statement") {
		line, err := stderr.ReadString('\n')
		require.NoError(t, err, errOut.String())
		errOut.WriteString(line)
	}
	require.NoError(t, c.Process.Signal(syscall.Signal(0)))
	require.NoError(t, tx.Rollback(t.Context()))
	rest, err := io.ReadAll(stderr)
	require.NoError(t, err)
	errOut.Write(rest)
	_ = c.Wait()
	require.Equal(t, codeInterrupted, c.ProcessState.ExitCode(), errOut.String())
	require.Contains(t, errOut.String(), "run the same command again to go on")
	require.NoError(t, json.Unmarshal(out.Bytes(), &said))
	return said
}

func waitForLock(t *testing.T, db *queuetest.DB) {
	t.Helper()
	require.Eventually(t, func() bool {
		var waits bool
		require.NoError(t, db.Pool.QueryRow(t.Context(), `
select exists (select from pg_stat_activity where datname = current_database() and application_name = 'onceq' and wait_event_type = 'Lock')`).Scan(&waits))
		return waits
	}, 5*time.Minute, 20*time.Millisecond)
}

// A statement that takes too long ends, on the server too.
func TestTimeLimit(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 1)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from onceq.job_history for update`)
	require.NoError(t, err)
	for _, args := range [][]string{{"jobs", "discard", "1", "--yes"}, {"jobs", "discard", "--kind", "mail", "--yes"}} {
		a := do(t, db.URL, append(args, "--timeout", "10s")...)
		require.Equal(t, codeFailed, a.code, a.err)
		require.Contains(t, a.err, "took longer than --timeout 10s")
	}
	require.Eventually(t, func() bool {
		var left int
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from pg_stat_activity where datname = current_database() and application_name = 'onceq'`).Scan(&left))
		return left == 0
	}, 5*time.Minute, 20*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, "job 1: discarded\n", fine(t, db.URL, "jobs", "discard", "1", "--yes"))
}

// A role that lacks a right hears which command gives it.
func TestRoleWithoutRights(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	to, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	name := "powerless_" + to.Database
	_, err = db.Pool.Exec(t.Context(), `create role `+pgx.Identifier{name}.Sanitize()+` login password '`+to.Password+`'`)
	require.NoError(t, err)
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), db.URL)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		_, err = conn.Exec(context.Background(), `drop owned by `+pgx.Identifier{name}.Sanitize()+`; drop role `+pgx.Identifier{name}.Sanitize())
		require.NoError(t, err)
	})
	url := fmt.Sprintf("postgres://%s:%s@%s:%d/%s?sslmode=disable", name, to.Password, to.Host, to.Port, to.Database)
	a := do(t, url, "queues")
	require.Equal(t, codeFailed, a.code, a.err)
	require.Contains(t, a.err, "onceq migrate grants ROLE")
	require.Contains(t, do(t, url, "doctor").out, "onceq migrate grants ROLE")
	_, err = db.Pool.Exec(t.Context(), fine(t, "", "migrate", "grants", name))
	require.NoError(t, err)
	kill(t, db, 1)
	fine(t, url, "queues")
	fine(t, url, "jobs", "redrive", "1")
	require.Contains(t, fine(t, url, "actions"), "redrive")
	require.Contains(t, fine(t, url, "migrate", "status"), "applied")

	// Other roles' sessions count, and what they wait for is seen.
	var conns []*pgx.Conn
	for range 20 {
		conn, err := pgx.Connect(t.Context(), db.URL)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		conns = append(conns, conn)
	}
	used := regexp.MustCompile(`(\d+) of \d+ connections`).FindStringSubmatch(do(t, url, "doctor", "--all").out)
	require.Len(t, used, 2)
	n, err := strconv.Atoi(used[1])
	require.NoError(t, err)
	require.GreaterOrEqual(t, n, 20)
	_, err = conns[0].Exec(t.Context(), `begin; lock table onceq.actions`)
	require.NoError(t, err)
	waits := make(chan error, 1)
	began := time.Now()
	go func() {
		_, err := conns[1].Exec(t.Context(), `select pg_sleep(6); select count(*) from onceq.actions`)
		waits <- err
	}()
	require.Eventually(t, func() bool {
		var waiting bool
		err := db.Pool.QueryRow(t.Context(), `select exists (select from pg_locks where pid = $1 and not granted)`, conns[1].PgConn().PID()).Scan(&waiting)
		return err == nil && waiting
	}, 5*time.Minute, time.Millisecond)
	blocked := func() bool {
		return strings.Contains(do(t, url, "doctor").out, fmt.Sprintf("session %d of ", conns[1].PgConn().PID()))
	}
	if seen := blocked(); time.Since(began) < 10*time.Second {
		require.False(t, seen, "its statement has taken six seconds, and it has not waited so long")
	}
	require.Eventually(t, blocked, 5*time.Minute, 500*time.Millisecond)
	_, err = conns[0].Exec(t.Context(), `rollback`)
	require.NoError(t, err)
	require.NoError(t, <-waits)
}

func TestCompletions(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		require.Contains(t, fine(t, "", "completion", shell), "onceq")
	}
	require.Contains(t, fine(t, "", "__complete", "jobs", "list", "--state", "d"), "delayed\n")
	require.Contains(t, fine(t, "", "__complete", "jobs", ""), "redrive\t")
	require.Equal(t, ":4\n", fine(t, "postgres://127.0.0.1:1/nowhere?connect_timeout=1", "__complete", "jobs", "list", "--queue", ""), "without a database it offers nothing")
}

// Names come from the database, those that a terminal would obey are left out, and what one would type next is among them.
func TestCompletions_OfNames(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	ctx := t.Context()
	jobs := []onceq.Job{{Kind: "k", Payload: 1, Lane: "customer-7", Queue: "mail"}, {Kind: "k", Payload: 1, Lane: "customer-7", Queue: "mail"}, {Kind: "evil\x1b[2J", Payload: 1}}
	_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
	require.NoError(t, err)
	group, err := db.Queue.EnqueueGroup(ctx, db.Pool, []onceq.Job{{Kind: "k", Payload: 1}}, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "provider", onceq.Limit{AtOnce: 2}))
	_, err = db.Pool.Exec(ctx, `insert into onceq.queues (queue, rescanned_at) values ('billing', now())`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(ctx, `insert into onceq.schedules (name, owner, spec, zone, missed) values ('nightly', 'shop', '@daily', 'UTC', 'latest')`)
	require.NoError(t, err)
	for _, c := range []struct{ line, offers string }{
		{"jobs list --queue b", "billing"}, {"queues b", "billing"}, {"jobs move 1 --to b", "billing"}, {"jobs list --kind ", "k"},
		{"limits remove p", "provider"}, {"schedules fire n", "nightly"}, {"pause --limit ", "provider"}, {"lanes limit k", "k/customer-7"}, {"jobs show ", fmt.Sprint(group.Then.ID)},
		{"groups show ", fmt.Sprint(group.Then.ID)}, {"jobs cancel --group ", fmt.Sprint(group.Then.ID)},
	} {
		args := strings.Split(c.line, " ")
		out := fine(t, db.URL, append([]string{"__complete"}, args...)...)
		require.Contains(t, strings.Split(out, "\n"), c.offers, c.line)
		require.NotContains(t, out, "evil", c.line)
		require.True(t, strings.HasSuffix(out, ":4\n"), "no files: %q", out)
	}
}

// A name that nobody knows is doubted, with the one that may have been meant.
func TestNames_ThatNobodyKnows(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	_, err := db.Pool.Exec(t.Context(), `insert into onceq.queues (queue, rescanned_at) values ('images', now())`)
	require.NoError(t, err)
	kill(t, db, 1)
	require.Contains(t, do(t, db.URL, "jobs", "list", "--queue", "imagse").err, `No worker and no job has the queue "imagse"; there is "images"`)
	require.Contains(t, do(t, db.URL, "jobs", "list", "--queue", "unlike").err, "No worker and no job has the queue \"unlike\"\n")
	require.Contains(t, do(t, db.URL, "jobs", "cancel", "--kind", "mial", "--yes").err, `there is "mail"`)
	require.NotContains(t, do(t, db.URL, "jobs", "list", "--queue", "mail", "--kind", "mail").err, "No worker and no job")
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "mail", Payload: 1, Queue: "imgs"})
	require.NoError(t, err)
	moved := do(t, db.URL, "jobs", "move", "--queue", "imgs", "--to", "images", "--yes")
	require.Contains(t, moved.out, "1 job moved")
	require.NotContains(t, moved.err, "No worker and no job", "nobody has it any more because of this command")
	require.Empty(t, do(t, db.URL, "jobs", "list", "--queue", "imagse", "--json").err)
	for word, want := range map[string]string{
		"mail": `; there is "mail"`, "mails": `; there is "mail"`, "invoice": "", "billings": `; there is "billing"`, "bi": `; there is "billing"`,
	} {
		require.Equal(t, want, meant(word, []string{"billing", "mail", "two words"}), word)
	}
}

// proxy stands between the command and the server, and can take the server away.
type proxy struct {
	t      *testing.T
	target string
	addr   string

	mu    sync.Mutex
	l     net.Listener
	conns []net.Conn
}

func newProxy(t *testing.T, db *queuetest.DB) (p *proxy, url string) {
	t.Helper()
	to, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	p = &proxy{t: t, target: fmt.Sprintf("%s:%d", to.Host, to.Port), addr: "127.0.0.1:0"}
	p.up()
	t.Cleanup(p.down)
	_, port, err := net.SplitHostPort(p.addr)
	require.NoError(t, err)
	return p, fmt.Sprintf("postgres://%s:%s@127.0.0.1:%s/%s?sslmode=disable", to.User, to.Password, port, to.Database)
}

func (p *proxy) up() {
	l, err := net.Listen("tcp", p.addr)
	require.NoError(p.t, err)
	p.mu.Lock()
	p.l, p.addr = l, l.Addr().String()
	p.mu.Unlock()
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", p.target)
			if err != nil {
				_ = in.Close()
				continue
			}
			p.mu.Lock()
			if p.l != l { // down came in between
				_, _ = in.Close(), out.Close()
			}
			p.conns = append(p.conns, in, out)
			p.mu.Unlock()
			go func() { _, _ = io.Copy(out, in); _ = out.Close() }()
			go func() { _, _ = io.Copy(in, out); _ = in.Close() }()
		}
	}()
}

func (p *proxy) down() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.l != nil {
		_ = p.l.Close()
		p.l = nil
	}
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// top goes on when the database was away, and ctrl-c ends it well.
func TestTop_WithoutATerminal(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 2)
	p, url := newProxy(t, db)
	c := command(t, url, "top", "--json", "--every", "500ms")
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	lines := json.NewDecoder(out)
	until := func(is func(map[string]any) bool) {
		t.Helper()
		for {
			var line map[string]any
			require.NoError(t, lines.Decode(&line))
			if is(line) {
				return
			}
		}
	}
	fine := func(line map[string]any) bool { return line["queues"] != nil }
	until(fine)
	p.down()
	until(func(line map[string]any) bool { return line["error"] != nil })
	p.up()
	until(fine)
	require.NoError(t, c.Process.Signal(os.Interrupt))
	_, err = io.Copy(io.Discard, io.MultiReader(lines.Buffered(), out))
	require.NoError(t, err)
	require.NoError(t, c.Wait())
}

// A connection that is lost in the middle of a command.
func TestLostConnection(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 1)
	p, url := newProxy(t, db)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select from onceq.job_history for update`)
	require.NoError(t, err)
	c := command(t, url, "jobs", "discard", "1", "--yes")
	var errOut bytes.Buffer
	c.Stderr = &errOut
	require.NoError(t, c.Start())
	waitForLock(t, db)
	p.down()
	_ = c.Wait()
	require.Equal(t, codeUnreachable, c.ProcessState.ExitCode(), errOut.String())
	require.Contains(t, errOut.String(), "look first whether it happened")
	require.NoError(t, tx.Rollback(t.Context()))
}
