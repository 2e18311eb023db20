package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
)

var failedStates = []onceq.State{onceq.StateRetrying, onceq.StateDead, onceq.StateHeld}

// sameError is what jobs of a kind failed with, or jobs that have something else in common.
type sameError struct {
	Name     string    `json:"name,omitzero"` // what they have in common, with --by
	Kind     string    `json:"kind"`          // of the latest one, as
	Error    string    `json:"error"`         // its first line
	Jobs     int       `json:"jobs"`
	Dead     int       `json:"dead"`
	Held     int       `json:"held"`
	Retrying int       `json:"retrying"`
	First    time.Time `json:"first"` // of their latest errors
	Last     time.Time `json:"last"`
	Job      int64     `json:"job"` // that failed last
}

// numbered is what differs between two errors that are the same: numbers and ids.
var numbered = regexp.MustCompile(`[0-9a-fA-F-]*[0-9][0-9a-fA-F-]*`)

// commons are what jobs that failed can have in common.
var commons = map[string]func(onceq.JobInfo) string{
	"kind":  func(j onceq.JobInfo) string { return j.Kind },
	"queue": func(j onceq.JobInfo) string { return j.Queue },
	"scope": func(j onceq.JobInfo) string { return j.Scope },
	"lane":  func(j onceq.JobInfo) string { return j.Lane },
	"limit": func(j onceq.JobInfo) string { return j.Limit },
	"worker": func(j onceq.JobInfo) string {
		if n := len(j.Errors); n > 0 {
			return whoRan(j.Errors[n-1])
		}
		return ""
	},
}

func (a *app) errorsCommand() *cobra.Command {
	var c chosen
	var by string
	possible := slices.Sorted(maps.Keys(commons))
	cmd := &cobra.Command{
		Use:   "errors",
		Short: "Say which errors jobs failed with: how many, since when",
		Long: `errors groups the newest jobs that are dead, held, or wait for another attempt, by kind and by the latest error without its numbers,
or by what --by names, with the latest error of each group. The largest group comes first. It looks at up to --limit jobs, for five seconds.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.limit < 1 {
				return usagef("--limit is %d; it must be positive", c.limit)
			}
			if by != "" && commons[by] == nil {
				return usagef("--by %s is not possible; possible: %s", by, strings.Join(possible, ", "))
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			filter, err := c.filter(cmd.Context(), a, failedStates, failedStates)
			if err != nil {
				return err
			}
			filter.WithoutPayloads = true
			jobs, next, err := a.list(cmd.Context(), filter, c.limit)
			if err != nil {
				return err
			}
			found := sameErrors(jobs, commons[by])
			if a.json {
				return a.printJSON(map[string]any{"errors": found, "jobs": len(jobs), "more": next != 0})
			}
			now, err := a.now(cmd.Context())
			if err != nil {
				return err
			}
			counts := []string{"JOBS", "DEAD", "HELD", "RETRYING", "LATEST JOB"}
			t := newTable("JOBS", "DEAD", "HELD", "RETRYING", strings.ToUpper(cmp.Or(by, "kind")), "FIRST", "LAST", "LATEST JOB", "ERROR").numbers(counts...)
			for _, e := range found {
				name := e.Kind
				if by != "" {
					name = cmp.Or(e.Name, "-")
				}
				t.add(number(e.Jobs), number(e.Dead), number(e.Held), number(e.Retrying), name, ago(now.Sub(e.First))+" ago", ago(now.Sub(e.Last))+" ago", e.Job, e.Error)
			}
			a.print(t, "No job has failed that is "+words(filter)+".")
			if len(jobs) == 0 {
				a.doubt(cmd.Context(), filter)
			}
			if next != 0 {
				a.remark("These are the newest %s; there may be more: raise --limit\n", plural(len(jobs), "job"))
			}
			return nil
		},
	}
	c.flags(cmd, failedStates)
	cmd.Flags().StringVar(&by, "by", "", "group by this, in place of the error: "+strings.Join(possible, ", "))
	_ = cmd.RegisterFlagCompletionFunc("by", cobra.FixedCompletions(possible, cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().IntVarP(&c.limit, "limit", "n", 5000, "how many jobs to look at")
	return cmd
}

// sameErrors groups jobs by what they failed with, or by what they have in common: the largest group first.
func sameErrors(jobs []onceq.JobInfo, common func(onceq.JobInfo) string) []*sameError {
	groups, all := make(map[[2]string]*sameError), []*sameError{}
	for _, j := range jobs {
		at, text := cmp.Or(j.FinishedAt, j.CreatedAt), "no attempt has failed: it lost its leases, or was never tried"
		if n := len(j.Errors); n > 0 {
			at = j.Errors[n-1].At
			text, _, _ = strings.Cut(j.Errors[n-1].Error, "\n")
		}
		of, name := [2]string{j.Kind, numbered.ReplaceAllString(text, "#")}, ""
		if common != nil {
			name = common(j)
			of = [2]string{name}
		}
		e := groups[of]
		if e == nil {
			e = &sameError{Name: name, First: at}
			groups[of] = e
			all = append(all, e)
		}
		e.Jobs++
		switch j.State {
		case onceq.StateDead:
			e.Dead++
		case onceq.StateHeld:
			e.Held++
		default:
			e.Retrying++
		}
		if at.Before(e.First) {
			e.First = at
		}
		if !at.Before(e.Last) {
			e.Last, e.Kind, e.Error, e.Job = at, j.Kind, text, j.ID
		}
	}
	slices.SortStableFunc(all, func(a, b *sameError) int { return cmp.Compare(b.Jobs, a.Jobs) })
	return all
}

func (a *app) watchCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "watch JOB",
		Short: "Say what becomes of a job, until it has ended",
		Long: `watch prints a line whenever the state, the attempts or the progress of a job change. It ends with the job: with 0 if that is completed, else with 1.
With --json each line is the job, as onceq jobs list prints it. A job of a kind without a history (Kind.Keep) is gone when it is completed.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := jobIDs(args)
			if err != nil {
				return err
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			return a.follow(cmd.Context(), ids[0])
		},
	}
}

const watchEvery = 500 * time.Millisecond

// follow prints a job whenever it has changed.
func (a *app) follow(ctx context.Context, id int64) error {
	last := ""
	for {
		inner, cancel := a.limited(ctx)
		j, err := a.q.Get(inner, a.pool, id)
		cancel()
		switch {
		case errors.Is(err, onceq.ErrNotFound) && last != "":
			a.remark("The job is gone: it was completed and its kind keeps no history, or it was discarded.\n")
			return nil
		case err != nil:
			return err
		}
		line := fmt.Sprintf("%s, %d of %d attempts failed, %s", j.State, j.Attempts, j.MaxAttempts, plural(j.Claims, "claim"))
		if p := j.Progress; p != nil {
			line += fmt.Sprintf(", %s of %s %s", number(int(p.Done)), number(int(p.Total)), p.Note)
		}
		if n := len(j.Errors); n > 0 && j.Attempts > 0 {
			text, _, _ := strings.Cut(j.Errors[n-1].Error, "\n")
			line += ", latest error: " + text
		}
		if line != last {
			if last = line; !a.json {
				a.say("%s  job %d: %s\n", stamp(time.Now()), id, line)
			} else if err := writeJSON(a.out, j, ""); err != nil {
				return err
			}
		}
		switch {
		case j.State == onceq.StateCompleted:
			return nil
		case j.State.Finished() || j.State == onceq.StateHeld:
			return &exit{code: codeFailed}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(watchEvery):
		}
	}
}
