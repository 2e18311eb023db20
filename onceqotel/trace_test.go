package onceqotel_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqotel"
)

func TestTrace_FromTheRequestOverTheProducerToEachAttempt(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	bag, err := baggage.Parse("tenant=acme")
	require.NoError(t, err)
	ctx, request := b.trace.Tracer("test").Start(baggage.ContextWithBaggage(t.Context(), bag), "request")
	r := b.enqueue(ctx, welcome.Job(mail{"ada"}))
	request.End()
	var tenants []string
	b.drain(welcome.Handle(func(ctx context.Context, l *onceq.Lease, _ mail) error {
		tenants = append(tenants, baggage.FromContext(ctx).Member("tenant").Value())
		require.True(t, trace.SpanFromContext(ctx).IsRecording())
		if l.Attempt == 1 {
			return fmt.Errorf("provider: %w", errBoom)
		}
		return nil
	}))

	send := b.one("send mail")
	require.Equal(t, trace.SpanKindProducer, send.SpanKind)
	require.Equal(t, request.SpanContext().SpanID(), send.Parent.SpanID())
	require.Equal(t, map[string]any{
		"messaging.system": "onceq", "messaging.operation.type": "send", "messaging.operation.name": "send",
		"messaging.destination.name": "mail", "messaging.message.id": strconv.FormatInt(r.ID, 10), "onceq.kind": "welcome",
	}, attrs(send))

	attempts := b.all("process mail")
	require.Len(t, attempts, 2)
	for i, s := range attempts {
		require.Equal(t, trace.SpanKindConsumer, s.SpanKind)
		require.False(t, s.Parent.IsValid())
		require.NotEqual(t, send.SpanContext.TraceID(), s.SpanContext.TraceID())
		require.Len(t, s.Links, 1)
		require.Equal(t, send.SpanContext.TraceID(), s.Links[0].SpanContext.TraceID())
		require.Equal(t, send.SpanContext.SpanID(), s.Links[0].SpanContext.SpanID())
		a := attrs(s)
		require.EqualValues(t, i+1, a["onceq.attempt"])
		require.Equal(t, strconv.FormatInt(r.ID, 10), a["messaging.message.id"])
		require.Equal(t, "process", a["messaging.operation.type"])
		require.Equal(t, "mail", a["messaging.destination.name"])
		require.Equal(t, "welcome", a["onceq.kind"])
	}
	require.Greater(t, attrs(attempts[1])["onceq.token"], attrs(attempts[0])["onceq.token"])
	require.Equal(t, codes.Error, attempts[0].Status.Code)
	require.Equal(t, "*errors.errorString", attrs(attempts[0])["error.type"])
	require.Equal(t, codes.Unset, attempts[1].Status.Code)
	require.Equal(t, []string{"acme", "acme"}, tenants)
}

// The trace context differs from one Enqueue to the next and does not count when payloads are compared.
func TestTrace_DuplicateAndMismatchAreEvents(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	first := b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	again := b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	require.True(t, again.Duplicate)
	other := welcome.Job(mail{"bob"})
	other.Key = "welcome:ada"
	_, err := b.q.Enqueue(t.Context(), b.Pool, other)
	require.ErrorIs(t, err, onceq.ErrMismatch)

	spans := b.all("send mail")
	require.Len(t, spans, 3)
	require.Empty(t, spans[0].Events)
	require.Equal(t, []string{"onceq.duplicate"}, events(spans[1]))
	require.Equal(t, codes.Unset, spans[1].Status.Code, "a duplicate is no error")
	id := strconv.FormatInt(first.ID, 10)
	require.Equal(t, id, spans[1].Events[0].Attributes[0].Value.AsString())
	require.NotContains(t, attrs(spans[1]), "messaging.message.id", "nothing was sent")
	require.Equal(t, []string{"onceq.mismatch"}, events(spans[2]))
	require.Equal(t, codes.Error, spans[2].Status.Code)
	require.Equal(t, "mismatch", attrs(spans[2])["error.type"])
	require.ErrorContains(t, err, "welcome:ada")
	require.NotContains(t, fmt.Sprint(spans[2]), "welcome:ada", "no span names a key")

	info, err := b.q.Get(t.Context(), b.Pool, first.ID)
	require.NoError(t, err)
	require.Contains(t, info.Metadata["traceparent"], spans[0].SpanContext.SpanID().String())
}

