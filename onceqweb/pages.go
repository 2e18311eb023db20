package onceqweb

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// overview shows the queues, and what slows them down.
func overview(h *Handler, ctx context.Context, r *request) (*view, error) {
	d := struct {
		State           state
		Behind          string
		Findings        []findingGroup // at most maxGroups
		More            []findingGroup // the others
		Errors, Warning int            // how many
		Total           totals
		Queues          []queueRow
		Plots           plots
		Changes         changes
	}{}
	var findings []onceqops.Finding
	var healthErr, plotsErr, changesErr error
	var reading sync.WaitGroup
	reading.Go(func() { findings, healthErr = h.readFindings(ctx) })
	reading.Go(func() { d.Plots, plotsErr = h.readPlots(ctx, r, "", "", "./?") })
	reading.Go(func() { d.Changes, changesErr = h.readChanges(ctx) })
	st, behind, err := h.latest(ctx, func() error { reading.Wait(); return cmp.Or(healthErr, plotsErr, changesErr) })
	if err != nil {
		return nil, err
	}
	d.State, d.Behind = st, behind
	d.Plots.mark(st.Workers)
	d.Changes.Began = st.began()
	all := slices.Concat(findings, st.findings()) // findings belong to all who ask
	for _, f := range all {
		if f.Severe {
			d.Errors++
		} else {
			d.Warning++
		}
	}
	d.Findings = h.grouped(all)
	n := min(len(d.Findings), maxGroups)
	d.Findings, d.More = d.Findings[:n], d.Findings[n:]
	d.Total = st.total()
	for _, q := range st.Queues {
		d.Queues = append(d.Queues, st.row(q))
	}
	return &view{Template: "overview", Title: "Overview", Data: d, Live: live("overview", st.sums(behind != "")["overview"])}, nil
}

// maxGroups is how many groups of findings the overview shows at first.
const maxGroups = 5

// masked is what a finding says, with the application's error, in which it ends, as Config.Mask leaves it. That of background work is
// the database's: see failure.
func (h *Handler) masked(f onceqops.Finding) string {
	before, found := strings.CutSuffix(f.Detail, f.Error)
	switch {
	case f.Error == "":
		return plain(f.Detail)
	case f.What == "background":
		return plain(before) + "the log of the application has it"
	case !found:
		return h.cfg.Mask(f.Kind, "error", f.Detail)
	}
	return plain(before) + h.cfg.Mask(f.Kind, "error", f.Error)
}

// totals are the figures of all queues.
type totals struct {
	onceqops.QueueStats
	DeadMore, HeldMore bool // counting stopped in a queue
}

func (s *state) total() (t totals) {
	for _, q := range s.Queues {
		t.Waiting, t.Retrying, t.Delayed = t.Waiting+q.Waiting, t.Retrying+q.Retrying, t.Delayed+q.Delayed
		t.Leased, t.Running, t.Dead, t.Held = t.Leased+q.Leased, t.Running+q.Running, t.Dead+q.Dead, t.Held+q.Held
		t.Oldest, t.More, t.Capped = max(t.Oldest, q.Oldest), t.More || q.More, t.Capped || q.Capped
		t.DeadMore, t.HeldMore = t.DeadMore || q.Dead >= onceqops.StatsCap, t.HeldMore || q.Held >= onceqops.StatsCap
	}
	return t
}

// live is where a page's stream is.
func live(of string, sum uint64) string {
	return "./live?of=" + url.QueryEscape(of) + "&v=" + strconv.FormatUint(sum, 10)
}

// States as people choose them.
var states = []onceq.State{
	onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning, onceq.StateRetrying,
	onceq.StateDead, onceq.StateHeld, onceq.StateCancelled, onceq.StateCompleted,
}

// maxField is how long a name in a search may be; no name that is stored is longer.
const maxField = 1024

// field is a text of a form, without what cannot be in the database.
func field(values url.Values, name string) (string, error) {
	text := strings.TrimSpace(values.Get(name))
	switch {
	case len(text) > maxField:
		return "", bad("%s is longer than %d bytes", name, maxField)
	case strings.ToValidUTF8(text, "") != text || strings.ContainsRune(text, 0):
		return "", bad("%s is not valid UTF-8", name)
	}
	return text, nil
}

// number is a number of a form; 0 if it is not there.
func number(values url.Values, name string) (int64, error) {
	text := strings.TrimSpace(values.Get(name))
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, bad("%s is not a number", name)
	}
	return n, nil
}

// The forms of a time in a form, which is UTC: whole minutes as a browser sends them, and others.
const (
	formTime  = "2006-01-02T15:04"
	formExact = "2006-01-02T15:04:05.999999999"
)

// inForm writes a time so that moment reads the same one.
func inForm(t time.Time) string {
	if t = t.UTC(); t.Equal(t.Truncate(time.Minute)) {
		return t.Format(formTime)
	}
	return t.Format(formExact)
}

