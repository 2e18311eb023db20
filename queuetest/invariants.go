package queuetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
)

// sources are what the rules read, beside the tables.
const sources = `
with j as (
  select j.*, f.state as fence_state, f.job_id as fence_job, h.state as past_state
    from onceq.jobs j
    left join onceq.job_fences f on f.class = 0 and f.scope = j.scope and f.key = j.key
    left join onceq.job_history h on h.id = j.id
),
w as (
  select w.*, f.state as fence_state, f.job_id as fence_job, h.state as past_state, j.id as live
    from onceq.job_waits w
    left join onceq.job_fences f on f.class = 0 and f.scope = w.scope and f.key = w.key
    left join onceq.job_history h on h.id = w.id
    left join onceq.jobs j on j.id = w.id
),
h as (
  select * from onceq.job_history
),
f as (
  select f.*, f.class || '/' || f.scope || '/' || f.key as name, coalesce(j.id, w.id) as live, coalesce(j.scope, w.scope) as live_scope, coalesce(j.key, w.key) as live_key,
         h.state as past
    from onceq.job_fences f
    left join onceq.jobs j on j.id = f.job_id
    left join onceq.job_waits w on w.id = f.job_id
    left join onceq.job_history h on h.id = f.job_id
),
place as (
  select l.lane, j.id, 'j' as room, case when starts_with(l.lane, '/') then onceq.weight(j.lane) else 1 end as weight from onceq.jobs j cross join unnest(string_to_array(j.lane, E'\x1f')) l (lane) where l.lane like '%/%'
  union all
  select split_part(w.path, E'\x1f', 1), w.id, 'w', 1 from onceq.job_waits w where starts_with(w.lane, '/') and not starts_with(w.path, E'\x1f')
),
lane as (
  select l.lane, l.live, l.jobs, l.waiting, l.next, coalesce(o.n, a.n, 1) as n, coalesce(o.lowered, false) or coalesce(a.lowered, false) as lowered
    from (select lane, coalesce(sum(weight) filter (where live), 0) as live, count(*) filter (where live) as jobs, count(*) filter (where not live) as waiting,
                 (array_agg(weight order by priority, run_at, id) filter (where not live))[1] as next
            from (select lane, true as live, weight, null::smallint as priority, null::timestamptz as run_at, id from place
                  union all select lane, false, case when starts_with(lane, '/') then onceq.weight(path) else 1 end, priority, run_at, id from onceq.job_waits where run_at <= statement_timestamp() and not starts_with(lane, E'\x1f')) x
           group by lane) l
    left join onceq.lane_limits o on o.lane = l.lane
    left join onceq.lane_limits a on a.lane = left(l.lane, strpos(substr(l.lane, 2), '/') + 1)
),
a as (
  select a.*, coalesce(j.run_at, w.run_at) as due, coalesce(j.claims, w.claims) = a.claims and j.leased_until is null as waits,
         a.identity = coalesce(j.identity, w.identity, (extract(epoch from coalesce(j.created_at, w.created_at)) * 1000000)::bigint) as round
    from onceq.job_awaits a
    left join onceq.jobs j on j.id = a.job_id
    left join onceq.job_waits w on w.id = a.job_id
),
last as (
  select last_value as id, is_called from onceq.ids
)
`

