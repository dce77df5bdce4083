package replay

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda/sim"
)

// call is a driver call that the models make.
type call uint8

const (
	callMemAlloc call = iota
	callMemFree
	callMemCreate
	callMemMap
	callMemSetAccess
	callMemUnmap
	callMemRelease
	callAddressReserve
	callAddressFree
	callMemGetInfo
	callStreamSynchronize
	callStreamWaitEvent
	callEventCreate
	callEventRecord
	callEventQuery
	callEventSynchronize
	callMemAllocAsync
	callMemFreeAsync
	numCalls
)

// callNames are the driver's names, without version suffix.
var callNames = [numCalls]string{"cuMemAlloc", "cuMemFree", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap",
	"cuMemRelease", "cuMemAddressReserve", "cuMemAddressFree", "cuMemGetInfo", "cuStreamSynchronize",
	"cuStreamWaitEvent", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuMemAllocAsync",
	"cuMemFreeAsync"}

// meter counts and prices a model's driver calls, with the costs of the simulated device.
type meter struct {
	costs *sim.Costs
	lag   time.Duration
	calls [numCalls]int64
	time  time.Duration
	wait  time.Duration

	streamSyncs, deviceSyncs, retries, ooms int64

	reserved, peak uint64
	allocated      uint64

	nowUS  int64 // host clock
	syncUS int64 // when the host last waited for all work

	extra int64 // steps beyond one for each event, since they were last asked for
}

// fastestHost is the least part of the modelled time that driver calls took: 0.45 to 1.0 of it, on three machines.
const fastestHost = 0.45

func newMeter(lag time.Duration) meter { return meter{costs: sim.DefaultCosts(), lag: lag} }

func (m *meter) count(c call, cost time.Duration) {
	m.calls[c]++
	m.time += cost
}

// grow and shrink follow the memory held from the driver.
func (m *meter) grow(size uint64) {
	m.reserved += size
	m.peak = max(m.peak, m.reserved)
}

func (m *meter) shrink(size uint64) { m.reserved -= size }

func (m *meter) memAlloc(size uint64) {
	m.count(callMemAlloc, m.costs.MemAlloc(size))
	m.grow(size)
}

// memFree is cuMemFree, which waits for all work of the device.
func (m *meter) memFree(size uint64) {
	m.count(callMemFree, m.costs.MemFree(size))
	m.shrink(size)
	m.deviceSyncs++
	m.waitForGPU()
}

func (m *meter) streamSync() {
	m.count(callStreamSynchronize, m.costs.StreamSynchronize)
	m.streamSyncs++
	m.waitForGPU()
}

func (m *meter) eventSync() {
	m.count(callEventSynchronize, m.costs.EventSynchronize)
	m.streamSyncs++
	m.waitForGPU()
}

// waitForGPU adds what the host loses until the work queued so far is done: the lag, or less where it waited not long
// ago and has queued little since.
func (m *meter) waitForGPU() {
	since := time.Duration(m.nowUS-m.syncUS) * time.Microsecond
	m.wait += min(m.lag, since)
	m.syncUS = m.nowUS
}

// mapHandles is making and mapping n handles of size bytes each, with one call that gives access to all of them.
func (m *meter) mapHandles(n int, size uint64) {
	m.calls[callMemCreate] += int64(n)
	m.calls[callMemMap] += int64(n)
	m.time += time.Duration(n) * (m.costs.MemCreate(size) + m.costs.MemMap(size))
	m.count(callMemSetAccess, m.costs.MemSetAccess(size, n))
	m.grow(uint64(n) * size)
}

// unmapHandles undoes mapHandles, a call for each handle. It does not wait.
func (m *meter) unmapHandles(n int, size uint64) {
	m.calls[callMemUnmap] += int64(n)
	m.calls[callMemRelease] += int64(n)
	m.time += time.Duration(n) * (m.costs.MemUnmap(size) + m.costs.MemRelease(size))
	m.shrink(uint64(n) * size)
}

// Advance is Policy.Advance.
func (m *meter) Advance(us int64) { m.nowUS = max(m.nowUS, us) }

// Reserved is Policy.Reserved.
func (m *meter) Reserved() uint64 { return m.reserved }

// Spent is Policy.Spent.
func (m *meter) Spent() time.Duration { return m.time + m.wait }

// steps is stepper.steps.
func (m *meter) steps() int64 {
	n := m.extra
	m.extra = 0
	return n
}

// search counts the steps of looking at n things.
func (m *meter) search(n int) { m.extra += int64(n) }

// Usage is Policy.Usage.
func (m *meter) Usage() (allocated, reserved uint64) { return m.allocated, m.reserved }

// Close is Policy.Close.
func (m *meter) Close() error { return nil }

// Stats is Policy.Stats.
func (m *meter) Stats() Stats {
	s := Stats{PeakReserved: m.peak, Calls: map[string]int64{}, DriverTime: m.time, SyncWait: m.wait,
		StreamSyncs: m.streamSyncs, DeviceSyncs: m.deviceSyncs, Retries: m.retries, OOMs: m.ooms}
	for c, n := range m.calls {
		if n > 0 {
			s.Calls[callNames[c]] = n
		}
	}
	return s
}
