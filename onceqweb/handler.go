package onceqweb

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/guard"
	"github.com/onceq/onceq/onceqcron"
	"github.com/onceq/onceq/onceqops"
)

// Viewer is who looks at the page, and what they may do besides reading.
type Viewer struct {
	// Name stands in the audit trail, and each name has its share of the live updates. A viewer without one is refused.
	Name string

	Payloads bool // see payloads, results, metadata and progress notes

	Run    bool // let jobs run: retry, redrive, fire and back-fill schedules
	Change bool // cancel, discard and move jobs
	Decide bool // say what happened to effects; set limits; pause and resume queues, kinds, limits and schedules
	Act    bool // all three

	Schedule bool // create, change and remove schedules of the table, with jobs of any kind and payload; Act does not include it
}

// may reports whether a viewer may do an action, and known whether there is one of that name, as forms call it.
func (v Viewer) may(do string) (may, known bool) {
	switch do {
	case "retry", "retry-many", "redrive", "redrive-many", "fire", "backfill":
		return v.Run, true
	case "cancel", "cancel-many", "cancel-group", "discard", "discard-many", "move", "move-many":
		return v.Change, true
	case "resolve", "resolve-many", "resolve-key", "limit", "remove-limit", "lane-limit", "remove-lane-limit",
		"pause", "resume", "pause-queue", "resume-queue", "pause-kind", "resume-kind", "pause-limit", "resume-limit":
		return v.Decide, true
	case "put-schedule", "remove-schedule":
		return v.Schedule, true
	}
	return v.Run || v.Change || v.Decide || v.Schedule, false
}

// Everybody is a Config.Viewer that lets everybody read who reaches the handler, without payloads. Their names are the addresses
// that their requests come from, of IPv6 the first half, because one reader has all that begin so: behind a proxy all have one, and
// share its live updates. A Viewer of your own can take the name from a header that the proxy sets.
func Everybody(r *http.Request) (Viewer, error) {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.Is6() && !ip.Is4In6() {
		network, _ := ip.Prefix(64) // of such an address it exists
		host = network.String()
	}
	return Viewer{Name: "anonymous at " + host}, nil
}

// Config configures the page.
type Config struct {
	// Viewer says who makes a request. Required. An error, a panic, and a Viewer without a Name refuse the request with 403, and are
	// logged. Everybody is for a page that needs no more than what stands before it.
	Viewer func(*http.Request) (Viewer, error)

	// Mask changes what a viewer with Payloads sees of a job of a kind, and the errors that everybody sees. field is
	// "payload", "result", "metadata", "progress", "error", or "effect " with the name of an effect, for its result. text is
	// what would be shown, whole. Of a payload of bytes it is the bytes, which need not be UTF-8, and the page shows as hex what
	// Mask makes of them if they are no text. For a key outside of jobs, kind is the key's scope, and for
	// errors of a schedule it is empty. Of an error, Health reads the first 300 characters. Where the kind is not known any more, as of a group's
	// members that have completed, results are hidden if there is a Mask. A panic hides the text. Default: all is shown as it is.
	Mask func(kind, field, text string) string

	// Title stands at the top of each page: which application this is, and where it runs. Default "onceq".
	Title string

	// Prefix is the path below which the handler stands, if the router does not strip it. Default none. The pages themselves
	// need no prefix: their links are relative.
	Prefix string

	// Schedules fires and resumes schedules that are in this process's code at once. Default: a worker whose code has them
	// is asked to. It also creates and changes schedules of the table, of its owner: without it the page does not.
	Schedules *onceqcron.Scheduler

	// TrustedOrigins may send actions too, as "https://admin.example.com". It is needed if a proxy changes the Host header,
	// and the browser is old. Default none.
	TrustedOrigins []string

	// Logger gets the actions, refused requests and failures. Default slog.Default().
	Logger *slog.Logger
}

// protect makes the functions of the configuration ones that cannot panic: live updates call them in a goroutine that all open pages
// share. What a panic leaves unknown is refused, or hidden.
func (c *Config) protect() {
	calls := guard.New(c.Logger)
	viewer, mask := c.Viewer, c.Mask
	c.Viewer = func(r *http.Request) (v Viewer, err error) {
		if p := calls.Call("Config.Viewer", func() { v, err = viewer(r) }); p != nil {
			return Viewer{}, errors.New("Config.Viewer panicked")
		}
		return v, err
	}
	c.Mask = func(kind, field, text string) string {
		shown := "hidden, because Config.Mask panicked; the log says where"
		calls.Call("Config.Mask", func() { shown = mask(kind, field, text) })
		return shown
	}
}

