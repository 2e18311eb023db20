package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// What the test reaper asks for.
const (
	reapRate    = 20_000 // keyed jobs a second
	reapParts   = 6      // of the time, after which sizes are read
	reapSamples = 25     // counts of the keys in each part
	reapReached = "keys taken for seconds"
	reapRemoves = "a pass that removes a tenth as many"
	lateRate    = 100 // keyed jobs a second beside fences that stay
)

// reaperTrials show that one Reaper keeps up with keys that are free soon, what a pass costs beside fences that stay and with
// as many that go, and how late keys go beside those that stay.
func reaperTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name != "onceq" {
			continue
		}
		stay := func(ctx context.Context, r *room) error {
			if err := addFences(ctx, ours(r), b.sizes.fences, 24*time.Hour); err != nil {
				return err
			}
			_, err := ours(r).pool.Exec(ctx, "vacuum onceq.job_fences")
			return err
		}
		trials = append(trials,
			trial{test: "reaper", variant: reapReached, peer: p, measure: func(ctx context.Context, r *room) ([]figure, error) {
				return keepUp(ctx, r, b.sizes.reaping)
			}},
			trial{test: "reaper", variant: "pass", peer: p, prepare: stay, measure: func(ctx context.Context, r *room) ([]figure, error) {
				return passes(ctx, r, b.sizes.fences)
			}},
			trial{test: "reaper", variant: lateName(b.sizes.fences), peer: p, prepare: stay, measure: func(ctx context.Context, r *room) ([]figure, error) {
				return late(ctx, r, b.sizes.fences)
			}})
	}
	return trials
}

// addFences adds completed keys whose window is over after left. They ascend, so that they come into the index as fast as can be.
func addFences(ctx context.Context, q *onceqQueue, n int, left time.Duration) error {
	const add = `
insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, finished_at, lifetime)
select 0, 'noop', $3::text || lpad(n::text, 12, '0'), 3, -n, 1, now(), now() - interval '1 day', 86400000 + $2::bigint from generate_series(1, $1::bigint) n`
	_, err := q.pool.Exec(ctx, add, n, left.Milliseconds(), left.String())
	return err
}

// reapedName is the name of what there is of keys, table or index after a part of the time.
func reapedName(took time.Duration, part int, what string) string {
	return fmt.Sprintf("after %s: %s", (took * time.Duration(part) / reapParts).Round(time.Second), what)
}

// keepUp enqueues and drains keyed jobs at once, with one Reaper. A key is free a second after its window of two. The table and
// its index never shrink, so they are read at the end of each part. The keys rise between two passes and fall with each, so they are
// counted again and again, and the mean counts.
func keepUp(ctx context.Context, r *room, took time.Duration) ([]figure, error) {
	q := ours(r)
	kind := keyedKind
	kind.Window = 2 * time.Second
	reaper, err := onceq.NewReaper(q.Queue, onceq.ReaperConfig{Every: took / 30, Grace: time.Second})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- reaper.Run(ctx) }()
	end := func() error { cancel(); return <-ended }
	var sizes []figure
	var sum float64
	rate, err := q.steady(ctx, kind, reapRate, took, reapParts*reapSamples, func(n int) error {
		const read = `
select pg_table_size(t) / 1048576.0, pg_indexes_size(t) / 1048576.0, (select count(*) from onceq.job_fences)
  from (select 'onceq.job_fences'::regclass as t) t`
		var heap, indexes, rows float64
		if err := q.pool.QueryRow(ctx, read).Scan(&heap, &indexes, &rows); err != nil {
			return err
		}
		if sum += rows; n%reapSamples > 0 {
			return nil
		}
		part := n / reapSamples
		sizes = append(sizes, figure{variant: reapedName(took, part, "table"), unit: "MiB", value: heap},
			figure{variant: reapedName(took, part, "index"), unit: "MiB", value: indexes},
			figure{variant: reapedName(took, part, "keys"), unit: "rows", value: sum / reapSamples})
		sum = 0
		return nil
	})
	if stopped := end(); err == nil {
		err = stopped
	}
	return append([]figure{{variant: reapReached, unit: "jobs/s", value: rate}}, sizes...), err
}

