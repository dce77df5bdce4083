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

// join has the node's broker know that this process uses a device. The first one connects.
func (l *library) join(dev *engine.Device) {
	opts := l.Options()
	if opts.Node == config.NodeOff {
		return
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
	if c := l.node.Load(); c != nil {
		c.Join(dev.ID(), dev.Info().UUID, dev.Info().TotalBytes)
	}
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
