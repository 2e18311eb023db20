package pg

import "time"

// How long things may take: long enough where all is well, and short beside a lease.
const (
	BriefWait    = time.Second      // for a connection, or a lock, that somebody else has
	EndWithin    = 5 * time.Second  // what is rolled back, and what Run withdraws at its end
	AnswerWithin = 10 * time.Second // a new connection, or a message and its answer
	SessionLimit = 30 * time.Second // a statement on the session; less if its context ends earlier
	silentAfter  = 2 * time.Second  // then a new connection asks what the server does; a pooler has dropped a notification
	ownIdle      = 20 * time.Second // a connection that is not used closes
	ownOutcomes  = 2                // connections: two batches of outcomes are written at once
)
