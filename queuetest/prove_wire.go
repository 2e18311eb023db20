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

// errDead is the error of every operation of a dead process.
var errDead = errors.New("queuetest: this process is dead (Prove)")

// errCut is the error of a connection that Prove has cut.
var errCut = errors.New("queuetest: the connection is lost (Prove)")

// errMalformed is the error of a connection on which one end sends something that is not a message.
var errMalformed = errors.New("queuetest: not a message of the protocol (Prove)")

// deadDial is errDead for a new connection. It looks like an error of Postgres, so that a worker's last statements give
// up at once instead of retrying until the lease is over.
type deadDial struct{}

func (deadDial) Error() string { return errDead.Error() }
func (deadDial) Unwrap() []error {
	return []error{errDead, &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "OQ999"}}
}

// tap routes every connection of a pool, and of the pools that a worker derives from it, through the process.
func (p *Process) tap(config *pgxpool.Config) {
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if p.isDead() {
			return nil, deadDial{}
		}
		return dial(ctx, network, addr)
	}
	// Above TLS, if there is TLS.
	config.ConnConfig.AfterNetConnect = func(_ context.Context, _ *pgconn.Config, conn net.Conn) (net.Conn, error) {
		w := &wire{Conn: conn, p: p, statements: make(map[string]string), portals: make(map[string]statement)}
		if !p.connected(w) {
			return conn, deadDial{} // pgx closes it
		}
		return w, nil
	}
}

// wire is one connection of a process. It reads the protocol in both directions (PostgreSQL's documentation,
// "Frontend/Backend Protocol"), so that the process can lose the connection between any two statements. The server then
// has everything before that point and nothing after it.
type wire struct {
	net.Conn
	p *Process

	// Owned by the writer: pgx writes from one goroutine at a time.
	in         []byte               // the beginning of an incomplete message
	started    bool                 // the start-up message, which has no type, has been read
	group      []byte               // messages up to the next one that the server answers
	ends       []int                // offsets in group after each statement
	asked      []statement          // the statements in group
	statements map[string]string    // by name
	portals    map[string]statement // by name
	worker     bool                 // a worker's transaction is open

	// reading is held by one Read at a time. pgx closes a connection by reading what is left, and its own reader may still
	// wait for an answer then.
	reading sync.Mutex
	raw     []byte // the beginning of an incomplete answer; reading guards it

	mu        sync.Mutex
	out       []byte // answers for the client
	pending   []step // sent; ReadyForQuery tells what happened to their transaction
	finishing bool   // its transaction contains the completion of a job
	syncs     int    // number of ReadyForQuery messages still to come
	wants     int    // number of completions still to come, when held
	held      bool   // nothing passes any more in either direction; the fault comes after the last answer, without it
	copying   bool   // still passes the data that the last statement waits for
	beyond    bool   // the client has sent something that comes after the fault
	strike    func()
	err       error // set when the connection is gone
}

// statement is a statement to run, with its parameters as sent.
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

// whole returns the size of the message at the start of b, whose type takes up head bytes; 0 if the message is
// incomplete.
func whole(b []byte, head int) (size int, err error) {
	if len(b) < head+4 {
		return 0, nil
	}
	length := binary.BigEndian.Uint32(b[head:]) // includes its own four bytes
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
		return nil // a part of a pipeline that comes after the fault
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
	case 'D', 'C': // Describe and Close are answered with the rest
	default: // passwords, Flush, the data of a copy
		return w.send(false)
	}
	return nil
}

// send sends the group, or as much of it as the fault allows. sync means that ReadyForQuery comes at its end.
func (w *wire) send(sync bool) error {
	group, ends, asked := w.group, w.ends, w.asked
	w.group, w.ends, w.asked = nil, nil, nil
	var steps []step
	if len(asked) > 0 {
		steps, w.worker = name(asked, w.worker)
	}
	gap, fault := w.p.pass(steps)
	if err := w.gone(); err != nil {
		return err // it died while it was waiting here
	}
	if fault == nil || gap == afterAll {
		w.mu.Lock()
		if sync {
			w.syncs++
		}
		w.pending = append(w.pending, steps...)
		if fault != nil {
			w.strike = func() { fault(w) }
		}
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
		w.wants = -1 // unknown until ReadyForQuery
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
	w.reading.Lock()
	defer w.reading.Unlock()
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
				if err := w.gone(); err != nil {
					return 0, err
				}
			}
			w.raw = w.raw[size:]
		}
		if err != nil && n == 0 {
			return 0, w.because(err)
		}
	}
}

// answer handles one message of the server, and returns the fault if it is due.
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
		due = w.held && w.syncs == 0 // the server skips what comes after it
	case 'Z':
		w.syncs = max(0, w.syncs-1)
		due = w.held && w.syncs == 0 && w.wants < 0
		if len(m) > 5 {
			w.p.settled(w, w.pending, m[5])
		}
		w.pending = w.pending[:0]
	}
	if due {
		return w.strike
	}
	if m[0] == 'G' && !w.beyond { // CopyInResponse: most clients send no data before they get it
		w.copying = true
	}
	if !w.held || m[0] == 'G' {
		w.out = append(w.out, m...)
	}
	if m[0] == 'Z' && !w.held && w.syncs == 0 {
		strike := w.strike
		w.strike = nil
		return strike
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

// stopped reports whether a message of the client comes after the fault.
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

// because prefers the known reason.
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

// isPing reports whether a statement does nothing: pools send such statements to test a connection.
func isPing(sql string) bool {
	sql = strings.TrimSpace(sql)
	return sql == "" || sql == ";" || strings.HasPrefix(sql, "-- ping")
}
