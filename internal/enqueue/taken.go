package enqueue

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// What a row may change in the job that has its key, if nobody has started that one: see onceq.Replace. With
// MayWait it waits for that job's transaction, or takes its key (onceq.UntilStarted).
const (
	MayPayload int16 = 1 << iota
	MayTime
	MayWait
)

// Taken reads which job has a key. The error is pgx.ErrNoRows if none has.
func (in *Intake) Taken(ctx context.Context, db pg.DB, scope, key string) (a Answer, err error) {
	var state table.FenceState
	var live *int16
	err = in.Store.QueryRow(ctx, db, stmt.ReadTaken, []any{[]string{scope}, []string{key}}, nil, &a.ID, &state, nil, &a.Output, nil, nil, &live)
	a.Duplicate, a.State = true, state.Job(live)
	return a, err
}

// settle answers for the rows at the places in left, whose keys were taken a moment ago: it fills in an answer for each. It
// must run in new statements, because the statement that met the key may not see its row.
func (c *Call) settle(ctx context.Context, db pg.DB, left []int) error {
	for try := 0; len(left) > 0; try++ {
		if try == table.SettleTries {
			return fmt.Errorf("%w (key %q in scope %q)", table.ErrKeyUnsettled, c.Rows[left[0]].Key, c.Rows[left[0]].Header.Scope)
		}
		again, floor, err := c.look(ctx, db, left)
		if err != nil {
			return err
		}
		if len(again) == 0 {
			break
		}
		if try > 0 {
			for _, i := range again {
				c.ids[i] = 0
			}
		}
		if floor > 0 && try > 0 {
			// Not in the first try: an id above the old one is what the sequence returns anyway, unless it was set back.
			var id int64
			if err := c.Store.SendBare(ctx, db, `select onceq.next_id('onceq.ids', $1::bigint)`, []any{floor}, pg.Row(&id)); err != nil {
				return fmt.Errorf("onceq: drawing an id: %w", err)
			}
		}
		if left, err = c.insert(ctx, db, again, true, pg.Outside(db)); err != nil {
			return err
		}
	}
	return nil
}

// look reads the fences of the rows at the places in left and answers for those whose key is taken. It returns the places
// of the others, and the id that the sequence must pass before these are tried again.
func (c *Call) look(ctx context.Context, db pg.DB, left []int) (again []int, floor int64, err error) {
	scopes, keys := make([]string, len(left)), make([]string, len(left))
	for k, i := range left {
		scopes[k], keys[k] = c.Rows[i].Header.Scope, c.Rows[i].Key
	}
	answered := make([]bool, len(left))
	var replacing []int // places
	var marks map[int][]byte
	err = c.Store.Send(ctx, db, pg.AsIs, stmt.ReadTaken, []any{scopes, keys}, pg.Each(func(rows pgx.Rows) error {
		var n, token int64
		var state table.FenceState
		var mark []byte
		var free bool
		var live *int16
		a := Answer{Duplicate: true}
		if err := rows.Scan(&n, &a.ID, &state, &mark, &a.Output, &free, &token, &live); err != nil {
			return err
		}
		if free {
			floor = max(floor, token)
			return nil
		}
		a.State = state.Job(live)
		i := left[n-1]
		if c.changes(i, a, mark) == 0 {
			answered[n-1] = true
			c.answer(ctx, db, i, a, mark)
			return nil
		}
		floor = max(floor, token)
		if marks == nil {
			marks = make(map[int][]byte)
		}
		c.answers[i] = a
		replacing, marks[i] = append(replacing, i), mark
		return nil
	}))
	if err != nil {
		return nil, 0, fmt.Errorf("onceq: reading a taken key: %w", err)
	}
	if len(replacing) > 0 {
		done, err := c.replace(ctx, db, replacing, marks)
		if err != nil {
			return nil, 0, err
		}
		for _, i := range done {
			answered[slices.Index(left, i)] = true
		}
	}
	if err := c.Looked(ctx, db); err != nil {
		return nil, 0, err
	}
	for k, i := range left {
		if !answered[k] {
			again = append(again, i)
		}
	}
	return again, floor, nil
}

func (c *Call) answer(ctx context.Context, db pg.DB, i int, a Answer, mark []byte) {
	c.answers[i] = a
	c.Asker.Taken(ctx, db, i, a, mark)
}

