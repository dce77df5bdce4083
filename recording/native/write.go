// Package native reads and writes Cistern's own format, which format.md describes: blocks of at most 1 MiB, each with a
// checksum, so that a file that was cut off is readable up to its last whole block.
//
// read.go takes blocks in, write.go makes them; labels.go is the part of both for tags, libraries, threads and failures,
// driver_read.go and driver_write.go for the calls of driver traces. Events are in the columns of package tables.
package native

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math"
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
	"github.com/klauspost/compress/zstd"
)

// Cistern's own format, described in format.md.
const (
	magic       = "\x89CIST\r\n\x01"
	trailer     = "CISTEND\n"
	blockHeader = 13      // type, stored, raw, crc
	blockMax    = 1 << 20 // bytes of a payload, stored and raw
	blockFill   = 256 << 10
)

const (
	blockTrace = 1 + iota
	blockStrings
	blockFrames
	blockStacks
	blockStreams
	blockPools
	blockSegments
	blockBlocks
	blockEventsType
	blockNotes
	blockIndex
)

// Blocks that only files with labels and failures have; readers that do not know them pass over them. 128 to 131 are
// those of driver traces.
const (
	blockNames = 132 + iota
	blockLabels
	blockFailure
)

// blockEnvironment and blockIdentity are in files of runs whose environment is known, and whose process is one of a job; readers
// that do not know them pass over them.
const (
	blockEnvironment = 137 + iota
	blockIdentity
)

// Lists of names, in blockNames.
const (
	namesTags = iota
	namesLibraries
	namesThreads
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Write writes f in Cistern's own format. What it reads back is equal, but for the path and the name of the
// format.
func Write(w io.Writer, f *recording.File) error {
	cw, err := NewWriter(w)
	if err != nil {
		return err
	}
	if f.Driver != nil {
		if err := cw.writeDriver(f.Driver); err != nil {
			return err
		}
	}
	for _, t := range f.Traces {
		i, err := cw.Begin(t)
		if err != nil {
			return err
		}
		if err := cw.Events(i, t.Events); err != nil {
			return err
		}
		if err := cw.End(i, t); err != nil {
			return err
		}
	}
	return cw.Close()
}

// Writer writes a file in Cistern's format as a run goes: whatever was given to Events is in the file once Flush has
// returned, and readable from there on whether or not the file is ever closed. A Writer belongs to one goroutine.
type Writer struct {
	w      *bufio.Writer
	z      *zstd.Encoder
	off    int64
	b, zb  []byte
	cols   tables.Columns
	labels tables.Labels
	traces []writtenTrace
	tables []writtenTable
	index  []indexEntry
	driver writtenDriver
	err    error
}

type writtenTrace struct {
	table          int
	streams, pools int // written so far
	tags           int
	libraries      int
	threads        map[uint32]string
	failures       int
	events         uint64
}

// writtenTable is how much of a table of frames and stacks is in the file; traces of one file share theirs.
type writtenTable struct {
	key     *recording.Stack // the slice's first element stands for it
	frames  int
	stacks  int
	strings map[string]uint32
}

type indexEntry struct {
	off          int64
	trace        int
	first, count uint64
	from, to     int64
}

// NewWriter begins a file.
func NewWriter(w io.Writer) (*Writer, error) {
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedDefault),
		zstd.WithWindowSize(1<<20), zstd.WithEncoderCRC(false), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, err
	}
	cw := &Writer{w: bufio.NewWriterSize(w, 64<<10), z: z}
	cw.raw([]byte(magic))
	return cw, cw.err
}

func (w *Writer) raw(b []byte) {
	if w.err == nil {
		_, w.err = w.w.Write(b)
		w.off += int64(len(b))
	}
}

