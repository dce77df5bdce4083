package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/cputime"
	"github.com/cistern-gpu/cistern/trace"
)

// Whole commands over recordings that were made to hurt. A valid recording is changed by its structure (a field of any record
// gets another value, lists are repeated, cut and mixed), written in one of the formats, sometimes compressed and sometimes
// with changed bytes, and a command reads it. CISTERN_HOSTILE is the number of inputs for each command, which its variants share, CISTERN_HOSTILE_SEED
// the first input's number, CISTERN_HOSTILE_KEEP a folder for the worst inputs.

// hostileMax is the size of the files that the bounds are promised for.
const hostileMax = 64 << 10

// What a command may take of such a file: the promise is 2 s and 256 MiB. Allocated bytes are counted in all, what was freed
// meanwhile included, so that they are the same in every run; time is the process's CPU time with room for a busy machine.
const (
	hostileCPU   = 20 * time.Second
	hostileBytes = 4 << 30
)

// hostileCommands are the commands that read recordings; IN is the file, OTHER a second one and OUT an output without ending.
var hostileCommands = []struct{ name, args string }{
	{"inspect", "inspect IN"},
	{"inspect-json", "inspect --json IN"},
	{"replay", "replay IN"},
	{"replay-models", "replay --policy torch-async --policy rmm-pool --policy direct --policy torch:expandable_segments:True IN"},
	{"replay-limit", "replay --capacity 2GiB --policy torch:garbage_collection_threshold:0.5,max_split_size_mb:64 --policy cistern IN"},
	{"replay-verify", "replay --policy torch --verify IN"},
	{"replay-record", "replay --policy cistern --record OUT.pickle IN"},
	{"tune", "tune IN"},
	{"report", "report IN"},
	{"report-page", "report -o OUT.html IN"},
	{"diff", "diff IN OTHER"},
	{"convert-cistern", "convert IN -o OUT.cistern"},
	{"convert-pytorch", "convert IN -o OUT.pickle"},
	{"convert-pprof", "convert IN -o OUT.pb.gz"},
	{"convert-perfetto", "convert IN -o OUT.pftrace"},
	{"convert-parquet", "convert IN -o OUT.parquet"},
	{"convert-csv", "convert IN -o OUT.csv"},
}

func TestHostileRecordings(t *testing.T) {
	n := 20
	seed := uint64(1)
	for name, set := range map[string]func(uint64){"CISTERN_HOSTILE": func(x uint64) { n = int(x) }, "CISTERN_HOSTILE_SEED": func(x uint64) { seed = x }} {
		if s := os.Getenv(name); s != "" {
			x, err := strconv.ParseUint(s, 10, 32)
			if err != nil {
				t.Fatalf("%s=%q: want a number", name, s)
			}
			set(x)
		}
	}
	variants := map[string]int{}
	for _, c := range hostileCommands {
		variants[strings.Fields(c.args)[0]]++
	}
	for _, c := range hostileCommands {
		n := (n + variants[strings.Fields(c.args)[0]] - 1) / variants[strings.Fields(c.args)[0]]
		t.Run(c.name, func(t *testing.T) {
			h := hostileRun{t: t, dir: t.TempDir()}
			for i := range n {
				h.one(c.args, seed+uint64(i))
			}
			t.Logf("%d inputs, %d of them read: most CPU %v (input %d), most allocated %d MiB (input %d)", n, h.read, h.cpu, h.cpuAt,
				h.bytes>>20, h.bytesAt)
			h.keep(c.name)
		})
	}
}

// hostileRun is one command over many inputs.
type hostileRun struct {
	t       *testing.T
	dir     string
	read    int // inputs that the command did not refuse
	cpu     time.Duration
	cpuAt   uint64
	bytes   uint64
	bytesAt uint64
}

// one runs a command on input number n.
func (h *hostileRun) one(args string, n uint64) {
	in, other := filepath.Join(h.dir, "in"), filepath.Join(h.dir, "other")
	input := hostileInput(n)
	files := map[string][]byte{in: input}
	if strings.Contains(args, "OTHER") {
		files[other] = hostileInput(n + 1<<32)
	}
	for path, b := range files {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			h.t.Fatal(err)
		}
	}
	var words []string
	for _, w := range strings.Fields(args) {
		switch {
		case w == "IN":
			w = in
		case w == "OTHER":
			w = other
		case strings.HasPrefix(w, "OUT"):
			w = filepath.Join(h.dir, "out") + w[3:]
		}
		words = append(words, w)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu := cputime.Process()
	var errs bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), 10*hostileCPU)
	code := run(ctx, words, strings.NewReader(""), discard{}, &errs)
	late := ctx.Err() != nil
	cancel()
	cpu = cputime.Process() - cpu
	runtime.ReadMemStats(&after)
	took := after.TotalAlloc - before.TotalAlloc
	if code != exitBad {
		h.read++
	}
	if cpu > h.cpu {
		h.cpu, h.cpuAt = cpu, n
	}
	if took > h.bytes {
		h.bytes, h.bytesAt = took, n
	}
	if late || cpu > hostileCPU || took > hostileBytes {
		h.t.Errorf("input %d, %d bytes: %v of CPU, %d MiB allocated", n, len(input), cpu, took>>20)
	}
	if code != exitOK && code != exitBad && code != exitMismatch || strings.Contains(errs.String(), "goroutine ") {
		h.t.Errorf("input %d: code %d, %q", n, code, errs.String())
	}
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

