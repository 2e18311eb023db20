package queuetest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Every statement and every call is a step and has its runs. This test lists all of them for a handler that sends
// statements in each possible way.
func TestProve_EveryStatementIsAStep(t *testing.T) {
	t.Parallel()
	proof := queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
				if _, err := tx.Exec(ctx, `update charges set charge = 'extended' where order_id = $1`, o.ID); err != nil {
					return err
				}
				if _, err := tx.Exec(ctx, `update charges set charge = 'simple' where order_id = $1`, pgx.QueryExecModeSimpleProtocol, o.ID); err != nil {
					return err
				}
				b := &pgx.Batch{}
				b.Queue(`delete from charges where order_id = 1`)
				b.Queue(`delete from charges where order_id = 2`)
				if err := tx.SendBatch(ctx, b).Close(); err != nil {
					return err
				}
				if _, err := tx.CopyFrom(ctx, pgx.Identifier{"charges"}, []string{"order_id"}, pgx.CopyFromRows([][]any{{o.ID}})); err != nil {
					return err
				}
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
					return true, post(ctx, p.Client, key)
				})
				return err
			})
		},
	}
	run := "" // all
	if testing.Short() {
		run = "none" // but the one without a fault, which knows them
	}
	proven, err := queuetest.ProveAll(t, queuetest.AtOwnSteps(proof), run) // TestProve_RunsOfTheExample is about onceq's own steps
	require.NoError(t, err)
	require.Empty(t, proven.Failures)
	require.Equal(t, []string{
		"onceq's claim",
		"the begin of the handler's transaction",
		"onceq's lock on the job",
		"`update charges set charge = 'extended' where …`",
		"`update charges set charge = 'simple' where …`",
		"`delete from charges where order_id = 1`",
		"`delete from charges where order_id = 2`",
		"`copy \"charges\" …`",
		`onceq's intent of effect "charge"`,
		`POST pay.example/charges in effect "charge"`,
		`onceq's outcome of effect "charge"`,
		"onceq's completion",
		"the commit of the handler's transaction",
	}, proven.Steps)
	want := map[string]string{
		"twice":         "ran twice in a row: the lease was lost when the first run began",
		"die-1-before":  "died before onceq's claim",
		"die-1-after":   "died after onceq's claim was committed, before its answer",
		"die-2-after":   "died after the begin of the handler's transaction, before onceq's lock on the job",
		"die-3-after":   "died after onceq's lock on the job, before `update charges set charge = 'extended' where …`",
		"die-4-after":   "died after `update charges set charge = 'extended' where …`, before commit",
		"die-6-after":   "died after `delete from charges where order_id = 1`, before `delete from charges where order_id = 2`",
		"die-8-before":  "died before `copy \"charges\" …`",
		"die-8-after":   "died after `copy \"charges\" …`, before commit",
		"die-9-after":   `died after onceq's intent of effect "charge" was committed, before its answer`,
		"die-10-after":  `died after POST pay.example/charges in effect "charge" was made, before its answer`,
		"cut-10-before": `lost its connection before POST pay.example/charges in effect "charge"`,
		"cut-10-after":  `lost the answer to POST pay.example/charges in effect "charge"`,
		"die-12-after":  "died after onceq's completion, before the commit of the handler's transaction",
		"die-13-after":  "died after the commit of the handler's transaction, before its answer",
		"cut-13-after":  "lost its connection after the commit of the handler's transaction, before its answer",
		"die-5-before":  "died before `update charges set charge = 'simple' where …`",
		"freeze-2":      "froze before the begin of the handler's transaction (sent with `update charges set charge = 'extended' where …`) until its lease had run out and a second worker had taken the job; then went on",
		"meet-9":        `two workers at the same time, both before onceq's intent of effect "charge"`,
		"freeze-12":     "froze before onceq's completion until its lease had run out and a second worker had taken the job; then went on",
		"cut-2-before":  "lost its connection before the begin of the handler's transaction (sent with `update charges set charge = 'extended' where …`)",
		"refuse-10":     `got 503 for POST pay.example/charges in effect "charge", which was not done`,
		"stop-1":        "its worker was shut down when the handler began",
		"stop-4":        "its worker was shut down after `update charges set charge = 'extended' where …`",
		"stop-10":       `its worker was shut down after POST pay.example/charges in effect "charge"`,
	}
	for name, words := range want {
		got, ok := proven.Faults[name]
		require.True(t, ok, name)
		require.Equal(t, words, got, name)
	}
	// The process dies after each of the 13 steps, and before each of the 9 that come first in what is sent at once. The
	// other faults happen after the handler has begun: at 12 and 8 of the steps. The worker is shut down when the handler
	// begins, and after each answer that the handler gets.
	count := make(map[string]int)
	for name := range proven.Faults {
		kind, _, _ := strings.Cut(name, "-")
		count[kind]++
	}
	require.Equal(t, map[string]int{"twice": 1, "fail": 1, "refuse": 1, "die": 13 + 9, "cut": 12 + 8, "freeze": 8, "meet": 8, "stop": 8}, count)
}

