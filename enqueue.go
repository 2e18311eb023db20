package onceq

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/guard"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
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
		if ctx, done, err = q.beforeEnqueue(ctx, jobs); err != nil {
			return Result{}, err
		}
		defer func() { done(err) }()
		job = jobs[0]
	}
	if db == nil {
		return Result{}, errNoDB
	}
	e, err := job.encode()
	if err != nil {
		return Result{}, err
	}
	if e.header.follows {
		results, err := q.enqueueMany(ctx, db, []Job{job}, []encoded{e}, nil, e.key != "", pg.Outside(db))
		q.enqueuedMany(ctx, []encoded{e}, results)
		if len(results) == 0 {
			return Result{}, err
		}
		return results[0], err
	}
	q.expectWaits(&e)
	var id int64
	var delayed bool
	var who whoWaits
	statement, args, asked := q.insertOne(&e, pg.Outside(db))
	switch err := q.store.SendBare(ctx, db, statement, args, pg.Row(&id, &delayed, &who)); {
	case err == nil:
		if !delayed {
			q.setQuiet(e.header.queue, who, asked)
		}
		r := accepted(id, delayed)
		q.enqueued(ctx, &e, r)
		return r, nil
	case !errors.Is(err, pgx.ErrNoRows):
		return Result{}, q.enqueueError(err)
	}
	return settleOne(ctx, q, db, job, e)
}

// beforeEnqueue calls Config.BeforeEnqueue. If that panics, nothing is enqueued. A panic of done comes when all is decided, so it
// changes nothing.
func (q *Queue) beforeEnqueue(ctx context.Context, jobs []Job) (_ context.Context, done func(error), err error) {
	inner, ended := ctx, func(error) {}
	if p := guard.Call(func() { inner, ended = q.enqueuing(ctx, jobs) }); p != nil {
		return ctx, nil, panicked("Config.BeforeEnqueue", p)
	}
	if inner == nil {
		inner = ctx
	}
	return inner, func(err error) {
		if ended != nil {
			q.guard.Call("done of Config.BeforeEnqueue", func() { ended(err) })
		}
	}, nil
}

// expectWaits notes that there are jobs that wait, so that Claim looks for them.
func (q *Queue) expectWaits(e *encoded) {
	if e.lined() {
		q.lanes.Look.Store(-1)
	}
}

// lined reports whether the statements for lanes take the job.
func (e *encoded) lined() bool {
	return e.lane != "" || e.header.follows || e.header.laneRule&memberBit != 0
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
		var done func(error)
		if ctx, done, err = q.beforeEnqueue(ctx, jobs); err != nil {
			return nil, err
		}
		defer func() { done(err) }()
	}
	if db == nil {
		return nil, errNoDB
	}
	all, sorted, keyed, err := encodeMany(jobs)
	if err != nil {
		return nil, err
	}
	results, err := q.enqueueMany(ctx, db, jobs, all, sorted, keyed, pg.Outside(db))
	q.enqueuedMany(ctx, all, results)
	return results, err
}

// manyJobs are the jobs of one call, and what came of them. The slices have an element for each.
type manyJobs struct {
	jobs    []Job
	all     []encoded
	ids     []int64
	results []Result
	at      time.Time // of the call, once a statement has said it
}

