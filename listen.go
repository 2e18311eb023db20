package onceq

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Workers find jobs by polling. Notifications make that faster and are never needed: a missed one costs the wait until the
// next poll.
//
// A worker that waits has one row in waiters, whatever the number of its queues. It writes that row only after a notification
// of its own has arrived, so behind a pooler that drops them nobody sends any. Enqueue wakes one worker that waits, and a
// call with many jobs as many as have room for them: it notifies the worker's own channel and inserts a row into wakes, both
// with the caller's commit. From then on no other job wakes that worker, until it has announced itself anew. So a burst
// spreads over the idle workers, and one that is dead or frozen is woken once. Enqueue locks and updates no row for it: it
// never waits for another transaction. The function wake in the migration does this.
//
// A busy queue sends no notifications, because nobody waits for it.

const (
	announceFor   = 60 * time.Second       // how long an announcement counts
	announceAgain = 20 * time.Second       // how often it is renewed
	announceRest  = 250 * time.Millisecond // longest rest between two: each leaves a dead row that Enqueue has to step over
	announceShare = 20                     // so many times as long as the last one took: it steps over these rows too
	quietBefore   = 20 * time.Millisecond
	pollListening = time.Second
	pollUnheard   = 250 * time.Millisecond
	confirmWithin = 2 * time.Second
)

// quietFor is how long Enqueue assumes that nobody waits for a queue after it has found that nobody does, counted from just
// before it asked: asking costs small transactions a tenth of their rate. A worker that announces itself looks again after
// that time, and so misses nothing.
const quietFor = 10 * time.Millisecond

var processStart = time.Now()

func (q *Queue) isQuiet(queue string) bool {
	until, ok := q.quiet.Load(queue)
	return ok && int64(time.Since(processStart)) < until.(*atomic.Int64).Load()
}

// setQuiet records the answer that nobody waits. asked is when the statement asked, and zero if it did not.
func (q *Queue) setQuiet(queue string, asked time.Time) {
	if asked.IsZero() {
		return
	}
	until, ok := q.quiet.Load(queue)
	if !ok {
		until, _ = q.quiet.LoadOrStore(queue, new(atomic.Int64))
	}
	until.(*atomic.Int64).Store(int64(asked.Sub(processStart) + quietFor))
}

// announcement is when a claimer has announced that it waits. Only its claimer's goroutine uses it.
type announcement struct {
	at    time.Time     // zero: it has not, or it is busy since
	tried time.Time     // the latest try, successful or not
	rest  time.Duration // after tried
}

// listener is how producers reach one run: what they know about it, and the notifications that it gets from the process's
// session.
type listener struct {
	q         *Queue
	id        int64 // of the run
	db        quick
	channel   string
	woken     func(queue string) // called for each notification; with "" when notifications begin to arrive. It must not wait
	confirmed atomic.Bool        // notifications are known to arrive
	notOfTx   atomic.Bool        // but none for jobs that were enqueued in a transaction

	queues []string // all of the run, sorted
	serves int64    // names them in waiter_queues
	room   int      // for how many jobs a queue has room at least

	mu    sync.Mutex      // guards what follows, and is held while the row is written
	idle  map[string]bool // queues that wait
	round int64           // of the row
	waits atomic.Bool     // the row says that the run waits, and it was not woken since
}

func newListener(w *Worker, id int64, own *ownConns, woken func(string)) *listener {
	l := &listener{q: w.q, id: id, db: quick{own: own}, channel: fmt.Sprintf("onceq_%d", id), woken: woken, idle: make(map[string]bool)}
	l.queues = slices.Sorted(maps.Keys(w.queues))
	sum := sha256.Sum256([]byte(strings.Join(l.queues, "\x00")))
	l.serves = int64(binary.BigEndian.Uint64(sum[:]))
	l.room = math.MaxInt32
	for _, c := range w.queues {
		l.room = min(l.room, c.Concurrency)
	}
	return l
}

// maxBusy is how many busy queues an announcement names. A run with more does not announce itself.
const maxBusy = 100

// announce tells producers that this run waits for jobs of these queues.
func (l *listener) announce(ctx context.Context, queues []string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, queue := range queues {
		l.idle[queue] = true
	}
	return l.write(ctx)
}

// unannounce stops notifications for these queues, while this run is busy with them.
func (l *listener) unannounce(ctx context.Context, queues []string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, queue := range queues {
		delete(l.idle, queue)
	}
	if len(l.idle) == 0 && !l.waits.Load() {
		return nil // whoever woke it has said so
	}
	return l.write(ctx)
}

// write writes the row. The caller holds mu.
func (l *listener) write(ctx context.Context) (err error) {
	const announce = `
with woken as (
  delete from onceq.wakes where worker = $1::bigint and round = $3::bigint - 1
)
insert into onceq.waiters (worker, serves, round, room, busy, idle_until)
values ($1::bigint, $2::bigint, $3::bigint, $4::bigint, $5::text[], statement_timestamp() + $6::bigint * interval '1 microsecond')
on conflict (worker) do update set round = excluded.round, busy = excluded.busy, idle_until = excluded.idle_until
returning exists (select from onceq.waiter_queues where queue = $7::text and serves = $2::bigint)`
	const name = `
with new as (
  insert into onceq.waiter_queues (queue, serves)
  select u.queue, $2::bigint from unnest($1::text[]) as u(queue) order by u.queue collate "C"
  on conflict do nothing
)
select 1`
	defer func() {
		if err == nil {
			l.q.works(l.id, workAnnounce, "")
		} else if ctx.Err() == nil {
			l.q.fails(l.id, workAnnounce, "", err)
		}
	}()
	until := announceFor
	busy := len(l.queues) - len(l.idle)
	if busy > maxBusy || busy == len(l.queues) {
		until = 0
	}
	var names []string
	if until > 0 && busy > 0 {
		for _, queue := range l.queues {
			if !l.idle[queue] {
				names = append(names, queue)
			}
		}
	}
	l.round++
	l.waits.Store(until > 0)
	var known bool
	if err = l.q.guarded(ctx, l.db, announce, []any{l.id, l.serves, l.round, l.room, names, until.Microseconds(), l.queues[0]}, &known); err == nil && !known {
		err = l.q.guarded(ctx, l.db, name, []any{l.queues, l.serves}, nil)
	}
	if err != nil {
		l.waits.Store(false)
	}
	return err
}

// confirm says that the session listens for this run. prepares is whether the server can prepare transactions.
func (l *listener) confirm(prepares bool) {
	l.notOfTx.Store(prepares)
	l.waits.Store(false) // notifications may have been lost
	l.confirmed.Store(true)
	l.q.works(l.id, workListen, "")
	l.woken("") // so that the claimers end their short polls and announce that they wait
}

// hear is called for each notification.
func (l *listener) hear(queue string) {
	l.waits.Store(false)
	l.woken(queue)
}

// unannounceAll is for the end of the run.
func (l *listener) unannounceAll() {
	const unannounce = `
with gone as (delete from onceq.waiters where worker = $1::bigint),
     woken as (delete from onceq.wakes where worker = $1::bigint and round = $2::bigint)
select 1`
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.round > 0 {
		_ = l.q.guarded(ctx, l.db, unannounce, []any{l.id, l.round}, nil) // the rows expire anyway
	}
}
