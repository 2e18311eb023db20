package imports

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/moving/internal/old"
	"github.com/onceq/onceq/queuetest"
)

var quiet = slog.New(slog.DiscardHandler)

// command builds the command onceq once.
var command = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "onceq-command-")
	if err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "onceq")
	build := exec.Command("go", "build", "-o", bin, ".")
	build.Dir = "../../../cmd/onceq"
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return bin, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if bin, err := command(); err == nil {
		_ = os.RemoveAll(filepath.Dir(bin))
	}
	os.Exit(code)
}

// imported is what the command prints.
type imported struct {
	Kinds []struct {
		Kind         string
		Takes, Stays int
	}
	Moved, Duplicates int
}

func (i imported) String() string { return fmt.Sprint(i.Kinds, " ", i.Moved, " ", i.Duplicates) }

// run runs onceq import with arguments, and returns its answer, or what it says on standard error.
func run(t *testing.T, db *queuetest.DB, args ...string) (answer imported, failed string) {
	t.Helper()
	bin, err := command()
	require.NoError(t, err)
	cmd := exec.Command(bin, append([]string{"--json", "import"}, args...)...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+db.URL)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if cmd.Run() != nil {
		return imported{}, errOut.String()
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &answer), "%s%s", &out, &errOut)
	return answer, ""
}

// jobs are those of onceq in the order of their ids.
func jobs(t *testing.T, db *queuetest.DB) (all []string) {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `
select concat_ws(' ', kind, queue, state, coalesce(payload ->> 'user_id', payload ->> 'month'), key, priority, max_attempts) from onceq.v_jobs order by id`)
	require.NoError(t, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// The jobs that wait leave with their keys, times, priorities and attempts. The one that runs stays, and another run finds nothing.
func TestImport_FromNode(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		stay         int
		failed, left string
	}{
		"pg-boss":  {1, "welcome default delayed 5 welcome:5 0 5", `select count(*) from pgboss.job where name in ('welcome', 'report')`},
		"graphile": {2, "welcome default waiting 5 welcome:5 0 5", `select count(*) from graphile_worker._private_jobs`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: quiet}))
			old.Node(t, "backlog.mjs", []string{name}, []string{"DATABASE_URL=" + db.URL}).Rest()

			seen, _ := run(t, db, name, "--dry-run")
			require.Equal(t, fmt.Sprintf("[{report 1 0} {welcome 4 %d}] 0 0", want.stay), seen.String())
			require.Empty(t, jobs(t, db))

			moved, failed := run(t, db, name, "--yes")
			require.Empty(t, failed)
			require.Equal(t, fmt.Sprintf("[{welcome 0 %d}] 5 0", want.stay), moved.String())
			all := jobs(t, db)
			require.Subset(t, all, []string{
				want.failed, "welcome default waiting 2 welcome:2 0 6", "welcome default delayed 3 welcome:3 0 6", "welcome default waiting 4 welcome:4 -1 6",
			})
			require.Len(t, all, 5)
			var left int
			require.NoError(t, db.Pool.QueryRow(t.Context(), want.left).Scan(&left))
			require.Equal(t, want.stay, left)
			again, failed := run(t, db, name, "--yes")
			require.Empty(t, failed)
			require.Equal(t, fmt.Sprintf("[{welcome 0 %d}] 0 0", want.stay), again.String())
		})
	}
}

type welcome struct {
	UserID int `json:"user_id" river:"unique"`
}

func (welcome) Kind() string { return "welcome" }

// withRiver gives a database in which River has jobs for these users.
func withRiver(t *testing.T, users ...int) *queuetest.DB {
	t.Helper()
	ctx := t.Context()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: quiet}))
	migrator, err := rivermigrate.New(riverpgxv5.New(db.Pool), &rivermigrate.Config{Logger: quiet})
	require.NoError(t, err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
	client, err := river.NewClient(riverpgxv5.New(db.Pool), &river.Config{Logger: quiet})
	require.NoError(t, err)
	for _, user := range users {
		_, err := client.Insert(ctx, welcome{user}, &river.InsertOpts{Queue: "mail", MaxAttempts: 6, Priority: 1 + user%2})
		require.NoError(t, err)
	}
	return db
}

