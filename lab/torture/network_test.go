package main

import (
	"bufio"
	"net"
	"testing"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// What is sent over a silent connection arrives when the silence is over, and new connections work meanwhile.
func TestSilence_NewConnectionsWork(t *testing.T) {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer server.Close()
	lines := make(chan string, 3)
	go func() {
		for {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for in := bufio.NewScanner(conn); in.Scan(); {
					lines <- in.Text()
				}
			}()
		}
	}()
	proxy := toxiproxy.NewProxy(toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop()), "p", "127.0.0.1:0", server.Addr().String())
	require.NoError(t, proxy.Start())
	defer proxy.Stop()
	n, err := before(proxy)
	require.NoError(t, err)
	defer n.front.Close()
	send := func(conn net.Conn, line string) {
		t.Helper()
		_, err := conn.Write([]byte(line + "\n"))
		require.NoError(t, err)
	}
	dial := func() net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp", n.front.Addr().String())
		require.NoError(t, err)
		return conn
	}
	old := dial()
	send(old, "before")
	require.Equal(t, "before", <-lines)
	goOn := n.silence()
	send(old, "during")
	require.NoError(t, old.Close()) // the server is not told
	young := dial()
	defer young.Close()
	for range 2 {
		send(young, "new")
		require.Equal(t, "new", <-lines)
	}
	goOn()
	require.Equal(t, "during", <-lines)
}
