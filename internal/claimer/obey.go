package claimer

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/plan"
)

// obey takes what is known of pauses. What was claimed ahead and is paused now is given back.
func (c *Claimer) obey(p *paused.Set) {
	if p == nil || p == c.pauses {
		return
	}
	c.pauses = p
	open := p.Open("", c.Kinds)
	for _, q := range c.plan.Paused(open, p.Queues, p.At.Add(paused.Old-paused.Fresh)) {
		all := len(open) == 0 || p.Queues[q.Name]
		if s := c.slots[q.N]; all && s.Pooled {
			c.Shares.WantNone(s)
		}
		c.Worker.GiveBack(q.Name, func(kind string, _ time.Time) bool { return all || !slices.Contains(open, kind) })
	}
}

var errPausesChanged = errors.New("onceq: something was paused or resumed")

// maySend returns errPausesChanged if a claim of these kinds would not be as the pauses say that are known
// now.
func (c *Claimer) maySend(ctx context.Context, kinds []string, asks []*Ask) error {
	old := paused.Old
	if asks[0].Turn != nil {
		old -= turnPatience
	}
	p, err := c.Paused.Now(ctx, c.Store, c.DB, old)
	if err != nil {
		return err
	}
	if !slices.Equal(p.Open("", c.Kinds), kinds) || slices.ContainsFunc(asks, func(a *Ask) bool { return p.Queues[a.Queue] }) {
		return errPausesChanged
	}
	return nil
}

// readPauses reads what is paused.
func (c *Claimer) readPauses(ctx context.Context) {
	c.send(ctx, plan.Upkeep, func() func() {
		_, err := c.Paused.Now(ctx, c.Store, c.DB, paused.Old)
		return func() {
			if err != nil {
				c.lookFailed(ctx, err)
			}
		}
	})
}
