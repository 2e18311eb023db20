package onceq

import (
	"math/rand/v2"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// queueParts adds to the caller's batch what comes before its last statement, which it returns.
func queueParts(q *pg.Store, batch *pgx.Batch, e *encoded) (last string, args []any) {
	h := e.header
	var payload any
	if e.bytes == nil {
		payload = e.json
	}
	delay, at := orNull(h.delay.Microseconds()), orNull(h.due())
	job := []any{h.queue, h.kind, payload, h.maxAttempts, h.priority, delay, at, e.bytes, orNull(h.metadata)}
	if e.key == "" && e.lane == "" {
		return stmt.PlainApart, job
	}
	batch.Queue(q.SQL(stmt.DrawApart))
	if e.key != "" {
		holder := rand.Int64()
		fence := []any{h.scope, e.key, h.lifetime, e.fingerprint, holder}
		batch.Queue(q.SQL(stmt.RetakeApart), fence...)
		batch.Queue(q.SQL(stmt.FenceApart), fence...)
		job = append(job, h.scope, e.key, holder)
	}
	if e.lane == "" {
		return stmt.JobApart, job
	}
	wait := stmt.WaitApart
	if e.key != "" {
		wait = stmt.WaitOfFenceApart
	}
	line, path := lineOf(e.lane)
	batch.Queue(q.SQL(wait), append(job, line, int16(h.laneRule), path)...)
	batch.Queue(q.SQL(stmt.CallOfBatch), line, delay, at)
	return stmt.WaitOfBatch, nil
}
