package onceqweb

import (
	"context"
	"runtime"
	"sync"
	"time"
	"weak"
)

// Counting sets where the count before an action on many stops.
func (h *Handler) Counting(limit int, d time.Duration) { h.countLimit, h.countTime = limit, d }

// Patient is for a machine that stands still for seconds: nothing that a test does not mean to end ends.
func (h *Handler) Patient() {
	h.limits.read, h.limits.act, h.limits.stream = time.Minute, time.Minute, time.Hour
}

// ShowsState sets how old the state may be that a page shows.
func (h *Handler) ShowsState(d time.Duration) { h.limits.state = d }

// MaxCachedBytes is how much a cache may hold.
const MaxCachedBytes = maxCachedBytes

// Cached is how many answers the page keeps, and about how many bytes of those that differ in size.
func (h *Handler) Cached() (n, bytes int) {
	count := func(mu *sync.Mutex, m, b int) {
		mu.Unlock()
		n, bytes = n+m, bytes+b
	}
	h.state.mu.Lock()
	count(&h.state.mu, len(h.state.m), h.state.bytes)
	h.lists.mu.Lock()
	count(&h.lists.mu, len(h.lists.m), h.lists.bytes)
	h.jobs.mu.Lock()
	count(&h.jobs.mu, len(h.jobs.m), h.jobs.bytes)
	h.doubts.mu.Lock()
	count(&h.doubts.mu, len(h.doubts.m), h.doubts.bytes)
	h.series.mu.Lock()
	count(&h.series.mu, len(h.series.m), h.series.bytes)
	h.failed.mu.Lock()
	count(&h.failed.mu, len(h.failed.m), h.failed.bytes)
	return n, bytes
}

// KeptAfter reads answers through a cache that is to keep them for an hour, and says how many are still in memory.
func KeptAfter(n, bytes int) (kept int) {
	h := &Handler{slots: make(chan struct{}, 1), limits: limits{read: time.Minute}}
	c := cache[int, *[]byte]{size: func(b *[]byte) int { return len(*b) }}
	var read []weak.Pointer[[]byte]
	for key := range n {
		_, _ = c.get(context.Background(), h, key, time.Hour, func(context.Context) (*[]byte, error) {
			b := make([]byte, bytes)
			read = append(read, weak.Make(&b))
			return &b, nil
		})
	}
	runtime.GC()
	for _, one := range read {
		if one.Value() != nil {
			kept++
		}
	}
	runtime.KeepAlive(&c)
	return kept
}

// Reads sets how long the page lets the database read.
func (h *Handler) Reads(d time.Duration) { h.limits.read = d }
