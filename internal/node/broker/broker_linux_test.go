package broker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

const mib, gib = 1 << 20, 1 << 30

// gpu is a device whose memory clients share.
type gpu struct {
	mu      sync.Mutex
	total   uint64
	taken   uint64 // by all
	uuid    [16]byte
	members int
}

// member is a client over a plain account of memory in place of an allocator.
type member struct {
	t    *testing.T
	gpu  *gpu
	c    *client.Client
	page *live.Page

	mu       sync.Mutex
	reserved uint64
	active   uint64
	max      uint64
	gives    chan struct{} // not nil: a request of the broker is announced here, and answered when hold is closed
	hold     chan struct{}
}

// GiveBack releases what is not active.
func (m *member) GiveBack(_ cuda.Device, need, keep uint64) (uint64, error) {
	m.mu.Lock()
	gives, hold := m.gives, m.hold
	m.mu.Unlock()
	if gives != nil {
		gives <- struct{}{}
		<-hold
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	keep = max(keep, m.active)
	n := min(need, m.reserved-min(m.reserved, keep))
	m.reserved -= n
	m.gpu.mu.Lock()
	m.gpu.taken -= n
	m.gpu.mu.Unlock()
	return n, nil
}

func (m *member) Status(cuda.Device) (protocol.Status, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return protocol.Status{Reserved: m.reserved, Active: m.active, Allocated: m.active, Cached: m.reserved - m.active}, true
}

func (m *member) Free(cuda.Device) (uint64, error) {
	m.gpu.mu.Lock()
	defer m.gpu.mu.Unlock()
	return m.gpu.total - m.gpu.taken, nil
}

func (m *member) SetMax(_ cuda.Device, bytes uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.max = bytes
}

func (m *member) limit() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.max
}

func (m *member) Panicked(v any) { m.t.Error(v) }

func (m *member) gauges(into []live.Device) []live.Device {
	s, _ := m.Status(0)
	return append(into, live.Device{UUID: m.gpu.uuid, Total: m.gpu.total, Reserved: s.Reserved, Allocated: s.Allocated, Active: s.Active, Cached: s.Cached,
		Recent: m.c.Sample(0, s.Active)})
}

// holdUp has requests of the broker wait until m.hold is closed.
func (m *member) holdUp() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gives, m.hold = make(chan struct{}, 9), make(chan struct{})
}

// has sets what the member has, of which so much is in use.
func (m *member) has(reserved, active uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gpu.mu.Lock()
	defer m.gpu.mu.Unlock()
	m.gpu.taken += reserved - m.reserved
	m.reserved, m.active = reserved, active
}

// grow is a request of the engine: create, or ask and create. It returns what was said.
func (m *member) grow(bytes uint64, wait time.Duration) (ok bool, note string) {
	try := func() bool {
		free, _ := m.Free(0)
		if free < bytes || !m.c.Admit(0, bytes) {
			return false
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.gpu.mu.Lock()
		defer m.gpu.mu.Unlock()
		if m.gpu.total-m.gpu.taken < bytes {
			return false
		}
		m.gpu.taken += bytes
		m.reserved += bytes
		m.active += bytes
		return true
	}
	if try() {
		return true, ""
	}
	granted, note := m.c.Ask(0, bytes, wait)
	ok = try()
	if granted > 0 {
		for n := 0; !ok && n < 1000; n++ { // other grants may be on their way
			time.Sleep(time.Millisecond)
			ok = try()
		}
		m.c.Done(0, granted)
	}
	return ok, note
}

// node is a broker with its clients.
type node struct {
	t      testing.TB
	socket string
	opt    broker.Options
	b      *broker.Broker
	gpu    *gpu
	stop   func()
}

func newNode(t testing.TB, opt broker.Options, total uint64) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") // a socket's path has to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if opt.PerProcess == 0 {
		opt.PerProcess = 2000
	}
	n := &node{t: t, socket: filepath.Join(dir, "s"), opt: opt, gpu: &gpu{total: total, uuid: [16]byte{1}}}
	n.start()
	return n
}

