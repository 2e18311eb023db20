package onceq

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// What a handler returns decides what becomes of its job: nil completes it, a plain error runs it again after
// its kind's backoff until its attempts are used up, and the errors of this file do as they say. They work
// wrapped as well.

type fatalError struct{ err error }

func (e *fatalError) Error() string { return e.err.Error() }
func (e *fatalError) Unwrap() error { return e.err }

// Fatal makes the job dead at once: running it again would not help. A nil err gives nil.
func Fatal(err error) error {
	if err == nil {
		return nil
	}
	return &fatalError{err}
}

type retryAfter struct {
	d     time.Duration
	err   error // nil for a snooze
	reset bool  // the run went well: reschedule
	free  bool  // an error that spends no attempt: the handler was not called, or got nowhere
}

func (e *retryAfter) Error() string {
	switch {
	case e.reset:
		return fmt.Sprintf("onceq: run again in %s", e.d)
	case e.err == nil:
		return fmt.Sprintf("onceq: snoozed for %s", e.d)
	}
	return e.err.Error()
}
func (e *retryAfter) Unwrap() error { return e.err }

// RetryAfter runs the job again after d in place of the kind's backoff, because of err: for a provider that says when
// to come back. It spends an attempt, as every error does. A nil err gives nil.
func RetryAfter(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &retryAfter{d: d, err: err}
}

// Snooze runs the job again after d, without spending an attempt and without an error. What a handler's
// transaction wrote is rolled back.
func Snooze(d time.Duration) error { return &retryAfter{d: d} }

// Reschedule says that this run went well and that the same job, with its id and key, is to run again after
// d. What a handler's transaction wrote commits together with that. Attempts count from 0 again, and effects (Once) are
// done again; where the next run fails, its retries replay what it has done. Return the error of a Once in place of
// Reschedule: the next run does not know of an effect of this one whose outcome is unknown.
func Reschedule(d time.Duration) error { return &retryAfter{d: d, reset: true} }

// retryOf finds what RetryAfter, Snooze or Reschedule put into err, or nil. A panic with a Reschedule is none: that
// run did not go well.
func retryOf(err error) *retryAfter {
	var again *retryAfter
	var panicked *PanicError
	if !errors.As(err, &again) || again.reset && errors.As(err, &panicked) {
		return nil
	}
	return again
}

// decidesNothing reports whether err leaves open what becomes of the job.
func decidesNothing(err error) bool {
	var fatal *fatalError
	return !errors.As(err, &fatal) && retryOf(err) == nil && !errors.Is(err, ErrHeld) && !errors.Is(err, ErrInFlight)
}

// IsFailure reports whether err, as a handler returned it, says that something went wrong: for those who log or trace
// around handlers. False for nil, Snooze and Reschedule, and for an *InFlightError, where somebody else is at it.
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
	return !errors.Is(err, ErrInFlight)
}

// DefaultBackoff waits attempt⁴ seconds ±10%, at most a day: 1 s, 16 s, 81 s, …
func DefaultBackoff(attempt int) time.Duration {
	const day = 24 * time.Hour
	d := day
	if attempt < 18 {
		d = min(day, time.Duration(attempt*attempt*attempt*attempt)*time.Second)
	}
	return d - d/10 + rand.N(max(1, d/5))
}

// maxDelay bounds what a handler asks for: a century is surely a mistake in units, and no reason to fail.
const maxDelay = 100 * 365 * 24 * time.Hour

// failure gives the outcome for what a handler returned. backoff may be nil.
func (l *Lease) failure(err error, backoff func(int, error) time.Duration) outcome {
	o := outcome{lease: l, state: StateWaiting, cause: err, asked: true, run: time.Since(l.began)}
	again := retryOf(err)
	var fatal *fatalError
	var inFlight *InFlightError
	switch {
	case errors.As(err, &fatal):
		o.state, o.spend, o.err, o.keep = StateDead, true, errorText(err.Error()), -1
	case errors.Is(err, ErrHeld):
		o.state, o.err, o.keep = StateHeld, errorText(err.Error()), -1
	case again != nil && (again.err == nil || again.free):
		o.delay, o.reset = again.d, again.reset
		if again.err != nil {
			o.err = errorText(err.Error())
		}
	case errors.As(err, &inFlight):
		o.delay = inFlight.RetryAfter // somebody is at it: no failure of this run
	default:
		o.spend, o.err = true, errorText(err.Error())
		if l.Attempt >= l.MaxAttempts {
			o.state, o.keep = StateDead, -1
			break
		}
		if again != nil {
			o.delay = again.d
			break
		}
		o.delay = DefaultBackoff(l.Attempt)
		if backoff != nil {
			_ = protect(func() error { // a panic leaves the default
				o.delay = backoff(l.Attempt, err)
				return nil
			})
		}
	}
	o.delay = min(max(0, o.delay), maxDelay)
	return o
}
