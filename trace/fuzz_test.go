package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/event"
	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// anyFile reads b and, where that works, checks the traces and that both writers give them back.
func anyFile(t *testing.T, b []byte) {
	f, err := Read(bytes.NewReader(b), "some.file")
	if err != nil {
		var e *Error
		if !errors.As(err, &e) || e.Path != "some.file" || strings.ContainsAny(err.Error(), "\n\r") {
			t.Fatalf("%T %q; expected one line that names the file", err, err)
		}
		return
	}
	var own bytes.Buffer
	if err := WriteCistern(&own, f); err != nil {
		t.Fatalf("writing: %v", err)
	}
	again, err := Read(&own, "some.file")
	if err != nil {
		t.Fatalf("reading again: %v", err)
	}
	for i, tr := range f.Traces {
		checkTrace(t, tr)
		got := again.Traces[i]
		if !slices.Equal(got.Events, tr.Events) || !slices.Equal(got.Initial, tr.Initial) ||
			len(got.Final) != len(tr.Final) || !slices.Equal(got.Notes, tr.Notes) ||
			!slices.Equal(got.Tags, tr.Tags) || !slices.Equal(got.Libraries, tr.Libraries) || !maps.Equal(got.Threads, tr.Threads) {
			t.Fatalf("device %d is not what was written", tr.Device)
		}
		for k := range tr.Final {
			if !slices.Equal(got.Final[k].Blocks, tr.Final[k].Blocks) {
				t.Fatalf("blocks of segment %d are not what was written", k)
			}
		}
		if d := cmp.Diff(tr.Failures, got.Failures); d != "" {
			t.Fatalf("failures (-want +got):\n%s", d)
		}
	}
	if slices.ContainsFunc(f.Traces, func(t *Trace) bool { return len(segmented(t).Events) == 0 }) {
		return // a snapshot without events is none
	}
	if len(f.Traces) == 0 {
		return // a driver trace of a program that got no memory on a device
	}
	var pickle bytes.Buffer
	if err := WritePyTorch(&pickle, f.Traces...); err != nil {
		return // two traces of a device, or events that a snapshot has no word for: Cistern's format may hold them
	}
	snap, err := Read(&pickle, "some.file")
	if err != nil {
		t.Fatalf("reading the snapshot: %v", err)
	}
	for i, tr := range f.Traces {
		tr = segmented(tr)
		if len(snap.Traces[i].Events) != len(tr.Events) {
			t.Fatalf("%d events; expected %d", len(snap.Traces[i].Events), len(tr.Events))
		}
		for k := range tr.Events {
			e, s := &tr.Events[k], snap.Traces[i]
			if got, want := s.TagName(s.Events[k].Tag), strings.ToValidUTF8(tr.TagName(e.Tag), "\ufffd"); got != want {
				t.Fatalf("event %d: tag %q; expected %q", k, got, want)
			}
			if got, want := s.LibraryName(s.Events[k].Library), strings.ToValidUTF8(tr.LibraryName(e.Library), "\ufffd"); got != want {
				t.Fatalf("event %d: library %q; expected %q", k, got, want)
			}
			if s.Events[k].Thread != e.Thread {
				t.Fatalf("event %d: thread %d; expected %d", k, s.Events[k].Thread, e.Thread)
			}
		}
	}
}

// FuzzPickle runs the pickle machine on opcodes as they come.
func FuzzPickle(f *testing.F) {
	var b bytes.Buffer
	if err := WritePyTorch(&b, synthetic().Traces...); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes()[2:])
	f.Add(around(entry("alloc", 4096, 512))[2:])
	f.Add(around(append(entry("oom", 1, 2), entry("segment_map", 1<<21, 1<<21)...))[2:])
	f.Add(pk(']', byte(opMemoize), '(', 'h', byte(0), 'e', '.')[2:])
	f.Add([]byte("cos\nsystem\n."))
	f.Fuzz(func(t *testing.T, b []byte) { anyFile(t, append([]byte{opProto, 4}, b...)) })
}

