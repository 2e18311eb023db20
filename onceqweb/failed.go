package onceqweb

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// What jobs failed with: those that are dead and those that will be tried again, by what they have in common.

// failedJob is such a job, with its latest error as everybody may see it.
type failedJob struct {
	id          int64
	queue, kind string
	scope, lane string
	worker      string // the process of the latest attempt
	state       onceq.State
	at          time.Time
	error       string // its first line
	same        string // the same without numbers: jobs with the same one belong together
}

// failedBys are what failed jobs can have in common.
var failedBys = []struct {
	name, title string
	none        string // the name of a group of jobs without it
	page        string // of what has the name
	whole       bool   // a search by the name finds the group
	of          func(failedJob) string
}{
	{"error", "Error", "without an error", "", false, func(j failedJob) string { return j.same }},
	{"kind", "Kind", "", "./kind?name=", true, func(j failedJob) string { return j.kind }},
	{"queue", "Queue", "", "./queue?name=", true, func(j failedJob) string { return j.queue }},
	{"scope", "Scope", "without a key", "./jobs?scope=", true, func(j failedJob) string { return j.scope }},
	{"lane", "Lane", "without a lane", "", false, func(j failedJob) string { return j.lane }},
	{"worker", "Worker", "not known", "", false, func(j failedJob) string { return j.worker }},
}

// failedAsk is how somebody looks at failed jobs: grouped by failedBys[by], and only those with a text in their error.
type failedAsk struct {
	by   int
	text string
}

func readFailedAsk(values url.Values) (a failedAsk, err error) {
	for i, b := range failedBys {
		if values.Get("by") == b.name {
			a.by = i
		}
	}
	a.text, err = field(values, "text")
	return a, err
}

// has reports whether the first line of a job's error, as everybody may see it, has the text.
func (a failedAsk) has(j failedJob) bool {
	return strings.Contains(strings.ToLower(j.error), strings.ToLower(a.text))
}

// failedJobs are the newest ones.
type failedJobs struct {
	jobs []failedJob
	all  bool // and there are no others
}

func (f failedJobs) size() (n int) {
	for _, j := range f.jobs {
		n += 250 + len(j.queue) + len(j.kind) + len(j.scope) + len(j.lane) + len(j.worker) + len(j.error) + len(j.same)
	}
	return n
}

// maxFailed is how many jobs are looked at, and failedTime for how long more of them are looked for.
const (
	maxFailed  = 5000
	failedTime = 500 * time.Millisecond
)

var failedStates = []onceq.State{onceq.StateRetrying, onceq.StateDead}

var digits = regexp.MustCompile(`[0-9a-fA-F-]*[0-9][0-9a-fA-F-]*`)

// readFailed reads the newest jobs of a filter that failed.
func (h *Handler) readFailed(ctx context.Context, f onceqops.Filter) (failedJobs, error) {
	f.Limit, f.After, f.WithoutPayloads = 1000, 0, true
	if f.States = slices.DeleteFunc(slices.Clone(f.States), func(s onceq.State) bool { return !slices.Contains(failedStates, s) }); len(f.States) == 0 {
		f.States = failedStates
	}
	return h.failed.get(ctx, h, keyOf(f), countsEvery/2, func(ctx context.Context) (all failedJobs, err error) {
		for began := time.Now(); len(all.jobs) < maxFailed && time.Since(began) < failedTime; {
			page, next, err := h.ops.Page(ctx, h.db, f)
			if err != nil {
				return all, err
			}
			for _, j := range page {
				one := failedJob{id: j.ID, queue: j.Queue, kind: j.Kind, scope: j.Scope, lane: j.Lane, state: j.State,
					at: cmp.Or(j.FinishedAt, j.CreatedAt)}
				if n := len(j.Errors); n > 0 {
					last := j.Errors[n-1]
					one.at, one.worker, one.error = last.At, whoRan(last), line(h.cfg.Mask(j.Kind, "error", last.Error))
				}
				one.same = digits.ReplaceAllString(one.error, "#")
				all.jobs = append(all.jobs, one)
			}
			if f.After = next; next == 0 {
				all.all = true
				break
			}
		}
		return all, nil
	})
}

// inGroup chooses the jobs of a filter that are in a group, as errorsOf shows it, at most a thousand.
func (h *Handler) inGroup(ctx context.Context, f onceqops.Filter, values url.Values) ([]int64, error) {
	ask, err := readFailedAsk(values)
	if err != nil {
		return nil, err
	}
	found, err := h.readFailed(ctx, f)
	var ids []int64
	for _, j := range found.jobs {
		if failedBys[ask.by].of(j) == values.Get("of") && ask.has(j) && len(ids) < maxIDs {
			ids = append(ids, j.id)
		}
	}
	if err == nil && len(ids) == 0 {
		err = &statusError{404, "No job is in this group any more."}
	}
	return ids, err
}

// failedGroup are failed jobs that have something in common.
type failedGroup struct {
	Name           string // what they have in common; of an error, its latest text
	To             string // its page
	Errors         []string
	Kinds, Queues  []string
	Count          int
	Dead, Retrying int
	First, Last    time.Time
	Latest         int64 // job
	Jobs           string
	Acts           []failedAct
}

