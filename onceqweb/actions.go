package onceqweb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
)

// bulk is an action on all jobs of a search.
type bulk struct {
	Do, Button string
	allowed    []onceq.State
	usual      []onceq.State // without a choice
	run        func(h *Handler, ctx context.Context, f onceq.Filter) (outcome string, err error)
}

var bulks = []bulk{
	{"redrive-many", "Redrive", []onceq.State{onceq.StateDead, onceq.StateCancelled}, []onceq.State{onceq.StateDead},
		func(h *Handler, ctx context.Context, f onceq.Filter) (string, error) {
			n, taken, err := h.q.RedriveMany(ctx, h.db, f)
			text := fmt.Sprintf("%d run again", n)
			if taken > 0 {
				text += fmt.Sprintf("; %d stay, because a later job has their key", taken)
			}
			return text, err
		}},
	{"cancel-many", "Cancel", []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning, onceq.StateRetrying}, nil,
		func(h *Handler, ctx context.Context, f onceq.Filter) (string, error) {
			n, asked, err := h.q.CancelMany(ctx, h.db, f)
			text := fmt.Sprintf("%d cancelled", n)
			if asked > 0 {
				text += fmt.Sprintf("; %d run and were asked to end", asked)
			}
			return text, err
		}},
	{"discard-many", "Discard", []onceq.State{onceq.StateDead, onceq.StateCancelled, onceq.StateCompleted, onceq.StateHeld}, []onceq.State{onceq.StateDead},
		func(h *Handler, ctx context.Context, f onceq.Filter) (string, error) {
			n, err := h.q.DiscardMany(ctx, h.db, f)
			return fmt.Sprintf("%d discarded", n), err
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
	onceq.Action
	filter   onceq.Filter
	effect   string
	decision string
	result   any
	values   url.Values
}

// confirm shows how many jobs an action takes, or what it deletes, before it does.
func confirm(h *Handler, ctx context.Context, r *request) (*view, error) {
	if !r.viewer.Act {
		return nil, &statusError{http.StatusForbidden, "You may read this page and not act."}
	}
	d := struct {
		Do, Words, Button, Warning string
		Count                      int
		More                       bool // counting stopped
		Many                       bool
		Hidden                     [][2]string
		Back                       string
	}{Do: r.values.Get("do")}
	title := "Are you sure?"
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
	f, err := readFilter(r.values)
	if err != nil {
		return nil, err
	}
	d.Many = true
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
		d.Hidden = append(d.Hidden, [2]string{"decision", r.values.Get("decision")}, [2]string{"effect", name}, [2]string{"result", r.values.Get("result")})
		d.Back = "./effects"
	} else {
		i := slices.IndexFunc(bulks, func(b bulk) bool { return b.Do == d.Do })
		if i < 0 {
			return nil, bad("there is no such action")
		}
		b := bulks[i]
		if f.States = b.restrict(f.States); f.States == nil {
			return nil, bad("%s is not possible in these states", b.Button)
		}
		if d.Do == "cancel-many" && f.Queue == "" && f.Kind == "" && f.Scope == "" && f.IDs == nil {
			return nil, bad("choose a queue, a kind, a scope or single jobs first; otherwise everything would be cancelled")
		}
		d.Words, d.Button = fmt.Sprintf("%s %s.", b.Button, inWords(f)), b.Button
		if d.Do == "discard-many" {
			d.Warning = "What is known of them is deleted, and their keys are free at once. If an effect may have happened and the key comes again, it happens a second time."
		}
		d.Back = "./jobs?" + filterValues(f).Encode()
	}
	// Jobs that come after this are not among those that were counted.
	f.After, f.Limit = 0, 1
	var newest []onceq.JobInfo
	err = h.reading(ctx, func() (err error) {
		if newest, err = h.q.List(ctx, h.db, f); err != nil || len(newest) == 0 {
			return err
		}
		f.After, f.Limit = newest[0].ID+1, maxMany
		d.Count, err = h.q.Count(ctx, h.db, f)
		d.More = d.Count >= maxMany
		return err
	})
	if err != nil {
		return nil, err
	}
	for name, values := range filterValues(f) {
		for _, value := range values {
			d.Hidden = append(d.Hidden, [2]string{name, value})
		}
	}
	if len(newest) > 0 {
		d.Hidden = append(d.Hidden, [2]string{"after", strconv.FormatInt(f.After, 10)})
	}
	slices.SortFunc(d.Hidden, func(a, b [2]string) int { return strings.Compare(a[0]+a[1], b[0]+b[1]) })
	return &view{Template: "confirm", Title: title, Data: d}, nil
}

