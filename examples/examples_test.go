package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/queuetest"
)

// Each example is a program of its own. It must print what stands behind "// Output:" at its end.
func TestPrograms(t *testing.T) {
	t.Parallel()
	programs, err := filepath.Glob("*/main.go")
	require.NoError(t, err)
	bin := t.TempDir()
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", bin+"/", "./first", "./transaction", "./batch", "./strict", "./effect", "./result", "./http")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	ran := 0
	for _, program := range programs {
		source, err := os.ReadFile(program)
		require.NoError(t, err)
		_, want, ok := strings.Cut(string(source), "\n// Output:\n")
		if !ok {
			continue
		}
		ran++
		name := filepath.Dir(program)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.NoMigrations())
			cmd := exec.Command(filepath.Join(bin, name))
			cmd.Env = append(os.Environ(), "DATABASE_URL="+db.URL)
			var log strings.Builder
			cmd.Stderr = &log
			got, err := cmd.Output()
			require.NoError(t, err, "%s\n%s", got, &log)
			want := regexp.MustCompile(`(?m)^// ?`).ReplaceAllString(want, "")
			require.Equal(t, strings.TrimSpace(want), strings.TrimSpace(string(got)))
		})
	}
	require.Equal(t, 7, ran)
}

// The first program of the README is examples/first, word for word.
func TestFirstProgramOfTheReadme(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("first/main.go")
	require.NoError(t, err)
	program, _, _ := strings.Cut(string(source), "\n// Output:\n")
	block := regexp.MustCompile("(?s)```go\n(package main.*?)```").FindSubmatch(readme)
	require.NotNil(t, block, "the README has no program")
	require.Equal(t, strings.TrimSpace(program), strings.TrimSpace(string(block[1])))
}
