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
// tests that did not run this time stay, and those of peers that did not; the latter lose their ratios, which are of one run.
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

// keep adds the results of an earlier run, for tests that this one did not run, and for peers that it was not asked for or
// that failed altogether.
func (r *report) keep(before report) {
	type rival struct{ test, peer, settings string }
	of := func(res *result) rival { return rival{res.Test, res.Peer, res.Settings} }
	ran, measured, known := make(map[string]bool), make(map[rival]bool), make(map[rival]bool)
	for _, res := range r.Results {
		ran[res.Test] = true
		measured[of(res)] = measured[of(res)] || res.Unit != ""
	}
	for _, res := range before.Results {
		known[of(res)] = known[of(res)] || res.Unit != ""
	}
	r.Results = slices.DeleteFunc(r.Results, func(res *result) bool { return !measured[of(res)] && known[of(res)] })
	for _, res := range before.Results {
		switch {
		case ran[res.Test] && (measured[of(res)] || !known[of(res)]):
			continue
		case ran[res.Test]:
			res.Earlier, res.Ratio = true, 0
		}
		r.Results = append(r.Results, res)
	}
	r.Goals = judge(r.Results)
}
