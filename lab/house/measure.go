package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// value is what was measured, and where the worst of it is.
type value struct {
	n     int
	where string
}

// helpers are the packages under internal that only tests import.
var helpers = []string{"conformance", "exampletb", "leaks", "listing", "pgserver", "plans", "tests"}

// numbered are the packages whose exported numbers somebody has tuned.
var numbered = []string{"internal/table/", "internal/pg/", "internal/reap/", "internal/paused/", "internal/rhythm/", "internal/cursor/", "internal/claimer/", "internal/plan/", "internal/promoter/", "internal/enqueue/", "internal/fence/",
	"internal/finish/", "internal/task/", "internal/outbox/", "internal/executor/"}

// source is one file of the library: neither a test nor a test's helper.
type source struct {
	path string // from the root, as in "internal/lazytx/rows.go"
	text []byte
	file *ast.File
	set  *token.FileSet
}

func (s source) inRoot() bool { return !strings.Contains(s.path, "/") }

// lines is how many lines of the file a node has.
func (s source) lines(n ast.Node) int {
	return s.set.Position(n.End()).Line - s.set.Position(n.Pos()).Line + 1
}

func measure(root string) (map[string]value, error) {
	sources, err := read(root)
	if err != nil {
		return nil, err
	}
	all := make(map[string]value)
	sizes(all, sources)
	shapes(all, sources)
	types(all, sources)
	texts(all, sources)
	if err := statements(all, root); err != nil {
		return nil, err
	}
	return all, folder(all, root)
}

// read parses the files of the root package, of onceqops and of the packages under internal, without tests and what serves tests alone.
func read(root string) ([]source, error) {
	var sources []source
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := filepath.ToSlash(strings.TrimPrefix(strings.TrimPrefix(path, root), string(filepath.Separator)))
		if entry.IsDir() {
			if rel == "" || rel == "internal" || rel == "onceqops" || strings.HasPrefix(rel, "internal/") && !slices.Contains(helpers, filepath.Base(rel)) {
				return nil
			}
			return filepath.SkipDir
		}
		if !strings.HasSuffix(rel, ".go") || strings.HasSuffix(rel, "_test.go") {
			return nil
		}
		s := source{path: rel, set: token.NewFileSet()}
		if s.text, err = os.ReadFile(path); err != nil {
			return err
		}
		s.file, err = parser.ParseFile(s.set, rel, s.text, parser.ParseComments)
		sources = append(sources, s)
		return err
	})
	return sources, err
}

// sizes counts lines and files.
func sizes(all map[string]value, sources []source) {
	var rootLines, rootFiles, lines, wide value
	comments, code := 0, 0
	for _, s := range sources {
		n := bytes.Count(s.text, []byte("\n"))
		lines.n += n
		if s.inRoot() {
			rootFiles.n++
			rootLines.n += n
		}
		for line := range bytes.Lines(s.text) {
			switch trimmed := bytes.TrimSpace(line); {
			case bytes.HasPrefix(trimmed, []byte("//")):
				comments++
			case len(trimmed) > 0:
				code++
			}
			if len([]rune(strings.ReplaceAll(strings.TrimRight(string(line), "\n"), "\t", "    "))) > 110 {
				wide.n++
			}
		}
	}
	wide.where = fmt.Sprintf("%.1f%% of all lines", 100*float64(wide.n)/float64(max(1, lines.n)))
	lines.where = fmt.Sprintf("%.2f lines of comment for one of code", float64(comments)/float64(max(1, code)))
	all["lines of the root package"], all["files of the root package"] = rootLines, rootFiles
	all["lines of root, internal and onceqops"], all["lines over 110 columns"] = lines, wide
}

// shapes measures functions.
func shapes(all map[string]value, sources []source) {
	var worst, over, long value
	longest := 0
	for _, s := range sources {
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			c := complexity(f.Body)
			if c > worst.n {
				worst = value{c, f.Name.Name + " in " + s.path}
			}
			if c > 15 {
				over.n++
			}
			if n := s.lines(f); n > 70 {
				long.n++
				if n > longest {
					longest, long.where = n, fmt.Sprintf("%s in %s has %d", f.Name.Name, s.path, n)
				}
			}
		}
	}
	all["complexity of the worst function"], all["functions of a complexity over 15"] = worst, over
	all["functions over 70 lines"] = long
}

// complexity is the cyclomatic complexity: one more than the places where a function decides (McCabe, 1976).
func complexity(body ast.Node) int {
	n := 1
	ast.Inspect(body, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if node.List != nil {
				n++
			}
		case *ast.CommClause:
			if node.Comm != nil {
				n++
			}
		case *ast.BinaryExpr:
			if node.Op == token.LAND || node.Op == token.LOR {
				n++
			}
		}
		return true
	})
	return n
}

