package onceqweb

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
)

// bulk is an action on all jobs of a search.
type bulk struct {
	Do, Button string
	allowed    []onceq.State
	usual      []onceq.State // without a choice
	to         bool          // it needs the name of a queue
	run        func(h *Handler, ctx context.Context, f onceqops.Filter, to string) (outcome string, err error)
}

// then is the state in which jobs are after the action, where it can be searched for.
var then = map[string]onceq.State{"redrive-many": onceq.StateWaiting, "retry-many": onceq.StateRetrying, "cancel-many": onceq.StateCancelled}

var bulks = []bulk{
	{"redrive-many", "Redrive", []onceq.State{onceq.StateDead, onceq.StateCancelled}, []onceq.State{onceq.StateDead}, false,
		func(h *Handler, ctx context.Context, f onceqops.Filter, _ string) (string, error) {
			n, taken, err := h.ops.RedriveMany(ctx, h.db, f)
			text := fmt.Sprintf("%d run again", n)
			if taken > 0 {
				text += fmt.Sprintf("; %d stay, because a later job has their key", taken)
			}
			return text, err
		}},
	{"retry-many", "Run now", []onceq.State{onceq.StateRetrying, onceq.StateDelayed}, []onceq.State{onceq.StateRetrying}, false,
		func(h *Handler, ctx context.Context, f onceqops.Filter, _ string) (string, error) {
			n, err := h.ops.RetryMany(ctx, h.db, f)
			return fmt.Sprintf("%d run now", n), err
		}},
	{"cancel-many", "Cancel", []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning, onceq.StateRetrying}, nil, false,
		func(h *Handler, ctx context.Context, f onceqops.Filter, _ string) (string, error) {
			n, asked, err := h.ops.CancelMany(ctx, h.db, f)
			text := fmt.Sprintf("%d cancelled", n)
			if asked > 0 {
				text += fmt.Sprintf("; %d run and were asked to end", asked)
			}
			return text, err
		}},
	{"discard-many", "Discard", []onceq.State{onceq.StateDead, onceq.StateCancelled, onceq.StateCompleted, onceq.StateHeld}, []onceq.State{onceq.StateDead}, false,
		func(h *Handler, ctx context.Context, f onceqops.Filter, _ string) (string, error) {
			n, err := h.ops.DiscardMany(ctx, h.db, f)
			return fmt.Sprintf("%d discarded", n), err
		}},
	{"move-many", "Move", []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRetrying}, nil, true,
		func(h *Handler, ctx context.Context, f onceqops.Filter, to string) (string, error) {
			n, err := h.ops.MoveMany(ctx, h.db, f, to)
			return fmt.Sprintf("%d moved to queue %q", n, to), err
		}},
}

// restrict returns those of the chosen states in which the action is possible, or the usual ones if none is chosen; nil if there
// is none.
func (b *bulk) restrict(chosen []onceq.State) (possible []onceq.State) {
	if len(chosen) == 0 {
		if b.usual == nil {
			return b.allowed
		}
		return b.usual
	}
	for _, s := range chosen {
		if slices.Contains(b.allowed, s) {
			possible = append(possible, s)
		}
	}
	return possible
}

// narrow reports whether the filter names what the action needs: jobs that are not finished are not taken all at once.
func (b *bulk) narrow(f onceqops.Filter) bool {
	return b.usual != nil || f.Queue != "" || f.Kind != "" || f.Scope != "" || f.IDs != nil || f.Group != 0
}

// decisions are a person's answers about an effect.
var decisions = map[string]struct {
	words   string
	resolve func(result any) onceq.Resolution
}{
	"applied": {"it happened", onceq.Applied},
	"never":   {"it did not happen", func(any) onceq.Resolution { return onceq.NeverApplied() }},
	"ask":     {"ask again", func(any) onceq.Resolution { return onceq.AskAgain() }},
}

// asked is an action as a form asks for it.
type asked struct {
	onceqops.Action
	filter   onceqops.Filter
	effect   string
	decision string
	to       string // the queue to which jobs move
	until    time.Time
	limit    onceq.Limit
	pause    time.Duration // for how long; 0 until somebody resumes it
	result   any
	values   url.Values
}

// confirmation is what a page shows before an action.
type confirmation struct {
	Do, Words, Button, Warning string
	Count                      int
	More                       bool // counting stopped at countLimit
	Slow                       bool // counting stopped because it took long
	Many                       bool
	Typed                      string      // the number that has to be typed; empty: none
	OfQueues, OfKinds          []nameCount // of the newest jobs
	First                      []onceq.JobInfo
	Looked                     int      // how many of them were looked at, if not all
	To                         bool     // it asks for a queue
	Queues                     []string // that workers serve
	Meant                      string   // that of Queues which a misspelt one may be meant to be
	Hidden                     [][2]string
	Back                       string
}

// nameCount is how many jobs a queue or a kind has.
type nameCount struct {
	Name  string
	Count int
}

