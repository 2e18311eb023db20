package plan

import (
	"time"

	"github.com/onceq/onceq/internal/cursor"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/table"
)

// Queue is what the plan knows about one of the worker's queues.
//
// A queue is active while something is to be done for it soon; otherwise it is idle, and costs nothing but
// its part of the next look. Jobs are claimed of an active queue when it is due, and again at the time in
// next.again. A queue that was announced goes idle at once when it is empty, because a notification will
// come. Any other one is asked again after a few short pauses first, because jobs rarely come one at a time.
type Queue struct {
	Name   string
	Count  int  // slots
	Width  int  // jobs that one slot takes at once
	Pooled bool // running handlers hold connections of the pool
	N      int  // its place in State.Queues

	pace       pace
	cursor     cursor.Cursor
	quarantine quarantine.List
	turns      turns

	active bool // it is in State.active
	busy   bool // a claim or a page of the rescan is under way
	held   bool // the rescan comes before the next claim
	paused bool // nothing of it may be claimed
	moves  int  // how many claims and pages have begun

	next   nextClaim
	latest latest
	news   news

	empty   time.Time // when the claim ended that found no more jobs; zero: there may be some
	delayed time.Time // when its first delayed job is due; zero if that is after the next look
	lookAt  time.Time // when to look at it, apart from the looks at all; zero for never
}

