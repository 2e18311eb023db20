package main

import (
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"
)

//go:embed page.txt
var pageTemplate string

// text is a cell for a terminal.
func (o outcome) text(c cell) string {
	switch {
	case o.err != nil:
		return "could not be played: " + o.err.Error()
	case o.missing != "":
		return "– (" + o.missing + ")"
	}
	text := fmt.Sprintf("%d, right is %d", o.n, c.story.right)
	for _, note := range o.notes(c) {
		text += "; " + note
	}
	return text
}

// notes are what stands below the table for a cell.
func (o outcome) notes(c cell) (notes []string) {
	if o.missing != "" {
		return []string{o.missing}
	}
	if note := c.system.notes[c.story.name]; note != "" {
		notes = append(notes, note)
	}
	return append(notes, o.remarks...)
}

// writePage writes the table, and what it was made with.
func writePage(file string, all []*system, outcomes map[cell]outcome, postgres string) error {
	var table, below strings.Builder
	table.WriteString("| what happens; what is counted | right |")
	line := "|---|---|"
	for _, sys := range all {
		fmt.Fprintf(&table, " %s |", sys.name)
		line += "---|"
	}
	table.WriteString("\n" + line + "\n")
	right := make(map[*system]int)
	played := make(map[*system]int)
	var notes []string
	for _, st := range stories {
		fmt.Fprintf(&table, "| %s `%s`: %s | %d |", st.happens, st.name, st.question, st.right)
		for _, sys := range all {
			c := cell{st, sys}
			o := outcomes[c]
			text := fmt.Sprint(o.n)
			switch {
			case o.missing != "":
				text = "–"
			case o.n == st.right:
				right[sys]++
			case sys.notes[st.name] != "":
				text = "(" + text + ")"
			default:
				text = "**" + text + "**"
			}
			if o.missing == "" {
				played[sys]++
			}
			for _, note := range o.notes(c) {
				at := slices.Index(notes, note)
				if at < 0 {
					notes = append(notes, note)
					at = len(notes) - 1
				}
				text += fmt.Sprintf(" <sup>%d</sup>", at+1)
			}
			table.WriteString(" " + text + " |")
		}
		table.WriteString("\n")
	}
	table.WriteString("| **right, of those that it could play** | |")
	for _, sys := range all {
		fmt.Fprintf(&table, " %d of %d |", right[sys], played[sys])
	}
	for i, note := range notes {
		fmt.Fprintf(&below, "%d. %s%s.\n", i+1, strings.ToUpper(note[:1]), note[1:])
	}
	var how strings.Builder
	for _, sys := range all {
		version, err := sys.ready()
		if err != nil {
			return err
		}
		fmt.Fprintf(&how, "| %s | %s | %s |\n", sys.name, version, sys.how)
	}
	hash, err := madeFrom(os.DirFS(".."))
	if err != nil {
		return err
	}
	page := strings.NewReplacer(
		"{{table}}", table.String(), "{{notes}}", strings.TrimSpace(below.String()), "{{systems}}", strings.TrimSpace(how.String()),
		"{{postgres}}", postgres, "{{date}}", time.Now().UTC().Format(time.DateOnly), "{{hash}}", hash,
	).Replace(pageTemplate)
	return os.WriteFile(file, []byte(page), 0o644)
}

// compare fails when a cell is not what the page says.
func compare(file string, outcomes map[cell]outcome) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var columns []string
	var differ []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Split(line, " | ")
		if strings.HasPrefix(line, "| what happens") {
			columns = fields
		}
		for c, o := range outcomes {
			at := slices.IndexFunc(columns, func(name string) bool { return strings.Trim(name, " |\n") == c.system.name })
			if at < 0 || at >= len(fields) || !strings.Contains(fields[0], "`"+c.story.name+"`") {
				continue
			}
			says, _, _ := strings.Cut(fields[at], "<sup>")
			if says = strings.Trim(says, " *()|\n"); says != "–" && says != fmt.Sprint(o.n) || says == "–" && o.missing == "" {
				differ = append(differ, fmt.Sprintf("%s/%s is %d, and %s says %s", c.story.name, c.system.name, o.n, file, says))
			}
		}
	}
	if len(differ) > 0 {
		return errors.New(strings.Join(differ, "\n"))
	}
	return nil
}

// madeFrom is a hash of what decides about the numbers: stories, adapters, and the versions of the systems.
func madeFrom(dir fs.FS) (string, error) {
	sum := sha256.New()
	for _, pattern := range []string{"once/stories_*.go", "once/adapter_*.go", "once/systems.go", "once/serve.go", "once/node/*"} {
		files, err := fs.Glob(dir, pattern)
		if err != nil {
			return "", err
		}
		for _, name := range files {
			text, err := fs.ReadFile(dir, name)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(sum, "%s %d\n%s", name, len(text), text)
		}
	}
	versions, err := fs.ReadFile(dir, "go.mod")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(versions)) {
		if strings.Contains(line, "/river ") || strings.Contains(line, "/asynq ") || strings.Contains(line, "/dbos-transact-golang ") {
			_, _ = sum.Write([]byte(line))
		}
	}
	return hex.EncodeToString(sum.Sum(nil)[:8]), nil
}
