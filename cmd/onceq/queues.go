package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// queueJSON is a queue for programs.
type queueJSON struct {
	Queue         string  `json:"queue"`
	Waiting       int     `json:"waiting"`
	Running       int     `json:"running"`
	ClaimedAhead  int     `json:"claimed_ahead"`
	Retrying      int     `json:"retrying"`
	Delayed       int     `json:"delayed"`
	Dead          int     `json:"dead"`
	Held          int     `json:"held"`
	Blocked       int     `json:"blocked"` // waiting for their lane, their limit or other jobs
	OldestSeconds float64 `json:"oldest_seconds"`
	More          bool    `json:"more"`
	Capped        bool    `json:"capped"`

	Paused time.Time `json:"paused,omitzero"`

	// What workers have counted, minute by minute; the last one is the latest.
	Minutes []minuteJSON `json:"minutes,omitempty"`
}

type minuteJSON struct {
	Started    int     `json:"started"`
	Completed  int     `json:"completed"`
	Failed     int     `json:"failed"`
	Dead       int     `json:"dead"`
	P95Seconds float64 `json:"p95_seconds"`
}

func queuesJSON(stats []onceqops.QueueStats, counted map[string]onceqops.Counts) []queueJSON {
	all := []queueJSON{}
	for _, s := range stats {
		one := queueJSON{s.Queue, s.Waiting, s.Running, s.Leased - s.Running, s.Retrying, s.Delayed, s.Dead, s.Held, s.Blocked, s.Oldest.Seconds(), s.More, s.Capped, s.Paused, nil}
		for _, c := range counted[s.Queue].Minutes {
			one.Minutes = append(one.Minutes, minuteJSON{c.Started, c.Completed, c.Failed, c.Dead, c.Percentile(95).Seconds()})
		}
		all = append(all, one)
	}
	return all
}

