package onceqweb

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/onceq/onceq/onceqops"
)

// rateOf is how many minutes a rate is the average of.
const rateOf = 5

// plot is a small picture of what was done in the last minutes: a bar for each, with what failed on top.
type plot struct {
	Width        int
	Done, Failed string // paths
	Label        string // the same in words
}

// plotHeight is in the units of the paths, in which a minute is one wide.
const plotHeight = 20

func plotOf(minutes []onceqops.Count) plot {
	p := plot{Width: len(minutes)}
	most, done, failed := 0, 0, 0
	for _, c := range minutes {
		most = max(most, c.Completed+c.Failed+c.Dead)
		done, failed = done+c.Completed, failed+c.Failed+c.Dead
	}
	if most == 0 {
		return plot{}
	}
	var good, bad bars
	for i, c := range minutes {
		to := float64(plotHeight) / float64(most)
		good.add(i, plotHeight, 0, float64(c.Completed)*to)
		bad.add(i, plotHeight, float64(c.Completed)*to, float64(c.Failed+c.Dead)*to)
	}
	p.Done, p.Failed = good.String(), bad.String()
	last := minutes[len(minutes)-1]
	p.Label = fmt.Sprintf("In the last %d minutes %s completed and %s attempts failed. At most %s in a minute; in the latest, %s and %s.",
		len(minutes), atLeast(done, false), atLeast(failed, false), atLeast(most, false), atLeast(last.Completed, false), atLeast(last.Failed+last.Dead, false))
	return p
}

// bars is a path of bars, each one wide.
type bars struct{ strings.Builder }

// add adds a bar that begins so high and is so high. One that is very small is high enough to be seen.
func (b *bars) add(i int, height, from, high float64) {
	if high > 0 {
		bottom := height - from
		_, _ = fmt.Fprintf(b, "M%d.1 %.1fV%.1fh.8V%.1fz", i, bottom, bottom-max(high, height/50), bottom)
	}
}

// perMinute is a rate of the last rateOf minutes: a whole number, but one digit more if it is small.
func perMinute(n ...int) string {
	sum := 0
	for _, n := range n {
		sum += n
	}
	return rate(float64(sum) / rateOf)
}

func rate(perMinute float64) string {
	if perMinute == 0 || perMinute >= 10 {
		return atLeast(int(math.Round(perMinute)), false)
	}
	return fmt.Sprintf("%.1f", perMinute)
}

// span is how much time plots show.
type span struct {
	Key, Name string
	minutes   int // how many are read,
	step      int // by how many,
	join      int // and how many steps are a point
	tick      time.Duration
	label     string // the form of a tick's time
	every     time.Duration
}

var spans = []span{
	{"15m", "15 minutes", 15, 1, 1, 5 * time.Minute, "15:04", countsEvery},
	{"3h", "3 hours", 180, 1, 2, 30 * time.Minute, "15:04", countsEvery},
	{"1d", "A day", 24 * 60, 10, 2, 4 * time.Hour, "15:04", time.Minute},
	{"14d", "Two weeks", 14 * 24 * 60, 60, 4, 48 * time.Hour, "2 Jan", time.Minute},
}

// usualSpan is what is shown unless somebody has chosen.
const usualSpan = 1

// seriesKey names what plots show. An empty queue or kind does not restrict.
type seriesKey struct {
	queue, kind string
	span        string
}

// series is what was counted, point by point.
type series struct {
	from   time.Time
	step   time.Duration // from one point to the next
	points []onceqops.Count
}

func (s series) size() (n int) {
	for _, c := range s.points {
		n += 200 + 8*(len(c.Durations)+len(c.Waits))
	}
	return n
}

