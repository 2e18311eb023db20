package main

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/onceq/onceq"
)

// client follows no redirects. A customer chooses the address, so give it a net.Dialer whose Control refuses those of your
// own network.
var client = &http.Client{
	Timeout:       20 * time.Second,
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// send signs the request with each secret of the endpoint: while a secret is being changed there are two. It returns an error
// for each status but 2xx, and how long the endpoint wants to be left alone.
func send(ctx context.Context, client *http.Client, url string, secrets []string, d delivery) (status int, pause time.Duration, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(d.Body))
	if err != nil {
		return 0, 0, onceq.Fatal(err)
	}
	at := strconv.FormatInt(time.Now().Unix(), 10)
	var signatures []string
	for _, secret := range secrets {
		key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
		if err != nil {
			return 0, 0, err
		}
		mac := hmac.New(sha256.New, key)
		_, _ = fmt.Fprintf(mac, "%s.%s.%s", d.Event, at, d.Body)
		signatures = append(signatures, "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("webhook-id", d.Event)
	r.Header.Set("webhook-timestamp", at)
	r.Header.Set("webhook-signature", strings.Join(signatures, " "))
	res, err := client.Do(r)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode < 200 || res.StatusCode > 299 {
		err = fmt.Errorf("the endpoint answered %s", res.Status)
	}
	seconds, _ := strconv.Atoi(res.Header.Get("Retry-After"))
	return res.StatusCode, time.Duration(max(seconds, 0)) * time.Second, err
}
