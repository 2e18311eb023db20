package queuetest_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
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

// send makes a request. It returns the response's body, or an error if the status is not a success.
func send(ctx context.Context, client *http.Client, method, address, body string, headers ...string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, method, address, strings.NewReader(body))
	if err != nil {
		return "", onceq.NotApplied(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	res, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	answer, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode >= 300 {
		err = errors.New(res.Status)
	}
	return string(answer), err
}

// shipInLane is a job that follows, in a lane.
var shipInLane = onceq.Kind[provedOrder]{
	Name: "ship", Key: func(o provedOrder) string { return fmt.Sprint(o.ID) }, Lane: func(provedOrder) string { return "north" },
}

// These handlers are right, although a simpler proof would take them for wrong ones.
func TestProve_AccusesNoRightHandler(t *testing.T) {
	t.Parallel()
	type process = queuetest.Process
	const api = "https://api.example"
	// lease makes the maker of a handler from what the handler does with a lease.
	lease := func(do func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error) func(*process) onceq.Handler {
		return func(p *process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error { return do(ctx, p, l, o) })
		}
	}
	oncePost := func(ctx context.Context, p *process, l *onceq.Lease) (string, error) {
		return onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
			return send(ctx, p.Client, "POST", api+"/charges", `{"cents":4200}`, "Idempotency-Key", key)
		})
	}
	proofs := map[string]queuetest.Proof{
		"a job with a lane and a limit that a provider closes": {
			Job: func() onceq.Job {
				j := provedJob()
				j.Lane, j.Limit = "customer-1", "provider"
				return j
			},
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := oncePost(ctx, p, l)
				if err != nil && strings.Contains(err.Error(), "503") {
					return onceq.LimitFull(time.Hour, err)
				}
				return err
			}),
			Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 1) },
		},
		"PUT and DELETE": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				for _, state := range []string{"open", "paid"} {
					body := fmt.Sprintf(`{"state":%q,"synced_at":%q}`, state, time.Now().Format(time.RFC3339Nano))
					if _, err := send(ctx, p.Client, "PUT", api+"/orders/7", body, "Content-Type", "application/json"); err != nil {
						return err
					}
				}
				_, err := send(ctx, p.Client, "DELETE", api+"/carts/7", "")
				return err
			}),
			Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 3) },
		},
		"DELETE of what is gone": {
			Provider: func() http.Handler {
				var gone sync.Map
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if _, before := gone.LoadOrStore(r.Header.Get("X-Run"), true); before {
						w.WriteHeader(http.StatusGone)
					}
				})
			}(),
			Handler: func(p *process) onceq.Handler {
				run := fmt.Sprintf("%p", p.Pool)
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
					_, err := send(ctx, p.Client, "DELETE", api+"/carts/7", "", "X-Run", run)
					if err != nil && err.Error() == "410 Gone" {
						return nil
					}
					return err
				})
			},
		},
		"a read by POST": {
			Safe: func(r *http.Request) bool { return r.URL.Path == "/search" },
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if _, err := send(ctx, p.Client, "POST", api+"/search", `{"order":7}`); err != nil {
					return err
				}
				_, err := oncePost(ctx, p, l)
				return err
			}),
			Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 1) },
		},
		"an OAuth token that each process fetches once": {
			Handler: func(p *process) onceq.Handler {
				var bearer string // one job at a time
				return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) (err error) {
					if bearer == "" {
						if bearer, err = send(ctx, p.Client, "POST", api+"/token", url.Values{"grant_type": {"client_credentials"}}.Encode(),
							"Content-Type", "application/x-www-form-urlencoded"); err != nil {
							return err
						}
					}
					_, err = send(ctx, p.Client, "POST", api+"/charges", "", "Authorization", bearer, "Idempotency-Key", l.IdempotencyKey("charge"))
					return err
				})
			},
		},
		"an OAuth token without a content type, in JSON, and in the address": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				for address, body := range map[string]string{
					"/form":                          url.Values{"grant_type": {"client_credentials"}}.Encode(),
					"/json":                          `{"grant_type":"client_credentials"}`,
					"/address?grant_type=account_id": "",
				} {
					if _, err := send(ctx, p.Client, "POST", api+address, body); err != nil {
						return err
					}
				}
				return nil
			}),
			Check: func(o *queuetest.Outcome) { require.Empty(o, o.Effects) },
		},
		"reads of GraphQL by POST": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				for _, body := range []string{
					`{"query":"{ order(id: 7) { state } }"}`,
					`{"query":"# all\nquery Order($id: ID = \"mutation {\") @live {\n order(id: $id) { mutation } }","variables":{"id":7}}`,
					`[{"query":"fragment F on Order { id } query { order { ...F } }"}]`,
				} {
					if _, err := send(ctx, p.Client, "POST", api+"/graphql", body, "Content-Type", "application/json"); err != nil {
						return err
					}
				}
				if _, err := send(ctx, p.Client, "POST", api+"/graphql", "query { a }", "Content-Type", "application/graphql"); err != nil {
					return err
				}
				_, err := send(ctx, p.Client, "POST", api+"/graphql", fmt.Sprintf(`{"query":"mutation { pay(key: %q) }"}`, l.IdempotencyKey("pay")))
				return err
			}),
			Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 1) },
		},
		"an Ask by HTTP, of the provider that is there": {
			NoDedup: true,
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
					return send(ctx, p.Client, "POST", api+"/charges", `{"cents":4200}`, "Idempotency-Key", key)
				}, onceq.OnUncertain(onceq.Ask(func(ctx context.Context, key string) (any, bool, error) {
					id, err := send(ctx, p.Client, "GET", api+"/charges?key="+key, "")
					if err != nil && err.Error() == "404 Not Found" {
						return nil, false, nil
					}
					return id, err == nil, err
				})))
				return err
			}),
			Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 1) },
		},
		"an Ask by HTTP, of a provider of one's own": {
			NoDedup: true,
			NewProvider: func() http.Handler {
				var charges []string
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					switch {
					case r.Method == http.MethodPost:
						charges = append(charges, r.FormValue("reference"))
					case !slices.Contains(charges, r.FormValue("reference")):
						_, _ = io.WriteString(w, "[]")
						return
					}
					_, _ = io.WriteString(w, `["ch_1"]`)
				})
			},
			Setup: queuetest.SQL(provedTable),
			Handler: func(p *process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					id, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
						return send(ctx, p.Client, "POST", api+"/charges", "reference=order+7", "Content-Type", "application/x-www-form-urlencoded")
					}, onceq.OnUncertain(onceq.Ask(func(ctx context.Context, _ string) (any, bool, error) {
						ids, err := send(ctx, p.Client, "GET", api+"/charges?reference=order+7", "")
						return ids, ids != "[]", err
					})))
					if err != nil {
						return err
					}
					_, err = tx.Exec(ctx, `insert into charges values ($1, $2)`, o.ID, id)
					return err
				})
			},
		},
		"an alert in a later run": {
			Setup: queuetest.SQL(provedTable + `; create table alerts (id int primary key)`),
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if l.Attempt > 1 {
					if _, err := p.Pool.Exec(ctx, `insert into alerts values ($1) on conflict do nothing`, o.ID); err != nil {
						return err
					}
					if err := p.Effect(ctx, "alert", fmt.Sprint(o.ID)); err != nil {
						return err
					}
				}
				_, err := oncePost(ctx, p, l)
				return err
			}),
		},
		"a key in a header of the provider's own": {
			Key: func(r *http.Request) string { return r.Header.Get("X-Reference") },
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := send(ctx, p.Client, "POST", api+"/charges", "", "X-Reference", fmt.Sprint("order ", o.ID))
				return err
			}),
		},
		"a key in the body": {
			Key: func(r *http.Request) string {
				var body struct{ Reference string }
				_ = json.NewDecoder(r.Body).Decode(&body)
				return body.Reference
			},
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := send(ctx, p.Client, "POST", api+"/charges", `{"reference":"order 7"}`)
				return err
			}),
		},
		"a key of onceq where no name says so": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				key := l.IdempotencyKey("charge")
				if _, err := send(ctx, p.Client, "POST", api+"/charges", "", "X-Unheard-Of", key); err != nil {
					return err
				}
				_, err := send(ctx, p.Client, "POST", api+"/receipts", fmt.Sprintf(`{"client_token":%q}`, key))
				return err
			}),
		},
		"PATCH, with what it may be repeated by": {
			Key: func(r *http.Request) string { return r.URL.Path },
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := send(ctx, p.Client, "PATCH", api+"/orders/7", `{"state":"paid"}`)
				return err
			}),
		},
		"the same body in other bytes": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				var body bytes.Buffer
				w := multipart.NewWriter(&body) // with a boundary of its own
				err := errors.Join(w.WriteField("cents", "4200"), w.WriteField("order", "7"), w.Close())
				if err != nil {
					return err
				}
				if _, err := send(ctx, p.Client, "POST", api+"/charges", body.String(), "Content-Type", w.FormDataContentType(),
					"Idempotency-Key", l.IdempotencyKey("charge")); err != nil {
					return err
				}
				fields := []string{`"a":1`, `"b":2`}
				if l.Attempt > 1 {
					fields = []string{`"b":2`, `"a":1`}
				}
				_, err = send(ctx, p.Client, "POST", api+"/receipts", "{"+strings.Join(fields, ",")+"}", "Idempotency-Key", l.IdempotencyKey("receipt"))
				return err
			}),
		},
		"a fallback": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "mail", func(ctx context.Context, key string) (string, error) {
					id, err := send(ctx, p.Client, "POST", "https://one.example/mails", "", "Idempotency-Key", key)
					if err == nil || ctx.Err() != nil {
						return id, err
					}
					return send(ctx, p.Client, "POST", "https://two.example/mails", "", "Idempotency-Key", key)
				})
				return err
			}),
		},
		"a compensation": {
			Setup: queuetest.SQL(`create table orders (id int primary key, state text); insert into orders values (7, 'new')`),
			Handler: func(p *process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					if _, err := oncePost(ctx, p, l); err != nil {
						return err
					}
					state := "shipped"
					_, err := onceq.Once(ctx, l, "ship", func(ctx context.Context, key string) (bool, error) {
						_, err := send(ctx, p.Client, "POST", api+"/parcels", "", "Idempotency-Key", key)
						return true, err
					})
					if err != nil {
						if _, err := onceq.Once(ctx, l, "refund", func(ctx context.Context, key string) (bool, error) {
							_, err := send(ctx, p.Client, "POST", api+"/refunds", "", "Idempotency-Key", key)
							return true, err
						}); err != nil {
							return err
						}
						state = "refunded"
					}
					_, err = tx.Exec(ctx, `update orders set state = $2 where id = $1`, o.ID, state)
					return err
				})
			},
		},
		"giving up, and saying so": {
			Setup: queuetest.SQL(`create table orders (id int primary key, state text); insert into orders values (7, 'new')`),
			Also: func(o *queuetest.Outcome) bool {
				return o.Count(`select count(*) from orders where state = 'failed'`) == 1 && len(o.Effects) <= 1
			},
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				state := "paid"
				if _, err := oncePost(ctx, p, l); err != nil {
					state = "failed"
				}
				_, err := p.Pool.Exec(ctx, `update orders set state = $2 where id = $1`, o.ID, state)
				return err
			}),
		},
		"ids of a sequence, times and the attempt": {
			Setup: queuetest.SQL(`create table charges (id serial primary key, order_id int unique, at timestamptz, day text, minute text, attempt int, lost int, seen timestamptz);
				create table lines (id bigint generated always as identity primary key, charge_id int references charges, note text)`),
			Handler: func(p *process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					var id int
					err := tx.QueryRow(ctx, `insert into charges (order_id, at, day, minute, attempt, lost, seen) values ($1, now(), $2, $3, $4, $5, now() + interval '30 days') returning id`,
						o.ID, time.Now().Format("2006-01-02"), time.Now().Format("15:04:05"), l.Attempt, l.Lost).Scan(&id)
					if err != nil {
						return err
					}
					_, err = tx.Exec(ctx, `insert into lines (charge_id, note) values ($1, $2)`, id, fmt.Sprint("line of charge ", id))
					return err
				})
			},
		},
		"what was there is replaced, with its times": {
			Setup: queuetest.SQL(`create table lines (id uuid primary key default gen_random_uuid(), order_id int, n int, at timestamptz default now());
				create table orders (id int primary key); insert into orders values (7)`),
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				return pgx.BeginFunc(ctx, p.Pool, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, `select from orders where id = $1 for update`, o.ID); err != nil {
						return err
					}
					if _, err := tx.Exec(ctx, `delete from lines where order_id = $1`, o.ID); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, `insert into lines (order_id, n) select $1, generate_series(1, 3)`, o.ID)
					return err
				})
			}),
		},
		"a call in Do, under a key of the application's own": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Do(ctx, p.Queue, onceq.FenceSpec{Key: fmt.Sprint("invoice ", o.ID)}, func(ctx context.Context, c *onceq.FenceLease) (string, error) {
					return send(ctx, p.Client, "POST", api+"/invoices", c.IdempotencyKey())
				})
				return err
			}),
		},
		"a code made once": {
			Setup: queuetest.SQL(`create table codes (order_id int primary key, code text, at timestamptz)`),
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				code, err := onceq.Once(ctx, l, "code", func(context.Context, string) (string, error) { return rand.Text(), nil })
				if err != nil {
					return err
				}
				_, err = p.Pool.Exec(ctx, `insert into codes values ($1, $2, now()) on conflict (order_id) do update set code = excluded.code, at = excluded.at`, o.ID, code)
				return err
			}),
		},
		"a trace that may differ, and a log of attempts": {
			Varies: []string{"orders.details.trace", "public.attempts"},
			Setup: queuetest.SQL(`create table orders (id int primary key, details jsonb); insert into orders values (7, '{}');
				create table attempts (id serial, order_id int)`),
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if _, err := p.Pool.Exec(ctx, `insert into attempts (order_id) values ($1)`, o.ID); err != nil {
					return err
				}
				_, err := p.Pool.Exec(ctx, `update orders set details = $2 where id = $1`, o.ID, map[string]any{"trace": rand.Text(), "paid": true})
				return err
			}),
		},
		"addresses with the job's id and with a key of onceq": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				key := l.IdempotencyKey("receipt")
				for _, address := range []string{fmt.Sprint("/receipts/", l.ID), "/receipts/" + key} {
					if _, err := send(ctx, p.Client, "PUT", api+address, ""); err != nil {
						return err
					}
				}
				return p.Effect(ctx, fmt.Sprintf("mail about job %d", l.ID), key)
			}),
		},
		"the next page, of the handler's own kind": {
			Setup: queuetest.SQL(`create table pages (id int primary key)`),
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if _, err := p.Queue.Enqueue(ctx, p.Pool, provedCharge.Job(provedOrder{ID: o.ID + 1})); err != nil {
					return err
				}
				_, err := p.Pool.Exec(ctx, `insert into pages values ($1) on conflict do nothing`, o.ID)
				return err
			}),
		},
		"jobs with a key that follow, in a lane and after another one": {
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				ship, err := p.Queue.Enqueue(ctx, p.Pool, shipInLane.Job(o))
				if err != nil {
					return err
				}
				job := onceq.Job{Kind: "thank", Key: fmt.Sprint(o.ID), Payload: o, After: []onceq.JobRef{{ID: ship.ID}}}
				if _, err := p.Queue.Enqueue(ctx, p.Pool, job); err != nil {
					return err
				}
				_, err = p.Pool.Exec(ctx, `select 1`)
				return err
			}),
		},
		"a job that leaves its lane when it fails": {
			Job: func() onceq.Job {
				job := provedJob()
				job.Lane, job.LaneRule = "stock/north", onceq.Overtake
				return job
			},
			Handler: lease(func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if _, err := p.Pool.Exec(ctx, `select 1`); err != nil {
					return onceq.RetryAfter(time.Hour, err)
				}
				return nil
			}),
		},
		"what a person knows of a held effect": {
			NoDedup: true,
			Setup:   queuetest.SQL(provedTable),
			Handler: func(p *process) onceq.Handler {
				return provedCharge.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, o provedOrder) error {
					id, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
						return send(ctx, p.Client, "POST", api+"/charges", "")
					}, onceq.OnUncertain(onceq.Hold()))
					if err != nil {
						return err
					}
					_, err = tx.Exec(ctx, `insert into charges values ($1, $2)`, o.ID, id)
					return err
				})
			},
		},
	}
	for name, proof := range proofs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 9)
			if proof.Job == nil {
				proof.Job = provedJob
			}
			switch name {
			case "a fallback", "a compensation", "giving up, and saying so", "ids of a sequence, times and the attempt", "a code made once",
				"what a person knows of a held effect", "a job with a lane and a limit that a provider closes": // each place has an outcome of its own
			default:
				proof = queuetest.AtOwnSteps(proof)
			}
			require.Empty(t, said(t, proof))
		})
	}
}

