package onceq

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/citus"
	"github.com/onceq/onceq/internal/enqueue"
	"github.com/onceq/onceq/internal/guard"
	"github.com/onceq/onceq/internal/paused"
	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/program"
	"github.com/onceq/onceq/internal/promoter"
	"github.com/onceq/onceq/internal/quarantine"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/internal/stmt"
	"github.com/onceq/onceq/internal/table"
	"github.com/onceq/onceq/internal/watch"
)

// SchemaVersion is the version of the tables that this code was written for. It works with those of some versions before
// (docs/run/stability.md), and with later ones for as long as these allow it: a migration adds, so that workers of the
// earlier code run on during a deploy, and says in the table meta if it does not. Queue.Check compares the versions.
const SchemaVersion = 1

const oldestSchema = SchemaVersion // the first version that this code works with; there is no older one yet

// DB is where a statement runs: a pgx.Tx, a *pgxpool.Pool, a *pgx.Conn or a *pgxpool.Conn. In a transaction everything that
// the statement does commits and rolls back with that transaction. For a Fence, a FenceLease and Lease.Complete a nil DB is
// the pool; elsewhere it is an *InvalidError, because it may be a transaction that was forgotten.
//
// A type of the application's own works too, around a pool for tracing for example, or around one that follows a
// transaction in the context. Statements are sent to it as they are, without the planner settings and the freedom from time
// limits that they have on a pool. A call that needs several statements (EnqueueMany with keys or with many jobs, Enqueue and
// EnqueueMany with Job.After, EnqueueGroup, Lease.AddMembers, Resolve, ResolveMany) asks Postgres whether a transaction is
// open, and opens one with the type's BeginTx if none is. Without BeginTx each statement commits by itself, so give such a call
// a transaction. Where a job waits for others, it is an *InvalidError without one.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Config configures a Queue. The zero value is a good start.
type Config struct {
	// Schema is the name of the schema with onceq's tables. Default "onceq". Any name that migrations.Up accepts, even one that
	// needs quoting.
	Schema string

	// Version is the application's, which the page and the command show with workers and failed attempts.
	// Default what its build says: the version of its main module, or its revision. At most MaxNameBytes.
	Version string

	// Logger gets what an operator should know: the library's warnings, and each event at the level that EventType.Level
	// returns. Default slog.Default(). If its handler panics, the record is lost, and the first time that is said on standard error.
	// The same holds for one whose Handle ends its goroutine.
	Logger *slog.Logger

	// Hook is called with every event. Default none. A panic of it is logged with its stack and costs that event alone.
	Hook Hook

	// BeforeEnqueue is called with the jobs at the start of each Enqueue, EnqueueUnique and EnqueueMany, before anything is
	// checked. Default none. It may change the jobs, for example to add metadata. The slice jobs is a copy, but the maps
	// and slices in the jobs belong to the caller: replace them instead of writing to them. The call continues with the
	// context that BeforeEnqueue returns, which events get too. At its end done is called with the error that the caller
	// gets; it may be nil. If BeforeEnqueue panics, the call enqueues nothing and returns an error that wraps a *PanicError. A
	// panic of done is logged. EnqueueInBatch does not call BeforeEnqueue, because it has no context.
	BeforeEnqueue func(ctx context.Context, jobs []Job) (_ context.Context, done func(error))
}

// Queue is a handle on the tables of one schema. It is safe for concurrent use and holds little but the pool: any number of
// Queues may exist in any number of processes.
type Queue struct {
	store *pg.Store
	observer
	enqueuing func(context.Context, []Job) (context.Context, func(error)) // Config.BeforeEnqueue

	installation atomic.Pointer[string] // meta.installation, once read
	pauses       *paused.Known          // what workers must not claim
	intake       enqueue.Intake
	lanes        promoter.Lanes
	shared
}

