package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

// Everything that this command prints goes through this file: texts of payloads, errors, keys and names come from anybody, and a
// terminal would obey them. TestEverythingPrintedIsClean holds that.

// trusted is a text that is printed as it is: the command's own, or cleaned already.
type trusted string

// cleaned prints an argument without what a terminal would obey, on one line.
type cleaned struct{ any }

// Format is for fmt.
func (c cleaned) Format(f fmt.State, verb rune) {
	text := fmt.Sprintf(fmt.FormatString(f, verb), c.any)
	if verb != 'q' { // which has escaped it
		text = clean(text)
	}
	_, _ = io.WriteString(f, text)
}

// printf prints to a stream. The format is the command's own, and each argument is cleaned unless it is trusted.
func printf(w io.Writer, format string, args ...any) {
	for i, v := range args {
		if _, ok := v.(trusted); !ok {
			args[i] = cleaned{v}
		}
	}
	_, _ = fmt.Fprintf(w, format, args...)
}

// say prints what a command is asked for; remark prints what is said beside it, on stderr.
func (a *app) say(format string, args ...any)    { printf(a.out, format, args...) }
func (a *app) remark(format string, args ...any) { printf(a.errOut, format, args...) } // see say

// under is a text of several lines, each cleaned. All but the first are indented, so that none looks like a line of the command.
func under(text string, indent int) trusted {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i, l := range lines {
		if lines[i] = clean(l); i > 0 {
			lines[i] = strings.Repeat(" ", indent) + lines[i]
		}
	}
	return trusted(strings.Join(lines, "\n"))
}

// typable finds a command in advice, so far as it can be told from what follows it.
var typable = regexp.MustCompile(`\bonceq(?: --\S+ (?:'[^']*'|\S+))*(?: [a-z]+){1,2}(?: (?:'[^']*'|[^-\s]\S*))?(?: --\S+ (?:'[^']*'|\S+))*`)

// wrapped is under, with lines that fit a terminal. A command is not broken, so that it can be copied: the half of one is another one.
func (a *app) wrapped(to io.Writer, text string, indent int) trusted {
	_, width := terminal(to)
	if a.wide || width == 0 {
		return under(text, indent)
	}
	const unbroken = "\x00" // a space of a command: clean leaves none in a text
	var lines []string
	for line := range strings.SplitSeq(strings.TrimRight(text, "\n"), "\n") {
		line = typable.ReplaceAllStringFunc(clean(line), func(c string) string { return strings.ReplaceAll(c, " ", unbroken) })
		row := ""
		for i, word := range strings.Split(line, " ") {
			if i > 0 && utf8.RuneCountInString(row)+1+utf8.RuneCountInString(word) > width-indent {
				lines, row = append(lines, row), word
			} else if i > 0 {
				row += " " + word
			} else {
				row = word
			}
		}
		lines = append(lines, row)
	}
	return trusted(strings.ReplaceAll(strings.Join(lines, "\n"+strings.Repeat(" ", indent)), unbroken, " "))
}

// printJSON prints a value for programs. The names in it are stable; later versions may add some.
func (a *app) printJSON(v any) error { return writeJSON(a.out, v, "  ") }

// writeJSON escapes what a terminal would obey, as programs may print what they read. JSON has such characters in strings alone.
func writeJSON(w io.Writer, v any, indent string) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return err
	}
	text := b.String()
	if strings.ContainsFunc(text, func(r rune) bool { return r != '\n' && dangerous(r) }) {
		var safe strings.Builder
		for _, r := range text {
			if r != '\n' && dangerous(r) {
				_, _ = fmt.Fprintf(&safe, "\\u%04x", r)
			} else {
				safe.WriteRune(r)
			}
		}
		text = safe.String()
	}
	_, err := io.WriteString(w, text)
	return err
}

// terminal says whether a stream is one, and how wide it is.
func terminal(w any) (is bool, width int) {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return false, 0
	}
	width, _, err := getSize(f)
	if err != nil || width < 20 {
		width = 80
	}
	return true, width
}

func getSize(f *os.File) (width, height int, err error) { return term.GetSize(int(f.Fd())) }

// color says whether to color what goes to a stream.
func color(w io.Writer) bool {
	is, _ := terminal(w)
	return is && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// The colors of words.
const (
	plain  = ""
	bold   = "\x1b[1m"
	faint  = "\x1b[2m"
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	reset  = "\x1b[0m"
)

// stateColors are those of the states of jobs, effects and findings.
var stateColors = map[string]string{
	"dead": red, "held": red, "uncertain": red, "bad": red, "retrying": yellow, "warning": yellow, "paused": yellow, "running": green, "ok": green,
	"cancelled": faint,
}

// table is text in columns. The last column takes what is left of a terminal's width; on anything but a terminal nothing is cut.
type table struct {
	header []string
	right  map[int]bool // columns of numbers
	rows   [][]string
	colors map[[2]int]string
	spare  []string // columns that a narrow terminal does without, in this order, if they say nothing
}

func newTable(header ...string) *table {
	return &table{header: header, right: map[int]bool{}, colors: map[[2]int]string{}}
}

// numbers says that the columns with these names are numbers, which stand on the right.
func (t *table) numbers(names ...string) *table {
	for _, name := range names {
		for i, h := range t.header {
			if h == name {
				t.right[i] = true
			}
		}
	}
	return t
}

func (t *table) add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = clean(fmt.Sprint(c))
		if c := stateColors[row[i]]; c != plain {
			t.colors[[2]int{len(t.rows), i}] = c
		}
	}
	t.rows = append(t.rows, row)
}

