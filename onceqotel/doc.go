// Package onceqotel gives onceq's jobs OpenTelemetry traces and metrics.
//
//	tel, err := onceqotel.New(onceqotel.Config{})          // the global providers
//	q, err := onceq.New(pool, tel.Config(nil))             // producer spans, metrics
//	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
//		tel.Handlers(welcome.Handle(send), bill.HandleTx(charge))...) // consumer spans
//	_, err = tel.Watch(q)                                  // queues, workers, limits, pauses, findings
//
// # Traces
//
// Enqueue and EnqueueMany make a span of kind producer, "send <queue>". Its context travels in the job's metadata as
// the propagator writes it: traceparent and tracestate of the W3C. The metadata does not count when two payloads are
// compared. Each attempt makes a span of kind consumer, "process <queue>", with a link to the producer span. It is not
// a child of that span, because attempts may come days later and each trace should end. The span of a batch has one
// link for each job. If the propagator carries baggage, the handler's context has it, except for a batch.
//
// What happens becomes an event of the current span: onceq.duplicate and onceq.mismatch while enqueueing;
// onceq.replayed, onceq.uncertain and onceq.held for effects; onceq.lease_lost in the attempt. If another worker has
// the job by the time the handler returns, the attempt's outcome is refused. That makes a span "settle <queue>" below
// the attempt's, with the status Error.
//
// Attributes are those of OpenTelemetry's semantic conventions for messaging, version 1.43.0 (in development there):
// messaging.system (onceq), messaging.destination.name (the queue), messaging.operation.type and .name,
// messaging.message.id (the job's id), messaging.batch.message_count and error.type. onceq adds onceq.kind,
// onceq.attempt, onceq.lost, onceq.token and onceq.effect. error.type says which of onceq's errors it is, or is the
// SQLSTATE of a Postgres error, or a Go type. Payloads, keys and scopes are not recorded. Texts of onceq's own errors
// ("onceq: …") may contain them, so an error with such a text is recorded with its error.type alone. The text of other
// errors that handlers return is recorded.
//
// An attempt's span ends when the handler returns. If its transaction cannot be committed afterwards, that makes a span
// "settle <queue>" as well. A loop of your own around Queue.Claim begins the same span with Telemetry.Start.
//
// # Metrics
//
// Jobs are counted when their statement has run. In the application's transaction that is before its end, so jobs that
// are rolled back afterwards were counted. Jobs of EnqueueInBatch are counted when Pending.Result is called.
// Completions through CompleteInBatch, accepted or refused, are counted when the batch's results are closed. They are
// not counted if the application reads that result itself with BatchResults.Exec. In a worker, run time begins with the
// handler; in a loop around Queue.Claim it begins with the claim.
//
// Counters have the attributes onceq.queue and onceq.kind, or those that are named here, and no metric has a key, a scope or an
// id. If queues or kinds can come from outside, the SDK's cardinality limit bounds what is reported: 2,000 for each metric by
// default.
//
//	onceq.jobs.enqueued          counter    accepted; the transaction may still roll back
//	onceq.jobs.duplicates        counter    the key was taken: nothing to do
//	onceq.jobs.mismatches        counter    the key was taken with another payload
//	onceq.jobs.completed         counter
//	onceq.jobs.failed            counter    failed attempts of jobs that run again
//	onceq.jobs.deferred          counter    put off by an error that spends no attempt: no transaction could be opened
//	onceq.jobs.snoozed           counter    put off without having failed: Snooze, Reschedule, another run's effect in flight
//	onceq.jobs.released          counter    given back as if not claimed: Release, a worker's shutdown
//	onceq.jobs.dead              counter
//	onceq.jobs.cancelled         counter
//	onceq.jobs.held              counter    jobs, and work outside of jobs, that wait for a person; by queue
//	onceq.leases.lost            counter    a holder learned that its lease is gone; by queue
//	onceq.completions.refused    counter    stale: under a token that is no longer valid; by queue
//	onceq.effects.replayed       counter    a stored outcome instead of running again
//	onceq.effects.uncertain      counter    it is not known whether it happened
//	onceq.rows.reaped            counter    by onceq.rows, the type of rows
//	onceq.background.errors      counter    by onceq.work: claim, look, rescan, promote, extend, finish, announce, listen, presence, count, reap
//	onceq.job.wait.duration      histogram  seconds from due to claimed, by the database's clock; by queue and onceq.reason. Its count is the jobs claimed
//	onceq.job.run.duration       histogram  seconds in the handler, however it ended; by kind. Each job of a batch has those of the batch
//	onceq.queue.depth            gauge      jobs by onceq.queue and onceq.state; counted up to 1,000
//	onceq.queue.capped           gauge      1 if a depth of the queue may be too small because counting stopped
//	onceq.queue.oldest.age       gauge      seconds since the oldest job became due that nobody has, by onceq.reason
//	onceq.workers                gauge      live workers that serve a queue
//	onceq.workers.slots          gauge      how many jobs of a queue these can run at once
//	onceq.workers.stale          gauge      workers that were not heard of for three minutes, and did not end
//	onceq.paused.age             gauge      seconds since a queue, a kind or a limit was paused
//	onceq.limit.jobs             gauge      jobs of a limit by onceq.limit and onceq.state (live, waiting, delayed); counted up to 1,000
//	onceq.limit.capacity         gauge      how many of them may be live at once; none for a rate alone
//	onceq.limit.oldest.age       gauge      seconds for which the oldest due job has waited for a limit
//	onceq.health.findings        gauge      what Ops.Health finds, by onceq.finding (Finding.What) and onceq.severe
//
// A job waits from when it is due, whatever holds it. onceq.reason says what it waits for: a worker, its lane, its limit, or
// other jobs ("jobs"). A job that was claimed has the reason for which it waited more than half of the time; if it waited in
// several lines, that is the last of them. A tick of a schedule is a job of the queue onceqcron, so the age and the wait of that queue
// say how late ticks are.
//
// The states of onceq.queue.depth are waiting, delayed, claimed_ahead, running, retrying, blocked (by a lane, a limit or other
// jobs), dead and held. No job counts in two of them. Of limits the first 50 are reported, by name. What would be zero is not
// reported, except the waiting jobs of a queue, its workers and their slots, the capacity of a limit, and the stale workers:
// if onceq.workers.stale is not there, no process watches.
//
// A collection reads what Stats, Workers, Pauses and Limits of onceqops.Ops read, at most once in five seconds, and what Health
// reads, at most once a minute. Each reads a bounded number of rows whatever the depth: of a queue some 1,000 for each priority,
// and 1,001 that are blocked.
//
// With Config.Conventions the metrics of the semantic conventions are reported as well, which mostly say the same again, with
// messaging.system, messaging.operation.name, messaging.destination.name (the queue) and error.type:
//
//	messaging.client.sent.messages        counter    jobs passed to Enqueue and its variants, duplicates too
//	messaging.client.consumed.messages    counter    jobs claimed
//	messaging.client.operation.duration   histogram  seconds in Enqueue and EnqueueMany; claims and completions are not timed
//	messaging.process.duration            histogram  seconds in a handler, or from Start to end; a batch counts once
//
// An EnqueueMany to several queues is timed without the destination. EnqueueInBatch is counted but not timed. Jobs that
// are refused with an InvalidError before anything is sent are timed but not counted.
//
// The counters of dead and held jobs, lost leases and uncertain effects are reported from zero, not from their first event:
// Prometheus's increase() does not see the event with which a counter begins, and the first dead job is the one you want to be
// told of. For kinds whose handlers go through Handlers, and their queues, they begin there; of others with the first event of any
// type. The other counters begin with their first event.
//
// Prometheus's exporter writes a dot as an underscore and adds the unit and "total": onceq_jobs_enqueued_total,
// onceq_job_wait_duration_seconds_bucket. The file dashboard.json is a Grafana dashboard of these metrics, and alerts.yaml has
// alert rules. The gauges describe the database, so each process that watches reports the same: take max, not sum.
package onceqotel
