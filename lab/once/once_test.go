package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(envAdapter); name != "" { // this program as a process of a story
		if err := serveAdapter(name); err != nil {
			_, _ = os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// page is where make once writes the table.
const page = "../../docs/use/once.md"

// TestTable fails when stories or adapters have changed since the table was made.
func TestTable(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	hash, err := madeFrom(os.DirFS(".."))
	require.NoError(t, err)
	require.True(t, bytes.Contains(text, []byte(hash)), "docs/use/once.md is older than lab/once: run make once")
}

// TestNames fails when a note is for a story that does not exist, or two stories have one name.
func TestNames(t *testing.T) {
	t.Parallel()
	names := make(map[string]bool)
	for _, st := range stories {
		require.False(t, names[st.name], st.name)
		names[st.name] = true
	}
	for _, sys := range systems() {
		for name := range sys.notes {
			require.True(t, names[name], "%s has a note for %s", sys.name, name)
		}
	}
}

// TestKept fails when what is not played does not stay as the page has it.
func TestKept(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	postgres := regexp.MustCompile(`PostgreSQL (.+)\.\n`).FindSubmatch(text)
	file := filepath.Join(t.TempDir(), "once.md")
	all := systems()
	require.NoError(t, writePage(file, all, readPage(string(text), all), nil, string(postgres[1])))
	again, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(text), string(again))
}

// quick are stories that take no lease's time.
var quick = []string{
	"asked-twice", "first-rolls-back", "other-payload", "producer-dies", "opposite-orders", "asked-after-a-month",
	"fails-after-its-write", "commits-behind-the-queue", "old-worker-in-a-deploy", "fails-after-its-call",
}

// TestOnceq plays the quick stories for onceq.
func TestOnceq(t *testing.T) {
	t.Parallel()
	theatre, err := openTheatre(t.Context(), false)
	require.NoError(t, err)
	t.Cleanup(theatre.close)
	for _, name := range quick {
		cells, err := chosen(systems(), name+"/onceq")
		require.NoError(t, err)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := theatre.perform(t.Context(), cells[0].system, cells[0].story)
			require.NoError(t, o.err)
			require.Empty(t, o.missing)
			require.Equal(t, cells[0].story.right, o.n, "%s: %s", cells[0].story.happens, cells[0].story.question)
		})
	}
}
