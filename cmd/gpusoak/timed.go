package main

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
)

// timed is a driver that measures every call that the engine makes. Calls that concern memory are repeated on a
// simulated device, at its own addresses, whose books then say what the model charges for them; the cost of the others
// depends on nothing and is added up here.
type timed struct {
	cuda.Driver
	costs  *sim.Costs
	clock  time.Duration // what reading the clock twice takes
	shadow *sim.Driver

	slots [numSlots]slot

	mu sync.Mutex
	// +checklocks:mu
	handles map[cuda.Handle]cuda.Handle // the shadow's handle for each
	// +checklocks:mu
	allocs map[cuda.Ptr]cuda.Ptr // of MemAlloc
	areas  []area                // +checklocks:mu
}

// area is a reservation and where the shadow has it.
type area struct {
	base, size uint64
	shadow     cuda.Ptr
}

type slot struct{ count, measured, modelled, slowest atomic.Int64 }

const (
	slotMemAlloc = iota
	slotMemFree
	slotReserve
	slotAddressFree
	slotCreate
	slotRelease
	slotMap
	slotUnmap
	slotAccess
	slotStreamID
	slotCapture
	slotWait
	slotEventCreate
	slotEventDestroy
	slotRecord
	slotQuery
	slotMemInfo
	slotEventSync // this and what follows wait for the GPU
	slotContextSync
	numSlots
)

var slotNames = [numSlots]string{"cuMemAlloc", "cuMemFree", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate",
	"cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuStreamGetId", "cuStreamGetCaptureInfo",
	"cuStreamWaitEvent", "cuEventCreate", "cuEventDestroy", "cuEventRecord", "cuEventQuery", "cuMemGetInfo",
	"cuEventSynchronize", "cuCtxSynchronize"}

func newTimed(d cuda.Driver, dev cuda.Device) (*timed, error) {
	t := &timed{Driver: d, costs: sim.DefaultCosts(), handles: map[cuda.Handle]cuda.Handle{}, allocs: map[cuda.Ptr]cuda.Ptr{}}
	t.shadow = sim.New(sim.Options{Devices: int(dev) + 1, Capacity: 1 << 45, AddressSpace: 1 << 55,
		Handles: cuda.HandlePosix | cuda.HandleFabric, RDMA: true})
	t.clock = time.Hour
	for range 1000 {
		began := time.Now()
		t.clock = min(t.clock, time.Since(began))
	}
	return t, t.shadow.RetainContext(dev)
}

// at is where the shadow has an address.
//
// +checklocks:t.mu
func (t *timed) at(p cuda.Ptr) cuda.Ptr {
	for _, a := range t.areas {
		if uint64(p)-a.base < a.size {
			return a.shadow + p - cuda.Ptr(a.base)
		}
	}
	return 0
}

// took notes a call that began then.
func (t *timed) took(i int, began time.Time, model time.Duration) {
	d := max(time.Since(began)-t.clock, 0)
	s := &t.slots[i]
	s.count.Add(1)
	s.measured.Add(int64(d))
	s.modelled.Add(int64(model))
	for old := s.slowest.Load(); int64(d) > old && !s.slowest.CompareAndSwap(old, int64(d)); old = s.slowest.Load() {
	}
}

func (t *timed) reset() {
	for i := range t.slots {
		s := &t.slots[i]
		s.count.Store(0)
		s.measured.Store(0)
		s.modelled.Store(0)
		s.slowest.Store(0)
	}
	t.shadow.ResetCalls()
}

// calls is what was measured, without the calls that were not made.
func (t *timed) calls() (out []callReport) {
	shadow := t.shadow.Calls().Calls
	for i := range t.slots {
		s := &t.slots[i]
		if n := s.count.Load(); n != 0 {
			us := func(v *atomic.Int64) float64 { return float64(v.Load()) / 1000 }
			out = append(out, callReport{Name: slotNames[i], Count: n, MeasuredUS: us(&s.measured), ModelledUS: us(&s.modelled),
				SlowestUS: us(&s.slowest), Waits: i >= slotEventSync})
			if i <= slotAccess {
				out[len(out)-1].ModelledUS = float64(shadow[slotNames[i]].Time.Nanoseconds()) / 1000
			}
		}
	}
	return out
}

func (t *timed) MemAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	began := time.Now()
	p, err := t.Driver.MemAlloc(d, size)
	t.took(slotMemAlloc, began, 0)
	if err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.allocs[p], err = t.shadow.MemAlloc(d, size)
	}
	return p, err
}

func (t *timed) MemFree(d cuda.Device, p cuda.Ptr) error {
	t.mu.Lock()
	err := t.shadow.MemFree(d, t.allocs[p])
	delete(t.allocs, p)
	t.mu.Unlock()
	began := time.Now()
	err = cmp.Or(t.Driver.MemFree(d, p), err)
	t.took(slotMemFree, began, 0)
	return err
}

