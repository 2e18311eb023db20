package sql

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// found gives what a script has installed, or skips the test.
func found(t *testing.T, variable string, script ...string) string {
	t.Helper()
	if path := os.Getenv(variable); path != "" {
		return path
	}
	out, err := exec.Command("../../scripts/"+script[0], script[1:]...).Output()
	path := strings.TrimSpace(string(out))
	if err != nil || path == "" {
		t.Skipf("%s found nothing; make modules installs it", script[0])
	}
	return path
}

// commands gives what starts the program of each language.
func commands(t *testing.T) map[string][]string {
	t.Helper()
	packages := found(t, "ONCEQ_TEST_NODE", "node-packages.sh")
	dir := t.TempDir() // Node looks for packages beside the program
	require.NoError(t, os.Symlink(filepath.Join(packages, "node_modules"), filepath.Join(dir, "node_modules")))
	source, err := os.ReadFile("node/orders.mjs")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "orders.mjs"), source, 0o600))
	return map[string][]string{
		"node":   {filepath.Join(packages, "bin", "node"), filepath.Join(dir, "orders.mjs")},
		"python": {found(t, "ONCEQ_TEST_PYTHON", "psycopg2.sh"), "python/orders.py"},
	}
}

// answer is what a producer was told about an order.
type answer struct {
	order int
	job   int64
	fresh bool
}

// take runs a program for the orders from first to last, and kills it after so many (0: never).
func take(t *testing.T, db *queuetest.DB, command []string, first, last, kill int) (told []answer) {
	cmd := exec.Command(command[0], append(slices.Clone(command[1:]), strconv.Itoa(first), strconv.Itoa(last))...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+db.URL)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Error(err)
		return nil
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var a answer
		var how string
		if _, err := fmt.Sscan(lines.Text(), &a.order, &a.job, &how); err != nil {
			t.Errorf("%q: %v", lines.Text(), err)
		}
		a.fresh = how == "new"
		if told = append(told, a); len(told) == kill {
			_ = cmd.Process.Kill()
		}
	}
	if err := cmd.Wait(); err != nil && kill == 0 {
		t.Errorf("%s: %v\n%s", command, err, &said)
	}
	return told
}

// takeHere is the same in Go.
func takeHere(t *testing.T, db *queuetest.DB, first, last int) (told []answer) {
	for order := first; order <= last; order++ {
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `insert into orders values ($1) on conflict do nothing`, order); err != nil {
				return err
			}
			r, err := db.Queue.Enqueue(t.Context(), tx, Charge.Job(Order{order, order * 10}))
			told = append(told, answer{order, r.ID, !r.Duplicate})
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	return told
}

// Three processes of each language and three goroutines take orders, each order two of different languages, while workers work and two
// processes of each language are killed and started again. Each order is charged once, and everybody names the same job.
func TestThreeLanguages_OneKey(t *testing.T) {
	t.Parallel()
	commands := commands(t)
	db := queuetest.New(t, queuetest.Schema("onceq"), queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	ctx := t.Context()
	_, err := db.Pool.Exec(ctx, `create table orders (id int primary key); create table charges (order_id int, amount int)`)
	require.NoError(t, err)
	worker, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, Charge.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, o Order) error {
		_, err := tx.Exec(ctx, `insert into charges values ($1, $2)`, o.Order, o.Amount)
		return err
	}))
	require.NoError(t, err)
	working, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(working) }()

	const producers, block = 9, 40 // producer n takes the blocks n and n+1, and so each block has two producers
	var mu sync.Mutex
	var all sync.WaitGroup
	jobs, fresh, met := map[int]int64{}, map[int]bool{}, 0
	note := func(told []answer) {
		mu.Lock()
		defer mu.Unlock()
		for _, a := range told {
			if was, ok := jobs[a.order]; ok && was != a.job {
				t.Errorf("order %d has the jobs %d and %d", a.order, was, a.job)
			}
			if jobs[a.order] = a.job; !a.fresh {
				met++
			} else if fresh[a.order] {
				t.Errorf("two producers were told that they have enqueued order %d", a.order)
			} else {
				fresh[a.order] = true
			}
		}
	}
	for n := range producers {
		language := []string{"node", "python", "go"}[n%3]
		for _, b := range []int{n, (n + 1) % producers} {
			first, last := b*block+1, (b+1)*block
			all.Go(func() {
				if language == "go" {
					note(takeHere(t, db, first, last))
					return
				}
				if n < 6 && b == n {
					note(take(t, db, commands[language], first, last, block/2))
				}
				note(take(t, db, commands[language], first, last, 0))
			})
		}
	}
	all.Wait()
	require.Len(t, jobs, producers*block)
	require.GreaterOrEqual(t, met, len(jobs), "half of what they enqueue are duplicates")
	count := func(sql string) (n int) {
		require.NoError(t, db.Pool.QueryRow(ctx, sql).Scan(&n))
		return n
	}
	for count(`select count(*) from charges`) < len(jobs) {
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	require.NoError(t, <-ended)
	require.Zero(t, count(`select count(*) from (select from charges group by order_id having count(*) > 1 or min(amount) <> order_id * 10) c`), "charged twice, or another amount")
	require.Zero(t, count(`select count(*) from orders o full join onceq.job_fences f on f.key = 'order ' || o.id where o.id is null or f.key is null`), "an order without its job, or a job without its order")
	require.NoError(t, db.Check())
}

