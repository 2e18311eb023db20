package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

type onceqSystem struct{}

// These queues exist beside the default one: one for claim loops by hand, one that kinds are moved to, and one for the
// processes that jobs end.
const (
	handQueue  = "hand"
	movedQueue = "moved"
	frailQueue = "frail"
)

// onceqTrail is the audit trail: it writes what happens to jobs. A row takes its number while its transaction holds the
// job's lock. So for one job, and for the successive jobs of one key, numbers grow in the order of events.
const onceqTrail = `
create function torture.identity(id bigint, created timestamptz) returns bigint language sql immutable as $$
  select (id << 36) | ((extract(epoch from created) * 1000000)::bigint & ((1::bigint << 36) - 1))
$$;
create table torture.twins (job bigint, key text, work text, kind text, state text, result text, lost smallint, gone bool);
create function torture.trail_onceq() returns trigger language plpgsql as $$
begin
  if tg_op = 'INSERT' then
    insert into torture.trail (what, job, key, work, op)
    values ('accepted', torture.identity(new.id, new.created_at), coalesce(new.key, ''), new.payload->>'work', coalesce(new.metadata->>'op', ''));
  end if;
  if tg_op = 'INSERT' and tg_table_name = 'jobs' and to_jsonb(new)->>'leased_until' is not null -- by a completion, in its lane
     or tg_op = 'UPDATE' then
    insert into torture.trail (what, job, key, work, token)
    values ('claimed', torture.identity(new.id, new.created_at), coalesce(new.key, ''), new.payload->>'work', new.id << 20 | new.claims);
  end if;
  if tg_op = 'DELETE' and not exists (select from onceq.job_waits w where w.id = old.id and w.created_at = old.created_at) then -- else it is given back
    insert into torture.trail (what, job, key, work)
    values ('gone', torture.identity(old.id, old.created_at), coalesce(old.key, ''), old.payload->>'work');
  end if;
  return null;
end $$;
create trigger trail_insert after insert on onceq.jobs for each row
  when (new.queue <> 'onceqcron') execute function torture.trail_onceq();
create trigger trail_delete after delete on onceq.jobs for each row
  when (old.queue <> 'onceqcron') execute function torture.trail_onceq();
create trigger trail_waits after insert on onceq.job_waits for each row execute function torture.trail_onceq();
create trigger trail_claims after update on onceq.jobs for each row
  when (new.claims > old.claims and new.queue <> 'onceqcron') execute function torture.trail_onceq();
create function torture.trail_cancelled() returns trigger language plpgsql as $$ -- in job_waits, too
begin
  insert into torture.trail (what, job, key, work)
  values ('gone', torture.identity(new.id, new.created_at), coalesce(new.key, ''), new.payload->>'work');
  return null;
end $$;
create trigger trail_cancelled after insert on onceq.job_history for each row
  when (new.state = 7 and new.queue <> 'onceqcron') execute function torture.trail_cancelled();
create function torture.trail_pruned() returns trigger language plpgsql as $$
begin
  insert into torture.trail (what, job, key, work) values ('pruned', 0, old.key, '');
  return null;
end $$;
create trigger trail_pruned after delete on onceq.job_fences for each row
  when (old.class = 0) execute function torture.trail_pruned();`

func (onceqSystem) setup(ctx context.Context, conn *pgx.Conn) error {
	if err := migrations.Up(ctx, conn, "onceq"); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, onceqTrail+keepTwins+fenceTrail+laneTrail+flowTables+groupTables+tickTrail+";"+firstRate)
	return err
}

func onceqJob(w work, op string) onceq.Job {
	j := onceq.Job{
		Kind: w.Form, Payload: w, Key: w.key(), Window: onceq.Forever, MaxAttempts: 1000, Metadata: map[string]string{"op": op},
	}
	switch w.Form {
	case formTx, formOwn, formAsk: // as in the middle of a deploy that moves the kind
		j.Queue = []string{onceq.DefaultQueue, movedQueue}[rand.IntN(2)]
	case formHand:
		j.Queue = handQueue
	case formFrail, formPoison:
		j.Queue = frailQueue
	case formRecur:
		j.Window = onceq.UntilFinished
	case formLine, formPair, formPass, formHalt:
		j.Lane, j.LaneRule = laneOf(w), map[string]onceq.LaneRule{formPass: onceq.Overtake, formHalt: onceq.StopLane}[w.Form]
	}
	if w.Form == formTurn {
		j.Lane = laneOf(w)
	}
	j.Limit = limitOf(w)
	if j.Key == "" {
		j.Window = 0
	}
	return j
}

