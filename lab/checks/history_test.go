package checks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// Many goroutines operate on fences on a real Postgres. A checker looks for an order in which a sequential fence would
// have given the same answers (Herlihy and Wing, "Linearizability", 1990; Lowe, "Testing for linearizability", 2017).
//
// The model has no clock. So the passing of time is an operation, done in the database: a lease expires (expire), a
// window and the Reaper's grace time end (lapse), or nobody has asked for a client's key of unknown outcome for so long
// that the Reaper may forget it (forget).

type action int

const (
	doClaim     action = iota // Fence.Claim on the pool
	doWhole                   // Claim and Complete in one transaction, which commits
	doUndone                  // the same, and the transaction rolls back
	doComplete                // FenceLease.Complete
	doRelease                 // FenceLease.Release
	doUncertain               // FenceLease.Uncertain
	doExpire                  // the lease on the fence expires
	doLapse                   // the window of a completed fence and the grace time after it end
	doForget                  // nobody has asked for a client's key in 31 days
	doPrune                   // Reaper.RunOnce
)

var actionNames = [...]string{"claim", "claim+complete", "claim+complete, rolled back", "complete", "release", "uncertain", "expire", "lapse", "forget", "prune"}

type answer int

const (
	isDone answer = iota // it did what it says; of a claim: yours
	isReplay
	isInFlight
	isLost
)

var answerNames = [...]string{"done", "replay", "in flight", "lost"}

type call struct {
	key   string
	do    action
	token int64 // of the claim that is completed, released, …
	value int   // to store
}

type reply struct {
	is    answer
	token int64
	value int // the value that is replayed
}

// fence is the model's state: one key's fence as its users see it. The zero value is a free key.
type fence struct {
	state fenceState
	token int64 // the largest that was ever given
	held  bool  // the holder of token may still complete
	doubt bool  // claimed: an earlier claim's outcome is unknown
	past  bool  // claimed: its lease has expired; completed: its window is over
	value int   // completed

	forgotten bool // claimed or uncertain: a Reaper may delete it
	gone      bool // a Reaper may have deleted it
}

// isRequest reports that a key is a client's; the others are the application's.
func isRequest(key string) bool { return strings.HasPrefix(key, "request") }

type fenceState int

const (
	free fenceState = iota
	claimed
	uncertain
	completed
)

// claimable reports whether a claim gets the fence under the policy to run again for ever.
func (f fence) claimable() bool {
	return f.state == free || f.state == uncertain || f.past
}

// step is the sequential fence. It returns whether the reply is right in this state, and the next state.
func step(f fence, c call, r reply) (bool, fence) {
	mine := f.held && f.token == c.token
	if f.gone && r.is == isLost && (c.do == doComplete || c.do == doRelease || c.do == doUncertain) {
		if mine { // then it is certainly gone
			f = fence{token: f.token}
		}
		return true, f
	}
	switch c.do {
	case doClaim, doWhole, doUndone:
		switch r.is {
		case isReplay:
			return f.state == completed && !f.past && r.value == f.value, f
		case isInFlight:
			return f.state == claimed && !f.past, f
		}
		ok := f.claimable() && r.token > f.token
		if c.do == doUndone {
			return ok, f
		}
		doubt := f.state == uncertain || f.state == claimed
		f = fence{state: claimed, token: r.token, held: true, doubt: doubt}
		if c.do == doWhole {
			f.state, f.value, f.doubt = completed, c.value, false
		}
		return ok, f
	case doComplete:
		if f.state == completed && f.past {
			return r.is == isDone && mine || r.is == isLost, f // pruned by now, or not
		}
		if r.is == isLost {
			return !mine, f
		}
		if f.state != completed { // a repeated completion changes nothing
			f.state, f.value, f.past, f.doubt, f.forgotten, f.gone = completed, c.value, false, false, false, false
		}
		return mine, f
	case doRelease:
		open := mine && f.state == claimed
		if r.is == isLost {
			return !open, f
		}
		after := fence{token: f.token}
		if f.doubt {
			after.state = uncertain
		}
		return open, after
	case doUncertain:
		open := mine && (f.state == claimed || f.state == uncertain)
		if r.is == isLost {
			return !open, f
		}
		f.state, f.past, f.doubt = uncertain, false, false
		return open, f
	case doExpire:
		f.past = f.past || f.state == claimed
	case doLapse:
		f.past = f.past || f.state == completed
	case doForget:
		if isRequest(c.key) && (f.state == claimed || f.state == uncertain) {
			f.past, f.forgotten = f.state == claimed, true
		}
	case doPrune:
		// A free key stays free, and all others stay as they are. A forgotten fence may be passed over or not.
		f.gone = f.forgotten
	}
	return true, f
}

var fenceModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		keys := make(map[string][]porcupine.Operation)
		for _, op := range history {
			k := op.Input.(call).key
			keys[k] = append(keys[k], op)
		}
		parts := make([][]porcupine.Operation, 0, len(keys))
		for _, part := range keys {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() any { return fence{} },
	Step: func(state, input, output any) (bool, any) {
		return step(state.(fence), input.(call), output.(reply))
	},
	DescribeOperation: func(input, output any) string {
		c, r := input.(call), output.(reply)
		return fmt.Sprintf("%s(%s, token %d, value %d) → %s (token %d, value %d)",
			actionNames[c.do], c.key, c.token, c.value, answerNames[r.is], r.token, r.value)
	},
	DescribeState: func(state any) string { return fmt.Sprintf("%+v", state) },
}

// recorder operates on fences and records when each operation began and ended, and its result.
type recorder struct {
	db      *queuetest.DB
	q       *onceq.Queue // see the function otherwise
	reaper  *onceq.Reaper
	began   time.Time
	keys    []string
	blind   bool         // completions ignore the token
	grace   sync.RWMutex // the grace time of an hour may end between statements of the others, not within one
	mu      sync.Mutex
	history []porcupine.Operation
	errs    []error
}

func newRecorder(t *testing.T, keys int, change func(*pgxpool.Config), opts ...queuetest.Option) *recorder {
	t.Helper()
	opts = append(opts, queuetest.Config(onceq.Config{Logger: slog.New(slog.DiscardHandler)}), queuetest.PoolConfig(manyConnections))
	r := &recorder{db: queuetest.New(t, opts...), began: time.Now()}
	r.q = otherwise(t, r.db, change)
	for i := range keys {
		r.keys = append(r.keys, []string{"key ", "request "}[i%2]+strconv.Itoa(i))
	}
	var err error
	r.reaper, err = onceq.NewReaper(r.q, onceq.ReaperConfig{})
	require.NoError(t, err)
	return r
}

func (r *recorder) add(client int, begin time.Duration, c call, out reply, err error) {
	end := time.Since(r.began)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("%s(%s): %w", actionNames[c.do], c.key, err))
		return
	}
	r.history = append(r.history, porcupine.Operation{ClientId: client, Input: c, Call: int64(begin), Output: out, Return: int64(end)})
}

// schema puts the real schema into a statement that names onceq.
func schema(db *queuetest.DB, statement string) string {
	return strings.ReplaceAll(statement, "onceq.", pgx.Identifier{db.Schema}.Sanitize()+".")
}

func (r *recorder) exec(ctx context.Context, statement string, args ...any) error {
	_, err := r.db.Pool.Exec(ctx, schema(r.db, statement), args...)
	return err
}

// claim asks for a key, either by itself or in a transaction that also completes it. It returns the claim if that is still
// open.
func (r *recorder) claim(ctx context.Context, client int, c call) *onceq.FenceLease {
	r.grace.RLock()
	defer r.grace.RUnlock()
	spec := onceq.FenceSpec{Key: c.key, Lease: time.Hour, Window: time.Hour, Policy: onceq.RunAgain(onceq.Forever)}
	if isRequest(c.key) {
		spec.Class, spec.Policy = onceq.ClassRequest, onceq.RunAgain(30*24*time.Hour)
	}
	f, err := r.q.Fence(spec)
	if err != nil {
		r.add(client, 0, c, reply{}, err)
		return nil
	}
	var got *onceq.FenceLease
	begin := time.Since(r.began)
	if c.do == doClaim {
		got, err = f.Claim(ctx, nil)
	} else {
		undone := errors.New("rolled back")
		err = pgx.BeginTxFunc(ctx, r.db.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if got, err = f.Claim(ctx, tx); err != nil {
				return err
			}
			if !got.Replayed {
				if err := got.Complete(ctx, tx, c.value); err != nil {
					return err
				}
			}
			if c.do == doUndone {
				return undone
			}
			return nil
		})
		if errors.Is(err, undone) {
			err = nil
		}
	}
	var out reply
	switch {
	case errors.Is(err, onceq.ErrInFlight):
		out.is, err = isInFlight, nil
	case err == nil && got.Replayed:
		out.is = isReplay
		err = json.Unmarshal(got.Result, &out.value)
	case err == nil:
		out.token = got.Token
	}
	r.add(client, begin, c, out, err)
	if err == nil && out.is == isDone && c.do == doClaim {
		return got
	}
	return nil
}

// blindComplete is a completion without a fencing token.
const blindComplete = `update onceq.job_fences
	set state = 3, result = to_jsonb($2::int), finished_at = statement_timestamp(), detail = null
	where class in (1, 2) and scope = 'default' and key = $1::text and state in (1, 2)`

// finish ends a claim.
func (r *recorder) finish(ctx context.Context, client int, claim *onceq.FenceLease, c call) {
	var err error
	c.key, c.token = claim.Key, claim.Token
	begin := time.Since(r.began)
	switch {
	case c.do == doComplete && r.blind:
		err = r.exec(ctx, blindComplete, c.key, c.value)
	case c.do == doComplete:
		err = claim.Complete(ctx, nil, c.value)
	case c.do == doRelease:
		err = claim.Release(ctx, nil)
	case c.do == doUncertain:
		err = claim.Uncertain(ctx, nil, errors.New("reset by peer"))
	}
	var out reply
	if errors.Is(err, onceq.ErrLeaseLost) {
		out.is, err = isLost, nil
	}
	r.add(client, begin, c, out, err)
}

