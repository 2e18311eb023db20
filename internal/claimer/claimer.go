// Package claimer decides what a worker claims, and when it looks again.
package claimer

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// Claimer decides what is claimed for all queues of a run, and when. One goroutine runs it, by loop or by drain, and only
// that goroutine uses the fields, except those that say otherwise.
//
// Claims, looks and upkeep are sent by short-lived goroutines, at most one for each of six purposes, so that none waits for
// another: claims of a queue with a backlog, one queue at a time and the queues in turns; the same for queues in which others
// claim too, and a claim waits for its turn (pg.Turn); claims of all other queues, of several in one statement; claims of jobs in
// quarantine, one at a time; looks; and upkeep: rescans, announcements. What an answer means is decided by the claimer's goroutine
// again.
//
//	notification, look, room  ->  due  ->  claim  ->  executor
//	                                         |  nothing more
//	                                       idle: announced, and looked at together with all other idle queues
type Claimer struct {
	Config
	Listener *Listener
	Promoter Promoter

	kinds  []string    // that are not paused
	pauses *paused.Set // what is obeyed; nil: nothing is known

	holdsBack bool // something of this worker is paused

	Next atomic.Pointer[time.Time] // when the loop goes on at the latest, for Alive

	feeds  []*feed // in the order of their queues' names
	byName map[string]*feed
	active []*feed // those for which something is to be done soon, in the order of their turns

	claimsBacklog, claimsInTurn, claims, claimsLost, looking, keeps bool        // a statement for this purpose is under way
	answers                                                         chan func() // what to do with their answers

	left int // jobs that may still be claimed

	fails     int       // claims in a row that failed
	failed    error     // the latest failure
	notBefore time.Time // no claim before this time, because the latest of these failed

	looks        looks
	rescans      rescans
	announcement announcement
	shaken       bool      // since something failed, it is not known who knows of the announcement
	ahead        bool      // jobs of some feed may wait for a slot
	gaveBack     time.Time // when it was last seen to that jobs that wait too long for a slot are given back

	wake chan struct{} // holds one: think again. Anybody may send
	mu   sync.Mutex    // guards what follows
	// heard are the queues that have jobs, by name, and whether the listener was told so. "" stands for the beginning of
	// notifications, and one after lookMore and a time for that notification. Anybody may add to it.
	heard map[string]bool
	came  []slotted // anybody may add to it
}

// slotted is a job in quarantine whose slot has come.
type slotted struct {
	quarantine.Job
	queue string
}

// Config is what a claimer works with.
type Config struct {
	Store    *pg.Store
	Troubles *watch.Troubles
	Log      *slog.Logger
	Paused   *paused.Known
	Turn     *quarantine.Turn
	DB       pg.Quick
	Shares   *pg.Shares // of the application's pool
	Worker   Worker

	ID      int64    // of the run, by which waiters knows it
	Kinds   []string // that have handlers
	Lease   time.Duration
	Poll    time.Duration // 0 for the default
	Careful bool          // one lost lease makes some job dead, so only what was started may lose one
	Besides bool          // jobs that have lost one lease may start beside each other: each may lose some more
}

// Worker claims and runs jobs.
type Worker interface {
	// Claim sends a claim of jobs that have lost no lease, and fills in what each of several queues gave.
	Claim(ctx context.Context, db pg.Quick, kinds []string, asks []*Ask) error
	// ClaimOne claims one of a few jobs that have lost a lease. gone is as in quarantine.Probation.
	ClaimOne(ctx context.Context, db pg.Quick, kinds []string, ask *Ask, few []int64) (gone int, err error)
	// Accept gets what was claimed, with leases from began on, and reports whether any job waits for a slot.
	Accept(queue string, jobs Jobs, began time.Time) (anyWait bool)
	// GiveBack gives back jobs that have waited for a slot since then and for which this holds.
	GiveBack(queue string, this func(kind string, since time.Time) bool) (some, anyWait bool)
	Held() map[int64]bool // the jobs that the worker has, as far as it knows
	HoldsNone() bool
}

// Promoter lets jobs into lanes.
type Promoter interface {
	Expects() bool      // whether what the worker is woken for may be in a lane
	Rouse(queue string) // it looks for calls soon; with "" nobody knows for which queue
	Called(all bool)    // a look has seen a call, also of those that came late with all
	Drain(ctx context.Context, idle bool) (more bool, err error)
}

