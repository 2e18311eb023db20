package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// These are the faults. Those of processes and connections happen side by side, on different processes. Those of the server
// happen one after the other, and so do the waves of the crowd.
const (
	faultKill   = "SIGKILL"
	faultFreeze = "SIGSTOP past the lease"
	faultCut    = "network cut"
	faultDelay  = "network delay"
	faultHalf   = "half-open connections"
	faultReset  = "connection resets"
	faultSilent = "silent connections"

	faultChurn = "churn of workers"

	faultTerminate   = "pg_terminate_backend"
	faultRestart     = "immediate stop and restart"
	faultFailover    = "failover"
	faultBouncer     = "PgBouncer killed and restarted"
	faultSnapshot    = "snapshot left open"
	faultLock        = "table lock held"
	faultConnections = "connection limit reached"
	faultTimeouts    = "statement and lock timeouts"
	faultDisk        = "full disk"
	faultReadOnly    = "read-only default"
	faultSetBack     = "sequence set back"
)

var (
	processFaults = []string{faultKill, faultFreeze, faultCut, faultDelay, faultHalf, faultReset, faultSilent}
	crowdFaults   = []string{faultChurn}
	serverFaults  = []string{faultTerminate, faultRestart, faultFailover, faultBouncer, faultSnapshot, faultLock, faultConnections,
		faultTimeouts, faultDisk, faultReadOnly, faultSetBack}
)

// fault is a fault to come, with all of its random choices. The seed alone decides the sequence of faults in each lane.
type fault struct {
	Kind   string
	Target int     // which of the processes, tables or directions
	Force  float64 // how long and how hard, from 0 to 1
	Then   time.Duration
}

// lane yields faults, each kind as often as any other.
type lane struct {
	rng   *rand.Rand
	kinds []string
	bag   []string
	rest  time.Duration
}

func newLane(seed, n uint64, kinds []string, rest time.Duration) *lane {
	return &lane{rng: rand.New(rand.NewPCG(seed, n)), kinds: kinds, rest: rest}
}

func (l *lane) next() fault {
	if len(l.bag) == 0 {
		l.bag = append(l.bag, l.kinds...)
		l.rng.Shuffle(len(l.bag), func(i, j int) { l.bag[i], l.bag[j] = l.bag[j], l.bag[i] })
	}
	f := fault{Kind: l.bag[0], Target: l.rng.IntN(1 << 20), Force: l.rng.Float64()}
	f.Then = l.rest/2 + time.Duration(l.rng.Int64N(int64(l.rest)))
	l.bag = l.bag[1:]
	return f
}

// seconds returns a time between two limits, according to the fault's force.
func (f fault) seconds(from, to float64) time.Duration {
	return time.Duration((from + (to-from)*f.Force) * float64(time.Second))
}

// chaos causes the faults.
type chaos struct {
	arena   *arena
	slots   []*slot // processes that faults may hit
	crowd   crowd   // those that come and go
	proxies map[string]*network
	tables  []string                                                 // tables to lock
	setBack func(ctx context.Context, conn *pgx.Conn, f fault) error // nil if the system has no sequence of its own
	freeze  time.Duration
	say     func(format string, args ...any)

	mu     sync.Mutex // guards counts
	counts map[string]int
	failed map[string]int
}

func (c *chaos) count(kind string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.failed[kind]++
		c.say("%s could not be done: %v", kind, err)
		return
	}
	c.counts[kind]++
}

// processes causes the faults of processes and their connections until ctx ends. By then everything works again, but for
// connections that stay silent for ever.
func (c *chaos) processes(ctx context.Context, l *lane) {
	var under sync.WaitGroup
	defer under.Wait()
	for ctx.Err() == nil {
		f := l.next()
		var target *slot
		for i := range c.slots {
			if s := c.slots[(f.Target+i)%len(c.slots)]; s.claimFault() {
				target = s
				break
			}
		}
		if target != nil {
			c.say("%s: %s", target.Slot, f.Kind)
			under.Go(func() {
				defer target.releaseFault()
				c.count(f.Kind, c.process(ctx, f, target))
			})
		}
		pause(ctx, f.Then)
	}
}