// fate lets time pass for one key.
func (r *recorder) fate(ctx context.Context, client int, c call) {
	var err error
	begin := time.Since(r.began)
	switch c.do {
	case doExpire:
		err = r.exec(ctx, `update onceq.job_fences set leased_until = statement_timestamp() - interval '1 minute'
			where class in (1, 2) and key = $1::text and state = 1`, c.key)
	case doLapse:
		r.grace.Lock()
		begin = time.Since(r.began)
		err = r.exec(ctx, `update onceq.job_fences set finished_at = statement_timestamp() - interval '1 day'
			where class in (1, 2) and key = $1::text and state = 3`, c.key)
		r.grace.Unlock()
	case doForget:
		r.grace.Lock()
		begin = time.Since(r.began)
		err = r.exec(ctx, `update onceq.job_fences set leased_until = statement_timestamp() - interval '31 days'
			where class = 2 and key = $1::text and state in (1, 2)`, c.key)
		r.grace.Unlock()
	}
	r.add(client, begin, c, reply{}, err)
}

// prune runs a Reaper's pass, which is an operation on each key.
func (r *recorder) prune(ctx context.Context, client int) {
	begin := time.Since(r.began)
	_, err := r.reaper.RunOnce(ctx)
	for i, k := range r.keys {
		// For the checker, a client does one thing at a time.
		r.add(client+100*(i+1), begin, call{key: k, do: doPrune}, reply{}, err)
	}
}

// run lets clients operate at random, and returns the recorded history.
func (r *recorder) run(t *testing.T, clients, each int) []porcupine.Operation {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	ctx := t.Context()
	var wg sync.WaitGroup
	for client := range clients {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(client)))
			var mine []*onceq.FenceLease // also lost and finished ones: a stale worker uses those
			for n := range each {
				c := call{key: r.keys[rnd.IntN(len(r.keys))], value: client*each + n}
				switch p := rnd.IntN(100); {
				case p < 35 || len(mine) == 0:
					if p < 35 {
						c.do = []action{doClaim, doClaim, doClaim, doWhole, doUndone}[rnd.IntN(5)]
					}
					if got := r.claim(ctx, client, c); got != nil {
						mine = append(mine, got)
					}
				case p < 70:
					c.do = []action{doComplete, doComplete, doRelease, doUncertain}[rnd.IntN(4)]
					i := max(rnd.IntN(len(mine)), rnd.IntN(len(mine))) // prefer the latest
					r.finish(ctx, client, mine[i], c)
				case p < 95:
					c.do = []action{doExpire, doLapse, doForget}[rnd.IntN(3)]
					r.fate(ctx, client, c)
				default:
					r.prune(ctx, client)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(r.errs...))
	return r.history
}

// verdict asks the checker. If the checker does not know, that is not a pass.
func verdict(t *testing.T, history []porcupine.Operation) porcupine.CheckResult {
	t.Helper()
	result, info := porcupine.CheckOperationsVerbose(fenceModel, history, 5*time.Minute)
	if result == porcupine.Illegal {
		for _, partial := range info.PartialLinearizationsOperations() {
			longest := []porcupine.Operation{}
			for _, p := range partial {
				if len(p) > len(longest) {
					longest = p
				}
			}
			for _, op := range longest[max(0, len(longest)-12):] {
				t.Logf("%d: %s", op.ClientId, fenceModel.DescribeOperation(op.Input, op.Output))
			}
			t.Log("…")
		}
	}
	return result
}

func TestHistory_FencesAreLinearizable(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*pgxpool.Config){"defaults": nil, "a default to read": readOnly} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			linearizable(t, newRecorder(t, 4, change))
		})
	}
}

func linearizable(t *testing.T, r *recorder) {
	t.Helper()
	history := r.run(t, 8, 150)
	replies := make(map[string]int)
	for _, op := range history {
		replies[actionNames[op.Input.(call).do]+": "+answerNames[op.Output.(reply).is]]++
	}
	t.Log(replies)
	for _, seen := range []string{"claim: done", "claim: replay", "claim: in flight", "claim+complete: done", "complete: done", "complete: lost", "release: done", "release: lost", "uncertain: done", "prune: done"} {
		require.NotZero(t, replies[seen], "never seen, so nothing was shown of it: %s", seen)
	}
	require.Equal(t, porcupine.Ok, verdict(t, history))
}

// This tests the checks themselves: they must find a completion that ignores the token.
func TestHistory_FindsACompletionWithoutTheToken(t *testing.T) {
	t.Parallel()
	r := newRecorder(t, 3, nil, queuetest.NoCheck())
	r.blind = true
	require.Equal(t, porcupine.Illegal, verdict(t, r.run(t, 8, 150)))
}
