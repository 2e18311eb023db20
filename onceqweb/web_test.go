package onceqweb_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqweb"
	"github.com/onceq/onceq/onceqweb/internal/trouble"
	"github.com/onceq/onceq/queuetest"
)

func newDB(t *testing.T, options ...queuetest.Option) *queuetest.DB {
	return queuetest.New(t, append(options, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))...)
}

// site is a running page.
type site struct {
	t    *testing.T
	base string // with the prefix and a slash
	log  *bytes.Buffer
	page *onceqweb.Handler
}

func may(act, payloads bool) func(*http.Request) (onceqweb.Viewer, error) {
	return func(*http.Request) (onceqweb.Viewer, error) {
		return onceqweb.Viewer{Name: "ada@example.com", Act: act, Payloads: payloads}, nil
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  *bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func serve(t *testing.T, db *queuetest.DB, cfg onceqweb.Config, pools ...*pgxpool.Pool) *site {
	t.Helper()
	s := serveInTime(t, db, cfg, pools...)
	s.page.Patient()
	return s
}

// serveInTime is serve with the limits that users have.
func serveInTime(t *testing.T, db *queuetest.DB, cfg onceqweb.Config, pools ...*pgxpool.Pool) *site {
	t.Helper()
	s := &site{t: t, log: new(bytes.Buffer)}
	cfg.Logger = slog.New(slog.NewTextHandler(&lockedBuffer{b: s.log}, nil))
	if cfg.Viewer == nil {
		cfg.Viewer = onceqweb.Everybody
	}
	var err error
	s.page, err = onceqweb.New(db.Queue, append(pools, db.Pool)[0], cfg)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/admin/onceq/", http.StripPrefix("/admin/onceq", s.page))
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		s.page.Close()
		server.Close()
	})
	s.base = server.URL + "/admin/onceq/"
	return s
}

var client = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

func (s *site) do(r *http.Request) (*http.Response, string) {
	s.t.Helper()
	answer, err := client.Do(r)
	require.NoError(s.t, err)
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	require.NoError(s.t, err)
	return answer, string(text)
}

func (s *site) get(path string, status int) string {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.base+path, nil)
	require.NoError(s.t, err)
	answer, text := s.do(r)
	require.Equal(s.t, status, answer.StatusCode, "%s: %s", path, text)
	return text
}

func (s *site) post(form url.Values, header http.Header) (*http.Response, string) {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.base+"act", strings.NewReader(form.Encode()))
	require.NoError(s.t, err)
	for k, v := range header {
		r.Header[k] = v
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return s.do(r)
}

// act does an action as the page's own form does, and returns the page that follows.
func (s *site) act(pairs ...string) string {
	s.t.Helper()
	answer, text := s.post(form(pairs...), http.Header{"Sec-Fetch-Site": {"same-origin"}})
	require.Equal(s.t, http.StatusSeeOther, answer.StatusCode, text)
	to, err := answer.Request.URL.Parse(answer.Header.Get("Location"))
	require.NoError(s.t, err)
	path, own := strings.CutPrefix(to.String(), s.base)
	require.True(s.t, own, to)
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.base+path, nil)
	require.NoError(s.t, err)
	_, text = s.do(r)
	require.Contains(s.t, text, "Done: "+form(pairs...).Get("do"))
	return text
}

func form(pairs ...string) url.Values {
	v := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		v.Add(pairs[i], pairs[i+1])
	}
	return v
}

func (s *site) state(db *queuetest.DB, id int64, want onceq.State) {
	s.t.Helper()
	j, err := db.Queue.Get(s.t.Context(), db.Pool, id)
	require.NoError(s.t, err)
	require.Equal(s.t, want, j.State)
}

var (
	links  = regexp.MustCompile(`(?:href|action|src|data-live)="([^"]*)"`)
	values = regexp.MustCompile(`="[^"]*"`)
	inline = regexp.MustCompile(`(?i)<script(?:>| [^>]*>[^<])|<style|<[^>]*\s(?:style|on[a-z]+)\b|<[^>]*javascript:`)
)

// crawl reads every page that the pages link to, and returns their texts.
func (s *site) crawl(t *testing.T) map[string]string {
	texts := make(map[string]string)
	todo := []string{s.base}
	for len(todo) > 0 {
		at := todo[0]
		todo = todo[1:]
		if _, seen := texts[at]; seen || strings.Contains(at, "/live?") || strings.HasSuffix(at, "/act") || strings.HasSuffix(at, "/confirm") {
			continue
		}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, at, nil)
		require.NoError(t, err)
		answer, text := s.do(r)
		texts[at] = text
		require.Equal(t, http.StatusOK, answer.StatusCode, "%s: %s", at, text)
		require.NotContains(t, answer.Header.Get("Content-Security-Policy"), "unsafe")
		require.Contains(t, answer.Header.Get("Content-Security-Policy"), "default-src 'none'")
		require.Equal(t, "nosniff", answer.Header.Get("X-Content-Type-Options"))
		if strings.Contains(at, "/static/") {
			continue
		}
		require.Empty(t, inline.FindAllString(values.ReplaceAllString(text, `=""`), -1), "%s: %s", at, text)
		for _, link := range links.FindAllStringSubmatch(text, -1) {
			ref := html.UnescapeString(link[1])
			require.True(t, strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "#"), "%s links to %s", at, ref)
			to, err := answer.Request.URL.Parse(ref)
			require.NoError(t, err)
			to.Fragment = ""
			require.True(t, strings.HasPrefix(to.String(), s.base), "%s links to %s", at, to)
			if strings.Count(to.RawQuery, "=") > 1 && !strings.HasSuffix(to.Path, "/confirm") { // such pages lead to each other without end
				continue
			}
			todo = append(todo, to.String())
		}
	}
	return texts
}

func TestEveryPage_BelowAnyPrefix(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true), Schedules: d.Schedules, Title: "billing & co"})
	// The same page, where the router strips nothing.
	whole, err := onceqweb.New(db.Queue, db.Pool, onceqweb.Config{Prefix: "/a/b c/", Viewer: may(true, true)})
	require.NoError(t, err)
	whole.Patient()
	server := httptest.NewServer(whole)
	t.Cleanup(func() {
		whole.Close()
		server.Close()
	})
	other := &site{t: t, base: server.URL + "/a/b%20c/"}
	for _, s := range []*site{s, other} {
		texts := s.crawl(t)
		require.Greater(t, len(texts), 30)
		for _, path := range []string{"", "jobs", "effects", "keys", "schedules", "audit", fmt.Sprintf("job?id=%d", d.Held)} {
			found := ""
			for at, text := range texts {
				if p, _ := url.PathUnescape(strings.TrimPrefix(at, s.base)); p == path || p == "./"+path {
					found = text
				}
			}
			require.NotEmpty(t, found, path)
		}
		for at, text := range texts {
			require.NotContains(t, text, "<script>document", at)
			require.NotContains(t, text, "<img", at)
			require.NotContains(t, text, "<b>kind", at)
		}
		// Without the slash at the end the browser is sent to the page.
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, strings.TrimSuffix(s.base, "/"), nil)
		require.NoError(t, err)
		answer, _ := s.do(r)
		to, err := answer.Request.URL.Parse(answer.Header.Get("Location"))
		require.NoError(t, err)
		require.Equal(t, s.base, to.String())
	}
	for _, near := range []string{"/a/b%20cjobs", "/a/b%20cact", "/a/b%20c.", "/a/b", "/"} { // what begins like the prefix is not below it
		answer, err := http.Get(server.URL + near)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		require.Equal(t, http.StatusNotFound, answer.StatusCode, near)
	}
	s.get("nothing", http.StatusNotFound)
	s.get("static/", http.StatusNotFound)
	s.get("static/../handler.go", http.StatusTemporaryRedirect)
}

func TestPages_SayWhatIsThere(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true), Schedules: d.Schedules})
	has := func(path string, texts ...string) string {
		t.Helper()
		page := s.get(path, http.StatusOK)
		plain := html.UnescapeString(page)
		for _, text := range texts {
			require.Contains(t, plain, text, path)
		}
		return page
	}
	id := func(id int64) string { return fmt.Sprintf("job?id=%d", id) }
	has("", "4711 on web-3", "the template is wrong", "not seen lately", "nobody", "× 4", "thumbnials", "payments", "jobs wait for a person", "<b>2</b> held",
		"In the last 30 minutes", `<svg class="plot" viewBox="0 0 30 20"`, "100 ms</td>")
	has("jobs", "550 5.1.1 mailbox unavailable", "thumbnail", "order:4711")
	has("jobs", `<option value="payments">`, `<option value="welcome">`)
	require.NotContains(t, has("jobs?state=dead&queue=mail", "mailbox"), "thumbnail")
	require.NotContains(t, has("jobs?kind=thumbnail", "thumbnials"), "mailbox")
	require.Contains(t, s.get("jobs?before=2001-01-01", http.StatusOK), "No job is like this")
	charge := has(id(d.Held), "order:4711", `"amount": 1990`, "connection reset by peer", "What happened to “charge”?", "Look each up at the provider", "this job")
	key, err := onceqops.New(db.Queue).Effects(t.Context(), db.Pool, d.Held)
	require.NoError(t, err)
	require.Contains(t, charge, key[0].IdempotencyKey)
	has(id(d.Dead[0]), "nobody0@example.com", "RCPT TO:<nobody@example.com>", "Redrive", "Discard", "This job has no key")
	has(id(d.Waiting), `No live worker works queue "thumbnials"`)
	has(id(d.Retrying), "Attempt 1 of 3 failed, and the next one is due at", "Run it now")
	has(id(d.Delayed), "It is not due before")
	has(id(d.Running.ID), "It runs in a process", fmt.Sprint(d.Running.Token))
	has(id(d.Completed), `"sheets": 12`, "trace: abc", "It was completed at")
	has("effects", "order:4711", key[0].IdempotencyKey, "It happened", "It did not happen", "Ask again")
	has("effects?of=others", "order:4713")
	has("keys?key=order:4711", "held", fmt.Sprintf("job %d", d.Held))
	has("keys?key="+d.Fence, "the application", "uncertain", "context deadline exceeded", "It happened")
	require.Contains(t, s.get("keys?key=nobody", http.StatusOK), "Nobody has the key")
	has("schedules", "nightly report", "Europe/Berlin", "@every 10m", "billing")
	has("schedule?name=reminders", "back-filled", "fired", "Pause")
	s.get("schedule?name=none", http.StatusNotFound)
	s.get("job?id=999999", http.StatusNotFound)

	// The search for an id or a key leads to it.
	for q, want := range map[string]string{fmt.Sprint(d.Held): "./" + id(d.Held), "order:4711": "./keys?key=order%3A4711&scope=", "999999": "./keys?key=999999&scope="} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.base+"jobs?q="+url.QueryEscape(q), nil)
		require.NoError(t, err)
		answer, _ := s.do(r)
		require.Equal(t, want, answer.Header.Get("Location"))
	}
}

// The overview has what Health finds and what it leaves to people, each with its level, the worst on top.
func TestOverview_Findings(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	_, err := db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = run_at - interval '10 minutes' where id = $1`, d.Waiting)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (8, 60000000, statement_timestamp(), statement_timestamp() + interval '1 day', 4712, 9999, 'web-4', 'v9.0.0', '{"reports": 1}', '{report}')`)
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true), Schedules: d.Schedules})
	page := html.UnescapeString(s.get("", http.StatusOK))
	page = strings.ReplaceAll(page, "</b>\n<strong>", "</b> <strong>")
	bad, warning := `<b class="pill dead">Error</b> <strong>`, `<b class="pill held">Warning</b> <strong>`
	require.Contains(t, page, bad+`The oldest job of queue "thumbnials" has been due for `)
	require.Contains(t, page, `<a href="./jobs?queue=thumbnials&state=waiting">Its waiting jobs</a>`)
	require.Contains(t, page, warning+`No live worker serves queue "mail"; the last one, process 4711 on web-3, has not been seen since `)
	require.Contains(t, page, warning+"These workers know another version of the tables")
	require.Contains(t, page, "4712 on web-4 (9999)")
	require.Contains(t, page, `<a href="#workers">The workers</a>`)
	require.Regexp(t, `Warning</b>\s*<strong>3 queues have dead jobs.</strong>`, page)
	require.Contains(t, page, `Queue "mail" has dead jobs: 3. <a href=`)
	require.Contains(t, page, `<a href="./jobs?queue=mail&state=dead">Its dead jobs</a>`)
	require.Greater(t, strings.Index(page, warning), strings.LastIndex(page, bad))

	// What Health found is kept for a while; what comes from the figures is not. A worker that is gone is no trouble where another one
	// serves its queue.
	_, err = db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (9, 60000000, statement_timestamp(), statement_timestamp() + interval '1 day', 4713, 1, 'web-5', 'v0.1.0', '{"mail": 1}', '{welcome}')`)
	require.NoError(t, err)
	for _, id := range d.Dead {
		s.act("do", "redrive", "id", fmt.Sprint(id))
	}
	page = html.UnescapeString(s.get("", http.StatusOK))
	require.NotContains(t, page, `Queue "mail" has dead jobs`)
	require.NotContains(t, page, "No live worker serves queue")
}

// What changed in the last hour: a queue that fails more, and one that does less, beside the hour before; a worker; what somebody did.
func TestOverview_WhatChanged(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	require.NotContains(t, serve(t, db, onceqweb.Config{}).get("", http.StatusOK), "What changed")
	_, err := db.Pool.Exec(t.Context(), `
insert into onceq.job_counts (span, minute, took, started, completed, failed, dead, due, oldest, queue, kind, durations, waits)
select 1, date_bin('1 minute', statement_timestamp(), '2000-01-01Z') - ago * interval '1 minute', 0, done + failed, done, failed, 0, 0, 0, queue, 'k',
       array_fill(0, array[middle]) || (done + failed), array_fill(0, array[20]) || (done + failed)
  from (values ('a<b', 30, 100, 4, 20), ('a<b', 90, 100, 1, 20), ('slow', 30, 40, 0, 60), ('slow', 90, 100, 0, 20),
               ('same', 30, 100, 20, 20), ('same', 90, 100, 19, 20), ('rare', 30, 0, 9, 20), ('first', 30, 5, 12, 20)) c (queue, ago, done, failed, middle)`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.job_counts set failed = failed * 10 where queue = 'a<b'`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds, application)