// Handler is the page. It is safe for concurrent use.
type Handler struct {
	q     *onceq.Queue
	ops   *onceqops.Ops
	db    *pgxpool.Pool
	cron  *onceqcron.Scheduler
	cfg   Config
	log   *slog.Logger
	guard http.Handler
	masks bool // there is a Config.Mask

	slots  chan struct{} // one for each read of the database that runs
	offset atomic.Int64  // of the database's clock to this process's

	state     cache[struct{}, state]
	findings  cache[struct{}, []onceqops.Finding]
	lists     cache[filterKey, jobList]
	jobs      cache[jobKey, jobView]
	doubts    cache[filterKey, doubtsView]
	schedules cache[struct{}, []onceqcron.Info]
	series    cache[seriesKey, series]
	kinds     cache[seriesKey, []kindRow]
	failed    cache[filterKey, failedJobs]
	busy      cache[int64, []onceqops.Busy]
	changes   cache[struct{}, changes]
	good      atomic.Pointer[goodState]

	hub hub

	countLimit int // where the count before an action on many stops
	countTime  time.Duration
	limits     limits
}

// limits are those that tests change, so that they pass on a machine that stands still for seconds.
type limits struct {
	read   time.Duration // for everything that a page reads
	act    time.Duration // for an action on one job
	stream time.Duration // then a stream ends, so that rights are asked for again; the browser comes back by itself
	state  time.Duration // how old the state may be that a page shows
}

// Limits that no test changes.
const (
	manyLimit   = 30 * time.Second // for an action on many
	maxReads    = 4                // at the same time, so that the page never takes the application's pool
	maxBody     = 64 << 10
	maxMany     = 10_000 // jobs that one action on many takes
	refresh     = 2 * time.Second
	healthEvery = 15 * time.Second
)

//go:embed templates static
var files embed.FS

var (
	static, _ = fs.Sub(files, "static")
	assets    = hashOf(static)
	templates = template.Must(template.New("").Funcs(functions).ParseFS(files, "templates/*.html"))
)

// hashOf gives the version of the style sheet and the script, so that browsers may keep them.
func hashOf(dir fs.FS) string {
	h := sha256.New()
	_ = fs.WalkDir(dir, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			text, _ := fs.ReadFile(dir, name)
			_, _ = h.Write(text)
		}
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)[:6])
}

