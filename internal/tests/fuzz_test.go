package tests

import (
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/conformance"
	"github.com/onceq/onceq/migrations"
	"github.com/onceq/onceq/queuetest"
)

// These compare what fuzzing finds with Postgres itself: what the library accepts must be stored without an error and come
// back unchanged. A plain test run tries the seeds; go test -fuzz=FuzzX goes on from there.

// fuzzQueues gives queues over one database, one for each way in which pgx sends arguments: apart from the statement, which
// is the default, and inside its text.
func fuzzQueues(f *testing.F, opts ...queuetest.Option) (db *queuetest.DB, pools []*pgxpool.Pool, queues []*onceq.Queue) {
	f.Helper()
	quiet := onceq.Config{Logger: slog.New(slog.DiscardHandler)}
	db = queuetest.New(f, append(opts, queuetest.Config(quiet))...)
	for _, mode := range []pgx.QueryExecMode{db.Pool.Config().ConnConfig.DefaultQueryExecMode, pgx.QueryExecModeSimpleProtocol} {
		config := db.Pool.Config()
		config.ConnConfig.DefaultQueryExecMode = mode
		pool, err := pgxpool.NewWithConfig(f.Context(), config)
		require.NoError(f, err)
		f.Cleanup(pool.Close)
		q, err := onceq.New(pool, &onceq.Config{Schema: db.Schema, Logger: quiet.Logger})
		require.NoError(f, err)
		pools, queues = append(pools, pool), append(queues, q)
	}
	return db, pools, queues
}

// hostile are texts that have broken parsers, encoders and statements elsewhere.
var hostile = []string{
	"", " ", "a", `'; drop table onceq.jobs; --`, `"; drop schema onceq cascade; --`, `\'; select 1; --`, `$1`, `$$`, `$onceq$`, `{a,b}`, `{"a\"}`,
	`NULL`, `null`, "a\x00b", "\xff\xfe", "\u00a0", "\u2028", "\ufeff", "e\u0301", "\U0001F600", "%s%n", "/*", "*/", "--", "\\", `\\`, "'", "''", `"`, `""`,
	"onceq.", "'onceq.", "?", "@x", ":x", "$1$2", "E'\\n'", "\n", "\r\n", "\t", "\x7f", "\x01", strings.Repeat("k", 512), strings.Repeat("é", 256), strings.Repeat("k", 513),
}

// Names, payloads and metadata, one by one and in arrays, are either refused before anything is sent or stored as they are.
func FuzzEnqueue_StoresWhatItTakes(f *testing.F) {
	db, pools, queues := fuzzQueues(f)
	cleaner := owner(f, db)
	for i, s := range hostile {
		other := hostile[(i+7)%len(hostile)]
		f.Add(s, other, s, other, []byte(s), s)
	}
	f.Fuzz(func(t *testing.T, kind, queue, scope, key string, bytes []byte, text string) {
		ctx := t.Context()
		for n, q := range queues {
			_, err := cleaner.Exec(ctx, `truncate jobs, job_fences`)
			require.NoError(t, err)
			meta := map[string]string{text: text}
			jobs := []onceq.Job{
				{Kind: kind, Queue: queue, Scope: scope, Key: key, Payload: bytes, Metadata: meta},
				{Kind: kind, Queue: queue, Scope: scope, Key: key + "2", Payload: text, Delay: time.Hour},
				{Kind: kind, Queue: queue, Payload: map[string]string{text: text}},
			}
			var results []onceq.Result
			err = pgx.BeginFunc(ctx, pools[n], func(tx pgx.Tx) (err error) {
				results, err = q.EnqueueMany(ctx, tx, jobs)
				var one int
				require.NoError(t, tx.QueryRow(ctx, `select 1`).Scan(&one), "the transaction is not usable after %v", err)
				return err
			})
			single, errSingle := q.Enqueue(ctx, pools[n], jobs[0])
			var invalid *onceq.InvalidError
			if err != nil {
				require.ErrorAs(t, err, &invalid, "refused by the database, not by the library")
				if errSingle != nil {
					require.ErrorAs(t, errSingle, &invalid)
				}
				continue
			}
			require.NoError(t, errSingle)
			require.Equal(t, key != "", single.Duplicate)
			for i, r := range results {
				info, err := q.Get(ctx, pools[n], r.ID)
				require.NoError(t, err)
				j := jobs[i]
				if j.Queue == "" {
					j.Queue = onceq.DefaultQueue
				}
				if j.Key != "" && j.Scope == "" {
					j.Scope = j.Kind
				}
				require.Equal(t, [...]string{j.Kind, j.Queue, j.Scope, j.Key}, [...]string{info.Kind, info.Queue, info.Scope, info.Key})
				require.True(t, maps.Equal(j.Metadata, info.Metadata))
				if raw, ok := j.Payload.([]byte); ok {
					require.Equal(t, string(raw), string(info.Bytes))
					continue
				}
				want, err := json.Marshal(j.Payload)
				require.NoError(t, err)
				require.JSONEq(t, string(want), string(info.Payload))
			}
			if key != "" {
				first, err := q.Get(ctx, pools[n], results[0].ID)
				require.NoError(t, err)
				info, err := q.GetByKey(ctx, pools[n], first.Scope, key)
				require.NoError(t, err)
				require.Equal(t, results[0].ID, info.ID)
			}
		}
	})
}

