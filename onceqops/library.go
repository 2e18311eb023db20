package onceqops

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/bridge"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// library is what this package needs of the package onceq and what that does not export.
type library interface {
	Store(q *onceq.Queue) *pg.Store

	// What is refused. Each gives an *onceq.InvalidError.
	CheckText(field, text string) error
	CheckName(field, name string, limit int) error
	StoredTime(field string, t time.Time) (time.Time, error)
	LimitLine(field, name string, families bool) (string, error)
	LaneName(ofFamily, family, ofName, name string) (string, error)

	// Jobs and groups, also for the library itself.
	Job(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64, content bool,
		scope, key *string) (onceq.JobInfo, bridge.Job, error)
	ScanJob(i *onceq.JobInfo, rows pgx.Rows) error // a row of table.JobColumns
	State(ctx context.Context, q *onceq.Queue, db onceq.DB, id int64) (onceq.State, error)
	Cancel(ctx context.Context, q *onceq.Queue, db onceq.DB, ids []int64,
		running, keep bool) (cancelled, asked int, err error)
	Redrive(ctx context.Context, q *onceq.Queue, db onceq.DB, ids []int64, states []int16,
		led map[int64]bool) (table.Redriven, error)
	Taken(ctx context.Context, q *onceq.Queue, db onceq.DB, scope, key string) (onceq.Result, error)
	Groups(ctx context.Context, q *onceq.Queue, db onceq.DB, after int64, limit int, one int64,
		members bool, take func(g onceq.GroupInfo, open, dead []int64)) error
	Members(ctx context.Context, q *onceq.Queue, db onceq.DB, group, after int64, limit int,
		bare bool) iter.Seq2[onceq.Member, error]

	// Keys and effects.
	Identify(ctx context.Context, q *onceq.Queue, db onceq.DB) error // before the next two
	IdempotencyKey(q *onceq.Queue, parts ...string) string
	Effect(q *onceq.Queue, key string, mark []byte) (job int64, name, idempotencyKey string)
	KindOf(fingerprint []byte, scope string) string
	ResolveEffect(ctx context.Context, q *onceq.Queue, db onceq.DB, scope string, job int64, name string,
		r onceq.Resolution) error
	Encode(r onceq.Resolution) (state int16, raw string, err error)

	// What this process knows by itself, and the rest.
	Troubles(q *onceq.Queue) []watch.Trouble
	Late(q *onceq.Queue, of func(kind string, job int64, since time.Time)) // handlers that do not return
	MetaLacks(q *onceq.Queue) (detail, advice string)
	Pace(l onceq.Limit) (n int, per time.Duration, burst int)
	Broken(h onceq.Handler) error
	Decode(h onceq.Handler, l *onceq.Lease) error
	Protect(fn func() error) error // from panics
}

var root = bridge.Root.(library)

var (
	checkText, checkName = root.CheckText, root.CheckName
	laneName, limitLine  = root.LaneName, root.LimitLine
	storedTime           = root.StoredTime
)

func (q *Ops) identify(ctx context.Context, db onceq.DB) error { return root.Identify(ctx, q.q, db) }

// knownJob is a job, and what is known of it besides.
type knownJob struct {
	job onceq.JobInfo
	bridge.Job
}

// job reads a job. The error is pgx.ErrNoRows if there is none.
func (q *Ops) job(ctx context.Context, db onceq.DB, id int64, content bool,
	scope, key *string) (k knownJob, err error) {
	k.job, k.Job, err = root.Job(ctx, q.q, db, id, content, scope, key)
	return k, err
}

// state reads a job's state. The error is onceq.ErrNotFound if the job is neither live nor in the history.
func (q *Ops) state(ctx context.Context, db onceq.DB, id int64) (onceq.State, error) {
	return root.State(ctx, q.q, db, id)
}

func (q *Ops) groups(ctx context.Context, db onceq.DB, after int64, limit int, one int64, members bool,
	take func(g onceq.GroupInfo, open, dead []int64)) error {
	return root.Groups(ctx, q.q, db, after, limit, one, members, take)
}

func invalid(field, format string, args ...any) error {
	return &onceq.InvalidError{Field: field, Reason: fmt.Sprintf(format, args...)}
}

// paced says that jobs of a limit start in slots.
func paced(l onceq.Limit) bool {
	n, _, _ := root.Pace(l)
	return n > 0
}

// pageSize gives a page its usual size if none was asked for, and refuses one that is too large.
func pageSize(field string, n *int, usual int) error {
	if *n < 0 || *n > 1000 {
		return invalid(field, "is %d; 1 to 1,000 is possible, and 0 means %d", *n, usual)
	}
	*n = cmp.Or(*n, usual)
	return nil
}

// readAll reads all rows of a statement, each with scan. what is what an error says was read.
func readAll[T any](ctx context.Context, q *Ops, db onceq.DB, by pg.Way, what, statement string, args []any, scan func(*T, pgx.Rows) error) (all []T, err error) {
	err = q.store.Send(ctx, db, by, statement, args, pg.Each(func(rows pgx.Rows) error {
		var one T
		err := scan(&one, rows)
		all = append(all, one)
		return err
	}))
	if err != nil {
		return nil, fmt.Errorf("onceq: %s: %w", what, err)
	}
	return all, nil
}