// counted sorts names by how often they come, and leaves at most few.
func counted(n map[string]int) (all []nameCount) {
	for name, n := range n {
		all = append(all, nameCount{name, n})
	}
	slices.SortFunc(all, func(a, b nameCount) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Name, b.Name)) })
	if len(all) > few {
		rest := 0
		for _, one := range all[few:] {
			rest += one.Count
		}
		all = append(all[:few], nameCount{fmt.Sprintf("%d others", len(all)-few), rest})
	}
	return all
}

// confirm shows how many jobs an action takes, or what it deletes, before it does.
func confirm(h *Handler, ctx context.Context, r *request) (*view, error) {
	d := confirmation{Do: r.values.Get("do")}
	if may, _ := r.viewer.may(d.Do); !may {
		return nil, notAllowed
	}
	title := "Are you sure?"
	if d.Do == "limit" || d.Do == "remove-limit" {
		if err := h.confirmLimit(ctx, r.values, &d); err != nil {
			return nil, err
		}
		return &view{Template: "confirm", Title: title, Data: d}, nil
	}
	if d.Do == "remove-schedule" {
		name, err := field(r.values, "name")
		if err != nil || name == "" {
			return nil, bad("a schedule's name is missing")
		}
		d.Words, d.Button = fmt.Sprintf("Remove schedule %q.", name), "Remove it"
		d.Warning = "Its ledger is deleted with it. Jobs that it has enqueued stay."
		d.Hidden, d.Count, d.Back = [][2]string{{"name", name}}, 1, "./schedule?"+url.Values{"name": {name}}.Encode()
		return &view{Template: "confirm", Title: title, Data: d}, nil
	}
	if d.Do == "cancel-group" {
		id, err := number(r.values, "id")
		if err != nil || id == 0 {
			return nil, bad("a group's id is missing")
		}
		var g onceq.GroupInfo
		if err := h.reading(ctx, func() (err error) { g, err = h.q.Group(ctx, h.db, id); return err }); err != nil {
			return nil, err
		}
		d.Words, d.Button = fmt.Sprintf("Cancel group %d: job %d, which is %s, and %s unfinished members of %s.", id, id, g.State, count(g.Open), count(g.Total)), "Cancel the group"
		d.Warning = "Members that other jobs wait for too are cancelled all the same. A redrive brings cancelled jobs back."
		d.Hidden, d.Count = [][2]string{{"id", strconv.FormatInt(id, 10)}}, 1
		d.Back = "./group?id=" + strconv.FormatInt(id, 10)
		return &view{Template: "confirm", Title: title, Data: d}, nil
	}
	if d.Do == "discard" {
		id, err := number(r.values, "id")
		if err != nil || id == 0 {
			return nil, bad("a job's id is missing")
		}
		d.Words, d.Button = fmt.Sprintf("Discard job %d.", id), "Discard it"
		d.Warning = "What is known of it is deleted, its effects' outcomes too, and its key is free at once. If an effect may have happened and the key comes again, it happens a second time."
		d.Hidden, d.Count = [][2]string{{"id", strconv.FormatInt(id, 10)}}, 1
		d.Back = "./job?id=" + strconv.FormatInt(id, 10)
		return &view{Template: "confirm", Title: title, Data: d}, nil
	}
	if d.Do == "backfill" {
		name, from, to, err := readBackfill(r.values)
		if err != nil {
			return nil, err
		}
		if to.IsZero() {
			to = h.now().Add(-time.Second)
		}
		err = h.reading(ctx, func() (err error) { d.Count, err = h.cron.WouldBackfill(ctx, h.db, name, from, to); return err })
		d.Many = true
		if errors.Is(err, onceqcron.ErrElsewhere) {
			d.Many, d.Count, d.Warning, err = false, 1, "The schedule is in an application's code: one of its workers is asked to do it, and how many these are is not known before.", nil
		}
		if err != nil && !drivers(err) && strings.HasPrefix(err.Error(), "onceqcron: ") && !errors.Is(err, onceqcron.ErrNotFound) {
			return nil, bad("%v", err)
		} else if err != nil {
			return nil, err
		}
		d.Words = fmt.Sprintf("Enqueue the jobs of the ticks of schedule %q from %s to %s that did not happen.", name, clock(from), clock(to))
		d.Button, d.Back = "Back-fill", "./schedule?"+url.Values{"name": {name}}.Encode()
		d.Hidden = [][2]string{{"name", name}, {"from", from.UTC().Format(time.RFC3339)}, {"to", to.UTC().Format(time.RFC3339)}}
		return &view{Template: "confirm", Title: title, Data: d}, nil
	}
	f, err := readFilter(r.values)
	if err != nil {
		return nil, err
	}
	d.Many = true
	if r.values.Has("of") {
		if f.IDs, err = h.inGroup(ctx, f, r.values); err != nil {
			return nil, err
		}
	}
	if d.Do == "resolve-many" {
		decision, ok := decisions[r.values.Get("decision")]
		if !ok {
			return nil, bad("choose what is true: it happened, it did not, or ask again")
		}
		name, err := field(r.values, "effect")
		if err != nil {
			return nil, err
		}
		f.States = []onceq.State{onceq.StateHeld}
		d.Words, d.Button = fmt.Sprintf("Say of the effects that are held, of %s: %s.", inWords(f), decision.words), "Say so"
		if name != "" {
			d.Words = fmt.Sprintf("Say of the effects %q that are held, of %s: %s.", name, inWords(f), decision.words)
		}
		if _, err := readResult(r.values); err != nil {
			return again(r.values, err), nil
		}
		d.Hidden = append(d.Hidden, [2]string{"decision", r.values.Get("decision")}, [2]string{"effect", name}, [2]string{"result", r.values.Get("result")})
		d.Back = "./effects"
	} else {
		i := slices.IndexFunc(bulks, func(b bulk) bool { return b.Do == d.Do })
		if i < 0 {
			return nil, bad("there is no such action")
		}
		b := bulks[i]
		if f.IDs == nil && r.values.Get("all") == "" {
			return nil, bad("Nothing is marked, and so nothing was done. Go back and mark jobs, or choose all of the search.")
		}
		if f.States = b.restrict(f.States); f.States == nil {
			return nil, bad("%s is not possible in these states", b.Button)
		}
		if !b.narrow(f) {
			return nil, bad("choose a queue, a kind, a scope or single jobs first; otherwise all of them would be taken")
		}
		if d.To = b.to; d.To {
			d.Queues, d.Meant = h.destinations(ctx, f.Queue)
		}
		d.Words, d.Button = fmt.Sprintf("%s %s.", b.Button, inWords(f)), b.Button
		if d.Do == "discard-many" {
			d.Warning = "What is known of them is deleted, and their keys are free at once. If an effect may have happened and the key comes again, it happens a second time."
		}
		d.Back = "./jobs?" + filterValues(f).Encode()
	}
	var before int64
	err = h.reading(ctx, func() (err error) { before, err = h.count(ctx, f, &d); return err })
	if err != nil {
		return nil, err
	}
	d.Hidden = append(d.Hidden, inputs(filterValues(f))...)
	if d.Do == "discard-many" && d.Count > 0 {
		d.Typed = strconv.Itoa(map[bool]int{true: maxMany, false: min(d.Count, maxMany)}[d.Slow])
		d.Hidden = append(d.Hidden, [2]string{"count", d.Typed})
	}
	if before != 0 {
		d.Hidden = append(d.Hidden, [2]string{"after", strconv.FormatInt(before, 10)})
	}
	return &view{Template: "confirm", Title: title, Data: d}, nil
}

