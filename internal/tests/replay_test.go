package tests

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func fenceJob(t *testing.T, db *queuetest.DB, key string) int64 {
	t.Helper()
	r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Key: key, Payload: 1})
	fenceOK(t, "Enqueue", err)
	return r.ID
}

func fenceLease(t *testing.T, db *queuetest.DB) *onceq.Lease {
	t.Helper()
	leases, err := db.Queue.Claim(t.Context(), onceq.ClaimOptions{})
	if err != nil || len(leases) != 1 {
		t.Fatalf("Claim: %d, %v", len(leases), err)
	}
	return leases[0]
}

// fenceRedeliver does what happens after a worker's death: the job's lease runs out and somebody else claims it.
func fenceRedeliver(t *testing.T, db *queuetest.DB) *onceq.Lease {
	t.Helper()
	fenceExec(t, db.Pool, `update onceq.jobs set leased_until = timestamptz '2000-01-01'`)
	return fenceLease(t, db)
}

// provider counts the calls that reach it, and deduplicates by key as a good provider does.
type provider struct {
	mu    sync.Mutex
	calls int
	keys  []string
}

func (p *provider) charge(_ context.Context, key string) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	if !slices.Contains(p.keys, key) {
		p.keys = append(p.keys, key)
	}
	return fmt.Sprintf("charge %d", p.calls), nil
}

func fenceEvents() (*onceq.Config, func() string) {
	var mu sync.Mutex
	var seen []string
	return &onceq.Config{Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, string(e.Type))
		})}, func() string {
			mu.Lock()
			defer mu.Unlock()
			s := strings.Join(seen, ",")
			seen = nil
			return s
		}
}

// docs/use/patterns.md, "A fence around any work" (seed 001).
func TestPattern_AFenceThatIsCompletedGivesItsResult(t *testing.T) {
	t.Parallel()
	config, events := fenceEvents()
	db := queuetest.New(t, queuetest.Config(*config))
	type sent struct{ ID string }
	calls := 0
	work := func(context.Context, *onceq.FenceLease) (sent, error) {
		calls++
		return sent{"m1"}, nil
	}
	for range 3 {
		r, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "notify:7"}, work)
		if err != nil || r.ID != "m1" {
			t.Fatal(r, err)
		}
	}
	if calls != 1 || events() != "replayed,replayed" {
		t.Errorf("%d calls", calls)
	}
}

// docs/use/patterns.md, "A fence around any work" (seed 001).
func TestPattern_AFenceInProgressElsewhereIsATypedError(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	spec := onceq.FenceSpec{Key: "k"}
	_, err := onceq.Do(t.Context(), db.Queue, spec, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
		_, err := onceq.Do(ctx, db.Queue, spec, func(context.Context, *onceq.FenceLease) (int, error) { panic("twice") })
		fenceWant(t, "a second one meanwhile", err, onceq.ErrInFlight)
		return 1, nil
	})
	fenceOK(t, "Do", err)
}

// docs/use/patterns.md, "A fence around any work" (seed 001).
func TestPattern_AFailureFreesTheFenceOnlyWhenNothingWasApplied(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	spec := onceq.FenceSpec{Key: "k"}
	declined := errors.New("declined")
	fail := func(err error) func(context.Context, *onceq.FenceLease) (int, error) {
		return func(context.Context, *onceq.FenceLease) (int, error) { return 0, err }
	}
	not := fmt.Errorf("charging: %w", onceq.NotApplied(declined))
	_, err := onceq.Do(ctx, db.Queue, spec, fail(not))
	if !errors.Is(err, not) || onceq.NotApplied(nil) != nil {
		t.Fatalf("%v, want the error as it is", err)
	}
	_, err = onceq.Do(ctx, db.Queue, spec, fail(declined)) // free at once; this time the outcome is uncertain
	fenceWant(t, "Do", err, onceq.ErrUncertain)
	fenceWant(t, "Do", err, declined)
	spec.Policy = onceq.Hold()
	_, err = onceq.Do(ctx, db.Queue, spec, fail(nil))
	fenceWant(t, "held", err, onceq.ErrHeld)
	fenceOK(t, "Resolve", fenceOf(t, db, spec).Resolve(ctx, nil, onceq.Applied(42)))
	if r, err := onceq.Do(ctx, db.Queue, spec, fail(declined)); r != 42 || err != nil {
		t.Fatal(r, err)
	}
	if err := fenceOf(t, db, spec).Resolve(ctx, nil, onceq.Resolution{}); err == nil {
		t.Error("an empty Resolution resolved something")
	}
}

