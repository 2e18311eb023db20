// Package watch knows which work in the background fails: workers and Reapers tell it, and people ask. It
// imports pg and sqlstate.
package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
)

// Work is a sort of work that workers and Reapers do repeatedly in the background.
type Work struct {
	Name  string // onceq.Event.Name
	doing string
	until string // what happens while it fails
}

// The sorts.
var (
	Claim    = &Work{"claim", "claiming jobs", "no job starts"}
	Rescan   = &Work{"rescan", "looking for expired leases", "jobs whose process ended, and jobs that were committed late, may not be found"}
	Extend   = &Work{"extend", "extending leases", "leases run out and their jobs run again"}
	Finish   = &Work{"finish", "storing outcomes", "it is not known whether outcomes are recorded; a job whose outcome is not recorded runs again when its lease has run out"}
	Announce = &Work{"announce", "announcing that a worker is waiting", "new jobs wait for the next poll"}
	Promote  = &Work{"promote", "letting jobs into their lanes", "lanes with room may stay still"}
	Look     = &Work{"look", "looking for jobs that are due", "jobs that no notification announces do not start"}
	Listen   = &Work{"listen", "listening for new jobs", "new jobs wait for the next poll"}
	Presence = &Work{"presence", "writing a worker's row", "Workers and Explain take this worker for one that has gone"}
	Count    = &Work{"count", "writing what the worker has counted", "Counts is behind"}
	Reap     = &Work{"reap", "reaping", "the tables grow"}
)

// Troubles is the background work of this process that is failing now.
type Troubles struct {
	Log    *slog.Logger
	Report func(w *Work, queue string, count int, err error) // called for each failure; nil for nobody

	open atomic.Int32 // the length of all, so that work that goes well takes no lock
	mu   sync.Mutex   // guards all, and what it points to
	all  map[troubleKey]*trouble
}

type troubleKey struct {
	owner any // the run of a worker, a Reaper
	work  *Work
	queue string
}

type trouble struct {
	since time.Time
	count int
	err   error
}

// Fails reports that background work failed: to the log and Report, and in Health until it works again.
func (s *Troubles) Fails(owner any, w *Work, queue string, err error, more ...slog.Attr) {
	s.mu.Lock()
	key := troubleKey{owner, w, queue}
	t := s.all[key]
	if t == nil {
		t = &trouble{since: time.Now()}
		if s.all == nil {
			s.all = make(map[troubleKey]*trouble)
		}
		s.all[key] = t
		s.open.Add(1)
	}
	t.count++
	t.err = err
	count := t.count
	s.mu.Unlock()
	if s.Report != nil {
		s.Report(w, queue, count, err)
	}
	if queue != "" {
		more = append(more, slog.String("queue", queue))
	}
	s.Log.LogAttrs(context.Background(), slog.LevelWarn, "onceq: "+w.doing+" failed; it will be tried again", append(more, slog.Int("count", count), slog.Any("error", err))...)
}

// Works reports that background work went well.
func (s *Troubles) Works(owner any, w *Work, queue string) {
	if s.open.Load() == 0 {
		return
	}
	s.drop(func(k troubleKey) bool { return k == troubleKey{owner, w, queue} })
}

// Ends reports that the owner does no more work.
func (s *Troubles) Ends(owner any) {
	s.drop(func(k troubleKey) bool { return k.owner == owner })
}

func (s *Troubles) drop(which func(troubleKey) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.all {
		if which(k) {
			delete(s.all, k)
			s.open.Add(-1)
		}
	}
}

// Trouble is work in the background that fails, and what to do about it.
type Trouble struct {
	Queue          string
	Detail, Advice string
	Error          string
	Since          time.Time
}

// List returns those of an owner and of some sorts, those that have lasted longest first. Without an owner it
// returns all.
func (s *Troubles) List(owner any, works ...*Work) []Trouble {
	if s.open.Load() == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []troubleKey
	for k := range s.all {
		if owner == nil || k.owner == owner && slices.Contains(works, k.work) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b troubleKey) int {
		return cmp.Or(s.all[a].since.Compare(s.all[b].since), cmp.Compare(a.work.Name, b.work.Name), cmp.Compare(a.queue, b.queue))
	})
	var found []Trouble
	for _, k := range keys {
		t := s.all[k]
		where := ""
		if k.queue != "" {
			where = fmt.Sprintf(" of queue %q", k.queue)
		}
		found = append(found, Trouble{
			Queue: k.queue, Since: t.since, Error: t.err.Error(), Advice: adviceFor(t.err),
			Detail: fmt.Sprintf("%s%s has failed %d times since %s; meanwhile %s; the latest error: %v",
				k.work.doing, where, t.count, t.since.UTC().Format(time.RFC3339), k.work.until, t.err),
		})
	}
	return found
}

// adviceFor says what to do about an error of background work.
func adviceFor(err error) string {
	switch state := sqlstate.Of(err); {
	case errors.Is(err, pg.ErrSilent):
		return "the work goes on by itself, over new connections; if it happens again, look for what drops connections between this process and the server: a NAT or a firewall that forgets them, a fail-over"
	case state == "25006":
		return "the server accepts no writes: connect to the primary instead of a standby"
	case state == "42501":
		return "grant the role what migrations.Grants lists"
	case sqlstate.NoTables(err):
		return "apply the migrations, or set Config.Schema to the right schema"
	case state == "53300":
		return "raise the server's max_connections, or lower the pools' MaxConns: a worker opens up to 4 connections of its own in addition to its pool"
	case state == "55P03" || state == "57014" || state == "" && errors.Is(err, context.DeadlineExceeded):
		return "look in pg_stat_activity and pg_locks for what keeps it waiting, and end that; or find out why the server is slow"
	case state == "" || state[:2] == "08" || state[:2] == "57":
		return "check whether this process reaches the database, and whether the server is up and accepts the role; the work then goes on by itself"
	}
	return "the error says why; once that is fixed, the work goes on by itself"
}
