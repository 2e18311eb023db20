package enqueue

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/table"
)

// That nobody waits is believed for a while: of this queue, or of all.
func TestIntake_IsQuiet(t *testing.T) {
	t.Parallel()
	now := time.Now().Add(time.Hour) // the process may stand still
	for _, c := range []struct {
		who        whoWaits
		asked      time.Time
		queue, all bool
	}{
		{someWaits, now, false, false},
		{noneWaits, now, true, false},
		{nobodyWaits, now, true, true},
		{noneWaits, time.Time{}, false, false},
		{nobodyWaits, time.Time{}, false, false},
		{noneWaits, time.Now().Add(-rhythm.QuietFor), false, false},
		{nobodyWaits, time.Now().Add(-rhythm.QuietFor), false, false},
	} {
		in := new(Intake)
		in.setQuiet("one", c.who, c.asked)
		require.Equal(t, c.queue, in.IsQuiet("one"), "%+v", c)
		require.Equal(t, c.all, in.IsQuiet("two"), "%+v", c)
	}
}

// However many queues a process enqueues to, it remembers few.
func TestIntake_QuietQueuesAreBounded(t *testing.T) {
	t.Parallel()
	in := new(Intake)
	for i := range 5 * table.Remembered {
		in.setQuiet(strconv.Itoa(i), noneWaits, time.Now().Add(time.Hour))
	}
	n := 0
	in.Quiet.Range(func(any, any) bool { n++; return true })
	require.LessOrEqual(t, n, table.Remembered)
	require.True(t, in.IsQuiet(strconv.Itoa(5*table.Remembered-1)))
}
