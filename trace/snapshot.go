package trace

import (
	"fmt"
	"math"
	"strconv"
	"unsafe"

	"github.com/cistern-gpu/cistern/event"
)

// What a PyTorch snapshot is made of, as the pickle machine meets it: the role of each container, and what becomes of
// its contents. An entry of device_traces becomes an event.Event as soon as its dict is complete; frames become
// indices; segments and blocks become rows. derive.go makes Traces of the result.

// Ids of the strings that mean something: the machine interns them first, in this order.
const (
	sAction = iota
	sAddr
	sSize
	sStream
	sTimeUS
	sFrames
	sDeviceFree
	sPoolID
	sHandle
	sFlags
	sCompileContext
	sUserMetadata
	sDevice
	sAddress
	sTotalSize
	sAllocatedSize
	sActiveSize
	sRequestedSize
	sSegmentType
	sSegmentPoolID
	sIsExpandable
	sBlocks
	sState
	sFilename
	sName
	sLine
	sLarge
	sActiveAllocated
	sActivePendingFree
	sActiveAwaitingFree
	sInactive
	sSegments
	sDeviceTraces
	sAllocatorSettings
	sAlloc // the actions, in the order of event.Kind
)

var known = []string{"action", "addr", "size", "stream", "time_us", "frames", "device_free", "pool_id", "handle", "flags",
	"compile_context", "user_metadata", "device", "address", "total_size", "allocated_size", "active_size",
	"requested_size", "segment_type", "segment_pool_id", "is_expandable", "blocks", "state", "filename", "name", "line",
	"large", "active_allocated", "active_pending_free", "active_awaiting_free", "inactive", "segments", "device_traces",
	"allocator_settings"}

const maxDevices = 256

// What a trace entry, a segment and a block have said so far, as bits.
const (
	hasAction = 1 << iota
	hasAddr
	hasSize
	hasStream
	hasTime
	hasDeviceFree
	hasPool
	hasTotal
	hasState
	hasRequested
	hasDevice
	hasType
)

// none is the index of nothing, where 0 is something.
const none = math.MaxUint32

// snapshot is what the machine has understood of the file.
type snapshot struct {
	rootMade         bool
	tracesMade       bool
	segmentsMade     bool
	segmentsAppended int
	tracesAppended   int
	hasSettings      bool

	devices []*rawTrace
	// The entry whose dict is being filled. It is added to its device when its list takes it, or when the next entry
	// begins.
	ev      event.Event
	evHas   uint32
	evDev   int
	evOpen  bool
	evCount uint64 // entries begun, in all devices

	segments []rawSegment
	blocks   []rawBlock

	frames []rawFrame // one for each frame dict
	// Stack lists: the one being filled, then the stack each became.
	listStack []uint32
	curList   uint64
	curOpen   bool
	curIDs    []uint32
	stacks    stackTable

	pairs   []PoolID
	pairIDs map[PoolID]uint32

	settings    []setting
	subSettings uint32 // dicts inside allocator_settings

	unknownAction map[uint64]int // string id → times
}

// rawTrace is one device's events in pieces.
type rawTrace struct {
	pieces  [][]event.Event
	n       int
	streams interned
	pools   map[uint32]uint32 // index in snapshot.pairs → index in poolIDs
	poolIDs []PoolID
	hasPool bool // events say their own pool
	noTime  int  // events without a time
	// the last piece and its fill, kept here to be near
	last []event.Event
}

type rawSegment struct {
	has        uint32
	device     uint32
	addr       uint64
	size       uint64
	stream     uint64
	pool       uint32 // in pairs, none if not said
	stack      uint32
	large      bool
	expandable bool
	blocksMade bool
	first      uint32 // blocks[first : first+n]
	n          uint32
	appended   uint32
}

type rawBlock struct {
	addr, size, requested uint64
	has                   uint32
	stack                 uint32
	state                 BlockState
}

type rawFrame struct {
	file, name uint32 // in strs
	line       int32
	id         uint32 // in stacks.frames, none until asked for
}

// setting is an entry of allocator_settings; value.k == kSubSettings groups those whose parent it is.
type setting struct {
	key    uint32
	parent uint32 // none, or the number of the dict it lies in
	v      value
}

func (s *snapshot) init(m *machine) {
	for _, k := range known {
		m.strs.id([]byte(k))
	}
	for k := event.Alloc; k < event.NumKinds; k++ {
		m.strs.id([]byte(k.String()))
	}
	s.pairIDs = map[PoolID]uint32{}
	s.pairs = append(s.pairs, PoolID{})
	s.pairIDs[PoolID{}] = 0
	s.stacks.init(m.b)
}

// Roles. A container's place is read off the stack below it: a MARK above its list, the list itself (APPEND of one
// item has no MARK), a sibling that the list has not taken yet, or a key.

