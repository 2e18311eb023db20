package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/jsonb"
	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/promoter"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

const turnWritten = 50 * time.Millisecond // so long a turn says where the claim before it ended

// ClaimOptions says what to claim.
type ClaimOptions struct {
	Queue   string        // default DefaultQueue
	Kinds   []string      // default all, which an empty list means too
	Limit   int           // default 1
	Lease   time.Duration // default DefaultLease; a millisecond to a week
	MaxLost int           // default DefaultMaxLost; jobs that have lost this many leases become dead and are not returned
}

// Claim takes up to Limit jobs that are due and that nobody holds: highest priority first, then in the order in which they
// were due. A job whose lease has expired counts as held by nobody. A job that has lost a lease before is the only job of
// its claim, so that a job that kills its process does not take others with it. A job that somebody wants cancelled is
// cancelled and not returned. Of a queue or a kind that is paused (PauseQueue) nothing is returned. Claim runs on the pool,
// in a transaction of its own; an empty result means that nothing is due. It also lets jobs go on that wait for their lane, their
// limit or others: where it finds nothing, and once a second.
//
// The caller must Extend before the lease ends, and finish with Complete, Fail, Snooze or Release. A Worker does all this;
// Claim is for code that drives the loop itself.
func (q *Queue) Claim(ctx context.Context, opts ClaimOptions) ([]*Lease, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	if err := q.identify(ctx, q.store.Pool); err != nil {
		return nil, err
	}
	paused, err := q.pauses.Now(ctx, q.store, q.store.Pool, paused.Old)
	if err != nil {
		return nil, err
	}
	statement, kinds := opts.open(paused)
	if statement == "" {
		return nil, nil
	}
	if err := q.lanes.InTurn(ctx, q.promotes(q.store.Pool)); err != nil {
		return nil, err
	}
	for looked := false; ; {
		c := claimer.Ask{Queue: opts.Queue, Free: int64(opts.Limit)}
		c.Asked = cursor.Asked{Limit: opts.Limit, From: cursor.FromStart()}
		if err := q.claim(ctx, q.store.Pool, opts.Lease, 0, []*claimer.Ask{&c}, statement, claimArgs(&c, kinds)...); err != nil {
			return nil, err
		}
		leases := c.Jobs.(leased)
		if len(leases) == 0 && !looked {
			looked = true // nobody but this call may be there to let jobs into their lanes
			if n, err := q.lanes.Promote(ctx, q.promotes(q.store.Pool)); err != nil {
				return nil, err
			} else if n > 0 {
				continue
			}
		}
		alive, ended, err := endExhausted(ctx, q, leases, opts.MaxLost)
		if err != nil || len(alive) > 0 || ended == 0 {
			return alive, err
		}
		looked = false // others may go on, now that these have ended
	}
}

// promotes is for a promoter over these connections that starts nothing by itself.
func (q *Queue) promotes(db *pgxpool.Pool) promoter.Config {
	return promoter.Config{Store: q.store, Troubles: &q.troubles, Log: q.log, DB: db, Woken: func(string) {},
		Cancel: func(ctx context.Context, ids []int64) error { return q.canceller().Followers(ctx, db, ids, q.log) }}
}

// check refuses what cannot be, and sets defaults.
func (o *ClaimOptions) check() error {
	o.Queue, o.Limit = cmp.Or(o.Queue, DefaultQueue), cmp.Or(o.Limit, 1)
	o.Lease, o.MaxLost = cmp.Or(o.Lease, DefaultLease), cmp.Or(o.MaxLost, DefaultMaxLost)
	if err := checkName("ClaimOptions.Queue", o.Queue, MaxNameBytes); err != nil {
		return err
	}
	for _, kind := range o.Kinds {
		if err := checkText("ClaimOptions.Kinds", kind); err != nil {
			return err
		}
	}
	if o.Limit < 0 || o.Limit > 10_000 {
		return invalid("ClaimOptions.Limit", "is %d; 1 to 10,000 is possible", o.Limit)
	}
	if err := checkLease("ClaimOptions.Lease", o.Lease, time.Millisecond); err != nil {
		return err
	}
	if o.MaxLost < 0 || o.MaxLost > maxMaxLost {
		return invalid("ClaimOptions.MaxLost", "is %d; 1 to %d is possible", o.MaxLost, maxMaxLost)
	}
	return nil
}

