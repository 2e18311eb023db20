package main

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/lab/peers"
)

//go:embed node
var nodeFiles embed.FS

// installNode fetches the packages that node/package.json names.
func installNode(ctx context.Context) (*peers.Node, error) {
	files, err := fs.Sub(nodeFiles, "node")
	if err != nil {
		return nil, err
	}
	return peers.InstallNode(ctx, "bench", files)
}

var nodeSettings = []struct{ name, settings, note string }{
	{"graphile-worker", "tuned", "as its documentation's figures: concurrentJobs 24, maxPoolSize 25, localQueue 500, batch delays 0; addJobs"},
	{"graphile-worker", "default", "concurrentJobs 1; addJobs"},
	{"pg-boss", "tuned", "batchSize 1,000, localConcurrency 2, burstWhenBatchFull, polling every 0.5 s; insert; D: fetch, rows and complete of 100 jobs in one transaction, 4 loops"},
	{"pg-boss", "notify", "its defaults with useListenNotify and notify on the queue"},
	{"pg-boss", "default", "batchSize 1, polling every 2 s; insert"},
	{"BullMQ", "tuned", "concurrency 200, removeOnComplete; addBulk"},
	{"BullMQ", "default", "concurrency 1; addBulk"},
}

func nodePeers(in *peers.Node, err error) []peer {
	var all []peer
	for _, s := range nodeSettings {
		p := peer{name: s.name, settings: s.settings, note: s.note}
		if err != nil {
			p.missing = err.Error()
		} else {
			p.version = in.PackageVersion(strings.ToLower(s.name))
			p.note += "; Node " + in.Version
			p.open = func(ctx context.Context, e env) (session, error) {
				return openNode(ctx, e, in, strings.ToLower(s.name), s.settings)
			}
			if s.name == "graphile-worker" {
				p.undone = "select count(*) from graphile_worker._private_jobs"
				p.member = func(url string) *exec.Cmd { return nodeCommand(env{url: url}, in, strings.ToLower(s.name), s.settings) }
			}
		}
		all = append(all, p)
	}
	return all
}

// nodeSession is a child process that runs runner.js.
type nodeSession struct {
	*child
	pool   *pgxpool.Pool // with the application's table
	filled int
}

// nodeCommand runs one peer, for openNode or as a member.
func nodeCommand(e env, in *peers.Node, name, settings string) *exec.Cmd {
	cmd := in.Command("runner.js", name, settings)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+e.url, "NO_LOG_SUCCESS=1")
	if e.redis != nil {
		cmd.Env = append(cmd.Env, "REDIS_SOCKET="+e.redis.Socket)
	}
	return cmd
}

func openNode(ctx context.Context, e env, in *peers.Node, name, settings string) (session, error) {
	pool, err := newPool(ctx, e.url, e.conns)
	if err != nil {
		return nil, err
	}
	c, err := startChild(nodeCommand(e, in, name, settings))
	if err != nil {
		pool.Close()
		return nil, fmt.Errorf("%s did not start: %w", name, err)
	}
	return &nodeSession{child: c, pool: pool}, nil
}

func (s *nodeSession) call(command map[string]any, answer any) error {
	if err := s.write(command); err != nil {
		return err
	}
	var either struct {
		NotOffered bool
		Error      string
	}
	line, err := s.out.ReadBytes('\n')
	if err != nil {
		return err
	}
	if err := json.Unmarshal(line, &either); err != nil {
		return fmt.Errorf("%w: %s", err, line)
	}
	switch {
	case either.NotOffered:
		return errNotOffered
	case either.Error != "":
		return errors.New(either.Error)
	}
	return json.Unmarshal(line, answer)
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func (s *nodeSession) took(command string, n int, more map[string]any) (stretch, error) {
	more["cmd"], more["from"], more["n"] = command, s.filled, n
	s.filled += n
	var answer struct{ Took float64 }
	err := s.call(more, &answer)
	return stretch{jobs: n, all: n, took: milliseconds(answer.Took)}, err
}

func (s *nodeSession) fill(_ context.Context, n int, keyed bool) (stretch, error) {
	return s.took("fill", n, map[string]any{"keyed": keyed})
}

// fillLanes uses graphile-worker's queues, which run one job at a time, and pg-boss's policy key_strict_fifo.
func (s *nodeSession) fillLanes(_ context.Context, n, lanes int) (stretch, error) {
	return s.took("fill", n, map[string]any{"lanes": lanes})
}

// fillLarge puts jobs of one tenant into pg-boss.
func (s *nodeSession) fillLarge(_ context.Context, n int) (stretch, error) {
	return s.took("fillLarge", n, map[string]any{})
}

// tenBehind gives how long ten jobs of another tenant took, again and again, of which no more than each ran at once, and how
// many of the large one were done in a second.
func (s *nodeSession) tenBehind(_ context.Context, each, large int, limit time.Duration) (all []time.Duration, rate float64, err error) {
	var gaps []float64
	for i := range 1000 {
		gaps = append(gaps, gap(i).Seconds()*1000)
	}
	var answer struct {
		Times      []float64
		Unfinished int
		Rate       float64
	}
	err = s.call(map[string]any{"cmd": "tenBehind", "each": each, "gaps": gaps, "limit": limit.Milliseconds(), "large": large * 9 / 10}, &answer)
	for _, ms := range answer.Times {
		all = append(all, milliseconds(ms))
	}
	if answer.Unfinished > 0 {
		fmt.Fprintf(os.Stderr, "bench: %d of the last ten jobs were not done after %s\n", answer.Unfinished, all[len(all)-1])
	}
	return all, answer.Rate, err
}

func (s *nodeSession) transact(_ context.Context, n int, how string) (stretch, error) {
	return s.took("transact", n, map[string]any{"how": how})
}

func (s *nodeSession) drain(_ context.Context, d drain) (stretch, error) {
	var answer struct {
		Done   int
		WarmAt *float64
		End    float64
		Ticks  []tick
	}
	err := s.call(map[string]any{"cmd": "drain", "effect": d.effect, "warm": d.warm, "total": d.total, "limit": d.limit.Milliseconds()}, &answer)
	if err != nil {
		return stretch{}, err
	}
	began, warmAt := time.Now(), time.Time{}
	if answer.WarmAt != nil {
		warmAt = began.Add(milliseconds(*answer.WarmAt))
	}
	return measured(d, began, warmAt, began.Add(milliseconds(answer.End)), answer.Done, answer.WarmAt != nil, answer.Ticks)
}

func (s *nodeSession) latency(_ context.Context, n int, limit time.Duration) ([]time.Duration, error) {
	var gaps []float64
	for i := range n + warmLatencies {
		gaps = append(gaps, gap(i).Seconds()*1000)
	}
	var answer struct{ Times []float64 }
	err := s.call(map[string]any{"cmd": "latency", "gaps": gaps, "limit": limit.Milliseconds()}, &answer)
	var all []time.Duration
	for _, ms := range answer.Times {
		all = append(all, milliseconds(ms))
	}
	return all, err
}

func (s *nodeSession) process() int { return s.cmd.Process.Pid }

func (s *nodeSession) close() {
	s.child.close()
	s.pool.Close()
}

// put is how graphile-worker's documentation enqueues in SQL.
func (s *nodeSession) put(ctx context.Context, tx pgx.Tx, n int, keyed bool) error {
	if keyed {
		return errNotOffered
	}
	const add = "select graphile_worker.add_job('noop', $1::json)"
	var err error
	if tx != nil {
		_, err = tx.Exec(ctx, add, Task{n})
	} else {
		_, err = s.pool.Exec(ctx, add, Task{n})
	}
	return err
}