func moment(values url.Values, name string) (time.Time, error) {
	text := strings.TrimSpace(values.Get(name))
	if text == "" {
		return time.Time{}, nil
	}
	for _, form := range []string{formTime, formExact, time.RFC3339, time.DateOnly} {
		if t, err := time.Parse(form, text); err == nil && t.Year() > 0 && t.Year() < 10_000 {
			return t, nil
		}
	}
	return time.Time{}, bad("%s is not a time such as 2026-01-31T13:30", name)
}

// maxIDs is how many single jobs a search can name.
const maxIDs = 1000

// readFilter reads the filter of a search.
func readFilter(values url.Values) (f onceqops.Filter, err error) {
	ids := values["ids"]
	if ids == nil && values.Get("all") != "" {
		ids = values["within"]
	}
	var errs [8]error
	f.Queue, errs[0] = field(values, "queue")
	f.Kind, errs[1] = field(values, "kind")
	f.Scope, errs[2] = field(values, "scope")
	f.After, errs[3] = number(values, "after")
	f.CreatedFrom, errs[4] = moment(values, "from")
	f.CreatedBefore, errs[5] = moment(values, "before")
	f.Group, errs[7] = number(values, "group")
	for _, name := range values["state"] {
		if name == "" {
			continue
		}
		var s onceq.State
		if err := s.UnmarshalText([]byte(name)); err != nil || s == 0 {
			return f, bad("%q is not a state", name)
		}
		if !slices.Contains(f.States, s) {
			f.States = append(f.States, s)
		}
	}
	for _, text := range ids {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil || id <= 0 || len(f.IDs) >= maxIDs {
			errs[6] = bad("ids are not up to 1,000 numbers")
			break
		}
		f.IDs = append(f.IDs, id)
	}
	return f, errors.Join(errs[:]...)
}

// filterValues is what readFilter reads.
func filterValues(f onceqops.Filter) url.Values {
	v := url.Values{}
	set := func(name, value string) {
		if value != "" {
			v.Set(name, value)
		}
	}
	set("queue", f.Queue)
	set("kind", f.Kind)
	set("scope", f.Scope)
	for _, s := range f.States {
		v.Add("state", s.String())
	}
	for _, id := range f.IDs {
		v.Add("ids", strconv.FormatInt(id, 10))
	}
	if f.Group != 0 {
		v.Set("group", strconv.FormatInt(f.Group, 10))
	}
	if !f.CreatedFrom.IsZero() {
		v.Set("from", inForm(f.CreatedFrom))
	}
	if !f.CreatedBefore.IsZero() {
		v.Set("before", inForm(f.CreatedBefore))
	}
	return v
}

// inWords says what a filter chooses.
func inWords(f onceqops.Filter) string {
	var names []string
	for _, s := range f.States {
		names = append(names, s.String())
	}
	text := strings.Join(names, " or ") + " jobs"
	if len(f.IDs) > 0 {
		text = fmt.Sprintf("%s among %d chosen ones", text, len(f.IDs))
	}
	for _, part := range [][2]string{{"queue", f.Queue}, {"kind", f.Kind}, {"scope", f.Scope}} {
		if part[1] != "" {
			text += fmt.Sprintf(", %s %q", part[0], part[1])
		}
	}
	if f.Group != 0 {
		text += fmt.Sprintf(", members of group %d", f.Group)
	}
	if !f.CreatedFrom.IsZero() {
		text += ", created from " + clock(f.CreatedFrom)
	}
	if !f.CreatedBefore.IsZero() {
		text += ", created before " + clock(f.CreatedBefore)
	}
	return strings.TrimSpace(text)
}

// filterKey names what a filter chooses, however it is written.
type filterKey [sha256.Size]byte

func keyOf(f onceqops.Filter) filterKey {
	f.States, f.IDs = slices.Sorted(slices.Values(f.States)), slices.Sorted(slices.Values(f.IDs))
	return sha256.Sum256(fmt.Appendf(nil, "%s after %d of %d", filterValues(f).Encode(), f.After, f.Limit))
}

const pageSize = 50

// searchTime is how long a search looks for jobs that are rare before it shows what it has found.
const searchTime = 50 * time.Millisecond

type jobList struct {
	jobs []onceq.JobInfo // without payloads, each with its last error alone
	next int64           // where to go on; 0 for the end
}

func (l jobList) size() (n int) {
	for _, j := range l.jobs {
		n += sizeOf(j)
	}
	return n
}

// sizeOf is about how many bytes a job takes.
func sizeOf(j onceq.JobInfo) int {
	n := 1000 + len(j.Payload) + len(j.Bytes) + len(j.Result)
	for name, value := range j.Metadata {
		n += len(name) + len(value)
	}
	for _, e := range j.Errors {
		n += len(e.Error)
	}
	return n
}

// lastError leaves a job its last error alone.
func lastError(j *onceq.JobInfo) { j.Errors = slices.Clone(j.Errors[max(len(j.Errors)-1, 0):]) }

