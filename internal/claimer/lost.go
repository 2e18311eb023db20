package claimer

import (
	"context"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/quarantine"
)

// quarantineDue reports whether a job in quarantine should be claimed before anything else. It alternates with the other
// jobs, so that neither sort waits for all of the other. After a failure the claim of other jobs shows when it is over, so that nobody
// waits for the turn while the database of another schema does not answer.
func (c *Claimer) quarantineDue(f *feed) bool {
	if len(f.quarantine.IDs) == 0 || c.claimsLost || f.quarantine.OthersTurn || c.fails > 0 || int(f.slots.Quarantined.Load()) >= f.mayQuarantine() {
		return false
	}
	_, beside := f.quarantine.Next()
	return c.Turn.Free(c, beside && c.Besides)
}

// mayQuarantine is how many of a feed's handlers may run jobs in quarantine.
func (f *feed) mayQuarantine() int { return max(1, f.slots.Count/2) }

// claimQuarantined claims the first job in quarantine that is free, and starts it, unless it is another job's turn, or
// this worker has them all. In any case other jobs are next.
func (c *Claimer) claimQuarantined(ctx context.Context, f *feed) {
	in := &f.quarantine
	in.OthersTurn = true
	in.Without(c.Worker.Held())
	few, beside := in.Next()
	if len(few) == 0 || c.left == 0 || !c.Turn.Take(beside && c.Besides) {
		c.unreserve(f)
		c.isDue(f)
		c.Rouse() // no answer comes, and no handler that ends tells
		return
	}
	f.busy, f.plan.due, f.plan.again = true, false, time.Time{}
	f.moves++
	c.left--
	ask, kinds := &Ask{Queue: f.queue, Asked: cursor.Asked{Limit: 1}}, c.kinds
	c.send(&c.claimsLost, func() func() {
		gone, err := c.sendQuarantined(ctx, kinds, ask, few)
		return func() { c.startQuarantined(f, ask, few, gone, err) }
	})
}

// sendQuarantined sends the claim of one of a few jobs, which the shutdown does not end at once: see sendClaims.
func (c *Claimer) sendQuarantined(ctx context.Context, kinds []string, ask *Ask, few []int64) (gone int, err error) {
	unbroken, cancel := pg.Outlast(ctx, min(c.Lease, pg.SessionLimit))
	defer cancel()
	if err = c.maySend(unbroken, kinds, []*Ask{ask}); err != nil {
		return 0, err
	}
	return c.Worker.ClaimOne(unbroken, c.DB, kinds, ask, few)
}

// startQuarantined starts what was claimed.
func (c *Claimer) startQuarantined(f *feed, ask *Ask, few []int64, gone int, err error) {
	in, got := &f.quarantine, ask.Got()
	c.left += 1 - got
	if got == 0 {
		c.Turn.Passed()
	}
	if !c.claimed([]*feed{f}, err) {
		return
	}
	f.busy = false
	defer c.unreserve(f)
	c.isDue(f)
	if got == 0 {
		in.Past(len(few))
		in.OthersTurn = false
		return
	}
	one, token := ask.Jobs.First()
	in.Past(slices.Index(few, one.ID) + 1)
	f.latest.found = time.Now()
	c.Turn.Start(c.Store, token, quarantine.Probation(gone), one.Lost > 1)
	f.slots.Quarantined.Add(1)
	f.slots.Outstanding.Add(int64(f.slots.Width - 1)) // the job has a slot for itself
	c.Worker.Accept(f.queue, ask.Jobs, ask.Began)
}