func (n *node) start() {
	n.t.Helper()
	if n.opt.Log == nil {
		n.opt.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	b, err := broker.New(n.opt)
	if err != nil {
		n.t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: n.socket, Net: "unixpacket"})
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error, 1)
	go func() { over <- b.Serve(ctx, l) }()
	n.b = b
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-over; err != nil {
			n.t.Error(err)
		}
		b.Close()
	})
	n.t.Cleanup(func() { n.stop() })
}

func (n *node) member(t *testing.T, label string) *member {
	t.Helper()
	m := &member{t: t, gpu: n.gpu}
	page := sync.OnceValues(func() (*live.Page, error) { return live.PublishUnlisted(live.Process{}, m.gauges) })
	ready := make(chan struct{})
	m.c = client.New(client.Config{Socket: n.socket, Label: label, Version: "1", Host: m, Page: func() (*live.Page, error) {
		<-ready
		return page()
	}})
	close(ready)
	m.c.Join(0, n.gpu.uuid, n.gpu.total)
	t.Cleanup(func() {
		m.c.Close()
		if p, err := page(); err == nil {
			p.Close()
		}
	})
	eventually(t, "it is connected", func() bool {
		_, _, known := m.c.Available(0)
		return known
	})
	return m
}

// eventually waits for what has to come.
func eventually(t testing.TB, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not come to be that %s", what)
		}
	}
}

// unused has a member reserve memory without using it, and waits until the broker would take it.
func (n *node) unused(m, by *member, bytes uint64) {
	n.t.Helper()
	m.has(bytes, 0)
	eventually(n.t, "the memory is available", func() bool {
		others, _, _ := by.c.Available(0)
		return others >= bytes
	})
}

func (n *node) entries() []protocol.Entry {
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
	return all
}

func (n *node) entry(label string) protocol.Entry {
	n.t.Helper()
	for _, e := range n.entries() {
		if e.Label == label {
			return e
		}
	}
	n.t.Fatalf("no client %s", label)
	return protocol.Entry{}
}

// Memory that a client does not use goes to one that asks, and others leave it alone until that is done.
func TestMoves(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	a, b, c := n.member(t, "a"), n.member(t, "b"), n.member(t, "c")
	n.unused(a, b, 8*gib)
	granted, note := b.c.Ask(0, 4*gib, 0)
	if granted != 4*gib {
		t.Fatal(granted, note)
	}
	if free, _ := c.Free(0); free != 6*gib || c.c.Admit(0, 3*gib) || !c.c.Admit(0, 2*gib) || !b.c.Admit(0, 6*gib) || c.c.Others(0) != 4*gib || b.c.Others(0) != 0 {
		t.Errorf("of %d free %d are others'", free, c.c.Others(0))
	}
	b.c.Done(0, granted)
	eventually(t, "the grant is over", func() bool { return c.c.Admit(0, 6*gib) })
	if e := n.entry("a"); e.Gave != 4*gib || e.Reserved != 4*gib || e.Device != "GPU-01000000-0000-0000-0000-000000000000" || e.PID != os.Getpid() {
		t.Errorf("%+v", e)
	}
	if e := n.entry("b"); e.Got != 4*gib || e.Granted != 0 {
		t.Errorf("%+v", e)
	}
}

// A grant whose asker does not end it is over after a while.
func TestGrantEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	a, b, c := n.member(t, "a"), n.member(t, "b"), n.member(t, "c")
	n.unused(a, b, 8*gib)
	if granted, note := b.c.Ask(0, 4*gib, 0); granted == 0 {
		t.Fatal(note)
	}
	began := time.Now()
	eventually(t, "the grant is over", func() bool { return c.c.Others(0) == 0 })
	if took := time.Since(began); took < broker.GrantLasts/2 {
		t.Errorf("after %v", took)
	}
	b.c.Done(0, 4*gib) // too late, and no harm
}