func TestDo_KeepsItsClaimAliveAndLeaksNoGoroutine(t *testing.T) {
	db := queuetest.New(t)
	ctx := t.Context()
	spec := onceq.FenceSpec{Key: "k", Lease: steady}
	fenceGet[int](t, db.Pool, `select 1`)
	before := runtime.NumGoroutine()
	r, err := onceq.Do(ctx, db.Queue, spec, func(ctx context.Context, c *onceq.FenceLease) (int, error) {
		for range 2 { // each waits for a beat
			until := fenceGet[time.Time](t, db.Pool, `select leased_until from onceq.job_fences`)
			for !fenceGet[time.Time](t, db.Pool, `select leased_until from onceq.job_fences`).After(until) {
				if ctx.Err() != nil {
					return 0, context.Cause(ctx)
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
		return 1, nil
	})
	if r != 1 || err != nil {
		t.Fatal(r, err)
	}
	for deadline := time.Now().Add(patience); runtime.NumGoroutine() > before+2; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}

func TestFenceLeaseFromContext_IsTheInnermost(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	fenceJob(t, db, "k")
	l := fenceLease(t, db)
	require.Nil(t, onceq.FenceLeaseFromContext(t.Context()))
	_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "k"}, func(ctx context.Context, c *onceq.FenceLease) (int, error) {
		require.Same(t, c, onceq.FenceLeaseFromContext(ctx))
		require.Empty(t, c.Name)
		_, err := onceq.Once(ctx, l, "effect", func(inner context.Context, key string) (int, error) {
			require.Equal(t, key, onceq.FenceLeaseFromContext(inner).IdempotencyKey())
			require.Equal(t, "effect", onceq.FenceLeaseFromContext(inner).Name)
			return 1, nil
		})
		require.Same(t, c, onceq.FenceLeaseFromContext(ctx))
		return 1, err
	})
	require.NoError(t, err)
	require.NoError(t, l.Complete(t.Context(), nil))
}

func TestDo_LosingTheClaimCancelsWithThatCause(t *testing.T) {
	t.Parallel()
	config, events := fenceEvents()
	db := queuetest.New(t, queuetest.Config(*config))
	spec := onceq.FenceSpec{Key: "k", Lease: 300 * time.Millisecond}
	_, err := onceq.Do(t.Context(), db.Queue, spec, func(ctx context.Context, c *onceq.FenceLease) (int, error) {
		fenceExec(t, db.Pool, `update onceq.job_fences set token = token + 1, holder = 1, leased_until = now() + interval '1 hour'`)
		<-ctx.Done()
		fenceWant(t, "cause", context.Cause(ctx), onceq.ErrLeaseLost)
		return 1, nil // it succeeds all the same, but somebody else ran
	})
	fenceWant(t, "Do", err, onceq.ErrLeaseLost)
	if e := events(); e != "lease_lost,stale_completion" {
		t.Error(e)
	}
}

func TestDo_PanicAndGoexitAreUncertain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	state := func() string {
		return fenceGet[string](t, db.Pool, `select state || ' ' || detail from onceq.job_fences where key = 'k'`)
	}
	func() {
		defer func() {
			if p := recover(); p != "boom" {
				t.Errorf("recovered %v", p)
			}
		}()
		_, _ = onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "k"}, func(context.Context, *onceq.FenceLease) (int, error) { panic("boom") })
	}()
	if s := state(); s != "2 panic: boom" {
		t.Error(s)
	}
	done := make(chan bool)
	go func() {
		defer close(done)
		_, _ = onceq.Do(context.Background(), db.Queue, onceq.FenceSpec{Key: "k"}, func(context.Context, *onceq.FenceLease) (int, error) {
			runtime.Goexit()
			return 0, nil
		})
	}()
	<-done
	if s := state(); s != "2 its goroutine ended" {
		t.Error(s)
	}
}

// docs/use/patterns.md, "Keys for providers" (seed 003).
func TestPattern_TheIdempotencyKeyComesFromTheJobNotTheAttempt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	fenceJob(t, db, "a")
	first := fenceLease(t, db)
	key := first.IdempotencyKey("charge")
	if !strings.HasPrefix(key, "oq_") || len(key) > 64 || key == first.IdempotencyKey("mail") {
		t.Error(key)
	}
	second := fenceRedeliver(t, db)
	if second.Token <= first.Token || second.IdempotencyKey("charge") != key {
		t.Error("the key changed with the delivery")
	}
	fenceOK(t, "Fail", second.Fail(ctx, onceq.RetryAfter(0, errors.New("later"))))
	third := fenceLease(t, db)
	if third.IdempotencyKey("charge") != key {
		t.Error("the key changed with the attempt")
	}
	// After a failover forgot an id, or in another installation, the same id gives another key.
	fenceOK(t, "Complete", third.Complete(ctx, db.Pool))
	fenceExec(t, owner(t, db), `select setval('ids', $1, false)`, third.ID)
	fenceJob(t, db, "b")
	if again := fenceLease(t, db); again.ID != third.ID || again.IdempotencyKey("charge") == key {
		t.Error("the key depends on the id alone")
	}
	other := queuetest.New(t)
	fenceJob(t, other, "a")
	if l := fenceLease(t, other); l.ID == third.ID && l.IdempotencyKey("charge") == key {
		t.Error("two installations share a key")
	}
}

// docs/use/patterns.md, "A client's Idempotency-Key" (seed 003).
func TestPattern_SameBodyReplaysOtherBodyMismatchesInFlightWaits500ms(t *testing.T) {
	t.Parallel()
	config, events := fenceEvents()
	db := queuetest.New(t, queuetest.Config(*config))
	ctx := t.Context()
	spec := onceq.FenceSpec{Class: onceq.ClassRequest, Key: "key-of-a-client", Payload: map[string]any{"to": "a", "n": 1}}
	send := func(context.Context, *onceq.FenceLease) (string, error) { return "email_1", nil }
	reordered := spec
	reordered.Payload = struct {
		To string  `json:"to"`
		N  float64 `json:"n"`
	}{"a", 1.0}
	other := spec
	other.Payload = map[string]any{"to": "b", "n": 1}

	_, err := onceq.Do(ctx, db.Queue, spec, func(ctx context.Context, c *onceq.FenceLease) (string, error) {
		_, err := onceq.Do(ctx, db.Queue, reordered, send)
		var inFlight *onceq.InFlightError
		if !errors.As(err, &inFlight) || inFlight.RetryAfter != 500*time.Millisecond {
			t.Errorf("in flight: %v", err)
		}
		return send(ctx, c)
	})
	fenceOK(t, "Do", err)
	if r, err := onceq.Do(ctx, db.Queue, reordered, send); r != "email_1" || err != nil {
		t.Error(r, err)
	}
	_, err = onceq.Do(ctx, db.Queue, other, send)
	fenceWant(t, "other body", err, onceq.ErrMismatch)
	if e := events(); e != "replayed,mismatch" {
		t.Error(e)
	}
	fenceExec(t, db.Pool, `update onceq.job_fences set finished_at = finished_at - interval '25 hours'`)
	if r, err := onceq.Do(ctx, db.Queue, other, send); r != "email_1" || err != nil {
		t.Errorf("after the window: %v %v", r, err)
	}
}

