package main

import (
	"context"
	"encoding/json"
	"runtime"
	"time"

	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// asynqPeers are asynq with many workers, and with as many as CPUs, its default.
func asynqPeers() []peer {
	asynqPeer := func(settings, note string, config asynq.Config) peer {
		return peer{
			name: "asynq", version: moduleVersion("github.com/hibiken/asynq"), settings: settings, note: note,
			open: func(ctx context.Context, e env) (session, error) { return openAsynq(ctx, e, config) },
		}
	}
	return []peer{
		asynqPeer("tuned", "Concurrency 64, TaskCheckInterval 10 ms; 64 goroutines enqueue, there is no bulk call",
			asynq.Config{Concurrency: 64, TaskCheckInterval: 10 * time.Millisecond}),
		asynqPeer("default", "Concurrency: the number of CPUs; one goroutine for each CPU enqueues", asynq.Config{}),
	}
}

type asynqQueue struct {
	opt    asynq.RedisClientOpt
	client *asynq.Client
	config asynq.Config
}

func openAsynq(ctx context.Context, e env, config asynq.Config) (session, error) {
	config.LogLevel = asynq.FatalLevel
	q := &asynqQueue{opt: asynq.RedisClientOpt{Network: "unix", Addr: e.redis.Socket}, config: config}
	admin := redis.NewClient(&redis.Options{Network: "unix", Addr: e.redis.Socket})
	defer func() { _ = admin.Close() }()
	if err := admin.FlushAll(ctx).Err(); err != nil {
		return nil, err
	}
	q.client = asynq.NewClient(q.opt)
	return &goSession{queue: q}, nil
}

func (q *asynqQueue) close() { _ = q.client.Close() }

func (q *asynqQueue) bulk(ctx context.Context, from, to int, keyed bool) error {
	return inParallel(to-from, max(q.config.Concurrency, runtime.NumCPU()), func(i int) error { return q.put(ctx, nil, from+i, keyed) })
}

func (q *asynqQueue) put(ctx context.Context, _ pgx.Tx, n int, keyed bool) error {
	payload, err := json.Marshal(Task{n})
	if err != nil {
		return err
	}
	var opts []asynq.Option
	if keyed {
		opts = append(opts, asynq.TaskID(keyOf(n)))
	}
	_, err = q.client.EnqueueContext(ctx, asynq.NewTask("noop", payload), opts...)
	return err
}

func (q *asynqQueue) work(_ context.Context, effect string, did func(n, jobs int)) (stop func(), err error) {
	if effect != noEffect {
		return nil, errNotOffered
	}
	server := asynq.NewServer(q.opt, q.config)
	err = server.Start(asynq.HandlerFunc(func(_ context.Context, t *asynq.Task) error {
		var task Task
		err := json.Unmarshal(t.Payload(), &task)
		did(task.N, 1)
		return err
	}))
	return func() { go server.Shutdown() }, err // it waits for unrelated timers
}
