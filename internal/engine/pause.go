package engine

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Pausing, as the package comment describes it: the choice of the memory is here, paused ranges are in pausedrange.go, saving
// contents and unmapping in leave.go, resuming in resume.go.

// Selection says which memory of a device is meant: a pool's, a tag's, what is of both, or with the zero value all.
type Selection struct {
	Pool *Pool
	Tag  uint32
}

// Pause gives the physical memory under the selected live blocks, and the free memory beside them, back to the device; their
// addresses stay theirs. The blocks stay allocated: they count as allocated and active, and can be freed. They must not be used
// until Resume: Pause waits for all work that is queued before it begins, and work queued while it runs, or later, finds no
// memory. Memory that is paused already stays as it is. After an error nothing was paused.
//
// Several calls take turns. A function of OnUnmap or OnMap must neither pause nor resume.
func (d *Device) Pause(sel Selection, o config.PauseOptions) (memory.PauseReport, error) {
	return pauseSelected(&pause{d: d, sel: sel, o: o})
}

// pauseSelected takes the locks and pauses.
func pauseSelected(p *pause) (memory.PauseReport, error) {
	d := p.d
	if err := p.sel.of(d); err != nil {
		return memory.PauseReport{}, err
	}
	if p.o.Keep > config.KeepNone {
		return memory.PauseReport{}, fmt.Errorf("pause: unknown keep %d", p.o.Keep)
	}
	d.state.paused.mu.Lock()
	defer d.state.paused.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	err := p.run()
	return p.report, err
}

// Pausable returns how many bytes of physical memory Pause would return to the device at least, as things are; 0 where it would
// fail, as while a stream is being captured. It does not wait for the GPU.
func Pausable(d *Device, sel Selection, o config.PauseOptions) uint64 {
	return pausable(&pause{d: d, sel: sel, o: o})
}

func pausable(p *pause) (n uint64) {
	if p.sel.of(p.d) != nil {
		return 0
	}
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if p.quiet && p.d.state.observers.observed("pause") != nil || p.d.state.paused.mayPause() != nil || p.choose() != nil {
		return 0
	}
	for i := range p.found {
		n += p.found[i].size
	}
	return n
}

// of is an error where a selection cannot be of this device.
func (sel *Selection) of(d *Device) error {
	if sel.Pool != nil && sel.Pool.dev != d {
		return fmt.Errorf("device %d: the pool belongs to device %d", d.id, sel.Pool.dev.id)
	}
	if sel.Tag > memory.MaxTag {
		return fmt.Errorf("tag %d: the largest is %d", sel.Tag, memory.MaxTag)
	}
	return nil
}

// has reports whether a block in use is selected.
func (x *Selection) has(s *streamHeap, b *heap.Block) bool {
	return b.State == heap.Used && (x.Tag == 0 || journal.TagOf(b.Tag) == x.Tag) && x.mayHave(s)
}

func (x *Selection) mayHave(s *streamHeap) bool { return x.Pool == nil || x.Pool == s.pool.owner() }

// pause is one call of Pause. Its methods are called with pausedMemory.mu and Device.mu.
type pause struct {
	d         *Device
	sel       Selection
	o         config.PauseOptions
	quiet     bool // no function of the program is called
	found     []leaving
	heaps     map[*streamHeap]bool // those that hold something selected
	leaving   []*pausedRange       // in address order within a stream heap
	batches   []batchOut           // while contents are copied to host memory
	published []run
	report    memory.PauseReport
}

// leaving is memory that is to go.
type leaving struct {
	heap       *streamHeap
	addr, size uint64
	first      heap.ID // the block in which it begins
	mem        pausedBacking
}

