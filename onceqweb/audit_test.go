package onceqweb_test

import (
	"fmt"
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqweb"
)

var trailRow = regexp.MustCompile(`(?s)<td data-label="When">.*?</tr>`)

// rows are those of the trail, as text.
func (s *site) rows(path string) (rows []string) {
	s.t.Helper()
	tags := regexp.MustCompile(`<[^>]*>|\s+`)
	for _, row := range trailRow.FindAllString(s.get(path, http.StatusOK), -1) {
		rows = append(rows, strings.Join(strings.Fields(html.UnescapeString(tags.ReplaceAllString(row, " "))), " "))
	}
	return rows
}

// An action on many is one row, on whatever page its two lines are; one that has not ended, or whose process died, says so.
func TestAudit_OneRowForMany(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ops := onceqops.New(db.Queue)
	record := func(who, what, about, outcome string) {
		_, err := ops.RecordAction(t.Context(), db.Pool, onceqops.Action{Who: who, What: what, About: about, Why: "mended", Outcome: outcome})
		require.NoError(t, err)
	}
	s := serve(t, db, onceqweb.Config{}) // for reading alone
	require.Contains(t, s.get("audit", http.StatusOK), "Nobody has done anything yet")
	record("ada", "redrive-many", "dead jobs", "begins")
	record("bob", "redrive-many", "dead jobs", "begins")
	record("ada", "redrive-many", "dead jobs", "7 run again")
	record("ada", "redrive-many", "dead jobs", "begins")
	rows := s.rows("audit")
	require.Len(t, rows, 3)
	require.Regexp(t, "ada redrive-many dead jobs mended It began. How it ended is not recorded", rows[0])
	require.Regexp(t, "ada redrive-many dead jobs mended 7 run again ; it took .*s$", rows[1])
	require.Regexp(t, "bob redrive-many dead jobs mended It began", rows[2])

	for n := range 60 { // the second line of an action is on the page before that of the first
		record("ada", "retry-many", fmt.Sprint(n), "begins")
		record("cyd", "cancel", fmt.Sprint(n), "the job is cancelled")
		record("ada", "retry-many", fmt.Sprint(n), "1 run now")
	}
	older, seen := regexp.MustCompile(`href="\./(audit\?[^"]*)" rel="next"`), []string{}
	for path := "audit"; path != ""; {
		page := s.get(path, http.StatusOK)
		seen = append(seen, s.rows(path)...)
		if path = ""; older.MatchString(page) {
			path = html.UnescapeString(older.FindStringSubmatch(page)[1])
		}
	}
	require.Len(t, seen, 60*2+3)
	for i, row := range seen {
		require.Equal(t, i == 120 || i == 122, strings.Contains(row, "It began"), row)
	}

	// By who, what and since when.
	require.Len(t, s.rows("audit?who=bob"), 1)
	require.Len(t, s.rows("audit?who=ada&what=redrive-many"), 2)
	require.Len(t, s.rows("audit?since=1h&who=bob"), 1)
	_, err := db.Pool.Exec(t.Context(), `update onceq.actions set at = at - interval '2 days' where who = 'bob'`)
	require.NoError(t, err)
	require.Empty(t, s.rows("audit?since=1h&who=bob"))
	require.Contains(t, s.get("audit?since=1h&who=bob", http.StatusOK), "Nobody has done anything like this")
	require.Len(t, s.rows("audit?who=bob&from="+time.Now().UTC().AddDate(0, 0, -3).Format("2006-01-02T15:04")), 1)
	require.Empty(t, s.rows("audit?who=bob&"+url.Values{"from": {time.Now().UTC().AddDate(0, 0, -1).Format(time.RFC3339)}}.Encode()))
	page := s.get("audit?what=cancel&since=168h", http.StatusOK)
	require.Contains(t, html.UnescapeString(older.FindStringSubmatch(page)[1]), "since=168h&what=cancel", "the next page is of the same search")
	for _, wrong := range []string{"from=yesterday", "after=x", "who=%00", "what=%ff"} {
		s.get("audit?"+wrong, http.StatusBadRequest)
	}
}