// rules describe what is wrong with the tables: each select gives one row for each broken rule in each row of the tables that it is about.
// Those about empty tables are left out of the statement: to plan them all takes longer than most tests. The numbers of states and
// classes are those of the migration.
var rules = []struct{ about, selects string }{
	{"jobs", `
          select format('job %s is in jobs and, with state %s, in job_history', id, past_state) from j where past_state is not null
union all select format('job %s has a lease and no holder, or a holder and no lease', id) from j where (leased_until is null) <> (holder is null)
union all select format('job %s is leased but was never claimed', id) from j where leased_until is not null and claims < 1
union all select format('job %s has %s claims, more than a token counts', id, claims) from j where claims not between 0 and 1048575
union all select format('job %s failed %s times, of at most %s, and is not dead', id, attempts, max_attempts) from j where attempts >= max_attempts
union all select format('job %s lost %s leases in %s claims', id, lost, claims) from j where lost not between 0 and claims
union all select format('job %s has priority %s', id, priority) from j where priority not between -1 and 1
union all select format('job %s has a payload and bytes, or neither', id) from j where num_nonnulls(payload, payload_bytes) <> 1
union all select format('job %s has a scope and no key, or a key and no scope', id) from j where (scope is null) <> (key is null)
union all select format('job %s is above %s, the last id of the sequence', j.id, l.id) from j, last l where j.id > l.id or not l.is_called
union all select format('job %s has key %s in scope %s, which has no fence', id, key, scope) from j where key is not null and fence_state is null and claims = 0
union all select format('job %s has key %s in scope %s, whose fence names job %s', id, key, scope, fence_job) from j where fence_state is not null and fence_job is distinct from id and (claims = 0 or fence_job < id)
union all select format('job %s is live, the fence of its key %s in scope %s has state %s', id, key, scope, fence_state) from j where fence_job = id and fence_state <> 0`},
	{"job_waits", `
          select format('job %s waits for its lane and is in jobs', id) from w where live is not null
union all select format('job %s waits for its lane and is, with state %s, in job_history', id, past_state) from w where past_state is not null
union all select format('job %s waits for its lane with %s claims, %s lost leases, %s of %s attempts', id, claims, lost, attempts, max_attempts) from w where claims not between 0 and 1048575 or lost not between 0 and claims or attempts >= max_attempts
union all select format('job %s waits for its lane and has a payload and bytes, or neither', id) from w where num_nonnulls(payload, payload_bytes) <> 1
union all select format('job %s waits for its lane, its key %s in scope %s is not its own', id, key, scope) from w where key is not null and (fence_job is distinct from id or fence_state <> 0)
union all select format('job %s is above %s, the last id of the sequence', w.id, l.id) from w, last l where w.id > l.id or not l.is_called
union all select format('job %s waits in line %s, its path is %s', id, lane, path) from w
           where not starts_with(lane, E'\x1f') and case when path is null then starts_with(lane, '/') else lane not in (split_part(path, E'\x1f', 1), split_part(path, E'\x1f', 2)) or path not like E'%\x1f/%' or path like E'%\x1f@' end
union all select format('job %s waits for others in line %s', id, lane) from w
           where starts_with(lane, E'\x1f') and (lane <> E'\x1f' || lpad(id::text, 19, '0') or if_dead is null or path is null or path like E'%\x1f@') or not starts_with(lane, E'\x1f') and if_dead is not null
union all select format('job %s waits for others, which are done, and nobody was called', id) from w
           where starts_with(lane, E'\x1f')
             and not exists (select from onceq.job_members m where m.group_id = w.id and (m.state in (0, 8) or m.state = 6 and w.if_dead = 0))
             and not exists (select from onceq.lane_calls c where c.lane = w.lane
                                or c.slot = -1 and starts_with(c.lane, E'\x1f') and w.lane > substr(c.lane, 2))`},
	{"jobs job_waits", `
          select format('job %s has rule %s and lane %s', id, lane_rule, lane) from (select id, lane, lane_rule from onceq.jobs union all select id, lane, lane_rule from w) x where (lane is null) <> (coalesce(lane_rule, 4) = 4 and lane is null) or lane_rule not between 0 and 7
union all select format('lane %s has %s live jobs that weigh %s, its limit is %s', lane, jobs, live, n) from lane where live > n and jobs > least(n, 1) and not lowered
union all select format('lane %s has live jobs that weigh %s and %s that wait, its limit is %s, and nobody was called', lane, live, waiting, n) from lane
           where waiting > 0 and n > 0 and (live = 0 or live + next <= n)
             and not exists (select from onceq.lane_calls c where c.lane = any (array[lane.lane, left(lane.lane, strpos(substr(lane.lane, 2), '/') + 1)]))
             and not exists (select from onceq.pauses p where p.what = 'limit' and '/' || p.name = lane.lane)
             and not exists (select from onceq.lane_calls c where c.slot = -1 and strpos(c.lane, E'\x1f') > 0 and lane.lane > substr(c.lane, strpos(c.lane, E'\x1f') + 1)
                                and split_part(c.lane, E'\x1f', 1) = any (array['', left(lane.lane, strpos(substr(lane.lane, 2), '/') + 1)]))
             and not exists (select from h where split_part(h.lane, E'\x1f', 1) = lane.lane and h.lane_rule & 2 = 2 and h.state in (6, 8))
union all select format('job %s has room in line %s and no place there', id, lane) from place j where not exists (select from onceq.lane_places p where (p.lane, p.id) = (j.lane, j.id))`},
	{"lane_places", `
          select format('job %s has a place in line %s and no room there', id, lane) from onceq.lane_places p where not exists (select from place j where (j.lane, j.id) = (p.lane, p.id))`},
	{"job_members", `
          select format('job %s, a member of group %s, has state %s', job_id, group_id, state) from onceq.job_members where state <> all ('{0,5,6,7,8}')
union all select format('job %s, a member of group %s, is unfinished and cannot be told', m.job_id, m.group_id) from onceq.job_members m
           where m.told and m.state = 0
             and not exists (select from onceq.jobs j where j.id = m.job_id and j.lane_rule & 4 = 4)
             and not exists (select from w where w.id = m.job_id and w.lane_rule & 4 = 4)
union all select format('job %s, a member of group %s, is %s and has state %s', m.job_id, m.group_id, h.state, m.state) from onceq.job_members m join h on h.id = m.job_id
           where m.told and m.state <> h.state`},
	{"lane_limits", `
          select format('limit %s was removed, and its row stays', lane) from onceq.lane_limits where n is null and not lowered`},
	{"job_history", `
          select format('job %s stops lane %s, which does not know it', id, lane) from h where lane is not null and lane_rule & 2 = 2 and state in (6, 8) and split_part(lane, E'\x1f', 1) <> '' and not exists (select from onceq.lane_stops s where (s.lane, s.id) = (split_part(h.lane, E'\x1f', 1), h.id))
union all select format('history of job %s has state %s, which is not finished', id, state) from h where state not between 5 and 8
union all select format('history of job %s, whose state is %s, has rule %s for dead jobs', id, state, if_dead) from h where if_dead not between 0 and 3 or if_dead is not null and state <> 7
union all select format('history of job %s, dead or held, ends by itself', id) from h where state in (6, 8) and keep_until is not null
union all select format('history of job %s has a payload and bytes, or neither', id) from h where num_nonnulls(payload, payload_bytes) <> 1
union all select format('history of job %s has a scope and no key, or a key and no scope', id) from h where (scope is null) <> (key is null)
union all select format('history of job %s is above %s, the last id of the sequence', h.id, l.id) from h, last l where h.id > l.id or not l.is_called`},
	{"lane_stops", `
          select format('lane %s is stopped by job %s, which does not stop it', lane, id) from onceq.lane_stops s where not starts_with(s.lane, '/') and not exists (select from h where (split_part(h.lane, E'\x1f', 1), h.id) = (s.lane, s.id) and h.lane_rule & 2 = 2 and h.state in (6, 8))`},
	{"job_fences", `
          select format('fence %s has class %s', name, class) from f where class not between 0 and 4
union all select format('fence %s has state %s, which its class does not know', name, state) from f where case class when 0 then state not in (0, 3, 4, 5, 6) when 4 then state not in (3, 5) else state not in (1, 2, 3, 5, 6) end
union all select format('fence %s has lifetime %s', name, lifetime) from f where lifetime < -1
union all select format('fence %s has no job', name) from f where class in (0, 3) and job_id is null
union all select format('fence %s has job %s, which nothing outside of jobs has', name, job_id) from f where class in (1, 2, 4) and job_id is not null
union all select format('fence %s has token %s, below its job %s', name, token, job_id) from f where token >> 20 < job_id
union all select format('fence %s is queued, its job %s is not live', name, job_id) from f where class = 0 and state = 0 and live is null
union all select format('fence %s is queued for job %s, which has another key', name, job_id) from f where class = 0 and state = 0 and live is not null and (live_scope, live_key) is distinct from (scope, key)
union all select format('fence %s is dead or held, job %s is not so in job_history', name, job_id) from f where class = 0 and (state = 4 and past is distinct from 6 or state = 6 and past is distinct from 8)
union all select format('fence %s is finished and says not when', name) from f where finished_at is null and (state in (4, 5) or state = 3 and class <> 3)
union all select format('fence %s is not finished and says when', name) from f where finished_at is not null and state in (0, 1, 2, 6) and (class <> 3 or live is not null)
union all select format('fence %s has begun its window, its job %s is live', name, job_id) from f where class = 3 and state = 3 and finished_at is not null and live is not null
union all select format('fence %s is claimed without a holder, or without an end', name) from f where state = 1 and (holder is null or leased_until is null)
union all select format('fence %s is uncertain or held and says not why', name) from f where class <> 0 and state in (2, 6) and detail is null
union all select format('fence %s is an effect of job %s, which its key does not say', name, job_id) from f where class = 3 and not starts_with(key, job_id || '/')`},
	{"job_awaits", `
          select format('what job %s waits for has state %s', job_id, state) from a where state not between 0 and 2 or scope = '' and state <> 0
union all select format('job %s sleeps, with a payload', job_id) from a where scope = '' and payload is not null
union all select format('job %s waits for event %s/%s, which was emitted', job_id, scope, key) from a where scope <> '' and state = 0 and round
             and exists (select from onceq.job_fences e where e.class = 4 and e.state = 3 and e.scope = a.scope and e.key = a.key and e.finished_at >= a.created_at)
union all select format('job %s was given back until event %s/%s, which came, and is due only at %s', job_id, scope, key, due) from a where state = 1 and waits and due > statement_timestamp() + interval '2 seconds'`},
}

