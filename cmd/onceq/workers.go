package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
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
			workers, err := a.q.Workers(ctx, a.pool)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"workers": append([]onceq.WorkerInfo{}, workers...)})
			}
			now, err := a.now(ctx)
			if err != nil {
				return err
			}
			t := newTable("HOST", "PROCESS", "STATE", "VERSION", "UP", "SEEN", "QUEUES (SLOTS)", "KINDS").numbers("PROCESS", "UP")
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
				t.add(w.Host, w.Process, state, w.Version, ago(now.Sub(w.Started)), ago(now.Sub(w.Seen))+" ago", strings.Join(queues, ", "), strings.Join(w.Kinds, ", "))
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
		Short: "Say which queues and kinds are paused, since when and why",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			pauses, err := a.q.Pauses(ctx, a.pool)
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
			t := newTable("WHAT", "NAME", "PAUSED", "NOTE")
			for _, p := range pauses {
				what := "queue"
				if p.Kind != "" {
					what = "kind"
				}
				t.add(what, cmp.Or(p.Queue, p.Kind), ago(now.Sub(p.Since))+" ago", p.Note)
			}
			a.print(t, "Nothing is paused.")
			return nil
		},
	}
}

func (a *app) pauseCommand() *cobra.Command {
	return a.pausing("pause", "Stop workers from taking jobs of a queue or a kind, until resume",
		`pause stops all workers, in every process, within two seconds, from taking jobs of a queue, or of a kind in every queue. Jobs that run go on, and
enqueueing works as always. It lasts until onceq resume, through restarts and deploys.`,
		func(ctx context.Context, tx pgx.Tx, queue, kind, why string) (string, bool, error) {
			note := a.person()
			if why != "" {
				note += ": " + why
			}
			said, err := fmt.Sprintf("Queue %q is paused.", queue), error(nil)
			if kind != "" {
				said, err = fmt.Sprintf("Kind %q is paused.", kind), a.q.PauseKind(ctx, tx, kind, note)
			} else {
				err = a.q.PauseQueue(ctx, tx, queue, note)
			}
			if err != nil {
				return "", false, err
			}
			known, err := a.known(ctx, tx, queue, kind)
			if err == nil && !known {
				said += " No worker has it, and there is no job of it: is that its name?"
			}
			return said, true, err
		})
}

// known reports whether any worker or job has the queue or the kind.
func (a *app) known(ctx context.Context, tx pgx.Tx, queue, kind string) (bool, error) {
	workers, err := a.q.Workers(ctx, tx)
	if err != nil {
		return false, err
	}
	for _, w := range workers {
		if _, ok := w.Queues[queue]; ok || slices.Contains(w.Kinds, kind) {
			return true, nil
		}
	}
	jobs, err := a.q.List(ctx, tx, onceq.Filter{Queue: queue, Kind: kind, Limit: 1, WithoutPayloads: true})
	return len(jobs) > 0, err
}

func (a *app) resumeCommand() *cobra.Command {
	return a.pausing("resume", "Let workers take jobs of a paused queue or kind again",
		"resume ends a pause: workers take the jobs again within two seconds, in the order in which they were due.",
		func(ctx context.Context, tx pgx.Tx, queue, kind, _ string) (string, bool, error) {
			what, name, call := "Queue", queue, a.q.ResumeQueue
			if kind != "" {
				what, name, call = "Kind", kind, a.q.ResumeKind
			}
			was, err := call(ctx, tx, name)
			if !was {
				return fmt.Sprintf("%s %q was not paused. Nothing was changed.", what, name), false, err
			}
			return fmt.Sprintf("%s %q goes on.", what, name), true, err
		})
}

// pausing is a command that pauses or resumes, in one transaction with its line in the audit trail. If do reports that it has changed
// nothing, there is no such line.
func (a *app) pausing(name, short, long string, do func(ctx context.Context, tx pgx.Tx, queue, kind, why string) (said string, changed bool, err error)) *cobra.Command {
	var queue, kind, why string
	cmd := &cobra.Command{
		Use: name + " --queue QUEUE | --kind KIND", Short: short, Long: long, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if (queue == "") == (kind == "") {
				return usagef("%s what? Name one --queue or one --kind", name)
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
				if said, changed, err = do(ctx, tx, queue, kind, why); err != nil || !changed {
					return err
				}
				about := fmt.Sprintf("queue %q", queue)
				if kind != "" {
					about = fmt.Sprintf("kind %q", kind)
				}
				_, err = a.q.RecordAction(ctx, tx, onceq.Action{Who: a.person(), What: name, About: about, Why: why, Outcome: said})
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
	cmd.Flags().StringVarP(&queue, "queue", "q", "", "the queue")
	cmd.Flags().StringVarP(&kind, "kind", "k", "", "the kind, in every queue")
	return whyFlag(cmd, &why)
}