// passes measures a pass that finds nothing to remove among n fences, and one that removes a tenth as many.
func passes(ctx context.Context, r *room, n int) ([]figure, error) {
	q := ours(r)
	reaper, err := onceq.NewReaper(q.Queue, onceq.ReaperConfig{Grace: time.Millisecond})
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if _, err := reaper.RunOnce(ctx); err != nil {
		return nil, err
	}
	looked := time.Since(began)
	if err := addFences(ctx, q, n/10, -time.Hour); err != nil {
		return nil, err
	}
	began = time.Now()
	sum, err := reaper.RunOnce(ctx)
	if err != nil {
		return nil, err
	}
	took := time.Since(began)
	return []figure{
		{variant: "a pass over " + count(n) + " fences that stay", unit: "s", value: looked.Seconds()},
		{variant: "the wait after it", unit: "s", value: 100 * looked.Seconds()},
		{variant: reapRemoves, unit: "keys/s", value: float64(sum.Fences) / took.Seconds()},
	}, nil
}

func lateName(n int) string { return "how late keys go beside " + count(n) + " fences that stay" }

// late completes keyed jobs with a window of two seconds beside n fences that stay, while a Reaper runs as it does by default,
// but for a grace time of a second. The lateness of a key is the time from when it may go to the statement that removes it. What
// counts are the keys that may go after the first pass and that the second one removes: the first one does not wait for a rest.
func late(ctx context.Context, r *room, n int) ([]figure, error) {
	q := ours(r)
	const (
		grace = time.Second
		watch = `
create table removed (at timestamptz, due timestamptz);
create function note_removed() returns trigger language plpgsql as $$
begin
  insert into removed select statement_timestamp(), finished_at + lifetime * interval '1 millisecond' from gone;
  return null;
end $$;
create trigger note_removed after delete on onceq.job_fences referencing old table as gone for each statement execute function note_removed()`
		read = `
select extract(epoch from at - due)::float8 - $1 from removed
 where due > $2::timestamptz - $1 * interval '1 second' and at <= $3::timestamptz`
	)
	if _, err := q.pool.Exec(ctx, watch); err != nil {
		return nil, err
	}
	passed := make(chan time.Time, 1)
	hooked, err := onceq.New(q.pool, &onceq.Config{Logger: quiet, Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
		if e.Type == onceq.EventReaped && e.Kind == "fences" {
			passed <- time.Now()
		}
	})})
	if err != nil {
		return nil, err
	}
	reaper, err := onceq.NewReaper(hooked, onceq.ReaperConfig{Grace: grace})
	if err != nil {
		return nil, err
	}
	kind := keyedKind
	kind.Window = 2 * time.Second
	stop, err := q.run(ctx, onceq.WorkerConfig{}, kind.Handle(func(context.Context, *onceq.Lease, Task) error { return nil }))
	if err != nil {
		return nil, err
	}
	defer stop()
	working, cancel := context.WithCancel(ctx)
	defer cancel()
	reaped, loaded := make(chan error, 1), make(chan error, 1)
	go func() { reaped <- reaper.Run(working) }()
	go func() {
		loaded <- paced(working, 1<<40, 1, lateRate, func(n int) error {
			_, err := q.Enqueue(working, q.pool, kind.Job(Task{n}))
			return err
		})
	}()
	var ends [2]time.Time
	for i := range ends {
		select {
		case ends[i] = <-passed:
		case err := <-loaded:
			return nil, err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	cancel()
	<-loaded // it says that it was cancelled
	if err := <-reaped; err != nil {
		return nil, err
	}
	rows, err := q.pool.Query(ctx, read, grace.Seconds(), ends[0], ends[1])
	if err != nil {
		return nil, err
	}
	seconds, err := pgx.CollectRows(rows, pgx.RowTo[float64])
	if err != nil || len(seconds) == 0 {
		return nil, errors.Join(err, errors.New("the second pass removed no key"))
	}
	all := make([]time.Duration, len(seconds))
	for i, s := range seconds {
		all[i] = time.Duration(s * float64(time.Second))
	}
	f := latencyFigure(lateName(n), all)
	f.unit, f.value, f.p99 = "s", f.value/1000, f.p99/1000
	return []figure{f, {variant: "the latest of them", unit: "s", value: all[len(all)-1].Seconds()}}, nil
}
