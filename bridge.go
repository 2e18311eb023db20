package onceq

import (
	"context"
	"encoding/binary"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/fence"
	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/finish"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/task"
	"github.com/onceq/onceq/internal/watch"
)

func init() {
	bridge.Root = forOps{}
	bridge.Alone = func(queue any) { queue.(*Queue).quarantine = new(quarantine.Turn) }
}

// forOps is what the package onceqops may use of what is not exported here: library.go there has the same
// methods, with what they are for. None of them has a state.
type forOps struct{}

func (forOps) Store(q *Queue) *pg.Store { return q.store }

func (forOps) CheckText(field, text string) error                      { return checkText(field, text) }
func (forOps) CheckName(field, name string, limit int) error           { return checkName(field, name, limit) }
func (forOps) StoredTime(field string, t time.Time) (time.Time, error) { return storedTime(field, t) }
func (forOps) LimitLine(field, name string, families bool) (string, error) {
	return limitLine(field, name, families)
}
func (forOps) LaneName(ofFamily, family, ofName, name string) (string, error) {
	return laneName(ofFamily, family, ofName, name)
}

func (forOps) Job(ctx context.Context, q *Queue, db DB, id int64, content bool,
	scope, key *string) (JobInfo, bridge.Job, error) {
	k, err := q.job(ctx, db, id, content, scope, key)
	return k.job, bridge.Job{
		Line: k.job.line, Slotted: k.job.slotted, Began: k.job.since, Holder: k.holder, Ahead: k.ahead, Cancelling: k.cancelling,
		Scope: k.scope, Key: k.key, Until: k.until, At: k.at,
	}, err
}

func (forOps) ScanJob(i *JobInfo, rows pgx.Rows) error { return i.scan(rows) }

func (forOps) State(ctx context.Context, q *Queue, db DB, id int64) (State, error) {
	return q.state(ctx, db, id)
}

func (forOps) Cancel(ctx context.Context, q *Queue, db DB, ids []int64,
	running, keep bool) (cancelled, asked int, err error) {
	return q.canceller().Jobs(ctx, db, ids, running, keep)
}

func (forOps) Redrive(ctx context.Context, q *Queue, db DB, ids []int64, states []int16,
	led map[int64]bool) (table.Redriven, error) {
	return finish.Redrive(ctx, q.store, db, pg.ForCaller, ids, states, DefaultWindow.Milliseconds(), led)
}

func (forOps) Taken(ctx context.Context, q *Queue, db DB, scope, key string) (Result, error) {
	a, err := q.intake.Taken(ctx, db, scope, key)
	return resultOf(a), err
}

func (forOps) Groups(ctx context.Context, q *Queue, db DB, after int64, limit int, one int64, members bool,
	take func(g GroupInfo, open, dead []int64)) error {
	return q.groups(ctx, db, after, limit, one, members, take)
}

func (forOps) Members(ctx context.Context, q *Queue, db DB, group, after int64, limit int,
	bare bool) iter.Seq2[Member, error] {
	return membersOf(ctx, q, db, group, after, limit, bare)
}

func (forOps) Identify(ctx context.Context, q *Queue, db DB) error { return q.identify(ctx, db) }

func (forOps) IdempotencyKey(q *Queue, parts ...string) string { return q.downstream(parts...) }

func (forOps) KindOf(mark []byte, scope string) string {
	return fingerprint.KindOf(mark, scope)
}

func (forOps) Effect(q *Queue, key string, mark []byte) (job int64, name, idempotencyKey string) {
	if job, name = fence.EffectOf(key); len(mark) == 8 {
		idempotencyKey = q.effectIdempotencyKey(job, int64(binary.BigEndian.Uint64(mark)), name)
	}
	return job, name, idempotencyKey
}

func (forOps) ResolveEffect(ctx context.Context, q *Queue, db DB, scope string, job int64, name string,
	r Resolution) error {
	return (&Fence{q: q, f: fence.Fence{Store: q.store, Class: int16(classEffect), Scope: scope, Key: fence.EffectKey(job, name)}}).resolve(ctx, db, r)
}

func (forOps) Encode(r Resolution) (state int16, raw string, err error) {
	raw, err = r.encode()
	return int16(r.state), raw, err
}

func (forOps) Troubles(q *Queue) []watch.Trouble { return q.troubles.List(nil) }

func (forOps) Late(q *Queue, of func(kind string, job int64, since time.Time)) {
	q.late.Range(func(_, v any) bool {
		h := v.(task.Late)
		of(h.Hold.Kind, h.Hold.ID, h.Since)
		return true
	})
}

func (forOps) MetaLacks(q *Queue) (detail, advice string) { return metaLacks(q) }

func (forOps) Pace(l Limit) (n int, per time.Duration, burst int) { return l.pace() }

func (forOps) Broken(h Handler) error { return h.err }

func (forOps) Decode(h Handler, l *Lease) error { return protect(func() error { return h.decode(l) }) }

func (forOps) Protect(fn func() error) error { return protect(fn) }
