package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/onceq/onceq/internal/pgserver"
)

// arena is what the processes work with: a server with a synchronous standby, a proxy for each process in front of it, and
// a PgBouncer.
type arena struct {
	dir     string
	bouncer *bouncer // nil if there is none
	notes   []string // what this machine could not provide

	toxic   *toxiproxy.ApiServer
	proxies []*network

	mu       sync.Mutex // guards the rest; the server's faults change them, one at a time
	primary  *pgserver.Server
	standby  *pgserver.Server
	disk     string // the primary's tablespace of limited size, or "" if there is none
	spare    string // the standby's tablespace
	standbys int
}

// diskSize is the size of the tablespace in bytes, except while it is made full. It is a limit: memory is taken only as it
// is used.
const diskSize = 8 << 30

// maxConnections is enough for all processes, also while the crowd is there.
const maxConnections = 220

func (a *arena) options() pgserver.Options {
	return pgserver.Options{Own: true, Durable: true, Settings: map[string]string{
		"max_connections":                     strconv.Itoa(maxConnections),
		"idle_in_transaction_session_timeout": "10s", // else a client that is gone without a word would keep its locks
		// During a run, the server must notice that its standby is gone, and the standby that the server is gone.
		"wal_sender_timeout": "5s", "wal_receiver_timeout": "5s", "wal_retrieve_retry_interval": "200ms",
	}}
}

func startArena(ctx context.Context, dir string) (*arena, error) {
	a := &arena{dir: dir, toxic: toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())}
	var err error
	if a.primary, err = pgserver.Start(ctx, a.options()); err != nil {
		return nil, err
	}
	if a.disk, err = a.mount(ctx); err != nil {
		a.notes = append(a.notes, "no full disks: "+err.Error())
	}
	return a, nil
}

// mount makes a file system of limited size for a tablespace.
func (a *arena) mount(ctx context.Context) (string, error) {
	a.standbys++
	dir := filepath.Join(a.dir, fmt.Sprint("disk", a.standbys))
	if err := os.Mkdir(dir, 0o777); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, "mount", "-t", "tmpfs", "-o", fmt.Sprint("mode=777,size=", diskSize), "tmpfs", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("mount: %w: %s", err, strings.TrimSpace(string(out)))
	}
	space := filepath.Join(dir, "space") // must be empty; the filler is beside it
	if err := os.Mkdir(space, 0o777); err != nil {
		return "", err
	}
	return space, os.Chmod(space, 0o777)
}

const harnessTables = `
create schema torture;
create table torture.trail (
  seq bigint generated always as identity, at timestamptz default clock_timestamp(),
  what text, job bigint, key text, work text, token bigint not null default 0, op text not null default ''
);
create table torture.ledger (seq bigint generated always as identity, work text, form text, job bigint, token bigint, nonce text);
create table torture.ops (op text primary key);
create table torture.fence_trail (
  seq bigint generated always as identity, at timestamptz default clock_timestamp(),
  what text, key text, token bigint, since bigint, finished bigint, result text
);
create table torture.lane_trail (
  seq bigint generated always as identity, at timestamptz default clock_timestamp(), began timestamptz default statement_timestamp(),
  xact bigint default pg_current_xact_id()::text::bigint, seen text not null default '',
  what text, lane text, rule smallint not null default 0, job bigint not null default 0, due timestamptz not null default '-infinity', n int not null default 0
);`

// furnish makes the tables of the harness and those of the system, and puts all of them on the small disk.
func (a *arena) furnish(ctx context.Context, sys system) error {
	conn, err := pgx.Connect(ctx, a.primary.URL())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, harnessTables); err != nil {
		return err
	}
	if err := sys.setup(ctx, conn); err != nil {
		return err
	}
	if a.disk == "" {
		return nil
	}
	if err := a.handOver(ctx, conn); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, `create tablespace small location '`+a.disk+`'`); err != nil {
		return err
	}
	rows, err := conn.Query(ctx, `
select format('alter %s %s set tablespace small', case c.relkind when 'i' then 'index' else 'table' end, c.oid::regclass)
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'i') and n.nspname in ('onceq', 'public', 'torture')`)
	if err != nil {
		return err
	}
	moves, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, strings.Join(moves, ";")+"; checkpoint")
	return err
}

