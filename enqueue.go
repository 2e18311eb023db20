package onceq

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/enqueue"
	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/guard"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// Result is the answer to an Enqueue.
type Result struct {
	ID        int64 `json:"id"`        // of the new job, or of the job that has the key
	Duplicate bool  `json:"duplicate"` // the key was taken: nothing was written, unless Replaced
	State     State `json:"state"`     // that job's present state

	// Replaced says that the job that has the key was changed, as Job.Replace asks; of one that its lane or its limit has let go on
	// only the payload. If it is false although Job.Replace is set, nothing was changed: see there. State says how far the job is.
	Replaced bool `json:"replaced,omitzero"`

	// Output is the stored result of a completed job, if its handler set one (Lease.SetResult).
	Output json.RawMessage `json:"output,omitzero"`
}

// Enqueue accepts a job inside db: it commits and rolls back with the caller's transaction.
//
// A key that is taken is not an error: the Result has Duplicate set and says which job has the key, in which state it is
// and, when it is finished, its result. With Job.Strict it is a *DuplicateError. The same key with another payload, or from
// another kind in the same scope, is a *MismatchError. In all three cases nothing was written and the transaction stays
// usable. A job that cannot be stored is an *InvalidError, before anything is sent.
//
// One worker that waits is notified of the job when the job is committed. On a server where transactions can be prepared
// (max_prepared_transactions, 0 by default) a notification would make PREPARE TRANSACTION fail. There only calls on a
// pool, or on a connection outside a transaction, notify; workers find other jobs by polling, every quarter of a second
// unless WorkerConfig.PollInterval says otherwise.
//
// While another transaction is open that took the same key, or that completes, cancels, replaces, redrives or discards the job
// that has it, Enqueue waits for that transaction to end. Above READ COMMITTED Postgres may answer with a serialization failure,
// and at any level with a deadlock when two transactions take keys in opposite orders; IsRetryable recognises both, and the whole
// transaction has to run again. EnqueueMany takes keys in the order of scope and key, but those that have expired after those
// that are absent. So two transactions that both keep to the order may still get a deadlock if a key has expired. Jobs that are replaced
// are locked by their ids, those that wait for a lane or a limit before the others.
func (q *Queue) Enqueue(ctx context.Context, db DB, job Job) (_ Result, err error) {
	if q.enqueuing != nil {
		jobs := []Job{job}
		var done func(error)
		ctx, done, err = q.beforeEnqueue(ctx, db, jobs)
		defer func() { done(err) }()
		if err != nil {
			return Result{}, err
		}
		job = jobs[0]
	}
	if db == nil {
		return Result{}, errNoDB
	}
	r, err := job.encode()
	if err != nil {
		return Result{}, err
	}
	q.expectWaits(&r)
	if r.Header.Follows {
		rows := []enqueue.Row{r}
		results, err := q.enqueueMany(ctx, db, []Job{job}, rows, nil, r.Key != "", pg.Outside(db))
		q.enqueuedMany(ctx, rows, results)
		if len(results) == 0 {
			return Result{}, err
		}
		return results[0], err
	}
	a, taken, err := q.intake.One(ctx, db, &r)
	switch {
	case taken:
		return q.settle(ctx, db, job, r)
	case err != nil:
		return Result{}, err
	}
	q.enqueued(ctx, &r, a.ID)
	return resultOf(a), nil
}

// beforeEnqueue calls Config.BeforeEnqueue, and refuses a db that is nil. If the function panics, nothing is enqueued. A panic
// of done comes when all is decided, so it changes nothing.
func (q *Queue) beforeEnqueue(ctx context.Context, db DB, jobs []Job) (_ context.Context, done func(error), err error) {
	inner, ended := ctx, (func(error))(nil)
	if q.enqueuing != nil {
		if p := guard.Call(func() { inner, ended = q.enqueuing(ctx, jobs) }); p != nil {
			return ctx, func(error) {}, panicked("Config.BeforeEnqueue", p)
		}
	}
	if inner == nil {
		inner = ctx
	}
	if db == nil {
		err = errNoDB
	}
	return inner, func(err error) {
		if ended != nil {
			q.guard.Call("done of Config.BeforeEnqueue", func() { ended(err) })
		}
	}, err
}

