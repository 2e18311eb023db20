package queuetest

import (
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Proven is the result of a proof: its steps in words, and its runs by name.
type Proven struct {
	Steps    []string
	Faults   map[string]string // all of them, by name, in words
	Runs     map[string]string // those that were run
	Sample   []string          // names of those that -short leaves
	Failures []string
}

// ProveAll is Prove with its report.
func ProveAll(t testing.TB, proof Proof, only string) (Proven, error) {
	if proof.only == nil && !proof.short {
		proof = AllFaults(proof)
	}
	rep, err := prove(t, proof, only)
	if err != nil {
		return Proven{}, err
	}
	p := Proven{Faults: make(map[string]string), Runs: make(map[string]string), Failures: rep.failures()}
	for _, s := range rep.steps {
		p.Steps = append(p.Steps, s.words)
	}
	for _, f := range faults(rep.steps, true) {
		p.Faults[f.name()] = f.words()
	}
	for _, f := range sample(faults(rep.steps, true)) {
		p.Sample = append(p.Sample, f.name())
	}
	for _, r := range rep.runs {
		p.Runs[r.fault.name()] = r.fault.words()
	}
	return p, nil
}

// AllFaults tries all faults, also with -short.
func AllFaults(proof Proof) Proof {
	proof.only = func(*fault) bool { return true }
	return proof
}

// Sampled tries what -short leaves.
func Sampled(proof Proof) Proof {
	proof.short = true
	return proof
}

// AtOwnSteps leaves out the faults at onceq's statements around the handler's own and its calls. It is for tests of
// what a proof says, not of where it looks.
func AtOwnSteps(proof Proof) Proof {
	proof.only = func(f *fault) bool { return f.step == nil || f.step.own() }
	return proof
}

// AtSecondSteps keeps only the faults at steps that are taken for the second time, by any process.
func AtSecondSteps(proof Proof) Proof {
	proof.only = func(f *fault) bool { return f.step == nil || f.step.nth == 2 }
	return proof
}

// AtSteps keeps only the faults at steps whose words contain one of these.
func AtSteps(proof Proof, words ...string) Proof {
	proof.only = func(f *fault) bool {
		return f.step == nil || slices.ContainsFunc(words, func(w string) bool { return strings.Contains(f.step.words, w) })
	}
	return proof
}

// OfKinds keeps only the faults of these kinds (the first part of their names), at the steps of AtOwnSteps.
func OfKinds(proof Proof, kinds ...string) Proof {
	proof.only = func(f *fault) bool {
		return slices.Contains(kinds, faultNames[f.kind]) && (f.step == nil || f.step.own())
	}
	return proof
}

// Named keeps only the faults with these names.
func Named(proof Proof, names []string) Proof {
	proof.only = func(f *fault) bool { return slices.Contains(names, f.name()) }
	return proof
}

// Deaths keeps only the faults in which the process dies.
func Deaths(proof Proof) Proof {
	proof.only = func(f *fault) bool { return f.kind == dying }
	return proof
}

// Jump moves the database's clock, as that of a machine jumps: the proof does not count it.
func (p *Process) Jump(d time.Duration) { p.run.db.Advance(d) }

// Wired is what passed through a process's connection.
type Wired struct {
	Client []byte // what the server got from the client
	Server []byte // what the client got from the server
	Rest   []byte // what the client sent and the connection still holds: an incomplete message, or one that waits for the server's answer
	Steps  []string
	Err    error
}

// Wire sends what a client and a server say through a connection, in pieces of the given sizes. The connection is cut at
// step number at, counted from 1, or never if at is 0.
func Wire(client, server, pieces []byte, at int, after bool) (got Wired) {
	p := &Process{struck: make(chan struct{}), thaw: make(chan struct{}), conns: make(map[*wire]struct{}), seen: make(map[string]int)}
	if at > 0 {
		steps := Wire(client, nil, nil, 0, false)
		if at > len(steps.Steps) {
			return steps
		}
		_, text, _ := strings.Cut(steps.Steps[at-1], " ")
		p.fault = &fault{kind: cutting, after: after, step: &step{text: text, nth: 1}}
	}
	ends := &recorded{server: server, pieces: append(pieces, 255)}
	w := &wire{Conn: ends, p: p, statements: make(map[string]string), portals: make(map[string]statement)}
	for len(client) > 0 && got.Err == nil && !w.held { // a held connection waits for an answer
		n := min(len(client), ends.piece())
		_, got.Err = w.Write(client[:n])
		client = client[n:]
	}
	got.Rest = append(slices.Clone(w.group), w.in...)
	for buf := make([]byte, 64); got.Err == nil; {
		var n int
		n, got.Err = w.Read(buf[:min(len(buf), ends.piece())])
		got.Server = append(got.Server, buf[:n]...)
	}
	got.Client = ends.client
	for _, s := range p.tape {
		got.Steps = append(got.Steps, strconv.Itoa(s.nth)+" "+s.text)
	}
	return got
}

// WireOver is a process's connection over conn, without a fault.
func WireOver(conn net.Conn) net.Conn {
	p := &Process{struck: make(chan struct{}), thaw: make(chan struct{}), conns: make(map[*wire]struct{}), seen: make(map[string]int)}
	return &wire{Conn: conn, p: p, statements: make(map[string]string), portals: make(map[string]statement)}
}

// recorded is the other end of a connection.
type recorded struct {
	net.Conn
	client, server []byte
	pieces         []byte
	next           int
}

func (r *recorded) piece() int {
	r.next++
	return int(r.pieces[r.next%len(r.pieces)]) + 1
}

func (r *recorded) Write(b []byte) (int, error) {
	r.client = append(r.client, b...)
	return len(b), nil
}

func (r *recorded) Read(b []byte) (int, error) {
	if len(r.server) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), r.piece())], r.server)
	r.server = r.server[n:]
	return n, nil
}

func (r *recorded) Close() error { return nil }
