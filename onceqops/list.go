package onceqops

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// Filter chooses jobs. A field with its zero value does not restrict.
type Filter struct {
	Queue  string
	Kind   string
	Scope  string // of jobs with a key
	States []onceq.State
	IDs    []int64
	Group  int64 // members of this group, see EnqueueGroup
	After  int64 // the last id of the previous page; only smaller ids are chosen, by Members larger ones
	Limit  int   // List: default 100, at most 1,000; other methods: default no limit

	// WithoutPayloads leaves Payload, Bytes, Metadata and Result of the jobs of List, Page and Doubts empty,
	// and does not read them: a job may have more than a megabyte of these. So it is with Result of Keys,
	// Effects and Members.
	WithoutPayloads bool

	// All says that a filter without Queue, Kind, Scope, IDs and Group is meant. Without it, such a filter is
	// an *InvalidError of CancelMany, RetryMany, RedriveMany, MoveMany, DiscardMany and ResolveMany, because
	// it is more often a mistake.
	All bool

	// KeepKeys is for CancelMany alone, and an *InvalidError elsewhere: the key of a job that no worker ever
	// had stays taken for its window too, so that an Enqueue of the key is a duplicate of the cancelled job.
	// Use it where a sender repeats what it has sent. By default such a key is free at once.
	KeepKeys bool

	// CreatedFrom and CreatedBefore choose by the time of the enqueueing, the second without the time itself.
	CreatedFrom, CreatedBefore time.Time

	// Progress, if not nil, is called by CancelMany, RetryMany, RedriveMany, MoveMany, DiscardMany and
	// ResolveMany after each of their statements, with how many jobs have been tried so far. If it returns an
	// error, no further statement is sent, and that error is returned. In a transaction of the caller's these
	// methods choose all jobs first, and two such transactions lock them in the same order.
	Progress func(tried int) error

	floor int64 // only ids that are not smaller are chosen; 0 for all
	few   bool  // the queue has few live jobs, which are read through jobs_claim
}

// states returns the filter's states, each once.
func (f *Filter) states() (live, past []int16) {
	for _, s := range slices.Compact(slices.Sorted(slices.Values(f.States))) {
		if s.Finished() {
			past = append(past, int16(s))
		} else {
			live = append(live, int16(s))
		}
	}
	if f.States == nil {
		live = []int16{int16(onceq.StateWaiting), int16(onceq.StateDelayed), int16(onceq.StateRunning), int16(onceq.StateRetrying)}
		past = []int16{int16(onceq.StateCompleted), int16(onceq.StateDead), int16(onceq.StateCancelled), int16(onceq.StateHeld)}
	}
	return live, past
}

// byDefault chooses these states if the filter names none.
func (f *Filter) byDefault(states ...onceq.State) {
	if f.States == nil {
		f.States = states
	}
}

// orNone is a Filter that need not be given.
func orNone(given []Filter) Filter { return append(slices.Clip(given), Filter{})[0] }

func (f *Filter) check() error {
	for _, s := range f.States {
		if s < onceq.StateWaiting || s > onceq.StateHeld {
			return invalid("Filter.States", "has %d, which is not a state", s)
		}
	}
	if f.KeepKeys {
		return invalid("Filter.KeepKeys", "is set, and only CancelMany frees keys")
	}
	var from, before error
	f.CreatedFrom, from = storedTime("Filter.CreatedFrom", f.CreatedFrom)
	f.CreatedBefore, before = storedTime("Filter.CreatedBefore", f.CreatedBefore)
	return cmp.Or(from, before, checkText("Filter.Queue", f.Queue), checkText("Filter.Kind", f.Kind), checkText("Filter.Scope", f.Scope))
}

// List returns a page of jobs, newest (greatest id) first, both live jobs and those in the history. For the
// next page set Filter.After to the last id of this one. In the history, indexes serve Queue and States. All
// other conditions are checked row by row: a page of jobs that are rare among many live jobs reads all live
// jobs. Page reads few rows at a time. Unless Filter.WithoutPayloads is set, a page of 1,000 jobs may be a
// gigabyte.
func (q *Ops) List(ctx context.Context, db onceq.DB, filter Filter) ([]onceq.JobInfo, error) {
	if err := filter.page(); err != nil {
		return nil, err
	}
	return filter.read(ctx, q, db, "list")
}

// read reads a page. what begins its error.
func (f *Filter) read(ctx context.Context, q *Ops, db onceq.DB, what string) ([]onceq.JobInfo, error) {
	statement, args := f.statement()
	return readAll(ctx, q, db, pg.Reading, what, statement, args, root.ScanJob)
}

func (f *Filter) page() error {
	if err := f.check(); err != nil {
		return err
	}
	return pageSize("Filter.Limit", &f.Limit, 100)
}

