package onceq_test

import (
	"context"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/exampletb"
	"github.com/onceq/onceq/queuetest"
)

// database gives an example a database of its own with onceq's tables. A program makes its own pool with pgxpool.New
// and its queue with onceq.New(pool, nil); its tables come from the package migrations.
func database() (ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, done func()) {
	ctx, db, done := testDatabase()
	return ctx, db.Pool, db.Queue, done
}

// check keeps the examples short. A program returns its errors.
func check(err error) {
	if err != nil {
		panic(err)
	}
}

// testDatabase is database for examples that let time pass, as a test does.
func testDatabase() (context.Context, *queuetest.DB, func()) {
	t := exampletb.New()
	return t.Context(), queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)})), t.Done
}
