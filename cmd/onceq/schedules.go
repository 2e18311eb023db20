package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
)

func (a *app) schedulesCommand() *cobra.Command {
	return group("schedules", "List schedules and their ticks, fire, pause, resume and back-fill them",
		a.schedulesListCommand(), a.ticksCommand(), a.fireCommand(), a.pauseScheduleCommand(), a.resumeScheduleCommand(), a.backfillCommand())
}

// cron connects, and gives a Scheduler that knows the schedules of the table alone: those of the code are in other processes.
func (a *app) cron(ctx context.Context) (*onceqcron.Scheduler, error) {
	if err := a.connect(ctx, true); err != nil {
		return nil, err
	}
	return a.cronOf()
}

func (a *app) cronOf() (*onceqcron.Scheduler, error) {
	return onceqcron.New(a.q, a.pool, onceqcron.Config{})
}

// scheduleJSON is a schedule for programs.
type scheduleJSON struct {
	Name   string    `json:"name"`
	Owner  string    `json:"owner"`
	Spec   string    `json:"spec"`
	Zone   string    `json:"zone,omitempty"`
	Missed string    `json:"missed"`
	Code   bool      `json:"code"`
	Next   time.Time `json:"next,omitzero"`
	Paused time.Time `json:"paused,omitzero"`
	Last   *tickJSON `json:"last,omitempty"`
}

type tickJSON struct {
	At      time.Time `json:"at"`
	Until   time.Time `json:"until"`
	Ticks   int       `json:"ticks"`
	Outcome string    `json:"outcome"`
	DoneAt  time.Time `json:"done_at"`
	Job     int64     `json:"job,omitzero"`
	Note    string    `json:"note,omitempty"`
}

func tick(d onceqcron.Done) *tickJSON {
	return &tickJSON{d.At, d.Until, d.Ticks, d.Outcome, d.DoneAt, d.JobID, d.Note}
}

func (a *app) schedulesListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List schedules: when each is due, what is paused, what became of the latest tick",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.cron(cmd.Context())
			if err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			infos, err := s.List(ctx, nil)
			if err != nil {
				return err
			}
			now, err := a.now(cmd.Context())
			if err != nil {
				return err
			}
			all := []scheduleJSON{}
			t := newTable("NAME", "OWNER", "SPEC", "ZONE", "NEXT", "STATE", "LATEST TICK")
			for _, i := range infos {
				one := scheduleJSON{i.Name, i.Owner, i.Spec, i.Zone, i.Missed, i.Code, i.Next, i.Paused, nil}
				ticks, err := s.Ticks(ctx, nil, i.Name, now.AddDate(100, 0, 0), 1)
				if err != nil {
					return err
				}
				latest := "none"
				if len(ticks) > 0 {
					one.Last = tick(ticks[0])
					latest = fmt.Sprintf("%s %s ago", ticks[0].Outcome, ago(now.Sub(ticks[0].DoneAt)))
				}
				all = append(all, one)
				next, state := "-", "ok"
				switch {
				case !i.Paused.IsZero():
					state = "paused " + ago(now.Sub(i.Paused))
				case i.Next.IsZero():
					state = "no tick is left"
				case i.Next.Before(now.Add(-time.Minute)):
					next, state = stamp(i.Next), "late "+ago(now.Sub(i.Next))+": no worker fires it"
				default:
					next = stamp(i.Next)
				}
				t.add(i.Name, i.Owner, i.Spec, i.Zone, next, state, latest)
				if state != "ok" {
					t.paint(5, yellow)
				}
			}
			if a.json {
				return a.printJSON(map[string]any{"schedules": all})
			}
			a.print(t, "There are no schedules.")
			return nil
		},
	}
}

