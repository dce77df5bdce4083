package broker_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// script reads a conversation from the bytes of a fuzzer, which then varies what is said rather than how it is written.
type script struct{ b []byte }

func (s *script) byte() byte {
	if len(s.b) == 0 {
		return 0
	}
	c := s.b[0]
	s.b = s.b[1:]
	return c
}

// amount is often small, and sometimes anything.
func (s *script) amount() uint64 {
	switch c := s.byte(); {
	case c < 128:
		return uint64(c) << 25 // up to 4 GiB
	case c < 250:
		return uint64(c - 128)
	default:
		var b [8]byte
		for i := range b {
			b[i] = s.byte()
		}
		return binary.LittleEndian.Uint64(b[:])
	}
}

// bytes are the next message: one of the protocol's, or what the fuzzer likes.
func (s *script) message(uuid [16]byte) []byte {
	kind := s.byte()
	if kind >= 250 {
		n := min(int(s.byte()), len(s.b))
		raw := s.b[:n]
		s.b = s.b[n:]
		return raw
	}
	m := protocol.Message{Kind: protocol.Kind(kind % 35), ID: uint64(s.byte() % 8), Slot: uint64(s.byte() % 3), Bytes: s.amount()}
	switch m.Kind {
	case protocol.Join, protocol.Joined, protocol.Limit:
		m.Total, m.Limit = s.amount(), s.amount()
		if m.UUID = uuid; s.byte() >= 200 {
			m.UUID[15] = s.byte()
		}
	case protocol.Ask, protocol.Pause, protocol.Resume:
		m.Wait, m.Label = time.Duration(s.byte())*100*time.Microsecond, "x"
	case protocol.Gave:
		m.Status = protocol.Status{Reserved: s.amount(), Active: s.amount(), Cached: s.amount()}
	case protocol.GiveBack, protocol.Paused, protocol.Pausing:
		m.Keep, m.Hold = s.amount(), time.Duration(s.byte())*time.Millisecond
	case protocol.Set, protocol.Granted, protocol.Hello:
		m.Text, m.Label = "label=x weight=2", "x"
	}
	return m.Append(nil)
}

// soon waits for what a running program does by itself within a moment.
func soon(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !so(); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not come to be that %s", what)
		}
	}
}

// FuzzConversation: whatever three connections say in whatever order, the broker goes on, another client's memory in use stays, and
// once they have gone nothing is left of them.
func FuzzConversation(f *testing.F) {
	n := newNode(f, broker.Options{Answer: time.Millisecond}, 10*gib)
	page, err := live.PublishUnlisted(live.Process{}, func(into []live.Device) []live.Device {
		return append(into, live.Device{UUID: n.gpu.uuid, Total: n.gpu.total, Reserved: 3 * gib, Active: gib, Allocated: gib, Cached: 2 * gib})
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(page.Close)
	fd, err := page.Descriptor()
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { unix.Close(fd) })
	join := byte(protocol.Join)
	f.Add([]byte{0, join, 1, 0, 0, 127, 0, 0, 1, join, 1, 0, 0, 127, 0, 0, 0, byte(protocol.Ask), 1, 0, 64, 20, 1, byte(protocol.Gave), 1, 0, 64, 64, 0, 0, 0, byte(protocol.Done), 1, 0, 0})
	f.Add([]byte{0, join, 1, 0, 0, 127, 0, 0, 2, byte(protocol.Pause), 1, 0, 0, 9, 0, byte(protocol.Paused), 1, 0, 64, 0, 0, 2, byte(protocol.Devices), 1, 0, 0})
	f.Add([]byte{0, join, 1, 0, 0, 127, 0, 0, 1, join, 1, 0, 0, 127, 0, 0, 1, byte(protocol.Pausable), 0, 0, 64, 0, byte(protocol.Ask), 1, 0, 120, 20, 1, byte(protocol.Paused), 1, 0, 64, 0, 0, 0, byte(protocol.Done), 1, 0, 0})
	f.Add([]byte{3, 255, 20, 1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 4000 {
			return
		}
		var conns [3]*net.UnixConn // the last is an operator's
		for i := range conns {
			c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: n.socket, Net: "unixpacket"})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			conns[i] = c
			hello := protocol.Message{Kind: protocol.Hello, Version: "1", Label: "x"}
			if i < 2 {
				if _, _, err := c.WriteMsgUnix(hello.Append(nil), unix.UnixRights(fd), nil); err != nil {
					t.Fatal(err)
				}
			}
			go func() { // what it says is read, so that it can go on
				b := make([]byte, protocol.MaxMessage)
				for {
					if k, err := c.Read(b); err != nil || k == 0 {
						return
					}
				}
			}()
		}
		s := script{b}
		for len(s.b) > 0 {
			at := s.byte()
			if at >= 252 {
				conns[at%3].Close()
				continue
			}
			if m := s.message(n.gpu.uuid); len(m) > 0 {
				_, _ = conns[at%3].Write(m)
			}
		}
		for _, c := range conns {
			c.Close()
		}
		soon(t, "the clients are gone", func() bool { return len(n.b.Clients()) == 0 })
		soon(t, "nothing is granted, and no question is open", func() bool {
			for _, d := range n.b.Devices() {
				if d.Granted != 0 || d.Waiting != 0 || d.Clients != 0 {
					return false
				}
			}
			return true
		})
		if !n.b.Alive() {
			t.Error("the broker has ended")
		}
	})
}