// A death is real. Even if the handler ignores it and goes on, the server has everything from before the point where
// the process died, and nothing from after it.
func TestProve_TheDeadReachNothing(t *testing.T) {
	t.Parallel()
	const (
		statements = 3
		insert     = `insert into trail_`
		worker     = ` select current_setting('application_name')`
	)
	var mu sync.Mutex
	rows, effects := make(map[string]int), make(map[string]int) // by what went wrong
	proof := queuetest.Proof{
		Setup: queuetest.SQL(`create table trail (worker text); create table trail_0 () inherits (trail);
			create table trail_1 () inherits (trail); create table trail_2 () inherits (trail);
			create table trail_3 () inherits (trail); create table trail_4 () inherits (trail)`),
		Job: provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.Handle(func(context.Context, *onceq.Lease, provedOrder) error {
				ctx := context.Background() // it ignores its context
				for n := range statements {
					_, _ = p.Pool.Exec(ctx, insert+strconv.Itoa(n)+worker)
					_ = p.Effect(ctx, fmt.Sprintf("call %d", n), "")
				}
				b := &pgx.Batch{} // one message to the server, two transactions
				for _, s := range []string{"begin", insert + "3" + worker, "commit", insert + "4" + worker} {
					b.Queue(s)
				}
				_ = p.Pool.SendBatch(ctx, b).Close()
				return nil
			})
		},
		Check: func(o *queuetest.Outcome) {
			mu.Lock()
			defer mu.Unlock()
			rows[o.Fault] = o.Count(`select count(*) from trail where worker = 'prove 1'`)
			effects[o.Fault] = len(o.Effects)
		},
	}
	_, err := queuetest.ProveAll(t, queuetest.Deaths(proof), "")
	require.NoError(t, err)
	want := make(map[string][2]int) // rows of the dead process, and effects; the second worker made three
	words := func(n int) string { return "`" + insert + strconv.Itoa(n) + " select current_setting …`" }
	for n := range statements {
		call := fmt.Sprintf("call %d", n)
		want["died before "+words(n)] = [2]int{n, 3 + n}
		want["died after "+words(n)+" was committed, before its answer"] = [2]int{n + 1, 3 + n}
		want["died before "+call] = [2]int{n + 1, 3 + n}
		want["died after "+call+" was made, before its answer"] = [2]int{n + 1, 3 + n + 1}
	}
	want["died before `begin`"] = [2]int{3, 6}
	want["died after `begin`, before "+words(3)] = [2]int{3, 6}
	want["died after "+words(3)+", before `commit`"] = [2]int{3, 6}
	want["died after `commit`, before "+words(4)] = [2]int{4, 6}
	want["died after "+words(4)+" was committed, before its answer"] = [2]int{5, 6}
	for words, want := range want {
		got, ok := rows[words]
		require.True(t, ok, words)
		require.Equal(t, want, [2]int{got, effects[words]}, words)
	}
}