// readSeries reads what plots show, and adds up what is counted by itself: the kinds, and the queues.
func (h *Handler) readSeries(ctx context.Context, queue, kind string, of span) (series, error) {
	return h.series.get(ctx, h, seriesKey{queue, kind, of.Key}, of.every, func(ctx context.Context) (s series, err error) {
		list, err := h.ops.Counts(ctx, h.db, onceqops.CountFilter{Queue: queue, Kind: kind, Minutes: of.minutes, Step: of.step})
		s.step, s.points = time.Duration(of.step*of.join)*time.Minute, make([]onceqops.Count, of.minutes/of.step/of.join)
		for _, c := range list {
			s.from = c.From
			due := make([]int, len(s.points))
			for i, one := range c.Minutes {
				p := &s.points[i/of.join]
				due[i/of.join] = max(due[i/of.join], one.Due)
				one.Due = p.Due
				p.Add(one)
			}
			for i, n := range due { // the greatest of each queue, added up
				s.points[i].Due += n
			}
		}
		return s, err
	})
}

// plots are the charts of a page, with the table of what they show.
type plots struct {
	Spans   []spanLink
	Charts  []chart
	Columns []string
	Rows    []plotRow // the oldest first
	From    time.Time
	step    time.Duration
	Marks   []plotMark
}

// plotMark is where workers began, as in a deploy.
type plotMark struct{ At, Text, When string }

// release is the version of the application that a worker is of, or else that of the library.
func release(w onceqops.WorkerInfo) string {
	if w.App != "" {
		return "version " + w.App
	}
	return "library " + w.Version
}

type spanLink struct {
	Name, To string
	Now      bool
}

type plotRow struct {
	At    time.Time
	Text  string // when
	Cells []string
}

// chart is one of them. Its paths are in a box that is as wide as there are points, and 100 high.
type chart struct {
	Name, Title, Unit string
	Label             string // in words
	Width             int
	Y, X              []axisLabel
	Paths             []chartPath
	Marks             []plotMark
	Keys              []chartKey
}

type axisLabel struct {
	At   string // in percent, from the left or from the top
	Text string
}

type chartPath struct{ Class, D string }

// chartKey is a line of a legend: the value of a column, at first of all the time.
type chartKey struct {
	Class, Name, Value string
	Column             int
}

// column is a row of values that a chart shows.
type column struct {
	class, name string
	of          func(onceqops.Count) float64
	text        func(float64) string
	all         string // of all the time
}

