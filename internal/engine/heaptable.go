package engine

import (
	"sync/atomic"

	"github.com/cistern-gpu/cistern/internal/engine/arena"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
)

// heapTable is the stream heaps of a pool, by stream index × classes + class. It is read without a lock; a stream heap that was
// dissolved may still be seen then, and is empty. Holders of Device.mu change it.
type heapTable struct {
	list atomic.Pointer[[]atomic.Pointer[streamHeap]]
}

// of is the stream heap of (stream, class), nil while it does not exist.
func (h *heapTable) of(st *Stream, class int) *streamHeap {
	list := *h.list.Load()
	if i := uint(st.index.Load())*quota.NumClasses + uint(class); i < uint(len(list)) { // -1 is beyond any list
		// The index is the stream's among those of its device, which may be another one, or was another stream's.
		if s := list[i].Load(); s != nil && s.stream == st {
			return s
		}
	}
	return nil
}

// arenaOf is the arena of the stream, nil while it does not exist.
func (h *heapTable) arenaOf(st *Stream) *arena.Arena {
	for class := range quota.NumClasses {
		if s := h.of(st, class); s != nil {
			return s.arena
		}
	}
	return nil
}

// add makes a stream heap known by its stream and class.
func (h *heapTable) add(s *streamHeap) {
	i := int(s.stream.index.Load())*quota.NumClasses + s.class
	list := *h.list.Load()
	if i >= len(list) {
		more := make([]atomic.Pointer[streamHeap], max(i+1, 2*len(list)))
		for k := range list {
			more[k].Store(list[k].Load())
		}
		h.list.Store(&more)
		list = more
	}
	list[i].Store(s)
}

// remove undoes add.
func (h *heapTable) remove(s *streamHeap) {
	(*h.list.Load())[int(s.stream.index.Load())*quota.NumClasses+s.class].Store(nil)
}
