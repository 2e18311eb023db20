package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

func (a *app) jobsCommand() *cobra.Command {
	return group("jobs", "List, show, explain, watch, cancel, retry, redrive and discard jobs",
		a.listCommand(), a.errorsCommand(), a.showCommand(), a.explainCommand(), a.watchCommand(), a.cancelCommand(), a.retryCommand(), a.redriveCommand(), a.discardCommand(), a.moveCommand())
}

func (a *app) listCommand() *cobra.Command {
	var c chosen
	var after int64
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List jobs, newest first",
		Long: `list prints jobs, live ones and those in the history, newest first. The last line says how to get the next page.

With --state dead or --state held it is quick at any size. For jobs that are rare among many others it looks for five seconds, some
thousand jobs a statement, prints what it has found, and says where to go on. With --queue, up to 5,000 live jobs are looked at at once.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.limit < 1 {
				return usagef("--limit is %d; it must be positive", c.limit)
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			filter, err := c.filter(cmd.Context(), a, allStates, nil)
			if err != nil {
				return err
			}
			filter.After = after
			jobs, next, err := a.list(cmd.Context(), filter, c.limit)
			if err != nil {
				return err
			}
			if a.json {
				page := map[string]any{"jobs": append([]onceq.JobInfo{}, jobs...)}
				if next != 0 {
					page["next"] = next
				}
				return a.printJSON(page)
			}
			now, err := a.now(cmd.Context())
			if err != nil {
				return err
			}
			none := "No job is " + words(filter) + "."
			if next != 0 {
				none = "No job was found yet that is " + words(filter) + "."
			}
			a.print(jobTable(jobs, now), none)
			if len(jobs) == 0 {
				a.doubt(cmd.Context(), filter)
			}
			if next != 0 && len(jobs) < c.limit {
				a.remark("Not all jobs were looked at: add --after %d\n", next)
			} else if next != 0 {
				a.remark("There may be more: add --after %d\n", next)
			}
			return nil
		},
	}
	c.flags(cmd, allStates)
	cmd.Flags().IntVarP(&c.limit, "limit", "n", 50, "how many")
	cmd.Flags().Int64Var(&after, "after", 0, "the next page: those with smaller ids than this")
	return cmd
}

// listTime is how long list looks for jobs that are rare.
const listTime = 5 * time.Second

// list reads pages until it has as many jobs as asked for, or finds too few. next says where to go on; it is 0 for the end.
func (a *app) list(ctx context.Context, filter onceqops.Filter, limit int) (jobs []onceq.JobInfo, next int64, err error) {
	found := time.Now() // when a page was last full
	for len(jobs) < limit {
		filter.Limit, filter.WithoutPayloads = min(limit-len(jobs), 200), filter.WithoutPayloads || !a.json
		inner, cancel := a.limited(ctx)
		page, after, err := a.ops.Page(inner, a.pool, filter)
		cancel()
		if err != nil {
			return nil, 0, err
		}
		if jobs = append(jobs, page...); len(page) == filter.Limit {
			found = time.Now()
		}
		if next = after; next == 0 || time.Since(found) > listTime {
			break
		}
		filter.After = next
	}
	return jobs, next, nil
}

func jobTable(jobs []onceq.JobInfo, now time.Time) *table {
	t := newTable("ID", "STATE", "QUEUE", "KIND", "ATTEMPTS", "LOST", "AGE", "WHEN", "KEY", "LATEST ERROR").numbers("ID", "LOST", "AGE")
	for _, j := range jobs {
		latest := ""
		if len(j.Errors) > 0 {
			latest = j.Errors[len(j.Errors)-1].Error
		}
		t.add(j.ID, j.State, j.Queue, j.Kind, fmt.Sprintf("%d/%d", j.Attempts, j.MaxAttempts), j.Lost, ago(now.Sub(j.CreatedAt)), when(j, now), j.Key, latest)
	}
	return t
}

// when says what matters about a job's time in its state.
func when(j onceq.JobInfo, now time.Time) string {
	switch {
	case j.State.Finished():
		return ago(now.Sub(j.FinishedAt)) + " ago"
	case j.State == onceq.StateRunning:
		return "leased " + ago(j.LeasedUntil.Sub(now))
	case j.RunAt.After(now):
		return "in " + ago(j.RunAt.Sub(now))
	case j.WaitsFor == "jobs":
		return "waits for others, due " + ago(now.Sub(j.DueAt))
	case j.WaitsFor == "limit":
		return "waits for limit " + j.Limit + ", due " + ago(now.Sub(j.DueAt))
	case j.WaitsFor == "lane":
		return "in lane " + j.Lane + ", due " + ago(now.Sub(j.DueAt))
	}
	return "due " + ago(now.Sub(j.DueAt))
}

// shown is a job with everything around it, for programs.
type shown struct {
	onceq.JobInfo
	Effects []onceqops.EffectInfo `json:"effects"`
	Actions []onceqops.Action     `json:"actions"`
	Groups  []int64               `json:"groups"`         // that it is a member of
	Runs    *onceqops.Reason      `json:"runs,omitempty"` // where it runs, and since when; nil if it does not
}

func (a *app) showCommand() *cobra.Command {
	var key, scope string
	var short bool
	cmd := &cobra.Command{
		Use:   "show JOB | --key KEY --scope SCOPE",
		Short: "Show one job: state, payload, errors, effects, what people did",
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) > 1 || len(args) == 1 && key != "":
				return usagef("name one job, by its id or by --key")
			case len(args) == 0 && key == "":
				return usagef("which job? Name its id, or its --key and --scope")
			case key != "" && scope == "":
				return usagef("--key needs --scope, which is the kind's name unless the application says otherwise; onceq keys %s looks in all", quoteArg(key))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := jobIDs(args)
			if err != nil {
				return err
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			var s shown
			if key != "" {
				s.JobInfo, err = a.q.GetByKey(ctx, a.pool, scope, key)
			} else {
				s.JobInfo, err = a.q.Get(ctx, a.pool, ids[0])
			}
			if err != nil {
				return err
			}
			if s.Effects, err = a.ops.Effects(ctx, a.pool, s.ID); err != nil {
				return err
			}
			if s.Actions, err = a.ops.Actions(ctx, a.pool, onceqops.ActionFilter{JobID: s.ID, Limit: 20}); err != nil {
				return err
			}
			if s.Groups, err = a.ops.GroupsOf(ctx, a.pool, s.ID); err != nil {
				return err
			}
			if s.State == onceq.StateRunning {
				e, err := a.ops.Explain(ctx, a.pool, s.ID)
				if err != nil {
					return err
				}
				if e.Cause() == onceqops.CauseRunning { // it may have ended meanwhile
					s.Runs = &e.Reasons[0]
				}
			}
			if a.json {
				s.Effects, s.Actions = append([]onceqops.EffectInfo{}, s.Effects...), append([]onceqops.Action{}, s.Actions...)
				return a.printJSON(s)
			}
			now, err := a.now(cmd.Context())
			if err != nil {
				return err
			}
			a.show(s, now, short)
			return nil
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "the job that has this key, or had it last")
	cmd.Flags().StringVar(&scope, "scope", "", "the key's scope: the kind's name by default")
	cmd.Flags().BoolVar(&short, "no-payload", false, "leave out the payload and the result")
	return cmd
}

func (a *app) show(s shown, now time.Time, short bool) {
	line := func(name, format string, args ...any) {
		a.say("%-11s ", name)
		a.say(format+"\n", args...)
	}
	state := s.State.String()
	line("job", "%d", s.ID)
	line("state", "%s, %s", a.colored(stateColors[state], state), a.typed(hint(s, now)))
	if s.Kind == "" { // only its fence is left
		line("key", "%s in scope %s", s.Key, s.Scope)
		line("created", "%s", stamp(s.CreatedAt))
		line("finished", "%s; it is not in the history", stamp(s.FinishedAt))
	} else {
		line("kind", "%s", s.Kind)
		line("queue", "%s, priority %s", s.Queue, s.Priority)
		if s.Key != "" {
			line("key", "%s in scope %s", s.Key, s.Scope)
		}
		waits := func(what string) string { return map[bool]string{true: ", for which it waits"}[s.WaitsFor == what] }
		if s.Lane != "" {
			line("lane", "%s%s", s.Lane, waits("lane"))
		}
		if s.Limit != "" {
			weighs := map[bool]string{true: fmt.Sprintf(", in which it weighs %d", s.Weight)}[s.Weight > 1]
			line("limit", "%s%s%s", s.Limit, weighs, waits("limit"))
		}
		if s.WaitsFor == "jobs" {
			line("after", "others, for which it waits; %s", a.typed(fmt.Sprintf("onceq groups show %d", s.ID)))
		}
		line("attempts", "%d failed of %d, %s lost, %s, token %d", s.Attempts, s.MaxAttempts, plural(s.Lost, "lease"), plural(s.Claims, "claim"), s.Token)
		line("created", "%s (%s ago)", stamp(s.CreatedAt), ago(now.Sub(s.CreatedAt)))
		if !s.State.Finished() {
			line("runs at", "%s", stamp(s.RunAt))
		} else {
			line("finished", "%s (%s ago)", stamp(s.FinishedAt), ago(now.Sub(s.FinishedAt)))
			if !s.KeepUntil.IsZero() {
				line("kept until", "%s", stamp(s.KeepUntil))
			}
		}
	}
	for _, id := range s.Groups {
		line("member", "of group %d, whose job waits for it, or did; %s", id, a.typed(fmt.Sprintf("onceq groups show %d", id)))
	}
	if p := s.Progress; p != nil {
		total := ""
		if p.Total > 0 {
			total = fmt.Sprintf(" of %s (%d%%)", number(int(p.Total)), p.Done*100/p.Total)
		}
		line("progress", "%s%s %s, %s ago", number(int(p.Done)), total, p.Note, ago(now.Sub(p.At)))
	}
	if len(s.Metadata) > 0 {
		for _, k := range slices.Sorted(mapKeys(s.Metadata)) {
			line("metadata", "%s = %s", k, s.Metadata[k])
		}
	}
	if !short {
		switch {
		case s.Payload != nil:
			line("payload", "%s", under(indent(s.Payload), 12))
		case s.Bytes != nil:
			line("payload", "%s of bytes: %q", plural(len(s.Bytes), "byte"), s.Bytes[:min(len(s.Bytes), 200)])
		}
		if s.Result != nil {
			line("result", "%s", under(indent(s.Result), 12))
		}
	}
	for _, e := range s.Errors {
		line("error", "%s", a.wrapped(a.out, fmt.Sprintf("attempt %d, %s%s: %s", e.Attempt, stamp(e.At), ran(e), e.Error), 12))
	}
	if s.Runs != nil {
		line("runs", "%s", a.wrapped(a.out, s.Runs.Text, 12))
	}
	for _, e := range s.Effects {
		detail := ""
		if e.Detail != "" {
			detail = ": " + e.Detail
		}
		line("effect", "%s %s, begun %s%s", e.Name, a.colored(stateColors[e.State], e.State), stamp(e.Since), detail)
		if e.IdempotencyKey != "" {
			line("", "the provider knows it as %s", e.IdempotencyKey)
		}
		if e.Result != nil && !short {
			line("", "result %s", under(indent(e.Result), 12))
		}
	}
	for _, x := range s.Actions {
		line("action", "%s %s by %s %s", stamp(x.At), x.What, x.Who, strings.Join(slices.DeleteFunc([]string{x.About, x.Outcome, x.Why}, func(s string) bool { return s == "" }), "; "))
	}
}

// ran says how long an attempt ran, and where.
func ran(e onceq.AttemptError) string {
	if e.Host == "" {
		return ""
	}
	unit := 10 * time.Microsecond
	if e.Took >= time.Second {
		unit = 10 * time.Millisecond
	}
	return fmt.Sprintf(", ran for %s in %s", took(e.Took.Round(unit)), whoRan(e))
}

// whoRan is the process that ran an attempt; empty if that is not known.
func whoRan(e onceq.AttemptError) (who string) {
	if e.Host != "" {
		who = fmt.Sprintf("process %d on %s", e.Process, e.Host)
	}
	if e.Version != "" {
		who += ", version " + e.Version
	}
	return who
}

func mapKeys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func indent(raw json.RawMessage) string {
	var b bytes.Buffer
	if len(raw) < 60 || json.Indent(&b, raw, "", "  ") != nil {
		return string(raw)
	}
	return b.String()
}

// hint says what a job's state means for it, and what to do if somebody has to.
func hint(s shown, now time.Time) string {
	id := strconv.FormatInt(s.ID, 10)
	switch s.State {
	case onceq.StateWaiting:
		return "due for " + ago(now.Sub(s.DueAt)) + "; why it does not run: onceq jobs explain " + id
	case onceq.StateDelayed:
		return "due in " + ago(s.RunAt.Sub(now)) + "; what it waits for: onceq jobs explain " + id + "; onceq jobs retry " + id + " runs it now"
	case onceq.StateRunning:
		return "a worker has it; its lease lasts for " + ago(s.LeasedUntil.Sub(now)) + " unless it is extended"
	case onceq.StateRetrying:
		if s.RunAt.After(now) {
			return "runs again in " + ago(s.RunAt.Sub(now)) + "; onceq jobs retry " + id + " runs it now"
		}
		return "due for " + ago(now.Sub(s.DueAt)) + "; why it does not run: onceq jobs explain " + id
	case onceq.StateDead:
		return "and stays so until somebody decides: onceq jobs redrive " + id + ", or discard"
	case onceq.StateHeld:
		for _, e := range s.Effects {
			if e.State == "held" {
				return "until somebody says whether " + e.Name + " happened: onceq effects resolve " + id + " " + quoteArg(e.Name) + " --applied, or --never"
			}
		}
		return "until somebody decides: onceq jobs redrive " + id + ", or discard"
	case onceq.StateCancelled:
		return "and does not run any more; onceq jobs redrive " + id + " brings it back"
	}
	return "and done"
}

func (a *app) explainCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "explain JOB",
		Short: "Say why a job is not running, or where it runs, and what to do",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := jobIDs(args)
			if err != nil {
				return err
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			e, err := a.ops.Explain(ctx, a.pool, ids[0])
			switch {
			case err != nil:
				return err
			}
			for i, r := range e.Reasons {
				e.Reasons[i].Advice = a.typed(r.Advice)
			}
			switch {
			case e.Cause() == onceqops.CauseUnknown:
				return &exit{codeNotFound, errors.New(e.String())}
			case a.json:
				if job, err := a.q.Get(ctx, a.pool, ids[0]); err == nil { // with its payload; it may have gone meanwhile
					e.Job = job
				}
				return a.printJSON(e)
			}
			first := e
			first.Reasons = e.Reasons[:1]
			a.say("%s\n", a.wrapped(a.out, first.String(), 2))
			for _, r := range e.Reasons[1:] {
				a.say("%s\n", a.wrapped(a.out, "and then: "+r.String(), 2))
			}
			if p := e.Job.Progress; p != nil && p.Note != "" {
				a.say("%s\n", a.wrapped(a.out, "its handler's note: "+p.Note, 2))
			}
			return nil
		},
	}
}

// verb is a command that changes jobs: the named ones one by one, or all that the flags choose.
type verb struct {
	name     string // in the command, and in the audit trail
	possible []onceq.State
	byFlags  []onceq.State // what the flags choose by default
	always   bool          // asks for named jobs too
	warning  string
	warn     func(ctx context.Context) (string, error) // the warning, if it takes a look
	one      func(ctx context.Context, tx pgx.Tx, id int64) (what string, err error)
	many     func(ctx context.Context, f onceqops.Filter) (result map[string]int, err error)
	words    func(result map[string]int) string
}

// outcome is what became of a named job.
type outcome struct {
	Job   int64  `json:"job"`
	State string `json:"state,omitempty"`
	Error string `json:"error,omitempty"`
}

func (a *app) verbCommand(v verb, short, long string) *cobra.Command {
	var c chosen
	var agree consent
	var why string
	cmd := &cobra.Command{
		Use: v.name + " [JOB...]", Short: short, Long: long,
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := jobIDs(args)
			if err != nil {
				return err
			}
			flags := c.queue != "" || c.group != 0 || c.kind != "" || c.scope != "" || len(c.states) > 0 || c.createdFrom != "" || c.createdB != ""
			switch {
			case len(ids) > 0 && flags:
				return usagef("name jobs by their ids, or choose them by flags, but not both")
			case len(ids) == 0 && !flags:
				return usagef("which jobs? Name their ids, or choose them by --queue, --kind, --scope, --group, --state; see: onceq jobs %s --help", v.name)
			case c.limit < 0:
				return usagef("--limit is negative")
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			if v.warn != nil {
				if v.warning, err = v.warn(cmd.Context()); err != nil {
					return err
				}
			}
			if len(ids) > 0 {
				return dried(a.named(cmd.Context(), v, ids, agree, why))
			}
			filter, err := c.filter(cmd.Context(), a, v.possible, v.byFlags)
			if err != nil {
				return err
			}
			filter.Limit = c.limit
			return dried(a.byFilter(cmd.Context(), v, filter, agree, why))
		},
	}
	c.flags(cmd, v.possible)
	cmd.Flags().IntVarP(&c.limit, "limit", "n", 0, "at most this many, newest first (default all)")
	cmd.Flags().StringVar(&why, "why", "", "why, for the audit trail")
	agree.flags(cmd)
	return cmd
}

// gone is all that can be said of a job that no table has.
const gone = "is unknown, or ended and was not kept (Kind.Keep)"

// named does it to the jobs with these ids, one by one. One that is refused does not keep the others from it.
func (a *app) named(ctx context.Context, v verb, ids []int64, agree consent, why string) error {
	if v.always || agree.dry {
		inner, cancel := a.limited(ctx)
		jobs, err := a.ops.List(inner, a.pool, onceqops.Filter{IDs: ids, Limit: 1000, WithoutPayloads: true})
		cancel()
		if err != nil {
			return err
		}
		lines := sample(jobs, len(jobs))
		for _, id := range ids {
			if !slices.ContainsFunc(jobs, func(j onceq.JobInfo) bool { return j.ID == id }) {
				lines = append(lines, fmt.Sprintf("%d %s", id, gone))
			}
		}
		if err := a.agreed(ctx, agree, fmt.Sprintf("%s %s.%s", capital(v.name), plural(len(ids), "job"), v.warning), lines...); err != nil {
			return err
		}
	}
	var done []outcome
	var worst error
	for _, id := range ids {
		if ctx.Err() != nil {
			worst = &exit{codeInterrupted, fmt.Errorf("interrupted after %s", plural(len(done), "job"))}
			break
		}
		o := outcome{Job: id}
		inner, cancel := a.limited(context.WithoutCancel(ctx))
		var what string
		err := a.inTx(inner, func(tx pgx.Tx) (err error) {
			if what, err = v.one(inner, tx, id); err != nil {
				return err
			}
			_, err = a.ops.RecordAction(inner, tx, onceqops.Action{Who: a.person(), What: v.name, JobID: id, Why: why, Outcome: what})
			return err
		})
		cancel()
		switch {
		case errors.Is(err, onceq.ErrNotFound):
			o.Error = a.typed(gone + "; nothing was changed. onceq keys and onceq actions may still know of it")
			if worst = cmp.Or(worst, err); len(ids) == 1 {
				worst = &exit{codeNotFound, fmt.Errorf("job %d %s", id, o.Error)}
			}
		case err != nil:
			o.Error = a.typed(strings.TrimPrefix(err.Error(), "onceq: "))
			worst = cmp.Or(worst, err)
		default:
			o.State = what
		}
		done = append(done, o)
		if !a.json && err == nil {
			a.say("job %d: %s\n", id, what)
		} else if !a.json && len(ids) > 1 {
			a.remark("job %d: %s\n", id, o.Error)
		}
	}
	if a.json {
		worst = errors.Join(worst, a.printJSON(map[string]any{"jobs": done}))
	}
	if worst != nil && len(ids) > 1 && !errors.As(worst, new(*exit)) {
		code, _ := a.code(worst)
		failed := slices.DeleteFunc(slices.Clone(done), func(o outcome) bool { return o.Error == "" })
		return &exit{code, fmt.Errorf("%s of %d failed", plural(len(failed), "job"), len(ids))}
	}
	return worst
}

// byFilter does it to all jobs that the filter chooses, 500 a statement.
func (a *app) byFilter(ctx context.Context, v verb, filter onceqops.Filter, agree consent, why string) error {
	counting := filter
	if counting.Limit == 0 || counting.Limit > countLimit {
		counting.Limit = countLimit
	}
	inner, cancel := a.limited(ctx)
	total, err := a.ops.Count(inner, a.pool, counting)
	cancel()
	if err != nil {
		return err
	}
	about := words(filter)
	if total == 0 {
		if a.json {
			return a.printJSON(map[string]any{"matched": 0, "stopped": false})
		}
		a.say("No job is %s. Nothing was changed.\n", about)
		a.doubt(ctx, filter)
		return nil
	}
	if filter.Queue == "" && filter.Kind == "" && filter.Scope == "" && filter.Group == 0 {
		about += ", of every queue and kind"
	}
	first, _, err := a.list(ctx, filter, 5)
	if err != nil {
		return err
	}
	first = first[:min(len(first), total)]
	if err := a.agreed(ctx, agree, fmt.Sprintf("%s %s: %s.%s", capital(v.name), atMost(total, "job"), about, v.warning), sample(first, total)...); err != nil {
		if errors.Is(err, errDry) && a.json {
			return a.printJSON(map[string]any{"matched": total, "dry_run": true})
		}
		return err
	}
	if len(first) > 0 {
		filter.After = first[0].ID + 1 // not those that have come since
	}
	action := onceqops.Action{What: v.name, About: about, Why: why}
	if err := a.begins(ctx, action); err != nil {
		return err
	}
	var result map[string]int
	stopped, err := a.many(ctx, filter, total, func(ctx context.Context, f onceqops.Filter) error {
		var err error
		result, err = v.many(ctx, f)
		return err
	})
	said := v.words(result)
	a.ended(ctx, action, said, stopped, err)
	if a.json {
		all := map[string]any{"matched": total, "stopped": stopped}
		for k, n := range result {
			all[k] = n
		}
		err = errors.Join(err, a.printJSON(all))
	} else {
		a.say("%s\n", said)
	}
	if stopped {
		return errStoppedBetween
	}
	return err
}

// sample are lines that show which jobs are meant.
func sample(jobs []onceq.JobInfo, total int) []string {
	var lines []string
	for _, j := range jobs {
		key := ""
		if j.Key != "" {
			key = " key " + strconv.Quote(j.Key)
		}
		lines = append(lines, clean(fmt.Sprintf("%d %s %s in queue %s%s", j.ID, j.State, j.Kind, j.Queue, key)))
	}
	if total > len(jobs) && len(jobs) > 0 {
		lines = append(lines, "and "+atMost(total-len(jobs), "other"))
	}
	return lines
}

func capital(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

func (a *app) cancelCommand() *cobra.Command {
	var keep bool
	cmd := a.verbCommand(verb{
		name: "cancel", possible: unfinished(), byFlags: unfinished(), always: true,
		one: func(ctx context.Context, tx pgx.Tx, id int64) (string, error) {
			if keep { // Cancel then says what became of it
				if _, _, err := a.ops.CancelMany(ctx, tx, onceqops.Filter{IDs: []int64{id}, KeepKeys: true}); err != nil {
					return "", err
				}
			}
			s, err := a.q.Cancel(ctx, tx, id)
			if err == nil && s == onceq.StateRunning {
				return "running; its handler is told to stop with the next beat", nil
			}
			return s.String(), err
		},
		many: func(ctx context.Context, f onceqops.Filter) (map[string]int, error) {
			f.KeepKeys = keep
			cancelled, asked, err := a.ops.CancelMany(ctx, a.pool, f)
			return map[string]int{"cancelled": cancelled, "asked": asked}, err
		},
		words: func(r map[string]int) string {
			return fmt.Sprintf("%s cancelled. %s told to stop.", plural(r["cancelled"], "job"), plural(r["asked"], "running job"))
		},
	}, "End jobs that are not finished", `cancel ends unfinished jobs. One that waits is cancelled at once. The handler of a running one is told with its worker's next beat, within
10 s by default, and the job is cancelled unless it finishes first. Cancelled jobs stay in the history for a day at least, and redrive
brings them back. The key of a job that no worker ever had is free at once; with --keep-keys it stays taken for its window, as the keys of
the others do. Flags choose unfinished jobs in every state, and must name a queue, a kind or a scope.`)
	cmd.Flags().BoolVar(&keep, "keep-keys", false, "keep the keys of jobs that never started taken for their windows too")
	return cmd
}

func (a *app) retryCommand() *cobra.Command {
	possible := []onceq.State{onceq.StateRetrying, onceq.StateDelayed}
	return a.verbCommand(verb{
		name: "retry", possible: possible, byFlags: possible[:1],
		one: func(ctx context.Context, tx pgx.Tx, id int64) (string, error) {
			s, err := a.ops.Retry(ctx, tx, id)
			if err == nil && s.Finished() {
				return "", &exit{codeRefused, fmt.Errorf("job %d is %s, and retry is for jobs that are delayed or wait for their next attempt; see: onceq jobs redrive --help", id, s)}
			}
			return s.String(), err
		},
		many: func(ctx context.Context, f onceqops.Filter) (map[string]int, error) {
			n, err := a.ops.RetryMany(ctx, a.pool, f)
			return map[string]int{"retried": n}, err
		},
		words: func(r map[string]int) string { return plural(r["retried"], "job") + " run now." },
	}, "Run now what waits for its next attempt, or is delayed", `retry lets jobs run now that wait: for their next attempt after a failure, or for the time that they were delayed to. Flags choose jobs that
failed before; delayed ones only with --state delayed.`)
}

func (a *app) redriveCommand() *cobra.Command {
	possible := []onceq.State{onceq.StateDead, onceq.StateHeld, onceq.StateCancelled}
	return a.verbCommand(verb{
		name: "redrive", possible: possible, byFlags: possible[:1],
		one: func(ctx context.Context, tx pgx.Tx, id int64) (string, error) {
			s, err := a.ops.Redrive(ctx, tx, id)
			if errors.Is(err, onceq.ErrHeld) {
				return "", &exit{codeRefused, fmt.Errorf("job %d has a held effect: say whether it happened with onceq effects resolve %d NAME, and it runs again", id, id)}
			}
			return s.String(), err
		},
		many: func(ctx context.Context, f onceqops.Filter) (map[string]int, error) {
			back, taken, err := a.ops.RedriveMany(ctx, a.pool, f)
			return map[string]int{"redriven": back, "taken": taken}, err
		},
		words: func(r map[string]int) string {
			said := plural(r["redriven"], "job") + " run again."
			if r["taken"] > 0 {
				said += " " + plural(r["taken"], "job") + " stay, because another job has their key by now."
			}
			return said
		},
	}, "Run dead, held or cancelled jobs again", `redrive runs finished jobs again: the same jobs, with their ids, keys and the outcomes of their effects, which are replayed and not done
again. Attempts count from 0. Mend the cause first. Flags choose dead jobs unless --state says otherwise. A job whose key another job has
taken since stays as it is. One that was cancelled while it waited for others waits for them again.`)
}

func (a *app) discardCommand() *cobra.Command {
	possible := []onceq.State{onceq.StateDead, onceq.StateHeld, onceq.StateCancelled, onceq.StateCompleted}
	return a.verbCommand(verb{
		name: "discard", possible: possible, byFlags: possible[:1], always: true,
		warning: " This cannot be undone: keys are free at once, and what is known of effects is deleted.",
		one: func(ctx context.Context, tx pgx.Tx, id int64) (string, error) {
			return "discarded", a.ops.Discard(ctx, tx, id)
		},
		many: func(ctx context.Context, f onceqops.Filter) (map[string]int, error) {
			n, err := a.ops.DiscardMany(ctx, a.pool, f)
			return map[string]int{"discarded": n}, err
		},
		words: func(r map[string]int) string { return plural(r["discarded"], "job") + " discarded." },
	}, "Delete finished jobs that nobody wants any more", `discard deletes finished jobs from the history. Their keys are free at once, whatever the window, and what is known of their effects is
deleted: a new job with the same key does the effects again, a second mail, a second charge. For held jobs, onceq effects resolve is
usually the right command. Flags choose dead jobs unless --state says otherwise.`)
}

func (a *app) moveCommand() *cobra.Command {
	possible := []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRetrying}
	var to string
	cmd := a.verbCommand(verb{
		name: "move", possible: possible, byFlags: possible,
		warn: func(ctx context.Context) (string, error) {
			ctx, cancel := a.limited(ctx)
			defer cancel()
			workers, err := a.ops.Workers(ctx, a.pool)
			text := fmt.Sprintf(" They go to queue %q.", to)
			if !slices.ContainsFunc(workers, func(w onceqops.WorkerInfo) bool { _, serves := w.Queues[to]; return serves && !w.Stale }) {
				text = a.typed(fmt.Sprintf(" They go to queue %q, WHICH NO WORKER SERVES NOW: see onceq workers.", to))
			}
			return text, err
		},
		one: func(ctx context.Context, tx pgx.Tx, id int64) (string, error) {
			moved, err := a.ops.Move(ctx, tx, id, to)
			if err != nil || moved {
				return "moved to queue " + strconv.Quote(to), err
			}
			j, err := a.q.Get(ctx, tx, id)
			switch {
			case err != nil:
				return "", err
			case j.Queue == to:
				return "in queue " + strconv.Quote(to) + " already", nil
			case j.State.Finished():
				return "", &exit{codeRefused, fmt.Errorf("job %d is %s, and move is for jobs that are not finished; onceq jobs redrive runs it again, and then it can be moved", id, j.State)}
			}
			return "", &exit{codeRefused, fmt.Errorf("job %d is with a worker, or was until its lease ran out, and only what nobody has can be moved; wait for its attempt to end, or: onceq jobs cancel %d, onceq jobs redrive %d, and move it", id, id, id)}
		},
		many: func(ctx context.Context, f onceqops.Filter) (map[string]int, error) {
			n, err := a.ops.MoveMany(ctx, a.pool, f, to)
			return map[string]int{"moved": n}, err
		},
		words: func(r map[string]int) string {
			return fmt.Sprintf("%s moved to queue %q.", plural(r["moved"], "job"), to)
		},
	}, "Move jobs that nobody has to another queue", `move changes the queue of jobs that wait, are delayed, or wait for their next attempt or their lane: for a queue's name that was spelt wrong,
or a queue whose workers are gone. They stay the same jobs, with their ids, keys, priorities, lanes and the outcomes of their effects. Those
that are due come after what waits in the new queue. A job that a worker has stays. Jobs that are enqueued later still go where the code sends
them.`)
	cmd.Flags().StringVar(&to, "to", "", "the queue to which they go")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if strings.TrimSpace(to) == "" {
			return usagef("to which queue? Name it with --to")
		}
		return noneEmpty(cmd)
	}
	return cmd
}
