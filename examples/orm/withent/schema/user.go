// Package schema says what ent generates.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/schema/field"
)

// User is a row of users.
type User struct{ ent.Schema }

// Fields of a user.
func (User) Fields() []ent.Field {
	return []ent.Field{field.Int64("id"), field.String("email"), field.Bool("welcomed").Default(false)}
}
