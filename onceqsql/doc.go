// Package onceqsql lets applications that use database/sql enqueue, claim fences and complete jobs in their own
// transactions: with pgx's stdlib driver, with lib/pq, and with whatever stands on top of them (GORM, bun, ent, sqlx,
// sqlc). It depends on none of these but database/sql and pgx.
//
// A handle goes wherever onceq takes a DB:
//
//	tx, err := db.BeginTx(ctx, nil)
//	…
//	_, err = tx.ExecContext(ctx, `insert into users …`)
//	…
//	_, err = queue.Enqueue(ctx, onceqsql.Tx(tx), Welcome.Job(mail))
//	…
//	err = tx.Commit() // the user and the job, or neither
//
// So do Queue.EnqueueMany, Fence.Claim, FenceLease.Complete, FenceLease.Release, Lease.Complete, Queue.Get and the others. What
// they promise and the errors they return are the same as with pgx's own handles. Only what takes a pgx.Batch, and the
// transactions that a worker opens for its handlers, stay pgx's: workers run on the pool that onceq.New was given, which
// opens no connection before it is used.
//
// The drivers differ where the application can see it: see docs/database-sql.md.
package onceqsql