// docs/use/patterns.md, "A record of the intent" (seed 004).
func TestPattern_TheIntentIsRecordedBeforeTheEffectAndTheOutcomeAfter(t *testing.T) {
	t.Parallel()
	config, events := fenceEvents()
	db := queuetest.New(t, queuetest.Config(*config))
	ctx := t.Context()
	id := fenceJob(t, db, "a")
	l := fenceLease(t, db)
	var p provider
	states := func() string {
		var s []string
		effects, err := onceqops.New(db.Queue).Effects(ctx, db.Pool, id)
		fenceOK(t, "Effects", err)
		for _, e := range effects {
			s = append(s, e.Name+" "+e.State+" "+string(e.Result))
		}
		return strings.Join(s, "; ")
	}
	run := func(l *onceq.Lease) (string, error) {
		return onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
			if s := states(); s != "charge in_flight " {
				t.Errorf("during the effect: %q", s)
			}
			if key != l.IdempotencyKey("charge") {
				t.Error(key)
			}
			return p.charge(ctx, key)
		})
	}
	r, err := run(l)
	if r != "charge 1" || err != nil {
		t.Fatal(r, err)
	}
	events()
	if r, err = run(fenceRedeliver(t, db)); r != "charge 1" || err != nil || p.calls != 1 {
		t.Fatal(r, err, p.calls)
	}
	if e := events(); e != "claimed,replayed" { // a replay is an event of its own, neither a failure nor a success
		t.Error(e)
	}
	if s := states(); s != `charge completed "charge 1"` {
		t.Error(s)
	}
	if n := fenceGet[int](t, db.Pool, `select count(*)::int from onceq.job_fences where class = 3 and scope = 'default'
		and key = $1 || '/charge' and job_id = $1::bigint and finished_at is null`, fmt.Sprint(id)); n != 1 {
		t.Error("the effect's fence is not as fence.go says")
	}
	// Even if the effect's window is over, the effect is replayed while its job lives.
	fenceExec(t, db.Pool, `update onceq.job_fences set finished_at = now() - interval '1 year' where class = 3`)
	if r, err = run(fenceRedeliver(t, db)); r != "charge 1" || err != nil || p.calls != 1 {
		t.Fatal(r, err, p.calls)
	}
	fenceExec(t, db.Pool, `update onceq.job_fences set finished_at = null where class = 3`)
}

func TestOnce_EveryErrorIsUncertainUnlessNothingWasApplied(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	id := fenceJob(t, db, "a")
	l := fenceLease(t, db)
	state := func(name string) string {
		return fenceGet[string](t, db.Pool, `select state || ' ' || coalesce(detail, '') from onceq.job_fences where key = $1`, fmt.Sprintf("%d/%s", id, name))
	}
	reset := errors.New("connection reset")
	_, err := onceq.Once(ctx, l, "reset", func(context.Context, string) (int, error) { return 0, reset })
	fenceWant(t, "reset", err, onceq.ErrUncertain)
	fenceWant(t, "reset", err, reset)
	if s := state("reset"); s != "2 connection reset" {
		t.Error(s)
	}
	_, err = onceq.Once(ctx, l, "slow", func(ctx context.Context, _ string) (int, error) {
		<-ctx.Done()
		return 0, ctx.Err()
	}, onceq.EffectTimeout(20*time.Millisecond))
	fenceWant(t, "slow", err, onceq.ErrUncertain)
	fenceWant(t, "slow", err, context.DeadlineExceeded)
	if s := state("slow"); s != "2 context deadline exceeded" {
		t.Error(s)
	}
	cancelled, cancel := context.WithCancel(ctx)
	_, err = onceq.Once(cancelled, l, "cancelled", func(ctx context.Context, _ string) (int, error) {
		cancel()
		return 0, ctx.Err()
	})
	fenceWant(t, "cancelled", err, onceq.ErrUncertain)
	if s := state("cancelled"); s != "2 context canceled" {
		t.Error(s)
	}
	cancelled, cancel = context.WithCancel(ctx)
	r, err := onceq.Once(cancelled, l, "cancelled but done", func(context.Context, string) (int, error) {
		cancel()
		return 1, nil
	})
	if r != 1 || err != nil || state("cancelled but done") != "3 " {
		t.Error("a success in a cancelled context is not recorded:", r, err)
	}
	func() {
		defer func() { _ = recover() }()
		_, _ = onceq.Once(ctx, l, "panic", func(context.Context, string) (int, error) { panic("boom") })
		t.Error("the panic was swallowed")
	}()
	if s := state("panic"); s != "2 panic: boom" {
		t.Error(s)
	}
	not := onceq.NotApplied(errors.New("refused"))
	if _, err = onceq.Once(ctx, l, "refused", func(context.Context, string) (int, error) { return 0, not }); !errors.Is(err, not) {
		t.Error(err)
	}
	r, err = onceq.Once(ctx, l, "refused", func(context.Context, string) (int, error) { return 7, nil })
	if r != 7 || err != nil {
		t.Error("a released effect did not run again:", r, err)
	}
	// "Not applied" in this run says nothing about an earlier run.
	_, err = onceq.Once(ctx, l, "reset", func(context.Context, string) (int, error) { return 0, not })
	fenceWant(t, "refused after a reset", err, not)
	if s := state("reset"); s != "2 connection reset" {
		t.Error(s)
	}
	for _, name := range []string{"", " ", "\x00", strings.Repeat("n", 129)} {
		var invalid *onceq.InvalidError
		if _, err := onceq.Once(ctx, l, name, func(context.Context, string) (int, error) { return 0, nil }); !errors.As(err, &invalid) {
			t.Errorf("name %q: %v", name, err)
		}
	}
}

