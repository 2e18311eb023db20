// Package onceqotel gives onceq's jobs OpenTelemetry traces and metrics.
//
//	tel, err := onceqotel.New(onceqotel.Config{})          // the global providers
//	q, err := onceq.New(pool, tel.Config(nil))             // producer spans, metrics
//	w, err := onceq.NewWorker(q, onceq.WorkerConfig{},
//		tel.Handlers(welcome.Handle(send), bill.HandleTx(charge))...) // consumer spans
//	_, err = tel.Watch(q)                                  // depth and age of the queues
//
// # Traces
//
// Enqueue and EnqueueMany are a span of kind producer, "send <queue>", whose context travels in the job's metadata as
// the propagator writes it: traceparent and tracestate of the W3C. It is not part of what makes two payloads the same.
// Each attempt is a span of kind consumer, "process <queue>", linked to it; it is no child of it, because attempts may
// come days later and each trace is to end. A span around a batch has one link for each job. Baggage
// that the propagator carries is there in the handler's context, except in a batch's.
//
// What happens becomes an event of the span in which it does: onceq.duplicate and onceq.mismatch while enqueueing,
// onceq.replayed, onceq.uncertain and onceq.held of effects, onceq.lease_lost in the attempt. Where an attempt's outcome
// is refused after its handler has returned, because somebody else has the job by then, there is a span
// "settle <queue>" below the attempt's, with the status Error.
//
// Attributes are those of OpenTelemetry's semantic conventions for messaging, version 1.43.0 (in development there):
// messaging.system (onceq), messaging.destination.name (the queue), messaging.operation.type and .name,
// messaging.message.id (the job's id), messaging.batch.message_count, error.type. Beside them stand onceq.kind,
// onceq.attempt, onceq.lost, onceq.token and onceq.effect. error.type says which of onceq's errors it is, or the SQLSTATE
// of Postgres's, or a Go type. Neither payloads nor keys nor scopes are recorded: of an error in whose text onceq's own
// stands ("onceq: …"), which may name them, error.type alone. The text of other errors that handlers return is recorded.
//
// An attempt's span ends when the handler returns. Where its transaction cannot be committed afterwards there is a span
// "settle <queue>" as well. Those who drive the loop themselves with Queue.Claim begin the same span with Telemetry.Start.
//
// # Metrics
//
// Jobs are counted when their statement has run, in a transaction of the application's before its end: one that rolls back
// afterwards was counted. Those of EnqueueInBatch are counted when Pending.Result is asked; those completed, or refused,
// through CompleteInBatch when the batch's results are closed, and not at all where the application reads that result by
// itself with BatchResults.Exec. Their run time, as that of all which a loop around Queue.Claim finishes, begins with the
// claim; in a worker it begins with the handler.
//
// All have the attributes onceq.queue and onceq.kind where they apply, and never a key, a scope or an id. Where both may come
// from outside, the SDK's cardinality limit bounds what is reported: 2,000 of each metric, by default.
//
//	onceq.jobs.enqueued          counter    accepted; the transaction may still roll back
//	onceq.jobs.duplicates        counter    keys that were taken: nothing to do
//	onceq.jobs.mismatches        counter    keys that were taken with another payload
//	onceq.jobs.claimed           counter
//	onceq.jobs.completed         counter
//	onceq.jobs.failed            counter    attempts that failed, of jobs that run again
//	onceq.jobs.deferred          counter    put off by an error that spends no attempt: no transaction could be opened
//	onceq.jobs.snoozed           counter    put off without having failed: Snooze, Reschedule, another run's effect in flight
//	onceq.jobs.released          counter    given back as if not claimed: Release, a worker that ends
//	onceq.jobs.dead              counter
//	onceq.jobs.cancelled         counter
//	onceq.jobs.held              counter    jobs, and work outside of jobs, that wait for a person
//	onceq.leases.lost            counter    a holder learned that its lease is gone
//	onceq.completions.refused    counter    stale: under a token that held no longer
//	onceq.effects.replayed       counter    a stored outcome in place of running again
//	onceq.effects.uncertain      counter    it is not known whether it happened
//	onceq.rows.reaped            counter    by onceq.rows, the sort of rows
//	onceq.background.errors      counter    by onceq.work: claim, rescan, extend, finish, announce, next_due, listen, reap
//	onceq.job.wait.duration      histogram  seconds from due to claimed, by the database's clock
//	onceq.job.run.duration       histogram  seconds in the handler, by onceq.outcome
//	onceq.queue.depth            gauge      jobs by onceq.queue and onceq.state; counted up to 10,000
//	onceq.queue.oldest.age       gauge      seconds that the oldest job has been due that nobody has
//
// The conventions' own stand beside them, with messaging.system, messaging.operation.name, messaging.destination.name (the
// queue) and error.type:
//
//	messaging.client.sent.messages        counter    jobs that Enqueue and its kin were called with, duplicates too
//	messaging.client.consumed.messages    counter    jobs claimed
//	messaging.client.operation.duration   histogram  seconds in Enqueue and EnqueueMany; claims and completions are not timed
//	messaging.process.duration            histogram  seconds in a handler, or between Start and its end; a batch is one
//
// An EnqueueMany to several queues is timed without the destination. What EnqueueInBatch sends is counted and not timed.
// Jobs that are refused before anything is sent, with an InvalidError, are timed and not counted.
//
// A counter begins with zero, not with its first event: Prometheus's increase() does not see the event with which a counter
// begins, and the first dead job is the one to hear of. Those of the kinds whose handlers go through Handlers begin there,
// for the kind's queue; those of other kinds and queues with the first event of any type.
//
// Prometheus's exporter writes a dot as an underscore and adds the unit and "total": onceq_jobs_enqueued_total,
// onceq_job_wait_duration_seconds_bucket. The file dashboard.json is a Grafana dashboard of these. The gauges are about the
// database: each process that watches reports the same, so take max, not sum.
package onceqotel