func (h *Handler) search(ctx context.Context, f onceqops.Filter) (found jobList, err error) {
	f.WithoutPayloads = true
	size := f.Limit
	for began := time.Now(); ; {
		f.Limit = size - len(found.jobs)
		page, next, err := h.ops.Page(ctx, h.db, f)
		if err != nil {
			return found, err
		}
		for i := range page {
			lastError(&page[i])
		}
		found.jobs, found.next = append(found.jobs, page...), next
		if f.After = next; next == 0 || len(found.jobs) == size || time.Since(began) > searchTime {
			return found, nil
		}
	}
}

// memberTime is for how long payloads are searched, memberStep jobs at a time: Older goes on.
const (
	memberTime = 500 * time.Millisecond
	memberStep = 200
)

// withMember searches payloads or metadata.
func (h *Handler) withMember(ctx context.Context, f onceqops.Filter, member string) (found jobList, err error) {
	size := f.Limit
	f.WithoutPayloads, f.Limit = true, memberStep
	for began := time.Now(); ; f.After = found.next {
		page, next, err := h.ops.Page(ctx, h.db, f)
		if err != nil {
			return found, err
		}
		ids := make([]int64, len(page))
		for i, j := range page {
			ids[i] = j.ID
		}
		having, err := h.ops.WithMember(ctx, h.db, ids, member)
		if err != nil {
			return found, err
		}
		found.next = next
		for _, j := range page {
			if !slices.Contains(having, j.ID) {
				continue
			}
			lastError(&j)
			if found.jobs = append(found.jobs, j); len(found.jobs) == size {
				found.next = j.ID
				return found, nil
			}
		}
		if next == 0 || time.Since(began) > memberTime {
			return found, nil
		}
	}
}

// since sets from by one of the presets of times, which it returns, unless from is set already.
func (h *Handler) since(values url.Values, from *time.Time) string {
	since := values.Get("since")
	d, err := time.ParseDuration(since)
	if err != nil || d <= 0 || !from.IsZero() {
		return ""
	}
	*from = h.now().UTC().Truncate(time.Minute).Add(-min(d, 10*365*24*time.Hour))
	return since
}

// jobs is the search.
func jobs(h *Handler, ctx context.Context, r *request) (*view, error) {
	asked, err := field(r.values, "q")
	if err != nil {
		return nil, err
	}
	f, err := readFilter(r.values)
	if err != nil {
		return nil, err
	}
	if asked != "" {
		if id, err := strconv.ParseInt(asked, 10, 64); err == nil && id > 0 {
			var one []onceq.JobInfo
			err := h.reading(ctx, func() (err error) {
				one, err = h.ops.List(ctx, h.db, onceqops.Filter{IDs: []int64{id}, WithoutPayloads: true})
				return err
			})
			if err != nil {
				return nil, err
			} else if len(one) > 0 {
				return &view{To: "./job?id=" + strconv.FormatInt(id, 10)}, nil
			}
		}
		return &view{To: "./keys?" + url.Values{"key": {asked}, "scope": {f.Scope}}.Encode()}, nil
	}
	since := h.since(r.values, &f.CreatedFrom)
	member, err := field(r.values, "member")
	if err != nil {
		return nil, err
	}
	searchable := r.viewer.Payloads && !h.masks // what Mask hides, a search would tell
	if member != "" && !searchable {
		return nil, &statusError{http.StatusForbidden, "You may not search payloads and metadata: they, or parts of them, are hidden."}
	}
	table, err := readTable(r.values)
	if err != nil {
		return nil, err
	}
	f.Limit = table.Size
	key, search := keyOf(f), func(ctx context.Context) (jobList, error) { return h.search(ctx, f) }
	if member != "" {
		key = sha256.Sum256(append(key[:], member...))
		search = func(ctx context.Context) (jobList, error) { return h.withMember(ctx, f, member) }
	}
	found, err := h.lists.get(ctx, h, key, time.Second, search)
	if err != nil {
		return nil, err
	}
	list := found.jobs
	type row struct {
		onceq.JobInfo
		Last string // error
	}
	d := struct {
		Filter        onceqops.Filter
		From, To      string
		Tabs          []tab       // states
		Times         []tab       // presets of when jobs were created
		Chips         [][2]string // what else the search restricts, and the search without it
		Folded        bool        // the form shows nothing that is chosen
		Rows          []row
		Next, Top     string
		Short         bool // the search has not come to its end
		Bulk          []bulk
		Hidden        [][2]string // the search, for a form
		Queues, Kinds []string    // that are known, to choose from
		Errors        string      // what these jobs failed with
		Member        string      // of payloads or metadata, and
		Searchable    bool        // that the viewer may search them
		Table         jobTable
		Search        [][2]string // what is searched, for the form of the table
	}{Filter: f, Table: table, Member: member, Searchable: searchable, From: r.values.Get("from"), To: r.values.Get("before")}
	for _, j := range list {
		one := row{JobInfo: j}
		if n := len(j.Errors); n > 0 {
			one.Last = line(h.cfg.Mask(j.Kind, "error", j.Errors[n-1].Error))
		}
		d.Rows = append(d.Rows, one)
	}
	var st state
	if good := h.good.Load(); good != nil {
		st = good.state
		d.Queues, d.Kinds = st.names()
	}
	chosen := filterValues(f)
	if since != "" {
		chosen.Del("from")
		chosen.Set("since", since)
	}
	if member != "" {
		chosen.Set("member", member)
		for _, j := range list { // all of this search are those of this page
			d.Hidden = append(d.Hidden, [2]string{"within", strconv.FormatInt(j.ID, 10)})
		}
	}
	d.Search = inputs(chosen)
	maps.Copy(chosen, table.values())
	d.Tabs, d.Times, d.Chips = st.tabs(f, chosen), times("./jobs?", chosen), chips("./jobs?", chosen)
	d.Folded = f.Queue+f.Kind+f.Scope+d.From+d.To+member == "" && f.Group == 0
	hidden := filterValues(f)
	if ids := hidden["ids"]; ids != nil { // what is marked has that name
		hidden["within"] = ids
		hidden.Del("ids")
	}
	d.Hidden = append(d.Hidden, inputs(hidden)...)
	if f.After != 0 {
		d.Top = "./jobs?" + chosen.Encode()
	}
	if found.next != 0 {
		v := maps.Clone(chosen)
		v.Set("after", strconv.FormatInt(found.next, 10))
		d.Next, d.Short = "./jobs?"+v.Encode(), len(list) < f.Limit
	}
	if member == "" && (f.States == nil || slices.ContainsFunc(f.States, func(s onceq.State) bool { return slices.Contains(failedStates, s) })) {
		d.Errors = "./errors?" + filterValues(f).Encode()
	}
	for _, b := range bulks {
		if may, _ := r.viewer.may(b.Do); may && b.restrict(f.States) != nil {
			d.Bulk = append(d.Bulk, b)
		}
	}
	return &view{Template: "jobs", Title: "Jobs", Data: d}, nil
}

