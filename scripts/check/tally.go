package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// An event is a line of "go test -json" (go doc test2json).
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Elapsed    float64
	Output     string
}

// A run is one test, or a package, while it runs.
type run struct{ part, pack, test string }

// tally counts top-level tests, over all parts.
type tally struct {
	mu       sync.Mutex // guards the fields below
	expected int
	passed   int
	failed   int
	skipped  map[string]int // by reason
	output   map[run]*bytes.Buffer
	running  map[run]bool // packages
	slow     []timed
}

type timed struct {
	name string
	took time.Duration
}

func newTally() *tally {
	return &tally{skipped: make(map[string]int), output: make(map[run]*bytes.Buffer), running: make(map[run]bool)}
}

func isTests(p part) bool { return slices.Contains(p.args, "-json") }

var testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Z]\w*)\(\w+ \*testing\.[TF]\)`)

// expect counts the tests of a part in its source. Examples are left out: only those with a comment of their output run.
func (t *tally) expect(p part) {
	if !isTests(p) {
		return
	}
	want := regexp.MustCompile("")
	list := []string{"list", "-f", "{{.Dir}}"}
	for i, arg := range p.args {
		switch {
		case arg == "-run":
			want = regexp.MustCompile(p.args[i+1])
		case strings.HasPrefix(arg, "."):
			list = append(list, arg)
		}
	}
	cmd := exec.Command("go", list...)
	cmd.Dir, cmd.Env = p.dir, append(os.Environ(), p.env...)
	dirs, err := cmd.Output()
	if err != nil {
		return // the part itself will say why
	}
	for dir := range strings.FieldsSeq(string(dirs)) {
		files, _ := filepath.Glob(filepath.Join(dir, "*_test.go"))
		for _, file := range files {
			text, _ := os.ReadFile(file)
			for _, match := range testFunc.FindAllSubmatch(text, -1) {
				if want.Match(match[1]) {
					t.expected++
				}
			}
		}
	}
}

// read reads the events of a part until its end. say prints a line at once, and out gets what belongs to failures.
func (t *tally) read(events io.Reader, part string, say func(string), out io.Writer) {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		if json.Unmarshal(line, &e) == nil && e.Action != "" {
			t.event(e, part, say, out)
		} else if len(bytes.TrimSpace(line)) > 0 {
			_, _ = out.Write(line)
		}
		if err != nil {
			return
		}
	}
}

func (t *tally) event(e event, part string, say func(string), out io.Writer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	top, _, sub := strings.Cut(e.Test, "/")
	r := run{part, e.Package, top}
	switch e.Action {
	case "build-output":
		_, _ = io.WriteString(out, e.Output)
	case "build-fail":
		t.failed++
	case "start":
		t.running[r] = true
	case "output":
		if t.output[r] == nil {
			t.output[r] = new(bytes.Buffer)
		}
		t.output[r].WriteString(e.Output)
	case "pass", "fail", "skip":
		if !sub {
			t.ended(e, r, say, out)
		}
	}
}

// ended counts what ended, and keeps the output of what failed. The caller holds mu.
func (t *tally) ended(e event, r run, say func(string), out io.Writer) {
	var text string
	if b := t.output[r]; b != nil {
		text = b.String()
		delete(t.output, r)
	}
	if r.test == "" {
		t.packageEnded(e, r, text, say, out)
		return
	}
	name := short(r.pack) + " " + r.test
	t.slow = append(t.slow, timed{name, time.Duration(e.Elapsed * float64(time.Second))})
	switch e.Action {
	case "pass":
		t.passed++
	case "skip":
		t.skipped[reason(text)]++
	case "fail":
		t.failed++
		_, _ = io.WriteString(out, text)
		say("FAILED: " + name + "\n" + strings.TrimRight(text, "\n")) // the end of the check may be far
	}
}

// packageEnded says how long a package took. One that fails outside its tests, by a panic, a race or its time-out, has said so in the
// output of the package or of the tests that had not ended.
func (t *tally) packageEnded(e event, r run, text string, say func(string), out io.Writer) {
	delete(t.running, r)
	if e.Action == "fail" {
		for other, b := range t.output {
			if other.part == r.part && other.pack == r.pack {
				t.failed++
				text += b.String()
				delete(t.output, other)
			}
		}
		_, _ = io.WriteString(out, text)
	}
	if e.Action != "skip" { // a package without tests
		say(fmt.Sprintf("%-5s %s of %s, %s", e.Action, short(r.pack), r.part, inWords(time.Duration(e.Elapsed*float64(time.Second)))))
	}
}

var skipLine = regexp.MustCompile(`(?m)^ +\S+\.go:\d+: (.*)$`)

// reason is the last thing that a skipped test said.
func reason(text string) string {
	said := skipLine.FindAllStringSubmatch(text, -1)
	if len(said) == 0 {
		return "for no reason given"
	}
	return said[len(said)-1][1]
}

func short(pack string) string {
	if pack == module {
		return "onceq"
	}
	return strings.TrimPrefix(pack, module+"/")
}

const module = "github.com/onceq/onceq"

// progress says how far it is.
func (t *tally) progress() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var now []string
	for r := range t.running {
		now = append(now, short(r.pack))
	}
	slices.Sort(now)
	line := fmt.Sprintf("%d of about %d tests, %d failed", t.passed+t.failed+sum(t.skipped), t.expected, t.failed)
	if len(now) > 0 {
		line += "; now: " + strings.Join(slices.Compact(now), ", ")
	}
	return line
}

func sum(counts map[string]int) int {
	n := 0
	for _, count := range counts {
		n += count
	}
	return n
}

// sums returns what the last lines say.
func (t *tally) sums() (passed, failed int, skipped []string, slowest string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for reason, count := range t.skipped {
		skipped = append(skipped, fmt.Sprintf("%d tests: %s", count, reason))
	}
	slices.Sort(skipped)
	slices.SortFunc(t.slow, func(a, b timed) int { return int(b.took - a.took) })
	var names []string
	for _, s := range t.slow[:min(5, len(t.slow))] {
		names = append(names, s.name+" "+inWords(s.took))
	}
	return t.passed, t.failed, skipped, strings.Join(names, ", ")
}
