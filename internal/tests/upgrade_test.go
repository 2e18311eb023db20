package tests

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

const laterMigration = "migrations/testdata/002_later.sql" // in the repository

func repository(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	require.NoError(t, err)
	return dir
}

// Check says whether the tables or the code must be brought forward, or neither.
func TestUpgrade_CheckSaysWhichSideToMove(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, onceq.Kind[int]{Name: "k"}.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	require.NoError(t, err)
	for _, c := range []struct {
		version, oldest int
		say             string
	}{
		{onceq.SchemaVersion, onceq.SchemaVersion, ""},
		{onceq.SchemaVersion + 3, 1, ""},
		{onceq.SchemaVersion + 3, onceq.SchemaVersion, ""},
		{onceq.SchemaVersion + 3, onceq.SchemaVersion + 1, "deploy a newer onceq"},
		{-1, 1, "migrate the tables"},
	} {
		sqlRun(t, asOwner(t, db), fmt.Sprintf(`update meta set version = %d, oldest_code = %d`, c.version, c.oldest))
		err := db.Queue.Check(t.Context())
		drained := w.Drain(t.Context(), 0)
		if c.say == "" {
			require.NoError(t, err)
			require.NoError(t, drained)
			continue
		}
		require.ErrorContains(t, err, c.say)
		var schema *onceq.SchemaError
		require.ErrorAs(t, err, &schema)
		require.Equal(t, onceq.SchemaError{Schema: db.Schema, Found: c.version, Want: onceq.SchemaVersion, Oldest: c.oldest}, *schema)
		require.ErrorAs(t, drained, &schema)
	}
	sqlRun(t, asOwner(t, db), fmt.Sprintf(`update meta set version = %d, oldest_code = 1`, onceq.SchemaVersion))
}

// This code is the older one when the next migration runs: a part of this suite runs on tables with one more migration, which adds
// columns and a table. All of it does so in make matrix MODES=later.
func TestUpgrade_TheSuiteRunsOnLaterTables(t *testing.T) {
	if os.Getenv("ONCEQ_TEST_LATER") != "" {
		t.Skip("it does already")
	}
	t.Parallel()
	queuetest.New(t, queuetest.NoMigrations()) // the other process uses this one's server, if that is possible
	part := "TestConformance|TestLane_Order|TestLimit_Changes|TestGroup_RunsOnceWhenAllAreDone|TestAwait_TheAnswerStays|TestLater"
	if !testing.Short() {
		part += "|TestLane_.*|TestLimit_Rate"
	}
	cmd := exec.Command(os.Args[0], "-test.run=^("+part+")$/^(pool)?$", "-test.v", "-test.parallel=4", fmt.Sprint("-test.short=", testing.Short()))
	cmd.Env = append(os.Environ(), "ONCEQ_TEST_LATER="+filepath.Join(repository(t), laterMigration))
	out, err := cmd.CombinedOutput()
	said := regexp.MustCompile(`(?m)^.*(_test\.go:\d+: |--- FAIL: |panic: ).*(\n.*){0,8}`).FindAllString(string(out), -1)
	require.NoError(t, err, "%s", strings.Join(said, "\n…\n"))
	require.Contains(t, string(out), "--- PASS: TestLater")
	require.Contains(t, string(out), "--- PASS: TestConformance/pool")
}