func (c *chaos) process(ctx context.Context, f fault, s *slot) error {
	proxy := c.proxies[s.Slot]
	toxic := func(kind, attributes string, both bool, d time.Duration) error {
		streams := []string{"upstream", "downstream"}
		if !both {
			streams = streams[f.Target%2:][:1]
		}
		for _, stream := range streams {
			if _, err := proxy.Toxics.AddToxicJson(strings.NewReader(
				fmt.Sprintf(`{"type": %q, "stream": %q, "attributes": {%s}}`, kind, stream, attributes))); err != nil {
				return err
			}
		}
		pause(ctx, d)
		proxy.Toxics.ResetToxics(context.WithoutCancel(ctx))
		return nil
	}
	switch f.Kind {
	case faultKill:
		s.signal(syscall.SIGKILL)
	case faultFreeze:
		s.signal(syscall.SIGSTOP)
		pause(ctx, f.seconds(1.2*lease.Seconds(), max(2*lease, c.freeze).Seconds()))
		s.signal(syscall.SIGCONT)
	case faultCut:
		proxy.Stop()
		pause(ctx, f.seconds(0.2, 2*lease.Seconds()))
		return open(context.WithoutCancel(ctx), proxy)
	case faultDelay:
		return toxic("latency", fmt.Sprintf(`"latency": %d, "jitter": 50`, f.seconds(0.05, 1).Milliseconds()), f.Target%3 > 0, f.seconds(2, 5))
	case faultHalf: // one direction, or both, swallows everything, and nobody is told
		return toxic("timeout", `"timeout": 0`, f.Target%3 == 0, f.seconds(1, 3*lease.Seconds()))
	case faultReset:
		return toxic("reset_peer", `"timeout": 0`, f.Target%3 == 0, f.seconds(0.1, 1))
	case faultSilent: // every third one for ever, or until the next one of this network
		goOn := proxy.silence()
		if f.Target%3 > 0 {
			pause(ctx, f.seconds(1, 5*lease.Seconds()))
			goOn()
		}
	default:
		return fmt.Errorf("no such fault: %s", f.Kind)
	}
	return nil
}

// server causes the faults of the server until ctx ends.
func (c *chaos) server(ctx context.Context, l *lane) {
	for ctx.Err() == nil {
		f := l.next()
		c.say("server: %s", f.Kind)
		// A fault that has begun is finished, so no run stops in the middle of a failover.
		err := c.serverFault(context.WithoutCancel(ctx), f)
		if !errors.Is(err, errNotHere) {
			c.count(f.Kind, err)
		}
		pause(ctx, f.Then)
	}
}

// errNotHere means that this machine lacks something that the fault needs. A note says what.
var errNotHere = errors.New("not here")

