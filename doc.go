// Package onceq is a job queue that an application runs inside the Postgres database it already has, and whose
// point is that work happens once: a job is accepted once per key, its effects are committed once, and
// whoever asks again gets the first answer.
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
// # What it promises
//
//  1. One key, one job. Within its lifetime a key is accepted at most once: across producers, processes,
//     restarts, delays, batches and isolation levels.
//  2. Enqueue belongs to the caller's transaction. At READ COMMITTED a duplicate never aborts it. Above that
//     Postgres may answer 40001, and two transactions that take keys in opposite orders may get 40P01; both
//     are passed on, and IsRetryable recognises them.
//  3. A truthful answer. A duplicate gets the first job's id, state and, when finished, its result. The same
//     key with another payload or of another kind is a *MismatchError, never a silent drop.
//  4. One holder. A claim gives a lease with a fencing token that only ever grows for that work. Every
//     operation under a token that no longer holds is refused with ErrLeaseLost.
//  5. Effects once. Writes made through a handler's transaction commit together with the job's completion or
//     not at all. A worker that was taken for dead and wakes up commits nothing through its lease.
//  6. Honest about the outside world. Once commits the intent before an effect and the outcome after it, and
//     replays the outcome on the next run. Where it is not known whether the effect happened, it is uncertain,
//     and a declared policy decides: run again under the same idempotency key while the provider remembers
//     it, ask the provider, or hold for a person.
//  7. Nothing is lost. Everything accepted ends as completed, cancelled or dead, and dead jobs stay until
//     somebody decides.
//  8. Pruning is safe. Reapers may run anywhere, any number at once, and never free a key that is live or
//     inside its window.
//
// # What it does not promise
//
// Order across queues, or between jobs that several workers run at once. Exactly-once effects outside of the
// database with a provider that neither deduplicates nor can be asked. A workflow engine.
//
// Promises 6 and 7 hold as far as COMMIT is durable. With synchronous_commit off, or after a failover to an
// asynchronous standby, Postgres may forget the latest commits, and a sequence its latest values. What remains
// true then: two holders never share a guard, because it contains a random number of the claim; a key that is
// taken again gets a larger token than its fence has ever stored; idempotency keys of different jobs differ
// even where an id is given out twice, because they contain the job's time of creation.
//
// # Whose clock counts
//
// The database's, for everything that decides: when a job is due, when a lease ends, when a window is over. A
// worker's own clock only ever makes it give up early: when no extension came through for a whole lease.
//
// A job is due from the moment of its Enqueue statement (statement_timestamp(), not the start of its
// transaction), or as RunAt or Delay say. A window counts from the completing statement.
//
// # Names
//
// A key names one unit of work within a scope and a class: jobs, effects of jobs (Once), and the
// application's own two (Do, Fence) never collide. A job's scope is its kind's name unless the application names another
// (a tenant, a workspace), so a kind may change its queue, and not its name, while its keys are in force. A fence is the row that says that a key is taken, by whom
// under which token, and what came out. See Lease for tokens, FenceSpec for fences, Policy for uncertain
// outcomes.
//
// # Copies of the database
//
// A restored copy has the installation's id, and so the idempotency keys of the original: calls of staging would pass at
// a provider for repetitions of production's. Before a worker starts in a copy: Queue.Check, which says whether the
// sequence of ids came along; Queue.NewInstallation; and Cancel of the live jobs that only the original is to do.
//
// # Which locks are taken, and in which order
//
// Rows of jobs or job_history by id, then those of job_fences: Enqueue takes keys in the order of scope and key, a
// completion takes its jobs' own, which nobody else changes. A claim, a beat and the reaper skip what is
// locked; completions wait for it. A beat changes the job's row, which is in the way of a handler's own transaction above READ
// COMMITTED: see Lease.Lock. Enqueue locks nothing that exists but an expired fence that it takes over;
// it waits while another transaction is open that took the same key or completes its job. No advisory locks outside of
// migrations, no table locks, no session state but an optional LISTEN connection for each worker.
//
// # What it costs
//
// One round trip to enqueue any number of jobs up to 2,000, none when added to the caller's own batch. One
// statement for a claim of up to 2,000 jobs, one for as many completions. A handler's transaction is one round
// trip beyond what the handler does: it opens together with the handler's first statement, where that has arguments.
//
// Where the ideas come from: leases and fencing tokens, Gray and Cheriton, "Leases: an efficient
// fault-tolerant mechanism for distributed file cache consistency" (1989), and Kleppmann, "How to do
// distributed locking" (2016); completion in the application's own transaction, Helland, "Life beyond
// distributed transactions" (2007); idempotency keys and fingerprints, draft-ietf-httpapi-idempotency-key-header.
package onceq
