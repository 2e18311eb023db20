package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// A Go program asks the kernel for the time and uses no library that could be replaced, and Linux's time namespaces do not
// shift the wall clock. So this program is built a second time, with a time.Now that adds the seconds in this variable.
// Everything in that process sees the shifted clock.
const skewEnv = "ONCEQ_TORTURE_SKEW"

const skewSource = `package time

import "syscall"

var tortureSkew = func() int64 {
	s, _ := syscall.Getenv("` + skewEnv + `")
	n, _ := atoi(s)
	return int64(n)
}()
`

const day = 24 * time.Hour

// skewOf is how wrong the clock of a process is, the first and the fourth of each role: one is a day ahead, the other a day behind.
func skewOf(n int) time.Duration { return map[int]time.Duration{0: day, 3: -day}[n] }

// buildSkewed builds this program with the shifted clock and checks that the clock is shifted.
func buildSkewed(ctx context.Context, dir string) (exe string, err error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return "", err
	}
	original := filepath.Join(strings.TrimSpace(string(out)), "src", "time", "time.go")
	source, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}
	const now = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	if strings.Count(string(source), now) != 1 {
		return "", fmt.Errorf("time.Now of %s is another one than this program knows", runtime.Version())
	}
	shifted := filepath.Join(dir, "time.go")
	extra := filepath.Join(dir, "skew.go")
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{
		original: shifted,
		filepath.Join(filepath.Dir(original), "torture_skew.go"): extra,
	}})
	if err != nil {
		return "", err
	}
	list := filepath.Join(dir, "overlay.json")
	if err := errors.Join(
		os.WriteFile(shifted, []byte(strings.Replace(string(source), now, now+"\tsec += tortureSkew\n", 1)), 0o644),
		os.WriteFile(extra, []byte(skewSource), 0o644),
		os.WriteFile(list, overlay, 0o644)); err != nil {
		return "", err
	}
	exe = filepath.Join(dir, "skewed")
	if out, err := exec.CommandContext(ctx, "go", "build", "-overlay", list, "-o", exe, "github.com/onceq/onceq/lab/torture").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = append(os.Environ(), skewEnv+fmt.Sprintf("=%.0f", day.Seconds()), childEnv+`={"Role":"clock"}`)
	if out, err = cmd.Output(); err != nil {
		return "", err
	}
	says, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
	if err != nil {
		return "", err
	}
	if ahead := time.Until(time.Unix(says, 0)); ahead < day-time.Minute || ahead > day+time.Minute {
		return "", fmt.Errorf("a clock that should be a day ahead is %s", ahead)
	}
	return exe, nil
}
