package watch_test

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/watch"
)

// What fails is listed, with what to do about it, until it works again or its owner ends.
func TestTroubles(t *testing.T) {
	t.Parallel()
	s := &watch.Troubles{Log: slog.New(slog.DiscardHandler)}
	one, other := new(int), new(int)
	require.Empty(t, s.List(nil))
	s.Fails(one, watch.Extend, "", fmt.Errorf("extend: %w", pg.ErrSilent))
	s.Fails(one, watch.Extend, "", fmt.Errorf("extend: %w", pg.ErrSilent))
	s.Fails(other, watch.Claim, "mail", &pgconn.PgError{Code: "25006"})

	all := s.List(nil)
	require.Len(t, all, 2)
	require.Contains(t, all[0].Detail, "extending leases has failed 2 times")
	require.Contains(t, all[0].Advice, "look for what drops connections between this process and the server")
	require.Contains(t, all[1].Detail, `claiming jobs of queue "mail" has failed 1 times`)
	require.Contains(t, all[1].Advice, "connect to the primary")
	require.Equal(t, all[1:], s.List(other, watch.Claim))
	require.Empty(t, s.List(other, watch.Extend))

	s.Works(one, watch.Extend, "")
	require.Equal(t, all[1:], s.List(nil))
	s.Ends(other)
	require.Empty(t, s.List(nil))
}
