package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

func (a *app) groupsCommand() *cobra.Command {
	return group("groups", "List jobs that wait for others, show what they wait for, and cancel them", a.groupListCommand(), a.groupShowCommand(), a.groupCancelCommand())
}

// groupJSON is a group for programs.
type groupJSON struct {
	onceq.GroupInfo
	Oldest float64 `json:"oldest_seconds"`
	Why    string  `json:"why"`
}

func forPrograms(g onceq.GroupInfo) groupJSON {
	seconds := g.Oldest.Seconds()
	g.Oldest = 0
	return groupJSON{g, seconds, whyGroup(g)}
}

// whyGroup says in a few words what the job waits for.
func whyGroup(g onceq.GroupInfo) string {
	switch {
	case !g.Waits:
		return "its job is " + g.State.String()
	case g.Open > 0:
		return "goes on"
	case g.Held > 0 || g.Dead > 0 && g.IfDead == onceq.DeadWait:
		return "waits for dead or held members"
	}
	return "is about to run"
}

func (a *app) groupListCommand() *cobra.Command {
	var limit int
	var after int64
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List jobs that wait for others, and how far these are",
		Long: `list prints the jobs that wait for others. The GROUP has the id of the job that waits. OPEN members are unfinished. IF DEAD says what a dead one means: wait
for a person, run the job anyway, or cancel it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 {
				return usagef("--limit is %d; it must be positive", limit)
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			groups, err := a.ops.Groups(ctx, a.pool, after, limit)
			if err != nil {
				return err
			}
			var next int64
			if len(groups) == limit {
				next = groups[len(groups)-1].ID
			}
			if a.json {
				all := []groupJSON{}
				for _, g := range groups {
					all = append(all, forPrograms(g))
				}
				page := map[string]any{"groups": all}
				if next != 0 {
					page["next"] = next
				}
				return a.printJSON(page)
			}
			t := newTable("GROUP", "MEMBERS", "OPEN", "DEAD", "HELD", "CANCELLED", "AGE", "IF DEAD", "WHY").numbers("GROUP", "MEMBERS", "OPEN", "DEAD", "HELD", "CANCELLED", "AGE")
			for _, g := range groups {
				why := whyGroup(g)
				t.add(g.ID, number(g.Total), number(g.Open), number(g.Dead), number(g.Held), number(g.Cancelled), ago(g.Oldest), g.IfDead, why)
				if why == "waits for dead or held members" {
					t.paint(8, red)
				}
			}
			a.print(t, "No job waits for others.")
			if next != 0 {
				a.remark("There may be more: add --after %d\n", next)
			}
			return nil
		},
	}
	cmd.Flags().IntVarP(&limit, "limit", "n", 50, "how many, at most 1,000")
	cmd.Flags().Int64Var(&after, "after", 0, "the next page: what comes after this group")
	return cmd
}

func (a *app) groupShowCommand() *cobra.Command {
	var limit int
	var after int64
	cmd := &cobra.Command{
		Use:   "show GROUP",
		Short: "Show one group: how its members are doing, and those that are dead or held first",
		Long: `show prints how a group is doing, then the members that are dead or held, then a page of all, by id. GROUP is the id of the job that waits for the others.
It is known as long as that job is. onceq jobs list --group GROUP shows its members as jobs.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := jobIDs(args)
			if err != nil {
				return err
			}
			if limit < 1 {
				return usagef("--limit is %d; it must be positive", limit)
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			g, err := a.q.Group(ctx, a.pool, ids[0])
			if err != nil {
				return err
			}
			var people []onceq.JobInfo
			if g.Dead+g.Held > 0 && after == 0 {
				people, err = a.ops.List(ctx, a.pool, onceqops.Filter{Group: g.ID, States: []onceq.State{onceq.StateDead, onceq.StateHeld}, Limit: min(limit, 1000), WithoutPayloads: !a.json})
				if err != nil {
					return err
				}
			}
			var members []onceq.Member
			for m, err := range a.ops.Members(ctx, a.pool, g.ID, onceqops.Filter{After: after, Limit: limit}) {
				if err != nil {
					return err
				}
				members = append(members, m)
			}
			var next int64
			if len(members) == limit {
				next = members[len(members)-1].ID
			}
			if a.json {
				page := map[string]any{"group": forPrograms(g), "dead_or_held": append([]onceq.JobInfo{}, people...), "members": append([]onceq.Member{}, members...)}
				if next != 0 {
					page["next"] = next
				}
				return a.printJSON(page)
			}
			return a.showGroup(ctx, g, people, members, next)
		},
	}
	cmd.Flags().IntVarP(&limit, "limit", "n", 50, "how many members, at most 1,000")
	cmd.Flags().Int64Var(&after, "after", 0, "the next page: members with larger ids than this")
	return cmd
}

