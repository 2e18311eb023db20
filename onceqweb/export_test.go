package onceqweb

import "time"

// Counting sets where the count before an action on many stops.
func (h *Handler) Counting(limit int, d time.Duration) { h.countLimit, h.countTime = limit, d }

// Patient is for a machine that stands still for seconds: nothing that a test does not mean to end ends.
func (h *Handler) Patient() {
	h.limits.read, h.limits.act, h.limits.stream = time.Minute, time.Minute, time.Hour
}

// ShowsState sets how old the state may be that a page shows.
func (h *Handler) ShowsState(d time.Duration) { h.limits.state = d }