values (9, 60000000, statement_timestamp() - interval '9 minutes', statement_timestamp() + interval '1 day', 4713, 1, 'web-5', 'v0.2.0', '{"slow": 1}', '{k}', 'v1.4.2')`)
	require.NoError(t, err)
	ops := onceqops.New(db.Queue)
	for _, who := range []string{"ada", "<bob>"} {
		_, err = ops.RecordAction(t.Context(), db.Pool, onceqops.Action{Who: who, What: "lane-limit", About: "book/", Why: "the bank is closed", Outcome: "the limit is 0"})
		require.NoError(t, err)
	}
	_, err = db.Pool.Exec(t.Context(), `update onceq.actions set at = at - interval '61 minutes' where who = 'ada'`)
	require.NoError(t, err)

	page := serve(t, db, onceqweb.Config{}).get("", http.StatusOK)
	changed := regexp.MustCompile(`(?s)What changed in the last hour.*?</section>`).FindString(page)
	require.Contains(t, changed, `<a href="./queue?name=a%3cb">a&lt;b</a>: 40 attempts failed, 10 in the hour before.`)
	require.Regexp(t, `>slow</a>: 40 jobs were done, 100 in the hour before; handlers took .+? \(p95\), .+? in the hour before\.`, changed)
	require.Contains(t, changed, `>first</a>: 12 attempts failed, 0 in the hour before.`)
	require.NotContains(t, changed, ">same<")
	require.NotContains(t, changed, ">rare<")
	require.Contains(t, changed, "A worker began: version v1.4.2.")
	require.Contains(t, changed, `&lt;bob&gt;</a>, <a href="./audit?what=lane-limit">lane-limit</a>, book/: the bank is closed`)
	require.NotContains(t, changed, "ada")
}

// A lane that stands still: the overview says so, the page of lanes names who holds it, and its limit can be set.
func TestLanes(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	book := onceq.Kind[int]{Name: "book", Queue: "billing", LaneRule: onceq.StopLane, Lane: func(int) string { return "a<b>7" }}
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	require.Contains(t, s.get("lanes", http.StatusOK), "No job waits for a lane")
	dead, err := db.Queue.Enqueue(ctx, db.Pool, book.Job(0))
	require.NoError(t, err)
	db.Drain(book.Handle(func(context.Context, *onceq.Lease, int) error { return onceq.Fatal(errors.New("no")) }))
	_, err = db.Queue.Enqueue(ctx, db.Pool, book.Job(1))
	require.NoError(t, err)

	s = serve(t, db, onceqweb.Config{Viewer: may(true, true)}) // without what the first one remembers
	text := s.get("", http.StatusOK)
	require.Contains(t, text, `<td data-label="Blocked"><a href="./lanes">1</a></td>`)
	require.Contains(t, text, fmt.Sprintf(`Redrive the job on its page when the cause is mended, or discard it, or say what happened to its effects. <a href="./job?id=%d">The job</a>`, dead.ID))
	text = s.get("lanes?family=book", http.StatusOK)
	require.Contains(t, text, "book/a&lt;b&gt;7")
	require.Contains(t, text, fmt.Sprintf(`stands still until somebody redrives, resolves or discards <a href="./job?id=%d">`, dead.ID))
	require.Contains(t, s.get("lanes?family=boo", http.StatusOK), "No job waits for a lane")
	require.Contains(t, s.get("lanes?after=book/z", http.StatusOK), "No job waits for a lane")
	s.get("lanes?family=a/b", http.StatusBadRequest)

	require.Contains(t, s.act("do", "lane-limit", "name", "book/a<b>7", "n", "0", "why", "the bank is closed"), "the limit is 0; it was 1")
	require.NoError(t, onceqops.New(db.Queue).Discard(ctx, db.Pool, dead.ID))
	require.Contains(t, s.get("lanes", http.StatusOK), "because its limit is 0")
	require.Contains(t, s.act("do", "lane-limit", "name", "book/", "n", "3", "why", "many accounts"), "the limit is 3; it was 1")
	for _, wrong := range [][]string{{"name", "book", "n", "1"}, {"name", "/a", "n", "1"}, {"name", "book/a", "n", "x"}, {"name", "book/a", "n", "-1"}, {"name", "book/a", "n", "2000000"}} {
		answer, _ := s.post(form(append(wrong, "do", "lane-limit", "why", "because")...), http.Header{"Sec-Fetch-Site": {"same-origin"}})
		require.Contains(t, []int{http.StatusBadRequest, http.StatusConflict}, answer.StatusCode, wrong)
	}
	for name, want := range map[string]int{"a<b>7": 0, "a": 3, "": 3} {
		n, err := db.Queue.LaneLimit(ctx, db.Pool, "book", name)
		require.NoError(t, err)
		require.Equal(t, want, n, name)
	}
	require.Contains(t, s.act("do", "remove-lane-limit", "name", "book/a<b>7", "n", "", "why", "it is open again"), "the limit is 3; it was 0")
	require.Contains(t, s.act("do", "remove-lane-limit", "name", "book/", "why", "few accounts"), "the limit is 1; it was 3")
	for _, wrong := range [][]string{{"name", "book", "why", "x"}, {"name", "book/"}} {
		answer, _ := s.post(form(append(wrong, "do", "remove-lane-limit")...), http.Header{"Sec-Fetch-Site": {"same-origin"}})
		require.Equal(t, http.StatusBadRequest, answer.StatusCode, wrong)
	}
}

// A group with a dead member: the overview leads to it, its page names the dead one first, and there the dead ones are redriven
// and the group is cancelled.
func TestGroups(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	scan := onceq.Kind[int]{Name: "scan"}
	report := onceq.Kind[string]{Name: "report"}
	drain := func(broken bool) {
		db.Drain(scan.Handle(func(_ context.Context, l *onceq.Lease, n int) error {
			if n == 2 && broken {
				return onceq.Fatal(errors.New("the page is <b>torn"))
			}
			return l.SetResult("<i>fine")
		}))
	}
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	require.Contains(t, s.get("groups", http.StatusOK), "No job waits for others")
	add := func() (id int64, members []int64) {
		t.Helper()
		g, err := db.Queue.EnqueueGroup(ctx, db.Pool, []onceq.Job{scan.Job(1), scan.Job(2), scan.Job(3)}, report.Job("may"))
		require.NoError(t, err)
		for _, m := range g.Members {
			members = append(members, m.ID)
		}
		return g.Then.ID, members
	}
	id, members := add()
	drain(true)
	dead := members[1]

	s = serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	reader := serve(t, db, onceqweb.Config{})
	group := fmt.Sprintf("group?id=%d", id)
	require.Contains(t, s.get("", http.StatusOK), fmt.Sprintf(`or say what happened to the effects of held ones. <a href="./%s">The group</a>`, group))
	for _, s := range []*site{s, reader} {
		text := s.get("groups", http.StatusOK)
		require.Contains(t, text, fmt.Sprintf(`<a href="./%s">%d</a>`, group, id))
		require.Contains(t, text, "3 of 3")
		require.Contains(t, text, "it stands still until somebody redrives or discards dead members")
		text = s.get(group, http.StatusOK)
		require.Equal(t, 2, strings.Count(text, "the page is &lt;b&gt;torn"), "among the dead ones, and among all members")
		require.Less(t, strings.Index(text, fmt.Sprintf(`<a href="./job?id=%d">`, dead)), strings.Index(text, fmt.Sprintf(`<a href="./job?id=%d">`, members[0])), "dead ones come first")
	}
	require.Contains(t, s.get(group, http.StatusOK), "&lt;i&gt;fine")
	require.NotContains(t, reader.get(group, http.StatusOK), "fine")
	require.NotContains(t, reader.get(group, http.StatusOK), "./confirm")
	require.Contains(t, s.get(fmt.Sprintf("%s&after=%d", group, members[1]), http.StatusOK), fmt.Sprintf(`job?id=%d"`, members[2]))
	require.Contains(t, s.get(fmt.Sprintf("job?id=%d", id), http.StatusOK), fmt.Sprintf(`<a href="./%s">0 of 3 jobs</a>`, group))
	require.Contains(t, s.get(fmt.Sprintf("job?id=%d", dead), http.StatusOK), fmt.Sprintf(`<a href="./%s">group %d</a>`, group, id))
	graph := func(id int64) string {
		page := s.get(fmt.Sprintf("job?id=%d", id), http.StatusOK)
		return regexp.MustCompile(`(?s)<div class="graph">.*?</div>`).FindString(page)
	}
	first := fmt.Sprintf(`<ul aria-label="Jobs before it"><li class="dead"><a href="./job?id=%d">%d</a> scan`, dead, dead)
	require.Contains(t, graph(id), first, "dead ones come first")
	require.Equal(t, 4, strings.Count(graph(id), "<li"), "three and itself: %s", graph(id))
	require.Contains(t, graph(dead), fmt.Sprintf(`<ul aria-label="Jobs that wait for it"><li><a href="./job?id=%d">`, id))
	var many []onceq.Job
	for n := range 40 {
		many = append(many, scan.Job(n+10))
	}
	large, err := db.Queue.EnqueueGroup(ctx, db.Pool, many, report.Job("large"))
	require.NoError(t, err)
	require.Contains(t, graph(large.Then.ID), fmt.Sprintf(`<a href="./group?id=%d">34 more</a>`, large.Then.ID))
	_, _, err = onceqops.New(db.Queue).CancelMany(ctx, db.Pool, onceqops.Filter{Group: large.Then.ID})
	require.NoError(t, err)
	text := s.get(fmt.Sprintf("jobs?group=%d&state=dead", id), http.StatusOK)
	require.Contains(t, text, fmt.Sprintf(`job?id=%d"`, dead))
	require.NotContains(t, text, fmt.Sprintf(`job?id=%d"`, id))
	s.get("group", http.StatusBadRequest)
	s.get("group?id=x", http.StatusBadRequest)
	s.get("group?id=999999", http.StatusNotFound)

	confirmed := func(address string) string {
		t.Helper()
		page := s.get(address, http.StatusOK)
		pairs := []string{"why", "the scanner is mended"}
		for _, m := range hidden.FindAllStringSubmatch(page, -1) {
			pairs = append(pairs, html.UnescapeString(m[1]), html.UnescapeString(m[2]))
		}
		return s.act(pairs...)
	}
	require.Contains(t, confirmed(fmt.Sprintf("confirm?all=1&do=redrive-many&state=dead&group=%d", id)), "1 run again")
	drain(false)
	id, _ = add()
	reader.get(fmt.Sprintf("confirm?do=cancel-group&id=%d", id), http.StatusForbidden)
	s.get("confirm?do=cancel-group&id=999999", http.StatusNotFound)
	answer, _ := s.post(form("do", "cancel-group", "id", fmt.Sprint(id)), http.Header{"Sec-Fetch-Site": {"same-origin"}})
	require.Equal(t, http.StatusBadRequest, answer.StatusCode, "it says why")
	require.Contains(t, confirmed(fmt.Sprintf("confirm?do=cancel-group&id=%d", id)), "4 jobs cancelled; 0 run and were asked to end")
	require.Contains(t, s.get(fmt.Sprintf("group?id=%d", id), http.StatusOK), "is cancelled.")
	require.Contains(t, s.get("audit", http.StatusOK), "cancel-group")
}

