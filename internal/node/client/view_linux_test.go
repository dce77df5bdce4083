package client

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/grants"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// nothing is a host that has no memory.
type nothing struct{ t *testing.T }

func (nothing) GiveBack(cuda.Device, uint64, uint64) (uint64, error) { return 0, nil }
func (nothing) Status(cuda.Device) (protocol.Status, bool)           { return protocol.Status{}, true }
func (nothing) Free(cuda.Device) (uint64, error)                     { return 1 << 30, nil }
func (nothing) SetMax(cuda.Device, uint64)                           {}
func (h nothing) Panicked(v any)                                     { h.t.Error(v) }

// views is how often the process has a file mapped that it cannot write.
func views(t *testing.T, fd int) (n int) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if f := strings.Fields(line); len(f) > 4 && f[1] == "r--s" && f[4] == fmt.Sprint(st.Ino) && strings.Contains(line, "cistern-grants") {
			n++
		}
	}
	return n
}

// A client that loses its broker keeps nothing of it, however often that happens.
func TestViewsAreUnmapped(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "node") // a socket's path has to be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	page, err := live.PublishUnlisted(live.Process{}, func(into []live.Device) []live.Device { return into })
	if err != nil {
		t.Fatal(err)
	}
	defer page.Close()
	c := New(Config{Socket: path, Host: nothing{t}, Page: func() (*live.Page, error) { return page, nil }})
	defer c.Close()
	soon := func(what string, so func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !so(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("it did not come to be that %s", what)
			}
		}
	}
	for range 2 {
		s, err := grants.New()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		conn, err := l.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := conn.WriteMsgUnix((&protocol.Message{Kind: protocol.Welcome, ID: 1}).Append(nil), unix.UnixRights(s.Descriptor()), nil); err != nil {
			t.Fatal(err)
		}
		soon("it is connected", func() bool { on, _ := c.Connected(); return on })
		if n := views(t, s.Descriptor()); n != 1 {
			t.Errorf("the grants are mapped %d times", n)
		}
		conn.Close()
		soon("the grants are not mapped any more", func() bool { return views(t, s.Descriptor()) == 0 })
	}
}
