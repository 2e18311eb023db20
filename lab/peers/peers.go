// Package peers gets what other queues run on, for bench and once: Node with its packages, and a Redis.
package peers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// Node is where some Node packages are, and with which program they run.
type Node struct {
	Dir, Program, Version string
}

// InstallNode fetches the packages that package.json of files names into the user's cache directory, once, and puts the
// other files beside them. name is whose they are.
func InstallNode(ctx context.Context, name string, files fs.FS) (*Node, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	wanted, err := fs.ReadFile(files, "package.json")
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(wanted)
	n := &Node{Dir: filepath.Join(cache, "onceq", name+"-node-"+hex.EncodeToString(sum[:6]))}
	if err := os.MkdirAll(n.Dir, 0o755); err != nil {
		return nil, err
	}
	all, err := fs.Glob(files, "*")
	if err != nil {
		return nil, err
	}
	for _, file := range all {
		text, err := fs.ReadFile(files, file)
		if err == nil {
			err = os.WriteFile(filepath.Join(n.Dir, file), text, 0o644)
		}
		if err != nil {
			return nil, err
		}
	}
	done := filepath.Join(n.Dir, "installed")
	if _, err := os.Stat(done); err != nil {
		npm, err := exec.LookPath("npm")
		if err != nil {
			return nil, errors.New("no npm on PATH (Debian: apt-get install npm)")
		}
		fmt.Fprintf(os.Stderr, "%s: fetching the Node packages into %s\n", name, n.Dir)
		cmd := exec.CommandContext(ctx, npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
		cmd.Dir = n.Dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("npm install: %w: %s", err, LastLine(string(out)))
		}
		if err := os.WriteFile(done, nil, 0o644); err != nil {
			return nil, err
		}
	}
	// pg-boss wants a newer Node than many a distribution has.
	arch := map[string]string{"amd64": "x64", "arm64": "arm64"}[runtime.GOARCH]
	n.Program = filepath.Join(n.Dir, "node_modules", "node-"+runtime.GOOS+"-"+arch, "bin", "node")
	if _, err := os.Stat(n.Program); err != nil {
		if n.Program, err = exec.LookPath("node"); err != nil {
			return nil, errors.New("no node on PATH (Debian: apt-get install nodejs)")
		}
	}
	out, err := exec.CommandContext(ctx, n.Program, "--version").Output()
	n.Version = strings.TrimSpace(string(out))
	return n, err
}

// Command runs one of the files.
func (n *Node) Command(file string, args ...string) *exec.Cmd {
	cmd := exec.Command(n.Program, append([]string{filepath.Join(n.Dir, file)}, args...)...)
	cmd.Dir = n.Dir
	return cmd
}

// PackageVersion is the version of one of the packages.
func (n *Node) PackageVersion(name string) string {
	var p struct{ Version string }
	raw, err := os.ReadFile(filepath.Join(n.Dir, "node_modules", name, "package.json"))
	if err != nil || json.Unmarshal(raw, &p) != nil {
		return "unknown"
	}
	return p.Version
}

// Redis is the Redis of the queues that need one.
type Redis struct {
	Process *os.Process
	Socket  string
	Version string
	cmd     *exec.Cmd
}

// StartRedis starts a redis-server without persistence: what Redis peers report is not on disk when it is done.
func StartRedis(dir string) (*Redis, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, errors.New("no redis-server on PATH (Debian: apt-get install redis-server)")
	}
	out, err := exec.Command(path, "--version").Output()
	if err != nil {
		return nil, err
	}
	r := &Redis{Socket: filepath.Join(dir, "redis.sock")}
	if _, rest, ok := strings.Cut(string(out), "v="); ok {
		r.Version = strings.Fields(rest)[0]
	}
	r.cmd = exec.Command(path, "--port", "0", "--unixsocket", r.Socket, "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction")
	r.cmd.Dir = dir
	if err := r.cmd.Start(); err != nil {
		return nil, err
	}
	r.Process = r.cmd.Process
	for range 100 {
		if _, err := os.Stat(r.Socket); err == nil {
			return r, nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	r.Stop()
	return nil, errors.New("redis-server did not start")
}

// Stop ends it.
func (r *Redis) Stop() {
	_ = r.cmd.Process.Kill()
	_ = r.cmd.Wait()
}

// LastLine is the last line of what a program said.
func LastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
