package stmt

import (
	"fmt"

	"github.com/onceq/onceq/internal/table"
)

// ReadJob reads job $1, with its content if $2 says so, and only if it has scope $3 and key $4 unless these
// are null: after the sequence was set back, a later job may have the id. It also reads who has the job,
// since when somebody wants it cancelled, and for what it waits in an Await or a Sleep, and of a live one its
// time-out.
var ReadJob = func() string {
	live, waiting, past := table.JobColumns(`$2::bool`)
	where := func(alias string) string {
		return fmt.Sprintf(`
         where %[1]s.id = $1::bigint and ($3::text is null or %[1]s.scope = $3::text and %[1]s.key = $4::text)`, alias)
	}
	return `
select i.*, j.holder, coalesce(j.ahead, false), coalesce(j.timeout, ''), c.requested_at,
       coalesce(a.scope, ''), coalesce(a.key, ''), a.until, statement_timestamp()
  from (select ` + live + ` from onceq.jobs j` + where("j") + `
         union all
        select ` + waiting + ` from onceq.job_waits w` + where("w") + `
         union all
        select ` + past + ` from onceq.job_history h` + where("h") + `) i
  left join lateral (
       select holder, ahead, metadata ->> '` + table.TimeoutMember + `'::text as timeout from onceq.jobs where id = i.id offset 0) j on true
  left join lateral (select requested_at from onceq.job_cancels where job_id = i.id and requested_at >= i.created_at offset 0) c on true
  left join lateral (
       select scope, key, until from onceq.job_awaits
        where job_id = i.id and claims = i.claims and state = ` + table.AwaitOpen + ` order by until limit 1) a on true`
}()
