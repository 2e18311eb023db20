// Package onceqhttp makes HTTP requests happen once. A client sends an Idempotency-Key. The first request with that key
// runs, and every further one gets the stored answer, byte for byte.
//
//	m, err := onceqhttp.New(q, onceqhttp.Config{Principal: tenantOf})
//
//	mux.Handle("POST /orders", m.HandlerTx(pool, createOrder)) // effects in the database
//	mux.Handle("POST /charges", m.Handler(charge))             // effects outside of it
//
// The key is that of draft-ietf-httpapi-idempotency-key-header-07, or an unquoted one as most clients send it. It is
// bound to the principal that the application names, to the method and to the route, so nobody gets an answer that
// belongs to somebody else. It is also bound to a fingerprint of the request, so a key that is used for another request
// is refused. Refusals are problems of RFC 9457 with stable codes: see Problem.
//
// # Two forms
//
// HandlerTx gives the handler a transaction. What the handler writes there, the jobs it enqueues there and its answer
// commit together. After a crash at any moment either nothing remains and the key is free, or everything remains and
// the answer is replayed. Use HandlerTx wherever the effects are in the database, and put effects outside the database
// into a job.
//
// Handler is for effects outside the database. It claims the key before the handler runs, and stores the answer after
// the handler has returned. If that does not happen (a crash, a panic, a server error), nobody knows what was done, and
// Config.Policy decides, as for onceq.Once: run again under the same downstream key, ask, or hold.
//
// In both forms the work goes on when the client leaves. Only Config.Timeout ends it.
//
// # The chain
//
// A handler finds the Request in its context. A job that takes Request.Scope and Request.Key as its own is enqueued
// once for the client's key. The job's effects run in onceq.Once, and Transport, the client of a provider, sends the
// effect's key on. docs/use/http.md shows the whole chain. COMPLIANCE.md compares it with the draft and with Stripe's API.
package onceqhttp
