package stmt

import "github.com/onceq/onceq/internal/table"

// SetLimit calls a function of the schema, which removes the limit if $2 is null.
const SetLimit = `
select f from onceq.set_limit($1::text, $2::int, $3::bigint, $4::bigint, $5::int, $6::bool) f`

// LimitsUnset returns those of the limits in $1 that nobody has set, nor their families.
var LimitsUnset = `
select u.name from pg_catalog.unnest($1::text[]) as u(name)
 where not exists (select from onceq.lane_limits s
                    where s.lane = any (array['/' || u.name, ` + table.FamilyOf("('/' || u.name)") + `]) and s.n is not null)
 order by u.name collate "C"`