// expectWaits notes that there are jobs that wait, so that Claim looks for them.
func (q *Queue) expectWaits(r *enqueue.Row) {
	if r.Waits() {
		q.lanes.Look.Store(-1)
	}
}

var errNoDB = invalid("db", "is nil; pass the transaction, the pool or a connection")

// EnqueueUnique is Enqueue for jobs that must have a key: an empty one is an *InvalidError.
func (q *Queue) EnqueueUnique(ctx context.Context, db DB, job Job) (Result, error) {
	job.keyed = true
	return q.Enqueue(ctx, db, job)
}

// EnqueueMany accepts any number of jobs, all or nothing, in one statement per 2,000 jobs or 16 MB. Outside a transaction it
// opens one if jobs have keys or if it needs more than one statement, and runs it again after a deadlock; begin and commit are
// two more round trips. Results come in the order of jobs, and the ids of new jobs grow in that order, which is also that of a
// lane: except for one whose key another transaction has taken and given back meanwhile, which comes last. A key that occurs
// twice in jobs is an *InvalidError that names both places, before anything is written.
//
// If different work has taken a key (or any work has, for a strict job), the error joins one *MismatchError or
// *DuplicateError for each such job, and results are returned with it. In the caller's own transaction the other jobs are
// then enqueued, and the caller decides whether to commit or to roll back. Outside a transaction nothing is enqueued: only
// the results of duplicates are filled in, and the others are zero. No job is replaced then either.
func (q *Queue) EnqueueMany(ctx context.Context, db DB, jobs []Job) (_ []Result, err error) {
	if q.enqueuing != nil {
		jobs = slices.Clone(jobs)
	}
	ctx, done, err := q.beforeEnqueue(ctx, db, jobs)
	defer func() { done(err) }()
	if err != nil {
		return nil, err
	}
	rows, sorted, keyed, err := encodeMany(jobs)
	if err != nil {
		return nil, err
	}
	results, err := q.enqueueMany(ctx, db, jobs, rows, sorted, keyed, pg.Outside(db))
	q.enqueuedMany(ctx, rows, results)
	return results, err
}

// enqueueMany is EnqueueMany for jobs that are encoded, without its events.
func (q *Queue) enqueueMany(ctx context.Context, db DB, jobs []Job, rows []enqueue.Row, sorted []int, keyed, own bool) ([]Result, error) {
	for i := range rows {
		q.expectWaits(&rows[i])
	}
	after, err := resolveAfter(ctx, q, db, jobs, rows)
	if err != nil {
		return nil, err
	}
	c := enqueue.Call{
		Intake: &q.intake, Asker: &asker{q: q, jobs: jobs, rows: rows}, Rows: rows, Sorted: sorted, Keyed: keyed, Own: own, Open: pg.Opener,
	}
	if after != nil {
		c.Open = mustOpen
		c.Link = func(ctx context.Context, db pg.DB, answers []enqueue.Answer) error {
			return q.intake.WriteLinks(ctx, db, enqueue.LinksOf(after, answers))
		}
	}
	answers, err := c.Many(ctx, db)
	if answers == nil {
		return nil, err
	}
	results := make([]Result, len(answers))
	for i, a := range answers {
		results[i] = resultOf(a)
	}
	return results, err
}

func answerOf(r Result) enqueue.Answer {
	return enqueue.Answer{ID: r.ID, Duplicate: r.Duplicate, State: table.State(r.State), Replaced: r.Replaced, Output: r.Output}
}

func resultOf(a enqueue.Answer) Result {
	return Result{ID: a.ID, Duplicate: a.Duplicate, State: State(a.State), Replaced: a.Replaced, Output: a.Output}
}

