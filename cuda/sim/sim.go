// Package sim is a GPU that exists in memory: a cuda.Driver with capacity, granularity, streams and events in
// virtual time, stream capture, the measured cost of every call, and failure on demand. It knows nothing of its
// callers.
//
// # How the parts fit
//
// A Driver has one host clock (clock.go). Programs that use the GPU queue work with Use, UseFor and Read (use.go) on
// streams (stream.go). Work completes at a virtual time, and events (event.go) carry that time from stream to stream
// and to the host.
//
// Memory is physical chunks, reservations and mappings (vmm.go, address.go), cuMemAlloc blocks (memalloc.go) or blocks of
// stream-ordered pools (pool.go). Page-locked and managed memory is real memory of the process (host.go). Contents that were
// copied or written are kept, sparsely, by chunk (contents.go, copy.go).
//
// Every call is counted, costs what it cost on an H200 (costs.go, h200_driver_costs.csv), and may be made to fail (calls.go).
// MemFree waits for the work of its context, as cuMemFree does; unmapping does not wait.
//
// # The checker
//
// The checker (check.go, order.go) judges the caller. Memory that is used while it is not mapped, unmapped or freed
// while queued work uses it, or used by two streams at once without order is a Fault, with the history of that
// memory. So code that breaks a rule fails here. On a GPU it would silently read wrong bytes.
//
// # Why to believe it
//
// The conformance test in cuda/open runs one contract over this driver, over a stand-in library in C, and over NVIDIA's driver
// where there is one. What was observed on a GPU is a case in it.
//
// # Locks
//
// Driver.mu protects everything in the Driver. It is held across the functions given to FailCall and SetThread, which
// therefore must not call the Driver; OnFault is called without it.
package sim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// DefaultCapacity is the memory of an NVIDIA H200 in bytes, as cuDeviceTotalMem gives it.
const DefaultCapacity = 150_109_880_320

// DefaultGranularity is the minimum granularity of virtual memory on every NVIDIA GPU so far, in bytes.
const DefaultGranularity = 2 << 20

// DefaultAddressSpace is the size in bytes of the space that reservations and allocations are placed in.
const DefaultAddressSpace = 128 << 40

// hostNode is the only NUMA node of the host.
const hostNode = 0

// maxDevices is what the access set of a mapping has bits for.
const maxDevices = 64

// CheckLevel says how much the Driver checks its caller.
type CheckLevel int

const (
	// CheckNone keeps counts, costs, capacity and virtual time. Work is queued without looking at the memory.
	CheckNone CheckLevel = iota
	// CheckUse also faults on use of memory that is not mapped, not accessible or freed, and on unmapping or freeing
	// what work that is not complete at that (virtual) time uses.
	CheckUse
	// CheckOrder also demands order, whatever the clock says: two uses of the same physical byte, through any
	// mapping, from different streams must be ordered by streams, events or the host, and the host must have seen a
	// use complete (an event queried complete, a synchronisation) before it unmaps or frees.
	CheckOrder
)

// Options describe the simulated machine. The zero value is one H200 whose work completes at once, unchecked.
type Options struct {
	Devices      int    // default 1, at most 64
	Capacity     uint64 // bytes per device, default DefaultCapacity
	Granularity  uint64 // bytes, a power of two, default DefaultGranularity
	AddressSpace uint64 // bytes, default DefaultAddressSpace
	HostCapacity uint64 // bytes of host memory for LocationHostNUMA chunks, HostAlloc and HostRegister; 0 is unlimited

	Handles  cuda.HandleType // what ProbeHandles grants and MemCreate accepts
	RDMA     bool            // chunks can be made GPUDirect RDMA capable
	Isolated bool            // no device can use the memory of another

	// Shared names a file through which drivers, of one process or of several, share the memory of their devices (shared.go):
	// what one creates is not free for another until it is released or the process ends. All have the same Devices and
	// Capacity. The file is made where there is none. "" shares nothing. Linux only.
	Shared string

	// Lag is the delay of work queued by Use: it completes Lag after it was queued, and never before earlier work of
	// its stream or the events that the stream waits for.
	Lag time.Duration
	// Busy takes every stream to be Lag behind at all times, whether or not Use said so: an event completes Lag after
	// it was recorded, and a wait for a stream or a context takes Lag at least.
	Busy bool
	// FreeWaitsAllContexts makes MemFree wait for every context of the device (as ROCm does), not the primary alone.
	FreeWaitsAllContexts bool
	// CallsTakeTime makes every call advance the host clock by its modelled cost.
	CallsTakeTime bool
	// RealTime makes the host clock follow the wall clock, for benchmarks with a lag. Calls cost what they cost here,
	// waits are skipped over, not slept through. It excludes CallsTakeTime.
	RealTime bool

	Check   CheckLevel
	OnFault func(error) // called for every fault, without locks held
	Costs   *Costs      // default DefaultCosts()
}

