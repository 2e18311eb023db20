// Package enqueue is how jobs come in: the rows of a call, keys that are taken, jobs that replace others, who
// waits for whom, and for which queues nobody waits. What is refused, and how that is said, it asks of the
// package onceq (Asker).
package enqueue

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Row is a job ready for the database.
type Row struct {
	Header      *Header
	Key         string
	Lane        string // its lane and its limit, as the tables have them; "" for neither
	JSON        string // "" where Bytes are set
	Bytes       []byte
	Fingerprint []byte // with a key
	May         int16  // what it may change in the job that has its key: see MayPayload
}

// Header is what jobs of a call have in common; usually there is one.
type Header struct {
	Queue, Kind, Scope, Metadata string // Metadata: "" for none
	Priority, MaxAttempts        int
	At                           time.Time
	Delay                        time.Duration
	Lifetime                     int64
	LaneRule                     int16 // with table.MemberBit
	Follows                      bool  // the job waits for others
	IfDead                       int16
}

// due is At in microseconds, or 0.
func (h *Header) due() int64 {
	if h.At.IsZero() {
		return 0
	}
	return h.At.UnixMicro()
}

// Waits reports whether the job waits for a lane, a limit or others, or somebody waits for it.
func (r *Row) Waits() bool {
	return r.Lane != "" || r.Header.Follows || r.Header.LaneRule&table.MemberBit != 0
}

// payload is the JSON, or null.
func (r *Row) payload() any {
	if r.Bytes != nil {
		return nil
	}
	return r.JSON
}

// Answer is what comes of a row: see onceq.Result.
type Answer struct {
	ID        int64
	Duplicate bool
	State     table.State
	Replaced  bool
	Output    []byte
}

func accepted(id int64, delayed bool) Answer {
	if delayed {
		return Answer{ID: id, State: table.StateDelayed}
	}
	return Answer{ID: id, State: table.StateWaiting}
}

// One enqueues one row. taken says that somebody has its key: see Settle.
func (in *Intake) One(ctx context.Context, db pg.DB, r *Row) (a Answer, taken bool, err error) {
	var id int64
	var delayed bool
	var who whoWaits
	statement, args, asked := in.insertOne(r, pg.Outside(db))
	switch err := in.Store.SendBare(ctx, db, statement, args, pg.Row(&id, &delayed, &who)); {
	case errors.Is(err, pgx.ErrNoRows):
		return Answer{}, true, nil
	case err != nil:
		return Answer{}, false, in.failed(err)
	}
	if !delayed {
		in.setQuiet(r.Header.Queue, who, asked)
	}
	return accepted(id, delayed), false, nil
}

// insertOne gives the statement for one job, and the present time if the statement asks who waits, otherwise zero.
func (in *Intake) insertOne(r *Row, own bool) (statement string, args []any, asked time.Time) {
	h := r.Header
	args = append(make([]any, 0, 18), h.Queue, h.Kind, r.payload(), h.MaxAttempts, h.Priority)
	if r.Lane == "" && h.At.IsZero() && h.Delay == 0 && h.Metadata == "" && r.Bytes == nil && in.IsQuiet(h.Queue) {
		if r.Key == "" {
			return stmt.InsertPlain, args, time.Time{}
		}
		return stmt.InsertKeyed, append(args, h.Scope, r.Key, h.Lifetime, r.Fingerprint), time.Time{}
	}
	var scope, key any
	if r.Key != "" {
		scope, key = h.Scope, r.Key
	}
	args = append(args, scope, key, h.Lifetime, r.Fingerprint, orNull(h.due()), orNull(h.Delay.Microseconds()), orNull(h.Metadata))
	args = append(args, r.Bytes, rand.Int64(), own)
	if r.Lane != "" {
		line, path := table.LineOf(r.Lane)
		return stmt.EnqueueOne, append(args, line, h.LaneRule, path), time.Time{}
	}
	return stmt.EnqueueOne, append(args, nil, nil, nil), time.Now()
}

func orNull[T comparable](v T) any {
	if v == *new(T) {
		return nil
	}
	return v
}

// failed says what failed.
func (in *Intake) failed(err error) error {
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &pgErr) && pg.SameID(pgErr):
		return fmt.Errorf("%w: %w", table.ErrIDTaken, err)
	}
	return fmt.Errorf("onceq: enqueue: %w", in.Store.Told(err))
}

