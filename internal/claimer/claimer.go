// Package claimer does what package plan decides: it claims for a worker, looks, rescans, and says who waits.
package claimer

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/plan"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/watch"
)

// Claimer claims for all queues of a run. One goroutine runs it, by Loop or by Drain, and only that goroutine
// uses the fields, except those that say otherwise. It tells the plan what happens, and does what the plan
// says. Statements are sent by short-lived goroutines, one for each purpose at most; what an answer means the
// plan decides in the claimer's goroutine again.
type Claimer struct {
	Config
	Listener *Listener
	Promoter Promoter

	plan   *plan.State
	slots  []*Slots    // as plan.Queues
	pauses *paused.Set // what is obeyed; nil: nothing is known
	failed error       // why the latest claim failed

	warned map[[2]string]bool        // queues and kinds without a handler that the log has named
	Next   atomic.Pointer[time.Time] // when the loop goes on at the latest, for Alive

	answers chan func() // what to do with the answers of statements

	wake chan struct{} // holds one: think again. Anybody may send
	mu   sync.Mutex    // guards what follows
	// heard are the queues that have jobs, by name, and whether the listener was told so. "" stands for the
	// beginning of notifications, and one after lookMore and a time for that notification. Anybody may add to
	// it.
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
	plan.Config
	Store    *pg.Store
	Troubles *watch.Troubles
	Log      *slog.Logger
	Paused   *paused.Known
	Turn     *quarantine.Turn
	DB       pg.Quick
	Shares   *pg.Shares // of the application's pool
	Worker   Worker

	ID int64 // of the run, by which waiters knows it
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
	Turn  *pg.Turn  // nil for none
	Along *pg.Along // goes with the claim, if nothing else does; nil for none

	Jobs      Jobs
	outOfTurn bool      // its turn did not come within turnPatience
	Began     time.Time // this process's clock just before sending: the leases last from then on at least
}

// Jobs are what a claim has got, in its order.
type Jobs interface {
	plan.Jobs
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
		Config: cfg, slots: make([]*Slots, len(queues)), warned: make(map[[2]string]bool), answers: make(chan func(), 6),
		wake: make(chan struct{}, 1), heard: make(map[string]bool),
	}
	all, of := make([]*plan.Queue, len(queues)), make(map[*plan.Queue]*Slots, len(queues))
	for i, s := range queues {
		s.Signal = c.Rouse
		all[i] = &plan.Queue{Name: s.Queue, Count: s.Count, Width: s.Width, Pooled: s.Pooled}
		of[all[i]] = s
	}
	c.Rand = rand.N[time.Duration]
	c.plan = plan.New(c.Config.Config, all)
	for _, q := range c.plan.Queues {
		c.slots[q.N] = of[q]
	}
	c.Listener = newListener(c, woken)
	return c
}

// Heard is for a queue that has jobs: they were enqueued, as a notification says, or this process has let
// them into their lanes. "" is for notifications that begin to arrive. Anybody may call it.
func (c *Claimer) Heard(queue string, notified bool) {
	c.mu.Lock()
	c.heard[queue] = c.heard[queue] || notified
	c.mu.Unlock()
	c.Rouse()
}

// Suspended is for a job in quarantine that was given back until its slot: it is claimed then. A rescan would
// find it too late, and it would get another slot, again and again. Anybody may call it.
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
		c.plan.Facts = c.facts()
		c.obey(c.Paused.Latest.Load())
		c.hear(now)
		c.giveBackLate(now)
		next := now.Add(c.plan.Plan(now, c))
		c.act(ctx)
		c.Next.Store(&next)
		timer := time.NewTimer(time.Until(next))
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

// facts are what the plan is told of what others decide.
func (c *Claimer) facts() plan.Facts {
	return plan.Facts{
		Confirmed: c.Listener.Confirmed.Load(), NotOfTx: c.Listener.notOfTx.Load(), Waits: c.Listener.Waits.Load(),
		Lanes: c.Promoter.Expects(), Citus: c.Store.Citus.Load() == pg.CitusYes,
	}
}

// act does what the plan has decided.
func (c *Claimer) act(ctx context.Context) {
	for _, a := range c.plan.Actions() {
		switch a := a.(type) {
		case *plan.Claim:
			c.claim(ctx, a)
		case *plan.Look:
			c.look(ctx, a)
		case *plan.LookForNew:
			c.lookForNew(ctx, a)
		case *plan.Announce:
			c.announce(ctx, a)
		case *plan.PassOn:
			c.passOn(ctx, a.Queue)
		case *plan.ReadPauses:
			c.readPauses(ctx)
		case *plan.Told:
			c.tell(a.All)
		case *plan.Empty:
			c.slots[a.Queue.N].setEmpty(a.Since)
		default:
			c.rescan(ctx, a)
		}
	}
}