// TestOnceCrashChild is the process that is killed in the middle of an effect.
func TestOnceCrashChild(t *testing.T) {
	raw := os.Getenv("ONCEQ_TEST_CRASH_CHILD")
	if raw == "" {
		t.Skip("only as a child process")
	}
	_, q := conformance.TakeOver(t, raw)
	leases, err := q.Claim(t.Context(), onceq.ClaimOptions{})
	fenceOK(t, "Claim", err)
	_, _ = onceq.Once(t.Context(), leases[0], "charge", func(context.Context, string) (string, error) {
		fmt.Println("\nin the effect")
		select {}
	})
}

func TestOnce_ProcessKilledBetweenIntentAndOutcome(t *testing.T) {
	t.Parallel()
	crash := func(t *testing.T) (*queuetest.DB, *onceq.Lease) {
		db := queuetest.New(t)
		fenceJob(t, db, "a")
		child := exec.Command(os.Args[0], "-test.run=^TestOnceCrashChild$")
		child.Env = append(os.Environ(), "ONCEQ_TEST_CRASH_CHILD="+conformance.HandOver(t, db))
		out, err := child.StdoutPipe()
		fenceOK(t, "pipe", err)
		fenceOK(t, "start", child.Start())
		lines := bufio.NewScanner(out)
		for lines.Scan() && lines.Text() != "in the effect" {
		}
		fenceOK(t, "kill", child.Process.Kill())
		_ = child.Wait()
		l := fenceRedeliver(t, db)
		_, err = onceq.Once(t.Context(), l, "charge", func(context.Context, string) (string, error) { panic("twice") })
		fenceWant(t, "before its lease ran out", err, onceq.ErrInFlight)
		return db, l
	}
	t.Run("run again", func(t *testing.T) {
		t.Parallel()
		db, l := crash(t)
		fenceLapse(t, db)
		var p provider
		r, err := onceq.Once(t.Context(), l, "charge", p.charge)
		if r != "charge 1" || err != nil || p.keys[0] != l.IdempotencyKey("charge") {
			t.Error(r, err, p.keys)
		}
	})
	t.Run("ask", func(t *testing.T) {
		t.Parallel()
		db, l := crash(t)
		ctx := t.Context()
		asked, ran := 0, 0
		down := errors.New("down")
		once := func(result any, applied bool, err error) (string, error) {
			ask := onceq.Ask(func(_ context.Context, key string) (any, bool, error) {
				asked++
				if key != l.IdempotencyKey("charge") {
					t.Error(key)
				}
				return result, applied, err
			})
			return onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) {
				ran++
				return "", onceq.NotApplied(down)
			}, onceq.OnUncertain(ask))
		}
		fenceExec(t, db.Pool, `update onceq.job_fences set leased_until = now() - interval '1 second' where class = 3`)
		_, err := once(nil, false, nil)
		fenceWant(t, "within the grace", err, onceq.ErrInFlight)
		if asked != 0 {
			t.Fatal("asked within the grace: the request may still be under way")
		}
		for n := range 2 {
			fenceLapse(t, db)
			_, err = once(nil, false, down)
			fenceWant(t, "asking failed", err, onceq.ErrUncertain)
			fenceWant(t, "asking failed", err, down)
			if asked != n+1 || ran != 0 {
				t.Fatal(asked, ran)
			}
		}
		fenceLapse(t, db)
		_, err = once(nil, false, nil) // not applied: it ran, and is released this time, because nothing is in doubt any more
		fenceWant(t, "not applied", err, down)
		if asked != 3 || ran != 1 {
			t.Fatal(asked, ran)
		}
		_, err = once(nil, false, nil)
		fenceWant(t, "released", err, down)
		if asked != 3 || ran != 2 {
			t.Fatal(asked, ran)
		}
	})
	t.Run("ask, applied", func(t *testing.T) {
		t.Parallel()
		db, l := crash(t)
		fenceLapse(t, db)
		for n := range 2 { // the second is a replay
			if n == 1 {
				l = fenceRedeliver(t, db)
			}
			r, err := onceq.Once(t.Context(), l, "charge", func(context.Context, string) (string, error) { panic("twice") },
				onceq.OnUncertain(onceq.Ask(func(context.Context, string) (any, bool, error) { return "ch_1", true, nil })))
			if r != "ch_1" || err != nil {
				t.Error(r, err)
			}
		}
	})
	for _, past := range []bool{false, true} { // whether the provider has forgotten the key
		for _, r := range []onceq.Resolution{onceq.Applied("ch_1"), onceq.NeverApplied()} {
			t.Run(fmt.Sprintf("hold, past %v, %+v", past, r), func(t *testing.T) {
				t.Parallel()
				db, l := crash(t)
				ctx := t.Context()
				fenceLapse(t, db)
				policy := onceq.Hold()
				if past {
					policy = onceq.Policy{} // the default
					fenceExec(t, db.Pool, `update onceq.job_fences set created_at = created_at - interval '24 hours' where class = 3`)
				}
				ran := false
				once := func(l *onceq.Lease) (string, error) {
					return onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) {
						ran = true
						return "ch_2", nil
					}, onceq.OnUncertain(policy))
				}
				_, err := once(l)
				fenceWant(t, "Once", err, onceq.ErrHeld)
				fenceOK(t, "Fail", l.Fail(ctx, err))
				if ran || fenceGet[int](t, db.Pool, `select count(*)::int from onceq.job_history where state = 8`) != 1 {
					t.Fatal("the job is not held")
				}
				effects, err := onceqops.New(db.Queue).Effects(ctx, db.Pool, l.ID)
				if err != nil || len(effects) != 1 || effects[0].State != "held" || effects[0].Detail == "" {
					t.Fatal(effects, err)
				}
				fenceWant(t, "another effect", onceqops.New(db.Queue).Resolve(ctx, db.Pool, l.ID, "mail", r), onceq.ErrNotFound)
				fenceOK(t, "Resolve", onceqops.New(db.Queue).Resolve(ctx, db.Pool, l.ID, "charge", r))
				fenceWant(t, "Resolve again", onceqops.New(db.Queue).Resolve(ctx, db.Pool, l.ID, "charge", r), onceq.ErrNotFound)
				again := fenceLease(t, db)
				if again.ID != l.ID || again.Token <= l.Token || again.IdempotencyKey("charge") != l.IdempotencyKey("charge") {
					t.Errorf("redriven as %+v", again)
				}
				got, err := once(again)
				fenceOK(t, "Once", err)
				if want := map[bool]string{true: "ch_2", false: "ch_1"}[ran]; got != want || ran != (r == onceq.NeverApplied()) {
					t.Error(got, ran)
				}
			})
		}
	}
}

