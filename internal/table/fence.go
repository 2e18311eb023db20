package table

import "fmt"

// FenceState is the state of a fence, as job_fences.state stores it. A key without a row is free.
type FenceState int16

// The states of a fence.
const (
	FenceQueued    FenceState = iota // a job that waits or runs has the key; the row in jobs says which
	FenceClaimed                     // taken by a claim, under token and holder, until leased_until
	FenceUncertain                   // intent recorded, outcome unknown
	FenceCompleted                   // the outcome is in result
	FenceDead                        // its job is dead
	FenceCancelled                   // its job was cancelled; for other fences: released, nothing was applied
	FenceHeld                        // waits for a person
)

// Job gives the state of the job that a fence belongs to; live is JobState's answer.
func (s FenceState) Job(live *int16) State {
	switch s {
	case FenceCompleted:
		return StateCompleted
	case FenceDead:
		return StateDead
	case FenceCancelled:
		return StateCancelled
	case FenceHeld, FenceUncertain:
		return StateHeld
	}
	return State(OrZero(live))
}

// FenceFree says when a fence f that still exists counts as free, by its state and lifetime:
//
//	state                    until finished   window               for ever
//	queued, claimed          taken            taken                taken
//	uncertain, held          taken            taken                taken
//	completed, dead          free             free after window    taken
//	cancelled                free             free after window    taken
//	cancelled, never claimed free             free                 free
//
// A job was never claimed if its fence's token counts no claim. No worker had a token for the work then, so
// nothing of it can have happened, and who cancels such a job and enqueues its key again means a new one. The
// fence keeps its lifetime and its fingerprint for a Redrive. If the key is to stay taken (Filter.KeepKeys),
// or if nobody knows whether the job was claimed (reapOrphans), the token counts one claim.
//
// A claimed fence whose lease has run out is not free: its outcome is uncertain (internal/fence). A released
// fence is cancelled and has lifetime 0, whatever its window was: it is free at once. The row stays until the
// key is taken again or the Reaper removes it. With lifetime 0 no clock is asked: it may have been set back
// since the work was finished.
//
// Some other places repeat a part of this and must agree with it: take_fence and claim_fence in the migration
// (a test compares them); fencePast, which adds the Reaper's grace time, and lets the fence of a job that was
// never claimed stay for its window, for a Redrive; v_keys and Keys, which say when a key is free;
// Fence.read, because a completed effect is not free while its job may run; and Fence.judge, which takes a
// cancelled fence for free at once.
//
// A client's key (class 2) that is uncertain or held also ends, because otherwise anybody who can cause an
// error could grow the table. The Reaper removes it when nobody has asked for it for unknownFor, or for its
// window if that is longer. It never counts as free. leased_until says when somebody last asked, to within
// notedEvery: it is the end of the last claim, or the time of keepDoubt.
//
// An effect's fence (class 3: scope the job's queue, key "<job id>/<name>", job_id the job's, fingerprint
// effectMark) lives as long as its job and its identity. Completing a job does not touch it. Its finished_at
// therefore stays null, which never counts as free, while the job may run again. The Reaper sets finished_at
// when it first sees that the job is neither in jobs nor dead, cancelled or held in job_history. From then on
// the table above applies, and it applies to an unknown outcome too.
const FenceFree = FenceFreeAt + `statement_timestamp()` + OrNeverClaimed

// FenceFreeAt and OrNeverClaimed are for around a time. A timestamptz with an interval depends on the
// session's time zone, and a timestamp does not: Citus writes nothing by such a condition.
const (
	FenceFreeAt = `(` + FenceOver + ` and f.lifetime >= 0
      and (f.lifetime = 0 and f.finished_at is not null
           or pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.finished_at) + f.lifetime::float8 * interval '1 millisecond') <= `
	OrNeverClaimed = `)
      or ` + NeverClaimed + `)`
)

// NeverClaimed says that f is the fence of a job that was cancelled before any claim had it.
const NeverClaimed = `f.class = ` + OfJob + ` and f.state = ` + Cancelled + ` and f.token = f.token >> ` + TokenBitsSQL + ` << ` + TokenBitsSQL

// IdentityOf is the identity of the job in the row j: by default when it was created, in UTC, because Citus
// writes nothing by what depends on a time zone.
func IdentityOf(j string) string {
	return `coalesce(` + j + `.identity, (extract(epoch from pg_catalog.timezone('UTC', ` + j + `.created_at)) * 1e6)::bigint)`
}

// OfRound says that the effect f belongs to the present round of the job in the row j. An effect without a
// mark does.
func OfRound(j string) string {
	return `coalesce(f.fingerprint = pg_catalog.int8send(` + IdentityOf(j) + `), true)`
}

// EffectsOf says that f is an effect of the job in the row j, or of another job that had its id.
func EffectsOf(j string) string {
	return fmt.Sprintf(`f.class = `+OfEffect+` and f.scope = %[1]s.queue and f.key >= %[1]s.id::text collate "C" || '/' and f.key < %[1]s.id::text collate "C" || '0'`, j)
}

// What several statements say about a fence f.
const (
	FenceOver    = `f.state in (` + Completed + `, ` + Dead + `, ` + Cancelled + `)` // finished, and nobody has to decide
	FenceUnknown = `f.state in (` + Claimed + `, ` + Uncertain + `, ` + Held + `)`   // its outcome is unknown, or may become so
)

// InDoubt says that the outcome of the fence f is unknown and not yet decided.
const InDoubt = `(f.state = ` + Uncertain + ` or f.state = ` + Claimed + ` and f.leased_until <= statement_timestamp())`
