package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// versionOf returns the version of a system with which this program was built.
func versionOf(system string) string {
	module := map[string]string{"river": "github.com/riverqueue/river"}[system]
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == module {
				return m.Version
			}
		}
	}
	return "of this repository"
}

// printReports prints runs side by side, as a Markdown table.
func printReports(out io.Writer, c config, reports []*report) {
	row := func(name string, cell func(r *report) string) {
		cells := make([]string, len(reports))
		for i, r := range reports {
			cells[i] = cell(r)
		}
		fmt.Fprintf(out, "| %s | %s |\n", name, strings.Join(cells, " | "))
	}
	number := func(name string, n func(r *report) int) {
		row(name, func(r *report) string { return fmt.Sprint(n(r)) })
	}
	fmt.Fprintf(out, "\nSeed %d, PostgreSQL %s, %s, %d worker, %d producer and %d requester processes, %s of faults\n\n",
		c.Seed, reports[0].server, runtime.Version(), c.Workers, c.Producers, c.Requesters, c.Duration)
	row("", func(r *report) string { return r.system + " " + r.version })
	row("---", func(*report) string { return "---:" })
	number("**jobs accepted**", func(r *report) int { return r.verdict.Accepted })
	for _, state := range []string{"completed", "dead", "cancelled", "held", "unfinished"} {
		number(state, func(r *report) int { return r.verdict.Ends[state] })
	}
	number("resolved by a person", func(r *report) int { return r.resolved })
	row("operations committed, rolled back, unknown (of which committed)", func(r *report) string {
		v := r.verdict
		return fmt.Sprintf("%d, %d, %d (%d)", v.Committed, v.RolledBack, v.Unknown, v.UnknownCommitted)
	})
	row("duplicates told, with the result", func(r *report) string {
		return fmt.Sprintf("%d, %d", r.verdict.Duplicates, r.verdict.Replayed)
	})
	row("requests: "+strings.Join(outcomes, ", "), func(r *report) string { return counts(r.verdict.Requests, outcomes) })
	row("uses of their keys: "+strings.Join(useStates, ", "), func(r *report) string { return counts(r.verdict.Uses, useStates) })
	number("claims", func(r *report) int { return r.verdict.Claims })
	row("jobs let into lanes and limits, most at once in one, changed limits, redriven", func(r *report) string {
		return fmt.Sprintf("%d, %d, %d, %d", r.verdict.Admitted, r.verdict.MostLive, r.verdict.Limits, r.redriven)
	})
	number("jobs started at a rate", func(r *report) int { return r.verdict.Starts })
	row("events emitted, flows that heard them, that timed out", func(r *report) string {
		return fmt.Sprintf("%d, %d, %d", r.verdict.Emitted, r.verdict.Came, r.verdict.TimedOut)
	})
	row("jobs that went on after others, members that they were told of, longest wait after the last one", func(r *report) string {
		return fmt.Sprintf("%d, %d, %s", r.verdict.Joins, r.verdict.Joined, r.verdict.JoinWait.Round(time.Millisecond))
	})
	row("ticks fired, of them back-filled, missed, paused; pauses, back-fills and prunes", func(r *report) string {
		return fmt.Sprintf("%d, %d, %d, %d; %d", r.verdict.Ticks, r.verdict.Backfilled, r.verdict.Missed, r.verdict.Paused, r.verdict.Tended)
	})
	number("effects in the ledger", func(r *report) int { return r.verdict.Entries })
	row("outside calls, repeated ones", func(r *report) string { return fmt.Sprintf("%d, %d", r.verdict.Calls, r.verdict.Repeated) })
	kinds := map[string]bool{}
	for _, r := range reports {
		for name := range r.events {
			kinds[name] = true
		}
	}
	for _, name := range sorted(kinds) {
		row("event: "+name, func(r *report) string {
			if len(r.events) == 0 {
				return "–"
			}
			return fmt.Sprint(r.events[name])
		})
	}
	row("errors that producers met, by SQLSTATE", func(r *report) string {
		var all []string
		for _, state := range sorted(r.errors) {
			all = append(all, fmt.Sprint(state, " ", r.errors[state]))
		}
		return strings.Join(all, ", ")
	})
	row("processes started, of them in the crowd; of these stopped by SIGTERM, killed, ended by themselves", func(r *report) string {
		return fmt.Sprintf("%d, %d; %d, %d, %d", r.started, r.crowd.started, r.crowd.stopped, r.crowd.killed, r.crowd.fallen)
	})
	for _, kind := range slices.Concat(processFaults, crowdFaults, serverFaults) {
		row("fault: "+kind, func(r *report) string {
			if n := r.failed[kind]; n > 0 {
				return fmt.Sprintf("%d (%d not done)", r.faults[kind], n)
			}
			return fmt.Sprint(r.faults[kind])
		})
	}
	for _, sort := range sorts {
		number("**violations: "+sort+"**", func(r *report) int { return len(r.verdict.Violations[sort]) })
	}
	row("took", func(r *report) string { return r.took.Round(time.Second).String() })
	for _, r := range reports {
		for _, note := range r.notes {
			fmt.Fprintf(out, "\n%s: %s\n", r.system, note)
		}
		if r.fallen > 0 {
			fmt.Fprintf(out, "\n%s: %d processes ended by themselves and were started again\n", r.system, r.fallen)
		}
		for _, sort := range sorted(r.verdict.Violations) {
			all := r.verdict.Violations[sort]
			fmt.Fprintf(out, "\n%s, %s:\n", r.system, sort)
			for _, v := range all[:min(len(all), 8)] {
				fmt.Fprintln(out, "  "+v)
			}
			if len(all) > 8 {
				fmt.Fprintf(out, "  and %d more\n", len(all)-8)
			}
		}
	}
}

// counts returns the numbers of some things as text, in order.
func counts(of map[string]int, names []string) string {
	if len(of) == 0 {
		return "–"
	}
	var all []string
	for _, name := range names {
		all = append(all, fmt.Sprint(of[name]))
	}
	return strings.Join(all, ", ")
}

// writeLines writes the elements of a slice, one line of JSON each.
func writeLines(name string, slice any) error {
	var out bytes.Buffer
	for v := reflect.ValueOf(slice); v.Len() > 0; v = v.Slice(1, v.Len()) {
		line, err := json.Marshal(v.Index(0).Interface())
		if err != nil {
			return err
		}
		out.Write(append(line, '\n'))
	}
	return os.WriteFile(name, out.Bytes(), 0o644)
}
