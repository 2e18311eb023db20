package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
)

var failedStates = []onceq.State{onceq.StateRetrying, onceq.StateDead, onceq.StateHeld}

// sameError is what jobs of a kind failed with.
type sameError struct {
	Kind     string    `json:"kind"`
	Error    string    `json:"error"` // the first line of the latest one
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

func (a *app) errorsCommand() *cobra.Command {
	var c chosen
	cmd := &cobra.Command{
		Use:   "errors",
		Short: "Say which errors jobs failed with: how many, since when",
		Long: `errors groups the newest jobs that are dead, held, or wait for another attempt, by kind and by the latest error without its numbers.
The most frequent error comes first. It looks at up to --limit jobs, for five seconds.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.limit < 1 {
				return usagef("--limit is %d; it must be positive", c.limit)
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
			found := sameErrors(jobs)
			if a.json {
				return a.printJSON(map[string]any{"errors": found, "jobs": len(jobs), "more": next != 0})
			}
			now, err := a.now(cmd.Context())
			if err != nil {
				return err
			}
			t := newTable("JOBS", "DEAD", "HELD", "RETRYING", "KIND", "FIRST", "LAST", "LATEST JOB", "ERROR").numbers("JOBS", "DEAD", "HELD", "RETRYING", "LATEST JOB")
			for _, e := range found {
				t.add(number(e.Jobs), number(e.Dead), number(e.Held), number(e.Retrying), e.Kind, ago(now.Sub(e.First))+" ago", ago(now.Sub(e.Last))+" ago", e.Job, e.Error)
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
	cmd.Flags().IntVarP(&c.limit, "limit", "n", 5000, "how many jobs to look at")
	return cmd
}

// sameErrors groups jobs by what they failed with, the most frequent first.
func sameErrors(jobs []onceq.JobInfo) []*sameError {
	groups, all := make(map[[2]string]*sameError), []*sameError{}
	for _, j := range jobs {
		at, text := cmp.Or(j.FinishedAt, j.CreatedAt), "no attempt has failed: it lost its leases, or was never tried"
		if n := len(j.Errors); n > 0 {
			at = j.Errors[n-1].At
			text, _, _ = strings.Cut(j.Errors[n-1].Error, "\n")
		}
		of := [2]string{j.Kind, numbered.ReplaceAllString(text, "#")}
		e := groups[of]
		if e == nil {
			e = &sameError{Kind: j.Kind, First: at}
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
			e.Last, e.Error, e.Job = at, text, j.ID
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