// tab is a link that changes one part of a search.
type tab struct {
	Name, To string
	Count    string // of jobs, where it is known
	Now      bool
}

// tabs are the states that a search can choose, with the counts of Stats, which are of queues.
func (s *state) tabs(f onceqops.Filter, chosen url.Values) (tabs []tab) {
	counts := make(map[onceq.State]int)
	more := make(map[onceq.State]bool)
	known := f.Kind+f.Scope == "" && f.Group == 0 && f.IDs == nil && f.CreatedFrom.IsZero() && f.CreatedBefore.IsZero() && !chosen.Has("member")
	for _, q := range s.Queues {
		if !known || f.Queue != "" && f.Queue != q.Queue {
			continue
		}
		for state, n := range map[onceq.State]int{onceq.StateWaiting: q.Waiting + q.Blocked, onceq.StateDelayed: q.Delayed, onceq.StateRunning: q.Leased,
			onceq.StateRetrying: q.Retrying, onceq.StateDead: q.Dead, onceq.StateHeld: q.Held} {
			counts[state] += n
			more[state] = more[state] || n >= onceqops.StatsCap || q.More && !state.Finished()
		}
	}
	with := func(states ...string) string {
		v := maps.Clone(chosen)
		if v.Del("state"); len(states) > 0 {
			v["state"] = states
		}
		return "./jobs?" + v.Encode()
	}
	tabs = append(tabs, tab{Name: "all", To: with(), Now: len(f.States) == 0})
	for _, state := range states {
		one := tab{Name: state.String(), To: with(state.String()), Now: slices.Contains(f.States, state)}
		if n := counts[state]; known && n > 0 {
			one.Count = atLeast(n, more[state])
		}
		tabs = append(tabs, one)
	}
	return tabs
}

// times are the presets of a search by time.
func times(path string, chosen url.Values) (tabs []tab) {
	for _, t := range []tab{{Name: "any time"}, {Name: "15 minutes", To: "15m"}, {Name: "an hour", To: "1h"}, {Name: "a day", To: "24h"}, {Name: "a week", To: "168h"}} {
		v := maps.Clone(chosen)
		v.Del("from")
		if v.Del("since"); t.To != "" {
			v.Set("since", t.To)
		}
		t.Now, t.To = chosen.Get("since") == t.To && chosen.Get("from") == "", path+v.Encode()
		tabs = append(tabs, t)
	}
	return tabs
}

// chips are what else is chosen, each with the search without it.
func chips(path string, chosen url.Values) (all [][2]string) {
	for _, name := range []string{"queue", "kind", "scope", "group", "from", "before", "ids", "member", "text", "who", "what"} {
		values := chosen[name]
		if len(values) == 0 {
			continue
		}
		v := maps.Clone(chosen)
		v.Del(name)
		text := map[string]string{"from": "from", "before": "created before", "member": "with", "text": "with", "who": "by"}[name]
		if text = cmp.Or(text, name) + " " + values[0]; name == "ids" {
			text = atLeast(len(values), false) + " single jobs"
		}
		all = append(all, [2]string{text, path + v.Encode()})
	}
	return all
}