func TestOnce_LateSuccess(t *testing.T) {
	t.Parallel()
	for _, meanwhile := range []string{"nobody", "uncertain", "held", "resolved", "ran", "runs"} {
		t.Run(meanwhile, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx := t.Context()
			id := fenceJob(t, db, "a")
			l := fenceLease(t, db)
			finish := make(chan bool)
			var second *onceq.Lease
			r, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) {
				second = fenceRedeliver(t, db)
				fenceLapse(t, db)
				once := func(p onceq.Policy) (int, error) {
					return onceq.Once(ctx, second, "charge", func(context.Context, string) (int, error) {
						if meanwhile == "runs" {
							close(finish)
							<-ctx.Done()
						}
						return 2, nil
					}, onceq.OnUncertain(p))
				}
				switch meanwhile {
				case "uncertain":
					fenceExec(t, db.Pool, `update onceq.job_fences set state = 2, detail = 'x' where class = 3`)
				case "held", "resolved":
					_, err := once(onceq.Hold())
					fenceWant(t, "Once", err, onceq.ErrHeld)
					if meanwhile == "resolved" { // by a person who is wrong
						fenceOK(t, "Resolve", onceqops.New(db.Queue).Resolve(ctx, db.Pool, id, "charge", onceq.NeverApplied()))
					}
				case "ran":
					_, err := once(onceq.Policy{})
					fenceOK(t, "Once", err)
				case "runs":
					go func() { _, _ = once(onceq.Policy{}) }()
					<-finish
				}
				return 1, nil
			})
			if meanwhile == "ran" || meanwhile == "runs" {
				fenceWant(t, "late success after somebody ran again", err, onceq.ErrLeaseLost)
				return
			}
			if r != 1 || err != nil {
				t.Fatal(r, err)
			}
			r, err = onceq.Once(ctx, second, "charge", func(context.Context, string) (int, error) { return 3, nil })
			if r != 1 || err != nil {
				t.Error("a late success was not replayed:", r, err)
			}
		})
	}
}

func TestOnce_StaleLeaseDoesNotStartAnEffect(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	fenceJob(t, db, "a")
	stale := fenceLease(t, db)
	l := fenceRedeliver(t, db)
	never := func(context.Context, string) (int, error) { panic("started") }
	_, err := onceq.Once(ctx, stale, "charge", never)
	fenceWant(t, "absent", err, onceq.ErrLeaseLost)
	_, err = onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 0, errors.New("?") })
	fenceWant(t, "Once", err, onceq.ErrUncertain)
	_, err = onceq.Once(ctx, stale, "charge", never)
	fenceWant(t, "uncertain", err, onceq.ErrLeaseLost)
	fenceOK(t, "Complete", l.Complete(ctx, nil))
	_, err = onceq.Once(ctx, l, "mail", never)
	fenceWant(t, "finished", err, onceq.ErrLeaseLost)
}

// If Once used the handler's transaction, or locked the job's row, the two would wait for each other.
func TestTrapOnceDoesNotWaitForTheHandlersTransaction(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	id := fenceJob(t, db, "a")
	l := fenceLease(t, db)
	tx, err := db.Pool.Begin(ctx)
	fenceOK(t, "begin", err)
	fenceExec(t, tx, `select from onceq.jobs where id = $1 for update`, id)
	r, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 1, nil })
	if r != 1 || err != nil {
		t.Fatal(r, err)
	}
	fenceOK(t, "rollback", tx.Rollback(ctx))
	l = fenceRedeliver(t, db)
	if r, err = onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 2, nil }); r != 1 || err != nil {
		t.Error("the outcome was undone with the handler's transaction:", r, err)
	}
}

func TestOnce_PoolWithoutASpareConnectionIsAnErrorBeforeTheEffect(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.MaxConns = 1 }))
	fenceJob(t, db, "a")
	l := fenceLease(t, db)
	tx, err := db.Pool.Begin(t.Context())
	fenceOK(t, "begin", err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { panic("started") })
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "hold every connection") {
		t.Error(err)
	}
	fenceOK(t, "rollback", tx.Rollback(t.Context()))
}

