package onceqhttp_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

// The probes say what the worker says of itself.
func TestProbes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	work := onceq.Kind[int]{Name: "work"}
	ran := make(chan struct{})
	worker, err := onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, work.Handle(func(context.Context, *onceq.Lease, int) error {
		close(ran)
		return nil
	}))
	require.NoError(t, err)
	probes := onceqhttp.Probes(worker)
	ask := func(path string) (int, string) {
		answer := httptest.NewRecorder()
		probes.ServeHTTP(answer, httptest.NewRequest("GET", path, nil))
		return answer.Code, answer.Body.String()
	}
	code, says := ask("/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Contains(t, says, "does not run")
	code, says = ask("/livez")
	require.Equal(t, http.StatusOK, code, says)
	code, _ = ask("/")
	require.Equal(t, http.StatusNotFound, code)

	_, err = db.Queue.Enqueue(t.Context(), db.Pool, work.Job(1))
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	<-ran
	code, says = ask("/readyz")
	require.Equal(t, http.StatusOK, code, says)
	require.Equal(t, "ok\n", says)
	stop()
	require.NoError(t, <-ended)
	code, _ = ask("/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
}

// A server in a service answers what is under way when the service ends, and a service without its port ends.
func TestPart(t *testing.T) {
	t.Parallel()
	free, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	address := free.Addr().String()
	err = onceq.Serve(t.Context(), onceqhttp.Part(&http.Server{Addr: address, ReadHeaderTimeout: time.Minute}, 0))
	require.ErrorContains(t, err, "address already in use")

	ctx, stop := context.WithCancel(t.Context())
	bound := make(chan net.Addr, 1)
	server := &http.Server{
		Addr: "localhost:0", ReadHeaderTimeout: time.Minute,
		BaseContext: func(l net.Listener) context.Context { bound <- l.Addr(); return context.Background() },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			stop() // the service ends while the request is under way
			_, _ = w.Write([]byte("done"))
		}),
	}
	ended := make(chan error, 1)
	go func() { ended <- onceq.Serve(ctx, onceqhttp.Part(server, time.Minute)) }()
	answer, err := http.Get("http://" + (<-bound).String())
	require.NoError(t, err)
	body, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	require.Equal(t, "done", string(body))
	require.NoError(t, <-ended)
	require.NoError(t, free.Close())
}

// A server with a certificate serves TLS.
func TestPart_TLS(t *testing.T) {
	t.Parallel()
	lent := httptest.NewTLSServer(nil) // for its certificate
	defer lent.Close()
	bound := make(chan net.Addr, 1)
	server := &http.Server{
		Addr: "localhost:0", ReadHeaderTimeout: time.Minute, TLSConfig: &tls.Config{Certificates: lent.TLS.Certificates, MinVersion: tls.VersionTLS12},
		BaseContext: func(l net.Listener) context.Context { bound <- l.Addr(); return context.Background() },
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- onceq.Serve(ctx, onceqhttp.Part(server, time.Minute)) }()
	conn, err := tls.Dial("tcp", (<-bound).String(), &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}) // #nosec G402 -- a test
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	stop()
	require.NoError(t, <-ended)
}
