// Package browsertest drives onceqweb in a real browser, and makes the pictures of the documentation.
package browsertest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/onceqweb"
	"github.com/onceq/onceq/onceqweb/internal/trouble"
	"github.com/onceq/onceq/queuetest"
)

var pictures = flag.String("pictures", "", "write pictures of the pages into this directory")

// limit bounds a test; the machine may be slow.
const limit = 5 * time.Minute

// browser starts a browser, or skips the test where there is none.
func browser(t *testing.T) context.Context {
	t.Helper()
	return browserFor(t, limit)
}

func browserFor(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	path := os.Getenv("ONCEQ_TEST_CHROMIUM")
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path == "" {
			path, _ = exec.LookPath(name)
		}
	}
	if path == "" {
		t.Skip("no chromium: scripts/chromium.sh installs one, or set ONCEQ_TEST_CHROMIUM")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.WSURLReadTimeout(time.Minute),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("force-color-profile", "srgb"))
	ctx, stop := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(stop)
	return tabFor(t, ctx, limit)
}

// tab opens a tab, and fails the test at its end if a page broke its own policy or threw an error.
func tab(t *testing.T, ctx context.Context) context.Context {
	t.Helper()
	return tabFor(t, ctx, limit)
}

func tabFor(t *testing.T, ctx context.Context, limit time.Duration) context.Context {
	t.Helper()
	ctx, stop := chromedp.NewContext(ctx)
	t.Cleanup(stop)
	ctx, cancel := context.WithTimeout(ctx, limit)
	t.Cleanup(cancel)
	chromedp.ListenTarget(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			t.Errorf("the page's script: %s", e.ExceptionDetails.Error())
		case *runtime.EventConsoleAPICalled:
			if e.Type == runtime.APITypeError {
				t.Errorf("the page's console: %+v", e.Args)
			}
		}
	})
	require.NoError(t, chromedp.Run(ctx))
	return ctx
}

type site struct {
	t    *testing.T
	base string
	page *onceqweb.Handler
}

func serve(t *testing.T, db *queuetest.DB, cfg onceqweb.Config) *site {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	handler, err := onceqweb.New(db.Queue, db.Pool, cfg)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/admin/onceq/", http.StripPrefix("/admin/onceq", handler))
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		handler.Close()
		server.CloseClientConnections()
		server.Close()
	})
	return &site{t, server.URL + "/admin/onceq/", handler}
}

