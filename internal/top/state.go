package top

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// State remembers from one look to the next. The zero value has seen nothing.
type State struct {
	last      Look
	gpus      []GPU
	rows      map[id]*Row
	numbers   map[int]*Row // one of rows for each process number
	processes map[id]*history
	trends    map[device]*Trend
	pressures map[string]pressure // by the UUID of the broker's devices
	crowded   bool                // there are more GPUs in the last look than mostGPUs
}

// mostGPUs is more than a machine has, parts of divided ones counted.
const mostGPUs = 256

// id tells processes apart: numbers are used again.
type id struct {
	pid   int
	start uint64
}

// device tells devices apart: by the UUID or, where a process does not know that, by its own number. With that alone no two
// processes need not mean the same one, but they most likely do.
type device struct {
	uuid    [16]byte
	ordinal int
}

func deviceOf(uuid [16]byte, ordinal int) device {
	if uuid != [16]byte{} {
		ordinal = 0
	}
	return device{uuid, ordinal}
}

// history is what is remembered of a process.
type history struct {
	trend   Trend
	devices map[device]*deviceHistory
}

type deviceHistory struct {
	trend Trend
	marks []mark
}

// mark is a counter at the moment when its page was refreshed.
type mark struct {
	at    time.Time
	calls uint64
}

// rateOver is the time over which driver calls are averaged, at least: long enough to read, short enough to see a start.
const rateOver = 2 * time.Second

// At is when the last look was taken; zero before the first.
func (s *State) At() time.Time { return s.last.At }

// Look is the last look as it was taken.
func (s *State) Look() *Look { return &s.last }

// Add takes a look. Processes that are not in it have ended.
func (s *State) Add(l Look) {
	s.last = l
	s.gpus, s.crowded = s.gpus[:0:0], false
	s.rows, s.numbers = make(map[id]*Row), make(map[int]*Row)
	if s.processes == nil {
		s.processes, s.trends = make(map[id]*history), make(map[device]*Trend)
	}
	for _, c := range l.Cards {
		s.gpus = append(s.gpus, GPU{UUID: c.UUID, Index: c.Index, Part: c.Part, Name: c.Name, Total: c.Total, Used: c.Used, Free: c.Free,
			Known: c.Known, Utilization: c.Utilization})
	}
	for i := range l.Processes {
		s.addPage(&l.Processes[i])
	}
	for i, c := range l.Cards {
		for _, h := range c.Holders {
			s.addHolder(i, h)
		}
	}
	s.finish()
	s.addNode(l.Node, l.At)
}

// addPage takes what a process says of itself.
func (s *State) addPage(p *Process) {
	key := id{p.PID, p.Start}
	if r := s.rows[key]; r != nil && (r.Kind == Cistern || p.Kind != Cistern) {
		return // a program on Cistern that is traced as well: its own word says more
	}
	r := &Row{PID: p.PID, Start: p.Start, Kind: p.Kind, Name: p.Name, Args: p.Args, Version: p.Version, Conf: p.Conf, Place: p.Place, Dropped: p.Dropped}
	if !p.Updated.IsZero() { // else it has only begun
		r.Age = max(0, s.last.At.Sub(p.Updated))
	}
	r.Stale = r.Age > StaleAfter
	s.rows[key], s.numbers[p.PID] = r, r
	past := s.past(key)
	for _, d := range p.Devices {
		gpu := s.gpu(&d)
		if gpu < 0 {
			continue
		}
		h := Holding{GPU: gpu, Ordinal: d.Ordinal, Details: detailsOf(&d), Memory: Memory{
			Reserved: d.Reserved, Allocated: d.Allocated, Active: d.Active, Cached: d.Cached, Paused: d.Paused,
			PeakReserved: d.PeakReserved, PeakAllocated: d.PeakAllocated, Limit: d.Limit,
			DriverCalls: d.DriverCalls, Retries: d.Retries, OOMs: d.OOMs, Page: true,
			Requests: Requests{d.Requests, d.Slow}}}
		h.Rate, h.RateKnown = past.device(deviceOf(d.UUID, d.Ordinal)).rate(mark{p.Updated, d.DriverCalls})
		if r.Stale {
			h.RateKnown = false
		}
		r.Holdings = append(r.Holdings, h)
	}
}

// detailsOf are a device's details once they say anything: memory that is held is in some list.
func detailsOf(d *Device) *Details {
	if x := d.Details; x != nil && d.Allocated > 0 && len(x.Tags)+len(x.Libraries)+len(x.Pools)+len(x.Stacks)+len(x.Kinds) == 0 {
		return nil
	}
	return d.Details
}

// gpu finds the device that a process speaks of, or takes the process's word for it where NVML does not list it: there
// is no NVML, the device is simulated or a part of another one (MIG). It is -1 beyond what a machine has: processes may invent
// any number.
func (s *State) gpu(d *Device) int {
	simulated := bytes.HasPrefix(d.UUID[:], []byte("cistern-sim-gpu"))
	for i := range s.gpus {
		g := &s.gpus[i]
		if deviceOf(g.UUID, g.Index) != deviceOf(d.UUID, d.Ordinal) || g.Known && g.Unnamed() {
			continue
		}
		if g.Simulated {
			g.Total += d.Total
		}
		return i
	}
	if len(s.gpus) >= mostGPUs {
		if !s.crowded {
			s.crowded = true
			s.last.Problems = append(slices.Clip(s.last.Problems), fmt.Sprintf("processes report more than %d GPUs: the others are left out", mostGPUs))
		}
		return -1
	}
	s.gpus = append(s.gpus, GPU{UUID: d.UUID, Index: d.Ordinal, Name: d.Name, Total: d.Total, Utilization: -1, Simulated: simulated})
	return len(s.gpus) - 1
}