type failedAct struct{ Button, To string }

// errorsOf shows what jobs failed with.
func errorsOf(h *Handler, ctx context.Context, r *request) (*view, error) {
	f, err := readFilter(r.values)
	if err != nil {
		return nil, err
	}
	ask, err := readFailedAsk(r.values)
	if err != nil {
		return nil, err
	}
	found, err := h.readFailed(ctx, f)
	if err != nil {
		return nil, err
	}
	jobs := slices.DeleteFunc(slices.Clone(found.jobs), func(j failedJob) bool { return !ask.has(j) })
	by := failedBys[ask.by]
	chosen := filterValues(f)
	chosen.Set("by", by.name)
	if ask.text != "" {
		chosen.Set("text", ask.text)
	}
	d := struct {
		By, Title, Text string
		Bys             []spanLink
		Chips, Hidden   [][2]string
		Groups          []failedGroup
		Count, Having   int // jobs that were looked at, and those of them with the text
		More            bool
	}{By: by.name, Title: by.title, Text: ask.text, Chips: chips("./errors?", chosen),
		Count: len(found.jobs), Having: len(jobs), More: !found.all}
	for i, one := range failedBys {
		v := maps.Clone(chosen)
		v.Set("by", one.name)
		d.Bys = append(d.Bys, spanLink{"By " + one.name, "./errors?" + v.Encode(), i == ask.by})
	}
	chosen.Del("text")
	d.Hidden = inputs(chosen)
	members := make(map[string][]failedJob)
	for _, j := range jobs {
		of := by.of(j)
		members[of] = append(members[of], j)
	}
	names := slices.SortedFunc(maps.Keys(members), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(members[b]), len(members[a])), cmp.Compare(a, b))
	})
	for _, of := range names[:min(len(names), pageSize)] {
		d.Groups = append(d.Groups, h.failedGroup(r.viewer, f, ask, of, members[of]))
	}
	return &view{Template: "errors", Title: "Errors", Data: d}, nil
}

func (h *Handler) failedGroup(viewer Viewer, f onceqops.Filter, ask failedAsk, of string, jobs []failedJob) failedGroup {
	var g failedGroup
	errors, kinds, queues := make(map[string]int), make(map[string]int), make(map[string]int)
	g.Count, g.Latest, g.Name = len(jobs), jobs[0].id, jobs[0].error
	for _, j := range jobs {
		errors[j.error]++
		kinds[j.kind]++
		queues[j.queue]++
		if j.state == onceq.StateDead {
			g.Dead++
		} else {
			g.Retrying++
		}
		if g.First.IsZero() || j.at.Before(g.First) {
			g.First = j.at
		}
		if j.at.After(g.Last) {
			g.Last, g.Latest = j.at, j.id
		}
	}
	g.Errors, g.Kinds, g.Queues = commonest(errors), commonest(kinds), commonest(queues)
	v := filterValues(f)
	by := failedBys[ask.by]
	if by.name != "error" {
		g.Name = of
	}
	if by.name == "lane" && of != "" {
		family, _, _ := strings.Cut(of, "/")
		g.To = "./lanes?" + url.Values{"family": {family}}.Encode()
	}
	if g.Name = cmp.Or(g.Name, by.none); by.page != "" && of != "" {
		g.To = by.page + url.QueryEscape(of)
	}
	whole := by.whole && of != "" && ask.text == ""
	if whole {
		v.Set(by.name, of)
	} else {
		v.Set("by", by.name)
		v.Set("of", of)
		v.Set("text", ask.text)
	}
	to := func(path, do string, states ...onceq.State) string {
		w := url.Values{}
		for name, values := range v {
			if name != "state" {
				w[name] = values
			}
		}
		for _, s := range states {
			w.Add("state", s.String())
		}
		if do != "" {
			w.Set("do", do)
			w.Set("all", "1")
		}
		return path + w.Encode()
	}
	if g.Jobs = to("./jobs?", "", failedStates...); !whole {
		ids := url.Values{}
		for _, j := range jobs[:min(len(jobs), pageSize)] {
			ids.Add("ids", strconv.FormatInt(j.id, 10))
		}
		g.Jobs = "./jobs?" + ids.Encode()
	}
	for _, a := range []struct {
		n      int
		do     string
		button string
		state  onceq.State
	}{{g.Dead, "redrive-many", "Redrive", onceq.StateDead}, {g.Retrying, "retry-many", "Run now", onceq.StateRetrying}, {g.Dead, "discard-many", "Discard", onceq.StateDead}} {
		if may, _ := viewer.may(a.do); may && a.n > 0 {
			g.Acts = append(g.Acts, failedAct{fmt.Sprintf("%s %s", a.button, atLeast(a.n, false)), to("./confirm?", a.do, a.state)})
		}
	}
	return g
}

// commonest are the commonest texts, at most three.
func commonest(n map[string]int) []string {
	all := slices.SortedFunc(maps.Keys(n), func(a, b string) int { return cmp.Or(cmp.Compare(n[b], n[a]), cmp.Compare(a, b)) })
	if len(all) > 3 {
		return append(all[:3], fmt.Sprintf("%d more", len(all)-3))
	}
	return all
}
