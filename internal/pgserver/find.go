package pgserver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
)

// places are the directories where distributions and installers put server binaries. Debian, for example, keeps them
// off PATH so that several versions can be installed together.
var places = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/libexec/postgresql*",
	"/opt/homebrew/opt/postgresql*/bin",
	"/opt/homebrew/bin",
	"/usr/local/opt/postgresql*/bin",
	"/usr/local/pgsql/bin",
	"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// findBinaries returns the directory with initdb and postgres: that of ONCEQ_TEST_PGBIN, or the one with the newest
// server. It returns "" if there is none.
func findBinaries(ctx context.Context) (string, error) {
	if dir := os.Getenv(EnvBin); dir != "" {
		dir, err := filepath.Abs(dir)
		if err != nil {
			return "", fmt.Errorf("pgserver: %s: %w", EnvBin, err)
		}
		if _, err := binariesVersion(ctx, dir); err != nil {
			return "", fmt.Errorf("pgserver: %s=%s must be a directory with initdb and postgres: %w", EnvBin, dir, err)
		}
		return dir, nil
	}

	best, newest := "", 0
	for _, dir := range candidates(ctx) {
		version, err := binariesVersion(ctx, dir)
		if err == nil && version > newest {
			best, newest = dir, version
		}
	}
	return best, nil
}

// candidates returns the directories to look into, each once.
func candidates(ctx context.Context) []string {
	var dirs []string
	if path, err := exec.LookPath("postgres"); err == nil {
		// A link to the program is not enough: initdb is in the directory of the program itself.
		if path, err = filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(path))
		}
	}
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, place := range places {
		matches, _ := filepath.Glob(place) // fails only on a bad pattern
		dirs = append(dirs, matches...)
	}

	seen := make(map[string]bool)
	unique := dirs[:0]
	for _, dir := range dirs {
		if real, err := filepath.EvalSymlinks(dir); err == nil && filepath.IsAbs(real) && !seen[real] {
			seen[real] = true
			unique = append(unique, real)
		}
	}
	return unique
}

// versionPattern finds the version in "postgres (PostgreSQL) 15.18 (Debian …)", "… 19beta1" and "… 19devel".
var versionPattern = regexp.MustCompile(`\(PostgreSQL\) (\d+)(?:\.(\d+))?`)

// binariesVersion returns the version of the server in a directory, as in server_version_num.
func binariesVersion(ctx context.Context, dir string) (int, error) {
	if _, err := exec.LookPath(executable(dir, "initdb")); err != nil {
		return 0, err
	}
	out, err := exec.CommandContext(ctx, executable(dir, "postgres"), "--version").Output()
	if err != nil {
		return 0, err
	}
	match := versionPattern.FindSubmatch(out)
	if match == nil {
		return 0, fmt.Errorf("postgres --version answered %q", out)
	}
	major, err := strconv.Atoi(string(match[1]))
	if err != nil {
		return 0, err
	}
	minor, _ := strconv.Atoi(string(match[2])) // a beta has no minor version
	return major*10000 + minor, nil
}

func executable(dir, name string) string {
	if runtime.GOOS == "windows" {
		name += ".exe"
	}
	return filepath.Join(dir, name)
}
