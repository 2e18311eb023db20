package onceq

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Citus sends a statement whole to the node that has the schema's tables, if it has no insert in a "with", no sequence and,
// where it inserts what it selects, no function that is not immutable. Otherwise it takes the statement apart itself, in ways
// that are slow, that need a two-phase commit, or that it does not know. The statements of this package that are not so are
// sent in parts there, in one transaction: this file has the parts. What they have in common:
//
//   - The sequence is on the coordinator, so ids are drawn first, by a statement that names no table. The time comes
//     with them: it is the time of everything that the parts write.
//   - "from onceq.meta" says where an insert belongs. The table has one row.
//   - Plans are not generic: for one Citus says "could not create distributed plan", or ends with a segmentation fault.
//   - Nobody is notified. A notification from the node does not reach those who listen on the coordinator. Workers poll.
//
// TestCitus_ runs the parts on a plain server, in make matrix MODES=citus on a cluster.

// onCitus reports whether the server has Citus, and asks it once. Its error is for the text of another one.
func (q *Queue) onCitus(ctx context.Context, db DB) (bool, error) {
	switch q.citus.Load() {
	case citusNo:
		return false, nil
	case citusYes:
		return true, nil
	}
	var is bool
	if err := query(ctx, db, askCitus, nil, row(&is)); err != nil {
		return false, fmt.Errorf("asking whether the server has Citus: %w", err)
	}
	q.learn(is)
	return is, nil
}

const askCitus = `select pg_catalog.current_setting('citus.version', true) is not null`

func (q *Queue) learn(citus bool) {
	is := int32(citusNo)
	if citus {
		is = citusYes
	}
	q.citus.CompareAndSwap(citusUnknown, is)
}

// The values of Queue.citus.
const (
	citusUnknown = iota
	citusNo
	citusYes
)

// inParts is how a statement is sent on Citus: with the statement's arguments, and rows of its columns for read.
type inParts func(p *parts, args []any, read func(pgx.Rows) error) error

// apart returns how a statement is sent in parts, or nil for one that Citus takes whole.
func apart(statement string) inParts {
	switch statement {
	case insertKeyed, enqueueOne:
		return enqueueOneInParts
	case insertPlainMany, insertKeyedMany, enqueueJobs:
		return enqueueManyInParts
	case insertFence:
		return insertFenceInParts
	case takeFence:
		return takeFenceInParts
	case readRefs:
		return refsInParts
	}
	return nil
}

// onOneNode is what Citus takes whole in place of a statement that it refuses for a function that is not immutable, with its
// arguments. Some of them get the time as one more argument, which is asked for.
func (q *Queue) onOneNode(ctx context.Context, db DB, statement string, args []any) (string, []any, error) {
	if called := onNode(statement); called != statement {
		return called, args, nil
	}
	switch statement {
	case completeFence, releaseFence:
		return withClock(statement), args, nil
	case readFenceTable:
		return clusterSize, args, nil
	case moveWaits:
		return immutable(statement), args, nil
	case moveJobs: // $3 and $4 are for a notification
		statement, args = moveApart, args[:2]
	case writeCounts:
		statement = countsApart
	case rescanTurn, writePresence, requestCancels, resolveEffects, resolveFence, reapFences, reapOrphans, takeFenceDrawn:
	default:
		return statement, args, nil
	}
	var now time.Time
	if err := query(ctx, db, askTime, nil, row(&now)); err != nil {
		return "", nil, err
	}
	args = append(slices.Clone(args), now)
	return strings.ReplaceAll(immutable(statement), "statement_timestamp()", fmt.Sprintf("$%d::timestamptz", len(args))), args, nil
}

// onNode makes a call of a function a query on a table, which goes to that table's node, in transactions too.
// A call alone would run on the coordinator in a transaction, and each of its steps would be a hop.
func onNode(statement string) string {
	switch statement {
	case finishJobs, giveBackJobs, cancelJobs, cancelDead, hurryJobs, replaceJobs, redriveJobs, discardJobs, emitEvent, beginAwait,
		promoteLines, callFamilies, settleLimits, takeSlots, setLimit, pauseIt, resumeIt, insertMembers, sweepMembers, tellMembers, enqueueDrawn, callLines:
		return statement + ", onceq.meta"
	}
	return statement
}