func (a *app) ticksCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:   "ticks SCHEDULE",
		Short: "Say what became of a schedule's ticks: its ledger, latest first",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if limit < 1 {
				return usagef("--limit is %d; it must be positive", limit)
			}
			s, err := a.cron(cmd.Context())
			if err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			if err := exists(ctx, s, args[0]); err != nil {
				return err
			}
			now, err := a.now(ctx)
			if err != nil {
				return err
			}
			ticks, err := s.Ticks(ctx, nil, args[0], now.AddDate(100, 0, 0), limit)
			if err != nil {
				return err
			}
			all := []*tickJSON{}
			t := newTable("SCHEDULED", "OUTCOME", "LATE", "TICKS", "JOB", "NOTE").numbers("LATE", "TICKS", "JOB")
			for _, d := range ticks {
				all = append(all, tick(d))
				job := "-"
				if d.JobID != 0 {
					job = fmt.Sprint(d.JobID)
				}
				t.add(stamp(d.At), d.Outcome, ago(d.DoneAt.Sub(d.At)), d.Ticks, job, d.Note)
			}
			if a.json {
				return a.printJSON(map[string]any{"ticks": all})
			}
			a.print(t, "No tick of it has been due yet.")
			return nil
		},
	}
	cmd.Flags().IntVarP(&limit, "limit", "n", 20, "how many")
	return cmd
}

func exists(ctx context.Context, s *onceqcron.Scheduler, name string) error {
	infos, err := s.List(ctx, nil)
	if err != nil {
		return err
	}
	for _, i := range infos {
		if i.Name == name {
			return nil
		}
	}
	return fmt.Errorf("%w: %q", onceqcron.ErrNotFound, name)
}

// change does something to a schedule, in one transaction with its line in the audit trail. What only a process with the
// schedule's code can do is asked of one.
func (a *app) change(cmd *cobra.Command, what, name, why string, fn func(ctx context.Context, s *onceqcron.Scheduler, tx pgx.Tx) (said string, result map[string]any, err error)) error {
	s, err := a.cron(cmd.Context())
	if err != nil {
		return err
	}
	ctx, cancel := a.limited(cmd.Context())
	defer cancel()
	var said string
	var result map[string]any
	err = a.inTx(ctx, func(tx pgx.Tx) error {
		if said, result, err = fn(ctx, s, tx); err != nil {
			return err
		}
		_, err := a.ops.RecordAction(ctx, tx, onceqops.Action{Who: a.person(), What: what, About: "schedule " + name, Why: why, Outcome: said})
		return err
	})
	if err != nil {
		return err
	}
	if a.json {
		result["schedule"] = name
		return a.printJSON(result)
	}
	a.say("%s\n", said)
	return nil
}

func whyFlag(cmd *cobra.Command, why *string) *cobra.Command {
	cmd.Flags().StringVar(why, "why", "", "why, for the audit trail")
	return cmd
}