// count counts the jobs of a search, up to countLimit, and for countTime: then it has found so many at least. Jobs from before on come
// too late to be among those that were counted; before is 0 if there is none.
func (h *Handler) count(ctx context.Context, f onceqops.Filter, d *confirmation) (before int64, err error) {
	began := time.Now()
	f.WithoutPayloads = true
	for f.After, f.Limit = 0, sampled; d.Count == 0; {
		page, next, err := h.ops.Page(ctx, h.db, f)
		if err != nil {
			return 0, err
		}
		if len(page) > 0 {
			d.Count, before = len(page), page[0].ID+1
			d.sample(page)
		}
		if next == 0 {
			d.Looked = 0 // these are all
			return before, nil
		}
		if f.After = next; time.Since(began) > h.countTime/4 {
			break
		}
	}
	if before == 0 {
		before = f.After // it has looked at those behind it, and found none
	}
	left := h.countTime - time.Since(began)
	d.Slow = left <= 0
	if d.Slow {
		return before, nil
	}
	f.After, f.Limit = before, h.countLimit
	err = pgx.BeginTxFunc(ctx, h.db, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select pg_catalog.set_config('statement_timeout', $1::text, true)`, strconv.FormatInt(max(left.Milliseconds(), 1), 10)); err != nil {
			return err
		}
		n, err := h.ops.Count(ctx, tx, f)
		if err == nil {
			d.Count, d.More = n, n >= h.countLimit
		}
		if d.Count == d.Looked {
			d.Looked = 0
		}
		return err
	})
	if stopped := (*pgconn.PgError)(nil); errors.As(err, &stopped) && stopped.Code == "57014" { // the time is up
		d.Slow, err = true, nil
	}
	return before, err
}

// sampled is how many jobs, the newest ones, are shown by queue and kind before an action on many.
const sampled = 1000

// sample shows what jobs an action takes, by some of them.
func (d *confirmation) sample(jobs []onceq.JobInfo) {
	queues, kinds := make(map[string]int), make(map[string]int)
	for _, j := range jobs {
		queues[j.Queue]++
		kinds[j.Kind]++
	}
	d.OfQueues, d.OfKinds, d.First, d.Looked = counted(queues), counted(kinds), jobs[:min(len(jobs), few)], len(jobs)
}

// destinations are the queues that workers serve, for a form that moves jobs, and which of these a misspelt one may be meant to be.
// Without them the form asks all the same.
func (h *Handler) destinations(ctx context.Context, from string) (queues []string, meant string) {
	st, _ := h.readState(ctx)
	for _, w := range st.Workers {
		for name := range w.Queues {
			if !w.Stale && name != from && !slices.Contains(queues, name) {
				queues = append(queues, name)
			}
		}
	}
	slices.Sort(queues)
	if from == "" || st.working(from) > 0 {
		return queues, ""
	}
	found, _ := h.readFindings(ctx)
	for _, f := range found {
		if f.What == "waiting" && f.Queue == from {
			meant = f.Meant
		}
	}
	return queues, meant
}

// confirmLimit shows what a limit is before it is set or removed.
func (h *Handler) confirmLimit(ctx context.Context, values url.Values, d *confirmation) error {
	name, limit, err := readShared(values)
	if err != nil {
		return err
	}
	var now onceqops.LimitInfo
	if err := h.reading(ctx, func() (err error) { now, err = h.ops.Limit(ctx, h.db, name); return err }); err != nil {
		return err
	}
	d.Back, d.Count = "./lanes?"+url.Values{"limit": {name}}.Encode()+"#limits", 1
	d.Words, d.Button = fmt.Sprintf("Set limit %q to %s.", name, plain(limit.String())), "Set it"
	if limit == (onceq.Limit{}) {
		d.Warning = "None of its jobs starts until somebody sets another limit. Those that are live run on."
	}
	fields := []string{"name", "at-once", "max", "rate", "per", "burst"}
	if d.Do == "remove-limit" {
		d.Words, d.Button, d.Warning = fmt.Sprintf("Remove limit %q: its family's limit holds then, or one of its jobs runs at a time.", name), "Remove it", ""
		fields = fields[:1]
		if !now.Set {
			d.Count = 0
		}
	}
	set := ""
	if !now.Set {
		set = ", which nobody has set itself"
	}
	d.Words += fmt.Sprintf(" Now it is %s%s.", plain(now.Limit.String()), set)
	if !strings.HasSuffix(name, "/") {
		d.Words += fmt.Sprintf(" Live: %s. Waiting: %s.", count(now.Live), count(now.Waiting))
	}
	for _, f := range fields {
		d.Hidden = append(d.Hidden, [2]string{f, values.Get(f)})
	}
	return nil
}

// readShared reads the form of a limit. To remove one takes its name alone.
func readShared(values url.Values) (name string, l onceq.Limit, err error) {
	if name, err = field(values, "name"); err != nil || name == "" {
		return "", l, bad("the name of a limit is missing")
	}
	if values.Get("do") == "remove-limit" {
		return name, l, nil
	}
	for field, to := range map[string]*int{"at-once": &l.AtOnce, "max": &l.Max, "rate": &l.Rate, "burst": &l.Burst} {
		n, err := number(values, field)
		if err != nil {
			return "", l, err
		}
		*to = int(min(n, math.MaxInt32))
	}
	if text := strings.TrimSpace(values.Get("per")); text != "" {
		if l.Per, err = time.ParseDuration(text); err != nil {
			return "", l, bad("per is not a time such as 1s, 5m or 24h")
		}
	}
	if strings.TrimSpace(values.Get("at-once")+values.Get("max")+values.Get("rate")) == "" {
		return "", l, bad("say how many at once, or how many in a time; 0 at once lets none start")
	}
	return name, l, nil
}

// notAllowed is what a viewer without the right to an action gets.
var notAllowed = &statusError{http.StatusForbidden, "You may read this page and not do that."}

// readForm reads the form of an action. It works on a copy of the request: by the body of its own one the server knows whether the
// client still waits to be asked for it (Expect: 100-continue).
func readForm(w http.ResponseWriter, r *http.Request) (url.Values, error) {
	r = r.WithContext(r.Context())
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	err := r.ParseForm()
	return r.PostForm, err
}

// refuse records that an action was refused before anything of its form was read but what it is and of which job, schedule or queue.
// What is no action of this page is only logged.
func (h *Handler) refuse(ctx context.Context, viewer Viewer, values url.Values, why string) {
	a := onceqops.Action{Who: viewer.Name, What: values.Get("do"), Outcome: "refused: " + why}
	a.JobID, _ = number(values, "id")
	a.About, _ = field(values, "name")
	h.log.LogAttrs(ctx, slog.LevelWarn, "onceqweb: refused to act", slog.String("who", a.Who), slog.String("what", line(a.What)),
		slog.Int64("job_id", a.JobID), slog.String("about", a.About), slog.String("why", why))
	if _, known := viewer.may(a.What); known {
		_ = h.reading(ctx, func() error { return h.record(ctx, &a) })
	}
}

// record adds a line to the audit trail, also after its request has ended or its time is up. It logs what keeps it from that.
func (h *Handler) record(ctx context.Context, a *onceqops.Action) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.limits.act)
	defer cancel()
	if a.ID, err = h.ops.RecordAction(ctx, h.db, *a); err != nil {
		h.log.LogAttrs(ctx, slog.LevelError, "onceqweb: the audit trail lacks a line", slog.Any("action", *a), slog.Any("error", err))
	}
	return err
}

// act does what a form asks for.
func (h *Handler) act(w http.ResponseWriter, r *request) {
	values, err := readForm(w, r.Request)
	if err != nil {
		h.fail(w, r, bad("the form cannot be read: %v", err))
		return
	}
	if may, _ := r.viewer.may(values.Get("do")); !may {
		h.refuse(r.Context(), r.viewer, values, "without the right to it")
		h.fail(w, r, notAllowed)
		return
	}
	if values.Get("do") == "put-schedule" && values.Get("shown") == "" {
		v, err := h.preview(r.Context(), r, values)
		if err != nil {
			h.fail(w, r, err)
			return
		}
		h.render(w, r, v)
		return
	}
	a, err := readAction(r.viewer, values)
	if errors.Is(err, errResult) {
		h.render(w, r, again(values, err))
		return
	}
	if err != nil {
		h.fail(w, r, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), manyLimit)
	defer cancel()
	to, err := h.do(ctx, a)
	h.forget()
	err = h.hide(err)
	h.log.LogAttrs(ctx, slog.LevelInfo, "onceqweb: action", slog.String("who", a.Who), slog.String("what", a.What), slog.Int64("job_id", a.JobID),
		slog.String("about", a.About), slog.String("why", a.Why), slog.String("outcome", a.Outcome), slog.Any("error", err))
	if err != nil {
		var status *statusError
		if !errors.As(err, &status) && refused(err) {
			err = &statusError{http.StatusConflict, "Nothing was changed. " + h.said(err)}
		}
		h.fail(w, r, err)
		return
	}
	w.Header().Set("Location", to)
	w.WriteHeader(http.StatusSeeOther)
}

// refused reports whether an error says that the action is not possible as things are, and not that the database failed.
func refused(err error) bool {
	var invalid *onceq.InvalidError
	if drivers(err) {
		return false
	}
	for _, e := range []error{onceq.ErrHeld, onceq.ErrDuplicate, onceqops.ErrUnfinished, onceq.ErrKeyUnsettled} {
		if errors.Is(err, e) {
			return true
		}
	}
	return errors.As(err, &invalid) || strings.HasPrefix(err.Error(), ofSchedule)
}

// ofSchedule begins what onceqcron says of a schedule whose job is refused. It ends with what the application says of that.
const ofSchedule = "onceqcron: schedule "

// said is the text of an error that hide has returned, as Config.Mask leaves what may be the application's own.
func (h *Handler) said(err error) string {
	text := err.Error()
	if strings.HasPrefix(text, ofSchedule) {
		text = h.cfg.Mask("", "error", text)
	}
	return text
}

// errResult is an effect's result that is not JSON.
var errResult = bad(`the result is not JSON; a text needs quotes: "ch_123"`)

// readResult reads the result of what happened. Without one it is nil.
func readResult(values url.Values) (any, error) {
	text := strings.TrimSpace(values.Get("result"))
	if text == "" || values.Get("decision") != "applied" {
		return nil, nil
	}
	if !json.Valid([]byte(text)) {
		return nil, errResult
	}
	return json.RawMessage(text), nil
}

// again shows the form for a decision once more, with what was written and what is wrong with it.
func again(values url.Values, wrong error) *view {
	data := dict("do", values.Get("do"), "wrong", sentence(wrong.Error()))
	for _, name := range []string{"id", "effect", "class", "scope", "key", "queue", "kind", "why", "result"} {
		data[name] = values.Get(name)
	}
	title := "What happened to the effects?"
	var rest [][2]string // what else the search for many chose
	switch values.Get("do") {
	case "resolve":
		title = fmt.Sprintf("What happened to “%s” of job %s?", values.Get("effect"), values.Get("id"))
	case "resolve-key":
		title = fmt.Sprintf("What happened under key “%s”?", values.Get("key"))
	default:
		for _, name := range []string{"scope", "group", "from", "before", "ids"} {
			for _, value := range values[name] {
				rest = append(rest, [2]string{name, value})
			}
		}
	}
	data["rest"] = rest
	return &view{Template: "again", Title: title, Status: http.StatusBadRequest, Data: data}
}

// readAction reads a form. What is wrong with it is said before anything is done.
func readAction(viewer Viewer, values url.Values) (a *asked, err error) {
	a = &asked{values: values}
	a.Who, a.What = viewer.Name, values.Get("do")
	if a.Why, err = field(values, "why"); err != nil {
		return nil, err
	}
	if a.JobID, err = number(values, "id"); err != nil {
		return nil, err
	}
	if a.effect, err = field(values, "effect"); err != nil {
		return nil, err
	}
	if a.to, err = field(values, "to"); err != nil {
		return nil, err
	}
	why := false
	switch a.What {
	case "move", "move-many":
		why = true
		if a.to == "" {
			return nil, bad("the name of the queue is missing to which it goes")
		}
		if a.What == "move" && a.JobID == 0 {
			return nil, bad("a job's id is missing")
		}
	case "cancel", "retry", "redrive", "discard", "cancel-group":
		why = a.What == "discard" || a.What == "cancel-group"
		if a.JobID == 0 {
			return nil, bad("a job's id is missing")
		}
	case "resolve", "resolve-key", "resolve-many":
		why = true
		a.decision = values.Get("decision")
		if _, ok := decisions[a.decision]; !ok {
			return nil, bad("choose what is true: it happened, it did not, or ask again")
		}
		if a.result, err = readResult(values); err != nil {
			return nil, err
		}
		switch {
		case a.What == "resolve" && (a.JobID == 0 || a.effect == ""):
			return nil, bad("a job's id, or the name of its effect, is missing")
		case a.What == "resolve-key" && values.Get("key") == "":
			return nil, bad("a key is missing")
		}
	case "pause-queue", "resume-queue", "pause-kind", "resume-kind", "pause-limit", "resume-limit":
		why = strings.HasPrefix(a.What, "pause")
		if a.About, err = field(values, "name"); err != nil || a.About == "" {
			return nil, bad("the name of a queue, a kind or a limit is missing")
		}
		if text := strings.TrimSpace(values.Get("for")); text != "" {
			if a.pause, err = time.ParseDuration(text); err != nil {
				return nil, bad("for is not a time such as 10m or 24h")
			}
		}
	case "lane-limit", "remove-lane-limit":
		why = true
		if a.About, err = field(values, "name"); err != nil || strings.Index(a.About, "/") < 1 {
			return nil, bad("the name of a lane is missing: its family, a slash and its name, or nothing behind the slash for the whole family")
		}
		if a.What == "remove-lane-limit" {
			break
		}
		if _, err = strconv.ParseUint(strings.TrimSpace(values.Get("n")), 10, 31); err != nil {
			return nil, bad("the limit is not a number")
		}
	case "limit", "remove-limit":
		why = true
		if a.About, a.limit, err = readShared(values); err != nil {
			return nil, err
		}
	case "backfill":
		why = true
		if a.About, _, a.until, err = readBackfill(values); err != nil {
			return nil, err
		}
		if a.until.IsZero() {
			return nil, bad("this form lacks what was counted; begin with the schedule's page")
		}
	case "fire", "pause", "resume", "put-schedule", "remove-schedule":
		why = strings.HasSuffix(a.What, "-schedule")
		if a.About, err = field(values, "name"); err != nil || a.About == "" {
			return nil, bad("a schedule's name is missing")
		}
	default:
		if !slices.ContainsFunc(bulks, func(b bulk) bool { return b.Do == a.What }) {
			return nil, bad("there is no such action")
		}
		why = true
	}
	if why && a.Why == "" {
		return nil, bad("say why: it goes into the audit trail, for whoever looks at this next")
	}
	if number := values.Get("count"); a.What == "discard-many" && values.Get("after") != "" && (number == "" || strings.ReplaceAll(strings.TrimSpace(values.Get("typed")), ",", "") != number) {
		return nil, bad("type the number %s to say that so many are discarded", number)
	}
	if strings.HasSuffix(a.What, "-many") {
		if a.filter, err = readFilter(values); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// within runs fn in a transaction. Should this process freeze in it, the server ends it.
func (h *Handler) within(ctx context.Context, fn func(pgx.Tx) error) error {
	const limits = `
select pg_catalog.set_config('statement_timeout', '5s', true), pg_catalog.set_config('lock_timeout', '3s', true), pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)`
	return pgx.BeginTxFunc(ctx, h.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, limits); err != nil {
			return err
		}
		return fn(tx)
	})
}

// do does it, writes the audit trail, and returns where to go from there.
func (h *Handler) do(ctx context.Context, a *asked) (to string, err error) {
	if strings.HasSuffix(a.What, "-many") || a.What == "cancel-group" {
		return h.many(ctx, a)
	}
	ctx, cancel := context.WithTimeout(ctx, h.limits.act)
	defer cancel()
	// The action and its line in the audit trail happen together.
	err = h.within(ctx, func(tx pgx.Tx) (err error) {
		if to, err = h.one(ctx, tx, a); err != nil {
			return err
		}
		a.ID, err = h.ops.RecordAction(ctx, tx, a.Action)
		return err
	})
	if err != nil {
		err = h.hide(err)
		a.Outcome = "refused: " + h.whyNot(err)
		if answered := (*pgconn.PgError)(nil); a.ID != 0 && !errors.As(err, &answered) { // the commit was sent, and has no answer
			a.Outcome = "not known: " + h.whyNot(err) + "; if it happened, a line of its own says so"
			err = &statusError{http.StatusServiceUnavailable, "The database did not answer, and it is not known whether this happened. If it did, it is in the audit trail. " + sentence(err.Error())}
		}
		_ = h.record(ctx, &a.Action)
		return "", err
	}
	return to + "done=" + strconv.FormatInt(a.ID, 10), nil
}

// whyNot is what the audit trail says of an error that hide has returned.
func (h *Handler) whyNot(err error) string {
	var answered *pgconn.PgError
	switch stopped := errors.As(err, &answered) && (answered.Code == "57014" || answered.Code == "55P03"); { // statement_timeout, lock_timeout
	case errors.Is(err, context.Canceled):
		return "the client went away"
	case stopped, errors.Is(err, context.DeadlineExceeded):
		return "its time was up; " + err.Error()
	}
	return line(h.said(err))
}

// elsewhere is the outcome for a schedule that is in another process's code.
const elsewhere = "a worker that has the schedule in its code is asked to do it; the job says what became of that"

// one does an action on one job, one key or one schedule, inside a transaction, and sets a.Outcome.
func (h *Handler) one(ctx context.Context, tx pgx.Tx, a *asked) (to string, err error) {
	to = "./job?id=" + strconv.FormatInt(a.JobID, 10) + "&"
	state := func(s onceq.State, err error) error {
		a.Outcome = "the job is " + s.String()
		return err
	}
	switch a.What {
	case "cancel":
		s, err := h.q.Cancel(ctx, tx, a.JobID)
		if a.Outcome = "the job is " + s.String(); err == nil && s == onceq.StateRunning {
			a.Outcome = "the job runs, and its worker is asked to end it"
		}
		return to, err
	case "retry":
		return to, state(h.ops.Retry(ctx, tx, a.JobID))
	case "redrive":
		return to, state(h.ops.Redrive(ctx, tx, a.JobID))
	case "move":
		moved, err := h.ops.Move(ctx, tx, a.JobID, a.to)
		a.About = fmt.Sprintf("to queue %q", a.to)
		if a.Outcome = "the job is in that queue"; err == nil && !moved {
			err = &statusError{http.StatusConflict, "Nothing was changed: the job is in that queue already, it is finished, or a worker has it, or had it until its lease ran out."}
		}
		return to, err
	case "discard":
		a.Outcome = "the job is gone"
		return to, h.ops.Discard(ctx, tx, a.JobID)
	case "resolve":
		decision := decisions[a.decision]
		a.About = fmt.Sprintf("effect %q: %s", a.effect, decision.words)
		before, err := h.q.Get(ctx, tx, a.JobID)
		if err != nil && !errors.Is(err, onceq.ErrNotFound) {
			return "", err
		}
		if err := h.ops.Resolve(ctx, tx, a.JobID, a.effect, decision.resolve(a.result)); err != nil {
			return "", err
		}
		if a.decision == "ask" { // the policy decides in the job's next run, so that run comes now
			switch before.State {
			case onceq.StateDead, onceq.StateCancelled:
				return to, state(h.ops.Redrive(ctx, tx, a.JobID))
			case onceq.StateDelayed, onceq.StateRetrying:
				return to, state(h.ops.Retry(ctx, tx, a.JobID))
			}
		}
		after, err := h.q.Get(ctx, tx, a.JobID)
		if errors.Is(err, onceq.ErrNotFound) {
			a.Outcome = "the job is not there any more"
			return to, nil
		}
		return to, state(after.State, err)
	case "resolve-key":
		return h.key(ctx, tx, a)
	case "pause-queue", "pause-kind", "pause-limit", "resume-queue", "resume-kind", "resume-limit":
		return "./?", h.pause(ctx, tx, a)
	case "lane-limit", "remove-lane-limit":
		return "./lanes?", h.lane(ctx, tx, a)
	case "limit", "remove-limit":
		return "./lanes?", h.limit(ctx, tx, a)
	}
	return h.onSchedule(ctx, tx, a)
}

// pause pauses or resumes a queue or a kind.
func (h *Handler) pause(ctx context.Context, tx pgx.Tx, a *asked) (err error) {
	name, was := a.About, true
	p := onceq.Pause{For: a.pause, Note: a.Who + ": " + a.Why}
	do, what, _ := strings.Cut(a.What, "-")
	switch what {
	case "queue":
		p.Queue = name
	case "kind":
		p.Kind = name
	default:
		p.Limit = name
	}
	if a.Outcome = "workers take its jobs again"; do == "resume" {
		was, err = h.q.Resume(ctx, tx, p)
	} else if err, a.Outcome = h.q.Pause(ctx, tx, p), "no worker takes its jobs until somebody resumes it"; p.For > 0 {
		a.Outcome = fmt.Sprintf("no worker takes its jobs for %s, or until somebody resumes it", age(p.For))
	}
	if !was && err == nil {
		a.Outcome = "it was not paused"
	}
	a.About = fmt.Sprintf("%s %q", what, name)
	return err
}

// lane sets or removes the limit of a lane, or of a family.
func (h *Handler) lane(ctx context.Context, tx pgx.Tx, a *asked) error {
	family, name, _ := strings.Cut(a.About, "/")
	n, _ := strconv.Atoi(strings.TrimSpace(a.values.Get("n"))) // readAction has checked it
	was, err := h.q.LaneLimit(ctx, tx, family, name)
	if err != nil {
		return err
	}
	a.About = fmt.Sprintf("lane %q", a.About)
	if name == "" {
		a.About = fmt.Sprintf("the lanes of family %q", family)
	}
	if a.What == "lane-limit" {
		err = h.q.SetLaneLimit(ctx, tx, family, name, n)
	} else if err = h.q.RemoveLaneLimit(ctx, tx, family, name); err == nil {
		n, err = h.q.LaneLimit(ctx, tx, family, name)
	}
	a.Outcome = fmt.Sprintf("the limit is %d; it was %d", n, was)
	return err
}

// limit sets or removes a limit.
func (h *Handler) limit(ctx context.Context, tx pgx.Tx, a *asked) error {
	name := a.About
	a.About = fmt.Sprintf("limit %q", name)
	was, err := h.ops.Limit(ctx, tx, name)
	if err != nil {
		return err
	}
	if a.What == "limit" {
		err = h.q.SetLimit(ctx, tx, name, a.limit)
	} else {
		err = h.q.RemoveLimit(ctx, tx, name)
	}
	if err != nil {
		return err
	}
	now, err := h.ops.Limit(ctx, tx, name)
	a.Outcome = plain(fmt.Sprintf("it is %s; it was %s", now.Limit, was.Limit))
	return err
}

// key settles a key outside jobs.
func (h *Handler) key(ctx context.Context, tx pgx.Tx, a *asked) (to string, err error) {
	key, scope := a.values.Get("key"), a.values.Get("scope")
	spec := onceq.FenceSpec{Scope: scope, Key: key}
	switch a.values.Get("class") {
	case onceq.ClassApplication.String():
		spec.Class = onceq.ClassApplication
	case onceq.ClassRequest.String():
		spec.Class = onceq.ClassRequest
	default:
		return "", bad("class is application or request; a job's key is settled through its effects")
	}
	fence, err := h.q.Fence(spec)
	if err != nil {
		return "", err
	}
	decision := decisions[a.decision]
	a.About = fmt.Sprintf("%s key %q in scope %q: %s", spec.Class, key, scope, decision.words)
	a.Outcome = "settled"
	return "./keys?" + url.Values{"key": {key}, "scope": {scope}}.Encode() + "&", fence.Resolve(ctx, tx, decision.resolve(a.result))
}

// readBackfill reads the form of a schedule's back-fill; to is zero for now.
func readBackfill(values url.Values) (name string, from, to time.Time, err error) {
	if name, err = field(values, "name"); err != nil || name == "" {
		return "", from, to, bad("a schedule's name is missing")
	}
	if from, err = moment(values, "from"); err == nil {
		to, err = moment(values, "to")
	}
	switch {
	case err != nil:
	case from.IsZero():
		err = bad("from when? The first time is missing")
	case !to.IsZero() && to.Before(from):
		err = bad("the last time is before the first")
	}
	return name, from, to, err
}

// many does an action on a whole group, or on all jobs that were counted, at most maxMany, some hundred in each transaction. A line of the audit
// trail says that it began, and another one how it ended.
func (h *Handler) many(ctx context.Context, a *asked) (to string, err error) {
	if a.What != "cancel-group" && a.filter.After == 0 {
		return "", bad("this form lacks what was counted; begin with the search")
	}
	a.filter.Limit, a.filter.All = maxMany, true // what was counted was shown
	var run func() (string, error)
	if a.What == "cancel-group" {
		to = "./group?id=" + strconv.FormatInt(a.JobID, 10) + "&"
		run = func() (string, error) {
			n, asked, err := h.ops.CancelGroup(ctx, h.db, a.JobID)
			return fmt.Sprintf("%d jobs cancelled; %d run and were asked to end", n, asked), err
		}
	} else if a.What == "resolve-many" {
		decision := decisions[a.decision]
		a.filter.States = []onceq.State{onceq.StateHeld}
		a.About = fmt.Sprintf("effect %q of %s: %s", a.effect, inWords(a.filter), decision.words)
		to = "./effects?"
		run = func() (string, error) {
			n, again, err := h.ops.ResolveMany(ctx, h.db, a.filter, a.effect, decision.resolve(a.result))
			return fmt.Sprintf("%d effects settled, %d jobs run again", n, again), err
		}
	} else {
		b := bulks[slices.IndexFunc(bulks, func(b bulk) bool { return b.Do == a.What })]
		if a.filter.States = b.restrict(a.filter.States); a.filter.States == nil {
			return "", bad("%s is not possible in these states", b.Button)
		}
		if !b.narrow(a.filter) {
			return "", bad("choose a queue, a kind, a scope or single jobs first; otherwise all of them would be taken")
		}
		if a.About = inWords(a.filter); b.to {
			a.About += fmt.Sprintf(", to queue %q", a.to)
		}
		run = func() (string, error) { return b.run(h, ctx, a.filter, a.to) }
		to = changed(a)
	}
	if len(a.filter.IDs) > 0 {
		a.About = line(fmt.Sprintf("%s: %v", a.About, a.filter.IDs))
	}
	a.Outcome = "begins"
	if err := h.record(ctx, &a.Action); err != nil {
		return "", err
	}
	a.Outcome, err = run()
	if err != nil {
		a.Outcome += "; then: " + h.whyNot(h.hide(err))
	}
	if err := h.record(ctx, &a.Action); err != nil {
		return "", err
	}
	return to + "done=" + strconv.FormatInt(a.ID, 10), nil
}

// changed is the search for the jobs that an action on many has changed: single ones in whatever state, or those of the search in the
// state that they are in now.
func changed(a *asked) string {
	f := a.filter
	if f.States = nil; f.IDs == nil && then[a.What] != 0 {
		f.States = []onceq.State{then[a.What]}
	}
	if a.to != "" && f.Queue != "" {
		f.Queue = a.to
	}
	return "./jobs?" + filterValues(f).Encode() + "&"
}
