package main

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// A flow does something, sleeps, waits for an event that has its work's name, and then does one of two things. It is cut off
// anywhere, and its event is emitted before it waits, while it waits, after its time-out, several times, or in a transaction
// that is rolled back.

const (
	eventScope = "torture"
	timedOut   = "time-out" // the answer without an event

	stepBegin, stepCame, stepLate = "begin", "welcome", "reminder"
)

// flowTables are written in the transactions that emit, except that what is "emitted" is certain: the commit was
// acknowledged. Handlers write what they heard.
const flowTables = `
create table torture.emits (seq bigint generated always as identity, at timestamptz default clock_timestamp(), what text, key text, payload text, first bool);
create table torture.heard (seq bigint generated always as identity, job bigint, work text, token bigint, answer text);`

// emitRow is an event that somebody emitted.
type emitRow struct {
	Key, Payload string
	First        bool // Emit said so
}

// heardRow is what a handler heard.
type heardRow struct {
	Job    int64
	Work   string
	Answer string // a payload, or timedOut
}

func (h *history) collectFlows(ctx context.Context, pool *pgxpool.Pool) (err error) {
	if h.Emits, err = pgx.CollectRows(query(ctx, pool, `select key, payload, first from torture.emits where what = 'emit' order by seq`),
		pgx.RowToStructByPos[emitRow]); err != nil {
		return err
	}
	if h.Heard, err = pgx.CollectRows(query(ctx, pool, `select job, work, answer from torture.heard order by seq`), pgx.RowToStructByPos[heardRow]); err != nil {
		return err
	}
	before, err := pgx.CollectRows(query(ctx, pool, `
select job from (select job, work, min(at) as at from torture.trail where what = 'accepted' and starts_with(work, '`+formFlow+`/') group by job, work) t
 where exists (select from torture.emits e where e.what = 'emitted' and e.key = t.work and e.at < t.at)`), pgx.RowTo[int64])
	h.Before = map[int64]bool{}
	for _, job := range before {
		h.Before[job] = true
	}
	return err
}

// patience is how long a flow waits for its event.
func (w work) patience() time.Duration {
	return []time.Duration{onceq.Forever, 300 * time.Millisecond, onceq.Forever, 2 * time.Second}[numberOf(w)%4]
}

func (w *onceqWorker) flow(ctx context.Context, l *onceq.Lease, p work) error {
	if err := trouble(l, p); err != nil {
		return err
	}
	if err := w.step(ctx, l, p, stepBegin); err != nil {
		return err
	}
	if err := onceq.Sleep(ctx, l, "a while", 100*time.Millisecond); err != nil {
		return err
	}
	payload, came, err := onceq.Await[string](ctx, l, eventScope, p.Name, p.patience())
	if err != nil {
		return err
	}
	answer, next := payload, stepCame
	if !came {
		answer, next = timedOut, stepLate
	}
	if _, err := w.pool.Exec(ctx, `insert into torture.heard (job, work, token, answer) values ($1, $2, $3, $4)`,
		identity(l.ID, l.CreatedAt), p.Name, l.Token, answer); err != nil {
		return err
	}
	if err := w.step(ctx, l, p, next); err != nil {
		return err
	}
	p.take(ctx)
	return w.finish(ctx, l, p, answer)
}

// step calls the provider, which can be asked.
func (w *onceqWorker) step(ctx context.Context, l *onceq.Lease, p work, name string) error {
	c := dial(ctx, w.Provider)
	defer c.close()
	_, err := onceq.Once(ctx, l, name, func(ctx context.Context, key string) (string, error) {
		receipt, err := c.do(ctx, key, order{Work: p.Name + "#" + name, Form: p.Form, Job: identity(l.ID, l.CreatedAt), Token: l.Token})
		if errors.Is(err, errRefused) {
			err = onceq.NotApplied(err)
		}
		return receipt, err
	}, onceq.EffectTimeout(2500*time.Millisecond), onceq.OnUncertain(onceq.Ask(func(ctx context.Context, key string) (any, bool, error) {
		receipt, applied, err := ask(ctx, w.Provider, key)
		return receipt, applied, err
	})))
	return err
}

// emitIn emits events in a transaction, which it tells about them.
func emitIn(ctx context.Context, q *onceq.Queue, tx pgx.Tx, keys []string) error {
	slices.Sort(keys) // so that two do not wait for each other
	for _, key := range slices.Compact(keys) {
		payload := nonce()
		first, err := q.Emit(ctx, tx, eventScope, key, payload)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `insert into torture.emits (what, key, payload, first) values ('emit', $1, $2, $3)`, key, payload, first); err != nil {
			return err
		}
	}
	return nil
}

// emitFirst emits some of the events of works before those are accepted, in the same transaction.
func emitFirst(ctx context.Context, q *onceq.Queue, tx pgx.Tx, works []work) error {
	var keys []string
	for _, w := range works {
		if w.Form == formFlow && rand.IntN(6) == 0 {
			keys = append(keys, w.Name)
		}
	}
	return emitIn(ctx, q, tx, keys)
}

