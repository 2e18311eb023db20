package tests

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/internal/sqlstate"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

// bySQL enqueues by the function of the schema.
func bySQL(ctx context.Context, db *pgxpool.Pool, kind, payload string, key *string, options string) (r onceq.Result, err error) {
	var state string
	var output *string
	err = db.QueryRow(ctx, `select id, duplicate, state, output::text from onceq.enqueue($1::text, $2::text::jsonb, $3::text, $4::text::jsonb)`, kind, payload, key, options).
		Scan(&r.ID, &r.Duplicate, &state, &output)
	if err == nil {
		err = r.State.UnmarshalText([]byte(state))
	}
	if output != nil {
		r.Output = json.RawMessage(*output)
	}
	return r, err
}

// A job that SQL has enqueued is a duplicate for Go and the other way round, whatever the payload and the fields are.
func TestSQL_OneKeyForGoAndSQL(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	for i, c := range []struct {
		payload, same, other string
		fields               []string
	}{
		{`1`, `1.0`, `1.01`, nil},
		{`{"a":1,"b":[true,null,"x"]}`, `{ "b":[true,null,"x"], "a":1e0 }`, `{"a":1,"b":[true,null,"y"]}`, nil},
		{`"é\n\u0001\\\" \u007f/"`, `"\u00e9\u000a\u0001\\\"\u0020\u007f\/"`, `"e\u0301"`, nil},
		{`{"n":12345678901234567890.1200,"m":-0}`, `{"m":0,"n":1234567890123456789012e-2}`, `{"m":0,"n":12345678901234567890.1201}`, nil},
		{`{"id":7,"at":"now"}`, `{"id":7,"at":"later","more":1}`, `{"id":8,"at":"now"}`, []string{"id"}},
		{`{"a!":1,"a":2,"":3,"a\"":4,"ä":5}`, `{"ä":5,"":3,"a\"":4,"a":2,"a!":1}`, `{}`, nil},
		{`null`, `null`, `"null"`, nil},
		{`[]`, `[ ]`, `{}`, nil},
		{`[0.000120,100,1e30,-5e-3]`, `[12e-5,1e2,1000000000000000000000000000000,-0.005]`, `[12e-5,1e2,1e29,-0.005]`, nil},
	} {
		options := func(scope string) string {
			all := map[string]any{"scope": scope}
			if c.fields != nil {
				all["fields"] = c.fields
			}
			text, err := json.Marshal(all)
			require.NoError(t, err)
			return string(text)
		}
		byGo := func(payload, scope, key string) (onceq.Result, error) {
			return db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Scope: scope, Key: key, Payload: json.RawMessage(payload), Fields: c.fields})
		}
		key := fmt.Sprint("key", i)
		for _, scope := range []string{"k", "another"} {
			first, err := byGo(c.payload, scope, key)
			require.NoError(t, err)
			again, err := bySQL(ctx, db.Pool, "k", c.same, &key, options(scope))
			require.NoError(t, err, c.same)
			require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, again)
			_, err = bySQL(ctx, db.Pool, "k", c.other, &key, options(scope))
			require.Equal(t, "OQ011", sqlstate.Of(err), c.other)

			back := key + " back"
			first, err = bySQL(ctx, db.Pool, "k", c.payload, &back, options(scope))
			require.NoError(t, err)
			require.False(t, first.Duplicate)
			again, err = byGo(c.same, scope, back)
			require.NoError(t, err)
			require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, again)
			var mismatch *onceq.MismatchError
			_, err = byGo(c.other, scope, back)
			require.ErrorAs(t, err, &mismatch)
		}
	}
	require.NoError(t, db.Check())
}

// vector is a line of docs/use/fingerprints.json.
type vector struct {
	About         string   `json:"about"`
	Kind          string   `json:"kind"`
	Scope         string   `json:"scope,omitempty"`
	Payload       *string  `json:"payload,omitempty"`
	Bytes         *string  `json:"bytes,omitempty"` // in hexadecimal
	Fields        []string `json:"fields,omitzero"`
	IgnorePayload bool     `json:"ignore_payload,omitempty"`
	Canonical     string   `json:"canonical,omitempty"`
	Fingerprint   string   `json:"fingerprint"`
}

var update = flag.Bool("update", false, "write docs/use/fingerprints.json anew, with the fingerprints that Go makes")

// Go and SQL store the fingerprints that docs/use/fingerprints.json has, with which anybody can check a client.
func TestSQL_Fingerprints(t *testing.T) {
	t.Parallel()
	const file = "../../docs/use/fingerprints.json"
	db := queuetest.New(t, queuetest.Schema("onceq"))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var vectors []vector
	require.NoError(t, json.Unmarshal(text, &vectors))
	var lines []string
	for n, v := range vectors {
		key, options := fmt.Sprint("key", n), map[string]any{"scope": cmp.Or(v.Scope, v.Kind)}
		job := onceq.Job{Kind: v.Kind, Scope: v.Scope, Key: key, Fields: v.Fields, IgnorePayload: v.IgnorePayload}
		if v.Payload != nil {
			job.Payload = json.RawMessage(*v.Payload)
		} else {
			job.Payload, err = hex.DecodeString(*v.Bytes)
			require.NoError(t, err)
		}
		if v.Fields != nil {
			options["fields"] = v.Fields
		}
		if v.IgnorePayload {
			options["ignore_payload"] = true
		}
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = db.Queue.Enqueue(t.Context(), tx, job)
		require.NoError(t, err, v.About)
		stored := `select encode(fingerprint, 'hex') from onceq.job_fences where scope = $1 and key = $2`
		require.NoError(t, tx.QueryRow(t.Context(), stored, options["scope"], key).Scan(&v.Fingerprint))
		require.NoError(t, tx.Rollback(t.Context()))

		_, err = db.Pool.Exec(t.Context(), `
			select case when $2::text is not null then (select id from onceq.enqueue($1, $2::jsonb, $4, $5::text::jsonb))
			            else (select id from onceq.enqueue_bytes($1, decode($3, 'hex'), $4, $5::text::jsonb)) end`, v.Kind, v.Payload, v.Bytes, key, asJSON(t, options))
		require.NoError(t, err, v.About)
		require.Equal(t, v.Fingerprint, sqlOne[string](t, db, stored, options["scope"], key), v.About)
		if v.Payload != nil && !v.IgnorePayload {
			v.Canonical = sqlOne[string](t, db, `select onceq.canonical($1::text::jsonb, $2, 0)`, *v.Payload, v.Fields)
			sum := sha256.Sum256([]byte("j" + v.Canonical))
			require.True(t, strings.HasPrefix(v.Fingerprint, "0110"+hex.EncodeToString(sum[:16])), v.About)
		}
		lines = append(lines, asJSON(t, v))
	}
	now := "[\n" + strings.Join(lines, ",\n") + "\n]\n"
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(now), 0o644))
		return
	}
	require.Equal(t, string(text), now, "go test -run TestSQL_Fingerprints ./internal/tests -update, if a fingerprint may change at all: keys that are taken then have another")
	require.Greater(t, len(vectors), 40)
}

