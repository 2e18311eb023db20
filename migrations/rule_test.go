package migrations

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// UpToLater is Up of a release with one more migration: testdata/002_later.sql. DownFromLater is its DownTo, to this release's version.
func UpToLater(ctx context.Context, conn *pgx.Conn, schema string) error {
	steps, err := later(schema)
	if err != nil {
		return err
	}
	_, err = upTo(ctx, conn, schema, steps)
	return err
}

func DownFromLater(ctx context.Context, conn *pgx.Conn, schema string) error {
	steps, err := later(schema)
	if err != nil {
		return err
	}
	return downTo(ctx, conn, schema, steps, Version)
}

func later(schema string) ([]Migration, error) {
	steps, err := load(schema)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile("testdata/002_later.sql")
	if err != nil {
		return nil, err
	}
	return append(steps, fill(Version+1, "later", string(text), schema)), nil
}

var (
	comment     = regexp.MustCompile(`(?m)--.*$`)
	spaces      = regexp.MustCompile(`\s+`)
	harmless    = regexp.MustCompile(`^create ((unlogged )?table|sequence|index|function|view) `)
	ofSQL       = regexp.MustCompile(`^create or replace function "onceq"\.(enqueue|enqueue_bytes|enqueue_either|enqueue_many|job_of)\(`) // no Go calls these
	newFunction = regexp.MustCompile(`(?m)^create function ([^\s(]+)\(`)
	newTable    = regexp.MustCompile(`^create (?:unlogged )?table (\S+)`)
	addsColumns = regexp.MustCompile(`^alter table \S+ add column `)
	writes      = regexp.MustCompile(`^insert into (\S+)`)
)

// adds checks the rule for migrations after the first one: the code of before works on, with what it inserts and reads. A migration
// that raises oldest_code may do anything.
func adds(m Migration) error {
	all := commands(m.Up)
	for i := range all {
		all[i] = strings.TrimSuffix(strings.TrimSpace(spaces.ReplaceAllString(comment.ReplaceAllString(all[i], ""), " ")), ";")
	}
	version := fmt.Sprintf(`update "onceq".meta set version = %d`, m.Version)
	versions := 0
	own := map[string]bool{}
	var functions []string
	old := ""
	for _, before := range read("onceq") {
		if before.Version < m.Version {
			old += comment.ReplaceAllString(before.Up, "")
			for _, found := range newFunction.FindAllStringSubmatch(before.Up, -1) {
				functions = append(functions, found[1])
			}
		}
	}
	for _, c := range all {
		if c == version+fmt.Sprintf(", oldest_code = %d", m.Version) {
			return nil
		}
		if t := newTable.FindStringSubmatch(c); t != nil {
			own[t[1]] = true
		}
	}
	for _, c := range all {
		into := writes.FindStringSubmatch(c)
		switch {
		case c == "":
		case c == version:
			versions++
		case newFunction.MatchString(c) && slices.Contains(functions, newFunction.FindStringSubmatch(c)[1]):
			return fmt.Errorf("%s: %.80q has the name of a function that there is, and a call of that may not be clear any more: what means something else has another name", m.Name, c)
		case harmless.MatchString(c), ofSQL.MatchString(c), into != nil && own[into[1]]:
		case addsColumns.MatchString(c):
			_, actions, _ := strings.Cut(c, " add column ")
			for _, a := range strings.Split(actions, ", add column ") {
				if name, _, _ := strings.Cut(a, " "); regexp.MustCompile(`\b` + name + `\b`).MatchString(old) {
					return fmt.Errorf("%s: in a function of before %q may be a variable, and would then be the column of that name: let it have a name of its own", m.Name, name)
				}
				if strings.Contains(a, ", ") || strings.Contains(a, "not null") && !strings.Contains(a, " default ") ||
					strings.Contains(a, "unique") || strings.Contains(a, "primary key") || strings.Contains(a, "references") || strings.Contains(a, "check") {
					return fmt.Errorf("%s: an insert of the code before may not have, or not fit, the column %q: let it be null or have a default, and no constraint", m.Name, a)
				}
			}
		default:
			return fmt.Errorf("%s: %q takes something away from the code before, or changes it; a migration adds. If it must be, set version and oldest_code in one update of meta", m.Name, c)
		}
	}
	if versions != 1 {
		return fmt.Errorf("%s: %q must be there once", m.Name, version)
	}
	return nil
}

// Each migration after the first one adds.
func TestMigrationsAdd(t *testing.T) {
	t.Parallel()
	steps, err := later("onceq")
	require.NoError(t, err)
	require.Contains(t, steps[0].Up, fmt.Sprintf("oldest_code  integer not null default %d", 1))
	for _, m := range steps[1:] {
		require.NoError(t, adds(m))
	}
	last := steps[len(steps)-1]
	for _, bad := range []string{
		`drop table "onceq".actions`,
		`alter table "onceq".jobs drop column progress`,
		`alter table "onceq".jobs rename column lost to lost_leases`,
		`alter table "onceq".jobs alter column lost type integer`,
		`alter table "onceq".jobs add column later integer not null`,
		`alter table "onceq".jobs add column added integer, add column added_too integer not null`,
		`alter table "onceq".lane_calls add column debt integer`, // a variable of promote
		`alter table "onceq".jobs add column added integer, drop column lost`,
		`alter table "onceq".jobs add column later integer unique`,
		`create unique index later on "onceq".jobs (kind)`,
		`create or replace function "onceq".next_id(ids regclass, above bigint) returns bigint language sql as $$ select 1 $$`,
		`create function "onceq".next_id(ids regclass, above bigint, more bigint default 0) returns bigint language sql as $$ select 1 $$`,
		`insert into "onceq".lane_limits values ('a/b', 1, false)`,
		`delete from "onceq".job_history`,
		`create trigger t after insert on "onceq".jobs for each row execute function "onceq".f()`,
		`update "onceq".meta set version = 2`,
	} {
		m := last
		m.Up += "\n" + bad + ";"
		require.Error(t, adds(m), bad)
	}
	m := last
	m.Up += "\ncreate or replace function \"onceq\".job_of(a int) returns int language sql as $$ select 1 $$;"
	require.NoError(t, adds(m))
	last.Up = strings.Replace(last.Up, "version = 2", "version = 2, oldest_code = 2", 1) + "\ndrop table \"onceq\".actions;"
	require.NoError(t, adds(last))
}

// A schema's name must not end the text of a function, and may be anything else.
func TestTag(t *testing.T) {
	for _, m := range List() {
		text, err := os.ReadFile(m.Name)
		require.NoError(t, err)
		for _, found := range regexp.MustCompile(`\$\w+\$`).FindAllString(string(text), -1) {
			require.Equal(t, found, tag.FindString(found), m.Name)
		}
	}
	require.Error(t, checkName("a$wake$b"))
	require.NoError(t, checkName("a$1$b$onceq$"))
}
