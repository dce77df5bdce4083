package sim

import (
	"math"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// call numbers the driver calls, so that counting one is an array access.
type call uint8

const (
	callDeviceGetCount call = iota
	callDeviceGetAttribute
	callDeviceCanAccessPeer
	callPrimaryCtxGetState
	callPrimaryCtxRetain
	callCtxEnablePeerAccess
	callMemGetInfo
	callMemAlloc
	callMemFree
	callMemAddressReserve
	callMemAddressFree
	callMemCreate
	callMemRelease
	callMemMap
	callMemUnmap
	callMemSetAccess
	callMemExport
	callMemImport
	callIpcGet
	callIpcOpen
	callEventExport
	callEventOpen
	callPoolExport
	callPoolImport
	callPoolExportPtr
	callPoolImportPtr
	callIpcClose
	callMemHostAlloc
	callMemFreeHost
	callMemHostRegister
	callMemHostUnregister
	callMemAllocManaged
	callMemPrefetch
	callMemcpy
	callPoolCreate
	callPoolDestroy
	callPoolDefault
	callPoolGet
	callPoolSet
	callPoolTrim
	callPoolSetAccess
	callMemAllocAsync
	callMemFreeAsync
	callStreamCreate
	callStreamDestroy
	callStreamGetFlags
	callStreamGetID
	callStreamGetCaptureInfo
	callGraphNodeGetDependencies
	callStreamWaitEvent
	callStreamSynchronize
	callCtxSynchronize
	callEventCreate
	callEventDestroy
	callEventRecord
	callEventQuery
	callEventSynchronize
	numCalls
)

var callNames = [numCalls]string{
	callDeviceGetCount:           "cuDeviceGetCount",
	callDeviceGetAttribute:       "cuDeviceGetAttribute",
	callDeviceCanAccessPeer:      "cuDeviceCanAccessPeer",
	callPrimaryCtxGetState:       "cuDevicePrimaryCtxGetState",
	callPrimaryCtxRetain:         "cuDevicePrimaryCtxRetain",
	callCtxEnablePeerAccess:      "cuCtxEnablePeerAccess",
	callMemGetInfo:               "cuMemGetInfo",
	callMemAlloc:                 "cuMemAlloc",
	callMemFree:                  "cuMemFree",
	callMemAddressReserve:        "cuMemAddressReserve",
	callMemAddressFree:           "cuMemAddressFree",
	callMemCreate:                "cuMemCreate",
	callMemRelease:               "cuMemRelease",
	callMemMap:                   "cuMemMap",
	callMemUnmap:                 "cuMemUnmap",
	callMemSetAccess:             "cuMemSetAccess",
	callMemExport:                "cuMemExportToShareableHandle",
	callMemImport:                "cuMemImportFromShareableHandle",
	callIpcGet:                   "cuIpcGetMemHandle",
	callIpcOpen:                  "cuIpcOpenMemHandle",
	callIpcClose:                 "cuIpcCloseMemHandle",
	callEventExport:              "cuIpcGetEventHandle",
	callEventOpen:                "cuIpcOpenEventHandle",
	callPoolExport:               "cuMemPoolExportToShareableHandle",
	callPoolImport:               "cuMemPoolImportFromShareableHandle",
	callPoolExportPtr:            "cuMemPoolExportPointer",
	callPoolImportPtr:            "cuMemPoolImportPointer",
	callMemHostAlloc:             "cuMemHostAlloc",
	callMemFreeHost:              "cuMemFreeHost",
	callMemHostRegister:          "cuMemHostRegister",
	callMemHostUnregister:        "cuMemHostUnregister",
	callMemAllocManaged:          "cuMemAllocManaged",
	callMemPrefetch:              "cuMemPrefetchAsync",
	callMemcpy:                   "cuMemcpyAsync",
	callPoolCreate:               "cuMemPoolCreate",
	callPoolDestroy:              "cuMemPoolDestroy",
	callPoolDefault:              "cuDeviceGetDefaultMemPool",
	callPoolGet:                  "cuMemPoolGetAttribute",
	callPoolSet:                  "cuMemPoolSetAttribute",
	callPoolTrim:                 "cuMemPoolTrimTo",
	callPoolSetAccess:            "cuMemPoolSetAccess",
	callMemAllocAsync:            "cuMemAllocFromPoolAsync",
	callMemFreeAsync:             "cuMemFreeAsync",
	callStreamCreate:             "cuStreamCreate",
	callStreamDestroy:            "cuStreamDestroy",
	callStreamGetFlags:           "cuStreamGetFlags",
	callStreamGetID:              "cuStreamGetId",
	callStreamGetCaptureInfo:     "cuStreamGetCaptureInfo",
	callGraphNodeGetDependencies: "cuGraphNodeGetDependencies",
	callStreamWaitEvent:          "cuStreamWaitEvent",
	callStreamSynchronize:        "cuStreamSynchronize",
	callCtxSynchronize:           "cuCtxSynchronize",
	callEventCreate:              "cuEventCreate",
	callEventDestroy:             "cuEventDestroy",
	callEventRecord:              "cuEventRecord",
	callEventQuery:               "cuEventQuery",
	callEventSynchronize:         "cuEventSynchronize",
}

func (c call) String() string { return callNames[c] }

// noDevice is the device of calls that have none (address space); callers cannot mean it.
const noDevice cuda.Device = math.MinInt

// CallStat is what one driver call was used for.
type CallStat struct {
	Count uint64
	Time  time.Duration // modelled cost of these calls, waiting excluded
}

// CallStats is what was asked of the driver since New or ResetCalls. Calls that failed are counted too.
type CallStats struct {
	Calls       map[string]CallStat // by driver name without version suffix ("cuMemMap"); only those that were made
	Count       uint64              // of all calls
	Time        time.Duration       // modelled cost of all calls, waiting excluded
	Waited      time.Duration       // host time spent waiting in synchronising calls, cuMemFree included
	StreamSyncs uint64              // StreamSynchronize
	EventSyncs  uint64              // EventSynchronize
	DeviceSyncs uint64              // ContextSynchronize, and MemFree, which waits implicitly
}

// accounts counts and prices calls and decides which fail. Protected by Driver.mu.
type accounts struct {
	stats       [numCalls]CallStat
	waited      time.Duration
	spent       time.Duration // in calls and waits, never reset
	streamSyncs uint64
	eventSyncs  uint64
	deviceSyncs uint64
	number      uint64 // of the current call, from 1, never reset
	pieces      uint64 // that work used, never reset
	fail        func(call string, n uint64) cuda.Code
}

// Calls is what was asked of the driver so far.
func (d *Driver) Calls() CallStats {
	d.mu.Lock()
	defer d.mu.Unlock()
	cs := CallStats{Calls: map[string]CallStat{}, Waited: d.waited,
		StreamSyncs: d.streamSyncs, EventSyncs: d.eventSyncs, DeviceSyncs: d.deviceSyncs}
	for c, s := range d.stats {
		if s.Count != 0 {
			cs.Calls[call(c).String()] = s
			cs.Count += s.Count
			cs.Time += s.Time
		}
	}
	return cs
}

// ResetCalls starts counting anew. Call numbers, as FailCall sees them, go on.
func (d *Driver) ResetCalls() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stats = [numCalls]CallStat{}
	d.waited, d.streamSyncs, d.eventSyncs, d.deviceSyncs = 0, 0, 0, 0
}

