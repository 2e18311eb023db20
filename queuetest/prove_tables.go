package queuetest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// rowsLimit is the largest number of rows whose contents are compared. Of a larger table only the number of rows is
// compared.
const rowsLimit = 1000

// contents is what the application's tables contain, by name, and the jobs that were enqueued besides.
type contents map[string]*table

type table struct {
	name  string
	short string // without the schema "public"
	rows  int
	cells []map[string]string // of each row, by column, and within JSON by path; nil if there are too many rows
	key   []string            // columns of its primary key
	names []string            // columns that only identify a row: those of the primary key and of references
}

// read returns the contents of the tables, and the jobs beside those with the given ids.
func read(ctx context.Context, pool *pgxpool.Pool, ids []int64) (contents, error) {
	rows, err := pool.Query(ctx, `
		select format('%I.%I', n.nspname, c.relname), n.nspname, c.relname,
		       array(select a.attname::text from pg_constraint p join pg_attribute a on a.attrelid = c.oid and a.attnum = any (p.conkey)
		              where p.conrelid = c.oid and p.contype = 'p' order by 1),
		       array(select a.attname::text from pg_constraint p join pg_attribute a on a.attrelid = c.oid and a.attnum = any (p.conkey)
		              where p.conrelid = c.oid and p.contype in ('p', 'f') order by 1)
		  from pg_class c join pg_namespace n on n.oid = c.relnamespace
		 where c.relkind = 'r' and c.relpersistence <> 't' and n.nspname not in ('pg_catalog', 'information_schema', 'onceq')`)
	if err != nil {
		return nil, err
	}
	type found struct {
		quoted, schema, name string
		key, names           []string
	}
	tables, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f found, err error) {
		return f, row.Scan(&f.quoted, &f.schema, &f.name, &f.key, &f.names)
	})
	if err != nil {
		return nil, err
	}
	all := make(contents)
	for _, f := range tables {
		t := &table{name: "table " + f.quoted, short: strings.TrimPrefix(f.quoted, "public."), key: f.key, names: f.names}
		var raw string
		if err := pool.QueryRow(ctx, `
			select (select count(*) from `+f.quoted+`),
			       (select coalesce(json_agg(to_jsonb(t)), '[]')::text from (select * from `+f.quoted+` limit $1) t)`,
			rowsLimit+1).Scan(&t.rows, &raw); err != nil {
			return nil, err
		}
		if err := t.fill(raw); err != nil {
			return nil, err
		}
		all[t.name] = t
	}
	// A job that waits may have become one that is due, or not yet: that depends on when somebody looked.
	rows, err = pool.Query(ctx, `
		select kind, count(*), json_agg(jsonb_build_object('queue', queue, 'scope', scope, 'key', key, 'priority', priority,
		       'payload', payload, 'payload_bytes', payload_bytes, 'metadata', metadata))::text
		  from (select id, kind, queue, scope, key, priority, payload, payload_bytes, metadata from onceq.jobs
		        union all
		        select id, kind, queue, scope, key, priority, payload, payload_bytes, metadata from onceq.job_waits) j
		 where id <> all ($1) group by kind`, ids)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var kind, raw string
		t := &table{}
		if err := rows.Scan(&kind, &t.rows, &raw); err != nil {
			return nil, err
		}
		t.name = fmt.Sprintf("queue of %q", kind)
		t.short = t.name
		if err := t.fill(raw); err != nil {
			return nil, err
		}
		all[t.name] = t
	}
	return all, rows.Err()
}

// fill reads a table's rows from an array in JSON.
func (t *table) fill(raw string) error {
	if t.rows > rowsLimit {
		return nil
	}
	d := json.NewDecoder(strings.NewReader(raw))
	d.UseNumber()
	var rows []map[string]any
	if err := d.Decode(&rows); err != nil {
		return err
	}
	t.cells = make([]map[string]string, len(rows))
	for i, row := range rows {
		t.cells[i] = make(map[string]string)
		flatten(t.cells[i], "", row)
	}
	return nil
}

