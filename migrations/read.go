package migrations

import (
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// These are the only parts of tern's format that a file may use. tern itself evaluates all of text/template with about
// two hundred functions; importing it would bring fifteen modules into every application.
const (
	schemaMark = "{{.schema}}"
	separator  = "---- create above / drop below ----"
)

var fileName = regexp.MustCompile(`^(\d+)_.+\.sql$`)

// read returns the migrations in files for a schema, as tern would run them. Anything that tern might treat in another
// way is an error.
func read(files fs.FS, schema string) ([]Migration, error) {
	entries, err := fs.ReadDir(files, ".")
	if err != nil {
		return nil, err
	}
	list := make([]Migration, 0, len(entries))
	for _, entry := range entries {
		name := entry.Name()
		version := 0
		if match := fileName.FindStringSubmatch(name); match != nil {
			version, _ = strconv.Atoi(match[1])
		}
		if version != len(list)+1 {
			return nil, fmt.Errorf("migrations: %s: the name of file %d must be %03d_<name>.sql", name, len(list)+1, len(list)+1)
		}
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		up, down, found := strings.Cut(string(text), separator)
		if !found || strings.Contains(down, separator) {
			return nil, fmt.Errorf("migrations: %s: the line %q must occur once", name, separator)
		}
		m := Migration{Version: version, Name: name}
		if m.Up, err = fill(up, schema); err != nil {
			return nil, fmt.Errorf("migrations: %s: above the separator: %w", name, err)
		}
		if m.Down, err = fill(down, schema); err != nil {
			return nil, fmt.Errorf("migrations: %s: below the separator: %w", name, err)
		}
		list = append(list, m)
	}
	return list, nil
}

// fill puts the schema's name into one half of a file.
func fill(text, schema string) (string, error) {
	parts := strings.Split(strings.TrimSpace(text), schemaMark)
	for _, part := range parts {
		if i := strings.Index(part, "{{"); i >= 0 {
			line, _, _ := strings.Cut(part[i:], "\n")
			return "", fmt.Errorf("%q is not supported here: only %s is", line, schemaMark)
		}
		if strings.Contains(part, "---- tern:") {
			return "", fmt.Errorf("%q is not supported here: each step is one transaction", "---- tern:")
		}
	}
	sql := strings.Join(parts, pgx.Identifier{schema}.Sanitize())
	for line := range strings.Lines(sql) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "--") {
			return sql, nil
		}
	}
	return "", errors.New("there is no SQL")
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
