package onceqweb

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html/template"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/onceq/onceq"
)

var functions = template.FuncMap{
	"count":    count,
	"atLeast":  atLeast,
	"age":      age,
	"since":    since,
	"clock":    clock,
	"machine":  func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"line":     line,
	"join":     func(list []string) string { return strings.Join(list, ", ") },
	"sentence": sentence,
	"hasZero":  func(t time.Time) bool { return t.IsZero() },
	"dict":     dict,
}

// dict makes the argument of a template from names and values.
func dict(pairs ...any) map[string]any {
	m := make(map[string]any, len(pairs)/2)
	for i := 0; i+1 < len(pairs); i += 2 {
		m[pairs[i].(string)] = pairs[i+1]
	}
	return m
}

// count writes a number that Stats may have stopped counting.
func count(n int) string { return atLeast(n, n >= onceq.StatsCap) }

// atLeast writes a number, with a plus sign if there may be more.
func atLeast(n int, more bool) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	if more {
		text += "+"
	}
	return text
}

// age writes a duration in its two greatest units.
func age(d time.Duration) string {
	if d < 0 {
		d = -d
	}
	switch {
	case d < time.Second:
		return "under a second"
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%d d %d h", int(d.Hours())/24, int(d.Hours())%24)
}

// since says how far a time is from now.
func since(t, now time.Time) string {
	if d := now.Sub(t); d >= 0 {
		return age(d) + " ago"
	}
	return "in " + age(now.Sub(t))
}

func clock(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") }

// line is the first line of a text, shortened.
func line(text string) string {
	text, _, more := strings.Cut(strings.TrimSpace(text), "\n")
	if runes := []rune(text); len(runes) > 160 {
		text, more = string(runes[:160]), true
	}
	if more {
		text += " …"
	}
	return text
}

// sentence makes a sentence of a text that begins small and has no stop.
func sentence(text string) string {
	first, size := utf8.DecodeRuneInString(text)
	if text = string(unicode.ToUpper(first)) + text[size:]; !strings.HasSuffix(text, ".") {
		text += "."
	}
	return text
}

// maxShown is how much of a payload a page shows.
const maxShown = 64 << 10

// pretty is how JSON is shown.
func pretty(raw json.RawMessage) string {
	var b bytes.Buffer
	if err := json.Indent(&b, raw, "", "  "); err != nil {
		return string(raw)
	}
	return b.String()
}

// readable is how bytes are shown.
func readable(raw []byte) string {
	if utf8.Valid(raw) && !bytes.ContainsFunc(raw, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' && r != '\r' }) {
		return string(raw)
	}
	return hex.Dump(raw[:min(len(raw), 4096)])
}

// short cuts what is too long for a page.
func short(text string) string {
	if len(text) <= maxShown {
		return text
	}
	return strings.ToValidUTF8(text[:maxShown], "") + fmt.Sprintf("\n… %d bytes in all; this page shows the first %d", len(text), maxShown)
}

func pairs(m map[string]string) string {
	var lines []string
	for k, v := range m {
		lines = append(lines, k+": "+v)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
