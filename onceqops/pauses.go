package onceqops

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// listPauses reads what has been paused for longer than $1 microseconds, or all that is paused if that is
// null.
const listPauses = `
select what, name, paused_at, note, until from onceq.pauses
 where (paused_at < statement_timestamp() - $1::bigint::float8 * interval '1 microsecond') is not false and ` + table.InForce + `
 order by what desc, name`

// Pauses lists what is paused, queues first, then limits, by name. A nil db is the pool.
func (q *Ops) Pauses(ctx context.Context, db onceq.DB) ([]onceq.Pause, error) {
	if db == nil {
		db = q.store.Pool
	}
	return readAll(ctx, q, db, pg.AsIs, "pauses", listPauses, []any{nil}, scanPause)
}

func scanPause(p *onceq.Pause, rows pgx.Rows) error {
	var what, name string
	var until *time.Time
	err := rows.Scan(&what, &name, &p.Since, &p.Note, &until)
	switch p.Until = table.OrZero(until); what {
	case "kind":
		p.Kind = name
	case "limit":
		p.Limit = name
	default:
		p.Queue = name
	}
	return err
}
