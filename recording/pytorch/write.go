package pytorch

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/segments"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
)

// Write writes the devices as one PyTorch memory snapshot: a pickle of protocol 4 that pickle.load, PyTorch's
// torch/cuda/_memory_viz.py and its viewer (torch/utils/viz/MemoryViz.js) open. Strings, frames and stacks are written
// once and referred to. Tag, library and thread are lines under user_metadata, which the viewer shows. Beyond what
// PyTorch writes, blocks have them too, map and unmap events have a "handle" number where it is known, events of
// Cistern's own kind an action of their own ("retry", with "flags"), and the environment a key of its own ("cistern");
// readers of snapshots skip these.
// Each trace is another device. What tells of no segments gets some (segments.Complete).
func Write(w io.Writer, devices ...*recording.Trace) error {
	var byDevice []*recording.Trace
	for _, t := range devices {
		if t.Device < 0 || t.Device >= recording.MaxDevices {
			return fmt.Errorf("device %d; expected 0 to %d", t.Device, recording.MaxDevices-1)
		}
		for len(byDevice) <= t.Device {
			byDevice = append(byDevice, nil)
		}
		if byDevice[t.Device] != nil {
			return fmt.Errorf("two traces of device %d, as of two processes; a PyTorch snapshot has one of each device", t.Device)
		}
		byDevice[t.Device] = segments.Complete(t)
	}
	p := &pickler{w: bufio.NewWriterSize(w, 64<<10), strs: map[string]uint32{}}
	p.byte(opProto, 4)
	p.byte(opEmptyDict, opMark)

	p.str("segments")
	p.byte(opEmptyList)
	batch := 0
	for _, t := range byDevice {
		if t == nil {
			continue
		}
		final := placed(t.Final)
		if err := checkSegments(final); err != nil {
			return fmt.Errorf("device %d: %w", t.Device, err)
		}
		p.stacks, p.labels = nil, nil // indices are the trace's own
		for i := range final {
			p.item(&batch)
			if err := p.segment(t, &final[i]); err != nil {
				return err
			}
		}
	}
	p.endList(batch)

	p.str("device_traces")
	p.byte(opEmptyList)
	devs := 0
	for _, t := range byDevice {
		p.item(&devs)
		p.byte(opEmptyList)
		batch = 0
		if t != nil {
			p.stacks, p.labels = nil, nil
			ownPools := len(t.Pools) > 1
			for i := range t.Events {
				p.item(&batch)
				if err := p.event(t, &t.Events[i], ownPools); err != nil {
					return fmt.Errorf("event %d of device %d: %w", i, t.Device, err)
				}
			}
		}
		p.endList(batch)
	}
	p.endList(devs)

	if len(devices) > 0 && devices[0].Settings.Known {
		p.str("allocator_settings")
		p.settings(&devices[0].Settings)
	}
	p.environment(devices)
	p.str("external_annotations")
	p.byte(opEmptyList, opSetitems, opStop)
	return p.w.Flush()
}

// pickler writes pickle opcodes. Errors of the writer stay in w until Flush.
type pickler struct {
	w       *bufio.Writer
	memo    uint32 // entries so far
	strs    map[string]uint32
	stacks  map[uint32]uint32          // stack of the trace being written → memo entry of its list
	labels  map[tables.Label]uint32    // of the trace being written → memo entry of its dict
	frames  map[recording.Frame]uint32 // equal frames of several devices are written once
	scratch [16]byte
}

func (p *pickler) byte(b ...byte) { p.w.Write(b) }

func (p *pickler) memoize() uint32 {
	p.byte(opMemoize)
	p.memo++
	return p.memo - 1
}

func (p *pickler) get(i uint32) {
	if i < 256 {
		p.byte(opBinget, byte(i))
		return
	}
	p.byte(opLongBinget)
	p.w.Write(binary.LittleEndian.AppendUint32(p.scratch[:0], i))
}

func (p *pickler) str(s string) {
	if i, ok := p.strs[s]; ok {
		p.get(i)
		return
	}
	// Pickles hold UTF-8; what is not, is replaced rather than made unreadable.
	t := strings.ToValidUTF8(s, "\ufffd")
	if len(t) < 256 {
		p.byte(opShortBinunicode, byte(len(t)))
	} else {
		p.byte(opBinunicode)
		p.w.Write(binary.LittleEndian.AppendUint32(p.scratch[:0], uint32(len(t))))
	}
	p.w.WriteString(t)
	p.strs[s] = p.memoize()
}

