package conformance

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// Values of every type that onceq's statements use as an argument come back unchanged.
func valuesComeBack(t *testing.T, set setup) {
	e := set(t)
	tx := e.begin(pgx.ReadCommitted)
	text := func(s string) *string { return &s }
	for _, c := range []struct {
		sqlType string
		value   any
	}{
		{"text", ""}, {"text", `é'"\ $1 {} NULL`}, {"text", text("a")}, {"text", (*string)(nil)},
		{"bytea", []byte{0, 255, '\\'}}, {"bytea", []byte(`\x00`)}, {"bytea", []byte{}}, {"bytea", []byte(nil)},
		{"bigint", int64(-1 << 63)}, {"int", int32(-7)}, {"smallint", int16(7)}, {"int", 42}, {"bool", true}, {"bool", false},
		{"timestamptz", time.Date(2026, 2, 3, 4, 5, 6, 789012000, time.UTC)}, {"timestamptz", time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)},
		{"timestamptz", (*time.Time)(nil)},
		{"text[]", []string{"", "NULL", `a,b`, `"\{}`, "é"}}, {"text[]", []string{}}, {"text[]", []string(nil)},
		{"text[]", []*string{text(""), nil}}, {"bytea[]", [][]byte{{0, 255}, {}, nil}},
		{"bigint[]", []int64{1, -2}}, {"int[]", []int32{3}}, {"smallint[]", []int16{-4}}, {"bool[]", []bool{true, false}},
		{"timestamptz[]", []time.Time{time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC), time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)}},
	} {
		rows, err := tx.DB.Query(t.Context(), `select $1::`+c.sqlType+` as v`, c.value)
		require.NoError(t, err)
		require.True(t, rows.Next(), "%s: %v", c.sqlType, rows.Err())
		got := reflect.New(reflect.TypeOf(c.value))
		require.NoError(t, rows.Scan(got.Interface()), c.sqlType)
		require.Equal(t, inUTC(c.value), inUTC(got.Elem().Interface()), c.sqlType)
		require.Equal(t, "v", rows.FieldDescriptions()[0].Name)
		require.False(t, rows.Next())
		require.NoError(t, rows.Err())
		require.Equal(t, int64(1), rows.CommandTag().RowsAffected())
	}
	var metadata json.RawMessage
	rows, err := tx.DB.Query(t.Context(), `select 1, null, '{"a": "é"}'::jsonb`)
	require.NoError(t, err)
	require.True(t, rows.Next())
	require.NoError(t, rows.Scan(nil, nil, &metadata))
	require.JSONEq(t, `{"a": "é"}`, string(metadata))
	require.Error(t, rows.Scan(nil), "too few")
	rows.Close()

	exec(t, e.Pool, `create table one as select 1 as n`)
	tag, err := tx.DB.Exec(t.Context(), `update one set n = n`)
	require.NoError(t, err)
	require.Equal(t, int64(1), tag.RowsAffected())
}

func inUTC(v any) any {
	switch v := v.(type) {
	case time.Time:
		return v.UTC()
	case []time.Time:
		for i := range v {
			v[i] = v[i].UTC()
		}
	}
	return v
}

// Closing rows that were not read returns the error of a later row: that is how a completion under a lost lease is
// refused.
func rowsClosedUnreadReportTheirError(t *testing.T, set setup) {
	e := set(t)
	for _, statement := range []string{
		`select ` + pgx.Identifier{e.Schema}.Sanitize() + `.lease_lost(1)`,
		`select case when n = 5000 then ` + pgx.Identifier{e.Schema}.Sanitize() + `.lease_lost(n) end from generate_series(1, 5000) n`,
	} {
		rows, err := e.Handles.DB.Query(t.Context(), statement)
		if err == nil {
			rows.Close()
			err = rows.Err()
		}
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, "OQ001", pgErr.Code)
	}
}
