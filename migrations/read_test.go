package migrations

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFill(t *testing.T) {
	t.Parallel()
	require.Equal(t,
		Migration{Version: 2, Name: "002_a.sql", Up: "-- one\ncreate table \"{{.schema}}\"\"\".a ('}}');\n", Down: "drop table \"{{.schema}}\"\"\".a;\n"},
		fill(2, "002_a.sql", "\n-- one\ncreate table {{.schema}}.a ('}}');\n\n---- create above / drop below ----\n\ndrop table {{.schema}}.a;\n", `{{.schema}}"`))
}

// The files have nothing that tern would treat differently from read. lab/tern compares the SQL.
func TestFiles(t *testing.T) {
	t.Parallel()
	for i, m := range List() {
		text, err := files.ReadFile(m.Name)
		require.NoError(t, err)
		require.Regexp(t, fmt.Sprintf(`^%03d_.+\.sql$`, i+1), m.Name)
		require.Equal(t, 1, strings.Count(string(text), separator), m.Name)
		require.NotContains(t, strings.ReplaceAll(string(text), schemaMark, ""), "{{", m.Name)
		require.NotContains(t, string(text), "---- tern:", m.Name)
	}
}

func TestCommands(t *testing.T) {
	for sql, want := range map[string][]string{
		"a; b;":                          {"a;", "b;"},
		"-- no; end\na; /* ; */ b":       {"-- no; end\na;", "/* ; */ b"},
		`a ';''; ' ";""; "; b`:           {`a ';''; ' ";""; ";`, "b"},
		"do $$ a; b; $$; $x$ $$; $x$; c": {"do $$ a; b; $$;", "$x$ $$; $x$;", "c"},
		"":                               nil,
	} {
		require.Equal(t, want, commands(sql), sql)
	}
	list, err := load(`odd;"'$$name`)
	require.NoError(t, err)
	for _, m := range list {
		require.Equal(t, strings.Fields(m.Up), strings.Fields(strings.Join(commands(m.Up), "\n")))
		require.Greater(t, len(commands(m.Up)), 15)
	}
}