// open chooses the statement of a claim and its kinds, by what is paused. It is "" if the queue is.
func (o *ClaimOptions) open(p *paused.Set) (statement string, kinds []string) {
	switch {
	case p.Queues[o.Queue]:
		return "", nil
	case len(p.Kinds) > 0 && len(o.Kinds) == 0:
		return stmt.ClaimAnyBut, p.Kinds
	case len(p.Kinds) > 0:
		return stmt.ClaimAny, p.Open(o.Queue, o.Kinds)
	case len(o.Kinds) == 0:
		return stmt.ClaimAny, nil // an empty list is no kind at all: what is left if all are paused
	}
	return stmt.ClaimAny, o.Kinds
}

// endExhausted ends those jobs of a claim that must not be started again, and returns the others and how many
// it has ended.
func endExhausted(ctx context.Context, q *Queue, leases []*Lease, most int) (alive []*Lease, ended int, err error) {
	alive = leases[:0]
	var dead []finish.Outcome
	for _, l := range leases {
		if o := finish.Exhausted(&l.hold, most); o != nil {
			dead = append(dead, *o)
		} else {
			alive = append(alive, l)
		}
	}
	if alive, err = onlyOnTime(ctx, q, alive); err != nil || len(dead) == 0 {
		return alive, 0, err
	}
	_, left, err := q.finish(ctx, q.store.Pool, pg.Hot, dead)
	switch {
	case err != nil && len(alive) == 0:
		return nil, 0, err
	case err != nil: // the others are the caller's
		q.log.WarnContext(ctx, "onceq: jobs that do not run again could not be ended, and their leases run out",
			slog.Int("jobs", len(left)), slog.Any("error", err))
	}
	return alive, len(dead), nil
}

// onlyOnTime returns those of the leases that Claim may return: it gives back those that missed their slots, and start later.
func onlyOnTime(ctx context.Context, q *Queue, leases []*Lease) ([]*Lease, error) {
	var late []*hold.Hold
	for _, l := range leases {
		if q.far.Late(&l.hold) {
			late = append(late, &l.hold)
		}
	}
	if len(late) == 0 {
		return leases, nil
	}
	start, _, err := q.far.Take(ctx, q.store, q.store.Pool, late)
	leases = slices.DeleteFunc(leases, func(l *Lease) bool { return slices.Contains(late, &l.hold) && !slices.Contains(start, &l.hold) })
	if err != nil && len(leases) > 0 { // these are the caller's; the leases of the others run out
		q.log.WarnContext(ctx, "onceq: jobs that missed their slots got no new ones, and their leases run out", slog.Int("jobs", len(late)-len(start)), slog.Any("error", err))
		return leases, nil
	}
	return leases, err
}

// leased are the jobs of a claim, in their order.
type leased []*Lease

func (l leased) Len() int { return len(l) }

func (l leased) At(i int) cursor.Position {
	return cursor.Position{Priority: int16(l[i].Priority), RunAt: l[i].RunAt, ID: l[i].ID} // #nosec G115 -- of a row
}

func (l leased) Bytes() (n int64) {
	for _, one := range l {
		n += one.size() + one.hold.TooMany
	}
	return n
}

// size is that of the payload, in bytes.
func (l *Lease) size() int64 { return int64(len(l.Payload) + len(l.Bytes)) }

func (l leased) First() (job quarantine.Job, token int64) {
	return quarantine.Job{ID: l[0].ID, Lost: l[0].Lost}, l[0].Token
}

