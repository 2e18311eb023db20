package main

import (
	"go/ast"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestHouse fails when the library has grown beyond a ceiling.
func TestHouse(t *testing.T) {
	measured, err := measure("../..")
	if err != nil {
		t.Fatal(err)
	}
	ceilings, err := readCeilings(ceilingsFile)
	if err != nil {
		t.Fatal(err)
	}
	if len(ceilings) == 0 {
		t.Fatal("there are no ceilings")
	}
	for _, c := range ceilings {
		v, ok := measured[c.name]
		if !ok {
			t.Errorf("%s names %q, which nothing measures", ceilingsFile, c.name)
			continue
		}
		if v.n > c.ceiling {
			t.Errorf("%s: %d, and the ceiling is %d (%s): make it smaller, or raise the ceiling in lab/house/%s and say why in the message of the change",
				c.name, v.n, c.ceiling, v.where, ceilingsFile)
		}
	}
	for name := range measured {
		found := false
		for _, c := range ceilings {
			found = found || c.name == name
		}
		if !found {
			t.Errorf("%q is measured and has no ceiling", name)
		}
	}
}

// TestWalls fails when a package imports one that it may not.
func TestWalls(t *testing.T) {
	walls, err := readWalls(wallsFile)
	if err != nil {
		t.Fatal(err)
	}
	found, err := imports("../..")
	if err != nil {
		t.Fatal(err)
	}
	for pkg, uses := range found {
		may, ok := walls[pkg]
		if !ok {
			t.Errorf("lab/house/%s does not say what package %s may import", wallsFile, pkg)
		}
		for _, other := range uses {
			if !slices.Contains(may, other) {
				t.Errorf("package %s imports %s, which lab/house/%s does not allow", pkg, other, wallsFile)
			}
		}
		for _, other := range may {
			if !slices.Contains(uses, other) {
				t.Errorf("package %s does not import %s, which lab/house/%s allows: take it out there", pkg, other, wallsFile)
			}
		}
	}
	for pkg := range walls {
		if _, ok := found[pkg]; !ok {
			t.Errorf("lab/house/%s has a line for package %s, which does not exist", wallsFile, pkg)
		}
	}
}

// TestPlanIsPure fails when the package that decides what is claimed gets a clock, a goroutine or chance of its own.
func TestPlanIsPure(t *testing.T) {
	sources, err := read("../..")
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	for _, s := range sources {
		if filepath.Dir(s.path) != "internal/plan" {
			continue
		}
		files++
		for _, spec := range s.file.Imports {
			name, _ := strconv.Unquote(spec.Path.Value)
			if !strings.HasPrefix(name, module+"/") && !slices.Contains([]string{"math", "slices", "strings", "time"}, name) {
				t.Errorf("%s imports %s", s.path, name)
			}
		}
		ast.Inspect(s.file, func(node ast.Node) bool {
			what := ""
			switch node := node.(type) {
			case *ast.GoStmt, *ast.SelectStmt, *ast.ChanType, *ast.SendStmt:
				what = "a goroutine or a channel"
			case *ast.SelectorExpr:
				from, _ := node.X.(*ast.Ident)
				if from != nil && from.Name == "time" && !slices.Contains(timeOfPlan, node.Sel.Name) {
					what = "time." + node.Sel.Name
				}
			}
			if what != "" {
				t.Errorf("%s: %s", s.set.Position(node.Pos()), what)
			}
			return true
		})
	}
	if files == 0 {
		t.Error("there is no internal/plan")
	}
}

// timeOfPlan is what internal/plan may use of package time: no clock.
var timeOfPlan = []string{"Time", "Duration", "Microsecond", "Millisecond", "Second", "Minute", "Hour"}
