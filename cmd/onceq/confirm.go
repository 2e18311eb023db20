package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceq/onceq/onceqops"
)

// consent is how somebody agrees to what cannot be undone, or touches many jobs.
type consent struct{ yes, dry bool }

func (c *consent) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&c.yes, "yes", "y", false, "do not ask; needed where there is no terminal to ask on")
	cmd.Flags().BoolVar(&c.dry, "dry-run", false, "say what would happen, and do nothing")
}

// agreed says what is about to happen and returns nil if it may. With --dry-run it returns errDry.
func (a *app) agreed(ctx context.Context, c consent, what string, lines ...string) error {
	a.remark("%s\n", what)
	for _, l := range lines {
		a.remark("  %s\n", l)
	}
	switch is, _ := terminal(a.in); {
	case c.dry:
		a.remark("Dry run: nothing was changed.\n")
		return errDry
	case c.yes:
		return nil
	case !is:
		return &exit{codeRefused, errors.New("nothing was changed: add --yes to do it, because there is no terminal to ask on")}
	}
	a.remark("Go on? [y/N] ")
	answer := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(a.in).ReadString('\n')
		answer <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case <-ctx.Done():
		a.remark("\n")
		return &exit{codeInterrupted, errors.New("interrupted; nothing was changed")}
	case line := <-answer:
		if line == "y" || line == "yes" {
			return nil
		}
	}
	return &exit{codeRefused, errors.New("nothing was changed")}
}

// errDry ends a command that was only to say what would happen.
var errDry = errors.New("dry run")

// dried turns errDry into success.
func dried(err error) error {
	if errors.Is(err, errDry) {
		return nil
	}
	return err
}

// countLimit is where counting before a change stops, so that it takes no more than about a second.
const countLimit = 100_000

// atMost says a count that may have stopped.
func atMost(n int, noun string) string {
	if n >= countLimit {
		return "at least " + plural(n, noun)
	}
	return plural(n, noun)
}

// progress is the line on a terminal's stderr while something takes long.
type progress struct {
	w    io.Writer
	live bool

	mu    sync.Mutex // guards writing, and what follows
	shown time.Time
	drawn bool
}

func (a *app) progress() *progress {
	live, _ := terminal(a.errOut)
	return &progress{w: a.errOut, live: live, shown: time.Now()}
}

func (p *progress) say(format string, args ...any) {
	// Without a terminal a line every ten seconds is enough for a log.
	every := 200 * time.Millisecond
	if !p.live {
		every = 10 * time.Second
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.shown) < every {
		return
	}
	p.shown = time.Now()
	if p.live {
		printf(p.w, "\r"+format+"\x1b[K", args...)
		p.drawn = true
		return
	}
	printf(p.w, format+"\n", args...)
}

// stops says what ctrl-c does. It may be called while say is.
func (p *progress) stops() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	printf(p.w, "Stopping after the statement that is under way. Ctrl-c again ends at once; what that statement does is then not known.\n")
}

func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
}

func (p *progress) clear() {
	if p.drawn {
		printf(p.w, "\r\x1b[K")
		p.drawn = false
	}
}

var (
	errStopped        = errors.New("stopped")
	errStoppedBetween = &exit{codeInterrupted, errors.New("interrupted between two statements; run the same command again to go on")}
)

// many runs a call that takes many jobs, statement by statement. Ctrl-c stops it between two statements, so that the counts are
// right. Each statement has its own time limit.
func (a *app) many(ctx context.Context, filter onceqops.Filter, total int, call func(context.Context, onceqops.Filter) error) (stopped bool, err error) {
	p := a.progress()
	defer p.end()
	// The context of the call outlives ctrl-c, so that the statement under way ends by itself.
	inner, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	limit := time.AfterFunc(a.timeout, func() { cancel(context.DeadlineExceeded) })
	defer limit.Stop()
	filter.Progress = func(tried int) error {
		limit.Reset(a.timeout)
		p.say("%s of %s", number(tried), atMost(total, "job"))
		if ctx.Err() != nil {
			return errStopped
		}
		return nil
	}
	if ctx.Err() != nil {
		return true, nil
	}
	defer context.AfterFunc(ctx, p.stops)()
	err = call(inner, filter)
	switch {
	case errors.Is(err, errStopped):
		return true, nil
	case err != nil && errors.Is(context.Cause(inner), context.DeadlineExceeded):
		err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	return false, err
}
