// Package leaks finds goroutines that a test leaves behind, even while other tests run beside it: a goroutine carries the
// label of the test that started it.
package leaks

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// On turns Watch on. onceq's own tests set it. Users' tests may keep goroutines as they like.
var On atomic.Bool

const label = "onceq test"

// patience is how long goroutines may take to end after their test. It is a variable for this package's own test.
var patience = 2 * time.Minute

var (
	watched sync.Map // testing.TB → nothing: tests that are already watched
	last    atomic.Int64
)

// Watch fails the test if goroutines that it starts from here on are left after the test and the clean-ups that are
// registered after this call.
func Watch(t testing.TB) {
	t.Helper()
	if _, again := watched.LoadOrStore(t, nil); again || !On.Load() {
		return
	}
	name := fmt.Sprintf("%s %d", t.Name(), last.Add(1))
	pprof.SetGoroutineLabels(pprof.WithLabels(context.Background(), pprof.Labels(label, name)))
	t.Cleanup(func() {
		watched.Delete(t)
		pprof.SetGoroutineLabels(context.Background()) // this goroutine is not a leak
		var left []string
		pause := time.Millisecond // reading all goroutines is not cheap
		for until := time.Now().Add(patience); time.Now().Before(until); pause = min(2*pause, 100*time.Millisecond) {
			if left = of(name); len(left) == 0 {
				return
			}
			time.Sleep(pause)
		}
		t.Errorf("%d goroutines were left by this test:\n%s", len(left), strings.Join(left, "\n"))
	})
}

var header = regexp.MustCompile(`^(\d+) @`)

// of returns the stacks of the goroutines with a label.
func of(name string) (stacks []string) {
	var profile bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&profile, 1) // cannot fail: into memory
	want := fmt.Sprintf("%q:%q", label, name)
	for stack := range strings.SplitSeq(profile.String(), "\n\n") {
		stack = strings.TrimPrefix(stack, "goroutine profile: ")
		_, labels, ok := strings.Cut(stack, "\n# labels: ")
		labels, _, _ = strings.Cut(labels, "\n")
		if !ok || !strings.Contains(labels, want) {
			continue
		}
		n := 1
		for line := range strings.SplitSeq(stack, "\n") {
			if m := header.FindStringSubmatch(line); m != nil {
				n, _ = strconv.Atoi(m[1])
			}
		}
		for range n {
			stacks = append(stacks, stack)
		}
	}
	return stacks
}
