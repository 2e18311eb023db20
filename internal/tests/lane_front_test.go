package tests

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// The next job of a lane is looked for from the lane's front on: no job with an earlier place waited when it was last looked from the
// beginning. What comes before the front since then is found: at once if its priority is higher or if it was committed late, otherwise
// when the lane is looked at from its beginning, and at the latest when it has nothing else.
func TestLane_WhatComesBeforeItsFront(t *testing.T) {
	t.Parallel()
	kinds := map[string]func(k *onceq.Kind[string]){
		"leased":       func(*onceq.Kind[string]) {},
		"kept":         func(k *onceq.Kind[string]) { k.Keep = time.Hour },
		"with a limit": func(k *onceq.Kind[string]) { k.Limit = func(string) string { return "provider" } },
	}
	for name, set := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := queuetest.New(t)
			ctx := t.Context()
			require.NoError(t, db.Queue.SetLimit(ctx, db.Pool, "provider", onceq.Limit{AtOnce: 10}))
			kind := onceq.Kind[string]{Name: "k", Lane: func(string) string { return "l" }}
			set(&kind)
			// put enqueues a job and gives it a place in the order, as a Redrive does.
			put := func(name string, place time.Duration, priority onceq.Priority) {
				j := kind.Job(name)
				j.Priority = priority
				sqlRun(t, db, `update onceq.job_waits set run_at = now() - $2::bigint * interval '1 microsecond' where id = $1`, add(t, db, j), place.Microseconds())
			}
			for i, name := range []string{"1", "2", "3", "4", "5"} {
				put(name, 30*time.Minute-time.Duration(i)*time.Minute, onceq.PriorityNormal)
			}
			put("last", time.Minute, onceq.PriorityLow)
			began, goOn := make(chan string), make(chan struct{})
			w := start(t, db, onceq.WorkerConfig{}, kind.Handle(func(_ context.Context, _ *onceq.Lease, name string) error {
				began <- name
				<-goOn
				return nil
			}))
			// next ends the job that runs, after it was said when the lane is looked at from its beginning, and says which one follows.
			next := func(lookAt string) string {
				if lookAt != "" {
					require.EqualValues(t, 1, sqlOne[int](t, db, `with p as (update onceq.lane_places set look_at = now() + $1::text::interval where lane = 'k/l' and look_at is not null returning 1) select count(*) from p`, lookAt))
				}
				goOn <- struct{}{}
				return receive(t, began)
			}
			require.Equal(t, "1", receive(t, began))
			require.Equal(t, "2", next("")) // from the beginning, since nothing was known
			put("early", time.Hour, onceq.PriorityNormal)
			require.Equal(t, "3", next("9 seconds"))
			require.Equal(t, "early", next("0"))
			put("urgent", 0, onceq.PriorityHigh)
			require.Equal(t, "urgent", next("9 seconds"))
			require.Equal(t, "4", next("9 seconds"))
			put("early", 2*time.Hour, onceq.PriorityNormal)
			require.Equal(t, "early", next("1 day"), "the clock was set back")
			put("early", 3*time.Hour, onceq.PriorityNormal)
			require.Equal(t, "5", next("9 seconds"))
			require.Equal(t, "early", next("0"))

			// Jobs that are enqueued now, of which the first is committed after the second has begun. The front leaves room for what is
			// committed within a second.
			tx, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			_, err = db.Queue.Enqueue(ctx, tx, kind.Job("late"))
			require.NoError(t, err)
			add(t, db, kind.Job("6"))
			add(t, db, kind.Job("7"))
			require.Equal(t, "6", next("0"))
			until(t, db, `exists (select from onceq.lane_places p join onceq.jobs j using (id) where p.lane = 'k/l' and p.run_at = j.run_at - interval '1 second')`)
			require.NoError(t, tx.Commit(ctx))
			require.Equal(t, "late", next("0"))
			require.Equal(t, "7", next("9 seconds"))
			require.Equal(t, "last", next("9 seconds"))
			put("early", 4*time.Hour, onceq.PriorityNormal)
			require.Equal(t, "early", next("9 seconds"), "nothing else waits")
			goOn <- struct{}{}
			until(t, db, `not exists (select from onceq.jobs) and not exists (select from onceq.job_waits) and not exists (select from onceq.lane_places)`)
			require.NoError(t, w.stop())
		})
	}
}
