package onceq

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/onceq/onceq/internal/count"
	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/nap"
	"github.com/onceq/onceq/internal/reap"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// ReaperConfig configures a Reaper. The zero value is a good start.
type ReaperConfig struct {
	// Every is the wait between two passes, ±10%: 100 ms to a day. Default one minute. When a pass has looked at
	// many rows that stay, the wait is a hundred times as long as looking took, or until a tenth as many keys as
	// the table can hold have come. Removing rows does not lengthen it.
	Every time.Duration

	// Batch is how many rows a statement removes at most. Default 1,000; at most 100,000.
	Batch int

	// Grace is how long the fence of a finished key stays after the key has become free, so that a key that is taken again
	// gets a larger token. Default one hour; at least a millisecond.
	Grace time.Duration
}

// Reaper removes what nobody needs any more: fences whose window is over, outcomes of effects whose job can never run
// again, history that has been kept long enough, and what cancelled jobs and departed workers left behind. How long history
// stays is decided when a job finishes (Kind.Keep, QueueConfig.Keep), and a key's window when it is enqueued; the Reaper
// only carries this out. Without a Reaper everything works, and the tables grow. It also lets lanes, limits and groups
// go on that wait for rows that somebody deleted by hand.
//
// It never removes a live key, an unfinished job, a dead or held job, a cancelled job with an effect whose outcome is
// unknown, or a fence that is queued, claimed, uncertain or held. There are two exceptions. An effect of unknown outcome
// whose job can never run again is removed after its window. A client's key (ClassRequest) whose outcome is unknown, even
// if it is held, is removed when nobody has asked for it for 30 or 31 days, or for its window if that is longer: otherwise
// anybody who can make a request fail could grow the table. The key is then new, as any other key is after its window. With
// Window: Forever it is never removed.
//
// Reapers may run anywhere, any number at once; one per database is enough. A Reaper is safe for concurrent use.
type Reaper struct {
	q      *Queue
	every  time.Duration
	reaper reap.Reaper
}

// NewReaper returns a Reaper over the queue's tables. A bad configuration is an *InvalidError.
func NewReaper(q *Queue, cfg ReaperConfig) (*Reaper, error) {
	cfg.Every, cfg.Batch, cfg.Grace = cmp.Or(cfg.Every, time.Minute), cmp.Or(cfg.Batch, 1000), cmp.Or(cfg.Grace, time.Hour)
	switch {
	case q == nil:
		return nil, invalid("NewReaper", "needs a queue")
	case cfg.Every < 100*time.Millisecond, cfg.Every > 24*time.Hour: // looks all the time, or never
		return nil, invalid("ReaperConfig.Every", "is %s; 100ms to a day is possible", cfg.Every)
	case cfg.Batch < 0 || cfg.Batch > 100_000:
		return nil, invalid("ReaperConfig.Batch", "is %d; 1 to 100,000 is possible", cfg.Batch)
	case cfg.Grace < time.Millisecond:
		return nil, invalid("ReaperConfig.Grace", "is %s; at least a millisecond", cfg.Grace)
	}
	return &Reaper{q: q, every: cfg.Every, reaper: reap.Reaper{
		Store: q.store, Batch: cfg.Batch, Grace: cfg.Grace, Cancelled: DefaultWindow,
	}}, nil
}

// Reaped counts what one pass did.
type Reaped struct {
	Fences  int // removed: keys of jobs, requests and applications that were free for Grace
	Effects int // removed: outcomes of effects whose job is gone
	History int // removed: finished jobs that were kept long enough
	Cancels int // removed: requests to cancel jobs that are gone
	Waiters int // removed: announcements of workers that never came back
	Workers int // removed: rows of workers that never came back
	Counts  int // removed: what workers counted more than a day ago, by the hour more than a month ago
	Awaits  int // removed: what jobs that are gone, or earlier rounds of a job, had waited for (Await, Sleep)
	Members int // removed: what was known of the members of groups whose waiting job is gone (Job.After)

	// Unknown counts removed keys of clients whose outcome nobody has found out. A warning in the log says so too.
	Unknown int

	// Missing counts keys that were freed because their job is neither in jobs nor in job_history: somebody deleted its row
	// by hand. The first pass that finds such a key notes the time. After Grace the key counts as that of a cancelled job,
	// and it is free when its window is over.
	Missing int
}

