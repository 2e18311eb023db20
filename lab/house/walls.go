package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

const (
	wallsFile = "walls.txt"
	module    = "github.com/onceq/onceq"
)

// readWalls reads which packages of this module each package may import.
func readWalls(file string) (map[string][]string, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	walls := make(map[string][]string)
	for line := range strings.Lines(string(raw)) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, may, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("%s: %q is not of the form \"package: what it may import\"", file, line)
		}
		walls[name] = strings.Fields(may)
	}
	return walls, nil
}

// imports lists which packages of this module each package of it imports, without its tests.
func imports(root string) (map[string][]string, error) {
	all := make(map[string][]string)
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if entry.IsDir() {
			if _, err := os.Stat(filepath.Join(file, "go.mod")); err == nil && rel != "." || strings.HasPrefix(rel, ".") && rel != "." || entry.Name() == "testdata" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(rel, ".go") || strings.HasSuffix(rel, "_test.go") {
			return nil
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		pkg := path.Dir(rel)
		for _, s := range parsed.Imports {
			name := strings.Trim(s.Path.Value, `"`)
			if name != module && !strings.HasPrefix(name, module+"/") {
				continue
			}
			if name = strings.TrimPrefix(strings.TrimPrefix(name, module), "/"); name == "" {
				name = "."
			}
			if !slices.Contains(all[pkg], name) {
				all[pkg] = append(all[pkg], name)
			}
		}
		if _, ok := all[pkg]; !ok {
			all[pkg] = nil
		}
		return nil
	})
	return all, err
}
