package soak

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/lab/meter"
)

// modelled measures every call that the engine makes. Calls that concern memory are repeated on a simulated device, at its
// own addresses, whose books then say what the model charges for them; the cost of the others depends on nothing.
type modelled struct {
	*meter.Driver
	shadow *sim.Driver

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

func newModelled(d cuda.Driver, dev cuda.Device) (*modelled, error) {
	m := &modelled{Driver: meter.New(d), handles: map[cuda.Handle]cuda.Handle{}, allocs: map[cuda.Ptr]cuda.Ptr{}}
	m.shadow = sim.New(sim.Options{Devices: int(dev) + 1, Capacity: 1 << 45, AddressSpace: 1 << 55,
		Handles: cuda.HandlePosix | cuda.HandleFabric, RDMA: true})
	return m, m.shadow.RetainContext(dev)
}

func (m *modelled) reset() {
	m.Reset()
	m.shadow.ResetCalls()
}

// constant are the costs of calls that are not repeated on the shadow.
var constant = func() map[string]time.Duration {
	c := sim.DefaultCosts()
	return map[string]time.Duration{"cuStreamGetId": c.StreamGetID, "cuStreamGetCaptureInfo": c.StreamGetCaptureInfo,
		"cuStreamWaitEvent": c.StreamWaitEvent, "cuEventCreate": c.EventCreate, "cuEventDestroy": c.EventDestroy,
		"cuEventRecord": c.EventRecord, "cuEventQuery": c.EventQuery, "cuMemGetInfo": c.MemGetInfo,
		"cuEventSynchronize": c.EventSynchronize, "cuStreamSynchronize": c.StreamSynchronize, "cuCtxSynchronize": c.CtxSynchronize}
}()

// report is what was measured, without the calls that were not made.
func (m *modelled) report() (out []callReport) {
	shadow := m.shadow.Calls().Calls
	for _, c := range m.Calls() {
		model := shadow[c.Name].Time
		if each, ok := constant[c.Name]; ok {
			model = each * time.Duration(c.Count)
		}
		us := func(d time.Duration) float64 { return meter.MS(d) * 1e3 }
		out = append(out, callReport{Name: c.Name, Count: c.Count, MeasuredUS: us(c.Total), ModelledUS: us(model), SlowestUS: us(c.Slowest), Waits: c.Waits})
	}
	return out
}

// at is where the shadow has an address.
//
// +checklocks:m.mu
func (m *modelled) at(p cuda.Ptr) cuda.Ptr {
	for _, a := range m.areas {
		if uint64(p)-a.base < a.size {
			return a.shadow + p - cuda.Ptr(a.base)
		}
	}
	return 0
}

func (m *modelled) MemAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	p, err := m.Driver.MemAlloc(d, size)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.allocs[p], err = m.shadow.MemAlloc(d, size)
	}
	return p, err
}

func (m *modelled) MemFree(d cuda.Device, p cuda.Ptr) error {
	m.mu.Lock()
	err := m.shadow.MemFree(d, m.allocs[p])
	delete(m.allocs, p)
	m.mu.Unlock()
	return cmp.Or(m.Driver.MemFree(d, p), err)
}

func (m *modelled) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	p, err := m.Driver.AddressReserve(size, align, hint)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		var q cuda.Ptr
		q, err = m.shadow.AddressReserve(size, align, 0)
		m.areas = append(m.areas, area{uint64(p), size, q})
	}
	return p, err
}

func (m *modelled) AddressFree(p cuda.Ptr, size uint64) error {
	m.mu.Lock()
	err := m.shadow.AddressFree(m.at(p), size)
	m.areas = slices.DeleteFunc(m.areas, func(a area) bool { return a.base == uint64(p) })
	m.mu.Unlock()
	return cmp.Or(m.Driver.AddressFree(p, size), err)
}

func (m *modelled) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	h, err := m.Driver.MemCreate(size, prop)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.handles[h], err = m.shadow.MemCreate(size, prop)
	}
	return h, err
}

func (m *modelled) MemRelease(h cuda.Handle) error {
	m.mu.Lock()
	err := m.shadow.MemRelease(m.handles[h])
	delete(m.handles, h)
	m.mu.Unlock()
	return cmp.Or(m.Driver.MemRelease(h), err)
}

func (m *modelled) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	err := m.Driver.MemMap(p, size, h)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		err = m.shadow.MemMap(m.at(p), size, m.handles[h])
	}
	return err
}

func (m *modelled) MemUnmap(p cuda.Ptr, size uint64) error {
	err := m.Driver.MemUnmap(p, size)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		err = m.shadow.MemUnmap(m.at(p), size)
	}
	return err
}

func (m *modelled) MemSetReadOnly(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	err := m.Driver.MemSetReadOnly(p, size, devs)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		err = m.shadow.MemSetReadOnly(m.at(p), size, devs)
	}
	return err
}

func (m *modelled) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	err := m.Driver.MemSetAccess(p, size, devs)
	if err == nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		err = m.shadow.MemSetAccess(m.at(p), size, devs)
	}
	return err
}
