package heap

// Stacks are numbers of the owner's beside the records of used blocks, where these were asked for. They have a slab of their
// own, so that records stay one cache line and nothing is paid while none are kept.
type Stacks struct {
	of []uint32 // by ID, as far as one was set; nil unless they are kept
}

// Keep has used blocks keep their numbers, or forgets all of them.
func (s *Stacks) Keep(on bool) {
	switch {
	case !on:
		s.of = nil
	case s.of == nil:
		s.of = make([]uint32, 64)
	}
}

// Set gives a used block its number, which goes when the block is freed. Where none are kept it does nothing.
func (s *Stacks) Set(id ID, n uint32) {
	if s.of == nil {
		return
	}
	if more := int(id) + 1 - len(s.of); more > 0 {
		s.of = append(s.of, make([]uint32, more)...)
	}
	s.of[id] = n
}

func (s *Stacks) forget(id ID) {
	if int(id) < len(s.of) {
		s.of[id] = 0
	}
}

// Of is the number of a block, 0 for none.
func (s *Stacks) Of(id ID) uint32 {
	if int(id) >= len(s.of) {
		return 0
	}
	return s.of[id]
}
