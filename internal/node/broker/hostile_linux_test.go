package broker_test

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/grants"
	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

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
	if ok, note := b.grow(gib, time.Minute); !ok {
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

// friend is a connection that said hello with a page of 5 GiB that are cached.
func friend(t *testing.T, n *node) *net.UnixConn {
	t.Helper()
	var cached atomic.Uint64
	cached.Store(5 * gib)
	return friendWith(t, n, &cached)
}

// friendWith is one with as much.
func friendWith(t *testing.T, n *node, cached *atomic.Uint64) *net.UnixConn {
	t.Helper()
	page, err := live.PublishUnlisted(live.Process{}, func(into []live.Device) []live.Device {
		return append(into, live.Device{UUID: n.gpu.uuid, Total: n.gpu.total, Reserved: cached.Load(), Cached: cached.Load()})
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
	if _, _, err := c.WriteMsgUnix((&protocol.Message{Kind: protocol.Hello, Version: "1", Label: "friend" + strings.Repeat("<", 50)}).Append(nil), unix.UnixRights(fd), nil); err != nil {
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
	eventually(t, "the others are served", func() bool { // a busy machine may miss the time for an answer
		ok, _ := b.grow(gib, 0)
		return ok
	})
}

// A client that asks the same question again while it is open is ended. The victim's answer, which does not come, keeps it open.
func TestSameQuestion(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{Answer: time.Hour}, 10*gib)
	a, b := n.member(t, "a"), n.member(t, "b")
	n.unused(a, b, 8*gib)
	a.holdUp()
	defer close(a.hold)
	conn := friend(t, n)
	ask := protocol.Message{Kind: protocol.Ask, ID: 1, Bytes: gib, Wait: time.Minute}
	for _, m := range []protocol.Message{{Kind: protocol.Join, ID: 1, UUID: n.gpu.uuid, Total: n.gpu.total}, ask} {
		if _, err := conn.Write(m.Append(nil)); err != nil {
			t.Fatal(err)
		}
	}
	<-a.gives // of the question, or of another one's that was before
	if _, err := conn.Write(ask.Append(nil)); err != nil {
		t.Fatal(err)
	}
	if got := ends(t, conn); !strings.Contains(got, "question 1 is open already") {
		t.Errorf("%q", got)
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

// memoryOfGrants is the descriptor of a segment of grants.
func memoryOfGrants(t testing.TB) int {
	t.Helper()
	s, err := grants.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s.Descriptor()
}

// Questions that name no wait are bounded in rate as well.
func TestManyQuestions(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	conn := friend(t, n)
	say := func(m protocol.Message, answer protocol.Kind) {
		t.Helper()
		if _, err := conn.Write(m.Append(nil)); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		b := make([]byte, protocol.MaxMessage)
		for {
			k, err := conn.Read(b)
			if err != nil {
				t.Fatal(err)
			}
			if m, _ := protocol.Parse(b[:k]); m.Kind == answer {
				return
			}
		}
	}
	say(protocol.Message{Kind: protocol.Join, ID: 1, UUID: n.gpu.uuid, Total: n.gpu.total}, protocol.Joined)
	const more = 60
	began := time.Now()
	for i := range ledger.Burst + more {
		say(protocol.Message{Kind: protocol.Ask, ID: uint64(i), Bytes: gib}, protocol.Granted)
	}
	if took, least := time.Since(began), more*time.Second/ledger.Rate; took < least-time.Millisecond {
		t.Errorf("%d questions in %v, expected %v at least", ledger.Burst+more, took, least)
	}
}

// Devices that no client uses any more make room for others: MIG makes new ones, and a client may name any.
func TestManyDevices(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	conn := friend(t, n)
	for i := range grants.Slots {
		if _, err := conn.Write((&protocol.Message{Kind: protocol.Join, ID: 1, UUID: [16]byte{15: byte(i)}, Total: 1 << 47}).Append(nil)); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "there is no room", func() bool { return len(n.b.Devices()) == grants.Slots })
	other := friend(t, n)
	join := protocol.Message{Kind: protocol.Join, ID: 1, UUID: n.gpu.uuid, Total: n.gpu.total}
	if _, err := other.Write(join.Append(nil)); err != nil {
		t.Fatal(err)
	}
	if words := ends(t, other); !strings.Contains(words, "there are 128 devices already") {
		t.Errorf("%q", words)
	}
	conn.Close()
	eventually(t, "they are gone", func() bool { return len(n.entries()) == 0 })
	a, b := n.member(t, "a"), n.member(t, "b")
	n.unused(a, b, 8*gib)
	if ok, note := b.grow(4*gib, time.Minute); !ok {
		t.Error(note)
	}
	eventually(t, "the device's figures are its own", func() bool {
		for _, d := range n.b.Devices() {
			if d.Device == "GPU-01000000-0000-0000-0000-000000000000" {
				return d.Total == n.gpu.total && d.Met == 1
			}
		}
		return false
	})
}

// An answer that says only why nothing was done does not say that the client has nothing.
func TestAnswerWithoutStatus(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{Answer: 10 * time.Second}, 10*gib)
	conn := friend(t, n)
	if _, err := conn.Write((&protocol.Message{Kind: protocol.Join, ID: 1, UUID: n.gpu.uuid, Total: n.gpu.total}).Append(nil)); err != nil {
		t.Fatal(err)
	}
	b := n.member(t, "b")
	eventually(t, "the memory is available", func() bool {
		others, _, _ := b.c.Available(0)
		return others == 5*gib
	})
	go func() {
		buf := make([]byte, protocol.MaxMessage)
		for {
			k, err := conn.Read(buf)
			if err != nil || k == 0 {
				return
			}
			if m, _ := protocol.Parse(buf[:k]); m.Kind == protocol.GiveBack {
				_, _ = conn.Write((&protocol.Message{Kind: protocol.Gave, ID: m.ID, Slot: m.Slot, Text: "too many requests wait already"}).Append(nil))
			}
		}
	}()
	if _, note := b.c.Ask(0, gib, 3*time.Second); !strings.Contains(note, "too many requests wait already") || !strings.Contains(note, "has 5.00 GiB reserved") {
		t.Error(note)
	}
}

// A client that takes longer to say what it has is waited for: its last status may be older than its cache.
func TestLateStatus(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{Answer: 10 * time.Second}, 10*gib)
	var cached atomic.Uint64
	conn := friendWith(t, n, &cached)
	if _, err := conn.Write((&protocol.Message{Kind: protocol.Join, ID: 1, UUID: n.gpu.uuid, Total: n.gpu.total}).Append(nil)); err != nil {
		t.Fatal(err)
	}
	b := n.member(t, "b")
	eventually(t, "both are there", func() bool { return len(n.entries()) == 2 })
	go func() {
		buf := make([]byte, protocol.MaxMessage)
		for late := 3; ; { // the first inquiries are not answered in time
			k, err := conn.Read(buf)
			if err != nil || k == 0 {
				return
			}
			m, _ := protocol.Parse(buf[:k])
			switch {
			case m.Kind != protocol.GiveBack:
				continue
			case m.Bytes == 0 && late > 0:
				late--
				continue
			}
			cached.Store(5 * gib)
			_, _ = conn.Write((&protocol.Message{Kind: protocol.Gave, ID: m.ID, Slot: m.Slot, Bytes: m.Bytes,
				Status: protocol.Status{Reserved: 5 * gib, Cached: 5 * gib}}).Append(nil))
		}
	}()
	if granted, note := b.c.Ask(0, gib, 10*time.Second); granted < gib {
		t.Error(granted, note)
	}
}