func (a *app) showGroup(ctx context.Context, g onceq.GroupInfo, people []onceq.JobInfo, members []onceq.Member, next int64) error {
	a.say("%s. %d open. Job %d %s.\n", capital(g.String()), g.Open, g.ID, map[bool]string{true: "waits; if one is dead: " + g.IfDead.String(), false: "is " + g.State.String()}[g.Waits])
	if len(people) > 0 {
		now, err := a.now(ctx)
		if err != nil {
			return err
		}
		a.say("\nDead or held:\n")
		a.print(jobTable(people, now), "")
		a.say("%s\n", a.typed(fmt.Sprintf("All dead ones run again: onceq jobs redrive --group %d. Without them: onceq jobs discard --group %d.", g.ID, g.ID)))
	}
	a.say("\nMembers:\n")
	t := newTable("JOB", "STATE", "KIND", "RESULT OR LATEST ERROR").numbers("JOB")
	for _, m := range members {
		t.add(m.ID, m.State, m.Kind, cmp.Or(string(m.Result), m.Error))
	}
	a.print(t, "No member is known.")
	if next != 0 {
		a.remark("There may be more: add --after %d\n", next)
	}
	return nil
}

func (a *app) groupCancelCommand() *cobra.Command {
	var agree consent
	var why string
	cmd := whyFlag(&cobra.Command{
		Use:   "cancel GROUP",
		Short: "Cancel a job that waits for others, and its unfinished members",
		Long: `cancel ends the job that waits, so that it does not run, and then its members that are not finished. Running ones are told with their worker's next beat.
Members that other jobs wait for too are cancelled all the same. onceq jobs redrive brings cancelled jobs back.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := jobIDs(args)
			if err != nil {
				return err
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			inner, cancel := a.limited(cmd.Context())
			g, err := a.q.Group(inner, a.pool, ids[0])
			cancel()
			if err == nil && g.Total == 0 {
				err = &exit{codeNotFound, fmt.Errorf("job %d waits for no others and is no group; onceq jobs cancel %d cancels it", ids[0], ids[0])}
			}
			if err != nil {
				return err
			}
			open := fmt.Sprintf("%s of %d", plural(g.Open, "unfinished member"), g.Total)
			if err := a.agreed(cmd.Context(), agree, fmt.Sprintf("Cancel group %d: %s, and job %d, which is %s.", g.ID, open, g.ID, g.State)); err != nil {
				if errors.Is(err, errDry) && a.json {
					return a.printJSON(map[string]any{"open": g.Open, "dry_run": true})
				}
				return dried(err)
			}
			action := onceqops.Action{What: "cancel group", JobID: g.ID, About: "group " + strconv.FormatInt(g.ID, 10), Why: why}
			if err := a.begins(cmd.Context(), action); err != nil {
				return err
			}
			// As Ops.CancelGroup does it, but each of its statements has its own time limit, and ctrl-c stops between two.
			inner, cancel = a.limited(context.WithoutCancel(cmd.Context()))
			cancelled, asked, err := a.ops.CancelMany(inner, a.pool, onceqops.Filter{IDs: []int64{g.ID}})
			cancel()
			stopped := false
			if err == nil {
				stopped, err = a.many(cmd.Context(), onceqops.Filter{Group: g.ID}, g.Open, func(ctx context.Context, f onceqops.Filter) error {
					n, more, err := a.ops.CancelMany(ctx, a.pool, f)
					cancelled, asked = cancelled+n, asked+more
					return err
				})
			}
			said := fmt.Sprintf("%s cancelled. %s told to stop.", plural(cancelled, "job"), plural(asked, "running job"))
			a.ended(cmd.Context(), action, said, stopped, err)
			if a.json {
				err = errors.Join(err, a.printJSON(map[string]any{"cancelled": cancelled, "asked": asked, "stopped": stopped}))
			} else {
				a.say("%s\n", said)
			}
			if stopped {
				return errStoppedBetween
			}
			return err
		},
	}, &why)
	agree.flags(cmd)
	return cmd
}
