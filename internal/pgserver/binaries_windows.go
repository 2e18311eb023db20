package pgserver

import (
	"context"
	"errors"
)

// binariesStart is false: on Windows the server runs in a container or is already running.
const binariesStart = false

func startBinaries(context.Context, string, Options) (*Server, error) {
	return nil, errors.New("pgserver: server binaries are not started on Windows: unset " + EnvBin +
		" and set " + EnvURL + " to a server that runs, or start Docker")
}

// ToNobody does nothing on systems without root.
func ToNobody(string) error { return nil }
