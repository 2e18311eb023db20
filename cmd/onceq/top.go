package main

import (
	"context"
	"errors"
	"fmt"
	"os"
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
		Short: "Watch the queues in a terminal, until ctrl-c",
		Long: `top shows the counts of all queues, the jobs that run and what needs attention, again and again. When the database goes away, it says since
when, and goes on when that is back. With --json it prints one line for each look, and needs no terminal.`,
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
	findings []onceqops.Finding
	health   time.Time // of the findings
}

// healthEvery is how often top asks for Health, which says nothing new every second.
const healthEvery = 15 * time.Second

// countsEvery is how often it reads what workers count once a minute.
const countsEvery = 10 * time.Second

func (a *app) watch(ctx context.Context, every time.Duration) error {
	if !a.json {
		a.say("\x1b[?1049h\x1b[?25l")       // another screen, no cursor
		defer a.say("\x1b[?25h\x1b[?1049l") // and back
	}
	var last look
	var since time.Time
	for {
		now, err := a.look(ctx, last)
		switch {
		case ctx.Err() != nil:
			return nil // ctrl-c is how top ends
		case err == nil:
			last, since = now, time.Time{}
		case since.IsZero():
			since = time.Now()
		}
		if a.json {
			line := map[string]any{"at": last.at, "queues": queuesJSON(last.stats, nil)}
			if err != nil {
				line = map[string]any{"error": err.Error()}
			}
			if err := writeJSON(a.out, line, ""); err != nil {
				return err
			}
		} else {
			a.draw(last, since, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
	}
}

// look asks the database. Each statement of it is bounded, so that a slow database gets no second question before the first is answered.
func (a *app) look(ctx context.Context, last look) (now look, err error) {
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
		if s.Leased == 0 || len(now.running) >= 15 {
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
	now.findings, now.health = last.findings, last.health
	if now.at.Sub(last.health) >= healthEvery {
		if now.findings, err = a.ops.Health(ctx, now.stats...); err != nil {
			return now, err
		}
		now.health = now.at
	}
	return now, nil
}

// draw prints a look over the one before, without a flicker.
func (a *app) draw(l look, since time.Time, err error) {
	_, width := terminal(a.out)
	height := terminalHeight(a.out)
	head := fmt.Sprintf("onceq top   schema %s   %s   ctrl-c ends", a.schema, stamp(l.at))
	if err != nil {
		why := strings.Join(strings.Fields(err.Error()), " ")
		head = fmt.Sprintf("no answer from the database since %s; trying again: %s", ago(time.Since(since)+time.Second), why)
	}
	lines := []string{cut(clean(head), width), ""}
	if err != nil && color(a.out) {
		lines[0] = red + lines[0] + reset
	}
	colored := color(a.out) && err == nil
	if len(l.stats) > 0 {
		lines = append(lines, queueTable(l.stats, l.counted, true).lines(width, colored)...)
	} else if !l.at.IsZero() {
		lines = append(lines, "No queue has jobs, a history or workers.")
	}
	for _, f := range l.findings {
		if f.What == "waiting" { // the table shows that
			continue
		}
		lines = append(lines, "", cut(clean(f.What+": "+f.Detail), width), cut("  "+clean(f.Advice), width))
	}
	if len(l.running) > 0 {
		t := newTable("RUNNING", "QUEUE", "KIND", "ATTEMPTS", "LOST", "AGE", "KEY").numbers("RUNNING", "LOST", "AGE")
		for _, j := range l.running {
			t.add(j.ID, j.Queue, j.Kind, fmt.Sprintf("%d/%d", j.Attempts, j.MaxAttempts), j.Lost, ago(l.at.Sub(j.CreatedAt)), j.Key)
		}
		lines = append(append(lines, ""), t.lines(width, colored)...)
	}
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, line := range lines[:min(len(lines), height)] {
		if i > 0 {
			b.WriteString("\n")
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
