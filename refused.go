package onceq

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"
)

// A job in job_waits has not been in jobs yet, so a trigger, a constraint or a policy of the application on jobs may refuse it only when
// its turn has come. Then it waits, with those behind it, and everything else goes on: who completes the job before it does without
// a hand-over (noHandOver), and a promoter puts it off (lookApart).

const (
	laneSlots = 16 // rows of lane_locks
	anySlot   = -1
)

type stamps map[string]time.Time // by lane

// some are calls of one slot or of any, at most n of each. look sets locked if what it met comes after lockCalls, and, if there is one
// slot, due to how many of its calls it has tried, and lane to that of the first: "" if there is none.
type some struct {
	slot, n, due int
	locked       bool
	lane         string
}

// chooseSlot leaves promoteCalls only slot $1, if lockCalls has locked it, and returns the lane of the first call there since $2, and
// how many are due, at most $3.
const chooseSlot = `
with mine as materialized (
  select case when $1::text = any (pg_catalog.string_to_array(pg_catalog.current_setting('onceq_lanes.slots', true), ',')) then $1::text else '' end as slot
)
select pg_catalog.set_config('onceq_lanes.slots', m.slot, true),
       coalesce((select lane from onceq.lane_calls
                  where slot = nullif(m.slot, '')::smallint and due > $2::timestamptz and due <= statement_timestamp()
                  order by due limit 1), ''),
       (select count(*)
          from (select from onceq.lane_calls
                 where slot = nullif(m.slot, '')::smallint and due > $2::timestamptz and due <= statement_timestamp()
                 limit $3::int) c)
  from mine m`

// putOff leaves one call of lane $1 for those that are due, within a minute.
var putOff = `
with due as materialized (
  select ctid as place from onceq.lane_calls
   where slot = ` + laneSlot("$1::text") + ` and due <= statement_timestamp() and lane = $1::text
     for update skip locked
),
heard as (
  delete from onceq.lane_calls where ctid = any (array(select place from due))
)
insert into onceq.lane_calls (slot, due, lane)
select ` + laneSlot("$1::text") + `, statement_timestamp() + interval '1 minute', $1::text
 where exists (select from due) and not ` + calledSoon("$1::text")

// awaitCalls removes the calls of the lanes $1 that are due, where another one is due within a minute.
var awaitCalls = `
with due as materialized (
  select c.place
    from pg_catalog.unnest($1::text[]) l (lane)
   cross join lateral (
         select ctid as place from onceq.lane_calls
          where slot = ` + laneSlot("l.lane") + ` and due <= statement_timestamp() and lane = l.lane
            for update skip locked) c
   where ` + calledSoon("l.lane") + `
)
delete from onceq.lane_calls where ctid = any (array(select place from due))`

// calledSoon says that a call of a lane will be due within a minute.
func calledSoon(lane string) string {
	return `exists (select from onceq.lane_calls c
                    where c.slot = ` + laneSlot(lane) + ` and c.due > statement_timestamp() and c.due <= statement_timestamp() + interval '1 minute' and c.lane = ` + lane + ` offset 0)`
}

// lookApart is look after Postgres has refused that, most likely one of the jobs that were to become live. Each slot is looked at
// alone, and of its calls half as many at a time, until only the one is left that is refused. That one is put off for a minute, and
// the others go on.
func (p *promoter) lookApart(ctx context.Context, from time.Time, sweeping bool) (did promoted, now, left time.Time, err error) {
	for slot := range laneSlots {
		part := &some{slot: slot, n: promoteChunk}
		for calls := 0; ctx.Err() == nil; {
			one, at, rest, err := p.look(ctx, from, sweeping, part)
			switch {
			case aboutOne(err) && part.n > 1:
				part.n = max(min(part.n, part.due)/2, 1)
				continue
			case aboutOne(err) && part.lane != "": // otherwise no call is at fault
				err = p.putOff(ctx, part.lane, err)
				calls++
				if err == nil {
					continue
				}
			}
			if err != nil {
				return did, now, left, err
			}
			sweeping = false
			did.calls, did.jobs, did.cancel = did.calls+one.calls, did.jobs+one.jobs, append(did.cancel, one.cancel...)
			did.busy, did.families, did.next = did.busy || one.busy, did.families || one.families, one.next
			if now.IsZero() {
				now = at
			}
			if calls += one.calls; one.calls < part.n || calls >= promoteChunk {
				if !rest.IsZero() && (left.IsZero() || rest.Before(left)) {
					left = rest
				}
				break
			}
			part.n = min(2*part.n, promoteChunk)
		}
	}
	return did, now, left, ctx.Err()
}

// awaitRefused takes away the new calls of lanes that were refused less than a minute ago and are looked at again then: what is enqueued
// into such a lane does not make each look fail. It does so for some lanes; of many, the looks find out anew.
func (p *promoter) awaitRefused(ctx context.Context) error {
	const most = 10
	maps.DeleteFunc(p.refused, func(_ string, at time.Time) bool { return time.Since(at) > time.Minute })
	if len(p.refused) == 0 || len(p.refused) > most {
		return nil
	}
	return p.sendUnbroken(ctx, awaitCalls, slices.Sorted(maps.Keys(p.refused)))
}

func (p *promoter) sendUnbroken(ctx context.Context, statement string, lanes any) error {
	unbroken, cancel := outlast(ctx, 30*time.Second)
	defer cancel()
	if err := p.q.send(unbroken, p.db, hot, statement, []any{lanes}, noRows); err != nil {
		return fmt.Errorf("onceq: promote: %w", err)
	}
	return nil
}

// putOff puts off the calls of a lane, because Postgres has refused what they would let in.
func (p *promoter) putOff(ctx context.Context, lane string, why error) error {
	if err := p.sendUnbroken(ctx, putOff, lane); err != nil {
		return err
	}
	if p.refused == nil {
		p.refused = make(stamps)
	}
	p.refused[lane] = time.Now()
	if now := time.Now(); now.Sub(p.said[lane]) > time.Hour {
		if p.said == nil || len(p.said) > 1000 {
			p.said = make(stamps)
		}
		p.said[lane] = now
		p.q.log.WarnContext(ctx, "onceq: Postgres refuses a job whose turn it is in its lane or limit (a trigger, a constraint or a policy of the application), which waits, and those behind it; it is tried again each minute",
			slog.String("line", strings.ReplaceAll(lane, lineSep, " ")), slog.Any("error", why))
	}
	return nil
}
