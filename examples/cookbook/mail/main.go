// Mail sends one welcome mail for each sign-up, however often the form is submitted and the job is delivered.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/textproto"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type signUp struct {
	UserID int    `json:"user_id"`
	Email  string `json:"email"`
}

var welcome = onceq.Kind[signUp]{
	Name:    "welcome",
	Key:     func(s signUp) string { return fmt.Sprintf("welcome:%d", s.UserID) },
	Backoff: func(attempt int, err error) time.Duration { return 0 },
}

// deliver sends the mail and says what the server's answer means.
func deliver(server *mailServer, to, messageID string) error {
	err := server.send(to, messageID)
	var refused *textproto.Error // what smtp.Client returns if the server answered and did not take the mail
	switch {
	case !errors.As(err, &refused):
		return err // it was sent, or nobody knows
	case refused.Code >= 500:
		return onceq.Fatal(onceq.NotApplied(err)) // there is no such address
	}
	return onceq.NotApplied(err)
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, `create table users (id int primary key, email text not null)`)
	defer pool.Close()

	// The user and the job are stored together. The form is submitted twice.
	ada := signUp{UserID: 42, Email: "ada@example.com"}
	for range 2 {
		example.Check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `insert into users values ($1, $2) on conflict do nothing`, ada.UserID, ada.Email)
			if err != nil {
				return err
			}
			res, err := q.Enqueue(ctx, tx, welcome.Job(ada))
			fmt.Println("submitted, duplicate:", res.Duplicate)
			return err
		}))
	}

	server := &mailServer{}
	example.Drain(ctx, q, welcome.Handle(func(ctx context.Context, l *onceq.Lease, s signUp) error {
		_, err := onceq.Once(ctx, l, "send", func(ctx context.Context, key string) (bool, error) {
			return true, deliver(server, s.Email, key+"@mail.example.com")
		}, onceq.OnUncertain(onceq.Hold())) // a mail server does not deduplicate: if its answer is lost, a person decides
		fmt.Printf("attempt %d: %v\n", l.Attempt, err)
		return err
	}))
	fmt.Println("sent:", len(server.sent))
}

// mailServer stands for a mail server that is busy at first.
type mailServer struct {
	calls int
	sent  []string
}

// send does what smtp.Client does from Mail to the Close of Data. smtp.SendMail also returns an error of Quit, which says nothing about
// the mail: that has been taken.
func (s *mailServer) send(to, messageID string) error {
	s.calls++
	if s.calls == 1 {
		return &textproto.Error{Code: 451, Msg: "try again later"}
	}
	s.sent = append(s.sent, to)
	return nil
}

// Output:
// submitted, duplicate: false
// submitted, duplicate: true
// attempt 1: 451 "try again later"
// attempt 2: <nil>
// sent: 1
