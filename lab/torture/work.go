package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// These are the forms of a job: how its handler makes its effect.
const (
	formTx    = "tx"    // in the worker's transaction
	formBatch = "batch" // in one transaction for several jobs
	formOwn   = "own"   // in the handler's own transaction, which completes the job
	formHand  = "hand"  // in a claim loop by hand: one transaction, or one pipeline
	formRecur = "recur" // in the worker's transaction; the key is free again when the job is finished
	formAgain = "again" // a call to a provider that deduplicates, and a row with its receipt
	formAsk   = "ask"   // a call to a provider that can be asked
	formHold  = "hold"  // a call to a provider that can do neither

	// These are mistakes of applications, or things that they do in the middle of something else.
	formLate   = "late"   // the handler commits the worker's transaction in its first attempt, and then fails
	formStop   = "stop"   // a call like hold's; the job is cancelled during it
	formFrail  = "frail"  // like own, in the processes that formPoison ends; it may lose only few leases
	formPoison = "poison" // its handler ends the process

	// These have a lane.
	formLine = "line" // as tx; one at a time
	formPair = "pair" // as batch; how many at a time changes all the time
	formPass = "pass" // as own, half of it at REPEATABLE READ; one at a time, and a job that waits for its next attempt lets the others by
	formHalt = "halt" // as own; one at a time, and a dead job stops its lane until somebody redrives it

	// These have a limit. That of the first two goes up and down all the time, and so does the rate.
	formCap  = "cap"  // as own, half of it at REPEATABLE READ
	formTurn = "turn" // as tx, and with a lane too
	formRate = "rate" // as own; so many in a time

	formFlow = "flow" // a call outside, a sleep, an event, and one of two calls that its answer decides

	formJoin = "join" // as tx; it waits for others, and reads what came of them
	formPart = "part" // as tx; it is enqueued with a join, and may add others

	formTick = "tick" // as tx; schedules enqueue it, and no producer
)

var (
	forms      = []string{formTx, formBatch, formOwn, formHand, formRecur, formAgain, formAsk, formHold}
	oddForms   = []string{formLate, formStop, formFrail, formPoison} // only onceq has them
	laneForms  = []string{formLine, formPair, formPass, formHalt}    // the same
	limitForms = []string{formCap, formTurn, formRate}               // the same
	frailOnes  = []string{formFrail, formPoison}                     // they have processes of their own
)

// formsOf returns the forms of jobs that were chosen and that the system has.
func formsOf(c *child) []string {
	if c.System != "onceq" {
		return chosen(forms, c.Forms)
	}
	return chosen(slices.Concat(forms, oddForms, laneForms, limitForms, []string{formFlow, formJoin}), c.Forms)
}

// transactional reports whether the form's effect is a row in the ledger.
func transactional(form string) bool { return !outside(form) || form == formAgain }

func outside(form string) bool {
	return form == formAgain || form == formAsk || form == formHold || form == formStop
}

// endsByWorker reports whether the worker's own transaction completes the job. No such job may be completed if its handler
// failed.
func endsByWorker(form string) bool {
	return form == formTx || form == formBatch || form == formRecur || form == formLate || form == formLine || form == formPair || form == formTurn || form == formTick ||
		form == formJoin || form == formPart
}

// identity names a job for ever, because its id may be used again after the sequence of ids was set back. It is the id, and
// 36 bits of the time of acceptance in microseconds.
func identity(id int64, created time.Time) int64 { return id<<36 | created.UnixMicro()&(1<<36-1) }

// idOf returns the id in an identity.
func idOf(identity int64) int64 { return identity >> 36 }

// work is what a job is for, and its payload. Two jobs of one name are two requests for the same work.
type work struct {
	Name  string   `json:"work"`
	Form  string   `json:"form"`
	Keyed bool     `json:"keyed"`
	After []string `json:"after,omitempty"` // keys of older jobs that it waits for, too
}

func (w work) key() string {
	if w.Keyed {
		return w.Name
	}
	return ""
}

// These are the fates of a work. Its name decides which one it has.
const (
	fateFine  = "fine"
	fateFatal = "fatal" // its handler finds that it cannot be done
	fateAlien = "alien" // the same, with an error of another database that asks to retry the transaction
	fateFlaky = "flaky" // the first attempt fails
	fateLater = "later" // it is put off now and then
	fateSlow  = "slow"  // it takes longer than a lease
)

func (w work) fate() string {
	if w.Form == formPoison {
		return fateFine
	}
	switch n := hashOf(w.Name) % 100; {
	case n < 1:
		return fateAlien
	case n < 4:
		return fateFatal
	case n < 12:
		return fateFlaky
	case n < 16:
		return fateLater
	case n < 18 && w.Form != formFrail:
		return fateSlow
	}
	return fateFine
}

// hopeless reports that the work cannot be done.
func (w work) hopeless() bool { return w.fate() == fateFatal || w.fate() == fateAlien }

