package main

import (
	"errors"
	"io"
	"net"
	"sync"

	"github.com/Shopify/toxiproxy/v2"
)

// network is what a process has before it: a proxy, and before that a wire that can fall silent.
type network struct {
	*toxiproxy.Proxy
	front net.Listener

	mu   sync.Mutex                   // guards the rest
	held map[net.Conn]<-chan struct{} // the processes' connections; one is silent until its channel is closed
	goOn func()                       // ends the latest silence
}

func before(p *toxiproxy.Proxy) (*network, error) {
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	n := &network{Proxy: p, front: front, held: map[net.Conn]<-chan struct{}{}, goOn: func() {}}
	go func() {
		for {
			client, err := front.Accept()
			if err != nil {
				return
			}
			go n.connect(client)
		}
	}()
	return n, nil
}

func (n *network) connect(client net.Conn) {
	server, err := net.Dial("tcp", n.Listen)
	if err != nil { // the proxy is cut
		reset(client)
		return
	}
	n.mu.Lock()
	n.held[client] = nil
	n.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { n.pass(client, server, client) })
	both.Go(func() { n.pass(client, client, server) })
	both.Wait()
	n.mu.Lock()
	delete(n.held, client)
	n.mu.Unlock()
}

// pass forwards what comes, and the end, in one direction of a client's connection.
func (n *network) pass(client, to, from net.Conn) {
	b := make([]byte, 1<<15)
	for {
		size, err := from.Read(b)
		n.mu.Lock()
		held := n.held[client]
		n.mu.Unlock()
		if held != nil {
			<-held
		}
		_, _ = to.Write(b[:size]) // if it is closed, so is from
		switch {
		case errors.Is(err, io.EOF):
			_ = to.Close()
			return
		case err != nil:
			reset(to)
			return
		}
	}
}

func reset(conn net.Conn) {
	_ = conn.(*net.TCPConn).SetLinger(0)
	_ = conn.Close()
}

// silence holds what is sent over the connections that are there. Nobody is told, not even when one end closes its own. New ones work.
// What was sent arrives when the silence ends: by the function that is returned, or by the next silence.
func (n *network) silence() (goOn func()) {
	over := make(chan struct{})
	n.mu.Lock()
	defer n.mu.Unlock()
	n.goOn()
	n.goOn = sync.OnceFunc(func() { close(over) })
	for client := range n.held {
		n.held[client] = over
	}
	return n.goOn
}
