package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// These are the outcomes of an operation, as its producer knows them.
const (
	intended   = "" // the producer died before it knew
	committed  = "committed"
	rolledBack = "rolled back"
	unknown    = "unknown"
)

// op is a producer's line about one operation: first what it is about to do, then what happened.
type op struct {
	Op      string   `json:"op"`
	How     string   `json:"how"`
	Works   []work   `json:"works,omitempty"`
	Outcome string   `json:"outcome,omitempty"`
	Answers []answer `json:"answers,omitempty"`
	Err     string   `json:"err,omitempty"`
}

// inTransaction reports whether the operation writes its name to torture.ops when it commits.
func (o op) inTransaction() bool { return o.How != "direct" }

func runProducer(ctx context.Context, c *child, sys system, pool *pgxpool.Pool) error {
	e, err := sys.enqueuer(pool)
	if err != nil {
		return err
	}
	before, err := readJournals[op](c.Dir, "ops-"+c.Slot)
	if err != nil {
		return err
	}
	log, err := openJournal(c.Dir, "ops-"+c.Slot)
	if err != nil {
		return err
	}
	p := &producer{c: c, forms: formsOf(c), pool: pool, e: e, log: log, n: len(before) / 2, rng: rand.New(rand.NewPCG(c.Seed, uint64(os.Getpid())))}
	for ctx.Err() == nil {
		p.once(ctx)
		pause(ctx, rand.N(20*time.Millisecond))
	}
	return nil
}

type producer struct {
	c      *child
	forms  []string
	pool   *pgxpool.Pool
	e      enqueuer
	log    *journal
	n      int
	rng    *rand.Rand
	latest []int64
	parts  []string // keys of members of groups
}

// works chooses what to enqueue. Producers count at about the same pace and also take earlier numbers, so they often choose
// the same work. No work is twice in one operation.
func (p *producer) works(op string) []work {
	var all []work
	seen := map[string]bool{}
	for i := range 1 + p.rng.IntN(6) {
		w := work{Form: p.forms[p.rng.IntN(len(p.forms))], Keyed: p.rng.IntN(4) > 0}
		switch {
		case w.Form == formRecur:
			w.Keyed = true
			w.Name = fmt.Sprintf("%s/%d", w.Form, p.rng.IntN(12))
		case w.Form == formPoison: // they are few, and all producers choose the same ones
			w.Keyed = true
			w.Name = fmt.Sprintf("%s/%d", w.Form, p.n/poisonEvery)
		case w.Keyed:
			w.Name = fmt.Sprintf("%s/%d", w.Form, max(0, p.n-p.rng.IntN(20)))
		default:
			w.Name = fmt.Sprintf("%s/%s/%d", w.Form, op, i)
		}
		if w.Form == formJoin && i == 0 { // an operation of its own
			for range p.rng.IntN(3) * min(1, len(p.parts)) {
				w.After = append(w.After, p.parts[p.rng.IntN(len(p.parts))])
			}
			return append(w.members(), w)
		}
		if w.Form != formJoin && !seen[w.Name] {
			seen[w.Name] = true
			all = append(all, w)
		}
	}
	return all
}

// poisonEvery is how many operations a producer makes for each job that ends its process.
const poisonEvery = 250

const noteOp = `insert into torture.ops (op) values ('%s')`

func (p *producer) once(ctx context.Context) {
	p.n++
	// The end of the process must not cut off a transaction.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if len(p.latest) > 0 && p.rng.IntN(40) == 0 {
		_ = p.e.cancel(ctx, p.latest[p.rng.IntN(len(p.latest))])
	}
	o := op{Op: fmt.Sprintf("%s-%d-%d", p.c.Slot, os.Getpid(), p.n)}
	o.How = []string{"transaction", "transaction", "transaction", "pipeline", "direct"}[p.rng.IntN(5)]
	o.Works = p.works(o.Op)
	if joins(o.Works) && o.How == "pipeline" { // which cannot make groups
		o.How = "transaction"
	}
	p.log.write(o)
	answers, outcome, err := p.do(ctx, o)
	o.Works, o.Answers, o.Outcome = nil, answers, outcome
	if err != nil {
		o.Err = err.Error()
	}
	p.log.write(o)
	for _, a := range answers {
		if strings.HasPrefix(a.Work, formPoison) {
			continue // it must die by itself
		}
		p.latest = append(p.latest, a.ID)
		if strings.HasPrefix(a.Work, formPart) && strings.Count(a.Work, "/") == 2 { // it has a key
			p.parts = append(p.parts, a.Work)
		}
	}
	p.parts = p.parts[max(0, len(p.parts)-40):]
	p.latest = p.latest[max(0, len(p.latest)-20):]
}

func (p *producer) do(ctx context.Context, o op) (answers []answer, outcome string, err error) {
	note := fmt.Sprintf(noteOp, o.Op)
	switch o.How {
	case "direct", "pipeline":
		if o.How == "direct" {
			answers, err = p.e.enqueue(ctx, nil, o.Op, o.Works)
		} else {
			answers, err = p.e.pipeline(ctx, o.Op, note, o.Works)
		}
		switch {
		case err == nil:
			return answers, committed, nil
		case refused(err), err == errNotOffered:
			return nil, rolledBack, err
		}
		return nil, unknown, err
	}
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	tx, err := p.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: levels[p.rng.IntN(len(levels))]})
	if err != nil {
		return nil, rolledBack, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err = tx.Exec(ctx, note); err != nil {
		return nil, rolledBack, err
	}
	if answers, err = p.e.enqueue(ctx, tx, o.Op, o.Works); err != nil {
		return nil, rolledBack, err
	}
	if p.rng.IntN(6) == 0 { // the caller changes its mind
		return nil, rolledBack, nil
	}
	if err = tx.Commit(ctx); err == nil {
		return answers, committed, nil
	}
	if refused(err) {
		return nil, rolledBack, err
	}
	return nil, unknown, err
}
