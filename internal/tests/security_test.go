package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"sync"
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

// sqlTexts keeps the text of every statement that pgx is asked to send, without its arguments.
type sqlTexts struct {
	mu   sync.Mutex
	seen []string
}

func (s *sqlTexts) add(ctx context.Context, sql string) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, sql)
	return ctx
}

func (s *sqlTexts) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	return s.add(ctx, d.SQL)
}
func (s *sqlTexts) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (s *sqlTexts) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	for _, q := range d.Batch.QueuedQueries {
		s.add(ctx, q.SQL)
	}
	return ctx
}
func (s *sqlTexts) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (s *sqlTexts) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// In every operation, text from callers is an argument of a statement and never part of it. In the simple protocol pgx
// itself writes arguments into the text; what they say must not happen there either.
func TestSecurity_NoTextOfCallersIsSQL(t *testing.T) {
	t.Parallel()
	const mark = `zzmark`
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		for name, evil := range map[string]string{
			"quote":        mark + `'; drop table onceq.meta cascade; --`,
			"double quote": mark + `"; drop table onceq.meta cascade; --`,
			"backslash":    mark + `\'; drop table onceq.meta cascade; --`,
			"dollar":       mark + `$$; drop table onceq.meta cascade; $1 $2 -- {}()`,
			"schema":       mark + `onceq.meta 'onceq.ids' %s ?`,
			"planted":      mark + `planted`, // and functions of others are on the search_path
		} {
			t.Run(mode.String()+" "+name, func(t *testing.T) {
				t.Parallel()
				conformance.Few(t, 2)
				ctx := t.Context()
				texts := &sqlTexts{}
				db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}), queuetest.PoolConfig(func(c *pgxpool.Config) {
					c.ConnConfig.DefaultQueryExecMode = mode
					c.ConnConfig.Tracer = texts
					c.ConnConfig.RuntimeParams["search_path"] = "planted, public"
				}))
				if name == "planted" {
					plant(t, db)
				}
				q := db.Queue
				job := onceq.Job{
					Kind: evil, Queue: evil, Scope: evil, Key: evil, Payload: map[string]string{evil: evil}, Metadata: map[string]string{evil: evil},
					Fields: []string{evil}, MaxAttempts: 9,
				}
				again := func(more string) onceq.Job { j := job; j.Key += more; return j }
				claim := func() *onceq.Lease {
					t.Helper()
					leases, err := q.Claim(ctx, onceq.ClaimOptions{Queue: evil, Kinds: []string{evil}})
					require.NoError(t, err)
					require.Len(t, leases, 1)
					require.Equal(t, [...]string{evil, evil, evil}, [...]string{leases[0].Kind, leases[0].Queue, leases[0].Scope})
					return leases[0]
				}
				oops := errors.New(evil)
				var l *onceq.Lease
				var c *onceq.FenceLease
				fence, err := q.Fence(onceq.FenceSpec{Scope: evil, Key: evil, Payload: evil})
				require.NoError(t, err)
				var id, group int64
				filter := onceqops.Filter{Queue: evil, Kind: evil, Scope: evil}
				// These are the exported methods of the types that talk to the database, in an order in which each has
				// something to do.
				steps := []struct {
					method string
					do     func() error
				}{
					{"Queue.Check", func() error { return q.Check(ctx) }},
					{"Queue.Enqueue", func() error { r, err := q.Enqueue(ctx, db.Pool, job); id = r.ID; return err }},
					{"Queue.Enqueue, which replaces", func() error {
						j := job
						j.Replace = onceq.ReplacePayload | onceq.ReplaceTime
						r, err := q.Enqueue(ctx, db.Pool, j)
						require.Equal(t, onceq.Result{ID: id, Duplicate: true, Replaced: true, State: onceq.StateWaiting}, r)
						return err
					}},
					{"Queue.EnqueueUnique", func() error { _, err := q.EnqueueUnique(ctx, db.Pool, job); return err }},
					{"Queue.EnqueueMany", func() error {
						_, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{job, {Kind: "other", Key: evil, Metadata: job.Metadata}, {Kind: "other", Payload: []byte(evil)}})
						return err
					}},
					{"Queue.EnqueueInBatch", func() error {
						b := &pgx.Batch{}
						p, err := q.EnqueueInBatch(b, job)
						require.NoError(t, err)
						require.NoError(t, db.Pool.SendBatch(ctx, b).Close())
						_, err = p.Result(ctx, db.Pool)
						return err
					}},
					{"Queue.Get", func() error { _, err := q.Get(ctx, db.Pool, id); return err }},
					{"Queue.GetByKey", func() error { _, err := q.GetByKey(ctx, db.Pool, evil, evil); return err }},
					{"Ops.List", func() error {
						list, err := onceqops.New(q).List(ctx, db.Pool, filter)
						require.Len(t, list, 1)
						return err
					}},
					{"Ops.Stats", func() error { _, err := onceqops.New(q).Stats(ctx, evil); return err }},
					{"Ops.Health", func() error { _, err := onceqops.New(q).Health(ctx); return err }},
					{"Ops.Retry", func() error { _, err := onceqops.New(q).Retry(ctx, db.Pool, id); return err }},
					{"Queue.Claim", func() error { l = claim(); return nil }},
					{"Lease.Extend", func() error { return l.Extend(ctx, time.Hour) }},
					{"Lease.Lock", func() error {
						return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return l.Lock(ctx, tx) })
					}},
					{"Lease.IdempotencyKey", func() error { l.IdempotencyKey(evil); return nil }},
					{"Queue.Emit", func() error {
						_, _, err := onceq.Await[string](ctx, l, evil, evil, time.Hour)
						require.False(t, onceq.IsFailure(err))
						require.False(t, onceq.IsFailure(onceq.Sleep(ctx, l, evil, time.Hour)))
						first, err := q.Emit(ctx, db.Pool, evil, evil, evil)
						require.True(t, first)
						return err
					}},
					{"Lease.Await", func() error { // it does not wait any more: the event came
						came, err := l.Await(ctx, evil, evil, time.Hour)
						require.True(t, came)
						return err
					}},
					{"Queue.AwaitEvent", func() error {
						payload, err := q.AwaitEvent(ctx, db.Pool, evil, evil)
						require.Contains(t, string(payload), mark)
						return err
					}},
					{"Queue.Event", func() error {
						payload, emitted, err := q.Event(ctx, db.Pool, evil, evil)
						require.True(t, emitted)
						require.Contains(t, string(payload), mark)
						return err
					}},
					{"Lease.Release", func() error { return l.Release(ctx) }},
					{"Lease.Snooze", func() error { return claim().Snooze(ctx, 1) }},
					{"Lease.Fail", func() error { return claim().Fail(ctx, onceq.RetryAfter(0, oops)) }},
					{"Ops.Effects", func() error {
						l = claim()
						_, err := onceq.Once(ctx, l, evil, func(context.Context, string) (string, error) { return "", oops })
						require.ErrorIs(t, err, onceq.ErrUncertain)
						effects, err := onceqops.New(q).Effects(ctx, db.Pool, id)
						require.Len(t, effects, 1)
						require.Equal(t, evil, effects[0].Name)
						return err
					}},
					{"Ops.Resolve", func() error { return onceqops.New(q).Resolve(ctx, db.Pool, id, evil, onceq.Applied(evil)) }},
					{"Lease.SetResult", func() error { return l.SetResult(evil) }},
					{"Lease.SetWeight", func() error { return l.SetWeight(1) }},
					{"Lease.Complete", func() error { return l.Complete(ctx, nil) }},
					{"Lease.CompleteInBatch", func() error {
						_, err := q.Enqueue(ctx, db.Pool, again("2"))
						require.NoError(t, err)
						b := &pgx.Batch{}
						l = claim()
						require.NoError(t, l.SetResult(evil))
						require.NoError(t, l.CompleteInBatch(b))
						return db.Pool.SendBatch(ctx, b).Close()
					}},
					{"Queue.EnqueueGroup", func() error {
						then := again("then")
						then.After = []onceq.JobRef{{Scope: evil, Key: evil}, {Scope: evil, Key: evil + "2"}}
						g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{again("member")}, then)
						group = g.Then.ID
						return err
					}},
					{"Lease.AddMembers", func() error {
						l = claim()
						_, err := l.AddMembers(ctx, db.Pool, again("added"))
						return err
					}},
					{"Ops.Groups", func() error {
						groups, err := onceqops.New(q).Groups(ctx, db.Pool, 0, 0)
						require.Len(t, groups, 1)
						return err
					}},
					{"Queue.Group", func() error {
						g, err := q.Group(ctx, db.Pool, group)
						require.Equal(t, 4, g.Total)
						return err
					}},
					{"Ops.Members", func() error {
						members, err := listed(onceqops.New(q).Members(ctx, db.Pool, group))
						require.Len(t, members, 4)
						return err
					}},
					{"Ops.GroupsOf", func() error {
						groups, err := onceqops.New(q).GroupsOf(ctx, db.Pool, id)
						require.Equal(t, []int64{group}, groups)
						return err
					}},
					{"Lease.Group", func() error { _, err := l.Group(ctx); return err }},
					{"Lease.Members", func() error {
						require.NoError(t, l.SetResult(evil))
						require.NoError(t, l.Complete(ctx, nil))
						require.NoError(t, claim().Complete(ctx, nil))
						l = claim()
						require.Equal(t, group, l.ID)
						members, err := listed(l.Members(ctx))
						require.Contains(t, string(members[2].Result), mark)
						return errors.Join(err, l.Complete(ctx, nil))
					}},
					{"Ops.Redrive", func() error {
						r, err := q.Enqueue(ctx, db.Pool, again("3"))
						require.NoError(t, err)
						id = r.ID
						require.NoError(t, claim().Fail(ctx, onceq.Fatal(oops)))
						_, err = onceqops.New(q).Redrive(ctx, db.Pool, id)
						return err
					}},
					{"Queue.Cancel", func() error { _, err := q.Cancel(ctx, db.Pool, id); return err }},
					{"Ops.RedriveMany", func() error {
						f := filter
						f.States = []onceq.State{onceq.StateCancelled}
						n, _, err := onceqops.New(q).RedriveMany(ctx, db.Pool, f)
						require.Equal(t, 1, n)
						return err
					}},
					{"Ops.Discard", func() error {
						require.NoError(t, claim().Fail(ctx, onceq.Fatal(oops)))
						return onceqops.New(q).Discard(ctx, db.Pool, id)
					}},
					{"Ops.DiscardMany", func() error { _, err := onceqops.New(q).DiscardMany(ctx, db.Pool, filter); return err }},
					{"Queue.Fence", func() error { return nil }},
					{"Queue.Schema", func() error { q.Schema(); return nil }},
					{"Queue.Logger", func() error { q.Logger(); return nil }},
					{"Fence.Claim", func() (err error) { c, err = fence.Claim(ctx, nil); return err }},
					{"FenceLease.Extend", func() error { return c.Extend(ctx, time.Hour) }},
					{"FenceLease.IdempotencyKey", func() error { c.IdempotencyKey(); return nil }},
					{"FenceLease.Uncertain", func() error { return c.Uncertain(ctx, nil, oops) }},
					{"Fence.Resolve", func() error { return fence.Resolve(ctx, nil, onceq.NeverApplied()) }},
					{"FenceLease.Release", func() (err error) {
						c, err = fence.Claim(ctx, nil)
						require.NoError(t, err)
						return c.Release(ctx, nil)
					}},
					{"FenceLease.Complete", func() (err error) {
						c, err = fence.Claim(ctx, nil)
						require.NoError(t, err)
						return c.Complete(ctx, nil, evil)
					}},
					{"FenceLease.CompleteInBatch", func() error {
						b := &pgx.Batch{}
						require.NoError(t, c.CompleteInBatch(b, evil))
						return db.Pool.SendBatch(ctx, b).Close()
					}},
					{"Worker.Drain", func() error {
						k := onceq.Kind[map[string]string]{Name: evil, Queue: evil, Keep: time.Hour}
						_, err := q.Enqueue(ctx, db.Pool, k.Job(map[string]string{evil: evil}))
						require.NoError(t, err)
						w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, k.Handle(func(ctx context.Context, l *onceq.Lease, _ map[string]string) error {
							_, err := onceq.Once(ctx, l, evil, func(context.Context, string) (string, error) { return evil, nil })
							return errors.Join(err, l.SetResult(evil))
						}))
						require.NoError(t, err)
						return w.Drain(ctx, 0)
					}},
					{"Ops.CancelMany", func() error {
						_, _, err := onceqops.New(q).CancelMany(ctx, db.Pool, onceqops.Filter{Queue: evil, Kind: evil, Scope: evil})
						return err
					}},
					{"Ops.ResolveMany", func() error {
						_, _, err := onceqops.New(q).ResolveMany(ctx, db.Pool, onceqops.Filter{Queue: evil, Kind: evil, Scope: evil}, evil, onceq.Applied(evil))
						return err
					}},
					{"Queue.SetLaneLimit", func() error { return q.SetLaneLimit(ctx, db.Pool, evil, evil, 2) }},
					{"Queue.RemoveLaneLimit", func() error { return q.RemoveLaneLimit(ctx, db.Pool, evil, evil) }},
					{"Queue.SetLimit", func() error { return q.SetLimit(ctx, db.Pool, evil, onceq.Limit{AtOnce: 1}) }},
					{"Queue.EnsureLimit", func() error {
						_, err := q.EnsureLimit(ctx, db.Pool, evil, onceq.Limit{AtOnce: 1})
						return err
					}},
					{"Ops.Limit", func() error { _, err := onceqops.New(q).Limit(ctx, db.Pool, evil); return err }},
					{"Ops.Limits", func() error {
						_, err := onceqops.New(q).Limits(ctx, db.Pool, onceqops.LimitFilter{After: evil})
						return err
					}},
					{"Queue.RemoveLimit", func() error { return q.RemoveLimit(ctx, db.Pool, evil) }},
					{"Ops.Lanes", func() error {
						_, err := onceqops.New(q).Lanes(ctx, db.Pool, onceqops.LaneFilter{Family: evil})
						return err
					}},
					{"Ops.CancelGroup", func() error {
						g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{again("end")}, again("all"))
						require.NoError(t, err)
						_, _, err = onceqops.New(q).CancelGroup(ctx, db.Pool, g.Then.ID)
						return err
					}},
					{"Ops.Page", func() error {
						_, _, err := onceqops.New(q).Page(ctx, db.Pool, onceqops.Filter{Queue: evil, Kind: evil, Scope: evil})
						return err
					}},
					{"Queue.LaneLimit", func() error { _, err := q.LaneLimit(ctx, db.Pool, evil, evil); return err }},
					{"Queue.PauseQueue", func() error { return q.PauseQueue(ctx, db.Pool, evil, evil) }},
					{"Queue.Pause", func() error { return q.Pause(ctx, db.Pool, onceq.Pause{Limit: evil, Note: evil}) }},
					{"Queue.Resume", func() error {
						_, err := q.Resume(ctx, db.Pool, onceq.Pause{Limit: evil})
						return err
					}},
					{"Queue.Wait", func() error {
						_, err := q.Wait(ctx, onceq.JobRef{Scope: evil, Key: evil + " never"})
						require.ErrorIs(t, err, onceq.ErrNotFound)
						return nil
					}},
					{"Worker.Ready", func() error { return nil }}, // sends nothing
					{"Worker.Alive", func() error { return nil }}, // sends nothing
					{"Queue.PauseKind", func() error { return q.PauseKind(ctx, db.Pool, evil, evil) }},
					{"Ops.Pauses", func() error { _, err := onceqops.New(q).Pauses(ctx, db.Pool); return err }},
					{"Ops.Explain", func() error { // while both are paused
						r, err := q.Enqueue(ctx, db.Pool, again("4"))
						require.NoError(t, err)
						_, err = onceqops.New(q).Explain(ctx, db.Pool, r.ID)
						return err
					}},
					{"Queue.ResumeQueue", func() error { _, err := q.ResumeQueue(ctx, db.Pool, evil); return err }},
					{"Queue.ResumeKind", func() error { _, err := q.ResumeKind(ctx, db.Pool, evil); return err }},
					{"Ops.RecordAction", func() error {
						_, err := onceqops.New(q).RecordAction(ctx, db.Pool, onceqops.Action{Who: evil, What: evil, About: evil, Why: evil, Outcome: evil})
						return err
					}},
					{"Ops.Actions", func() error { _, err := onceqops.New(q).Actions(ctx, db.Pool, onceqops.ActionFilter{}); return err }},
					{"Ops.Keys", func() error { _, err := onceqops.New(q).Keys(ctx, db.Pool, evil, evil); return err }},
					{"Ops.Doubts", func() error { _, _, err := onceqops.New(q).Doubts(ctx, db.Pool, filter); return err }},
					{"Ops.CheckPayloads", func() error { _, err := onceqops.New(q).CheckPayloads(ctx, kindHandler(evil, evil, nil)); return err }},
					{"Ops.Workers", func() error { _, err := onceqops.New(q).Workers(ctx, db.Pool); return err }},
					{"Ops.WithMember", func() error {
						_, err := onceqops.New(q).WithMember(ctx, db.Pool, []int64{1}, "payload.a = "+evil)
						return err
					}},
					{"Ops.Busy", func() error {
						_, err := onceqops.New(q).Busy(ctx, db.Pool, onceqops.WorkerInfo{Queues: map[string]int{evil: 1}})
						return err
					}},
					{"Ops.Move", func() error {
						r, err := q.Enqueue(ctx, db.Pool, again("5"))
						require.NoError(t, err)
						_, err = onceqops.New(q).Move(ctx, db.Pool, r.ID, evil+"2")
						return err
					}},
					{"Ops.MoveMany", func() error { _, err := onceqops.New(q).MoveMany(ctx, db.Pool, filter, evil+"3"); return err }},
					{"Ops.WouldMove", func() error { _, err := onceqops.New(q).WouldMove(ctx, db.Pool, filter); return err }},
					{"Ops.Counts", func() error {
						_, err := onceqops.New(q).Counts(ctx, db.Pool, onceqops.CountFilter{Queue: evil, Kind: evil, ByKind: true})
						return err
					}},
					{"Ops.Count", func() error { _, err := onceqops.New(q).Count(ctx, db.Pool, filter); return err }},
					{"Ops.WouldCancel", func() error { _, err := onceqops.New(q).WouldCancel(ctx, db.Pool, filter); return err }},
					{"Ops.RetryMany", func() error { _, err := onceqops.New(q).RetryMany(ctx, db.Pool, filter); return err }},
					{"Ops.WouldRetry", func() error { _, err := onceqops.New(q).WouldRetry(ctx, db.Pool, filter); return err }},
					{"Ops.WouldRedrive", func() error { _, err := onceqops.New(q).WouldRedrive(ctx, db.Pool, filter); return err }},
					{"Ops.WouldDiscard", func() error { _, err := onceqops.New(q).WouldDiscard(ctx, db.Pool, filter); return err }},
					{"Ops.WouldResolve", func() error { _, err := onceqops.New(q).WouldResolve(ctx, db.Pool, filter); return err }},
					{"Lease.Progress", func() error {
						require.NoError(t, l.Progress(1, 2, evil))
						_ = l.Extend(ctx, time.Hour) // the lease may be over
						return nil
					}},
					{"Queue.NewInstallation", func() error { return nil }}, // takes no text
					{"Fence.String", func() error { return nil }},          // sends nothing
					{"Lease.Now", func() error { return nil }},             // sends no text
					{"Worker.Run", func() error { return nil }},            // Drain sends the same statements
					{"Reaper.Run", func() error { return nil }},            // calls RunOnce
					{"Reaper.RunOnce", func() error {
						r, err := onceq.NewReaper(q, onceq.ReaperConfig{})
						require.NoError(t, err)
						if name != "planted" { // its statements would meet what is planted
							db.Advance(100 * 24 * time.Hour)
						}
						_, err = r.RunOnce(ctx)
						return err
					}},
				}
				done := make(map[string]bool)
				for _, s := range steps {
					require.NoError(t, s.do(), s.method)
					done[s.method] = true
				}
				for _, v := range []any{q, onceqops.New(q), l, fence, c, (*onceq.Worker)(nil), (*onceq.Reaper)(nil)} {
					typ := reflect.TypeOf(v)
					for i := range typ.NumMethod() {
						name := typ.Elem().Name() + "." + typ.Method(i).Name
						require.True(t, done[name], "%s is not tried here", name)
					}
				}
				require.NoError(t, q.Check(ctx))
				if name == "planted" {
					workLanes(t, db, evil)
				}
				require.NotEmpty(t, texts.seen)
				for _, sql := range texts.seen {
					require.NotContains(t, sql, mark)
				}
			})
		}
	}
}

