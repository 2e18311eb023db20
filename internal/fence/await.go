package fence

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Wait is what a job waits for: an event, or the end of a sleep.
type Wait struct {
	finish.Wait
	Store    *pg.Store
	DB       pg.DB // does not depend on the handler's transaction
	Job      *hold.Hold
	Identity int64 // see table.OfRound
}

// Awaited is what came of a wait: a row of job_awaits.
type Awaited struct {
	State   int16         // table.AwaitOpen and the like; of a sleep, always open
	Left    time.Duration // until the time-out, or the end of the sleep; not above 0 if that is past
	Payload string
	Busy    bool // a transaction that emits the event is open
	Lost    bool // the job's lease is
}

// What came of a wait, as table.AwaitOpen and the like.
const (
	awaitOpen int16 = iota
	AwaitCame
	AwaitTimedOut
)

// Event waits for an event, and decides whether it came in time.
func (w *Wait) Event(ctx context.Context, d time.Duration) (*Awaited, error) {
	for range table.SettleTries {
		a, err := w.Begin(ctx, d)
		if err != nil || a.Busy || a.Lost || a.State != awaitOpen || a.Left > 0 {
			return a, err
		}
		var holds, timedOut bool
		switch err := w.send(ctx, stmt.EndAwait, []any{w.Job.Claims, w.Job.Holder}, &holds, &timedOut); {
		case err != nil:
			return nil, err
		case !holds:
			return &Awaited{Lost: true}, nil
		case timedOut:
			return &Awaited{State: AwaitTimedOut}, nil
		}
		if a, err = w.read(ctx); err == nil && a != nil && a.State == awaitOpen {
			return &Awaited{Busy: true}, nil // the event is just being emitted
		}
	}
	return nil, fmt.Errorf("%w (event %q in scope %q)", table.ErrKeyUnsettled, w.Key, w.Scope)
}

// Begin reads what came of the wait, and begins it if the job asks for the first time.
func (w *Wait) Begin(ctx context.Context, d time.Duration) (*Awaited, error) {
	for range table.SettleTries {
		if a, err := w.read(ctx); a != nil || err != nil {
			return a, err
		}
		if a, err := w.begin(ctx, min(d, table.MaxDelay)); a != nil || err != nil {
			return a, err
		}
	}
	return nil, fmt.Errorf("%w (%s)", table.ErrKeyUnsettled, w.Wait)
}

// meeting is for where a wait may meet an Emit that is open.
var meeting = pg.Waiting(pg.BriefWait)

// send sends a statement that commits by itself.
func (w *Wait) send(ctx context.Context, statement string, args []any, dest ...any) error {
	ctx, cancel := context.WithTimeout(ctx, pg.AnswerWithin)
	defer cancel()
	var err error
	for range table.SettleTries {
		err = w.Store.Send(ctx, w.DB, meeting, statement, append([]any{w.Job.ID, w.Scope, w.Key, w.Identity}, args...), pg.Row(dest...))
		if !sqlstate.Retryable(err) {
			break
		}
	}
	if err != nil && !errors.Is(err, pgx.ErrNoRows) && !pg.LockedOut(err) {
		return fmt.Errorf("onceq: waiting for %s: %w", w.Wait, w.Store.Told(err))
	}
	return err
}

// read returns nil if there is no row of this round.
func (w *Wait) read(ctx context.Context) (*Awaited, error) {
	const read = `
select a.state, (extract(epoch from a.until - statement_timestamp()) * 1e6)::bigint, coalesce(a.payload::text, '')
  from onceq.job_awaits a
 where ` + stmt.ThisAwait
	var a Awaited
	var left int64
	err := w.send(ctx, read, nil, &a.State, &left, &a.Payload)
	a.Left = time.Duration(left) * time.Microsecond
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &a, err
}

func (w *Wait) begin(ctx context.Context, d time.Duration) (*Awaited, error) {
	var holds bool
	var state *int16
	a := Awaited{Left: d}
	err := w.send(ctx, stmt.BeginAwait, []any{w.Job.Claims, w.Job.Holder, d.Microseconds()}, &holds, &state, &a.Payload)
	switch {
	case pg.LockedOut(err):
		return &Awaited{Busy: true}, nil
	case err != nil:
		return nil, err
	case !holds:
		return &Awaited{Lost: true}, nil
	case state == nil:
		return nil, nil
	}
	a.State = *state
	return &a, nil
}