// Memory in use is never taken. A request waits for it until it is unused, or its time is over.
func TestWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	a.has(10*gib, 10*gib)
	eventually(t, "the broker knows", func() bool { return n.entry("a").Active == 10*gib })
	if ok, note := b.grow(gib, 300*time.Millisecond); ok || !strings.Contains(note, "waited") || !strings.Contains(note, "10.00 GiB reserved, 10.00 GiB of it in use") {
		t.Fatal(ok, note)
	}
	c := n.member(t, "c")
	done := make(chan string)
	go func() {
		ok, note := c.grow(gib, time.Minute)
		done <- fmt.Sprint(ok, " ", note)
	}()
	eventually(t, "the question is there", func() bool { return n.b.Counts().Asks.Load() == 2 })
	a.has(10*gib, 0)
	if got := <-done; !strings.HasPrefix(got, "true ") {
		t.Error(got)
	}
	if s, _ := a.Status(0); s.Reserved >= 10*gib {
		t.Errorf("%+v", s)
	}
}

// A request also ends its wait when the driver has memory that no client gave: other processes end.
func TestMemoryFromElsewhere(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	a.has(10*gib, 10*gib)
	eventually(t, "the broker knows", func() bool { return n.entry("a").Active == 10*gib })
	done := make(chan string)
	go func() {
		ok, note := b.grow(gib, time.Minute)
		done <- fmt.Sprint(ok, " ", note)
	}()
	eventually(t, "the question is there", func() bool { return n.b.Counts().Asks.Load() == 1 })
	a.has(8*gib, 8*gib)
	if got := <-done; !strings.HasPrefix(got, "true ") {
		t.Error(got)
	}
}

// A victim that does not answer costs one wait, is skipped then, and is asked again once it says something.
func TestSilentVictim(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{Answer: 50 * time.Millisecond}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	n.unused(a, b, 10*gib)
	a.holdUp()
	if ok, note := b.grow(gib, 0); ok || !strings.Contains(note, "did not answer within 50ms") {
		t.Error(ok, note)
	}
	if e := n.entry("a"); !e.Skipped || e.Missed != 1 {
		t.Errorf("%+v", e)
	}
	if ok, note := b.grow(gib, 0); ok || strings.Contains(note, "did not answer") || len(a.gives) != 1 {
		t.Error(ok, note, len(a.gives))
	}
	close(a.hold)
	eventually(t, "it is asked again", func() bool { return !n.entry("a").Skipped })
	if ok, note := b.grow(2*gib, 0); !ok {
		t.Error(note)
	}
}

// A victim that ends while it is asked ends the question, and what it had comes from elsewhere.
func TestVictimEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{Answer: time.Minute}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	n.unused(a, b, 10*gib)
	a.holdUp()
	done := make(chan string)
	go func() {
		ok, note := b.grow(gib, 0)
		done <- fmt.Sprint(ok, " ", note)
	}()
	<-a.gives
	go a.c.Close()
	if got := <-done; !strings.HasPrefix(got, "false ") || !strings.Contains(got, "ended") {
		t.Error(got)
	}
	close(a.hold)
}

// An asker that ends takes its question along.
func TestAskerEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{Answer: time.Minute}, 10*gib)
	a, b, c := n.member(t, "a"), n.member(t, "b"), n.member(t, "c")
	n.unused(a, b, 10*gib)
	a.holdUp()
	done := make(chan string)
	go func() {
		ok, note := b.grow(gib, 0)
		done <- fmt.Sprint(ok, " ", note)
	}()
	<-a.gives
	go b.c.Close()
	if got := <-done; !strings.HasPrefix(got, "false ") {
		t.Error(got)
	}
	close(a.hold)
	eventually(t, "nothing is granted", func() bool { return c.c.Others(0) == 0 && len(n.entries()) == 2 })
}

// A broker that ends while a victim is asked leaves both clients as they would be without it; one that starts then has them again.
func TestBrokerEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{Answer: time.Minute}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	n.unused(a, b, 8*gib)
	a.holdUp()
	done := make(chan string)
	go func() {
		ok, note := b.grow(4*gib, time.Minute)
		done <- fmt.Sprint(ok, " ", note)
	}()
	<-a.gives
	go n.stop()
	if got := <-done; got != "false the broker has ended" {
		t.Error(got)
	}
	close(a.hold)
	n.stop()
	if !a.c.Admit(0, 100*gib) {
		t.Error("growth is held up without a broker")
	}
	if granted, note := b.c.Ask(0, gib, time.Minute); granted != 0 || note == "" {
		t.Error(granted, note)
	}
	n.start()
	eventually(t, "the clients are back", func() bool { return len(n.entries()) == 2 })
}

