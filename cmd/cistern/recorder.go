package main

import (
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/internal/live"
	"github.com/cistern-gpu/cistern/internal/nvml"
	"github.com/cistern-gpu/cistern/internal/symbols"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
)

// recorder makes a driver trace, and its summary, of the records of a ring.
type recorder struct {
	w         *driver.Writer
	run       *analyze.DriverRun
	live      traceLive
	program   []string
	processes map[uint32]*tracedProcess // by pid: the latest that has it
	alive     map[uint32]*tracedProcess // those of them that are not seen to have ended, by the same
	pids      []uint32                  // by number in the trace
	gpus      []recording.GPU           // of which processes told
	numbers   map[[16]byte]int16        // the trace's, by UUID
	symbols   symbols.Tables
	unknown   []string
	pieces    audit.Pieces
	why       []string // something is not in the trace
	untraced  []recording.Untraced
	heard     func(pid uint32) // of a process, when it first tells of itself
	started   time.Time
	before    uint64 // calls when the state was last shown
	shown     time.Time
}

type tracedProcess struct {
	number  uint32
	start   uint64 // as package live has it, of one in alive
	begun   uint64 // when it announced itself, and
	end     uint64 // by when it had ended, 0 where that is not known: ns
	program string
	modules audit.Modules
	callers map[uint64]uint32 // stacks of a caller alone, by its address
	stacks  map[uint64]uint32 // in the trace, by the number that the process gave them
	codes   map[uint64]pyCode // code objects, alike
	parent  *tracedProcess    // whose memory this one began with: what it was told of before
	devices map[int32]int16   // the trace's number of each device of which it told, by its own
}

type pyCode struct{ file, function string }

func newRecorder(w io.Writer, program []string) (*recorder, error) {
	now := time.Now()
	dw, err := driver.NewWriter(w, now.UnixNano()-monotonic(), program)
	if err != nil {
		return nil, err
	}
	r := &recorder{w: dw, run: analyze.NewDriverRun(), live: traceLive{cards: &liveCards{open: nvml.Open}}, program: program, heard: func(uint32) {},
		processes: map[uint32]*tracedProcess{}, numbers: map[[16]byte]int16{}, alive: map[uint32]*tracedProcess{}, started: now, shown: now}
	r.live.gpu = r.gpu
	return r, nil
}

// record takes in one record of the ring.
func (r *recorder) record(rec *audit.Record) {
	switch rec.Type {
	case audit.RecordProcess:
		before := r.processes[uint32(rec.Extra)]
		p := r.process(rec, rec.Text(), uint32(rec.Handle))
		if rec.Flags&audit.ProcessFresh == 0 && before != nil && before.number != p.number {
			p.modules, p.parent, p.devices = slices.Clone(before.modules), before, maps.Clone(before.devices)
		}
	case audit.RecordDevice:
		r.device(r.of(rec), rec)
	case audit.RecordModule:
		p := r.of(rec)
		file := rec.Text()
		if file == "" {
			file = p.program // the program itself has no name among its modules
		}
		p.modules.Add(audit.Module{File: file, Base: rec.Addr, From: rec.Handle, To: rec.Handle + rec.Size, Python: rec.Flags&audit.ModulePython != 0})
	case audit.RecordStack:
		if w := r.pieces.Add(rec); w != nil && rec.Size <= uint64(len(w.Words)) {
			p := r.of(rec)
			p.stacks[rec.Addr] = r.w.Stack(r.frames(p, w.Words[:rec.Size], w.Words[rec.Size:]))
		}
	case audit.RecordCode:
		if w := r.pieces.Add(rec); w != nil {
			file, function := w.Names()
			r.of(rec).codes[rec.Addr] = pyCode{file, function}
		}
	case audit.RecordPython:
		r.tell(fmt.Sprintf("process %d: no frames of Python: %s", rec.PID, rec.Text()))
	case audit.RecordUnknown:
		if name := rec.Text(); len(r.unknown) < 64 && !slices.Contains(r.unknown, name) {
			r.unknown = append(r.unknown, name)
		}
	case audit.RecordEnded:
		if p := r.processes[uint32(rec.Addr)]; p != nil && rec.TimeNS >= p.begun && (p.end == 0 || rec.TimeNS < p.end) {
			r.ended(uint32(rec.Addr), p, rec.TimeNS)
		}
	case audit.RecordCall:
		if rec.Call == 0 || rec.Call >= uint8(recording.NumCallKinds) {
			return
		}
		p := r.of(rec)
		device := max(rec.Device, -1)
		if n, ok := p.devices[device]; ok {
			device = int32(n)
		}
		if device >= recording.MaxDevices {
			device = -1
			r.tell(fmt.Sprintf("calls for devices from number %d on are taken for calls for none", recording.MaxDevices))
		}
		c := recording.Call{TimeNS: rec.TimeNS, TookNS: rec.TookNS, Addr: rec.Addr, Size: rec.Size, Stream: rec.Stream, Handle: rec.Handle,
			Pool: rec.Pool, Extra: rec.Extra, Process: p.number, Thread: rec.TID, Stack: r.stack(p, rec), Result: rec.Result,
			Device: int16(device), Kind: recording.CallKind(rec.Call)}
		r.run.Call(&c)
		r.w.Call(&c)
		r.live.call(p, rec.PID, &c, r.w.Frames)
	}
}

