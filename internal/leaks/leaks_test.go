package leaks

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// fake is a test that ends when this test says so.
type fake struct {
	testing.TB
	end    func()
	errors []string
}

func (f *fake) Cleanup(fn func()) { f.end = fn }
func (f *fake) Errorf(format string, args ...any) {
	f.errors = append(f.errors, fmt.Sprintf(format, args...))
}

func leaveBehind(until chan struct{}) {
	for range 2 {
		go func() { go func() { <-until }() }()
	}
}

func TestWatch(t *testing.T) {
	On.Store(true)
	patience = 2 * time.Second
	until := make(chan struct{})

	f := &fake{TB: t}
	Watch(f)
	leaveBehind(until)
	f.end()
	if len(f.errors) != 1 || !strings.HasPrefix(f.errors[0], "2 goroutines") || !strings.Contains(f.errors[0], "leaveBehind") {
		t.Fatalf("two goroutines were left, and it says: %q", f.errors)
	}

	// This test ignores goroutines of another one.
	patience = time.Minute
	g := &fake{TB: t}
	Watch(g)
	done := make(chan struct{})
	go close(done)
	<-done
	g.end()
	if len(g.errors) != 0 {
		t.Fatalf("nothing was left, and it says: %q", g.errors)
	}
	close(until)
}
