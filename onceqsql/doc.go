// Package onceqsql lets applications that use database/sql enqueue jobs, claim fences and complete jobs in their own
// transactions. It works with pgx's stdlib driver, with lib/pq, and with libraries on top of them (GORM, bun, ent,
// sqlx, sqlc). It imports only database/sql and pgx.
//
// Pass a handle wherever onceq takes a DB:
//
//	tx, err := db.BeginTx(ctx, nil)
//	…
//	_, err = tx.ExecContext(ctx, `insert into users …`)
//	…
//	_, err = queue.Enqueue(ctx, onceqsql.Tx(tx), Welcome.Job(mail))
//	…
//	err = tx.Commit() // the user and the job, or neither
//
// Queue.EnqueueMany, Fence.Claim, FenceLease.Complete, FenceLease.Release, Lease.Complete, Queue.Get and the others
// take a handle too. They promise the same and return the same errors as with pgx's own handles. Two things need pgx
// itself: calls with a pgx.Batch, and the transactions that a worker opens for its handlers. Workers run on the pool
// that onceq.New was given; that pool opens no connection before it is used.
//
// docs/use/database-sql.md lists the differences between the drivers that an application can see.
package onceqsql
