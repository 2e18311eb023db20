package onceqweb

import (
	"cmp"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// jobColumn is a column of the table of jobs, which has their ids besides.
type jobColumn struct {
	Name, Title string
	usual       bool
}

var jobColumns = []jobColumn{
	{"state", "State", true}, {"kind", "Kind", true}, {"queue", "Queue", true}, {"key", "Key", true}, {"priority", "Priority", false},
	{"lane", "Lane", false}, {"limit", "Limit", false}, {"tries", "Failed", true}, {"lost", "Lost leases", false},
	{"created", "Created", true}, {"due", "Due or finished", true}, {"error", "Latest error", true},
}

// maxPage is how many jobs one page shows.
const maxPage = 200

// jobTable is how the table of jobs is shown, by the address alone.
type jobTable struct {
	Has    map[string]bool // columns
	Chosen bool            // not those that are usual
	Size   int             // of a page
}

// Columns are all that one can choose.
func (jobTable) Columns() []jobColumn { return jobColumns }

// Sizes are those of a page.
func (jobTable) Sizes() []int { return []int{20, pageSize, 100, maxPage} }

// readTable reads which columns somebody wants, and how many jobs on a page.
func readTable(values url.Values) (t jobTable, err error) {
	t = jobTable{Has: make(map[string]bool), Size: pageSize}
	names := values["col"]
	for _, name := range names {
		if !slices.ContainsFunc(jobColumns, func(c jobColumn) bool { return c.Name == name }) {
			return t, bad("%q is not a column", name)
		}
	}
	for _, c := range jobColumns {
		t.Has[c.Name] = slices.Contains(names, c.Name) || len(names) == 0 && c.usual
		t.Chosen = t.Chosen || t.Has[c.Name] != c.usual
	}
	size, err := number(values, "n")
	if err != nil || size > maxPage {
		return t, bad("n, the jobs of a page, is not a number from 1 to %d", maxPage)
	}
	t.Size = cmp.Or(int(size), pageSize)
	return t, nil
}

// values is what readTable reads.
func (t jobTable) values() url.Values {
	v := url.Values{}
	for _, c := range jobColumns {
		if t.Chosen && t.Has[c.Name] {
			v.Add("col", c.Name)
		}
	}
	if t.Size != pageSize {
		v.Set("n", strconv.Itoa(t.Size))
	}
	return v
}

// Hidden is the same for a form.
func (t jobTable) Hidden() [][2]string { return inputs(t.values()) }

// inputs are values as the hidden ones of a form.
func inputs(values url.Values) (all [][2]string) {
	for name, list := range values {
		for _, value := range list {
			all = append(all, [2]string{name, value})
		}
	}
	slices.SortFunc(all, func(a, b [2]string) int { return strings.Compare(a[0]+a[1], b[0]+b[1]) })
	return all
}