// These mistakes show only in the contents of tables, or when a server fails.
func TestProve_FindsWithoutACheck(t *testing.T) {
	t.Parallel()
	type process = queuetest.Process
	exec := func(statement string, args ...func() any) func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
		return func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
			values := []any{o.ID}
			for _, arg := range args {
				values = append(values, arg())
			}
			_, err := p.Pool.Exec(ctx, statement, values...)
			return err
		}
	}
	const orders = `create table orders (id int primary key, n int not null default 0, code text); insert into orders values (7, 0, null)`
	chance := func() any { return rand.Text() }
	cases := map[string]struct {
		handler func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error
		change  func(*queuetest.Proof)
		want    []string
	}{
		"n = n + 1": {
			handler: exec(`update orders set n = n + 1 where id = $1`),
			want:    []string{"table public.orders: n is 2, without faults 1", "mistake: writes that commit apart from the completion"},
		},
		"read, modify, write": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				var n int
				if err := p.Pool.QueryRow(ctx, `select n from orders where id = $1`, o.ID).Scan(&n); err != nil {
					return err
				}
				_, err := p.Pool.Exec(ctx, `update orders set n = $2 where id = $1`, o.ID, n+1)
				return err
			},
			want: []string{"table public.orders: n is 2, without faults 1"},
		},
		"read, modify, write outside": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				var n int
				if err := p.Pool.QueryRow(ctx, `update orders set n = n + 1 where id = $1 returning n`, o.ID).Scan(&n); err != nil {
					return err
				}
				_, err := send(ctx, p.Client, "PUT", "https://api.example/stock/7", fmt.Sprintf(`{"n":%d}`, n))
				return err
			},
			want: []string{"PUT api.example/stock/7"},
		},
		"a code by chance": {
			handler: exec(`update orders set code = $2 where id = $1`, chance),
			want:    []string{"table public.orders: code was ", "mistake: each run makes a new random value"},
		},
		"a code by chance, in a row that is replaced": {
			handler: exec(`insert into codes select $1, $2 from (select) x left join lateral (select) y on true
				on conflict (order_id) do update set code = excluded.code`, chance),
			change: func(proof *queuetest.Proof) {
				proof.Setup = queuetest.SQL(`create table codes (order_id int unique, code text)`)
			},
			want: []string{"table public.codes: code was "},
		},
		"a server's failure taken for a refusal": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (string, error) {
					id, err := send(ctx, p.Client, "POST", "https://api.example/charges", "")
					if err != nil && strings.HasPrefix(err.Error(), "500") {
						err = onceq.NotApplied(err)
					}
					return id, err
				}, onceq.OnUncertain(onceq.Hold()))
				return err
			},
			want: []string{
				`got 500 for POST api.example/charges in effect "charge", which had been done; then the next run made POST api.example/charges again`,
				`mistake: an answer taken for a refusal: effect "charge" happened`,
				"ONCEQ_PROVE=fail-",
			},
		},
		"an address that is another one in each run": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := send(ctx, p.Client, "PUT", "https://api.example/charges/"+rand.Text(), "")
				return err
			},
			want: []string{"and others like it happened twice, without faults once", "mistake: the address of a call differs between the runs of one job"},
		},
		"a charge beside an address that is another one in each run": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if _, err := send(ctx, p.Client, "POST", "https://api.example/charges", ""); err != nil {
					return err
				}
				_, err := send(ctx, p.Client, "PUT", "https://api.example/receipts/"+rand.Text(), "")
				return err
			},
			want: []string{"POST api.example/charges again: it happened twice", "mistake: the address of a call differs between the runs of one job"},
		},
		"a charge beside an address with the job's id": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if _, err := send(ctx, p.Client, "POST", "https://api.example/charges", ""); err != nil {
					return err
				}
				_, err := send(ctx, p.Client, "PUT", fmt.Sprintf("https://api.example/receipts/%d", l.ID), "")
				return err
			},
			want: []string{"POST api.example/charges again: it happened twice", "mistake: an effect outside without a fence"},
		},
		"a mail that is named by the job": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				return p.Effect(ctx, fmt.Sprintf("mail about job %d", l.ID), "")
			},
			want: []string{"mail about job {id} again: it happened twice", "mistake: an effect outside without a fence"},
		},
		"a job that follows, in a lane": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if _, err := p.Queue.Enqueue(ctx, p.Pool, onceq.Job{Kind: "ship", Payload: o, Lane: "stock/north"}); err != nil {
					return err
				}
				_, err := p.Pool.Exec(ctx, `select 1`)
				return err
			},
			want: []string{`died before ` + "`select 1`" + `; then queue of "ship" has 2 rows, without faults 1`, "the same with cut-3-before"},
		},
		"a job that follows, after another one": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				first, err := p.Queue.Enqueue(ctx, p.Pool, onceq.Job{Kind: "pack", Key: "7", Payload: o})
				if err != nil {
					return err
				}
				if _, err := p.Queue.Enqueue(ctx, p.Pool, onceq.Job{Kind: "ship", Payload: o, After: []onceq.JobRef{{ID: first.ID}}}); err != nil {
					return err
				}
				_, err = p.Pool.Exec(ctx, `select 1`)
				return err
			},
			want: []string{`queue of "ship" has 2 rows, without faults 1`},
		},
		"recorded, and the job that follows is lost, in a lane": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				tag, err := p.Pool.Exec(ctx, `update orders set n = 1 where id = $1 and n = 0`, o.ID)
				if err != nil || tag.RowsAffected() == 0 {
					return err
				}
				_, err = p.Queue.Enqueue(ctx, p.Pool, shipInLane.Job(o))
				return err
			},
			want: []string{"died after `update orders set n = 1 where id = $1 and n = 0` was committed, before its answer; then queue of \"ship\" has 0 rows, without faults 1"},
		},
		"a status that nobody looks at": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, key string) (bool, error) {
					req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://api.example/charges", nil)
					if err != nil {
						return false, err
					}
					req.Header.Set("Idempotency-Key", key)
					res, err := p.Client.Do(req)
					if err != nil {
						return false, err
					}
					return true, res.Body.Close()
				})
				return err
			},
			want: []string{
				`got 503 for POST api.example/charges in effect "charge", which was not done; then POST api.example/charges happened never, without faults once`,
				"mistake: an answer that nobody looks at",
				"ONCEQ_PROVE=refuse-",
			},
		},
		"a shutdown taken for the end of the work": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				for _, to := range []string{"ada", "bob", "eve"} {
					if ctx.Err() != nil {
						break
					}
					if _, err := onceq.Once(ctx, l, to, func(ctx context.Context, key string) (bool, error) {
						return true, p.Effect(ctx, "mail to "+to, key)
					}); err != nil {
						return err
					}
				}
				return nil
			},
			want: []string{
				`its worker was shut down after mail to ada in effect "ada"; then mail to bob happened never, without faults once; and mail to eve happened never`,
				"mistake: a shutdown taken for the end of the work",
				"ONCEQ_PROVE=stop-",
			},
		},
		"a shutdown taken for the end of the work, in tables": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				for n := 1; n <= 2 && ctx.Err() == nil; n++ {
					if _, err := p.Pool.Exec(ctx, `update orders set n = $2 where id = $1`, o.ID, n); err != nil {
						return err
					}
				}
				return nil
			},
			want: []string{
				"its worker was shut down after `update orders set n = $2 where id = $1`; then table public.orders: n is 1, without faults 2",
				"mistake: a shutdown taken for the end of the work",
			},
		},
		"a job that is cancelled because of an error": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				_, err := p.Pool.Exec(ctx, `select 1`)
				if err != nil {
					if _, err := p.Queue.Cancel(ctx, p.Pool, l.ID); err != nil {
						return err
					}
				}
				return err
			},
			want: []string{"the job ended cancelled, without faults completed"},
		},
		"a compensation that is not fenced": {
			handler: func(ctx context.Context, p *process, l *onceq.Lease, o provedOrder) error {
				if _, err := send(ctx, p.Client, "POST", "https://api.example/charges", "", "Idempotency-Key", l.IdempotencyKey("charge")); err != nil {
					for range 2 {
						if _, err := send(ctx, p.Client, "POST", "https://api.example/refunds", ""); err != nil {
							return err
						}
					}
				}
				return nil
			},
			want: []string{"POST api.example/refunds again: it happened twice, and without faults never"},
		},
		"a table that is misspelt": {
			handler: exec(`update orders set n = 1 where id = $1`),
			change:  func(proof *queuetest.Proof) { proof.Varies = []string{"order.n"} },
			want:    []string{`fatal: queuetest: Prove: Proof.Varies: the table of "order.n" does not exist`},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.Few(t, 7)
			proof := queuetest.Proof{
				Setup: queuetest.SQL(orders),
				Job:   provedJob,
				Handler: func(p *process) onceq.Handler {
					return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error { return c.handler(ctx, p, l, o) })
				},
			}
			if c.change != nil {
				c.change(&proof)
			}
			all := strings.Join(said(t, queuetest.AtOwnSteps(proof)), "\n")
			for _, want := range c.want {
				require.Contains(t, all, want)
			}
		})
	}
}

