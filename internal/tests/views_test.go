package tests

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// The views say of jobs, queues, effects and keys what the library says.
func TestViews(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx, q := t.Context(), db.Queue

	// A job in every state.
	kind := onceq.Kind[string]{Name: "work", Key: func(p string) string { return p }, Keep: time.Hour,
		Backoff: func(int, error) time.Duration { return time.Hour }}
	enqueue := func(what string, delay time.Duration) int64 {
		j := kind.Job(what)
		j.Delay = delay
		return repairEnqueue(t, db, j)
	}
	for _, what := range []string{"completed", "dead", "held", "retrying"} {
		enqueue(what, 0)
	}
	handler := kind.Handle(func(ctx context.Context, l *onceq.Lease, what string) error {
		switch what {
		case "dead":
			return onceq.Fatal(errors.New("no such address"))
		case "held":
			_, err := onceq.Once(ctx, l, "a/b", func(context.Context, string) (int, error) { return 0, errors.New("time-out") }, onceq.OnUncertain(onceq.Hold()))
			return err
		case "retrying":
			if _, err := onceq.Once(ctx, l, "sure", func(context.Context, string) (int, error) { return 7, nil }); err != nil {
				return err
			}
			_, err := onceq.Once(ctx, l, "unsure", func(context.Context, string) (int, error) { return 0, errors.New("reset") })
			return err
		}
		return nil
	})
	db.Drain(handler)
	wantState(t, onceq.StateRetrying)(onceqops.New(q).Retry(ctx, db.Pool, must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateRetrying}, Limit: 1, After: 4}))[0].ID))
	db.Drain(handler)
	running := enqueue("running", 0)
	for _, l := range must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{Limit: 10})) {
		if l.ID != running {
			require.NoError(t, l.Snooze(ctx, time.Hour))
		}
	}
	enqueue("waiting", 0)
	enqueue("delayed", time.Hour)
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, enqueue("cancelled", time.Hour)))

	for _, j := range must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{})) {
		var queue, kind, state, scope, key string
		var lastError *string
		var attempts, max, lost int
		var finished *time.Time
		require.NoError(t, db.Pool.QueryRow(ctx, `select queue, kind, state, scope, key, attempts, max_attempts, lost, finished_at, last_error from onceq.v_jobs where id = $1`, j.ID).
			Scan(&queue, &kind, &state, &scope, &key, &attempts, &max, &lost, &finished, &lastError))
		require.Equal(t, fmt.Sprint(j.Queue, j.Kind, j.State, j.Scope, j.Key, j.Attempts, j.MaxAttempts, j.Lost, j.State.Finished()),
			fmt.Sprint(queue, kind, state, scope, key, attempts, max, lost, finished != nil))
		require.Equal(t, key, state, "each job is in the state that its key names")
		if len(j.Errors) > 0 {
			require.Equal(t, j.Errors[len(j.Errors)-1].Error, *lastError)
		}

		for _, e := range must[[]onceqops.EffectInfo](t)(onceqops.New(q).Effects(ctx, db.Pool, j.ID)) {
			var state, kind string
			require.NoError(t, db.Pool.QueryRow(ctx, `select state, kind from onceq.v_effects where job_id = $1 and name = $2`, j.ID, e.Name).Scan(&state, &kind))
			require.Equal(t, e.State+" work", state+" "+kind)
		}
	}
	lines := func(sql string) []string {
		rows, err := db.Pool.Query(ctx, sql)
		require.NoError(t, err)
		return must[[]string](t)(pgx.CollectRows(rows, pgx.RowTo[string]))
	}
	require.Equal(t, []string{"a/b held", "sure completed", "unsure uncertain"}, lines(`select name || ' ' || state from onceq.v_effects order by name`))
	require.Equal(t, []string{"default 1 1 1 1 1 1 1 1 true"}, lines(`
		select concat_ws(' ', queue, waiting, running, retrying, delayed, dead, held, completed, cancelled, (oldest_due <= now())::text) from onceq.v_queues`))
	require.Equal(t, []string{"cancelled cancelled false", "completed completed true", "dead dead true", "delayed queued", "held held", "retrying queued", "running queued", "waiting queued"},
		lines(`select concat_ws(' ', key, state, (free_at > now())::text) from onceq.v_keys where class = 'job' order by key`))
	require.NoError(t, must[[]*onceq.Lease](t)(q.Claim(ctx, onceq.ClaimOptions{}))[0].Complete(ctx, nil))

	// Who works, what is paused, what people did, and what was counted.
	require.NoError(t, q.PauseKind(ctx, db.Pool, "mail", "ada: provider down"))
	require.Equal(t, []string{"kind mail ada: provider down"}, lines(`select concat_ws(' ', what, name, note) from onceq.v_pauses`))
	must[int64](t)(onceqops.New(q).RecordAction(ctx, db.Pool, onceqops.Action{Who: "ada", What: "redrive", JobID: 7, About: "a", Why: "b", Outcome: "c"}))
	require.Equal(t, []string{"ada redrive 7 a b c"}, lines(`select concat_ws(' ', who, what, job_id, about, why, outcome) from onceq.v_actions`))
	require.Equal(t, []string{"default work 5 1 2 1"}, lines(`select concat_ws(' ', queue, kind, sum(started), sum(completed), sum(failed), sum(dead)) from onceq.v_counts group by queue, kind`))
	sqlRun(t, db, `insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (1, 1, now(), now() - interval '4 minutes', 42, 1, 'web', 'v1', '{"mail": 3}', '{work}')`)
	require.Equal(t, []string{"web 42 v1 true"}, lines(`select concat_ws(' ', host, process, version, stale::text) from onceq.v_workers`))
	sqlRun(t, db, `insert into onceq.schedules (name, owner, spec, zone, missed) values ('s', 'app', '@daily', 'UTC', 'none')`)
	sqlRun(t, db, `insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome) select 's', at, at, 1, o from (values (now() - interval '1 day', 'missed'), (now(), 'fired')) t (at, o)`)
	require.Equal(t, []string{"s app @daily fired"}, lines(`select concat_ws(' ', name, owner, spec, last_outcome) from onceq.v_schedules`))
}

