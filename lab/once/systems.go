package main

import (
	"context"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
)

// system is a column of the table.
type system struct {
	name    string                             // of its column: make once ONLY='story/name'
	ready   func() (version string, err error) // the error says why it cannot run here
	how     string                             // its adapter uses it, for the table
	redis   bool                               // it needs one
	command func() (*exec.Cmd, error)          // a process of its adapter

	// notes has a sentence for each story that the system's documentation leaves to the application, or that needs a word. A count
	// that is not right is a failure only without one.
	notes map[string]string
}

// These environment variables tell a process what it is: the name of a Go adapter, the database, and the socket of Redis.
const (
	envAdapter = "ONCEQ_ONCE_ADAPTER"
	envURL     = "ONCEQ_ONCE_DATABASE_URL"
	envRedis   = "ONCEQ_ONCE_REDIS"
)

// goAdapters are those that are written in Go, by their systems' names.
var goAdapters = map[string]func(*pgxpool.Pool) (adapter, error){
	"onceq":   newOnceq,
	"River":   newRiver,
	"by hand": newHand,
}

// rescued is what River's documentation says of RescueStuckJobsAfter.
const rescued = "its documentation says that a job which still works when it is rescued may run twice; `JobTimeout` ends the context of most handlers before"

// idempotent is what most queues ask of their users.
const idempotent = "its documentation asks for handlers that may run more than once"

func systems() []*system {
	return []*system{
		{
			name: "onceq", ready: ownVersion, command: goCommand("onceq"),
			how: "`HandleTx` and `Once`, with a lease of 2 s in place of 30 and calls of 1 s in place of 30",
			notes: map[string]string{
				"changed-while-it-runs": "the caller is told that it is a duplicate of a running job; the handler has to look again before it completes ([cookbook](cookbook.md#wait-until-changes-stop-coming))",
			},
		},
		{
			name: "River", ready: moduleVersion("github.com/riverqueue/river"), command: goCommand("River"),
			how: "unique jobs, and `JobCompleteTx` in the handler's transaction; finished rows are kept",
			notes: map[string]string{
				"asked-after-a-month":                     "the key is taken because finished rows are kept for ever",
				"changed-while-it-runs":                   "the caller is told that it is a duplicate of a running job",
				"fails-after-its-call":                    idempotent,
				"killed-in-a-call-that-nobody-recognises": idempotent,
				"no-answer-to-a-call":                     idempotent,
				"commits-behind-the-queue":                "the handler's transaction is the application's own",
				"wakes-while-another-runs":                rescued,
				"wakes-when-another-is-done":              rescued,
				"writes-after-it-woke":                    rescued,
				"old-worker-in-a-deploy":                  "`FetchOnlyKnownKinds`, which is off by default, would leave the job alone",
				"slow-but-alive":                          "by a `Timeout` above the handler's time; a crash is found no earlier than that",
			},
		},
		{
			name: "by hand", ready: moduleVersion("github.com/jackc/pgx/v5"), command: goCommand("by hand"),
			how: "one transaction selects a job `for update skip locked`, has the handler's writes, and deletes the job; the key has a unique index",
			notes: map[string]string{
				"changed-while-it-runs":                   "the caller is told that it is a duplicate",
				"asked-after-the-end":                     "the key goes with its row",
				"asked-after-a-month":                     "the key goes with its row",
				"fails-after-its-call":                    "nobody claims otherwise",
				"killed-in-a-call-that-nobody-recognises": "nobody claims otherwise",
				"no-answer-to-a-call":                     "nobody claims otherwise",
			},
		},
	}
}

// goCommand is this program as a process of an adapter.
func goCommand(name string) func() (*exec.Cmd, error) {
	return func() (*exec.Cmd, error) {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), envAdapter+"="+name)
		return cmd, nil
	}
}

// serveAdapter is the process of a Go adapter.
func serveAdapter(name string) error {
	ctx := context.Background()
	cfg, err := pgxpool.ParseConfig(os.Getenv(envURL))
	if err != nil {
		return err
	}
	cfg.MaxConns = 10
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	a, err := goAdapters[name](pool)
	if err != nil {
		return err
	}
	return serve(ctx, a, pool, os.Stdin, os.Stdout)
}

// moduleVersion gives the version of a dependency that this program was built with.
func moduleVersion(path string) func() (string, error) {
	return func() (string, error) {
		if info, ok := debug.ReadBuildInfo(); ok {
			for _, m := range info.Deps {
				if m.Path == path {
					return m.Version, nil
				}
			}
		}
		return "unknown", nil
	}
}

// ownVersion is the commit that this program was built from.
func ownVersion() (string, error) {
	out, err := exec.Command("git", "rev-parse", "--short=9", "HEAD").Output()
	return "at " + strings.TrimSpace(string(out)), err
}
