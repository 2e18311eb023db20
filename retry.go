package onceq

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/table"
)

// What a handler returns decides what happens to its job: nil completes it, a plain error runs it again after its kind's
// backoff until its attempts are spent, and the errors of this file do what their comments say. They work when they are
// wrapped, too. Snooze and Reschedule do not count when they are joined with another error, which then decides.

type fatalError struct{ err error }

func (e *fatalError) Error() string { return e.err.Error() }
func (e *fatalError) Unwrap() error { return e.err }

// Fatal makes the job dead at once, because running it again would not help. It works when it is wrapped, as RetryAfter,
// Snooze and Reschedule do. A nil err gives nil.
func Fatal(err error) error {
	if err == nil {
		return nil
	}
	return &fatalError{err}
}

type retryAfter struct {
	d     time.Duration
	err   error        // nil for a snooze
	reset bool         // Reschedule: the run went well
	wait  *finish.Wait // what Await or Sleep waits for
	free  bool         // err spends no attempt: the handler was not called, or did nothing
	full  bool         // LimitFull
}

func (e *retryAfter) Error() string {
	switch {
	case e.wait != nil:
		return fmt.Sprintf("onceq: the job waits for %s; return this error from the handler", e.wait)
	case e.reset:
		return fmt.Sprintf("onceq: run again in %s", e.d)
	case e.err == nil:
		return fmt.Sprintf("onceq: snoozed for %s", e.d)
	}
	return e.err.Error()
}
func (e *retryAfter) Unwrap() error { return e.err }

// RetryAfter fails the attempt with err and runs the job again after d instead of the kind's backoff: for a provider that
// says when to come back. It spends an attempt, as every error does. A nil err gives nil.
func RetryAfter(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &retryAfter{d: d, err: err}
}

// LimitFull says that the provider behind the job's limit takes no more calls for so long, as its
// Retry-After says. It pauses the limit for all jobs (Queue.Pause) and gives this one back to wait for
// that, before those that have come since. It spends no attempt, and err is recorded. A longer pause stays
// as it is. A job without a limit runs again after d, and spends no attempt either. A nil err gives nil,
// and a d of 0 or less counts as a second.
func LimitFull(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	if d <= 0 {
		d = snoozeUnset
	}
	return &retryAfter{d: d, err: err, free: true, full: true}
}

// Snooze runs the job again after d, without spending an attempt and without recording an error. What a handler's
// transaction wrote is rolled back. Joined with another error (errors.Join) it does not count: that error fails the attempt.
//
// A d of 0 or less counts as a second. It is more often an interval that nobody has set than a wish, and nothing else would
// end a job that runs again at once each time.
//
// A job can be claimed about a million times (1,048,574), because its token counts that far. After that it is dead and cannot be
// redriven. Once a second that is twelve days, once a minute two years. For work without an end use a schedule (onceqcron), or let
// the handler enqueue a new job now and then.
func Snooze(d time.Duration) error {
	if d <= 0 {
		d = snoozeUnset
	}
	return &retryAfter{d: d}
}

// snoozeUnset is for how long a Snooze without a time gives a job back.
const snoozeUnset = time.Second

// Reschedule says that this run went well and that the same job, with its id and key, should run again after d. What a
// handler's transaction wrote commits together with that. Attempts count from 0 again, and effects (Once) are done again;
// if the next run fails, its retries replay what that run has done. If a Once returned an error, return that error instead
// of Reschedule: the next run knows nothing of an effect of this run whose outcome is unknown. A d of 0 or less means at once,
// for a job that has done a part of its work and goes on with the next. Each run is one of the about a million claims that a job
// has: see Snooze.
func Reschedule(d time.Duration) error { return &retryAfter{d: d, reset: true} }

// retryOf finds what RetryAfter, Snooze or Reschedule put into err, or returns nil. A panic with a Reschedule does not
// count: that run did not go well.
func retryOf(err error) *retryAfter {
	if err == nil {
		return nil // what follows are allocations
	}
	var again *retryAfter
	var panicked *PanicError
	if !errors.As(err, &again) || again.reset && errors.As(err, &panicked) || again.err == nil && !onlyWishes(err) {
		return nil
	}
	return again
}

