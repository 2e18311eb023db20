package onceqops

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// Ops is what people do to the jobs of a queue. It is safe for concurrent use and holds nothing but the
// queue, so it may be made wherever it is needed.
type Ops struct {
	q    *onceq.Queue
	pool *pgxpool.Pool
}

// New returns the Ops of a queue, which must not be nil.
func New(q *onceq.Queue) *Ops { return &Ops{q: q, pool: root.Pool(q)} }
