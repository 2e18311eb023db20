package onceqcron

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
)

// The table keeps all of a job that it can hold.
func TestStoredJob_IsWhole(t *testing.T) {
	t.Parallel()
	job := onceq.Job{
		Kind: "k", Payload: json.RawMessage(`{"n":1}`), Queue: "q", Key: "a", Scope: "s", Window: time.Hour, Delay: time.Minute,
		Priority: onceq.PriorityHigh, MaxAttempts: 3, Timeout: 90 * time.Second, Metadata: map[string]string{"a": "b"},
		Lane: "l", LaneFamily: "f", LaneRule: onceq.Overtake, Limit: "p",
	}
	stored, err := storeJob(job)
	require.NoError(t, err)
	back, err := readJob(stored)
	require.NoError(t, err)
	require.Equal(t, job, back)
}
