package onceq

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// Workers wake by polling. A notification makes it faster and is never needed: one that is missed costs a poll.
// Enqueue sends one only while some worker's row in waiters says that it waits, and a worker writes that
// row only once it has seen a notification of its own arrive. So a busy queue sends none, and behind a
// pooler that swallows them nobody sends any.

const (
	announceFor   = 60 * time.Second       // how long an announcement counts
	announceAgain = 20 * time.Second       // and how often it is renewed
	announceRest  = 250 * time.Millisecond // between two in any case: each leaves a dead row for Enqueue to step over
	quietBefore   = 20 * time.Millisecond
	pollListening = time.Second
	pollDeaf      = 250 * time.Millisecond
	confirmWithin = 2 * time.Second
)

// channel is where workers of a schema listen: short, whatever the schema's name.
func channel(schema string) string {
	sum := sha256.Sum256([]byte(schema))
	return "onceq_" + hex.EncodeToString(sum[:8])
}

// quietFor is how long Enqueue believes that nobody waits for a queue once it has seen so, counted from before it asked:
// asking takes a tenth of the rate of small transactions. A worker that announces itself looks again after that time, and
// so misses nothing.
const quietFor = 10 * time.Millisecond

var processStart = time.Now()

func (q *Queue) isQuiet(queue string) bool {
	until, ok := q.quiet.Load(queue)
	return ok && int64(time.Since(processStart)) < until.(*atomic.Int64).Load()
}

// setQuiet is for an answer that nobody waits, asked for at that time; zero: nobody was asked.
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

// rest waits for work: a few short pauses first, because work rarely comes alone; then it announces that it
// waits, looks once more, and waits for a notification, the next delayed job or the poll interval. It says
// whether a notification ended it.
func (l *lane) rest(ctx context.Context, pause time.Duration) bool {
	if time.Since(l.found) < quietBefore {
		return l.nap(ctx, min(pause, quietBefore))
	}
	listening := l.listening.Load()
	if listening && time.Since(l.announced) > announceAgain {
		if time.Since(l.announcing) < announceRest {
			return l.nap(ctx, quietBefore/2)
		}
		l.announcing = time.Now()
		if err := l.announce(ctx); err == nil {
			return false // a job may have been committed just before the announcement
		} else if ctx.Err() == nil {
			l.q.fails(l.run, workAnnounce, l.queue, err)
			l.announced = time.Now() // not with every poll
		}
	}
	poll := l.poll
	if poll == 0 {
		if poll = pollListening; !listening || l.silent.Load() {
			poll = pollDeaf
		}
	}
	wait := poll*9/10 + rand.N(max(1, poll/5))
	// Soon after the announcement: for producers that had just seen that nobody waits, and for transactions that had.
	for _, look := range [...]time.Duration{quietFor + time.Millisecond, 3 * quietFor, 9 * quietFor} {
		if announced := time.Since(l.announced); announced < look {
			wait = min(wait, look-announced)
			break
		}
	}
	if wait > 9*quietFor {
		if due, ok := l.nextDue(ctx); ok {
			wait = min(wait, due)
		}
	}
	return l.nap(ctx, wait)
}

func (l *lane) nap(ctx context.Context, d time.Duration) (woken bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-l.wake:
		return true
	}
	return false
}

// rouse ends the lane's nap, or the next one.
func (l *lane) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *lane) announce(ctx context.Context) error {
	const announce = `
insert into onceq.waiters (queue, worker, idle_until)
values ($1::text, $2::bigint, statement_timestamp() + $3::bigint * interval '1 microsecond')
on conflict (queue, worker) do update set idle_until = excluded.idle_until
returning 1`
	err := l.q.guarded(ctx, l.side, announce, []any{l.queue, l.id, announceFor.Microseconds()}, nil)
	if err == nil {
		l.announced = time.Now()
		l.q.works(l.run, workAnnounce, l.queue)
	}
	return err
}

// unannounce stops notifications while this worker is busy anyway.
func (l *lane) unannounce(ctx context.Context) {
	const unannounce = `with gone as (delete from onceq.waiters where queue = $1::text and worker = $2::bigint) select 1`
	if l.announced.IsZero() {
		return
	}
	if err := l.q.guarded(ctx, l.side, unannounce, []any{l.queue, l.id}, nil); err == nil {
		l.announced = time.Time{}
		l.q.works(l.run, workAnnounce, l.queue)
	} else if ctx.Err() == nil {
		l.q.fails(l.run, workAnnounce, l.queue, err)
	}
}