func (o *Options) ensureDefaults() {
	if o.Devices == 0 {
		o.Devices = 1
	}
	if o.Capacity == 0 {
		o.Capacity = DefaultCapacity
	}
	if o.Granularity == 0 {
		o.Granularity = DefaultGranularity
	}
	if o.AddressSpace == 0 {
		o.AddressSpace = DefaultAddressSpace
	}
	if o.Costs == nil {
		o.Costs = DefaultCosts()
	}
}

// Validate names the first option that New would not accept.
func (o Options) Validate() error {
	o.ensureDefaults()
	switch {
	case o.Devices < 0 || o.Devices > maxDevices:
		return fmt.Errorf("sim: %d devices: expected 1 to %d", o.Devices, maxDevices)
	case o.Granularity&(o.Granularity-1) != 0 || o.Granularity < 4096:
		return fmt.Errorf("sim: granularity of %d bytes: expected a power of two of at least 4096", o.Granularity)
	case o.AddressSpace < o.Granularity || o.AddressSpace > 1<<56:
		return fmt.Errorf("sim: address space of %d bytes: expected one granule to 64 PiB", o.AddressSpace)
	case o.Lag < 0:
		return fmt.Errorf("sim: lag of %v: expected 0 or more", o.Lag)
	case o.RealTime && o.CallsTakeTime:
		return errors.New("sim: RealTime and CallsTakeTime exclude each other")
	case o.Check < CheckNone || o.Check > CheckOrder:
		return fmt.Errorf("sim: check level %d: expected %d to %d", o.Check, CheckNone, CheckOrder)
	}
	return nil
}

// Driver is the simulated driver and the GPUs behind it.
type Driver struct {
	mu    sync.Mutex
	opt   Options
	costs *Costs

	clock
	accounts
	devices   []*device
	contexts  []*context // by context number - 1
	streams   []*stream  // by slot; nil where destroyed
	freeStr   []uint32
	adopted   map[cuda.Stream]*stream // by handle; nil unless AdoptStreams
	streamID  uint64
	thread    func() uint64
	events    []event
	freeEv    []uint32
	space     space
	chunks    []*chunk // by slot
	freeCh    []uint32
	live      liveCounts
	hostUsed  uint64
	mapSeq    uint64
	captures  uint64  // ids of captures so far
	identity  uint64  // tells this driver from those of other processes
	shared    *shared // nil without Options.Shared
	ipc       []*ipcMapping
	elsewhere elsewhere
	host      []*hostRange // by address
	pools     []*pool
	poolSeq   cuda.MemPool // of the last one
	order     order
	faults
}

// device is one GPU.
type device struct {
	id       cuda.Device
	capacity uint64
	used     uint64 // bytes of chunks and allocations on the device
	peak     uint64 // highest used since ResetPeak
	outside  uint64 // bytes that other processes hold (SetOutside)
	others   uint64 // bytes that other drivers of Options.Shared hold, as of the last look
	primary  *context
	peers    uint64     // a bit for each device whose allocations the primary context may use
	contexts []*context // primary and others
	slabs    []*slab    // those with room, for MemAlloc below the granularity
	pool     *pool      // the default one, nil before it was asked for
}

// New is Open for options that programmers write: it panics where Open fails.
func New(opt Options) *Driver {
	d, err := Open(opt)
	if err != nil {
		panic(err)
	}
	return d
}

