// Package finish ends runs of jobs: what became of each, and the statements that write it. A finished job
// leaves the table jobs, any other is made ready to run again. Each statement compares the guards of the
// leases, so that nobody ends a job that somebody else has by now.
package finish

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/onceq/onceq/internal/hold"
	"github.com/onceq/onceq/internal/program"
	"github.com/onceq/onceq/internal/table"
)

// Outcome is how one run of a job ended.
type Outcome struct {
	Hold   *hold.Hold
	State  table.State // as StateWaiting, the job runs again after Delay
	Result string      // encoded; "" for none
	Err    string      // appended to the job's errors; "" for none
	Delay  time.Duration
	Spend  bool          // an attempt was spent
	Reset  bool          // count attempts from 0 again
	Wait   *Wait         // what it is given back for: the database says how long; nil for none
	Keep   int64         // milliseconds in history; 0: not at all, -1: until somebody decides
	Unsure bool          // it may already be written, so a guard that does not hold means nothing
	Locked time.Time     // when it was found that it waits for somebody else's lock; zero if it does not
	Doubt  Doubt         // what a completion before this try may have leased; nil for nothing
	Own    bool          // held because of an effect of its own
	Full   time.Duration // for how long its limit is to be paused (LimitFull)
	Asked  bool          // the handler came to its end and did not finish the job; otherwise the job is given back

	Tried bool          // unsure because of a commit that completed the job, if there was one
	Late  error         // what the handler returned after it had completed the job itself
	Cause error         // for events
	Run   time.Duration // how long the handler ran; 0 if none was called

	noted string // Err, and who ran the attempt, as the job's errors have them
}

// note gives what is added to the job's errors; "" for nothing.
func (o *Outcome) note(version string) string {
	if o.Err == "" {
		return ""
	}
	note := struct {
		Error   string        `json:"error"`
		Host    string        `json:"host,omitzero"`
		Process int           `json:"process,omitzero"`
		Version string        `json:"version,omitzero"`
		Took    time.Duration `json:"took,omitzero"`
	}{Error: o.Err}
	if note.Took = o.Run; o.Run > 0 {
		note.Host, note.Process, note.Version = program.Host(), os.Getpid(), version
	}
	text, _ := json.Marshal(note) // texts and numbers always encode
	return string(text)
}

// Doubt is a lease of a lane's next job of which nobody knows, because the answer of the completion that may
// have taken it was lost.
type Doubt interface {
	// Unheard gives it back, when it is known whether the completion of the job that h had was committed.
	Unheard(ctx context.Context, h *hold.Hold)
}

// Wait names what a job is given back for: a row of job_awaits.
type Wait struct{ Scope, Key string }

func (w Wait) String() string {
	if w.Scope == "" {
		return fmt.Sprintf("sleep %q", w.Key)
	}
	return fmt.Sprintf("event %q in scope %q", w.Key, w.Scope)
}

// Pause is how long a job is given back for while an event that it waits for is just being emitted.
const Pause = time.Second

// CancelledKept is how long a job stays in the history at least that was cancelled while it ran, in
// milliseconds.
const CancelledKept = int64(24 * time.Hour / time.Millisecond)

// Exhausted gives the outcome of a job that must not be started again, or nil.
func Exhausted(h *hold.Hold, maxLost int) *Outcome {
	var why string
	switch {
	case h.Cancelled:
		return &Outcome{Hold: h, State: table.StateCancelled, Keep: CancelledKept}
	case h.Lost >= maxLost:
		why = table.Numbered(h.Lost, "lease", "leases") + " of this job ran out: each time the worker that had it died," +
			" froze or lost the database; look at what these processes logged last, and at their memory"
	case h.Claims >= table.ClaimsLimit:
		why = fmt.Sprintf("claimed %d times, more than a token can count", h.Claims)
	default:
		return nil
	}
	return &Outcome{Hold: h, State: table.StateDead, Err: why, Keep: -1}
}

// lostFrom is the number from which the job's lost leases count on, if there were more. A handler that came
// to its end did not end its process. After a failure one stays, so that the job goes on running alone
// (package quarantine): one that now fails and now ends its process would otherwise take the same jobs beside
// it with it each time. A job that is only given back keeps all.
func (o *Outcome) lostFrom() int32 {
	switch {
	case o.Asked && o.Spend:
		return 1
	case o.Asked:
		return 0
	}
	return math.MaxInt16 // more than the column holds
}

// MaxText is how much of an error's text is kept.
const MaxText = 8 << 10

// Text shortens the text of an error and makes it safe for jsonb.
func Text(s string) string {
	if len(s) > MaxText {
		s = s[:MaxText]
		for len(s) > 0 && !utf8.RuneStart(s[len(s)-1]) {
			s = s[:len(s)-1]
		}
		s += " …"
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	if s = strings.ReplaceAll(s, "\x00", "\uFFFD"); s == "" {
		s = "error without a text"
	}
	return s
}
