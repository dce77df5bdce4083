package engine

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// Device is the engine of one GPU. Its parts hold what it knows (state.go); requests, pauses and trims work on them.
type Device struct {
	gpu
	state *state
	catch atomic.Pointer[func(size uint64) uint32] // Allocator.catch

	Captures  *Captures
	History   *History
	Magazines *Magazines
	Peers     *Peers
	Views     *Views
}

// newDevice makes the engine of a device, which no other thread has yet. The caller holds Allocator.mu.
//
// +checklocks:a.mu
func newDevice(a *Allocator, id cuda.Device) (*Device, error) {
	state := health.New(a.drv, id)
	drv := state.Driver
	drv.Admit = a.admit
	info, err := drv.DeviceInfo(id)
	if err != nil {
		return nil, err
	}
	if err := drv.RetainContext(id); err != nil {
		return nil, err
	}
	d := &Device{gpu: gpu{a: a, id: id, info: info, opts: a.opts, health: state, drv: drv, timeline: timeline.New(state, a.gates, &a.turns),
		journal: journal.New(state, &a.thread)}}
	d.mu.Rank = lockrank.Device
	pools := &poolTable{gpu: &d.gpu, byID: map[memory.PoolID]*Pool{}}
	physical, err := newPhysical(&d.gpu, pools, a.upstream != nil)
	if err != nil {
		return nil, err
	}
	s := newState(&d.gpu, physical, pools, a.kept)
	d.state = s
	d.Captures = &Captures{gpu: &d.gpu, streams: s.streams, pools: pools, held: s.held, paused: s.paused, frees: s.frees, endings: s.endings}
	d.History = &History{gpu: &d.gpu, pools: pools, usage: s.usage}
	d.Magazines = &Magazines{gpu: &d.gpu, pools: pools}
	d.Peers = &Peers{gpu: &d.gpu, pools: pools, phys: physical, imports: s.imports}
	d.Views = &Views{gpu: &d.gpu, streams: s.streams, pools: pools, phys: physical, frees: s.frees, usage: s.usage, imports: s.imports}
	var up upstream
	if a.upstream != nil {
		if up, err = d.state.upstreams.openCommon(a.upstream); err != nil {
			return nil, err
		}
	}
	if d.pool0, err = d.addPool(memory.PoolID{}, config.PoolOptions{}, up); err != nil { // +checklocksignore: no other thread has the device
		return nil, err
	}
	if d.opts.Spill != config.SpillNone {
		r, err := defaultSpill(&d.gpu)
		if err != nil {
			return nil, fmt.Errorf("spill:%s: %w", d.opts.Spill, err)
		}
		u, err := d.state.upstreams.make(r)
		if err != nil {
			return nil, fmt.Errorf("spill:%s: %w", d.opts.Spill, err)
		}
		d.pool0.addSpill(u, false) // +checklocksignore: no other thread has the device
	}
	d.catch.Store(a.catch)
	d.journal.SetLimit(a.history)
	return d, nil
}

// defaultSpill is where the default pool spills to, as the options name it.
func defaultSpill(g *gpu) (resource.Resource, error) {
	switch g.opts.Spill {
	case config.SpillManaged:
		return resource.Managed(g.drv, g.id), nil
	case config.SpillPinned:
		return resource.Pinned(g.drv, g.id), nil
	default:
		return resource.HostNUMA(g.drv, g.id, -1)
	}
}

// ID is the device's ordinal.
func (g *gpu) ID() cuda.Device { return g.id }

// Info describes the device.
func (g *gpu) Info() cuda.DeviceInfo { return g.info }

// SetLimit bounds the physical memory that the device's pools may reserve together, in bytes; 0 is no limit. Memory beyond a
// new limit stays reserved until Trim.
func (d *Device) SetLimit(bytes uint64) {
	d.mu.Lock()
	d.state.phys.quota.SetLimit(quota.LimitOwn, bytes)
	d.mu.Unlock()
}

// Limit is the limit in force, 0 for none.
func (d *Device) Limit() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state.phys.quota.Limit
}

// close gives back all memory of the device; every block has been freed.
func (d *Device) close() error {
	if err := d.Trim(); err != nil {
		return err
	}
	if err := d.state.paused.end(); err != nil {
		return err
	}
	if err := dropAll(d); err != nil {
		return err
	}
	return d.state.upstreams.dropPrivate()
}

// dropAll gives addresses, events and upstreams back, when no memory is left.
func dropAll(d *Device) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.state.phys.quota.Total(); n != 0 {
		return fmt.Errorf("device %d: %d bytes are pinned by pools that were not released", d.id, n)
	}
	if d.state.phys.mem.Stale.Len() != 0 {
		return fmt.Errorf("device %d: %d old mappings still wait for the GPU", d.id, d.state.phys.mem.Stale.Len())
	}
	for _, s := range d.state.pools.heaps {
		if s == nil {
			continue
		}
		s.arena.Lock()
		err := s.backing.dropRanges()
		s.arena.Unlock()
		if err != nil {
			return err
		}
	}
	if d.state.segments.sources.single != nil {
		if _, err := d.state.segments.sources.single.Drain(); err != nil {
			return d.health.Failed(err)
		}
	}
	for _, p := range d.state.pools.byID { // that were not released, the default pool among them
		for _, x := range p.parts() {
			x.backing.closeOwn()
		}
	}
	if err := d.state.pools.closeUnused(); err != nil {
		return d.health.Failed(err)
	}
	for t := range d.state.streams.live() {
		t.timeline.Finish()
	}
	for _, w := range d.state.streams.gone { // which waits of other devices may have used since
		if t := w.Value(); t != nil {
			t.timeline.Finish()
		}
	}
	return d.timeline.DestroyEvents()
}

// closeUnused closes what was made to use upstreams; what fails is tried again.
//
// +checklocks:pt.gpu.mu
func (pt *poolTable) closeUnused() (first error) {
	pt.unused = slices.DeleteFunc(pt.unused, func(c resource.Closer) bool {
		err := c.Close()
		first = cmp.Or(first, err)
		return err == nil
	})
	return first
}
