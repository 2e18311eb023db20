package orm_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"
	"github.com/stretchr/testify/require"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/orm/withbun"
	"github.com/onceq/onceq/examples/orm/withent"
	"github.com/onceq/onceq/examples/orm/withent/ent"
	"github.com/onceq/onceq/examples/orm/withgorm"
	"github.com/onceq/onceq/examples/orm/withsqlc"
	"github.com/onceq/onceq/examples/orm/withsqlx"
	"github.com/onceq/onceq/queuetest"
)

func openStdlib(t *testing.T, db *queuetest.DB) *sql.DB {
	t.Helper()
	config, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	pool := stdlib.OpenDB(*config)
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	return pool
}

type signUp func(ctx context.Context, email string, then func() error) error

func gormSignUp(prepare bool) func(*testing.T, *sql.DB, *onceq.Queue) signUp {
	return func(t *testing.T, pool *sql.DB, q *onceq.Queue) signUp {
		db, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), &gorm.Config{PrepareStmt: prepare})
		require.NoError(t, err)
		return func(ctx context.Context, email string, then func() error) error {
			return withgorm.SignUp(ctx, db, q, email, then)
		}
	}
}

// Each example on each driver: the job is there after the commit and not after a rollback.
func TestSignUp(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(*testing.T, *sql.DB, *onceq.Queue) signUp{
		"GORM":                          gormSignUp(false),
		"GORM with prepared statements": gormSignUp(true),
		"bun": func(_ *testing.T, pool *sql.DB, q *onceq.Queue) signUp {
			db := bun.NewDB(pool, pgdialect.New())
			return func(ctx context.Context, email string, then func() error) error {
				return withbun.SignUp(ctx, db, q, email, then)
			}
		},
		"ent": func(_ *testing.T, pool *sql.DB, q *onceq.Queue) signUp {
			db := ent.NewClient(ent.Driver(entsql.OpenDB(dialect.Postgres, pool)))
			return func(ctx context.Context, email string, then func() error) error {
				return withent.SignUp(ctx, db, q, email, then)
			}
		},
		"sqlx": func(_ *testing.T, pool *sql.DB, q *onceq.Queue) signUp {
			db := sqlx.NewDb(pool, "postgres")
			return func(ctx context.Context, email string, then func() error) error {
				return withsqlx.SignUp(ctx, db, q, email, then)
			}
		},
		"sqlc": func(_ *testing.T, pool *sql.DB, q *onceq.Queue) signUp {
			return func(ctx context.Context, email string, then func() error) error {
				return withsqlc.SignUp(ctx, pool, q, email, then)
			}
		},
	} {
		for driver, pool := range map[string]func(*testing.T, *queuetest.DB) *sql.DB{
			"pgx": openStdlib,
			"pq":  openPQ,
		} {
			t.Run(name+"/"+driver, func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t)
				_, err := db.Pool.Exec(t.Context(), `create table users (id bigint generated always as identity primary key, email text not null)`)
				require.NoError(t, err)
				there := func(users, jobs int) {
					t.Helper()
					var u, j int
					require.NoError(t, db.Pool.QueryRow(context.Background(), `select (select count(*) from users),
						(select count(*) from users u join onceq.jobs j on j.key = 'welcome:' || u.id and j.payload ->> 'email' = u.email)`).Scan(&u, &j))
					require.Equal(t, []int{users, jobs}, []int{u, j})
				}
				sign := open(t, pool(t, db), db.Queue)
				cut := errors.New("the request was cut off")
				require.ErrorIs(t, sign(t.Context(), "bob@example.com", func() error { return cut }), cut)
				there(0, 0)
				require.NoError(t, sign(t.Context(), "ada@example.com", func() error { there(0, 0); return nil }))
				there(1, 1)
			})
		}
	}
}