// nextClaim is what the next claim of a queue is for, and when it comes.
type nextClaim struct {
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
	returned int64     // Room.Returned at the latest look behind that found something
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

// looking is the time in which a queue is looked at again and again, because a notification asked for that.
type looking struct {
	until time.Time // zero after the announcement that follows
	from  time.Time // since when, and
	jobs  int       // how many jobs were claimed since
}

// next is how long the run may get a queue's jobs alone after it did so: longer if it found many. It is 0
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

// idle reports whether nothing is to be done soon.
func (q *Queue) idle() bool { return !q.busy && !q.next.due && q.next.again.IsZero() }

// turns are what claims of a queue with a backlog know of other workers that claim there.
type turns struct {
	others time.Time     // there are some until then, as far as is known
	waited time.Duration // how long the latest claim waited for its turn
	from   time.Time     // no claim waits for its turn before this time, because the latest waited in vain
	vain   int           // so many in a row
}

// learn takes what a claim learned about turns: whether others claim there too. It returns how long the
// claim waited for its turn.
func (t *turns) learn(turn Turn, ended time.Time) (waited time.Duration) {
	switch {
	case turn.With:
		if turn.Waited > turnAtOnce || turn.Missed {
			t.others = ended.Add(cursor.Overlap)
		}
		if !turn.Missed {
			t.vain = 0
		}
		t.waited = turn.Waited
		return turn.Waited
	case turn.InVain:
		if t.vain++; t.vain > 1 { // once may be because very many wait
			t.from = ended.Add(2 * cursor.Overlap)
		}
	}
	return 0
}

// Room is what a worker has measured of a queue's slots.
type Room struct {
	Usable      int   // slots, as far as the pool's connections are enough for them
	Outstanding int64 // jobs that are claimed or about to be, and whose handler has not returned
	Quarantined int   // slots that jobs in quarantine occupy
	Returned    int64 // jobs whose handlers have ever returned
	Worked      int64 // nanoseconds that they took, added up
}

// Want is what is worth claiming for a queue.
type Want struct {
	N     int           // how many jobs, or the room that one in quarantine takes
	Free  int64         // handlers; jobs beyond that are claimed ahead
	Low   int64         // a claim is worth it only when at most this many jobs are outstanding
	Again time.Duration // if not now, decide again after this time at the latest
	Now   bool
}

// Want decides how many jobs to claim for a queue, or with one whether one in quarantine has room. While
// there are more jobs than the queue can take, it waits until a quarter of its limit is free, or claims every
// few milliseconds.
func (q *Queue) Want(room Room, one bool, now time.Time) Want {
	const patience = 5 * time.Millisecond
	var turn time.Duration
	if now.Before(q.turns.others) {
		turn = min(q.turns.waited, rhythm.Briefly)
	}
	limit, need := int64(room.Usable*q.Width)+q.pace.prefetch(room, q.Count, now, turn), int64(1)
	waited := now.Sub(q.latest.claimed)
	switch {
	case one:
		limit, need = int64((room.Usable-1)*q.Width), 0 // the job gets the next slot for itself
	case q.cursor.Full && waited < patience:
		need = max(1, limit/4)
	}
	free := limit - room.Outstanding
	w := Want{Low: limit - need, Free: max(0, int64(q.Count*q.Width)-room.Outstanding), Now: free >= need}
	if w.N = int(min(free, table.ChunkRows)); one {
		w.N = q.Width
	}
	switch {
	case q.Pooled:
		w.Again = 20 * time.Millisecond // nothing tells when the application gives a connection back
	case need <= 1:
		w.Again = time.Second
	default:
		w.Again = max(time.Millisecond, patience-waited)
	}
	return w
}

// hasRoom reports whether a handler of the queue is free, or some have returned since the look before: quick
// ones are rarely free when somebody looks. Those that returned may all have begun long jobs since. Then what
// this worker finds waits for its next handler, or until others rescan.
func (q *Queue) hasRoom(room Room) bool {
	some := room.Returned != q.latest.returned
	q.latest.returned = room.Returned
	return some || room.Outstanding <= int64((q.Count-1)*q.Width)
}

// HasMore reports whether there is something to claim, as far as is known.
func (q *Queue) HasMore() bool { return q.next.due || len(q.quarantine.IDs) > 0 }

// Lost takes the jobs of a queue that have lost leases, unless it is paused.
func (q *Queue) Lost(jobs []quarantine.Job) bool {
	if !q.paused {
		q.quarantine.Saw(jobs)
	}
	return !q.paused
}

// pace is how fast a queue's handlers return, and so how many jobs are worth claiming before a slot is free
// for them.
type pace struct {
	careful    bool    // no job is claimed ahead
	rate       float64 // how many handlers return in a second
	counted    int64   // Room.Returned when rate was last measured
	countedAt  time.Time
	size       int64 // bytes of a job's payload, as the latest claims had them
	workedOn   int64 // jobs, and
	workedUpTo int64 // nanoseconds, that no longer count
}

// prefetch is how many jobs to claim in addition to those that have a slot. turn is how long the next claim's
// answer may take: jobs are to last until then.
func (p *pace) prefetch(room Room, slots int, now time.Time, turn time.Duration) int64 {
	if d := now.Sub(p.countedAt); d > 2*time.Millisecond {
		p.rate = (p.rate + float64(room.Returned-p.counted)/d.Seconds()) / 2
		p.counted, p.countedAt = room.Returned, now
	}
	if p.careful {
		return 0
	}
	ahead := min(p.rate, p.could(room, slots)) * (prefetchTime + turn).Seconds()
	return min(table.ChunkRows, table.ChunkBytes/max(1, p.size), int64(ahead))
}

// claimed takes the size of the jobs that a claim has returned: large ones count at once, small ones little
// by little.
func (p *pace) claimed(jobs Jobs) {
	size := jobs.Bytes() / int64(jobs.Len())
	p.size = max(size, (p.size+size)/2)
}

// could is how many handlers could return in a second if they took as long as they have on average. Without
// it, a few long handlers that end together would look like a high rate.
func (p *pace) could(room Room, slots int) float64 {
	if room.Returned < 100 {
		return 0 // too few to tell
	}
	// Only recent handlers count.
	if room.Returned-p.workedOn > 1000 {
		p.workedUpTo, p.workedOn = p.workedUpTo+(room.Worked-p.workedUpTo)/2, p.workedOn+(room.Returned-p.workedOn)/2
	}
	worked := time.Duration(room.Worked-p.workedUpTo) + 1
	return float64(slots) * float64(room.Returned-p.workedOn) / worked.Seconds()
}
