package top

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Node is what the node's broker says.
type Node struct {
	Socket  string
	Devices []NodeDevice
	Clients []protocol.Entry // that the user may see
}

// NodeDevice is what the broker says of a device.
type NodeDevice struct {
	protocol.Device
	// Pressure is the share of the time between the last two looks in which a request waited for memory of other processes.
	Pressure      float64
	PressureKnown bool
}

// nodeTimeout is how long a look waits for the broker.
const nodeTimeout = time.Second

// broker asks the node's broker in another goroutine, as one that is stopped does not answer.
type broker struct {
	sockets []string
	answer  chan nodeAnswer // nil while it is not asked
	asked   time.Time
}

type nodeAnswer struct {
	node *Node
	err  error
}

// ask has the broker asked, unless it still is.
func (b *broker) ask() {
	if b.answer != nil || len(b.sockets) == 0 {
		return
	}
	answer, sockets := make(chan nodeAnswer, 1), b.sockets
	b.answer, b.asked = answer, time.Now()
	go func() {
		n, err := askNode(sockets)
		answer <- nodeAnswer{n, err}
	}()
}

func askNode(sockets []string) (*Node, error) {
	c, err := control.Dial(sockets...)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	n := &Node{Socket: c.Path()}
	devices, err := c.Devices()
	if err == nil {
		n.Clients, err = c.List()
	}
	for _, d := range devices {
		n.Devices = append(n.Devices, NodeDevice{Device: d})
	}
	return n, err
}

// wait takes the answer if it comes in time. Where no broker runs nothing is said.
func (b *broker) wait(ctx context.Context, l *Look) {
	if b.answer == nil {
		return
	}
	wait, cancel := context.WithDeadline(ctx, b.asked.Add(nodeTimeout))
	defer cancel()
	select {
	case a := <-b.answer:
		b.answer = nil
		switch {
		case a.err == nil:
			l.Node = a.node
		case !errors.Is(a.err, fs.ErrNotExist):
			l.Problems = append(l.Problems, a.err.Error())
		}
	case <-wait.Done():
		l.Problems = append(l.Problems, fmt.Sprintf("the node's broker has not answered for %v", time.Since(b.asked).Round(time.Second)))
	}
}

// pressure is what the broker counted at a look.
type pressure struct {
	at      time.Time
	seconds float64
}

// addNode remembers the broker's counts from one look to the next.
func (s *State) addNode(n *Node, at time.Time) {
	before := s.pressures
	s.pressures = map[string]pressure{}
	if n == nil {
		return
	}
	for i := range n.Devices {
		d := &n.Devices[i]
		now := pressure{at, d.Load.Pressure}
		s.pressures[d.Device.Device] = now
		// A count that falls is another broker's.
		if was, known := before[d.Device.Device]; known && now.at.After(was.at) && now.seconds >= was.seconds {
			d.Pressure, d.PressureKnown = min(1, (now.seconds-was.seconds)/now.at.Sub(was.at).Seconds()), true
		}
	}
}
