package onceq

import (
	"flag"
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
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write docs/statements.sql anew")

// built has the statements that are not constants, each under the name of what builds it.
var built = map[string]string{
	"retryJobs":               retryJobs,
	"redriveJobs":             redriveJobs,
	"takeFence":               takeFence,
	"discardJobs":             discardJobs,
	"resolveEffects":          resolveEffects,
	"readEffects":             readEffects,
	"reapOrphans":             reapOrphans,
	"reapHistory":             reapHistory,
	"checkTx":                 checkTx,
	"inTx completeOne":        inTx[completeOne],
	"inTx completeOneKept":    inTx[completeOneKept],
	"inTx completeOneUnkeyed": inTx[completeOneUnkeyed],
	"statement":               statementOf(&Filter{Limit: 1}),
	"statement of all":        statementOf(&Filter{Limit: 1, Queue: "q", Kind: "k", Scope: "s"}),
	"statement of states":     statementOf(&Filter{Limit: 1, States: []State{StateWaiting, StateDead}}),
	"listenOnce":              "listen …",
	"ids":                     "select id from (…) page order by id desc", // built by Filter.statement
	"committed":               "rollback; select pg_xact_status('…')",
	"share":                   "set local idle_in_transaction_session_timeout to …",
}

func statementOf(f *Filter) string {
	s, _ := f.statement()
	return s
}

// Every statement that this package sends stands whole in docs/statements.sql, as Postgres gets it. A changed statement
// shows there. A statement that runs for every job changes only together with a measurement.
//
//	go test -run TestStatements . -update
func TestStatements(t *testing.T) {
	const file = "docs/statements.sql"
	var b strings.Builder
	b.WriteString("-- Every statement of this package, as Postgres gets it. Written by: go test -run TestStatements . -update\n")
	for _, s := range statements(t) {
		fmt.Fprintf(&b, "\n-- %s\n%s;\n", s.name, strings.TrimSpace(s.text))
	}
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(b.String()), 0o600))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), b.String())
}

type namedStatement struct{ name, text string }

// begins matches how a statement begins.
var begins = regexp.MustCompile(`^\s*(with\s|select\s|insert into\s|update\s|delete from\s|set local\s|begin\b|rollback\b|listen\s)`)

// statements finds the statements in the source: strings that begin as a statement does and are not merely part of another
// one. Statements that are not constants must be in built.
func statements(t *testing.T) (all []namedStatement) {
	known := maps.Clone(built)
	for _, dir := range []string{".", "internal/lazytx"} {
		all = append(all, statementsOf(t, dir, known)...)
	}
	require.Empty(t, slices.Sorted(maps.Keys(known)), "of built, nobody sends these")
	slices.SortFunc(all, func(a, b namedStatement) int { return strings.Compare(a.name+a.text, b.name+b.text) })
	return all
}

// statementsOf finds the statements of one package, and removes from known what it found in built.
func statementsOf(t *testing.T, dir string, known map[string]string) (all []namedStatement) {
	fset := token.NewFileSet()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, 0)
		require.NoError(t, err)
		files = append(files, f)
	}
	// Constants need no imports, so missing ones do not matter.
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	_, _ = (&types.Config{Error: func(error) {}, Importer: noImports{}}).Check("onceq", fset, files, info)

	declared := map[types.Object]namedStatement{}
	whole := map[types.Object]bool{} // used in another way than as a part
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
			if use, ok := e.(*ast.Ident); ok {
				if o := info.Uses[use]; o != nil {
					whole[o] = true
				}
				return true
			}
			text, constant := opening(info, e)
			if !begins.MatchString(text) {
				return true
			}
			name, o := nameOf(info, path)
			switch {
			case !constant:
				found := false
				for key, text := range built {
					if key != name && !strings.HasPrefix(key, name+" ") {
						continue
					}
					found = true
					if _, first := known[key]; first {
						all = append(all, namedStatement{file + ": " + key, text})
						delete(known, key)
					}
				}
				require.True(t, found, "%s: %s is no constant; name it in built", file, name)
			case o != nil:
				declared[o] = namedStatement{file + ": " + name, text}
			default:
				all = append(all, namedStatement{file + ": " + name, text})
			}
			return true
		})
	}
	for o, s := range declared {
		if whole[o] {
			all = append(all, s)
		}
	}
	return all
}