type onceqEnqueuer struct {
	q    *onceq.Queue
	pool *pgxpool.Pool
}

func (onceqSystem) enqueuer(pool *pgxpool.Pool) (enqueuer, error) {
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	return onceqEnqueuer{q, pool}, err
}

func onceqAnswer(w work, r onceq.Result) answer {
	return answer{Work: w.Name, ID: r.ID, Duplicate: r.Duplicate, Completed: r.State == onceq.StateCompleted, Output: r.Output}
}

func (e onceqEnqueuer) enqueue(ctx context.Context, tx pgx.Tx, op string, works []work) (answers []answer, err error) {
	var db onceq.DB = e.pool
	if tx != nil {
		db = tx
		if err := emitFirst(ctx, e.q, tx, works); err != nil {
			return nil, err
		}
	}
	if joins(works) {
		return e.group(ctx, tx, op, works)
	}
	if len(works) == 1 {
		r, err := e.q.Enqueue(ctx, db, onceqJob(works[0], op))
		return []answer{onceqAnswer(works[0], r)}, err
	}
	jobs := make([]onceq.Job, len(works))
	for i, w := range works {
		jobs[i] = onceqJob(w, op)
	}
	results, err := e.q.EnqueueMany(ctx, db, jobs)
	for i, r := range results {
		answers = append(answers, onceqAnswer(works[i], r))
	}
	return answers, err
}

func (e onceqEnqueuer) pipeline(ctx context.Context, op, first string, works []work) (answers []answer, err error) {
	batch := &pgx.Batch{}
	batch.Queue("begin")
	batch.Queue(first)
	pending := make([]*onceq.Pending, len(works))
	for i, w := range works {
		if pending[i], err = e.q.EnqueueInBatch(batch, onceqJob(w, op)); err != nil {
			return nil, err
		}
	}
	batch.Queue("commit")
	if err := e.pool.SendBatch(ctx, batch).Close(); err != nil {
		return nil, err
	}
	for i, p := range pending {
		// Ask now which job a duplicate found. If that fails, the answer is missing, but the commit has happened.
		if r, err := p.Result(ctx, e.pool); err == nil {
			answers = append(answers, onceqAnswer(works[i], r))
		}
	}
	return answers, nil
}

func (e onceqEnqueuer) cancel(ctx context.Context, id int64) error {
	if rand.IntN(2) == 0 {
		if _, _, err := onceqops.New(e.q).CancelGroup(ctx, e.pool, id); !errors.Is(err, onceq.ErrNotFound) {
			return err
		}
	}
	_, err := e.q.Cancel(ctx, e.pool, id)
	return err
}

// onceqWorker is a worker process.
type onceqWorker struct {
	*child
	pool   *pgxpool.Pool
	q      *onceq.Queue
	events *journal
}