// New returns the page over a queue and its pool. It does not connect to the database. Call Close when the server shuts down.
func New(q *onceq.Queue, db *pgxpool.Pool, cfg Config) (*Handler, error) {
	if q == nil || db == nil {
		return nil, errors.New("onceqweb: New needs a queue and its pool")
	}
	if cfg.Title == "" {
		cfg.Title = "onceq"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	cfg.Logger = guard.Logger(cfg.Logger)
	if cfg.Viewer == nil {
		return nil, errors.New("onceqweb: Config.Viewer is nil: it says who makes a request; use Everybody if everybody who reaches the page may read")
	}
	masks := cfg.Mask != nil
	if !masks {
		cfg.Mask = func(_, _, text string) string { return text }
	}
	cfg.Prefix = strings.TrimSuffix(cfg.Prefix, "/")
	if cfg.Prefix != "" && !strings.HasPrefix(cfg.Prefix, "/") {
		return nil, fmt.Errorf("onceqweb: Config.Prefix is %q; it must begin with a slash", cfg.Prefix)
	}
	cfg.protect()
	h := &Handler{q: q, ops: onceqops.New(q), db: db, cron: cfg.Schedules, cfg: cfg, masks: masks, log: cfg.Logger, slots: make(chan struct{}, maxReads)}
	if h.cron == nil {
		var err error
		if h.cron, err = onceqcron.New(q, db, onceqcron.Config{}); err != nil {
			return nil, err
		}
	}
	protection := http.NewCrossOriginProtection()
	for _, origin := range cfg.TrustedOrigins {
		if err := protection.AddTrustedOrigin(origin); err != nil {
			return nil, fmt.Errorf("onceqweb: Config.TrustedOrigins: %w", err)
		}
	}
	protection.SetDenyHandler(http.HandlerFunc(h.foreign))
	h.guard = protection.Handler(http.HandlerFunc(h.serve))
	h.lists.size, h.jobs.size, h.doubts.size = jobList.size, jobView.size, doubtsView.size
	h.series.size, h.failed.size = series.size, failedJobs.size
	h.kinds.size = func(rows []kindRow) int { return 4000 * len(rows) }
	h.busy.size = func(busy []onceqops.Busy) int { return 500 * len(busy) }
	h.hub.init(h)
	h.countLimit, h.countTime = 100_000, time.Second
	h.limits = limits{read: 5 * time.Second, act: 5 * time.Second, stream: time.Minute, state: refresh - 100*time.Millisecond}
	return h, nil
}

// Close ends the open streams of live updates. http.Server.Shutdown would otherwise wait for them, so register it there:
// server.RegisterOnShutdown(page.Close).
func (h *Handler) Close() { h.hub.close() }

// ServeHTTP serves the page.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.guard.ServeHTTP(w, r) }

// policy allows what the page itself has, and nothing inline.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// page is how a page is made: it returns what to show, or an error.
type page func(h *Handler, ctx context.Context, r *request) (*view, error)

var pages = map[string]page{
	"":          overview,
	"queue":     oneQueue,
	"kind":      oneKind,
	"worker":    oneWorker,
	"errors":    errorsOf,
	"jobs":      jobs,
	"job":       job,
	"effects":   effects,
	"keys":      keys,
	"lanes":     lanes,
	"groups":    groups,
	"group":     oneGroup,
	"schedules": schedules,
	"schedule":  schedule,
	"audit":     audit,
	"confirm":   confirm,
}

// request is a request with what is known about it.
type request struct {
	*http.Request
	viewer Viewer
	values url.Values
}

// viewer says who makes a request.
func (h *Handler) viewer(r *http.Request) (Viewer, error) {
	v, err := h.cfg.Viewer(r)
	if err == nil && v.Name == "" {
		err = errors.New("Config.Viewer returned a Viewer without a Name")
	}
	if err != nil {
		h.log.LogAttrs(r.Context(), slog.LevelWarn, "onceqweb: refused", slog.String("path", r.URL.Path), slog.Any("error", err))
	}
	if v.Act {
		v.Run, v.Change, v.Decide = true, true, true
	}
	return v, err
}

// foreign refuses what another site's page has sent. An action is in the audit trail, under the name of whoever has been made to
// send it.
func (h *Handler) foreign(w http.ResponseWriter, r *http.Request) {
	if viewer, err := h.viewer(r); err == nil && strings.HasSuffix(r.URL.Path, "/act") {
		if values, err := readForm(w, r); err == nil {
			h.refuse(r.Context(), viewer, values, "it came from another site's page")
		}
	}
	http.Error(w, "This came from another site's page. Nothing was changed.", http.StatusForbidden)
}

// secure sets the headers of every answer.
func secure(header http.Header) {
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")
}

func (h *Handler) serve(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	secure(header)
	name, found := strings.CutPrefix(r.URL.Path, h.cfg.Prefix)
	if !found || h.cfg.Prefix != "" && name != "" && name[0] != '/' { // /admin/onceqjobs is somebody else's
		http.NotFound(w, r)
		return
	}
	if name == "" { // without the slash, relative links would lead elsewhere
		asked, _, _ := strings.Cut(r.RequestURI, "?")
		header.Set("Location", "./"+path.Base(asked)+"/")
		w.WriteHeader(http.StatusPermanentRedirect)
		return
	}
	name = strings.TrimPrefix(name, "/")
	for _, asset := range []string{"style.css", "app.js", "icon.svg"} {
		if name == "static/"+asset {
			header.Set("Cache-Control", "public, max-age=31536000, immutable")
			http.ServeFileFS(w, r, static, asset)
			return
		}
	}
	viewer, err := h.viewer(r)
	if err != nil {
		http.Error(w, "You may not see this page.", http.StatusForbidden)
		return
	}
	req := &request{Request: r, viewer: viewer}
	switch {
	case name == "act" && r.Method == http.MethodPost:
		h.act(w, req)
		return
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		header.Set("Allow", "GET, HEAD")
		h.fail(w, req, &statusError{http.StatusMethodNotAllowed, "This page is only for reading."})
		return
	case name == "live":
		h.hub.serve(w, req)
		return
	}
	make, ok := pages[name]
	if !ok {
		h.fail(w, req, &statusError{http.StatusNotFound, "There is no such page."})
		return
	}
	if req.values, err = url.ParseQuery(r.URL.RawQuery); err != nil {
		h.fail(w, req, bad("the address cannot be read: %v", err))
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), h.limits.read)
	defer cancel()
	v, err := make(h, ctx, req)
	if err != nil {
		h.fail(w, req, err)
		return
	}
	h.render(w, req, v)
}

// view is a page to show.
type view struct {
	Template string
	Title    string
	Status   int    // default 200
	Live     string // what its stream follows; empty for none
	Data     any
	To       string // where the browser is sent instead
}

// frame is what every template gets.
type frame struct {
	*view
	App    string
	Assets string
	Viewer Viewer
	Acts   bool // the viewer may do something besides reading
	Page   string
	Done   *onceqops.Action // what an action has done
	Held   int              // effects that wait for a person, for the navigation; by queue no more than StatsCap
	Now    time.Time
	Among  string   // the name of this one among several pages, and
	Others []string // those of the others
}

