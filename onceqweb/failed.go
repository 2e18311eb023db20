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
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// What jobs failed with: those that are dead and those that will be tried again, by error, kind or queue.

// failedJob is such a job, with its latest error as everybody may see it.
type failedJob struct {
	id          int64
	queue, kind string
	state       onceq.State
	at          time.Time
	error       string // its first line
	same        string // the same without numbers: jobs with the same one belong together
}

// failedJobs are the newest ones.
type failedJobs struct {
	jobs []failedJob
	all  bool // and there are no others
}

func (f failedJobs) size() (n int) {
	for _, j := range f.jobs {
		n += 200 + len(j.queue) + len(j.kind) + len(j.error) + len(j.same)
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
				one := failedJob{id: j.ID, queue: j.Queue, kind: j.Kind, state: j.State, at: cmp.Or(j.FinishedAt, j.CreatedAt)}
				if n := len(j.Errors); n > 0 {
					one.at, one.error = j.Errors[n-1].At, line(h.cfg.Mask(j.Kind, "error", j.Errors[n-1].Error))
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

// withError chooses the jobs of a filter that failed with an error, as errorsOf shows it, at most a thousand.
func (h *Handler) withError(ctx context.Context, f onceqops.Filter, same string) ([]int64, error) {
	found, err := h.readFailed(ctx, f)
	var ids []int64
	for _, j := range found.jobs {
		if j.same == same && len(ids) < maxIDs {
			ids = append(ids, j.id)
		}
	}
	if err == nil && len(ids) == 0 {
		err = &statusError{404, "No job has this error any more."}
	}
	return ids, err
}

// failedGroup are failed jobs that have something in common.
type failedGroup struct {
	Name           string // the kind or the queue; of an error, its latest text
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
	by := r.values.Get("by")
	if by != "kind" && by != "queue" {
		by = "error"
	}
	found, err := h.readFailed(ctx, f)
	if err != nil {
		return nil, err
	}
	d := struct {
		By     string
		Bys    []spanLink
		Filter onceqops.Filter
		Groups []failedGroup
		Count  int
		More   bool
	}{By: by, Filter: f, Count: len(found.jobs), More: !found.all}
	for _, one := range []string{"error", "kind", "queue"} {
		v := filterValues(f)
		v.Set("by", one)
		d.Bys = append(d.Bys, spanLink{"By " + one, "./errors?" + v.Encode(), one == by})
	}
	members := make(map[string][]failedJob)
	for _, j := range found.jobs {
		of := map[string]string{"error": j.same, "kind": j.kind, "queue": j.queue}[by]
		members[of] = append(members[of], j)
	}
	names := slices.SortedFunc(maps.Keys(members), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(members[b]), len(members[a])), cmp.Compare(a, b))
	})
	for _, of := range names[:min(len(names), pageSize)] {
		d.Groups = append(d.Groups, h.failedGroup(r.viewer, f, by, of, members[of]))
	}
	return &view{Template: "errors", Title: "Errors", Data: d}, nil
}

func (h *Handler) failedGroup(viewer Viewer, f onceqops.Filter, by, of string, jobs []failedJob) (g failedGroup) {
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
	switch by {
	case "error":
		v.Set("error", of)
	default:
		g.Name, g.To = of, "./"+by+"?"+url.Values{"name": {of}}.Encode()
		v.Set(by, of)
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
	if g.Jobs = to("./jobs?", "", failedStates...); by == "error" {
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
