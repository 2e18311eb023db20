package onceqweb

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

// cache reads something at most once in a while for each key, however many ask. Those who come while it is read wait for the
// same answer. It does not end when one of them leaves. Afterwards nothing of it stays.
type cache[K comparable, V any] struct {
	mu    sync.Mutex
	m     map[K]*cached[V]
	bytes int         // of all answers
	size  func(V) int // of an answer, about; nil for those of which there is one
}

type cached[V any] struct {
	began time.Time
	ready chan struct{} // closed when the rest is there
	value V
	err   error
	bytes int
}

// What a cache may hold. When there is more, all of it is forgotten but what was read last. An answer that is larger by itself is not
// kept: those who wait for it get it.
const (
	maxCached      = 200
	maxCachedBytes = 8 << 20
)

func (c *cache[K, V]) get(ctx context.Context, h *Handler, key K, every time.Duration, load func(context.Context) (V, error)) (V, error) {
	c.mu.Lock()
	e := c.m[key]
	if e == nil {
		if c.m == nil || len(c.m) >= maxCached {
			c.m, c.bytes = make(map[K]*cached[V]), 0
		}
		e = &cached[V]{ready: make(chan struct{}), began: time.Now()}
		c.m[key] = e
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.limits.read)
		go func() {
			defer cancel()
			defer close(e.ready)
			e.err = h.reading(ctx, func() (err error) { e.value, err = load(ctx); return err })
			e.err = h.hide(e.err)
			c.keep(key, e, every)
		}()
	}
	c.mu.Unlock()
	select {
	case <-e.ready:
		return e.value, e.err
	case <-ctx.Done():
		var none V
		return none, ctx.Err()
	}
}

// keep keeps an answer until it is time to read again. What is slow to read is read for a fifth of the time at most.
func (c *cache[K, V]) keep(key K, e *cached[V], every time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	took := time.Since(e.began)
	if e.err == nil {
		every = max(every, 5*took)
	}
	if c.m[key] != e { // forgotten meanwhile
		return
	}
	if c.size != nil && e.err == nil {
		e.bytes = c.size(e.value)
	}
	if e.bytes > maxCachedBytes {
		delete(c.m, key)
		return
	}
	if c.bytes += e.bytes; c.bytes > maxCachedBytes {
		c.m, c.bytes = map[K]*cached[V]{key: e}, e.bytes
	}
	ready := e.ready // the timer keeps no answer that is forgotten before
	time.AfterFunc(every-took, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if now := c.m[key]; now != nil && now.ready == ready {
			delete(c.m, key)
			c.bytes -= now.bytes
		}
	})
}