// A program that knows nothing of the library computes the fingerprints of the page.
func TestFingerprints(t *testing.T) {
	t.Parallel()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 on this machine")
	}
	vectors, err := os.ReadFile("../../docs/use/fingerprints.json")
	require.NoError(t, err)
	for _, one := range []struct {
		from, to string
		differs  bool
	}{{"", "", false}, {`"fingerprint":"0110f7`, `"fingerprint":"0110f8`, true}} {
		cmd := exec.Command(python, "python/fingerprints.py")
		cmd.Stdin = bytes.NewReader(bytes.Replace(vectors, []byte(one.from), []byte(one.to), 1))
		out, err := cmd.CombinedOutput()
		require.Equal(t, one.differs, err != nil, string(out))
	}
}

// psql enqueues from a file, and errors are those of the page.
func TestPsql(t *testing.T) {
	t.Parallel()
	psql := filepath.Join(os.Getenv("ONCEQ_TEST_PGBIN"), "psql")
	if _, err := os.Stat(psql); err != nil {
		if psql, err = exec.LookPath("psql"); err != nil {
			t.Skip("no psql on this machine")
		}
	}
	db := queuetest.New(t, queuetest.Schema("onceq"), queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	run := func(sql string) (string, error) {
		cmd := exec.Command(psql, "--no-psqlrc", "--quiet", "-At", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", "-d", db.URL)
		cmd.Stdin = strings.NewReader(sql)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	first, err := db.Queue.Enqueue(t.Context(), db.Pool, Charge.Job(Order{7, 70}))
	require.NoError(t, err)
	out, err := run(`begin;
select id, duplicate, state from onceq.enqueue('charge', '{"amount": 7e1, "order": 7}', 'order 7');
select duplicate from onceq.enqueue_many('[{"kind": "charge", "key": "order 8", "payload": {"order": 8, "amount": 80}}, {"kind": "charge", "key": "order 7", "payload": {"order": 7, "amount": 70}}]');
commit;`)
	require.NoError(t, err, out)
	require.Equal(t, strconv.FormatInt(first.ID, 10)+"|t|waiting\nf\nt\n", out)
	out, err = run(`select onceq.enqueue('charge', '{"order": 7, "amount": 71}', 'order 7');`)
	require.Error(t, err)
	require.Contains(t, out, "OQ011")
	require.Contains(t, out, "Members that differ: amount")
	again, err := db.Queue.Enqueue(t.Context(), db.Pool, Charge.Job(Order{8, 80}))
	require.NoError(t, err)
	require.True(t, again.Duplicate)
	charged := 0
	db.Drain(Charge.Handle(func(_ context.Context, _ *onceq.Lease, o Order) error { charged += o.Amount; return nil }))
	require.Equal(t, 150, charged)
}