// jobView is everything about a job.
type jobView struct {
	Job     onceq.JobInfo
	Found   bool
	Why     []onceqops.Reason     // that it does not run, or where it runs
	Effects []onceqops.EffectInfo // one more than maxEffects if there are more
	Key     *onceqops.KeyInfo
	Actions []onceqops.Action
	Groups  []int64         // that it is a member of
	Waits   onceq.GroupInfo // for which it waits, or did
	Before  []onceq.Member  // the first of these: dead and held ones, then others, at most maxBefore
}

// maxBefore is how many of the jobs before a job its page draws, and of those behind it.
const maxBefore = 6

// readBefore reads the members of a group that its picture shows.
func (h *Handler) readBefore(ctx context.Context, g onceq.GroupInfo) (before []onceq.Member, err error) {
	if g.Dead+g.Held > 0 {
		stuck, err := h.ops.List(ctx, h.db, onceqops.Filter{Group: g.ID, States: []onceq.State{onceq.StateDead, onceq.StateHeld},
			Limit: maxBefore, WithoutPayloads: true})
		if err != nil {
			return nil, err
		}
		for _, j := range stuck {
			before = append(before, onceq.Member{ID: j.ID, Kind: j.Kind, State: j.State})
		}
	}
	for m, err := range h.ops.Members(ctx, h.db, g.ID, onceqops.Filter{Limit: 2 * maxBefore, WithoutPayloads: true}) {
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(before, func(b onceq.Member) bool { return b.ID == m.ID }) && len(before) < maxBefore {
			before = append(before, m)
		}
	}
	return before, nil
}

func (v jobView) size() int {
	n := sizeOf(v.Job)
	for _, e := range v.Effects {
		n += 1000 + len(e.Result) + len(e.Detail)
	}
	for _, a := range v.Actions {
		n += 1000 + len(a.About) + len(a.Why) + len(a.Outcome)
	}
	return n + 8*len(v.Groups) + 200*len(v.Before)
}

// jobKey is a job as a viewer sees it. For one who may not see its payload nothing of that is read, so that the page does not take
// the longer, the larger it is.
type jobKey struct {
	id       int64
	payloads bool
}

func (h *Handler) readJob(ctx context.Context, id int64, payloads bool) (jobView, error) {
	return h.jobs.get(ctx, h, jobKey{id, payloads}, time.Second, func(ctx context.Context) (v jobView, err error) {
		why, err := h.ops.Explain(ctx, h.db, id)
		if err != nil {
			return v, err
		}
		v.Job, v.Why = why.Job, why.Reasons
		if payloads {
			whole, err := h.q.Get(ctx, h.db, id)
			if err != nil && !errors.Is(err, onceq.ErrNotFound) { // it may have gone meanwhile
				return v, err
			}
			v.Job.Payload, v.Job.Bytes, v.Job.Metadata, v.Job.Result = whole.Payload, whole.Bytes, whole.Metadata, whole.Result
		}
		if v.Found = why.Cause() != onceqops.CauseUnknown; v.Found {
			if v.Effects, err = h.readEffects(ctx, id, payloads); err != nil {
				return v, err
			}
			if v.Groups, err = h.ops.GroupsOf(ctx, h.db, id); err != nil {
				return v, err
			}
			if v.Waits, err = h.q.Group(ctx, h.db, id); err != nil && !errors.Is(err, onceq.ErrNotFound) {
				return v, err
			}
			if v.Waits.Total > 0 {
				if v.Before, err = h.readBefore(ctx, v.Waits); err != nil {
					return v, err
				}
			}
		}
		if v.Job.Key != "" {
			keys, err := h.ops.Keys(ctx, h.db, v.Job.Scope, v.Job.Key, onceqops.Filter{WithoutPayloads: true})
			if err != nil {
				return v, err
			}
			for _, k := range keys {
				if k.Class.String() == "job" {
					v.Key = &k
				}
			}
		}
		v.Actions, err = h.ops.Actions(ctx, h.db, onceqops.ActionFilter{JobID: id, Limit: 50})
		return v, err
	})
}

// A job may have any number of effects. Its page shows the first maxEffects of them, and of these the results of the first maxResults.
const (
	maxEffects = 200
	maxResults = 20
)

// readEffects reads the effects of a job that its page shows, and results for those who may see them alone.
func (h *Handler) readEffects(ctx context.Context, id int64, results bool) ([]onceqops.EffectInfo, error) {
	all, err := h.ops.Effects(ctx, h.db, id, onceqops.Filter{WithoutPayloads: true, Limit: maxEffects + 1})
	if err != nil || !results || len(all) == 0 {
		return all, err
	}
	whole, err := h.ops.Effects(ctx, h.db, id, onceqops.Filter{Limit: maxResults})
	for _, e := range whole {
		if i := slices.IndexFunc(all, func(other onceqops.EffectInfo) bool { return other.Name == e.Name }); i >= 0 {
			all[i].Result = e.Result
		}
	}
	return all, err
}

