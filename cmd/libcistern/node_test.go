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
	n.until(p, "its cache is unused", func(e protocol.Entry) bool { return e.Reserved >= uint64(mib)<<20 && e.Floor <= 240<<20 })
}

// TestNodeMovesCache: a request that would fail is met by what another process caches, and not where that process or the one that
// asks is without the broker.
func TestNodeMovesCache(t *testing.T) {
	t.Parallel()
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

// TestNodeBegins: a process begins on a device that the cache of another one fills, and not without the broker.
func TestNodeBegins(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a := n.process("")
	n.cache(a, 1024)
	if r := n.process(",node:off").do("alloc 1 64"); r.code == 0 {
		t.Error("there was memory without the broker")
	}
	b := n.process("")
	b.must("alloc 1 64")
	if e := n.entries(); e[a.pid()].Gave == 0 || e[a.pid()].Gave != e[b.pid()].Got {
		t.Errorf("%+v", e)
	}
}

// TestNodeInUse: memory in use is never taken. The failure of the request says what others have, and how long it waited.
func TestNodeInUse(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process(",node_wait:200ms")
	a.must("alloc 1 800")
	n.until(a, "the broker knows", func(e protocol.Entry) bool { return e.Active >= 800<<20 })
	r := b.do("alloc 1 512")
	if r.code == 0 || r.took > 30*time.Second || !strings.Contains(r.words, fmt.Sprintf("process %d (node_c_lib) has 800.00 MiB reserved, 800.00 MiB of it in use", a.pid())) ||
		!strings.Contains(r.words, "waited") {
		t.Errorf("%+v", r)
	}
	if s := a.must("stats"); s[0] != 800 || s[1] != 800 {
		t.Error(s)
	}
	a.must("free 1")
	b.must("available") // the device is in use all the same
}

// TestNodeAvailable: a process can size itself by what others would release.
func TestNodeAvailable(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process("")
	if got := b.must("available"); got[0] != 1024 {
		t.Error(got)
	}
	n.cache(a, 800)
	if got := b.must("available"); got[0] < 700 {
		t.Error(got)
	}
	a.must("alloc 2 500")
	n.until(a, "the broker knows", func(e protocol.Entry) bool { return e.Active >= 500<<20 })
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // until the peak no longer counts
		got := b.must("available")
		if got[0] > 524 || time.Now().After(end) {
			t.Fatal(got)
		}
		if got[0] >= 500 {
			break
		}
	}
}

// TestNodeMax: a limit of the policy holds, and the failure names it as a limit.
func TestNodeMax(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(",node_label:small"), n.process(",limit:100MiB")
	a.must("alloc 1 10")
	b.must("alloc 1 10")
	c, err := control.Dial(n.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, rule := range []string{"max=300MiB", "label=small max=200MiB"} {
		if err := c.Set(rule); err != nil {
			t.Fatal(err)
		}
	}
	for end := time.Now().Add(time.Minute); a.must("limit")[0] != 200; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("there is no limit")
		}
	}
	if got := b.must("limit"); got[0] != 100 {
		t.Errorf("the lower limit is not in force: %v", got)
	}
	if r := a.do("alloc 2 300"); r.code == 0 || !strings.Contains(r.words, "limit") {
		t.Errorf("%+v", r)
	}
	n.stop()
	for end := time.Now().Add(time.Minute); a.must("limit")[0] != 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the limit outlives the broker")
		}
	}
	a.must("alloc 2 300")
}

// TestNodeBrokerGoes: without the broker processes work as if there had never been one; they find the next one.
func TestNodeBrokerGoes(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process("")
	n.cache(a, 800)
	b.must("alloc 2 10")
	n.stop()
	if r := b.do("alloc 1 512"); r.code == 0 || !strings.Contains(r.words, "the broker has ended") && !strings.Contains(r.words, "no broker is connected") {
		t.Errorf("%+v", r)
	}
	n.start()
	n.until(a, "its cache is unused", func(e protocol.Entry) bool { return e.Reserved >= 800<<20 && e.Floor <= 240<<20 })
	n.until(b, "it is back", func(protocol.Entry) bool { return true })
	b.must("alloc 1 512")
}

