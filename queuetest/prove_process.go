package queuetest

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/pg"
)

// Process is one process of an application under Prove. It has everything that a handler works with. Prove sees and
// controls everything that the handler does through these fields. When the process is to die, all of it ends at once
// and for ever.
type Process struct {
	// Pool is the application's own pool, for handlers that work outside their lease's transaction.
	Pool *pgxpool.Pool

	// Queue works over Pool.
	Queue *onceq.Queue

	// Client is for calls to the outside. Give its Transport to a library that takes an http.RoundTripper.
	Client *http.Client

	name string // as in its sessions' application_name
	run  *proofRun
	ctx  context.Context // of its worker
	end  context.CancelFunc

	release func() // closes its worker's own connections

	done chan struct{} // closed when its work has returned

	mu        sync.Mutex
	fault     *fault // until it has happened
	struck    chan struct{}
	thaw      chan struct{} // closed to let frozen goroutines go on
	frozenAt  time.Duration // how far the run had advanced its clock by then
	frozenFor time.Duration // how long it was frozen, by the clock of the database
	dead      bool
	conns     map[*wire]struct{}
	seen      map[string]int // number of steps so far, by their text
	tape      []*step
	leased    bool
	handling  context.Context // of the latest handler that began
	stopping  func(*wire)     // shuts the worker down when a handler begins; nil for never
	once      effect          // the effect of onceq.Once that is running
	job       int64
	attempt   int
	token     int64
	last      error          // the last error that a handler returned
	stolen    map[int64]bool // jobs whose lease was taken away when they first began; nil to take none away
}

func (r *proofRun) process(f *fault) (*Process, error) {
	p := &Process{
		name: fmt.Sprintf("prove %d", len(r.processes)+1), run: r, fault: f, done: make(chan struct{}),
		struck: make(chan struct{}), thaw: make(chan struct{}),
		conns: make(map[*wire]struct{}), seen: make(map[string]int),
	}
	p.ctx, p.end = context.WithCancel(context.Background())
	p.Client = &http.Client{Transport: transport{p}}
	config, err := pgxpool.ParseConfig(r.db.URL)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 10
	config.ConnConfig.RuntimeParams["application_name"] = p.name
	p.tap(config)
	if p.Pool, err = pgxpool.NewWithConfig(context.Background(), config); err != nil {
		return nil, err
	}
	// Nobody needs the log of a process that is killed on purpose.
	p.Queue, err = onceq.New(p.Pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler), Hook: onceq.HookFunc(p.event)})
	if err == nil {
		bridge.Alone(p.Queue)
		p.release, err = pg.Keep(context.Background(), p.Pool)
	}
	if err != nil {
		p.Pool.Close()
		return nil, err
	}
	r.processes = append(r.processes, p)
	return p, nil
}

func (p *Process) event(_ context.Context, e onceq.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case e.Type == onceq.EventReplayed && e.Name != "":
		// An effect of a job that was done before has no new outcome. Its Ask has said that it was done.
		about := effect{strconv.FormatInt(e.JobID, 10), e.Name}
		i := len(p.tape) - 1
		for i >= 0 && p.tape[i].effect != about {
			i--
		}
		if i >= 0 && p.tape[i].role == roleOutcome {
			p.run.answer(about, true)
		}
	case e.Name != "" || e.JobID == 0:
	case e.Type == onceq.EventClaimed:
		p.job, p.attempt, p.token = e.JobID, e.Attempt, e.Token
		if p.stolen != nil && !p.stolen[e.JobID] {
			p.stolen[e.JobID] = true
			p.run.db.exec(`update onceq.jobs set leased_until = null, holder = null, lost = lost + 1 where id = $1`, e.JobID)
		}
	case e.Err != nil:
		p.last = e.Err
	}
}

func (p *Process) lease() (job int64, attempt int, token int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.job, p.attempt, p.token
}

// lastError returns the handler's last error, or why its outcome was refused.
func (p *Process) lastError() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last
}

// robbed returns how many jobs had their lease taken away.
func (p *Process) robbed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.stolen)
}

func (p *Process) inOnce() effect {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.once
}

func (p *Process) slept() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.frozenFor
}

func (p *Process) isDead() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dead
}

// connected registers a connection. It returns false for a dead process.
func (p *Process) connected(w *wire) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead {
		p.conns[w] = struct{}{}
	}
	return !p.dead
}