func (onceqSystem) worker(ctx context.Context, c *child, pool *pgxpool.Pool) error {
	events, err := openJournal(c.Dir, "events-"+c.Slot)
	if err != nil {
		return err
	}
	w := &onceqWorker{child: c, pool: pool, events: events}
	if w.q, err = onceq.New(pool, &onceq.Config{Logger: slog.New(refusals{events}), Hook: onceq.HookFunc(w.event)}); err != nil {
		return err
	}
	queues := map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 6}, movedQueue: {Concurrency: 2}}
	also, without := []string{movedQueue}, []string(nil)
	handlers := []onceq.Handler{
		w.kind(formTx).HandleTx(w.tx),
		w.kind(formRecur).HandleTx(w.tx),
		w.kind(formLate).HandleTx(w.late),
		w.kind(formBatch).HandleBatch(10, w.batch),
		w.kind(formOwn).Handle(w.own),
		w.kind(formLine).HandleTx(w.tx),
		w.kind(formPair).HandleBatch(10, w.batch),
		w.kind(formPass).Handle(w.own),
		w.kind(formHalt).Handle(w.own),
		w.kind(formCap).Handle(w.own),
		w.kind(formTurn).HandleTx(w.tx),
		w.kind(formRate).Handle(w.rated),
		w.kind(formFlow).Handle(w.flow),
		w.kind(formJoin).HandleTx(w.join),
		w.kind(formPart).HandleTx(w.part),
		w.kind(formAgain).Handle(w.again),
		w.kind(formAsk).Handle(w.ask),
		w.kind(formHold).Handle(w.hold),
		w.kind(formStop).Handle(w.hold),
	}
	if c.Role == roleFrail {
		queues = map[string]onceq.QueueConfig{frailQueue: {Concurrency: 8}}
		also, without = []string{frailQueue}, []string{onceq.DefaultQueue}
		handlers = []onceq.Handler{w.kind(formFrail).Handle(w.own), w.kind(formPoison).Handle(w.poison)}
	}
	for i, h := range handlers {
		handlers[i] = h.Wrap(w.tell)
	}
	var cron *onceqcron.Scheduler
	if c.Role != roleFrail && len(chosen([]string{formTick}, c.Forms)) > 0 {
		if cron, err = scheduler(w.q, pool, strings.HasSuffix(c.Slot, "2") || strings.HasSuffix(c.Slot, "4")); err != nil {
			return err
		}
		handlers = append(handlers, append(cron.Handlers(), w.kind(formTick).HandleTx(w.tx).Wrap(w.tell))...)
	}
	runner, err := onceq.NewWorker(w.q, onceq.WorkerConfig{
		Lease:           lease,
		Queues:          queues,
		Also:            also,
		Without:         without,
		ShutdownTimeout: 5 * time.Second,
	}, handlers...)
	if err != nil {
		return err
	}
	if c.Role == roleFrail {
		return runner.Run(ctx)
	}
	reaper, err := onceq.NewReaper(w.q, onceq.ReaperConfig{Every: time.Second, Grace: time.Second})
	if err != nil {
		return err
	}
	var beside sync.WaitGroup
	defer beside.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	beside.Go(func() { _ = reaper.Run(ctx) })
	beside.Go(func() { w.hand(ctx) })
	if cron != nil {
		beside.Go(func() { register(ctx, cron) })
	}
	if len(chosen([]string{formFlow}, c.Forms)) > 0 {
		beside.Go(func() { w.emit(ctx) })
	}
	for mistake, sql := range map[string]string{brokenLane: admitOutOfTurn, brokenLimit: admitBeyond, brokenEvent: emitOver, brokenAwait: forgetAnswers} {
		if w.Broken == mistake {
			beside.Go(func() {
				for pause(ctx, 20*time.Millisecond) {
					_, _ = pool.Exec(ctx, sql)
				}
			})
		}
	}
	if w.Broken == brokenTick {
		beside.Go(func() {
			for pause(ctx, 3*time.Second) {
				_, _ = pool.Exec(ctx, fireTwice)
			}
		})
	}
	return runner.Run(ctx)
}

func kind(form string) onceq.Kind[work] {
	k := onceq.Kind[work]{
		Name: form, Timeout: 10 * time.Second, MaxLost: 1000, Keep: onceq.Forever,
		Backoff: func(attempt int, _ error) time.Duration { return backoff(attempt) },
	}
	switch form {
	case formTx, formLate, formAgain, formAsk, formStop, formLine, formPass, formTurn, formRate, formTick, formPart: // no history, as in most applications
		k.Keep = 0
	case formFrail, formPoison:
		k.MaxLost = 0
	}
	return k
}

// kind is the kind of a form. Its Backoff panics now and then, but only where DefaultBackoff, which then counts, is short.
func (w *onceqWorker) kind(form string) onceq.Kind[work] {
	k := kind(form)
	k.Backoff = func(attempt int, _ error) time.Duration {
		if attempt == 1 {
			w.events.stumble("a Backoff", 4)
		}
		return backoff(attempt)
	}
	return k
}

// event is a note that shows that the faults have an effect, and what handlers and the log say.
type event struct {
	Type  string `json:"type"`
	Job   int64  `json:"job,omitempty"`
	Token int64  `json:"token,omitempty"`
	Text  string `json:"text,omitempty"`
	At    int64  `json:"at,omitempty"` // microseconds since 1970
}

// These types of events are not the library's.
const (
	toldDone    = "handler done" // its latest call under the token returned no error
	toldFailed  = "handler failed"
	saidRefused = "refused: read only" // a statement of the library's own
)

