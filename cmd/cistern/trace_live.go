package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	allocator "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/internal/cputime"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
)

// What cistern top sees of traced processes: this process publishes a page for each that calls the driver, from its first call
// that is recorded until it ends. Reserved is what the driver holds for it, allocated what it asked for; cached is the rest,
// which pools and the driver's pages of 2 MiB keep.

// traceLive follows the processes under trace, in the goroutine that reads the ring.
type traceLive struct {
	processes map[uint32]*liveProcess // by number in the trace
	frames    func(stack uint32) []recording.Frame
	next      time.Time // when to look again
	nextCount time.Time // and when allocations may be counted again
	cards     *liveCards
	gpu       func(p *tracedProcess, number int) (recording.GPU, int)
}

// liveProcess is one of them. What it holds is counted again, apart from the others.
type liveProcess struct {
	pid   int
	start uint64
	page  *live.Page // nil where there can be none
	run   *analyze.DriverRun
	calls map[int]uint64 // by device, -1: those that name none
	asked atomic.Bool    // for details
	of    *tracedProcess

	mu      sync.Mutex
	devices []live.Device // +checklocks:mu
	numbers []int         // of those in the trace; +checklocks:mu
	// +checklocks:mu
	details map[int]live.Details // by the trace's number
	shown   []int                // the page's: the numbers of the devices that it was given last
}

// liveEvery is how often pages are given other figures: somewhat more often than they show them.
const liveEvery = live.EveryWatched / 2

// countShare is the part of one processor's CPU time, as its inverse, that counting allocations may take: it looks at all of
// them.
const countShare = 20

// call takes in one call of the process with this PID.
func (l *traceLive) call(of *tracedProcess, pid uint32, c *recording.Call, frames func(stack uint32) []recording.Frame) {
	p := l.processes[of.number]
	if p == nil {
		if l.processes == nil {
			l.processes = map[uint32]*liveProcess{}
		}
		p = l.begin(int(pid), of)
		l.processes[of.number], l.frames = p, frames
	}
	if p.page == nil {
		return
	}
	p.run.Call(c)
	p.calls[max(int(c.Device), -1)]++
}

// begin makes the page of a process. One that ended meanwhile, or where there can be no pages, has none.
func (l *traceLive) begin(pid int, of *tracedProcess) *liveProcess {
	p := &liveProcess{pid: pid, run: analyze.NewDriverRun(), calls: map[int]uint64{}, of: of}
	about, err := live.Of(pid)
	if err != nil || !tracedHere(pid) {
		return p
	}
	for _, old := range l.processes { // the same process, before it became another program
		if old.pid == pid {
			old.end()
		}
	}
	about.Kind, about.Version = live.KindTraced, allocator.Version
	p.start = about.Start
	if page, err := live.Publish(about, p.show, p.holders); err == nil {
		p.page = page
	}
	return p
}

// tracedHere reports whether the process that has this PID here is a traced one. In a PID namespace of its own a traced process
// knows itself by another, which here may be any process's.
func tracedHere(pid int) bool {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	return err == nil && bytes.Contains(maps, []byte(" /memfd:"+audit.RingName))
}

func (p *liveProcess) end() {
	if p.page != nil {
		p.page.Close()
		p.page = nil
	}
}

// show is the page's question for figures, holders that for allocations. Both come from the page's goroutine.
func (p *liveProcess) show(into []live.Device) []live.Device {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown = append(p.shown[:0], p.numbers...)
	return append(into, p.devices...)
}