// TestLater says whether the tables are later ones.
func TestLater(t *testing.T) {
	if os.Getenv("ONCEQ_TEST_LATER") == "" {
		t.Skip("only on later tables")
	}
	db := queuetest.New(t)
	var version int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select version from onceq.meta where exists (select later from onceq.jobs) is not null`).Scan(&version))
	require.Greater(t, version, onceq.SchemaVersion)
}

// A migration runs while the program of an earlier commit works, and then it and the present one work together. The commit is
// the one that last changed what the first migration does: its code is the oldest that these tables were made for.
func TestUpgrade_TheCodeOfBeforeWorksBesideThis(t *testing.T) {
	long(t, "builds two programs")
	t.Parallel()
	before, err := treeOfBefore(t)
	if err != nil {
		t.Skipf("no earlier code to run: %v", err)
	}
	older, present := build(t, before), build(t, repository(t))

	db := queuetest.New(t)
	ctx := t.Context()
	sqlRun(t, db, `create table effects (seq bigint generated always as identity, kind text, job bigint, who text, live bigint)`)
	require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, "pairs", "", 2))
	require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "provider", onceq.Limit{AtOnce: 2}))
	done := func(who string) {
		t.Helper()
		var from int64
		count := `select count(*) from (select from effects where who = $1 and seq > $2 group by kind having count(*) >= 20) k`
		require.NoError(t, db.Pool.QueryRow(ctx, `select coalesce(max(seq), 0) from effects`).Scan(&from))
		eventually(t, "20 more jobs of each kind done by the "+who+" program", func() bool {
			var kinds int
			require.NoError(t, db.Pool.QueryRow(ctx, count, who, from).Scan(&kinds))
			return kinds == 6
		})
	}
	stopOlder := startProgram(t, older, db.URL, "older")
	done("older")
	raw, err := os.ReadFile(filepath.Join(repository(t), laterMigration))
	require.NoError(t, err)
	up, _, _ := strings.Cut(string(raw), "---- create above")
	eventually(t, "a moment in which the tables are free", func() bool { // as docs/run/deploys.md has it
		_, err := db.Pool.Exec(ctx, "set local lock_timeout = '100ms';"+strings.ReplaceAll(up, "{{.schema}}", "onceq"))
		if err != nil {
			require.ErrorContains(t, err, "55P03")
		}
		return err == nil
	})
	done("older")
	stopPresent := startProgram(t, present, db.URL, "present")
	done("present")
	done("older")
	stopOlder()
	eventually(t, "the end of what the older program has left", func() bool {
		var left bool
		require.NoError(t, db.Pool.QueryRow(ctx, `select exists (select from onceq.job_waits w where id <= (select max(job) from effects where who = 'older'))`).Scan(&left))
		return !left
	})
	stopPresent()

	var twice, alone, pairs, limited int
	require.NoError(t, db.Pool.QueryRow(ctx, `
select (select count(*) from (select job from effects group by job having count(*) > 1) t),
       (select max(live) from effects where kind = 'ordered'), (select max(live) from effects where kind = 'pairs'),
       (select max(live) from effects where kind = 'limited')`).Scan(&twice, &alone, &pairs, &limited))
	require.Zero(t, twice, "effects that happened twice")
	require.LessOrEqual(t, alone, 1, "live jobs of a lane in the snapshot of a handler")
	require.LessOrEqual(t, pairs, 2)
	require.LessOrEqual(t, limited, 2, "live jobs of a limit")
}

// comment is a comment of a migration, and spaces what is left where it was.
var comment, spaces = regexp.MustCompile(`(?m)--.*$`), regexp.MustCompile(`\s+`)

// treeOfBefore puts the code of the earliest commit whose tables are the present ones into a directory. Comments do not count.
func treeOfBefore(t *testing.T) (dir string, err error) {
	const base = "migrations/001_onceq.sql"
	git := func(args ...string) ([]byte, error) {
		cmd := exec.Command("git", append([]string{"-C", repository(t)}, args...)...)
		out, err := cmd.Output()
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			err = fmt.Errorf("git %s: %s", args[0], bytes.TrimSpace(failed.Stderr))
		}
		return out, err
	}
	commits, err := git("log", "--format=%H", "--", base)
	if err != nil {
		return "", err
	}
	shallow, err := git("rev-parse", "--is-shallow-repository")
	if err != nil {
		return "", err
	}
	if strings.TrimSpace(string(shallow)) == "true" { // there git takes the last commit that it has for the one that changed everything
		return "", errors.New("this clone is shallow; fetch its history (git fetch --unshallow)")
	}
	now, err := os.ReadFile(filepath.Join(repository(t), base))
	if err != nil {
		return "", err
	}
	commands := func(text []byte) string {
		return spaces.ReplaceAllString(comment.ReplaceAllString(string(text), ""), " ")
	}
	id := ""
	for _, commit := range strings.Fields(string(commits)) { // the latest first
		then, err := git("show", commit+":"+base)
		if err != nil {
			return "", err
		}
		if commands(then) != commands(now) {
			break
		}
		id = commit
	}
	if id == "" {
		return "", errors.New("the first migration is changed here and not committed")
	}
	if _, err := git("diff", "--quiet", id, "--", "*.go", ":!*_test.go"); err == nil {
		return "", fmt.Errorf("commit %.9s made these tables, and its code is the present one", id)
	}
	t.Logf("the code of before is that of commit %.9s", id)
	archive, err := git("archive", id)
	if err != nil {
		return "", err
	}
	dir = t.TempDir()
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return dir, nil
		}
		if err != nil {
			return "", err
		}
		if !strings.HasSuffix(h.Name, ".go") && !strings.HasPrefix(h.Name, "go.") && !strings.HasSuffix(h.Name, ".sql") {
			continue
		}
		name := filepath.Join(dir, filepath.FromSlash(h.Name))
		content, err := io.ReadAll(r)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(name), 0o755)
		}
		if err == nil {
			err = os.WriteFile(name, content, 0o644)
		}
		if err != nil {
			return "", err
		}
	}
}

// build builds the program of testdata in a tree.
func build(t *testing.T, tree string) (exe string) {
	t.Helper()
	const program = "internal/tests/testdata/upgradeworker"
	source, err := os.ReadFile(filepath.Join(repository(t), program, "main.go"))
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(tree, program), 0o755))
	if tree != repository(t) {
		require.NoError(t, os.WriteFile(filepath.Join(tree, program, "main.go"), source, 0o644))
	}
	exe = filepath.Join(t.TempDir(), "upgradeworker.exe")
	cmd := exec.Command("go", "build", "-o", exe, "./"+program)
	cmd.Dir = tree
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return exe
}

// startProgram runs a program until stop, which it has to survive.
func startProgram(t *testing.T, exe, url, name string) (stop func()) {
	t.Helper()
	cmd := exec.Command(exe, url, name)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return func() {
		t.Helper()
		require.NoError(t, stdin.Close())
		require.NoError(t, cmd.Wait(), name)
	}
}
