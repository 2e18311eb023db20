package onceq

import (
	"errors"
	"fmt"
	"time"
)

// Ready returns nil while the worker takes jobs: Run has found the database and tables that fit this code,
// is not shutting down, and what the worker last asked of the database was answered. Otherwise the error
// says what is missing. Ready sends nothing, so it may be called often; a database that is lost shows after
// some five seconds. onceqhttp.Probes answers readiness probes with it.
func (w *Worker) Ready() error {
	r := w.now.Load()
	switch {
	case r == nil:
		return errors.New("onceq: the worker does not run: it has not reached the database yet, or has ended")
	case r.exec.stopping.Load():
		return errors.New("onceq: the worker is shutting down")
	}
	found := w.q.troubles.findings(func(k troubleKey) bool {
		return k.owner == r.id && (k.work == workClaim || k.work == workLook || k.work == workFinish)
	})
	if len(found) > 0 {
		return fmt.Errorf("onceq: %s", found[0].Detail)
	}
	return nil
}

// Alive returns nil unless a restart of the process would help: a handler has not returned for a lease
// since its context ended, and holds its slot, or the worker's loop should have gone on 30 seconds ago. A
// database that is lost is no such reason, nor is a worker that does not run, or shuts down.
// onceqhttp.Probes answers liveness probes with it.
func (w *Worker) Alive() error {
	r := w.now.Load()
	if r == nil || r.exec.stopping.Load() {
		return nil
	}
	if stuck := r.tasks.stuck(); len(stuck) > 0 {
		return fmt.Errorf("onceq: %s", WorkerInfo{Stuck: stuck}.Trouble())
	}
	if next := r.claimer.next.Load(); next != nil && time.Since(*next) > 30*time.Second {
		return fmt.Errorf("onceq: the worker's loop should have gone on at %s and stands still", stamp(*next))
	}
	return nil
}