func TestTrace_ManyJobsAreOneSpanAndABatchHandlerLinksAll(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	carried := map[string]string{"note": "mine"}
	jobs := []onceq.Job{welcome.Job(mail{"a"}), welcome.Job(mail{"b"}), welcome.Job(mail{"c"})}
	jobs[0].Metadata = carried
	_, err := b.q.EnqueueMany(t.Context(), b.Pool, jobs)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"note": "mine"}, carried)
	send := b.one("send mail")
	require.EqualValues(t, 3, attrs(send)["messaging.batch.message_count"])
	require.NotContains(t, attrs(send), "messaging.message.id")

	// The caller's own batch runs in another span.
	ctx, request := b.trace.Tracer("test").Start(t.Context(), "request")
	batch := &pgx.Batch{}
	_, err = b.q.EnqueueInBatch(batch, b.tel.Inject(ctx, welcome.Job(mail{"d"})))
	require.NoError(t, err)
	require.NoError(t, pipeline(ctx, b.Pool, batch))
	request.End()

	var notes []string
	b.drain(welcome.HandleBatch(10, func(ctx context.Context, _ pgx.Tx, jobs []onceq.Item[mail]) error {
		for _, j := range jobs {
			notes = append(notes, j.Metadata["note"])
		}
		return nil
	}))
	require.Equal(t, []string{"mine", "", "", ""}, notes)
	s := b.one("process mail")
	require.EqualValues(t, 4, attrs(s)["messaging.batch.message_count"])
	require.Len(t, s.Links, 4)
	for i, l := range s.Links {
		want := send.SpanContext
		if i == 3 {
			want = request.SpanContext()
		}
		require.Equal(t, want.SpanID(), l.SpanContext.SpanID())
		require.NotEmpty(t, l.Attributes)
	}

	// Several queues share no name.
	_, err = b.q.EnqueueMany(t.Context(), b.Pool, []onceq.Job{{Kind: "x", Queue: "one"}, {Kind: "y"}})
	require.NoError(t, err)
	require.NotContains(t, attrs(b.one("send")), "messaging.destination.name")
}

func TestTrace_UncertainAndReplayedAreEventsOfTheAttempt(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	runs := 0
	b.drain(welcome.Handle(func(ctx context.Context, l *onceq.Lease, _ mail) error {
		send := func(context.Context, string) (int, error) {
			if l.Attempt == 1 {
				return 0, errBoom
			}
			return 1, nil
		}
		if _, err := onceq.Once(ctx, l, "mail", send); err != nil {
			return err
		}
		if runs++; runs == 1 {
			return onceq.Snooze(1)
		}
		return nil
	}))
	attempts := b.all("process mail")
	require.Len(t, attempts, 3)
	require.Equal(t, []string{"onceq.uncertain"}, events(attempts[0]))
	require.Equal(t, "uncertain", attrs(attempts[0])["error.type"])
	require.Equal(t, []string{"onceq.replayed"}, events(attempts[2]))
	effect := attempts[2].Events[0].Attributes
	require.Equal(t, "mail", effect[len(effect)-1].Value.AsString())
}

// A beat notices that the lease is lost: the event is in the span of the running attempt.
func TestTrace_LeaseLostWhileItRuns(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	r := b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	b.drainLeasing(15*time.Second, welcome.Handle(func(ctx context.Context, l *onceq.Lease, _ mail) error {
		if l.Lost > 0 {
			return nil
		}
		taken := b.takeOver(r.ID)
		<-ctx.Done()
		require.NoError(t, taken.Release(t.Context()))
		return context.Cause(ctx)
	}))
	attempts := b.all("process mail")
	require.Len(t, attempts, 2)
	require.Equal(t, []string{"onceq.lease_lost"}, events(attempts[0]))
	require.Equal(t, "lease_lost", attrs(attempts[0])["error.type"])
	require.Empty(t, b.all("settle mail"))
}

