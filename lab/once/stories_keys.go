package main

import "time"

// keyStories are about keys: a piece of work that is asked for again.
var keyStories = []*story{
	{
		name:     "asked-twice",
		happens:  "A client asks twice for the same work.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1, Key: "invoice-1", Life: aDay})
			_, _ = p.tryEnqueue("", job{N: 1, Key: "invoice-1", Life: aDay})
			p.work(crew{})
			s.lost(s.settle(p, writes))
			return s.rows(1)
		},
	},
	{
		name:     "first-rolls-back",
		happens:  "The second request comes while the first one's transaction is open. The first one then rolls back.",
		question: "rows written", right: 1,
		play: func(s *stage) int { return secondWhileFirstIsOpen(s, (*process).rollback) },
	},
	{
		name:     "first-commits",
		happens:  "The same, and the first one commits.",
		question: "rows written", right: 1,
		play: func(s *stage) int { return secondWhileFirstIsOpen(s, (*process).commit) },
	},
	{
		name:     "other-payload",
		happens:  "The key comes back with another amount.",
		question: "amounts dropped or overwritten without an error", right: 0,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1, Key: "invoice-1", Life: aDay})
			if _, err := p.tryEnqueue("", job{N: 2, Key: "invoice-1", Life: aDay}); err != nil {
				return 0
			}
			p.work(crew{})
			s.lost(s.settle(p, writes))
			return 2 - s.rows(1) - s.rows(2)
		},
	},
	{
		name:     "producer-rolls-back",
		happens:  "A transaction writes its row, enqueues a job, and rolls back.",
		question: "rows written by the job", right: 0,
		play: func(s *stage) int {
			p := s.process()
			p.begin("order")
			p.row("order", 7)
			p.enqueue("order", job{N: 1})
			p.rollback("order")
			p.work(crew{})
			s.lost(s.settle(p, writes))
			return s.rows(1)
		},
	},
	{
		name:     "producer-dies",
		happens:  "A producer dies between its own row and the job.",
		question: "rows without a job", right: 0,
		play: func(s *stage) int {
			p := s.process()
			m := <-p.send(command{Do: "begin", Tx: "order"})
			if m.Missing != "" { // the row is committed by itself
				p.row("", 7)
			} else {
				p.row("order", 7)
			}
			p.kill()
			b := s.process()
			b.work(crew{})
			s.lost(s.settle(b, writes))
			return s.rows(7) - s.rows(1)
		},
	},
	{
		name:     "row-beside-a-duplicate",
		happens:  "A transaction enqueues a key that is taken, and writes a row of its own.",
		question: "of its rows, committed", right: 1,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1, Key: "invoice-1", Life: aDay})
			p.begin("order")
			_, _ = p.tryEnqueue("order", job{N: 1, Key: "invoice-1", Life: aDay})
			_, _ = p.try(command{Do: "row", Tx: "order", N: 7})
			_, _ = p.try(command{Do: "commit", Tx: "order"})
			return s.rows(7)
		},
	},
	{
		name:     "opposite-orders",
		happens:  "Two transactions enqueue the same three keys in one call each, in opposite orders. A third one has the key in the middle, and rolls back when both wait.",
		question: "transactions aborted", right: 0,
		play: func(s *stage) int {
			a, b := s.process(), s.process()
			j := func(key string) job { return job{N: 1, Key: key, Life: aDay} }
			a.begin("third")
			a.enqueue("third", j("m"))
			a.begin("first")
			b.begin("second")
			first := a.send(command{Do: "enqueue", Tx: "first", Jobs: []job{j("a"), j("m"), j("z")}})
			s.waiting(first)
			second := b.send(command{Do: "enqueue", Tx: "second", Jobs: []job{j("z"), j("m"), j("a")}})
			s.waiters(second, 2)
			a.rollback("third")
			aborted := 0
			// Who has got its answer commits at once, and lets the other one go on.
			if early(first, second) == first {
				aborted += s.end(a, "first", first)
				return aborted + s.end(b, "second", second)
			}
			aborted += s.end(b, "second", second)
			return aborted + s.end(a, "first", first)
		},
	},
	{
		name:     "asked-after-the-end",
		happens:  "The work is asked for again when its job has finished.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			return askedAgain(s, aDay, func(*process) {})
		},
	},
	{
		name:     "post-repeated",
		happens:  "A client repeats a POST, because it did not get the answer. Its key is that of a job, which has finished with a receipt.",
		question: "receipts that the second call is answered with", right: 1,
		play: func(s *stage) int {
			p := s.process()
			j := job{N: 1, Key: "post-1", Life: aDay}
			p.enqueue("", j)
			p.work(crew{})
			s.lost(s.settle(p, func(a *act) {
				_ = a.write()
				a.answers("receipt")
			}))
			again, err := p.tryEnqueue("", j)
			if err == nil && len(again) == 1 && again[0].Result == "receipt" {
				return 1
			}
			return 0
		},
	},
	{
		name:     "asked-after-a-month",
		happens:  "The key is to be taken for ever. Its job has finished, 30 days pass, the housekeeping runs, and the work is asked for again.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			return askedAgain(s, forEver, (*process).age)
		},
	},
	{
		name:     "housekeeping-beside-a-live-key",
		happens:  "A job waits for its time. 30 days pass for the housekeeping, it runs, and the work is asked for again.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1, Key: "invoice-1", Life: aDay, Delay: 3000})
			p.age()
			_, _ = p.tryEnqueue("", job{N: 1, Key: "invoice-1", Life: aDay})
			p.work(crew{})
			s.lost(s.settle(p, writes))
			return s.rows(1)
		},
	},
	{
		name:     "asked-after-a-cancel",
		happens:  "A job that nobody has started is cancelled, and the work is asked for again.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			p := s.process()
			first := p.enqueue("", job{N: 1, Key: "invoice-1", Life: aDay, Delay: 3_600_000})
			p.do(command{Do: "cancel", Name: first[0].ID})
			_, _ = p.tryEnqueue("", job{N: 1, Key: "invoice-1", Life: aDay})
			p.work(crew{})
			s.lost(s.settle(p, writes))
			return s.rows(1)
		},
	},
	{
		name:     "asked-after-death",
		happens:  "A job has used up its attempts, and the work is asked for again.",
		question: "callers who are not told that nothing will run", right: 0,
		play: func(s *stage) int {
			p := s.process()
			j := job{N: 1, Key: "invoice-1", Life: aDay, Attempts: 1}
			p.enqueue("", j)
			p.work(crew{})
			s.lost(s.settle(p, (*act).fail))
			again, err := p.tryEnqueue("", j)
			if err != nil || again[0].Duplicate && again[0].State == "dead" {
				return 0
			}
			s.lost(s.settle(p, writes))
			return 1 - s.rows(1)
		},
	},
	{
		name:     "moved-to-another-queue",
		happens:  "A deploy moves a kind of job to another queue, and the work is asked for once before and once after.",
		question: "rows written", right: 1,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1, Key: "invoice-1", Life: aDay})
			_, _ = p.tryEnqueue("", job{N: 1, Key: "invoice-1", Life: aDay, Queue: "moved"})
			p.work(crew{Queues: []string{"default", "moved"}})
			s.lost(s.settle(p, writes))
			return s.rows(1)
		},
	},
	{
		name:     "changed-while-it-runs",
		happens:  "A customer is to be indexed again, under a key that is free when the job has finished. He changes once more after the running job has read him.",
		question: "changes that no later run sees, and nobody was refused", right: 0,
		play: func(s *stage) int {
			p := s.process()
			j := job{N: 1, Key: "customer-1", Life: untilDone}
			p.enqueue("", j)
			p.work(crew{})
			a := p.mustRun()
			if _, err := p.tryEnqueue("", j); err != nil {
				return 0
			}
			writes(a)
			s.lost(s.settle(p, writes))
			return 2 - s.rows(1)
		},
	},
}

