// Package orm does one thing in five ways: with GORM, bun, ent, sqlx and sqlc. A user is stored, and the job that welcomes
// the user is enqueued in the same transaction. The job is completed together with what its handler writes. A repeated
// request gets the first one's answer. It is a module of its own, so onceq does not depend on any of them.
package orm

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/onceq/onceq"
)

// Mail is what the job carries.
type Mail struct {
	UserID int64  `json:"user_id"`
	Email  string `json:"email"`
}

// Welcome is the same job, whatever enqueues it.
var Welcome = onceq.Kind[Mail]{
	Name: "welcome",
	Key:  func(m Mail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
}

// Once stores a user once for the key of a request, and returns the user's id to each repetition. The fence is taken and
// completed inside tx, the transaction in which insert stores the user: everything commits or nothing. Another email under
// the same key is onceq.ErrMismatch. The scope is this sort of request's own; where you know the client, put it into the scope too, so
// that keys of different clients do not meet.
func Once(ctx context.Context, q *onceq.Queue, tx onceq.DB, key, email string, insert func() (userID int64, err error)) (userID int64, err error) {
	fence, err := q.Fence(onceq.FenceSpec{Class: onceq.ClassRequest, Scope: "sign-up", Key: key, Payload: email})
	if err != nil {
		return 0, err
	}
	claim, err := fence.Claim(ctx, tx)
	if err != nil {
		return 0, err
	}
	if claim.Replayed {
		err := json.Unmarshal(claim.Result, &userID)
		return userID, err
	}
	if userID, err = insert(); err != nil {
		return 0, err
	}
	return userID, claim.Complete(ctx, tx, userID)
}
