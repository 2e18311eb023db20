//go:build unix

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// chaos kills and stops workers and ends database sessions while the application runs. The seed decides what happens, and
// in which order. When it happens also depends on the machine.
type chaos struct {
	rng     *rand.Rand
	fleet   *fleet
	pool    *pgxpool.Pool
	say     func(format string, args ...any)
	missing func() string // what the program has not shown yet

	killed, killedInside atomic.Int64 // by SIGKILL; those of them that were in the middle of an effect
	stopped, takenOver   atomic.Int64 // by SIGSTOP; those of them whose job was taken over
	ended                atomic.Int64 // database sessions
}

// run goes on until ctx ends. It begins with the faults that everybody should see.
func (c *chaos) run(ctx context.Context) {
	var frozen sync.WaitGroup
	defer frozen.Wait()
	thawed := make(chan struct{}, 1) // one worker is frozen at a time
	thawed <- struct{}{}

	deck := []string{"freeze", "kill in mail", "terminate", "kill in charge"}
	for {
		if len(deck) == 0 && c.missing() != "" {
			deck = []string{"freeze", "kill in mail"}
		} else if len(deck) == 0 {
			deck = []string{"freeze", "terminate", "kill", "kill in mail", "terminate", "kill in charge"}
			c.rng.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		action := deck[0]
		deck = deck[1:]
		switch action {
		case "freeze":
			extra := time.Duration(c.rng.IntN(1000)) * time.Millisecond
			if c.rng.IntN(3) == 0 && c.missing() == "" {
				extra += 10 * time.Second // long enough for another worker to run its effect again
			}
			select {
			case <-thawed:
				frozen.Go(func() {
					c.freeze(ctx, extra)
					thawed <- struct{}{}
				})
			default:
			}
		case "kill":
			if p := c.fleet.any(c.rng.IntN); p != nil {
				c.kill(p, "")
			}
		case "kill in mail", "kill in charge":
			if p, id := c.await(ctx, action[len("kill in "):]); p != nil {
				c.kill(p, fmt.Sprintf(" in the %s of job %d", id.name, id.job))
			}
		case "terminate":
			c.terminate(ctx, 1+c.rng.IntN(4), c.rng.Uint32())
		}
		if !pause(ctx, time.Duration(600+c.rng.IntN(1200))*time.Millisecond) {
			return
		}
	}
}

func (c *chaos) kill(p *process, where string) {
	c.killed.Add(1)
	if c.fleet.kill(p) {
		c.killedInside.Add(1)
		if where == "" {
			where = " in an effect"
		}
	} else {
		where = ""
	}
	c.say("SIGKILL worker %d%s", p.pid(), where)
}

// freeze stops a worker in the middle of a charge until another one has claimed the job, and then continues it. The
// worker finishes what it believes is its work, and the database refuses it.
func (c *chaos) freeze(ctx context.Context, extra time.Duration) {
	for ctx.Err() == nil {
		p, id := c.await(ctx, "charge")
		if p == nil {
			return
		}
		if !c.signal(p, syscall.SIGSTOP, true) {
			continue
		}
		time.Sleep(50 * time.Millisecond) // by now everything that it reported has been read
		c.fleet.mu.Lock()
		_, inside := p.open[id]
		c.fleet.mu.Unlock()
		if !inside {
			c.signal(p, syscall.SIGCONT, false)
			continue
		}
		c.stopped.Add(1)
		c.say("SIGSTOP worker %d in the charge of job %d", p.pid(), id.job)
		began := time.Now()
		taken := false
		for !taken && time.Since(began) < 15*time.Second && pause(ctx, 5*time.Millisecond) {
			c.fleet.mu.Lock()
			taken = c.fleet.holder[id.job] != p
			c.fleet.mu.Unlock()
		}
		if taken {
			c.takenOver.Add(1)
			pause(ctx, extra)
		}
		after := time.Since(began).Round(100 * time.Millisecond)
		c.signal(p, syscall.SIGCONT, false)
		c.say("SIGCONT worker %d after %s; job %d was taken over: %t", p.pid(), after, id.job, taken)
		return
	}
}

// signal stops or continues a worker. It returns false if the worker is gone.
func (c *chaos) signal(p *process, s syscall.Signal, frozen bool) bool {
	c.fleet.mu.Lock()
	defer c.fleet.mu.Unlock()
	if p.killed || p.cmd.Process.Signal(s) != nil {
		return false
	}
	p.frozen = frozen
	return true
}

// await waits for a worker that is in the middle of an effect. It returns nil if ctx ends first.
func (c *chaos) await(ctx context.Context, name string) (*process, effectID) {
	for {
		if p, id := c.fleet.inside(name); p != nil {
			return p, id
		}
		if !pause(ctx, 2*time.Millisecond) {
			return nil, effectID{}
		}
	}
}

// terminate ends n sessions of this demonstration: a worker's claim, beat or effect, or the application's sign-up.
func (c *chaos) terminate(ctx context.Context, n int, draw uint32) {
	var ended int64
	err := c.pool.QueryRow(ctx, `
		select count(*) filter (where pg_terminate_backend(pid))
		  from (select pid from pg_stat_activity
		         where datname = current_database() and application_name like 'onceq demo %' and pid <> pg_backend_pid()
		         order by hashint8(pid + $1::bigint) limit $2) chosen`, int64(draw), n).Scan(&ended)
	if err == nil { // an error means that this session was ended by an earlier call
		c.ended.Add(ended)
		c.say("pg_terminate_backend on %d database sessions", ended)
	}
}

// pause waits. It returns false if ctx has ended.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