// shownEffect is an effect as a page shows it.
type shownEffect struct {
	onceqops.EffectInfo
	Result string
	Open   bool // nobody knows whether it happened
}

func (h *Handler) shown(kind string, e onceqops.EffectInfo, viewer Viewer) shownEffect {
	s := shownEffect{EffectInfo: e, Open: e.State == "held" || e.State == "uncertain"}
	s.Detail = h.cfg.Mask(kind, "error", e.Detail)
	switch {
	case viewer.Payloads && e.Result != nil:
		s.Result = short(h.cfg.Mask(kind, "effect "+e.Name, pretty(e.Result)))
	case !viewer.Payloads && e.State == "completed": // whether it has one or not
		s.Result = "hidden"
	}
	return s
}

// job shows one job.
func job(h *Handler, ctx context.Context, r *request) (*view, error) {
	id, err := number(r.values, "id")
	if err != nil {
		return nil, err
	}
	if id == 0 {
		return nil, bad("a job's page needs its id")
	}
	v, err := h.readJob(ctx, id, r.viewer.Payloads)
	if err != nil {
		return nil, err
	}
	j := v.Job
	d := struct {
		ID                               int64
		Reasons                          []onceqops.Reason
		Job                              onceq.JobInfo
		Found, Hidden                    bool
		Payload, Metadata, Result        string
		Note                             string // of the progress
		Attempts                         []attempt
		Timeline                         timeline
		Effects                          []shownEffect
		More                             int // how many of them are shown if there are more; else 0
		Open                             bool
		Key                              *onceqops.KeyInfo
		Actions                          []done
		Groups                           []int64
		Waits                            onceq.GroupInfo
		Before                           []onceq.Member
		Behind                           []int64 // the first of Groups
		Cancel, Retry, Redrive, Go, Move bool
		Queues                           []string // to which it can move
		Meant                            string   // that of Queues which its own may be meant to be
	}{ID: id, Job: j, Found: v.Found, Key: v.Key, Actions: together(v.Actions), Groups: v.Groups, Waits: v.Waits,
		Before: v.Before, Behind: v.Groups[:min(len(v.Groups), maxBefore)]}
	sum := sum("", false)
	if v.Found {
		sum = jobSum(j)
	}
	page := &view{Template: "job", Title: fmt.Sprintf("Job %d", id), Data: &d, Live: live(strconv.FormatInt(id, 10), sum)}
	if !v.Found {
		page.Status = 404
		return page, nil
	}
	for _, why := range v.Why {
		why.Text, why.Advice = h.cfg.Mask(j.Kind, "error", why.Text), h.cfg.Mask(j.Kind, "error", why.Advice)
		d.Reasons = append(d.Reasons, why)
	}
	if d.Hidden = !r.viewer.Payloads; !d.Hidden {
		if j.Progress != nil {
			d.Note = h.cfg.Mask(j.Kind, "progress", j.Progress.Note)
		}
		if j.Bytes != nil { // in hex, Mask would find nothing
			d.Payload = short(readable([]byte(h.cfg.Mask(j.Kind, "payload", string(j.Bytes)))))
		} else {
			d.Payload = short(h.cfg.Mask(j.Kind, "payload", pretty(j.Payload)))
		}
		if j.Metadata != nil {
			d.Metadata = short(h.cfg.Mask(j.Kind, "metadata", pairs(j.Metadata)))
		}
		if j.Result != nil {
			d.Result = short(h.cfg.Mask(j.Kind, "result", pretty(j.Result)))
		}
	}
	d.Attempts, d.Timeline = h.attempts(j), timelineOf(j, v.Why, h.now())
	if len(v.Effects) > maxEffects {
		d.More = maxEffects
	}
	for i, e := range v.Effects[:min(len(v.Effects), maxEffects)] {
		one := h.shown(j.Kind, e, r.viewer)
		if r.viewer.Payloads && i >= maxResults && e.State == "completed" {
			one.Result = fmt.Sprintf("This page shows the results of the first %d effects. onceq jobs show %d prints all.", maxResults, id)
		}
		d.Open = d.Open || one.Open
		d.Effects = append(d.Effects, one)
	}
	if r.viewer.Change {
		d.Cancel = !j.State.Finished()
		d.Move = j.State == onceq.StateWaiting || j.State == onceq.StateDelayed || j.State == onceq.StateRetrying
		if d.Move {
			d.Queues, d.Meant = h.destinations(ctx, j.Queue)
		}
		d.Go = j.State.Finished()
	}
	if r.viewer.Run {
		d.Retry = !j.State.Finished() && j.State != onceq.StateRunning && j.RunAt.After(h.now())
		d.Redrive = j.State == onceq.StateDead || j.State == onceq.StateCancelled
	}
	return page, nil
}

// doubtsView is a page of effects of unknown outcome.
type doubtsView struct {
	Doubts []onceqops.Doubt
	Next   int64
}

