package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/lab/peers"
)

// child is a process that reads a line of JSON for each command and answers with lines of JSON.
type child struct {
	cmd        *exec.Cmd
	in         io.WriteCloser
	out        *bufio.Reader
	complaints strings.Builder // its standard error, to be read when it has ended
}

// startChild starts a process and returns when it has said that it is ready.
func startChild(cmd *exec.Cmd) (*child, error) {
	c := &child{cmd: cmd}
	var err error
	if c.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	cmd.Stderr = &c.complaints
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var hello struct{ Ready bool }
	if err := c.read(&hello); err != nil || !hello.Ready {
		c.close()
		return nil, fmt.Errorf("the process said nothing: %w: %s", err, c.complaints.String())
	}
	return c, nil
}

func (c *child) write(command any) error { return json.NewEncoder(c.in).Encode(command) }

func (c *child) read(answer any) error {
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(line, answer)
}

// close ends the process, which stops when its input does.
func (c *child) close() {
	_ = c.in.Close()
	timer := time.AfterFunc(5*time.Second, func() { _ = c.cmd.Process.Kill() })
	defer timer.Stop()
	_ = c.cmd.Wait()
}

// order tells a member what to do. It starts when the order comes, so that all members start at once.
type order struct {
	Command  string   `json:"cmd"` // "member"
	Peer     string   `json:"peer"`
	Settings string   `json:"settings"`
	Queues   []string `json:"queues,omitempty"` // of those that are named; the default one where there are none
	Starts   bool     `json:"starts"`           // say when each job started
	Reap     bool     `json:"reap"`             // with a Reaper
}

// said is what a member says, soon after something happened.
type said struct {
	Working bool   `json:"working,omitempty"`
	Error   string `json:"error,omitempty"`
	Done    int    `json:"done,omitempty"` // jobs, since the start

	// Starts are the numbers of jobs that were started, and when, in milliseconds since 1970: all processes of a machine
	// have one clock.
	Starts [][2]float64 `json:"starts,omitempty"`
}

// members are worker processes over one database.
type members struct {
	all      []*child
	done     []atomic.Int64 // jobs of each
	failed   chan error     // the first error
	stopping atomic.Bool
	ended    sync.WaitGroup // one for each that is listened to
}

// join starts n worker processes and returns when all of them are at work. heard, which may be nil, gets all that they
// say and how many more jobs that makes, from several goroutines.
func (r *room) join(ctx context.Context, n int, o order, heard func(s said, jobs int)) (_ *members, err error) {
	ms := &members{all: make([]*child, n), done: make([]atomic.Int64, n), failed: make(chan error, 1)}
	o.Command, o.Peer, o.Settings = "member", r.peer.name, r.peer.settings
	defer func() {
		if err != nil {
			ms.stop()
		}
	}()
	// A few at a time, so that none is taken for one that does not start.
	err = inParallel(n, 8, func(i int) (err error) {
		ms.all[i], err = startChild(r.peer.member(r.url))
		return err
	})
	if err != nil {
		return nil, err
	}
	var working sync.WaitGroup
	for i, c := range ms.all {
		working.Add(1)
		ms.ended.Go(func() {
			begun := sync.OnceFunc(working.Done)
			defer begun()
			if err := ms.listen(i, c, begun, heard); err != nil {
				ms.fail(fmt.Errorf("%s, process %d of %d: %w", r.peer, i+1, n, err))
			}
		})
		if err := c.write(o); err != nil {
			return nil, err
		}
	}
	all := make(chan struct{})
	go func() { working.Wait(); close(all) }()
	select {
	case <-all:
		return ms, ms.err()
	case <-time.After(2 * time.Minute):
		return nil, fmt.Errorf("%s: %d processes did not start in two minutes", r.peer, n)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// listen returns when the member has ended.
func (ms *members) listen(i int, c *child, begun func(), heard func(s said, jobs int)) error {
	for {
		var s said
		switch err := c.read(&s); {
		case err != nil && ms.stopping.Load():
			return nil
		case errors.Is(err, io.EOF):
			return errors.New("it ended")
		case err != nil:
			return err
		case s.Error != "":
			return errors.New(s.Error)
		}
		if s.Working {
			begun()
		}
		jobs := 0
		if s.Done > 0 {
			jobs = s.Done - int(ms.done[i].Swap(int64(s.Done)))
		}
		if heard != nil {
			heard(s, jobs)
		}
	}
}

func (ms *members) fail(err error) {
	select {
	case ms.failed <- err:
	default:
	}
}

func (ms *members) err() error {
	select {
	case err := <-ms.failed:
		return err
	default:
		return nil
	}
}

// stop ends all of them and returns when they have stopped.
func (ms *members) stop() {
	ms.stopping.Store(true)
	var started []*child
	for _, c := range ms.all {
		if c != nil {
			started = append(started, c)
			_ = c.in.Close()
		}
	}
	timer := time.AfterFunc(30*time.Second, func() {
		for _, c := range started {
			_ = c.cmd.Process.Kill()
		}
	})
	defer timer.Stop()
	ms.ended.Wait()
	for _, c := range started {
		if err := c.cmd.Wait(); err != nil {
			fmt.Fprintf(os.Stderr, "bench: a worker process: %v: %s\n", err, peers.LastLine(c.complaints.String()))
		}
	}
}

func (ms *members) pids() []int {
	var pids []int
	for _, c := range ms.all {
		pids = append(pids, c.cmd.Process.Pid)
	}
	return pids
}

// goMember is this program as a worker process.
func goMember(url string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), memberEnv+"="+url)
	return cmd
}

