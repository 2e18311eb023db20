package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// story is something that happens to people who use a queue. The order of its events is forced, so it ends in the same
// way each time.
type story struct {
	name     string // of its row: make once ONLY='name/system'
	happens  string // what happens, in a sentence
	question string // what is counted
	right    int    // what the count should be
	restarts bool   // it needs a server of its own
	play     func(s *stage) int
}

// stage is where one story is played for one system: a database, perhaps a Redis, and the provider to which handlers make
// calls.
type stage struct {
	ctx       context.Context
	system    *system
	url       string // of the database
	redis     string // path of the socket
	pool      *pgxpool.Pool
	server    restarter
	processes []*process
	spare     *process // has made the tables, and is the story's first process

	mu       sync.Mutex // guards what follows
	remarks  []string
	calls    []message
	provider func(p *process, call message) (bad string)
	starts   []*act
}

type restarter interface {
	Restart(immediate bool) error
}

// outcome is a cell of the table.
type outcome struct {
	n       int
	missing string // the system has nothing for this story
	remarks []string
	took    time.Duration
	err     error
}

// perform plays a story and cleans up.
func (s *stage) perform(st *story) (o outcome) {
	began := time.Now()
	defer func() {
		switch r := recover().(type) {
		case nil:
		case missing:
			o.missing = string(r)
		case failure:
			o.err = r.error
		default:
			panic(r)
		}
		s.close()
		o.remarks, o.took = s.remarks, time.Since(began)
	}()
	s.spare = s.process()
	s.spare.do(command{Do: "setup"})
	o.n = st.play(s)
	return o
}

func (s *stage) close() {
	for _, p := range s.processes {
		p.kill()
	}
	s.pool.Close()
}

// failure is an error that ends a story without an answer.
type failure struct{ error }

func (s *stage) check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// say adds a remark to the cell.
func (s *stage) say(remark string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Contains(s.remarks, remark) {
		s.remarks = append(s.remarks, remark)
	}
}

// rows counts the rows that handlers or the application have written and committed for a job.
func (s *stage) rows(n int) (count int) {
	s.check(s.pool.QueryRow(s.ctx, "select count(*) from app_rows where n = $1", n).Scan(&count))
	return count
}

// began counts a handler that starts.
func (s *stage) began(a *act) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.starts = append(s.starts, a)
}

// started counts the starts of handlers for a job.
func (s *stage) started(n int) (count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.starts {
		if a.n == n {
			count++
		}
	}
	return count
}

// answer is the provider. Each call that reaches it is done, whatever it answers.
func (s *stage) answer(p *process, call message) {
	s.mu.Lock()
	s.calls = append(s.calls, call)
	provider := s.provider
	s.mu.Unlock()
	bad := ""
	if provider != nil {
		bad = provider(p, call)
	}
	_ = p.send(command{Do: "called", Run: call.Run, Bad: bad})
}

// whenCalled sets what happens when a call has reached the provider and is done, before its answer.
func (s *stage) whenCalled(do func(p *process, call message) (bad string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.provider = do
}

// called counts the calls that reached the provider.
func (s *stage) called() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls)
}

// effects counts what they did at a provider that recognises a repetition by its key.
func (s *stage) effects() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := make(map[string]bool)
	n := 0
	for _, c := range s.calls {
		if c.Key == "" || !keys[c.Key] {
			n++
		}
		keys[c.Key] = true
	}
	return n
}

// settle plays the handlers that start in a process, each with the steps of do, until no unfinished job is left. It gives
// up when for a while nothing has started, and says how many are left.
func (s *stage) settle(p *process, do func(a *act)) (left int) {
	for until := time.Now().Add(patience); time.Now().Before(until); {
		if a := p.run(50 * time.Millisecond); a != nil {
			do(a)
			until = time.Now().Add(patience)
			continue
		}
		m, err := p.try(command{Do: "left"}) // an error is that of a server that was away
		if left = m.Left; err == nil && left == 0 && len(p.runs) == 0 {
			return 0
		}
	}
	return left
}

// writes is the ordinary handler: it writes its row and is done.
func writes(a *act) {
	_ = a.write()
	a.finish()
}

// waiting returns when the answer is there or somebody in the database waits for a lock. The answer can still be read.
func (s *stage) waiting(answer <-chan message) { s.waiters(answer, 1) }

// waiters is waiting for more than one who waits.
func (s *stage) waiters(answer <-chan message, want int) {
	const query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
	for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		var n int
		s.check(s.pool.QueryRow(s.ctx, query).Scan(&n))
		if n >= want || len(answer) > 0 {
			return
		}
	}
	s.check(fmt.Errorf("neither an answer nor a wait for a lock in %s", patience))
}

// lost says that jobs are left that nobody will run.
func (s *stage) lost(left int) {
	if left > 0 {
		s.say(fmt.Sprintf("%d unfinished after %.0f s", left, patience.Seconds()))
	}
}
