package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// adapter is a system as a story uses it, in one process. Its methods are called from many goroutines.
type adapter interface {
	// setup makes the tables. It is called in one process, before everything else.
	setup(ctx context.Context) error

	// enqueue accepts jobs in one call: in tx, or on its own where that is nil.
	enqueue(ctx context.Context, tx pgx.Tx, jobs []job) ([]answer, error)

	// work starts a worker. It calls handle for each job, with what the handler may do. stop ends it gracefully.
	work(ctx context.Context, c crew, handle func(context.Context, *run) error) (stop func(context.Context) error, err error)

	// left counts the jobs that are not finished. Those that are dead, cancelled or held for a person are finished.
	left(ctx context.Context) (int, error)

	// silence lets the time pass after which a worker that says nothing is taken for dead, by moving stored times
	// back. A system whose times can be set to seconds needs nothing here.
	silence(ctx context.Context) error

	// age lets thirty days pass for everything that is stored and finished, and runs the housekeeping.
	age(ctx context.Context) error

	// cancel cancels a job.
	cancel(ctx context.Context, id string) error
}

// An adapter without transactions also has noTransactions() string: the sentence that says why.

// missing is an error that says that a system has no such thing, in a sentence for the table.
type missing string

func (m missing) Error() string { return string(m) }

// noRate is what most systems have of Job.Rate.
const noRate = "it has no rate over several processes"

// insertRow is the application's write.
const insertRow = "insert into app_rows (n) values ($1)"

// run is one run of a handler. The adapter says what the handler may do, the story what it does.
type run struct {
	n, attempt int

	// write writes a row: in the transaction that completes the job, where the system has one.
	write func(ctx context.Context, n int) error

	// call makes a call to the outside, as the system's documentation recommends. fn gets the key for the provider.
	call func(ctx context.Context, name string, fn func(ctx context.Context, key string) (string, error)) error

	// result stores the job's result, for those who ask again; nil where a job has none.
	result func(ctx context.Context, result string) error

	// end ends the handler's transaction behind the queue's back; nil where a handler has none.
	end func(ctx context.Context) error

	steps  chan command
	called chan command
}

// server runs an adapter for the story at the other end of the pipes.
type server struct {
	adapter
	pool *pgxpool.Pool

	mu   sync.Mutex // guards what follows
	out  *json.Encoder
	txs  map[string]pgx.Tx
	runs map[int]*run // that have not ended
	last int          // the number of the latest run
	stop func(context.Context) error
}

// serve works until in ends.
func serve(ctx context.Context, a adapter, pool *pgxpool.Pool, in io.Reader, out io.Writer) error {
	s := &server{adapter: a, pool: pool, out: json.NewEncoder(out), txs: make(map[string]pgx.Tx), runs: make(map[int]*run)}
	s.tell(message{Event: "ready"})
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var c command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return err
		}
		if c.Run == 0 {
			go func() { s.tell(s.do(ctx, c)) }()
			continue
		}
		s.step(c)
	}
	return lines.Err()
}

// step hands a handler's step to it, if it has not ended.
func (s *server) step(c command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.runs[c.Run]
	switch {
	case r == nil:
		s.say(message{ID: c.ID, Ended: true})
	case c.Do == "called":
		r.called <- c
		s.say(message{ID: c.ID})
	default:
		r.steps <- c // there is room
	}
}

func (s *server) tell(m message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say(m)
}

// say is tell for who holds the mutex.
func (s *server) say(m message) {
	if err := s.out.Encode(m); err != nil {
		os.Exit(1) // the story is over
	}
}

// do carries out a command that is no step of a handler.
func (s *server) do(ctx context.Context, c command) message {
	m := message{ID: c.ID}
	s.mu.Lock()
	tx := s.txs[c.Tx]
	s.mu.Unlock()
	var err error
	switch c.Do {
	case "setup":
		err = s.setup(ctx)
	case "begin":
		if none, ok := s.adapter.(interface{ noTransactions() string }); ok {
			err = missing(none.noTransactions())
		} else if tx, err = s.pool.Begin(ctx); err == nil {
			s.mu.Lock()
			s.txs[c.Tx] = tx
			s.mu.Unlock()
		}
	case "row":
		if tx != nil {
			_, err = tx.Exec(ctx, insertRow, c.N)
		} else {
			_, err = s.pool.Exec(ctx, insertRow, c.N)
		}
	case "enqueue":
		m.Answers, err = s.enqueue(ctx, tx, c.Jobs)
	case "commit":
		err = tx.Commit(ctx)
	case "rollback":
		err = tx.Rollback(ctx)
	case "work":
		var stop func(context.Context) error
		stop, err = s.work(ctx, *c.Crew, s.handle)
		s.mu.Lock()
		s.stop = stop
		s.mu.Unlock()
	case "stop":
		err = s.stop(ctx)
	case "left":
		m.Left, err = s.left(ctx)
	case "silence":
		err = s.silence(ctx)
	case "age":
		err = s.age(ctx)
	case "cancel":
		err = s.cancel(ctx, c.Name)
	default:
		err = fmt.Errorf("no such command: %s", c.Do)
	}
	var none missing
	switch {
	case errors.As(err, &none):
		m.Missing = none.Error()
	case err != nil:
		m.Error = err.Error()
	}
	return m
}

// handle is every handler: it does what the story says, step by step. As most do, it ends with the first error.
//
// Its steps do not heed the handler's context. A process that wakes up may be past the line that looks at it, and that is the
// order of events which these stories force.
func (s *server) handle(ctx context.Context, r *run) error {
	ctx = context.WithoutCancel(ctx)
	r.steps, r.called = make(chan command, 10), make(chan command, 1)
	s.mu.Lock()
	s.last++
	id := s.last
	s.runs[id] = r
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.runs, id)
		for len(r.steps) > 0 {
			s.say(message{ID: (<-r.steps).ID, Ended: true})
		}
	}()
	s.tell(message{Event: "started", Run: id, N: r.n, Attempt: r.attempt})
	for {
		c := <-r.steps
		var err error
		switch c.Do {
		case "write":
			err = r.write(ctx, c.N)
		case "call":
			err = r.call(ctx, c.Name, func(_ context.Context, key string) (string, error) {
				s.tell(message{Event: "called", Run: id, Name: c.Name, Key: key})
				if answer := <-r.called; answer.Bad != "" {
					return "", errors.New(answer.Bad)
				}
				return "receipt", nil
			})
		case "end":
			if r.end == nil {
				err = missing("a handler has no transaction of the queue's")
			} else {
				err = r.end(ctx)
			}
		case "finish":
			if c.Name != "" && r.result != nil {
				err = r.result(ctx, c.Name)
			}
			s.tell(message{ID: c.ID})
			return err
		case "fail":
			s.tell(message{ID: c.ID})
			return errors.New("the story lets this attempt fail")
		}
		m := message{ID: c.ID}
		var none missing
		switch {
		case errors.As(err, &none):
			m.Missing = none.Error()
			err = nil
		case err != nil:
			m.Error = err.Error()
		}
		s.tell(m)
		if err != nil {
			return err
		}
	}
}
