package withgin

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

// Whatever would send an answer past the middleware is refused. An answer that is written in parts arrives whole.
func TestWriter_NothingGetsPastTheMiddleware(t *testing.T) {
	gin.SetMode(gin.ReleaseMode)
	db := queuetest.New(t)
	m, err := onceqhttp.New(db.Queue, onceqhttp.Config{Principal: onceqhttp.Public, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	ran := 0
	e := gin.New()
	e.POST("/", once(m), func(c *gin.Context) {
		ran++
		assert.False(t, c.Writer.Written())
		assert.Panics(t, c.Writer.Flush)
		_, _, err := c.Writer.Hijack()
		assert.ErrorIs(t, err, http.ErrNotSupported)
		assert.Nil(t, c.Writer.Pusher())
		c.Status(http.StatusAccepted)
		_, _ = c.Writer.WriteString("one ")
		c.Status(http.StatusTeapot) // too late
		_, _ = io.WriteString(c.Writer, "two")
		assert.Equal(t, []any{true, 202, 7}, []any{c.Writer.Written(), c.Writer.Status(), c.Writer.Size()})
	})
	s := httptest.NewServer(e)
	defer s.Close()
	for range 2 {
		r, err := http.NewRequest("POST", s.URL, nil)
		require.NoError(t, err)
		r.Header.Set("Idempotency-Key", "k")
		resp, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 202, resp.StatusCode)
		require.Equal(t, "one two", string(body))
	}
	require.Equal(t, 1, ran)
}
