package engine

import (
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

// gpu is what never changes of a device, and the lock of all that does. Every part of the device has it.
type gpu struct {
	a        *Allocator
	id       cuda.Device
	info     cuda.DeviceInfo
	opts     config.Options
	health   *health.State
	drv      *health.Driver // health's
	timeline *timeline.Device
	journal  *journal.Journal
	pool0    *Pool
	mu       lockrank.Mutex
}

// state is what the device's lock guards, in parts. A part uses those that stand above it here, and none below. None knows the
// Device.
type state struct {
	streams   *streamTable
	pools     *poolTable
	phys      *physical
	policy    *policy
	cache     *cacheLimit
	observers *observers
	callbacks *callbacks
	held      *heldFrees
	mover     *mover
	paused    *pausedMemory
	frees     *frees
	segments  *segments
	endings   *endings
	lookup    *lookup
	upstreams *upstreams
	imports   *imports
	usage     *usage
}

// newState makes the parts of a device.
func newState(g *gpu, mem *physical, pools *poolTable, kept bool) *state {
	s := &state{pools: pools, phys: mem, streams: &streamTable{gpu: g, byID: map[cuda.StreamID]*Stream{}, gone: map[cuda.StreamID]weak.Pointer[Stream]{}},
		observers: &observers{gpu: g}, callbacks: &callbacks{gpu: g}, held: &heldFrees{gpu: g}}
	s.policy = &policy{gpu: g, phys: mem}
	s.cache = newCacheLimit(g, mem, pools)
	s.mover = &mover{gpu: g, streams: s.streams, pools: pools, phys: mem, policy: s.policy, observers: s.observers}
	s.paused = &pausedMemory{gpu: g, streams: s.streams, pools: pools, phys: mem, policy: s.policy, held: s.held}
	s.paused.mu.Rank = lockrank.Pausing
	s.frees = &frees{gpu: g, streams: s.streams, pools: pools, phys: mem, held: s.held, paused: s.paused}
	s.frees.captureReuse.Store(g.opts.CaptureReuse)
	s.segments = &segments{gpu: g, pools: pools, phys: mem, observers: s.observers, frees: s.frees}
	s.endings = &endings{gpu: g, streams: s.streams, pools: pools, phys: mem, observers: s.observers, mover: s.mover, frees: s.frees}
	s.lookup = &lookup{gpu: g, streams: s.streams, endings: s.endings}
	s.upstreams = &upstreams{gpu: g, lookup: s.lookup}
	s.upstreams.mu.Rank = lockrank.Private
	s.imports = &imports{gpu: g, phys: mem}
	s.usage = &usage{gpu: g, streams: s.streams, pools: pools, phys: mem, observers: s.observers, keepStacks: kept}
	return s
}

// streamTable is the streams that the device knows.
type streamTable struct {
	gpu *gpu
	// all is streams by number. One that was forgotten stays until its number is given to another: live leaves it out.
	// +checklocks:gpu.mu
	all []*Stream
	// +checklocks:gpu.mu
	byID map[cuda.StreamID]*Stream // those that are known
	// +checklocks:gpu.mu
	gone map[cuda.StreamID]weak.Pointer[Stream] // those that were forgotten, which the program may still have
	// +checklocks:gpu.mu
	goneAt int // length of gone at which it is next looked through
	// +checklocks:gpu.mu
	forgetAt int // known streams at which those are next looked for that may be forgotten
	// +checklocks:gpu.mu
	capturing []*Stream // whose captures are announced
}

// poolTable is the pools of the device, with their stream heaps and arenas.
type poolTable struct {
	gpu *gpu
	// +checklocks:gpu.mu
	byID map[memory.PoolID]*Pool
	// +checklocks:gpu.mu
	byNumber []*Pool // nil where one is gone
	// +checklocks:gpu.mu
	names []memory.PoolID
	// +checklocks:gpu.mu
	heaps []*streamHeap // nil where one was dissolved
	// +checklocks:gpu.mu
	places journal.Numbers // in heaps
	// +checklocks:gpu.mu
	arenas []*arena.Arena
	// +checklocks:gpu.mu
	using int // streams that have allocated
	// +checklocks:gpu.mu
	ending []*Pool // released pools that still hold something
	// +checklocks:gpu.mu
	dissolving bool // a released pool still has stream heaps
	// +checklocks:gpu.mu
	unused []resource.Closer // to be closed
	// +checklocks:gpu.mu
	retireAt int // arenas at which idle ones are next looked for
	// +checklocks:gpu.mu
	inherited int // arenas that a stream got from another since they were last looked for
	// +checklocks:gpu.mu
	onTokensEnd func() // nil: none
}

// physical is the device's physical memory and addresses, and their figures.
type physical struct {
	gpu      *gpu
	pools    *poolTable
	upstream resource.Chunks // of the pools that are made of chunks; nil with backend malloc
	mem      *phys.Memory
	offload  *offload.Store // of the contents of paused memory
	glance   glance
	// +checklocks:gpu.mu
	prop cuda.MemProp // of the chunks and the single handles, once probed
	// +checklocks:gpu.mu
	probed bool
	// +checklocks:gpu.mu
	quota quota.Device
	// +checklocks:gpu.mu
	counts memory.Counters
	// +checklocks:gpu.mu
	arriving []run // new chunks that are being published and lie in no stream heap yet
}

// newPhysical finds out which memory the device has; upstream says that its pools have an upstream and no chunks.
//
// +checklocksignore: no other thread has the device
func newPhysical(g *gpu, pools *poolTable, upstream bool) (*physical, error) {
	ph := &physical{gpu: g, pools: pools, quota: quota.NewDevice(g.opts.Limit), offload: offload.New(g.health, g.timeline, g.info.LazyHost)}
	ph.glance.mu.Rank = lockrank.Glance
	// Also where only a pool to come may need it: finding out takes memory, and now there is some.
	if err := ph.virtual(); err != nil && (g.info.VMM || g.opts.Backend == config.BackendVMM && !upstream) {
		return nil, err
	}
	if g.opts.Backend == config.BackendVMM && !g.opts.SingleHandle && !upstream {
		ph.upstream = resource.Virtual(g.drv, ph.prop, g.info.Granularity)
	}
	ph.mem = phys.New(g.health, &ph.quota, ph.upstream)
	return ph, nil
}

// policy decides whether memory grows or moves, and in which sizes.
type policy struct {
	gpu  *gpu
	phys *physical
	// +checklocks:gpu.mu
	plan planner
	// +checklocks:gpu.mu
	throttle throttle
	// +checklocks:gpu.mu
	over []*request // to be used again
}

// observers are the functions that learn of memory that is mapped and unmapped.
type observers struct {
	gpu *gpu
	// +checklocks:gpu.mu
	onMap *observer // nil: none
	// +checklocks:gpu.mu
	onUnmap *observer // nil: none
	// +checklocks:gpu.mu
	publishing []*publication // under way, the oldest first
	// +checklocks:gpu.mu
	publishDone chan struct{} // closed when one is done; nil: no thread waits for that
}

// callbacks are the functions of the device that may give memory back.
type callbacks struct {
	gpu *gpu
	// +checklocks:gpu.mu
	all []*callback
}

// heldFrees are free blocks that captures must not be given.
type heldFrees struct {
	gpu *gpu
	// +checklocks:gpu.mu
	all []heldFree
}

// mover maps chunks into stream heaps and takes them out again.
type mover struct {
	gpu       *gpu
	streams   *streamTable
	pools     *poolTable
	phys      *physical
	policy    *policy
	observers *observers
}

// pausedMemory is memory that is paused, or on its way.
type pausedMemory struct {
	gpu     *gpu
	streams *streamTable
	pools   *poolTable
	phys    *physical
	policy  *policy
	held    *heldFrees
	// mu is held by threads that pause or resume memory, also while the GPU is waited for and contents are copied. It comes before
	// the device's lock, and no other thread waits for it.
	mu lockrank.Mutex
}

// frees are the blocks that were freed and wait for other streams, and what else a free has to do.
type frees struct {
	gpu     *gpu
	streams *streamTable
	pools   *poolTable
	phys    *physical
	held    *heldFrees
	paused  *pausedMemory
	// captureReuse is on while frees within a capture may complete there (Captures.SetReuse).
	captureReuse atomic.Bool
	late         arena.Late // blocks that C code gave back while they were being paused
	// +checklocks:gpu.mu
	pending []pendingFree
	// +checklocks:gpu.mu
	collected uint64 // bytes of frees that waited for other streams, ever completed
	// +checklocks:gpu.mu
	uses useLists
	// +checklocks:gpu.mu
	exports map[cuda.Ptr]*Export // by address of the block
}

// segments are the segments of pools that are made of them.
type segments struct {
	gpu       *gpu
	pools     *poolTable
	phys      *physical
	observers *observers
	frees     *frees
	// +checklocks:gpu.mu
	sources segmentSources
}

// endings ends pools, arenas and streams that nothing uses any more.
type endings struct {
	gpu       *gpu
	streams   *streamTable
	pools     *poolTable
	phys      *physical
	observers *observers
	mover     *mover
	frees     *frees
}

// lookup finds the streams of CUDA handles.
type lookup struct {
	gpu     *gpu
	streams *streamTable
	endings *endings
}

// upstreams makes users' resources fit for pools.
type upstreams struct {
	gpu    *gpu
	lookup *lookup
	common upstream // of pools that name no memory; set when the device starts, none where they are what the options say
	mu     lockrank.Mutex
	// +checklocks:mu
	private *Stream // on which pools use others; nil: none does
}

// imports is memory of other processes that is mapped here.
type imports struct {
	gpu  *gpu
	phys *physical
	// +checklocks:gpu.mu
	imported map[cuda.Ptr]uint64 // sizes, by address
	// +checklocks:gpu.mu
	readOnly map[cuda.Ptr]uint64 // likewise, of memory that is only read
	// +checklocks:gpu.mu
	pooled map[cuda.Ptr]cuda.MemPool // of memory of stream-ordered pools, by address
	bytes  uint64                    // of all that is mapped, also from other devices; +checklocks:gpu.mu
}

// usage sums up blocks.
type usage struct {
	gpu       *gpu
	streams   *streamTable
	pools     *poolTable
	phys      *physical
	observers *observers
	tagged    atomic.Bool // a request had a tag
	labelled  atomic.Bool // a request named a library
	// +checklocks:gpu.mu
	keepStacks bool
}

// The parts that a device offers its callers, by subject.

// Captures routes streams to pools and follows their captures.
type Captures struct {
	gpu     *gpu
	streams *streamTable
	pools   *poolTable
	held    *heldFrees
	paused  *pausedMemory
	frees   *frees
	endings *endings
	// +checklocks:gpu.mu
	number uint32 // of the last capture
}

// History is the device's events.
type History struct {
	gpu   *gpu
	pools *poolTable
	usage *usage
}

// Magazines are the blocks freed last that C code hands out again.
type Magazines struct {
	gpu   *gpu
	pools *poolTable
}

// Peers are the devices that may use this one's memory.
type Peers struct {
	gpu     *gpu
	pools   *poolTable
	phys    *physical
	imports *imports
}

// Views are what a device knows of its memory, for reports and displays.
type Views struct {
	gpu     *gpu
	streams *streamTable
	pools   *poolTable
	phys    *physical
	frees   *frees
	usage   *usage
	imports *imports
}
