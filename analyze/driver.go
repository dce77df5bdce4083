package analyze

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/cistern-gpu/cistern/internal/leaves"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
)

// DriverSummary is what a driver trace comes to.
type DriverSummary struct {
	Path      string   `json:"path,omitempty"`
	Program   []string `json:"program"`
	Processes int      `json:"processes"`
	// Untraced are those that used the driver and could not be seen: what they held is missing.
	Untraced  []recording.Untraced `json:"untraced"`
	Calls     []DriverCalls        `json:"calls"`
	DriverNS  uint64               `json:"driver_ns"`   // in all calls
	WaitingNS uint64               `json:"may_wait_ns"` // in calls that may wait for the GPU
	Devices   []DriverDevice       `json:"devices"`
	HostPeak  uint64               `json:"host_peak_bytes"`
	Managed   uint64               `json:"managed_peak_bytes"`
	Kept      []DriverKept         `json:"never_freed"`
	KeptBytes uint64               `json:"never_freed_bytes"`
	KeptCount int                  `json:"never_freed_count"`
	End       recording.DriverEnd  `json:"end"`
	Ended     bool                 `json:"ended"`
}

// DriverCalls is the calls of one function.
type DriverCalls struct {
	Name   string `json:"name"`
	Count  uint64 `json:"count"`
	Failed uint64 `json:"failed"`
	NS     uint64 `json:"ns"`
	MaxNS  uint64 `json:"max_ns"`
	Waits  bool   `json:"may_wait"`
}

// DriverDevice is the memory of a device, of all processes that there were at a time together.
type DriverDevice struct {
	Device int    `json:"device"`
	UUID   string `json:"uuid,omitempty"` // as nvidia-smi writes it, of a GPU or a part of one; "" where it is not known
	Name   string `json:"name,omitempty"`
	// Requested is what was asked for and not given back; Held is what the driver took for it, as far as calls tell: pages
	// of 2 MiB for plain memory, whole handles, and what pools hold.
	PeakRequested uint64 `json:"peak_requested_bytes"`
	PeakHeld      uint64 `json:"peak_held_bytes"`
	PeakNS        uint64 `json:"peak_ns"` // when Held was that, on the trace's clock
	Now           uint64 `json:"-"`       // held
	OOMs          uint64 `json:"ooms"`
	requested     uint64
	pages         map[page]int
	plain, mapped uint64
	pooled        map[uint32]uint64 // by process
	pools         uint64
	shares        map[uint32]*driverShare // by process
}

// driverShare is what one process has of a device, but pools.
type driverShare struct{ requested, plain, mapped uint64 }

type page struct {
	process uint32
	number  uint64
}

// DriverKept is memory that was never given back, of one kind and stack.
type DriverKept struct {
	Memory string            `json:"memory"`
	Device int               `json:"device"`
	PID    uint32            `json:"pid"`
	Count  int               `json:"count"`
	Bytes  uint64            `json:"bytes"`
	Frames []string          `json:"frames"` // innermost first, "func file:line"
	Stack  []recording.Frame `json:"-"`
}

// DriverRun makes the summary of a program, call by call.
type DriverRun struct {
	tracker *driver.Tracker
	calls   [recording.NumCallKinds]DriverCalls
	devices map[int]*DriverDevice
	other   [driver.NumMemoryKinds]struct{ now, peak uint64 }
	others  map[uint32]*[driver.NumMemoryKinds]uint64 // what each process has of other
	ends    leaves.List[driverEnding]                 // to come, in order
	gone    map[uint32]bool                           // processes that have ended
	changed []*DriverDevice                           // what of devices the call under way changed
}

type driverEnding struct {
	process uint32
	ns      uint64
}

// NewDriverRun begins a summary.
func NewDriverRun() *DriverRun {
	return &DriverRun{tracker: driver.NewTracker(), devices: map[int]*DriverDevice{}, others: map[uint32]*[driver.NumMemoryKinds]uint64{}, gone: map[uint32]bool{}}
}

const driverPage = 2 << 20 // what the driver gets memory in

// Device is the state of a device now; nil where nothing happened there.
func (r *DriverRun) Device(i int) *DriverDevice { return r.devices[i] }

// Devices are those that calls were for, in order.
func (r *DriverRun) Devices() []*DriverDevice {
	var out []*DriverDevice
	for _, d := range r.devices {
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b *DriverDevice) int { return cmp.Compare(a.Device, b.Device) })
	return out
}

