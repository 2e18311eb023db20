package onceqweb_test

import (
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqweb"
	"github.com/onceq/onceq/queuetest"
)

// saving is the form below the next ticks, as a browser sends it.
func saving(t *testing.T, page string) url.Values {
	t.Helper()
	_, form, found := strings.Cut(page, `aria-label="Save schedule`)
	require.True(t, found, page)
	form, _, _ = strings.Cut(form, "</form>")
	v := url.Values{"why": {"asked for by ops"}}
	for _, m := range hidden.FindAllStringSubmatch(form, -1) {
		v.Set(html.UnescapeString(m[1]), html.UnescapeString(m[2]))
	}
	return v
}

func scheduling(t *testing.T, db *queuetest.DB, cfg onceqweb.Config, viewer onceqweb.Viewer) (*onceqcron.Scheduler, *site) {
	t.Helper()
	cron, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{Owner: "billing"},
		onceqcron.Schedule{Name: "in code", Spec: "@daily", Job: onceq.Job{Kind: "report", Payload: 1}})
	require.NoError(t, err)
	require.NoError(t, cron.Register(t.Context()))
	viewer.Name = "ada@example.com"
	cfg.Schedules, cfg.Viewer = cron, func(*http.Request) (onceqweb.Viewer, error) { return viewer, nil }
	return cron, serve(t, db, cfg)
}

var own = http.Header{"Sec-Fetch-Site": {"same-origin"}}

