package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// call is the provider's record of one call.
type call struct {
	order
	Key     string `json:"key"`
	What    string `json:"what"` // applied, repeated (known key, nothing done) or refused
	Receipt string `json:"receipt,omitempty"`
}

// order is what the provider is asked to do.
type order struct {
	Work  string `json:"work"`
	Form  string `json:"form"`
	Job   int64  `json:"job"`
	Token int64  `json:"token"`
}

// provider is a service of somebody else. For the form "again" it remembers the first answer to each key. For the other
// forms it does what it is told each time. For the form "ask" it can be asked what it did.
//
// It ignores a request that has not arrived whole within providerPatience of its connection. A process connects before it
// records the intent. So however long it is frozen after that, its request does nothing when it wakes up.
type provider struct {
	log *journal

	mu      sync.Mutex // guards the rest
	rng     *rand.Rand
	receipt map[string]string // by key
	n       int
}

const (
	providerPatience = 2 * time.Second
	providerSlowness = 1500 * time.Millisecond // well below what is left of an effect's lease and grace time
)

func runProvider(ctx context.Context, c *child) error {
	log_, err := openJournal(c.Dir, "calls")
	if err != nil {
		return err
	}
	p := &provider{log: log_, rng: rand.New(rand.NewPCG(c.Seed, 2)), receipt: make(map[string]string)}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /do", p.do)
	mux.HandleFunc("GET /ask", p.ask)
	s := &http.Server{Handler: mux, ReadTimeout: providerPatience, ErrorLog: log.New(io.Discard, "", 0)}
	go func() {
		<-ctx.Done()
		_ = s.Close()
	}()
	// The main process waits for this file, which says where the provider is.
	address := filepath.Join(c.Dir, "provider")
	if err := os.WriteFile(address+".new", []byte(l.Addr().String()), 0o644); err != nil {
		return err
	}
	if err := os.Rename(address+".new", address); err != nil {
		return err
	}
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func (p *provider) do(w http.ResponseWriter, r *http.Request) {
	c := call{Key: r.Header.Get("Idempotency-Key")}
	if err := json.NewDecoder(r.Body).Decode(&c.order); err != nil || c.Key == "" {
		http.Error(w, "an order has an Idempotency-Key", http.StatusBadRequest)
		return
	}
	p.mu.Lock()
	fate, wait := p.rng.IntN(100), time.Duration(p.rng.Int64N(int64(30*time.Millisecond)))
	if p.rng.IntN(20) == 0 {
		wait = time.Duration(p.rng.Int64N(int64(providerSlowness)))
	}
	p.mu.Unlock()
	time.Sleep(wait)
	if fate < 4 {
		c.What = "refused"
		p.log.write(c)
		http.Error(w, "busy", http.StatusServiceUnavailable)
		return
	}
	p.mu.Lock()
	known, repeated := p.receipt[c.Key]
	if c.Form == formAgain && repeated {
		c.What, c.Receipt = "repeated", known
	} else {
		p.n++
		c.What, c.Receipt = "applied", fmt.Sprintf("r%d", p.n)
		p.receipt[c.Key] = c.Receipt
	}
	p.log.write(c)
	p.mu.Unlock()
	if fate < 9 { // it is done, and the client will never know
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close()
		}
		return
	}
	_ = json.NewEncoder(w).Encode(c)
}

func (p *provider) ask(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	receipt, applied := p.receipt[r.URL.Query().Get("key")]
	p.mu.Unlock()
	if !applied {
		http.NotFound(w, r)
		return
	}
	_ = json.NewEncoder(w).Encode(call{Receipt: receipt})
}

// errRefused means that the provider says that it did nothing.
var errRefused = errors.New("the provider refuses")

// client calls the provider over one connection that is already open.
type client struct {
	http    *http.Client
	url     string
	conn    net.Conn
	unready error
}

// dial opens the connection. Call it before the intent is recorded: see provider.
func dial(ctx context.Context, address string) *client {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", address)
	used := false
	return &client{url: "http://" + address, conn: conn, unready: err, http: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			if used || err != nil {
				return nil, errors.New("one connection, one request")
			}
			used = true
			return conn, nil
		},
	}}}
}

// do returns the receipt. errRefused means that nothing was done; any other error means that nobody knows.
func (c *client) do(ctx context.Context, key string, o order) (string, error) {
	if c.unready != nil {
		return "", errRefused
	}
	body, err := json.Marshal(o)
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/do", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Idempotency-Key", key)
	resp, err := c.http.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusServiceUnavailable:
		return "", errRefused
	default:
		return "", fmt.Errorf("the provider answers %s", resp.Status)
	}
	var got call
	err = json.NewDecoder(resp.Body).Decode(&got)
	return got.Receipt, err
}

func (c *client) close() {
	if c.conn != nil {
		_ = c.conn.Close()
	}
}

// ask asks whether anything was done under the key.
func ask(ctx context.Context, address, key string) (receipt string, applied bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/ask?key="+key, nil)
	if err != nil {
		return "", false, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", false, err
	}
	defer func() { _ = resp.Body.Close() }()
	switch resp.StatusCode {
	case http.StatusOK:
		var got call
		err = json.NewDecoder(resp.Body).Decode(&got)
		return got.Receipt, err == nil, err
	case http.StatusNotFound:
		return "", false, nil
	}
	return "", false, fmt.Errorf("the provider answers %s", resp.Status)
}
