//go:build unix

package main

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/mail"
	"strings"
	"sync"
	"time"

	"github.com/emersion/go-smtp"
)

// dice returns the random numbers for the nth time that something is done for a user. With the same seed they are the same,
// whatever the order of events.
func dice(seed uint64, what, whom string, n int) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprint(h, what, "\x00", whom, "\x00", n)
	return rand.New(rand.NewPCG(seed, h.Sum64()))
}

// mailServer is another company's mail server. It speaks SMTP and delivers every message that it accepts, twice if it gets
// it twice. Like mail providers, it has a page that says which Message-IDs it has accepted.
type mailServer struct {
	seed uint64

	mu        sync.Mutex
	handedIn  map[string]int // by recipient, for the dice
	accepted  map[string]int // by Message-ID
	delivered map[string]int // by recipient; the ledger counts these
}

// serverPatience is how long the mail server waits for the rest of a message. It must be well below the time after
// which anybody asks for the message: a client that was frozen in the middle finds the connection closed.
const serverPatience = 2 * time.Second

func (m *mailServer) serve(l net.Listener) {
	s := smtp.NewServer(smtp.BackendFunc(func(c *smtp.Conn) (smtp.Session, error) {
		return &mailSession{m: m, conn: c}, nil
	}))
	s.Domain, s.ReadTimeout, s.WriteTimeout = "mail.example.net", serverPatience, serverPatience
	s.ErrorLog = log.New(io.Discard, "", 0) // broken connections are the point of this program
	_ = s.Serve(l)
}

type mailSession struct {
	m    *mailServer
	conn *smtp.Conn
	to   string
}

func (s *mailSession) Reset()                                    { s.to = "" }
func (s *mailSession) Logout() error                             { return nil }
func (s *mailSession) Mail(string, *smtp.MailOptions) error      { return nil }
func (s *mailSession) Rcpt(to string, _ *smtp.RcptOptions) error { s.to = to; return nil }

func (s *mailSession) Data(r io.Reader) error {
	msg, err := mail.ReadMessage(r)
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, msg.Body); err != nil {
		return err // the message did not arrive completely
	}
	id := strings.Trim(msg.Header.Get("Message-Id"), "<>")

	s.m.mu.Lock()
	s.m.handedIn[s.to]++
	d := dice(s.m.seed, "mail", s.to, s.m.handedIn[s.to])
	s.m.mu.Unlock()
	time.Sleep(20*time.Millisecond + time.Duration(d.IntN(120))*time.Millisecond)
	fate := d.IntN(100)
	if fate < 3 {
		return &smtp.SMTPError{Code: 451, EnhancedCode: smtp.EnhancedCode{4, 7, 1}, Message: "Greylisted, try again"}
	}
	s.m.mu.Lock()
	s.m.accepted[id]++
	s.m.delivered[s.to]++
	s.m.mu.Unlock()
	if fate < 6 {
		_ = s.conn.Conn().Close() // accepted, and the client will never know
	}
	return nil
}

// ServeHTTP answers GET /messages/<Message-ID>.
func (m *mailServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	times := m.accepted[r.PathValue("id")]
	m.mu.Unlock()
	if times == 0 {
		http.NotFound(w, r)
		return
	}
	fmt.Fprintln(w, `{"accepted":true}`)
}

// bank is another company's payment API. It remembers the first answer for each Idempotency-Key and charges once for
// it.
type bank struct {
	seed uint64

	mu      sync.Mutex
	calls   map[int64]int // by user, for the dice
	byKey   map[string]*charge
	charges map[int64]int // by user; the ledger counts these
	replays int
}

type charge struct {
	order
	ID string `json:"id"`
}

type order struct {
	User  int64 `json:"user"`
	Cents int   `json:"cents"`
}

// ServeHTTP answers POST /charges.
func (b *bank) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("Idempotency-Key")
	var o order
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil || key == "" {
		http.Error(w, "a charge has an Idempotency-Key, a user and cents", http.StatusBadRequest)
		return
	}
	b.mu.Lock()
	b.calls[o.User]++
	d := dice(b.seed, "bank", fmt.Sprint(o.User), b.calls[o.User])
	b.mu.Unlock()

	time.Sleep(30*time.Millisecond + time.Duration(d.IntN(150))*time.Millisecond)
	fate := d.IntN(100)
	if fate < 3 {
		http.Error(w, "busy", http.StatusServiceUnavailable) // nothing was charged
		return
	}
	b.mu.Lock()
	c := b.byKey[key]
	replay := c != nil
	if !replay {
		c = &charge{order: o, ID: fmt.Sprintf("ch_%06d", len(b.byKey)+1)}
		b.byKey[key] = c
		b.charges[o.User]++
	} else {
		b.replays++
	}
	b.mu.Unlock()
	switch {
	case c.order != o:
		http.Error(w, "this Idempotency-Key was used for another charge", http.StatusUnprocessableEntity)
		return
	case fate < 8: // charged, and the client will not know
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close()
		}
		return
	case fate < 14:
		time.Sleep(time.Duration(500+d.IntN(1000)) * time.Millisecond)
	}
	if replay {
		w.Header().Set("Idempotent-Replayed", "true")
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(c)
}
