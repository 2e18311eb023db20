package pg

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceq/onceq/internal/lazytx"
	"github.com/onceq/onceq/internal/nap"
)

// Conns are the connections that the workers of a process have beside the application's pool. All workers
// over one pool share them, whatever their schemas: at most four, which close when they are not used. One
// more is there for a moment when one of these has had no answer for a while (silent.go).
//
//	session   1  Open while a Run is. It listens, and what a worker does again and again goes through it: looking, claiming,
//	             extending leases, announcing. A statement there is one statement, because its settings belong to the session.
//	spare     1  The same while there is no session: in Drain, behind a pooler, after a lost connection. And for what would have
//	             to wait for the session, and claims that wait for their turn (turn.go).
//	outcomes  2  Outcomes, and effects while the application's pool is busy. And for those that would have to wait for spare. And
//	             jobs that wait to be cancelled, and held ones whose effects were settled.
//
// Nothing that goes through session and spare waits for the lock of a row, so leases are extended in time.
// Outcomes wait for transactions that have locked their jobs, but for no longer than a second (internal/outbox),
// and effects for those that have locked their fences.
type Conns struct {
	of       *pgxpool.Pool // the application's
	spare    *pgxpool.Pool
	Outcomes *pgxpool.Pool
	Session  session
	wires    wires // of spare, outcomes and session
	probe    *pgxpool.Config

	Shares Shares // of the application's pool that handlers' transactions hold

	mu      sync.Mutex // guards what follows
	users   int        // how many runs, and tests that keep the connections
	runs    map[*Hearer]bool
	stop    context.CancelFunc // of listen
	stopped chan struct{}

	stopWatch context.CancelFunc
	watched   chan struct{}      // closed when watch has ended
	Closed    context.Context    // ends when the application has closed its pool, as far as is known
	nowClosed context.CancelFunc // of closed
	askedPool time.Time          // when the pool was last asked whether it is closed. Only watch's goroutine uses this
}

// processConns are the own connections of all pools with workers.
var processConns struct {
	mu  sync.Mutex // guards all
	all map[*pgxpool.Pool]*Conns
}

// Keep makes the own connections of the workers over a pool stay from one run to the next, until release.
// Those that died meanwhile are closed. Tests use it: opening sessions is most of what a short run costs.
func Keep(ctx context.Context, pool *pgxpool.Pool) (release func(), err error) {
	o, err := Connect(ctx, pool)
	if err != nil {
		return nil, err
	}
	for _, p := range []*pgxpool.Pool{o.spare, o.Outcomes} {
		closeDead(ctx, p)
	}
	return func() { o.Disconnect(false) }, nil
}

// closeDead closes the connections of a pool that are dead. It waits for those that somebody has at the
// moment, but not for long: that may be the pool itself, which looks whether they have been idle for long.
func closeDead(ctx context.Context, p *pgxpool.Pool) {
	for range p.Stat().TotalConns() {
		soon, cancel := context.WithTimeout(ctx, BriefWait)
		c, err := p.Acquire(soon)
		cancel()
		if err != nil {
			return
		}
		defer c.Release()
		if c.Ping(ctx) != nil {
			_ = c.Conn().Close(ctx)
		}
	}
}