func TestOnce_OutcomeIsRecordedOverALostConnection(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	fenceJob(t, db, "a")
	l := fenceLease(t, db)
	r, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) {
		conn, err := db.Pool.Acquire(ctx)
		fenceOK(t, "acquire", err)
		defer conn.Release()
		fenceExec(t, conn, `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()`)
		_, _ = conn.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
		return 1, nil
	})
	if r != 1 || err != nil {
		t.Fatal(r, err)
	}
	if s := fenceGet[int](t, db.Pool, `select state::int from onceq.job_fences where class = 3`); s != 3 {
		t.Error(s)
	}
}

func TestOnce_SuccessThatCannotBeRecordedIsUncertain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	fenceJob(t, db, "a")
	pool, err := pgxpool.NewWithConfig(ctx, db.Pool.Config())
	fenceOK(t, "pool", err)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema})
	fenceOK(t, "New", err)
	leases, err := q.Claim(ctx, onceq.ClaimOptions{})
	fenceOK(t, "Claim", err)
	r, err := onceq.Once(ctx, leases[0], "charge", func(context.Context, string) (int, error) {
		pool.Close()
		return 1, nil
	})
	fenceWant(t, "Once", err, onceq.ErrUncertain)
	if r != 0 || !strings.Contains(err.Error(), "it succeeded") {
		t.Error(r, err)
	}
}

// The effect has happened. It must not run again, and nobody may go on as if its result were there.
func TestOnce_ResultThatCannotBeStoredIsCompletedWithAFatalError(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	id := fenceJob(t, db, "a")
	l := fenceLease(t, db)
	calls := 0
	once := func() (string, error) {
		return onceq.Once(ctx, l, "charge", func(context.Context, string) (string, error) {
			calls++
			return strings.Repeat("x", onceq.MaxResultBytes), nil
		})
	}
	for range 2 {
		r, err := once()
		var invalid *onceq.InvalidError
		if r != "" || !errors.As(err, &invalid) || invalid.Field != "result" || calls != 1 || errors.Is(err, onceq.ErrUncertain) {
			t.Fatal(len(r), err, calls)
		}
	}
	for range 2 { // a NUL, which jsonb cannot hold, makes no difference
		_, err := onceq.Once(ctx, l, "nul", func(context.Context, string) (string, error) { return "\x00", nil })
		var invalid *onceq.InvalidError
		if !errors.As(err, &invalid) {
			t.Fatal(err)
		}
	}
	_, err := once()
	fenceOK(t, "Fail", l.Fail(ctx, err))
	if n := fenceGet[int](t, db.Pool, `select count(*)::int from onceq.job_history where state = 6`); n != 1 {
		t.Error("the error is not fatal")
	}
	fenceOK(t, "Resolve", onceqops.New(db.Queue).Resolve(ctx, db.Pool, id, "charge", onceq.Applied("see file 7")))
	effects, err := onceqops.New(db.Queue).Effects(ctx, db.Pool, id)
	if err != nil || len(effects) != 2 || string(effects[0].Result) != `"see file 7"` || effects[0].Detail != "" {
		t.Error(effects, err)
	}
}

func TestOnce_AnErrorInFlightSpendsNoAttempt(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	fenceJob(t, db, "a")
	l := fenceLease(t, db)
	_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) {
		second := fenceRedeliver(t, db)
		_, err := onceq.Once(ctx, second, "charge", func(context.Context, string) (int, error) { panic("twice") })
		fenceWant(t, "Once", err, onceq.ErrInFlight)
		fenceOK(t, "Fail", second.Fail(ctx, err))
		return 1, nil
	})
	fenceOK(t, "Once", err)
	if n := fenceGet[int](t, db.Pool, `select attempts::int from onceq.jobs`); n != 0 {
		t.Errorf("%d attempts spent", n)
	}
}

// After a failure that the call reported, Ask waits until the call can no longer be under way. The error says so.
func TestOnce_SaysWhyAskWaits(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	fenceJob(t, db, "a")
	l := fenceLease(t, db)
	ask := onceq.OnUncertain(onceq.Ask(func(context.Context, string) (any, bool, error) { panic("asked too early") }))
	_, err := onceq.Once(t.Context(), l, "charge", func(context.Context, string) (int, error) { return 0, errors.New("bad gateway") }, ask)
	fenceWant(t, "Once", err, onceq.ErrUncertain)
	l = fenceRedeliver(t, db)
	_, err = onceq.Once(t.Context(), l, "charge", func(context.Context, string) (int, error) { panic("twice") }, ask)
	var inFlight *onceq.InFlightError
	if !errors.As(err, &inFlight) || inFlight.Detail != "bad gateway" {
		t.Fatal(err)
	}
	if m := regexp.MustCompile(`^onceq: effect "charge" of job \d+: outcome unknown; the provider is asked in [0-9.]+s, when the earlier call can no longer be under way: bad gateway$`); !m.MatchString(err.Error()) {
		t.Error(err)
	}
}