// lamb is a host that counts what it is made to do. It lets the broker pause half of what it uses, and commands all.
type lamb struct {
	t *testing.T

	mu       sync.Mutex
	reserved uint64
	active   uint64
	paused   uint64
}

func (h *lamb) pause(n uint64) (uint64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n = min(n, h.active)
	h.reserved, h.active, h.paused = h.reserved-n, h.active-n, h.paused+n
	return n, nil
}

func (h *lamb) Pause(cuda.Device) (uint64, error)          { return h.pause(gib) }
func (h *lamb) PauseForOthers(cuda.Device) (uint64, error) { return h.pause(gib / 2) }
func (h *lamb) NoConsent(error) bool                       { return false }

func (h *lamb) Pausable(cuda.Device) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return min(gib/2, h.active)
}

func (h *lamb) Resume(cuda.Device) (uint64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.paused
	h.reserved, h.active, h.paused = h.reserved+n, h.active+n, 0
	return n, nil
}

func (h *lamb) GiveBack(_ cuda.Device, need, keep uint64) (uint64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := min(need, h.reserved-min(h.reserved, max(keep, h.active)))
	h.reserved -= n
	return n, nil
}

func (h *lamb) Status(cuda.Device) (protocol.Status, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return protocol.Status{Reserved: h.reserved, Active: h.active, Allocated: h.active, Cached: h.reserved - h.active}, true
}

func (h *lamb) Free(cuda.Device) (uint64, error) { return gib, nil }
func (h *lamb) SetMax(cuda.Device, uint64)       {}
func (h *lamb) Panicked(v any)                   { h.t.Error(v) }

// FuzzBroker: whatever a broker says, a client goes on as without it, gives no memory in use, and ends when it is told to.
func FuzzBroker(f *testing.F) {
	f.Add([]byte{byte(protocol.Joined), 0, 0, 0, 0, 0, 0, byte(protocol.GiveBack), 1, 0, 64, 64, 0, byte(protocol.Granted), 1, 0, 64})
	f.Add([]byte{byte(protocol.Joined), 0, 1, 0, 0, 0, 0, byte(protocol.Pausing), 1, 1, 0, 1, 0, byte(protocol.Limit), 1, 1, 0, 0, 64, 0})
	f.Add([]byte{byte(protocol.Joined), 0, 1, 0, 0, 0, 0, byte(protocol.Pausing), 1, 1, 0, 130, 0, byte(protocol.GiveBack), 2, 1, 0, 0, 0, byte(protocol.Pausing), 3, 1, 0, 0, 0})
	f.Add([]byte{byte(protocol.Welcome), 1, 1, 0, 255, 3, 1, 2, 3})
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { os.RemoveAll(dir) })
	page, err := live.PublishUnlisted(live.Process{}, func(into []live.Device) []live.Device { return into })
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(page.Close)
	segment := memoryOfGrants(f)
	uuid, tries := [16]byte{1}, 0
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 4000 {
			return
		}
		// A socket for each, as a client that lost its link may connect again.
		tries++
		path := filepath.Join(dir, fmt.Sprint(tries))
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		h := &lamb{t: t, reserved: 4 * gib, active: gib}
		c := client.New(client.Config{Socket: path, Host: h, Page: func() (*live.Page, error) { return page, nil }})
		conn, err := l.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		asked := make(chan struct{})
		go func() {
			defer close(asked)
			c.Join(0, uuid, 10*gib)
			granted, _ := c.Ask(0, gib, time.Millisecond)
			c.Admit(0, gib)
			c.Done(0, granted)
		}()
		_, _, _ = conn.WriteMsgUnix((&protocol.Message{Kind: protocol.Welcome, ID: 1}).Append(nil), unix.UnixRights(segment), nil)
		for s := (script{b}); len(s.b) > 0; {
			if m := s.message(uuid); len(m) > 0 {
				if _, err := conn.Write(m); err != nil {
					break
				}
			}
		}
		conn.Close()
		<-asked // each wait of a request is bounded
		c.Close()
		if h.reserved < h.active || h.active+h.paused != gib {
			t.Errorf("%d bytes are left, and %d are in use", h.reserved, h.active)
		}
		if !c.Admit(0, 1<<60) {
			t.Error("a client without a broker keeps memory for others")
		}
	})
}
