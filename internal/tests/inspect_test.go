package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

func TestGet(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	_, err := q.Get(ctx, db.Pool, 1)
	wantError(t, err, onceq.ErrNotFound)

	id := repairEnqueue(t, db, onceq.Job{Key: "a", Scope: "s", Payload: map[string]int{"n": 1}, Metadata: map[string]string{"m": "1"}, Priority: onceq.PriorityHigh, MaxAttempts: 2})
	get := func(want onceq.State) onceq.JobInfo {
		t.Helper()
		i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id))
		k := must[onceq.JobInfo](t)(q.GetByKey(ctx, db.Pool, "s", "a"))
		if i.State != want || fmt.Sprintf("%+v", i) != fmt.Sprintf("%+v", k) {
			t.Fatalf("%+v and, by key, %+v; want %s", i, k, want)
		}
		return i
	}
	i := get(onceq.StateWaiting)
	if i.Kind != "mail" || i.Queue != "default" || i.Scope != "s" || i.Key != "a" || string(i.Payload) != `{"n": 1}` || i.Bytes != nil ||
		i.Metadata["m"] != "1" || i.Priority != onceq.PriorityHigh || i.MaxAttempts != 2 || i.CreatedAt.IsZero() || i.RunAt.IsZero() || i.Token != 0 {
		t.Fatalf("%+v", i)
	}
	l := repairClaim(t, db)
	if i = get(onceq.StateRunning); i.Token != l.Token || !i.LeasedUntil.Equal(l.Until) {
		t.Fatalf("%+v, lease %+v", i, l)
	}
	for n, want := range []onceq.State{onceq.StateRetrying, onceq.StateDead} {
		if err := l.Fail(ctx, fmt.Errorf("error %d", n+1)); err != nil {
			t.Fatal(err)
		}
		i = get(want)
		if want == onceq.StateRetrying {
			wantState(t, onceq.StateRetrying)(onceqops.New(q).Retry(ctx, db.Pool, id))
			l = repairClaim(t, db)
		}
	}
	if len(i.Errors) != 2 || i.Errors[1].Attempt != 2 || i.Errors[1].Error != "error 2" || time.Since(i.Errors[1].At) > time.Hour || i.FinishedAt.IsZero() || !i.KeepUntil.IsZero() {
		t.Fatalf("%+v", i)
	}

	id = repairEnqueue(t, db, onceq.Job{Payload: []byte{0, 255}})
	if i := must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)); string(i.Bytes) != "\x00\xff" || i.Payload != nil {
		t.Fatalf("%+v", i)
	}
}

func TestGetByKeyWithoutHistory(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	id := repairEnqueue(t, db, onceq.Job{Key: "a"})
	l := repairClaim(t, db)
	if err := l.SetResult(7); err != nil {
		t.Fatal(err)
	}
	if err := l.Complete(ctx, nil); err != nil {
		t.Fatal(err)
	}
	_, err := q.Get(ctx, db.Pool, id)
	wantError(t, err, onceq.ErrNotFound)
	i := must[onceq.JobInfo](t)(q.GetByKey(ctx, db.Pool, "mail", "a"))
	if i.ID != id || i.State != onceq.StateCompleted || string(i.Result) != "7" || i.FinishedAt.IsZero() || i.Token != l.Token {
		t.Fatalf("%+v", i)
	}
	_, err = q.GetByKey(ctx, db.Pool, "mail", "b")
	wantError(t, err, onceq.ErrNotFound)
}

