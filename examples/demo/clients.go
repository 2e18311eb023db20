//go:build unix

package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

//go:embed signups.csv
var signupsFile []byte

// signup is a line of signups.csv, and the form that a client sends. The client makes the id, so the same form sent again
// is the same sign-up.
type signup struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Email string `json:"email"`
	Plan  string `json:"plan"`
}

func readSignups(n int) ([]signup, error) {
	records, err := csv.NewReader(bytes.NewReader(signupsFile)).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("signups.csv: %w", err)
	}
	var lines []signup
	for _, r := range records[1:] {
		lines = append(lines, signup{ID: r[0], Name: r[1], Email: r[2], Plan: r[3]})
	}
	if n > 0 && n < len(lines) {
		lines = lines[:n]
	}
	return lines, nil
}

// clients are people at their browsers.
type clients struct {
	url     string
	seed    uint64
	say     func(format string, args ...any)
	missing func() string // the faults that were not shown yet

	running      sync.WaitGroup
	sent, gaveUp atomic.Int64
}

var (
	impatient = &http.Client{Timeout: 60 * time.Millisecond}
	patient   = &http.Client{Timeout: 10 * time.Second}
)

// submit sends the lines, and then more sign-ups until all faults were shown. It returns when every sign-up was answered,
// with the addresses that signed up.
func (c *clients) submit(ctx context.Context, lines []signup) map[string]bool {
	wanted := make(map[string]bool)
	said := false
	for i := 0; ; i++ {
		var s signup
		if i < len(lines) {
			s = lines[i]
		} else {
			m := c.missing()
			if m == "" {
				break
			}
			if !said {
				c.say("the file is through; still to be shown: %s. More people sign up, and the chaos goes on", m)
				said = true
			}
			s = signup{ID: fmt.Sprintf("late-%d", i), Name: "Late Comer", Email: fmt.Sprintf("late.comer.%d@example.com", i), Plan: "basic"}
		}
		if !pause(ctx, 50*time.Millisecond) {
			break
		}
		wanted[strings.ToLower(s.Email)] = true
		c.running.Go(func() { c.client(ctx, i, s) })
	}
	c.running.Wait()
	return wanted
}

// client submits one line. Some people click twice, some have little patience, and all try again until they get an answer.
func (c *clients) client(ctx context.Context, i int, s signup) {
	client := patient
	switch fate := dice(c.seed, "client", s.ID, i).IntN(10); {
	case fate == 0:
		c.running.Go(func() { c.send(ctx, patient, s) })
	case fate < 3:
		client = impatient
	}
	for !c.send(ctx, client, s) {
		client = patient
		if !pause(ctx, 100*time.Millisecond) {
			return
		}
	}
}

// send sends the form once and reports whether it was answered.
func (c *clients) send(ctx context.Context, client *http.Client, s signup) bool {
	body, err := json.Marshal(s)
	if err != nil {
		return false
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return false
	}
	c.sent.Add(1)
	resp, err := client.Do(req)
	if err != nil {
		c.gaveUp.Add(1)
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	return resp.StatusCode < 300
}
