package main

import "time"

// limitStories are about jobs that wait for others.
var limitStories = []*story{
	{
		name:     "one-customer-after-a-kill",
		happens:  "A customer's jobs run one at a time. The worker with the first one is killed, and another one takes over.",
		question: "at most at once", right: 1,
		play: func(s *stage) int {
			a := s.process()
			for n := 1; n <= 3; n++ {
				a.enqueue("", job{N: n, Lane: "customer-1"})
			}
			return s.atMost(a, 3)
		},
	},
	{
		name:     "limit-after-a-kill",
		happens:  "At most two jobs for a provider run at once, in all processes. A worker with two of them is killed, and another one takes over.",
		question: "at most at once", right: 2,
		play: func(s *stage) int {
			a := s.process()
			for n := 1; n <= 6; n++ {
				a.enqueue("", job{N: n, Limit: "provider"})
			}
			return s.atMost(a, 6)
		},
	},
	{
		name:     "rate-after-kills",
		happens:  "At most four messages are sent within three seconds, in all processes. Three processes come, send four, and are killed.",
		question: "starts within two seconds and a half, over four", right: 0,
		play: func(s *stage) int {
			p := s.process()
			for n := 1; n <= 12; n++ {
				p.enqueue("", job{N: n, Rate: "messages"})
			}
			for range 3 {
				p.work(crew{})
				for range 4 {
					if a := p.run(patience); a != nil {
						writes(a)
					}
				}
				p.kill()
				p = s.process()
				p.silence()
			}
			return max(0, s.most(2500*time.Millisecond)-4)
		},
	},
	{
		name:     "member-of-a-group-dies",
		happens:  "A job runs when two others are finished, of which one is dead.",
		question: "jobs that neither run nor end", right: 0,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1, Attempts: 1}, job{N: 2, Attempts: 1}, job{N: 3, Attempts: 1, Group: "report"})
			p.work(crew{})
			return s.settle(p, func(a *act) {
				if a.n == 1 {
					a.fail()
				} else {
					writes(a)
				}
			})
		},
	},
}

// most is the most handlers that started within a time.
func (s *stage) most(within time.Duration) (most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, first := range s.starts {
		n := 0
		for _, a := range s.starts {
			if !a.at.Before(first.at) && a.at.Sub(first.at) < within {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// atMost kills the worker that has the first jobs, lets another one do all, and counts how many run at once.
func (s *stage) atMost(a *process, jobs int) (most int) {
	a.work(crew{})
	a.mustRun()
	for most = 1; a.run(3*time.Second) != nil; most++ {
	}
	a.kill()
	b := s.process()
	b.silence()
	b.work(crew{})
	for done := 0; done < jobs; {
		at := []*act{b.run(patience)}
		if at[0] == nil {
			s.lost(b.left())
			break
		}
		for next := b.run(2 * time.Second); next != nil; next = b.run(2 * time.Second) {
			at = append(at, next)
		}
		most = max(most, len(at))
		for _, one := range at {
			writes(one)
		}
		done += len(at)
	}
	return most
}