// claimArgs are those of a claim of one queue.
func claimArgs(c *claimer.Ask, kinds []string) []any {
	priorities := make([]int16, len(c.From))
	runAts := make([]time.Time, len(c.From))
	ids := make([]int64, len(c.From))
	for i, p := range c.From {
		priorities[i], runAts[i], ids[i] = p.Priority, p.RunAt, p.ID
	}
	return []any{c.Queue, priorities, runAts, ids, kinds, c.Limit}
}

// stmt.ClaimJobs claims jobs that have lost no lease, of one queue or several.
func claimJobs(ctx context.Context, q *Queue, db DB, lease time.Duration, run int64, kinds []string, asks []*claimer.Ask) error {
	if len(asks) == 1 {
		statement, args := stmt.ClaimJobs, append(claimArgs(asks[0], kinds), asks[0].Free)
		if t := asks[0].Turn; t != nil && t.Others {
			statement, args = stmt.ClaimInTurn, append(args, t.Kinds, turnWritten.Microseconds())
		}
		return q.claim(ctx, db, lease, run, asks, statement, args...)
	}
	var priorities [3][]int16
	var runAts [3][]time.Time
	var ids [3][]int64
	queues, limits, free := make([]string, len(asks)), make([]int64, len(asks)), make([]int64, len(asks))
	for i, c := range asks {
		queues[i], limits[i], free[i] = c.Queue, int64(c.Limit), c.Free
		for n, p := range c.From {
			priorities[n], runAts[n], ids[n] = append(priorities[n], p.Priority), append(runAts[n], p.RunAt), append(ids[n], p.ID)
		}
	}
	args := []any{queues, limits, free}
	for n := range ids {
		args = append(args, priorities[n], runAts[n], ids[n])
	}
	return q.claim(ctx, db, lease, run, asks, stmt.ClaimManyJobs, append(args, kinds)...)
}

// claim runs one of the statements above. run is the one that claims, and 0 for Queue.Claim.
func (q *Queue) claim(ctx context.Context, db DB, lease time.Duration, run int64, asks []*claimer.Ask, statement string, args ...any) error {
	holder := hold.NewHolder(run)
	later := q.store.Pool // for what the leases' holders do without a transaction
	if k, ok := db.(pg.Quick); ok {
		later = k.Own.Outcomes
	}
	var leases []*Lease
	var order []int64
	var now time.Time
	var cut bool    // it stopped before a job that needs a claim of its own
	var ahead int64 // bytes of the payloads that no handler is free for
	by := pg.Hot
	by.Clock, by.Along = &now, cmp.Or(q.pauses.Along(), asks[0].Along)
	by.Turn = asks[0].Turn // only a claim of one queue has one
	args = append([]any{lease.Microseconds(), holder}, args...)
	began := time.Now()
	err := q.store.Send(ctx, db, by, statement, args, func(rows pgx.Rows) error {
		if by.Turn != nil {
			began = began.Add(by.Turn.Waited)
		}
		block := make([]Lease, 0, min(asks[0].Limit, 64))
		for rows.Next() {
			if len(block) == cap(block) {
				block = make([]Lease, 0, 64)
			}
			block = append(block, Lease{origin: origin{q: q, db: later}, hold: hold.Hold{Holder: holder, Began: began}})
			l := &block[len(block)-1]
			var n int64
			if err := l.read(rows, now, lease, &n, &cut); err != nil {
				return err
			}
			ask := asks[n>>32]
			l.Queue, l.hold.Queue = ask.Queue, ask.Queue
			leases, order = append(leases, l), append(order, n)
			if size := l.size(); size > 0 && n&(1<<32-1) > ask.Free { // its place in its queue
				if ahead += size; ahead > table.ChunkBytes && len(leases) > 1 {
					l.hold.TooMany, l.Payload, l.Bytes = size, nil, nil
				}
			}
		}
		return rows.Err()
	})
	if err != nil {
		return fmt.Errorf("onceq: claim: %w", err)
	}
	distribute(asks, leases, order)
	for _, c := range asks {
		c.Now, c.Began = now, began
	}
	if q.watched(EventClaimed.Level()) {
		for _, l := range leases {
			q.claimed(ctx, l, now)
		}
	}
	return nil
}

