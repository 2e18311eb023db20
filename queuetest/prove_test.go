package queuetest_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/queuetest"
)

type provedOrder struct{ ID int }

var provedCharge = onceq.Kind[provedOrder]{Name: "charge", Key: func(o provedOrder) string { return fmt.Sprintf("charge:%d", o.ID) }}

func twoJobs() []onceq.Job { return []onceq.Job{provedJob(), provedCharge.Job(provedOrder{ID: 8})} }

func provedJob() onceq.Job { return provedCharge.Job(provedOrder{ID: 7}) }

// provedTable holds what the handlers of these tests write.
const provedTable = `create table charges (order_id int, charge text)`

// post makes a charge by HTTP under a key; "" means no key.
func post(ctx context.Context, client *http.Client, key string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://pay.example/charges", strings.NewReader(`{"cents": 4200}`))
	if err != nil {
		return err
	}
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	if res.StatusCode >= 300 {
		return fmt.Errorf("status %d", res.StatusCode)
	}
	return res.Body.Close()
}

// spy records what a proof reports instead of failing the test.
type spy struct {
	testing.TB
	mu     sync.Mutex
	errors []string
	logs   []string
}

func (s *spy) Errorf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errors = append(s.errors, fmt.Sprintf(format, args...))
}

func (s *spy) Fatalf(format string, args ...any) { s.Errorf("fatal: "+format, args...) }

func (s *spy) Logf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.logs = append(s.logs, fmt.Sprintf(format, args...))
}

// said runs a proof that may fail and returns what it reports.
func said(t *testing.T, proof queuetest.Proof) []string {
	t.Helper()
	s := &spy{TB: t}
	queuetest.Prove(s, proof)
	for _, text := range append(s.errors, s.logs...) {
		t.Log(text)
	}
	return s.errors
}

