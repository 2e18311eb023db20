package onceq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/jackc/pgx/v5"
)

// A job that waits for others is a follower, those are its members, and together they are a group, whose id is the
// follower's. There is no counter: job_members has a row for each member, and the statement that ends a member writes its
// state there, together with a row in lane_calls (lane.go). The follower stands in job_waits, alone in a line of its own,
// whose name is a unit separator and its id in 19 digits, so that the order of the names is that of the ids. A promoter that
// finds the call lets it go on if no member is unfinished.
//
// No wake-up is lost, because each end leaves a call. A job that somebody waits for has a bit in its lane_rule, which a claim
// brings along: so the statements that end other jobs do not know of groups. A job that is enqueued with After may wait for
// one that a worker has already claimed without the bit. Its row in job_members is then "not told", and promoters look for
// its end (sweepMembers). All others can be told: whoever wrote the row had the job's row locked, so that it was claimed, or
// otherwise ended, after that.
//
// Two things may not cross: a look that finds all members done, and a Redrive that makes one of them unfinished. Both lock
// the follower's row, and a promoter looks in a later statement than the one that locks. lab/model/groups_test.go explores
// all of this.

// JobRef names a job: by its ID, or by its Scope and Key, both. The scope of a job is its kind's name unless it says otherwise;
// Kind.Ref fills in both from a payload.
type JobRef struct {
	ID         int64
	Scope, Key string
}

func (r JobRef) String() string {
	if r.ID != 0 {
		return fmt.Sprintf("job %d", r.ID)
	}
	return fmt.Sprintf("key %q in scope %q", r.Key, r.Scope)
}

// Ref names the job with the key that the kind derives from a payload, for Job.After. A kind without a Key has none.
func (k *Kind[P]) Ref(payload P) JobRef {
	j := k.Job(payload)
	return JobRef{Scope: cmp.Or(j.Scope, j.Kind), Key: j.Key}
}

// DeadRule says what becomes of a job that waits for others (Job.After) when one of them is dead. In any case it waits until
// none of the others is unfinished or held. One that was cancelled or discarded counts as finished.
type DeadRule int16

// The rules for dead members.
const (
	// DeadWait waits until somebody redrives, resolves or discards the dead job.
	DeadWait DeadRule = iota

	// DeadRun runs the job anyway. Lease.Members says which are dead.
	DeadRun

	// DeadCancel cancels the job, as Cancel does, if another one is dead or was cancelled when all are finished.
	DeadCancel
)

const followMark = lineSep // a job with this as its lane in an insert waits for others

// isFollowLine says of a line whether it is that of a follower.
func isFollowLine(lane string) string { return `pg_catalog.starts_with(` + lane + `, ` + sqlSep + `)` }

// followLine is the line in which a follower waits.
func followLine(id string) string { return sqlSep + ` || pg_catalog.lpad(` + id + `::text, 19, '0')` }

const (
	sqlDeadRun    = `1`
	sqlDeadCancel = `2`
	sqlDeadEnded  = `3` // only in job_history: DeadCancel, and it was this that ended the job

	memberBit = 4 // of lane_rule: the job's end must be told
	sqlMember = `4::smallint`
	isMember  = `lane_rule & ` + sqlMember + ` = ` + sqlMember
)

// checkAfter refuses what After cannot be.
func (j *Job) checkAfter() error {
	follows := j.follows || len(j.After) > 0
	switch {
	case j.IfDead < DeadWait || j.IfDead > DeadCancel:
		return invalid("IfDead", "is %d; use DeadWait, DeadRun or DeadCancel", j.IfDead)
	case !follows && j.IfDead != 0:
		return invalid("IfDead", "is set for a job that waits for no others; set After, or not IfDead")
	case follows && j.Replace != 0:
		return invalid("Replace", "is set for a job that waits for others, which cannot replace one; leave out Replace, or After")
	}
	for i, ref := range j.After {
		field := fmt.Sprintf("After[%d]", i)
		switch {
		case ref.ID != 0 && (ref.Key != "" || ref.Scope != ""):
			return invalid(field, "has an ID and a Scope or a Key; use the ID, or Scope and Key")
		case ref.ID < 0:
			return invalid(field, "has the ID %d; ids of jobs are positive", ref.ID)
		case ref.ID > 0:
			continue
		case ref.Key == "" && ref.Scope != "":
			return invalid(field, "has the Scope %q and no Key; Ref is for kinds that have a Key, so set the ID of the job instead", ref.Scope)
		case ref.Key == "":
			return invalid(field, "is empty; set the ID of a job, or its Scope and Key")
		}
		if err := cmp.Or(checkName(field+".Scope", ref.Scope, MaxScopeBytes), checkName(field+".Key", ref.Key, MaxKeyBytes)); err != nil {
			return err
		}
	}
	return nil
}

