package cistern

import (
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// Device is one GPU of an allocator.
type Device struct{ engine *engine.Device }

// ID is the device's ordinal.
func (d Device) ID() cuda.Device { return d.engine.ID() }

// Info describes the device.
func (d Device) Info() cuda.DeviceInfo { return d.engine.Info() }

// AllocOptions are the options of AllocWith.
type AllocOptions struct {
	Pool Pool   // the zero value: the pool that the stream is routed to, else the default pool
	Tag  uint32 // 1 to MaxTag; 0 is none
	// Library numbers the library that asks, 1 to MaxLibrary; 0 is unknown. The program decides what numbers mean, as with
	// tags.
	Library uint8
	// HostOrder requests memory in host order: the host knows that the GPU is done with it. It is for libraries that do not
	// name the streams on which they use memory. If there is none, the request waits, with no lock held, for the end of the
	// last use. On a stream that is being captured it is an error. The free is in the order of the stream of the request, as
	// a rule the legacy default stream: work on it, and on all streams that block with it, is over before the memory is
	// reused. For other streams, call RecordStream before the free or wait for them.
	HostOrder bool
	// Cached requests cached memory only. If the request needs more (a driver call, a wait for the GPU or for another
	// thread, a callback) the result is null without an error, and nothing has changed. It is for callers that hold a lock
	// which others may need. It excludes HostOrder.
	Cached bool
	// Stack is the number of the stack of the request (Allocator.StackOf), 0 for none. Events name it, and blocks keep it
	// while stacks are kept (KeepStacks).
	Stack uint32
	// Thread is the kernel's id of the thread of the request, for the history; 0 is unknown.
	Thread uint32
}

// Alloc allocates size bytes, aligned to 512 bytes, for work queued on the stream from now on. Size 0 is a valid request and
// returns null. The error is an *OutOfMemoryError if no reclaim stage met the request, else an error of the driver.
//
// The stream must exist until the block is freed, unless it is freed in the order of another stream (Allocator.FreeOn); it
// may be destroyed right after that. Call BeginCapture before a stream is captured: otherwise a request can be met from
// cached memory that is not pinned.
func (d Device) Alloc(size uint64, st Stream) (cuda.Ptr, error) {
	return d.engine.Alloc(size, st.engine)
}

// AllocTagged is Alloc with a tag, which Snapshot, Base, the history and TagUsage show.
func (d Device) AllocTagged(size uint64, st Stream, tag uint32) (cuda.Ptr, error) {
	return d.engine.AllocWith(size, st.engine, engine.AllocOptions{Tag: tag})
}

// AllocWith is Alloc with options.
func (d Device) AllocWith(size uint64, st Stream, o AllocOptions) (cuda.Ptr, error) {
	return d.engine.AllocWith(size, st.engine, engine.AllocOptions{Pool: o.Pool.engine, Tag: o.Tag, Library: o.Library,
		HostOrder: o.HostOrder, Cached: o.Cached, Stack: o.Stack, Thread: o.Thread})
}

// LargestFree is Pool.LargestFree of the pool that the stream is routed to.
func (d Device) LargestFree(st Stream) uint64 { return d.engine.Views.LargestFree(st.engine) }

// Limit returns the limit in bytes, 0 for none.
func (d Device) Limit() uint64 { return d.engine.Limit() }

// SetLimit bounds the physical memory that the device's pools may reserve together, in bytes; 0 is no limit. The call does
// not return memory beyond a new limit to the driver; Trim does.
func (d Device) SetLimit(bytes uint64) { d.engine.SetLimit(bytes) }

// Trim returns the free memory of every pool of the device to the driver, except for what captured graphs pin. It waits,
// with no lock held, until the GPU is done with it. Memory for which a capture under way forbids such a wait stays.
func (d Device) Trim() error { return d.engine.Trim() }

// GiveBack returns free memory to the driver until need bytes have gone at least, the largest chunks first, and returns how many
// went. What the device has reserved does not fall below keep. Memory in use, that of captured graphs and of users' upstreams
// stays. It waits for the GPU where it must, with no lock held.
func (d Device) GiveBack(need, keep uint64) (released uint64, err error) {
	return d.engine.GiveBack(need, keep)
}

// ReleaseUnused returns free memory above Options.CacheLimit to the driver, if it was not needed for Options.CacheDecay, and
// reports how many bytes went. It does not wait for the GPU: memory that is still in use there stays. Requests and frees do the
// same now and then; a program that may be idle for long calls it, once a second for example. Without a limit it does nothing.
func (d Device) ReleaseUnused() (released uint64, err error) { return engine.ReleaseUnused(d.engine) }

// EnablePeer makes all memory of the device, present and future, accessible to work on another device. errors.Is finds
// cuda.ErrPeerAccessUnsupported where the two cannot reach each other. After any error it can be called again; the peer then
// has at least the access that it had before.
func (d Device) EnablePeer(peer cuda.Device) error { return d.engine.Peers.Enable(peer) }

// Peers are the devices that EnablePeer was called for.
func (d Device) Peers() []cuda.Device { return d.engine.Peers.List() }

// BeginCapture announces that the stream is being captured into a graph whose memory comes from the pool. From now on until
// Release the pool is pinned: its memory, also free memory, is not moved, reused by other pools or trimmed, because the
// graph uses it at every launch. So is every other pool that the stream gets memory from until EndCapture. Until then
// nothing waits for, or takes memory from, the stream, nor waits for the whole context, which would invalidate the capture;
// where such a wait has started, BeginCapture waits until it is over. Several streams may be captured into one pool at a
// time.
//
// Call it before the capture itself begins: it then waits until the GPU is done with the memory that the stream has freed to
// the pool. It may be called while the capture is under way. Then memory that the GPU may still use is not reused, and the
// capture gets new memory.
func (d Device) BeginCapture(st Stream, p Pool) error {
	return d.engine.Captures.Begin(st.engine, p.engine)
}

// EndCapture ends a BeginCapture of the stream. Call it after the capture itself has ended.
func (d Device) EndCapture(st Stream) error { return d.engine.Captures.End(st.engine) }

// Registration is a function that OnOutOfMemory registered.
type Registration struct{ engine *engine.Registration }

// OnOutOfMemory registers a function that a reclaim stage calls, with no lock held, when all other stages have failed: it
// can have another library's cache return memory to the driver or to this allocator. need is the number of missing bytes.
// The function reports whether it returned memory. It must not allocate from this device.
func (d Device) OnOutOfMemory(f func(need uint64) bool) Registration {
	return Registration{d.engine.OnOutOfMemory(f)}
}

// Remove ends the registration. When it returns no call of the function is under way, so the function must not call it. A
// second call does nothing.
func (r Registration) Remove() { r.engine.Remove() }

// OnMap sets the one function (nil: none) that is notified of new memory of the device, chunk by chunk or segment by
// segment, before any of it is allocated. Snapshot lists the memory that was mapped before. The rules for the function of
// OnUnmap hold.
func (d Device) OnMap(f func(addr cuda.Ptr, size uint64)) { d.engine.OnMap(f) }

// OnUnmap sets the one function (nil: none) that is called before memory of the device is unmapped or returned to its
// upstream, once for each chunk or segment. The GPU is done with the memory then, and none of it is allocated. While there
// is such a function memory stays where it was mapped: nothing moves. Memory is unmapped by Trim, by the end of a pool, and
// by the last stage before a request fails, which takes free memory of all pools as StageLend does.
//
// The function is called with no lock held, perhaps by several threads at once. It may free and read statistics, but must
// not allocate from the device or trim it. A request that would fail while another thread notifies waits for that, for at
// most a second for each call of the function. When OnUnmap returns no call of the former function is under way, so a
// function must not replace itself.
func (d Device) OnUnmap(f func(addr cuda.Ptr, size uint64)) { d.engine.OnUnmap(f) }

// Selection selects live blocks of a device: those of a pool, those with a tag, those with both, or with the zero value all.
type Selection struct {
	Pool Pool
	Tag  uint32
}

func (s Selection) engine() engine.Selection {
	return engine.Selection{Pool: s.Pool.engine, Tag: s.Tag}
}

// Pause returns the physical memory of the selected live blocks, and of free memory beside them, to the device. Addresses
// and blocks stay: they count as allocated and active, and can be freed. They must not be used until Resume: Pause waits for
// all work that is queued before it begins, and work that is queued later finds no memory. Blocks that are paused already
// stay so. After an error nothing was paused; it is a *PauseError if a selected block cannot be paused.
//
// Several calls take turns. A function of OnUnmap or OnMap must neither pause nor resume.
func (d Device) Pause(s Selection, o PauseOptions) (PauseReport, error) {
	return d.engine.Pause(s.engine(), o)
}

// Pausable returns how many bytes of physical memory Pause would return at least, as things are now; 0 where it would fail.
func (d Device) Pausable(s Selection, o PauseOptions) uint64 {
	return engine.Pausable(d.engine, s.engine(), o)
}

// Resume gives the selected paused blocks physical memory and their contents again, at the same addresses. Blocks that share
// a granule (2 MiB) with them are resumed with them. The memory comes from the driver, then from the cache, then from
// callbacks. After an error everything is paused as before, contents included; an *OutOfMemoryError has the missing bytes.
func (d Device) Resume(s Selection) (PauseReport, error) { return d.engine.Resume(s.engine()) }

// PauseBuffers keeps at least this many bytes of page-locked host memory for contents, which makes the next pauses much
// faster; 0 frees the unused part. Memory that a pause allocated itself stays for the next one.
func (d Device) PauseBuffers(bytes uint64) error { return d.engine.PauseBuffers(bytes) }

// Stats returns the statistics of the device.
func (d Device) Stats() Stats { return d.engine.Views.Stats() }

// ResetPeaks makes the present values the peaks.
func (d Device) ResetPeaks() { d.engine.Views.ResetPeaks() }

// ResetAccumulated makes Added and Removed of every statistic and the Counters start from 0 again. Current values and peaks
// stay. A size class from which a chunk moves to another afterwards can show less than 0 added for Segments and Reserved:
// the two classes always add up to all.
func (d Device) ResetAccumulated() { d.engine.Views.ResetAccumulated() }

// Usage returns the bytes of live blocks, rounded, and the bytes of physical memory reserved: the two figures of Stats that
// take least time.
func (d Device) Usage() (allocated, reserved uint64) { return d.engine.Views.Usage() }

// Gauges fills in g, for live displays. It allocates no Go memory, makes no driver call, and waits for some milliseconds at
// most. A device that is busier than that has the figures of the last call, but for DriverCalls.
func (d Device) Gauges(g *Gauges) { d.engine.Views.Gauges(g) }

// Snapshot lists all physical memory of the device and the blocks in it, and the blocks whose memory is paused. The sizes of
// the segments add up to the reserved and the paused bytes, those of the used and pending blocks to the active bytes.
func (d Device) Snapshot() []Segment { return d.engine.Views.Snapshot() }

// SnapshotPool lists the physical memory that is mapped for one pool. Spare chunks belong to none.
func (d Device) SnapshotPool(id PoolID) []Segment { return d.engine.Views.SnapshotPool(id) }

// PoolUsage lists the pools of the device with their bytes, the most bytes first. Spare chunks belong to none.
func (d Device) PoolUsage() []PoolUse { return d.engine.Views.PoolUsage() }

// TagUsage adds up the live blocks by tag, the most bytes first; tag 0 has those without one. It takes time in proportion to
// the number of blocks.
func (d Device) TagUsage() []TagUse { return d.engine.Views.TagUsage() }

// LibraryUsage adds up the live blocks by library, the most bytes first. It takes time in proportion to the number of
// blocks.
func (d Device) LibraryUsage() []LibraryUse { return d.engine.Views.LibraryUsage() }

// StackUsage adds up the live blocks by stack, the most bytes first; nil while stacks are not kept. It takes time in
// proportion to the number of blocks.
func (d Device) StackUsage() []StackUse { return d.engine.Views.StackUsage() }

// SetHistory keeps the last n events from now on; 0 stops that and forgets them.
func (d Device) SetHistory(n int) { d.engine.History.SetLimit(n) }

// SetHistoryClock replaces the clock of the history and of the limit of free memory (ReleaseUnused), which otherwise is the wall clock in microseconds since 1970.
func (d Device) SetHistoryClock(now func() int64) { d.engine.History.SetClock(now) }

// History returns the kept events, oldest first, and how many older ones were overwritten. Event.Stream is an index into
// Streams, Event.Pool into Pools.
func (d Device) History() (events []event.Event, lost uint64) { return d.engine.History.Read() }

// DrainHistory moves all kept events to the end of buf, oldest first.
func (d Device) DrainHistory(buf []event.Event) []event.Event { return d.engine.History.Drain(buf) }
