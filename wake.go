package onceq

import (
	"crypto/sha256"
	"encoding/hex"
)

// channel is where workers of this schema listen: short, whatever the schema's name.
func (q *Queue) channel() string {
	sum := sha256.Sum256([]byte(q.schema))
	return "onceq_" + hex.EncodeToString(sum[:8])
}