// asJSON encodes a value with its characters as they are.
func asJSON(t testing.TB, v any) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	require.NoError(t, e.Encode(v))
	return strings.TrimSuffix(b.String(), "\n")
}

// Whatever the payloads are, of Go and SQL the second one with a key meets the first exactly if Postgres says that their values are equal.
func FuzzSQL_GoAndSQLMeet(f *testing.F) {
	db := queuetest.New(f, queuetest.Schema("onceq"), queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}))
	for _, c := range [][3]string{
		{`1`, `1.0`, ``}, {`100`, `1e2`, ``}, {`-0`, `0e5`, ``}, {`"\u00e9"`, `"é"`, ``}, {`"\u0001\n"`, `"\u0001\u000a"`, ``}, {`"é"`, `"e"`, ``}, {`[[]]`, `[]`, ``},
		{`{"a":1,"b":2}`, `{"b":2.0,"a":1}`, ``}, {`{"a":1,"b":2}`, `{"a":1,"b":3}`, `a`}, {`{"a!":1,"a":2}`, `{"a":2,"a!":1}`, ``}, {`{"a":1,"a":2}`, `{"a":2}`, `a`}, {`{"a":1}`, `{"b":1}`, `c`},
		{`{"\"\\":[{"z":{},"y":null}]}`, `{"\"\\":[{"y":null,"z":{}}]}`, `"\`}, {`1e-9999`, `0`, ``}, {`123456789012345678901234567890`, `123456789012345678901234567891`, ``},
	} {
		f.Add([]byte(c[0]), []byte(c[1]), c[2])
	}
	var keys atomic.Int64
	f.Fuzz(func(t *testing.T, a, b []byte, field string) {
		if len(a)+len(b) > 500 || !utf8.ValidString(field) || strings.ContainsRune(field, 0) { // numeric writes a number of seven characters in ten thousand
			return
		}
		ctx, key := t.Context(), fmt.Sprint(time.Now().UnixNano(), keys.Add(1))
		options := map[string]any{"scope": "s"}
		job := onceq.Job{Kind: "k", Scope: "s"}
		if field != "" {
			job.Fields, options["fields"] = []string{field}, []string{field}
		}
		byGo := func(payload []byte, key string) (onceq.Result, error) {
			job.Payload, job.Key = json.RawMessage(payload), key
			return db.Queue.Enqueue(ctx, db.Pool, job)
		}
		mine := [2]onceq.Result{}
		for n, payload := range [][]byte{a, b} {
			var invalid *onceq.InvalidError
			var err error
			if mine[n], err = byGo(payload, fmt.Sprint(key, n)); errors.As(err, &invalid) {
				return
			}
			require.NoError(t, err)
		}
		equal := sqlOne[bool](t, db, `select case when $3 = '' then $1::text::jsonb = $2::text::jsonb
			else $1::text::jsonb -> $3 is not distinct from $2::text::jsonb -> $3 end`, string(a), string(b), field)
		for n, payload := range [][]byte{b, a} {
			taken, back := fmt.Sprint(key, n), fmt.Sprint(key, "back", n)
			met, err := bySQL(ctx, db.Pool, "k", string(payload), &taken, asJSON(t, options))
			if equal {
				require.NoError(t, err)
				require.Equal(t, onceq.Result{ID: mine[n].ID, Duplicate: true, State: onceq.StateWaiting}, met)
			} else {
				require.Equal(t, "OQ011", sqlstate.Of(err))
			}
			first, err := bySQL(ctx, db.Pool, "k", string(payload), &back, asJSON(t, options))
			require.NoError(t, err)
			other := [][]byte{a, b}[n]
			met, err = byGo(other, back)
			if equal {
				require.NoError(t, err)
				require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateWaiting}, met)
			} else {
				require.ErrorAs(t, err, new(*onceq.MismatchError))
			}
		}
	})
}

// What Enqueue of Go answers, the function answers too.
func TestSQL_AnswersOfADuplicate(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx, key, members := t.Context(), "one", "members"
	kind := onceq.Kind[int]{Name: "k"}
	first, err := bySQL(ctx, db.Pool, "k", `1`, &key, `{"delay": "1 hour", "window": "1 hour"}`)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: first.ID, State: onceq.StateDelayed}, first)
	again, err := bySQL(ctx, db.Pool, "k", `1`, &key, `{}`)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateDelayed}, again)
	_, err = bySQL(ctx, db.Pool, "k", `1`, &key, `{"strict": true}`)
	require.Equal(t, "OQ012", sqlstate.Of(err))
	require.ErrorContains(t, err, fmt.Sprintf(`is taken by job %d, which is delayed`, first.ID))
	_, err = bySQL(ctx, db.Pool, "k", `{"amount": 2}`, &key, `{}`)
	require.Equal(t, "OQ011", sqlstate.Of(err))
	_, err = bySQL(ctx, db.Pool, "other", `1`, &key, `{"scope": "k"}`)
	require.ErrorContains(t, err, fmt.Sprintf(`belongs to job %d of the kind "k"`, first.ID))

	db.Advance(2 * time.Hour)
	db.RunOne(kind.Handle(func(_ context.Context, l *onceq.Lease, _ int) error { return l.SetResult(map[string]int{"n": 7}) }))
	again, err = bySQL(ctx, db.Pool, "k", `1`, &key, `{}`)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: onceq.StateCompleted, Output: json.RawMessage(`{"n": 7}`)}, again)
	db.Advance(2 * time.Hour) // the window is over
	next, err := bySQL(ctx, db.Pool, "k", `1`, &key, `{}`)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: next.ID, State: onceq.StateWaiting}, next)
	require.Greater(t, next.ID, first.ID)

	_, err = bySQL(ctx, db.Pool, "k", `{"a": 1, "b": {"c": 2}, "d": 3}`, &members, `{}`)
	require.NoError(t, err)
	_, err = bySQL(ctx, db.Pool, "k", `{"a": 1, "b": {"c": 3}, "e": 3}`, &members, `{}`)
	var refused *pgconn.PgError
	require.True(t, errors.As(err, &refused))
	require.Equal(t, "Members that differ: b, d, e", refused.Detail)
	require.NoError(t, db.Check())
}

// Each option arrives where Go puts it.
func TestSQL_OptionsAreThoseOfGo(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	at := time.Date(2030, 1, 31, 8, 0, 0, 0, time.UTC)
	row := func(id int64) string {
		return sqlOne[string](t, db, `
			select (to_jsonb(j) - 'id' - 'created_at' - 'identity' - case when run_at < now() + interval '1 day' then 'run_at' else '' end)::text from
			  (select id, run_at, created_at, max_attempts, priority, queue, kind, scope, key, payload, payload_bytes, metadata, lane, lane_rule, null as path, identity from onceq.jobs
			   union all select id, run_at, created_at, max_attempts, priority, queue, kind, scope, key, payload, payload_bytes, metadata, lane, lane_rule, path, identity from onceq.job_waits) j
			 where id = $1`, id)
	}
	fence := func(id int64) string {
		return sqlOne[string](t, db, `select coalesce((select (to_jsonb(f) - 'job_id' - 'token' - 'created_at' - 'key')::text from onceq.job_fences f where job_id = $1), '')`, id)
	}
	for options, job := range map[string]onceq.Job{
		`{}`:                                      {},
		`{"queue": "mail", "priority": "high"}`:   {Queue: "mail", Priority: onceq.PriorityHigh},
		`{"priority": "low", "max_attempts": 3}`:  {Priority: onceq.PriorityLow, MaxAttempts: 3},
		`{"run_at": "2030-01-31T09:00:00+01:00"}`: {RunAt: at},
		`{"metadata": {"a": "b", "tenant": "7"}}`: {Metadata: map[string]string{"tenant": "7", "a": "b"}},
		`{"lane": "c/1"}`:                         {Lane: "c/1"},
		`{"timeout": "90 seconds"}`:               {Timeout: 90 * time.Second},
		`{"timeout": "none", "metadata": {"a": "b", "onceq-timeout": "1ms"}}`: {
			Timeout: onceq.NoTimeout, Metadata: map[string]string{"a": "b", "onceq-timeout": "1ms"},
		},
		`{"lane": "1", "lane_family": "customer", "overtake": true, "stop_lane": true}`: {Lane: "1", LaneFamily: "customer", LaneRule: onceq.Overtake | onceq.StopLane},
		`{"limit": "provider/x"}`:                    {Limit: "provider/x"},
		`{"lane": "1", "limit": "p"}`:                {Lane: "1", Limit: "p"},
		`{"limit": "p", "weight": 5}`:                {Limit: "p", Weight: 5},
		`{"limit": "p", "lane": "1", "weight": 1e9}`: {Lane: "1", Limit: "p", Weight: onceq.MaxWeight},
		`{"limit": "p", "weight": 1.0}`:              {Limit: "p", Weight: 1},
	} {
		job.Kind, job.Payload = "k", map[string]int{"n": 1}
		want, err := db.Queue.Enqueue(ctx, db.Pool, job)
		require.NoError(t, err)
		got, err := bySQL(ctx, db.Pool, "k", `{"n": 1}`, nil, options)
		require.NoError(t, err, options)
		require.Equal(t, row(want.ID), row(got.ID), options)
		require.Equal(t, want.State, got.State, options)
	}
	for options, job := range map[string]onceq.Job{
		`{"window": "until_finished"}`:   {Window: onceq.UntilFinished},
		`{"window": "forever"}`:          {Window: onceq.Forever},
		`{"window": "90 minutes"}`:       {Window: 90 * time.Minute},
		`{"scope": "s"}`:                 {Scope: "s"},
		`{"ignore_payload": true}`:       {IgnorePayload: true},
		`{"fields": ["n"], "lane": "x"}`: {Fields: []string{"n"}, Lane: "x"},
	} {
		job.Kind, job.Payload, job.Key = "k", map[string]int{"n": 1}, "go"+options
		want, err := db.Queue.Enqueue(ctx, db.Pool, job)
		require.NoError(t, err)
		got, err := bySQL(ctx, db.Pool, "k", `{"n": 1}`, &options, options)
		require.NoError(t, err, options)
		require.Equal(t, fence(want.ID), fence(got.ID), options)
	}
	bytes, err := db.Queue.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "bytes", Payload: []byte{0, 1}})
	require.NoError(t, err)
	require.Equal(t, bytes.ID, sqlOne[int64](t, db, `select id from onceq.enqueue_bytes('k', '\x0001', 'bytes')`))
	require.NoError(t, db.Check())
}

// A job from SQL waits for others as one from Go does, alone and in a call for many.
func TestSQL_After(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	first, err := bySQL(t.Context(), db.Pool, "first", `1`, nil, `{}`)
	require.NoError(t, err)
	after := fmt.Sprintf(`{"after": [%d, "%[1]d"], "lane": "x", "limit": "l"}`, first.ID) // some clients have ids as texts
	key := "once"
	one, err := bySQL(t.Context(), db.Pool, "then", `1`, &key, after)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: one.ID, State: onceq.StateWaiting}, one)
	again, err := bySQL(t.Context(), db.Pool, "then", `1`, &key, after)
	require.NoError(t, err)
	require.Equal(t, onceq.Result{ID: one.ID, Duplicate: true, State: onceq.StateWaiting}, again)
	many := sqlOne[[]int64](t, db, `select array_agg(id) from onceq.enqueue_many($1::text::jsonb)`, fmt.Sprintf(`[{"kind": "then", "payload": 2, "after": [%d]},
		{"kind": "free"}, {"kind": "then", "payload": 1, "key": "once", "after": [%[1]d]}, {"kind": "then", "payload": 3, "after": [%[1]d, %d]}]`, first.ID, one.ID))
	byGo, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "then", Payload: 1, Lane: "x", Limit: "l", After: []onceq.JobRef{{ID: first.ID}}})
	require.NoError(t, err)
	row := func(id int64) string {
		return sqlOne[string](t, db, `select (to_jsonb(w) - 'id' - 'run_at' - 'created_at' - 'scope' - 'key' - 'lane_rule' || jsonb_build_object('lane', replace(lane, lpad(id::text, 19, '0'), 'id')))::text from onceq.job_waits w where id = $1`, id)
	}
	require.Equal(t, row(byGo.ID), row(one.ID))
	require.Equal(t, one.ID, many[2])
	require.Equal(t, []string{fmt.Sprint(first.ID, one.ID), fmt.Sprint(first.ID, many[0]), fmt.Sprint(first.ID, many[3]), fmt.Sprint(first.ID, byGo.ID), fmt.Sprint(one.ID, many[3])},
		sqlOne[[]string](t, db, `select array_agg(concat(job_id, ' ', group_id) order by job_id, group_id) from onceq.job_members where told`))
	var mu sync.Mutex // guards ran
	var ran []string
	handle := func(_ context.Context, l *onceq.Lease, n int) error {
		mu.Lock()
		defer mu.Unlock()
		ran = append(ran, fmt.Sprint(l.Kind, n))
		return nil
	}
	db.Drain((&onceq.Kind[int]{Name: "then"}).Handle(handle), (&onceq.Kind[int]{Name: "free"}).Handle(handle))
	require.Equal(t, []string{"free0"}, ran)
	db.Drain((&onceq.Kind[int]{Name: "then"}).Handle(handle), (&onceq.Kind[int]{Name: "first"}).Handle(handle))
	require.Equal(t, "first1", ran[1])
	require.ElementsMatch(t, []string{"then1", "then1", "then2", "then3"}, ran[2:])

	// What a dead one means, and a job that has ended before.
	dead := sqlOne[int64](t, db, `select id from onceq.enqueue('dies', options => '{"max_attempts": 1}')`)
	rules := []any{}
	for _, rule := range []string{"wait", "run", "cancel"} {
		rules = append(rules, sqlOne[int64](t, db, `select id from onceq.enqueue('free', options => $1::text::jsonb)`, fmt.Sprintf(`{"after": [%d], "if_dead": %q}`, dead, rule)))
	}
	sqlRun(t, db, `select from onceq.enqueue('then', '4', options => $1::text::jsonb)`, fmt.Sprintf(`{"after": [%d]}`, first.ID))
	ran = nil
	db.Drain((&onceq.Kind[int]{Name: "then"}).Handle(handle), (&onceq.Kind[int]{Name: "free"}).Handle(handle),
		(&onceq.Kind[int]{Name: "dies"}).Handle(func(context.Context, *onceq.Lease, int) error { return errors.New("no") }))
	require.ElementsMatch(t, []string{"then4", "free0"}, ran)
	require.Equal(t, []string{"waiting", "", "cancelled"}, sqlOne[[]string](t, db, `select array[coalesce((select state from onceq.job($1)), ''), coalesce((select state from onceq.job($2)), ''), coalesce((select state from onceq.job($3)), '')]`, rules...))
	require.NoError(t, db.Check())
}

// Replace from SQL changes what Replace from Go changes, and answers alike where it may not.
func TestSQL_Replace(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	ctx := t.Context()
	row := func(id int64) string {
		return sqlOne[string](t, db, `
			select concat_ws(' ', j.payload, j.metadata, j.run_at > now(), coalesce(j.due_at, j.run_at) > now(), encode(f.fingerprint, 'hex'))
			  from (select id, payload, metadata, run_at, due_at from onceq.jobs union all select id, payload, metadata, run_at, due_at from onceq.job_waits) j join onceq.job_fences f on f.job_id = j.id where j.id = $1`, id)
	}
	for n, c := range []struct {
		first, then, refused string
		job                  onceq.Job
	}{
		{`{"delay": "1 hour"}`, `{"replace": ["payload"], "metadata": {"a": "b"}}`, "", onceq.Job{Replace: onceq.ReplacePayload, Metadata: map[string]string{"a": "b"}}},
		{`{"delay": "1 hour"}`, `{"replace": ["payload", "time"]}`, "", onceq.Job{Replace: onceq.ReplacePayload | onceq.ReplaceTime}},
		{`{}`, `{"replace": ["payload", "time"], "delay": "1 hour"}`, "", onceq.Job{Replace: onceq.ReplacePayload | onceq.ReplaceTime, Delay: time.Hour}},
		{`{}`, `{"replace": ["time"], "delay": "1 hour"}`, "with another payload", onceq.Job{Replace: onceq.ReplaceTime, Delay: time.Hour}},
		{`{}`, `{"replace": ["time"], "delay": "1 hour", "ignore_payload": true}`, "", onceq.Job{Replace: onceq.ReplaceTime, Delay: time.Hour, IgnorePayload: true}},
		{`{"lane": "x"}`, `{"replace": ["payload"], "lane": "x"}`, "", onceq.Job{Replace: onceq.ReplacePayload, Lane: "x"}},
		{`{"lane": "x"}`, `{"replace": ["payload"]}`, "with another payload", onceq.Job{Replace: onceq.ReplacePayload}},
		{`{"lane": "x", "limit": "l"}`, `{"replace": ["payload", "time"], "lane": "x", "limit": "l", "delay": "1 hour"}`, "", onceq.Job{Replace: onceq.ReplacePayload | onceq.ReplaceTime, Lane: "x", Limit: "l", Delay: time.Hour}},
	} {
		byGo, here := fmt.Sprint("go", n), fmt.Sprint("sql", n)
		was, err := bySQL(ctx, db.Pool, "k", `{"n": 1}`, &byGo, c.first)
		require.NoError(t, err)
		c.job.Kind, c.job.Key, c.job.Payload = "k", byGo, map[string]int{"n": 2}
		want, wantErr := db.Queue.Enqueue(ctx, db.Pool, c.job)
		require.Equal(t, c.refused == "", wantErr == nil, "%v", wantErr)
		first, err := bySQL(ctx, db.Pool, "k", `{"n": 1}`, &here, c.first)
		require.NoError(t, err)
		got, err := bySQL(ctx, db.Pool, "k", `{"n": 2}`, &here, c.then)
		if c.refused != "" {
			require.ErrorContains(t, err, c.refused, c.then)
			require.Equal(t, "OQ011", sqlstate.Of(err))
		} else {
			require.NoError(t, err, c.then)
			require.True(t, want.Replaced)
			require.Equal(t, onceq.Result{ID: first.ID, Duplicate: true, State: want.State}, got, c.then)
		}
		require.Equal(t, row(was.ID), row(first.ID), c.then)
	}
	key := "go0"
	_, err := bySQL(ctx, db.Pool, "other", `{"n": 2}`, &key, `{"scope": "k", "replace": ["payload", "time"]}`)
	require.ErrorContains(t, err, `of the kind "k"`)
	require.True(t, sqlOne[bool](t, db, `select duplicate from onceq.enqueue_many('[{"kind": "k", "key": "sql0", "payload": {"n": 5}, "replace": ["payload"]}]')`))
	require.Equal(t, `{"n": 5}`, sqlOne[string](t, db, `select payload::text from onceq.v_jobs where key = 'sql0'`))

	// What was started is not changed: the same payload is a duplicate, and another one other work.
	sqlRun(t, db, `update onceq.jobs set run_at = now()`)
	_, err = db.Queue.Claim(ctx, onceq.ClaimOptions{Limit: 100})
	require.NoError(t, err)
	started := sqlOne[string](t, db, `select key from onceq.jobs where leased_until is not null and key like 'sql%' order by id limit 1`)
	payload := sqlOne[string](t, db, `select payload::text from onceq.jobs where key = $1`, started)
	_, err = bySQL(ctx, db.Pool, "k", `{"n": 9}`, &started, `{"replace": ["payload", "time"]}`)
	require.Equal(t, "OQ011", sqlstate.Of(err))
	got, err := bySQL(ctx, db.Pool, "k", payload, &started, `{"replace": ["payload", "time"]}`)
	require.NoError(t, err)
	require.Equal(t, []any{true, onceq.StateRunning}, []any{got.Duplicate, got.State})
}

// Cancel from SQL answers as Cancel of Go, and null for a job that nobody knows.
func TestSQL_Cancel(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	cancel := func(id int64) string {
		return sqlOne[string](t, db, `select coalesce(onceq.cancel($1), 'unknown')`, id)
	}
	enqueue := func(key, options string) int64 {
		r, err := bySQL(t.Context(), db.Pool, "k", `1`, &key, options)
		require.NoError(t, err)
		require.False(t, r.Duplicate)
		return r.ID
	}
	waits, laned, delayed := enqueue("a", `{}`), enqueue("b", `{"lane": "x"}`), enqueue("c", `{"delay": "1 hour"}`)
	follows := enqueue("d", fmt.Sprintf(`{"after": [%d]}`, waits))
	for _, id := range []int64{follows, waits, laned, delayed} {
		require.Equal(t, "cancelled", cancel(id))
		require.Equal(t, "cancelled", cancel(id))
		j, err := db.Queue.Get(t.Context(), db.Pool, id)
		require.NoError(t, err)
		require.Equal(t, onceq.StateCancelled, j.State)
	}
	require.Equal(t, "unknown", cancel(1<<40))
	enqueue("a", `{}`) // its key is free
	db.Drain((&onceq.Kind[int]{Name: "k"}).Handle(func(ctx context.Context, l *onceq.Lease, _ int) error {
		require.Equal(t, "running", cancel(l.ID))
		require.Equal(t, 1, sqlOne[int](t, db, `select count(*)::int from onceq.job_cancels where job_id = $1`, l.ID))
		return errors.New("try it again")
	}))
	require.Equal(t, "cancelled", sqlOne[string](t, db, `select state from onceq.v_jobs where key = 'a' order by id desc limit 1`), "it was given back, and the request stayed")
	kept := enqueue("e", `{}`)
	db.Drain((&onceq.Kind[int]{Name: "k", Keep: time.Hour}).Handle(func(context.Context, *onceq.Lease, int) error { return nil }))
	require.Equal(t, "completed", cancel(kept))
	require.NoError(t, db.Check())
}

// Bad input is an error with a code of its own, and nothing is written.
func TestSQL_BadInput(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	for call, want := range map[string]string{
		`enqueue('')`:                                                            `kind is empty`,
		`enqueue(null)`:                                                          `kind is empty`,
		`enqueue(repeat('k', 129))`:                                              `kind has 129 bytes; at most 128`,
		`enqueue('k', '1', ' ')`:                                                 `key is only white space`,
		`enqueue('k', '1', repeat('k', 513))`:                                    `key has 513 bytes`,
		`enqueue('k', to_jsonb(repeat('x', 1048576)))`:                           `payload has more than 1048576 bytes`,
		`enqueue('k', options => '[]')`:                                          `options is a JSON array`,
		`enqueue('k', options => '{"prioritty": "high"}')`:                       `option "prioritty" is not known`,
		`enqueue('k', options => '{"priority": 1}')`:                             `option priority is a JSON number, and not string`,
		`enqueue('k', options => '{"priority": "urgent"}')`:                      `priority is "urgent"`,
		`enqueue('k', options => '{"max_attempts": 0}')`:                         `max_attempts is 0`,
		`enqueue('k', options => '{"timeout": "soon"}')`:                         `timeout is "soon"`,
		`enqueue('k', options => '{"timeout": "-1 second"}')`:                    `timeout is "-1 second"`,
		`enqueue('k', options => '{"max_attempts": 1.5}')`:                       `max_attempts is 1.5`,
		`enqueue('k', options => '{"delay": "soon"}')`:                           `delay or window is no interval`,
		`enqueue('k', options => '{"delay": "-1 s"}')`:                           `delay is negative`,
		`enqueue('k', options => '{"run_at": "never"}')`:                         `run_at is no time`,
		`enqueue('k', options => '{"run_at": "infinity"}')`:                      `onceq: run_at`,
		`enqueue('k', options => '{"run_at": "10001-01-01"}')`:                   `beyond the year 9999`,
		`enqueue('k', options => '{"run_at": "2030-01-01", "delay": "1 s"}')`:    `both set`,
		`enqueue('k', options => '{"window": "1 s"}')`:                           `window is set without a key`,
		`enqueue('k', '1', 'a', '{"window": "0 s"}')`:                            `window is not positive`,
		`enqueue('k', '1', 'a', '{"fields": ["a"]}')`:                            `fields names members of the payload, which is no object`,
		`enqueue('k', '{}', 'a', '{"fields": [1]}')`:                             `fields has something else than names`,
		`enqueue('k', options => '{"metadata": {"a": 1}}')`:                      `metadata has a member that is no string`,
		`enqueue('k', options => '{"overtake": true}')`:                          `without a lane`,
		`enqueue('a/b', options => '{"lane": "x"}')`:                             `lane_family contains a slash`,
		`enqueue('k', options => '{"limit": "/x"}')`:                             `limit begins or ends with a slash`,
		`enqueue('k', options => '{"lane": "x", "weight": 2}')`:                  `weight is set without a limit`,
		`enqueue('k', options => '{"limit": "x", "weight": 0}')`:                 `weight is 0; 1 to 1000000000 is possible`,
		`enqueue('k', options => '{"limit": "x", "weight": 1.5}')`:               `weight is 1.5`,
		`enqueue('k', options => '{"limit": "x", "weight": 1000000001}')`:        `weight is 1000000001`,
		`enqueue_many('{}')`:                                                     `jobs is no JSON array`,
		`enqueue_many('[{"kind": "k"}, {"kind": ""}]')`:                          `job 2: kind is empty`,
		`enqueue_many('[{"kind": "k", "key": 1}]')`:                              `job 1: it is no object with a kind, and a key that is a string`,
		`enqueue_many('[{"kind": "k", "key": "a"}, {"kind": "k", "key": "a"}]')`: `a key is twice in jobs: "a"`,
		`emit('', 'k')`: `scope is empty`,
		`emit('s', 'k', to_jsonb(repeat('x', 262144)))`:                      `payload has more than 262144 bytes`,
		`emit('s', 'k', '[1e10000]')`:                                        `a number with an exponent beyond 9999`,
		`enqueue('k', '{"a": [-1e-10000]}')`:                                 `a number with an exponent beyond 9999`,
		`enqueue('k', (repeat('[', 501) || '1' || repeat(']', 501))::jsonb)`: `nested deeper than 500`,
		`enqueue('k', '1', 'a', '{"window": "293 years"}')`:                  `window is longer than 292 years`,
		`enqueue('k', '1', chr(160) || chr(8195))`:                           `key is only white space`,
		`enqueue_many('[{"kind": "k", "prioritty": "high"}]')`:               `job 1: option "prioritty" is not known`,
		`enqueue('k', options => '{"replace": ["payload"]}')`:                `replace is set without a key`,
		`enqueue('k', '1', 'a', '{"replace": ["all"]}')`:                     `replace has something else than payload and time`,
		`enqueue('k', '1', 'a', '{"replace": ["time", null]}')`:              `replace has something else than payload and time`,
		`enqueue('k', '1', 'a', '{"replace": ["time"], "strict": true}')`:    `replace is set together with strict or after`,
		`enqueue('k', '1', 'a', '{"replace": ["time"], "after": [1]}')`:      `onceq: after names job 1, and no job has had that id yet`,
		`enqueue('k', options => '{"after": ["one"]}')`:                      `after has something else than ids of jobs`,
		`enqueue('k', options => '{"after": [0]}')`:                          `after has something else than ids of jobs`,
		`enqueue('k', options => '{"after": [], "if_dead": "run"}')`:         `if_dead is set without after`,
		`enqueue_many('[{"kind": "k", "after": [7]}]')`:                      `job 1: after names job 7`,
	} {
		_, err := db.Pool.Exec(t.Context(), `select * from onceq.`+call)
		require.ErrorContains(t, err, want, call)
		require.Equal(t, "OQ010", sqlstate.Of(err), call)
		var said *pgconn.PgError
		require.ErrorAs(t, err, &said)
		require.NotEmpty(t, said.Hint, call)
	}
	require.Zero(t, sqlOne[int](t, db, `select (select count(*) from onceq.jobs) + (select count(*) from onceq.job_waits) + (select count(*) from onceq.job_fences)`))
}

// The answers of many jobs are in their order, and so are the jobs of a lane.
func TestSQL_EnqueueMany(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	taken, err := db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "k", Key: "b", Payload: 2})
	require.NoError(t, err)
	var answers []string
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select array_agg(state || ' ' || duplicate) from onceq.enqueue_many($1::text::jsonb)`, `[
		{"kind": "k", "key": "z", "payload": 1}, {"kind": "k", "key": "b", "payload": 2}, {"kind": "k", "delay": "1 hour"},
		{"kind": "k", "key": "a", "lane": "x", "payload": 1}, {"kind": "k", "lane": "x", "payload": 2}, {"kind": "k", "lane": "x", "payload": 3}]`).Scan(&answers))
	require.Equal(t, []string{"waiting false", "waiting true", "delayed false", "waiting false", "waiting false", "waiting false"}, answers)
	require.Equal(t, taken.ID, sqlOne[int64](t, db, `select id from onceq.enqueue('k', '2', 'b')`))
	var ran []int
	kind := onceq.Kind[int]{Name: "k", Lane: func(int) string { return "x" }}
	db.Drain(kind.Handle(func(_ context.Context, l *onceq.Lease, n int) error {
		if l.Lane != "" {
			ran = append(ran, n)
		}
		return nil
	}))
	require.Equal(t, []int{1, 2, 3}, ran)
	sqlRun(t, db, `select from onceq.enqueue('deep', (repeat('[', 500) || '1' || repeat(']', 500))::jsonb, 'deep')`)
	sqlRun(t, db, `update onceq.job_fences set state = 3, finished_at = now() - interval '1 year' where key in ('z', 'a')`)
	require.Equal(t, []int64{3, 1}, sqlOne[[]int64](t, db, `
		with j as (select id, duplicate, n from onceq.enqueue_many('[{"kind": "k", "key": "z"}, {"kind": "k", "key": "new"}, {"kind": "k", "key": "a"}, {"kind": "k", "key": "b", "payload": 2}]') with ordinality as j(id, duplicate, state, output, n))
		select array[count(*) filter (where not duplicate), count(*) filter (where duplicate and n = 4)] from j`), "keys that have expired are taken over")
	require.Equal(t, 10_000, sqlOne[int](t, db, `
		with j as (select * from onceq.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'many', 'key', g::text, 'payload', g)) from generate_series(1, 10000) g)) with ordinality)
		select count(*)::int from j where not duplicate and id = (select min(id) from j) + ordinality - 1`))
	require.NoError(t, db.Check())
}

