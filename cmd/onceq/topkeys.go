package main

import (
	"cmp"
	"os"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/onceq/onceq/onceqops"
)

// view is what somebody who watches has chosen by keys.
type view struct {
	at      int    // the queue that is marked, of those that are chosen
	order   int    // the column by which these are sorted
	only    string // the queue that is shown alone; "" for all
	filter  string // what the names of queues have in them
	typing  bool   // the filter
	stopped bool   // nothing new is asked for
}

// orders are the columns by which queues are sorted, the greatest first, but for the name.
var orders = []struct {
	name string
	of   func(onceqops.QueueStats) int64
}{
	{"name", func(onceqops.QueueStats) int64 { return 0 }},
	{"waiting", func(s onceqops.QueueStats) int64 { return int64(s.Waiting) }},
	{"oldest", func(s onceqops.QueueStats) int64 { return int64(s.Oldest) }},
	{"running", func(s onceqops.QueueStats) int64 { return int64(s.Running) }},
	{"dead", func(s onceqops.QueueStats) int64 { return int64(s.Dead + s.Held) }},
}

// chosen are the queues to show, in their order. The mark stays on one of them.
func (v *view) chosen(stats []onceqops.QueueStats) (all []onceqops.QueueStats) {
	for _, s := range stats {
		if v.only == "" && strings.Contains(s.Queue, v.filter) || s.Queue == v.only {
			all = append(all, s)
		}
	}
	of := orders[v.order].of
	slices.SortStableFunc(all, func(a, b onceqops.QueueStats) int { return cmp.Compare(of(b), of(a)) })
	v.at = max(0, min(v.at, len(all)-1))
	return all
}

// says is what the head says of it.
func (v *view) says() string {
	said := "by " + orders[v.order].name
	switch {
	case v.typing:
		return "/" + v.filter + "_"
	case v.only != "":
		said = "queue " + v.only + ", esc for all"
	case v.filter != "":
		said += " /" + v.filter
	}
	if v.stopped {
		said += "   STOPPED, space goes on"
	}
	return said + "   q ends"
}

// press takes a key. It ends top if ends is true.
func (v *view) press(key string, stats []onceqops.QueueStats) (ends bool) {
	if key == "\x03" {
		return true
	}
	if v.typing {
		v.write(key)
		return false
	}
	defer v.chosen(stats)
	switch key {
	case "q":
		return true
	case " ":
		v.stopped = !v.stopped
	case "s":
		v.order = (v.order + 1) % len(orders)
	case "/":
		v.typing, v.filter, v.only = true, "", ""
	case "j", "\x1b[B":
		v.at++
	case "k", "\x1b[A":
		v.at--
	case "\r":
		if all := v.chosen(stats); len(all) > 0 {
			v.only, v.at = all[v.at].Queue, 0
		}
	case "\x1b", "\x7f":
		if v.only == "" {
			v.filter = ""
		}
		v.only = ""
	}
	return false
}

// write takes a key of the filter.
func (v *view) write(key string) {
	r, _ := utf8.DecodeRuneInString(key)
	switch {
	case key == "\r" || key == "\x1b":
		if v.typing = false; key == "\x1b" {
			v.filter = ""
		}
	case key == "\x7f":
		_, last := utf8.DecodeLastRuneInString(v.filter)
		v.filter = v.filter[:len(v.filter)-last]
	case unicode.IsPrint(r):
		v.filter += key
	}
}

// keys gives each key that is typed on a terminal, until restore is called. On anything but a terminal there are none.
func keys(in *os.File) (typed <-chan string, restore func(), err error) {
	if is, _ := terminal(in); !is {
		return nil, func() {}, nil
	}
	before, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return nil, nil, err
	}
	all := make(chan string)
	go func() { // ends with the process
		b := make([]byte, 256)
		for {
			n, err := in.Read(b)
			if err != nil {
				return
			}
			for text := string(b[:n]); text != ""; {
				_, size := utf8.DecodeRuneInString(text)
				if strings.HasPrefix(text, "\x1b[") && len(text) > 2 {
					size = 3 // an arrow
				}
				all <- text[:size]
				text = text[size:]
			}
		}
	}()
	return all, func() { _ = term.Restore(int(in.Fd()), before) }, nil
}