// changes says what the row at place i may change in the job that a describes and whose fence has the
// fingerprint mark. Each row is tried once: after that the answer is as for any other.
func (c *Call) changes(i int, a Answer, mark []byte) (parts int16) {
	r := &c.Rows[i]
	if c.tried[i].ID == a.ID || a.State.Finished() || !fingerprint.SameKind(mark, r.Fingerprint) {
		return 0
	}
	parts = r.May & MayWait
	may := r.May&MayPayload > 0 || fingerprint.SamePayload(mark, r.Fingerprint)
	if may && (a.State == table.StateWaiting || a.State == table.StateDelayed) {
		parts = r.May
	}
	return parts
}

// replace changes the jobs that those at the given places may change, of whose fences the fingerprints were
// read. It answers for those that did, and for those whose job waits for the caller's commit. The other jobs
// have left their keys, or were started in between.
func (c *Call) replace(ctx context.Context, db pg.DB, places []int, read map[int][]byte) (answered []int, err error) {
	n := len(places)
	if c.tried == nil {
		c.tried = make(map[int]Answer)
	}
	ids, byID := make([]int64, n), make(map[int64]int, n)
	scopes, keys, payloads, metadata, paths := make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	bytes, marks, were := make([][]byte, n), make([][]byte, n), make([][]byte, n)
	parts, ats, delays := make([]int16, n), make([]int64, n), make([]int64, n)
	for k, i := range places {
		r := &c.Rows[i]
		parts[k] = c.changes(i, c.answers[i], read[i])
		c.tried[i] = c.answers[i]
		ids[k], byID[c.answers[i].ID] = c.answers[i].ID, i
		scopes[k], keys[k], metadata[k], paths[k] = r.Header.Scope, r.Key, r.Header.Metadata, r.Lane
		payloads[k], bytes[k], marks[k], were[k] = r.JSON, r.Bytes, r.Fingerprint, read[i]
		ats[k], delays[k] = r.Header.due(), r.Header.Delay.Microseconds()
	}
	args := []any{ids, scopes, keys, payloads, bytes, metadata, marks, parts, ats, delays, paths, were}
	var changed, kept []int64
	var delayed []bool
	err = c.Store.SendBare(ctx, db, stmt.ReplaceJobs, args, pg.Row(&changed, &delayed, &kept))
	if err != nil {
		return nil, fmt.Errorf("onceq: replacing a job: %w", err)
	}
	for k, id := range changed {
		a := accepted(id, delayed[k])
		a.Duplicate, a.Replaced = true, true
		c.answer(ctx, db, byID[id], a, c.Rows[byID[id]].Fingerprint)
		answered = append(answered, byID[id])
	}
	for _, id := range kept {
		if i := byID[id]; !c.answers[i].Replaced {
			c.answer(ctx, db, i, c.tried[i], read[i])
			answered = append(answered, i)
		}
	}
	return answered, nil
}

// Mismatch is a row whose key is taken by different work, and where to say what differs. Only for a mismatch
// is the first job's payload read, if it still exists.
type Mismatch struct {
	Row    *Row
	Fields []string // see onceq.Job
	With   Answer
	Detail *string
	Differ *[]string
}

// Explain says what differs.
func (in *Intake) Explain(ctx context.Context, db pg.DB, all []Mismatch) error {
	const read = `
select u.n, p.payload, p.payload_bytes
  from pg_catalog.unnest($1::bigint[]) with ordinality as u(id, n)
 cross join lateral (
       (select j.payload::text as payload, j.payload_bytes from onceq.jobs j where j.id = u.id)
       union all
       (select w.payload::text, w.payload_bytes from onceq.job_waits w where w.id = u.id)
       union all
       (select h.payload::text, h.payload_bytes from onceq.job_history h where h.id = u.id)
       limit 1) p`
	if len(all) == 0 {
		return nil
	}
	ids := make([]int64, len(all))
	for n, m := range all {
		ids[n] = m.With.ID
		*m.Detail = "the first job's payload is no longer stored, so what differs is not known"
		if m.With.State.Finished() {
			*m.Detail = "the first job is finished and was not kept, so only a fingerprint of its payload is left; with Kind.Keep this error says what differs, and Ops.Keys says until when the key is taken"
		}
	}
	err := in.Store.Send(ctx, db, pg.AsIs, read, []any{ids}, pg.Each(func(rows pgx.Rows) error {
		var n int64
		var payload *string
		var raw []byte
		if err := rows.Scan(&n, &payload, &raw); err != nil {
			return err
		}
		m := all[n-1]
		*m.Detail, *m.Differ = fingerprint.Difference(payload, m.Row.JSON, m.Row.Bytes, m.Fields)
		return nil
	}))
	if err != nil {
		return fmt.Errorf("onceq: reading the payload of a taken key: %w", err)
	}
	return nil
}

