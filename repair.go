package onceq

import "context"

// Cancel stub
func (q *Queue) Cancel(ctx context.Context, db DB, id int64) (State, error) { return 0, nil }
