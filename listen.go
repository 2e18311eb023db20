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

	"github.com/jackc/pgx/v5/pgxpool"
)

// Workers find jobs by polling. Notifications make that faster and are never needed: a missed one costs the wait until the
// next poll. Enqueue sends one only while the row of some worker in waiters says that it waits, and a worker writes that
// row only after a notification of its own has arrived. So a busy queue sends none, and behind a pooler that drops them
// nobody sends any.

const (
	announceFor   = 60 * time.Second       // how long an announcement counts
	announceAgain = 20 * time.Second       // how often it is renewed
	announceRest  = 250 * time.Millisecond // at least this long between two: each leaves a dead row that Enqueue has to step over
	quietBefore   = 20 * time.Millisecond
	pollListening = time.Second
	pollUnheard   = 250 * time.Millisecond
	confirmWithin = 2 * time.Second
)

// channel is the channel on which workers of a schema listen. It is short, whatever the schema's name.
func channel(schema string) string {
	sum := sha256.Sum256([]byte(schema))
	return "onceq_" + hex.EncodeToString(sum[:8])
}

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

// announcement tells producers that a claimer waits for jobs of its queue. Only its claimer's goroutine uses it.
type announcement struct {
	at    time.Time // zero: there is none
	tried time.Time // the latest try, successful or not
}

// announce tells producers that this run waits for jobs of these queues.
func (l *listener) announce(ctx context.Context, queues []string) error {
	const announce = `
insert into onceq.waiters (queue, worker, idle_until)
select u.queue, $2::bigint, statement_timestamp() + $3::bigint * interval '1 microsecond' from unnest($1::text[]) as u(queue)
on conflict (queue, worker) do update set idle_until = excluded.idle_until
returning 1`
	return l.did(ctx, l.q.guarded(ctx, l.db, announce, []any{queues, l.id, announceFor.Microseconds()}, nil))
}

// unannounce stops notifications for these queues, while this run is busy with them.
func (l *listener) unannounce(ctx context.Context, queues []string) error {
	const unannounce = `with gone as (delete from onceq.waiters where queue = any ($1::text[]) and worker = $2::bigint) select 1`
	return l.did(ctx, l.q.guarded(ctx, l.db, unannounce, []any{queues, l.id}, nil))
}

func (l *listener) did(ctx context.Context, err error) error {
	if err == nil {
		l.q.works(l.id, workAnnounce, "")
	} else if ctx.Err() == nil {
		l.q.fails(l.id, workAnnounce, "", err)
	}
	return err
}

// listener gets notifications of new jobs for all queues of one Run.
type listener struct {
	q         *Queue
	id        int64              // of the run
	db        *pgxpool.Pool      // the worker's own
	woken     func(queue string) // called for each notification; with "" when notifications begin to arrive
	confirmed atomic.Bool        // notifications are known to arrive
	notOfTx   atomic.Bool        // but none for jobs that were enqueued in a transaction
}

// unannounceAll is for the end of the run.
func (l *listener) unannounceAll() {
	const unannounce = `with gone as (delete from onceq.waiters where worker = $1::bigint) select 1`
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	_ = l.q.guarded(ctx, l.db, unannounce, []any{l.id}, nil) // the rows expire anyway
}

// loop keeps a connection that listens, and passes notifications on to the claimers. It counts as listening only after a
// notification of its own has come back: poolers accept LISTEN and deliver nothing.
func (l *listener) loop(ctx context.Context) {
	for wait := time.Second; ; wait = min(2*wait, 30*time.Second) {
		began := time.Now()
		err := l.listenOnce(ctx)
		l.confirmed.Store(false)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			wait = time.Second
		}
		if errors.Is(err, errUnheard) {
			wait = 10 * time.Minute
		}
		if errors.Is(err, errUnheard) {
			l.q.works(l.id, workListen, "") // polling is all that can be done there
			l.q.log.Info("onceq: not listening for new jobs, polling until it does again", slog.Duration("next_try_in", wait), slog.Any("reason", err))
		} else {
			l.q.fails(l.id, workListen, "", err, slog.Duration("next_try_in", wait))
		}
		if !sleep(ctx, wait/2+rand.N(wait), nil) {
			return
		}
	}
}

var errUnheard = errors.New("a notification did not come back")

func (l *listener) listenOnce(ctx context.Context) error {
	var citus bool
	if err := query(ctx, l.db, askCitus, nil, row(&citus)); err != nil {
		return err
	}
	if citus { // nobody is notified: see citus.go
		return fmt.Errorf("%w: with Citus there are none", errUnheard)
	}
	pooled, err := l.db.Acquire(ctx) // from the pool, so that the application's hooks prepare the new connection
	if err != nil {
		return err
	}
	conn := pooled.Hijack()
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	if _, err := conn.Exec(ctx, "listen "+l.q.channel); err != nil {
		return err
	}
	hello := fmt.Sprintf("\x01%d", l.id) // begins with an invisible character, as no queue's name should
	var prepares bool                    // transactions can be prepared: see insertGeneral
	const greet = "select current_setting('max_prepared_transactions') <> '0' from pg_notify($1::text, $2::text)"
	if err := l.q.queryRow(ctx, l.db, greet, []any{l.q.channel, hello}, &prepares); err != nil {
		return err
	}
	l.notOfTx.Store(prepares)
	confirm, cancel := context.WithTimeout(ctx, confirmWithin)
	defer cancel()
	waiting := confirm
	for {
		n, err := conn.WaitForNotification(waiting)
		if err != nil {
			if waiting == confirm && ctx.Err() == nil {
				// This is probably a pooler. It should not keep a server session that listens for nobody.
				unlisten, cancel := context.WithTimeout(ctx, confirmWithin)
				defer cancel()
				_, _ = l.db.Exec(unlisten, "unlisten "+l.q.channel)
				return fmt.Errorf("%w within %s", errUnheard, confirmWithin)
			}
			return err
		}
		if n.Payload == hello {
			waiting = ctx
			if _, err := conn.Exec(ctx, "set idle_session_timeout = 0"); err != nil { // only now is it known to be a session
				return err
			}
			l.confirmed.Store(true)
			l.q.works(l.id, workListen, "")
			l.woken("") // so that the claimers end their short polls and announce that they wait
			continue
		}
		l.woken(n.Payload)
	}
}