// The same holds if a handler's first statements open its transaction and are sent together with it. Sequences show what
// the server did, because a rollback does not undo them. Jobs with a key and jobs without one end in different ways.
func TestProve_TheDeadInTheHandlersTransaction(t *testing.T) {
	t.Parallel()
	unkeyed := onceq.Kind[provedOrder]{Name: "unkeyed"}
	for _, kind := range []onceq.Kind[provedOrder]{provedCharge, unkeyed} {
		t.Run(kind.Name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			ran := make(map[string][4]int) // how often each statement ran, by what went wrong
			lost := make(map[string]int)   // how often the job had lost a worker, by what went wrong
			proof := queuetest.Proof{
				Setup: queuetest.SQL(provedTable + `; create sequence s0 minvalue 0; create sequence s1 minvalue 0; create sequence s2 minvalue 0`),
				Job:   func() onceq.Job { return kind.Job(provedOrder{ID: 7}) },
				Handler: func(*queuetest.Process) onceq.Handler {
					return kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
						b := &pgx.Batch{}
						b.Queue(`select 0 from nextval('s0')`)
						b.Queue(`select 1 from nextval('s1')`)
						if err := tx.SendBatch(ctx, b).Close(); err != nil {
							return err
						}
						_, err := tx.Exec(ctx, `insert into charges select $1, $2 from nextval('s2')`, o.ID, strconv.Itoa(l.Lost))
						return err
					})
				},
				Check: func(o *queuetest.Outcome) {
					n := [4]int{3: o.Count(`select count(*) from charges`)}
					for i := range 3 {
						n[i] = o.Count(fmt.Sprintf(`select last_value + is_called::int from s%d`, i))
					}
					mu.Lock()
					defer mu.Unlock()
					ran[o.Fault], lost[o.Fault] = n, o.Count(`select charge::int from charges`)
				},
			}
			want := map[string][4]int{ // how often the statements, and the insert that counts, ran
				"none":         {1, 1, 1, 1},
				"die-2-before": {1, 1, 1, 1},
				"die-2-after":  {1, 1, 1, 1},
				"die-3-after":  {1, 1, 1, 1},
				"die-4-after":  {2, 1, 1, 1},
				"die-5-after":  {2, 2, 1, 1},
				"die-6-before": {2, 2, 1, 1},
				"die-6-after":  {2, 2, 2, 1},
				"die-7-before": {2, 2, 2, 1},
				"die-8-after":  {1, 1, 1, 1},
				"cut-4-after":  {2, 1, 1, 1},
				"cut-6-after":  {2, 2, 2, 1},
				"freeze-2":     {1, 1, 1, 1},
				"freeze-6":     {2, 2, 1, 1},
				"twice":        {1, 1, 1, 1},
			}
			names := append(slices.Collect(maps.Keys(want)), "die-1-before", "die-1-after")
			proven, err := queuetest.ProveAll(t, queuetest.Named(proof, names), "")
			require.NoError(t, err)
			require.Empty(t, proven.Failures)
			require.Equal(t, []string{
				"the begin of the handler's transaction", "onceq's lock on the job",
				"`select 0 from nextval …`", "`select 1 from nextval …`", "`insert into charges select $1, $2 from nextval …`",
				"onceq's completion", "the commit of the handler's transaction",
			}, proven.Steps[1:])
			for name, want := range want {
				words, ok := proven.Runs[name]
				require.True(t, ok, name)
				require.Equal(t, want, ran[words], name)
			}
			// A transaction of onceq's own was carried out whole or not at all.
			require.Zero(t, lost[proven.Runs["die-1-before"]])
			require.Equal(t, 1, lost[proven.Runs["die-1-after"]])
		})
	}
}

