package onceq

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// missing is a walk over the members of all groups. It finds those whose jobs somebody deleted by hand. They count as cancelled,
// so that the jobs that wait for them go on. A look at all lanes begins it, and whichever promoter of this Queue looks next goes
// on with it: by a page, and for a hundredth of the time at most. A process that ends forgets where it was.
type missing struct {
	mu   sync.Mutex // held over the statement
	on   bool
	from time.Time // when the next page may be read
	last [2]int64  // group and member where the latest page ended
}

// missingPage is how many members a statement looks at.
const missingPage = 10_000

// begin makes a walk start, unless one is on its way.
func (m *missing) begin() {
	if !m.mu.TryLock() {
		return // a page is being read
	}
	defer m.mu.Unlock()
	if !m.on {
		m.on, m.from, m.last = true, time.Time{}, [2]int64{}
	}
}

// forgetMissing goes on with the walk. It returns how many jobs that wait it has called.
func (q *Queue) forgetMissing(ctx context.Context, db *pgxpool.Pool) (calls int, err error) {
	m := &q.missing
	if !m.mu.TryLock() {
		return 0, nil // another promoter is at it
	}
	defer m.mu.Unlock()
	began := time.Now()
	if !m.on || began.Before(m.from) {
		return 0, nil
	}
	var read int
	unbroken, cancel := outlast(ctx, time.Minute)
	defer cancel()
	if q.citus.Load() == citusYes {
		err = q.alone(unbroken, db, func(p *parts) error {
			calls, read, err = p.forget(&m.last)
			return err
		})
	} else {
		batch := &pgx.Batch{}
		batch.Queue(beginOwn)
		batch.Queue(guardPlans + `, ` + noLimits)
		batch.Queue(q.sql(forgetMembers), m.last[0], m.last[1], missingPage).Query(row(&calls, &read, &m.last[0], &m.last[1]))
		batch.Queue("commit")
		err = db.SendBatch(unbroken, batch).Close()
	}
	if err != nil {
		m.on = false // the next look at all lanes begins another one
		return 0, fmt.Errorf("onceq: promote: %w", q.told(err))
	}
	m.on, m.from = read == missingPage, time.Now().Add(100*time.Since(began))
	return calls, nil
}

// forgetMembers looks at $3 members after the member $2 of the group $1. It returns how many jobs that wait it has called, how
// many members it has read, and the last of them. It needs no locks of promoters: a job moves from one table to another in one
// commit, so that it is in one of them in every snapshot.
var forgetMembers = `
with chunk as materialized (
  select group_id, job_id, state, told from onceq.job_members
   where (group_id, job_id) > ($1::bigint, $2::bigint)
   order by group_id, job_id
   limit $3::int
),
gone as (
  update onceq.job_members m set state = ` + sqlJobCancelled + `
    from (select p.group_id, p.job_id from chunk p
           where p.state in (0, ` + sqlJobDead + `, ` + sqlJobHeld + `) and p.told
             and not exists (select from onceq.jobs j where j.id = p.job_id offset 0)
             and not exists (select from onceq.job_waits o where o.id = p.job_id offset 0)
             and not exists (select from onceq.job_history h where h.id = p.job_id offset 0)
             and exists (select from onceq.job_waits w where w.id = p.group_id and w.lane > ` + sqlSep + ` and w.lane < ' ' offset 0)
          offset 0) g
   where m.group_id = any (array[g.group_id]) and m.job_id = g.job_id
     and m.state + 0 in (0, ` + sqlJobDead + `, ` + sqlJobHeld + `) and m.told
  returning m.group_id
),
call as (
  insert into onceq.lane_calls (slot, due, lane)
  select ` + laneSlot("lane") + `, statement_timestamp(), lane from (select distinct ` + followLine("group_id") + ` as lane from gone) l
  returning 1
),
last as (
  select group_id, job_id from chunk order by group_id desc, job_id desc limit 1
)
select (select count(*) from call), (select count(*) from chunk),
       coalesce((select group_id from last), 0), coalesce((select job_id from last), 0)`