// Ask is what one claim asks of one queue, what it got, and what that means for the next one.
type Ask struct {
	Queue string
	cursor.Asked
	Free  int64     // handlers; jobs beyond that are claimed ahead
	alone bool      // the statement claims from no other queue
	Turn  *pg.Turn  // nil for none
	Along *pg.Along // goes with the claim, if nothing else does; nil for none

	Jobs      Jobs
	outOfTurn bool      // its turn did not come within turnPatience
	Began     time.Time // this process's clock just before sending: the leases last from then on at least
}

// Jobs are what a claim has got, in its order.
type Jobs interface {
	Len() int
	At(i int) cursor.Position
	Bytes() int64 // of all payloads
	First() (job quarantine.Job, token int64)
}

// Got is how many jobs there were; none if the claim failed.
func (a *Ask) Got() int {
	if a.Jobs == nil {
		return 0
	}
	return a.Jobs.Len()
}

// New returns one for these queues. woken is called for each notification. Its Promoter is to be set.
func New(cfg Config, queues []*Slots, woken func(queue string)) *Claimer {
	c := &Claimer{
		Config: cfg, kinds: cfg.Kinds, left: math.MaxInt, byName: make(map[string]*feed), answers: make(chan func(), 6),
		wake: make(chan struct{}, 1), heard: make(map[string]bool),
	}
	for _, s := range queues {
		s.Signal = c.Rouse
		f := &feed{queue: s.Queue, slots: s, cursor: cursor.New(), pace: pace{careful: cfg.Careful}, unknown: make(map[string]bool)}
		c.feeds = append(c.feeds, f)
		c.byName[s.Queue] = f
	}
	slices.SortFunc(c.feeds, func(a, b *feed) int { return strings.Compare(a.queue, b.queue) })
	c.Listener = newListener(c, woken)
	return c
}

// Heard is for a queue that has jobs: they were enqueued, as a notification says, or this process has let them into their
// lanes. "" is for notifications that begin to arrive. Anybody may call it.
func (c *Claimer) Heard(queue string, notified bool) {
	c.mu.Lock()
	c.heard[queue] = c.heard[queue] || notified
	c.mu.Unlock()
	c.Rouse()
}

// Suspended is for a job in quarantine that was given back until its slot: it is claimed then. A rescan would find it too
// late, and it would get another slot, again and again. Anybody may call it.
func (c *Claimer) Suspended(queue string, job quarantine.Job, slot time.Time) {
	time.AfterFunc(time.Until(slot), func() {
		c.mu.Lock()
		c.came = append(c.came, slotted{job, queue})
		c.mu.Unlock()
		c.Rouse()
	})
}