// types measures the package's face, the large structs, and the numbers that somebody has tuned.
func types(all map[string]value, sources []source) {
	var exported, methods, largest, constants value
	fields := make(map[string]int)
	for _, s := range sources {
		for _, d := range s.file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if s.inRoot() && d.Recv == nil && d.Name.IsExported() {
					exported.n++
				}
				if s.inRoot() && receiver(d) == "Queue" {
					methods.n++
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						if s.inRoot() && spec.Name.IsExported() {
							exported.n++
						}
						if t, ok := spec.Type.(*ast.StructType); ok {
							n := count(t)
							if s.inRoot() {
								fields[spec.Name.Name] = n
							}
							if !spec.Name.IsExported() && n > largest.n {
								largest = value{n, spec.Name.Name + " in " + s.path}
							}
						}
					case *ast.ValueSpec:
						for i, name := range spec.Names {
							if s.inRoot() && name.IsExported() {
								exported.n++
							}
							if d.Tok == token.CONST && (!name.IsExported() || slices.ContainsFunc(numbered, func(room string) bool { return strings.HasPrefix(s.path, room) })) && i < len(spec.Values) && isNumber(spec.Values[i]) {
								constants.n++
							}
						}
					}
				}
			}
		}
	}
	all["exported names at the top level"], all["methods of Queue"] = exported, methods
	all["fields of Queue"], all["fields of Lease"] = value{n: fields["Queue"]}, value{n: fields["Lease"]}
	all["fields of the largest unexported struct"], all["tuning constants"] = largest, constants
}

func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	t := f.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	name, _ := t.(*ast.Ident)
	if name == nil {
		return ""
	}
	return name.Name
}

func count(t *ast.StructType) (n int) {
	for _, f := range t.Fields.List {
		n += max(1, len(f.Names))
	}
	return n
}

// isNumber reports whether a constant is a number that somebody chose: a literal, or a sum or a product with one. A state's
// number and a bit are none.
func isNumber(e ast.Expr) bool {
	number := false
	ast.Inspect(e, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.Ident:
			number = number && node.Name != "iota"
			if node.Name == "iota" {
				return false
			}
		case *ast.BasicLit:
			number = number || node.Kind == token.INT || node.Kind == token.FLOAT
		}
		return true
	})
	if uses(e, "iota") || shifts(e) {
		return false
	}
	return number
}

func uses(e ast.Expr, name string) (found bool) {
	ast.Inspect(e, func(node ast.Node) bool {
		id, ok := node.(*ast.Ident)
		found = found || ok && id.Name == name
		return !found
	})
	return found
}

func shifts(e ast.Expr) bool {
	b, ok := e.(*ast.BinaryExpr)
	return ok && b.Op == token.SHL
}

// texts counts the calls that look for something in a text or replace it there, which is how a statement is patched.
func texts(all map[string]value, sources []source) {
	var patched value
	for _, s := range sources {
		ast.Inspect(s.file, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok {
				return true
			}
			f, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			from, ok := f.X.(*ast.Ident)
			if ok && from.Name == "strings" && slices.Contains([]string{"Replace", "ReplaceAll", "NewReplacer", "Index"}, f.Sel.Name) {
				patched.n++
			}
			return true
		})
	}
	all["calls that look or replace in texts"] = patched
}

var statementHead = regexp.MustCompile(`(?m)^-- \S+\.go: .*$`)

// statementFiles are the listings of all statements.
var statementFiles = []string{"internal/tests/testdata/statements.sql", "internal/tests/testdata/onceqops.sql"}

// statements measures the listing of all statements, and the migrations.
func statements(all map[string]value, root string) error {
	var count, lines value
	var bodies [][]string
	for _, name := range statementFiles {
		listing, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return err
		}
		for _, text := range statementHead.Split(string(listing), -1)[1:] {
			body := strings.Split(strings.TrimSpace(text), "\n")
			count.n++
			lines.n += len(body)
			bodies = append(bodies, normal(body))
		}
	}
	all["statements in Go"], all["lines of statements in Go"] = count, lines
	all["groups of near-copies among statements"] = nearCopies(bodies)
	var sql value
	files, err := filepath.Glob(filepath.Join(root, "migrations", "*.sql"))
	if err != nil {
		return err
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		sql.n += bytes.Count(raw, []byte("\n"))
	}
	all["lines of SQL in migrations"] = sql
	return nil
}

var parameter = regexp.MustCompile(`\$\d+`)

// normal makes lines that differ in the numbers of parameters and in spaces the same.
func normal(body []string) []string {
	var lines []string
	for _, line := range body {
		if line = parameter.ReplaceAllString(strings.Join(strings.Fields(line), " "), "$$"); line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// nearCopies counts the groups of statements of at least eight lines that have 60% of their lines in common.
func nearCopies(bodies [][]string) value {
	bodies = slices.DeleteFunc(bodies, func(b []string) bool { return len(b) < 8 })
	group := make([]int, len(bodies))
	for i := range group {
		group[i] = i
	}
	for i, a := range bodies {
		for j, b := range bodies[:i] {
			if group[i] != group[j] && 10*common(a, b) >= 6*max(len(a), len(b)) {
				for k, g := range group {
					if g == group[i] && k != i {
						group[k] = group[j]
					}
				}
				group[i] = group[j]
			}
		}
	}
	sizes := make(map[int]int)
	for _, g := range group {
		sizes[g]++
	}
	var v value
	most, in := 0, 0
	for _, n := range sizes {
		if n > 1 {
			v.n++
			in += n
			most = max(most, n)
		}
	}
	v.where = fmt.Sprintf("%d statements, the largest group %d", in, most)
	return v
}

func common(a, b []string) (n int) {
	times := make(map[string]int)
	for _, line := range a {
		times[line]++
	}
	for _, line := range b {
		if times[line] > 0 {
			times[line]--
			n++
		}
	}
	return n
}

// folder counts what stands in the top folder.
func folder(all map[string]value, root string) error {
	out, err := exec.Command("git", "-C", root, "ls-tree", "--name-only", "HEAD").Output()
	if err != nil {
		return fmt.Errorf("git ls-tree: %w", err)
	}
	all["entries of the top folder"] = value{n: strings.Count(string(out), "\n")}
	return nil
}
