// Package leaks finds goroutines that a test leaves behind, also while other tests run beside it: a goroutine has the
// label of the one that started it.
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

// On makes Watch watch. onceq's own tests turn it on; those of users may keep goroutines as they like.
var On atomic.Bool

const label = "onceq test"

// patience is how long goroutines may take to end after their test. It is a variable for this package's own test alone.
var patience = 2 * time.Minute

var (
	watched sync.Map // testing.TB → nothing: those that are watched already
	last    atomic.Int64
)

// Watch fails the test when goroutines that were started in it from here on are left when it and the clean-ups that
// are registered after this call have ended.
func Watch(t testing.TB) {
	t.Helper()
	if _, again := watched.LoadOrStore(t, nil); again || !On.Load() {
		return
	}
	name := fmt.Sprintf("%s %d", t.Name(), last.Add(1))
	pprof.SetGoroutineLabels(pprof.WithLabels(context.Background(), pprof.Labels(label, name)))
	t.Cleanup(func() {
		watched.Delete(t)
		pprof.SetGoroutineLabels(context.Background()) // this goroutine is none of those that are left
		var left []string
		pause := time.Millisecond // a look at all goroutines is not cheap
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

// of gives the stacks of the goroutines that carry a label.
func of(name string) (stacks []string) {
	var profile bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&profile, 1) // into memory
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
