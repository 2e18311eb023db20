package queuetest

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// RequireEnqueued requires that exactly one job of a kind is there whose payload matches, and returns it and its payload. A
// nil match takes every payload. If there is none, or another number, the test ends with a list of the jobs that are there.
//
// tx is the transaction in which the job was enqueued and which has not committed yet; nil looks from outside, on db.Pool,
// and so finds what is committed. Jobs count in every state. A completed job whose kind keeps no history (Kind.Keep) is not
// there any more: ask before it runs.
func RequireEnqueued[P any](db *DB, tx onceq.DB, kind onceq.Kind[P], match func(P) bool) (onceq.JobInfo, P) {
	db.t.Helper()
	jobs, payloads, said := enqueued(db, tx, kind, match)
	if len(jobs) != 1 {
		db.t.Fatalf("queuetest: RequireEnqueued: %d jobs of kind %q match, want 1%s", len(jobs), kind.Name, said)
	}
	return jobs[0], payloads[0]
}

// RequireNotEnqueued requires that no job of a kind is there whose payload matches. Its arguments are as for RequireEnqueued.
func RequireNotEnqueued[P any](db *DB, tx onceq.DB, kind onceq.Kind[P], match func(P) bool) {
	db.t.Helper()
	if jobs, _, said := enqueued(db, tx, kind, match); len(jobs) > 0 {
		db.t.Fatalf("queuetest: RequireNotEnqueued: %d jobs of kind %q match, want none%s", len(jobs), kind.Name, said)
	}
}

// maxSaid is how many jobs a failed test lists.
const maxSaid = 20

// enqueued returns the jobs that match, and a list of all for people.
func enqueued[P any](db *DB, tx onceq.DB, kind onceq.Kind[P], match func(P) bool) (jobs []onceq.JobInfo, payloads []P, said string) {
	db.t.Helper()
	if tx == nil {
		tx = db.Pool
	}
	var lines []string
	filter := onceqops.Filter{Limit: 1000}
	for {
		page, err := onceqops.New(db.Queue).List(context.Background(), tx, filter)
		if err != nil {
			db.t.Fatalf("queuetest: looking for jobs of kind %q: %v", kind.Name, err)
		}
		for _, j := range page {
			payload, why := decoded[P](j)
			matches := j.Kind == kind.Name && why == "" && (match == nil || match(payload))
			if matches {
				jobs, payloads = append(jobs, j), append(payloads, payload)
			}
			line := fmt.Sprintf("  job %d of kind %q in queue %q, %s: %s", j.ID, j.Kind, j.Queue, j.State, payloadOf(j))
			if j.Key != "" {
				line += fmt.Sprintf(", key %q", j.Key)
			}
			switch {
			case matches:
				line += " (matches)"
			case j.Kind == kind.Name && why != "":
				line += " (" + why + ")"
			}
			lines = append(lines, line)
		}
		if len(page) < filter.Limit {
			break
		}
		filter.After = page[len(page)-1].ID
	}
	if len(lines) == 0 {
		return jobs, payloads, "; there are no jobs at all. Is the transaction committed, or given as tx?"
	}
	more := ""
	if len(lines) > maxSaid {
		more = fmt.Sprintf("\n  and %d older ones", len(lines)-maxSaid)
		lines = lines[:maxSaid]
	}
	return jobs, payloads, "; there are:\n" + strings.Join(lines, "\n") + more
}

// decoded is a job's payload as a handler gets it, or why it cannot have it.
func decoded[P any](j onceq.JobInfo) (p P, why string) {
	if raw, ok := any(&p).(*[]byte); ok && reflect.TypeFor[P]() == reflect.TypeFor[[]byte]() {
		if *raw = j.Bytes; j.Bytes == nil {
			return p, "it carries JSON and no bytes"
		}
		return p, ""
	}
	if j.Payload == nil {
		return p, "it carries bytes and no JSON"
	}
	if err := json.Unmarshal(j.Payload, &p); err != nil {
		return p, fmt.Sprintf("it does not decode into %T: %v", p, err)
	}
	return p, ""
}

// payloadOf is a payload in one line.
func payloadOf(j onceq.JobInfo) string {
	const most = 200
	text := string(j.Payload)
	if j.Payload == nil {
		text = fmt.Sprintf("%d bytes", len(j.Bytes))
	}
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + " …"
	}
	return text
}