func (m *machine) newDict() error {
	if len(m.stack) == 0 {
		if m.rootMade {
			return fmt.Errorf("a second snapshot; expected STOP")
		}
		m.rootMade = true
		return m.push(value{k: kRoot})
	}
	top := &m.stack[len(m.stack)-1]
	at := top.k
	if at == kMark || at == kEvent || at == kSegment || at == kBlock || at == kFrame {
		// The list below the MARK: this is its next item.
		if p := m.lastMark(); p > 0 && (at == kMark || m.stack[p-1].k == listOf[at]) {
			if at == kEvent {
				// The entry below is complete. Its slot serves for this one too: the list gets them all.
				if err := m.closeEvent(); err != nil {
					return err
				}
				top.u = m.evCount
				return m.openEvent(int(m.stack[p-1].u))
			}
			at = m.stack[p-1].k
		}
	}
	switch at {
	case kTrace:
		dev := int(top.u)
		if top.k == kMark {
			dev = int(m.stack[len(m.stack)-2].u)
		}
		if err := m.push(value{kEvent, m.evCount}); err != nil {
			return err
		}
		return m.openEvent(dev)
	case kSegments:
		return m.openSegment()
	case kBlocks:
		return m.openBlock()
	case kFrames:
		var err error
		if m.frames, err = grow(m.b, m.frames, 16); err != nil {
			return err
		}
		m.frames = append(m.frames, rawFrame{none, none, 0, none})
		return m.push(value{kFrame, uint64(len(m.frames) - 1)})
	case kStr:
		switch parent := m.parentDict(); parent.k {
		case kRoot:
			if top.u == sAllocatorSettings {
				if m.hasSettings {
					return fmt.Errorf("allocator_settings a second time")
				}
				m.hasSettings = true
				return m.push(value{k: kSettings})
			}
			if len(m.stack) >= 2 && m.stack[len(m.stack)-2].k == kSettings {
				return m.openSubSettings()
			}
		case kSettings:
			return m.openSubSettings()
		}
	}
	return m.push(value{k: kSkipDict})
}

func (m *machine) openSubSettings() error {
	m.subSettings++
	return m.push(value{kSubSettings, uint64(m.subSettings - 1)})
}

// listOf is the list that a kind of dict is an item of.
var listOf = [numKinds]kind{kEvent: kTrace, kSegment: kSegments, kBlock: kBlocks, kFrame: kFrames}

func (m *machine) lastMark() int {
	if len(m.marks) == 0 {
		return 0
	}
	return m.marks[len(m.marks)-1]
}

// parentDict is the dict that a value pushed now would belong to, with its key on top of the stack: the one below the
// last MARK, or, for SETITEM without a MARK, the one right below the key.
func (m *machine) parentDict() value {
	n := len(m.stack)
	if p := m.lastMark(); len(m.marks) > 0 && p > 0 && (n-1-p)%2 == 1 {
		return m.stack[p-1]
	}
	if n >= 2 {
		return m.stack[n-2]
	}
	return value{}
}

func (m *machine) newList() error {
	n := len(m.stack)
	if n == 0 {
		return m.push(value{k: kSkipList})
	}
	top := m.stack[n-1]
	switch top.k {
	case kStr:
		switch parent := m.parentDict(); parent.k {
		case kRoot:
			switch top.u {
			case sDeviceTraces:
				if m.tracesMade {
					return fmt.Errorf("device_traces a second time")
				}
				m.tracesMade = true
				return m.push(value{k: kTraces})
			case sSegments:
				if m.segmentsMade {
					return fmt.Errorf("segments a second time")
				}
				m.segmentsMade = true
				return m.push(value{k: kSegments})
			}
		case kSegment:
			switch top.u {
			case sBlocks:
				s := &m.segments[parent.u]
				if s.blocksMade {
					return fmt.Errorf("blocks a second time")
				}
				s.blocksMade, s.first = true, uint32(len(m.blocks))
				return m.push(value{kBlocks, parent.u})
			case sFrames:
				return m.openFrames()
			}
		case kEvent, kBlock:
			if top.u == sFrames {
				return m.openFrames()
			}
		}
	case kMark:
		if n >= 2 && m.stack[n-2].k == kTraces {
			return m.openTrace()
		}
	case kTraces:
		return m.openTrace()
	case kTrace:
		if p := m.lastMark(); p > 0 && m.stack[p-1].k == kTraces {
			return m.openTrace()
		}
	}
	return m.push(value{k: kSkipList})
}

func (m *machine) openTrace() error {
	if len(m.devices) >= maxDevices {
		return fmt.Errorf("more than %d devices", maxDevices)
	}
	m.devices = append(m.devices, &rawTrace{pools: map[uint32]uint32{0: 0}, poolIDs: []PoolID{{}}})
	return m.push(value{kTrace, uint64(len(m.devices) - 1)})
}