func TestList(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	dead := repairDead(t, db, onceq.Job{Key: "a", Scope: "s"})
	other := repairEnqueue(t, db, onceq.Job{Queue: "other", Kind: "sms"})
	delayed := repairEnqueue(t, db, onceq.Job{Delay: time.Hour, Key: "b", Scope: "s"})
	gone := repairEnqueue(t, db, onceq.Job{Queue: "third"})
	wantState(t, onceq.StateCancelled)(q.Cancel(ctx, db.Pool, gone))
	created := func(id int64) time.Time { return must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, id)).CreatedAt }
	for name, test := range map[string]struct {
		filter onceqops.Filter
		want   []int64
	}{
		"all":          {onceqops.Filter{}, []int64{gone, delayed, other, dead}},
		"limit":        {onceqops.Filter{Limit: 2}, []int64{gone, delayed}},
		"after":        {onceqops.Filter{After: delayed}, []int64{other, dead}},
		"queue":        {onceqops.Filter{Queue: "default"}, []int64{delayed, dead}},
		"kind":         {onceqops.Filter{Kind: "sms"}, []int64{other}},
		"scope":        {onceqops.Filter{Scope: "s"}, []int64{delayed, dead}},
		"dead":         {onceqops.Filter{States: []onceq.State{onceq.StateDead}}, []int64{dead}},
		"ids":          {onceqops.Filter{IDs: []int64{dead, other, 1 << 40}}, []int64{other, dead}},
		"no ids":       {onceqops.Filter{IDs: []int64{}}, nil},
		"from":         {onceqops.Filter{CreatedFrom: created(other)}, []int64{gone, delayed, other}},
		"before":       {onceqops.Filter{CreatedBefore: created(other)}, []int64{dead}},
		"between":      {onceqops.Filter{CreatedFrom: created(other), CreatedBefore: created(gone)}, []int64{delayed, other}},
		"dead in none": {onceqops.Filter{Queue: "other", States: []onceq.State{onceq.StateDead, onceq.StateDead}}, nil},
		"mixed":        {onceqops.Filter{States: []onceq.State{onceq.StateWaiting, onceq.StateCancelled}}, []int64{gone, other}},
		"everything":   {onceqops.Filter{Queue: "default", Kind: "mail", Scope: "s", States: []onceq.State{onceq.StateDelayed, onceq.StateDead}, After: delayed, Limit: 1}, []int64{dead}},
	} {
		var got []int64
		for _, i := range must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, test.filter)) {
			got = append(got, i.ID)
		}
		if fmt.Sprint(got) != fmt.Sprint(test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
		got = nil
		for f := test.filter; ; {
			page, next, err := onceqops.New(q).Page(ctx, db.Pool, f)
			if err != nil {
				t.Fatal(err)
			}
			for _, i := range page {
				got = append(got, i.ID)
			}
			if f.After = next; next == 0 || f.Limit > 0 && len(got) >= f.Limit {
				break
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(test.want) {
			t.Errorf("%s: pages have %v, want %v", name, got, test.want)
		}
		if n := must[int](t)(onceqops.New(q).Count(ctx, db.Pool, test.filter)); n != len(test.want) {
			t.Errorf("%s: %d counted, want %d", name, n, len(test.want))
		}
	}
	var bad *onceq.InvalidError
	for _, f := range []onceqops.Filter{{Limit: -1}, {States: []onceq.State{0}}} {
		if _, err := onceqops.New(q).Count(ctx, db.Pool, f); !errors.As(err, &bad) {
			t.Errorf("%+v: error %v", f, err)
		}
	}
	for _, f := range []onceqops.Filter{{Limit: -1}, {Limit: 1001}, {States: []onceq.State{0}}} {
		if _, err := onceqops.New(q).List(ctx, db.Pool, f); !errors.As(err, &bad) {
			t.Errorf("%+v: error %v", f, err)
		}
	}
}

// Whoever wants no payloads, metadata and results gets all the rest, and the database reads none of them. Explain is such a one.
func TestList_WithoutPayloads(t *testing.T) {
	t.Parallel()
	texts := &sqlTexts{}
	db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = texts }))
	ctx, q := t.Context(), db.Queue
	kept := onceq.Kind[string]{Name: "kept", Keep: time.Hour}
	laned := onceq.Kind[string]{Name: "laned", Lane: func(string) string { return "x" }}
	meta := map[string]string{"m": "secret"}
	first := repairEnqueue(t, db, onceq.Job{Kind: "kept", Payload: "secret", Metadata: meta})
	db.Drain(kept.Handle(func(_ context.Context, l *onceq.Lease, _ string) error { return l.SetResult("secret") }))
	repairEnqueue(t, db, onceq.Job{Kind: "bytes", Payload: []byte{0, 255}, Metadata: meta})
	for range 2 { // the second one waits for its lane
		job := laned.Job("secret")
		job.Metadata = meta
		repairEnqueue(t, db, job)
	}

	whole := must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{}))
	require.Len(t, whole, 4)
	texts.seen = nil
	list := must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{WithoutPayloads: true}))
	page, _, err := onceqops.New(q).Page(ctx, db.Pool, onceqops.Filter{WithoutPayloads: true})
	require.NoError(t, err)
	require.Equal(t, list, page)
	_, _, err = onceqops.New(q).Doubts(ctx, db.Pool, onceqops.Filter{WithoutPayloads: true, States: []onceq.State{onceq.StateWaiting, onceq.StateCompleted}})
	require.NoError(t, err)
	why := must[onceqops.Explanation](t)(onceqops.New(q).Explain(ctx, db.Pool, first))
	require.Equal(t, list[3], why.Job)
	for i, j := range whole {
		require.Equal(t, 1, len(j.Metadata))
		require.NotEqual(t, j.Payload == nil, j.Bytes == nil)
		j.Payload, j.Bytes, j.Metadata, j.Result = nil, nil, nil, nil
		require.Equal(t, j, list[i])
	}
	asked := regexp.MustCompile(`case when \$\d+::bool then [jwh]\.(payload|payload_bytes|metadata|result)(::text)? end`)
	for _, text := range texts.seen {
		require.NotRegexp(t, `[jwh]\.(payload|metadata|result)`, asked.ReplaceAllString(text, ""))
	}
}