// TestNodeStoppedVictim: a victim that is stopped costs a bounded wait, once; it takes part again when it goes on.
func TestNodeStoppedVictim(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process(",node_wait:200ms")
	n.cache(a, 800)
	a.signal(syscall.SIGSTOP)
	r := b.do("alloc 1 512")
	if r.code == 0 || !strings.Contains(r.words, "did not answer within 500ms") {
		t.Errorf("%+v", r)
	}
	if e := n.entries()[a.pid()]; !e.Skipped {
		t.Errorf("%+v", e)
	}
	a.signal(syscall.SIGCONT)
	n.until(a, "it is asked again", func(e protocol.Entry) bool { return !e.Skipped })
	b.must("alloc 1 512")
}

// TestNodeVictimKilled: a process that is killed is no client any more, also where a child of fork lives on.
func TestNodeVictimKilled(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process("")
	n.cache(a, 800)
	child := int(a.must("fork")[0])
	defer func() { _ = syscall.Kill(child, syscall.SIGKILL) }()
	b.must("alloc 2 10")
	a.kill()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if _, there := n.entries()[a.pid()]; !there {
			break
		}
		if time.Now().After(end) {
			t.Fatal("it is still a client")
		}
	}
	if err := syscall.Kill(child, 0); err != nil {
		t.Errorf("the child: %v", err)
	}
	b.must("alloc 1 800")
}

// TestNodeDescriptors: a process whose sockets the program closes connects again; one without a descriptor works as without a broker.
func TestNodeDescriptors(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process("")
	n.cache(a, 800)
	before := n.entries()[a.pid()].Client
	a.must("close")
	n.until(a, "it is another client", func(e protocol.Entry) bool { return e.Client != before && e.Reserved >= 800<<20 && e.Floor <= 240<<20 })
	b.must("alloc 1 512")
	b.must("fill")
	n.stop()
	n.start()
	b.must("free 1")
	b.must("alloc 2 500")
	b.must("trim")
}

// TestNodeCapture: what a captured graph uses stays, and what else its process caches goes.
func TestNodeCapture(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process(",node_wait:200ms")
	n.cache(a, 400)
	a.must("capture")
	n.until(a, "the broker knows", func(e protocol.Entry) bool { return e.Reserved >= 500<<20 })
	r := b.do("alloc 1 900")
	if r.code == 0 {
		t.Error("memory of a capture was taken")
	}
	a.must("captured")
	s := a.must("stats")
	if s[0] < 100 {
		t.Errorf("%v", s)
	}
	b.must("alloc 1 512")
}

// TestNodeMutual: processes that reclaim from each other at once are both met.
func TestNodeMutual(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process("")
	for _, m := range []*member{a, b} {
		m.must("alloc 1 200")
		m.must("alloc 2 30 10")
		m.must("free 2")
	}
	for _, m := range []*member{a, b} {
		n.until(m, "its cache is unused", func(e protocol.Entry) bool { return e.Reserved >= 500<<20 && e.Floor <= 280<<20 })
	}
	for range 3 {
		for _, m := range []*member{a, b} {
			m.ask("alloc 3 280")
		}
		for _, m := range []*member{a, b} {
			if r := m.answer(); r.code != 0 {
				t.Fatal(r.words)
			}
		}
		for _, m := range []*member{a, b} {
			m.must("free 3")
		}
	}
}

// TestNodePhases: processes that use most of the device in turn are all met, and none fails in the place of another one.
func TestNodePhases(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process("")
	for range 2 {
		for _, m := range []*member{a, b} {
			m.must("alloc 1 70 10")
			m.must("free 1")
		}
	}
	for _, m := range []*member{a, b} {
		if s := m.must("stats"); s[3] != 0 {
			t.Errorf("%d were met by the other process, %d failed", s[2], s[3])
		}
	}
	if s := b.must("stats"); s[2] == 0 {
		t.Error("none was met by the other process")
	}
}

// TestNodeNoThrashing: the cache of a job that needs it in each step stays the job's: the request of a process for which there is too
// little fails, as it would without a broker, and not the job.
func TestNodeNoThrashing(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{})
	a, b := n.process(""), n.process(",node_wait:500ms")
	a.ask("steps 1 700 50")
	n.until(a, "it works", func(e protocol.Entry) bool { return e.Reserved >= 700<<20 })
	if r := b.do("alloc 1 600"); r.code == 0 {
		t.Error("the job's cache was taken between two steps")
	}
	if r := a.answer(); r.code != 0 {
		t.Errorf("the job fails: %s", r.words)
	}
	if e := n.entries()[a.pid()]; e.Gave != 0 {
		t.Errorf("%+v", e)
	}
}
