package onceqops

import (
	"cmp"
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// KeyInfo is what is known about a key that is or was taken. In JSON, empty fields are left out.
type KeyInfo struct {
	Class onceq.Class `json:"class"` // whose key it is
	Scope string      `json:"scope"`
	Key   string      `json:"key"`
	Kind  string      `json:"kind,omitzero"` // of the job; empty outside of jobs, and after a Discard

	// State is "queued" (its job is not finished), "in_flight", "uncertain", "held", "completed", "dead" or "cancelled"; the
	// last also stands for a key that was released.
	State      string          `json:"state"`
	Free       bool            `json:"free,omitzero"`        // it can be taken at once; the row is what a Reaper has not removed yet
	JobID      int64           `json:"job_id,omitzero"`      // the job that has it, or had it last; 0 outside of jobs
	Token      int64           `json:"token"`                // the greatest token under which it was held
	Since      time.Time       `json:"since"`                // when it was taken
	Until      time.Time       `json:"until,omitzero"`       // end of the latest claim's lease; zero for a job's key
	FinishedAt time.Time       `json:"finished_at,omitzero"` // zero while the work is not finished
	FreeAt     time.Time       `json:"free_at,omitzero"`     // end of its window; zero before its work is finished, and for one that is taken for ever
	Result     json.RawMessage `json:"result,omitzero"`
	Detail     string          `json:"detail,omitzero"` // why it is uncertain or held

	// IdempotencyKey is the key that a provider got for it; empty for a job's key and for an event.
	IdempotencyKey string `json:"idempotency_key,omitzero"`
}

// readKeys reads a key in one scope, or in every scope if $1 is empty: a range of the primary key.
const readKeys = `
select f.class, f.scope, case f.state when ` + table.Queued + ` then 'queued' when ` + table.Completed + ` then 'completed' when ` + table.Held + ` then 'held'
         when ` + table.Dead + ` then 'dead' when ` + table.Cancelled + ` then 'cancelled' when ` + table.Uncertain + ` then 'uncertain'
         else case when f.leased_until > statement_timestamp() then 'in_flight' else 'uncertain' end end,
       coalesce(` + table.FenceFree + `, false), coalesce(f.job_id, 0), f.token, f.created_at, f.leased_until, f.finished_at, f.lifetime,
       case when not $4::boolean then f.result::text end, coalesce(f.detail, ''), coalesce(f.identity, (extract(epoch from f.created_at) * 1e6)::bigint), f.fingerprint
  from onceq.job_fences f
 where f.key = $2::text and f.class <> ` + table.OfEffect + ` and (f.class <> ` + table.OfEvent + ` or f.state = ` + table.Completed + `) and ($1::text = '' or f.scope = $1::text)
 order by f.key, f.scope, f.class
 limit $3::int`

// Keys returns what is known about a key: of jobs, of the application's own (Do, Fence), of requests, and of events (Emit).
// With an empty scope it looks in every scope and returns the first 100. A key that was never taken, or that a Reaper has
// removed, is not there. A Filter may say WithoutPayloads, and no more.
func (q *Ops) Keys(ctx context.Context, db onceq.DB, scope, key string, filter ...Filter) ([]KeyInfo, error) {
	if err := cmp.Or(checkText("scope", scope), checkText("key", key)); err != nil {
		return nil, err
	}
	if err := q.identify(ctx, db); err != nil {
		return nil, err
	}
	args := []any{scope, key, maxKeys, orNone(filter).WithoutPayloads}
	return readAll(ctx, q, db, pg.Reading, "keys", readKeys, args, func(i *KeyInfo, rows pgx.Rows) error {
		i.Key = key
		return i.scan(q, rows)
	})
}

func (i *KeyInfo) scan(q *Ops, rows pgx.Rows) error {
	var until, finished *time.Time
	var lifetime, identity int64
	var mark []byte
	err := rows.Scan(&i.Class, &i.Scope, &i.State, &i.Free, &i.JobID, &i.Token, &i.Since, &until, &finished, &lifetime,
		(*[]byte)(&i.Result), &i.Detail, &identity, &mark)
	i.FinishedAt = table.OrZero(finished)
	if over := i.State == "completed" || i.State == "dead" || i.State == "cancelled"; over && finished != nil && lifetime >= 0 {
		i.FreeAt = finished.Add(time.Duration(lifetime) * time.Millisecond)
	}
	switch {
	case i.Class == table.ClassEvent:
	case i.Class != table.ClassJob:
		i.Until = table.OrZero(until)
		i.IdempotencyKey = root.IdempotencyKey(q.q, "fence", strconv.Itoa(int(i.Class)), i.Scope, i.Key, strconv.FormatInt(identity, 10))
	case len(mark) > 0:
		i.Kind = root.KindOf(mark, i.Scope)
	}
	if i.Class == table.ClassJob && i.State == "cancelled" && i.Token&table.ClaimsLimit == 0 { // table.NeverClaimed: it has no window
		i.FreeAt = i.FinishedAt
	}
	return err
}