// A schedule is shown with its next ticks in its zone and in UTC before it is written. Then it is made, changed and removed.
func TestSchedules_MadeOnThePage(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	cron, s := scheduling(t, db, onceqweb.Config{}, onceqweb.Viewer{Schedule: true, Payloads: true})
	require.Contains(t, s.get("schedules", http.StatusOK), `aria-label="Make a schedule"`)
	wanted := form("do", "put-schedule", "new", "1", "name", "rates", "spec", "30 2 * * *", "zone", "Europe/Berlin", "missed", "all 7", "kind", "fetch", "queue", "rates", "payload", `{"bank": "visa-4242"}`)
	answer, page := s.post(wanted, own)
	require.Equal(t, http.StatusOK, answer.StatusCode, page)
	save, page := saving(t, page), html.UnescapeString(page)
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	found := regexp.MustCompile(`<li><span>(\w+ [0-9-]+ 02:30:00 \+0[12]:00)</span> <span class="quiet">is</span> <span><time datetime="([^"]*)">([0-9: -]+)</time> UTC`).FindAllStringSubmatch(page, -1)
	require.Len(t, found, 5, page)
	for i, m := range found {
		at, err := time.Parse(time.RFC3339, m[2])
		require.NoError(t, err)
		require.Equal(t, m[1], at.In(berlin).Format("Mon 2006-01-02 15:04:05 -07:00"))
		require.Equal(t, m[3], at.Format("2006-01-02 15:04:05"))
		require.Equal(t, i > 0, i > 0 && at.Format(time.RFC3339) > found[max(i-1, 0)][2])
	}
	require.Contains(t, page, "No live worker has a handler for kind fetch")
	_, err = cron.Get(t.Context(), nil, "rates")
	require.ErrorIs(t, err, onceqcron.ErrNotFound, "it was only shown")
	jobs, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{Queue: "onceqcron"})
	require.NoError(t, err)
	require.Len(t, jobs, 1, "that of the schedule in code")

	without, _ := url.ParseQuery(save.Encode())
	without.Del("why")
	answer, _ = s.post(without, own)
	require.Equal(t, http.StatusBadRequest, answer.StatusCode, "without a reason")
	answer, text := s.post(save, own)
	require.Equal(t, http.StatusSeeOther, answer.StatusCode, text)
	one, err := cron.Get(t.Context(), nil, "rates")
	require.NoError(t, err)
	require.Equal(t, []any{"30 2 * * *", "Europe/Berlin", onceqcron.All(7), "fetch", "rates"}, []any{one.Spec, one.Zone, one.Missed, one.Job.Kind, one.Job.Queue})
	trail := html.UnescapeString(s.get("audit?what=put-schedule", http.StatusOK))
	require.Contains(t, trail, `schedule "rates"`)
	require.Contains(t, trail, `it is 30 2 * * * in Europe/Berlin, missed ticks: all 7, kind "fetch"`)
	require.NotContains(t, trail, "visa-4242", "the trail is for people who may not see payloads, too")

	// A second one of the name is refused, and what is wrong is said beside what was written.
	for name, wrong := range map[string]struct {
		change []string
		say    string
	}{
		"taken":          {nil, "there is a schedule of this name already"},
		"taken, in code": {[]string{"name", "in code"}, "there is a schedule of this name already"},
		"spec":           {[]string{"name", "x", "spec", "61 * * * *"}, `specification "61 * * * *"`},
		"zone":           {[]string{"name", "x", "zone", "Europe/Nowhere"}, `zone "Europe/Nowhere" is not known`},
		"missed":         {[]string{"name", "x", "missed", "sometimes"}, "latest 24h"},
		"none missed":    {[]string{"name", "x", "missed", ""}, "latest 24h"},
		"too many":       {[]string{"name", "x", "missed", "all 10001"}, "10000"},
		"payload":        {[]string{"name", "x", "payload", "{"}, "the payload is not JSON"},
		"kind":           {[]string{"name", "x", "kind", strings.Repeat("k", 200)}, "128"},
		"no kind":        {[]string{"name", "x", "kind", ""}, "has no Kind"},
		"no name":        {[]string{"name", ""}, "name is missing"},
	} {
		for _, shown := range []string{"", "1"} {
			bad, _ := url.ParseQuery(wanted.Encode())
			bad.Set("why", "asked for")
			bad.Set("shown", shown)
			for i := 0; i+1 < len(wrong.change); i += 2 {
				bad.Set(wrong.change[i], wrong.change[i+1])
			}
			answer, text := s.post(bad, own)
			require.Contains(t, []int{http.StatusBadRequest, http.StatusConflict}, answer.StatusCode, "%s: %s", name, text)
			require.Contains(t, strings.ToLower(html.UnescapeString(text)), strings.ToLower(wrong.say), name)
			if shown == "" {
				require.Contains(t, html.UnescapeString(text), `value="`+bad.Get("spec")+`"`, name)
				require.NotContains(t, text, `name="shown"`, name)
			}
		}
	}
	list, err := cron.List(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, list, 2)

	// A change keeps what the form does not have.
	one.Job.Metadata = map[string]string{"trace": "abc"}
	require.NoError(t, cron.Put(t.Context(), nil, one))
	page = html.UnescapeString(s.get("schedule?name=rates", http.StatusOK))
	require.Contains(t, page, `{"bank": "visa-4242"}</textarea>`)
	require.Equal(t, 5, strings.Count(page, "02:30:00 +0"), "the next ones")
	answer, page = s.post(form("do", "put-schedule", "name", "rates", "spec", "@every 90m", "zone", "", "missed", "skip", "kind", "fetch", "queue", "rates", "payload", "7"), own)
	require.Equal(t, http.StatusOK, answer.StatusCode, page)
	require.Contains(t, page, "They count from the moment in which it is saved")
	answer, text = s.post(saving(t, page), own)
	require.Equal(t, http.StatusSeeOther, answer.StatusCode, text)
	one, err = cron.Get(t.Context(), nil, "rates")
	require.NoError(t, err)
	require.Equal(t, []any{"@every 90m", "UTC", onceqcron.Skip(), "abc"}, []any{one.Spec, one.Zone, one.Missed, one.Job.Metadata["trace"]})
	require.Contains(t, html.UnescapeString(s.get("audit?what=put-schedule", http.StatusOK)), "it was 30 2 * * * in Europe/Berlin, missed ticks: all 7")

	require.NotContains(t, s.get("schedule?name=in+code", http.StatusOK), "put-schedule")
	answer, text = s.post(form("do", "put-schedule", "name", "in code", "spec", "@hourly", "missed", "skip", "kind", "x", "payload", ""), own)
	require.Equal(t, http.StatusBadRequest, answer.StatusCode)
	require.Contains(t, html.UnescapeString(text), `is in the code of "billing"`)
	answer, _ = s.post(form("do", "remove-schedule", "name", "in code", "why", "x"), own)
	require.Equal(t, http.StatusConflict, answer.StatusCode)

	require.Contains(t, html.UnescapeString(s.get("confirm?do=remove-schedule&name=rates", http.StatusOK)), `Remove schedule "rates"`)
	s.act("do", "remove-schedule", "name", "rates", "why", "no longer needed")
	_, err = cron.Get(t.Context(), nil, "rates")
	require.ErrorIs(t, err, onceqcron.ErrNotFound)
}

