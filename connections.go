package onceq

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// connections are those of the pool, as far as handlers' transactions hold them: of all workers of a Queue. A lane claims
// no more than there are connections for, so that nothing is leased and waits: another worker may have it.
type connections struct {
	mu    sync.Mutex
	lanes map[*lane]bool // those with transactional kinds; true: it has less than its share, and there is no more
	held  atomic.Int32   // by handlers' transactions
}

func (c *connections) join(l *lane) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lanes == nil {
		c.lanes = make(map[*lane]bool)
	}
	c.lanes[l] = false
}

func (c *connections) leave(l *lane) {
	c.mu.Lock()
	delete(c.lanes, l)
	c.mu.Unlock()
	c.wake()
}

// wake tells lanes that have less than their share that something was given back.
func (c *connections) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for l, wants := range c.lanes {
		if wants {
			l.signal()
		}
	}
}

// allow gives how many of its slots a lane may use now. The caller holds mu.
func (c *connections) allow(l *lane) int {
	mine, total, wanted := l.slotsUsed(), 0, false
	for o, wants := range c.lanes {
		total += o.slotsUsed()
		wanted = wanted || wants && o != l
	}
	share := max(1, l.mayHold/max(1, len(c.lanes)))
	may := l.mayHold - (total - mine)
	if wanted && mine >= share {
		may = mine // others first
	}
	// What the application itself holds is not there for handlers either. One may wait for it, so that jobs have their turn.
	stat := l.q.pool.Stat()
	free := int(stat.MaxConns()-stat.AcquiredConns()) - max(0, total-int(c.held.Load()))
	if total == 0 {
		free = max(1, free)
	}
	may = max(0, min(may, mine+max(0, free), l.slots))
	c.lanes[l] = may <= mine && mine < share
	return may
}

// crowd is what watchPool saw.
type crowd struct {
	acquired int64 // connections that were given out, ever
	since    time.Time
	said     time.Time
}

// watchPool says in the log when all connections of the pool are in use and none comes free, while handlers' transactions
// hold some of them: a handler that asks the pool for one more may wait for those that do the same.
func (r *run) watchPool() {
	const sayAgain = time.Minute
	stat, now := r.q.pool.Stat(), time.Now()
	held := r.q.connections.held.Load()
	c := &r.crowd
	if held == 0 || stat.AcquiredConns() < stat.MaxConns() || stat.AcquireCount() != c.acquired {
		c.acquired, c.since = stat.AcquireCount(), now
		r.crowded.Store(false)
		return
	}
	r.crowded.Store(true)
	if now.Sub(c.said) < sayAgain {
		return
	}
	c.said = now
	oldest, count := make(map[string]time.Duration), make(map[string]int)
	r.mu.Lock()
	for _, t := range r.tasks {
		if t.ctx != nil && !t.since.IsZero() && t.h.lease == nil {
			count[t.lease.Kind]++
			oldest[t.lease.Kind] = max(oldest[t.lease.Kind], now.Sub(t.since))
		}
	}
	r.mu.Unlock()
	var kinds []string
	for kind, n := range count {
		kinds = append(kinds, fmt.Sprintf("%d of kind %q for up to %s", n, kind, oldest[kind].Round(time.Millisecond)))
	}
	slices.Sort(kinds)
	r.q.log.Warn("onceq: all connections of the pool are in use and none comes free; a handler that asks the pool for one waits."+
		" Inside of HandleTx use its tx, raise the pool's MaxConns, or lower QueueConfig.Concurrency",
		slog.Int("connections", int(stat.MaxConns())), slog.Int("by handlers' transactions", int(held)),
		slog.String("handlers", strings.Join(kinds, ", ")), slog.Duration("for", now.Sub(c.since)))
}
