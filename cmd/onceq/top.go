package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
)

func (a *app) topCommand() *cobra.Command {
	var every time.Duration
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the queues in a terminal, until q",
		Long: `top shows the counts of all queues, the jobs that run and what doctor finds, again and again. When the database goes away, it says since
when, and goes on when that is back. With --json it prints one line for each look, and needs no terminal.

Keys: the arrows, or j and k, mark a queue; enter shows it alone, with its jobs that run, and esc shows all. s sorts the queues by another column,
/ shows only those whose name has a text in it, space stops and goes on. q ends top.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 500*time.Millisecond {
				return usagef("--every is %v; at least 500ms is possible", every)
			}
			if is, _ := terminal(a.out); !is && !a.json {
				return &exit{codeUsage, errors.New("top needs a terminal; onceq queues prints the counts once, and onceq top --json prints a line for each look")}
			}
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			return a.watch(cmd.Context(), every)
		},
	}
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "time between two looks")
	return cmd
}

// look is what top shows.
type look struct {
	at       time.Time
	stats    []onceqops.QueueStats
	counted  map[string]onceqops.Counts
	read     time.Time // of counted
	running  []onceq.JobInfo
	findings []finding // of doctor, that need attention
	examined time.Time // when it was asked
}

// examineEvery is how often top asks doctor, which says nothing new every second.
const examineEvery = 15 * time.Second

// countsEvery is how often it reads what workers count once a minute.
const countsEvery = 10 * time.Second

func (a *app) watch(ctx context.Context, every time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var typed <-chan string
	if !a.json {
		a.say("\x1b[?1049h\x1b[?25l")       // another screen, no cursor
		defer a.say("\x1b[?25h\x1b[?1049l") // and back
		var restore func()
		var err error
		if typed, restore, err = keys(a.in); err != nil {
			return err
		}
		defer restore()
	}
	var v view
	var last look
	var since time.Time
	var failed error
	type answer struct {
		look
		err error
	}
	answers := make(chan answer, 1) // of one look at a time, beside which keys are heard
	ask := func() {
		before, only := last, v.only
		go func() {
			now, err := a.look(ctx, before, only)
			answers <- answer{now, err}
		}()
	}
	ask()
	var next <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil // ctrl-c is how top ends without a terminal's keys
		case key := <-typed:
			only := v.only
			if v.press(key, last.stats) {
				return nil
			}
			if v.only != only && next != nil {
				next = time.After(0)
			}
		case now := <-answers:
			next = time.After(every)
			switch failed = now.err; {
			case ctx.Err() != nil:
				return nil
			case failed == nil:
				last, since = now.look, time.Time{}
			case since.IsZero():
				since = time.Now()
			}
			if a.json {
				if err := a.printLook(last, failed); err != nil {
					return err
				}
			}
		case <-next:
			if next = time.After(every); !v.stopped {
				next = nil
				ask()
			}
		}
		if !a.json {
			a.draw(last, v, since, failed)
		}
	}
}

func (a *app) printLook(l look, err error) error {
	line := map[string]any{"at": l.at, "queues": queuesJSON(l.stats, nil)}
	if err != nil {
		line = map[string]any{"error": err.Error()}
	}
	return writeJSON(a.out, line, "")
}

// look asks the database. Each statement of it is bounded, so that a slow database gets no second question before the first is answered.
// Of only, if it names a queue, it gets the jobs that run.
func (a *app) look(ctx context.Context, last look, only string) (now look, err error) {
	ctx, cancel := context.WithTimeout(ctx, min(a.timeout, 10*time.Second))
	defer cancel()
	if now.at, err = a.now(ctx); err != nil {
		return now, err
	}
	if now.stats, err = a.ops.Stats(ctx); err != nil {
		return now, err
	}
	now.counted, now.read = last.counted, last.read
	if now.at.Sub(last.read) >= countsEvery {
		if now.counted, err = a.counts(ctx); err != nil {
			return now, err
		}
		now.read = now.at
	}
	for _, s := range now.stats {
		if s.Leased == 0 || len(now.running) >= 15 || only != "" && s.Queue != only {
			continue
		}
		// With many jobs that wait, rare running ones are not looked for: that would read all of them.
		if s.Waiting+s.Delayed+s.Retrying >= onceqops.StatsCap {
			continue
		}
		running, err := a.ops.List(ctx, a.pool, onceqops.Filter{Queue: s.Queue, States: []onceq.State{onceq.StateRunning}, Limit: 15 - len(now.running), WithoutPayloads: true})
		if err != nil {
			return now, err
		}
		now.running = append(now.running, running...)
	}
	now.findings, now.examined = last.findings, last.examined
	if !a.json && now.at.Sub(last.examined) >= examineEvery {
		x := &examination{a: a}
		if err := x.run(ctx); err != nil {
			x.add("warning", "unanswered", "doctor had no answer: "+err.Error(), "")
		}
		now.findings = slices.DeleteFunc(x.found, func(f finding) bool { return f.Level == "ok" })
		slices.SortStableFunc(now.findings, func(a, b finding) int {
			return cmp.Compare(slices.Index(levels, a.Level), slices.Index(levels, b.Level))
		})
		now.examined = now.at
	}
	return now, nil
}

// draw prints a look over the one before, without a flicker.
func (a *app) draw(l look, v view, since time.Time, err error) {
	_, width := terminal(a.out)
	height := terminalHeight(a.out)
	head := fmt.Sprintf("onceq top   schema %s   %s   %s", a.schema, stamp(l.at), v.says())
	if err != nil {
		why := strings.Join(strings.Fields(err.Error()), " ")
		head = fmt.Sprintf("no answer from the database since %s; trying again: %s", ago(time.Since(since)+time.Second), why)
	}
	lines := []string{cut(clean(head), width), ""}
	if err != nil && color(a.out) {
		lines[0] = red + lines[0] + reset
	}
	colored := color(a.out) && err == nil
	var rest []string
	for _, f := range l.findings {
		if f.What == "waiting" || v.only != "" && f.Queue != v.only { // the table shows those that wait
			continue
		}
		rest = append(rest, "", cut(clean(f.Level+"  "+f.What+": "+f.Detail), width), cut("  "+clean(f.Advice), width))
	}
	if len(l.running) > 0 {
		t := newTable("RUNNING", "QUEUE", "KIND", "ATTEMPTS", "LOST", "AGE", "KEY").numbers("RUNNING", "LOST", "AGE")
		for _, j := range l.running {
			t.add(j.ID, j.Queue, j.Kind, fmt.Sprintf("%d/%d", j.Attempts, j.MaxAttempts), j.Lost, ago(l.at.Sub(j.CreatedAt)), j.Key)
		}
		rest = append(append(rest, ""), t.lines(width, colored)...)
	}
	switch stats := v.chosen(l.stats); {
	case len(stats) > 0:
		t := queueTable(stats, l.counted, true)
		for i, row := range t.rows {
			if mark := "  "; len(stats) > 1 {
				if i == v.at {
					mark = "> "
				}
				row[0] = mark + row[0]
			}
		}
		rows := t.lines(width, colored)
		room := max(height-3-min(len(rest), height/2), 1) // for queues; the one that is marked is among them
		first := max(0, min(v.at-room/2, len(stats)-room))
		lines = append(append(lines, rows[0]), rows[1+first:1+min(first+room, len(stats))]...)
	case len(l.stats) > 0:
		lines = append(lines, "No queue has that in its name.")
	case !l.at.IsZero():
		lines = append(lines, "No queue has jobs, a history or workers.")
	}
	lines = append(lines, rest...)
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, line := range lines[:min(len(lines), height)] {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(line + "\x1b[K")
	}
	b.WriteString("\x1b[J")
	a.say("%s", trusted(b.String()))
}

func terminalHeight(w any) int {
	if f, ok := w.(*os.File); ok {
		if _, height, err := getSize(f); err == nil && height > 2 {
			return height
		}
	}
	return 24
}
