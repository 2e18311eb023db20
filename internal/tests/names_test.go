package tests

import (
	"fmt"
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/queuetest"
)

// What Postgres finds by a name without a schema can be somebody else's. It searches pg_catalog first, but takes a function or an
// operator with exactly the types of the call before one that fits after a conversion, wherever it is. So every function that has
// arguments is called with its schema, and operators get the types that they are declared with, or their schema.

// syntax are the names in front of a parenthesis that Postgres's grammar knows: nobody can define them.
var syntax = strings.Fields(`all and any array as bit case cast coalesce exists extract filter from greatest in interval lateral least
	not nullif on or over position row select set trim using values where`)

var callOf = regexp.MustCompile(`(^|[^\w.$"%\\])([a-z_][a-z0-9_]*)\(`)

// bare returns the calls in a text of SQL that name no schema. Those without arguments, as count(*), find pg_catalog's. The unnest
// of several arrays is syntax, and Postgres itself gives it pg_catalog.
func bare(text string, functions map[string]bool) (calls []string) {
	for _, m := range callOf.FindAllStringSubmatchIndex(text, -1) {
		name, rest := text[m[4]:m[5]], text[m[1]:]
		switch before := strings.TrimRight(text[:m[4]], " \n"); {
		case !functions[name], slices.Contains(syntax, name), strings.HasSuffix(before, " as"), strings.HasSuffix(before, "function"):
		case strings.HasPrefix(rest, ")"), strings.HasPrefix(rest, "*)"):
		case name == "unnest" && severalArguments(rest):
		default:
			calls = append(calls, text[m[4]:min(len(text), m[1]+40)])
		}
	}
	return calls
}

// severalArguments reports whether there is a comma before the parenthesis is closed.
func severalArguments(rest string) bool {
	depth := 0
	for _, c := range rest {
		switch c {
		case '(', '[':
			depth++
		case ')', ']':
			if depth--; depth < 0 {
				return false
			}
		case ',':
			if depth == 0 {
				return true
			}
		}
	}
	return false
}

// forTests are the internal packages that only tests import.
var forTests = []string{"tests", "conformance", "leaks", "exampletb", "pgserver", "listing", "plans"}

func TestNames_EveryFunctionIsCalledWithItsSchema(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoMigrations())
	rows, err := db.Pool.Query(t.Context(), `select distinct proname::text from pg_proc where pronamespace = 'pg_catalog'::regnamespace`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	functions := make(map[string]bool)
	for _, name := range names {
		functions[name] = true
	}
	require.Equal(t, []string{"unnest($1::text[]) u"}, bare("select count(*), now() from unnest($1::text[]) u", functions))

	for _, statement := range statements(t) {
		require.Empty(t, bare(statement.text, functions), statement.name)
	}
	dirs, err := filepath.Glob("../*")
	require.NoError(t, err)
	dirs = slices.DeleteFunc(dirs, func(dir string) bool { return slices.Contains(forTests, filepath.Base(dir)) })
	for _, literal := range literalsIn(t, append(dirs, append(besides, "../..", "../../onceqops", "../../migrations")...)...) {
		require.Empty(t, bare(literal.text, functions), literal.name)
	}
}

// besides are the packages that have SQL of their own, beside statements.sql and onceqops.sql.
var besides = []string{"../../onceqcron", "../../onceqhttp", "../../onceqsql", "../../onceqweb", "../../cmd/onceq"}

// literalsIn returns what literals finds in the files of these folders, tests apart, with the file as the name.
func literalsIn(t *testing.T, dirs ...string) (all []named) {
	t.Helper()
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		require.NoError(t, err)
		require.NotEmpty(t, files, dir)
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			for _, text := range literals(t, file) {
				all = append(all, named{file, text})
			}
		}
	}
	return all
}

// literals returns the texts of a Go file that look like SQL, and no advice to people.
func literals(t *testing.T, file string) (texts []string) {
	src, err := os.ReadFile(file)
	require.NoError(t, err)
	var s scanner.Scanner
	fset := token.NewFileSet()
	s.Init(fset.AddFile(file, -1, len(src)), src, nil, 0)
	for {
		_, tok, text := s.Scan()
		switch {
		case tok == token.EOF:
			return texts
		case tok == token.STRING && sqlWord.MatchString(text) && !strings.Contains(text, "select pg_terminate_backend"):
			texts = append(texts, text)
		}
	}
}