// block writes the payload w.b.
func (w *Writer) block(typ byte) {
	if w.err != nil {
		return
	}
	if len(w.b) > blockMax {
		w.err = fmt.Errorf("a block of %d bytes; at most %d fit", len(w.b), blockMax)
		return
	}
	payload := w.b
	w.zb = w.z.EncodeAll(w.b, w.zb[:0])
	if len(w.zb) < len(w.b) {
		payload = w.zb
	}
	var h [blockHeader]byte
	h[0] = typ
	binary.LittleEndian.PutUint32(h[1:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(h[5:], uint32(len(w.b)))
	crc := crc32.Update(crc32.Checksum(h[:9], castagnoli), castagnoli, payload)
	binary.LittleEndian.PutUint32(h[9:], crc)
	w.raw(h[:])
	w.raw(payload)
}

func (w *Writer) u(n uint64)   { w.b = binary.AppendUvarint(w.b, n) }
func (w *Writer) i(n int64)    { w.b = binary.AppendVarint(w.b, n) }
func (w *Writer) s(s string)   { w.u(uint64(len(s))); w.b = append(w.b, s...) }
func (w *Writer) u8(n byte)    { w.b = append(w.b, n) }
func (w *Writer) u64(n uint64) { w.b = binary.LittleEndian.AppendUint64(w.b, n) }

// list writes n entries as blocks of typ, as many to a block as fill it. head writes what each block begins with, one
// writes entry i, with first set where it is the first of its block.
func (w *Writer) list(typ byte, n int, head func(), one func(i int, first bool)) {
	for i := 0; i < n; {
		w.b = w.b[:0]
		// The count comes before the entries: they are written behind room for it.
		from, entries := i, []byte(nil)
		for ; i < n && len(w.b) < blockFill; i++ {
			one(i, i == from)
		}
		entries = append(entries, w.b...)
		w.b = w.b[:0]
		head()
		w.u(uint64(i - from))
		w.b = append(w.b, entries...)
		w.block(typ)
	}
}

// Begin writes what is known of t before its events: device, settings, tables, the state at the start. The number that
// it returns stands for t in Events and End.
func (w *Writer) Begin(t *recording.Trace) (int, error) {
	i := len(w.traces)
	if len(t.Stacks) == 0 {
		return 0, fmt.Errorf("a trace without a table of stacks; expected at least the empty one")
	}
	table := -1
	for k := range w.tables {
		if w.tables[k].key == &t.Stacks[0] {
			table = k
		}
	}
	if table < 0 {
		table = len(w.tables)
		w.tables = append(w.tables, writtenTable{strings: map[string]uint32{}})
	}
	w.tables[table].key = &t.Stacks[0]
	w.traces = append(w.traces, writtenTrace{table: table})
	w.b = w.b[:0]
	w.u(uint64(i))
	w.u(uint64(t.Device))
	w.u(uint64(table))
	var flags byte
	for bit, on := range []bool{t.FromStart, t.Settings.Known, t.Final != nil} {
		if on {
			flags |= 1 << bit
		}
	}
	w.u8(flags)
	w.s(source(t))
	w.settings(&t.Settings)
	w.block(blockTrace)
	w.environment(i, &t.Environment)
	w.identity(i, t.Identity)
	w.sync(i, t)
	w.segments(i, 0, t.InitialSegments)
	w.blocks(i, 0, 0, t.Initial)
	for k := range t.InitialSegments {
		w.blocks(i, 2, k, t.InitialSegments[k].Blocks)
	}
	return i, w.err
}

func (w *Writer) environment(i int, e *recording.Environment) {
	if *e == (recording.Environment{}) {
		return
	}
	w.b = w.b[:0]
	w.u(uint64(i))
	for _, s := range []string{e.PyTorch, e.CUDA, e.Driver, e.Device} {
		w.s(tables.EnvironmentText(s))
	}
	w.u(e.DeviceTotal)
	w.block(blockEnvironment)
}

func (w *Writer) settings(s *recording.Settings) {
	w.s(s.Conf)
	var flags byte
	for bit, on := range []bool{s.Expandable, s.RoundupPow2 != nil, s.Raw != nil} {
		if on {
			flags |= 1 << bit
		}
	}
	w.u8(flags)
	w.i(s.MaxSplitSize)
	w.u64(math.Float64bits(s.GCThreshold))
	if s.RoundupPow2 != nil {
		w.u(uint64(len(s.RoundupPow2)))
		for _, mib := range slices.Sorted(maps.Keys(s.RoundupPow2)) {
			w.u(mib)
			w.u(s.RoundupPow2[mib])
		}
	}
	if s.Raw != nil {
		w.u(uint64(len(s.Raw)))
		for _, k := range slices.Sorted(maps.Keys(s.Raw)) {
			w.s(k)
			w.s(s.Raw[k])
		}
	}
}

// Sync writes what t's tables have gained since they were last written: streams, pools, frames, stacks, tags, libraries,
// names of threads; and failures. Events may refer to it from then on.
func (w *Writer) Sync(i int, t *recording.Trace) error {
	w.sync(i, t)
	return w.err
}

func (w *Writer) sync(i int, t *recording.Trace) {
	wt := &w.traces[i]
	w.list(blockStreams, len(t.Streams)-wt.streams, func() { w.u(uint64(i)) },
		func(k int, _ bool) { w.u64(t.Streams[wt.streams+k]) })
	wt.streams = len(t.Streams)
	w.list(blockPools, len(t.Pools)-wt.pools, func() { w.u(uint64(i)) },
		func(k int, _ bool) { w.u64(t.Pools[wt.pools+k][0]); w.u64(t.Pools[wt.pools+k][1]) })
	wt.pools = len(t.Pools)

	w.syncTable(wt.table, t.Frames, t.Stacks)
	w.syncLabels(i, t)
}

// syncTable writes what a table of frames and stacks has gained.
func (w *Writer) syncTable(table int, frames []recording.Frame, stacks []recording.Stack) {
	tab := &w.tables[table]
	head := func() { w.u(uint64(table)) }
	var fresh []string
	for _, f := range frames[min(tab.frames, len(frames)):] {
		for _, s := range []string{f.File, f.Func} {
			if _, ok := tab.strings[s]; !ok {
				tab.strings[s] = uint32(len(tab.strings))
				fresh = append(fresh, s)
			}
		}
	}
	w.list(blockStrings, len(fresh), head, func(k int, _ bool) {
		// A string that no block can hold is cut: it is the name of a function.
		w.s(fresh[k][:min(len(fresh[k]), blockMax/2)])
	})
	from := tab.frames
	w.list(blockFrames, len(frames)-from, head, func(k int, _ bool) {
		f := &frames[from+k]
		w.u(uint64(tab.strings[f.File]))
		w.u(uint64(tab.strings[f.Func]))
		w.i(int64(f.Line))
	})
	tab.frames = max(from, len(frames))
	from = tab.stacks
	w.list(blockStacks, len(stacks)-from, head, func(k int, _ bool) {
		s := stacks[from+k]
		w.u(uint64(len(s)))
		for _, f := range s {
			w.u(uint64(f))
		}
	})
	tab.stacks = max(from, len(stacks))
}

func (w *Writer) segments(trace, list int, segs []recording.Segment) {
	var last uint64
	w.list(blockSegments, len(segs), func() { w.u(uint64(trace)); w.u(uint64(list)) }, func(i int, first bool) {
		s := &segs[i]
		if first {
			last = 0
		}
		w.i(int64(s.Addr - last))
		last = s.Addr
		w.u(s.Size)
		w.u(uint64(s.Stream))
		w.u(uint64(s.Pool))
		var flags byte
		if s.Large {
			flags |= 1
		}
		if s.Expandable {
			flags |= 2
		}
		w.u8(flags)
		w.u(uint64(s.Stack))
	})
}

func (w *Writer) blocks(trace, list, seg int, blocks []recording.Block) {
	var last uint64
	head := func() { w.u(uint64(trace)); w.u(uint64(list)); w.u(uint64(seg)) }
	w.list(blockBlocks, len(blocks), head, func(i int, first bool) {
		b := &blocks[i]
		if first {
			last = 0
		}
		w.i(int64(b.Addr - last))
		last = b.Addr
		w.u(b.Size)
		w.u(b.Requested)
		w.u(uint64(b.Stream))
		w.u(uint64(b.Pool))
		w.u(uint64(b.Stack))
		w.u8(byte(b.State))
	})
	w.blockLabels(trace, list, seg, blocks)
}

// Events writes the next events of trace i: a block for each 16,384.
func (w *Writer) Events(i int, events []event.Event) error {
	for len(events) > 0 && w.err == nil {
		n := min(len(events), tables.BlockEvents)
		w.events(i, events[:n])
		events = events[n:]
	}
	return w.err
}

func (w *Writer) events(i int, events []event.Event) {
	wt := &w.traces[i]
	for k := range events {
		e := &events[k]
		if e.Kind >= event.NumKinds {
			w.err = fmt.Errorf("an event of kind %d", e.Kind)
			return
		}
		if w.err = wt.knows(e.Tag, e.Library); w.err != nil {
			return
		}
	}
	w.cols.Encode(events, &w.labels)
	w.index = append(w.index, indexEntry{w.off, i, wt.events, uint64(len(events)), events[0].TimeUS,
		events[len(events)-1].TimeUS})
	w.b = w.b[:0]
	w.u(uint64(i))
	w.u(wt.events)
	w.u(uint64(len(events)))
	w.b = w.cols.Append(w.b)
	wt.events += uint64(len(events))
	w.block(blockEventsType)
}

// End writes what is known of t after its events: the final state, notes.
func (w *Writer) End(i int, t *recording.Trace) error {
	w.sync(i, t)
	w.segments(i, 1, t.Final)
	for k := range t.Final {
		w.blocks(i, 1, k, t.Final[k].Blocks)
	}
	w.list(blockNotes, len(t.Notes), func() { w.u(uint64(i)) }, func(k int, _ bool) {
		w.s(t.Notes[k][:min(len(t.Notes[k]), blockFill)])
	})
	return w.err
}

// Flush hands everything written so far to the underlying writer.
func (w *Writer) Flush() error {
	if w.err == nil {
		w.err = w.w.Flush()
	}
	return w.err
}

// Close writes the index. It does not close the underlying writer.
func (w *Writer) Close() error {
	off := w.off
	w.b = w.b[:0]
	entries := w.index
	if len(entries) > indexMax {
		entries = nil // beyond 300 million events: readers go block by block
	}
	w.u(uint64(len(entries)))
	for _, e := range entries {
		w.u8(blockEventsType)
		w.u(uint64(e.off))
		w.u(uint64(e.trace))
		w.u(e.first)
		w.u(e.count)
		w.i(e.from)
		w.i(e.to)
	}
	for i := range w.traces {
		w.u(w.traces[i].events)
	}
	w.block(blockIndex)
	w.b = w.b[:0]
	w.u64(uint64(off))
	w.raw(w.b)
	w.raw([]byte(trailer))
	if w.err == nil {
		w.err = w.z.Close()
	}
	return w.Flush()
}

const indexMax = 20000

// source is the format that the trace was first read from.
func source(t *recording.Trace) string { return cmp.Or(t.Source, t.Format) }
