package main

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/lab/peers"
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

// envSQL names a folder with the SQL of the systems that are SQL, and in no package: pgmq-VERSION.sql, absurd-VERSION.sql.
const envSQL = "ONCEQ_ONCE_SQL"

// errNoSQL says that such a system is not here. Its column then stays as the page has it.
var errNoSQL = errors.New("the folder that " + envSQL + " names does not have its SQL")

// sqlFile gives the file of a system in that folder.
func sqlFile(system string) (file, version string, err error) {
	files, err := filepath.Glob(filepath.Join(os.Getenv(envSQL), system+"-*.sql"))
	if err != nil || os.Getenv(envSQL) == "" || len(files) != 1 {
		return "", "", fmt.Errorf("no %s-VERSION.sql: %w", system, errNoSQL)
	}
	version = strings.TrimSuffix(strings.TrimPrefix(filepath.Base(files[0]), system+"-"), ".sql")
	return files[0], version, nil
}

// goAdapters are those that are written in Go, by their systems' names.
var goAdapters = map[string]func(*pgxpool.Pool) (adapter, error){
	"onceq":   newOnceq,
	"River":   newRiver,
	"by hand": newHand,
	"asynq":   newAsynq,
	"DBOS":    newDBOS,
	"pgmq":    newPgmq,
}

//go:embed node
var nodeFiles embed.FS

// node has the packages of the adapters in Node. npm fetches them once.
var node = sync.OnceValues(func() (*peers.Node, error) {
	files, err := fs.Sub(nodeFiles, "node")
	if err != nil {
		return nil, err
	}
	return peers.InstallNode(context.Background(), "once", files)
})

// rescued is what River's documentation says of RescueStuckJobsAfter.
const rescued = "its documentation says that a job which still works when it is rescued may run twice; `JobTimeout` ends the context of most handlers before"

// idempotent is what most queues ask of their users.
const idempotent = "its documentation asks for handlers that may run more than once"

// What DBOS's documentation says of workflows, their errors and their recovery.
const (
	ended     = "a workflow that returns an error has ended: its steps are tried again, it is not"
	conductor = "a process recovers at its start what the process of the same name left; Conductor, which is a service, sees the dead"
)

// ownTransaction is why some queues see nothing of a commit in a handler.
const ownTransaction = "the handler's transaction is the application's own"

// visible is what pgmq's documentation says of the visibility timeout.
const visible = "its documentation says that a message which is not deleted is delivered again"

const inRedis = "its jobs are in Redis, in no transaction with the application's rows"

