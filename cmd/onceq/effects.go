package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

func (a *app) effectsCommand() *cobra.Command {
	return group("effects", "List effects of unknown outcome, and say whether they happened", a.effectsListCommand(), a.resolveCommand())
}

// effectJSON is an effect with its job, for programs.
type effectJSON struct {
	Job      int64  `json:"job"`
	Kind     string `json:"kind"`
	Queue    string `json:"queue"`
	Key      string `json:"key,omitempty"`
	JobState string `json:"job_state"`
	onceqops.EffectInfo
}

// doubtful are the states in which a job may have effects of unknown outcome.
var doubtful = []onceq.State{onceq.StateHeld, onceq.StateDead, onceq.StateCancelled, onceq.StateRetrying, onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning}

func (a *app) effectsListCommand() *cobra.Command {
	var c chosen
	var after int64
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List effects of which nobody knows whether they happened",
		Long: `list prints the effects of unknown outcome of held jobs, which wait for a person. PROVIDER'S KEY is the idempotency key that the provider
got: look there under that key. --state chooses jobs in other states: retrying jobs decide about their uncertain effects by their
policy in the next run, dead and cancelled ones keep them.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.limit < 1 {
				return usagef("--limit is %d; it must be positive", c.limit)
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			filter, err := c.filter(cmd.Context(), a, doubtful, []onceq.State{onceq.StateHeld})
			if err != nil {
				return err
			}
			filter.After = after
			doubts, next, err := a.doubts(cmd.Context(), filter, c.limit)
			if err != nil {
				return err
			}
			if a.json {
				all := []effectJSON{}
				for _, d := range doubts {
					all = append(all, effectJSON{d.Job.ID, d.Job.Kind, d.Job.Queue, d.Job.Key, d.Job.State.String(), d.Effect})
				}
				page := map[string]any{"effects": all}
				if next != 0 {
					page["next"] = next
				}
				return a.printJSON(page)
			}
			now, err := a.now(cmd.Context())
			if err != nil {
				return err
			}
			t := newTable("JOB", "KIND", "KEY", "EFFECT", "STATE", "BEGUN", "PROVIDER'S KEY", "WHY").numbers("JOB")
			for _, d := range doubts {
				t.add(d.Job.ID, d.Job.Kind, d.Job.Key, d.Effect.Name, d.Effect.State, ago(now.Sub(d.Effect.Since))+" ago", d.Effect.IdempotencyKey, d.Effect.Detail)
			}
			a.print(t, "No job that is "+words(filter)+" has an effect of unknown outcome.")
			if next != 0 {
				a.remark("There may be more: add --after %d\n", next)
			}
			return nil
		},
	}
	c.flags(cmd, doubtful)
	cmd.Flags().IntVarP(&c.limit, "limit", "n", 50, "how many, about: a job's effects stay together")
	cmd.Flags().Int64Var(&after, "after", 0, "the next page: of jobs with smaller ids than this")
	return cmd
}

func (a *app) doubts(ctx context.Context, filter onceqops.Filter, limit int) (all []onceqops.Doubt, next int64, err error) {
	for {
		filter.Limit, filter.WithoutPayloads = min(max(limit-len(all), 1), 200), !a.json
		inner, cancel := a.limited(ctx)
		var page []onceqops.Doubt
		page, next, err = a.ops.Doubts(inner, a.pool, filter)
		cancel()
		if all = append(all, page...); err != nil || next == 0 || len(all) >= limit {
			return all, next, err
		}
		filter.After = next
	}
}

func (a *app) resolveCommand() *cobra.Command {
	var c chosen
	var agree consent
	var applied, never, again bool
	var result, name, why string
	cmd := &cobra.Command{
		Use:   "resolve JOB EFFECT | --kind KIND --effect NAME",
		Short: "Say whether an effect of unknown outcome happened",
		Long: `resolve settles an effect of unknown outcome. Look it up at the provider first, under the idempotency key that effects list shows. Then say

  --applied     it happened: the next run gets --result and does not do it again; --result null if the effect returns nothing
  --never       it did not happen: the next run does it
  --ask-again   let the policy decide once more, because the provider answers again or the code has another policy by now

A held job runs again at once, when none of its effects is held any more. Flags choose the effects of many held jobs.`,
		Args: cobra.MaximumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			flags := c.queue != "" || c.kind != "" || c.scope != "" || len(c.states) > 0 || c.createdFrom != "" || c.createdB != "" || name != ""
			n := 0
			for _, b := range []bool{applied, never, again} {
				if b {
					n++
				}
			}
			switch {
			case n != 1:
				return usagef("did it happen? Say --applied, --never or --ask-again")
			case result != "" && !applied:
				return usagef("--result goes with --applied only")
			case result != "" && !json.Valid([]byte(result)):
				return usagef("--result is not JSON; a text needs quotes of its own: --result '\"ch_123\"'")
			case len(args) == 1:
				return usagef("which effect of job %s? onceq jobs show %s lists them", args[0], args[0])
			case len(args) == 2 && flags:
				return usagef("name one effect, or choose many by flags, but not both")
			case len(args) == 0 && name == "":
				return usagef("which effects? Name a job and its effect, or choose many by --effect and --kind")
			case c.limit < 0:
				return usagef("--limit is negative")
			case applied && result == "":
				return usagef("what did the effect return? The handler gets it when it runs again: say it as JSON, with --result '\"ch_123\"', or --result null if it returns nothing")
			}
			ids, err := jobIDs(args[:len(args)/2])
			if err != nil {
				return err
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			answer, said := onceq.NeverApplied(), "never applied"
			with := "" // not in the trail, which people read who may not see results
			switch {
			case applied:
				answer, said, with = onceq.Applied(json.RawMessage(result)), "applied", ", with result "+cut(result, 500)
			case again:
				answer, said = onceq.AskAgain(), "to be decided again"
			}
			if len(args) == 2 {
				return dried(a.resolveOne(cmd.Context(), ids[0], args[1], answer, said, with, why, agree))
			}
			filter, err := c.filter(cmd.Context(), a, doubtful[:3], []onceq.State{onceq.StateHeld})
			if err != nil {
				return err
			}
			filter.Limit, filter.All = c.limit, true // the effect's name chooses
			return dried(a.resolveMany(cmd.Context(), filter, name, answer, said, with, why, agree))
		},
	}
	c.flags(cmd, doubtful[:3])
	f := cmd.Flags()
	f.BoolVar(&applied, "applied", false, "it happened")
	f.BoolVar(&never, "never", false, "it did not happen")
	f.BoolVar(&again, "ask-again", false, "let the policy decide once more")
	f.StringVar(&result, "result", "", "what the effect returned, as JSON, for the handler (with --applied; null if it returns nothing)")
	f.StringVar(&name, "effect", "", "the effects of this name, of all jobs that the other flags choose")
	f.IntVarP(&c.limit, "limit", "n", 0, "at most this many jobs, newest first (default all)")
	f.StringVar(&why, "why", "", "why, for the audit trail")
	agree.flags(cmd)
	return cmd
}

func (a *app) resolveOne(ctx context.Context, id int64, name string, answer onceq.Resolution, said, with, why string, agree consent) error {
	inner, cancel := a.limited(ctx)
	effects, err := a.ops.Effects(inner, a.pool, id)
	cancel()
	if err != nil {
		return err
	}
	there := "it has no effects"
	for i, e := range effects {
		if e.Name == name {
			there = ""
			if e.State != "uncertain" && e.State != "held" && e.Detail == "" {
				return &exit{codeRefused, fmt.Errorf("effect %q of job %d is %s: there is nothing to decide", name, id, e.State)}
			}
			if err := a.agreed(ctx, agree, fmt.Sprintf("Effect %q of job %d would count as %s.", name, id, said+with),
				fmt.Sprintf("it is %s since %s: %s", e.State, stamp(e.Since), clean(e.Detail)), "the provider knows it as "+e.IdempotencyKey); err != nil {
				return err
			}
			break
		}
		if there = "it has these: " + e.Name; i > 0 {
			there += ", …"
		}
	}
	if there != "" {
		return &exit{codeNotFound, fmt.Errorf("job %d has no effect %q; %s", id, name, there)}
	}
	inner, cancel = a.limited(context.WithoutCancel(ctx))
	defer cancel()
	err = a.inTx(inner, func(tx pgx.Tx) error {
		if err := a.ops.Resolve(inner, tx, id, name, answer); err != nil {
			return err
		}
		_, err := a.ops.RecordAction(inner, tx, onceqops.Action{Who: a.person(), What: "resolve", JobID: id, About: name, Why: why, Outcome: said})
		return err
	})
	if err != nil {
		return err
	}
	job, err := a.q.Get(inner, a.pool, id)
	state := job.State.String()
	if errors.Is(err, onceq.ErrNotFound) { // it has run and completed by now
		state, err = onceq.StateCompleted.String(), nil
	}
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(map[string]any{"job": id, "effect": name, "state": state})
	}
	a.say("job %d: %s\n", id, state)
	return nil
}

func (a *app) resolveMany(ctx context.Context, filter onceqops.Filter, name string, answer onceq.Resolution, said, with, why string, agree consent) error {
	about := fmt.Sprintf("effect %q of jobs: %s", name, words(filter))
	counting := filter
	if counting.Limit == 0 || counting.Limit > 10_000 {
		counting.Limit = 10_000
	}
	doubts, next, err := a.doubts(ctx, counting, counting.Limit)
	if err != nil {
		return err
	}
	total, lines := 0, []string{}
	for _, d := range doubts {
		if d.Effect.Name != name {
			continue
		}
		if total++; total <= 5 {
			lines = append(lines, clean(fmt.Sprintf("%d %s key %q, %s since %s: %s", d.Job.ID, d.Job.Kind, d.Job.Key, d.Effect.State, stamp(d.Effect.Since), d.Effect.Detail)))
		}
	}
	if total == 0 && next == 0 {
		if a.json {
			return a.printJSON(map[string]any{"matched": 0, "stopped": false})
		}
		a.say("No %s is of unknown outcome. Nothing was changed.\n", about)
		return nil
	}
	if total > 5 {
		lines = append(lines, "and "+plural(total-5, "other"))
	}
	many := plural(total, "effect")
	if next != 0 && filter.Limit == 0 {
		many = "at least " + many
	}
	if err := a.agreed(ctx, agree, fmt.Sprintf("%s would count as %s: %s.", many, said+with, about), lines...); err != nil {
		if errors.Is(err, errDry) && a.json {
			return a.printJSON(map[string]any{"matched": total, "dry_run": true})
		}
		return err
	}
	if len(doubts) > 0 {
		filter.After = doubts[0].Job.ID + 1 // not those that have come since
	}
	action := onceqops.Action{What: "resolve", About: about, Why: why}
	if err := a.begins(ctx, action); err != nil {
		return err
	}
	var resolved, redriven int
	stopped, err := a.many(ctx, filter, total, func(ctx context.Context, f onceqops.Filter) error {
		var err error
		resolved, redriven, err = a.ops.ResolveMany(ctx, a.pool, f, name, answer)
		return err
	})
	outcome := fmt.Sprintf("%s settled as %s. %s run again.", plural(resolved, "effect"), said, plural(redriven, "job"))
	a.ended(ctx, action, outcome, stopped, err)
	if a.json {
		err = errors.Join(err, a.printJSON(map[string]any{"matched": total, "resolved": resolved, "redriven": redriven, "stopped": stopped}))
	} else {
		a.say("%s\n", outcome)
	}
	if stopped {
		return errStoppedBetween
	}
	return err
}
