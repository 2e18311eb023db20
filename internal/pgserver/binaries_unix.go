//go:build unix

package pgserver

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	random "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const binariesStart = true

// supervise is the program that cleans up after this process. Its standard input is a pipe. This process holds the
// other end open, and so does its child for the moment before it becomes the server. Each line says which process is
// the server; an empty one says that there is none. When the pipe ends, for whatever reason, the program stops the
// server and removes the directories $@.
const supervise = `
trap '' HUP INT TERM
pid=
while read -r line; do pid=$line; done
if [ -n "$pid" ]; then
	kill -QUIT "$pid" 2>/dev/null
	n=0
	while kill -0 "$pid" 2>/dev/null && [ "$n" -lt 200 ]; do sleep 0.05; n=$((n + 1)); done
fi
cd / && rm -rf "$@"
`

// becomeServer writes its own process id to descriptor 3 and turns into the server. So the supervisor knows the server
// before it exists, and killing this process at any moment leaves no server behind.
const becomeServer = `echo $$ >&3 && exec "$@" 3>&-`

// binaries is a server started from binaries of this machine.
type binaries struct {
	bin      string
	dir      string // log, write-ahead log and, unless it is in memory, data
	data     string
	port     int
	password string // of the server's superuser
	settings []string
	user     *syscall.Credential // nil: the user of this process

	lifeline *os.File      // this process's end of the supervisor's pipe
	cleaned  chan struct{} // closed when the supervisor has ended

	mu      sync.Mutex // held while the server is being stopped or started; guards the fields below
	server  *exec.Cmd  // nil: stopped for good
	exited  chan struct{}
	stopErr error
}

func startBinaries(ctx context.Context, bin string, opts Options) (*Server, error) {
	return startFilled(ctx, bin, rand.Text(), opts, (*binaries).initdb)
}

// startFilled starts a server on the data that fill creates.
func startFilled(ctx context.Context, bin, password string, opts Options, fill func(*binaries, context.Context) error) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()

	b := &binaries{bin: bin, password: password, settings: opts.settings(), cleaned: make(chan struct{})}
	if err := b.prepare(opts.Durable); err != nil {
		return nil, errors.Join(err, b.remove())
	}
	if err := b.supervise(); err != nil {
		return nil, errors.Join(err, b.remove())
	}
	if err := fill(b, ctx); err != nil {
		return nil, errors.Join(err, b.stop())
	}
	if err := b.startSomewhere(ctx); err != nil {
		return nil, errors.Join(err, b.stop())
	}
	s, err := newServer(ctx, b.url(), b)
	if err != nil {
		return nil, errors.Join(err, b.stop())
	}
	return s, nil
}

// prepare chooses the user that runs the server, because Postgres refuses to run as root, and creates the directories.
func (b *binaries) prepare(durable bool) error {
	if os.Geteuid() == 0 {
		for _, name := range []string{"postgres", "nobody"} {
			if u, err := lookup(name); err == nil {
				b.user = u
				break
			}
		}
		if b.user == nil {
			return errors.New("pgserver: Postgres does not run as root, and there is neither a user postgres nor nobody: run as another user")
		}
		if program := executable(b.bin, "postgres"); !b.reaches(program) {
			return fmt.Errorf("pgserver: running as root, so the server runs as user %d, who may not execute %s: move it to a place that everybody can read",
				b.user.Uid, program)
		}
	}

	var err error
	// A TMPDIR below a home directory is closed to that user; /tmp is open to all.
	if b.dir, err = b.makeDir(os.TempDir()); err != nil {
		if b.dir, err = b.makeDir("/tmp"); err != nil {
			return err
		}
	}
	if memory := memoryDir(); memory != "" && !durable {
		if b.data, err = b.makeDir(memory); err == nil {
			return nil
		}
	}
	b.data = filepath.Join(b.dir, "data")
	return nil
}

