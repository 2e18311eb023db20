package onceq

import (
	"encoding/json"
	"time"

	"github.com/onceq/onceq/internal/hold"
)

// Progress is how far a handler says that it has come.
type Progress struct {
	Done  int64     `json:"done"`
	Total int64     `json:"total,omitzero"` // 0 if it is not known
	Note  string    `json:"note,omitzero"`
	At    time.Time `json:"at"` // when the handler said so, by the database's clock
}

// MaxProgressBytes is how long the note of Lease.Progress may be.
const MaxProgressBytes = 1000

// Progress says how far the job has come, for people who look at it (JobInfo.Progress). It sends nothing by itself: the next
// beat writes the latest report, a third of WorkerConfig.Lease after the one before, and so does Extend. So it may be called
// for every row of a file. A job that ends before its first beat leaves none. What an earlier run reported is shown until the
// job is claimed again, or until it waits in line for its lane or its limit, as after an Await.
//
// A total of 0 means that it is not known. In HandleTx and HandleBatch it returns an error, because nobody can change the
// job's row while their transaction is open.
func (l *Lease) Progress(done, total int64, note string) error {
	switch {
	case l.hold.InTx:
		return invalid("Progress", "is not possible in HandleTx and HandleBatch, whose transaction has the job's row locked; use Handle")
	case done < 0 || total < 0:
		return invalid("Progress", "is %d of %d; neither may be negative", done, total)
	case len(note) > MaxProgressBytes:
		return invalid("note", "has %d bytes; at most %d", len(note), MaxProgressBytes)
	}
	if err := checkText("note", note); err != nil {
		return err
	}
	l.hold.Report(hold.Progress{Done: done, Total: total, Note: note})
	return nil
}

// noted fills in what the column says of the job's latest run.
func (i *JobInfo) noted(text *string) error {
	if text == nil {
		return nil
	}
	var n hold.Note
	if err := json.Unmarshal([]byte(*text), &n); err != nil {
		return err
	}
	if int(n.Claims) == i.Claims {
		if i.since = n.Since; n.Progress != nil && !n.Progress.At.IsZero() {
			i.Progress = (*Progress)(n.Progress)
		}
	}
	return nil
}