func TestProve_Passes(t *testing.T) {
	t.Parallel()
	type proof = queuetest.Proof
	insert := func(ctx context.Context, db onceq.DB, o provedOrder, charge string) error {
		_, err := db.Exec(ctx, `insert into charges values ($1, $2)`, o.ID, charge)
		return err
	}
	oneRow := func(o *queuetest.Outcome) {
		require.Equal(o, 1, o.Count(`select count(*) from charges where order_id = 7`))
	}
	proofs := map[string]proof{
		"a transaction": {
			Handler: func(*queuetest.Process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					return insert(ctx, tx, o, "")
				})
			},
			Check: oneRow,
		},
		"a batch": {
			Jobs: func() []onceq.Job {
				return []onceq.Job{provedJob(), provedCharge.Job(provedOrder{8}), provedCharge.Job(provedOrder{9})}
			},
			Handler: func(*queuetest.Process) onceq.Handler {
				return provedCharge.HandleBatch(10, func(ctx context.Context, tx pgx.Tx, jobs []onceq.Item[provedOrder]) error {
					rows := make([][]any, len(jobs))
					for i, j := range jobs {
						rows[i] = []any{j.Payload.ID, ""}
					}
					_, err := tx.CopyFrom(ctx, pgx.Identifier{"charges"}, []string{"order_id", "charge"}, pgx.CopyFromRows(rows))
					return err
				})
			},
			Check: func(o *queuetest.Outcome) {
				require.Equal(o, 3, o.Count(`select count(*) from charges`))
				require.Equal(o, 3, o.Count(`select count(distinct order_id) from charges`))
			},
		},
		"an effect on a lease": {
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
						return true, post(ctx, p.Client, key)
					})
					return err
				})
			},
			Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 1) },
		},
		"look, send in a fence, record in the job's transaction": {
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					var sent bool
					if err := tx.QueryRow(ctx, `select exists (select from charges where order_id = $1)`, o.ID).Scan(&sent); err != nil || sent {
						return err
					}
					_, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (bool, error) {
						return true, p.Effect(ctx, "mail to ada@example.com", key)
					})
					if err != nil {
						return err
					}
					return insert(ctx, tx, o, "")
				})
			},
			Check: oneRow,
		},
		"an upsert": {
			Setup: queuetest.SQL(`create table charges (order_id int primary key, charge text)`),
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					_, err := p.Pool.Exec(ctx, `insert into charges values ($1, 'new') on conflict (order_id) do update set charge = excluded.charge`, o.ID)
					return err
				})
			},
		},
		"the provider knows the key": {
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					return post(ctx, p.Client, fmt.Sprintf("order-charge-%d", o.ID))
				})
			},
		},
		"the key is from the job": {
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					return post(ctx, p.Client, l.IdempotencyKey("welcome"))
				})
			},
		},
		"asking before sending again": {
			NoDedup: true,
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					_, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (bool, error) {
						return true, p.Effect(ctx, "mail", key)
					}, onceq.OnUncertain(onceq.Ask(func(ctx context.Context, key string) (any, bool, error) {
						sent, err := p.Happened(ctx, key)
						return true, sent, err
					})))
					return err
				})
			},
		},
		"a provider that can neither be asked nor knows keys": {
			NoDedup: true,
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
						return true, post(ctx, p.Client, "")
					}, onceq.OnUncertain(onceq.Hold()))
					return err
				})
			},
		},
		"two jobs with an effect of the same name": {
			Jobs:    twoJobs,
			NoDedup: true,
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
						return true, post(ctx, p.Client, "")
					}, onceq.OnUncertain(onceq.Hold()))
					return err
				})
			},
		},
		"two jobs without a transaction": {
			Jobs: twoJobs,
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					return post(ctx, p.Client, l.IdempotencyKey("charge"))
				})
			},
			Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 2) },
		},
		"a provider of one's own, and a person who knows the charge": {
			NoDedup: true,
			Provider: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch body, _ := io.ReadAll(r.Body); {
				case r.Method == http.MethodGet:
					_, _ = io.WriteString(w, "open")
				case r.URL.Path != "/charges" || string(body) != `{"cents": 4200}`:
					http.Error(w, "no such thing", http.StatusNotFound)
				default:
					_, _ = io.WriteString(w, "ch_1")
				}
			}),
			Resolve: func(job onceq.JobInfo, effect string, applied bool) onceq.Resolution {
				if job.Key == "charge:7" && effect == "charge" && applied {
					return onceq.Applied("ch_1")
				}
				return onceq.NeverApplied()
			},
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					res, err := p.Client.Get("https://pay.example/state")
					if err != nil {
						return err
					}
					_ = res.Body.Close()
					id, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (string, error) {
						req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://pay.example/charges", strings.NewReader(`{"cents": 4200}`))
						if err != nil {
							return "", onceq.NotApplied(err)
						}
						res, err := p.Client.Do(req)
						if err != nil {
							return "", err
						}
						defer func() { _ = res.Body.Close() }()
						if res.StatusCode != http.StatusOK {
							return "", errors.New(res.Status)
						}
						id, err := io.ReadAll(res.Body)
						return string(id), err
					}, onceq.OnUncertain(onceq.Hold()))
					if err != nil {
						return err
					}
					return insert(ctx, tx, o, id)
				})
			},
			Check: func(o *queuetest.Outcome) {
				oneRow(o)
				require.Equal(o, 1, o.Count(`select count(*) from charges where charge = 'ch_1'`))
				require.Equal(o, []queuetest.Effect{{What: "POST pay.example/charges", Calls: 1}}, o.Effects)
			},
		},
		"the completion in a transaction of the handler's own": {
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					return pgx.BeginFunc(ctx, p.Pool, func(tx pgx.Tx) error {
						if err := insert(ctx, tx, o, ""); err != nil {
							return err
						}
						return l.Complete(ctx, tx)
					})
				})
			},
			Check: oneRow,
		},
		"two effects and a job that follows": {
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					for _, name := range []string{"charge", "receipt"} {
						if _, err := onceq.Once(ctx, l, name, func(ctx context.Context, key string) (bool, error) {
							return true, post(ctx, p.Client, key)
						}); err != nil {
							return err
						}
					}
					_, err := p.Queue.Enqueue(ctx, tx, onceq.Job{Kind: "ship", Payload: o.ID})
					return err
				})
			},
		},
		"a job that comes back": {
			Handler: func(p *queuetest.Process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					var n int
					if err := tx.QueryRow(ctx, `select count(*) from charges`).Scan(&n); err != nil {
						return err
					}
					if n == 2 {
						return nil
					}
					if err := insert(ctx, tx, o, fmt.Sprint(n)); err != nil {
						return err
					}
					return onceq.Reschedule(time.Hour)
				})
			},
		},
	}
	for name, p := range proofs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 5)
			if p.Setup == nil {
				p.Setup = queuetest.SQL(provedTable)
			}
			if p.Jobs == nil {
				p.Job = provedJob
			}
			switch name {
			case "a job that comes back", "two jobs with an effect of the same name":
				p = queuetest.AtSecondSteps(p)
			case "two effects and a job that follows":
				p = queuetest.AtSteps(p, "receipt", "enqueueing")
			case "look, send in a fence, record in the job's transaction", // TestProve_RunsOfTheExample has it
				"an upsert", "the provider knows the key", "the key is from the job", "two jobs without a transaction",
				"a provider of one's own, and a person who knows the charge",
				"a provider that can neither be asked nor knows keys": // its steps are those of the other cases
				p = queuetest.AtOwnSteps(p)
			}
			if testing.Short() {
				p = queuetest.Sampled(p) // make check tries all
			}
			proven, err := queuetest.ProveAll(t, p, "")
			require.NoError(t, err)
			require.Empty(t, proven.Failures)
			// Every statement of onceq has words of its own.
			require.NotContains(t, strings.Join(proven.Steps, "\n"), "a statement of onceq")
			require.NotContains(t, strings.Join(proven.Steps, "\n"), "set_config")
		})
	}
}