// Connect returns the own connections for the workers over a pool. It needs one Disconnect for each call.
func Connect(ctx context.Context, of *pgxpool.Pool) (*Conns, error) {
	p := &processConns
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.all[of]; o != nil {
		o.users++
		return o, nil
	}
	o := &Conns{of: of, users: 1, runs: make(map[*Hearer]bool), Shares: Shares{Pool: of}}
	o.Session.turn = make(chan struct{}, 1)
	o.Session.turn <- struct{}{}
	o.Closed, o.nowClosed = context.WithCancel(context.WithoutCancel(ctx))
	cfg := of.Config()
	cfg.MinConns, cfg.MinIdleConns, cfg.MaxConnIdleTime, cfg.HealthCheckPeriod = 0, 0, ownIdle, ownIdle/2
	cfg.ConnConfig.OnNotification = nil // the application's would get ours
	cfg.MaxConns = 1
	wholeMessages(cfg.ConnConfig)
	leaveStandbys(cfg.ConnConfig)
	makeRoom(cfg)
	o.probe = cfg.Copy()
	o.wires.all = make(map[*wire]bool)
	o.wires.of(cfg)
	var err error
	if o.spare, err = pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg); err == nil {
		cfg = cfg.Copy()
		cfg.MaxConns = ownOutcomes
		if o.Outcomes, err = pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg); err != nil {
			o.spare.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("onceq: the worker's own connections: %w", err)
	}
	if p.all == nil {
		p.all = make(map[*pgxpool.Pool]*Conns)
	}
	p.all[of] = o
	var watching context.Context
	watching, o.stopWatch = context.WithCancel(context.WithoutCancel(ctx))
	o.watched = make(chan struct{})
	go func() {
		defer close(o.watched)
		o.watch(watching)
	}()
	return o, nil
}

// watch looks after the connections for as long as there are any.
func (o *Conns) watch(ctx context.Context) {
	defer o.nowClosed()
	for nap.For(ctx, silentAfter/4, nil) {
		if o.poolIsClosed(ctx) {
			o.nowClosed()
		}
		o.findSilent(ctx, silentAfter)
	}
}

// poolIsClosed reports whether the application has closed its pool. Only acquiring a connection shows that,
// and only a pool without connections may be closed. So one that has none is asked for a connection, when it
// has lost the last one and once a minute.
func (o *Conns) poolIsClosed(ctx context.Context) bool {
	if o.of.Stat().TotalConns() > 0 {
		o.askedPool = time.Time{}
		return false
	}
	if time.Since(o.askedPool) < time.Minute {
		return false
	}
	o.askedPool = time.Now()
	ctx, cancel := context.WithTimeout(ctx, AnswerWithin)
	defer cancel()
	conn, err := o.of.Acquire(ctx)
	if err == nil {
		_ = conn.Conn().Close(ctx) // it would stay for as long as the application lets a connection idle
		conn.Release()
	}
	return lazytx.PoolClosed(err)
}

// wholeMessages makes the server begin with a message of ours when it has all of it. In pgx's mode exec,
// which is for poolers, a message has the text of each statement and is long, and the server would begin with
// the first one: if the network died then, it would hold that one's locks until it noticed, which may take
// hours. In the simple protocol, which has text for values too, a message is one whole; with prepared
// statements it is short. cache_describe and describe_exec stay as they are: they read values in binary,
// whatever style of dates the role has.
func wholeMessages(cfg *pgx.ConnConfig) {
	if cfg.DefaultQueryExecMode == pgx.QueryExecModeExec {
		cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		cfg.RuntimeParams["standard_conforming_strings"], cfg.RuntimeParams["client_encoding"] = "on", "UTF8" // pgx needs them for that
	}
}

// leaveStandbys closes a connection to a server that accepts no writes: it is a standby, to which the address
// led for a while, and the next connection may be one to the primary. It would stay open as long as it is
// used. Where the role reads only by default, that is why a statement without a transaction of the library's
// own was refused.
func leaveStandbys(cfg *pgx.ConnConfig) {
	also := cfg.OnPgError
	cfg.OnPgError = func(conn *pgconn.PgConn, err *pgconn.PgError) bool {
		standby := err.Code == "0A000" || err.Code == "25006" && conn.ParameterStatus("default_transaction_read_only") != "on"
		return (also == nil || also(conn, err)) && !standby
	}
}

