package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

func (a *app) workersCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "workers",
		Short: "Say which workers run, and what they work",
		Long: `workers lists the workers of all processes. A worker writes its row once a minute. STATE is late if it has not for a minute and a half, and stale after three: it was killed,
is frozen, or has lost the database. It is trouble if handlers that do not return hold slots, or if it waits for connections: a line below says so. SLOTS is how many jobs of the queue it runs at once.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			workers, err := a.ops.Workers(ctx, a.pool)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"workers": append([]onceqops.WorkerInfo{}, workers...)})
			}
			now, err := a.now(ctx)
			if err != nil {
				return err
			}
			t := newTable("HOST", "PROCESS", "STATE", "VERSION", "UP", "SEEN", "QUEUES (SLOTS)", "KINDS", "APPLICATION").numbers("PROCESS", "UP")
			for _, w := range workers {
				state := "ok"
				if w.Stale {
					state = "stale"
				} else if now.Sub(w.Seen) > 90*time.Second {
					state = "late"
				} else if w.Trouble() != "" {
					state = "trouble"
				}
				var queues []string
				for _, name := range slices.Sorted(maps.Keys(w.Queues)) {
					queues = append(queues, fmt.Sprintf("%s (%d)", name, w.Queues[name]))
				}
				t.add(w.Host, w.Process, state, w.Version, ago(now.Sub(w.Started)), ago(now.Sub(w.Seen))+" ago", strings.Join(queues, ", "), strings.Join(w.Kinds, ", "), w.App)
				if w.Stale || state == "trouble" {
					t.paint(2, red)
				}
			}
			a.print(t, "No worker runs.")
			for _, w := range workers {
				if trouble := w.Trouble(); trouble != "" && !w.Stale {
					a.say("%s: %s\n", w.Where(), trouble)
				}
			}
			return nil
		},
	}
}

func (a *app) pausesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "pauses",
		Short: "Say which queues, kinds and limits are paused, since when and why",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			pauses, err := a.ops.Pauses(ctx, a.pool)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"pauses": append([]onceq.Pause{}, pauses...)})
			}
			now, err := a.now(ctx)
			if err != nil {
				return err
			}
			t := newTable("WHAT", "NAME", "PAUSED", "UNTIL", "NOTE")
			for _, p := range pauses {
				t.add(whatOf(p), p.Queue+p.Kind+p.Limit, ago(now.Sub(p.Since))+" ago", stamp(p.Until), p.Note)
			}
			a.print(t, "Nothing is paused.")
			return nil
		},
	}
}

// whatOf is what a pause is of.
func whatOf(p onceq.Pause) string {
	switch {
	case p.Kind != "":
		return "kind"
	case p.Limit != "":
		return "limit"
	}
	return "queue"
}

// named names what a pause is of, as the beginning of a sentence.
func named(p onceq.Pause) string {
	what := whatOf(p)
	return fmt.Sprintf("%s%s %q", strings.ToUpper(what[:1]), what[1:], p.Queue+p.Kind+p.Limit)
}

func (a *app) pauseCommand() *cobra.Command {
	var until string
	var during time.Duration
	cmd := a.pausing("pause", "Stop workers from taking jobs of a queue, a kind or a limit, until a time or resume",
		`pause stops all workers, in every process, within two seconds, from taking jobs of a queue, or of a kind in every queue. Of a limit no more jobs are
let in. Jobs that run go on, and enqueueing works as always. It lasts until --until, or for --for, or until onceq resume, through restarts and deploys.`,
		func(ctx context.Context, tx pgx.Tx, p onceq.Pause, why string) (string, bool, error) {
			if p.Note = a.person(); why != "" {
				p.Note += ": " + why
			}
			if p.For = during; until != "" {
				var err error
				if p.Until, err = time.Parse(time.RFC3339, until); err != nil {
					return "", false, usagef("--until is %q; say it as 2026-11-29T21:00:00Z, or use --for", until)
				}
			}
			if err := a.q.Pause(ctx, tx, p); err != nil {
				return "", false, err
			}
			said := named(p) + " is paused."
			if p.Limit != "" {
				return said, true, nil
			}
			known, err := a.known(ctx, tx, p.Queue, p.Kind)
			if err == nil && !known {
				said += " No worker has it, and there is no job of it: is that its name?"
			}
			return said, true, err
		})
	cmd.Flags().StringVar(&until, "until", "", "when it ends by itself, as 2026-11-29T21:00:00Z")
	cmd.Flags().DurationVar(&during, "for", 0, "how long it lasts, as 10m, instead of --until")
	return cmd
}

// known reports whether any worker or job has the queue or the kind.
func (a *app) known(ctx context.Context, db onceq.DB, queue, kind string) (bool, error) {
	workers, err := a.ops.Workers(ctx, db)
	if err != nil {
		return false, err
	}
	for _, w := range workers {
		if _, ok := w.Queues[queue]; ok || slices.Contains(w.Kinds, kind) {
			return true, nil
		}
	}
	jobs, err := a.ops.List(ctx, db, onceqops.Filter{Queue: queue, Kind: kind, Limit: 1, WithoutPayloads: true})
	return len(jobs) > 0, err
}

func (a *app) resumeCommand() *cobra.Command {
	return a.pausing("resume", "Let workers take jobs of a paused queue, kind or limit again",
		"resume ends a pause: workers take the jobs again within two seconds, in the order in which they were due.",
		func(ctx context.Context, tx pgx.Tx, p onceq.Pause, _ string) (string, bool, error) {
			was, err := a.q.Resume(ctx, tx, p)
			if !was {
				return named(p) + " was not paused. Nothing was changed.", false, err
			}
			return named(p) + " goes on.", true, err
		})
}

// pausing is a command that pauses or resumes, in one transaction with its line in the audit trail. If do reports that it has changed
// nothing, there is no such line.
func (a *app) pausing(name, short, long string,
	do func(ctx context.Context, tx pgx.Tx, p onceq.Pause, why string) (said string, changed bool, err error),
) *cobra.Command {
	var p onceq.Pause
	var why string
	cmd := &cobra.Command{
		Use: name + " --queue QUEUE | --kind KIND | --limit LIMIT", Short: short, Long: long, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(slices.DeleteFunc([]string{p.Queue, p.Kind, p.Limit}, func(s string) bool { return s == "" })) != 1 {
				return usagef("%s what? Name one --queue, one --kind or one --limit", name)
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			var said string
			err := a.inTx(ctx, func(tx pgx.Tx) error {
				var changed bool
				var err error
				if said, changed, err = do(ctx, tx, p, why); err != nil || !changed {
					return err
				}
				about := fmt.Sprintf("%s %q", whatOf(p), p.Queue+p.Kind+p.Limit)
				_, err = a.ops.RecordAction(ctx, tx, onceqops.Action{Who: a.person(), What: name, About: about, Why: why, Outcome: said})
				return err
			})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"outcome": said})
			}
			a.say("%s\n", said)
			return nil
		},
	}
	cmd.Flags().StringVarP(&p.Queue, "queue", "q", "", "the queue")
	cmd.Flags().StringVarP(&p.Kind, "kind", "k", "", "the kind, in every queue")
	cmd.Flags().StringVar(&p.Limit, "limit", "", "the limit")
	return whyFlag(cmd, &why)
}
