package onceq

// What tests of package onceq_test may see of the inside: pure functions and limits.
var ScanJSON = scanJSON

const (
	MaxJSONDepth    = maxJSONDepth
	MaxNumberLength = maxNumberLength
	MaxExponent     = maxExponent
	MaxExponents    = maxExponents
)

// Channel is where workers of the queue's schema listen.
func (q *Queue) Channel() string { return q.channel() }