func (p *liveProcess) holders() []live.Details {
	p.asked.Store(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []live.Details
	for _, d := range p.shown {
		out = append(out, p.details[d])
	}
	return out
}

// refresh gives the pages what is now, if it is time.
func (l *traceLive) refresh(now time.Time, dropped uint64) {
	if now.Before(l.next) {
		return
	}
	l.next = now.Add(liveEvery)
	counting, took := !now.Before(l.nextCount), time.Duration(0)
	for number, p := range l.processes {
		if p.page == nil {
			continue
		}
		if about, err := live.Of(p.pid); err != nil || about.Start != p.start {
			p.end()
			delete(l.processes, number)
			continue
		}
		p.page.SetDropped(dropped)
		devices, numbers := p.figures(l.gpu)
		var details map[int]live.Details
		if counting && p.asked.Swap(false) {
			runtime.LockOSThread()
			begin := cputime.Thread()
			details = p.count(l.frames)
			took += cputime.Thread() - begin
			runtime.UnlockOSThread()
		}
		p.mu.Lock()
		if p.devices, p.numbers = devices, numbers; details != nil {
			p.details = details
		}
		p.mu.Unlock()
	}
	if took > 0 {
		l.nextCount = now.Add(countShare * took)
	}
}

// close ends all pages.
func (l *traceLive) close() {
	for _, p := range l.processes {
		p.end()
	}
}

// figures is what the process holds on each device, and the trace's numbers of those.
func (p *liveProcess) figures(gpu func(p *tracedProcess, number int) (recording.GPU, int)) (out []live.Device, numbers []int) {
	for i, d := range p.run.Devices() {
		g, ordinal := gpu(p.of, d.Device)
		calls := p.calls[d.Device]
		if i == 0 {
			calls += p.calls[-1]
		}
		reserved := max(d.Now, d.Requested())
		numbers = append(numbers, d.Device)
		out = append(out, live.Device{Ordinal: ordinal, UUID: g.UUID, Name: g.Name, Total: g.Total, Reserved: reserved,
			Allocated: d.Requested(), Active: d.Requested(), Cached: reserved - d.Requested(), PeakReserved: max(d.PeakHeld, reserved),
			PeakAllocated: d.PeakRequested, DriverCalls: calls, OOMs: d.OOMs})
	}
	return out, numbers
}

// count is the allocations of each device: by the driver's function, and by stack.
func (p *liveProcess) count(frames func(stack uint32) []recording.Frame) map[int]live.Details {
	type holder struct {
		device int16
		number uint32 // of a stack, or a kind of call
	}
	kinds, stacks := map[holder]live.Use{}, map[holder]live.Use{}
	p.run.Held(func(h *driver.Holding) {
		if h.Memory.OnDevice() {
			for m, k := range map[*map[holder]live.Use]uint32{&kinds: uint32(h.Kind), &stacks: h.Stack} {
				u := (*m)[holder{h.Device, k}]
				u.Blocks++
				u.Bytes += h.Size
				(*m)[holder{h.Device, k}] = u
			}
		}
	})
	out := map[int]live.Details{}
	for _, d := range p.run.Devices() {
		most := func(m map[holder]live.Use, name func(uint32) string) []live.Use {
			var numbers []uint32
			for h := range m {
				if int(h.device) == d.Device {
					numbers = append(numbers, h.number)
				}
			}
			of := func(n uint32) live.Use { return m[holder{int16(d.Device), n}] }
			slices.SortFunc(numbers, func(a, b uint32) int {
				return cmp.Or(cmp.Compare(of(b).Bytes, of(a).Bytes), cmp.Compare(a, b))
			})
			var uses []live.Use
			for i, n := range numbers {
				u := of(n)
				if i < mostHolders {
					u.Name = name(n)
					uses = append(uses, u)
					continue
				}
				if i == mostHolders {
					uses = append(uses, live.Use{Name: live.MoreName})
				}
				rest := &uses[mostHolders]
				rest.Blocks, rest.Bytes = rest.Blocks+u.Blocks, rest.Bytes+u.Bytes
			}
			return uses
		}
		out[d.Device] = live.Details{
			Kinds: most(kinds, func(n uint32) string { return recording.CallKind(n).String() }),
			Stacks: most(stacks, func(n uint32) string {
				var lines []string
				for _, f := range frames(n) {
					lines = append(lines, f.String())
				}
				return strings.Join(lines, "\n")
			})}
	}
	return out
}

// mostHolders is how many are named.
const mostHolders = 100
