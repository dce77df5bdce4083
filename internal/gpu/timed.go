package gpu

import (
	"sort"
	"sync/atomic"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// Timed is a driver that measures the calls made through it: how often each was made and the host time it took. It is
// for holding the simulated device's costs against the real ones; the clock costs about 50 ns a call. Methods that are
// not listed here pass through unmeasured.
type Timed struct {
	cuda.Driver
	calls [numTimed]struct{ n, ns atomic.Int64 }
}

const (
	timedCreate = iota
	timedRelease
	timedMap
	timedUnmap
	timedAccess
	timedReserve
	timedAddressFree
	timedAlloc
	timedFree
	timedRecord
	timedQuery
	timedWait
	timedEventCreate
	timedCapture
	numTimed
)

var timedNames = [numTimed]string{"cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess",
	"cuMemAddressReserve", "cuMemAddressFree", "cuMemAlloc", "cuMemFree", "cuEventRecord", "cuEventQuery",
	"cuStreamWaitEvent", "cuEventCreate", "cuStreamGetCaptureInfo"}

// NewTimed measures a driver.
func NewTimed(d cuda.Driver) *Timed { return &Timed{Driver: d} }

// Call is what was measured of one driver call.
type Call struct {
	Name  string // without version suffix
	Count int64
	Time  time.Duration
}

// Calls lists the calls that were made, by name.
func (t *Timed) Calls() []Call {
	var out []Call
	for i := range t.calls {
		if n := t.calls[i].n.Load(); n > 0 {
			out = append(out, Call{timedNames[i], n, time.Duration(t.calls[i].ns.Load())})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Name < out[j].Name })
	return out
}

// Reset forgets what was measured.
func (t *Timed) Reset() {
	for i := range t.calls {
		t.calls[i].n.Store(0)
		t.calls[i].ns.Store(0)
	}
}

func (t *Timed) since(call int, start time.Time) {
	t.calls[call].ns.Add(int64(time.Since(start)))
	t.calls[call].n.Add(1)
}

func (t *Timed) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	defer t.since(timedCreate, time.Now())
	return t.Driver.MemCreate(size, prop)
}

func (t *Timed) MemRelease(h cuda.Handle) error {
	defer t.since(timedRelease, time.Now())
	return t.Driver.MemRelease(h)
}

func (t *Timed) MemMap(p cuda.Ptr, size uint64, h cuda.Handle) error {
	defer t.since(timedMap, time.Now())
	return t.Driver.MemMap(p, size, h)
}

func (t *Timed) MemUnmap(p cuda.Ptr, size uint64) error {
	defer t.since(timedUnmap, time.Now())
	return t.Driver.MemUnmap(p, size)
}

func (t *Timed) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	defer t.since(timedAccess, time.Now())
	return t.Driver.MemSetAccess(p, size, devs)
}

func (t *Timed) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	defer t.since(timedReserve, time.Now())
	return t.Driver.AddressReserve(size, align, hint)
}

func (t *Timed) AddressFree(p cuda.Ptr, size uint64) error {
	defer t.since(timedAddressFree, time.Now())
	return t.Driver.AddressFree(p, size)
}

func (t *Timed) MemAlloc(d cuda.Device, size uint64) (cuda.Ptr, error) {
	defer t.since(timedAlloc, time.Now())
	return t.Driver.MemAlloc(d, size)
}

func (t *Timed) MemFree(d cuda.Device, p cuda.Ptr) error {
	defer t.since(timedFree, time.Now())
	return t.Driver.MemFree(d, p)
}

func (t *Timed) EventRecord(d cuda.Device, e cuda.Event, s cuda.Stream) error {
	defer t.since(timedRecord, time.Now())
	return t.Driver.EventRecord(d, e, s)
}

func (t *Timed) EventQuery(d cuda.Device, e cuda.Event) (bool, error) {
	defer t.since(timedQuery, time.Now())
	return t.Driver.EventQuery(d, e)
}

func (t *Timed) StreamWaitEvent(d cuda.Device, s cuda.Stream, e cuda.Event) error {
	defer t.since(timedWait, time.Now())
	return t.Driver.StreamWaitEvent(d, s, e)
}

func (t *Timed) EventCreate(d cuda.Device) (cuda.Event, error) {
	defer t.since(timedEventCreate, time.Now())
	return t.Driver.EventCreate(d)
}

func (t *Timed) StreamCapture(d cuda.Device, s cuda.Stream) (cuda.CaptureStatus, uint64, error) {
	defer t.since(timedCapture, time.Now())
	return t.Driver.StreamCapture(d, s)
}