// reading runs what a page reads by itself.
func (h *Handler) reading(ctx context.Context, read func() error) error {
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
		return read()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// forget makes the next one who asks read again.
func (c *cache[K, V]) forget() {
	c.mu.Lock()
	c.m, c.bytes = nil, 0
	c.mu.Unlock()
}

func (h *Handler) forget() {
	h.state.forget()
	h.lists.forget()
	h.jobs.forget()
	h.doubts.forget()
	h.schedules.forget()
	h.failed.forget()
	h.changes.forget()
}

// state is what the overview shows.
type state struct {
	At      time.Time // the database's time
	Queues  []onceqops.QueueStats
	Workers []onceqops.WorkerInfo
	Pauses  []onceq.Pause

	Counted   map[string]onceqops.Counts // by queue: what workers have counted
	CountedAt time.Time
}

// countsEvery is how often what workers write once a minute is read, and countedFor how many minutes of it.
const (
	countsEvery = 10 * time.Second
	countedFor  = 30
)

func (h *Handler) readCounts(ctx context.Context, s *state) error {
	if good := h.good.Load(); good != nil && s.At.Sub(good.state.CountedAt) < countsEvery {
		s.Counted, s.CountedAt = good.state.Counted, good.state.CountedAt
		return nil
	}
	list, err := h.ops.Counts(ctx, h.db, onceqops.CountFilter{Minutes: countedFor})
	s.Counted, s.CountedAt = make(map[string]onceqops.Counts, len(list)), s.At
	for _, c := range list {
		s.Counted[c.Queue] = c
	}
	return err
}

// paused reports whether a queue is paused.
func (s *state) paused(queue string) bool {
	return slices.ContainsFunc(s.Pauses, func(p onceq.Pause) bool { return p.Queue == queue })
}

// working counts the living workers of a queue.
func (s *state) working(queue string) (n int) {
	for _, w := range s.Workers {
		if _, serves := w.Queues[queue]; serves && !w.Stale {
			n++
		}
	}
	return n
}

// findings are what Health leaves to people: queues whose workers are gone, workers of another version, and dead jobs. A worker that is
// gone is no trouble where others serve its queues. They come from what was
// read for the figures, and cost no statement.
func (s *state) findings() (found []onceqops.Finding) {
	add := func(what, queue, detail, advice string) {
		found = append(found, onceqops.Finding{What: what, Queue: queue, Detail: detail, Advice: advice})
	}
	live := 0
	var other []string
	last := make(map[string]onceqops.WorkerInfo) // by queue that no live worker serves: the one that was seen last
	for _, w := range s.Workers {
		switch {
		case w.Stale:
			for queue := range w.Queues {
				if s.working(queue) == 0 && w.Seen.After(last[queue].Seen) {
					last[queue] = w
				}
			}
			continue
		case w.Schema != onceq.SchemaVersion:
			other = append(other, fmt.Sprintf("%s (%d)", w.Where(), w.Schema))
		}
		live++
	}
	if len(s.Queues) > 0 && live == 0 {
		add("worker", "", "no worker is there"+map[bool]string{true: " but those that were not seen for three minutes"}[len(s.Workers) > 0], "start one")
	}
	unserved := slices.Sorted(maps.Keys(last))
	for _, queue := range unserved[:min(len(unserved), maxFound)] {
		w := last[queue]
		add("worker", queue, fmt.Sprintf("no live worker serves queue %q; the last one, %s, has not been seen since %s UTC", queue, w.Where(), clock(w.Seen)),
			"it was killed, is frozen, or has lost the database: look at what it logged last, and start a worker for the queue")
	}
	if len(unserved) > maxFound {
		add("worker", "", fmt.Sprintf("other queues whose workers were all not seen for three minutes or more: %d", len(unserved)-maxFound), "start workers for them")
	}
	if len(other) > 0 {
		add("worker", "", fmt.Sprintf("these workers know another version of the tables than this page, which knows %d: %s", onceq.SchemaVersion, some(other)), "finish the deploy")
	}
	queues := 0
	for _, q := range s.Queues {
		if q.Dead == 0 {
			continue
		}
		if queues++; queues <= maxFound {
			add("dead", q.Queue, fmt.Sprintf("queue %q has dead jobs: %s", q.Queue, count(q.Dead)), "the page of each job says why it died; redrive them when the cause is mended, or discard them")
		}
	}
	if queues > maxFound {
		add("dead", "", fmt.Sprintf("other queues have dead jobs: %d", queues-maxFound), "the list of queues has all")
	}
	return found
}

// few is how many of a list a finding names, and maxFound how many findings there are of a sort.
const (
	few      = 5
	maxFound = 50
)

// some are the first few names of a list.
func some(names []string) string {
	text := strings.Join(names[:min(len(names), few)], ", ")
	if more := len(names) - few; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// names are the names of queues and kinds that are known, at most some hundred.
func (s *state) names() (queues, kinds []string) {
	const most = 300
	for _, q := range s.Queues {
		queues = append(queues, q.Queue)
	}
	for _, w := range s.Workers {
		kinds = append(kinds, w.Kinds...)
	}
	slices.Sort(kinds)
	kinds = slices.Compact(kinds)
	return queues[:min(len(queues), most)], kinds[:min(len(kinds), most)]
}

// goodState is the last state that could be read.
type goodState struct {
	state state
	read  time.Time // by this process's clock
}

func (h *Handler) readState(ctx context.Context) (state, error) {
	return h.state.get(ctx, h, struct{}{}, h.limits.state, func(ctx context.Context) (s state, err error) {
		if err = h.db.QueryRow(ctx, `select statement_timestamp()`).Scan(&s.At); err != nil {
			return s, err
		}
		h.offset.Store(int64(time.Until(s.At)))
		if s.Workers, err = h.ops.Workers(ctx, h.db); err != nil {
			return s, err
		}
		if s.Pauses, err = h.ops.Pauses(ctx, h.db); err != nil {
			return s, err
		}
		if err = h.readCounts(ctx, &s); err != nil {
			return s, err
		}
		if s.Queues, err = h.ops.Stats(ctx); err == nil {
			h.good.Store(&goodState{s, time.Now()})
		}
		return s, err
	})
}

// latest is the state. If it cannot be read, or failed says that something else could not, it is the last one that was, and behind says
// how old that is.
func (h *Handler) latest(ctx context.Context, failed func() error) (st state, behind string, err error) {
	st, err = h.readState(ctx)
	if failed != nil {
		if other := failed(); err == nil {
			err = other // a connection that was cut may be the other's alone
		}
	}
	if err == nil {
		return st, "", nil
	}
	good := h.good.Load()
	if good == nil {
		return st, "", err
	}
	return good.state, fmt.Sprintf("The database does not answer. These figures are %s old. The page goes on by itself when the database is back. %s",
		age(time.Since(good.read)), sentence(h.hide(err).Error())), nil
}

func (h *Handler) readFindings(ctx context.Context) ([]onceqops.Finding, error) {
	return h.findings.get(ctx, h, struct{}{}, healthEvery, func(ctx context.Context) ([]onceqops.Finding, error) {
		st, _ := h.readState(ctx) // without it, Health finds out what is wrong
		found, err := h.ops.Health(ctx, st.Queues...)
		if err != nil {
			return found, err
		}
		schedules, err := h.cron.Health(ctx, h.db)
		for _, f := range schedules {
			found = append(found, f.Finding)
		}
		return found, err
	})
}

// hub tells open pages when what they show has changed. One goroutine looks, while there is a page.
type hub struct {
	h       *Handler
	mu      sync.Mutex
	subs    map[*sub]bool
	looking bool
	came    int // pages until now
	closed  chan struct{}
	once    sync.Once
}

// sub is an open page.
type sub struct {
	viewer string
	topic  string // "overview", "effects", or a job's id
	job    int64
	told   uint64 // the sum of what it shows; only the looking goroutine changes it
	ch     chan struct{}
	ended  chan struct{} // closed when its place goes to another page
	place  int           // in the order in which pages came
}

const (
	maxSubs    = 500
	maxJobSubs = 100
)

func (b *hub) init(h *Handler) {
	b.h, b.subs, b.closed = h, make(map[*sub]bool), make(chan struct{})
}

func (b *hub) close() { b.once.Do(func() { close(b.closed) }) }

// add counts a page in. If there are too many, a viewer who has fewer pages than another gets a place of that one's, so that nobody
// takes them all, and otherwise the place of the viewer's own oldest page: one name may stand for many readers. It returns false for a
// viewer who has no page if nobody has two.
func (b *hub) add(s *sub) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.subs) >= maxSubs && !b.displace(s, false) {
		return false
	}
	if s.job != 0 && b.jobs() >= maxJobSubs && !b.displace(s, true) {
		return false
	}
	b.came++
	s.place, b.subs[s] = b.came, true
	if !b.looking {
		b.looking = true
		go b.look()
	}
	return true
}