func systems() []*system {
	return []*system{
		{
			name: "onceq", ready: ownVersion, command: goCommand("onceq"),
			how: "`HandleTx` and `Once`, with a lease of 2 s in place of 30 and calls of 1 s in place of 30",
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
				"commits-behind-the-queue":                ownTransaction,
				"wakes-while-another-runs":                rescued,
				"wakes-when-another-is-done":              rescued,
				"writes-after-it-woke":                    rescued,
				"old-worker-in-a-deploy":                  "`FetchOnlyKnownKinds`, which is off by default, would leave the job alone",
				"slow-but-alive":                          "by a `Timeout` above the handler's time; a crash is found no earlier than that",
				"tick-while-all-is-down":                  "durable periodic jobs are in River Pro, which is paid",
			},
		},
		{
			name: "by hand", ready: moduleVersion("github.com/jackc/pgx/v5"), command: goCommand("by hand"),
			how: "one transaction selects a job `for update skip locked`, has the handler's writes, and deletes the job; the key has a unique index",
			notes: map[string]string{
				"changed-while-it-runs":                   "the caller is told that it is a duplicate",
				"asked-after-the-end":                     "the key goes with its row",
				"post-repeated":                           "the key goes with its row",
				"asked-after-a-month":                     "the key goes with its row",
				"fails-after-its-call":                    "nobody claims otherwise",
				"killed-in-a-call-that-nobody-recognises": "nobody claims otherwise",
				"no-answer-to-a-call":                     "nobody claims otherwise",
			},
		},
		nodeSystem("pg-boss", "pg-boss.js", system{
			how: "transactional workers; keys as `singletonKey` in a slot of a day, as the policy `stately` until done, as the job's id for ever",
			notes: map[string]string{
				"fails-after-its-call":                    idempotent,
				"killed-in-a-call-that-nobody-recognises": idempotent,
				"no-answer-to-a-call":                     idempotent,
				"moved-to-another-queue":                  "a queue is the kind of job",
				"post-repeated":                           "`send` gives null for a duplicate",
				"slow-but-alive":                          "by `heartbeatSeconds`, which is off by default",
			},
		}),
		nodeSystem("graphile-worker", "graphile-worker.js", system{
			how: "job keys, and named queues for one customer's jobs",
			notes: map[string]string{
				"asked-after-the-end":                     "a `job_key` is free when its job is done",
				"asked-after-a-month":                     "a `job_key` is free when its job is done",
				"other-payload":                           "documented: the later payload replaces the first",
				"fails-after-its-call":                    idempotent,
				"killed-in-a-call-that-nobody-recognises": idempotent,
				"no-answer-to-a-call":                     idempotent,
				"killed-after-its-write":                  idempotent,
				"fails-after-its-write":                   idempotent,
				"wakes-while-another-runs":                idempotent,
				"wakes-when-another-is-done":              idempotent,
				"writes-after-it-woke":                    idempotent,
				"shutdown-too-slow":                       idempotent,
				"slow-but-alive":                          "a job is given to another worker after four hours",
			},
		}),
		{
			name: "DBOS", ready: moduleVersion("github.com/dbos-inc/dbos-transact-golang"), command: goCommand("DBOS"),
			how: "a job is a workflow in a queue, a write a transactional step, a call a step; keys are workflow ids, or deduplication ids until done",
			notes: map[string]string{
				"other-payload":                           "documented: a second start with the same id returns the first one's handle",
				"asked-after-a-cancel":                    "the id is that of the cancelled workflow, which `ResumeWorkflow` starts again",
				"cancel-crosses-the-end":                  "documented: a cancelled workflow ends before its next step, and keeps what the steps before did",
				"fails-after-its-call":                    ended,
				"fails-after-its-write":                   ended,
				"no-answer-to-a-call":                     ended,
				"killed-in-a-call-that-nobody-recognises": "its documentation says that a step may run more than once",
				"wakes-while-another-runs":                conductor,
				"wakes-when-another-is-done":              conductor,
				"writes-after-it-woke":                    conductor,
				"slow-but-alive":                          conductor,
				"old-worker-in-a-deploy":                  "by its application's version, which the producer names",
			},
		},
		absurd(),
		{
			name: "pgmq", command: goCommand("pgmq"),
			ready: func() (string, error) { _, version, err := sqlFile("pgmq"); return version, err },
			how: "a queue is a kind of job, a message group a customer; a message is deleted in the transaction of the handler's " +
				"writes, which is rolled back if it is gone; a visibility timeout of 10 s in place of 30. 1.13.1 is out",
			notes: map[string]string{
				"fails-after-its-call":                    visible,
				"killed-in-a-call-that-nobody-recognises": visible,
				"no-answer-to-a-call":                     visible,
				"poison-beside-others":                    "it counts reads, and leaves it to the application how many are enough",
				"commits-behind-the-queue":                ownTransaction,
				"slow-but-alive":                          "by a visibility timeout above the handler's time; a crash is found no earlier than that",
			},
		},
		{
			name: "asynq", ready: moduleVersion("github.com/hibiken/asynq"), command: goCommand("asynq"), redis: true,
			how: "task ids as keys, which a finished task keeps for its `Retention`",
			notes: map[string]string{
				"producer-dies":                           inRedis,
				"fails-after-its-call":                    idempotent,
				"killed-in-a-call-that-nobody-recognises": idempotent,
				"no-answer-to-a-call":                     idempotent,
				"killed-after-its-write":                  idempotent,
				"fails-after-its-write":                   idempotent,
				"shutdown-too-slow":                       idempotent,
				"wakes-while-another-runs":                idempotent,
				"wakes-when-another-is-done":              idempotent,
				"writes-after-it-woke":                    idempotent,
				"moved-to-another-queue":                  "a task id belongs to its queue",
				"tick-in-two-processes":                   "its documentation: \"you have to ensure only a single scheduler is running\"",
				"post-repeated":                           "a second call finds the result by the task's id",
			},
		},
		nodeSystem("BullMQ", "bullmq.js", system{
			redis: true,
			how:   "`deduplication` by id for a day, a `jobId` for ever; a lock of 10 s in place of 30",
			notes: map[string]string{
				"producer-dies":                           inRedis,
				"fails-after-its-call":                    idempotent,
				"killed-in-a-call-that-nobody-recognises": idempotent,
				"no-answer-to-a-call":                     idempotent,
				"killed-after-its-write":                  idempotent,
				"fails-after-its-write":                   idempotent,
				"shutdown-too-slow":                       idempotent,
				"wakes-while-another-runs":                idempotent,
				"wakes-when-another-is-done":              idempotent,
				"writes-after-it-woke":                    idempotent,
				"moved-to-another-queue":                  "an id belongs to its queue",
				"post-repeated":                           "a second call finds the result by the job's id",
				"tick-while-all-is-down":                  "if the schedule is left alone at the start: an `upsertJobScheduler` drops what was due",
			},
		}),
	}
}

