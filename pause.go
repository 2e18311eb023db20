package onceq

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// A pause is a row: workers claim nothing of that queue, or of that kind, until the row is gone. They read the rows with
// every look (package claimer), and while they claim at most every paused.Fresh, in the message of a claim. What was read longer than
// paused.Old ago is read again before a claim. So a pause takes hold within paused.Old, however rarely a worker polls, and the
// claim itself does not know of it: a claim asks for the kinds that are not paused, and a queue that is paused gets no
// claim.

// Pause says that a queue, a kind or a limit is paused. Times are the database's.
type Pause struct {
	Queue string        `json:"queue,omitzero"` // one of Queue, Kind and Limit
	Kind  string        `json:"kind,omitzero"`
	Limit string        `json:"limit,omitzero"`
	Since time.Time     `json:"since"`
	Until time.Time     `json:"until,omitzero"` // when it ends by itself; zero: when somebody resumes it
	For   time.Duration `json:"-"`              // for Queue.Pause, instead of Until: from now on
	Note  string        `json:"note,omitzero"`  // who paused it, and why
}

// what gives what p is of, and its name.
func (p Pause) what() (what, name string) {
	switch {
	case p.Kind != "":
		return pausesKind, p.Kind
	case p.Limit != "":
		return pausesLimit, p.Limit
	}
	return pausesQueue, p.Queue
}

func (p Pause) String() string {
	what, name := p.what()
	s := fmt.Sprintf("%s %q has been paused since %s", what, name, p.Since.UTC().Format(time.RFC3339))
	if !p.Until.IsZero() {
		s += " until " + p.Until.UTC().Format(time.RFC3339)
	}
	if p.Note != "" {
		s += " (" + p.Note + ")"
	}
	return s
}

const (
	pausesQueue = "queue"
	pausesKind  = "kind"
	pausesLimit = "limit"
)

// Pause pauses what p names, inside db: one queue, kind or limit, until p.Until, or for p.For, by the
// database's clock, or without both until Resume. It ends by itself within two seconds after that time.
// Pausing it again replaces its time and its note. For a queue or a kind it is PauseQueue or PauseKind.
//
// Of a limit no more jobs are let in, as with the zero Limit: those that run go on, and those that were let
// in still start. The others wait, and keep to the limit when the pause is over. A handler asks for it with
// LimitFull. A family of limits cannot be paused.
func (q *Queue) Pause(ctx context.Context, db DB, p Pause) error {
	what, name := p.what()
	if p.For < 0 || p.For > table.MaxDelay || p.For > 0 && !p.Until.IsZero() {
		return invalid("For", "is %s; 0 to 100 years is possible, and not with Until", p.For)
	}
	at, err := storedTime("Until", p.Until)
	var until, after any
	if p.For > 0 {
		after = p.For.Microseconds()
	} else if !at.IsZero() {
		until = at
	}
	if len(p.Note) > MaxProgressBytes {
		return invalid("note", "has %d bytes; at most %d", len(p.Note), MaxProgressBytes)
	}
	if err := cmp.Or(err, p.check(), checkText("note", p.Note)); err != nil {
		return err
	}
	defer q.pauses.Forget()
	if err := q.store.SendBare(ctx, db, stmt.PauseIt, []any{what, name, until, after, p.Note, false}, pg.Row(nil)); err != nil {
		return fmt.Errorf("onceq: pausing %s %q: %w", what, name, err)
	}
	return nil
}

// check checks what p names.
func (p Pause) check() error {
	switch what, name := p.what(); {
	case name == "" || name != p.Queue+p.Kind+p.Limit:
		return invalid("Pause", "must name one queue, kind or limit")
	case what == pausesLimit:
		_, err := limitLine(what, name, false)
		return err
	default:
		return checkName(what, name, MaxNameBytes)
	}
}

// Resume ends a pause of what p names, inside db, and reports whether it was paused. Nothing else of p
// counts. It is ResumeQueue for limits too, of which workers let in jobs again at once.
func (q *Queue) Resume(ctx context.Context, db DB, p Pause) (was bool, err error) {
	what, name := p.what()
	if err := p.check(); err != nil {
		return false, err
	}
	defer q.pauses.Forget()
	if err := q.store.SendBare(ctx, db, stmt.ResumeIt, []any{what, name}, pg.Row(&was)); err != nil {
		return false, fmt.Errorf("onceq: resuming %s %q: %w", what, name, err)
	}
	return was, nil
}

// pauseFull pauses the limits that handlers said are full, and never makes a pause shorter. If that fails,
// the jobs come again later.
func pauseFull(ctx context.Context, q *Queue, db DB, by pg.Way, outcomes []finish.Outcome) {
	for i, o := range outcomes {
		if o.Full == 0 {
			continue
		}
		l := o.Hold
		note := fmt.Sprintf("the handler of job %d said so (LimitFull)", l.ID)
		args := []any{pausesLimit, l.Limit, nil, o.Full.Microseconds(), note, true}
		if err := q.store.Send(ctx, db, by, stmt.PauseIt, args, pg.Row(nil)); err != nil {
			outcomes[i].Delay = o.Full
			q.log.WarnContext(ctx, "onceq: a limit that is full was not paused", slog.String("limit", l.Limit),
				slog.Any("error", err))
		}
	}
}

// PauseQueue pauses a queue, inside db: from within two seconds after its commit on, no worker, Drain or Claim takes a job of
// it, in any process, until ResumeQueue. Jobs that run go on, also when they were claimed in that moment. Enqueueing,
// cancelling and redriving work as always. The queue need not exist. note says who paused it and why; Ops.Pauses and Ops.Explain
// show it at once, and Ops.Health after a minute. Pausing it again replaces the note.
//
// Its jobs that a limit or a lane has let in keep their places and slots. So jobs of other queues with the same limit may stand
// still: give these a limit of their own, or cancel or move those that have the places, or raise the limit (SetLimit).
func (q *Queue) PauseQueue(ctx context.Context, db DB, queue, note string) error {
	return q.Pause(ctx, db, Pause{Queue: queue, Note: note})
}

// ResumeQueue ends a pause of a queue, inside db, and reports whether it was paused. Workers take its jobs again within two
// seconds, in the order in which they were due; those that a worker had claimed, and gave back because of the pause, come last.
func (q *Queue) ResumeQueue(ctx context.Context, db DB, queue string) (was bool, err error) {
	return q.Resume(ctx, db, Pause{Queue: queue})
}

// PauseKind is PauseQueue for the jobs of a kind, in every queue. The other kinds of these queues go on, so QueueStats.Paused
// does not show it; Pauses does. A schedule (onceqcron) whose jobs are of the kind goes on to enqueue them. Jobs of other kinds
// with the same limit may stand still, as with PauseQueue; but moving those that have the places does not help.
func (q *Queue) PauseKind(ctx context.Context, db DB, kind, note string) error {
	return q.Pause(ctx, db, Pause{Kind: kind, Note: note})
}

// ResumeKind is ResumeQueue for a kind. A queue that is paused itself stays so.
func (q *Queue) ResumeKind(ctx context.Context, db DB, kind string) (was bool, err error) {
	return q.Resume(ctx, db, Pause{Kind: kind})
}
