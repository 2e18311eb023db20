package checks

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

func manyConnections(c *pgxpool.Config) { c.MaxConns = 12 }

// completeBlindly completes a job by its id, without a fencing token, whoever holds it. The checks must notice that.
func completeBlindly(ctx context.Context, q *queuetest.DB, db onceq.DB, id int64, result int) error {
	for _, statement := range []string{
		`delete from onceq.jobs where id = $1::bigint and $2::int is not null`,
		`update onceq.job_fences set state = 3, finished_at = statement_timestamp(), result = to_jsonb($2::int)
			where class = 0 and job_id = $1::bigint and state = 0`,
	} {
		if _, err := db.Exec(ctx, schema(q, statement), id, result); err != nil {
			return err
		}
	}
	return nil
}
