package main

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// completions say where a shell's completion finds the names that the database knows, by the flag, or by the word that stands for an argument.
// None of them reads more than a few thousand rows.
var completions = map[string]string{
	"QUEUE": `select queue from onceq.queues union select jsonb_object_keys(queues) collate "C" from onceq.v_workers`,
	"KIND":  `select unnest(kinds) collate "C" from onceq.v_workers union select kind from (select kind from onceq.v_jobs limit 1000) j`,
	"LANE": `select lane from (select lane from onceq.job_waits where starts_with(path, lane) or path is null limit 1000) w
	          union select lane from onceq.lane_limits where not starts_with(lane, '/') and not lane like '%/'`,
	"LIMIT":    `select substr(lane, 2) from onceq.lane_limits where starts_with(lane, '/')`,
	"SCHEDULE": `select name from onceq.v_schedules`,
	"JOB":      `select id::text from (select id from onceq.v_jobs order by id desc limit 50) j`,
	"GROUP":    `select group_id::text from (select group_id from onceq.v_groups limit 50) g`,
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
	for flag, what := range map[string]string{"queue": "QUEUE", "to": "QUEUE", "kind": "KIND", "scope": "KIND", "family": "KIND", "limit": "LIMIT", "group": "GROUP"} {
		if f := c.Flags().Lookup(flag); f != nil && (flag == "group" || f.Value.Type() == "string") && (flag != "to" || c.Name() == "move") {
			_ = c.RegisterFlagCompletionFunc(flag, a.complete(completions[what]))
		}
	}
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
		rows, err := a.pool.Query(ctx, `select name from (`+strings.ReplaceAll(sql, "onceq.", pgx.Identifier{a.schema}.Sanitize()+".")+`) s (name) order by name collate "C"`)
		if err != nil {
			return nil, none
		}
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
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
