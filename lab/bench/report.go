package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// result is one measurement of one peer over all rounds.
type result struct {
	Test     string `json:"test"`
	Variant  string `json:"variant,omitempty"`
	Peer     string `json:"peer"`
	Version  string `json:"version"`
	Settings string `json:"settings"`
	Note     string `json:"note"`
	Missing  string `json:"missing,omitempty"` // why there is none

	Date    string    `json:"date"`
	Earlier bool      `json:"earlier,omitempty"` // of a run before the one that the test's other results are of
	Unit    string    `json:"unit,omitempty"`
	Median  float64   `json:"median"` // of the rounds; of latencies, that of the rounds' medians
	Min     float64   `json:"min"`
	Max     float64   `json:"max"`
	P99     float64   `json:"p99,omitempty"` // of latencies, the median of the rounds' 99th percentiles
	P99Max  float64   `json:"p99_max,omitempty"`
	Rounds  []float64 `json:"rounds,omitempty"`

	WALPerJob float64 `json:"wal_bytes_per_job,omitempty"`
	ClientCPU float64 `json:"client_cpu_seconds,omitempty"`
	ServerCPU float64 `json:"server_cpu_seconds,omitempty"`

	// Ratio is how many times better ours is: a higher rate, a shorter time, fewer bytes.
	Ratio float64 `json:"ratio,omitempty"`

	Ticks   []tick   `json:"ticks,omitempty"` // of the last round
	Minutes []minute `json:"minutes,omitempty"`
}

