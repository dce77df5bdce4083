package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/cistern-gpu/cistern/event"
	"github.com/klauspost/compress/zstd"
)

// cisternFactor bounds the memory of a file in Cistern's format by the decompressed bytes of its blocks: an event takes
// at least two of them and becomes 56.
const cisternFactor = 30

type cisternReader struct {
	in      *input
	b       *budget
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
	frames  []Frame
	stacks  []Stack
	names   nativeNames
}

type readTrace struct {
	t     *Trace
	table int
	ev    rawTrace
	// failure is the part of one of which more is to come.
	failure []byte
}

// readCistern reads a file of Cistern's own format; see format.md.
func readCistern(in *input, path string) ([]*Trace, *Driver, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(blockMax),
		zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, nil, err
	}
	defer z.Close()
	r := &cisternReader{in: in, z: z}
	r.b = newBudget(func() int64 { return r.rawRead }, in.stored)
	r.b.factor = cisternFactor
	if !in.need(len(cisternMagic)) {
		return nil, nil, in.truncated("the magic number")
	}
	if v := in.buf[in.pos+7]; v != 1 {
		return nil, nil, atByte(7, "version %d of Cistern's format; expected 1", v)
	}
	in.pos += len(cisternMagic)
	ended := false
	at := in.offset()
	for !ended {
		at = in.offset()
		typ, ok, err := r.block()
		if err != nil {
			return nil, nil, err
		}
		if !ok {
			break
		}
		if ended, err = r.content(typ, at, path); err != nil {
			var e *Error
			if errors.As(err, &e) {
				return nil, nil, err
			}
			return nil, nil, atByte(at, "block of type %d: %s", typ, err)
		}
	}
	if in.err != nil {
		return nil, nil, in.truncated("a block")
	}
	if ended {
		if !in.need(16) || string(in.buf[in.pos+8:in.pos+16]) != cisternTrailer ||
			binary.LittleEndian.Uint64(in.buf[in.pos:]) != uint64(at) {
			return nil, nil, atByte(in.offset(), "expected the trailer that points back to byte %d", at)
		}
		in.pos += 16
		if err := in.ended("the end of the trace"); err != nil {
			return nil, nil, err
		}
	}
	traces, err := r.finish(at, ended)
	if err != nil {
		return nil, nil, err
	}
	d := r.driver.finish(r.tables)
	for _, t := range traces {
		if d != nil && t.Source == FormatDriver {
			t.WallUS = d.WallNS / 1000
		}
	}
	if d != nil {
		setOwners(traces, d)
	}
	return traces, d, nil
}

// block reads the next block into r.raw. ok is false where the file ends or was never written.
func (r *cisternReader) block() (typ byte, ok bool, err error) {
	in := r.in
	at := in.offset()
	if !in.need(blockHeader) {
		return 0, false, nil
	}
	h := [blockHeader]byte(in.buf[in.pos:])
	typ = h[0]
	if h == [blockHeader]byte{} {
		return 0, false, nil // room that was never written
	}
	stored, raw := binary.LittleEndian.Uint32(h[1:]), binary.LittleEndian.Uint32(h[5:])
	if stored > blockMax || raw > blockMax || stored > raw {
		return 0, false, atByte(at, "a block of %d bytes, %d unpacked; expected at most %d", stored, raw, blockMax)
	}
	in.pos += blockHeader
	r.stored = r.stored[:0]
	for len(r.stored) < int(stored) {
		if in.pos == in.end && !in.need(1) {
			if bytes.HasSuffix(r.stored, []byte(cisternTrailer)) {
				return 0, false, atByte(at, "a block of %d bytes; the file ends %d bytes after it begins", stored,
					len(r.stored))
			}
			return 0, false, nil
		}
		n := min(int(stored)-len(r.stored), in.end-in.pos)
		r.stored = append(r.stored, in.buf[in.pos:in.pos+n]...)
		in.pos += n
	}
	crc := crc32.Update(crc32.Checksum(h[:9], castagnoli), castagnoli, r.stored)
	if want := binary.LittleEndian.Uint32(h[9:]); crc != want {
		return 0, false, atByte(at, "checksum of the block is %08x; expected %08x", crc, want)
	}
	r.raw = append(r.raw[:0], r.stored...)
	if stored != raw {
		if r.raw, err = r.z.DecodeAll(r.stored, r.raw[:0]); err != nil {
			return 0, false, atByte(at, "a block: zstd: %s", err)
		}
		if len(r.raw) != int(raw) {
			return 0, false, atByte(at, "a block unpacks to %d bytes; expected %d", len(r.raw), raw)
		}
	}
	r.rawRead += int64(raw)
	if off := in.offset(); r.rawRead > ratioFree && r.rawRead > ratioMax*off {
		return 0, false, atByte(at, "blocks unpack to more than %d times the file", ratioMax)
	}
	return typ, true, nil
}

var errPayload = errors.New("the payload ends early or refers to what is not there")

