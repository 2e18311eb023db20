package main

import (
	"cmp"
	"fmt"
	"image/color"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"

	_ "gonum.org/v1/plot/vg/vgsvg"
)

type drawn struct{ title, file string }

var ourColor = color.RGBA{R: 0x1f, G: 0x6f, B: 0xb4, A: 0xff}

// draw makes the plots that a report has figures for.
func draw(dir string, r report) ([]drawn, error) {
	var all []drawn
	save := func(p *plot.Plot, name string, width, height vg.Length) error {
		file := fmt.Sprintf("pg%d-%s.svg", r.Major, name)
		all = append(all, drawn{p.Title.Text, file})
		p.Title.Padding = 0.3 * vg.Centimeter
		return p.Save(width, height, filepath.Join(dir, file))
	}
	for _, t := range []struct {
		test, name, title string
		variants          []string
	}{
		{"A", "enqueue", "A: bulk enqueue, jobs per second", []string{""}},
		{"A2", "enqueue-keyed", "A2: bulk enqueue with keys, jobs per second", []string{""}},
		{"B", "transactions", "B: transactions with a keyed enqueue, per second", []string{keyed}},
		{"C", "drain", "C: drain, jobs per second", []string{""}},
		{"D", "rows", "D: one row in each completion's transaction, jobs per second", []string{"single"}},
		{"lanes", "lanes", "lanes: drain, jobs per second", []string{lanesName(fullSizes.lanes / 10), lanesName(fullSizes.lanes), plainJobs, oneLane, oneLaneTx}},
	} {
		p, n, err := bars(r, t.test, t.variants, t.title)
		if err != nil {
			return nil, err
		}
		if n > 1 {
			if err := save(p, t.name, 18*vg.Centimeter, vg.Length(n+3)*0.7*vg.Centimeter); err != nil {
				return nil, err
			}
		}
	}
	type drawer func(r report) (*plot.Plot, bool, error)
	over := func(test, axis, title string, sizes []int, name func(n int) string, value func(res *result) float64) drawer {
		return func(r report) (*plot.Plot, bool, error) { return overSizes(r, test, axis, title, sizes, name, value) }
	}
	and := func(name func(n int) string, of string) func(n int) string {
		return func(n int) string { return name(n) + of }
	}
	middle := func(res *result) float64 { return res.Median }
	p99 := func(res *result) float64 { return res.P99 }
	soaked := func(title string, value func(m minute) float64) drawer {
		return func(r report) (*plot.Plot, bool, error) { return overMinutes(r, title, value) }
	}
	for _, each := range []struct {
		name string
		draw drawer
	}{
		{"snapshot", overTime}, {"backlog", overBacklog}, {"rate", starts},
		{"latency", percentiles("E", "E: enqueue to start on an idle worker, p50 and p99, milliseconds")},
		{"lanes-latency", percentiles("lanes", "lanes: enqueue to start, p50 and p99, milliseconds")},
		{"fair", percentiles("fair", "fair: ten jobs behind a million, p50 and p99, milliseconds")},
		{"fleet-drain", over("fleet", "processes", "fleet: drain, jobs per second", fullSizes.fleet, drainBy, middle)},
		{"fleet-idle", over("fleet", "idle processes", "fleet: statements of idle processes per second", fullSizes.idlers, and(idleName, statementsName), middle)},
		{"queues-idle", over("queues", "queues", "queues: statements of one idle process per second", fullSizes.queues, and(queuesName, statementsName), middle)},
		{"wake-statements", over("wake", "idle processes", "wake: statements from Enqueue until the job is gone", fullSizes.wakers, and(idleName, goneName), middle)},
		{"wake-latency", over("wake", "idle processes", "wake: from the commit to the handler, p99, milliseconds", fullSizes.wakers, idleName, p99)},
		{"soak-latency", soaked("soak: p99 by the minute, milliseconds", func(m minute) float64 { return m.P99 })},
		{"soak-tables", soaked("soak: tables and indexes, MiB", func(m minute) float64 { return m.Size })},
	} {
		p, ok, err := each.draw(r)
		if err != nil {
			return nil, err
		}
		if ok {
			if err := save(p, each.name, 18*vg.Centimeter, 9*vg.Centimeter); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// shortNames are for labels that stand beside their bars.
var shortNames = strings.NewReplacer(plainJobs, "no lanes", oneLane, "one lane", oneLaneTx, "one lane, tx")

// bars draws one bar for each peer and variant, the highest on top.
func bars(r report, test string, variants []string, title string) (*plot.Plot, int, error) {
	p := plot.New()
	p.Title.Text = title
	p.X.Min = 0
	var names []string
	var rs []*result
	for _, res := range r.Results {
		if res.Test == test && slices.Contains(variants, res.Variant) && res.Unit != "" {
			rs = append(rs, res)
		}
	}
	slices.SortFunc(rs, func(a, b *result) int { return cmp.Compare(a.Median, b.Median) })
	for i, res := range rs {
		bar, err := plotter.NewBarChart(plotter.Values{res.Median}, 0.45*vg.Centimeter)
		if err != nil {
			return nil, 0, err
		}
		bar.Horizontal, bar.XMin, bar.LineStyle.Width = true, float64(i), 0
		bar.Color = color.Gray{Y: 0xa0}
		if res.Peer == "onceq" {
			bar.Color = ourColor
		}
		p.Add(bar)
		name := fmt.Sprintf("%s, %s: %s", res.Peer, res.Settings, number(res.Median))
		if len(variants) > 1 {
			name = shortNames.Replace(res.Variant) + ", " + strings.Replace(name, ", default", "", 1)
		}
		names = append(names, name)
	}
	if len(names) > 0 {
		p.NominalY(names...)
	}
	p.X.Tick.Marker = thousands{}
	p.X.Max *= 1.05
	return p, len(rs), nil
}

// thousands labels an axis as number does.
type thousands struct{}

func (thousands) Ticks(low, high float64) []plot.Tick {
	ticks := plot.DefaultTicks{}.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = strings.Replace(number(ticks[i].Value), ".0k", "k", 1)
		}
	}
	return ticks
}

// overTime draws the rates of F while jobs go through, with the snapshot held and without.
func overTime(r report) (*plot.Plot, bool, error) {
	p := plot.New()
	p.Title.Text = "F: drain with a snapshot held open (dashed: without), jobs per second"
	p.X.Label.Text = "jobs that went through"
	p.Y.Min = 0
	p.X.Tick.Marker, p.Y.Tick.Marker = thousands{}, thousands{}
	p.Legend.Top = true
	n := 0
	for _, res := range r.Results {
		if res.Test != "F" || len(res.Ticks) < 5 {
			continue
		}
		var points plotter.XYs
		last := res.Ticks[0]
		for _, t := range res.Ticks[1:] {
			// A point for each twentieth of the way, or each second where it is slow.
			if t.Done-last.Done < res.Ticks[len(res.Ticks)-1].Done/20 && t.At-last.At < 1 {
				continue
			}
			points = append(points, plotter.XY{X: float64(t.Done), Y: float64(t.Done-last.Done) / (t.At - last.At)})
			last = t
		}
		if len(points) < 2 {
			continue
		}
		line, err := plotter.NewLine(points)
		if err != nil {
			return nil, false, err
		}
		if res.Variant != "snapshot held" {
			line.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
		}
		line.Color, line.Width = plotutil.Color(peerColor(res.Peer)), vg.Points(1.5)
		p.Add(line)
		if res.Variant == "snapshot held" {
			p.Legend.Add(res.Peer, line)
		}
		n++
	}
	p.Y.Max *= 1.4 // for the legend
	return p, n > 0, nil
}

func peerColor(name string) int {
	for i, known := range []string{"onceq", "River", "graphile-worker", "pg-boss", "by hand"} {
		if known == name {
			return i
		}
	}
	return 5
}

// percentiles draws medians and 99th percentiles of a test on a logarithmic axis.
func percentiles(test, title string) func(r report) (*plot.Plot, bool, error) {
	return func(r report) (*plot.Plot, bool, error) { return drawPercentiles(r, test, title) }
}

func drawPercentiles(r report, test, title string) (*plot.Plot, bool, error) {
	p := plot.New()
	p.Title.Text = title
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	var names []string
	var p50s, p99s plotter.XYs
	low, high := math.Inf(1), 0.0
	for _, res := range r.Results {
		if res.Test == test && res.P99 > 0 {
			y := float64(len(names))
			p50s, p99s = append(p50s, plotter.XY{X: res.Median, Y: y}), append(p99s, plotter.XY{X: res.P99, Y: y})
			who := res.Peer + ", " + res.Settings
			switch {
			case res.Variant != "" && res.Peer == "onceq":
				who = res.Variant
			case res.Variant != "":
				who = res.Peer + " " + res.Settings + ", " + res.Variant
			}
			names = append(names, fmt.Sprintf("%s: %s / %s", who, number(res.Median), number(res.P99)))
			low, high = min(low, res.Median), max(high, res.P99)
		}
	}
	if len(names) == 0 {
		return p, false, nil
	}
	err := plotutil.AddScatters(p, "p50", p50s, "p99", p99s)
	p.NominalY(names...)
	p.X.Min, p.X.Max = low/2, high*2
	p.Legend.Top = true
	p.Y.Max += 1.5 // for the legend
	return p, true, err
}

// starts draws how many jobs of a limit with a rate start in each tenth of a second, by the second.
func starts(r report) (*plot.Plot, bool, error) {
	p := plot.New()
	p.Title.Text = "rate: starts a second under a limit of 1,000, by tenths of a second"
	p.X.Label.Text = "seconds"
	p.Y.Min = 0
	var points plotter.XYs
	for _, res := range r.Results {
		if res.Test != "rate" || len(res.Ticks) < 2 {
			continue
		}
		for i, t := range res.Ticks[1:] {
			last := res.Ticks[i]
			points = append(points, plotter.XY{X: t.At, Y: float64(t.Done-last.Done) / (t.At - last.At)})
		}
	}
	if len(points) == 0 {
		return p, false, nil
	}
	line, err := plotter.NewLine(points)
	if err != nil {
		return nil, false, err
	}
	line.Color, line.Width = ourColor, vg.Points(1.5)
	p.Add(line)
	p.Y.Max *= 1.2
	return p, true, nil
}

// overBacklog draws our rates over the size of the backlog.
func overBacklog(r report) (*plot.Plot, bool, error) {
	p := plot.New()
	p.Title.Text = "Rates beside a backlog, jobs per second"
	p.X.Label.Text = "jobs waiting"
	p.X.Scale, p.X.Tick.Marker, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}, thousands{}
	var lines []any
	for _, what := range []string{"enqueue", "drain"} {
		var points plotter.XYs
		for _, res := range r.Results {
			var n float64
			var unit string
			if res.Test != "growth" {
				continue
			}
			if _, err := fmt.Sscanf(res.Variant, what+": backlog %f%s", &n, &unit); err != nil && n == 0 {
				continue
			}
			n *= map[string]float64{"k": 1e3, "M": 1e6, "": 1}[unit]
			points = append(points, plotter.XY{X: n, Y: res.Median})
		}
		if len(points) > 1 {
			lines = append(lines, what, points)
		}
	}
	if len(lines) == 0 {
		return p, false, nil
	}
	err := plotutil.AddLinePoints(p, lines...)
	p.Y.Min = 0
	p.Legend.Left = true
	return p, true, err
}

