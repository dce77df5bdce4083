package cistern

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// Export is a live block that other processes may open. The program passes [Export.Shared] and the descriptors to the other
// process, which calls [Allocator.Open]. The export ends when the block is freed.
type Export struct{ engine *engine.Export }

// Export makes the block that starts at p available to other processes. While the block is live the result is the same. It
// makes no driver call, except for memory from cuMemAlloc, whose IPC handle it gets.
func (a *Allocator) Export(p cuda.Ptr) (Export, error) {
	e, err := a.engine.Sharing.Export(p)
	return Export{e}, err
}

// Exported finds an export by its number. errors.Is finds ErrNotExported in the error, which says why there is none.
func (a *Allocator) Exported(id uint64) (Export, error) {
	e, err := a.engine.Sharing.Exported(id)
	return Export{e}, err
}

// Open maps memory that another process exported and returns the address of the block's first byte. from is a name of the
// exporting process that no other process ever has. descriptor returns the descriptor of the i-th chunk. It is called for
// the chunks in order, keeps each descriptor open until the next call, and may wait for the other process. Memory that is
// mapped already is not mapped again. Each Open is undone by one CloseShared of the address. Memory of another GPU can be
// opened on a device that has peer access to it. The memory must not be used after the exporter has freed the block.
func (a *Allocator) Open(dev cuda.Device, from string, m Shared, descriptor func(i int) (int, error)) (cuda.Ptr, error) {
	return a.engine.Sharing.Open(dev, from, m, descriptor)
}

// OpenOwn opens an export of this process for the device of the block: the block itself. It is undone by one CloseShared,
// which leaves the block as it is.
func (a *Allocator) OpenOwn(e Export) (cuda.Ptr, error) { return a.engine.Sharing.OpenOwn(e.engine) }

// CloseShared undoes one Open or OpenOwn. The caller knows that the GPU is done with the memory: the last call unmaps it
// without waiting.
func (a *Allocator) CloseShared(p cuda.Ptr) error { return a.engine.Sharing.Close(p) }

// MakeRoom is for memory that another process makes on the device for this one, as named objects, and for which the device had too little
// memory. It returns unused memory to the driver and asks other processes for what is still lacking. note says what came of that. Where ok is
// true the caller tries again, for a moment, as memory that others released comes some milliseconds late, and then calls done, which is
// never nil.
func (a *Allocator) MakeRoom(dev cuda.Device, bytes uint64) (done func(), ok bool, note string) {
	return a.engine.Sharing.MakeRoom(dev, bytes)
}

// ID is the number of the export within this process. It is not used again.
func (e Export) ID() uint64 { return e.engine.ID }

// Device is the device of the block.
func (e Export) Device() cuda.Device { return e.engine.Device }

// Ptr is the address of the block.
func (e Export) Ptr() cuda.Ptr { return e.engine.Ptr }

// Shared describes the block for the other process. The caller must not change its chunks.
func (e Export) Shared() Shared { return e.engine.Shared }

// Descriptor returns a new file descriptor of the i-th chunk, which the caller closes. errors.Is finds ErrNotExported after
// the block was freed.
func (e Export) Descriptor(i int) (int, error) { return e.engine.Descriptor(i) }

// Live returns nil while the block is live; later errors.Is finds ErrNotExported in the result.
func (e Export) Live() error { return e.engine.Live() }
