package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

// What a process of the test is, where it finds things, and whom it kills when.
const (
	role   = "OUTBOX_ROLE"
	dbURL  = "OUTBOX_DATABASE_URL"
	port   = "OUTBOX_NATS_PORT"
	dir    = "OUTBOX_NATS_DIR"
	victim = "OUTBOX_VICTIM" // a process's id, "self", or 0 for nobody
	after  = "OUTBOX_AFTER"  // whether a publication has been made by then
)

// TestProcess is the broker, a publisher or a receiver, which the test below starts. Otherwise it is skipped.
func TestProcess(t *testing.T) {
	as, at := os.Getenv(role), os.Getenv(port)
	if as == "" {
		t.Skip("it is a process of another test")
	}
	if as == "broker" {
		n, err := strconv.Atoi(at)
		require.NoError(t, err)
		start(n, os.Getenv(dir))
		select {}
	}
	pool, err := pgxpool.New(t.Context(), os.Getenv(dbURL))
	require.NoError(t, err)
	q, err := onceq.New(pool, nil)
	require.NoError(t, err)
	js, events, consumer := connect(t, "nats://127.0.0.1:"+at)
	m := &murder{after: os.Getenv(after) == "true"}
	if m.victim = os.Getpid(); os.Getenv(victim) != "self" {
		m.victim, err = strconv.Atoi(os.Getenv(victim))
		require.NoError(t, err)
	}
	if as == "receiver" {
		require.NoError(t, receive(t.Context(), &murderousConsumer{consumer, m}, pool, q))
		return
	}
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{}, publisher(&murderousPublisher{js, m}, events))
	require.NoError(t, err)
	require.NoError(t, w.Run(t.Context()))
}

func connect(t *testing.T, url string) (jetstream.JetStream, jetstream.Stream, jetstream.Consumer) {
	t.Helper()
	conn, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond))
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	require.NoError(t, err)
	events, consumer, err := streams(t.Context(), js)
	require.NoError(t, err)
	return js, events, consumer
}

// murder kills a process at the third message: the broker, or its own.
type murder struct {
	messages atomic.Int32
	victim   int
	after    bool
}

func (m *murder) due() bool { return m.victim != 0 && m.messages.Add(1) == 3 }

func (m *murder) kill() {
	if p, err := os.FindProcess(m.victim); err == nil {
		_ = p.Kill()
	}
	if m.victim == os.Getpid() {
		select {}
	}
}

type murderousPublisher struct {
	jetstream.JetStream
	*murder
}

func (p *murderousPublisher) PublishMsg(ctx context.Context, msg *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	due := p.due()
	if due && !p.after {
		p.kill()
	}
	ack, err := p.JetStream.PublishMsg(ctx, msg, opts...)
	if due && p.after {
		p.kill()
		return nil, errors.New("the broker died before it answered")
	}
	return ack, err
}

// murderousConsumer kills when a message is to be acknowledged, whose job is committed.
type murderousConsumer struct {
	jetstream.Consumer
	*murder
}

type murderousMessage struct {
	jetstream.Msg
	*murder
}

func (c *murderousConsumer) Next(opts ...jetstream.FetchOpt) (jetstream.Msg, error) {
	m, err := c.Consumer.Next(opts...)
	return murderousMessage{m, c.murder}, err
}

func (m murderousMessage) DoubleAck(ctx context.Context) error {
	if m.due() {
		m.kill()
	}
	return m.Msg.DoubleAck(ctx)
}

