package tests

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func fenceExec(t *testing.T, db onceq.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func fenceGet[T any](t *testing.T, db onceq.DB, sql string, args ...any) T {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// fenceLapse lets the lease of every claim run out, and the grace time before Ask as well.
func fenceLapse(t *testing.T, db *queuetest.DB) {
	t.Helper()
	fenceExec(t, db.Pool, `update onceq.job_fences set leased_until = leased_until - interval '1 hour' where class > 0`)
}

func fenceOf(t *testing.T, db *queuetest.DB, spec onceq.FenceSpec) *onceq.Fence {
	t.Helper()
	f, err := db.Queue.Fence(spec)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func fenceClaim(t *testing.T, f *onceq.Fence, db onceq.DB) *onceq.FenceLease {
	t.Helper()
	c, err := f.Claim(t.Context(), db)
	if err != nil || c.Replayed {
		t.Fatalf("Claim: %+v, %v; want it to be mine", c, err)
	}
	return c
}

func fenceWant(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: %v; want %v", what, err, want)
	}
}

func fenceOK(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func TestFence_RunAgainOnlyWithinItsWindowFromTheFirstIntent(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	f := fenceOf(t, db, onceq.FenceSpec{Key: "k", Policy: onceq.RunAgain(3 * time.Hour)})
	fenceClaim(t, f, nil)
	for range 2 { // a take-over does not renew the window
		fenceExec(t, db.Pool, `update onceq.job_fences set created_at = created_at - interval '80 minutes'`)
		fenceLapse(t, db)
		fenceClaim(t, f, nil)
	}
	fenceExec(t, db.Pool, `update onceq.job_fences set created_at = created_at - interval '80 minutes'`)
	fenceLapse(t, db)
	_, err := f.Claim(t.Context(), nil)
	fenceWant(t, "after the window", err, onceq.ErrHeld)
	fenceOK(t, "Resolve", f.Resolve(t.Context(), nil, onceq.NeverApplied()))
	fenceClaim(t, f, nil) // counts as a first intent again
	fenceWant(t, "Resolve in flight", f.Resolve(t.Context(), nil, onceq.Applied(1)), onceq.ErrNotFound)
	if n := fenceGet[int](t, db.Pool, `select count(*)::int from onceq.job_fences where created_at > now() - interval '1 minute'`); n != 1 {
		t.Error("a claim of a free key kept the old intent's time")
	}
}

// Whoever was told that the outcome is unknown, or that a person decides, gets the result when he comes back, also of a key whose
// window is over as soon as the work is finished.
func TestFence_WorkInDoubtThatWasDoneIsNotRepeated(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for name, found := range map[string]func(f *onceq.Fence, c *onceq.FenceLease, db *queuetest.DB) error{
		"applied": func(f *onceq.Fence, _ *onceq.FenceLease, _ *queuetest.DB) error {
			return f.Resolve(ctx, nil, onceq.Applied("done"))
		},
		"complete": func(_ *onceq.Fence, c *onceq.FenceLease, _ *queuetest.DB) error { return c.Complete(ctx, nil, "done") },
		"complete twice": func(_ *onceq.Fence, c *onceq.FenceLease, _ *queuetest.DB) error {
			return errors.Join(c.Complete(ctx, nil, "done"), c.Complete(ctx, nil, "done"))
		},
		"in a batch": func(_ *onceq.Fence, c *onceq.FenceLease, db *queuetest.DB) error {
			var b pgx.Batch
			return errors.Join(c.CompleteInBatch(&b, "done"), db.Pool.SendBatch(ctx, &b).Close())
		},
		"though said to be not done": func(f *onceq.Fence, c *onceq.FenceLease, _ *queuetest.DB) error {
			return errors.Join(f.Resolve(ctx, nil, onceq.NeverApplied()), c.Complete(ctx, nil, "done"))
		},
	} {
		for _, asked := range []bool{false, true} {
			for window, taken := range map[time.Duration]time.Duration{
				onceq.UntilFinished: onceq.DefaultWindow, time.Hour: onceq.DefaultWindow, 48 * time.Hour: 48 * time.Hour, onceq.Forever: 10_000 * time.Hour,
			} {
				t.Run(fmt.Sprint(name, " ", asked, " ", window), func(t *testing.T) {
					t.Parallel()
					conformance.Few(t, 4)
					db := queuetest.New(t)
					spec := onceq.FenceSpec{Key: "k", Window: window, Policy: onceq.Hold()}
					f := fenceOf(t, db, spec)
					c := fenceClaim(t, f, nil)
					fenceOK(t, "Uncertain", c.Uncertain(ctx, nil, errors.New("time-out after the charge")))
					if asked {
						_, err := f.Claim(ctx, nil)
						fenceWant(t, "in doubt", err, onceq.ErrHeld)
					}
					fenceOK(t, name, found(f, c, db))
					db.Advance(taken - time.Minute)
					got, err := onceq.Do(ctx, db.Queue, spec, func(context.Context, *onceq.FenceLease) (string, error) { return "done again", nil })
					if err != nil || got != "done" {
						t.Fatal(got, err)
					}
					if window == onceq.Forever {
						return
					}
					db.Advance(2 * time.Minute)
					fenceClaim(t, f, nil)
				})
			}
		}
	}
}

// The lease has run out, and somebody else was told that the outcome is unknown, before the first one's late success.
func TestFence_ALateCompleteIsFoundByWhoAsked(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := queuetest.New(t)
	spec := onceq.FenceSpec{Key: "k", Window: onceq.UntilFinished, Policy: onceq.Ask(func(context.Context, string) (any, bool, error) {
		return nil, false, errors.New("no idea")
	})}
	f := fenceOf(t, db, spec)
	c := fenceClaim(t, f, nil)
	db.Advance(time.Hour)
	_, err := f.Claim(ctx, nil)
	fenceWant(t, "in doubt", err, onceq.ErrUncertain)
	fenceOK(t, "Complete", c.Complete(ctx, nil, "done"))
	got, err := onceq.Do(ctx, db.Queue, spec, func(context.Context, *onceq.FenceLease) (string, error) { return "done again", nil })
	if err != nil || got != "done" {
		t.Fatal(got, err)
	}
}

// ⚠ What is decided about a fence in doubt holds only as long as nobody has taken it over since it was read. Otherwise a provider
// would be asked while the other's call is under way, and its "no" would prove nothing.
func TestTrap_WhatIsDecidedOfAFenceHoldsForTheTokenThatWasRead(t *testing.T) {
	t.Parallel()
	again := func(err error) func(context.Context, *onceq.FenceLease) (string, error) {
		return func(context.Context, *onceq.FenceLease) (string, error) { return "", err }
	}
	asked := 0
	for before, c := range map[string]struct {
		policy onceq.Policy
		want   error
	}{
		".claim_fence(":         {onceq.Ask(func(context.Context, string) (any, bool, error) { asked++; return nil, false, nil }), onceq.ErrInFlight},
		"set state = 6, detail": {onceq.Hold(), onceq.ErrHeld},
	} {
		other := func() {}
		db := queuetest.New(t, queuetest.PoolConfig(func(cfg *pgxpool.Config) {
			cfg.ConnConfig.Tracer = &statementHook{before: func(sql string) {
				if strings.Contains(sql, before) {
					run := other
					other = func() {}
					run()
				}
			}}
		}))
		spec := onceq.FenceSpec{Key: "k", Policy: onceq.RunAgain(onceq.Forever)}
		fenceClaim(t, fenceOf(t, db, spec), nil)
		fenceLapse(t, db)
		took := false
		other = func() {
			took = true
			_, err := onceq.Do(t.Context(), db.Queue, spec, again(errors.New("a time-out of the other's call")))
			fenceWant(t, "the other's call", err, onceq.ErrUncertain)
		}
		late := spec
		late.Policy = c.policy
		_, err := onceq.Do(t.Context(), db.Queue, late, again(errors.New("done again")))
		fenceWant(t, before, err, c.want)
		if !took || !strings.Contains(err.Error(), "a time-out of the other's call") {
			t.Errorf("%s: the other took it %t, and then: %v", before, took, err)
		}
	}
	if asked > 0 {
		t.Error("the provider was asked while the other's call may have been under way")
	}
}

func TestFence_TakenTable(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck()) // the test makes rows that never come about otherwise
	states := []string{"queued", "claimed", "uncertain", "completed", "dead", "cancelled", "held"}
	for _, class := range []onceq.Class{onceq.ClassApplication, onceq.ClassRequest} {
		for state, name := range states {
			for _, life := range []struct {
				name       string
				lifetime   int64
				finishedAt string
				free       bool
			}{
				{"until finished", 0, "now()", true},
				{"in the window", 1000, "now() + interval '1 hour'", false},
				{"after the window", 1000, "now() - interval '1 hour'", true},
				{"not started", 1000, "null::timestamptz", false},
				{"for ever", -1, "now() - interval '1000 years'", false},
			} {
				key := fmt.Sprintf("%d %s %s", class, name, life.name)
				fenceExec(t, db.Pool, `insert into onceq.job_fences (class, scope, key, state, token, holder, leased_until, created_at, lifetime, finished_at)
					values ($1, 'default', $2, $3, 1 << 20, 7, now() + interval '1 hour', now(), $4, `+life.finishedAt+`)`, class, key, state, life.lifetime)
				c, err := fenceOf(t, db, onceq.FenceSpec{Class: class, Key: key, Policy: onceq.Hold()}).Claim(t.Context(), nil)
				free := err == nil && !c.Replayed
				finished := name == "completed" || name == "dead" || name == "cancelled"
				if want := finished && life.free; free != want {
					t.Errorf("%s: free %v (%v), want %v", key, free, err, want)
				}
			}
		}
	}
}

func TestFence_TwoConcurrentClaimsGiveOneHolder(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	f := fenceOf(t, db, onceq.FenceSpec{Key: "k"})
	for round := range 4 { // absent, lease run out, released, window over
		var wg sync.WaitGroup
		var mu sync.Mutex
		var mine []*onceq.FenceLease
		for range 8 {
			wg.Go(func() {
				c, err := f.Claim(context.Background(), nil)
				mu.Lock()
				defer mu.Unlock()
				if err == nil && !c.Replayed {
					mine = append(mine, c)
				} else if !errors.Is(err, onceq.ErrInFlight) {
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		wg.Wait()
		if len(mine) != 1 {
			t.Fatalf("round %d: %d holders", round, len(mine))
		}
		switch round {
		case 0:
			fenceLapse(t, db)
		case 1:
			fenceOK(t, "Complete", mine[0].Complete(t.Context(), nil, nil))
			fenceExec(t, db.Pool, `update onceq.job_fences set finished_at = finished_at - interval '25 hours'`)
		case 2:
			fenceOK(t, "Release", mine[0].Release(t.Context(), nil))
		}
	}
}

func TestTrapFencesInEveryQueryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes() {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }))
			ctx := t.Context()
			spec := onceq.FenceSpec{Key: `k'"\`, Payload: []byte{0, 1}}
			f := fenceOf(t, db, spec)
			c := fenceClaim(t, f, nil)
			fenceOK(t, "Extend", c.Extend(ctx, time.Minute))
			fenceOK(t, "Release", c.Release(ctx, nil))
			c = fenceClaim(t, f, nil)
			fenceOK(t, "Uncertain", c.Uncertain(ctx, nil, errors.New(`what's "\ up`)))
			fenceClaim(t, f, nil)
			fenceLapse(t, db)
			spec.Policy = onceq.Hold()
			_, err := fenceOf(t, db, spec).Claim(ctx, nil)
			fenceWant(t, "hold", err, onceq.ErrHeld)
			fenceOK(t, "Resolve", f.Resolve(ctx, nil, onceq.NeverApplied()))
			c = fenceClaim(t, f, nil)
			b := &pgx.Batch{}
			fenceOK(t, "CompleteInBatch", c.CompleteInBatch(b, map[string]any{"it's": `"\`}))
			fenceOK(t, "batch", db.Pool.SendBatch(ctx, b).Close())
			done, err := f.Claim(ctx, nil)
			if err != nil || string(done.Result) != `{"it's": "\"\\"}` {
				t.Errorf("%+v, %v", done, err)
			}
			spec.Payload = []byte{0, 2}
			_, err = fenceOf(t, db, spec).Claim(ctx, nil)
			fenceWant(t, "mismatch", err, onceq.ErrMismatch)

			fenceJob(t, db, "j")
			l := fenceLease(t, db)
			v, err := onceq.Once(ctx, l, "e", func(context.Context, string) (int, error) { return 1, nil })
			if v != 1 || err != nil {
				t.Error(v, err)
			}
			l = fenceRedeliver(t, db)
			v, err = onceq.Once(ctx, l, "e", func(context.Context, string) (int, error) { return 2, nil })
			if v != 1 || err != nil {
				t.Error(v, err)
			}
			effects, err := onceqops.New(db.Queue).Effects(ctx, db.Pool, l.ID)
			if err != nil || len(effects) != 1 {
				t.Error(effects, err)
			}
		})
	}
}

// If a completion merely matched no row, the commit behind it would go through.
func TestTrapStaleFenceCompletionStopsTheCommitBehindItInAPipeline(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	fenceExec(t, db.Pool, `create table written (by text)`)
	f := fenceOf(t, db, onceq.FenceSpec{Key: "k"})
	stale := fenceClaim(t, f, nil)
	fenceLapse(t, db)
	holder := fenceClaim(t, f, nil)
	for _, c := range []*onceq.FenceLease{stale, holder} {
		b := &pgx.Batch{}
		b.Queue(`begin`)
		b.Queue(`insert into written values ($1)`, fmt.Sprint(c == holder))
		fenceOK(t, "CompleteInBatch", c.CompleteInBatch(b, 1))
		b.Queue(`commit`)
		conn, err := db.Pool.Acquire(t.Context())
		fenceOK(t, "acquire", err)
		err = conn.SendBatch(t.Context(), b).Close()
		if lost := onceq.LeaseLost(err); lost != (c == stale) {
			t.Errorf("batch: %v", err)
		}
		_, _ = conn.Exec(t.Context(), `rollback`)
		conn.Release()
	}
	if by := fenceGet[string](t, db.Pool, `select string_agg(by, ' ') from written`); by != "true" {
		t.Errorf("written by %s; the stale holder's commit went through", by)
	}
	var lost *onceq.LeaseError
	if err := stale.Complete(t.Context(), nil, 1); !errors.As(err, &lost) || lost.JobID != 0 || lost.Key != "k" || lost.Token != stale.Token {
		t.Errorf("stale Complete: %v", err)
	}
}

func TestFence_TokensGrowOverReleasePruningTakeOverAndALostSequence(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	f := fenceOf(t, db, onceq.FenceSpec{Key: "k", Window: onceq.UntilFinished})
	var last int64
	next := func(what string) *onceq.FenceLease {
		t.Helper()
		c := fenceClaim(t, f, nil)
		if c.Token <= last {
			t.Fatalf("after %s: token %d, not above %d", what, c.Token, last)
		}
		last = c.Token
		return c
	}
	c := next("nothing")
	fenceOK(t, "Release", c.Release(ctx, nil))
	c = next("release")
	fenceOK(t, "Complete", c.Complete(ctx, nil, 1))
	c = next("completion")
	fenceOK(t, "Complete", c.Complete(ctx, nil, 1))
	fenceExec(t, db.Pool, `delete from onceq.job_fences`)
	next("pruning")
	fenceLapse(t, db)
	next("running out")
	fenceExec(t, owner(t, db), `select setval('ids', 1)`)
	fenceLapse(t, db)
	next("the sequence forgot")
}

func TestFence_ReleaseAfterTakingOverADoubtfulClaimStaysUncertain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	f := fenceOf(t, db, onceq.FenceSpec{Key: "k"})
	first := fenceClaim(t, f, nil)
	fenceOK(t, "Uncertain", first.Uncertain(ctx, nil, errors.New("timed out")))
	second := fenceClaim(t, f, nil)
	fenceOK(t, "Release", second.Release(ctx, nil))
	_, err := fenceOf(t, db, onceq.FenceSpec{Key: "k", Policy: onceq.Hold()}).Claim(ctx, nil)
	fenceWant(t, "the first claim's effect may have happened", err, onceq.ErrHeld)
}

// Under row security, a row that stays invisible for ever may have taken the key.
func TestTrapInvisibleFenceIsANamedErrorNotALoop(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	f := fenceOf(t, db, onceq.FenceSpec{Key: "k", Window: time.Hour})
	fenceClaim(t, fenceOf(t, db, onceq.FenceSpec{Key: "k", Window: onceq.Forever}), nil)
	pool, schema := owner(t, db), pgx.Identifier{db.Schema}.Sanitize()
	role := "r_" + fenceGet[string](t, pool, `select md5(current_database())`)
	for _, sql := range []string{
		`create role ` + role, `grant usage on schema ` + schema + ` to ` + role,
		`grant all on all tables in schema ` + schema + ` to ` + role, `grant usage on sequence ids to ` + role,
		`alter table job_fences enable row level security`,
		`create policy p on job_fences using (lifetime > 0)`,
	} {
		fenceExec(t, pool, sql)
	}
	defer func() {
		fenceExec(t, pool, `drop owned by `+role)
		fenceExec(t, pool, `drop role `+role)
	}()
	_ = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		fenceExec(t, tx, `set local role `+role)
		_, err := f.Claim(t.Context(), tx)
		fenceWant(t, "Claim", err, onceq.ErrKeyUnsettled)
		return err
	})
}

func TestFence_SpecIsCheckedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "host=/nowhere")
	fenceOK(t, "pool", err)
	defer pool.Close()
	q, err := onceq.New(pool, nil)
	fenceOK(t, "New", err)
	for _, c := range []struct {
		field string
		spec  onceq.FenceSpec
	}{
		{"Key", onceq.FenceSpec{}},
		{"Key", onceq.FenceSpec{Key: " \t"}},
		{"Key", onceq.FenceSpec{Key: string(make([]byte, 600))}},
		{"Scope", onceq.FenceSpec{Key: "k", Scope: "\x00"}},
		{"Class", onceq.FenceSpec{Key: "k", Class: 3}},
		{"Lease", onceq.FenceSpec{Key: "k", Lease: -1}},
		{"Window", onceq.FenceSpec{Key: "k", Window: -5}},
		{"Fields", onceq.FenceSpec{Key: "k", Fields: []string{"a"}}},
		{"Fields", onceq.FenceSpec{Key: "k", Payload: []byte("x"), Fields: []string{"a"}}},
		{"Payload", onceq.FenceSpec{Key: "k", Payload: 1, Fields: []string{"a"}}},
		{"Payload", onceq.FenceSpec{Key: "k", Payload: func() {}}},
	} {
		_, err := q.Fence(c.spec)
		var invalid *onceq.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != c.field {
			t.Errorf("%+v: %v; want an InvalidError for %s", c.spec, err, c.field)
		}
	}
	f, err := q.Fence(onceq.FenceSpec{Key: "k"})
	fenceOK(t, "Fence", err)
	if _, err := f.Claim(t.Context(), nil); err == nil {
		t.Error("claimed nowhere")
	}
}

func TestFence_SchemaThatNeedsQuoting(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema(`my "jobs'`))
	ctx := t.Context()
	for range 2 {
		if r, err := onceq.Do(ctx, db.Queue, onceq.FenceSpec{Key: "k"}, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil }); r != 1 || err != nil {
			t.Fatal(r, err)
		}
	}
	id := fenceJob(t, db, "j")
	l := fenceLease(t, db)
	_, err := onceq.Once(ctx, l, "e", func(context.Context, string) (int, error) { return 0, errors.New("?") })
	fenceWant(t, "Once", err, onceq.ErrUncertain)
	_, err = onceq.Once(ctx, l, "e", func(context.Context, string) (int, error) { return 0, nil }, onceq.OnUncertain(onceq.Hold()))
	fenceWant(t, "Once", err, onceq.ErrHeld)
	fenceOK(t, "Fail", l.Fail(ctx, err))
	fenceOK(t, "Resolve", onceqops.New(db.Queue).Resolve(ctx, db.Pool, id, "e", onceq.Applied(nil)))
	fenceLease(t, db)
}

// A claim starts to read just before a release, and sees the release. The key is then free, even if the clock of the
// claim's statement says otherwise. This can happen only in the simple protocol: in the others the clock is read after the
// snapshot is taken.
func TestFence_ReleasedWhileAClaimReads(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]onceq.Policy{
		"run again": onceq.RunAgain(time.Hour), "hold": onceq.Hold(),
		"ask": onceq.Ask(func(context.Context, string) (any, bool, error) { return nil, false, errors.New("asked") }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reads := readGate{comes: make(chan struct{}), goes: make(chan struct{})}
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode, c.ConnConfig.Tracer = pgx.QueryExecModeSimpleProtocol, &reads
			}))
			first := fenceClaim(t, fenceOf(t, db, onceq.FenceSpec{Key: "k", Payload: 1, Policy: policy}), db.Pool)
			reads.shut.Store(true)
			tx, err := db.Pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			second := fenceOf(t, db, onceq.FenceSpec{Key: "k", Payload: 2, Policy: policy})
			claimed := make(chan error, 1)
			go func() {
				c, err := second.Claim(t.Context(), db.Pool)
				if err == nil && c.Replayed {
					err = errors.New("replayed")
				}
				claimed <- err
			}()
			<-reads.comes
			fenceExec(t, tx, `lock table onceq.job_fences in access exclusive mode`)
			close(reads.goes)
			enqBlocked(t, db, 1)
			fenceExec(t, tx, `update onceq.job_fences set state = 5, holder = null, finished_at = clock_timestamp(), lifetime = 0 where token = $1`, first.Token)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-claimed; err != nil {
				t.Fatal(err)
			}
		})
	}
}

// readGate delays the next statement that reads a fence, before it is sent.
type readGate struct {
	shut        atomic.Bool
	comes, goes chan struct{}
}

func (g *readGate) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	g.hold(q.SQL)
	return ctx
}

