package pytorch

import (
	"fmt"
	"math"
	"strconv"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
)

// appendItems is APPENDS or APPEND.
func (m *machine) appendItems(list value, items []value) error {
	switch list.k {
	case kSkipList:
		return nil
	case kTraces:
		for _, v := range items {
			if v.k != kTrace || v.u != uint64(m.tracesAppended) {
				return fmt.Errorf("device_traces holds %s; expected a new list for each device", v.k)
			}
			m.tracesAppended++
		}
		return nil
	case kTrace:
		return m.appendEvents(list, items)
	case kSegments:
		for _, v := range items {
			if v.k != kSegment || v.u != uint64(m.segmentsAppended) {
				return fmt.Errorf("segments holds %s; expected a new dict for each segment", v.k)
			}
			m.segmentsAppended++
			if err := m.checkSegment(&m.segments[v.u]); err != nil {
				return err
			}
		}
		return nil
	case kBlocks:
		return m.appendBlocks(list, items)
	case kFrames:
		return m.appendFrames(list, items)
	}
	return fmt.Errorf("APPENDS to %s", list.k)
}

// appendEvents takes the one entry that can be new: those before it were taken when it began.
func (m *machine) appendEvents(list value, items []value) error {
	if len(items) == 0 {
		return nil
	}
	if len(items) != 1 || items[0].k != kEvent || items[0].u != m.evCount-1 || m.evDev != int(list.u) {
		for _, v := range items {
			if v.k != kEvent {
				return fmt.Errorf("a device's trace holds %s; expected dicts", v.k)
			}
		}
		return fmt.Errorf("a trace entry that is in the file twice")
	}
	return m.closeEvent()
}

func (m *machine) appendBlocks(list value, items []value) error {
	s := &m.segments[list.u]
	for _, v := range items {
		if v.k != kBlock || v.u != uint64(s.first+s.appended) {
			return fmt.Errorf("blocks holds %s; expected a new dict for each block", v.k)
		}
		s.appended++
		b := &m.blocks[v.u]
		if b.has&hasSize == 0 || b.has&hasState == 0 {
			return fmt.Errorf("block %d of segment %d has no size or state", s.appended-1, list.u)
		}
		if b.has&hasRequested == 0 {
			b.requested = b.size
		}
	}
	return nil
}

func (m *machine) appendFrames(list value, items []value) (err error) {
	if !m.curOpen || list.u != m.curList {
		return fmt.Errorf("a stack that changes after its use")
	}
	for _, v := range items {
		if v.k != kFrame {
			return fmt.Errorf("frames holds %s; expected dicts", v.k)
		}
		f := &m.frames[v.u]
		if f.id == none {
			if f.id, err = m.stacks.frame(m.strs, f); err != nil {
				return err
			}
		}
		if m.curIDs, err = input.Grow(m.b, m.curIDs, 4); err != nil {
			return err
		}
		m.curIDs = append(m.curIDs, f.id)
	}
	return nil
}

func (m *machine) checkSegment(s *rawSegment) error {
	i := m.segmentsAppended - 1
	switch {
	case s.has&hasAddr == 0:
		return fmt.Errorf("segment %d has no address", i)
	case s.has&hasTotal == 0:
		return fmt.Errorf("segment %d has no total_size", i)
	case s.addr+s.size < s.addr:
		return fmt.Errorf("segment %d ends beyond the address space", i)
	case s.appended != s.n:
		return fmt.Errorf("segment %d has blocks outside its list", i)
	}
	// Old snapshots give no block addresses: blocks follow one another.
	addr, end := s.addr, s.addr+s.size
	for j := range s.n {
		b := &m.blocks[s.first+j]
		if b.has&hasAddr == 0 {
			b.addr = addr
		}
		if b.addr < addr || b.addr > end || b.size > end-b.addr {
			return fmt.Errorf("block %d of segment %d lies outside it or over the one before", j, i)
		}
		addr = b.addr + b.size
	}
	return nil
}