// encodeMany checks and encodes jobs, and reports whether one of them has a key. If the keys are not in their order already,
// it also returns the places of all jobs in the order of their keys.
func encodeMany(jobs []Job) (rows []enqueue.Row, sorted []int, keyed bool, err error) {
	rows = make([]enqueue.Row, len(jobs))
	c := newEncoder()
	var before *Job
	for i := range jobs {
		if err = c.encode(&rows[i], &jobs[i], before); err != nil {
			var bad *InvalidError
			if errors.As(err, &bad) {
				bad.Field = fmt.Sprintf("jobs[%d].%s", i, bad.Field)
			}
			return nil, nil, false, err
		}
		before = &jobs[i]
		keyed = keyed || rows[i].Key != ""
	}
	sorted, first, again := enqueue.InOrder(rows)
	if again >= 0 {
		return nil, nil, false, invalid(fmt.Sprintf("jobs[%d].Key", again), "%q repeats that of jobs[%d]", rows[again].Key, first)
	}
	return rows, sorted, keyed, nil
}

// Pending is a job that is enqueued in a batch. Its Result is known once the batch's results have been closed.
type Pending struct {
	q        *Queue
	job      Job
	row      enqueue.Row
	sent     bool
	accepted Result // zero while the key is taken
	reported bool
}

// EnqueueInBatch adds the job to the caller's own batch, so that enqueueing costs no round trip. Once the batch's results
// have been closed without an error, Pending.Result has the answer. Bad input is an *InvalidError at once. So is a job with
// After or Replace, which take more than one step.
//
// A key that is taken does not stop the batch: if the batch ends with a commit, you learn of a mismatch only after it.
//
// A batch cannot ask what the server is. On one with Citus it fails unless Queue.Check was called before.
func (q *Queue) EnqueueInBatch(batch *pgx.Batch, job Job) (*Pending, error) {
	r, err := job.encode()
	if err != nil {
		return nil, err
	}
	q.expectWaits(&r)
	if r.Header.Follows {
		return nil, invalid("After", "is set, and a job that waits for others is enqueued in more than one step; use Enqueue or EnqueueMany, in the same transaction")
	}
	if job.Replace != 0 {
		return nil, invalid("Replace", "is set, and a batch cannot look at the job that it meets, so it would change nothing; use Enqueue or EnqueueMany, in the same transaction")
	}
	r.Bytes = bytes.Clone(r.Bytes) // the caller may use its buffer again before it sends the batch
	p := &Pending{q: q, job: job, row: r}
	q.intake.InBatch(batch, &p.row, func(a enqueue.Answer, worked bool) {
		p.accepted, p.reported, p.sent = resultOf(a), false, worked
	})
	return p, nil
}

// Result returns what Enqueue would have returned. It asks the database, through db, only if the key was taken. db is the
// same transaction, or the pool once that transaction is committed. If the key has become free by then, the job is accepted
// there.
func (p *Pending) Result(ctx context.Context, db DB) (Result, error) {
	switch {
	case !p.sent:
		return Result{}, errors.New("onceq: Pending.Result was called before the batch's results were closed, or the batch failed; send the batch and close its results first")
	case p.accepted.ID != 0:
		if !p.reported {
			p.q.enqueued(ctx, &p.row, p.accepted.ID)
			p.reported = true
		}
		return p.accepted, nil
	}
	r, err := p.q.settle(ctx, db, p.job, p.row)
	if err == nil && !r.Duplicate {
		p.accepted, p.reported = r, true
	}
	return r, err
}

// asker says what becomes of the jobs of a call whose keys are taken: see enqueue.Asker.
type asker struct {
	q    *Queue
	jobs []Job
	rows []enqueue.Row

	refused    []error
	met        []Event
	mismatches []enqueue.Mismatch
}

func (a *asker) Again() { a.refused, a.met, a.mismatches = nil, nil, nil }

func (a *asker) Refused() error {
	if len(a.refused) == 1 {
		return a.refused[0]
	}
	return errors.Join(a.refused...)
}

