// Package listing finds the statements that a package sends, for the tests that compare them with a listing.
package listing

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/onceq/onceq"

type statement struct{ name, text string }

// Compare compares the statements of the packages in some folders of the module, whose top folder is root, with the listing
// in a file, or writes it if update says so. Statements that are not constants must be in built, each under the name of what
// builds it.
func Compare(t *testing.T, root string, folders []string, built map[string]string, file string, update bool) {
	var b strings.Builder
	b.WriteString("-- Every statement, as Postgres gets it. Written by: go test -run TestStatements . -update\n")
	for _, s := range of(t, root, folders, built) {
		fmt.Fprintf(&b, "\n-- %s\n%s;\n", s.name, strings.TrimSpace(s.text))
	}
	if update {
		require.NoError(t, os.WriteFile(file, []byte(b.String()), 0o600))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), b.String())
}

// begins matches how a statement begins.
var begins = regexp.MustCompile(`^\s*(with\s|select\s|insert into\s|update\s|delete from\s|set local\s|begin\b|rollback\b|listen\s)`)

// of finds the statements in the source: strings that begin as a statement does and are not merely part of another one.
func of(t *testing.T, root string, folders []string, built map[string]string) (all []statement) {
	c := collector{t: t, root: root, built: built, known: maps.Clone(built), packages: make(map[string]*types.Package),
		declared: make(map[types.Object]statement), whole: make(map[types.Object]bool)}
	for _, folder := range folders {
		c.collect(folder)
	}
	for o, s := range c.declared {
		if c.whole[o] {
			c.all = append(c.all, s)
		}
	}
	require.Empty(t, slices.Sorted(maps.Keys(c.known)), "of built, nobody sends these")
	slices.SortFunc(c.all, func(a, b statement) int { return strings.Compare(a.name+a.text, b.name+b.text) })
	return c.all
}

type collector struct {
	t            *testing.T
	root         string
	built, known map[string]string // what is not constant, and what of that was not found yet
	packages     map[string]*types.Package
	all          []statement
	declared     map[types.Object]statement
	whole        map[types.Object]bool // used in another way than as a part
}

// check parses and checks the package in a folder.
func (c *collector) check(folder string) (fset *token.FileSet, files []*ast.File, info *types.Info) {
	fset = token.NewFileSet()
	names, err := filepath.Glob(filepath.Join(c.root, folder, "*.go"))
	require.NoError(c.t, err)
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, 0)
		require.NoError(c.t, err)
		files = append(files, f)
	}
	info = &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	c.packages[folder], _ = (&types.Config{Error: func(error) {}, Importer: c}).Check(folder, fset, files, info)
	return fset, files, info
}

// Import gives the package table. Constants need no other one, so missing ones do not matter.
func (c *collector) Import(path string) (*types.Package, error) {
	folder := strings.TrimPrefix(path, module+"/")
	if c.packages[folder] != nil {
		return c.packages[folder], nil
	}
	if folder == "internal/table" {
		c.check(folder)
		return c.packages[folder], nil
	}
	p := types.NewPackage(path, path[strings.LastIndex(path, "/")+1:])
	p.MarkComplete()
	return p, nil
}

// collect collects the statements of one package.
func (c *collector) collect(folder string) {
	fset, files, info := c.check(folder)
	for _, f := range files {
		file := filepath.Base(fset.Position(f.Pos()).Filename)
		var path []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			if n == nil {
				path = path[:len(path)-1]
				return true
			}
			path = append(path, n)
			e, ok := n.(ast.Expr)
			if !ok || isPart(path) {
				return true
			}
			if o := used(info, e); o != nil {
				c.whole[o] = true
				return true
			}
			if _, ok := e.(*ast.Ident); !ok {
				c.expression(info, file, path, e)
			}
			return true
		})
	}
}

// used gives the object that an expression names, alone or of a package.
func used(info *types.Info, e ast.Expr) types.Object {
	switch e := e.(type) {
	case *ast.Ident:
		return info.Uses[e]
	case *ast.SelectorExpr:
		if o, ok := info.Uses[e.Sel].(*types.Const); ok {
			return o
		}
	}
	return nil
}

// expression collects an expression if it is a statement.
func (c *collector) expression(info *types.Info, file string, path []ast.Node, e ast.Expr) {
	text, constant := opening(info, e)
	if !begins.MatchString(text) {
		return
	}
	name, o := nameOf(info, path)
	switch {
	case !constant:
		found := false
		for key, text := range c.built {
			if key != name && !strings.HasPrefix(key, name+" ") {
				continue
			}
			found = true
			if _, first := c.known[key]; first {
				c.all = append(c.all, statement{file + ": " + key, text})
				delete(c.known, key)
			}
		}
		require.True(c.t, found, "%s: %s is no constant; name it in built", file, name)
	case o != nil:
		c.declared[o] = statement{file + ": " + name, text}
	default:
		c.all = append(c.all, statement{file + ": " + name, text})
	}
}

// isPart says whether the last node of the path is an operand of a concatenation.
func isPart(path []ast.Node) bool {
	for i := len(path) - 2; i >= 0; i-- {
		switch parent := path[i].(type) {
		case *ast.ParenExpr, *ast.SelectorExpr:
			continue
		case *ast.BinaryExpr:
			return parent.Op == token.ADD
		}
		return false
	}
	return false
}

// opening returns a string constant, or the beginning of an expression that is not constant.
func opening(info *types.Info, e ast.Expr) (text string, whole bool) {
	if v := info.Types[e].Value; v != nil {
		if v.Kind() != constant.String {
			return "", false
		}
		return constant.StringVal(v), true
	}
	if sum, ok := e.(*ast.BinaryExpr); ok && sum.Op == token.ADD {
		text, _ = opening(info, sum.X)
	}
	return text, false
}

// nameOf names what is at the end of the path, and returns the constant that it declares, if it declares one.
func nameOf(info *types.Info, path []ast.Node) (name string, o types.Object) {
	for depth, n := range path {
		switch n := n.(type) {
		case *ast.FuncDecl:
			name = n.Name.Name
		case *ast.ValueSpec:
			for i, v := range n.Values {
				if v == path[depth+1] {
					if c, ok := info.Defs[n.Names[i]].(*types.Const); ok {
						o = c
					}
					name = strings.TrimPrefix(name+"."+n.Names[i].Name, ".")
				}
			}
		}
	}
	return name, o
}