func flatten(to map[string]string, path string, value any) {
	in := func(name string) string {
		if path == "" {
			return name
		}
		return path + "." + name
	}
	switch v := value.(type) {
	case map[string]any:
		for name, value := range v {
			flatten(to, in(name), value)
		}
	case []any:
		for i, value := range v {
			flatten(to, in(fmt.Sprint(i)), value)
		}
	case string:
		to[path] = quoted(v)
	case json.Number:
		to[path] = v.String()
	case nil:
		to[path] = "null"
	default:
		to[path] = fmt.Sprint(v)
	}
}

func quoted(s string) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // cannot fail: a string, into memory
	return strings.TrimSpace(b.String())
}

// standard is what a table looks like when nothing goes wrong, from several runs.
type standard struct {
	*table
	any    bool            // the number of rows differs between them, or may differ; a later run may have more rows, but not fewer
	count  bool            // only the number of rows is the same in all
	varies map[string]bool // paths with values that differ between them, or may differ
	chance map[string]bool // those of them that differ for the same delivery of the same job and are not times
}

// compare makes the standard of a table from runs without faults. The first and the second had the same conditions. The
// others may have had other ids and another attempt. may says what may differ, as in Proof.Varies.
func compare(name string, may []string, runs []contents) *standard {
	empty := &table{name: name, short: name, cells: []map[string]string{}}
	tables := make([]*table, len(runs))
	for i, c := range runs {
		tables[i] = c[name]
		if tables[i] == nil {
			tables[i] = empty
		}
	}
	s := &standard{table: tables[0], varies: make(map[string]bool), chance: make(map[string]bool)}
	paths := make(map[string]bool)
	for i, t := range tables {
		s.any = s.any || t.rows > s.rows || i < 2 && t.rows != s.rows || t.named(may, "")
		s.count = s.count || t.cells == nil
		for _, row := range t.cells {
			for path := range row {
				paths[path] = true
			}
		}
	}
	if s.any || s.count {
		return s
	}
	for path := range paths {
		told := s.named(may, path)
		values := s.column(path)
		for i, t := range tables[1:] {
			other := t.column(path)
			if !told && slices.Equal(values, other) {
				continue
			}
			s.varies[path] = true
			if i == 0 && !told && !slices.ContainsFunc(slices.Concat(values, other), func(v string) bool { return isTemporal(strings.Trim(v, `"`)) }) {
				s.chance[path] = true
			}
		}
	}
	for _, t := range tables[1:] {
		s.count = s.count || !maps.Equal(s.project(s.table), s.project(t))
	}
	return s
}

// named reports whether Proof.Varies names a path of a table; "" stands for the whole table.
func (t *table) named(may []string, path string) bool {
	return slices.ContainsFunc(may, func(name string) bool {
		for _, table := range []string{t.short, strings.TrimPrefix(t.name, "table ")} {
			if name == table || path != "" && (name == table+"."+path || strings.HasPrefix(table+"."+path, name+".")) {
				return true
			}
		}
		return false
	})
}

// column returns all values of a path, sorted.
func (t *table) column(path string) []string {
	values := make([]string, 0, len(t.cells))
	for _, row := range t.cells {
		values = append(values, row[path])
	}
	slices.Sort(values)
	return values
}

// row returns the part of a row that must not differ.
func (s *standard) row(cells map[string]string) string {
	var b strings.Builder
	for _, path := range slices.Sorted(maps.Keys(cells)) {
		if !s.varies[path] {
			fmt.Fprintf(&b, "%q=%s,", path, cells[path])
		}
	}
	return b.String()
}

// project counts a table's rows by the part that must not differ.
func (s *standard) project(t *table) map[string]int {
	rows := make(map[string]int)
	for _, cells := range t.cells {
		rows[s.row(cells)]++
	}
	return rows
}

