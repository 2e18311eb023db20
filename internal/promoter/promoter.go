// Package promoter lets jobs go on that wait for their lane, their limit or others.
package promoter

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/claimer"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// The numbers that somebody has chosen.
const (
	promoteChunk = 200                    // calls of one slot that one statement takes
	promoteIdle  = time.Minute            // between two looks of a worker none of whose kinds has lanes
	promoteAgain = 100 * time.Millisecond // before a lane is looked at again whose next job is locked
)

// Promoter lets jobs into lanes that have room. Any number of workers may have one; only its loop's goroutine, or that of
// Drain, uses it, except the fields that say otherwise. While the worker waits, the claimer's looks ask whether there are
// calls, so that the promoter needs no connection.
type Promoter struct {
	Config
	wake  chan struct{}          // holds one: look for calls. Anybody may send
	seen  atomic.Bool            // there were calls, so there are lanes here
	met   atomic.Int64           // when it last let in a job of its worker's queues, by rhythm.Now; 0: never
	anew  atomic.Bool            // the next look is for all calls. Anybody may set it
	heard atomic.Pointer[string] // what the worker was woken for, until a look has taken it. Anybody may set it
	again time.Duration          // how soon a lane is looked at again whose next job is locked

	lookback
	waited bool             // the worker had announced that it waits when this last looked
	took   time.Duration    // its latest look
	found  time.Time        // when it last found calls
	pause  time.Duration    // how long it rests next while there was work a moment ago; 0 for the shortest
	asked  [2]time.Duration // what it took the latest two times to ask whether there are calls

	doubts  []Next    // what looks whose answers were lost may have leased
	settled time.Time // when that was last not given back

	full     time.Duration // how long it does not ask while no slot is free and no handler returns
	returned int64         // how many jobs' handlers had ever returned when it last asked
}

// Config is what a promoter works with. That of Claim has no ID, Kinds, Listener and Worker.
type Config struct {
	Store    *pg.Store
	Troubles *watch.Troubles
	Log      *slog.Logger
	DB       *pgxpool.Pool
	Woken    func(queue string)                           // called for each queue with a job that became live
	Cancel   func(ctx context.Context, ids []int64) error // of jobs that wait for a dead one

	ID       int64 // of the run
	Kinds    []string
	Laned    bool // a kind of the worker has lanes
	Listener *claimer.Listener
	Worker   Worker // starts what is leased at once
}

// Worker runs the jobs of some queues.
type Worker interface {
	Has(queue string) bool
	Taken() (all bool, returned int64) // whether no slot is free, and how many jobs' handlers have ever returned
	First(queue string) Next           // leases the job that comes into a lane; nil if that is left to a claim
}

// Next leases a job that is let into a lane.
type Next interface {
	Asks() (queue string, holder int64, began time.Time, lease time.Duration)
	Answer(before ...any) pgx.RowScanner // reads the job behind other columns, or that there is none
	End(ok bool) (leased bool)           // starts it. ok says that the lease was committed
}

// lookback is how far a promoter's looks for calls have gone back.
type lookback struct {
	looked time.Time   // when it last looked for all calls, or for those of late, by the database's clock
	wide   time.Time   // the same of looks that were not brief; a little earlier if one met another promoter
	onward time.Time   // calls that looks have left, as more than a chunk, are due from then on; zero: there are none
	old    bool        // the next look is for those
	back   rhythm.Pass // the latest look for calls of late that was not brief
	came   bool        // the latest look for all calls, or for those of late, found some
	owes   bool        // it found none and was brief: one that is not comes soon
	rescan time.Time   // when it looks for all calls again
}

// New returns one that looks for all calls first.
func New(cfg Config) *Promoter {
	return &Promoter{Config: cfg, wake: make(chan struct{}, 1), again: promoteAgain}
}

// lately reports whether it has let in a job of its worker's queues in the latest minutes.
func (p *Promoter) lately() bool {
	met := p.met.Load()
	return met > 0 && rhythm.Now()-time.Duration(met) < 10*time.Minute
}

