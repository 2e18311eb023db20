package onceqweb

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html/template"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

var functions = template.FuncMap{
	"count":    count,
	"atLeast":  atLeast,
	"number":   func(n int) string { return atLeast(n, false) },
	"less":     func(a, b int) int { return a - b },
	"family":   func(lane string) string { family, _, _ := strings.Cut(lane, "/"); return family },
	"finished": func(g onceq.GroupInfo) int { return g.Total - g.Open },
	"age":      age,
	"since":    since,
	"clock":    clock,
	"machine":  func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"line":     line,
	"join":     func(list []string) string { return strings.Join(list, ", ") },
	"sentence": sentence,
	"hasZero":  func(t time.Time) bool { return t.IsZero() },
	"dict":     dict,
	"advise":   advise,
	"rate":     perMinute,
	"took":     took,
	"plain":    plain,
	"missed":   missedWords,
	"p95":      func(c onceqops.Count) string { return took(c.Percentile(95)) },
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
func count(n int) string { return atLeast(n, n >= onceqops.StatsCap) }

// atLeast writes a number, with a plus sign if there may be more.
func atLeast(n int, more bool) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	if more && n > 0 {
		text += "+"
	}
	return text
}

// age writes a duration in its two greatest units, without the second if that is 0.
func age(d time.Duration) string {
	if d < 0 {
		d = -d
	}
	two := func(a int, unit string, b int, smaller string) string {
		if b == 0 {
			return fmt.Sprintf("%d %s", a, unit)
		}
		return fmt.Sprintf("%d %s %d %s", a, unit, b, smaller)
	}
	switch {
	case d < time.Second:
		return "under a second"
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		return two(int(d.Minutes()), "min", int(d.Seconds())%60, "s")
	case d < 24*time.Hour:
		return two(int(d.Hours()), "h", int(d.Minutes())%60, "min")
	}
	return two(int(d.Hours())/24, "d", int(d.Hours())%24, "h")
}

// took writes a measured duration: as age does, but what is short in milliseconds and tenths of seconds.
func took(d time.Duration) string {
	switch {
	case d <= 0:
		return "–"
	case d < time.Millisecond:
		return "under 1 ms"
	case d < 10*time.Millisecond:
		return strings.Replace(fmt.Sprintf("%.1f ms", d.Seconds()*1000), ".0 ", " ", 1)
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second:
		return strings.Replace(fmt.Sprintf("%.1f s", d.Seconds()), ".0 ", " ", 1)
	}
	return age(d)
}

// since says how far a time is from now.
func since(t, now time.Time) string {
	switch d := now.Sub(t); {
	case d.Abs() < time.Second:
		return "just now"
	case d >= 0:
		return age(d) + " ago"
	}
	return "in " + age(now.Sub(t))
}

// advice is what a reader of the page can do about a finding.
type advice struct {
	Text string
	To   string // a page of these; "" for none
	Link string
}

