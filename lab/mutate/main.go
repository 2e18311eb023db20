// Mutate checks the tests: it breaks one line of the code at a time (a guard left out, a comparison turned, a lock
// forgotten, a retry dropped) and reports whether a test fails. The lines are in mutations.txt.
//
//	make mutate                    # all of them; takes some minutes
//	make mutate ONLY='fence|lane'  # those whose names match
//
// A mutation that no test catches is a finding: the test is missing.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

func main() {
	root := flag.String("root", "../..", "the folder of the module")
	only := flag.String("only", "", "a regular expression for names")
	verbose := flag.Bool("v", false, "print which test caught a mutation")
	flag.Parse()
	if err := run(*root, *only, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(root, only string, verbose bool) error {
	all, err := read(filepath.Join(root, "lab/mutate/mutations.txt"))
	if err != nil {
		return err
	}
	pattern, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "onceq-mutate-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := copyTree(root, dir); err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(m mutation) bool { return !pattern.MatchString(m.name) })
	if err := sound(all, dir); err != nil {
		return err
	}
	var caught, quick, survived int
	for i, m := range all {
		began := time.Now()
		by, err := m.try(dir)
		switch {
		case errors.Is(err, errSurvived):
			survived++
			by = "SURVIVED: no test fails"
		case err != nil:
			return fmt.Errorf("%s: %w", m.name, err)
		default:
			caught++
			if !m.check {
				quick++
			}
			if !verbose {
				by = "caught"
			}
		}
		fmt.Printf("%2d of %d  %-70s %3.0f s  %s\n", i+1, len(all), m.name, time.Since(began).Seconds(), by)
	}
	fmt.Printf("%d mutations: %d caught, %d of these by make test; %d survived\n", caught+survived, caught, quick, survived)
	if survived > 0 {
		return errors.New("tests are missing")
	}
	return nil
}

// copyTree copies what git knows, as it is in the work tree.
func copyTree(root, dir string) error {
	names, err := exec.Command("git", "-C", root, "ls-files", "-z").Output()
	if err != nil {
		return fmt.Errorf("git ls-files: %w", err)
	}
	for name := range strings.SplitSeq(strings.TrimRight(string(names), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted and not committed
		}
		if err != nil {
			return err
		}
		to := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(to, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

var errSurvived = errors.New("no test fails")

// try makes the change in dir, runs the mutation's tests, and takes the change back. It says which tests failed.
func (m mutation) try(dir string) (by string, err error) {
	file := filepath.Join(dir, m.file)
	before, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	after, err := m.apply(before)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(file, after, 0o644); err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.WriteFile(file, before, 0o644)) }()
	out, err := m.tested(dir, patience)
	var failed *exec.ExitError
	switch {
	case err == nil:
		return "", errSurvived
	case !errors.As(err, &failed):
		return "", err
	case bytes.Contains(out, []byte("[build failed]")) || bytes.Contains(out, []byte("[setup failed]")):
		return "", fmt.Errorf("the mutated code does not compile:\n%s", out)
	}
	return strings.Join(failedTests(out), " "), nil
}

// sound runs all tests without a mutation: one that fails anyway shows nothing.
func sound(all []mutation, dir string) error {
	sum := make(map[mutation]mutation)
	for _, m := range all {
		where := mutation{test: m.test, check: m.check}
		one, ok := sum[where]
		if one.test, one.check = m.test, m.check; ok {
			one.run += "|"
		}
		one.run += m.run
		sum[where] = one
	}
	for _, one := range sum {
		if out, err := one.tested(dir, soundPatience); err != nil {
			return fmt.Errorf("tests of %s fail without any mutation: %w\n%s", one.test, err, out)
		}
	}
	return nil
}

// soundPatience is how long the tests of a folder may take together.
const soundPatience = 30 * time.Minute

// patience is how long the tests of one mutation may take. Many make something wait for ever, which counts as caught.
const patience = 3 * time.Minute

// tested runs the mutation's tests as they are in dir. Without -short they are those of make check.
func (m mutation) tested(dir string, patience time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience+2*time.Minute)
	defer cancel()
	args := []string{"test", "-count=1", "-failfast", "-timeout", patience.String(), "-run", m.run}
	if !m.check {
		args = append(args, "-short")
	}
	c := exec.CommandContext(ctx, "go", append(args, ".")...)
	c.Dir = filepath.Join(dir, m.test)
	c.Env = append(os.Environ(), "GOTOOLCHAIN=auto")
	c.WaitDelay = 10 * time.Second
	out, err := c.CombinedOutput()
	if err == nil && bytes.Contains(out, []byte("no tests to run")) {
		return out, fmt.Errorf("no test is called %s", m.run)
	}
	if err != nil && ctx.Err() != nil {
		return out, ctx.Err()
	}
	return out, err
}

var failure = regexp.MustCompile(`(?m)^--- FAIL: (\S+)|^panic: (test timed out)`)

func failedTests(out []byte) (names []string) {
	for _, match := range failure.FindAllSubmatch(out, -1) {
		names = append(names, string(match[1])+string(match[2]))
	}
	return names
}
