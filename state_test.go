package onceq

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// Statements that are written whole, and the migration, have the numbers of state.go themselves.
func TestStates_SQLHasTheNumbersOfGo(t *testing.T) {
	migration, err := os.ReadFile("migrations/001_onceq.sql")
	require.NoError(t, err)
	taken := func(scope, key, id string) string {
		return fmt.Sprintf("select %d, %s, %s, %d, %s, %s << %d, ", classJob, scope, key, fenceQueued, id, id, tokenBits)
	}
	for _, c := range []struct{ where, text, want string }{
		{"insertKeyed", insertKeyed, taken("$6::text", "$7::text", "n.id")},
		{"insertKeyedInBatch", insertKeyedInBatch, taken("$6::text", "$7::text", "n.id")},
		{"insertKeyedMany", insertKeyedMany, taken("(select scope from header)", "i.key", "i.id")},
		{"take_fence", string(migration), taken("take_fence.scope", "take_fence.key", "n.id")},
		{"take_fence", string(migration), fmt.Sprintf("token = taken << %d, state = %d,", tokenBits, fenceQueued)},
		{"take_fence", string(migration), fmt.Sprintf("where f.class = %d and f.scope = take_fence.scope", classJob)},
		{"take_fence", string(migration), "and " + fenceOver + " and f.lifetime >= 0"},
		{"ids", string(migration), fmt.Sprintf("maxvalue %d;", int64(1)<<(63-tokenBits)-1)},
		{"claimJobs", claimJobs, fmt.Sprintf("claims = least(j.claims + 1, %d)", claimsLimit)},
		{"claimAny", claimAny, fmt.Sprintf("claims = least(j.claims + 1, %d)", claimsLimit)},
		{"completeOne", completeOne, "where " + heldByOne},
		{"completeOne", completeOne, fmt.Sprintf("set state = %d,", fenceCompleted)},
		{"completeOne", completeOne, fenceOfGone},
		{"completeOneUnkeyed", completeOneUnkeyed, "where " + heldByOne},
		{"completeJobs", completeJobs, "where " + heldByEach},
		{"completeJobs", completeJobs, fmt.Sprintf("set state = %d, token = %s,", fenceCompleted, tokenOfGone)},
		{"completeJobs", completeJobs, fenceOfGone},
		{"completeJobs", completeJobs, "array_agg(" + tokenOfRow + ")"},
		{"jobState", jobState, fmt.Sprintf("statement_timestamp() then %d\n", StateRunning)},
		{"jobState", jobState, fmt.Sprintf("is not null then %d\n", StateRetrying)},
		{"jobState", jobState, fmt.Sprintf("statement_timestamp() then %d\n            else %d end", StateDelayed, StateWaiting)},
	} {
		require.Contains(t, c.text, c.want, c.where)
	}
}

// A number that stands beside a shift or a class in any statement is one that state.go has.
func TestStates_NoOtherNumbers(t *testing.T) {
	for _, file := range []string{"docs/statements.sql", "migrations/001_onceq.sql"} {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		shifts := regexp.MustCompile(`(?:<<|>>) (\d+)`).FindAllStringSubmatch(string(raw), -1)
		classes := regexp.MustCompile(`\bclass(?: \+ 0)? (?:=|<>) (\d+)`).FindAllStringSubmatch(string(raw), -1)
		require.NotEmpty(t, shifts)
		require.NotEmpty(t, classes)
		for _, m := range shifts {
			require.Equal(t, strconv.Itoa(tokenBits), m[1], "%s: %s", file, m[0])
		}
		for _, m := range classes {
			n, err := strconv.Atoi(m[1])
			require.NoError(t, err)
			require.Contains(t, []Class{classJob, ClassRequest, classEffect}, Class(n), "%s: %s", file, m[0])
		}
	}
	for n, s := range []string{sqlQueued, sqlClaimed, sqlUncertain, sqlCompleted, sqlDead, sqlCancelled, sqlHeld} {
		require.Equal(t, strconv.Itoa(n), s)
	}
	require.Equal(t, strconv.Itoa(tokenBits), sqlTokenBits)
}