// A loop that used one name once sent one mail, and the job was completed.
func TestOnce_ANameUsedTwiceInOneRunIsAnError(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	kind := onceq.Kind[int]{Name: "mails", MaxAttempts: 2, Backoff: func(int, error) time.Duration { return 0 }}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(1))
	fenceOK(t, "Enqueue", err)
	var sent []string
	handle := kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		for _, to := range []string{"a", "b", "c"} {
			if _, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) {
				sent = append(sent, to)
				return 1, nil
			}); err != nil {
				return err
			}
		}
		return nil
	})
	ran := db.RunOne(handle)
	fenceWant(t, "the run", ran.Err, onceq.ErrNameUsed)
	require.Equal(t, onceq.StateRetrying, ran.State)
	require.Contains(t, ran.Err.Error(), `"mail" was done`)
	require.Contains(t, ran.Err.Error(), "a name of its own")
	ran = db.RunOne(handle) // the first one is replayed, which is fine; the second one fails again
	fenceWant(t, "the second run", ran.Err, onceq.ErrNameUsed)
	require.Equal(t, []string{"a"}, sent)
}

func TestOnce_ANameUsedTwiceAtOnceOrNestedIsAnError(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	fenceJob(t, db, "a")
	l := fenceLease(t, db)
	never := func(context.Context, string) (int, error) { panic("called") }
	_, err := onceq.Once(ctx, l, "order", func(ctx context.Context, _ string) (int, error) {
		_, err := onceq.Once(ctx, l, "order", never)
		fenceWant(t, "nested", err, onceq.ErrNameUsed)
		beside := make(chan error)
		go func() {
			_, err := onceq.Once(ctx, l, "order", never)
			beside <- err
		}()
		fenceWant(t, "at once", <-beside, onceq.ErrNameUsed)
		return onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 7, nil })
	})
	fenceOK(t, "Once", err)
	_, err = onceq.Once(ctx, l, "charge", never)
	fenceWant(t, "afterwards", err, onceq.ErrNameUsed)

	// An effect that did not succeed may be tried again, in the same run too.
	down := errors.New("down")
	_, err = onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) { return 0, onceq.NotApplied(down) })
	fenceWant(t, "refused", err, down)
	func() {
		defer func() { _ = recover() }()
		_, _ = onceq.Once(ctx, l, "mail", never)
	}()
	r, err := onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) { return 3, nil })
	if r != 3 || err != nil {
		t.Error(r, err)
	}
	r, err = onceq.Once(ctx, fenceRedeliver(t, db), "mail", never) // the next run replays
	if r != 3 || err != nil {
		t.Error(r, err)
	}
}

// Each call of a handler is a run, even if a conflict in Postgres, or code around the handler, calls it again with the same
// lease.
func TestOnce_EachCallOfAHandlerReplays(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	kind := onceq.Kind[int]{Name: "k"}
	charged, calls := 0, 0
	charge := func(context.Context, string) (int, error) { charged++; return charged, nil }
	once := func(ctx context.Context, l *onceq.Lease) error {
		calls++
		if r, err := onceq.Once(ctx, l, "charge", charge); r != 1 || err != nil {
			t.Error(r, err)
		}
		if calls == 1 {
			return &pgconn.PgError{Code: "40001", Message: "again"}
		}
		return nil
	}
	twice := func(ctx context.Context, _ []*onceq.Lease, next func(context.Context) error) error {
		_ = next(ctx)
		return next(ctx)
	}
	for name, h := range map[string]onceq.Handler{
		"Wrap": kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error { return once(ctx, l) }).Wrap(twice),
		"HandleTx": kind.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, _ int) error {
			fenceExec(t, tx, `select 1`)
			return once(ctx, l)
		}).Wrap(twice),
		"HandleBatch": kind.HandleBatch(2, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[int]) error {
			return once(ctx, jobs[0].Lease)
		}).Wrap(twice),
	} {
		charged, calls = 0, 0
		_, err := db.Queue.Enqueue(ctx, db.Pool, kind.Job(1))
		fenceOK(t, "Enqueue", err)
		ran := db.RunOne(h)
		if ran.State != onceq.StateCompleted || charged != 1 || calls != 2 {
			t.Errorf("%s: %+v, %d calls, charged %d times", name, ran, calls, charged)
		}
	}
}

// Errors and events name an effect as users do: by its name and its job, never by the key of its fence.
func TestOnce_ErrorsAndEventsNameTheEffectAndItsJob(t *testing.T) {
	t.Parallel()
	var events []onceq.Event
	hook := onceq.HookFunc(func(_ context.Context, e onceq.Event) { events = append(events, e) })
	db := queuetest.New(t, queuetest.Config(onceq.Config{Hook: hook}))
	ctx := t.Context()
	r, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "order:7", Queue: "q"})
	fenceOK(t, "Enqueue", err)
	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "q"})
	fenceOK(t, "Claim", err)
	l := leases[0]
	effect := fmt.Sprintf(`effect "mail" of job %d`, r.ID)
	said := func(err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "/mail") || strings.Contains(err.Error(), `scope ""`) {
			t.Errorf("got %v; want it to say %s", err, want)
		}
	}
	said(onceqops.New(db.Queue).Resolve(ctx, db.Pool, r.ID, "mial", onceq.NeverApplied()), fmt.Sprintf(`effect "mial" of job %d is not uncertain or held`, r.ID))
	once := func(err error) error {
		_, err = onceq.Once(ctx, l, "mail", func(context.Context, string) (int, error) { return 0, err }, onceq.OnUncertain(onceq.Hold()))
		return err
	}
	err = once(errors.New("reset"))
	said(err, "the outcome of "+effect+" is uncertain: reset")
	var uncertain *onceq.UncertainError
	if !errors.As(err, &uncertain) || uncertain.Effect != "mail" || uncertain.JobID != r.ID || uncertain.Key != "" {
		t.Errorf("%+v", uncertain)
	}
	fenceOK(t, "Snooze", l.Snooze(ctx, 1))
	leases, err = db.Queue.Claim(ctx, onceq.ClaimOptions{Queue: "q"})
	fenceOK(t, "Claim", err)
	stale := l
	l = leases[0]
	said(once(nil), effect+" is held until somebody resolves it")
	l = stale
	said(once(nil), fmt.Sprintf(`effect "mail" refused: the lease of job %d`, r.ID))
	n := 0
	for _, e := range events {
		if e.Name != "" {
			n++
			if e.Name != "mail" || e.Key != "order:7" || e.Scope != "k" || e.JobID != r.ID {
				t.Errorf("%+v", e)
			}
		}
		if strings.ContainsRune(string(e.Type), ' ') {
			t.Errorf("the event %q has a space in its name", e.Type)
		}
	}
	if n == 0 {
		t.Error("no event of the effect")
	}
}