// Limits: who has them, who waits and since when; set and removed after a question, by those who may act.
func TestLimits(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	name := `pro"<b>vider`
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	reader := serve(t, db, onceqweb.Config{})
	require.Contains(t, s.get("lanes", http.StatusOK), "No limit is set, and no job waits for one")
	var ids []int64
	for n := range 3 {
		r, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "charge", Limit: name, Payload: n})
		require.NoError(t, err)
		ids = append(ids, r.ID)
	}
	leases, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 3})
	require.NoError(t, err)
	require.Len(t, leases, 1)
	for _, s := range []*site{s, reader} {
		text := html.UnescapeString(regexp.MustCompile(`\s*\n\s*`).ReplaceAllString(s.get("lanes", http.StatusOK), ""))
		require.Contains(t, text, `<th scope="row">`+name+`</th><td data-label="At once" class="words">1 <span class="quiet">not set itself</span></td><td data-label="Rate" class="words">any</td><td data-label="Live">1</td><td data-label="Waiting">2</td><td data-label="Oldest waits for">`)
		require.Contains(t, text, fmt.Sprintf(`it is full; live: <a href="./job?id=%d">job %d</a></td>`, leases[0].ID, leases[0].ID))
		require.NotContains(t, s.get("lanes", http.StatusOK), "<b>vider")
		text = s.get(fmt.Sprintf("job?id=%d", ids[2]), http.StatusOK)
		require.NotContains(t, text, "<b>vider")
		link := regexp.MustCompile(`<dt>Limit</dt><dd><a href="\./([^"#]*)`).FindStringSubmatch(text)
		require.NotNil(t, link)
		text = s.get(html.UnescapeString(link[1]), http.StatusOK)
		require.Contains(t, text, "it is full; live:")
		require.NotContains(t, text, "<b>vider")
	}
	require.Contains(t, s.get("lanes?behind=z", http.StatusOK), "No limit is set, and no job waits for one")
	require.Contains(t, s.get("lanes?limit=other", http.StatusOK), "no due job waits for it")
	s.get("lanes?limit=/a", http.StatusBadRequest)

	// Those who only read see no form, and cannot do it by hand.
	require.NotContains(t, reader.get("lanes", http.StatusOK), "./confirm")
	reader.get("confirm?do=limit&name=a&at-once=1", http.StatusForbidden)
	answer, _ := reader.post(form("do", "limit", "name", "a", "at-once", "1", "why", "x"), http.Header{"Sec-Fetch-Site": {"same-origin"}})
	require.Equal(t, http.StatusForbidden, answer.StatusCode)

	confirmed := func(fields ...string) []string {
		t.Helper()
		page := s.get("confirm?"+form(fields...).Encode(), http.StatusOK)
		require.NotContains(t, page, "<b>vider")
		var pairs []string
		for _, m := range hidden.FindAllStringSubmatch(page, -1) {
			pairs = append(pairs, html.UnescapeString(m[1]), html.UnescapeString(m[2]))
		}
		return append(pairs, "why", "the contract")
	}
	asks := html.UnescapeString(s.get("confirm?"+form("do", "limit", "name", name, "at-once", "20", "rate", "10", "per", "1m").Encode(), http.StatusOK))
	require.Contains(t, asks, fmt.Sprintf("Set limit %q to 20 at once, 10 in 1 min. Now it is 1 at once, which nobody has set itself. Live: 1. Waiting: 2.", name))
	done := s.act(confirmed("do", "limit", "name", name, "at-once", "20", "rate", "10", "per", "1m")...)
	require.Contains(t, done, "it is 20 at once, 10 in 1 min, in bursts of 2; it was 1 at once")
	require.Contains(t, done, "10 in 1 min, in bursts of 2</td>")
	require.Contains(t, s.act(confirmed("do", "limit", "name", name, "max", "10")...), "it is at most 10 in any 1 s; it was 20 at once, 10 in 1 min")
	require.Contains(t, s.get("lanes", http.StatusOK), "at most 10 in any 1 s</td>")
	s.act(confirmed("do", "limit", "name", "family/", "at-once", "0")...)
	require.Contains(t, s.get("lanes?limit=family/a", http.StatusOK), "it lets no job start")
	require.Contains(t, s.get("confirm?do=limit&name=family/a&at-once=0", http.StatusOK), "None of its jobs starts")
	require.Contains(t, s.get("confirm?do=remove-limit&name=family/a", http.StatusOK), "There is none")
	require.Contains(t, s.act(confirmed("do", "remove-limit", "name", name)...), "it is 1 at once; it was at most 10 in any 1 s")
	for _, wrong := range [][]string{{"at-once", "1"}, {"name", "a"}, {"name", "a", "at-once", "x"}, {"name", "a", "rate", "-1"}, {"name", "a", "rate", "1", "per", "soon"},
		{"name", "/a", "at-once", "1"}, {"name", "a", "max", "1", "burst", "1"}, {"name", "a", "at-once", "99999999999"}, {"name", "a", "at-once", "1", "per", "1s"}} {
		answer, _ := s.post(form(append(wrong, "do", "limit", "why", "because")...), http.Header{"Sec-Fetch-Site": {"same-origin"}})
		require.Contains(t, []int{http.StatusBadRequest, http.StatusConflict}, answer.StatusCode, wrong)
	}
	answer, _ = s.post(form("do", "remove-limit", "name", "family/"), http.Header{"Sec-Fetch-Site": {"same-origin"}})
	require.Equal(t, http.StatusBadRequest, answer.StatusCode, "without a reason")
	limits, err := onceqops.New(db.Queue).Limits(ctx, db.Pool, onceqops.LimitFilter{})
	require.NoError(t, err)
	require.Len(t, limits, 2)
	require.Equal(t, "family/", limits[0].Name)
	require.False(t, limits[1].Set)
	trail, err := onceqops.New(db.Queue).Actions(ctx, db.Pool, onceqops.ActionFilter{Limit: 10})
	require.NoError(t, err)
	require.Contains(t, trail[len(trail)-1].Outcome, "refused: ") // the reader's
	require.Equal(t, fmt.Sprintf("limit %q", name), trail[len(trail)-2].About)
	require.Equal(t, "the contract", trail[len(trail)-2].Why)
}

func TestJobs_PagesByKey(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	var jobs []onceq.Job
	for range 120 {
		jobs = append(jobs, onceq.Job{Kind: "k", Queue: "many", Payload: 1})
	}
	all, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{})
	rows, older := regexp.MustCompile(`href="\./job\?id=(\d+)"`), regexp.MustCompile(`href="\./(jobs\?[^"]*)" rel="next"`)
	var seen []string
	for path := "jobs?queue=many"; path != ""; {
		page := s.get(path, http.StatusOK)
		for _, m := range rows.FindAllStringSubmatch(page, -1) {
			seen = append(seen, m[1])
		}
		if path = ""; older.MatchString(page) {
			path = html.UnescapeString(older.FindStringSubmatch(page)[1])
			require.NotContains(t, path, "offset")
		}
	}
	require.Len(t, seen, 120)
	for i, r := range all {
		require.Equal(t, fmt.Sprint(r.ID), seen[119-i])
	}
}

// What is open to everybody is open for reading alone. Who has no name gets nothing, whatever else Viewer says of them.
func TestViewer_EverybodyOnlyReads(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{})
	for at, text := range s.crawl(t) {
		require.NotContains(t, text, `method="post"`, at)
		for _, secret := range []string{"visa-4242", "amount", "nobody0@", `"sheets"`, "trace: abc"} {
			require.NotContains(t, text, secret, at)
		}
	}
	require.Contains(t, s.get(fmt.Sprintf("job?id=%d", d.Held), http.StatusOK), "hidden from you")
	require.Contains(t, s.get("", http.StatusOK), "only reading")
	s.get("confirm?do=discard&id=1", http.StatusForbidden)
	answer, _ := s.post(form("do", "redrive", "id", fmt.Sprint(d.Dead[0])), nil)
	require.Equal(t, http.StatusForbidden, answer.StatusCode)
	s.state(db, d.Dead[0], onceq.StateDead)
	require.Contains(t, s.log.String(), "refused to act")
	require.Contains(t, s.get("", http.StatusOK), "anonymous at 127.0.0.1")

	// Nobody.
	no := serve(t, db, onceqweb.Config{Viewer: func(*http.Request) (onceqweb.Viewer, error) { return onceqweb.Viewer{}, errors.New("no session") }})
	for _, path := range []string{"", "jobs", "live?of=overview", fmt.Sprintf("job?id=%d", d.Held)} {
		require.Equal(t, "You may not see this page.\n", no.get(path, http.StatusForbidden))
	}
	require.Contains(t, no.log.String(), "no session")
	for _, v := range []onceqweb.Viewer{{}, {Payloads: true}, {Act: true}} {
		nameless := serve(t, db, onceqweb.Config{Viewer: func(*http.Request) (onceqweb.Viewer, error) { return v, nil }})
		for _, path := range []string{"", "jobs", "live?of=overview"} {
			nameless.get(path, http.StatusForbidden)
		}
		require.Contains(t, nameless.log.String(), "without a Name")
	}
}

var doing = regexp.MustCompile(`name="do" value="([^"]*)"|confirm\?(?:[^"]*&amp;)?do=([a-z-]*)`)

// Each right is to its own actions, and a viewer is shown no others.
func TestViewer_Rights(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	rights := map[string][]string{
		"run":      {"retry", "retry-many", "redrive", "redrive-many", "fire", "backfill"},
		"change":   {"cancel", "cancel-many", "cancel-group", "discard", "discard-many", "move", "move-many"},
		"decide":   {"resolve", "resolve-many", "resolve-key", "limit", "remove-limit", "lane-limit", "remove-lane-limit", "pause", "resume", "pause-queue", "resume-queue", "pause-kind", "resume-kind", "pause-limit", "resume-limit"},
		"schedule": {"put-schedule", "remove-schedule"},
	}
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "provider", onceq.Limit{AtOnce: 1}))
	require.NoError(t, db.Queue.PauseKind(t.Context(), db.Pool, "nobodys", "x"))
	_, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, []onceq.Job{{Kind: "a", Payload: 1}}, onceq.Job{Kind: "b", Payload: 1})
	require.NoError(t, err)
	for right, its := range rights {
		viewer := onceqweb.Viewer{Name: right, Run: right == "run", Change: right == "change", Decide: right == "decide", Schedule: right == "schedule"}
		s := serve(t, db, onceqweb.Config{Viewer: func(*http.Request) (onceqweb.Viewer, error) { return viewer, nil }, Schedules: d.Schedules})
		shown := map[string]bool{}
		for at, text := range s.crawl(t) {
			require.NotContains(t, text, "only reading", at)
			for _, m := range doing.FindAllStringSubmatch(text, -1) {
				require.Contains(t, its, m[1]+m[2], at)
				shown[m[1]+m[2]] = true
			}
		}
		require.GreaterOrEqual(t, len(shown), min(4, len(its)), "%s: %v", right, shown)
		for other, forms := range rights {
			for _, do := range forms {
				answer, text := s.post(form("do", do), http.Header{"Sec-Fetch-Site": {"same-origin"}}) // without what it is about
				require.Equal(t, map[bool]int{true: http.StatusBadRequest, false: http.StatusForbidden}[other == right], answer.StatusCode, "%s %s: %s", right, do, text)
				if other != right {
					s.get("confirm?do="+do, http.StatusForbidden)
				}
			}
		}
		answer, _ := s.post(form("do", "drop table"), nil)
		require.Equal(t, http.StatusBadRequest, answer.StatusCode)
	}
	all := serve(t, db, onceqweb.Config{Viewer: func(*http.Request) (onceqweb.Viewer, error) {
		return onceqweb.Viewer{Name: "ada@example.com", Act: true, Schedule: true}, nil
	}})
	for _, forms := range rights {
		for _, do := range forms {
			answer, _ := all.post(form("do", do), nil)
			require.Equal(t, http.StatusBadRequest, answer.StatusCode, do)
		}
	}
	trail, err := onceqops.New(db.Queue).Actions(t.Context(), db.Pool, onceqops.ActionFilter{Limit: 1000})
	require.NoError(t, err)
	require.Len(t, trail, 3*(6+7+15+2), "each that was refused")
}

// What differs between two jobs by their payloads, metadata, results and notes alone is nowhere in what a viewer without Payloads
// gets: not in a page, not in its size, and not in what its stream follows.
func TestPayloads_LeaveNoTrace(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	c := &counter{woken: make(chan struct{}, 100)}
	cfg := db.Pool.Config()
	cfg.ConnConfig.Tracer = c
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg) // the page's alone
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	kept := onceq.Kind[int]{Name: "kept", Keep: time.Hour, Key: func(n int) string { return fmt.Sprint("key-", n) }}
	g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, []onceq.Job{kept.Job(1)}, onceq.Job{Kind: "then", Payload: 1, Delay: time.Hour})
	require.NoError(t, err)
	db.Drain(kept.Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	running := d.Running.ID
	change := func(payload, note string) {
		t.Helper()
		result := map[bool]string{true: "null", false: "'" + payload + "'"}[payload == "1"]
		for _, statement := range []string{
			`update onceq.jobs set payload = '` + payload + `', metadata = '{"m":"` + note + `"}'`,
			`update onceq.jobs set progress = jsonb_build_object('claims', claims, 'since', created_at, 'done', 1, 'total', 3, 'note', '` + note + `', 'at', created_at) where claims > 0`,
			`update onceq.job_history set payload = '` + payload + `', metadata = '{"m":"` + note + `"}', result = ` + result,
			`update onceq.job_fences set result = ` + result + ` where state = 3`,
			`update onceq.schedules set job = job || '{"payload": ` + payload + `, "metadata": {"m": "` + note + `"}}'`,
		} {
			_, err := db.Pool.Exec(t.Context(), statement)
			require.NoError(t, err)
		}
	}
	// What the pages say of time: a worker that is seen stays so, what is due or paused has been so for long, and nothing is counted. A
	// job's timeline goes on.
	_, err = db.Pool.Exec(t.Context(), `
with due as (update onceq.jobs set run_at = run_at - interval '1 hour' where run_at < now() and leased_until is null),
seen as (update onceq.workers set seen_at = seen_at + interval '1 day' where id = $1),
paused as (update onceq.pauses set paused_at = paused_at - interval '1 day')
delete from onceq.job_counts`, trouble.StuckWorker)
	require.NoError(t, err)
	moving := regexp.MustCompile(`<time[^>]*>[^<]*</time>|<span class="quiet">(?:in [^<]*|[^<]* ago|just now)</span>|\d+ (?:s|min|h)\b(?: \d+ (?:s|min)\b)?|live\?of=overview&amp;v=\d+|x="[\d.]+" y="2" width="[\d.]+"|<figcaption class="quiet"><span>[^<]*</span> <span>[^<]*</span></figcaption>`)
	// A preset of time is another one in the next minute, and as long ago.
	minute := regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d(?::|%3[Aa])\d\d`)
	ago := func(text string) string {
		return minute.ReplaceAllStringFunc(text, func(escaped string) string {
			text, err := url.QueryUnescape(escaped)
			require.NoError(t, err)
			at, err := time.Parse("2006-01-02T15:04", text)
			require.NoError(t, err)
			return time.Since(at).Round(15 * time.Minute).String()
		})
	}
	other := newDB(t)
	read := func() map[string]string {
		one, err := onceqweb.New(db.Queue, pool, onceqweb.Config{Viewer: onceqweb.Everybody, Schedules: d.Schedules, Logger: slog.New(slog.DiscardHandler)}) // with nothing in its memory
		require.NoError(t, err)
		one.Patient()
		s := several(t, map[string]*onceqweb.Handler{"one": one, "other": pageOf(t, other, other.Pool, onceqweb.Everybody)})
		c.mu.Lock()
		c.seen = nil
		c.mu.Unlock()
		texts := make(map[string]string)
		for at, text := range s.crawl(t) {
			texts[ago(strings.TrimPrefix(at, s.base))] = moving.ReplaceAllString(ago(text), "")
		}
		for late := time.Now().Add(10 * time.Minute); strings.Contains(texts[""], "not all asked yet"); { // a second is not enough on a busy machine
			require.True(t, time.Now().Before(late))
			texts[""] = moving.ReplaceAllString(ago(s.get("", http.StatusOK)), "")
		}
		texts["key"] = moving.ReplaceAllString(s.get("one/keys?key=key-1&scope=kept", http.StatusOK), "") // no page leads to it
		for _, path := range []string{"", "one/", "one/jobs", "one/jobs?kind=kept", "one/effects?of=others", "one/errors", "one/kind?name=kept", "one/schedule?name=reminders",
			fmt.Sprintf("one/worker?id=%d", trouble.StuckWorker), fmt.Sprintf("one/group?id=%d", g.Then.ID), fmt.Sprintf("one/job?id=%d", running), "other/"} {
			require.NotEmpty(t, texts[path], path)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, statement := range c.seen { // a page that reads a payload takes the longer, the larger it is
			require.NotRegexp(t, `[jwh]\.(payload|metadata|result)`, statement)
		}
		return texts
	}
	change("1", "a")
	before := read()
	change(`{"pin":"493817","more":"`+strings.Repeat("x", 5000)+`"}`, "another note")
	after := read()
	require.Equal(t, slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(after)))
	for path, text := range after {
		require.Equal(t, before[path], text, path)
	}

	// A stream says nothing of it either. What follows is seen, and is the first that is.
	s := serve(t, db, onceqweb.Config{}, pool)
	page := html.UnescapeString(s.get(fmt.Sprintf("job?id=%d", running), http.StatusOK))
	follows := regexp.MustCompile(`\./live\?of=([^"]*)"`).FindStringSubmatch(page)
	require.NotNil(t, follows)
	c.mu.Lock()
	looks := c.lists
	c.mu.Unlock()
	change(`{"pin":"1"}`, "a third")
	events := s.follow(t.Context(), follows[1])
	require.Eventually(t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.lists >= looks+2
	}, time.Minute, 10*time.Millisecond)
	require.Empty(t, events)
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set max_attempts = max_attempts + 1 where id = $1`, running)
	require.NoError(t, err)
	require.Equal(t, "change", <-events)
}

// received counts what the database sends.
type received struct{ bytes atomic.Int64 }

type countedConn struct {
	net.Conn
	to *received
}

func (c countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.to.bytes.Add(int64(n))
	return n, err
}

// The database sends no result for a viewer without Payloads, so that no page takes the longer, the larger the results are. Of a
// job with many effects it sends a bounded part, whoever asks.
func TestResults_AreNotReadForNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx, q := t.Context(), db.Queue
	const size, effects = 250 << 10, 60
	big := strings.Repeat("x", size)
	_, err := onceq.Do(ctx, q, onceq.FenceSpec{Key: "big"}, func(context.Context, *onceq.FenceLease) (string, error) { return big, nil })
	require.NoError(t, err)
	k := onceq.Kind[int]{Name: "k", Timeout: onceq.NoTimeout, Keep: time.Hour, Key: func(int) string { return "of-job" }}
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{k.Job(1)}, onceq.Job{Kind: "then", Delay: time.Hour})
	require.NoError(t, err)
	db.Drain(k.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		for i := range effects {
			if _, err := onceq.Once(ctx, l, fmt.Sprintf("e%03d", i), func(context.Context, string) (string, error) { return big, nil }); err != nil {
				return err
			}
		}
		return l.SetResult(big)
	}))

	got := &received{}
	cfg := db.Pool.Config()
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return countedConn{conn, got}, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg) // the page's alone
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	read := func(s *site, path string) (bytes int, page string) {
		got.bytes.Store(0)
		page = s.get(path, http.StatusOK)
		return int(got.bytes.Load()), page
	}
	job := fmt.Sprintf("job?id=%d", g.Members[0].ID)
	paths := []string{"keys?key=big", "keys?key=of-job", job, fmt.Sprintf("group?id=%d", g.Then.ID)}
	nobody := serve(t, db, onceqweb.Config{Viewer: onceqweb.Everybody}, pool)
	somebody := serve(t, db, onceqweb.Config{Viewer: may(false, true)}, pool)
	for _, path := range paths {
		n, page := read(nobody, path)
		require.Less(t, n, size/2, path)
		require.Contains(t, page, "hidden", path)
		n, page = read(somebody, path)
		require.Greater(t, n, size, path)
		require.Contains(t, page, "xxxxxxxx", path)
	}

	n, page := read(serve(t, db, onceqweb.Config{Viewer: may(false, true)}, pool), job)
	require.Less(t, n, 25*size)
	require.Contains(t, page, "e059")
	require.Contains(t, page, fmt.Sprintf("onceq jobs show %d", g.Members[0].ID), "which prints the other results")

	// Of very many effects it names the first ones, and says so.
	_, err = db.Pool.Exec(ctx, `insert into onceq.job_fences select (jsonb_populate_record(f, jsonb_build_object('key', f.key || '-' || i, 'result', null))).*
  from onceq.job_fences f cross join generate_series(1, 10) i where f.class = (select class from onceq.job_fences where key like '%/e000')
   and f.key like '%/e0%'`)
	require.NoError(t, err)
	_, page = read(serve(t, db, onceqweb.Config{Viewer: onceqweb.Everybody}, pool), job)
	require.Equal(t, 200, strings.Count(page, `<article class="effect`))
	require.Contains(t, page, "job has more effects")
}