// With --key the jobs get the keys of the new producers. Work that is in both queues is there once, and other work under
// a key changes nothing.
func TestImport_FromRiver(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := withRiver(t, 1, 2, 3, 3)
	_, err := db.Pool.Exec(ctx, `update river_job set state = 'running' where args ->> 'user_id' = '1'`)
	require.NoError(t, err)
	_, err = db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "welcome", Key: "welcome:2", Payload: welcome{2}})
	require.NoError(t, err)

	keyed := []string{"river", "--kind", "welcome", "--key", "welcome:{user_id}", "--yes"}
	moved, failed := run(t, db, keyed...)
	require.Empty(t, failed)
	require.Equal(t, "[{welcome 0 1}] 3 2", moved.String()) // user 2 was there, and user 3 came twice
	var imported []string
	require.NoError(t, db.Pool.QueryRow(ctx, `select array_agg(metadata ->> 'imported') filter (where metadata is not null) from onceq.v_jobs`).Scan(&imported))
	require.Equal(t, []string{"River job 3"}, imported)
	require.Equal(t, []string{"welcome default waiting 2 welcome:2 0 25", "welcome mail waiting 3 welcome:3 1 6"}, jobs(t, db))

	_, err = db.Pool.Exec(ctx, `update river_job set state = 'available', args = '{"user_id": 3, "version": 2}'`)
	require.NoError(t, err)
	_, failed = run(t, db, keyed...)
	require.Contains(t, failed, "welcome:3")
	_, failed = run(t, db, "river", "--kind", "welcome", "--key", "welcome:{user}", "--yes")
	require.Contains(t, failed, `--key names \"user\"`)
	var left int
	require.NoError(t, db.Pool.QueryRow(ctx, `select count(*) from river_job`).Scan(&left))
	require.Equal(t, 1, left)
	require.Len(t, jobs(t, db), 2)
	_, err = db.Pool.Exec(ctx, `update river_job set args = jsonb_build_object('text', repeat('x', 2000000)) where state = 'available'`)
	require.NoError(t, err)
	_, failed = run(t, db, "river", "--yes")
	require.Regexp(t, `River job \d+ cannot be a job of onceq: onceq: jobs.0..Payload`, failed)
	_, failed = run(t, db, "river", "--from-schema", "nowhere", "--yes")
	require.Contains(t, failed, "--from-schema")
	_, failed = run(t, db, "river", "--key", "welcome:{user_id}", "--yes")
	require.Contains(t, failed, "--kind")
	for _, key := range []string{"welcome", "welcome:{user_id", "welcome:{}", "{a}}"} {
		_, failed = run(t, db, "river", "--kind", "welcome", "--key", key, "--yes")
		require.Contains(t, failed, "in braces", key)
	}
}

// A backlog of more than one step keeps its order.
func TestImport_KeepsTheOrder(t *testing.T) {
	t.Parallel()
	db := withRiver(t, 1)
	_, err := db.Pool.Exec(t.Context(), `
insert into river_job (args, kind, max_attempts) select jsonb_build_object('user_id', n), 'welcome', 25 from generate_series(2, 2500) n`)
	require.NoError(t, err)
	moved, failed := run(t, db, "river", "--yes")
	require.Empty(t, failed)
	require.Equal(t, 2500, moved.Moved)
	var ordered bool
	require.NoError(t, db.Pool.QueryRow(t.Context(), `
select bool_and(n = (payload ->> 'user_id')::int) and count(*) = 2500 from (select payload, row_number() over (order by id) as n from onceq.v_jobs) j`).Scan(&ordered))
	require.True(t, ordered)
}

// Tasks leave Redis with their ids as keys. One that an interrupted run has enqueued and not deleted is there once. The queue is not left paused.
func TestImport_FromAsynq(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	to := asynq.RedisClientOpt{Network: "unix", Addr: old.Redis(t)}
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: quiet}))
	client, inspector := asynq.NewClient(to), asynq.NewInspector(to)
	t.Cleanup(func() { require.NoError(t, client.Close()); require.NoError(t, inspector.Close()) })
	for user := range 4 {
		payload := fmt.Appendf(nil, `{"user_id": %d}`, user+1)
		options := []asynq.Option{asynq.Queue("mail"), asynq.TaskID(fmt.Sprintf("welcome:%d", user+1)), asynq.MaxRetry(5)}
		if user == 2 {
			options = append(options, asynq.ProcessIn(time.Hour))
		}
		_, err := client.EnqueueContext(ctx, asynq.NewTask("welcome", payload), options...)
		require.NoError(t, err)
	}
	require.NoError(t, inspector.ArchiveTask("mail", "welcome:4"))
	_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "welcome", Key: "welcome:1", Payload: welcome{1}})
	require.NoError(t, err)

	args := []string{"asynq", "--redis", "redis-socket://" + to.Addr}
	seen, failed := run(t, db, append(args, "--dry-run")...)
	require.Empty(t, failed)
	require.Equal(t, "[{welcome 3 1}] 0 0", seen.String())
	require.Len(t, jobs(t, db), 1)
	moved, failed := run(t, db, append(args, "--yes")...)
	require.Empty(t, failed)
	require.Equal(t, "[{welcome 0 1}] 3 1", moved.String())
	require.Equal(t, []string{
		"welcome default waiting 1 welcome:1 0 25", "welcome mail waiting 2 welcome:2 0 6", "welcome mail delayed 3 welcome:3 0 6",
	}, jobs(t, db))
	info, err := inspector.GetQueueInfo("mail")
	require.NoError(t, err)
	require.False(t, info.Paused)
	require.Equal(t, []int{0, 0, 1}, []int{info.Pending, info.Scheduled, info.Archived})
}