// plant puts functions and operators into the schema planted, as somebody could who may create in a schema of the search_path:
// with exactly the types that onceq calls them with, so that Postgres takes them and not its own. Each of them fails.
func plant(t *testing.T, db *queuetest.DB) {
	t.Helper()
	owner := conformance.Owner(t, db)
	exec := func(statement string) {
		t.Helper()
		_, err := owner.Exec(context.WithoutCancel(t.Context()), statement)
		require.NoError(t, err, statement)
	}
	exec(`create schema planted; grant usage on schema planted to public`)
	t.Cleanup(func() { exec(`drop schema planted cascade`) }) // before the invariants are read
	for _, f := range []string{
		"unnest(smallint[]) returns setof smallint", "unnest(int[]) returns setof int", "unnest(bigint[]) returns setof bigint",
		"unnest(text[]) returns setof text", "cardinality(bigint[]) returns int", "cardinality(smallint[]) returns int", "cardinality(text[]) returns int",
		"generate_series(int, smallint) returns setof int", "lpad(text, int, varchar) returns text", "chr(smallint) returns text",
		"jsonb_build_object(text, timestamptz, text, smallint, text, text) returns jsonb",
		"jsonb_build_object(text, timestamptz, text, int, text, text) returns jsonb",
		"nextval(text) returns bigint", "sum(int, int) returns bigint", "int8send(numeric) returns bytea",
		"array_agg(bigint, bigint) returns bigint[]", "concat_ws(text, text, text) returns text", "set_config(text, text) returns text",
		"statement_timestamp() returns timestamptz", "clock_timestamp(int default 1) returns timestamptz", "gen_random_uuid() returns uuid",
		"pg_backend_pid() returns int", "pg_current_xact_id() returns xid8", "now() returns timestamptz", "current_database() returns name",
	} {
		exec(`create function planted.` + f + ` language plpgsql as $$ begin raise exception 'planted'; end $$`)
	}
	exec(`create function planted.gather(bigint[], bigint) returns bigint[] language plpgsql as $$ begin raise exception 'planted'; end $$;
		create aggregate planted.array_agg(bigint) (sfunc = planted.gather, stype = bigint[]);
		create function planted.count_up(bigint, bigint) returns bigint language plpgsql as $$ begin raise exception 'planted'; end $$;
		create aggregate planted.count(bigint) (sfunc = planted.count_up, stype = bigint)`)
	for i, o := range [][4]string{
		{"*", "bigint", "interval", "interval"}, {"*", "int", "interval", "interval"}, {"*", "numeric", "int", "numeric"},
		{"&", "smallint", "int", "int"}, {"|", "smallint", "int", "int"}, {"|", "bigint", "int", "bigint"},
		{">", "numeric", "int", "bool"}, {"->>", "jsonb", "jsonb", "text"}, {"%", "bigint", "int", "bigint"},
		{"=", "text[]", "text[]", "bool"}, {"<>", "text[]", "text[]", "bool"}, {"&&", "text[]", "text[]", "bool"}, {"<@", "text[]", "text[]", "bool"},
		{"/", "float8", "int", "float8"}, {"/", "numeric", "float8", "float8"}, {"-", "int", "float8", "float8"}, {"-", "float8", "int", "float8"},
	} {
		exec(fmt.Sprintf(`create function planted.o%d(%s, %s) returns %s language plpgsql as $$ begin raise exception 'planted'; end $$;
			create operator planted.%s (leftarg = %[2]s, rightarg = %[3]s, function = planted.o%[1]d)`, i, o[1], o[2], o[3], o[0]))
	}
}

