package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq/onceqops"
)

func (a *app) lanesCommand() *cobra.Command {
	return group("lanes", "List lanes that jobs wait for, with what holds them, and set limits", a.laneListCommand(), a.laneLimitCommand())
}

func (a *app) laneListCommand() *cobra.Command {
	var filter onceqops.LaneFilter
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List lanes that jobs wait for, and what holds each",
		Long: `list prints the lanes that jobs wait for, by name. LIVE jobs are in the lane's places: to be claimed, running, or waiting for their next attempt. WAITING
jobs are due and wait for a place; OLDEST says for how long the first of these has been due. DELAYED ones are not due yet.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return listed(a, cmd, page[onceqops.LaneInfo]{
				name: "lanes", none: "No job waits for a lane.", limit: filter.Limit,
				read: func(ctx context.Context) ([]onceqops.LaneInfo, error) {
					return a.ops.Lanes(ctx, a.pool, filter)
				},
				key:  func(l onceqops.LaneInfo) string { return l.Lane },
				json: func(all []onceqops.LaneInfo) any { return lanesJSON(all) },
				table: func(lanes []onceqops.LaneInfo) *table {
					t := newTable("LANE", "LIMIT", "LIVE", "WAITING", "OLDEST", "DELAYED", "WHY").numbers("LIMIT", "LIVE", "WAITING", "OLDEST", "DELAYED")
					for _, l := range lanes {
						t.add(l.Lane, l.Limit, number(l.Live), number(l.Waiting), ago(l.Oldest), number(l.Delayed), whyLane(l))
						if len(l.StoppedBy) > 0 || l.Limit == 0 {
							t.paint(6, red)
						}
					}
					return t
				},
			})
		},
	}
	cmd.Flags().StringVar(&filter.Family, "family", "", "only lanes of this family: the kind's name, unless the application says otherwise")
	cmd.Flags().IntVarP(&filter.Limit, "limit", "n", 50, "how many, at most 1,000")
	cmd.Flags().StringVar(&filter.After, "after", "", "the next page: lanes behind this one")
	return cmd
}

// page is a page of a list that goes by name.
type page[T any] struct {
	name  string // of the list, in JSON
	none  string // what is said of an empty one
	limit int
	read  func(context.Context) ([]T, error)
	key   func(T) string
	json  func([]T) any
	table func([]T) *table
}

// listed reads a page and prints it, with where the next one begins.
func listed[T any](a *app, cmd *cobra.Command, p page[T]) error {
	if p.limit < 1 {
		return usagef("--limit is %d; it must be positive", p.limit)
	}
	if err := a.connect(cmd.Context(), true); err != nil {
		return err
	}
	ctx, cancel := a.limited(cmd.Context())
	defer cancel()
	all, err := p.read(ctx)
	if err != nil {
		return err
	}
	next := ""
	if len(all) == p.limit {
		next = p.key(all[len(all)-1])
	}
	if a.json {
		shown := map[string]any{p.name: p.json(all)}
		if next != "" {
			shown["next"] = next
		}
		return a.printJSON(shown)
	}
	a.print(p.table(all), p.none)
	if next != "" {
		a.remark("There may be more: add --after %s\n", quoteArg(next))
	}
	return nil
}

// laneJSON is a lane for programs.
type laneJSON struct {
	onceqops.LaneInfo
	Oldest float64 `json:"oldest_seconds"`
	Why    string  `json:"why"`
}

func lanesJSON(lanes []onceqops.LaneInfo) []laneJSON {
	all := []laneJSON{}
	for _, l := range lanes {
		seconds := l.Oldest.Seconds()
		l.Oldest = 0
		all = append(all, laneJSON{l, seconds, whyLane(l)})
	}
	return all
}

// whyLane says in a few words what a lane's jobs wait for.
func whyLane(l onceqops.LaneInfo) string {
	ids := func(ids []int64) string {
		text := strings.Trim(fmt.Sprint(ids), "[]")
		if len(ids) == 10 {
			text += " …"
		}
		return text
	}
	switch {
	case len(l.StoppedBy) > 0:
		return "stands still: dead or held " + ids(l.StoppedBy)
	case l.Limit == 0:
		return "stands still: its limit is 0"
	case l.Live >= l.Limit:
		return "full: " + ids(l.LiveIDs)
	case l.Waiting == 0:
		return "not due"
	}
	return "has room"
}

func (a *app) laneLimitCommand() *cobra.Command {
	var why string
	var remove bool
	cmd := whyFlag(&cobra.Command{
		Use:   "limit LANE [N]",
		Short: "Set how many jobs of a lane may be live at once, or say how many",
		Long: `limit sets how many jobs of a lane may be live at once, in all processes: to be claimed, running, or waiting for their next attempt. LANE is what
lanes list prints. FAMILY/ stands for all lanes of a family that have no limit of their own. Without N it prints the limit. 0 lets no more jobs
start; those that are live run on. It lasts until somebody sets another limit, or removes it with --remove: then the family's limit holds, or one job
runs at a time.`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			family, name, ok := strings.Cut(args[0], "/")
			if !ok || family == "" {
				return usagef("%q is not a lane; say FAMILY/NAME, as lanes list does, or FAMILY/ for all lanes of a family", args[0])
			}
			n := -1
			if remove && len(args) == 2 {
				return usagef("--remove takes the limit away; say it, or %q", args[1])
			}
			if len(args) == 2 {
				var err error
				if n, err = strconv.Atoi(args[1]); err != nil || n < 0 {
					return usagef("the limit is %q; it must be a number, 0 or more", args[1])
				}
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			was, err := a.q.LaneLimit(ctx, a.pool, family, name)
			if err != nil {
				return err
			}
			about := fmt.Sprintf("lane %q", args[0])
			if name == "" {
				about = fmt.Sprintf("the lanes of family %q", family)
			}
			said := fmt.Sprintf("The limit of %s is %d.", about, was)
			if n >= 0 || remove {
				now, err := a.setLimit(ctx, family, name, n, func(now int) onceqops.Action {
					said = fmt.Sprintf("The limit of %s is %d now; it was %d.", about, now, was)
					return onceqops.Action{Who: a.person(), What: "lane limit", About: about, Why: why, Outcome: said}
				})
				if err != nil {
					return err
				}
				was = now
			}
			if n >= 0 && !a.json {
				hint, err := a.unusedLane(ctx, family, name)
				if err != nil {
					return err
				}
				said += hint
			}
			if a.json {
				return a.printJSON(map[string]any{"lane": args[0], "limit": was})
			}
			a.say("%s\n", said)
			return nil
		},
	}, &why)
	cmd.Flags().BoolVar(&remove, "remove", false, "take the limit away that somebody has set")
	return cmd
}

// setLimit sets a limit, or removes it if n is negative, in one transaction with its line in the audit trail.
func (a *app) setLimit(ctx context.Context, family, name string, n int, action func(now int) onceqops.Action) (now int, err error) {
	err = a.inTx(ctx, func(tx pgx.Tx) (err error) {
		if n >= 0 {
			err = a.q.SetLaneLimit(ctx, tx, family, name, n)
		} else {
			err = a.q.RemoveLaneLimit(ctx, tx, family, name)
		}
		if err != nil {
			return err
		}
		if now, err = a.q.LaneLimit(ctx, tx, family, name); err != nil {
			return err
		}
		_, err = a.ops.RecordAction(ctx, tx, action(now))
		return err
	})
	return now, err
}

// unusedLane says that nobody uses a family of lanes, as far as can be seen, or that no job waits for a lane, and for which ones jobs do:
// one of these may be meant.
func (a *app) unusedLane(ctx context.Context, family, name string) (string, error) {
	const most = 1000
	of, err := a.ops.Lanes(ctx, a.pool, onceqops.LaneFilter{Family: family, Limit: most})
	if err != nil {
		return "", err
	}
	if len(of) > 0 {
		if name == "" || len(of) == most || slices.ContainsFunc(of, func(l onceqops.LaneInfo) bool { return l.Lane == family+"/"+name }) {
			return "", nil
		}
		return " No job waits for that lane now; jobs do wait for " + firstNames(of, func(l onceqops.LaneInfo) string { return l.Lane }), nil
	}
	workers, err := a.ops.Workers(ctx, a.pool)
	if err != nil || slices.ContainsFunc(workers, func(w onceqops.WorkerInfo) bool { return slices.Contains(w.Kinds, family) }) {
		return "", err
	}
	said := fmt.Sprintf(" No job waits for a lane of family %q, and no worker has a kind of that name: is that its name?", family)
	all, err := a.ops.Lanes(ctx, a.pool, onceqops.LaneFilter{Limit: most})
	if err == nil && len(all) > 0 {
		said += " Jobs wait for lanes of " + firstNames(all, func(l onceqops.LaneInfo) string { return l.Lane[:strings.Index(l.Lane, "/")+1] })
	}
	return said, err
}

// firstNames lists up to five names, each once.
func firstNames(all []onceqops.LaneInfo, name func(onceqops.LaneInfo) string) string {
	var names []string
	for _, l := range all {
		if quoted := strconv.Quote(name(l)); !slices.Contains(names, quoted) {
			names = append(names, quoted)
		}
	}
	more := "."
	if len(names) > 5 {
		names, more = names[:5], " and others."
	}
	return strings.Join(names, ", ") + more
}