func (m *machine) openEvent(dev int) error {
	if m.evOpen {
		return fmt.Errorf("a trace entry inside another")
	}
	m.ev, m.evHas, m.evDev, m.evOpen = event.Event{}, 0, dev, true
	m.evCount++
	return nil
}

// closeEvent checks the entry that is complete now and adds it to its device.
func (m *machine) closeEvent() error {
	d := m.devices[m.evDev]
	if !m.evOpen {
		return fmt.Errorf("a trace entry that is not new")
	}
	m.evOpen = false
	var missing string
	switch {
	case m.evHas&hasAction == 0:
		missing = "action"
	case m.ev.Kind == event.None: // an action that we do not know: counted in setEvent
		return nil
	case m.evHas&(hasAddr|hasDeviceFree) == 0 && m.ev.Kind <= event.SegmentUnmap:
		missing = "addr"
	case m.evHas&hasSize == 0 && (m.ev.Kind <= event.SegmentUnmap || m.ev.Kind == event.OOM):
		missing = "size"
	}
	if missing != "" {
		return &Error{Offset: m.in.offset(), Device: m.evDev, Event: d.n,
			Msg: fmt.Sprintf("the trace entry has no %q", missing)}
	}
	if m.evHas&hasStream == 0 {
		m.ev.Stream = d.streams.id(0)
	}
	if m.evHas&hasTime == 0 {
		d.noTime++
	}
	return d.add(m.b, m.ev)
}

// add appends e, with the memory charged.
func (d *rawTrace) add(b *budget, e event.Event) error {
	if len(d.last) == cap(d.last) {
		n := min(max(64, d.n), 32<<10)
		if err := b.take(int64(n) * eventSize); err != nil {
			return err
		}
		d.last = make([]event.Event, 0, n)
		d.pieces = append(d.pieces, nil)
	}
	d.last = append(d.last, e)
	d.pieces[len(d.pieces)-1] = d.last
	d.n++
	return nil
}

// join makes one list of the pieces, and drops them.
func (d *rawTrace) join(b *budget) ([]event.Event, error) {
	if err := b.take(int64(d.n) * eventSize); err != nil {
		return nil, err
	}
	events := make([]event.Event, 0, d.n)
	for i, p := range d.pieces {
		events = append(events, p...)
		d.pieces[i] = nil
	}
	b.give(int64(d.n) * eventSize)
	d.pieces, d.last = nil, nil
	return events, nil
}

const eventSize = int64(unsafe.Sizeof(event.Event{}))

func (m *machine) openSegment() error {
	var err error
	if m.segments, err = grow(m.b, m.segments, 72); err != nil {
		return err
	}
	m.segments = append(m.segments, rawSegment{pool: none})
	return m.push(value{kSegment, uint64(len(m.segments) - 1)})
}

func (m *machine) openBlock() error {
	s := &m.segments[len(m.segments)-1]
	if int(s.first+s.n) != len(m.blocks) {
		return fmt.Errorf("a block in the list of another segment")
	}
	var err error
	if m.blocks, err = grow(m.b, m.blocks, 40); err != nil {
		return err
	}
	m.blocks = append(m.blocks, rawBlock{})
	s.n++
	return m.push(value{kBlock, uint64(len(m.blocks) - 1)})
}

func (m *machine) openFrames() error {
	if err := m.closeFrames(); err != nil {
		return err
	}
	var err error
	if m.listStack, err = grow(m.b, m.listStack, 4); err != nil {
		return err
	}
	m.curList, m.curOpen = uint64(len(m.listStack)), true
	m.curIDs = m.curIDs[:0]
	m.listStack = append(m.listStack, 0)
	return m.push(value{kFrames, m.curList})
}

// closeFrames gives the list that was being filled its stack.
func (m *machine) closeFrames() error {
	if !m.curOpen {
		return nil
	}
	m.curOpen = false
	id, err := m.stacks.stack(m.curIDs)
	m.listStack[m.curList] = id
	return err
}

