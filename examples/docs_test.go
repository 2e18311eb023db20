package examples

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each block of Go and JavaScript on these pages names its file in the line above, and stands in that file word for word. A
// block whose library CI does not build says so.
func TestDocsAreTheExamples(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("../docs/moving-from-*.md")
	require.NoError(t, err)
	require.Len(t, pages, 5)
	block := regexp.MustCompile("(?s)(?:<!-- ([^\n]*) -->\n)?```(?:go|js)\n(.*?)```")
	for _, page := range append(pages, "../docs/cookbook.md", "../docs/lanes.md", "../docs/limits.md", "../docs/groups.md", "../docs/flows.md", "../docs/patterns.md", "../docs/production.md", "../docs/deploys.md", "../docs/schedules.md", "../docs/testing.md", "../docs/web.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		blocks := block.FindAllStringSubmatch(string(text), -1)
		require.Equal(t, strings.Count(string(text), "```go")+strings.Count(string(text), "```js"), len(blocks), page)
		ours := 0
		for _, b := range blocks {
			if strings.HasPrefix(b[1], "not built: ") {
				continue
			}
			ours++
			require.NotEmpty(t, b[1], "%s: a block does not say where it is from:\n%s", page, b[2])
			source, err := os.ReadFile(filepath.Join("..", b[1]))
			require.NoError(t, err, page)
			require.Contains(t, string(source), strings.TrimSpace(b[2]), "%s: not in %s", page, b[1])
		}
		require.Positive(t, ours, page)
	}
}

// Links between files lead somewhere, on every page. docs/README.md lists every page beside it.
func TestDocsLinks(t *testing.T) {
	t.Parallel()
	docs, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	root, err := filepath.Glob("../*.md")
	require.NoError(t, err)
	index, err := os.ReadFile("../docs/README.md")
	require.NoError(t, err)
	for _, page := range slices.Concat(docs, root) {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		text = regexp.MustCompile("(?s)```.*?```|`[^`\n]*`").ReplaceAll(text, nil)
		for _, l := range regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`).FindAllStringSubmatch(string(text), -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(page), l[1]))
			require.NoError(t, err, "%s links to %s", page, l[1])
		}
	}
	for _, page := range docs {
		if name := filepath.Base(page); name != "README.md" {
			require.Contains(t, string(index), "("+name, "docs/README.md does not list it")
		}
	}
}
