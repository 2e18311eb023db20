package pg

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/nap"
)

// A network may lose a connection without a word, as a NAT, a firewall or a fail-over does: what is sent
// vanishes, and no error comes. From here that looks like a statement that takes long. So when one of the
// own connections has had no answer for silentAfter, a new connection asks the server what it does for it.
// If it works, or waits for a lock, that is left alone, however long it takes. If it waits for this
// process, or has no such session, one of them will never hear from the other. Then the connection is
// closed, so that its statement fails, and so is every other one that nobody uses, because the network may
// have lost all of them.
//
// The connections of handlers' transactions are the application's. They are looked at in the same way while
// a handler waits for an answer over one, or the commit does, and after twice as long: handlers' statements
// may be slow. One whose handler sends rows (CopyFrom) is left alone, because the server waits for these.
//
// Where the new connection fails too, nothing is known, and the limit of each statement counts. So it does
// behind a pooler, whose clients do not know their server's session.

var ErrSilent = errors.New("there was no answer over a connection although the server waits for this process, or knows nothing of the connection any more:" +
	" the network between them has lost it without a word. It was closed, and so were the others that were not in use")

// wire is the network's side of an own connection.
type wire struct {
	net.Conn
	of *wires

	pid    atomic.Int32 // of the server's session; 0 until that is known
	asked  atomic.Int64 // when something was last sent, in nanoseconds; 0 when something has come since
	probed atomic.Int64 // when the server was last asked about it
	silent atomic.Bool  // it was closed for that
}

func (w *wire) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if n > 0 {
		w.asked.Store(0)
	}
	if err != nil && w.silent.Load() {
		err = ErrSilent
	}
	return n, err
}

// Write writes in pieces, so that a long message that makes progress does not look like a silent
// connection.
func (w *wire) Write(b []byte) (sum int, err error) {
	const piece = 1 << 18
	for err == nil && sum < len(b) {
		w.asked.Store(time.Now().UnixNano())
		var n int
		n, err = w.Conn.Write(b[sum:min(len(b), sum+piece)])
		sum += n
	}
	return sum, err
}

func (w *wire) Close() error {
	w.of.mu.Lock()
	delete(w.of.all, w)
	w.of.mu.Unlock()
	return w.Conn.Close()
}

// due reports whether the server is to be asked about a connection: for the first time after a while, and
// then each time when it has waited for twice as long.
func (w *wire) due(now time.Time, after time.Duration) bool {
	asked := w.asked.Load()
	if asked == 0 {
		return false
	}
	wait := int64(after)
	if probed := w.probed.Load(); probed > asked {
		wait = 2 * (probed - asked)
	}
	return now.UnixNano()-asked >= wait
}

// wires are the own connections of a pool, as the network has them.
type wires struct {
	mu  sync.Mutex // guards all
	all map[*wire]bool
}

// of makes the connections of a pool known.
func (s *wires) of(cfg *pgxpool.Config) {
	dial, also := cfg.ConnConfig.DialFunc, cfg.AfterConnect
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		w := &wire{Conn: conn, of: s}
		s.mu.Lock()
		s.all[w] = true
		s.mu.Unlock()
		return w, nil
	}
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if w := wireOf(conn); w != nil {
			w.pid.Store(pidOf(conn))
		}
		if also != nil {
			return also(ctx, conn)
		}
		return nil
	}
}

// wireOf is the network's side of an own connection, nil of others.
func wireOf(conn *pgx.Conn) *wire {
	under := conn.PgConn().Conn()
	if t, ok := under.(*tls.Conn); ok {
		under = t.NetConn()
	}
	w, _ := under.(*wire)
	return w
}

// silenced is the error of a statement over conn. In the simple protocol pgx loses the connection's own
// error, and says "conn closed".
func silenced(conn *pgx.Conn, err error) error {
	if err == nil || errors.Is(err, ErrSilent) {
		return err
	}
	if w := wireOf(conn); w != nil && w.silent.Load() {
		return ErrSilent
	}
	return err
}

// pidOf is the number of the server's process for a connection, as Postgres shows it.
func pidOf(conn *pgx.Conn) int32 { return int32(conn.PgConn().PID()) } // #nosec G115 -- a pooler's numbers may be any bits

// waiting returns when something was sent over each connection that has had no answer since, and whether
// the server is to be asked about one of them.
func (s *wires) waiting(after time.Duration) (all map[*wire]int64, due bool) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.all {
		if asked := w.asked.Load(); asked != 0 {
			if all == nil {
				all = make(map[*wire]int64)
			}
			all[w] = asked
			due = due || w.due(now, after)
		}
	}
	return all, due
}