// makeRoom has a connection take up no room that pgx closes under a statement, because its context has ended.
// pgx asks the server to cancel the statement, over another connection, and then waits for the server to
// close this one. That takes no time, but where the network has swallowed the connection pgx waits for 15 s,
// and beats would have none meanwhile, although new ones can be made.
func makeRoom(cfg *pgxpool.Config) {
	also := cfg.BeforeClose
	cfg.BeforeClose = func(conn *pgx.Conn) {
		if also != nil {
			also(conn)
		}
		if conn.IsClosed() && !nap.Within(conn.PgConn().CleanupDone(), BriefWait) {
			_ = conn.PgConn().Conn().Close() // the server is still asked to cancel the statement
		}
	}
}

// Disconnect closes the connections if no other run uses them. That waits until all of them are given back,
// but not for long if handlers did not return.
func (o *Conns) Disconnect(returned bool) {
	p := &processConns
	p.mu.Lock()
	o.users--
	last := o.users == 0
	if last {
		delete(p.all, o.of)
	}
	p.mu.Unlock()
	if !last {
		return
	}
	closed := make(chan struct{})
	go func() {
		o.spare.Close()
		o.Outcomes.Close()
		o.stopWatch()
		<-o.watched
		close(closed)
	}()
	if returned {
		<-closed
	} else {
		nap.Within(closed, EndWithin)
	}
}

// Join has the session listen for a run, and opens one if this is the first. Leave ends that. Only the run's
// goroutines call them.
func (o *Conns) Join(l *Hearer) {
	o.mu.Lock()
	o.runs[l] = true
	first := len(o.runs) == 1
	if first {
		var ctx context.Context
		ctx, o.stop = context.WithCancel(context.Background())
		before, stopped := o.stopped, make(chan struct{})
		o.stopped = stopped
		go func() {
			defer close(stopped)
			if before != nil {
				<-before
			}
			o.listen(ctx)
		}()
	}
	o.mu.Unlock()
	o.Session.join()
}

// Leave has the session no longer listen for a run.
func (o *Conns) Leave(l *Hearer) {
	o.mu.Lock()
	delete(o.runs, l)
	last := len(o.runs) == 0
	if last {
		o.stop()
	}
	stopped := o.stopped
	o.mu.Unlock()
	l.Confirmed.Store(false)
	if last {
		<-stopped
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), EndWithin)
	defer cancel()
	_, _ = o.Session.Use(ctx, 0, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "unlisten "+l.Channel)
		return err
	})
}

// listenForAll makes the session that is open listen for the runs that have joined since. It waits until the
// session is free.
func (o *Conns) listenForAll(ctx context.Context, prepares bool) error {
	for _, l := range o.members() {
		if l.Confirmed.Load() {
			continue
		}
		used, err := o.Session.Use(ctx, 0, func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "listen "+l.Channel)
			if err == nil {
				l.Deaf.Store(false)
			}
			return err
		})
		if err != nil {
			return err
		}
		if used {
			l.Heard(prepares)
		}
	}
	return nil
}

// members are the runs that listen at present.
func (o *Conns) members() (all []*Hearer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for l := range o.runs {
		all = append(all, l)
	}
	return all
}

// listen keeps a session open. It counts as one only after a notification of its own has come back: poolers
// accept LISTEN and deliver nothing, and settings do not stay with their client.
func (o *Conns) listen(ctx context.Context) {
	unheard := false
	for wait := time.Second; ; wait = min(2*wait, 30*time.Second) {
		began := time.Now()
		err := o.listenOnce(ctx)
		for _, l := range o.members() {
			l.Confirmed.Store(false)
		}
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			wait = time.Second
		}
		before := unheard
		if unheard = errors.Is(err, ErrUnheard); unheard && before { // once it may have been a pause of this process, or of the server
			wait = 10 * time.Minute
		}
		for _, l := range o.members() {
			l.Lost(err, wait)
		}
		if !nap.For(ctx, wait/2+rand.N(wait), nil) {
			return
		}
	}
}

// ErrUnheard says that notifications do not arrive there.
var ErrUnheard = errors.New("a notification did not come back")