func (a *asker) Taken(ctx context.Context, db pg.DB, i int, answer enqueue.Answer, mark []byte) {
	row, job, r := &a.rows[i], &a.jobs[i], resultOf(answer)
	h := row.Header
	met := Event{Type: EventDuplicate, Queue: h.Queue, Kind: h.Kind, JobID: r.ID, Scope: h.Scope, Key: row.Key}
	switch {
	case a.q.runs(ctx, db, r.ID):
		a.refused = append(a.refused, ErrOwnKey)
	case !fingerprint.SameKind(mark, row.Fingerprint) || !fingerprint.SamePayload(mark, row.Fingerprint):
		err := &MismatchError{
			Scope: h.Scope, Key: row.Key, Existing: r, Kind: h.Kind, ExistingKind: fingerprint.KindOf(mark, h.Scope), NotReplaced: job.notReplaced(r),
		}
		if err.Kind == err.ExistingKind {
			a.mismatches = append(a.mismatches, enqueue.Mismatch{
				Row: row, Fields: job.Fields, With: answer, Detail: &err.Detail, Differ: &err.Differ,
			})
		}
		met.Type, met.Err = EventMismatch, err
		a.refused = append(a.refused, err)
	case job.Strict:
		a.refused = append(a.refused, &DuplicateError{Scope: h.Scope, Key: row.Key, Existing: r})
	}
	a.met = append(a.met, met)
}

func (a *asker) Looked(ctx context.Context, db pg.DB) error {
	err := a.q.intake.Explain(ctx, db, a.mismatches)
	if err == nil {
		for _, e := range a.met {
			a.q.emit(ctx, e)
		}
	}
	a.met, a.mismatches = nil, nil
	return err
}

// runs reports whether a handler that runs has the job, by its context or, in another context, by its transaction: it
// cannot enqueue the job's key.
func (q *Queue) runs(ctx context.Context, db DB, id int64) bool {
	var holds []*hold.Hold
	if h, ok := db.(*lazytx.Handle); ok {
		holds, _ = h.Owner().([]*hold.Hold)
	}
	return slices.ContainsFunc(slices.Concat(hold.From(ctx), holds), func(h *hold.Hold) bool {
		of := leaseOf(h).q.store
		return h.ID == id && of.Pool == q.store.Pool && of.Schema == q.store.Schema
	})
}

// settle answers for a job whose key was taken a moment ago.
func (q *Queue) settle(ctx context.Context, db DB, job Job, row enqueue.Row) (Result, error) {
	rows := []enqueue.Row{row}
	c := enqueue.Call{Intake: &q.intake, Asker: &asker{q: q, jobs: []Job{job}, rows: rows}, Rows: rows}
	a, err := c.Settle(ctx, db)
	if err == nil && !a.Duplicate {
		q.enqueued(ctx, &row, a.ID)
	}
	return resultOf(a), err
}

// enqueuedMany is for when the jobs are committed, or in the caller's transaction.
func (q *Queue) enqueuedMany(ctx context.Context, rows []enqueue.Row, results []Result) {
	for i, r := range results {
		if !r.Duplicate && r.ID != 0 {
			q.enqueued(ctx, &rows[i], r.ID)
		}
	}
}

func (q *Queue) enqueued(ctx context.Context, r *enqueue.Row, id int64) {
	if h := r.Header; q.watched(EventEnqueued.Level()) {
		q.emit(ctx, Event{Type: EventEnqueued, Queue: h.Queue, Kind: h.Kind, JobID: id, Scope: h.Scope, Key: r.Key})
	}
}

// mustOpen is pg.Opener for what may not commit in parts: for example, a job that waits for others would go on before they are known. It refuses
// a db that is in no transaction and has no BeginTx.
func mustOpen(ctx context.Context, db pg.DB) (pg.TxBeginner, error) {
	begin, err := pg.Opener(ctx, db)
	if begin != nil || err != nil {
		return begin, err
	}
	switch db.(type) {
	case pgx.Tx, pg.TxBeginner: // it is open
		return nil, nil
	}
	if open, err := pg.Inside(ctx, db); open || err != nil {
		return nil, err
	}
	return nil, invalid("db", "is in no transaction and has no BeginTx, and this takes more than one statement, which must not commit one by one; pass a transaction, or give the type a BeginTx")
}
