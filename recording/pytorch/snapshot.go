package pytorch

import (
	"fmt"
	"math"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/tables"
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
	sTag
	sLibrary
	sThread
	sThreadName
	sEnvironment
	sNothing // said where there is no user_metadata
	sNotAvailable
	sAlloc // the actions, in the order of event.Kind
)

var known = []string{"action", "addr", "size", "stream", "time_us", "frames", "device_free", "pool_id", "handle", "flags",
	"compile_context", "user_metadata", "device", "address", "total_size", "allocated_size", "active_size",
	"requested_size", "segment_type", "segment_pool_id", "is_expandable", "blocks", "state", "filename", "name", "line",
	"large", "active_allocated", "active_pending_free", "active_awaiting_free", "inactive", "segments", "device_traces",
	"allocator_settings", "tag", "library", "thread", "thread_name", "cistern", "", "N/A"}

// What a trace entry, a segment and a block have said so far, as bits.
const (
	hasAction = 1 << iota
	hasAddr
	hasSize
	hasStream
	hasTime
	hasTotal
	hasState
	hasRequested
	hasDevice
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
	hasEnvironment   bool

	devices []*rawTrace
	// The entry whose dict is being filled. It is added to its device when its list takes it, or when the next entry
	// begins.
	ev      event.Event
	evHas   uint32
	evDev   int
	evOpen  bool
	evLabel said
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

	labels []rawLabel // one for each dict of user_metadata

	pairs   []recording.PoolID
	pairIDs map[recording.PoolID]uint32

	settings    []setting
	environment []setting
	subSettings uint32 // dicts inside allocator_settings and environment

	unknownAction map[uint64]int // string id → times
}

// rawTrace is one device's events and tables.
type rawTrace struct {
	tables.EventList
	streams tables.Interned
	pools   map[uint32]uint32 // index in snapshot.pairs → index in poolIDs
	poolIDs []recording.PoolID
	hasPool bool // events say their own pool
	noTime  int  // events without a time
	names   labelNames
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
	state                 recording.BlockState
	label                 said
}

type rawFrame struct {
	file, name uint32 // in strs
	line       int32
	id         uint32 // in stacks.frames, none until asked for
}

// setting is an entry of allocator_settings or environment; value.k == kSubSettings groups those whose parent it is.
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
	s.pairIDs = map[recording.PoolID]uint32{}
	s.pairs = append(s.pairs, recording.PoolID{})
	s.pairIDs[recording.PoolID{}] = 0
	s.stacks.init(m.b)
}

// finish checks, at STOP, that what was begun was also kept.
func (m *machine) finish() error {
	switch {
	case !m.tracesMade:
		return fmt.Errorf("no device_traces in the file; expected a snapshot that PyTorch's torch.cuda.memory wrote")
	case m.tracesAppended != len(m.devices), m.segmentsAppended != len(m.segments), m.evOpen:
		return fmt.Errorf("a list that belongs nowhere")
	}
	m.b.Give(int64(len(m.memo.chunks)) * memoChunk * 8)
	m.memo, m.stack, m.marks = memo{}, nil, nil
	return m.closeFrames()
}
