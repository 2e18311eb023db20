package onceqhttp_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

// away is an address that refuses connections: only the superuser could listen there, and nobody does.
const away = "127.0.0.1:1"

// send makes one request and discards the answer.
func send(ctx context.Context, c *http.Client, method, url string) error {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader("{}"))
	if err != nil {
		return err
	}
	resp, err := c.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// When a request fails before a byte was sent, its effect is known not to have happened. In all other cases nothing is
// known.
func TestTransport_ErrorsBeforeAByteWasSentApplyNothing(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ok := provider(t)
	go func() {
		for range ok.keys {
		}
	}()
	t.Cleanup(func() { close(ok.keys) })
	t.Cleanup(ok.Close)
	busy := provider(t)
	busy.status, busy.header = 429, http.Header{"Retry-After": {"1"}}
	busy.keys = make(chan string, 1000)
	secure := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { assert.Fail(t, "reached") }))
	secure.Config.ErrorLog = busy.Config.ErrorLog
	secure.StartTLS()
	t.Cleanup(secure.Close)
	const refused = "http://" + away

	client := func(dial func(ctx context.Context, network, addr string) (net.Conn, error)) *http.Client {
		base := &http.Transport{DialContext: dial}
		t.Cleanup(base.CloseIdleConnections)
		return &http.Client{Transport: &onceqhttp.Transport{Base: base}}
	}
	plain := client(nil)
	// A connection that fails at the first write or read.
	breaking := func(write bool) *http.Client {
		return client(func(context.Context, string, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			if write {
				return ours, theirs.Close()
			}
			go func() {
				_, _ = http.ReadRequest(bufio.NewReader(theirs))
				_ = theirs.Close()
			}()
			return ours, nil
		})
	}
	type run = func(ctx context.Context) error
	one := func(c *http.Client, method, url string) run {
		return func(ctx context.Context) error { return send(ctx, c, method, url) }
	}
	last := func(runs ...run) run {
		return func(ctx context.Context) (err error) {
			for _, r := range runs {
				err = r(ctx)
			}
			return err
		}
	}
	for name, c := range map[string]struct {
		run  run
		says string
		free bool // whether it is certain that nothing was applied
	}{
		"refused": {one(plain, "POST", refused), "refused", true},
		"no such name": {one(client((&net.Dialer{Resolver: &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
			return nil, errors.New("no name server")
		}}}).DialContext), "POST", "http://provider.example/"), "lookup", true},
		"no TLS with it":       {one(plain, "POST", secure.URL), "certificate", true},
		"no TLS there":         {one(plain, "POST", strings.Replace(ok.URL, "http", "https", 1)), "tls", true},
		"a proxy that is away": {one(&http.Client{Transport: &onceqhttp.Transport{Base: &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: away})}}}, "POST", ok.URL), "refused", true},
		"a look refused":       {one(plain, "GET", refused), "refused", true},
		"time is up": {func(ctx context.Context) error {
			ctx, cancel := context.WithCancel(ctx)
			return send(ctx, client(func(ctx context.Context, _, _ string) (net.Conn, error) {
				cancel()
				<-ctx.Done()
				return nil, ctx.Err()
			}), "POST", ok.URL)
		}, "canceled", true},
		"time was up before": {func(ctx context.Context) error {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return send(ctx, plain, "POST", ok.URL)
		}, "canceled", true},
		"cut off in writing": {one(breaking(true), "POST", ok.URL), "", false},
		"cut off in reading": {one(breaking(false), "POST", ok.URL), "", false},
		"a base that says nothing": {func(ctx context.Context) error {
			return send(ctx, &http.Client{Transport: &onceqhttp.Transport{Base: roundTripper(func(*http.Request) (*http.Response, error) {
				return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
			})}}, "POST", ok.URL)
		}, "refused", false},
		"refused after another":   {last(one(plain, "POST", ok.URL), one(plain, "POST", refused)), "refused", false},
		"refused twice":           {last(one(plain, "POST", refused), one(plain, "POST", refused)), "refused", true},
		"refused after a look":    {last(one(plain, "GET", ok.URL), one(plain, "POST", refused)), "refused", true},
		"a look refused after it": {last(one(plain, "POST", ok.URL), one(plain, "GET", refused)), "refused", false},
		"429":                     {one(plain, "POST", busy.URL), "429", true},
		"429 after another":       {last(one(plain, "POST", ok.URL), one(plain, "POST", busy.URL)), "429", false},
		"refused after 429":       {last(one(plain, "POST", busy.URL), one(plain, "POST", refused)), "refused", true},
		"refused while another waits": {func(ctx context.Context) error {
			entered, ctxOther := make(chan struct{}), ctx
			gone, cancel := context.WithCancel(ctxOther)
			ended := make(chan error, 1)
			go func() {
				ended <- send(gone, client(func(ctx context.Context, _, _ string) (net.Conn, error) {
					close(entered)
					<-ctx.Done()
					return nil, ctx.Err()
				}), "POST", ok.URL)
			}()
			<-entered
			err := send(ctx, plain, "POST", refused)
			cancel()
			<-ended
			return err
		}, "refused", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, where := range []string{"Once", "Do"} {
				var err error
				if where == "Do" {
					_, err = onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: name}, func(ctx context.Context, _ *onceq.FenceLease) (int, error) { return 1, c.run(ctx) })
				} else {
					_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "charge", Queue: name, Payload: 1})
					require.NoError(t, err)
					leases, claimErr := db.Queue.Claim(t.Context(), onceq.ClaimOptions{Queue: name, Limit: 1})
					require.NoError(t, claimErr)
					_, err = onceq.Once(t.Context(), leases[0], "charge", func(ctx context.Context, _ string) (int, error) { return 1, c.run(ctx) })
				}
				require.ErrorContains(t, err, c.says)
				require.Equal(t, !c.free, errors.Is(err, onceq.ErrUncertain), "%s: %v", where, err)
			}
		})
	}
}

