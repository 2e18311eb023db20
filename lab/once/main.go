// Once plays small stories that happen to people who use a job queue, on onceq and on others. Each has one question
// and a number as its answer: rows written, charges made, callers told nothing. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/pgserver"
	"github.com/onceq/onceq/lab/peers"
)

var stories = slices.Concat(keyStories, runStories, effectStories, limitStories, tickStories)

func main() {
	if name := os.Getenv(envAdapter); name != "" {
		if err := serveAdapter(name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	only := flag.String("only", "", "play some: story/system; a story or a system alone stands for all of it")
	page := flag.String("o", "", "the page: written if everything was played; otherwise what was played is compared with it")
	parallel := flag.Int("parallel", 4, "stories that are played at once")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := play(ctx, *only, *page, *parallel); err != nil {
		fmt.Fprintln(os.Stderr, "once:", err)
		os.Exit(1)
	}
}

// theatre is what all stages share.
type theatre struct {
	server *pgserver.Server
	admin  *pgxpool.Pool

	mu        sync.Mutex
	databases int
}

func openTheatre(ctx context.Context, restarts bool) (*theatre, error) {
	server, err := pgserver.Start(ctx, pgserver.Options{
		Own: restarts, Durable: restarts, Settings: map[string]string{"max_connections": "400"},
	})
	if err != nil {
		return nil, err
	}
	admin, err := pgxpool.New(ctx, server.DatabaseURL("postgres"))
	if err != nil {
		return nil, errors.Join(err, server.Stop())
	}
	return &theatre{server: server, admin: admin}, nil
}

func (t *theatre) close() {
	t.admin.Close()
	_ = t.server.Stop()
}

// perform plays a story for a system on a stage of its own.
func (t *theatre) perform(ctx context.Context, sys *system, st *story) outcome {
	if _, err := sys.ready(); err != nil {
		return outcome{err: err}
	}
	if st.restarts {
		own, err := openTheatre(ctx, true)
		if err != nil {
			return outcome{err: err}
		}
		defer own.close()
		t = own
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t.mu.Lock()
	t.databases++
	name := fmt.Sprintf("once_%d_%d", os.Getpid(), t.databases)
	t.mu.Unlock()
	if _, err := t.admin.Exec(ctx, "create database "+name); err != nil {
		return outcome{err: err}
	}
	defer func() { _, _ = t.admin.Exec(context.WithoutCancel(ctx), "drop database "+name+" with (force)") }()
	s := &stage{ctx: ctx, system: sys, url: t.server.DatabaseURL(name), server: t.server}
	if sys.redis {
		dir, err := os.MkdirTemp("", "once-")
		if err != nil {
			return outcome{err: err}
		}
		defer func() { _ = os.RemoveAll(dir) }()
		redis, err := peers.StartRedis(dir)
		if err != nil {
			return outcome{err: err}
		}
		defer redis.Stop()
		s.redis = redis.Socket
	}
	var err error
	if s.pool, err = pgxpool.New(ctx, s.url); err != nil {
		return outcome{err: err}
	}
	if _, err := s.pool.Exec(ctx, "create table app_rows (n int not null)"); err != nil {
		s.pool.Close()
		return outcome{err: err}
	}
	return s.perform(st)
}

// cell is a place in the table.
type cell struct {
	story  *story
	system *system
}

// chosen gives the cells that -only names.
func chosen(all []*system, only string) (cells []cell, err error) {
	story, sys, both := strings.Cut(only, "/")
	for _, one := range all {
		for _, st := range stories {
			if only == "" || both && st.name == story && one.name == sys || !both && (st.name == only || one.name == only) {
				cells = append(cells, cell{st, one})
			}
		}
	}
	if len(cells) == 0 {
		return nil, fmt.Errorf("there is no %q; a story and a system are named as %s/%s", only, stories[0].name, all[0].name)
	}
	return cells, nil
}

func play(ctx context.Context, only, page string, parallel int) error {
	all := systems()
	cells, err := chosen(all, only)
	if err != nil {
		return err
	}
	cells = slices.DeleteFunc(cells, func(c cell) bool {
		_, err := c.system.ready()
		return errors.Is(err, errNoSQL) && !strings.HasSuffix(only, c.system.name)
	})
	t, err := openTheatre(ctx, false)
	if err != nil {
		return err
	}
	defer t.close()
	var version string
	if err := t.admin.QueryRow(ctx, "show server_version").Scan(&version); err != nil {
		return err
	}
	began := time.Now()
	outcomes := make(map[cell]outcome)
	var mu sync.Mutex // guards outcomes, and prints
	next := make(chan cell)
	var players sync.WaitGroup
	for range parallel {
		players.Go(func() {
			for c := range next {
				o := t.perform(ctx, c.system, c.story)
				if o.err != nil { // a machine that is too busy, as a rule
					fmt.Fprintf(os.Stderr, "once: %s/%s is played again: %v\n", c.story.name, c.system.name, o.err)
					o = t.perform(ctx, c.system, c.story)
				}
				mu.Lock()
				outcomes[c] = o
				fmt.Printf("%-42s %-16s %s  (%.1f s)\n", c.story.name, c.system.name, o.text(c), o.took.Seconds())
				mu.Unlock()
			}
		})
	}
	for _, c := range cells {
		if ctx.Err() == nil {
			next <- c
		}
	}
	close(next)
	players.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	failed := 0
	for _, o := range outcomes {
		if o.err != nil {
			failed++
		}
	}
	fmt.Printf("%d stories in %s\n", len(cells), time.Since(began).Round(time.Second))
	switch {
	case failed > 0:
		return fmt.Errorf("%d could not be played to their end", failed)
	case page == "":
		return nil
	}
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	before := readPage(string(text), all)
	added := only == cells[0].system.name && before.systems[cells[0].system] == ""
	if only == "" || added {
		return writePage(page, all, before, outcomes, version)
	}
	return before.compare(outcomes)
}
