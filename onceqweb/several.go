package onceqweb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceq/onceq/onceqops"
)

// Several is a page over several databases: an overview of all, and below the name of each its own page, from which one gets to the
// others. It is safe for concurrent use.
type Several struct {
	title string
	names []string
	pages map[string]*Handler
	slow  map[string]*atomic.Bool // the databases that did not answer in time when they were last asked
}

// NewSeveral returns a page over several databases, schemas or servers, each with a page of its own by its name. Each one's
// Config.Viewer says who may see it: others do not learn its name. A name is part of an address: letters, digits, dots, hyphens and
// the like. The pages have no Config.Prefix: use http.StripPrefix on the whole.
func NewSeveral(title string, pages map[string]*Handler) (*Several, error) {
	s := &Several{title: title, names: slices.Sorted(maps.Keys(pages)), pages: maps.Clone(pages), slow: make(map[string]*atomic.Bool)}
	if len(s.names) == 0 {
		return nil, errors.New("onceqweb: NewSeveral needs a page")
	}
	for name, page := range pages {
		switch {
		case name == "" || url.PathEscape(name) != name || strings.Trim(name, ".") == "" || name == "static":
			return nil, fmt.Errorf("onceqweb: %q cannot be the name of a page in an address", name)
		case page == nil:
			return nil, fmt.Errorf("onceqweb: page %q is nil", name)
		case page.cfg.Prefix != "":
			return nil, fmt.Errorf("onceqweb: page %q has the prefix %q: use http.StripPrefix on the whole", name, page.cfg.Prefix)
		}
		s.slow[name] = new(atomic.Bool)
	}
	return s, nil
}

// Close ends the open streams of all pages: see Handler.Close.
func (s *Several) Close() {
	for _, page := range s.pages {
		page.Close()
	}
}

// among is which of several pages a request is for.
type among struct {
	Name   string
	Others func() []string // that the viewer may see
}

type amongKey struct{}

// ServeHTTP serves the overview, and the page of each database.
func (s *Several) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, rest, below := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	first := s.pages[s.names[0]]
	switch page := s.pages[name]; {
	case r.URL.Path == "" || name == "static": // each page knows where to go then, and all have the same style and script
		first.ServeHTTP(w, r)
	case name == "" && !below:
		s.overview(w, r)
	case page == nil:
		http.NotFound(w, r)
	default:
		one := among{name, func() []string {
			names, _ := s.visible(r)
			return slices.DeleteFunc(names, func(n string) bool { return n == name })
		}}
		asked := r.WithContext(context.WithValue(r.Context(), amongKey{}, one))
		asked.URL = new(url.URL)
		*asked.URL = *r.URL
		asked.URL.Path, asked.URL.RawPath = "", ""
		if below {
			asked.URL.Path = "/" + rest
		}
		page.ServeHTTP(w, asked)
	}
}

// visible are the databases that somebody may see, and who that is.
func (s *Several) visible(r *http.Request) (names []string, viewer Viewer) {
	for _, name := range s.names {
		if v, err := s.pages[name].cfg.Viewer(r); err == nil && v.Name != "" {
			names, viewer = append(names, name), v
		}
	}
	return names, viewer
}

// How long the overview waits for a database, and for one that did not answer in time when it was last asked: what is read meanwhile
// comes with the next look. Figures that are older than fresh say that the database does not answer.
const (
	patience     = time.Second
	patienceSlow = 20 * time.Millisecond
	fresh        = 10 * time.Second
)

// site is a database on the overview.
type site struct {
	Name         string
	Known        bool // there are figures, at Read
	Lost         bool
	Read         time.Time
	Total        totals
	Rate         onceqops.Count
	Plot         plot
	Workers      int
	Errors, Warn int  // of Health
	Partly       bool // not all of Health is known yet
}

func (s *Several) overview(w http.ResponseWriter, r *http.Request) {
	secure(w.Header())
	names, viewer := s.visible(r)
	if len(names) == 0 {
		s.pages[s.names[0]].log.LogAttrs(r.Context(), slog.LevelWarn, "onceqweb: refused", slog.String("path", r.URL.Path))
		http.Error(w, "You may not see this page.", http.StatusForbidden)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "This page is only for reading.", http.StatusMethodNotAllowed)
		return
	}
	sites := make([]site, len(names))
	var reading sync.WaitGroup
	for i, name := range names {
		reading.Go(func() { sites[i] = s.look(r.Context(), name) })
	}
	reading.Wait()
	v := &view{Template: "several", Title: "All databases", Data: sites}
	write(w, r, s.pages[s.names[0]].log, &frame{view: v, App: s.title, Assets: assets, Viewer: viewer, Acts: true, Page: v.Template, Now: time.Now()})
}

// look reads what the overview shows of a database. One that does not answer is shown as it was.
func (s *Several) look(ctx context.Context, name string) (one site) {
	h, slow := s.pages[name], s.slow[name]
	wait := patience
	if slow.Load() {
		wait = patienceSlow
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	defer func() { slow.Store(ctx.Err() != nil) }()
	one.Name = name
	st, err := h.readState(ctx)
	good := h.good.Load()
	one.Known = good != nil
	one.Lost = err != nil && (ctx.Err() == nil || !one.Known || time.Since(good.read) > fresh)
	if !one.Known {
		return one
	}
	if st, one.Read = good.state, good.read; !one.Lost {
		found, err := h.readFindings(ctx)
		one.Partly = err != nil
		for _, f := range slices.Concat(found, st.findings()) {
			if f.Severe {
				one.Errors++
			} else {
				one.Warn++
			}
		}
	}
	minutes := make([]onceqops.Count, countedFor)
	for _, c := range st.Counted {
		for i := range min(len(minutes), len(c.Minutes)) {
			minutes[i].Add(c.Minutes[i])
		}
	}
	one.Total, one.Plot, one.Rate = st.total(), plotOf(minutes), onceqops.Counts{Minutes: minutes}.Last(rateOf)
	for _, worker := range st.Workers {
		if !worker.Stale {
			one.Workers++
		}
	}
	return one
}
