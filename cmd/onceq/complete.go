package main

import (
	"context"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/onceq/onceq/onceqops"
)

// completions say where a shell's completion finds the names that the database knows, by the flag, or by the word that stands for an argument.
// Each has two seconds, and no lock to wait for but one of a whole table.
var completions = map[string]string{
	"QUEUE": `select queue from onceq.queues union select pg_catalog.jsonb_object_keys(queues) collate "C" from onceq.v_workers`,
	"KIND":  `select pg_catalog.unnest(kinds) collate "C" from onceq.v_workers union select kind from (select kind from onceq.v_jobs limit 1000) j`,
	"LANE": `select lane from (select lane from onceq.job_waits where pg_catalog.starts_with(path, lane) or path is null limit 1000) w
	          union select lane from onceq.lane_limits where not pg_catalog.starts_with(lane, '/') and not lane like '%/'`,
	"LIMIT":    `select pg_catalog.substr(lane, 2) from onceq.lane_limits where pg_catalog.starts_with(lane, '/')`,
	"SCHEDULE": `select name from onceq.v_schedules`,
	"JOB":      `select id::text from (select id from onceq.v_jobs order by id desc limit 50) j`,
	"GROUP":    `select id::text from (select id from onceq.job_waits where if_dead is not null limit 50) g`,
}

// namingFlags are the flags that name something, and what.
var namingFlags = map[string]string{"queue": "QUEUE", "to": "QUEUE", "kind": "KIND", "scope": "KIND", "family": "KIND", "limit": "LIMIT", "group": "GROUP"}

// names reports whether a flag of c is one of those: --to is also a time, and --limit a number.
func names(c *cobra.Command, f *pflag.Flag) bool {
	return namingFlags[f.Name] != "" && (f.Name == "group" || f.Value.Type() == "string") && (f.Name != "to" || c.Name() == "move")
}

// completing lets a shell complete names: the arguments and the flags of c and of all commands below it.
func (a *app) completing(c *cobra.Command) {
	for _, below := range c.Commands() {
		a.completing(below)
	}
	_, arguments, _ := strings.Cut(c.Use, " ")
	first, _, _ := strings.Cut(strings.TrimPrefix(arguments, "["), " ")
	if sql, known := completions[strings.TrimSuffix(first, "...]")]; known {
		c.ValidArgsFunction = a.complete(sql)
	}
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if names(c, f) {
			_ = c.RegisterFlagCompletionFunc(f.Name, a.complete(completions[namingFlags[f.Name]]))
		}
	})
}

// complete asks the database. Where it does not answer at once a shell offers nothing, and says nothing.
func (a *app) complete(sql string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, begun string) (names []string, _ cobra.ShellCompDirective) {
		const none = cobra.ShellCompDirectiveNoFileComp
		a.timeout = 2 * time.Second
		ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
		defer cancel()
		if a.connect(ctx, false) != nil {
			return nil, none
		}
		all, err := a.namesOf(ctx, sql)
		if err != nil {
			return nil, none
		}
		for _, name := range all {
			if strings.HasPrefix(name, begun) && !strings.ContainsFunc(name, dangerous) { // a shell prints them as they are
				names = append(names, name)
			}
		}
		return names, none
	}
}

func (a *app) namesOf(ctx context.Context, sql string) ([]string, error) {
	rows, err := a.pool.Query(ctx, `select name from (`+strings.ReplaceAll(sql, "onceq.", pgx.Identifier{a.schema}.Sanitize()+".")+`) s (name) order by name collate "C"`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// doubt says of a filter that chooses no job that no worker and no job has its queue or its kind, and which one may have been meant.
func (a *app) doubt(ctx context.Context, filter onceqops.Filter) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for _, one := range []struct{ what, queue, kind, names string }{{"queue", filter.Queue, "", "QUEUE"}, {"kind", "", filter.Kind, "KIND"}} {
		name := one.queue + one.kind
		if name == "" {
			continue
		}
		if known, err := a.known(ctx, a.pool, one.queue, one.kind); known || err != nil {
			continue
		}
		others, _ := a.namesOf(ctx, completions[one.names])
		a.remark("No worker and no job has the %s %q%s\n", one.what, name, meant(name, others))
	}
}

// meant names those that may have been meant by a word. cobra knows that of commands.
func meant(word string, among []string) string {
	c := &cobra.Command{SuggestionsMinimumDistance: 2}
	for _, name := range among {
		if !strings.ContainsFunc(name, unicode.IsSpace) { // a command's name has no space
			c.AddCommand(&cobra.Command{Use: name, Run: func(*cobra.Command, []string) {}})
		}
	}
	var near []string
	for _, name := range c.SuggestionsFor(word) {
		near = append(near, strconv.Quote(name))
	}
	if len(near) == 0 {
		return ""
	}
	return "; there is " + strings.Join(near, " or ")
}