// workLanes runs jobs with a lane, with a limit and of a group, until none is left.
func workLanes(t *testing.T, db *queuetest.DB, name string) {
	t.Helper()
	ctx := t.Context()
	require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "limit"+name, onceq.Limit{Rate: 1000, Burst: 2}))
	lined := onceq.Kind[int]{Name: "lined", Queue: "lined", Lane: func(int) string { return name }}
	limited := onceq.Kind[int]{Name: "limited", Queue: "lined", Limit: func(int) string { return "limit" + name }}
	after := onceq.Kind[int]{Name: "after", Queue: "lined"}
	jobs := []onceq.Job{lined.Job(1), lined.Job(2), limited.Job(1), limited.Job(2), limited.Job(3)}
	_, err := db.Queue.EnqueueGroup(ctx, db.Pool, jobs, after.Job(1))
	require.NoError(t, err)
	ok := func(context.Context, *onceq.Lease, int) error { return nil }
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"lined": {Concurrency: 5}}},
		lined.Handle(ok), limited.Handle(ok), after.Handle(ok))
	require.NoError(t, err)
	run, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- w.Run(run) }()
	require.Eventually(t, func() bool {
		n, err := onceqops.New(db.Queue).Count(ctx, db.Pool, onceqops.Filter{Queue: "lined"})
		return err == nil && n == 0
	}, 2*time.Minute, 20*time.Millisecond)
	cancel()
	require.NoError(t, <-ended)
}

