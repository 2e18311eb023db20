// Package onceqops is what people do to jobs: look for them, ask why one does not run, ask what slows a queue
// down, and bring back, cancel, move or discard many. The page (onceqweb), the command (cmd/onceq) and the
// metrics (onceqotel) are made of it, and so are tools of your own. Applications that enqueue and handle jobs
// need only the package onceq.
//
//	ops := onceqops.New(q) // q is a *onceq.Queue
//
//	found, err := ops.Health(ctx)               // what slows the queues down, and what to do about it
//	e, err := ops.Explain(ctx, pool, 42)        // why job 42 does not run
//	jobs, err := ops.List(ctx, pool, onceqops.Filter{Queue: "mail", States: []onceq.State{onceq.StateDead}})
//	n, taken, err := ops.RedriveMany(ctx, pool, onceqops.Filter{Queue: "mail"}) // runs the dead ones again
//
// # What to look at
//
//   - jobs: List, Page, Count; Explain for one
//   - queues: Stats, and Counts for rates over time; Pauses; Health for all that is wrong
//   - what jobs wait for: Lanes, Limits, Limit, Groups, GroupsOf, Members
//   - keys and effects: Keys, Effects, Doubts
//   - workers: Workers
//   - what people did: Actions; RecordAction adds a line
//
// # What to do
//
// Retry, Redrive, Move and Discard are for one job, and Cancel of package onceq. RetryMany, RedriveMany,
// MoveMany, DiscardMany and CancelMany choose jobs by a Filter; WouldRetry and so on say first which these
// are. Resolve and ResolveMany settle effects of which nobody knows whether they happened. CancelGroup ends a
// group. CheckPayloads says before a deploy which jobs its handlers could not decode.
//
// Every call takes a context and, with few exceptions, a handle (onceq.DB): a pool, or a transaction, in
// which all that the call does commits and rolls back with it. Bad input is an *onceq.InvalidError before
// anything is sent. Reading locks nothing and reads few rows; each method says what it reads.
package onceqops
