package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Container is a running server in a container.
type Container struct {
	URL     string
	Stop    func() error                                    // may be called any number of times
	Restart func(ctx context.Context, immediate bool) error // returns when the server answers
}

// StartContainer starts a server in a container of the image. The data is in memory unless durable, and the settings
// become the server's arguments. Importing the module queuetest/container sets it, so only its users depend on Docker.
// It returns ErrNoDocker if no Docker daemon answers.
var StartContainer func(ctx context.Context, image string, durable bool, settings []string) (*Container, error)

// ErrNoDocker means that no Docker daemon answers.
var ErrNoDocker = errors.New("no Docker daemon answers")

// defaultImage is the newest Postgres that onceq is tested with.
const defaultImage = "postgres:18-alpine"

// ContainerImport is the line that enables containers.
const ContainerImport = `import _ "github.com/onceq/onceq/queuetest/container"`

func startContainer(ctx context.Context, opts Options) (*Server, error) {
	image := os.Getenv(EnvImage)
	if StartContainer == nil {
		if image != "" {
			return nil, fmt.Errorf("pgserver: %s is set, but containers need another module: add to a test file: %s", EnvImage, ContainerImport)
		}
		return nil, errNotFound
	}
	if image == "" {
		image = defaultImage
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	c, err := StartContainer(ctx, image, opts.Durable, opts.settings())
	if errors.Is(err, ErrNoDocker) {
		return nil, fmt.Errorf("%w (%w)", errNotFound, err)
	}
	if err != nil {
		return nil, fmt.Errorf("pgserver: %w", err)
	}
	s, err := newServer(ctx, c.URL, contained{c})
	if err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return s, nil
}

type contained struct{ *Container }

func (c contained) stop() error { return c.Stop() }
func (c contained) restart(ctx context.Context, immediate bool) error {
	return c.Restart(ctx, immediate)
}
func (contained) binDir() string { return "" }