func (h *Handler) render(w http.ResponseWriter, r *request, v *view) {
	if v.To != "" {
		w.Header().Set("Location", v.To)
		w.WriteHeader(http.StatusSeeOther)
		return
	}
	f := &frame{view: v, App: h.cfg.Title, Assets: assets, Viewer: r.viewer, Page: v.Template, Now: h.now()}
	if one, ok := r.Context().Value(amongKey{}).(among); ok {
		f.Among, f.Others = one.Name, one.Others()
	}
	f.Acts, _ = r.viewer.may("")
	if good := h.good.Load(); good != nil {
		for _, s := range good.state.Queues {
			f.Held += s.Held
		}
	}
	if done := r.values.Get("done"); done != "" {
		f.Done = h.done(r, done)
	}
	write(w, r.Request, h.log, f)
}

func write(w http.ResponseWriter, r *http.Request, log *slog.Logger, f *frame) {
	var b bytes.Buffer
	if err := templates.ExecuteTemplate(&b, f.Template+".html", f); err != nil {
		log.LogAttrs(r.Context(), slog.LevelError, "onceqweb: page", slog.String("page", f.Template), slog.Any("error", err))
		http.Error(w, "onceqweb: this page cannot be shown; the log says why", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if f.Status != 0 {
		w.WriteHeader(f.Status)
	}
	if r.Method != http.MethodHead {
		_, _ = w.Write(b.Bytes())
	}
}

// statusError is an error that the viewer made, or can do something about.
type statusError struct {
	status int
	text   string
}

func (e *statusError) Error() string { return e.text }

func bad(format string, args ...any) error {
	return &statusError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// unprefixed is an error without the name of the package that it comes from.
func unprefixed(err error) string {
	return strings.TrimPrefix(strings.TrimPrefix(err.Error(), "onceqcron: "), "onceq: ")
}

// fail shows an error.
func (h *Handler) fail(w http.ResponseWriter, r *request, err error) {
	v := &view{Template: "error", Title: "Not possible", Status: http.StatusServiceUnavailable}
	err = h.hide(err)
	var status *statusError
	var hidden *failure
	switch {
	case errors.As(err, &status):
		v.Status, v.Data = status.status, sentence(status.text)
	case !errors.As(err, &hidden) && (errors.Is(err, onceq.ErrNotFound) || errors.Is(err, onceqcron.ErrNotFound)):
		v.Status, v.Data = http.StatusNotFound, sentence(unprefixed(err))
	case !errors.As(err, &hidden):
		v.Status, v.Data = http.StatusBadRequest, sentence(unprefixed(err))
	case errors.Is(err, context.DeadlineExceeded):
		v.Title = "The database did not answer in time"
		v.Data = "It was given a few seconds. Narrow the search, by queue and state first, or try again. " + sentence(err.Error())
	default:
		v.Title = "The database did not answer"
		v.Data = sentence(err.Error())
	}
	h.render(w, r, v)
}

// failure is an error that is in the log, under an id, and whose own text no page shows: what a driver says names hosts, users and
// databases.
type failure struct {
	id  string
	err error
}

func (f *failure) Error() string { return "the log of the application says why, under " + f.id }

func (f *failure) Unwrap() error { return f.err }

// hide returns what may be shown of an error: itself, if it says what is wrong with a request, and otherwise a *failure.
func (h *Handler) hide(err error) error {
	var status *statusError
	var invalid *onceq.InvalidError
	var logged *failure
	if err == nil || errors.As(err, &status) || errors.As(err, &logged) {
		return err
	}
	if !drivers(err) && (errors.As(err, &invalid) || refused(err) || errors.Is(err, onceq.ErrNotFound) || errors.Is(err, onceqcron.ErrNotFound)) {
		return err
	}
	f := &failure{strings.ToLower(rand.Text()[:10]), err}
	h.log.LogAttrs(context.Background(), slog.LevelWarn, "onceqweb: the database failed", slog.String("id", f.id), slog.Any("error", err))
	return f
}

// drivers reports whether an error has in it what the database's driver or the network has said.
func drivers(err error) bool {
	var answered *pgconn.PgError
	var connecting *pgconn.ConnectError
	var network net.Error // and a context whose time is up
	return errors.As(err, &answered) || errors.As(err, &connecting) || errors.As(err, &network) || errors.Is(err, context.Canceled)
}

// now is the database's time, as far as it is known.
func (h *Handler) now() time.Time { return time.Now().Add(time.Duration(h.offset.Load())) }
