package main

import (
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/onceq/onceq/examples/internal/example"
)

// start starts a NATS server in this process: on a port, or on any with server.RANDOM_PORT, and with its files in a directory.
func start(port int, dir string) *server.Server {
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true,
		SyncAlways: true, // what is acknowledged is on the disk; by default it is there within two minutes
	})
	example.Check(err)
	s.Start()
	if !s.ReadyForConnections(time.Minute) {
		panic("the broker does not start")
	}
	return s
}
