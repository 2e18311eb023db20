package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// counted writes what a worker has counted of a kind in the minute some minutes ago.
func counted(t *testing.T, db *queuetest.DB, kind string, ago time.Duration, completed, failed int, took time.Duration) {
	t.Helper()
	sqlRun(t, db, `
insert into onceq.job_counts (minute, took, started, completed, failed, dead, queue, kind, durations)
values (date_trunc('minute', now() - $1 * interval '1 microsecond'), $2, 0, $3, $4, 0, 'default', $5, array_fill(0, array[14]))`,
		ago.Microseconds(), took.Microseconds(), completed, failed, kind)
}

func findings(t *testing.T, db *queuetest.DB, what string) (all []onceqops.Finding) {
	t.Helper()
	for _, f := range must[[]onceqops.Finding](t)(onceqops.New(db.Queue).Health(t.Context())) {
		if f.What == what {
			all = append(all, f)
		}
	}
	return all
}

// A kind of which all attempts fail is named, with its commonest error and since when, and one of which most do.
func TestHealth_AKindThatFails(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	for i := range 12 {
		add(t, db, onceq.Job{Kind: "charge", Payload: i})
	}
	for i, l := range must[[]*onceq.Lease](t)(db.Queue.Claim(t.Context(), onceq.ClaimOptions{Limit: 12})) {
		err := fmt.Errorf("503 Service Unavailable (request %d)", 1000+i)
		if i < 3 {
			err = fmt.Errorf("connection reset")
		}
		require.NoError(t, l.Fail(t.Context(), err))
	}
	counted(t, db, "charge", 50*time.Minute, 100, 3, 0)
	counted(t, db, "charge", 29*time.Minute, 0, 2, 0)
	counted(t, db, "mail", 29*time.Minute, 0, 9, 0)
	require.Empty(t, findings(t, db, "failing"), "two are too few to tell")
	counted(t, db, "charge", 28*time.Minute, 0, 7, 0)
	all := findings(t, db, "failing")
	require.Len(t, all, 1, "all nine have failed")
	require.False(t, all[0].Severe, "which may be one job")
	require.Contains(t, all[0].Detail, "9 have failed (100%), and none was completed")
	counted(t, db, "charge", 27*time.Minute, 1, 0, 0)
	require.Empty(t, findings(t, db, "failing"), "it works again")
	sqlRun(t, db, `delete from onceq.job_counts where completed = 1`)
	counted(t, db, "charge", 20*time.Minute, 0, 3, 0)
	all = findings(t, db, "failing")
	require.Len(t, all, 1)
	f := all[0]
	require.Equal(t, "charge", f.Kind)
	require.Equal(t, "default", f.Queue)
	require.True(t, f.Severe)
	require.WithinDuration(t, sqlOne[time.Time](t, db, `select now() - interval '29 minutes'`), f.Since, 2*time.Minute)
	require.Contains(t, f.Detail, `of 12 attempts at jobs of kind "charge" in queue "default" since `)
	require.Contains(t, f.Detail, `12 have failed (100%), and none was completed`)
	require.Contains(t, f.Error, "503 Service Unavailable")
	require.True(t, strings.HasSuffix(f.Detail, f.Error))
	require.Contains(t, f.Detail, `the commonest error, of 9 of 12 jobs that were looked at: 503 Service Unavailable (request 10`)

	counted(t, db, "charge", 10*time.Minute, 4, 4, 0)
	all = findings(t, db, "failing")
	require.Len(t, all, 1)
	require.False(t, all[0].Severe)
	require.Contains(t, all[0].Detail, "16 have failed (80%);")

	counted(t, db, "charge", 5*time.Minute, 9, 1, 0)
	require.Empty(t, findings(t, db, "failing"), "it works again")
	counted(t, db, "charge", 4*time.Minute, 1, 9, 0)
	require.Empty(t, findings(t, db, "failing"), "nine are too few to tell where one was completed")

	// A kind whose failed jobs are gone, and of which nothing has ended lately.
	counted(t, db, "mail", 28*time.Minute, 0, 9, 0)
	require.Empty(t, findings(t, db, "failing"))
	counted(t, db, "mail", 2*time.Minute, 0, 1, 0)
	all = findings(t, db, "failing")
	require.Len(t, all, 1)
	require.Equal(t, "mail", all[0].Kind)
}