// sorts gives the counts by the sort of rows that each is of.
func (r *Reaped) sorts() map[string]*int {
	return map[string]*int{
		"fences": &r.Fences, "effects": &r.Effects, "history": &r.History, "cancels": &r.Cancels, "waiters": &r.Waiters,
		"workers": &r.Workers, "counts": &r.Counts, "awaits": &r.Awaits, "members": &r.Members, "unknown": &r.Unknown,
		"missing": &r.Missing,
	}
}

// Run makes passes until ctx ends, and then returns nil. It also counts twice a minute how many jobs of each queue
// are due (Count.Due). The first pass starts after a random part of Every. A pass that fails is logged and shown by
// Ops.Health, and the next one starts at its usual time. After the pool was closed Run returns an error.
func (r *Reaper) Run(ctx context.Context) error {
	owner := new(Reaper) // names this call
	defer r.q.troubles.Ends(owner)
	var counting sync.WaitGroup
	defer counting.Wait()
	ctx, end := context.WithCancel(ctx)
	defer end()
	counting.Go(func() { r.countDue(ctx) })
	wait := rand.N(r.every)
	var rested time.Time // when the rest after the latest pass is over
	var last reap.Fences
	for nap.For(ctx, wait, nil) {
		if wait = r.every + rand.N(r.every/5+1) - r.every/10; time.Now().Before(rested) && !r.reaper.Grown(ctx, last) {
			continue
		}
		_, keys, looked, err := r.pass(ctx)
		last, rested = keys, time.Now().Add(100*looked)
		switch {
		case err == nil:
			r.q.troubles.Works(owner, watch.Reap, "")
		case lazytx.PoolClosed(err) && ctx.Err() == nil:
			return fmt.Errorf("onceq: the pool was closed while a Reaper was running: %w", err)
		case ctx.Err() == nil:
			r.q.troubles.Fails(owner, watch.Reap, "", err)
		}
	}
	return nil
}

// countDue writes how many jobs of each queue are due, twice a minute until ctx ends, and less often where
// that takes more than a hundredth of the time.
func (r *Reaper) countDue(ctx context.Context) {
	for owner, wait := new(Reaper), rand.N(table.PresentEvery/2); nap.For(ctx, wait, nil); {
		began := time.Now()
		err := count.Due(ctx, r.q.store)
		wait = max(table.PresentEvery/2, rhythm.Hundredth*time.Since(began))
		switch {
		case err == nil:
			r.q.troubles.Works(owner, watch.Count, "")
		case ctx.Err() == nil:
			r.q.troubles.Fails(owner, watch.Count, "", err)
		}
	}
}

// RunOnce makes one full pass, in statements of at most Batch rows, each of which commits on its own. The counts are right
// even if it returns an error. It reports one EventReaped for each sort of rows that it removed; the event's Kind names the
// sort: fences, effects, history, cancels, waiters, workers, counts, awaits, members, unknown or missing.
func (r *Reaper) RunOnce(ctx context.Context) (Reaped, error) {
	sum, _, _, err := r.pass(ctx)
	return sum, err
}

// pass is RunOnce. It also returns what job_fences was when it began, and how long it took to look at fences that stay.
func (r *Reaper) pass(ctx context.Context) (Reaped, reap.Fences, time.Duration, error) {
	sum, keys, looked, err := r.reaper.Pass(ctx)
	r.report(ctx, Reaped(sum))
	if err != nil {
		err = fmt.Errorf("onceq: reap: %w", r.q.store.Told(err))
	}
	return Reaped(sum), keys, looked, err
}

func (r *Reaper) report(ctx context.Context, sum Reaped) {
	if sum.Missing > 0 {
		r.q.log.WarnContext(ctx, "onceq: keys were freed whose jobs do not exist; was jobs or job_history changed by hand?", "count", sum.Missing)
	}
	if sum.Unknown > 0 {
		r.q.log.WarnContext(ctx, "onceq: keys of clients were removed whose outcome was unknown and that nobody asked for; docs/use/http.md says how to find and resolve such keys in time", "count", sum.Unknown)
	}
	all := sum.sorts()
	for _, sort := range slices.Sorted(maps.Keys(all)) {
		if n := *all[sort]; n > 0 {
			r.q.emit(ctx, Event{Type: EventReaped, Kind: sort, Count: n})
		}
	}
}
