package onceqweb

import (
	"fmt"
	"strings"

	"github.com/onceq/onceq"
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

func plotOf(minutes []onceq.Count) plot {
	p := plot{Width: len(minutes)}
	most, done, failed := 0, 0, 0
	for _, c := range minutes {
		most = max(most, c.Completed+c.Failed+c.Dead)
		done, failed = done+c.Completed, failed+c.Failed+c.Dead
	}
	if most == 0 {
		return plot{}
	}
	var good, bad strings.Builder
	bar := func(b *strings.Builder, i, from, n int) {
		if n > 0 {
			y := func(n int) float64 { return plotHeight - float64(n)*plotHeight/float64(most) }
			_, _ = fmt.Fprintf(b, "M%d %.1fV%.1fh.8V%.1fz", i, y(from), min(y(from+n), y(from)-.5), y(from)) // so that one of a million is seen
		}
	}
	for i, c := range minutes {
		bar(&good, i, 0, c.Completed)
		bar(&bad, i, c.Completed, c.Failed+c.Dead)
	}
	p.Done, p.Failed = good.String(), bad.String()
	last := minutes[len(minutes)-1]
	p.Label = fmt.Sprintf("In the last %d minutes %s completed and %s attempts failed. At most %s in a minute; in the latest, %s and %s.",
		len(minutes), atLeast(done, false), atLeast(failed, false), atLeast(most, false), atLeast(last.Completed, false), atLeast(last.Failed+last.Dead, false))
	return p
}

// sumOf adds up the minutes of two queues.
func sumOf(sum, more []onceq.Count) []onceq.Count {
	sum = append(sum, make([]onceq.Count, max(0, len(more)-len(sum)))...)
	for i, c := range more {
		sum[i].Add(c)
	}
	return sum
}

// perMinute is a rate of the last rateOf minutes: a whole number, but one digit more if it is small.
func perMinute(n ...int) string {
	sum := 0
	for _, n := range n {
		sum += n
	}
	if sum == 0 || sum >= 10*rateOf {
		return atLeast((sum+rateOf/2)/rateOf, false)
	}
	return fmt.Sprintf("%.1f", float64(sum)/rateOf)
}