// moveApart is moveJobs without a notification.
var moveApart = moveJobs[:strings.Index(moveJobs, ", (select onceq.wake(")] + ", null from moved"

// countsApart is writeCounts with the insert outside.
var countsApart = `
insert into onceq.job_counts as c (minute, queue, kind, started, completed, failed, dead, took, durations)
select pg_catalog.timezone('UTC', pg_catalog.date_trunc('minute', pg_catalog.timezone('UTC', statement_timestamp()) - interval '30 seconds')), queue, kind, started, completed, failed, dead, took,
       pg_catalog.string_to_array(pg_catalog.btrim(durations, '{}'), ',')::int[]
  from onceq.meta, ` + counted + addCounts

// clusterSize is readFenceTable for a schema on a node, of which the coordinator does not know how many rows came; a schema that
// is not sharded is on the coordinator.
const clusterSize = `
select case when exists (select from pg_dist_partition where logicalrelid = 'onceq.job_fences'::regclass)
            then citus_relation_size('onceq.job_fences'::regclass) else pg_catalog.pg_relation_size('onceq.job_fences'::regclass) end
       / pg_catalog.current_setting('block_size')::bigint, pg_catalog.pg_stat_get_tuples_inserted('onceq.job_fences'::regclass)`

// checkInParts reads what Check wants to know. The sequence comes last: an id that is in use was drawn before.
func (q *Queue) checkInParts(ctx context.Context) (version, oldest int, encoding string, ahead, lacks bool, err error) {
	const tables = `
select version, oldest_code, pg_catalog.current_setting('server_encoding'),
       greatest((select pg_catalog.max(id) from onceq.jobs), (select pg_catalog.max(id) from onceq.job_waits), (select pg_catalog.max(id) from onceq.job_history),
                (select pg_catalog.max(token >> ` + sqlTokenBits + `) from (select token from onceq.job_fences limit 100000) f), 0),
       ` + rowsLack + `
  from onceq.meta`
	const sequence = `select coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0)`
	var used, drawn int64
	err = q.send(ctx, q.pool, forCallerRare, tables, nil, row(&version, &oldest, &encoding, &used, &lacks))
	if err == nil {
		err = q.send(ctx, q.pool, forCallerRare, sequence, nil, row(&drawn))
	}
	return version, oldest, encoding, drawn >= used, lacks, err
}

// withClock makes the time a column of a subquery in an update of one fence: Citus then does not see it as a function.
func withClock(statement string) string {
	return strings.NewReplacer("statement_timestamp()", "clock.now", "\n   where f.class", "\n    from (select statement_timestamp() as now) clock\n   where f.class").Replace(statement)
}

// A timestamptz with an interval depends on the session's time zone, and so does a part of it. A timestamp does not.
var (
	epoch = regexp.MustCompile(`extract\(epoch from ([\w.]+)\)`)
	zoned = regexp.MustCompile(`(timestamptz 'epoch'|[\w.]+(?:\(\))?) ([+-]) ([^\n]*? \* interval '1 (?:milli|micro)second')`)
)

func immutable(statement string) string {
	statement = epoch.ReplaceAllString(statement, "extract(epoch from pg_catalog.timezone('UTC', $1))")
	return zoned.ReplaceAllString(statement, "pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', $1) $2 $3)")
}

// parts sends the parts of one statement in one transaction.
type parts struct {
	ctx context.Context
	q   *Queue
	db  DB
	now time.Time // the database's
}

// lockTimeout sets on the node how long a transaction waits for a lock there. Citus does not pass on what is set on the coordinator.
const lockTimeout = `select pg_catalog.set_config('lock_timeout', $1::text, true) from onceq.meta`

