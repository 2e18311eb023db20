package onceq

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

	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/sqlstate"
)

// work is a sort of work that workers and Reapers do repeatedly in the background.
type work struct {
	name  string // Event.Name
	doing string
	until string // what happens while it fails
}

var (
	workClaim    = &work{"claim", "claiming jobs", "no job starts"}
	workRescan   = &work{"rescan", "looking for expired leases", "jobs whose process ended, and jobs that were committed late, may not be found"}
	workExtend   = &work{"extend", "extending leases", "leases run out and their jobs run again"}
	workFinish   = &work{"finish", "storing outcomes", "it is not known whether outcomes are recorded; a job whose outcome is not recorded runs again when its lease has run out"}
	workAnnounce = &work{"announce", "announcing that a worker is waiting", "new jobs wait for the next poll"}
	workPromote  = &work{"promote", "letting jobs into their lanes", "lanes with room may stay still"}
	workLook     = &work{"look", "looking for jobs that are due", "jobs that no notification announces do not start"}
	workListen   = &work{"listen", "listening for new jobs", "new jobs wait for the next poll"}
	workPresence = &work{"presence", "writing a worker's row", "Workers and Explain take this worker for one that has gone"}
	workCount    = &work{"count", "writing what the worker has counted", "Counts is behind"}
	workReap     = &work{"reap", "reaping", "the tables grow"}
)

// troubles is the background work of this process that is failing now.
type troubles struct {
	open atomic.Int32 // the length of all, so that work that goes well takes no lock
	mu   sync.Mutex   // guards all, and what it points to
	all  map[troubleKey]*trouble
}

type troubleKey struct {
	owner any // the run of a worker, a Reaper
	work  *work
	queue string
}

type trouble struct {
	since time.Time
	count int
	err   error
}

// fails reports that background work failed: to the log and the Hook, and in Health until it works again.
func (q *observer) fails(owner any, w *work, queue string, err error, more ...slog.Attr) {
	s := &q.troubles
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
	ctx := context.Background()
	if q.hook != nil {
		q.hook.Event(ctx, Event{Type: EventBackground, Name: w.name, Queue: queue, Count: count, Err: err})
	}
	if queue != "" {
		more = append(more, slog.String("queue", queue))
	}
	q.log.LogAttrs(ctx, EventBackground.Level(), "onceq: "+w.doing+" failed; it will be tried again", append(more, slog.Int("count", count), slog.Any("error", err))...)
}

// works reports that background work went well.
func (q *observer) works(owner any, w *work, queue string) {
	s := &q.troubles
	if s.open.Load() == 0 {
		return
	}
	s.drop(func(k troubleKey) bool { return k == troubleKey{owner, w, queue} })
}

// ends reports that the owner does no more work.
func (q *observer) ends(owner any) {
	q.troubles.drop(func(k troubleKey) bool { return k.owner == owner })
}

func (s *troubles) drop(which func(troubleKey) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.all {
		if which(k) {
			delete(s.all, k)
			s.open.Add(-1)
		}
	}
}

// list returns those that are chosen, those that have lasted longest first.
func (s *troubles) list(which func(troubleKey) bool) []bridge.Trouble {
	if s.open.Load() == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []troubleKey
	for k := range s.all {
		if which(k) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b troubleKey) int {
		return cmp.Or(s.all[a].since.Compare(s.all[b].since), cmp.Compare(a.work.name, b.work.name), cmp.Compare(a.queue, b.queue))
	})
	var found []bridge.Trouble
	for _, k := range keys {
		t := s.all[k]
		where := ""
		if k.queue != "" {
			where = fmt.Sprintf(" of queue %q", k.queue)
		}
		found = append(found, bridge.Trouble{
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
	case noTables(err):
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
