//go:build unix

package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// ledger counts what the workers report. At the end it compares what the providers saw with what should have happened.
type ledger struct {
	mu      sync.Mutex
	reports map[string]int
	effects map[effectID]string // how the latest call ended: open, or report.Note

	reported, left int            // settled effects of unknown outcome: their worker reported it, or was gone
	answers        map[string]int // the mail provider's answers, when asked
	again          int            // effects that ran again under the same key
}

func newLedger() *ledger {
	return &ledger{reports: make(map[string]int), effects: make(map[effectID]string), answers: make(map[string]int)}
}

func (l *ledger) hear(r report) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reports[r.Type]++
	id := effectID{r.Job, r.Effect}
	before := l.effects[id]
	settled := func() {
		if before == "unknown" {
			l.reported++
		} else {
			l.left++
		}
	}
	switch r.Type {
	case asked:
		settled()
		l.answers[r.Note]++
		l.effects[id] = "not applied"
	case effectBegun:
		if before != "" && before != "not applied" {
			settled()
			l.again++
		}
		l.effects[id] = "open"
	case effectEnded:
		l.effects[id] = r.Note
	}
}

func (l *ledger) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reports[what]
}

// missing returns the faults that were not shown yet.
func (d *demo) missing() string {
	var m []string
	for what, done := range map[string]bool{
		"a worker killed in the middle of an effect":                   d.chaos.killedInside.Load() > 0,
		"a stopped worker's job taken over by another one":             d.chaos.takenOver.Load() > 0,
		"a stopped worker that woke up and was refused its completion": d.ledger.count(string(onceq.EventStale)) > 0,
	} {
		if !done {
			m = append(m, what)
		}
	}
	slices.Sort(m)
	return strings.Join(m, ", ")
}

// close writes the ledger and returns what is wrong, or nothing if all is well. wanted are the addresses that signed up.
func (d *demo) close(ctx context.Context, out io.Writer, wanted map[string]bool) (wrong []string, err error) {
	jobs, completed, again := 0, 0, 0
	done := map[string]int{} // completed jobs by key
	for filter := (onceqops.Filter{Limit: 1000}); ; {
		page, err := onceqops.New(d.q).List(ctx, d.pool, filter)
		if err != nil {
			return nil, err
		}
		for _, j := range page {
			jobs, again = jobs+1, again+max(j.Claims, 1)-1
			if j.State == onceq.StateCompleted {
				completed++
				done[j.Key]++
			} else {
				wrong = append(wrong, fmt.Sprintf("job %d (%s) is %s: %+v", j.ID, j.Key, j.State, j.Errors))
			}
		}
		if len(page) < filter.Limit {
			break
		}
		filter.After = page[len(page)-1].ID
	}
	rows, err := d.pool.Query(ctx, `
		select u.id, u.email, (select count(*) from demo.receipts r where r.user_id = u.id) as receipts
		  from demo.users u order by u.id`)
	if err != nil {
		return nil, err
	}
	type account struct {
		ID       int64
		Email    string
		Receipts int
	}
	users, err := pgx.CollectRows(rows, pgx.RowToStructByPos[account])
	if err != nil {
		return nil, err
	}

	d.mail.mu.Lock()
	defer d.mail.mu.Unlock()
	d.bank.mu.Lock()
	defer d.bank.mu.Unlock()
	var mails, charges, receipts []int
	missing := maps.Clone(wanted)
	for _, u := range users {
		m, c := d.mail.delivered[u.Email], d.bank.charges[u.ID]
		mails, charges, receipts = append(mails, m), append(charges, c), append(receipts, u.Receipts)
		w, p := done[Welcome.Key(User{ID: u.ID})], done[Charge.Key(User{ID: u.ID})]
		if m != 1 || c != 1 || u.Receipts != 1 || w != 1 || p != 1 || !wanted[u.Email] {
			wrong = append(wrong, fmt.Sprintf("user %d (%s): %d e-mails, %d charges, %d receipts; completed: %d welcome, %d charge",
				u.ID, u.Email, m, c, u.Receipts, w, p))
		}
		delete(missing, u.Email)
	}
	for _, email := range slices.Sorted(maps.Keys(missing)) {
		wrong = append(wrong, email+" signed up and is no user")
	}
	if n := len(d.mail.delivered); n > len(users) {
		wrong = append(wrong, fmt.Sprintf("e-mails went to %d addresses, and there are %d users", n, len(users)))
	}
	if n := len(d.bank.charges); n > len(users) {
		wrong = append(wrong, fmt.Sprintf("%d users were charged, and there are %d", n, len(users)))
	}

	l := d.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	line := func(what string, format string, args ...any) {
		fmt.Fprintf(out, "  %-28s %s\n", what, fmt.Sprintf(format, args...))
	}
	fmt.Fprintf(out, "\nThe ledger, after %s with seed %d\n\n", time.Since(d.began).Round(time.Second), d.seed)
	line("submissions", "%d requests for %d people: %d failed, %d given up by the client; all sent again",
		d.app.requests.Load(), len(wanted), d.app.failed.Load(), d.clients.gaveUp.Load())
	line("users", "%d; %d submissions found theirs there already", len(users), d.app.known.Load())
	line("jobs accepted", "%d, %d of them completed", jobs, completed)
	line("duplicate jobs suppressed", "%d", d.app.suppressed.Load())
	line("workers killed", "%d, %d in the middle of an effect", d.chaos.killed.Load(), d.chaos.killedInside.Load())
	line("workers stopped, continued", "%d, %d with a job taken over in the meantime", d.chaos.stopped.Load(), d.chaos.takenOver.Load())
	line("database sessions ended", "%d", d.chaos.ended.Load())
	failed, waited := l.reports[string(onceq.EventFailed)]+l.reports[string(onceq.EventDeferred)], l.reports[string(onceq.EventSnoozed)]
	line("redeliveries", "%d claims of a job beyond its first: %d after a lost lease, %d after an error, and %d", again, max(0, again-failed-waited), failed, waited)
	line("", "to wait for another run's effect")
	line("stale completions refused", "%d", l.reports[string(onceq.EventStale)])
	line("effects replayed", "%d times a recorded outcome was given in place of calling the provider", l.reports[string(onceq.EventReplayed)])
	line("uncertain effects", "%d: %d reported by their worker, %d left behind by one that was gone", l.reported+l.left, l.reported, l.left)
	line("  settled by asking", "%d: %d had been accepted, %d had not", l.answers["accepted"]+l.answers["not accepted"], l.answers["accepted"], l.answers["not accepted"])
	line("  settled by running again", "%d, under the same key", l.again)
	line("successes recorded late", "%d, by workers that had lost the job", l.reports[lateSuccess])
	line("charges replayed by the bank", "%d", d.bank.replays)
	fmt.Fprintln(out)
	perUser := func(what string, counts []int) {
		if len(counts) > 0 {
			line(what, "min %d, max %d", slices.Min(counts), slices.Max(counts))
		}
	}
	perUser("e-mails per user", mails)
	perUser("charges per user", charges)
	perUser("receipts per user", receipts)
	return wrong, nil
}
