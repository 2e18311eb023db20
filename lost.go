package onceq

import (
	"context"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/stmt"
)

// quarantineDue reports whether a job in quarantine should be claimed before anything else. It alternates with the other
// jobs, so that neither sort waits for all of the other. After a failure the claim of other jobs shows when it is over, so that nobody
// waits for the turn while the database of another schema does not answer.
func (c *claimer) quarantineDue(f *feed) bool {
	if len(f.quarantine.IDs) == 0 || c.claimsLost || f.quarantine.OthersTurn || c.fails > 0 || int(f.slots.quarantined.Load()) >= f.mayQuarantine() {
		return false
	}
	_, beside := f.quarantine.Next()
	return c.q.quarantine.Free(c, beside && c.w.besides)
}

// mayQuarantine is how many of a feed's handlers may run jobs in quarantine.
func (f *feed) mayQuarantine() int { return max(1, f.slots.count/2) }

// claimQuarantined claims the first job in quarantine that is free, and starts it.
func (c *claimer) claimQuarantined(ctx context.Context, f *feed) {
	q := c.askQuarantined(f)
	if q == nil {
		c.Rouse() // no answer comes, and no handler that ends tells
		return
	}
	c.send(&c.claimsLost, func() func() {
		err := q.send(ctx)
		return func() { c.startQuarantined(q, err) }
	})
}

// quarantineClaim is a claim of one of a feed's jobs in quarantine.
type quarantineClaim struct {
	c   *claimer
	f   *feed
	few []int64 // the jobs from which it chooses
	ask claim

	kinds []string // that are not paused
}

// askQuarantined prepares a claim, or returns nil if it is another job's turn, or if this worker has them all. In any case other
// jobs are next.
func (c *claimer) askQuarantined(f *feed) *quarantineClaim {
	in := &f.quarantine
	in.OthersTurn = true
	in.Without(c.exec.tasks.held())
	few, beside := in.Next()
	if len(few) == 0 || c.left == 0 || !c.q.quarantine.Take(beside && c.w.besides) {
		c.unreserve(f)
		c.isDue(f)
		return nil
	}
	f.busy, f.due, f.again = true, false, time.Time{}
	f.moves++
	c.left--
	return &quarantineClaim{c: c, f: f, kinds: c.kinds, few: few, ask: claim{queue: f.queue, Asked: cursor.Asked{Limit: 1}}}
}

// send sends the claim, which the shutdown does not end at once: see claimer.sendClaims.
func (q *quarantineClaim) send(ctx context.Context) error {
	lease := q.c.w.lease
	unbroken, cancel := pg.Outlast(ctx, min(lease, pg.SessionLimit))
	defer cancel()
	if err := q.c.maySend(unbroken, q.kinds, []*claim{&q.ask}); err != nil {
		return err
	}
	return q.c.q.claim(unbroken, q.c.db, lease, q.c.id, []*claim{&q.ask}, stmt.ClaimOne, q.few, q.f.queue, q.kinds)
}

// startQuarantined starts what was claimed.
func (c *claimer) startQuarantined(q *quarantineClaim, err error) {
	f, in := q.f, &q.f.quarantine
	c.left += 1 - len(q.ask.leases)
	if err != nil || len(q.ask.leases) == 0 {
		c.q.quarantine.Passed()
	}
	if !c.claimed([]*feed{f}, err) {
		return
	}
	f.busy = false
	defer c.unreserve(f)
	c.isDue(f)
	if len(q.ask.leases) == 0 {
		in.Past(len(q.few))
		in.OthersTurn = false
		return
	}
	one := q.ask.leases[0]
	in.Past(slices.Index(q.few, one.ID) + 1)
	f.found = time.Now()
	c.q.quarantine.Start(c.q.store, one.Token, quarantine.Probation(DefaultMaxLost-c.w.handlers[one.Kind].maxLost+one.Lost), one.Lost > 1)
	f.slots.quarantined.Add(1)
	f.slots.outstanding.Add(int64(f.slots.width - 1)) // the job has a slot for itself
	c.exec.accept(f.slots, q.ask.leases, q.ask.began)
}
