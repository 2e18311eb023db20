package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/migrations"
)

type onceqSystem struct{}

// handQueue is where the jobs of the claim loops by hand are.
const handQueue = "hand"

// onceqTrail writes what happens to jobs. A row of the trail takes its number while its transaction holds the job's
// lock, so that for one job, and for the jobs of one key one after the other, numbers grow in the order of events.
const onceqTrail = `
create function torture.trail_onceq() returns trigger language plpgsql as $$
begin
  if tg_op = 'INSERT' then
    insert into torture.trail (what, job, key, work, op)
    values ('accepted', new.id, coalesce(new.key, ''), new.payload->>'work', coalesce(new.metadata->>'op', ''));
  elsif tg_op = 'UPDATE' then
    insert into torture.trail (what, job, key, work, token)
    values ('claimed', new.id, coalesce(new.key, ''), new.payload->>'work', new.id << 20 | new.claims);
  else
    insert into torture.trail (what, job, key, work) values ('gone', old.id, coalesce(old.key, ''), old.payload->>'work');
  end if;
  return null;
end $$;
create trigger trail after insert or delete on onceq.jobs for each row execute function torture.trail_onceq();
create trigger trail_claims after update on onceq.jobs for each row
  when (new.claims > old.claims) execute function torture.trail_onceq();`

func (onceqSystem) setup(ctx context.Context, conn *pgx.Conn) error {
	if err := migrations.Up(ctx, conn, "onceq"); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, onceqTrail+fenceTrail)
	return err
}

func onceqJob(w work, op string) onceq.Job {
	j := onceq.Job{
		Kind: w.Form, Payload: w, Key: w.key(), Window: onceq.Forever, MaxAttempts: 1000, Metadata: map[string]string{"op": op},
	}
	switch w.Form {
	case formHand:
		j.Queue = handQueue
	case formRecur:
		j.Window = onceq.UntilFinished
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
	return answer{Work: w.Name, ID: r.ID, Duplicate: r.Duplicate, Completed: r.State == onceq.Completed, Output: r.Output}
}

func (e onceqEnqueuer) enqueue(ctx context.Context, tx pgx.Tx, op string, works []work) (answers []answer, err error) {
	var db onceq.DB = e.pool
	if tx != nil {
		db = tx
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
		// What became of a duplicate is asked now. Where that fails the answer is missing, and the commit is none the less.
		if r, err := p.Result(ctx, e.pool); err == nil {
			answers = append(answers, onceqAnswer(works[i], r))
		}
	}
	return answers, nil
}

func (e onceqEnqueuer) cancel(ctx context.Context, id int64) error {
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
	if w.q, err = onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler), Hook: onceq.HookFunc(w.event)}); err != nil {
		return err
	}
	runner, err := onceq.NewWorker(w.q, onceq.WorkerConfig{
		Lease:           lease,
		Queues:          map[string]onceq.QueueConfig{onceq.DefaultQueue: {Concurrency: 8}},
		ShutdownTimeout: 5 * time.Second,
	},
		kind(formTx).HandleTx(w.tx),
		kind(formRecur).HandleTx(w.tx),
		kind(formBatch).HandleBatch(10, w.batch),
		kind(formOwn).Handle(w.own),
		kind(formAgain).Handle(w.again),
		kind(formAsk).Handle(w.ask),
		kind(formHold).Handle(w.hold),
	)
	if err != nil {
		return err
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
	return runner.Run(ctx)
}

func kind(form string) *onceq.Kind[work] {
	return &onceq.Kind[work]{
		Name: form, Timeout: 10 * time.Second, MaxLost: 1000, Keep: onceq.Forever,
		Backoff: func(attempt int, _ error) time.Duration { return backoff(attempt) },
	}
}

// event notes what shows that the faults bite.
type event struct {
	Type string `json:"type"`
	Job  int64  `json:"job"`
}

func (w *onceqWorker) event(_ context.Context, e onceq.Event) {
	switch e.Type {
	case onceq.EventStale, onceq.EventLeaseLost, onceq.EventReplayed, onceq.EventUncertain, onceq.EventHeld:
		w.events.write(event{string(e.Type), e.JobID})
	}
}

