package queuetest

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
)

// errDead is what everything of a dead process gives.
var errDead = errors.New("queuetest: this process is dead (Prove)")

// errCut is what a connection gives that Prove has cut.
var errCut = errors.New("queuetest: the connection is lost (Prove)")

// errMalformed is what a connection gives where one side says what is no message.
var errMalformed = errors.New("queuetest: no message of the protocol (Prove)")

// deadDial is errDead of a new connection. As an error of Postgres it makes a worker's last statements give up at once
// in place of trying until the lease is over.
type deadDial struct{}

func (deadDial) Error() string   { return errDead.Error() }
func (deadDial) Unwrap() []error { return []error{errDead, &pgconn.PgError{Code: "OQ999"}} }

// tap makes every connection of a pool, and of the pools that a worker derives from it, go through the process.
func (p *Process) tap(config *pgxpool.Config) {
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if p.isDead() {
			return nil, deadDial{}
		}
		return dial(ctx, network, addr)
	}
	// Behind TLS, where there is one.
	config.ConnConfig.AfterNetConnect = func(_ context.Context, _ *pgconn.Config, conn net.Conn) (net.Conn, error) {
		w := &wire{Conn: conn, p: p, statements: make(map[string]string), portals: make(map[string]statement)}
		if !p.connected(w) {
			return conn, deadDial{} // pgx closes it
		}
		return w, nil
	}
}

// wire is one connection of a process. It reads the protocol along in both directions (PostgreSQL's documentation,
// "Frontend/Backend Protocol"), so that the process can lose it between any two statements: the server then has what
// stands before that place and nothing of what stands behind it.
type wire struct {
	net.Conn
	p *Process

	// Owned by whoever writes: pgx writes from one goroutine at a time.
	in         []byte               // what is no whole message yet
	started    bool                 // the start-up message, which has no type, is through
	group      []byte               // messages up to the next that the server answers
	ends       []int                // in group, behind each statement
	asked      []statement          // and the statements
	statements map[string]string    // by name
	portals    map[string]statement // by name
	worker     bool                 // a worker's transaction is open

	raw []byte // owned by whoever reads: what is no whole answer yet

	mu      sync.Mutex
	out     []byte // answers for the client
	pending []step // sent; ReadyForQuery says what has become of their transaction
	syncs   int    // ReadyForQuery messages that are still to come
	wants   int    // completions that are still to come, when held
	held    bool   // nothing gets through any more, either way; when the last answer is there the fault comes
	copying bool   // but for the data that the last statement waits for
	beyond  bool   // the client has sent what stands behind the fault
	strike  func()
	err     error // set: the connection is gone
}

// statement is one to be run, with its parameters as sent.
type statement struct {
	sql    string
	params [][]byte
}

func (w *wire) Write(b []byte) (int, error) {
	if err := w.gone(); err != nil {
		return 0, err
	}
	w.in = append(w.in, b...)
	for {
		head := 1
		if !w.started {
			head = 0
		}
		size, err := whole(w.in, head)
		if err != nil {
			return 0, err
		}
		if size == 0 {
			break
		}
		if err := w.message(w.in[:size]); err != nil {
			return 0, err
		}
		w.in = w.in[size:]
		w.started = true
	}
	return len(b), nil
}

// whole gives the size of the message that b begins with, whose type takes up head bytes; 0 where some of it is missing.
func whole(b []byte, head int) (size int, err error) {
	if len(b) < head+4 {
		return 0, nil
	}
	length := binary.BigEndian.Uint32(b[head:]) // with its own four bytes
	if length < 4 || length > math.MaxInt32 {
		return 0, errMalformed
	}
	if size = head + int(length); len(b) < size {
		return 0, nil
	}
	return size, nil
}

func (w *wire) message(m []byte) error {
	if w.stopped(m[0]) {
		return nil // what a pipeline has behind the fault
	}
	w.group = append(w.group, m...)
	if !w.started {
		return w.send(false)
	}
	body := m[5:]
	switch m[0] {
	case 'P':
		var parse pgproto3.Parse
		if err := parse.Decode(body); err != nil {
			return errMalformed
		}
		w.statements[parse.Name] = parse.Query
	case 'B':
		var bind pgproto3.Bind
		if err := bind.Decode(body); err != nil {
			return errMalformed
		}
		s := statement{sql: w.statements[bind.PreparedStatement]}
		for _, value := range bind.Parameters {
			s.params = append(s.params, append([]byte(nil), value...))
		}
		w.portals[bind.DestinationPortal] = s
	case 'E':
		var execute pgproto3.Execute
		if err := execute.Decode(body); err != nil {
			return errMalformed
		}
		w.asked = append(w.asked, w.portals[execute.Portal])
		w.ends = append(w.ends, len(w.group))
	case 'Q':
		var query pgproto3.Query
		if err := query.Decode(body); err != nil {
			return errMalformed
		}
		w.asked = append(w.asked, statement{sql: query.String})
		w.ends = append(w.ends, len(w.group))
		return w.send(true)
	case 'S':
		return w.send(true)
	case 'D', 'C': // Describe and Close: answered with the rest
	default: // passwords, Flush, the data of a copy
		return w.send(false)
	}
	return nil
}

