package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

var allStates = []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning, onceq.StateRetrying,
	onceq.StateCompleted, onceq.StateDead, onceq.StateCancelled, onceq.StateHeld}

func unfinished() []onceq.State {
	return slices.DeleteFunc(slices.Clone(allStates), onceq.State.Finished)
}

func stateNames(states []onceq.State) []string {
	var names []string
	for _, s := range states {
		names = append(names, s.String())
	}
	return names
}

// chosen are the flags that choose jobs.
type chosen struct {
	queue, kind, scope    string
	states                []string
	createdFrom, createdB string
	limit                 int
	group                 int64
}

func (c *chosen) flags(cmd *cobra.Command, states []onceq.State) {
	f := cmd.Flags()
	f.StringVarP(&c.queue, "queue", "q", "", "only jobs of this queue")
	f.StringVarP(&c.kind, "kind", "k", "", "only jobs of this kind")
	f.StringVar(&c.scope, "scope", "", "only jobs whose key is in this scope")
	f.Int64Var(&c.group, "group", 0, "only members of this group: jobs that the job with this id waits for")
	f.StringVar(&c.createdFrom, "created-from", "", "only jobs enqueued since this time (2026-01-31T15:04:05Z) or for this long (2h)")
	f.StringVar(&c.createdB, "created-before", "", "only jobs enqueued before this time, or longer ago than this")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error { return noneEmpty(cmd) }
	if states == nil {
		return
	}
	f.StringSliceVarP(&c.states, "state", "s", nil, "only jobs in these states: "+strings.Join(stateNames(states), ", "))
	_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(stateNames(states), cobra.ShellCompDirectiveNoFileComp))
}

// noneEmpty refuses flags that choose jobs and have an empty value, as from a variable of a script that is not set: the command would
// mean more jobs than its author.
func noneEmpty(cmd *cobra.Command) (err error) {
	choosing := []string{"queue", "kind", "scope", "group", "created-from", "created-before", "state", "effect"}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		empty := map[string]string{"int64": "0", "stringSlice": "[]"}[f.Value.Type()]
		if slices.Contains(choosing, f.Name) && f.Value.String() == empty {
			err = usagef("--%s is empty; name what you mean, or leave it out", f.Name)
		}
	})
	return err
}

// filter is what the flags choose. Times that count from now count from the database's now.
func (c *chosen) filter(ctx context.Context, a *app, possible, byDefault []onceq.State) (f onceqops.Filter, err error) {
	f = onceqops.Filter{Queue: c.queue, Kind: c.kind, Scope: c.scope, Group: c.group, States: byDefault}
	f.All = len(c.states) > 0 || c.createdFrom != "" || c.createdB != "" // who names a state or a time means every queue
	if len(c.states) > 0 {
		f.States = nil
	}
	for _, name := range c.states {
		var s onceq.State
		if s.UnmarshalText([]byte(strings.TrimSpace(name))) != nil || !slices.Contains(possible, s) {
			return f, usagef("--state %s is not possible here; possible: %s", name, strings.Join(stateNames(possible), ", "))
		}
		f.States = append(f.States, s)
	}
	if f.CreatedFrom, err = a.when(ctx, "--created-from", c.createdFrom); err == nil {
		f.CreatedBefore, err = a.when(ctx, "--created-before", c.createdB)
	}
	return f, err
}

// words says in words what a filter chooses.
func words(f onceqops.Filter) string {
	var all []string
	if len(f.States) > 0 {
		all = append(all, strings.Join(stateNames(f.States), " or "))
	}
	for _, part := range []struct{ name, value string }{{"queue", f.Queue}, {"kind", f.Kind}, {"scope", f.Scope}} {
		if part.value != "" {
			all = append(all, fmt.Sprintf("%s %q", part.name, part.value))
		}
	}
	if f.Group != 0 {
		all = append(all, fmt.Sprintf("group %d", f.Group))
	}
	if !f.CreatedFrom.IsZero() {
		all = append(all, "enqueued from "+stamp(f.CreatedFrom))
	}
	if !f.CreatedBefore.IsZero() {
		all = append(all, "enqueued before "+stamp(f.CreatedBefore))
	}
	if len(all) == 0 {
		return "all"
	}
	return strings.Join(all, ", ")
}

// when reads a time, or a duration before the database's now. Days are possible: 3d.
func (a *app) when(ctx context.Context, flag, text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02 15:04:05", "2006-01-02T15:04:05", "2006-01-02 15:04", "2006-01-02T15:04", "2006-01-02"} {
		if t, err := time.Parse(layout, text); err == nil {
			return t, nil
		}
	}
	d, err := time.ParseDuration(text)
	if days, ok := strings.CutSuffix(text, "d"); ok && err != nil {
		var n float64
		if n, err = strconv.ParseFloat(days, 64); err == nil {
			d = time.Duration(n * 24 * float64(time.Hour))
		}
	}
	if err != nil || d < 0 {
		return time.Time{}, usagef("%s is %q; a time (2026-01-31T15:04:05Z; UTC if no zone is given) or how long ago (90m, 2h, 3d) is possible", flag, text)
	}
	now, err := a.now(ctx)
	return now.Add(-d), err
}

// now is the database's time.
func (a *app) now(ctx context.Context) (now time.Time, err error) {
	ctx, cancel := a.limited(ctx)
	defer cancel()
	err = a.pool.QueryRow(ctx, `select statement_timestamp()`).Scan(&now)
	return now, err
}

func jobIDs(args []string) ([]int64, error) {
	var ids []int64
	for _, arg := range args {
		id, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || id <= 0 {
			return nil, usagef("%q is not the id of a job, which is a number", arg)
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
