package stmt

import "github.com/onceq/onceq/internal/table"

const KeepDoubt = `
update onceq.job_fences f set leased_until = statement_timestamp()
 where f.class = $1::smallint and f.scope = $2::text and f.key = $3::text and f.token = $4::bigint
   and ` + table.FenceUnknown + ` and f.leased_until < statement_timestamp()
returning f.token`

// ResolveFence calls resolve_fence, whose comment says what it does.
const ResolveFence = `select f from onceq.resolve_fence($1::smallint, $2::text, $3::text, $4::smallint, $5::text, $6::bigint) f`
