package native

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/internal/segments"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
	"github.com/klauspost/compress/zstd"
)

// factor bounds the memory of a file in Cistern's format by the decompressed bytes of its blocks: an event takes
// at least two of them and becomes 56.
const factor = 30

type reader struct {
	in      *input.Input
	b       *input.Budget
	z       *zstd.Decoder
	rawRead int64 // payload bytes after decompression
	stored  []byte
	raw     []byte
	tables  []*readTable
	traces  []*readTrace
	decoded []event.Event // of one block
	driver  *readDriver   // what a driver trace says; nil elsewhere
}

type readTable struct {
	strings []string
	frames  []recording.Frame
	stacks  []recording.Stack
	names   tables.NativeNames
}

type readTrace struct {
	t     *recording.Trace
	table int
	ev    tables.EventList
	// failure is the part of one of which more is to come.
	failure []byte
}

// Is reports whether a file that begins with head is of Cistern's format, in any version of it.
func Is(head []byte) bool { return bytes.HasPrefix(head, []byte(magic[:7])) }

// Read reads a file of Cistern's format; path is how errors and traces name it. r is not used after Read has
// returned.
func Read(r io.Reader, path string) (*recording.File, error) {
	return input.File(r, path, func(in *input.Input) (*recording.File, error) { return read(in, path) })
}

func read(in *input.Input, path string) (*recording.File, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(blockMax),
		zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, err
	}
	defer z.Close()
	r := &reader{in: in, z: z}
	r.b = input.NewBudget(func() int64 { return r.rawRead }, in.Stored)
	r.b.Factor = factor
	if err := r.magic(); err != nil {
		return nil, err
	}
	at, ended, err := r.blocks(path)
	if err != nil {
		return nil, err
	}
	if ended {
		if err := r.trailer(at); err != nil {
			return nil, err
		}
	}
	f := &recording.File{Format: recording.FormatCistern}
	if f.Traces, err = r.finish(at, ended); err != nil {
		return nil, err
	}
	if f.Driver = r.driver.finish(r.tables); f.Driver != nil {
		for _, t := range f.Traces {
			if t.Source == recording.FormatDriver {
				t.WallUS = f.Driver.WallNS / 1000
			}
		}
		setOwners(f.Traces, f.Driver)
	}
	return f, nil
}

// magic reads what every file begins with.
func (r *reader) magic() error {
	in := r.in
	head := in.Peek(len(magic))
	switch {
	case !bytes.HasPrefix([]byte(magic), head[:min(len(head), 7)]):
		return input.AtByte(in.Offset(), "expected a file of Cistern's format")
	case len(head) < len(magic):
		return in.Truncated("the magic number")
	case head[7] != 1:
		return input.AtByte(7, "version %d of Cistern's format; expected 1", head[7])
	}
	in.Pos += len(magic)
	return nil
}

// blocks reads all blocks up to the index, which begins at byte at, or up to where the file was cut off.
func (r *reader) blocks(path string) (at int64, ended bool, err error) {
	for !ended {
		at = r.in.Offset()
		typ, ok, err := r.block()
		if err != nil {
			return at, false, err
		}
		if !ok {
			break
		}
		if ended, err = r.content(typ, at, path); err != nil {
			var e *recording.Error
			if errors.As(err, &e) {
				return at, false, err
			}
			return at, false, input.AtByte(at, "block of type %d: %s", typ, err)
		}
	}
	if r.in.Err != nil {
		return at, false, r.in.Truncated("a block")
	}
	return at, ended, nil
}

// trailer reads what follows the index at byte at.
func (r *reader) trailer(at int64) error {
	in := r.in
	if !in.Need(16) || string(in.Buf[in.Pos+8:in.Pos+16]) != trailer ||
		binary.LittleEndian.Uint64(in.Buf[in.Pos:]) != uint64(at) {
		return input.AtByte(in.Offset(), "expected the trailer that points back to byte %d", at)
	}
	in.Pos += 16
	return in.Ended("the end of the trace")
}

