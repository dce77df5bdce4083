package cistern

import (
	"runtime"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/resource"
	"github.com/cistern-gpu/cistern/resource/open"
)

// Allocator serves the devices of one process.
type Allocator struct{ engine *engine.Allocator }

// New makes an allocator over a driver, or returns what is wrong with the options. The only driver call that it makes asks
// for the number of devices. It loads the library that Options.Upstream names functions of.
func New(drv cuda.Driver, opts Options) (*Allocator, error) {
	if opts.Upstream != "" {
		if err := open.Load(opts.Upstream); err != nil {
			return nil, err
		}
	}
	a, err := engine.New(drv, opts)
	if err != nil {
		return nil, err
	}
	if opts.Upstream != "" {
		if err := a.SetUpstream(func(d cuda.Device) (resource.Resource, error) { return open.Parse(drv, d, opts.Upstream) }); err != nil {
			return nil, err
		}
	}
	return &Allocator{a}, nil
}

// Options returns the options in force.
func (a *Allocator) Options() Options { return a.engine.Options() }

// Driver returns the driver under the allocator.
func (a *Allocator) Driver() cuda.Driver { return a.engine.Driver() }

// DeviceCount returns the number of devices.
func (a *Allocator) DeviceCount() int { return a.engine.DeviceCount() }

// Device returns a device by its ordinal. The first call for it starts it, with its primary context.
func (a *Allocator) Device(d cuda.Device) (Device, error) {
	dev, err := a.engine.Device(d)
	return Device{dev}, err
}

// Started returns a device if it is in use already. Unlike Device it does not start one.
func (a *Allocator) Started(d cuda.Device) (Device, bool) {
	dev, ok := a.engine.Started(d)
	return Device{dev}, ok
}

// Node is the other processes on the devices. Package node has one, over the broker of the machine (cistern serve).
type Node interface {
	// Admit reports whether the driver may be asked for size bytes of new memory without taking what other processes were
	// granted. It is called with locks held: it neither waits nor calls the allocator, other than its Driver.
	Admit(dev cuda.Device, size uint64) bool
	// Ask asks other processes to release need bytes, and returns how many they released for this process, and words for the
	// report of a failed request. It may wait for so long for memory that others may stop using.
	Ask(dev cuda.Device, need uint64, wait time.Duration) (granted uint64, note string)
	// Done ends what Ask granted: the request that asked is over.
	Done(dev cuda.Device, granted uint64)
	// Grown is told that the driver was asked for new memory. It may ask other processes to release some, so that the driver keeps
	// what libraries load.
	Grown(dev cuda.Device)
}

// SetNode sets the other processes of all devices; nil is none. Requests ask them before they fail, after the functions of
// OnOutOfMemory.
func (a *Allocator) SetNode(n Node) {
	if n == nil {
		a.engine.SetNode(nil)
		return
	}
	a.engine.SetNode(n)
}

// SetNodeLimit is a limit beside Device.SetLimit that applies for the sake of other processes; 0 is none. The lower limit is in
// force. It does nothing for a device that is not in use.
func (a *Allocator) SetNodeLimit(d cuda.Device, bytes uint64) { a.engine.SetNodeLimit(d, bytes) }

// FreeOptions are the options of FreeWith.
type FreeOptions struct {
	// Stream is that of FreeOn. With the zero value the free is that of Free.
	Stream Stream
	// Stack (Allocator.StackOf) and Thread (the kernel's thread id) are for the history; 0 is unknown. Without a stack the
	// history has that of the request.
	Stack, Thread uint32
}

// Free frees the block that starts at p; null is nothing to free. The block may be reused on its own stream at once, and on
// other streams when the GPU's order guarantees that this use is over. It is not reused before the work on the streams of
// RecordStream is done. errors.Is finds ErrUnknownPointer if no live block starts at p.
func (a *Allocator) Free(p cuda.Ptr) error { return a.engine.Free(p) }

