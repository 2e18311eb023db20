// Outbox publishes the events of an application's transactions to NATS JetStream, and takes them into another application's
// database: each event once and in order for its key, whichever of the processes and the broker is killed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type event struct {
	ID   string          `json:"id"`  // names what happened, once and for ever: order-7-paid
	Key  string          `json:"key"` // events with the same key stay in order: order-7
	Data json.RawMessage `json:"data"`
}

func id(e event) string  { return e.ID }
func key(e event) string { return e.Key }

// publish is the outbox: a job for each event, enqueued in the transaction in which the event happens.
var publish = onceq.Kind[event]{
	Name:        "publish",
	Key:         id,
	Lane:        key,
	LaneRule:    onceq.StopLane, // no later event of a key goes out before this one
	Timeout:     5 * time.Second,
	MaxAttempts: 30_000, // a broker may be away for days
	Backoff: func(attempt int, _ error) time.Duration {
		return min(time.Duration(attempt)*100*time.Millisecond, 10*time.Second)
	},
}

// publisher compares and sets. It reads the latest message of the key's subject: if that is this event, an earlier run has
// published it. Otherwise it publishes on the condition that no message has come since. So a process that was frozen and wakes
// up too late is refused by the broker, also after the stream has forgotten its message ids (Duplicates, two minutes by default).
func publisher(js jetstream.JetStream, events jetstream.Stream) onceq.Handler {
	return publish.Handle(func(ctx context.Context, l *onceq.Lease, e event) error {
		m := nats.NewMsg("events." + e.Key)
		m.Data = e.Data
		var after uint64
		switch last, err := events.GetLastMsgForSubject(ctx, m.Subject); {
		case errors.Is(err, jetstream.ErrMsgNotFound):
		case err != nil:
			return err
		case last.Header.Get(jetstream.MsgIDHeader) == e.ID:
			return nil
		default:
			after = last.Sequence
		}
		_, err := js.PublishMsg(ctx, m, jetstream.WithMsgID(e.ID), jetstream.WithExpectLastSequencePerSubject(after))
		return err // after any error, the next run looks
	})
}

// received is the inbox of the other application: the message's id is the key of its job.
var received = onceq.Kind[event]{Name: "received", Key: id, Lane: key, Window: 30 * 24 * time.Hour}

// receive acknowledges a message when its job is committed. A message that comes again is a duplicate of that job. The consumer
// has MaxAckPending 1: with more, messages that come again would come behind later ones.
func receive(ctx context.Context, consumer jetstream.Consumer, pool *pgxpool.Pool, q *onceq.Queue) error {
	for ctx.Err() == nil {
		m, err := consumer.Next(jetstream.FetchMaxWait(time.Second))
		if err != nil { // none has come, or the broker is away
			time.Sleep(10 * time.Millisecond)
			continue
		}
		e := event{ID: m.Headers().Get(jetstream.MsgIDHeader), Key: m.Subject()[len("events."):], Data: m.Data()}
		if _, err := q.Enqueue(ctx, pool, received.Job(e)); err != nil {
			return err // it was not acknowledged, and comes again
		}
		if err := m.DoubleAck(ctx); err != nil {
			continue
		}
	}
	return nil
}

// handle is what the other application does with an event.
func handle(ctx context.Context, tx pgx.Tx, l *onceq.Lease, e event) error {
	_, err := tx.Exec(ctx, `insert into seen (key, event) values ($1, $2)`, e.Key, e.ID)
	return err
}

// streams makes the stream and the consumer, as a service does with its migrations. MaxAge has to be longer than any outage:
// publisher has to find the latest message of a key.
func streams(ctx context.Context, js jetstream.JetStream) (jetstream.Stream, jetstream.Consumer, error) {
	events, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.*"}, MaxAge: 30 * 24 * time.Hour})
	if err != nil {
		return nil, nil, err
	}
	consumer, err := events.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{Durable: "inbox", MaxAckPending: 1, AckWait: 2 * time.Second})
	return events, consumer, err
}

const tables = `
create table orders (id int primary key, state text not null);
create table seen (id int primary key generated always as identity, key text not null, event text not null)`

// set changes an order and publishes that, both or neither.
func set(ctx context.Context, pool *pgxpool.Pool, q *onceq.Queue, order int, state string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		const upsert = `insert into orders values ($1, $2) on conflict (id) do update set state = excluded.state`
		if _, err := tx.Exec(ctx, upsert, order, state); err != nil {
			return err
		}
		e := event{ID: fmt.Sprintf("order-%d-%s", order, state), Key: fmt.Sprint("order-", order), Data: json.RawMessage(`{}`)}
		_, err := q.Enqueue(ctx, tx, publish.Job(e))
		return err
	})
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	pool, q := example.Open(ctx, tables)
	defer pool.Close()
	dir, err := os.MkdirTemp("", "outbox")
	example.Check(err)
	defer func() { _ = os.RemoveAll(dir) }()
	broker := start(server.RANDOM_PORT, dir) // a service connects to its own
	defer broker.Shutdown()
	conn, err := nats.Connect(broker.ClientURL())
	example.Check(err)
	defer conn.Close()
	js, err := jetstream.New(conn)
	example.Check(err)
	events, consumer, err := streams(ctx, js)
	example.Check(err)

	for _, state := range []string{"placed", "paid", "sent"} {
		for order := range 2 {
			example.Check(set(ctx, pool, q, order, state))
		}
	}
	go func() { example.Check(receive(ctx, consumer, pool, q)) }()
	go func() {
		defer stop()
		for n := 0; n < 6; time.Sleep(10 * time.Millisecond) {
			example.Check(pool.QueryRow(ctx, `select count(*) from seen`).Scan(&n))
		}
	}()
	example.Work(ctx, q, publisher(js, events), received.HandleTx(handle))
	rows, err := pool.Query(context.Background(), `select key || ': ' || string_agg(event, ' ' order by id) from seen group by key order by key`)
	example.Check(err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	example.Check(err)
	for _, line := range lines {
		fmt.Println(line)
	}
}

// Output:
// order-0: order-0-placed order-0-paid order-0-sent
// order-1: order-1-placed order-1-paid order-1-sent
