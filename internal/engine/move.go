package engine

import (
	"errors"
	"slices"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// The stages remap, grow and cross-stream reuse of a request for memory that is made of chunks: a place (place.go), chunks for it
// (sources.go, and new ones), and the mapping (remap.go).

// chunkRequest is a request at a stream heap that is made of chunks.
type chunkRequest struct {
	c *request
	h *chunkHeap // of the request's stream heap
}

// errNarrow is that free chunks are larger than the room for them.
var errNarrow = errors.New("free chunks are larger than the room for them")

// obtain makes the request fit by mapping memory into the stream heap: free chunks from elsewhere, and new ones, as the stages
// allow; with pressure also those that are better left. It returns 0 and no error when there is not enough memory. Between its
// attempts only the stream heap's arena is locked, as finding a place locks others.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) obtain(stages memory.Stages, pressure bool) (heap.ID, error) {
	if stages == 0 {
		return 0, nil
	}
	for spare := uint64(0); ; {
		at, err := m.place(spare)
		if err != nil || at.unmapped == 0 {
			return 0, err
		}
		id, err := m.fill(at, stages, pressure)
		switch {
		case err == errNarrow && spare == 0:
			spare = m.c.d.opts.ChunkMax // what is free does not go where the least would do, but may elsewhere
		case err == errNarrow:
			return 0, nil
		case timeline.Unordered(err) && !m.c.alone:
			// A capture that was not announced is in the way: only memory that the host knows to be free will do.
			m.c.alone = true
		default:
			return id, err
		}
	}
}

// fill is one attempt to map memory at a place: errNarrow where a roomier one might do.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) fill(at place, stages memory.Stages, pressure bool) (heap.ID, error) {
	c, d := m.c, m.c.d
	defer d.state.policy.plan.letGo()
	c.steps.log.start()
	d.state.policy.throttle.worked(&c.s.worked, c.s.workedNow())
	have, grown, err := m.supply(at, stages, pressure)
	if err != nil || have < at.need {
		return 0, err
	}
	block, mapped, stamp, err := m.move(at, have)
	if !grown {
		d.state.policy.throttle.moved(len(d.state.policy.plan.sources))
	}
	if err != nil {
		c.waits = c.waits[:0]   // for what is not moved after all
		if isOutOfMemory(err) { // the driver may lack memory for page tables
			c.steps.log.oom, c.steps.log.of(memory.StageGrow).err = err, err
			return 0, nil
		}
		return 0, err
	}
	c.met = memory.StageRemap
	if grown {
		c.met = memory.StageGrow
	} else if slices.ContainsFunc(d.state.policy.plan.sources, func(x source) bool { return x.heap != nil && x.heap.s.pool != c.s.pool }) {
		c.met = memory.StageLend
	}
	return m.takeMoved(block, mapped, stamp)
}

// supply chooses free chunks for a place, and gets new ones for what is missing then, which grown reports. Where that is not
// enough, errNarrow says that a roomier place might do.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) supply(at place, stages memory.Stages, pressure bool) (have uint64, grown bool, err error) {
	c, d, p := m.c, m.c.d, &m.c.d.state.policy.plan
	p.sources, p.narrow = p.sources[:0], false
	if stages&memory.StageGrow != 0 && !pressure && d.state.policy.growFirst(at.need) {
		stages = memory.StageGrow
	}
	if d.state.observers.onUnmap != nil {
		stages &^= memory.StageRemap | memory.StageLend // but spare chunks that are mapped nowhere
	}
	if stages&(memory.StageRemap|memory.StageLend) != 0 || d.state.observers.onUnmap != nil {
		for _, r := range [2]memory.Stages{memory.StageRemap, memory.StageLend} {
			if stages&r != 0 {
				c.steps.log.try(r)
			}
		}
		have = m.gather(at, stages, pressure)
	}
	if have >= at.need {
		return have, false, nil
	}
	if stages&memory.StageGrow != 0 {
		c.steps.log.try(memory.StageGrow)
		have, err = m.create(at.need-have, have)
	}
	if err == nil && have < at.need && p.narrow {
		err = errNarrow
	}
	return have, true, err
}

// takeMoved hands out of the block that memory was mapped for, or of any where observers are notified of the memory first.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) takeMoved(block heap.ID, mapped run, stamp uint64) (heap.ID, error) {
	c, d, s, p := m.c, m.c.d, m.h.s, &m.c.d.state.policy.plan
	s.blocks.Fit.MinRest = d.state.policy.minRest(s.class)
	if d.state.observers.onMap != nil {
		pieces := make([]run, 0, len(p.sources))
		addr := mapped.addr
		for _, x := range p.sources {
			pieces = append(pieces, run{addr, x.size})
			addr += x.size
		}
		p.letGo()
		d.state.phys.arriving = append(d.state.phys.arriving, mapped)
		defer func() {
			i := slices.Index(d.state.phys.arriving, mapped)
			d.state.phys.arriving = slices.Delete(d.state.phys.arriving, i, i+1)
		}()
		c.publish(block, mapped, stamp, pieces)
		c.waits = c.waits[:0]
		return c.take(s)
	}
	s.gauges.SetFree(s.blocks.FreeBlocks, int64(mapped.size))
	if c.align != 0 {
		return c.take(s)
	}
	s.blocks.TakeBlock(block, c.n, c.size)
	return block, nil
}

// create gets new chunks of missing bytes together, in addition to those chosen, and returns the bytes of all. Where there is
// no memory, or the driver fails with another error than that, what was got until then stays as spare chunks.
//
// +checklocks:m.c.d.gpu.mu
func (m *chunkRequest) create(missing, have uint64) (uint64, error) {
	c, d, p, s, before := m.c, m.c.d, &m.c.d.state.policy.plan, m.c.steps.log.of(memory.StageGrow), have
	s.stop, c.steps.short = stopNot, 0
	if !d.state.phys.quota.MayHold(missing) {
		s.stop = stopLimit
		return have, nil
	}
	if d.state.phys.lacks(missing) {
		c.steps.log.oom, s.stop, c.steps.short = cuda.ErrOutOfMemory, stopLacks, missing
		return have, nil
	}
	for missing > 0 {
		size := d.state.policy.chunkSize(c.s.class, c.n, missing)
		id, err := d.state.phys.mem.Create(size)
		if isOutOfMemory(err) {
			c.steps.log.oom, s.err, c.steps.short = err, err, missing
			c.steps.log.lap(memory.StageGrow, have-before)
			return have, nil
		} else if err != nil {
			return have, err
		}
		d.state.phys.counts.DeviceAllocs++
		d.state.phys.mem.AddSpare(id, -1, 0)
		p.sources = append(p.sources, source{chunk: id, size: size})
		missing -= size
		have += size
	}
	return have, nil
}

// lacks reports whether the device is known not to have that much memory, so that a request which cannot be met does not
// take all there is from other processes first. Asking the driver costs 3 us, so it is asked about large amounts only.
//
// +checklocks:ph.gpu.mu
func (ph *physical) lacks(bytes uint64) bool {
	if ph.quota.Reserved+bytes > ph.gpu.info.TotalBytes {
		return true
	}
	if bytes < askedFrom {
		return false
	}
	free, _, err := ph.gpu.drv.MemInfo(ph.gpu.id)
	return err == nil && free < bytes
}

const askedFrom = 256 << 20
