// Package rhythm has how often things are repeated that a worker repeats: times that more than one package
// keeps to, and how long the latest run of something took.
package rhythm

import "time"

// What has the same reason has one number.
const (
	QuietFor     = 10 * time.Millisecond  // Enqueue does not ask who waits: that costs its rate a tenth
	Moment       = 20 * time.Millisecond  // what comes often comes within it: after it a queue is idle
	Briefly      = 250 * time.Millisecond // most commits come within it; the longest rest of what waits
	BriefLongest = time.Second            // for so long claims and looks for calls only go back briefly
	LongestNap   = time.Hour              // of what is woken when there is something to do
	RescanEvery  = time.Second            // the shortest lease

	CallMargin    = 10 * time.Second // so much later than they were due calls may become visible
	AllCallsEvery = 30 * time.Second // between two looks for all calls, whatever these cost

	// What is repeated rests for so many times as long as it took, and so takes up no more of the time than
	Fifth     = 5   // while jobs come often,
	Twentieth = 20  // while there was work a short time ago,
	Fiftieth  = 50  // where much of it may be in vain, and
	Hundredth = 100 // while nothing happens.
)

// Pass is the latest run of something that is repeated, by this process's clock.
type Pass struct {
	Ended  time.Time
	Took   time.Duration
	Waited time.Duration // of that, for its turn
}

var start = time.Now()

// Now is how long ago this process started, and At the same of another time.
func Now() time.Duration           { return time.Since(start) }
func At(t time.Time) time.Duration { return t.Sub(start) }
