package onceq_test

import (
	"context"
	"log"
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// database gives an example a database of its own with onceq's tables. A program makes its own pool with pgxpool.New
// and its queue with onceq.New(pool, nil); its tables come from the package migrations.
func database() (ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, done func()) {
	t := &exampleTB{ctx: context.Background()}
	db := queuetest.New(t)
	q, err := onceq.New(db.Pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	check(err)
	return t.ctx, db.Pool, q, t.done
}

// check keeps the examples short. A program returns its errors.
func check(err error) {
	if err != nil {
		panic(err)
	}
}

// exampleTB lets an example use queuetest, as a test does.
type exampleTB struct {
	testing.TB
	ctx     context.Context
	cleanup []func()
}

func (t *exampleTB) Helper()                   {}
func (t *exampleTB) Name() string              { return "example" }
func (t *exampleTB) Context() context.Context  { return t.ctx }
func (t *exampleTB) Cleanup(fn func())         { t.cleanup = append(t.cleanup, fn) }
func (t *exampleTB) Failed() bool              { return false }
func (t *exampleTB) Logf(f string, a ...any)   { log.Printf(f, a...) }
func (t *exampleTB) Errorf(f string, a ...any) { log.Panicf(f, a...) }
func (t *exampleTB) Fatalf(f string, a ...any) { log.Panicf(f, a...) }
func (t *exampleTB) Skipf(f string, a ...any)  { log.Panicf(f, a...) }
func (t *exampleTB) Error(a ...any)            { log.Panic(a...) }
func (t *exampleTB) Fatal(a ...any)            { log.Panic(a...) }

func (t *exampleTB) done() {
	for i := len(t.cleanup) - 1; i >= 0; i-- {
		t.cleanup[i]()
	}
}