// Text that Postgres cannot hold is refused before it is sent, so that the caller's transaction stays usable.
func TestSecurity_TextThatPostgresRefusesIsNotSent(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	for _, bad := range []string{"a\x00b", "a\xff"} {
		for name, do := range map[string]func(tx pgx.Tx) error{
			"GetByKey, key":   func(tx pgx.Tx) error { _, err := q.GetByKey(ctx, tx, "s", bad); return err },
			"GetByKey, scope": func(tx pgx.Tx) error { _, err := q.GetByKey(ctx, tx, bad, "k"); return err },
			"List, queue": func(tx pgx.Tx) error {
				_, err := onceqops.New(q).List(ctx, tx, onceqops.Filter{Queue: bad})
				return err
			},
			"List, kind": func(tx pgx.Tx) error { _, err := onceqops.New(q).List(ctx, tx, onceqops.Filter{Kind: bad}); return err },
			"List, scope": func(tx pgx.Tx) error {
				_, err := onceqops.New(q).List(ctx, tx, onceqops.Filter{Scope: bad})
				return err
			},
			"RedriveMany": func(tx pgx.Tx) error {
				_, _, err := onceqops.New(q).RedriveMany(ctx, tx, onceqops.Filter{Queue: bad})
				return err
			},
			"DiscardMany": func(tx pgx.Tx) error {
				_, err := onceqops.New(q).DiscardMany(ctx, tx, onceqops.Filter{Queue: bad})
				return err
			},
			"Resolve":      func(tx pgx.Tx) error { return onceqops.New(q).Resolve(ctx, tx, r.ID, bad, onceq.NeverApplied()) },
			"Claim, kinds": func(pgx.Tx) error { _, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{bad}}); return err },
			"Stats":        func(pgx.Tx) error { _, err := onceqops.New(q).Stats(ctx, bad); return err },
			"Once": func(pgx.Tx) error {
				_, err := onceq.Once(ctx, &onceq.Lease{}, bad, func(context.Context, string) (int, error) { return 0, nil })
				return err
			},
		} {
			require.NoError(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
				err := do(tx)
				var invalid *onceq.InvalidError
				require.ErrorAs(t, err, &invalid, name)
				_, err = tx.Exec(ctx, `select 1`)
				require.NoError(t, err, name)
				return nil
			}))
		}
	}
}

