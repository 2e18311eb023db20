package migrations_test

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/exampletb"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

// emptyDatabase gives an example a connection to an empty database.
func emptyDatabase() (ctx context.Context, conn *pgx.Conn, done func()) {
	t := exampletb.New()
	conn, err := pgx.Connect(t.Context(), queuetest.New(t, queuetest.NoMigrations()).URL)
	check(err)
	t.Cleanup(func() { check(conn.Close(t.Context())) })
	return t.Context(), conn, t.Done
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// A deploy calls Up once, where it runs the application's own migrations. Calling it again does nothing.
func ExampleUp() {
	ctx, conn, done := emptyDatabase() // conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	defer done()

	for range 2 {
		check(migrations.Up(ctx, conn, "onceq"))
	}
	var there bool
	check(conn.QueryRow(ctx, `select to_regclass('onceq.jobs') is not null`).Scan(&there))
	fmt.Println(there)
	// Output: true
}

// SQL is for applications that already have a migration tool: write each step into a file of that tool, once.
func ExampleSQL() {
	steps, err := migrations.SQL("onceq")
	check(err)
	for _, step := range steps {
		// golang-migrate: os.WriteFile(fmt.Sprintf("%04d_onceq.up.sql", step.Version), []byte(step.Up), 0o644)
		// and the same with .down.sql and step.Down.
		first, _, _ := strings.Cut(step.Up, "\n")
		fmt.Println(step.Name, "begins with:", first)
	}
	// Output: 001_onceq.sql begins with: create schema if not exists "onceq";
}

// The application's role gets the rights that it needs. It may not change the tables.
func ExampleGrants() {
	ctx, conn, done := emptyDatabase()
	defer done()
	check(migrations.Up(ctx, conn, "onceq"))

	tx, err := conn.Begin(ctx)
	check(err)
	defer func() { check(tx.Rollback(ctx)) }() // roles belong to the server: this example leaves none behind
	_, err = tx.Exec(ctx, `create role shop_of_the_example`)
	check(err)
	_, err = tx.Exec(ctx, migrations.Grants("onceq", "shop_of_the_example"))
	check(err)

	var insert, create bool
	check(tx.QueryRow(ctx, `
		select has_table_privilege('shop_of_the_example', 'onceq.jobs', 'insert'),
		       has_schema_privilege('shop_of_the_example', 'onceq', 'create')`).Scan(&insert, &create))
	fmt.Println("enqueue:", insert, "create tables:", create)
	// Output: enqueue: true create tables: false
}