// reschedules reports whether err is Reschedule, and nothing that counts for more.
func reschedules(err error) bool {
	again := retryOf(err)
	if again == nil || !again.reset {
		return false
	}
	var fatal *fatalError
	return !errors.As(err, &fatal) && !errors.Is(err, ErrHeld)
}

// onlyWishes reports whether err asks for another run and says nothing of a failure. Joined with any other error a wish does
// not count: the failure would leave no trace, and spend no attempt.
func onlyWishes(err error) bool {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		all := joined.Unwrap()
		return len(all) > 0 && !slices.ContainsFunc(all, func(one error) bool { return !onlyWishes(one) })
	}
	if again, ok := err.(*retryAfter); ok {
		return again.err == nil
	}
	if is, ok := err.(interface{ Is(error) bool }); ok && is.Is(ErrInFlight) {
		return true
	}
	inner := errors.Unwrap(err)
	return inner != nil && onlyWishes(inner)
}

// decidesNothing reports whether err leaves open what becomes of the job.
func decidesNothing(err error) bool {
	var fatal *fatalError
	return !errors.As(err, &fatal) && retryOf(err) == nil && !errors.Is(err, ErrHeld) && !errors.Is(err, ErrInFlight)
}

// IsFailure reports whether err, as a handler returned it, means that something went wrong. It is for code that logs or
// traces around handlers. It is false for nil, Snooze and Reschedule, and for an *InFlightError, which means that somebody
// else is doing the work.
func IsFailure(err error) bool {
	var fatal *fatalError
	switch {
	case err == nil:
		return false
	case errors.As(err, &fatal):
		return true
	}
	if again := retryOf(err); again != nil {
		return again.err != nil
	}
	return !errors.Is(err, ErrInFlight) || !onlyWishes(err)
}

// DefaultBackoff returns attempt⁴ seconds ±10%, at most a day: 1 s, 16 s, 81 s, …
func DefaultBackoff(attempt int) time.Duration {
	const day = 24 * time.Hour
	d := day
	if attempt < 18 {
		d = min(day, time.Duration(attempt*attempt*attempt*attempt)*time.Second)
	}
	return d - d/10 + rand.N(max(1, d/5))
}

// failure returns the outcome for what a handler returned.
func (l *Lease) failure(err error) finish.Outcome {
	o := finish.Outcome{Hold: &l.hold, State: table.StateWaiting, Cause: err, Asked: true, Run: time.Since(l.hold.Began)}
	again := retryOf(err)
	var fatal *fatalError
	var inFlight *InFlightError
	switch {
	case errors.As(err, &fatal):
		o.State, o.Spend, o.Err, o.Keep = table.StateDead, true, finish.Text(err.Error()), -1
	case errors.Is(err, ErrHeld):
		o.State, o.Err, o.Keep = table.StateHeld, finish.Text(err.Error()), -1
		var held *HeldError
		o.Own = errors.As(err, &held) && held.JobID == l.ID
	case again != nil && (again.err == nil || again.free):
		freely(&o, again)
	case errors.As(err, &inFlight) && onlyWishes(err):
		o.Delay = inFlight.RetryAfter // somebody else is doing the work: this run did not fail
	default:
		o.Spend, o.Err = true, finish.Text(err.Error())
		if l.Attempt >= l.MaxAttempts {
			o.State, o.Keep = table.StateDead, -1
			break
		}
		if again != nil {
			o.Delay = again.d
			break
		}
		if o.Delay = DefaultBackoff(l.Attempt); l.h != nil && l.h.backoff != nil {
			o.Delay = l.askBackoff(err, o.Delay)
		}
	}
	o.Delay = min(max(0, o.Delay), table.MaxDelay)
	return o
}

// freely makes o one that spends no attempt.
func freely(o *finish.Outcome, again *retryAfter) {
	o.Delay, o.Reset, o.Wait, o.Asked = again.d, again.reset, again.wait, !again.free || again.full
	if again.err != nil {
		o.Err = finish.Text(o.Cause.Error())
	}
	if again.full && o.Hold.Limit != "" {
		o.Delay, o.Full = 0, min(again.d, table.MaxDelay)
	}
}

// askBackoff asks the kind's Backoff. If that panics or ends its goroutine, the delay stays.
func (l *Lease) askBackoff(err error, delay time.Duration) time.Duration {
	l.q.guard.Call("Kind.Backoff of "+l.Kind, func() { delay = l.h.backoff(l.Attempt, err) })
	return delay
}