// picky refuses to decode, and quotes in its error what it was given.
type picky struct{ X any }

func (p *picky) UnmarshalJSON(raw []byte) error { return fmt.Errorf("refused %s", raw) }

// No error, event, log line or recorded attempt shows what is in a payload or a result, whatever goes wrong.
func TestSecurity_ErrorsAndLogsCarryNoPayload(t *testing.T) {
	t.Parallel()
	const mark, number = "zzmark", "31415926535"
	var mu sync.Mutex
	var said bytes.Buffer
	say := func(text string) {
		mu.Lock()
		defer mu.Unlock()
		said.WriteString(text + "\n")
	}
	db := queuetest.New(t, queuetest.Config(onceq.Config{
		Logger: slog.New(slog.NewJSONHandler(lockedWriter{&mu, &said}, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Hook:   onceq.HookFunc(func(_ context.Context, e onceq.Event) { say(fmt.Sprintf("%+v %v", e, e.Err)) }),
	}))
	ctx, q := t.Context(), db.Queue
	failed := 0
	fails := func(err error) {
		t.Helper()
		require.Error(t, err)
		failed++
		say(fmt.Sprintf("%v %+v %s", err, err, err.Error()))
	}
	enqueue := func(j onceq.Job) error {
		if j.Kind == "" {
			j.Kind = "k"
		}
		_, err := q.Enqueue(ctx, db.Pool, j)
		return err
	}

	// These are refused before they are sent.
	for _, payload := range []any{
		json.RawMessage(mark), json.RawMessage(`{"a":"` + mark + `"`), json.RawMessage(`"` + mark + `\u0000"`), json.RawMessage(`"` + mark + "\xff\""),
		json.RawMessage(`"` + mark + `\ud800"`), mark + "\x00", math.Inf(1), make(chan string), strings.Repeat(mark, 1<<20), map[string]any{mark: func() {}},
		map[string]any{"card": json.Number(mark)}, refusing(mark),
		json.RawMessage(number + "e99999"),
	} {
		fails(enqueue(onceq.Job{Payload: payload}))
		_, err := q.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "k", Payload: payload}})
		fails(err)
		if payload != "zzmark\x00" {
			continue
		}
		_, err = q.Fence(onceq.FenceSpec{Key: "k", Payload: payload})
		fails(err)
	}
	fails(enqueue(onceq.Job{Payload: []string{mark}, Fields: []string{"a"}}))
	fails(enqueue(onceq.Job{Metadata: map[string]string{"a": mark + "\x00"}}))

	// The key is taken with another payload, or is taken at all.
	require.NoError(t, enqueue(onceq.Job{Key: "taken", Payload: mark, Delay: time.Hour}))
	fails(enqueue(onceq.Job{Key: "taken", Payload: mark + "2"}))
	fails(enqueue(onceq.Job{Key: "taken", Payload: mark, Strict: true}))

	// The database refuses the row, and shows the row in the details of its error.
	_, err := owner(t, db).Exec(ctx, `alter table jobs add constraint small check (length(payload::text) < 100)`)
	require.NoError(t, err)
	big := strings.Repeat(mark, 50)
	fails(enqueue(onceq.Job{Payload: big}))
	_, err = q.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "k", Payload: big}})
	fails(err)

	// Payloads do not decode; handlers panic and fail. This is about what a worker logs and what it records.
	require.NoError(t, enqueue(onceq.Job{Kind: "small int", Payload: json.RawMessage(number), MaxAttempts: 1}))
	require.NoError(t, enqueue(onceq.Job{Kind: "time", Payload: mark, MaxAttempts: 1}))
	require.NoError(t, enqueue(onceq.Job{Kind: "picky", Payload: mark, MaxAttempts: 1}))
	require.NoError(t, enqueue(onceq.Job{Kind: "bytes for json", Payload: []byte(mark), MaxAttempts: 1}))
	require.NoError(t, enqueue(onceq.Job{Kind: "panics", Payload: mark, MaxAttempts: 1}))
	require.NoError(t, enqueue(onceq.Job{Kind: "result", Payload: mark, MaxAttempts: 1}))
	smallInt, times, pickies := onceq.Kind[struct{ N int8 }]{Name: "small int"}, onceq.Kind[time.Time]{Name: "time"}, onceq.Kind[picky]{Name: "picky"}
	ints := onceq.Kind[int8]{Name: "bytes for json"}
	panics, results := onceq.Kind[string]{Name: "panics"}, onceq.Kind[string]{Name: "result"}
	ran := db.Drain(
		smallInt.Handle(func(context.Context, *onceq.Lease, struct{ N int8 }) error { return nil }),
		times.Handle(func(context.Context, *onceq.Lease, time.Time) error { return nil }),
		pickies.HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, picky) error { return nil }),
		ints.HandleBatch(2, func(context.Context, pgx.Tx, []onceq.Item[int8]) error { return nil }),
		panics.Handle(func(context.Context, *onceq.Lease, string) error { panic("oh") }),
		results.Handle(func(_ context.Context, l *onceq.Lease, s string) error {
			return errors.Join(l.SetResult(json.RawMessage(s)), l.SetResult(s+"\x00"))
		}),
	)
	require.Len(t, ran, 6)
	for _, r := range ran {
		require.Equal(t, onceq.StateDead, r.State, r.Kind)
		fails(r.Err)
		info, err := q.Get(ctx, db.Pool, r.JobID)
		require.NoError(t, err)
		require.Len(t, info.Errors, 1)
		say(info.Errors[0].Error)
	}
	require.NoError(t, enqueue(onceq.Job{Kind: "number", Payload: map[string]any{"N": json.Number(number)}}))
	leases, err := q.Claim(ctx, onceq.ClaimOptions{Kinds: []string{"number"}})
	require.NoError(t, err)
	require.Len(t, leases, 1)

	// Results, of an effect and of Do, do not decode into what the next caller wants.
	_, err = onceq.Once(ctx, leases[0], "e", func(context.Context, string) (string, error) { return mark, nil })
	require.NoError(t, err)
	_, err = onceq.Once(ctx, leases[0], "e", func(context.Context, string) (time.Time, error) { return time.Time{}, nil })
	fails(err)
	_, err = onceq.Once(ctx, leases[0], "big", func(context.Context, string) (string, error) { return strings.Repeat(mark, 1<<18), nil })
	fails(err)
	_, err = onceq.Do(ctx, q, onceq.FenceSpec{Key: "d", Payload: mark}, func(context.Context, *onceq.FenceLease) (json.Number, error) { return number, nil })
	require.NoError(t, err)
	_, err = onceq.Do(ctx, q, onceq.FenceSpec{Key: "d", Payload: mark}, func(context.Context, *onceq.FenceLease) (int8, error) { return 0, nil })
	fails(err)
	_, err = onceq.Do(ctx, q, onceq.FenceSpec{Key: "d", Payload: mark + "2"}, func(context.Context, *onceq.FenceLease) (int8, error) { return 0, nil })
	fails(err)
	require.NoError(t, leases[0].SetResult(mark))
	require.NoError(t, leases[0].Complete(ctx, nil))
	fails(leases[0].Complete(ctx, nil))
	fails(leases[0].Fail(ctx, errors.New("late")))

	mu.Lock()
	defer mu.Unlock()
	require.Greater(t, failed, 30)
	for _, line := range strings.Split(said.String(), "\n") {
		require.NotContains(t, line, mark)
		require.NotContains(t, line, number)
	}
}

