package onceq

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// Replace says what a job changes in the job that has its key already, if nobody has started that one: see Job.Replace.
type Replace uint8

// What can be replaced. Both together: ReplacePayload | ReplaceTime.
const (
	ReplacePayload Replace = 1 << iota // the payload and the metadata, and with them what later jobs with the key are compared with
	ReplaceTime                        // when it is due: RunAt or Delay count from this call, and without them it is due now
)

func (j *Job) checkReplace() error {
	switch {
	case j.Replace > ReplacePayload|ReplaceTime:
		return invalid("Replace", "is %d; use ReplacePayload and ReplaceTime", j.Replace)
	case j.Key == "" && !j.keyed:
		return invalid("Replace", "is set without a Key, by which the other job is found")
	case j.Strict:
		return invalid("Replace", "and Strict are both set; use one")
	}
	return nil
}

// replaceIn changes jobs in a table that no claim has had, and the fingerprints of their fences; not those that somebody has
// asked to cancel, or, if only its time is to change, that have another payload by now than mark said. It waits for a claim that is under
// way, and leaves the job alone if that has taken it. suits says of a row that a may change it, and timed of m that the time changes. A job
// that is due and stays so keeps its place. It returns the ids of the jobs that it changed, and whether they are delayed.
func replaceIn(table, suits, timed, more string) string {
	return `
with asked as materialized (
  select * from unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::bytea[], $8::smallint[], $9::bigint[], $10::bigint[], $11::text[], $12::bytea[])
      as u(id, scope, key, payload, bytes, metadata, fingerprint, parts, at, delay, path, mark)
   order by id
),
free as materialized (
  select a.*, j.line,
         greatest(statement_timestamp() + a.delay::float8 * interval '1 microsecond', timestamptz 'epoch' + nullif(a.at, 0)::float8 * interval '1 microsecond') as due
    from asked a
   cross join lateral (
         select lane as line from onceq.` + table + `
          where id = a.id and scope = a.scope and key = a.key and claims = 0 and ` + suits + `
            and not ` + cancelAsked(table) + `
            for update) j
),
mine as materialized (
  select m.*
    from (select * from free order by scope, key offset 0) m
   cross join lateral (
         select from onceq.job_fences f
          where f.key = any (array[m.key]) and f.scope = m.scope and f.class + 0 = ` + sqlOfJob + ` and f.job_id = m.id
            and (m.parts & 1::smallint > 0 or f.fingerprint is not distinct from m.mark)
            for update) f
),
fence as (
  update onceq.job_fences f set fingerprint = m.fingerprint
    from (select * from mine where parts & 1::smallint > 0) m
   where f.key = any (array[m.key]) and f.scope = m.scope and f.class + 0 = ` + sqlOfJob + ` and f.job_id = m.id
),
changed as (
  update onceq.` + table + ` j
     set payload       = case when m.parts & 1::smallint > 0 then nullif(m.payload, '')::jsonb else j.payload end,
         payload_bytes = case when m.parts & 1::smallint = 0 then j.payload_bytes when m.payload = '' then m.bytes end,
         metadata      = case when m.parts & 1::smallint > 0 then nullif(m.metadata, '')::jsonb else j.metadata end,
         run_at        = case when not (` + timed + `) then j.run_at
                              when m.due > statement_timestamp() then m.due
                              else least(j.run_at, m.due) end,
         due_at        = case when not (` + timed + `) then j.due_at end
    from mine m
   where j.id = any (array[m.id])
  returning j.id, j.run_at, ` + timed + ` as timed, m.line
)` + more + `
select id, run_at > statement_timestamp() from changed`
}

// replaceJobs is for jobs that no lane or limit holds back any more. One that has such lines keeps its time, and its place in them.
var replaceJobs = replaceIn("jobs", `leased_until is null
            and case when a.path = '' then lane is null else lane = any (array[a.path, a.path || `+sqlSep+` || '`+slotMark+`']) and a.parts & 1::smallint > 0 end`,
	`m.parts & 2::smallint > 0 and m.path = ''`, "")

