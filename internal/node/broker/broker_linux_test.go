package broker_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

const mib, gib = 1 << 20, 1 << 30

// gpu is a device whose memory clients share.
type gpu struct {
	mu    sync.Mutex
	total uint64
	taken uint64 // by all
	uuid  [16]byte
}

// member is a client over a plain account of memory in place of an allocator.
type member struct {
	t   *testing.T
	gpu *gpu
	c   *client.Client

	headroom atomic.Uint64 // that the driver is to keep

	mu       sync.Mutex
	reserved uint64
	active   uint64
	max      uint64
	recent   quota.Recent
	gives    chan struct{} // not nil: a request of the broker is announced here, and answered when hold is closed
	hold     chan struct{}
}

var began = time.Now()

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
	m.recent.Add(time.Since(began), m.active)
	return protocol.Status{Reserved: m.reserved, Active: m.active, Allocated: m.active, Cached: m.reserved - m.active, Peaks: m.recent.Peaks()}, true
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
		Recent: s.Peaks})
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

// grow is a request of the engine: create, or ask and create. It returns the words of the broker.
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
	if opt.Answer == 0 {
		opt.Answer = 10 * time.Second // a busy machine takes longer than a process may
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
	m.c = client.New(client.Config{Socket: n.socket, Label: label, Version: "1", Host: m, Headroom: func(uint64) uint64 { return m.headroom.Load() }, Page: func() (*live.Page, error) {
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
	granted, note := b.c.Ask(0, 4*gib, time.Minute)
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

// A client that took the driver's last memory has others release some of what they do not use, so that the driver has its headroom
// again; what they use stays, and they are not asked again at once. A question asks for it at once, if others have as much.
func TestHeadroom(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	b.headroom.Store(gib)
	n.unused(a, b, 8*gib)
	free := func(want uint64) {
		t.Helper()
		if got, _ := a.Free(0); got != want {
			t.Errorf("%d bytes are free, want %d", got, want)
		}
	}
	messages := func(what string) {
		t.Helper()
		sent := b.c.Sent()
		b.c.Grown(0)
		if now := b.c.Sent(); now != sent {
			t.Errorf("%d messages %s", now-sent, what)
		}
	}
	b.has(2*gib, 2*gib)
	b.c.Grown(0)
	free(gib)
	eventually(t, "the grant is over", func() bool { return a.c.Others(0) == 0 })
	messages("while the driver has its headroom")

	granted, note := b.c.Ask(0, gib, 0)
	if granted != 2*gib {
		t.Errorf("granted %d of a request and headroom: %s", granted, note)
	}
	b.has(4*gib, 4*gib)
	b.c.Done(0, granted)
	free(gib)
	eventually(t, "the grant is over", func() bool { return a.c.Others(0) == 0 })
	messages("after a question that asked for it")

	b.has(5*gib, 5*gib) // others have 5 GiB
	granted, note = b.c.Ask(0, 5*gib, 0)
	if granted != 5*gib {
		t.Errorf("granted %d of all that others have: %s", granted, note)
	}
	b.has(10*gib, 10*gib)
	b.c.Done(0, granted)
	asked := time.Now()
	b.c.Grown(0)
	free(0)
	sent := b.c.Sent()
	b.c.Grown(0)
	if now := b.c.Sent(); now != sent && time.Since(asked) < 100*time.Millisecond {
		t.Errorf("%d messages right after there was nothing", now-sent)
	}
	b.has(10*gib, 9*gib)
	eventually(t, "its own unused memory goes", func() bool {
		b.c.Grown(0)
		n, _ := a.Free(0)
		return n == gib
	})
}

// A grant whose asker does not end it is over after a while.
func TestGrantEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	a, b, c := n.member(t, "a"), n.member(t, "b"), n.member(t, "c")
	n.unused(a, b, 8*gib)
	began := time.Now()
	if granted, note := b.c.Ask(0, 4*gib, time.Minute); granted == 0 {
		t.Fatal(note)
	}
	eventually(t, "the grant is over", func() bool { return c.c.Others(0) == 0 })
	if took := time.Since(began); took < broker.GrantLasts {
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
	if ok, note := b.grow(gib, 3*time.Second); ok || !strings.Contains(note, "waited") || !strings.Contains(note, "10.00 GiB reserved, 10.00 GiB of it in use") {
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
	if ok, note := b.grow(gib, 2*time.Second); ok || !strings.Contains(note, "did not answer within 50ms") {
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
	eventually(t, "it gives", func() bool { // a busy machine may miss the time for an answer
		ok, _ := b.grow(2*gib, 0)
		return ok
	})
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
		ok, note := b.grow(gib, time.Minute)
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

// Cache that a client does not need for the time of its policy is released, although no client asks; that of others stays.
func TestDecay(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "policy")
	if err := os.WriteFile(file, []byte("[rule]\nlabel = a\ndecay = 5s\nmin = 2GiB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n := newNode(t, broker.Options{Policy: file}, 20*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	a.has(8*gib, gib)
	b.has(8*gib, gib)
	eventually(t, "the cache is released", func() bool { s, _ := a.Status(0); return s.Reserved == 2*gib })
	if s, _ := b.Status(0); s.Reserved != 8*gib {
		t.Errorf("%+v", s)
	}
	if asks := n.b.Counts().Asks.Load(); asks != 0 {
		t.Errorf("%d questions", asks)
	}
	if e := n.entry("a"); e.Decay != 5 {
		t.Errorf("%+v", e)
	}
}

// With --dry-run no client is asked, and the answer says what would have been.
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

// While no client lacks memory no message is sent, whatever the clients do.
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

// Rules of commands are bounded in number; one that replaces another is none more.
func TestSetIsBounded(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	a, c := n.member(t, "a"), n.operator(t)
	const most = 1000
	for i := range most {
		if err := c.Set(fmt.Sprintf("label=a max=%dGiB", i+1)); err != nil {
			t.Fatal(i, err)
		}
	}
	for i := range most - 1 {
		if err := c.Set(fmt.Sprintf("label=other%d max=1GiB", i)); err != nil {
			t.Fatal(i, err)
		}
	}
	if err := c.Set("label=b max=1GiB"); err == nil || !strings.Contains(err.Error(), "commands have set 1000 rules, the most: write rules into the policy's file") {
		t.Error(err)
	}
	if err := c.Set("max=7GiB label=a"); err != nil {
		t.Error(err)
	}
	eventually(t, "the last rule is in force", func() bool { return a.limit() == 7*gib })
}
