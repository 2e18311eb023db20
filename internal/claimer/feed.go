package claimer

import (
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/table"
)

// feed is what the claimer knows about one of its queues. Only the claimer's goroutine uses it, except the
// counts in slots.
//
// A feed is active while something is to be done for it soon; otherwise it is idle, and costs nothing but its
// part of the next look. The claimer claims from an active feed when it is due, and again at the time in
// again. A feed that has announced itself goes idle at once when it is empty, because a notification will
// come. Any other one is asked again after a few short pauses first, because jobs rarely come one at a time.
type feed struct {
	queue      string
	slots      *Slots
	reserved   int64 // the part of slots.outstanding that is for the claim under way
	pace       pace
	cursor     cursor.Cursor
	quarantine quarantine.List
	turns      turns
	unknown    map[string]bool // kinds without a handler that the log has named

	active bool // it is in claimer.active
	busy   bool // a claim or a page of the rescan is under way
	held   bool // the rescan comes before the next claim
	paused bool // nothing of it may be claimed
	moves  int  // how many claims and pages have begun

	plan   plan
	latest latest
	news   news

	delayed time.Time // when its first delayed job is due; zero if that is after the next look
	lookAt  time.Time // when to look at it, apart from the looks at all; zero for never
}

// plan is what the next claim of a queue is for, and when it comes.
type plan struct {
	due     bool          // there is something to claim, as far as is known
	again   time.Time     // when to claim although nothing is known; zero for never
	pause   time.Duration // before the next claim of that kind
	backlog bool          // there is so much that it is claimed by itself
	last    bool          // no other job was due at the latest look, and none was claimed since
	anew    bool          // what may be claimed has changed while a claim was under way: begin at the beginning
	noRoom  bool          // there was something to claim, and no room for it
}

// latest is what the latest claims and looks of a queue have left.
type latest struct {
	returned int64     // slots.returned at the latest look behind that found something
	claimed  time.Time // when the latest claim ended
	found    time.Time // when the latest claim that found something ended
}

// news is what producers and this worker know of each other.
type news struct {
	announced time.Time // since when producers know that jobs are waited for, and have told of none; zero: they do not
	heard     int       // how many notifications have come
	follows   bool      // looks follow its announcement: somebody may have told nobody of a job
	left      time.Time // when jobs of open transactions were last left to this run
	passOn    time.Time // when another worker is told of jobs that there is no room for here; zero for never
	looking   looking
}

// turns are what claims of a queue with a backlog know of other workers that claim there.
type turns struct {
	others time.Time     // there are some until then, as far as is known
	waited time.Duration // how long the latest claim waited for its turn
	from   time.Time     // no claim waits for its turn before this time, because the latest waited in vain
	vain   int           // so many in a row
}

// took takes what a claim learned about turns: whether others claim there too. It returns how long the
// claim waited for its turn.
func (t *turns) took(ask *Ask, ended time.Time) (waited time.Duration) {
	switch turn := ask.Turn; {
	case turn != nil:
		if turn.Waited > turnAtOnce || turn.Missed {
			t.others = ended.Add(cursor.Overlap)
		}
		if !turn.Missed {
			t.vain = 0
		}
		t.waited = turn.Waited
		return turn.Waited
	case ask.outOfTurn:
		if t.vain++; t.vain > 1 { // once may be because very many wait
			t.from = ended.Add(2 * cursor.Overlap)
		}
	}
	return 0
}

// looking is the time in which a queue is looked at again and again, because a notification asked for that.
type looking struct {
	until time.Time // zero after the announcement that follows
	from  time.Time // since when, and
	jobs  int       // how many jobs were claimed since
}

// next is how long the run may get a feed's jobs alone after it did so: longer if it found many. It is 0
// if it did not.
func (l *looking) next(now time.Time) time.Duration {
	switch {
	case l.until.IsZero():
		return 0
	case now.Sub(l.from) <= time.Duration(l.jobs)*looksLongFor:
		return looksLong
	}
	return looksBriefly
}

// want is what is worth claiming for a queue.
type want struct {
	n     int           // how many jobs, or the room that one in quarantine takes
	one   bool          // one job in quarantine, before anything else
	low   int64         // a claim is worth it only when at most this many jobs are outstanding
	again time.Duration // if not now, decide again after this time at the latest
	now   bool
}

