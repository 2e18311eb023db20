// Package onceq is a job queue that an application runs inside the Postgres database it already has. Its point is that work
// happens once: a job is accepted once per key, its effects are committed once, and a duplicate gets the first answer.
//
//	pool, err := pgxpool.New(ctx, url)
//	q, err := onceq.New(pool, nil)
//
//	var Welcome = onceq.Kind[WelcomeMail]{
//		Name: "welcome",
//		Key:  func(m WelcomeMail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
//	}
//
//	// In the transaction that stores the user:
//	res, err := q.Enqueue(ctx, tx, Welcome.Job(WelcomeMail{UserID: 42}))
//
//	// In a worker:
//	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, Welcome.Handle(send))
//	err = w.Run(ctx)
//
//	// In the handler, around a call that must not happen twice:
//	id, err := onceq.Once(ctx, lease, "send", func(ctx context.Context, key string) (string, error) {
//		return provider.Send(ctx, mail, key)
//	})
//
// What people do to jobs, as listing them, asking why one does not run and running dead ones again, is in package onceqops:
// Ops.Redrive, for example, is a method of its type Ops. Guides, and programs by task, are in the repository: docs/README.md.
//
// # Glossary
//
//   - Job: one unit of work. It has a kind, a payload, a queue, and may have a key.
//   - Key: the name of a unit of work. It is accepted once within its scope.
//   - Scope: the space in which a key is unique. For jobs it is the kind's name, unless the application names another: a
//     tenant, a workspace.
//   - Fence: the row that says that a key is taken, who holds it under which token, and what the outcome is.
//   - Lease: the right to work on a job, or on a fence, until a time.
//   - Token: the number that a claim gets. For the same work it only grows, so that an earlier holder can be told from the
//     current one.
//   - Effect: a call to something outside the database, which a job makes through Once and under a name.
//   - Event: what a handler waits for with Await, and what Emit says once. It has a scope, a key and a payload. The events that a
//     Hook gets (EventType) are others: they say what the library did.
//   - Lane: a line of jobs of which one at a time is live, in order, unless SetLaneLimit says otherwise. The others wait.
//   - Limit: how many jobs of any lanes and kinds are live at once, how many start in a time, or both.
//   - Window: how long a key stays taken after its work is finished. Work that was cancelled before it started has none.
//   - Attempt: one try to do a job. A handler's error spends an attempt; when MaxAttempts are spent the job is dead. A lost
//     lease and a Snooze spend none.
//   - Lost lease: a lease that ran out before its holder had finished. It counts against MaxLost, until
//     a run comes to its end. The first one may be charged to a job that was merely about to start (Kind.MaxLost).
//
// # What it promises
//
//  1. One key, one job. Within its lifetime a key is accepted at most once: across producers, processes, restarts, delays,
//     batches and isolation levels.
//  2. Enqueue belongs to the caller's transaction. At READ COMMITTED a duplicate never aborts it. Above that level Postgres
//     may answer 40001, and two transactions that take keys in opposite orders may get 40P01, as may two that take
//     expired ones among others. Both errors are returned to the caller, and IsRetryable recognises them.
//  3. A truthful answer. A duplicate gets the first job's id, its state and, when it is finished, its result. The same key
//     with another payload, or from another kind, is a *MismatchError and is never dropped silently.
//  4. One holder. A claim gives a lease with a token. Every operation under an outdated token is refused with ErrLeaseLost.
//  5. Effects once. Writes made through a handler's transaction commit together with the job's completion or not at all. A
//     worker that was taken for dead and then wakes up commits nothing through its lease. Who completes a job by hand, in a
//     transaction of the application's, has to let a refusal end that transaction: see Lease.Complete.
//  6. Honest about the outside world. Once commits the intent before an effect and the outcome after it, and replays the
//     outcome on the next run. If nobody knows whether the effect happened, it is uncertain, and a policy that you declare
//     decides: run it again under the same idempotency key while the provider remembers that key, ask the provider, or hold
//     it for a person.
//  7. Nothing is lost. Every accepted job ends as completed, cancelled or dead, and dead jobs stay until somebody decides.
//  8. Pruning is safe. Reapers may run anywhere, any number at once, and never free a key that is live or inside its
//     window.
//
// # What it does not promise
//
// Order across queues, or between jobs that several workers run at once, unless they share a lane (Kind.Lane). Exactly one
// effect outside the database, if the provider neither deduplicates nor can be asked. onceq is not a workflow engine.
//
// Promises 6 and 7 hold only as far as COMMIT is durable. With synchronous_commit off, or after a failover to an
// asynchronous standby, Postgres may forget the latest commits, and a sequence its latest values. Three things remain true
// then. Two holders are never mistaken for each other, because each claim also draws a random number. A key that is taken
// again gets a larger token than its fence has ever stored. The idempotency keys of different jobs differ even if the jobs
// have the same id, because the time of a job's creation is part of its keys.
//
// # Whose clock counts
//
// The database's clock decides everything: when a job is due, when a lease ends, when a window is over. A worker's own
// clock can only make it give up early: it does so when it could not extend a lease for the whole length of that lease.
//
// A job is due from the moment of its Enqueue statement (statement_timestamp(), not the start of its transaction), or when
// RunAt or Delay says. A window counts from the statement that completes the job.
//
// A clock that was ahead for a while makes what it dated look younger than it is, once it is right again. Windows then last that much
// longer, which harms nobody. RunAgain would go on for that much longer too, so work whose first intent lies more than a minute
// ahead is held. If nobody asks for the work before that time has passed, nothing shows that the clock was wrong: RunAgain then
// counts from it. Let RunAgain end earlier than the provider forgets, by as much as your clocks can err.
//
// # Keys
//
// A key is unique within a scope and a class. There are five classes: jobs, effects of jobs (Once), events (Emit), and two
// of the application's own (Do, Fence: see Class). Keys of different classes never collide. A job's default scope is its
// kind's name. So a kind may move to another queue while keys of it are taken, but must not be renamed. See Lease for
// tokens, FenceSpec for fences, Policy for uncertain outcomes.
//
// # Copies of the database
//
// A restored copy has the id of the original installation and therefore the same idempotency keys: a provider would take
// the copy's calls for repetitions of the original's. Before you start a worker on a copy, call three methods: Queue.Check,
// which says whether the sequence of ids was restored as well; Queue.NewInstallation; and Queue.Cancel, for the live jobs
// that only the original should run.
//
// # Which locks are taken, and in which order
//
// Rows of jobs or job_history are locked first, in the order of their ids, then rows of job_fences, in the order of scope and key.
// docs/work/architecture.md has the exceptions. What a caller meets:
//
//   - Enqueue waits while another transaction is open that took the same key, or that completes, cancels, replaces, redrives or
//     discards its job.
//   - Enqueue locks few existing rows: an expired fence that it takes over; with Job.Replace the job that it changes and that
//     job's fence; with Job.After those of the other jobs that nobody has locked.
//   - EnqueueMany takes keys in their order, but expired ones after those that are absent: in each call, and of more than
//     2,000 jobs in each part of that size.
//   - CancelMany, RedriveMany, DiscardMany and ResolveMany (onceqops) keep to the order for all of their jobs.
//   - Claims, extensions and the Reaper skip locked rows; Lease.Lock and what ends an attempt wait for them. An
//     extension conflicts with a handler's own transaction above READ COMMITTED: see Lease.Lock.
//   - Workers that claim from the same backlog take turns, by an advisory lock for each queue. A claim waits for it at most a second,
//     and then does without. onceqcron has an advisory lock for the name of a schedule while its row is made.
//   - Who writes the same fence, event, limit or pause, or cancels the same held job, waits for the first.
//
// There are no other advisory locks outside migrations, no table locks, no session state but a worker's LISTEN.
//
// # What it costs
//
// Enqueueing up to 2,000 jobs is one statement and one round trip. EnqueueMany of jobs with keys outside a transaction takes
// three, because it begins and commits one. A job that is added to the caller's own batch costs no round trip.
// Claiming up to 2,000 jobs is one statement, and so is completing as many. A handler's transaction costs one round trip in
// addition to what the handler does: it opens together with the handler's first statement, if that has arguments.
//
// Where the ideas come from: leases and fencing tokens, Gray and Cheriton, "Leases: an efficient fault-tolerant mechanism
// for distributed file cache consistency" (1989), and Kleppmann, "How to do distributed locking" (2016); completion in the
// application's own transaction, Helland, "Life beyond distributed transactions" (2007); idempotency keys and fingerprints,
// draft-ietf-httpapi-idempotency-key-header.
package onceq
