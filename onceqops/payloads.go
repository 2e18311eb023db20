package onceqops

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/onceq/onceq"
)

// BacklogCheck is what CheckPayloads found for the jobs of one kind.
type BacklogCheck struct {
	Kind      string   `json:"kind"`
	Jobs      int      `json:"jobs"`       // that were looked at
	NoHandler bool     `json:"no_handler"` // no handler is for this kind, so its payloads were not decoded
	Failed    int      `json:"failed"`     // jobs whose payload does not decode
	Errors    []string `json:"errors"`     // of the newest ten of these; each names its job
}

// OK reports whether the handlers can run all jobs of the kind. It is false for a kind of another application: see NoHandler.
func (c BacklogCheck) OK() bool { return !c.NoHandler && c.Failed == 0 }

func (c BacklogCheck) String() string {
	switch {
	case c.NoHandler:
		return fmt.Sprintf("%s: %d jobs, and no handler", c.Kind, c.Jobs)
	case c.Failed > 0:
		return fmt.Sprintf("%s: %d of %d payloads do not decode; the newest: %s", c.Kind, c.Failed, c.Jobs, c.Errors[0])
	}
	return fmt.Sprintf("%s: %d payloads decode", c.Kind, c.Jobs)
}

// cronKind is the kind of the jobs that tick for schedules; those of a program's code have a colon and the schedule's name after it.
const cronKind = "onceqcron"

// CheckPayloads decodes the payload of every job that may run again, as the handlers would: of unfinished, dead and held
// jobs. It runs no handler and changes nothing. Call it with the handlers of a new version of the application before that
// version is deployed. It returns what it found for each kind that has such jobs, by name. Jobs of a kind without a handler
// are only counted: another application may run them. Without a handler, jobs that tick for schedules (onceqcron) are left
// out: their payload is a schedule's name.
//
// It reads the jobs in pages, newest first, on the pool. Jobs that are enqueued meanwhile are not looked at.
func (q *Ops) CheckPayloads(ctx context.Context, handlers ...onceq.Handler) ([]BacklogCheck, error) {
	byKind := make(map[string]onceq.Handler, len(handlers))
	for _, h := range handlers {
		if err := root.Broken(h); err != nil {
			return nil, err
		}
		byKind[h.Kind()] = h
	}
	found := make(map[string]*BacklogCheck)
	filter := Filter{Limit: 200, States: []onceq.State{onceq.StateWaiting, onceq.StateDelayed, onceq.StateRunning, onceq.StateRetrying, onceq.StateDead, onceq.StateHeld}}
	for {
		jobs, err := q.List(ctx, q.store.Pool, filter)
		if err != nil {
			return nil, fmt.Errorf("onceq: check payloads: %w", err)
		}
		for _, j := range jobs {
			c := found[j.Kind]
			h, known := byKind[j.Kind]
			if !known && (j.Kind == cronKind || strings.HasPrefix(j.Kind, cronKind+":")) {
				continue
			}
			if c == nil {
				c = &BacklogCheck{Kind: j.Kind, NoHandler: !known, Errors: []string{}}
				found[j.Kind] = c
			}
			c.Jobs++
			if !known {
				continue
			}
			if err := root.Decode(h, &onceq.Lease{ID: j.ID, Kind: j.Kind, Payload: j.Payload, Bytes: j.Bytes}); err != nil {
				if c.Failed++; c.Failed <= 10 {
					c.Errors = append(c.Errors, err.Error())
				}
			}
		}
		if len(jobs) < filter.Limit {
			break
		}
		filter.After = jobs[len(jobs)-1].ID
	}
	var all []BacklogCheck
	for _, kind := range slices.Sorted(maps.Keys(found)) {
		all = append(all, *found[kind])
	}
	return all, nil
}
