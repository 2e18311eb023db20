package onceqops

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
)

// repairs checks a filter for many jobs that are to be changed. Those that are dead are, unless the caller
// has said otherwise.
func (f *Filter) repairs(allowed []onceq.State) error {
	f.byDefault(onceq.StateDead)
	if err := f.check(); err != nil {
		return err
	}
	if f.Limit < 0 {
		return invalid("Filter.Limit", "is negative")
	}
	if !f.All && f.Queue == "" && f.Kind == "" && f.Scope == "" && f.IDs == nil && f.Group == 0 {
		return invalid("Filter", "names no Queue, Kind, Scope, IDs or Group, and would choose the jobs of all of them; name one, or set All if that is meant")
	}
	for _, s := range f.States {
		if !slices.Contains(allowed, s) {
			return invalid("Filter.States", "has %s; possible here: %s", s, allowed)
		}
	}
	return nil
}

// Choice says which jobs a call for many jobs would try. WouldCancel, WouldRetry, WouldRedrive, WouldMove,
// WouldDiscard and WouldResolve return it. They change nothing, and refuse what CancelMany, RetryMany,
// RedriveMany, MoveMany, DiscardMany and ResolveMany refuse.
type Choice struct {
	Count int     `json:"count"` // how many; at most Filter.Limit
	IDs   []int64 `json:"ids"`   // the first hundred, in the order in which they would be tried: newest first
}

// choose counts the jobs that each would go through. It reads the row of every one.
func (q *Ops) choose(ctx context.Context, db onceq.DB, filter Filter,
	allowed []onceq.State) (c Choice, err error) {
	if err := filter.repairs(allowed); err != nil {
		return Choice{}, err
	}
	if c.Count, err = q.Count(ctx, db, filter); err != nil {
		return Choice{}, err
	}
	if filter.Limit = 100; c.Count > 0 {
		filter.Limit = min(filter.Limit, c.Count)
		c.IDs, err = q.ids(ctx, db, filter)
	}
	return c, err
}

// each calls do with the ids of the jobs that the filter chooses, part by part: newest first, where each part
// commits on its own. Parts that commit together lock in the order of a single statement, or two calls would
// meet in a deadlock: all ids are read before. Finished jobs are locked, and go in the order of their keys,
// as absent fences have to; of two with one key the newer gets it. Of live jobs the oldest go first.
func (q *Ops) each(ctx context.Context, db onceq.DB, filter Filter, allowed []onceq.State,
	do func(ids []int64) error) error {
	if err := filter.repairs(allowed); err != nil {
		return err
	}
	tried := 0
	part := func(ids []int64) error {
		if err := do(ids); err != nil {
			return err
		}
		if tried += len(ids); filter.Progress == nil {
			return nil
		}
		return root.Protect(func() error { return filter.Progress(tried) })
	}
	if pg.Outside(db) {
		return filter.pages(ctx, q, db, part)
	}
	var all []int64
	err := filter.pages(ctx, q, db, func(ids []int64) error { all = append(all, ids...); return nil })
	if err != nil {
		return err
	}
	slices.Sort(all)
	if _, past := filter.states(); len(past) > 0 && len(all) > 0 {
		if err := q.store.QueryRow(ctx, db, lockPast, []any{all}, &all, nil); err != nil {
			return fmt.Errorf("onceq: locking jobs: %w", err)
		}
	}
	for ids := range slices.Chunk(all, table.RepairChunk) {
		if err := part(ids); err != nil {
			return err
		}
	}
	return nil
}

// lockPast locks jobs of the history by id, then the fences of their keys by scope and key, and then the jobs
// that wait for them by id: what parts of one call lock. It returns the jobs in the order of their keys.
var lockPast = `
with h as materialized (
  select id, scope, key from onceq.job_history where id = any ($1::bigint[]) order by id for update
),
fence as materialized (
  select from (select * from h where key is not null order by scope, key) s cross join lateral (
         select from onceq.job_fences f where f.key = any (array[s.key]) and f.scope = s.scope
            and f.class + 0 = ` + table.OfJob + ` and f.job_id = s.id for update) f
),
follower as materialized (
  select from (select distinct ` + table.FollowLine("m.group_id") + ` as lane from h cross join lateral (
                      select group_id from onceq.job_members where job_id + 0 = any (array[h.id])) m
                order by 1) g cross join lateral (
         select from onceq.job_waits where lane = any (array[g.lane]) for no key update) w
)
select array(select id from h order by scope, key, id desc),
       (select count(*) from fence) + (select count(*) from follower)`

// pages calls do with the ids of the jobs that the filter chooses, newest first.
func (f *Filter) pages(ctx context.Context, q *Ops, db onceq.DB, do func(ids []int64) error) error {
	page := *f
	for left := f.Limit; ; {
		if page.Limit = table.RepairChunk; left > 0 {
			page.Limit = min(left, table.RepairChunk)
		}
		ids, err := q.ids(ctx, db, page)
		if err != nil || len(ids) == 0 {
			return err
		}
		page.After = ids[len(ids)-1]
		if err := do(ids); err != nil {
			return err
		}
		if left > 0 {
			if left -= len(ids); left <= 0 {
				return nil
			}
		}
	}
}

func (q *Ops) ids(ctx context.Context, db onceq.DB, filter Filter) ([]int64, error) {
	filter.WithoutPayloads = true
	statement, args := filter.statement()
	var ids []int64
	err := q.store.Send(ctx, db, pg.Reading, `select id from (`+statement+`) page`, args, func(rows pgx.Rows) (err error) {
		ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("onceq: list: %w", err)
	}
	return ids, nil
}
