package hold

import (
	"encoding/json"
	"sync/atomic"
	"time"
)

// Progress is how far a handler says that it has come, as jobs.progress stores it.
type Progress struct {
	Done  int64     `json:"done"`
	Total int64     `json:"total,omitzero"`
	Note  string    `json:"note,omitzero"`
	At    time.Time `json:"at"`
}

// report is a progress, and whether a beat has written it.
type report struct {
	Progress
	written atomic.Bool
}

// Note is what beats write into jobs.progress: when the run began, and its latest report. Claims says of
// which claim it is, because a claim does not clear the column.
type Note struct {
	Claims int32     `json:"claims"`
	Since  time.Time `json:"since"`
	*Progress
}

// Report takes what the handler says now.
func (h *Hold) Report(p Progress) {
	p.At = h.Claimed.Add(time.Since(h.Began))
	h.progress.Store(&report{Progress: p})
}

// note returns what the next beat has to write, and "" for nothing: the first beat of a claim writes when the
// run began. The report is the one that the note contains.
func (h *Hold) note() (text string, latest *report) {
	latest = h.progress.Load()
	if h.noted.Load() && (latest == nil || latest.written.Load()) {
		return "", nil
	}
	n := Note{Claims: h.Claims, Since: h.Claimed}
	if latest != nil {
		n.Progress = &latest.Progress
	}
	raw, _ := json.Marshal(n) // texts, numbers and times always encode
	return string(raw), latest
}

// wrote records that a beat has written a note with this report.
func (h *Hold) wrote(latest *report) {
	h.noted.Store(true)
	if latest != nil {
		latest.written.Store(true)
	}
}
