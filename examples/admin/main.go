// Admin is the command for when something is wrong: see docs/runbook.md. It works on the database in DATABASE_URL.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
)

const usage = `admin stats | health | running | dead | held
admin show|cancel|retry|redrive|discard <job>
admin redrive-all <kind>
admin applied|never <job> <effect>
admin applied-all|never-all <kind> <effect>`

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	args = append(args, "", "", "")
	job, numberErr := strconv.ParseInt(args[1], 10, 64)
	list := func(state onceq.State) error {
		jobs, err := q.List(ctx, pool, onceq.Filter{States: []onceq.State{state}})
		if err == nil && len(jobs) == 0 {
			fmt.Println("no jobs are", state)
		}
		for _, j := range jobs {
			fmt.Printf("%d %s %s %s, attempt %d of %d, %d leases lost\n", j.ID, j.Queue, j.Kind, j.State, j.Attempts, j.MaxAttempts, j.Lost)
		}
		return err
	}
	state := func(s onceq.State, err error) error {
		if err == nil {
			fmt.Println(s)
		}
		return err
	}
	switch command := args[0]; command {
	case "stats":
		stats, err := q.Stats(ctx)
		if err == nil && len(stats) == 0 {
			fmt.Println("no queue has jobs, a history or workers")
		}
		for _, s := range stats {
			fmt.Printf("%s: %d waiting, the oldest for %v, %d running, %d claimed ahead, %d to retry, %d delayed, %d dead, %d held\n",
				s.Queue, s.Waiting, s.Oldest, s.Running, s.Leased-s.Running, s.Retrying, s.Delayed, s.Dead, s.Held)
		}
		return err
	case "health":
		found, err := q.Health(ctx)
		for _, f := range found {
			fmt.Println(f)
		}
		if err == nil && len(found) == 0 {
			fmt.Println("found nothing that slows the queues down")
		}
		return err
	case "running":
		return list(onceq.StateRunning)
	case "dead":
		return list(onceq.StateDead)
	case "held":
		return list(onceq.StateHeld)
	case "redrive-all":
		if args[1] == "" {
			return errors.New(usage)
		}
		n, taken, err := q.RedriveMany(ctx, pool, onceq.Filter{Kind: args[1], States: []onceq.State{onceq.StateDead}})
		fmt.Printf("%d run again; %d stay, because another job has their key by now\n", n, taken)
		return err
	case "applied-all", "never-all":
		if args[1] == "" || args[2] == "" {
			return errors.New(usage)
		}
		answer := onceq.NeverApplied()
		if command == "applied-all" {
			answer = onceq.Applied(nil)
		}
		resolved, redriven, err := q.ResolveMany(ctx, pool, onceq.Filter{Kind: args[1]}, args[2], answer)
		fmt.Printf("%d effects settled, %d jobs run again\n", resolved, redriven)
		return err
	case "show", "cancel", "retry", "redrive", "discard", "applied", "never":
		if numberErr != nil {
			return errors.New(usage)
		}
		switch command {
		case "show":
			return show(ctx, q, pool, job)
		case "cancel":
			return state(q.Cancel(ctx, pool, job))
		case "retry":
			return state(q.Retry(ctx, pool, job))
		case "redrive":
			return state(q.Redrive(ctx, pool, job))
		case "discard":
			return q.Discard(ctx, pool, job)
		case "applied":
			return q.Resolve(ctx, pool, job, args[2], onceq.Applied(nil))
		}
		return q.Resolve(ctx, pool, job, args[2], onceq.NeverApplied())
	}
	return errors.New(usage)
}

// show prints what is known about a job: its state, its latest errors, and its effects.
func show(ctx context.Context, q *onceq.Queue, pool *pgxpool.Pool, id int64) error {
	j, err := q.Get(ctx, pool, id)
	if err != nil {
		return err
	}
	fmt.Printf("%d %s %s %s, key %q in scope %q, attempt %d of %d, %d leases lost\n",
		j.ID, j.Queue, j.Kind, j.State, j.Key, j.Scope, j.Attempts, j.MaxAttempts, j.Lost)
	for _, e := range j.Errors {
		fmt.Printf("  attempt %d: %s\n", e.Attempt, e.Error)
	}
	effects, err := q.Effects(ctx, pool, id)
	for _, e := range effects {
		fmt.Printf("  effect %s: %s %s\n", e.Name, e.State, e.Detail)
	}
	return err
}
