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

func (l *lane) announce(ctx context.Context) error {
	const announce = `
insert into onceq.waiters (queue, worker, idle_until)
values ($1::text, $2::bigint, statement_timestamp() + $3::bigint * interval '1 microsecond')
on conflict (queue, worker) do update set idle_until = excluded.idle_until
returning 1`
	err := l.q.guarded(ctx, l.side, announce, []any{l.queue, l.id, announceFor.Microseconds()}, nil)
	if err == nil {
		l.announced = time.Now()
		l.q.works(l.id, workAnnounce, l.queue)
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
		l.q.works(l.id, workAnnounce, l.queue)
	} else if ctx.Err() == nil {
		l.q.fails(l.id, workAnnounce, l.queue, err)
	}
}

func (r *run) unannounceAll() {
	const unannounce = `with gone as (delete from onceq.waiters where worker = $1::bigint) select 1`
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	_ = r.q.guarded(ctx, r.side, unannounce, []any{r.id}, nil) // it expires anyway
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
			r.q.works(r.id, workListen, "") // it does what it can there
			r.q.log.Info("onceq: not listening for new jobs, polling until it does again", slog.Duration("next_try_in", wait), slog.Any("reason", err))
		} else {
			r.q.fails(r.id, workListen, "", err, slog.Duration("next_try_in", wait))
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
			r.q.works(r.id, workListen, "")
			for _, l := range r.lanes {
				l.rouse() // out of a poll that knows of no notifications, to announce that it waits
			}
		}
		if l := lanes[n.Payload]; l != nil {
			l.rouse()
		}
	}
}
