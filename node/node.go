// Package node connects an allocator of a Go program to the broker of its machine (cistern serve).
//
//	a, err := cistern.New(drv, cistern.Options{})
//	n, err := node.Connect(a)
//	defer n.Close()
//	bytes, err := n.Available(0)
//
// Requests that would fail get memory that other processes cache and do not use. This process releases what it does not use when
// others need it, from a goroutine. The C library and the Python package connect by themselves.
package node

import (
	"fmt"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/host"
	"github.com/cistern-gpu/cistern/memory"
)

// Connection is an allocator's connection to a broker.
type Connection struct {
	a        *cistern.Allocator
	page     *live.Page
	client   *client.Client // nil with NodeOff
	consents host.Consents
}

// Connect connects the allocator to the broker that Options.Node names; with NodeOff it does nothing. A broker that is not there yet,
// or that ends, is connected to later; until then the allocator works as without. The process also publishes a status segment,
// which cistern top shows. A device takes part once it is in use and was named to Join; those in use now take part at once.
//
// Connect fails where the process cannot publish, as on systems other than Linux.
func Connect(a *cistern.Allocator) (*Connection, error) {
	n, o := &Connection{a: a}, a.Options()
	if o.Node == config.NodeOff {
		return n, nil
	}
	self, err := live.Of(0)
	if err != nil {
		return nil, fmt.Errorf("connecting to the node's broker: %w", err)
	}
	self.Kind, self.Version, self.Conf = live.KindCistern, cistern.Version, o.String()
	var figures memory.Gauges
	n.page, err = live.Publish(self, func(into []live.Device) []live.Device {
		for d := range a.DeviceCount() {
			if dev, ok := a.Started(cuda.Device(d)); ok {
				into = host.Figures(into, dev, &figures)
			}
		}
		return into
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("connecting to the node's broker: %w", err)
	}
	cfg := client.Config{Label: o.NodeLabel, Version: cistern.Version, Headroom: o.Headroom, Page: func() (*live.Page, error) { return n.page, nil },
		Host: &host.Host{Driver: a.Driver(), Find: n.find, Limit: a.SetNodeLimit, Consents: &n.consents}}
	if o.Node != config.NodeAuto {
		cfg.Socket = o.Node
	}
	n.client = client.New(cfg)
	n.consents.OnChange(n.client.Declare)
	a.SetNode(n.client)
	for d := range a.DeviceCount() {
		n.Join(cuda.Device(d))
	}
	return n, nil
}

func (n *Connection) find(dev cuda.Device) (host.Device, bool) { return n.a.Started(dev) }

// Join has a device take part, if it is in use. It waits a moment for the broker's answer.
func (n *Connection) Join(dev cuda.Device) {
	if d, ok := n.a.Started(dev); ok && n.client != nil {
		n.client.Join(dev, d.Info().UUID, d.Info().TotalBytes)
	}
}

// Available returns how many bytes requests can get of a device now beside what is allocated: what is cached, what is free in the
// driver and not granted to other processes, and what those would release, within the limits. One request need not get all of it,
// and others use the device too. The device comes into use.
func (n *Connection) Available(dev cuda.Device) (uint64, error) {
	d, err := n.a.Device(dev)
	if err != nil {
		return 0, err
	}
	n.Join(dev)
	free, _, err := n.a.Driver().MemInfo(dev)
	if err != nil {
		return 0, err
	}
	return host.Available(d, free, n.client), nil
}

// AllowPause lets operators (cistern node pause) pause the selected memory of a device, which comes into use, until DenyPause. The
// program does not use the memory meanwhile. It is paused and resumed as by Device.Pause and Device.Resume, in a goroutine of the
// connection, also what is selected only later. One consent for a device stands at a time. With NodeOff nothing is paused.
//
// AllowPause fails if a consent stands, or if memory that is still paused, as DenyPause failed, cannot be resumed.
func (n *Connection) AllowPause(dev cuda.Device, s cistern.Selection, o cistern.PauseOptions) error {
	to, err := n.consent(dev, s, o)
	if err != nil {
		return err
	}
	return n.consents.Allow(dev, to)
}

// AllowAutoPause is AllowPause, and lets the broker pause the memory by itself too: for a request of another process that the
// unused memory of all processes cannot meet. It stays paused until an operator resumes it, or DenyPause.
func (n *Connection) AllowAutoPause(dev cuda.Device, s cistern.Selection, o cistern.PauseOptions) error {
	to, err := n.consent(dev, s, o)
	if err != nil {
		return err
	}
	d, err := n.a.Device(dev)
	if err != nil {
		return err
	}
	to.Pausable = func() uint64 { return d.Pausable(s, o) }
	return n.consents.Allow(dev, to)
}

// consent is one to a pause by command.
func (n *Connection) consent(dev cuda.Device, s cistern.Selection, o cistern.PauseOptions) (host.Consent, error) {
	d, err := n.a.Device(dev)
	if err != nil {
		return host.Consent{}, err
	}
	n.Join(dev)
	resume := func() (uint64, error) {
		r, err := d.Resume(s)
		return r.Physical, err
	}
	return host.Consent{
		Pause: func() (uint64, error) {
			r, err := d.Pause(s, o)
			return r.Physical, err
		},
		Resume: resume,
		Return: func() error {
			_, err := resume()
			return err
		},
	}, nil
}

// DenyPause ends the consent for a device, and resumes what operators paused. It waits for a pause that is under way, and works after
// Close too. After an error, as the OutOfMemoryError of Device.Resume, the memory stays paused, and DenyPause may be called again.
func (n *Connection) DenyPause(dev cuda.Device) error { return n.consents.Deny(dev) }

// Close ends the connection. What operators paused stays so until DenyPause.
func (n *Connection) Close() {
	if n.client == nil {
		return
	}
	n.a.SetNode(nil)
	n.client.Close()
	n.page.Close()
}