// sendInParts sends the parts. They wait for locks for no longer than by says.
func (q *Queue) sendInParts(ctx context.Context, db DB, by way, statement inParts, args []any, read func(pgx.Rows) error) error {
	limited := by.patience > 0 && own(db) != nil
	begin, err := mustOpen(ctx, db)
	if err != nil {
		return err
	}
	err = inOne(ctx, begin, db, asIs, func(db DB) error {
		if limited {
			if err := query(ctx, db, q.sql(lockTimeout), []any{by.limit()}, noRows); err != nil {
				return err
			}
		}
		return statement(&parts{ctx: ctx, q: q, db: db}, args, read)
	})
	if err != nil && begin == nil && ctx.Err() != nil {
		q.refuseCommit(ctx, db)
	}
	return q.told(err)
}

// refuseCommit ends the caller's transaction with an error: its context has ended between two parts, where pgx leaves the transaction
// as it is, and one that commits all the same would commit half of them.
func (q *Queue) refuseCommit(ctx context.Context, db DB) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = query(ctx, db, q.sql(`select onceq.lease_lost(0::bigint)`), nil, noRows)
}

func (p *parts) send(statement string, args []any, read func(pgx.Rows) error) error {
	statement, args, err := p.q.onOneNode(p.ctx, p.db, statement, args)
	if err != nil {
		return err
	}
	return query(p.ctx, p.db, p.q.sql(statement), args, read)
}

// draw returns new ids, and sets the time.
func (p *parts) draw(n int) (ids []int64, err error) {
	const draw = `select statement_timestamp(), (select pg_catalog.array_agg(pg_catalog.nextval('onceq.ids')) from pg_catalog.generate_series(1, $1::int))`
	return ids, p.send(draw, []any{n}, row(&p.now, &ids))
}

// enqueueDrawn is enqueueJobs for jobs that have ids: the sequence is on the coordinator.
var enqueueDrawn = enqueueJobsFrom("null")

// enqueueManyInParts draws ids for jobs, and sends them. Nobody is woken: a notification would come from the node.
func enqueueManyInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	ids, err := p.draw(len(args[1].([]string)))
	if err != nil {
		return err
	}
	slices.Sort(ids)
	for i, id := range args[5].([]int64) {
		if id != 0 {
			ids[i] = id
		}
	}
	whole := len(args) == 23 // as enqueueJobs has them
	args = append(slices.Clone(args), make([]any, 23-len(args))...)
	args[5] = ids
	if args[22] == nil {
		args[22] = false
	}
	if whole {
		return p.send(enqueueDrawn, args, read)
	}
	var all, mine []int64
	var delayed []bool
	if err := p.send(enqueueDrawn, args, row(&all, &delayed, nil, &mine, nil)); err != nil {
		return err
	}
	return p.send(`select $1::bigint[], $2::bool[], 0::bigint, $3::bigint[]`, []any{all, delayed, mine}, read)
}

// enqueueOneDrawn is enqueueOne for a job that has an id, on the node.
var enqueueOneDrawn = enqueueOneFrom("onceq.meta, ", "null", "$19::bigint")

// enqueueOneInParts sends what insertKeyed and enqueueOne send.
func enqueueOneInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	ids, err := p.draw(1)
	if err != nil {
		return err
	}
	args = append(slices.Clone(args), make([]any, 18-len(args))...) // insertKeyed has nine
	return p.send(enqueueOneDrawn, append(args, ids[0]), read)
}

// claimApart takes an absent key outside of jobs, or of an effect.
const claimApart = `
insert into onceq.job_fences (class, scope, key, state, job_id, token, holder, leased_until, created_at, lifetime, fingerprint)
select $4::smallint, $5::text, $6::text, ` + sqlClaimed + `::smallint, nullif($1::bigint, 0), $11::bigint << ` + sqlTokenBits + `, $7::bigint,
       $8::timestamptz, $12::timestamptz, $9::bigint, $10::bytea
  from onceq.meta
 where $1::bigint = 0 or exists (select from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint)
on conflict do nothing
returning token, leased_until, created_at`

func insertFenceInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	ids, err := p.draw(1)
	if err != nil {
		return err
	}
	args = append(slices.Clone(args[:10]), ids[0], p.now)
	args[7] = p.now.Add(time.Duration(args[7].(int64)) * time.Microsecond)
	holds := true
	var token *int64
	var until, since *time.Time
	err = p.send(claimApart, args, each(func(rows pgx.Rows) error { return rows.Scan(&token, &until, &since) }))
	if err == nil && token == nil && args[0].(int64) != 0 {
		const guard = `select exists (select from onceq.jobs where id = $1::bigint and claims = $2::int and holder = $3::bigint)`
		err = p.send(guard, args[:3], row(&holds))
	}
	if err != nil {
		return err
	}
	const answer = `select $1::bool, $2::bigint, $3::timestamptz, $4::timestamptz, null::bigint` // a new claim is named by its time
	return p.send(answer, []any{holds, token, until, since}, read)
}

// takeFenceDrawn is takeFence with a drawn id. Citus allows no function that raises an error in an update: idTakenApart raises
// it before.
var takeFenceDrawn = strings.NewReplacer("pg_catalog.nextval('onceq.ids')", "$15::bigint", "select onceq.id_taken(h.id)", "select h.id").Replace(takeFence)

var idTakenApart = `
select onceq.id_taken(h.id)
  from onceq.job_fences f cross join lateral (select h.id` + ofDeadJob + ` offset 0) h
 where f.class = $2::smallint and f.scope = $3::text and f.key = $4::text and f.state <> ` + sqlCancelled

func takeFenceInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	ids, err := p.draw(1)
	if err != nil {
		return err
	}
	if args[13].(bool) {
		if err := p.send(idTakenApart, []any{args[0], args[3], args[4], args[5]}, noRows); err != nil {
			return err
		}
	}
	return p.send(takeFenceDrawn, append(slices.Clone(args), ids[0]), read)
}

// refsApart is readRefs with what the sequence says, which is on the coordinator.
var refsApart = strings.Replace(readRefs, "coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0)", "$3::bigint", 1)

func refsInParts(p *parts, args []any, read func(pgx.Rows) error) error {
	const sequence = `select coalesce(pg_catalog.pg_sequence_last_value('onceq.ids'::regclass), 0)`
	var last int64
	if err := p.send(sequence, nil, row(&last)); err != nil {
		return err
	}
	return p.send(refsApart, append(slices.Clone(args), last), read)
}

// What EnqueueInBatch sends. No part waits for an answer: the id is in a setting of the transaction, and the fence says by a
// random holder that it was taken just now.
const (
	drawApart = `select pg_catalog.set_config('onceq_drawn.id', pg_catalog.nextval('onceq.ids')::text, true)`

	plainApart = `
insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata)
values (pg_catalog.nextval('onceq.ids'),
        greatest(statement_timestamp(), statement_timestamp() + $6::bigint::float8 * interval '1 microsecond',
                 timestamptz 'epoch' + $7::bigint::float8 * interval '1 microsecond'),
        statement_timestamp(), $4::smallint, $5::smallint, $1::text, $2::text, $3::text::jsonb, $8::bytea, $9::text::jsonb)
returning id, run_at > created_at, 1`

	fenceApart = `
insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, fingerprint, holder)
values (` + sqlOfJob + `, $1::text, $2::text, ` + sqlQueued + `, pg_catalog.current_setting('onceq_drawn.id')::bigint, pg_catalog.current_setting('onceq_drawn.id')::bigint << ` + sqlTokenBits + `,
        statement_timestamp(), $3::bigint, $4::bytea, $5::bigint)
on conflict do nothing`

	retakeApart = `
update onceq.job_fences f
   set job_id = pg_catalog.current_setting('onceq_drawn.id')::bigint, token = pg_catalog.current_setting('onceq_drawn.id')::bigint << ` + sqlTokenBits + `,
       state = ` + sqlQueued + `, created_at = statement_timestamp(), finished_at = null,
       lifetime = $3::bigint, fingerprint = $4::bytea, result = null, holder = $5::bigint, leased_until = null
 where f.class = ` + sqlOfJob + ` and f.scope = $1::text and f.key = $2::text and ` + fenceFree + `
   and f.token >> ` + sqlTokenBits + ` < pg_catalog.current_setting('onceq_drawn.id')::bigint and f.job_id < pg_catalog.current_setting('onceq_drawn.id')::bigint`

	jobApart = `
insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload, payload_bytes, metadata, scope, key)
select f.job_id,
       greatest(f.created_at, pg_catalog.timezone('UTC', pg_catalog.timezone('UTC', f.created_at) + $6::bigint::float8 * interval '1 microsecond'),
                pg_catalog.timezone('UTC', timestamp 'epoch' + $7::bigint::float8 * interval '1 microsecond')),
       f.created_at, $4::smallint, $5::smallint, $1::text, $2::text, $3::text::jsonb, $8::bytea, $9::text::jsonb, f.scope, f.key
  from onceq.job_fences f
 where f.class = ` + sqlOfJob + ` and f.scope = $10::text and f.key = $11::text and f.holder = $12::bigint
returning id, run_at > created_at, 1`
)

