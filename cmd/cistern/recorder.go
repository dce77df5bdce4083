package main

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/internal/audit"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/trace"
)

// recorder makes a driver trace, and its summary, of the records of a ring.
type recorder struct {
	w         *trace.DriverWriter
	run       *analyze.DriverRun
	program   []string
	processes map[uint32]*tracedProcess // by pid: the latest that has it
	pids      []uint32                  // by number in the trace
	symbols   audit.Symbols
	unknown   []string
	started   time.Time
	before    uint64 // calls when the state was last shown
	shown     time.Time
}

type tracedProcess struct {
	number  uint32
	program string
	modules audit.Modules
	stacks  map[string]uint32 // of addresses, by their bytes
}

func newRecorder(w io.Writer, program []string) (*recorder, error) {
	now := time.Now()
	dw, err := trace.NewDriverWriter(w, now.UnixNano()-monotonic(), program)
	if err != nil {
		return nil, err
	}
	return &recorder{w: dw, run: analyze.NewDriverRun(), program: program, processes: map[uint32]*tracedProcess{}, started: now, shown: now}, nil
}

// record takes in one record of the ring.
func (r *recorder) record(rec *audit.Record) {
	switch rec.Type {
	case audit.RecordProcess:
		p := r.process(rec, rec.Text(), uint32(rec.Handle))
		if parent := r.processes[uint32(rec.Handle)]; rec.Flags == 0 && parent != nil && parent != p {
			p.modules = slices.Clone(parent.modules)
		}
	case audit.RecordModule:
		p := r.of(rec)
		file := rec.Text()
		if file == "" {
			file = p.program // the program itself has no name among its modules
		}
		p.modules.Add(audit.Module{File: file, Base: rec.Addr, From: rec.Handle, To: rec.Handle + rec.Size})
	case audit.RecordUnknown:
		if name := rec.Text(); len(r.unknown) < 64 && !slices.Contains(r.unknown, name) {
			r.unknown = append(r.unknown, name)
		}
	case audit.RecordCall:
		if rec.Call == 0 || rec.Call >= uint8(trace.NumCallKinds) {
			return
		}
		p := r.of(rec)
		c := trace.Call{TimeNS: rec.TimeNS, TookNS: rec.TookNS, Addr: rec.Addr, Size: rec.Size, Stream: rec.Stream, Handle: rec.Handle,
			Pool: rec.Pool, Extra: rec.Extra, Process: p.number, Thread: rec.TID, Stack: r.stack(p, rec.Frames()), Result: rec.Result,
			Device: int16(rec.Device), Kind: trace.CallKind(rec.Call)}
		r.run.Call(&c)
		r.w.Call(&c)
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
	p := &tracedProcess{program: program, stacks: map[string]uint32{}}
	p.number = r.w.Process(trace.Process{PID: rec.PID, Parent: parent, StartNS: rec.TimeNS, Program: program})
	r.processes[rec.PID] = p
	r.pids = append(r.pids, rec.PID)
	return p
}

// stack is the number of a stack of return addresses in the trace.
func (r *recorder) stack(p *tracedProcess, addrs []uint64) uint32 {
	key := fmt.Sprint(addrs)
	if id, ok := p.stacks[key]; ok {
		return id
	}
	var frames []trace.Frame
	for _, addr := range addrs {
		m, ok := p.modules.Find(addr)
		if !ok {
			continue
		}
		// A return address is behind the call.
		frames = append(frames, trace.Frame{File: m.File, Func: r.symbols.Name(m, addr-1)})
	}
	id := r.w.Stack(frames)
	p.stacks[key] = id
	return id
}

func (r *recorder) flush() error { return r.w.Flush() }

// state is one line about now.
func (r *recorder) state(ring *audit.Ring) string {
	now, n := time.Now(), r.run.Count()
	line := fmt.Sprintf("%s, %d calls, %.0f/s", now.Sub(r.started).Round(time.Second), n, float64(n-r.before)/now.Sub(r.shown).Seconds())
	r.before, r.shown = n, now
	for _, d := range r.run.Devices() {
		line += fmt.Sprintf("; device %d: %s held, peak %s", d.Device, units.FormatBytes(d.Now), units.FormatBytes(d.PeakHeld))
	}
	if dropped := ring.Dropped(); dropped > 0 {
		line += fmt.Sprintf("; %d dropped", dropped)
	}
	return line
}

// end finishes the file, and is the summary.
func (r *recorder) end(ring *audit.Ring, status int) (*analyze.DriverSummary, error) {
	e := trace.DriverEnd{Dropped: ring.Dropped(), Lost: ring.Lost(), Unknown: r.unknown, Status: status, Finished: uint64(monotonic())}
	s := r.run.Summary(r.w.Frames, func(p uint32) uint32 { return r.pids[p] })
	s.Program, s.Processes, s.End, s.Ended = r.program, len(r.pids), e, true
	return s, r.w.Close(e)
}