// keep writes the worst inputs where somebody wants them.
func (h *hostileRun) keep(name string) {
	dir := os.Getenv("CISTERN_HOSTILE_KEEP")
	if dir == "" {
		return
	}
	for what, n := range map[string]uint64{"cpu": h.cpuAt, "bytes": h.bytesAt} {
		for suffix, n := range map[string]uint64{"": n, "-other": n + 1<<32} {
			if err := os.WriteFile(filepath.Join(dir, name+"-"+what+suffix), hostileInput(n), 0o600); err != nil {
				h.t.Fatal(err)
			}
		}
	}
}

// hostileInput is input number n: a file of at most hostileMax bytes.
func hostileInput(n uint64) []byte {
	m := mutator{rand.New(rand.NewPCG(n, 12))}
	for range 20 {
		f := m.recording()
		for range 1 + m.IntN(12) {
			m.change(f)
		}
		b := m.encode(f)
		if m.IntN(5) == 0 {
			b = m.bytes(b)
		}
		if m.IntN(8) == 0 {
			var z bytes.Buffer
			w := gzip.NewWriter(&z)
			w.Write(b)
			w.Close()
			b = z.Bytes()
		}
		if len(b) <= hostileMax && len(b) > 0 {
			return b
		}
	}
	return []byte("x")
}

// mutator changes recordings by chance.
type mutator struct{ *rand.Rand }

// recording is a valid one to begin with.
func (m mutator) recording() *trace.File {
	switch m.IntN(4) {
	case 0:
		return &trace.File{Traces: []*trace.Trace{tinyTrace(0), tinyTrace(m.IntN(3))}[:1+m.IntN(2)]}
	case 1:
		return m.driverTrace()
	}
	return &trace.File{Traces: []*trace.Trace{m.allocations()}}
}

// allocations is a run of some blocks on some streams and pools, as long as a small file allows.
func (m mutator) allocations() *trace.Trace {
	t := &trace.Trace{Format: trace.FormatPyTorch, FromStart: m.IntN(3) > 0, Frames: []trace.Frame{{File: "a.py", Func: "f", Line: 1}, {File: "b.py", Func: "g", Line: 2}},
		Stacks: []trace.Stack{nil, {0}, {1, 0}}, Tags: []string{"", "weights"}, Libraries: []string{"", "torch"}, Settings: trace.Settings{MaxSplitSize: -1},
		Failures: []*trace.Failure{}}
	for range 1 + m.IntN(1<<m.IntN(9)) {
		t.Streams = append(t.Streams, uint64(len(t.Streams)))
	}
	t.Pools = []trace.PoolID{{}}
	for range m.IntN(1 << m.IntN(6)) {
		t.Pools = append(t.Pools, trace.PoolID{0, uint64(len(t.Pools))})
	}
	var live []event.Event
	for i := range 1 + m.IntN(1<<(2+m.IntN(9))) {
		e := event.Event{Kind: event.Alloc, Addr: 1<<40 + uint64(i)<<30, Size: 1 + m.Uint64N(1<<(1+m.IntN(36))), TimeUS: int64(i) * int64(m.IntN(3000)),
			Stream: uint32(m.IntN(len(t.Streams))), Pool: uint32(m.IntN(len(t.Pools))), Stack: uint32(m.IntN(3)), Thread: uint32(m.IntN(3))}
		switch k := m.IntN(24); {
		case k == 0:
			e.Kind = event.OOM
		case k < 3:
			e.Kind, e.Size = event.SegmentAlloc+event.Kind(m.IntN(4)), e.Size&^(1<<21-1)+1<<21
			e.Handle = m.Uint64N(20)
		case k < 12 && len(live) > 0:
			j := m.IntN(len(live))
			e.Addr, e.Size, e.Stream, e.Pool = live[j].Addr, live[j].Size, live[j].Stream, live[j].Pool
			live[j] = live[len(live)-1]
			live = live[:len(live)-1]
			e.Kind = event.FreeRequested
			t.Events = append(t.Events, e)
			e.Kind = event.FreeCompleted
		default:
			live = append(live, e)
		}
		t.Events = append(t.Events, e)
	}
	if m.IntN(2) == 0 {
		at := m.IntN(len(t.Events))
		t.Events[at].Kind = event.OOM
		t.Failures = append(t.Failures, &trace.Failure{Event: at, Need: t.Events[at].Size, Requested: t.Events[at].Size, DeviceTotal: 80 << 30, Conf: "limit:1GiB",
			Steps: []trace.FailureStep{{Rung: "grow", Tries: 1}}, Limits: []trace.Limit{{Kind: "device", Bytes: 80 << 30}}, Lines: []string{"out of memory"}})
	}
	return t
}

