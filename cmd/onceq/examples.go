package main

import (
	"strings"

	"github.com/spf13/cobra"
)

// examples are in the help of the commands that they run. TestExamples runs them.
const examples = `
onceq doctor
onceq doctor --level bad --json                  # exits with 7 if jobs stand still
onceq queues
onceq queues mail billing
onceq stats --since 3h
onceq stats mail --by-kind --since 7d
onceq workers
onceq workers --json
onceq top
onceq top --every 5s
onceq ui
onceq ui --act --port 8080
onceq mcp
onceq mcp --act
onceq keys welcome:42
onceq keys order:7 --scope charge
onceq pauses
onceq pauses --json
onceq actions --what discard --since 24h
onceq actions --job 4711
onceq check-payloads
onceq check-payloads --json
onceq jobs list --state dead --kind mail
onceq jobs list --state waiting,retrying --queue billing --created-from 2h
onceq jobs list --state dead --json --limit 10000 | jq -r '.jobs[].id'
onceq jobs errors
onceq jobs errors --kind mail --state dead --created-from 2h
onceq jobs errors --by queue
onceq jobs show 4711
onceq jobs show --key welcome:42 --scope mail
onceq jobs explain 4711
onceq jobs explain 4711 --json
onceq jobs watch 4711
onceq jobs watch 4711 --json
onceq jobs cancel 4711
onceq jobs cancel --kind newsletter --state waiting,delayed
onceq jobs retry 4711
onceq jobs retry --kind charge                   # the provider is back: do not wait for the backoff
onceq jobs redrive 4711
onceq jobs redrive --kind mail --created-from 6h --dry-run
onceq jobs discard 4711
onceq jobs discard --kind newsletter --created-before 30d
onceq jobs move 4711 --to images
onceq jobs move --queue imagse --to images --why "misspelt in release 41"
onceq effects list
onceq effects list --kind charge
onceq effects resolve 4711 charge --applied --result '"ch_123"' --why "found in the provider's log"
onceq effects resolve --kind mail --effect send --never
onceq lanes list
onceq lanes list --family book
onceq lanes limit book/account-7 0 --why "the bank closed it"
onceq lanes limit provider/ 4
onceq lanes limit provider/ --remove
onceq limits list
onceq limits list --json
onceq limits set provider --max 10 --per 1s
onceq limits set provider --at-once 20 --rate 8 --burst 2
onceq limits set provider --at-once 0 --why "they are down"
onceq limits remove provider
onceq limits remove provider --why "no contract any more"
onceq groups list
onceq groups list --limit 200
onceq groups show 4711
onceq groups show 4711 --limit 200
onceq groups cancel 4711
onceq groups cancel 4711 --why "the order was withdrawn"
onceq schedules list
onceq schedules list --json
onceq schedules ticks nightly-report
onceq schedules ticks nightly-report --limit 100
onceq schedules fire nightly-report
onceq schedules fire nightly-report --why "the file came late"
onceq schedules pause nightly-report
onceq schedules pause nightly-report --why "the mart is being rebuilt"
onceq schedules resume nightly-report
onceq schedules resume nightly-report --why "the mart is back"
onceq schedules backfill nightly-report --from 2026-01-01 --to 2026-01-08
onceq schedules backfill hourly-import --from 6h
onceq pause --queue mail --why "the provider is down"
onceq pause --limit provider --for 10m
onceq resume --queue mail
onceq resume --limit provider
onceq migrate up
onceq migrate up --schema tenant_7
onceq migrate down --to 0 --dry-run
onceq migrate down --to 0 --schema tenant_7
onceq migrate status
onceq migrate status --json
onceq migrate sql | psql
onceq migrate sql 1 --format goose > 00001_onceq.sql
onceq migrate grants shop | psql
onceq migrate grants web --producer | psql
onceq check
onceq check --json
onceq reap
onceq reap --json
`

// exemplify gives each command its examples.
func exemplify(root *cobra.Command) {
	for line := range strings.Lines(strings.TrimSpace(examples)) {
		if c, _, err := root.Find(strings.Fields(line)[1:]); err == nil {
			c.Example += "  " + line
		}
	}
}
