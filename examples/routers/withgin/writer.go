package withgin

import (
	"bufio"
	"io"
	"net"
	"net/http"

	"github.com/gin-gonic/gin"
)

// writer turns any http.ResponseWriter into a gin.ResponseWriter; gin's own is not exported. It sends the status with the
// first byte, or at WriteHeaderNow.
type writer struct {
	gin.ResponseWriter // for CloseNotify

	to     http.ResponseWriter
	status int
	size   int // -1 until the status is sent
}

func (w *writer) Header() http.Header { return w.to.Header() }
func (w *writer) Status() int         { return w.status }
func (w *writer) Size() int           { return w.size }
func (w *writer) Written() bool       { return w.size >= 0 }

func (w *writer) WriteHeader(status int) {
	if status > 0 && !w.Written() {
		w.status = status
	}
}

func (w *writer) WriteHeaderNow() {
	if !w.Written() {
		w.size = 0
		w.to.WriteHeader(w.status)
	}
}

func (w *writer) Write(b []byte) (int, error) {
	w.WriteHeaderNow()
	n, err := w.to.Write(b)
	w.size += n
	return n, err
}

func (w *writer) WriteString(s string) (int, error) {
	w.WriteHeaderNow()
	n, err := io.WriteString(w.to, s)
	w.size += n
	return n, err
}

// An answer that will be stored can be neither streamed nor hijacked.

func (w *writer) Pusher() http.Pusher { return nil }

func (w *writer) Flush() {
	if err := http.NewResponseController(w.to).Flush(); err != nil {
		panic(err)
	}
}

func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return http.NewResponseController(w.to).Hijack()
}
