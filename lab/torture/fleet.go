package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// place is what a process is told about itself, and the program that it runs.
type place struct {
	child
	exe string
	env []string
}

// slot keeps a process at a place: it is started again whenever it ends.
type slot struct {
	place

	mu      sync.Mutex // guards the rest
	cmd     *exec.Cmd
	stdin   io.Closer
	closing bool
	faulty  bool // a fault is being done to it, or to its connection
	starts  int  // of the process
	fallen  int  // ends that no fault caused
	panics  int  // ends by a panic
	killed  bool
	gone    chan struct{} // closed when the slot is empty for good
}

func startSlot(p place) (*slot, error) {
	s := &slot{place: p, gone: make(chan struct{})}
	if err := s.spawn(); err != nil {
		return nil, err
	}
	go s.keep()
	return s, nil
}

// spawn starts the process. The caller holds mu, or nobody else knows the slot yet.
func (s *slot) spawn() error {
	raw, err := json.Marshal(s.child)
	if err != nil {
		return err
	}
	cmd := exec.Command(s.exe)
	cmd.Env = append(append(os.Environ(), childEnv+"="+string(raw)), s.env...)
	cmd.Stderr = os.Stderr
	// The process gets a group of its own, because a Ctrl-C at the terminal is meant for the main process only. If the main
	// process dies while this one is stopped, the kernel ends this one, because its group is then an orphan.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if s.stdin, err = cmd.StdinPipe(); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.cmd, s.killed = cmd, false
	s.starts++
	return nil
}

// keep starts the process again whenever it ends.
func (s *slot) keep() {
	defer close(s.gone)
	for {
		_ = s.cmd.Wait() // killed says how it ended
		s.mu.Lock()
		switch code := s.cmd.ProcessState.ExitCode(); {
		case code == panicked:
			s.panics++
		case !s.killed && !s.closing && code != poisoned:
			s.fallen++
		}
		s.mu.Unlock()
		time.Sleep(200 * time.Millisecond) // do not ask a server that is down all the time
		s.mu.Lock()
		var err error
		closing := s.closing
		if !closing {
			err = s.spawn()
		}
		s.mu.Unlock()
		if err != nil {
			fmt.Fprintln(os.Stderr, "torture: start "+s.Slot+":", err)
		}
		if err != nil || closing {
			return
		}
	}
}

func (s *slot) signal(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sig == syscall.SIGKILL {
		s.killed = true
	}
	_ = s.cmd.Process.Signal(sig) // fails only if it has ended by now
}

// stop lets the process end, and kills it if it takes too long.
func (s *slot) stop(patience time.Duration) {
	s.mu.Lock()
	s.closing = true
	_ = s.stdin.Close()
	_ = s.cmd.Process.Signal(syscall.SIGCONT)
	s.mu.Unlock()
	s.await(patience)
}

// end ends the process for good by a signal, and kills it if it takes too long.
func (s *slot) end(sig syscall.Signal, patience time.Duration) {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.signal(sig)
	s.await(patience)
}

func (s *slot) await(patience time.Duration) {
	select {
	case <-s.gone:
	case <-time.After(patience):
		s.signal(syscall.SIGKILL)
		<-s.gone
	}
}

// claimFault takes the slot for one fault. Only one fault at a time may have it.
func (s *slot) claimFault() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.faulty || s.closing {
		return false
	}
	s.faulty = true
	return true
}

func (s *slot) releaseFault() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faulty = false
}