// replaceWaits is for jobs that wait for their lane or their limit. One that has its place in the lane and waits for its limit
// keeps its time. Whose time is another one has to be looked at then, and perhaps now.
var replaceWaits = replaceIn("job_waits", `coalesce(path, lane) = a.path and lane = any (pg_catalog.string_to_array(a.path, `+sqlSep+`))
            and (a.parts & 1::smallint > 0 or lane = `+firstLine("a.path")+`)`,
	`m.parts & 2::smallint > 0 and m.line = `+firstLine("m.path"), callsOfReplaced)

var callsOfReplaced = `,
call as (
  insert into onceq.lane_calls (slot, due, lane) select ` + laneSlot("line") + `, greatest(run_at, statement_timestamp()), line from changed where timed
)`

// notReplaced says why Replace did not change the job that r describes, if it is set.
func (j *Job) notReplaced(r Result) string {
	switch {
	case j.Replace == 0:
		return ""
	case r.State != StateWaiting && r.State != StateDelayed:
		return fmt.Sprintf("job %d is %s", r.ID, r.State)
	case j.Replace&ReplacePayload == 0:
		return "ReplacePayload is not set"
	}
	return fmt.Sprintf("job %d was started before, has another lane or limit, waits for others, or is being cancelled", r.ID)
}

// replaceable reports whether the job at place i may replace the one that r describes and whose fence has the fingerprint mark.
// Each is tried once: after that the answer is as for any other job.
func (s *settling) replaceable(i int, r Result, mark []byte) bool {
	replace, e := s.jobs[i].Replace, &s.all[i]
	_, tried := s.tried[i]
	return replace != 0 && !tried && (r.State == StateWaiting || r.State == StateDelayed) && sameKind(mark, e.fingerprint) &&
		(replace&ReplacePayload > 0 || samePayload(mark, e.fingerprint))
}

// replace changes the jobs that those at the given places may replace, of whose fences the fingerprints were read, and returns the
// places of those that did. What waits is looked at first: a job may become live between the two statements, and one that nobody
// has claimed does not go back.
func (s *settling) replace(ctx context.Context, db DB, places []int, read map[int][]byte) (done []int, err error) {
	slices.SortFunc(places, func(i, j int) int { return cmp.Compare(s.results[i].ID, s.results[j].ID) })
	if s.tried == nil {
		s.tried = make(map[int]Result)
	}
	var lined []int
	for _, i := range places {
		if s.tried[i] = s.results[i]; s.all[i].lane != "" {
			lined = append(lined, i)
		}
	}
	if done, err = s.sendReplace(ctx, db, replaceWaits, lined, read); err != nil {
		return nil, err
	}
	live, err := s.sendReplace(ctx, db, replaceJobs, slices.DeleteFunc(places, func(i int) bool { return slices.Contains(done, i) }), read)
	return append(done, live...), err
}

func (s *settling) sendReplace(ctx context.Context, db DB, statement string, places []int, read map[int][]byte) (done []int, err error) {
	n := len(places)
	if n == 0 {
		return nil, nil
	}
	ids, byID := make([]int64, n), make(map[int64]int, n)
	scopes, keys, payloads, metadata, paths := make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	bytes, marks, were := make([][]byte, n), make([][]byte, n), make([][]byte, n)
	parts, ats, delays := make([]int16, n), make([]int64, n), make([]int64, n)
	for k, i := range places {
		e := &s.all[i]
		ids[k], byID[s.results[i].ID] = s.results[i].ID, i
		scopes[k], keys[k], metadata[k], paths[k] = e.header.scope, e.key, e.header.metadata, e.lane
		payloads[k], bytes[k], marks[k], were[k] = e.json, e.bytes, e.fingerprint, read[i]
		parts[k], delays[k] = int16(s.jobs[i].Replace), e.header.delay.Microseconds()
		if !e.header.at.IsZero() {
			ats[k] = e.header.at.UnixMicro()
		}
	}
	args := []any{ids, scopes, keys, payloads, bytes, metadata, marks, parts, ats, delays, paths, were}
	err = s.q.sendBare(ctx, db, statement, args, each(func(rows pgx.Rows) error {
		var id int64
		var delayed bool
		if err := rows.Scan(&id, &delayed); err != nil {
			return err
		}
		i := byID[id]
		s.results[i] = accepted(id, delayed)
		s.results[i].Duplicate, s.results[i].Replaced = true, true
		done = append(done, i)
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("onceq: replacing a job: %w", err)
	}
	return done, nil
}