// A handler that bypasses the process's client cannot be proven, and the proof says so.
func TestProve_SaysThatItSawNoCalls(t *testing.T) {
	t.Parallel()
	s := &spy{TB: t}
	queuetest.Prove(s, queuetest.AtOwnSteps(queuetest.Proof{
		Job: provedJob,
		Handler: func(*queuetest.Process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
				_, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (bool, error) { return true, nil })
				return err
			})
		},
	}))
	require.Empty(t, s.errors)
	require.Contains(t, s.logs[0], "steps, 0 calls seen;")
	require.Contains(t, s.logs[0], `0 calls seen in effect ["charge"]`)
}

// If a provider refuses a changed body, the run ends. More attempts, until the job is dead, would show nothing new.
func TestProve_AChangedBodyIsSaidOnce(t *testing.T) {
	t.Parallel()
	attempts := 0
	var mu sync.Mutex
	said := said(t, queuetest.AtOwnSteps(queuetest.Proof{
		Job: provedJob,
		Handler: func(p *queuetest.Process) onceq.Handler {
			return provedCharge.Handle(func(ctx context.Context, l *onceq.Lease, o provedOrder) error {
				mu.Lock()
				if l.Attempt < onceq.DefaultMaxAttempts { // the later run begins there
					attempts = max(attempts, l.Attempt)
				}
				mu.Unlock()
				_, err := send(ctx, p.Client, "POST", "https://api.example/charges", rand.Text(), "Idempotency-Key", l.IdempotencyKey("charge"))
				return err
			})
		},
	}))
	require.Len(t, said, 1)
	require.Equal(t, 1, strings.Count(strings.Split(said[0], "\n")[0], "with its key and another body"))
	require.Less(t, attempts, 4)
}