// FuzzRead is the recognition of files and of compression.
func FuzzRead(f *testing.F) {
	file, _ := written(f, synthetic())
	f.Add(file)
	old, err := os.ReadFile("testdata/unlabelled.cistern")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(old)
	f.Add([]byte(rmmLog))
	f.Add([]byte("\x80\x02}."))
	f.Add([]byte("{\"a\":1}"))
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(around(entry("alloc", 4096, 512)))
	w.Close()
	f.Add(z.Bytes())
	f.Add([]byte("\x28\xb5\x2f\xfd\x04\x00"))
	f.Fuzz(anyFile)
}

// FuzzRMM is rows below a header.
func FuzzRMM(f *testing.F) {
	f.Add(rmmLog[39:])
	f.Add("1,00:00:00:5,free,(nil),0,\n")
	f.Add(",,,,,\n\"\n")
	f.Fuzz(func(t *testing.T, rows string) { anyFile(t, []byte(rmmLog[:39]+rows)) })
}

// FuzzCistern is the contents of blocks: the input is type, length (two bytes), payload, again and again, and gets the
// checksums that the reader asks for.
func FuzzCistern(f *testing.F) {
	file, _ := written(f, synthetic())
	seed := blocksOf(file)
	f.Add(seed, true)
	f.Add(seed, false)
	f.Fuzz(func(t *testing.T, in []byte, end bool) { anyFile(t, fileOf(in, end)) })
}

// blocksOf is a file in the form of FuzzCistern's input; blocks that are compressed are unpacked.
func blocksOf(file []byte) []byte {
	var seed []byte
	z, err := zstd.NewReader(nil)
	if err != nil {
		panic(err)
	}
	defer z.Close()
	for off := len(cisternMagic); off+blockHeader < len(file)-16; {
		n := int(binary.LittleEndian.Uint32(file[off+1:]))
		payload := file[off+blockHeader : off+blockHeader+n]
		if raw := binary.LittleEndian.Uint32(file[off+5:]); int(raw) != n {
			if payload, err = z.DecodeAll(payload, nil); err != nil {
				panic(err)
			}
		}
		if len(payload) <= math.MaxUint16 {
			seed = binary.LittleEndian.AppendUint16(append(seed, file[off]), uint16(len(payload)))
			seed = append(seed, payload...)
		}
		off += blockHeader + n
	}
	return seed
}

// fileOf is a file of the blocks in such an input, with the checksums that the reader asks for.
func fileOf(in []byte, end bool) []byte {
	b := []byte(cisternMagic)
	at := len(b)
	for len(in) >= 3 {
		n := min(int(binary.LittleEndian.Uint16(in[1:])), len(in)-3)
		at = len(b)
		b = append(b, block(in[0], in[3:3+n])...)
		in = in[3+n:]
	}
	if end {
		b = append(binary.LittleEndian.AppendUint64(b, uint64(at)), cisternTrailer...)
	}
	return b
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
		if err := WritePyTorch(&b, tr); err != nil {
			t.Fatal(err)
		}
		got, err := Read(&b, "some.file")
		if err != nil {
			t.Fatal(err)
		}
		if !got.Traces[0].FromStart {
			t.Fatalf("not from the start: %q", got.Traces[0].Notes)
		}
		diffTraces(t, got.Traces, []*Trace{tr})
		checkCut(t, tr, int(cut)%len(tr.Events))
	})
}

