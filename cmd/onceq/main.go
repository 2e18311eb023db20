// Command onceq shows what is in a queue, says what is wrong with it, and mends it. docs/run/operations.md says when to type what.
//
//	onceq doctor
//	onceq jobs list --state dead
//	onceq jobs redrive --kind mail --state dead
//
// It works on the database in --database, DATABASE_URL, or the PG* variables of psql.
package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second one ends the process at once
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, in *os.File, out, errOut io.Writer) int {
	a := &app{in: in, out: out, errOut: errOut}
	defer a.close()
	root := a.command()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	err := root.ExecuteContext(ctx)
	if err != nil && errors.Is(ctx.Err(), context.Canceled) && !errors.As(err, new(*exit)) {
		err = &exit{codeInterrupted, errors.New("interrupted")}
	}
	return a.report(err)
}