// A worker that waits hears of a job from SQL as of any other: it would poll an hour later.
func TestSQL_WakesAWorker(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	done := make(chan int, 10)
	kind := onceq.Kind[int]{Name: "k"}
	laned := onceq.Kind[int]{Name: "laned", Lane: func(int) string { return "one" }}
	handler := func(_ context.Context, _ *onceq.Lease, n int) error {
		done <- n
		return nil
	}
	start(t, db, onceq.WorkerConfig{PollInterval: time.Hour}, kind.Handle(handler), laned.Handle(handler))
	until(t, db, `exists (select from onceq.waiters where idle_until > now())`)
	for i, call := range []string{`enqueue('k', '0')`, `enqueue('laned', '1', null, '{"lane": "one"}')`, `enqueue_many('[{"kind": "k", "payload": 2}]')`} {
		sqlRun(t, db, `select from onceq.`+call)
		require.Equal(t, i, receive(t, done))
	}
}

// A lane's order and a limit hold across Go and SQL, one by one and many at once.
func TestSQL_LanesAndLimitsHoldAcrossBoth(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "l", onceq.Limit{AtOnce: 2}))
	const n = 40
	for i := 0; i < n; i += 4 {
		_, err := bySQL(t.Context(), db.Pool, "laned", fmt.Sprint(i), nil, `{"lane": "x", "limit": "l"}`)
		require.NoError(t, err)
		_, err = db.Queue.Enqueue(t.Context(), db.Pool, onceq.Job{Kind: "laned", Payload: i + 1, Lane: "x", Limit: "l"})
		require.NoError(t, err)
		sqlRun(t, db, `select from onceq.enqueue_many($1::text::jsonb)`, fmt.Sprintf(`[{"kind": "laned", "payload": %d, "lane": "x", "limit": "l"}, {"kind": "free", "payload": 0, "limit": "l"}]`, i+2))
		_, err = db.Queue.EnqueueMany(t.Context(), db.Pool, []onceq.Job{{Kind: "free", Payload: 1, Limit: "l"}, {Kind: "laned", Payload: i + 3, Lane: "x", Limit: "l"}, {Kind: "free", Payload: 2, Limit: "l"}})
		require.NoError(t, err)
	}
	var order []int
	var mu sync.Mutex
	var live, most, ran atomic.Int32
	all := make(chan struct{})
	handle := func(_ context.Context, l *onceq.Lease, i int) error {
		if now := live.Add(1); now > most.Load() {
			most.Store(now)
		}
		if l.Lane != "" {
			mu.Lock()
			order = append(order, i)
			mu.Unlock()
		}
		live.Add(-1)
		if ran.Add(1) == n/4*7 {
			close(all)
		}
		return nil
	}
	laned, free := onceq.Kind[int]{Name: "laned", Lane: func(int) string { return "x" }, Limit: func(int) string { return "l" }}, onceq.Kind[int]{Name: "free", Limit: func(int) string { return "l" }}
	start(t, db, onceq.WorkerConfig{}, laned.Handle(handle), free.Handle(handle))
	receive(t, all)
	for i, at := range order {
		require.Equal(t, i, at)
	}
	require.LessOrEqual(t, most.Load(), int32(2))
}