type lockedWriter struct {
	mu *sync.Mutex
	to *bytes.Buffer
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(p)
}

// A stored result is given only to a caller who names its class, scope and key.
func TestSecurity_AResultIsReachableByItsScopeAndKeyAlone(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	const secret = "of tenant a"
	mine := onceq.FenceSpec{Scope: "tenant a", Key: "k"}
	_, err := onceq.Do(ctx, q, mine, func(context.Context, *onceq.FenceLease) (string, error) { return secret, nil })
	require.NoError(t, err)
	job := onceq.Job{Kind: "k", Scope: "tenant a", Key: "k"}
	r, err := q.Enqueue(ctx, db.Pool, job)
	require.NoError(t, err)
	require.False(t, r.Duplicate, "a fence's key is no job's")
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	require.NoError(t, err)
	_, err = onceq.Once(ctx, leases[0], "k", func(context.Context, string) (string, error) { return secret, nil })
	require.NoError(t, err)
	require.NoError(t, leases[0].SetResult(secret))
	require.NoError(t, leases[0].Complete(ctx, nil))

	got, err := onceq.Do(ctx, q, mine, func(context.Context, *onceq.FenceLease) (string, error) { return "", errors.New("run again") })
	require.NoError(t, err)
	require.Equal(t, secret, got)
	again, err := q.Enqueue(ctx, db.Pool, job)
	require.NoError(t, err)
	require.JSONEq(t, `"`+secret+`"`, string(again.Output))

	near := []string{"tenant b", "tenant a ", " tenant a", "Tenant a", "tenant", "tenant a\t", "tenant%", "tenant _", "default"}
	for _, scope := range near {
		for _, class := range []onceq.Class{onceq.ClassApplication, onceq.ClassRequest} {
			own, err := onceq.Do(ctx, q, onceq.FenceSpec{Class: class, Scope: scope, Key: "k"}, func(context.Context, *onceq.FenceLease) (string, error) { return "own", nil })
			require.NoError(t, err)
			require.Equal(t, "own", own)
		}
		other := job
		other.Scope = scope
		r, err := q.Enqueue(ctx, db.Pool, other)
		require.NoError(t, err)
		require.Equal(t, onceq.Result{ID: r.ID, State: onceq.StateWaiting}, r)
	}
	for _, key := range []string{"K", "k ", "k%", "_", fmt.Sprintf("%d/k", leases[0].ID)} {
		for _, class := range []onceq.Class{onceq.ClassApplication, onceq.ClassRequest} {
			own, err := onceq.Do(ctx, q, onceq.FenceSpec{Class: class, Scope: "tenant a", Key: key}, func(context.Context, *onceq.FenceLease) (string, error) { return "own", nil })
			require.NoError(t, err)
			require.Equal(t, "own", own)
		}
		_, err := q.GetByKey(ctx, db.Pool, "tenant a", key)
		require.ErrorIs(t, err, onceq.ErrNotFound)
	}
	own, err := onceq.Do(ctx, q, onceq.FenceSpec{Class: onceq.ClassRequest, Scope: "tenant a", Key: "k"}, func(context.Context, *onceq.FenceLease) (string, error) { return "own", nil })
	require.NoError(t, err)
	require.Equal(t, "own", own)

	// A caller with the same key and another payload is refused and is told nothing of the result.
	_, err = onceq.Do(ctx, q, onceq.FenceSpec{Scope: "tenant c", Key: "k", Payload: 1}, func(context.Context, *onceq.FenceLease) (string, error) { return secret, nil })
	require.NoError(t, err)
	_, err = onceq.Do(ctx, q, onceq.FenceSpec{Scope: "tenant c", Key: "k", Payload: 2}, func(context.Context, *onceq.FenceLease) (string, error) { return "", nil })
	var mismatch *onceq.MismatchError
	require.ErrorAs(t, err, &mismatch)
	require.Nil(t, mismatch.Existing.Output)
}

// refusing refuses to encode, and says why.
type refusing string

func (r refusing) MarshalJSON() ([]byte, error) { return nil, errors.New("not " + string(r)) }
