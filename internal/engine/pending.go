package engine

import (
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// pendingFree is a block that was given back and waits for other streams.
type pendingFree struct {
	heap     *streamHeap
	block    heap.ID
	stamp    uint64 // the epoch of the block's own stream that marks it once it is free
	waits    timeline.Waits
	owner    *Stream               // that it was handed out to
	captured timeline.CapturedWork // that it waits for; none where it is not known to wait for that alone
	// stack and thread are those of its event.FreeRequested.
	stack, thread uint32
}

// lastMark marks a block of the stream heap that is given back behind another stream. Work that its own stream had queued does
// not count: all of it that used the block is over once the other's work is. The use of the memory before the block was handed
// out has its mark in the heap, except where C code hands memory out again that it took back (internal/magazine); such a stream
// is never destroyed.
func (s *streamHeap) lastMark() uint64 {
	if s.stream.timeline.Magazine() != nil {
		return s.stream.timeline.Epoch()
	}
	return 0
}

// parkUses closes the epochs of the streams that use a block, as of now, and returns what must be waited for. An
// epoch that cannot be closed now (the stream is being captured) is closed when frees are collected. An error is for
// the caller's information: the block waits all the same.
func (fr *frees) parkUses(s *streamHeap, id heap.ID, stamp uint64, streams []*timeline.Stream) (pendingFree, error) {
	f := pendingFree{heap: s, block: id, stamp: stamp}
	var first error
	for _, t := range streams {
		e := t.Epoch()
		f.waits = append(f.waits, timeline.Wait{Stream: t, Epoch: e})
		if err := t.Close(); err != nil && !timeline.Unordered(err) && first == nil {
			first = err
		}
	}
	f.noteCaptured(streams)
	return f, first
}

// collect completes the frees whose other streams are done. With force, the streams that own the blocks are made to wait, on
// the GPU, for the others, and every free that allows it completes. Within a capture those complete whose work comes before
// what its stream captures next. held is the stream heap whose lock the caller holds with Device.mu. It reports whether
// anything was completed.
//
// +checklocks:fr.gpu.mu
func (fr *frees) collect(held *streamHeap, force bool) bool {
	fr.freeLate(held)
	any := false
	keep := fr.pending[:0]
	order := fr.orderOf(held)
	for _, f := range fr.pending {
		ok, stamp := f.follows(order, held), f.stamp
		if !ok {
			ok, stamp = fr.ready(f, held, force)
		}
		if !ok {
			keep = append(keep, f)
			continue
		}
		any = true
		s := f.heap
		s.lockBeside(held)
		b := s.blocks.At(f.block)
		e := s.event(event.FreeCompleted, f.block, f.stack, f.thread)
		e.Stream = f.owner.number()
		n := b.Size
		back := fr.takeBack(s, f.block, stamp)
		fr.collected += back
		s.gauges.Unpark(n, back, s.blocks.FreeBlocks)
		fr.gpu.record(e)
		fr.phys.rebalance(s, held)
		s.unlockBeside(held)
	}
	for i := len(keep); i < len(fr.pending); i++ {
		fr.pending[i] = pendingFree{}
	}
	fr.pending = keep
	fr.gpu.health.SetWaiting(len(keep) > 0)
	if fr.late.Any() { // an arena has found one since, and its SetWaiting may have come first
		fr.gpu.health.SetWaiting(true)
	}
	return any
}

// unfinished is what keeps free memory from being used by others: the uses of frees that wait for other streams, and
// the last uses of free blocks and spare chunks. The caller holds Device.mu and held's lock.
//
// +checklocks:fr.gpu.mu
func (fr *frees) unfinished(held *streamHeap) (waits timeline.Waits) {
	for _, f := range fr.pending {
		for _, w := range f.waits {
			waits.AddUnfinished(w.Stream, w.Epoch)
		}
		waits.AddUnfinished(&f.heap.stream.timeline, f.stamp) // when it is no longer parked it is a free block
	}
	for _, id := range fr.phys.mem.Spares() {
		if k := fr.phys.mem.Chunk(id); k.Stream >= 0 {
			waits.AddUnfinished(&fr.streams.all[k.Stream].timeline, k.Stamp)
		}
	}
	for s := range held.backing.usable() {
		if s.pool.pinned || held.stream == s.stream && held.hot.Capture == 0 {
			continue
		}
		s.arena.Lock()
		s.blocks.FreeBins.Each(heap.Align, func(_ heap.ID, b *heap.Block) bool {
			waits.AddUnfinished(&s.stream.timeline, b.Stamp)
			return true
		})
		s.arena.Unlock()
	}
	return waits
}

// ready reports whether a parked block may go back to its stream heap, and the epoch of its stream that marks it then. A
// stream that may have been destroyed since the free is not made to wait, unless it is the one that allocates (held's).
//
// +checklocks:fr.gpu.mu
func (fr *frees) ready(f pendingFree, held *streamHeap, force bool) (bool, uint64) {
	if fr.gpu.health.Broken() != nil {
		return true, f.stamp // bookkeeping only
	}
	own := f.heap.stream
	force = force && (own.timeline.Queue.Durable() || held != nil && held.stream == own)
	waited := false
	for _, w := range f.waits {
		t := w.Stream
		if t.IsOver(w.Epoch) || t.Queue.Broken() { // the work of a broken peer is over as well
			continue
		}
		if w.Epoch >= t.Epoch() && t.CloseLate() != nil {
			return false, 0 // it could not be closed at the free and cannot be now
		}
		if !force || own.timeline.WaitFor(t, w.Epoch) != nil {
			return false, 0
		}
		waited = true
	}
	if !waited {
		return true, f.stamp
	}
	stamp := own.timeline.Epoch() // the waits are part of it
	own.timeline.Freed()
	return true, stamp
}