// Clients that ask each other at once are both answered, with no lock in the way.
func TestMutual(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 12*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	a.has(6*gib, 4*gib)
	b.has(6*gib, 4*gib)
	eventually(t, "the memory is available", func() bool {
		x, _, _ := a.c.Available(0)
		y, _, _ := b.c.Available(0)
		return x == 2*gib && y == 2*gib
	})
	var both sync.WaitGroup
	for _, m := range []*member{a, b} {
		both.Go(func() {
			if ok, note := m.grow(gib, time.Minute); !ok {
				t.Error(note)
			}
		})
	}
	both.Wait()
}

// The policy's max is set, changed with the file and by command, and gone with the broker.
func TestPolicy(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "policy")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("[rule]\nlabel = a\nmax = 4GiB\nmin = 1GiB\n")
	n := newNode(t, broker.Options{Policy: file}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	eventually(t, "the max is set", func() bool { return a.limit() == 4*gib })
	if b.limit() != 0 {
		t.Error(b.limit())
	}
	if e := n.entry("a"); e.Max != 4*gib || e.Min != gib || e.Weight != 1 {
		t.Errorf("%+v", e)
	}
	write("[rule]\nlabel = a\nmaximum = 4GiB\n")
	if err := n.b.Reload(); err == nil || !strings.Contains(err.Error(), file+": line 3: unknown key \"maximum\"") {
		t.Error(err)
	}
	write("[rule]\nlabel = a\nmax = 5GiB\n")
	if err := n.b.Reload(); err != nil {
		t.Error(err)
	}
	eventually(t, "the max is another", func() bool { return a.limit() == 5*gib })
	c, err := control.Dial(n.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Set("label=b max=2GiB"); err != nil {
		t.Error(err)
	}
	eventually(t, "the other's max is set", func() bool { return b.limit() == 2*gib })
	if err := c.Set("label=b nonsense"); err == nil || !strings.Contains(err.Error(), "expected key = value") {
		t.Error(err)
	}
	if err := n.b.Reload(); err != nil {
		t.Error(err)
	}
	if e := n.entry("b"); e.Max != 2*gib { // until the broker ends
		t.Errorf("%+v", e)
	}
	n.stop()
	eventually(t, "there is no max", func() bool { return a.limit() == 0 && b.limit() == 0 })
	if _, err := broker.New(broker.Options{Policy: file + ".none"}); err == nil {
		t.Error("a broker without its policy")
	}
}

// With --dry-run nobody is asked, and the answer says what would have been.
func TestDryRun(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{DryRun: true}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	n.unused(a, b, 10*gib)
	a.holdUp()
	defer close(a.hold)
	if granted, note := b.c.Ask(0, gib, time.Minute); granted != 0 || len(a.gives) > 0 || !strings.Contains(note, "dry run: 1 processes would have been asked for 1.00 GiB") {
		t.Error(granted, note)
	}
	if x, _, _ := b.c.Available(0); x != 10*gib || b.c.Others(0) != 0 {
		t.Error(x, b.c.Others(0))
	}
}

// While nobody lacks memory no message is sent, whatever the clients do.
func TestSteadyState(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	came, sent := n.b.Counts().Messages.Load(), a.c.Sent()+b.c.Sent()
	for i := range uint64(1000) {
		a.has(i*mib, i*mib/2)
		if ok, note := b.grow(mib, 0); !ok || note != "" {
			t.Fatal(note)
		}
	}
	if x, y := n.b.Counts().Messages.Load(), a.c.Sent()+b.c.Sent(); x != came || y != sent {
		t.Errorf("%d messages came, %d were sent", x-came, y-sent)
	}
}

// raw is a connection that sends what it likes.
func raw(t *testing.T, n *node) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: n.socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ends waits until the broker has hung up, and returns its last words.
func ends(t *testing.T, c *net.UnixConn) (words string) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	b := make([]byte, protocol.MaxMessage)
	for {
		k, err := c.Read(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("the broker did not hang up")
		}
		if k == 0 || err != nil {
			return words
		}
		if m, err := protocol.Parse(b[:k]); err == nil && m.Kind == protocol.Refused {
			words = m.Text
		}
	}
}