// addHolder takes what the driver says of a process on card i.
func (s *State) addHolder(i int, holder Holder) {
	r := s.numbers[holder.PID]
	if r == nil {
		p := s.last.Programs[holder.PID]
		r = &Row{PID: holder.PID, Start: p.Start, Kind: Untraced, Name: p.Name, Args: p.Args}
		s.rows[id{r.PID, r.Start}], s.numbers[r.PID] = r, r
	}
	h := slices.IndexFunc(r.Holdings, func(h Holding) bool { return h.GPU == i })
	if h < 0 {
		h = len(r.Holdings)
		r.Holdings = append(r.Holdings, Holding{GPU: i, Ordinal: -1})
	}
	m := &r.Holdings[h].Memory
	m.Used, m.UsedKnown = max(m.Used, holder.Bytes), m.UsedKnown || holder.Known
}

// finish sums up, and forgets processes that have ended.
func (s *State) finish() {
	for key, r := range s.rows {
		slices.SortStableFunc(r.Holdings, func(a, b Holding) int { return cmp.Compare(a.GPU, b.GPU) })
		r.Title = title(r.Name, r.Args)
		past := s.past(key)
		for i := range r.Holdings {
			h := &r.Holdings[i]
			g, m := &s.gpus[h.GPU], &h.Memory
			if m.Page && m.UsedKnown && m.Used >= m.Reserved {
				m.Other, m.OtherKnown = m.Used-m.Reserved, true
			}
			h.Trend = &past.device(deviceOf(g.UUID, g.Index)).trend
			h.Trend.add(s.last.At, m.held(), m.Allocated)
			g.Processes++
			switch r.Kind {
			case Traced:
				g.Traced += m.Reserved
			case Cistern:
				g.Reserved += m.Reserved
				g.Allocated += m.Allocated
				g.Cached += m.Cached
			}
		}
		r.Sum = sum(r.Holdings)
		r.Trend = &past.trend
		r.Trend.add(s.last.At, r.Sum.held(), r.Sum.Allocated)
	}
	for i := range s.gpus {
		g := &s.gpus[i]
		if g.Simulated {
			g.Index = int(g.UUID[15])
		}
		key := deviceOf(g.UUID, g.Index)
		if s.trends[key] == nil {
			s.trends[key] = new(Trend)
		}
		g.Trend = s.trends[key]
		g.Trend.add(s.last.At, g.Held(), g.Allocated)
	}
	seen := map[device]bool{}
	for i := range s.gpus {
		seen[deviceOf(s.gpus[i].UUID, s.gpus[i].Index)] = true
	}
	maps.DeleteFunc(s.trends, func(key device, _ *Trend) bool { return !seen[key] && len(s.trends) > mostGPUs })
	maps.DeleteFunc(s.processes, func(key id, _ *history) bool { return s.rows[key] == nil })
}

// Answered says whether every process that says anything has a rate by now, and the details that are wanted.
func (s *State) Answered(wanted Wanted) bool {
	for _, r := range s.rows {
		for i := range r.Holdings {
			h := &r.Holdings[i]
			if h.Page && !r.Stale && (!h.RateKnown || wanted.Of(r.PID) && h.Details == nil) {
				return false
			}
		}
	}
	return true
}

// Held is what is taken of the device: by what the driver says, or, where it says nothing, by the processes that publish.
func (g *GPU) Held() uint64 {
	if g.Known {
		return g.Used
	}
	return g.Reserved + g.Traced
}

// held is what a trend shows: what the page calls reserved, or without one what the driver says.
func (m *Memory) held() uint64 {
	if m.Page {
		return m.Reserved
	}
	return m.Used
}

func (s *State) past(key id) *history {
	if s.processes[key] == nil {
		s.processes[key] = &history{devices: make(map[device]*deviceHistory)}
	}
	return s.processes[key]
}

func (h *history) device(d device) *deviceHistory {
	if h.devices[d] == nil {
		h.devices[d] = new(deviceHistory)
	}
	return h.devices[d]
}

// rate is how often the driver was called, averaged over the marks of the last seconds. A counter that fell belongs to
// another life of the process.
func (h *deviceHistory) rate(now mark) (perSecond float64, known bool) {
	marks := h.marks
	if n := len(marks); n > 0 && (now.calls < marks[n-1].calls || now.at.Before(marks[n-1].at)) {
		marks = nil
	}
	if n := len(marks); n == 0 || now.at.After(marks[n-1].at) {
		marks = append(marks, now)
	}
	// Of the marks that are old enough, the last one is where the average begins.
	for len(marks) > 2 && now.at.Sub(marks[1].at) >= rateOver {
		marks = marks[1:]
	}
	h.marks = marks
	first := marks[0]
	if !now.at.After(first.at) {
		return 0, false
	}
	return float64(now.calls-first.calls) / now.at.Sub(first.at).Seconds(), true
}

// sum adds up what a process holds on several devices. A limit counts only where every device has one.
func sum(all []Holding) Memory {
	var m Memory
	limits := true
	for i := range all {
		h := &all[i].Memory
		for _, of := range numbers {
			*of(&m) += *of(h)
		}
		m.UsedKnown = m.UsedKnown || h.UsedKnown
		m.OtherKnown = m.OtherKnown || h.OtherKnown
		m.Page = m.Page || h.Page
		m.Rate += h.Rate
		m.Requests.Met += h.Requests.Met
		m.Requests.Slow.Merge(&h.Requests.Slow)
		m.RateKnown = m.RateKnown || h.RateKnown
		limits = limits && (h.Limit > 0 || !h.Page)
	}
	if !limits {
		m.Limit = 0
	}
	return m
}
