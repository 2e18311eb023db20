package onceqotel

const MaxLabels = maxLabels

// Labels returns the number of cached labels.
func (t *Telemetry) Labels() (n int) {
	t.metrics.labels.Range(func(any, any) bool { n++; return true })
	return n
}