func (r *run) unannounceAll() {
	const unannounce = `with gone as (delete from onceq.waiters where worker = $1::bigint) select 1`
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	_ = r.q.guarded(ctx, r.side, unannounce, []any{r.id}, nil) // it expires anyway
}

// nextDue is how long it takes until the next delayed job is due, of those that were not due yet when the last claim
// began: one may have become so since.
func (l *lane) nextDue(ctx context.Context) (time.Duration, bool) {
	const next = `
select (extract(epoch from min(j.run_at) - statement_timestamp()) * 1000000)::bigint
  from unnest($2::smallint[]) as p(priority)
 cross join lateral (
       select run_at from onceq.jobs
        where queue = $1::text and priority = p.priority and run_at > $3::timestamptz
        order by run_at limit 1) j`
	var due *int64
	priorities := make([]int16, 0, len(l.at))
	for _, p := range l.at {
		priorities = append(priorities, int16(p.priority))
	}
	switch err := l.q.guarded(ctx, l.side, next, []any{l.queue, priorities, l.claimedTo}, &due); {
	case err == nil:
		l.q.works(l.run, workNextDue, l.queue)
	case ctx.Err() == nil:
		l.q.fails(l.run, workNextDue, l.queue, err)
	}
	if due == nil {
		return 0, false
	}
	return time.Duration(*due)*time.Microsecond + time.Millisecond, true
}

// listen keeps a connection that listens, and passes notifications on to the lanes. It counts as listening
// only after a notification of its own has come back: poolers accept LISTEN and deliver nothing.
func (r *run) listen(ctx context.Context) {
	for wait := time.Second; ; wait = min(2*wait, 30*time.Second) {
		began := time.Now()
		err := r.listenOnce(ctx)
		r.listening.Store(false)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			wait = time.Second
		}
		if errors.Is(err, errDeaf) {
			wait = 10 * time.Minute
		}
		if errors.Is(err, errDeaf) {
			r.q.works(r, workListen, "") // it does what it can there
			r.q.log.Info("onceq: not listening for new jobs, polling until it does again", slog.Duration("next_try_in", wait), slog.Any("reason", err))
		} else {
			r.q.fails(r, workListen, "", err, slog.Duration("next_try_in", wait))
		}
		if !sleep(ctx, wait/2+rand.N(wait), nil) {
			return
		}
	}
}

var errDeaf = errors.New("a notification did not come back")

func (r *run) listenOnce(ctx context.Context) error {
	pooled, err := r.side.Acquire(ctx) // by the pool, for what the application's hooks do to a new connection
	if err != nil {
		return err
	}
	conn := pooled.Hijack()
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	if _, err := conn.Exec(ctx, "listen "+r.q.channel); err != nil {
		return err
	}
	hello := fmt.Sprintf("\x01%d", r.id) // no queue's name: it would be an invisible one
	var silent bool                      // see notify
	const greet = "select current_setting('max_prepared_transactions') <> '0' from pg_notify($1::text, $2::text)"
	if err := r.q.queryRow(ctx, r.side, greet, []any{r.q.channel, hello}, &silent); err != nil {
		return err
	}
	r.silent.Store(silent)
	lanes := make(map[string]*lane)
	for _, l := range r.lanes {
		lanes[l.queue] = l
	}
	confirm, cancel := context.WithTimeout(ctx, confirmWithin)
	defer cancel()
	waiting := confirm
	for {
		n, err := conn.WaitForNotification(waiting)
		if err != nil {
			if waiting == confirm && ctx.Err() == nil {
				// A pooler, most likely: it should not keep a server's session that listens for nobody.
				unlisten, cancel := context.WithTimeout(ctx, confirmWithin)
				defer cancel()
				_, _ = r.side.Exec(unlisten, "unlisten "+r.q.channel)
				return fmt.Errorf("%w within %s", errDeaf, confirmWithin)
			}
			return err
		}
		if n.Payload == hello {
			waiting = ctx
			r.listening.Store(true)
			r.q.works(r, workListen, "")
			for _, l := range r.lanes {
				l.rouse() // out of a poll that knows of no notifications, to announce that it waits
			}
		}
		if l := lanes[n.Payload]; l != nil {
			l.rouse()
		}
	}
}
