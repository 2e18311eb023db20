package queuetest

import "testing"

// Proven is what a proof came to: its steps in words, and its runs by their names.
type Proven struct {
	Steps    []string
	Runs     map[string]string // what went wrong, in words
	Failures []string
}

// ProveAll is Prove with its report.
func ProveAll(t testing.TB, proof Proof, only string) (Proven, error) {
	rep, err := prove(t, proof, only)
	if err != nil {
		return Proven{}, err
	}
	p := Proven{Runs: make(map[string]string), Failures: rep.failures()}
	for _, s := range rep.steps {
		p.Steps = append(p.Steps, s.words)
	}
	for _, r := range rep.runs {
		p.Runs[r.fault.name()] = r.fault.words()
	}
	return p, nil
}
