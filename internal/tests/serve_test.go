package tests

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// The goroutine that os/signal begins with the first Notify and never ends is not of a test.
func init() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM)
	signal.Stop(c)
}

// partFunc is a part of a service.
type partFunc func(ctx context.Context) error

func (f partFunc) Run(ctx context.Context) error { return f(ctx) }

// A signal ends all parts, and their errors come back. This test is the only one that signals its process.
func TestServe_ASignalEndsAllParts(t *testing.T) {
	db := queuetest.New(t)
	ran := make(chan struct{})
	work := onceq.Kind[int]{Name: "work"}
	worker := must[*onceq.Worker](t)(onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, work.Handle(func(context.Context, *onceq.Lease, int) error {
		close(ran)
		return nil
	})))
	reaper := must[*onceq.Reaper](t)(onceq.NewReaper(db.Queue, onceq.ReaperConfig{}))
	must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), db.Pool, work.Job(1)))
	flush := errors.New("the last lines are lost")
	served := make(chan error, 1)
	go func() {
		served <- onceq.Serve(t.Context(), worker, reaper, partFunc(func(ctx context.Context) error {
			<-ctx.Done()
			return flush
		}))
	}()
	<-ran
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	err := <-served
	require.ErrorIs(t, err, flush)
	require.EqualError(t, err, flush.Error(), "the worker and the Reaper ended well")
}

// A part that ends by itself, with an error or without, ends the others.
func TestServe_APartEndsByItself(t *testing.T) {
	t.Parallel()
	waits := partFunc(func(ctx context.Context) error {
		<-ctx.Done()
		return nil
	})
	broken := errors.New("address already in use")
	err := onceq.Serve(t.Context(), waits, partFunc(func(context.Context) error { return broken }), waits)
	require.ErrorIs(t, err, broken)
	err = onceq.Serve(t.Context(), waits, partFunc(func(context.Context) error { return nil }))
	require.EqualError(t, err, "onceq: Serve: a tests.partFunc has ended by itself")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, onceq.Serve(ctx, waits, waits), "the end of the context is no error")
	require.ErrorAs(t, onceq.Serve(t.Context()), new(*onceq.InvalidError))
}

// A worker is ready while what it asks of the database is answered, and not before Run, nor when it ends.
func TestReady(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	work := onceq.Kind[int]{Name: "work"}
	running, release := make(chan struct{}), make(chan struct{})
	worker := must[*onceq.Worker](t)(onceq.NewWorker(db.Queue, onceq.WorkerConfig{}, work.Handle(func(context.Context, *onceq.Lease, int) error {
		close(running)
		<-release
		return nil
	})))
	require.ErrorContains(t, worker.Ready(), "does not run")
	require.NoError(t, worker.Alive())
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	ready := func() bool { return worker.Ready() == nil }
	unready := func() bool { return worker.Ready() != nil }
	require.Eventually(t, ready, patience, time.Millisecond)

	sqlRun(t, asOwner(t, db), `alter table jobs rename to away`)
	require.Eventually(t, unready, patience, time.Millisecond)
	require.ErrorContains(t, worker.Ready(), "lacks a table")
	require.NoError(t, worker.Alive(), "a restart would not help")
	sqlRun(t, asOwner(t, db), `alter table away rename to jobs`)
	require.Eventually(t, ready, patience, time.Millisecond)

	must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), db.Pool, work.Job(1)))
	<-running
	stop()
	require.Eventually(t, unready, patience, time.Millisecond)
	require.ErrorContains(t, worker.Ready(), "shutting down")
	close(release)
	require.NoError(t, <-ended)
	require.ErrorContains(t, worker.Ready(), "does not run")
}

// A worker is not alive while a handler ignores the end of its context, a lease after that.
func TestAlive_AHandlerThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	release := make(chan struct{})
	work := onceq.Kind[int]{Name: "work", Timeout: time.Millisecond, MaxAttempts: 1}
	worker := must[*onceq.Worker](t)(onceq.NewWorker(db.Queue, onceq.WorkerConfig{Lease: time.Second}, work.Handle(func(context.Context, *onceq.Lease, int) error {
		<-release
		return nil
	})))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	must[onceq.Result](t)(db.Queue.Enqueue(t.Context(), db.Pool, work.Job(1)))
	require.Eventually(t, func() bool { return worker.Alive() != nil }, patience, time.Millisecond)
	require.ErrorContains(t, worker.Alive(), `kind "work"`)
	require.NoError(t, worker.Ready(), "it has other slots")
	close(release)
	require.Eventually(t, func() bool { return worker.Alive() == nil }, patience, time.Millisecond)
	stop()
	require.NoError(t, <-ended)
}