// Count is how many calls there were.
func (r *DriverRun) Count() uint64 {
	var n uint64
	for i := range r.calls {
		n += r.calls[i].Count
	}
	return n
}

func (r *DriverRun) device(i int16) *DriverDevice {
	d := r.devices[int(i)]
	if d == nil {
		d = &DriverDevice{Device: int(i), pages: map[page]int{}, pooled: map[uint32]uint64{}, shares: map[uint32]*driverShare{}}
		r.devices[int(i)] = d
	}
	return d
}

// EndAt says that a process has ended by then: calls from then on find its memory given back, all of it.
func (r *DriverRun) EndAt(process uint32, ns uint64) {
	r.ends.Insert(r.ends.Search(func(e *driverEnding) bool { return e.ns > ns }), driverEnding{process, ns})
}

// CloseEnded is for when no more calls are to come of the processes that have ended.
func (r *DriverRun) CloseEnded() { r.end(math.MaxUint64) }

// end takes what the processes held that have ended by then. That they never freed it stays true.
func (r *DriverRun) end(ns uint64) {
	for first := r.ends.At(leaves.Pos{}); first != nil && first.ns <= ns; first = r.ends.At(leaves.Pos{}) {
		p := first.process
		r.ends.Delete(leaves.Pos{})
		if r.gone[p] {
			continue
		}
		r.gone[p] = true
		for _, d := range r.devices {
			if s := d.shares[p]; s != nil {
				d.requested -= s.requested
				d.plain -= s.plain
				d.mapped -= s.mapped
			}
			d.pools -= d.pooled[p]
			delete(d.shares, p)
			delete(d.pooled, p)
			d.Now = d.plain + d.mapped + d.pools
		}
		if o := r.others[p]; o != nil {
			for k := range o {
				r.other[k].now -= o[k]
			}
			delete(r.others, p)
		}
	}
}

// Call takes in the next call.
func (r *DriverRun) Call(c *recording.Call) {
	r.end(c.TimeNS + c.TookNS)
	s := &r.calls[c.Kind]
	s.Count++
	s.NS += c.TookNS
	s.MaxNS = max(s.MaxNS, c.TookNS)
	if c.Failed() {
		s.Failed++
		if c.Result == 2 && c.Device >= 0 {
			r.device(c.Device).OOMs++
		}
	}
	r.tracker.Call(c, func(h *driver.Holding) { r.hold(h, true) }, func(h *driver.Holding) { r.hold(h, false) })
	// A call may get, and give back, memory of another device than the one that is current.
	pools := (c.Pool != 0 || c.Kind == recording.DevicePrimaryCtxReset || c.Kind == recording.DevicePrimaryCtxRelease) && !r.gone[c.Process]
	changed := r.changed
	if pools {
		changed = slices.Collect(maps.Values(r.devices))
	}
	r.changed = r.changed[:0]
	for _, d := range changed {
		if pools {
			now := r.tracker.PoolReserved(c.Process, int16(d.Device))
			d.pools += now - d.pooled[c.Process]
			d.pooled[c.Process] = now
		}
		d.Now = d.plain + d.mapped + d.pools
		d.PeakRequested = max(d.PeakRequested, d.requested)
		if d.Now > d.PeakHeld {
			d.PeakHeld, d.PeakNS = d.Now, c.TimeNS+c.TookNS
		}
	}
}

// hold counts memory that was got, or is gone.
func (r *DriverRun) hold(h *driver.Holding, got bool) {
	if r.gone[h.Process] {
		return
	}
	own := r.others[h.Process]
	if own == nil {
		own = new([driver.NumMemoryKinds]uint64)
		r.others[h.Process] = own
	}
	sign := uint64(1)
	if !got {
		sign = ^uint64(0)
	}
	o := &r.other[h.Memory]
	own[h.Memory] += sign * h.Size
	o.now += sign * h.Size
	o.peak = max(o.peak, o.now)
	if !h.Memory.OnDevice() || h.Device < 0 {
		return
	}
	d := r.device(h.Device)
	s := d.shares[h.Process]
	if s == nil {
		s = &driverShare{}
		d.shares[h.Process] = s
	}
	r.changed = append(r.changed, d)
	d.requested += sign * h.Size
	s.requested += sign * h.Size
	switch {
	case h.Memory == driver.PoolMemory: // the pool says what it holds
	case h.At >= recording.VirtualBase:
		bytes := sign * ((h.Size + driverPage - 1) / driverPage * driverPage)
		d.mapped += bytes
		s.mapped += bytes
	default:
		before := d.plain
		r.plain(d, h, got)
		s.plain += d.plain - before
	}
}