// New returns a Queue over the pool. It does not connect to the database; call Check at the start to find out early whether
// the schema is missing or of another version. The caller closes the pool, after the workers have stopped.
func New(pool *pgxpool.Pool, cfg *Config) (*Queue, error) {
	if pool == nil {
		return nil, errors.New("onceq: New needs a pool")
	}
	if cfg == nil {
		cfg = &Config{}
	}
	q := &Queue{enqueuing: cfg.BeforeEnqueue}
	schema := cmp.Or(cfg.Schema, "onceq")
	q.quarantine = &quarantine.Process
	q.log = guard.Logger(cmp.Or(cfg.Logger, slog.Default()))
	q.guard = guard.New(q.log)
	q.troubles.Log = q.log
	if cfg.Hook != nil {
		q.hook = guardedHook{cfg.Hook, q.guard}
		q.troubles.Report = func(w *watch.Work, queue string, count int, err error) {
			q.hook.Event(context.Background(), Event{Type: EventBackground, Name: w.Name, Queue: queue, Count: count, Err: err})
		}
	}
	if len(schema) > 63 || !utf8.ValidString(schema) || strings.ContainsRune(schema, 0) {
		return nil, fmt.Errorf("onceq: Config.Schema %q is not a schema name; use at most 63 bytes of UTF-8 without NUL", schema)
	}
	if err := checkName("Config.Version", cmp.Or(cfg.Version, "none"), MaxNameBytes); err != nil {
		return nil, err
	}
	q.pauses = paused.New()
	q.store = pg.New(pool, schema, means, citus.Parts{})
	q.store.Version = cmp.Or(cfg.Version, program.Version())
	q.intake.Store = q.store
	return q, nil
}

// Schema returns the name of the schema, unquoted.
func (q *Queue) Schema() string { return q.store.Schema }

// Logger writes where Config.Logger or its default does.
func (q *Queue) Logger() *slog.Logger { return q.log }

// Check returns nil if the schema exists and this code works with its tables: their version is not too old,
// and they allow code of SchemaVersion. Otherwise the error is a *SchemaError that says which of the two to update. It is
// ErrIDTaken if the sequence of ids is behind ids in use, by live jobs, the history or keys; it looks at no more than
// 100,000 keys.
//
// Check also looks for the rows that are always there, which somebody may have deleted: a suite of tests that
// empties all tables, a copy without data. It puts back those that lanes, limits and groups need, with a
// warning in the log. The row of the table meta it does not, because only a person knows which installation
// this is: the error has the statement. Check changes nothing else: migrations never run by themselves.
func (q *Queue) Check(ctx context.Context) error {
	const tables = `
select version, oldest_code, pg_catalog.current_setting('server_encoding'),
       pg_catalog.current_setting('citus.version', true) is not null,
       greatest((select pg_catalog.max(id) from onceq.jobs), (select pg_catalog.max(id) from onceq.job_waits), (select pg_catalog.max(id) from onceq.job_history),
                (select pg_catalog.max(token >> ` + table.TokenBitsSQL + `) from (select token from onceq.job_fences limit 100000) f), 0),
       ` + table.RowsLack + `
  from onceq.meta`
	var version, oldest int
	var encoding string
	var used, drawn int64
	var citus, lacks bool
	all := pg.Row(&version, &oldest, &encoding, &citus, &used, &lacks)
	err := q.store.Send(ctx, q.store.Pool, pg.ForCallerRare, tables, nil, all)
	if err == nil { // the sequence comes last: an id that is in use was drawn before
		err = q.store.Send(ctx, q.store.Pool, pg.ForCallerRare, stmt.ReadSequence, nil, pg.Row(&drawn))
	}
	if err == nil {
		q.store.Learn(citus)
	} else if sqlstate.Of(err) == "0A000" {
		var standby bool
		if q.store.QueryRow(ctx, q.store.Pool, `select pg_is_in_recovery()`, nil, &standby) == nil && standby {
			return fmt.Errorf("onceq: the server is a standby, which accepts no writes: connect to the primary: %w", err)
		}
	}
	switch {
	case sqlstate.NoTables(err):
		return fmt.Errorf("onceq: %w", err) // it names the table
	case errors.Is(err, pgx.ErrNoRows):
		return noMeta(q)
	case err != nil:
		return fmt.Errorf("onceq: reading the version of schema %q: %w", q.store.Schema, err)
	case version < oldestSchema || oldest > SchemaVersion:
		return &SchemaError{Schema: q.store.Schema, Found: version, Want: SchemaVersion, Oldest: oldest}
	case encoding != "UTF8":
		return fmt.Errorf("onceq: the database's encoding is %s; onceq needs UTF8, so that no text fails to convert in the middle of a transaction", encoding)
	case drawn < used:
		return ErrIDTaken
	case lacks:
		return promoter.PutBack(ctx, q.store, q.log, q.store.Pool, pg.ForCallerRare)
	}
	return nil
}

