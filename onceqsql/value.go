package onceqsql

import (
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// encode prepares arguments for both drivers. They agree on strings, byte slices and nulls, and on little else: lib/pq
// takes no slices and no pointers, and pgx's simple protocol needs to know an argument's type. So encode turns each
// argument into the text that Postgres reads; onceq's statements name the type of each parameter. Bytes stay as they
// are, because lib/pq would encode the text of a bytea again.
func encode(types *pgtype.Map, args []any) ([]any, error) {
	out := make([]any, len(args))
	for i, arg := range args {
		switch v := arg.(type) {
		case nil:
		case string:
			out[i] = v
		case []byte:
			if v != nil {
				out[i] = v
			}
		default:
			t, ok := types.TypeForValue(arg)
			if !ok {
				return nil, fmt.Errorf("onceqsql: argument $%d is a %T, and Postgres has no type for it", i+1, arg)
			}
			text, err := types.Encode(t.OID, pgtype.TextFormatCode, arg, nil)
			if err != nil {
				return nil, fmt.Errorf("onceqsql: argument $%d: %w", i+1, err)
			}
			if text != nil {
				out[i] = string(text)
			}
		}
	}
	return out, nil
}

const timestamp = "2006-01-02 15:04:05.999999Z07:00"

// decode reverses encode. It turns a driver's value of a column back into the text that Postgres sent, and pgx reads
// that. Bytes stay as they are; Postgres calls that the binary format.
func decode(v any, oid uint32) (raw []byte, format int16) {
	switch v := v.(type) {
	case nil:
		return nil, pgtype.TextFormatCode
	case []byte:
		if oid == pgtype.ByteaOID {
			return v, pgtype.BinaryFormatCode
		}
		return v, pgtype.TextFormatCode
	case string:
		return []byte(v), pgtype.TextFormatCode
	case int64:
		return strconv.AppendInt(nil, v, 10), pgtype.TextFormatCode
	case float64:
		return strconv.AppendFloat(nil, v, 'g', -1, 64), pgtype.TextFormatCode
	case bool:
		return strconv.AppendBool(nil, v), pgtype.TextFormatCode
	case time.Time:
		return v.UTC().AppendFormat(nil, timestamp), pgtype.TextFormatCode
	}
	return fmt.Append(nil, v), pgtype.TextFormatCode
}
