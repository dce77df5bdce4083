package engine

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"weak"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/engine/health"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/engine/offload"
	"github.com/cistern-gpu/cistern/internal/engine/phys"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// Device is the engine of one GPU.
type Device struct {
	a        *Allocator
	health   *health.State
	timeline *timeline.Device
	drv      *health.Driver // health's
	id       cuda.Device
	info     cuda.DeviceInfo
	opts     config.Options

	pool0    *Pool
	upstream resource.Chunks // of the pools that are made of chunks; nil with backend malloc
	// captureReuse is on while frees within a capture may complete there (SetCaptureReuse).
	captureReuse atomic.Bool
	catch        atomic.Pointer[func(size uint64) uint32] // Allocator.catch
	tagged       atomic.Bool                              // a request had a tag
	labelled     atomic.Bool                              // a request named a library
	journal      *journal.Journal
	glance       glance
	late         arena.Late // blocks that C code gave back while they were being paused

	// pausing is held by threads that pause or resume memory, also while the GPU is waited for and contents are copied. It comes
	// before mu, and no other thread waits for it.
	pausing lockrank.Mutex
	offload *offload.Store // of the contents of paused memory

	privateMu lockrank.Mutex
	// +checklocks:privateMu
	private *Stream // on which pools use others; nil: none does

	mu          lockrank.Mutex
	deviceState // +checklocks:mu
}

// deviceState is what Device.mu guards.
type deviceState struct {
	// Streams by number. One that was forgotten stays until its number is given to another:
	// liveStreams leaves it out.
	streams   []*Stream
	byID      map[cuda.StreamID]*Stream              // those that are known
	gone      map[cuda.StreamID]weak.Pointer[Stream] // those that were forgotten, which the program may still have
	goneAt    int                                    // length of gone at which it is next looked through
	forgetAt  int                                    // known streams at which those are next looked for that may be forgotten
	pools     map[memory.PoolID]*Pool
	byNumber  []*Pool // nil where one is gone
	poolNames []memory.PoolID
	heaps     []*streamHeap   // nil where one was dissolved
	places    journal.Numbers // in stream heaps
	arenas    []*arena.Arena
	using     int // streams that have allocated

	segments segmentSources
	prop     cuda.MemProp // of the chunks and the single handles, once probed
	probed   bool
	mem      *phys.Memory

	pending  []pendingFree
	heldBack []heldFree
	uses     useLists
	exports  map[cuda.Ptr]*Export // by address of the block
	imported map[cuda.Ptr]uint64  // sizes of other processes' memory on this device, by address

	captureNumber uint32    // of the last capture
	capturing     []*Stream // whose captures are announced
	collected     uint64    // bytes of frees that waited for other streams, ever completed
	quota         quota.Device
	counts        memory.Counters
	callbacks     []*callback
	onMap         *observer     // nil: none
	onUnmap       *observer     // nil: none
	publishing    []uint64      // the calls of observers under way, by number, the oldest first
	published     uint64        // how many there were
	publishDone   chan struct{} // closed when one is done; nil: no thread waits for that
	arriving      []run         // new chunks that are being told of and lie in no stream heap yet
	plan          planner
	throttle      throttle
	forget        func()            // set by OnTokensEnd
	dissolving    bool              // a released pool still has stream heaps
	unused        []resource.Closer // to be closed
	ending        []*Pool           // released pools that still hold something
	retireAt      int               // arenas at which idle ones are next looked for
	inherited     int               // arenas that a stream got from another since they were last looked for
	keepStacks    bool
}

