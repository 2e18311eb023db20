package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// Somebody holds the locks that a migration and a Reaper need. Neither waits for ever, and nobody waits behind them.
func TestLocksOfOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema(), queuetest.NoMigrations())
	fine(t, db.URL, "migrate", "up")
	lock := func(table string) pgx.Tx {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
		_, err = tx.Exec(t.Context(), `lock table onceq.`+table)
		require.NoError(t, err)
		return tx
	}
	tx := lock("meta")
	pid := tx.Conn().PgConn().PID()

	a := do(t, db.URL, "migrate", "up")
	require.Equal(t, codeFailed, a.code, a.err)
	require.Contains(t, a.err, "A lock was not free within 5s")
	require.Contains(t, a.err, fmt.Sprintf("Locks are held by session %d (", pid))
	require.NoError(t, tx.Rollback(t.Context()))
	tx = lock("job_cancels")
	a = do(t, db.URL, "reap", "--timeout", "20s")
	require.Equal(t, codeFailed, a.code, a.err)
	require.Contains(t, a.out, "Removed 0 keys")
	require.Contains(t, a.err, "A statement took longer than --timeout 20s")

	require.NoError(t, tx.Rollback(t.Context()))
	fine(t, db.URL, "migrate", "up")
	fine(t, db.URL, "reap")
}

// Of several that migrate at the same time one says that it did, and the others that there was nothing to do.
func TestMigrateUp_SixAtOnce(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema(), queuetest.NoMigrations())
	said := make([]answer, 6)
	var all sync.WaitGroup
	for i := range said {
		all.Go(func() { said[i] = do(t, db.URL, "migrate", "up") })
	}
	all.Wait()
	did := 0
	for _, a := range said {
		require.Zero(t, a.code, a.err)
		if a.out == "Schema \"onceq\" is at version 1 now; it was at 0.\n" {
			did++
			continue
		}
		require.Equal(t, "Schema \"onceq\" is at version 1 already.\n", a.out)
	}
	require.Equal(t, 1, did)
}

// Somebody has a table locked: doctor names the session first, and prints what it finds without that table.
func TestDoctor_ATableThatIsLocked(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, "mail", "why"))
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), `lock table onceq.jobs`)
	require.NoError(t, err)
	first := fmt.Sprintf("bad      lock: session %d (", tx.Conn().PgConn().PID())
	require.Eventually(t, func() bool {
		a := do(t, db.URL, "doctor", "--timeout", "10s")
		require.Equal(t, codeFindings, a.code, a.err)
		return strings.HasPrefix(a.out, first) && strings.Contains(a.out, "paused: queue \"mail\"") && strings.Contains(a.out, "unanswered: the question about the tables had no answer within 1s")
	}, 3*time.Minute, time.Millisecond)
}

