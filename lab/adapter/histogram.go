package main

import (
	"math/bits"
	"sync"
	"time"
)

// latencyWindow is the time that the percentiles cover.
const latencyWindow = 30 * time.Second

// histogram counts the durations of the last latencyWindow in microseconds, with a precision of one part in 1,024. Its
// memory does not grow: it has one set of buckets for each second.
type histogram struct {
	mu      sync.Mutex
	seconds [31]second
}

type second struct {
	unix   int64
	counts map[int]int // by bucket
}

func (h *histogram) add(d time.Duration) { h.addAt(time.Now(), d) }

func (h *histogram) addAt(now time.Time, d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &h.seconds[now.Unix()%int64(len(h.seconds))]
	if s.unix != now.Unix() {
		s.unix, s.counts = now.Unix(), make(map[int]int)
	}
	s.counts[bucket(d)]++
}

// quantiles returns the durations below which these shares of the window lie, or zeros if the window is empty.
func (h *histogram) quantiles(now time.Time, shares ...float64) []time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	var counts [buckets]int
	total := 0
	for _, s := range h.seconds {
		if s.unix <= now.Add(-latencyWindow).Unix() {
			continue
		}
		for b, n := range s.counts {
			counts[b] += n
			total += n
		}
	}
	found := make([]time.Duration, len(shares))
	for i, share := range shares {
		before := 0
		for b, n := range counts {
			if before += n; n > 0 && float64(before) >= share*float64(total) {
				found[i] = upper(b)
				break
			}
		}
	}
	return found
}

const (
	exact   = 2048 // microseconds with a bucket of their own
	steps   = 1024 // buckets for each doubling from there on
	buckets = exact + steps*32
)

// bucket returns the bucket of a duration. There are 1,024 equal steps from each power of two to the next.
func bucket(d time.Duration) int {
	us := uint64(max(0, d.Microseconds()))
	if us < exact {
		return int(us)
	}
	shift := bits.Len64(us) - 11 // leaves 1,024 to 2,047
	return min(buckets-1, exact+(shift-1)*steps+int(us>>shift)-steps)
}

// upper returns the longest duration in a bucket.
func upper(b int) time.Duration {
	us := uint64(b)
	if b >= exact {
		shift := (b-exact)/steps + 1
		us = uint64((b-exact)%steps+steps+1)<<shift - 1
	}
	return time.Duration(us) * time.Microsecond
}