// A role with the producer's grants enqueues and reads its own answers, and not one row. What it plants in its search path, in its temporary
// schema and in its settings changes nothing.
func TestSQL_AProducersRights(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Schema("onceq"))
	owner := conformance.Owner(t, db)
	role := fmt.Sprintf("producer_%d", time.Now().UnixNano())
	run := func(conn interface {
		Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
	}, sql ...string) {
		t.Helper()
		for _, s := range sql {
			_, err := conn.Exec(t.Context(), s)
			require.NoError(t, err, s)
		}
	}
	run(owner, `create role `+role, `create schema evil authorization `+role, migrations.ProducerGrants("onceq", role))
	secret := add(t, db, onceq.Job{Key: "secret", Payload: map[string]string{"pin": "4711"}})
	conn, err := owner.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx := context.Background()
		_, err := conn.Exec(ctx, `reset all; reset role; drop owned by `+role+` cascade; drop role `+role)
		require.NoError(t, err)
		conn.Release()
	})
	run(conn, `set role `+role,
		`create function evil.replace(text, text, text) returns text language plpgsql as $$ begin raise exception 'evil'; end $$`,
		`create function evil.sha256(bytea) returns bytea language plpgsql as $$ begin raise exception 'evil'; end $$`,
		`create function evil.jsonb_typeof(jsonb) returns text language plpgsql as $$ begin raise exception 'evil'; end $$`,
		`create function evil.eq(bigint, bigint) returns boolean language plpgsql as $$ begin raise exception 'evil'; end $$`,
		`create function evil.arrow(jsonb, text) returns jsonb language plpgsql as $$ begin raise exception 'evil'; end $$`,
		`create operator evil.= (leftarg = bigint, rightarg = bigint, function = evil.eq)`,
		`create operator evil.-> (leftarg = jsonb, rightarg = text, function = evil.arrow)`, `create domain evil.bigint as text check (value is null)`,
		`create temp table jobs (id bigint)`, `create temp table job_fences (class int, scope text, key text)`, `create temp table meta (version int)`, `create temp sequence ids`,
		`create temp view v_jobs as select 1 as id`, `create type pg_temp.text as (a int)`, `create type pg_temp.jsonb as (a int)`,
		`create function pg_temp.sha256(bytea) returns bytea language sql as $$ select null::bytea $$`, `create function pg_temp.enqueue_one(a int) returns int language sql as $$ select 1 $$`,
		`set bytea_output = escape`, `set extra_float_digits = -15`, `set intervalstyle = iso_8601`, `set datestyle = 'SQL, DMY'`, `set quote_all_identifiers = on`, `set array_nulls = off`,
		`set transform_null_equals = on`, `set row_security = off`, `set default_transaction_isolation = serializable`, `set enable_indexscan = off`, `set timezone = 'Asia/Kathmandu'`,
		`set search_path = pg_temp, evil, pg_catalog`, `set standard_conforming_strings = off`, `set backslash_quote = on`, `set escape_string_warning = off`)
	run(conn, `select * from onceq.enqueue('k', '{"a\\"b": "c\\\\d"}', 'mine')`, `select * from onceq.enqueue('k', '{"a\\"b": "c\\\\d"}', 'mine')`, `select * from onceq.enqueue_many('[{"kind": "k", "lane": "x"}]')`,
		`select onceq.emit('s', 'k', '1')`, `select * from onceq.enqueue_bytes('k', 'abc')`)
	require.Equal(t, 1, sqlOne[int](t, db, `select count(*)::int from onceq.job_fences where key = 'mine'`))
	payload := json.RawMessage(`{"a\"b": "c\\d", "n": [1.50, 1e3, -0], "é": null}`)
	options := `{"lane": "x", "limit": "l", "run_at": "2030-01-31T08:00:00Z", "window": "P1DT1.5S", "metadata": {"a": "b"}}`
	job := onceq.Job{Kind: "k", Key: "of Go", Payload: payload, Lane: "x", Limit: "l", RunAt: time.Date(2030, 1, 31, 8, 0, 0, 0, time.UTC), Window: 24*time.Hour + 1500*time.Millisecond, Metadata: map[string]string{"a": "b"}}
	_, err = db.Queue.Enqueue(t.Context(), db.Pool, job)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `select onceq.enqueue('k', pg_catalog.jsonb($1::pg_catalog.text), 'of SQL', pg_catalog.jsonb($2::pg_catalog.text))`, string(payload), options)
	require.NoError(t, err)
	written := `select concat(f.fingerprint, ' ', f.lifetime, ' ', w.payload, ' ', w.metadata, ' ', w.run_at, ' ', w.lane, ' ', w.path, ' ', w.queue, ' ', w.max_attempts)
		from onceq.job_fences f join onceq.job_waits w on w.id = f.job_id where f.key = $1`
	require.Equal(t, sqlOne[string](t, db, written, "of Go"), sqlOne[string](t, db, written, "of SQL"))
	for _, call := range []string{
		`select * from onceq.jobs`, `select * from onceq.v_jobs`, `select * from onceq.job(1)`, `select onceq.cancel(1)`, `insert into onceq.lane_calls (slot, due, lane) values (0, now(), 'x')`, `select nextval('onceq.ids')`,
		`select * from onceq.enqueue_either('k', 'null', null, 'secret', '{}')`,
		`select onceq.finish('{1}', '{1}', '{1}', '{5}', '{""}', '{""}', '{0}', '{0}', false)`, `select onceq.discard(1)`, `select * from onceq.take_fence('onceq.ids', 'k', 'secret', 1, null)`,
		`select onceq.emit('s', 'k', '1', 1, 1, true)`, `select pg_catalog.lastval()`, `select pg_catalog.currval('onceq.ids')`, `create table onceq.mine ()`,
		`create trigger t after insert on onceq.jobs for each row execute function pg_catalog.suppress_redundant_updates_trigger()`, `alter function onceq.enqueue_many(pg_catalog.jsonb) security invoker`,
		`create rule r as on insert to onceq.jobs do also select 1`, `create policy p on onceq.jobs using (true)`, `comment on table onceq.jobs is 'x'`, `truncate onceq.jobs`,
		`copy onceq.jobs to stdout`, `select * from onceq.replace_jobs('{1}', '{k}', '{secret}', '{1}', '{null}', '{""}', '{null}', '{3}', '{0}', '{0}', '{""}', '{null}')`,
	} {
		_, err := conn.Exec(t.Context(), call)
		require.Contains(t, []string{"42501", "42883"}, sqlstate.Of(err), call)
	}
	_, err = conn.Exec(t.Context(), `select * from onceq.enqueue('k', '{"pin": "1"}', 'secret')`)
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, []string{"OQ011", "Members that differ: pin"}, []string{refused.Code, refused.Detail})
	require.NotContains(t, fmt.Sprintf("%+v", refused), "4711")
	run(conn, `reset role`)
	require.Equal(t, secret, sqlOne[int64](t, db, `select job_id from onceq.job_fences where key = 'secret'`))
	other := role + "_other" // whom nobody has granted anything
	run(conn, `create role `+other, `grant usage on schema onceq to `+other, `set role `+other)
	_, err = conn.Exec(t.Context(), `select * from onceq.enqueue('k')`)
	require.Equal(t, "42501", sqlstate.Of(err))
	run(conn, `reset role`, `drop owned by `+other, `drop role `+other)
	require.NoError(t, db.Check())
}