func (p *pickler) uint(n uint64) {
	switch {
	case n < 1<<8:
		p.byte(opBinint1, byte(n))
	case n < 1<<16:
		p.byte(opBinint2, byte(n), byte(n>>8))
	case n < 1<<31:
		p.byte(opBinint)
		p.w.Write(binary.LittleEndian.AppendUint32(p.scratch[:0], uint32(n)))
	default:
		b := binary.LittleEndian.AppendUint64(p.scratch[:0], n)
		k := 8
		for b[k-1] == 0 {
			k--
		}
		b = append(b, 0)
		if b[k-1]&0x80 != 0 {
			k++ // a sign byte
		}
		p.byte(opLong1, byte(k))
		p.w.Write(b[:k])
	}
}

func (p *pickler) int(n int64) {
	if n >= 0 {
		p.uint(uint64(n))
		return
	}
	p.byte(opLong1, 8)
	p.w.Write(binary.LittleEndian.AppendUint64(p.scratch[:0], uint64(n)))
}

func (p *pickler) bool(b bool) {
	if b {
		p.byte(opNewtrue)
	} else {
		p.byte(opNewfalse)
	}
}

func (p *pickler) float(f float64) {
	p.byte(opBinfloat)
	p.w.Write(binary.BigEndian.AppendUint64(p.scratch[:0], math.Float64bits(f)))
}

// Lists are written in batches, as Python does: its own reader and the viewer's spread a batch over their stack.
const pickleBatch = 1000

// item begins the next item of a list of which n are written.
func (p *pickler) item(n *int) {
	if *n%pickleBatch == 0 {
		if *n > 0 {
			p.byte(opAppends)
		}
		p.byte(opMark)
	}
	*n++
}

// endList ends a list of n items.
func (p *pickler) endList(n int) {
	if n > 0 {
		p.byte(opAppends)
	}
}

// stack writes the frames of stack id of t, or refers to where they were written.
func (p *pickler) stack(t *recording.Trace, id uint32) error {
	if i, ok := p.stacks[id]; ok {
		p.get(i)
		return nil
	}
	if int(id) >= len(t.Stacks) {
		return fmt.Errorf("stack %d of %d", id, len(t.Stacks))
	}
	p.byte(opEmptyList)
	i := p.memoize()
	n := 0
	for _, f := range t.Stacks[id] {
		if int(f) >= len(t.Frames) {
			return fmt.Errorf("frame %d of %d", f, len(t.Frames))
		}
		p.item(&n)
		fr := t.Frames[f]
		if j, ok := p.frames[fr]; ok {
			p.get(j)
			continue
		}
		p.byte(opEmptyDict)
		j := p.memoize()
		p.byte(opMark)
		p.str("name")
		p.str(fr.Func)
		p.str("filename")
		p.str(fr.File)
		p.str("line")
		p.int(int64(fr.Line))
		p.byte(opSetitems)
		if p.frames == nil {
			p.frames = map[recording.Frame]uint32{}
		}
		p.frames[fr] = j
	}
	p.endList(n)
	if p.stacks == nil {
		p.stacks = map[uint32]uint32{}
	}
	p.stacks[id] = i
	return nil
}

func (p *pickler) stream(t *recording.Trace, i uint32) error {
	if int(i) >= len(t.Streams) {
		return fmt.Errorf("stream %d of %d", i, len(t.Streams))
	}
	p.str("stream")
	p.int(int64(t.Streams[i])) // as PyTorch does: a handle is a signed number there
	return nil
}

func (p *pickler) pool(t *recording.Trace, key string, i uint32) error {
	id := recording.PoolID{}
	if i != 0 || len(t.Pools) > 0 {
		if int(i) >= len(t.Pools) {
			return fmt.Errorf("pool %d of %d", i, len(t.Pools))
		}
		id = t.Pools[i]
	}
	p.str(key)
	p.uint(id[0])
	p.uint(id[1])
	p.byte(opTuple2)
	return nil
}

