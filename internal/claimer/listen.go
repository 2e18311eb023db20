package claimer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plan"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/watch"
)

// Workers find jobs by polling. Notifications make that faster and are never needed: a missed one costs the wait until the
// next poll.
//
// A worker that waits has one row in waiters, whatever the number of its queues, unless enough others wait already (plan.DormantFrom).
// The row names the queues that are busy. It writes that row only after a notification of its own has arrived, so behind a pooler that drops them nobody sends any.
// Enqueue wakes one worker that waits, and a call with many jobs as many as have room for them: it notifies the worker's own
// channel and inserts a row into wakes, both with the caller's commit. From then on no other job of that queue wakes that
// worker, until it has announced itself anew. So a burst spreads over the idle workers, and one that is dead or frozen is
// woken once for each queue. Enqueue locks and updates no row for it: it never waits for another transaction. The function
// wake in the migration does this.
//
// A busy queue sends no notifications, because nobody waits for it. Where others wait too, and single jobs come one soon
// after the other to handlers that are quick, the worker that is woken goes on looking for a while, and nobody else is woken
// meanwhile: 15 ms, or 100 where it has found many jobs in that time before. Each notification costs something in all processes
// that listen, so without this 1,000 jobs a second kept two processors busy from ten processes on.

// lookMore stands before and after the time in milliseconds that precedes the queue's name in a notification that asks the worker
// to go on looking for that time.
const lookMore = "\x1f"

// MoreOf returns the queue and the time of such a notification. A queue may have such a name, so 0 says nothing of others.
func MoreOf(payload string) (queue string, looks time.Duration) {
	if text, ok := strings.CutPrefix(payload, lookMore); ok {
		if number, name, ok := strings.Cut(text, lookMore); ok {
			if n, err := strconv.ParseUint(number, 10, 15); err == nil {
				return name, time.Duration(n) * time.Millisecond
			}
		}
	}
	return "", 0
}

// Listener is how producers reach one run: what they know about it, and the notifications that it gets from the process's
// session.
type Listener struct {
	pg.Hearer // woken is called with a queue for each notification, and with "" when these begin to arrive
	*Config
	notOfTx atomic.Bool // no notifications arrive for jobs that were enqueued in a transaction
	Waits   atomic.Bool // producers know that the run waits for jobs of each open queue, or it is dormant. The claimer sets it

	queues []string // all of the run, sorted
	serves int64    // names them in waiter_queues
	kinds  int64    // names the kinds that it has handlers for, and its PollInterval
	polls  bool     // at the default interval
	room   int      // for how many jobs a queue has room at least

	// The claimer's upkeep uses these, and unannounceAll after that.
	round   int64 // of the row
	named   bool  // queues are in waiter_queues, or were
	dormant bool  // the run has no row, because enough others wait
}

func newListener(c *Claimer, woken func(string)) *Listener {
	l := &Listener{Config: &c.Config, queues: plan.Names(c.plan.Queues), polls: c.Poll == 0, room: math.MaxInt32}
	l.Channel, l.Woken, l.Heard, l.Lost = fmt.Sprintf("onceq_%d", l.ID), woken, l.confirm, l.isLost
	sum := sha256.Sum256([]byte(strings.Join(l.queues, "\x00")))
	l.serves = int64(binary.BigEndian.Uint64(sum[:]))
	l.kinds = pg.Hash(append(slices.Sorted(slices.Values(c.Kinds)), c.Poll.String())...)
	for _, s := range c.slots {
		l.room = min(l.room, s.Count)
	}
	return l
}

// A notification wakes each session of the database that listens, on whatever channel. So where many workers
// wait that could stand in for each other, and look at the default interval, dormantFrom of them are enough,
// and the others are dormant: they have no row in waiters, and their sessions do not listen. Each dormant one
// asks now and then whether fewer than half of dormantFrom wait, and waits then. In a burst that is soon,
// because those that were woken do not count. Whoever has come back stays awake for a minute. Jobs
// that nobody was woken for the looks find, of those that are dormant as of all others that wait.

