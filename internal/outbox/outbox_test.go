package outbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/task"
)

// An outbox that is full makes handlers wait, but not a writer that starts a next job: nobody else would make room.
func TestOutbox_AWriterDoesNotWaitForRoom(t *testing.T) {
	t.Parallel()
	o := New(Config{Set: new(task.Set)})
	o.pending = make([]finish.Outcome, maxPending)
	added := make(chan struct{})
	go func() {
		o.Add(finish.Outcome{}) // a handler's
		close(added)
	}()
	require.Never(t, func() bool {
		select {
		case <-added:
			return true
		default:
			return false
		}
	}, 50*time.Millisecond, 10*time.Millisecond)
	ending := func(n int) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.ending = n
	}
	ending(1)
	o.Add(finish.Outcome{})
	ending(0)
	require.NotEmpty(t, o.take())
	<-added
}