// heldTx is a handler's transaction, which has a connection of the application's pool.
type heldTx struct {
	tx     *lazytx.Tx
	log    *slog.Logger
	kind   string // of one of its jobs
	job    int64
	probed int64 // when the server was last asked about it, in nanoseconds. Only watch's goroutine uses this
}

// waiting is wires.waiting for the transactions of handlers.
func (c *Shares) waiting(after time.Duration) (all map[*heldTx]int64, due bool) {
	now := time.Now().UnixNano()
	c.Lock()
	defer c.Unlock()
	for tx, h := range c.all {
		since, _ := tx.InUse()
		if since == 0 || now-since < int64(after) {
			continue
		}
		if all == nil {
			all = make(map[*heldTx]int64)
		}
		all[h] = since
		due = due || h.probed < since || now-since >= 2*(h.probed-since)
	}
	return all, due
}

// cut closes the connections of those transactions that still wait and for which the server does not work.
func (c *Shares) cut(waiting map[*heldTx]int64, busy map[int32]bool) (found bool) {
	for h, asked := range waiting {
		if since, _ := h.tx.InUse(); busy[h.pid()] || since != asked {
			continue
		}
		h.tx.Cut()
		h.log.Warn("onceq: a handler's transaction is rolled back, because its connection is lost",
			slog.String("kind", h.kind), slog.Int64("job", h.job), slog.Any("reason", ErrSilent))
		found = true
	}
	return found
}

// findSilent looks once for connections that have had no answer, and reports whether it has closed one.
func (o *Conns) findSilent(ctx context.Context, after time.Duration) (found bool) {
	all, due := o.wires.waiting(after)
	txs, dueTx := o.Shares.waiting(2 * after)
	if !due && !dueTx {
		return false
	}
	now := time.Now().UnixNano()
	var pids, ofTxs []int32
	for w := range all {
		w.probed.Store(now)
		pids = append(pids, w.pid.Load())
	}
	for h := range txs {
		h.probed = now
		ofTxs = append(ofTxs, h.pid())
	}
	busy, err := o.busy(ctx, pids, ofTxs)
	if err != nil || !nap.For(ctx, silentAfter/4, nil) { // an answer may be on its way
		return false
	}
	for w, asked := range all {
		if !busy[w.pid.Load()] && w.asked.Load() == asked {
			w.silent.Store(true)
			_ = w.Close()
			found = true
		}
	}
	if o.Shares.cut(txs, busy) {
		found = true
	}
	if found {
		o.spare.Reset()
		o.Outcomes.Reset()
		o.of.Reset() // handlers' transactions would wait for the application's connections
		ctx, cancel := context.WithTimeout(ctx, BriefWait)
		defer cancel()
		_, _ = o.Session.Use(ctx, 0, func(ctx context.Context, conn *pgx.Conn) error { return conn.Ping(ctx) }) // pgx closes one that does not answer
	}
	return found
}

// pid is the number of the server's process for a handler's transaction.
func (h *heldTx) pid() int32 {
	_, pid := h.tx.InUse()
	return int32(pid) // #nosec G115 -- a pooler's numbers may be any bits
}

// whoWorks says which of the sessions $1 do not wait for their client, which of the sessions $2 do not or get
// rows from it, and in which session it runs.
const whoWorks = `
select pg_backend_pid(), array(
       select pid from pg_catalog.pg_stat_activity
        where (pid = any ($1::int[]) or pid = any ($2::int[])) and wait_event_type is distinct from 'Client'
           or pid = any ($2::int[]) and wait_event = 'ClientRead' and state = 'active')`

// busy asks the server, over a new connection, for which of the connections it works.
func (o *Conns) busy(ctx context.Context, pids, ofTxs []int32) (busy map[int32]bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, AnswerWithin)
	defer cancel()
	once, err := pgxpool.NewWithConfig(ctx, o.probe.Copy()) // a pool, so that the application's hooks prepare the connection
	if err != nil {
		return nil, err
	}
	defer once.Close()
	conn, err := once.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Release()
	var works []int32
	var pid int32
	if err := Query(ctx, conn, whoWorks, []any{pids, ofTxs}, Row(&pid, &works)); err != nil {
		return nil, err
	}
	if pid != pidOf(conn.Conn()) {
		return nil, errPooled
	}
	busy = make(map[int32]bool)
	for _, pid := range works {
		busy[pid] = true
	}
	return busy, nil
}

var errPooled = errors.New("the server's session is another one than the connection says: there is a pooler between")
