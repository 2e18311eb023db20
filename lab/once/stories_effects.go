package main

import "time"

// effectStories are about calls to a provider.
var effectStories = []*story{
	{
		name:     "fails-after-its-call",
		happens:  "A handler charges a card, gets the receipt, and fails later. Its second attempt succeeds. The provider does not recognise a repetition.",
		question: "charges", right: 1,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1})
			p.work(crew{})
			first := p.mustRun()
			_ = first.call("charge")
			first.fail()
			s.lost(s.settle(p, charges))
			return s.called()
		},
	},
	{
		name:     "killed-in-its-call",
		happens:  "A worker is killed between the charge and the receipt. The provider recognises a repetition by its key.",
		question: "charges", right: 1,
		play: func(s *stage) int {
			s.killedInCall(crew{})
			return s.effects()
		},
	},
	{
		name:     "killed-in-a-call-that-nobody-recognises",
		happens:  "The same with a provider that does not recognise a repetition.",
		question: "charges", right: 1,
		play: func(s *stage) int {
			s.killedInCall(crew{Unsure: true})
			return s.called()
		},
	},
	{
		name:     "no-answer-to-a-call",
		happens:  "The provider charges, and its answer is a time-out. It does not recognise a repetition. The worker lives on.",
		question: "charges", right: 1,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1})
			p.work(crew{Unsure: true})
			s.whenCalled(func(*process, message) string {
				s.whenCalled(nil)
				return "504 Gateway Timeout"
			})
			s.lost(s.settle(p, charges))
			return s.called()
		},
	},
	{
		name:     "server-crashes-in-a-call",
		happens:  "Postgres crashes and comes back between the charge and the receipt. The provider recognises a repetition by its key.",
		question: "charges", right: 1, restarts: true,
		play: func(s *stage) int {
			p := s.process()
			p.enqueue("", job{N: 1})
			p.work(crew{})
			s.whenCalled(func(*process, message) string {
				s.whenCalled(nil)
				if err := s.server.Restart(true); err != nil {
					s.say(err.Error())
				}
				return ""
			})
			s.lost(s.settle(p, charges))
			return s.effects()
		},
	},
}

// charges is a handler that makes a call, writes and is done.
func charges(a *act) {
	_ = a.call("charge")
	writes(a)
}

// killedInCall kills the first process when its call has reached the provider. Another one takes over.
func (s *stage) killedInCall(c crew) {
	a := s.process()
	a.enqueue("", job{N: 1})
	a.work(c)
	reached := make(chan struct{})
	s.whenCalled(func(p *process, _ message) string {
		s.whenCalled(nil)
		p.kill()
		close(reached)
		return ""
	})
	_ = a.mustRun().call("charge")
	select {
	case <-reached:
	case <-time.After(patience):
	}
	b := s.process()
	b.silence()
	b.work(c)
	s.lost(s.settle(b, charges))
	if s.rows(1) == 0 {
		s.say("the job then waits for a person")
	}
}
