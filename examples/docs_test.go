package examples

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// Each block of Go and JavaScript on these pages names its file in the line above, and stands in that file word for word. A
// block whose library CI does not build says so.
func TestDocsAreTheExamples(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("../docs/move/from-*.md")
	require.NoError(t, err)
	require.Len(t, pages, 5)
	block := regexp.MustCompile("(?s)(?:<!-- ([^\n]*) -->\n)?```(?:go|js)\n(.*?)```")
	for _, page := range append(pages, "../docs/use/cookbook.md", "../docs/use/lanes.md", "../docs/use/limits.md", "../docs/use/groups.md", "../docs/use/flows.md", "../docs/use/agents.md", "../docs/use/patterns.md", "../docs/run/production.md", "../docs/run/deploys.md", "../docs/use/schedules.md", "../docs/use/testing.md", "../docs/run/web.md") {
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

// Links lead somewhere: those between pages, and the paths of pages in comments, messages and scripts. docs/README.md lists every page, and
// every page leads there.
func TestDocsLinks(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("../docs/*/*.md")
	require.NoError(t, err)
	require.Greater(t, len(pages), 25)
	index, err := os.ReadFile("../docs/README.md")
	require.NoError(t, err)
	for _, page := range pages {
		name, err := filepath.Rel("../docs", page)
		require.NoError(t, err)
		require.Contains(t, string(index), "("+name+")", "docs/README.md does not list it")
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		require.Contains(t, string(text), "](../README.md)", "%s does not lead back", page)
	}
	code := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	link := regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]*))?\)`)
	path := regexp.MustCompile(`(https?://\S*|\b)(docs/[\w/.-]+\.(?:md|sql|png))\b`)
	linked, named := 0, 0
	err = filepath.WalkDir("..", func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			if err == nil && (entry.Name() == ".git" || entry.Name() == "node_modules") {
				return filepath.SkipDir
			}
			return err
		}
		if !slices.Contains([]string{".md", ".go", ".sql", ".sh", ".yml", ""}, filepath.Ext(file)) {
			return nil
		}
		text, err := os.ReadFile(file)
		if err != nil || !utf8.Valid(text) {
			return err
		}
		for _, p := range path.FindAllStringSubmatch(string(text), -1) {
			if p[1] == "" || strings.Contains(p[1], "/onceq/onceq/") {
				require.FileExists(t, filepath.Join("..", p[2]), "%s names it", file)
				named++
			}
		}
		if filepath.Ext(file) != ".md" {
			return nil
		}
		for _, l := range link.FindAllStringSubmatch(string(code.ReplaceAll(text, nil)), -1) {
			to := filepath.Join(filepath.Dir(file), l[1])
			if l[1] == "" {
				to = file
			}
			_, err := os.Stat(to)
			require.NoError(t, err, "%s links to %s", file, l[1])
			if l[2] != "" && filepath.Ext(to) == ".md" {
				require.Contains(t, anchors(t, to), l[2], "%s links to %s", file, to)
			}
			linked++
		}
		return nil
	})
	require.NoError(t, err)
	require.Greater(t, linked, 200)
	require.Greater(t, named, 100)
}

// anchors are the places that links into a page may name: its headings, as GitHub writes them.
func anchors(t *testing.T, page string) []string {
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	text = regexp.MustCompile("(?s)```.*?```").ReplaceAll(text, nil)
	var all []string
	for _, h := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		name := regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(strings.ToLower(h[1]), "")
		all = append(all, strings.ReplaceAll(name, " ", "-"))
	}
	return all
}
