package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/executor"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/internal/listing"
	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/reap"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/task"
)

// A server in FIPS mode refuses md5.
func TestStatements_WorkInFIPSMode(t *testing.T) {
	t.Parallel()
	for _, files := range []string{"migrations/*.sql", "internal/tests/testdata/*.sql", "onceqcron/*.go", "onceqweb/*.go", "cmd/onceq/*.go"} {
		names, err := filepath.Glob(files)
		require.NoError(t, err)
		require.NotEmpty(t, names, files)
		for _, name := range names {
			text, err := os.ReadFile(name)
			require.NoError(t, err)
			require.NotContains(t, strings.ToLower(string(text)), "md5", name)
		}
	}
}

// What outlasts the shutdown does not end with it at once, and does not go on until its own time is up.
func TestOutlast(t *testing.T) {
	t.Parallel()
	run, shutDown := context.WithCancel(t.Context())
	ctx, cancel := pg.Outlast(run, time.Hour)
	defer cancel()
	shutDown()
	select {
	case <-ctx.Done():
		t.Fatal("it ended with the run")
	case <-time.After(50 * time.Millisecond):
	}
	select {
	case <-ctx.Done():
	case <-time.After(5 * time.Minute):
		t.Fatal("it goes on")
	}

	ctx, cancel = pg.Outlast(context.Background(), time.Millisecond)
	defer cancel()
	<-ctx.Done()
	require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
}

// What the jobs of a call share is checked once, and what is made for them shares memory. Each job must come out as if it
// were alone.
func TestEncodeMany_EachJobComesOutAsIfItWereAlone(t *testing.T) {
	t.Parallel()
	base := Job{Kind: "k", Payload: map[string]int{"n": 1}}
	keyed := base
	keyed.Key = "a"
	changes := []func(*Job){
		func(*Job) {},
		func(j *Job) { j.Kind = "other" },
		func(j *Job) { j.Queue = "q" },
		func(j *Job) {
			if j.Key != "" {
				j.Window = Forever
			}
		},
		func(j *Job) { j.RunAt = time.Unix(1, 0) },
		func(j *Job) { j.Delay = time.Second },
		func(j *Job) { j.Priority = PriorityLow },
		func(j *Job) { j.MaxAttempts = 3 },
		func(j *Job) { j.Metadata = map[string]string{"a": "b"} },
		func(j *Job) { j.Metadata = map[string]string{"a": "c"} },
		func(j *Job) { j.Payload = []byte("bytes") },
		func(j *Job) { j.Payload = json.RawMessage(" { \"b\" : 1.0, \"a\": [1e2, 2] }\n") },
		func(j *Job) { j.Payload = json.RawMessage(nil) },
		func(j *Job) { j.Payload = strings.Repeat("long", 20_000) },
		func(j *Job) { j.Payload = "<&>\n" },
		func(j *Job) { j.Fields = []string{"n"} },
		func(j *Job) { j.IgnorePayload = true },
		func(j *Job) { j.keyed = true; j.Key = "b" },
	}
	var jobs []Job
	for _, from := range []Job{base, keyed} {
		for _, change := range changes {
			for _, scope := range []string{"", "s"} {
				j := from
				if change(&j); j.Key != "" {
					j.Scope = scope
					j.Key = fmt.Sprint(j.Key, 1000-len(jobs)) // not in order
				}
				jobs = append(jobs, j, j)
				if j.Key != "" {
					jobs[len(jobs)-1].Key += "again"
				}
			}
		}
	}
	all, sorted, withKeys, err := encodeMany(jobs)
	require.NoError(t, err)
	require.True(t, withKeys)
	for i := range jobs {
		alone, err := jobs[i].encode()
		require.NoError(t, err)
		require.Equal(t, alone, all[i], "%d: %+v", i, jobs[i])
	}
	require.Len(t, sorted, len(jobs))
	for k := range sorted[1:] {
		a, b := all[sorted[k]], all[sorted[k+1]]
		require.LessOrEqual(t, a.Header.Scope, b.Header.Scope)
		if a.Header.Scope == b.Header.Scope && b.Key != "" {
			require.Less(t, a.Key, b.Key)
		}
	}

	jobs = append(jobs, keyed, keyed)
	_, _, _, err = encodeMany(jobs)
	var bad *InvalidError
	require.ErrorAs(t, err, &bad)
	require.Equal(t, fmt.Sprintf("jobs[%d].Key", len(jobs)-1), bad.Field)
	require.ErrorContains(t, err, fmt.Sprintf("jobs[%d]", len(jobs)-2))
}

var update = flag.Bool("update", false, "write internal/tests/testdata/statements.sql anew")

