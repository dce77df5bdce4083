package engine

import (
	"github.com/cistern-gpu/cistern/internal/engine/journal"
	"github.com/cistern-gpu/cistern/internal/heap"
	"github.com/cistern-gpu/cistern/memory"
)

// TagUsage adds up the live blocks by tag, the most bytes first; those without a tag come under 0. It looks at every
// block.
func (v *Views) TagUsage() []memory.TagUse {
	v.gpu.mu.Lock()
	defer v.gpu.mu.Unlock()
	return v.usage.byTag()
}

// byTag is TagUsage. The caller holds Device.mu and nothing else.
//
// +checklocks:us.gpu.mu
func (us *usage) byTag() []memory.TagUse {
	return us.sum(func(_ *streamHeap, _ heap.ID, b *heap.Block) uint32 { return journal.TagOf(b.Tag) }).Tags()
}
