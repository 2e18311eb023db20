package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

const ceilingsFile = "ceilings.txt"

// ceiling is one line of ceilings.txt: how high a measure may be now, and how high at the end.
type ceiling struct {
	name          string
	ceiling, goal int
}

func readCeilings(file string) ([]ceiling, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var all []ceiling
	for line := range strings.Lines(string(raw)) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, numbers, _ := strings.Cut(line, ":")
		fields := strings.Fields(numbers)
		if len(fields) != 2 {
			return nil, fmt.Errorf("%s: %q is not of the form \"measure: ceiling goal\"", file, line)
		}
		c := ceiling{name: name}
		for i, number := range []*int{&c.ceiling, &c.goal} {
			if *number, err = strconv.Atoi(fields[i]); err != nil {
				return nil, fmt.Errorf("%s: %q: %w", file, line, err)
			}
		}
		all = append(all, c)
	}
	return all, nil
}

func writeCeilings(file string, all []ceiling) error {
	var text strings.Builder
	text.WriteString("# measure: ceiling goal\n# Ceilings only fall. TestHouse holds them; make house prints them beside what is measured.\n\n")
	for _, c := range all {
		fmt.Fprintf(&text, "%s: %d %d\n", c.name, c.ceiling, c.goal)
	}
	return os.WriteFile(file, []byte(text.String()), 0o644)
}