// stumble notes a panic and panics, once in n calls.
func (j *journal) stumble(where string, n int) {
	if rand.IntN(n) == 0 {
		j.write(event{Type: "panic of " + where})
		panic("a mistake of the application, in " + where)
	}
}

// tell notes what a handler returned, or that it panicked: some do so before they have done anything, some after all is done.
func (w *onceqWorker) tell(ctx context.Context, leases []*onceq.Lease, next func(context.Context) error) (err error) {
	e := event{Type: toldFailed, Text: "panic"}
	defer func() {
		for _, l := range leases {
			e.Job, e.Token = identity(l.ID, l.CreatedAt), l.Token
			w.events.write(e)
		}
	}()
	w.events.stumble("a handler", 50)
	if err = next(ctx); err == nil {
		w.events.stumble("a handler", 50)
		e = event{Type: toldDone}
	} else {
		e.Text = err.Error()
	}
	return err
}

// readOnly reports whether Postgres refused a statement because its transaction is read-only.
func readOnly(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "25006"
}

// refusals is a log handler that looks for one thing: a statement of the library's own was refused because transactions are
// read-only by default.
type refusals struct{ events *journal }

func (refusals) Enabled(context.Context, slog.Level) bool { return true }
func (r refusals) WithAttrs([]slog.Attr) slog.Handler     { return r }
func (r refusals) WithGroup(string) slog.Handler          { return r }

func (r refusals) Handle(_ context.Context, record slog.Record) error {
	record.Attrs(func(a slog.Attr) bool {
		// The error of an event is what the handler met, which may be in a transaction of its own.
		if err, ok := a.Value.Any().(error); ok && readOnly(err) && record.Level >= slog.LevelWarn {
			r.events.write(event{Type: saidRefused, Text: record.Message + ": " + err.Error()})
		}
		return true
	})
	return nil
}

func (w *onceqWorker) event(_ context.Context, e onceq.Event) {
	switch e.Type {
	case onceq.EventStale, onceq.EventLeaseLost, onceq.EventReplayed, onceq.EventUncertain, onceq.EventHeld:
		w.events.write(event{Type: string(e.Type)})
	}
	w.events.stumble("a Hook", 200)
}

// trouble is what the work's fate does to a run before anything is done.
func trouble(l *onceq.Lease, p work) error {
	if (p.Form == formHalt || p.Form == formPart) && p.hopeless() && rand.IntN(2) == 0 {
		return nil // so that it can be done when somebody redrives it
	}
	switch p.fate() {
	case fateFatal:
		return onceq.Fatal(errors.New("this cannot be done"))
	case fateAlien:
		return onceq.Fatal(fmt.Errorf("this cannot be done: %w", &pgconn.PgError{Severity: "ERROR", Code: "40001", Message: "of another database"}))
	case fateFlaky:
		if l.Attempt == 1 {
			return errors.New("not at the first attempt")
		}
	case fateLater:
		if rand.IntN(2) == 0 {
			return onceq.Snooze(20 * time.Millisecond)
		}
	}
	return nil
}

const writeEffect = `insert into torture.ledger (work, form, job, token, nonce) values ($1, $2, $3, $4, $5)`

// effect writes the effect of a job and sets the job's result.
func effect(ctx context.Context, db onceq.DB, l *onceq.Lease, p work, nonce string) error {
	if err := l.SetResult(nonce); err != nil {
		return err
	}
	_, err := db.Exec(ctx, writeEffect, p.Name, p.Form, identity(l.ID, l.CreatedAt), l.Token, nonce)
	return err
}

func nonce() string { return fmt.Sprintf("%016x", rand.Uint64()) }

func (w *onceqWorker) tx(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p work) error {
	if err := trouble(l, p); err != nil {
		return err
	}
	if err := effect(ctx, tx, l, p, nonce()); err != nil {
		return err
	}
	p.take(ctx)
	return nil
}

func (w *onceqWorker) batch(ctx context.Context, tx pgx.Tx, items []onceq.Item[work]) error {
	for _, item := range items {
		if err := trouble(item.Lease, item.Payload); err != nil {
			return err
		}
		if err := effect(ctx, tx, item.Lease, item.Payload, nonce()); err != nil {
			return err
		}
	}
	items[0].Payload.take(ctx)
	return nil
}