func (g *readGate) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	for _, q := range d.Batch.QueuedQueries {
		g.hold(q.SQL)
	}
	return ctx
}

func (*readGate) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*readGate) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

func (g *readGate) hold(sql string) {
	if strings.HasPrefix(strings.TrimSpace(sql), "select") && strings.Contains(sql, ".job_fences") && g.shut.CompareAndSwap(true, false) {
		close(g.comes)
		<-g.goes
	}
}

func (g *readGate) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A time that is as long as a duration can be is not taken for one in the past.
func TestFence_TheLongestTimes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	for i, window := range []time.Duration{onceq.Forever - 1, onceq.Forever - time.Millisecond, onceq.Forever - 2*time.Millisecond} {
		key := fmt.Sprint(i)
		f := fenceOf(t, db, onceq.FenceSpec{Key: key, Window: window, Lease: 7 * 24 * time.Hour})
		fenceOK(t, "Complete", fenceClaim(t, f, nil).Complete(ctx, nil, 1))
		keys, err := onceqops.New(db.Queue).Keys(ctx, db.Pool, "", key)
		if err != nil || len(keys) != 1 || keys[0].Free || keys[0].FreeAt.Before(time.Now()) {
			t.Fatalf("%s: %+v, %v", window, keys, err)
		}
	}
	add(t, db, onceq.Job{})
	l := fenceLease(t, db)
	got, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (int, error) { return 1, ctx.Err() }, onceq.EffectTimeout(7*24*time.Hour))
	if err != nil || got != 1 {
		t.Fatal(got, err)
	}
}