// One mark anywhere in a tree of errors once released effects that had happened: three charges and three orders, under
// Hold.
func TestOnce_NotAppliedCountsOnlyIfTheWholeErrorSaysSo(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	id := fenceJob(t, db, "a")
	l := fenceLease(t, db)
	refused, timeout := onceq.NotApplied(errors.New("refused")), errors.New("timeout")
	var nothing error = &url.Error{Op: "Post", URL: "u", Err: refused}
	for name, c := range map[string]struct {
		err     error
		applied bool // whether the effect may have happened
	}{
		"itself":          {refused, false},
		"wrapped":         {fmt.Errorf("charging: %w", nothing), false},
		"fatal":           {onceq.Fatal(onceq.RetryAfter(time.Second, refused)), false},
		"marked again":    {onceq.NotApplied(errors.Join(refused, timeout)), false},
		"each":            {errors.Join(refused, fmt.Errorf("and %w", refused)), false},
		"each, in a text": {fmt.Errorf("%w and %w", refused, refused), false},
		"one of two":      {errors.Join(refused, timeout), true},
		"one, in a text":  {fmt.Errorf("%w: %w", timeout, refused), true},
		"one, deeper":     {fmt.Errorf("sending: %w", errors.Join(refused, errors.Join(refused, timeout))), true},
		"an empty tree":   {noErrors{}, true},
		"no mark":         {timeout, true},
		"unwraps to nil":  {fmt.Errorf("nothing: %w", nil), true},
	} {
		_, err := onceq.Once(ctx, l, name, func(context.Context, string) (int, error) { return 0, c.err }, onceq.OnUncertain(onceq.Hold()))
		if errors.Is(err, onceq.ErrUncertain) != c.applied || err.Error() == "" {
			t.Errorf("%s: %v", name, err)
		}
		state := fenceGet[int](t, db.Pool, `select state::int from onceq.job_fences where key = $1`, fmt.Sprintf("%d/%s", id, name))
		if want := map[bool]int{false: 5, true: 2}[c.applied]; state != want {
			t.Errorf("%s: state %d, want %d", name, state, want)
		}
	}
}

type noErrors struct{}

func (noErrors) Error() string   { return "none" }
func (noErrors) Unwrap() []error { return nil }

func TestOnce_NotAppliedEndsAtTheOnceThatItWasGivenTo(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx := t.Context()
	kind := onceq.Kind[int]{Name: "order", Backoff: func(int, error) time.Duration { return 0 }}
	refused := errors.New("refused")
	for name, wrap := range map[string]func(error) error{
		"as it is": func(err error) error { return err },
		"wrapped":  func(err error) error { return fmt.Errorf("charging: %w", err) },
		"joined":   func(err error) error { return errors.Join(err, err) },
	} {
		ordered := 0
		_, err := db.Queue.Enqueue(ctx, db.Pool, kind.Job(1))
		fenceOK(t, "Enqueue", err)
		ran := db.Drain(kind.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
			_, err := onceq.Once(ctx, l, "order", func(ctx context.Context, _ string) (int, error) {
				ordered++
				_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (int, error) { return 0, onceq.NotApplied(refused) })
				fenceWant(t, "the inner one", err, refused)
				return 0, wrap(err)
			}, onceq.OnUncertain(onceq.Hold()))
			return err
		}))
		if last := ran[len(ran)-1]; ordered != 1 || last.State != onceq.StateHeld {
			t.Errorf("%s: ordered %d times, %+v", name, ordered, ran)
		}
	}
	// The outer Do's own error counts. The same is true when asking fails with a mark.
	spec := onceq.FenceSpec{Key: "k"}
	not := func(context.Context, *onceq.FenceLease) (int, error) { return 0, onceq.NotApplied(refused) }
	_, err := onceq.Do(ctx, db.Queue, spec, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
		_, err := onceq.Do(ctx, db.Queue, onceq.FenceSpec{Key: "inner"}, not)
		return 0, onceq.NotApplied(err)
	})
	if errors.Is(err, onceq.ErrUncertain) {
		t.Error(err)
	}
	_, err = onceq.Do(ctx, db.Queue, spec, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
		inner := onceq.FenceSpec{Key: "inner", Policy: onceq.Ask(func(context.Context, string) (any, bool, error) {
			return nil, false, onceq.NotApplied(refused)
		})}
		_, err := onceq.Do(ctx, db.Queue, inner, func(context.Context, *onceq.FenceLease) (int, error) { return 0, errors.New("reset") })
		fenceWant(t, "inner", err, onceq.ErrUncertain)
		fenceLapse(t, db)
		fenceExec(t, db.Pool, `update onceq.job_fences set leased_until = statement_timestamp() + interval '1 hour' where key = 'k'`)
		_, err = onceq.Do(ctx, db.Queue, inner, not)
		fenceWant(t, "asking failed", err, refused)
		return 0, err
	})
	fenceWant(t, "asking inside", err, onceq.ErrUncertain)
}