// emit emits events: of flows that wait, of some that were accepted lately, whatever they do, and of some that nobody has
// enqueued yet.
func (w *onceqWorker) emit(ctx context.Context) {
	const (
		waiting = `select key from onceq.job_awaits where scope = '` + eventScope + `' and state = 0 order by random() limit 5`
		lately  = `
select work from (select work from torture.trail where what = 'accepted' and starts_with(work, '` + formFlow + `/') order by seq desc limit 20) t
 order by random() limit 2`
		next = `
select '` + formFlow + `/' || n + (random() * 20)::int
  from (select max(split_part(key, '/', 2)::int) as n from torture.trail where what = 'accepted' and key ~ '^` + formFlow + `/[0-9]+$') t where n > 0`
	)
	for pause(ctx, 200*time.Millisecond+rand.N(600*time.Millisecond)) {
		within, cancel := context.WithTimeout(ctx, 5*time.Second)
		keys, err := pgx.CollectRows(query(within, w.pool, []string{waiting, waiting, lately, next}[rand.IntN(4)]), pgx.RowTo[string])
		if err == nil && len(keys) > 0 {
			_ = w.emitThem(within, keys)
		}
		cancel()
	}
}

var errChangedMind = errors.New("the caller changes its mind")

func (w *onceqWorker) emitThem(ctx context.Context, keys []string) error {
	level := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[rand.IntN(4)]
	err := pgx.BeginTxFunc(ctx, w.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		if err := emitIn(ctx, w.q, tx, keys); err != nil {
			return err
		}
		pause(ctx, rand.N(30*time.Millisecond))
		if rand.IntN(6) == 0 {
			return errChangedMind
		}
		return nil
	})
	if err == nil {
		_, err = w.pool.Exec(ctx, `insert into torture.emits (what, key) select 'emitted', unnest($1::text[])`, keys)
	}
	return err
}

// These are mistakes that the checker must find: a later event counts, and a job asks anew after each run.
const (
	emitOver = `
update onceq.job_fences set result = to_jsonb(md5(random()::text)) where class = ` + classOfEvent + ` and state = 3`
	forgetAnswers = `
update onceq.job_awaits set state = 0, payload = null, until = now() + interval '1 hour'
 where state = 2`
	classOfEvent = `4`
)

// checkFlows compares what flows heard with the events, and with what they did.
func (v *verdict) checkFlows(h *history, ends map[int64]end) {
	first, emitted := map[string]string{}, map[string]bool{}
	for _, e := range h.Emits {
		emitted[e.Key] = true
		if !e.First {
			continue
		}
		if other, twice := first[e.Key]; twice {
			v.violation(vFlow, "event %s was emitted first twice, with %s and %s", e.Key, other, e.Payload)
		}
		first[e.Key] = e.Payload
	}
	v.Emitted = len(first)
	for _, key := range slices.Sorted(maps.Keys(emitted)) {
		if first[key] == "" {
			v.violation(vFlow, "event %s was emitted, and nobody was first", key)
		}
	}
	heard := map[int64]string{}
	for _, a := range h.Heard {
		if before := heard[a.Job]; before != "" && before != a.Answer {
			v.violation(vFlow, "job %d (%s) heard %s, and before %s", idOf(a.Job), a.Work, a.Answer, before)
		}
		heard[a.Job] = a.Answer
		switch {
		case a.Answer != timedOut && a.Answer != first[a.Work]:
			v.violation(vFlow, "job %d (%s) heard %s, and the first event was %q", idOf(a.Job), a.Work, a.Answer, first[a.Work])
		case a.Answer == timedOut && work{Name: a.Work}.patience() == onceq.Forever:
			v.violation(vFlow, "job %d (%s) waits for ever, and heard of a time-out", idOf(a.Job), a.Work)
		case a.Answer == timedOut && h.Before[a.Job]:
			v.violation(vFlow, "job %d (%s) heard of a time-out, and its event was there before it", idOf(a.Job), a.Work)
		}
	}
	steps := map[int64][]string{}
	for _, c := range h.Calls {
		if _, step, ok := strings.Cut(c.Work, "#"); ok && c.What == "applied" {
			steps[c.Job] = append(steps[c.Job], step)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(ends)) {
		e := ends[id]
		if e.Form != formFlow {
			continue
		}
		want := []string{stepBegin, stepCame}
		if heard[id] == timedOut {
			want[1] = stepLate
		}
		done := steps[id]
		if e.State != "completed" {
			want = want[:min(len(done), 2)]
		} else {
			switch answer := heard[id]; {
			case answer == timedOut:
				v.TimedOut++
			case answer != "":
				v.Came++
			}
			if e.Result != heard[id] {
				v.violation(vFlow, "job %d (%s) heard %q, and its result is %s", idOf(id), e.Work, heard[id], e.Result)
			}
		}
		if !slices.Equal(done, want) {
			v.violation(vFlow, "job %d (%s) is %s, heard %q, and did %v", idOf(id), e.Work, e.State, heard[id], done)
		}
	}
}
