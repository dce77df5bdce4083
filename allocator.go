package cistern

import (
	"runtime"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// Allocator serves the devices of one process.
type Allocator struct{ engine *engine.Allocator }

// New makes an allocator over a driver. It makes no driver call but for the number of devices.
func New(drv cuda.Driver, opts Options) (*Allocator, error) {
	a, err := engine.New(drv, opts)
	if err != nil {
		return nil, err
	}
	return &Allocator{a}, nil
}

// Options returns the options in force.
func (a *Allocator) Options() Options { return a.engine.Options() }

// Driver returns the driver under the allocator.
func (a *Allocator) Driver() cuda.Driver { return a.engine.Driver() }

// DeviceCount is the number of devices.
func (a *Allocator) DeviceCount() int { return a.engine.DeviceCount() }

// Device returns a device by its ordinal. The first call for it starts it, with its primary context.
func (a *Allocator) Device(d cuda.Device) (Device, error) {
	dev, err := a.engine.Device(d)
	return Device{dev}, err
}

// Started finds a device that is in use already. Unlike Device it starts nothing.
func (a *Allocator) Started(d cuda.Device) (Device, bool) {
	dev, ok := a.engine.Started(d)
	return Device{dev}, ok
}

// FreeOptions say more of a free.
type FreeOptions struct {
	// Stream is that of FreeOn. With the zero value the free is that of Free.
	Stream Stream
	// Stack and Thread say for the history where the free comes from; 0 is unknown. Without a stack the history names the
	// one that the block keeps.
	Stack, Thread uint32
}

// Free gives back memory that a request returned; null is nothing to free. The block may be reused on its own stream at once,
// and on others when the GPU's order guarantees that this use is over. Streams named by RecordStream are waited for.
func (a *Allocator) Free(p cuda.Ptr) error { return a.engine.Free(p) }

// FreeOn is Free behind another stream than that of the request: all work that uses the block comes before the work that is
// queued on st after this call. The block is reused behind st and the streams named by RecordStream. The stream of the request
// may have been destroyed. st may be of another device. It must exist; while it is captured, until the capture ends.
func (a *Allocator) FreeOn(p cuda.Ptr, st Stream) error { return a.engine.FreeOn(p, st.engine) }

// FreeWith is Free with options.
func (a *Allocator) FreeWith(p cuda.Ptr, o FreeOptions) error {
	return a.engine.FreeWith(p, engine.FreeOptions{Stream: o.Stream.engine, Stack: o.Stack, Thread: o.Thread})
}

// RecordStream says that work queued on another stream uses the block as well. After Free the block is reused only when that
// work, as queued until Free, is done. The stream must exist until then.
func (a *Allocator) RecordStream(p cuda.Ptr, st Stream) error {
	return a.engine.RecordStream(p, st.engine)
}

// Base finds the live allocation that starts at p.
func (a *Allocator) Base(p cuda.Ptr) (Block, error) { return a.engine.Base(p) }

// SegmentBase finds the segment of the live allocation that starts at p: the range that the upstream handed out, of the
// innermost upstream where pools are over pools. It fails with cuda.ErrNotSupported where the memory is chunks, which are
// mapped into a larger range one by one.
func (a *Allocator) SegmentBase(p cuda.Ptr) (base cuda.Ptr, size uint64, err error) {
	return a.engine.SegmentBase(p)
}

// Trim gives the free memory of all devices that is not pinned back to the driver. It waits for the GPU where it must.
func (a *Allocator) Trim() error { return a.engine.Trim() }

// Close gives all free memory back, and fails while blocks are live. It is for programs that stop using the allocator while
// they go on; at the end of a process it is not needed.
func (a *Allocator) Close() error { return a.engine.Close() }

// SetHistory has every device keep its last n events, those included that come into use later; 0 stops that and forgets the
// events.
func (a *Allocator) SetHistory(n int) { a.engine.SetHistory(n) }

// Record is the state of a device in use with its newest events, at most n of them. The events' numbers of streams and pools
// are indexes into Record.Streams and Record.Pools. It is false where the device is not in use.
func (a *Allocator) Record(d cuda.Device, n int) (Record, bool) {
	dev, ok := a.engine.Started(d)
	if !ok {
		return Record{}, false
	}
	return dev.Views.Record(n), true
}

// KeepStacks has blocks of all devices keep the stacks of their requests from now on, or stops that and forgets them.
func (a *Allocator) KeepStacks(on bool) { a.engine.Stacks.Keep(on) }

// CatchStacks sets the function (nil: none) that finds the stack of a request that names none, by the request's size: a number
// from StackOf, or 0. It is called on the goroutine of the request, before any lock is taken. With stacks:native in the options
// there is one from the start, which takes the Go callers of as many requests as stack_sample says.
//
// A program that names stacks, and 0 where a request is to have none, sets nil.
func (a *Allocator) CatchStacks(f func(size uint64) uint32) { a.engine.Stacks.Catch(f) }

// StackOf is the number of a stack, innermost frame first, for AllocOptions.Stack: the same for the same frames, and 0 for no
// frames or when the table is full (StackTable). The program decides what frames mean.
func (a *Allocator) StackOf(frames []uint64) uint32 { return a.engine.Stacks.Of(frames) }

// StackFrames are the frames of a stack, nil for a number that StackOf did not give. They must not be changed.
func (a *Allocator) StackFrames(stack uint32) []uint64 { return a.engine.Stacks.Frames(stack) }

// GoFrames are the functions and lines of a stack that stacks:native took, innermost first. The first is the function that
// made the request.
func (a *Allocator) GoFrames(stack uint32) []runtime.Frame { return a.engine.Stacks.GoFrames(stack) }

// StackTable is the size of the table of stacks.
func (a *Allocator) StackTable() StackTable { return a.engine.Stacks.Table() }
