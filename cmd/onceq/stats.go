package main

import (
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceq/onceq/onceqops"
)

// statJSON is what workers did in a queue, or with a kind of it, for programs.
type statJSON struct {
	Queue         string    `json:"queue"`
	Kind          string    `json:"kind,omitempty"`
	From          time.Time `json:"from"`
	Until         time.Time `json:"until"`
	Started       int       `json:"started"`
	Completed     int       `json:"completed"`
	Failed        int       `json:"failed"`
	Dead          int       `json:"dead"`
	WaitSeconds   spread    `json:"wait_seconds"`
	RunSeconds    spread    `json:"run_seconds"`
	Due           int       `json:"due"`
	OldestSeconds float64   `json:"oldest_seconds"`
}

type spread struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	P99 float64 `json:"p99"`
}

func (a *app) statsCommand() *cobra.Command {
	var since string
	var filter onceqops.CountFilter
	cmd := &cobra.Command{
		Use:   "stats [QUEUE]",
		Short: "Say what workers did since a time: how many jobs, how long these waited and ran",
		Long: `stats adds up what workers have counted, of each queue, or of the named one. DONE are completed jobs, FAILED attempts after which a job runs again, and
DEAD jobs. WAIT is for how long jobs had been due when a handler got them, and RUN how long handlers took: half of them no longer than P50, and 95 of 100
no longer than P95. DUE is how many jobs were due at once at most, and OLDEST for how long one of them had been due.

It counts full minutes: full ten minutes if --since is more than three hours ago, and full hours if it is more than a day. What happened after the
last of them is not in it. Minutes are kept for a day, hours for a month.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			ctx, cancel := a.limited(cmd.Context())
			defer cancel()
			from, err := a.when(ctx, "--since", since)
			if err != nil {
				return err
			}
			now, err := a.now(ctx)
			if err != nil {
				return err
			}
			filter.Queue = append(args, "")[0]
			if filter.Minutes, filter.Step = stepsOf(now.Sub(from).Round(time.Minute)); filter.Minutes < 1 || filter.Minutes > 31*24*60 {
				return usagef("--since is %q; a minute to 31 days ago is possible", since)
			}
			counts, err := a.ops.Counts(ctx, a.pool, filter)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"stats": statsJSON(counts)})
			}
			a.print(statsTable(counts), "Workers have counted nothing since then.")
			return nil
		},
	}
	cmd.Flags().StringVar(&since, "since", "1h", "since this time (2026-01-31T15:04:05Z) or for this long (90m, 3d)")
	cmd.Flags().StringVarP(&filter.Kind, "kind", "k", "", "only jobs of this kind")
	cmd.Flags().BoolVar(&filter.ByKind, "by-kind", false, "each kind of a queue by itself")
	return cmd
}

// stepsOf is how many minutes to read for a time, and how many of them are kept together from then on.
func stepsOf(d time.Duration) (minutes, step int) {
	switch step = 1; {
	case d > 24*time.Hour:
		step = 60
	case d > 3*time.Hour:
		step = 10
	}
	one := time.Duration(step) * time.Minute
	return int((d+one-1)/one) * step, step
}

func statsJSON(counts []onceqops.Counts) []statJSON {
	all := []statJSON{}
	for _, c := range counts {
		sum := c.Last(len(c.Minutes))
		s := statJSON{Queue: c.Queue, Kind: c.Kind, From: c.From, Until: c.From.Add(time.Duration(len(c.Minutes)) * c.Step),
			Started: sum.Started, Completed: sum.Completed, Failed: sum.Failed, Dead: sum.Dead, Due: sum.Due, OldestSeconds: sum.Oldest.Seconds()}
		s.WaitSeconds = spread{sum.WaitPercentile(50).Seconds(), sum.WaitPercentile(95).Seconds(), sum.WaitPercentile(99).Seconds()}
		s.RunSeconds = spread{sum.Percentile(50).Seconds(), sum.Percentile(95).Seconds(), sum.Percentile(99).Seconds()}
		all = append(all, s)
	}
	return all
}

func statsTable(counts []onceqops.Counts) *table {
	header := []string{"QUEUE", "KIND", "DONE", "FAILED", "DEAD", "WAIT P50", "WAIT P95", "RUN P50", "RUN P95", "DUE", "OLDEST"}
	if !slices.ContainsFunc(counts, func(c onceqops.Counts) bool { return c.Kind != "" }) {
		header[1] = ""
	}
	t := newTable(header...).numbers(header[2:]...)
	t.spare = []string{"", "DEAD", "FAILED", "DUE", "OLDEST"}
	for _, c := range counts {
		sum := c.Last(len(c.Minutes))
		t.add(c.Queue, c.Kind, number(sum.Completed), number(sum.Failed), number(sum.Dead), took(sum.WaitPercentile(50)), took(sum.WaitPercentile(95)),
			took(sum.Percentile(50)), took(sum.Percentile(95)), number(sum.Due), ago(sum.Oldest))
		if sum.Dead > 0 {
			t.paint(4, red)
		}
	}
	return t
}