// These mark effects. behind: a handler committed it and then failed. stray: it must not be there, because it was written
// through a transaction that was over.
const (
	behind = "behind "
	stray  = "stray "
)

// late commits the worker's transaction in its first attempt, in ways in which applications do so without knowing, and then
// fails. Its next attempt does the work.
func (w *onceqWorker) late(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p work) error {
	if l.Attempt > 1 || p.hopeless() {
		return w.astray(ctx, tx, l, p)
	}
	n := behind + nonce()
	write := fmt.Sprintf(`insert into torture.ledger (work, form, job, token, nonce) values ('%s', '%s', %d, %d, '%s')`,
		p.Name, p.Form, identity(l.ID, l.CreatedAt), l.Token, n)
	var err error
	switch rand.IntN(4) {
	case 0: // a helper that takes a connection
		err = pgx.BeginFunc(ctx, tx.Conn(), func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, write)
			return err
		})
	case 1: // a script
		_, err = tx.Exec(ctx, write+"; commit")
	case 2:
		if _, err = tx.Exec(ctx, write); err == nil {
			_, err = tx.Conn().Exec(ctx, "commit")
		}
	case 3: // and goes on in another transaction
		_, err = tx.Exec(ctx, write+"; commit; begin; select 1")
	}
	p.take(ctx)
	return errors.Join(errors.New("after a commit"), err)
}

// astray does its work and also uses the transaction when that is over: through a savepoint that was rolled back, and after
// the handler has returned.
func (w *onceqWorker) astray(ctx context.Context, tx pgx.Tx, l *onceq.Lease, p work) error {
	write := func(ctx context.Context, tx pgx.Tx) {
		_, _ = tx.Exec(ctx, writeEffect, p.Name, p.Form, identity(l.ID, l.CreatedAt), l.Token, stray+nonce())
	}
	if inner, err := tx.Begin(ctx); err == nil && inner.Rollback(ctx) == nil {
		write(ctx, inner)
	}
	go func() {
		<-ctx.Done() // the transaction is over too
		write(context.WithoutCancel(ctx), tx)
	}()
	return w.tx(ctx, tx, l, p)
}

// poison ends its process.
func (w *onceqWorker) poison(ctx context.Context, _ *onceq.Lease, _ work) error {
	pause(ctx, 300*time.Millisecond)
	if ctx.Err() == nil {
		os.Exit(poisoned)
	}
	return ctx.Err()
}

// stubborn returns a context that does not end with the lease: the database decides whether the lease still holds.
func stubborn(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
}

func (w *onceqWorker) own(ctx context.Context, l *onceq.Lease, p work) error {
	if err := trouble(l, p); err != nil {
		return err
	}
	p.take(ctx)
	if w.Broken == brokenToken { // so that much is under way when a process is frozen: what has not begun is given up then
		pause(ctx, lease/8)
	}
	return w.finish(ctx, l, p, nonce())
}

// completeWithoutToken is a mistake that the checker must find: everybody may complete the job.
const (
	deleteWithoutToken   = `delete from onceq.jobs where id = $1`
	completeWithoutToken = `update onceq.job_fences set state = 3, finished_at = now(), result = to_jsonb($2::text) where class = 0 and job_id = $1`
)

func (w *onceqWorker) finish(ctx context.Context, l *onceq.Lease, p work, nonce string) error {
	ctx, cancel := stubborn(ctx)
	defer cancel()
	var options pgx.TxOptions
	if (p.Form == formPass || p.Form == formCap) && rand.IntN(2) == 0 { // such a completion leaves the next job to a promoter
		options.IsoLevel = pgx.RepeatableRead
	}
	return pgx.BeginTxFunc(ctx, w.pool, options, func(tx pgx.Tx) error {
		if err := effect(ctx, tx, l, p, nonce); err != nil {
			return err
		}
		if w.Broken == brokenToken {
			_, err := tx.Exec(ctx, deleteWithoutToken, l.ID)
			if err == nil {
				_, err = tx.Exec(ctx, completeWithoutToken, l.ID, nonce)
			}
			return err
		}
		return l.Complete(ctx, tx)
	})
}

