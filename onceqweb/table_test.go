package onceqweb_test

import (
	"fmt"
	"html"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqweb"
)

// The table of jobs has the columns and the size that its address names, and what leads to another part of the search keeps them.
func TestJobs_ColumnsAndSize(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	var all []onceq.Job
	for n := range 75 {
		all = append(all, onceq.Job{Kind: "book", Queue: "accounts", Lane: fmt.Sprint("account-", n%2), LaneFamily: "book", Priority: onceq.PriorityLow, Payload: "visa-4242"})
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, all)
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{}) // for reading alone
	heads, link := regexp.MustCompile(`<th scope="col"[^>]*>([^<]*)</th>`), regexp.MustCompile(`href="\./(jobs\?[^"]*)"`)
	table := func(path string) (columns []string, rows int, links []string) {
		t.Helper()
		page := s.get(path, http.StatusOK)
		require.NotContains(t, page, "visa-4242")
		for _, m := range heads.FindAllStringSubmatch(page, -1) {
			columns = append(columns, m[1])
		}
		for _, m := range link.FindAllStringSubmatch(page, -1) {
			links = append(links, html.UnescapeString(m[1]))
		}
		return columns, strings.Count(page, `<td class="id"`), links
	}
	columns, rows, links := table("jobs")
	require.Equal(t, []string{"Id", "State", "Kind", "Queue", "Key", "Failed", "Created", "Due or finished", "Latest error"}, columns)
	require.Equal(t, 50, rows)
	require.NotContains(t, strings.Join(links, " "), "col=")

	columns, rows, links = table("jobs?queue=accounts&col=lane&col=priority&col=state&n=20")
	require.Equal(t, []string{"Id", "State", "Priority", "Lane"}, columns)
	require.Equal(t, 20, rows)
	pages := 0
	for _, to := range links { // states, times, the search without the queue, and the next page
		require.Contains(t, to, "col=state&col=priority&col=lane")
		require.Contains(t, to, "n=20")
		if strings.Contains(to, "after=") {
			for pages = 1; to != ""; pages++ {
				_, rows, links = table(to)
				require.Equal(t, map[bool]int{true: 15, false: 20}[pages == 3], rows, to)
				older := to
				if to = ""; strings.Contains(links[len(links)-1], "after=") && links[len(links)-1] != older {
					to = links[len(links)-1]
				}
			}
		}
	}
	require.Equal(t, 4, pages, "75 jobs are a page of 20 and three more")
	page := s.get("jobs?col=lane&n=20", http.StatusOK)
	require.Contains(t, page, `<td class="key" data-label="Lane"><a href="./lanes?family=book" title="book/account-0">book/account-0</a></td>`)
	require.Contains(t, page, `<input type="hidden" name="col" value="lane"><input type="hidden" name="n" value="20">`, "the form of the search keeps them")
	_, rows, _ = table("jobs?n=200")
	require.Equal(t, 75, rows)
	for _, wrong := range []string{"col=payload", "col=metadata", "n=201", "n=-1", "n=x"} {
		s.get("jobs?"+wrong, http.StatusBadRequest)
	}
}
