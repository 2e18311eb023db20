package main

import "time"

// runStories are about runs of a handler: what ends one in the middle, and who goes on.
var runStories = []*story{
	{
		name:     "killed-after-its-write",
		happens:  "A worker is killed when its handler has written and before the job is completed. Another one takes over.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			a := s.process()
			a.enqueue("", job{N: 1})
			a.work(crew{})
			_ = a.mustRun().write()
			a.kill()
			s.takeOver(writes)
			return s.rows(1)
		},
	},
	{
		name:     "wakes-while-another-runs",
		happens:  "A worker writes, and freezes for longer than anybody waits. Another one takes over and writes. The first one wakes up and finishes, then the second one does.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			a, first := s.frozen(func(first *act) { _ = first.write() })
			b, second := s.second()
			if second != nil {
				_ = second.write()
			}
			a.wakeAndFinish(first)
			if second != nil {
				second.finish()
			}
			s.lost(s.settle(b, writes))
			return s.rows(1)
		},
	},
	{
		name:     "wakes-when-another-is-done",
		happens:  "The same, but the second one finishes before the first one wakes up.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			a, first := s.frozen(func(first *act) { _ = first.write() })
			b, second := s.second()
			if second != nil {
				writes(second)
				s.settle(b, writes)
			}
			a.wakeAndFinish(first)
			s.lost(s.settle(b, writes))
			return s.rows(1)
		},
	},
	{
		name:     "writes-after-it-woke",
		happens:  "A worker freezes before its first write. Another one takes over and writes. The first one wakes up, writes and finishes, then the second one finishes.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			a, first := s.frozen(func(*act) {})
			b, second := s.second()
			if second != nil {
				_ = second.write()
			}
			a.thaw()
			_ = first.write()
			first.finish()
			_, _ = a.try(command{Do: "stop"})
			if second != nil {
				second.finish()
			}
			s.lost(s.settle(b, writes))
			return s.rows(1)
		},
	},
	{
		name:     "answer-to-commit-lost",
		happens:  "The database commits the write and the completion, and the answer is lost with the connection.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			w := s.wire()
			a := s.processOver(w.url)
			a.enqueue("", job{N: 1})
			a.work(crew{})
			first := a.mustRun()
			_ = first.write()
			w.cutAtCommit()
			first.finish()
			if !w.didCut(5 * time.Second) {
				panic(missing("what a handler writes is not in one transaction with the completion"))
			}
			s.lost(s.settle(a, writes))
			_, _ = a.try(command{Do: "stop"})
			s.takeOver(writes)
			return s.rows(1)
		},
	},
	{
		name:     "slow-but-alive",
		happens:  "A handler that is alive takes longer than the time after which a silent worker is taken for dead.",
		question: "handlers started", right: 1,
		play: func(s *stage) int {
			a := s.process()
			a.enqueue("", job{N: 1, Kind: "long"})
			a.work(crew{Kinds: []string{"long"}, AtOnce: 1}) // so the other one does what else there is
			first := a.mustRun()
			b := s.process()
			b.silence()
			b.work(crew{Kinds: []string{"long"}})
			if second := b.takes(1, "long", 20*time.Second); second != nil {
				writes(second)
			}
			writes(first)
			s.lost(s.settle(b, writes))
			return s.started(1)
		},
	},
	{
		name:     "fails-after-its-write",
		happens:  "A handler writes and then fails. Its second attempt succeeds.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1})
			p.work(crew{})
			first := p.mustRun()
			_ = first.write()
			first.fail()
			s.lost(s.settle(p, writes))
			return s.rows(1)
		},
	},
	{
		name:     "commits-behind-the-queue",
		happens:  "A handler commits its transaction by itself (a script with a commit in it) and then fails.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1})
			p.work(crew{})
			first := p.mustRun()
			_ = first.write()
			_ = first.end()
			first.fail()
			s.lost(s.settle(p, writes))
			return s.rows(1)
		},
	},
	{
		name:     "shutdown-too-slow",
		happens:  "A worker is told to stop while a handler has written and does not return. After the deadline its process is killed.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			a := s.process()
			a.enqueue("", job{N: 1})
			a.work(crew{StopWithin: 1000})
			_ = a.mustRun().write()
			stopped := a.send(command{Do: "stop"})
			select {
			case <-stopped:
			case <-time.After(4 * time.Second):
			}
			a.kill()
			s.takeOver(writes)
			return s.rows(1)
		},
	},
	{
		name:     "old-worker-in-a-deploy",
		happens:  "A job that may be tried once is of a kind that only the new version knows. A worker of the old version looks first.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			a := s.process()
			a.enqueue("", job{N: 1, Kind: "new", Attempts: 1})
			a.enqueue("", job{N: 2})
			a.work(crew{})
			writes(a.mustRun()) // the second one, so it has looked at the first
			b := s.process()
			b.work(crew{Kinds: []string{"work", "new"}})
			s.lost(s.settle(b, writes))
			return s.rows(1)
		},
	},
	{
		name:     "poison-beside-others",
		happens:  "A job ends its process each time it runs. Three others run beside it, for a second and a half. All may be tried three times, and six processes are started.",
		question: "of the three, not done", right: 0,
		play: func(s *stage) int {
			p := s.process()
			for n := 1; n <= 4; n++ {
				p.enqueue("", job{N: n, Attempts: 3})
			}
			done := func() int { return s.rows(2) + s.rows(3) + s.rows(4) }
			for range 6 {
				p.silence()
				p.work(crew{})
				for done() < 3 {
					a := p.run(20 * time.Second)
					if a == nil || a.n == 1 {
						break
					}
					time.AfterFunc(1500*time.Millisecond, func() { writes(a) })
				}
				p.kill()
				p = s.process()
			}
			return 3 - done()
		},
	},
	{
		name:     "cancel-crosses-the-end",
		happens:  "A job is cancelled when its handler has written and is about to finish.",
		question: "callers told \"cancelled\" of work that was committed", right: 0,
		play: func(s *stage) int {
			p := s.process()
			id := p.enqueue("", job{N: 1})[0].ID
			p.work(crew{})
			first := p.mustRun()
			_ = first.write()
			told := p.send(command{Do: "cancel", Name: id})
			s.waiting(told)
			first.finish()
			_, err := p.got(told)
			_, _ = p.try(command{Do: "stop"})
			if err == nil && s.rows(1) > 0 {
				return 1
			}
			return 0
		},
	},
}