func newDB(t *testing.T) *queuetest.DB {
	return queuetest.New(t, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
}

func onCall(*http.Request) (onceqweb.Viewer, error) {
	return onceqweb.Viewer{Name: "ada@example.com", Act: true, Payloads: true, Schedule: true}, nil
}

func run(t *testing.T, ctx context.Context, actions ...chromedp.Action) {
	t.Helper()
	require.NoError(t, chromedp.Run(ctx, actions...))
}

// shows waits until the page has a text, also across a navigation.
func shows(text string) chromedp.Action { return watch(text, true) }

// hides waits until it has it no more.
func hides(text string) chromedp.Action { return watch(text, false) }

func watch(text string, there bool) chromedp.Action {
	return chromedp.ActionFunc(func(ctx context.Context) error {
		for {
			var body string
			err := chromedp.Evaluate(`document.body ? document.body.innerText : ""`, &body).Do(ctx)
			if err == nil && strings.Contains(body, text) == there {
				return nil
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%q in the page: not %v: %s (%v)", text, there, body, err)
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
}

// size is a window's width and height, and the colours that its person likes.
func size(width, height int64, scheme string) chromedp.Action {
	return chromedp.ActionFunc(func(ctx context.Context) error {
		if err := emulation.SetDeviceMetricsOverride(width, height, 1, width < 600).Do(ctx); err != nil {
			return err
		}
		return emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}).Do(ctx)
	})
}

// picture writes what the window shows into a file, down to the end of the page but no further than height.
func picture(name string, width, height float64) chromedp.Action {
	return chromedp.ActionFunc(func(ctx context.Context) error {
		if *pictures == "" {
			return nil
		}
		var whole float64
		if err := chromedp.Evaluate(`document.documentElement.scrollHeight`, &whole).Do(ctx); err != nil {
			return err
		}
		png, err := page.CaptureScreenshot().WithCaptureBeyondViewport(true).
			WithClip(&page.Viewport{Width: width, Height: min(whole, height), Scale: 1}).Do(ctx)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(*pictures, name+".png"), png, 0o600)
	})
}

// fits fails if a page is wider than its window, which people with a phone would have to push to and fro.
func fits(t *testing.T, at string) chromedp.Action {
	return chromedp.ActionFunc(func(ctx context.Context) error {
		var over string
		err := chromedp.Evaluate(`(() => { const w = document.documentElement.clientWidth;
			if (document.documentElement.scrollWidth <= w) return "";
			return [...document.querySelectorAll("main *")].filter((e) => e.getBoundingClientRect().right > w + 1).map((e) => e.tagName + "." + e.className).slice(0, 5).join(" ") || "?"; })()`, &over).Do(ctx)
		if over != "" {
			t.Errorf("%s is wider than the window: %s", at, over)
		}
		return err
	})
}

// axeScript looks for what keeps people out of a page: contrast, names, roles. npm fetches it once. Without npm, or a
// registry, it is not looked for; in CI that is an error.
func axeScript(t *testing.T) string {
	t.Helper()
	const version = "4.14.1"
	cache, err := os.UserCacheDir()
	require.NoError(t, err)
	dir := filepath.Join(cache, "onceq", "axe-core-"+version)
	file := filepath.Join(dir, "package", "axe.min.js")
	if _, err := os.Stat(file); err != nil {
		require.NoError(t, os.MkdirAll(dir, 0o750))
		fetch := exec.CommandContext(t.Context(), "sh", "-c", "npm pack --silent axe-core@"+version+" && tar xzf *.tgz && rm *.tgz")
		fetch.Dir = dir
		if said, err := fetch.CombinedOutput(); err != nil {
			require.Empty(t, os.Getenv("CI"), "%s", said)
			t.Logf("without axe: %v: %s", err, said)
			return ""
		}
	}
	script, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(script)
}

// accessible fails if axe finds that a page breaks a rule of WCAG 2.2, level AA.
func accessible(t *testing.T, axe, at string) chromedp.Action {
	return chromedp.ActionFunc(func(ctx context.Context) error {
		if axe == "" {
			return nil
		}
		var found []string
		wait := func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }
		err := chromedp.Run(ctx, chromedp.Evaluate(axe+`; for (const d of document.querySelectorAll("main details")) d.open = true;`, nil), chromedp.Evaluate(`axe.run(document, { resultTypes: ["violations"], rules: { "target-size": { enabled: true } } }).then((r) =>
			r.violations.flatMap((v) => v.nodes.map((n) => v.id + ": " + n.target + ": " + n.html.slice(0, 200) + ": " + n.failureSummary)))`, &found, wait))
		for _, one := range found {
			t.Errorf("%s: %s", at, one)
		}
		return err
	})
}

// Each page, in a wide window, a narrow one and on a phone, light and dark, with the pictures of the documentation.
func TestBrowser_EveryPage(t *testing.T) {
	db := newDB(t)
	d := trouble.Make(t, db)
	lane := onceq.Kind[int]{Name: "book", Queue: "accounts", Lane: func(n int) string { return fmt.Sprintf("account-%d", n) }, LaneRule: onceq.StopLane}
	for n := range 6 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, lane.Job(n/3))
		require.NoError(t, err)
	}
	require.Equal(t, onceq.StateDead, db.RunOne(lane.Handle(func(context.Context, *onceq.Lease, int) error {
		return onceq.Fatal(errors.New("the account is closed"))
	})).State)
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "card provider", onceq.Limit{AtOnce: 2, Rate: 10}))
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "mail provider", onceq.Limit{Rate: 200, Per: time.Minute}))
	for n := range 4 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "book", Queue: "accounts", Limit: "card provider", Payload: n})
		require.NoError(t, err)
	}
	g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, []onceq.Job{{Kind: "scan", Queue: "accounts", Payload: 1}}, onceq.Job{Kind: "report", Payload: 1})
	require.NoError(t, err)
	_, err = db.Pool.Exec(t.Context(), `
with w as (update onceq.workers set started_at = statement_timestamp() - interval '70 minutes' where id not in (7, $2) returning id)
update onceq.jobs set holder = (select id from w) where id = $1`, d.Running.ID, trouble.StuckWorker) // which it works on
	require.NoError(t, err)
	workers, err := onceqops.New(db.Queue).Workers(t.Context(), db.Pool)
	require.NoError(t, err)
	live := workers[slices.IndexFunc(workers, func(w onceqops.WorkerInfo) bool { return !w.Stale && w.ID != trouble.StuckWorker })]
	for _, a := range []onceqops.Action{
		{Who: "onceq@db-1", What: "discard", About: `dead jobs, kind "thumbnail", created before 2026-11-01 00:00:00`, Why: "images are gone", Outcome: "begins"},
		{Who: "bob@example.com", What: "pause-queue", About: `queue "reports"`, Why: "the replica is rebuilt", Outcome: "no worker takes its jobs for 2 h, or until somebody resumes it"},
		{Who: "ada@example.com", What: "redrive-many", About: `dead jobs, queue "mail"`, Why: "the mailbox is back", Outcome: "begins"},
		{Who: "ada@example.com", What: "redrive-many", About: `dead jobs, queue "mail"`, Why: "the mailbox is back", Outcome: "412 run again; 3 stay, because a later job has their key"},
		{Who: "ada@example.com", What: "redrive", JobID: d.Dead[0], Why: "one more try", Outcome: "refused: without the right to it"},
	} {
		_, err := onceqops.New(db.Queue).RecordAction(t.Context(), db.Pool, a)
		require.NoError(t, err)
	}
	_, err = db.Pool.Exec(t.Context(), `update onceq.actions set at = at - (7 - id) * interval '11 minutes' where id < 3`)
	require.NoError(t, err)
	s := serve(t, db, onceqweb.Config{Viewer: onCall, Schedules: d.Schedules, Title: "billing, production"})
	ctx, axe := browserFor(t, 2*limit), axeScript(t)
	for _, p := range []struct{ name, path, text string }{
		{"overview", "", "wait for a person"},
		{"jobs", "jobs", "mailbox unavailable"},
		{"jobs-columns", "jobs?col=state&col=kind&col=lane&col=limit&col=priority&col=lost&col=error&n=20", "book/account-0"},
		{"jobs-member", "jobs?member=payload.order%3D4711", "with payload.order=4711"},
		{"job-held", fmt.Sprintf("job?id=%d", d.Held), "order:4711"},
		{"job-dead", fmt.Sprintf("job?id=%d", d.Dead[0]), "RCPT TO"},
		{"job-markup", fmt.Sprintf("job?id=%d", d.Markup), "<script>"},
		{"job-running", fmt.Sprintf("job?id=%d", d.Running.ID), "It runs in"},
		{"effects", "effects", "Look it up at the provider"},
		{"effects-others", "effects?of=others", "order:4713"},
		{"keys", "keys?key=" + d.Fence, "the application"},
		{"lanes", "lanes", "book/account-0"},
		{"groups", "groups", "Jobs that wait for others"},
		{"job-group", fmt.Sprintf("job?id=%d", g.Then.ID), "scan"},
		{"group", fmt.Sprintf("group?id=%d", g.Then.ID), "members are unfinished"},
		{"schedules", "schedules", "nightly report"},
		{"schedule", "schedule?name=reminders", "back-filled"},
		{"audit", "audit", "It began"},
		{"queue", "queue?name=mail", "No worker serves it"},
		{"kind", "kind?name=charge&range=1d", "Its errors"},
		{"worker", fmt.Sprintf("worker?id=%d", live.ID), "Slots"},
		{"worker-gone", "worker?id=7", "not seen lately"},
		{"worker-stuck", fmt.Sprintf("worker?id=%d", trouble.StuckWorker), "hold 2 of them"},
		{"errors", "errors", "mailbox unavailable"},
		{"confirm", "confirm?all=1&do=redrive-many&queue=mail", "3 jobs"},
		{"move", "confirm?all=1&do=move-many&queue=thumbnials", "To queue"},
		{"backfill", "confirm?do=backfill&name=reminders&from=" + time.Now().Add(-5*time.Hour).UTC().Format("2006-01-02T15:04"), "Back-fill"},
		{"discard", fmt.Sprintf("confirm?do=discard&id=%d", d.Dead[0]), "second time"},
		{"again", "confirm?do=resolve-many&decision=applied&kind=charge&result=%7B", "Nothing was changed"},
		{"error", "job?id=x", "not a number"},
	} {
		t.Run(p.name, func(t *testing.T) { everywhere(t, ctx, axe, p.name, s.base+p.path, p.text) })
	}
}

