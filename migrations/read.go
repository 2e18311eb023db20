package migrations

import (
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
)

// The files have no more of tern's format than these two, as TestFiles checks. tern itself evaluates all of text/template with about
// two hundred functions, and brings 25 modules into every application.
const (
	schemaMark = "{{.schema}}"
	separator  = "---- create above / drop below ----"
)

// load returns the migrations for a schema, after checking its name.
func load(schema string) ([]Migration, error) {
	if err := checkName(schema); err != nil {
		return nil, err
	}
	return read(schema), nil
}

// read returns the migrations for a schema, as tern would run them. What it reads is a part of this package.
func read(schema string) []Migration {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic(err)
	}
	list := make([]Migration, len(entries))
	for i, entry := range entries {
		text, err := files.ReadFile(entry.Name())
		if err != nil {
			panic(err)
		}
		list[i] = fill(i+1, entry.Name(), string(text), schema)
	}
	return list
}

// fill is the migration of a file.
func fill(version int, name, text, schema string) Migration {
	half := func(text string) string {
		return strings.ReplaceAll(strings.TrimSpace(text), schemaMark, pgx.Identifier{schema}.Sanitize()) + "\n"
	}
	up, down, _ := strings.Cut(text, separator)
	return Migration{Version: version, Name: name, Up: half(up), Down: half(down)}
}

// token is what a semicolon does not end: a comment, a string, a quoted name, or a text between dollar signs (whose end
// commands looks for).
var token = regexp.MustCompile(`(?s)--[^\n]*|/\*.*?\*/|'[^']*'|"[^"]*"|\$\w*\$|;`)

// commands splits SQL into its commands, which Citus takes one by one alone. It knows what the files of this directory use: no
// comments inside comments, and no strings with backslashes.
func commands(sql string) (all []string) {
	start := 0
	for at := 0; ; {
		place := token.FindStringIndex(sql[at:])
		if place == nil {
			break
		}
		found := sql[at+place[0] : at+place[1]]
		at += place[1]
		switch found[0] {
		case '$':
			if _, rest, ok := strings.Cut(sql[at:], found); ok {
				at = len(sql) - len(rest)
			}
		case ';':
			all = append(all, strings.TrimSpace(sql[start:at]))
			start = at
		}
	}
	if rest := strings.TrimSpace(sql[start:]); rest != "" {
		all = append(all, rest)
	}
	return all
}