// jobs counts the pages of single jobs.
func (b *hub) jobs() (n int) {
	for s := range b.subs {
		if s.job != 0 {
			n++
		}
	}
	return n
}

// displace ends the oldest page of the viewer who has most of them, if that one has more than s's viewer will have, or else of s's
// viewer: of all pages, or of those of single jobs.
func (b *hub) displace(s *sub, ofJobs bool) bool {
	n, oldest, most := make(map[string]int), make(map[string]*sub), s.viewer
	for other := range b.subs {
		if ofJobs && other.job == 0 {
			continue
		}
		if n[other.viewer]++; oldest[other.viewer] == nil || other.place < oldest[other.viewer].place {
			oldest[other.viewer] = other
		}
	}
	for viewer := range n {
		if n[viewer] > max(n[most], n[s.viewer]+1) {
			most = viewer
		}
	}
	end := oldest[most]
	if end == nil {
		return false
	}
	delete(b.subs, end)
	close(end.ended)
	return true
}

func (b *hub) remove(s *sub) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.subs, s)
}

// look looks at the database every two seconds on behalf of all open pages, and ends when there is none.
func (b *hub) look() {
	tick := time.NewTicker(refresh)
	defer tick.Stop()
	for {
		b.mu.Lock()
		subs := make([]*sub, 0, len(b.subs))
		for s := range b.subs {
			subs = append(subs, s)
		}
		if len(subs) == 0 {
			b.looking = false
			b.mu.Unlock()
			return
		}
		b.mu.Unlock()
		b.tell(subs)
		select {
		case <-tick.C:
		case <-b.closed:
			b.mu.Lock()
			b.looking = false
			b.mu.Unlock()
			return
		}
	}
}