// A role that may read the views alone reads them all.
func TestViews_ForAReader(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	require.NoError(t, migrations.Up(t.Context(), conn, "onceq"))
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	for _, sql := range []string{
		`create role reader_of_views`, `grant usage on schema onceq to reader_of_views`,
		`grant select on onceq.v_jobs, onceq.v_queues, onceq.v_backlog, onceq.v_effects, onceq.v_keys, onceq.v_workers, onceq.v_pauses, onceq.v_schedules, onceq.v_actions, onceq.v_counts, onceq.v_groups, onceq.v_members to reader_of_views`, `set local role reader_of_views`,
		`select * from onceq.v_jobs`, `select * from onceq.v_queues`, `select * from onceq.v_backlog`, `select * from onceq.v_effects`, `select * from onceq.v_keys`,
		`select * from onceq.v_workers`, `select * from onceq.v_pauses`, `select * from onceq.v_schedules`, `select * from onceq.v_actions`, `select * from onceq.v_counts`,
		`select * from onceq.v_groups`, `select * from onceq.v_members`,
	} {
		_, err := tx.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	_, err = tx.Exec(t.Context(), `select * from onceq.jobs`)
	require.ErrorContains(t, err, "permission denied")
}

// The query of docs/run/production.md, as an autoscaler sends it, counts what a worker could start now and what runs.
func TestViews_WhatAnAutoscalerAsks(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	page, err := os.ReadFile("../../docs/run/production.md")
	require.NoError(t, err)
	query := regexp.MustCompile(`(?m)^ +query: "(.*)"$`).FindStringSubmatch(string(page))
	require.NotNil(t, query, "docs/run/production.md has no query")
	backlog := func() (n int) {
		t.Helper()
		require.NoError(t, db.Pool.QueryRow(ctx, query[1]).Scan(&n)) // one row, and one number in it
		return n
	}
	require.Zero(t, backlog(), "no job, and a row all the same")
	job := onceq.Job{Kind: "send", Queue: "mail"}
	later := job
	later.RunAt = time.Now().Add(time.Hour)
	elsewhere := onceq.Job{Kind: "send"}
	laned := job
	laned.Lane = "ada"
	must[[]onceq.Result](t)(db.Queue.EnqueueMany(ctx, db.Pool, []onceq.Job{job, job, job, later, elsewhere}))
	for range 3 {
		must[onceq.Result](t)(db.Queue.Enqueue(ctx, db.Pool, laned))
	}
	counts := func() (n [3]int) {
		t.Helper()
		require.NoError(t, db.Pool.QueryRow(ctx, `select due, running, blocked from onceq.v_backlog where queue = 'mail'`).Scan(&n[0], &n[1], &n[2]))
		return n
	}
	require.Equal(t, [3]int{3, 0, 3}, counts())
	require.Equal(t, 4, backlog(), "those of a lane need one process that lets them in")
	require.NoError(t, db.Queue.PauseKind(ctx, db.Pool, "send", ""))
	require.Equal(t, [3]int{0, 0, 3}, counts(), "what is paused needs no worker")
	must[bool](t)(db.Queue.ResumeKind(ctx, db.Pool, "send"))
	require.NoError(t, db.Queue.PauseQueue(ctx, db.Pool, "mail", ""))
	require.Equal(t, [3]int{0, 0, 3}, counts())
	must[bool](t)(db.Queue.ResumeQueue(ctx, db.Pool, "mail"))
	leases := must[[]*onceq.Lease](t)(db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "mail", Limit: 10}))
	require.Equal(t, [3]int{0, len(leases), 6 - len(leases)}, counts())
	require.Equal(t, len(leases)+1, backlog(), "no process with running jobs is taken away")
}
