package top

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// listen is the socket of a broker of the test's.
func listen(t *testing.T) (*net.UnixListener, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, path
}

// The machine has what the broker says; one that is not there is no problem, one that is stopped is, and no reader waits for it.
func TestNode(t *testing.T) {
	l, path := listen(t)
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			for b := make([]byte, protocol.MaxMessage); ; {
				n, err := c.Read(b)
				if err != nil {
					break
				}
				m, _ := protocol.Parse(b[:n])
				item := `{"device":"GPU-1","clients":3,"granted_bytes":7,"pressure_s":1.5,"refaults":2}`
				if m.Kind == protocol.List {
					item = `{"device":"GPU-1","pid":17}`
				}
				for _, a := range []protocol.Message{{Kind: protocol.Item, ID: m.ID, Text: item}, {Kind: protocol.End, ID: m.ID}} {
					_, _ = c.Write(a.Append(nil))
				}
			}
			c.Close()
		}
	}()
	b := broker{sockets: []string{path}}
	var look Look
	b.ask()
	b.wait(t.Context(), &look)
	if n := look.Node; n == nil || len(n.Devices) != 1 || n.Devices[0].Clients != 3 || n.Devices[0].Load.Pressure != 1.5 || n.Devices[0].PressureKnown ||
		len(n.Clients) != 1 || n.Clients[0].PID != 17 || n.Socket != path || len(look.Problems) != 0 {
		t.Errorf("%+v", look)
	}

	for _, sockets := range [][]string{nil, {filepath.Join(t.TempDir(), "none")}} {
		b, look := broker{sockets: sockets}, Look{}
		b.ask()
		b.wait(t.Context(), &look)
		if look.Node != nil || len(look.Problems) != 0 {
			t.Errorf("without a broker: %+v", look)
		}
	}

	_, silent := listen(t)
	b = broker{sockets: []string{silent}}
	for range 2 {
		look = Look{}
		b.ask()
		began := time.Now()
		b.wait(t.Context(), &look)
		if look.Node != nil || len(look.Problems) != 1 || !strings.Contains(look.Problems[0], "has not answered for") || time.Since(began) > 30*time.Second {
			t.Errorf("%v, %+v", time.Since(began), look)
		}
	}
}

// The pressure is that between two looks, and not known across a restart of the broker.
func TestPressure(t *testing.T) {
	var s State
	at := time.Unix(1000, 0)
	for i, c := range []struct {
		seconds float64
		want    float64
		known   bool
	}{{5, 0, false}, {5.5, 0.25, true}, {5.5, 0, true}, {9, 1, true}, {1, 0, false}, {2, 0.5, true}} {
		n := &Node{Devices: []NodeDevice{{Device: protocol.Device{Device: "GPU-1", Load: protocol.Load{Pressure: c.seconds}}}}}
		at = at.Add(2 * time.Second)
		s.Add(Look{At: at, Node: n})
		if d := s.Look().Node.Devices[0]; d.Pressure != c.want || d.PressureKnown != c.known {
			t.Errorf("%d: %v %v, want %v", i, d.Pressure, d.PressureKnown, c.want)
		}
	}
}
