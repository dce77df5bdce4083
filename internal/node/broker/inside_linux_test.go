package broker

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/node/ledger"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

func newBroker(t *testing.T) *Broker {
	t.Helper()
	b, err := New(Options{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// Connections is the number of connections that the broker has.
func (b *Broker) Connections() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.stops)
}

// Hold keeps the broker's lock, as if it were busy.
func (b *Broker) Hold() (release func()) {
	b.mu.Lock()
	return b.mu.Unlock
}

// Rules that operators set at the same time are all in force.
func TestRulesAtOnce(t *testing.T) {
	b := newBroker(t)
	const operators, each = 4, 200
	var all sync.WaitGroup
	for i := range operators {
		all.Go(func() {
			c := &client{b: b, process: process{uid: uint32(os.Geteuid())}}
			for k := range each {
				if err := b.set(c, fmt.Sprintf("label=%d-%d weight=2", i, k)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := b.rules.Len(); n != operators*each {
		t.Errorf("%d rules in force, expected %d", n, operators*each)
	}
}

// A process of a PID namespace that the broker does not see has the number 0. It is neither the broker nor all others like it.
func TestUnknownProcess(t *testing.T) {
	p := process{pidfd: -1}
	p.look()
	if p.start != 0 || p.name != "" || p.cgroup != "" {
		t.Errorf("%+v", p)
	}
	b := newBroker(t)
	for i := range 3 * b.opt.PerProcess {
		if err := b.admit(&client{b: b, conn: &net.UnixConn{}, process: p}); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	known := &client{b: b, conn: &net.UnixConn{}, process: process{pid: 7}}
	for range b.opt.PerProcess {
		if err := b.admit(known); err != nil {
			t.Fatal(err)
		}
	}
	if b.admit(known) == nil {
		t.Error("a process has one connection more than it may")
	}
}

// pair is a client's connection, and its other end.
func pair(t *testing.T) (ends [2]*net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
	}
	return ends
}

// Askers that want to know at the same time what clients have share one inquiry, also of the one that began it.
func TestSharedInquiry(t *testing.T) {
	b := newBroker(t)
	ends := pair(t)
	defer ends[0].Close()
	defer ends[1].Close()
	c := &client{b: b, conn: ends[0], heard: map[ledger.Slot]time.Time{}, process: process{pidfd: -1}}
	b.enter(c)
	defer b.leave(c)
	if err := c.join(protocol.Message{Kind: protocol.Join, ID: 1, UUID: [16]byte{1}, Total: 1 << 30}); err != nil {
		t.Fatal(err)
	}
	const askers = 100
	q := &b.inquiries[0]
	q.mu.Lock()
	var all sync.WaitGroup
	for range askers {
		all.Go(func() {
			if b.inquire(c.id, 0) {
				t.Error("it has answered")
			}
		})
	}
	for q.waiting.Load() < askers {
		time.Sleep(time.Millisecond)
	}
	q.mu.Unlock()
	all.Wait()
	ends[0].Close()
	asked, buf := 0, make([]byte, protocol.MaxMessage)
	for {
		n, err := ends[1].Read(buf)
		if n == 0 || err != nil {
			break
		}
		if m, err := protocol.Parse(buf[:n]); err != nil || m.Kind == protocol.GiveBack {
			asked++
		}
	}
	if asked != 1 || q.waiting.Load() != 0 {
		t.Errorf("the client was asked %d times, %d askers wait", asked, q.waiting.Load())
	}
}

// A client that joins while the rules change ends with the limit that is in force.
func TestJoinWhileRulesChange(t *testing.T) {
	b := newBroker(t)
	op := &client{b: b, process: process{uid: uint32(os.Geteuid())}}
	buf := make([]byte, protocol.MaxMessage)
	for i := range 200 {
		ends := pair(t)
		c := &client{b: b, conn: ends[0], heard: map[ledger.Slot]time.Time{}, process: process{pidfd: -1}}
		b.enter(c)
		var both sync.WaitGroup
		both.Go(func() {
			if err := c.join(protocol.Message{Kind: protocol.Join, ID: 1, UUID: [16]byte{1}, Total: 1 << 30}); err != nil {
				t.Error(err)
			}
		})
		both.Go(func() {
			if err := b.set(op, fmt.Sprintf("max=%d", i+1)); err != nil {
				t.Error(err)
			}
		})
		both.Wait()
		b.leave(c)
		ends[0].Close()
		joined, limit := false, uint64(0)
		for {
			n, err := ends[1].Read(buf)
			if n == 0 || err != nil {
				break
			}
			m, err := protocol.Parse(buf[:n])
			if err != nil {
				t.Fatal(err)
			}
			if joined = joined || m.Kind == protocol.Joined; joined { // until then it knows no slot
				limit = m.Limit
			}
		}
		ends[1].Close()
		if limit != uint64(i+1) {
			t.Fatalf("round %d: the client has the limit %d", i+1, limit)
		}
	}
}
