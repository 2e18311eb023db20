package main

import (
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
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

// number is a cell on the page, without its notes.
func (o outcome) number(c cell) string {
	switch {
	case o.missing != "":
		return "–"
	case o.n == c.story.right:
		return fmt.Sprint(o.n)
	case c.system.notes[c.story.name] != "":
		return fmt.Sprintf("(%d)", o.n)
	}
	return fmt.Sprintf("**%d**", o.n)
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

// made is what a page has.
type made struct {
	outcomes map[cell]outcome
	systems  map[*system]string // the lines about them
}

// sup is the number of a note.
var sup = regexp.MustCompile(`<sup>(\d+)</sup>`)

// readPage reads what writePage has written.
func readPage(text string, all []*system) made {
	m := made{make(map[cell]outcome), make(map[*system]string)}
	var columns, notes []string
	rows := make(map[*story][]string)
	for line := range strings.Lines(text) {
		fields := strings.Split(line, " | ")
		number, note, _ := strings.Cut(line, ". ")
		if number == fmt.Sprint(len(notes)+1) {
			notes = append(notes, strings.TrimSuffix(note, ".\n"))
		}
		if strings.HasPrefix(line, "| what happens") {
			columns = fields
		}
		for _, st := range stories {
			if strings.Contains(fields[0], "`"+st.name+"`") {
				rows[st] = fields
			}
		}
		for _, sys := range all {
			if strings.HasPrefix(line, "| "+sys.name+" | ") {
				m.systems[sys] = line
			}
		}
	}
	for _, sys := range all {
		at := slices.IndexFunc(columns, func(name string) bool { return strings.Trim(name, " |\n") == sys.name })
		for st, fields := range rows {
			if at < 0 || at >= len(fields) {
				continue
			}
			var o outcome
			for _, number := range sup.FindAllStringSubmatch(fields[at], -1) {
				if n, _ := strconv.Atoi(number[1]); n <= len(notes) && notes[n-1] != capital(sys.notes[st.name]) {
					o.remarks = append(o.remarks, notes[n-1])
				}
			}
			says, _, _ := strings.Cut(fields[at], "<sup>")
			n, err := strconv.Atoi(strings.Trim(says, " *()|\n"))
			if err == nil {
				o.n = n
			} else if len(o.remarks) == 1 {
				o.missing = o.remarks[0]
			} else {
				continue // not played
			}
			m.outcomes[cell{st, sys}] = o
		}
	}
	return m
}

// compare fails when a cell is not what the page says.
func (m made) compare(outcomes map[cell]outcome) error {
	var differ []string
	for c, o := range outcomes {
		if says, ok := m.outcomes[c]; ok && (says.n != o.n || (says.missing == "") != (o.missing == "")) {
			differ = append(differ, fmt.Sprintf("%s/%s is %s, and the page says %s", c.story.name, c.system.name, o.text(c), says.text(c)))
		}
	}
	if len(differ) > 0 {
		return errors.New(strings.Join(differ, "\n"))
	}
	return nil
}

// capital is a note as it stands below the table.
func capital(note string) string {
	if note == "" {
		return ""
	}
	return strings.ToUpper(note[:1]) + note[1:]
}

// writePage writes the table, and what it was made with. What was not played stays as it was before.
func writePage(file string, all []*system, before made, outcomes map[cell]outcome, postgres string) error {
	played := make(map[*system]bool)
	for c := range outcomes {
		played[c.system] = true
	}
	all = slices.DeleteFunc(slices.Clone(all), func(sys *system) bool { return !played[sys] && before.systems[sys] == "" })
	var table, below, how strings.Builder
	table.WriteString("| what happens; what is counted | right |")
	line := "|---|---|"
	for _, sys := range all {
		fmt.Fprintf(&table, " %s |", sys.name)
		line += "---|"
	}
	table.WriteString("\n" + line + "\n")
	right := make(map[*system]int)
	of := make(map[*system]int)
	var notes []string
	for _, st := range stories {
		fmt.Fprintf(&table, "| %s `%s`: %s | %d |", st.happens, st.name, st.question, st.right)
		for _, sys := range all {
			c := cell{st, sys}
			o, ok := outcomes[c]
			if !ok {
				o, ok = before.outcomes[c]
			}
			if !ok {
				table.WriteString("  |")
				continue
			}
			text := o.number(c)
			if o.missing == "" {
				of[sys]++
				if o.n == st.right {
					right[sys]++
				}
			}
			for _, note := range o.notes(c) {
				at := slices.Index(notes, capital(note))
				if at < 0 {
					notes = append(notes, capital(note))
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
		fmt.Fprintf(&table, " %d of %d |", right[sys], of[sys])
		if !played[sys] {
			how.WriteString(before.systems[sys])
			continue
		}
		version, err := sys.ready()
		if err != nil {
			return err
		}
		fmt.Fprintf(&how, "| %s | %s | %s | %s |\n", sys.name, version, time.Now().UTC().Format(time.DateOnly), sys.how)
	}
	for i, note := range notes {
		fmt.Fprintf(&below, "%d. %s.\n", i+1, note)
	}
	hash, err := madeFrom(os.DirFS(".."))
	if err != nil {
		return err
	}
	page := strings.NewReplacer(
		"{{table}}", table.String(), "{{notes}}", strings.TrimSpace(below.String()), "{{systems}}", strings.TrimSpace(how.String()),
		"{{postgres}}", postgres, "{{hash}}", hash,
	).Replace(pageTemplate)
	return os.WriteFile(file, []byte(page), 0o644)
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