// +checklocks:p.d.gpu.mu
// +checklocks:p.d.state.paused.mu
func (p *pause) run() error {
	d := p.d
	if p.quiet {
		if err := d.state.observers.observed("pause"); err != nil {
			return err
		}
	}
	if err := d.state.paused.mayPause(); err != nil {
		return err
	}
	// First only to see whether anything is refused, or there is anything at all: what is not over yet is not known.
	if err := p.choose(); err != nil || len(p.heaps) == 0 {
		return err
	}
	if err := d.state.paused.waitForAll(); err != nil {
		return err
	}
	d.state.frees.collect(nil, false)
	d.state.held.regain(nil, nil)
	d.state.mover.unmapReady()
	for _, l := range d.state.pools.arenas {
		l.Lock()
	}
	err := p.chooseLocked()
	if err == nil {
		p.depart()
	}
	d.state.phys.quota.Rebalance(nil, len(d.state.phys.mem.Spares()))
	for _, l := range d.state.pools.arenas {
		l.Unlock()
	}
	if err != nil {
		return err
	}
	if len(p.leaving) > 0 {
		if err = p.save(); err == nil {
			err = p.commit()
		}
		if err != nil {
			p.rollBack()
		}
	}
	if err == nil {
		p.trim()
	}
	d.state.phys.rebalanceAll(nil, nil)
	return err
}

// mayPause is an error where nothing can be waited for.
//
// +checklocks:pr.gpu.mu
func (pr *pausedMemory) mayPause() error {
	if err := pr.gpu.health.Broken(); err != nil {
		return err
	}
	busy := pr.gpu.timeline.Gate().Announced()
	for t := range pr.streams.live() {
		if t.active && t.timeline.Queue.Durable() && !t.timeline.Queue.PerThread() {
			busy = busy || errors.Is(t.timeline.Queue.Usable(), timeline.ErrCapturing)
		}
	}
	for _, v := range pr.phys.mem.Access.Devices()[1:] {
		busy = busy || pr.gpu.timeline.GateOf(v).Announced()
	}
	if busy {
		return pr.whileCapturing()
	}
	return nil
}

func (pr *pausedMemory) whileCapturing() error {
	return &memory.PauseError{Reason: fmt.Sprintf("pause: a stream is being captured on device %d, so waiting for the GPU is not possible", pr.gpu.id)}
}

// waitForAll waits for all work of the device, and of those that may use its memory; it is a PauseError where a capture
// was announced there. The caller holds Device.mu and no arena's lock; it is let go meanwhile.
//
// +checklocks:pr.gpu.mu
func (pr *pausedMemory) waitForAll() error {
	devs := slices.Clone(pr.phys.mem.Access.Devices())
	pr.gpu.mu.Unlock()
	defer pr.gpu.mu.Lock()
	pr.gpu.a.turns.Next()
	defer pr.gpu.a.turns.Next()
	for i, v := range devs {
		err := pr.gpu.timeline.SyncContext(v)
		if err == timeline.ErrCapturing {
			return pr.whileCapturing()
		}
		if i == 0 && err != nil {
			return pr.gpu.health.Failed(err)
		}
		if o, ok := pr.gpu.a.Started(v); err != nil && ok && o.health.Failed(err) != nil && o.health.Broken() == nil {
			return err // the work of a broken peer is over
		}
	}
	return nil
}

// choose finds out what is to go, and refuses what cannot.
//
// +checklocks:p.d.gpu.mu
func (p *pause) choose() error {
	for _, l := range p.d.state.pools.arenas {
		l.Lock()
	}
	defer func() {
		for _, l := range p.d.state.pools.arenas {
			l.Unlock()
		}
	}()
	return p.chooseLocked()
}

// +checklocks:p.d.gpu.mu
func (p *pause) chooseLocked() error {
	p.found, p.heaps, p.report.Shared = nil, map[*streamHeap]bool{}, 0
	var no refusal
	for _, s := range p.d.state.pools.heaps {
		if s == nil || !p.sel.mayHave(s) {
			continue
		}
		if p.sel.Tag == 0 {
			p.heaps[s] = true
		}
		from := len(p.found)
		s.backing.choosePaused(p, &no)
		// A stream heap's ranges of addresses are in the order in which they came.
		slices.SortFunc(p.found[from:], func(a, b leaving) int { return cmp.Compare(a.addr, b.addr) })
	}
	return no.err()
}

// refusal is why something cannot be paused: the first reason, and the bytes of all blocks that it is so with.
type refusal struct{ memory.PauseError }

