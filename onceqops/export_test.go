package onceqops

import (
	"context"
	"encoding/json"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
)

// This is what the tests of package onceqops_test may use of the unexported code.

// HealthAt is Health with other limits: for the age of snapshots, for dead rows, for the bytes of an index, and for
// waiting.
func (q *Ops) HealthAt(ctx context.Context, snapshot time.Duration, dead, index int64, waiting time.Duration) ([]Finding, error) {
	return q.health(ctx, healthLimits{snapshot: snapshot, dead: dead, index: index, waiting: waiting, hang: waiting, question: time.Minute})
}

// HealthWithin is Health with another time limit for each question.
func (q *Ops) HealthWithin(ctx context.Context, question time.Duration) ([]Finding, error) {
	return q.health(ctx, healthLimits{snapshot: time.Hour, dead: 1 << 40, index: 1 << 40, waiting: time.Hour, hang: time.Hour, question: question})
}

// ExplainAt is Explain with another limit for the age of snapshots.
func (q *Ops) ExplainAt(ctx context.Context, db onceq.DB, id int64, snapshot time.Duration) (Explanation, error) {
	return q.whyNot(ctx, db, id, snapshot)
}

// ListStatement is the statement of List.
func ListStatement(f Filter) (string, []any) { return f.statement() }

// ReadStill is a statement of Health.
var ReadStill = readStill

var (
	ReadLane    = readLane
	ReadLimitOf = readLimitOf
)

// PlanOf gives the plan of a statement, which runs as those that read do.
func (q *Ops) PlanOf(ctx context.Context, db onceq.DB, statement string, args ...any) (plan any, err error) {
	var raw string
	err = q.store.Send(ctx, db, pg.Reading, "explain (analyze, buffers, timing off, format json) "+statement, args, pg.Row(&raw))
	if err == nil {
		err = json.Unmarshal([]byte(raw), &plan)
	}
	return plan, err
}
