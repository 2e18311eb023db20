package onceqweb

import (
	"cmp"
	"context"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/onceq/onceq/onceqops"
)

// done is a row of the audit trail: a line, or the two lines of an action on many, which say that it began and how it ended.
type done struct {
	onceqops.Action
	Took time.Duration // from the first of the two lines to the second
	Open bool          // the second is not there
}

// together makes rows of lines, the latest first.
func together(lines []onceqops.Action) (rows []done) {
	type action struct {
		who, what, about, why string
		job                   int64
	}
	began := make(map[action][]int) // where in rows; the latest last
	for _, line := range slices.Backward(lines) {
		key := action{line.Who, line.What, line.About, line.Why, line.JobID}
		row := done{Action: line, Open: line.Outcome == "begins"}
		if open := began[key]; row.Open {
			began[key] = append(open, len(rows))
		} else if len(open) > 0 {
			last := open[len(open)-1]
			began[key], row.Took = open[:len(open)-1], line.At.Sub(rows[last].At)
			rows[last].What = "" // it stands in this one
		}
		rows = append(rows, row)
	}
	rows = slices.DeleteFunc(rows, func(row done) bool { return row.What == "" })
	slices.Reverse(rows)
	return rows
}

// audit shows who did what.
func audit(h *Handler, ctx context.Context, r *request) (*view, error) {
	var f onceqops.ActionFilter
	var errs [4]error
	f.Who, errs[0] = field(r.values, "who")
	f.What, errs[1] = field(r.values, "what")
	f.Since, errs[2] = moment(r.values, "from")
	after, err := number(r.values, "after")
	errs[3] = err
	if err := cmp.Or(errs[:]...); err != nil {
		return nil, err
	}
	chosen := url.Values{}
	for name, value := range map[string]string{"who": f.Who, "what": f.What, "from": r.values.Get("from"), "since": h.since(r.values, &f.Since)} {
		if value != "" {
			chosen.Set(name, value)
		}
	}
	// A page is read with the lines before it and those behind it, which may belong together with its own.
	if f.Limit = 3 * pageSize; after > 0 {
		f.After = after + pageSize
	}
	var lines []onceqops.Action
	if err := h.reading(ctx, func() (err error) { lines, err = h.ops.Actions(ctx, h.db, f); return err }); err != nil {
		return nil, err
	}
	d := struct {
		Rows           []done
		Next, Latest   string
		Times          []tab
		Chips          [][2]string
		Who, What, Day string
		Whos, Whats    []string
		Filtered       bool
	}{Times: times("./audit?", chosen), Chips: chips("./audit?", chosen), Who: f.Who, What: f.What, Day: r.values.Get("from"), Filtered: len(chosen) > 0}
	own := slices.DeleteFunc(slices.Clone(lines), func(a onceqops.Action) bool { return after > 0 && a.ID >= after })
	if len(own) > pageSize {
		v := maps.Clone(chosen)
		v.Set("after", strconv.FormatInt(own[pageSize-1].ID, 10))
		d.Next = "./audit?" + v.Encode()
	}
	if after > 0 {
		d.Latest = "./audit?" + chosen.Encode()
	}
	own = own[:min(len(own), pageSize)]
	d.Rows = slices.DeleteFunc(together(lines), func(row done) bool {
		return !slices.ContainsFunc(own, func(a onceqops.Action) bool { return a.ID == row.ID })
	})
	for _, row := range d.Rows {
		d.Whos, d.Whats = append(d.Whos, row.Who), append(d.Whats, row.What)
	}
	d.Whos, d.Whats = slices.Compact(slices.Sorted(slices.Values(d.Whos))), slices.Compact(slices.Sorted(slices.Values(d.Whats)))
	return &view{Template: "audit", Title: "Audit trail", Data: d}, nil
}

// justNow is for how long the page that follows an action says what was done.
const justNow = time.Minute

// done is the action whose result a page shows after it: only to those who have just done it, whatever link they have followed.
func (h *Handler) done(r *request, text string) *onceqops.Action {
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil || id <= 0 || id == 1<<63-1 {
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), h.limits.read)
	defer cancel()
	var list []onceqops.Action
	var now time.Time
	err = h.reading(ctx, func() (err error) {
		if err = h.db.QueryRow(ctx, `select statement_timestamp()`).Scan(&now); err != nil {
			return err
		}
		list, err = h.ops.Actions(ctx, h.db, onceqops.ActionFilter{After: id + 1, Limit: 1})
		return err
	})
	if err != nil || len(list) == 0 || list[0].ID != id || list[0].Who != r.viewer.Name || now.Sub(list[0].At) > justNow {
		return nil
	}
	return &list[0]
}
