package claimer

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/onceq/onceq/internal/paused"
)

// obey takes what is known of pauses. A feed of which something was resumed begins anew, because such jobs are before the cursor.
// What was claimed ahead and is paused now is given back.
func (c *Claimer) obey(p *paused.Set) {
	if p == nil || p == c.pauses {
		return
	}
	c.pauses = p
	kinds := p.Open("", c.Kinds)
	changed := !slices.Equal(kinds, c.kinds)
	resumed := slices.ContainsFunc(kinds, func(kind string) bool { return !slices.Contains(c.kinds, kind) })
	c.kinds = kinds
	c.holdsBack = len(kinds) < len(c.Kinds)
	for _, f := range c.feeds {
		paused := len(kinds) == 0 || p.Queues[f.queue]
		c.holdsBack = c.holdsBack || paused
		if changed || paused != f.paused {
			c.obeyIn(f, paused, resumed || f.paused && !paused)
		}
	}
}

// obeyIn takes for one feed that it is paused or open. again says that something of it was resumed.
func (c *Claimer) obeyIn(f *feed, paused, again bool) {
	f.paused, f.plan.anew = paused, f.busy && (f.plan.anew || again)
	f.moves++
	f.quarantine.Forget()
	if paused && f.slots.Pooled {
		c.Shares.WantNone(f.slots)
	}
	if again {
		f.cursor.Restart()
	}
	if !paused {
		c.isDue(f)
	}
	c.Worker.GiveBack(f.queue, func(kind string, _ time.Time) bool { return paused || !slices.Contains(c.kinds, kind) })
}

var errPausesChanged = errors.New("onceq: something was paused or resumed")

// maySend returns errPausesChanged if a claim of these kinds would not be as the pauses say that are known now.
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

// readPaused reads what is paused if no look has done that lately and anything of this worker is.
func (c *Claimer) readPaused(ctx context.Context, now time.Time) bool {
	if c.pauses == nil || now.Sub(c.pauses.At) < paused.Old-paused.Fresh || now.Before(c.looks.notAgain) || !c.holdsBack {
		return false
	}
	c.send(&c.keeps, func() func() {
		_, err := c.Paused.Now(ctx, c.Store, c.DB, paused.Old)
		return func() {
			if err != nil {
				c.lookFailed(ctx, err)
			}
		}
	})
	return true
}