// handOver makes the user that runs the server the owner of the disk.
func (a *arena) handOver(ctx context.Context, conn *pgx.Conn) error {
	var data string
	if err := conn.QueryRow(ctx, `show data_directory`).Scan(&data); err != nil {
		return err
	}
	info, err := os.Stat(data)
	if err != nil {
		return err
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 {
		return os.Chown(a.disk, int(owner.Uid), int(owner.Gid))
	}
	return nil
}

// follow starts a standby and makes the server wait for it at each commit.
func (a *arena) follow(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var spaces map[string]string
	if a.disk != "" {
		var err error
		if a.spare, err = a.mount(ctx); err != nil {
			return err
		}
		spaces = map[string]string{a.disk: a.spare}
	}
	var err error
	if a.standby, err = a.primary.Standby(ctx, "standby", spaces, a.options()); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, a.primary.URL())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, `alter system set synchronous_standby_names = '*'`); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, `select pg_reload_conf()`); err != nil {
		return err
	}
	for pause(ctx, 50*time.Millisecond) {
		if ok, err := inSync(ctx, conn); ok || err != nil {
			return err
		}
	}
	return ctx.Err()
}

// inSync reports whether commits wait for the standby, and the standby has all that was committed before they did.
func inSync(ctx context.Context, conn *pgx.Conn) (ok bool, err error) {
	err = conn.QueryRow(ctx, `
select exists (select from pg_stat_replication
                where state = 'streaming' and sync_state = 'sync' and flush_lsn >= pg_current_wal_flush_lsn())
       and current_setting('synchronous_standby_names') = '*'`).Scan(&ok)
	return ok, err
}

// failover ends the server as a failing machine does, and promotes the standby. A new standby follows that.
func (a *arena) failover(ctx context.Context) error {
	a.mu.Lock()
	alone := a.standby == nil
	a.mu.Unlock()
	if alone {
		return errNotHere
	}
	conn, err := pgx.Connect(ctx, a.primary.URL())
	if err != nil {
		return err
	}
	ok := false
	for range 100 {
		if ok, err = inSync(ctx, conn); ok || err != nil || !pause(ctx, 50*time.Millisecond) {
			break
		}
	}
	_ = conn.Close(ctx)
	if err != nil {
		return err
	}
	if !ok {
		return errors.New("the standby is behind")
	}
	a.mu.Lock()
	old, gone := a.primary, a.disk
	err = old.Stop()
	a.primary, a.standby, a.disk, a.spare = a.standby, nil, a.spare, ""
	a.mu.Unlock()
	if err == nil && gone != "" {
		err = exec.CommandContext(ctx, "umount", "-l", filepath.Dir(gone)).Run()
	}
	if err != nil {
		return err
	}
	if conn, err = pgx.Connect(ctx, a.primary.URL()); err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for _, sql := range []string{
		`select pg_promote(true, 60)`, `alter system reset synchronous_standby_names`, `select pg_reload_conf()`,
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	for _, p := range a.proxies {
		p.Lock()
		to := &toxiproxy.Proxy{Listen: p.Listen, Upstream: a.address(), Enabled: p.Enabled} // a proxy that was cut stays cut
		p.Unlock()
		if p.Update(to) != nil {
			err = errors.Join(err, open(ctx, p))
		}
	}
	return errors.Join(err, a.follow(ctx))
}

// open starts a proxy that was stopped. Its port may be that of somebody's connection meanwhile, for a while.
func open(ctx context.Context, p *network) error {
	err := p.Start()
	for range 600 {
		if err == nil || errors.Is(err, toxiproxy.ErrProxyAlreadyStarted) || !pause(ctx, 100*time.Millisecond) {
			break
		}
		err = p.Start()
	}
	return err
}

// address is the primary's host and port.
func (a *arena) address() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	u, err := url.Parse(a.primary.URL())
	if err != nil {
		panic(err) // cannot fail: pgserver made it
	}
	return u.Host
}