// device notes what a process means by a number: in the trace it is that number too, if no other device has it.
func (r *recorder) device(p *tracedProcess, rec *audit.Record) {
	text := rec.Text()
	if len(text) < 16 || rec.Device < 0 {
		return
	}
	g := recording.GPU{UUID: [16]byte([]byte(text)), Name: text[16:], Total: rec.Size}
	number, known := r.numbers[g.UUID]
	if !known {
		if len(r.gpus) == recording.MaxDevices {
			return
		}
		number = int16(rec.Device % recording.MaxDevices)
		for slices.ContainsFunc(r.gpus, func(o recording.GPU) bool { return o.Number == number }) {
			number = (number + 1) % recording.MaxDevices
		}
		g.Number = number
		r.numbers[g.UUID] = number
		r.gpus = append(r.gpus, g)
		r.w.GPU(g)
	}
	if p.devices == nil {
		p.devices = map[int32]int16{}
	}
	p.devices[rec.Device] = number
}

// gpu is what is known of a device, by the trace's number, and the process's own number of it.
func (r *recorder) gpu(p *tracedProcess, number int) (g recording.GPU, ordinal int) {
	ordinal = number
	for own, n := range p.devices {
		if int(n) == number {
			ordinal = int(own)
		}
	}
	for _, x := range r.gpus {
		if int(x.Number) == number {
			g = x
		}
	}
	return g, ordinal
}

// tell puts into the trace, and behind the table, that something is missing.
func (r *recorder) tell(why string) {
	if len(r.why) < 16 && !slices.Contains(r.why, why) {
		r.why = append(r.why, why)
		r.w.Note(why)
	}
}

// of is the process of a record; one that was not announced, as that record was dropped, is now.
func (r *recorder) of(rec *audit.Record) *tracedProcess {
	if p := r.processes[rec.PID]; p != nil {
		return p
	}
	return r.process(rec, "", 0)
}

func (r *recorder) process(rec *audit.Record, program string, parent uint32) *tracedProcess {
	if before := r.alive[rec.PID]; before != nil {
		r.ended(rec.PID, before, rec.TimeNS) // it became another program
	}
	if len(r.alive) <= fewAlive { // so that what one held that is just over is not added to what comes
		r.lookForEnds()
	}
	p := &tracedProcess{program: program, begun: rec.TimeNS, callers: map[uint64]uint32{}, stacks: map[uint64]uint32{}, codes: map[uint64]pyCode{}}
	p.number = r.w.Process(recording.Process{PID: rec.PID, Parent: parent, StartNS: rec.TimeNS, Program: program})
	r.processes[rec.PID] = p
	r.pids = append(r.pids, rec.PID)
	switch about, err := live.Of(int(rec.PID)); {
	case err == nil && tracedHere(int(rec.PID)):
		p.start = about.Start
		r.alive[rec.PID] = p
	case err != nil && live.Ended(int(rec.PID), 0) && below(parent): // nor is it one that has another number here
		r.ended(rec.PID, p, uint64(monotonic()))
	}
	r.heard(rec.PID)
	return p
}

// fewAlive is how many processes are looked at whenever one begins: a look takes some 10 us. More are looked at from time to
// time only.
const fewAlive = 64

// lookForEnds sees which processes have ended.
func (r *recorder) lookForEnds() {
	for pid, p := range r.alive {
		if live.Ended(int(pid), p.start) {
			r.ended(pid, p, uint64(monotonic()))
		}
	}
}

// ended says that a process ended, at some time before ns: what it held is the driver's again.
func (r *recorder) ended(pid uint32, p *tracedProcess, ns uint64) {
	if r.alive[pid] == p {
		delete(r.alive, pid)
	}
	p.end = ns
	r.w.ProcessEnded(p.number, ns)
	r.run.EndAt(p.number, ns)
}