// Page is List for people who wait for an answer: however many jobs there are, it looks at some 5,000 of the
// live ones, of those that wait for their lane, limit or other jobs, and of those in the history, newest
// first. So a page may have fewer jobs than Filter.Limit, or none, and not be the last one. To go on, set
// Filter.After to next; it is 0 after the last page. The jobs of all pages are those of List, in its order.
// All live jobs of a queue that has fewer than 5,000 are looked at at once, and so are chosen IDs.
func (q *Ops) Page(ctx context.Context, db onceq.DB,
	filter Filter) (jobs []onceq.JobInfo, next int64, err error) {
	if err := filter.page(); err != nil {
		return nil, 0, err
	}
	if statement, args := filter.bound(); statement != "" {
		if err := q.store.Send(ctx, db, pg.Reading, statement, args, pg.Row(&filter.floor, &filter.few)); err != nil {
			return nil, 0, fmt.Errorf("onceq: page: %w", err)
		}
	}
	if jobs, err = filter.read(ctx, q, db, "page"); err != nil {
		return nil, 0, err
	}
	if len(jobs) == filter.Limit {
		return jobs, jobs[len(jobs)-1].ID, nil
	}
	return jobs, filter.floor, nil
}

// readMember chooses those of the jobs $1 whose payload, or with $3 whose metadata, contains one of $2.
const readMember = `
select i.id
  from pg_catalog.unnest($1::bigint[]) i (id)
 cross join lateral (
       select payload, metadata from onceq.jobs where id = i.id
        union all
       select payload, metadata from onceq.job_waits where id = i.id
        union all
       select payload, metadata from onceq.job_history where id = i.id) j
 where case when $3::boolean then j.metadata else j.payload end @> any ($2::text[]::jsonb[])`

// number is what is compared as a number, too.
var number = regexp.MustCompile(`^-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?$`)

// WithMember chooses those of up to 1,000 jobs whose payload, or metadata, has a member of a value, written
// as "payload.customer = 42" or "metadata.trace = abc". Dots lead into members. A number, true, false and null
// are looked for as text, too. The server reads the payloads; only ids come back. Page by page, with the ids
// of a Page WithoutPayloads, it is a search.
func (q *Ops) WithMember(ctx context.Context, db onceq.DB, ids []int64, member string) ([]int64, error) {
	if len(ids) > 1000 {
		return nil, invalid("ids", "has %d; at most 1,000", len(ids))
	}
	in, path, value, err := memberOf(member)
	if err != nil {
		return nil, err
	}
	values := []any{value}
	if number.MatchString(value) || value == "true" || value == "false" || value == "null" {
		values = append(values, json.RawMessage(value))
	}
	var documents []string
	for _, v := range values {
		for _, name := range slices.Backward(path) {
			v = map[string]any{name: v}
		}
		text, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		documents = append(documents, string(text))
	}
	args := []any{ids, documents, in == "metadata"}
	return readAll(ctx, q, db, pg.Reading, "member", readMember, args,
		func(id *int64, rows pgx.Rows) error { return rows.Scan(id) })
}

// memberOf reads what WithMember looks for: in which column, the names that lead there, and the value.
func memberOf(member string) (in string, path []string, value string, err error) {
	if err := checkText("member", member); err != nil {
		return "", nil, "", err
	}
	name, value, found := strings.Cut(member, "=")
	path = strings.Split(strings.TrimSpace(name), ".")
	if in, path = path[0], path[1:]; !found || in != "payload" && in != "metadata" || len(path) == 0 ||
		len(path) > 20 || slices.Contains(path, "") {
		return "", nil, "", invalid("member",
			"is %q; write it as payload.customer = 42, or metadata.trace = abc", member)
	}
	return in, path, strings.TrimSpace(value), nil
}

// pastRange is a range of job_history_state, from its end: the jobs of queue p.queue in state s.state. It
// names the columns in this odd way so that only that index serves it, in its order, and so that the scan
// ends where the state does. With plain equalities the planner may read the primary key, once for each queue
// and state, and with whole rows on both sides the scan goes on through all other states of the queue.
const (
	pastRange = `h.queue = any (array[p.queue]) and (h.state, h.id) < (s.state, $1::bigint) and h.state >= s.state`
	pastOrder = `
                order by h.queue desc, h.state desc, h.id desc`
)

// pastRows is how many rows a Page looks at of each such range.
const pastRows = `greatest(5000 / ((select count(*) from past) * pg_catalog.cardinality($3::smallint[])), 100)`

// rows reports whether the filter chooses by what is in no index, so that rows are looked at that it does not
// choose.
func (f *Filter) rows() bool {
	return f.Kind != "" || f.Scope != "" || !f.CreatedFrom.IsZero() || !f.CreatedBefore.IsZero()
}