// secondWhileFirstIsOpen asks for the same work in two transactions, of which the first ends while the second waits for it.
func secondWhileFirstIsOpen(s *stage, end func(*process, string)) int {
	a, b := s.process(), s.process()
	j := job{N: 1, Key: "invoice-1", Life: aDay}
	a.begin("first")
	b.begin("second")
	a.enqueue("first", j)
	second := b.send(command{Do: "enqueue", Tx: "second", Jobs: []job{j}})
	s.waiting(second)
	end(a, "first")
	_, err := b.got(second)
	s.check(err)
	b.commit("second")
	b.work(crew{})
	s.lost(s.settle(b, writes))
	return s.rows(1)
}

// askedAgain does a piece of work, and asks for it again after something else.
func askedAgain(s *stage, taken life, between func(*process)) int {
	p := s.process()
	j := job{N: 1, Key: "invoice-1", Life: taken}
	p.enqueue("", j)
	p.work(crew{})
	s.lost(s.settle(p, writes))
	between(p)
	_, _ = p.tryEnqueue("", j)
	s.lost(s.settle(p, writes))
	return s.rows(1)
}

// early returns the answer that is there first.
func early(a, b <-chan message) <-chan message {
	for until := time.Now().Add(patience); time.Now().Before(until) && len(a) == 0 && len(b) == 0; {
		time.Sleep(5 * time.Millisecond)
	}
	if len(a) > 0 {
		return a
	}
	return b
}

// end ends a transaction by what its last call was answered, and says whether it was aborted.
func (s *stage) end(p *process, tx string, last <-chan message) (aborted int) {
	_, err := p.got(last)
	if err == nil {
		_, err = p.try(command{Do: "commit", Tx: tx})
	} else {
		p.rollback(tx)
	}
	if err != nil {
		aborted = 1
	}
	return aborted
}