func TestMask(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	var mu sync.Mutex
	fields := make(map[string]bool)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true), Mask: func(kind, field, text string) string {
		mu.Lock()
		fields[kind+" "+field] = true
		mu.Unlock()
		return strings.NewReplacer("visa-4242", "••••", "nobody@example.com", "•••", `"sheets"`, `"•••••"`, "abc", "•••").Replace(text)
	}})
	for at, text := range s.crawl(t) {
		text = html.UnescapeString(text)
		for _, secret := range []string{"visa-4242", "<nobody@example.com>", `"sheets"`, "trace: abc"} {
			require.NotContains(t, text, secret, at)
		}
	}
	s.act("do", "resolve", "id", fmt.Sprint(d.Held), "effect", "charge", "decision", "applied", "result", `{"receipt":"visa-4242"}`, "why", "looked it up")
	require.NotContains(t, s.get(fmt.Sprintf("job?id=%d", d.Held), http.StatusOK), "visa-4242")
	// Bytes that are no text are shown in hex, in which a mask finds nothing.
	raw, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "raw", Payload: []byte("\x00\xff visa-4242 \x01")})
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set progress = jsonb_build_object('claims', claims, 'since', created_at, 'done', 1, 'total', 3, 'note', 'row of visa-4242', 'at', created_at) where id = $1`, d.Running.ID)
	require.NoError(t, err)
	page := s.get(fmt.Sprintf("job?id=%d", raw.ID), http.StatusOK)
	require.Contains(t, page, "00 ff 20 e2 80 a2")
	require.NotContains(t, page, "76 69 73 61") // visa
	page = s.get(fmt.Sprintf("job?id=%d", d.Running.ID), http.StatusOK)
	require.Contains(t, page, "row of ••••")
	require.NotContains(t, page, "visa-4242")
	reader := serve(t, db, onceqweb.Config{})
	require.NotContains(t, reader.get(fmt.Sprintf("job?id=%d", d.Running.ID), http.StatusOK), "row of")
	for _, f := range []string{"charge payload", "report result", "report metadata", "welcome error", "charge error", "charge effect charge"} {
		require.True(t, fields[f], f)
	}
}

// What the application's own errors say goes through the mask wherever everybody sees it: in what Health says, in a schedule's ledger,
// and in the trail.
func TestMask_ErrorsThatEverybodySees(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	failed := errors.New("503 for secret@example.com")
	cron, err := onceqcron.New(db.Queue, db.Pool, onceqcron.Config{},
		onceqcron.Schedule{Name: "refused", Spec: "@hourly", JobFor: func(onceqcron.Tick) (onceq.Job, error) { return onceq.Job{}, failed }},
		onceqcron.Schedule{Name: "late", Spec: "@hourly", Job: onceq.Job{Kind: "k"}})
	require.NoError(t, err)
	require.NoError(t, cron.Register(ctx))
	for i := range 12 {
		_, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "mail", Payload: i})
		require.NoError(t, err)
	}
	claimed, err := db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 12})
	require.NoError(t, err)
	for _, l := range claimed {
		require.NoError(t, l.Fail(ctx, failed))
	}
	for _, statement := range []string{`
