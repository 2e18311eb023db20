package onceqweb

import "time"

// Counting sets where the count before an action on many stops.
func (h *Handler) Counting(limit int, d time.Duration) { h.countLimit, h.countTime = limit, d }