// differs describes how a table differs from the standard; "" if it does not.
func (s *standard) differs(t *table) string {
	if t == nil {
		t = &table{cells: []map[string]string{}}
	}
	switch {
	case s.any:
		return ""
	case t.rows != s.rows:
		return fmt.Sprintf("%s has %d rows, without faults %d", s.name, t.rows, s.rows)
	case s.count || t.cells == nil:
		return ""
	}
	missing := s.project(s.table)
	var extra []map[string]string
	for _, cells := range t.cells {
		if row := s.row(cells); missing[row] > 0 {
			missing[row]--
		} else {
			extra = append(extra, cells)
		}
	}
	if len(extra) == 0 {
		return ""
	}
	// Name the row that is most like it.
	var best []string
	for _, cells := range s.cells {
		if missing[s.row(cells)] == 0 {
			continue
		}
		var differences []string
		all := maps.Clone(cells)
		maps.Copy(all, extra[0])
		for _, path := range slices.Sorted(maps.Keys(all)) {
			if now, want := extra[0][path], cells[path]; now != want && !s.varies[path] {
				differences = append(differences, fmt.Sprintf("%s is %s, without faults %s", path, brief(now), brief(want)))
			}
		}
		if best == nil || len(differences) < len(best) {
			best = differences
		}
	}
	const most = 3
	return fmt.Sprintf("%s: %s", s.name, strings.Join(best[:min(most, len(best))], ", "))
}

// less reports whether a table has fewer rows than the standard.
func (s *standard) less(t *table) bool { return t == nil || t.rows < s.rows }

// untouched says that a row is as Setup left it although it is not without faults; "" if there is none. It also finds
// what a later run has left out in a column whose values differ between runs without faults.
func (r *proofRun) untouched(s *standard) string {
	rows := func(c contents) map[string]int {
		n := make(map[string]int)
		t := c[s.name]
		if t == nil {
			return n
		}
		for _, cells := range t.cells {
			var b strings.Builder
			for _, path := range slices.Sorted(maps.Keys(cells)) {
				if !t.named(r.v.Varies, path) {
					fmt.Fprintf(&b, "%q=%s,", path, cells[path])
				}
			}
			n[b.String()]++
		}
		return n
	}
	if s.any || s.table.cells == nil {
		return ""
	}
	first, second, now := rows(r.v.calm.contents), rows(r.v.calms[1].contents), rows(r.contents)
	for row, n := range rows(r.v.before) {
		if min(n, now[row]) > max(first[row], second[row]) {
			return s.name + ": a row is as it was at the beginning, and without faults it is not"
		}
	}
	return ""
}

func brief(value string) string {
	const limit = 60
	switch {
	case value == "":
		return "nothing"
	case len(value) > limit:
		return strings.ToValidUTF8(value[:limit], "") + "…"
	}
	return value
}

// rewritten describes a committed random value that a later run has replaced by another one; "" if there is none.
func (s *standard) rewritten(then, now *table) string {
	if len(s.chance) == 0 || then == nil || now == nil || s.count {
		return ""
	}
	name := func(cells map[string]string) string {
		if len(s.key) == 0 || slices.ContainsFunc(s.key, func(column string) bool { return s.varies[column] }) {
			return s.row(cells)
		}
		var b strings.Builder
		for _, column := range s.key {
			b.WriteString(cells[column] + ",")
		}
		return b.String()
	}
	index := func(t *table) (map[string]map[string]string, map[string]int) {
		rows, n := make(map[string]map[string]string), make(map[string]int)
		for _, cells := range t.cells {
			rows[name(cells)] = cells
			n[name(cells)]++
		}
		return rows, n
	}
	before, nb := index(then)
	after, na := index(now)
	for _, row := range slices.Sorted(maps.Keys(before)) {
		if nb[row] != 1 || na[row] != 1 {
			continue
		}
		for _, path := range slices.Sorted(maps.Keys(s.chance)) {
			a, b := before[row][path], after[row][path]
			if a != b && a != "" && a != "null" && b != "" && b != "null" && !slices.Contains(s.names, path) {
				return fmt.Sprintf("%s: %s was %s, and then %s", s.name, path, brief(a), brief(b))
			}
		}
	}
	return ""
}