// link is one row of job_members that is to be written.
type link struct {
	group, job int64
	fresh      bool   // the job was enqueued in this transaction, with the bit
	state      State  // what the job's key says of it if there is no other trace of the job; 0 for nothing
	result     string // the same
}

// resolved is what the After of one job in a call means: the ids, or the places of earlier jobs in the same call.
type resolved struct {
	links []link // without group
	here  []int
}

// readRefs reads the jobs that keys belong to, and the last id that was drawn.
const readRefs = `
select u.n, f.job_id, f.state, coalesce(f.result::text, ''), coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0)
  from (select 0::bigint as n, null::text as scope, null::text as key
        union all
        select n, scope, key from unnest($1::text[], $2::text[]) with ordinality as u(scope, key, n)) u
  left join lateral (
       select job_id, state, result from onceq.job_fences f
        where f.class = ` + sqlOfJob + ` and f.scope = u.scope and f.key = u.key offset 0) f on true`

// resolveAfter finds the jobs that those in a call wait for, before anything is written. It returns nil if no job waits.
func (q *Queue) resolveAfter(ctx context.Context, db DB, jobs []Job, all []encoded) ([]resolved, error) {
	if !slices.ContainsFunc(jobs, func(j Job) bool { return len(j.After) > 0 }) {
		return nil, nil
	}
	type name struct{ scope, key string }
	own := make(map[name]int)
	type place struct{ job, ref int }
	var asked []place
	var scopes, keys []string
	found := make([]resolved, len(jobs))
	for i := range jobs {
		for k, ref := range jobs[i].After {
			if ref.ID != 0 {
				found[i].links = append(found[i].links, link{job: ref.ID})
				continue
			}
			if at, ok := own[name{ref.Scope, ref.Key}]; ok {
				found[i].here = append(found[i].here, at)
				continue
			}
			asked, scopes, keys = append(asked, place{i, k}), append(scopes, ref.Scope), append(keys, ref.Key)
		}
		if e := &all[i]; e.key != "" {
			own[name{e.header.scope, e.key}] = i
		}
	}
	field := func(p place) string { return afterField(len(jobs), p.job, p.ref) }
	var last int64
	err := q.send(ctx, db, asIs, readRefs, []any{scopes, keys}, each(func(rows pgx.Rows) error {
		var n int64
		var id *int64
		var state *fenceState
		l := link{}
		if err := rows.Scan(&n, &id, &state, &l.result, &last); err != nil || n == 0 {
			return err
		}
		p := asked[n-1]
		if id == nil {
			ref := jobs[p.job].After[p.ref]
			if e := &all[p.job]; e.key == ref.Key && e.header.scope == ref.Scope {
				return invalid(field(p), "names %s, which is that of the job itself; a job cannot wait for itself", ref)
			}
			if at, ok := own[name{ref.Scope, ref.Key}]; ok {
				return invalid(field(p), "names %s, which is that of a later one in this call (the one with index %d); put that one before", ref, at)
			}
			return invalid(field(p), "names %s, which no job has; enqueue that job before, in the same transaction or earlier", ref)
		}
		if l.job = *id; state.job(nil).Finished() {
			l.state = state.job(nil)
		}
		found[p.job].links = append(found[p.job].links, l)
		return nil
	}))
	if err != nil {
		var bad *InvalidError
		if errors.As(err, &bad) {
			return nil, err
		}
		return nil, fmt.Errorf("onceq: reading the jobs that another one is to wait for: %w", q.told(err))
	}
	for i := range jobs {
		for k, ref := range jobs[i].After {
			if ref.ID > last {
				return nil, invalid(field(place{i, k}), "names job %d, and ids were drawn only up to %d", ref.ID, last)
			}
		}
	}
	return found, nil
}

func afterField(jobs, job, ref int) string {
	if jobs == 1 {
		return fmt.Sprintf("After[%d]", ref)
	}
	return fmt.Sprintf("jobs[%d].After[%d]", job, ref)
}