// want decides how many jobs to claim for a feed, and reserves them if its handlers hold connections. While
// there are more jobs than the feed can take, it waits until a quarter of its limit is free, or claims every
// few milliseconds.
func (c *Claimer) want(f *feed) want {
	const patience = 5 * time.Millisecond
	s := f.slots
	w := want{one: c.quarantineDue(f)}
	now := time.Now()
	var turn time.Duration
	if now.Before(f.turns.others) {
		turn = min(f.turns.waited, rhythm.Briefly)
	}
	prefetch := f.pace.prefetch(s, now, turn)
	usable := s.Count
	if s.Pooled {
		c.Shares.Lock()
		defer c.Shares.Unlock()
		usable = c.Shares.Allow(s)
	}
	limit, need := int64(usable*s.Width)+prefetch, int64(1)
	waited := now.Sub(f.latest.claimed)
	switch {
	case w.one:
		limit, need = int64((usable-1)*s.Width), 0 // the job gets the next slot for itself
	case f.cursor.Full && waited < patience:
		need = max(1, limit/4)
	}
	free := limit - s.Outstanding.Load()
	w.low = limit - need
	if w.n = int(min(free, table.ChunkRows)); w.one {
		w.n = s.Width
	}
	if w.now = free >= need; w.now && s.Pooled {
		f.reserved = int64(w.n)
		s.Outstanding.Add(f.reserved)
	}
	switch {
	case s.Pooled:
		w.again = 20 * time.Millisecond // nothing tells when the application gives a connection back
	case need <= 1:
		w.again = time.Second
	default:
		w.again = max(time.Millisecond, patience-waited)
	}
	return w
}

// wantNow is want, and has the executor rouse the claimer when there is room if there is none now.
func (c *Claimer) wantNow(f *feed) want {
	s := f.slots
	for {
		s.low.Store(-1)
		w := c.want(f)
		if w.now {
			return w
		}
		if s.low.Store(w.low); s.Outstanding.Load() > w.low {
			return w
		}
	}
}

// unreserve gives back what want reserved: by now, what was claimed counts as outstanding.
func (c *Claimer) unreserve(f *feed) {
	if n := f.reserved; n > 0 {
		f.reserved = 0
		f.slots.Outstanding.Add(-n)
		c.Shares.Wake()
	}
}

// pace is how fast a queue's handlers return, and so how many jobs are worth claiming before a slot is free
// for them.
type pace struct {
	careful    bool    // no job is claimed ahead
	rate       float64 // how many handlers return in a second
	counted    int64   // slots.returned when rate was last measured
	countedAt  time.Time
	size       int64 // bytes of a job's payload, as the latest claims had them
	workedOn   int64 // jobs, and
	workedUpTo int64 // nanoseconds, that no longer count
}

// prefetch is how many jobs to claim in addition to those that have a slot. turn is how long the next claim's
// answer may take: jobs are to last until then.
func (p *pace) prefetch(s *Slots, now time.Time, turn time.Duration) int64 {
	if d := now.Sub(p.countedAt); d > 2*time.Millisecond {
		returned := s.Returned.Load()
		p.rate = (p.rate + float64(returned-p.counted)/d.Seconds()) / 2
		p.counted, p.countedAt = returned, now
	}
	if p.careful {
		return 0
	}
	return min(table.ChunkRows, table.ChunkBytes/max(1, p.size), int64(min(p.rate, p.could(s))*(prefetchTime+turn).Seconds()))
}

// claimed takes the size of the jobs that a claim has returned: large ones count at once, small ones little
// by little.
func (p *pace) claimed(jobs Jobs) {
	size := jobs.Bytes() / int64(jobs.Len())
	p.size = max(size, (p.size+size)/2)
}

// could is how many handlers could return in a second if they took as long as they have on average. Without
// it, a few long handlers that end together would look like a high rate.
func (p *pace) could(s *Slots) float64 {
	worked, returned := s.Worked.Load(), s.Returned.Load()
	if returned < 100 {
		return 0 // too few to tell
	}
	// Only recent handlers count.
	if returned-p.workedOn > 1000 {
		p.workedUpTo, p.workedOn = p.workedUpTo+(worked-p.workedUpTo)/2, p.workedOn+(returned-p.workedOn)/2
	}
	return float64(s.Count) * float64(returned-p.workedOn) / (time.Duration(worked-p.workedUpTo) + 1).Seconds()
}
