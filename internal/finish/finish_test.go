package finish

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/citus"
	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/pg"
)

var errDead = errors.New("dead")

type deadDB struct{}

func (deadDB) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errDead
}

func (deadDB) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, errDead }

// Everybody locks rows in the order of their ids, on a machine whose ints are short too (GOARCH=386).
func TestWrite_SortsByID(t *testing.T) {
	t.Parallel()
	batch := []Outcome{{Hold: &hold.Hold{ID: 2 + 1<<32}}, {Hold: &hold.Hold{ID: 3}}, {Hold: &hold.Hold{ID: 1 + 3<<31}}}
	told := func(_ string, err error) error { return err }
	_, _, left, err := Write(t.Context(), pg.New(nil, "onceq", told, citus.Parts{}), deadDB{}, pg.Hot, batch, nil)
	require.ErrorIs(t, err, errDead)
	require.Len(t, left, 3)
	require.True(t, slices.IsSortedFunc(batch, func(a, b Outcome) int { return cmp.Compare(a.Hold.ID, b.Hold.ID) }))
}
