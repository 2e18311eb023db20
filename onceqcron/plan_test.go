package onceqcron

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// A tick does not read the ledger of its schedule, however long that is.
func TestReadSchedule_ReadsNoPastTicks(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	for _, statement := range []string{
		`insert into onceq.schedules (name, owner, spec, zone, missed, queue) values ('n', '', '@every 1m', 'UTC', 'latest 24h0m0s', 'onceqcron')`,
		`insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome) select 'n', now() - n * interval '1 minute', now(), 1, 'fired' from generate_series(1, 20000) n`,
		`analyze onceq.schedule_ticks`,
	} {
		_, err := db.Pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	rows, err := db.Pool.Query(t.Context(), `explain (analyze, costs off, timing off) `+readSchedule, "n")
	require.NoError(t, err)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	text := strings.Join(plan, "\n")
	require.Contains(t, text, "(at >= LEAST(schedules.next_at, statement_timestamp()))", text)
	require.NotContains(t, text, "Rows Removed by Filter", text)
	require.NotContains(t, text, "Seq Scan on schedule_ticks", text)
}