// linkFollowers writes what the jobs in a call wait for that were accepted.
func (q *Queue) linkFollowers(ctx context.Context, db DB, found []resolved, results []Result) error {
	var links []link
	for i, f := range found {
		if results[i].Duplicate || results[i].ID == 0 {
			continue
		}
		for _, l := range f.links {
			l.group = results[i].ID
			links = append(links, l)
		}
		for _, at := range f.here {
			links = append(links, linkTo(results[i].ID, results[at], false))
		}
	}
	return q.link(ctx, db, links)
}

// linkTo makes a member of what an enqueue has answered.
func linkTo(group int64, r Result, member bool) link {
	l := link{group: group, job: r.ID, fresh: member && !r.Duplicate}
	if r.State.Finished() {
		l.state, l.result = r.State, string(r.Output)
	}
	return l
}

// canTell looks at the jobs u.job_id in given. Those that are not leased and whose rows nobody has locked are marked, so that
// their ends are told. They are written even if they have the mark: above READ COMMITTED who ends them must notice.
const canTell = `
look as materialized (
  select u.*, j.id as free_job, w.id as free_wait, h.id as free_past, coalesce(h.state, case when j.id is not null or w.id is not null then 0 end) as told_state,
         exists (select from onceq.jobs where id = u.job_id offset 0) or exists (select from onceq.job_waits where id = u.job_id offset 0)
           or exists (select from onceq.job_history where id = u.job_id and state <> ` + sqlJobCompleted + ` offset 0) as there,
         k.result as kept
    from given u
    left join lateral (
         select id from onceq.jobs where id = u.job_id and holder is null and leased_until is null for update skip locked) j on true
    left join lateral (
         select id from onceq.job_waits where id = u.job_id for update skip locked) w on true
    left join lateral (
         select id, state from onceq.job_history where id = u.job_id and state + 0 in (` + sqlJobDead + `, ` + sqlJobCancelled + `, ` + sqlJobHeld + `) for update skip locked) h on true
    left join lateral (
         select result from onceq.job_history where id = u.job_id and state + 0 = ` + sqlJobCompleted + ` offset 0) k on true
),
marked_job as (
  update onceq.jobs j set lane_rule = coalesce(j.lane_rule, 0::smallint) | ` + sqlMember + `
    from look l where j.id = any (array[l.free_job]) and l.free_job = l.job_id
),
marked_wait as (
  update onceq.job_waits w set lane_rule = w.lane_rule | ` + sqlMember + `
    from look l where w.id = any (array[l.free_wait]) and l.free_wait = l.job_id
),
marked_past as (
  update onceq.job_history h set lane_rule = coalesce(h.lane_rule, 0::smallint) | ` + sqlMember + `
    from look l where h.id = any (array[l.free_past]) and l.free_past = l.job_id
)`

// insertMembers writes rows of job_members: of jobs that were enqueued in this transaction, with the mark, and of others. Of a
// job of which there is no trace, its key may know how it ended; otherwise it has completed. Above READ COMMITTED it may only
// be too new to be seen, and so the promoters look for it.
const insertMembers = `
with asked as materialized (
  select distinct on (job_id, group_id) *
    from unnest($1::bigint[], $2::bigint[], $3::bool[], $4::smallint[], $5::text[]) as u(group_id, job_id, fresh, state, result)
   order by job_id, group_id
),
given as materialized (
  select * from asked where not fresh
),` + canTell + `,
seen as (
  select group_id, job_id, told_state, there, kept, state, result,
         not there and (state <> 0 or pg_catalog.current_setting('transaction_isolation') = 'read committed') as over
    from look
),
member as (
  insert into onceq.job_members (group_id, job_id, state, told, result)
  select group_id, job_id, 0, true, null from asked where fresh
  union all
  select group_id, job_id, case when told_state is not null then told_state when over then coalesce(nullif(state, 0), ` + sqlJobCompleted + `) else 0 end,
         told_state is not null or over, case when over then coalesce(kept, nullif(result, '')::jsonb) end
    from seen
  on conflict do nothing
  returning 1
)
select count(*) from member`

// link writes rows of job_members.
func (q *Queue) link(ctx context.Context, db DB, links []link) error {
	if len(links) == 0 {
		return nil
	}
	n := len(links)
	groups, jobs, fresh, states, results := make([]int64, n), make([]int64, n), make([]bool, n), make([]int16, n), make([]string, n)
	for i, l := range links {
		groups[i], jobs[i], fresh[i], states[i], results[i] = l.group, l.job, l.fresh, int16(l.state), l.result
	}
	if err := q.queryRow(ctx, db, insertMembers, []any{groups, jobs, fresh, states, results}, nil); err != nil {
		return fmt.Errorf("onceq: enqueue: what a job waits for: %w", q.told(err))
	}
	return nil
}

