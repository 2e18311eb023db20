package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// completions say where a shell's completion finds the names that the database knows, by the flag, or by the word that stands for an argument.
// None of them reads more than a few thousand rows.
var completions = map[string]string{
	"QUEUE": `select queue from onceq.queues union select pg_catalog.jsonb_object_keys(queues) collate "C" from onceq.v_workers`,
	"KIND":  `select pg_catalog.unnest(kinds) collate "C" from onceq.v_workers union select kind from (select kind from onceq.v_jobs limit 1000) j`,
	"LANE": `select lane from (select lane from onceq.job_waits where pg_catalog.starts_with(path, lane) or path is null limit 1000) w
	          union select lane from onceq.lane_limits where not pg_catalog.starts_with(lane, '/') and not lane like '%/'`,
	"LIMIT":    `select pg_catalog.substr(lane, 2) from onceq.lane_limits where pg_catalog.starts_with(lane, '/')`,
	"SCHEDULE": `select name from onceq.v_schedules`,
	"JOB":      `select id::text from (select id from onceq.v_jobs order by id desc limit 50) j`,
	"GROUP":    `select group_id::text from (select group_id from onceq.v_groups limit 50) g`,
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

// doubted says after a command that no worker and no job has the queue or the kind that it named, and which one may have been meant.
func (a *app) doubted(c *cobra.Command) {
	if a.json || a.pool == nil || c.Name() == "pause" { // which says so itself
		return
	}
	ctx, cancel := context.WithTimeout(c.Context(), 2*time.Second)
	defer cancel()
	for _, flag := range []string{"queue", "kind"} {
		f := c.Flags().Lookup(flag)
		if f == nil || f.Value.String() == "" {
			continue
		}
		name, of := f.Value.String(), map[string]string{}
		of[flag] = name
		if known, err := a.known(ctx, a.pool, of["queue"], of["kind"]); known || err != nil {
			continue
		}
		others, _ := a.namesOf(ctx, completions[namingFlags[flag]])
		meant := ""
		if near := nearest(name, others); near != "" && near != name {
			meant = fmt.Sprintf("; there is %q", near)
		}
		a.remark("No worker and no job has the %s %q%s\n", flag, name, meant)
	}
}

// nearest is the name that differs from a word by the fewest characters, if those are few.
func nearest(word string, among []string) (near string) {
	best := 1 + max(min(2, len(word)/2), len(word)/3)
	for _, name := range among {
		if d := distance([]rune(word), []rune(name)); d < best {
			best, near = d, name
		}
	}
	return near
}

// distance is how many characters must be put in, taken out or changed to make b of a (Levenshtein).
func distance(a, b []rune) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i, x := range a {
		diagonal := row[0]
		row[0] = i + 1
		for j, y := range b {
			d := diagonal
			if x != y {
				d++
			}
			diagonal, row[j+1] = row[j+1], min(d, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
