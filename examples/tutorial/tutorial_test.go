package tutorial

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// The test does what README.md says, word for word, in an empty folder: it writes each block of Go into the file that
// the comment above it names, types each line that begins with a "$", and compares what it sees.
func TestTutorial(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	dir, page := t.TempDir(), string(text)
	for _, address := range []string{"localhost:9090", "localhost:8080"} { // may be in use here
		page = strings.ReplaceAll(page, address, free(t))
	}
	module(t, dir)
	shell := start(t, dir)
	blocks := regexp.MustCompile("(?s)(?:<!-- (\\S+) -->\n)?```(go|console)\n(.*?)```").FindAllStringSubmatch(page, -1)
	require.Len(t, blocks, strings.Count(page, "```")/2)
	for _, block := range blocks {
		if block[2] == "go" {
			require.NotEmpty(t, block[1], "no comment says which file this is:\n%s", block[3])
			write(t, filepath.Join(dir, block[1]), block[3])
			continue
		}
		var typed []string
		for line := range strings.Lines(block[3]) {
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				typed = append(typed, command)
			}
		}
		require.Equal(t, block[3], shell(typed))
	}
	const checks = "gofmt -l . && go vet ./... && echo fine\n"
	require.Equal(t, "$ "+checks+"fine\n", shell([]string{checks}))
}

// module makes the folder's module: what "go mod init" and "go get" do, with this repository's onceq.
func module(t *testing.T, dir string) {
	mod, err := os.ReadFile("../go.mod")
	require.NoError(t, err)
	sum, err := os.ReadFile("../go.sum")
	require.NoError(t, err)
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	text := strings.Replace(string(mod), "module github.com/onceq/onceq/examples", "module shop", 1)
	text = strings.ReplaceAll(text, "=> ../", "=> "+filepath.ToSlash(root)+"/")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(text), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.sum"), sum, 0o600))
}

// write puts a block into its file: a whole file, or declarations that take the place of those with the same names.
func write(t *testing.T, file, block string) {
	if !strings.HasPrefix(block, "package ") {
		old, err := os.ReadFile(file)
		require.NoError(t, err)
		text := string(old)
		for name, decl := range declarations(t, "package main\n\n"+block) {
			before := declarations(t, text)[name]
			require.NotEmpty(t, before, "%s has no %s", file, name)
			text = strings.Replace(text, before, decl, 1)
		}
		block = text
	}
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o750))
	require.NoError(t, os.WriteFile(file, []byte(block), 0o600))
}

// declarations are the texts of a file's declarations, by name. That of the imports is "import".
func declarations(t *testing.T, text string) map[string]string {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "", text, 0)
	require.NoError(t, err, text)
	all := map[string]string{}
	for _, d := range file.Decls {
		name := "import"
		switch d := d.(type) {
		case *ast.FuncDecl:
			name = d.Name.Name
		case *ast.GenDecl:
			switch s := d.Specs[0].(type) {
			case *ast.TypeSpec:
				name = s.Name.Name
			case *ast.ValueSpec:
				name = s.Names[0].Name
			}
		}
		all[name] = text[files.Position(d.Pos()).Offset:files.Position(d.End()).Offset]
	}
	return all
}

// start starts a shell. The function that it returns types lines, and returns them with what they print.
func start(t *testing.T, dir string) func(lines []string) string {
	shell := exec.CommandContext(t.Context(), "bash")
	shell.Dir = dir
	shell.Env = append(os.Environ(), "DATABASE_URL="+queuetest.New(t, queuetest.NoMigrations()).URL)
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // with all that it starts
	log := &strings.Builder{}
	shell.Stderr = log
	in, err := shell.StdinPipe()
	require.NoError(t, err)
	out, err := shell.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, shell.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-shell.Process.Pid, syscall.SIGKILL)
		_ = shell.Wait()
		if t.Failed() {
			t.Log(log)
		}
	})
	seen := bufio.NewScanner(out)
	return func(lines []string) string {
		for _, line := range lines {
			_, err := fmt.Fprintf(in, "cat <<'LINE'\n$ %sLINE\n%s", line, line)
			require.NoError(t, err)
		}
		_, err := fmt.Fprintln(in, "echo THAT IS ALL")
		require.NoError(t, err)
		var text strings.Builder
		for seen.Scan() && seen.Text() != "THAT IS ALL" {
			text.WriteString(seen.Text() + "\n")
		}
		return text.String()
	}
}

// free is an address at which nobody listens, and which no connection gets by chance.
func free(t *testing.T) string {
	for {
		address := fmt.Sprint("localhost:", 20_000+rand.N(10_000))
		if l, err := net.Listen("tcp", address); err == nil {
			require.NoError(t, l.Close())
			return address
		}
	}
}
