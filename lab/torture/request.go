package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// These are the forms of requests: work that an application does once outside jobs, to answer somebody.
const (
	formDoAgain = "do-again" // Do, with a call to the provider that deduplicates
	formDoAsk   = "do-ask"   // … to one that can be asked
	formDoHold  = "do-hold"  // … to one that can do neither
	formFence   = "fence"    // Fence.Claim, and a transaction that ends with Complete
	formWhole   = "whole"    // the claim, the effect and its completion in one transaction
)

var requestForms = []string{formDoAgain, formDoAsk, formDoHold, formFence, formWhole}

// orderForms says how the provider treats the calls of a form.
var orderForms = map[string]string{formDoAgain: formAgain, formDoAsk: formAsk, formDoHold: formHold}

// shortWindow is the window of keys that are used again and again. All other windows last for ever.
const shortWindow = 2 * time.Second

// formOf returns the form of a key.
func formOf(key string) string {
	form, _, _ := strings.Cut(key, "/")
	return form
}

// useOf names one use of a key, in the place of a job's identity. It is the time of the first intent as a negative number.
// A token would not do, because tokens repeat after the sequence was set back.
func useOf(c *onceq.FenceLease) int64 { return -c.Since.UnixMicro() }

func windowOf(key string) time.Duration {
	if strings.Contains(key, "/short/") {
		return shortWindow
	}
	return onceq.Forever
}

// request is a requester's line about one request and its answer.
type request struct {
	Key     string `json:"key"`
	Form    string `json:"form"`
	Outcome string `json:"outcome"`
	Result  string `json:"result,omitempty"`
	Err     string `json:"err,omitempty"`
}

// These are the outcomes of requests.
const (
	answered  = "done"      // with the result of this run
	replayed  = "replayed"  // with the result of an earlier run
	inFlight  = "in flight" // somebody else is working on it
	doubtful  = "uncertain"
	held      = "held"
	overtaken = "lease lost"
	undone    = "undone"    // on purpose: released, or rolled back
	unclear   = "no answer" // an error of the database: nobody knows
)

var outcomes = []string{answered, replayed, inFlight, doubtful, held, overtaken, undone, unclear}

// useStates are how uses of a key end.
var useStates = []string{"completed", "released", "held", "unfinished"}

// fenceTrail is the audit trail of requests' fences, as onceqTrail is of jobs. Its rows are numbered under the lock of the
// fence's row. since is the time of the first intent, which tells one use of a key from the next.
const fenceTrail = `
create function torture.trail_fences() returns trigger language plpgsql as $$
begin
  insert into torture.fence_trail (what, key, token, since, finished, result)
  select case when tg_op = 'DELETE' then 'gone' when tg_op = 'INSERT' or r.token <> old.token then 'claimed'
              when r.state = 2 then 'uncertain' when r.state = 3 then 'completed' when r.state = 5 then 'released'
              when r.state = 6 then 'held' else 'state ' || r.state end,
         r.key, r.token, extract(epoch from r.created_at) * 1000000, coalesce(extract(epoch from r.finished_at) * 1000000, 0),
         coalesce(r.result #>> '{}', '')
    from (select (case when tg_op = 'DELETE' then old else new end).*) r;
  return null;
end $$;
create trigger trail_claims after insert on onceq.job_fences for each row
  when (new.class in (1, 2)) execute function torture.trail_fences();
create trigger trail_changes after update on onceq.job_fences for each row
  when (new.class in (1, 2) and (new.token <> old.token or new.state <> old.state)) execute function torture.trail_fences();
create trigger trail_ends after delete on onceq.job_fences for each row
  when (old.class in (1, 2)) execute function torture.trail_fences();`

// requester is a process that answers requests, several at a time.
type requester struct {
	c      *child
	pool   *pgxpool.Pool
	q      *onceq.Queue
	events *journal
}

func newRequester(c *child, pool *pgxpool.Pool) (*requester, error) {
	events, err := openJournal(c.Dir, "events-"+c.Slot)
	if err != nil {
		return nil, err
	}
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(refusals{events}), Hook: onceq.HookFunc(func(context.Context, onceq.Event) { events.stumble("a Hook", 200) })})
	return &requester{c, pool, q, events}, err
}

// own notes an error by which Postgres refused a statement of the library's own.
func (r *requester) own(err error) error {
	if readOnly(err) {
		r.events.write(event{Type: saidRefused, Text: err.Error()})
	}
	return err
}