// driverTrace is what a traced program called.
func (m mutator) driverTrace() *trace.File {
	var b bytes.Buffer
	w, err := trace.NewDriverWriter(&b, 0, []string{"program"})
	if err != nil {
		panic(err)
	}
	w.Process(trace.Process{PID: 7, Program: "program"})
	for i := range 1 + m.IntN(1<<(2+m.IntN(9))) {
		w.Call(&trace.Call{Kind: trace.CallKind(1 + m.IntN(int(trace.NumCallKinds)-1)), TimeNS: uint64(i) * 1000, TookNS: m.Uint64N(1000), Addr: m.Uint64N(1<<(1+m.IntN(8))) << 21,
			Size: m.Uint64N(1 << (1 + m.IntN(40))), Handle: m.Uint64N(1 << m.IntN(9)), Pool: m.Uint64N(4), Extra: m.Uint64N(1 << m.IntN(30)), Result: int32(2 * (m.IntN(9) / 8)),
			Device: int16(m.IntN(4) - 1), Thread: uint32(m.IntN(3))})
	}
	if err := w.Close(trace.DriverEnd{}); err != nil {
		panic(err)
	}
	f, err := trace.Read(&b, "driver")
	if err != nil {
		panic(err)
	}
	return f
}

// change changes a recording in one way.
func (m mutator) change(f *trace.File) {
	if f.Driver != nil && m.IntN(2) == 0 {
		f.Driver.Calls = mutateList(m, f.Driver.Calls)
		if n := len(f.Driver.Calls); n > 0 {
			m.field(reflect.ValueOf(&f.Driver.Calls[m.IntN(n)]).Elem())
		}
		return
	}
	if len(f.Traces) == 0 {
		return
	}
	t := f.Traces[m.IntN(len(f.Traces))]
	switch m.IntN(9) {
	case 0, 1, 2:
		t.Events = mutateList(m, t.Events)
	case 3: // every event gets its own value of a field
		for i := range t.Events {
			switch e := &t.Events[i]; m.IntN(3) {
			case 0:
				e.Stream = m.refer(len(t.Streams), i)
			case 1:
				e.Pool = m.refer(len(t.Pools), i)
			}
		}
	case 4: // many of what events refer to
		for range m.IntN(1 << m.IntN(14)) {
			t.Streams = append(t.Streams, m.Uint64())
			if m.IntN(4) == 0 {
				t.Pools = append(t.Pools, trace.PoolID{m.Uint64(), 1})
			}
		}
		for i := range t.Events {
			t.Events[i].Stream = m.refer(len(t.Streams), i)
		}
	case 5:
		t.Final = mutateList(m, t.Final)
		t.InitialSegments = mutateList(m, t.InitialSegments)
		t.Initial = mutateList(m, t.Initial)
		for i := range t.Final {
			t.Final[i].Blocks = mutateList(m, t.Final[i].Blocks)
		}
	case 6:
		size := m.number(64)
		for i := range t.Events {
			if m.IntN(2) == 0 {
				t.Events[i].Size = size
			}
		}
	default:
		if n := len(t.Events); n > 0 && m.IntN(2) == 0 {
			for range 1 + m.IntN(8) {
				m.field(reflect.ValueOf(&t.Events[m.IntN(n)]).Elem())
			}
			return
		}
		m.field(reflect.ValueOf(t).Elem())
	}
}

// refer is an index into a list of n.
func (m mutator) refer(n, i int) uint32 {
	if n == 0 {
		return 0
	}
	if m.IntN(4) == 0 {
		return uint32(m.IntN(n))
	}
	return uint32(i % n)
}

