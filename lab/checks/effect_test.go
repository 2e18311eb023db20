package checks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// A random walk over one job and its outside effects, with a model that says which calls may be made. A worker runs the
// job, whose handler makes calls that end in every possible way. People cancel, resolve and redrive between the runs,
// and in the middle of a call.

// These are the ways in which a call ends.
const (
	callDone      = "done"
	callRefused   = "refused"                // NotApplied
	callWrapped   = "refused, wrapped"       // NotApplied, wrapped in one error
	callAllJoined = "refused, both"          // a join of two, each NotApplied
	callLost      = "lost"                   // it may have happened
	callJoined    = "refused and lost"       // a join of NotApplied and a time-out: it may have happened
	callNested    = "an inner one refused"   // it may have happened; only a call within it was certainly not applied
	callCancelled = "cancelled meanwhile"    // the job is cancelled, and the call ends with its context
	callLate      = "cancelled, and done"    // the same, but the answer still arrived
	callUnstored  = "done, not to be stored" // the result is too large
)

var callEnds = []string{callDone, callRefused, callWrapped, callAllJoined, callLost, callJoined, callNested, callCancelled, callLate, callUnstored}

// certain reports that a call with this end certainly did not happen.
func certain(end string) bool {
	return end == callRefused || end == callWrapped || end == callAllJoined
}

// cancels reports that the job is cancelled in the middle of the call.
func cancels(end string) bool { return end == callCancelled || end == callLate }

// effectModel is what the model knows of a named effect in the current requested run.
type effectModel struct {
	state   string // "", completed, uncertain or held
	broken  bool   // completed, but its result could not be stored
	calls   int    // calls that may have happened
	allowed int    // the largest number of calls allowed: the policy is to hold
}

type effectWalk struct {
	db       *queuetest.DB
	id       int64
	state    onceq.State // StateWaiting: live
	cancel   bool        // it was cancelled in the middle of a call
	effects  map[string]*effectModel
	sequence []string // the steps so far, for a failure's message
}

// effectNames are the effects of the walk's job. A person decides about the first; the provider deduplicates the
// second.
var effectNames = []string{"held", "again"}

func (w *effectWalk) policy(name string) onceq.EffectOption {
	if name == "held" {
		return onceq.OnUncertain(onceq.Hold())
	}
	return onceq.OnUncertain(onceq.RunAgain(onceq.Forever))
}

// call makes one call in a handler. It returns the error that the handler got.
func (w *effectWalk) call(ctx context.Context, t *rapid.T, l *onceq.Lease, name, end string, used map[string]bool) error {
	e := w.effects[name]
	called := false
	_, err := onceq.Once(ctx, l, name, func(ctx context.Context, _ string) (string, error) {
		called = true
		if !certain(end) {
			e.calls++
		}
		if cancels(end) {
			state, err := w.db.Queue.Cancel(ctx, w.db.Pool, l.ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateRunning, state)
			w.cancel = true
			<-ctx.Done()
		}
		refused := onceq.NotApplied(errors.New("connection refused"))
		switch end {
		case callRefused:
			return "", refused
		case callWrapped:
			return "", fmt.Errorf("charge: %w", refused)
		case callAllJoined:
			return "", errors.Join(refused, onceq.NotApplied(errors.New("card declined")))
		case callLost:
			return "", errors.New("reset by peer")
		case callJoined:
			return "", errors.Join(refused, context.DeadlineExceeded)
		case callNested:
			_, err := onceq.Once(ctx, l, "inner", func(context.Context, string) (string, error) { return "", refused })
			require.Error(t, err)
			return "", fmt.Errorf("order: %w", err)
		case callCancelled:
			return "", ctx.Err()
		case callUnstored:
			return string(make([]byte, onceq.MaxResultBytes)), nil
		}
		return "ok", nil
	}, w.policy(name))

	// Check the result against the model.
	switch {
	case used[name]:
		require.False(t, called, "a name that was used in this run")
		require.ErrorIs(t, err, onceq.ErrNameUsed)
		return err
	case e.state == "completed":
		require.False(t, called, "it was done in this run that was asked for")
		if e.broken {
			require.Error(t, err)
			return err
		}
		require.NoError(t, err)
		used[name] = true
		return nil
	case e.state == "held" || e.state == "uncertain" && name == "held":
		require.False(t, called, "a person is to decide")
		require.ErrorIs(t, err, onceq.ErrHeld)
		e.state = "held"
		return err
	}
	require.True(t, called, "nothing stands against the call: %v", err)
	switch {
	case end == callDone || end == callLate:
		require.NoError(t, err)
		e.state, used[name] = "completed", true
	case end == callUnstored:
		require.Error(t, err)
		e.state, e.broken = "completed", true
	case certain(end):
		require.Error(t, err)
		require.NotErrorIs(t, err, onceq.ErrUncertain)
		// An earlier call may still have happened: this one's refusal says nothing about that.
	default:
		require.ErrorIs(t, err, onceq.ErrUncertain)
		e.state = "uncertain"
	}
	if name == "held" {
		require.LessOrEqual(t, e.calls, e.allowed, "calls that may have happened, under Hold")
	}
	return err
}