func runRequester(ctx context.Context, c *child, pool *pgxpool.Pool) error {
	r, err := newRequester(c, pool)
	if err != nil {
		return err
	}
	log, err := openJournal(c.Dir, "requests-"+c.Slot)
	if err != nil {
		return err
	}
	chosen := chosen(requestForms, c.Forms)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for pause(ctx, rand.N(40*time.Millisecond)) {
				patience := 8 * time.Second
				if rand.IntN(10) == 0 { // the client has gone away
					patience = rand.N(500 * time.Millisecond)
				}
				one, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
				log.write(r.answer(one, c.key(chosen[rand.IntN(len(chosen))])))
				cancel()
			}
		})
	}
	all.Wait()
	return nil
}

// key chooses a key of a form: one of a few that are used again, or one of those that everybody uses at this moment. The
// kernel says what moment it is, because this process may have a wrong clock.
func (c *child) key(form string) string {
	if form != formDoHold && rand.IntN(3) == 0 { // held ones stay held
		return fmt.Sprintf("%s/short/%d", form, rand.IntN(4))
	}
	var now syscall.Timeval
	_ = syscall.Gettimeofday(&now) // fails for a bad address
	return fmt.Sprintf("%s/%d", form, max(0, 2*(int64(now.Sec)-c.Began)-rand.Int64N(8)))
}

// answer does the work that a key names, unless it was done, and returns the answer.
func (r *requester) answer(ctx context.Context, key string) request {
	form := formOf(key)
	spec := onceq.FenceSpec{Key: key, Payload: key, Window: windowOf(key), Lease: lease, Policy: onceq.RunAgain(onceq.Forever)}
	q := request{Key: key, Form: form}
	var ran bool
	var err error
	switch form {
	case formFence:
		q.Result, ran, err = r.fence(ctx, spec)
	case formWhole:
		q.Result, ran, err = r.whole(ctx, spec)
	default:
		q.Result, ran, err = r.do(ctx, form, spec)
	}
	switch {
	case err == nil && ran:
		q.Outcome = answered
	case err == nil:
		q.Outcome = replayed
	case errors.Is(err, onceq.ErrInFlight):
		q.Outcome = inFlight
	case errors.Is(err, onceq.ErrLeaseLost):
		q.Outcome = overtaken
	case errors.Is(err, onceq.ErrUncertain):
		q.Outcome = doubtful
	case errors.Is(err, onceq.ErrHeld):
		q.Outcome = held
	case errors.Is(err, errUndone), errors.Is(err, errRefused):
		q.Outcome = undone
	default:
		q.Outcome = unclear
	}
	if err != nil {
		q.Err, q.Result = err.Error(), ""
	}
	return q
}

var errUndone = errors.New("on purpose")

// do is a request that calls the provider.
func (r *requester) do(ctx context.Context, form string, spec onceq.FenceSpec) (receipt string, ran bool, err error) {
	var c *client
	switch form {
	case formDoAsk:
		spec.Policy = onceq.Ask(func(ctx context.Context, key string) (any, bool, error) {
			receipt, applied, err := ask(ctx, r.c.Provider, key)
			return receipt, applied, err
		})
	case formDoHold:
		spec.Policy = onceq.Hold()
	}
	if form != formDoAgain { // before the intent: see provider
		c = dial(ctx, r.c.Provider)
		defer c.close()
	}
	receipt, err = onceq.Do(ctx, r.q, spec, func(ctx context.Context, claim *onceq.FenceLease) (string, error) {
		ran = true
		if c == nil {
			work{Name: spec.Key}.take(ctx) // sometimes longer than a lease, which is then extended
			c = dial(ctx, r.c.Provider)
			defer c.close()
		}
		key := claim.IdempotencyKey()
		if r.c.Broken == brokenKey {
			key += fmt.Sprint("/", claim.Token)
		}
		receipt, err := c.do(ctx, key, order{Work: spec.Key, Form: orderForms[form], Job: useOf(claim), Token: claim.Token})
		if errors.Is(err, errRefused) {
			err = onceq.NotApplied(err)
		}
		return receipt, err
	})
	return receipt, ran, r.own(err)
}

// blindComplete is completeWithoutToken for fences.
const blindComplete = `update onceq.job_fences set state = 3, finished_at = now(), result = to_jsonb($2::text), detail = null
	where class = 1 and scope = 'default' and key = $1 and state in (1, 2)`