// everywhere opens a page in windows of each width and theme.
func everywhere(t *testing.T, ctx context.Context, axe, name, address, text string) {
	t.Helper()
	for _, w := range []struct {
		suffix string
		width  int64
		scheme string
	}{{"", 1440, "light"}, {"-dark", 1440, "dark"}, {"-tablet", 1024, "light"}, {"-tablet-dark", 1024, "dark"}, {"-phone", 390, "light"}, {"-phone-dark", 390, "dark"}} {
		var title string
		run(t, ctx, size(w.width, 900, w.scheme), chromedp.Navigate(address), shows(text), fits(t, name+w.suffix),
			chromedp.Title(&title), picture(name+w.suffix, float64(w.width), map[bool]float64{false: 2400, true: 900}[w.width < 600]),
			accessible(t, axe, name+w.suffix))
		require.Contains(t, title, "billing, production", "markup did not run")
	}
}

// Several databases: their overview follows them, and the page of each leads to the others.
func TestBrowser_Several(t *testing.T) {
	db, other := newDB(t), newDB(t)
	trouble.Make(t, db)
	pages := make(map[string]*onceqweb.Handler)
	for name, one := range map[string]*queuetest.DB{"eu-1": db, "us-1": other} {
		page, err := onceqweb.New(one.Queue, one.Pool, onceqweb.Config{Viewer: onCall, Title: "billing, production", Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		pages[name] = page
	}
	gone, err := pgxpool.NewWithConfig(t.Context(), other.Pool.Config())
	require.NoError(t, err)
	gone.Close()
	pages["us-2"], err = onceqweb.New(other.Queue, gone, onceqweb.Config{Viewer: onCall, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	all, err := onceqweb.NewSeveral("billing, production", pages)
	require.NoError(t, err)
	server := httptest.NewServer(all)
	t.Cleanup(func() {
		all.Close()
		server.CloseClientConnections()
		server.Close()
	})
	ctx, axe := browser(t), axeScript(t)
	everywhere(t, ctx, axe, "several", server.URL, "does not answer")
	everywhere(t, ctx, axe, "several-one", server.URL+"/us-1/jobs", "No job is like this")
	_, err = other.Queue.Enqueue(t.Context(), other.Pool, onceq.Job{Kind: "new", Payload: 1})
	require.NoError(t, err)
	run(t, ctx, chromedp.Navigate(server.URL), chromedp.WaitVisible(`a[href="./us-1/jobs?state=waiting"]`),
		chromedp.Evaluate(`document.querySelector('a[href="./us-1/"]').click()`, nil), // at once: the page is replaced every few seconds
		chromedp.WaitVisible(`.switch summary`), chromedp.Click(`.switch summary`), chromedp.Click(`.switch a[href="./../eu-1/"]`), shows("wait for a person"),
		chromedp.Click(`.switch summary`), chromedp.Click(`.switch a[href="./../"]`), chromedp.WaitVisible(`main[data-every]`))
	_, err = other.Queue.Enqueue(t.Context(), other.Pool, onceq.Job{Kind: "new", Payload: 1})
	require.NoError(t, err)
	run(t, ctx, chromedp.Poll(`document.querySelector('a[href="./us-1/jobs?state=waiting"]').textContent === "2"`, nil)) // by itself
}

// A person finds the held charge and says what happened; another window, which shows the job, follows.
func TestBrowser_DecideAboutAHeldEffect(t *testing.T) {
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: onCall, Schedules: d.Schedules})
	ctx := browser(t)
	other := tab(t, ctx)
	run(t, other, chromedp.Navigate(s.base+fmt.Sprintf("job?id=%d", d.Held)), chromedp.WaitVisible(`main[data-following]`), shows("nobody knows whether"))

	form := fmt.Sprintf(`form[aria-label="Say what happened to charge of job %d"] `, d.Held)
	run(t, ctx, chromedp.Navigate(s.base), shows("wait for a person"),
		chromedp.Evaluate(`document.querySelector(".note.held a").click()`, nil), // at once: the page is replaced every two seconds
		chromedp.WaitVisible(form),
		chromedp.SendKeys(form+`input[name=why]`, "found ch_1 at the provider"), chromedp.SendKeys(form+`input[name=result]`, `"ch_1"`),
		chromedp.Click(form+`button[value=applied]`), shows("Done: resolve."), shows("found ch_1 at the provider"))
	run(t, other, shows("No live worker works queue"), shows(`"ch_1"`))
	j, err := db.Queue.Get(t.Context(), db.Pool, d.Held)
	require.NoError(t, err)
	require.Equal(t, onceq.StateWaiting, j.State)
	run(t, ctx, chromedp.Navigate(s.base+"audit"), shows(`effect "charge": it happened`), picture("audit-filled", 1240, 900))
}

// A search, marks, a count, and the result.
func TestBrowser_RedriveMany(t *testing.T) {
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: onCall})
	ctx := browser(t)
	run(t, ctx, chromedp.Navigate(s.base+"jobs"), chromedp.WaitVisible(`.more summary`), chromedp.Click(`.more summary`),
		chromedp.SendKeys(`.search input[name=queue]`, "mail"), chromedp.Click(`.search button`), chromedp.WaitVisible(`.chip`),
		chromedp.Click(`.states a[href*="state=dead"]`), chromedp.WaitVisible(`.states a[href*="state=dead"][aria-current]`),
		chromedp.WaitVisible(`button[value=redrive-many]:disabled`), // nothing is marked
		chromedp.WaitVisible(fmt.Sprintf(`input[name=ids][value="%d"]`, d.Dead[1])),
		chromedp.Click(fmt.Sprintf(`input[name=ids][value="%d"]`, d.Dead[1])), chromedp.Click(`button[value=redrive-many]`), shows("1 job"),
		chromedp.SendKeys(`input[name=why]`, "the mailbox is back"), chromedp.Click(`main button`), shows("1 run again"))
	for i, want := range []onceq.State{onceq.StateDead, onceq.StateWaiting, onceq.StateDead} {
		j, err := db.Queue.Get(t.Context(), db.Pool, d.Dead[i])
		require.NoError(t, err)
		require.Equal(t, want, j.State)
	}
}

