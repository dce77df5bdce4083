//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/host"
	"github.com/cistern-gpu/cistern/memory"
)

// join has the node's broker know that this process uses a device.
func (l *library) join(dev *engine.Device) {
	if c := l.connect(); c != nil {
		c.Join(dev.ID(), dev.Info().UUID, dev.Info().TotalBytes)
	}
}

// contextBytes is what a CUDA context takes at most, with what its libraries load at once: 500 to 670 MiB on an H100.
const contextBytes = 768 << 20

// makeRoom starts a device on which there is no memory for a context, once other processes have released what they do not use. err is
// why it did not start.
func (l *library) makeRoom(id cuda.Device, err error) (*engine.Device, error) {
	info, failed := l.Driver().DeviceInfo(id)
	l.showing.Do(l.show)
	c := l.connect()
	if c == nil || failed != nil {
		return nil, err
	}
	c.Join(id, info.UUID, info.TotalBytes)
	granted, _ := c.Ask(id, min(contextBytes, info.TotalBytes/64), max(l.Options().NodeWait, 0))
	if granted == 0 {
		return nil, err
	}
	defer c.Done(id, granted)
	return l.Device(id)
}

// connect is the connection to the broker, made by the first call; nil where there is to be none.
func (l *library) connect() *client.Client {
	opts := l.Options()
	if opts.Node == config.NodeOff {
		return nil
	}
	l.connecting.Do(func() {
		cfg := client.Config{Label: opts.NodeLabel, Version: cistern.Version, Page: l.statusPage, Guard: shareGuard{}, Headroom: opts.Headroom,
			Host: &host.Host{Driver: l.Driver(), Find: l.nodeDevice, Limit: l.SetNodeLimit, Consents: &l.consents, Panic: func(v any) { broke(v) }}}
		if opts.Node != config.NodeAuto {
			cfg.Socket = opts.Node
		}
		c := client.New(cfg)
		l.consents.OnChange(c.Declare)
		l.node.Store(c)
		l.SetNode(c)
	})
	return l.node.Load()
}

// nodeDevice is a device for the broker's client.
type nodeDevice struct{ *engine.Device }

// Gauges are the device's figures.
func (d nodeDevice) Gauges(g *memory.Gauges) { d.Views.Gauges(g) }

// nodeDevice finds a device that is in use. After a bug has ended the library its locks may be held, and there is none.
func (l *library) nodeDevice(dev cuda.Device) (host.Device, bool) {
	d, ok := l.Started(dev)
	return nodeDevice{d}, ok && current.Load() == l
}

// statusPage is the page that cistern top sees, or one for the broker alone where there is none.
func (l *library) statusPage() (*live.Page, error) {
	if page := shown.Load(); page != nil {
		return page, nil
	}
	self, err := l.self()
	if err != nil {
		return nil, err
	}
	page, err := live.PublishUnlisted(self, (&view{library: l}).gauges)
	if err == nil {
		shown.Store(page)
	}
	return page, err
}

//export coreNodeAvailable
func coreNodeAvailable(d C.int, bytes *C.uint64_t) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	free, _, err := l.Driver().MemInfo(cuda.Device(d))
	if err != nil {
		return fail(err)
	}
	*bytes = C.uint64_t(host.Available(nodeDevice{dev}, free, l.node.Load()))
	return C.CISTERN_OK
}