// act does what a form asks for.
func (h *Handler) act(w http.ResponseWriter, r *request) {
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	if err := r.ParseForm(); err != nil {
		h.fail(w, r, bad("the form cannot be read: %v", err))
		return
	}
	values := r.PostForm
	if !r.viewer.Act {
		h.log.LogAttrs(r.Context(), slog.LevelWarn, "onceqweb: refused to act", slog.String("who", r.viewer.Name), slog.String("what", values.Get("do")))
		h.fail(w, r, &statusError{http.StatusForbidden, "You may read this page and not act."})
		return
	}
	a, err := readAction(r.viewer, values)
	if err != nil {
		h.fail(w, r, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), manyLimit)
	defer cancel()
	to, err := h.do(ctx, a)
	h.forget()
	h.log.LogAttrs(ctx, slog.LevelInfo, "onceqweb: action", slog.String("who", a.Who), slog.String("what", a.What), slog.Int64("job_id", a.JobID),
		slog.String("about", a.About), slog.String("why", a.Why), slog.String("outcome", a.Outcome), slog.Any("error", err))
	if err != nil {
		var status *statusError
		if !errors.As(err, &status) && refused(err) {
			err = &statusError{http.StatusConflict, "Nothing was changed. " + err.Error()}
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
	for _, e := range []error{onceq.ErrHeld, onceq.ErrDuplicate, onceq.ErrUnfinished, onceq.ErrKeyUnsettled} {
		if errors.Is(err, e) {
			return true
		}
	}
	return errors.As(err, &invalid) || strings.HasPrefix(err.Error(), "onceqcron: schedule ") // its job is refused
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
	why := false
	switch a.What {
	case "cancel", "retry", "redrive", "discard":
		why = a.What == "discard"
		if a.JobID == 0 {
			return nil, bad("a job's id is missing")
		}
	case "resolve", "resolve-key", "resolve-many":
		why = true
		a.decision = values.Get("decision")
		if _, ok := decisions[a.decision]; !ok {
			return nil, bad("choose what is true: it happened, it did not, or ask again")
		}
		if text := strings.TrimSpace(values.Get("result")); text != "" && a.decision == "applied" {
			if !json.Valid([]byte(text)) {
				return nil, bad("the result is not JSON; a text needs quotes: \"ch_123\"")
			}
			a.result = json.RawMessage(text)
		}
		switch {
		case a.What == "resolve" && (a.JobID == 0 || a.effect == ""):
			return nil, bad("a job's id, or the name of its effect, is missing")
		case a.What == "resolve-key" && values.Get("key") == "":
			return nil, bad("a key is missing")
		}
	case "pause-queue", "resume-queue", "pause-kind", "resume-kind":
		why = strings.HasPrefix(a.What, "pause")
		if a.About, err = field(values, "name"); err != nil || a.About == "" {
			return nil, bad("the name of a queue or a kind is missing")
		}
	case "lane-limit":
		why = true
		if a.About, err = field(values, "name"); err != nil || strings.Index(a.About, "/") < 1 {
			return nil, bad("the name of a lane is missing: its family, a slash and its name, or nothing behind the slash for the whole family")
		}
		if _, err = strconv.ParseUint(strings.TrimSpace(values.Get("n")), 10, 31); err != nil {
			return nil, bad("the limit is not a number")
		}
	case "fire", "pause", "resume":
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
	if strings.HasSuffix(a.What, "-many") {
		if a.filter, err = readFilter(values); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// do does it, writes the audit trail, and returns where to go from there.
func (h *Handler) do(ctx context.Context, a *asked) (to string, err error) {
	if strings.HasSuffix(a.What, "-many") {
		return h.many(ctx, a)
	}
	ctx, cancel := context.WithTimeout(ctx, actLimit)
	defer cancel()
	// The action and its line in the audit trail happen together. Should this process freeze in between, the server ends it.
	const limits = `
select set_config('statement_timeout', '5s', true), set_config('lock_timeout', '3s', true), set_config('idle_in_transaction_session_timeout', '5s', true)`
	err = pgx.BeginTxFunc(ctx, h.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) (err error) {
		if _, err = tx.Exec(ctx, limits); err != nil {
			return err
		}
		if to, err = h.one(ctx, tx, a); err != nil {
			return err
		}
		a.ID, err = h.q.RecordAction(ctx, tx, a.Action)
		return err
	})
	if err != nil {
		a.Outcome = "refused: " + line(err.Error())
		if _, recordErr := h.q.RecordAction(ctx, h.db, a.Action); recordErr != nil {
			err = errors.Join(err, recordErr)
		}
		return "", err
	}
	return to + "done=" + strconv.FormatInt(a.ID, 10), nil
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
		return to, state(h.q.Retry(ctx, tx, a.JobID))
	case "redrive":
		return to, state(h.q.Redrive(ctx, tx, a.JobID))
	case "discard":
		a.Outcome = "the job is gone"
		return to, h.q.Discard(ctx, tx, a.JobID)
	case "resolve":
		decision := decisions[a.decision]
		a.About = fmt.Sprintf("effect %q: %s", a.effect, decision.words)
		before, err := h.q.Get(ctx, tx, a.JobID)
		if err != nil && !errors.Is(err, onceq.ErrNotFound) {
			return "", err
		}
		if err := h.q.Resolve(ctx, tx, a.JobID, a.effect, decision.resolve(a.result)); err != nil {
			return "", err
		}
		if a.decision == "ask" { // the policy decides in the job's next run, so that run comes now
			switch before.State {
			case onceq.StateDead, onceq.StateCancelled:
				return to, state(h.q.Redrive(ctx, tx, a.JobID))
			case onceq.StateDelayed, onceq.StateRetrying:
				return to, state(h.q.Retry(ctx, tx, a.JobID))
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
	case "pause-queue", "pause-kind", "resume-queue", "resume-kind":
		return "./?", h.pause(ctx, tx, a)
	case "lane-limit":
		return "./lanes?", h.lane(ctx, tx, a)
	}
	to = "./schedule?name=" + url.QueryEscape(a.About) + "&"
	switch a.What {
	case "fire":
		a.JobID, err = h.cron.Fire(ctx, tx, a.About)
		if a.Outcome = fmt.Sprintf("job %d is enqueued", a.JobID); errors.Is(err, onceqcron.ErrElsewhere) {
			a.JobID, err = h.cron.Ask(ctx, tx, a.About, onceqcron.AskFire())
			a.Outcome = elsewhere
		}
	case "pause":
		a.Outcome, err = "it does not fire until somebody resumes it", h.cron.Pause(ctx, tx, a.About)
	case "resume":
		if a.Outcome, err = "it fires from its next time on", h.cron.Resume(ctx, tx, a.About); errors.Is(err, onceqcron.ErrElsewhere) {
			a.JobID, err = h.cron.Ask(ctx, tx, a.About, onceqcron.AskResume())
			a.Outcome = elsewhere
		}
	}
	a.About = "schedule " + strconv.Quote(a.About)
	return to, err
}

// pause pauses or resumes a queue or a kind.
func (h *Handler) pause(ctx context.Context, tx pgx.Tx, a *asked) (err error) {
	name, was := a.About, true
	a.Outcome = "workers take its jobs again"
	switch note := a.Who + ": " + a.Why; a.What {
	case "pause-queue":
		err, a.Outcome = h.q.PauseQueue(ctx, tx, name, note), "no worker takes its jobs until somebody resumes it"
	case "pause-kind":
		err, a.Outcome = h.q.PauseKind(ctx, tx, name, note), "no worker takes its jobs until somebody resumes it"
	case "resume-queue":
		was, err = h.q.ResumeQueue(ctx, tx, name)
	case "resume-kind":
		was, err = h.q.ResumeKind(ctx, tx, name)
	}
	if !was && err == nil {
		a.Outcome = "it was not paused"
	}
	_, what, _ := strings.Cut(a.What, "-")
	a.About = fmt.Sprintf("%s %q", what, name)
	return err
}

// lane sets the limit of a lane, or of a family.
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
	a.Outcome = fmt.Sprintf("the limit is %d; it was %d", n, was)
	return h.q.SetLaneLimit(ctx, tx, family, name, n)
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

// many does an action on all jobs that were counted, at most maxMany, some hundred in each transaction. A line of the audit trail
// says that it began, and another one how it ended.
func (h *Handler) many(ctx context.Context, a *asked) (to string, err error) {
	after := a.filter.After
	if after == 0 {
		return "", bad("this form lacks what was counted; begin with the search")
	}
	a.filter.Limit, a.filter.All = maxMany, true // what was counted was shown
	var run func() (string, error)
	to = "./jobs?" + filterValues(a.filter).Encode() + "&"
	if a.What == "resolve-many" {
		decision := decisions[a.decision]
		a.filter.States = []onceq.State{onceq.StateHeld}
		a.About = fmt.Sprintf("effect %q of %s: %s", a.effect, inWords(a.filter), decision.words)
		to = "./effects?"
		run = func() (string, error) {
			n, again, err := h.q.ResolveMany(ctx, h.db, a.filter, a.effect, decision.resolve(a.result))
			return fmt.Sprintf("%d effects settled, %d jobs run again", n, again), err
		}
	} else {
		b := bulks[slices.IndexFunc(bulks, func(b bulk) bool { return b.Do == a.What })]
		if a.filter.States = b.restrict(a.filter.States); a.filter.States == nil {
			return "", bad("%s is not possible in these states", b.Button)
		}
		if a.What == "cancel-many" && a.filter.Queue == "" && a.filter.Kind == "" && a.filter.Scope == "" && a.filter.IDs == nil {
			return "", bad("choose a queue, a kind, a scope or single jobs first; otherwise everything would be cancelled")
		}
		a.About = inWords(a.filter)
		run = func() (string, error) { return b.run(h, ctx, a.filter) }
	}
	if len(a.filter.IDs) > 0 {
		a.About = line(fmt.Sprintf("%s: %v", a.About, a.filter.IDs))
	}
	a.Outcome = "begins"
	if _, err := h.q.RecordAction(ctx, h.db, a.Action); err != nil {
		return "", err
	}
	a.Outcome, err = run()
	if err != nil {
		a.Outcome += "; then: " + line(err.Error())
	}
	// The end is written even if the time is up.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), actLimit)
	defer cancel()
	id, recordErr := h.q.RecordAction(end, h.db, a.Action)
	if recordErr != nil {
		return "", errors.Join(err, recordErr)
	}
	return to + "done=" + strconv.FormatInt(id, 10), nil
}
