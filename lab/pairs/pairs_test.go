package pairs

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/internal/leaks"
	"github.com/onceq/onceq/onceqops"
)

// Each test with a database fails if it leaves a goroutine behind.
func init() { leaks.On.Store(true) }

// all says that every pair is tried (make matrix MODES=pairs), and not some, other ones in each run.
var all = os.Getenv("ONCEQ_TEST_PAIRS") == "all"

func chosen() bool { return all || rand.IntN(40) == 0 }

func TestCalls_AreAll(t *testing.T) {
	s := &scene{}
	read := reading(s, nil)
	for _, v := range []any{s.q, s.ops, (*onceq.Lease)(nil), (*onceq.Fence)(nil), s.claimed, (*onceq.Worker)(nil), (*onceq.Reaper)(nil)} {
		typ := reflect.TypeOf(v)
		for i := range typ.NumMethod() {
			method := typ.Method(i).Name
			name := typ.Elem().Name() + "." + method
			_, is := silent[name]
			for _, c := range calls {
				called, _, _ := strings.Cut(c.name, ",")
				is = is || called == name || called == method && (typ == reflect.TypeOf(s.q) || typ == reflect.TypeOf(s.ops))
			}
			require.True(t, is || read[name] != nil, "%s is not tried", name)
		}
	}
}

// blocked gives the session that waits for another one, beside one that may.
const blocked = `select coalesce(max(pid), 0) from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock' and pid <> $1 and cardinality(pg_blocking_pids(pid)) > 0`

// settled waits until a call has answered, or its session waits for another one.
func (s *scene) settled(t *testing.T, done chan error, beside uint32) (pid uint32, waits bool) {
	t.Helper()
	for {
		select {
		case err := <-done:
			done <- err
			return 0, false
		default:
		}
		require.NoError(t, s.owner.QueryRow(t.Context(), blocked, beside).Scan(&pid))
		if pid != 0 {
			return pid, true
		}
	}
}

// open does a call and keeps its transaction open: the caller's, or the call's own, which is stopped in its commit. A call
// that changes nothing has none. The function ends it.
func (s *scene) open(t *testing.T, c call) (pid uint32, end func(commit bool) error) {
	t.Helper()
	ctx := t.Context()
	if !c.alone {
		tx, err := s.db.Pool.Begin(ctx)
		require.NoError(t, err)
		require.NoError(t, c.do(ctx, s, tx), c.name)
		return tx.Conn().PgConn().PID(), func(commit bool) error {
			if commit {
				return tx.Commit(ctx)
			}
			return tx.Rollback(ctx)
		}
	}
	gate, err := s.owner.Begin(ctx)
	require.NoError(t, err)
	_, err = gate.Exec(ctx, `select pg_advisory_xact_lock(1)`)
	require.NoError(t, err)
	done := s.start(t, c, s.db.Pool)
	pid, _ = s.settled(t, done, 0)
	return pid, func(bool) error { return errors.Join(gate.Rollback(ctx), <-done) }
}

// start does a call in a goroutine.
func (s *scene) start(t *testing.T, c call, db onceq.DB) chan error {
	done := make(chan error, 1)
	go func() { done <- c.do(t.Context(), s, db) }()
	return done
}

// answered reports whether a call that had to wait, or that came after another one, has an answer that its documentation
// names. A deadlock is none.
func answered(err error) bool {
	var mismatch *onceq.MismatchError
	late := errors.Is(err, context.DeadlineExceeded) // some calls have a time of their own, which a slow machine exceeds
	if err == nil || errors.As(err, &mismatch) || onceq.LeaseLost(err) || late {
		return true
	}
	for _, answer := range []error{
		onceq.ErrLeaseLost, onceq.ErrNotFound, onceq.ErrDuplicate, onceq.ErrInFlight, onceq.ErrUncertain, onceq.ErrHeld, onceqops.ErrUnfinished,
	} {
		if errors.Is(err, answer) {
			return true
		}
	}
	return false
}

