package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// signUp makes a tenant on a server.
func (f *fleet) signUp(ctx context.Context, tenant string, s *server) error {
	if first := f.servers[0]; first != s { // a second sign-up fails here
		if _, err := first.pool.Exec(ctx, `insert into tenants (name, moved_to) values ($1, $2)`, tenant, s.name); err != nil {
			return err
		}
	}
	_, err := s.pool.Exec(ctx, `insert into tenants (name) values ($1)`, tenant)
	return err
}

// place stores an order's job on the server on which the tenant lives, in one transaction with what else the application writes
// there. The tenant cannot leave meanwhile.
func (f *fleet) place(ctx context.Context, o order) (res onceq.Result, err error) {
	err = f.atHome(ctx, o.Tenant, func(s *server, tx pgx.Tx, cameFrom *server) error {
		job := ship.Job(o)
		if cameFrom != nil {
			before, err := cameFrom.queue.GetByKey(ctx, cameFrom.pool, job.Scope, job.Key)
			switch {
			case errors.Is(err, onceq.ErrNotFound), err == nil && before.State == onceq.StateCancelled && before.Claims == 0: // or it has moved
			case err != nil:
				return err
			default: // it was done there, or waits there still
				res = onceq.Result{ID: before.ID, Duplicate: true, State: before.State, Output: before.Result}
				return nil
			}
		}
		res, err = s.queue.Enqueue(ctx, tx, job)
		return err
	})
	return res, err
}

// atHome runs fn in a transaction on the server on which a tenant lives. A service remembers where that was, and begins there.
func (f *fleet) atHome(ctx context.Context, tenant string, fn func(s *server, tx pgx.Tx, cameFrom *server) error) error {
	s := f.servers[0]
	for range f.servers {
		var movedTo, cameFrom string
		err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			const where = `select coalesce(moved_to, ''), coalesce(came_from, '') from tenants where name = $1 for share`
			err := tx.QueryRow(ctx, where, tenant).Scan(&movedTo, &cameFrom)
			if err == nil && movedTo == "" {
				err = fn(s, tx, f.named[cameFrom])
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("tenant %q on server %s: %w", tenant, s.name, err)
		}
		if movedTo == "" {
			return nil
		}
		s = f.named[movedTo]
	}
	return fmt.Errorf("tenant %q is moving: try again", tenant)
}

// move moves a tenant to another server, and returns how many of its jobs had begun: they end where they are. After an error, or a
// crash at any place, call it again.
func (f *fleet) move(ctx context.Context, tenant string, from, to *server) (begun int, err error) {
	const fits = `select came_from is null and coalesce(moved_to, $2) = $2 from tenants where name = $1`
	var may bool
	if from == nil || to == nil || from == to {
		return 0, errors.New("name two servers")
	}
	if err := from.pool.QueryRow(ctx, fits, tenant, to.name).Scan(&may); err != nil {
		return 0, fmt.Errorf("tenant %q on server %s: %w", tenant, from.name, err)
	}
	if !may { // when the windows of its keys on the other server are over, set came_from to null
		return 0, fmt.Errorf("tenant %q lives elsewhere, or has come to server %s lately", tenant, from.name)
	}
	// From the second statement on the tenant's enqueues go to the other server. The statement waits for those that are under way.
	_, err = to.pool.Exec(ctx, `insert into tenants (name, came_from) values ($1, $2) on conflict (name) do update set came_from = $2`, tenant, from.name)
	if err != nil {
		return 0, err
	}
	if _, err = from.pool.Exec(ctx, `update tenants set moved_to = $2 where name = $1`, tenant, to.name); err != nil {
		return 0, err
	}
	if _, err = to.pool.Exec(ctx, `update tenants set moved_to = null where name = $1`, tenant); err != nil {
		return 0, err
	}
	for after := int64(0); ; {
		jobs, next, err := onceqops.New(from.queue).Page(ctx, from.pool, onceqops.Filter{Scope: tenant, Kind: ship.Name, After: after,
			States: []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRetrying, onceq.StateRunning}})
		if err != nil {
			return 0, err
		}
		for _, job := range jobs {
			took, err := from.takeOut(ctx, job)
			if err != nil {
				return 0, err
			}
			if !took {
				begun++
			}
		}
		if after = next; next == 0 {
			break
		}
	}
	return begun, to.takeIn(ctx, tenant, from)
}

// takeOut cancels a job that no worker ever had and writes it down, in one transaction.
func (s *server) takeOut(ctx context.Context, job onceq.JobInfo) (took bool, err error) {
	if job.Claims > 0 {
		return false, nil
	}
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after the commit
	state, err := s.queue.Cancel(ctx, tx, job.ID)
	switch {
	case errors.Is(err, onceq.ErrNotFound), err == nil && state != onceq.StateCancelled:
		return false, nil // a worker was faster
	case err != nil:
		return false, err
	}
	if _, err = tx.Exec(ctx, `insert into leaving values ($1, $2, $3)`, job.ID, job.Scope, job); err != nil {
		return false, err
	}
	return true, tx.Commit(ctx)
}

// takeIn enqueues what was written down. A job that is enqueued twice, because a crash came before the delete, is a duplicate.
func (s *server) takeIn(ctx context.Context, tenant string, from *server) error {
	rows, err := from.pool.Query(ctx, `select job from leaving where tenant = $1 order by id`, tenant)
	if err != nil {
		return err
	}
	jobs, err := pgx.CollectRows(rows, pgx.RowTo[onceq.JobInfo])
	if err != nil {
		return err
	}
	for _, was := range jobs {
		var o order
		if err := json.Unmarshal(was.Payload, &o); err != nil {
			return err
		}
		job := ship.Job(o) // with the key, the window, the lane and the limit of its kind
		job.RunAt, job.Priority, job.MaxAttempts, job.Metadata = was.RunAt, was.Priority, was.MaxAttempts, was.Metadata
		if _, err := s.queue.Enqueue(ctx, s.pool, job); err != nil {
			return err
		}
		if _, err := from.pool.Exec(ctx, `delete from leaving where id = $1`, was.ID); err != nil {
			return err
		}
	}
	return nil
}