// A killed worker is trouble only for the queues that no other one serves. What a finding is about is in fields, too.
func TestDoctor_KilledWorkers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	_, err := db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
select n::bigint << 32, 60000000, now() - interval '2 hours', now() - ago * interval '10 minutes', n, $1, 'web', 'v1', queues::jsonb, '{mail}'
  from (values (1, 0, '{"mail": 3}'), (2, 1, '{"mail": 3}'), (3, 1, '{"mail": 3, "gone": 1}')) w (n, ago, queues)`, onceq.SchemaVersion)
	require.NoError(t, err)
	workers := func() (all []finding) {
		var said struct{ Findings []finding }
		require.NoError(t, json.Unmarshal([]byte(do(t, db.URL, "doctor", "--json").out), &said))
		for _, f := range said.Findings {
			if f.What == "worker" && f.Level != "ok" {
				all = append(all, f)
			}
		}
		return all
	}
	all := workers()
	require.Len(t, all, 1)
	require.Equal(t, "gone", all[0].Queue)
	require.Contains(t, all[0].Detail, `no live worker serves queue "gone"; the last one, process 3 on web, has not been seen since`)
	require.False(t, all[0].Since.IsZero())
	require.Contains(t, do(t, db.URL, "doctor").out, "warning  worker: ")
	require.NotContains(t, do(t, db.URL, "doctor", "--level", "bad").out, "warning ")
	require.Equal(t, codeUsage, do(t, db.URL, "doctor", "--level", "fine").code)
	_, err = db.Pool.Exec(t.Context(), `delete from onceq.workers where process = 3`)
	require.NoError(t, err)
	require.Empty(t, workers())
}

// One question fails: what the others found is printed all the same, for people and for programs.
func TestDoctor_AQuestionThatFails(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, "mail", "why"))
	_, err := db.Pool.Exec(t.Context(), `alter table onceq.schedules rename column spec to away`)
	require.NoError(t, err)
	a := do(t, db.URL, "doctor")
	require.Equal(t, codeFailed, a.code, a.err)
	require.Contains(t, a.out, `paused: queue "mail"`)
	require.Contains(t, a.err, `does not exist`)
	a = do(t, db.URL, "doctor", "--json")
	require.Equal(t, codeFailed, a.code, a.err)
	require.Contains(t, a.err, `does not exist`)
	var said struct {
		OK       bool
		Findings []finding
	}
	require.NoError(t, json.Unmarshal([]byte(a.out), &said), a.out)
	require.False(t, said.OK)
	require.True(t, slices.ContainsFunc(said.Findings, func(f finding) bool { return f.What == "paused" && f.Queue == "mail" }), a.out)
	require.NoError(t, json.Unmarshal([]byte(do(t, db.URL, "doctor", "--level", "bad", "--json").out), &said))
	require.False(t, said.OK, "nobody knows what the question would have found")
}

// A worker whose handlers do not return, and whose process waits for connections, is in trouble wherever somebody looks.
func TestWorkers_InTrouble(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	_, err := db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds, stuck, pool)
select n, 60000000, now() - interval '2 hours', now() + interval '1 day', 40 + n, $1, 'web', 'v1', '{"mail": 3}', '{mail}', stuck::jsonb, pool::jsonb
  from (values (1, '[]', '{"conns": 8, "wait": 53000000000}'),
               (2, '[{"queue": "mail", "kind": "mail", "slots": 2, "job": 4711, "since": "2026-11-02T07:30:00Z"}]',
                   '{"conns": 8, "bound": ["mail"], "wait": 240000000000}')) w (n, stuck, pool)`, onceq.SchemaVersion)
	require.NoError(t, err)
	const stuck = `2 slots of queue "mail" are held since 2026-11-02 07:30:00 UTC by handlers of kind "mail" that do not return although their context has ended`
	out := fine(t, db.URL, "workers")
	require.Regexp(t, `(?m)^web +41 +ok `, out, "it waited for less than nine tenths of a minute")
	require.Regexp(t, `(?m)^web +42 +trouble `, out)
	require.Contains(t, out, "\nprocess 42 on web: "+stuck+"; its process waits for connections of its pool of 8: 4m0s in a minute, added up\n")
	require.NotContains(t, out, "process 41 on web: ")

	var said struct {
		Workers  []onceqops.WorkerInfo
		Findings []finding
	}
	require.NoError(t, json.Unmarshal([]byte(fine(t, db.URL, "workers", "--json")), &said))
	require.Len(t, said.Workers, 2)
	require.Empty(t, said.Workers[0].Stuck)
	since := time.Date(2026, 11, 2, 7, 30, 0, 0, time.UTC)
	require.Equal(t, []onceqops.StuckHandlers{{Queue: "mail", Kind: "mail", Slots: 2, Job: 4711, Since: since}}, said.Workers[1].Stuck)
	require.Equal(t, onceqops.WorkerPool{Conns: 8, Bound: []string{"mail"}, Wait: 4 * time.Minute}, said.Workers[1].Pool)

	a := do(t, db.URL, "doctor")
	require.Equal(t, codeFindings, a.code)
	require.Contains(t, a.out, "warning  handler: in process 42 on web, "+stuck+"\n         end that process: ")
	require.Contains(t, a.out, "warning  pool: process 42 on web waits for connections of its pool of 8: 4m0s in the last minute, added up\n         raise the pool's MaxConns")
	require.NoError(t, json.Unmarshal([]byte(do(t, db.URL, "doctor", "--json").out), &said))
	i := slices.IndexFunc(said.Findings, func(f finding) bool { return f.What == "handler" })
	require.GreaterOrEqual(t, i, 0)
	f := said.Findings[i]
	require.Equal(t, []any{"warning", "mail", "mail", int64(4711), since}, []any{f.Level, f.Queue, f.Kind, f.Job, f.Since})

	// Where it is the only one that serves the queue, and has no slot left, jobs stand still.
	_, err = db.Pool.Exec(t.Context(), `update onceq.workers set stuck = jsonb_set(stuck, '{0,slots}', '3') where id = 2`)
	require.NoError(t, err)
	require.Contains(t, do(t, db.URL, "doctor").out, "warning  handler: in process 42 on web, 3 slots")
	_, err = db.Pool.Exec(t.Context(), `delete from onceq.workers where id = 1`)
	require.NoError(t, err)
	a = do(t, db.URL, "doctor", "--level", "bad")
	require.Equal(t, codeFindings, a.code)
	require.Contains(t, a.out, "bad      handler: in process 42 on web, 3 slots")
	require.NotContains(t, a.out, "warning ")
}