// The page's trigger enqueues for whoever inserts, and the page names each option that there is.
func TestSQL_ThePageIsTrue(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/use/sql.md")
	require.NoError(t, err)
	_, trigger, _ := strings.Cut(string(page), "## From a trigger\n\n```sql\n")
	trigger, _, found := strings.Cut(trigger, "```")
	require.True(t, found)
	db := queuetest.New(t, queuetest.Schema("onceq"))
	conn, err := conformance.Owner(t, db).Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	role := fmt.Sprintf("inserts_%d", time.Now().UnixNano())
	for _, sql := range []string{
		`create table users (id int)`, trigger, `create role ` + role, `grant insert on users to ` + role,
		`set role ` + role, `insert into users values (7)`, `reset role`, `drop owned by ` + role, `drop role ` + role,
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	require.Equal(t, `welcome user 7 {"user": 7}`, sqlOne[string](t, db, `select concat_ws(' ', kind, key, payload) from onceq.jobs`))
	_, each, _ := strings.Cut(string(page), "## One example of each\n\n```sql\n")
	each, _, _ = strings.Cut(each, "```")
	calls := strings.Split(strings.TrimSpace(each), ";\n")
	require.Len(t, calls, 6)
	for _, call := range calls {
		sqlRun(t, db, call)
	}

	_, err = db.Pool.Exec(t.Context(), `select onceq.enqueue('k', options => '{"none": 1}')`)
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	names := strings.Split(strings.TrimSuffix(strings.TrimPrefix(refused.Hint, "Possible: "), "."), ", ")
	require.Greater(t, len(names), 10)
	for _, name := range names {
		require.Contains(t, string(page), "`"+name+"`")
	}
}