// memberEnv makes this program a member over the database that it names.
const memberEnv = "ONCEQ_BENCH_MEMBER"

// memberChild is the process of a member.
func memberChild(url string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cfg, err := pgxpool.ParseConfig(url) // as an application has it, but idle connections close soon: those of an idle worker are counted
	if err != nil {
		return err
	}
	cfg.MaxConnIdleTime, cfg.HealthCheckPeriod = 20*time.Second, 10*time.Second
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	in, out := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	if err := out.Encode(map[string]bool{"ready": true}); err != nil {
		return err
	}
	line, err := in.ReadBytes('\n')
	if errors.Is(err, io.EOF) {
		return nil
	}
	var o order
	if err := errors.Join(err, json.Unmarshal(line, &o)); err != nil {
		return err
	}
	news := &news{starts: o.Starts, any: make(chan struct{}, 1)}
	stop, err := o.work(ctx, pool, news.did)
	if err != nil {
		return errors.Join(err, out.Encode(said{Error: err.Error()}))
	}
	go news.tell(out)
	_, _ = io.Copy(io.Discard, in)
	stop()
	return nil
}

func (o order) work(ctx context.Context, pool *pgxpool.Pool, did func(n, jobs int)) (stop func(), err error) {
	var q queue
	if o.Peer == "onceq" {
		q, err = joinOnceq(ctx, pool)
	} else {
		q, err = joinRiver(ctx, pool, o.Settings)
	}
	if err != nil {
		return nil, err
	}
	if o.Reap {
		reaper, err := onceq.NewReaper(q.(*onceqQueue).Queue, onceq.ReaperConfig{Every: 5 * time.Second, Grace: time.Second})
		if err != nil {
			return nil, err
		}
		go func() { _ = reaper.Run(ctx) }()
	}
	return q.(named).workIn(ctx, o.Queues, did)
}

// news are what a member has to say.
type news struct {
	starts bool
	any    chan struct{}

	mu   sync.Mutex
	next said
}

// did is called by each handler.
func (n *news) did(number, jobs int) {
	n.mu.Lock()
	n.next.Done += jobs
	if n.starts {
		n.next.Starts = append(n.next.Starts, [2]float64{float64(number), sinceEpoch(time.Now())})
	}
	n.mu.Unlock()
	select {
	case n.any <- struct{}{}:
	default:
	}
}

// tell says at once what happens, and then rests for a moment. It costs nothing while nothing happens.
func (n *news) tell(out *json.Encoder) {
	_ = out.Encode(said{Working: true})
	for range n.any {
		n.mu.Lock()
		now := n.next
		n.next.Starts = nil
		n.mu.Unlock()
		if err := out.Encode(now); err != nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func sinceEpoch(t time.Time) float64 { return float64(t.UnixMicro()) / 1000 }
