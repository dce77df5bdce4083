package pytorch_test

import (
	"bytes"
	"maps"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

// FuzzPickle runs the pickle machine on opcodes as they come.
func FuzzPickle(f *testing.F) {
	var b bytes.Buffer
	if err := pytorch.Write(&b, recordingtest.Synthetic().Traces...); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes()[2:])
	f.Add(recordingtest.Around(recordingtest.Entry("alloc", 4096, 512))[2:])
	f.Add(recordingtest.Around(append(recordingtest.Entry("oom", 1, 2), recordingtest.Entry("segment_map", 1<<21, 1<<21)...))[2:])
	f.Add(recordingtest.Pickle(']', byte(pytorch.OpMemoize), '(', 'h', byte(0), 'e', '.')[2:])
	f.Add(withEnvironment("cistern", '}', '(', "torch", 2, "devices", '}', '(', "0", '}', "1", "T4", 'u', 'u')[2:])
	f.Add([]byte("cos\nsystem\n."))
	f.Fuzz(func(t *testing.T, b []byte) { recordingtest.AnyFile(t, append([]byte{pytorch.OpProto, 4}, b...)) })
}

// FuzzSnapshot makes a run of an allocator out of the input, and checks what the reader finds in the snapshot that it
// would have left: everything when it is whole, and the state at the cut when its front is missing.
func FuzzSnapshot(f *testing.F) {
	f.Add([]byte("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09"), uint16(3))
	f.Add(bytes.Repeat([]byte{0, 9, 18, 4, 5, 13, 22, 3, 27, 6}, 20), uint16(70))
	f.Fuzz(func(t *testing.T, in []byte, cut uint16) {
		tr := scenario(in)
		if len(tr.Events) == 0 {
			return
		}
		var b bytes.Buffer
		if err := pytorch.Write(&b, tr); err != nil {
			t.Fatal(err)
		}
		got, err := open.Read(&b, "some.file")
		if err != nil {
			t.Fatal(err)
		}
		if !got.Traces[0].FromStart {
			t.Fatalf("not from the start: %q", got.Traces[0].Notes)
		}
		recordingtest.Diff(t, got.Traces, []*recording.Trace{tr})
		recordingtest.CheckCut(t, tr, int(cut)%len(tr.Events))
	})
}

// Where a scenario has its memory.
const (
	scenarioSize = 1 << 20
	scenarioPage = 20 << 20
	scenarioBase = 0x7f0000000000
	scenarioGrow = 0x100000000 // base of the expandable range
)

// scenario is a run that the bytes of in decide: segments of a megabyte got and given back, an expandable range that
// grows and shrinks by pages, blocks of both handed out, freed, and free at last.
func scenario(in []byte) *recording.Trace {
	s := scenarioRun{
		t: &recording.Trace{Streams: []uint64{0, 77}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil, {0}, {1, 0}},
			Frames: []recording.Frame{{File: "x.py", Func: "a", Line: 1}, {File: "x.py", Func: "b", Line: 2}}, FromStart: true, Settings: recording.Settings{MaxSplitSize: -1}},
		segs: map[uint64]bool{}, pages: map[uint64]bool{}, blocks: map[uint64]recording.Block{},
	}
	for i, c := range in[:min(len(in), 401)] {
		s.step(i, c)
	}
	s.end()
	return s.t
}

type scenarioRun struct {
	t      *recording.Trace
	segs   map[uint64]bool // by address
	pages  map[uint64]bool // of the expandable range, by address
	blocks map[uint64]recording.Block
}

func (s *scenarioRun) add(k event.Kind, addr, size uint64, c byte) {
	s.t.Events = append(s.t.Events, event.Event{Kind: k, Addr: addr, Size: size, TimeUS: int64(len(s.t.Events)),
		Stack: uint32(c>>6) % 3})
}

func (s *scenarioRun) used(addr, size uint64) bool {
	for a, b := range s.blocks {
		if a < addr+size && addr < a+b.Size {
			return true
		}
	}
	return false
}

