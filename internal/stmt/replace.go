package stmt

// ReplaceJobs changes jobs that no claim has had, and the fingerprints of their fences; not those that
// somebody has asked to cancel, or, if only its time is to change, that have another payload by now than was
// read. It waits for a claim that is under way, and leaves the job alone if that has taken it. A job that is
// due and stays so keeps its place. It returns the ids of the jobs that it changed, whether they are delayed,
// and the ids of those that keep their keys and start after the caller's commit.
const ReplaceJobs = `
select c.replaced, c.delayed, c.kept
  from onceq.replace_jobs($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::bytea[], $8::smallint[], $9::bigint[], $10::bigint[], $11::text[], $12::bytea[]) c`
