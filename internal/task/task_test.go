package task

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/quarantine"
)

// losses are the jobs of leases that were lost.
type losses []int64

func (*losses) Lost(*hold.Hold, string) error { return errors.New("lost") }

func (l *losses) Loses(_ context.Context, h *hold.Hold, _ bool, _ error) { *l = append(*l, h.ID) }

// A process that stood still for longer than a lease starts none of the jobs that it had claimed, and says so once for each.
func TestStart_NoJobWhoseLeaseHasPassed(t *testing.T) {
	t.Parallel()
	var lost losses
	s := NewSet(Config{Observer: &lost, Turn: new(quarantine.Turn), Lease: time.Minute, Base: t.Context()})
	now := time.Now()
	at := func(id int64, claimed, extended time.Duration) []*Task {
		return []*Task{{Hold: &hold.Hold{ID: id, Began: now.Add(-claimed)}, extended: now.Add(-extended)}}
	}
	for name, test := range map[string]struct {
		tasks  []*Task
		starts bool
	}{
		"fresh":       {at(1, 30*time.Second, 30*time.Second), true},
		"extended":    {at(2, time.Hour, 30*time.Second), true},
		"its lease":   {at(3, time.Minute, time.Minute), false},
		"long passed": {at(4, time.Hour, time.Hour), false},
	} {
		for range 2 {
			ctx := NewContext(t.Context(), test.tasks)
			require.Equal(t, test.starts, s.Start(test.tasks, ctx, time.Now(), true), name)
			require.Equal(t, test.starts, ctx.Err() == nil, name)
		}
	}
	slices.Sort(lost)
	require.Equal(t, losses{3, 4}, lost)
}