// block reads the next block into r.raw. ok is false where the file ends or was never written.
func (r *reader) block() (typ byte, ok bool, err error) {
	in := r.in
	at := in.Offset()
	if !in.Need(blockHeader) {
		return 0, false, nil
	}
	h := [blockHeader]byte(in.Buf[in.Pos:])
	typ = h[0]
	if h == [blockHeader]byte{} {
		return 0, false, nil // room that was never written
	}
	stored, raw := binary.LittleEndian.Uint32(h[1:]), binary.LittleEndian.Uint32(h[5:])
	if stored > blockMax || raw > blockMax || stored > raw {
		return 0, false, input.AtByte(at, "a block of %d bytes, %d unpacked; expected at most %d", stored, raw, blockMax)
	}
	in.Pos += blockHeader
	r.stored = r.stored[:0]
	for len(r.stored) < int(stored) {
		if in.Pos == in.End && !in.Need(1) {
			if bytes.HasSuffix(r.stored, []byte(trailer)) {
				return 0, false, input.AtByte(at, "a block of %d bytes; the file ends %d bytes after it begins", stored,
					len(r.stored))
			}
			return 0, false, nil
		}
		n := min(int(stored)-len(r.stored), in.End-in.Pos)
		r.stored = append(r.stored, in.Buf[in.Pos:in.Pos+n]...)
		in.Pos += n
	}
	crc := crc32.Update(crc32.Checksum(h[:9], castagnoli), castagnoli, r.stored)
	if want := binary.LittleEndian.Uint32(h[9:]); crc != want {
		return 0, false, input.AtByte(at, "checksum of the block is %08x; expected %08x", crc, want)
	}
	r.raw = append(r.raw[:0], r.stored...)
	if stored != raw {
		if r.raw, err = r.z.DecodeAll(r.stored, r.raw[:0]); err != nil {
			return 0, false, input.AtByte(at, "a block: zstd: %s", err)
		}
		if len(r.raw) != int(raw) {
			return 0, false, input.AtByte(at, "a block unpacks to %d bytes; expected %d", len(r.raw), raw)
		}
	}
	r.rawRead += int64(raw)
	if off := in.Offset(); r.rawRead > input.RatioFree && r.rawRead > input.RatioMax*off {
		return 0, false, input.AtByte(at, "blocks unpack to more than %d times the file", input.RatioMax)
	}
	return typ, true, nil
}

var errPayload = errors.New("the payload ends early or refers to what is not there")

// content takes in the block in r.raw. end is true for the index.
func (r *reader) content(typ byte, at int64, path string) (end bool, err error) {
	c := &tables.Cursor{B: r.raw}
	switch typ {
	case blockTrace:
		err = r.trace(c, path)
	case blockStrings, blockFrames, blockStacks:
		i := c.U()
		if i >= uint64(len(r.tables)) {
			return false, fmt.Errorf("table %d of %d", i, len(r.tables))
		}
		err = r.table(typ, r.tables[i], c)
	case blockStreams, blockPools, blockSegments, blockBlocks, blockEventsType, blockNotes, blockNames, blockLabels, blockFailure,
		blockEnvironment, blockIdentity:
		i := c.U()
		if i >= uint64(len(r.traces)) {
			return false, fmt.Errorf("trace %d of %d", i, len(r.traces))
		}
		switch tr := r.traces[i]; typ {
		case blockEventsType:
			err = r.events(tr, c, at)
		case blockSegments, blockBlocks:
			err = r.state(typ, tr, c)
		case blockNames:
			err = r.names(tr, c)
		case blockLabels:
			err = r.blockLabels(tr, c)
		case blockFailure:
			err = r.failure(tr, c)
		case blockIdentity:
			err = r.identity(tr, c)
		case blockEnvironment:
			e := &tr.t.Environment
			for _, s := range []*string{&e.PyTorch, &e.CUDA, &e.Driver, &e.Device} {
				*s = tables.EnvironmentText(c.Text())
			}
			e.DeviceTotal = c.U()
			err = r.b.Take(int64(len(r.raw)))
		default:
			err = r.numbers(typ, tr, c)
		}
	case blockIndex:
		for range c.Count(7) {
			c.U8()
			for range 4 {
				c.U()
			}
			c.I()
			c.I()
		}
		for _, tr := range r.traces {
			if n := c.U(); n != uint64(tr.ev.N) && !c.Bad {
				return false, fmt.Errorf("device %d has %d events; expected %d", tr.t.Device, tr.ev.N, n)
			}
		}
		end = true
	case blockDriver, blockProcesses, blockCalls, blockDriverEnd, blockUntraced, blockEnds, blockGPUs:
		err = r.driverBlock(typ, c)
	default:
		if typ < 128 {
			return false, fmt.Errorf("unknown")
		}
		return false, nil
	}
	if err == nil && (c.Bad || len(c.B) > 0) {
		err = errPayload
	}
	return end, err
}