// sweepMembers looks for the ends of members that nobody tells: their jobs were claimed before somebody waited for them. Those
// that nobody has any more are told from now on.
var sweepMembers = `
with given as materialized (
  select group_id, job_id from onceq.job_members where not told order by job_id for update skip locked
),` + canTell + `,
found as (
  update onceq.job_members m set state = coalesce(l.told_state, ` + sqlJobCompleted + `), told = true, result = l.kept
    from look l
   where m.group_id = any (array[l.group_id]) and m.job_id = l.job_id and not m.told and (l.told_state is not null or not l.there)
  returning m.group_id, m.state
),
call as (
  insert into onceq.lane_calls (slot, due, lane)
  select ` + laneSlot("lane") + `, statement_timestamp(), lane
    from (select distinct ` + followLine("group_id") + ` as lane from found where state <> 0) l
  returning 1
)
select count(*) from call`

// lockFollowers locks those of the given followers that still wait. It must be a statement of its own, as in follow.
const lockFollowers = `
select pg_catalog.array_agg(id) from (
  select id from onceq.job_waits where id = any ($1::bigint[]) and if_dead = ` + sqlDeadCancel + ` order by id for update skip locked) w`

// stillDead gives those of the followers whose members are all finished, one of them dead or cancelled.
const stillDead = `
select pg_catalog.array_agg(g.id) from pg_catalog.unnest($1::bigint[]) as g(id)
 where exists (select from onceq.job_members where group_id = g.id and state in (` + sqlJobDead + `, ` + sqlJobCancelled + `))
   and not exists (select from onceq.job_members where group_id = g.id and state in (0, ` + sqlJobHeld + `))`

// sayDead notes why followers were cancelled just now: for people, and for Group and Redrive.
const sayDead = `
update onceq.job_history
   set errors = coalesce(errors, '[]') || pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object('at', finished_at, 'attempt', attempts, 'error', 'a job that it waited for is dead or was cancelled (DeadCancel)')),
       if_dead = ` + sqlDeadEnded + `
 where id = any ($1::bigint[]) and state = ` + sqlJobCancelled

// callLater puts off the call that onceq.follow has just written for a follower.
var callLater = `
update onceq.lane_calls set due = statement_timestamp() + interval '1 minute'
 where slot = ` + laneSlot(followLine("$1::bigint")) + ` and due <= statement_timestamp() + interval '1 second'
   and lane = ` + followLine("$1::bigint")

// cancelFollowers cancels the followers that the promoter has found to end with a dead member. One that cannot be cancelled keeps
// no other from it; it is tried again in a minute.
func (q *Queue) cancelFollowers(ctx context.Context, db DB, ids []int64) error {
	if len(ids) == 0 {
		return nil
	}
	err := q.cancelDead(ctx, db, ids)
	if badData(err) {
		for _, id := range ids {
			if err = q.cancelDead(ctx, db, []int64{id}); badData(err) {
				q.log.WarnContext(ctx, "onceq: a job that waits for dead ones cannot be cancelled; it is tried again in a minute", slog.Int64("job", id), slog.Any("error", err))
				err = q.send(ctx, db, hot, callLater, []any{id}, noRows)
			}
			if err != nil {
				break
			}
		}
	}
	if err != nil {
		return fmt.Errorf("onceq: cancelling jobs that wait for dead ones: %w", q.told(err))
	}
	return nil
}

// cancelDead cancels followers in one transaction. Since the promoter has found them somebody may have brought their members back: so
// it looks again, with the followers' rows locked, which a Redrive needs too. One that somebody has locked is left to the next call.
func (q *Queue) cancelDead(ctx context.Context, db DB, ids []int64) error {
	return atomically(ctx, db, rare, func(db DB) error {
		for _, statement := range []string{lockFollowers, stillDead} {
			if err := q.queryRow(ctx, db, statement, []any{ids}, &ids); err != nil || len(ids) == 0 {
				return err
			}
		}
		if _, _, err := q.cancel(ctx, db, ids, true, false); err != nil {
			return err
		}
		return q.send(ctx, db, asIs, sayDead, []any{ids}, noRows)
	})
}

// isOpen says whether a member of a group is unfinished.
func isOpen(group string) string {
	return `exists (select from (select from onceq.job_members where group_id = ` + group + ` and state = 0 order by job_id desc limit 1) m)`
}