func (p *Process) disconnected(w *wire) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, w)
}

// die ends everything that the process has to do with the world. Its goroutines live on but reach nothing.
func (p *Process) die() {
	p.mu.Lock()
	conns := make([]*wire, 0, len(p.conns))
	for w := range p.conns {
		conns = append(conns, w)
	}
	p.dead = true
	p.mu.Unlock()
	for _, w := range conns {
		w.cut(errDead)
	}
	p.end()
}

// begins records that a handler has begun, with its context.
func (p *Process) begins(ctx context.Context) {
	p.mu.Lock()
	stop := p.stopping
	p.handling, p.stopping = ctx, nil
	p.mu.Unlock()
	if stop != nil {
		stop(nil)
	}
}

// stop shuts the worker down, as a deploy does, and waits until its handler's context has ended. All else lives on.
func (p *Process) stop() {
	p.mu.Lock()
	ctx := p.handling
	p.mu.Unlock()
	p.end()
	if ctx != nil {
		_ = arrives(ctx.Done(), nil)
	}
}

// afterAll is the gap of a fault that comes after the answer to all steps, which reaches the process.
const afterAll = -1

// pass records steps that are sent at once and lets them through. If a fault is due, gap says after how many steps it
// comes, and the caller calls strike to cause it. If the fault freezes the process, the freeze is over when pass
// returns.
func (p *Process) pass(steps []step) (gap int, strike func(*wire)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return 0, nil // the caller finds out
	}
	leased := p.leased
	for i := range steps {
		s := &steps[i]
		if s.role == roleSkip {
			continue
		}
		s.leased = leased && s.role != rolePromote && s.role != roleClaim // one that claims again has found nothing
		s.nth = p.seen[s.text] + 1
		if f := p.comes(s, false); f != nil {
			if f.kind != freezing && f.kind != meeting {
				for i > 0 && steps[i-1].role == roleSkip {
					i--
				}
				return i, p.strike(f)
			}
			close(p.struck)
			p.frozenAt = p.run.passedTime()
			p.mu.Unlock()
			<-p.thaw
			p.mu.Lock()
			p.frozenFor = p.run.passedTime() - p.frozenAt
		}
		p.seen[s.text]++
		p.note(s)
		switch f := p.comes(s, true); {
		case f == nil:
		case f.kind != stopping:
			return i + 1, p.strike(f)
		case s.role == roleClaim:
			p.stopping = p.strike(f)
		default:
			gap, strike = afterAll, p.strike(f)
		}
	}
	return gap, strike
}

// comes returns the fault if it is due.
func (p *Process) comes(s *step, after bool) *fault {
	f := p.fault
	if f == nil || f.step == nil || f.after != after || f.step.nth != s.nth || f.step.text != s.text {
		return nil
	}
	p.fault = nil
	return f
}

func (p *Process) strike(f *fault) func(*wire) {
	return func(w *wire) {
		switch {
		case f.kind == dying:
			p.die()
		case f.kind == stopping:
			p.stop()
		case w != nil:
			w.cut(errCut)
		}
		close(p.struck)
	}
}

// note records a step that is about to happen.
func (p *Process) note(s *step) {
	switch s.role {
	case roleClaim:
		p.leased = true
	case rolePromote: // the claim before it found nothing
		p.leased = false
	case roleIntent:
		p.once = s.effect
	case roleOutcome:
		p.once = effect{}
	}
	if s.denied {
		p.run.answer(s.effect, false)
	}
	if s.ends() {
		p.leased = false
	}
	kept := *s
	p.tape = append(p.tape, &kept)
}

// settled records which of the last steps of a connection were in a transaction that is still open. If the completion of
// the job was, the process has its lease until that transaction commits.
func (p *Process) settled(w *wire, steps []step, status byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if status == 'I' {
		if w.finishing && slices.ContainsFunc(steps, func(s step) bool { return s.role == roleCommit }) {
			p.leased = false
		}
		w.finishing = false
		return
	}
	for _, s := range steps {
		if s.role == roleFinish {
			w.finishing, p.leased = true, true
		}
		for _, kept := range p.tape {
			if kept.text == s.text && kept.nth == s.nth {
				kept.inTx = true
			}
		}
	}
}