// metaLacks says that the row of meta is missing, and what puts it back.
func metaLacks(q *Queue) (detail, advice string) {
	detail = fmt.Sprintf("the table meta of schema %q is empty: somebody has emptied the tables, or copied them "+
		"without data", q.store.Schema)
	advice = fmt.Sprintf("if the tables are of version %d, put its row back as the role that ran the migrations: "+
		"insert into %s (version) values (%[1]d); its column installation is part of each idempotency key that "+
		"goes to a provider: if calls of unknown outcome went out from here, set it to what a backup has, or "+
		"else call NewInstallation", SchemaVersion, q.store.SQL("onceq.meta"))
	return detail, advice
}

// noMeta is the same as an error.
func noMeta(q *Queue) error {
	detail, advice := metaLacks(q)
	return errors.New("onceq: " + detail + "; " + advice)
}

// NewInstallation gives a copy of a database an identity of its own. A restored copy, for staging for example, has the
// identity of the original, so that providers take its calls for repetitions of the original's. Call NewInstallation before
// the first worker starts on the copy, with the role that ran the migrations, and never on the original. It returns an
// error while workers are waiting for jobs or a lease has not run out. Restart every process that has the queue open
// afterwards.
//
// From then on idempotency keys are different. Running an effect of unknown outcome again would therefore no longer be a
// repetition for its provider, so each effect, and each fence outside jobs, whose outcome is unknown is held for a person.
// held counts them; see Ops.ResolveMany. Outcomes that are recorded are still replayed. Live jobs stay live, and the copy's
// workers will run them: Cancel the jobs that only the original should run.
func (q *Queue) NewInstallation(ctx context.Context) (held int, err error) {
	const hold = `
with held as (
  update onceq.job_fences f
     set state = ` + table.Held + `, detail = coalesce(f.detail, 'its claim ran out of its lease without an outcome') || '; its idempotency key is another since this copy got an identity of its own'
   where ` + table.InDoubt + `
  returning 1
)
select (select count(*) from onceq.jobs where leased_until > statement_timestamp())
     + (select count(*) from onceq.job_fences where state = ` + table.Claimed + ` and leased_until > statement_timestamp()),
       (select count(*) from onceq.waiters where idle_until > statement_timestamp()), (select count(*) from held)`
	err = pg.Atomically(ctx, q.store.Pool, pg.AsIs, func(db pg.DB) error {
		var leases, workers int
		var b [16]byte // of a UUID of version 4
		_, _ = rand.Read(b[:])
		b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
		id := fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
		const renew = `update onceq.meta set installation = $1::uuid returning null`
		switch err := q.store.QueryRow(ctx, db, renew, []any{id}, nil); {
		case errors.Is(err, pgx.ErrNoRows):
			return noMeta(q)
		case err != nil:
			return err
		}
		err := q.store.QueryRow(ctx, db, hold, nil, &leases, &workers, &held)
		if err == nil && leases+workers > 0 {
			return fmt.Errorf("%d leases have not run out and %d workers wait for jobs; stop the workers, wait for their leases to end, and call this again", leases, workers)
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("onceq: new installation: %w", err)
	}
	q.installation.Store(nil)
	return held, nil
}

// identify reads the installation's random id, once. Lease.IdempotencyKey needs it.
func (q *Queue) identify(ctx context.Context, db DB) error {
	if q.installation.Load() != nil {
		return nil
	}
	const read = `select installation::text, pg_catalog.current_setting('citus.version', true) is not null from onceq.meta`
	var id string
	var citus bool
	switch err := q.store.QueryRow(ctx, db, read, nil, &id, &citus); {
	case errors.Is(err, pgx.ErrNoRows):
		return noMeta(q)
	case err != nil:
		return fmt.Errorf("onceq: reading schema %q: %w", q.store.Schema, err)
	}
	q.store.Learn(citus)
	q.installation.Store(&id)
	return nil
}