// paint gives the latest row's cell a color.
func (t *table) paint(column int, color string) {
	t.colors[[2]int{len(t.rows) - 1, column}] = color
}

// lines are the table's lines, at most width wide if width is not 0.
func (t *table) lines(width int, colored bool) []string {
	wide := make([]int, len(t.header))
	for _, row := range append([][]string{t.header}, t.rows...) {
		for i, cell := range row {
			wide[i] = max(wide[i], utf8.RuneCountInString(cell))
		}
	}
	hidden := map[int]bool{}
	if width > 0 {
		t.hide(wide, width, hidden)
		fit(wide, width-2*(len(wide)-len(hidden)-1))
	}
	var all []string
	line := func(row []string, color func(int) string) {
		var b strings.Builder
		for i, cell := range row {
			if hidden[i] {
				continue
			}
			cell = cut(cell, wide[i])
			space := strings.Repeat(" ", wide[i]-utf8.RuneCountInString(cell))
			if c := color(i); colored && c != plain {
				cell = c + cell + reset
			}
			if t.right[i] {
				cell = space + cell
			} else if i < len(row)-1 {
				cell += space
			}
			if i > 0 {
				b.WriteString("  ")
			}
			b.WriteString(cell)
		}
		all = append(all, strings.TrimRight(b.String(), " "))
	}
	line(t.header, func(int) string { return bold })
	for n, row := range t.rows {
		line(row, func(i int) string { return t.colors[[2]int{n, i}] })
	}
	return all
}

// hide leaves out spare columns that say nothing, until the others fit.
func (t *table) hide(wide []int, width int, hidden map[int]bool) {
	for _, name := range t.spare {
		sum := -2
		for _, w := range wide {
			if w > 0 {
				sum += w + 2
			}
		}
		i := slices.Index(t.header, name)
		if sum <= width {
			return
		}
		if !slices.ContainsFunc(t.rows, func(row []string) bool { return row[i] != "" && row[i] != "0" && row[i] != "-" }) {
			hidden[i], wide[i] = true, 0
		}
	}
}

// fit makes columns narrower, always the widest one, until they need no more than the width.
func fit(wide []int, width int) {
	for {
		sum, widest := 0, 0
		for i, w := range wide {
			if sum += w; w >= wide[widest] {
				widest = i
			}
		}
		if sum <= width || wide[widest] <= 4 {
			return
		}
		wide[widest]--
	}
}

func cut(s string, width int) string {
	if utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:max(0, width-1)]) + "…"
}

// clean replaces what would move a terminal's cursor or change its colors: texts here come from payloads and errors.
func clean(s string) string {
	if !strings.ContainsFunc(s, dangerous) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			b.WriteByte(' ')
		case dangerous(r):
			fmt.Fprintf(&b, "\\u%04x", r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// dangerous are control characters, those that change a text's direction, and those that separate lines.
func dangerous(r rune) bool {
	return unicode.IsControl(r) || unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp) || r == utf8.RuneError
}

// print prints the table, or what to say if it is empty.
func (a *app) print(t *table, empty string) {
	if len(t.rows) == 0 {
		a.say("%s\n", empty)
		return
	}
	width := 0
	if !a.wide {
		_, width = terminal(a.out)
	}
	for _, l := range t.lines(width, color(a.out)) {
		a.say("%s\n", trusted(l)) // add has cleaned its cells
	}
}

// colored puts a color around a text if the output has colors.
func (a *app) colored(c, s string) trusted {
	if s = clean(s); c == plain || !color(a.out) {
		return trusted(s)
	}
	return trusted(c + s + reset)
}

// ago says how long something has lasted, in a few characters.
func ago(d time.Duration) string {
	switch {
	case d <= 0:
		return "-"
	case d < time.Second:
		return "<1s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
}

// stamp is a time for people: UTC, so that it can be compared with logs.
func stamp(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format("2006-01-02 15:04:05Z")
}

// number is a count with its thousands apart.
func number(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && n > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// plural is a count with its noun.
func plural(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return number(n) + " " + one + "s"
}

func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" || info.Main.Version == "(devel)" {
		return "(built from source)"
	}
	return info.Main.Version
}