func (c *chaos) serverFault(ctx context.Context, f fault) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	switch f.Kind {
	case faultRestart:
		return c.arena.server().Restart(true)
	case faultFailover:
		return c.arena.failover(ctx)
	case faultBouncer:
		if c.arena.bouncer == nil {
			return errNotHere
		}
		c.arena.bouncer.stop()
		pause(ctx, f.seconds(0, 1.5))
		return c.arena.bouncer.start()
	case faultDisk:
		return c.fillDisk(ctx, f)
	}
	conn, err := pgx.Connect(ctx, c.arena.server().URL())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	switch f.Kind {
	case faultTerminate:
		return c.terminate(ctx, conn, 10+f.Target%90)
	case faultSnapshot:
		if _, err := conn.Exec(ctx, `begin isolation level repeatable read; select count(*) from torture.ops`); err != nil {
			return err
		}
		pause(ctx, f.seconds(3, 8))
	case faultLock:
		return c.lock(ctx, conn, c.tables[f.Target%len(c.tables)], f.seconds(0.5, 2*lease.Seconds()))
	case faultConnections:
		taken, full := c.fill(ctx, nil)
		if err := c.terminate(ctx, conn, 40); err == nil {
			taken, full = c.fill(ctx, taken)
		}
		pause(ctx, f.seconds(1, 4))
		for _, t := range taken {
			_ = t.Close(ctx)
		}
		if full == nil {
			return errors.New("there is no limit")
		}
	case faultTimeouts:
		if _, err := conn.Exec(ctx, `alter database postgres set statement_timeout = '150ms'`); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, `alter database postgres set lock_timeout = '50ms'`)
		err = errors.Join(err, c.terminate(ctx, conn, 60)) // new sessions have these settings
		for range 3 {
			pause(ctx, f.seconds(0.1, 0.5))
			err = errors.Join(err, c.lock(ctx, conn, c.tables[f.Target%len(c.tables)], f.seconds(0.3, 1)))
		}
		_, err2 := conn.Exec(ctx, `alter database postgres reset all`)
		return errors.Join(err, err2, c.terminate(ctx, conn, 100))
	case faultReadOnly: // as for a role or a database that is about to be moved, or by mistake
		const set = `alter %s set default_transaction_read_only = on`
		of := []string{"database postgres", "role postgres"}[f.Target%2]
		if _, err := conn.Exec(ctx, fmt.Sprintf(set, of)); err != nil {
			return err
		}
		err := c.terminate(ctx, conn, 100) // new sessions have the setting
		pause(ctx, f.seconds(2, 3*lease.Seconds()))
		_, err2 := conn.Exec(ctx, `alter `+of+` reset default_transaction_read_only`)
		return errors.Join(err, err2, c.terminate(ctx, conn, 100))
	case faultSetBack:
		if c.setBack == nil {
			return errNotHere
		}
		return c.setBack(ctx, conn, f)
	default:
		return fmt.Errorf("no such fault: %s", f.Kind)
	}
	return nil
}

// fill takes all connections that the server has, several at once, because others want them too. It returns them, and the
// server's refusal.
func (c *chaos) fill(ctx context.Context, taken []*pgx.Conn) ([]*pgx.Conn, error) {
	const most = 2 * maxConnections
	var mu sync.Mutex
	var full error
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for ended := false; !ended; {
				more, err := pgx.Connect(ctx, c.arena.server().URL())
				mu.Lock()
				if err == nil {
					taken = append(taken, more)
				} else {
					full = err
				}
				ended = full != nil || len(taken) >= most
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return taken, full
}

// terminate ends a share of the sessions.
func (c *chaos) terminate(ctx context.Context, conn *pgx.Conn, percent int) error {
	_, err := conn.Exec(ctx, `
select pg_terminate_backend(pid) from pg_stat_activity
 where pid <> pg_backend_pid() and application_name like $2 || '%' and (random() * 100)::int < $1`, percent, applicationName)
	return err
}

func (c *chaos) lock(ctx context.Context, conn *pgx.Conn, table string, d time.Duration) error {
	// A session that waits for this lock makes others wait too, so it must not wait for long.
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, `set local lock_timeout = '5s'; set local statement_timeout = 0; lock table `+table+` in access exclusive mode`); err != nil {
		return err
	}
	pause(ctx, d)
	return nil
}

// fillDisk makes the tablespace's file system as small as its contents.
func (c *chaos) fillDisk(ctx context.Context, f fault) error {
	c.arena.mu.Lock()
	disk := filepath.Dir(c.arena.disk)
	none := c.arena.disk == ""
	c.arena.mu.Unlock()
	if none {
		return errNotHere
	}
	until := time.Now().Add(f.seconds(2, 5))
	for time.Now().Before(until) && ctx.Err() == nil {
		// This also takes away what is freed in between. While somebody writes, the size that was read may already be too
		// small.
		if err := shrink(disk); err != nil && !errors.Is(err, syscall.EINVAL) {
			return errors.Join(err, resize(disk, diskSize))
		}
		pause(ctx, 5*time.Millisecond)
	}
	return resize(disk, diskSize)
}
