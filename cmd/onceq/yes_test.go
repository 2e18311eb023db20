package main

import (
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// Every command either changes nothing or knows --yes, so that a script may add it to all that do.
func TestYes_EveryCommandThatChangesSomethingKnowsIt(t *testing.T) {
	t.Parallel()
	reads := map[string]bool{}
	for _, name := range []string{
		"doctor", "queues", "stats", "workers", "top", "ui", "mcp", "keys", "pauses", "actions", "check-payloads", "jobs list", "jobs errors", "jobs show", "jobs explain", "jobs watch",
		"effects list", "lanes list", "limits list", "groups list", "groups show", "schedules list", "schedules ticks",
		"migrate status", "migrate sql", "migrate grants", "check",
	} {
		reads["onceq "+name] = true
	}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, below := range c.Commands() {
			walk(below)
		}
		if !c.HasSubCommands() {
			require.Equal(t, !reads[c.CommandPath()], c.Flags().Lookup("yes") != nil, c.CommandPath())
			delete(reads, c.CommandPath())
		}
	}
	walk(new(app).command())
	require.Empty(t, reads, "no such command")
}