// FreeOn is Free in the order of st instead of the stream of the request: all work that uses the block must come before the
// work that is queued on st after this call. The block is reused behind st and the streams named by RecordStream. The stream
// of the request may have been destroyed. st may belong to another device. It must exist during the call; if it is being
// captured, until the capture ends.
func (a *Allocator) FreeOn(p cuda.Ptr, st Stream) error { return a.engine.FreeOn(p, st.engine) }

// FreeWith is Free with options.
func (a *Allocator) FreeWith(p cuda.Ptr, o FreeOptions) error {
	return a.engine.FreeWith(p, engine.FreeOptions{Stream: o.Stream.engine, Stack: o.Stack, Thread: o.Thread})
}

// RecordStream states that work on another stream uses the block as well. After Free the block is reused only when the work
// that was queued there before Free is done. The stream must exist until then.
func (a *Allocator) RecordStream(p cuda.Ptr, st Stream) error {
	return a.engine.RecordStream(p, st.engine)
}

// Base returns the live block that starts at p. errors.Is finds ErrUnknownPointer if there is none.
func (a *Allocator) Base(p cuda.Ptr) (Block, error) { return a.engine.Base(p) }

// SegmentBase returns the address and the size in bytes of the segment of the live block that starts at p: the range that
// the upstream returned (the innermost upstream where pools are over pools). errors.Is finds cuda.ErrNotSupported if the
// memory is chunks, which are mapped into a larger range one by one.
func (a *Allocator) SegmentBase(p cuda.Ptr) (base cuda.Ptr, size uint64, err error) {
	return a.engine.SegmentBase(p)
}

// Trim returns the free memory of all devices to the driver, except for what captured graphs pin. It waits for the GPU where
// it must.
func (a *Allocator) Trim() error { return a.engine.Trim() }

// Close returns all memory to the driver. It fails while blocks are live. A process that ends need not call it.
func (a *Allocator) Close() error { return a.engine.Close() }

// SetHistory keeps the last n events of every device, also of devices that come into use later; 0 stops that and forgets the
// events.
func (a *Allocator) SetHistory(n int) { a.engine.SetHistory(n) }

// Record returns the state of a device with its newest events, at most n, and false if the device is not in use. The numbers
// of streams and pools in events are indexes into Record.Streams and Record.Pools.
func (a *Allocator) Record(d cuda.Device, n int) (Record, bool) {
	dev, ok := a.engine.Started(d)
	if !ok {
		return Record{}, false
	}
	return dev.Views.Record(n), true
}

// KeepStacks sets whether blocks of all devices keep the stacks of their requests. Turning it off forgets the stacks.
func (a *Allocator) KeepStacks(on bool) { a.engine.Stacks.Keep(on) }

// CatchStacks sets the function (nil: none) that finds the stack of a request that names none, by the request's size: a
// number from StackOf, or 0. It is called on the goroutine of the request, before any lock is taken. Options with
// stacks:native set one that records Go stacks, sampled by stack_sample. A program that sets AllocOptions.Stack itself, with
// 0 for requests without a stack, sets nil.
func (a *Allocator) CatchStacks(f func(size uint64) uint32) { a.engine.Stacks.Catch(f) }

// StackOf returns the number of a stack, innermost frame first, for AllocOptions.Stack. Equal frames have the same number;
// it is 0 for no frames or when the table is full (StackTable). The program decides what frames mean.
func (a *Allocator) StackOf(frames []uint64) uint32 { return a.engine.Stacks.Of(frames) }

// StackFrames returns the frames of a stack, nil for a number that StackOf did not return. The caller must not change them.
func (a *Allocator) StackFrames(stack uint32) []uint64 { return a.engine.Stacks.Frames(stack) }

// GoFrames returns the functions and lines of a stack that stacks:native recorded, innermost first. The first is the
// function that made the request.
func (a *Allocator) GoFrames(stack uint32) []runtime.Frame { return a.engine.Stacks.GoFrames(stack) }

// StackTable returns the size of the table of stacks.
func (a *Allocator) StackTable() StackTable { return a.engine.Stacks.Table() }
