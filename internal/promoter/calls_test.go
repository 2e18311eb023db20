package promoter_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/citus"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/promoter"
	"github.com/onceq/onceq/queuetest"
)

// config is for a promoter without a worker.
func config(db *queuetest.DB) promoter.Config {
	return promoter.Config{Store: pg.New(db.Pool, "onceq", func(_ string, err error) error { return err }, citus.Parts{}), Log: slog.Default(), DB: db.Pool,
		Woken: func(string) {}, Cancel: func(context.Context, []int64) error { return nil }}
}

// A call becomes visible late, because its transaction was open for long, while other calls come all the time. Brief looks do not see it,
// and the next look that is not brief does, however long ago the one before was.
func TestPromoter_FindsCallsThatComeLateWhileOthersComeAllTheTime(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	p := promoter.New(config(db))
	call := func(ago time.Duration) {
		_, err := db.Pool.Exec(t.Context(), `
			insert into onceq.lane_calls (slot, due, lane) values (3, statement_timestamp() - $1::bigint * interval '1 microsecond', 'nobody')`, ago.Microseconds())
		require.NoError(t, err)
	}
	look := func(brief bool, calls int) {
		t.Helper()
		n, err := promoter.Look(p, t.Context(), brief)
		require.NoError(t, err)
		require.Equal(t, calls, n)
	}
	for n := 1; n > 0; { // a new schema's first look is for all lanes
		var err error
		n, err = promoter.Look(p, t.Context(), false)
		require.NoError(t, err)
	}
	busy := func() { // others come
		promoter.Came(p)
		call(0)
		look(true, 1)
	}
	busy()
	call(5 * time.Second)
	busy()
	look(true, 0)
	look(true, 1) // it was brief only if the one before found calls

	busy()
	call(5 * time.Second)
	look(true, 0)
	promoter.BeBehind(p, time.Now().Add(-time.Second)) // a look for old calls comes in between, and finds one
	call(500 * time.Millisecond)
	look(true, 1)
	look(true, 1)

	look(false, 0)
	promoter.BriefFor(p, 2*time.Second)
	call(11 * time.Second)
	look(false, 1)

	// Another promoter has the slot, and may not look back as far: the next look does, but by twice the margin at most.
	whileLocked := func(ago ...time.Duration) {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), `select from onceq.lane_locks where slot = 3 for update`)
		require.NoError(t, err)
		for _, d := range ago {
			call(d)
		}
		look(false, 0)
	}
	promoter.BriefFor(p, 2*time.Second)
	whileLocked(11 * time.Second)
	look(false, 1)
	promoter.BriefFor(p, time.Minute)
	whileLocked(18*time.Second, 25*time.Second)
	look(false, 1)
}

// A look at a whole family, or at all lanes, is done in pages, and goes on where somebody else has left it. It waits for no promoter,
// and none waits for it: one look for each of 200,000 lanes held all of them for seconds.
func TestPromoter_AFamilyIsCalledInPagesBesideLockedSlots(t *testing.T) {
	t.Parallel()
	const lanes = 2500
	for _, call := range []string{"many/", "\x1f"} { // the family, and all lanes
		t.Run(fmt.Sprintf("%q", call), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.Schema("onceq"))
			ctx := t.Context()
			kind := onceq.Kind[int]{Name: "many", Lane: func(n int) string { return fmt.Sprint(n) }}
			other := onceq.Kind[int]{Name: "other", Lane: func(int) string { return "one" }}
			for _, family := range []string{"many", "other"} {
				require.NoError(t, db.Queue.SetLaneLimit(ctx, db.Pool, family, "", 0))
			}
			jobs := []onceq.Job{other.Job(0)}
			for n := range lanes - 1 {
				jobs = append(jobs, kind.Job(n))
			}
			_, err := db.Queue.EnqueueMany(ctx, db.Pool, jobs)
			require.NoError(t, err)
			_, err = db.Queue.Claim(ctx, onceq.ClaimOptions{}) // takes no call into account that is there already
			require.NoError(t, err)
			for _, sql := range []string{
				`update onceq.lane_limits set n = 1, lowered = false`,
				`delete from onceq.lane_calls where lane <> ''`,
			} {
				_, err = db.Pool.Exec(ctx, sql)
				require.NoError(t, err)
			}
			if call == "many/" {
				_, err = db.Pool.Exec(ctx, `insert into onceq.lane_calls (slot, due, lane) select get_byte(sha256('other/one'), 0) & 15, statement_timestamp(), 'other/one'`)
				require.NoError(t, err)
			}
			_, err = db.Pool.Exec(ctx, `insert into onceq.lane_calls (slot, due, lane) values (-1, statement_timestamp(), $1)`, call)
			require.NoError(t, err)

			promoters, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			_, err = promoters.Exec(ctx, `select from onceq.lane_locks for update`)
			require.NoError(t, err)
			n, err := promoter.LookAtFamilies(ctx, config(db).Store, db.Pool)
			require.NoError(t, err)
			require.Equal(t, 2000, n)
			dies, err := db.Pool.Begin(ctx) // in the middle of the next page
			require.NoError(t, err)
			_, err = dies.Exec(ctx, `select onceq.call_families(2000)`)
			require.NoError(t, err)
			n, err = promoter.LookAtFamilies(ctx, config(db).Store, db.Pool)
			require.NoError(t, err)
			require.Zero(t, n, "somebody else does it")
			require.NoError(t, dies.Rollback(ctx))
			require.NoError(t, promoters.Rollback(ctx))

			worker, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{},
				kind.Handle(func(context.Context, *onceq.Lease, int) error { return nil }),
				other.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(ctx)
			ended := make(chan error, 1)
			go func() { ended <- worker.Run(ctx) }()
			require.Eventually(t, func() bool {
				var left int
				err := db.Pool.QueryRow(t.Context(), `select (select count(*) from onceq.job_waits) + (select count(*) from onceq.jobs)`).Scan(&left)
				return err == nil && left == 0
			}, 5*time.Minute, 20*time.Millisecond)
			cancel()
			<-ended
		})
	}
}
