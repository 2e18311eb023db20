package main

import "time"

// tickStories are about schedules.
var tickStories = []*story{
	{
		name:     "tick-while-all-is-down",
		happens:  "A job is due at each half of a minute. All processes end after one, and come back after the next one.",
		question: "jobs for the time when all was down", right: 1,
		play: func(s *stage) int {
			const every = 30 * time.Second
			a := s.process()
			a.work(crew{Every: 30})
			first := a.mustRun()
			writes(first)
			_, _ = a.try(command{Do: "stop"})
			a.kill()
			tick := first.at.Truncate(every)
			time.Sleep(time.Until(tick.Add(every + time.Second)))
			b := s.process()
			b.work(crew{Every: 30})
			n := 0
			for end := tick.Add(2*every - 500*time.Millisecond); ; n++ {
				next := b.run(time.Until(end))
				if next == nil {
					return n
				}
				writes(next)
			}
		},
	},
	{
		name:     "tick-in-two-processes",
		happens:  "Two processes have the same schedule: a job each ten seconds.",
		question: "jobs that start less than half of that after another, in three times", right: 0,
		play: func(s *stage) int {
			const every = 10 * time.Second
			a, b := s.process(), s.process()
			a.work(crew{Every: 10})
			b.work(crew{Every: 10})
			first := time.Now().Truncate(every).Add(every) // of those that count
			for _, p := range []*process{a, b} {
				go func() {
					for next := p.run(patience); next != nil; next = p.run(patience) {
						writes(next)
					}
				}()
			}
			time.Sleep(time.Until(first.Add(3*every - time.Second)))
			s.mu.Lock()
			defer s.mu.Unlock()
			n := 0
			before := time.Time{}
			for _, start := range s.starts {
				if start.at.Before(first) {
					continue
				}
				if start.at.Sub(before) < every/2 {
					n++
				}
				before = start.at
			}
			return n
		},
	},
}