// readPlots makes the plots of a queue, of a kind, or of all. to is the page that they are on, with a ? or &.
func (h *Handler) readPlots(ctx context.Context, r *request, queue, kind, to string) (p plots, err error) {
	now := spans[usualSpan]
	for _, s := range spans {
		if s.Key == r.values.Get("range") {
			now = s
		}
	}
	for _, s := range spans {
		p.Spans = append(p.Spans, spanLink{s.Name, to + "range=" + s.Key + "#plots", s.Key == now.Key})
	}
	s, err := h.readSeries(ctx, queue, kind, now)
	if err != nil || s.from.IsZero() {
		return p, err
	}
	p.From, p.step = s.from, s.step
	var all onceqops.Count
	for i, c := range s.points {
		all.Add(c)
		at := s.from.Add(time.Duration(i) * s.step)
		p.Rows = append(p.Rows, plotRow{At: at, Text: during(at, s.step)})
	}
	minutes := s.step.Minutes()
	perMinute := func(of func(onceqops.Count) int) func(onceqops.Count) float64 {
		return func(c onceqops.Count) float64 { return float64(of(c)) / minutes }
	}
	seconds := func(of func(onceqops.Count) time.Duration) func(onceqops.Count) float64 {
		return func(c onceqops.Count) float64 { return of(c).Seconds() }
	}
	inTime := func(s float64) string { return took(time.Duration(s * float64(time.Second))) }
	percentiles := func(of func(onceqops.Count, float64) time.Duration) (all3 []column) {
		for _, n := range []float64{50, 95, 99} {
			all3 = append(all3, column{fmt.Sprintf("p%v", n), fmt.Sprintf("p%v", n), seconds(func(c onceqops.Count) time.Duration { return of(c, n) }), inTime, took(of(all, n))})
		}
		return all3
	}
	share := func(c onceqops.Count) float64 {
		return 100 * float64(c.Failed+c.Dead) / float64(max(1, c.Completed+c.Failed+c.Dead))
	}
	percent := func(v float64) string {
		if v > 0 && v < 10 {
			return fmt.Sprintf("%.1f%%", v)
		}
		return fmt.Sprintf("%.0f%%", v)
	}
	whole := func(v float64) string { return atLeast(int(v), false) }
	add := func(c chart, log bool, stacked bool, columns ...column) {
		p.chart(s, now, c, log, stacked, columns)
	}
	add(chart{Name: "throughput", Title: "Throughput", Unit: "jobs a minute"}, false, true,
		column{"done", "done", perMinute(func(c onceqops.Count) int { return c.Completed }), rate, whole(float64(all.Completed))},
		column{"failed", "failed", perMinute(func(c onceqops.Count) int { return c.Failed }), rate, whole(float64(all.Failed))},
		column{"dead", "dead", perMinute(func(c onceqops.Count) int { return c.Dead }), rate, whole(float64(all.Dead))})
	add(chart{Name: "wait", Title: "Wait", Unit: "from due until the handler begins"}, true, false, percentiles(onceqops.Count.WaitPercentile)...)
	add(chart{Name: "run", Title: "Run", Unit: "how long handlers take"}, true, false, percentiles(onceqops.Count.Percentile)...)
	add(chart{Name: "share", Title: "Errors", Unit: "share of attempts that fail"}, false, true, column{"dead", "failed", share, percent, percent(share(all))})
	if kind == "" { // what is due is counted by queue
		add(chart{Name: "backlog", Title: "Backlog", Unit: "due jobs that nobody has"}, false, true,
			column{"due", "at most", func(c onceqops.Count) float64 { return float64(c.Due) }, whole, whole(float64(slices.MaxFunc(s.points, func(a, b onceqops.Count) int { return a.Due - b.Due }).Due))})
		add(chart{Name: "age", Title: "Age of the backlog", Unit: "of its oldest job"}, false, true,
			column{"due", "at most", seconds(func(c onceqops.Count) time.Duration { return c.Oldest }), inTime, took(all.Oldest)})
	}
	return p, nil
}

// mark marks where the workers began that are there now, in the plots and in their table.
func (p *plots) mark(workers []onceqops.WorkerInfo) {
	began, versions := make(map[int]int), make(map[int][]string)
	for _, w := range workers {
		i := slices.IndexFunc(p.Rows, func(r plotRow) bool { return w.Started.Before(r.At.Add(p.step)) })
		if i >= 0 && !w.Started.Before(p.From) && !w.Stale {
			began[i], versions[i] = began[i]+1, append(versions[i], release(w))
		}
	}
	for _, i := range slices.Sorted(maps.Keys(began)) {
		text := fmt.Sprintf("%d workers began", began[i])
		if began[i] == 1 {
			text = "a worker began"
		}
		slices.Sort(versions[i])
		text += ": " + some(slices.Compact(versions[i]))
		at := p.Rows[i].Text
		p.Rows[i].Text += ", " + text
		p.Marks = append(p.Marks, plotMark{inPercent((float64(i) + .5) / float64(len(p.Rows))), text, at})
	}
	for i := range p.Charts {
		p.Charts[i].Marks = p.Marks
	}
}

// during is the time of a point in words.
func during(at time.Time, step time.Duration) string {
	end := at.Add(step).UTC()
	if at = at.UTC(); step <= time.Minute {
		return at.Format("2006-01-02 15:04")
	}
	return at.Format("2006-01-02 15:04") + " to " + end.Format("15:04")
}