// Asker is what a call asks of the package onceq, which knows what the caller wants.
type Asker interface {
	// Taken says that the job that a describes, whose fence has the fingerprint mark, has the key of the row
	// at place i. Looked comes after each look at such keys.
	Taken(ctx context.Context, db pg.DB, i int, a Answer, mark []byte)
	Looked(ctx context.Context, db pg.DB) error

	// Refused says which rows are, in this try; Again begins another one.
	Refused() error
	Again()
}

// Call enqueues rows together, all or nothing.
type Call struct {
	*Intake
	Asker
	Rows   []Row
	Sorted []int // the places of the rows in the order of their keys; nil if they are in it
	Keyed  bool  // one of them has a key
	Own    bool  // it is in no transaction of the caller's

	Open func(context.Context, pg.DB) (pg.TxBeginner, error) // see pg.Opener
	Link func(context.Context, pg.DB, []Answer) error        // writes what the rows wait for; nil for nothing

	ids     []int64
	answers []Answer
	tried   map[int]Answer // the places of rows that have tried to replace a job, and what was read of that
	at      time.Time      // of the call, once a statement has said it
	places  []int          // all of them
}

func (c *Call) begin() {
	n := len(c.Rows)
	c.ids, c.answers, c.places = make([]int64, n), make([]Answer, n), make([]int, n)
	for i := range c.places {
		c.places[i] = i
	}
}

// Settle answers for a single row whose key was taken a moment ago.
func (c *Call) Settle(ctx context.Context, db pg.DB) (Answer, error) {
	c.begin()
	err := c.settle(ctx, db, c.places)
	if err == nil {
		err = c.Refused()
	}
	return c.answers[0], err
}

