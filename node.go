package cistern

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/host"
	"github.com/cistern-gpu/cistern/memory"
)

// ErrNodeConnected is the error of a second ConnectNode.
var ErrNodeConnected = errors.New("the allocator is connected to the node's broker already")

// nodeConnection is an allocator's connection to the broker.
type nodeConnection struct {
	mu     sync.Mutex // held to change what follows
	client atomic.Pointer[client.Client]
	page   *live.Page // +checklocks:mu
}

// ConnectNode connects the allocator to the broker of the node (cistern serve): requests that would fail get memory that other
// processes cache and do not use, and this process releases what it does not use when others need it, from a goroutine. The broker
// is that of Options.Node: NodeAuto, or the path of its socket; with NodeOff nothing is done. One that is not there yet, or that
// ends, is connected to later. The process also publishes a status segment, which cistern top shows. CloseNode ends all of that.
//
// ConnectNode fails on systems other than Linux, and where the process cannot publish.
func (a *Allocator) ConnectNode() error {
	o := a.engine.Options()
	if o.Node == NodeOff {
		return nil
	}
	n := &a.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client.Load() != nil {
		return ErrNodeConnected
	}
	self, err := live.Of(0)
	if err != nil {
		return fmt.Errorf("connecting to the node's broker: %w", err)
	}
	self.Kind, self.Version, self.Conf = live.KindCistern, Version, o.String()
	var figures memory.Gauges
	if n.page, err = live.Publish(self, func(into []live.Device) []live.Device { return a.gauges(into, &figures) }, nil); err != nil {
		return fmt.Errorf("connecting to the node's broker: %w", err)
	}
	page := n.page
	cfg := client.Config{Label: o.NodeLabel, Version: Version, Page: func() (*live.Page, error) { return page, nil }, Host: &host.Host{Allocator: a.engine}}
	if o.Node != NodeAuto {
		cfg.Socket = o.Node
	}
	c := client.New(cfg)
	n.client.Store(c)
	a.engine.SetNode(c)
	for d := range a.engine.DeviceCount() {
		if dev, ok := a.engine.Started(cuda.Device(d)); ok {
			c.Join(dev.ID(), dev.Info().UUID, dev.Info().TotalBytes)
		}
	}
	return nil
}

// CloseNode ends what ConnectNode began.
func (a *Allocator) CloseNode() {
	n := &a.node
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.client.Swap(nil)
	if c == nil {
		return
	}
	a.engine.SetNode(nil)
	c.Close()
	n.page.Close()
}

// gauges appends the figures of the devices in use.
func (a *Allocator) gauges(into []live.Device, figures *memory.Gauges) []live.Device {
	for d := range a.engine.DeviceCount() {
		if dev, ok := a.engine.Started(cuda.Device(d)); ok {
			into = host.Gauges(into, dev, figures, a.node.client.Load())
		}
	}
	return into
}

// Available returns how many bytes requests can get of a device now beside what is allocated: what is cached, what is free in the driver and not
// granted to other processes, and what those would release, if the allocator is connected to the node's broker; within the
// limits. One request need not get all of it, and others use the device too.
func (a *Allocator) Available(d cuda.Device) (uint64, error) {
	dev, err := a.Device(d)
	if err != nil {
		return 0, err
	}
	free, _, err := a.Driver().MemInfo(d)
	if err != nil {
		return 0, err
	}
	return host.Available(dev.engine, free, a.node.client.Load()), nil
}