// The overview follows the database, says when the server is gone, and leaves alone what somebody is typing.
func TestBrowser_FollowsTheDatabase(t *testing.T) {
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: onCall})
	ctx := browser(t)
	run(t, ctx, chromedp.Navigate(s.base), chromedp.WaitVisible(`main[data-following]`))
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "new", Queue: "brand-new-queue", Payload: 1})
	require.NoError(t, err)
	run(t, ctx, shows("brand-new-queue"))

	run(t, ctx, chromedp.Navigate(s.base+fmt.Sprintf("job?id=%d", d.Retrying)), chromedp.WaitVisible(`main[data-following]`),
		chromedp.SendKeys(`form[aria-label="Act on job `+fmt.Sprint(d.Retrying)+`"] input[name=why]`, "half a senten"))
	_, err = onceqops.New(db.Queue).Retry(t.Context(), db.Pool, d.Retrying)
	require.NoError(t, err)
	var typed string
	run(t, ctx, hides("the next one is due at"), chromedp.Value(`form[aria-label="Act on job `+fmt.Sprint(d.Retrying)+`"] input[name=why]`, &typed))
	require.Equal(t, "half a senten", typed)

	// The job goes away. The page stays as long as somebody types, and then says so.
	_, err = db.Queue.Cancel(t.Context(), db.Pool, d.Retrying)
	require.NoError(t, err)
	run(t, ctx, shows("cancelled"))
	require.NoError(t, onceqops.New(db.Queue).Discard(t.Context(), db.Pool, d.Retrying))
	run(t, ctx, chromedp.Sleep(3*time.Second), chromedp.Value(`form[aria-label="Act on job `+fmt.Sprint(d.Retrying)+`"] input[name=why]`, &typed))
	require.Equal(t, "half a senten", typed)
	run(t, ctx, chromedp.Evaluate(`document.activeElement.blur(); for (const input of document.querySelectorAll("input[name=why]")) input.value = ""`, nil),
		chromedp.WaitNotPresent(`form[aria-label="Act on job `+fmt.Sprint(d.Retrying)+`"]`))
	run(t, ctx, chromedp.Navigate(s.base), chromedp.WaitVisible(`main[data-following]`))

	s.page.Close() // and the streams with it
	run(t, ctx, shows("these figures stand still"))
}

