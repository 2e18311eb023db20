package onceqops

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/listing"
)

var update = flag.Bool("update", false, "write internal/tests/testdata/onceqops.sql anew")

// built has the statements that are not constants, each under the name of what builds it.
var built = map[string]string{
	"lockPast":            lockPast,
	"readLimits":          readLimits,
	"readStill":           readStill,
	"readSlow":            readSlow,
	"readHangs":           readHangs,
	"readStuck":           readStuck,
	"readLimitOf":         readLimitOf,
	"readLane":            readLane,
	"readLanes":           readLanes,
	"readEffects":         readEffects,
	"readDoubts":          readDoubts,
	"statement":           statementOf(&Filter{Limit: 1, Queue: "q", Kind: "k", Scope: "s", IDs: []int64{1}, CreatedFrom: time.Unix(0, 0), CreatedBefore: time.Unix(1, 0)}),
	"statement of a page": statementOf(&Filter{Limit: 1, States: []onceq.State{onceq.StateWaiting, onceq.StateDead}, Kind: "k", floor: 1}),
	"ofGroup":             statementOf(&Filter{Limit: 1, Group: 1, Queue: "q"}),
	"ids":                 "select id from (…) page", // built by Filter.statement
	"bound":               boundOf(&Filter{Limit: 1, Queue: "q", Kind: "k"}),
	"Count":               "select count(*) from (…) page", // built by Filter.statement
}

func boundOf(f *Filter) string {
	s, _ := f.bound()
	return s
}

func statementOf(f *Filter) string {
	s, _ := f.statement()
	return s
}

// Every statement that this package sends stands whole in internal/tests/testdata/onceqops.sql, as Postgres gets it: see
// TestStatements of package onceq.
func TestStatements(t *testing.T) {
	listing.Compare(t, "..", []string{"onceqops"}, built, "../internal/tests/testdata/onceqops.sql", *update)
}

func TestFindingNames_HasEachThatHealthGives(t *testing.T) {
	t.Parallel()
	require.True(t, slices.IsSorted(FindingNames()))
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	given := make(map[string]bool)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		for _, m := range regexp.MustCompile(`(?:\bWhat(?:: | = )|x\.add\()"(\w+)"`).FindAllStringSubmatch(string(text), -1) {
			given[m[1]] = true
		}
	}
	for name := range given {
		require.Contains(t, FindingNames(), name)
	}
	require.Greater(t, len(given), 12)
}

func TestSlip(t *testing.T) {
	t.Parallel()
	for pair, is := range map[string]bool{
		"imagse images": true, "image images": true, "imagess images": true, "imeges images": true, "iamges images": true,
		"exports imports": false, "igames images": false, "mail email": true, "mail sms": false,
	} {
		a, b, _ := strings.Cut(pair, " ")
		require.Equal(t, is, slip(a, b), pair)
		require.Equal(t, is, slip(b, a), pair)
	}
}

func TestLineWords(t *testing.T) {
	t.Parallel()
	require.Equal(t, "job 120, which waits for others,", lineWords("\x1f0000000000000000120"))
	require.Equal(t, `lane "k/a"`, lineWords("k/a"))
	require.Equal(t, `limit "provider"`, lineWords("/provider"))
}

func TestWorkerInfo_String(t *testing.T) {
	t.Parallel()
	w := WorkerInfo{Host: "vm", Process: 9441, Queues: map[string]int{"mail": 10, "default": 4}}
	require.Equal(t, "process 9441 on vm works default (4), mail (10)", w.String())
	w.Stale, w.Seen = true, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	require.Equal(t, "process 9441 on vm works default (4), mail (10); not seen since 2026-01-02 03:04:05 UTC", w.String())
}
