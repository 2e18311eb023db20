package finish

import "testing"

// A job that ends wakes each call that waits for it, and none that waits for another. A call that has ended
// leaves nothing.
func TestWaits(t *testing.T) {
	t.Parallel()
	var w Waits
	a, b, other := make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{}, 1)
	removeA, removeB, removeOther := w.Add(1, a), w.Add(1, b), w.Add(2, other)
	w.Ended(1)
	w.Ended(1) // nobody has read the first value
	removeA()
	<-b
	w.Ended(1)
	removeB()
	removeOther()
	w.Ended(1)
	if len(a) != 1 || len(b) != 1 || len(other) != 0 {
		t.Errorf("values: %d, %d, %d; want 1, 1, 0", len(a), len(b), len(other))
	}
	if len(w.calls) != 0 || w.count.Load() != 0 {
		t.Errorf("left: %v, %d", w.calls, w.count.Load())
	}
}
