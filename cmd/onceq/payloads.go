package main

import (
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

const payloadsText = `The types of the payloads are in your program, so your program has to decode them. Ops.CheckPayloads does that: it decodes every job
that may run again with the handlers of the new version, runs none of them, and changes nothing. Give the program a command for it,

    kinds, err := onceqops.New(q).CheckPayloads(ctx, handlers...)
    for _, k := range kinds {
        fmt.Println(k) // charge: 2 of 130 payloads do not decode; the newest: …
    }                  // k.NoHandler: another program's kind, or one that this version has dropped

and run that from the new version against the real database, before you deploy it. docs/run/deploys.md has it whole.
`

func (a *app) payloadsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check-payloads",
		Short: "Explain how to ask whether a new version can decode the jobs that wait",
		Long:  payloadsText + "\nBeside this text, check-payloads lists the kinds whose jobs are waiting, retrying, delayed, dead or held: those that a new version needs a handler for.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			rows, err := a.pool.Query(ctx, `
select kind, count(*)::int from `+pgx.Identifier{a.schema}.Sanitize()+`.v_jobs where state not in ('completed', 'cancelled') group by kind order by kind`)
			if err != nil {
				return err
			}
			type one struct {
				Kind string `json:"kind"`
				Jobs int    `json:"jobs"`
			}
			all := []one{}
			t := newTable("KIND", "JOBS").numbers("JOBS")
			var k one
			if _, err := pgx.ForEachRow(rows, []any{&k.Kind, &k.Jobs}, func() error {
				all = append(all, k)
				t.add(k.Kind, number(k.Jobs))
				return nil
			}); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"kinds": all})
			}
			a.print(t, "No job may run again: there is nothing to decode.")
			a.say("\n%s", trusted(payloadsText))
			return nil
		},
	}
}
