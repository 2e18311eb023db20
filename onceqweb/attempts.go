package onceqweb

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// attempt is a failed one, as a job's page shows it.
type attempt struct {
	At      time.Time
	Attempt int
	Error   string
	Words   string // how long it ran, where, and for how long the job waited before it
}

// timeline is what became of a job from its beginning on, in a box that is 1,000 wide.
type timeline struct {
	From, To time.Time
	Bars     []timebar
	Label    string // in words
}

type timebar struct {
	X, Width float64
	Class    string // of what its color is
	Text     string
}

// attempts are a job's failed attempts, the latest first.
func (h *Handler) attempts(j onceq.JobInfo) (all []attempt) {
	end := j.CreatedAt // of the one before; zero if that is not known
	if len(j.Errors) > 0 && len(j.Errors) < j.Attempts {
		end = time.Time{}
	}
	for _, e := range j.Errors {
		words := ranWords(e)
		if waited := e.At.Add(-e.Took).Sub(end); words != "" && !end.IsZero() && waited > 0 {
			words += ", after the job had waited for " + took(waited)
		}
		end = e.At
		all = append(all, attempt{e.At, e.Attempt, short(h.cfg.Mask(j.Kind, "error", e.Error)), words})
	}
	slices.Reverse(all)
	return all
}

// ranWords says who ran an attempt, and for how long.
func ranWords(e onceq.AttemptError) string {
	if e.Host == "" {
		return ""
	}
	return fmt.Sprintf("ran for %s in %s", took(e.Took), whoRan(e))
}

// whoRan is the process that ran an attempt; empty if that is not known.
func whoRan(e onceq.AttemptError) (who string) {
	if e.Host != "" {
		who = fmt.Sprintf("process %d on %s", e.Process, e.Host)
	}
	if e.Version != "" {
		who += ", version " + e.Version
	}
	return who
}

// timelineOf draws a job's life until now: its failed attempts, the one that runs, and its end or when it is due.
func timelineOf(j onceq.JobInfo, why []onceqops.Reason, now time.Time) (t timeline) {
	t.From, t.To = j.CreatedAt, now
	switch {
	case !j.FinishedAt.IsZero():
		t.To = j.FinishedAt
	case j.State != onceq.StateRunning && j.RunAt.After(now):
		t.To = j.RunAt
	}
	length := t.To.Sub(t.From)
	if length <= 0 || len(j.Errors) == 0 && j.State != onceq.StateRunning {
		return timeline{}
	}
	var words []string
	add := func(from, to time.Time, class, text string) {
		const least = 4 // is seen
		at := func(t2 time.Time) float64 {
			return min(1000, max(0, 1000*float64(t2.Sub(t.From))/float64(length)))
		}
		bar := timebar{at(from), max(least, at(to)-at(from)), class, text}
		bar.X = min(bar.X, 1000-bar.Width)
		t.Bars, words = append(t.Bars, bar), append(words, text)
	}
	for _, e := range j.Errors {
		text := fmt.Sprintf("attempt %d failed at %s", e.Attempt, clock(e.At))
		if ran := ranWords(e); ran != "" {
			text += "; it " + ran
		}
		add(e.At.Add(-e.Took), e.At, "failed", text)
	}
	for _, r := range why {
		if r.Cause == onceqops.CauseRunning && !r.Since.IsZero() {
			add(r.Since, now, "done", "an attempt runs since "+clock(r.Since))
		}
	}
	switch {
	case j.State.Finished():
		class := map[bool]string{true: "done", false: "dead"}[j.State == onceq.StateCompleted]
		add(t.To, t.To, class, j.State.String()+" at "+clock(t.To))
	case t.To.After(now):
		add(now, now, "due", "now")
		words[len(words)-1] = "the job is due at " + clock(t.To)
	}
	t.Label = sentence(fmt.Sprintf("created at %s; %s", clock(t.From), strings.Join(words, "; ")))
	return t
}