// The loss is noticed after the handler has returned: it makes a span below the attempt's.
func TestTrace_RefusedCompletionIsASpan(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	r := b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	var other *onceq.Lease
	b.drain(welcome.Handle(func(ctx context.Context, l *onceq.Lease, _ mail) error {
		taken := b.takeOver(r.ID)
		other = taken
		return nil
	}))
	require.NoError(t, other.Complete(t.Context(), nil))
	attempt, settle := b.one("process mail"), b.one("settle mail")
	require.Equal(t, codes.Unset, attempt.Status.Code)
	require.Equal(t, attempt.SpanContext.SpanID(), settle.Parent.SpanID())
	require.Equal(t, attempt.SpanContext.TraceID(), settle.SpanContext.TraceID())
	require.Equal(t, codes.Error, settle.Status.Code)
	require.Equal(t, "lease_lost", attrs(settle)["error.type"])
	require.Equal(t, "settle", attrs(settle)["messaging.operation.type"])
	require.Equal(t, []string{"onceq.lease_lost"}, events(settle))
}

func TestTrace_PanicEndsTheSpanAndASnoozeIsNoError(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	b.drain(welcome.Handle(func(ctx context.Context, l *onceq.Lease, _ mail) error {
		if l.Attempt == 1 {
			panic("lost my way")
		}
		return onceq.Snooze(time.Hour)
	}))
	attempts := b.all("process mail")
	require.Len(t, attempts, 2)
	require.Equal(t, codes.Error, attempts[0].Status.Code)
	require.Equal(t, "panic", attrs(attempts[0])["error.type"])
	require.Equal(t, codes.Unset, attempts[1].Status.Code)
	require.Empty(t, attempts[1].Events)
}

// A loop of the application's own begins the same span of an attempt by hand, with the same events.
func TestTrace_StartForALoopAroundClaim(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	bag, err := baggage.Parse("tenant=acme")
	require.NoError(t, err)
	b.enqueue(baggage.ContextWithBaggage(t.Context(), bag), welcome.Job(mail{"ada"}))
	outer, loop := b.trace.Tracer("app").Start(t.Context(), "loop")
	for _, want := range []error{errBoom, onceq.Snooze(1), nil} {
		l := b.claim()
		ctx, end := b.tel.Start(outer, l)
		require.Equal(t, "acme", baggage.FromContext(ctx).Member("tenant").Value())
		charge := func(context.Context, string) (int, error) { return 1, want }
		if want != nil {
			_, err := onceq.Once(ctx, l, "mail", charge)
			require.Error(t, err)
			require.NoError(t, l.Fail(ctx, want))
		} else {
			require.NoError(t, l.Complete(ctx, nil))
		}
		end(want)
		if want != nil { // Fail waits for DefaultBackoff
			b.Advance(time.Minute)
		}
	}
	loop.End()
	send, attempts := b.one("send mail"), b.all("process mail")
	require.Len(t, attempts, 3)
	for _, s := range attempts {
		require.Equal(t, trace.SpanKindConsumer, s.SpanKind)
		require.False(t, s.Parent.IsValid())
		require.Len(t, s.Links, 1)
		require.Equal(t, send.SpanContext.SpanID(), s.Links[0].SpanContext.SpanID())
		require.Equal(t, attrs(send)["messaging.message.id"], attrs(s)["messaging.message.id"])
	}
	require.Equal(t, codes.Error, attempts[0].Status.Code)
	require.Contains(t, events(attempts[0]), "onceq.uncertain")
	require.Equal(t, codes.Unset, attempts[1].Status.Code, "a snooze is no error")
	require.Equal(t, codes.Unset, attempts[2].Status.Code)
	require.Empty(t, b.all("settle mail"))

	ctx, end := b.tel.Start(outer)
	require.Equal(t, outer, ctx, "no lease, no span")
	end(nil)
}

