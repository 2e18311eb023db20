package presence

import "time"

// Waited is what the next row says of how long the pool was waited for, if the row before it was written so
// long ago.
func (p *Presence) Waited(ago time.Duration) time.Duration {
	p.counted = time.Now().Add(-ago)
	p.row()
	return p.pool.Wait
}
