package onceqops

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// Resolve settles the uncertain or held effect of a job, inside db. A job that is StateHeld runs again in the same
// transaction, with its id and key, once none of its effects is held any more. A dead or cancelled job stays so, and
// replays the outcome if it is redriven. If there is nothing to resolve, the error is ErrNotFound.
func (q *Ops) Resolve(ctx context.Context, db onceq.DB, jobID int64, name string, r onceq.Resolution) error {
	if err := checkText("name", name); err != nil {
		return err
	}
	return pg.Atomically(ctx, db, pg.AsIs, func(db pg.DB) error {
		var past []int64
		if err := q.store.QueryRow(ctx, db, lockPast, []any{[]int64{jobID}}, &past, nil); err != nil {
			return fmt.Errorf("onceq: reading job %d: %w", jobID, err)
		}
		var state onceq.State
		if len(past) > 0 {
			var err error
			if state, err = q.state(ctx, db, jobID); err != nil {
				return err
			}
		}
		effects, err := q.Effects(ctx, db, jobID, Filter{WithoutPayloads: true})
		if err != nil {
			return err
		}
		scope := ""
		for _, e := range effects {
			if e.Name == name {
				scope = e.scope
			}
		}
		err = root.ResolveEffect(ctx, q.q, db, scope, jobID, name, r)
		if err == nil && state == 0 { // its worker may have written meanwhile that it is held: see heldLately
			state, err = q.state(ctx, db, jobID)
			if errors.Is(err, onceq.ErrNotFound) {
				return nil
			}
		}
		if err != nil || state != onceq.StateHeld {
			return err
		}
		if _, err = q.Redrive(ctx, db, jobID); errors.Is(err, onceq.ErrHeld) {
			return nil
		}
		return err
	})
}

// ResolveMany settles the uncertain and held effects called name, or with an empty name all of them, of the jobs that the
// filter chooses: newest first, 500 jobs a transaction. Use it after an outage, for example. By default it chooses held
// jobs, which run again once none of their effects is held any more; Filter.States may also name StateDead and
// StateCancelled, and these jobs stay so. A filter without Queue, Kind, Scope, IDs and Group needs Filter.All. Filter.Limit is how
// many jobs are looked at; 0 means all. It returns how many effects were settled and how many jobs run again. With a pool as
// db each transaction commits on its own, and the counts are right even if there is an error.
func (q *Ops) ResolveMany(ctx context.Context, db onceq.DB, filter Filter, name string,
	r onceq.Resolution) (resolved, redriven int, err error) {
	state, raw, err := root.Encode(r)
	if err != nil {
		return 0, 0, err
	}
	if err := checkText("name", name); err != nil {
		return 0, 0, err
	}
	filter.byDefault(onceq.StateHeld)
	_, past := filter.states()
	err = q.each(ctx, db, filter, redrivable, func(ids []int64) error {
		var n int
		var again []int64
		err := pg.Atomically(ctx, db, pg.ForCallerRare, func(db pg.DB) error {
			var held []int64
			if err := q.store.QueryRow(ctx, db, table.ResolveEffects, []any{ids, past, state, raw, name}, &n, &held); err != nil {
				return fmt.Errorf("onceq: resolve: %w", err)
			}
			r, err := q.redrive(ctx, db, held, []onceq.State{onceq.StateHeld}, map[int64]bool{})
			again = r.Back
			return err
		})
		if err == nil {
			resolved, redriven = resolved+n, redriven+len(again)
		}
		return err
	})
	return resolved, redriven, err
}

// WouldResolve says which jobs ResolveMany would look at with this filter: how many, and which. It settles those of their
// effects that are uncertain or held; Doubts lists such effects.
func (q *Ops) WouldResolve(ctx context.Context, db onceq.DB, filter Filter) (Choice, error) {
	filter.byDefault(onceq.StateHeld)
	return q.choose(ctx, db, filter, redrivable)
}

// EffectInfo is what is known about a named effect of a job. In JSON, empty fields are left out.
type EffectInfo struct {
	Name   string          `json:"name"`
	State  string          `json:"state"`           // "in_flight", "completed", "uncertain" or "held"
	Since  time.Time       `json:"since"`           // when the effect was first begun
	Until  time.Time       `json:"until,omitzero"`  // in flight: when its lease ends
	Result json.RawMessage `json:"result,omitzero"` // completed; nil if it could not be stored, and Detail says why
	Detail string          `json:"detail,omitzero"` // why it is uncertain or held, or has no result

	// IdempotencyKey is the key that the provider got. By it the provider may be able to say whether the effect happened.
	IdempotencyKey string `json:"idempotency_key"`

	job   int64 // that it belongs to
	scope string
}

