package broker_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// pauser is a member that lets the node pause its devices, which takes a while.
type pauser struct{ *member }

func (p pauser) Pause(dev cuda.Device) (uint64, error) {
	time.Sleep(20 * time.Millisecond) // so that a second device asked for meanwhile finds it busy
	return uint64(1+dev) * gib, nil
}

func (p pauser) Resume(dev cuda.Device) (uint64, error) { return p.Pause(dev) }

func (p pauser) PauseForOthers(dev cuda.Device) (uint64, error) { return p.Pause(dev) }
func (pauser) Pausable(cuda.Device) uint64                      { return 0 }
func (pauser) NoConsent(error) bool                             { return false }

// operator is a connection of an operator.
func (n *node) operator(t *testing.T) *control.Conn {
	t.Helper()
	c, err := control.Dial(n.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// A process with two devices pauses both, and resumes both.
func TestPauseTwoDevices(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	m := &member{t: t, gpu: n.gpu}
	page := sync.OnceValues(func() (*live.Page, error) { return live.PublishUnlisted(live.Process{}, m.gauges) })
	c := client.New(client.Config{Socket: n.socket, Label: "two", Version: "1", Host: pauser{m}, Page: page})
	t.Cleanup(func() {
		c.Close()
		if p, err := page(); err == nil {
			p.Close()
		}
	})
	for dev := range cuda.Device(2) {
		c.Join(dev, [16]byte{byte(1 + dev)}, 10*gib)
		eventually(t, "the device is joined", func() bool {
			_, _, known := c.Available(dev)
			return known
		})
	}
	op := n.operator(t)
	for name, do := range map[string]func(string, time.Duration) ([]protocol.PauseResult, error){"pause": op.Pause, "resume": op.Resume} {
		did, err := do("two", time.Minute)
		if err != nil || len(did) != 2 {
			t.Fatal(name, did, err)
		}
		for i, r := range did {
			if r.Error != "" || r.Bytes != uint64(i+1)*gib {
				t.Errorf("%s: %+v", name, r)
			}
		}
	}
}

// The longest error of a client is listed, cut, and does not break the list.
func TestPauseLongError(t *testing.T) {
	t.Parallel()
	n := newNode(t, broker.Options{}, 10*gib)
	conn := friend(t, n)
	if _, err := conn.Write((&protocol.Message{Kind: protocol.Join, ID: 1, UUID: n.gpu.uuid, Total: 10 * gib}).Append(nil)); err != nil {
		t.Fatal(err)
	}
	go func() {
		b := make([]byte, protocol.MaxMessage)
		for {
			k, err := conn.Read(b)
			if err != nil || k == 0 {
				return
			}
			if m, _ := protocol.Parse(b[:k]); m.Kind == protocol.Pausing {
				_, _ = conn.Write((&protocol.Message{Kind: protocol.Paused, ID: m.ID, Slot: m.Slot, Text: strings.Repeat("<", 2000)}).Append(nil))
			}
		}
	}()
	eventually(t, "it is a client", func() bool { return len(n.entries()) == 1 })
	did, err := n.operator(t).Pause("friend*", time.Minute)
	if err != nil || len(did) != 1 || !strings.HasPrefix(did[0].Error, "<<<") {
		t.Fatal(did, err)
	}
}
