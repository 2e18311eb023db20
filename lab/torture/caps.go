package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// The limits of jobs: those of one family, of which only caps change, and one with a rate.
const (
	capFamily = "cap/"
	rateLimit = "rate"

	topRate   = 4               // most starts in a second
	topBurst  = 2               // the default for that
	rateSlack = 2 * time.Second // a process that is stopped for a while between its last look at the clock and its note starts late
	unlimited = 1 << 20         // how many may be live at once of a limit with a rate alone
	noRate    = 1000            // how many, without a rate, while the rest of the work is done
)

// limitOf gives the limit of a work, or "".
func limitOf(w work) string {
	switch w.Form {
	case formCap, formTurn:
		return fmt.Sprint(capFamily, numberOf(w)/4%2)
	case formRate:
		return rateLimit
	}
	return ""
}

// line is the name of a limit in the tables.
func line(limit string) string { return "/" + limit }

// familyOf gives the name under which the limit of a lane's or a limit's family is stored, or "".
func familyOf(lane string) string {
	if i := strings.Index(lane[min(1, len(lane)):], "/"); i >= 0 {
		return lane[:i+2]
	}
	return ""
}

// changeLimit changes one of the limits: of all of a family, of one, or the rate.
func changeLimit(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool) error {
	switch name := []string{capFamily, capFamily + "0", capFamily + "1", rateLimit}[rand.IntN(4)]; {
	case name == rateLimit:
		return setCap(ctx, q, pool, name, onceq.Limit{AtOnce: rand.IntN(4), Rate: 1 + rand.IntN(topRate)})
	case rand.IntN(4) == 0:
		return noted(ctx, pool, line(name), removed, func() error { return q.RemoveLimit(ctx, pool, name) })
	default:
		return setCap(ctx, q, pool, name, onceq.Limit{AtOnce: rand.IntN(5)})
	}
}

func setCap(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool, name string, l onceq.Limit) error {
	n := l.AtOnce
	if n == 0 && l.Rate > 0 {
		n = unlimited
	}
	return noted(ctx, pool, line(name), n, func() error { return q.SetLimit(ctx, pool, name, l) })
}

// firstRate is there before any job: what nobody has set runs one at a time, as fast as it can.
var firstRate = fmt.Sprintf(`
insert into onceq.lane_limits (lane, n, rate, per, burst, lowered) values ('%[1]s', %[2]d, %[3]d, 1000000, %[4]d, false);
insert into torture.lane_trail (what, lane, n) values ('limiting', '%[1]s', %[2]d), ('limited', '%[1]s', %[2]d)`, line(rateLimit), unlimited, topRate, topBurst)

// endLimits lets the rest of the work be done.
func endLimits(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool) error {
	for _, name := range []string{capFamily, capFamily + "0", capFamily + "1", rateLimit} {
		if err := setCap(ctx, q, pool, name, onceq.Limit{AtOnce: cmp.Or(map[string]int{rateLimit: noRate}[name], 5)}); err != nil {
			return err
		}
	}
	return nil
}

// admitBeyond is a mistake that the checker must find: it lets in jobs that wait for a limit without counting.
const admitBeyond = `
with head as (
  select w.id from onceq.job_waits w where w.lane like '/%' and w.run_at <= now() order by random() limit 4 for update skip locked
),
moved as (delete from onceq.job_waits w using head h where w.id = h.id returning w.*),
place as (insert into onceq.lane_places (lane, id) select lane, id from moved on conflict do nothing)
insert into onceq.jobs (id, run_at, created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
                        payload, payload_bytes, metadata, errors, identity, lane, lane_rule)
select id, statement_timestamp(), created_at, claims, lost, attempts, max_attempts, priority, queue, kind, scope, key,
       payload, payload_bytes, metadata, errors, identity, path, lane_rule
  from moved`

// saidStarted is the type of the note that a handler of formRate was called.
const saidStarted = "started at a rate"

// rated notes the time at which it is called, by the true clock.
func (w *onceqWorker) rated(ctx context.Context, l *onceq.Lease, p work) error {
	skew, _ := strconv.Atoi(os.Getenv(skewEnv))
	at := time.Now().Add(-time.Duration(skew) * time.Second)
	w.events.write(event{Type: saidStarted, Job: identity(l.ID, l.CreatedAt), Token: l.Token, At: at.UnixMicro()})
	return w.own(ctx, l, p)
}

// checkRates looks at every window of time: no more jobs start in it than the burst and the highest rate allow.
func (v *verdict) checkRates(h *history) {
	end := int64(math.MaxInt64)
	for _, s := range h.Lanes {
		if s.What == "limiting" && s.Lane == line(rateLimit) && s.N == noRate {
			end = min(end, s.At.UnixMicro())
		}
	}
	var starts []int64         // microseconds
	called := map[int64]bool{} // a handler that Postgres makes run again is called twice under one token
	for _, e := range h.Events {
		if e.Type == saidStarted && !called[e.Token] && e.At < end {
			called[e.Token] = true
			starts = append(starts, e.At)
		}
	}
	v.Starts = len(starts)
	slices.Sort(starts)
	most, least, first := 0.0, math.Inf(1), int64(0) // the burst that the starts need, and where its window may begin
	for i, at := range starts {
		allowed := topRate * float64(at) / 1e6
		if before := float64(i) - allowed; before < least {
			least, first = before, at
		}
		if burst := float64(i+1) - allowed - least; burst > most {
			if most = burst; burst > topBurst+topRate*rateSlack.Seconds() {
				v.violation(vLimit, "jobs of a limit of %d a second started as if its burst were %.0f, within %s",
					topRate, burst, time.Duration(at-first)*time.Microsecond)
			}
		}
	}
}
