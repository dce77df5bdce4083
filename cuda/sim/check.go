package sim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// FaultKind says which rule was broken.
type FaultKind int

const (
	FaultUnmapped FaultKind = iota + 1 // use of memory that is not mapped, or freed
	FaultNoAccess                      // use of memory that the device was not given access to
	FaultInUse                         // unmapped or freed while queued work uses it, or before the host saw it done
	FaultRace                          // used by two streams without order
	FaultStream                        // a stream that was destroyed, or never made
	FaultCapture                       // a driver call invalidated a capture
	FaultGraph                         // a graph's memory is not what it was captured with
	FaultPool                          // a memory pool that was destroyed, or never made
	FaultShared                        // memory of a pool, or an event, that another process still has or no longer has
)

var faultNames = [...]string{FaultUnmapped: "use of unmapped memory", FaultNoAccess: "use without access",
	FaultInUse: "memory taken away while in use", FaultRace: "unordered use", FaultStream: "no such stream",
	FaultCapture: "capture spoilt",
	FaultGraph:   "graph memory changed", FaultPool: "no such pool",
	FaultShared: "shared beyond its life"}

func (k FaultKind) String() string { return faultNames[k] }

// Fault is a broken rule: what was done, to which memory, and what had happened to that memory before. It unwraps to
// the *cuda.Error that a GPU might give, if it gave any.
type Fault struct {
	Kind    FaultKind
	Op      string // the driver call, or "cuLaunchKernel", "cuGraphLaunch"
	Device  cuda.Device
	Stream  uint64        // stream id of the work, 0 where there is none
	Addr    uint64        // of the range of the operation
	Size    uint64        // bytes
	At      time.Duration // host time
	Call    uint64        // number of the last driver call
	Detail  string
	History []string // of that memory, oldest first

	at    uint64 // the first offending address
	chunk *chunk // with off: the same, physically
	off   uint64
	code  cuda.Code
}

func (f *Fault) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s on device %d at %v (call %d)", f.Kind, f.Op, f.Device, f.At, f.Call)
	if f.Stream != 0 {
		fmt.Fprintf(&b, ", stream %d", f.Stream)
	}
	if f.Size != 0 {
		fmt.Fprintf(&b, ", %#x+%d", f.Addr, f.Size)
	}
	if f.at != f.Addr {
		fmt.Fprintf(&b, " (at %#x)", f.at)
	}
	fmt.Fprintf(&b, ": %s", f.Detail)
	for _, line := range f.History {
		b.WriteString("\n\t")
		b.WriteString(line)
	}
	return b.String()
}

func (f *Fault) Unwrap() error {
	return &cuda.Error{Op: f.Op, Device: f.Device, Size: f.Size, Code: f.code}
}

// faults collects what was found, and remembers what happened lately for the histories. Protected by Driver.mu.
type faults struct {
	all     []*Fault
	dropped int      // beyond maxFaults
	pending []*Fault // not yet given to OnFault
	log     []record // a ring once it is full
	logNext int
}

// maxFaults bounds what is kept; the first ones matter.
const maxFaults = 100

// Fault is the first fault found, or nil.
func (d *Driver) Fault() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.all) == 0 {
		return nil
	}
	return d.all[0]
}

// Faults are the faults found so far, the first hundred at most, and how many there were in all.
func (d *Driver) Faults() ([]*Fault, int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]*Fault(nil), d.all...), len(d.all) + d.dropped
}

// found completes and keeps a fault, and returns it as the error of the call. nil is no fault. d.mu is held.
func (d *Driver) found(f *Fault) error {
	if f == nil {
		return nil
	}
	f.At, f.Call = d.clock.read(), d.number
	if f.at == 0 {
		f.at = f.Addr
	}
	if f.code == cuda.Success {
		f.code = cuda.ErrIllegalAddress
	}
	if f.History == nil && f.Size != 0 {
		f.History = d.historyOf(f, f.Size)
	}
	f.chunk = nil
	if len(d.all) < maxFaults {
		d.all = append(d.all, f)
	} else {
		d.dropped++
	}
	if d.opt.OnFault != nil {
		d.pending = append(d.pending, f)
	}
	return f
}