// built has the statements that are not constants, each under the name of what builds it.
var built = map[string]string{
	"CallLater":               stmt.CallLater,
	"LookForCalls":            stmt.LookForCalls,
	"AnyCalls":                stmt.AnyCalls,
	"CallOfBatch":             stmt.CallOfBatch,
	"RetryJobs":               stmt.RetryJobs,
	"ReadJob":                 stmt.ReadJob,
	"refsFrom":                stmt.ReadRefs,
	"refsFrom apart":          stmt.RefsApart,
	"plainOf":                 stmt.PlainApart,
	"keyedOf":                 stmt.JobApart,
	"enqueueOneFrom":          stmt.EnqueueOne,
	"enqueueOneFrom drawn":    stmt.EnqueueOneDrawn,
	"enqueueJobsFrom":         stmt.EnqueueJobs,
	"enqueueJobsFrom drawn":   stmt.EnqueueDrawn,
	"ForgetMembers":           reap.ForgetMembers,
	"FindIdle":                reap.FindIdle,
	"ReadGroups":              stmt.ReadGroups,
	"LimitsUnset":             stmt.LimitsUnset,
	"laneLimit":               "select " + table.LimitOf("$1::text"),
	"NoteOrphans":             reap.NoteOrphans,
	"RemoveHistory":           reap.RemoveHistory,
	"RemoveAwaits":            reap.RemoveAwaits,
	"CheckTx":                 stmt.CheckTx,
	"InTx completeOne":        stmt.InTx[stmt.CompleteOne],
	"InTx completeOneUnkeyed": stmt.InTx[stmt.CompleteOneUnkeyed],
	"hears":                   "listen …",
	"listenForAll":            "listen …",
	"committed":               "rollback; select pg_xact_status('…')",
	"share":                   "set local idle_in_transaction_session_timeout to …",
}

// Every statement that this package sends stands whole in internal/tests/testdata/statements.sql, as Postgres gets it. A changed statement
// shows there. A statement that runs for every job changes only together with a measurement.
//
//	go test -run TestStatements . -update
func TestStatements(t *testing.T) {
	listing.Compare(t, ".", []string{"internal/table", "internal/pg", "internal/reap", "internal/stmt", "internal/enqueue", "internal/fence", "internal/paused", "internal/citus", "internal/claimer", "internal/promoter", "internal/hold", "internal/slot", "internal/finish", "internal/count", "internal/executor", "internal/presence", ".", "internal/lazytx"}, built, "internal/tests/testdata/statements.sql", *update)
}

// Statements that are written whole, and the migration, use the same numbers as state.go.
func TestStates_SQLHasTheNumbersOfGo(t *testing.T) {
	migration, err := os.ReadFile("migrations/001_onceq.sql")
	require.NoError(t, err)
	taken := func(scope, key, id string) string {
		return fmt.Sprintf("select %d, %s, %s, %d, %s, %s << %d, ", classJob, scope, key, table.FenceQueued, id, id, table.TokenBits)
	}
	for _, c := range []struct{ where, text, want string }{
		{"insertKeyed", stmt.InsertKeyed, taken("$6::text", "$7::text", "n.id")},
		{"insertKeyedMany", stmt.InsertKeyedMany, taken("(select scope from header)", "i.key", "i.id")},
		{"take_fence", string(migration), taken("take_fence.scope", "take_fence.key", "n.id")},
		{"take_fence", string(migration), fmt.Sprintf("token = taken << %d, state = %d,", table.TokenBits, table.FenceQueued)},
		{"take_fence", string(migration), fmt.Sprintf("where f.class = %d and f.scope = take_fence.scope", classJob)},
		{"take_fence", string(migration), "and (" + table.FenceOver + " and f.lifetime >= 0"},
		{"ids", string(migration), fmt.Sprintf("maxvalue %d;", int64(1)<<(63-table.TokenBits)-1)},
		{"claimJobs", stmt.ClaimJobs, fmt.Sprintf("claims = least(j.claims + 1, %d)", table.ClaimsLimit)},
		{"claimAny", stmt.ClaimAny, fmt.Sprintf("claims = least(j.claims + 1, %d)", table.ClaimsLimit)},
		{"completeOne", stmt.CompleteOne, "where " + stmt.HeldByOne},
		{"completeOne", stmt.CompleteOne, fmt.Sprintf("set state = %d,", table.FenceCompleted)},
		{"completeOne", stmt.CompleteOne, stmt.FenceOfGone},
		{"completeOneUnkeyed", stmt.CompleteOneUnkeyed, "where " + stmt.HeldByOne},
		{"completeJobs", stmt.CompleteJobs, "where " + stmt.HeldByEach},
		{"completeJobs", stmt.CompleteJobs, fmt.Sprintf("set state = %d, token = %s,", table.FenceCompleted, table.TokenOfGone)},
		{"completeJobs", stmt.CompleteJobs, stmt.FenceOfGone},
		{"completeJobs", stmt.CompleteJobs, "array_agg(" + table.TokenOfRow + ")"},
		{"jobState", table.JobState, fmt.Sprintf("statement_timestamp() then %d\n", StateRunning)},
		{"jobState", table.JobState, fmt.Sprintf("is not null then %d\n", StateRetrying)},
		{"jobState", table.JobState, fmt.Sprintf("statement_timestamp() then %d\n            else %d end", StateDelayed, StateWaiting)},
	} {
		require.Contains(t, c.text, c.want, c.where)
	}
	for of, want := range map[table.State]State{table.StateWaiting: StateWaiting, table.StateCompleted: StateCompleted, table.StateDead: StateDead, table.StateCancelled: StateCancelled, table.StateHeld: StateHeld} {
		require.Equal(t, want, State(of))
	}
}

