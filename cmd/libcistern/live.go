//go:build linux && cgo

package main

import (
	"fmt"
	"sync/atomic"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/node/host"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/recording/identity"
)

// What cistern top sees of this process: a page that a goroutine keeps current from the moment when the first device comes
// into use (internal/live says how). No request knows of it. Where there can be no page, as where nothing may be kept in
// memory, the program goes on without.

// shown is the page of this process.
var shown atomic.Pointer[live.Page]

// show begins to publish, unless the settings forbid it.
func (l *library) show() {
	if l.Options().Top == config.SwitchOff {
		return
	}
	self, err := l.self()
	if err != nil {
		return
	}
	v := &view{library: l}
	page, err := live.Publish(self, v.gauges, v.details)
	if err == nil {
		shown.Store(page)
	}
}

// self describes this process.
func (l *library) self() (live.Process, error) {
	self, err := live.Of(0)
	self.Kind, self.Version, self.Conf = live.KindCistern, cistern.Version, l.Options().String()
	if id := identity.Of(getenv, "", 0); id.World > 1 {
		self.Place = live.Place{Job: id.Job, Rank: id.Rank, World: id.World}
	}
	return self, err
}

// view takes the figures for the page, and looks after the limit of free memory: it is the one thread of the library that comes
// round. It is its goroutine's alone.
type view struct {
	*library
	devices []*engine.Device // those of the last gauges
	figures memory.Gauges
}

// gauges appends the devices in use.
func (v *view) gauges(into []live.Device) (out []live.Device) {
	out = into
	defer v.panicked()
	v.devices = v.devices[:0]
	if current.Load() != v.library { // a bug has ended it, and its locks may be held
		if page := shown.Swap(nil); page != nil {
			go page.Close()
		}
		if c := v.library.node.Swap(nil); c != nil {
			go c.Close()
		}
		return out
	}
	for i := range v.library.devices {
		dev, ok := v.Started(cuda.Device(i))
		if !ok {
			continue
		}
		_, _ = engine.ReleaseUnused(dev) // an error that lasts is a request's
		v.devices = append(v.devices, dev)
		out = host.Figures(out, nodeDevice{dev}, &v.figures)
		x := &out[len(out)-1]
		x.Requests = dev.Views.Requests(&x.Slow)
	}
	return out
}

// panicked makes a panic what it is in a call: the library's end, and not the program's.
func (v *view) panicked() {
	if r := recover(); r != nil {
		broke(r)
	}
}

// details are the allocations by stack, tag and library of the devices of the last gauges.
func (v *view) details() (out []live.Details) {
	defer v.panicked()
	defer tidy() // it has made garbage
	for _, dev := range v.devices {
		var d live.Details
		for _, u := range dev.Views.TagUsage() {
			d.Tags = append(d.Tags, live.Use{Name: tagText(u.Tag), Blocks: u.Blocks, Bytes: u.Allocated})
		}
		for _, u := range libraryUsage(dev) {
			d.Libraries = append(d.Libraries, live.Use{Name: libraryText(uint8(u.library)), Blocks: int64(u.blocks), Bytes: uint64(u.allocated)})
		}
		for _, p := range v.poolsOf(dev) {
			d.Pools = append(d.Pools, live.Use{Name: poolText(p), Blocks: p.Blocks, Bytes: p.Allocated})
		}
		for i, u := range dev.Views.StackUsage() {
			switch {
			case i < mostStacks:
				d.Stacks = append(d.Stacks, live.Use{Name: stackLines(v.Stacks.Frames(u.Stack))})
			case i == mostStacks:
				d.Stacks = append(d.Stacks, live.Use{Name: live.MoreName})
			}
			use := &d.Stacks[len(d.Stacks)-1]
			use.Blocks, use.Bytes = use.Blocks+u.Blocks, use.Bytes+u.Allocated
		}
		out = append(out, d)
	}
	return out
}

// mostStacks is how many are named: that costs more than counting them.
const mostStacks = 100

// poolText is a pool by its name and, where that is not the device's own memory, what it is made of.
func poolText(p poolJSON) string {
	name := "default"
	if p.Pool != [2]uint64{} {
		name = fmt.Sprintf("{%d, %d}", p.Pool[0], p.Pool[1])
	}
	if p.Upstream != "" {
		name += " of " + p.Upstream
	}
	return name
}