var sqlWord = regexp.MustCompile(`\b(select|from|where|set|values|with|case)\b|::`)

type named struct{ name, text string }

var wholeStatement = regexp.MustCompile(`^(select|with|insert|update|delete)\b`)

// statements returns those of statements.sql and onceqops.sql that are whole.
func statements(t *testing.T) (all []named) {
	t.Helper()
	for _, file := range []string{"statements.sql", "onceqops.sql"} {
		text, err := os.ReadFile("testdata/" + file)
		require.NoError(t, err)
		all = append(all, statementsIn(string(text))...)
	}
	return all
}

func statementsIn(text string) (all []named) {
	heads := regexp.MustCompile(`(?m)^-- (\S+\.go: .*)$`).FindAllStringSubmatchIndex(text, -1)
	for i, h := range heads {
		end := len(text)
		if i+1 < len(heads) {
			end = heads[i+1][0]
		}
		statement := strings.TrimSuffix(strings.TrimSpace(text[h[1]:end]), ";")
		if wholeStatement.MatchString(statement) {
			all = append(all, named{text[h[2]:h[3]], statement})
		}
	}
	return all
}

// Postgres says what it makes of each statement, in the body of a function: which operator it takes, and whether it converts
// what stands beside it.
func TestNames_EveryOperatorIsTheOneOfItsTypes(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	conn, err := conformance.Owner(t, db).Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()

	type operator struct {
		name    string
		anyType bool // one of its types stands for several
	}
	operators := make(map[string]operator)
	rows, err := conn.Query(ctx, `
		select o.oid::text, o.oprname::text, coalesce(l.typtype = 'p', false) or r.typtype = 'p'
		  from pg_operator o left join pg_type l on l.oid = o.oprleft join pg_type r on r.oid = o.oprright`)
	require.NoError(t, err)
	var oid string
	var o operator
	_, err = pgx.ForEachRow(rows, []any{&oid, &o.name, &o.anyType}, func() error { operators[oid] = o; return nil })
	require.NoError(t, err)

	risks := func(tree string) (found []string) {
		walk(parseTree(tree), func(node []any) {
			switch node[0] {
			case "OPEXPR", "DISTINCTEXPR", "NULLIFEXPR", "SCALARARRAYOPEXPR":
				by := operators[fmt.Sprint(field(node, ":opno"))]
				args, _ := field(node, ":args").([]any)
				if by.anyType || slices.ContainsFunc(args, converted) {
					found = append(found, by.name)
				}
			case "ROWCOMPAREEXPR":
				for _, side := range []string{":largs", ":rargs"} {
					if args, _ := field(node, side).([]any); slices.ContainsFunc(args, converted) {
						found = append(found, "row")
					}
				}
			}
		})
		return found
	}
	body := func(text string) (string, error) {
		described, err := conn.Conn().Prepare(ctx, "", text)
		if err != nil {
			return "", err
		}
		types := make([]string, len(described.ParamOIDs))
		for i, oid := range described.ParamOIDs {
			known, ok := conn.Conn().TypeMap().TypeForOID(oid)
			require.True(t, ok, oid)
			if types[i] = "pg_catalog." + known.Name; strings.HasPrefix(known.Name, "_") {
				types[i] = "pg_catalog." + known.Name[1:] + "[]"
			}
		}
		if _, err = conn.Exec(ctx, "create or replace function pg_temp.it("+strings.Join(types, ", ")+") returns void begin atomic "+text+"; end"); err != nil {
			return "", err
		}
		var tree string
		err = conn.QueryRow(ctx, `select prosqlbody::text from pg_proc where pronamespace = pg_my_temp_schema() and proname = 'it'`).Scan(&tree)
		if err == nil {
			_, err = conn.Exec(ctx, `drop function pg_temp.it`)
		}
		return tree, err
	}

	// The test finds such operators.
	for text, want := range map[string][]string{
		`select 5::bigint * interval '1 second'`: {"*"}, `select 5::float8 * interval '1 second'`: nil,
		`select 1::smallint & 2`: {"&"}, `select nullif($1::text[], '{}')`: {"="}, `select $1::text[] && $2::text[]`: {"&&"},
	} {
		tree, err := body(text)
		require.NoError(t, err)
		require.Equal(t, want, risks(tree), text)
	}

	all, whole := statements(t), 0
	for _, literal := range literalsIn(t, besides...) {
		text := strings.Trim(literal.text, "`\"\n ")
		if wholeStatement.MatchString(text) {
			all = append(all, named{literal.name, text})
		}
	}
	for _, s := range all {
		tree, err := body(s.text)
		switch sqlstate.Of(err) {
		case "42601", "42P01": // a part of a statement, or one for Citus alone
			continue
		}
		require.NoError(t, err, s.name)
		whole++
		found := slices.DeleteFunc(risks(tree), func(name string) bool { return strings.Contains(s.text, "operator(pg_catalog."+name+")") })
		require.Empty(t, found, "%s has operators that convert: somebody's of the same name could be taken.\n%s", s.name, s.text)
		for _, m := range regexp.MustCompile(`->>?\s*'[^']*'(::text)?`).FindAllStringSubmatch(s.text, -1) {
			require.NotEmpty(t, m[1], "%s: %s finds an operator of two jsonb first", s.name, m[0])
		}
	}
	require.Greater(t, whole, 190)

	rows, err = conn.Query(ctx, `
		select c.relname::text, r.ev_action::text from pg_rewrite r join pg_class c on c.oid = r.ev_class where c.relnamespace = 'onceq'::regnamespace`)
	require.NoError(t, err)
	var view, tree string
	_, err = pgx.ForEachRow(rows, []any{&view, &tree}, func() error { require.Empty(t, risks(tree), view); return nil })
	require.NoError(t, err)

	rows, err = conn.Query(ctx, `select proname::text, prosqlbody::text from pg_proc where pronamespace = 'onceq'::regnamespace and prosqlbody is not null`)
	require.NoError(t, err)
	_, err = pgx.ForEachRow(rows, []any{&view, &tree}, func() error { require.Empty(t, risks(tree), view); return nil })
	require.NoError(t, err)

	var open []string // one with a body that was parsed when it was made needs none
	require.NoError(t, conn.QueryRow(ctx, `
		select array(select proname::text from pg_proc where pronamespace = 'onceq'::regnamespace and prosqlbody is null
		                and not coalesce('search_path=pg_catalog, pg_temp' = any (proconfig), false))`).Scan(&open))
	require.Empty(t, open, "functions without a search_path of their own")
}