// Link is one row of job_members that is to be written.
type Link struct {
	Group, Job int64
	Fresh      bool        // the job was enqueued in this transaction, with the bit
	State      table.State // what the job's key says of it if there is no other trace of the job; 0 for nothing
	Result     string      // the same
}

// LinkTo makes a member of what an enqueue has answered.
func LinkTo(group int64, a Answer, member bool) Link {
	l := Link{Group: group, Job: a.ID, Fresh: member && !a.Duplicate}
	if a.State.Finished() {
		l.State, l.Result = a.State, string(a.Output)
	}
	return l
}

// Ref names a job that another one is to wait for: see onceq.JobRef.
type Ref struct {
	ID         int64
	Scope, Key string
}

// Found is what one row is to wait for: ids, or the places of earlier rows of the call.
type Found struct {
	links []Link // without group
	here  []int
}

// NotFound is a reference that no job fits: the place of the row, that of the reference, and that of the row
// that has the key, or -1. Last is the latest id that was drawn.
type NotFound struct {
	Job, Ref, At int
	Last         int64
}

// Find finds the jobs that the rows of a call are to wait for.
func (in *Intake) Find(ctx context.Context, db pg.DB, rows []Row, after [][]Ref) ([]Found, *NotFound, error) {
	own := make(map[Ref]int) // the rows by their keys
	var asked []NotFound
	var scopes, keys []string
	found := make([]Found, len(rows))
	for i := range rows {
		for k, ref := range after[i] {
			if ref.ID != 0 {
				found[i].links = append(found[i].links, Link{Job: ref.ID})
				continue
			}
			if at, ok := own[ref]; ok {
				found[i].here = append(found[i].here, at)
				continue
			}
			asked, scopes, keys = append(asked, NotFound{Job: i, Ref: k, At: -1}), append(scopes, ref.Scope), append(keys, ref.Key)
		}
		if r := &rows[i]; r.Key != "" {
			own[Ref{Scope: r.Header.Scope, Key: r.Key}] = i
		}
	}
	var none *NotFound
	var last int64
	err := in.Store.Send(ctx, db, pg.AsIs, stmt.ReadRefs, []any{scopes, keys}, pg.Each(func(read pgx.Rows) error {
		var n int64
		var id *int64
		var state *table.FenceState
		l := Link{}
		if err := read.Scan(&n, &id, &state, &l.Result, &last); err != nil || n == 0 || none != nil {
			return err
		}
		p := asked[n-1]
		if id == nil {
			if at, here := own[after[p.Job][p.Ref]]; here {
				p.At = at
			}
			none = &p
			return nil
		}
		if l.Job = *id; state.Job(nil).Finished() {
			l.State = state.Job(nil)
		}
		found[p.Job].links = append(found[p.Job].links, l)
		return nil
	}))
	if err != nil {
		return nil, nil, fmt.Errorf("onceq: reading the jobs that another one is to wait for: %w", in.Store.Told(err))
	}
	for i := range after {
		for k, ref := range after[i] {
			if none == nil && ref.ID > last {
				none = &NotFound{Job: i, Ref: k, Last: last}
			}
		}
	}
	return found, none, nil
}

// LinksOf gives what the rows wait for that were accepted.
func LinksOf(found []Found, answers []Answer) (links []Link) {
	for i, f := range found {
		if answers[i].Duplicate || answers[i].ID == 0 {
			continue
		}
		for _, l := range f.links {
			l.Group = answers[i].ID
			links = append(links, l)
		}
		for _, at := range f.here {
			links = append(links, LinkTo(answers[i].ID, answers[at], false))
		}
	}
	return links
}

// WriteLinks writes rows of job_members.
func (in *Intake) WriteLinks(ctx context.Context, db pg.DB, links []Link) error {
	if len(links) == 0 {
		return nil
	}
	n := len(links)
	groups, jobs, fresh, states, results := make([]int64, n), make([]int64, n), make([]bool, n), make([]int16, n), make([]string, n)
	for i, l := range links {
		groups[i], jobs[i], fresh[i], states[i], results[i] = l.Group, l.Job, l.Fresh, int16(l.State), l.Result
	}
	if err := in.Store.Send(ctx, db, pg.AsIs, stmt.InsertMembers, []any{groups, jobs, fresh, states, results}, pg.NoRows); err != nil {
		return fmt.Errorf("onceq: enqueue: what a job waits for: %w", in.Store.Told(err))
	}
	return nil
}
