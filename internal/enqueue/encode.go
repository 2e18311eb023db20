package enqueue

import (
	"cmp"
	"slices"
	"strings"

	"github.com/onceq/onceq/internal/fingerprint"
	"github.com/onceq/onceq/internal/jsonb"
)

// Memory is what the rows of a call share: their texts and fingerprints are parts of it.
type Memory struct {
	texts   strings.Builder // JSON
	marks   []byte          // fingerprints
	content []byte          // of the latest fingerprint
}

// Add gives a row its payload and, if it has a key, its fingerprint: of the payload if that is compared, and
// of these members of it, or nil for all. An error says what is wrong with the payload.
func (m *Memory) Add(r *Row, raw []byte, isJSON, compare bool, fields []string) (err error) {
	var content []byte
	switch {
	case compare && isJSON:
		m.content = append(slices.Grow(m.content[:0], len(raw)+16), fingerprint.FormJSON)
		content, err = jsonb.AppendCanonical(m.content, raw, fields)
		m.content = content
	case compare:
		content = append(append(m.content[:0], fingerprint.FormBytes), raw...)
		m.content = content
	case isJSON:
		_, err = jsonb.Scan(raw, false, fields)
	}
	if err != nil {
		return err
	}
	if isJSON {
		r.JSON = m.text(raw)
	} else {
		r.Bytes = raw
	}
	if r.Key != "" {
		r.Fingerprint = m.mark(r.Header, content)
	}
	return nil
}

// newBlock is how large the next part of a memory should be of which need bytes are wanted, and which has had had. It grows
// for many jobs, and is no larger than needed for one.
func newBlock(need, had int) int { return max(need, min(2*had, 32<<10)) }

// text keeps a text. It moves nothing that it has kept before.
func (m *Memory) text(raw []byte) string {
	if had := m.texts.Cap(); had-m.texts.Len() < len(raw) {
		m.texts.Reset()
		m.texts.Grow(newBlock(len(raw), had))
	}
	at := m.texts.Len()
	m.texts.Write(raw)
	return m.texts.String()[at:]
}

// mark makes and keeps a row's fingerprint.
func (m *Memory) mark(h *Header, content []byte) []byte {
	kind := h.Kind
	if kind == h.Scope {
		kind = ""
	}
	if need, had := fingerprint.Bytes+len(kind), cap(m.marks); had-len(m.marks) < need {
		m.marks = make([]byte, 0, newBlock(need, had))
	}
	at := len(m.marks)
	m.marks = fingerprint.Append(m.marks, kind, content)
	return slices.Clip(m.marks[at:])
}

// CompareKeys orders rows as their keys are taken: by scope, then by key.
func CompareKeys(a, b *Row) int {
	if a.Header != b.Header {
		if c := strings.Compare(a.Header.Scope, b.Header.Scope); c != 0 {
			return c
		}
	}
	return strings.Compare(a.Key, b.Key)
}

// InOrder gives the places of rows in the order of their keys, or nil if they are in it. If a key is there
// twice, again is the first place where it is, and first that of the one before; otherwise again is -1.
func InOrder(rows []Row) (sorted []int, first, again int) {
	last, ordered := -1, true // the last place with a key; whether each key was above the one before
	for i := range rows {
		if rows[i].Key != "" {
			ordered = ordered && (last < 0 || CompareKeys(&rows[last], &rows[i]) < 0)
			last = i
		}
	}
	if ordered {
		return nil, 0, -1
	}
	sorted = make([]int, len(rows))
	for i := range sorted {
		sorted[i] = i
	}
	slices.SortFunc(sorted, func(i, j int) int { return cmp.Or(CompareKeys(&rows[i], &rows[j]), i-j) })
	again = -1
	for k, i := range sorted[1:] {
		if before := sorted[k]; rows[i].Key != "" && (again < 0 || i < again) && CompareKeys(&rows[before], &rows[i]) == 0 {
			again, first = i, before
		}
	}
	return sorted, first, again
}