func (a *app) fireCommand() *cobra.Command {
	var why string
	return whyFlag(&cobra.Command{
		Use:   "fire SCHEDULE",
		Short: "Enqueue a schedule's job now, besides its ticks",
		Long: `fire enqueues a schedule's job once, now. Its ticks go on as before, and pausing does not prevent it. If the schedule is in an application's
code, a worker of that application does it: the command prints the id of the job that asks for it.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.change(cmd, "fire schedule", args[0], why, func(ctx context.Context, s *onceqcron.Scheduler, tx pgx.Tx) (string, map[string]any, error) {
				id, err := s.Fire(ctx, tx, args[0])
				if errors.Is(err, onceqcron.ErrElsewhere) {
					return a.asked(s.Ask(ctx, tx, args[0], onceqcron.AskFire()))
				}
				return fmt.Sprintf("Enqueued job %d.", id), map[string]any{"job": id}, err
			})
		},
	}, &why)
}

// asked is what to say when a process of the owner has been asked.
func (a *app) asked(id int64, err error) (string, map[string]any, error) {
	said := fmt.Sprintf("The schedule is in the code of its owner. Asked a worker of it, with job %d, which waits until one runs (onceq jobs explain %d).", id, id)
	return a.typed(said), map[string]any{"asked": id}, err
}

func (a *app) pauseScheduleCommand() *cobra.Command {
	var why string
	return whyFlag(&cobra.Command{
		Use:   "pause SCHEDULE",
		Short: "Stop a schedule in all processes, until resume",
		Long:  "pause stops a schedule in all processes: no tick of it happens until resume. Jobs that it has enqueued run.",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.change(cmd, "pause schedule", args[0], why, func(ctx context.Context, s *onceqcron.Scheduler, tx pgx.Tx) (string, map[string]any, error) {
				return fmt.Sprintf("Schedule %q is paused.", args[0]), map[string]any{"paused": true}, s.Pause(ctx, tx, args[0])
			})
		},
	}, &why)
}

func (a *app) resumeScheduleCommand() *cobra.Command {
	var why string
	return whyFlag(&cobra.Command{
		Use:   "resume SCHEDULE",
		Short: "Let a paused schedule go on with its next tick",
		Long:  "resume lets a paused schedule go on with its next tick. The ticks of the pause do not happen; onceq schedules backfill makes up for them. For ticks that were overdue when it was paused, its rule for missed ticks decides now.",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.change(cmd, "resume schedule", args[0], why, func(ctx context.Context, s *onceqcron.Scheduler, tx pgx.Tx) (string, map[string]any, error) {
				err := s.Resume(ctx, tx, args[0])
				if errors.Is(err, onceqcron.ErrElsewhere) {
					return a.asked(s.Ask(ctx, tx, args[0], onceqcron.AskResume()))
				}
				return fmt.Sprintf("Schedule %q goes on with its next tick.", args[0]), map[string]any{"paused": false}, err
			})
		},
	}, &why)
}

func (a *app) backfillCommand() *cobra.Command {
	var why, from, to string
	var agree consent
	cmd := whyFlag(&cobra.Command{
		Use:   "backfill SCHEDULE --from TIME [--to TIME]",
		Short: "Enqueue the jobs of past ticks that did not happen",
		Long: `backfill enqueues the jobs of all ticks between two times, both included, that the ledger does not show as fired. It says first how many
these are; more than 10,000 are refused. If the schedule is in an application's code, a worker of that application does it. If it also has a Timetable in place
of a spec, the number is not known before.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if from == "" {
				return usagef("backfill from when? Say --from")
			}
			s, err := a.cron(cmd.Context())
			if err != nil {
				return err
			}
			begin, err := a.when(cmd.Context(), "--from", from)
			if err != nil {
				return err
			}
			end, err := a.now(cmd.Context())
			if err == nil && to != "" {
				end, err = a.when(cmd.Context(), "--to", to)
			}
			if err != nil {
				return err
			}
			if end.Before(begin) {
				return usagef("--to is before --from")
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			n, err := s.WouldBackfill(ctx, a.pool, args[0], begin, end)
			many := plural(n, "job")
			if errors.Is(err, onceqcron.ErrElsewhere) {
				many, err = "the jobs", nil
			}
			if err != nil {
				return err
			}
			if err := a.agreed(cmd.Context(), agree, fmt.Sprintf("Enqueue %s of the ticks of schedule %q from %s to %s that did not happen.", many, args[0], stamp(begin), stamp(end))); err != nil {
				return dried(err)
			}
			a.close()
			return a.change(cmd, "backfill schedule", args[0], why, func(ctx context.Context, s *onceqcron.Scheduler, tx pgx.Tx) (string, map[string]any, error) {
				n, err := s.Backfill(ctx, tx, args[0], begin, end)
				if errors.Is(err, onceqcron.ErrElsewhere) {
					return a.asked(s.Ask(ctx, tx, args[0], onceqcron.AskBackfill(begin, end)))
				}
				return fmt.Sprintf("Enqueued %s.", plural(n, "job")), map[string]any{"enqueued": n}, err
			})
		},
	}, &why)
	cmd.Flags().StringVar(&from, "from", "", "the first time (2026-01-31T15:04:05Z), or how long ago (6h)")
	cmd.Flags().StringVar(&to, "to", "", "the last time; default now")
	agree.flags(cmd)
	return cmd
}