// memory is a file in memory, as a status segment is one.
func memory(t *testing.T, size int64, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return fd
}

// Connections that do not follow the protocol are ended, with words, and the broker goes on.
func TestHostile(t *testing.T) {
	n := newNode(t, broker.Options{}, 10*gib)
	hello := protocol.Message{Kind: protocol.Hello, Version: "1"}
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	for name, c := range map[string]struct {
		message []byte
		fds     []int
		want    string
	}{
		"nonsense":          {[]byte("GET / HTTP/1.0\r\n\r\n"), nil, "does not use the protocol"},
		"too long":          {make([]byte, protocol.MaxMessage+100), nil, "a message of more than"},
		"no hello":          {(&protocol.Message{Kind: protocol.Ask}).Append(nil), nil, `begins with a message "ask"`},
		"unknown":           {(&protocol.Message{Kind: 99}).Append(nil), nil, `begins with a message "kind 99"`},
		"no segment":        {hello.Append(nil), nil, "sent no status segment"},
		"another file":      {hello.Append(nil), []int{null}, "a status segment: "},
		"may shrink":        {hello.Append(nil), []int{memory(t, 1<<20, 0)}, "expected a sealed file"},
		"no page":           {hello.Append(nil), []int{memory(t, 1<<20, sealed)}, "a status segment: "},
		"short":             {hello.Append(nil), []int{memory(t, 10, sealed)}, "a status segment: "},
		"many descriptors":  {[]byte("x"), []int{null, null, null}, "expected from 12"},
		"rule of a client?": {(&protocol.Message{Kind: protocol.Set, Text: "x"}).Append(nil), nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			conn := raw(t, n)
			if _, _, err := conn.WriteMsgUnix(c.message, unix.UnixRights(c.fds...), nil); err != nil {
				t.Fatal(err)
			}
			if c.want == "" {
				return
			}
			if got := ends(t, conn); !strings.Contains(got, c.want) {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	a, b := n.member(t, "a"), n.member(t, "b")
	n.unused(a, b, 10*gib)
	if ok, note := b.grow(gib, 0); !ok {
		t.Error(note)
	}
	before := descriptors(t)
	for range 50 {
		conn := raw(t, n)
		_, _, _ = conn.WriteMsgUnix(hello.Append(nil), unix.UnixRights(null, null), nil)
		ends(t, conn)
		conn.Close()
	}
	eventually(t, "no descriptor is left behind", func() bool { return descriptors(t) <= before })
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// friend is a connection that said hello with a true page.
func friend(t *testing.T, n *node) *net.UnixConn {
	t.Helper()
	page, err := live.PublishUnlisted(live.Process{}, func(into []live.Device) []live.Device {
		return append(into, live.Device{UUID: n.gpu.uuid, Total: n.gpu.total, Reserved: 5 * gib, Cached: 5 * gib})
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(page.Close)
	fd, err := page.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	c := raw(t, n)
	if _, _, err := c.WriteMsgUnix((&protocol.Message{Kind: protocol.Hello, Version: "1"}).Append(nil), unix.UnixRights(fd), nil); err != nil {
		t.Fatal(err)
	}
	return c
}

// Clients that say hello and then what they must not are ended, whatever they say; random messages do no harm to others.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{Answer: 20 * time.Millisecond}, 10*gib)
	join := protocol.Message{Kind: protocol.Join, ID: 1, UUID: n.gpu.uuid, Total: 1 << 62}
	for name, c := range map[string]struct {
		say  []protocol.Message
		want string
	}{
		"another's device": {[]protocol.Message{{Kind: protocol.Ask, ID: 1, Slot: 7, Bytes: 1}}, "about device 7"},
		"set":              {[]protocol.Message{{Kind: protocol.Set, Text: "max=1"}}, `a message "set" of a client`},
		"the same question": {[]protocol.Message{join, {Kind: protocol.Ask, ID: 1, Bytes: gib, Wait: time.Hour}, {Kind: protocol.Ask, ID: 1, Bytes: gib}},
			"question 1 is open already"},
	} {
		conn := friend(t, n)
		for _, m := range c.say {
			if _, err := conn.Write(m.Append(nil)); err != nil {
				t.Fatal(err)
			}
		}
		if got := ends(t, conn); !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	a, b := n.member(t, "a"), n.member(t, "b")
	a.has(4*gib, 4*gib)
	b.has(4*gib, 4*gib)
	r := rand.New(rand.NewPCG(1, 9))
	for range 20 {
		conn := friend(t, n)
		_, _ = conn.Write(join.Append(nil))
		for range 50 {
			m := protocol.Message{Kind: protocol.Kind(r.IntN(20)), ID: r.Uint64N(8), Slot: r.Uint64N(2), Bytes: r.Uint64() >> r.IntN(64), Wait: time.Duration(r.IntN(1e6)),
				UUID: [16]byte{byte(1 + r.IntN(3))}, Status: protocol.Status{Reserved: r.Uint64(), Cached: r.Uint64()}}
			if _, err := conn.Write(m.Append(nil)); err != nil {
				break
			}
		}
		conn.Close()
	}
	eventually(t, "they are gone", func() bool { return len(n.entries()) == 2 })
	for _, m := range []*member{a, b} {
		if s, _ := m.Status(0); s.Reserved != 4*gib {
			t.Errorf("memory in use was taken: %+v", s)
		}
	}
	n.unused(a, b, 6*gib)
	if ok, note := b.grow(gib, 0); !ok {
		t.Error(note)
	}
}

// A process with a thousand connections gets some, and the others are refused; another process is served.
func TestManyConnections(t *testing.T) {
	n := newNode(t, broker.Options{PerProcess: 10}, 10*gib)
	for range 1000 {
		raw(t, n)
	}
	eventually(t, "all others are refused", func() bool { return n.b.Counts().Refused.Load() == 990 })
	if words := ends(t, raw(t, n)); !strings.Contains(words, "has 10 connections already") {
		t.Errorf("%q", words)
	}
}

// A broker whose answer never comes, as it is stopped, costs a bounded wait, and is not asked again for a while.
func TestStoppedBroker(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	n := &node{t: t, socket: filepath.Join(dir, "s"), gpu: &gpu{total: 10 * gib}}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: n.socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	// A broker that answers the first messages, and then nothing.
	var conn atomic.Pointer[net.UnixConn]
	segment := memoryOfGrants(t)
	go func() {
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		conn.Store(c)
		b := make([]byte, protocol.MaxMessage)
		for {
			k, err := c.Read(b)
			if err != nil || k == 0 {
				return
			}
			switch m, _ := protocol.Parse(b[:k]); m.Kind {
			case protocol.Hello:
				_, _, _ = c.WriteMsgUnix((&protocol.Message{Kind: protocol.Welcome, ID: 1}).Append(nil), unix.UnixRights(segment), nil)
			case protocol.Join:
				_, _ = c.Write((&protocol.Message{Kind: protocol.Joined, ID: m.ID, Slot: 3}).Append(nil))
			}
		}
	}()
	m := &member{t: t, gpu: n.gpu}
	page, err := live.PublishUnlisted(live.Process{}, func(into []live.Device) []live.Device { return into })
	if err != nil {
		t.Fatal(err)
	}
	defer page.Close()
	m.c = client.New(client.Config{Socket: n.socket, Host: m, Page: func() (*live.Page, error) { return page, nil }})
	defer m.c.Close()
	m.c.Join(0, n.gpu.uuid, n.gpu.total)
	eventually(t, "it is connected", func() bool { on, _ := m.c.Connected(); return on })
	var note string
	eventually(t, "the device has a slot", func() bool {
		_, note = m.c.Ask(0, gib, 10*time.Millisecond)
		return strings.Contains(note, "did not answer within")
	})
	began := time.Now()
	if _, note = m.c.Ask(0, gib, time.Minute); !strings.Contains(note, "did not answer a moment ago") || time.Since(began) > 10*time.Second {
		t.Error(note, time.Since(began))
	}
	conn.Load().Close()
	eventually(t, "it is seen to be gone", func() bool { on, _ := m.c.Connected(); return !on })
}
