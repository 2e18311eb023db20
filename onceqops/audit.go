package onceqops

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
)

// Action is a line of the audit trail: what a person decided about jobs, or asked for. The calls that do such things do not
// write it, because only their callers know the person: onceqweb does, and so may tools of your own.
type Action struct {
	ID      int64     `json:"id"` // grows; RecordAction gives it
	At      time.Time `json:"at"` // the database's time; RecordAction gives it
	Who     string    `json:"who"`
	What    string    `json:"what"`            // "redrive", "resolve", …
	JobID   int64     `json:"job_id,omitzero"` // 0 if it is not about one job
	About   string    `json:"about,omitzero"`  // the effect, the schedule, the filter
	Why     string    `json:"why,omitzero"`
	Outcome string    `json:"outcome,omitzero"` // what became of it
}

// RecordAction adds a line to the audit trail, inside db, and returns its ID. In the transaction of the action itself, both
// happen or neither. The trail is kept until the owner of the table actions deletes from it: a role with
// migrations.Grants cannot, and the Reaper does not.
func (q *Ops) RecordAction(ctx context.Context, db onceq.DB, a Action) (id int64, err error) {
	const insert = `
insert into onceq.actions (who, what, job_id, about, why, outcome)
values ($1::text, $2::text, nullif($3::bigint, 0), $4::text, $5::text, $6::text)
returning id`
	for field, text := range map[string]string{"Who": a.Who, "What": a.What, "About": a.About, "Why": a.Why, "Outcome": a.Outcome} {
		if err := checkText("Action."+field, text); err != nil {
			return 0, err
		}
		if len(text) > maxAction {
			return 0, invalid("Action."+field, "has %d bytes; at most %d", len(text), maxAction)
		}
	}
	if a.Who == "" || a.What == "" {
		return 0, invalid("Action", "needs Who and What")
	}
	args := []any{a.Who, a.What, a.JobID, a.About, a.Why, a.Outcome}
	if err := q.store.SendBare(ctx, db, insert, args, pg.Row(&id)); err != nil {
		return 0, fmt.Errorf("onceq: recording an action: %w", err)
	}
	return id, nil
}

// ActionFilter chooses lines of the audit trail. A field with its zero value does not restrict.
type ActionFilter struct {
	Who, What string
	JobID     int64
	Since     time.Time // that were written then or later
	After     int64     // the last ID of the previous page; only smaller ones are chosen
	Limit     int       // default 100, at most 1,000
}

// Actions returns a page of the audit trail, the latest line first. It may read the whole trail where few
// lines are chosen, unless they are those of a job.
func (q *Ops) Actions(ctx context.Context, db onceq.DB, filter ActionFilter) ([]Action, error) {
	const page = `
select id, at, who, what, coalesce(job_id, 0), about, why, outcome from onceq.actions
 where id < $1::bigint and ($3::bigint = 0 or job_id = $3::bigint) and ($4::text = '' or who = $4::text)
   and ($5::text = '' or what = $5::text) and at >= $6::timestamptz order by id desc limit $2::int`
	const field = "ActionFilter."
	since, err := storedTime(field+"Since", filter.Since)
	err = cmp.Or(err, pageSize(field+"Limit", &filter.Limit, 100), checkText(field+"Who", filter.Who),
		checkText(field+"What", filter.What))
	if err != nil {
		return nil, err
	}
	after := cmp.Or(filter.After, math.MaxInt64)
	args := []any{after, filter.Limit, filter.JobID, filter.Who, filter.What, since}
	return readAll(ctx, q, db, pg.Reading, "actions", page, args, func(a *Action, rows pgx.Rows) error {
		return rows.Scan(&a.ID, &a.At, &a.Who, &a.What, &a.JobID, &a.About, &a.Why, &a.Outcome)
	})
}
