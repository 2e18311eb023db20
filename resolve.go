package onceq

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Resolution is a person's decision about work whose outcome is unknown: Applied or NeverApplied.
type Resolution struct {
	state  fenceState
	result any
}

// Applied says that the work was done: result is stored and replayed. A nil result is stored as null.
func Applied(result any) Resolution { return Resolution{fenceCompleted, result} }

// NeverApplied says that the work was not done: it may run again.
func NeverApplied() Resolution { return Resolution{state: fenceCancelled} }

func (r Resolution) encode() (string, error) {
	switch r.state {
	case fenceCancelled:
		return "", nil
	case fenceCompleted:
		return encodeResult(r.result)
	}
	return "", invalid("Resolution", "is empty; use Applied or NeverApplied")
}

// resolveFence settles a fence that is uncertain or held, or gives a completed one the result that could not be stored.
// Token and holder stay, so that a late success is still accepted while nobody has run the work again. The window of a
// completed effect begins only when the Reaper finds that its job is over (fence.go). Zero rows: nothing to resolve.
const resolveFence = `
update onceq.job_fences f
   set state = $4::smallint, result = nullif($5::text, '')::jsonb, detail = null,
       finished_at = case when f.class <> ` + sqlOfEffect + ` or $4::smallint = ` + sqlCancelled + ` then statement_timestamp() end,
       lifetime = case when $4::smallint = ` + sqlCancelled + ` then 0 else f.lifetime end
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text
   and (f.state = ` + sqlHeld + ` or ` + inDoubt + ` or f.state = ` + sqlCompleted + ` and f.detail is not null and $4::smallint = ` + sqlCompleted + `)
returning f.token`

func (f *Fence) resolve(ctx context.Context, db DB, r Resolution) error {
	raw, err := r.encode()
	if err != nil {
		return err
	}
	var token int64
	err = f.q.guarded(ctx, db, resolveFence, []any{int16(f.class), f.scope, f.key, int16(r.state), raw}, &token)
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("%w: %s is not uncertain or held", ErrNotFound, f)
	}
	if err != nil {
		return fmt.Errorf("onceq: resolving %s: %w", f, err)
	}
	return nil
}

// Resolve settles the fence if it is uncertain or held, or if its lease has run out, inside db; a nil db is the pool. If
// there is nothing to resolve, the error is ErrNotFound.
func (f *Fence) Resolve(ctx context.Context, db DB, r Resolution) error {
	if db == nil {
		db = f.db
	}
	return f.resolve(ctx, db, r)
}

// Resolve settles the uncertain or held effect of a job, inside db. A job that is StateHeld runs again in the same
// transaction, with its id and key, once none of its effects is held any more. A dead or cancelled job stays so, and
// replays the outcome if it is redriven. If there is nothing to resolve, the error is ErrNotFound.
func (q *Queue) Resolve(ctx context.Context, db DB, jobID int64, name string, r Resolution) error {
	if err := checkText("name", name); err != nil {
		return err
	}
	return atomically(ctx, db, asIs, func(db DB) error {
		const past = `select state from onceq.job_history where id = $1::bigint for update`
		var state State
		if err := q.queryRow(ctx, db, past, []any{jobID}, &state); err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("onceq: reading job %d: %w", jobID, err)
		}
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
		if err := f.resolve(ctx, db, r); err != nil || state != StateHeld {
			return err
		}
		if _, err = q.Redrive(ctx, db, jobID); errors.Is(err, ErrHeld) {
			return nil
		}
		return err
	})
}

var resolveEffects = `
with h as materialized (
  select * from onceq.job_history
   where id = any ($1::bigint[]) and state = any ($2::smallint[])
   order by id
     for update
),
settled as (
  update onceq.job_fences f
     set state = $3::smallint, result = nullif($4::text, '')::jsonb, detail = null,
         finished_at = case when $3::smallint = ` + sqlCancelled + ` then statement_timestamp() end,
         lifetime = case when $3::smallint = ` + sqlCancelled + ` then 0 else f.lifetime end
    from h
   where ` + effectsOf("h") + ` and ` + ofRound("h") + ` and (f.state = ` + sqlHeld + ` or ` + inDoubt + `)
     and ($5::text = '' or f.key = h.id::text || '/' || $5::text)
  returning h.id, h.state
)
select count(*), (select array_agg(distinct id) from settled where state = ` + sqlJobHeld + `) from settled`

