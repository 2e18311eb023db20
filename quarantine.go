package onceq

import (
	"context"
	"slices"
	"sync"
	"time"
)

// A job that has lost a lease is a suspect: it may be what ended its process, or it only ran beside. So that one that ends
// its process every time is found out and takes nobody with it, a worker claims suspects one by one and only when they
// start at once: the claim is the mark that it was started, and no job is charged with a lease that it did not use.
// They go in the order of how often they were lost, so that those that ran beside are done before the one that did it.
//
// The next one starts when the one before has been dealt with, or has run for as long as probation says: the fewer lives it
// has left, the longer it is alone. One that hangs so keeps the others for a while and not for ever. At most half of a
// queue's handlers run suspects. Those that wait hold nothing: other workers may have them.

// probation is how long a suspect runs before the next one may start beside it: 1 s, and 16 s, 81 s and 256 s for one with
// three, two and one life left.
func probation(left int) time.Duration {
	k := max(1, DefaultMaxLost-left)
	return time.Duration(k*k*k*k) * time.Second
}

// suspects is the place where they start, one for all workers of a Queue: a process that ends takes all of them with it.
type suspects struct {
	mu      sync.Mutex
	taken   bool
	token   int64 // of the one that started last; 0 while it is being claimed
	over    *time.Timer
	waiting map[*lane]bool
}

// free says whether a suspect may start. If not, the lane is roused when one may.
func (s *suspects) free(l *lane) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken {
		if s.waiting == nil {
			s.waiting = make(map[*lane]bool)
		}
		s.waiting[l] = true
	}
	return !s.taken
}

func (s *suspects) take() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.taken
	s.taken = true
	return !was
}

func (s *suspects) start(token int64, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token = token
	s.over = time.AfterFunc(d, func() { s.leave(token) })
}

// leave ends the turn of a suspect, if it is still its own.
func (s *suspects) leave(token int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.taken || s.token != token {
		return
	}
	if s.over != nil {
		s.over.Stop()
	}
	s.taken, s.token, s.over = false, 0, nil
	for l := range s.waiting {
		l.rouse()
	}
	clear(s.waiting)
}

// suspect is one that was seen.
type suspect struct {
	id   int64
	lost int
}

const (
	maxSuspects = 10_000 // that a lane keeps in mind
	fewSuspects = 100    // that one claim chooses from
)

// suspectDue says whether a suspect is to be claimed before anything else: in turn with the others, so that neither waits
// for all of the other sort.
func (l *lane) suspectDue() bool {
	return len(l.suspects) > 0 && !l.othersTurn && int(l.slots.quarantined.Load()) < max(1, l.slots.count/2) && l.q.suspects.free(l)
}

// saw takes down which suspects there are.
func (l *lane) saw(all []suspect) {
	slices.SortStableFunc(all, func(a, b suspect) int { return a.lost - b.lost })
	l.suspects = l.suspects[:0]
	for _, s := range all[:min(len(all), maxSuspects)] {
		l.suspects = append(l.suspects, s.id)
	}
}

// claimSuspect claims the first of those seen that can be had, and starts it.
func (l *lane) claimSuspect(ctx context.Context) (int, error) {
	l.othersTurn = true
	if !l.q.suspects.take() {
		return 0, nil
	}
	few := l.suspects[:min(len(l.suspects), fewSuspects)]
	c := claim{queue: l.queue, lease: l.lease}
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.lease)
	leases, err := l.q.claim(unbroken, l.side, &c, claimOne, few)
	cancel()
	if err != nil || len(leases) == 0 {
		l.q.suspects.leave(0)
		if err == nil {
			l.suspects = l.suspects[len(few):]
			l.othersTurn = false
		}
		return 0, err
	}
	one := leases[0]
	l.suspects = l.suspects[slices.Index(few, one.ID)+1:]
	l.found = time.Now()
	l.q.suspects.start(one.Token, probation(l.handlers[one.Kind].maxLost-one.Lost))
	l.slots.quarantined.Add(1)
	l.slots.outstanding.Add(int64(l.slots.width - 1)) // it has a slot for itself
	l.exec.accept(l.slots, leases, c.began)
	return 1, nil
}
