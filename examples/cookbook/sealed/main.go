// Sealed stores payloads and results encrypted: whoever reads the database, a backup or the page sees no card number. The keys
// are the application's own, and change while jobs wait. A duplicate is still recognised.
package main

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/examples/internal/example"
)

type card struct {
	Order  int    `json:"order"`
	Number string `json:"number"`
}

var charge = onceq.Kind[sealed[card]]{
	Name:   "charge",
	Key:    func(s sealed[card]) string { return fmt.Sprint("order-", s.Value.Order) }, // it is stored as it is: put no secret in it
	Fields: []string{"mark"},                                                           // what else is stored differs each time
}

// secrets come from your key management. A new job is encrypted with the current key; old keys stay until no job needs them.
var secrets = struct {
	current string
	keys    map[string][]byte // 32 bytes, by their ids
	mark    []byte            // does not change with them: a duplicate has to have the same mark
}{
	"2026-10", map[string][]byte{"2026-10": []byte("a key of 32 bytes, from October."), "2026-11": []byte("another one of 32, from November")},
	[]byte("and one for marks alone"),
}

// sealed is encrypted where it becomes JSON, and decrypted where it is read: as a payload, a result, an event or the outcome of
// a Once.
type sealed[T any] struct{ Value T }

// envelope is what is stored.
type envelope struct {
	Key  string `json:"key"`  // its id
	Data []byte `json:"data"` // AES-GCM, with a nonce before it
	Mark []byte `json:"mark"` // HMAC of what is inside, so that onceq can compare it
}

func (s sealed[T]) MarshalJSON() ([]byte, error) {
	plain, err := json.Marshal(s.Value)
	if err != nil {
		return nil, err
	}
	box, err := open(secrets.current)
	if err != nil {
		return nil, err
	}
	mark := hmac.New(sha256.New, secrets.mark)
	_, _ = mark.Write(plain)
	return json.Marshal(envelope{secrets.current, box.Seal(nil, nil, plain, []byte(secrets.current)), mark.Sum(nil)})
}

func (s *sealed[T]) UnmarshalJSON(raw []byte) error {
	var e envelope
	if err := json.Unmarshal(raw, &e); err != nil {
		return err
	}
	box, err := open(e.Key)
	if err != nil {
		return err
	}
	plain, err := box.Open(nil, nil, e.Data, []byte(e.Key))
	if err != nil {
		return err
	}
	return json.Unmarshal(plain, &s.Value)
}

// noKey is a type of its own because onceq stores no texts of such errors, which may quote what they refuse, but their type.
type noKey string

func (k noKey) Error() string { return "there is no key " + string(k) }

func open(id string) (cipher.AEAD, error) {
	key, known := secrets.keys[id]
	if !known {
		return nil, noKey(id)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// handler keeps secrets out of what it returns: the texts of errors are stored as they are.
func handler(pay func(card) (string, error)) onceq.Handler {
	return charge.Handle(func(ctx context.Context, l *onceq.Lease, s sealed[card]) error {
		receipt, err := onceq.Once(ctx, l, "charge", func(context.Context, string) (sealed[string], error) {
			r, err := pay(s.Value)
			return sealed[string]{r}, err
		})
		if err != nil {
			return err
		}
		return l.SetResult(receipt)
	})
}

// decrypt is a Mask of onceqweb, for a page whose every viewer may read payloads.
func decrypt(_, _, text string) string {
	var s sealed[json.RawMessage]
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return text
	}
	return string(s.Value)
}

func main() {
	ctx := context.Background()
	pool, q := example.Open(ctx, "")
	defer pool.Close()
	enqueue := func(order int, number string) (onceq.Result, error) {
		return q.Enqueue(ctx, pool, charge.Job(sealed[card]{card{order, number}}))
	}
	_, err := enqueue(7, "4000 0000 0000 4242")
	example.Check(err)
	secrets.current = "2026-11" // the key changes, and the form comes again
	r, err := enqueue(7, "4000 0000 0000 4242")
	example.Check(err)
	fmt.Println("duplicate:", r.Duplicate)
	_, err = enqueue(7, "5000 0000 0000 1111")
	fmt.Println("another card is refused:", errors.Is(err, onceq.ErrMismatch))
	_, err = enqueue(8, "5000 0000 0000 1111")
	example.Check(err)

	var stored string
	example.Check(pool.QueryRow(ctx, `select string_agg(payload ->> 'key', ', ' order by id) from onceq.v_jobs`).Scan(&stored))
	fmt.Println("stored under:", stored)
	w, err := onceq.NewWorker(q, onceq.WorkerConfig{Queues: map[string]onceq.QueueConfig{"default": {Concurrency: 1}}}, handler(func(c card) (string, error) {
		fmt.Println("charged:", c.Number)
		return "receipt for " + c.Number, nil
	}))
	example.Check(err)
	example.Check(w.Drain(ctx, 0))
	job, err := q.GetByKey(ctx, pool, charge.Name, "order-7")
	example.Check(err)
	var receipt sealed[string]
	example.Check(json.Unmarshal(job.Result, &receipt))
	fmt.Println(receipt.Value)
}

// Output:
// duplicate: true
// another card is refused: true
// stored under: 2026-10, 2026-11
// charged: 4000 0000 0000 4242
// charged: 5000 0000 0000 1111
// receipt for 4000 0000 0000 4242
