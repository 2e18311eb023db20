package task

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/rhythm"
)

// poolWatch logs a warning when all connections of the pool are in use and none becomes free, while handlers
// run or wait for one: a handler that asks the pool for one more may then wait for handlers that do the same,
// or for ever if the application gives none back.
type poolWatch struct {
	crowded atomic.Bool  // that is so now
	from    atomic.Int64 // since when, in nanoseconds, by rhythm.Now

	// Only the beats' goroutine uses these.
	acquired int64 // how many connections the pool had ever given out at the last look
	since    time.Time
	said     time.Time
}

// PoolFull says for how long all connections have been in use without any that became free; 0 if that is not so.
func (s *Set) PoolFull() time.Duration {
	p := &s.pool
	if !p.crowded.Load() {
		return 0
	}
	return rhythm.Now() - time.Duration(p.from.Load())
}

// look is called on every beat.
func (s *Set) look() {
	const sayAgain = time.Minute
	p := &s.pool
	stat, now := s.Store.Pool.Stat(), time.Now()
	held := s.DB.Own.Shares.Held.Load()
	if stat.AcquiredConns() < stat.MaxConns() || stat.AcquireCount() != p.acquired || held == 0 && !s.busy() {
		p.acquired, p.since = stat.AcquireCount(), now
		p.crowded.Store(false)
		return
	}
	p.from.Store(int64(rhythm.At(p.since)))
	p.crowded.Store(true)
	if now.Sub(p.said) < sayAgain {
		return
	}
	p.said = now
	s.Log.Warn("onceq: all connections of the pool are in use and none becomes free; a handler that asks the pool for one"+
		" waits. Inside HandleTx use its tx; give back what the application has acquired; raise the pool's MaxConns, or"+
		" lower QueueConfig.Concurrency",
		slog.Int("connections", int(stat.MaxConns())), slog.Int("by handlers' transactions", int(held)),
		slog.String("handlers", s.inTx(now)), slog.Duration("for", now.Sub(p.since)))
}

// inTx names the handlers that run in transactions.
func (s *Set) inTx(now time.Time) string {
	oldest, count := make(map[string]time.Duration), make(map[string]int)
	s.mu.Lock()
	for _, t := range s.all {
		if t.ctx != nil && !t.since.IsZero() && t.Handler.InTx {
			count[t.Hold.Kind]++
			oldest[t.Hold.Kind] = max(oldest[t.Hold.Kind], now.Sub(t.since))
		}
	}
	s.mu.Unlock()
	var kinds []string
	for kind, n := range count {
		age := oldest[kind].Round(time.Millisecond)
		kinds = append(kinds, fmt.Sprintf("%d of kind %q for up to %s", n, kind, age))
	}
	slices.Sort(kinds)
	return strings.Join(kinds, ", ")
}
