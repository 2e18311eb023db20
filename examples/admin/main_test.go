package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Each command does what docs/runbook.md says.
func TestAdmin(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	bin := filepath.Join(t.TempDir(), "admin")
	out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	admin := func(args ...string) string {
		cmd := exec.Command(bin, args...)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+db.URL)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%v: %s", args, out)
		return string(out)
	}
	kind := onceq.Kind[string]{Name: "mail"}
	enqueue := func(what string) string {
		r, err := db.Queue.Enqueue(t.Context(), db.Pool, kind.Job(what))
		require.NoError(t, err)
		return strconv.FormatInt(r.ID, 10)
	}
	dead, held, waiting := enqueue("dead"), enqueue("held"), enqueue("later")
	require.Equal(t, "cancelled\n", admin("cancel", waiting))
	wire := func(ctx context.Context, l *onceq.Lease) error {
		_, err := onceq.Once(ctx, l, "wire", func(context.Context, string) (int, error) { return 0, errors.New("time-out") }, onceq.OnUncertain(onceq.Hold()))
		return err
	}
	bad := true
	handler := kind.Handle(func(ctx context.Context, l *onceq.Lease, what string) error {
		if what == "held" {
			return wire(ctx, l)
		} else if bad {
			return onceq.Fatal(errors.New("no such address"))
		}
		return nil
	})
	db.Drain(handler)
	require.Contains(t, admin("show", held), "uncertain")
	require.Equal(t, "retrying\n", admin("retry", held))
	db.Drain(handler)
	require.Contains(t, admin("dead"), dead+" default mail dead")
	require.Contains(t, admin("held"), held+" default mail held")
	require.Contains(t, admin("stats"), "1 dead, 1 held")
	require.Contains(t, admin("show", dead), "no such address")
	require.Contains(t, admin("show", held), "effect wire: held")
	admin("running")
	admin("health")
	bad = false
	require.Contains(t, admin("redrive-all", "mail"), "1 run again")
	admin("applied", held, "wire")
	db.Drain(handler)
	require.Equal(t, "no jobs are dead\nno jobs are held\n", admin("dead")+admin("held"))

	for range 2 {
		enqueue("held")
	}
	db.Drain(handler)
	db.Advance(time.Hour)
	db.Drain(handler)
	require.Contains(t, admin("stats"), "2 held")
	require.Equal(t, "2 effects settled, 2 jobs run again\n", admin("applied-all", "mail", "wire"))
	db.Drain(handler)
	require.Equal(t, "no jobs are held\n", admin("held"))

	bad = true
	dead = enqueue("dead")
	db.Drain(handler)
	require.Equal(t, "waiting\n", admin("redrive", dead))
	db.Drain(handler)
	admin("discard", dead)
	require.Equal(t, "no jobs are dead\n", admin("dead"))
}