insert into onceq.job_counts (minute, took, started, completed, failed, dead, queue, kind, durations)
values (date_trunc('minute', now()), 0, 0, 0, 12, 0, 'default', 'mail', array_fill(0, array[14]))`, `
insert into onceq.schedule_ticks (schedule, at, until, ticks, outcome, note) values ('refused', now() - interval '1 h', now() - interval '1 h', 1, 'refused', '503 for secret@example.com')`, `
update onceq.schedules set next_at = now() - interval '1 h' where name = 'late'`, `
update onceq.jobs set attempts = 1, errors = '[{"attempt": 1, "error": "503 for secret@example.com", "at": "2026-01-01T00:00:00Z"}]' where queue = 'onceqcron'`} {
		_, err := db.Pool.Exec(ctx, statement)
		require.NoError(t, err)
	}
	mask := func(_, field, text string) string {
		if field != "error" {
			return text
		}
		return strings.ReplaceAll(text, "secret@example.com", "•••")
	}
	open := serve(t, db, onceqweb.Config{Viewer: may(true, false), Schedules: cron})
	s := serve(t, db, onceqweb.Config{Viewer: may(true, false), Schedules: cron, Mask: mask})
	for where, n := range map[string]int{"": 3, "schedule?name=refused": 1} {
		require.Equal(t, n, strings.Count(open.get(where, http.StatusOK), "secret@example.com"), where)
		page := s.get(where, http.StatusOK)
		require.NotContains(t, page, "secret@example.com", where)
		require.Equal(t, n, strings.Count(page, "503 for •••"), where)
	}
	answer, text := s.post(form("do", "fire", "name", "refused"), http.Header{"Sec-Fetch-Site": {"same-origin"}})
	require.Equal(t, http.StatusConflict, answer.StatusCode)
	require.Contains(t, text, "503 for •••")
	trail := s.get("audit", http.StatusOK)
	require.Contains(t, trail, "503 for •••")
	require.NotContains(t, text+trail, "secret@example.com")

	// A mask that hides all of an error leaves what else a finding says.
	hides := serve(t, db, onceqweb.Config{Schedules: cron, Mask: func(_, field, text string) string {
		return map[bool]string{true: "hidden", false: text}[field == "error"]
	}})
	require.Contains(t, html.UnescapeString(hides.get("", http.StatusOK)), `jobs that were looked at: hidden.`)
	require.Contains(t, html.UnescapeString(hides.get("", http.StatusOK)), `<a href="./jobs?kind=mail&queue=default&state=retrying&state=dead">Its jobs</a>`)
}

// A mask that looks at the kind alone hides what a job of that kind has returned, wherever the page shows it.
func TestMask_ByKind(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx, q := t.Context(), db.Queue
	charge := onceq.Kind[int]{Name: "charge", Scope: func(int) string { return "tenant-7" }, Key: func(n int) string { return fmt.Sprint("c-", n) }}
	report := onceq.Kind[int]{Name: "report"}
	g, err := q.EnqueueGroup(ctx, db.Pool, []onceq.Job{charge.Job(1), charge.Job(2)}, report.Job(0))
	require.NoError(t, err)
	db.Drain(charge.Handle(func(_ context.Context, l *onceq.Lease, _ int) error { return l.SetResult("visa-4242") }))
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true), Mask: func(kind, _, text string) string {
		if kind == "charge" {
			return "•••"
		}
		return text
	}})
	open := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	for _, at := range []string{fmt.Sprintf("group?id=%d", g.Then.ID), "keys?key=c-1"} {
		require.Contains(t, open.get(at, http.StatusOK), "visa-4242", at)
		require.NotContains(t, s.get(at, http.StatusOK), "visa-4242", at)
	}
}

// A payload of five hundred levels is not made a thousand times as long by its indentation.
func TestPayload_OfManyLevels(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	deep := strings.Repeat("[", 400) + strings.Repeat("1,", 200_000) + "1" + strings.Repeat("]", 400)
	job, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: json.RawMessage(deep)})
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{Viewer: may(false, true)})
	require.Contains(t, s.get(fmt.Sprintf("job?id=%d", job.ID), http.StatusOK), "[[[[[[1, 1, 1")
}

// What a page keeps of what it has read is bounded, and goes by itself.
func TestCaches_AreBoundedAndEmptyThemselves(t *testing.T) {
	t.Parallel()
	c := &counter{woken: make(chan struct{}, 100)}
	db := newDB(t, queuetest.PoolConfig(func(p *pgxpool.Config) { p.ConnConfig.Tracer = c }))
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	var jobs []onceq.Job
	for range 20 {
		jobs = append(jobs, onceq.Job{Kind: "k", Payload: strings.Repeat("x", 1000<<10)})
	}
	all, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	most := 0
	for i, r := range all {
		s.get(fmt.Sprintf("job?id=%d", r.ID), http.StatusOK)
		s.get(fmt.Sprintf("jobs?queue=default&other=%d", i), http.StatusOK)
		n, bytes := s.page.Cached()
		require.LessOrEqual(t, bytes, 2*onceqweb.MaxCachedBytes)
		require.LessOrEqual(t, n, 500)
		most = max(most, bytes)
	}
	require.Positive(t, most)
	require.Eventually(t, func() bool { n, bytes := s.page.Cached(); return n == 0 && bytes == 0 }, 5*time.Minute, 10*time.Millisecond)

	// However a search is written, it is read once; if the machine stands still in between, it is forgotten, and tried anew.
	lists := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.lists
	}
	for i := 0; ; i++ {
		require.Less(t, i, 100)
		before := lists()
		for _, path := range []string{"jobs?state=dead&state=waiting&queue=q%d", "jobs?queue=q%d&state=waiting&state=dead&x=1", "jobs?queue=+q%d&state=dead&state=waiting&kind="} {
			s.get(fmt.Sprintf(path, i), http.StatusOK)
		}
		if lists() == before+1 {
			break
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, statement := range c.seen {
		if strings.Contains(statement, "live as (") {
			require.NotContains(t, statement, "j.payload")
		}
	}
}

// What a cache has forgotten, because it would hold too much, is gone, and does not wait for the time until which it was to be kept.
func TestCaches_KeepNothingThatTheyHaveForgotten(t *testing.T) {
	t.Parallel()
	require.LessOrEqual(t, onceqweb.KeptAfter(30, 1<<20), onceqweb.MaxCachedBytes>>20)
	require.Zero(t, onceqweb.KeptAfter(1, onceqweb.MaxCachedBytes+1), "an answer that is larger than all may be")
}

// A single job's form and the one for many offer the queues that workers serve, and fill in the one that a misspelt name may mean.
func TestMove_KnowsWhereTo(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	_, err := db.Pool.Exec(t.Context(), `
insert into onceq.workers (id, lease, started_at, seen_at, process, schema_version, host, version, queues, kinds)
values (9, 60000000, statement_timestamp(), statement_timestamp() + interval '1 day', 4713, 1, 'web-5', 'v0.1.0', '{"thumbnails": 1}', '{thumbnail}')`)
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `update onceq.jobs set run_at = run_at - interval '10 minutes' where id = $1`, d.Waiting)
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	for _, path := range []string{fmt.Sprintf("job?id=%d", d.Waiting), "confirm?all=1&do=move-many&queue=thumbnials"} {
		page := s.get(path, http.StatusOK)
		require.Regexp(t, `<input name="to"[^>]* list="queues" value="thumbnails">`, page)
		require.Contains(t, page, `<option value="imports">`)
		require.NotContains(t, page, `<option value="mail">`, "its worker is gone")
	}
}

func TestActions(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	ctx, q := t.Context(), db.Queue
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true), Schedules: d.Schedules})
	id := func(id int64) string { return fmt.Sprint(id) }

	s.act("do", "retry", "id", id(d.Retrying), "why", "the relay is back")
	j, err := q.Get(ctx, db.Pool, d.Retrying)
	require.NoError(t, err)
	require.False(t, j.RunAt.After(time.Now().Add(time.Minute)))
	require.Contains(t, s.act("do", "cancel", "id", id(d.Running.ID)), "its worker is asked to end it")
	s.act("do", "cancel", "id", id(d.Delayed))
	s.state(db, d.Delayed, onceq.StateCancelled)
	s.act("do", "redrive", "id", id(d.Dead[0]))
	s.state(db, d.Dead[0], onceq.StateWaiting)
	require.Contains(t, s.get("job?id="+id(d.Waiting), http.StatusOK), "Move it</button>")
	require.Contains(t, s.act("do", "move", "id", id(d.Waiting), "to", "thumbnails", "why", "misspelt"), "the job is in that queue")
	j, err = q.Get(ctx, db.Pool, d.Waiting)
	require.NoError(t, err)
	require.Equal(t, "thumbnails", j.Queue)
	require.Contains(t, s.get("confirm?do=discard&id="+id(d.Dead[1]), http.StatusOK), "happens a second time")
	s.act("do", "discard", "id", id(d.Dead[1]), "why", "no such person")
	_, err = q.Get(ctx, db.Pool, d.Dead[1])
	require.ErrorIs(t, err, onceq.ErrNotFound)
	require.Contains(t, s.get("job?id="+id(d.Dead[1]), http.StatusNotFound), "no such person", "what was done stays readable")

	// Effects.
	require.Contains(t, s.act("do", "resolve", "id", id(d.Held), "effect", "charge", "decision", "applied", "result", `"ch_1"`, "why", "found ch_1"), "the job is waiting")
	effects, err := onceqops.New(q).Effects(ctx, db.Pool, d.Held)
	require.NoError(t, err)
	require.Equal(t, `"ch_1"`, string(effects[0].Result))
	s.act("do", "resolve", "id", id(d.Held2), "effect", "charge", "decision", "ask", "why", "the kind asks now")
	s.state(db, d.Held2, onceq.StateWaiting)
	effects, err = onceqops.New(q).Effects(ctx, db.Pool, d.Held2)
	require.NoError(t, err)
	require.Equal(t, "uncertain", effects[0].State)
	s.act("do", "resolve", "id", id(d.Held2), "effect", "charge", "decision", "never", "why", "not there")
	effects, err = onceqops.New(q).Effects(ctx, db.Pool, d.Held2)
	require.NoError(t, err)
	require.Empty(t, effects)
	s.act("do", "resolve", "id", id(d.Uncertain), "effect", "charge", "decision", "ask", "why", "the provider is back")
	s.state(db, d.Uncertain, onceq.StateWaiting)
	s.act("do", "resolve-key", "class", "application", "scope", "default", "key", d.Fence, "decision", "applied", "result", "7", "why", "it is in the books")
	keys, err := onceqops.New(q).Keys(ctx, db.Pool, "", d.Fence)
	require.NoError(t, err)
	require.Equal(t, "completed", keys[0].State)

	// Schedules.
	require.Contains(t, s.act("do", "fire", "name", "nightly report", "why", "it was asked for"), "is enqueued")
	at := time.Now().Add(-3 * time.Hour).UTC().Truncate(time.Hour).Add(time.Minute)
	backfill := "confirm?do=backfill&name=reminders&from=" + at.Format("2006-01-02T15:04") + "&to=" + at.Add(59*time.Minute).Format("2006-01-02T15:04")
	ticks := regexp.MustCompile(`<b>([56])</b> jobs`).FindStringSubmatch(s.get(backfill, http.StatusOK))
	require.NotNil(t, ticks)
	require.Contains(t, s.act(s.confirmed(backfill, ticks[1])...), ticks[1]+" jobs are enqueued")
	require.NotContains(t, s.get(backfill, http.StatusOK), "<form", "nothing is left to fill")
	s.get("confirm?do=backfill&name=reminders", http.StatusBadRequest)
	s.get("confirm?do=backfill&name=none&from=2026-01-01", http.StatusNotFound)
	s.get("confirm?do=backfill&name=reminders&from=2001-01-01", http.StatusBadRequest)
	s.act("do", "pause", "name", "nightly report")
	require.Contains(t, s.get("schedule?name=nightly+report", http.StatusOK), "paused since")
	s.act("do", "resume", "name", "nightly report")
	require.NotContains(t, s.get("schedule?name=nightly+report", http.StatusOK), "paused since")

	// A process that does not have the schedule in its code asks one that has.
	elsewhere := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	require.Contains(t, elsewhere.act("do", "fire", "name", "nightly report"), "a worker that has the schedule in its code is asked")

	// Pauses.
	require.Contains(t, s.act("do", "pause-queue", "name", "mail", "why", "the relay is down"), "ada@example.com: the relay is down")
	require.Contains(t, s.get("job?id="+id(d.Dead[0]), http.StatusOK), "has been paused since")
	s.act("do", "resume-queue", "name", "mail")
	s.act("do", "resume-kind", "name", "remind")
	require.Contains(t, s.act("do", "resume-kind", "name", "remind"), "it was not paused")
	page := s.act("do", "pause-limit", "name", "provider", "for", "10m", "why", "429")
	require.Contains(t, page, "no worker takes its jobs for 10 min")
	require.Contains(t, page, "provider</a></th>")
	require.Contains(t, s.get("lanes?limit=provider", http.StatusOK), "it is paused until")
	require.NotContains(t, s.act("do", "resume-limit", "name", "provider"), "provider</a></th>")
	s.act("do", "pause-kind", "name", "welcome", "why", "x")
	pauses, err := onceqops.New(q).Pauses(ctx, db.Pool)
	require.NoError(t, err)
	require.Len(t, pauses, 1)
	require.Equal(t, "welcome", pauses[0].Kind)

	trail, err := onceqops.New(q).Actions(ctx, db.Pool, onceqops.ActionFilter{})
	require.NoError(t, err)
	require.Len(t, trail, 23)
	require.Equal(t, "the relay is back", trail[22].Why)
	for _, a := range trail {
		require.Equal(t, "ada@example.com", a.Who)
		require.NotEmpty(t, a.Outcome)
		require.Contains(t, s.log.String()+elsewhere.log.String(), "what="+a.What)
	}
	require.Contains(t, html.UnescapeString(s.get("audit", http.StatusOK)), `effect "charge": it did not happen`)
}

func TestActions_RefusedChangeNothingAndAreInTheTrail(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	ctx, q := t.Context(), db.Queue
	s := serve(t, db, onceqweb.Config{Viewer: may(true, false)})
	id := func(id int64) string { return fmt.Sprint(id) }
	for _, test := range []struct {
		status int
		text   string
		form   url.Values
	}{
		{409, "held effect", form("do", "redrive", "id", id(d.Held))},
		{409, "not finished", form("do", "discard", "id", id(d.Waiting), "why", "x")},
		{409, "a worker has it", form("do", "move", "id", id(d.Running.ID), "to", "x", "why", "x")},
		{404, "not found", form("do", "move", "id", "999999", "to", "x", "why", "x")},
		{400, "name of the queue", form("do", "move", "id", id(d.Waiting), "why", "x")},
		{400, "say why", form("do", "move", "id", id(d.Waiting), "to", "x")},
		{409, "at most", form("do", "move", "id", id(d.Waiting), "to", strings.Repeat("x", 1000), "why", "x")},
		{404, "not found", form("do", "cancel", "id", "999999")},
		{404, "not uncertain or held", form("do", "resolve", "id", id(d.Held), "effect", "other", "decision", "never", "why", "x")},
		{404, "no such schedule", form("do", "fire", "name", "none")},
		{400, "say why", form("do", "discard", "id", id(d.Dead[0]))},
		{400, "say why", form("do", "resolve", "id", id(d.Held), "effect", "charge", "decision", "never", "why", " ")},
		{400, "not JSON", form("do", "resolve", "id", id(d.Held), "effect", "charge", "decision", "applied", "result", "ch_1", "why", "x")},
		{400, `value="ch_1"`, form("do", "resolve", "id", id(d.Held), "effect", "charge", "decision", "applied", "result", "ch_1", "why", "x")}, // it is kept
		{400, "choose what is true", form("do", "resolve", "id", id(d.Held), "effect", "charge", "decision", "x", "why", "x")},
		{400, "name of a queue", form("do", "pause-queue", "why", "x")},
		{400, "say why", form("do", "pause-queue", "name", "mail")},
		{400, "for is not a time", form("do", "pause-queue", "name", "mail", "for", "soon", "why", "x")},
		{400, "no such action", form("do", "drop table")},
		{400, "id is missing", form("do", "cancel")},
		{400, "not a number", form("do", "cancel", "id", "1; drop table onceq.jobs")},
		{400, "begin with the search", form("do", "discard-many", "why", "x")},
		{400, "not valid UTF-8", form("do", "cancel", "id", "1", "why", "\xff")},
		{400, "longer than", form("do", "cancel", "id", "1", "why", strings.Repeat("x", 2000))},
		{400, "cannot be read", form("why", strings.Repeat("x", 100<<10))},
		{400, "all of them would be taken", form("do", "cancel-many", "after", "999999", "why", "x")},
		{400, "application or request", form("do", "resolve-key", "class", "job", "scope", "charge", "key", "order:4711", "decision", "never", "why", "x")},
	} {
		answer, text := s.post(test.form, nil)
		require.Equal(t, test.status, answer.StatusCode, "%v: %s", test.form, text)
		require.Contains(t, strings.ToLower(html.UnescapeString(text)), strings.ToLower(test.text), "%v", test.form)
	}
	// What was written stays in the form, with what is wrong beside it.
	kept := func(page string, texts ...string) {
		t.Helper()
		for _, text := range append(texts, `name="result"`, "value=\"ch_1\"", `role="alert">The result is not JSON`) {
			require.Contains(t, html.UnescapeString(page), text)
		}
	}
	answer, page := s.post(form("do", "resolve-key", "class", "application", "scope", "default", "key", d.Fence, "decision", "applied", "result", "ch_1", "why", "in the books"), nil)
	require.Equal(t, http.StatusBadRequest, answer.StatusCode)
	kept(page, `name="key" value="`+d.Fence+`"`, `name="class" value="application"`, `name="why"`, `value="in the books"`)
	many := "resolve-many&decision=applied&kind=charge&scope=charge&effect=charge&result=ch_1"
	kept(s.get("confirm?do="+many, http.StatusBadRequest), `action="./confirm"`, `name="kind" value="charge"`, `name="effect" value="charge"`, `name="scope" value="charge"`)
	s.get("confirm?do=resolve-many&decision=never&kind=charge&result=ch_1", http.StatusOK) // nobody asks for it
	s.state(db, d.Held, onceq.StateHeld)
	s.state(db, d.Dead[0], onceq.StateDead)
	trail, err := onceqops.New(q).Actions(ctx, db.Pool, onceqops.ActionFilter{})
	require.NoError(t, err)
	require.Len(t, trail, 9)
	for _, a := range trail {
		require.Contains(t, a.Outcome, "refused: ")
	}

	// Another site's page, in new and old browsers.
	for _, header := range []http.Header{{"Sec-Fetch-Site": {"cross-site"}}, {"Sec-Fetch-Site": {"same-site"}}, {"Origin": {"https://evil.example"}}, {"Origin": {"null"}}} {
		answer, _ := s.post(form("do", "redrive", "id", id(d.Dead[0])), header)
		require.Equal(t, http.StatusForbidden, answer.StatusCode, "%v", header)
		s.state(db, d.Dead[0], onceq.StateDead)
	}
	// An action is never a GET.
	s.get("act?do=redrive&id="+id(d.Dead[0]), http.StatusNotFound)
	s.state(db, d.Dead[0], onceq.StateDead)
}

var hidden = regexp.MustCompile(`<input type="hidden" name="([^"]*)" value="([^"]*)">`)

// confirmed reads a page that asks for confirmation, and returns its form.
func (s *site) confirmed(path, count string) (pairs []string) {
	s.t.Helper()
	page := s.get(path, http.StatusOK)
	require.Contains(s.t, page, "<b>"+count+"</b>")
	for _, m := range hidden.FindAllStringSubmatch(page, -1) {
		pairs = append(pairs, html.UnescapeString(m[1]), html.UnescapeString(m[2]))
	}
	return append(pairs, "why", "an outage", "typed", count)
}

// What is confirmed is what was counted, to the fraction of a second.
func TestActionsOnMany_KeepTheirTimes(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx, q := t.Context(), db.Queue
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	var jobs [3]onceq.Result
	for i := range jobs {
		var err error
		jobs[i], err = q.Enqueue(ctx, db.Pool, trouble.MailKind.Job(map[string]string{"to": "x@example.com"}))
		require.NoError(t, err)
	}
	db.Drain(trouble.MailKind.Handle(func(context.Context, *onceq.Lease, map[string]string) error { return onceq.Fatal(errors.New("no")) }))
	times := url.Values{}
	for i, name := range map[int]string{1: "from", 2: "before"} {
		job, err := q.Get(ctx, db.Pool, jobs[i].ID)
		require.NoError(t, err)
		times.Set(name, job.CreatedAt.UTC().Format(time.RFC3339Nano))
	}
	require.Contains(t, s.act(s.confirmed("confirm?all=1&do=discard-many&kind="+trouble.MailKind.Name+"&"+times.Encode(), "1")...), "1 discarded")
	s.state(db, jobs[0].ID, onceq.StateDead)
	s.state(db, jobs[2].ID, onceq.StateDead)
}

func TestActionsOnMany_CountBeforeAndSayAfter(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	ctx, q := t.Context(), db.Queue
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	count := func(f onceqops.Filter) int {
		t.Helper()
		n, err := onceqops.New(q).Count(ctx, db.Pool, f)
		require.NoError(t, err)
		return n
	}
	dead := onceqops.Filter{Queue: "mail", States: []onceq.State{onceq.StateDead}}

	redrive := s.confirmed("confirm?all=1&do=redrive-many&queue=mail", "3")
	// What dies after the count is not what was counted.
	late, err := q.Enqueue(ctx, db.Pool, trouble.MailKind.Job(map[string]string{"to": "late@example.com"}))
	require.NoError(t, err)
	db.Drain(trouble.MailKind.Handle(func(context.Context, *onceq.Lease, map[string]string) error { return onceq.Fatal(errors.New("no")) }))
	require.Equal(t, 4, count(dead))
	require.Contains(t, s.act(redrive...), "3 run again")
	require.Equal(t, 1, count(dead))
	s.state(db, late.ID, onceq.StateDead)

	marked := s.confirmed(fmt.Sprintf("confirm?do=cancel-many&ids=%d&ids=%d&ids=%d", d.Dead[0], d.Dead[1], d.Held), "2")
	require.Contains(t, s.act(marked...), "2 cancelled")
	s.state(db, d.Dead[0], onceq.StateCancelled)
	s.state(db, d.Dead[2], onceq.StateWaiting)
	s.get("confirm?all=1&do=cancel-many", http.StatusBadRequest)
	s.get("confirm?all=1&do=cancel-many&state=dead&queue=mail", http.StatusBadRequest)

	require.Contains(t, s.act(s.confirmed("confirm?all=1&do=discard-many&queue=mail&state=cancelled&state=dead", "4")...), "4 discarded")
	require.Equal(t, 0, count(onceqops.Filter{Queue: "mail", States: []onceq.State{onceq.StateDead, onceq.StateCancelled}}))

	s.get("confirm?do=resolve-many", http.StatusBadRequest)
	require.Contains(t, s.act(s.confirmed("confirm?do=resolve-many&decision=never&kind=charge&effect=charge", "2")...), "2 effects settled, 2 jobs run again")
	require.Equal(t, 0, count(onceqops.Filter{States: []onceq.State{onceq.StateHeld}}))
	require.NotContains(t, s.get("confirm?all=1&do=redrive-many&queue=nobody", http.StatusOK), "<form")

	trail, err := onceqops.New(q).Actions(ctx, db.Pool, onceqops.ActionFilter{})
	require.NoError(t, err)
	require.Len(t, trail, 8)
	require.Equal(t, "begins", trail[1].Outcome)
	require.Equal(t, `effect "charge" of held jobs, kind "charge": it did not happen`, trail[0].About)

	// A queue's name was misspelt: what waits there goes to the right one.
	require.Contains(t, s.get("confirm?all=1&do=move-many&queue=thumbnials", http.StatusOK), `name="to" required`)
	require.Contains(t, html.UnescapeString(s.act(append(s.confirmed("confirm?all=1&do=move-many&queue=thumbnials", "1"), "to", "<b>thumbnails")...)), `1 moved to queue "<b>thumbnails"`)
	require.Equal(t, 1, count(onceqops.Filter{Queue: "<b>thumbnails"}))
	s.get("confirm?all=1&do=move-many", http.StatusBadRequest)
	s.get("confirm?all=1&do=move-many&queue=thumbnials&state=dead", http.StatusBadRequest)

	// A search for nothing in particular is all that was counted.
	require.Contains(t, s.act(s.confirmed("confirm?all=1&do=redrive-many", "2")...), "2 run again")
}

// To mark nothing does nothing; all of a search is a choice of its own. What is discarded is typed as a number, and afterwards one sees
// what has become of the jobs.
func TestActionsOnMany_AskWhich(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	page := s.get("jobs?queue=mail&state=dead", http.StatusOK)
	require.Contains(t, page, `name="all" value="1"`)
	require.Contains(t, s.get("confirm?do=redrive-many&queue=mail&state=dead", http.StatusBadRequest), "Nothing is marked, and so nothing was done")
	ids := fmt.Sprintf("ids=%d&ids=%d", d.Dead[0], d.Dead[1])
	page = s.get("jobs?"+ids, http.StatusOK)
	require.Contains(t, page, fmt.Sprintf(`name="within" value="%d"`, d.Dead[0]))
	within := strings.ReplaceAll(ids, "ids=", "within=")
	s.get("confirm?do=redrive-many&"+within, http.StatusBadRequest)
	require.Contains(t, s.get("confirm?all=1&do=redrive-many&"+within, http.StatusOK), `id="count"><b>2</b>`)

	page = s.get("confirm?all=1&do=discard-many&queue=mail", http.StatusOK)
	require.Contains(t, page, "mail <b>3</b>")
	require.Contains(t, page, "welcome <b>3</b>")
	require.Equal(t, 3, strings.Count(page, `<a href="./job?id=`))
	pairs := s.confirmed("confirm?all=1&do=discard-many&queue=mail", "3")
	for _, typed := range []string{"", "2", "three"} {
		answer, text := s.post(form(append(pairs[:len(pairs)-1:len(pairs)-1], typed)...), http.Header{"Sec-Fetch-Site": {"same-origin"}})
		require.Equal(t, http.StatusBadRequest, answer.StatusCode)
		require.Contains(t, text, "Type the number 3")
	}
	s.state(db, d.Dead[0], onceq.StateDead)
	page = s.act(s.confirmed("confirm?do=redrive-many&"+ids, "2")...)
	require.Equal(t, 2, strings.Count(page, `<td class="state" data-label="State"><span class="pill waiting">`), page)
	require.Contains(t, s.act(pairs...), "1 discarded")
	page = s.act(s.confirmed("confirm?all=1&do=retry-many&queue=mail", "1")...)
	require.Contains(t, page, "1 run now")
	require.Contains(t, page, fmt.Sprintf(`<a href="./job?id=%d">`, d.Retrying))
}

// What jobs failed with, together: how many, since when, and what can be done with all of a row.
func TestErrors_Grouped(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true), Mask: func(_, field, text string) string {
		return strings.ReplaceAll(text, "mailbox", "m●●box")
	}})
	page := s.get("errors", http.StatusOK)
	row := regexp.MustCompile(`(?s)<tr>\s*<th scope="row" class="error">(?:<a [^>]*title="550 5.1.1 m●●box unavailable …".*?)</tr>`).FindString(page)
	require.Contains(t, row, ">3</a>")
	require.Contains(t, row, "Redrive 3 …")
	require.NotContains(t, page, "mailbox")
	link := regexp.MustCompile(`href="\./(confirm[^"]*redrive-many[^"]*)"`).FindStringSubmatch(row)
	require.NotNil(t, link)
	require.Contains(t, s.act(s.confirmed(html.UnescapeString(link[1]), "3")...), "3 run again")
	s.state(db, d.Dead[2], onceq.StateWaiting)
	require.NotContains(t, s.get("errors", http.StatusOK), "550 5.1.1")
	s.get(html.UnescapeString(link[1]), http.StatusNotFound)
	page = s.get("errors?by=queue", http.StatusOK)
	require.Contains(t, page, `<a href="./queue?name=mail">mail</a>`)
	require.Contains(t, page, "Run now 1 …")
	require.NotContains(t, s.get("errors?by=kind&queue=payments", http.StatusOK), "Run now 1 …")
	reader := serve(t, db, onceqweb.Config{})
	require.NotContains(t, reader.get("errors", http.StatusOK), "./confirm")
}