// Keys, Effects and Members leave results unread if they are told so, and the rest is as it was.
func TestResults_Unread(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	member := onceq.Kind[string]{Name: "member", Keep: time.Hour, Key: func(string) string { return "key" }}
	g := must[onceq.Group](t)(q.EnqueueGroup(ctx, db.Pool, []onceq.Job{member.Job("secret")}, onceq.Job{Kind: "then", Delay: time.Hour}))
	db.Drain(member.Handle(func(ctx context.Context, l *onceq.Lease, _ string) error {
		for _, name := range []string{"a", "b", "c"} {
			if _, err := onceq.Once(ctx, l, name, func(context.Context, string) (string, error) { return "secret", nil }); err != nil {
				return err
			}
		}
		return l.SetResult("secret")
	}))
	without := onceqops.Filter{WithoutPayloads: true}

	keys := must[[]onceqops.KeyInfo](t)(onceqops.New(q).Keys(ctx, db.Pool, "", "key"))
	require.JSONEq(t, `"secret"`, string(keys[0].Result))
	keys[0].Result = nil
	require.Equal(t, keys, must[[]onceqops.KeyInfo](t)(onceqops.New(q).Keys(ctx, db.Pool, "", "key", without)))

	members := must[[]onceq.Member](t)(listed(onceqops.New(q).Members(ctx, db.Pool, g.Then.ID)))
	require.JSONEq(t, `"secret"`, string(members[0].Result))
	members[0].Result = nil
	require.Equal(t, members, must[[]onceq.Member](t)(listed(onceqops.New(q).Members(ctx, db.Pool, g.Then.ID, without))))

	effects := must[[]onceqops.EffectInfo](t)(onceqops.New(q).Effects(ctx, db.Pool, g.Members[0].ID))
	require.Len(t, effects, 3)
	require.Equal(t, effects[:2], must[[]onceqops.EffectInfo](t)(onceqops.New(q).Effects(ctx, db.Pool, g.Members[0].ID, onceqops.Filter{Limit: 2})))
	for i := range effects {
		require.JSONEq(t, `"secret"`, string(effects[i].Result))
		effects[i].Result = nil
	}
	require.Equal(t, effects, must[[]onceqops.EffectInfo](t)(onceqops.New(q).Effects(ctx, db.Pool, g.Members[0].ID, without)))
}

