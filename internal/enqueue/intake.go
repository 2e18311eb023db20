package enqueue

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/rhythm"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
)

// Intake is where the jobs of a Queue come in. It remembers for which queues nobody waited when it asked. Times
// are by rhythm.Now.
type Intake struct {
	Store *pg.Store

	Quiet    sync.Map     // queue → *atomic.Int64: until when it does not ask
	quiets   atomic.Int32 // how many there are in Quiet, about; at most table.Remembered
	AllQuiet atomic.Int64 // the same as Quiet for all queues
}

// whoWaits says whether a worker waited for the job of a statement.
type whoWaits int

const (
	someWaits   whoWaits = iota // and was woken; or what the statement saw may be old
	noneWaits                   // for this queue
	nobodyWaits                 // for any queue
)

// IsQuiet reports whether it is assumed that nobody waits for a queue. It is for rhythm.QuietFor after an answer that nobody does, counted
// from just before the question: asking costs small transactions a tenth of their rate. A worker that announces itself looks again after that
// time, and so misses nothing.
func (in *Intake) IsQuiet(queue string) bool {
	now := int64(rhythm.Now())
	if now < in.AllQuiet.Load() {
		return true
	}
	until, ok := in.Quiet.Load(queue)
	return ok && now < until.(*atomic.Int64).Load()
}

// setQuiet records the answer that nobody waits. asked is when the statement asked, and zero if it did not.
func (in *Intake) setQuiet(queue string, who whoWaits, asked time.Time) {
	if asked.IsZero() || who == someWaits {
		return
	}
	end := int64(rhythm.At(asked) + rhythm.QuietFor)
	if who == nobodyWaits {
		in.AllQuiet.Store(end)
		return
	}
	until, ok := in.Quiet.Load(queue)
	if !ok {
		if in.quiets.Add(1) > table.Remembered {
			in.Quiet.Clear()
			in.quiets.Store(1)
		}
		until, _ = in.Quiet.LoadOrStore(queue, new(atomic.Int64))
	}
	until.(*atomic.Int64).Store(end)
}

// InBatch adds a row to the caller's own batch. closed gets what came of it whenever the batch's results have
// been closed: an Answer without an id while the key is taken, and whether the statement worked.
func (in *Intake) InBatch(batch *pgx.Batch, r *Row, closed func(a Answer, worked bool)) {
	statement, args, asked := in.insertOne(r, false)
	if in.Store.Citus.Load() == pg.CitusYes {
		statement, args = in.parts(batch, r)
		asked = time.Time{}
	}
	batch.Queue(in.Store.SQL(statement), args...).Query(func(rows pgx.Rows) error {
		closed(Answer{}, false) // a batch may be sent again, after a rollback
		var a Answer
		if rows.Next() {
			var id int64
			var delayed bool
			var who whoWaits
			if err := rows.Scan(&id, &delayed, &who); err != nil {
				return err
			}
			if !delayed {
				in.setQuiet(r.Header.Queue, who, asked)
			}
			a = accepted(id, delayed)
		}
		rows.Close()
		closed(a, rows.Err() == nil)
		return in.failed(rows.Err())
	})
}

// parts adds to the caller's batch what comes on Citus before its last statement, which it returns.
func (in *Intake) parts(batch *pgx.Batch, r *Row) (last string, args []any) {
	h := r.Header
	delay, at := orNull(h.Delay.Microseconds()), orNull(h.due())
	job := []any{h.Queue, h.Kind, r.payload(), h.MaxAttempts, h.Priority, delay, at, r.Bytes, orNull(h.Metadata)}
	if r.Key == "" && r.Lane == "" {
		return stmt.PlainApart, job
	}
	batch.Queue(in.Store.SQL(stmt.DrawApart))
	if r.Key != "" {
		holder := rand.Int64()
		fence := []any{h.Scope, r.Key, h.Lifetime, r.Fingerprint, holder}
		batch.Queue(in.Store.SQL(stmt.RetakeApart), fence...)
		batch.Queue(in.Store.SQL(stmt.FenceApart), fence...)
		job = append(job, h.Scope, r.Key, holder)
	}
	if r.Lane == "" {
		return stmt.JobApart, job
	}
	wait := stmt.WaitApart
	if r.Key != "" {
		wait = stmt.WaitOfFenceApart
	}
	line, path := table.LineOf(r.Lane)
	batch.Queue(in.Store.SQL(wait), append(job, line, h.LaneRule, path)...)
	batch.Queue(in.Store.SQL(stmt.CallOfBatch), line, delay, at)
	return stmt.WaitOfBatch, nil
}
