package heap

// KeepStacks has used blocks keep a number of the owner's beside their record, where they were asked for, or forgets all
// of them. The numbers have a slab of their own, so that records stay one cache line and nothing is paid while none are
// kept.
func (h *Heap) KeepStacks(on bool) {
	switch {
	case !on:
		h.stacks = nil
	case h.stacks == nil:
		h.stacks = make([]uint32, len(h.blocks), cap(h.blocks))
	}
}

// SetStack gives a used block its number, which goes when the block is freed. Where none are kept it does nothing.
func (h *Heap) SetStack(id ID, n uint32) {
	if h.stacks != nil {
		h.stacks[id] = n
	}
}

// Stack is the number of a block, 0 for none.
func (h *Heap) Stack(id ID) uint32 {
	if h.stacks == nil {
		return 0
	}
	return h.stacks[id]
}