// The data of a copy belongs to the copy's step. pgx sends it before the server asks for it. Here the server asks late,
// like one that first waits for a lock.
func TestProve_ACopyThatTheServerBeginsLate(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	rows := make(map[string]int)
	proof := queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
				conn, err := pgx.ConnectConfig(ctx, lateCopies(p.Pool.Config().ConnConfig))
				if err != nil {
					return err
				}
				_, err = conn.CopyFrom(ctx, pgx.Identifier{"charges"}, []string{"order_id"}, pgx.CopyFromRows([][]any{{o.ID}, {o.ID}}))
				return errors.Join(err, conn.Close(context.Background()))
			})
		},
		Check: func(o *queuetest.Outcome) {
			mu.Lock()
			defer mu.Unlock()
			rows[o.Fault] = o.Count(`select count(*) from charges`)
		},
	}
	proven, err := queuetest.ProveAll(t, queuetest.AtOwnSteps(proof), "")
	require.NoError(t, err)
	require.Empty(t, proven.Failures)
	for name, want := range map[string]int{
		"none": 2, "die-2-before": 2, "die-2-after": 4, "cut-2-before": 2, "cut-2-after": 4, "freeze-2": 4, "meet-2": 4, "twice": 4,
	} {
		words, ok := proven.Runs[name]
		require.True(t, ok, name)
		require.Equal(t, want, rows[words], name)
	}
}

// lateCopies delays, on one connection of a process, the server's request for the data of a copy until all of it is
// sent.
func lateCopies(config *pgx.ConnConfig) *pgx.ConnConfig {
	sent := make(chan struct{})
	dial, connect := config.DialFunc, config.AfterNetConnect
	config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return &serverSide{Conn: conn, sent: sent, closed: make(chan struct{})}, err
	}
	config.AfterNetConnect = func(ctx context.Context, c *pgconn.Config, conn net.Conn) (net.Conn, error) {
		conn, err := connect(ctx, c, conn)
		return &clientSide{Conn: conn, sent: sent}, err
	}
	return config
}

type clientSide struct {
	net.Conn
	sent chan struct{} // closed when the end of the copy is sent
}

func (c *clientSide) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if bytes.HasSuffix(b, []byte{'c', 0, 0, 0, 4}) { // CopyDone
		close(c.sent)
	}
	return n, err
}

type serverSide struct {
	net.Conn
	once         sync.Once
	sent, closed chan struct{}
}

func (s *serverSide) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	if n > 0 && b[0] == 'G' { // CopyInResponse
		select {
		case <-s.sent:
		case <-s.closed:
		}
	}
	return n, err
}

func (s *serverSide) Close() error {
	s.once.Do(func() { close(s.closed) })
	return s.Conn.Close()
}

// Nothing that the handler sends after the copy's data reaches the server either.
func TestProve_BehindACopysData(t *testing.T) {
	t.Parallel()
	start := wireMessages(t, &pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersion30, Parameters: map[string]string{"user": "ada"}})
	statement := wireMessages(t, &pgproto3.Query{String: "copy t from stdin"})
	data := wireMessages(t, &pgproto3.CopyData{Data: []byte("1\n")}, &pgproto3.CopyData{Data: []byte("2\n")})
	commit := wireMessages(t, &pgproto3.Query{String: "commit"})
	for _, end := range [][]byte{wireMessages(t, &pgproto3.CopyDone{}), wireMessages(t, &pgproto3.CopyFail{Message: "no"})} {
		server := wireMessages(t, &pgproto3.CopyInResponse{}, &pgproto3.CommandComplete{CommandTag: []byte("COPY 2")}, &pgproto3.ReadyForQuery{TxStatus: 'T'})
		got := queuetest.Wire(slices.Concat(start, statement, data, end, commit), server, []byte{255}, 1, true)
		require.ErrorContains(t, got.Err, "the connection is lost")
		require.Equal(t, string(slices.Concat(start, statement, data, end)), string(got.Client))
	}
	got := queuetest.Wire(slices.Concat(start, statement, commit, data), nil, []byte{255}, 1, true)
	require.Equal(t, string(slices.Concat(start, statement)), string(got.Client))
}