// hand is a claim loop that is driven by hand.
func (w *onceqWorker) hand(ctx context.Context) {
	for ctx.Err() == nil {
		leases, err := w.q.Claim(ctx, onceq.ClaimOptions{Queue: handQueue, Limit: 1 + rand.IntN(3), Lease: lease, MaxLost: 1000})
		if err != nil || len(leases) == 0 {
			pause(ctx, 50*time.Millisecond+rand.N(100*time.Millisecond))
			continue
		}
		for _, l := range leases {
			one, cancel := stubborn(ctx)
			if err := w.handOne(one, l); err != nil && !errors.Is(err, onceq.ErrLeaseLost) {
				_ = l.Fail(one, err)
			}
			cancel()
		}
	}
}

func (w *onceqWorker) handOne(ctx context.Context, l *onceq.Lease) error {
	var p work
	if err := json.Unmarshal(l.Payload, &p); err != nil {
		return err
	}
	if err := trouble(l, p); err != nil {
		return err
	}
	if rand.IntN(2) == 0 {
		if err := l.Extend(ctx, 3*lease); err != nil {
			return err
		}
	}
	p.take(ctx) // a slow job loses its lease, because nobody extends it
	n := nonce()
	if rand.IntN(2) == 0 {
		return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
			if err := effect(ctx, tx, l, p, n); err != nil {
				return err
			}
			return l.Complete(ctx, tx)
		})
	}
	if err := l.SetResult(n); err != nil {
		return err
	}
	batch := &pgx.Batch{}
	batch.Queue("begin")
	batch.Queue(writeEffect, p.Name, p.Form, identity(l.ID, l.CreatedAt), l.Token, n)
	if err := l.CompleteInBatch(batch); err != nil {
		return err
	}
	batch.Queue("commit")
	err := w.pool.SendBatch(ctx, batch).Close()
	if onceq.LeaseLost(err) {
		return onceq.ErrLeaseLost
	}
	return err
}

// once calls the provider through Once and returns the receipt.
func (w *onceqWorker) once(ctx context.Context, l *onceq.Lease, p work, policy onceq.Policy) (string, error) {
	if err := trouble(l, p); err != nil {
		return "", err
	}
	p.take(ctx)
	c := dial(ctx, w.Provider)
	defer c.close()
	receipt, err := onceq.Once(ctx, l, "call", func(ctx context.Context, key string) (string, error) {
		if w.Broken == brokenKey {
			key += fmt.Sprint("/", l.Token)
		}
		cancel := p.Form == formStop && rand.IntN(3) > 0
		before := rand.IntN(2) == 0
		if cancel && before {
			w.cancel(ctx, l)
		}
		receipt, err := c.do(ctx, key, order{Work: p.Name, Form: p.Form, Job: identity(l.ID, l.CreatedAt), Token: l.Token})
		if errors.Is(err, errRefused) {
			err = onceq.NotApplied(err)
		}
		if cancel && !before {
			w.cancel(ctx, l)
		}
		w.events.stumble("a call", 50)
		return receipt, err
	}, onceq.EffectTimeout(2500*time.Millisecond), onceq.OnUncertain(policy))
	if readOnly(err) { // no statement in there is anybody else's
		w.events.write(event{Type: saidRefused, Text: err.Error()})
	}
	return receipt, err
}

// cancel cancels a job from within its effect. Every second time it waits until its handler is told.
func (w *onceqWorker) cancel(ctx context.Context, l *onceq.Lease) {
	if _, err := w.q.Cancel(ctx, w.pool, l.ID); err == nil && rand.IntN(2) == 0 {
		<-ctx.Done()
	}
}

func (w *onceqWorker) again(ctx context.Context, l *onceq.Lease, p work) error {
	receipt, err := w.once(ctx, l, p, onceq.RunAgain(time.Hour))
	if err != nil {
		return err
	}
	return w.finish(ctx, l, p, receipt)
}

func (w *onceqWorker) ask(ctx context.Context, l *onceq.Lease, p work) error {
	receipt, err := w.once(ctx, l, p, onceq.Ask(func(ctx context.Context, key string) (any, bool, error) {
		receipt, applied, err := ask(ctx, w.Provider, key)
		return receipt, applied, err
	}))
	if err != nil {
		return err
	}
	return l.SetResult(receipt)
}

