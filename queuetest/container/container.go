// Package container lets queuetest start its Postgres in a container. Importing it is enough:
//
//	import _ "github.com/onceq/onceq/queuetest/container"
//
// queuetest uses it if ONCEQ_TEST_IMAGE names an image, or if it finds neither a server (ONCEQ_TEST_DATABASE_URL) nor
// server binaries. The default image is postgres:18-alpine. The package is a module of its own, so only its users
// depend on the Docker client. See queuetest for the rest.
package container

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/url"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	containertypes "github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"

	"github.com/onceq/onceq/internal/pgserver"
)

func init() { pgserver.StartContainer = start }

const containerPort = "5432/tcp"

// containerScript is process 1 of the container. Its standard input is a connection that this process holds open. A
// line on it is a signal for the server, which is then started again. The end of the input, for whatever reason, stops
// the server and with it the container. So a container is cleaned up even if this process is killed.
const containerScript = `
exec 3<&0
docker-entrypoint.sh "$@" 3<&- &
while read -r signal <&3; do
	kill -s "$signal" $!
	wait $!
	docker-entrypoint.sh "$@" 3<&- &
done
kill -s QUIT $!
wait $!
`

// container is a server in a container of an image that works like the official one.
//
// testcontainers starts a second container beside it, which removes leftovers. If its image (testcontainers/ryuk) is
// not available, set TESTCONTAINERS_RYUK_DISABLED=true. Nothing is left over then either: see containerScript.
type container struct {
	docker testcontainers.Container
	url    string

	mu       sync.Mutex // held while the server is being stopped or restarted; guards the fields below
	lifeline io.WriteCloser
	stopped  bool
}

// lifelines keeps the connections reachable that keep the containers alive. Otherwise the garbage collector would close
// the connection of a caller that keeps only the URL.
var lifelines sync.Map // of *container to struct{}

func start(ctx context.Context, image string, durable bool, settings []string) (*pgserver.Container, error) {
	docker, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", pgserver.ErrNoDocker, err)
	}
	defer func() { _ = docker.Close() }()
	if _, err := docker.Ping(ctx, client.PingOptions{}); err != nil {
		return nil, fmt.Errorf("%w: %w", pgserver.ErrNoDocker, err)
	}

	// The port is open to the container's network and often to the machine's, so the server needs a password.
	password := rand.Text()
	environment := map[string]string{
		"POSTGRES_USER":        "postgres",
		"POSTGRES_PASSWORD":    password,
		"POSTGRES_DB":          "postgres",
		"POSTGRES_INITDB_ARGS": "--no-sync --encoding=UTF8",
	}
	if !durable {
		environment["PGDATA"] = "/dev/shm/onceq" // in memory: these files are not written to a disk
	}
	c := &container{}
	started, err := testcontainers.Run(ctx, image,
		testcontainers.WithEnv(environment),
		testcontainers.WithExposedPorts(containerPort),
		testcontainers.WithEntrypoint("sh", "-c", containerScript, "sh"),
		testcontainers.WithCmd(append([]string{"postgres"}, settings...)...),
		testcontainers.WithConfigModifier(func(config *containertypes.Config) {
			config.AttachStdin, config.OpenStdin, config.StdinOnce = true, true, true
		}),
		testcontainers.WithHostConfigModifier(func(config *containertypes.HostConfig) {
			config.AutoRemove = true
			config.ShmSize = 8 << 30 // a limit: unused memory is not taken
		}),
		testcontainers.WithAdditionalLifecycleHooks(testcontainers.ContainerLifecycleHooks{
			PostCreates: []testcontainers.ContainerHook{c.attach},
		}),
	)
	if started != nil {
		c.docker = started
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start a container of %s (where the image testcontainers/ryuk cannot "+
			"be pulled, set TESTCONTAINERS_RYUK_DISABLED=true): %w", image, err), c.stop())
	}

	endpoint, err := started.PortEndpoint(ctx, containerPort, "")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ask for the container's port: %w", err), c.stop())
	}
	c.url = (&url.URL{
		Scheme: "postgres", User: url.UserPassword("postgres", password), Host: endpoint,
		Path: "/postgres", RawQuery: "sslmode=disable",
	}).String()

	ready, cancelReady := context.WithTimeout(ctx, time.Minute)
	defer cancelReady()
	if err := pgserver.AwaitReady(ready, c.url, nil); err != nil {
		return nil, errors.Join(fmt.Errorf("a container of %s: %w; its log: %s", image, err, c.log(ctx)), c.stop())
	}
	return &pgserver.Container{URL: c.url, Stop: c.stop, Restart: c.restart}, nil
}

// attach opens the connection to the container's standard input before the container runs.
func (c *container) attach(ctx context.Context, created testcontainers.Container) error {
	docker, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = docker.Close() }()
	attached, err := docker.ContainerAttach(context.WithoutCancel(ctx), created.GetContainerID(),
		client.ContainerAttachOptions{Stream: true, Stdin: true})
	if err != nil {
		return fmt.Errorf("attach to the container: %w", err)
	}
	c.lifeline = attached.Conn
	lifelines.Store(c, struct{}{})
	return nil
}

func (c *container) stop() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return nil
	}
	c.stopped = true
	lifelines.Delete(c)
	if c.lifeline != nil {
		_ = c.lifeline.Close() // the container ends at once by itself; the following call waits for that
	}
	if c.docker == nil {
		return nil
	}
	return testcontainers.TerminateContainer(c.docker, testcontainers.StopTimeout(10*time.Second))
}

// restart restarts the server inside the running container, because a restarted container gets another port.
func (c *container) restart(ctx context.Context, immediate bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return errors.New("the server was stopped for good")
	}
	before, err := startTime(ctx, c.url)
	if err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	signal := "INT"
	if immediate {
		signal = "QUIT"
	}
	if _, err := fmt.Fprintln(c.lifeline, signal); err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	for {
		if err := pgserver.AwaitReady(ctx, c.url, nil); err != nil {
			return fmt.Errorf("restart: %w", err)
		}
		now, err := startTime(ctx, c.url)
		if err == nil && !now.Equal(before) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the server in the container was not restarted: %w", ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// startTime returns when the server started, which distinguishes the restarted server from the old one.
func startTime(ctx context.Context, connString string) (time.Time, error) {
	var t time.Time
	conn, err := pgx.Connect(ctx, connString)
	if err != nil {
		return t, err
	}
	defer func() { _ = conn.Close(ctx) }()
	err = conn.QueryRow(ctx, "select pg_postmaster_start_time()").Scan(&t)
	return t, err
}

// log returns the container's output for error messages.
func (c *container) log(ctx context.Context) string {
	logs, err := c.docker.Logs(context.WithoutCancel(ctx))
	if err != nil {
		return err.Error()
	}
	defer func() { _ = logs.Close() }()
	text, err := io.ReadAll(io.LimitReader(logs, 20000))
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-2000):])
}
