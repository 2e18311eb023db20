package promoter

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Lanes are what Claim remembers of lanes: it promotes, as a worker does. Times are by rhythm.Now.
type Lanes struct {
	Look atomic.Int64 // when Claim last looked for them; -1: there are some
	Turn atomic.Int64 // when Claim last let jobs in, or 0
}

// InTurn promotes once a second: while one lane goes on by itself, others would never begin.
func (t *Lanes) InTurn(ctx context.Context, cfg Config) error {
	last, now := t.Turn.Load(), int64(rhythm.Now())
	if last > 0 && now-last < int64(time.Second) || !t.Turn.CompareAndSwap(last, now) || last == 0 {
		return nil
	}
	_, err := t.Promote(ctx, cfg)
	return err
}

// Promote promotes until no call is left, and at most once a second as long as this process knows of no lanes. It returns
// how many jobs became live.
func (t *Lanes) Promote(ctx context.Context, cfg Config) (jobs int, err error) {
	last, now := t.Look.Load(), int64(rhythm.Now())
	if last > 0 && now-last < int64(time.Second) {
		return 0, nil
	}
	p := New(cfg)
	used := last < 0
	for try := 0; try < table.SettleTries; try++ {
		did, err := p.promote(ctx)
		if err != nil {
			return jobs, err
		}
		jobs += did.jobs
		if used = used || did.calls > 0; did.calls == 0 && !did.more {
			break
		}
	}
	if used {
		now = -1
	}
	t.Look.Store(now)
	return jobs, nil
}

// PutBack inserts what is missing of table.RowsLack. Without rows of lane_locks no promoter counts, and from
// then on each one locks them before it does. The row of lane_calls is looked for under the lock of all, so
// that there is one. Calls may have gone with it, so a call of all lanes comes with the new row.
func PutBack(ctx context.Context, store *pg.Store, log *slog.Logger, pool *pgxpool.Pool, by pg.Way) error {
	const (
		locks = `insert into onceq.lane_locks select pg_catalog.generate_series(0, 15) on conflict do nothing`
		call  = `insert into onceq.lane_calls (due, slot, lane)
values ('infinity', -1, ''), (statement_timestamp(), -1, ` + table.Sep + `)`
	)
	var put int64
	insert := func(db pg.DB, statement string) error {
		tag, err := db.Exec(ctx, store.SQL(statement))
		put += tag.RowsAffected()
		return err
	}
	err := pg.Atomically(ctx, pool, by, func(db pg.DB) error {
		var lacks bool
		err := insert(db, locks)
		if err == nil {
			err = store.QueryRow(ctx, db, stmt.LockLanes, nil, nil)
		}
		if err == nil {
			err = store.QueryRow(ctx, db, table.LacksRows, nil, &lacks, nil)
		}
		if err == nil && lacks { // it has all locks, so it is the call that it lacks
			err = insert(db, call)
		}
		return err
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("onceq: putting back rows of schema %q: %w", store.Schema, err)
	case err != nil: // it is not the error of what the caller wants to do
		return fmt.Errorf("onceq: %s, and could not be put back: %v; a role that may write there does it with: %s; %s",
			table.LinesLack, err, store.SQL(locks), store.SQL(call))
	case put > 0:
		log.Warn("onceq: "+table.LinesLack+"; they were put back; leave these tables out where you empty tables (testing.md)",
			slog.String("schema", store.Schema), slog.Int64("rows", put))
	}
	return nil
}