// takeOver starts another process, after the time in which a silent one is taken for dead, and lets it do what is left.
func (s *stage) takeOver(do func(*act)) {
	b := s.process()
	b.silence()
	b.work(crew{})
	s.lost(s.settle(b, do))
}

// frozen starts a handler, lets it do something, and freezes its process.
func (s *stage) frozen(do func(*act)) (a *process, first *act) {
	a = s.process()
	a.enqueue("", job{N: 1})
	a.work(crew{})
	first = a.mustRun()
	do(first)
	a.freeze()
	return a, first
}

// second starts another process when the first one is frozen for longer than anybody waits, and gives the handler that takes
// over; nil if none does.
func (s *stage) second() (b *process, second *act) {
	b = s.process()
	b.silence()
	b.work(crew{})
	if second = b.takes(1, "", patience); second == nil {
		s.say("nobody else gets the job while its process is frozen")
	}
	return b, second
}

// takes gives the handler that starts in a process for a job that another one has; nil if none does. To be sure that the process
// has looked it does another job first, and has some more time after that.
func (p *process) takes(n int, kind string, within time.Duration) *act {
	p.enqueue("", job{N: 99, Kind: kind})
	for wait := patience; ; {
		a := p.run(wait)
		if a == nil || a.n == n {
			return a
		}
		writes(a)
		wait = within
	}
}

func (p *process) wakeAndFinish(first *act) {
	p.thaw()
	first.finish()
	_, _ = p.try(command{Do: "stop"}) // returns when the outcome is stored or refused
}