// chart draws a chart of some columns: as bars on top of each other, or as lines, which have no point where there is nothing.
func (p *plots) chart(s series, now span, c chart, log, stacked bool, columns []column) {
	c.Width = len(s.points)
	values := make([][]float64, len(columns))
	least, most := math.Inf(1), 0.0
	for i, count := range s.points {
		sum := 0.0
		for k, column := range columns {
			v := column.of(count)
			values[k] = append(values[k], v)
			p.Rows[i].Cells = append(p.Rows[i].Cells, column.text(v))
			if sum += v; v > 0 {
				least = min(least, v)
			}
			most = max(most, v)
		}
		if stacked {
			most = max(most, sum)
		}
	}
	for _, column := range columns {
		c.Keys = append(c.Keys, chartKey{column.class, column.name, column.all, len(p.Columns) + 1})
		p.Columns = append(p.Columns, strings.ToLower(c.Title)+", "+column.name)
	}
	if most == 0 {
		least = .001
	}
	var scale func(float64) float64
	if log {
		scale = c.logarithmic(least, most)
	} else {
		scale = c.linear(most, c.Name == "age", columns[0].text)
	}
	base := make([]float64, len(s.points))
	for k, column := range columns {
		var path bars
		on := false
		for i, v := range values[k] {
			switch {
			case stacked:
				path.add(i, 100, scale(base[i]), scale(v))
				base[i] += v
			case v > 0 && on:
				_, _ = fmt.Fprintf(&path, "L%d.5 %.1f", i, 100-scale(v))
			case v > 0: // a point by itself is seen, too
				_, _ = fmt.Fprintf(&path, "M%d.5 %.1fh.01", i, 100-scale(v))
			}
			on = v > 0
		}
		c.Paths = append(c.Paths, chartPath{column.class, path.String()})
	}
	for at := s.from.Truncate(now.tick); at.Before(s.from.Add(time.Duration(len(s.points)) * s.step)); at = at.Add(now.tick) {
		share := float64(at.Sub(s.from)) / float64(s.step) / float64(len(s.points))
		if share < .02 || share > .98 {
			continue
		}
		text := at.UTC().Format(now.label)
		if now.tick >= time.Hour && text == "00:00" {
			text = at.UTC().Format("2 Jan")
		}
		c.X = append(c.X, axisLabel{inPercent(share), text})
	}
	var words []string
	for _, key := range c.Keys {
		words = append(words, key.Name+" "+key.Value)
	}
	c.Label = fmt.Sprintf("%s, %s, from %s UTC on, in all: %s. The arrow keys show each point; the table below has all.", c.Title, c.Unit, clock(s.from), strings.Join(words, ", "))
	p.Charts = append(p.Charts, c)
}

func inPercent(share float64) string { return strconv.FormatFloat(100*share, 'f', 1, 64) + "%" }

// linear makes an axis from 0 on. It returns how high a value is.
func (c *chart) linear(most float64, inTime bool, text func(float64) string) func(float64) float64 {
	steps := []float64{1, 2, 5, 10}
	unit := math.Pow(10, math.Floor(math.Log10(max(most, 1e-3)/4)))
	if inTime {
		unit, steps = 1, []float64{1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86400, 7 * 86400, 30 * 86400, 365 * 86400}
	} else if unit < .1 {
		unit = .1
	}
	step := steps[len(steps)-1] * unit
	for _, s := range steps {
		if most <= 4*s*unit {
			step = s * unit
			break
		}
	}
	top := step * max(1, math.Ceil(most/step))
	for v := 0.0; v <= top*1.001; v += step {
		c.Y = append(c.Y, axisLabel{inPercent(1 - v/top), text(v)})
	}
	c.Y[0].Text = "0"
	return func(v float64) float64 { return 100 * v / top }
}

// logarithmic makes an axis of seconds on which each line is ten times the one below, or the next unit.
func (c *chart) logarithmic(least, most float64) func(float64) float64 {
	lines := []float64{.001, .01, .1, 1, 10, 60, 600, 3600, 36000, 864000}
	from, to := 0, len(lines)-1
	for from < len(lines)-2 && lines[from+1] <= least {
		from++
	}
	for to > from+1 && lines[to-1] >= most {
		to--
	}
	low, high := math.Log(lines[from]), math.Log(lines[to])
	scale := func(v float64) float64 {
		return min(100, 100*max(0, math.Log(max(v, 1e-6))-low)/(high-low))
	}
	for _, v := range lines[from : to+1] {
		c.Y = append(c.Y, axisLabel{inPercent(1 - scale(v)/100), took(time.Duration(v * float64(time.Second)))})
	}
	return scale
}