// CallNumber is the number of the last driver call, counted from 1 since New.
func (d *Driver) CallNumber() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.number
}

// CallCount is the number of the last driver call, and how many EventQuery there were since New or ResetCalls, which cost least.
func (d *Driver) CallCount() (all, queries uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.number, d.stats[callEventQuery].Count
}

// UseCount is how many pieces of memory work has used since New: a piece is what a use has of one chunk.
func (d *Driver) UseCount() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pieces
}

// Spent is the host time of all calls since New, by their modelled cost, and of their waits.
func (d *Driver) Spent() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.spent
}

// FailCall makes calls fail: f is asked at every driver call, with the call's name and its number (from 1, over all
// calls since New), and the call fails with the code it returns, without effect; Success lets it go on. A code that
// poisons makes all later calls of the device's contexts fail with the same code, as on a GPU. f runs with the
// driver's lock held and must not call the driver; nil ends it.
func (d *Driver) FailCall(f func(call string, n uint64) cuda.Code) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = f
}

// Poison leaves the device's primary context unusable, as a kernel that dies does: later calls fail with code.
// Success makes it usable again.
// Other devices stay well, which is more than NVIDIA's driver (580, two H200s) does for a kernel that faults: every call on
// the process's other devices then fails with the same error.
func (d *Driver) Poison(dev cuda.Device, code cuda.Code) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.primary(dev).poison = code
}

// begin counts and prices a call, and fails it where the caller of FailCall or the device number says so.
// d.mu is held.
func (d *Driver) begin(c call, dev cuda.Device, size uint64, cost time.Duration) error {
	d.number++
	s := &d.stats[c]
	s.Count++
	s.Time += cost
	d.spent += cost
	if d.opt.CallsTakeTime {
		d.clock.now += cost
	}
	if dev != noDevice && uint(dev) >= uint(len(d.devices)) {
		return d.errorOf(c, dev, size, cuda.ErrInvalidDevice)
	}
	if d.fail != nil {
		if code := d.fail(callNames[c], d.number); code != cuda.Success {
			if code.Poisons() {
				d.poison(dev, code)
			}
			return d.errorOf(c, dev, size, code)
		}
	}
	return nil
}

// beginContext is begin for calls that need the device's primary context, alive and well.
func (d *Driver) beginContext(c call, dev cuda.Device, size uint64, cost time.Duration) error {
	if err := d.begin(c, dev, size, cost); err != nil {
		return err
	}
	ctx := d.devices[dev].primary
	if ctx == nil {
		return d.errorOf(c, dev, size, cuda.ErrInvalidContext)
	}
	if ctx.poison != cuda.Success {
		return d.errorOf(c, dev, size, ctx.poison)
	}
	return nil
}

// poisoned is the code that the device's primary context died of, if it did.
func (d *Driver) poisoned(dev cuda.Device) cuda.Code {
	if ctx := d.devices[dev].primary; ctx != nil {
		return ctx.poison
	}
	return cuda.Success
}

// poison marks the contexts of a device dead; a call without a device takes all.
func (d *Driver) poison(dev cuda.Device, code cuda.Code) {
	for _, ctx := range d.contexts {
		if dev == noDevice || ctx.device.id == dev {
			ctx.poison = code
		}
	}
}

func (d *Driver) errorOf(c call, dev cuda.Device, size uint64, code cuda.Code) error {
	if dev == noDevice {
		dev = 0
	}
	return &cuda.Error{Op: callNames[c], Device: dev, Size: size, Code: code}
}

// leave ends every driver call: it unlocks, and hands faults found meanwhile to OnFault.
//
// +checklocksrelease:d.mu
func (d *Driver) leave() {
	if d.pending == nil {
		d.mu.Unlock()
		return
	}
	found := d.pending
	d.pending = nil
	d.mu.Unlock()
	if d.opt.OnFault != nil {
		for _, f := range found {
			d.opt.OnFault(f)
		}
	}
}