// plain counts the pages of memory from cuMemAlloc. Small allocations share pages, so those at the ends are counted by
// who lies in them; the pages between are this one's alone.
func (r *DriverRun) plain(d *DriverDevice, h *driver.Holding, got bool) {
	if h.Size == 0 {
		return
	}
	first, last := h.At/driverPage, (h.At+h.Size-1)/driverPage
	ends := []uint64{first}
	if last > first {
		ends = append(ends, last)
		if between := (last - first - 1) * driverPage; got {
			d.plain += between
		} else {
			d.plain -= between
		}
	}
	for _, n := range ends {
		p := page{h.Process, n}
		if got {
			if d.pages[p]++; d.pages[p] == 1 {
				d.plain += driverPage
			}
		} else if d.pages[p]--; d.pages[p] == 0 {
			delete(d.pages, p)
			d.plain -= driverPage
		}
	}
}

// most is how many entries of what was never freed are listed.
const mostKept = 20

// Summary is what came of it so far. frames are those of a stack, pid the process's number by its index.
func (r *DriverRun) Summary(frames func(stack uint32) []recording.Frame, pid func(process uint32) uint32) *DriverSummary {
	s := &DriverSummary{Untraced: []recording.Untraced{}, Calls: []DriverCalls{}, Devices: []DriverDevice{}, Kept: []DriverKept{},
		HostPeak: r.other[driver.HostMemory].peak, Managed: r.other[driver.ManagedMemory].peak}
	for k := range r.calls {
		c := r.calls[k]
		if c.Count == 0 {
			continue
		}
		c.Name, c.Waits = recording.CallKind(k).String(), recording.CallKind(k).MayWait()
		s.Calls = append(s.Calls, c)
		s.DriverNS += c.NS
		if c.Waits {
			s.WaitingNS += c.NS
		}
	}
	slices.SortStableFunc(s.Calls, func(a, b DriverCalls) int { return cmp.Compare(b.NS, a.NS) })
	for _, d := range r.Devices() {
		s.Devices = append(s.Devices, *d)
	}
	type key struct {
		process, stack uint32
		device         int16
		memory         driver.MemoryKind
	}
	kept := map[key]*DriverKept{}
	var keys []key
	r.tracker.Held(func(h *driver.Holding) {
		k := key{h.Process, h.Stack, h.Device, h.Memory}
		if kept[k] == nil {
			stack := frames(h.Stack)
			kept[k] = &DriverKept{Memory: h.Memory.String(), Device: int(h.Device), PID: pid(h.Process), Frames: append([]string{}, frameTexts(stack)...), Stack: stack}
			keys = append(keys, k)
		}
		kept[k].Count++
		kept[k].Bytes += h.Size
		s.KeptBytes += h.Size
		s.KeptCount++
	})
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(kept[b].Bytes, kept[a].Bytes), cmp.Compare(a.process, b.process), cmp.Compare(a.stack, b.stack),
			cmp.Compare(a.memory, b.memory), cmp.Compare(a.device, b.device))
	})
	for _, k := range keys[:min(len(keys), mostKept)] {
		s.Kept = append(s.Kept, *kept[k])
	}
	return s
}

// CallCount is how many calls the trace has.
func (s *DriverSummary) CallCount() uint64 {
	var n uint64
	for _, c := range s.Calls {
		n += c.Count
	}
	return n
}

// SummarizeDriver is the summary of a driver trace that was read.
func SummarizeDriver(d *recording.Driver) *DriverSummary {
	r := NewDriverRun()
	for i, p := range d.Processes {
		if p.EndNS != 0 {
			r.EndAt(uint32(i), p.EndNS)
		}
	}
	for i := range d.Calls {
		r.Call(&d.Calls[i])
	}
	s := r.Summary(d.StackFrames, func(p uint32) uint32 { return d.Processes[p].PID })
	s.Program, s.Processes, s.End, s.Ended = d.Program, len(d.Processes), d.End, d.Ended
	s.NameGPUs(d.GPUs)
	s.Untraced = append(s.Untraced, d.Untraced...)
	return s
}

// NameGPUs says which GPUs the devices are.
func (s *DriverSummary) NameGPUs(gpus []recording.GPU) {
	for i := range s.Devices {
		for _, g := range gpus {
			if int(g.Number) == s.Devices[i].Device {
				u := g.UUID
				s.Devices[i].UUID = fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
				s.Devices[i].Name = g.Name
			}
		}
	}
}
