package pairs

import (
	"flag"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write "+page)

// page has the table between these two lines.
const (
	page  = "../../docs/work/locks.md"
	begin = "| while a transaction has made one of | these wait for its end |\n|---|---|\n"
	end   = "\n\n"
	until = "; " // between the calls of a cell
	none  = "none"
)

// table gives for each call that was tried as the first one those that wait for it, in the order of the list.
type table map[string][]string

func text(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile(page)
	require.NoError(t, err)
	return string(raw)
}

// readPage takes the page apart.
func readPage(t *testing.T) (before string, rows table, after string) {
	t.Helper()
	before, rest, ok := strings.Cut(text(t), begin)
	require.True(t, ok, "no table in %s", page)
	lines, after, ok := strings.Cut(rest, end)
	require.True(t, ok, "no end of the table in %s", page)
	rows = make(table)
	for line := range strings.Lines(lines) {
		cells := strings.Split(strings.Trim(line, "|\n "), " | ")
		require.Len(t, cells, 2, line)
		for _, first := range strings.Split(cells[0], until) {
			rows[first] = nil
			if cells[1] != none {
				rows[first] = strings.Split(cells[1], until)
			}
		}
	}
	return before, rows, after
}

// cell is what waits for a call, and empty for one that was not tried.
func (rows table) cell(name string) string {
	waiting, tried := rows[name]
	if tried && len(waiting) == 0 {
		return none
	}
	return strings.Join(waiting, until)
}

// String has the calls in one row that the same calls wait for.
func (rows table) String() string {
	var b strings.Builder
	var done []string
	for _, a := range calls {
		waiting := rows.cell(a.name)
		if waiting == "" || slices.Contains(done, waiting) {
			continue
		}
		done = append(done, waiting)
		var alike []string
		for _, c := range calls {
			if rows.cell(c.name) == waiting {
				alike = append(alike, c.name)
			}
		}
		b.WriteString("| " + strings.Join(alike, until) + " | " + waiting + " |\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}