// A schema is found under the name that was given, whatever that is. Nothing else is made or changed.
func FuzzSchema_AnyName(f *testing.F) {
	db := queuetest.New(f, queuetest.NoMigrations())
	for i := 0; i < len(hostile); i += conformance.Sized(8, 1) {
		f.Add(hostile[i])
	}
	f.Fuzz(func(t *testing.T, schema string) {
		ctx := t.Context()
		conn, err := pgx.Connect(ctx, db.URL)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close(ctx)) }()
		schemas := func() (names []string) {
			rows, err := conn.Query(ctx, `select nspname::text from pg_namespace where nspname !~ '^pg_' order by 1`)
			require.NoError(t, err)
			names, err = pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			return names
		}
		before := schemas()
		q, bad := onceq.New(db.Pool, &onceq.Config{Schema: schema, Logger: slog.New(slog.DiscardHandler)})
		if err := migrations.Up(ctx, conn, schema); err != nil {
			require.Equal(t, before, schemas())
			require.True(t, bad != nil || schema == "" || strings.HasPrefix(schema, "pg_"), "New takes %q: %v", schema, err)
			return
		}
		require.NoError(t, bad)
		defer func() {
			_, err := conn.Exec(ctx, `drop schema `+pgx.Identifier{schema}.Sanitize()+` cascade`)
			require.NoError(t, err)
			require.Equal(t, before, schemas())
		}()
		require.Len(t, schemas(), len(before)+1)
		require.NoError(t, q.Check(ctx))
		r, err := q.Enqueue(ctx, db.Pool, onceq.Job{Kind: "k", Key: "a", Window: onceq.UntilFinished})
		require.NoError(t, err)
		leases, err := q.Claim(ctx, onceq.ClaimOptions{})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		require.Equal(t, r.ID, leases[0].ID)
		require.NoError(t, leases[0].Complete(ctx, nil))
		require.ErrorIs(t, leases[0].Complete(ctx, nil), onceq.ErrLeaseLost)
		_, err = q.EnqueueMany(ctx, db.Pool, []onceq.Job{{Kind: "k", Key: "a"}, {Kind: "k"}}) // takes the key over
		require.NoError(t, err)
		require.NoError(t, queuetest.Invariants(ctx, db.Pool, schema))
	})
}

// The attempt is recorded, whatever text its error has.
func FuzzFail_RecordsAnyText(f *testing.F) {
	_, pools, queues := fuzzQueues(f)
	for _, s := range append(hostile, strings.Repeat("\x00", 10_000), strings.Repeat("é", 5_000), "x"+strings.Repeat("é", 5_000)) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ctx := t.Context()
		for n, q := range queues {
			_, err := q.Enqueue(ctx, pools[n], onceq.Job{Kind: "k", MaxAttempts: 1})
			require.NoError(t, err)
			leases, err := q.Claim(ctx, onceq.ClaimOptions{})
			require.NoError(t, err)
			require.Len(t, leases, 1)
			require.NoError(t, leases[0].Fail(ctx, errors.New(text)))
			info, err := q.Get(ctx, pools[n], leases[0].ID)
			require.NoError(t, err)
			require.Equal(t, onceq.StateDead, info.State)
			require.Len(t, info.Errors, 1)
			got := info.Errors[0].Error
			require.NotEmpty(t, got)
			require.LessOrEqual(t, len(got), 3*(8<<10)+8)
			if utf8.ValidString(text) && !strings.Contains(text, "\x00") && text != "" && len(text) <= 8<<10 {
				require.Equal(t, text, got)
			}
		}
	})
}