func (t *timed) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	began := time.Now()
	p, err := t.Driver.AddressReserve(size, align, hint)
	t.took(slotReserve, began, 0)
	if err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		var q cuda.Ptr
		q, err = t.shadow.AddressReserve(size, align, 0)
		t.areas = append(t.areas, area{uint64(p), size, q})
	}
	return p, err
}

func (t *timed) AddressFree(p cuda.Ptr, size uint64) error {
	t.mu.Lock()
	err := t.shadow.AddressFree(t.at(p), size)
	t.areas = slices.DeleteFunc(t.areas, func(a area) bool { return a.base == uint64(p) })
	t.mu.Unlock()
	began := time.Now()
	err = cmp.Or(t.Driver.AddressFree(p, size), err)
	t.took(slotAddressFree, began, 0)
	return err
}

func (t *timed) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	began := time.Now()
	h, err := t.Driver.MemCreate(size, prop)
	t.took(slotCreate, began, 0)
	if err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.handles[h], err = t.shadow.MemCreate(size, prop)
	}
	return h, err
}

func (t *timed) MemRelease(h cuda.Handle) error {
	t.mu.Lock()
	err := t.shadow.MemRelease(t.handles[h])
	delete(t.handles, h)
	t.mu.Unlock()
	began := time.Now()
	err = cmp.Or(t.Driver.MemRelease(h), err)
	t.took(slotRelease, began, 0)
	return err
}

func (t *timed) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	began := time.Now()
	err := t.Driver.MemMap(p, size, h)
	t.took(slotMap, began, 0)
	if err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		err = t.shadow.MemMap(t.at(p), size, t.handles[h])
	}
	return err
}

func (t *timed) MemUnmap(p cuda.Ptr, size uint64) error {
	began := time.Now()
	err := t.Driver.MemUnmap(p, size)
	t.took(slotUnmap, began, 0)
	if err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		err = t.shadow.MemUnmap(t.at(p), size)
	}
	return err
}

func (t *timed) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	began := time.Now()
	err := t.Driver.MemSetAccess(p, size, devs)
	t.took(slotAccess, began, 0)
	if err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		err = t.shadow.MemSetAccess(t.at(p), size, devs)
	}
	return err
}

func (t *timed) StreamID(d cuda.Device, s cuda.Stream) (cuda.StreamID, error) {
	began := time.Now()
	id, err := t.Driver.StreamID(d, s)
	t.took(slotStreamID, began, t.costs.StreamGetID)
	return id, err
}

func (t *timed) StreamCapture(d cuda.Device, s cuda.Stream) (cuda.CaptureStatus, uint64, error) {
	began := time.Now()
	status, id, err := t.Driver.StreamCapture(d, s)
	t.took(slotCapture, began, t.costs.StreamGetCaptureInfo)
	return status, id, err
}

func (t *timed) StreamWaitEvent(d cuda.Device, s cuda.Stream, e cuda.Event) error {
	began := time.Now()
	err := t.Driver.StreamWaitEvent(d, s, e)
	t.took(slotWait, began, t.costs.StreamWaitEvent)
	return err
}

func (t *timed) EventCreate(d cuda.Device) (cuda.Event, error) {
	began := time.Now()
	e, err := t.Driver.EventCreate(d)
	t.took(slotEventCreate, began, t.costs.EventCreate)
	return e, err
}

func (t *timed) EventDestroy(d cuda.Device, e cuda.Event) error {
	began := time.Now()
	err := t.Driver.EventDestroy(d, e)
	t.took(slotEventDestroy, began, t.costs.EventDestroy)
	return err
}

func (t *timed) EventRecord(d cuda.Device, e cuda.Event, s cuda.Stream) error {
	began := time.Now()
	err := t.Driver.EventRecord(d, e, s)
	t.took(slotRecord, began, t.costs.EventRecord)
	return err
}

func (t *timed) EventQuery(d cuda.Device, e cuda.Event) (bool, error) {
	began := time.Now()
	ok, err := t.Driver.EventQuery(d, e)
	t.took(slotQuery, began, t.costs.EventQuery)
	return ok, err
}

func (t *timed) MemInfo(d cuda.Device) (free, total uint64, err error) {
	began := time.Now()
	free, total, err = t.Driver.MemInfo(d)
	t.took(slotMemInfo, began, t.costs.MemGetInfo)
	return free, total, err
}

func (t *timed) EventSynchronize(d cuda.Device, e cuda.Event) error {
	began := time.Now()
	err := t.Driver.EventSynchronize(d, e)
	t.took(slotEventSync, began, t.costs.EventSynchronize)
	return err
}

func (t *timed) ContextSynchronize(d cuda.Device) error {
	began := time.Now()
	err := t.Driver.ContextSynchronize(d)
	t.took(slotContextSync, began, t.costs.CtxSynchronize)
	return err
}