// content takes in the block in r.raw. end is true for the index.
func (r *cisternReader) content(typ byte, at int64, path string) (end bool, err error) {
	c := &cursor{b: r.raw}
	switch typ {
	case blockTrace:
		err = r.trace(c, path)
	case blockStrings, blockFrames, blockStacks:
		i := c.u()
		if i >= uint64(len(r.tables)) {
			return false, fmt.Errorf("table %d of %d", i, len(r.tables))
		}
		err = r.table(typ, r.tables[i], c)
	case blockStreams, blockPools, blockSegments, blockBlocks, blockEventsType, blockNotes, blockNames, blockLabels, blockFailure:
		i := c.u()
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
		default:
			err = r.numbers(typ, tr, c)
		}
	case blockIndex:
		for range c.count(7) {
			c.u8()
			for range 4 {
				c.u()
			}
			c.i()
			c.i()
		}
		for _, tr := range r.traces {
			if n := c.u(); n != uint64(tr.ev.n) && !c.bad {
				return false, fmt.Errorf("device %d has %d events; expected %d", tr.t.Device, tr.ev.n, n)
			}
		}
		end = true
	case blockDriver, blockProcesses, blockCalls, blockDriverEnd, blockUntraced, blockEnds:
		err = r.driverBlock(typ, c)
	default:
		if typ < 128 {
			return false, fmt.Errorf("unknown")
		}
		return false, nil
	}
	if err == nil && (c.bad || len(c.b) > 0) {
		err = errPayload
	}
	return end, err
}

func (r *cisternReader) trace(c *cursor, path string) error {
	i, dev, table := c.u(), c.u(), c.u()
	if c.bad || i != uint64(len(r.traces)) || dev >= maxDevices || i >= maxDevices || table > uint64(len(r.tables)) {
		return fmt.Errorf("trace %d of device %d with table %d; expected trace %d", i, dev, table, len(r.traces))
	}
	if table == uint64(len(r.tables)) {
		r.tables = append(r.tables, &readTable{})
	}
	flags := c.u8()
	t := &Trace{Path: path, Format: FormatCistern, Device: int(dev), FromStart: flags&1 != 0}
	if flags&4 != 0 {
		t.Final = []Segment{}
	}
	t.Source = c.text()
	s := &t.Settings
	s.Known = flags&2 != 0
	s.Conf = c.text()
	flags = c.u8()
	s.Expandable = flags&1 != 0
	s.MaxSplitSize = c.i()
	s.GCThreshold = math.Float64frombits(c.u64())
	if flags&2 != 0 {
		s.RoundupPow2 = map[uint64]uint64{}
		for range c.count(2) {
			k := c.u()
			s.RoundupPow2[k] = c.u()
		}
	}
	if flags&4 != 0 {
		s.Raw = map[string]string{}
		for range c.count(2) {
			k := c.text()
			s.Raw[k] = c.text()
		}
	}
	r.traces = append(r.traces, &readTrace{t: t, table: int(table)})
	return r.b.take(int64(len(r.raw)) * 20)
}

func (r *cisternReader) table(typ byte, tab *readTable, c *cursor) error {
	size := map[byte]int{blockStrings: 1, blockFrames: 3, blockStacks: 1}[typ]
	n := c.count(size)
	for range n {
		switch typ {
		case blockStrings:
			s := c.text()
			if err := r.b.take(int64(len(s)) + 32); err != nil {
				return err
			}
			tab.strings = append(tab.strings, s)
		case blockFrames:
			file, fn := c.index(len(tab.strings)), c.index(len(tab.strings))
			line := c.i()
			if c.bad {
				return errPayload
			}
			if err := r.b.take(64); err != nil {
				return err
			}
			f := Frame{tab.strings[file], tab.strings[fn], int(line)}
			if err := tab.names.demangle(&f, r.b); err != nil {
				return err
			}
			tab.frames = append(tab.frames, f)
		case blockStacks:
			k := c.count(1)
			if err := r.b.take(int64(k)*4 + 48); err != nil {
				return err
			}
			var s Stack
			if k > 0 {
				s = make(Stack, k)
			}
			for j := range s {
				s[j] = uint32(c.index(len(tab.frames)))
			}
			tab.stacks = append(tab.stacks, s)
		}
	}
	return nil
}

func (r *cisternReader) numbers(typ byte, tr *readTrace, c *cursor) error {
	switch typ {
	case blockStreams:
		n := c.count(8)
		for range n {
			tr.t.Streams = append(tr.t.Streams, c.u64())
		}
		return r.b.take(int64(n) * 16)
	case blockPools:
		n := c.count(16)
		for range n {
			tr.t.Pools = append(tr.t.Pools, PoolID{c.u64(), c.u64()})
		}
		return r.b.take(int64(n) * 32)
	}
	for range c.count(1) {
		s := c.text()
		if err := r.b.take(int64(len(s)) + 32); err != nil {
			return err
		}
		tr.t.Notes = append(tr.t.Notes, s)
	}
	return nil
}