// A handler that waits for an event and sleeps, and the job that emits the event: each fault comes before, between and after.
func TestProve_AFlowAndItsEvent(t *testing.T) {
	t.Parallel()
	kind := onceq.Kind[string]{Name: "flow"}
	queuetest.Prove(t, queuetest.Proof{
		Jobs: func() []onceq.Job { return []onceq.Job{kind.Job("flow"), kind.Job("confirm")} },
		Handler: func(p *queuetest.Process) onceq.Handler {
			return kind.Handle(func(ctx context.Context, l *onceq.Lease, what string) error {
				if what == "confirm" {
					return pgx.BeginFunc(ctx, p.Pool, func(tx pgx.Tx) error {
						if _, err := p.Queue.Emit(ctx, tx, "confirmed", "7", "by mail"); err != nil {
							return err
						}
						return l.Complete(ctx, tx)
					})
				}
				post := func(name string) error {
					_, err := onceq.Once(ctx, l, name, func(ctx context.Context, key string) (string, error) {
						return send(ctx, p.Client, "POST", "https://api.example/"+name, "{}", "Idempotency-Key", key)
					})
					return err
				}
				if err := post("ask"); err != nil {
					return err
				}
				how, ok, err := onceq.Await[string](ctx, l, "confirmed", "7", 72*time.Hour)
				if err != nil {
					return err
				}
				if !ok || how != "by mail" {
					return onceq.Fatal(errors.New("nobody confirmed"))
				}
				if err := onceq.Sleep(ctx, l, "a day", 24*time.Hour); err != nil {
					return err
				}
				return post("thank")
			})
		},
		Check: func(o *queuetest.Outcome) { require.Len(o, o.Effects, 2) },
	})
}