// send runs a statement in a goroutine of its own, and afterwards, in the claimer's goroutine, what it
// returns.
func (c *Claimer) send(ctx context.Context, purpose plan.Purpose, statement func() (answer func())) {
	go func() {
		answer := statement()
		c.answers <- func() {
			c.plan.Facts = c.facts()
			c.plan.Answered(purpose)
			answer()
			c.act(ctx)
		}
	}()
}

// answered waits until no statement is under way, and reports whether any was.
func (c *Claimer) answered() (some bool) {
	for c.plan.UnderWay() {
		(<-c.answers)()
		some = true
	}
	return some
}

// works reports that background work went well for these queues. Work on several reports its failures without
// a name.
func (c *Claimer) works(w *watch.Work, queues []*plan.Queue) {
	c.Troubles.Works(c.ID, w, "")
	for _, q := range queues {
		c.Troubles.Works(c.ID, w, q.Name)
	}
	c.plan.Works(time.Now())
}

// hear takes what the listener heard.
func (c *Claimer) hear(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for queue, notified := range c.heard {
		if queue == "" {
			c.plan.Hears(now)
			continue
		}
		c.plan.HasJobs(queue, notified, now)
		if name, looks := MoreOf(queue); looks > 0 { // a queue may have such a name
			c.plan.LooksOn(name, looks, notified, now)
		}
	}
	clear(c.heard)
	c.came = slices.DeleteFunc(c.came, func(s slotted) bool { return c.plan.SlotCame(s.queue, s.Job) })
}

// tell says whether producers know that the run waits for jobs of each open queue.
func (c *Claimer) tell(all bool) {
	if !all {
		if c.Listener.Waits.Swap(false) {
			c.Promoter.Rouse("") // as the listener does: from now on nobody wakes it for calls
		}
		return
	}
	c.Listener.Waits.Store(true)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, notified := range c.heard {
		if notified {
			c.Listener.Waits.Store(false) // hear has not taken it yet
		}
	}
}

// giveBackLate gives back jobs that were claimed ahead and wait too long for a slot.
func (c *Claimer) giveBackLate(now time.Time) {
	if !c.plan.GivesBack(now) {
		return
	}
	for _, q := range c.plan.Queues {
		longest := q.MayWait()
		some, anyWait := c.Worker.GiveBack(q.Name, func(_ string, since time.Time) bool { return now.Sub(since) > longest })
		c.plan.GaveBack(q, some, anyWait, now)
	}
}

// Room is the plan's.
func (c *Claimer) Room(q *plan.Queue) plan.Room {
	s := c.slots[q.N]
	return plan.Room{
		Usable: s.Count, Outstanding: s.Outstanding.Load(), Quarantined: int(s.Quarantined.Load()),
		Returned: s.Returned.Load(), Worked: s.Worked.Load(),
	}
}

// MayStart is the plan's.
func (c *Claimer) MayStart(beside bool) bool { return c.Turn.Free(c, beside) }

// Want is the plan's. It reserves what is wanted if the queue's handlers hold connections. Without room it
// has the executor rouse the claimer when there is some.
func (c *Claimer) Want(q *plan.Queue, one bool, now time.Time) plan.Want {
	s := c.slots[q.N]
	for {
		s.low.Store(-1)
		w := c.reserve(q, one, now)
		if w.Now {
			return w
		}
		if s.low.Store(w.Low); s.Outstanding.Load() > w.Low {
			return w
		}
	}
}

func (c *Claimer) reserve(q *plan.Queue, one bool, now time.Time) plan.Want {
	s := c.slots[q.N]
	if !s.Pooled {
		return q.Want(c.Room(q), one, now)
	}
	c.Shares.Lock()
	defer c.Shares.Unlock()
	usable := c.Shares.Allow(s)
	room := c.Room(q)
	room.Usable = usable
	w := q.Want(room, one, now)
	if w.Now {
		s.reserved = int64(w.N)
		s.Outstanding.Add(s.reserved)
	}
	return w
}

// unreserve gives back what Want reserved: by now, what was claimed counts as outstanding.
func (c *Claimer) unreserve(q *plan.Queue) {
	s := c.slots[q.N]
	if n := s.reserved; n > 0 {
		s.reserved = 0
		s.Outstanding.Add(-n)
		c.Shares.Wake()
	}
}

// theOnly is the name of the only queue, or "".
func theOnly(queues []*plan.Queue) string {
	if len(queues) == 1 {
		return queues[0].Name
	}
	return ""
}