func (r *reader) trace(c *tables.Cursor, path string) error {
	i, dev, table := c.U(), c.U(), c.U()
	if c.Bad || i != uint64(len(r.traces)) || dev >= recording.MaxDevices || i >= recording.MaxDevices || table > uint64(len(r.tables)) {
		return fmt.Errorf("trace %d of device %d with table %d; expected trace %d", i, dev, table, len(r.traces))
	}
	if table == uint64(len(r.tables)) {
		r.tables = append(r.tables, &readTable{})
	}
	flags := c.U8()
	t := &recording.Trace{Path: path, Format: recording.FormatCistern, Device: int(dev), FromStart: flags&1 != 0}
	if flags&4 != 0 {
		t.Final = []recording.Segment{}
	}
	t.Source = c.Text()
	s := &t.Settings
	s.Known = flags&2 != 0
	s.Conf = c.Text()
	flags = c.U8()
	s.Expandable = flags&1 != 0
	s.MaxSplitSize = c.I()
	s.GCThreshold = math.Float64frombits(c.U64())
	if flags&2 != 0 {
		s.RoundupPow2 = map[uint64]uint64{}
		for range c.Count(2) {
			k := c.U()
			s.RoundupPow2[k] = c.U()
		}
	}
	if flags&4 != 0 {
		s.Raw = map[string]string{}
		for range c.Count(2) {
			k := c.Text()
			s.Raw[k] = c.Text()
		}
	}
	r.traces = append(r.traces, &readTrace{t: t, table: int(table)})
	return r.b.Take(int64(len(r.raw)) * 20)
}

func (r *reader) table(typ byte, tab *readTable, c *tables.Cursor) error {
	size := map[byte]int{blockStrings: 1, blockFrames: 3, blockStacks: 1}[typ]
	n := c.Count(size)
	for range n {
		switch typ {
		case blockStrings:
			s := c.Text()
			if err := r.b.Take(int64(len(s)) + 32); err != nil {
				return err
			}
			tab.strings = append(tab.strings, s)
		case blockFrames:
			file, fn := c.Index(len(tab.strings)), c.Index(len(tab.strings))
			line := c.I()
			if c.Bad {
				return errPayload
			}
			if err := r.b.Take(64); err != nil {
				return err
			}
			f := recording.Frame{File: tab.strings[file], Func: tab.strings[fn], Line: int(line)}
			if err := tab.names.Demangle(&f, r.b); err != nil {
				return err
			}
			tab.frames = append(tab.frames, f)
		case blockStacks:
			k := c.Count(1)
			if err := r.b.Take(int64(k)*4 + 48); err != nil {
				return err
			}
			var s recording.Stack
			if k > 0 {
				s = make(recording.Stack, k)
			}
			for j := range s {
				s[j] = uint32(c.Index(len(tab.frames)))
			}
			tab.stacks = append(tab.stacks, s)
		}
	}
	return nil
}

func (r *reader) numbers(typ byte, tr *readTrace, c *tables.Cursor) error {
	switch typ {
	case blockStreams:
		n := c.Count(8)
		for range n {
			tr.t.Streams = append(tr.t.Streams, c.U64())
		}
		return r.b.Take(int64(n) * 16)
	case blockPools:
		n := c.Count(16)
		for range n {
			tr.t.Pools = append(tr.t.Pools, recording.PoolID{c.U64(), c.U64()})
		}
		return r.b.Take(int64(n) * 32)
	}
	for range c.Count(1) {
		s := c.Text()
		if err := r.b.Take(int64(len(s)) + 32); err != nil {
			return err
		}
		tr.t.Notes = append(tr.t.Notes, s)
	}
	return nil
}

func (r *reader) state(typ byte, tr *readTrace, c *tables.Cursor) error {
	t := tr.t
	list := c.U()
	if typ == blockSegments {
		segs := &t.InitialSegments
		if list > 1 || list == 1 && t.Final == nil {
			return fmt.Errorf("list %d of segments", list)
		} else if list == 1 {
			segs = &t.Final
		}
		var addr uint64
		for range c.Count(6) {
			addr += uint64(c.I())
			s := recording.Segment{Addr: addr, Size: c.U(), Stream: c.Ref(), Pool: c.Ref()}
			flags := c.U8()
			s.Large, s.Expandable = flags&1 != 0, flags&2 != 0
			s.Stack = c.Ref()
			var err error
			if *segs, err = input.Grow(r.b, *segs, segments.SegmentSize); err != nil {
				return err
			}
			*segs = append(*segs, s)
		}
		return nil
	}
	blocks, err := blockList(t, list, c.U())
	if err != nil {
		return err
	}
	n := c.Count(7)
	if err := r.b.Take(int64(n) * 2 * segments.BlockSize); err != nil {
		return err
	}
	if *blocks == nil {
		*blocks = make([]recording.Block, 0, n)
	}
	var addr uint64
	for range n {
		addr += uint64(c.I())
		b := recording.Block{Addr: addr, Size: c.U(), Requested: c.U(), Stream: c.Ref(), Pool: c.Ref(), Stack: c.Ref(),
			State: recording.BlockState(c.U8())}
		if b.State > recording.PendingFree {
			return fmt.Errorf("block state %d", b.State)
		}
		*blocks = append(*blocks, b)
	}
	return nil
}