// scenario is a run that the bytes of in decide: segments of a megabyte got and given back, an expandable range that
// grows and shrinks by pages, blocks of both handed out, freed, and free at last.
func scenario(in []byte) *Trace {
	const (
		size = 1 << 20
		page = 20 << 20
		base = 0x7f0000000000
		grow = 0x100000000 // base of the expandable range
	)
	t := &Trace{Streams: []uint64{0, 77}, Pools: []PoolID{{}}, Stacks: []Stack{nil, {0}, {1, 0}},
		Frames: []Frame{{"x.py", "a", 1}, {"x.py", "b", 2}}, FromStart: true, Settings: Settings{MaxSplitSize: -1}}
	add := func(k event.Kind, addr, size uint64, c byte) {
		t.Events = append(t.Events, event.Event{Kind: k, Addr: addr, Size: size, TimeUS: int64(len(t.Events)),
			Stack: uint32(c>>6) % 3})
	}
	segs := map[uint64]bool{}  // by address
	pages := map[uint64]bool{} // of the expandable range, by address
	blocks := map[uint64]Block{}
	used := func(addr, size uint64) bool {
		for a, b := range blocks {
			if a < addr+size && addr < a+b.Size {
				return true
			}
		}
		return false
	}
	for i, c := range in {
		if i > 400 {
			break
		}
		arg := uint64(c >> 3)
		switch c & 7 {
		case 0:
			if a := base + arg*size; !segs[a] {
				segs[a] = true
				add(event.SegmentAlloc, a, size, c)
			}
		case 1:
			if a := base + arg*size; segs[a] && !used(a, size) {
				delete(segs, a)
				add(event.SegmentFree, a, size, c)
			}
		case 2:
			if a := grow + arg%8*page; !pages[a] {
				pages[a] = true
				add(event.SegmentMap, a, page, c)
			}
		case 3:
			if a := grow + arg%8*page; pages[a] && !used(a, page) {
				delete(pages, a)
				add(event.SegmentUnmap, a, page, c)
			}
		case 4, 5: // a block in a segment or page: the slot follows from the position
			a, n := base+arg*size+uint64(i%4)*4096, uint64(1+i*37%4000)
			if c&7 == 5 {
				a = grow + arg%8*page + uint64(i%4)*4096
			}
			if segs[a&^(size-1)] && c&7 == 4 || c&7 == 5 && pages[grow+(a-grow)/page*page] {
				if !used(a, 4096) {
					b := Block{Addr: a, Size: 4096, Requested: n, State: Active, Stack: uint32(c>>6) % 3}
					blocks[a] = b
					add(event.Alloc, a, n, c)
				}
			}
		case 6: // the arg-th active block is freed
			if b, ok := pick(blocks, arg, Active); ok {
				b.State = PendingFree
				blocks[b.Addr] = b
				add(event.FreeRequested, b.Addr, b.Requested, c)
			}
		case 7: // and the arg-th pending one may be used again
			if b, ok := pick(blocks, arg, PendingFree); ok {
				delete(blocks, b.Addr)
				add(event.FreeCompleted, b.Addr, b.Requested, c)
			}
		}
	}
	t.Final = []Segment{}
	fill := func(s Segment) {
		at := s.Addr
		for _, a := range sortedAddrs(blocks) {
			if b := blocks[a]; a >= s.Addr && a < s.Addr+s.Size {
				if a > at {
					s.Blocks = append(s.Blocks, Block{Addr: at, Size: a - at})
				}
				s.Blocks = append(s.Blocks, b)
				at = a + b.Size
			}
		}
		if end := s.Addr + s.Size; at < end {
			s.Blocks = append(s.Blocks, Block{Addr: at, Size: end - at})
		}
		t.Final = append(t.Final, s)
	}
	for a := uint64(grow); a < grow+8*page; a += page {
		if !pages[a] {
			continue
		}
		s := Segment{Addr: a, Large: true, Expandable: true}
		for ; pages[a]; a += page {
			s.Size += page
		}
		fill(s)
	}
	for _, a := range sortedAddrs(segs) {
		fill(Segment{Addr: a, Size: size})
	}
	return t
}

// pick is the n-th block in state s, in address order.
func pick(blocks map[uint64]Block, n uint64, s BlockState) (Block, bool) {
	var in []Block
	for _, a := range sortedAddrs(blocks) {
		if blocks[a].State == s {
			in = append(in, blocks[a])
		}
	}
	if len(in) == 0 {
		return Block{}, false
	}
	return in[n%uint64(len(in))], true
}

func sortedAddrs[V any](m map[uint64]V) []uint64 {
	var out []uint64
	for a := range m {
		out = append(out, a)
	}
	slices.Sort(out)
	return out
}