// makeDir creates a directory that the server's user owns and can enter.
func (b *binaries) makeDir(parent string) (string, error) {
	dir, err := os.MkdirTemp(parent, "onceq-pg-")
	if err != nil {
		return "", fmt.Errorf("pgserver: make the server's directory: %w", err)
	}
	if b.user == nil {
		return dir, nil
	}
	if err := os.Chown(dir, int(b.user.Uid), int(b.user.Gid)); err != nil {
		return "", errors.Join(fmt.Errorf("pgserver: hand %s to user %d: %w", dir, b.user.Uid, err), os.Remove(dir))
	}
	if !b.reaches(dir) {
		return "", errors.Join(fmt.Errorf("pgserver: user %d, who runs the server, cannot enter %s", b.user.Uid, parent), os.Remove(dir))
	}
	return dir, nil
}

// ToNobody gives a directory and its files to the user nobody if this process is root. It is for a program that does
// not run as root and reads files that others may not read.
func ToNobody(dir string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	nobody, err := lookup("nobody")
	if err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chown(path, int(nobody.Uid), int(nobody.Gid))
	})
}

// lookup finds a user of this machine.
func lookup(name string) (*syscall.Credential, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return nil, err
	}
	uid, _ := strconv.ParseUint(u.Uid, 10, 32) // both are numbers on systems with a root user
	gid, _ := strconv.ParseUint(u.Gid, 10, 32)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// remove removes the directories, as long as there is no supervisor that does it.
func (b *binaries) remove() error { return errors.Join(os.RemoveAll(b.dir), os.RemoveAll(b.data)) }

// reaches reports whether the server's user can execute or enter a path.
func (b *binaries) reaches(path string) bool {
	return b.command("sh", "-c", `test -x "$1"`, "sh", path).Run() == nil
}

// command returns a command that runs as the server's user. It has its own session, so that it gets no Ctrl-C from the
// terminal. Its environment is this process's, without what would redirect Postgres's programs.
func (b *binaries) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: b.user}
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "PG") && !strings.HasPrefix(variable, "LC_") {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	return cmd
}

func (b *binaries) supervise() error {
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("pgserver: make the supervisor's pipe: %w", err)
	}
	cmd := b.command("sh", "-c", supervise, "sh", b.dir, b.data)
	cmd.Stdin = r
	err = cmd.Start()
	_ = r.Close()
	if err != nil {
		_ = w.Close()
		return fmt.Errorf("pgserver: start the supervisor: %w", err)
	}
	b.lifeline = w
	go func() {
		defer close(b.cleaned)
		_ = cmd.Wait()
		// Otherwise the garbage collector could close the pipe of a caller that keeps only the URL.
		runtime.KeepAlive(w)
	}()
	return nil
}

func (b *binaries) initdb(ctx context.Context) error {
	// The port is open to every account of this machine, so the server needs a password.
	file := filepath.Join(b.dir, "password")
	verifier, err := scramVerifier(b.password)
	if err != nil {
		return fmt.Errorf("pgserver: make the password: %w", err)
	}
	if err := b.own(os.WriteFile(file, []byte(verifier), 0o600), file); err != nil {
		return fmt.Errorf("pgserver: write the password: %w", err)
	}
	var failures []error
	// Not every system has C.UTF-8. C differs only in the classes of non-ASCII letters.
	for _, locale := range []string{"C.UTF-8", "C"} {
		out, err := b.run(ctx, executable(b.bin, "initdb"), "-D", b.data, "-X", filepath.Join(b.dir, "wal"), "-U", "postgres",
			"-A", "scram-sha-256", "--pwfile="+file, "-E", "UTF8", "--data-checksums", "--locale="+locale, "--no-sync", "--no-instructions")
		if err == nil {
			return nil
		}
		failures = append(failures, fmt.Errorf("pgserver: initdb: %w: %s", err, bytes.TrimSpace(out)))
	}
	return errors.Join(failures...)
}

// scramVerifier returns what Postgres stores for a password (RFC 5803). The password is random, so few iterations are
// enough; the usual 4096 cost a client a millisecond for each connection. lib/pq requires a count of four digits.
func scramVerifier(password string) (string, error) {
	const iterations = 1000
	salt := []byte(rand.Text())
	salted, err := pbkdf2.Key(sha256.New, password, salt, iterations, sha256.Size)
	if err != nil {
		return "", err
	}
	sign := func(text string) []byte {
		mac := hmac.New(sha256.New, salted)
		mac.Write([]byte(text))
		return mac.Sum(nil)
	}
	stored := sha256.Sum256(sign("Client Key"))
	encode := base64.StdEncoding.EncodeToString
	return "SCRAM-SHA-256$" + strconv.Itoa(iterations) + ":" + encode(salt) + "$" + encode(stored[:]) + ":" + encode(sign("Server Key")), nil
}