// mutateList repeats, cuts, turns or mixes a part of a list.
func mutateList[T any](m mutator, list []T) []T {
	if len(list) == 0 {
		return list
	}
	from := m.IntN(len(list))
	to := from + 1 + m.IntN(len(list)-from)
	part := list[from:to]
	var out []T
	out = append(out, list[:from]...)
	switch m.IntN(4) {
	case 0:
		times := 1 + m.IntN(1<<m.IntN(12))
		for range min(times, 1+100_000/len(part)) {
			out = append(out, part...)
		}
	case 1:
	case 2:
		for i := range part {
			out = append(out, part[len(part)-1-i])
		}
	case 3:
		for range part {
			out = append(out, part[m.IntN(len(part))])
		}
	}
	return append(out, list[to:]...)
}

// field changes a value somewhere in v.
func (m mutator) field(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			m.field(v.Elem())
		}
	case reflect.Struct:
		if f := v.Field(m.IntN(v.NumField())); f.CanSet() {
			m.field(f)
		}
	case reflect.Slice, reflect.Array:
		if v.Len() > 0 {
			m.field(v.Index(m.IntN(v.Len())))
		}
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(m.number(v.Type().Bits())))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(m.number(v.Type().Bits()))
	case reflect.Float64:
		v.SetFloat([]float64{0, 1, -1, 0.5, 1e-300, 1e300, math.NaN(), math.Inf(1)}[m.IntN(8)])
	case reflect.String:
		v.SetString([]string{"", "x", strings.Repeat("long", 1<<m.IntN(13)), "expandable_segments:True", "max_split_size_mb:1,garbage_collection_threshold:0.01",
			"roundup_power2_divisions:[1:1,>:1]", "limit:1", "chunk_max:2MiB", "a\x00\xff\n"}[m.IntN(9)])
	}
}

// number is one of the numbers that programs stumble over.
func (m mutator) number(bits int) uint64 {
	var x uint64
	switch m.IntN(5) {
	case 0:
		x = uint64(m.IntN(5))
	case 1:
		x = 1<<m.IntN(64) + uint64(m.IntN(3)) - 1
	case 2:
		x = m.Uint64() >> m.IntN(64)
	case 3:
		x = -uint64(m.IntN(5))
	case 4:
		x = []uint64{512, 1 << 20, 1<<20 + 1, 2 << 20, 10 << 20, 20 << 20, 1 << 30, 1<<40 - 1, 1 << 40, 1 << 42, 16 << 40, 1 << 46}[m.IntN(12)]
	}
	return x & (math.MaxUint64 >> (64 - bits))
}

// encode writes a recording in one of the formats, in Cistern's where another has no words for it.
func (m mutator) encode(f *trace.File) []byte {
	var b bytes.Buffer
	switch m.IntN(4) {
	case 0:
		if trace.WritePyTorch(&b, f.Traces...) == nil {
			return b.Bytes()
		}
		b.Reset()
	case 1:
		if len(f.Traces) > 0 {
			return rmmText(f.Traces[0])
		}
	}
	defer func() {
		if x := recover(); x != nil { // a reference to what is not there is the writer's caller's fault
			b.Reset()
		}
	}()
	if trace.WriteCistern(&b, f) != nil {
		return nil
	}
	return b.Bytes()
}

// rmmText is a log of RMM's.
func rmmText(t *trace.Trace) []byte {
	b := []byte("Thread,Time,Action,Pointer,Size,Stream\n")
	for i := range t.Events {
		e := &t.Events[i]
		action := map[event.Kind]string{event.Alloc: "allocate", event.FreeCompleted: "free", event.OOM: "allocate failure"}[e.Kind]
		if action == "" {
			continue
		}
		us := uint64(e.TimeUS) % 86400e6
		b = fmt.Appendf(b, "%d,%02d:%02d:%02d:%06d,%s,0x%x,%d,0x%x\n", e.Thread, us/3600e6, us/60e6%60, us/1e6%60, us%1e6, action, e.Addr, e.Size, e.Stream)
	}
	return b
}

// bytes changes some bytes; a file of Cistern's gets the checksums that its reader asks for.
func (m mutator) bytes(b []byte) []byte {
	if len(b) == 0 {
		return b
	}
	b = bytes.Clone(b)
	for range 1 + m.IntN(8) {
		b[m.IntN(len(b))] = byte(m.number(8))
	}
	const magic, header = 8, 13
	if !bytes.HasPrefix(b, []byte("\x89CIST")) {
		return b
	}
	table := crc32.MakeTable(crc32.Castagnoli)
	for at := magic; at+header < len(b)-16; {
		n := int(binary.LittleEndian.Uint32(b[at+1:]))
		if n > len(b)-at-header {
			break
		}
		sum := crc32.Update(crc32.Checksum(b[at:at+9], table), table, b[at+header:at+header+n])
		binary.LittleEndian.PutUint32(b[at+9:], sum)
		at += header + n
	}
	return b
}
