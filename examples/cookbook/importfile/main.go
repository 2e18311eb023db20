// Importfile imports a file row by row: one job for the file, and one for each row. A wrong row does not stop the others.
// Importing the same file again changes nothing.
package main

import (
	"context"
	"encoding/csv"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
	"github.com/onceq/onceq/onceqops"
)

// files stands for the place where uploads are stored.
var files = map[string]string{
	"prices.csv": "A-1,1200\nA-2,900\nA-3,on request\nA-4,150\n",
}

type row struct {
	File  string `json:"file"`
	Line  int    `json:"line"`
	SKU   string `json:"sku"`
	Cents string `json:"cents"`
}

var (
	importFile = onceq.Kind[string]{
		Name: "import_file",
		Key:  func(name string) string { return name },
	}
	importRow = onceq.Kind[row]{
		Name: "import_row",
		Key:  func(r row) string { return fmt.Sprintf("%s:%d", r.File, r.Line) },
	}
)

// split enqueues the rows of a file in the transaction of its own completion: all of them or none.
func split(q *onceq.Queue) onceq.Handler {
	return importFile.HandleTx(func(ctx context.Context, tx pgx.Tx, l *onceq.Lease, name string) error {
		records, err := csv.NewReader(strings.NewReader(files[name])).ReadAll()
		if err != nil {
			return onceq.Fatal(err)
		}
		var jobs []onceq.Job
		for i, r := range records {
			jobs = append(jobs, importRow.Job(row{File: name, Line: i + 1, SKU: r[0], Cents: r[1]}))
		}
		_, err = q.EnqueueMany(ctx, tx, jobs)
		return err
	})
}

// store writes up to a hundred rows in one transaction. If one of them is wrong, each runs by itself, and only the wrong
// one fails.
func store() onceq.Handler {
	return importRow.HandleBatch(100, func(ctx context.Context, tx pgx.Tx, rows []onceq.Item[row]) error {
		for _, r := range rows {
			cents, err := strconv.Atoi(r.Payload.Cents)
			if err != nil {
				return onceq.Fatal(fmt.Errorf("line %d: %w", r.Payload.Line, err)) // another attempt would not help
			}
			_, err = tx.Exec(ctx, `
				insert into prices values ($1, $2)
				on conflict (sku) do update set cents = excluded.cents`, r.Payload.SKU, cents)
			if err != nil {
				return err
			}
		}
		return nil
	})
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, `create table prices (sku text primary key, cents int not null)`)
	defer pool.Close()

	for range 2 { // somebody clicks twice
		res, err := q.Enqueue(ctx, pool, importFile.Job("prices.csv"))
		example.Check(err)
		fmt.Println("import, duplicate:", res.Duplicate)
		example.Drain(ctx, q, split(q), store())
	}

	var prices int
	example.Check(pool.QueryRow(ctx, `select count(*) from prices`).Scan(&prices))
	fmt.Println("prices:", prices)
	wrong, err := onceqops.New(q).List(ctx, pool, onceqops.Filter{Kind: importRow.Name, States: []onceq.State{onceq.StateDead}})
	example.Check(err)
	for _, job := range wrong {
		fmt.Println(job.Errors[len(job.Errors)-1].Error)
	}
}

// Output:
// import, duplicate: false
// import, duplicate: true
// prices: 3
// line 3: strconv.Atoi: parsing "on request": invalid syntax
