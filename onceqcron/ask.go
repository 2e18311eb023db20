package onceqcron

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// Request is what Ask asks for: AskFire, AskResume or AskBackfill.
type Request struct {
	text string
	bad  error // why nobody can do this
}

// AskFire asks for Fire, AskResume for Resume.
func AskFire() Request   { return Request{text: "fire"} }
func AskResume() Request { return Request{text: "resume"} } // see AskFire

// AskBackfill asks for Backfill.
func AskBackfill(from, to time.Time) Request {
	return Request{"backfill " + from.UTC().Format(time.RFC3339Nano) + " " + to.UTC().Format(time.RFC3339Nano), checkTimes("Backfill", from, to)}
}

const metadataRequest = "onceqcron.request"

// Ask lets a worker whose code has the schedule do what only such a process can: a tool that knows nothing of the
// application's code uses it after ErrElsewhere. It enqueues a job for such a worker and returns that job's id. What comes
// of it is in the ledger; if it is impossible, that job is dead and says why. tx is as for Put.
func (s *Scheduler) Ask(ctx context.Context, tx pgx.Tx, name string, r Request) (id int64, err error) {
	if r.text == "" {
		return 0, invalid("Request", "is empty; use AskFire, AskResume or AskBackfill")
	}
	if r.bad != nil {
		return 0, r.bad
	}
	err = s.within(ctx, tx, func(tx pgx.Tx) error {
		row, err := s.lock(ctx, tx, name)
		if err != nil {
			return err
		}
		if row.job != nil {
			return invalid("Name", "%q is a schedule of the table, which every process can do this with", name)
		}
		id, err = s.ask(ctx, tx, codeKind(name), row.queue, name, r.text)
		return err
	})
	return id, err
}

// ask enqueues the job for a request.
func (s *Scheduler) ask(ctx context.Context, tx pgx.Tx, kind, queue, name, request string) (int64, error) {
	job := onceq.Job{Kind: kind, Queue: queue, Payload: name, Metadata: map[string]string{metadataRequest: request}}
	if request == renew { // the schedule stands still without it; what a person asks for ends soon, and can be asked for again
		job.MaxAttempts = maxAttempts
	}
	made, err := s.q.Enqueue(ctx, tx, job)
	return made.ID, err
}

// goOn makes the job that ticks for a schedule.
func (s *Scheduler) goOn(ctx context.Context, tx pgx.Tx, name string) error {
	r, err := s.ticking(ctx, tx, name)
	if err != nil || r == nil {
		return err
	}
	return s.ensure(ctx, tx, name, r, *r.next, false)
}

// answer does what somebody asked for.
func (s *Scheduler) answer(ctx context.Context, tx pgx.Tx, name, request string) (err error) {
	words := strings.Fields(request)
	switch {
	case request == AskFire().text:
		_, err = s.Fire(ctx, tx, name)
	case request == AskResume().text:
		err = s.Resume(ctx, tx, name)
	case request == renew:
		err = s.goOn(ctx, tx, name)
	case len(words) == 3 && words[0] == "backfill":
		var from, to time.Time
		if from, err = time.Parse(time.RFC3339Nano, words[1]); err == nil {
			to, err = time.Parse(time.RFC3339Nano, words[2])
		}
		if err != nil {
			return onceq.Fatal(err)
		}
		_, err = s.Backfill(ctx, tx, name, from, to)
	default:
		return onceq.Fatal(fmt.Errorf("onceqcron: %q was asked for, which this version does not know", request))
	}
	var bad *onceq.InvalidError
	if errors.As(err, &bad) || errors.Is(err, ErrNotFound) || errors.Is(err, onceq.ErrDuplicate) {
		return onceq.Fatal(err)
	}
	return err
}
