// Package paused is what a process knows of what is paused: of queues and kinds of which nothing may be
// claimed. It imports pg and stmt.
package paused

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceq/onceq/internal/pg"
	"github.com/onceq/onceq/internal/stmt"
)

// How old what is known may be.
const (
	Fresh = 500 * time.Millisecond // pauses are read no more often in the message of a claim
	Old   = 2 * time.Second        // what was read longer ago is read again before a claim
)

// Known is what this process knows of the rows.
type Known struct {
	Latest  atomic.Pointer[Set] // nil: nothing
	reading chan struct{}       // holds one while somebody reads the rows
}

// Set is what was read at some time.
type Set struct {
	At     time.Time // just before it was read, by this process's clock
	Queues map[string]bool
	Kinds  []string
}

// New returns that of a process that knows nothing yet.
func New() *Known { return &Known{reading: make(chan struct{}, 1)} }

// Forget makes the next claim read the rows first.
func (p *Known) Forget() { p.Latest.Store(nil) }

// None reports whether nothing is paused, as of Old ago at the earliest.
func (p *Known) None() bool {
	k := p.Latest.Load()
	return k != nil && time.Since(k.At) < Old && len(k.Queues) == 0 && len(k.Kinds) == 0
}

// Along returns the statement to send with a claim, or nil if what is known is fresh.
func (p *Known) Along() *pg.Along {
	if k := p.Latest.Load(); k != nil && time.Since(k.At) < Fresh {
		return nil
	}
	return &pg.Along{Statement: stmt.ReadPauses, Args: nil, Read: p.reader(time.Now(), new(*Set))}
}

// reader returns what reads the rows of a statement that is sent at the time given. What they say is also in
// read then: what is known may have been forgotten by the time that the caller asks.
func (p *Known) reader(at time.Time, read **Set) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var whats, names []string
		err := pg.Each(func(rows pgx.Rows) error {
			var what, name string
			err := rows.Scan(&what, &name)
			whats, names = append(whats, what), append(names, name)
			return err
		})(rows)
		if err == nil {
			*read = p.Take(at, whats, names)
		}
		return err
	}
}

// Take takes the rows that were read by a statement that was sent at the time given.
func (p *Known) Take(at time.Time, whats, names []string) *Set {
	k := &Set{At: at}
	for i, name := range names {
		if whats[i] == "kind" {
			k.Kinds = append(k.Kinds, name)
			continue
		}
		if k.Queues == nil {
			k.Queues = make(map[string]bool)
		}
		k.Queues[name] = true
	}
	p.Latest.Store(k)
	return k
}

// Now returns what is paused, as of so long ago at the earliest. What is paused is looked at more often, so
// that a resumed queue goes on soon.
func (p *Known) Now(ctx context.Context, store *pg.Store, db pg.DB, old time.Duration) (*Set, error) {
	fresh := func() *Set {
		k := p.Latest.Load()
		if k == nil {
			return nil
		}
		if age := time.Since(k.At); age > old || age > Fresh && (len(k.Queues) > 0 || len(k.Kinds) > 0) {
			return nil
		}
		return k
	}
	if k := fresh(); k != nil {
		return k, nil
	}
	select {
	case p.reading <- struct{}{}:
		defer func() { <-p.reading }()
	case <-ctx.Done():
		return nil, fmt.Errorf("onceq: reading what is paused: %w", ctx.Err())
	case <-time.After(pg.BriefWait): // the network may have swallowed what the other one asks
	}
	if k := fresh(); k != nil {
		return k, nil
	}
	var k *Set
	if err := store.Send(ctx, db, pg.Hot, stmt.ReadPauses, nil, p.reader(time.Now(), &k)); err != nil {
		return nil, fmt.Errorf("onceq: reading what is paused: %w", err)
	}
	return k, nil
}

// Open returns those of the kinds that may be claimed for a queue: none if it is paused.
func (p *Set) Open(queue string, kinds []string) []string {
	switch {
	case p.Queues[queue]:
		return nil
	case len(p.Kinds) == 0:
		return kinds
	}
	return slices.DeleteFunc(slices.Clone(kinds), func(kind string) bool { return slices.Contains(p.Kinds, kind) })
}
