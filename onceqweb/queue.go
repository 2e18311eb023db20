package onceqweb

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// The pages of one queue, one kind and one worker.

// queueRow is a queue on a page.
type queueRow struct {
	onceqops.QueueStats
	Workers int
	Paused  bool
	Rate    onceqops.Count // of the last rateOf minutes
	Plot    plot
}

func (s *state) row(q onceqops.QueueStats) queueRow {
	counted := s.Counted[q.Queue]
	return queueRow{q, s.working(q.Queue), s.paused(q.Queue), counted.Last(rateOf), plotOf(counted.Minutes)}
}

// kindRow is a kind in a queue, with what was counted of it lately.
type kindRow struct {
	Queue, Kind string
	Rate        onceqops.Count // of the last rateOf minutes
	Hour        onceqops.Count
	Plot        plot
}

// readKinds reads what was counted of kinds in the last hour, by kind and queue.
func (h *Handler) readKinds(ctx context.Context, queue, kind string) ([]kindRow, error) {
	return h.kinds.get(ctx, h, seriesKey{queue: queue, kind: kind}, countsEvery, func(ctx context.Context) (rows []kindRow, err error) {
		list, err := h.ops.Counts(ctx, h.db, onceqops.CountFilter{Queue: queue, Kind: kind, ByKind: true})
		for _, c := range list[:min(len(list), maxNames)] {
			rows = append(rows, kindRow{c.Queue, c.Kind, c.Last(rateOf), c.Last(60), plotOf(c.Minutes[60-countedFor:])})
		}
		return rows, err
	})
}

// maxNames is how many kinds, queues and workers such a page names.
const maxNames = 200

// named reads the parameter that a page is about, and the state of everything, which may be old.
func (h *Handler) named(ctx context.Context, r *request) (name string, st state, behind string, err error) {
	if name, err = field(r.values, "name"); err == nil && name == "" {
		err = bad("the name is missing")
	}
	if err != nil {
		return "", st, "", err
	}
	st, behind, err = h.latest(ctx, nil)
	return name, st, behind, err
}

// about are the findings about a queue or a kind, grouped. What cannot be read is left out: the overview says so.
func (h *Handler) about(ctx context.Context, st state, its func(onceqops.Finding) bool) []findingGroup {
	found, _ := h.readFindings(ctx)
	return h.grouped(slices.DeleteFunc(slices.Concat(found, st.findings()), func(f onceqops.Finding) bool { return !its(f) }))
}

// oneQueue shows a queue.
func oneQueue(h *Handler, ctx context.Context, r *request) (*view, error) {
	name, st, behind, err := h.named(ctx, r)
	if err != nil {
		return nil, err
	}
	d := struct {
		Name, Behind string
		Row          queueRow
		Known        bool
		Pauses       []onceq.Pause
		Findings     []findingGroup
		Plots        plots
		Kinds        []kindRow
		Workers      []onceqops.WorkerInfo
	}{Name: name, Behind: behind}
	i := slices.IndexFunc(st.Queues, func(q onceqops.QueueStats) bool { return q.Queue == name })
	if d.Known = i >= 0; d.Known {
		d.Row = st.row(st.Queues[i])
	}
	d.Pauses = pausesOf(st, func(p onceq.Pause) bool { return p.Queue == name })
	d.Findings = h.about(ctx, st, func(f onceqops.Finding) bool { return f.Queue == name })
	d.Workers = workersOf(st, func(w onceqops.WorkerInfo) bool { _, serves := w.Queues[name]; return serves })
	to := "./queue?" + url.Values{"name": {name}}.Encode() + "&"
	if d.Plots, err = h.readPlots(ctx, r, name, "", to); err != nil {
		return nil, err
	}
	d.Plots.mark(d.Workers)
	if d.Kinds, err = h.readKinds(ctx, name, ""); err != nil {
		return nil, err
	}
	v := &view{Template: "queue", Title: "Queue " + name, Data: d, Live: live("overview", st.sums(behind != "")["overview"])}
	if !d.Known {
		v.Status = 404
	}
	return v, nil
}

// oneKind shows a kind.
func oneKind(h *Handler, ctx context.Context, r *request) (*view, error) {
	name, st, behind, err := h.named(ctx, r)
	if err != nil {
		return nil, err
	}
	d := struct {
		Name, Behind string
		Pauses       []onceq.Pause
		Findings     []findingGroup
		Plots        plots
		Queues       []kindRow
		Workers      []onceqops.WorkerInfo
	}{Name: name, Behind: behind}
	d.Pauses = pausesOf(st, func(p onceq.Pause) bool { return p.Kind == name })
	d.Findings = h.about(ctx, st, func(f onceqops.Finding) bool { return f.Kind == name })
	d.Workers = workersOf(st, func(w onceqops.WorkerInfo) bool { return slices.Contains(w.Kinds, name) })
	to := "./kind?" + url.Values{"name": {name}}.Encode() + "&"
	if d.Plots, err = h.readPlots(ctx, r, "", name, to); err != nil {
		return nil, err
	}
	d.Plots.mark(d.Workers)
	if d.Queues, err = h.readKinds(ctx, "", name); err != nil {
		return nil, err
	}
	return &view{Template: "kind", Title: "Kind " + name, Data: d, Live: live("overview", st.sums(behind != "")["overview"])}, nil
}