// Without script each page is there, and an action works.
func TestBrowser_WithoutScript(t *testing.T) {
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: onCall, Schedules: d.Schedules})
	ctx := browser(t)
	off := chromedp.ActionFunc(func(ctx context.Context) error { return emulation.SetScriptExecutionDisabled(true).Do(ctx) })
	text := func(want string) chromedp.Action {
		return chromedp.ActionFunc(func(ctx context.Context) error {
			for {
				var body string
				// It fails while the next page comes.
				if err := chromedp.Text(`body`, &body, chromedp.ByQuery).Do(ctx); err == nil && strings.Contains(body, want) {
					return nil
				}
				select {
				case <-ctx.Done():
					return errors.New(want + " is not in: " + body)
				case <-time.After(50 * time.Millisecond):
				}
			}
		})
	}
	run(t, ctx, off, chromedp.Navigate(s.base), text("thumbnials"), chromedp.Click(`nav a[href="./jobs"]`), text("mailbox unavailable"),
		chromedp.Navigate(s.base+"schedule?"+url.Values{"name": {"reminders"}}.Encode()), text("Ledger"), chromedp.Click(`button[value=pause]`), text("Done: pause"))
	list, err := d.Schedules.List(t.Context(), nil)
	require.NoError(t, err)
	require.False(t, list[1].Paused.IsZero())
}