// Expects reports whether what the worker is woken for may be in a lane: a kind of it has lanes, or it has met such jobs lately. The
// first job with a lane of its own (Job.Lane) is not expected, and waits for a look.
func (p *Promoter) Expects() bool { return p.Laned || p.lately() }

// Rouse ends the promoter's present nap, or the next one. queue is what the worker was woken for, or "". Anybody may call it.
func (p *Promoter) Rouse(queue string) {
	if !p.Expects() {
		return
	}
	if queue != "" {
		p.heard.Store(&queue)
	}
	p.Called(false)
}

// first returns what leases the job that the worker was woken for, if it comes into a lane, or nil if that is left to a claim.
func (p *Promoter) first() Next {
	queue := p.heard.Swap(nil)
	if queue == nil || p.Worker == nil {
		return nil
	}
	name, looks := claimer.MoreOf(*queue)
	if n := p.Worker.First(*queue); n != nil || looks == 0 {
		return n
	}
	return p.Worker.First(name)
}

// Called is Rouse after a look of the claimer has seen a call. all says that it looked for all calls, also for those that
// came late. Anybody may call it.
func (p *Promoter) Called(all bool) {
	if all {
		p.anew.Store(true)
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Told is called after the end of jobs that others wait for. Anybody may call it.
func (p *Promoter) Told() {
	p.seen.Store(true)
	p.Called(false)
}

// promoted is what one look found.
type promoted struct {
	calls    int           // that were handled
	jobs     int           // that became live
	busy     bool          // another promoter is at work on some of the calls
	next     time.Duration // until the next call is due; 0: there is none
	more     bool          // there may be calls that were due long ago
	families bool          // a whole family of lanes has to be looked at
	lacks    bool          // rows are missing that are always there (table.RowsLack)
	cancel   []int64       // jobs that are to be cancelled, because another one that they wait for is dead
}

// Loop promotes until ctx ends. Without lanes it begins with what the claimer's first look says: to plan these statements costs
// more than anything else that a worker begins with.
func (p *Promoter) Loop(ctx context.Context) {
	if !p.Laned && !p.hears(ctx, 0) {
		return
	}
	for fails := 0; ; {
		did, err := p.promote(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			wait := min(5*time.Second, 50*time.Millisecond<<min(fails, 10))
			fails++
			p.Troubles.Fails(p.ID, watch.Promote, "", err, slog.Duration("next_try_in", wait))
			if !nap.For(ctx, wait/2+rand.N(wait), nil) {
				return
			}
			continue
		}
		fails = 0
		p.Troubles.Works(p.ID, watch.Promote, "")
		if did.calls > 0 {
			p.seen.Store(true)
			if p.found = time.Now(); did.jobs > 0 {
				p.pause = 0
				continue
			}
		}
		if !p.rest(ctx, did) {
			return
		}
	}
}

// hears waits until the claimer's looks have seen calls, or the worker does not wait after a minute: then the looks may be
// rare. next is when a call is due that it knows of, or 0. It returns false if ctx has ended.
func (p *Promoter) hears(ctx context.Context, next time.Duration) bool {
	due := time.Now().Add(next + time.Millisecond)
	for {
		wait := promoteIdle*9/10 + rand.N(promoteIdle/5)
		if next > 0 {
			wait = min(wait, time.Until(due))
		}
		timer := time.NewTimer(wait)
		select {
		case <-p.wake:
			timer.Stop()
			return true
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
			if !p.Listener.Waits.Load() || next > 0 && !time.Now().Before(due) {
				return true
			}
		}
	}
}

// rest waits until there may be calls. Enqueue wakes a worker that waits for the job's queue, and with it the
// promoter; a look of the claimer finds what nobody was woken for. Where calls let nothing go on, there are
// often many of them, as when the members of a large group end one by one: then they gather for a short time,
// whoever wakes it.
func (p *Promoter) rest(ctx context.Context, did promoted) bool {
	waits := p.Listener.Confirmed.Load() && p.Listener.Waits.Load()
	before := p.waited
	p.waited = waits
	wait := promoteIdle
	switch {
	case did.busy || did.more || p.owes || time.Since(p.found) < 2*rhythm.Moment:
		return p.restBriefly(ctx, did)
	case !p.Laned && !p.seen.Load() && len(p.doubts) == 0:
		p.pause = 0
		return p.hears(ctx, did.next) // the looks ask for calls, over a connection that is open
	case !p.Laned && !p.seen.Load():
		if waits {
			wait = rhythm.LongestNap
		}
	case p.Listener.Confirmed.Load() && !waits:
		p.pause = 0
		return p.restBusy(ctx, did)
	case waits && !before:
		wait = 2 * rhythm.QuietFor // a job may have been committed just before the announcement
	default:
		wait = rhythm.LongestNap
	}
	if p.pause = 0; len(p.doubts) > 0 {
		wait = min(wait, time.Second)
	}
	wait = wait*9/10 + rand.N(max(1, wait/5))
	if did.next > 0 {
		wait = min(wait, did.next+time.Millisecond)
	}
	return nap.For(ctx, wait, p.wake)
}

// restBriefly is rest while there was work a moment ago.
func (p *Promoter) restBriefly(ctx context.Context, did promoted) bool {
	wake := p.wake
	if did.calls > 0 {
		wake = nil
	}
	pause := max(p.pause, time.Millisecond)
	p.pause = min(2*pause, rhythm.Moment)
	// Old calls that let nothing go on take a quarter of the time, and what it is woken for comes before
	// them.
	if did.more && !p.old && !nap.For(ctx, min(3*p.took, 500*time.Millisecond), p.wake) {
		return false
	}
	return nap.For(ctx, pause, wake)
}

// restBusy is rest while the worker is busy, so that nobody is woken and the claimer looks at nothing: it asks at short
// intervals whether there are calls. While no slot is free and no handler returns, nothing that it lets in could start here, so the
// intervals grow, until it is called or a handler has returned.
func (p *Promoter) restBusy(ctx context.Context, did promoted) bool {
	latest := time.Now()
	next := latest.Add(did.next)
	for {
		wait := min(time.Second, max(rhythm.Moment, rhythm.Fiftieth*min(p.asked[0], p.asked[1])))
		wait = wait*9/10 + rand.N(max(1, wait/5))
		if did.next > 0 {
			wait = min(wait, time.Until(next)+time.Millisecond)
		}
		called := false
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-p.wake:
			called = true
		case <-ctx.Done():
			timer.Stop()
			return false
		}
		timer.Stop()
		began := time.Now()
		if did.next > 0 && !began.Before(next) || p.anew.Load() || !began.Before(p.rescan) || p.Listener.Waits.Load() {
			return true
		}
		full, returned := p.Worker.Taken()
		switch {
		case called || !full || returned != p.returned:
			p.full = 0
		case began.Sub(latest) < p.full:
			continue
		}
		p.returned, latest, p.full = returned, began, min(max(rhythm.Moment, 2*p.full), rhythm.Briefly)
		var due bool
		if err := p.Store.QueryRow(ctx, p.DB, stmt.AnyCalls, []any{p.wide.Add(-rhythm.CallMargin)}, &due); err != nil || due {
			p.full = 0
			return true
		}
		p.asked[0], p.asked[1] = time.Since(began), p.asked[0]
	}
}

// promote looks once: for all calls, for those that became due lately, or for the old ones that such looks have left, because
// there were more than a chunk. The latter two take turns, so that a lane that has just been called does not wait for a million
// that were called more than rhythm.CallMargin ago.
//
// A look steps over the calls that were handled since the time from which it looks, where vacuum has not come by. That is much while
// calls come all the time, above all while somebody holds an old snapshot. So then most looks are brief.
func (p *Promoter) promote(ctx context.Context) (did promoted, err error) {
	defer p.settle(ctx)
	began := time.Now()
	l := p.nextLook(began)
	did, now, left, err := p.look(ctx, l.from, l.full)
	if err != nil {
		return did, err
	}
	p.took = time.Since(began)
	p.lookedFrom(l, did, now, left)
	did.more = !p.onward.IsZero()
	if err := p.Cancel(ctx, did.cancel); err != nil {
		return did, err
	}
	if did.lacks {
		if err := PutBack(ctx, p.Store, p.Log, p.DB, pg.Rare); err != nil {
			return did, err
		}
		did.calls++ // look again, for all calls
		p.Called(true)
	}
	if l.full {
		p.rescan = began.Add(min(max(2*rhythm.RescanEvery, rhythm.Twentieth*time.Since(began)), rhythm.AllCallsEvery))
	}
	if did.families && ctx.Err() == nil {
		n, err := lookAtFamilies(ctx, p.Store, p.DB)
		if did.calls += n; err != nil {
			return did, err
		}
	}
	return did, nil
}

// Drain lets jobs into their lanes, and reports whether there may be more to do. The last look, while nothing runs, is for all calls,
// because a handler may have committed some late, and for the ends of jobs that nobody tells. What is locked by a job of this drain
// that still runs comes at the next look, and not after the drain has ended.
func (p *Promoter) Drain(ctx context.Context, idle bool) (more bool, err error) {
	if p.again = 0; idle {
		p.again = promoteAgain
		p.anew.Store(true)
	}
	did, err := p.promote(ctx)
	return did.calls > 0 || did.more || did.busy, err
}

// callLook is from when on a look takes calls, and which.
type callLook struct {
	from             time.Time
	full, old, brief bool // all calls; the old ones that looks have left; those of the latest moments
}

// nextLook decides how far the next look goes back.
func (p *Promoter) nextLook(began time.Time) callLook {
	l := callLook{from: p.onward}
	l.full = p.anew.Swap(false) || !began.Before(p.rescan) || p.looked.IsZero()
	l.old = l.full || p.old && !p.onward.IsZero()
	l.brief = !l.old && p.isBrief(began)
	switch {
	case l.full:
		l.from = time.Time{}
	case l.brief:
		l.from = p.looked.Add(-rhythm.Briefly)
	case !l.old:
		l.from = p.wide.Add(-rhythm.CallMargin)
	}
	return l
}

// lookedFrom records how far a look went back, and from when on it has left calls.
func (p *Promoter) lookedFrom(l callLook, did promoted, now, left time.Time) {
	if l.full || !l.old {
		p.looked, p.came, p.owes = now, did.calls > 0, l.brief && did.calls == 0
		switch {
		case l.brief:
		case !did.busy:
			p.wide = now
		case p.wide.Before(now.Add(-rhythm.CallMargin)): // the other promoter may not look back as far
			p.wide = now.Add(-rhythm.CallMargin)
		}
	}
	if !l.old && !l.brief {
		p.back = rhythm.Pass{Ended: time.Now(), Took: p.took}
	}
	if l.old || p.onward.IsZero() || !left.IsZero() && left.Before(p.onward) {
		p.onward = left
	}
	p.old = !l.old
}

// isBrief reports whether a look for calls of late that begins now goes back briefly. One that found no calls is followed
// by one that goes back by rhythm.CallMargin.
func (p *Promoter) isBrief(began time.Time) bool {
	return p.came && began.Sub(p.back.Ended) < min(10*p.back.Took, rhythm.BriefLongest)
}

// look takes the calls that are due since from, up to promoteChunk of each slot. If sweeping, it first looks for the ends of jobs that nobody
// tells. It returns the database's time, and from when on calls are left, if there may be more.
func (p *Promoter) look(ctx context.Context, from time.Time, sweeping bool) (did promoted, now, left time.Time, err error) {
	// The shutdown does not end this at once.
	unbroken, cancel := pg.Outlast(ctx, 30*time.Second)
	defer cancel()
	if sweeping {
		err = p.Store.Send(unbroken, p.DB, pg.Hot, stmt.SweepMembers, nil, pg.NoRows)
		if err == nil {
			err = p.Store.Send(unbroken, p.DB, pg.Hot, table.LacksRows, nil, pg.Row(&did.lacks, nil))
		}
		if err != nil {
			return promoted{}, now, left, fmt.Errorf("onceq: promote: %w", err)
		}
	}
	var due, mine int
	var next int64
	var end *time.Time
	var queues []string
	row := pg.Leading{&now, &due, &mine, &next, &did.families, &did.calls, &end, &did.jobs, &queues, &did.cancel}
	var answer pgx.RowScanner = row
	var lease, holder int64
	var leases *string
	if first := p.first(); first != nil {
		queue, h, _, d := first.Asks()
		lease, holder, leases, answer = d.Microseconds(), h, &queue, first.Answer(row...)
		defer func() {
			if first.End(err == nil); err != nil {
				p.doubts = append(p.doubts, first)
			}
		}()
	}
	args := []any{from, promoteChunk, rand.Int64(), p.again.Microseconds(), lease, holder, leases, p.Kinds}
	if err = p.Store.Send(unbroken, p.DB, pg.Hot, stmt.PromoteLines, args, pg.Row(answer)); err != nil {
		return promoted{}, now, left, fmt.Errorf("onceq: promote: %w", err)
	}
	if end != nil {
		left = end.Add(-time.Microsecond) // many calls may be due at one time
	}
	did.busy, did.next = due > mine, time.Duration(next)*time.Microsecond
	for _, queue := range queues {
		if p.Worker != nil && p.Worker.Has(queue) {
			p.met.Store(int64(rhythm.Now()))
		}
		p.Woken(queue)
	}
	return did, now, left, nil
}

// lookAtFamilies answers the calls for whole families, a page at a time, so that a lane which has just been
// called does not wait for all of a family: no more than a look takes (promoteChunk for each slot). It also
// ends the time in which completions leave lanes to the promoters because a limit was lowered. It returns how
// many lanes it has called.
func lookAtFamilies(ctx context.Context, store *pg.Store, db *pgxpool.Pool) (n int, err error) {
	unbroken, cancel := pg.Outlast(ctx, time.Minute)
	defer cancel()
	var settle bool
	err = store.Send(unbroken, db, pg.Rare, stmt.CallFamilies, []any{table.ChunkRows}, pg.Row(&n, &settle))
	if err == nil && settle {
		err = store.Send(unbroken, db, pg.Rare, stmt.SettleLimits, nil, pg.NoRows)
	}
	if err != nil {
		return n, fmt.Errorf("onceq: promote: %w", err)
	}
	return n, nil
}

// settle gives back what this promoter's looks have leased whose answers were lost, as unheard does. Such a look may not have ended
// yet: its slots are locked until then, so this waits for them, briefly, and is tried again in a second.
func (p *Promoter) settle(ctx context.Context) {
	for len(p.doubts) > 0 && time.Since(p.settled) > time.Second {
		queue, holder, began, lease := p.doubts[0].Asks()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(lease, 5*time.Second))
		err := p.Store.Send(ctx, p.DB, pg.Brief, stmt.LockLanes, nil, pg.NoRows)
		if err == nil {
			age := time.Since(began) + time.Second // the database's clock may be a little faster
			err = p.Store.Send(ctx, p.DB, pg.Hot, stmt.GiveBackFirst, []any{queue, age.Microseconds(), holder}, pg.NoRows)
		}
		cancel()
		switch {
		case err == nil:
		case time.Since(began) < lease:
			p.settled = time.Now()
			return
		default:
			p.Log.WarnContext(ctx, "onceq: a promoter's answer was lost, and it is not known whether it leased a job; that lease runs out",
				slog.String("queue", queue), slog.Any("error", err))
		}
		p.doubts = p.doubts[1:]
		p.Woken(queue)
	}
}