// tell wakes the pages whose content has changed: two statements for all of them.
func (b *hub) tell(subs []*sub) {
	ctx, cancel := context.WithTimeout(context.Background(), b.h.limits.read)
	defer cancel()
	st, err := b.h.readState(ctx)
	now := st.sums(err != nil)
	var ids []int64
	for _, s := range subs {
		if s.job != 0 {
			ids = append(ids, s.job)
			now[s.topic] = sum("", err != nil)
		}
	}
	if len(ids) > 0 && err == nil {
		list, err := b.h.ops.List(ctx, b.h.db, onceqops.Filter{IDs: ids, Limit: maxJobSubs, WithoutPayloads: true})
		for _, j := range list {
			now[strconv.FormatInt(j.ID, 10)] = jobSum(j)
		}
		if err != nil {
			return
		}
	}
	for _, s := range subs {
		if now[s.topic] != s.told {
			s.told = now[s.topic]
			select {
			case s.ch <- struct{}{}:
			default:
			}
		}
	}
}

// sums are the sums of what the pages of each topic show.
func (s *state) sums(failed bool) map[string]uint64 {
	var held, all strings.Builder
	for _, q := range s.Queues {
		_, _ = fmt.Fprintf(&held, "%s %d %d;", q.Queue, q.Held, q.Dead)
		q.Oldest = q.Oldest.Round(time.Second)
		_, _ = fmt.Fprintf(&all, "%+v %v;", q, s.Counted[q.Queue].Last(1))
	}
	for _, w := range s.Workers {
		_, _ = fmt.Fprintf(&all, "%d %v %s;", w.ID, w.Stale, w.Trouble())
	}
	_, _ = fmt.Fprintf(&all, "%+v", s.Pauses)
	return map[string]uint64{"overview": sum(all.String(), failed), "effects": sum(held.String(), failed)}
}

// jobSum is over what every reader sees of a job, and over nothing else: whoever knows the rest could try payloads, and what Mask
// hides, until the sum is right. A payload that was replaced is on the page after the next reload.
func jobSum(j onceq.JobInfo) uint64 {
	text := fmt.Sprint(j.State, j.Queue, j.Priority, j.Attempts, j.MaxAttempts, j.Lost, j.Claims, j.Lane, j.Limit, j.WaitsFor, len(j.Errors),
		j.RunAt.UnixMicro(), j.LeasedUntil.UnixMicro(), j.FinishedAt.UnixMicro(), j.KeepUntil.UnixMicro())
	if p := j.Progress; p != nil {
		text += fmt.Sprint(p.Done, p.Total, p.At.UnixMicro())
	}
	return sum(text, false)
}

func sum(text string, failed bool) uint64 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(text))
	if failed {
		_, _ = hash.Write([]byte("!"))
	}
	return hash.Sum64()
}

// serve is the stream of one page: an event for each change. The page then reads itself again.
func (b *hub) serve(w http.ResponseWriter, r *request) {
	s := &sub{viewer: r.viewer.Name, topic: r.URL.Query().Get("of"), ch: make(chan struct{}, 1), ended: make(chan struct{})}
	s.told, _ = strconv.ParseUint(r.URL.Query().Get("v"), 10, 64)
	switch s.topic {
	case "overview", "effects":
	default:
		id, err := strconv.ParseInt(s.topic, 10, 64)
		if err != nil || id <= 0 {
			http.Error(w, "onceqweb: of is overview, effects or the id of a job", http.StatusBadRequest)
			return
		}
		s.job, s.topic = id, strconv.FormatInt(id, 10)
	}
	control := http.NewResponseController(w)
	send := func(text string) bool {
		_ = control.SetWriteDeadline(time.Now().Add(10 * time.Second)) // not every server has one
		if _, err := w.Write([]byte(text)); err != nil {
			return false
		}
		return control.Flush() == nil
	}
	select {
	case <-b.closed:
		http.Error(w, "onceqweb: the server shuts down", http.StatusServiceUnavailable)
		return
	default:
	}
	if !b.add(s) {
		http.Error(w, "onceqweb: too many open pages for live updates", http.StatusServiceUnavailable)
		return
	}
	defer b.remove(s)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	if !send("retry: 3000\n\n") {
		return
	}
	end, alive := time.NewTimer(b.h.limits.stream), time.NewTicker(15*time.Second)
	defer end.Stop()
	defer alive.Stop()
	for {
		ok := true
		select {
		case <-s.ch:
			ok = send("event: change\ndata: 1\n\n")
		case <-alive.C:
			ok = send(": alive\n\n")
		case <-r.Context().Done():
			return
		case <-end.C:
			return
		case <-s.ended:
			return
		case <-b.closed:
			return
		}
		if !ok {
			return
		}
	}
}
