package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
)

// mutation is one change of one line, and the tests that are to fail because of it.
type mutation struct {
	name     string
	file     string // from the root
	after    string // from is looked for behind this; empty for the beginning of the file
	from, to string
	test     string // the folder of the tests
	run      string // which tests, as -run takes it
	check    bool   // only make check runs them
}

// read reads blocks of lines "name: value", with an empty line between two blocks. Lines that begin with # are comments.
func read(file string) ([]mutation, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var all []mutation
	for block := range strings.SplitSeq(string(raw), "\n\n") {
		m, err := parse(block)
		if err != nil {
			return nil, fmt.Errorf("%s: %w, in:\n%s", file, err, block)
		}
		if m != (mutation{}) {
			all = append(all, m)
		}
	}
	return all, nil
}

func parse(block string) (m mutation, err error) {
	for line := range strings.SplitSeq(block, "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		field, value, _ := strings.Cut(line, ": ")
		value = strings.TrimSuffix(value, "¶") // shows spaces at the end
		switch strings.TrimSuffix(field, ":") {
		case "name":
			m.name = value
		case "file":
			m.file = value
		case "after":
			m.after = value
		case "from":
			m.from = value
		case "to":
			m.to = value
		case "test":
			m.test, m.run, _ = strings.Cut(value, " ")
		case "check":
			m.test, m.run, _ = strings.Cut(value, " ")
			m.check = true
		default:
			return m, fmt.Errorf("%q is not a field", field)
		}
	}
	if m != (mutation{}) && (m.name == "" || m.file == "" || m.from == "" || m.run == "") {
		return m, errors.New("name, file, from and test (or check) are needed")
	}
	return m, nil
}

// apply makes the change.
func (m mutation) apply(text []byte) ([]byte, error) {
	start := bytes.Index(text, []byte(m.after))
	if start < 0 {
		return nil, fmt.Errorf("%s does not contain %q", m.file, m.after)
	}
	at := bytes.Index(text[start:], []byte(m.from))
	if at < 0 {
		return nil, fmt.Errorf("%s does not contain %q behind %q", m.file, m.from, m.after)
	}
	at += start
	return append(append(append([]byte(nil), text[:at]...), m.to...), text[at+len(m.from):]...), nil
}