// With 200,000 live jobs and 40,000 in the history, each page looks at few rows, and all pages together have what List has.
func TestTrapPageReadsFewRowsOfManyJobs(t *testing.T) {
	t.Parallel()
	look := new(seen)
	db := queuetest.New(t, look.option())
	ctx := t.Context()
	fillJobs(t, db, 100_000)
	fillHistory(t, db, 20_000)
	for _, statement := range []string{
		`update jobs set kind = 'rare' where id in (7, 60000, 199999)`,
		`update jobs set leased_until = now() + interval '1 h', claims = 1, holder = 1 where id in (8, 60001)`,
		`update jobs set queue = 'small' where id in (9, 150000)`,
		`update job_history set kind = 'rare' where id in (200003, 230001, 239999)`,
		`vacuum analyze jobs, job_history`,
	} {
		must[pgconn.CommandTag](t)(owner(t, db).Exec(ctx, statement))
	}
	for name, f := range map[string]onceqops.Filter{
		"rare kind":          {Kind: "rare"},
		"rare kind, live":    {Kind: "rare", States: []onceq.State{onceq.StateWaiting}},
		"rare kind, dead":    {Kind: "rare", States: []onceq.State{onceq.StateDead, onceq.StateHeld}},
		"rare state":         {States: []onceq.State{onceq.StateRunning}},
		"rare kind, queue":   {Queue: "q0", Kind: "rare"},
		"small queue":        {Queue: "small"},
		"kind, small queue":  {Queue: "small", Kind: "rare"},
		"no such queue":      {Queue: "none"},
		"created before all": {CreatedBefore: time.Unix(0, 0)},
	} {
		var want, got []int64
		for _, i := range must[[]onceq.JobInfo](t)(onceqops.New(db.Queue).List(ctx, db.Pool, f)) {
			want = append(want, i.ID)
		}
		rest, pages := f, 0
		for {
			look.guardedOnes = []seen{}
			page, next, err := onceqops.New(db.Queue).Page(ctx, db.Pool, rest)
			require.NoError(t, err)
			for _, i := range page {
				got = append(got, i.ID)
			}
			if pages++; pages == 1 || pages == 5 {
				read, ones := 0, look.guardedOnes
				look.guardedOnes = nil
				for _, one := range ones {
					read += one.rowsRead(t, db)
				}
				if read > 40_000 {
					t.Errorf("%s: page %d read %d rows", name, pages, read)
				}
			}
			if rest.After = next; next == 0 {
				break
			}
		}
		require.Equal(t, want, got, name)
		if f.Queue == "small" || f.Queue == "none" {
			require.Equal(t, 1, pages, name)
		}
	}
}

func TestTrapListReadsBoundedRangesOfIndexes(t *testing.T) {
	t.Parallel()
	look := new(seen)
	db := queuetest.New(t, look.option())
	fillJobs(t, db, 20_000)
	fillHistory(t, db, 20_000)
	for _, f := range []onceqops.Filter{
		{}, {After: 30_000}, {Queue: "q1"}, {States: []onceq.State{onceq.StateDead}}, {Queue: "none", States: []onceq.State{onceq.StateHeld, onceq.StateDead}},
	} {
		must[[]onceq.JobInfo](t)(onceqops.New(db.Queue).List(t.Context(), db.Pool, f))
		if f.Queue == "" || f.States != nil {
			look.wantNoScan(t, db)
		}
	}
	must[onceq.JobInfo](t)(db.Queue.Get(t.Context(), db.Pool, 30_000))
	look.wantNoScan(t, db)
}

