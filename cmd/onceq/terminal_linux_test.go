package main

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqops"
	"github.com/onceq/onceq/queuetest"
)

// console is a terminal with a command in it.
type console struct {
	t    *testing.T
	c    *exec.Cmd
	side *os.File

	mu   sync.Mutex
	text string
}

// open starts a command in a terminal of the given width.
func open(t *testing.T, width uint16, env []string, url string, args ...string) *console {
	t.Helper()
	side, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = side.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(side.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(side.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetWinsize(int(side.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: width}))
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, tty.Close()) }()
	s := &console{t: t, c: command(t, url, args...), side: side}
	s.c.Env = append(append(s.c.Env, "TERM=xterm"), env...)
	s.c.Stdin, s.c.Stdout, s.c.Stderr = tty, tty, tty
	s.c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, s.c.Start())
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := side.Read(b)
			s.mu.Lock()
			s.text += string(b[:n])
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return s
}

func (s *console) seen() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text
}

func (s *console) until(text string) {
	s.t.Helper()
	require.Eventually(s.t, func() bool { return strings.Contains(s.seen(), text) }, 5*time.Minute, 20*time.Millisecond, "%q does not come in %q", text, s.seen())
}

func (s *console) end() int {
	_ = s.c.Wait()
	return s.c.ProcessState.ExitCode()
}

func (s *console) key(keys string) {
	s.t.Helper()
	_, err := s.side.WriteString(keys)
	require.NoError(s.t, err)
}

// On a terminal a change asks, and only yes is a yes.
func TestAsking(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 2)
	for keys, code := range map[string]int{"n\n": codeRefused, "\n": codeRefused, "sure\n": codeRefused, "\x03": codeInterrupted, "\x04": codeRefused} {
		s := open(t, 80, nil, db.URL, "jobs", "discard", "--kind", "mail")
		s.until("Go on? [y/N] ")
		s.key(keys)
		require.Equal(t, code, s.end(), "%q: %s", keys, s.seen())
		s.until("nothing was changed")
	}
	s := open(t, 80, nil, db.URL, "jobs", "discard", "--kind", "mail")
	s.until("This cannot be undone")
	s.until("Go on? [y/N] ")
	s.key("y\n")
	require.Equal(t, 0, s.end(), s.seen())
	s.until("2 jobs discarded.")

	// What comes while it asks is not meant.
	kill(t, db, 3)
	before := dead(t, db)
	require.Len(t, before, 3)
	s = open(t, 80, nil, db.URL, "jobs", "discard", "--kind", "mail", "--limit", "2")
	s.until("Go on? [y/N] ")
	kill(t, db, 4)
	s.key("y\n")
	require.Equal(t, 0, s.end(), s.seen())
	s.until("2 jobs discarded.")
	after := dead(t, db)
	require.Equal(t, before[0], after[0])
	require.Greater(t, after[1], before[2], "the two that were shown are gone")

	held := hold(t, db, 1)
	s = open(t, 80, nil, db.URL, "effects", "resolve", "--effect", "charge", "--never")
	s.until("Go on? [y/N] ")
	later := hold(t, db, 2)[1:]
	s.key("y\n")
	require.Equal(t, 0, s.end(), s.seen())
	s.until("1 effect settled")
	state := func(id int64) onceq.State {
		job, err := db.Queue.Get(t.Context(), db.Pool, id)
		require.NoError(t, err)
		return job.State
	}
	require.Equal(t, []onceq.State{onceq.StateWaiting, onceq.StateHeld}, []onceq.State{state(held[0]), state(later[0])})
}

func dead(t *testing.T, db *queuetest.DB) (ids []int64) {
	t.Helper()
	jobs, err := onceqops.New(db.Queue).List(t.Context(), db.Pool, onceqops.Filter{States: []onceq.State{onceq.StateDead}})
	require.NoError(t, err)
	for _, j := range jobs {
		ids = append(ids, j.ID)
	}
	slices.Sort(ids)
	return ids
}

var colors = regexp.MustCompile(`\x1b\[[0-9;]*m`)

// Tables fit a terminal, and are colored there unless somebody does not want that.
func TestTerminalWidth(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 3)
	for _, width := range []uint16{60, 80, 200} {
		s := open(t, width, nil, db.URL, "jobs", "list")
		require.Equal(t, 0, s.end())
		s.until("mail")
		require.Regexp(t, colors, s.seen())
		for _, line := range strings.Split(colors.ReplaceAllString(s.seen(), ""), "\r\n") {
			require.LessOrEqual(t, utf8.RuneCountInString(line), int(width), line)
		}
	}
	s := open(t, 60, nil, db.URL, "jobs", "list", "--wide")
	require.Equal(t, 0, s.end())
	s.until("for welcome:3") // the end of an error
	s = open(t, 80, []string{"NO_COLOR=1"}, db.URL, "queues")
	require.Equal(t, 0, s.end())
	s.until("mail")
	require.NotContains(t, s.seen(), "\x1b")
	require.NotContains(t, s.seen(), "BLOCKED") // says nothing, and there is no room
	require.Contains(t, s.seen(), "DONE/MIN")
}