// absurd is a Node package, and SQL in the database.
func absurd() *system {
	const (
		stored    = "documented: the task that has the key is returned, as long as it is stored"
		tolerated = "its documentation asks for steps that tolerate a second run"
	)
	s := nodeSystem("absurd", "absurd-sdk.js", system{
		how: "a job is a task, a write or a call a step; keys are idempotency keys; a claim of 10 s in place of 120. " +
			"SQL 0.5.0 is out: it adds checks of retry strategies",
		notes: map[string]string{
			"other-payload":                           stored,
			"asked-after-a-cancel":                    stored,
			"killed-after-its-write":                  "its step was recorded; a kill between the write and that record would write again",
			"asked-after-a-month":                     "by a `cleanup_ttl` of many years: a key is taken as long as its task is stored",
			"moved-to-another-queue":                  "a key belongs to its queue",
			"killed-in-a-call-that-nobody-recognises": tolerated,
			"no-answer-to-a-call":                     tolerated,
			"cancel-crosses-the-end":                  "documented: a cancelled task ends at its next step, and keeps what the steps before did",
			"slow-but-alive":                          "by `ctx.heartbeat`, which the handler calls",
			"old-worker-in-a-deploy":                  "an old worker puts a task that it does not know off by 15 to 30 s, each time that it finds it; shortened here",
		},
	})
	sdk := s.ready
	s.ready = func() (string, error) {
		_, version, err := sqlFile("absurd")
		if err != nil {
			return "", err
		}
		text, err := sdk()
		return "SQL " + version + ", SDK " + text, err
	}
	return s
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

// nodeSystem is a system whose adapter is in Node.
func nodeSystem(name, file string, s system) *system {
	s.name = name
	s.command = func() (*exec.Cmd, error) {
		n, err := node()
		if err != nil {
			return nil, err
		}
		cmd := n.Command(file)
		cmd.Env = append(os.Environ(), "NO_LOG_SUCCESS=1")
		return cmd, nil
	}
	s.ready = func() (string, error) {
		n, err := node()
		if err != nil {
			return "", err
		}
		return n.PackageVersion(strings.TrimSuffix(file, ".js")) + ", Node " + n.Version, nil
	}
	return &s
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

// ownVersion is the latest commit that changed the library.
func ownVersion() (string, error) {
	out, err := exec.Command("git", "log", "-1", "--abbrev=9", "--format=%h", "--", ":(top,glob)*.go", ":(top)internal", ":(top)migrations").Output()
	return "at " + strings.TrimSpace(string(out)), err
}