// A person makes a schedule, and sees when it will be due before it is written, also without script.
func TestBrowser_Schedules(t *testing.T) {
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: onCall, Schedules: d.Schedules})
	ctx, axe := browser(t), axeScript(t)
	form := `form[aria-label="Make a schedule"] `
	unfold := chromedp.Click(`main details summary`)
	fill := chromedp.Tasks{
		chromedp.Navigate(s.base + "schedules"), chromedp.WaitVisible(`main details summary`), unfold, chromedp.WaitVisible(form), chromedp.SendKeys(form+`input[name=name]`, "rates"),
		chromedp.SendKeys(form+`input[name=spec]`, "30 9 * * MON-FRI"), chromedp.SendKeys(form+`input[name=zone]`, "America/New_York"),
		chromedp.SendKeys(form+`input[name=kind]`, "fetch"), chromedp.Click(form + `button`), chromedp.WaitVisible(`form[aria-label="Save schedule rates"]`),
	}
	for _, w := range []struct {
		suffix string
		width  int64
		scheme string
	}{{"", 1440, "light"}, {"-phone-dark", 390, "dark"}} {
		run(t, ctx, size(w.width, 900, w.scheme), fill, shows(" is "), fits(t, "preview"+w.suffix), picture("preview"+w.suffix, float64(w.width), 900),
			accessible(t, axe, "preview"+w.suffix))
	}
	off := chromedp.ActionFunc(func(ctx context.Context) error { return emulation.SetScriptExecutionDisabled(true).Do(ctx) })
	save := `form[aria-label="Save schedule rates"] `
	run(t, ctx, off, fill, chromedp.SendKeys(save+`input[name=why]`, "the bank has moved"), chromedp.Click(save+`button`), chromedp.WaitVisible(`main details summary`), unfold, chromedp.WaitVisible(`form[aria-label="Change schedule rates"]`))
	one, err := d.Schedules.Get(t.Context(), nil, "rates")
	require.NoError(t, err)
	require.Equal(t, []string{"30 9 * * MON-FRI", "America/New_York", "fetch"}, []string{one.Spec, one.Zone, one.Job.Kind})
}