// Every number beside a shift or a class, in any statement, is one that state.go has.
func TestStates_NoOtherNumbers(t *testing.T) {
	for _, file := range []string{"internal/tests/testdata/statements.sql", "internal/tests/testdata/onceqops.sql", "migrations/001_onceq.sql"} {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		shifts := regexp.MustCompile(`(?:<<|>>) (\d+)`).FindAllStringSubmatch(strings.NewReplacer("holder >> 32", "", "w.id >> 32", "").Replace(string(raw)), -1) // the worker's half of a holder
		classes := regexp.MustCompile(`\bclass(?: \+ 0)? (?:=|<>) (\d+)`).FindAllStringSubmatch(string(raw), -1)
		require.NotEmpty(t, shifts)
		require.NotEmpty(t, classes)
		for _, m := range shifts {
			require.Equal(t, strconv.Itoa(table.TokenBits), m[1], "%s: %s", file, m[0])
		}
		for _, m := range classes {
			n, err := strconv.Atoi(m[1])
			require.NoError(t, err)
			require.Contains(t, []Class{classJob, ClassRequest, classEffect, classEvent}, Class(n), "%s: %s", file, m[0])
		}
	}
	for n, s := range []string{table.Queued, table.Claimed, table.Uncertain, table.Completed, table.Dead, table.Cancelled, table.Held} {
		require.Equal(t, strconv.Itoa(n), s)
	}
	for n, s := range []string{table.AwaitOpen, table.AwaitCame, table.AwaitTimedOut} {
		require.Equal(t, strconv.Itoa(n), s)
	}
	require.Equal(t, strconv.Itoa(table.TokenBits), table.TokenBitsSQL)
}

// These measure what a job costs in this process, without the database. Compare with benchstat. lab/bench measures the
// whole.
//
//	go test -run - -bench . -count 10

type benchPayload struct {
	UserID int      `json:"user_id"`
	Email  string   `json:"email"`
	Tags   []string `json:"tags"`
}

var (
	benchOf    = benchPayload{42, "ada@example.com", []string{"new", "trial"}}
	benchPlain = Kind[benchPayload]{Name: "bench"}
	benchKeyed = Kind[benchPayload]{Name: "bench", Key: func(p benchPayload) string { return fmt.Sprintf("welcome:%d", p.UserID) }}
)

// deadDB refuses every statement that it is given.
type deadDB struct{}

var errDeadDB = errors.New("no database")

func (deadDB) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errDeadDB
}
func (deadDB) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, errDeadDB }

// benchQueue never connects: its pool opens connections only when somebody needs one.
func benchQueue(b testing.TB) *Queue {
	pool, err := pgxpool.New(b.Context(), "postgres://nobody@127.0.0.1:1/none")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	q, err := New(pool, nil)
	if err != nil {
		b.Fatal(err)
	}
	q.quarantine = new(quarantine.Turn)
	return q
}

