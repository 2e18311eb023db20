package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

func (a *app) limitsCommand() *cobra.Command {
	return group("limits", "List limits that lanes and kinds share, and set them", a.limitListCommand(), a.limitSetCommand(), a.limitRemoveCommand())
}

func (a *app) limitListCommand() *cobra.Command {
	var filter onceqops.LimitFilter
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List limits that are set or that jobs wait for, and what holds each",
		Long: `list prints the limits that somebody has set and those that jobs wait for, by name. LIVE jobs are to be claimed or running. WAITING jobs are due
and wait for the limit; OLDEST says for how long the first of these has waited. DELAYED ones are not due yet. NEXT SLOT is of a limit with --max or a
rate: when the next job can start. A limit that is "not set itself" is its family's, or one at a time: its name may be misspelt.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return listed(a, cmd, page[onceqops.LimitInfo]{
				name: "limits", none: "No limit is set, and no job waits for one.", limit: filter.Limit,
				read: func(ctx context.Context) ([]onceqops.LimitInfo, error) {
					return a.ops.Limits(ctx, a.pool, filter)
				},
				key:  func(l onceqops.LimitInfo) string { return l.Name },
				json: func(all []onceqops.LimitInfo) any { return append([]onceqops.LimitInfo{}, all...) },
				table: func(limits []onceqops.LimitInfo) *table {
					t := newTable("LIMIT", "ALLOWS", "LIVE", "WAITING", "OLDEST", "DELAYED", "NEXT SLOT").numbers("LIVE", "WAITING", "OLDEST", "DELAYED")
					for _, l := range limits {
						allows := l.Limit.String()
						if !l.Set {
							allows += " (not set itself)"
						}
						t.add(l.Name, allows, number(l.Live), number(l.Waiting), ago(l.Oldest), number(l.Delayed), stamp(l.NextSlot))
						if l.Limit == (onceq.Limit{}) {
							t.paint(1, red)
						}
					}
					return t
				},
			})
		},
	}
	cmd.Flags().IntVarP(&filter.Limit, "limit", "n", 50, "how many, at most 1,000")
	cmd.Flags().StringVar(&filter.After, "after", "", "the next page: limits behind this one")
	return cmd
}

func (a *app) limitSetCommand() *cobra.Command {
	var why string
	var limit onceq.Limit
	cmd := &cobra.Command{
		Use:   "set LIMIT",
		Short: "Set how many jobs of a limit may be live at once, and how many may start in a time",
		Long: `set replaces a limit, in all processes. With --at-once 0 and neither --max nor --rate no more jobs start; those that are live run on. A name that ends in a
slash is for each limit whose name begins with it and that was not set itself. For a contract of never more than ten in any second say --max 10: jobs are
spaced evenly. With --rate several start at once: in any time at most the burst and what the rate allows, so --rate 8 --burst 2 keeps the same contract.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.ContainsFunc([]string{"at-once", "max", "rate"}, cmd.Flags().Changed) {
				return usagef("set it to what? Say --at-once, --max or --rate, or --at-once and one of the others; --at-once 0 lets no more jobs start. onceq limits list shows what is set")
			}
			return a.setShared(cmd, args[0], &limit, why)
		},
	}
	cmd.Flags().IntVar(&limit.AtOnce, "at-once", 0, "how many jobs may be live at once")
	cmd.Flags().IntVar(&limit.Max, "max", 0, "how many may start in any --per, wherever it begins; spaced evenly")
	cmd.Flags().IntVar(&limit.Rate, "rate", 0, "how many may start in --per")
	cmd.Flags().DurationVar(&limit.Per, "per", 0, "a second, unless this says otherwise")
	cmd.Flags().IntVar(&limit.Burst, "burst", 0, "how many may start at once after a pause, besides what the rate allows; default what the rate allows in 100 ms, and one")
	return whyFlag(cmd, &why)
}

func (a *app) limitRemoveCommand() *cobra.Command {
	var why string
	return whyFlag(&cobra.Command{
		Use:   "remove LIMIT",
		Short: "Undo set: the limit's family decides, or one job runs at a time",
		Args:  cobra.ExactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return a.setShared(cmd, args[0], nil, why) },
	}, &why)
}

// setShared sets or removes a limit, in one transaction with its line in the audit trail.
func (a *app) setShared(cmd *cobra.Command, name string, limit *onceq.Limit, why string) error {
	if err := a.connect(cmd.Context(), true); err != nil {
		return err
	}
	ctx, cancel := a.limited(cmd.Context())
	defer cancel()
	var now onceqops.LimitInfo
	var said string
	err := a.inTx(ctx, func(tx pgx.Tx) error {
		was, err := a.ops.Limit(ctx, tx, name)
		if err != nil {
			return err
		}
		if limit == nil && !was.Set {
			now, said = was, fmt.Sprintf("Nobody has set limit %q. Nothing was changed: it is %s.", name, was.Limit)
			return nil
		}
		if limit != nil {
			err = a.q.SetLimit(ctx, tx, name, *limit)
		} else {
			err = a.q.RemoveLimit(ctx, tx, name)
		}
		if err != nil {
			return err
		}
		if now, err = a.ops.Limit(ctx, tx, name); err != nil {
			return err
		}
		said = fmt.Sprintf("The limit is %s now; it was %s.", now.Limit, was.Limit)
		if limit != nil && !was.Set && now.Live+now.Waiting+now.Delayed == 0 && !strings.HasSuffix(name, "/") {
			hint, err := a.unused(ctx, tx, name)
			if err != nil {
				return err
			}
			said += hint
		}
		_, err = a.ops.RecordAction(ctx, tx, onceqops.Action{Who: a.person(), What: "limit", About: fmt.Sprintf("limit %q", name), Why: why, Outcome: said})
		return err
	})
	switch {
	case err != nil:
		return err
	case a.json:
		return a.printJSON(now)
	}
	a.say("%s\n", said)
	return nil
}

// unused says that no job has or waits for a limit, and which limits jobs do wait for although nobody has set them: one of these may be
// meant.
func (a *app) unused(ctx context.Context, tx pgx.Tx, name string) (string, error) {
	all, err := a.ops.Limits(ctx, tx, onceqops.LimitFilter{Limit: 1000})
	if err != nil {
		return "", err
	}
	said := fmt.Sprintf(" No job has limit %q now: is that its name?", name)
	var others []string
	for _, l := range all {
		if !l.Set && len(others) < 5 {
			others = append(others, fmt.Sprintf("%q", l.Name))
		}
	}
	if len(others) > 0 {
		said += " Jobs wait for these, which nobody has set: " + strings.Join(others, ", ") + "."
	}
	return said, nil
}