// waitApart and waitOfFenceApart are plainApart and jobApart for a job with a lane or a limit, and callOfBatch is its call. That comes
// after the job, so that it is not due before it, and is left even if the key is taken: then a promoter looks for nothing. waitOfBatch
// has the answer of the two. It changes nothing, but only of what changes something Citus evaluates a setting on the coordinator.
var (
	waitApart = strings.NewReplacer("into onceq.jobs", "into onceq.job_waits", "metadata)\n", "metadata, lane, lane_rule, path)\n",
		"$9::text::jsonb)", "$9::text::jsonb, $10::text, $11::smallint, $12::text)", "pg_catalog.nextval('onceq.ids')", "pg_catalog.current_setting('onceq_drawn.id')::bigint").Replace(plainApart)

	waitOfFenceApart = strings.NewReplacer("into onceq.jobs", "into onceq.job_waits", "scope, key)\n", "scope, key, lane, lane_rule, path)\n",
		"f.scope, f.key\n", "f.scope, f.key, $13::text, $14::smallint, $15::text\n").Replace(jobApart)

	waitOfBatch = `update onceq.job_waits set claims = claims where id = pg_catalog.current_setting('onceq_drawn.id')::bigint returning id, run_at > created_at, 1`

	callOfBatch = `
insert into onceq.lane_calls (slot, due, lane)
values (` + laneSlot("$1::text") + `, greatest(statement_timestamp(), statement_timestamp() + $2::bigint::float8 * interval '1 microsecond',
                                               timestamptz 'epoch' + $3::bigint::float8 * interval '1 microsecond'), $1::text)`
)

// queueParts adds to the caller's batch what comes before its last statement, which it returns.
func (q *Queue) queueParts(batch *pgx.Batch, e *encoded) (last string, args []any) {
	h := e.header
	var payload, delay, at, metadata any
	if e.bytes == nil {
		payload = e.json
	}
	if h.delay != 0 {
		delay = h.delay.Microseconds()
	}
	if !h.at.IsZero() {
		at = h.at.UnixMicro()
	}
	if h.metadata != "" {
		metadata = h.metadata
	}
	job := []any{h.queue, h.kind, payload, h.maxAttempts, h.priority, delay, at, e.bytes, metadata}
	if e.key == "" && e.lane == "" {
		return plainApart, job
	}
	batch.Queue(q.sql(drawApart))
	if e.key != "" {
		holder := rand.Int64()
		fence := []any{h.scope, e.key, h.lifetime, e.fingerprint, holder}
		batch.Queue(q.sql(immutable(retakeApart)), fence...)
		batch.Queue(q.sql(fenceApart), fence...)
		job = append(job, h.scope, e.key, holder)
	}
	if e.lane == "" {
		return jobApart, job
	}
	wait := waitApart
	if e.key != "" {
		wait = waitOfFenceApart
	}
	line, path := lineOf(e.lane)
	batch.Queue(q.sql(wait), append(job, line, int16(h.laneRule), path)...)
	batch.Queue(q.sql(callOfBatch), line, delay, at)
	return waitOfBatch, nil
}

// In a handler's transaction the coordinator knows the transaction's id and ends the connection of a client that freezes; the
// node knows neither that client nor the id. On a plain server the same two are columns of lockJob and lockJobs.
const openApart = `select ` + limitIdling + `, null, pg_current_xact_id()::text`