func (a *app) queuesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "queues [QUEUE...]",
		Short: "Count the jobs of each queue",
		Long: `queues counts the jobs of each queue, or of the named ones.

WAITING jobs are due and nobody has them; OLDEST says for how long the first of these has been due. RUNNING jobs are in a
handler; AHEAD ones were claimed by a worker and wait there. RETRYING jobs failed or lost a lease before. BLOCKED are those
that wait for their lane, their limit or other jobs (onceq lanes list, limits list and groups list say why). DEAD and HELD jobs wait for a person. Counting stops at 1,000. In a queue with more jobs than that, the first and the last of them are looked at; a + says
"at least". It is quick however many jobs there are.

DONE/MIN and FAILED/MIN are the completed jobs and the failed attempts, those of dead jobs too, of a minute: the average of the last
five full minutes, as workers counted them. P95 is how long 95 of 100 handlers took at most, in steps of about three times. With --json
there are the last thirty minutes, one by one.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			stats, err := a.stats(cmd.Context(), args...)
			if err != nil {
				return err
			}
			counted, err := a.counts(cmd.Context(), args...)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"queues": queuesJSON(stats, counted)})
			}
			a.print(queueTable(stats, counted, false), "No queue has jobs, a history or workers.")
			return nil
		},
	}
}

func (a *app) stats(ctx context.Context, queues ...string) ([]onceqops.QueueStats, error) {
	ctx, cancel := a.limited(ctx)
	defer cancel()
	if len(queues) == 0 {
		queues = nil
	}
	return a.ops.Stats(ctx, queues...)
}

// counts returns what workers have counted in the last half hour, by queue.
func (a *app) counts(ctx context.Context, queues ...string) (map[string]onceqops.Counts, error) {
	ctx, cancel := a.limited(ctx)
	defer cancel()
	filter := onceqops.CountFilter{Minutes: 30}
	if len(queues) == 1 {
		filter.Queue = queues[0]
	}
	list, err := a.ops.Counts(ctx, a.pool, filter)
	all := make(map[string]onceqops.Counts, len(list))
	for _, c := range list {
		all[c.Queue] = c
	}
	return all, err
}

// rateOf is how many minutes a rate is the average of.
const rateOf = 5

// perMinute is a rate for people: whole numbers, but one digit more if it is small.
func perMinute(n int) string {
	if n == 0 || n >= 10*rateOf {
		return number((n + rateOf/2) / rateOf)
	}
	return fmt.Sprintf("%.1f", float64(n)/rateOf)
}

// took writes one of onceqops.DurationBounds.
func took(d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return strings.NewReplacer("m0s", "m", "h0m0s", "h").Replace(d.String())
}

// spark draws numbers as small bars, the greatest of them the highest.
func spark(minutes []onceqops.Count) string {
	most := 0
	for _, c := range minutes {
		most = max(most, c.Completed)
	}
	bars := []rune("▁▂▃▄▅▆▇█")
	line := make([]rune, len(minutes))
	for i, c := range minutes {
		if line[i] = ' '; c.Completed > 0 {
			line[i] = bars[(c.Completed*(len(bars)-1)+most-1)/most]
		}
	}
	return string(line)
}

func queueTable(stats []onceqops.QueueStats, counted map[string]onceqops.Counts, sparks bool) *table {
	header := []string{"QUEUE", "WAITING", "OLDEST", "RUNNING", "AHEAD", "RETRYING", "DELAYED", "BLOCKED", "DEAD", "HELD", "DONE/MIN", "FAILED/MIN", "P95", ""}
	t := newTable(header...).numbers(header[1:13]...)
	t.spare = []string{"AHEAD", "BLOCKED", "", "DELAYED", "HELD", "DEAD", "RETRYING", "FAILED/MIN"}
	if sparks {
		t.header = append(t.header, "DONE IN 30 MIN")
	}
	for _, s := range stats {
		rate := counted[s.Queue].Last(rateOf)
		n := func(n int) string {
			if n >= onceqops.StatsCap {
				return number(n) + "+"
			}
			return number(n)
		}
		live := func(n int) string { return number(n) + map[bool]string{true: "+"}[s.More || n >= onceqops.StatsCap] }
		t.add(s.Queue, live(s.Waiting), ago(s.Oldest), live(s.Running), live(s.Leased-s.Running), live(s.Retrying), live(s.Delayed), n(s.Blocked), n(s.Dead), n(s.Held),
			perMinute(rate.Completed), perMinute(rate.Failed+rate.Dead), took(rate.Percentile(95)), map[bool]string{false: "paused"}[s.Paused.IsZero()])
		if sparks {
			last := &t.rows[len(t.rows)-1]
			*last = append(*last, spark(counted[s.Queue].Minutes))
		}
		if s.Oldest > time.Minute && s.Paused.IsZero() {
			t.paint(2, yellow)
		}
		if s.Dead > 0 {
			t.paint(8, red)
		}
		if s.Held > 0 {
			t.paint(9, red)
		}
	}
	return t
}

func (a *app) keysCommand() *cobra.Command {
	var scope string
	cmd := &cobra.Command{
		Use:   "keys KEY",
		Short: "Say who has a key, and until when",
		Long: `keys says what is known of a key: of a job, of the application (Do, Fence) and of a client's request. A job's key is in a scope,
by default the name of its kind; without --scope it is looked up in every scope.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			keys, err := a.ops.Keys(ctx, a.pool, scope, args[0])
			if err != nil {
				return err
			}
			if len(keys) == 0 {
				return &exit{codeNotFound, fmt.Errorf("no key %q: it was never taken, or it is free and a Reaper has removed it", args[0])}
			}
			if a.json {
				return a.printJSON(map[string]any{"keys": keys})
			}
			t := newTable("CLASS", "SCOPE", "STATE", "JOB", "TAKEN", "FINISHED", "FREE", "DETAIL")
			for _, k := range keys {
				job, free := "-", stamp(k.FreeAt)
				if k.JobID != 0 {
					job = fmt.Sprint(k.JobID)
				}
				if k.Free {
					free = "now"
				}
				t.add(k.Class, k.Scope, k.State, job, stamp(k.Since), stamp(k.FinishedAt), free, k.Detail)
			}
			a.print(t, "")
			return nil
		},
	}
	cmd.Flags().StringVar(&scope, "scope", "", "look in this scope only")
	return cmd
}