// label writes the label of an event or block, as lines of user_metadata.
func (p *pickler) label(t *recording.Trace, l tables.Label) {
	if l == (tables.Label{}) {
		return
	}
	p.str("user_metadata")
	if i, ok := p.labels[l]; ok {
		p.get(i)
		return
	}
	p.byte(opEmptyDict)
	i := p.memoize()
	p.byte(opMark)
	if l.Tag != 0 {
		p.str("tag")
		p.str(t.TagName(l.Tag))
	}
	if l.Library != 0 {
		p.str("library")
		p.str(t.LibraryName(l.Library))
	}
	if l.Thread != 0 {
		p.str("thread")
		p.uint(uint64(l.Thread))
		if name := t.Threads[l.Thread]; name != "" {
			p.str("thread_name")
			p.str(name)
		}
	}
	p.byte(opSetitems)
	if p.labels == nil {
		p.labels = map[tables.Label]uint32{}
	}
	p.labels[l] = i
}

func (p *pickler) event(t *recording.Trace, e *event.Event, ownPools bool) error {
	if e.Kind == event.None || e.Kind >= event.NumKinds {
		return fmt.Errorf("kind %d has no action in a snapshot", e.Kind)
	}
	p.byte(opEmptyDict, opMark)
	p.str("action")
	p.str(e.Kind.String())
	if e.Kind == event.OOM {
		p.str("device_free")
	} else {
		p.str("addr")
	}
	p.uint(e.Addr)
	p.str("size")
	p.uint(e.Size)
	if err := p.stream(t, e.Stream); err != nil {
		return err
	}
	p.str("time_us")
	p.int(e.TimeUS + t.WallUS)
	if ownPools {
		if err := p.pool(t, "segment_pool_id", e.Pool); err != nil {
			return err
		}
	}
	if e.Handle != 0 {
		p.str("handle")
		p.uint(e.Handle)
	}
	if e.Flags != 0 {
		p.str("flags")
		p.uint(uint64(e.Flags))
	}
	if e.Stack != 0 {
		p.str("frames")
		if err := p.stack(t, e.Stack); err != nil {
			return err
		}
	}
	p.label(t, tables.LabelOf(e))
	p.byte(opSetitems)
	return nil
}

func (p *pickler) segment(t *recording.Trace, s *recording.Segment) error {
	var allocated, active, requested uint64
	for i := range s.Blocks {
		b := &s.Blocks[i]
		switch b.State {
		case recording.Active:
			allocated += b.Size
			fallthrough
		case recording.PendingFree:
			active += b.Size
			requested += b.Requested
		}
	}
	p.byte(opEmptyDict, opMark)
	p.str("device")
	p.uint(uint64(t.Device))
	p.str("address")
	p.uint(s.Addr)
	p.str("total_size")
	p.uint(s.Size)
	p.str("allocated_size")
	p.uint(allocated)
	p.str("active_size")
	p.uint(active)
	p.str("requested_size")
	p.uint(requested)
	if err := p.stream(t, s.Stream); err != nil {
		return err
	}
	p.str("segment_type")
	if s.Large {
		p.str("large")
	} else {
		p.str("small")
	}
	if err := p.pool(t, "segment_pool_id", s.Pool); err != nil {
		return err
	}
	p.str("is_expandable")
	p.bool(s.Expandable)
	p.str("frames")
	if err := p.stack(t, s.Stack); err != nil {
		return err
	}
	p.str("blocks")
	p.byte(opEmptyList)
	n := 0
	for i := range s.Blocks {
		p.item(&n)
		if err := p.block(t, &s.Blocks[i]); err != nil {
			return err
		}
	}
	p.endList(n)
	p.byte(opSetitems)
	return nil
}

func (p *pickler) block(t *recording.Trace, b *recording.Block) error {
	p.byte(opEmptyDict, opMark)
	p.str("address")
	p.uint(b.Addr)
	p.str("size")
	p.uint(b.Size)
	p.str("requested_size")
	p.uint(b.Requested)
	p.str("state")
	switch b.State {
	case recording.Active:
		p.str("active_allocated")
	case recording.PendingFree:
		p.str("active_pending_free")
	default:
		p.str("inactive")
	}
	p.str("frames")
	if err := p.stack(t, b.Stack); err != nil {
		return err
	}
	p.label(t, tables.Label{Tag: b.Tag, Library: b.Library})
	p.byte(opSetitems)
	return nil
}