// Failed jobs by scope, by lane, and with a text in their error: an action takes these alone. The text finds nothing that a
// mask hides.
func TestErrors_ByLaneAndText(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	book := onceq.Kind[int]{Name: "book", Queue: "billing", Lane: func(n int) string { return fmt.Sprintf("a<b>%d", n%2) },
		Scope: func(int) string { return "s<1>" },
		Key:   func(n int) string { return fmt.Sprint(n) }}
	for n := range 5 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, book.Job(n))
		require.NoError(t, err)
	}
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "plain", Queue: "billing", MaxAttempts: 1})
	require.NoError(t, err)
	for len(db.Drain(book.Handle(func(_ context.Context, _ *onceq.Lease, n int) error {
		return onceq.Fatal(fmt.Errorf("account %d at ada@example.com: Time-out", n))
	}), onceq.Kind[any]{Name: "plain"}.Handle(func(context.Context, *onceq.Lease, any) error { return onceq.Fatal(errors.New("refused")) }))) > 0 {
	}
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true), Mask: func(_, _, text string) string { return strings.ReplaceAll(text, "ada", "●") }})
	rows := func(query string) []string {
		return regexp.MustCompile(`(?s)<tr>\s*<th scope="row" class="error">.*?</tr>`).FindAllString(s.get("errors?"+query, http.StatusOK), -1)
	}
	require.Len(t, rows(""), 2)
	lanes := rows("by=lane")
	require.Len(t, lanes, 3)
	require.Contains(t, lanes[0], `<a href="./lanes?family=book">book/a&lt;b&gt;0</a>`)
	require.Contains(t, s.get("jobs?col=lane", http.StatusOK), `<a href="./lanes?family=book" title="book/a&lt;b&gt;0">`)
	require.Contains(t, lanes[0], "Redrive 3 …")
	require.Contains(t, lanes[2], "without a lane")
	scopes := rows("by=scope")
	require.Len(t, scopes, 2)
	require.Contains(t, scopes[0], `<a href="./jobs?scope=s%3C1%3E">s&lt;1&gt;</a>`)
	require.Contains(t, scopes[1], "without a key")
	require.Empty(t, rows("text=ada"))
	found := rows("by=queue&text=time-OUT")
	require.Len(t, found, 1)
	require.Contains(t, found[0], "Redrive 5 …")
	require.Len(t, rows("by=queue&text=account+3"), 1)

	redrive := func(row, n string) {
		t.Helper()
		link := regexp.MustCompile(`href="\./(confirm[^"]*redrive-many[^"]*)"`).FindStringSubmatch(row)
		require.NotNil(t, link)
		require.Contains(t, s.act(s.confirmed(html.UnescapeString(link[1]), n)...), n+" run again")
	}
	redrive(lanes[2], "1")
	redrive(lanes[1], "2")
	redrive(found[0], "3")
}

// The pages of a queue, a kind and a worker, with their plots and the values of these as a table.
func TestQueuesKindsAndWorkers(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	page := s.get("queue?name=mail", http.StatusOK)
	require.Contains(t, page, "No worker serves it.")
	require.Contains(t, page, `<a href="./kind?name=welcome">welcome</a>`)
	require.Contains(t, page, `name="do" value="pause-queue"`)
	for _, chart := range []string{"throughput", "wait", "run", "share", "backlog", "age"} {
		require.Contains(t, page, `class="chart `+chart+`"`)
	}
	require.Contains(t, page, "backlog, at most</th>")
	for of, points := range map[string]int{"15m": 15, "3h": 90, "1d": 72, "14d": 84, "nonsense": 90} {
		page = s.get("queue?name=mail&range="+of, http.StatusOK)
		require.Equal(t, 6, strings.Count(page, fmt.Sprintf(`data-points="%d"`, points)), of)
		require.Equal(t, points, strings.Count(page, `<th scope="row">20`), of)
	}
	page = s.get("kind?name=charge", http.StatusOK)
	require.NotContains(t, page, `class="chart backlog"`)
	require.Contains(t, page, `<a href="./queue?name=payments">payments</a>`)
	page = s.get("worker?id=7", http.StatusOK)
	require.Contains(t, page, "Process 4711 on web-3")
	require.Contains(t, page, "not seen lately")
	require.Contains(t, page, `<a href="./queue?name=mail">mail</a></th><td data-label="Jobs at once">10</td>`)

	// One that is in trouble says so wherever it is shown.
	_, err := db.Pool.Exec(t.Context(), `update onceq.workers set seen_at = seen_at + interval '1 day' where id = $1`, trouble.StuckWorker)
	require.NoError(t, err)
	s = serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	link := fmt.Sprintf("worker?id=%d", trouble.StuckWorker)
	for _, path := range []string{"", "queue?name=imports"} {
		require.Contains(t, s.get(path, http.StatusOK), `<a href="./`+link+`">4715 on web-6</a> <span class="pill dead">in trouble</span>`, path)
	}
	page = html.UnescapeString(s.get(link, http.StatusOK))
	require.Regexp(t, `<p class="note bad">2 slots of queue "imports" are held since 20\S+ \S+ UTC by handlers of kind "import" that do not return although their context has ended; `+
		`its process waits for connections of its pool of 8: 4 min in a minute, added up\.</p>`, page)
	require.Contains(t, page, `8, <span class="quiet">waited for 4 min in a minute, added up</span>`)
	require.Regexp(t, `<td data-label="Jobs at once">4</td>.*<td data-label="Held past their end" class="bad">2</td>`, page)
	require.Regexp(t, `Handlers of kind <a href="./kind\?name=import">import</a> hold 2 of them since .*20 min.*, the first with <a href="./job\?id=\d+">job \d+</a>`, page)
	page = html.UnescapeString(s.get("", http.StatusOK))
	require.Contains(t, page, "<strong>In process 4715 on web-6, 2 slots of queue \"imports\" are held since ")
	require.Contains(t, page, "<strong>Process 4715 on web-6 waits for connections of its pool of 8: 4 min in the last minute, added up.</strong>")

	require.Contains(t, s.get("queue?name=none", http.StatusNotFound), "There is no such queue")
	require.Contains(t, s.get("kind?name=none", http.StatusOK), "Nothing was counted in this time")
	s.get("worker?id=8", http.StatusNotFound)
	s.get("queue", http.StatusBadRequest)
}

