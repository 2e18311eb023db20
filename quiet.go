package onceq

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/rhythm"
)

// quietQueues are those for which nobody waited when Enqueue asked. Times are by rhythm.Now.
type quietQueues struct {
	quiet    sync.Map     // queue → *atomic.Int64: until when Enqueue does not ask
	quiets   atomic.Int32 // how many there are in quiet, about; at most remembered
	allQuiet atomic.Int64 // the same as quiet for all queues
}

// isQuiet reports whether Enqueue assumes that nobody waits for a queue. It does for rhythm.QuietFor after it has found that nobody does, counted
// from just before it asked: asking costs small transactions a tenth of their rate. A worker that announces itself looks again after that
// time, and so misses nothing.
func (q *quietQueues) isQuiet(queue string) bool {
	now := int64(rhythm.Now())
	if now < q.allQuiet.Load() {
		return true
	}
	until, ok := q.quiet.Load(queue)
	return ok && now < until.(*atomic.Int64).Load()
}

// setQuiet records the answer that nobody waits. asked is when the statement asked, and zero if it did not.
func (q *quietQueues) setQuiet(queue string, who whoWaits, asked time.Time) {
	if asked.IsZero() || who == someWaits {
		return
	}
	end := int64(rhythm.At(asked) + rhythm.QuietFor)
	if who == nobodyWaits {
		q.allQuiet.Store(end)
		return
	}
	until, ok := q.quiet.Load(queue)
	if !ok {
		if q.quiets.Add(1) > remembered {
			q.quiet.Clear()
			q.quiets.Store(1)
		}
		until, _ = q.quiet.LoadOrStore(queue, new(atomic.Int64))
	}
	until.(*atomic.Int64).Store(end)
}
