package pairs

import (
	"context"
	"fmt"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// reads makes every call that only reads, by the name of its method. They lock no row, so together they are one call.
func reads(ctx context.Context, s *scene, db onceq.DB) error {
	for name, read := range reading(s, db) {
		if err := read(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// read is a call of which the answer does not matter here.
func read[A, T any](do func(context.Context, onceq.DB, A) (T, error), db onceq.DB, a A) func(context.Context) error {
	return func(ctx context.Context) error { _, err := do(ctx, db, a); return err }
}

func reading(s *scene, db onceq.DB) map[string]func(context.Context) error {
	f, id := onceqops.Filter{Limit: 10}, s.jobs[ready]
	all := map[string]func(context.Context) error{
		"Queue.Check":      s.q.Check,
		"Queue.Get":        read(s.q.Get, db, id),
		"Queue.Group":      read(s.q.Group, db, s.jobs[follower]),
		"Queue.GetByKey":   func(ctx context.Context) error { _, err := s.q.GetByKey(ctx, db, ready, ready); return err },
		"Queue.LaneLimit":  func(ctx context.Context) error { _, err := s.q.LaneLimit(ctx, db, "lanes", lane); return err },
		"Queue.AwaitEvent": func(ctx context.Context) error { _, err := s.q.AwaitEvent(ctx, db, scope, known); return err },
		"Queue.Event":      func(ctx context.Context) error { _, _, err := s.q.Event(ctx, db, scope, known); return err },
		"Queue.Wait":       func(ctx context.Context) error { _, err := s.q.Wait(ctx, onceq.JobRef{ID: s.jobs[dead]}); return err },
		"Lease.Now":        func(ctx context.Context) error { _, err := s.of(plain).Now(ctx); return err },
		"Lease.Group":      func(ctx context.Context) error { _, err := s.of(plain).Group(ctx); return err },
		"Lease.Members": func(ctx context.Context) error {
			for range s.of(plain).Members(ctx) {
			}
			return nil
		},
		"Ops.Actions":       read(s.ops.Actions, db, onceqops.ActionFilter{}),
		"Ops.Busy":          read(s.ops.Busy, db, onceqops.WorkerInfo{Queues: map[string]int{onceq.DefaultQueue: 1}}),
		"Ops.CheckPayloads": func(ctx context.Context) error { _, err := s.ops.CheckPayloads(ctx); return err },
		"Ops.Count":         read(s.ops.Count, db, f),
		"Ops.Counts":        read(s.ops.Counts, db, onceqops.CountFilter{}),
		"Ops.Doubts":        func(ctx context.Context) error { _, _, err := s.ops.Doubts(ctx, db, f); return err },
		"Ops.Effects":       func(ctx context.Context) error { _, err := s.ops.Effects(ctx, db, s.jobs[held]); return err },
		"Ops.Explain":       read(s.ops.Explain, db, id),
		"Ops.Groups":        func(ctx context.Context) error { _, err := s.ops.Groups(ctx, db, 0, 10); return err },
		"Ops.GroupsOf":      read(s.ops.GroupsOf, db, s.jobs[lined]),
		"Ops.Health":        func(ctx context.Context) error { _, err := s.ops.Health(ctx); return err },
		"Ops.Keys":          func(ctx context.Context) error { _, err := s.ops.Keys(ctx, db, ready, ready); return err },
		"Ops.Lanes":         read(s.ops.Lanes, db, onceqops.LaneFilter{}),
		"Ops.Limit":         read(s.ops.Limit, db, limit),
		"Ops.Limits":        read(s.ops.Limits, db, onceqops.LimitFilter{}),
		"Ops.List":          read(s.ops.List, db, f),
		"Ops.Members": func(ctx context.Context) error {
			for range s.ops.Members(ctx, db, s.jobs[follower]) {
			}
			return nil
		},
		"Ops.Page":   func(ctx context.Context) error { _, _, err := s.ops.Page(ctx, db, f); return err },
		"Ops.Pauses": func(ctx context.Context) error { _, err := s.ops.Pauses(ctx, db); return err },
		"Ops.Stats":  func(ctx context.Context) error { _, err := s.ops.Stats(ctx); return err },
		"Ops.WithMember": func(ctx context.Context) error {
			_, err := s.ops.WithMember(ctx, db, []int64{id}, "payload.a = 1")
			return err
		},
		"Ops.Workers": func(ctx context.Context) error { _, err := s.ops.Workers(ctx, db); return err },
	}
	f = filter(s, ready, dead, held)
	for name, would := range map[string]func(context.Context, onceq.DB, onceqops.Filter) (onceqops.Choice, error){
		"Cancel": s.ops.WouldCancel, "Discard": s.ops.WouldDiscard, "Move": s.ops.WouldMove,
		"Redrive": s.ops.WouldRedrive, "Resolve": s.ops.WouldResolve, "Retry": s.ops.WouldRetry,
	} {
		all["Ops.Would"+name] = read(would, db, f)
	}
	return all
}

// silent are methods that send nothing, those that a call of the list calls, and one that refuses where anybody has a lease.
var silent = map[string]string{
	"Queue.Fence": "", "Queue.Schema": "", "Queue.Logger": "", "Queue.NewInstallation": "", "Fence.String": "", "FenceLease.IdempotencyKey": "",
	"Lease.IdempotencyKey": "", "Lease.SetResult": "", "Lease.SetWeight": "", "Lease.Progress": "", "Lease.Await": "Await",
	"Reaper.Run": "Reaper.RunOnce", "Worker.Run": "Claim", "Worker.Drain": "Claim", "Worker.Ready": "", "Worker.Alive": "",
}