// Words fit a terminal too: a line goes on under where it began, and no command is broken.
func TestTerminalWidth_OfWords(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 3)
	lines := func(width uint16, last string, args ...string) []string {
		s := open(t, width, []string{"NO_COLOR=1"}, db.URL, args...)
		s.end()
		s.until(last)
		return strings.Split(strings.TrimRight(s.seen(), "\r\n"), "\r\n")
	}
	whole := lines(60000, "prints them", "doctor")
	for _, width := range []uint16{60, 80} {
		narrow := lines(width, "prints them", "doctor")
		require.Equal(t, strings.Fields(strings.Join(whole, " ")), strings.Fields(strings.Join(narrow, " ")))
		require.Greater(t, len(narrow), len(whole))
		for _, line := range narrow[:len(narrow)-1] {
			require.LessOrEqual(t, utf8.RuneCountInString(line), int(width), line)
			require.Regexp(t, "^(warning  |bad      |         )[^ ]", line)
		}
	}
	require.Equal(t, whole, lines(60, "prints them", "doctor", "--wide"))
	require.Contains(t, lines(40, "prints them", "doctor"), "         onceq jobs list --state dead --queue mail;")

	told := lines(60, "(Keep)", "jobs", "explain", "999")
	require.Greater(t, len(told), 1, told)
	for _, line := range told[1:] {
		require.Regexp(t, "^       [^ ]", line)
	}
}

// top shows what is there, says when the database is away, goes on when that is back, and leaves the terminal as it was.
func TestTop(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	kill(t, db, 2)
	_, err := db.Queue.Enqueue(t.Context(), db.Pool, charges.Job(7))
	require.NoError(t, err)
	p, url := newProxy(t, db)
	_, err = db.Pool.Exec(t.Context(), `insert into onceq.job_counts (minute, took, started, completed, failed, dead, queue, kind, durations)
select date_trunc('minute', now()) - n * interval '1 minute', 0, 9, n, 0, 0, 'mail', 'other', '{9,0,0,0,0,0,0,0,0,0,0,0,0,0}' from generate_series(1, 20) n`)
	require.NoError(t, err)
	s := open(t, 100, []string{"NO_COLOR=1"}, url, "top", "--every", "500ms")
	s.until("\x1b[?1049h")
	s.until("███▇▇▇▆▆▆▅▅▅▄▄▄")
	s.until("mail ")
	s.until(`warning  dead: queue "mail" has dead jobs: 2`)
	s.until("onceq jobs list --state dead --queue mail; then redrive")
	p.down()
	s.until("no answer from the database since ")
	p.up()
	before := len(s.seen())
	require.Eventually(t, func() bool { return strings.Contains(s.seen()[before:], "q ends") }, 5*time.Minute, 20*time.Millisecond)
	for _, step := range []struct{ key, shown string }{
		{"j", "> mail"}, {"\x1b[A", "> billing"}, {"s", "by waiting"}, {"/ma", "/ma_"}, {"\r", "/ma   q ends"}, {"\r", "queue mail, esc for all"},
		{" ", "STOPPED"}, {" ", "esc for all   q ends"}, {"\x7f", "by waiting /ma   q ends"}, {"\x1b", "by waiting   q ends"},
	} {
		s.press(step.key, step.shown)
	}
	s.key("q")
	require.Equal(t, 0, s.end())
	s.until("\x1b[?1049l")
	const lines = unix.ICANON | unix.ECHO | unix.ISIG
	settings, err := unix.IoctlGetTermios(int(s.side.Fd()), unix.TCGETS)
	require.NoError(t, err)
	require.EqualValues(t, lines, settings.Lflag&lines, "the terminal is as it was")

	s = open(t, 100, nil, url, "top")
	s.until("mail ")
	s.key("\x03")
	require.Equal(t, 0, s.end())
}

// What others have named and written moves nothing on the screen.
func TestTop_TextsOfOthers(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	hostile(t, db)
	s := open(t, 300, []string{"NO_COLOR=1"}, db.URL, "top", "--every", "500ms")
	s.until("> badx forged")
	s.press("/forged\r\r", "queue badx forged")
	s.until("dead: queue ") // a finding about it
	s.key("q")
	require.Equal(t, 0, s.end())
	own := strings.NewReplacer("\x1b[?1049h", "", "\x1b[?25l", "", "\x1b[?25h", "", "\x1b[?1049l", "", "\x1b[H", "", "\x1b[K", "", "\x1b[J", "", "\r\n", "\n")
	harmless(t, "top", own.Replace(s.seen()))
}

// press types a key and waits until the command shows a text after it.
func (s *console) press(key, shown string) {
	s.t.Helper()
	before := len(s.seen())
	s.key(key)
	require.Eventually(s.t, func() bool { return strings.Contains(s.seen()[before:], shown) }, 5*time.Minute, 20*time.Millisecond, "%q after %q", shown, key)
}

// Where there are more queues than lines, the one that is marked is always among those that are shown.
func TestTop_ManyQueues(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t, schema())
	var jobs []onceq.Job
	for i := range 60 {
		for range 1 + i {
			jobs = append(jobs, onceq.Job{Kind: "k", Queue: fmt.Sprintf("queue %02d", i), Payload: 1})
		}
	}
	_, err := db.Queue.EnqueueMany(t.Context(), db.Pool, jobs)
	require.NoError(t, err)
	s := open(t, 70, []string{"NO_COLOR=1"}, db.URL, "top", "--every", "500ms")
	s.until("> queue 00")
	require.NotContains(t, s.seen(), "queue 59")
	s.press(strings.Repeat("j", 100), "> queue 59")
	s.press("k", "> queue 58")
	s.press("s", "> queue 01") // the queue with most jobs comes first
	s.press(strings.Repeat("k", 60), "> queue 59")
	s.press("/07", "queue 07")
	s.press("q", "No queue has that in its name")
	s.press("\x7f\r", "queue 07")
	s.press("\x1b", "> queue 59")
	s.key("q")
	require.Equal(t, 0, s.end())
}