// inTransactions gives those of some calls that wait, each in a transaction of its own, while a is open. What waits is
// cancelled, and what answers is rolled back, so that a need not be done again.
func (s *scene) inTransactions(t *testing.T, a call, some []call) (waiting []string) {
	t.Helper()
	ctx := t.Context()
	s.again(t)
	pid, end := s.open(t, a)
	for _, b := range some {
		tx, err := s.db.Pool.Begin(ctx)
		require.NoError(t, err)
		done := s.start(t, b, tx)
		waits := false
		if _, waits = s.settled(t, done, pid); waits {
			waiting = append(waiting, b.name)
			_, err := s.owner.Exec(ctx, `select pg_cancel_backend($1)`, tx.Conn().PgConn().PID())
			require.NoError(t, err)
		}
		err = <-done
		assert.True(t, waits || answered(err), "%s beside %s: %v", b.name, a.name, err)
		require.NoError(t, tx.Rollback(ctx))
	}
	if err := end(false); a.alone && errors.Is(err, context.DeadlineExceeded) {
		return s.inTransactions(t, a, some) // it has to answer within a time of its own
	} else {
		require.NoError(t, err, a.name)
	}
	return waiting
}

// alone does b on its own while a is open, and says whether it had to wait. Then a commits.
func (s *scene) alone(t *testing.T, a, b call) bool {
	t.Helper()
	s.again(t)
	pid, end := s.open(t, a)
	done := s.start(t, b, s.db.Pool)
	_, waited := s.settled(t, done, pid)
	err := end(true)
	if a.alone && errors.Is(err, context.DeadlineExceeded) {
		<-done
		return s.alone(t, a, b)
	}
	require.NoError(t, err, a.name)
	err = <-done
	assert.True(t, answered(err), "%s beside %s: %v", b.name, a.name, err)
	return waited
}

// scenes are as many as there may be pairs at once.
func scenes(t *testing.T) chan *scene {
	t.Helper()
	n := 3
	if all {
		n = 8
	}
	free := make(chan *scene, n)
	for range n {
		free <- newScene(t)
	}
	return free
}

// each runs a subtest for each call with a scene of its own.
func each(t *testing.T, do func(t *testing.T, s *scene, a call)) {
	t.Helper()
	free := scenes(t)
	t.Run("while", func(t *testing.T) {
		for _, a := range calls {
			t.Run(a.name, func(t *testing.T) {
				t.Parallel()
				s := <-free
				defer func() { free <- s }()
				_, err := s.owner.Exec(t.Context(), "vacuum") // every pair writes all rows anew
				require.NoError(t, err)
				do(t, s, a)
			})
		}
	})
}

// Every pair of calls, the second while the first's transaction is open: it waits exactly if the page says so, in a
// transaction of its own and alone. When the first commits, its answer is one that it may give.
func TestPairs_WaitAsThePageSays(t *testing.T) {
	before, want, after := readPage(t)
	var mu sync.Mutex
	found := make(table)
	each(t, func(t *testing.T, s *scene, a call) {
		if _, tried := want[a.name]; !tried && !*update {
			return
		}
		var some []call // that take a transaction
		tried := make(map[string]bool)
		for _, b := range calls {
			if tried[b.name] = chosen(); tried[b.name] && !b.alone {
				some = append(some, b)
			}
		}
		in := s.inTransactions(t, a, some)
		var waiting []string
		for _, b := range calls {
			if !tried[b.name] {
				continue
			}
			waits := slices.Contains(in, b.name)
			if b.alone {
				waits = s.alone(t, a, b)
			} else if waits && b.name != lock {
				assert.True(t, s.alone(t, a, b), "%s waits for %s in a transaction, and not alone", b.name, a.name)
			}
			if !*update {
				assert.Equal(t, slices.Contains(want[a.name], b.name), waits, "%s waits for %s", b.name, a.name)
			}
			if waits {
				waiting = append(waiting, b.name)
			}
		}
		t.Logf("| %s | %s |", a.name, strings.Join(waiting, until))
		mu.Lock()
		defer mu.Unlock()
		found[a.name] = waiting
	})
	if *update && all {
		require.NoError(t, os.WriteFile(page, []byte(before+begin+found.String()+end+after), 0o644))
		return
	}
	require.Equal(t, before+begin+want.String()+end+after, text(t), "calls that behave alike share a row")
}