// advise says what to do on the page. What Health itself advises is for people who write code.
func advise(f onceqops.Finding) advice {
	jobs := func(more ...string) string {
		v := url.Values{"queue": {f.Queue}}
		for i := 0; i < len(more); i += 2 {
			v.Add(more[i], more[i+1])
		}
		return "./jobs?" + v.Encode()
	}
	job := "./job?id=" + strconv.FormatInt(f.JobID, 10)
	switch {
	case f.What == "waiting" && f.Queue == "onceqcron":
		return advice{sentence(f.Advice), "./schedules", "The schedules"}
	case f.What == "waiting" && f.Meant != "":
		return advice{fmt.Sprintf("Is its name a misspelt %q, which workers do serve? Correct it where the jobs are enqueued. Move what waits: search for the queue's jobs, and press Move.", f.Meant), jobs(), "Its jobs"}
	case f.What == "waiting" && f.Severe:
		return advice{"Compare the workers below with the jobs that wait. A queue that nobody serves may be misspelt: its jobs can be moved.", jobs("state", "waiting"), "Its waiting jobs"}
	case f.What == "waiting" && !f.Severe && strings.Contains(f.Detail, "paused"):
		return advice{"Resume it below when the reason is over.", jobs("state", "waiting"), "Its waiting jobs"}
	case f.What == "waiting" && !f.Severe:
		return advice{"If this grows, the workers do not keep up: start more of them, or let each run more jobs at once. Or their handlers hang.", jobs("state", "running"), "Its running jobs"}
	case f.What == "kind":
		return advice{sentence(f.Advice), jobs("kind", f.Kind), "These jobs"}
	case f.What == "failing":
		return advice{"Mend what the error says. The jobs then run when their next attempt is due, and a retry makes that now. Dead ones need a redrive.", jobs("kind", f.Kind, "state", "retrying", "state", "dead"), "Its jobs"}
	case f.What == "hang":
		return advice{"Its handler may hang: look at what its process logged last. Cancel it on its page; if the handler does not listen, end the process: the others then go on. A time limit of its kind ends such a handler.", job, "The job"}
	case f.What == "crashes":
		return advice{"Look at what its workers logged last, and at their memory. By itself it is dead after a few more. Cancel it on its page to end it now.", job, "The job"}
	case f.What == "worker":
		return advice{sentence(f.Advice), "#workers", "The workers"}
	case f.What == "dead":
		return advice{sentence(f.Advice), jobs("state", "dead"), "Its dead jobs"}
	case f.What == "versions":
		return advice{"Finish the deploy: end these processes, or find out why they were not replaced. The workers are below.", "", ""}
	case f.What == "late", f.What == "missed", f.What == "duplicate", f.What == "paused" && f.Queue+f.Kind == "" && !strings.HasPrefix(f.Detail, "limit "):
		return advice{sentence(f.Advice), "./schedules", "The schedules"}
	case f.What == "paused":
		return advice{"Resume it below when the reason is over.", "", ""}
	case f.What == "group":
		return advice{"Redrive its dead members when the cause is mended, or discard them, or say what happened to the effects of held ones.", "./group?id=" + strconv.FormatInt(f.JobID, 10), "The group"}
	case f.What == "lane" && f.JobID != 0:
		return advice{"Redrive the job on its page when the cause is mended, or discard it, or say what happened to its effects.", job, "The job"}
	case f.What == "lane":
		text := sentence(f.Advice)
		switch {
		case strings.HasPrefix(f.Advice, "raise its limit"):
			text = "Set another limit on the lanes' page. The audit trail may say who set this one."
		case strings.HasPrefix(f.Advice, "start a worker"):
			text = "Start a worker: each one that stays lets jobs into all lanes and limits."
		}
		return advice{text, "./lanes", "The lanes"}
	case f.What == "limit" && !f.Severe:
		return advice{"Set them on the limits' page. Or is a name spelt wrong, in the code or where the limit was set?", "./lanes#limits", "The limits"}
	case f.What == "limit":
		return advice{"Set another limit on the limits' page. The audit trail may say who set this one.", "./lanes#limits", "The limits"}
	}
	return advice{Text: sentence(f.Advice)}
}

var (
	goDuration = regexp.MustCompile(`(^|[\s(])((?:\d+h)?(?:\d+m)?\d+(?:\.\d+)?(?:ms|s))\b`)
	goList     = regexp.MustCompile(`\[(?:\d+(?: \d+)*|"[^"\]]*"(?: "[^"\]]*")*)\]`)
	goTime     = regexp.MustCompile(`\b(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?Z`)
)

// plain writes the times, durations and lists in a text of the library as the page does.
func plain(text string) string {
	text = goDuration.ReplaceAllStringFunc(text, func(found string) string {
		parts := goDuration.FindStringSubmatch(found)
		d, err := time.ParseDuration(parts[2])
		if err != nil {
			return found
		}
		return parts[1] + took(d)
	})
	text = goList.ReplaceAllStringFunc(text, func(found string) string { return strings.ReplaceAll(strings.Trim(found, "[]"), " ", ", ") })
	return goTime.ReplaceAllString(text, "$1 $2")
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

// maxPretty bounds JSON with line breaks: in a payload of 500 levels each of them could become a thousand bytes.
const maxPretty = 4 << 20

// pretty is how JSON is shown.
func pretty(raw json.RawMessage) string {
	var b bytes.Buffer
	if indented(raw) > maxPretty {
		return string(raw)
	}
	if err := json.Indent(&b, raw, "", "  "); err != nil {
		return string(raw)
	}
	return b.String()
}

// indented is how long JSON is with a line for each value, at least.
func indented(raw json.RawMessage) int {
	n, depth, text := len(raw), 0, false
	for i, c := range raw {
		switch {
		case c == '"':
			back := 0
			for i-back > 0 && raw[i-back-1] == '\\' {
				back++
			}
			if !text || back%2 == 0 {
				text = !text
			}
		case text:
		case c == '{', c == '[':
			depth++
			n += 2 * depth
		case c == ',':
			n += 2 * depth
		case c == '}', c == ']':
			depth--
		}
	}
	return n
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