// A history that has one queue and one state alone, which its statistics know, is not read to find that it has no job of another
// state: not through its primary key, and not the part of the index that has the other state. A search for a kind of which there is none,
// as far as statistics know, does not use the primary key either.
func TestTrapListOfAStateThatIsNotThere(t *testing.T) {
	t.Parallel()
	look := new(seen)
	db := queuetest.New(t, look.option())
	must[pgconn.CommandTag](t)(owner(t, db).Exec(t.Context(), `insert into job_history (id, run_at, created_at, finished_at, claims, lost, attempts, max_attempts, priority, state, queue, kind, payload)
		select nextval('ids'), now(), now(), now(), 1, 0, 1, 25, 0, 6, 'q0', 'mail', '{}' from generate_series(1, 30000)`))
	must[pgconn.CommandTag](t)(owner(t, db).Exec(t.Context(), `analyze job_history`))
	for _, f := range []onceqops.Filter{{}, {Limit: 5}, {States: []onceq.State{onceq.StateHeld}}, {Queue: "q0", States: []onceq.State{onceq.StateHeld}}, {Kind: "none"}} {
		must[[]onceq.JobInfo](t)(onceqops.New(db.Queue).List(t.Context(), db.Pool, f))
		last := *look
		if err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "set local enable_seqscan = off; set local enable_hashjoin = off; set local enable_mergejoin = off; set local enable_bitmapscan = off"); err != nil {
				return err
			}
			rows, err := tx.Query(t.Context(), "explain (analyze, buffers, costs off, timing off) "+last.statement, last.args...)
			if err != nil {
				return err
			}
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if plan := strings.Join(lines, "\n"); strings.Contains(plan, "job_history_pkey") {
				t.Errorf("%+v reads the history through its primary key:\n%s", f, plan)
			} else if pages := regexp.MustCompile(`shared hit=(\d+)`).FindStringSubmatch(plan); f.States != nil && len(pages[1]) > 2 {
				t.Errorf("%+v reads more than 99 pages:\n%s", f, plan)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// Invariants finds each violation that is made here, and names its id.
func TestInvariantsFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.NoCheck())
	repairEnqueue(t, db, onceq.Job{Key: "a"})
	repairEnqueue(t, db, onceq.Job{Key: "b"})
	repairDead(t, db, onceq.Job{Priority: onceq.PriorityHigh})
	if err := db.Check(); err != nil {
		t.Fatal(err)
	}
	for _, wrong := range []string{
		`delete from onceq.job_fences where key = 'a'`,
		`delete from onceq.jobs where key = 'a'`,
		`update onceq.job_fences set state = 3 where key = 'a'`,
		`update onceq.job_fences set job_id = 2 where key = 'a'`,
		`update onceq.job_fences set token = 5 where key = 'b'`,
		`update onceq.job_fences set state = 4, finished_at = now() where key = 'b'`,
		`update onceq.job_fences set state = 1 where key = 'b'`,
		`update onceq.jobs set leased_until = now(), claims = 1 where key = 'a'`,
		`update onceq.jobs set holder = 1 where key = 'a'`,
		`update onceq.jobs set leased_until = now(), holder = 1 where key = 'a'`,
		`update onceq.jobs set payload_bytes = '' where key = 'a'`,
		`update onceq.jobs set payload = null where key = 'a'`,
		`update onceq.jobs set attempts = max_attempts where key = 'a'`,
		`update onceq.jobs set scope = null where key = 'a'`,
		`update onceq.jobs set id = 4 where key = 'a'`,
		`update onceq.job_history set id = 1`,
		`update onceq.job_history set keep_until = now()`,
		`update onceq.job_history set state = 3`,
		`insert into onceq.job_fences (class, scope, key, state, token, created_at, lifetime) values (1, 's', 'k', 3, 1, now(), 0)`,
		`insert into onceq.job_fences (class, scope, key, state, token, created_at, lifetime) values (1, 's', 'k', 1, 1, now(), 0)`,
		`insert into onceq.job_fences (class, scope, key, state, token, created_at, lifetime) values (1, 's', 'k', 6, 1, now(), 0)`,
		`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime) values (3, 's', '5/a', 3, 4, 4 << 20, now(), 0)`,
		`insert into onceq.job_fences (class, scope, key, state, job_id, token, created_at, lifetime, finished_at) values (3, 's', '1/a', 3, 1, 1 << 20, now(), 0, now())`,
	} {
		tx := begin(t, db)
		if _, err := tx.Exec(t.Context(), wrong); err != nil {
			t.Fatalf("%s: %v", wrong, err)
		}
		if err := queuetest.Invariants(t.Context(), tx, db.Schema); err == nil {
			t.Errorf("not found: %s", wrong)
		} else {
			t.Log(err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// "Never" is often the last second of the year 9999. East of UTC that is in the year 10000, which JSON has no text for.
func TestJobInfo_AsJSONAtTheEndOfTime(t *testing.T) {
	t.Parallel()
	never := time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t, queuetest.PoolConfig(func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = mode
				c.ConnConfig.RuntimeParams["timezone"] = "Asia/Tokyo"
				c.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
					conn.TypeMap().RegisterType(&pgtype.Type{Name: "timestamptz", OID: pgtype.TimestamptzOID,
						Codec: &pgtype.TimestamptzCodec{ScanLocation: time.FixedZone("Tokyo", 9*60*60)}})
					return nil
				}
			}))
			laned := onceq.Kind[int]{Name: "laned", Lane: func(int) string { return "x" }}
			jobs := []onceq.Job{{Kind: "k", RunAt: never}, {Kind: "k", Key: "cancelled", RunAt: never}, laned.Job(1)}
			jobs[2].RunAt = never
			results, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
			require.NoError(t, err)
			_, err = db.Queue.Cancel(t.Context(), db.Pool, results[1].ID)
			require.NoError(t, err)
			for _, r := range results {
				e, err := onceqops.New(db.Queue).Explain(t.Context(), db.Pool, r.ID)
				require.NoError(t, err)
				require.Equal(t, never, e.Job.RunAt.UTC())
				_, err = json.Marshal(e)
				require.NoError(t, err)
			}
			list, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{})
			require.NoError(t, err)
			_, err = json.Marshal(list)
			require.NoError(t, err)
		})
	}
}