// Invariants checks in one snapshot everything that must always be true of a schema's tables. It returns an error that
// names up to 20 violations, or nil. It reads all rows, so it is meant for tests.
func Invariants(ctx context.Context, conn onceq.DB, schema string) error {
	// With the statistics of tables that have just been filled, the planner would compare each row with each other row;
	// hash joins do not. The other joins then look expensive enough for JIT compilation, which is not worth it.
	if b, ok := conn.(interface {
		Begin(context.Context) (pgx.Tx, error)
	}); ok {
		tx, err := b.Begin(ctx)
		if err != nil {
			return fmt.Errorf("queuetest: checking invariants: %w", err)
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if _, err := tx.Exec(ctx, "set local enable_nestloop = off; set local jit = off"); err != nil {
			return fmt.Errorf("queuetest: checking invariants: %w", err)
		}
		conn = tx
	}
	statement, err := violations(ctx, conn, schema)
	if err != nil {
		return fmt.Errorf("queuetest: checking invariants: %w", err)
	}
	if statement == "" {
		return nil
	}
	citus, err := one[bool](ctx, conn, "select current_setting('citus.version', true) is not null")
	if err != nil {
		return fmt.Errorf("queuetest: checking invariants: %w", err)
	}
	if citus { // no query of the tables can read the sequence there
		last, err := lastID(ctx, conn, schema)
		if err != nil {
			return fmt.Errorf("queuetest: checking invariants: %w", err)
		}
		statement = strings.Replace(statement, "select last_value as id, is_called from onceq.ids", fmt.Sprintf("select %d::bigint as id, true as is_called", last), 1)
	}
	statement = inSchema(statement, schema)
	rows, err := conn.Query(ctx, statement)
	if err != nil {
		return fmt.Errorf("queuetest: checking invariants: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("queuetest: checking invariants: %w", err)
	}
	if len(found) > 0 {
		return errors.New("queuetest: the tables break these rules:\n\t" + strings.Join(found, "\n\t"))
	}
	return nil
}

// rowsGone says that rows are missing that the migrations insert and nothing deletes, and namesGone which.
const (
	rowsGone = `(select count(*) from onceq.lane_locks) <> 16 or (select count(*) from onceq.meta) <> 1
 or not exists (select from onceq.lane_calls where slot = -1 and lane = '')`

	namesGone = `
          select format('lane_locks has %s rows, and not 16', count(*)) from onceq.lane_locks having count(*) <> 16
union all select format('meta has %s rows, and not one', count(*)) from onceq.meta having count(*) <> 1
union all select 'lane_calls has no row without a lane' where not exists (select from onceq.lane_calls where slot = -1 and lane = '')`
)

// violations puts together the statement that looks at everything but the tables that are empty now. It is "" if all are.
func violations(ctx context.Context, conn onceq.DB, schema string) (string, error) {
	filled := make(map[string]bool)
	for _, r := range rules {
		for table := range strings.FieldsSeq(r.about) {
			filled[table] = false
		}
	}
	names := slices.Sorted(maps.Keys(filled))
	look := make([]string, len(names))
	for i, table := range names {
		look[i] = "exists (select from onceq." + table + ")"
	}
	look = append(look, rowsGone)
	has, err := one[[]bool](ctx, conn, inSchema("select array["+strings.Join(look, ", ")+"]", schema))
	if err != nil {
		return "", err
	}
	for i, table := range names {
		filled[table] = has[i]
	}
	var selects []string
	for _, r := range rules {
		if slices.ContainsFunc(strings.Fields(r.about), func(table string) bool { return filled[table] }) {
			selects = append(selects, r.selects)
		}
	}
	if has[len(names)] {
		selects = append(selects, namesGone)
	}
	if selects == nil {
		return "", nil
	}
	return sources + strings.Join(selects, "\nunion all") + "\n limit 20", nil
}

// inSchema puts a schema's name into a statement about onceq.
func inSchema(statement, schema string) string {
	return strings.ReplaceAll(statement, "onceq.", pgx.Identifier{schema}.Sanitize()+".")
}

// lastID returns the last id of the sequence, or if no job is above that, the largest id that there can be: jobs may come between two
// statements. The sequence is read after the tables.
func lastID(ctx context.Context, conn onceq.DB, schema string) (last int64, err error) {
	used, err := one[int64](ctx, conn, inSchema("select greatest((select max(id) from onceq.jobs), (select max(id) from onceq.job_waits), (select max(id) from onceq.job_history), 0)", schema))
	if err != nil {
		return 0, err
	}
	last, err = one[int64](ctx, conn, inSchema("select case when is_called then last_value else 0 end from onceq.ids", schema))
	if err == nil && used <= last {
		last = math.MaxInt64
	}
	return last, err
}

// one returns the one value that a query gives.
func one[T any](ctx context.Context, conn onceq.DB, sql string) (v T, err error) {
	rows, err := conn.Query(ctx, sql)
	if err != nil {
		return v, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
}

// Check checks everything that must always be true of the tables: see Invariants.
func (db *DB) Check() error { return Invariants(context.Background(), db.Pool, db.Schema) }