// After a deploy whose types do not fit what older code has enqueued, no handler is called. What the worker itself counts says so.
func TestHealth_NoPayloadDecodes(t *testing.T) {
	t.Parallel()
	type before struct{ Order string }
	type after struct{ Order int }
	kind := func(name string) onceq.Kind[after] {
		return onceq.Kind[after]{Name: name, Backoff: func(int, error) time.Duration { return time.Hour }}
	}
	for form, h := range map[string]onceq.Handler{
		"plain": kind("plain").Handle(func(context.Context, *onceq.Lease, after) error { return nil }),
		"tx":    kind("tx").HandleTx(func(context.Context, pgx.Tx, *onceq.Lease, after) error { return nil }),
		"batch": kind("batch").HandleBatch(5, func(context.Context, pgx.Tx, []onceq.Item[after]) error { return nil }),
	} {
		db := queuetest.New(t)
		w := start(t, db, onceq.WorkerConfig{}, h)
		for range 12 {
			add(t, db, onceq.Job{Kind: form, Payload: before{"visa-4242"}})
		}
		eventually(t, "an error of each job", func() bool {
			return sqlOne[int](t, db, `select count(*) from onceq.jobs where errors is not null and leased_until is null`) == 12
		})
		require.NoError(t, w.stop()) // it writes what it has counted
		all := findings(t, db, "failing")
		require.Len(t, all, 1, form)
		f := all[0]
		require.Equal(t, []any{form, "default", true}, []any{f.Kind, f.Queue, f.Severe})
		require.Regexp(t, `^of \d+ attempts .* \d+ have failed \(100%\), and none was completed; the commonest error, of 12 of 12 jobs`, f.Detail)
		require.Contains(t, f.Error, "does not decode into tests.after: string in field Order does not fit into int")
		require.NotContains(t, f.Error, "visa")
	}
}

// A limit for which hours of work wait is named, and at which rate that goes.
func TestHealth_ALimitThatIsFarTooLow(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "bank", onceq.Limit{AtOnce: 1}))
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "sms", onceq.Limit{Rate: 10, Per: time.Hour}))
	for range 40 {
		add(t, db, onceq.Job{Kind: "k", Payload: 1, Limit: "bank"})
		add(t, db, onceq.Job{Kind: "quick", Payload: 1, Limit: "sms"})
	}
	counted(t, db, "k", 3*time.Minute, 9, 1, 20*time.Minute)
	require.Empty(t, findings(t, db, "slow_limit"), "they have only begun to wait")
	sqlRun(t, db, `update onceq.job_waits set run_at = run_at - interval '5 minutes'`)
	all := findings(t, db, "slow_limit")
	require.Len(t, all, 2)
	require.Contains(t, all[0].Detail, `40 jobs wait for limit "bank", which is 1 at once: at today's rate, about 30 an hour, that takes 1h20m0s or more`)
	require.Contains(t, all[1].Detail, `40 jobs wait for limit "sms", which is 10 in 1h0m0s, in bursts of 2: at today's rate, about 10 an hour, that takes 4h0m0s or more`)
	require.False(t, all[0].Since.IsZero())
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "bank", onceq.Limit{AtOnce: 2}))
	require.Len(t, findings(t, db, "slow_limit"), 1)

	// Many quick jobs take as long. Their priority does not matter, nor that none has ended for a while.
	sqlRun(t, db, `delete from onceq.job_waits`)
	require.NoError(t, db.Queue.SetLimit(t.Context(), db.Pool, "bank", onceq.Limit{AtOnce: 1}))
	jobs := make([]onceq.Job, 4000)
	for i := range jobs {
		jobs[i] = onceq.Job{Kind: "k", Payload: i, Limit: "bank", Priority: onceq.PriorityLow}
	}
	must[[]onceq.Result](t)(db.Queue.EnqueueMany(t.Context(), db.Pool, jobs))
	sqlRun(t, db, `update onceq.job_waits set run_at = run_at - interval '5 minutes'`)
	sqlRun(t, db, `update onceq.job_counts set took = 20000000, minute = minute - interval '30 minutes'`)
	all = findings(t, db, "slow_limit")
	require.Len(t, all, 1)
	require.Contains(t, all[0].Detail, `4000 jobs wait for limit "bank", which is 1 at once: at today's rate, about 1.8e+03 an hour, that takes 2h13m20s or more`)
}

// That no Reaper runs is seen by what one would have removed.
func TestHealth_NoReaper(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	counted(t, db, "k", 24*time.Hour, 1, 0, 0)
	require.Empty(t, findings(t, db, "reaper"))
	counted(t, db, "k", 40*time.Hour, 1, 0, 0)
	all := findings(t, db, "reaper")
	require.Len(t, all, 1)
	require.Contains(t, all[0].Detail, "no Reaper has run since ")
	r := must[*onceq.Reaper](t)(onceq.NewReaper(db.Queue, onceq.ReaperConfig{}))
	must[onceq.Reaped](t)(r.RunOnce(t.Context()))
	require.Empty(t, findings(t, db, "reaper"))
}