// wide reports whether a Page looks at the history as it stands, by id, and not at ranges of it.
func (f *Filter) wide(past []int16) bool {
	return f.rows() && f.Queue == "" && f.IDs == nil && len(past) == 4
}

// bound builds the statement that finds Filter.floor and Filter.few: how far down a page goes, so that it
// looks at no more than pageRows rows of a table, or at no more than that of all the ranges of
// job_history_state together. It is empty if every row that a page looks at is chosen. Every statement takes
// all arguments.
func (f *Filter) bound() (string, []any) {
	if f.IDs != nil || f.Group != 0 {
		return "", nil
	}
	live, past := f.states()
	rows := f.rows()
	table := func(name string) string {
		return `(select id from onceq.` + name + ` where id < $1::bigint order by id desc offset $5::int - 1 limit 1)`
	}
	few, floors := `false`, []string{`0`}
	if len(live) > 0 && (rows || f.Queue != "" || len(live) < 4) {
		if f.Queue != "" {
			few = `(select count(*) < $5::int from (select from onceq.jobs where queue = $4::text limit $5::int) q)`
		}
		floors = append(floors, `case when not few.few then `+table("jobs")+` end`, table("job_waits"))
	}
	queues := ` past (queue) as (select $4::text collate "C"),`
	switch {
	case !rows || len(past) == 0:
	case f.wide(past):
		floors = append(floors, table("job_history"))
	default:
		if f.Queue == "" {
			queues = pastQueues
		}
		floors = append(floors, `
       (select pg_catalog.max(i.id)
          from past p cross join pg_catalog.unnest($3::smallint[]) s (state)
         cross join lateral (
               select h.id from onceq.job_history h
                where `+pastRange+pastOrder+` offset `+pastRows+` - 1 limit 1) i
         where p.queue is not null)`)
	}
	if len(floors) == 1 {
		return "", nil
	}
	return `
with recursive` + queues + `
given as (select $1::bigint, $2::int, $3::smallint[], $4::text, $5::int),
few as materialized (select ` + few + ` as few)
select greatest(` + strings.Join(floors, `,
       `) + `), few.few
  from few`, []any{cmp.Or(f.After, math.MaxInt64), f.Limit, nonNil(past), f.Queue, pageRows}
}

// Count returns how many jobs the filter chooses, in the same states as List by default. It stops counting at
// Filter.Limit. It reads the row of every job that it counts.
func (q *Ops) Count(ctx context.Context, db onceq.DB, filter Filter) (n int, err error) {
	if err := filter.check(); err != nil {
		return 0, err
	}
	if filter.Limit < 0 {
		return 0, invalid("Filter.Limit", "is negative")
	}
	filter.Limit, filter.WithoutPayloads = cmp.Or(filter.Limit, math.MaxInt32), true
	statement, args := filter.statement()
	if err := q.store.Send(ctx, db, pg.Reading, `select count(*) from (`+statement+`) page`, args, pg.Row(&n)); err != nil {
		return 0, fmt.Errorf("onceq: count: %w", err)
	}
	return n, nil
}

// statement builds the statement for a page. It compares and orders whole rows of an index of the history:
// with "queue = … and state = …" and an order by id, the planner reads the primary key where it believes that
// nearly every row has that state, and reads all of it if none has. It reads the history queue by queue and
// state by state, each of which is a range of one index with a limit. Conditions that do not restrict are
// left out, so that a plan that is made once for all values stays good. Every statement takes all arguments.
func (f *Filter) statement() (string, []any) {
	if f.Group != 0 {
		return f.ofGroup()
	}
	live, past := f.states()
	liveJob, waitingJob, pastJob := table.JobColumns(`$12::bool`)
	where := func(alias, id string) string {
		if f.floor > 0 {
			return id + ` < $1::bigint and ` + id + ` >= $11::bigint` + f.others(alias)
		}
		return id + ` < $1::bigint` + f.others(alias)
	}
	liveID, liveQueue, waitQueue, queues := "j.id", "", "", pastQueues
	if f.Queue != "" {
		queues = ` past (queue) as (select $4::text collate "C"),`
		liveQueue, waitQueue = ` and j.queue = $4::text`, ` and w.queue = $4::text`
		switch {
		case f.few: // through jobs_claim
			liveID = "j.id + 0"
		case f.floor > 0: // through the primary key
			liveQueue = ` and j.queue || '' = $4::text`
		}
	}
	states, waitStates := "", ""
	if len(live) < 4 {
		states, waitStates = ` and `+table.JobState+` = any ($7::smallint[])`, ` and `+table.WaitState+` = any ($7::smallint[])`
	}
	return `
with recursive` + queues + givenFilter + `,
live as (
  select ` + liveJob + ` from onceq.jobs j
   where pg_catalog.cardinality($7::smallint[]) > 0 and ` + where("j", liveID) + liveQueue + states + `
   order by ` + liveID + ` desc limit $2::int
),
waiting as (
  select ` + waitingJob + ` from onceq.job_waits w
   where pg_catalog.cardinality($7::smallint[]) > 0 and ` + where("w", "w.id") + waitQueue + waitStates + `
   order by w.id desc limit $2::int
),
` + f.finished(pastJob, where("h", "h.id"), past) + `
)
select * from (select * from live union all select * from waiting union all select * from finished) a
 order by id desc limit $2::int`, f.args(live, past, f.floor)
}

