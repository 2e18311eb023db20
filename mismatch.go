package onceq

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/jsonb"
)

// A mismatch says what differs. Only for a mismatch is the first job's payload read, if it still exists.

// How many paths the text of a mismatch names, and how many bytes of each name in them.
const (
	maxDiffering  = 10
	maxNameInPath = 60
)

// refusal is a job whose key is taken by different work.
type refusal struct {
	err *MismatchError
	job *encoded
	as  []string // Job.Fields
}

// explain fills in the differences between the jobs that were refused and those that have their keys.
func (q *Queue) explain(ctx context.Context, db DB, refusals []refusal) error {
	const read = `
select u.n, p.payload, p.payload_bytes
  from unnest($1::bigint[]) with ordinality as u(id, n)
 cross join lateral (
       (select j.payload::text as payload, j.payload_bytes from onceq.jobs j where j.id = u.id)
       union all
       (select h.payload::text, h.payload_bytes from onceq.job_history h where h.id = u.id)
       limit 1) p`
	refusals = slices.DeleteFunc(refusals, func(r refusal) bool { return r.err.Kind != r.err.ExistingKind })
	if len(refusals) == 0 {
		return nil
	}
	ids := make([]int64, len(refusals))
	for n, r := range refusals {
		ids[n] = r.err.Existing.ID
		r.err.Detail = "the first job's payload is no longer stored, so what differs is not known"
	}
	err := q.send(ctx, db, asIs, read, []any{ids}, each(func(rows pgx.Rows) error {
		var n int64
		var payload *string
		var raw []byte
		if err := rows.Scan(&n, &payload, &raw); err != nil {
			return err
		}
		r := refusals[n-1]
		r.err.Detail, r.err.Differ = difference(payload, r.job, r.as)
		return nil
	}))
	if err != nil {
		return fmt.Errorf("onceq: reading the payload of a taken key: %w", err)
	}
	return nil
}

// difference compares the first job's payload, nil if it is bytes, with the payload of a job that was refused.
func difference(first *string, e *encoded, fields []string) (detail string, paths []string) {
	switch {
	case first == nil && e.bytes != nil:
		return "their bytes differ", nil
	case first == nil || e.bytes != nil:
		return "one is bytes and the other JSON", nil
	}
	now, err := canonicalValue(e.json, fields)
	then, no := canonicalValue(*first, fields)
	switch {
	case err != nil || no != nil: // only the first job's can fail: it is not an object, and Fields names members
		return "", []string{"$"}
	}
	paths = differing("$", then, now, nil)
	switch n := len(paths); {
	case n == 0:
		return "they agree in the members that are compared now, but others were compared when the first job was enqueued", nil
	case n > maxDiffering:
		return "and in other members", paths[:maxDiffering]
	}
	return "", paths
}

// canonicalValue decodes JSON so that equal numbers become equal texts.
func canonicalValue(text string, fields []string) (v any, err error) {
	canonical, err := jsonb.Scan([]byte(text), true, fields)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(canonical))
	d.UseNumber()
	return v, d.Decode(&v)
}

// differing appends the paths at which two values differ, and stops after maxDiffering.
func differing(path string, a, b any, paths []string) []string {
	if len(paths) > maxDiffering {
		return paths
	}
	switch x := a.(type) {
	case map[string]any:
		if y, ok := b.(map[string]any); ok {
			names := slices.AppendSeq(slices.Collect(maps.Keys(x)), maps.Keys(y))
			slices.Sort(names)
			for _, name := range slices.Compact(names) {
				v, in := x[name]
				w, too := y[name]
				if at := path + "." + pathName(name); in && too {
					paths = differing(at, v, w, paths)
				} else {
					paths = append(paths, at)
				}
			}
			return paths
		}
	case []any:
		if y, ok := b.([]any); ok {
			for i := range min(len(x), len(y)) {
				paths = differing(path+"["+strconv.Itoa(i)+"]", x[i], y[i], paths)
			}
			if len(x) != len(y) { // everything after the end of the shorter one
				paths = append(paths, path+"["+strconv.Itoa(min(len(x), len(y)))+"]")
			}
			return paths
		}
	default:
		if a == b {
			return paths
		}
	}
	return append(paths, path)
}

var plainName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// pathName gives a member's name as it stands in a path: in quotes if it could be misread, and cut if it is long.
func pathName(name string) string {
	if len(name) > maxNameInPath {
		name = strings.ToValidUTF8(name[:maxNameInPath], "") + "…"
	}
	if plainName.MatchString(name) {
		return name
	}
	return strconv.Quote(name)
}