// distribute gives each ask its leases. order has the place of each lease: that of its ask in the upper half.
func distribute(asks []*claimer.Ask, leases []*Lease, order []int64) {
	if !slices.IsSorted(order) {
		place := make(map[int64]int64, len(order))
		for i, l := range leases {
			place[l.ID] = order[i]
		}
		slices.SortFunc(leases, func(a, b *Lease) int { return cmp.Compare(place[a.ID], place[b.ID]) })
		slices.Sort(order)
	}
	for _, c := range asks {
		c.Jobs = leased(nil)
	}
	for i := 0; i < len(leases); {
		k := order[i] >> 32
		first := i
		for i < len(leases) && order[i]>>32 == k {
			i++
		}
		asks[k].Jobs = leased(leases[first:i:i])
	}
}

// dueAt is since when the job has been due, whatever held it.
func (l *Lease) dueAt() time.Time {
	if !l.due.IsZero() && l.due.Before(l.RunAt) {
		return l.due
	}
	return l.RunAt
}

// claimed reports a claim. now is the database's time.
func (q *Queue) claimed(ctx context.Context, l *Lease, now time.Time) {
	e := l.event(EventClaimed)
	due := l.dueAt()
	e.Wait = max(0, now.Sub(due))
	if e.Held = max(0, min(e.Wait, l.RunAt.Sub(due))); e.Held > 0 {
		switch {
		case l.Limit != "":
			e.HeldBy = "limit"
		case l.Lane != "":
			e.HeldBy = "lane"
		default:
			e.HeldBy = "after"
		}
	}
	q.emit(ctx, e)
}

// read reads a claimed job from a row, after the columns in before. n and cut are the columns that are the claim's, and now is
// the database's clock just before it. It does not set the queue.
func (l *Lease) read(rows pgx.Rows, now time.Time, lease time.Duration, n *int64, cut *bool, before ...any) error {
	var payload, metadata string
	var identity *int64
	var due *time.Time
	var cancelled *bool
	var lane *string
	var rule *int16
	h := &l.hold
	if err := rows.Scan(append(before, &l.ID, &h.Claims, &l.Lost, &l.Attempt, &l.MaxAttempts, &l.Priority, &l.RunAt, &l.CreatedAt, &l.Until,
		&l.Kind, &l.Scope, &l.Key, &payload, &l.Bytes, &metadata, &identity, &due, n, &cancelled, cut, &lane, &rule)...); err != nil {
		return err
	}
	l.Token = l.ID<<table.TokenBits | int64(h.Claims)
	l.Attempt++
	l.due, h.Waited = table.OrZero(due), -1
	if !now.IsZero() {
		h.Waited = max(0, now.Sub(l.dueAt()))
	}
	l.Lane, h.Member = table.OrZero(lane), table.OrZero(rule)&table.MemberBit != 0
	if strings.Contains(l.Lane, table.LineSep) {
		var slotted bool
		if l.Lane, l.Limit, l.Weight, slotted = table.SplitPath(l.Lane); slotted {
			h.Slot = h.Began.Add(l.RunAt.Sub(now))
			l.q.far.Saw(h.Began)
		}
	}
	h.Cancelled, l.identity = cancelled != nil, l.CreatedAt.UnixMicro()
	if identity != nil {
		l.identity = *identity
	}
	if payload != "" {
		l.Payload = json.RawMessage(payload)
	}
	if metadata != "" {
		l.Metadata = jsonb.Texts(metadata)
	}
	h.ID, h.Token, h.Kind, h.Lost, h.Claimed, h.Lease = l.ID, l.Token, l.Kind, l.Lost, l.Until.Add(-lease), l
	h.Keyed, h.Lane, h.Limit, h.Weight = l.Key != "", l.Lane, l.Limit, l.Weight
	return nil
}