// The keyboard alone is enough: the way to the content, and every control with a visible focus and a name.
func TestBrowser_KeyboardAndNames(t *testing.T) {
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: onCall, Schedules: d.Schedules})
	ctx := browser(t)
	for _, path := range []string{"", "jobs", fmt.Sprintf("job?id=%d", d.Held), "effects", "keys?key=" + d.Fence, "schedule?name=reminders", "queue?name=mail", "errors", "confirm?all=1&do=redrive-many&queue=mail"} {
		var nameless, headings, outline string
		run(t, ctx, chromedp.Navigate(s.base+path), chromedp.WaitVisible(`main h1`),
			chromedp.Evaluate(`[...document.querySelectorAll("a, button, summary, select, input:not([type=hidden])")].filter((e) => !(e.textContent || e.getAttribute("aria-label") || (e.labels && e.labels.length && e.labels[0].textContent) || "").trim()).map((e) => e.outerHTML).join("\n")`, &nameless),
			chromedp.Evaluate(`document.querySelectorAll("h1").length + " " + document.documentElement.lang`, &headings),
			chromedp.Evaluate(`document.activeElement.blur(); ""`, nil), chromedp.KeyEvent("\t"),
			chromedp.Evaluate(`getComputedStyle(document.activeElement).outlineStyle`, &outline))
		require.Empty(t, nameless, path)
		require.Equal(t, "1 en", headings, path)
		require.NotEqual(t, "none", outline, path)
	}
}

// Plots show the values of a point under the pointer and by the arrow keys, in the legends; keys lead through rows; the colours can be
// chosen, and stay so.
func TestBrowser_PlotsKeysAndColours(t *testing.T) {
	db := newDB(t)
	d := trouble.Make(t, db)
	s := serve(t, db, onceqweb.Config{Viewer: onCall, Schedules: d.Schedules})
	ctx := browser(t)
	var all, last, first, before string
	value := func(to *string) chromedp.Action { return chromedp.Text(`.throughput [data-column="1"]`, to) }
	run(t, ctx, size(1240, 900, "light"), chromedp.Navigate(s.base+"queue?name=mail"), chromedp.WaitVisible(`.throughput .area`), value(&all),
		chromedp.Focus(`.throughput .area`), chromedp.KeyEvent(kb.End), value(&last), chromedp.KeyEvent(kb.ArrowLeft), value(&before), chromedp.KeyEvent(kb.Home), value(&first))
	var rows []string
	run(t, ctx, chromedp.Evaluate(`[...document.querySelectorAll(".values tbody tr")].map((row) => row.cells[1].textContent)`, &rows))
	require.Equal(t, []string{rows[len(rows)-1], rows[len(rows)-2], rows[0]}, []string{last, before, first})
	run(t, ctx, chromedp.KeyEvent(kb.Escape), value(&last))
	require.Equal(t, all, last)
	run(t, ctx, chromedp.Evaluate(`(() => { const area = document.querySelector(".run .area");
		area.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: area.getBoundingClientRect().left + 1 })); })()`, nil), value(&last))
	require.Equal(t, first, last)

	var focused, find, scheme string
	run(t, ctx, chromedp.Navigate(s.base+"jobs"), chromedp.WaitVisible(`tbody tr`), chromedp.KeyEvent("j"), chromedp.KeyEvent("j"), chromedp.KeyEvent("k"),
		chromedp.Evaluate(`document.activeElement.textContent`, &focused), chromedp.KeyEvent("x"), shows("1 marked"), chromedp.KeyEvent("?"), shows("search for a job by its id or key"),
		accessible(t, axeScript(t), "keys"),
		chromedp.Evaluate(`document.querySelector("#keys button").click()`, nil), hides("search for a job by its id or key"), chromedp.KeyEvent("/"),
		chromedp.Evaluate(`document.activeElement.id`, &find))
	require.Equal(t, "find", find)
	run(t, ctx, chromedp.Evaluate(`document.getElementById("find").value = ""`, nil), // the key itself, which chromedp types although the page has taken it
		chromedp.SendKeys(`#find`, focused), chromedp.Click(`.one button`), shows("Failed attempts"))
	run(t, ctx, chromedp.Click(`#theme`), chromedp.Click(`#theme`), chromedp.Navigate(s.base), chromedp.WaitVisible(`main`),
		chromedp.Evaluate(`getComputedStyle(document.documentElement).colorScheme`, &scheme))
	require.Equal(t, "dark", scheme)
}

