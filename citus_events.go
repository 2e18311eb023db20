package onceq

import (
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// Emit and Await in parts. The function emit, and the statement with which a job begins to wait, write one table after the other
// in the same order: first the event's fence, where the two meet, then the rows of job_awaits. A part sees what was committed before it, as
// each statement of the function does, so who comes second finds what the first one has written.

// emitApart writes the event, unless it was emitted before: then it returns nothing.
const emitApart = `
insert into onceq.job_fences as f (token, created_at, finished_at, lifetime, class, state, scope, key, result)
select 0, $5::timestamptz, $5::timestamptz, $4::bigint, ` + sqlOfEvent + `, ` + sqlCompleted + `, $1::text, $2::text, $3::text::jsonb from onceq.meta
on conflict (key, scope, class) do update
   set state = ` + sqlCompleted + `, created_at = excluded.created_at, finished_at = excluded.finished_at, lifetime = excluded.lifetime, result = excluded.result
 where f.state <> ` + sqlCompleted + ` or pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= excluded.finished_at
returning 1`

// cameApart gives the event to those who wait for it, and returns the jobs that were given back until then, each with its claims.
const cameApart = `
with came as (
  update onceq.job_awaits a set state = ` + sqlCame + `, payload = $3::text::jsonb
   where a.key = $2::text and a.scope = $1::text and a.state = ` + sqlOpen + ` and a.scope <> ''
  returning a.job_id, a.claims
)
select pg_catalog.array_agg(job_id order by job_id), pg_catalog.array_agg(claims order by job_id) from came where claims > 0`

// dueApart makes those of the jobs run that nobody has claimed since. asideApart is the same for those that wait for their lane again.
const (
	dueApart = `
with due as materialized (
  select j.id from unnest($1::bigint[], $2::int[]) as u(id, claims) cross join lateral (
         select id from onceq.jobs
          where id = u.id and claims = u.claims and leased_until is null and run_at > $3::timestamptz
            and (lane is null or pg_catalog.right(lane, 2) <> ` + sqlSep + ` || '` + slotMark + `')
            for update) j
)
update onceq.jobs j set run_at = $3::timestamptz from due where j.id = any (array[due.id])`

	asideApart = `
with aside as materialized (
  select w.id from unnest($1::bigint[], $2::int[]) as u(id, claims) cross join lateral (
         select id from onceq.job_waits
          where id = u.id and claims = u.claims and run_at > $3::timestamptz
            for update) w
),
back as (
  update onceq.job_waits w set run_at = $3::timestamptz from aside where w.id = any (array[aside.id])
  returning w.lane
)
select pg_catalog.array_agg(distinct lane) from back`
)

func emitInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	const answer = `select $1::bool`
	if _, err := p.draw(0); err != nil {
		return err
	}
	first := false
	err := p.send(emitApart, append(slices.Clone(args[:4]), p.now), each(func(pgx.Rows) error { first = true; return nil }))
	if err != nil {
		return err
	}
	if !first {
		return p.send(answer, []any{false}, read)
	}
	var ids []int64
	var claims []int32
	if err := p.send(cameApart, args[:3], row(&ids, &claims)); err != nil {
		return err
	}
	if len(ids) > 0 {
		if _, err := p.draw(0); err != nil { // it may have waited for the event
			return err
		}
		if err := p.send(dueApart, []any{ids, claims, p.now}, noRows); err != nil {
			return err
		}
		var lines []string
		if err := p.send(asideApart, []any{ids, claims, p.now}, row(&lines)); err != nil {
			return err
		}
		if err := p.call(p.now, lines...); err != nil {
			return err
		}
	}
	return p.send(answer, []any{true}, read)
}

// meetApart writes the fence of an event that a job begins to wait for, if its lease holds, and returns whether the event was emitted.
// awaitApart writes the row of the wait.
const (
	isHeld = `exists (select from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint)`

	notFree = `f.state = ` + sqlCompleted + ` and not (f.lifetime = 0 and f.finished_at is not null
                or pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= excluded.created_at)`

	meetApart = `
insert into onceq.job_fences as f (token, created_at, finished_at, lifetime, class, state, scope, key)
select 0, $6::timestamptz, $7::timestamptz, 0, ` + sqlOfEvent + `, ` + sqlCancelled + `, $4::text, $5::text
  from onceq.meta where ` + isHeld + `
on conflict (key, scope, class) do update
   set state       = case when ` + notFree + ` then f.state else ` + sqlCancelled + ` end,
       lifetime    = case when ` + notFree + ` then f.lifetime else 0 end,
       finished_at = case when ` + notFree + ` then f.finished_at else greatest(f.finished_at, excluded.finished_at) end
returning f.state = ` + sqlCompleted + `, coalesce(f.result::text, '')`

	awaitApart = `
insert into onceq.job_awaits as a (job_id, identity, created_at, until, state, scope, key, payload)
select $1::bigint, $6::bigint, $7::timestamptz, $8::timestamptz, $9::smallint, $4::text, $5::text, nullif($10::text, '')::jsonb
  from onceq.meta where ` + isHeld + `
on conflict (job_id, scope, key) do update
   set identity = excluded.identity, created_at = excluded.created_at, until = excluded.until, claims = 0,
       state = excluded.state, payload = excluded.payload
 where a.identity <> excluded.identity
returning state, coalesce(payload::text, '')`
)

func beginAwaitInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	id, scope, key, identity, claims, holder := args[0], args[1].(string), args[2], args[3], args[4], args[5]
	d := time.Duration(args[6].(int64)) * time.Microsecond
	if _, err := p.draw(0); err != nil {
		return err
	}
	lease := []any{id, claims, holder, scope, key}
	begins, state, payload := awaitOpen, (*awaitState)(nil), ""
	met := scope == "" // a sleep has no fence
	if !met {
		err := p.send(meetApart, append(slices.Clone(lease), p.now, p.now.Add(min(d, EventWindow))), each(func(rows pgx.Rows) error {
			came := false
			err := rows.Scan(&came, &payload)
			if met = true; came {
				begins = awaitCame
			} else {
				payload = ""
			}
			return err
		}))
		if err != nil {
			return err
		}
	}
	holds := met
	if met {
		var began awaitState
		more := []any{identity, p.now, p.now.Add(d), int16(begins), payload}
		payload = ""
		err := p.send(awaitApart, append(slices.Clone(lease), more...), each(func(rows pgx.Rows) error {
			state = &began
			return rows.Scan(&began, &payload)
		}))
		if err == nil && state == nil { // there is a row already, or the lease is lost
			err = p.send(`select `+isHeld, lease[:3], row(&holds))
		}
		if err != nil {
			return err
		}
	}
	const answer = `select $1::bool, $2::smallint, $3::text`
	return p.send(answer, []any{holds, state, payload}, read)
}