// overSizes draws a line for each peer over the sizes of one kind of variant, both axes logarithmic.
func overSizes(r report, test, axis, title string, sizes []int, name func(n int) string, value func(res *result) float64) (*plot.Plot, bool, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text = title, axis
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	var names []string
	lines := make(map[string]plotter.XYs)
	for _, n := range sizes {
		for _, res := range r.Results {
			if y := value(res); res.Test == test && res.Variant == name(n) && y > 0 {
				who := res.Peer + ", " + res.Settings
				if lines[who] == nil {
					names = append(names, who)
				}
				lines[who] = append(lines[who], plotter.XY{X: float64(n), Y: y})
			}
		}
	}
	drawn := 0
	for i, who := range names {
		if len(lines[who]) < 2 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(lines[who])
		if err != nil {
			return nil, false, err
		}
		line.Color, dots.Color, line.Width = plotutil.Color(i), plotutil.Color(i), vg.Points(1.5)
		p.Add(line, dots)
		p.Legend.Add(who, line, dots)
		drawn++
	}
	p.Legend.Top, p.Legend.Left = true, true
	p.Y.Max *= 4 // for the legend
	return p, drawn > 0, nil
}

// overMinutes draws what the soak test saw, with the time of the snapshot between two lines.
func overMinutes(r report, title string, value func(m minute) float64) (*plot.Plot, bool, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text = title+" (a snapshot is held between the lines)", "minutes"
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	low, high, end := math.Inf(1), 0.0, 0.0
	for i, res := range slices.DeleteFunc(slices.Clone(r.Results), func(res *result) bool { return len(res.Minutes) == 0 }) {
		var points plotter.XYs
		for _, m := range res.Minutes {
			if y := value(m); y > 0 {
				points = append(points, plotter.XY{X: m.At, Y: y})
				low, high, end = min(low, y), max(high, y), max(end, m.At)
			}
		}
		line, err := plotter.NewLine(points)
		if err != nil {
			return nil, false, err
		}
		line.Color, line.Width = plotutil.Color(i), vg.Points(1.5)
		p.Add(line)
		keys, _, _ := strings.Cut(res.Variant, ",")
		p.Legend.Add(res.Peer+", "+keys, line)
	}
	if end == 0 {
		return p, false, nil
	}
	for _, x := range []float64{end / 3, end * 2 / 3} {
		line, err := plotter.NewLine(plotter.XYs{{X: x, Y: low}, {X: x, Y: high}})
		if err != nil {
			return nil, false, err
		}
		line.Color, line.Dashes = color.Gray{Y: 0x80}, []vg.Length{vg.Points(4), vg.Points(3)}
		p.Add(line)
	}
	p.Legend.Top, p.Legend.Left = true, true
	p.Y.Max = high * 4 // for the legend
	return p, true, nil
}