// A reused connection is lost after the request was sent. net/http repeats a request that has a key, and this time the
// connection is refused. So the last error says that nothing was sent, although the first try may have been carried out.
func TestTransport_RefusedAtTheSecondTryIsUncertain(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	round := func(h2 bool) bool {
		got := newRuns()
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			assert.Equal(t, h2, r.ProtoMajor == 2)
			if got.next() == 2 {
				panic(http.ErrAbortHandler)
			}
		}))
		s.EnableHTTP2 = h2
		s.StartTLS()
		defer s.Close()
		reused := false
		base := s.Client().Transport.(*http.Transport)
		base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if got.count() > 0 {
				addr = away
			}
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
		_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: s.URL}, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
			c := &http.Client{Transport: &onceqhttp.Transport{Base: base}}
			if err := send(ctx, c, "GET", s.URL); err != nil {
				return 0, err
			}
			var first sync.Once
			return 1, send(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) {
				first.Do(func() { reused = c.Reused })
			}}), c, "POST", s.URL)
		})
		if !reused { // on a busy machine net/http may close the first request's connection
			return false
		}
		require.ErrorIs(t, err, onceq.ErrUncertain, "h2: %v", h2)
		if !h2 {
			require.ErrorContains(t, err, "refused", "the test's point")
		}
		require.Equal(t, 2, got.count())
		_, err = onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: s.URL + "/new"}, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
			base.CloseIdleConnections()
			return 1, send(ctx, &http.Client{Transport: &onceqhttp.Transport{Base: base}}, "POST", s.URL)
		})
		require.ErrorContains(t, err, "refused")
		require.NotErrorIs(t, err, onceq.ErrUncertain, "h2: %v", h2)
		return true
	}
	for _, h2 := range []bool{false, true} {
		for !round(h2) {
		}
	}
}

// The provider is out of reach for days, and the policy never runs an uncertain effect again.
func TestTransport_AJobOutlastsAnOutage(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	provider := newRuns()
	s := httptest.NewServer(provider.answering(200))
	defer s.Close()
	addr := away
	charge := onceq.Kind[int]{Name: "charge"}
	job, err := db.Queue.Enqueue(t.Context(), db.Pool, charge.Job(1))
	require.NoError(t, err)
	base := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}}
	defer base.CloseIdleConnections()
	client := &http.Client{Transport: &onceqhttp.Transport{Base: base}}
	handler := charge.Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		_, err := onceq.Once(ctx, l, "charge", func(ctx context.Context, _ string) (int, error) {
			return 1, send(ctx, client, "POST", "http://provider.example")
		}, onceq.OnUncertain(onceq.Hold()))
		return err
	})
	for range 3 {
		ran := db.RunOne(handler)
		require.Equal(t, onceq.StateRetrying, ran.State, ran.Err)
		db.Advance(30 * time.Hour)
	}
	info, err := db.Queue.Get(t.Context(), db.Pool, job.ID)
	require.NoError(t, err)
	require.Equal(t, 3, info.Attempts, "an error like others")

	addr = s.Listener.Addr().String()
	ran := db.RunOne(handler)
	require.Equal(t, onceq.StateCompleted, ran.State, ran.Err)
	require.Equal(t, 1, provider.count())
}

// An error still says whether it is a time-out.
func TestTransport_TimeoutsStayTimeouts(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	_, err := onceq.Do(t.Context(), db.Queue, onceq.FenceSpec{Key: "k"}, func(ctx context.Context, _ *onceq.FenceLease) (int, error) {
		return 1, send(ctx, &http.Client{Transport: &onceqhttp.Transport{Base: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: context.DeadlineExceeded}
		}}}}, "POST", "http://provider.example")
	})
	require.NotErrorIs(t, err, onceq.ErrUncertain)
	var wrapped *url.Error
	require.ErrorAs(t, err, &wrapped)
	require.True(t, wrapped.Timeout())
}
