// Package meter measures the calls that are made of a driver: how often, and how long each takes by the driver's clock.
package meter

import (
	"cmp"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// Driver is a driver that measures the calls made through it. Methods that it does not have itself are not measured.
// Times of several threads add up. What reading the clock takes is subtracted.
type Driver struct {
	cuda.Driver
	clock time.Duration // what reading the clock twice takes
	calls [numCalls]struct{ count, total, slowest atomic.Int64 }
}

// Call is what was measured of one driver call, by its name without version suffix.
type Call struct {
	Name           string
	Count          int64
	Total, Slowest time.Duration
	Waits          bool // for the GPU
}

const (
	memAlloc = iota
	memFree
	addressReserve
	addressFree
	memCreate
	memRelease
	memMap
	memUnmap
	memSetAccess
	streamID
	streamCapture
	streamWaitEvent
	eventCreate
	eventDestroy
	eventRecord
	eventQuery
	memInfo
	memcpyAsync
	hostAlloc
	hostRegister
	eventSynchronize // this and what follows wait for the GPU
	streamSynchronize
	contextSynchronize
	numCalls
)

var names = [numCalls]string{"cuMemAlloc", "cuMemFree", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate",
	"cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuStreamGetId", "cuStreamGetCaptureInfo",
	"cuStreamWaitEvent", "cuEventCreate", "cuEventDestroy", "cuEventRecord", "cuEventQuery", "cuMemGetInfo",
	"cuMemcpyAsync", "cuMemHostAlloc", "cuMemHostRegister", "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"}

// New measures a driver.
func New(d cuda.Driver) *Driver {
	m := &Driver{Driver: d, clock: math.MaxInt64}
	for range 1000 {
		start := d.Now()
		m.clock = min(m.clock, d.Now()-start)
	}
	return m
}

// Calls are the calls that were made, those that took longest in all first.
func (d *Driver) Calls() (out []Call) {
	for i := range d.calls {
		c := &d.calls[i]
		if n := c.count.Load(); n > 0 {
			out = append(out, Call{names[i], n, time.Duration(c.total.Load()), time.Duration(c.slowest.Load()), i >= eventSynchronize})
		}
	}
	slices.SortStableFunc(out, func(a, b Call) int { return cmp.Compare(b.Total, a.Total) })
	return out
}

// Reset forgets what was measured.
func (d *Driver) Reset() {
	for i := range d.calls {
		c := &d.calls[i]
		c.count.Store(0)
		c.total.Store(0)
		c.slowest.Store(0)
	}
}

func (d *Driver) since(call int, start time.Duration) {
	took := int64(max(d.Driver.Now()-start-d.clock, 0))
	c := &d.calls[call]
	c.count.Add(1)
	c.total.Add(took)
	for old := c.slowest.Load(); took > old && !c.slowest.CompareAndSwap(old, took); old = c.slowest.Load() {
	}
}

// Median is the middle of a list, the upper one of two.
func Median[T cmp.Ordered](list []T) T {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[len(sorted)/2]
}

// MS is a duration in milliseconds.
func MS(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }
