package onceq

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/enqueue"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Group is the answer of EnqueueGroup.
type Group struct {
	Then    Result   `json:"then"`    // the job that waits for the others; the group's id is its ID
	Members []Result `json:"members"` // in the order of the call; nil if Then is a duplicate
}

// EnqueueGroup accepts jobs, and one that starts when all of them are finished, inside db, all or nothing. then may have a
// key, a lane, a limit, a delay and an After of its own. If its key is taken, Group.Then is a Duplicate and nothing is written.
// A member whose key is taken is the job that has it, whatever its state; its Result says so. Without members then starts at
// once. then.IfDead says what a dead member means. A handler gets what came of the members from Lease.Members, and a member's
// handler may add others with Lease.AddMembers.
//
// Bad input is an *InvalidError, before anything is sent. If different work has taken the key of a member, the error is as
// that of EnqueueMany. Outside a transaction nothing is enqueued then. In the caller's own transaction the other jobs are, and
// then waits for the jobs that have the keys, too: the caller decides whether to commit or to roll back.
func (q *Queue) EnqueueGroup(ctx context.Context, db DB, members []Job, then Job) (g Group, err error) {
	jobs := append(slices.Clone(members), then)
	ctx, done, err := q.beforeEnqueue(ctx, db, jobs)
	defer func() { done(err) }()
	if err != nil {
		return Group{}, err
	}
	c, err := encodeGroup(jobs)
	if err != nil {
		return Group{}, err
	}
	if _, err := resolveAfter(ctx, q, db, c.members, c.rows); err != nil {
		return Group{}, inField(err, "jobs[", "members[")
	}
	begin, err := mustOpen(ctx, db)
	if err != nil {
		return Group{}, err
	}
	var refused error
	err = pg.InOne(ctx, begin, db, pg.AsIs, func(db pg.DB) error {
		g, refused, err = c.enqueue(ctx, q, db, begin != nil)
		return err
	})
	switch {
	case err != nil && refused == nil:
		g = Group{}
	case err != nil && begin != nil:
		g.Then = Result{} // it was rolled back, and enqueueMany has left only duplicates of the others
	}
	q.enqueuedMany(ctx, []enqueue.Row{c.last}, []Result{g.Then})
	q.enqueuedMany(ctx, c.rows, g.Members)
	return g, err
}

// groupCall is a call of EnqueueGroup, encoded.
type groupCall struct {
	members []Job
	then    Job
	rows    []enqueue.Row // the members
	sorted  []int         // by their keys
	keyed   bool          // some have keys
	last    enqueue.Row   // then
}

// encodeGroup encodes the members and, as the last of jobs, the one that waits for them.
func encodeGroup(jobs []Job) (c groupCall, err error) {
	c.members, c.then = jobs[:len(jobs)-1], jobs[len(jobs)-1]
	for i := range c.members {
		c.members[i].member = true
	}
	c.then.follows = true
	if c.rows, c.sorted, c.keyed, err = encodeMany(c.members); err != nil {
		return c, inField(err, "jobs[", "members[")
	}
	c.last, err = c.then.encode()
	if err == nil && len(c.members) == 0 && len(c.then.After) == 0 { // it waits for nothing
		c.then.follows, c.then.IfDead = false, DeadWait
		c.last, err = c.then.encode()
	}
	if err != nil {
		return c, inField(err, "", "then.")
	}
	return c, c.checkKeys()
}

// checkKeys refuses members that have, or wait for, the key of the job that waits for them.
func (c *groupCall) checkKeys() error {
	if c.last.Key == "" {
		return nil
	}
	for i := range c.rows {
		if c.rows[i].Key != "" && enqueue.CompareKeys(&c.rows[i], &c.last) == 0 {
			return invalid(fmt.Sprintf("members[%d].Key", i),
				"is that of the job that waits for the members; give one of them another key")
		}
		for n, ref := range c.members[i].After {
			if ref.ID == 0 && ref.Key == c.last.Key && ref.Scope == c.last.Header.Scope {
				return invalid(fmt.Sprintf("members[%d].After[%d]", i, n),
					"names %s, which is that of the job that waits for the members; both would wait for ever", ref)
			}
		}
	}
	return nil
}

// enqueue enqueues the job that waits, then the members, and links them. refused says which keys different
// work has taken.
func (c *groupCall) enqueue(ctx context.Context, q *Queue, db DB, own bool) (g Group, refused, err error) {
	first, err := q.enqueueMany(ctx, db, []Job{c.then}, []enqueue.Row{c.last}, nil, c.last.Key != "", own)
	if len(first) > 0 {
		g.Then = first[0]
	}
	if err != nil || g.Then.Duplicate {
		return g, nil, err
	}
	if g.Members, refused = q.enqueueMany(ctx, db, c.members, c.rows, c.sorted, c.keyed, own); g.Members == nil {
		return g, nil, refused
	}
	links := make([]enqueue.Link, len(c.members))
	for i, r := range g.Members {
		links[i] = enqueue.LinkTo(g.Then.ID, answerOf(r), true)
	}
	return g, refused, cmp.Or(q.intake.WriteLinks(ctx, db, links), refused)
}

// inField renames the field of an *InvalidError.
func inField(err error, from, to string) error {
	var bad *InvalidError
	if errors.As(err, &bad) && strings.HasPrefix(bad.Field, from) {
		bad.Field = to + strings.TrimPrefix(bad.Field, from)
	}
	return err
}

// refuseCycles refuses jobs as members of groups that wait for these groups themselves, because all of them would wait for
// ever: those whose keys or whose After say so. It writes nothing.
func refuseCycles(ctx context.Context, q *Queue, db DB, groups []int64, jobs []Job, rows []enqueue.Row) error {
	var fields []string
	var ids []int64
	var scopes, keys []string
	add := func(field string, ref JobRef) {
		fields, ids, scopes, keys = append(fields, field), append(ids, ref.ID), append(scopes, ref.Scope), append(keys, ref.Key)
	}
	for i := range jobs {
		if r := &rows[i]; r.Key != "" {
			add(fmt.Sprintf("jobs[%d].Key", i), JobRef{Scope: r.Header.Scope, Key: r.Key})
		}
		for n, ref := range jobs[i].After {
			add(fmt.Sprintf("jobs[%d].After[%d]", i, n), ref)
		}
	}
	if len(fields) == 0 {
		return nil
	}
	var n int
	var id, root int64
	if err := q.store.QueryRow(ctx, db, stmt.FindCycles, []any{groups, ids, scopes, keys}, &n, &id, &root); err != nil {
		return fmt.Errorf("onceq: add members: looking for jobs that would wait for each other: %w", q.store.Told(err))
	}
	switch {
	case n < 0:
		return nil
	case id == root:
		return invalid(fields[n], "names job %d, which is to wait for the new member; both would wait for ever", id)
	}
	return invalid(fields[n], "names job %d, which waits for job %d, which is to wait for the new member; all would wait for ever", id, root)
}

// AddMembers enqueues jobs inside db and adds them to every group that this job is a member of, so that what waits for this
// job waits for them too. It is for the transaction that completes the job: that of HandleTx and HandleBatch, or one with
// Lease.Complete. Elsewhere, a run that is repeated adds the jobs again, unless they have keys.
//
// If the lease is lost, the statement raises an error, so that nothing of the transaction is committed, and AddMembers returns
// a *LeaseError. A job that nobody has waited for is an *InvalidError, before anything is written, and so are jobs that would wait
// for each other for ever. If the jobs that waited for this one are gone, which they are some time after they finished, the new
// ones are enqueued, and nobody waits for them. Keys that are taken are as in EnqueueMany and EnqueueGroup.
func (l *Lease) AddMembers(ctx context.Context, db DB, jobs ...Job) (results []Result, err error) {
	q := l.q
	jobs = slices.Clone(jobs)
	ctx, done, err := q.beforeEnqueue(ctx, db, jobs)
	defer func() { done(err) }()
	if err != nil {
		return nil, err
	}
	for i := range jobs {
		jobs[i].member = true
	}
	rows, sorted, keyed, err := encodeMany(jobs)
	if err != nil {
		return nil, err
	}
	var refused error
	begin, err := mustOpen(ctx, db)
	if err != nil {
		return nil, err
	}
	err = pg.InOne(ctx, begin, db, pg.AsIs, func(db pg.DB) error {
		groups, err := l.groups(ctx, db)
		if err != nil {
			return err
		}
		if err := refuseCycles(ctx, q, db, groups, jobs, rows); err != nil {
			return err
		}
		if results, err = q.enqueueMany(ctx, db, jobs, rows, sorted, keyed, begin != nil); results == nil {
			return err
		}
		var links []enqueue.Link
		for _, group := range groups {
			for _, r := range results {
				links = append(links, enqueue.LinkTo(group, answerOf(r), true))
			}
		}
		refused = err
		return cmp.Or(q.intake.WriteLinks(ctx, db, links), refused)
	})
	if err != nil && refused == nil {
		results = nil
	}
	q.enqueuedMany(ctx, rows, results)
	return results, err
}

// groups reads the groups to which AddMembers adds, and locks the lease.
func (l *Lease) groups(ctx context.Context, db DB) (groups []int64, err error) {
	err = l.q.store.QueryRow(ctx, db, stmt.GroupsOf, []any{l.ID, l.hold.Claims, l.hold.Holder}, nil, &groups)
	switch {
	case sqlstate.LeaseLost(err):
		e := l.event(EventLeaseLost)
		e.Err = l.lostError("add members")
		l.q.emit(ctx, e)
		return nil, e.Err
	case err != nil:
		l.conflicted(ctx, err)
		return nil, fmt.Errorf("onceq: add members: %w", l.q.store.Told(err))
	case len(groups) == 0 && !l.hold.Member:
		return nil, invalid("AddMembers", "was called by job %d, for which no job waits; enqueue with EnqueueMany, or make this job a member with EnqueueGroup or After", l.ID)
	}
	return groups, nil
}

// Member is a job that another one waits for.
type Member struct {
	ID int64 `json:"id"`

	// State is StateCancelled for a job that was discarded.
	State State `json:"state"`

	// Kind, and Error, which is the last one, are those of a job that has not completed, while anything is left of it. They are
	// empty for a job that completed or was discarded.
	Kind  string `json:"kind,omitzero"`
	Error string `json:"error,omitzero"`

	// Result is that of a completed job, or nil for none. If a worker already had the job when an After named it, the result is
	// lost unless the job is kept (Kind.Keep).
	Result json.RawMessage `json:"result,omitzero"`
}

// membersOf gives the members of a group whose ids are larger than after, in pages of up to 1,000, and of them limit, if that is not 0.
func membersOf(ctx context.Context, q *Queue, db DB, group, after int64, limit int, bare bool) iter.Seq2[Member, error] {
	return func(yield func(Member, error) bool) {
		for left := cmp.Or(limit, math.MaxInt); left > 0; {
			var page []Member
			args := []any{group, after, min(left, 1000), bare}
			err := q.store.Send(ctx, db, pg.Reading, stmt.ReadMembers, args, pg.Each(func(rows pgx.Rows) error {
				var m Member
				err := m.scan(rows)
				page = append(page, m)
				return err
			}))
			if err != nil {
				yield(Member{}, fmt.Errorf("onceq: members of group %d: %w", group, err))
				return
			}
			for _, m := range page {
				if after = m.ID; !yield(m, nil) {
					return
				}
			}
			if len(page) < min(left, 1000) {
				return
			}
			left -= len(page)
		}
	}
}

func (m *Member) scan(rows pgx.Rows) error {
	return rows.Scan(&m.ID, &m.State, (*[]byte)(&m.Result), &m.Kind, &m.Error)
}

// Members gives the jobs that this one has waited for, by id, and Group counts them. Members reads them in pages of up to
// 1,000; an error ends it. Both read on a connection that does not depend on the handler's transaction.
func (l *Lease) Members(ctx context.Context) iter.Seq2[Member, error] {
	return membersOf(ctx, l.q, l.alone(), l.ID, 0, 0, false)
}

// Group says how many of the jobs that this one has waited for were completed, are dead or were cancelled. See Members.
func (l *Lease) Group(ctx context.Context) (GroupInfo, error) {
	return l.q.Group(ctx, l.alone(), l.ID)
}

// GroupInfo says how a group is doing.
type GroupInfo struct {
	ID        int64    `json:"id"`      // of the job that waits, and of the group
	State     State    `json:"state"`   // of that job; StateCompleted if it is gone
	Waits     bool     `json:"waits"`   // it still waits for members
	IfDead    DeadRule `json:"if_dead"` // of a job that still waits, or that was cancelled because of this
	Total     int      `json:"total"`
	Open      int      `json:"open"` // unfinished members
	Completed int      `json:"completed"`
	Dead      int      `json:"dead"`
	Cancelled int      `json:"cancelled"` // with those that were discarded
	Held      int      `json:"held"`

	Oldest time.Duration `json:"oldest,omitzero"` // how long ago the job that waits was enqueued, if it still waits
}

// String says in words how the group is doing.
func (g GroupInfo) String() string {
	if g.Total == 0 {
		return fmt.Sprintf("group %d: job %d waits for no others", g.ID, g.ID)
	}
	s := fmt.Sprintf("group %d: %d of %s finished", g.ID, g.Total-g.Open, table.Numbered(g.Total, "member is", "members are"))
	for _, n := range []struct {
		count int
		word  string
	}{{g.Dead, "dead"}, {g.Cancelled, "cancelled"}, {g.Held, "held"}} {
		if n.count > 0 {
			s += fmt.Sprintf(", %d %s", n.count, n.word)
		}
	}
	if g.Waits && g.Dead > 0 && g.IfDead == DeadWait {
		s += fmt.Sprintf(", and so job %d waits until %s redriven, resolved or discarded (DeadWait)", g.ID, table.Either(g.Dead, "that is", "those are"))
	}
	if g.State == StateCancelled && g.IfDead == DeadCancel {
		s += fmt.Sprintf(", and so job %d was cancelled (DeadCancel)", g.ID)
	}
	return s
}

// groups reads what stmt.ReadGroups does, and calls take with each group, its first unfinished members and those that wait for a person.
func (q *Queue) groups(ctx context.Context, db DB, after int64, limit int, one int64, members bool,
	take func(g GroupInfo, open, dead []int64)) error {
	return q.store.Send(ctx, db, pg.Reading, stmt.ReadGroups, []any{after, limit, one, members}, pg.Each(func(rows pgx.Rows) error {
		var g GroupInfo
		var open, dead []int64
		err := g.scan(rows, &open, &dead)
		if err == nil {
			take(g, open, dead)
		}
		return err
	}))
}

func (g *GroupInfo) scan(rows pgx.Rows, more ...any) error {
	var state *State
	var oldest int64
	dest := []any{&g.ID, &state, &g.Waits, &g.IfDead, &oldest, &g.Total, &g.Open, &g.Completed, &g.Dead, &g.Cancelled, &g.Held}
	if err := rows.Scan(append(dest, more...)...); err != nil {
		return err
	}
	g.State, g.Oldest = StateCompleted, time.Duration(oldest)*time.Microsecond
	if state != nil {
		g.State = *state
	}
	if state == nil && g.Total == 0 {
		return pgx.ErrNoRows
	}
	return nil
}

// Group says how a group is doing: how many members there are, and how they ended. Its id is that of the job that waits. It
// reads one small row for each member, so it is cheap for thousands and takes a third of a second or more for a million: do not
// ask for the progress of a very large group in a tight loop (docs/use/groups.md has figures). An unknown id is ErrNotFound. A job that waits for no others, and did not, is as one of an
// EnqueueGroup without members: Total is 0, and State that of the job. Ops.CancelGroup refuses it.
func (q *Queue) Group(ctx context.Context, db DB, id int64) (GroupInfo, error) {
	var g GroupInfo
	err := q.groups(ctx, db, 0, 0, id, false, func(one GroupInfo, _, _ []int64) { g = one })
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return GroupInfo{}, fmt.Errorf("%w: group %d", ErrNotFound, id)
	case err != nil:
		return GroupInfo{}, fmt.Errorf("onceq: group %d: %w", id, err)
	}
	return g, nil
}
