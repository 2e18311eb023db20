package onceqops

import (
	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
)

// Ops is what people do to the jobs of a queue. It is safe for concurrent use and holds nothing but the
// queue, so it may be made wherever it is needed.
type Ops struct {
	q     *onceq.Queue
	store *pg.Store
}

// New returns the Ops of a queue, which must not be nil.
func New(q *onceq.Queue) *Ops { return &Ops{q: q, store: root.Store(q)} }