func (r *refusal) add(b *heap.Block, format string, args ...any) {
	reason := fmt.Sprintf(format, args...)
	if r.Reason == "" {
		r.Reason = reason
	}
	if r.Reason == reason {
		r.Bytes += b.Size
	}
}

func (r *refusal) err() error {
	if r.Reason == "" {
		return nil
	}
	return &r.PauseError
}

// refuse notes why a selected block that has memory cannot be paused.
//
// +checklocks:p.d.gpu.mu
func (p *pause) refuse(s *streamHeap, b *heap.Block, no *refusal) {
	id := s.pool.id
	if b.Uses&heap.Exported != 0 {
		no.add(b, "pause: memory of pool {%d, %d} is shared with other processes", id[0], id[1])
	}
	if s.pool.pinned && !p.o.Captured {
		no.add(b, "pause: captured graphs use the memory of pool {%d, %d}: allow that, and launch none of them until it is resumed", id[0], id[1])
	}
}

// depart puts the memory that was found out of reach, and marks the blocks, so that their frees take the slow path. The caller
// holds all arenas' locks.
//
// +checklocks:p.d.gpu.mu
func (p *pause) depart() {
	d := p.d
	// Backwards: what is cut off a free block that reaches to the left of the memory has the new names.
	for i := len(p.found) - 1; i >= 0; i-- {
		x := &p.found[i]
		s := x.heap
		a := &pausedRange{heap: s, addr: x.addr, size: x.size, busy: true, mapped: true, mem: x.mem}
		gaps := uint64(0)
		for id := x.first; id != 0 && s.blocks.At(id).Addr < a.end(); id = s.blocks.Next(id) {
			b := s.blocks.At(id)
			lo, n := a.clip(b.Addr, b.Size)
			if b.State == heap.Free {
				id = s.blocks.Unmap(id, lo, n)
				gaps += n
				continue
			}
			b.Uses |= heap.Paused
			a.live++
			if p.o.Keep != config.KeepNone {
				a.contents.Add(lo, n)
			}
		}
		if gaps > 0 {
			s.gauges.SetFree(s.blocks.FreeBlocks, -int64(gaps))
			d.state.phys.quota.Spare += gaps
		}
		s.paused.add(a)
		p.leaving = append(p.leaving, a)
	}
	slices.SortFunc(p.leaving, func(a, b *pausedRange) int { // ranges come in any order
		return cmp.Or(cmp.Compare(a.heap.index, b.heap.index), cmp.Compare(a.addr, b.addr))
	})
	if len(p.leaving) > 0 {
		d.state.pools.endTokens()
	}
}

// trim gives back the free memory beside the selected blocks; quietly that of users' resources stays. If that fails, the pause
// still succeeds.
//
// +checklocks:p.d.gpu.mu
func (p *pause) trim() {
	d := p.d
	if p.quiet && d.state.observers.observed("pause") != nil {
		return
	}
	before := d.state.phys.quota.Reserved
	pools := map[*Pool]bool{}
	for s := range p.heaps {
		pools[s.pool] = !p.quiet || mayGive(s.pool)
	}
	d.state.segments.release(func(x *Pool) bool { return pools[x] }, true)
	for s := range p.heaps {
		if s.pool.pinned || !d.state.pools.has(s) {
			continue
		}
		s.arena.Lock()
		s.backing.detach(everything)
		s.arena.Unlock()
	}
	if d.state.phys.hasChunks() {
		d.state.mover.releaseChunks(p.sel.Pool, 0) // no more of them: it waits for those that are on their way
	}
	if before > d.state.phys.quota.Reserved {
		p.report.Physical += before - d.state.phys.quota.Reserved
	}
}

// PauseBuffers keeps page-locked memory of at least so many bytes for the contents of the next pauses, which are much
// faster with it; 0 gives back what holds nothing. Without it a pause keeps what it got for the next one.
func (d *Device) PauseBuffers(bytes uint64) error {
	d.state.paused.mu.Lock()
	defer d.state.paused.mu.Unlock()
	if err := d.health.Broken(); err != nil {
		return err
	}
	return d.state.phys.offload.Reserve(bytes)
}