// enqueueMany is EnqueueMany for jobs that are encoded, without its events.
func (q *Queue) enqueueMany(ctx context.Context, db DB, jobs []Job, all []encoded, sorted []int, keyed, own bool) (results []Result, err error) {
	for i := range all {
		q.expectWaits(&all[i])
	}
	m := manyJobs{jobs: jobs, all: all, ids: make([]int64, len(jobs)), results: make([]Result, len(jobs))}
	if len(jobs) == 0 {
		return m.results, nil
	}
	after, err := resolveAfter(ctx, q, db, jobs, all)
	if err != nil {
		return nil, err
	}
	var begin pg.TxBeginner
	if _, rest := chunk(all, places(len(jobs))); len(rest) > 0 || keyed || after != nil { // otherwise one statement, which is atomic by itself
		open := pg.Opener
		if after != nil {
			open = mustOpen
		}
		if begin, err = open(ctx, db); err != nil {
			return nil, err
		}
		own = own || begin != nil
	}
	var refusal error
	var read map[int]Result
	enqueue := func(db pg.DB) error {
		refusal = nil
		refused, tried, err := m.insertAll(ctx, q, db, sorted, keyed, own)
		if err == nil && after != nil {
			err = linkFollowers(ctx, q, db, after, m.results)
		}
		if err != nil {
			return err
		}
		read, refusal = tried, joined(refused)
		return refusal
	}
	// Absent keys are taken in their order, but expired ones after all absent ones of the same statement.
	for range table.SettleTries {
		if err = pg.InOne(ctx, begin, db, pg.AsIs, enqueue); begin == nil || sqlstate.Of(err) != "40P01" {
			break
		}
	}
	if err != nil && refusal == nil {
		return nil, err
	}
	if err != nil && own { // the others were rolled back
		onlyDuplicates(m.results, read)
	}
	return m.results, err
}

// insertAll enqueues jobs in as many statements as they need. It returns the errors of those that are
// refused, and settling.tried.
func (m *manyJobs) insertAll(ctx context.Context, q *Queue, db DB, sorted []int, keyed, own bool) (refused []error, read map[int]Result, err error) {
	clear(m.ids) // of an earlier try
	clear(m.results)
	m.at = time.Time{}
	read = make(map[int]Result)
	part, rest := chunk(m.all, places(len(m.all)))
	if len(rest) > 0 && keyed {
		// Ids are drawn in the caller's order, but keys are taken in sorted order across all statements.
		if err := q.store.QueryRow(ctx, db, stmt.DrawIDs, []any{len(m.all)}, &m.at, &m.ids); err != nil {
			return nil, nil, fmt.Errorf("onceq: drawing ids: %w", err)
		}
		if sorted != nil {
			part, rest = chunk(m.all, sorted)
		}
	}
	for ; len(part) > 0; part, rest = chunk(m.all, rest) {
		part = slices.Sorted(slices.Values(part)) // a copy: another try takes the keys in the same order
		left, err := m.insert(ctx, q, db, part, false, own)
		if err != nil {
			return nil, nil, err
		}
		no, tried, err := m.settle(ctx, q, db, left)
		if err != nil {
			return nil, nil, err
		}
		refused = append(refused, no...)
		maps.Copy(read, tried)
	}
	return refused, read, nil
}

// onlyDuplicates leaves the results of duplicates, after a rollback. Those that were replaced are again what was read of them.
func onlyDuplicates(results []Result, read map[int]Result) {
	for i, r := range results {
		switch {
		case !r.Duplicate:
			results[i] = Result{}
		case r.Replaced:
			results[i] = read[i]
		}
	}
}

// encodeMany checks and encodes jobs, and reports whether one of them has a key. If the keys are not in their order already,
// it also returns the places of all jobs in the order of their keys.
func encodeMany(jobs []Job) (all []encoded, sorted []int, keyed bool, err error) {
	all = make([]encoded, len(jobs))
	c := newEncoder()
	var before *Job
	last, ordered := -1, true // the last place with a key; whether each key was above the one before
	for i := range jobs {
		if err = c.encode(&all[i], &jobs[i], before); err != nil {
			var bad *InvalidError
			if errors.As(err, &bad) {
				bad.Field = fmt.Sprintf("jobs[%d].%s", i, bad.Field)
			}
			return nil, nil, false, err
		}
		if before = &jobs[i]; all[i].key != "" {
			ordered = ordered && (last < 0 || all[last].compareKey(&all[i]) < 0)
			last = i
		}
	}
	if ordered {
		return all, nil, last >= 0, nil
	}
	sorted = places(len(all))
	slices.SortFunc(sorted, func(i, j int) int { return cmp.Or(all[i].compareKey(&all[j]), i-j) })
	again, first := len(all), 0
	for k, i := range sorted[1:] {
		if before := sorted[k]; all[i].key != "" && i < again && all[before].compareKey(&all[i]) == 0 {
			again, first = i, before
		}
	}
	if again < len(all) {
		return nil, nil, false, invalid(fmt.Sprintf("jobs[%d].Key", again), "%q repeats that of jobs[%d]", all[again].key, first)
	}
	return all, sorted, true, nil
}

