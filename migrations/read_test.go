package migrations

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

func TestRead(t *testing.T) {
	t.Parallel()
	list, err := read(fstest.MapFS{
		"001_one.sql": {Data: []byte("\n-- one\ncreate table {{.schema}}.a ('}}');\n\n---- create above / drop below ----\n\ndrop table {{.schema}}.a;\n")},
		"002_two.sql": {Data: []byte("select 1;\n---- create above / drop below ----\nselect 2;")},
	}, `{{.schema}}"`)
	require.NoError(t, err)
	require.Equal(t, []Migration{
		{Version: 1, Name: "001_one.sql", Up: "-- one\ncreate table \"{{.schema}}\"\"\".a ('}}');", Down: `drop table "{{.schema}}""".a;`},
		{Version: 2, Name: "002_two.sql", Up: "select 1;", Down: "select 2;"},
	}, list)
}

// tern might treat each of these differently from read.
func TestReadRefuses(t *testing.T) {
	t.Parallel()
	const below = "\n---- create above / drop below ----\nselect 2;"
	for what, text := range map[string]string{
		"another datum":        "select '{{.prefix}}';" + below,
		"spaces":               "select '{{ .schema }}';" + below,
		"a function":           "{{ template \"shared/x.sql\" . }} select 1;" + below,
		"a comment":            "{{/* nothing */}} select 1;" + below,
		"trimmed space":        "select {{- .schema}};" + below,
		"an unfinished action": "select '{{';" + below,
		"an action below":      "select 1;" + below + "{{.other}}",
		"no transaction":       "---- tern: disable-tx ----\nselect 1;" + below,
		"no way down":          "select 1;",
		"two separators":       "select 1;" + below + below,
		"nothing to do":        "-- select 1;\n" + below,
		"nothing to take back": "select 1;\n---- create above / drop below ----\n",
	} {
		list, err := read(fstest.MapFS{"001_a.sql": {Data: []byte(text)}}, "onceq")
		require.ErrorContains(t, err, "001_a.sql", "%s: %v", what, list)
	}
	for _, names := range [][]string{{"002_a.sql"}, {"001_a.sql", "003_b.sql"}, {"001_a.sql", "001_b.sql"}, {"a.sql"}, {"001_a.sql", "b.sql"}, {"001.sql"}} {
		files := fstest.MapFS{}
		for _, name := range names {
			files[name] = &fstest.MapFile{Data: []byte("select 1;" + below)}
		}
		_, err := read(files, "onceq")
		require.ErrorContains(t, err, "must be", "%v", names)
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