func (r *cisternReader) state(typ byte, tr *readTrace, c *cursor) error {
	t := tr.t
	list := c.u()
	if typ == blockSegments {
		segs := &t.InitialSegments
		if list > 1 || list == 1 && t.Final == nil {
			return fmt.Errorf("list %d of segments", list)
		} else if list == 1 {
			segs = &t.Final
		}
		var addr uint64
		for range c.count(6) {
			addr += uint64(c.i())
			s := Segment{Addr: addr, Size: c.u(), Stream: c.ref(), Pool: c.ref()}
			flags := c.u8()
			s.Large, s.Expandable = flags&1 != 0, flags&2 != 0
			s.Stack = c.ref()
			var err error
			if *segs, err = grow(r.b, *segs, segmentSize); err != nil {
				return err
			}
			*segs = append(*segs, s)
		}
		return nil
	}
	blocks, err := t.blockList(list, c.u())
	if err != nil {
		return err
	}
	n := c.count(7)
	if err := r.b.take(int64(n) * 2 * blockSize); err != nil {
		return err
	}
	if *blocks == nil {
		*blocks = make([]Block, 0, n)
	}
	var addr uint64
	for range n {
		addr += uint64(c.i())
		b := Block{Addr: addr, Size: c.u(), Requested: c.u(), Stream: c.ref(), Pool: c.ref(), Stack: c.ref(),
			State: BlockState(c.u8())}
		if b.State > PendingFree {
			return fmt.Errorf("block state %d", b.State)
		}
		*blocks = append(*blocks, b)
	}
	return nil
}

const blockSize = 40 // bytes of a Block in memory

// events takes in a block of events.
func (r *cisternReader) events(tr *readTrace, c *cursor, at int64) error {
	first, n := c.u(), c.u()
	if c.bad || first != uint64(tr.ev.n) || n > blockEvents {
		return fmt.Errorf("%d events from number %d; expected number %d", n, first, tr.ev.n)
	}
	var ok bool
	var bad int
	r.decoded, bad, ok = decodeEvents(r.decoded[:0], c, int(n))
	streams, pools, stacks := uint64(len(tr.t.Streams)), uint64(len(tr.t.Pools)), uint64(len(r.tables[tr.table].stacks))
	tags, libraries := max(1, len(tr.t.Tags)), max(1, len(tr.t.Libraries))
	for k, e := range r.decoded {
		if e.Kind >= event.NumKinds || uint64(e.Stream) >= streams || uint64(e.Pool) >= pools || uint64(e.Stack) >= stacks ||
			int(e.Tag) >= tags || int(e.Library) >= libraries {
			ok, bad = false, k
			break
		}
		if err := tr.ev.add(r.b, e); err != nil {
			return err
		}
	}
	if !ok && bad >= 0 {
		return &Error{Offset: at, Device: tr.t.Device, Event: int(first) + bad,
			Msg: "the event is of an unknown kind or refers to what is not there"}
	}
	if !ok {
		return errPayload
	}
	return nil
}

// finish makes the traces whole, and checks what the states refer to.
func (r *cisternReader) finish(at int64, ended bool) ([]*Trace, error) {
	var out []*Trace
	for _, tr := range r.traces {
		t := tr.t
		tab := r.tables[tr.table]
		t.Frames, t.Stacks = tab.frames, tab.stacks
		if len(t.Stacks) == 0 {
			t.Stacks = []Stack{nil}
		}
		if len(t.Pools) == 0 {
			t.Pools = []PoolID{{}}
		}
		if len(t.Stacks[0]) > 0 || t.Pools[0] != (PoolID{}) || len(t.Tags) > 0 && t.Tags[0] != "" ||
			len(t.Libraries) > 0 && t.Libraries[0] != "" {
			return nil, whole("the first stack, pool, tag or library of device %d is one; expected those that stand for none", t.Device)
		}
		ok := true
		check := func(stream, pool, stack uint32) {
			ok = ok && int(stream) < len(t.Streams) && int(pool) < len(t.Pools) && int(stack) < len(t.Stacks)
		}
		for _, segs := range [][]Segment{t.InitialSegments, t.Final} {
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
			return nil, whole("a segment or block of device %d refers to what is not there", t.Device)
		}
		if ended && tr.failure != nil {
			return nil, whole("a failure of device %d has no end", t.Device)
		}
		// A process may have kept no history, and yet written what it held, or why a request failed.
		if tr.ev.n == 0 && len(t.Failures) == 0 && len(t.Initial) == 0 {
			continue
		}
		var err error
		if t.Events, err = tr.ev.join(r.b); err != nil {
			return nil, err
		}
		if !t.checkLabels(!ended) {
			return nil, whole("a block or failure of device %d has a label, stack or event that is not there", t.Device)
		}
		if !ended {
			t.Final = nil
			t.note("the file was cut off after byte %d: %d events could be read, the final state is not known", at,
				len(t.Events))
		}
		out = append(out, t)
	}
	switch {
	case len(out) > 0 || r.driver != nil:
	case !ended:
		return nil, atByte(at, "the file was cut off before its first event")
	default:
		return nil, whole("the trace has no events")
	}
	return out, nil
}