// stillUsed checks that a region may be taken away: work that uses it is complete and, with CheckOrder, the host has
// seen so.
func (d *Driver) stillUsed(r *region, c *chunk, off uint64, by call, dev cuda.Device) *Fault {
	f := &Fault{Kind: FaultInUse, Op: callNames[by], Device: dev, Addr: r.base, Size: r.size, chunk: c, off: off}
	if !d.clock.reached(r.busy) {
		f.Detail = fmt.Sprintf("queued work uses it until %v", r.busy)
		return f
	}
	for _, m := range r.uses {
		if !d.order.host.covers(m) {
			f.Detail = "the host has not seen its use complete on " + d.order.name(m.rank)
			return f
		}
	}
	return nil
}

// recordOp is an entry of the log.
type recordOp uint8

const (
	recReserve recordOp = iota + 1
	recUnreserve
	recCreate
	recRelease
	recMap
	recUnmap
	recAlloc
	recFree
	recUse
	recRead
)

var recordNames = [...]string{recReserve: "reserved", recUnreserve: "address freed", recCreate: "created",
	recRelease: "released", recMap: "mapped", recUnmap: "unmapped", recAlloc: "allocated", recFree: "freed",
	recUse: "used", recRead: "read"}

// record is one thing that happened to memory.
type record struct {
	at         time.Duration
	call       uint64
	stream     uint64
	addr, size uint64
	chunk, off uint64 // serial of the chunk, 0 where none
	op         recordOp
}

// logSize is how many records are kept for histories.
const logSize = 1 << 15

// historyLines bounds a fault's history.
const historyLines = 16

// note remembers what happened to memory, where anything is checked at all.
func (d *Driver) note(op recordOp, stream, addr, size uint64, c *chunk, off uint64) {
	if d.opt.Check == CheckNone {
		return
	}
	r := record{at: d.clock.now, call: d.number, stream: stream, addr: addr, size: size, off: off, op: op}
	if c != nil {
		r.chunk = c.serial
	}
	if len(d.log) < logSize {
		if len(d.log) == cap(d.log) {
			d.log = slices.Grow(d.log, min(len(d.log)+1, logSize-len(d.log))) // twice as many: append alone would copy a large log four times as often
		}
		d.log = append(d.log, r)
		return
	}
	d.log[d.logNext] = r
	d.logNext = (d.logNext + 1) % logSize
}

// historyOf lists what happened lately to the memory of a fault: by address, and by chunk through other mappings.
func (d *Driver) historyOf(f *Fault, size uint64) []string {
	var lines []string
	for i := len(d.log) - 1; i >= 0 && len(lines) < historyLines; i-- {
		r := &d.log[(d.logNext+i)%len(d.log)]
		byAddr := r.addr != 0 && r.addr < f.Addr+f.Size && f.Addr < r.addr+r.size
		byChunk := f.chunk != nil && r.chunk == f.chunk.serial && r.off < f.off+size && f.off < r.off+r.size
		if byAddr || byChunk {
			lines = append(lines, r.String())
		}
	}
	for i, j := 0, len(lines)-1; i < j; i, j = i+1, j-1 {
		lines[i], lines[j] = lines[j], lines[i]
	}
	if len(lines) == 0 {
		lines = append(lines, "nothing is remembered of this memory")
	}
	return lines
}

func (r *record) String() string {
	s := fmt.Sprintf("%v call %d: %s", r.at, r.call, recordNames[r.op])
	if r.addr != 0 {
		s += fmt.Sprintf(" %#x+%d", r.addr, r.size)
	}
	if r.chunk != 0 {
		s += fmt.Sprintf(" chunk %d+%d", r.chunk, r.off)
	}
	if r.stream != 0 {
		s += fmt.Sprintf(" on stream %d", r.stream)
	}
	return s
}

func itoa(n uint64) string { return strconv.FormatUint(n, 10) }