// pgx closes a connection by reading what is left, while its own reader may still wait for an answer. The race detector
// sees the two in one buffer; without it, bytes are lost or come twice.
func TestProve_TwoReadersOfOneConnection(t *testing.T) {
	t.Parallel()
	server, client := net.Pipe()
	wire := queuetest.WireOver(client)
	const messages = 3000
	notice := []byte{'N', 0, 0, 0, 5, 0}
	go func() {
		defer func() { _ = server.Close() }()
		for range messages {
			if _, err := server.Write(notice); err != nil {
				return
			}
		}
	}()
	got := make([]int64, 2)
	var readers sync.WaitGroup
	for i := range got {
		readers.Go(func() { got[i], _ = io.Copy(io.Discard, wire) })
	}
	readers.Wait()
	require.EqualValues(t, messages*len(notice), got[0]+got[1])
}

// A run can be repeated by its name.
func TestProve_Replay(t *testing.T) {
	handler := func(p *queuetest.Process) onceq.Handler {
		return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
			return post(ctx, p.Client, "")
		})
	}
	proof := queuetest.Proof{Job: provedJob, Handler: handler}
	t.Setenv(queuetest.EnvProve, "die-2-after")
	s := &spy{TB: t}
	queuetest.Prove(s, proof)
	require.Len(t, s.errors, 1)
	require.Contains(t, s.errors[0], "died after POST pay.example/charges was made, before its answer")
	logs := strings.Join(s.logs, "\n")
	require.Contains(t, logs, "run die-2-after")
	require.NotContains(t, logs, "run die-1-after")

	t.Setenv(queuetest.EnvProve, "die-99-after")
	s = &spy{TB: t}
	queuetest.Prove(s, proof)
	require.Equal(t, []string{"fatal: queuetest: Prove: ONCEQ_PROVE=die-99-after is not a run of this proof"}, s.errors)
}

// A key with a time that changes once a second is found, although a run takes less than a second: the deliveries around
// the first lost answer of each call fall into different seconds.
func TestProve_TwoSecondsOfTheClock(t *testing.T) {
	t.Parallel()
	proof := queuetest.Proof{Job: provedJob, Handler: func(p *queuetest.Process) onceq.Handler {
		return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
			return post(ctx, p.Client, fmt.Sprintf("charge-%d", time.Now().Unix()))
		})
	}}
	proven, err := queuetest.ProveAll(t, proof, "cut-2-after")
	require.NoError(t, err)
	require.Len(t, proven.Failures, 1)
	require.Contains(t, proven.Failures[0], "mistake: the idempotency key contains a timestamp")
}

// The example of the documentation has as many runs as the documentation says.
func TestProve_RunsOfTheExample(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: all faults of an example")
	}
	t.Parallel()
	proof := queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
					return true, post(ctx, p.Client, key)
				})
				if err != nil {
					return err
				}
				_, err = tx.Exec(ctx, `insert into charges (order_id) values ($1)`, o.ID)
				return err
			})
		},
	}
	s := &spy{TB: t}
	queuetest.Prove(s, queuetest.AllFaults(proof))
	require.Empty(t, s.errors)
	text, err := os.ReadFile("../docs/use/prove.md")
	require.NoError(t, err)
	said, _, _ := strings.Cut(s.logs[0], " in ")
	require.Contains(t, string(text), said)
}

