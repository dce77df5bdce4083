package engine

import (
	"cmp"

	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// How segments that are free go back to where they came from.

// freeSegment is a segment that is wholly free, and out of reach until it was given back or cached again.
type freeSegment struct {
	of    *segmentHeap
	first heap.ID
	run
	stamp uint64
}

// release gives the segments that are wholly free back to where they came from, of the pools chosen and not pinned: all of them
// if it may wait, else those that the GPU is known to be done with. The caller holds Device.mu and nothing else; it is let go
// while the GPU is waited for and users' upstreams are called. The segments are out of reach meanwhile. It reports whether any
// went.
//
// +checklocks:sg.gpu.mu
func (sg *segments) release(chosen func(*Pool) bool, mayWait bool) (bool, error) {
	if !sg.sources.any {
		return false, nil
	}
	sg.frees.collect(nil, false)
	if sg.phys.offload.Unsure() {
		return false, nil // Trim finds out
	}
	failed := sg.releaseEmpty()
	any, err := sg.releaseSome(chosen, func(uint64) bool { return true }, mayWait)
	return any, cmp.Or(err, failed)
}

// releaseSome is release for segments that are chosen by their size as well. Frees have been collected, and no copies are under
// way. Where it may not wait and the pools are not over users' resources, Device.mu is not let go.
//
// +checklocks:sg.gpu.mu
func (sg *segments) releaseSome(chosen func(*Pool) bool, fits func(size uint64) bool, mayWait bool) (any bool, failed error) {
	list, waits := sg.takeFree(chosen, fits, mayWait)
	if len(list) == 0 {
		return false, nil
	}
	waited := sg.gpu.await(waits)
	failed = waited
	done := func(v *freeSegment) bool { return waited == nil && v.of.s.stream.timeline.IsOver(v.stamp) }
	var ready []run
	over := make([]bool, len(list))
	for i := range list {
		if over[i] = done(&list[i]); over[i] {
			ready = append(ready, list[i].run)
		}
	}
	sg.observers.publish(sg.observers.onUnmap, ready)
	for i := range list {
		v := &list[i]
		gone := false
		if over[i] {
			err := sg.giveBack(v)
			failed = cmp.Or(failed, err)
			gone = err == nil
		}
		sg.phys.quota.Spare -= v.size
		if gone {
			any = true
			sg.gone(v)
		} else { // nothing is lost
			v.of.s.arena.Lock()
			v.of.s.blocks.Map(v.of.s.blocks.Reap(v.first), v.addr, v.size, v.stamp)
			v.of.s.gauges.SetFree(v.of.s.blocks.FreeBlocks, int64(v.size))
			v.of.s.arena.Unlock()
		}
	}
	return any, failed
}

// takeFree puts the segments out of reach that release is to give back, and returns what has to be waited for.
//
// +checklocks:sg.gpu.mu
func (sg *segments) takeFree(chosen func(*Pool) bool, fits func(size uint64) bool, mayWait bool) (list []freeSegment, waits timeline.Waits) {
	for h := range sg.pools.segmentHeaps() {
		s := h.s
		if s.pool.pinned || !chosen(s.pool) || s.stream.timeline.Capture() != 0 {
			continue
		}
		s.arena.Lock()
		for _, id := range s.blocks.Ranges() {
			b := s.blocks.At(id)
			if b.State != heap.Free || s.blocks.Next(id) != 0 || !mayWait && !s.stream.timeline.IsOver(b.Stamp) || !fits(b.Size) {
				continue
			}
			v := freeSegment{of: h, first: id, run: run{b.Addr, b.Size}, stamp: b.Stamp}
			s.blocks.Unmap(id, b.Addr, b.Size)
			s.gauges.SetFree(s.blocks.FreeBlocks, -int64(v.size))
			sg.phys.quota.Spare += v.size
			list = append(list, v)
			if v.stamp > 0 && mayWait {
				waits.Add(&s.stream.timeline, v.stamp)
			}
		}
		s.arena.Unlock()
	}
	return list, waits
}

// giveBack gives a segment to its upstream. After an error everything is as before.
//
// +checklocks:sg.gpu.mu
func (sg *segments) giveBack(v *freeSegment) error {
	sg.gpu.a.disown(v.addr, v.size) // first: once the driver has it it may be another device's
	err := v.of.free(v.addr, v.size)
	if err != nil {
		sg.gpu.a.claim(v.addr, v.size, v.of.s) // which succeeded before
		sg.observers.publish(sg.observers.onMap, []run{v.run})
	}
	return err
}

// gone forgets a segment that was given back.
//
// +checklocks:sg.gpu.mu
func (sg *segments) gone(v *freeSegment) {
	s := v.of.s
	s.arena.Lock()
	s.blocks.DropRange(s.blocks.Reap(v.first))
	s.lose(v.size)
	s.arena.Unlock()
	sg.gpu.recordSegment(s, v.addr, v.size, false, origin{})
	sg.phys.mem.Ranges.Drop(s.index, v.addr)
	sg.phys.quota.Physical[quota.GroupOf(s.class)].Remove(v.size)
	sg.phys.gaveBack(v.size, v.of.w.counted)
}
