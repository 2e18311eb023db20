//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"
)

// fleet keeps the worker processes running: this same program with the argument "worker".
type fleet struct {
	exe    string
	places places
	hear   func(report)
	slots  sync.WaitGroup

	mu      sync.Mutex // guards the fields below, and the fields of each process that say so
	closing bool
	procs   []*process
	holder  map[int64]*process // the process that claimed a job last
	fallen  int                // workers that ended although nobody killed them
}

type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{} // closed when it has ended and its last report was read

	open           map[effectID]time.Time // guarded by fleet.mu: effects that have begun and not ended
	frozen, killed bool                   // guarded by fleet.mu
}

type effectID struct {
	job  int64
	name string
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func newFleet(p places, hear func(report)) (*fleet, error) {
	exe, err := os.Executable()
	return &fleet{exe: exe, places: p, hear: hear, holder: make(map[int64]*process)}, err
}

// start starts n workers and replaces any that ends.
func (f *fleet) start(n int) {
	for range n {
		f.slots.Go(func() {
			for {
				p, err := f.spawn()
				if err != nil {
					fmt.Fprintln(os.Stderr, "demo: start a worker:", err)
				}
				if p == nil {
					return
				}
				<-p.ended
				time.Sleep(200 * time.Millisecond)
			}
		})
	}
}

// spawn starts a worker, unless the fleet is closing.
func (f *fleet) spawn() (*process, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing {
		return nil, nil
	}
	where, err := json.Marshal(f.places)
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(f.exe, "worker"), ended: make(chan struct{}), open: make(map[effectID]time.Time)}
	p.cmd.Env = append(os.Environ(), placesEnv+"="+string(where))
	p.cmd.Stderr = os.Stderr
	// A group of its own: a Ctrl-C at the terminal is for the parent. If the parent is killed while this process is
	// stopped, the kernel continues and ends it, because its group is then an orphan.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	f.procs = append(f.procs, p)
	go f.listen(p, out)
	return p, nil
}

func (f *fleet) listen(p *process, out io.Reader) {
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var r report
		if json.Unmarshal(lines.Bytes(), &r) != nil {
			continue // killed in the middle of a line
		}
		f.mu.Lock()
		switch r.Type {
		case "claimed":
			f.holder[r.Job] = p
		case effectBegun:
			p.open[effectID{r.Job, r.Effect}] = time.Now()
		case effectEnded:
			delete(p.open, effectID{r.Job, r.Effect})
		}
		f.mu.Unlock()
		f.hear(r)
	}
	err := p.cmd.Wait()
	f.mu.Lock()
	f.procs = slices.DeleteFunc(f.procs, func(o *process) bool { return o == p })
	if !p.killed && (err != nil || !f.closing) {
		f.fallen++
		fmt.Fprintf(os.Stderr, "demo: worker %d ended by itself: %v\n", p.pid(), err)
	}
	f.mu.Unlock()
	close(p.ended)
}

// kill ends a worker as a power failure would, and reports whether it was in the middle of an effect.
func (f *fleet) kill(p *process) (inside bool) {
	f.mu.Lock()
	p.killed = true
	f.mu.Unlock()
	_ = p.cmd.Process.Kill()
	<-p.ended
	return len(p.open) > 0
}

// any returns a worker that is not frozen, or nil.
func (f *fleet) any(pick func(n int) int) *process {
	f.mu.Lock()
	defer f.mu.Unlock()
	awake := slices.DeleteFunc(slices.Clone(f.procs), func(p *process) bool { return p.frozen || p.killed })
	if len(awake) == 0 {
		return nil
	}
	return awake[pick(len(awake))]
}

// inside returns the worker in which an effect with that name began last.
func (f *fleet) inside(name string) (*process, effectID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var latest time.Time
	var proc *process
	var id effectID
	for _, p := range f.procs {
		for e, began := range p.open {
			if e.name == name && !p.frozen && !p.killed && began.After(latest) {
				proc, id, latest = p, e, began
			}
		}
	}
	return proc, id
}

// stop lets the workers finish their work, and kills those that do not.
func (f *fleet) stop(patience time.Duration) {
	f.mu.Lock()
	f.closing = true
	procs := slices.Clone(f.procs)
	for _, p := range procs {
		_ = p.stdin.Close()
	}
	f.mu.Unlock()
	timer := time.AfterFunc(patience, func() {
		for _, p := range procs {
			f.mu.Lock()
			p.killed = true
			f.mu.Unlock()
			_ = p.cmd.Process.Kill()
		}
	})
	f.slots.Wait()
	timer.Stop()
}