// send sends the group on, or as much of it as the fault leaves. sync says that ReadyForQuery comes at its end.
func (w *wire) send(sync bool) error {
	group, ends, asked := w.group, w.ends, w.asked
	w.group, w.ends, w.asked = nil, nil, nil
	var steps []step
	if len(asked) > 0 {
		steps, w.worker = name(asked, w.worker)
	}
	gap, fault := w.p.pass(steps)
	if err := w.gone(); err != nil {
		return err // it died while it stood here
	}
	if fault == nil {
		w.mu.Lock()
		if sync {
			w.syncs++
		}
		w.pending = append(w.pending, steps...)
		w.mu.Unlock()
		_, err := w.Conn.Write(group)
		return w.because(err)
	}
	strike := func() { fault(w) }
	if gap == 0 {
		strike()
		return w.gone()
	}
	w.mu.Lock()
	w.held, w.copying, w.strike = true, false, strike
	if last := gap == len(ends); last && sync {
		w.syncs++
		w.wants = -1 // ReadyForQuery says when
	} else {
		group = append(group[:ends[gap-1]:ends[gap-1]], 'H', 0, 0, 0, 4) // Flush
		w.wants = gap
	}
	w.pending = append(w.pending, steps[:gap]...)
	w.mu.Unlock()
	_, err := w.Conn.Write(group)
	return w.because(err)
}

func (w *wire) Read(b []byte) (int, error) {
	var buf [8 << 10]byte
	for {
		w.mu.Lock()
		n := copy(b, w.out)
		w.out = w.out[n:]
		w.mu.Unlock()
		if n > 0 {
			return n, nil
		}
		if err := w.gone(); err != nil {
			return 0, err
		}
		n, err := w.Conn.Read(buf[:])
		w.raw = append(w.raw, buf[:n]...)
		for {
			size, err := whole(w.raw, 1)
			if err != nil {
				return 0, err
			}
			if size == 0 {
				break
			}
			if strike := w.answer(w.raw[:size]); strike != nil {
				strike()
				return 0, w.gone()
			}
			w.raw = w.raw[size:]
		}
		if err != nil && n == 0 {
			return 0, w.because(err)
		}
	}
}

// answer takes one message of the server, and gives the fault where it is due.
func (w *wire) answer(m []byte) func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	due := false
	switch m[0] {
	case 'C', 'I', 's': // a statement is complete
		if w.held && w.syncs == 0 {
			w.wants--
			due = w.wants == 0
		}
	case 'E':
		due = w.held && w.syncs == 0 // what stands behind it is skipped
	case 'Z':
		w.syncs = max(0, w.syncs-1)
		due = w.held && w.syncs == 0 && w.wants < 0
		if len(m) > 5 {
			w.p.settled(w.pending, m[5])
		}
		w.pending = w.pending[:0]
	}
	if due {
		return w.strike
	}
	if m[0] == 'G' && !w.beyond { // CopyInResponse: without it most clients send nothing
		w.copying = true
	}
	if !w.held || m[0] == 'G' {
		w.out = append(w.out, m...)
	}
	return nil
}

// cut ends the connection with err.
func (w *wire) cut(err error) {
	w.mu.Lock()
	if w.err == nil {
		w.err = err
	}
	w.out = nil
	w.mu.Unlock()
	_ = w.Conn.Close()
}

// stopped says that a message of the client stands behind the fault.
func (w *wire) stopped(kind byte) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.held {
		return false
	}
	data, end := kind == 'd', kind == 'c' || kind == 'f'
	if (data || end) && !w.beyond && w.wants < 0 {
		w.copying = true // pgx sends the data without waiting for CopyInResponse
	}
	stopped := !w.copying
	if end {
		w.copying = false
	}
	w.beyond = !w.copying
	return stopped
}

func (w *wire) gone() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// because prefers the reason that is known.
func (w *wire) because(err error) error {
	if gone := w.gone(); err != nil && gone != nil {
		return gone
	}
	return err
}

func (w *wire) Close() error {
	w.p.disconnected(w)
	return w.Conn.Close()
}

// isPing says that a statement does nothing: pools send them to see whether a connection lives.
func isPing(sql string) bool {
	sql = strings.TrimSpace(sql)
	return sql == "" || sql == ";" || strings.HasPrefix(sql, "-- ping")
}
