package browsertest

import (
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqweb/internal/trouble"
)

// What the command says in a terminal, for the picture in the README.
func TestBrowser_Terminal(t *testing.T) {
	ctx := browser(t)
	script, err := exec.LookPath("script")
	if err != nil {
		t.Skip("no script, which opens a terminal")
	}
	db := newDB(t)
	trouble.Make(t, db)
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "onceq"), ".")
	build.Dir = filepath.Join("..", "..", "cmd", "onceq")
	said, err := build.CombinedOutput()
	require.NoError(t, err, "%s", said)

	const commands = `stty cols 112 rows 50; for c in queues doctor; do echo "$ onceq $c"; onceq $c; echo; done`
	shell := exec.CommandContext(t.Context(), script, "--quiet", "--command", commands, os.DevNull)
	shell.Env = []string{"PATH=" + dir + string(filepath.ListSeparator) + os.Getenv("PATH"), "HOME=" + dir, "TERM=xterm", "DATABASE_URL=" + db.URL}
	out, err := shell.CombinedOutput()
	require.NoError(t, err, "%s", out)

	// What it says of the settings of a test's server is not for the picture, and so it is not all.
	shown := regexp.MustCompile(`(?m)^[^\n]*setting: .*\n(?: {9}.*\n)*|^\d+ things need attention.*\n`).ReplaceAllString(string(out), "")
	require.NotEqual(t, string(out), shown)
	require.NotContains(t, shown, "synchronous_commit")
	for _, says := range []string{`queue "mail" has dead jobs: 3`, "onceq jobs list --state dead --queue mail", "220ms"} {
		require.Contains(t, shown, says)
	}
	classes := map[string]string{"1": "bold", "2": "faint", "31": "red", "32": "green", "33": "yellow"}
	text := regexp.MustCompile(`\x1b\[[0-9]+m`).ReplaceAllStringFunc(html.EscapeString(shown), func(code string) string {
		if class := classes[code[2:len(code)-1]]; class != "" {
			return `<span class="` + class + `">`
		}
		return "</span>"
	})
	require.NotContains(t, text, "\x1b", "an escape that the picture does not know")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `<!doctype html><meta charset="utf-8"><title>onceq</title><style>
			html { background: #10141b } pre { margin: 0; padding: 1rem 1.2rem; color: #d8dee9; font: 14px/1.35 monospace; white-space: pre-wrap; width: 112ch }
			.bold { font-weight: bold } .faint { opacity: .65 } .red { color: #ff7b72 } .green { color: #7ee787 } .yellow { color: #e3b341 }</style><pre>%s</pre>`,
			strings.TrimSpace(strings.ReplaceAll(text, "\r\n", "\n")))
	}))
	defer server.Close()
	run(t, ctx, size(1000, 300, "dark"), chromedp.Navigate(server.URL), shows("$ onceq doctor"), fits(t, "terminal"), picture("terminal", 1000, 2000))
}
