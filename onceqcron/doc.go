// Package onceqcron enqueues jobs by a timetable: every night at two in Berlin, every ten minutes, on the last working day
// of the month. Each tick happens once, in any number of processes, through crashes and deploys, without a leader.
//
//	var Report = onceq.Kind[ReportArgs]{Name: "report"}
//
//	cron, err := onceqcron.New(q, pool, onceqcron.Config{Owner: "billing"}, onceqcron.Schedule{
//		Name: "nightly-report", Spec: "0 2 * * *", Zone: "Europe/Berlin",
//		Job:  Report.Job(ReportArgs{}),
//	})
//	err = cron.Register(ctx)  // at the start, after the migrations
//	w, err := onceq.NewWorker(q, cfg, append(cron.Handlers(), Report.HandleTx(report))...)
//
// A schedule is a row, and its next tick is one ordinary delayed job. The handler of that job enqueues the schedule's job,
// notes the tick in a ledger and moves the row and itself to the next tick, all in one transaction. So whatever ends a
// process, a tick is either done or still to be done. Only the database's clock counts. Ten thousand schedules cost nothing
// between their ticks but their rows.
//
// [ScheduledAt] gives a job's handler the scheduled time, which is the time to work with: a tick can be late.
//
// Schedules live in the code, which writes them with [Scheduler.Register], or in the table alone, where [Scheduler.Put]
// writes them while the application runs. [Scheduler.List] and [Scheduler.Ticks] show all of them and what became of their
// ticks.
package onceqcron
