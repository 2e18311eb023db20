package onceqweb

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
)

// listSchedules reads all schedules.
func (h *Handler) listSchedules(ctx context.Context) ([]onceqcron.Info, error) {
	return h.schedules.get(ctx, h, struct{}{}, time.Second, func(ctx context.Context) ([]onceqcron.Info, error) { return h.cron.List(ctx, h.db) })
}

// schedules shows all schedules, and a form for a new one.
func schedules(h *Handler, ctx context.Context, r *request) (*view, error) {
	d := struct {
		List []onceqcron.Info
		Form *scheduleForm
	}{}
	var err error
	if d.List, err = h.listSchedules(ctx); err != nil {
		return nil, err
	}
	if h.writes(r.viewer) {
		d.Form = h.names(&scheduleForm{New: true, Missed: "latest 24h"})
	}
	return &view{Template: "schedules", Title: "Schedules", Data: d}, nil
}

// schedule shows a schedule and its ledger.
func schedule(h *Handler, ctx context.Context, r *request) (*view, error) {
	name, err := field(r.values, "name")
	if err != nil {
		return nil, err
	}
	before := h.now().AddDate(1000, 0, 0)
	if text := r.values.Get("before"); text != "" {
		if before, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return nil, bad("before is not a time")
		}
	}
	d := struct {
		Info   onceqcron.Info
		Coming []tick
		Ticks  []onceqcron.Done
		Next   string
		Form   *scheduleForm
	}{}
	list, err := h.listSchedules(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(list, func(i onceqcron.Info) bool { return i.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("%w: %q", onceqcron.ErrNotFound, name)
	}
	d.Info = list[i]
	var one onceqcron.Schedule
	if err = h.reading(ctx, func() (err error) {
		if h.writes(r.viewer) && !d.Info.Code {
			if one, err = h.cron.Get(ctx, h.db, name); err != nil {
				return err
			}
		}
		d.Ticks, err = h.cron.Ticks(ctx, h.db, name, before, pageSize)
		return err
	}); err != nil {
		return nil, err
	}
	if d.Info.Paused.IsZero() && d.Info.Zone != "" {
		d.Coming, _ = ticks(d.Info.Spec, d.Info.Zone, d.Info.Next, d.Info.Next)
	}
	if one.Name != "" {
		d.Form = h.names(h.formOf(one, r.viewer))
	}
	for i, tick := range d.Ticks {
		if tick.Outcome == "refused" {
			d.Ticks[i].Note = h.cfg.Mask("", "error", tick.Note)
		}
	}
	if len(d.Ticks) == pageSize {
		d.Next = "./schedule?" + url.Values{"name": {name}, "before": {d.Ticks[pageSize-1].At.Format(time.RFC3339Nano)}}.Encode()
	}
	return &view{Template: "schedule", Title: "Schedule " + name, Data: d}, nil
}

// tick is a time at which a schedule will be due.
type tick struct {
	At    time.Time
	There string // the same in the schedule's zone; empty for UTC
}

// shownTicks is how many ticks are shown that are still to come.
const shownTicks = 5

// ticks are the next ones of a timetable: first, if it is known, and those after a time.
func ticks(spec, zone string, first, after time.Time) (coming []tick, err error) {
	t, err := onceqcron.Parse(spec, zone)
	if err != nil {
		return nil, err
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return nil, err
	}
	if first.IsZero() {
		first = t.Next(after)
	}
	for at := first; !at.IsZero() && len(coming) < shownTicks; at = t.Next(at) {
		one := tick{At: at}
		if zone != "" && zone != "UTC" {
			one.There = at.In(loc).Format("Mon 2006-01-02 15:04:05 -07:00")
		}
		coming = append(coming, one)
	}
	return coming, nil
}

// scheduleForm is the form of a schedule, as somebody has filled it in or as the table has it.
type scheduleForm struct {
	New                       bool
	Name, Spec, Zone, Missed  string
	Kind, Queue, Payload      string
	Hidden                    bool // its payload stays as it is, because the viewer may not see it
	Why, Wrong                string
	Kinds, Queues             []string // to choose from
	Ticks                     []tick   // that it would have; none where the form only asks
	Overdue, Unknown, Counted bool     // it is overdue now; no worker has a handler for the kind; the ticks count from when it is saved
}

// writes reports whether a viewer may create and change schedules here.
func (h *Handler) writes(viewer Viewer) bool { return h.cfg.Schedules != nil && viewer.Schedule }

// names adds what the form can choose from.
func (h *Handler) names(f *scheduleForm) *scheduleForm {
	if good := h.good.Load(); good != nil {
		f.Queues, f.Kinds = good.state.names()
	}
	return f
}

// formOf is the form of a schedule of the table. Who may not see its payload whole cannot change it, either: a form with what Mask leaves would
// write that.
func (h *Handler) formOf(one onceqcron.Schedule, viewer Viewer) *scheduleForm {
	f := &scheduleForm{Name: one.Name, Spec: one.Spec, Zone: one.Zone, Missed: missedWords(one.Missed.String()), Kind: one.Job.Kind, Queue: one.Job.Queue}
	if f.Hidden = !viewer.Payloads || h.masks; !f.Hidden {
		payload, _ := one.Job.Payload.(json.RawMessage) // as Get has read it
		f.Payload = string(payload)
	}
	return f
}

// missedWords is a rule for missed ticks as the form has it. The table has it as all 7, or latest 24h0m0s.
func missedWords(text string) string {
	if text == onceqcron.Skip().String() {
		return "skip"
	}
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}

// readMissed reads what missedWords writes.
func readMissed(text string) (m onceqcron.Missed, err error) {
	word, value, _ := strings.Cut(strings.TrimSpace(text), " ")
	wrong := bad("missed ticks: latest with a time, as in latest 24h; all with a number, as in all 7; or skip")
	switch word {
	case "skip":
		return onceqcron.Skip(), nil
	case "latest":
		within, err := time.ParseDuration(value)
		if err != nil {
			return m, wrong
		}
		return onceqcron.Latest(within), nil
	case "all":
		n, err := strconv.Atoi(value)
		if err != nil {
			return m, wrong
		}
		return onceqcron.All(n), nil
	}
	return m, wrong
}

// readSchedule reads the form of a schedule into one that is new, or that the table has.
func readSchedule(values url.Values, one *onceqcron.Schedule) (err error) {
	var errs [6]error
	one.Name, errs[0] = field(values, "name")
	one.Spec, errs[1] = field(values, "spec")
	one.Zone, errs[2] = field(values, "zone")
	one.Job.Kind, errs[3] = field(values, "kind")
	one.Job.Queue, errs[4] = field(values, "queue")
	one.Missed, errs[5] = readMissed(values.Get("missed"))
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	if payload := strings.TrimSpace(values.Get("payload")); payload != "" {
		if !json.Valid([]byte(payload)) {
			return bad(`the payload is not JSON; a text needs quotes: "a text"`)
		}
		one.Job.Payload = json.RawMessage(payload)
	} else if values.Has("payload") {
		one.Job.Payload = nil
	}
	if _, err := onceqcron.Parse(one.Spec, one.Zone); err != nil {
		return bad("%s", sentence(unprefixed(err)))
	}
	return nil
}

// putSchedule writes a schedule as its form has it, inside a transaction, and says what it was before.
func (h *Handler) putSchedule(ctx context.Context, tx pgx.Tx, values url.Values) (one onceqcron.Schedule, was string, err error) {
	if h.cfg.Schedules == nil {
		return one, "", bad("this page cannot write schedules: its configuration has no Schedules")
	}
	name, err := field(values, "name")
	if err != nil || name == "" {
		return one, "", bad("a schedule's name is missing")
	}
	one, err = h.cron.Get(ctx, tx, name)
	switch {
	case values.Get("new") == "":
		was = fmt.Sprintf("; it was %s", timetable(one))
	case err == nil, errors.Is(err, onceqcron.ErrElsewhere):
		return one, "", bad("there is a schedule of this name already: choose another one, or change that one on its page")
	case errors.Is(err, onceqcron.ErrNotFound):
		err = nil
	}
	if err != nil {
		return one, "", err
	}
	if err := readSchedule(values, &one); err != nil {
		return one, "", err
	}
	return one, was, h.cron.Put(ctx, tx, one)
}

// timetable says in words when a schedule is due.
func timetable(one onceqcron.Schedule) string {
	return fmt.Sprintf("%s in %s, missed ticks: %s", one.Spec, cmp.Or(one.Zone, "UTC"), missedWords(one.Missed.String()))
}

// errSeen ends a transaction that only tries whether a schedule can be written.
var errSeen = errors.New("seen")

// preview shows the next ticks that a schedule would have, or the form once more with what is wrong. Nothing is written: the transaction that
// tries it is rolled back.
func (h *Handler) preview(ctx context.Context, r *request, values url.Values) (*view, error) {
	ctx, cancel := context.WithTimeout(ctx, h.limits.act)
	defer cancel()
	f := &scheduleForm{New: values.Get("new") != "", Hidden: !values.Has("payload")}
	for name, to := range map[string]*string{"name": &f.Name, "spec": &f.Spec, "zone": &f.Zone, "missed": &f.Missed, "kind": &f.Kind,
		"queue": &f.Queue, "payload": &f.Payload, "why": &f.Why} {
		*to = strings.ToValidUTF8(strings.TrimSpace(values.Get(name)), "")
	}
	page := &view{Template: "preview", Title: "A new schedule", Data: h.names(f)}
	if !f.New {
		page.Title = "Change schedule " + f.Name
	}
	now := h.now()
	var was time.Time
	err := h.reading(ctx, func() error {
		return h.within(ctx, func(tx pgx.Tx) error {
			list, err := h.cron.List(ctx, tx)
			if err != nil {
				return err
			}
			one, _, err := h.putSchedule(ctx, tx, values)
			if err != nil {
				return err
			}
			i := slices.IndexFunc(list, func(i onceqcron.Info) bool { return i.Name == one.Name })
			first := time.Time{}
			if i >= 0 {
				was = list[i].Next
				if list[i].Spec == one.Spec && (list[i].Zone == one.Zone || one.Zone == "") {
					first = list[i].Next
				}
			}
			f.Counted = first.IsZero() && strings.HasPrefix(one.Spec, "@every")
			if f.Ticks, err = ticks(one.Spec, one.Zone, first, now); err != nil {
				return err
			}
			return errSeen
		})
	})
	if !errors.Is(err, errSeen) {
		err = h.hide(err)
		var status *statusError
		if !errors.As(err, &status) && !refused(err) {
			return nil, err
		}
		f.Wrong, page.Status = sentence(strings.TrimPrefix(h.said(err), "onceqcron: ")), http.StatusBadRequest
		return page, nil
	}
	f.Overdue = !was.IsZero() && was.Before(now)
	st, _ := h.readState(ctx)
	f.Unknown = !slices.ContainsFunc(st.Workers, func(w onceqops.WorkerInfo) bool { return !w.Stale && slices.Contains(w.Kinds, f.Kind) })
	return page, nil
}

// onSchedule does an action on a schedule inside a transaction.
func (h *Handler) onSchedule(ctx context.Context, tx pgx.Tx, a *asked) (to string, err error) {
	name := a.About
	to = "./schedule?name=" + url.QueryEscape(name) + "&"
	switch a.What {
	case "put-schedule":
		var one onceqcron.Schedule
		var was string
		if one, was, err = h.putSchedule(ctx, tx, a.values); err == nil {
			a.Outcome = fmt.Sprintf("it is %s, kind %q%s", timetable(one), one.Job.Kind, was)
		}
	case "remove-schedule":
		to, a.Outcome = "./schedules?", "it is gone"
		if h.cfg.Schedules == nil {
			return "", bad("this page cannot remove schedules: its configuration has no Schedules")
		}
		if _, err = h.cron.Get(ctx, tx, name); err == nil { // one of the code would come back
			err = h.cron.Remove(ctx, tx, name)
		}
	case "fire":
		a.JobID, err = h.cron.Fire(ctx, tx, name)
		if a.Outcome = fmt.Sprintf("job %d is enqueued", a.JobID); errors.Is(err, onceqcron.ErrElsewhere) {
			a.JobID, err = h.cron.Ask(ctx, tx, name, onceqcron.AskFire())
			a.Outcome = elsewhere
		}
	case "backfill":
		var n int
		_, from, _, _ := readBackfill(a.values) // readAction has checked it
		n, err = h.cron.Backfill(ctx, tx, name, from, a.until)
		if a.Outcome = fmt.Sprintf("%d jobs are enqueued", n); errors.Is(err, onceqcron.ErrElsewhere) {
			a.JobID, err = h.cron.Ask(ctx, tx, name, onceqcron.AskBackfill(from, a.until))
			a.Outcome = elsewhere
		}
	case "pause":
		a.Outcome, err = "it does not fire until somebody resumes it", h.cron.Pause(ctx, tx, name)
	case "resume":
		if a.Outcome, err = "it fires from its next time on", h.cron.Resume(ctx, tx, name); errors.Is(err, onceqcron.ErrElsewhere) {
			a.JobID, err = h.cron.Ask(ctx, tx, name, onceqcron.AskResume())
			a.Outcome = elsewhere
		}
	}
	a.About = "schedule " + strconv.Quote(name)
	return to, err
}