// trouble is what the work's fate makes of a run, before anything has been done.
func trouble(l *onceq.Lease, p work) error {
	switch p.fate() {
	case fateFatal:
		return onceq.Fatal(errors.New("this cannot be done"))
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

// effect writes the effect of a job, and sets its result.
func effect(ctx context.Context, db onceq.DB, l *onceq.Lease, p work, nonce string) error {
	if err := l.SetResult(nonce); err != nil {
		return err
	}
	_, err := db.Exec(ctx, writeEffect, p.Name, p.Form, l.ID, l.Token, nonce)
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

// stubborn gives a context that does not end with the lease: whether that still holds is for the database to say.
func stubborn(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
}

func (w *onceqWorker) own(ctx context.Context, l *onceq.Lease, p work) error {
	if err := trouble(l, p); err != nil {
		return err
	}
	p.take(ctx)
	return w.finish(ctx, l, p, nonce())
}

// completeWithoutToken is the mistake that the checker must find: whoever says so completes the job.
const (
	deleteWithoutToken   = `delete from onceq.jobs where id = $1`
	completeWithoutToken = `update onceq.job_fences set state = 3, finished_at = now(), result = to_jsonb($2::text) where class = 0 and job_id = $1`
)

func (w *onceqWorker) finish(ctx context.Context, l *onceq.Lease, p work, nonce string) error {
	ctx, cancel := stubborn(ctx)
	defer cancel()
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
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

// hand is a claim loop by hand.
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
	p.take(ctx) // slow ones lose a lease that nobody has extended
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
	batch.Queue(writeEffect, p.Name, p.Form, l.ID, l.Token, n)
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

// once calls the provider through Once and gives the receipt.
func (w *onceqWorker) once(ctx context.Context, l *onceq.Lease, p work, policy onceq.Policy) (string, error) {
	if err := trouble(l, p); err != nil {
		return "", err
	}
	p.take(ctx)
	c := dial(ctx, w.Provider)
	defer c.close()
	return onceq.Once(ctx, l, "call", func(ctx context.Context, key string) (string, error) {
		if w.Broken == brokenKey {
			key += fmt.Sprint("/", l.Token)
		}
		receipt, err := c.do(ctx, key, order{Work: p.Name, Form: p.Form, Job: l.ID, Token: l.Token})
		if errors.Is(err, errRefused) {
			err = onceq.NotApplied(err)
		}
		return receipt, err
	}, onceq.EffectTimeout(2500*time.Millisecond), onceq.OnUncertain(policy))
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
	err = pool.QueryRow(ctx, `select count(*) from onceq.jobs`).Scan(&n)
	return n, err
}

// settle resolves every second held job, by what the provider has written down. The others stay held.
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
	held, err := q.List(ctx, pool, onceq.Filter{States: []onceq.State{onceq.Held}, Limit: 1000})
	if err != nil {
		return 0, err
	}
	n := 0
	for i, j := range held {
		if i%2 == 1 {
			continue
		}
		decision := onceq.NeverApplied()
		if receipt, applied := receipts[j.ID]; applied {
			decision = onceq.Applied(receipt)
		}
		if err := q.Resolve(ctx, pool, j.ID, "call", decision); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// onceqEnds: a job whose loop was driven by hand leaves no history; whether it has a key or not, the trail says that it
// is gone.
const onceqEnds = `
select id, coalesce(key, ''), payload->>'work', kind,
       case state when 5 then 'completed' when 6 then 'dead' when 7 then 'cancelled' when 8 then 'held' else 'state ' || state end,
       coalesce(result #>> '{}', ''), lost
  from onceq.job_history
union all
select id, coalesce(key, ''), payload->>'work', kind, 'unfinished', '', lost from onceq.jobs
union all
select t.job, t.key, t.work, split_part(t.work, '/', 1), 'completed', coalesce(f.result #>> '{}', ''), 0
  from (select distinct job, key, work from torture.trail where what = 'gone') t
  left join onceq.job_fences f on f.class = 0 and f.job_id = t.job and f.state = 3
 where not exists (select from onceq.job_history h where h.id = t.job) and not exists (select from onceq.jobs j where j.id = t.job)`

func (onceqSystem) ends(ctx context.Context, pool *pgxpool.Pool) ([]end, error) {
	rows, err := pool.Query(ctx, onceqEnds)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[end])
}
