// Package onceqhttp makes HTTP requests happen once: a client sends an Idempotency-Key, the first request under it runs,
// and every further one gets the stored answer, byte for byte.
//
//	m, err := onceqhttp.New(q, onceqhttp.Config{Principal: tenantOf})
//
//	mux.Handle("POST /orders", m.HandlerTx(pool, createOrder)) // effects in the database
//	mux.Handle("POST /charges", m.Handler(charge))             // effects outside of it
//
// The key is that of draft-ietf-httpapi-idempotency-key-header-07, or an unquoted one as most clients send it. It is
// bound to the principal that the application names, to the method and to the route, so that nobody gets an answer that
// was somebody else's, and to a fingerprint of the request, so that a key that is used for something else is refused.
// Refusals are problems of RFC 9457 with stable codes, see Problem.
//
// # Two forms
//
// HandlerTx gives the handler a transaction. What it writes there, the jobs it enqueues there and its answer commit
// together: a crash at any moment leaves nothing, and the key free, or everything, and the answer to be replayed.
// Use it wherever the effects are in the database; what belongs outside goes into a job.
//
// Handler is for effects outside of the database. Its key is claimed before the handler runs and its answer stored when
// it has returned. Where that did not happen (a crash, a panic, a server error) it is unknown what was done, and
// Config.Policy decides, as for onceq.Once: run again under the same downstream key, ask, or hold.
//
// In both, the work does not end when the client leaves, but by Config.Timeout.
//
// # The chain
//
// A handler finds the Request in its context. Jobs that take Request.Scope and Request.Key as theirs are enqueued once
// for the client's key; their effects run in onceq.Once; and Transport, as the client of a provider, sends the effect's
// key on. docs/http.md has it as a whole, and a table of how this compares with the draft and with Stripe's API.
package onceqhttp