// A job as JSON is readable, and decodes to the same job.
func TestJobInfo_AsJSON(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ctx, q := t.Context(), db.Queue
	first := repairEnqueue(t, db, onceq.Job{Key: "a", Payload: map[string]int{"n": 1}, Metadata: map[string]string{"m": "1"}, Priority: onceq.PriorityLow})
	repairEnqueue(t, db, onceq.Job{Payload: []byte{0, 255}})
	raw := must[[]byte](t)(json.Marshal(must[onceq.JobInfo](t)(q.Get(ctx, db.Pool, first))))
	var shown map[string]any
	if err := json.Unmarshal(raw, &shown); err != nil {
		t.Fatal(err)
	}
	if at, ok := shown["created_at"].(string); !ok || at != shown["run_at"] || at != shown["due_at"] {
		t.Errorf("times: %s", raw)
	}
	for _, name := range []string{"created_at", "run_at", "due_at"} {
		delete(shown, name)
	}
	want := map[string]any{
		"id": float64(first), "kind": "mail", "queue": "default", "scope": "mail", "key": "a", "state": "waiting", "payload": map[string]any{"n": 1.0},
		"metadata": map[string]any{"m": "1"}, "priority": "low", "attempts": 0.0, "max_attempts": 25.0, "lost": 0.0, "claims": 0.0,
	}
	if !reflect.DeepEqual(shown, want) {
		t.Errorf("%s", raw)
	}

	l := repairClaim(t, db)
	if err := l.SetResult(7); err != nil {
		t.Fatal(err)
	}
	if err := l.Fail(ctx, onceq.Fatal(errors.New("no"))); err != nil {
		t.Fatal(err)
	}
	repairClaim(t, db)
	for _, i := range must[[]onceq.JobInfo](t)(onceqops.New(q).List(ctx, db.Pool, onceqops.Filter{})) {
		raw := must[[]byte](t)(json.Marshal(i))
		var back onceq.JobInfo
		if err := json.Unmarshal(raw, &back); err != nil {
			t.Fatal(err)
		}
		again := must[[]byte](t)(json.Marshal(back))
		if string(raw) != string(again) || strings.Contains(string(raw), "0001-01-01") || back.ID != i.ID || back.State != i.State || back.Priority != i.Priority ||
			!back.LeasedUntil.Equal(i.LeasedUntil) || !slices.Equal(back.Bytes, i.Bytes) || string(back.Payload) == "" && i.Bytes == nil {
			t.Errorf("%s came back as %s", raw, again)
		}
	}
	if raw := must[[]byte](t)(json.Marshal(onceqops.EffectInfo{Name: "charge", State: "held", Detail: "reset", IdempotencyKey: "oq_1"})); string(raw) != `{"name":"charge","state":"held","since":"0001-01-01T00:00:00Z","detail":"reset","idempotency_key":"oq_1"}` {
		t.Errorf("%s", raw)
	}
	if raw := must[[]byte](t)(json.Marshal(onceq.Result{ID: 7, State: onceq.StateCompleted, Output: json.RawMessage(`{"a":1}`)})); string(raw) != `{"id":7,"duplicate":false,"state":"completed","output":{"a":1}}` {
		t.Errorf("%s", raw)
	}
	var s onceq.State
	if err := json.Unmarshal([]byte(`"walking"`), &s); err == nil || !strings.Contains(err.Error(), "waiting, delayed") {
		t.Errorf("%v", err)
	}
	var p onceq.Priority
	if err := json.Unmarshal([]byte(`"urgent"`), &p); err == nil || !strings.Contains(err.Error(), "high, normal or low") {
		t.Errorf("%v", err)
	}
}

