package pairs

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// call is a public call on one of the objects of a scene.
type call struct {
	name  string
	alone bool // it takes no transaction of the caller's
	do    func(ctx context.Context, s *scene, db onceq.DB) error
}

// in is a call that takes the caller's transaction, and own one that does not.
func in(name string, do func(ctx context.Context, s *scene, db onceq.DB) error) call {
	return call{name, false, do}
}

func own(name string, do func(ctx context.Context, s *scene) error) call {
	return call{name, true, func(ctx context.Context, s *scene, _ onceq.DB) error { return do(ctx, s) }}
}

func enqueue(name string, job onceq.Job) call {
	return in("Enqueue, "+name, func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.Enqueue(ctx, db, job)
		return err
	})
}

func with(job onceq.Job, change func(*onceq.Job)) onceq.Job {
	change(&job)
	return job
}

func replacing(j *onceq.Job) { j.Replace, j.Delay = onceq.ReplaceTime, time.Hour }

func cancel(name, job string) call {
	return in("Cancel, "+name, func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.Cancel(ctx, db, s.jobs[job])
		return err
	})
}

func filter(s *scene, jobs ...string) onceqops.Filter {
	var f onceqops.Filter
	for _, name := range jobs {
		f.IDs = append(f.IDs, s.jobs[name])
	}
	return f
}

// send runs a statement in a batch of the caller's.
func send(ctx context.Context, db onceq.DB, add func(*pgx.Batch) error) error {
	b := &pgx.Batch{}
	if err := add(b); err != nil {
		return err
	}
	return db.(interface {
		SendBatch(context.Context, *pgx.Batch) pgx.BatchResults
	}).SendBatch(ctx, b).Close()
}

const lock = "Lease.Lock" // never alone

var errNo = errors.New("no")

