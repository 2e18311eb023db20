// Package old runs what an application moves away from: a redis-server, and programs in Node. It is for tests, which are
// skipped on machines that have neither. make modules installs both.
package old

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// whileOpen runs a program until its own standard input ends, so it never lives longer than the test process.
const whileOpen = `"$@" & pid=$!; exec >&-; read -r _; kill "$pid"; wait "$pid"`

// Redis starts a server for the test and returns the path of its socket.
func Redis(t *testing.T) string {
	t.Helper()
	bin := os.Getenv("ONCEQ_TEST_REDIS") // scripts/redis.sh
	if bin == "" {
		var err error
		if bin, err = exec.LookPath("redis-server"); err != nil {
			t.Skip("no redis-server on this machine; make modules installs it")
		}
	}
	dir, err := os.MkdirTemp("", "onceq-redis-") // a socket's path must be short
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	server := start(t, exec.Command("sh", "-c", whileOpen, "sh", bin, "--port", "0", "--unixsocket", socket,
		"--dir", dir, "--save", "", "--appendonly", "no"))
	for !strings.Contains(server.Next(), "ready to accept connections at") {
	}
	return socket
}

// Node runs a program of the test's directory, with the packages of examples/moving/package.json.
func Node(t *testing.T, program string, args, env []string) *Program {
	t.Helper()
	packages := os.Getenv("ONCEQ_TEST_NODE") // scripts/node-packages.sh
	if packages == "" {
		out, err := exec.Command("../../../scripts/node-packages.sh").Output()
		if packages = strings.TrimSpace(string(out)); err != nil || packages == "" {
			t.Skip("no Node packages on this machine: npm is missing, or a registry")
		}
	}
	dir := t.TempDir() // Node looks for packages beside the program
	require.NoError(t, os.Symlink(filepath.Join(packages, "node_modules"), filepath.Join(dir, "node_modules")))
	sources, err := filepath.Glob("*.mjs")
	require.NoError(t, err)
	for _, name := range sources {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), source, 0o600))
	}
	cmd := exec.Command(filepath.Join(packages, "bin", "node"), append([]string{filepath.Join(dir, program)}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	return start(t, cmd)
}

// Program is a child process that ends when its standard input does.
type Program struct {
	t      *testing.T
	cmd    *exec.Cmd
	in     io.Closer
	out    *bufio.Reader
	log    bytes.Buffer // standard error; read after the process has ended
	ended  bool
	failed error
}

func start(t *testing.T, cmd *exec.Cmd) *Program {
	t.Helper()
	p := &Program{t: t, cmd: cmd}
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	p.in, p.out = in, bufio.NewReader(out)
	cmd.Stderr = &p.log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { p.end() })
	return p
}

// Next returns the next line that the program prints.
func (p *Program) Next() string {
	p.t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		p.end()
		p.t.Fatalf("%s ended: %v\n%s", p.cmd, p.failed, &p.log)
	}
	return strings.TrimSuffix(line, "\n")
}

// Rest lets the program end and returns what it has printed since the last Next.
func (p *Program) Rest() string {
	p.t.Helper()
	rest := p.end()
	require.NoError(p.t, p.failed, "%s\n%s", p.cmd, &p.log)
	return rest
}

func (p *Program) end() string {
	if p.ended {
		return ""
	}
	p.ended = true
	_ = p.in.Close()
	rest, _ := io.ReadAll(p.out)
	p.failed = p.cmd.Wait()
	return string(rest)
}