// ResolveMany settles the uncertain and held effects called name, or with an empty name all of them, of the jobs that the
// filter chooses: newest first, 500 jobs a transaction. Use it after an outage, for example. By default it chooses held
// jobs, which run again once none of their effects is held any more; Filter.States may also name StateDead and
// StateCancelled, and these jobs stay so. Filter.Limit is how many jobs are looked at; 0 means all. It returns how many
// effects were settled and how many jobs run again. With a pool as db each transaction commits on its own, and the counts
// are right even if there is an error.
func (q *Queue) ResolveMany(ctx context.Context, db DB, filter Filter, name string, r Resolution) (resolved, redriven int, err error) {
	raw, err := r.encode()
	if err != nil {
		return 0, 0, err
	}
	if err := checkText("name", name); err != nil {
		return 0, 0, err
	}
	if filter.States == nil {
		filter.States = []State{StateHeld}
	}
	_, past := filter.states()
	err = q.each(ctx, db, filter, redrivable, func(ids []int64) error {
		var n int
		var again []int64
		err := atomically(ctx, db, rare, func(db DB) error {
			var held []int64
			if err := q.queryRow(ctx, db, resolveEffects, []any{ids, past, int16(r.state), raw, name}, &n, &held); err != nil {
				return fmt.Errorf("onceq: resolve: %w", err)
			}
			var err error
			again, _, _, err = q.redrive(ctx, db, held, []State{StateHeld})
			return err
		})
		if err == nil {
			resolved, redriven = resolved+n, redriven+len(again)
		}
		return err
	})
	return resolved, redriven, err
}

// EffectInfo is what is known about a named effect of a job.
type EffectInfo struct {
	Name   string
	State  string          // "in_flight", "completed", "uncertain" or "held"
	Since  time.Time       // when the effect was first begun
	Until  time.Time       // in flight: when its lease ends
	Result json.RawMessage // completed; nil if it could not be stored, and Detail says why
	Detail string          // why it is uncertain or held, or has no result

	// IdempotencyKey is the key that the provider got. By it the provider may be able to say whether the effect happened.
	IdempotencyKey string

	scope string
}

var readEffects = `
with place as materialized (
  select queue, created_at, identity from onceq.jobs where id = $1::bigint
  union
  select queue, created_at, identity from onceq.job_history where id = $1::bigint
),
found as (
  select f.* from place p cross join lateral (
         select * from onceq.job_fences f
          where f.class = ` + sqlOfEffect + ` and f.scope = p.queue and f.key > $2::text and f.key < $3::text and ` + ofRound("p") + ` offset 0) f
  union all
  select f.* from onceq.job_fences f
   where f.class = ` + sqlOfEffect + ` and f.key > $2::text and f.key < $3::text and not exists (select from place)
)
select f.scope, f.key, case f.state when ` + sqlCompleted + ` then 'completed' when ` + sqlHeld + ` then 'held'
         when ` + sqlClaimed + ` then case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end
         else 'uncertain' end,
       f.created_at, f.leased_until, coalesce(f.result::text, ''), coalesce(f.detail, ''), f.fingerprint
  from found f
 where f.state in (` + sqlClaimed + `, ` + sqlUncertain + `, ` + sqlCompleted + `, ` + sqlHeld + `) and f.job_id = $1::bigint
 order by f.key`

// Effects lists the effects of a job, sorted by name; after Reschedule, only those that were begun since. Effects of a
// finished job are listed until a Reaper has removed them. Effects that were certainly not applied are not listed. Effects
// is quick while the job is live or in the history; otherwise it searches the effects of every queue.
func (q *Queue) Effects(ctx context.Context, db DB, jobID int64) ([]EffectInfo, error) {
	if err := q.identify(ctx, db); err != nil {
		return nil, err
	}
	prefix := strconv.FormatInt(jobID, 10)
	var effects []EffectInfo
	args := []any{jobID, prefix + "/", prefix + "0"} // '0' comes after '/'
	err := q.send(ctx, db, asIs, readEffects, args, each(func(rows pgx.Rows) error {
		var e EffectInfo
		var key, result string
		var mark []byte
		if err := rows.Scan(&e.scope, &key, &e.State, &e.Since, &e.Until, &result, &e.Detail, &mark); err != nil {
			return err
		}
		e.Name = strings.TrimPrefix(key, prefix+"/")
		if len(mark) == 8 {
			e.IdempotencyKey = q.effectIdempotencyKey(jobID, int64(binary.BigEndian.Uint64(mark)), e.Name)
		}
		if result != "" {
			e.Result = json.RawMessage(result)
		}
		effects = append(effects, e)
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("onceq: effects of job %d: %w", jobID, err)
	}
	return effects, nil
}
