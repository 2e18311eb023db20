package onceqotel

const MaxLabels = maxLabels

// Labels is how many labels are kept.
func (t *Telemetry) Labels() (n int) {
	t.metrics.labels.Range(func(any, any) bool { n++; return true })
	return n
}