// stackOf is the stack that a value under "frames" is.
func (m *machine) stackOf(v value) (uint32, error) {
	switch v.k {
	case kFrames:
		if m.curOpen && v.u == m.curList {
			if err := m.closeFrames(); err != nil {
				return 0, err
			}
		}
		return m.listStack[v.u], nil
	case kNone, kSkipList:
		return 0, nil
	}
	return 0, fmt.Errorf("frames is %s; expected a list", v.k)
}

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
	case kFrames:
		if !m.curOpen || list.u != m.curList {
			return fmt.Errorf("a stack that changes after its use")
		}
		for _, v := range items {
			if v.k != kFrame {
				return fmt.Errorf("frames holds %s; expected dicts", v.k)
			}
			f := &m.frames[v.u]
			if f.id == none {
				id, err := m.stacks.frame(m.strs, f)
				if err != nil {
					return err
				}
				f.id = id
			}
			var err error
			if m.curIDs, err = grow(m.b, m.curIDs, 4); err != nil {
				return err
			}
			m.curIDs = append(m.curIDs, f.id)
		}
		return nil
	}
	return fmt.Errorf("APPENDS to %s", list.k)
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
		case kSettings, kSubSettings:
			s := setting{uint32(k.u), none, v}
			if dict.k == kSubSettings {
				s.parent = uint32(dict.u)
			}
			if m.settings, err = grow(m.b, m.settings, 24); err == nil {
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
		m.evHas |= hasAction
		if v.u >= sAlloc && v.u < sAlloc+uint64(event.NumKinds)-1 {
			m.ev.Kind = event.Kind(v.u - sAlloc + uint64(event.Alloc))
			break
		}
		m.ev.Kind = event.None
		if m.unknownAction == nil {
			m.unknownAction = map[uint64]int{}
		}
		if len(m.unknownAction) < 16 || m.unknownAction[v.u] > 0 {
			m.unknownAction[v.u]++
		}
	case sAddr, sDeviceFree:
		// Before 2.1 addresses were written as signed numbers; none that high is seen on a GPU.
		m.ev.Addr, err = number(v, known[key])
		m.evHas |= hasAddr
	case sSize:
		m.ev.Size, err = number(v, "size")
		m.evHas |= hasSize
	case sStream:
		if v.k != kInt && v.k != kNeg {
			return fmt.Errorf("stream is %s; expected an int", v.k)
		}
		if m.ev.Stream, err = d.streams.charged(m.b, v.u); err != nil {
			return err
		}
		m.evHas |= hasStream
	case sTimeUS:
		if v.k == kFloat {
			m.ev.TimeUS = int64(math.Float64frombits(v.u))
		} else if v.k != kInt && v.k != kNeg || v.k == kInt && v.u > math.MaxInt64 {
			return fmt.Errorf("time_us is %s; expected an int", v.k)
		} else {
			m.ev.TimeUS = int64(v.u)
		}
		m.evHas |= hasTime
	case sFrames:
		m.ev.Stack, err = m.stackOf(v)
	case sPoolID, sSegmentPoolID:
		if v.k == kNone {
			break
		}
		if v.k != kPair {
			return fmt.Errorf("%s is %s; expected a tuple of two ints", known[key], v.k)
		}
		d.hasPool = true
		id, ok := d.pools[uint32(v.u)]
		if !ok {
			if err := m.b.take(96); err != nil {
				return err
			}
			id = uint32(len(d.poolIDs))
			d.poolIDs = append(d.poolIDs, m.pairs[v.u])
			d.pools[uint32(v.u)] = id
		}
		m.ev.Pool = id
	case sHandle:
		m.ev.Handle, err = number(v, "handle")
	case sFlags:
		var n uint64
		n, err = number(v, "flags")
		m.ev.Flags = uint8(n)
	}
	return err
}

func (m *machine) setSegment(s *rawSegment, id, key uint64, v value) (err error) {
	switch key {
	case sDevice:
		var n uint64
		if n, err = number(v, "device"); err == nil && n >= maxDevices {
			err = fmt.Errorf("device is %d; expected less than %d", n, maxDevices)
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
			return fmt.Errorf("stream is %s; expected an int", v.k)
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
			b.state = Active
		case v.k == kStr && (v.u == sActivePendingFree || v.u == sActiveAwaitingFree):
			b.state = PendingFree
		case v.k == kStr && v.u == sInactive:
			b.state = Inactive
		case v.k == kStr:
			return fmt.Errorf("state is %s; expected active_allocated, active_pending_free or inactive",
				strconv.Quote(clip(m.strs.get(v.u))))
		default:
			return fmt.Errorf("state is %s; expected a string", v.k)
		}
		b.has |= hasState
	case sFrames:
		b.stack, err = m.stackOf(v)
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
			return fmt.Errorf("line is %s; expected an int", v.k)
		}
	}
	return nil
}

// finish checks, at STOP, that what was begun was also kept.
func (m *machine) finish() error {
	switch {
	case !m.tracesMade:
		return fmt.Errorf("no device_traces in the file; expected a snapshot that PyTorch's torch.cuda.memory wrote")
	case m.tracesAppended != len(m.devices), m.segmentsAppended != len(m.segments), m.evOpen:
		return fmt.Errorf("a list that belongs nowhere")
	}
	m.b.give(int64(len(m.memo.chunks)) * memoChunk * 8)
	m.memo, m.stack, m.marks = memo{}, nil, nil
	return m.closeFrames()
}

// clip shortens s for a message.
func clip(s []byte) string {
	if len(s) > 40 {
		return string(s[:40]) + "…"
	}
	return string(s)
}