// stack is the number of a call's stack in the trace. Where the process's record of it was dropped, it is the caller alone.
func (r *recorder) stack(p *tracedProcess, rec *audit.Record) uint32 {
	if number := rec.Stack(); number != 0 {
		for q := p; q != nil; q = q.parent {
			if id, ok := q.stacks[number]; ok {
				return id
			}
		}
	}
	caller := rec.Caller()
	id, ok := p.callers[caller]
	if !ok {
		id = r.w.Stack(r.frames(p, []uint64{caller}, nil))
		p.callers[caller] = id
	}
	return id
}

// frames are those of return addresses and of pairs of a code object and a line, each innermost first. Python's frames
// stand behind the native ones that the innermost of them called, so that the whole reads as what called what; the
// interpreter's own native frames, and those outside of the outermost of them, say nothing that Python's do not.
func (r *recorder) frames(p *tracedProcess, addrs, python []uint64) []recording.Frame {
	modules := make([]audit.Module, len(addrs))
	inner := len(addrs)
	for i, addr := range addrs {
		modules[i], _ = p.modules.Find(addr)
		if modules[i].Python && len(python) > 0 {
			inner = i
		}
	}
	var frames []recording.Frame
	for i, addr := range addrs[:inner] {
		if m := modules[i]; m.File != "" && !(m.Python && len(python) > 0) {
			// A return address is behind the call.
			frames = append(frames, recording.Frame{File: m.File, Func: r.symbols.Name(m.File, addr-1-m.Base)})
		}
	}
	for i := 0; i+1 < len(python); i += 2 {
		c := p.code(python[i])
		frames = append(frames, recording.Frame{File: c.file, Func: c.function, Line: int(python[i+1])})
	}
	return frames
}

func (p *tracedProcess) code(number uint64) pyCode {
	for q := p; q != nil; q = q.parent {
		if c, ok := q.codes[number]; ok {
			return c
		}
	}
	return pyCode{"?", "?"} // its record was lost
}

// missing takes in processes that use the driver and are not seen.
func (r *recorder) missing(list []recording.Untraced) {
	for _, u := range list {
		if len(r.untraced) < recording.MostUntraced {
			r.untraced = append(r.untraced, u)
			r.w.Untraced(u)
		}
	}
}

// leave notes which processes go on when recording ends.
func (r *recorder) leave(followed bool) {
	var left []string
	for _, pid := range slices.Sorted(maps.Keys(r.processes)) {
		if p := r.processes[pid]; running(pid, p.program) {
			left = append(left, fmt.Sprintf("%d (%s)", pid, filepath.Base(p.program)))
		}
	}
	if len(left) == 0 {
		return
	}
	const most = 8
	why := "still running, and no longer recorded: " + strings.Join(left[:min(len(left), most)], ", ")
	if len(left) > most {
		why += fmt.Sprintf(" and %d more", len(left)-most)
	}
	r.w.Note(why)
	if !followed {
		why += "; --follow records until they end"
	}
	r.why = append(r.why, why)
}

func (r *recorder) flush() error { return r.w.Flush() }

// state is one line about now.
func (r *recorder) state(ring *audit.Ring) string {
	now, n := time.Now(), r.run.Count()
	line := fmt.Sprintf("%s, %s, %.0f/s", now.Sub(r.started).Round(time.Second), plural(int(n), "call", "calls"), float64(n-r.before)/now.Sub(r.shown).Seconds())
	r.before, r.shown = n, now
	for _, d := range r.run.Devices() {
		line += fmt.Sprintf("; device %d: %s allocated, peak %s", d.Device, units.FormatBytes(d.Now), units.FormatBytes(d.PeakHeld))
	}
	if dropped := ring.Dropped(); dropped > 0 {
		line += fmt.Sprintf("; %d dropped", dropped)
	}
	return line
}

// end finishes the file, and is the summary.
func (r *recorder) end(ring *audit.Ring, status int) (*analyze.DriverSummary, error) {
	e := recording.DriverEnd{Dropped: ring.Dropped(), Lost: ring.Lost(), Unknown: r.unknown, Status: status, Finished: uint64(monotonic()),
		Spent: uint64(ring.Spent())}
	s := r.run.Summary(r.w.Frames, func(p uint32) uint32 { return r.pids[p] })
	s.Program, s.Processes, s.End, s.Ended = r.program, len(r.pids), e, true
	s.NameGPUs(r.gpus)
	s.Untraced = append(s.Untraced, r.untraced...)
	return s, r.w.Close(e)
}