func (w *onceqWorker) hold(ctx context.Context, l *onceq.Lease, p work) error {
	receipt, err := w.once(ctx, l, p, onceq.Hold())
	if err != nil {
		return err
	}
	return l.SetResult(receipt)
}

func (onceqSystem) live(ctx context.Context, pool *pgxpool.Pool) (n int, err error) {
	if _, err := pool.Exec(ctx, forgetTwins); err != nil { // a Reaper lets go on what waits for them
		return 0, err
	}
	err = pool.QueryRow(ctx, `
select (select count(*) from onceq.jobs where queue <> 'onceqcron') + (select count(*) from onceq.job_waits)
     + (select count(*) from onceq.schedules where paused_at is null)`).Scan(&n)
	return n, err
}

// settle decides about effects that need it, for every second job that has such effects, by what the provider has written
// down. The other jobs stay as they are.
func (onceqSystem) settle(ctx context.Context, pool *pgxpool.Pool, calls []call) (int, error) {
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return 0, err
	}
	receipts := map[int64]string{}
	for _, c := range calls {
		if c.What == "applied" {
			receipts[c.Job] = c.Receipt
		}
	}
	n := 0
	filter := onceqops.Filter{States: []onceq.State{onceq.StateHeld, onceq.StateCancelled, onceq.StateDead}, Limit: 1000}
	for {
		page, err := onceqops.New(q).List(ctx, pool, filter)
		if err != nil || len(page) == 0 {
			return n, err
		}
		filter.After = page[len(page)-1].ID
		for i, j := range page {
			if i%2 == 1 || !outside(j.Kind) {
				continue
			}
			effects, err := onceqops.New(q).Effects(ctx, pool, j.ID)
			if err != nil {
				return n, err
			}
			for _, e := range effects {
				if e.State != "uncertain" && e.State != "held" {
					continue
				}
				decision := onceq.NeverApplied()
				if receipt, applied := receipts[identity(j.ID, j.CreatedAt)]; applied {
					decision = onceq.Applied(receipt)
				}
				if err := onceqops.New(q).Resolve(ctx, pool, j.ID, e.Name, decision); err != nil {
					return n, err
				}
				n++
			}
		}
	}
}

const (
	endColumns = `torture.identity(id, created_at) as job, coalesce(key, '') as key, payload->>'work' as work, kind,
         case state when 5 then 'completed' when 6 then 'dead' when 7 then 'cancelled' when 8 then 'held' else 'state ' || state end as state,
         coalesce(result #>> '{}', '') as result, lost, false as gone`
	pastEnds = `select ` + endColumns + `
    from onceq.job_history`
)

// keepTwins keeps for the checker what the history loses when two jobs with one id end: the older record, if that job is completed, or
// else that of the new one.
const keepTwins = `
create function torture.keep_twin() returns trigger language plpgsql as $$
declare
  other smallint := (select state from onceq.job_history h where h.id = new.id and h.created_at <> new.created_at);
begin
  if other = 5 then
    insert into torture.twins ` + pastEnds + ` where job_history.id = new.id;
  elsif other is not null and new.state = 5 then
    insert into torture.twins select ` + endColumns + ` from (select new.*) h;
  end if;
  return new;
end $$;
create trigger keep_twin before insert on onceq.job_history for each row execute function torture.keep_twin();`

// After the sequence was set back, a new job may get the id of a job in the history. forgetTwins removes that one from the
// history and keeps it for the checker. This is what a person has to do: the new job cannot end before. If the old one was a dead member
// of a group, that waits for the new one as long as there is a record of it, so that one is forgotten too.
const forgetTwins = `
with twins as (insert into torture.twins ` + pastEnds + `
  where id in (select id from onceq.jobs union all select id from onceq.job_waits
               union all select m.job_id from onceq.job_members m join torture.twins t on t.job >> 36 = m.job_id and t.state = 'dead' where m.told and m.state = 6)
 returning job)
delete from onceq.job_history where torture.identity(id, created_at) in (select job from twins)`