// compareKey orders jobs as their keys are taken: by scope, then by key.
func (e *encoded) compareKey(o *encoded) int {
	if e.header != o.header {
		if c := strings.Compare(e.header.scope, o.header.scope); c != 0 {
			return c
		}
	}
	return strings.Compare(e.key, o.key)
}

// places are the numbers from 0 to n-1.
func places(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// chunk splits places into those of the jobs that go in one statement, and the rest.
func chunk(all []encoded, places []int) (part, rest []int) {
	size := 0
	for n, i := range places {
		size += len(all[i].json) + len(all[i].bytes) + len(all[i].header.metadata)
		if n == table.ChunkRows || n > 0 && size > table.ChunkBytes {
			return places[:n], places[n:]
		}
	}
	return places, nil
}

// Pending is a job that is enqueued in a batch. Its Result is known once the batch's results have been closed.
type Pending struct {
	q        *Queue
	job      Job
	e        encoded
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
	e, err := job.encode()
	if err != nil {
		return nil, err
	}
	q.expectWaits(&e)
	if e.header.follows {
		return nil, invalid("After", "is set, and a job that waits for others is enqueued in more than one step; use Enqueue or EnqueueMany, in the same transaction")
	}
	if job.Replace != 0 {
		return nil, invalid("Replace", "is set, and a batch cannot look at the job that it meets, so it would change nothing; use Enqueue or EnqueueMany, in the same transaction")
	}
	e.bytes = bytes.Clone(e.bytes) // the caller may use its buffer again before it sends the batch
	p := &Pending{q: q, job: job, e: e}
	statement, args, asked := q.insertOne(&e, false)
	if q.store.Citus.Load() == pg.CitusYes {
		statement, args = queueParts(q.store, batch, &e)
		asked = time.Time{}
	}
	batch.Queue(q.store.SQL(statement), args...).Query(func(rows pgx.Rows) error {
		p.accepted, p.reported, p.sent = Result{}, false, false // a batch may be sent again, after a rollback
		if rows.Next() {
			var id int64
			var delayed bool
			var who whoWaits
			if err := rows.Scan(&id, &delayed, &who); err != nil {
				return err
			}
			if !delayed {
				q.setQuiet(e.header.queue, who, asked)
			}
			p.accepted = accepted(id, delayed)
		}
		rows.Close()
		p.sent = rows.Err() == nil
		if err := rows.Err(); err != nil && q.store.Citus.Load() == pg.CitusUnknown {
			return fmt.Errorf("%w (if the server has Citus, call Queue.Check before the first batch)", q.enqueueError(err))
		}
		return q.enqueueError(rows.Err())
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
			p.q.enqueued(ctx, &p.e, p.accepted)
			p.reported = true
		}
		return p.accepted, nil
	}
	r, err := settleOne(ctx, p.q, db, p.job, p.e)
	if err == nil && !r.Duplicate {
		p.accepted, p.reported = r, true
	}
	return r, err
}

// whoWaits says whether a worker waited for the job of such a statement.
type whoWaits int

const (
	someWaits   whoWaits = iota // and was woken; or what the statement saw may be old
	noneWaits                   // for this queue
	nobodyWaits                 // for any queue
)

// insertOne gives the statement for one job, and the present time if the statement asks who waits, otherwise zero.
func (q *Queue) insertOne(e *encoded, own bool) (statement string, args []any, asked time.Time) {
	h := e.header
	var payload any
	if e.bytes == nil {
		payload = e.json
	}
	args = make([]any, 0, 18)
	args = append(args, h.queue, h.kind, payload, h.maxAttempts, h.priority)
	if e.lane == "" && h.at.IsZero() && h.delay == 0 && h.metadata == "" && e.bytes == nil && q.isQuiet(h.queue) {
		if e.key == "" {
			return stmt.InsertPlain, args, time.Time{}
		}
		return stmt.InsertKeyed, append(args, h.scope, e.key, h.lifetime, e.fingerprint), time.Time{}
	}
	var scope, key any
	if e.key != "" {
		scope, key = h.scope, e.key
	}
	args = append(args, scope, key, h.lifetime, e.fingerprint, orNull(h.due()), orNull(h.delay.Microseconds()), orNull(h.metadata))
	args = append(args, e.bytes, rand.Int64(), own)
	if e.lane != "" {
		line, path := lineOf(e.lane)
		return stmt.EnqueueOne, append(args, line, int16(h.laneRule), path), time.Time{}
	}
	return stmt.EnqueueOne, append(args, nil, nil, nil), time.Now()
}

// due is RunAt in microseconds, or 0.
func (h *header) due() int64 {
	if h.at.IsZero() {
		return 0
	}
	return h.at.UnixMicro()
}

func orNull[T comparable](v T) any {
	if v == *new(T) {
		return nil
	}
	return v
}

// columns are the arrays in which many jobs are sent. Arrays that no job needs stay nil.
type columns struct {
	last *header // of the latest job

	refs                []int32
	laneRules           []int16
	ifDead              []*int16 // nil for a job that waits for no others
	lanes, paths        []string // nil if no job has one
	payloads, keys      []string
	bytes, fingerprints [][]byte
	drawn               []int64

	queues, kinds, scopes, metadata []string
	priorities, attempts            []int32
	ats, delays, lifetimes          []int64
}

// add appends one of n jobs. An id that is 0 is drawn. known has the number of each header, from 1. It is not a field of c
// so that c does not have to be on the heap.
func (c *columns) add(known map[header]int32, e *encoded, id int64, n int) {
	if e.key != "" && c.keys == nil {
		c.keys, c.fingerprints = make([]string, len(c.payloads), n), make([][]byte, len(c.payloads), n)
	}
	if e.bytes != nil && c.bytes == nil {
		c.bytes = make([][]byte, len(c.payloads), n)
	}
	if id != 0 && c.drawn == nil {
		c.drawn = make([]int64, len(c.payloads), n)
	}
	if e.lined() && c.lanes == nil {
		c.lanes = make([]string, len(c.payloads), n)
	}
	c.refs, c.payloads = append(c.refs, c.header(known, e.header)), append(c.payloads, e.json)
	if c.lanes != nil {
		line, path := lineOf(e.lane)
		if e.header.follows {
			line, path = followMark, &e.lane
		}
		if c.lanes = append(c.lanes, line); path != nil && c.paths == nil {
			c.paths = make([]string, len(c.lanes)-1, n)
		}
		if c.paths != nil {
			c.paths = append(c.paths, table.OrZero(path))
		}
	}
	if c.keys != nil {
		c.keys, c.fingerprints = append(c.keys, e.key), append(c.fingerprints, e.fingerprint)
	}
	if c.bytes != nil {
		c.bytes = append(c.bytes, e.bytes)
	}
	if c.drawn != nil {
		c.drawn = append(c.drawn, id)
	}
}

// header gives the number of a job's header, and appends the header if it is new.
func (c *columns) header(known map[header]int32, h *header) int32 {
	if h == c.last {
		return c.refs[len(c.refs)-1]
	}
	ref, ok := known[*h]
	if !ok {
		ref = int32(len(known) + 1)
		known[*h] = ref
		c.queues, c.kinds, c.scopes, c.metadata = append(c.queues, h.queue), append(c.kinds, h.kind), append(c.scopes, h.scope), append(c.metadata, h.metadata)
		c.priorities, c.attempts = append(c.priorities, int32(h.priority)), append(c.attempts, int32(h.maxAttempts))
		c.ats, c.delays, c.lifetimes = append(c.ats, h.due()), append(c.delays, h.delay.Microseconds()), append(c.lifetimes, h.lifetime)
		c.laneRules = append(c.laneRules, int16(h.laneRule))
		var ifDead *int16
		if rule := int16(h.ifDead); h.follows {
			ifDead = &rule
		}
		c.ifDead = append(c.ifDead, ifDead)
	}
	c.last = h
	return ref
}

// statement gives the statement that sends the jobs, with its arguments. With taking, fences that are no longer in force do
// not count as taken. apart says that the server has Citus. since is the time of the call, if another statement has said it.
func (c *columns) statement(own, taking, apart bool, since *time.Time) (statement string, args []any) {
	args = append(make([]any, 0, 23), c.refs, c.payloads, c.bytes, c.keys, c.fingerprints, c.drawn,
		c.queues, c.kinds, c.scopes, c.metadata, c.priorities, c.attempts, c.ats, c.delays, c.lifetimes, rand.Int64(), own)
	switch {
	case c.lanes != nil || taking || apart || len(c.queues) > 1:
		return stmt.EnqueueJobs, append(args, c.lanes, c.laneRules, c.paths, c.ifDead, since, taking)
	case c.keys == nil:
		statement = stmt.InsertPlainMany
	default:
		statement = stmt.InsertKeyedMany
	}
	args[0] = []int32(nil)
	return statement, args
}

// insert sends the jobs at the places in part, which are sorted, and fills in the results of those that were
// accepted. It returns the places of the others. An id that is 0 is drawn and filled in too. Jobs with a lane
// have the time of the call in common, so that their ids decide who is first, whichever statement takes them.
func (m *manyJobs) insert(ctx context.Context, q *Queue, db DB, part []int, taking, own bool) ([]int, error) {
	n := len(part)
	known := make(map[header]int32)
	c := columns{refs: make([]int32, 0, n), payloads: make([]string, 0, n)}
	for _, i := range part {
		c.add(known, &m.all[i], m.ids[i], n)
	}
	var since *time.Time
	if !m.at.IsZero() {
		since = &m.at
	}
	apart, err := q.store.OnCitus(ctx, db)
	if err != nil {
		return nil, q.enqueueError(err)
	}
	statement, args := c.statement(own, taking, apart, since)
	var got, mine []int64
	var delayed []bool // by header
	answer := []any{&got, &delayed, nil, &mine}
	if statement == stmt.EnqueueJobs {
		var began time.Time
		if answer = append(answer, &began); c.lanes != nil {
			answer[4] = &m.at
		}
	}
	if err := q.store.SendBare(ctx, db, statement, args, pg.Row(answer...)); err != nil {
		return nil, q.enqueueError(err)
	}
	if len(got) != n || len(delayed) != len(c.queues) {
		return nil, fmt.Errorf("onceq: enqueue: %d jobs sent, %d came back", n, len(got))
	}
	slices.Sort(mine)
	var left []int
	for k, i := range part {
		m.ids[i] = got[k]
		if m.all[i].key != "" {
			if _, ok := slices.BinarySearch(mine, got[k]); !ok {
				left = append(left, i)
				continue
			}
		}
		m.results[i] = accepted(got[k], delayed[c.refs[k]-1])
	}
	return left, nil
}

// taken reads which job has a key. The error is pgx.ErrNoRows if none has.
func (q *Queue) taken(ctx context.Context, db DB, scope, key string) (existing Result, err error) {
	var state fenceState
	var result *string
	var live *int16
	err = q.store.QueryRow(ctx, db, stmt.ReadTaken, []any{[]string{scope}, []string{key}}, nil, &existing.ID, &state, nil, &result, nil, nil, &live)
	existing.Duplicate, existing.State = true, state.job(live)
	if result != nil {
		existing.Output = []byte(*result)
	}
	return existing, err
}

// settling is a call to settle.
type settling struct {
	q       *Queue
	jobs    []Job
	all     []encoded
	results []Result
	ours    []*Lease // the jobs whose keys cannot be enqueued here

	tried      map[int]Result // the places of jobs that have tried to replace another, and what was read of that one
	refused    []error
	met        []Event
	mismatches []refusal
}

// ownersOf returns the jobs whose keys a handler cannot enqueue in its own transaction, if db is such a
// transaction.
func ownersOf(db DB) []*hold.Hold {
	if h, ok := db.(*lazytx.Handle); ok {
		holds, _ := h.Owner().([]*hold.Hold)
		return holds
	}
	return nil
}

// settle answers for the jobs at the places in left, whose keys were taken a moment ago: it fills in a result for each and
// returns the errors of those that are refused, and settling.tried. It must run in new statements, because the statement that
// met the key may not see its row.
func (m *manyJobs) settle(ctx context.Context, q *Queue, db DB, left []int) (refused []error, tried map[int]Result, err error) {
	ours := leasesOf(slices.Concat(hold.From(ctx), ownersOf(db))) // the handler's transaction is recognised in another context too
	s := settling{q: q, jobs: m.jobs, all: m.all, results: m.results, ours: ours}
	for try := 0; len(left) > 0; try++ {
		if try == table.SettleTries {
			return nil, nil, fmt.Errorf("%w (key %q in scope %q)", ErrKeyUnsettled, m.all[left[0]].key, m.all[left[0]].header.scope)
		}
		again, floor, err := s.look(ctx, db, left)
		if err != nil {
			return nil, nil, err
		}
		if len(again) == 0 {
			break
		}
		if try > 0 {
			for _, i := range again {
				m.ids[i] = 0
			}
		}
		if floor > 0 && try > 0 {
			// Not in the first try: an id above the old one is what the sequence returns anyway, unless it was set back.
			var id int64
			if err := q.store.SendBare(ctx, db, `select onceq.next_id('onceq.ids', $1::bigint)`, []any{floor}, pg.Row(&id)); err != nil {
				return nil, nil, fmt.Errorf("onceq: drawing an id: %w", err)
			}
		}
		if left, err = m.insert(ctx, q, db, again, true, pg.Outside(db)); err != nil {
			return nil, nil, err
		}
	}
	return s.refused, s.tried, nil
}

// look reads the fences of the jobs at the places in left and answers for those whose key is taken. It returns the places
// of the others, and the id that the sequence must pass before these are tried again.
func (s *settling) look(ctx context.Context, db DB, left []int) (again []int, floor int64, err error) {
	scopes, keys := make([]string, len(left)), make([]string, len(left))
	for k, i := range left {
		scopes[k], keys[k] = s.all[i].header.scope, s.all[i].key
	}
	answered := make([]bool, len(left))
	var replacing []int // places
	var marks map[int][]byte
	s.met, s.mismatches = s.met[:0], s.mismatches[:0]
	err = s.q.store.Send(ctx, db, pg.AsIs, stmt.ReadTaken, []any{scopes, keys}, pg.Each(func(rows pgx.Rows) error {
		var n, token int64
		var state fenceState
		var mark []byte
		var output *string
		var free bool
		var live *int16
		r := Result{Duplicate: true}
		if err := rows.Scan(&n, &r.ID, &state, &mark, &output, &free, &token, &live); err != nil {
			return err
		}
		if free {
			floor = max(floor, token)
			return nil
		}
		if r.State = state.job(live); output != nil {
			r.Output = json.RawMessage(*output)
		}
		if i := left[n-1]; s.parts(i, r, mark) > 0 {
			floor = max(floor, token)
			if marks == nil {
				marks = make(map[int][]byte)
			}
			s.results[i] = r
			replacing, marks[i] = append(replacing, i), mark
			return nil
		}
		answered[n-1] = true
		s.answer(left[n-1], r, mark)
		return nil
	}))
	if err != nil {
		return nil, 0, fmt.Errorf("onceq: reading a taken key: %w", err)
	}
	if len(replacing) > 0 {
		done, err := s.replace(ctx, db, replacing, marks)
		if err != nil {
			return nil, 0, err
		}
		for _, i := range done {
			answered[slices.Index(left, i)] = true
		}
	}
	if err := s.q.explain(ctx, db, s.mismatches); err != nil {
		return nil, 0, err
	}
	for _, e := range s.met {
		s.q.emit(ctx, e)
	}
	for k, i := range left {
		if !answered[k] {
			again = append(again, i)
		}
	}
	return again, floor, nil
}

// answer records that the key of the job at place i is taken, by the job that r describes and whose fence has the
// fingerprint mark.
func (s *settling) answer(i int, r Result, mark []byte) {
	e := &s.all[i]
	s.results[i] = r
	met := Event{Type: EventDuplicate, Queue: e.header.queue, Kind: e.header.kind, JobID: r.ID, Scope: e.header.scope, Key: e.key}
	switch {
	case slices.ContainsFunc(s.ours, func(l *Lease) bool {
		return l.ID == r.ID && l.q.store.Pool == s.q.store.Pool && l.q.store.Schema == s.q.store.Schema
	}):
		s.refused = append(s.refused, ErrOwnKey)
	case !fingerprint.SameKind(mark, e.fingerprint) || !fingerprint.SamePayload(mark, e.fingerprint):
		err := &MismatchError{Scope: e.header.scope, Key: e.key, Existing: r, Kind: e.header.kind, ExistingKind: fingerprint.KindOf(mark, e.header.scope), NotReplaced: s.jobs[i].notReplaced(r)}
		s.mismatches = append(s.mismatches, refusal{err, e, s.jobs[i].Fields})
		met.Type, met.Err = EventMismatch, err
		s.refused = append(s.refused, err)
	case s.jobs[i].Strict:
		s.refused = append(s.refused, &DuplicateError{Scope: e.header.scope, Key: e.key, Existing: r})
	}
	s.met = append(s.met, met)
}

// settleOne is settle for one job.
func settleOne(ctx context.Context, q *Queue, db DB, job Job, e encoded) (Result, error) {
	m := manyJobs{jobs: []Job{job}, all: []encoded{e}, ids: make([]int64, 1), results: make([]Result, 1)}
	refused, _, err := m.settle(ctx, q, db, []int{0})
	if err == nil {
		err = joined(refused)
	}
	if err == nil && !m.results[0].Duplicate {
		q.enqueued(ctx, &e, m.results[0])
	}
	return m.results[0], err
}

func joined(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

func accepted(id int64, delayed bool) Result {
	if delayed {
		return Result{ID: id, State: StateDelayed}
	}
	return Result{ID: id, State: StateWaiting}
}

// enqueuedMany is for when the jobs are committed, or in the caller's transaction.
func (q *Queue) enqueuedMany(ctx context.Context, all []encoded, results []Result) {
	for i, r := range results {
		if !r.Duplicate && r.ID != 0 {
			q.enqueued(ctx, &all[i], r)
		}
	}
}

func (q *Queue) enqueued(ctx context.Context, e *encoded, r Result) {
	if q.watched(EventEnqueued.Level()) {
		q.emit(ctx, Event{Type: EventEnqueued, Queue: e.header.queue, Kind: e.header.kind, JobID: r.ID, Scope: e.header.scope, Key: e.key})
	}
}

// enqueueError says what failed.
func (q *Queue) enqueueError(err error) error {
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &pgErr) && sameID(pgErr):
		return fmt.Errorf("%w: %w", ErrIDTaken, err)
	}
	return fmt.Errorf("onceq: enqueue: %w", q.store.Told(err))
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