// effectColumns are what EffectInfo.scan reads of a fence f, without its result if $2 says so.
const effectColumns = `select f.scope, f.key, case f.state when ` + table.Completed + ` then 'completed' when ` + table.Held + ` then 'held'
         when ` + table.Claimed + ` then case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end
         else 'uncertain' end, f.created_at, f.leased_until,
       case when not $2::boolean then f.result::text end, coalesce(f.detail, ''), f.fingerprint`

func (e *EffectInfo) scan(q *Ops, rows pgx.Rows) error {
	var key string
	var mark []byte
	err := rows.Scan(&e.scope, &key, &e.State, &e.Since, &e.Until, (*[]byte)(&e.Result), &e.Detail, &mark)
	e.job, e.Name, e.IdempotencyKey = root.Effect(q.q, key, mark)
	return err
}

var readEffects = `
with place as materialized (
  select queue, created_at, identity from onceq.jobs where id = $1::bigint
  union
  select queue, created_at, identity from onceq.job_waits where id = $1::bigint
  union
  select queue, created_at, identity from onceq.job_history where id = $1::bigint
),
found as (
  select f.* from place p cross join lateral (
         select * from onceq.job_fences f
          where f.class = ` + table.OfEffect + ` and f.scope = p.queue and f.key > $3::text and f.key < $4::text and ` + table.OfRound("p") + ` offset 0) f
  union all
  select f.* from onceq.job_fences f
   where f.class = ` + table.OfEffect + ` and f.key > $3::text and f.key < $4::text and not exists (select from place)
)
` + effectColumns + `
  from found f
 where f.state in (` + table.Claimed + `, ` + table.Uncertain + `, ` + table.Completed + `, ` + table.Held + `) and f.job_id = $1::bigint
 order by f.key limit nullif($5::int, 0)`

// Effects lists the effects of a job, sorted by name; after Reschedule, only those that were begun since. Effects of a
// finished job are listed until a Reaper has removed them. Effects that were certainly not applied are not listed. Effects
// is quick while the job is live or in the history; otherwise it searches the effects of every queue. A
// Filter may say WithoutPayloads, and have a Limit, and no more.
func (q *Ops) Effects(ctx context.Context, db onceq.DB, jobID int64, filter ...Filter) ([]EffectInfo, error) {
	if err := q.identify(ctx, db); err != nil {
		return nil, err
	}
	f, prefix := orNone(filter), strconv.FormatInt(jobID, 10)
	args := []any{jobID, f.WithoutPayloads, prefix + "/", prefix + "0", max(f.Limit, 0)} // '0' follows '/'
	return readAll(ctx, q, db, pg.AsIs, "effects of job "+prefix, readEffects, args,
		func(e *EffectInfo, rows pgx.Rows) error { return e.scan(q, rows) })
}

// Doubt is an effect whose outcome is unknown, and the job that it belongs to.
type Doubt struct {
	Job    onceq.JobInfo
	Effect EffectInfo // State is "uncertain" or "held"
}

var readDoubts = `
with page as materialized (
  select id, queue, created_at, identity from onceq.jobs where id = any ($1::bigint[])
  union all
  select id, queue, created_at, identity from onceq.job_waits where id = any ($1::bigint[])
  union all
  select id, queue, created_at, identity from onceq.job_history where id = any ($1::bigint[])
)
` + effectColumns + `
  from page p
 cross join lateral (select * from onceq.job_fences f
         where ` + table.EffectsOf("p") + ` and ` + table.OfRound("p") + ` and (f.state = ` + table.Held + ` or ` + table.InDoubt + `) offset 0) f
 order by p.id desc, f.key`

// Doubts looks at the page of jobs that Page would return, and returns those of their effects whose outcome is unknown:
// newest job first, then by name. The default of Filter.States is StateHeld: jobs that wait for a person. Jobs in other
// states may have uncertain effects too: a run of a live job decides about them by their policy, and a dead or cancelled job
// keeps them until it is redriven. For the next page set Filter.After to next; it is 0 after the last page. A page may be
// empty and not the last one.
func (q *Ops) Doubts(ctx context.Context, db onceq.DB,
	filter Filter) (doubts []Doubt, next int64, err error) {
	filter.byDefault(onceq.StateHeld)
	filter.Limit = cmp.Or(filter.Limit, 100)
	jobs, next, err := q.Page(ctx, db, filter)
	if err != nil || len(jobs) == 0 {
		return nil, next, err
	}
	if err := q.identify(ctx, db); err != nil {
		return nil, 0, err
	}
	ids, byID := make([]int64, 0, len(jobs)), make(map[int64]onceq.JobInfo, len(jobs))
	for _, j := range jobs {
		ids, byID[j.ID] = append(ids, j.ID), j
	}
	args := []any{ids, filter.WithoutPayloads}
	doubts, err = readAll(ctx, q, db, pg.Reading, "doubts", readDoubts, args, func(d *Doubt, rows pgx.Rows) error {
		err := d.Effect.scan(q, rows)
		d.Job = byID[d.Effect.job]
		return err
	})
	return doubts, next, err
}
