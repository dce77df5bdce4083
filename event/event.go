// Package event holds the one record of an allocation event. The engine's history ring is made of it, trace readers
// produce it, trace writers and replay consume it.
package event

// Kind says what happened. The names are PyTorch's (torch/csrc/cuda/memory_snapshot.cpp).
type Kind uint8

const (
	None          Kind = iota
	Alloc              // a block was handed out
	FreeRequested      // its owner gave it back; other streams may still use it
	FreeCompleted      // it may be reused from here on
	SegmentAlloc       // a segment was got from the driver
	SegmentFree        // a segment was given back
	SegmentMap         // physical memory was mapped into a segment
	SegmentUnmap       // and unmapped
	Snapshot           // a snapshot was taken
	OOM                // a request failed: Size is the rounded size, Addr is the device's free bytes then
	Annotation         // a user's mark
	Retry              // cached memory was given back or moved to meet a request (Cistern's reclaim stages; Flags is the stage)
	NumKinds
)

var names = [NumKinds]string{"none", "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
	"segment_map", "segment_unmap", "snapshot", "oom", "annotate", "retry"}

// String is PyTorch's word for the kind.
func (k Kind) String() string {
	if k < NumKinds {
		return names[k]
	}
	return "invalid"
}

// Parse is the kind that PyTorch calls name; ok is false when there is none.
func Parse(name string) (k Kind, ok bool) {
	for i := Alloc; i < NumKinds; i++ {
		if names[i] == name {
			return i, true
		}
	}
	return None, false
}

// Event is one event on one device. It holds no pointers, so that a million of them cost the garbage collector
// nothing.
type Event struct {
	Addr   uint64 // device address; for OOM the device's free bytes at that moment (PyTorch: device_free)
	Size   uint64 // bytes: as requested for Alloc and the frees, rounded for OOM, whole for segments
	TimeUS int64  // microseconds, on the recorder's clock
	Handle uint64 // SegmentMap, SegmentUnmap: number of the physical handle, 0 where unknown
	Stream uint32 // index into the list of streams that goes with the events
	Pool   uint32 // index into the list of pools that goes with the events; 0 is the default pool or unknown
	// Stack is a number in the table of stacks that goes with the events, 0 for none: where the event was caused; for
	// frees that do not say, where the block was asked for (as PyTorch has it).
	Stack  uint32
	Thread uint32 // the kernel's number of the thread that caused the event, 0 unknown
	Tag    uint16 // Alloc, FreeRequested, FreeCompleted, OOM: the request's number, 0 is none
	Kind   Kind
	Flags  uint8
	// Library numbers the caller's library, in files with tags: an index into the list of libraries that goes with the events,
	// 0 for none.
	Library uint8
}
