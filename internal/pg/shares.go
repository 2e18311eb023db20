package pg

import (
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/lazytx"
)

// sharer is a queue whose handlers' transactions hold connections of the pool.
type sharer interface {
	Used() int    // slots that are in use, or have jobs claimed for them
	Most() int    // slots that there are
	MayHold() int // how many connections all queues of its worker may hold together
	Rouse()       // called when a connection was given back, while it has less than its share. It must not wait
}

// Shares counts the pool's connections that handlers' transactions hold, for all workers of a process over
// one pool, whatever their schemas. A claimer claims no more jobs than there are connections for: a job that
// was leased and then waited for a connection could run in another worker instead.
type Shares struct {
	Pool *pgxpool.Pool
	Held atomic.Int32 // by handlers' transactions; the executors count

	sync.Mutex                 // guards what follows
	wanting    int             // how many are true in queues, of which there may be thousands
	queues     map[sharer]bool // of queues with transactional kinds; true: it has less than its share, and no connection is free

	all map[*lazytx.Tx]*heldTx // handlers' transactions
}

// Hold is for a transaction that has a connection, until Drop. kind and job are of one of its jobs.
func (c *Shares) Hold(tx *lazytx.Tx, log *slog.Logger, kind string, job int64) {
	c.Held.Add(1)
	c.Lock()
	defer c.Unlock()
	if c.all == nil {
		c.all = make(map[*lazytx.Tx]*heldTx)
	}
	c.all[tx] = &heldTx{tx: tx, log: log, kind: kind, job: job}
}

// Drop is for a transaction that has given its connection back.
func (c *Shares) Drop(tx *lazytx.Tx) {
	c.Lock()
	delete(c.all, tx)
	c.Unlock()
	c.Held.Add(-1)
}

// Join adds a queue.
func (c *Shares) Join(s sharer) {
	c.Lock()
	defer c.Unlock()
	if c.queues == nil {
		c.queues = make(map[sharer]bool)
	}
	c.queues[s] = false
}

// Leave removes it.
func (c *Shares) Leave(s sharer) {
	c.Lock()
	c.want(s, false)
	delete(c.queues, s)
	c.Unlock()
	c.Wake()
}

// Wake tells the claimers of queues that have less than their share that a connection was given back.
func (c *Shares) Wake() {
	c.Lock()
	defer c.Unlock()
	if c.wanting == 0 {
		return
	}
	for s, wants := range c.queues {
		if wants {
			s.Rouse()
		}
	}
}

// Allow says how many of its slots a queue may use now, and records whether it wants more. The caller has
// locked c.
func (c *Shares) Allow(s sharer) int {
	may, wants := c.may(s)
	c.want(s, wants)
	return may
}

// WantNone is for a queue that is paused: it keeps nobody else from a connection.
func (c *Shares) WantNone(s sharer) {
	c.Lock()
	c.want(s, false)
	c.Unlock()
	c.Wake()
}

// want records whether a queue wants more. The caller has locked c.
func (c *Shares) want(s sharer, wants bool) {
	switch {
	case wants == c.queues[s]:
		return
	case wants:
		c.wanting++
	default:
		c.wanting--
	}
	c.queues[s] = wants
}

// othersWant reports whether another queue has less than its share, and no connection is free. The caller has
// locked c.
func (c *Shares) othersWant(s sharer) bool {
	return c.wanting > 1 || c.wanting == 1 && !c.queues[s]
}

// may says how many of its slots a queue may use now, and whether it has less than its share and gets no
// more. The caller has locked c.
func (c *Shares) may(s sharer) (may int, wants bool) {
	mine, total := s.Used(), 0
	for o := range c.queues {
		total += o.Used()
	}
	share := max(1, s.MayHold()/max(1, len(c.queues)))
	may = s.MayHold() - (total - mine)
	if c.othersWant(s) && mine >= share {
		may = mine // others first
	}
	// Connections that the application itself holds are not available to handlers either. If nothing runs,
	// one job may wait for a connection, so that jobs make progress.
	stat := c.Pool.Stat()
	free := int(stat.MaxConns()-stat.AcquiredConns()) - max(0, total-int(c.Held.Load()))
	if total == 0 {
		free = max(1, free)
	}
	may = max(0, min(may, mine+max(0, free), s.Most()))
	return may, may <= mine && mine < share
}

// Reserve calls take with how many of its slots a queue may use now, unless another one waits for a
// connection.
func (c *Shares) Reserve(s sharer, take func(usable int) bool) bool {
	c.Lock()
	defer c.Unlock()
	if c.othersWant(s) {
		return false
	}
	usable, _ := c.may(s) // what wants more is the claimer's to say: it asks again until that has ended
	return take(usable)
}
