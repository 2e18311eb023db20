package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

func goVersion() string { return strings.Replace(runtime.Version(), "go", "Go ", 1) }

// publish keeps this run's figures for its version of Postgres and writes RESULTS.md anew, over all versions. Figures of
// tests that did not run this time stay: ratios are within one test, whose trials are always of one run.
func publish(dir string, r report) error {
	data := filepath.Join(dir, "results")
	if err := os.MkdirAll(data, 0o755); err != nil {
		return err
	}
	kept := filepath.Join(data, fmt.Sprintf("pg%d.json", r.Major))
	if raw, err := os.ReadFile(kept); err == nil {
		var before report
		if err := json.Unmarshal(raw, &before); err != nil {
			return fmt.Errorf("%s: %w", kept, err)
		}
		r.keep(before)
	}
	raw, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(kept, raw, 0o644); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(data, "pg*.json"))
	if err != nil {
		return err
	}
	slices.Sort(files)
	slices.Reverse(files) // the newest version first
	var out strings.Builder
	out.WriteString("# Results\n\nWritten by `make bench`; README.md says how the figures are taken. What counts is the ratio within one run:\nabsolute figures differ between machines, and by a tenth from run to run.\n")
	for _, file := range files {
		var each report
		raw, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(raw, &each); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		plots, err := draw(data, each)
		if err != nil {
			return err
		}
		fmt.Fprintf(&out, "\n# PostgreSQL %d\n\n", each.Major)
		printReport(&out, each)
		out.WriteString("\n## Plots\n\n")
		for _, p := range plots {
			fmt.Fprintf(&out, "![%s](results/%s)\n\n", p.title, p.file)
		}
		out.WriteString("## Peers and settings\n\n")
		seen := make(map[string]bool)
		for _, res := range each.Results {
			line := fmt.Sprintf("- %s %s, %s: %s", res.Peer, res.Version, res.Settings, res.Note)
			if res.Unit == "" {
				line = fmt.Sprintf("- %s, %s: missing: %s", res.Peer, res.Settings, firstLine(res.Missing))
			}
			if !seen[line] {
				seen[line] = true
				fmt.Fprintln(&out, line)
			}
		}
	}
	return os.WriteFile(filepath.Join(dir, "RESULTS.md"), []byte(out.String()), 0o644)
}

// keep adds the results of an earlier run for tests that this one did not run.
func (r *report) keep(before report) {
	ran := make(map[string]bool)
	for _, res := range r.Results {
		ran[res.Test] = true
	}
	for _, res := range before.Results {
		if !ran[res.Test] {
			r.Results = append(r.Results, res)
		}
	}
	r.Goals = judge(r.Results)
}