// sessionPlans is what Hot (statement.go) sends before each statement, for as long as the session lasts.
const sessionPlans = `
select pg_catalog.set_config('enable_seqscan', 'off', false), pg_catalog.set_config('enable_hashjoin', 'off', false),
       pg_catalog.set_config('enable_mergejoin', 'off', false), pg_catalog.set_config('enable_bitmapscan', 'off', false), pg_catalog.set_config('jit', 'off', false),
       pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', false),
       pg_catalog.set_config('default_transaction_isolation', 'read committed', false), pg_catalog.set_config('default_transaction_read_only', 'off', false),
       pg_catalog.set_config('statement_timeout', '0', false), pg_catalog.set_config('lock_timeout', '0', false), pg_catalog.set_config('idle_session_timeout', '0', false),
       case when pg_catalog.current_setting('transaction_timeout', true) <> '0' then pg_catalog.set_config('transaction_timeout', '0', false) end`

func (o *Conns) listenOnce(ctx context.Context) error {
	opening, cancel := context.WithTimeout(ctx, AnswerWithin) // it has the spare connection meanwhile
	defer cancel()
	var citus bool
	if err := Query(opening, o.spare, askCitus, nil, Row(&citus)); err != nil {
		return err
	}
	if citus { // nobody is notified, and plans must not be generic
		return fmt.Errorf("%w: with Citus there are none", ErrUnheard)
	}
	pooled, err := o.spare.Acquire(opening) // from a pool, so that the application's hooks prepare the new connection
	if err != nil {
		return err
	}
	conn := pooled.Hijack()
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	prepares, err := o.hears(ctx, opening, conn)
	if err != nil {
		return err
	}
	// Now it is known that this is a session, and that nobody gets it afterwards.
	if err := Query(opening, conn, sessionPlans, nil, NoRows); err != nil {
		return err
	}
	o.Session.open(conn)
	defer o.Session.close()
	for {
		n, err := o.Session.wait(ctx)
		if errors.Is(err, errJoined) {
			err = o.listenForAll(ctx, prepares)
		}
		if err != nil {
			return err
		}
		if n == nil {
			continue
		}
		for _, l := range o.members() {
			if l.Channel == n.Channel {
				l.Woken(n.Payload)
			}
		}
	}
}

// hears returns an error if a notification of its own does not come back over the connection. prepares says
// that transactions can be prepared: see Enqueue.
func (o *Conns) hears(ctx, opening context.Context, conn *pgx.Conn) (prepares bool, err error) {
	hello := fmt.Sprintf("onceq_%d", rand.Int64())
	if _, err := conn.Exec(opening, "listen "+hello); err != nil {
		return false, err
	}
	const greet = "select pg_catalog.current_setting('max_prepared_transactions') <> '0' from pg_catalog.pg_notify($1::text, '')"
	if err := Query(opening, o.spare, greet, []any{hello}, Row(&prepares)); err != nil { // through another connection
		return false, err
	}
	confirm, cancel := context.WithTimeout(ctx, silentAfter)
	defer cancel()
	for heard := ""; heard != hello && err == nil; { // a pooler's connection gets those of others, which have listened there before
		var n *pgconn.Notification
		if n, err = conn.WaitForNotification(confirm); err == nil {
			heard = n.Channel
		}
	}
	if err != nil && ctx.Err() == nil && pgconn.Timeout(err) {
		// This is probably a pooler. It should not keep a server session that listens for nobody.
		unlisten, cancel := context.WithTimeout(ctx, silentAfter)
		defer cancel()
		_, _ = o.spare.Exec(unlisten, "unlisten "+hello)
		return false, fmt.Errorf("%w within %s", ErrUnheard, silentAfter)
	}
	if err == nil {
		_, err = conn.Exec(opening, "unlisten "+hello)
	}
	return prepares, err
}