// newDevice makes the engine of a device, which no other thread has yet. The caller holds Allocator.mu.
//
// +checklocks:a.mu
func newDevice(a *Allocator, id cuda.Device) (*Device, error) {
	state := health.New(a.drv, id)
	drv := state.Driver
	info, err := drv.DeviceInfo(id)
	if err != nil {
		return nil, err
	}
	if err := drv.RetainContext(id); err != nil {
		return nil, err
	}
	d := &Device{a: a, health: state, drv: drv, id: id, timeline: timeline.New(state, a.gates, &a.turns), info: info, opts: a.opts}
	d.deviceState = deviceState{quota: quota.Device{Limit: a.opts.Limit}, byID: map[cuda.StreamID]*Stream{}, gone: map[cuda.StreamID]weak.Pointer[Stream]{},
		pools: map[memory.PoolID]*Pool{}, keepStacks: a.kept}
	d.pausing.Rank, d.privateMu.Rank, d.mu.Rank = lockrank.Pausing, lockrank.Private, lockrank.Device
	d.glance.mu.Rank = lockrank.Glance
	d.journal = journal.New(state, &a.thread)
	d.offload = offload.New(state, d.timeline, info.LazyHost)
	d.captureReuse.Store(a.opts.CaptureReuse)
	// Also where only a pool to come may need it: finding out takes memory, and now there is some.
	if err := d.virtual(); err != nil && (info.VMM || d.opts.Backend == config.BackendVMM) { // +checklocksignore: no other thread has the device
		return nil, err
	}
	if d.opts.Backend == config.BackendVMM && !d.opts.SingleHandle {
		d.upstream = resource.Virtual(drv, d.prop, info.Granularity)
	}
	d.mem = phys.New(state, &d.quota, d.upstream)                                                // +checklocksignore: no other thread has the device
	if d.pool0, err = d.addPool(memory.PoolID{}, config.PoolOptions{}, upstream{}); err != nil { // +checklocksignore: likewise
		return nil, err
	}
	if d.opts.Spill != config.SpillNone {
		if err := d.spillDefault(); err != nil {
			return nil, fmt.Errorf("spill:%s: %w", d.opts.Spill, err)
		}
	}
	d.catch.Store(a.catch)
	d.journal.SetLimit(a.history)
	return d, nil
}

// spillDefault gives the default pool the spill that the options name.
func (d *Device) spillDefault() error {
	var r resource.Resource
	switch d.opts.Spill {
	case config.SpillManaged:
		r = resource.Managed(d.drv, d.id)
	case config.SpillPinned:
		r = resource.Pinned(d.drv, d.id)
	case config.SpillHostNUMA:
		var err error
		if r, err = resource.HostNUMA(d.drv, d.id, -1); err != nil {
			return err
		}
	}
	u, err := d.newUpstream(r)
	if err == nil {
		d.pool0.addSpill(u, false) // +checklocksignore: no other thread has the device
	}
	return err
}

// ID is the device's ordinal.
func (d *Device) ID() cuda.Device { return d.id }

// Info describes the device.
func (d *Device) Info() cuda.DeviceInfo { return d.info }

// SetLimit bounds the physical memory that the device's pools may hold together, in bytes; 0 is no limit. Memory held
// beyond a new limit is not given back by this; Trim does.
func (d *Device) SetLimit(bytes uint64) {
	d.mu.Lock()
	d.quota.Limit = bytes
	d.mu.Unlock()
}

// Limit is the limit in force, 0 for none.
func (d *Device) Limit() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.quota.Limit
}

// close gives back what the device holds; every block has been freed.
func (d *Device) close() error {
	if err := d.Trim(); err != nil {
		return err
	}
	if err := d.endPauses(); err != nil {
		return err
	}
	if err := d.giveBack(); err != nil {
		return err
	}
	return d.dropPrivate()
}

func (d *Device) giveBack() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.quota.Total(); n != 0 {
		return fmt.Errorf("device %d: %d bytes are pinned by pools that were not released", d.id, n)
	}
	if d.mem.Stale.Len() != 0 {
		return fmt.Errorf("device %d: %d old mappings still wait for the GPU", d.id, d.mem.Stale.Len())
	}
	for _, s := range d.heaps {
		if s == nil {
			continue
		}
		s.arena.Lock()
		err := s.backing.dropRanges()
		s.arena.Unlock()
		if err != nil {
			return err
		}
	}
	if d.segments.single != nil {
		if _, err := d.segments.single.Drain(); err != nil {
			return d.health.Failed(err)
		}
	}
	for _, p := range d.pools { // that were not released, the default pool among them
		for _, x := range p.parts() {
			x.backing.closeOwn()
		}
	}
	if err := d.closeUnused(); err != nil {
		return d.health.Failed(err)
	}
	for t := range d.liveStreams() {
		t.timeline.Finish()
	}
	for _, w := range d.gone { // which waits of other devices may have used since
		if t := w.Value(); t != nil {
			t.timeline.Finish()
		}
	}
	return d.timeline.DestroyEvents()
}

// closeUnused closes what was made to use upstreams; what fails is tried again.
//
// +checklocks:d.mu
func (d *Device) closeUnused() (first error) {
	d.unused = slices.DeleteFunc(d.unused, func(c resource.Closer) bool {
		err := c.Close()
		first = cmp.Or(first, err)
		return err == nil
	})
	return first
}