func BenchmarkEncode(b *testing.B) {
	for _, c := range []struct {
		name string
		kind Kind[benchPayload]
	}{{"plain", benchPlain}, {"keyed", benchKeyed}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				job := c.kind.Job(benchOf)
				if _, err := job.encode(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkCanonical(b *testing.B) {
	raw, err := json.Marshal(map[string]any{"z": benchOf, "a": []float64{1.5, 2e10, -3}, "text": "naïve \"quotes\"\n"})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := jsonb.Scan(raw, true, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// Everything that EnqueueMany does before it sends its statement, for 1,000 jobs.
func BenchmarkEnqueueMany(b *testing.B) {
	q := benchQueue(b)
	for _, c := range []struct {
		name string
		kind Kind[benchPayload]
	}{{"plain", benchPlain}, {"keyed", benchKeyed}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				jobs := make([]Job, 1000)
				for i := range jobs {
					p := benchOf
					p.UserID = i
					jobs[i] = c.kind.Job(p)
				}
				if _, err := q.EnqueueMany(b.Context(), deadDB{}, jobs); !errors.Is(err, errDeadDB) {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/job")
		})
	}
}

func benchLeases(q *Queue, n int) []*Lease {
	payload, _ := json.Marshal(benchOf)
	leases := make([]*Lease, n)
	for i := range leases {
		leases[i] = benchLease(q, int64(i+1))
		leases[i].Payload = payload
	}
	return leases
}

func benchLease(q *Queue, id int64) *Lease {
	token := id<<table.TokenBits | 1
	l := &Lease{ID: id, Token: token, Kind: "bench", Queue: DefaultQueue, Attempt: 1, MaxAttempts: 25, origin: origin{q: q},
		hold: hold.Hold{ID: id, Token: token, Claims: 1, Holder: 7, Kind: "bench", Queue: DefaultQueue}}
	l.hold.Lease = l
	return l
}

// countingFace writes nothing.
type countingFace struct {
	*face
	done chan int
}

func (f *countingFace) Finish(_ context.Context, _ pg.DB, _ pg.Way, outcomes []finish.Outcome) (stale []*hold.Hold, left []finish.Outcome, err error) {
	f.done <- len(outcomes)
	return nil, nil, nil
}

// Everything between the claim of 1,000 jobs and their outcomes: handing out, decoding, running and collecting.
func BenchmarkDispatch(b *testing.B) {
	q := benchQueue(b)
	w, err := NewWorker(q, WorkerConfig{}, benchPlain.Handle(func(context.Context, *Lease, benchPayload) error { return nil }))
	if err != nil {
		b.Fatal(err)
	}
	r := newRun(b.Context(), w, new(pg.Conns), true)
	written := &countingFace{face: r.face, done: make(chan int, 1000)}
	cfg := r.exec.Config
	cfg.Face = written
	x := executor.New(b.Context(), cfg, r.exec.Set.Config)
	for _, s := range x.Slots() {
		s.Signal = func() {}
	}
	x.Start()

	leases := leased(benchLeases(q, 1000))
	b.ReportAllocs()
	for b.Loop() {
		claims{x, r.face}.Accept(DefaultQueue, leases, time.Now())
		for left := len(leases); left > 0; {
			left -= <-written.done
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(leases)), "ns/job")
}

// Everything that writing 1,000 completions takes before the statement is sent.
func BenchmarkFinish(b *testing.B) {
	q := benchQueue(b)
	leases := benchLeases(q, 1000)
	outcomes := make([]finish.Outcome, len(leases))
	b.ReportAllocs()
	for b.Loop() {
		for i, l := range leases {
			outcomes[i] = finish.Outcome{Hold: &l.hold, State: table.StateCompleted}
		}
		if _, _, err := q.finish(b.Context(), deadDB{}, pg.Hot, outcomes); !errors.Is(err, errDeadDB) {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(leases)), "ns/job")
}

// A claim asks what is paused if that was not asked lately.
func TestPauses_ComeAlongWithAClaimNowAndThen(t *testing.T) {
	t.Parallel()
	p := paused.New()
	require.Equal(t, stmt.ReadPauses, p.Along().Statement)
	p.Take(time.Now().Add(time.Hour), nil, nil) // the process may stand still
	require.Nil(t, p.Along())
	p.Take(time.Now().Add(-paused.Fresh), nil, nil)
	require.NotNil(t, p.Along())
}

// A loop that stands still is a reason to restart the process. When the worker shuts down, it has ended, and
// handlers may take long.
func TestAlive_TheLoop(t *testing.T) {
	t.Parallel()
	r := &run{exec: &executor.Executor{Set: new(task.Set)}, claimer: &claimer.Claimer{}}
	w := &Worker{}
	w.now.Store(r)
	require.NoError(t, w.Alive(), "it has not begun, or drains")
	soon, past := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	r.claimer.Next.Store(&soon)
	require.NoError(t, w.Alive())
	r.claimer.Next.Store(&past)
	require.ErrorContains(t, w.Alive(), "stands still")
	r.exec.Stop()
	require.NoError(t, w.Alive())
}

// A job that says nothing of its time-out pays nothing for those that do.
func TestOwnTimeout(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 0, "90000ms": 90 * time.Second, "none": NoTimeout, "5 minutes": 0, "-1s": 0} {
		require.Equal(t, want, ownTimeout(text), text)
	}
	require.Zero(t, testing.AllocsPerRun(100, func() { ownTimeout("") }))
}