// calls are all that change something. TestCalls_AreAll says what is missing.
var calls = []call{
	enqueue("no key", onceq.Job{Kind: "new"}),
	enqueue("new key", named("new")),
	enqueue("key of a due job", named(ready)),
	enqueue("key of a leased job", named(plain)),
	enqueue("key of a leased job in a lane", inLane(lined)),
	enqueue("key of a job that waits", inLane(next)),
	enqueue("key of a dead job", named(dead)),
	enqueue("key that is free again", named(past)),
	enqueue("in the lane", with(inLane("new"), func(j *onceq.Job) { j.Key, j.Window = "", 0 })),
	enqueue("Replace of a due job", with(named(ready), replacing)),
	enqueue("Replace of a job that waits", with(inLane(next), replacing)),
	in("Enqueue, After a leased job", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.Enqueue(ctx, db, onceq.Job{Kind: "new", After: []onceq.JobRef{{ID: s.jobs[lined]}}})
		return err
	}),
	in("EnqueueUnique, new key", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.EnqueueUnique(ctx, db, named("new"))
		return err
	}),
	in("EnqueueMany, new key and one that is free again", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.EnqueueMany(ctx, db, []onceq.Job{named(past), named("new")})
		return err
	}),
	in("EnqueueGroup, a due job is a member", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.EnqueueGroup(ctx, db, []onceq.Job{named(ready), named("new")}, named("then"))
		return err
	}),
	in("EnqueueInBatch, new key", func(ctx context.Context, s *scene, db onceq.DB) error {
		var p *onceq.Pending
		if err := send(ctx, db, func(b *pgx.Batch) (err error) { p, err = s.q.EnqueueInBatch(b, named("new")); return err }); err != nil {
			return err
		}
		_, err := p.Result(ctx, db)
		return err
	}),
	in("Emit, awaited event", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.Emit(ctx, db, scope, awaited, 1)
		return err
	}),
	in("Emit, new event", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.Emit(ctx, db, scope, "new", 1)
		return err
	}),
	cancel("due job", ready),
	cancel("leased job", plain),
	cancel("leased job in a lane", lined),
	cancel("job that waits for its lane", next),
	cancel("job that waits for others", follower),
	cancel("job that awaits an event", waits),
	cancel("job that has lost its lease", expired),
	in("SetLimit", func(ctx context.Context, s *scene, db onceq.DB) error {
		return s.q.SetLimit(ctx, db, limit, onceq.Limit{AtOnce: 2})
	}),
	in("EnsureLimit, new one", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.EnsureLimit(ctx, db, "new", onceq.Limit{AtOnce: 2})
		return err
	}),
	in("EnsureLimit, one that is set", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.EnsureLimit(ctx, db, limit, onceq.Limit{AtOnce: 2})
		return err
	}),
	in("RemoveLimit", func(ctx context.Context, s *scene, db onceq.DB) error { return s.q.RemoveLimit(ctx, db, limit) }),
	in("SetLaneLimit", func(ctx context.Context, s *scene, db onceq.DB) error {
		return s.q.SetLaneLimit(ctx, db, "lanes", "", 2)
	}),
	in("RemoveLaneLimit", func(ctx context.Context, s *scene, db onceq.DB) error {
		return s.q.RemoveLaneLimit(ctx, db, "lanes", "")
	}),
	in("PauseQueue", func(ctx context.Context, s *scene, db onceq.DB) error {
		return s.q.PauseQueue(ctx, db, paused, "again")
	}),
	in("PauseKind", func(ctx context.Context, s *scene, db onceq.DB) error { return s.q.PauseKind(ctx, db, ready, "") }),
	in("Pause, limit", func(ctx context.Context, s *scene, db onceq.DB) error {
		return s.q.Pause(ctx, db, onceq.Pause{Limit: limit})
	}),
	in("ResumeQueue", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.ResumeQueue(ctx, db, paused)
		return err
	}),
	in("ResumeKind", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.ResumeKind(ctx, db, ready)
		return err
	}),
	in("Resume, limit", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.q.Resume(ctx, db, onceq.Pause{Limit: limit})
		return err
	}),
	own("Claim", func(ctx context.Context, s *scene) error {
		_, err := s.q.Claim(ctx, onceq.ClaimOptions{Limit: 10})
		return err
	}),
	in(lock, func(ctx context.Context, s *scene, db onceq.DB) error { return s.of(plain).Lock(ctx, db) }),
	in("Lease.Complete", func(ctx context.Context, s *scene, db onceq.DB) error { return s.of(plain).Complete(ctx, db) }),
	in("Lease.Complete, in a lane", func(ctx context.Context, s *scene, db onceq.DB) error { return s.of(lined).Complete(ctx, db) }),
	in("Lease.Complete, lease over", func(ctx context.Context, s *scene, db onceq.DB) error { return s.of(expired).Complete(ctx, db) }),
	in("Lease.CompleteInBatch", func(ctx context.Context, s *scene, db onceq.DB) error {
		return send(ctx, db, s.of(plain).CompleteInBatch)
	}),
	in("Lease.AddMembers", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.of(lined).AddMembers(ctx, db, onceq.Job{Kind: "new"})
		return err
	}),
	own("Lease.Extend", func(ctx context.Context, s *scene) error { return s.of(plain).Extend(ctx, week) }),
	own("Lease.Release", func(ctx context.Context, s *scene) error { return s.of(plain).Release(ctx) }),
	own("Lease.Release, in a lane", func(ctx context.Context, s *scene) error { return s.of(lined).Release(ctx) }),
	own("Lease.Snooze, in a lane", func(ctx context.Context, s *scene) error { return s.of(lined).Snooze(ctx, time.Hour) }),
	own("Lease.Fail", func(ctx context.Context, s *scene) error { return s.of(plain).Fail(ctx, errNo) }),
	own("Lease.Fail, dead", func(ctx context.Context, s *scene) error { return s.of(plain).Fail(ctx, onceq.Fatal(errNo)) }),
	own("Lease.Fail, dead in a lane", func(ctx context.Context, s *scene) error { return s.of(lined).Fail(ctx, onceq.Fatal(errNo)) }),
	own("Await", func(ctx context.Context, s *scene) error {
		_, _, err := onceq.Await[int](ctx, s.of(plain), scope, awaited, week)
		if errors.Is(err, onceq.ErrLeaseLost) {
			return err
		}
		return nil // any other error is for the handler to return
	}),
	own("Sleep", func(ctx context.Context, s *scene) error {
		if err := onceq.Sleep(ctx, s.of(plain), "sleep", week); errors.Is(err, onceq.ErrLeaseLost) {
			return err
		}
		return nil
	}),
	own("Once, new effect", func(ctx context.Context, s *scene) error {
		_, err := onceq.Once(ctx, s.of(plain), effect, func(context.Context, string) (int, error) { return 1, nil })
		return err
	}),
	own("Once, uncertain effect", func(ctx context.Context, s *scene) error {
		_, err := onceq.Once(ctx, s.of(doubtful), effect, func(context.Context, string) (int, error) { return 1, nil }, onceq.OnUncertain(onceq.RunAgain(week)))
		return err
	}),
	own("Do, new key", func(ctx context.Context, s *scene) error {
		_, err := onceq.Do(ctx, s.q, onceq.FenceSpec{Scope: scope, Key: "new"}, func(context.Context, *onceq.FenceLease) (int, error) { return 1, nil })
		return err
	}),
	in("Fence.Claim, new key", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.fence("new").Claim(ctx, db)
		return err
	}),
	in("Fence.Claim, taken key", func(ctx context.Context, s *scene, db onceq.DB) error {
		if _, err := s.fence("taken").Claim(ctx, db); !errors.Is(err, onceq.ErrInFlight) {
			return err
		}
		return nil
	}),
	in("Fence.Resolve", func(ctx context.Context, s *scene, db onceq.DB) error {
		return s.fence("doubtful").Resolve(ctx, db, onceq.Applied(1))
	}),
	own("FenceLease.Extend", func(ctx context.Context, s *scene) error { return fresh(s.claimed).Extend(ctx, week) }),
	in("FenceLease.Complete", func(ctx context.Context, s *scene, db onceq.DB) error { return fresh(s.claimed).Complete(ctx, db, 1) }),
	in("FenceLease.CompleteInBatch", func(ctx context.Context, s *scene, db onceq.DB) error {
		return send(ctx, db, func(b *pgx.Batch) error { return fresh(s.claimed).CompleteInBatch(b, 1) })
	}),
	in("FenceLease.Release", func(ctx context.Context, s *scene, db onceq.DB) error { return fresh(s.claimed).Release(ctx, db) }),
	in("FenceLease.Uncertain", func(ctx context.Context, s *scene, db onceq.DB) error {
		return fresh(s.claimed).Uncertain(ctx, db, errNo)
	}),
	in("Redrive, dead job", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.Redrive(ctx, db, s.jobs[dead])
		return err
	}),
	in("Redrive, held job", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.Redrive(ctx, db, s.jobs[held])
		return err
	}),
	in("RedriveMany", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, _, err := s.ops.RedriveMany(ctx, db, filter(s, dead))
		return err
	}),
	in("Discard", func(ctx context.Context, s *scene, db onceq.DB) error { return s.ops.Discard(ctx, db, s.jobs[dead]) }),
	in("DiscardMany", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.DiscardMany(ctx, db, filter(s, dead))
		return err
	}),
	in("Resolve, held job", func(ctx context.Context, s *scene, db onceq.DB) error {
		return s.ops.Resolve(ctx, db, s.jobs[held], effect, onceq.Applied(1))
	}),
	in("Resolve, leased job", func(ctx context.Context, s *scene, db onceq.DB) error {
		return s.ops.Resolve(ctx, db, s.jobs[doubtful], effect, onceq.Applied(1))
	}),
	in("ResolveMany", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, _, err := s.ops.ResolveMany(ctx, db, filter(s, held), effect, onceq.Applied(1))
		return err
	}),
	in("Retry, due job", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.Retry(ctx, db, s.jobs[ready])
		return err
	}),
	in("Retry, job that awaits an event", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.Retry(ctx, db, s.jobs[waits])
		return err
	}),
	in("RetryMany", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.RetryMany(ctx, db, filter(s, ready, waits, next))
		return err
	}),
	in("CancelMany", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, _, err := s.ops.CancelMany(ctx, db, filter(s, ready, plain, lined, next))
		return err
	}),
	in("CancelGroup", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, _, err := s.ops.CancelGroup(ctx, db, s.jobs[follower])
		return err
	}),
	in("Move", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.Move(ctx, db, s.jobs[ready], "other")
		return err
	}),
	in("MoveMany", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.MoveMany(ctx, db, filter(s, ready, waits, next), "other")
		return err
	}),
	in("RecordAction", func(ctx context.Context, s *scene, db onceq.DB) error {
		_, err := s.ops.RecordAction(ctx, db, onceqops.Action{Who: "w", What: "x", About: "y"})
		return err
	}),
	own("Reaper.RunOnce", func(ctx context.Context, s *scene) error {
		r, err := onceq.NewReaper(s.q, onceq.ReaperConfig{})
		if err != nil {
			return err
		}
		_, err = r.RunOnce(ctx)
		return err
	}),
	in("any call that only reads", reads),
}
