package stmt

import "github.com/onceq/onceq/internal/table"

// These call functions of the schema.
const (
	PauseIt = `
select 1 from onceq.pause($1::text, $2::text, $3::timestamptz, $4::bigint, $5::text, $6::bool) f`
	ResumeIt = `select f from onceq.resume($1::text, $2::text) f`
)

// claimedOf is for the pauses that keep workers from claiming: those of queues and kinds.
const claimedOf = `what <> 'limit' and ` + table.InForce

// ReadPauses is small, and most often it returns no rows.
const ReadPauses = `select what, name from onceq.pauses where ` + claimedOf