// Payloads and metadata are searched by a member, by those who may see all of them, and an action takes what was found alone.
func TestJobs_ByMember(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	enqueue := func(payload any, metadata map[string]string) int64 {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Queue: "q", Payload: payload, Metadata: metadata})
		require.NoError(t, err)
		return r.ID
	}
	type object = map[string]any
	number, text := enqueue(object{"customer": 42, "card": object{"last": "4242"}}, nil), enqueue(object{"customer": "42"}, map[string]string{"trace": "a<b"})
	enqueue(object{"customer": 43}, nil)
	enqueue([]byte(`{"customer": 42}`), nil) // bytes have no members
	for range 250 {
		enqueue(1, nil)
	}
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	ids := func(member string) (found []int64) {
		for _, m := range regexp.MustCompile(`name="ids" value="(\d+)"`).FindAllStringSubmatch(s.get("jobs?"+form("member", member).Encode(), http.StatusOK), -1) {
			id, err := strconv.ParseInt(m[1], 10, 64)
			require.NoError(t, err)
			found = append(found, id)
		}
		return found
	}
	require.Equal(t, []int64{text, number}, ids("payload.customer = 42"))
	require.Equal(t, []int64{number}, ids("payload.card.last=4242"))
	require.Equal(t, []int64{text}, ids("metadata.trace = a<b"))
	require.Empty(t, ids("payload.customer = 4"))
	page := s.get("jobs?"+form("member", "metadata.trace = a<b").Encode(), http.StatusOK)
	require.Contains(t, page, "with metadata.trace = a&lt;b")
	for _, wrong := range []string{"customer=42", "payload", "payload=1", "payload..a=1", "result.a=1"} {
		s.get("jobs?"+form("member", wrong).Encode(), http.StatusBadRequest)
	}
	// All of it is what the page has, and not all of the queue.
	require.Contains(t, page, fmt.Sprintf(`name="within" value="%d"`, text))
	require.Contains(t, s.get("confirm?all=1&do=cancel-many&within="+fmt.Sprint(text), http.StatusOK), "<b>1</b> job")

	for _, cfg := range []onceqweb.Config{{Viewer: may(true, false)}, {Viewer: may(true, true), Mask: func(_, _, text string) string { return text }}} {
		s := serve(t, db, cfg)
		s.get("jobs?member=payload.customer%3D42", http.StatusForbidden)
		require.NotContains(t, s.get("jobs", http.StatusOK), `name="member"`)
	}
}

// A worker's page shows how many of its slots are busy, and with what; plots show where it began.
func TestWorker_SlotsAndStart(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	kind := onceq.Kind[int]{Name: "slow", Queue: "hot"}
	started, end := make(chan int64, 9), make(chan struct{})
	w, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"hot": {Concurrency: 3}}},
		kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error {
			started <- l.ID
			<-end
			return nil
		}))
	require.NoError(t, err)
	running, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(running) }()
	t.Cleanup(func() {
		close(end)
		stop()
		<-ended
	})
	var first []int64
	for n := range 2 {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(n))
		require.NoError(t, err)
		require.Equal(t, r.ID, <-started)
		first = append(first, r.ID)
	}
	ops := onceqops.New(db.Queue)
	require.Eventually(t, func() bool { list, err := ops.Workers(t.Context(), nil); return err == nil && len(list) == 1 }, time.Minute, 10*time.Millisecond)
	list, err := ops.Workers(t.Context(), nil)
	require.NoError(t, err)
	busy, err := ops.Busy(t.Context(), nil, list[0])
	require.NoError(t, err)
	require.Equal(t, []onceqops.Busy{{Queue: "hot", Leased: 2, Running: 2, Jobs: first}}, busy)
	_, err = db.Pool.Exec(t.Context(), `
insert into onceq.job_counts (minute, took, started, completed, failed, dead, queue, kind, durations)
values (date_trunc('minute', statement_timestamp()) - interval '2 minutes', 1, 1, 1, 0, 0, 'hot', 'slow', '{1}')`)
	require.NoError(t, err)

	s := serve(t, db, onceqweb.Config{})
	page := s.get(fmt.Sprintf("worker?id=%d", list[0].ID), http.StatusOK)
	require.Contains(t, page, `<meter min="0" max="3" value="2"`)
	for _, id := range first {
		require.Contains(t, page, fmt.Sprintf(`<a href="./job?id=%d">%d</a>`, id, id))
	}
	_, err = db.Pool.Exec(t.Context(), `update onceq.workers set started_at = date_trunc('minute', statement_timestamp()) - interval '3 minutes'`)
	require.NoError(t, err)
	for _, of := range []string{"?range=15m", "queue?name=hot&range=15m", "kind?name=slow&range=15m"} {
		s := serve(t, db, onceqweb.Config{})
		page = s.get(of, http.StatusOK)
		require.Contains(t, page, `<line class="began"`, of)
		require.Equal(t, 1, strings.Count(page, ", a worker began: library "+list[0].Version+"</th>"), of)
	}
	require.NotContains(t, s.get(fmt.Sprintf("worker?id=%d", list[0].ID), http.StatusOK), "Version of the application")
	_, err = db.Pool.Exec(t.Context(), `update onceq.workers set application = 'v1<b>'`)
	require.NoError(t, err)
	page = serve(t, db, onceqweb.Config{}).get("?range=15m", http.StatusOK)
	require.Equal(t, 1, strings.Count(page, ", a worker began: version v1&lt;b&gt;</th>"))
	require.Regexp(t, `<li><span class="began"></span> [0-9: -]{16}: a worker began: version v1&lt;b&gt;</li>`, page)
	require.Contains(t, page, `<title>a worker began: version v1&lt;b&gt;</title>`)
	require.Contains(t, serve(t, db, onceqweb.Config{}).get(fmt.Sprintf("worker?id=%d", list[0].ID), http.StatusOK), "<dd>v1&lt;b&gt;</dd>")
	require.NotContains(t, serve(t, db, onceqweb.Config{}).get("kind?name=other&range=15m", http.StatusOK), "began")
}

// A search says how many jobs each state has where that is known, and keeps what else is chosen.
func TestJobs_TabsAndTimes(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{})
	s.get("", http.StatusOK) // it reads the counts
	page := s.get("jobs?queue=mail", http.StatusOK)
	require.Contains(t, page, `<a href="./jobs?queue=mail&amp;state=dead">dead <span class="n">3</span></a>`)
	require.Contains(t, page, `<a class="chip" href="./jobs?">queue mail `)
	require.NotContains(t, s.get("jobs?queue=mail&kind=welcome", http.StatusOK), `<span class="n">`)
	_, err := db.Pool.Exec(t.Context(), `update onceq.job_history set created_at = created_at - interval '2 hours' where id = $1`, d.Dead[0])
	require.NoError(t, err)
	row := fmt.Sprintf(`<a href="./job?id=%d">`, d.Dead[0])
	page = s.get("jobs?state=dead&since=1h", http.StatusOK)
	require.NotContains(t, page, row)
	require.Contains(t, page, `<a href="./jobs?since=1h&amp;state=dead" aria-current="true">an hour</a>`)
	require.Contains(t, s.get("jobs?state=dead&since=24h", http.StatusOK), row)
}

// hold locks the jobs when a count begins, so that it lasts until its time is up.
type hold struct {
	pool *pgxpool.Pool // nil: it does nothing
	tx   pgx.Tx
}

func (l *hold) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	if l.pool == nil || l.tx != nil || !strings.HasPrefix(d.SQL, "select count(*) from (") {
		return ctx
	}
	tx, err := l.pool.Begin(context.WithoutCancel(ctx))
	if err == nil {
		_, err = tx.Exec(context.WithoutCancel(ctx), `lock table onceq.jobs in access exclusive mode`)
	}
	if l.tx = tx; err != nil {
		panic(err)
	}
	return ctx
}

func (*hold) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// The count before an action stops at a bound, and after a while, and says so; the action takes what it would take anyhow.
func TestActionsOnMany_TheCountStops(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "first", Payload: 1})
	require.NoError(t, err)
	jobs := make([]onceq.Job, 1150)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "many", Payload: i}
	}
	_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	cfg := db.Pool.Config()
	slow := &hold{}
	cfg.ConnConfig.Tracer = slow
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	page := func(limit int, d time.Duration) string {
		t.Helper()
		s := serve(t, db, onceqweb.Config{Viewer: may(true, true)}, pool)
		s.page.Counting(limit, d)
		return s.get("confirm?all=1&do=cancel-many&kind=many", http.StatusOK)
	}
	require.Contains(t, page(10_000, time.Hour), `id="count"><b>1,150</b> jobs`)
	require.Contains(t, page(1150, time.Hour), `id="count"><b>1,150</b> or more jobs`)
	require.Contains(t, page(10_000, 0), `id="count">at least <b>1,000</b> jobs`)

	slow.pool = db.Pool
	stopped := ""
	for slow.tx == nil { // the time may be up before the count begins
		stopped = page(10_000, time.Second)
	}
	require.NoError(t, slow.tx.Rollback(t.Context()))
	require.Contains(t, stopped, `id="count">at least <b>1,000</b> jobs`)
	require.Contains(t, stopped, "Counting was stopped after a second")
	require.Contains(t, stopped, `name="after"`)
}

func TestBadInput_ReachesNeitherSQLNorMarkup(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	nasty := []string{"\x00", "\xff\xfe", "-1", "1e9", "99999999999999999999", "';drop table onceq.jobs;--", "<script>alert(1)</script>", strings.Repeat("x", 3000), "%00", "2026-99-99T99:99", "unknown", "state(9)"}
	for _, path := range []string{"", "jobs", "job", "errors", "queue", "kind", "worker", "effects", "keys", "schedule", "audit", "confirm", "live", "lanes", "groups", "group"} {
		for _, name := range []string{"q", "id", "queue", "kind", "scope", "key", "state", "from", "before", "after", "ids", "do", "decision", "name", "of", "done", "v", "limit", "behind", "family", "name", "by", "since", "range", "error", "within", "col", "n"} {
			for _, value := range nasty {
				if path == "live" && name != "of" {
					continue
				}
				r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.base+path+"?"+url.Values{name: {value}}.Encode(), nil)
				require.NoError(t, err)
				answer, text := s.do(r)
				require.Contains(t, []int{200, 303, 400, 404}, answer.StatusCode, "%s %s=%q: %s", path, name, value, text)
				require.NotContains(t, text, "<script>alert", "%s %s", path, name)
			}
		}
	}
	require.NotContains(t, s.log.String(), "level=ERROR")
	require.NotContains(t, s.log.String(), "page failed")
}

// counter counts the statements of a pool.
type counter struct {
	mu    sync.Mutex
	stats int
	lists int // of jobs: searches, and what open pages show
	seen  []string
	all   int
	woken chan struct{}
}

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	c.saw(q.SQL, q.Args)
	return ctx
}
func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (c *counter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (c *counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
func (c *counter) TraceBatchQuery(_ context.Context, _ *pgx.Conn, q pgx.TraceBatchQueryData) {
	c.saw(q.SQL, q.Args)
}

var ifAsked = regexp.MustCompile(`case when \$(\d+)::bool then \S+ end`)

// saw takes a statement without what it reads only if an argument asks for it, and that one does not.
func (c *counter) saw(statement string, args []any) {
	statement = ifAsked.ReplaceAllStringFunc(statement, func(read string) string {
		n, err := strconv.Atoi(ifAsked.FindStringSubmatch(read)[1])
		if err == nil && n <= len(args) && args[n-1] == false {
			return "null"
		}
		return read
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all++
	c.seen = append(c.seen, statement)
	if strings.Contains(statement, "live as (") && !strings.Contains(statement, "names as materialized") {
		c.lists++
	}
	if strings.Contains(statement, "names as materialized") {
		c.stats++
		select {
		case c.woken <- struct{}{}:
		default:
		}
	}
}

func (s *site) follow(ctx context.Context, of string) <-chan string {
	s.t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base+"live?of="+of, nil)
	require.NoError(s.t, err)
	answer, err := client.Do(r)
	require.NoError(s.t, err)
	require.Equal(s.t, http.StatusOK, answer.StatusCode)
	require.Equal(s.t, "text/event-stream", answer.Header.Get("Content-Type"))
	events := make(chan string, 100)
	go func() {
		defer close(events)
		defer func() { _ = answer.Body.Close() }()
		lines := bufio.NewScanner(answer.Body)
		for lines.Scan() {
			if e, ok := strings.CutPrefix(lines.Text(), "event: "); ok {
				events <- e
			}
		}
	}()
	return events
}

// What Health says of queues comes from the figures that the page shows.
func TestOverview_CountsTheQueuesOnce(t *testing.T) {
	t.Parallel()
	c := &counter{woken: make(chan struct{}, 100)}
	db := newDB(t, queuetest.PoolConfig(func(p *pgxpool.Config) { p.ConnConfig.Tracer = c }))
	_, err := db.Pool.Exec(t.Context(), `insert into onceq.jobs (id, run_at, created_at, max_attempts, priority, queue, kind, payload) values (nextval('onceq.ids'), now() - interval '1 h', now(), 25, 0, 'nobodys', 'k', '{}')`)
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{})
	s.page.ShowsState(time.Minute)
	require.Contains(t, s.get("", http.StatusOK), "no worker serves this queue")
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Equal(t, 1, c.stats)
}

func TestLive_AHundredPagesCostAsMuchAsOne(t *testing.T) {
	t.Parallel()
	c := &counter{woken: make(chan struct{}, 100)}
	db := newDB(t, queuetest.PoolConfig(func(p *pgxpool.Config) { p.ConnConfig.Tracer = c }))
	one, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{})
	ctx, stop := context.WithCancel(t.Context())
	var streams []<-chan string
	for i := range 100 {
		of := "overview"
		if i%2 == 1 {
			of = fmt.Sprint(one.ID)
		}
		streams = append(streams, s.follow(ctx, of))
	}
	for _, events := range streams { // each shows another state than the database has: it knows none yet
		require.Equal(t, "change", <-events)
	}
	for len(c.woken) > 0 {
		<-c.woken
	}
	c.mu.Lock()
	began, stats, lists, all := time.Now(), c.stats, c.lists, c.all
	c.mu.Unlock()
	for range 3 {
		<-c.woken
	}
	c.mu.Lock()
	took := time.Since(began)
	stats, lists, all = c.stats-stats, c.lists-lists, c.all-all
	c.mu.Unlock()
	require.LessOrEqual(t, stats, 4)
	require.LessOrEqual(t, lists, int(took/(2*time.Second))+2, "every two seconds")
	require.LessOrEqual(t, all, 3*8+2*max(0, lists-3), "statements of three looks, with their settings, and of the lists of jobs in between where a look is slow")

	require.Empty(t, streams[1], "the job has not changed")

	// What changes reaches the page that shows it.
	_, err = db.Queue.Cancel(t.Context(), db.Pool, one.ID)
	require.NoError(t, err)
	require.Equal(t, "change", <-streams[1])
	require.Equal(t, "change", <-streams[0])

	// A hundred readers at once, too, share a look.
	c.mu.Lock()
	stats = c.stats
	c.mu.Unlock()
	var readers sync.WaitGroup
	for range 100 {
		readers.Go(func() {
			if answer, err := http.Get(s.base); err == nil {
				_ = answer.Body.Close()
			}
		})
	}
	readers.Wait()
	c.mu.Lock()
	require.LessOrEqual(t, c.stats-stats, 30, "of 100 readers")
	c.mu.Unlock()

	s.page.Close() // as at the server's shutdown
	for _, events := range streams {
		for range events {
		}
	}
	stop()
	s.get("live?of=nothing", http.StatusBadRequest)
}

// One viewer has all the streams there are for single jobs. Another one gets a share of them, and the first one no more.
func TestLive_EachViewerHasAShare(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	one, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1})
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{Viewer: func(r *http.Request) (onceqweb.Viewer, error) {
		return onceqweb.Viewer{Name: r.URL.Query().Get("who")}, nil
	}})
	of := func(who string) string { return fmt.Sprintf("%d&who=%s", one.ID, who) }
	ended := make(chan string, 1000)
	n := make(map[string]int)
	follow := func(who string) {
		n[who]++
		name := fmt.Sprint(who, n[who])
		events := s.follow(t.Context(), of(who))
		go func() {
			for range events {
			}
			ended <- name
		}()
	}
	for range 100 {
		follow("ada")
	}
	for i := range 50 {
		follow("eve")
		require.Equal(t, fmt.Sprint("ada", i+1), <-ended)
	}
	// One who has as many as others loses the oldest of their own: behind a proxy one name may be many readers.
	follow("ada")
	require.Equal(t, "ada51", <-ended)
	follow("eve")
	require.Equal(t, "eve1", <-ended)
	for i := range 98 { // all but ada and eve have one, and these one more
		follow(fmt.Sprint("reader", i))
		<-ended
	}
	s.get("live?of="+of("late"), http.StatusServiceUnavailable)
	require.Empty(t, ended)
}

