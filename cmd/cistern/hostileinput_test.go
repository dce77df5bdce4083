package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"

	"github.com/klauspost/compress/gzip"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/driver"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

// hostileInput is input number n: a file of at most hostileMax bytes. As in a fuzzing campaign most are small: three quarters
// are of at most 4 KiB, a twentieth is larger than half of hostileMax.
func hostileInput(n uint64) []byte {
	m := mutator{Rand: rand.New(rand.NewPCG(n, 12)), length: 6, longest: 2000}
	least, most := 1, 4<<10
	switch k := m.IntN(20); {
	case k == 0:
		least, most = hostileMax/2, hostileMax
		m.length, m.longest = 11, 20_000
	case k < 5:
		most = hostileMax
		m.length, m.longest = 9, 20_000
	}
	if m.IntN(100) == 0 {
		m.longest = 100_000
	}
	input := []byte("x")
	for range 20 {
		b := m.file()
		if len(b) > 0 && len(b) <= hostileMax {
			input = b
		}
		if len(b) >= least && len(b) <= most {
			break
		}
	}
	return input
}

// mutator changes recordings by chance.
type mutator struct {
	*rand.Rand
	length  int // a recording begins with at most 4<<length events
	longest int // lists are repeated up to so many elements
}

// file is a changed recording.
func (m mutator) file() []byte {
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
	return b
}

// recording is a valid one to begin with.
func (m mutator) recording() *recording.File {
	switch m.IntN(4) {
	case 0:
		return &recording.File{Traces: []*recording.Trace{tinyTrace(0), tinyTrace(m.IntN(3))}[:1+m.IntN(2)]}
	case 1:
		return m.driverTrace()
	}
	return &recording.File{Traces: []*recording.Trace{m.allocations()}}
}

// allocations is a run of some blocks on some streams and pools, as long as a small file allows.
func (m mutator) allocations() *recording.Trace {
	t := &recording.Trace{Format: recording.FormatPyTorch, FromStart: m.IntN(3) > 0, Frames: []recording.Frame{{File: "a.py", Func: "f", Line: 1}, {File: "b.py", Func: "g", Line: 2}},
		Stacks: []recording.Stack{nil, {0}, {1, 0}}, Tags: []string{"", "weights"}, Libraries: []string{"", "torch"}, Settings: recording.Settings{MaxSplitSize: -1},
		Failures: []*recording.Failure{}}
	for range 1 + m.IntN(1<<m.IntN(9)) {
		t.Streams = append(t.Streams, uint64(len(t.Streams)))
	}
	t.Pools = []recording.PoolID{{}}
	for range m.IntN(1 << m.IntN(6)) {
		t.Pools = append(t.Pools, recording.PoolID{0, uint64(len(t.Pools))})
	}
	var live []event.Event
	for i := range 1 + m.IntN(1<<(2+m.IntN(m.length))) {
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
		t.Failures = append(t.Failures, &recording.Failure{Event: at, Need: t.Events[at].Size, Requested: t.Events[at].Size, DeviceTotal: 80 << 30, Conf: "limit:1GiB",
			Steps: []recording.FailureStep{{Stage: "grow", Tries: 1}}, Limits: []recording.Limit{{Kind: "device", Bytes: 80 << 30}}, Lines: []string{"out of memory"}})
	}
	return t
}

// driverTrace is what a traced program called.
func (m mutator) driverTrace() *recording.File {
	var b bytes.Buffer
	w, err := driver.NewWriter(&b, 0, []string{"program"})
	if err != nil {
		panic(err)
	}
	w.Process(recording.Process{PID: 7, Program: "program"})
	for i := range 1 + m.IntN(1<<(2+m.IntN(m.length))) {
		w.Call(&recording.Call{Kind: recording.CallKind(1 + m.IntN(int(recording.NumCallKinds)-1)), TimeNS: uint64(i) * 1000, TookNS: m.Uint64N(1000), Addr: m.Uint64N(1<<(1+m.IntN(8))) << 21,
			Size: m.Uint64N(1 << (1 + m.IntN(40))), Handle: m.Uint64N(1 << m.IntN(9)), Pool: m.Uint64N(4), Extra: m.Uint64N(1 << m.IntN(30)), Result: int32(2 * (m.IntN(9) / 8)),
			Device: int16(m.IntN(4) - 1), Thread: uint32(m.IntN(3))})
	}
	if err := w.Close(recording.DriverEnd{}); err != nil {
		panic(err)
	}
	f, err := open.Read(&b, "driver")
	if err != nil {
		panic(err)
	}
	return f
}

// change changes a recording in one way.
func (m mutator) change(f *recording.File) {
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
				t.Pools = append(t.Pools, recording.PoolID{m.Uint64(), 1})
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
		for range min(times, 1+m.longest/len(part)) {
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
func (m mutator) encode(f *recording.File) []byte {
	var b bytes.Buffer
	switch m.IntN(4) {
	case 0:
		if pytorch.Write(&b, f.Traces...) == nil {
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
	if native.Write(&b, f) != nil {
		return nil
	}
	return b.Bytes()
}

// rmmText is a log of RMM's.
func rmmText(t *recording.Trace) []byte {
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
