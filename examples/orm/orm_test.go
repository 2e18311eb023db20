package orm_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/orm"
	"github.com/onceq/onceq/examples/orm/withgorm"
	"github.com/onceq/onceq/examples/orm/withsqlc"
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

// app is one of the examples, on one database.
type app struct {
	signUp     func(ctx context.Context, email string, then func() error) error
	signUpOnce func(ctx context.Context, key, email string, then func() error) (int64, error)
	welcomed   func(ctx context.Context, l *onceq.Lease, m orm.Mail, then func() error) error
}

func bind[DB any](db DB,
	signUp func(context.Context, DB, *onceq.Queue, string, func() error) error,
	signUpOnce func(context.Context, DB, *onceq.Queue, string, string, func() error) (int64, error),
	welcomed func(context.Context, DB, *onceq.Lease, orm.Mail, func() error) error,
) func(*onceq.Queue) app {
	return func(q *onceq.Queue) app {
		return app{
			func(ctx context.Context, email string, then func() error) error {
				return signUp(ctx, db, q, email, then)
			},
			func(ctx context.Context, key, email string, then func() error) (int64, error) {
				return signUpOnce(ctx, db, q, key, email, then)
			},
			func(ctx context.Context, l *onceq.Lease, m orm.Mail, then func() error) error {
				return welcomed(ctx, db, l, m, then)
			},
		}
	}
}

func openGORM(prepare bool) func(*testing.T, *sql.DB) func(*onceq.Queue) app {
	return func(t *testing.T, pool *sql.DB) func(*onceq.Queue) app {
		db, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), &gorm.Config{PrepareStmt: prepare})
		require.NoError(t, err)
		return bind(db, withgorm.SignUp, withgorm.SignUpOnce, withgorm.Welcomed)
	}
}

// eachApp runs a test with each example on each driver.
func eachApp(t *testing.T, test func(*testing.T, *queuetest.DB, app)) {
	t.Parallel()
	schema, err := os.ReadFile("withsqlc/schema.sql")
	require.NoError(t, err)
	for name, open := range map[string]func(*testing.T, *sql.DB) func(*onceq.Queue) app{
		"GORM":                          openGORM(false),
		"GORM with prepared statements": openGORM(true),
		"sqlc": func(_ *testing.T, pool *sql.DB) func(*onceq.Queue) app {
			return bind(pool, withsqlc.SignUp, withsqlc.SignUpOnce, withsqlc.Welcomed)
		},
	} {
		for driver, pool := range map[string]func(*testing.T, *queuetest.DB) *sql.DB{
			"pgx": openStdlib,
			"pq":  openPQ,
		} {
			t.Run(name+"/"+driver, func(t *testing.T) {
				t.Parallel()
				db := queuetest.New(t)
				_, err := db.Pool.Exec(t.Context(), string(schema))
				require.NoError(t, err)
				test(t, db, open(t, pool(t, db))(db.Queue))
			})
		}
	}
}

func count(t *testing.T, db *queuetest.DB, query string) (n int) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(context.Background(), query).Scan(&n))
	return n
}

const (
	users    = `select count(*) from users`
	welcomes = `select count(*) from users where welcomed`
)

var errCut = errors.New("cut off")

func cut() error { return errCut }

// The job exists after a commit, and does not exist after a rollback.
func TestSignUp(t *testing.T) {
	eachApp(t, func(t *testing.T, db *queuetest.DB, a app) {
		there := func(n int) {
			t.Helper()
			require.Equal(t, n, count(t, db, users))
			require.Equal(t, n, count(t, db, `select count(*) from onceq.jobs j
				join users u on j.key = 'welcome:' || u.id and j.payload ->> 'email' = u.email`))
		}
		require.ErrorIs(t, a.signUp(t.Context(), "bob@example.com", cut), errCut)
		there(0)
		require.NoError(t, a.signUp(t.Context(), "ada@example.com", func() error { there(0); return nil }))
		there(1)
	})
}

// A request that was rolled back leaves its key free. A request that was committed answers each repetition.
func TestSignUpOnce(t *testing.T) {
	eachApp(t, func(t *testing.T, db *queuetest.DB, a app) {
		ctx, goOn := t.Context(), func() error { return nil }
		_, err := a.signUpOnce(ctx, "request 1", "ada@example.com", cut)
		require.ErrorIs(t, err, errCut)
		require.Zero(t, count(t, db, users))
		require.Zero(t, count(t, db, `select count(*) from onceq.job_fences`))

		first, err := a.signUpOnce(ctx, "request 1", "ada@example.com", func() error {
			require.Zero(t, count(t, db, users))
			require.Zero(t, count(t, db, `select count(*) from onceq.job_fences`))
			return nil
		})
		require.NoError(t, err)
		again, err := a.signUpOnce(ctx, "request 1", "ada@example.com", goOn)
		require.NoError(t, err)
		require.Equal(t, first, again)
		_, err = a.signUpOnce(ctx, "request 1", "bob@example.com", goOn)
		require.ErrorIs(t, err, onceq.ErrMismatch)
		require.Equal(t, 1, count(t, db, users))

		other, err := a.signUpOnce(ctx, "request 2", "ada@example.com", goOn)
		require.NoError(t, err)
		require.NotEqual(t, first, other)
		require.Equal(t, 2, count(t, db, users))
	})
}

// The completion commits and rolls back together with the handler's write. If the lease is lost, neither commits.
func TestWelcomed(t *testing.T) {
	eachApp(t, func(t *testing.T, db *queuetest.DB, a app) {
		handler := func(then func() error) onceq.Handler {
			return orm.Welcome.Handle(func(ctx context.Context, l *onceq.Lease, m orm.Mail) error { return a.welcomed(ctx, l, m, then) })
		}
		welcome := func(n int) { t.Helper(); require.Equal(t, n, count(t, db, welcomes)) }
		require.NoError(t, a.signUp(t.Context(), "ada@example.com", func() error { return nil }))

		ran := db.RunOne(handler(cut))
		require.Equal(t, onceq.StateRetrying, ran.State)
		require.ErrorIs(t, ran.Err, errCut)
		welcome(0)

		db.Advance(time.Hour)
		reached := 0
		lost, ran := db.DeliverTwice(handler(func() error { reached++; welcome(0); return nil }))
		require.True(t, lost.Lost())
		require.Equal(t, 1, reached, "the one whose lease was lost came no further than its completion")
		require.Equal(t, onceq.StateCompleted, ran.State)
		require.Equal(t, 2, ran.Attempt)
		welcome(1)
		require.Zero(t, count(t, db, `select count(*) from onceq.jobs`))
	})
}
