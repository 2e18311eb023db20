// Package orm is one thing in five ways: a user is stored and the job that welcomes him is enqueued in the same
// transaction, with GORM, bun, ent, sqlx and sqlc. It is a module of its own, so that none of them comes along with onceq.
package orm

import (
	"fmt"

	"github.com/onceq/onceq"
)

// Mail is what the job carries.
type Mail struct {
	UserID int64  `json:"user_id"`
	Email  string `json:"email"`
}

// Welcome is the same whatever enqueues it.
var Welcome = onceq.Kind[Mail]{
	Name: "welcome",
	Key:  func(m Mail) string { return fmt.Sprintf("welcome:%d", m.UserID) },
}