// Many enqueues the rows. With an error, there are answers only if some rows are refused.
func (c *Call) Many(ctx context.Context, db pg.DB) (answers []Answer, err error) {
	c.begin()
	if len(c.Rows) == 0 {
		return c.answers, nil
	}
	var begin pg.TxBeginner
	if _, rest := chunk(c.Rows, c.places); len(rest) > 0 || c.Keyed || c.Link != nil { // otherwise one statement, which is atomic by itself
		if begin, err = c.Open(ctx, db); err != nil {
			return nil, err
		}
		c.Own = c.Own || begin != nil
	}
	var refusal error
	var read map[int]Answer
	enqueue := func(db pg.DB) error {
		refusal = nil
		err := c.insertAll(ctx, db)
		if err == nil && c.Link != nil {
			err = c.Link(ctx, db, c.answers)
		}
		if err != nil {
			return err
		}
		read, refusal = c.tried, c.Refused()
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
	if err != nil && c.Own { // the others were rolled back
		onlyDuplicates(c.answers, read)
	}
	return c.answers, err
}

// insertAll enqueues the rows in as many statements as they need.
func (c *Call) insertAll(ctx context.Context, db pg.DB) error {
	clear(c.ids) // of an earlier try
	clear(c.answers)
	c.at, c.tried = time.Time{}, nil
	c.Again()
	part, rest := chunk(c.Rows, c.places)
	sorted := c.Sorted != nil && len(rest) > 0
	if len(rest) > 0 && c.Keyed {
		// Ids are drawn in the caller's order, but keys are taken in sorted order across all statements.
		if err := c.Store.QueryRow(ctx, db, stmt.DrawIDs, []any{len(c.Rows)}, &c.at, &c.ids); err != nil {
			return fmt.Errorf("onceq: drawing ids: %w", err)
		}
		if sorted {
			part, rest = chunk(c.Rows, c.Sorted)
		}
	}
	for ; len(part) > 0; part, rest = chunk(c.Rows, rest) {
		if sorted {
			part = slices.Clone(part) // another try takes the keys in the same order
			slices.Sort(part)
		}
		left, err := c.insert(ctx, db, part, false, c.Own)
		if err == nil {
			err = c.settle(ctx, db, left)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// onlyDuplicates leaves the answers of duplicates, after a rollback. Those that were replaced are again what
// was read of them.
func onlyDuplicates(answers []Answer, read map[int]Answer) {
	for i, a := range answers {
		switch {
		case !a.Duplicate:
			answers[i] = Answer{}
		case a.Replaced:
			answers[i] = read[i]
		}
	}
}

// chunk splits places into those of the rows that go in one statement, and the rest.
func chunk(rows []Row, places []int) (part, rest []int) {
	size := 0
	for n, i := range places {
		size += len(rows[i].JSON) + len(rows[i].Bytes) + len(rows[i].Header.Metadata)
		if n == table.ChunkRows || n > 0 && size > table.ChunkBytes {
			return places[:n], places[n:]
		}
	}
	return places, nil
}

// insert sends the rows at the places in part, which are sorted, and fills in the answers of those that were
// accepted. It returns the places of the others. An id that is 0 is drawn and filled in too. Jobs with a lane
// have the time of the call in common, so that their ids decide who is first, whichever statement takes them.
func (c *Call) insert(ctx context.Context, db pg.DB, part []int, taking, own bool) ([]int, error) {
	n := len(part)
	known := make(map[Header]int32)
	cols := columns{refs: make([]int32, 0, n), payloads: make([]string, 0, n)}
	for _, i := range part {
		cols.add(known, &c.Rows[i], c.ids[i], n)
	}
	var since *time.Time
	if !c.at.IsZero() {
		since = &c.at
	}
	apart, err := c.Store.OnCitus(ctx, db)
	if err != nil {
		return nil, c.failed(err)
	}
	statement, args := cols.statement(own, taking, apart, since)
	var got, mine []int64
	var delayed []bool // by header
	answer := []any{&got, &delayed, nil, &mine}
	if statement == stmt.EnqueueJobs {
		var began time.Time
		if answer = append(answer, &began); cols.lanes != nil {
			answer[4] = &c.at
		}
	}
	if err := c.Store.SendBare(ctx, db, statement, args, pg.Row(answer...)); err != nil {
		return nil, c.failed(err)
	}
	if len(got) != n || len(delayed) != len(cols.queues) {
		return nil, fmt.Errorf("onceq: enqueue: %d jobs sent, %d came back", n, len(got))
	}
	slices.Sort(mine)
	var left []int
	for k, i := range part {
		c.ids[i] = got[k]
		if c.Rows[i].Key != "" {
			if _, ok := slices.BinarySearch(mine, got[k]); !ok {
				left = append(left, i)
				continue
			}
		}
		c.answers[i] = accepted(got[k], delayed[cols.refs[k]-1])
	}
	return left, nil
}

// columns are the arrays in which many jobs are sent. Arrays that no job needs stay nil.
type columns struct {
	last *Header // of the latest job

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
func (c *columns) add(known map[Header]int32, r *Row, id int64, n int) {
	if r.Key != "" && c.keys == nil {
		c.keys, c.fingerprints = make([]string, len(c.payloads), n), make([][]byte, len(c.payloads), n)
	}
	if r.Bytes != nil && c.bytes == nil {
		c.bytes = make([][]byte, len(c.payloads), n)
	}
	if id != 0 && c.drawn == nil {
		c.drawn = make([]int64, len(c.payloads), n)
	}
	if r.Waits() && c.lanes == nil {
		c.lanes = make([]string, len(c.payloads), n)
	}
	c.refs, c.payloads = append(c.refs, c.header(known, r.Header)), append(c.payloads, r.JSON)
	if c.lanes != nil {
		line, path := table.LineOf(r.Lane)
		if r.Header.Follows {
			line, path = followMark, &r.Lane
		}
		if c.lanes = append(c.lanes, line); path != nil && c.paths == nil {
			c.paths = make([]string, len(c.lanes)-1, n)
		}
		if c.paths != nil {
			c.paths = append(c.paths, table.OrZero(path))
		}
	}
	if c.keys != nil {
		c.keys, c.fingerprints = append(c.keys, r.Key), append(c.fingerprints, r.Fingerprint)
	}
	if c.bytes != nil {
		c.bytes = append(c.bytes, r.Bytes)
	}
	if c.drawn != nil {
		c.drawn = append(c.drawn, id)
	}
}

const followMark = table.LineSep // a job with this as its lane in an insert waits for others

// header gives the number of a job's header, and appends the header if it is new.
func (c *columns) header(known map[Header]int32, h *Header) int32 {
	if h == c.last {
		return c.refs[len(c.refs)-1]
	}
	ref, ok := known[*h]
	if !ok {
		ref = int32(len(known) + 1)
		known[*h] = ref
		c.queues, c.kinds, c.scopes, c.metadata = append(c.queues, h.Queue), append(c.kinds, h.Kind), append(c.scopes, h.Scope), append(c.metadata, h.Metadata)
		c.priorities, c.attempts = append(c.priorities, int32(h.Priority)), append(c.attempts, int32(h.MaxAttempts))
		c.ats, c.delays, c.lifetimes = append(c.ats, h.due()), append(c.delays, h.Delay.Microseconds()), append(c.lifetimes, h.Lifetime)
		c.laneRules = append(c.laneRules, h.LaneRule)
		var ifDead *int16
		if rule := h.IfDead; h.Follows {
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