// Publishers, the broker and receivers are killed before and after what they do, and each event is in the stream and in the other
// database once, in order.
func TestOutbox_OnceWhoeverIsKilled(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("make check runs it: seven processes are killed")
	}
	const orders, changes = 3, 10
	db := queuetest.New(t, queuetest.Setup("outbox", queuetest.SQL(tables)))
	var want []string
	for order := range orders {
		for n := range changes {
			require.NoError(t, set(t.Context(), db.Pool, db.Queue, order, fmt.Sprint(n)))
			want = append(want, fmt.Sprintf("order-%d-%d", order, n))
		}
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	at := strconv.Itoa(free.Addr().(*net.TCPAddr).Port)
	require.NoError(t, free.Close())
	files := t.TempDir()
	until := func(what string, is func() bool) { require.Eventually(t, is, 5*time.Minute, 10*time.Millisecond, what) }
	run := func(as string, more ...string) *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=^TestProcess$")
		cmd.Env = append(os.Environ(), role+"="+as, dbURL+"="+db.URL, port+"="+at, dir+"="+files, victim+"=0")
		cmd.Env = append(cmd.Env, more...)
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		return cmd
	}
	var broker *exec.Cmd
	listen := func() {
		broker = run("broker")
		until("the broker listens", func() bool {
			conn, err := net.Dial("tcp", "127.0.0.1:"+at)
			if err == nil {
				_ = conn.Close()
			}
			return err == nil
		})
	}
	left := func(kind string) (n int) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select count(*) from onceq.v_jobs where kind = $1`, kind).Scan(&n))
		return n
	}

	listen()
	_, events, _ := connect(t, "nats://127.0.0.1:"+at)
	for _, published := range []string{"false", "true"} {
		require.ErrorContains(t, run("publisher", victim+"=self", after+"="+published).Wait(), "killed")
		db.Advance(time.Minute) // its leases end

		publisher := run("publisher", victim+"="+strconv.Itoa(broker.Process.Pid), after+"="+published)
		require.ErrorContains(t, broker.Wait(), "killed")
		before := left("publish")
		listen()
		until("it goes on", func() bool { return left("publish") < before })
		require.NoError(t, publisher.Process.Kill())
		_ = publisher.Wait()
		db.Advance(time.Minute)
	}
	publisher := run("publisher")
	until("all are published", func() bool { return left("publish") == 0 })
	require.NoError(t, publisher.Process.Kill())

	require.ErrorContains(t, run("receiver", victim+"=self").Wait(), "killed")
	receiver := run("receiver", victim+"="+strconv.Itoa(broker.Process.Pid))
	require.ErrorContains(t, broker.Wait(), "killed")
	listen()
	until("all are received", func() bool { return left("received") == orders*changes })
	require.NoError(t, receiver.Process.Kill())
	db.Drain(received.HandleTx(handle))

	var stored []string
	for order := range orders {
		last := uint64(0)
		for {
			m, err := events.GetMsg(t.Context(), last+1, jetstream.WithGetMsgSubject(fmt.Sprint("events.order-", order)))
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				break
			}
			require.NoError(t, err)
			stored, last = append(stored, m.Header.Get(jetstream.MsgIDHeader)), m.Sequence
		}
	}
	require.Equal(t, want, stored)
	rows, err := db.Pool.Query(t.Context(), `select event from seen order by key, id`)
	require.NoError(t, err)
	seen, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, want, seen)
}

// A process freezes just before it publishes, and wakes up when its event and the next one have been published by others, and
// the stream has forgotten their ids. The broker refuses what it sends.
func TestOutbox_FrozenPublisherIsRefused(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, queuetest.Setup("outbox", queuetest.SQL(tables)))
	broker := start(server.RANDOM_PORT, t.TempDir())
	t.Cleanup(broker.Shutdown)
	js, events, _ := connect(t, broker.ClientURL())
	config := events.CachedInfo().Config
	config.Duplicates = 100 * time.Millisecond
	_, err := js.UpdateStream(t.Context(), config)
	require.NoError(t, err)
	require.NoError(t, set(t.Context(), db.Pool, db.Queue, 7, "placed"))
	require.NoError(t, set(t.Context(), db.Pool, db.Queue, 7, "paid"))

	frozen := &freezing{JetStream: js, frozen: make(chan struct{}), wake: make(chan struct{})}
	woken := make(chan queuetest.Ran)
	go func() { woken <- db.RunOne(publisher(frozen, events)) }()
	<-frozen.frozen
	for ran := 0; ran < 2; ran += len(db.Drain(publisher(js, events))) {
		db.Advance(time.Minute) // its lease ends
	}
	time.Sleep(300 * time.Millisecond) // the stream forgets the ids: they make no difference
	close(frozen.wake)
	require.True(t, (<-woken).Lost())
	require.ErrorContains(t, frozen.err, "wrong last sequence")
	info, err := events.Info(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 2, info.State.Msgs)
}

// freezing stands still at a publication until it is woken.
type freezing struct {
	jetstream.JetStream
	frozen, wake chan struct{}
	err          error
}

func (f *freezing) PublishMsg(ctx context.Context, m *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	close(f.frozen)
	<-f.wake
	ack, err := f.JetStream.PublishMsg(context.WithoutCancel(ctx), m, opts...)
	f.err = err
	return ack, err
}