func (a *app) actionsCommand() *cobra.Command {
	var filter onceqops.ActionFilter
	var since string
	cmd := &cobra.Command{
		Use:   "actions",
		Short: "Say who did what to jobs, and why: the audit trail",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			var err error
			if filter.Since, err = a.when(ctx, "--since", since); err != nil {
				return err
			}
			actions, err := a.ops.Actions(ctx, a.pool, filter)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"actions": append([]onceqops.Action{}, actions...)})
			}
			t := newTable("ID", "AT", "WHO", "WHAT", "JOB", "ABOUT", "OUTCOME", "WHY").numbers("ID", "JOB")
			for _, x := range actions {
				job := "-"
				if x.JobID != 0 {
					job = fmt.Sprint(x.JobID)
				}
				t.add(x.ID, stamp(x.At), x.Who, x.What, job, x.About, x.Outcome, x.Why)
			}
			empty := "The audit trail is empty."
			if filter != (onceqops.ActionFilter{Limit: filter.Limit}) {
				empty = "The audit trail has no such line."
			}
			a.print(t, empty)
			return nil
		},
	}
	cmd.Flags().StringVar(&filter.Who, "by", "", "only what this person did, as the column WHO has it")
	cmd.Flags().StringVar(&filter.What, "what", "", "only these, as the column WHAT has them")
	cmd.Flags().StringVar(&since, "since", "", "only those since a time (2026-01-31T15:04:05Z), or since how long ago (6h)")
	cmd.Flags().Int64Var(&filter.JobID, "job", 0, "only those about this job")
	cmd.Flags().IntVarP(&filter.Limit, "limit", "n", 50, "how many, at most 1,000")
	cmd.Flags().Int64Var(&filter.After, "after", 0, "those before this line: the last ID of the page before")
	return cmd
}

func (a *app) reapCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "reap",
		Short: "Remove what nobody needs any more, once",
		Long: `reap makes one pass of a Reaper: it removes keys whose window is over, history that was kept long enough, and what is left of jobs
and workers that are gone. It never removes an unfinished, dead or held job. Applications run a Reaper themselves; this is for
those that do not, and for looking. It may run beside others and be interrupted at any time.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.each = true
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			reaper, err := onceq.NewReaper(a.q, onceq.ReaperConfig{})
			if err != nil {
				return err
			}
			r, err := reaper.RunOnce(cmd.Context())
			if a.json {
				err = errors.Join(err, a.printJSON(map[string]any{"fences": r.Fences, "effects": r.Effects, "history": r.History, "cancels": r.Cancels,
					"waiters": r.Waiters, "awaits": r.Awaits, "members": r.Members, "unknown": r.Unknown, "missing": r.Missing}))
			} else {
				a.say("Removed %s, %s, %s, %s and %s.\n", plural(r.Fences, "key"), plural(r.Effects, "effect"),
					plural(r.History, "finished job"), plural(r.Cancels, "request")+" to cancel", plural(r.Waiters, "announcement")+" of workers")
				if r.Unknown > 0 {
					a.say("%s of clients were among them whose outcome nobody has found out.\n", plural(r.Unknown, "key"))
				}
				if r.Missing > 0 {
					a.say("%s freed whose job somebody has deleted by hand.\n", plural(r.Missing, "key"))
				}
			}
			if cmd.Context().Err() != nil {
				return &exit{codeInterrupted, errors.New("interrupted; run it again to go on")}
			}
			return err
		},
	}
}