// A person finds the dead member of a group, redrives it, and cancels another group.
func TestBrowser_Groups(t *testing.T) {
	db := newDB(t)
	scan := onceq.Kind[int]{Name: "scan"}
	group := func() onceq.Group {
		g, err := db.Queue.EnqueueGroup(t.Context(), db.Pool, []onceq.Job{scan.Job(1), scan.Job(2)}, onceq.Job{Kind: "report", Payload: 1})
		require.NoError(t, err)
		return g
	}
	g := group()
	db.Drain(scan.Handle(func(_ context.Context, _ *onceq.Lease, n int) error {
		if n == 2 {
			return onceq.Fatal(errors.New("the page is torn"))
		}
		return nil
	}))
	other := group()
	s := serve(t, db, onceqweb.Config{Viewer: onCall})
	ctx := browser(t)
	run(t, ctx, size(1240, 900, "light"), chromedp.Navigate(s.base+"groups"), shows("it stands still until somebody redrives or discards dead members"),
		chromedp.Click(fmt.Sprintf(`a[href="./group?id=%d"]`, g.Then.ID)), shows("the page is torn"),
		chromedp.Click(`input[name="all"]`), chromedp.Click(`button[value="redrive-many"]`), shows("Are you sure?"),
		chromedp.SendKeys(`input[name="why"]`, "scanned again"), chromedp.Click(`form[action="./act"] button`), shows("1 run again"))
	run(t, ctx, chromedp.Navigate(fmt.Sprintf("%sgroup?id=%d", s.base, other.Then.ID)), shows("members are unfinished"),
		chromedp.Click(`a.danger`), shows("Are you sure?"),
		chromedp.SendKeys(`input[name="why"]`, "not wanted"), chromedp.Click(`form[action="./act"] button`), shows("3 jobs cancelled"))
	n, err := onceqops.New(db.Queue).Count(t.Context(), db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateCancelled}})
	require.NoError(t, err)
	require.Equal(t, 3, n)
}

// A person raises the limit of a lane, and moves what waits in a misspelt queue.
func TestBrowser_LanesAndMoves(t *testing.T) {
	db := newDB(t)
	lane := onceq.Kind[int]{Name: "book", Queue: "acounts", Lane: func(int) string { return "7" }}
	for n := range 3 {
		_, err := db.Queue.Enqueue(t.Context(), db.Pool, lane.Job(n))
		require.NoError(t, err)
	}
	s := serve(t, db, onceqweb.Config{Viewer: onCall})
	ctx := browser(t)
	run(t, ctx, size(1240, 900, "light"), chromedp.Navigate(s.base+"lanes"), shows("book/7"),
		chromedp.SendKeys(`form[action="./act"] input[name="name"]`, "book/7"), chromedp.SendKeys(`form[action="./act"] input[name="n"]`, "2"),
		chromedp.SendKeys(`form[action="./act"] input[name="why"]`, "many accounts"), chromedp.Click(`form[action="./act"] button`),
		shows("the limit is 2; it was 1"))
	run(t, ctx, chromedp.Navigate(s.base+"jobs?queue=acounts"), shows("book"), chromedp.Click(`input[name="all"]`), chromedp.Click(`button[value="move-many"]`), shows("To queue"),
		chromedp.SendKeys(`input[name="to"]`, "accounts"), chromedp.SendKeys(`input[name="why"]`, "misspelt"), chromedp.Click(`form[action="./act"] button`),
		shows(`3 moved to queue "accounts"`))
	n, err := onceqops.New(db.Queue).Count(t.Context(), db.Pool, onceqops.Filter{Queue: "accounts"})
	require.NoError(t, err)
	require.Equal(t, 3, n)
}