// take lasts as long as the work does.
func (w work) take(ctx context.Context) {
	d := rand.N(40 * time.Millisecond)
	switch {
	case w.fate() == fateSlow:
		d = lease + rand.N(lease)
	case slices.Contains(slices.Concat(laneForms, limitForms, []string{formPart}), w.Form) && rand.IntN(4) > 0: // others wait for it
	case rand.IntN(3) == 0: // so that much work is under way when a fault comes
		d = rand.N(time.Second)
	}
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

const lease = 2 * time.Second

// backoff is short, because a run is.
func backoff(attempt int) time.Duration {
	return time.Duration(min(attempt, 10)) * (50*time.Millisecond + rand.N(50*time.Millisecond))
}

// answer is what a producer was told about a work.
type answer struct {
	Work      string          `json:"work"`
	ID        int64           `json:"id"`
	Duplicate bool            `json:"dup,omitempty"`
	Completed bool            `json:"completed,omitempty"`
	Output    json.RawMessage `json:"output,omitempty"`
}

// system is a queue under test.
type system interface {
	// setup makes its tables, and the triggers on them that write the audit trail.
	setup(ctx context.Context, conn *pgx.Conn) error
	// worker works until ctx ends.
	worker(ctx context.Context, c *child, pool *pgxpool.Pool) error
	enqueuer(pool *pgxpool.Pool) (enqueuer, error)
	// live counts jobs that are not finished.
	live(ctx context.Context, pool *pgxpool.Pool) (int, error)
	// settle decides, as a person would, what the queue has left to a person, and returns how many decisions that took.
	// calls are the provider's record.
	settle(ctx context.Context, pool *pgxpool.Pool, calls []call) (int, error)
	// leftovers returns what waits for a decision and belongs to no job, and what is wrong with the tables.
	leftovers(ctx context.Context, pool *pgxpool.Pool) ([]doubt, string, error)
	// ends returns what became of each job that can still be found.
	ends(ctx context.Context, pool *pgxpool.Pool) ([]end, error)
}

type enqueuer interface {
	// enqueue accepts works in a transaction, or without one. op goes along as metadata.
	enqueue(ctx context.Context, tx pgx.Tx, op string, works []work) ([]answer, error)
	// pipeline runs a whole transaction in one round trip: begin, first, the works, commit.
	pipeline(ctx context.Context, op, first string, works []work) ([]answer, error)
	cancel(ctx context.Context, id int64) error
}

var errNotOffered = errors.New("not offered")

// systemOf returns a system by its name.
func systemOf(name string) (system, error) {
	switch name {
	case "onceq":
		return onceqSystem{}, nil
	case "river":
		return riverSystem{}, nil
	}
	return nil, fmt.Errorf("there is no system %q: use onceq or river", name)
}

// child is what a process is told about its place.
type child struct {
	Role     string // worker, crowd, frail, producer, requester or provider
	Slot     string // its name, the same after a restart
	System   string
	URL      string // of the database, through proxies
	Pooled   bool   // it connects through PgBouncer
	Timeouts bool   // with short statement and lock timeouts
	Provider string
	Dir      string // directory of the journals
	Seed     uint64
	Began    int64 // when the run began, in seconds of Unix time
	Forms    []string
	Verbose  bool
	Broken   string // what is broken on purpose: see brokenToken and the constants after it
}

const (
	childEnv  = "ONCEQ_TORTURE"
	roleCrowd = "crowd" // a worker process that comes and goes with others
	roleFrail = "frail" // a worker process that jobs end
	poisoned  = 77      // the exit code after formPoison
	panicked  = 2       // Go's exit code after a panic
)

// runChild is the life of every process but the main one. It ends when its standard input ends, or by SIGTERM.
func runChild(raw string) (err error) {
	var c child
	if err := json.Unmarshal([]byte(raw), &c); err != nil {
		return err
	}
	defer func() {
		if err != nil && c.Verbose {
			fmt.Fprintf(os.Stderr, "%s ends: %v\n", c.Slot, err)
		}
	}()
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadString(0)
		cancel()
	}()
	if c.Role == "provider" {
		return runProvider(ctx, &c)
	}
	sys, err := systemOf(c.System)
	if err != nil {
		return err
	}
	pool, err := c.pool(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	switch c.Role {
	case "producer":
		return runProducer(ctx, &c, sys, pool)
	case "requester":
		return runRequester(ctx, &c, pool)
	}
	return sys.worker(ctx, &c, pool)
}

func (c *child) pool(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(c.URL)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 8
	config.ConnConfig.ConnectTimeout = 3 * time.Second
	config.ConnConfig.RuntimeParams["application_name"] = applicationName + c.Slot
	if c.Pooled {
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	if c.Timeouts {
		config.ConnConfig.RuntimeParams["statement_timeout"] = "400"
		config.ConnConfig.RuntimeParams["lock_timeout"] = "100"
	}
	return pgxpool.NewWithConfig(ctx, config)
}

const applicationName = "torture "

// refused reports that the server said no, so nothing was committed. An error that ends the session may come after the
// commit.
func refused(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Severity == "ERROR"
	}
	return errors.Is(err, pgx.ErrTxCommitRollback)
}

// journal appends lines of JSON to a file. A line that Write returned from survives the process.
type journal struct {
	mu   sync.Mutex // guards file
	file *os.File
}

func openJournal(dir, name string) (*journal, error) {
	f, err := os.OpenFile(filepath.Join(dir, name+".jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	return &journal{file: f}, err
}

func (j *journal) write(v any) {
	line, err := json.Marshal(v)
	if err == nil {
		j.mu.Lock()
		_, err = j.file.Write(append(line, '\n'))
		j.mu.Unlock()
	}
	if err != nil { // without its journal, nothing that this process does can be checked
		fmt.Fprintln(os.Stderr, "torture: journal:", err)
		os.Exit(3)
	}
}

// readJournals returns the lines of all journals whose names begin with prefix. A last line that a kill has cut off does
// not count.
func readJournals[T any](dir, prefix string) ([]T, error) {
	names, err := filepath.Glob(filepath.Join(dir, prefix+"*.jsonl"))
	if err != nil {
		return nil, err
	}
	var all []T
	for _, name := range names {
		raw, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		for line := range bytes.Lines(raw) {
			var v T
			if json.Unmarshal(line, &v) == nil {
				all = append(all, v)
			}
		}
	}
	return all, nil
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
