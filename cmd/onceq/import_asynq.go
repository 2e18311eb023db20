package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/hibiken/asynq"
	"github.com/spf13/cobra"

	"github.com/onceq/onceq"
)

const asynqHow = `The jobs are in Redis, in no transaction with onceq's. So a queue of asynq is paused while its tasks move, each task is enqueued with its id as its
key (or with that of --key), and it is deleted from Redis after the commit. What is interrupted in between is found by its key when the command runs again.`

func (a *app) importAsynq() *cobra.Command {
	i := &importing{a: a}
	var redis string
	var inspector *asynq.Inspector
	cmd := i.command("asynq", "asynq", asynqHow, func() (backlog, error) {
		to, err := asynq.ParseRedisURI(redis)
		if err != nil {
			return nil, usagef("--redis is no address that asynq reads: use redis://host:port/db, rediss:// or redis-socket:///path")
		}
		inspector = asynq.NewInspector(to)
		return tasks{a, inspector}, nil
	})
	cmd.Flags().StringVar(&redis, "redis", envOr("REDIS_URL", "redis://127.0.0.1:6379/0"), "where Redis is; ps shows it to others on this machine (also $REDIS_URL)")
	cmd.PostRunE = func(*cobra.Command, []string) error { return inspector.Close() }
	return cmd
}

// tasks are what waits in asynq.
type tasks struct {
	a *app
	*asynq.Inspector
}

const perPage = 1000

// lists are those of a queue whose tasks can be taken.
func (t tasks) lists() []func(string, ...asynq.ListOption) ([]*asynq.TaskInfo, error) {
	return []func(string, ...asynq.ListOption) ([]*asynq.TaskInfo, error){t.ListPendingTasks, t.ListRetryTasks, t.ListScheduledTasks}
}

func wanted(kinds []string, task *asynq.TaskInfo) bool {
	return len(kinds) == 0 || slices.Contains(kinds, task.Type)
}

func (t tasks) counts(ctx context.Context, kinds []string) ([]kindCount, error) {
	queues, err := t.Queues()
	if err != nil {
		return nil, fmt.Errorf("asking Redis: %w", err)
	}
	counts := make(map[string]*kindCount)
	of := func(kind string) *kindCount {
		if counts[kind] == nil {
			counts[kind] = &kindCount{Kind: kind}
		}
		return counts[kind]
	}
	for _, queue := range queues {
		for k, list := range append(t.lists(), t.ListActiveTasks, t.ListArchivedTasks) {
			for page := 1; ; page++ {
				found, err := list(queue, asynq.Page(page), asynq.PageSize(perPage))
				if err = errors.Join(err, ctx.Err()); err != nil {
					return nil, fmt.Errorf("asking Redis for queue %q: %w", queue, err)
				}
				for _, task := range found {
					if !wanted(kinds, task) {
						continue
					}
					if k < len(t.lists()) {
						of(task.Type).Takes++
					} else {
						of(task.Type).Stays++
					}
				}
				if len(found) < perPage {
					break
				}
			}
		}
	}
	return sorted(counts), nil
}

// take moves up to a page of tasks. The queue is paused meanwhile, so that none of them starts.
func (t tasks) take(ctx context.Context, kinds []string, put func(context.Context, onceq.DB, []onceq.Job) error) (int, error) {
	queues, err := t.Queues()
	if err != nil {
		return 0, fmt.Errorf("asking Redis: %w", err)
	}
	for _, queue := range queues {
		if n, err := t.takeFrom(ctx, queue, kinds, put); n > 0 || err != nil {
			return n, err
		}
	}
	return 0, nil
}

func (t tasks) takeFrom(ctx context.Context, queue string, kinds []string, put func(context.Context, onceq.DB, []onceq.Job) error) (n int, err error) {
	info, err := t.GetQueueInfo(queue)
	if err != nil {
		return 0, fmt.Errorf("asking Redis for queue %q: %w", queue, err)
	}
	if !info.Paused {
		if err := t.PauseQueue(queue); err != nil {
			return 0, fmt.Errorf("pausing queue %q: %w", queue, err)
		}
		defer func() {
			if failed := t.UnpauseQueue(queue); failed != nil {
				err = errors.Join(err, fmt.Errorf("queue %q stays paused in Redis: %w", queue, failed))
			}
		}()
	}
	for _, list := range t.lists() {
		for page := 1; ; page++ {
			found, err := list(queue, asynq.Page(page), asynq.PageSize(perPage))
			if err != nil {
				return 0, fmt.Errorf("asking Redis for queue %q: %w", queue, err)
			}
			all := len(found)
			if found = slices.DeleteFunc(found, func(task *asynq.TaskInfo) bool { return !wanted(kinds, task) }); len(found) > 0 {
				return len(found), t.move(ctx, found, put)
			}
			if all < perPage {
				break
			}
		}
	}
	return 0, nil
}

func (t tasks) move(ctx context.Context, found []*asynq.TaskInfo, put func(context.Context, onceq.DB, []onceq.Job) error) error {
	jobs := make([]onceq.Job, len(found))
	for i, task := range found {
		jobs[i] = onceq.Job{
			Kind: task.Type, Queue: task.Queue, Key: task.ID, RunAt: task.NextProcessAt, Payload: json.RawMessage(task.Payload),
			MaxAttempts: max(1, task.MaxRetry-task.Retried+1), Metadata: map[string]string{"imported": "asynq task " + task.ID},
		}
		switch {
		case len(task.Payload) == 0:
			jobs[i].Payload = nil
		case !json.Valid(task.Payload):
			jobs[i].Payload = task.Payload
		}
	}
	if err := put(ctx, t.a.pool, jobs); err != nil {
		return err
	}
	for _, task := range found {
		if err := t.DeleteTask(task.Queue, task.ID); err != nil && !errors.Is(err, asynq.ErrTaskNotFound) {
			return fmt.Errorf("its jobs are in onceq, and task %s of queue %q could not be deleted from Redis, where it may run too; run the command again: %w", task.ID, task.Queue, err)
		}
	}
	return nil
}