// converted reports whether a node is a conversion that the statement does not name.
func converted(arg any) bool {
	node, ok := arg.([]any)
	if !ok || len(node) == 0 {
		return false
	}
	const implicit = "2"
	switch node[0] {
	case "FUNCEXPR":
		return field(node, ":funcformat") == implicit
	case "RELABELTYPE":
		return field(node, ":relabelformat") == implicit
	case "COERCEVIAIO", "ARRAYCOERCEEXPR":
		return field(node, ":coerceformat") == implicit
	}
	return false
}

// field returns what follows a name in a node.
func field(node []any, name string) any {
	if i := slices.Index(node, any(name)); i >= 0 && i+1 < len(node) {
		return node[i+1]
	}
	return nil
}

// walk calls visit with every node.
func walk(nodes []any, visit func([]any)) {
	if len(nodes) > 0 {
		if _, ok := nodes[0].(string); ok {
			visit(nodes)
		}
	}
	for _, n := range nodes {
		if n, ok := n.([]any); ok {
			walk(n, visit)
		}
	}
}

var treeToken = regexp.MustCompile(`[{}()]|(?:\\.|[^\s{}()\\])+`)

// parseTree reads Postgres's text of a tree: {NODE :field value} and (lists), as slices.
func parseTree(text string) []any {
	stack := [][]any{nil}
	for _, tok := range treeToken.FindAllString(text, -1) {
		last := len(stack) - 1
		switch tok {
		case "{", "(":
			stack = append(stack, nil)
		case "}", ")":
			stack[last-1] = append(stack[last-1], any(stack[last]))
			stack = stack[:last]
		default:
			stack[last] = append(stack[last], tok)
		}
	}
	return stack[0]
}
