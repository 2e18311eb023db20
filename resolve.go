package onceq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Resolution is a person's decision about work whose outcome is unknown.
type Resolution struct {
	state  fenceState
	result any
}

// Applied says that the work was done: result is stored and replayed. nil is null.
func Applied(result any) Resolution { return Resolution{fenceCompleted, result} }

// NeverApplied says that the work was not done: it is free to run.
func NeverApplied() Resolution { return Resolution{state: fenceCancelled} }

// resolveFence settles a fence that is uncertain or held, or gives a completed one the result that could not be
// stored. Token and holder stay, so that a late success is still accepted while nobody has run again. An effect that
// is completed waits for the Reaper to begin its window (fence.go). Zero rows: nothing to resolve.
const resolveFence = `
update onceq.job_fences f
   set state = $4::smallint, result = nullif($5::text, '')::jsonb, detail = null,
       finished_at = case when f.class <> 3 or $4::smallint = 5 then statement_timestamp() end,
       lifetime = case when $4::smallint = 5 then 0 else f.lifetime end
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text
   and (f.state = 6 or ` + inDoubt + ` or f.state = 3 and f.detail is not null and $4::smallint = 3)
returning f.token`

func (f *Fence) resolve(ctx context.Context, db DB, r Resolution) error {
	var raw string
	switch r.state {
	case fenceCancelled:
	case fenceCompleted:
		var err error
		if raw, err = encodeResult(r.result); err != nil {
			return err
		}
	default:
		return invalid("Resolution", "is empty; use Applied or NeverApplied")
	}
	var token int64
	err := f.q.queryRow(ctx, db, resolveFence, []any{int16(f.class), f.scope, f.key, int16(r.state), raw}, &token)
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("%w: %s is not uncertain or held", ErrNotFound, f)
	}
	if err != nil {
		return fmt.Errorf("onceq: resolving %s: %w", f, err)
	}
	return nil
}

// Resolve settles the fence when it is uncertain, held, or run out of its lease, inside db; a nil db is the pool.
// ErrNotFound: there is nothing to resolve.
func (f *Fence) Resolve(ctx context.Context, db DB, r Resolution) error {
	if db == nil {
		db = f.db
	}
	return f.resolve(ctx, db, r)
}

// Resolve settles the uncertain or held effect of a job, inside db. A job that is Held runs again then, with its id
// and key, in the same transaction; until everything of it is resolved it will be held again. ErrNotFound: there is
// nothing to resolve.
func (q *Queue) Resolve(ctx context.Context, db DB, jobID int64, name string, r Resolution) error {
	if err := checkText("name", name); err != nil {
		return err
	}
	return atomically(ctx, db, func(db DB) error {
		effects, err := q.Effects(ctx, db, jobID)
		if err != nil {
			return err
		}
		f := &Fence{q: q, class: classEffect, key: effectKey(jobID, name)}
		for _, e := range effects {
			if e.Name == name {
				f.scope = e.scope
			}
		}
		if err := f.resolve(ctx, db, r); err != nil {
			return err
		}
		const held = `select id from onceq.job_history where id = $1::bigint and state = 8`
		var id int64
		switch err := q.queryRow(ctx, db, held, []any{jobID}, &id); {
		case errors.Is(err, pgx.ErrNoRows):
			return nil
		case err != nil:
			return fmt.Errorf("onceq: reading job %d: %w", jobID, err)
		}
		_, err = q.Redrive(ctx, db, jobID)
		return err
	})
}

// EffectInfo is what is known about a named effect of a job.
type EffectInfo struct {
	Name   string
	State  string          // "in_flight", "completed", "uncertain" or "held"
	Since  time.Time       // first intent
	Until  time.Time       // in flight: the end of its lease
	Result json.RawMessage // completed; nil where it could not be stored, Detail says why
	Detail string          // why it is uncertain or held

	scope string
}

// Effects lists the effects of a job by name, those of a finished job as long as they are not pruned. Effects that
// were certainly not applied are not among them. It is quick while the job is live or in the history; otherwise it
// looks at the effects of every queue.
func (q *Queue) Effects(ctx context.Context, db DB, jobID int64) ([]EffectInfo, error) {
	const read = `
with place as materialized (
  select queue from onceq.jobs where id = $1::bigint
  union
  select queue from onceq.job_history where id = $1::bigint
),
found as (
  select f.* from place p cross join lateral (
         select * from onceq.job_fences f
          where f.class = 3 and f.scope = p.queue and f.key > $2::text and f.key < $3::text offset 0) f
  union all
  select f.* from onceq.job_fences f
   where f.class = 3 and f.key > $2::text and f.key < $3::text and not exists (select from place)
)
select f.scope, f.key, case f.state when 3 then 'completed' when 6 then 'held'
         when 1 then case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end
         else 'uncertain' end,
       f.created_at, f.leased_until, coalesce(f.result::text, ''), coalesce(f.detail, '')
  from found f
 where f.state in (1, 2, 3, 6) and f.job_id = $1::bigint
 order by f.key`
	prefix := strconv.FormatInt(jobID, 10)
	rows, err := db.Query(ctx, q.sql(read), jobID, prefix+"/", prefix+"0") // '0' comes after '/'
	if err != nil {
		return nil, fmt.Errorf("onceq: effects of job %d: %w", jobID, q.told(err))
	}
	defer rows.Close()
	var effects []EffectInfo
	for rows.Next() {
		var e EffectInfo
		var key, result string
		if err := rows.Scan(&e.scope, &key, &e.State, &e.Since, &e.Until, &result, &e.Detail); err != nil {
			return nil, fmt.Errorf("onceq: effects of job %d: %w", jobID, q.told(err))
		}
		e.Name = strings.TrimPrefix(key, prefix+"/")
		if result != "" {
			e.Result = json.RawMessage(result)
		}
		effects = append(effects, e)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("onceq: effects of job %d: %w", jobID, q.told(err))
	}
	return effects, nil
}