// summarize makes one result for each variant that a trial gave figures of.
func summarize(t trial, figures []figure) []*result {
	base := result{Date: time.Now().Format(time.DateOnly), Test: t.test, Variant: t.variant, Peer: t.peer.name, Version: t.peer.version, Settings: t.peer.settings, Note: t.peer.note, Missing: t.peer.missing}
	if len(figures) == 0 {
		if base.Missing == "" {
			return nil // not offered
		}
		return []*result{&base}
	}
	var variants []string
	by := make(map[string][]figure)
	for _, f := range figures {
		if by[f.variant] == nil {
			variants = append(variants, f.variant)
		}
		by[f.variant] = append(by[f.variant], f)
	}
	var results []*result
	for _, variant := range variants {
		r, all := base, by[variant]
		pick := func(of func(figure) float64) []float64 {
			values := make([]float64, len(all))
			for i, f := range all {
				values[i] = of(f)
			}
			return values
		}
		r.Variant, r.Unit = variant, all[0].unit
		r.Rounds = pick(func(f figure) float64 { return f.value })
		r.Median, r.Min, r.Max = median(r.Rounds), slices.Min(r.Rounds), slices.Max(r.Rounds)
		p99 := pick(func(f figure) float64 { return f.p99 })
		r.P99, r.P99Max = median(p99), slices.Max(p99)
		r.WALPerJob = median(pick(func(f figure) float64 { return f.walPerJob }))
		r.ClientCPU = median(pick(func(f figure) float64 { return f.client }))
		r.ServerCPU = median(pick(func(f figure) float64 { return f.server }))
		r.Ticks, r.Minutes = all[len(all)-1].ticks, all[len(all)-1].minutes
		results = append(results, &r)
	}
	return results
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// compare fills in the ratios to ours.
func compare(results []*result) {
	ours := make(map[string]*result)
	for _, r := range results {
		if r.Peer == "onceq" {
			ours[r.Test+"\x00"+r.Variant] = r
		}
	}
	for _, r := range results {
		o := ours[r.Test+"\x00"+r.Variant]
		if o == nil || o.Median == 0 || r.Median == 0 {
			continue
		}
		if strings.HasSuffix(r.Unit, "/s") || r.Unit == evenShare {
			r.Ratio = o.Median / r.Median
		} else {
			r.Ratio = r.Median / o.Median
		}
	}
}

// report is all that one run found.
type report struct {
	Machine  string
	Postgres string
	Major    int
	Server   []string // its settings
	Go       string
	Results  []*result
	Goals    []reached
}

func (b *bench) report() report {
	return report{
		Machine: machine(), Postgres: b.server.version(), Major: b.server.major(), Server: b.server.settings, Go: goVersion(),
		Results: b.results, Goals: judge(b.results),
	}
}

// number writes with as many digits as matter.
func number(v float64) string {
	switch {
	case v >= 10_000:
		return fmt.Sprintf("%.1fk", v/1000)
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v == 0:
		return "0"
	}
	return fmt.Sprintf("%.2f", v)
}

// printReport writes Markdown tables that can be read in a terminal as well.
func printReport(w io.Writer, r report) {
	fmt.Fprintf(w, "PostgreSQL %s (%s), %s, %s.\n", r.Postgres, strings.Join(r.Server, ", "), r.Go, r.Machine)
	for _, t := range tests {
		rows := [][]string{{"variant", "peer", "median", "min–max", "ours is … times as good", "WAL/job", "CPU s client + server"}}
		date, ours, rounds := "", "", 0
		var earlier []string
		for _, res := range r.Results {
			if res.Test != t.name {
				continue
			}
			rounds = max(rounds, len(res.Rounds))
			if res.Earlier {
				from := fmt.Sprintf("%s, %s (%s)", res.Peer, res.Settings, res.Date)
				if !slices.Contains(earlier, from) {
					earlier = append(earlier, from)
				}
			} else {
				date = res.Date
			}
			if res.Peer == "onceq" {
				ours = "onceq " + res.Version
			}
			row := []string{res.Variant, res.Peer + ", " + res.Settings}
			if res.Unit == "" {
				rows = append(rows, append(row, "missing", "", "", "", ""))
				continue
			}
			middle, spread := number(res.Median)+" "+res.Unit, number(res.Min)+"–"+number(res.Max)
			if res.P99 > 0 {
				middle = fmt.Sprintf("p50 %s, p99 %s %s", number(res.Median), number(res.P99), res.Unit)
				spread += ", p99 ≤ " + number(res.P99Max)
			}
			ratio, wal, cpu := "", "", ""
			if res.Ratio > 0 && res.Peer != "onceq" {
				ratio = number(res.Ratio)
			}
			if res.WALPerJob > 0 && res.Peer != "asynq" && res.Peer != "BullMQ" {
				wal = fmt.Sprintf("%.0f B", res.WALPerJob)
			}
			if res.ServerCPU > 0 {
				cpu = fmt.Sprintf("%.2f + %.2f", res.ClientCPU, res.ServerCPU)
			}
			rows = append(rows, append(row, middle, spread, ratio, wal, cpu))
		}
		if len(rows) > 1 {
			fmt.Fprintf(w, "\n## %s: %s\n\n%s, %s, rounds: %d.\n", t.name, t.title, date, ours, rounds)
			if len(earlier) > 0 {
				fmt.Fprintf(w, "Of an earlier run, and so without a ratio: %s.\n", strings.Join(earlier, "; "))
			}
			if without := t.without(r.Results); len(without) > 0 {
				fmt.Fprintf(w, "Not asked for this time, or without it: %s.\n", strings.Join(without, ", "))
			}
			fmt.Fprintln(w)
			printTable(w, rows)
		}
	}
	rows := [][]string{{"test", "goal", "reached", ""}}
	for _, g := range r.Goals {
		verdict := map[bool]string{true: "pass", false: "fail"}[g.OK]
		if g.Value == unknown {
			verdict = ""
		}
		rows = append(rows, []string{g.Test, g.Goal, g.Value, verdict})
	}
	fmt.Fprintf(w, "\n## Goals\n\n")
	printTable(w, rows)
}

// without names the peers that the test has nothing of: those that were not asked for, and those without what it measures.
func (t test) without(results []*result) []string {
	everybody := &bench{sizes: fullSizes, peers: append(append(append(basePeers(), riverPeers()...), handPeer()), asynqPeers()...)}
	everybody.peers = append(everybody.peers, nodePeers(nil, errors.New("only named"))...)
	var names []string
	for _, trial := range t.trials(everybody) {
		name := trial.peer.name
		found := slices.ContainsFunc(results, func(r *result) bool { return r.Test == t.name && r.Peer == name })
		if !found && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// printTable writes a Markdown table with aligned columns; the first row is its head. Empty columns are left out.
func printTable(w io.Writer, rows [][]string) {
	for c := len(rows[0]) - 1; c >= 0; c-- {
		if !slices.ContainsFunc(rows[1:], func(row []string) bool { return row[c] != "" }) {
			for i := range rows {
				rows[i] = slices.Delete(rows[i], c, c+1)
			}
		}
	}
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for c, cell := range row {
			width[c] = max(width[c], len([]rune(cell)))
		}
	}
	for i, row := range rows {
		for c, cell := range row {
			fmt.Fprintf(w, "| %s%s ", cell, strings.Repeat(" ", width[c]-len([]rune(cell))))
		}
		fmt.Fprintln(w, "|")
		if i == 0 {
			for c := range row {
				fmt.Fprint(w, "|", strings.Repeat("-", width[c]+2))
			}
			fmt.Fprintln(w, "|")
		}
	}
}
