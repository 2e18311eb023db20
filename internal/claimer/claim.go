package claimer

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plan"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/watch"
)

const turnPatience = time.Second // a claim waits no longer for its turn; as in awaitTurn

// claim claims jobs.
func (c *Claimer) claim(ctx context.Context, a *plan.Claim) {
	if a.Purpose == plan.ClaimOne {
		c.claimOne(ctx, a)
		return
	}
	began, kinds := time.Now(), c.plan.Open
	asks, queues := make([]*Ask, len(a.Parts)), make([]*plan.Queue, len(a.Parts))
	for i := range a.Parts {
		asks[i], queues[i] = c.ask(&a.Parts[i]), a.Parts[i].Queue
	}
	var along *newLook
	if a.New != nil {
		along = &newLook{args: []any{a.New.From, kinds}}
		asks[0].Along = &pg.Along{Statement: stmt.LookForNew, Args: along.args, Read: along.read}
	}
	c.send(ctx, a.Purpose, func() func() {
		err := c.sendClaims(ctx, kinds, asks)
		ended := time.Now()
		return func() {
			if err != nil {
				c.claimFailed(a, queues, err)
			} else {
				c.works(watch.Claim, queues)
				got := make([]plan.Got, len(asks))
				for i, ask := range asks {
					got[i] = c.accept(ask)
				}
				c.plan.Claimed(a, got, along.saw(), began, ended)
			}
			for _, q := range queues {
				c.unreserve(q)
			}
		}
	})
}

// ask is what a claim asks of one queue.
func (c *Claimer) ask(p *plan.Part) *Ask {
	a := &Ask{Queue: p.Queue.Name, Asked: p.Asked, Free: p.Free}
	if p.ByTurns && c.DB.Own.HasTurns(p.Others) && c.Store.Citus.Load() != pg.CitusYes {
		a.Turn = pg.NewTurn(c.Store.Schema, a.Queue, c.plan.Open)
		a.Turn.Others = p.Others
	}
	return a
}

// accept hands out what a claim got of one queue.
func (c *Claimer) accept(a *Ask) plan.Got {
	got := plan.Got{Jobs: a.Jobs, Now: a.Now, Turn: plan.Turn{InVain: a.outOfTurn}}
	if t := a.Turn; t != nil {
		got.Turn = plan.Turn{With: true, Missed: t.Missed, Waited: t.Waited}
	}
	if a.Got() > 0 {
		got.AnyWait = c.Worker.Accept(a.Queue, a.Jobs, a.Began)
	}
	return got
}

// claimFailed is for a claim that failed, or was not sent.
func (c *Claimer) claimFailed(a *plan.Claim, queues []*plan.Queue, err error) {
	changed := errors.Is(err, errPausesChanged)
	if wait := c.plan.ClaimFailed(a, changed, time.Now()); !changed {
		c.failed = err
		c.Troubles.Fails(c.ID, watch.Claim, theOnly(queues), err, slog.Duration("next_try_in", wait))
	}
}

// sendClaims sends a claim of jobs that have lost no lease. The shutdown does not end it at once: a claim
// that commits while nobody waits for its answer leaves leases that have to run out. But however long a lease
// is, a connection that has gone silent keeps the worker from claiming for no longer than pg.SessionLimit. If
// its turn does not come, it is sent without one.
func (c *Claimer) sendClaims(ctx context.Context, kinds []string, asks []*Ask) error {
	unbroken, cancel := pg.Outlast(ctx, min(c.Lease, pg.SessionLimit)+turnPatience)
	defer cancel()
	for {
		if err := c.maySend(unbroken, kinds, asks); err != nil {
			return err
		}
		err := c.Worker.Claim(unbroken, c.DB, kinds, asks)
		first := asks[0]
		if first.Turn == nil || !errors.Is(err, pg.ErrNoTurn) && !pg.NotInTurn(err) {
			return err
		}
		first.Turn, first.outOfTurn = nil, !errors.Is(err, pg.ErrNoTurn)
	}
}

// claimOne claims the first of a queue's jobs in quarantine that is free, and starts it, unless it is another
// job's turn, or this worker has them all.
func (c *Claimer) claimOne(ctx context.Context, a *plan.Claim) {
	q := a.Parts[0].Queue
	few, beside := c.plan.Suspects(q, c.Worker.Held())
	if len(few) == 0 || !c.Turn.Take(beside) {
		c.plan.Answered(plan.ClaimOne)
		c.plan.ClaimFailed(a, true, time.Now())
		c.unreserve(q)
		c.Rouse() // no answer comes, and no handler that ends tells
		return
	}
	ask, kinds := &Ask{Queue: q.Name, Asked: a.Parts[0].Asked}, c.plan.Open
	c.send(ctx, plan.ClaimOne, func() func() {
		gone, err := c.sendOne(ctx, kinds, ask, few)
		return func() {
			if ask.Got() == 0 {
				c.Turn.Passed()
			}
			if err != nil {
				c.claimFailed(a, []*plan.Queue{q}, err)
			} else {
				c.works(watch.Claim, []*plan.Queue{q})
				c.startOne(a, ask, few, gone)
			}
			c.unreserve(q)
		}
	})
}

// sendOne sends the claim of one of a few jobs, which the shutdown does not end at once: see sendClaims.
func (c *Claimer) sendOne(ctx context.Context, kinds []string, ask *Ask, few []int64) (gone int, err error) {
	unbroken, cancel := pg.Outlast(ctx, min(c.Lease, pg.SessionLimit))
	defer cancel()
	if err = c.maySend(unbroken, kinds, []*Ask{ask}); err != nil {
		return 0, err
	}
	return c.Worker.ClaimOne(unbroken, c.DB, kinds, ask, few)
}

// startOne starts what was claimed of a few jobs.
func (c *Claimer) startOne(a *plan.Claim, ask *Ask, few []int64, gone int) {
	if ask.Got() == 0 {
		c.plan.ClaimedOne(a, len(few), false, time.Now())
		return
	}
	one, token := ask.Jobs.First()
	c.plan.ClaimedOne(a, slices.Index(few, one.ID)+1, true, time.Now())
	c.Turn.Start(c.Store, token, quarantine.Probation(gone), one.Lost > 1)
	s := c.slots[a.Parts[0].Queue.N]
	s.Quarantined.Add(1)
	s.Outstanding.Add(int64(s.Width - 1)) // the job has a slot for itself
	c.Worker.Accept(s.Queue, ask.Jobs, ask.Began)
}