func pausesOf(st state, its func(onceq.Pause) bool) (all []onceq.Pause) {
	for _, p := range st.Pauses {
		if its(p) {
			all = append(all, p)
		}
	}
	return all
}

func workersOf(st state, its func(onceqops.WorkerInfo) bool) (all []onceqops.WorkerInfo) {
	for _, w := range st.Workers {
		if its(w) && len(all) < maxNames {
			all = append(all, w)
		}
	}
	return all
}

// oneWorker shows a worker.
func oneWorker(h *Handler, ctx context.Context, r *request) (*view, error) {
	id, err := number(r.values, "id")
	if err != nil {
		return nil, err
	}
	st, behind, err := h.latest(ctx, nil)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(st.Workers, func(w onceqops.WorkerInfo) bool { return w.ID == id })
	if i < 0 {
		return nil, &statusError{404, "No such worker runs: it has ended, or it was never there."}
	}
	type slots struct {
		onceqops.Busy
		Slots, Ahead, Held int // by handlers past their end
	}
	d := struct {
		Worker onceqops.WorkerInfo
		Behind string
		Slots  []slots
	}{Worker: st.Workers[i], Behind: behind}
	busy, err := h.busy.get(ctx, h, id, h.limits.state, func(ctx context.Context) ([]onceqops.Busy, error) { return h.ops.Busy(ctx, h.db, d.Worker) })
	if err != nil && behind == "" {
		return nil, err
	}
	for queue, n := range d.Worker.Queues {
		one := slots{Busy: onceqops.Busy{Queue: queue}, Slots: n}
		for _, b := range busy {
			if b.Queue == queue {
				one.Busy, one.Ahead = b, b.Leased-b.Running
			}
		}
		for _, s := range d.Worker.Stuck {
			if s.Queue == queue {
				one.Held += s.Slots
			}
		}
		d.Slots = append(d.Slots, one)
	}
	slices.SortFunc(d.Slots, func(a, b slots) int { return strings.Compare(a.Queue, b.Queue) })
	return &view{Template: "worker", Title: d.Worker.Where(), Data: d, Live: live("overview", st.sums(behind != "")["overview"])}, nil
}

// findingGroup are findings of the same sort.
type findingGroup struct {
	onceqops.Finding        // the first one, without the application's secrets
	Words            string // what they say together, if there are several
	Others           []onceqops.Finding
}

// ofMany says what several findings have in common, by their name.
var ofMany = map[string]string{
	"crashes": "jobs may end their process", "dead": "queues have dead jobs", "failing": "kinds fail", "group": "jobs wait for dead or held jobs",
	"handler": "kinds have handlers that do not return", "hang": "jobs keep others waiting", "kind": "kinds have no handler", "lane": "lanes stand still",
	"limit": "limits let no job start", "paused": "pauses may be forgotten", "waiting": "queues have jobs that have been due for long", "worker": "workers are missing",
}

// grouped puts findings of the same sort together, the worst first, with errors as Config.Mask leaves them. Lanes belong together by
// their family.
func (h *Handler) grouped(found []onceqops.Finding) (groups []findingGroup) {
	place := make(map[string]int)
	for _, f := range found {
		f.Detail = h.masked(f)
		family := ""
		if _, lane, ok := strings.Cut(f.Detail, `lane "`); ok && f.What == "lane" {
			family, _, _ = strings.Cut(lane, "/")
		}
		key := fmt.Sprint(f.What, f.Severe, f.Queue == "", family) // those of no queue are of another sort
		if i, ok := place[key]; ok && ofMany[f.What] != "" {
			groups[i].Others = append(groups[i].Others, f)
			continue
		}
		place[key] = len(groups)
		groups = append(groups, findingGroup{Finding: f})
	}
	for i := range groups {
		g := &groups[i]
		if len(g.Others) == 0 {
			continue
		}
		g.Words = strconv.Itoa(len(g.Others)+1) + " " + ofMany[g.What]
		if _, lane, ok := strings.Cut(g.Detail, `lane "`); ok && g.What == "lane" {
			family, _, _ := strings.Cut(lane, "/")
			g.Words = fmt.Sprintf("%d lanes of %s stand still", len(g.Others)+1, family)
		}
	}
	slices.SortStableFunc(groups, func(a, b findingGroup) int {
		if a.Severe != b.Severe {
			return map[bool]int{true: -1, false: 1}[a.Severe]
		}
		return cmp.Compare(len(b.Others), len(a.Others))
	})
	return groups
}
