package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// Minutes are added up for three hours, ten minutes for a day, hours for a month.
func TestStats(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	require.Equal(t, "Workers have counted nothing since then.\n", fine(t, db.URL, "stats"))
	for _, span := range []int{1, 10, 60} {
		_, err := db.Pool.Exec(t.Context(), `
insert into onceq.job_counts (minute, took, started, completed, failed, dead, due, oldest, span, queue, kind, durations, waits)
select date_bin($1::int * interval '1 minute', now(), '2000-01-01') - n * $1::int * interval '1 minute', 0, 10, 9, 2, 1, 7, 90000000, $1::int, 'mail', kind, '{1100,100,0,1}', '{0,0,0,0,0,0,0,0,0,0,0,0,12}'
  from generate_series(-1, 750) n, unnest(array['welcome', 'bill']) kind`, span)
		require.NoError(t, err)
	}
	require.Equal(t, `QUEUE     DONE  FAILED  DEAD  WAIT P50  WAIT P95  RUN P50  RUN P95  DUE  OLDEST
mail     1,080     240   120      10ms      10ms      1ms    1.2ms    7   1m30s
`, fine(t, db.URL, "stats", "--since", "1h"))
	require.Equal(t, `QUEUE  KIND     DONE  FAILED  DEAD  WAIT P50  WAIT P95  RUN P50  RUN P95  DUE  OLDEST
mail   bill       45      10     5      10ms      10ms      1ms    1.2ms    7   1m30s
mail   welcome    45      10     5      10ms      10ms      1ms    1.2ms    7   1m30s
`, fine(t, db.URL, "stats", "mail", "--by-kind", "--since", "5m"))
	done := func(since string) any {
		all := asJSON(t, db.URL, "stats", "--since", since, "--kind", "bill")["stats"].([]any)
		require.Len(t, all, 1)
		return all[0].(map[string]any)["completed"]
	}
	for since, want := range map[string]float64{"3h": 180 * 9, "5h": 30 * 9, "1d": 144 * 9, "2d": 48 * 9, "31d": 744 * 9} {
		require.Equal(t, want, done(since), since)
	}
	for _, since := range []string{"10s", "32d", "-1h", "soon"} {
		require.Equal(t, codeUsage, do(t, db.URL, "stats", "--since="+since).code, since)
	}
}
