package onceq

import "sync/atomic"

// slots are where the handlers of one queue run. They count the queue's jobs that are there or on their way: the claimer
// adds, the executor's goroutines, one for each slot, take away.
type slots struct {
	queue   string
	keep    int64 // of history, where the kind does not say: as outcome.keep
	count   int
	width   int  // jobs that one slot takes at once
	pooled  bool // the queue has transactional kinds: each of their running handlers holds a connection of the pool
	mayHold int  // such connections, of all of the worker's queues together

	// What was claimed and waits for its slot. Sending never blocks: there are no more units than jobs, and no more jobs
	// than this are claimed. The claimer's goroutine closes it when it ends.
	ready chan unit

	outstanding atomic.Int64  // jobs claimed or about to be, whose handler has not returned: up by the claimer, down by the executor
	quarantined atomic.Int32  // slots that jobs in quarantine have: the same
	busy        atomic.Int32  // slots that run handlers; the executor's
	returned    atomic.Int64  // jobs whose handlers returned, ever; the executor's
	worked      atomic.Int64  // nanoseconds that they took, one after the other in each slot; the executor's
	low         atomic.Int64  // outstanding at which the claimer wants to hear; the claimer's
	room        chan struct{} // holds one: there may be room
}

func newSlots(w *Worker, queue string, c QueueConfig) *slots {
	s := &slots{
		queue: queue, keep: w.keeps[queue], count: c.Concurrency, width: 1, pooled: w.pooledIn[queue], mayHold: w.mayHold,
		room: make(chan struct{}, 1),
	}
	for _, h := range w.handlers {
		s.width = max(s.width, h.size)
	}
	s.ready = make(chan unit, s.count*s.width+maxPrefetch)
	return s
}

// used is how many slots are in use, or claimed for.
func (s *slots) used() int {
	jobs := int(s.outstanding.Load())
	return min(s.count, max((jobs+s.width-1)/s.width, int(s.busy.Load())))
}

// signal tells the claimer that there may be room.
func (s *slots) signal() {
	select {
	case s.room <- struct{}{}:
	default:
	}
}