// server returns the primary.
func (a *arena) server() *pgserver.Server {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.primary
}

// proxy makes a way to the database and returns the database's URL through it.
func (a *arena) proxy(name string) (*network, string, error) {
	p := toxiproxy.NewProxy(a.toxic, name, "127.0.0.1:0", a.address())
	if err := p.Start(); err != nil {
		return nil, "", err
	}
	n, err := before(p)
	if err != nil {
		return nil, "", err
	}
	a.proxies = append(a.proxies, n)
	return n, a.urlAt(n.front.Addr().String()), nil
}

// urlAt returns the database's URL at another address.
func (a *arena) urlAt(address string) string {
	u, err := url.Parse(a.server().URL())
	if err != nil {
		panic(err) // cannot fail: pgserver made it
	}
	u.Host = address
	return u.String()
}

func (a *arena) stop() {
	if a.bouncer != nil {
		a.bouncer.stop()
	}
	for _, p := range a.proxies {
		p.Stop()
		_ = p.front.Close()
	}
	for _, s := range []*pgserver.Server{a.standby, a.primary} {
		if s != nil {
			_ = s.Stop()
		}
	}
	disks, _ := filepath.Glob(filepath.Join(a.dir, "disk*"))
	for _, dir := range disks {
		_ = exec.Command("umount", "-l", dir).Run()
	}
}

// bouncer is a PgBouncer in transaction mode.
type bouncer struct {
	bin, ini string
	url      string
	cmd      *exec.Cmd
	stdin    io.Closer
}

func pgbouncer() (string, error) {
	if bin := os.Getenv("ONCEQ_TEST_PGBOUNCER"); bin != "" { // scripts/pgbouncer.sh
		return bin, nil
	}
	if bin, err := exec.LookPath("pgbouncer"); err == nil {
		return bin, nil
	}
	return exec.LookPath("/usr/sbin/pgbouncer")
}

// startBouncer starts a PgBouncer in front of an address.
func (a *arena) startBouncer(before string) error {
	bin, err := pgbouncer()
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	dir := filepath.Join(a.dir, "pgbouncer")
	b := &bouncer{bin: bin, url: a.urlAt(l.Addr().String()), ini: filepath.Join(dir, "pgbouncer.ini")}
	listen := l.Addr().(*net.TCPAddr).Port
	_ = l.Close()
	to, err := pgx.ParseConfig(b.url)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	host, port, err := net.SplitHostPort(before)
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.ini, []byte(fmt.Sprintf(`
[databases]
* = host=%s port=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = scram-sha-256
auth_file = %s
pool_mode = transaction
default_pool_size = 14
max_client_conn = 100
server_login_retry = 1
ignore_startup_parameters = search_path,extra_float_digits
`, host, port, listen, filepath.Join(dir, "users"))), 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "users"), fmt.Appendf(nil, "%q %q\n", to.User, to.Password), 0o600); err != nil {
		return err
	}
	if err := pgserver.ToNobody(dir); err != nil { // the user it runs as
		return err
	}
	a.bouncer = b
	return b.start()
}

// guard ends PgBouncer when its standard input ends, which happens even if this process is killed.
const guard = `trap '' INT TERM; "$@" & cat >/dev/null; kill -9 $!`

func (b *bouncer) start() (err error) {
	args := []string{"-c", guard, "sh", b.bin, "-q"}
	if os.Geteuid() == 0 {
		args = append(args, "-u", "nobody")
	}
	b.cmd = exec.Command("sh", append(args, b.ini)...)
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if b.stdin, err = b.cmd.StdinPipe(); err != nil {
		return err
	}
	return b.cmd.Start()
}

func (b *bouncer) stop() {
	_ = b.stdin.Close()
	_ = b.cmd.Wait()
}
