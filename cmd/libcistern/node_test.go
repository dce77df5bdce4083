//go:build linux && cgo

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// node is a GPU that processes share, with a broker.
type node struct {
	t      *testing.T
	gpu    string // the file of the simulated device
	socket string
	opts   broker.Options
	broker *broker.Broker
	stop   func()
}

func newNode(t *testing.T, opts broker.Options) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") // a socket's path has to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{t: t, gpu: filepath.Join(dir, "gpu"), socket: filepath.Join(dir, "s"), opts: opts}
	n.start()
	return n
}

// start starts a broker, which ends with the test.
func (n *node) start() {
	n.t.Helper()
	n.opts.Log = slog.New(slog.NewTextHandler(n.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	b, err := broker.New(n.opts)
	if err != nil {
		n.t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: n.socket, Net: "unixpacket"})
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error)
	go func() { over <- b.Serve(ctx, l) }()
	n.broker = b
	stopped := false
	n.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-over; err != nil {
			n.t.Error(err)
		}
		b.Close()
	}
	n.t.Cleanup(n.stop)
}

// entries are what the broker says of its clients, by process.
func (n *node) entries() map[int]protocol.Entry {
	n.t.Helper()
	c, err := control.Dial(n.socket)
	if err != nil {
		n.t.Fatal(err)
	}
	defer c.Close()
	all, err := c.List()
	if err != nil {
		n.t.Fatal(err)
	}
	by := map[int]protocol.Entry{}
	for _, e := range all {
		by[e.PID] = e
	}
	return by
}

// until waits for what the broker sees of a process.
func (n *node) until(p *member, what string, so func(protocol.Entry) bool) protocol.Entry {
	n.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		e, ok := n.entries()[p.pid()]
		if ok && so(e) {
			return e
		}
		if time.Now().After(end) {
			n.t.Fatalf("it did not come to be that %s: %+v", what, e)
		}
	}
}

// member is a running node.c.
type member struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.Writer
	out *bufio.Scanner
}

// process starts one on the node's GPU of 1 GiB, with more settings.
func (n *node) process(conf string) *member {
	n.t.Helper()
	return n.processOf(libraryPath(n.t), conf)
}

func (n *node) processOf(library, conf string) *member {
	n.t.Helper()
	m := &member{t: n.t, cmd: exec.Command(program(n.t, "node.c", library))}
	m.cmd.Env = append(os.Environ(), fmt.Sprintf("CISTERN_CONF=driver:sim:1GiB@%s,node:%s%s", n.gpu, n.socket, conf))
	m.cmd.Stderr = os.Stderr
	in, err := m.cmd.StdinPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	m.in, m.out = in, bufio.NewScanner(out)
	m.out.Buffer(nil, 1<<20)
	if err := m.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(m.kill)
	if a := m.answer(); a.code != 0 {
		n.t.Fatal(a)
	}
	return m
}

func (m *member) pid() int { return m.cmd.Process.Pid }

func (m *member) kill() {
	_ = m.cmd.Process.Kill()
	_ = m.cmd.Wait()
}

func (m *member) signal(s syscall.Signal) {
	m.t.Helper()
	if err := m.cmd.Process.Signal(s); err != nil {
		m.t.Fatal(err)
	}
}

// outcome is the answer to a line.
type outcome struct {
	numbers []uint64 // before the code
	code    int
	took    time.Duration
	words   string
}

// ask sends a line.
func (m *member) ask(line string, args ...any) {
	m.t.Helper()
	if _, err := fmt.Fprintf(m.in, line+"\n", args...); err != nil {
		m.t.Fatal(err)
	}
}

func (m *member) answer() (r outcome) {
	m.t.Helper()
	if !m.out.Scan() {
		m.t.Fatalf("process %d has ended: %v", m.pid(), m.out.Err())
	}
	f := strings.Fields(m.out.Text())
	at := 0
	for ; at < len(f) && !strings.Contains(f[at], "."); at++ {
		n, err := strconv.ParseUint(f[at], 10, 64)
		if err != nil {
			m.t.Fatalf("%q", m.out.Text())
		}
		r.numbers = append(r.numbers, n)
	}
	if at == 0 || at == len(f) {
		m.t.Fatalf("%q", m.out.Text())
	}
	ms, err := strconv.ParseFloat(f[at], 64)
	if err != nil {
		m.t.Fatalf("%q", m.out.Text())
	}
	r.code, r.numbers = int(r.numbers[at-1]), r.numbers[:at-1]
	r.took, r.words = time.Duration(ms*float64(time.Millisecond)), strings.Join(f[at+1:], " ")
	return r
}

// do is a line and its answer.
func (m *member) do(line string, args ...any) outcome {
	m.t.Helper()
	m.ask(line, args...)
	return m.answer()
}

// must is do for what must go well.
func (m *member) must(line string, args ...any) []uint64 {
	m.t.Helper()
	r := m.do(line, args...)
	if r.code != 0 {
		m.t.Fatalf("process %d, "+line+": %s", append(append([]any{m.pid()}, args...), r.words)...)
	}
	return r.numbers
}

// cache has a process reserve so many MiB and use none of them, long enough ago for others to take them.
func (n *node) cache(p *member, mib int) {
	n.t.Helper()
	p.must("alloc 1 %d", mib)
	p.must("free 1")
	n.until(p, "its cache is unused", func(e protocol.Entry) bool { return e.Reserved >= uint64(mib)<<20 && e.Floor <= 16<<20 })
}

// TestNodeMovesCache: a request that would fail is met by what another process caches, and not where that process or the one that
// asks is without the broker.
func TestNodeMovesCache(t *testing.T) {
	n := newNode(t, broker.Options{})
	for _, conf := range []string{"", ",node:off"} {
		a, b := n.process(""), n.process(conf)
		n.cache(a, 800)
		r := b.do("alloc 1 512")
		if (r.code == 0) != (conf == "") {
			t.Errorf("with %q: %d, %s", conf, r.code, r.words)
		}
		if conf == "" {
			s := b.must("stats")
			if s[2] != 1 || s[3] != 0 {
				t.Errorf("met by other processes, failed: %v", s)
			}
			e := n.entries()
			if x := e[a.pid()]; x.Gave == 0 || x.Gave != e[b.pid()].Got {
				t.Errorf("%+v", e)
			}
		}
		a.kill()
		b.kill()
	}
}
