package engine

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// Sharing passes memory to other processes, and maps theirs.
type Sharing struct {
	a        *Allocator
	exported atomic.Uint64 // number of the last export
	byExport sync.Map      // exports by number
	opened   opened
}

// Memory for other processes, on the exporter's side. Opening is in open.go.
//
// A block is exported as the chunks that it lies on, or as the segment. While the block is live they stay where they are, so
// nothing else is held for the export; it ends when the block is freed, and is refused from then on. Memory that another
// process has open by then stays mapped there and shows its next use, as with cudaIpcGetMemHandle: the block must not be freed
// while others use it. Memory of a stream-ordered pool must not even be open elsewhere then: the driver wants its importers to free
// it first (cuMemPoolImportPointer).
//
// A block that is exported has a flag (heap.Exported), so that its free takes the slow path and ends the export:
// the hot path does not know of sharing.

// Export is a live block that other processes may open.
type Export struct {
	ID     uint64 // within this process, never reused
	Device cuda.Device
	Ptr    cuda.Ptr
	Shared memory.Shared

	a       *Allocator
	heap    *streamHeap
	handles []cuda.Handle // of Shared.Chunks
	pool    cuda.MemPool  // in place of them, for stream-ordered memory
	ended   atomic.Bool
}

// Export makes the block that starts at p available to other processes. While the block is live it is the same Export
// every time. It makes no driver call, except for memory from cuMemAlloc or of a pool, whose handle is asked for.
func (sh *Sharing) Export(p cuda.Ptr) (*Export, error) {
	s := sh.a.heapOf(p)
	if s == nil {
		return nil, &memory.PointerError{Op: "share", Ptr: p}
	}
	d := s.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	s.arena.Lock()
	defer s.arena.Unlock()
	id, _, ok := s.blocks.Lookup(uint64(p))
	if !ok || s.blocks.At(id).State != heap.Used {
		return nil, &memory.PointerError{Op: "share", Ptr: p}
	}
	if e := d.state.frees.exports[p]; e != nil && s.blocks.At(id).Uses&heap.Exported != 0 {
		return e, nil
	}
	if err := d.health.Broken(); err != nil {
		return nil, err
	}
	b := s.blocks.At(id)
	if len(s.paused.in(b.Addr, b.Size)) > 0 {
		return nil, fmt.Errorf("share %#x: its memory is paused: resume it first", uint64(p))
	}
	e := &Export{Device: d.id, Ptr: p, a: sh.a, heap: s, Shared: memory.Shared{UUID: d.info.UUID, Size: b.Size}}
	if err := s.backing.export(e, b.Addr, b.Size); err != nil {
		return nil, err
	}
	if old := d.state.frees.exports[p]; old != nil { // of a block that was freed together with others
		old.end()
	}
	e.ID = sh.exported.Add(1)
	if d.state.frees.exports == nil {
		d.state.frees.exports = map[cuda.Ptr]*Export{}
	}
	d.state.frees.exports[p] = e
	sh.byExport.Store(e.ID, e)
	s.blocks.At(id).Uses |= heap.Exported
	return e, nil
}

func (e *Export) chunk(h cuda.Handle, size, serial uint64) {
	e.handles = append(e.handles, h)
	e.Shared.Chunks = append(e.Shared.Chunks, memory.SharedChunk{Size: size, Serial: serial})
}

// nameable is an error where memory of such handles cannot be exported.
func (e *Export) nameable(handles cuda.HandleType) error {
	d := e.heap.dev
	if handles&cuda.HandlePosix == 0 {
		return fmt.Errorf("share %#x: device %d (%s) cannot export memory as file descriptors: %w", uint64(e.Ptr), d.id,
			d.info.Name, cuda.ErrNotSupported)
	}
	return nil
}

// Exported finds an export by its number. The error says what became of it, and errors.Is finds ErrNotExported.
func (sh *Sharing) Exported(id uint64) (*Export, error) {
	if e, ok := sh.byExport.Load(id); ok && !e.(*Export).ended.Load() {
		return e.(*Export), nil
	}
	if id == 0 || id > sh.exported.Load() {
		return nil, fmt.Errorf("%w: no memory was ever shared under number %d", memory.ErrNotExported, id)
	}
	return nil, endedError(id)
}

func endedError(id uint64) error {
	return fmt.Errorf("%w: the memory shared under number %d was freed by the process that shared it", memory.ErrNotExported, id)
}

// Descriptor makes a file descriptor of the export's i-th chunk, which the caller closes. It fails once the block was
// freed.
func (e *Export) Descriptor(i int) (int, error) {
	d := e.heap.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := e.live(); err != nil {
		return -1, err
	}
	fd, err := -1, error(nil)
	if e.pool != 0 {
		fd, err = d.drv.MemPoolExport(d.id, e.pool)
	} else {
		fd, err = d.drv.MemExport(e.handles[i])
	}
	if err != nil {
		return -1, d.health.Failed(err)
	}
	return fd, nil
}

// Live is an error once the block was freed.
func (e *Export) Live() error {
	d := e.heap.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	return e.live()
}

// live looks for the mark, not at ended alone: the mark goes with the block, by any free.
//
// +checklocks:e.heap.dev.gpu.mu
func (e *Export) live() error {
	if e.ended.Load() {
		return endedError(e.ID)
	}
	s := e.heap
	s.arena.Lock()
	defer s.arena.Unlock()
	id, _, ok := s.blocks.Lookup(uint64(e.Ptr))
	if ok && s.blocks.At(id).State == heap.Used && s.dev.state.frees.exports[e.Ptr] == e && s.blocks.At(id).Uses&heap.Exported != 0 {
		return nil
	}
	e.end()
	return endedError(e.ID)
}

// end forgets the export.
//
// +checklocks:e.heap.dev.gpu.mu
func (e *Export) end() {
	e.ended.Store(true)
	e.a.Sharing.byExport.Delete(e.ID)
	if d := e.heap.dev; d.state.frees.exports[e.Ptr] == e {
		delete(d.state.frees.exports, e.Ptr)
	}
}
