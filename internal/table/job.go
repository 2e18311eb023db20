package table

import (
	"strings"
)

// JobState gives the State of a live job j, and null if there is none.
const JobState = `case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint`

// WaitState gives the State of a job w that waits for its lane.
const WaitState = `case when w.attempts > 0 or w.lost > 0 then 4 when w.run_at > statement_timestamp() then 2 else 1 end::smallint`

// JobColumns are what is read of a job j of jobs, w of job_waits and h of job_history. The content is read if a parameter says so: it is
// in pages of its own (TOAST), and may be a megabyte of each job.
func JobColumns(content string) (live, waiting, past string) {
	read := func(columns ...string) string {
		return `case when ` + content + ` then ` + strings.Join(columns, ` end, case when `+content+` then `) + ` end`
	}
	return `j.id, j.kind, j.queue, j.scope, j.key, ` + JobState + ` as state,
       ` + read(`j.payload::text`, `j.payload_bytes`, `j.metadata::text`) + `, null::text,
       j.priority, j.attempts, j.max_attempts, j.lost, j.claims, j.run_at, j.created_at,
       j.leased_until, null::timestamptz, null::timestamptz,
       j.errors::text, j.progress::text, j.lane, null::text, coalesce(j.due_at, j.run_at)`,
		`w.id, w.kind, w.queue, w.scope, w.key, ` + WaitState + ` as state,
       ` + read(`w.payload::text`, `w.payload_bytes`, `w.metadata::text`) + `, null::text,
       w.priority, w.attempts, w.max_attempts, w.lost, w.claims, w.run_at, w.created_at,
       null::timestamptz, null::timestamptz, null::timestamptz,
       w.errors::text, null::text, coalesce(w.path, w.lane), w.lane, coalesce(w.due_at, w.run_at)`,
		`h.id, h.kind, h.queue, h.scope, h.key, h.state,
       ` + read(`h.payload::text`, `h.payload_bytes`, `h.metadata::text`, `h.result::text`) + `,
       h.priority, h.attempts, h.max_attempts, h.lost, h.claims, h.run_at, h.created_at,
       null::timestamptz, h.finished_at, h.keep_until,
       h.errors::text, null::text, h.lane, null::text, h.run_at`
}

// LiveQueues and pastQueues find the names of queues by stepping through an index from one name to the next. No name is
// empty; saying so lets the planner use jobs_claim, a partial index.
const LiveQueues = `
live (queue) as (
  (select queue from onceq.jobs where queue >= '' order by queue limit 1)
  union all
  select (select j.queue from onceq.jobs j where j.queue > l.queue order by j.queue limit 1)
    from live l where l.queue is not null
),`

const InForce = `(until is null or until > statement_timestamp())` // of a row of pauses

// RowsLack says whether rows are missing that the migrations insert and that nothing deletes: those of
// lane_locks, without which no promoter lets a job go on, and the row of lane_calls that shows that nobody
// has emptied that table.
const RowsLack = `(select l.n < 16 or c.n = 0
          from (select count(*) as n from onceq.lane_locks) l
         cross join (select count(*) as n from onceq.lane_calls where slot = -1 and lane = '') c)`

// LacksRows says that, and whether the row of meta is there.
const LacksRows = `select ` + RowsLack + `, exists (select from onceq.meta)`

// A token consists of the job's id, in 43 bits, and the count of its claims, in 20 bits. It grows with each claim of a job,
// and with each later job of the same key, because ids grow. On overflow: a job that was claimed ClaimsLimit times is dead;
// the sequence of ids ends with an error after 8.7 × 10¹² jobs.
const (
	TokenBits   = 20
	ClaimsLimit = 1<<TokenBits - 1
)

// The same in SQL: how far the id is shifted, and the token of a row of jobs or job_history. In TokenOfGone the row is g.
const (
	TokenBitsSQL = `20`
	TokenOfRow   = `id << ` + TokenBitsSQL + ` | claims::bigint`
	TokenOfGone  = `g.id << ` + TokenBitsSQL + ` | g.claims::bigint`
)

// AskTime asks for the database's time.
const AskTime = `select statement_timestamp()`