// Rows that are always there, and that somebody has deleted: doctor names them, and puts back those of lanes.
func TestDoctor_RowsThatAreMissing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	_, err := db.Pool.Exec(t.Context(), `delete from onceq.lane_locks`)
	require.NoError(t, err)
	a := do(t, db.URL, "doctor")
	require.Equal(t, codeFindings, a.code)
	require.Contains(t, a.out, "bad      missing_rows: rows of lane_locks or lane_calls are missing")
	require.Contains(t, a.out, "onceq check puts them back")
	require.NotContains(t, do(t, db.URL, "doctor").out, "missing_rows")
	_, err = db.Pool.Exec(t.Context(), `delete from onceq.meta`)
	require.NoError(t, err)
	a = do(t, db.URL, "doctor")
	require.Contains(t, a.out, `bad      missing_rows: the table meta of schema "onceq" is empty`)
	require.Contains(t, a.out, `insert into onceq.meta (version) values (1)`)
	a = do(t, db.URL, "check")
	require.Contains(t, a.err, `insert into onceq.meta (version) values (1)`)
	_, err = db.Pool.Exec(t.Context(), `insert into onceq.meta (version) values (1)`)
	require.NoError(t, err)
	fine(t, db.URL, "check")
}

// One table is gone: whoever needs it says which, and what to do, and doctor looks at the others all the same.
func TestDoctor_ATableThatIsMissing(t *testing.T) {
	t.Parallel()
	for table, asks := range map[string][]string{
		"actions": {"actions"}, "queues": {"queues"}, "job_waits": {"jobs", "list"}, "schedules": {"schedules", "list"}, "meta": {"queues"},
	} {
		db := queuetest.New(t, schema(), queuetest.NoCheck())
		require.NoError(t, db.Queue.PauseQueue(t.Context(), db.Pool, "mail", "why"))
		_, err := db.Pool.Exec(t.Context(), `drop table onceq.`+table+` cascade`)
		require.NoError(t, err)
		for _, args := range [][]string{asks, {"check"}} {
			a := do(t, db.URL, args...)
			require.Equal(t, codeSchema, a.code, "%v: %s%s", args, a.out, a.err)
			require.Contains(t, a.err, `table `+table+` of schema "onceq" is missing`)
			require.Contains(t, a.err, "restore it from a backup")
			require.NotContains(t, a.err, "no onceq tables")
		}
		a := do(t, db.URL, "doctor")
		require.Equal(t, codeFindings, a.code, "%s: %s%s", table, a.out, a.err)
		require.Contains(t, a.out, `bad      tables: table `+table+` of schema "onceq" is missing`)
		require.Contains(t, a.out, "onceq migrate sql says")
		require.Contains(t, a.out, `paused: queue "mail"`)
	}
}

// A limit that no job has may have its name spelt wrong.
func TestLimitsSet_OfANameThatNobodyUses(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	for range 2 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1, Limit: "bank"})
		require.NoError(t, err)
	}
	require.Contains(t, fine(t, db.URL, "limits", "set", "bnak", "--at-once", "3"),
		`No job has limit "bnak" now: is that its name? Jobs wait for these, which nobody has set: "bank".`)
	require.NotContains(t, fine(t, db.URL, "limits", "set", "bank", "--at-once", "3"), "No job has")
	require.NotContains(t, fine(t, db.URL, "limits", "set", "bnak", "--at-once", "2"), "No job has")
}

// So may a lane, and a family of lanes.
func TestLanesLimit_OfANameThatNobodyUses(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	for range 2 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "book", Payload: 1, Lane: "account-7"})
		require.NoError(t, err)
	}
	require.Contains(t, fine(t, db.URL, "lanes", "limit", "bok/", "3"),
		`No job waits for a lane of family "bok", and no worker has a kind of that name: is that its name? Jobs wait for lanes of "book/".`)
	require.Contains(t, fine(t, db.URL, "lanes", "limit", "book/acount-7", "3"), `No job waits for that lane now; jobs do wait for "book/account-7".`)
	require.NotContains(t, fine(t, db.URL, "lanes", "limit", "book/account-7", "3"), "No job waits")
	require.NotContains(t, fine(t, db.URL, "lanes", "limit", "book/", "3"), "No job waits")
	require.NotContains(t, fine(t, db.URL, "lanes", "limit", "bok/"), "No job waits", "nothing was set")
	_, err := db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (1, 60000000, now(), now(), 1, $1, 'web', 'v1', '{}', '{bok}')`, onceq.SchemaVersion)
	require.NoError(t, err)
	require.NotContains(t, fine(t, db.URL, "lanes", "limit", "bok/", "3"), "No job waits")
}