// Hearer is a run for which the session listens.
type Hearer struct {
	Channel   string
	Woken     func(payload string)                // called for each notification. It must not wait
	Heard     func(prepares bool)                 // called when the session listens for the run. prepares is whether the server can prepare transactions
	Lost      func(err error, next time.Duration) // called when it no longer listens; it is tried again so much later
	Confirmed atomic.Bool                         // notifications are known to arrive: the run sets it when it has heard
	Deaf      atomic.Bool                         // the session does not listen for the run, because it is dormant. Who has the session sets it
}

// session is a connection that listens. Everybody may use it between notifications, one after the other.
type session struct {
	turn chan struct{} // holds one while nobody uses conn

	mu      sync.Mutex // guards what follows
	conn    *pgx.Conn  // nil: there is none
	wanted  int        // how many wait for their turn
	waiting bool       // for notifications
	joined  bool       // there may be runs for which it does not listen yet
}

func (s *session) open(conn *pgx.Conn) {
	s.mu.Lock()
	s.conn, s.joined = conn, true
	s.mu.Unlock()
}

// join makes wait return errJoined.
func (s *session) join() {
	s.mu.Lock()
	s.joined = true
	s.interrupt()
	s.mu.Unlock()
}

var errJoined = errors.New("a run has joined")

func (s *session) isOpen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn != nil
}

func (s *session) close() {
	<-s.turn
	s.mu.Lock()
	s.conn = nil
	s.mu.Unlock()
	s.turn <- struct{}{}
}

// Use calls fn with the connection. used is false, and nothing was done, if there is none, or if it was not
// free within patience; 0 is as long as the context lasts. fn's context has the deadline of ctx, but does not
// end with it: that would close the connection under all other runs.
func (s *session) Use(ctx context.Context, patience time.Duration, fn func(context.Context, *pgx.Conn) error) (used bool, err error) {
	s.mu.Lock()
	if s.conn == nil {
		s.mu.Unlock()
		return false, nil
	}
	s.wanted++
	s.interrupt()
	s.mu.Unlock()
	var late <-chan time.Time
	if patience > 0 {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		late = timer.C
	}
	mine := false
	select {
	case <-s.turn:
		mine = true
	case <-late:
	case <-ctx.Done():
		err = ctx.Err()
	}
	s.mu.Lock()
	s.wanted--
	conn := s.conn
	s.mu.Unlock()
	if !mine {
		return err != nil, err
	}
	defer func() { s.turn <- struct{}{} }()
	if conn == nil || conn.IsClosed() {
		return false, nil
	}
	unbroken, cancel := context.WithTimeout(context.WithoutCancel(ctx), SessionLimit)
	defer cancel()
	if until, ok := ctx.Deadline(); ok {
		unbroken, cancel = context.WithDeadline(unbroken, until)
		defer cancel()
	}
	return true, silenced(conn, fn(unbroken, conn))
}

// interrupt ends the wait for notifications. The connection is as good as before, because a time-out of the
// wait loses nothing. The caller holds mu.
func (s *session) interrupt() {
	if s.waiting {
		_ = s.conn.PgConn().Conn().SetReadDeadline(time.Unix(1, 0))
	}
}

// wait waits for a notification. Whoever wants the connection meanwhile gets it.
func (s *session) wait(ctx context.Context) (*pgconn.Notification, error) {
	defer context.AfterFunc(ctx, func() {
		s.mu.Lock()
		s.interrupt()
		s.mu.Unlock()
	})()
	for {
		runtime.Gosched() // to whoever wants it: often because of a notification that came just now
		<-s.turn
		s.mu.Lock()
		if s.joined {
			s.joined = false
			s.mu.Unlock()
			s.turn <- struct{}{}
			return nil, errJoined
		}
		conn := s.conn
		s.waiting = true
		if s.wanted > 0 || ctx.Err() != nil {
			s.interrupt() // only what has come already
		}
		s.mu.Unlock()
		n, err := conn.WaitForNotification(context.Background())
		s.mu.Lock()
		s.waiting = false
		_ = conn.PgConn().Conn().SetReadDeadline(time.Time{})
		s.mu.Unlock()
		lost := err != nil && (!pgconn.Timeout(err) || conn.IsClosed())
		s.turn <- struct{}{}
		switch {
		case n != nil:
			return n, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case lost:
			return nil, err
		}
	}
}

