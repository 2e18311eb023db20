//go:build unix

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

// schema holds onceq's tables in this program; the application's own are in the schema demo.
const schema = "onceq_demo"

// No table here prevents a second receipt. That is onceq's task, and the ledger counts receipts.
const tables = `
create table demo.users (
  id        bigint generated always as identity primary key,
  signup_id text not null unique,
  email     text not null unique,
  name      text not null,
  plan      text not null
);
create table demo.receipts (
  user_id   bigint not null references demo.users,
  charge_id text not null,
  cents     int not null
)`

// User is a user who signed up, and the payload of both jobs that a sign-up causes.
type User struct {
	ID    int64  `json:"id"`
	Email string `json:"email"`
	Name  string `json:"name"`
	Plan  string `json:"plan"`
}

// These are the kinds of jobs. A job's key names the work and the user, whichever request brought it.
//
// The waits are short, because a demonstration should be over before the coffee is. MaxLost is high, because this program
// kills workers on purpose: by default a job is dead, and waits for a person, when five workers have died with it.
var (
	Welcome = onceq.Kind[User]{
		Name:    "welcome",
		Key:     func(u User) string { return fmt.Sprintf("welcome:%d", u.ID) },
		Backoff: shortly,
		MaxLost: 50,
	}
	Charge = onceq.Kind[User]{
		Name:    "charge",
		Key:     func(u User) string { return fmt.Sprintf("charge:%d", u.ID) },
		Backoff: shortly,
		MaxLost: 50,
	}
)

func shortly(attempt int, _ error) time.Duration {
	return time.Duration(min(attempt, 10)) * (100*time.Millisecond + rand.N(100*time.Millisecond))
}

// app is the application that people sign up with.
type app struct {
	pool *pgxpool.Pool
	q    *onceq.Queue
	seed uint64

	requests, known, suppressed, failed atomic.Int64
}

func (a *app) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n := a.requests.Add(1)
	var form signup
	if err := json.NewDecoder(r.Body).Decode(&form); err != nil || form.ID == "" || form.Email == "" {
		http.Error(w, "a sign-up has an id and an email", http.StatusBadRequest)
		return
	}
	user, created, suppressed, err := a.signUp(r.Context(), form)
	if err != nil {
		// The client does not know what happened to its request, and sends it again.
		a.failed.Add(1)
		http.Error(w, "try again", http.StatusServiceUnavailable)
		return
	}
	a.suppressed.Add(int64(suppressed))
	status := http.StatusOK
	if created {
		status = http.StatusCreated
	} else {
		a.known.Add(1)
	}
	if dice(a.seed, "app", "", int(n)).IntN(5) == 0 {
		time.Sleep(120 * time.Millisecond) // longer than some clients wait
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(user)
}

// signUp stores the user and enqueues the user's jobs in one transaction: both or neither. It does not ask whether the
// sign-up is new. A user who exists is found, and keys that are taken enqueue nothing.
func (a *app) signUp(ctx context.Context, form signup) (u User, created bool, suppressed int, err error) {
	err = pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
		email := strings.ToLower(form.Email)
		tag, err := tx.Exec(ctx, `
			insert into demo.users (signup_id, email, name, plan) values ($1, $2, $3, $4)
			on conflict do nothing`, form.ID, email, form.Name, form.Plan)
		if err != nil {
			return err
		}
		created = tag.RowsAffected() == 1
		if err := tx.QueryRow(ctx, `select id, email, name, plan from demo.users where signup_id = $1 or email = $2`,
			form.ID, email).Scan(&u.ID, &u.Email, &u.Name, &u.Plan); err != nil {
			return err
		}
		results, err := a.q.EnqueueMany(ctx, tx, []onceq.Job{Welcome.Job(u), Charge.Job(u)})
		for _, r := range results {
			if r.Duplicate {
				suppressed++
			}
		}
		return err
	})
	return u, created, suppressed, err
}

func price(plan string) int {
	return cmp.Or(map[string]int{"team": 4900, "business": 19900}[plan], 900)
}