func TestTimeLimits_AndADatabaseThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serveInTime(t, db, onceqweb.Config{Viewer: may(true, true)})
	s.get("", http.StatusOK)
	blocker, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	defer func() { _ = blocker.Close(context.Background()) }()
	_, err = blocker.Exec(t.Context(), `begin; lock table onceq.jobs, onceq.job_history in access exclusive mode`)
	require.NoError(t, err)

	// The overview shows what it knows, and that this is old.
	require.Eventually(t, func() bool { return strings.Contains(s.get("", http.StatusOK), "These figures are") }, 5*time.Minute, 100*time.Millisecond)
	require.Contains(t, s.get("", http.StatusOK), "thumbnials")
	var pages sync.WaitGroup
	for _, path := range []string{"jobs", fmt.Sprintf("job?id=%d", d.Held), "effects"} {
		pages.Go(func() { s.get(path, http.StatusServiceUnavailable) })
	}
	pages.Wait()
	answer, text := s.post(form("do", "redrive", "id", fmt.Sprint(d.Dead[0])), nil)
	require.Equal(t, http.StatusServiceUnavailable, answer.StatusCode, text)
	_, err = blocker.Exec(t.Context(), `rollback`)
	require.NoError(t, err)

	// It comes back by itself, and left nothing that waits.
	require.Eventually(t, func() bool { return !strings.Contains(s.get("", http.StatusOK), "These figures are") }, 5*time.Minute, 100*time.Millisecond)
	require.Eventually(t, func() bool {
		var n int
		err := blocker.QueryRow(t.Context(), `select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and (state = 'active' or state like 'idle in%')`).Scan(&n)
		return err == nil && n == 0
	}, 5*time.Minute, 50*time.Millisecond)
	s.state(db, d.Dead[0], onceq.StateDead)
}

// What the driver says of a database that is not there names the role, the database and the host: that is for the log.
func TestErrors_OfTheDatabaseStayInTheLog(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://hidden_user:hidden_word@localhost:1/hidden_database?sslmode=disable")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, &onceq.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	s := serve(t, &queuetest.DB{Queue: q, Pool: pool}, onceqweb.Config{Viewer: may(true, true)})
	said := func(text string) {
		t.Helper()
		for _, secret := range []string{"hidden_", "localhost", "refused", "connect"} {
			require.NotContains(t, text, secret)
		}
		id := regexp.MustCompile(`says why, under ([a-z0-9]{10})`).FindStringSubmatch(text)
		require.NotNil(t, id, text)
		require.Regexp(t, `id=`+id[1]+` error=.*hidden_user`, s.log.String())
	}
	for _, path := range []string{"", "jobs", "jobs?q=1", "job?id=1", "effects", "keys?key=1", "lanes", "groups", "group?id=1", "schedules", "audit",
		"confirm?all=1&do=cancel-many&queue=a", "confirm?do=limit&name=a&at-once=1", "confirm?do=cancel-group&id=1", "confirm?do=backfill&name=a&from=2026-01-01"} {
		said(s.get(path, http.StatusServiceUnavailable))
	}
	for _, pairs := range [][]string{{"do", "cancel", "id", "1"}, {"do", "fire", "name", "a"}, {"do", "cancel-many", "queue", "a", "after", "9", "why", "x"}} {
		answer, text := s.post(form(pairs...), nil)
		require.Equal(t, http.StatusServiceUnavailable, answer.StatusCode)
		said(text)
	}
}

// Nor is what it says of this process's background work on the page, while that fails and when the page knows older figures.
func TestErrors_OfBackgroundWorkStayInTheLog(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	cfg := db.Pool.Config()
	var down atomic.Bool
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if down.Load() {
			return nil, errors.New("hidden_host does not answer")
		}
		return dial(ctx, network, addr)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	q, err := onceq.New(pool, &onceq.Config{Schema: db.Queue.Schema(), Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	s := serve(t, &queuetest.DB{Queue: q, Pool: pool}, onceqweb.Config{Viewer: may(true, true)})
	s.get("confirm?all=1&do=move-many&kind=a", http.StatusOK) // reads the figures, and no findings, which are kept for long
	down.Store(true)
	pool.Reset()
	reaper, err := onceq.NewReaper(q, onceq.ReaperConfig{Every: 100 * time.Millisecond})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = reaper.Run(ctx)
	}()
	defer func() { stop(); <-ended }()
	require.Eventually(t, func() bool {
		found, _ := onceqops.New(q).Health(t.Context())
		return len(found) > 0 && strings.Contains(found[0].Detail, "hidden_host")
	}, time.Minute, 10*time.Millisecond)
	var page string
	require.Eventually(t, func() bool {
		page = html.UnescapeString(s.get("", http.StatusOK))
		return strings.Contains(page, "has failed")
	}, time.Minute, 10*time.Millisecond)
	require.Contains(t, page, "the latest error: the log of the application has it.")
	for _, secret := range []string{"hidden_host", "user=", "database=", pool.Config().ConnConfig.Database} {
		require.NotContains(t, page, secret)
	}
}

// Everybody counts all addresses that one reader may have as one.
func TestEverybody_NamesNetworks(t *testing.T) {
	t.Parallel()
	for from, name := range map[string]string{
		"192.0.2.7:80": "192.0.2.7", "[2001:db8:1:2:3::4]:80": "2001:db8:1:2::/64", "[2001:db8:1:2:ffff::]:81": "2001:db8:1:2::/64", "[fe80::1%eth0]:80": "fe80::/64",
		"[::ffff:192.0.2.7]:80": "::ffff:192.0.2.7", "@": "@",
	} {
		v, err := onceqweb.Everybody(&http.Request{RemoteAddr: from})
		require.NoError(t, err)
		require.Equal(t, onceqweb.Viewer{Name: "anonymous at " + name}, v)
	}
}

// A link says nothing of what was done to those who have not just done it.
func TestDone_OnlyForWhoHasJustDoneIt(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	job, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1, Delay: time.Hour})
	require.NoError(t, err)
	ada := serve(t, db, onceqweb.Config{Viewer: may(true, true)})
	eve := serve(t, db, onceqweb.Config{Viewer: func(*http.Request) (onceqweb.Viewer, error) { return onceqweb.Viewer{Name: "eve", Act: true}, nil }})
	ada.act("do", "cancel", "id", fmt.Sprint(job.ID))
	trail, err := onceqops.New(db.Queue).Actions(t.Context(), db.Pool, onceqops.ActionFilter{})
	require.NoError(t, err)
	path := fmt.Sprintf("job?id=%d&done=%d", job.ID, trail[0].ID)
	require.NotContains(t, eve.get(path, http.StatusOK), "Done:")
	_, err = db.Pool.Exec(t.Context(), `update onceq.actions set at = at - interval '10 minutes'`)
	require.NoError(t, err)
	require.NotContains(t, ada.get(path, http.StatusOK), "Done:")
}

// What is refused is in the trail: for want of a right, from another site's page, because the time was up or the client went away.
func TestTrail_HasWhatWasRefused(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	job, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Payload: 1, Delay: time.Hour})
	require.NoError(t, err)
	cancel := form("do", "cancel", "id", fmt.Sprint(job.ID), "why", "x")
	latest := func(n int, who, outcome string) {
		t.Helper()
		var trail []onceqops.Action
		require.Eventually(t, func() bool { // the client that went away does not wait for it
			var err error
			trail, err = onceqops.New(db.Queue).Actions(t.Context(), db.Pool, onceqops.ActionFilter{})
			return err == nil && len(trail) == n
		}, 5*time.Minute, 10*time.Millisecond)
		require.Equal(t, []any{who, "cancel", job.ID}, []any{trail[0].Who, trail[0].What, trail[0].JobID})
		require.Contains(t, trail[0].Outcome, outcome)
	}
	reader := serve(t, db, onceqweb.Config{Viewer: may(false, true)})
	answer, _ := reader.post(cancel, nil)
	require.Equal(t, http.StatusForbidden, answer.StatusCode)
	latest(1, "ada@example.com", "refused: without the right to it")
	stop := &stops{}
	cfg := db.Pool.Config()
	cfg.ConnConfig.Tracer = stop
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s := serve(t, db, onceqweb.Config{Viewer: may(true, true)}, pool)
	answer, _ = s.post(cancel, http.Header{"Sec-Fetch-Site": {"cross-site"}})
	require.Equal(t, http.StatusForbidden, answer.StatusCode)
	latest(2, "ada@example.com", "refused: it came from another site's page")
	no := serve(t, db, onceqweb.Config{Viewer: func(*http.Request) (onceqweb.Viewer, error) { return onceqweb.Viewer{}, errors.New("no session") }})
	answer, _ = no.post(cancel, http.Header{"Sec-Fetch-Site": {"cross-site"}})
	require.Equal(t, http.StatusForbidden, answer.StatusCode)

	// The client leaves in the middle of the action.
	ctx, leave := context.WithCancel(t.Context())
	stop.first = leave
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.base+"act", strings.NewReader(cancel.Encode()))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	_, err = client.Do(r)
	require.ErrorIs(t, err, context.Canceled)
	latest(3, "ada@example.com", "refused: the client went away")
	// Its time is up there.
	late := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 50*time.Millisecond)
		defer cancel()
		s.page.ServeHTTP(w, r.WithContext(ctx))
	}))
	t.Cleanup(late.Close)
	s.base = late.URL + "/"
	answer, text := s.post(cancel, nil)
	require.Equal(t, http.StatusServiceUnavailable, answer.StatusCode, text)
	latest(4, "ada@example.com", "refused: its time was up")
	s.state(db, job.ID, onceq.StateDelayed)
}

// stops holds an action at its first statement until its context ends.
type stops struct{ first func() }

func (s *stops) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	if strings.Contains(d.SQL, "idle_in_transaction_session_timeout") {
		s.first()
		<-ctx.Done()
	}
	return ctx
}

func (*stops) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A client that waits to be asked for its form gets an answer also where the page does not want it.
func TestAct_AnswersThoseWhoWaitToSendTheirForm(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	page, err := onceqweb.New(db.Queue, db.Pool, onceqweb.Config{Viewer: may(true, true), Prefix: "/onceq"})
	require.NoError(t, err)
	server := httptest.NewServer(page) // without a router that strips the prefix, and so copies the request
	t.Cleanup(server.Close)
	at, err := url.Parse(server.URL + "/onceq/")
	require.NoError(t, err)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at.Host)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
	_, err = fmt.Fprintf(conn, "POST %sact HTTP/1.1\r\nHost: %s\r\nContent-Type: text/plain\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n", at.Path, at.Host)
	require.NoError(t, err)
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer func() { _ = answer.Body.Close() }()
	require.Equal(t, http.StatusBadRequest, answer.StatusCode)
}

func TestNew_RefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, test := range []struct {
		q   *onceq.Queue
		cfg onceqweb.Config
	}{{nil, onceqweb.Config{Viewer: onceqweb.Everybody}}, {db.Queue, onceqweb.Config{}}, {db.Queue, onceqweb.Config{Viewer: onceqweb.Everybody, Prefix: "admin"}},
		{db.Queue, onceqweb.Config{Viewer: onceqweb.Everybody, TrustedOrigins: []string{"admin.example.com"}}}} {
		_, err := onceqweb.New(test.q, db.Pool, test.cfg)
		require.ErrorContains(t, err, "onceqweb: ")
	}
}