// ForEffects is where effects are recorded: in the application's pool while more than half of it is free,
// because many effects at once would wait for two connections; otherwise in the connections for outcomes,
// which no handler can hold.
type ForEffects struct {
	Pool *pgxpool.Pool
	DB   // otherwise
}

// acquire returns a connection of the pool if one is free, and otherwise nil.
func (e ForEffects) acquire(ctx context.Context) *pgxpool.Conn {
	if s := e.Pool.Stat(); 2*s.AcquiredConns() >= s.MaxConns() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, BriefWait)
	defer cancel()
	conn, err := e.Pool.Acquire(ctx)
	if err != nil {
		return nil
	}
	return conn
}

// Quick is where statements go that do not wait for the lock of a row: through the session if there is one,
// otherwise through the spare connection. Store.Send does that.
type Quick struct {
	Own      *Conns
	Patience time.Duration // for the session
}

func (k Quick) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return k.Own.spare.Exec(ctx, sql, args...)
}

func (k Quick) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return k.Own.spare.Query(ctx, sql, args...)
}

// quickly sends a statement the hot way: through the session, where it needs no settings, or with them. A
// statement that waits for its turn does so beside the session, or gets ErrNoTurn.
func (q *Store) quickly(ctx context.Context, db Quick, by Way, statement string, args []any, read func(pgx.Rows) error) error {
	if by.Turn != nil && by.Turn.Others {
		if !db.Own.HasTurns(true) {
			return ErrNoTurn
		}
		return q.Send(ctx, db.Own.spare, by, statement, args, read)
	}
	used, err := db.Own.Session.Use(ctx, db.Patience, func(ctx context.Context, conn *pgx.Conn) error {
		if by.Clock == nil && by.Along == nil && by.Turn == nil {
			return Query(ctx, conn, q.SQL(statement), args, read)
		}
		batch := &pgx.Batch{} // one transaction, too
		switch {
		case by.Turn != nil:
			by.Turn.queue(batch, by.Clock)
		case by.Clock != nil:
			batch.Queue(`select statement_timestamp()`).QueryRow(func(r pgx.Row) error { return r.Scan(by.Clock) })
		}
		batch.Queue(q.SQL(statement), args...).Query(read)
		if by.Along != nil {
			batch.Queue(q.SQL(by.Along.Statement), by.Along.Args...).Query(by.Along.Read)
		}
		return conn.SendBatch(ctx, batch).Close()
	})
	if used {
		return q.Told(err)
	}
	ctx, cancel := context.WithTimeout(ctx, SessionLimit)
	defer cancel()
	conn, err := db.Own.free(ctx, db.Patience)
	if err != nil {
		return q.Told(err)
	}
	defer conn.Release()
	return silenced(conn.Conn(), q.Send(ctx, conn, by, statement, args, read))
}

// free acquires the spare connection or one of those for outcomes, whichever is free first. It waits for one
// of them for no longer than patience at first before it asks for the other: somebody's lock or the network
// may block those on either.
func (o *Conns) free(ctx context.Context, patience time.Duration) (*pgxpool.Conn, error) {
	this, next := o.spare, o.Outcomes
	if stat := this.Stat(); stat.AcquiredConns()+stat.ConstructingConns() > 0 {
		this, next = next, this
	}
	for n := 0; ; n++ {
		soon, cancel := context.WithTimeout(ctx, patience<<min(n/2, 10)) // the application may have slow hooks
		conn, err := this.Acquire(soon)
		late := soon.Err() != nil
		cancel()
		if err == nil || !late || ctx.Err() != nil {
			return conn, err
		}
		this, next = next, this
	}
}