// A failed attempt says who ran it, and for how long, whichever statement writes it: that of plain jobs, of
// lanes, or of dead jobs. What ends without a handler says nothing of one.
func TestAttempts_SayWhoRanThem(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Config(onceq.Config{Version: "v1.4.2"}))
	ctx, q := t.Context(), db.Queue
	host, err := os.Hostname()
	require.NoError(t, err)
	plain := onceq.Kind[int]{Name: "plain", MaxAttempts: 2, Backoff: func(int, error) time.Duration { return 0 }}
	laned := onceq.Kind[int]{Name: "laned", MaxAttempts: 2, Limit: func(int) string { return "few" }, Backoff: plain.Backoff}
	const took = 2 * time.Millisecond
	fails := func(context.Context, *onceq.Lease, int) error {
		time.Sleep(took)
		return errors.New("no, \"not\" <so>")
	}
	inTx := onceq.Kind[int]{Name: "in a transaction", MaxAttempts: 2, Backoff: plain.Backoff}
	for _, k := range []struct {
		job onceq.Job
		h   onceq.Handler
	}{
		{plain.Job(1), plain.Handle(fails)},
		{laned.Job(1), laned.Handle(fails)},
		{inTx.Job(1), inTx.HandleTx(func(ctx context.Context, _ pgx.Tx, l *onceq.Lease, n int) error { return fails(ctx, l, n) })},
	} {
		id := repairEnqueue(t, db, k.job)
		for j := (onceq.JobInfo{}); j.State != onceq.StateDead; {
			db.Drain(k.h)
			j, err = q.Get(ctx, db.Pool, id)
			require.NoError(t, err)
			for i, e := range j.Errors {
				require.Equal(t, i+1, e.Attempt, k.job.Kind)
				require.Equal(t, []any{host, os.Getpid(), "v1.4.2", `no, "not" <so>`}, []any{e.Host, e.Process, e.Version, e.Error}, k.job.Kind)
				require.GreaterOrEqual(t, e.Took, took)
				require.Less(t, e.Took, e.At.Sub(j.CreatedAt)+time.Minute)
			}
		}
	}

	// Outside a worker it is the process that has the lease, since its claim.
	id := repairEnqueue(t, db, onceq.Job{})
	l := repairClaim(t, db)
	require.NoError(t, l.Fail(ctx, onceq.Fatal(errors.New("no"))))
	j, err := q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, []any{host, os.Getpid(), "v1.4.2"}, []any{j.Errors[0].Host, j.Errors[0].Process, j.Errors[0].Version})
	require.Positive(t, j.Errors[0].Took)

	// Nobody ran an attempt of a job that its lost leases end.
	id = repairEnqueue(t, db, onceq.Job{})
	_, err = db.Pool.Exec(ctx, `update onceq.jobs set lost = 5, claims = 5 where id = $1`, id)
	require.NoError(t, err)
	db.Drain(onceq.Kind[int]{Name: "mail", Queue: "default"}.Handle(fails))
	j, err = q.Get(ctx, db.Pool, id)
	require.NoError(t, err)
	require.Equal(t, onceq.StateDead, j.State)
	require.Equal(t, onceq.AttemptError{At: j.Errors[0].At, Attempt: 1, Error: j.Errors[0].Error}, j.Errors[0])
	require.Contains(t, j.Errors[0].Error, "5 leases of this job ran out")

	long := strings.Repeat("v", onceq.MaxNameBytes+1)
	for _, bad := range []string{long, "v\x00", "\xff"} {
		_, err := onceq.New(db.Pool, &onceq.Config{Version: bad})
		var invalid *onceq.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "Config.Version", invalid.Field)
	}
}