func (v doubtsView) size() (n int) {
	for _, d := range v.Doubts {
		n += sizeOf(d.Job) + 1000 + len(d.Effect.Result) + len(d.Effect.Detail)
	}
	return n
}

// doubtful looks for effects of unknown outcome as search does for jobs.
func (h *Handler) doubtful(ctx context.Context, f onceqops.Filter) (v doubtsView, err error) {
	f.WithoutPayloads = true
	for began := time.Now(); ; f.After = v.Next {
		var more []onceqops.Doubt
		if more, v.Next, err = h.ops.Doubts(ctx, h.db, f); err != nil {
			return v, err
		}
		for i := range more {
			lastError(&more[i].Job)
		}
		v.Doubts = append(v.Doubts, more...)
		if v.Next == 0 || len(v.Doubts) >= pageSize || time.Since(began) > searchTime {
			return v, nil
		}
	}
}

// effects shows the effects of unknown outcome: those that wait for a person, or those of other jobs.
func effects(h *Handler, ctx context.Context, r *request) (*view, error) {
	f, err := readFilter(r.values)
	if err != nil {
		return nil, err
	}
	others := r.values.Get("of") == "others"
	f.Limit, f.States = pageSize, []onceq.State{onceq.StateHeld}
	if others {
		f.Limit, f.States = 200, []onceq.State{onceq.StateRetrying, onceq.StateRunning, onceq.StateDead, onceq.StateCancelled}
	}
	found, err := h.doubts.get(ctx, h, keyOf(f), time.Second, func(ctx context.Context) (doubtsView, error) { return h.doubtful(ctx, f) })
	if err != nil {
		return nil, err
	}
	type one struct {
		Job    onceq.JobInfo
		Effect shownEffect
		Last   string
		Act    bool
	}
	d := struct {
		Filter onceqops.Filter
		Others bool
		List   []one
		Next   string
	}{Filter: f, Others: others}
	for _, x := range found.Doubts {
		o := one{Job: x.Job, Effect: h.shown(x.Job.Kind, x.Effect, r.viewer), Act: r.viewer.Decide}
		if n := len(x.Job.Errors); n > 0 && !strings.Contains(x.Job.Errors[n-1].Error, x.Effect.Detail) {
			o.Last = line(h.cfg.Mask(x.Job.Kind, "error", x.Job.Errors[n-1].Error))
		}
		d.List = append(d.List, o)
	}
	if found.Next != 0 {
		v := url.Values{"queue": {f.Queue}, "kind": {f.Kind}, "of": {r.values.Get("of")}, "after": {strconv.FormatInt(found.Next, 10)}}
		d.Next = "./effects?" + v.Encode()
	}
	var st state
	if good := h.good.Load(); good != nil {
		st = good.state
	}
	return &view{Template: "effects", Title: "Effects of unknown outcome", Data: d, Live: live("effects", st.sums(false)["effects"])}, nil
}

// unread leaves unread what a viewer may not see: a page would take the longer, the larger it is.
func unread(v Viewer) onceqops.Filter { return onceqops.Filter{WithoutPayloads: !v.Payloads} }

// keys shows who has a key.
func keys(h *Handler, ctx context.Context, r *request) (*view, error) {
	key, err := field(r.values, "key")
	if err != nil {
		return nil, err
	}
	scope, err := field(r.values, "scope")
	if err != nil {
		return nil, err
	}
	type shownKey struct {
		onceqops.KeyInfo
		Result string
		Open   bool
	}
	d := struct {
		Key, Scope string
		Keys       []shownKey
	}{Key: key, Scope: scope}
	if key != "" {
		var found []onceqops.KeyInfo
		if err := h.reading(ctx, func() (err error) {
			found, err = h.ops.Keys(ctx, h.db, scope, key, unread(r.viewer))
			return err
		}); err != nil {
			return nil, err
		}
		for _, k := range found {
			one := shownKey{KeyInfo: k, Open: k.State == "held" || k.State == "uncertain"}
			kind := cmp.Or(k.Kind, k.Scope)
			one.Detail = h.cfg.Mask(kind, "error", k.Detail)
			switch {
			case r.viewer.Payloads && k.Result != nil:
				one.Result = short(h.cfg.Mask(kind, "result", pretty(k.Result)))
			case !r.viewer.Payloads && k.State == "completed": // whether it has one or not
				one.Result = "hidden"
			}
			d.Keys = append(d.Keys, one)
		}
	}
	return &view{Template: "keys", Title: "Keys", Data: d}, nil
}