// With -short a few places of each kind are left, at the handler's own steps, and they show the mistake. The log says
// that others were left out.
func TestProve_ASample(t *testing.T) {
	t.Parallel()
	proof := queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
				for range 5 {
					if _, err := tx.Exec(ctx, `select 1`); err != nil {
						return err
					}
				}
				if err := post(ctx, p.Client, ""); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, `insert into charges (order_id) values ($1)`, o.ID)
				return err
			})
		},
	}
	proven, err := queuetest.ProveAll(t, proof, "none")
	require.NoError(t, err)
	require.Greater(t, len(proven.Faults), 60)
	require.LessOrEqual(t, len(proven.Sample), 28)
	kinds := func(name string) string { return strings.TrimRight(name, "0123456789") }
	left := make(map[string]bool)
	for _, name := range proven.Sample {
		require.NotContains(t, proven.Faults[name], "onceq's completion")
		left[kinds(strings.NewReplacer("-after", "", "-before", "").Replace(name))] = true
	}
	for _, kind := range []string{"twice", "die-", "cut-", "fail-", "refuse-", "freeze-", "meet-", "stop-"} {
		require.Contains(t, left, kind)
	}
	s := &spy{TB: t}
	queuetest.Prove(s, queuetest.Sampled(proof))
	require.Contains(t, strings.Join(s.errors, "\n"), "POST pay.example/charges again: it happened twice, without faults once")
	require.Contains(t, s.logs[len(s.logs)-1], fmt.Sprintf("-short: a sample of %d of %d runs with a fault", len(proven.Sample), len(proven.Faults)))
}

// A proof leaves no goroutine and no session behind.
func TestProve_LeavesNothingBehind(t *testing.T) {
	db := queuetest.New(t)
	before := runtime.NumGoroutine()
	proof := queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
				_, err := tx.Exec(ctx, `insert into charges (order_id) values ($1)`, o.ID)
				return err
			})
		},
	}
	proven, err := queuetest.ProveAll(t, queuetest.AtOwnSteps(proof), "")
	require.NoError(t, err)
	require.Empty(t, proven.Failures)
	require.Zero(t, scan[int](t, db.Pool, `select count(*) from pg_stat_activity where application_name like 'prove%'`))
	for deadline := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
		}
	}
}

// A proof says what it cannot do.
func TestProve_BadProofs(t *testing.T) {
	t.Parallel()
	ok := func(*queuetest.Process) onceq.Handler {
		return provedCharge.Handle(func(context.Context, *onceq.Lease, provedOrder) error { return nil })
	}
	again := func(*queuetest.Process) onceq.Handler {
		return provedCharge.Handle(func(context.Context, *onceq.Lease, provedOrder) error { return onceq.Snooze(time.Hour) })
	}
	failing := func(*queuetest.Process) onceq.Handler {
		return provedCharge.Handle(func(context.Context, *onceq.Lease, provedOrder) error {
			return onceq.RetryAfter(time.Minute, fmt.Errorf("never"))
		})
	}
	other := onceq.Kind[provedOrder]{Name: "other"}
	wrong := func(*queuetest.Process) onceq.Handler {
		return provedCharge.Handle(func(context.Context, *onceq.Lease, provedOrder) error { return fmt.Errorf("no such thing") })
	}
	fatal := func(*queuetest.Process) onceq.Handler {
		return provedCharge.Handle(func(context.Context, *onceq.Lease, provedOrder) error { return onceq.Fatal(fmt.Errorf("declined")) })
	}
	proven, err := queuetest.ProveAll(t, queuetest.Proof{Handler: fatal, Job: provedJob}, "none")
	require.NoError(t, err, "what is meant to be dead may be")
	require.Empty(t, proven.Failures)
	for name, c := range map[string]struct {
		proof queuetest.Proof
		want  string
	}{
		"another kind": {queuetest.Proof{Handler: ok, Job: func() onceq.Job { return other.Job(provedOrder{ID: 7}) }}, `the handler got no job: is it for the kind "other", in the queue "default"?`},
		"never well": {queuetest.Proof{Handler: wrong, Job: func() onceq.Job {
			job := provedJob()
			job.MaxAttempts = 2
			return job
		}}, "without any fault: the job failed in all of its 2 attempts: no such thing"},
		"no handler": {queuetest.Proof{Job: provedJob}, "Proof needs one of Handler and Handlers"},
		"no job":     {queuetest.Proof{Handler: ok}, "Proof needs one of Job and Jobs"},
		"no jobs":    {queuetest.Proof{Handler: ok, Jobs: func() []onceq.Job { return nil }}, "Proof.Jobs returned no job"},
		"an ended handler": {queuetest.Proof{Job: provedJob, Handler: func(*queuetest.Process) onceq.Handler {
			runtime.Goexit()
			return onceq.Handler{}
		}}, "without any fault: the job was not finished: a function of the Proof ended its goroutine"},
		"an ended job": {queuetest.Proof{Handler: ok, Job: func() func() onceq.Job {
			var made atomic.Int32
			return func() onceq.Job {
				if made.Add(1) == 2 {
					runtime.Goexit()
				}
				return provedJob()
			}
		}()}, "without any fault: a function of the Proof ended its goroutine"},
		"bad set-up":  {queuetest.Proof{Handler: ok, Job: provedJob, Setup: queuetest.SQL("nonsense")}, "setting up: "},
		"bad check":   {queuetest.Proof{Handler: ok, Job: provedJob, Check: func(o *queuetest.Outcome) { o.Errorf("not so") }}, "without any fault: not so"},
		"ever again":  {queuetest.Proof{Handler: again, Job: provedJob}, "without any fault: the job was not finished: not finished after 100 deliveries; the last one ended with: "},
		"never ready": {queuetest.Proof{Handler: failing, Job: provedJob}, "without any fault: the job failed in all of its 25 attempts: never"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := queuetest.ProveAll(t, c.proof, "")
			require.ErrorContains(t, err, c.want)
		})
	}
}