// placed are segments at addresses that no two share: spare chunks of Cistern's, which are mapped nowhere and have
// address 0, come to lie where the physical memory of driver traces does.
func placed(segs []recording.Segment) []recording.Segment {
	out := slices.Clone(segs)
	next := uint64(recording.VirtualBase)
	for i := range out {
		s := &out[i]
		if s.Addr != 0 || s.Size > recording.VirtualBase {
			continue
		}
		s.Addr, s.Blocks = next, slices.Clone(s.Blocks)
		for k := range s.Blocks {
			s.Blocks[k].Addr += next
		}
		next += s.Size
	}
	return out
}

// checkSegments is an error where segments are such that no reader of snapshots would take them.
func checkSegments(segs []recording.Segment) error {
	order := make([]*recording.Segment, len(segs))
	for i := range segs {
		s := &segs[i]
		order[i] = s
		if s.Addr+s.Size < s.Addr {
			return fmt.Errorf("the segment at 0x%x ends beyond the address space", s.Addr)
		}
		at := s.Addr
		for k := range s.Blocks {
			b := &s.Blocks[k]
			if b.Addr < at || b.Addr > s.Addr+s.Size || b.Size > s.Addr+s.Size-b.Addr {
				return fmt.Errorf("block %d of the segment at 0x%x lies outside it or over the one before", k, s.Addr)
			}
			at = b.Addr + b.Size
		}
	}
	slices.SortFunc(order, func(a, b *recording.Segment) int { return cmp.Compare(a.Addr, b.Addr) })
	for i := 1; i < len(order); i++ {
		if a, b := order[i-1], order[i]; b.Addr-a.Addr < a.Size {
			return fmt.Errorf("segments at 0x%x and 0x%x overlap", a.Addr, b.Addr)
		}
	}
	return nil
}

// settings writes what the recorder noted, and what it did not, from the parsed fields.
func (p *pickler) settings(s *recording.Settings) {
	p.byte(opEmptyDict, opMark)
	raw := func(key, parsed string) {
		if v, ok := s.Raw[key]; ok {
			parsed = v
		}
		p.str(key)
		p.literal(parsed)
	}
	conf := "PYTORCH_CUDA_ALLOC_CONF"
	v, ok := s.Raw[conf]
	if !ok {
		v = s.Conf
	}
	p.str(conf)
	p.str(v)
	raw("max_split_size", strconv.FormatInt(s.MaxSplitSize, 10))
	raw("garbage_collection_threshold", pyFloat(s.GCThreshold))
	expandable := "False"
	if s.Expandable {
		expandable = "True"
	}
	raw("expandable_segments", expandable)
	for _, key := range slices.Sorted(maps.Keys(s.Raw)) {
		switch key {
		case conf, "max_split_size", "garbage_collection_threshold", "expandable_segments", "roundup_power2_divisions":
		case "PYTORCH_ALLOC_CONF":
			p.str(key)
			p.str(s.Raw[key])
		default:
			raw(key, "")
		}
	}
	if s.RoundupPow2 != nil {
		p.str("roundup_power2_divisions")
		p.byte(opEmptyDict)
		if len(s.RoundupPow2) > 0 {
			p.byte(opMark)
			for _, mib := range slices.Sorted(maps.Keys(s.RoundupPow2)) {
				p.str(strconv.FormatUint(mib, 10))
				p.uint(s.RoundupPow2[mib])
			}
			p.byte(opSetitems)
		}
	}
	p.byte(opSetitems)
}

// literal writes text as the Python value that prints so: a bool, a number, or else a string.
func (p *pickler) literal(text string) {
	switch text {
	case "True", "False":
		p.bool(text == "True")
		return
	case "None":
		p.byte(opNone)
		return
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && strconv.FormatInt(n, 10) == text {
		p.int(n)
		return
	}
	if n, err := strconv.ParseUint(text, 10, 64); err == nil && strconv.FormatUint(n, 10) == text {
		p.uint(n)
		return
	}
	if f, err := strconv.ParseFloat(text, 64); err == nil && pyFloat(f) == text {
		p.float(f)
		return
	}
	p.str(text)
}