// step is what byte c of the input, number i, does.
func (s *scenarioRun) step(i int, c byte) {
	arg := uint64(c >> 3)
	switch c & 7 {
	case 0:
		if a := scenarioBase + arg*scenarioSize; !s.segs[a] {
			s.segs[a] = true
			s.add(event.SegmentAlloc, a, scenarioSize, c)
		}
	case 1:
		if a := scenarioBase + arg*scenarioSize; s.segs[a] && !s.used(a, scenarioSize) {
			delete(s.segs, a)
			s.add(event.SegmentFree, a, scenarioSize, c)
		}
	case 2:
		if a := scenarioGrow + arg%8*scenarioPage; !s.pages[a] {
			s.pages[a] = true
			s.add(event.SegmentMap, a, scenarioPage, c)
		}
	case 3:
		if a := scenarioGrow + arg%8*scenarioPage; s.pages[a] && !s.used(a, scenarioPage) {
			delete(s.pages, a)
			s.add(event.SegmentUnmap, a, scenarioPage, c)
		}
	case 4, 5:
		s.alloc(i, c)
	case 6: // the arg-th active block is freed
		if b, ok := pick(s.blocks, arg, recording.Active); ok {
			b.State = recording.PendingFree
			s.blocks[b.Addr] = b
			s.add(event.FreeRequested, b.Addr, b.Requested, c)
		}
	case 7: // and the arg-th pending one may be used again
		if b, ok := pick(s.blocks, arg, recording.PendingFree); ok {
			delete(s.blocks, b.Addr)
			s.add(event.FreeCompleted, b.Addr, b.Requested, c)
		}
	}
}

// alloc hands out a block in a segment or page: the slot follows from the position.
func (s *scenarioRun) alloc(i int, c byte) {
	arg := uint64(c >> 3)
	a, n := scenarioBase+arg*scenarioSize+uint64(i%4)*4096, uint64(1+i*37%4000)
	mapped := s.segs[a&^(scenarioSize-1)]
	if c&7 == 5 {
		a = scenarioGrow + arg%8*scenarioPage + uint64(i%4)*4096
		mapped = s.pages[scenarioGrow+(a-scenarioGrow)/scenarioPage*scenarioPage]
	}
	if mapped && !s.used(a, 4096) {
		s.blocks[a] = recording.Block{Addr: a, Size: 4096, Requested: n, State: recording.Active, Stack: uint32(c>>6) % 3}
		s.add(event.Alloc, a, n, c)
	}
}

// end makes the final state.
func (s *scenarioRun) end() {
	s.t.Final = []recording.Segment{}
	for a := uint64(scenarioGrow); a < scenarioGrow+8*scenarioPage; a += scenarioPage {
		if !s.pages[a] {
			continue
		}
		seg := recording.Segment{Addr: a, Large: true, Expandable: true}
		for ; s.pages[a]; a += scenarioPage {
			seg.Size += scenarioPage
		}
		s.fill(seg)
	}
	for _, a := range slices.Sorted(maps.Keys(s.segs)) {
		s.fill(recording.Segment{Addr: a, Size: scenarioSize})
	}
}

// fill adds a segment with its blocks to the final state.
func (s *scenarioRun) fill(seg recording.Segment) {
	at := seg.Addr
	for _, a := range slices.Sorted(maps.Keys(s.blocks)) {
		if b := s.blocks[a]; a >= seg.Addr && a < seg.Addr+seg.Size {
			if a > at {
				seg.Blocks = append(seg.Blocks, recording.Block{Addr: at, Size: a - at})
			}
			seg.Blocks = append(seg.Blocks, b)
			at = a + b.Size
		}
	}
	if end := seg.Addr + seg.Size; at < end {
		seg.Blocks = append(seg.Blocks, recording.Block{Addr: at, Size: end - at})
	}
	s.t.Final = append(s.t.Final, seg)
}

// pick is the n-th block in state s, in address order.
func pick(blocks map[uint64]recording.Block, n uint64, s recording.BlockState) (recording.Block, bool) {
	var in []recording.Block
	for _, a := range slices.Sorted(maps.Keys(blocks)) {
		if blocks[a].State == s {
			in = append(in, blocks[a])
		}
	}
	if len(in) == 0 {
		return recording.Block{}, false
	}
	return in[n%uint64(len(in))], true
}