// Rouse makes the claimer think again. Anybody may call it.
func (c *Claimer) Rouse() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Loop claims and hands out until ctx ends.
func (c *Claimer) Loop(ctx context.Context) {
	for ctx.Err() == nil {
		now := time.Now()
		c.obey(c.Paused.Latest.Load())
		c.hear(now)
		wait := min(c.becomeDue(now), c.giveBackAhead(now))
		wait = min(wait, c.startClaims(ctx, now), c.startUpkeep(ctx, now))
		next := now.Add(wait)
		c.Next.Store(&next)
		timer := time.NewTimer(wait)
		select {
		case answer := <-c.answers:
			answer()
		case <-c.wake:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
	c.answered()
}

// answered waits until no statement is under way, and reports whether any was.
func (c *Claimer) answered() (some bool) {
	for c.claimsBacklog || c.claimsInTurn || c.claims || c.claimsLost || c.looking || c.keeps {
		(<-c.answers)()
		some = true
	}
	return some
}

// send runs a statement in a goroutine of its own, and afterwards, in the claimer's goroutine, what it returns. The purpose
// is taken until then.
func (c *Claimer) send(purpose *bool, statement func() (answer func())) {
	*purpose = true
	go func() {
		answer := statement()
		c.answers <- func() {
			*purpose = false
			answer()
		}
	}()
}

// hear takes what the listener heard.
func (c *Claimer) hear(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for queue, notified := range c.heard {
		if queue == "" {
			c.looks.at = now
			c.announcement.notBefore = time.Time{}
			c.forget()
			continue
		}
		c.hasJobs(c.byName[queue], notified, now)
		if name, looks := MoreOf(queue); looks > 0 { // a queue may have such a name
			if f := c.byName[name]; f != nil {
				if f.news.looking.until.IsZero() {
					f.news.looking.from, f.news.looking.jobs = now, 0
				}
				f.news.looking.until = now.Add(looks + looksOn)
				c.hasJobs(f, notified, now)
			}
		}
	}
	clear(c.heard)
	c.came = slices.DeleteFunc(c.came, func(s slotted) bool {
		f := c.byName[s.queue]
		if f.busy {
			return false // the answer comes first
		}
		f.quarantine.SlotCame(s.Job)
		c.activate(f)
		return true
	})
}

// hasJobs records that there are jobs for a feed, which may be nil, and whether a notification said so.
func (c *Claimer) hasJobs(f *feed, notified bool, now time.Time) {
	if f == nil {
		return
	}
	if notified {
		c.found(1, now)
		f.news.heard++
		c.unannounced(f)
		if f.news.passOn.IsZero() || !f.plan.due && f.news.passOn.Before(now) {
			f.news.passOn = now.Add(rhythm.Moment)
		}
	}
	c.isDue(f)
}

// giveBackAhead gives back jobs that were claimed ahead and wait too long for a slot, for others to start.
// Usually they wait for some hundredths of a second, unless handlers suddenly take much longer. It returns
// when to think again at the latest.
func (c *Claimer) giveBackAhead(now time.Time) (wait time.Duration) {
	if !c.ahead {
		return rhythm.LongestNap
	}
	if d := aheadLongest - now.Sub(c.gaveBack); d > 0 {
		return d
	}
	c.ahead, c.gaveBack = false, now
	for _, f := range c.feeds {
		longest := aheadLongest
		if f.cursor.Full && !f.plan.last {
			longest = aheadBacklog // they come after all that are due already
		}
		some, anyWait := c.Worker.GiveBack(f.queue, func(_ string, since time.Time) bool { return now.Sub(since) > longest })
		if c.ahead = c.ahead || anyWait; some {
			f.plan.again = now.Add(rhythm.Moment) // until then they are written
			f.news.passOn = f.plan.again
			c.activate(f)
		}
	}
	return aheadLongest
}

// isDue records that there is something to claim, as far as is known.
func (c *Claimer) isDue(f *feed) {
	f.plan.due = true
	f.slots.end.Store(nil)
	c.activate(f)
}

func (c *Claimer) activate(f *feed) {
	if !f.active {
		f.active = true
		c.active = append(c.active, f)
	}
}

// listens reports whether notifications arrive for each job of a queue that is announced.
func (c *Claimer) listens() bool {
	return c.Listener.Confirmed.Load() && !c.Listener.notOfTx.Load()
}

// claimRound is what startClaims decides in one go over the active feeds.
type claimRound struct {
	now    time.Time
	wait   time.Duration // until it is to think again at the latest, if nothing happens
	chosen []*feed       // are claimed in one statement
	wants  []want        // of these
}

// What becomes of an active feed in a round.
type roundEnd int

const (
	staysActive roundEnd = iota
	hadTurn              // it is claimed, and comes after the others next time
	goesIdle
)

// startClaims starts the claims that can be made now. It returns when to think again at the latest, if nothing happens.
func (c *Claimer) startClaims(ctx context.Context, now time.Time) (wait time.Duration) {
	if d := c.notBefore.Sub(now); d > 0 {
		return d
	}
	r := claimRound{now: now, wait: rhythm.LongestNap}
	keep := c.active[:0]
	var last []*feed // these have had their turn
	for _, f := range c.active {
		switch c.consider(ctx, f, &r) {
		case staysActive:
			keep = append(keep, f)
		case hadTurn:
			last = append(last, f)
		}
	}
	clear(c.active[len(keep):])
	c.active = append(keep, last...)
	if len(r.chosen) > 0 {
		c.claim(ctx, r.chosen, r.wants, &c.claims)
	}
	return r.wait
}

// consider has an active feed claimed, if there is something to claim and no answer to wait for.
func (c *Claimer) consider(ctx context.Context, f *feed, r *claimRound) roundEnd {
	purpose := c.purposeOf(f, r.now)
	taken := *purpose || len(r.chosen) >= perStatement
	one := c.quarantineDue(f)
	due := one || f.plan.due || !f.plan.again.IsZero() && !r.now.Before(f.plan.again)
	switch {
	case f.paused && !f.busy:
		f.active, f.plan.due, f.plan.again = false, false, time.Time{}
		return goesIdle
	case f.busy || f.held || due && !one && taken: // an answer comes first
		return staysActive
	case due:
		return c.claimNow(ctx, f, r, purpose, taken)
	case f.plan.again.IsZero() && len(f.quarantine.IDs) == 0:
		f.active = false
		return goesIdle
	case !f.plan.again.IsZero():
		r.wait = min(r.wait, f.plan.again.Sub(r.now))
	}
	return staysActive
}

// purposeOf is for what a claim of a feed is sent.
func (c *Claimer) purposeOf(f *feed, now time.Time) *bool {
	switch {
	case !f.plan.backlog:
		return &c.claims
	case now.Before(f.turns.others):
		return &c.claimsInTurn
	}
	return &c.claimsBacklog
}

// claimNow claims from a feed, by itself or together with others of the round, if there is room.
func (c *Claimer) claimNow(ctx context.Context, f *feed, r *claimRound, purpose *bool, taken bool) roundEnd {
	w := c.wantNow(f)
	f.plan.noRoom = !w.now
	switch {
	case !w.now:
		r.wait = min(r.wait, w.again)
		return staysActive
	case w.one:
		c.claimQuarantined(ctx, f)
	case taken: // another worker was faster to start a job in quarantine
		c.unreserve(f)
		return staysActive
	case f.plan.backlog:
		c.claim(ctx, []*feed{f}, []want{w}, purpose)
	default:
		r.chosen, r.wants = append(r.chosen, f), append(r.wants, w)
		f.busy = true
	}
	return hadTurn
}

// claim claims from feeds, from their cursors on, jobs that have lost no lease.
func (c *Claimer) claim(ctx context.Context, feeds []*feed, wants []want, purpose *bool) {
	began := time.Now()
	asks, how := make([]*Ask, len(feeds)), make([]cursor.Look, len(feeds))
	for i, f := range feeds {
		asks[i], how[i] = c.ask(f, wants[i].n, len(feeds), began) // #nosec G602 -- one want for each feed
	}
	kinds := c.kinds
	var fresh *newLook
	if purpose == &c.claims && c.looks.fresh.took > 0 && !c.looking {
		fresh = c.newLook(began)
		asks[0].Along = &pg.Along{Statement: stmt.LookForNew, Args: fresh.args, Read: fresh.read}
	}
	c.send(purpose, func() func() {
		err := c.sendClaims(ctx, kinds, asks)
		ended := time.Now()
		return func() {
			for _, ask := range asks {
				c.left += ask.Limit - ask.Got()
			}
			if fresh != nil {
				c.wentAlong(fresh, ended, err)
			}
			if !c.claimed(feeds, err) {
				return
			}
			for i, f := range feeds {
				c.took(f, asks[i], how[i], began, ended)
			}
			if fresh != nil && fresh.done {
				c.sawNew(fresh, ended)
			}
		}
	})
}

// ask says what a claim that begins now asks of a feed, one of several.
func (c *Claimer) ask(f *feed, n, several int, now time.Time) (*Ask, cursor.Look) {
	s := f.slots
	f.busy, f.plan.due, f.plan.last, f.plan.again = true, false, false, time.Time{}
	f.moves++
	f.quarantine.OthersTurn = false
	from, how := f.cursor.Begin(now)
	ask := &Ask{
		Queue: f.queue, Asked: cursor.Asked{Limit: min(n, max(1, table.ChunkRows/several), c.left), From: from}, alone: several == 1,
		Free: max(0, int64(s.Count*s.Width)-s.Outstanding.Load()+f.reserved),
	}
	c.left -= ask.Limit
	if others := now.Before(f.turns.others); f.plan.backlog && !now.Before(f.turns.from) && c.DB.Own.HasTurns(others) && c.Store.Citus.Load() != pg.CitusYes {
		ask.Turn = pg.NewTurn(c.Store.Schema, f.queue, c.kinds)
		ask.Turn.Others = others
	}
	return ask, how
}

// sendClaims sends a claim of jobs that have lost no lease. The shutdown does not end it at once: a claim that commits
// while nobody waits for its answer leaves leases that have to run out. But however long a lease is, a connection that has gone
// silent keeps the worker from claiming for no longer than pg.SessionLimit. If its turn does not come, it is sent without one.
func (c *Claimer) sendClaims(ctx context.Context, kinds []string, asks []*Ask) error {
	unbroken, cancel := pg.Outlast(ctx, min(c.Lease, pg.SessionLimit)+turnPatience)
	defer cancel()
	for {
		if err := c.maySend(unbroken, kinds, asks); err != nil {
			return err
		}
		err := c.Worker.Claim(unbroken, c.DB, kinds, asks)
		first := asks[0]
		if first.Turn == nil || !errors.Is(err, pg.ErrNoTurn) && !pg.NotInTurn(err) {
			return err
		}
		first.Turn, first.outOfTurn = nil, !errors.Is(err, pg.ErrNoTurn)
	}
}

// claimed records how a claim ended for these feeds. It returns false if it failed.
func (c *Claimer) claimed(feeds []*feed, err error) bool {
	if err == nil {
		c.fails = 0
		c.works(watch.Claim, feeds)
		return true
	}
	if !errors.Is(err, errPausesChanged) {
		c.claimFailed(feeds, err)
	}
	for _, f := range feeds {
		f.busy = false
		c.unreserve(f)
		c.isDue(f)
	}
	return false
}

// claimFailed puts off the next claim, the longer the more claims in a row have failed.
func (c *Claimer) claimFailed(feeds []*feed, err error) {
	c.failed = err
	c.fails++
	wait := min(5*time.Second, 50*time.Millisecond<<min(c.fails, 10))
	c.notBefore, c.shaken = time.Now().Add(wait/2+rand.N(wait)), true
	c.Troubles.Fails(c.ID, watch.Claim, theOnly(feeds), err, slog.Duration("next_try_in", wait))
}

// works reports that background work went well for these feeds. Work on several reports its failures without a name.
func (c *Claimer) works(w *watch.Work, feeds []*feed) {
	c.Troubles.Works(c.ID, w, "")
	for _, f := range feeds {
		c.Troubles.Works(c.ID, w, f.queue)
	}
	if c.shaken {
		c.shaken = false
		c.forget()
	}
}

// took takes what a claim returned for a feed, and decides what comes next for it.
func (c *Claimer) took(f *feed, ask *Ask, how cursor.Look, began, ended time.Time) {
	f.busy, f.latest.claimed = false, ended
	f.cursor.Claimed(ask.Asked, ask.Jobs, how, began, ended, f.turns.took(ask, ended))
	if f.plan.anew {
		f.cursor.Restart()
		f.plan.anew, f.plan.due = false, true
	}
	c.looks.claimed = true
	found := ask.Jobs.Len() > 0
	if found {
		f.pace.claimed(ask.Jobs)
		c.ahead = c.Worker.Accept(f.queue, ask.Jobs, ask.Began) || c.ahead
		f.news.looking.jobs += ask.Jobs.Len()
	}
	c.unreserve(f)
	f.sawEnd(ask, ended)
	if found {
		if often := ended.Sub(f.latest.found) < 50*time.Millisecond; !f.news.announced.IsZero() && (often || f.cursor.Full) {
			c.announcement.wanted = true
			c.unannounced(f)
		}
		f.latest.found, f.plan.pause = ended, soonAgain
	}
	c.claimNext(f, found, ended)
}

// sawEnd takes whether a claim came to the end of the queue, or there is more than it was allowed to take.
func (f *feed) sawEnd(ask *Ask, ended time.Time) {
	full := f.cursor.Full
	if !full && !f.plan.due && !ended.Before(f.news.looking.until) {
		f.news.passOn = time.Time{}
	}
	if f.slots.end.Store(nil); !full && !f.plan.due && !f.paused && len(f.quarantine.IDs) == 0 {
		f.slots.end.Store(&ended)
	}
	f.plan.backlog = full && (ask.Limit >= perStatement || ask.alone && f.slots.Count*f.slots.Width >= perStatement)
}

// claimNext decides when a feed is claimed, or looked at, after a claim that found some jobs or none.
func (c *Claimer) claimNext(f *feed, found bool, ended time.Time) {
	a, looking := &c.announcement, ended.Before(f.news.looking.until)
	late := f.mayComeLate(found, a.stir.lively || looking)
	if late && a.backed && !found {
		c.lookSoon(f, later(f.cursor.NextLook(), ended)) // a claim might take what others have been woken for
	}
	switch {
	case f.cursor.Full:
		c.isDue(f)
	case f.plan.due: // a notification came in between
	case late && !a.backed && !looking:
		c.claimBack(f, ended)
	case a.stir.lively: // the next look is soon
	case looking:
		f.plan.again = ended.Add(looksEvery)
		c.activate(f)
	case !f.news.announced.IsZero() && c.listens():
		c.lookSoon(f, f.latest.found.Add(rhythm.Moment)) // because of delayed jobs
	case ended.Sub(f.latest.found) < rhythm.Moment && !a.backed:
		f.claimSoon(ended)
		c.activate(f)
	default:
		c.settle(f, ended)
	}
}

// mayComeLate reports whether a job may have been committed late, behind a claim that went back only briefly:
// what told of it may not tell again. Where the feed is looked at anyway, that matters only after a claim
// that found nothing.
func (f *feed) mayComeLate(found, looked bool) bool { return f.cursor.Brief && !(found && looked) }

// claimBack has a feed claimed soon, and from farther back when that is due. Producers need not wait for that
// to know of the feed.
func (c *Claimer) claimBack(f *feed, ended time.Time) {
	f.claimSoon(ended)
	if look := f.cursor.NextLook(); look.Before(f.plan.again) {
		f.plan.again = later(look, ended)
	}
	c.activate(f)
	a := &c.announcement
	if f.news.announced.IsZero() && ended.Sub(f.latest.found) >= rhythm.Moment && c.Listener.Confirmed.Load() && !a.stir.lively {
		a.wanted = true
	}
}

// claimSoon has the feed claimed again, each time twice as late, and just when it has been quiet for long enough to be announced.
func (f *feed) claimSoon(ended time.Time) {
	f.plan.pause = max(f.plan.pause, soonAgain)
	f.plan.again = ended.Add(f.plan.pause)
	if quiet := f.latest.found.Add(rhythm.Moment); ended.Before(quiet) && quiet.Before(f.plan.again) {
		f.plan.again = quiet
	}
	f.plan.pause = min(2*f.plan.pause, rhythm.Moment)
}

// idle reports whether nothing is to be done soon.
func (f *feed) idle() bool { return !f.busy && !f.plan.due && f.plan.again.IsZero() }

// startUpkeep starts what else is to be done, if nothing of it is under way. It returns when to think again at the latest.
func (c *Claimer) startUpkeep(ctx context.Context, now time.Time) time.Duration {
	c.found(0, now)
	wait, passOn := rhythm.LongestNap, c.passOnIn(now)
	if !c.keeps && !c.readPaused(ctx, now) && !c.startPassingOn(ctx, now, passOn) && !c.startAnnouncement(ctx, now) && !c.startRescan(ctx) {
		if c.Listener.Confirmed.Load() { // otherwise nothing is announced; that it is confirmed rouses the claimer
			wait = c.announcement.wait(now)
		}
		if c.holdsBack {
			wait = min(wait, later(c.pauses.At.Add(paused.Old-paused.Fresh), c.looks.notAgain).Sub(now))
		}
		if c.rescans.known.IsZero() {
			wait = min(wait, rhythm.RescanEvery)
		}
		wait = min(wait, passOn)
	}
	if !c.looking && !c.startLook(ctx, now) {
		wait = min(wait, c.looks.wait(now))
	}
	return wait
}

// theOnly is the name of the only feed, or "".
func theOnly(feeds []*feed) string {
	if len(feeds) == 1 {
		return feeds[0].queue
	}
	return ""
}

func names(feeds []*feed) []string {
	all := make([]string, len(feeds))
	for i, f := range feeds {
		all[i] = f.queue
	}
	return all
}