// In a loop too, a completion that is refused after the span has ended is a span below it.
func TestTrace_StartAndACompletionThatIsRefused(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	r := b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	l := b.claim()
	ctx, end := b.tel.Start(t.Context(), l)
	end(nil)
	b.ExpireLease(r.ID)
	require.NoError(t, b.claim().Complete(t.Context(), nil))
	require.ErrorIs(t, l.Complete(ctx, nil), onceq.ErrLeaseLost)
	attempt, settle := b.one("process mail"), b.one("settle mail")
	require.Equal(t, attempt.SpanContext.SpanID(), settle.Parent.SpanID())
	require.Equal(t, "lease_lost", attrs(settle)["error.type"])
}

// The trace context is left out if the metadata would get too large, and the job is accepted.
func TestTrace_NoJobFailsForBeingTraced(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	job := onceq.Job{Kind: "k", Metadata: map[string]string{"big": strings.Repeat("x", onceq.MaxMetadataBytes-20)}}
	r := b.enqueue(t.Context(), job)
	info, err := b.q.Get(t.Context(), b.Pool, r.ID)
	require.NoError(t, err)
	require.Len(t, info.Metadata, 1)
}

// The application's own hook and BeforeEnqueue are still called.
func TestTrace_BesideTheApplicationsOwn(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	var heard []onceq.EventType
	var ended int
	q, err := onceq.New(b.Pool, b.tel.Config(&onceq.Config{
		Hook: onceq.HookFunc(func(_ context.Context, e onceq.Event) { heard = append(heard, e.Type) }),
		BeforeEnqueue: func(ctx context.Context, jobs []onceq.Job) (context.Context, func(error)) {
			jobs[0].Metadata = map[string]string{"tenant": "acme"}
			return ctx, func(error) { ended++ }
		},
	}))
	require.NoError(t, err)
	r, err := q.Enqueue(t.Context(), b.Pool, onceq.Job{Kind: "k"})
	require.NoError(t, err)
	info, err := q.Get(t.Context(), b.Pool, r.ID)
	require.NoError(t, err)
	require.Equal(t, "acme", info.Metadata["tenant"])
	require.NotEmpty(t, info.Metadata["traceparent"])
	require.Equal(t, []onceq.EventType{onceq.EventEnqueued}, heard)
	require.Equal(t, 1, ended)
	b.one("send default")
}

// The default propagator is the W3C's.
func TestTrace_PropagatorByDefault(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	tel, err := onceqotel.New(onceqotel.Config{TracerProvider: b.trace, MeterProvider: metric.NewMeterProvider()})
	require.NoError(t, err)
	ctx, span := b.trace.Tracer("test").Start(t.Context(), "request")
	defer span.End()
	require.Contains(t, tel.Inject(ctx, onceq.Job{}).Metadata["traceparent"], span.SpanContext().TraceID().String())
	require.Nil(t, tel.Inject(t.Context(), onceq.Job{}).Metadata, "no span, nothing to carry")
}

// If a commit is refused after the handler has returned, its error is a span of its own.
func TestTrace_AFailedCommitIsASpan(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	_, err := b.Pool.Exec(t.Context(), `create table sent (who text unique deferrable initially deferred); insert into sent values ('ada')`)
	require.NoError(t, err)
	kind := welcome
	kind.MaxAttempts = 1
	b.enqueue(t.Context(), kind.Job(mail{"ada"}))
	b.drain(kind.HandleTx(func(ctx context.Context, tx pgx.Tx, _ *onceq.Lease, m mail) error {
		_, err := tx.Exec(ctx, `insert into sent values ($1)`, m.To)
		return err
	}))
	attempt, settle := b.one("process mail"), b.one("settle mail")
	require.Equal(t, codes.Unset, attempt.Status.Code)
	require.Equal(t, attempt.SpanContext.SpanID(), settle.Parent.SpanID())
	require.Equal(t, codes.Error, settle.Status.Code)
	require.Contains(t, settle.Status.Description, "sent_who_key")
	require.Equal(t, []string{"exception"}, events(settle))
}

