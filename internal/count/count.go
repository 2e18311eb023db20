// Package count counts in memory what becomes of a worker's jobs, and writes that once a minute.
package count

import (
	"slices"
	"time"
)

// Bounds are the upper bounds of the ranges of Count.Durations: of the preferred numbers E12, each of
// which is about 1.2 times the one before, those from a millisecond to 65 minutes. The last range has none.
var Bounds = func() (all [80]time.Duration) {
	unit := 100 * time.Microsecond
	for i := range all {
		if i%12 == 0 && i > 0 {
			unit *= 10
		}
		all[i] = unit * [...]time.Duration{10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68, 82}[i%12]
	}
	return all
}()

// Count is what was counted in some time: see Count of package onceqops.
type Count struct {
	Started   int
	Completed int
	Failed    int
	Dead      int
	Durations []int // how many of each of the ranges
	Took      time.Duration
	Waits     []int
	Due       int
	Oldest    time.Duration
}

// Add adds what was counted elsewhere. Of Due and Oldest, which are no counts, the greater ones stay.
func (c *Count) Add(o Count) {
	c.Started += o.Started
	c.Completed += o.Completed
	c.Failed += o.Failed
	c.Dead += o.Dead
	c.Took += o.Took
	c.Due, c.Oldest = max(c.Due, o.Due), max(c.Oldest, o.Oldest)
	for of, more := range map[*[]int][]int{&c.Durations: o.Durations, &c.Waits: o.Waits} {
		for i, n := range more {
			AddTo(of, i, n)
		}
	}
}

// AddTo adds to an element of a slice, which grows to have it.
func AddTo(ranges *[]int, i, n int) {
	if grow := i + 1 - len(*ranges); grow > 0 {
		*ranges = append(*ranges, make([]int, grow)...)
	}
	(*ranges)[i] += n
}

// RangeOf is the range that a duration belongs to.
func RangeOf(d time.Duration) int {
	i, _ := slices.BinarySearch(Bounds[:], d)
	return i
}