// givenFilter names all arguments of such a statement, or those that it does not use would have no type.
const givenFilter = `
given as (select $1::bigint, $2::int, $3::smallint[], $4::text, $5::text, $6::text, $7::smallint[], $8::bigint[],
                 $9::timestamptz, $10::timestamptz, $11::bigint, $12::bool)`

func (f *Filter) args(live, past []int16, bound int64) []any {
	return []any{cmp.Or(f.After, math.MaxInt64), f.Limit, nonNil(past), f.Queue, f.Kind, f.Scope, nonNil(live), f.IDs,
		f.CreatedFrom, f.CreatedBefore, bound, !f.WithoutPayloads}
}

// ofGroup is statement for the members of a group. It goes through these, and no further than the page.
func (f *Filter) ofGroup() (string, []any) {
	live, past := f.states()
	liveJob, waitingJob, pastJob := table.JobColumns(`$12::bool`)
	where := func(alias, state, states string) string {
		queue := ""
		if f.Queue != "" {
			queue = ` and ` + alias + `.queue = $4::text`
		}
		return `
           where pg_catalog.cardinality(` + states + `::smallint[]) > 0 and ` + alias + `.id = any (array[m.job_id])` + f.others(alias) + queue + `
             and ` + state + ` = any (` + states + `::smallint[])`
	}
	return `
with` + givenFilter + `
select a.*
  from onceq.job_members m
 cross join lateral (
          select ` + liveJob + ` from onceq.jobs j` + where("j", table.JobState, "$7") + `
          union all
          select ` + waitingJob + ` from onceq.job_waits w` + where("w", table.WaitState, "$7") + `
          union all
          select ` + pastJob + ` from onceq.job_history h` + where("h", "h.state", "$3") + `
          offset 0) a
 where m.group_id = $11::bigint and m.job_id < $1::bigint
 order by m.job_id desc
 limit $2::int`, f.args(live, past, f.Group)
}

// others are the filter's conditions besides the group, queue and states.
func (f *Filter) others(alias string) string {
	var s strings.Builder
	if f.Kind != "" {
		s.WriteString(" and " + alias + ".kind = $5::text")
	}
	if f.Scope != "" {
		s.WriteString(" and " + alias + ".scope = $6::text")
	}
	if f.IDs != nil {
		s.WriteString(" and " + alias + ".id = any ($8::bigint[])")
	}
	if !f.CreatedFrom.IsZero() {
		s.WriteString(" and " + alias + ".created_at >= $9::timestamptz")
	}
	if !f.CreatedBefore.IsZero() {
		s.WriteString(" and " + alias + ".created_at < $10::timestamptz")
	}
	return s.String()
}

// finished builds the part of the statement that reads the history: by id, or range by range.
func (f *Filter) finished(pastJob, where string, past []int16) string {
	if f.IDs != nil || f.floor > 0 && f.wide(past) {
		if f.Queue != "" {
			where += ` and h.queue = $4::text`
		}
		return `finished as (
  select ` + pastJob + ` from onceq.job_history h
   where h.state = any ($3::smallint[]) and ` + where + `
   order by h.id desc limit $2::int`
	}
	// No plain condition on the id, which would let the planner read the primary key.
	rows := `onceq.job_history h
         where ` + pastRange + f.others("h")
	if f.floor > 0 {
		most := `$2::int` // all of them are chosen
		if f.rows() {
			most = `2 * ` + pastRows // bound has found half of these; jobs finish meanwhile
		}
		rows = `(
               select * from onceq.job_history h
                where ` + pastRange + pastOrder + ` limit ` + most + `) h
         where h.id >= $11::bigint` + f.others("h")
	}
	return `finished as (
  select i.*
    from past p cross join pg_catalog.unnest($3::smallint[]) s (state)
   cross join lateral (
         select ` + pastJob + ` from ` + rows + pastOrder + ` limit $2::int) i
   where p.queue is not null`
}

func nonNil(s []int16) []int16 {
	if s = slices.Compact(slices.Sorted(slices.Values(s))); s == nil {
		s = []int16{}
	}
	return s
}

const pastQueues = `
past (queue) as (
  (select queue from onceq.job_history where queue >= '' order by queue limit 1)
  union all
  select (select h.queue from onceq.job_history h where h.queue > p.queue order by h.queue limit 1)
    from past p where p.queue is not null
),`