// Attempts of a worker that runs inside a span are traces of their own.
func TestTrace_AttemptsAreTracesOfTheirOwn(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.enqueue(t.Context(), welcome.Job(mail{"ada"}))
	ctx, outer := b.trace.Tracer("app").Start(t.Context(), "serve")
	w, err := onceq.NewWorker(b.q, onceq.WorkerConfig{}, b.tel.Handlers(welcome.Handle(func(context.Context, *onceq.Lease, mail) error { return nil }))...)
	require.NoError(t, err)
	require.NoError(t, w.Drain(ctx, 0))
	outer.End()
	attempt := b.one("process mail")
	require.False(t, attempt.Parent.IsValid())
	require.NotEqual(t, outer.SpanContext().TraceID(), attempt.SpanContext.TraceID())
}

// Whichever of onceq's errors a handler returns, wrapped or as part of another text, no span names the key or the
// scope.
func TestTrace_NoErrorNamesAKey(t *testing.T) {
	t.Parallel()
	const key, scope, elsewhere = "sesame", "treasury", "cave"
	b := newBench(t)
	spec := onceq.FenceSpec{Key: key, Scope: scope, Lease: time.Hour}
	fence := func(q *onceq.Queue, spec onceq.FenceSpec) *onceq.Fence {
		f, err := q.Fence(spec)
		require.NoError(t, err)
		return f
	}
	claim := func(q *onceq.Queue, spec onceq.FenceSpec) *onceq.FenceLease {
		c, err := fence(q, spec).Claim(t.Context(), nil)
		require.NoError(t, err)
		return c
	}
	job := onceq.Job{Kind: "other", Queue: "other", Key: key, Scope: scope, Payload: 1}
	taken := b.enqueue(t.Context(), job)
	strict, another := job, job
	strict.Strict, another.Payload = true, 2
	claim(b.q, spec)
	lost := claim(b.q, onceq.FenceSpec{Key: key, Scope: elsewhere})
	require.NoError(t, lost.Release(t.Context(), nil))
	text := onceq.FenceSpec{Key: key + "-text", Scope: scope}
	require.NoError(t, claim(b.q, text).Complete(t.Context(), nil, "forty"))
	// The pool of this queue is closed.
	pool, err := pgxpool.New(t.Context(), b.URL)
	require.NoError(t, err)
	cut, err := onceq.New(pool, nil)
	require.NoError(t, err)
	open := claim(cut, onceq.FenceSpec{Key: key + "-open", Scope: scope})
	pool.Close()

	enqueue := func(ctx context.Context, job onceq.Job) error {
		_, err := b.q.Enqueue(ctx, b.Pool, job)
		return err
	}
	claims := func(ctx context.Context, q *onceq.Queue) error {
		_, err := fence(q, spec).Claim(ctx, nil)
		return err
	}
	errs := map[string]func(ctx context.Context) error{
		"duplicate": func(ctx context.Context) error { return enqueue(ctx, strict) },
		"mismatch":  func(ctx context.Context) error { return enqueue(ctx, another) },
		"in flight": func(ctx context.Context) error { return claims(ctx, b.q) },
		"lost":      func(ctx context.Context) error { return lost.Complete(ctx, nil, 1) },
		"not found": func(ctx context.Context) error {
			_, err := b.q.GetByKey(ctx, b.Pool, elsewhere, key)
			return err
		},
		"nothing to resolve": func(ctx context.Context) error {
			return fence(b.q, onceq.FenceSpec{Key: key, Scope: elsewhere}).Resolve(ctx, nil, onceq.NeverApplied())
		},
		"no claim":      func(ctx context.Context) error { return claims(ctx, cut) },
		"no completion": func(ctx context.Context) error { return open.Complete(ctx, nil, 1) },
		"no resolution": func(ctx context.Context) error { return fence(cut, spec).Resolve(ctx, nil, onceq.NeverApplied()) },
		"another type": func(ctx context.Context) error {
			_, err := onceq.Do(ctx, b.q, text, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
			return err
		},
		"hidden by row security": func(ctx context.Context) error {
			return pgx.BeginFunc(ctx, b.Pool, func(tx pgx.Tx) error {
				role := "r_" + b.Pool.Config().ConnConfig.Database + "_" + strconv.FormatInt(onceq.LeaseFromContext(ctx).ID, 10)
				for _, sql := range []string{ // all of them are rolled back
					`create role ` + role, `grant usage on schema onceq to ` + role,
					`grant all on all tables in schema onceq to ` + role, `grant all on all sequences in schema onceq to ` + role,
					`alter table onceq.job_fences enable row level security`,
					`create policy p on onceq.job_fences for select using (job_id <> ` + strconv.FormatInt(taken.ID, 10) + `)`,
					`create policy q on onceq.job_fences for insert with check (true)`, `set local role ` + role,
				} {
					if _, err := tx.Exec(ctx, sql); err != nil {
						return err
					}
				}
				_, err := b.q.Enqueue(ctx, tx, job)
				return err
			})
		},
	}
	wraps := []func(error) error{
		func(err error) error { return err },
		func(err error) error { return fmt.Errorf("opening: %w", err) },
		func(err error) error { return fmt.Errorf("opening: %v", err) },
		func(err error) error { return errors.Join(errBoom, err) },
	}
	kind := welcome
	kind.Key, kind.MaxAttempts = nil, 1
	names := make(map[string]string) // of wrapped errors, by the job's id
	var jobs []onceq.Job
	for name := range errs {
		for i := range wraps {
			jobs = append(jobs, kind.Job(mail{name + "/" + strconv.Itoa(i)}))
		}
	}
	_, err = b.q.EnqueueMany(t.Context(), b.Pool, jobs)
	require.NoError(t, err)
	b.drain(kind.Handle(func(ctx context.Context, l *onceq.Lease, m mail) error {
		name, i, _ := strings.Cut(m.To, "/")
		err := errs[name](ctx)
		require.ErrorContains(t, err, "onceq: ", name)
		require.ErrorContains(t, err, key, name)
		n, _ := strconv.Atoi(i)
		if n == 1 {
			names[strconv.FormatInt(l.ID, 10)] = name
		}
		return wraps[n](err)
	}))
	kinds := make(map[string]any)
	ran := make(map[any]bool) // more than once if another holder has the job
	for _, s := range b.all("process mail") {
		ran[attrs(s)["messaging.message.id"]] = true
	}
	require.Len(t, ran, len(jobs))
	for _, s := range b.spans.GetSpans() {
		said := fmt.Sprintf("%+v", s)
		require.NotContains(t, said, key)
		require.NotContains(t, said, scope)
		require.NotContains(t, said, elsewhere)
		if name := names[fmt.Sprint(attrs(s)["messaging.message.id"])]; name != "" && s.Name == "process mail" {
			kinds[name] = attrs(s)["error.type"]
		}
	}
	require.Equal(t, map[string]any{
		"duplicate": "duplicate", "mismatch": "mismatch", "in flight": nil, "lost": "lease_lost", "not found": "not_found",
		"nothing to resolve": "not_found", "hidden by row security": "key_unsettled", "another type": "*json.UnmarshalTypeError",
		"no claim": "*errors.errorString", "no completion": "*errors.errorString", "no resolution": "*errors.errorString",
	}, kinds)

}

// The span has the text of an error that is not onceq's.
func TestTrace_TheTextOfAHandlersError(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	kind := welcome
	kind.Key, kind.MaxAttempts = nil, 1
	_, err := b.q.EnqueueMany(t.Context(), b.Pool, []onceq.Job{kind.Job(mail{"boom"}), kind.Job(mail{"select 1/0"})})
	require.NoError(t, err)
	b.drain(kind.Handle(func(ctx context.Context, _ *onceq.Lease, m mail) error {
		err := errBoom
		if m.To != "boom" {
			_, err = b.Pool.Exec(ctx, m.To)
		}
		return fmt.Errorf("a mail: %w", err)
	}))
	said := make(map[any]string)
	for _, s := range b.all("process mail") {
		require.Equal(t, []string{"exception"}, events(s))
		said[attrs(s)["error.type"]] = s.Status.Description
	}
	require.Equal(t, map[any]string{
		"*errors.errorString": "a mail: errBoom", "22012": "a mail: ERROR: division by zero (SQLSTATE 22012)",
	}, said)
}
