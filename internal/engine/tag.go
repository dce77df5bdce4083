package engine

import (
	"fmt"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// AllocTagged is Alloc with a tag, which Snapshot, Base, the history and TagUsage show.
func (d *Device) AllocTagged(size uint64, st *Stream, tag uint32) (cuda.Ptr, error) {
	p := st.route.Load()
	if p == nil || p.dev != d {
		p = d.pool0
	}
	by := origin{label: tag}
	if catch := d.catch.Load(); catch != nil {
		by.stack = (*catch)(size)
	}
	return p.allocTagged(size, st, by)
}

// AllocTagged is Alloc with a tag, which Snapshot, Base, the history and TagUsage show.
func (p *Pool) AllocTagged(size uint64, st *Stream, tag uint32) (cuda.Ptr, error) {
	by := origin{label: tag}
	if catch := p.dev.catch.Load(); catch != nil {
		by.stack = (*catch)(size)
	}
	return p.allocTagged(size, st, by)
}

func (p *Pool) allocTagged(size uint64, st *Stream, by origin) (cuda.Ptr, error) {
	if by.label > memory.MaxTag {
		return 0, fmt.Errorf("tag %d: the largest is %d", by.label, memory.MaxTag)
	}
	if by.label != 0 && !p.dev.state.usage.tagged.Load() {
		p.dev.state.usage.tagged.Store(true)
	}
	return p.alloc(size, st, by)
}

// TagUsage adds up the live blocks by tag, the most bytes first; those without a tag come under 0. It looks at every
// block.
func (v *Views) TagUsage() []memory.TagUse {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return v.usage.byTag()
}

// tagUsage is TagUsage. The caller holds Device.mu and nothing else.
//
// +checklocks:us.gpu.mu
func (us *usage) byTag() []memory.TagUse {
	return us.sum(func(_ *streamHeap, _ heap.ID, b *heap.Block) uint32 { return journal.TagOf(b.Tag) }).Tags()
}