// onceqEnds returns the end of each job. A job of a loop driven by hand leaves no history; the audit trail says that it is
// gone, whether it has a key or not.
const onceqEnds = `
with h as (
  ` + pastEnds + ` where queue <> 'onceqcron' -- those that ticked for schedules that were removed
  union all
  select torture.identity(id, created_at), coalesce(key, ''), payload->>'work', kind, 'unfinished', '', lost, false from onceq.jobs where queue <> 'onceqcron'
  union all
  select torture.identity(id, created_at), coalesce(key, ''), payload->>'work', kind, 'unfinished', '', lost, false from onceq.job_waits
  union -- a record may be there in two ways
  select * from torture.twins where work is not null
)
select * from h
union all
select t.job, t.key, t.work, split_part(t.work, '/', 1), 'completed', coalesce(f.result #>> '{}', ''), 0, true
  from (select distinct job, key, work from torture.trail where what = 'gone') t
  left join onceq.job_fences f on f.class = 0 and f.job_id = t.job >> 36 and f.key = t.key and f.state = 3
 where not exists (select from h where h.job = t.job)`

// onceqDoubts are effects that wait for somebody's decision although their jobs are nowhere. A job that forgetTwins removed
// is known, although another job has its id now: the effect's fingerprint contains the time at which its job was created.
const onceqDoubts = `
select f.key, f.state::int from onceq.job_fences f
 where f.class = 3 and f.state in (1, 2, 6)
   and not exists (select from onceq.jobs j where j.id = f.job_id)
   and not exists (select from onceq.job_history h where h.id = f.job_id)
   and not exists (select from torture.twins t
                    where t.job = (f.job_id << 36) | (('x' || encode(f.fingerprint, 'hex'))::bit(64)::bigint & ((1::bigint << 36) - 1)))
 order by f.key`

func (onceqSystem) leftovers(ctx context.Context, pool *pgxpool.Pool) (doubts []doubt, tables string, err error) {
	rows, err := pool.Query(ctx, onceqDoubts)
	if err != nil {
		return nil, "", err
	}
	if doubts, err = pgx.CollectRows(rows, pgx.RowToStructByPos[doubt]); err != nil {
		return nil, "", err
	}
	// A sequence that was set back leaves these violations: effects of a job that was accepted before, keys of jobs
	// that had to leave the history, and members of groups that are not the jobs with their ids any more.
	excused := []string{`, below its job `}
	if rows, err = pool.Query(ctx, `
select format(', job %s is not so in job_history', job >> 36) from torture.twins
union all
select unnest(array[format('job %s, a member of group', id), format(', a member of group %s,', id)])
  from (select job >> 36 as id from torture.trail where what = 'accepted' group by 1 having count(distinct job) > 1) t`); err != nil {
		return nil, "", err
	}
	twins, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, "", err
	}
	excused = append(excused, twins...)
	if err := queuetest.Invariants(ctx, pool, "onceq"); err != nil {
		for line := range strings.Lines(err.Error()) {
			if strings.HasPrefix(line, "\t") && !slices.ContainsFunc(excused, func(e string) bool { return strings.Contains(line, e) }) {
				tables += line
			}
		}
	}
	return doubts, tables, nil
}

// setIDsBack makes the sequence of ids forget its latest values, as a logical replica or a restore does. A little later it
// does what ErrIDTaken says.
func setIDsBack(ctx context.Context, conn *pgx.Conn, f fault) error {
	const (
		mark   = `insert into torture.trail (what, job, key, work) values ($1, 0, '', '')`
		marked = `insert into torture.fence_trail (what, key, token, since, finished, result) values ($1, '', 0, 0, 0, '')`
		back   = `select setval('onceq.ids', greatest(1, (last_value * $1::float8)::bigint)) from onceq.ids`
		repair = `
select setval('onceq.ids', greatest((select max(id) from onceq.jobs), (select max(id) from onceq.job_waits), (select max(id) from onceq.job_history),
                                    (select max(token >> 20) from onceq.job_fences)))`
	)
	tell := func() error {
		_, err := conn.Exec(ctx, mark, setBack)
		if err == nil {
			_, err = conn.Exec(ctx, marked, setBack)
		}
		return err
	}
	if err := tell(); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, back, f.Force); err != nil {
		return err
	}
	if err := tell(); err != nil {
		return err
	}
	pause(ctx, f.seconds(1, 3))
	_, err := conn.Exec(ctx, repair)
	if err == nil {
		_, err = conn.Exec(ctx, forgetTwins)
	}
	return err
}

func (onceqSystem) ends(ctx context.Context, pool *pgxpool.Pool) ([]end, error) {
	rows, err := pool.Query(ctx, onceqEnds)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[end])
}