// run waits for a command. When ctx ends, it ends the command with everything that it started.
func (b *binaries) run(ctx context.Context, name string, args ...string) ([]byte, error) {
	var out bytes.Buffer
	cmd := b.command(name, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	defer stop()
	err := cmd.Wait()
	return out.Bytes(), errors.Join(err, ctx.Err())
}

// startSomewhere starts the server on a free port. Another process may take the port before the server does, so a
// server that could not bind is started again on another port.
func (b *binaries) startSomewhere(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for tries := 1; ; tries++ {
		port, err := freePort(ctx)
		if err != nil {
			return err
		}
		b.port = port
		err = b.start(ctx)
		if err == nil || tries == 10 || !b.addressInUse() {
			return err
		}
	}
}

// freePort looks below the ports that systems use for outgoing connections: any client on this machine could take one
// of those while the server restarts.
func freePort(ctx context.Context) (int, error) {
	var err error
	for range 100 {
		port := 15000 + random.IntN(17000)
		var l net.Listener
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			return port, l.Close()
		}
	}
	return 0, fmt.Errorf("pgserver: find a free port: %w", err)
}

// start starts the server and returns when it answers. The caller holds mu.
func (b *binaries) start(ctx context.Context) error {
	log, err := os.OpenFile(b.log(), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("pgserver: open the log: %w", err)
	}
	defer func() { _ = log.Close() }()

	args := append([]string{"-c", becomeServer, "sh", executable(b.bin, "postgres"), "-D", b.data,
		"-p", strconv.Itoa(b.port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="}, b.settings...)
	cmd := b.command("sh", args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{b.lifeline}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("pgserver: start postgres: %w", err)
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait()
	}()
	b.server, b.exited = cmd, exited

	if err := AwaitReady(ctx, b.url(), exited); err != nil {
		return errors.Join(fmt.Errorf("pgserver: start postgres: %w; its log ends: %s", err, b.logTail()),
			b.halt(ctx, syscall.SIGQUIT))
	}
	return nil
}

// halt ends the server and forgets it. The caller holds mu.
func (b *binaries) halt(ctx context.Context, signal syscall.Signal) error {
	if b.server == nil {
		return nil
	}
	_ = b.server.Process.Signal(signal) // fails if it has ended, which is fine
	var err error
	select {
	case <-b.exited:
	case <-ctx.Done():
		_ = b.server.Process.Kill()
		<-b.exited
		err = fmt.Errorf("pgserver: postgres did not stop and was killed: %w", ctx.Err())
	}
	b.server = nil
	_, writeErr := b.lifeline.WriteString("\n")
	return errors.Join(err, writeErr)
}

func (b *binaries) stop() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-b.cleaned:
		return b.stopErr
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	b.stopErr = b.halt(ctx, syscall.SIGQUIT) // unwritten data is lost in any case
	b.stopErr = errors.Join(b.stopErr, b.lifeline.Close())
	<-b.cleaned
	return b.stopErr
}

func (b *binaries) restart(ctx context.Context, immediate bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-b.cleaned:
		return errors.New("pgserver: the server was stopped for good")
	default:
	}
	signal := syscall.SIGINT
	if immediate {
		signal = syscall.SIGQUIT
	}
	if err := b.halt(ctx, signal); err != nil {
		return err
	}
	return b.start(ctx)
}

func (b *binaries) binDir() string { return b.bin }
func (b *binaries) log() string    { return filepath.Join(b.dir, "log") }

func (b *binaries) url() string {
	return "postgres://postgres:" + b.password + "@127.0.0.1:" + strconv.Itoa(b.port) + "/postgres?sslmode=disable"
}

// logTail returns the end of the server's log for error messages.
func (b *binaries) logTail() string {
	log, err := os.ReadFile(b.log())
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(log[max(0, len(log)-2000):]))
}

func (b *binaries) addressInUse() bool {
	return strings.Contains(b.logTail(), "could not bind") || strings.Contains(b.logTail(), "could not create any TCP/IP sockets")
}