// events takes in a block of events.
func (r *reader) events(tr *readTrace, c *tables.Cursor, at int64) error {
	first, n := c.U(), c.U()
	if c.Bad || first != uint64(tr.ev.N) || n > tables.BlockEvents {
		return fmt.Errorf("%d events from number %d; expected number %d", n, first, tr.ev.N)
	}
	var ok bool
	var bad int
	r.decoded, bad, ok = tables.DecodeEvents(r.decoded[:0], c, int(n))
	streams, pools, stacks := uint64(len(tr.t.Streams)), uint64(len(tr.t.Pools)), uint64(len(r.tables[tr.table].stacks))
	tags, libraries := max(1, len(tr.t.Tags)), max(1, len(tr.t.Libraries))
	for k, e := range r.decoded {
		if e.Kind >= event.NumKinds || uint64(e.Stream) >= streams || uint64(e.Pool) >= pools || uint64(e.Stack) >= stacks ||
			int(e.Tag) >= tags || int(e.Library) >= libraries {
			ok, bad = false, k
			break
		}
		if err := tr.ev.Add(r.b, e); err != nil {
			return err
		}
	}
	if !ok && bad >= 0 {
		return &recording.Error{Offset: at, Device: tr.t.Device, Event: int(first) + bad,
			Msg: "the event is of an unknown kind or refers to what is not there"}
	}
	if !ok {
		return errPayload
	}
	return nil
}

// finish makes the traces whole, and checks what the states refer to.
func (r *reader) finish(at int64, ended bool) ([]*recording.Trace, error) {
	var out []*recording.Trace
	for _, tr := range r.traces {
		t := tr.t
		tab := r.tables[tr.table]
		t.Frames, t.Stacks = tab.frames, tab.stacks
		if len(t.Stacks) == 0 {
			t.Stacks = []recording.Stack{nil}
		}
		if len(t.Pools) == 0 {
			t.Pools = []recording.PoolID{{}}
		}
		if len(t.Stacks[0]) > 0 || t.Pools[0] != (recording.PoolID{}) || len(t.Tags) > 0 && t.Tags[0] != "" ||
			len(t.Libraries) > 0 && t.Libraries[0] != "" {
			return nil, input.Whole("the first stack, pool, tag or library of device %d is one; expected those that stand for none", t.Device)
		}
		ok := true
		check := func(stream, pool, stack uint32) {
			ok = ok && int(stream) < len(t.Streams) && int(pool) < len(t.Pools) && int(stack) < len(t.Stacks)
		}
		for _, segs := range [][]recording.Segment{t.InitialSegments, t.Final} {
			for i := range segs {
				check(segs[i].Stream, segs[i].Pool, segs[i].Stack)
				for j := range segs[i].Blocks {
					b := &segs[i].Blocks[j]
					check(b.Stream, b.Pool, b.Stack)
				}
			}
		}
		for i := range t.Initial {
			check(t.Initial[i].Stream, t.Initial[i].Pool, t.Initial[i].Stack)
		}
		if !ok {
			return nil, input.Whole("a segment or block of device %d refers to what is not there", t.Device)
		}
		if ended && tr.failure != nil {
			return nil, input.Whole("a failure of device %d has no end", t.Device)
		}
		// A process may have kept no history, and yet written what it held, or why a request failed.
		if tr.ev.N == 0 && len(t.Failures) == 0 && len(t.Initial) == 0 {
			continue
		}
		var err error
		if t.Events, err = tr.ev.Join(r.b); err != nil {
			return nil, err
		}
		if !checkLabels(t, !ended) {
			return nil, input.Whole("a block or failure of device %d has a label, stack or event that is not there", t.Device)
		}
		if !ended {
			t.Final = nil
			t.Note("the file was cut off after byte %d: %d events could be read, the final state is not known", at,
				len(t.Events))
		}
		out = append(out, t)
	}
	switch {
	case len(out) > 0 || r.driver != nil:
	case !ended:
		return nil, input.AtByte(at, "the file was cut off before its first event")
	default:
		return nil, input.Whole("the trace has no events")
	}
	return out, nil
}
