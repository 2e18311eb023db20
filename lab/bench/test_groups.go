package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq"
)

// groupEffects are the ways in which members of groups complete, and their names.
var groupEffects = []struct{ effect, name string }{
	{noEffect, "handlers on a lease"},
	{rowsInBatch, "100 in one transaction"},
	{oneRow, "in transactions"},
}

// groupName is the name of a drain; groups is 0 for jobs of no group.
func groupName(how string, groups int, held bool) string {
	return snapshotName(map[bool]string{true: "members of groups, ", false: "jobs of no group, "}[groups > 0]+how, held)
}

func followerName(held bool) string {
	return snapshotName("from a group's last member to the job that waited for it", held)
}

func snapshotName(name string, held bool) string {
	if held {
		name += ", snapshot held"
	}
	return name
}

// groupTrials drain members of groups and, for comparison, as many jobs of none; and see how soon the job starts that waits
// for a group.
func groupTrials(b *bench) []trial {
	var trials []trial
	for _, p := range b.peers {
		if p.name != "onceq" {
			continue
		}
		for _, held := range []bool{false, true} {
			for _, how := range groupEffects {
				for _, groups := range []int{0, b.sizes.groups} {
					trials = append(trials, b.groups(p, how.effect, groupName(how.name, groups, held), groups, held))
				}
			}
			trials = append(trials, b.followers(p, held))
		}
		for _, n := range b.sizes.asked {
			trials = append(trials, b.askGroup(p, n))
		}
	}
	return trials
}

const pagesForCall = ": pages for a call"

// askName is the name of a call of Group.
func askName(members int) string { return "Group, of " + count(members) + " members" }

// askGroup asks how a group is doing of whose members all but one are finished. The rows of the others are written as an enqueue
// and a completion write them.
func (b *bench) askGroup(p peer, n int) trial {
	const (
		times = 20
		add   = `insert into onceq.job_members (group_id, job_id, state, told) select $1, -n, 0, true from generate_series(1, $2::bigint) n`
		end   = `update onceq.job_members set state = 5 where group_id = $1 and job_id < 0`
	)
	var group onceq.Group
	return trial{
		test: "groups", variant: askName(n), peer: p, counted: true,
		prepare: func(ctx context.Context, r *room) (err error) {
			q := ours(r)
			if group, err = q.EnqueueGroup(ctx, q.pool, []onceq.Job{plainKind.Job(Task{0})}, plainKind.Job(Task{1})); err != nil {
				return err
			}
			if _, err = q.pool.Exec(ctx, add, group.Then.ID, n-1); err != nil {
				return err
			}
			_, err = q.pool.Exec(ctx, end, group.Then.ID)
			return err
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			q := ours(r)
			o, err := r.observe(ctx)
			if err != nil {
				return nil, err
			}
			defer o.close()
			all := make([]time.Duration, times)
			for i := range all {
				began := time.Now()
				info, err := q.Group(ctx, q.pool, group.Then.ID)
				if err != nil {
					return nil, err
				}
				if all[i] = time.Since(began); info.Total != n {
					return nil, fmt.Errorf("%s", info)
				}
			}
			pages, err := o.pages(ctx)
			return []figure{latencyFigure(askName(n), all), {variant: askName(n) + pagesForCall, unit: "pages", value: float64(pages) / times}}, err
		},
	}
}

// groups drains the members of groups, and the jobs that wait for them, or as many jobs of no group.
func (b *bench) groups(p peer, effect, variant string, groups int, held bool) trial {
	jobs := b.sizes.groups * (b.sizes.members + 1)
	return trial{
		test: "groups", variant: variant, peer: p,
		prepare: func(ctx context.Context, r *room) error {
			// Every ten minutes all lanes and members are looked at, in a new database at once. This does it.
			if _, err := ours(r).Claim(ctx, onceq.ClaimOptions{Limit: 1}); err != nil {
				return err
			}
			if groups == 0 {
				_, err := r.fill(ctx, jobs, false)
				return err
			}
			for g := range groups {
				if err := ours(r).fillGroup(ctx, g*b.sizes.members, b.sizes.members); err != nil {
					return err
				}
			}
			return nil
		},
		measure: func(ctx context.Context, r *room) ([]figure, error) {
			if held {
				release, err := holdSnapshot(ctx, r.url)
				if err != nil {
					return nil, err
				}
				defer release()
			}
			s, err := r.drain(ctx, drain{effect: effect, warm: jobs / 10, total: jobs, limit: b.sizes.limit})
			return rateFigure("jobs/s", s), err
		},
	}
}

// fillGroup enqueues a group of n members, and a job that waits for them with the number after theirs.
func (q *onceqQueue) fillGroup(ctx context.Context, first, n int) error {
	members := make([]onceq.Job, n)
	for i := range members {
		members[i] = plainKind.Job(Task{first + i})
	}
	_, err := q.EnqueueGroup(ctx, q.pool, members, plainKind.Job(Task{first + n}))
	return err
}

// followers enqueues one group after the other for a worker that has nothing else to do, and measures from when the handler
// of the last member returns to when that of the job starts that waits for them.
func (b *bench) followers(p peer, held bool) trial {
	return trial{test: "groups", variant: followerName(held), peer: p, measure: func(ctx context.Context, r *room) ([]figure, error) {
		if held {
			release, err := holdSnapshot(ctx, r.url)
			if err != nil {
				return nil, err
			}
			defer release()
		}
		q, n := ours(r), b.sizes.members
		var done, early atomic.Int64
		var last atomic.Pointer[time.Time]
		started := make(chan time.Duration, 1)
		stop, err := q.run(ctx, onceq.WorkerConfig{}, plainKind.Handle(func(_ context.Context, _ *onceq.Lease, t Task) error {
			if t.N == n {
				if done.Load() != int64(n) {
					early.Add(1)
				}
				started <- time.Since(*last.Load())
				return nil
			}
			now := time.Now()
			last.Store(&now)
			done.Add(1)
			return nil
		}))
		if err != nil {
			return nil, err
		}
		defer stop()
		var all []time.Duration
		for range b.sizes.followers {
			done.Store(0)
			if err := q.fillGroup(ctx, 0, n); err != nil {
				return nil, err
			}
			select {
			case took := <-started:
				all = append(all, took)
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if early.Load() > 0 {
			return nil, fmt.Errorf("%d of %d jobs started before all members of their groups had", early.Load(), len(all))
		}
		return []figure{latencyFigure(followerName(held), all)}, nil
	}}
}
