package onceqweb

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
)

// Viewer is who looks at the page, and what they may do besides reading.
type Viewer struct {
	Name     string // for the audit trail; required with Act
	Act      bool   // cancel, redrive, resolve, fire a schedule, …
	Payloads bool   // see payloads, results and metadata
}

// Config configures the page. The zero value is a page that is only for reading, without payloads.
type Config struct {
	// Viewer says who makes a request. An error refuses it with 403, and is logged. Default: everybody who reaches the
	// handler may read, and no more. Put the handler behind the application's own authentication.
	Viewer func(*http.Request) (Viewer, error)

	// Mask changes what a viewer with Payloads sees of a job of a kind, and the errors that everybody sees. field is
	// "payload", "result", "metadata", "progress", "error", or "effect " with the name of an effect, for its result. text is
	// what would be shown. For a key outside of jobs, kind is the key's scope. Where the kind is not known any more, as of a group's
	// members that have completed, results are hidden if there is a Mask. Default: all is shown as it is.
	Mask func(kind, field, text string) string

	// Title stands at the top of each page: which application this is, and where it runs. Default "onceq".
	Title string

	// Prefix is the path below which the handler stands, if the router does not strip it. Default none. The pages themselves
	// need no prefix: their links are relative.
	Prefix string

	// Schedules fires and resumes schedules that are in this process's code at once. Default: a worker whose code has them
	// is asked to.
	Schedules *onceqcron.Scheduler

	// TrustedOrigins may send actions too, as "https://admin.example.com". It is needed if a proxy changes the Host header,
	// and the browser is old. Default none.
	TrustedOrigins []string

	// Logger gets the actions, refused requests and failures. Default slog.Default().
	Logger *slog.Logger
}

// Handler is the page. It is safe for concurrent use.
type Handler struct {
	q     *onceq.Queue
	db    *pgxpool.Pool
	cron  *onceqcron.Scheduler
	cfg   Config
	log   *slog.Logger
	guard http.Handler
	masks bool // there is a Config.Mask

	slots  chan struct{} // one for each read of the database that runs
	offset atomic.Int64  // of the database's clock to this process's

	state     cache[state]
	findings  cache[[]onceq.Finding]
	lists     cache[jobList]
	jobs      cache[jobView]
	doubts    cache[doubtsView]
	schedules cache[[]onceqcron.Info]
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
	if cfg.Viewer == nil {
		cfg.Viewer = func(*http.Request) (Viewer, error) { return Viewer{}, nil }
	}
	masks := cfg.Mask != nil
	if !masks {
		cfg.Mask = func(_, _, text string) string { return text }
	}
	cfg.Prefix = strings.TrimSuffix(cfg.Prefix, "/")
	if cfg.Prefix != "" && !strings.HasPrefix(cfg.Prefix, "/") {
		return nil, fmt.Errorf("onceqweb: Config.Prefix is %q; it must begin with a slash", cfg.Prefix)
	}
	h := &Handler{q: q, db: db, cron: cfg.Schedules, cfg: cfg, masks: masks, log: cfg.Logger, slots: make(chan struct{}, maxReads)}
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
	h.guard = protection.Handler(http.HandlerFunc(h.serve))
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

func (h *Handler) serve(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")
	name, found := strings.CutPrefix(r.URL.Path, h.cfg.Prefix)
	if !found {
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
	viewer, err := h.cfg.Viewer(r)
	if err == nil && viewer.Act && viewer.Name == "" {
		err = errors.New("Config.Viewer lets somebody act who has no name")
	}
	if err != nil {
		h.log.LogAttrs(r.Context(), slog.LevelWarn, "onceqweb: refused", slog.String("path", r.URL.Path), slog.Any("error", err))
		http.Error(w, "You may not see this page.", http.StatusForbidden)
		return
	}
	if viewer.Name == "" {
		viewer.Name = "anonymous"
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
		h.hub.serve(w, r)
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
	Page   string
	Done   *onceq.Action // what an action has done
	Held   int           // effects that wait for a person, for the navigation; by queue no more than StatsCap
	Behind string        // why the figures are old
	Now    time.Time
}

func (h *Handler) render(w http.ResponseWriter, r *request, v *view) {
	if v.To != "" {
		w.Header().Set("Location", v.To)
		w.WriteHeader(http.StatusSeeOther)
		return
	}
	f := frame{view: v, App: h.cfg.Title, Assets: assets, Viewer: r.viewer, Page: v.Template, Now: h.now()}
	if good := h.good.Load(); good != nil {
		for _, s := range good.state.Queues {
			f.Held += s.Held
		}
	}
	if done := r.values.Get("done"); done != "" {
		f.Done = h.done(r.Context(), done)
	}
	var b bytes.Buffer
	if err := templates.ExecuteTemplate(&b, v.Template+".html", f); err != nil {
		h.log.LogAttrs(r.Context(), slog.LevelError, "onceqweb: page", slog.String("page", v.Template), slog.Any("error", err))
		http.Error(w, "onceqweb: this page cannot be shown; the log says why", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if v.Status != 0 {
		w.WriteHeader(v.Status)
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

// fail shows an error.
func (h *Handler) fail(w http.ResponseWriter, r *request, err error) {
	v := &view{Template: "error", Title: "Not possible", Status: http.StatusServiceUnavailable}
	var status *statusError
	var invalid *onceq.InvalidError
	switch {
	case errors.As(err, &status):
		v.Status, v.Data = status.status, status.text
	case errors.As(err, &invalid):
		v.Status, v.Data = http.StatusBadRequest, err.Error()
	case errors.Is(err, onceq.ErrNotFound), errors.Is(err, onceqcron.ErrNotFound):
		v.Status, v.Data = http.StatusNotFound, err.Error()
	case errors.Is(err, context.DeadlineExceeded):
		v.Title = "The database did not answer in time"
		v.Data = "It was given a few seconds. Narrow the search, by queue and state first, or try again: " + err.Error()
	default:
		v.Title = "The database did not answer"
		v.Data = err.Error()
	}
	if v.Status >= 500 {
		h.log.LogAttrs(r.Context(), slog.LevelWarn, "onceqweb: page failed", slog.String("path", r.URL.Path), slog.Any("error", err))
	}
	h.render(w, r, v)
}

// now is the database's time, as far as it is known.
func (h *Handler) now() time.Time { return time.Now().Add(time.Duration(h.offset.Load())) }