// Who may not see payloads, or sees them masked, changes a schedule without its payload, which stays as it is. Act alone is no right to
// schedules, and a page without Config.Schedules has none.
func TestSchedules_Rights(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	mask := func(_, _, text string) string { return strings.ReplaceAll(text, "visa-4242", "•••") }
	blind := onceqweb.Viewer{Schedule: true}
	cron, s := scheduling(t, db, onceqweb.Config{}, blind)
	require.NoError(t, cron.Put(t.Context(), nil, onceqcron.Schedule{Name: "rates", Spec: "@daily", Job: onceq.Job{Kind: "fetch", Payload: "visa-4242"}}))
	_, masked := scheduling(t, db, onceqweb.Config{Mask: mask}, onceqweb.Viewer{Schedule: true, Payloads: true})
	for spec, s := range map[string]*site{"0 3 * * *": s, "0 4 * * *": masked} {
		page := s.get("schedule?name=rates", http.StatusOK)
		require.Contains(t, page, "Its payload stays as it is")
		require.NotContains(t, page, "textarea")
		require.NotContains(t, page, "4242")
		answer, page := s.post(form("do", "put-schedule", "name", "rates", "spec", spec, "missed", "latest 24h", "kind", "fetch"), own)
		require.Equal(t, http.StatusOK, answer.StatusCode, page)
		require.NotContains(t, page, "4242")
		answer, text := s.post(saving(t, page), own)
		require.Equal(t, http.StatusSeeOther, answer.StatusCode, text)
		one, err := cron.Get(t.Context(), nil, "rates")
		require.NoError(t, err)
		require.Equal(t, spec, one.Spec)
		require.EqualValues(t, `"visa-4242"`, one.Job.Payload)
	}
	wanted := form("do", "put-schedule", "new", "1", "name", "x", "spec", "@daily", "missed", "skip", "kind", "fetch", "payload", "", "why", "x")
	_, acts := scheduling(t, db, onceqweb.Config{}, onceqweb.Viewer{Act: true, Payloads: true})
	none := serve(t, db, onceqweb.Config{Viewer: func(*http.Request) (onceqweb.Viewer, error) {
		return onceqweb.Viewer{Name: "ada", Schedule: true, Payloads: true}, nil
	}})
	for _, shown := range []string{"", "1"} {
		wanted.Set("shown", shown)
		for status, s := range map[int]*site{http.StatusForbidden: acts, http.StatusBadRequest: none} {
			for _, path := range []string{"schedules", "schedule?name=rates"} {
				require.NotContains(t, s.get(path, http.StatusOK), "put-schedule")
			}
			answer, text := s.post(wanted, own)
			require.Equal(t, status, answer.StatusCode, text)
		}
		answer, _ := s.post(wanted, http.Header{"Sec-Fetch-Site": {"cross-site"}})
		require.Equal(t, http.StatusForbidden, answer.StatusCode)
	}
	list, err := cron.List(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, list, 2)
}