// setItems is SETITEMS or SETITEM.
func (m *machine) setItems(dict value, items []value) error {
	if len(items)%2 != 0 {
		return fmt.Errorf("a key without a value")
	}
	if dict.k == kSkipDict {
		return nil
	}
	for i := 0; i < len(items); i += 2 {
		k, v := items[i], items[i+1]
		if k.k != kStr {
			return fmt.Errorf("a key is %s; expected a string", k.k)
		}
		var err error
		switch dict.k {
		case kEvent:
			if !m.evOpen || dict.u != m.evCount-1 {
				return fmt.Errorf("a trace entry that changes after its use")
			}
			err = m.setEvent(k.u, v)
		case kSegment:
			err = m.setSegment(&m.segments[dict.u], dict.u, k.u, v)
		case kBlock:
			err = m.setBlock(&m.blocks[dict.u], k.u, v)
		case kFrame:
			err = m.setFrame(&m.frames[dict.u], k.u, v)
		case kRoot:
			err = m.setRoot(k.u, v)
		case kLabel:
			err = m.labels[dict.u].set(k.u, v)
		case kEnvironment:
			err = m.setEnvironment(k.u, v)
		case kSettings, kSubSettings:
			if len(m.settings) >= maxSettings {
				return fmt.Errorf("more than %d allocator settings", maxSettings)
			}
			s := setting{uint32(k.u), none, v}
			if dict.k == kSubSettings {
				s.parent = uint32(dict.u)
			}
			if m.settings, err = input.Grow(m.b, m.settings, 24); err == nil {
				m.settings = append(m.settings, s)
			}
		default:
			err = fmt.Errorf("SETITEMS on %s", dict.k)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *machine) setRoot(key uint64, v value) error {
	switch {
	case key == sDeviceTraces && v.k != kTraces:
		return fmt.Errorf("device_traces is %s; expected a list of lists", v.k)
	case key == sSegments && v.k != kSegments:
		return fmt.Errorf("segments is %s; expected a list of dicts", v.k)
	case key == sAllocatorSettings && v.k != kSettings:
		return fmt.Errorf("allocator_settings is %s; expected a dict", v.k)
	}
	return nil
}

const maxSettings = 1024 // PyTorch writes 26

// number is v as an unsigned 64-bit integer; what says which key it is the value of.
func number(v value, what string) (uint64, error) {
	if v.k != kInt {
		return 0, fmt.Errorf("%s is %s; expected an int from 0 to 2^64-1", what, v.k)
	}
	return v.u, nil
}

func (m *machine) setEvent(key uint64, v value) (err error) {
	d := m.devices[m.evDev]
	switch key {
	case sAction:
		if v.k != kStr {
			return fmt.Errorf("action is %s; expected a string", v.k)
		}
		m.setAction(v.u)
	case sAddr, sDeviceFree:
		// Before 2.1 addresses were written as signed numbers; none that high is seen on a GPU.
		m.ev.Addr, err = number(v, known[key])
		m.evHas |= hasAddr
	case sSize:
		m.ev.Size, err = number(v, "size")
		m.evHas |= hasSize
	case sStream:
		if v.k != kInt && v.k != kNeg {
			return fmt.Errorf("stream is %s; expected an int of 64 bits", v.k)
		}
		if m.ev.Stream, err = d.streams.Charged(m.b, v.u); err != nil {
			return err
		}
		m.evHas |= hasStream
	case sTimeUS:
		m.ev.TimeUS, err = microseconds(v)
		m.evHas |= hasTime
	case sFrames:
		m.ev.Stack, err = m.stackOf(v)
	case sPoolID, sSegmentPoolID:
		if v.k != kNone {
			err = m.setPool(d, known[key], v)
		}
	case sHandle:
		m.ev.Handle, err = number(v, "handle")
	case sFlags:
		var n uint64
		n, err = number(v, "flags")
		m.ev.Flags = uint8(n)
	case sUserMetadata:
		m.evLabel.metadata(v)
	case sCompileContext:
		m.evLabel.context(v)
	}
	return err
}

// setAction takes the action of an entry, the string with this id.
func (m *machine) setAction(id uint64) {
	m.evHas |= hasAction
	if id >= sAlloc && id < sAlloc+uint64(event.NumKinds)-1 {
		m.ev.Kind = event.Kind(id - sAlloc + uint64(event.Alloc))
		return
	}
	m.ev.Kind = event.None
	if m.unknownAction == nil {
		m.unknownAction = map[uint64]int{}
	}
	if len(m.unknownAction) < 16 || m.unknownAction[id] > 0 {
		m.unknownAction[id]++
	}
}

// setPool takes the pool that an entry on d names.
func (m *machine) setPool(d *rawTrace, key string, v value) error {
	if v.k != kPair {
		return fmt.Errorf("%s is %s; expected a tuple of two ints", key, v.k)
	}
	d.hasPool = true
	id, ok := d.pools[uint32(v.u)]
	if !ok {
		if err := m.b.Take(96); err != nil {
			return err
		}
		id = uint32(len(d.poolIDs))
		d.poolIDs = append(d.poolIDs, m.pairs[v.u])
		d.pools[uint32(v.u)] = id
	}
	m.ev.Pool = id
	return nil
}

// microseconds is the value of a time.
func microseconds(v value) (int64, error) {
	switch {
	case v.k == kFloat:
		return int64(math.Float64frombits(v.u)), nil
	case v.k != kInt && v.k != kNeg:
		return 0, fmt.Errorf("time_us is %s; expected an int of 64 bits", v.k)
	case v.k == kInt && v.u > math.MaxInt64:
		return 0, fmt.Errorf("time_us is %d; expected at most 2^63-1", v.u)
	}
	return int64(v.u), nil
}

func (m *machine) setSegment(s *rawSegment, id, key uint64, v value) (err error) {
	switch key {
	case sDevice:
		var n uint64
		if n, err = number(v, "device"); err == nil && n >= recording.MaxDevices {
			err = fmt.Errorf("device is %d; expected less than %d", n, recording.MaxDevices)
		}
		s.device = uint32(n)
		s.has |= hasDevice
	case sAddress:
		s.addr, err = number(v, "address")
		s.has |= hasAddr
	case sTotalSize:
		s.size, err = number(v, "total_size")
		s.has |= hasTotal
	case sStream:
		if v.k != kInt && v.k != kNeg {
			return fmt.Errorf("stream is %s; expected an int of 64 bits", v.k)
		}
		s.stream = v.u
	case sSegmentType:
		s.large = v.k == kStr && v.u == sLarge
	case sSegmentPoolID:
		if v.k != kPair {
			return fmt.Errorf("segment_pool_id is %s; expected a tuple of two ints", v.k)
		}
		s.pool = uint32(v.u)
	case sIsExpandable:
		s.expandable = v.k == kBool && v.u == 1
	case sFrames:
		s.stack, err = m.stackOf(v)
	case sBlocks:
		if v.k != kBlocks || v.u != id {
			return fmt.Errorf("blocks is %s; expected a list of the segment's own", v.k)
		}
	}
	return err
}

func (m *machine) setBlock(b *rawBlock, key uint64, v value) (err error) {
	switch key {
	case sAddress:
		b.addr, err = number(v, "address")
		b.has |= hasAddr
	case sSize:
		b.size, err = number(v, "size")
		b.has |= hasSize
	case sRequestedSize:
		b.requested, err = number(v, "requested_size")
		b.has |= hasRequested
	case sState:
		switch {
		case v.k == kStr && v.u == sActiveAllocated:
			b.state = recording.Active
		case v.k == kStr && (v.u == sActivePendingFree || v.u == sActiveAwaitingFree):
			b.state = recording.PendingFree
		case v.k == kStr && v.u == sInactive:
			b.state = recording.Inactive
		case v.k == kStr:
			return fmt.Errorf("state is %s; expected active_allocated, active_pending_free or inactive",
				strconv.Quote(input.Clip(m.strs.get(v.u))))
		default:
			return fmt.Errorf("state is %s; expected a string", v.k)
		}
		b.has |= hasState
	case sFrames:
		b.stack, err = m.stackOf(v)
	case sUserMetadata:
		b.label.metadata(v)
	}
	return err
}

func (m *machine) setFrame(f *rawFrame, key uint64, v value) error {
	switch key {
	case sFilename, sName:
		if v.k != kStr {
			return fmt.Errorf("%s is %s; expected a string", known[key], v.k)
		}
		if key == sName {
			f.name = uint32(v.u)
		} else {
			f.file = uint32(v.u)
		}
	case sLine:
		switch {
		case v.k == kInt && v.u <= math.MaxInt32:
			f.line = int32(v.u)
		case v.k == kNeg, v.k == kNone, v.k == kInt:
			f.line = 0 // PyTorch writes nonsense for frames without a line
		default:
			return fmt.Errorf("line is %s; expected an int of 64 bits", v.k)
		}
	}
	return nil
}
