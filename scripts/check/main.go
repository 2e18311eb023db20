// Command check runs the parts of "make test", "make check" and of what CI runs beyond them; plan.go has the lists. It says every few
// seconds how far it is. It ends with the output of whatever failed, the line "N passed, N failed" for programs, and one line for people:
// what passed, and how long each part took.
package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) != 2 || plans[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: go run ./scripts/check PLAN, which is one of", slices.Sorted(maps.Keys(plans)))
		os.Exit(2)
	}
	// What is compiled so is found in Go's cache by a clone at another path, too.
	_ = os.Setenv("GOFLAGS", strings.TrimSpace(os.Getenv("GOFLAGS")+" -trimpath"))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	c := &check{name: "make " + os.Args[1], start: time.Now(), tally: newTally()}
	ok := c.run(ctx, plans[os.Args[1]])
	stop()
	if !ok {
		os.Exit(1)
	}
}

// A part is one command.
type part struct {
	name string
	dir  string // "" is the root of the tree
	args []string
	env  []string
}

// A stage is a list of parts. Its lanes run side by side, and the parts of a lane one after the other.
type stage [][]part

// progressEvery is how often a line says how far the check is.
const progressEvery = 15 * time.Second

type check struct {
	name  string
	start time.Time
	tally *tally

	mu     sync.Mutex // guards the fields below, and is held while a line is printed; no other work is done under it
	done   []string   // "vet 12 s", in the order in which they ended
	failed []string   // parts
	report bytes.Buffer
}

// run runs the stages one after the other, and reports whether all passed. Only a failure of the first ends it: one run says all that is
// wrong.
func (c *check) run(ctx context.Context, stages []stage) bool {
	for _, s := range stages {
		for _, lane := range s {
			for _, p := range lane {
				c.tally.expect(p)
			}
		}
	}
	ended := make(chan struct{})
	go func() {
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
				c.say("%s", c.tally.progress())
			}
		}
	}()
	for i, s := range stages {
		var lanes sync.WaitGroup
		for _, lane := range s {
			lanes.Go(func() {
				for _, p := range lane {
					c.part(ctx, p)
				}
			})
		}
		lanes.Wait()
		if i == 0 && len(c.failed) > 0 {
			break // what takes a second
		}
	}
	close(ended)
	return c.end()
}

// part runs one part.
func (c *check) part(ctx context.Context, p part) {
	if ctx.Err() != nil {
		c.fail(p.name, "stopped before it began\n")
		return
	}
	began := time.Now()
	c.say("%s ...", p.name)
	cmd := exec.CommandContext(ctx, p.args[0], p.args[1:]...)
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	var out string
	var err error
	if isTests(p) {
		out, err = c.tests(cmd, p)
	} else {
		var both []byte
		both, err = cmd.CombinedOutput()
		out = string(both)
	}
	took := inWords(time.Since(began))
	if err != nil {
		c.fail(p.name, fmt.Sprintf("%s\n%v after %s\n", strings.TrimRight(out, "\n"), err, took))
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done = append(c.done, p.name+" "+took)
	c.print("%s: passed, %s", p.name, took)
}

// tests runs tests, and returns what belongs to those that fail.
func (c *check) tests(cmd *exec.Cmd, p part) (string, error) {
	var out, stderr bytes.Buffer
	cmd.Stderr = &stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	c.tally.read(pipe, p.name, func(line string) { c.say("%s", line) }, &out)
	err = cmd.Wait()
	return out.String() + stderr.String(), err
}

func (c *check) fail(name, output string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed = append(c.failed, name)
	fmt.Fprintf(&c.report, "\n== %s\n%s", name, output)
	c.print("%s: FAILED", name)
}

func (c *check) say(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.print(format, args...)
}

// print prints a line behind the time that has passed. The caller holds mu.
func (c *check) print(format string, args ...any) {
	passed := time.Since(c.start)
	fmt.Printf("%3d:%02d  %s\n", int(passed.Minutes()), int(passed.Seconds())%60, fmt.Sprintf(format, args...))
}

// end prints the last lines, and reports whether all passed.
func (c *check) end() bool {
	all := inWords(time.Since(c.start))
	passed, failed, skipped, slowest := c.tally.sums()
	fmt.Print(c.report.String())
	if slowest != "" {
		fmt.Println("slowest:", slowest)
	}
	for _, line := range skipped {
		fmt.Println("skipped:", line)
	}
	if passed+failed > 0 {
		fmt.Printf("%d passed, %d failed\n", passed, failed)
	}
	if len(c.failed) > 0 {
		slices.Sort(c.failed)
		fmt.Printf("%s: FAILED: %s; %s in all\n", c.name, strings.Join(c.failed, ", "), all)
		return false
	}
	fmt.Printf("%s: passed: %s; %s in all\n", c.name, strings.Join(c.done, ", "), all)
	return true
}

func inWords(d time.Duration) string {
	if d < time.Minute {
		return fmt.Sprintf("%d s", int(d.Seconds()+0.5))
	}
	return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
}
