package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/onceq/onceq/lab/peers"
)

// patience is how long a story waits for what should happen.
const patience = 40 * time.Second

// process is a process of the system, which does what a story says. A call that fails ends the story; what may fail
// begins with try.
type process struct {
	s    *stage
	name string
	cmd  *exec.Cmd
	said strings.Builder // its standard error, to be read when it has ended
	runs chan *act

	mu     sync.Mutex // guards what follows
	in     io.Writer
	last   int
	waits  map[int]chan message
	acts   map[int]*act
	ended  bool
	killed bool
}

// process starts one, over the stage's database.
func (s *stage) process() *process {
	if p := s.spare; p != nil {
		s.spare = nil
		return p
	}
	return s.processOver(s.url)
}

func (s *stage) processOver(url string) *process {
	cmd, err := s.system.command()
	s.check(err)
	p := &process{
		s: s, name: string(rune('A' + len(s.processes))), cmd: cmd,
		runs: make(chan *act, 100), waits: make(map[int]chan message), acts: make(map[int]*act),
	}
	cmd.Env = append(cmd.Environ(), envURL+"="+url, envRedis+"="+s.redis)
	cmd.Stderr = &p.said
	p.in, err = cmd.StdinPipe()
	s.check(err)
	out, err := cmd.StdoutPipe()
	s.check(err)
	s.check(cmd.Start())
	s.processes = append(s.processes, p)
	ready := make(chan struct{})
	go p.listen(out, ready)
	select {
	case <-ready:
	case <-time.After(patience):
	}
	p.mu.Lock()
	ended := p.ended
	p.mu.Unlock()
	if ended {
		_ = cmd.Wait()
		s.check(fmt.Errorf("process %s did not start: %s", p.name, peers.LastLine(p.said.String())))
	}
	return p
}

// listen hands out what the process says until it has ended.
func (p *process) listen(out io.Reader, ready chan struct{}) {
	begun := sync.OnceFunc(func() { close(ready) })
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		var m message
		if err == nil {
			err = json.Unmarshal(line, &m)
		}
		if err != nil {
			break
		}
		switch m.Event {
		case "ready":
			begun()
		case "started":
			a := &act{p: p, id: m.Run, n: m.N, attempt: m.Attempt, at: time.Now()}
			p.mu.Lock()
			p.acts[m.Run] = a
			p.mu.Unlock()
			p.s.began(a)
			p.runs <- a
		case "called":
			go p.s.answer(p, m)
		default:
			p.mu.Lock()
			wait := p.waits[m.ID]
			delete(p.waits, m.ID)
			p.mu.Unlock()
			if wait != nil {
				wait <- m
			}
		}
	}
	p.mu.Lock()
	p.ended = true
	for _, wait := range p.waits {
		close(wait)
	}
	p.waits = nil
	p.mu.Unlock()
	begun()
}

var errGone = errors.New("the process has ended")

// send sends a command. What it gives is the answer; it is closed when the process ends before.
func (p *process) send(c command) <-chan message {
	p.mu.Lock()
	defer p.mu.Unlock()
	wait := make(chan message, 1)
	if p.ended {
		close(wait)
		return wait
	}
	p.last++
	c.ID = p.last
	p.waits[c.ID] = wait
	line, err := json.Marshal(c)
	if err == nil {
		_, err = p.in.Write(append(line, '\n'))
	}
	if err != nil {
		delete(p.waits, c.ID)
		close(wait)
	}
	return wait
}

// got waits for an answer. That the system has no such thing ends the story.
func (p *process) got(wait <-chan message) (message, error) {
	select {
	case m, ok := <-wait:
		switch {
		case !ok:
			return m, errGone
		case m.Missing != "":
			panic(missing(m.Missing))
		case m.Error != "":
			return m, errors.New(m.Error)
		}
		return m, nil
	case <-time.After(patience):
		return message{}, fmt.Errorf("process %s did not answer in %s", p.name, patience)
	}
}

func (p *process) try(c command) (message, error) { return p.got(p.send(c)) }

func (p *process) do(c command) message {
	m, err := p.try(c)
	if err != nil {
		p.s.check(fmt.Errorf("%s in process %s: %w", c.Do, p.name, err))
	}
	return m
}

// tryEnqueue enqueues jobs in one call, in a transaction or, where tx is "", on its own.
func (p *process) tryEnqueue(tx string, jobs ...job) ([]answer, error) {
	m, err := p.try(command{Do: "enqueue", Tx: tx, Jobs: jobs})
	return m.Answers, err
}

func (p *process) enqueue(tx string, jobs ...job) []answer {
	return p.do(command{Do: "enqueue", Tx: tx, Jobs: jobs}).Answers
}

func (p *process) begin(tx string)      { p.do(command{Do: "begin", Tx: tx}) }
func (p *process) row(tx string, n int) { p.do(command{Do: "row", Tx: tx, N: n}) }
func (p *process) commit(tx string)     { p.do(command{Do: "commit", Tx: tx}) }
func (p *process) rollback(tx string)   { p.do(command{Do: "rollback", Tx: tx}) }
func (p *process) silence()             { p.do(command{Do: "silence"}) }
func (p *process) age()                 { p.do(command{Do: "age"}) }
func (p *process) left() int            { return p.do(command{Do: "left"}).Left }

// work starts a worker, with four handlers and ten seconds to stop unless the crew says otherwise.
func (p *process) work(c crew) {
	if c.AtOnce == 0 {
		c.AtOnce = 4
	}
	if c.StopWithin == 0 {
		c.StopWithin = 10_000
	}
	p.do(command{Do: "work", Crew: &c})
}

// run waits for the next handler that starts in the process; nil if none does in the time.
func (p *process) run(within time.Duration) *act {
	select {
	case a := <-p.runs:
		return a
	case <-time.After(within):
		return nil
	}
}

// mustRun is run for a handler without which there is no story.
func (p *process) mustRun() *act {
	a := p.run(patience)
	if a == nil {
		p.s.check(fmt.Errorf("no handler started in process %s in %s", p.name, patience))
	}
	return a
}

func (p *process) freeze() { p.s.check(p.cmd.Process.Signal(syscall.SIGSTOP)) }
func (p *process) thaw()   { p.s.check(p.cmd.Process.Signal(syscall.SIGCONT)) }

// kill ends the process at once and returns when it has ended.
func (p *process) kill() {
	p.mu.Lock()
	killed := p.killed
	p.killed = true
	p.mu.Unlock()
	if !killed {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}
}

// act is a run of a handler, as a story directs it.
type act struct {
	p          *process
	id         int
	n, attempt int
	at         time.Time // its start
}

// Each step gives the error that the handler got. After one the handler has ended with it, and steps do nothing.
func (a *act) write() error           { return a.step(command{Do: "write", N: a.n}) }
func (a *act) call(name string) error { return a.step(command{Do: "call", Name: name}) }
func (a *act) end() error             { return a.step(command{Do: "end"}) }
func (a *act) finish()                { _ = a.step(command{Do: "finish"}) }
func (a *act) answers(result string)  { _ = a.step(command{Do: "finish", Name: result}) }
func (a *act) fail()                  { _ = a.step(command{Do: "fail"}) }

func (a *act) step(c command) error {
	c.Run = a.id
	_, err := a.p.try(c)
	return err
}
