package main

import (
	"bytes"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// wire stands between a process and the database, and can lose the answer to a COMMIT.
type wire struct {
	url    string
	server string // its address
	armed  atomic.Bool
	cut    chan struct{} // closed when the answer was lost
	once   sync.Once
}

// wire opens one in front of the stage's database.
func (s *stage) wire() *wire {
	u, err := url.Parse(s.url)
	s.check(err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	s.check(err)
	w := &wire{server: u.Host, cut: make(chan struct{})}
	u.Host = l.Addr().String()
	w.url = u.String()
	go func() {
		<-s.ctx.Done()
		_ = l.Close()
	}()
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go w.join(client)
		}
	}()
	return w
}

// cutAtCommit cuts the connection that wrote the application's row when the server has committed and before the client hears.
func (w *wire) cutAtCommit() { w.armed.Store(true) }

func (w *wire) didCut(within time.Duration) bool {
	select {
	case <-w.cut:
		return true
	case <-time.After(within):
		return false
	}
}

func (w *wire) join(client net.Conn) {
	server, err := net.Dial("tcp", w.server)
	if err != nil {
		_ = client.Close()
		return
	}
	var wrote atomic.Bool
	both := func() { _, _ = client.Close(), server.Close() }
	go func() {
		defer both()
		buf := make([]byte, 64<<10)
		for {
			n, err := client.Read(buf)
			if bytes.Contains(buf[:n], []byte(insertRow)) {
				wrote.Store(true)
			}
			if _, write := server.Write(buf[:n]); err != nil || write != nil {
				return
			}
		}
	}()
	defer both()
	buf := make([]byte, 64<<10)
	for {
		n, err := server.Read(buf)
		if wrote.Load() && w.armed.Load() && bytes.Contains(buf[:n], []byte("COMMIT\x00")) {
			w.once.Do(func() { close(w.cut) })
			w.armed.Store(false)
			return
		}
		if _, write := client.Write(buf[:n]); err != nil || write != nil {
			return
		}
	}
}