// documented returns the failure that docs/use/prove.md shows.
func documented(t *testing.T) []string {
	text, err := os.ReadFile("../docs/use/prove.md")
	require.NoError(t, err)
	_, text, ok := bytes.Cut(text, []byte("## What a failure says"))
	require.True(t, ok)
	var lines []string
	for line := range strings.Lines(string(text)) {
		if line, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "    "); ok {
			line, _, _ = strings.Cut(line, " go test ")
			lines = append(lines, line)
		}
	}
	require.Len(t, lines, 4)
	return lines
}

// askedCharge charges in Once, and asks the provider if it is unknown whether that was done.
func askedCharge(ask func(ctx context.Context, p *queuetest.Process, key string) (bool, error)) func(context.Context, *queuetest.Process, *onceq.Lease, provedOrder) error {
	return func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
		_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
			return true, post(ctx, p.Client, "charge "+strconv.Itoa(o.ID))
		}, onceq.OnUncertain(onceq.Ask(func(ctx context.Context, key string) (any, bool, error) {
			done, err := ask(ctx, p, key)
			return true, done, err
		})))
		return err
	}
}

// Prove catches each wrong pattern, and its message names the mistake.
func TestProve_Mistakes(t *testing.T) {
	t.Parallel()
	type handler = func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error
	note := func(ctx context.Context, p *queuetest.Process, o provedOrder) error {
		_, err := p.Pool.Exec(ctx, `insert into charges (order_id) values ($1)`, o.ID)
		return err
	}
	noted := func(ctx context.Context, p *queuetest.Process, o provedOrder) (there bool, err error) {
		return there, p.Pool.QueryRow(ctx, `select exists (select from charges where order_id = $1)`, o.ID).Scan(&there)
	}
	cases := map[string]struct {
		handler handler
		change  func(*queuetest.Proof)
		kinds   []string // kinds of the faults that show it; nil for all
		want    []string // parts of the message
	}{
		"look, send, record": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				if sent, err := noted(ctx, p, o); err != nil || sent {
					return err
				}
				if err := post(ctx, p.Client, ""); err != nil {
					return err
				}
				return note(ctx, p, o)
			},
			want: append(documented(t),
				"died after POST pay.example/charges was made, before its answer; then the second worker made POST pay.example/charges again: it happened twice, without faults once",
				"mistake: recording after sending",
				"froze before `insert into charges …` until its lease had run out and a second worker had taken the job; then went on",
				"mistake: check-then-act without a fence",
			),
		},
		"look, then write": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				if there, err := noted(ctx, p, o); err != nil || there {
					return err
				}
				return note(ctx, p, o)
			},
			want: []string{"table public.charges has 2 rows, without faults 1", "mistake: check-then-act without a fence"},
		},
		"record after sending, in the transaction": {
			handler: nil,
			change: func(proof *queuetest.Proof) {
				proof.Handler = func(p *queuetest.Process) onceq.Handler {
					return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
						if err := post(ctx, p.Client, ""); err != nil {
							return err
						}
						_, err := tx.Exec(ctx, `insert into charges (order_id) values ($1)`, o.ID)
						return err
					})
				}
			},
			want: []string{
				"Prove: died after POST pay.example/charges was made, before its answer; then",
				"died after `insert into charges …`, before commit",
				"mistake: recording after sending",
			},
		},
		"record, then send": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				tag, err := p.Pool.Exec(ctx, `insert into charges (order_id) select $1 where not exists (select from charges where order_id = $1)`, o.ID)
				if err != nil || tag.RowsAffected() == 0 {
					return err
				}
				return post(ctx, p.Client, "")
			},
			want: []string{"happened never, without faults once", "mistake: recording before sending"},
		},
		"no fence at all": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return post(ctx, p.Client, "")
			},
			want: []string{"mistake: an effect outside without a fence"},
		},
		"the attempt in the key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return post(ctx, p.Client, fmt.Sprintf("charge-%d-%d", o.ID, l.Attempt))
			},
			kinds: []string{"cut"},
			want:  []string{"lost the answer to POST pay.example/charges", "mistake: the idempotency key contains the attempt", `had key "charge-7-1", then "charge-7-2"`},
		},
		"the attempt in the key, by Effect and inside of Once": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, _ string) (bool, error) {
					return true, p.Effect(ctx, "mail to ada", fmt.Sprintf("%d/%d", l.Attempt, o.ID))
				})
				return err
			},
			kinds: []string{"cut"},
			want:  []string{`lost the answer to mail to ada in effect "mail"`, "mistake: the idempotency key contains the attempt"},
		},
		"the token in the key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return post(ctx, p.Client, fmt.Sprintf("charge-%d", l.Token))
			},
			kinds: []string{"cut"},
			want:  []string{"mistake: the idempotency key contains the lease's token"},
		},
		"a time in nanoseconds in the key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return post(ctx, p.Client, fmt.Sprintf("charge-%d-%d", o.ID, time.Now().UnixNano()))
			},
			kinds: []string{"cut"},
			want:  []string{"mistake: the idempotency key contains a timestamp"},
		},
		"a time in seconds in the key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return post(ctx, p.Client, fmt.Sprintf("charge-%d-%d", o.ID, time.Now().Unix()))
			},
			kinds: []string{"cut"},
			want:  []string{"mistake: the idempotency key contains a timestamp"},
		},
		"a written time in the key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return post(ctx, p.Client, "charge-"+time.Now().Format(time.RFC3339))
			},
			kinds: []string{"cut"},
			want:  []string{"mistake: the idempotency key contains a timestamp"},
		},
		"chance in the key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return post(ctx, p.Client, rand.Text())
			},
			kinds: []string{"cut"},
			want:  []string{"mistake: the idempotency key differs between the runs of one job"},
		},
		"a time in the job's key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error { return nil },
			change: func(proof *queuetest.Proof) {
				proof.Job = func() onceq.Job {
					j := provedJob()
					j.Key = fmt.Sprintf("charge:%d:%d", 7, time.Now().Unix())
					return j
				}
			},
			want: []string{"mistake: the job's key contains a timestamp"},
		},
		"chance in the job's key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error { return nil },
			change: func(proof *queuetest.Proof) {
				proof.Job = func() onceq.Job {
					j := provedJob()
					j.Key = rand.Text()
					return j
				}
			},
			want: []string{"mistake: the job's key differs each time the job is made"},
		},
		"a write apart from the completion": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return note(ctx, p, o)
			},
			change: func(proof *queuetest.Proof) {
				proof.Check = func(o *queuetest.Outcome) {
					require.Equal(o, 1, o.Count(`select count(*) from charges`), "charges")
				}
			},
			want: []string{
				"died after `insert into charges …` was committed, before its answer", "charges",
				"mistake: writes that commit apart from the completion",
			},
		},
		"a write apart from the completion, beside the handler's transaction": {
			change: func(proof *queuetest.Proof) {
				proof.Handler = func(p *queuetest.Process) onceq.Handler {
					return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
						if _, err := tx.Exec(ctx, `update charges set charge = 'seen' where order_id = $1`, o.ID+1); err != nil {
							return err
						}
						return note(ctx, p, o)
					})
				}
			},
			want: []string{
				"died after `insert into charges …` was committed, before its answer; then table public.charges has 2 rows, without faults 1",
				"mistake: writes that commit apart from the completion",
			},
		},
		"Once without its key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
					return true, post(ctx, p.Client, "")
				})
				return err
			},
			kinds: []string{"cut"},
			want:  []string{`mistake: a call without an idempotency key: nobody knew whether effect "charge" had happened`},
		},
		"running again what the provider does not recognise": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
					return true, post(ctx, p.Client, key)
				})
				return err
			},
			change: func(proof *queuetest.Proof) { proof.NoDedup = true },
			kinds:  []string{"cut"},
			want:   []string{"mistake: a provider that does not recognise keys"},
		},
		"a call without its context": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (bool, error) {
					return true, post(context.Background(), p.Client, "")
				}, onceq.OnUncertain(onceq.Hold()))
				return err
			},
			kinds: []string{"freeze"},
			want: []string{
				`froze before POST pay.example/charges in effect "charge"`,
				`mistake: a call without its context: effect "charge" was made by a worker that woke up after its time`,
			},
		},
		"another body under the same key": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://pay.example/charges", strings.NewReader(rand.Text()))
				if err != nil {
					return err
				}
				req.Header.Set("Idempotency-Key", l.IdempotencyKey("charge"))
				_, err = p.Client.Do(req)
				return err
			},
			kinds: []string{"cut"},
			want:  []string{"mistake: another body under the same idempotency key"},
		},
		"one key for every job": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return post(ctx, p.Client, "charge")
			},
			change: func(proof *queuetest.Proof) { proof.Job, proof.Jobs = nil, twoJobs },
			want: []string{
				`fatal: queuetest: Prove: without any fault: POST pay.example/charges was made for two jobs under one idempotency key, "charge"`,
				"mistake: a key that does not name its work",
			},
		},
		"one key for every job's effect, and other bodies": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (bool, error) {
					req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://pay.example/charges", strings.NewReader(fmt.Sprint(o.ID)))
					if err != nil {
						return false, onceq.NotApplied(err)
					}
					req.Header.Set("Idempotency-Key", "charge")
					res, err := p.Client.Do(req)
					if err != nil {
						return false, err
					}
					return true, res.Body.Close()
				})
				return err
			},
			change: func(proof *queuetest.Proof) { proof.Job, proof.Jobs = nil, twoJobs },
			want:   []string{"mistake: a key that does not name its work"},
		},
		"one key for every job, of the job itself": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error { return nil },
			change: func(proof *queuetest.Proof) {
				proof.Job, proof.Jobs = nil, func() []onceq.Job {
					jobs := twoJobs()
					jobs[0].Key, jobs[1].Key = "charge", "charge"
					return jobs
				}
			},
			want: []string{`without any fault: enqueueing: onceq: jobs[1].Key "charge" repeats that of jobs[0]`},
		},
		"one name for three mails": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				for _, to := range []string{"ada", "bob", "eve"} {
					if _, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (bool, error) {
						return true, p.Effect(ctx, "mail to "+to, key)
					}); err != nil {
						return err
					}
				}
				return nil
			},
			want: []string{
				`fatal: queuetest: Prove: without any fault: onceq: name used twice in one run: "mail" was done`,
				"mistake: one name for several effects",
			},
		},
		"one name for three mails, and no look at the error": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				for _, to := range []string{"ada", "bob", "eve"} {
					_, _ = onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (bool, error) {
						return true, p.Effect(ctx, "mail to "+to, key)
					})
				}
				return nil
			},
			want: []string{"without faults once", "mistake: recording before sending"},
		},
		"nothing, if an earlier run may have done it": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				if l.Attempt > 1 || l.Lost > 0 {
					return nil
				}
				return post(ctx, p.Client, l.IdempotencyKey("charge"))
			},
			kinds: []string{"die"},
			want: []string{
				"the same with later: its job had failed and lost workers before it began",
				"died before POST pay.example/charges; then POST pay.example/charges happened never, without faults once",
				"mistake: another run taken for a repetition",
			},
		},
		"nothing, if two earlier runs may have done it": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				if l.Attempt > 2 {
					return nil
				}
				return post(ctx, p.Client, l.IdempotencyKey("charge"))
			},
			kinds: []string{"later"},
			want:  []string{"POST pay.example/charges happened never, without faults once", "mistake: another run taken for a repetition"},
		},
		"nothing, if it has lost nearly as many workers as it may": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				if l.Lost >= onceq.DefaultMaxLost-1 {
					return nil
				}
				return post(ctx, p.Client, l.IdempotencyKey("charge"))
			},
			kinds: []string{"later"},
			want:  []string{"POST pay.example/charges happened never, without faults once", "mistake: another run taken for a repetition"},
		},
		"nothing, if an earlier run may have done it, of a kind that may lose few": {
			change: func(proof *queuetest.Proof) {
				kind := provedCharge
				kind.MaxLost = 2
				proof.Handler = func(p *queuetest.Process) onceq.Handler {
					return kind.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
						if l.Attempt > 1 {
							return nil
						}
						return post(ctx, p.Client, l.IdempotencyKey("charge"))
					})
				}
			},
			kinds: []string{"later"},
			want:  []string{"POST pay.example/charges happened never, without faults once", "mistake: another run taken for a repetition"},
		},
		"nothing, if an earlier run may have done it, beside an address of chance": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				if err := post(ctx, p.Client, l.IdempotencyKey("charge")); l.Lost > 0 || err != nil {
					return err
				}
				return p.Effect(ctx, "mail "+rand.Text(), "mail")
			},
			kinds: []string{"die"},
			want:  []string{"happened never, without faults once", "mistake: another run taken for a repetition"},
		},
		"no row, if an earlier run may have written it": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				if l.Lost > 0 {
					return nil
				}
				return note(ctx, p, o)
			},
			kinds: []string{"die"},
			want: []string{
				"died before `insert into charges …`; then table public.charges has 0 rows, without faults 1",
				"the same with later: its job had failed and lost workers before it began",
				"mistake: another run taken for a repetition",
			},
		},
		"no change, if an earlier run may have made it": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				if l.Attempt > 1 {
					return nil
				}
				_, err := p.Pool.Exec(ctx, `update charges set charge = 'paid' where order_id = $1`, o.ID)
				return err
			},
			change: func(proof *queuetest.Proof) {
				proof.Setup = queuetest.SQL(provedTable + `; insert into charges values (7, 'open')`)
			},
			kinds: []string{"die"},
			want: []string{
				"its job had failed and lost workers before it began; then table public.charges: a row is as it was at the beginning, and without faults it is not",
				"mistake: another run taken for a repetition",
			},
		},
		"an Ask that says no to what was done, of a provider that knows no keys": {
			handler: askedCharge(func(context.Context, *queuetest.Process, string) (bool, error) { return false, nil }),
			change:  func(proof *queuetest.Proof) { proof.NoDedup = true },
			kinds:   []string{"cut"},
			want:    []string{`mistake: an Ask with a wrong answer: it said that effect "charge" had not happened, and it had`},
		},
		"an Ask that says yes to what was not done": {
			handler: askedCharge(func(context.Context, *queuetest.Process, string) (bool, error) { return true, nil }),
			kinds:   []string{"cut", "die"},
			want:    []string{"happened never, without faults once", `mistake: an Ask with a wrong answer: it said that effect "charge" had happened, and it had not`},
		},
		"an Ask that takes no for an error": {
			handler: askedCharge(func(_ context.Context, p *queuetest.Process, _ string) (bool, error) {
				return false, errors.New("404 Not Found")
			}),
			kinds: []string{"die"},
			want:  []string{"the job ended dead, without faults completed", `mistake: an Ask without an answer: it returned an error each time`},
		},
		"giving up for ever when an answer is lost": {
			handler: func(ctx context.Context, p *queuetest.Process, l *onceq.Lease, o provedOrder) error {
				return onceq.Fatal(post(ctx, p.Client, l.IdempotencyKey("charge")))
			},
			kinds: []string{"cut"},
			want:  []string{"the job ended dead, without faults completed", "mistake: giving up for good"},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 6)
			proof := queuetest.Proof{
				Setup: queuetest.SQL(provedTable),
				Job:   provedJob,
				Handler: func(p *queuetest.Process) onceq.Handler {
					return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
						return c.handler(ctx, p, l, o)
					})
				},
			}
			if c.change != nil {
				c.change(&proof)
			}
			if proof = queuetest.AtOwnSteps(proof); c.kinds != nil {
				proof = queuetest.OfKinds(proof, c.kinds...)
			}
			all := strings.Join(said(t, proof), "\n")
			for _, want := range c.want {
				require.Contains(t, all, want)
			}
			for _, mistake := range regexp.MustCompile(`mistake: [^:\n]*`).FindAllString(all, -1) {
				require.True(t, slices.ContainsFunc(c.want, func(want string) bool { return strings.Contains(want, mistake) || strings.Contains(mistake, want) }), mistake)
			}
		})
	}
}

// A process that is frozen when its time has run out already, as on a machine that stood still, was frozen all the same.
func TestProve_FrozenAfterItsLease(t *testing.T) {
	t.Parallel()
	all := strings.Join(said(t, queuetest.AtSteps(queuetest.Proof{
		Setup: queuetest.SQL(provedTable),
		Job:   provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (bool, error) {
					p.Jump(time.Minute)
					return true, post(context.Background(), p.Client, "")
				}, onceq.OnUncertain(onceq.Hold()))
				return err
			})
		},
	}, "POST")), "\n")
	require.Contains(t, all, `froze before POST pay.example/charges in effect "charge"`)
	require.Contains(t, all, `mistake: a call without its context: effect "charge" was made by a worker that woke up after its time`)
}
