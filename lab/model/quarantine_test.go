package model

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// The second model is about a job that ends its process, the poison job, and innocent jobs beside it in several
// processes. Each process claims more than it runs. A job that has lost a lease is a suspect. A process runs one
// suspect at a time and claims one only if it can start it at once. A lost lease counts only if the job was started. Suspects
// that have lost one lease may run beside each other: how many do depends on how the ones before ended, and here any number may.
// The poison may also fail in a way that its process survives, which spends an attempt and sets its lost leases back, but
// not to none: it stays a suspect. An honest job may be snoozed, which shows that it is none.
//
// This model leaves out fences, tokens and effects, which the first model has. Here a lost lease costs only time.

const (
	quarantineJobs    = 4 // the first is the poison job
	quarantineSlots   = 2
	quarantineAhead   = 1 // how many are claimed beyond what runs
	quarantineMaxLost = 3
	quarantineTries   = 4 // failures until the poison is dead
)

// quarantine is a variant: its mistakes must be found by the checks.
type quarantine struct {
	suspectsWait     bool // a suspect is claimed while another one runs, and waits with its lease
	claimsCount      bool // a lost lease counts although the job was not started
	suspectsTogether bool // a process runs several suspects at once, however many leases they have lost
	besideOne        bool // one that has lost a single lease starts beside one that has lost more
	failureClears    bool // a job that failed is no longer a suspect
}

type place int8

const (
	waiting place = iota
	leased
	started
	orphaned // its process is gone and its lease has not expired yet
	done
	dead
)

type quarantined struct {
	place place
	by    int8 // the worker that has leased or started it
	lost  int8
	began bool // for orphaned: it was started
	fails int8
}

func (j quarantined) suspect() bool { return j.lost > 0 }

type ward [quarantineJobs]quarantined

func (w ward) count(worker int8, is func(quarantined) bool) (n int) {
	for _, j := range w {
		if (j.place == leased || j.place == started) && j.by == worker && is(j) {
			n++
		}
	}
	return n
}

func running(j quarantined) bool { return j.place == started }

// starts reports whether a worker has a free slot for a job now.
func (v quarantine) starts(w ward, worker int8, j quarantined) bool {
	if w.count(worker, running) >= quarantineSlots {
		return false
	}
	suspects := w.count(worker, func(j quarantined) bool { return running(j) && j.suspect() })
	often := w.count(worker, func(j quarantined) bool { return running(j) && j.lost > 1 })
	return !j.suspect() || suspects == 0 || v.suspectsTogether || j.lost == 1 && (often == 0 || v.besideOne)
}

// claims reports whether a worker claims a job.
func (v quarantine) claims(w ward, worker int8, j quarantined) bool {
	held := w.count(worker, func(quarantined) bool { return true })
	switch {
	case j.place != waiting:
		return false
	case j.suspect() && !v.suspectsWait:
		return v.starts(w, worker, j)
	}
	return held < quarantineSlots+quarantineAhead
}

func (v quarantine) next(w ward) (all []move[ward]) {
	step := func(name string, do func(*ward)) {
		n := w
		do(&n)
		all = append(all, move[ward]{name, n})
	}
	for i, j := range w {
		name := fmt.Sprint("honest job ", i)
		if i == 0 {
			name = "the poison"
		}
		for worker := range int8(workers) {
			if v.claims(w, worker, j) {
				step(fmt.Sprintf("worker %d claims %s", worker, name), func(n *ward) {
					n[i].place, n[i].by = leased, worker
					if j.lost >= quarantineMaxLost {
						n[i].place = dead
					} else if j.suspect() && !v.suspectsWait {
						n[i].place = started
					}
				})
			}
		}
		switch {
		case j.place == leased && v.starts(w, j.by, j):
			step(fmt.Sprintf("worker %d starts %s", j.by, name), func(n *ward) { n[i].place = started })
		case j.place == started && i > 0:
			step(name+" is completed", func(n *ward) { n[i] = quarantined{place: done} })
			step(name+" is snoozed", func(n *ward) { n[i] = quarantined{place: waiting} })
		case j.place == started:
			step("the poison fails", func(n *ward) {
				n[i] = quarantined{place: waiting, lost: min(j.lost, 1), fails: j.fails + 1}
				if v.failureClears {
					n[i].lost = 0
				}
				if n[i].fails == quarantineTries {
					n[i] = quarantined{place: dead}
				}
			})
			step("the poison ends its process", func(n *ward) {
				for k := range n {
					if o := &n[k]; (o.place == leased || o.place == started) && o.by == j.by {
						o.began = o.place == started
						o.place = orphaned
					}
				}
			})
		case j.place == orphaned:
			step("the lease of "+name+" runs out", func(n *ward) {
				o := &n[i]
				if o.began || v.claimsCount {
					o.lost++
				}
				o.place, o.began, o.by = waiting, false, 0
			})
		}
	}
	return all
}

// wrong returns the property that a state breaks.
func (v quarantine) wrong(w ward) string {
	for i, j := range w {
		if i > 0 && j.place == dead {
			return "an honest job is dead"
		}
		if j.place != waiting || j.suspect() {
			continue
		}
		for worker := range int8(workers) {
			if w.count(worker, running) == quarantineSlots || v.claims(w, worker, j) {
				continue
			}
			fresh := false
			for _, o := range w {
				fresh = fresh || o.place == leased && o.by == worker && !o.suspect() // and it starts
			}
			if !fresh {
				return "a fresh job waits beside a free slot"
			}
		}
	}
	return ""
}

// explore visits every state, as variant.explore does. If only is not empty, it checks only that property.
func (v quarantine) explore(only string) (states int, wrong string) {
	return explore(ward{}, v.next, func(w ward) string {
		if what := v.wrong(w); only == "" || what == only {
			return what
		}
		return ""
	}, func(w ward) bool {
		return w[0].place == dead && !slices.ContainsFunc(w[1:], func(j quarantined) bool { return j.place != done })
	}, "from here the poison cannot die, or an honest job not be completed")
}

func TestQuarantine(t *testing.T) {
	t.Parallel()
	states, wrong := quarantine{}.explore("")
	t.Logf("%d states", states)
	if wrong != "" {
		t.Fatal(wrong)
	}
	if states < 5_000 {
		t.Fatalf("only %d states: steps that should be possible are not", states)
	}
}

// This tests the checks themselves: they must find each mistake.
func TestQuarantine_FindsMistakes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		quarantine
		want string
	}{
		{quarantine{suspectsWait: true}, "a fresh job waits beside a free slot"},
		{quarantine{suspectsTogether: true}, "an honest job is dead"},
		{quarantine{besideOne: true}, "an honest job is dead"},
		{quarantine{suspectsWait: true, claimsCount: true}, "an honest job is dead"},
		{quarantine{failureClears: true}, "an honest job is dead"},
	} {
		t.Run(fmt.Sprintf("%+v", c.quarantine), func(t *testing.T) {
			t.Parallel()
			_, wrong := c.explore(c.want)
			t.Log(wrong)
			if !strings.HasPrefix(wrong, c.want) {
				t.Fatalf("found: %q", wrong)
			}
		})
	}
}