// fence is a request that claims first, so that others see it, and commits its effect together with the completion.
func (r *requester) fence(ctx context.Context, spec onceq.FenceSpec) (result string, ran bool, err error) {
	f, err := r.q.Fence(spec)
	if err != nil {
		return "", false, err
	}
	c, err := f.Claim(ctx, nil)
	if err != nil {
		return "", false, r.own(err)
	}
	if c.Replayed {
		return result, false, json.Unmarshal(c.Result, &result)
	}
	switch rand.IntN(20) {
	case 0, 1:
		return "", false, errors.Join(errUndone, r.own(c.Release(ctx, nil)))
	case 2:
		return "", false, errors.Join(errUndone, r.own(c.Uncertain(ctx, nil, errUndone)))
	case 3, 4, 5, 6:
		if err := c.Extend(ctx, 3*lease); err != nil {
			return "", false, r.own(err)
		}
	}
	work{Name: spec.Key}.take(ctx)
	if rand.IntN(12) == 0 { // nobody extends this lease, so it is lost
		pause(ctx, lease+rand.N(lease))
	}
	ctx, cancel := stubborn(ctx)
	defer cancel()
	n := nonce()
	effect := []any{spec.Key, formFence, useOf(c), c.Token, n}
	if rand.IntN(2) == 0 {
		return n, true, pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, writeEffect, effect...); err != nil {
				return err
			}
			if r.c.Broken == brokenToken {
				_, err := tx.Exec(ctx, blindComplete, spec.Key, n)
				return err
			}
			if err := c.Complete(ctx, tx, n); err != nil || rand.IntN(10) > 0 {
				return err
			}
			return errUndone
		})
	}
	batch := &pgx.Batch{}
	batch.Queue("begin")
	batch.Queue(writeEffect, effect...)
	if r.c.Broken == brokenToken {
		batch.Queue(blindComplete, spec.Key, n)
	} else if err := c.CompleteInBatch(batch, n); err != nil {
		return "", false, err
	}
	batch.Queue("commit")
	if err = r.pool.SendBatch(ctx, batch).Close(); onceq.LeaseLost(err) {
		err = onceq.ErrLeaseLost
	}
	return n, true, err
}

// whole is a request in a single transaction. Another request for the same key waits for its end.
func (r *requester) whole(ctx context.Context, spec onceq.FenceSpec) (result string, ran bool, err error) {
	f, err := r.q.Fence(spec)
	if err != nil {
		return "", false, err
	}
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	err = pgx.BeginTxFunc(ctx, r.pool, pgx.TxOptions{IsoLevel: levels[rand.IntN(len(levels))]}, func(tx pgx.Tx) error {
		c, err := f.Claim(ctx, tx)
		if err != nil {
			return err
		}
		if c.Replayed {
			return json.Unmarshal(c.Result, &result)
		}
		result, ran = nonce(), true
		if _, err := tx.Exec(ctx, writeEffect, spec.Key, formWhole, useOf(c), c.Token, result); err != nil {
			return err
		}
		pause(ctx, rand.N(100*time.Millisecond))
		if err := c.Complete(ctx, tx, result); err != nil || rand.IntN(6) > 0 {
			return err
		}
		return errUndone // the caller changes its mind
	})
	return result, ran, err
}

// settleRequests asks again for everything that was left open, until it is done or waits for a person. Then a person
// decides about every second one, by what the provider has written down. It returns how many those are.
func settleRequests(ctx context.Context, c *child, pool *pgxpool.Pool, patience time.Duration) (int, error) {
	r, err := newRequester(c, pool)
	if err != nil {
		return 0, err
	}
	keys := func(states ...int16) ([]string, error) {
		rows, err := pool.Query(ctx, `select key from onceq.job_fences where class = 1 and state = any ($1) order by key`, states)
		if err != nil {
			return nil, err
		}
		return pgx.CollectRows(rows, pgx.RowTo[string])
	}
	for until := time.Now().Add(patience); time.Now().Before(until) && ctx.Err() == nil; pause(ctx, 200*time.Millisecond) {
		open, err := keys(1, 2)
		if err != nil {
			return 0, err
		}
		if len(open) == 0 {
			break
		}
		var all sync.WaitGroup
		for _, i := range rand.Perm(len(open))[:min(16, len(open))] { // no key that takes long keeps others waiting
			all.Go(func() { r.answer(ctx, open[i]) })
		}
		all.Wait()
	}
	calls, err := readJournals[call](c.Dir, "calls")
	if err != nil {
		return 0, err
	}
	type use struct {
		Key   string
		Since int64
	}
	receipts := map[use]string{}
	for _, o := range calls {
		if o.What == "applied" {
			receipts[use{o.Work, -o.Job}] = o.Receipt
		}
	}
	rows, err := pool.Query(ctx, `select key, (extract(epoch from created_at) * 1000000)::bigint from onceq.job_fences where class = 1 and state = 6 order by key`)
	if err != nil {
		return 0, err
	}
	waiting, err := pgx.CollectRows(rows, pgx.RowToStructByPos[use])
	if err != nil {
		return 0, err
	}
	n := 0
	for i, w := range waiting {
		if i%2 == 1 {
			continue
		}
		f, err := r.q.Fence(onceq.FenceSpec{Key: w.Key})
		if err != nil {
			return n, err
		}
		decision := onceq.NeverApplied()
		if receipt, applied := receipts[w]; applied {
			decision = onceq.Applied(receipt)
		}
		if err := f.Resolve(ctx, nil, decision); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}