// run lets a worker run the job once.
func (w *effectWalk) run(t *rapid.T) {
	type one struct{ name, end string }
	var script []one
	for range rapid.IntRange(1, 3).Draw(t, "calls") {
		script = append(script, one{rapid.SampledFrom(effectNames).Draw(t, "effect"), rapid.SampledFrom(callEnds).Draw(t, "end")})
	}
	last := rapid.SampledFrom([]string{"nil", "an error", "reschedule", "reschedule"}).Draw(t, "then")
	w.sequence = append(w.sequence, fmt.Sprint("run ", script, " ", last))
	w.cancel = false
	again := onceq.Reschedule(0)
	var got error
	var failure any
	ran := false
	var lost bool // the worker took its lease for lost before it noticed that the job is cancelled: a machine may stand still for so long
	handler := onceq.Kind[any]{Name: "k", Backoff: func(int, error) time.Duration { return 0 }}.Handle(
		func(ctx context.Context, l *onceq.Lease, _ any) error {
			ran = true
			defer func() { failure = recover() }() // of the test: the worker would turn it into an error
			defer func() { lost = errors.Is(context.Cause(ctx), onceq.ErrLeaseLost) }()
			used := make(map[string]bool)
			for _, c := range script {
				if w.cancel {
					break
				}
				if got = w.call(ctx, t, l, c.name, c.end, used); got != nil {
					return fmt.Errorf("%s: %w", c.name, got)
				}
			}
			switch last {
			case "an error":
				got = errors.New("something else failed")
			case "reschedule":
				got = again
			}
			return got
		})
	lease := 10 * time.Second
	if slices.ContainsFunc(script, func(c one) bool { return cancels(c.end) }) {
		lease = 6 * time.Second // the worker notices after a third of it
	}
	worker, err := onceq.NewWorker(w.db.Queue, onceq.WorkerConfig{Lease: lease}, handler)
	require.NoError(t, err)
	for tries := 0; !ran && tries < 20; tries++ { // a lease may run out before the handler is called
		require.NoError(t, worker.Drain(t.Context(), 1))
	}
	if failure != nil {
		panic(failure)
	}
	require.True(t, ran)
	switch {
	case w.cancel && got == nil:
		w.state = onceq.StateCompleted
	case w.cancel:
		// It ends like a job that was cancelled while it waited, or is held if an effect needs a decision.
		info, err := w.db.Queue.Get(t.Context(), w.db.Pool, w.id)
		require.NoError(t, err, "a job that was cancelled in the middle of an effect is to be found")
		for tries := 0; lost && !info.State.Finished() && tries < 20; tries++ { // the next claim ends it
			require.NoError(t, worker.Drain(t.Context(), 1))
			info, err = w.db.Queue.Get(t.Context(), w.db.Pool, w.id)
			require.NoError(t, err)
		}
		w.state = info.State
		require.Contains(t, []onceq.State{onceq.StateCancelled, onceq.StateHeld}, w.state)
	case got == nil:
		w.state = onceq.StateCompleted
	case errors.Is(got, onceq.ErrHeld):
		w.state = onceq.StateHeld
	case got == again:
		w.afresh() // a requested run repeats its effects
	default:
		w.look(t)
	}
}

// look reads the job's end where the model leaves it open: whether an error is fatal.
func (w *effectWalk) look(t *rapid.T) {
	info, err := w.db.Queue.Get(t.Context(), w.db.Pool, w.id)
	require.NoError(t, err)
	if w.state = info.State; !w.state.Finished() {
		w.state = onceq.StateWaiting
	}
	require.Contains(t, []onceq.State{onceq.StateWaiting, onceq.StateDead}, w.state)
}

