package onceq

import "sync/atomic"

// slots are where the handlers of one queue run. They count the queue's jobs that are in a slot or on their way to one: the
// claimer adds, and the executor's goroutines, one for each slot, subtract.
type slots struct {
	queue   string
	keep    int64 // how long history is kept if the kind does not say, as in outcome.keep
	count   int
	width   int  // jobs that one slot takes at once
	pooled  bool // the queue has transactional kinds: each of their running handlers holds a connection of the pool
	mayHold int  // how many such connections all of the worker's queues may hold together

	// What was claimed and waits for a slot. Sending never blocks: there are no more units than jobs, and the claimer
	// claims no more jobs than fit. The claimer's goroutine closes the channel when it ends.
	ready chan unit

	outstanding atomic.Int64  // jobs that are claimed or about to be, and whose handler has not returned; the claimer adds, the executor subtracts
	quarantined atomic.Int32  // slots that jobs in quarantine occupy; the claimer adds, the executor subtracts
	busy        atomic.Int32  // slots that run handlers; written by the executor
	returned    atomic.Int64  // jobs whose handlers have ever returned; written by the executor
	worked      atomic.Int64  // nanoseconds that they took, added up; written by the executor
	low         atomic.Int64  // when outstanding falls to this, the claimer wants a signal; written by the claimer
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

// used is how many slots are in use, or have jobs claimed for them.
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
