package onceqsql

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"
)

// An argument's text is read back as the same value. Strings and bytes stay as they are.
func FuzzEncode_IsReadAsItWas(f *testing.F) {
	f.Add("", []byte(nil), int64(0), 0.0, false)
	f.Add(`{"a\",null}`, []byte("\x00\xff"), int64(math.MinInt64), math.Inf(-1), true)
	f.Add("NULL", []byte(`\x00`), int64(math.MaxInt64), math.SmallestNonzeroFloat64, false)
	f.Add("é\u2028\xff\x00", []byte(`a"b`), int64(-1), math.NaN(), true)
	f.Fuzz(func(t *testing.T, text string, bytes []byte, n int64, float float64, truth bool) {
		types := pgtype.NewMap()
		at := moment(n)
		list := []string{strings.ToValidUTF8(text, "x"), "", "NULL", strings.ToValidUTF8(string(bytes), "x")} // pgx parses an array by characters
		out, err := encode(types, []any{
			text, bytes, n, float, truth, at, list, []int64{n, 0}, []int32{int32(n)}, []bool{truth},
			[]time.Time{at}, [][]byte{bytes, {}}, nil, (*string)(nil), (*int64)(nil), []string(nil), []string{}, int16(n), int32(n), &n,
		})
		require.NoError(t, err)
		require.Equal(t, text, out[0])
		if bytes == nil {
			require.Nil(t, out[1])
		} else {
			require.Equal(t, bytes, out[1])
		}
		require.Equal(t, n, read[int64](t, types, out[2]))
		if math.IsNaN(float) {
			require.True(t, math.IsNaN(read[float64](t, types, out[3])))
		} else {
			require.Equal(t, float, read[float64](t, types, out[3]))
		}
		require.Equal(t, truth, read[bool](t, types, out[4]))
		require.True(t, at.Equal(read[time.Time](t, types, out[5])), "%v as %v", at, out[5])
		require.Equal(t, list, read[[]string](t, types, out[6]))
		require.Equal(t, []int64{n, 0}, read[[]int64](t, types, out[7]))
		require.Equal(t, []int32{int32(n)}, read[[]int32](t, types, out[8]))
		require.Equal(t, []bool{truth}, read[[]bool](t, types, out[9]))
		require.True(t, at.Equal(read[[]time.Time](t, types, out[10])[0]))
		require.Equal(t, [][]byte{bytes, {}}, read[[][]byte](t, types, out[11]))
		require.Nil(t, out[12])
		require.Nil(t, out[13])
		require.Nil(t, out[14])
		require.Nil(t, out[15])
		require.Equal(t, []string{}, read[[]string](t, types, out[16]))
		require.Equal(t, int16(n), read[int16](t, types, out[17]))
		require.Equal(t, int32(n), read[int32](t, types, out[18]))
		require.Equal(t, n, read[int64](t, types, out[19]))
	})
}

// read returns what pgx reads from an argument's text.
func read[T any](t *testing.T, types *pgtype.Map, text any) (v T) {
	t.Helper()
	kind, ok := types.TypeForValue(v)
	require.True(t, ok)
	require.IsType(t, "", text)
	require.NoError(t, types.Scan(kind.OID, pgtype.TextFormatCode, []byte(text.(string)), &v), "%q", text)
	return v
}

// moment returns a time that Postgres's text can express: in microseconds, of the years 1 to 9999.
func moment(n int64) time.Time {
	const first, last = -62_135_596_800_000_000, 253_402_300_799_999_999
	return time.UnixMicro(first + int64(uint64(n)%(last-first+1))).UTC()
}

// A driver's value is read back as what was in the column.
func FuzzDecode_IsReadAsItWas(f *testing.F) {
	f.Add("", []byte(nil), int64(0), 0.0, false)
	f.Add(`{"a":1}`, []byte("\x00\xff"), int64(math.MinInt64), math.Inf(1), true)
	f.Add("é\u2028", []byte(`\x00`), int64(math.MaxInt64), math.MaxFloat64, false)
	f.Fuzz(func(t *testing.T, text string, bytes []byte, n int64, float float64, truth bool) {
		types := pgtype.NewMap()
		at := moment(n)
		require.Equal(t, text, decoded[string](t, types, pgtype.TextOID, text))
		require.Equal(t, text, decoded[string](t, types, pgtype.TextOID, []byte(text)))
		if bytes != nil {
			require.Equal(t, bytes, decoded[[]byte](t, types, pgtype.ByteaOID, bytes))
		}
		require.Equal(t, n, decoded[int64](t, types, pgtype.Int8OID, n))
		require.Equal(t, int32(n), decoded[int32](t, types, pgtype.Int4OID, int64(int32(n))))
		require.Equal(t, truth, decoded[bool](t, types, pgtype.BoolOID, truth))
		require.True(t, at.Equal(decoded[time.Time](t, types, pgtype.TimestamptzOID, at)), "%v", at)
		elsewhere := at.In(time.FixedZone("", int(n%50_400)))
		require.True(t, at.Equal(decoded[time.Time](t, types, pgtype.TimestamptzOID, elsewhere)), "%v", elsewhere)
		if !math.IsNaN(float) {
			require.Equal(t, float, decoded[float64](t, types, pgtype.Float8OID, float))
		}
		raw, _ := decode(nil, pgtype.TextOID)
		require.Nil(t, raw)
	})
}

func decoded[T any](t *testing.T, types *pgtype.Map, oid uint32, v any) (out T) {
	t.Helper()
	raw, format := decode(v, oid)
	require.NoError(t, types.Scan(oid, format, raw, &out), "%q", raw)
	return out
}
