package onceq

// The states of a fence, as job_fences.state has them. A row that is not there is absent.
type fenceState int16

const (
	fenceQueued    fenceState = iota // a job waits for it, or works under it: jobs says which
	fenceClaimed                     // taken outside of jobs, under token and holder, until leased_until
	fenceUncertain                   // intent recorded, outcome unknown
	fenceCompleted                   // outcome in result
	fenceDead                        // its job is dead
	fenceCancelled                   // its job was cancelled
	fenceHeld                        // waits for a person
)

// fenceFree is the one place that says when a fence f that is still there counts as free, in each lifetime:
//
//	state                    until finished   window               for ever
//	queued, claimed          taken            taken                taken
//	uncertain, held          taken            taken                taken
//	completed, cancelled     free             free after window    taken
//	dead                     free             free after window    taken
//
// A claimed fence whose lease ran out is not free: its outcome is uncertain (replay.go).
const fenceFree = `(f.state in (3, 4, 5) and f.lifetime >= 0
      and f.finished_at + f.lifetime * interval '1 millisecond' <= statement_timestamp())`

// jobState gives a live job j's State, null where there is none.
const jobState = `case when j.id is null then null
            when j.leased_until > statement_timestamp() then 3
            when j.attempts > 0 or j.lost > 0 or j.leased_until is not null then 4
            when j.run_at > statement_timestamp() then 2
            else 1 end::smallint`

// job gives the State of the job that a fence belongs to; live is jobState's answer.
func (s fenceState) job(live *int16) State {
	switch s {
	case fenceCompleted:
		return Completed
	case fenceDead:
		return Dead
	case fenceCancelled:
		return Cancelled
	case fenceHeld, fenceUncertain:
		return Held
	}
	if live == nil {
		return 0
	}
	return State(*live)
}