func (w *effectWalk) afresh() {
	for _, name := range effectNames {
		w.effects[name] = &effectModel{allowed: 1}
	}
}

// resolve makes a person's decision about an effect.
func (w *effectWalk) resolve(t *rapid.T) {
	name := rapid.SampledFrom(effectNames).Draw(t, "resolved")
	applied := rapid.Bool().Draw(t, "applied")
	w.sequence = append(w.sequence, fmt.Sprint("resolve ", name, " ", applied))
	e := w.effects[name]
	decision := onceq.NeverApplied()
	if applied {
		decision = onceq.Applied("by hand")
	}
	err := onceqops.New(w.db.Queue).Resolve(t.Context(), w.db.Pool, w.id, name, decision)
	switch {
	case e.broken && applied:
		require.NoError(t, err)
		e.broken = false
		w.resolved(t)
	case e.state == "uncertain" || e.state == "held":
		require.NoError(t, err)
		if e.state = ""; applied {
			e.state = "completed"
		} else {
			e.allowed = e.calls + 1
		}
		w.resolved(t)
	default:
		require.ErrorIs(t, err, onceq.ErrNotFound)
	}
}

// resolved runs a held job again when nothing is left to decide.
func (w *effectWalk) resolved(t *rapid.T) {
	if w.state != onceq.StateHeld {
		return
	}
	if !slices.ContainsFunc(effectNames, func(name string) bool { return w.effects[name].state == "held" }) {
		w.state = onceq.StateWaiting
	}
	info, err := w.db.Queue.Get(t.Context(), w.db.Pool, w.id)
	require.NoError(t, err)
	require.Equal(t, w.state, info.State, "after %v", w.sequence)
}

// step takes one possible step.
func (w *effectWalk) step(t *rapid.T) {
	switch what := rapid.SampledFrom([]string{"run", "run", "run", "resolve", "redrive", "cancel"}).Draw(t, "step"); {
	case w.state == onceq.StateWaiting && what == "run":
		w.run(t)
	case what == "resolve":
		w.resolve(t)
	case w.state == onceq.StateWaiting && what == "cancel":
		w.sequence = append(w.sequence, what)
		state, err := w.db.Queue.Cancel(t.Context(), w.db.Pool, w.id)
		require.NoError(t, err)
		require.Equal(t, onceq.StateCancelled, state)
		w.state = state
	case w.state != onceq.StateWaiting:
		w.sequence = append(w.sequence, "redrive")
		state, err := onceqops.New(w.db.Queue).Redrive(t.Context(), w.db.Pool, w.id)
		if err == nil && state == onceq.StateWaiting {
			w.state = state
		}
	}
}

// check compares what people see with the model.
func (w *effectWalk) check(t *rapid.T) {
	require.NoError(t, w.db.Check())
	effects, err := onceqops.New(w.db.Queue).Effects(t.Context(), w.db.Pool, w.id)
	require.NoError(t, err)
	for _, name := range effectNames {
		want := w.effects[name].state
		if want == "completed" {
			want = "" // it needs nobody; one of an earlier run may be listed or not
		}
		i := slices.IndexFunc(effects, func(e onceqops.EffectInfo) bool {
			return e.Name == name && (e.State == "uncertain" || e.State == "held")
		})
		got := ""
		if i >= 0 {
			got = effects[i].State
		}
		require.Equal(t, want, got, "effect %s after %v", name, w.sequence)
		if got != "" && w.state != onceq.StateCompleted { // its handler succeeded without asking for the effect again
			_, err := w.db.Queue.Get(t.Context(), w.db.Pool, w.id)
			require.NoError(t, err, "a job with an effect in doubt is to be found; after %v", w.sequence)
		}
	}
}

func TestEffects_NoCallIsMadeThatMayHaveHappened(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	owner := conformance.Owner(t, db)
	rapid.Check(t, func(t *rapid.T) {
		_, err := owner.Exec(t.Context(), schema(db, `truncate onceq.jobs, onceq.job_fences, onceq.job_history, onceq.job_cancels`))
		require.NoError(t, err)
		res, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", MaxAttempts: 1000})
		require.NoError(t, err)
		w := &effectWalk{db: db, id: res.ID, state: onceq.StateWaiting, effects: make(map[string]*effectModel)}
		w.afresh()
		for range rapid.IntRange(2, 6).Draw(t, "steps") {
			if w.state == onceq.StateCompleted {
				return
			}
			w.step(t)
			w.check(t)
		}
	})
}