// Open makes a simulated machine. It fails where Options.Validate does, or on the file of Options.Shared.
func Open(opt Options) (*Driver, error) {
	if err := opt.Validate(); err != nil {
		return nil, err
	}
	opt.ensureDefaults()
	d := &Driver{opt: opt, costs: opt.Costs, identity: rand.Uint64()}
	d.clock.start(opt.RealTime)
	d.space.init(opt.AddressSpace, opt.Granularity)
	for i := range opt.Devices {
		d.devices = append(d.devices, &device{id: cuda.Device(i), capacity: opt.Capacity})
	}
	if opt.Shared != "" {
		var err error
		if d.shared, err = openShared(opt.Shared, machineID{uint64(opt.Devices), opt.Capacity}, d.identity); err != nil {
			return nil, fmt.Errorf("sim: shared file %s: %w", opt.Shared, err)
		}
	}
	return d, nil
}

var _ cuda.Driver = (*Driver)(nil)

// Name is "sim".
func (d *Driver) Name() string { return "sim" }

// Version is the CUDA version that is simulated.
func (d *Driver) Version() int { return 13000 }

// DeviceCount is Options.Devices.
func (d *Driver) DeviceCount() (int, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callDeviceGetCount, noDevice, 0, d.costs.Attribute); err != nil {
		return 0, err
	}
	return len(d.devices), nil
}

// DeviceInfo describes a simulated device.
func (d *Driver) DeviceInfo(dev cuda.Device) (cuda.DeviceInfo, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callDeviceGetAttribute, dev, 0, d.costs.Attribute); err != nil {
		return cuda.DeviceInfo{}, err
	}
	info := cuda.DeviceInfo{
		Name:        "Cistern simulated GPU",
		TotalBytes:  d.devices[dev].capacity,
		Granularity: d.opt.Granularity,
		VMM:         true,
		Handles:     d.opt.Handles,
		RDMA:        d.opt.RDMA,
		Multiproc:   132,
		Managed:     true,
		Pools:       true,
		PoolHandles: d.opt.Handles,
		HostNUMA:    hostNode,
		HostVMM:     true,
		LazyHost:    true,
	}
	copy(info.UUID[:], "cistern-sim-gpu")
	info.UUID[15] = byte(dev)
	return info, nil
}

// ProbeHandles is Options.Handles, at the cost of the creations it takes to find out.
func (d *Driver) ProbeHandles(dev cuda.Device) (cuda.HandleType, error) {
	requested := [...]cuda.HandleType{cuda.HandleFabric | cuda.HandlePosix, cuda.HandlePosix, cuda.HandleNone}
	for _, t := range requested {
		h, err := d.MemCreate(d.opt.Granularity, cuda.MemProp{Device: dev, Handles: t})
		switch {
		case err == nil:
			if err = d.MemRelease(h); err != nil {
				err = d.MemRelease(h) // once more: nothing else would
			}
			return t, err
		case errors.Is(err, cuda.ErrNotPermitted) || errors.Is(err, cuda.ErrNotSupported):
		default:
			return cuda.HandleNone, err
		}
	}
	return cuda.HandleNone, nil
}

// ContextActive reports whether something retained the primary context.
func (d *Driver) ContextActive(dev cuda.Device) (bool, error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callPrimaryCtxGetState, dev, 0, d.costs.Attribute); err != nil {
		return false, err
	}
	return d.devices[dev].primary != nil, nil
}

// RetainContext makes the primary context. What its creation costs is not charged: every program pays it once.
func (d *Driver) RetainContext(dev cuda.Device) error {
	d.mu.Lock()
	defer d.leave()
	if err := d.begin(callPrimaryCtxRetain, dev, 0, d.costs.Attribute); err != nil {
		return err
	}
	d.primary(dev)
	return nil
}

// MemInfo is the device's capacity and what of it neither this process nor another one (Options.Shared, SetOutside) holds.
func (d *Driver) MemInfo(dev cuda.Device) (free, total uint64, err error) {
	d.mu.Lock()
	defer d.leave()
	if err := d.beginContext(callMemGetInfo, dev, 0, d.costs.MemGetInfo); err != nil {
		return 0, 0, err
	}
	v := d.devices[dev]
	if d.shared != nil {
		if code := d.shared.look(v); code != cuda.Success {
			return 0, 0, d.errorOf(callMemGetInfo, dev, 0, code)
		}
	}
	return v.available(), v.capacity, nil
}

func (v *device) available() uint64 {
	if held := v.used + v.others + v.outside; held < v.capacity {
		return v.capacity - held
	}
	return 0
}