// A Setup that ends its goroutine, as require does, leaves no database behind.
func TestProve_ASetupThatEnds(t *testing.T) {
	db := queuetest.New(t)
	databases := func() int {
		return scan[int](t, db.Pool, `select count(*) from pg_database where strpos(datname, $1) > 0`, queuetest.Tag(t))
	}
	before := databases()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = queuetest.ProveAll(t, queuetest.Proof{
			Setup:   func(context.Context, *pgxpool.Pool) error { runtime.Goexit(); return nil },
			Job:     provedJob,
			Handler: func(*queuetest.Process) onceq.Handler { return onceq.Handler{} },
		}, "")
	}()
	<-done
	require.Equal(t, before, databases())
}

// Prove cannot prove a handler that does something else each time, and says so.
func TestProve_AnotherWayEachTime(t *testing.T) {
	if testing.Short() {
		t.Skip("make check runs it: one of many proofs")
	}
	t.Parallel()
	proof := func(when func(run int) bool) queuetest.Proof {
		var mu sync.Mutex
		runs := 0
		return queuetest.Proof{
			Job: provedJob,
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					mu.Lock()
					runs++
					now := when(runs)
					mu.Unlock()
					if !now {
						return nil
					}
					_, err := p.Pool.Exec(ctx, `select 1`)
					return err
				})
			},
		}
	}
	// Steps that only the first run has, such as fetching a token that is then kept, are not a mistake.
	s := &spy{TB: t}
	queuetest.Prove(s, queuetest.AtOwnSteps(proof(func(run int) bool { return run == 1 })))
	require.Empty(t, s.errors)
	require.Contains(t, s.logs[0], "7 steps were not reached again, as in some run without faults")

	// Steps that all runs without faults have, and that a run with a fault lacks, are a mistake.
	others := proof(func(run int) bool { return run != 2 })
	proven, err := queuetest.ProveAll(t, others, "die-2-before")
	require.NoError(t, err)
	require.Contains(t, strings.Join(proven.Failures, "\n"), "died before `select 1`; the handler did not reach this step again")
}

// wireMessages returns messages as bytes.
func wireMessages(t testing.TB, messages ...interface{ Encode([]byte) ([]byte, error) }) (b []byte) {
	for _, m := range messages {
		var err error
		b, err = m.Encode(b)
		require.NoError(t, err)
	}
	return b
}

