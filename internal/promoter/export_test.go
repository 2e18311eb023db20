package promoter

import (
	"context"
	"time"

	"github.com/onceq/onceq/internal/rhythm"
)

var LookAtFamilies = lookAtFamilies

// Look looks once and returns how many calls it found. It looks for all calls at the first look alone. brief says that the
// look may be brief.
func Look(p *Promoter, ctx context.Context, brief bool) (calls int, err error) {
	p.back = rhythm.Pass{}
	if brief {
		p.back.Ended = time.Now().Add(time.Hour)
	}
	did, err := p.promote(ctx)
	p.rescan = time.Now().Add(time.Hour)
	return did.calls, err
}

// Came says that the latest look found calls, BriefFor that looks have been brief for so long, and BeBehind that old calls
// are left from then on, which are next.
func Came(p *Promoter)                      { p.came = true }
func BriefFor(p *Promoter, d time.Duration) { p.wide = p.wide.Add(-d) }
func BeBehind(p *Promoter, since time.Time) { p.onward, p.old = since, true }
