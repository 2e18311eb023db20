package pg

import (
	"errors"
	"hash/fnv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/sqlstate"
)

// Claims from a backlog take turns: one worker at a time claims from the queue, in the order in which they
// asked. If several did so at once, each would step over the jobs that the others are just locking, one by
// one. Worse, a claim whose snapshot is older than another's commit locks the jobs which that one took before
// it sees that they are taken, and keeps these locks until it ends; their completions wait for it. 32
// processes lost more than half of their rate in this way, and some of them got nothing.
//
// While workers wait for each other, claims leave behind where they ended, in the table turns, and others
// begin there (claimInTurn). Otherwise each would step over all that the others have claimed since its
// worker's last turn. A worker whose turns come at once needs none of that.
//
// A turn is an advisory lock, which the claim's transaction takes and keeps. That is sent in one message, so
// it ends whatever becomes of the client, unless the client no longer reads an answer that does not fit into
// the connection's buffers. So a worker waits no longer than turnPatience. Then it claims without a turn,
// which nobody needs, and after the second time in a row it goes on in that way for two times overlap.
//
// A worker waits on its spare connection (conns.go), so that the session can be used meanwhile, for one
// queue at a time. It waits only where others claim. Whether they do, the claims in the session find out:
// these take the turn if it is free, and else go without. Where there is no session, as behind a pooler,
// there are no turns: those that wait would use up the pooler's connections. Nor are there any on a server
// with Citus.

// ErrNoTurn says that a claim cannot wait for its turn now.
var ErrNoTurn = errors.New("onceq: the connection for waiting is in use")

// Turn is the turn of a claim.
type Turn struct {
	Key    int64
	Kinds  int64         // names the kinds that are claimed
	Others bool          // others claim there too, as far as is known: the claim waits
	Waited time.Duration // until it came
	Missed bool          // it did not wait, and somebody else had the turn
}

// NewTurn is a turn in a queue. Advisory locks belong to the database, so the key contains the schema.
func NewTurn(schema, queue string, kinds []string) *Turn {
	return &Turn{Key: Hash("onceq turn", schema, queue), Kinds: Hash(kinds...)}
}

// Hash names some texts by one number.
func Hash(parts ...string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(strings.Join(parts, "\x00")))
	return int64(h.Sum64()) // #nosec G115 -- any bits
}

// awaitTurn is sent before a claim, in its transaction, and so the claim's snapshot is younger than the
// commits of those before it. It also returns the database's time when the turn has come, and how long that
// took.
const awaitTurn = `
select pg_catalog.set_config('lock_timeout', '1s', true), pg_catalog.pg_advisory_xact_lock($1::bigint), pg_catalog.set_config('lock_timeout', '0', true),
       clock_timestamp(), (extract(epoch from clock_timestamp() - statement_timestamp()) * 1e6)::bigint`

// takeTurn is awaitTurn for a claim that does not wait.
const takeTurn = `select pg_catalog.pg_try_advisory_xact_lock($1::bigint), statement_timestamp()`

// queue adds one of them to a batch. clock, which may be nil, gets the database's time.
func (t *Turn) queue(batch *pgx.Batch, clock *time.Time) {
	if !t.Others {
		batch.Queue(takeTurn, t.Key).QueryRow(func(r pgx.Row) error {
			var got bool
			var now time.Time
			if err := r.Scan(&got, &now); err != nil {
				return err
			}
			if t.Missed = !got; clock != nil {
				*clock = now
			}
			return nil
		})
		return
	}
	batch.Queue(awaitTurn, t.Key).QueryRow(func(r pgx.Row) error {
		var now time.Time
		var waited int64
		if err := r.Scan(nil, nil, nil, &now, &waited); err != nil {
			return err
		}
		if t.Waited = time.Duration(waited) * time.Microsecond; clock != nil {
			*clock = now
		}
		return nil
	})
}

// NotInTurn reports whether a claim failed because its turn did not come, or because the role may take no
// advisory locks.
func NotInTurn(err error) bool {
	state := sqlstate.Of(err)
	return state == "55P03" || state == "42501"
}

// HasTurns reports whether a claim can have a turn now, and with waits whether it may wait for one: there is
// a session, and the spare connection is free.
func (o *Conns) HasTurns(waits bool) bool {
	stat := o.spare.Stat()
	return o.Session.isOpen() && !(waits && stat.AcquiredConns()+stat.ConstructingConns() > 0)
}