// Whatever a client and a server send, in pieces of any size, each gets what the other one sent, byte for byte, up to
// the last complete message or to the cut.
func FuzzProve_Wire(f *testing.F) {
	start := wireMessages(f, &pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersion30, Parameters: map[string]string{"user": "ada"}})
	fence := [][]byte{[]byte("1"), []byte("0"), []byte("2"), []byte("3"), []byte("s"), []byte("1/charge"), nil}
	client := append(start, wireMessages(f,
		&pgproto3.Query{String: "begin"}, &pgproto3.Query{String: "-- ping"},
		&pgproto3.Parse{Name: "s", Query: "insert into onceq.job_fences (class, scope, key, state, job_id, token, holder, leased_until)"},
		&pgproto3.Describe{ObjectType: 'S', Name: "s"}, &pgproto3.Sync{},
		&pgproto3.Bind{PreparedStatement: "s", Parameters: fence}, &pgproto3.Execute{},
		&pgproto3.Parse{Query: "select $1"}, &pgproto3.Bind{Parameters: [][]byte{nil}}, &pgproto3.Execute{},
		&pgproto3.Close{ObjectType: 'P'}, &pgproto3.Flush{}, &pgproto3.Sync{},
		&pgproto3.Query{String: "copy t from stdin"}, &pgproto3.CopyData{Data: []byte("1\n")}, &pgproto3.CopyDone{},
		&pgproto3.Query{String: "commit"}, &pgproto3.Terminate{})...)
	server := wireMessages(f,
		&pgproto3.AuthenticationOk{}, &pgproto3.ReadyForQuery{TxStatus: 'I'}, &pgproto3.CommandComplete{CommandTag: []byte("BEGIN")},
		&pgproto3.ReadyForQuery{TxStatus: 'T'}, &pgproto3.EmptyQueryResponse{}, &pgproto3.ReadyForQuery{TxStatus: 'T'},
		&pgproto3.ParseComplete{}, &pgproto3.BindComplete{}, &pgproto3.DataRow{Values: [][]byte{nil, []byte("x")}}, &pgproto3.PortalSuspended{},
		&pgproto3.ErrorResponse{Code: "40001"}, &pgproto3.ReadyForQuery{TxStatus: 'E'}, &pgproto3.CopyInResponse{},
		&pgproto3.CommandComplete{CommandTag: []byte("COPY 1")}, &pgproto3.ReadyForQuery{TxStatus: 'I'})
	for at := range 8 {
		f.Add(client, server, []byte{255}, byte(at), true)
		f.Add(client, server, []byte{0, 3, 17}, byte(at), false)
	}
	f.Add(start[:3], []byte{'Z'}, []byte{}, byte(0), false)
	f.Add([]byte{0, 0, 0, 0}, []byte{'Z', 0, 0, 0, 4}, []byte{}, byte(0), false)
	f.Add(append(start, 'Q', 0, 0, 0, 3, 0), []byte{'C', 0, 0, 0, 0, 'Z', 255, 255, 255, 255}, []byte{1}, byte(0), false)
	f.Add(append(start, 'B', 0, 0, 0, 6, 0, 0), []byte{'Z', 0, 0, 0, 5}, []byte{}, byte(1), true)
	f.Fuzz(func(t *testing.T, client, server, pieces []byte, at byte, after bool) {
		got := queuetest.Wire(client, server, pieces, 0, false)
		require.True(t, bytes.HasPrefix(client, got.Client))
		require.True(t, bytes.HasPrefix(server, got.Server))
		require.Error(t, got.Err) // the end of the input
		if errors.Is(got.Err, io.EOF) {
			require.Equal(t, string(client), string(got.Client)+string(got.Rest))
			require.Equal(t, got, queuetest.Wire(client, server, []byte{255}, 0, false), "the pieces are of no interest")
		}
		if at == 0 || len(got.Steps) == 0 {
			return
		}
		cut := queuetest.Wire(client, server, pieces, int(at), after)
		flush := []byte{'H', 0, 0, 0, 4}
		require.True(t, bytes.HasPrefix(client, cut.Client) || bytes.HasPrefix(client, bytes.TrimSuffix(cut.Client, flush)))
		require.LessOrEqual(t, len(cut.Server), len(got.Server))
		require.LessOrEqual(t, len(cut.Steps), len(got.Steps))
	})
}