// announce tells producers what the row says. It returns how many others with the same kinds
// and PollInterval wait for all of these queues and were not woken, and how many of them come before this
// one; it stops counting at plan.DormantFrom. Only those count that have room for as many jobs. They come in an
// order of random numbers, but not that of the ids: those that come first stay awake, and wake chooses among
// them by ids.
func (l *Listener) announce(ctx context.Context, row *plan.Announce) (others, before int, err error) {
	defer func() {
		if err == nil {
			l.Troubles.Works(l.ID, watch.Announce, "")
		} else if ctx.Err() == nil {
			l.Troubles.Fails(l.ID, watch.Announce, "", err)
		}
	}()
	until := 3 * plan.AnnounceAgain
	if !row.Waits {
		until = 0
	}
	setName := func() error {
		err := l.Store.Guarded(ctx, l.DB, stmt.NameQueues, []any{l.queues, l.serves}, nil)
		l.named = err == nil
		return err
	}
	if !l.named { // first, because a row whose queues have no names wakes nobody
		if err = setName(); err != nil {
			return 0, 0, err
		}
	}
	l.round++
	args := []any{
		l.ID, l.serves, l.round, l.room, row.Busy, until.Microseconds(), l.queues[0], plan.DormantFrom, row.Looks.Milliseconds(), l.kinds, 0,
		l.polls, row.Looking, row.MayLeave,
	}
	send := func() error {
		return l.Store.Guarded(ctx, l.DB, stmt.AnnounceRow, args, &l.named, &others, &before, &l.dormant)
	}
	if l.dormant { // it asks first whether so many others wait, and listens before it writes its row
		args[10] = plan.DormantFrom / 2
		if err = send(); err == nil {
			err = l.listens(ctx)
		}
		if err != nil || l.dormant {
			return others, before, err
		}
		args[10], args[13] = 0, false
	}
	if err = send(); err == nil && !l.named { // the Reaper removes what nobody uses
		err = setName()
	}
	return others, before, err
}

// announce has the listener write the row.
func (c *Claimer) announce(ctx context.Context, row *plan.Announce) {
	c.send(ctx, plan.Upkeep, func() func() {
		others, before, err := c.Listener.announce(ctx, row)
		return func() {
			w := plan.Written{Failed: err != nil, Others: others, Before: before, Dormant: c.Listener.dormant}
			c.plan.Announced(row, w, time.Now())
		}
	})
}

// passOn wakes another worker for the jobs of a queue.
func (c *Claimer) passOn(ctx context.Context, q *plan.Queue) {
	c.send(ctx, plan.Upkeep, func() func() {
		err := c.Store.Guarded(ctx, c.DB, stmt.WakeOther, []any{q.Name, rand.Int64(), c.ID}, nil)
		return func() {
			switch {
			case err == nil:
				c.Troubles.Works(c.ID, watch.Announce, "")
			case ctx.Err() == nil:
				c.plan.PassOnFailed(q, time.Now())
				c.Troubles.Fails(c.ID, watch.Announce, "", err)
			}
		}
	})
}

// listens makes the session listen for a run that is not dormant any longer, and not listen for one that still is: just before it became
// dormant a producer may have found it. Where the session is not free the run remains dormant.
func (l *Listener) listens(ctx context.Context) error {
	if l.dormant == l.Deaf.Load() {
		return nil
	}
	how := "listen "
	if l.dormant {
		how = "unlisten "
	}
	used, err := l.DB.Own.Session.Use(ctx, pg.BriefWait, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, how+l.Channel)
		if err == nil {
			l.Deaf.Store(l.dormant)
		}
		return err
	})
	l.dormant = l.dormant || !used || err != nil
	return err
}

// confirm says that the session listens for this run. prepares is whether the server can prepare transactions.
func (l *Listener) confirm(prepares bool) {
	l.notOfTx.Store(prepares)
	l.Confirmed.Store(true)
	l.Troubles.Works(l.ID, watch.Listen, "")
	l.Woken("") // so that the claimer ends its short polls and announces that it waits: notifications may have been lost
}

// isLost says that the session no longer listens for this run, and when that is tried again.
func (l *Listener) isLost(err error, next time.Duration) {
	if errors.Is(err, pg.ErrUnheard) {
		l.Troubles.Works(l.ID, watch.Listen, "") // polling is all that can be done there
		l.Log.Info("onceq: not listening for new jobs, polling until it does again", slog.Duration("next_try_in", next), slog.Any("reason", err))
	} else {
		l.Troubles.Fails(l.ID, watch.Listen, "", err, slog.Duration("next_try_in", next))
	}
}

// UnannounceAll is for the end of the run. For the queues for which it was woken last another run is woken: it may have been left
// jobs that it has not seen.
func (l *Listener) UnannounceAll() {
	const unannounce = `
with gone as (delete from onceq.waiters where worker = $1::bigint returning 1),
     woken as (delete from onceq.wakes where worker = $1::bigint and round <= $2::bigint returning queue)
select pg_catalog.count(onceq.wake(u.queue, 1, $3::bigint, true))
  from pg_catalog.unnest(case when (select count(*) from gone) >= 0 then array(select distinct queue from woken) end) as u(queue)`
	ctx, cancel := context.WithTimeout(context.Background(), pg.EndWithin)
	defer cancel()
	if l.round > 0 {
		_ = l.Store.Guarded(ctx, l.DB, unannounce, []any{l.ID, l.round, rand.Int64()}, nil) // the rows expire anyway
	}
}
