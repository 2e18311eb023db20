package onceqhttp

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/onceq/onceq"
)

// Probes answers the probes of an orchestrator for the workers of this process: GET /readyz with
// Worker.Ready, GET /livez with Worker.Alive. The answer is 200 and "ok", or 503 and what is wrong with the
// first worker that has something, in words, as plain text. The words may name queues, kinds and the
// database's errors, so keep the port inside the cluster.
func Probes(workers ...*onceq.Worker) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /readyz", probe(workers, (*onceq.Worker).Ready))
	mux.Handle("GET /livez", probe(workers, (*onceq.Worker).Alive))
	return mux
}

func probe(workers []*onceq.Worker, ask func(*onceq.Worker) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		for _, worker := range workers {
			if err := ask(worker); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
		}
		_, _ = w.Write([]byte("ok\n"))
	})
}

// Part makes an http.Server a part of onceq.Serve. When the service ends, the server takes no further
// connections and lets requests that are under way finish for up to patience; 0 stands for 20 seconds. A
// server whose address is taken ends the service with an error. With a TLSConfig, which has the
// certificates, the server serves TLS.
func Part(server *http.Server, patience time.Duration) onceq.Part {
	if patience == 0 {
		patience = 20 * time.Second
	}
	return served{server, patience}
}

type served struct {
	server   *http.Server
	patience time.Duration
}

func (p served) Run(ctx context.Context) error {
	listener, err := net.Listen("tcp", p.server.Addr)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		if p.server.TLSConfig != nil {
			ended <- p.server.ServeTLS(listener, "", "")
		} else {
			ended <- p.server.Serve(listener)
		}
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.patience)
	defer cancel()
	if err := p.server.Shutdown(ending); err != nil {
		return errors.Join(err, p.server.Close())
	}
	return nil
}
