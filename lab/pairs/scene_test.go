package pairs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// scene is a database with a job, a key, a lane, a limit, a group and an event in each state that calls meet on. Every
// pair begins with the same rows: they are kept in a second schema, and copied back.
type scene struct {
	db      *queuetest.DB
	q       *onceq.Queue
	ops     *onceqops.Ops
	owner   *pgxpool.Pool
	restore string
	jobs    map[string]int64 // by what they are
	was     map[string]*onceq.Lease
	claimed *onceq.FenceLease
}

// These are the names of the jobs of a scene. Each has its name as its key, and all but the waiting ones as its kind.
const (
	plain    = "leased"           // nothing but leased
	lined    = "leased in a lane" // it has the lane and the limit, and is a member of the group
	doubtful = "doubtful"         // leased, and an effect of it is uncertain
	ready    = "ready"            // due
	next     = "next"             // waits for its lane
	follower = "follower"         // waits for the member
	waits    = "waits"            // for the event
	dead     = "dead"             // in the history
	held     = "held"             // in the history, its effect uncertain
	expired  = "expired"          // its lease is over
	past     = "past"             // finished; its key is free
)

const (
	lane    = "a"
	limit   = "limit"
	effect  = "effect"
	scope   = "scope" // of fences and events
	week    = 7 * 24 * time.Hour
	paused  = "paused" // a queue
	awaited = "awaited"
	known   = "known" // an event that was emitted
)

func named(name string) onceq.Job {
	return onceq.Job{Kind: name, Key: name, Window: onceq.UntilFinished}
}

func inLane(name string) onceq.Job {
	j := named(name)
	j.Lane, j.LaneFamily, j.Limit = lane, "lanes", limit
	return j
}

func newScene(t *testing.T) *scene {
	t.Helper()
	ctx := t.Context()
	db := queuetest.New(t, queuetest.NoCheck(), queuetest.Schema("onceq"), queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	s := &scene{db: db, q: db.Queue, ops: onceqops.New(db.Queue), owner: conformance.Owner(t, db)}
	s.jobs, s.was = make(map[string]int64), make(map[string]*onceq.Lease)
	s.finished(t)
	require.NoError(t, s.q.SetLimit(ctx, db.Pool, limit, onceq.Limit{AtOnce: 1}))
	require.NoError(t, s.q.SetLaneLimit(ctx, db.Pool, "lanes", "", 1))
	require.NoError(t, s.q.PauseQueue(ctx, db.Pool, paused, ""))
	s.add(t, inLane(lined))
	s.lease(t, lined)
	s.add(t, inLane(next))
	after := named(follower)
	after.After = []onceq.JobRef{{ID: s.jobs[lined]}}
	s.add(t, after)
	for _, name := range []string{plain, doubtful, expired, waits} {
		s.add(t, named(name))
		s.lease(t, name)
	}
	s.doubt(t, s.was[doubtful])
	db.ExpireLease(s.jobs[doubtful])
	s.lease(t, doubtful) // the lease before knows that it has tried the effect
	db.ExpireLease(s.jobs[expired])
	_, _, err := onceq.Await[int](ctx, s.was[waits], scope, awaited, week)
	require.Error(t, err)
	require.NoError(t, s.was[waits].Fail(ctx, err))
	s.add(t, named(ready))
	_, err = s.q.Emit(ctx, db.Pool, scope, known, 1)
	require.NoError(t, err)
	s.claimed, err = s.fence("taken").Claim(ctx, nil)
	require.NoError(t, err)
	_, err = s.q.Claim(ctx, onceq.ClaimOptions{Queue: "none"}) // whoever claims first does what a promoter has to do
	require.NoError(t, err)
	s.keep(t)
	return s
}

// finished makes what is over: the time that has to pass for it passes for nothing else.
func (s *scene) finished(t *testing.T) {
	ctx := t.Context()
	for _, name := range []string{past, dead, held} {
		s.add(t, named(name))
		s.lease(t, name)
	}
	require.NoError(t, s.was[past].Complete(ctx, nil))
	require.NoError(t, s.was[dead].Fail(ctx, onceq.Fatal(errors.New("this cannot be done"))))
	s.doubt(t, s.was[held])
	require.NoError(t, s.was[held].Fail(ctx, &onceq.HeldError{Key: held}))
	unknown, err := s.fence("doubtful").Claim(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, unknown.Uncertain(ctx, nil, errors.New("reset by peer")))
	s.db.Advance(2 * time.Hour)
}

func (s *scene) add(t *testing.T, job onceq.Job) {
	t.Helper()
	r, err := s.q.Enqueue(t.Context(), s.db.Pool, job)
	require.NoError(t, err)
	s.jobs[job.Kind] = r.ID
}

func (s *scene) lease(t *testing.T, name string) {
	t.Helper()
	leases, err := s.q.Claim(t.Context(), onceq.ClaimOptions{Kinds: []string{name}, Lease: week})
	require.NoError(t, err)
	require.Len(t, leases, 1, name)
	s.was[name] = leases[0]
}

func (s *scene) doubt(t *testing.T, l *onceq.Lease) {
	t.Helper()
	_, err := onceq.Once(t.Context(), l, effect, func(context.Context, string) (int, error) {
		return 0, errors.New("reset by peer")
	}, onceq.OnUncertain(onceq.Hold()))
	require.ErrorIs(t, err, onceq.ErrUncertain)
}

func (s *scene) fence(key string) *onceq.Fence {
	f, err := s.q.Fence(onceq.FenceSpec{Scope: scope, Key: key, Lease: week, Policy: onceq.Hold()})
	if err != nil {
		panic(err)
	}
	return f
}

// of returns the lease of a job as it was when the scene was made: a Lease remembers what was done with it.
func (s *scene) of(name string) *onceq.Lease { return fresh(s.was[name]) }

// fresh copies what its methods change. Its locks are free.
func fresh[T any](was *T) *T {
	is := new(T)
	reflect.ValueOf(is).Elem().Set(reflect.ValueOf(was).Elem())
	return is
}

// gate stops a commit that changed something while the test holds advisory lock 1: the first one that comes.
const gate = `
create function onceq.gate() returns trigger language plpgsql as $$
begin
  if pg_try_advisory_xact_lock(2) then
    perform pg_advisory_xact_lock(1);
  end if;
  return null;
end $$`

// keep copies all rows, and puts a gate at the commit of every table.
func (s *scene) keep(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	_, err := s.owner.Exec(ctx, "create schema saved; "+gate)
	require.NoError(t, err)
	rows, err := s.owner.Query(ctx, `select relname::text from pg_class where relnamespace = 'onceq'::regnamespace and relkind = 'r' order by 1`)
	require.NoError(t, err)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, tables)
	var b strings.Builder
	b.WriteString("begin; set local session_replication_role = replica;")
	for _, table := range tables {
		_, err = s.owner.Exec(ctx, fmt.Sprintf(`create table saved.%[1]s as table onceq.%[1]s;
create constraint trigger gate after insert or update or delete on onceq.%[1]s deferrable initially deferred for each row execute function onceq.gate()`, table))
		require.NoError(t, err, table)
		fmt.Fprintf(&b, "delete from onceq.%[1]s; insert into onceq.%[1]s overriding system value table saved.%[1]s;", table)
	}
	b.WriteString("commit")
	s.restore = b.String()
}

func (s *scene) again(t *testing.T) {
	t.Helper()
	_, err := s.owner.Exec(t.Context(), s.restore, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
}