// isPart says whether the last node of the path is an operand of a concatenation.
func isPart(path []ast.Node) bool {
	for i := len(path) - 2; i >= 0; i-- {
		switch parent := path[i].(type) {
		case *ast.ParenExpr:
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

type noImports struct{}

func (noImports) Import(path string) (*types.Package, error) {
	p := types.NewPackage(path, path[strings.LastIndex(path, "/")+1:])
	p.MarkComplete()
	return p, nil
}

// Statements that are written whole, and the migration, use the same numbers as state.go.
func TestStates_SQLHasTheNumbersOfGo(t *testing.T) {
	migration, err := os.ReadFile("migrations/001_onceq.sql")
	require.NoError(t, err)
	taken := func(scope, key, id string) string {
		return fmt.Sprintf("select %d, %s, %s, %d, %s, %s << %d, ", classJob, scope, key, fenceQueued, id, id, tokenBits)
	}
	for _, c := range []struct{ where, text, want string }{
		{"insertKeyed", insertKeyed, taken("$6::text", "$7::text", "n.id")},
		{"insertKeyedInBatch", insertKeyedInBatch, taken("$6::text", "$7::text", "n.id")},
		{"insertKeyedMany", insertKeyedMany, taken("(select scope from header)", "i.key", "i.id")},
		{"take_fence", string(migration), taken("take_fence.scope", "take_fence.key", "n.id")},
		{"take_fence", string(migration), fmt.Sprintf("token = taken << %d, state = %d,", tokenBits, fenceQueued)},
		{"take_fence", string(migration), fmt.Sprintf("where f.class = %d and f.scope = take_fence.scope", classJob)},
		{"take_fence", string(migration), "and " + fenceOver + " and f.lifetime >= 0"},
		{"ids", string(migration), fmt.Sprintf("maxvalue %d;", int64(1)<<(63-tokenBits)-1)},
		{"claimJobs", claimJobs, fmt.Sprintf("claims = least(j.claims + 1, %d)", claimsLimit)},
		{"claimAny", claimAny, fmt.Sprintf("claims = least(j.claims + 1, %d)", claimsLimit)},
		{"completeOne", completeOne, "where " + heldByOne},
		{"completeOne", completeOne, fmt.Sprintf("set state = %d,", fenceCompleted)},
		{"completeOne", completeOne, fenceOfGone},
		{"completeOneUnkeyed", completeOneUnkeyed, "where " + heldByOne},
		{"completeJobs", completeJobs, "where " + heldByEach},
		{"completeJobs", completeJobs, fmt.Sprintf("set state = %d, token = %s,", fenceCompleted, tokenOfGone)},
		{"completeJobs", completeJobs, fenceOfGone},
		{"completeJobs", completeJobs, "array_agg(" + tokenOfRow + ")"},
		{"jobState", jobState, fmt.Sprintf("statement_timestamp() then %d\n", StateRunning)},
		{"jobState", jobState, fmt.Sprintf("is not null then %d\n", StateRetrying)},
		{"jobState", jobState, fmt.Sprintf("statement_timestamp() then %d\n            else %d end", StateDelayed, StateWaiting)},
	} {
		require.Contains(t, c.text, c.want, c.where)
	}
}

// Every number beside a shift or a class, in any statement, is one that state.go has.
func TestStates_NoOtherNumbers(t *testing.T) {
	for _, file := range []string{"docs/statements.sql", "migrations/001_onceq.sql"} {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		shifts := regexp.MustCompile(`(?:<<|>>) (\d+)`).FindAllStringSubmatch(string(raw), -1)
		classes := regexp.MustCompile(`\bclass(?: \+ 0)? (?:=|<>) (\d+)`).FindAllStringSubmatch(string(raw), -1)
		require.NotEmpty(t, shifts)
		require.NotEmpty(t, classes)
		for _, m := range shifts {
			require.Equal(t, strconv.Itoa(tokenBits), m[1], "%s: %s", file, m[0])
		}
		for _, m := range classes {
			n, err := strconv.Atoi(m[1])
			require.NoError(t, err)
			require.Contains(t, []Class{classJob, ClassRequest, classEffect}, Class(n), "%s: %s", file, m[0])
		}
	}
	for n, s := range []string{sqlQueued, sqlClaimed, sqlUncertain, sqlCompleted, sqlDead, sqlCancelled, sqlHeld} {
		require.Equal(t, strconv.Itoa(n), s)
	}
	require.Equal(t, strconv.Itoa(tokenBits), sqlTokenBits)
}
