package onceqweb

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/onceq/onceq/onceqops"
)

// What changed in the last hour: queues that do worse than in the hour before, workers that began, and what people did.

// changes are those of all queues, and the same for all who ask.
type changes struct {
	Worse []worse // at most maxChanges, the most failures first
	More  int     // other queues
	Done  []done  // the latest first, at most maxChanges
	Began string  // workers
}

// worse is a queue that does worse than in the hour before, and in what.
type worse struct {
	Queue  string
	Texts  []string
	failed int
}

const maxChanges = 5

// readChanges reads it. The workers are those of a state.
func (h *Handler) readChanges(ctx context.Context) (changes, error) {
	return h.changes.get(ctx, h, struct{}{}, countsEvery, func(ctx context.Context) (c changes, err error) {
		list, err := h.ops.Counts(ctx, h.db, onceqops.CountFilter{Minutes: 120})
		if err != nil {
			return c, err
		}
		for _, counts := range list {
			var before onceqops.Count
			for _, m := range counts.Minutes[:60] {
				before.Add(m)
			}
			now := counts.Last(60)
			if texts := worseThan(before, now); texts != nil {
				c.Worse = append(c.Worse, worse{counts.Queue, texts, now.Failed + now.Dead})
			}
		}
		slices.SortStableFunc(c.Worse, func(a, b worse) int { return b.failed - a.failed })
		c.More = max(0, len(c.Worse)-maxChanges)
		c.Worse = c.Worse[:len(c.Worse)-c.More]
		lines, err := h.ops.Actions(ctx, h.db, onceqops.ActionFilter{Since: h.now().Add(-time.Hour), Limit: 2 * maxChanges})
		c.Done = together(lines)
		c.Done = c.Done[:min(len(c.Done), maxChanges)]
		return c, err
	})
}

// worseThan says in what an hour is worse than the one before: by half, and of so many jobs that it is no chance.
func worseThan(before, now onceqops.Count) (texts []string) {
	const enough = 10
	number := func(n int) string { return atLeast(n, false) }
	if was, is := before.Failed+before.Dead, now.Failed+now.Dead; is >= enough && is >= 2*was {
		texts = append(texts, fmt.Sprintf("%s attempts failed, %s in the hour before", number(is), number(was)))
	}
	if before.Completed >= 6*enough && now.Completed <= before.Completed/2 {
		texts = append(texts, fmt.Sprintf("%s jobs were done, %s in the hour before", number(now.Completed), number(before.Completed)))
	}
	if before.Started < enough || now.Started < enough {
		return texts
	}
	for _, t := range []struct {
		what    string
		was, is time.Duration
		from    time.Duration // what is shorter is not worth a word
	}{
		{"jobs waited", before.WaitPercentile(95), now.WaitPercentile(95), 5 * time.Second},
		{"handlers took", before.Percentile(95), now.Percentile(95), 100 * time.Millisecond},
	} {
		if t.is >= t.from && t.is >= 2*t.was {
			texts = append(texts, fmt.Sprintf("%s %s (p95), %s in the hour before", t.what, took(t.is), took(t.was)))
		}
	}
	return texts
}

// began says which workers began in the last hour.
func (s *state) began() string {
	n, versions := 0, []string(nil)
	for _, w := range s.Workers {
		if !w.Stale && w.Started.After(s.At.Add(-time.Hour)) {
			n, versions = n+1, append(versions, release(w))
		}
	}
	switch slices.Sort(versions); n {
	case 0:
		return ""
	case 1:
		return "A worker began: " + some(versions)
	}
	return fmt.Sprintf("%d workers began: %s", n, some(slices.Compact(versions)))
}
