package engine

import (
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/memory"
)

// segmentUnit is the unit of segment sizes in bytes.
const segmentUnit = 2 << 20

// NewPool creates a private pool of the memory that the options say. An upstream is opened to the peers that the device
// has.
func (d *Device) NewPool(id memory.PoolID, o config.PoolOptions) (*Pool, error) {
	u, err := d.state.upstreams.make(o.Upstream)
	if err != nil {
		return nil, fmt.Errorf("pool {%d, %d}: %w", id[0], id[1], err)
	}
	spill, err := d.state.upstreams.make(o.Spill)
	if err != nil {
		u.drop(d)
		return nil, fmt.Errorf("pool {%d, %d}: spill: %w", id[0], id[1], err)
	}
	p, err := d.newPool(id, o, u, spill)
	if err == nil {
		return p, nil
	}
	if p == nil { // else they are its own, and end with it
		u.drop(d)
		spill.drop(d)
	}
	return nil, err
}

// newPool makes a pool that has ended where it returns an error as well.
func (d *Device) newPool(id memory.PoolID, o config.PoolOptions, u, spill upstream) (*Pool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state.pools.byID[id] != nil {
		return nil, fmt.Errorf("device %d: pool {%d, %d} exists", d.id, id[0], id[1])
	}
	p, err := d.addPool(id, o, u)
	if err != nil {
		return nil, err
	}
	if spill.from != nil {
		p.addSpill(spill, o.SegmentPerBlock)
	}
	for _, x := range slices.Backward(p.parts()) {
		if err := x.backing.openToPeers(); err != nil {
			p.onEnd = nil
			d.state.endings.endPool(p)
			return p, fmt.Errorf("pool {%d, %d}: %w", id[0], id[1], err)
		}
	}
	return p, nil
}

// addPool makes a pool. The caller holds Device.mu, or is the first to have the device.
//
// +checklocks:d.gpu.mu
func (d *Device) addPool(id memory.PoolID, o config.PoolOptions, u upstream) (*Pool, error) {
	p := &Pool{dev: d, id: id, onEnd: o.OnEnd, limit: o.Limit}
	b, err := backingFor(p, o, u)
	if err != nil {
		return nil, err
	}
	p.setBacking(b)
	if o.OnOutOfMemory != nil {
		p.ask = &callback{f: o.OnOutOfMemory}
	}
	d.state.pools.byID[id] = p
	d.state.pools.enter(p)
	return p, nil
}

func (p *Pool) setBacking(b backing) { p.backing, p.mask = b, b.unit()-1 }

// addSpill gives the pool a hidden one of segments of the spill's, under the same name.
//
// +checklocks:p.dev.gpu.mu
func (p *Pool) addSpill(u upstream, noSplit bool) {
	q := &Pool{dev: p.dev, id: p.id, parent: p}
	q.setBacking(newUserSegments(q, noSplit, u))
	p.dev.state.pools.enter(q)
	p.spill = q
}

// virtual finds out, once, which physical memory the device has for mapping.
//
// +checklocks:ph.gpu.mu
func (ph *physical) virtual() error {
	if !ph.gpu.info.VMM {
		return fmt.Errorf("device %d (%s) has no virtual memory management: use backend:malloc", ph.gpu.id, ph.gpu.info.Name)
	}
	if ph.probed {
		return nil
	}
	handles, err := ph.gpu.drv.ProbeHandles(ph.gpu.id)
	if err != nil {
		return ph.gpu.health.Failed(err)
	}
	ph.probed, ph.prop = true, cuda.MemProp{Device: ph.gpu.id, Handles: handles, RDMA: ph.gpu.info.RDMA}
	return nil
}