// lanes shows the lanes that jobs wait for, and the limits.
func lanes(h *Handler, ctx context.Context, r *request) (*view, error) {
	family, err := field(r.values, "family")
	if err != nil {
		return nil, err
	}
	after, err := field(r.values, "after")
	if err != nil {
		return nil, err
	}
	limit, err := field(r.values, "limit") // only this one
	if err != nil {
		return nil, err
	}
	behind, err := field(r.values, "behind") // as after is for lanes
	if err != nil {
		return nil, err
	}
	d := struct {
		Family, Next     string
		Lanes            []onceqops.LaneInfo
		Limit, NextLimit string
		Limits           []onceqops.LimitInfo
	}{Family: family, Limit: limit}
	err = h.reading(ctx, func() (err error) {
		if d.Lanes, err = h.ops.Lanes(ctx, h.db, onceqops.LaneFilter{Family: family, After: after, Limit: pageSize}); err != nil {
			return err
		}
		if limit == "" {
			d.Limits, err = h.ops.Limits(ctx, h.db, onceqops.LimitFilter{After: behind, Limit: pageSize})
			return err
		}
		one, err := h.ops.Limit(ctx, h.db, limit)
		d.Limits = []onceqops.LimitInfo{one}
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(d.Lanes) == pageSize {
		d.Next = "./lanes?" + url.Values{"family": {family}, "after": {d.Lanes[pageSize-1].Lane}}.Encode()
	}
	if len(d.Limits) == pageSize {
		d.NextLimit = "./lanes?" + url.Values{"behind": {d.Limits[pageSize-1].Name}}.Encode() + "#limits"
	}
	return &view{Template: "lanes", Title: "Lanes and limits", Data: d}, nil
}

// groups shows the jobs that wait for others.
func groups(h *Handler, ctx context.Context, r *request) (*view, error) {
	after, err := number(r.values, "after")
	if err != nil {
		return nil, err
	}
	d := struct {
		Groups []onceq.GroupInfo
		Next   string
	}{}
	if err := h.reading(ctx, func() (err error) { d.Groups, err = h.ops.Groups(ctx, h.db, after, pageSize); return err }); err != nil {
		return nil, err
	}
	if len(d.Groups) == pageSize {
		d.Next = "./groups?after=" + strconv.FormatInt(d.Groups[pageSize-1].ID, 10)
	}
	return &view{Template: "groups", Title: "Groups", Data: d}, nil
}

// oneGroup shows a group: its dead and held members first, and then all of them, page by page.
func oneGroup(h *Handler, ctx context.Context, r *request) (*view, error) {
	id, err := number(r.values, "id")
	if err != nil {
		return nil, err
	}
	if id == 0 {
		return nil, bad("a group's page needs its id, which is that of the job that waits")
	}
	after, err := number(r.values, "after")
	if err != nil {
		return nil, err
	}
	type person struct {
		onceq.JobInfo
		Last string // error
	}
	type member struct {
		onceq.Member
		Output, Last string
	}
	d := struct {
		Group   onceq.GroupInfo
		People  []person // that wait for one: dead or held
		Members []member
		Next    string
		Acts    []bulk // what can be done with the dead ones
		End     bool   // the group can be cancelled
	}{}
	var people []onceq.JobInfo
	var members []onceq.Member
	err = h.reading(ctx, func() (err error) {
		if d.Group, err = h.q.Group(ctx, h.db, id); err != nil {
			return err
		}
		if d.Group.Dead+d.Group.Held > 0 && after == 0 {
			people, err = h.ops.List(ctx, h.db, onceqops.Filter{Group: id, States: []onceq.State{onceq.StateDead, onceq.StateHeld}, Limit: pageSize, WithoutPayloads: true})
			if err != nil {
				return err
			}
		}
		members = nil
		filter := unread(r.viewer)
		filter.After, filter.Limit = after, pageSize
		for m, err := range h.ops.Members(ctx, h.db, id, filter) {
			if err != nil {
				return err
			}
			members = append(members, m)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, j := range people {
		one := person{JobInfo: j}
		if n := len(j.Errors); n > 0 {
			one.Last = line(h.cfg.Mask(j.Kind, "error", j.Errors[n-1].Error))
		}
		d.People = append(d.People, one)
	}
	for _, m := range members {
		one := member{Member: m}
		if m.Error != "" {
			one.Last = line(h.cfg.Mask(m.Kind, "error", m.Error))
		}
		switch shown := r.viewer.Payloads && (m.Kind != "" || !h.masks); {
		case shown && m.Result != nil:
			one.Output = line(h.cfg.Mask(m.Kind, "result", string(m.Result)))
		case !shown && m.State == onceq.StateCompleted: // whether it has one or not
			one.Output = "hidden"
		}
		d.Members = append(d.Members, one)
	}
	if len(members) == pageSize {
		d.Next = fmt.Sprintf("./group?id=%d&after=%d", id, members[pageSize-1].ID)
	}
	for _, b := range bulks {
		if may, _ := r.viewer.may(b.Do); may && len(people) > 0 && (b.Do == "redrive-many" || b.Do == "discard-many") {
			d.Acts = append(d.Acts, b)
		}
	}
	d.End = r.viewer.Change && (d.Group.Open > 0 || d.Group.Waits)
	return &view{Template: "group", Title: fmt.Sprintf("Group %d", id), Data: d}, nil
}
